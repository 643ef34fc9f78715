"""Networks of several sites in one: posteriors multiplied, against averages of weights and task arithmetic.

All sites start from one network, which has learned digits from a few images of all classes. Each site has images of
some labels alone, and trains with the penalty of the start's posterior. No site sees images of another. `linnet.merge`
multiplies the posteriors, with that of the start as the shared prior. Averages take the same networks. Task arithmetic
adds the sum of all displacements times one number. The penalty's weight, of each way to merge, and the number of task
arithmetic are chosen on development seeds. Tangent classifiers adapt one linear model at each site, around the start.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import data, plots
from experiments.common.statistics import interval, show_interval, show_value
from experiments.ritter2018.onward import choose, scaled, train

START, BEST, AVERAGE, ARITHMETIC, DIAG, KRON, FULL, TANGENT, TANGENT_AVERAGE, JOINT = (
    "start",
    "best site",
    "average of weights",
    "task arithmetic",
    "merge, diag",
    "merge, kron",
    "merge, full",
    "merge, tangent",
    "average, tangent",
    "all data",
)
METHODS = {
    START: "the network that all sites start from",
    BEST: "the network of the best single site",
    AVERAGE: "the average of the sites' weights",
    ARITHMETIC: "the start and a number times the sum of the sites' displacements, trained without a penalty",
    DIAG: "linnet.merge of Laplace(structure='diag', prior=start)",
    KRON: "linnet.merge of Laplace(structure='kron', prior=start)",
    FULL: "linnet.merge of Laplace(structure='full', prior=start)",
    TANGENT: "linnet.merge of TangentClassifier around the start",
    TANGENT_AVERAGE: "the average of the displacements of the same classifiers",
    JOINT: "one network of all sites' data, with the penalty of the start",
}
SPLITS = {"label halves": 2, "label pairs": 5}
GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Weights of the penalty, and numbers of task arithmetic, that are tried."""
WEIGHED = (AVERAGE, ARITHMETIC, DIAG, KRON, FULL, JOINT)
DEVELOPMENT = 100

# Seeds that are reported, and development seeds; images of the start, images of each label at a site, test images.
QUICK = Sizes(seeds=2, development=1, start=40, n=10, test=100, epochs=20, rate=1e-2, grid=GRID[::2], hidden=8)
CPU = Sizes(seeds=10, development=2, start=100, n=60, test=2000, epochs=60, rate=1e-2, grid=GRID, hidden=16)


class Sites(NamedTuple):
    """Images of the start, of each site, and of the test."""

    start: tuple[Tensor, Tensor]
    each: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]


def draw(folder: Path, split: str, sizes: Sizes, seed: int) -> Sites:
    """MNIST at 7 x 7 pixels; development seeds test on training images."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for part in (True, False):
        x, y = data.grayscale(folder, "mnist", part)
        order = torch.randperm(len(x), generator=generator)[:20_000]
        found.append((F.avg_pool2d(x[order].float().unsqueeze(1) / 255, 4).flatten(1), y[order]))
    X, y = found[0]
    rest_X, rest_y = X[sizes.start :], y[sizes.start :]
    classes = torch.randperm(10, generator=generator).chunk(SPLITS[split])
    each = []
    used = torch.zeros(len(rest_y), dtype=torch.bool)
    for own in classes:
        index = torch.cat([(rest_y == label).nonzero()[: sizes.n, 0] for label in own])
        used[index] = True
        each.append((rest_X[index], rest_y[index]))
    free = (~used).nonzero()[: sizes.test, 0]
    test = (rest_X[free], rest_y[free]) if seed >= DEVELOPMENT else tuple(part[: sizes.test] for part in found[1])
    return Sites((X[: sizes.start], y[: sizes.start]), each, test)


def accuracy(outputs: Tensor, sites: Sites) -> float:
    return float((outputs.argmax(1) == sites.test[1]).double().mean())


def outputs_of(model: nn.Module, sites: Sites) -> Tensor:
    with torch.no_grad():
        return model(sites.test[0])


def begin(sites: Sites, sizes: Sizes, seed: int) -> nn.Module:
    """The network that all sites start from."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(49, sizes.hidden), nn.Tanh(), nn.Linear(sizes.hidden, 10))
    train(model, *sites.start, sizes, seed, decay)
    return model


