"""Networks that learn images without labels, for the experiments on representations, which nobody supplies.

On CIFAR-10 a GAN, a BiGAN, whose encoder is what is wanted, a VAE and a network that sees by which angle an image was
turned; on MNIST a small DCGAN, whose generator also serves the discriminator that is supplied. Their weights, as
float16, are the result; they are not in the repository, and `experiments.common.networks.load_encoder` reads them.
`--parts` trains some and keeps the others. A GAN whose discriminator, as it is used, does not tell real images from
generated ones is stored and then refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from experiments import common
from experiments.common import networks, plots
from experiments.common.adversarial import train_bigan, train_hinge
from experiments.common.data import MEAN, STD, color_bytes, color_images, mnist, rotate
from experiments.common.networks import LATENT, ColorVAE, PairDiscriminator, make_encoder, read_encoder, resnet, store
from experiments.common.training import accuracy, in_parts, train_gan, train_images

PARTS = tuple(networks.FILES)
TITLES = {
    "gan": "GAN of CIFAR-10: samples",
    "bigan": "BiGAN of CIFAR-10: test images, and encoded and generated",
    "vae": "VAE of CIFAR-10: test images, and decoded",
    "mnist": "DCGAN of MNIST: samples",
}
SHOWN = 40  # images of a panel
ARGUMENTS = {
    "--parts": {"nargs": "*", "choices": PARTS, "help": "default: mnist on a CPU, the others elsewhere"},
    "--steps": "of each GAN (default: 50,000; bigan: 30,000; mnist: 2,500)",
    "--seconds": "after which the training of a GAN of CIFAR-10 stops (default: when it has taken its steps)",
    "--batch": "images of a step of a GAN of CIFAR-10 (default: 64)",
    "--eager": {"action": "store_true", "help": "on a GPU, take the steps of a GAN one by one, without a graph"},
    "--epochs": "of the VAE (default: 30) or the rotations (15)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train what is asked for, measure the rounded networks, show them all."""
    if options.parts is None:
        others = tuple(name for name in PARTS if name != "mnist")
        options.parts = {"quick": PARTS, "cpu": ("mnist",)}.get(common.kind_of(options), others)
    makers = {"gan": train_color_gan, "bigan": train_color_bigan, "vae": train_vae, "rotation": train_rotation}
    makers["mnist"] = train_digit_gan
    folder = common.own_folder(options)
    parts = common.measure_parts(options, options.parts, lambda name: makers[name](options, folder))
    if "gan" in options.parts and not options.quick:
        check(parts["gan"])
    command = "python -m experiments encoders (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in parts.values()))
    return common.Outcome({"parts": parts}, figure(options, folder, parts), rows(parts), command, spent)


@lru_cache(1)
def color(data: Path, device: str, quick: bool) -> tuple[Tensor, Tensor]:
    """Training and test images of CIFAR-10; a few of the test images for both if it is to be quick."""
    test = color_images(data, "test", count=96 if quick else None)[0].to(device)
    return (test[32:], test[:32]) if quick else (color_images(data, "train")[0].to(device), test)


def images_of_test(options: argparse.Namespace) -> Tensor:
    return images_of(options)[1] if options.quick else color_images(options.data, "test")[0].to(options.device)


def images_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    return color(options.data, options.device, options.quick)


# The networks.


def training_bytes(options: argparse.Namespace) -> Tensor:
    """All training images of CIFAR-10 in uint8; a few test images if it is to be quick."""
    if options.quick:
        return (images_of(options)[0] / 2 + 0.5).mul(255).round().to(torch.uint8)
    return color_bytes(options.data)[0].to(options.device)


