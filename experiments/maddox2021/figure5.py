"""How alike the Jacobians of trained networks are (Maddox et al. 2021, section 4 and figure 5, and a talk's questions).

LeNet-3 networks learn the first half of MNIST (MNIST1), the second (MNIST2) or Fashion-MNIST, those of Fashion-MNIST
with their last layer trained again on MNIST1, and are compared on images of MNIST1. The talk asks what becomes of the
function when training goes on (5 against 90 epochs) and when a node is removed: both with the same measure.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.data import grayscale
from experiments.common.networks import lenet
from experiments.common.statistics import average, show_error, show_value, summarize
from experiments.common.training import Labeled, Search, accuracy, in_parts, steps, train
from linnet.fisher import probes

SPACES = ("function", "parameters")
FIRST, SECOND, OTHER, NEW = "MNIST1", "MNIST2", "Fashion-MNIST", "untrained"
SETS = (FIRST, SECOND, OTHER)
SAME, DIFFERENT = "same start", "different starts"
COLORS = {FIRST: plots.BLUE, SECOND: plots.SKY, OTHER: plots.VERMILION, NEW: plots.GRAY}
LAST_HIDDEN, HEAD = 7, 9
"""Positions of the hidden layer and the outputs in the network."""


# Seeds, training images of each set (at most 30,000), epochs over them, images of the Jacobians; of the talk's
# questions: training images, epochs at which networks are kept, seeds, hidden units removed, images of accuracies.
QUICK = Sizes(seeds=2, half=200, epochs=1, images=10, few=100, marks=(0, 1, 2), runs=1, units=2, test=200)
CPU = Sizes(
    seeds=10, half=6000, epochs=2, images=100, few=500, marks=(0, 1, 2, 5, 10, 20, 40, 90), runs=3, units=10, test=2000
)
MORE = {"seeds": 25, "half": 30_000, "epochs": 5, "images": 300, "few": 10_000, "runs": 5, "units": 40, "test": 10_000}
CUDA = Sizes(**vars(CPU) | MORE)


def gray(folder: Any, name: str, train_: bool, device: str) -> Labeled:
    """Images (n, 1, 28, 28) in [0, 1] and labels."""
    x, y = grayscale(folder, name, train_)
    return Labeled(((x.unsqueeze(1).float() / 255).to(device),), y.to(device))


def both(a: nn.Module, b: nn.Module, X: Tensor) -> dict[str, float]:
    """The similarity in both spaces."""
    return {space: linnet.similarity(a, b, X, space=space) for space in SPACES}


def spectrum(net: nn.Module, X: Tensor) -> probes.Spectrum:
    """Of the tangent kernel on images X."""
    K = linnet.linearize(net).jacobian(X, progress=False).gram()
    return probes.spectrum(torch.linalg.eigvalsh(K.double()).clamp_min(0))


def describe(whole: probes.Spectrum) -> dict[str, Any]:
    """What is kept of a spectrum: its shares of the trace at some components, and how many matter."""
    count = len(whole.eigenvalues)
    at = np.unique(np.geomspace(1, count, 60).round().astype(int))
    shares = whole.eigenvalues / whole.eigenvalues.sum()
    return {
        "effective rank": whole.effective_rank,
        "components for 99 %": whole.components(0.99),
        "shares": {str(k): float(shares[k - 1]) for k in at},
    }


def with_last_layer_of(net: nn.Sequential, data: Labeled, *, epochs: int, seed: int) -> nn.Sequential:
    """A copy of the network whose last layer alone has been trained on the data."""
    new = copy.deepcopy(net)
    train(new[-1], Labeled((in_parts(new[:-1], data.X),), data.y), epochs=epochs, seed=seed)
    return new


# Tasks.


def of_tasks(sets: Mapping[str, Labeled], sizes: Sizes, seed: int, device: str) -> dict[str, nn.Sequential]:
    """The networks of one start, trained on each set."""
    nets: dict[str, nn.Sequential] = {}
    for name, data in sets.items():
        net = lenet(28, 10, seed=seed).to(device)
        nets[name] = train(net, data[: sizes.half], epochs=sizes.epochs, seed=seed)
    nets[OTHER] = with_last_layer_of(nets[OTHER], sets[FIRST][: sizes.half], epochs=1, seed=seed)
    nets[NEW] = lenet(28, 10, seed=seed).to(device)
    return nets


def pairs(nets: Mapping[str, nn.Module], others: Mapping[str, nn.Module], X: Tensor) -> dict[str, Any]:
    """Similarities of networks from one start, and of one with networks from another start."""
    alike = [(FIRST, SECOND), (FIRST, OTHER), (SECOND, OTHER), (FIRST, NEW)]
    return {
        SAME: {f"{a} and {b}": both(nets[a], nets[b], X) for a, b in alike},
        DIFFERENT: {f"{FIRST} and {b}": both(nets[FIRST], others[b], X) for b in (*SETS, NEW)},
    }


# The talk's questions.


def of_epochs(data: Labeled, test: Labeled, X: Tensor, sizes: Sizes, seed: int, device: str) -> dict[str, Any]:
    """Networks along one training, compared with its end."""
    net = lenet(28, 10, seed=seed).to(device)
    kept = {0: copy.deepcopy(net)}
    last = max(sizes.marks)
    for epoch in steps(net, data[: sizes.few], 1e-3, Search((1e-3,), last, batch=64), train_mode=True, seed=seed):
        if epoch in sizes.marks:
            kept[epoch] = copy.deepcopy(net)
    return {
        str(epoch): {
            **both(one, kept[last], X),
            "accuracy": accuracy(one, *test.X, test.y),
            "effective rank": spectrum(one, X).effective_rank,
        }
        for epoch, one in kept.items()
    }


def remove_unit(net: nn.Sequential, unit: int) -> nn.Sequential:
    """The network with the weights of one hidden unit set to zero, which for ReLU is the network without it."""
    new = copy.deepcopy(net)
    with torch.no_grad():
        new[LAST_HIDDEN].weight[unit] = 0
        new[LAST_HIDDEN].bias[unit] = 0
        new[HEAD].weight[:, unit] = 0
    return new


def of_nodes(net: nn.Sequential, test: Labeled, X: Tensor, sizes: Sizes, seed: int) -> list[dict[str, float]]:
    """For each removed unit the similarity with the whole network, and what it did to the predictions."""
    before = in_parts(net, (X,)).softmax(1)
    chosen = torch.randperm(net[LAST_HIDDEN].out_features, generator=torch.Generator().manual_seed(seed))
    out = []
    for unit in chosen[: sizes.units].tolist():
        new = remove_unit(net, unit)
        moved = float((in_parts(new, (X,)).softmax(1) - before).abs().sum(1).mean() / 2)
        out.append(
            {"unit": unit, **both(net, new, X), "probability moved": moved, "accuracy": accuracy(new, *test.X, test.y)}
        )
    return out


# The experiment.


ARGUMENTS = {
    "--seeds": "networks of each kind (default: 10; cuda: 25)",
    "--images": "of the Jacobians (default: 100; cuda: 300)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train, compare."""
    sizes = {"quick": QUICK, "cpu": CPU, "cuda": CUDA}[common.kind_of(options)]
    seeds = common.seeds_of(options, sizes.seeds)
    images = options.images or sizes.images
    digits, test = (gray(options.data, "mnist", part, options.device) for part in (True, False))
    sets = {
        FIRST: digits[:30_000],
        SECOND: digits[30_000:],
        OTHER: gray(options.data, "fashion_mnist", True, options.device),
    }
    X, test = digits.X[0][:images], test[: sizes.test]
    key = f"{images} images"
    parts: dict[str, Any] = {}
    nets: dict[int, dict[str, nn.Sequential]] = {}
    for i, seed in enumerate(seeds):
        other = seeds[(i + 1) % len(seeds)]
        for one in {seed, other} - set(nets):
            nets[one] = of_tasks(sets, sizes, one, options.device)
        found = {
            "similarity": pairs(nets[seed], nets[other], X),
            "accuracy on MNIST": {name: accuracy(nets[seed][name], *test.X, test.y) for name in SETS},
            "spectrum": {name: describe(spectrum(net, X)) for name, net in nets[seed].items()},
        }
        parts = common.keep(options, {key: {"tasks": {f"seed {seed}": found}}})
        print(f"seed {seed}: {found['similarity'][SAME]}", flush=True)
    for seed in list(seeds)[: sizes.runs]:
        epochs = of_epochs(sets[FIRST], test, X, sizes, seed, options.device)
        nodes = of_nodes(nets[seed][FIRST], test, X, sizes, seed)
        parts = common.keep(options, {key: {"epochs": {f"seed {seed}": epochs}, "nodes": {f"seed {seed}": nodes}}})
        print(f"seed {seed}: epochs and nodes done", flush=True)
    names = [f"seed {seed}" for seed in seeds]
    return outcome(parts, key, names, sizes)


