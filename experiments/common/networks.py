"""Networks: those that are supplied, those that `encoders` and `wrn` train, and small ones that are drawn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.models import ResNet, WideResNet
from experiments.common.data import ROTATIONS
from experiments.common.results import RESULTS, data_file, results_folder
from linnet._common import atomic_write
from linnet.scores.elbo import Bound
from linnet.testing.architectures.dense import mlp

Net = TypeVar("Net", bound=nn.Module)
LATENT = 100
NOISE = 0.05  # variance of a pixel in [-1, 1] around what the VAE decodes
DIGIT_WIDTHS = (16, 32)  # of the DCGAN of MNIST, as `train_gan` takes them
TRAINED = RESULTS / "encoders"
WRN = "wrn40_2_cifar10"


def load(net: Net, folder: Path | None, name: str) -> Net:
    """The network with the weights of folder/name.safetensors, if there is a folder, in eval mode."""
    if folder is not None:
        path = Path(folder) / f"{name}.safetensors"
        if folder.name in ("wrn", "encoders") and not path.exists():
            raise FileNotFoundError(
                f"The weights of {name} are not in the repository, and {path} does not exist. "
                f"`python -m experiments {folder.name} --device cuda` makes them (results/README.md says how)."
            )
        weights = load_file(data_file(folder, path.name))
        # Batch norm's count of batches is not stored everywhere, and in eval mode nothing reads it.
        counts = {key: value for key, value in net.state_dict().items() if key.endswith("num_batches_tracked")}
        net.load_state_dict({**counts, **weights})
    return net.eval()


def store(net: nn.Module, folder: Path, name: str) -> Path:
    """Write the weights, as float16, to folder/name.safetensors, which `load` reads."""
    state = {key: (t.half() if t.is_floating_point() else t).cpu().contiguous() for key, t in net.state_dict().items()}
    with atomic_write(folder / f"{name}.safetensors") as temporary:
        save_file(state, temporary)
    return folder / f"{name}.safetensors"


def draw_network(make: Callable[[], Net], seed: int) -> Net:
    """A network whose weights are drawn with a seed of their own, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


# Small networks.