def how_long(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Arguments of the training of a GAN of CIFAR-10."""
    found: dict[str, Any] = {"steps": options.steps or (2 if options.quick else steps), "seed": options.seed}
    found |= {"batch": options.batch or (8 if options.quick else 64), "seconds": options.seconds}
    return found | {"graph": not options.eager}


def train_color_gan(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Discriminator and generator of CIFAR-10, from the start."""
    x, test = training_bytes(options), color_images(options.data, "test")[0].to(options.device)
    D, G = make_networks("gan", options)
    G, steps, path = train_hinge(D, G, x, **(how := how_long(options, 50_000)))
    D, G = rounded("gan", options, folder, D, G)
    found = judge(D, G, x, test[:200] if options.quick else test, options)
    return {"steps": steps, "batch": how["batch"], "training images": len(x), **size(D, G), **found, "path": path}


def train_color_bigan(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Encoder and generator of CIFAR-10, trained together against a discriminator of pairs, from the start."""
    x, test = training_bytes(options), images_of_test(options)
    E, G = make_networks("bigan", options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed + 1)
        D = PairDiscriminator(2 if options.quick else 32)
    E, G, steps, path = train_bigan(D, E, G, x, **(how := how_long(options, 30_000)))
    E, G = rounded("bigan", options, folder, E, G)
    h = torch.randn(2000, LATENT, generator=torch.Generator().manual_seed(1)).to(options.device)
    with torch.no_grad():
        again = in_parts(lambda images: G(E(images)), (test,))
        made = in_parts(G, (h,))
        left = (in_parts(E, (made,)) - h).square().sum() / h.square().sum()
    found = {
        "squared error of a pixel": float((again - test).square().mean()),
        "squared error of a pixel, mean image": float((test - test.mean(0)).square().mean()),
        "latents explained, generated images": 1 - float(left),
        "spread of generated images": spread(made) / spread(test[:2000]),
    }
    return {"steps": steps, "batch": how["batch"], "training images": len(x), **size(E, G), **found, "path": path}


def make_networks(part: str, options: argparse.Namespace) -> tuple[Any, ...]:
    """New networks of a part, drawn with the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return make_encoder(part, quick=options.quick)


@torch.no_grad()
def judge(D: nn.Module, G: nn.Module, x: Tensor, test: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """What the discriminator in eval mode says of training, test and generated images, and how these differ.

    Args:
        D: From images to a number that is above zero for real ones.
        G: From latents to images.
        x: Training images in uint8.
        test: Test images in [-1, 1].
        options: Options of the run.
    """
    h = torch.randn(len(test), LATENT, generator=torch.Generator().manual_seed(1)).to(test.device)
    made = in_parts(G, (h,))
    shown = {"training": x[: len(test)].float() / 127.5 - 1, "test": test, "generated": made}
    told = {name: in_parts(D, (images,)).double() for name, images in shown.items()}
    found: dict[str, Any] = {f"output, {name} images": float(f.mean()) for name, f in told.items()}
    ranks = torch.cat([told["test"], told["generated"]]).argsort().argsort()[: len(test)].double()
    found |= {
        "test images called real": float((told["test"] > 0).double().mean()),
        "generated images called generated": float((told["generated"] < 0).double().mean()),
        "test above generated": float((ranks.mean() - (len(test) - 1) / 2) / len(made)),
        "spread of generated images": spread(made[:2000]) / spread(test[:2000]),
    }
    if (options.data / "weights" / "resnet20_cifar10.safetensors").exists():
        net = resnet(options.data / "weights").to(test.device)
        mean, std = MEAN.to(test.device), STD.to(test.device)
        shares = in_parts(lambda images: net((images / 2 + 0.5 - mean) / std).softmax(1), (made,))
        each = -(shares * shares.clamp_min(1e-12).log()).sum(1).mean()
        whole = shares.mean(0)
        found["classes of generated images, by ResNet-20"] = whole.tolist()
        # As the inception score, with another classifier: 1 for one class or for no class, 10 at best.
        found["score of classes, by ResNet-20"] = float((-(whole * whole.log()).sum() - each).exp())
    return found


def spread(x: Tensor) -> float:
    """The mean distance of two images."""
    return float(torch.pdist(x.flatten(1)).mean())


def check(part: Mapping[str, Any]) -> None:
    """Raise if the discriminator does not tell real images, also new ones, from generated ones on the average."""
    real, new, made = (part[f"output, {name} images"] for name in ("training", "test", "generated"))
    if not (real > made and new > made):
        raise ArithmeticError(
            f"The discriminator in eval mode needs larger outputs for real images than for generated ones; its means "
            f"are {real:.3f} for training, {new:.3f} for test and {made:.3f} for generated images. Nothing that is "
            "made of this network means anything; train again, with other settings."
        )


def train_vae(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Encoder and decoder of CIFAR-10."""
    x, test = images_of(options)
    epochs = options.epochs or (1 if options.quick else 30)
    count = iter(range(10**9))  # other draws of the latents in every step

    def loss_of(net: ColorVAE, images: Tensor, y: Tensor) -> Tensor:
        return -net.bound(images, seed=next(count)).mean() / images[0].numel()

    net, path = train("vae", x, loss_of, options, epochs=epochs, rate=2e-3, adam=True)
    (net,) = rounded("vae", options, folder, net)
    with torch.no_grad():
        bound = in_parts(net.bound, (test,)).mean()
        error = in_parts(lambda x: (net(x) - x).square().flatten(1).mean(1), (test,)).mean()
    found = {"bound of a test image, nats": float(bound), "squared error of a pixel": float(error)}
    return {"epochs": epochs, **size(net), **found, "path": path}


def train_rotation(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By which of four angles was an image of CIFAR-10 turned (Gidaris et al. 2018)?"""
    x, test = images_of(options)
    epochs = options.epochs or (1 if options.quick else 15)

    def loss_of(net: nn.Module, images: Tensor, y: Tensor) -> Tensor:
        turned, angles = rotate(images)
        return F.cross_entropy(net(turned), angles)

    net, path = train("rotation", x, loss_of, options, epochs=epochs, rate=0.1)
    (net,) = rounded("rotation", options, folder, net)
    return {"epochs": epochs, **size(net), "accuracy of angles, test": accuracy(net, *rotate(test)), "path": path}


def train(
    part: str, x: Tensor, loss_of: Callable[..., Tensor], options: argparse.Namespace, **how: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A new network, in the layout that convolutions like best, trained on images without labels; and its losses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        net = make_encoder(part, quick=options.quick)[0].to(options.device, memory_format=torch.channels_last)
    y = torch.zeros(len(x), dtype=torch.long, device=x.device)
    return net, train_images(net, x, y, seed=options.seed, loss_of=loss_of, batch=batch(options), **how)


def train_digit_gan(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A generator of digits, trained with a small discriminator of its own; the supplied one is then shown its samples.

    Against the supplied discriminator, trained to the end, a new generator learned a single figure and no digit (1,500
    steps, the discriminator training on at a tenth of the generator's rate).
    """
    count, widths = (64, (4, 4)) if options.quick else (None, networks.DIGIT_WIDTHS)
    x, test = (mnist(options.data, part, network="dcgan", count=count)[0].to(options.device) for part in (True, False))
    steps = options.steps or (2 if options.quick else 2500)
    nets = train_gan(x, steps=steps, seed=options.seed, widths=widths, batch=batch(options, 32))
    D, G = rounded("mnist", options, folder, *nets)
    supplied = networks.dcgan_discriminator(options.data / "weights")
    return {"steps": steps, **size(D, G), **outputs(D, G, x, test), "supplied one": outputs(supplied, G, x, test)}


def rounded(part: str, options: argparse.Namespace, folder: Path, *nets: nn.Module) -> list[Any]:
    """Networks as they come back from their files, with weights in float16."""
    for net, name in zip(nets, networks.FILES[part], strict=True):
        store(net, folder, name)
    return [net.to(options.device) for net in read_encoder(part, folder, quick=options.quick)]


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
        nets = read_encoder(name, folder, quick=options.quick)
        if name not in ("vae", "bigan"):
            return nets[-1](h) / 2 + 0.5
        x = color_images(options.data, "test", count=SHOWN // 2)[0]
        both = torch.stack([x, nets[0](x) if name == "vae" else nets[1](nets[0](x))], 1).flatten(0, 1)
        return (both / 2 + 0.5).clamp(0, 1)
    except FileNotFoundError:
        return None


def figure(options: argparse.Namespace, folder: Path, parts: Mapping[str, Any]) -> Figure:
    """Samples, decoded images, and how the losses fell."""
    shown = {name: pictures(options, folder, name) for name in TITLES if name in parts}
    there = {name: images for name, images in shown.items() if images is not None}
    paths = {name: part["path"] for name, part in parts.items() if "path" in part}
    count = max(len(there) + bool(paths), 1)
    result = Figure(figsize=(4.2 * count, 3.4))
    axes = result.subplots(1, count, squeeze=False)[0]
    for ax, (name, images) in zip(axes, there.items(), strict=False):
        ax.imshow(plots.mosaic(images, 8), cmap="gray", vmin=0, vmax=1)
        ax.set_title(TITLES[name])
        ax.axis("off")
    colors = dict(zip(PARTS, (plots.BLUE, plots.SKY, plots.VERMILION, plots.GREEN, plots.ORANGE), strict=True))
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


def rows(parts: Mapping[str, Any]) -> Iterator[common.Row]:
    """One for each network."""
    three = "{output, training images:.2f}, {output, test images:.2f}, {output, generated images:.2f}"
    told = {
        "gan": (
            "GAN of CIFAR-10: output for training, test, generated images",
            "trained by Zhai et al. 2019, 5.9 million parameters (003)",
            f"{three}; {{test images called real:.1%}} of test images called real, "
            "{generated images called generated:.1%} of generated ones called generated; a test image above a "
            "generated one {test above generated:.1%}; spread of generated images over that of real ones "
            "{spread of generated images:.2f}",
            "{steps:,} steps of {batch} on {training images:,} images; spectral norm, hinge loss, DiffAugment, "
            "averaged generator; their GAN is not given",
        ),
        "bigan": (
            "BiGAN of CIFAR-10: squared error of test images encoded and generated",
            "encoder trained as Dumoulin et al. 2016 (001)",
            "{squared error of a pixel:.3f} (the mean image: {squared error of a pixel, mean image:.3f}); "
            "{latents explained, generated images:.0%} of the latents of generated images explained",
            "{steps:,} steps of {batch} on {training images:,} images; the encoder's layers are theirs, loss (hinge), "
            "generator and discriminator (spectral norm, DiffAugment) are not",
        ),
        "vae": (
            "VAE of CIFAR-10: bound (nats), squared error",
            "not given",
            "{bound of a test image, nats:,.0f}, {squared error of a pixel:.4f}",
            f"20,000 images, noise {networks.NOISE:g}",
        ),
        "rotation": (
            "rotation network: accuracy of angles",
            "Jigsaw instead (001)",
            "{accuracy of angles, test:.3f}",
            "20,000 images, WRN-22-2",
        ),
        "mnist": (
            "DCGAN of MNIST: output for training, test, generated images",
            "not given",
            three,
            "the paper's has 17K",
        ),
    }
    for name, (what, paper, text, differs) in told.items():
        if name in parts:
            sizes = " and ".join(f"{p:,}" for p in parts[name]["parameters"])
            spent = f"{common.duration(parts[name]['seconds'])} on {parts[name]['machine']}"
            ours = text.format(**parts[name])
            yield common.Row(what, paper, ours, f"{sizes} parameters; {differs.format(**parts[name])}; {spent}")
