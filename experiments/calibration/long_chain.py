"""Is the posterior of classes right? Variational inference and Laplace beside long Markov chains.

A small network is trained on labels of its own. `TangentClassifier` then learns from more labels with the kernel of the
network and a mean function of zero, so that all it knows comes from these labels; one prior variance is chosen as by
default. The chains draw from the exact posterior of this linear
model by elliptical slice sampling (Murray, Adams and MacKay 2010) in the weights, where the prior is white, so that the
logits of new inputs follow from the same draws. Eight chains begin at draws from the prior.

"curve": two half circles, one logit, a network of 65 parameters, 20 and 100 labels. "digits": scikit-learn's digits,
ten logits, a network of 1,210 parameters, 20 and 50 labels. Scores are those of new inputs, averaged; standard errors
are over seeds. "error of the chains" is the same score between one half of the chains and the other half, which is
about the score that exact draws would have.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.nn import functional as F

import linnet
from experiments import common
from experiments.common import networks, plots
from experiments.common.statistics import average, show_error, summarize
from experiments.common.training import Labeled, train

CHAINS, HALVES, THIN = 8, "error of the chains", 20
METHODS: dict[str, dict[str, Any]] = {
    "vi, full": {"inference": "vi", "family": "full"},
    "vi, lowrank": {"inference": "vi", "family": "lowrank"},
    "vi, meanfield": {"inference": "vi", "family": "meanfield"},
    "laplace": {"inference": "laplace"},
}
"""Settings of `TangentClassifier`."""

SCORES = {
    "mean": "root mean square of the difference of a logit's mean, in standard deviations of the chains",
    "spread": "mean logarithm of a logit's standard deviation over that of the chains",
    "probability": "mean total variation between class probabilities, in percent",
    "nll": "test NLL less that of the chains",
}

ARGUMENTS = {
    "--problems": common.several(("curve", "digits"), "data and networks"),
    "--seeds": "of data, networks and chains (default: 5)",
    "--steps": "of a chain (default: 20,000 for curve, 60,000 for digits); a fifth of them is left out",
}


@dataclass(frozen=True)
class Problem:
    """A trained network with labels to adapt to, and new inputs with labels."""

    model: nn.Module
    train: Labeled
    test: Labeled


def make_curve(size: int, seed: int, *, epochs: int) -> Problem:
    """Two half circles, and the same turned by 20 degrees for the labels to adapt to."""
    X, y = (torch.as_tensor(t) for t in make_moons(400 + size, noise=0.25, random_state=seed))
    X = X - torch.tensor([0.5, 0.25])
    model = networks.perceptron((2, 16, 1), seed=seed)
    old = Labeled((X[:200].float(),), y[:200].float()[:, None])
    train(model, old, epochs=epochs, rate=1e-2, seed=seed, loss=F.binary_cross_entropy_with_logits)
    angle = math.radians(20)
    X = X @ torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=X.dtype)
    return Problem(model.double(), Labeled((X[400:],), y[400:]), Labeled((X[200:400],), y[200:400]))


def make_digits(size: int, seed: int, *, epochs: int) -> Problem:
    """A network of 100 digits, and other digits to adapt to."""
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(seed))
    X, y = torch.tensor(found.data / 16)[order], torch.tensor(found.target)[order].long()
    model = networks.perceptron((64, 16, 10), seed=seed)
    train(model, Labeled((X[:100].float(),), y[:100]), epochs=epochs, rate=3e-3, seed=seed, decay=1e-3)
    return Problem(model.double(), Labeled((X[100 : 100 + size],), y[100 : 100 + size]), Labeled((X[-100:],), y[-100:]))


MAKE: dict[str, Callable[..., Problem]] = {"curve": make_curve, "digits": make_digits}
SIZES = {"curve": (20, 100), "digits": (20, 50)}
STEPS = {"curve": 20_000, "digits": 60_000}


@dataclass(frozen=True)
class Draws:
    """Averages of logits and probabilities over each chain.

    Attributes:
        mean: The average logits, (chains, n, c).
        square: The average squares of the logits.
        p: The average class probabilities, (chains, n, classes).
    """

    mean: Tensor
    square: Tensor
    p: Tensor

    def take(self, some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and standard deviation of the logits, and the probabilities, of some chains."""
        mean = self.mean[some].mean(0)
        return mean, (self.square[some].mean(0) - mean.square()).clamp_min(0).sqrt(), self.p[some].mean(0)

    @property
    def mixing(self) -> float:
        """The largest R-hat of a logit: the spread over all chains against that within them."""
        within = (self.square - self.mean.square()).mean(0)
        return float((1 + self.mean.var(0) / within).sqrt().max())


