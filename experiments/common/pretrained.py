"""Trained networks and the images they were trained on, each as the other expects it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.models import ResNet
from experiments.common import data_file, replacing

Net = TypeVar("Net", bound=nn.Module)

CIFAR10_MEAN, CIFAR10_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling for images (n, 1, 32, 32); its logits.

    >>> net = LeNet5()
    >>> sum(p.numel() for p in net.parameters()), net(torch.zeros(3, 1, 32, 32)).shape
    (61706, torch.Size([3, 10]))
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.convnet = nn.ModuleDict({"c1": nn.Conv2d(1, 6, 5), "c3": nn.Conv2d(6, 16, 5), "c5": nn.Conv2d(16, 120, 5)})
        self.fc = nn.ModuleDict({"f6": nn.Linear(120, 84), "f7": nn.Linear(84, classes)})

    def forward(self, x: Tensor) -> Tensor:
        for name in ("c1", "c3"):
            x = F.max_pool2d(self.convnet[name](x).relu(), 2)
        x = self.convnet["c5"](x).relu().flatten(1)
        return self.fc["f7"](self.fc["f6"](x).relu())


class Discriminator(nn.Module):
    """DCGAN discriminator for images (n, 1, 28, 28) in [-1, 1]; the number (n,) before the sigmoid.

    >>> Discriminator()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3])
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()

        def convolution(d_in: int, d_out: int) -> nn.Conv2d:
            return nn.Conv2d(d_in, d_out, 4, stride=2, padding=1, bias=False)

        self.main = nn.Sequential(
            convolution(1, width),
            nn.LeakyReLU(0.2),
            convolution(width, 2 * width),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            convolution(2 * width, 4 * width),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2),
            convolution(4 * width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).flatten()


# Networks: trained where a folder of weights is given, else freshly drawn.


def lenet5(folder: Path | None, *, classes: int = 10, seed: int = 0) -> LeNet5:
    """LeNet-5 in eval mode; 99.08 % of MNIST's test images with the weights of the folder.

    Args:
        folder: Holds lenet5_mnist.safetensors; None draws new weights as torch's layers do.
        classes: Number of outputs; the stored network has 10.
        seed: For new weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return loaded(LeNet5(classes), folder, "lenet5_mnist")


def dcgan_discriminator(folder: Path | None, seed: int = 0, *, width: int = 64) -> Discriminator:
    """The discriminator in eval mode.

    Args:
        folder: Holds dcgan_discriminator_mnist.safetensors; None draws new weights as Radford et al. 2016 do,
            N(0, 0.02) for convolutions and N(1, 0.02) for the scales of batch norm; its running statistics are 0 and 1.
        seed: For new weights.
        width: Channels of the first layer; the stored network has 64.
    """
    net = Discriminator(width)
    draw_as_dcgan(net, seed)
    return loaded(net, folder, "dcgan_discriminator_mnist")


def draw_as_dcgan(net: nn.Module, seed: int) -> None:
    """New weights in place: N(0, 0.02) for convolutions, N(1, 0.02) for the scales of batch norm."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0.0, 0.02, generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02, generator=generator)


def resnet(folder: Path | None, depth: int = 20, *, seed: int = 0) -> ResNet:
    """ResNet for CIFAR-10 in eval mode; 91.73, 92.63 and 93.39 % of the test images with depth 20, 32 and 56.

    Args:
        folder: Holds resnet20_cifar10.safetensors (or 32, 56); None draws new weights as torch's layers do.
        depth: 6 blocks + 2.
        seed: For new weights.
    """
    if depth % 6 != 2:
        raise ValueError(f"A ResNet for CIFAR-10 has depth 6 b + 2 with b blocks a stage, as 20 or 56; got {depth}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return loaded(ResNet((depth - 2) // 6), folder, f"resnet{depth}_cifar10")


def minilm(folder: Path) -> Any:
    """The MiniLM-L6 sentence encoder in eval mode and float32, a BertModel of transformers without its pooler.

    Args:
        folder: Holds minilm_l6_h384_fp16.safetensors and the .json that describes it.
    """
    from transformers import BertConfig, BertModel  # slow to import

    name = "minilm_l6_h384_fp16"
    described = json.loads(data_file(folder, f"{name}.json").read_text(encoding="utf-8"))
    keys = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "layer_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "type_vocab_size",
    )
    config = BertConfig(**{key: described[key] for key in keys}, attn_implementation="eager")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    net = BertModel(config, add_pooling_layer=False)
    stored = load_file(data_file(folder, f"{name}.safetensors"))
    net.load_state_dict({key: t.float() for key, t in stored.items() if not key.startswith("pooler.")})
    return net.eval()


def loaded(net: Net, folder: Path | None, name: str) -> Net:
    """The network with the weights of folder/name.safetensors, if there is a folder, in eval mode."""
    if folder is not None:
        weights = load_file(data_file(folder, f"{name}.safetensors"))
        # Batch norm's count of batches is not stored everywhere, and in eval mode nothing reads it.
        counts = {key: value for key, value in net.state_dict().items() if key.endswith("num_batches_tracked")}
        net.load_state_dict({**counts, **weights})
    return net.eval()