def perceptron(widths: Sequence[int], *, activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers with an activation between them, drawn as torch's layers are.

    >>> perceptron((2, 5, 1))(torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    return draw_network(lambda: mlp(*widths, activation=activation), seed)


def lenet(
    size: int, outputs: int, *, channels: tuple[int, int] = (6, 16), hidden: int = 84, seed: int = 0
) -> nn.Module:
    """LeNet-3 for images (n, 1, size, size): two convolutions of 5 x 5 with max pooling, a hidden layer, the outputs.

    >>> net = lenet(28, 10)
    >>> sum(p.numel() for p in net.parameters()), net(torch.zeros(3, 1, 28, 28)).shape
    (25010, torch.Size([3, 10]))
    """
    first, second = channels
    left = ((size - 4) // 2 - 4) // 2

    def make() -> nn.Sequential:
        lower = [nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 5), nn.ReLU()]
        upper = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(second * left**2, hidden), nn.ReLU()]
        return nn.Sequential(*lower, *upper, nn.Linear(hidden, outputs))

    return draw_network(make, seed)


# Supplied networks: trained where a folder of weights is given, else freshly drawn.


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


def lenet5(folder: Path | None, *, classes: int = 10, seed: int = 0) -> LeNet5:
    """LeNet-5 in eval mode; 99.08 % of MNIST's test images with the weights of the folder.

    Args:
        folder: Holds lenet5_mnist.safetensors; None draws new weights as torch's layers do.
        classes: Number of outputs; the stored network has 10.
        seed: For new weights.
    """
    return load(draw_network(lambda: LeNet5(classes), seed), folder, "lenet5_mnist")


def convolve(d_in: int, d_out: int, size: int, stride: int, padding: int, *, up: bool = False) -> nn.Module:
    """A convolution without bias, or a transposed one."""
    return (nn.ConvTranspose2d if up else nn.Conv2d)(d_in, d_out, size, stride=stride, padding=padding, bias=False)


class Discriminator(nn.Module):
    """DCGAN discriminator for images (n, 1, 28, 28) in [-1, 1]; the number (n,) before the sigmoid.

    >>> Discriminator()(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3])
    """

    def __init__(self, width: int = 64, *, norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolve(1, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for d in (width, 2 * width):
            between = [nn.BatchNorm2d(2 * d)] if norm else []
            layers += [convolve(d, 2 * d, 4, 2, 1), *between, nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*layers, convolve(4 * width, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).flatten()


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
    return load(net, folder, "dcgan_discriminator_mnist")


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
    return load(draw_network(lambda: ResNet((depth - 2) // 6), seed), folder, f"resnet{depth}_cifar10")


def minilm(folder: Path) -> Any:
    """The MiniLM-L6 sentence encoder in eval mode and float32, a BertModel of transformers without its pooler.

    Args:
        folder: Holds minilm_l6_h384_fp16.safetensors and the .json that describes it.
    """
    from transformers import BertConfig, BertModel  # slow to import

    name = "minilm_l6_h384_fp16"
    described = json.loads(data_file(folder, f"{name}.json").read_text(encoding="utf-8"))
    keys = "hidden_size num_hidden_layers num_attention_heads intermediate_size layer_norm_eps vocab_size"
    keys += " max_position_embeddings type_vocab_size"
    config = BertConfig(**{key: described[key] for key in keys.split()}, attn_implementation="eager")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    net = BertModel(config, add_pooling_layer=False)
    stored = load_file(data_file(folder, f"{name}.safetensors"))
    net.load_state_dict({key: t.float() for key, t in stored.items() if not key.startswith("pooler.")})
    return net.eval()


class DigitVAE(nn.Module):
    """VAE of linear layers for images (n, 784) in [0, 1], of which it decodes the probabilities of ones."""

    def __init__(self, hidden: int = 400, latent: int = 20) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, hidden), nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.fc3, self.fc4 = nn.Linear(latent, hidden), nn.Linear(hidden, 784)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc1(x).relu()
        return self.fc21(h), self.fc22(h)

    def decode(self, z: Tensor) -> Tensor:
        return self.fc4(self.fc3(z).relu()).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])


def digit_vae(folder: Path) -> DigitVAE:
    """The VAE of MNIST that is supplied, in eval mode; the folder is that of the supplied weights."""
    return load(DigitVAE(), folder, "vae_mnist")


# Networks that are trained here.


class Generator(nn.Module):
    """DCGAN generator (Radford et al. 2016): from latents (n, 100) to images (n, 1, 28, 28) in [-1, 1].

    >>> Generator(4)(torch.zeros(3, 100)).shape
    torch.Size([3, 1, 28, 28])
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w, layers = width, []
        for shape in ((LATENT, 4 * w, 4, 1, 0), (4 * w, 2 * w, 3, 2, 1), (2 * w, w, 4, 2, 1)):
            layers += [convolve(*shape, up=True), nn.BatchNorm2d(shape[1]), nn.ReLU()]
        self.main = nn.Sequential(*layers, convolve(w, 1, 4, 2, 1, up=True), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


def untrained_generator(seed: int, *, width: int = 16) -> Generator:
    """A new generator in eval mode, drawn as the discriminators are."""
    net = Generator(width)
    draw_as_dcgan(net, seed)
    return net.eval()


def block(d_in: int, d_out: int, size: int, stride: int, activation: nn.Module) -> nn.Sequential:
    """A convolution, batch norm and an activation."""
    return nn.Sequential(convolve(d_in, d_out, size, stride, 1), nn.BatchNorm2d(d_out), activation)


class ColorDiscriminator(nn.Module):
    """Discriminator for images (n, 3, 32, 32) in [-1, 1], without batch norm; its output (n,) is above 0 for real ones.

    Seven convolutions, as Miyato et al. 2018 use with spectral norm; the weights are plain.

    >>> net = ColorDiscriminator()
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.blocks(torch.zeros(2, 3, 32, 32)).shape
    (torch.Size([2]), torch.Size([2, 512, 4, 4]))
    >>> sum(p.numel() for p in net.parameters())
    5860865
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = convolutions(width)
        self.last = nn.Linear(8 * width * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x).flatten(1)).flatten()


def convolutions(w: int) -> nn.Sequential:
    """Seven convolutions with leaky ReLU, from 3 channels of 32 x 32 to 8 w of 4 x 4."""
    sizes = ((3, w, 3, 1), (w, 2 * w, 4, 2), (2 * w, 2 * w, 3, 1), (2 * w, 4 * w, 4, 2), (4 * w, 4 * w, 3, 1))
    sizes += ((4 * w, 8 * w, 4, 2), (8 * w, 8 * w, 3, 1))
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(a, b, size, stride, 1), nn.LeakyReLU(0.1)) for a, b, size, stride in sizes)
    )


