"""Linearized ResNets on CIFAR-10: accuracy, NLL and calibration (Maddox et al. 2021, section 4 and figure 4).

The stored networks (not PreResNets, and one of each depth instead of ten) were trained on all training images of
CIFAR-10, those that the linear models are fitted to here among them. The linearized network keeps the network's outputs
as its mean, the finite NTK has mean zero. Every fit is kept as soon as it is there: `--depths`, `--means` and
`--inference` do some of them, and the table and the figure show all that have been kept.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.data import cifar10
from experiments.common.networks import resnet
from experiments.common.statistics import average, interval, show_interval
from experiments.common.training import in_parts, in_turn
from linnet import metrics

NETWORK = "network"
MEANS = {"network": "linearized network", "zero": "finite NTK"}
INFERENCES = ("map", "laplace", "vi")
SCORES = ("accuracy", "nll", "ece")
COLORS = {NETWORK: plots.GREEN, MEANS["network"]: plots.ORANGE, MEANS["zero"]: plots.BLUE}
MARKS = {"map": "o", "laplace": "s", "vi": "^"}
SMALL = 1e-4
"""Scale of the balanced prior, in which every layer moves the outputs by as much, below which they stay."""
DENSE = 1000
"""Fit images up to which all inferences are made by default; above, by products alone, the mode."""

# Depths, fit images, test images, draws, top blocks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "quick": {"depths": [20], "sizes": [12], "test": 20, "draws": 1, "top": 1},
    "cpu": {"depths": [20], "sizes": [100], "test": 300, "draws": 3, "top": 1},
    "cuda": {"depths": [20, 32, 56], "sizes": [500, 20_000], "test": 10_000, "draws": 1, "top": 0},
}


ARGUMENTS = {
    "--depths": {"type": int, "nargs": "+", "help": "20, 32, 56 (default: 20; cuda: all)"},
    "--sizes": {"type": int, "nargs": "+", "help": "fit images (default: 100; cuda: 500 20000)"},
    "--test": "test images (default: 300; cuda: 10,000)",
    "--draws": "of fit images (default: 3; cuda: 1)",
    "--top": "blocks that adapt, 0 for all (default: 1; cuda: 0)",
    "--means": common.several(MEANS),
    "--inference": {"nargs": "+", "choices": INFERENCES, "help": f"default: all, above {DENSE:,} images map"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Fit and score one after the other, and keep each."""
    common.fill(options, DEFAULTS)
    X, y, X_test, y_test = (t.to(options.device) for t in images(options))
    parts: dict[str, Any] = {}
    machine = common.machine(options.device)

    def keep(depth: int, n: int, name: str, seed: int, found: dict[str, Any]) -> None:
        nonlocal parts
        where = {setting(n, options): {name: {f"seed {seed}": found | {"machine": machine}}}}
        parts = common.keep(options, {f"ResNet-{depth}": where})
        said = found.get("failed") or ", ".join(f"{key} {found[key]:.4f}" for key in SCORES)
        print(f"ResNet-{depth}, {n:,} images, draw {seed}, {name}: {said}", flush=True)

    for depth in options.depths:
        net = resnet(options.data / "weights", depth).to(options.device)
        f = in_parts(net, (X_test,))
        for n in options.sizes:
            keep(depth, n, NETWORK, options.seed, score(f.double().softmax(1), f, y_test))
            for seed in range(options.seed, options.seed + options.draws):
                chosen = in_turn(y.cpu(), n, 10, torch.Generator().manual_seed(seed)).to(y.device)
                for inference in options.inference or (INFERENCES if n <= DENSE else INFERENCES[:1]):
                    for mean in options.means:
                        how = {"mean": mean, "inference": inference, "top": options.top or None, "seed": seed}
                        found = adapt(net, (X[chosen], y[chosen]), (X_test, y_test), f, how, options.device)
                        keep(depth, n, f"{MEANS[mean]}, {inference}", seed, found)
    return outcome(parts)


