"""Networks that learn images without labels, for the experiments on representations, which nobody supplies.

On CIFAR-10 a DCGAN, a VAE and a network that sees by which angle an image was turned; on MNIST a small DCGAN, whose
generator also serves the discriminator that is supplied. Their weights, as float16, are the result; the functions of
`experiments.generative` read them. `--parts` trains some and keeps the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.models import WideResNet
from experiments import common
from experiments.common import generative
from experiments.common.adaptation import Clock, in_parts
from experiments.common.gan import LATENT, train_gan, train_pair
from experiments.common.generative import ColorDiscriminator, ColorGenerator, ColorVAE, color_images, rotated
from experiments.common.pretrained import dcgan_discriminator, draw_as_dcgan, mnist, stored
from experiments.zhang2022.wrn import accuracy, augmented, train

CIFAR = ("train_1", "train_2")
PARTS = ("gan", "vae", "rotation", "mnist")
TITLES = {
    "gan": "DCGAN of CIFAR-10: samples",
    "vae": "VAE of CIFAR-10: test images, and decoded",
    "rotation": "rotation network of CIFAR-10",
    "mnist": "DCGAN of MNIST: samples",
}
SHOWN = 40  # images of a panel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="*", choices=PARTS, default=None, help="default: mnist on a CPU, the other three elsewhere"
    )
    parser.add_argument("--steps", type=int, default=None, help="of each GAN (default: 4,000; mnist: 2,500)")
    parser.add_argument("--epochs", type=int, default=None, help="of the VAE (default: 30) or the rotations (15)")


def run(options: argparse.Namespace) -> common.Outcome:
    """Train what is asked for, measure the rounded networks, show them all."""
    if options.parts is None:
        cpu = options.device == "cpu" and not options.quick
        options.parts = ("mnist",) if cpu else PARTS if options.quick else PARTS[:3]
    makers: Mapping[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
        "gan": gan,
        "vae": vae,
        "rotation": rotation,
        "mnist": digits,
    }
    folder = common.results_folder(options.out, quick=options.quick) / "encoders"
    parts = common.earlier(options, "encoders").get("parts", {})
    for name in options.parts:
        clock = Clock(options.device)
        with clock("seconds"):
            found = makers[name](options, folder)
        found |= {**clock.seconds, "machine": common.machine(options.device)}
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items() if key != "path"), flush=True)
        parts = common.keep(options, "encoders", {name: found})
    command = "python -m experiments encoders (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in parts.values()))
    return common.Outcome({"parts": parts}, figure(options, folder, parts), rows(parts), command, spent)


@lru_cache(1)
def color(data: Path, device: str, quick: bool) -> tuple[Tensor, Tensor]:
    """Training and test images of CIFAR-10; a few of the test images for both if it is to be quick."""
    test = color_images(data, ("test",), count=96 if quick else None)[0].to(device)
    return (test[32:], test[:32]) if quick else (color_images(data, CIFAR)[0].to(device), test)


def images_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    return color(options.data, options.device, options.quick)


# The networks.


def gan(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Discriminator and generator of CIFAR-10, from the start."""
    x, test = images_of(options)
    steps = options.steps or (2 if options.quick else 4000)
    D, G = ColorDiscriminator(**width(options)), ColorGenerator(**width(options))
    for i, net in enumerate((D, G)):
        draw_as_dcgan(net, options.seed + i)
        net.to(options.device)
    # Shifts and mirrors of all that the discriminator sees keep it from learning 20,000 images by heart.
    path = train_pair(
        D, G, x, steps=steps, seed=options.seed, batch=batch(options), rates=(2e-4,) * 2, change=augmented
    )
    stored(D, folder, "dcgan_discriminator_cifar10")
    stored(G, folder, "dcgan_generator_cifar10")
    return {
        "steps": steps,
        **size(D, G),
        **outputs(*generative.color_gan(folder, **width(options)), x, test),
        "path": path,
    }