class ColorGenerator(nn.Module):
    """Generator of images (n, 3, 32, 32) in [-1, 1] from latents (n, 100): three transposed convolutions.

    >>> ColorGenerator(4)(torch.zeros(3, 100)).shape
    torch.Size([3, 3, 32, 32])
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w, up = width, []
        for a, b in ((8 * w, 4 * w), (4 * w, 2 * w), (2 * w, w)):
            up += [convolve(a, b, 4, 2, 1, up=True), nn.BatchNorm2d(b), nn.ReLU()]
        self.start = nn.Linear(LATENT, 8 * w * 16, bias=False)
        self.main = nn.Sequential(nn.BatchNorm2d(8 * w), nn.ReLU(), *up, nn.Conv2d(w, 3, 3, padding=1), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.main(self.start(z).unflatten(1, (-1, 4, 4)))


class ImageEncoder(nn.Module):
    """Encoder of a BiGAN: from images (n, 3, 32, 32) in [-1, 1] to codes (n, 100), by five convolutions.

    Widths and kernels are those of Dumoulin et al. 2016; the last three layers have 128, 256 and 512 channels.

    >>> net = ImageEncoder(4)
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.blocks(torch.zeros(2, 3, 32, 32)).shape
    (torch.Size([2, 100]), torch.Size([2, 64, 1, 1]))
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        w = width
        sizes = ((3, w, 5, 1), (w, 2 * w, 4, 2), (2 * w, 4 * w, 4, 1), (4 * w, 8 * w, 4, 2), (8 * w, 16 * w, 4, 1))
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(convolve(a, b, size, stride, 0), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))
                for a, b, size, stride in sizes
            )
        )
        self.last = nn.Conv2d(16 * w, LATENT, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x)).flatten(1)


