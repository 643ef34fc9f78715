"""Tasks one after another: carried posteriors against fine-tuning, elastic weight consolidation and replay.

A network learns five tasks, each with the data of that task alone. Split MNIST and split CIFAR-10 have one pair of
classes in each task and one head of two outputs for all tasks; permuted MNIST has ten classes and other pixels in each
task. After the last task the network is tested on all of them.

Carried posteriors: ``Laplace(structure=..., prior=earlier)`` after each task, and ``earlier.penalty(weight=w / n)`` in
the training of the next. Elastic weight consolidation: a penalty for each earlier task, from the exact diagonal of its
Fisher information (Kirkpatrick et al. 2017). All penalties have one free number, their weight w; w = 1 is Bayes' rule.
The weight of each method is chosen from one grid by the average accuracy on development seeds, which are other splits
and other initial weights than those of the seeds that are reported. They test on training images, held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import data, plots
from experiments.common.statistics import interval, show_interval, show_value

FINE, EWC, DIAG, KRON, RULE, REPLAY, JOINT = (
    "fine-tuning",
    "EWC",
    "carried, diag",
    "carried, kron",
    "carried, kron, w = 1",
    "replay",
    "all data",
)
METHODS = {
    FINE: "nothing is kept",
    EWC: "a diagonal penalty for each earlier task, at the weights of that task",
    DIAG: "Laplace(structure='diag', prior=earlier).penalty()",
    KRON: "Laplace(structure='kron', prior=earlier).penalty()",
    RULE: "the same without a free number",
    REPLAY: "images of each earlier task are kept, and are half of each batch",
    JOINT: "all tasks so far, trained again from new weights: not a method for tasks that are gone",
}
WEIGHED = (EWC, DIAG, KRON)
GRID = tuple(10.0 ** (i / 2) for i in range(11))
"""Weights of a penalty that are tried: from 1 to 100,000."""
PALETTE = (plots.GRAY, plots.VERMILION, plots.ORANGE, plots.BLUE, plots.SKY, plots.GREEN, "black")
COLORS = dict(zip(METHODS, PALETTE, strict=True))
SETS = ("split MNIST", "permuted MNIST", "split CIFAR-10")
TASKS = 5
DEVELOPMENT = 100
"""The first of the seeds that weights are chosen with."""

# Seeds that are reported, and development seeds; training images of a task by data set, test images, images of a task
# that are kept for replay; the side of a small image of CIFAR-10 and the channels of its network.
HOW: dict[str, Any] = {
    "kept": 20,
    "epochs": 10,
    "rate": 1e-3,
    "grid": GRID,
    "test": 1000,
    "development": 2,
    "seeds": 10,
}
QUICK = Sizes(**HOW | {"seeds": 2, "development": 1, "test": 60, "kept": 5, "epochs": 2, "grid": GRID[::5]})
QUICK.n, QUICK.side, QUICK.width = (60, 60, 60), 8, 4
CPU = Sizes(**HOW, n=(1000, 500, 400), side=16, width=8)
CUDA = Sizes(**HOW, n=(2000, 2000, 1000), side=32, width=16)
SIZES = {"quick": QUICK, "cpu": CPU, "cuda": CUDA}


class Task(NamedTuple):
    """Training and test images of a task, and their labels."""

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor


# Tasks.


def images(folder: Path, name: str, train: bool, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """All images, smaller than they are stored: MNIST (n, 196), CIFAR-10 (n, 3, side, side)."""
    if "CIFAR" in name:
        x, y = data.cifar10(folder, "train_1" if train else "test")
        return F.interpolate(x, (sizes.side, sizes.side), mode="area"), y
    x, y = data.grayscale(folder, "mnist", train)
    return F.avg_pool2d(x.float().unsqueeze(1) / 255, 2).flatten(1), y


def draw_tasks(x: Sequence[Tensor], y: Sequence[Tensor], name: str, sizes: Sizes, seed: int) -> list[Task]:
    """The tasks of a seed, of training and test images x and labels y; development seeds test on training images."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randperm(10, generator=generator)
    tasks = []
    for i in range(TASKS):
        pair = classes[2 * i : 2 * i + 2]
        p = x[0][0].numel()
        turned = torch.arange(p) if i == 0 else torch.randperm(p, generator=generator)
        n, m, split, parts = count(name, sizes), sizes.test, name.startswith("split"), list[Tensor]()
        for X, labels in zip(x, y, strict=True):
            found = torch.isin(labels, pair).nonzero()[:, 0] if split else torch.arange(len(labels))
            found = found[torch.randperm(len(found), generator=generator)[: n + m]]
            chosen = X[found] if split else X[found][:, turned]
            parts += [chosen, (labels[found] == pair[1]).long() if split else labels[found]]
        own = [part[n : n + m] for part in parts[:2]] if seed >= DEVELOPMENT else [part[:m] for part in parts[2:]]
        tasks.append(Task(parts[0][:n], parts[1][:n], *own))
    return tasks


def count(name: str, sizes: Sizes) -> int:
    """Training images of a task."""
    return sizes.n[SETS.index(name)]