def outcome(parts: dict[str, Any], key: str, names: Sequence[str], sizes: Sizes) -> common.Outcome:
    tasks, epochs, nodes = (
        {name: parts[key][what][name] for name in some}
        for what, some in (("tasks", names), ("epochs", names[: sizes.runs]), ("nodes", names[: sizes.runs]))
    )
    each, last = list(tasks.values()), str(max(sizes.marks))
    table = summarize([one["similarity"] for one in each])
    along = summarize([{str(mark): one[str(mark)] for mark in sizes.marks} for one in epochs.values()], average)
    moved = (*SPACES, "probability moved")
    removed = {what: average([unit[what] for one in nodes.values() for unit in one]) for what in moved}
    metrics = {
        "settings": {
            "network": "LeNet-3 of 25,010 parameters",
            "training images": sizes.half,
            "epochs": sizes.epochs,
            "images compared on": key,
            "seeds": len(names),
            "accuracy on MNIST": summarize([one["accuracy on MNIST"] for one in each], average),
            "intervals": "95 %, over seeds",
        },
        "similarity": table,
        f"epochs, against {last}": along,
        "a hidden unit removed": removed,
        **{
            what: {name: average([one["spectrum"][name][what] for one in each]) for name in (*SETS, NEW)}
            for what in ("effective rank", "components for 99 %")
        },
        "parts": parts,
    }
    said = {
        f"{FIRST} and {SECOND}": "vastly more similar than to Fashion-MNIST (figure 5)",
        f"{FIRST} and {OTHER}": "nearly zero",
        f"{SECOND} and {OTHER}": "nearly zero",
    }
    differs = (
        f"{len(names)} seeds (25 in the paper), Jacobians of {key} (5,000 in the paper), networks of 25,010 parameters "
        f"trained {sizes.epochs} epochs; mean and 95 % interval"
    )
    measure, ask = "similarity in function space, in parameter space", "asked in the talk, no value"
    rows = [
        common.Row(
            f"{pair}, {start}: {measure}",
            said.get(pair, "not in the paper") if start == SAME else "not in the paper",
            ", ".join(show_value(one[space], 3) for space in SPACES),
            differs,
        )
        for start, pairs_ in table.items()
        for pair, one in pairs_.items()
    ]
    if "5" in along:
        ours = ", ".join(show_error(along["5"][space], 3) for space in SPACES)
        few = f"{sizes.few:,} images of MNIST1, {len(epochs)} seeds"
        rows.append(common.Row(f"5 against {last} epochs: {measure}", ask, ours, few))
    ours = ", ".join(show_error(removed[space], 4) for space in SPACES)
    differs = f"{sizes.units} of 84 hidden units removed one at a time, {len(nodes)} seeds; standard errors"
    rows.append(common.Row(f"a node removed: {measure}", ask, ours, differs))
    return common.Outcome(metrics, figure(tasks, along, nodes), rows)


