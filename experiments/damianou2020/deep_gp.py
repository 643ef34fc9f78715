"""A deep Gaussian process and a linearized network on a step function (talk on deep learning in function space).

The talk shows how a deep process warps its input layer by layer until a step is easy. The deep processes are GPyTorch's
(doubly stochastic variational inference), with 2 layers, or more with `--layers`; the rate is chosen by their own bound
on the evidence. Next to them: a process with an RBF kernel, and a tanh network alone, with error bars, as a kernel.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace as Sizes
from typing import Any

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from matplotlib.figure import Figure
from torch import Tensor

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.networks import perceptron
from experiments.common.processes import Process
from experiments.common.statistics import interval, show_interval, show_value, summarize
from experiments.common.training import Labeled, Search, fine_tune, squared_error

NOISE = 0.05
TRIED_SEEDS = 5
"""Number of seeds on which four settings of the deep process were tried. Reports have the seeds after these."""
TRIED = "the deep GP's steps and rates are the last of four settings tried on other seeds, the others' the first"
SAMPLES = 5
"""Draws of the hidden layers in a step of training."""
SURE = 1e-2
"""Standard deviation of hidden inducing values at the start, in units of the prior's."""
RBF, NETWORK = "RBF process", "network"
LAPLACE, TANGENT = "network, Laplace", "finite NTK"
METHODS = {
    RBF: "exact Gaussian process, hyperparameters of largest evidence from seven starts",
    "deep GP, 2 layers": "one hidden process of one dimension, 15 inducing points each",
    "deep GP, 3 layers": "two hidden processes",
    NETWORK: "tanh, two layers of 30; rate and epochs on a fifth held out; noise from the training error",
    LAPLACE: "the same network with error bars: Laplace(model, 'regression').fit(X, y)",
    TANGENT: "the same network as a kernel: TangentRegressor(model, mean='zero').fit(X, y)",
}
PALETTE = (plots.YELLOW, plots.ORANGE, plots.VERMILION, plots.GRAY, plots.BLUE, plots.GREEN)
COLORS = dict(zip(METHODS, PALETTE, strict=True))


# Seeds, points, steps, rates and inducing points of the deep processes; epochs of the network at most.
QUICK = Sizes(seeds=2, n=20, steps=5, rates=(0.03,), inducing=6, epochs=5)
CPU = Sizes(seeds=5, n=60, steps=1000, rates=(0.05, 0.1), inducing=15, epochs=600)