def decay(model: nn.Module) -> Tensor:
    """Weight decay, small: the prior of the start."""
    return 0.5e-3 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def go_on(start: nn.Module, term: Any, part: tuple[Tensor, Tensor], sizes: Sizes, seed: int) -> nn.Module:
    """The network of a site."""
    model = copy.deepcopy(start)
    train(model, *part, sizes, seed, term)
    return model


def approximate(model: nn.Module, structure: Any, prior: Any, part: tuple[Tensor, Tensor]) -> linnet.Laplace:
    with common.expect(common.FAR, common.WIDE):
        return linnet.Laplace(model, structure=structure, prior=prior, progress=False).fit(*part)


def penalized(start: nn.Module, sites: Sites, sizes: Sizes, method: str, weight: float, seed: int) -> float:
    """The accuracy of a method whose sites train with a penalty of some weight."""
    structure = {DIAG: "diag", KRON: "kron", FULL: "full"}.get(method, "kron")
    earlier = approximate(start, structure, 1.0, sites.start)
    if method == JOINT:
        X, y = (torch.cat(parts) for parts in zip(*sites.each, strict=True))
        model = go_on(start, earlier.penalty(weight=weight / len(X)), (X, y), sizes, seed)
        return accuracy(outputs_of(model, sites), sites)
    if method == ARITHMETIC:
        models = [go_on(start, None, part, sizes, seed) for part in sites.each]
        return accuracy(outputs_of(combine(start, models, weight / len(models)), sites), sites)
    models = [go_on(start, earlier.penalty(weight=weight / len(part[1])), part, sizes, seed) for part in sites.each]
    if method == AVERAGE:
        return accuracy(outputs_of(combine(start, models, 1 / len(models)), sites), sites)
    if method == BEST:
        return max(accuracy(outputs_of(model, sites), sites) for model in models)
    fits = [approximate(model, structure, earlier, part) for model, part in zip(models, sites.each, strict=True)]
    return accuracy(outputs_of(linnet.merge(fits).model, sites), sites)


def combine(start: nn.Module, models: Sequence[nn.Module], factor: float) -> nn.Module:
    """The start and a factor times the sum of all displacements."""
    found = copy.deepcopy(start)
    with torch.no_grad():
        for to, origin, *others in zip(*(m.parameters() for m in (found, start, *models)), strict=True):
            to.copy_(origin + factor * sum(other - origin for other in others))
    return found


def tangents(start: nn.Module, sites: Sites) -> dict[str, float]:
    """Both ways to put the tangent classifiers of all sites together; with the images of the start as another site."""
    how: dict[str, Any] = {"inference": "laplace", "mean": "network", "prior": 0.1, "solver": "weight"}
    with common.expect(common.OWN):
        fits = [
            linnet.TangentClassifier(start, classes=range(10), progress=False, **how).fit(*part) for part in sites.each
        ]
    merged, outputs = linnet.merge(fits), outputs_of(start, sites)
    shifts = [one.to_module()(sites.test[0]) - outputs for one in fits]
    both = {TANGENT: merged.to_module()(sites.test[0]), TANGENT_AVERAGE: outputs + torch.stack(shifts).mean(0)}
    return {name: accuracy(found.detach(), sites) for name, found in both.items()}


# The experiment.