class PairDiscriminator(nn.Module):
    """Discriminator of a BiGAN: of images (n, 3, 32, 32) with codes (n, 100); one number (n,), without batch norm.

    >>> PairDiscriminator(4)(torch.zeros(2, 3, 32, 32), torch.zeros(2, 100)).shape
    torch.Size([2])
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        w = 16 * width
        self.blocks, self.image = convolutions(width), nn.Linear(8 * width * 16, w)
        self.code = nn.Sequential(nn.Linear(LATENT, w), nn.LeakyReLU(0.1), nn.Linear(w, w))
        self.both = nn.Sequential(nn.LeakyReLU(0.1), nn.Linear(2 * w, 2 * w), nn.LeakyReLU(0.1), nn.Linear(2 * w, 1))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.both(torch.cat([self.image(self.blocks(x).flatten(1)), self.code(z)], 1)).flatten()


class ColorVAE(nn.Module):
    """VAE for images (n, 3, 32, 32) in [-1, 1]: six convolutions down to 4 x 4, and as far up again.

    >>> net = ColorVAE(8)
    >>> mean, log_variance = net.encode(torch.zeros(2, 3, 32, 32))
    >>> mean.shape, net.decode(mean).shape
    (torch.Size([2, 64]), torch.Size([2, 3, 32, 32]))
    """

    def __init__(self, width: int = 64, latent: int = 64) -> None:
        super().__init__()
        w = width
        sizes = ((3, w, 1), (w, w, 2), (w, 2 * w, 1), (2 * w, 2 * w, 2), (2 * w, 4 * w, 1), (4 * w, 4 * w, 2))
        self.blocks = nn.Sequential(*(block(a, b, 3, stride, nn.ReLU()) for a, b, stride in sizes))
        self.moments = nn.Linear(4 * w * 16, 2 * latent)
        self.start = nn.Linear(latent, 2 * w * 16)
        up: list[nn.Module] = []
        for a, b in ((2 * w, 2 * w), (2 * w, w)):
            up += [convolve(a, b, 4, 2, 1, up=True), nn.BatchNorm2d(b), nn.ReLU()]
        self.up = nn.Sequential(*up, nn.ConvTranspose2d(w, 3, 4, stride=2, padding=1), nn.Tanh())

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.moments(self.blocks(x).flatten(1)).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        return self.up(self.start(z).relu().unflatten(1, (-1, 4, 4)))

    def bound(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """The evidence lower bound (n,): what `linnet.scores.vae` differentiates, with one draw."""
        return Bound(_encode, _decode, "gaussian", NOISE, 1, False, seed)(self, x)

    def forward(self, x: Tensor) -> Tensor:
        """What it makes of images: the decoded mean."""
        return self.decode(self.encode(x)[0])


def _encode(model: ColorVAE, x: Tensor) -> tuple[Tensor, Tensor]:
    return model.encode(x)


def _decode(model: ColorVAE, z: Tensor) -> Tensor:
    return model.decode(z)


def wide_resnet(folder: Path = RESULTS / "wrn", *, depth: int = 40, width: int = 2) -> WideResNet:
    """The trained network, in eval mode and float32."""
    return load(WideResNet(depth, width), folder, WRN)


FILES = {
    "gan": ("gan_discriminator_cifar10", "gan_generator_cifar10"),
    "bigan": ("bigan_encoder_cifar10", "bigan_generator_cifar10"),
    "vae": ("vae_cifar10",),
    "rotation": ("rotation_cifar10",),
    "mnist": ("dcgan_discriminator_mnist", "dcgan_generator_mnist"),
}
"""What `encoders` trains, by name: two networks of a GAN, or one; and the files of their weights."""


def make_encoder(part: str, *, quick: bool = False) -> tuple[Any, ...]:
    """New networks of `FILES`; if it is to be quick, small ones. The rotation network sees by which angle."""
    width, (d, g) = (4, (4, 4)) if quick else (64, DIGIT_WIDTHS)
    makers: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
        "gan": lambda: (ColorDiscriminator(width), ColorGenerator(width)),
        "bigan": lambda: (ImageEncoder(width // 2), ColorGenerator(width)),
        "vae": lambda: (ColorVAE(width),),
        "rotation": lambda: (WideResNet(22, 1 if quick else 2, ROTATIONS),),
        "mnist": lambda: (Discriminator(d), Generator(g)),
    }
    return makers[part]()


def read_encoder(part: str, folder: Path, *, quick: bool = False) -> tuple[Any, ...]:
    """The networks of `FILES` with the weights of a folder, in eval mode."""
    pairs = zip(make_encoder(part, quick=quick), FILES[part], strict=True)
    return tuple(load(net, folder, name) for net, name in pairs)


def load_encoder(options: argparse.Namespace, part: str) -> Any:
    """What `encoders` has trained: a pair of networks or one; if it is to be quick, small and new.

    The weights are this run's where they were made there, else those of the results.
    """
    own = results_folder(options.out, quick=False) / "encoders"
    if options.quick:
        found = make_encoder(part, quick=True)
    else:
        found = read_encoder(part, own if (own / f"{FILES[part][-1]}.safetensors").exists() else TRAINED)
    return found if len(found) > 1 else found[0]
