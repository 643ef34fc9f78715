"""Networks of finite width next to their Gaussian process, on data like Snelson's (slides on linearized networks, end).

The slides show that a Bayesian network with 3 hidden layers of 50 units is almost its infinitely wide limit, on data
of Snelson and Ghahramani 2006. Those are not here: 100 points of a curve over [0, 6] with a gap and noise are drawn for
each seed. The limit's variances and the noise maximize the evidence of the NNGP process and hold for every network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.statistics import interval, scores, show_value, summarize
from experiments.common.training import Labeled, squared_error, train
from linnet.inference import LOG_2PI
from linnet.limits import InfiniteWidth, infinite_width

DEPTH, NOISE = 3, 0.25
GAP = (2.7, 3.9)
LAST, FULL = "last layer", "whole Jacobian"
LIMIT = {LAST: "nngp", FULL: "ntk"}
BAYES = "Bayesian network (MCMC)"
DRAWN, TRAINED = "as drawn", "trained"


# Widths of the kernels, of the posteriors and of the Bayesian networks; seeds; points; steps; draws of MCMC.
QUICK = Sizes(widths=(8, 32), shown=(8, 32), bayes=(8,), seeds=2, n=24, steps=20, draws=40)
CPU = Sizes(
    widths=(10, 20, 50, 100, 200, 500), shown=(10, 50, 200), bayes=(10, 50), seeds=5, n=100, steps=500, draws=1500
)


def curve(x: Tensor) -> Tensor:
    """Over [0, 6]."""
    return torch.sin(2.2 * x) * (1.2 - 0.15 * x) + 0.6 * torch.cos(0.9 * x)


def observe(n: int, generator: torch.Generator, *, gap: bool) -> tuple[Tensor, Tensor]:
    """Inputs (n, 1), centered and scaled, and targets (n,); with a gap in the middle, or everywhere."""
    low, high = GAP
    u = torch.rand(n, generator=generator, dtype=torch.float64) * (6.0 - (high - low if gap else 0.0))
    x = torch.where(u > low, u + (high - low), u) if gap else u
    return scale(x), curve(x) + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)


def scale(x: Tensor) -> Tensor:
    return (x[:, None] - 3) / 1.5


# The limit.


@dataclass(frozen=True)
class Limit:
    """Variances of weights and biases (these at most 1), and the noise, by the evidence of the NNGP process."""

    weight: float
    bias: float
    noise: float

    def kernel(self, kind: str, x: Tensor, other: Tensor) -> Tensor:
        return infinite_width(
            x,
            other,
            depth=DEPTH,
            activation="erf",
            kernel=kind,  # type: ignore[arg-type]
            weight_variance=self.weight,
            bias_variance=self.bias,
        )

    def network(self, width: int, seed: int) -> nn.Sequential:
        found = InfiniteWidth(DEPTH, "erf", weight_variance=self.weight, bias_variance=self.bias).double()
        return found.network(1, width, seed=seed)

    def prior(self, width: int) -> dict[str, float]:
        """The same variances for parameters by name, as estimators take them."""
        return {"0.weight": self.weight, "*.weight": self.weight / width, "*.bias": self.bias}


def log_evidence(K: Tensor, y: Tensor, noise: Tensor | float) -> Tensor:
    """log N(y | 0, K + noise)."""
    factor = torch.linalg.cholesky(K + noise * torch.eye(len(y), dtype=K.dtype))
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    return -0.5 * (white.square().sum() + len(y) * LOG_2PI) - factor.diagonal().log().sum()


def find_limit(X: Tensor, y: Tensor) -> Limit:
    """L-BFGS from three starts."""

    def negative(v: np.ndarray) -> tuple[float, np.ndarray]:
        t = torch.tensor(v, requires_grad=True)
        weight, bias, noise = t.exp()
        given: dict[str, Any] = {"weight_variance": weight, "bias_variance": bias}
        value = -log_evidence(infinite_width(X, X, depth=DEPTH, activation="erf", kernel="nngp", **given), y, noise)
        return float(value.detach()), torch.autograd.grad(value, t)[0].numpy()

    # Biases larger than one would make of every kernel a constant that hides how kernels differ.
    bounds = [(math.log(0.3), math.log(50.0)), (math.log(1e-4), 0.0), (math.log(1e-3), 0.0)]
    starts = [np.log([w, 0.1, 0.1]) for w in (1.5, 4.0, 10.0)]
    found = [minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds) for start in starts]
    return Limit(*(float(v) for v in np.exp(min(found, key=lambda one: one.fun).x)))


def process(limit: Limit, kind: str, data: tuple[Tensor, Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of f under the limit."""
    X, y = data
    factor = torch.linalg.cholesky(limit.kernel(kind, X, X) + limit.noise * torch.eye(len(y), dtype=y.dtype))
    cross = torch.linalg.solve_triangular(factor, limit.kernel(kind, X, at), upper=False)
    mean = cross.T @ torch.linalg.solve_triangular(factor, y[:, None], upper=False)[:, 0]
    return mean, (limit.kernel(kind, at, at).diagonal() - cross.square().sum(0)).sqrt()


