"""ResNet-20 on CIFAR-10 with error bars: NLL, ECE, joint log likelihoods, and images of another kind.

The stored network was trained on all training images of CIFAR-10; the posterior is fitted to some of them, of batches 1
and 2, and scored on test images. The slides compare joint log likelihoods of several labels (kappa inputs, 10 (kappa -
1) labels of them; Osband et al. 2022) for a ResNet-18 on CIFAR-100. Gray clothes and digits are images that a network
for CIFAR-10 should not be sure of. Every method is kept as soon as it is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.allingham2023.laplace_digits import average_links
from experiments.common import plots
from experiments.common.data import as_cifar10, cifar10, grayscale
from experiments.common.networks import resnet
from experiments.common.training import in_parts, in_turn
from linnet import metrics
from linnet.laplace import predictive
from linnet.probability import Categorical

MAP, ALONE = "MAP", ", the evidence alone"
COMMAND = "python -m experiments laplace_cifar (and --device cuda)"
KAPPAS = (1, 2, 3, 4, 5)
LINKS = ("probit", "centered", "mc")
UNKNOWN = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
METHODS: dict[str, dict[str, Any]] = {
    "last layer": {"structure": "full", "params": "linear.*"},
    "kron": {"structure": "kron", "dtype": "float32"},
    "samples": {"structure": "samples", "dtype": "float32"},
}
# Training images of the last layer, of kron, of samples; posterior samples; test images; unknown images; draws.
DEFAULTS: dict[str, dict[str, Any]] = {
    "quick": {"train": [20, 10, 10], "samples": 2, "test": 6, "unknown": 4, "draws": 4},
    "cpu": {"train": [1000, 100, 40], "samples": 16, "test": 300, "unknown": 100, "draws": 100},
    "cuda": {"train": [20_000, 20_000, 5_000], "samples": 32, "test": 10_000, "unknown": 2_000, "draws": 500},
}


ARGUMENTS = {
    "--methods": common.several(METHODS, "default: all; none shows what is kept", nargs="*"),
    "--train": {"type": int, "nargs": 3, "help": "images for each method (default: 1000 100 40; cuda: more)"},
    "--samples": "posterior samples (default: 16; cuda: 32)",
    "--test": "test images (default: 300; cuda: 10,000)",
    "--unknown": "images of each other set (default: 100; cuda: 2000)",
    "--draws": "joint samples (default: 100; cuda: 500)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """The network alone, then each method, with the default prior and with that of largest evidence."""
    common.fill(options, DEFAULTS)
    parts = measure(options) if options.methods else common.kept_parts(options)
    if not parts:
        raise ValueError("Nothing is kept yet: name what to measure with --methods, or leave it out for all.")
    order = sorted(parts, key=lambda where: -image_count(where))
    metrics_ = {"settings": {"shown": order[0], "kappas": KAPPAS}, "parts": parts}
    every = [row for where in order for row in rows(parts[where], where)]
    spent = sum(sum(one.get("seconds", {}).values()) for found in parts.values() for one in found.values())
    return common.Outcome(metrics_, figure(parts[order[0]]), every, COMMAND, common.duration(spent))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that is kept, after the methods have been measured."""
    where, parts = setting(options), {}

    def keep(name: str, found: dict[str, Any]) -> None:
        nonlocal parts
        parts = common.keep(options, {where: {name: found}})
        print(name, {key: value for key, value in found.items() if key != "unknown"}, found["unknown"], flush=True)

    net = resnet(options.data / "weights").to(options.device)
    X_test, y_test = (t.to(options.device) for t in cifar10(options.data, "test", count=options.test))
    others = unknown(options)
    f = in_parts(net, (X_test,)).double()
    keep(MAP, score(f.softmax(1), y_test) | alone(f, y_test, options) | {"unknown": of_network(net, f, others)})
    for name, count in zip(METHODS, options.train, strict=True):
        if name not in options.methods:
            continue
        X, y = (t.to(options.device) for t in training(options, count))
        clock = common.Clock(options.device)
        with clock("fit"), common.expect(common.FAR):
            la = linnet.Laplace(net, samples=options.samples, seed=options.seed, progress=False, **METHODS[name])
            la.fit(X, y)
        keep(name, ask(la, X_test, y_test, others, options, clock) | {"training images": count})
        clock = common.Clock(options.device)
        with clock("fit"), common.expect(common.WIDE):
            la.tune(narrow=False)
        keep(name + ALONE, ask(la, X_test, y_test, others, options, clock) | {"training images": count})
    return parts


def image_count(where: str) -> int:
    """Of a setting.

    >>> image_count("10,000 test images; fitted to ...")
    10000
    """
    return int(where.split()[0].replace(",", ""))


def setting(options: argparse.Namespace) -> str:
    sizes = ", ".join(f"{name} {n:,}" for name, n in zip(METHODS, options.train, strict=True))
    return f"{options.test:,} test images; fitted to {sizes} images; {options.samples} posterior samples"


def training(options: argparse.Namespace, count: int) -> tuple[Tensor, Tensor]:
    """The first batches, or as many of each class from the first."""
    if count > 2000:
        X, y = cifar10(options.data, "train")
        return X[:count], y[:count]
    X, y = cifar10(options.data, "train_1", count=2 * count + 200)
    chosen = in_turn(y, count, 10, torch.Generator().manual_seed(options.seed))
    return X[chosen], y[chosen]


