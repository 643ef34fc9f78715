"""What if we don't linearize? Weights drawn from one posterior, in the network itself and in its linear model (slides).

A tanh network is trained on a curve with a gap, a small CNN on 100 digits. The Gaussian posterior of their weights is
the exact one of the linear model. Put through the network, most of its draws lie where the network fits nothing: the
average underfits, near the data too. Both predictions average over the same draws; lambda is the prior precision.
"""

from __future__ import annotations

import argparse
import math
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
from experiments.allingham2023 import evidence, laplace_digits
from experiments.common import plots
from experiments.common.networks import perceptron
from experiments.common.statistics import interval, show_interval, show_value, subtract, summarize
from experiments.common.training import Labeled, squared_error, train
from linnet import metrics
from linnet.probability import Categorical, Gaussian, Likelihood

MAP, LINEAR, NETWORK = "the network alone", "linear model", "network with drawn weights"
CURVE, DIGITS = "curve", "digits"
CHOSEN = "evidence"
COLORS = {MAP: plots.GRAY, LINEAR: plots.BLUE, NETWORK: plots.VERMILION}


# Networks of each kind, hidden width, steps of training, points, digits and epochs, draws, precisions.
QUICK = Sizes(networks=2, width=10, steps=100, n=30, digits=20, epochs=40, draws=10, lambdas=(100.0, 1.0))
CPU = Sizes(
    networks=5, width=50, steps=1500, n=100, digits=100, epochs=200, draws=100, lambdas=(1000.0, 100.0, 10.0, 1.0, 0.1)
)


def posterior(model: nn.Module, data: tuple[Tensor, Tensor], case: str, precision: float | None) -> linnet.Laplace:
    """With a given precision, or the one that the evidence chooses, whatever averaging costs then."""
    with common.expect(common.FAR, common.WIDE):
        if case == CURVE:
            given: dict[str, Any] = {"likelihood": "regression", "noise": evidence.NOISE}
        else:
            given = {"likelihood": "classification"}
        la = linnet.Laplace(model, prior=1 / (precision or 1.0), progress=False, **given).fit(*data)
        if precision is None:
            la.tune("shared", narrow=False, noise=False)
    return la


def draw_outputs(la: linnet.Laplace, X: Tensor, draws: int, *, seed: int) -> dict[str, Tensor]:
    """Outputs (draws, n, c) of both models for the same weights, and those of the network at its own, (1, n, c)."""
    found = la.linearity(X, draws, seed=seed)
    return {
        MAP: found[0].before[None],
        LINEAR: torch.stack([one.linear for one in found]),
        NETWORK: torch.stack([one.network for one in found]),
    }


def log_probability(likelihood: Likelihood, f: Tensor, y: Tensor) -> float:
    """The mean over examples of ``log mean over draws p(y | f)``, f (draws, n, c), y as the likelihood takes it."""
    each = likelihood.log_prob(f, y)
    return float((each.logsumexp(0) - math.log(len(f))).mean())


def scores_of(case: str, f: Tensor, y: Tensor) -> dict[str, float]:
    """NLL of the average prediction, and its error: RMSE of the mean, or the share of wrong labels."""
    if case == CURVE:
        found = {"nll": -log_probability(Gaussian(evidence.NOISE), f, y[:, None])}
        return found | {"error": float((f.mean(0)[:, 0] - y).square().mean().sqrt())}
    p = f.softmax(-1).mean(0)
    nll = -log_probability(Categorical(), f, y)
    return {"nll": nll, "error": 1 - metrics.accuracy(p, y), "ece": metrics.ece(p, y)}


@dataclass(frozen=True)
class Problem:
    """A trained network, its training data, and data to score on by name."""

    case: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: Mapping[str, tuple[Tensor, Tensor]]


def problem(case: str, sizes: Sizes, seed: int) -> Problem:
    """Trained with Adam; float64."""
    if case == CURVE:
        random = torch.Generator().manual_seed(1000 + seed)
        X, y = evidence.observe(sizes.n, gap=True, generator=random)
        near, everywhere = (evidence.observe(5 * sizes.n, gap=gap, generator=random) for gap in (True, False))
        model = perceptron((1, sizes.width, sizes.width, 1), seed=seed).double()
        train(model, Labeled((X,), y), epochs=sizes.steps, rate=5e-3, batch=len(y), loss=squared_error, seed=seed)
        return Problem(case, model, (X, y), {"training": (X, y), "test": near, "test, gap too": everywhere})
    data = laplace_digits.digits(sizes.digits, 1 + seed, test=5 * sizes.digits)
    net = laplace_digits.train_digits("CNN", data, decay=1e-3, epochs=sizes.epochs, seed=seed)
    return Problem(case, net, (data.X, data.y), {"training": (data.X, data.y), "test": (data.X_test, data.y_test)})