# Networks.


def parts_of(which: str) -> str | None:
    """Parameters whose Jacobian is meant."""
    return f"{2 * DEPTH}.*" if which == LAST else None


def kernel_errors(limit: Limit, width: int, seed: int, x: Tensor) -> dict[str, float]:
    """Relative distance (Frobenius) of a network's kernels from their limits."""
    kernel = InfiniteWidth(DEPTH, "erf", weight_variance=limit.weight, bias_variance=limit.bias).double()
    net, out = kernel.network(1, width, seed=seed), {}
    for which, kind in LIMIT.items():
        lin = linnet.linearize(net, parts_of(which))
        K, target = lin.jacobian(x, progress=False).gram(scale=kernel.prior(lin)), limit.kernel(kind, x, x)
        out[which] = float((K - target).norm() / target.norm())
    return out


def condition(
    net: nn.Sequential, which: str, limit: Limit, data: tuple[Tensor, Tensor], at: Tensor
) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of f with a network's kernel, under the limit's prior and noise."""
    prior = limit.prior(net[0].out_features)  # type: ignore[arg-type]
    given: dict[str, Any] = {"params": parts_of(which), "mean": "zero", "noise": limit.noise, "progress": False}
    prior = {glob: v for glob, v in prior.items() if which == FULL or not glob.startswith("0.")}
    return linnet.TangentRegressor(net, prior=prior, **given).fit(*data).predict(at, return_std=True)


def sample_bayesian(
    limit: Limit, width: int, data: tuple[Tensor, Tensor], at: Tensor, *, draws: int, seed: int
) -> tuple[Tensor, Tensor, float]:
    """Means and standard deviations of f for the network itself with all its weights random.

    Given the hidden weights, f is a Gaussian process with the last layer's kernel, so only these are sampled, with the
    evidence of that process as their likelihood: elliptical slice sampling (Murray et al. 2010), which has nothing to
    tune. The first fifth is left out.

    Returns:
        The moments, and the standard error of the means by the two halves of the chain, relative to the deviations.
    """
    X, y = data
    random = torch.Generator().manual_seed(seed)
    shapes = [(1 if layer == 0 else width) for layer in range(DEPTH)]

    def drawn() -> list[Tensor]:
        """Weights and biases of the hidden layers from the prior."""
        out = []
        for fan_in in shapes:
            for size, variance in (((fan_in, width), limit.weight / fan_in), ((width,), limit.bias)):
                out.append(math.sqrt(variance) * torch.randn(size, generator=random, dtype=y.dtype))
        return out

    def features(theta: Sequence[Tensor], x: Tensor) -> Tensor:
        """With f = features @ standard normal weights."""
        for i in range(DEPTH):
            x = torch.erf(x @ theta[2 * i] + theta[2 * i + 1])
        scale = math.sqrt(limit.weight / width)
        return torch.cat([scale * x, math.sqrt(limit.bias) * torch.ones_like(x[:, :1])], 1)

    def log_likelihood(theta: Sequence[Tensor]) -> float:
        phi = features(theta, X)
        return float(log_evidence(phi @ phi.T, y, limit.noise))

    theta = drawn()
    now = log_likelihood(theta)
    means, squares = [], []
    for step in range(draws):
        other = drawn()
        level = now + math.log(float(torch.rand((), generator=random)))
        angle = 2 * math.pi * float(torch.rand((), generator=random))
        low, high = angle - 2 * math.pi, angle
        while True:
            moved = [math.cos(angle) * a + math.sin(angle) * b for a, b in zip(theta, other, strict=True)]
            value = log_likelihood(moved)
            if value > level:
                theta, now = moved, value
                break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = low + (high - low) * float(torch.rand((), generator=random))
        if step >= draws // 5 and step % 10 == 0:
            phi, phi_at = features(theta, X), features(theta, at)
            H = phi.T @ phi + limit.noise * torch.eye(phi.shape[1], dtype=y.dtype)
            mean = phi_at @ torch.linalg.solve(H, phi.T @ y)
            variance = limit.noise * (phi_at * torch.linalg.solve(H, phi_at.T).T).sum(1)
            means.append(mean)
            squares.append(variance + mean.square())
    every = torch.stack(means)
    std = (torch.stack(squares).mean(0) - every.mean(0).square()).sqrt()
    first, second = every[: len(every) // 2].mean(0), every[len(every) // 2 :].mean(0)
    return every.mean(0), std, float(((first - second) / 2 / std).square().mean().sqrt())


# The experiment.


ARGUMENTS = {
    "--seeds": "draws of data and networks (default: 5)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All seeds; the first is drawn."""
    common.require_cpu(options, "These networks have one input")
    sizes = QUICK if options.quick else CPU
    seeds = common.seeds_of(options, sizes.seeds)
    each: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    for seed in seeds:
        found, shown = of_seed(sizes, seed)
        curves = curves or shown
        each.append(found)
        common.keep(options, {f"seed {seed}": found})
        print(f"seed {seed} done", flush=True)
    table = summarize_seeds(each)
    record = {
        "settings": {"seeds": len(seeds), "points": sizes.n, "steps": sizes.steps, "MCMC draws": sizes.draws},
        "errors": "95 % intervals by Student's t over seeds (data and network)",
        "summary": table,
        "parts": {f"seed {seed}": one for seed, one in zip(seeds, each, strict=True)},
    }
    return common.Outcome(record, figure(curves, table, sizes), rows(table, sizes, len(seeds)))