def unknown(options: argparse.Namespace) -> dict[str, Tensor]:
    """Images of other sets, of those that the data folder holds."""
    return {
        title: as_cifar10(grayscale(options.data, name, False)[0][: options.unknown]).to(options.device)
        for name, title in UNKNOWN.items()
        if (options.data / f"{name}.npz").exists()
    }


# Scores.


def score(p: Tensor, y: Tensor) -> dict[str, Any]:
    return metrics.classification(p.double(), y)


def joint(samples: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Average joint log likelihoods for every kappa, from samples (k, n, c) of all outputs."""
    out = {}
    for kappa in KAPPAS:
        random = torch.Generator().manual_seed(options.seed)
        groups = predictive.draw_groups(len(y), kappa, None, classes=True, generator=random)
        out[str(kappa)] = predictive.joint_log_likelihood(Categorical(), [samples], y, groups)
    return {"joint log likelihood": out}


def alone(f: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    return joint(f[None], y, options)


def ask(
    la: linnet.Laplace,
    X: Tensor,
    y: Tensor,
    others: Mapping[str, Tensor],
    options: argparse.Namespace,
    clock: common.Clock,
) -> dict[str, Any]:
    """Scores on the test images, and how well other images are told from them."""
    draws = min(options.draws, la.samples) if la.structure_ == "samples" else options.draws
    with clock("predict"):
        p, v = average_links(la, X, LINKS)
        samples = la.sample(X, draws)
    found = score(p["probit"], y) | joint(samples, y, options)
    links = {link: metrics.nll(p[link], y) for link in LINKS}
    apart = {}
    for name, x in others.items():
        q, w = average_links(la, x, LINKS[:1])
        apart[name] = areas((p["probit"], v), (q["probit"], w))
    return found | {
        "NLL by link": links,
        "unknown": apart,
        "prior variance": next(iter(la.scales_.values())),
        "narrowed": la.narrowed_,
        "effective dimension": la.effective_dimension_,
        "mean variance of a logit": float(v.mean()),
        "seconds": dict(clock.seconds),
    }


def of_network(net: nn.Module, f: Tensor, others: Mapping[str, Tensor]) -> dict[str, Any]:
    p = f.softmax(1)
    return {name: areas((p, None), (in_parts(net, (x,)).double().softmax(1), None)) for name, x in others.items()}


def areas(known: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> dict[str, float]:
    """Areas under the ROC curve: how often an unknown image is less certain than a test image."""

    def area(a: Tensor, b: Tensor) -> float:
        return float(roc_auc_score([0] * len(a) + [1] * len(b), torch.cat([a, b]).double().cpu()))

    (p, s), (q, t) = known, other
    out = {
        "1 - largest probability": area(1 - p.amax(1), 1 - q.amax(1)),
        "entropy": area(torch.special.entr(p).sum(1), torch.special.entr(q).sum(1)),
    }
    if s is not None and t is not None:
        out["variance of the logits"] = area(s.mean(1), t.mean(1))
    return out


# Tables and the figure.


def rows(found: Mapping[str, Any], where: str) -> Iterator[common.Row]:
    for name, one in found.items():
        joints = ", ".join(f"{value:.2f}" for value in one["joint log likelihood"].values())
        yield common.Row(
            f"{name}: NLL, ECE, joint log likelihood for kappa = 1 .. 5",
            "ResNet-18, CIFAR-100, MAP: -1.40, -13.97, -27.89, -41.83, -55.89; ensemble of 5: -0.90 .. -31.07",
            f"{one['nll']:.4f}, {one['ece']:.3f}, {joints}",
            f"ResNet-20, CIFAR-10, {where}",
        )
    for name, one in found.items():
        for title, area in one["unknown"].items():
            told = ", ".join(f"{key} {value:.3f}" for key, value in area.items())
            yield common.Row(f"{name}: AUROC of {title}", "not on the slides", told, where)


def figure(found: Mapping[str, Any]) -> Figure:
    """Joint log likelihoods per label less MAP's, NLL, and areas under the ROC curve."""
    palette = (plots.GRAY, plots.BLUE, plots.SKY, plots.GREEN, plots.YELLOW, plots.PURPLE, plots.VERMILION)
    colors = dict(zip(found, palette, strict=False))
    titles = list(found[MAP]["unknown"])
    picture, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2))
    for i, (name, one) in enumerate(found.items()):
        gaps = [
            (value - found[MAP]["joint log likelihood"][kappa]) / max(1, 10 * (int(kappa) - 1))
            for kappa, value in one["joint log likelihood"].items()
        ]
        left.plot(KAPPAS, gaps, "o-", color=colors[name], label=name)
        middle.barh(i, one["nll"], color=colors[name])
        for j, title in enumerate(titles):
            for x, mark in zip(one["unknown"].get(title, {}).values(), "o^D", strict=False):
                face = colors[name] if j == 0 else "white"
                right.plot(x, i + 0.2 * (j - 0.5), mark, color=colors[name], mfc=face)
    left.set(xlabel="kappa (inputs in a group)", ylabel="joint log likelihood per label, less MAP's")
    left.set_yscale("symlog", linthresh=0.2)
    middle.set_xlabel("test NLL")
    fills = "; ".join(f"{title} {fill}" for title, fill in zip(titles, ("filled", "open"), strict=False))
    right.set_xlabel(f"AUROC: o largest probability,\n^ entropy, D variance\n{fills}")
    for ax in (middle, right):
        plots.name_rows(ax, list(found))
    plots.legend_below(picture, left, 4)
    return picture
