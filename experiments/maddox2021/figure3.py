"""Posteriors of linearized perceptrons by width, training and architecture (Maddox et al. 2021, figure 3).

Left and center, ReLU networks with one hidden layer of several widths, untrained and trained; right, tanh networks with
three hidden layers and about 21,000 parameters each, trained on a sinusoid. The kernel is the paper's, J J^T with prior
variance one and mean zero; the noise maximizes the evidence. What the paper shows as curves is measured over seeds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.networks import perceptron
from experiments.common.statistics import average, scores, show_error, summarize
from experiments.common.training import Labeled, in_parts, squared_error, train

NOISE = 0.1
UNTRAINED, TRAINED, ARCHITECTURES = "untrained", "trained", "architectures"
SHAPES = {"100-100-100": (100, 100, 100), "200-50-200": (200, 50, 200), "20-500-20": (20, 500, 20)}
COLORS = (plots.ORANGE, plots.GREEN, plots.BLUE, plots.PURPLE)
OTHER_START = 1000
KEPT = ("f", "mean", "std", "again")
"""What figures need of a fit and metrics do not."""


# Widths of the ReLU networks, full-batch steps of training, seeds, points of the grid.
QUICK = Sizes(widths=(5, 20), steps=20, seeds=2, grid=31)
FULL = Sizes(widths=(10, 100, 1000, 5000), steps=1500, seeds=6, grid=161)


@dataclass(frozen=True)
class Curve:
    """A function, where it is observed and where it is shown."""

    name: str  # in words
    inside: tuple[tuple[float, float], ...]  # intervals of the observations
    limit: float  # the grid goes from -limit to limit
    n: int = 40  # observations

    def truth(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x) + 0.5 * x if self.name == "wave" else torch.sin(2 * x)

    def observed(self, seed: int) -> Labeled:
        """Points uniform over the intervals, with noise."""
        random = torch.Generator().manual_seed(seed)
        parts = [a + (b - a) * torch.rand(self.n // len(self.inside), generator=random) for a, b in self.inside]
        x = torch.cat(parts)
        return Labeled((x[:, None],), self.truth(x) + NOISE * torch.randn(len(x), generator=random))

    def within(self, x: Tensor) -> Tensor:
        return torch.stack([(x >= a) & (x <= b) for a, b in self.inside]).any(0)


WAVE = Curve("wave", ((-2.0, -0.5), (0.5, 2.0)), 3.5)
SINE = Curve("sine", ((-2.5, 2.5),), 5.0)


def condition(net: nn.Module, data: Labeled, curve: Curve, x: Tensor) -> dict[str, Any]:
    """The finite NTK of a network, conditioned on the observations, and how it compares with the truth."""
    reg = linnet.TangentRegressor(net, mean="zero", prior=1.0, average=False, progress=False).fit(data.X[0], data.y)
    mean, std = reg.predict(x[:, None], return_std=True)
    f, truth, inside = in_parts(net, (x[:, None],))[:, 0].double(), curve.truth(x.double()), curve.within(x)
    far = x.abs() > max(abs(end) for pair in curve.inside for end in pair) + 0.5
    noisy = std.square() + reg.noise_
    return {
        "f": f,
        "mean": mean,
        "std": std,
        "RMSE of the network": rms(f - truth, inside),
        "RMSE of the posterior mean": rms(mean - truth, inside),
        "NLL": scores(mean[inside], noisy[inside], truth[inside])["nll"],
        "std near the data": float(std[inside].median()),
        "std away from the data": float(std[far].median()),
        "mean std near the data": float(std[inside].mean()),
        "largest std near the data": float(std[inside].max()),
        "largest output weight": float(list(net.parameters())[-2].detach().abs().max()),
        "network to mean, near the data": rms(f - mean, inside),
        "noise": float(reg.noise_),
    }


def rms(x: Tensor, where: Tensor) -> float:
    return float(x[where].square().mean().sqrt())


def of_widths(sizes: Sizes, seed: int, x: Tensor) -> dict[str, dict[str, Any]]:
    """ReLU networks before and after training on the same observations."""
    data = WAVE.observed(seed)
    out: dict[str, dict[str, Any]] = {UNTRAINED: {}, TRAINED: {}}
    for width in sizes.widths:
        net = perceptron((1, width, 1), activation=nn.ReLU, seed=seed)
        out[UNTRAINED][str(width)] = condition(net, data, WAVE, x)
        # Wide networks take steps of many weights together.
        rate = min(1e-2, 1.0 / width)
        train(net, data, epochs=sizes.steps, rate=rate, batch=len(data), loss=squared_error, seed=seed)
        out[TRAINED][str(width)] = condition(net, data, WAVE, x)
    return out


def of_shapes(sizes: Sizes, seed: int, x: Tensor) -> dict[str, dict[str, Any]]:
    """Trained tanh networks with as many parameters, each from two starts; "again" is the mean of the second."""
    data = SINE.observed(seed)
    out = {}
    for name, shape in SHAPES.items():
        nets = [perceptron((1, *shape, 1), seed=start) for start in (seed, OTHER_START + seed)]
        for net in nets:
            train(net, data, epochs=sizes.steps, batch=len(data), loss=squared_error, seed=seed)
        found, other = (condition(net, data, SINE, x) for net in nets)
        count = sum(p.numel() for p in nets[0].parameters())
        out[name] = found | {"again": other["mean"], "parameters": count}
    return out


# The experiment.


ARGUMENTS = {
    "--seeds": "observations and networks (default: 6)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Draw, train, condition."""
    common.require_cpu(options, "These networks have one input")
    sizes = QUICK if options.quick else FULL
    seeds = common.seeds_of(options, sizes.seeds)
    wide, sine = (torch.linspace(-curve.limit, curve.limit, sizes.grid) for curve in (WAVE, SINE))
    found: list[dict[str, Any]] = []
    parts: dict[str, Any] = {}
    for seed in seeds:
        found.append({**of_widths(sizes, seed, wide), ARCHITECTURES: of_shapes(sizes, seed, sine)})
        parts = common.keep(options, {panel: {f"seed {seed}": bare(one)} for panel, one in found[-1].items()})
        print(f"seed {seed} done", flush=True)
    table = summarize([{panel: bare(one) for panel, one in each.items()} for each in found], average)
    apart = differences(found, sine)
    settings = {"steps": sizes.steps, "seeds": len(seeds), "noise": NOISE, "observations": WAVE.n}
    metrics = {"settings": settings, "results": table, "architectures apart": apart, "parts": parts}
    return common.Outcome(metrics, figure(found[0], wide, sine, seed=options.seed), rows(table, apart, len(seeds)))