def of_seed(sizes: Sizes, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers, and curves to draw."""
    random = torch.Generator().manual_seed(1000 + seed)
    X, y = data = observe(sizes.n, random, gap=True)
    X_test, y_test = observe(5 * sizes.n, random, gap=False)
    limit = find_limit(X, y)
    x = torch.linspace(0, 6, 61, dtype=torch.float64)
    at = torch.cat([scale(x), X_test])
    limits = {which: process(limit, kind, data, at) for which, kind in LIMIT.items()}

    def compared(moments: tuple[Tensor, Tensor], which: str) -> dict[str, float]:
        """On a grid, in units of the limit's own deviations; and on new data."""
        (mean, std), (base, width) = moments, limits[which]
        k, test = len(x), scores(mean[len(x) :], std[len(x) :].square() + limit.noise, y_test)
        return {
            "means apart": float(((mean - base)[:k] / width[:k]).square().mean().sqrt()),
            "deviations apart": float((std[:k] / width[:k]).log().square().mean().sqrt()),
            "test NLL": test["nll"],
            "test coverage": test["coverage"],
        }

    found: dict[str, Any] = {"limit": {"weight": limit.weight, "bias": limit.bias, "noise": limit.noise}}
    found["kernels"] = {str(w): kernel_errors(limit, w, seed, scale(x)) for w in sizes.widths}
    methods = {LIMIT[which].upper(): compared(limits[which], which) for which in LIMIT}
    shown = {"data": (X[:, 0] * 1.5 + 3, y), "x": x, "NNGP": limits[LAST], "NTK": limits[FULL]}
    for w in sizes.shown:
        net = limit.network(w, seed)
        for state in (DRAWN, TRAINED):
            if state == TRAINED:
                # Wide networks take steps of many weights together.
                rate = min(1e-2, 0.3 / w)
                train(net, Labeled((X,), y), epochs=sizes.steps, rate=rate, batch=len(y), loss=squared_error, seed=seed)
            for which in LIMIT:
                moments = condition(net, which, limit, data, at)
                methods[f"{state}, {which}, {w}"] = compared(moments, which)
                shown[f"{state}, {which}, {w}"] = moments
    for w in sizes.bayes:
        mean, std, error = sample_bayesian(limit, w, data, at, draws=sizes.draws, seed=seed)
        methods[f"{BAYES}, {w}"] = compared((mean, std), LAST) | {"halves of the chain apart": error}
        shown[f"{BAYES}, {w}"] = (mean, std)
    return found | {"posteriors": methods}, shown


def summarize_seeds(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals over seeds, and how kernels approach their limits: the slope of log error against log width."""

    def slope(kernels: Mapping[str, Any], which: str) -> float:
        errors = [kernel[which] for kernel in kernels.values()]
        return float(np.polyfit(np.log([int(w) for w in kernels]), np.log(errors), 1)[0])

    slopes = {which: interval([slope(one["kernels"], which) for one in each]) for which in LIMIT}
    both = summarize([{key: one[key] for key in ("kernels", "posteriors")} for one in each])
    return {"kernels": both["kernels"], "slopes": slopes, "posteriors": both["posteriors"]}


def rows(table: Mapping[str, Any], sizes: Sizes, seeds: int) -> Iterator[common.Row]:
    differs = f"data made here, {sizes.n} points; erf, {DEPTH} hidden layers; {seeds} seeds, 95 % intervals"
    for which, kind in LIMIT.items():
        errors = ", ".join(f"{w}: {show_value(one[which], 3)}" for w, one in table["kernels"].items())
        what = f"kernel of the {which} as drawn, relative distance from the {kind.upper()}, by width"
        ours = f"{errors}; slope in log width {show_value(table['slopes'][which])}"
        yield common.Row(what, "convergence can be fast (no numbers)", ours, differs)
    for name, _, widths in series(sizes):
        values = []
        for w in widths:
            one = table["posteriors"][f"{name}, {w}"]
            apart = f"{show_value(one['means apart'])}, {show_value(one['deviations apart'])}"
            values.append(f"{w}: {apart}, {show_value(one['test NLL'], 3)}")
        base = table["posteriors"]["NTK" if FULL in name else "NNGP"]["test NLL"]
        yield common.Row(
            f"{name}: means and log deviations apart from the limit's, and test NLL, by width",
            "50 units look like the process (figure, no numbers)" if name == BAYES else "not on the slides",
            f"{'; '.join(values)}; test NLL of the limit {show_value(base, 3)}",
            f"{differs}; means in units of the limit's standard deviations",
        )


def series(sizes: Sizes) -> list[tuple[str, str, tuple[int, ...]]]:
    """Posteriors by width: name, color and widths."""
    colors = iter((plots.ORANGE, plots.SKY, plots.VERMILION, plots.GREEN))
    found = [(f"{state}, {which}", next(colors), sizes.shown) for state in (DRAWN, TRAINED) for which in LIMIT]
    return [*found, (BAYES, plots.BLUE, sizes.bayes)]


def figure(curves: Mapping[str, Any], table: Mapping[str, Any], sizes: Sizes) -> Figure:
    """Posteriors of one data set; kernels and posteriors against width."""
    x, (X, y), w = curves["x"], curves["data"], sizes.bayes[-1]
    colors = {f"{name}, {w}": color for name, color, _ in series(sizes)}
    panels = {
        f"Bayesian network, {w} units, and its limit": ("NNGP", f"{BAYES}, {w}"),
        f"Last layer's kernel, {w} units": ("NNGP", *(f"{state}, {LAST}, {w}" for state in (DRAWN, TRAINED))),
        f"Whole Jacobian's kernel, {w} units": ("NTK", *(f"{state}, {FULL}, {w}" for state in (DRAWN, TRAINED))),
    }
    picture, axes = plt.subplots(2, 3, figsize=(13, 7.4))
    for ax, (title, (limit, *names)) in zip(axes[0], panels.items(), strict=True):
        plots.draw_posterior(ax, x, *(t[: len(x)] for t in curves[limit]), color=plots.GRAY, label=limit)
        for name in names:
            mean, std = (t[: len(x)] for t in curves[name])
            ax.plot(x, mean, color=colors[name], label=name.rsplit(", ", 1)[0])
            for side in (-2, 2):
                ax.plot(x, mean + side * std, color=colors[name], lw=1, ls="--")
        ax.plot(X, y, ".", color="black", ms=3)
        ax.set(title=title, xlabel="x", ylim=(-4.2, 3))
        ax.legend(fontsize=8, loc="lower left")
    axes[0, 0].set_ylabel("f: mean ± 2 standard deviations")
    left, center, right = axes[1]
    widths = np.array(sizes.widths)
    for which, color in ((LAST, plots.ORANGE), (FULL, plots.SKY)):
        values = [table["kernels"][str(v)][which] for v in widths]
        plots.draw_means(left, widths, values, color=color, label=f"{which} to {LIMIT[which].upper()}")
    middle = table["kernels"][str(widths[0])][FULL]["mean"] * (widths / widths[0]) ** -0.5
    left.plot(widths, middle, color="black", lw=0.8, ls=":", label="1 / sqrt(width)")
    left.set(xscale="log", yscale="log", xlabel="width", ylabel="distance of the kernel, relative")
    for i, (name, color, some) in enumerate(series(sizes)):
        found = [table["posteriors"][f"{name}, {v}"] for v in some]
        for ax, key in ((center, "means apart"), (right, "test NLL")):
            values = [one[key] for one in found]
            plots.draw_means(ax, np.array(some) * 1.04 ** (i - 2), values, color=color, label=name)
    for name, style in (("NNGP", "-"), ("NTK", ":")):
        right.axhline(table["posteriors"][name]["test NLL"]["mean"], color=plots.GRAY, ls=style, label=name)
    center.set(xscale="log", yscale="log", xlabel="width", ylabel="posterior means apart, in deviations")
    right.set(xscale="log", xlabel="width", ylabel="test NLL")
    for ax in axes[1]:
        ax.legend(fontsize=8)
    return picture