def step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def observe(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (n, 1) in [-1, 1] and targets (n,)."""
    x = 2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1
    return x[:, None], step(x) + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)


# A deep process.


class Layer(DeepGPLayer):
    """A sparse process from one number to one: hidden ones around the identity, the last around a constant."""

    def __init__(self, X: Tensor, inducing: int, *, last: bool):
        shape = torch.Size([]) if last else torch.Size([1])
        points = torch.linspace(float(X.min()), float(X.max()), inducing, dtype=X.dtype)[:, None].expand(*shape, -1, -1)
        found = gpytorch.variational.CholeskyVariationalDistribution(inducing, batch_shape=shape)
        strategy = gpytorch.variational.VariationalStrategy(self, points.clone(), found, learn_inducing_locations=True)
        super().__init__(strategy, 1, None if last else 1)
        means = gpytorch.means
        self.mean_module = means.ConstantMean() if last else means.LinearMean(1, batch_shape=shape)
        if not last:
            # A hidden layer starts as the identity, almost without noise, as Salimbeni and Deisenroth 2017 start it.
            torch.nn.init.ones_(self.mean_module.weights)
            torch.nn.init.zeros_(self.mean_module.bias)
            found.chol_variational_covar.data.mul_(SURE)
            strategy.variational_params_initialized.fill_(1)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=shape)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    """Layers in a row and Gaussian noise."""

    def __init__(self, X: Tensor, layers: int, inducing: int):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(X, inducing, last=i == layers - 1) for i in range(layers)])
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.to(X)
        self.likelihood.noise = 0.01

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def predict(self, x: Tensor, samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Means and variances (samples, n) of f given draws of the hidden layers: a mixture."""
        self.eval()
        with torch.random.fork_rng(devices=[]), gpytorch.settings.num_likelihood_samples(samples):
            torch.manual_seed(seed)
            found = self(x)
            return found.mean, found.variance


def fit_deep(X: Tensor, y: Tensor, layers: int, sizes: Sizes, *, seed: int) -> tuple[Deep, dict[str, float]]:
    """Adam on the bound, with the rate of the larger one at the end."""
    best: tuple[float, Deep, float] | None = None
    for rate in sizes.rates:
        with torch.random.fork_rng(devices=[]), gpytorch.settings.num_likelihood_samples(SAMPLES):
            torch.manual_seed(seed)
            model = Deep(X, layers, sizes.inducing)
            elbo = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(model.likelihood, model, len(y)))
            optimizer = torch.optim.Adam(model.parameters(), rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, sizes.steps)
            values = []
            model.train()
            for _ in range(sizes.steps):
                optimizer.zero_grad()
                loss = -elbo(model(X), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                values.append(-float(loss.detach()))
        bound = sum(values[-20:]) / len(values[-20:])
        if best is None or bound > best[0]:
            best = bound, model, rate
    assert best is not None
    return best[1], {"bound per point": best[0], "rate": best[2]}


# Scores.


def scores_of(mean: Tensor, variance: Tensor, y: Tensor, truth: Tensor) -> dict[str, float]:
    """Of mixtures of Gaussians (k, n), noise included: NLL, coverage of mean ± 1.96 deviations, RMSE to the step."""
    each = -0.5 * ((y - mean).square() / variance + (2 * math.pi * variance).log())
    center = mean.mean(0)
    total = (variance + mean.square()).mean(0) - center.square()
    return {
        "nll": -float((each.logsumexp(0) - math.log(len(mean))).mean()),
        "coverage": float(((y - center).abs() <= 1.959964 * total.sqrt()).double().mean()),
        "RMSE to the step": float((center - truth).square().mean().sqrt()),
    }


Moments = tuple[Tensor, Tensor]


def of_seed(sizes: Sizes, depths: Sequence[int], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores and seconds of all methods, and curves to draw."""
    random = torch.Generator().manual_seed(1000 + seed)
    X, y = observe(sizes.n, random)
    X_test, y_test = observe(1000, random)
    x = torch.linspace(-1.5, 1.5, 151, dtype=torch.float64)[:, None]
    at = torch.cat([X_test, x])
    found: dict[str, Moments] = {}
    extra: dict[str, dict[str, float]] = {name: {} for name in METHODS}
    clock = common.Clock("cpu")
    with clock(RBF):
        process = Process(X, y - y.mean(), kernel="rbf")
        process.fit()
        mean, variance = process.predict(at)
        found[RBF] = (mean + y.mean())[None], variance[None]
    for layers in depths:
        name = f"deep GP, {layers} layers"
        with clock(name):
            deep, extra[name] = fit_deep(X, y, layers, sizes, seed=seed)
            mean, variance = deep.predict(at, 100, seed=seed)
        found[name] = mean, variance + float(deep.likelihood.noise.detach())
    with clock(NETWORK):
        search = Search((3e-3, 1e-2), sizes.epochs, patience=100, batch=len(y))
        tuned = fine_tune(
            lambda _: perceptron((1, 30, 30, 1), seed=seed).double(),
            Labeled((X,), y),
            search,
            loss=squared_error,
            seed=seed,
        )
        extra[NETWORK] = {"rate": tuned.rate, "epochs": tuned.epochs}
        with torch.no_grad():
            f, noise = tuned.model(at)[:, 0], (tuned.model(X)[:, 0] - y).square().mean()
        found[NETWORK] = f[None], noise.expand(1, len(f))
    with clock(LAPLACE), common.expect(common.FAR):  # a network stopped by held-out points is not at a mode
        la = linnet.Laplace(tuned.model, "regression", progress=False).fit(X, y)
        found[LAPLACE] = one_of(la.predict(at, return_std=True, noise=True))
    with clock(TANGENT):
        reg = linnet.TangentRegressor(tuned.model, mean="zero", progress=False).fit(X, y)
        found[TANGENT] = one_of(reg.predict(at, return_std=True, noise=True))
    k, scores = len(X_test), {}
    for name, (mean, variance) in found.items():
        spent = clock.seconds[name] + (clock.seconds[NETWORK] if name in (LAPLACE, TANGENT) else 0.0)
        own = scores_of(mean[:, :k], variance[:, :k], y_test, step(X_test[:, 0]))
        scores[name] = {**own, "seconds": spent, **extra[name]}
    shown = {name: (mean[:, k:], variance[:, k:]) for name, (mean, variance) in found.items()}
    return scores, {"x": x[:, 0], "data": (X[:, 0], y), "curves": shown}


def one_of(moments: tuple[Tensor, Tensor]) -> Moments:
    mean, std = moments
    return mean[None], std.square()[None]


# The experiment.


ARGUMENTS = {
    "--seeds": "draws of data and networks (default: 5)",
    "--layers": common.several((2, 3), "of deep processes (default: 2)", type=int, default=[2]),
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All seeds; the first is drawn."""
    common.require_cpu(options, "This data set has one input")
    sizes = QUICK if options.quick else CPU
    seeds = [TRIED_SEEDS + seed for seed in common.seeds_of(options, sizes.seeds)]
    where = f"{sizes.n} points, {sizes.steps} steps"
    first: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for seed in seeds:
        scores, shown = of_seed(sizes, options.layers, seed)
        first = first or shown
        parts = common.keep(options, {where: {f"seed {seed}": scores}})
        print(f"seed {seed}:", {name: round(one["nll"], 3) for name, one in scores.items()}, flush=True)
    # Seeds that other runs of the same size have kept count too: they may run side by side.
    each = list(parts[where].values())
    table = summarize_seeds(each)
    record = {
        "settings": {"now": where, "seeds": len(each), "rates": sizes.rates},
        "errors": "95 % intervals by Student's t over seeds (data and start); differences are paired",
        "methods": METHODS,
        "summary": table,
        "parts": parts,
    }
    networks = sum(one[name]["seconds"] for one in each for name in one if name not in (LAPLACE, TANGENT))
    spent = f"{common.duration(networks)} of CPU"
    command = f"python -m experiments {options.name}" + (" --quick" if options.quick else "")
    return common.Outcome(record, figure(first, table), rows(table, sizes, len(each)), command=command, time=spent)


def summarize_seeds(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals over seeds, and the NLL less that of the network with error bars, of methods that all seeds have."""
    out: dict[str, Any] = {}
    for name in [name for name in METHODS if all(name in one for one in each)]:
        out[name] = summarize([one[name] for one in each])
        out[name]["NLL less Laplace"] = interval([one[name]["nll"] - one[LAPLACE]["nll"] for one in each])
    return out


def rows(table: Mapping[str, Any], sizes: Sizes, seeds: int) -> list[common.Row]:
    return [
        common.Row(
            f"step, {name}: test NLL, RMSE to the step, coverage, CPU seconds",
            "deep processes warp their way to the step (figure, no numbers)" if "deep" in name else "not in the talk",
            f"{show_value(one['nll'])}, {show_value(one['RMSE to the step'], 3)}, {100 * one['coverage']['mean']:.0f} %"
            f", {one['seconds']['mean']:.1f} s; NLL less that of {LAPLACE} "
            f"{show_interval(one['NLL less Laplace'], digits=2)}",
            f"{sizes.n} points, noise {NOISE:g}; {seeds} seeds, 95 % intervals; {TRIED}",
        )
        for name, one in table.items()
    ]


def figure(first: Mapping[str, Any], table: Mapping[str, Any]) -> Figure:
    """Every method on one data set, and NLL against seconds."""
    x, (X, y) = first["x"], first["data"]
    picture = plt.figure(figsize=(13, 6.8))
    left, right = picture.subfigures(1, 2, width_ratios=(2.1, 1))
    panels = left.subplots(2, 3, sharex=True, sharey=True)
    for ax in panels.flat[len(first["curves"]) :]:
        ax.axis("off")
    for ax, (name, (mean, variance)) in zip(panels.flat, first["curves"].items(), strict=False):
        center = mean.mean(0)
        std = ((variance + mean.square()).mean(0) - center.square()).sqrt()
        plots.draw_posterior(ax, x, center, std, color=COLORS[name])
        ax.plot(x, step(x), color="black", lw=0.8, ls=":")
        ax.plot(X, y, ".", color="black", ms=3)
        ax.set(title=name, ylim=(-0.8, 1.8))
    left.supylabel("observation: mean ± 2 deviations", fontsize=10)
    scored, timed = right.subplots(2, 1, height_ratios=(2, 1))
    for i, (name, one) in enumerate(table.items()):
        plots.draw_means(scored, [i], [one["nll"]], across=True, color=COLORS[name])
        timed.barh(i, one["seconds"]["mean"], color=COLORS[name])
    for ax in (scored, timed):
        plots.name_rows(ax, list(table))
    ideal = 0.5 * math.log(2 * math.pi * math.e * NOISE**2)
    scored.axvline(ideal, color="black", lw=0.8, ls=":", label="the step known")
    scored.legend(fontsize=8)
    scored.set_xlabel("test NLL (left is better)")
    timed.set_xlabel("CPU seconds, training included")
    timed.set_xscale("log")
    return picture