# The figure.


def figure(tasks: Mapping[str, Any], along: Mapping[str, Any], nodes: Mapping[str, Any]) -> Figure:
    """Above, both similarities and the spectra; below, the talk's questions."""
    picture, axes = plt.subplots(2, 3, figsize=(13, 7.5))
    for ax, space in zip(axes[0], SPACES, strict=False):
        draw_violins(ax, tasks, space)
        ax.set_title(f"{space.removesuffix('s')} space")
        ax.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("similarity on MNIST1")
    ax = axes[0, 2]
    for name in (*SETS, NEW):
        for i, one in enumerate(tasks.values()):
            shares = {int(k): share for k, share in one["spectrum"][name]["shares"].items() if share > 1e-9}
            label = None if i else name
            ax.loglog(list(shares), list(shares.values()), color=COLORS[name], lw=0.8, alpha=0.6, label=label)
    ax.set(title="spectra of the tangent kernels", xlabel="component", ylabel="share of the trace")
    left, middle, right = axes[1]
    at = [max(int(epoch), 0.5) for epoch in along]
    units = [unit for one in nodes.values() for unit in one]
    for space, color in zip(SPACES, (plots.BLUE, plots.ORANGE), strict=True):
        label = f"{space.removesuffix('s')} space"
        plots.draw_means(left, at, [one[space] for one in along.values()], color=color, capsize=2, label=label)
        x, y = ([unit[what] for unit in units] for what in ("probability moved", space))
        middle.plot(x, y, "o", color=color, ms=4, alpha=0.7, label=label)
    left.plot(at, [one["accuracy"]["mean"] for one in along.values()], "--", color=plots.GRAY, label="test accuracy")
    left.set(title=f"against the network of {list(along)[-1]} epochs", ylabel="similarity", ylim=(0, 1.05))
    middle.set(title="a hidden unit removed", xlabel="probability that moves between classes")
    middle.set_ylabel("similarity with the whole")
    ranks = [one["effective rank"] for one in along.values()]
    plots.draw_means(right, at, ranks, color=plots.GREEN, capsize=2)
    right.set(title="effective rank along training", ylabel="effective rank", ylim=(0, None))
    for ax in (left, right):
        plots.log_ticks(ax, at, list(along))
        ax.set_xlabel("epochs")
    for ax in (axes[0, 2], left, middle):
        ax.legend(fontsize=9)
    return picture


def draw_violins(ax: Axes, tasks: Mapping[str, Any], space: str) -> None:
    """The similarities over seeds of each pair, from one start and from different ones."""
    labels: dict[float, str] = {}
    position = 0.0
    for start in (SAME, DIFFERENT):
        for pair in next(iter(tasks.values()))["similarity"][start]:
            values = [one["similarity"][start][pair][space] for one in tasks.values()]
            color = COLORS[pair.rpartition(" and ")[2]]
            if len(set(values)) > 1:
                for body in ax.violinplot([values], [position], widths=0.8, showextrema=False)["bodies"]:
                    body.set(facecolor=color, alpha=0.4)
            ax.plot([position] * len(values), values, ".", color=color, ms=4)
            ax.plot([position], [np.mean(values)], "o", color="white", mec=color, ms=6)
            labels[position] = pair.replace(" and ", " / ")
            position += 1
        ax.text(position - 2.5, 1.04, start, ha="center", fontsize=9)
        position += 0.5
    ax.set_xticks(list(labels), list(labels.values()), fontsize=8, rotation=35, ha="right", rotation_mode="anchor")
    ax.set_ylim(-0.02, 1.1)