def vae(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Encoder and decoder of CIFAR-10."""
    x, test = images_of(options)
    epochs = options.epochs or (1 if options.quick else 30)
    net = drawn(lambda: ColorVAE(**width(options)), options)
    count = iter(range(10**9))  # other draws of the latents in every step

    def loss_of(net: ColorVAE, images: Tensor, y: Tensor) -> Tensor:
        return -net.bound(images, seed=next(count)).mean() / images[0].numel()

    y = torch.zeros(len(x), dtype=torch.long, device=x.device)
    path = train(
        net, x, y, epochs=epochs, seed=options.seed, loss_of=loss_of, batch=batch(options), rate=2e-3, adam=True
    )
    stored(net, folder, "vae_cifar10")
    net = generative.color_vae(folder, **width(options)).to(options.device)
    with torch.no_grad():
        bound = in_parts(net.bound, (test,)).mean()
        error = in_parts(lambda x: (net(x) - x).square().flatten(1).mean(1), (test,)).mean()
    found = {"bound of a test image, nats": float(bound), "squared error of a pixel": float(error)}
    return {"epochs": epochs, **size(net), **found, "path": path}


def rotation(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By which of four angles was an image of CIFAR-10 turned (Gidaris et al. 2018)?"""
    x, test = images_of(options)
    epochs = options.epochs or (1 if options.quick else 15)
    shape = {"depth": 10, "width": 1} if options.quick else {}
    net = drawn(lambda: WideResNet(shape.get("depth", 22), shape.get("width", 2), generative.ROTATIONS), options)

    def loss_of(net: nn.Module, images: Tensor, y: Tensor) -> Tensor:
        turned, angles = rotated(images)
        return F.cross_entropy(net(turned), angles)

    y = torch.zeros(len(x), dtype=torch.long, device=x.device)
    path = train(net, x, y, epochs=epochs, seed=options.seed, loss_of=loss_of, batch=batch(options), rate=0.1)
    stored(net, folder, "rotation_cifar10")
    net = generative.rotation_network(folder, **shape).to(options.device)
    return {"epochs": epochs, **size(net), "accuracy of angles, test": accuracy(net, *rotated(test)), "path": path}


def digits(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A generator of digits, trained with a small discriminator of its own; the supplied one is then shown its samples.

    Against the supplied discriminator, trained to the end, a new generator learned a single figure and no digit (1,500
    steps, the discriminator training on at a tenth of the generator's rate).
    """
    count = 64 if options.quick else None
    x, test = (mnist(options.data, part, network="dcgan", count=count)[0].to(options.device) for part in (True, False))
    steps = options.steps or (2 if options.quick else 2500)
    widths = (4, 4) if options.quick else generative.DIGIT_WIDTHS
    D, G = train_gan(x, steps=steps, seed=options.seed, widths=widths, batch=batch(options, 32))
    stored(D, folder, "dcgan_discriminator_mnist")
    stored(G, folder, "dcgan_generator_mnist")
    D, G = generative.digit_gan(folder, widths=widths)
    supplied = dcgan_discriminator(options.data / "weights")
    return {"steps": steps, **size(D, G), **outputs(D, G, x, test), "supplied one": outputs(supplied, G, x, test)}


def drawn(make: Callable[[], Any], options: argparse.Namespace) -> Any:
    """A new network on the device, in the layout that convolutions like best."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return make().to(options.device, memory_format=torch.channels_last)


def width(options: argparse.Namespace) -> dict[str, int]:
    return {"width": 4} if options.quick else {}


def batch(options: argparse.Namespace, usual: int = 128) -> int:
    return 16 if options.quick else usual


def size(*nets: nn.Module) -> dict[str, list[int]]:
    return {"parameters": [sum(t.numel() for t in net.parameters()) for net in nets]}


@torch.no_grad()
def outputs(D: nn.Module, G: nn.Module, x: Tensor, test: Tensor) -> dict[str, float]:
    """What the discriminator says, on the average, of training, test and generated images."""
    D, G = D.to(x.device), G.to(x.device)
    h = torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(1)).to(x.device)
    shown = {"training": x[:1000], "test": test[:1000], "generated": G(h)}
    return {f"output, {name} images": float(D(images).mean()) for name, images in shown.items()}


# What is shown.


@torch.no_grad()
def pictures(options: argparse.Namespace, folder: Path, name: str) -> Tensor | None:
    """Images (n, c, h, w) in [0, 1] that show a network; None if its weights are not there."""
    h = torch.randn(SHOWN, LATENT, generator=torch.Generator().manual_seed(0))
    try:
        if name == "gan":
            return generative.color_gan(folder, **width(options))[1](h) / 2 + 0.5
        if name == "mnist":
            widths = (4, 4) if options.quick else generative.DIGIT_WIDTHS
            return generative.digit_gan(folder, widths=widths)[1](h) / 2 + 0.5
        x = images_of(options)[1][: SHOWN // 2].cpu()
        both = torch.stack([x, generative.color_vae(folder, **width(options))(x)], 1).flatten(0, 1)
        return (both / 2 + 0.5).clamp(0, 1)
    except FileNotFoundError:
        return None


def figure(options: argparse.Namespace, folder: Path, parts: Mapping[str, Any]) -> Figure:
    """Samples, decoded images, and how the losses fell."""
    shown = {name: pictures(options, folder, name) for name in ("gan", "vae", "mnist") if name in parts}
    there = {name: images for name, images in shown.items() if images is not None}
    with common.style():
        paths = {name: part["path"] for name, part in parts.items() if "path" in part}
        count = len(there) + bool(paths)
        result = Figure(figsize=(4.2 * max(count, 1), 3.4))
        axes = result.subplots(1, max(count, 1), squeeze=False)[0]
        for ax, (name, images) in zip(axes, there.items(), strict=False):
            ax.imshow(mosaic(images, 8), cmap="gray", vmin=0, vmax=1)
            ax.set_title(TITLES[name])
            ax.axis("off")
        colors = dict(zip(PARTS, (common.BLUE, common.VERMILION, common.GREEN, common.ORANGE), strict=True))
        for name, path in paths.items():
            pairs = not isinstance(path[0], dict)  # of a discriminator and its generator
            for i, style in enumerate(("-", ":")[: 1 + pairs]):
                values = [row[i] if pairs else row["loss"] for row in path]
                at = [(j + 1) / len(values) for j in range(len(values))]
                label = f"{name}, generator" if i else name
                axes[-1].plot(at, values, style, marker=".", color=colors[name], label=label)
        if paths:
            axes[-1].set(xlabel="share of the training", title="losses")
            axes[-1].legend(fontsize=8)
    return result


def mosaic(images: Tensor, columns: int) -> Any:
    """Images (n, c, h, w) side by side, as an array for imshow.

    >>> mosaic(torch.zeros(6, 1, 2, 2), 3).shape
    (4, 6)
    """
    n, c, h, w = images.shape
    rows = n // columns
    grid = (
        images[: rows * columns].view(rows, columns, c, h, w).permute(0, 3, 1, 4, 2).reshape(rows * h, columns * w, c)
    )
    return (grid[..., 0] if c == 1 else grid).cpu().numpy()


def rows(parts: Mapping[str, Any]) -> list[common.Row]:
    """One for each network."""
    found = []

    def add(name: str, what: str, paper: str, text: str, differs: str) -> None:
        if name in parts:
            sizes = " and ".join(f"{p:,}" for p in parts[name]["parameters"])
            spent = f"{common.duration(parts[name]['seconds'])} on {parts[name]['machine']}"
            found.append(common.Row(what, paper, text.format(**parts[name]), f"{sizes} parameters; {differs}; {spent}"))

    said = "trained by Zhai et al. 2019 (003) and Dumoulin et al. 2016 (001)"
    three = "{output, training images:.2f}, {output, test images:.2f}, {output, generated images:.2f}"
    add("gan", "DCGAN of CIFAR-10: output for training, test, generated images", said, three, "20,000 images")
    bound = "{bound of a test image, nats:,.0f}, {squared error of a pixel:.4f}"
    add(
        "vae",
        "VAE of CIFAR-10: bound (nats), squared error",
        "not given",
        bound,
        f"20,000 images, noise {generative.NOISE:g}",
    )
    angle = "{accuracy of angles, test:.3f}"
    add("rotation", "rotation network: accuracy of angles", "Jigsaw instead (001)", angle, "20,000 images, WRN-22-2")
    add(
        "mnist",
        "DCGAN of MNIST: output for training, test, generated images",
        "not given",
        three,
        "the paper's has 17K",
    )
    return found