def bare(panel: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The numbers without the curves."""
    return {name: {key: value for key, value in one.items() if key not in KEPT} for name, one in panel.items()}


def differences(found: Sequence[Mapping[str, Any]], x: Tensor) -> dict[str, Any]:
    """RMS distances of posterior means of two architectures with the same observations, near the data and beyond.

    Beside them those of one architecture from two starts.
    """
    inside, each = SINE.within(x), [one[ARCHITECTURES] for one in found]
    pairs = list(itertools.combinations(SHAPES, 2))
    out: dict[str, Any] = {}
    for where, kept in (("near the data", inside), ("beyond", ~inside)):
        between = [rms(one[a]["mean"] - one[b]["mean"], kept) for one in each for a, b in pairs]
        starts = [rms(one[a]["mean"] - one[a]["again"], kept) for one in each for a in SHAPES]
        out[where] = {"two architectures": average(between), "two starts": average(starts)}
    return out


def rows(table: Mapping[str, Any], apart: Mapping[str, Any], seeds: int) -> Iterator[common.Row]:
    differs = f"the paper's data are not given: our own curves with 40 points; mean ± standard error over {seeds} seeds"

    def by_name(panel: str, key: str, digits: int = 2) -> str:
        return ", ".join(f"{name}: {show_error(one[key], digits)}" for name, one in table[panel].items())

    said = {
        UNTRAINED: "predictive variances rise with width",
        TRAINED: "less predictive variance than untrained, above all around the data",
    }
    for panel, text in said.items():
        for where in ("near the data", "away from the data"):
            what = f"{panel} ReLU networks by width: median posterior standard deviation {where}"
            yield common.Row(what, text, by_name(panel, f"std {where}", 3), differs)
        what = f"{panel} ReLU networks by width: RMSE of the posterior mean"
        yield common.Row(what, "reasonable with 5,000 units", by_name(panel, "RMSE of the posterior mean"), differs)
    yield common.Row(
        "ReLU networks by width: mean posterior standard deviation near the data",
        said[TRAINED],
        "; ".join(f"{panel} {by_name(panel, 'mean std near the data', 3)}" for panel in said),
        "the mean was looked at first and contradicts the paper, the median of the rows above was added after; "
        f"{differs}",
    )
    yield common.Row(
        "ReLU networks by width: largest posterior standard deviation near the data, largest output weight",
        "not in the paper",
        "; ".join(
            f"{panel} {by_name(panel, 'largest std near the data')} and {by_name(panel, 'largest output weight')}"
            for panel in said
        ),
        "believed to be why the mean rises, not tested: features jump at the kink of a unit by its output weight, and "
        f"training makes some of these large; {differs}",
    )
    yield common.Row(
        "architectures with about 21,000 parameters: RMSE of the network, of the posterior mean",
        "vastly differ",
        "; ".join(by_name(ARCHITECTURES, f"RMSE of the {of}") for of in ("network", "posterior mean")),
        differs,
    )
    yield common.Row(
        "architectures: RMS distance of their posterior means",
        "significantly different outside of the training data",
        "; ".join(
            f"{where}: {show_error(one['two architectures'])}, two starts of one {show_error(one['two starts'])}"
            for where, one in apart.items()
        ),
        differs,
    )


# The figure.


def figure(found: Mapping[str, Any], wide: Tensor, sine: Tensor, *, seed: int) -> Figure:
    """The posteriors of the first seed: means with two standard deviations; dashed, the networks."""
    titles = {
        UNTRAINED: "untrained ReLU networks, by width",
        TRAINED: "trained ReLU networks, by width",
        ARCHITECTURES: "trained tanh networks, 21,000 parameters each",
    }
    picture = plt.figure(figsize=(13, 5.2))
    for ax, (panel, title) in zip(picture.subplots(1, 3), titles.items(), strict=True):
        curve, x = (SINE, sine) if panel == ARCHITECTURES else (WAVE, wide)
        data = curve.observed(seed)
        for color, (name, one) in zip(COLORS, found[panel].items(), strict=False):
            plots.draw_posterior(ax, x, one["mean"], one["std"], color=color, alpha=0.15, lw=1.8, label=name)
            if panel != UNTRAINED:
                ax.plot(x, one["f"], "--", color=color, lw=1)
        if panel != UNTRAINED:
            ax.plot([], [], "--", color=plots.GRAY, lw=1, label="networks")
        ax.plot(x, curve.truth(x), ":", color="black", lw=1, label="truth")
        ax.plot(data.X[0][:, 0], data.y, "o", color=plots.PURPLE, ms=4, mec="white", mew=0.5, label="observations")
        ax.set(title=title, ylim=(-4, 4))
        ax.legend(loc="upper left", fontsize=8, ncols=2)
    return picture
