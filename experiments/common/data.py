"""Images and sentences, each as the networks expect them."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from experiments.common.results import data_file
from linnet._common import atomic_write

CIFAR10_MEAN, CIFAR10_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEAN, STD = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
ROTATIONS = 4
PAD = 4  # pixels that an image is shifted by at most


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
    x, y = (t[:count] for t in grayscale(folder, "mnist", train))
    x = x.float().unsqueeze(1) / 255
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
    return (larger - MEAN) / STD


def cifar10(folder: Path, part: str, *, count: int | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 images (n, 3, 32, 32), normalized as the ResNets expect, and labels (n,).

    Args:
        folder: Holds cifar10_test.npz and cifar10_train_1.npz to cifar10_train_5.npz.
        part: "test", or "train_1" to "train_5", 10,000 images each; "train" for the first two, "all" for the five.
        count: The first so many of a file only; of "all", the first so many of them.
    """
    if part == "train":
        both = [cifar10(folder, one, count=count) for one in ("train_1", "train_2")]
        return torch.cat([x for x, _ in both]), torch.cat([y for _, y in both])
    if part == "all":
        x, y = color_bytes(folder)
        return (x[:count].float() / 255 - MEAN) / STD, y[:count]
    if part not in ("test", *TRAINING):
        raise ValueError(f"part must be 'test', 'train_1' to 'train_5', 'train' or 'all'; got {part!r}.")
    pixels, labels = _cifar10_file(data_file(folder, f"cifar10_{part}.npz"))
    x, y = torch.from_numpy(pixels[:count]).float() / 255, torch.from_numpy(labels[:count]).long()
    return (x - MEAN) / STD, y


TRAINING = tuple(f"train_{i}" for i in range(1, 6))


def color_bytes(folder: Path) -> tuple[Tensor, Tensor]:
    """All 50,000 training images of CIFAR-10 (n, 3, 32, 32) in uint8, and labels (n,).

    The five files are unpacked side by side, once: other runs read a copy in the folder for temporary files.
    """
    files = [data_file(folder, f"cifar10_{part}.npz") for part in TRAINING]
    seen = hashlib.sha256("".join(f"{file.stat().st_size} " for file in files).encode()).hexdigest()[:12]
    copied = Path(tempfile.gettempdir()) / f"linnet_cifar10_{os.getuid()}_{seen}.npy"
    if not copied.exists():
        with ThreadPoolExecutor(len(files)) as pool:  # unpacking does not hold Python's lock
            parts = list(pool.map(_cifar10_file, files))
        # A row holds the bytes of an image and its label.
        rows = np.concatenate([np.concatenate([x.reshape(len(x), -1), y[:, None]], 1) for x, y in parts])
        with atomic_write(copied) as temporary, open(temporary, "wb") as file:
            np.save(file, rows)
    rows = torch.from_numpy(np.load(copied, allow_pickle=False))
    return rows[:, :-1].reshape(-1, 3, 32, 32).contiguous(), rows[:, -1].long()


@lru_cache(3)  # the files take seconds to unpack
def _cifar10_file(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """All images (n, 3, 32, 32) of a file, and labels."""
    with np.load(path, allow_pickle=False) as stored:
        return decode(stored["residual"]), stored["y"]


def decode(residual: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images (n, 3, 32, 32) from differences along both axes (3, n, 32, 32), modulo 256; red and blue less green."""
    x = np.cumsum(np.cumsum(residual, 2, dtype=np.uint8), 3, dtype=np.uint8)
    x[0] += x[1]
    x[2] += x[1]
    return np.ascontiguousarray(x.transpose(1, 0, 2, 3))


def color_images(folder: Path, part: str, *, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10 (n, 3, 32, 32) in [-1, 1] and labels (n,); arguments as for `cifar10`."""
    x, y = cifar10(folder, part, count=count)
    return 2 * (x * STD + MEAN) - 1, y


# Images that are turned, shifted and mirrored.


def rotate(x: Tensor) -> tuple[Tensor, Tensor]:
    """All images turned by 0, 90, 180 and 270 degrees, (4 n, ...), and by which (4 n,).

    >>> rotate(torch.arange(4.0).view(1, 1, 2, 2))[0][1, 0].tolist()
    [[1.0, 3.0], [0.0, 2.0]]
    """
    turned = torch.cat([torch.rot90(x, k, (2, 3)) for k in range(ROTATIONS)])
    return turned, torch.arange(ROTATIONS, device=x.device).repeat_interleave(len(x))


def turn(x: Tensor, degrees: Tensor) -> Tensor:
    """Images (n, 1, h, w) turned counterclockwise by angles (n,) about their center, zero where nothing was."""
    angle = degrees * (math.pi / 180)
    zero = torch.zeros_like(angle)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)], 1
    )
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def augment(x: Tensor, generator: torch.Generator, *, mirror: bool = True) -> Tensor:
    """Each image (n, 3, h, w) shifted by up to four pixels and, unless told otherwise, mirrored half of the time.

    >>> augment(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).unique()
    tensor([1.])
    """
    n, _, h, w = x.shape
    padded = F.pad(x, (PAD,) * 4, mode="reflect")
    shift = torch.randint(2 * PAD + 1, (2, n, 1), generator=generator, device=x.device)
    rows = shift[0] + torch.arange(h, device=x.device)
    columns = shift[1] + torch.arange(w, device=x.device)
    mirrored = torch.rand(n, 1, generator=generator, device=x.device) < 0.5 * mirror
    columns = torch.where(mirrored, columns.flip(1), columns)
    example = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


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
