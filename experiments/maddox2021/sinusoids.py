"""Few-shot sinusoids: a network trained on one, adapted to others (Maddox et al. 2021, section 5 and figure 6).

Tasks are drawn as in Kim et al. 2018: y = A sin(w x + b) + 0.01 A e with A in [0.1, 5], b in [0, 2 pi], w in [0.5, 2]
and x in [-5, 5]. A 40-40 tanh network is trained to completion on the first task alone; other tasks show few points.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.ensembles import Prediction, forward, initial, module, train
from experiments.common.processes import Features, Process
from experiments.common.statistics import average, scores, show_error

WIDTHS = (1, 40, 40, 1)
SHOTS = (5, 10, 20)
TUNING_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
QUICK: dict[str, Any] = {"iterations": 3, "starts": False}
TUNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)

# Method to what it is. "source": hyperparameters fitted on the source task and kept; "shared": fitted to the points of
# all target tasks together; "own": fitted to the points of each task alone.
METHODS = {
    "no adaptation": "the network as it is, with the noise its errors on other tasks show",
    "finite NTK, as published": "mean zero, unit prior, noise from the source task's residuals",
    "finite NTK, source": "mean zero, hyperparameters of the source task",
    "finite NTK, shared": "mean zero, hyperparameters shared by the target tasks (fit_tasks)",
    "finite NTK, own": "mean zero, hyperparameters of each task",
    "finite NTK, own, no floor": "the same, by the evidence alone: that of few points often asks for no noise",
    "finite NTK layerwise, shared": "mean zero, one variance per layer, shared by the target tasks",
    "linearized network, source": "mean of the network, hyperparameters of the source task",
    "linearized network, shared": "mean of the network, hyperparameters shared by the target tasks",
    "linearized network, own": "mean of the network, hyperparameters of each task",
    "linearized network, own, no floor": "the same, by the evidence alone",
    "last layer, shared": "the same on the last layer alone",
    "RBF, source": "Gaussian process with RBF kernel, hyperparameters of the source task",
    "RBF, shared": "the same, hyperparameters shared by the target tasks",
    "RBF, own": "the same, hyperparameters of each task",
    "ABLR, source": "adaptive Bayesian linear regression, hyperparameters and features of the source task",
    "ABLR, shared": "the same, hyperparameters shared by the target tasks",
    "deep kernel, source": "RBF kernel on features, hyperparameters and features of the source task",
    "deep kernel, shared": "the same, hyperparameters shared by the target tasks",
    "fine-tuning": "all weights, rate and steps tuned on other tasks with as many points",
}
# Those of the table of results.
ROWS = (
    *(f"finite NTK, {of}" for of in ("as published", "source", "shared", "own")),
    "linearized network, shared",
    "RBF, source",
    "RBF, shared",
    "ABLR, source",
    "deep kernel, source",
    "fine-tuning",
)
SHOWN = ("finite NTK, shared", "finite NTK, source", "RBF, source", "ABLR, source")
COLORS = {
    "finite NTK, shared": plots.BLUE,
    "finite NTK, source": plots.SKY,
    "RBF, source": plots.YELLOW,
    "ABLR, source": plots.GRAY,
}


@dataclass(frozen=True)
class Tasks:
    """Sinusoids, each with its points."""

    X: Tensor  # points (tasks, n, 1)
    y: Tensor  # noisy values (tasks, n)
    parameters: Tensor  # amplitude, phase, frequency (tasks, 3)

    def few(self, shots: int) -> tuple[Tensor, Tensor]:
        """The first points of each task."""
        return self.X[:, :shots], self.y[:, :shots]

    def at(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Noisy values at other points (tasks, m, 1)."""
        return observe(X, self.parameters, generator)