def network(name: str, sizes: Sizes, seed: int) -> nn.Module:
    """A network with new weights: two hidden layers of 100, or three small convolutions for CIFAR-10."""
    torch.manual_seed(seed)
    if "CIFAR" not in name:
        return nn.Sequential(
            nn.Linear(196, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2 if "split" in name else 10)
        )
    layers: list[nn.Module] = []
    width = 3
    for channels in (sizes.width, 2 * sizes.width, 2 * sizes.width):
        layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * (sizes.side // 8) ** 2, 2))


# Training.


def train(
    model: nn.Module,
    X: Tensor,
    y: Tensor,
    sizes: Sizes,
    seed: int,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Adam on mean cross entropy, with a penalty, or with images that are kept as half of each batch."""
    steps = torch.optim.Adam(model.parameters(), lr=sizes.rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sizes.epochs):
        for index in torch.randperm(len(X), generator=generator).split(100):
            some = index.to(X.device)
            loss = F.cross_entropy(model(X[some]), y[some])
            if kept is not None:
                again = torch.randint(len(kept[0]), (len(index),), generator=generator).to(X.device)
                loss = (loss + F.cross_entropy(model(kept[0][again]), kept[1][again])) / 2
            if penalty is not None:
                loss = loss + penalty(model)
            steps.zero_grad()
            loss.backward()
            steps.step()


def learn(name: str, tasks: Sequence[Task], sizes: Sizes, method: str, weight: float, seed: int) -> list[list[float]]:
    """The accuracy on all tasks so far, after each task."""
    device = tasks[0].X.device
    model = network(name, sizes, seed).to(device)
    earlier: Any = None
    terms: list[Any] = []
    found: list[list[float]] = []
    for i, task in enumerate(tasks):
        X, y, n = task.X, task.y, len(task.X)
        penalty, kept = None, None
        if earlier is not None:
            penalty = earlier.penalty(weight=weight / n).to(device)
        if terms:
            penalty = sum_of(terms)
        if method == REPLAY and i:
            before = [(one.X[: sizes.kept], one.y[: sizes.kept]) for one in tasks[:i]]
            kept = torch.cat([part[0] for part in before]), torch.cat([part[1] for part in before])
        if method == JOINT:
            model = network(name, sizes, seed).to(device)
            X, y = torch.cat([one.X for one in tasks[: i + 1]]), torch.cat([one.y for one in tasks[: i + 1]])
        train(model, X, y, sizes, 1000 * seed + i, penalty, kept)
        how: dict[str, Any] = {"seed": seed, "progress": False}
        with common.expect(common.FAR, common.WIDE):
            if method in (DIAG, KRON, RULE):
                structure: Any = "diag" if method == DIAG else "kron"
                earlier = linnet.Laplace(model, structure=structure, prior=earlier or 1.0, **how).fit(task.X, task.y)
            if method == EWC:
                fisher = linnet.Laplace(model, structure="diag", prior=1e12, **how).fit(task.X, task.y)
                terms.append(fisher.penalty(weight=weight / n).to(device))
        found.append([accuracy(model, one) for one in tasks[: i + 1]])
    return found


def sum_of(terms: Sequence[Any]) -> Callable[[nn.Module], Tensor]:
    """The sum of penalties."""
    return lambda model: torch.stack([term(model) for term in terms]).sum()


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float:
    """The accuracy of a network on the test images of a task."""
    return float((model(task.X_test).argmax(1) == task.y_test).double().mean())


def average(curve: Sequence[Sequence[float]]) -> float:
    """The average accuracy on all tasks after the last one.

    >>> average([[0.9], [0.5, 0.9]])
    0.7
    """
    return float(np.mean(curve[-1]))


def forgetting(curve: Sequence[Sequence[float]]) -> float:
    """How much of the best accuracy on a task is gone after the last task, on average over all tasks but the last.

    >>> round(forgetting([[0.9], [0.5, 0.9]]), 6)
    0.4
    """
    last = curve[-1]
    return float(np.mean([max(row[i] for row in curve if len(row) > i) - last[i] for i in range(len(last) - 1)]))


def choose(each: Sequence[Mapping[str, float]]) -> str:
    """The weight with the largest mean over development seeds.

    >>> choose([{"1": 0.5, "3": 0.6}, {"1": 0.8, "3": 0.6}])
    '1'
    """
    return max(each[0], key=lambda weight: float(np.mean([one[weight] for one in each])))


# The experiment.

ARGUMENTS = {
    "--seeds": "seeds that are reported (default: 10 for split MNIST, 5 for others)",
    "--sets": common.several(SETS, "data sets"),
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Weights on development seeds, then all methods on other seeds; each is kept as soon as it is there."""
    kind = common.kind_of(options)
    sizes, parts = SIZES[kind], common.kept_parts(options)
    for name in options.sets:
        both = [images(options.data, name, train, sizes) for train in (True, False)]
        x, y = ([part[i].to(options.device) for part in both] for i in range(2))

        def tasks_of(seed: int, name: str = name, x: Any = x, y: Any = y) -> list[Task]:
            on_cpu = draw_tasks([t.cpu() for t in x], [t.cpu() for t in y], name, sizes, seed)
            return [Task(*(part.to(options.device) for part in task)) for task in on_cpu]

        weights = {}
        for method in WEIGHED:
            grid: dict[str, dict[str, float]] = {}
            for seed in range(DEVELOPMENT, DEVELOPMENT + sizes.development):
                tasks = tasks_of(seed)
                one = {f"{w:.3g}": average(learn(name, tasks, sizes, method, w, seed)) for w in sizes.grid}
                grid[f"seed {seed}"] = one
            weights[method] = choose(list(grid.values()))
            found = {"size": kind, "development": {method: grid}, "weights": {method: weights[method]}}
            parts = common.keep(options, {name: found})
            print(f"{name}, {method}: {grid}", flush=True)
        for seed in common.seeds_of(options, sizes.seeds if name == SETS[0] else (sizes.seeds + 1) // 2):
            tasks = tasks_of(seed)
            curves = {m: learn(name, tasks, sizes, m, float(weights.get(m, 1)), seed) for m in METHODS}
            parts = common.keep(options, {name: {"seeds": {f"seed {seed}": curves}}})
            print(f"{name}, seed {seed}: { ({m: round(average(c), 3) for m, c in curves.items()}) }", flush=True)
    return outcome(parts)


def outcome(parts: dict[str, Any]) -> common.Outcome:
    """Summary, figure and rows of all parts, which may come from a CPU and from a GPU."""
    table = {name: summarize_set(parts[name]) for name in SETS if "seeds" in parts.get(name, {})}
    kinds: dict[str, list[str]] = {parts[name]["size"]: [] for name in table}
    for name in table:
        kinds[parts[name]["size"]].append(name)
    device = {"cpu": "", "cuda": " --device cuda", "quick": " --quick"}
    commands = [
        f"python -m experiments onward --sets {' '.join(map(repr, names))}{device[kind]}"
        for kind, names in kinds.items()
    ]
    record = {
        "settings": {kind: vars(SIZES[kind]) | {"tasks": TASKS} for kind in kinds},
        "errors": "95 % intervals by Student's t over seeds; differences are paired",
        "methods": METHODS,
        "summary": table,
        "parts": parts,
    }
    return common.Outcome(record, figure(table), rows(table, parts), "; ".join(commands), renewed=outcome)


def summarize_set(part: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals over seeds, of each method and of its difference to EWC."""
    seeds = list(part["seeds"].values())
    out: dict[str, Any] = {}
    for method in METHODS:
        curves = [one[method] for one in seeds]
        gaps = [average(one[method]) - average(one[EWC]) for one in seeds]
        out[method] = {
            "average accuracy": interval([average(curve) for curve in curves]),
            "forgetting": interval([forgetting(curve) for curve in curves]),
            "less EWC": interval(gaps),
            "after each task": [interval([float(np.mean(curve[i])) for curve in curves]) for i in range(TASKS)],
            "weight": part["weights"].get(method),
        }
    return out


def rows(table: Mapping[str, Any], parts: Mapping[str, Any]) -> list[common.Row]:
    found = []
    for name, methods in table.items():
        sizes = SIZES[parts[name]["size"]]
        for method, one in methods.items():
            value, lost = one["average accuracy"], one["forgetting"]
            chosen = "" if one["weight"] is None else f"; w = {one['weight']}"
            found.append(
                common.Row(
                    f"{name}, {method}: average accuracy of {TASKS} tasks after the last, and forgetting, in %",
                    "Kronecker factors are ahead of the diagonal (Ritter et al. 2018)",
                    f"{show_value(scaled(value), 1)}; {show_value(scaled(lost), 1)}; less EWC "
                    f"{show_interval(one['less EWC'], factor=100)}{chosen}",
                    f"{count(name, sizes):,} images a task, {value['count']} seeds, 95 % intervals; weights "
                    f"of penalties from {sizes.development} other seeds",
                )
            )
    return found


def scaled(value: Mapping[str, float]) -> dict[str, float]:
    """Shares in percent."""
    return {key: 100 * number if key != "count" else number for key, number in value.items()}


def figure(table: Mapping[str, Any]) -> Figure:
    """The average accuracy on the tasks so far, by the number of tasks; a panel for each data set."""
    picture, panels = plt.subplots(1, len(table), figsize=(4.4 * len(table), 4), squeeze=False)
    for ax, (name, methods) in zip(panels[0], table.items(), strict=True):
        for method, one in methods.items():
            at = [i + 1 for i in range(TASKS)]
            style = {"fmt": "o--"} if method in (JOINT, FINE) else {}
            plots.draw_means(ax, at, one["after each task"], factor=100, color=COLORS[method], label=method, **style)
        ax.set(title=name, xlabel="tasks so far", ylabel="average accuracy (%)", xticks=range(1, TASKS + 1))
    plots.legend_below(picture, panels[0][0], 4, fontsize=9)
    return picture
