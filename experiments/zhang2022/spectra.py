"""How many components explain a Fisher kernel (Zhang et al. 2022, figure 2 and appendix C.2).

Left, LeNet-5 against a multilayer perceptron with as many parameters, both trained on two digits of MNIST. Right, the
discriminator of a DCGAN, trained against untrained: a large one with stored weights, and two as small as the paper's,
trained here together with their generators: one as a DCGAN, and one without batch norm, with spectral norm and the
hinge loss. Of every kernel the whole spectrum is computed, in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.adversarial import train_hinge
from experiments.common.data import grayscale, mnist
from experiments.common.networks import (
    LATENT,
    Discriminator,
    Generator,
    dcgan_discriminator,
    draw_network,
    lenet5,
    perceptron,
    untrained_generator,
)
from experiments.common.statistics import average, show_error
from experiments.common.training import step, train_gan
from linnet.fisher import Spectrum, spectrum

KERNELS = ("nfk", "ntk")
SHARES = (0.9, 0.95, 0.99, 0.995)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
PAPER = 100  # components that explain 99.5 % for the paper's trained discriminator
SMALL = 10  # channels of the first layer that make 16,920 parameters; the paper's discriminator has 17K

CLASSIFIERS, LARGE_GAN, SMALL_GAN = "classifiers", "large discriminator", "small discriminator"
PLAIN_GAN = "small discriminator without batch norm"
TRAINED, UNTRAINED, OWN = "trained", "untrained", "untrained, its own generator"
LINES = {
    "LeNet-5, trained": (plots.GREEN, "-"),
    "MLP, trained": (plots.VERMILION, "-"),
    "LeNet-5, untrained": (plots.GREEN, ":"),
    "MLP, untrained": (plots.VERMILION, ":"),
    TRAINED: (plots.BLUE, "-"),
    UNTRAINED: (plots.ORANGE, "-"),
    OWN: (plots.GRAY, ":"),
}


# Images of each spectrum, training steps and seeds.
def sizes_of(images: tuple[int, ...], **rest: Any) -> Sizes:
    return Sizes(images=dict(zip((CLASSIFIERS, LARGE_GAN, SMALL_GAN, PLAIN_GAN), images, strict=True)), **rest)


SIZES = {
    "quick": sizes_of((60, 30, 60, 60), steps=20, gan_steps=3, plain_steps=3, seeds=1),
    "cpu": sizes_of((1000, 400, 1500, 1500), steps=500, gan_steps=1500, plain_steps=1500, seeds=3),
    "cuda": sizes_of((1000, 1000, 10_000, 10_000), steps=500, gan_steps=1500, plain_steps=10_000, seeds=3),
}


@dataclass(frozen=True)
class Found:
    """The spectrum of one kernel of one network."""

    panel: str
    name: str
    kernel: str
    p: int
    spectrum: Spectrum
    accuracy: float | None = None

    @property
    def n(self) -> int:
        return len(self.spectrum.eigenvalues)

    @property
    def squared(self) -> int:
        """Components for 99.5 % of the sum of squared eigenvalues: another reading of the paper."""
        return spectrum(np.square(self.spectrum.eigenvalues)).components(0.995)


def measure(
    panel: str,
    name: str,
    model: nn.Module,
    X: Tensor,
    score: linnet.scores.Score,
    *,
    kernels: Sequence[str] = KERNELS,
    accuracy: float | None = None,
) -> Iterator[Found]:
    """The spectra of a network on images X."""
    p = sum(t.numel() for t in model.parameters())
    for kernel in kernels:
        embedding = linnet.FisherEmbedding(model, score=score, kernel=kernel, dtype="float64", progress=False)
        found = Found(panel, name, kernel, p, spectrum(embedding.exact_eigenvalues(X)), accuracy)
        needed = ", ".join(f"{100 * share:g} %: {found.spectrum.components(share)}" for share in SHARES)
        print(f"{panel}, {name}, {kernel}, n = {found.n}: components for {needed}", flush=True)
        yield found


# Two digits.


def mlp(seed: int, *, width: int = 56) -> nn.Module:
    """Three layers for images of 32 x 32, with about as many parameters as LeNet-5 with one output.

    >>> [sum(t.numel() for t in net.parameters()) for net in (mlp(0), lenet5(None, classes=1))]
    [60649, 60941]
    """
    return nn.Sequential(nn.Flatten(), *perceptron((1024, width, width, 1), activation=nn.ReLU, seed=seed)).eval()


def two_digits(options: argparse.Namespace, train: bool) -> tuple[Tensor, Tensor]:
    """The images of the two digits, and whether they show the second."""
    x, y = (t.to(options.device) for t in mnist(options.data, train))
    kept = torch.isin(y, torch.tensor(options.digits, device=y.device))
    return x[kept], y[kept] == options.digits[1]


def train(net: nn.Module, x: Tensor, y: Tensor, *, steps: int, seed: int) -> None:
    """Adam on the binary cross entropy, batches of 64."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=random).to(x.device)
        step(optimizer, F.binary_cross_entropy_with_logits(net(x[batch]).squeeze(1), y[batch].float()))