def of_problem(given: Problem, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Scores by precision, data and way to predict; and how far the network is from linear along the draws."""
    out: dict[str, Any] = {}
    for precision in (*sizes.lambdas, None):
        la = posterior(given.model, given.train, given.case, precision)
        one: dict[str, Any] = {"lambda": precision or 1 / next(iter(la.scales_.values()))}
        for name, (X, y) in given.test.items():
            f = draw_outputs(la, X, sizes.draws, seed=seed)
            one[name] = {way: scores_of(given.case, found, y) for way, found in f.items()}
            step, apart = f[LINEAR] - f[MAP], f[NETWORK] - f[LINEAR]
            one[name]["network to linear model, relative"] = float(apart.norm() / step.norm())
        out[CHOSEN if precision is None else f"{precision:g}"] = one
    return out


# The experiment.


ARGUMENTS = {
    "--networks": "networks of each kind (default: 5)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Both kinds, several seeds; the first network of the curve is drawn."""
    common.require_cpu(options, "These networks are small")
    sizes = QUICK if options.quick else CPU
    seeds = range(options.seed, options.seed + (options.networks or sizes.networks))
    each: dict[str, list[dict[str, Any]]] = {CURVE: [], DIGITS: []}
    first: Problem | None = None
    for case, found in each.items():
        for seed in seeds:
            given = problem(case, sizes, seed)
            first = first or given
            found.append(of_problem(given, sizes, seed))
            common.keep(options, {case: {f"seed {seed}": found[-1]}})
            print(f"{case}, seed {seed} done", flush=True)
    assert first is not None
    table = {case: summarize_networks(found) for case, found in each.items()}
    record = {
        "settings": {"networks": len(seeds), "points": sizes.n, "digits": sizes.digits, "draws": sizes.draws},
        "errors": "95 % intervals by Student's t over networks, each with data of its own",
        "summary": table,
        "parts": {
            case: {f"seed {seed}": one for seed, one in zip(seeds, found, strict=True)} for case, found in each.items()
        },
    }
    return common.Outcome(record, figure(first, table, sizes, options.seed), rows(table, sizes, len(seeds)))


def summarize_networks(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals over networks; the network with drawn weights less the linear model, paired."""
    out: dict[str, Any] = {}
    for precision, one in each[0].items():
        out[precision] = {"lambda": interval([found[precision]["lambda"] for found in each])}
        for data in [name for name in one if name != "lambda"]:
            pairs = [found[precision][data] for found in each]
            out[precision][data] = {
                **summarize([{way: pair[way] for way in COLORS} for pair in pairs]),
                "not linearized less linear": summarize([subtract(pair[NETWORK], pair[LINEAR]) for pair in pairs]),
                "relative distance": interval([pair["network to linear model, relative"] for pair in pairs]),
            }
    return out


def rows(table: Mapping[str, Any], sizes: Sizes, count: int) -> Iterator[common.Row]:
    kinds = {
        CURVE: f"tanh, 2 layers of {sizes.width}, {sizes.n} points",
        DIGITS: f"CNN, 1,898 parameters, {sizes.digits} digits",
    }
    paper = "the network with drawn weights underfits (figure, no numbers)"
    for case, found in table.items():
        error = "RMSE" if case == CURVE else "share of wrong labels"
        differs = f"{kinds[case]}; {sizes.draws} draws, {count} networks, 95 % intervals"
        for data in ("training", "test"):
            cell = found[CHOSEN][data]
            each = {way: (show_value(cell[way]["nll"]), show_value(cell[way]["error"], 3)) for way in COLORS}
            ways = "; ".join(f"{way} {', '.join(both)}" for way, both in each.items())
            yield common.Row(f"{case}, the evidence's lambda: NLL and {error}, {data} data", paper, ways, differs)
            gaps = "; ".join(
                f"{name}: {show_interval(one[data]['not linearized less linear']['nll'], digits=2)}"
                for name, one in found.items()
            )
            what = f"{case}: NLL of the network with drawn weights less the linear model's by lambda, {data} data"
            yield common.Row(what, paper, gaps, differs)


def figure(first: Problem, table: Mapping[str, Any], sizes: Sizes, seed: int) -> Figure:
    """Draws of one posterior through both models; NLL along the precision."""
    x = torch.linspace(-2, 2, 161, dtype=torch.float64)[:, None]
    la = posterior(first.model, first.train, CURVE, None)
    f = draw_outputs(la, x, sizes.draws, seed=seed)
    picture, axes = plt.subplots(2, 2, figsize=(11, 7.4))
    for ax, way in zip(axes[0], (LINEAR, NETWORK), strict=True):
        mean, std = f[way].mean(0)[:, 0], f[way].std(0)[:, 0]
        ax.plot(x, f[way][:25, :, 0].T, color=COLORS[way], lw=0.5, alpha=0.4)
        plots.draw_posterior(ax, x[:, 0], mean, std, color=COLORS[way], alpha=0.2, lw=2)
        ax.plot(x, evidence.curve(x), color="black", lw=0.8, ls=":")
        ax.plot(first.train[0], first.train[1], ".", color="black", ms=3)
        ax.set(title=f"{way}: mean ± 2 deviations, 25 draws", ylim=(-4, 4), xlabel="x")
    for ax, (case, found) in zip(axes[1], table.items(), strict=True):
        for data, style in (("test", "o-"), ("training", "s:")):
            for way, color in COLORS.items():
                values = [found[f"{v:g}"][data][way]["nll"] for v in sizes.lambdas]
                plots.draw_means(ax, sizes.lambdas, values, fmt=style, color=color, label=f"{way}, {data}")
        ax.axvline(found[CHOSEN]["lambda"]["mean"], color="black", lw=0.8, ls="--", label="the evidence's lambda")
        ax.set(xscale="log", xlabel=r"prior precision $\lambda$", ylabel="NLL", title=case)
        if case == CURVE:
            ax.set_yscale("symlog", linthresh=1.0)
    axes[1, 0].legend(fontsize=7)
    return picture