def images(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images to draw from and test images, with their labels."""
    few = max(options.sizes) <= 1000  # small draws are from the first images, which have enough of each class
    train = cifar10(options.data, "train_1", count=2000) if few else cifar10(options.data, "train")
    return *train, *cifar10(options.data, "test", count=options.test)


def setting(n: int, options: argparse.Namespace) -> str:
    layers = f"top {options.top} blocks" if options.top else "all layers"
    return f"{n} images, {layers}, {options.test} test images"


def score(p: Tensor, f: Tensor, y: Tensor) -> dict[str, Any]:
    """Scores of probabilities, and how their accuracy differs from that of the network's outputs f, image by image."""
    difference = (p.argmax(1) == y).double() - (f.argmax(1) == y).double()
    error = float(difference.std() / math.sqrt(len(y)))
    return {**metrics.classification(p, y), "less the network": float(difference.mean()), "its standard error": error}


def adapt(
    net: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    f: Tensor,
    how: Mapping[str, Any],
    device: str,
) -> dict[str, Any]:
    """Fit to the training images and score on the test images; a solve that does not converge is said, not scored."""
    clock = common.Clock(device)
    clf = linnet.TangentClassifier(net, dtype="float32", progress=False, **how)
    try:
        with clock("seconds"):
            clf.fit(train[0], train[1].cpu())
        with clock("predicting"):
            p = torch.as_tensor(clf.predict_proba(test[0])).to(f.device).double()
    except RuntimeError as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    found = {"solver": clf.solver_, "passes": clf.passes_, "scale": next(iter(clf.scales_.values()), math.nan)}
    return {**score(p, f, test[1]), **clock.seconds, **found}


# Tables.


def summary(parts: Mapping[str, Any]) -> dict[str, Any]:
    """By network, setting and method: means over draws; accuracy less the network's with its interval over draws."""
    out: dict[str, Any] = {}
    for net, settings in parts.items():
        for where, methods in settings.items():
            for name, draws in methods.items():
                rows = [row for row in draws.values() if "failed" not in row]
                if not rows:
                    continue
                out.setdefault(net, {}).setdefault(where, {})[name] = {
                    **{key: average([row[key] for row in rows]) for key in SCORES},
                    "less the network": interval([row["less the network"] for row in rows]),
                    "scale": max(row.get("scale") or 0.0 for row in rows),
                    "standard error over test images": max(row["its standard error"] for row in rows),
                }
    return out


def outcome(parts: Mapping[str, Any]) -> common.Outcome:
    """Rows and the figure of all that has been kept."""
    parts = dict(sorted(parts.items(), key=lambda item: int(item[0].removeprefix("ResNet-"))))
    tables = summary(parts)
    rows = []
    for net, settings in tables.items():
        for where, methods in settings.items():
            draws = max(len(d) for d in parts[net][where].values())
            for name, one in methods.items():
                ours = f"{100 * one['accuracy']['mean']:.2f} %, {one['nll']['mean']:.3f}, {one['ece']['mean']:.3f}"
                if name != NETWORK:
                    error = 100 * one["standard error over test images"]
                    gap = show_interval(one["less the network"], factor=100, digits=2)
                    ours += f"; accuracy less the network's {gap} points, standard error over test images {error:.2f}"
                    if one["scale"] < SMALL:
                        ours += "; the network has learned these images, and the evidence lets nothing move"
                what = f"{net}, {name}: accuracy, NLL, ECE"
                rows.append(common.Row(what, said(net, name), ours, differs(where, draws)))
    settings_ = {
        "prior": "balanced, one scale by the Laplace evidence",
        "dtype": "float32",
        "link": "probit",
        "training images": "the networks were trained on all 50,000, the fit images among them",
    }
    metrics_ = {"settings": settings_, "results": tables, "parts": parts}
    if sum(map(len, tables.values())) == 1:
        return common.Outcome(metrics_, figure(tables), rows)
    kept = [row for net in parts.values() for where in net.values() for d in where.values() for row in d.values()]
    spent = common.duration(sum(row.get("seconds", 0.0) + row.get("predicting", 0.0) for row in kept))
    several = "python -m experiments figure4 (in several runs, by --device, --depths, --sizes, --test and --inference)"
    return common.Outcome(metrics_, figure(tables), rows, command=several, time=f"{spent} for all fits")


def said(net: str, name: str) -> str:
    if name == f"{MEANS['zero']}, vi" and net == "ResNet-56":
        return "about 92 %; NLL and ECE slightly worse than the network's"
    if name == NETWORK:
        return "nearly as accurate as the linearized ones, better NLL and ECE (figure 4, no numbers in the text)"
    return "in figure 4 or its appendix, no number in the text"


def differs(where: str, draws: int) -> str:
    count, layers, test = where.split(", ")
    return (
        f"supplied ResNet instead of PreResNets with 10 seeds, trained on all training images; fitted to {count} "
        f"of these ({layers}, {draws} draws, 95 % interval), {test}"
    )


# The figure.


def figure(tables: Mapping[str, Any]) -> Figure:
    """Scores against depth, in the setting of each network with the most test images and then the most fit images."""
    best = {net: max(settings, key=size_of) for net, settings in tables.items()}
    shown = {net: tables[net][where] for net, where in best.items()}
    names = list(dict.fromkeys(name for methods in shown.values() for name in methods))
    picture = Figure(figsize=(12, 4.4))
    axes = picture.subplots(1, 3)
    for ax, (key, title) in zip(axes, zip(SCORES, ("accuracy, %", "NLL", "ECE"), strict=True), strict=True):
        for i, name in enumerate(names):
            method, _, inference = name.partition(", ")
            found = {j: methods[name][key] for j, methods in enumerate(shown.values()) if name in methods}
            x = [j + 0.07 * (i - len(names) / 2) for j in found]
            how = {"fmt": MARKS.get(inference, "D"), "color": COLORS[method], "ms": 6, "capsize": 2, "label": name}
            plots.draw_means(ax, x, list(found.values()), factor=100 if key == "accuracy" else 1, **how)
        ax.set_xticks(range(len(best)), [f"{net}\n{where.replace(', ', chr(10))}" for net, where in best.items()])
        ax.tick_params(axis="x", labelsize=8)
        ax.set_xlim(-0.6, len(best) - 0.4)
        ax.set_title(title)
    plots.legend_below(picture, axes[0], 4, fontsize=9)
    return picture


def size_of(where: str) -> tuple[int, int]:
    """Test images and fit images of a setting.

    >>> size_of("100 images, top 1 blocks, 200 test images")
    (200, 100)
    """
    fit, *_, test = (int(number) for number in re.findall(r"\d+", where))
    return test, fit
