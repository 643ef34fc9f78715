"""Labels that a chosen batch saves: learning curves of linnet.select against labels drawn at random, and by entropy.

Rounds of labels, each chosen by the estimator of the round before. Classes are fitted by a Bayesian softmax head on
fixed features, numbers by the tangent kernel of an untrained network. All methods start from the same labels. Sizes and
methods were settled on seed 100; the numbers are of seeds from 0 on, which are other splits of the same data. On seed
100, features of Fashion-MNIST were chosen among several, and power was taken up beside concrete after four UCI sets
were tried (concrete, energy, power, wine): chosen labels came out ahead on power alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import data, networks, plots
from experiments.common.statistics import interval, show_interval, show_value

RANDOM, ENTROPY = "random", "entropy"
METHODS = {
    RANDOM: "at random",
    ENTROPY: "largest entropy of the predicted class, or largest variance of a number; one by one",
    "bald": "select(..., method='bald'), one by one",
    "variance": "select(..., method='variance'), jointly",
    "batchbald": "select(..., method='batchbald'), jointly",
    "bait": "select(..., method='bait'), jointly",
    "epig": "select(..., method='epig'), jointly; numbers alone, since pairs of classes take minutes",
}
PALETTE = (plots.GRAY, plots.YELLOW, plots.SKY, plots.ORANGE, plots.BLUE, plots.GREEN, plots.PURPLE)
COLORS = dict(zip(METHODS, PALETTE, strict=True))
SETS = ("digits", "fashion", "concrete", "power")
FEATURES = 24
"""Principal components of the inputs of a softmax head: time against accuracy."""
WORDS = dict.fromkeys(SETS, "RMSE") | {"digits": "accuracy", "fashion": "accuracy"}

# Seeds; numbers of labels, of random ones too; examples of the pool that a round chooses from.
QUICK = Sizes(seeds=2, labels=(20, 30), last=40, offered=50, offered_numbers=50)
CPU = Sizes(seeds=10, labels=(20, 60, 100, 150, 200, 250, 300), last=500, offered=300, offered_numbers=700)


class Task(NamedTuple):
    """A pool and a test set."""

    X: Tensor  # the pool
    y: Tensor  # labels of the pool, which are looked up when they are asked for
    X_test: Tensor
    y_test: Tensor
    classes: int  # 0 for numbers


def load(folder: Path, name: str, seed: int) -> Task:
    """Pool and test set of a seed; features see the inputs of the pool alone."""
    generator = torch.Generator().manual_seed(seed)
    if name == "digits":
        X, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        order = torch.randperm(len(X), generator=generator)
        return _reduced(X[order[500:]].double(), y[order[500:]], X[order[:500]].double(), y[order[:500]])
    if name == "fashion":
        parts = [_images(folder, train, size, generator) for train, size in ((True, 2000), (False, 1000))]
        return _reduced(*parts[0], *parts[1])
    table = torch.as_tensor(np.loadtxt(common.data_file(folder, f"uci/{name}.csv"), delimiter=",", skiprows=1))
    table = table[torch.randperm(len(table), generator=generator)]
    X, y = table[:, :-1], table[:, -1]
    return Task(X[250:1250], y[250:1250], X[:250], y[:250], 0)


def _images(folder: Path, train: bool, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What the convolutions of a LeNet-5 of MNIST make of some images of Fashion-MNIST, (n, 400), and labels."""
    x, y = data.grayscale(folder, "fashion_mnist", train)
    chosen = torch.randperm(len(x), generator=generator)[:size]
    larger = nn.functional.interpolate(x[chosen].unsqueeze(1).float() / 255, (32, 32), mode="bilinear")
    layers = networks.lenet5(folder / "weights").convnet
    with torch.no_grad():
        for name in ("c1", "c3"):
            larger = nn.functional.max_pool2d(layers[name](larger).relu(), 2)
    return larger.flatten(1).double(), y[chosen]