def draw(tasks: int, n: int, generator: torch.Generator) -> Tasks:
    """Sinusoids of Kim et al. 2018 with n uniform points each."""
    u = torch.rand(tasks, 3, dtype=torch.float64, generator=generator)
    low, high = u.new_tensor([0.1, 0.0, 0.5]), u.new_tensor([5.0, 2 * math.pi, 2.0])
    parameters = low + (high - low) * u
    X = 10 * torch.rand(tasks, n, 1, dtype=torch.float64, generator=generator) - 5
    return Tasks(X, observe(X, parameters, generator), parameters)


def observe(X: Tensor, parameters: Tensor, generator: torch.Generator) -> Tensor:
    A, b, w = parameters.T[:, :, None]
    e = torch.randn(X.shape[:-1], dtype=X.dtype, generator=generator)
    return A * torch.sin(w * X.squeeze(-1) + b) + 0.01 * A * e


Processes = dict[str, tuple[str, nn.Module | None, Mapping[str, Tensor]]]

# The methods. Each gives predictions at X (tasks, m, 1) from the points of the target tasks.


class Tangent:
    """linnet's regressor, with hyperparameters from the source task, from all tasks or from each."""

    def __init__(self, model: nn.Module, source: tuple[Tensor, Tensor]):
        self.model, self.source = model, source

    def make(self, **settings: Any) -> linnet.TangentRegressor:
        return linnet.TangentRegressor(
            self.model, **{"prior": "shared", "mean": "network", "average": False, **settings}
        )

    def published(self, X: Tensor, y: Tensor, at: Tensor) -> Prediction:
        with torch.no_grad():
            residual = self.model(self.source[0]).squeeze(-1) - self.source[1]
        fixed = self.make(mean="zero", prior=1.0, noise=max(1e-3, float(residual.square().mean())))
        return self.each(fixed, X, y, at)

    def transferred(self, X: Tensor, y: Tensor, at: Tensor, *, mean: str) -> Prediction:
        fitted = call_quietly(self.make(mean=mean).fit, *self.source)
        fixed = self.make(mean=mean, prior=fitted.scales_["all"], noise=fitted.noise_)
        return self.each(fixed, X, y, at)

    def shared(self, X: Tensor, y: Tensor, at: Tensor, **settings: Any) -> Prediction:
        fitted = call_quietly(self.make(**settings).fit_tasks, list(zip(X, y, strict=True)))
        return stack(one.predict(x, return_std=True, noise=True) for one, x in zip(fitted.tasks_, at, strict=True))

    def each(self, regressor: linnet.TangentRegressor, X: Tensor, y: Tensor, at: Tensor) -> Prediction:
        return stack(
            call_quietly(regressor.fit, x, t).predict(a, return_std=True, noise=True)
            for x, t, a in zip(X, y, at, strict=True)
        )


def call_quietly(fit: Any, *arguments: Any) -> Any:
    """Without the warning that the network was trained on these data: on the source task it was, by design."""
    with common.expect(common.OWN):
        return fit(*arguments)


def stack(found: Iterator[tuple[Tensor, Tensor]]) -> Prediction:
    means, stds = zip(*found, strict=True)
    return Prediction(torch.stack(means), torch.stack(stds).square())


def fit_processes(model: nn.Sequential, source: tuple[Tensor, Tensor], *, quick: bool) -> Processes:
    """Kernel, features and hyperparameters of each Gaussian process, fitted on the source task."""
    found: Processes = {}
    for name, kernel in {"RBF": "rbf", "ABLR": "linear", "deep kernel": "rbf"}.items():
        features = None if name == "RBF" else Features(model)
        process = Process(*source, kernel=kernel, features=features)
        if features is None:
            process.fit(**(QUICK if quick else {}))
        else:
            process.fit_features(steps=2 if quick else 500, **(QUICK if quick else {}))
            features.requires_grad_(False)
        found[name] = (kernel, features, process.hyperparameter_state())
    return found


