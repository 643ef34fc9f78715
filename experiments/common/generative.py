"""Networks that learn images without labels: a DCGAN and a VAE for CIFAR-10, a VAE for MNIST, one that sees rotations.

`python -m experiments encoders` trains those that nobody supplies; the functions below read what it wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import WideResNet
from experiments import common
from experiments.common.adaptation import in_parts
from experiments.common.gan import LATENT, Generator
from experiments.common.pretrained import CIFAR10_MEAN, CIFAR10_STD, Discriminator, cifar10, loaded
from linnet.elbo import Bound

FOLDER = common.RESULTS / "encoders"
NOISE = 0.05  # variance of a pixel in [-1, 1] around what the VAE decodes
ROTATIONS = 4
DIGIT_WIDTHS = (16, 32)  # of the DCGAN of MNIST, as `train_gan` takes them


def block(d_in: int, d_out: int, size: int, stride: int, activation: nn.Module, *, norm: bool = True) -> nn.Sequential:
    """A convolution, batch norm and an activation."""
    layers: list[nn.Module] = [nn.Conv2d(d_in, d_out, size, stride=stride, padding=1, bias=False)]
    return nn.Sequential(*layers, *([nn.BatchNorm2d(d_out)] if norm else []), activation)


class ColorDiscriminator(nn.Module):
    """DCGAN discriminator for images (n, 3, 32, 32) in [-1, 1]; the number (n,) before the sigmoid.

    >>> net = ColorDiscriminator()
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.blocks(torch.zeros(2, 3, 32, 32)).shape
    (torch.Size([2]), torch.Size([2, 256, 4, 4]))
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w = width
        sizes = ((3, w, 3, 1), (w, 2 * w, 4, 2), (2 * w, 4 * w, 4, 2), (4 * w, 4 * w, 4, 2), (4 * w, 4 * w, 3, 1))
        # The first has no batch norm, as Radford et al. advise.
        self.blocks = nn.Sequential(*(block(*size, nn.LeakyReLU(0.2), norm=size[0] != 3) for size in sizes))
        self.last = nn.Conv2d(4 * w, 1, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x)).flatten()


class ColorGenerator(nn.Module):
    """From latents (n, 100) to images (n, 3, 32, 32) in [-1, 1].

    >>> ColorGenerator(4)(torch.zeros(2, 100)).shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (4 * width, 2 * width, width)
        up: list[nn.Module] = []
        for d_in, d_out in zip((LATENT, *widths), widths, strict=False):
            place = {"stride": 1, "padding": 0} if d_in == LATENT and not up else {"stride": 2, "padding": 1}
            up += [nn.ConvTranspose2d(d_in, d_out, 4, bias=False, **place), nn.BatchNorm2d(d_out), nn.ReLU()]
        self.main = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


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
            up += [nn.ConvTranspose2d(a, b, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
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


def rotated(x: Tensor) -> tuple[Tensor, Tensor]:
    """All images turned by 0, 90, 180 and 270 degrees, (4 n, ...), and by which (4 n,).

    >>> rotated(torch.arange(4.0).view(1, 1, 2, 2))[0][1, 0].tolist()
    [[1.0, 3.0], [0.0, 2.0]]
    """
    turned = torch.cat([torch.rot90(x, k, (2, 3)) for k in range(ROTATIONS)])
    return turned, torch.arange(ROTATIONS, device=x.device).repeat_interleave(len(x))


# Images and trained networks.


def folder_of(options: argparse.Namespace, name: str) -> Path:
    """Where the weights of a name lie: beside the results of this run if they were made there, else the kept ones."""
    own = common.results_folder(options.out, quick=options.quick) / "encoders"
    return own if (own / f"{name}.safetensors").exists() else FOLDER


def color_images(folder: Path, parts: Sequence[str], *, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10 (n, 3, 32, 32) in [-1, 1] and labels (n,).

    Args:
        folder: Of the data.
        parts: Such as ("train_1", "train_2").
        count: The first so many of each part only.
    """
    x, y = (torch.cat(both) for both in zip(*(cifar10(folder, part, count=count) for part in parts), strict=True))
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
    return 2 * (x * std + mean) - 1, y


def color_gan(folder: Path = FOLDER, *, width: int = 64) -> tuple[ColorDiscriminator, ColorGenerator]:
    """The DCGAN that `encoders` has trained on CIFAR-10, in eval mode."""
    D = loaded(ColorDiscriminator(width), folder, "dcgan_discriminator_cifar10")
    return D, loaded(ColorGenerator(width), folder, "dcgan_generator_cifar10")


def color_vae(folder: Path = FOLDER, *, width: int = 64) -> ColorVAE:
    """The VAE that `encoders` has trained on CIFAR-10, in eval mode."""
    return loaded(ColorVAE(width), folder, "vae_cifar10")


def rotation_network(folder: Path = FOLDER, *, depth: int = 22, width: int = 2) -> WideResNet:
    """The network that `encoders` has trained to see by which angle images of CIFAR-10 were turned, in eval mode."""
    return loaded(WideResNet(depth, width, ROTATIONS), folder, "rotation_cifar10")


def digit_gan(folder: Path = FOLDER, *, widths: tuple[int, int] = DIGIT_WIDTHS) -> tuple[Discriminator, Generator]:
    """The small DCGAN that `encoders` has trained on MNIST, in eval mode."""
    D = loaded(Discriminator(widths[0]), folder, "dcgan_discriminator_mnist")
    return D, loaded(Generator(widths[1]), folder, "dcgan_generator_mnist")


def digit_vae(folder: Path) -> DigitVAE:
    """The VAE of MNIST that is supplied, in eval mode; the folder is that of the supplied weights."""
    return loaded(DigitVAE(), folder, "vae_mnist")


def pooled(blocks: nn.Module, x: Tensor, *, batch: int = 500) -> Tensor:
    """Activations (n, d) after the blocks, averaged over positions."""
    return in_parts(lambda part: F.adaptive_avg_pool2d(blocks(part), 1).flatten(1), (x,), batch)