def _reduced(X: Tensor, y: Tensor, X_test: Tensor, y_test: Tensor) -> Task:
    """The leading components, in units of the first."""
    center = X.mean(0)
    _, s, V = torch.linalg.svd(X - center, full_matrices=False)
    P = V[:FEATURES].T * len(X) ** 0.5 / s[0]
    return Task((X - center) @ P, y, (X_test - center) @ P, y_test, int(y.max()) + 1)


def fit(task: Task, chosen: Sequence[int], before: Any, seed: int) -> Any:
    """The estimator of some labels; for classes, the evidence chooses the prior with the first and with 100 labels."""
    X, y = task.X[list(chosen)], task.y[list(chosen)]
    if not task.classes:
        return linnet.TangentRegressor(seed=seed, progress=False).fit(X, y)
    if before is not None and len(chosen) != 100:
        return before.refit(X, y)
    head = nn.Linear(X.shape[1], task.classes).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    classes = range(task.classes)
    return linnet.TangentClassifier(
        head, inference="laplace", prior="shared", classes=classes, seed=seed, progress=False
    ).fit(X, y)


def score(task: Task, estimator: Any) -> float:
    """Accuracy, or root mean squared error."""
    if task.classes:
        return float((estimator.predict(task.X_test) == task.y_test).double().mean())
    return float((estimator.predict(task.X_test) - task.y_test).square().mean().sqrt())


def choose(task: Task, estimator: Any, offered: Tensor, n: int, method: str, seed: int) -> list[int]:
    """n examples of those that are offered."""
    X = task.X[offered]
    if method == RANDOM:
        return offered[:n].tolist()
    if method == ENTROPY and task.classes:
        best = torch.special.entr(estimator.predict_proba(X)).sum(1).topk(n).indices
    elif method == ENTROPY:
        best = estimator.predict(X, return_std=True)[1].topk(n).indices
    else:
        # Some examples of concrete are there twice, with other targets.
        best = linnet.select(estimator, X, n, method, targets=X[:60], overlap="allow", seed=seed).indices
    return offered[best].tolist()


def curves(task: Task, methods: Sequence[str], sizes: Sizes, seed: int) -> dict[str, dict[str, float]]:
    """The score of each method by number of labels; the first labels and their estimator are those of all methods."""
    chosen = torch.randperm(len(task.X), generator=torch.Generator().manual_seed(seed))[: sizes.labels[0]].tolist()
    first = fit(task, chosen, None, seed)
    return {method: curve(task, method, sizes, chosen, first, seed) for method in methods}


def curve(task: Task, method: str, sizes: Sizes, chosen: list[int], first: Any, seed: int) -> dict[str, float]:
    """The score by number of labels."""
    generator = torch.Generator().manual_seed(1000 + seed)
    found, estimator = {}, first
    counts = (*sizes.labels, sizes.last) if method == RANDOM else sizes.labels
    for count, following in zip(counts, (*counts[1:], None), strict=True):
        estimator = estimator if count == counts[0] else fit(task, chosen, estimator, seed)
        found[str(count)] = score(task, estimator)
        if following is None:
            break
        left = torch.ones(len(task.X), dtype=torch.bool)
        left[chosen] = False
        rest = left.nonzero()[:, 0]
        most = max(sizes.offered if task.classes else sizes.offered_numbers, following - count)
        offered = rest[torch.randperm(len(rest), generator=generator)[:most]]
        chosen = chosen + choose(task, estimator, offered, following - count, method, seed)
    return found


# The experiment.