def without_source(tasks: Tasks, shots: int, at: Tensor, *, quick: bool) -> dict[str, Prediction]:
    """The RBF processes that know the target tasks alone: the same for every source."""
    X, y = tasks.few(shots)
    found = {}
    for name, own in {"RBF, shared": False, "RBF, own": True}.items():
        process = Process(X, y, kernel="rbf", own=own)
        process.fit(**(QUICK if quick else {}))
        found[name] = Prediction(*process.predict(at.expand(len(y), -1, -1)))
    return found


def tune(
    theta: Tensor, tasks: Tasks, shots: int, at: Tensor, targets: Tensor, tried: Sequence[int] = TUNING_STEPS
) -> tuple[float, int, float]:
    """Learning rate, steps and noise of fine-tuning, by the error on tasks kept for this."""
    X, y = tasks.few(shots)
    k, count = len(TUNING_RATES), len(y)
    errors: dict[int, Tensor] = {}

    def watch(step: int, now: Tensor) -> None:
        if step in tried:
            f = forward(now.detach(), at.repeat(k, 1, 1), WIDTHS)
            errors[step] = (f - targets.repeat(k, 1)).square().mean(1).view(k, count).mean(1)

    rates = torch.tensor(TUNING_RATES, dtype=theta.dtype).repeat_interleave(count)
    fine_tune(theta, X.repeat(k, 1, 1), y.repeat(k, 1), rates, tried[-1], watch)
    table = torch.stack([errors[step] for step in tried])
    i, j = divmod(int(table.argmin()), k)
    return TUNING_RATES[j], tried[i], float(table[i, j])


def fine_tune(theta: Tensor, X: Tensor, y: Tensor, rates: Tensor, steps: int, watch: Any = None) -> Tensor:
    """Networks (tasks, p) after Adam from theta (p,) for so many of 1,000 steps, on all points at once."""
    stop = torch.full((len(y),), steps)
    start = theta.expand(len(y), -1)
    generator = torch.Generator().manual_seed(0)  # no minibatches, nothing to draw
    return train(
        start, X, y, WIDTHS, rate=rates, steps=TUNING_STEPS[-1], generator=generator, stop=stop, every=1, watch=watch
    ).theta


def predictions(
    theta: Tensor,
    source: tuple[Tensor, Tensor],
    tasks: Tasks,
    tuning: Tasks,
    *,
    shots: int,
    at: Tensor,
    held: Tensor,
    processes: Processes,
    quick: bool = False,
) -> Iterator[tuple[str, Prediction]]:
    """Each method's predictions of the tasks.

    Args:
        theta: Parameters of the network trained on the source task (p,).
        source: The source task.
        tasks: The target tasks.
        tuning: Tasks that fine-tuning is tuned on.
        shots: Points that the methods see of each task.
        at: Where to predict (m, 1).
        held: Values of the tuning tasks there (tasks, m).
        processes: The Gaussian processes of the source task.
        quick: Few steps of everything.
    """
    X, y = tasks.few(shots)
    grid = at.expand(len(y), -1, -1)
    model = module(theta, WIDTHS)
    tangent = Tangent(model, source)

    f = model(at).detach().squeeze(-1)
    noise = (held - f).square().mean()
    yield "no adaptation", Prediction(f.expand(len(y), -1), noise.expand(len(y), len(f)))
    yield "finite NTK, as published", tangent.published(X, y, grid)
    for label, mean in {"finite NTK": "zero", "linearized network": "network"}.items():
        yield f"{label}, source", tangent.transferred(X, y, grid, mean=mean)
        yield f"{label}, shared", tangent.shared(X, y, grid, mean=mean)
        yield f"{label}, own", tangent.each(tangent.make(mean=mean), X, y, grid)
        yield f"{label}, own, no floor", tangent.each(tangent.make(mean=mean, noise_floor=0), X, y, grid)
    yield "finite NTK layerwise, shared", tangent.shared(X, y, grid, mean="zero", prior="layerwise")
    yield "last layer, shared", tangent.shared(X, y, grid, params=f"{len(model) - 1}.*")

    for label, (kernel, features, state) in processes.items():
        process = Process(X, y, kernel=kernel, features=features)
        process.load_hyperparameters(state)
        yield f"{label}, source", Prediction(*process.predict(grid))
        if features is None:
            continue
        process.fit(**(QUICK if quick else {}))
        yield f"{label}, shared", Prediction(*process.predict(grid))

    tried = TUNING_STEPS[:5] if quick else TUNING_STEPS
    rate, steps, noise_ = tune(theta, tuning, shots, at.expand(len(tuning.y), -1, -1), held, tried)
    fine = fine_tune(theta, X, y, torch.full((len(y),), rate), steps)
    g = forward(fine, grid, WIDTHS)
    yield "fine-tuning", Prediction(g, torch.full_like(g, noise_))