ARGUMENTS = {
    "--seeds": "seeds that are reported (default: 10)",
    "--splits": common.several(SPLITS, "how labels are shared out"),
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Weights on development seeds, then all methods on other seeds; each seed is kept as soon as it is there."""
    common.require_cpu(options, "Networks are small")
    sizes = QUICK if options.quick else CPU
    parts: dict[str, Any] = {}
    for split in options.splits:
        grid: dict[str, Any] = {method: {} for method in WEIGHED}
        for seed in range(DEVELOPMENT, DEVELOPMENT + sizes.development):
            sites = draw(options.data, split, sizes, seed)
            start = begin(sites, sizes, seed)
            for m in WEIGHED:
                grid[m][f"seed {seed}"] = {f"{w:g}": penalized(start, sites, sizes, m, w, seed) for w in sizes.grid}
        weights = {m: choose(list(one.values())) for m, one in grid.items()}
        parts = common.keep(options, {split: {"development": grid, "weights": weights}})
        print(f"{split}: {weights}", flush=True)
        for seed in common.seeds_of(options, sizes.seeds):
            sites = draw(options.data, split, sizes, seed)
            start = begin(sites, sizes, seed)
            found = {m: penalized(start, sites, sizes, m, float(weights[m]), seed) for m in WEIGHED}
            found[BEST] = penalized(start, sites, sizes, BEST, float(weights[AVERAGE]), seed)
            found |= {START: accuracy(outputs_of(start, sites), sites), **tangents(start, sites)}
            parts = common.keep(options, {split: {"seeds": {f"seed {seed}": found}}})
            print(f"{split}, seed {seed}: { ({m: round(a, 3) for m, a in found.items()}) }", flush=True)
    table = {split: summarize_split(parts[split]) for split in SPLITS if "seeds" in parts.get(split, {})}
    record = {
        "settings": dict(vars(sizes)),
        "errors": "95 % intervals by Student's t over seeds; differences are paired",
        "methods": METHODS,
        "summary": table,
        "parts": parts,
    }
    return common.Outcome(record, figure(table), rows(table, sizes))


def summarize_split(part: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracies and differences to the average, of networks or of tangent classifiers."""
    seeds = list(part["seeds"].values())
    out: dict[str, Any] = {}
    for method in METHODS:
        other = TANGENT_AVERAGE if method in (TANGENT, TANGENT_AVERAGE) else AVERAGE
        out[method] = {
            "accuracy": interval([one[method] for one in seeds]),
            "less average": interval([one[method] - one[other] for one in seeds]),
            "less task arithmetic": interval([one[method] - one[ARITHMETIC] for one in seeds]),
            "weight": part["weights"].get(method),
        }
    return out


def rows(table: Mapping[str, Any], sizes: Sizes) -> list[common.Row]:
    return [
        common.Row(
            f"{split}, {method}: accuracy in % of one network from {SPLITS[split]} sites",
            "",
            f"{show_value(scaled(one['accuracy']), 1)}; less the average "
            f"{show_interval(one['less average'], factor=100)}; less task arithmetic "
            f"{show_interval(one['less task arithmetic'], factor=100)}"
            + ("" if one["weight"] is None else f"; chosen number {one['weight']}"),
            f"{sizes.n} images of each label, {one['accuracy']['count']} seeds, 95 % intervals; numbers chosen on "
            f"{sizes.development} other seeds",
        )
        for split, methods in table.items()
        for method, one in methods.items()
    ]


def figure(table: Mapping[str, Any]) -> Figure:
    """A panel for each way to share labels out."""
    picture, panels = plt.subplots(1, len(table), figsize=(5 * len(table), 4), squeeze=False, sharex=True)
    for ax, (split, methods) in zip(panels[0], table.items(), strict=True):
        for i, (method, one) in enumerate(methods.items()):
            color = plots.BLUE if method.startswith("merge") else plots.GRAY
            plots.draw_means(ax, [i], [one["accuracy"]], factor=100, across=True, color=color)
        plots.name_rows(ax, list(methods))
        ax.set(title=f"{split}: {SPLITS[split]} sites", xlabel="accuracy (%)")
    return picture