def classifiers(options: argparse.Namespace, sizes: Sizes) -> Iterator[Found]:
    """LeNet-5 and the perceptron before and after training, on the first of their training images."""
    x, y = two_digits(options, True)
    x_test, y_test = two_digits(options, False)
    X = x[: sizes.images[CLASSIFIERS]]
    score = linnet.scores.classifier()
    for seed in range(options.seed, options.seed + sizes.seeds):
        for name, net in (("LeNet-5", lenet5(None, classes=1, seed=seed)), ("MLP", mlp(seed))):
            net.to(options.device)
            yield from measure(CLASSIFIERS, f"{name}, {UNTRAINED}", net, X, score)
            train(net, x, y, steps=sizes.steps, seed=seed)
            with torch.no_grad():
                right = (net(x_test).squeeze(1) > 0) == y_test
            accuracy = float(right.double().mean())
            yield from measure(CLASSIFIERS, f"{name}, {TRAINED}", net, X, score, accuracy=accuracy)


# Discriminators.


def large_discriminator(options: argparse.Namespace, sizes: Sizes) -> Iterator[Found]:
    """The stored discriminator and new ones like it, on test images; without a generator, Z and I are the data's."""
    X = mnist(options.data, False, network="dcgan", count=sizes.images[LARGE_GAN])[0].to(options.device)
    energy = linnet.scores.energy()
    trained = dcgan_discriminator(options.data / "weights").to(options.device)
    yield from measure(LARGE_GAN, TRAINED, trained, X, energy)
    for seed in range(options.seed, options.seed + sizes.seeds):
        yield from measure(LARGE_GAN, UNTRAINED, dcgan_discriminator(None, seed).to(options.device), X, energy)


def small_discriminator(options: argparse.Namespace, sizes: Sizes) -> Iterator[Found]:
    """Discriminators of the paper's size, before and after training; Z and I from generated images."""
    images = mnist(options.data, True, network="dcgan", count=20_000)[0].to(options.device)
    n = sizes.images[SMALL_GAN]
    X = images[:n]
    for seed in range(options.seed, options.seed + sizes.seeds):
        D, G = train_gan(images, steps=sizes.gan_steps, seed=seed, widths=(SMALL, 16))
        new, first = dcgan_discriminator(None, seed, width=SMALL), untrained_generator(seed)
        yield from measure(SMALL_GAN, TRAINED, D, X, from_generator(G, n))
        yield from measure(SMALL_GAN, UNTRAINED, new.to(options.device), X, from_generator(G, n))
        own = from_generator(first.to(options.device), n)
        yield from measure(SMALL_GAN, OWN, new, X, own, kernels=("nfk",))  # the NTK has no statistics


def plain_discriminator(options: argparse.Namespace, sizes: Sizes) -> Iterator[Found]:
    """The same without batch norm, trained with spectral norm, which is then part of its weights."""
    pixels = grayscale(options.data, "mnist", True)[0][:, None].to(options.device)
    n = sizes.images[PLAIN_GAN]
    X = pixels[:n].float() / 127.5 - 1
    for seed in range(options.seed, options.seed + sizes.seeds):
        D, new = (draw_network(lambda: Discriminator(SMALL, norm=False), seed).to(options.device) for _ in range(2))
        start = draw_network(lambda: Generator(16), seed)
        G, _, _ = train_hinge(D, start, pixels, steps=sizes.plain_steps, seed=seed)
        yield from measure(PLAIN_GAN, TRAINED, D, X, from_generator(G, n))
        yield from measure(PLAIN_GAN, UNTRAINED, new, X, from_generator(G, n))


def from_generator(G: nn.Module, n: int) -> linnet.scores.Score:
    """The discriminator's output, which is the one before the sigmoid, with Z and I from n samples."""
    return linnet.scores.gan(G, latent=LATENT, samples=n, output=lambda logits: logits)