# The experiment.


ARGUMENTS = {
    "--sources": "source tasks, each with its network (default: 8)",
    "--tasks": "target tasks for each source (default: 25)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train the networks, adapt them, score."""
    common.require_cpu(options, "The networks have 1,761 parameters")
    sources = options.sources or (1 if options.quick else 8)
    count = options.tasks or (3 if options.quick else 25)
    shots_all = SHOTS[:1] if options.quick else SHOTS
    generator = torch.Generator().manual_seed(options.seed)
    source = draw(sources, 50, generator)
    targets, tuning = draw(count, max(SHOTS), generator), draw(count, max(SHOTS), generator)
    at = torch.linspace(-5, 5, 41 if options.quick else 201, dtype=torch.float64)[:, None]
    truth = targets.at(at.expand(count, -1, -1), generator)

    steps = 200 if options.quick else 10_000
    start = initial(sources, WIDTHS, generator=generator, dtype=torch.float64)
    stop = torch.full((sources,), steps)
    rate = torch.full((sources,), 1e-2)
    nets = train(start, source.X, source.y, WIDTHS, rate=rate, steps=steps, generator=generator, stop=stop).theta
    fit = (forward(nets, source.X, WIDTHS) - source.y).square().mean(1).sqrt() / source.parameters[:, 0]
    print(f"source tasks: residuals {float(fit.min()):.4f} to {float(fit.max()):.4f} of the amplitude (noise 0.01)")

    rows: dict[int, dict[str, list[list[dict[str, float]]]]] = {n: defaultdict(list) for n in shots_all}
    kept: dict[str, Prediction] = {}
    held = tuning.at(at.expand(count, -1, -1), generator)
    alone = {n: without_source(targets, n, at, quick=options.quick) for n in shots_all}
    for i in range(sources):
        task = (source.X[i], source.y[i])
        processes = fit_processes(module(nets[i], WIDTHS), task, quick=options.quick)
        for n in shots_all:
            made = predictions(
                nets[i], task, targets, tuning, shots=n, at=at, held=held, processes=processes, quick=options.quick
            )
            for name, found in (*made, *alone[n].items()):
                pairs = zip(found.mean, found.variance, truth, strict=True)
                rows[n][name].append([scores(mean, variance, y) for mean, variance, y in pairs])
                if i == 0 and n == shots_all[min(1, len(shots_all) - 1)] and name in SHOWN:
                    kept[name] = found
        print(f"source {i + 1} of {sources} done")

    tables = {n: {name: summary(rows[n][name]) for name in METHODS} for n in shots_all}
    shown = shots_all[min(1, len(shots_all) - 1)]
    model = module(nets[0], WIDTHS)
    metrics = {
        "settings": {"sources": sources, "tasks": count, "source points": 50, "seed": options.seed, "widths": WIDTHS},
        "errors": "standard errors over source tasks",
        "methods": METHODS,
        "context points": tables,
    }
    picture = figure(model, (source.X[0], source.y[0]), targets, shown, at, kept, tables)
    return common.Outcome(metrics, picture, table_rows(tables[shown], shown, sources, count))


def summary(found: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Over tasks, with the standard error over sources: tasks of one source share its network."""
    out: dict[str, Any] = {}
    for key in ("rmse", "nll", "coverage"):
        values = torch.tensor([[one[key] for one in tasks] for tasks in found], dtype=torch.float64)
        each = values.mean(1).tolist()
        out[key] = {**average(each), "median": float(values.median()), "by source": each}
    return out


def table_rows(table: Mapping[str, Any], shots: int, sources: int, count: int) -> Iterator[common.Row]:
    differs = f"the paper plots a few tasks; mean ± standard error over {sources} sources x {count} tasks"
    alike = "comparable with the transferred RBF process (figure 6)"
    said = {
        "finite NTK, as published": alike,
        "finite NTK, source": alike,
        "RBF, source": "close to the gold standard",
        "ABLR, source": "clearly worse than the finite NTK",
        "deep kernel, source": "underfits",
    }
    for name in ROWS:
        one = table[name]
        ours = f"{show_error(one['rmse'])}, {show_error(one['nll'])}, {100 * one['coverage']['mean']:.0f} %"
        what = f"{shots} points, {name}: RMSE, NLL, coverage"
        yield common.Row(what, said.get(name, "not in the paper"), ours, differs)


def figure(
    model: nn.Module,
    source: tuple[Tensor, Tensor],
    targets: Tasks,
    shots: int,
    at: Tensor,
    kept: Mapping[str, Prediction],
    tables: Mapping[int, Mapping[str, Any]],
) -> Figure:
    """The source task and three targets, one row per method; below, the error against the number of points."""
    x = at.squeeze(-1)
    picture = plt.figure(figsize=(11, 9.5))
    upper, lower = picture.subfigures(2, 1, height_ratios=[3.1, 1.25])
    axes = upper.subplots(len(SHOWN), 3, sharex=True, sharey="col")
    X, y = targets.few(shots)
    for row, name in zip(axes, SHOWN, strict=True):
        row[0].set_ylabel(name.replace(", ", ",\n"))
        for task, ax in enumerate(row):
            mean, std = kept[name].mean[task], kept[name].variance[task].sqrt()
            plots.draw_posterior(ax, x, mean, std, color=COLORS[name], lw=2, label="mean ± 2 deviations")
            A, b, w = targets.parameters[task]
            ax.plot(x, A * torch.sin(w * x + b), "k--", lw=1, label="truth")
            ax.plot(X[task, :, 0], y[task], "o", color=plots.PURPLE, ms=5, mec="white", mew=0.5, label="context")
            ax.set_ylim(-1.9 * float(A), 1.9 * float(A))
    for task, ax in enumerate(axes[0]):
        ax.set_title(f"new task {task + 1}")
    plots.legend_below(upper, axes[0, 0], 4)
    left, middle, right = lower.subplots(1, 3)
    left.plot(source[0][:, 0], source[1], ".", color=plots.ORANGE, ms=7, label="source task")
    with torch.no_grad():
        left.plot(x, model(at).squeeze(-1), color=plots.ORANGE, lw=1, label="network")
    left.set_title("the only task trained on")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8)
    for ax, key, value in ((middle, "rmse", "mean"), (right, "nll", "median")):
        for name, color in {**COLORS, "fine-tuning": plots.VERMILION, "RBF, shared": plots.GREEN}.items():
            values = [table[name][key][value] for table in tables.values()]
            ax.plot(list(tables), values, "o-", color=color, ms=4, label=name)
        ax.set_xticks(list(tables))
        ax.set(xlabel="context points", title=f"{key.upper()}, {value} over tasks")
    middle.set_ylim(bottom=0)
    right.set_yscale("symlog", linthresh=2)
    ticks = [-2, -1, 0, 1, 2, 10, 100]
    right.set_yticks(ticks, [f"{t}" for t in ticks])
    right.minorticks_off()
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return picture