def probabilities(f: Tensor) -> Tensor:
    """Class probabilities from logits (..., c)."""
    if f.shape[-1] > 1:
        return f.softmax(-1)
    p = torch.sigmoid(f)
    return torch.cat([1 - p, p], -1)


def slice_sample(
    log_prob: Callable[[Tensor], Tensor], rows: Tensor, z: Tensor, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Points (chains, d) of several chains under a white prior, by elliptical slice sampling.

    Args:
        log_prob: From logits (chains, m) to log likelihoods (chains,).
        rows: From a point to its logits, (m, d).
        z: The first points of the chains, (chains, d).
        steps: The number of points of each chain.
        generator: The generator of all draws.
    """

    def uniform() -> Tensor:
        return torch.rand(len(z), dtype=z.dtype, generator=generator)

    f = z @ rows.T
    value = log_prob(f)
    for _ in range(steps):
        other = torch.randn(z.shape, dtype=z.dtype, generator=generator)
        f_other, level = other @ rows.T, value + uniform().log()
        angle = 2 * math.pi * uniform()
        low, high, waiting = angle - 2 * math.pi, angle.clone(), torch.ones(len(z), dtype=torch.bool)
        while True:
            point = f * angle.cos()[:, None] + f_other * angle.sin()[:, None]
            found = log_prob(point)
            waiting = waiting & (found <= level)
            if not bool(waiting.any()):
                break
            low, high = torch.where(waiting & (angle < 0), angle, low), torch.where(waiting & (angle >= 0), angle, high)
            angle = torch.where(waiting, low + (high - low) * uniform(), angle)
        z, f, value = z * angle.cos()[:, None] + other * angle.sin()[:, None], point, found
        yield z


def run_chains(problem: Problem, variance: Tensor, steps: int, seed: int) -> Draws:
    """Draws from the posterior of the linear model with prior variances (p,).

    The chains move in the span of the training rows. Outside of the span the posterior is the prior.
    """
    lin = linnet.linearize(problem.model)
    J, at = (lin.jacobian(data.X[0], progress=False) for data in (problem.train, problem.test))
    (n, c), y = (J.n, J.c), problem.train.y
    Phi, Phi_at = (jacobian.dense() * variance.sqrt() for jacobian in (J, at))
    Q, R = torch.linalg.qr(Phi.T)
    along = Phi_at @ Q
    across = Phi_at - along @ Q.T

    def log_prob(f: Tensor) -> Tensor:
        if c == 1:
            return -F.softplus(torch.where(y == 1, -f, f)).sum(1)
        return f.view(-1, n, c).log_softmax(-1)[:, torch.arange(n), y].sum(1)

    generator = torch.Generator().manual_seed(seed)

    def normal(d: int) -> Tensor:
        return torch.randn(CHAINS, d, dtype=torch.float64, generator=generator)

    sums, count = [torch.zeros(CHAINS, at.n, width, dtype=torch.float64) for width in (c, c, max(2, c))], 0
    for i, z in enumerate(slice_sample(log_prob, R.T, normal(len(R)), steps, generator)):
        if i >= steps // 5 and i % THIN == 0:
            logits = (z @ along.T + normal(len(variance)) @ across.T).view(CHAINS, at.n, c)
            for total, part in zip(sums, (logits, logits.square(), probabilities(logits)), strict=True):
                total += part
            count += 1
    return Draws(*(total / count for total in sums))


def compare(found: tuple[Tensor, Tensor, Tensor], exact: tuple[Tensor, Tensor, Tensor], y: Tensor) -> dict[str, float]:
    """Scores of means, standard deviations and probabilities."""
    (mean, std, p), (mean_, std_, p_) = found, exact
    nll, nll_ = (-q[torch.arange(len(y)), y].log().mean() for q in (p, p_))
    return {
        "mean": float(((mean - mean_) / std_).square().mean().sqrt()),
        "spread": float((std / std_).log().mean()),
        "probability": 100 * float(0.5 * (p - p_).abs().sum(1).mean()),
        "nll": float(nll - nll_),
    }


def measure(name: str, size: int, seed: int, *, steps: int, epochs: int) -> dict[str, Any]:
    """All methods on one problem, and how well the chains know the answer."""
    problem = MAKE[name](size, seed, epochs=epochs)
    X, y, X_test, y_test = problem.train.X[0], problem.train.y, problem.test.X[0], problem.test.y
    classes = list(range(10)) if name == "digits" else None
    prior: Any = "shared"
    found: dict[str, Any] = {}
    for method, given in METHODS.items():
        clf = linnet.TangentClassifier(
            problem.model, mean="zero", prior=prior, classes=classes, link="mc", progress=False, seed=seed, **given
        )
        clf.fit(X, y)
        if not found:
            prior = float(clf.prior_variance_[0])  # one for all methods
            exact = run_chains(problem, clf.prior_variance_, steps, seed)
            whole = exact.take(slice(None))
        mean, std = clf.predict_logits(X_test, return_std=True)
        found[method] = compare((mean, std, clf.predict_proba(X_test)), whole, y_test)
    halves = [exact.take(some) for some in (slice(None, CHAINS // 2), slice(CHAINS // 2, None))]
    found[HALVES] = compare(*halves, y_test)  # type: ignore[arg-type]
    return {"scores": found, "R-hat": exact.mixing}


def run(options: argparse.Namespace) -> common.Outcome:
    """All problems."""
    common.require_cpu(options, "Chains of small networks")
    seeds = common.seeds_of(options, 2 if options.quick else 5)
    parts: dict[str, Any] = {}
    for name in options.problems:
        steps = options.steps or (200 if options.quick else STEPS[name])
        for size in SIZES[name][:1] if options.quick else SIZES[name]:
            runs = [measure(name, size, seed, steps=steps, epochs=10 if options.quick else 200) for seed in seeds]
            label = f"{name}, {size} labels"
            parts[label] = {f"seed {seed}": one for seed, one in zip(seeds, runs, strict=True)}
            print(f"{label}: {summarize([one['scores'] for one in runs], average)}", flush=True)
    summary = {
        label: {
            "scores": summarize([one["scores"] for one in runs.values()], average),
            "largest R-hat": max(one["R-hat"] for one in runs.values()),
        }
        for label, runs in parts.items()
    }
    metrics = {
        "settings": {"chains": CHAINS, "seeds": len(seeds), "steps": options.steps or STEPS},
        "scores": SCORES,
        "errors": "standard errors over seeds",
        "summary": summary,
        "runs": parts,
    }
    return common.Outcome(metrics, figure(summary), table_rows(summary, len(seeds)))


def table_rows(summary: Mapping[str, Any], seeds: int) -> Iterator[common.Row]:
    for label, found in summary.items():
        for method, one in found["scores"].items():
            shown = ", ".join(show_error(one[score], 2 if score != "nll" else 3) for score in SCORES)
            what = f"{label}, {method}: mean, log spread, probability (%), NLL less the chains'"
            differs = f"{seeds} seeds, {CHAINS} chains, R-hat up to {found['largest R-hat']:.3f}"
            yield common.Row(what, "not in a paper", shown, differs)


def figure(summary: Mapping[str, Any]) -> Figure:
    """A panel for each of three scores, a row for each problem."""
    shown = {
        "mean": "difference of the mean of a logit\n(standard deviations of the chains)",
        "spread": "log of the standard deviation of a logit\nover that of the chains",
        "probability": "total variation of\nclass probabilities (%)",
    }
    labels: Sequence[str] = list(summary)
    picture, axes = plt.subplots(1, len(shown), figsize=(11, 1.2 + 0.8 * len(labels)), sharey=True)
    methods = [*METHODS, HALVES]
    colors = (plots.BLUE, plots.GREEN, plots.SKY, plots.VERMILION, plots.GRAY)
    for ax, (score, title) in zip(axes, shown.items(), strict=True):
        for i, (method, color) in enumerate(zip(methods, colors, strict=True)):
            values = [summary[label]["scores"][method][score] for label in labels]
            places = plots.place_rows(len(labels), i, len(methods))
            plots.draw_means(ax, places, values, across=True, color=color, label=method)
        ax.axvline(0, color="black", lw=0.6)
        ax.set_xlabel(title)
    plots.name_rows(axes[0], labels, lines=True)
    plots.legend_below(picture, axes[0], len(methods))
    return picture