# The experiment.


ARGUMENTS = {
    "--digits": common.several(range(10), "default: 3 8", type=int, nargs=2, default=(3, 8), metavar="DIGIT"),
    "--images": "images of every spectrum (default: 400 to 1,500)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train, compute the spectra, count components."""
    if options.digits[0] == options.digits[1]:
        raise ValueError(f"--digits needs two different digits; got {options.digits[0]} twice.")
    sizes = SIZES[common.kind_of(options)]
    if options.images is not None:
        sizes = Sizes(**vars(sizes) | {"images": dict.fromkeys(sizes.images, options.images)})
    found: list[Found] = []
    for part in (classifiers, large_discriminator, small_discriminator, plain_discriminator):
        found.extend(part(options, sizes))
    table = summary(found)
    metrics = {
        "settings": {
            "digits": options.digits,
            "steps": sizes.steps,
            "GAN steps": sizes.gan_steps,
            "GAN steps without batch norm": sizes.plain_steps,
            "seeds": sizes.seeds,
            "seed": options.seed,
            "paper": {"components for 99.5 %, trained": PAPER, "parameters": 17_000},
        },
        "errors": "standard errors over seeds",
        "spectra": table,
    }
    return common.Outcome(metrics, figure(found), rows(table, sizes))


def summary(found: Sequence[Found]) -> dict[str, Any]:
    """Panel, network and kernel to sizes and counts."""
    table: dict[str, Any] = {}
    for panel, name, kernel in dict.fromkeys((one.panel, one.name, one.kernel) for one in found):
        same = [one for one in found if (one.panel, one.name, one.kernel) == (panel, name, kernel)]
        n = same[0].n
        table.setdefault(panel, {}).setdefault(name, {})[kernel] = {
            "n": n,
            "p": same[0].p,
            "components": {
                f"{100 * share:g} %": average([one.spectrum.components(share) for one in same]) for share in SHARES
            },
            "components for 99.5 % of the squared eigenvalues": average([one.squared for one in same]),
            "effective rank": average([one.spectrum.effective_rank for one in same]),
            "explained": {k: average([float(one.spectrum.explained[k - 1]) for one in same]) for k in COUNTS if k <= n},
        }
        if same[0].accuracy is not None:
            table[panel][name][kernel]["test accuracy"] = average([one.accuracy or 0.0 for one in same])
    return table


def rows(table: Mapping[str, Any], sizes: Sizes) -> Iterator[common.Row]:
    def counts(panel: str, name: str, kernel: str, *shares: float) -> str:
        kept = table[panel][name][kernel]["components"]
        return " / ".join(show_error(kept[f"{100 * share:g} %"], 0) for share in shares)

    def squared(panel: str, name: str) -> str:
        return show_error(table[panel][name]["nfk"]["components for 99.5 % of the squared eigenvalues"], 0)

    def versus(panel: str, names: Sequence[str], kernel: str, *shares: float) -> str:
        n = table[panel][names[0]][kernel]["n"]
        return ", ".join(f"{name}: {counts(panel, name, kernel, *shares)}" for name in names) + f", of n = {n:,}"

    lenet, plain = (f"{name}, {TRAINED}" for name in ("LeNet-5", "MLP"))
    accuracy = [100 * table[CLASSIFIERS][name]["nfk"]["test accuracy"]["mean"] for name in (lenet, plain)]
    said = "LeNet-5 concentrates on fewer components than the MLP; no numbers"
    seeds = f"mean ± standard error over {sizes.seeds} seeds"
    differs = (
        f"digits, sizes and training are not given in the paper; here {sizes.steps} steps of Adam, test accuracy "
        f"{accuracy[0]:.1f} and {accuracy[1]:.1f} %, an MLP with as many parameters (61 thousand); {seeds}"
    )
    for kernel in KERNELS:
        ours = versus(CLASSIFIERS, (lenet, plain), kernel, 0.9, 0.99, 0.995)
        yield common.Row(f"binary MNIST, {kernel.upper()}: components for 90 / 99 / 99.5 %", said, ours, differs)
    names = tuple(f"{name}, {UNTRAINED}" for name in ("LeNet-5", "MLP"))
    ours = versus(CLASSIFIERS, names, "nfk", 0.9, 0.99, 0.995)
    yield common.Row("binary MNIST, NFK at initialization: the same", "not in the paper", ours, seeds)

    said = f"trained {PAPER}, untrained many more (no number); p = 17K, n about 100 times {PAPER}"
    large = table[LARGE_GAN][TRAINED]["nfk"]["p"]
    new = f"untrained networks in eval mode, where their batch norm does not normalize yet; {seeds}"
    settings = {
        LARGE_GAN: f"stored weights, p = {large:,}, test images; no generator, so Z and I come from the data; {new}",
        SMALL_GAN: f"p = {table[SMALL_GAN][TRAINED]['nfk']['p']:,}, {sizes.gan_steps:,} steps of training; Z and I "
        f"from the trained generator, for the untrained discriminator too; {new}",
        PLAIN_GAN: f"p = {table[PLAIN_GAN][TRAINED]['nfk']['p']:,}, {sizes.plain_steps:,} steps with spectral norm, "
        f"hinge loss and DiffAugment; Z and I from the trained generator, for the untrained discriminator too; {seeds}",
    }
    for panel in settings:
        for kernel in KERNELS:
            ours = versus(panel, (TRAINED, UNTRAINED), kernel, 0.9, 0.995)
            what = f"{panel}, {kernel.upper()}: components for 90 / 99.5 %"
            yield common.Row(what, said if kernel == "nfk" else "not in the paper", ours, settings[panel])
        ours = f"{TRAINED}: {squared(panel, TRAINED)}, {UNTRAINED}: {squared(panel, UNTRAINED)}"
        what = f"{panel}, NFK: components for 99.5 % of the sum of squared eigenvalues"
        yield common.Row(what, said + ", if this is what it counts", ours, settings[panel])


# The figure.


def figure(found: Sequence[Found]) -> Figure:
    """Columns are the panels; rows the NFK's eigenvalues, what they explain, and what those of the NTK explain."""
    titles = {
        CLASSIFIERS: "LeNet-5 and MLP on two digits",
        LARGE_GAN: "DCGAN discriminator",
        SMALL_GAN: "small DCGAN discriminator",
        PLAIN_GAN: "small, spectral norm",
    }
    picture, axes = plt.subplots(3, len(titles), figsize=(15, 9.5), sharex="col")
    for column, (panel, title) in enumerate(titles.items()):
        mine = [one for one in found if one.panel == panel]
        top, middle, bottom = axes[:, column]
        p = " and ".join(f"{p:,}" for p in dict.fromkeys(one.p for one in mine))
        top.set_title(f"{title}\np = {p}, n = {mine[0].n:,}")
        for ax, kernel in ((top, "nfk"), (middle, "nfk"), (bottom, "ntk")):
            draw(ax, [one for one in mine if one.kernel == kernel], eigenvalues=ax is top)
        for ax in (middle, bottom):
            explained_axis(ax)
            if panel != CLASSIFIERS:
                ax.plot(PAPER, 0.005, "*", color="black", ms=11, zorder=5, label="the paper: 100 explain 99.5 %")
        handles, labels = middle.get_legend_handles_labels()
        top.legend(handles, labels, loc="lower left", fontsize=8)
        top.set_yscale("log")
        top.set_ylim(1e-6, 1.5)
        bottom.set_xlabel("components")
        bottom.set_xscale("log")
        bottom.set_xlim(0.9, 1.15 * mine[0].n)
    for ax, label in zip(axes[:, 0], ("NFK: share of each", "NFK: explained", "NTK: explained"), strict=True):
        ax.set_ylabel(label)
    return picture


def draw(ax: Axes, found: Sequence[Found], *, eigenvalues: bool) -> None:
    """One line for each seed; the first of a network carries the label."""
    seen: set[str] = set()
    for one in sorted(found, key=lambda one: list(LINES).index(one.name)):
        color, style = LINES[one.name]
        whole = one.spectrum
        values = whole.eigenvalues / whole.eigenvalues.sum() if eigenvalues else 1 - whole.explained
        shown = values > 1e-9  # the rest is rounding
        label = None if one.name in seen else one.name
        ax.plot(np.arange(1, one.n + 1)[shown], values[shown], style, color=color, lw=1.4, alpha=0.85, label=label)
        seen.add(one.name)


def explained_axis(ax: Axes) -> None:
    """What is left on a logarithmic scale, downwards, labelled by what is explained."""
    ax.set_yscale("log")
    ax.set_ylim(1.0, 0.002)
    ticks = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
    ax.set_yticks(ticks, [f"{100 * (1 - t):g} %" for t in ticks])
    ax.minorticks_off()
    ax.axhline(0.005, color="black", lw=0.8, ls="--")