ARGUMENTS = {
    "--seeds": "draws of pool, test set and first labels (default: 10)",
    "--sets": common.several(SETS, "data sets"),
    "--methods": common.several(METHODS, "ways to choose labels"),
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All data sets, seeds and methods; each curve is kept as soon as it is there."""
    common.require_cpu(options, "Heads and kernels are small")
    sizes = QUICK if options.quick else CPU
    parts: dict[str, Any] = {}
    for name in options.sets:
        for seed in common.seeds_of(options, sizes.seeds):
            task = load(options.data, name, seed)
            methods = [m for m in options.methods if m != "epig" or not task.classes]
            found = curves(task, methods, sizes, seed)
            parts = common.keep(options, {name: {f"seed {seed}": found}})
            ends = {method: round(list(one.values())[-1], 3) for method, one in found.items()}
            print(f"{name}, seed {seed}: {ends}", flush=True)
    table = {name: summarize_set(list(parts[name].values()), sizes, name) for name in SETS if name in parts}
    record = {
        "settings": {"labels": sizes.labels, "last": sizes.last, "offered": sizes.offered, "features": FEATURES},
        "errors": "95 % intervals by Student's t over seeds; differences are paired",
        "methods": METHODS,
        "summary": table,
        "parts": parts,
    }
    return common.Outcome(record, figure(table), rows(table, sizes))


def summarize_set(each: Sequence[Mapping[str, Any]], sizes: Sizes, name: str) -> dict[str, Any]:
    """Mean curves; how many labels reach the mean score of random labels at their last size; the last difference."""
    out: dict[str, Any] = {}
    sign = -1 if WORDS[name] == "RMSE" else 1
    for method in [method for method in METHODS if all(method in one for one in each)]:
        counts = list(each[0][method])
        means = {count: interval([one[method][count] for one in each]) for count in counts}
        gaps = [sign * (one[method][counts[-1]] - one[RANDOM][str(sizes.last)]) for one in each]
        goal = interval([one[RANDOM][str(sizes.last)] for one in each])["mean"]
        needed = labels_needed([int(c) for c in counts], [sign * means[c]["mean"] for c in counts], sign * goal)
        out[method] = {"curve": means, "labels": needed, "less random": interval(gaps)}
    return out


def labels_needed(counts: Sequence[int], scores: Sequence[float], goal: float) -> float | None:
    """The number of labels at which a curve first reaches the goal, by a line between sizes; None where it does not.

    >>> labels_needed([10, 20, 40], [0.5, 0.7, 0.8], 0.75), labels_needed([10, 20], [0.5, 0.7], 0.9)
    (30.0, None)
    """
    for i, (count, value) in enumerate(zip(counts, scores, strict=True)):
        if value >= goal:
            if i == 0:
                return float(count)
            share = (goal - scores[i - 1]) / (value - scores[i - 1])
            return counts[i - 1] + share * (count - counts[i - 1])
    return None


def rows(table: Mapping[str, Any], sizes: Sizes) -> list[common.Row]:
    found = []
    for name, methods in table.items():
        for method, one in methods.items():
            last, value = list(one["curve"].items())[-1]
            needed = f"not in {last}" if one["labels"] is None else f"{one['labels']:.0f}"
            found.append(
                common.Row(
                    f"{name}, {method}: labels to reach {WORDS[name]} of {sizes.last} random ones; {WORDS[name]} at "
                    f"{last}",
                    "BatchBALD needs fewer labels than BALD and random ones on MNIST (figure)",
                    f"{needed}; {show_value(value, 3)}; better than {sizes.last} random labels by "
                    f"{show_interval(one['less random'], digits=3)}",
                    f"softmax head on {FEATURES} components, or a tangent kernel; {value['count']} seeds, 95 % "
                    "intervals; a round chooses from "
                    f"{sizes.offered if WORDS[name] == 'accuracy' else sizes.offered_numbers} examples",
                )
            )
    return found


def figure(table: Mapping[str, Any]) -> Figure:
    """A panel for each data set."""
    picture, panels = plt.subplots(1, len(table), figsize=(4.6 * len(table), 4), squeeze=False)
    for ax, (name, methods) in zip(panels[0], table.items(), strict=True):
        for method, one in methods.items():
            counts = [int(count) for count in one["curve"]]
            plots.draw_means(ax, counts, list(one["curve"].values()), color=COLORS[method], label=method)
        goal = list(methods[RANDOM]["curve"].values())[-1]["mean"] if RANDOM in methods else None
        if goal is not None:
            ax.axhline(goal, color="black", lw=0.8, ls=":")
        ax.set(title=name, xlabel="labels", ylabel=WORDS[name])
    panels[0][0].legend(fontsize=8)
    return picture