def stored(net: nn.Module, folder: Path, name: str) -> Path:
    """Write the weights, as float16, to folder/name.safetensors, which `loaded` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: (t.half() if t.is_floating_point() else t).cpu().contiguous() for key, t in net.state_dict().items()}
    with replacing(folder / f"{name}.safetensors") as temporary:
        save_file(state, temporary)
    return folder / f"{name}.safetensors"


# Images.


def mnist(folder: Path, train: bool, *, network: str = "lenet5", count: int | None = None) -> tuple[Tensor, Tensor]:
    """MNIST images and labels as a network expects them.

    Args:
        folder: Holds mnist.npz.
        train: The training images instead of the test images.
        network: "lenet5": (n, 1, 32, 32) in [0, 1]; "dcgan": (n, 1, 28, 28) in [-1, 1].
        count: The first so many only.

    Returns:
        Images float32 and labels (n,).
    """
    if network not in ("lenet5", "dcgan"):
        raise ValueError(f"network must be 'lenet5' or 'dcgan', for images of its size and scale; got {network!r}.")
    part = "train" if train else "test"
    with np.load(data_file(folder, "mnist.npz"), allow_pickle=False) as stored:
        x = torch.from_numpy(stored[f"x_{part}"][:count]).float().unsqueeze(1) / 255
        y = torch.from_numpy(stored[f"y_{part}"][:count]).long()
    if network == "dcgan":
        return 2 * x - 1, y
    return F.interpolate(x, (32, 32), mode="bilinear", align_corners=False), y


def grayscale(folder: Path, name: str, train: bool) -> tuple[Tensor, Tensor]:
    """All images of MNIST or Fashion-MNIST as stored, (n, 28, 28) in uint8, and labels (n,).

    Args:
        folder: Holds mnist.npz and fashion_mnist.npz.
        name: "mnist" or "fashion_mnist".
        train: The training images instead of the test images.
    """
    part = "train" if train else "test"
    with np.load(data_file(folder, f"{name}.npz"), allow_pickle=False) as stored:
        return torch.from_numpy(stored[f"x_{part}"]), torch.from_numpy(stored[f"y_{part}"]).long()


def as_cifar10(x: Tensor) -> Tensor:
    """Gray images (n, 28, 28) in uint8 as the ResNets for CIFAR-10 expect images, (n, 3, 32, 32).

    >>> as_cifar10(torch.zeros(2, 28, 28, dtype=torch.uint8)).shape
    torch.Size([2, 3, 32, 32])
    """
    larger = F.interpolate(x.unsqueeze(1).float() / 255, (32, 32), mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
    return (larger - mean) / std


def cifar10(folder: Path, part: str, *, count: int | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 images (n, 3, 32, 32), normalized as the ResNets expect, and labels (n,).

    Args:
        folder: Holds cifar10_test.npz, cifar10_train_1.npz and cifar10_train_2.npz.
        part: "test", "train_1" or "train_2", 10,000 images each.
        count: The first so many only.
    """
    if part not in ("test", "train_1", "train_2"):
        raise ValueError(f"part must be 'test', 'train_1' or 'train_2'; got {part!r}.")
    pixels, labels = _cifar10_file(data_file(folder, f"cifar10_{part}.npz"))
    x, y = torch.from_numpy(pixels[:count]).float() / 255, torch.from_numpy(labels[:count]).long()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
    return (x - mean) / std, y


@lru_cache(3)  # the files take seconds to unpack
def _cifar10_file(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """All images (n, 3, 32, 32) of a file, and labels."""
    with np.load(path, allow_pickle=False) as stored:
        return decoded(stored["residual"]), stored["y"]


# Sentences.


def sst2(folder: Path, part: str) -> tuple[list[str], Tensor]:
    """Sentences of the Stanford Sentiment Treebank and their labels (n,), 1 for positive.

    Args:
        folder: Holds sst2/train.tsv, dev.tsv and test.tsv.
        part: "train", "dev" or "test": 6,920, 872 and 1,821 sentences.
    """
    lines = data_file(folder, f"sst2/{part}.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [line.rsplit("\t", 1) for line in lines if line]
    return [text for text, _ in pairs], torch.tensor([int(label) for _, label in pairs])


def word_pieces(folder: Path, sentences: list[str], *, longest: int = 64) -> tuple[Tensor, Tensor]:
    """Numbers of the pieces that the MiniLM encoder reads, (n, T), and their mask (n, T); T is at most ``longest``.

    Args:
        folder: Holds minilm_vocab.txt.
        sentences: n of them.
        longest: Pieces after which a sentence is cut.
    """
    from transformers import BertTokenizer  # slow to import

    tokenizer = BertTokenizer(str(data_file(folder, "minilm_vocab.txt")))
    found = tokenizer(sentences, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    return found["input_ids"], found["attention_mask"]


def decoded(residual: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images (n, 3, 32, 32) from differences along both axes (3, n, 32, 32), modulo 256; red and blue less green."""
    x = np.cumsum(np.cumsum(residual, 2, dtype=np.uint8), 3, dtype=np.uint8)
    x[0] += x[1]
    x[2] += x[1]
    return np.ascontiguousarray(x.transpose(1, 0, 2, 3))
