"""A regression network that meets shifted data: contenders for the adaptation, error against points, the figure.

All contenders start from one network with outputs (mean, log variance) and are given the same points. Where gradient
descent is tuned, rate and epochs are those of the best log likelihood on a fifth of the points that is held out, and
training is then repeated with all of them; linnet chooses its prior and noise by the evidence of all of them.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.processes import Process
from experiments.common.statistics import average, interval, scores, show_error, show_interval, summarize
from experiments.common.training import Labeled, Search, fine_tune, gaussian_nll, in_parts, train

NONE, FIXED, FIXED_LONGER = "no retraining", "last layer, as published", "last layer, as published, 6 x epochs"
TUNED, EVERYTHING = "last layer, tuned", "all layers, tuned"
LINNET, NTK, EXACT = "linearized network", "finite NTK", "linearized last layer"
ALONE, RESIDUALS = "RBF process", "RBF process on residuals"

# Contender to what it is.
METHODS = {
    NONE: "the network as it is",
    FIXED: "Adam on the last layer with rate 0.001, as many epochs as the network was trained for",
    FIXED_LONGER: "the same with six times the epochs",
    TUNED: "the same with rate and epochs tuned, at most six times the epochs",
    EVERYTHING: "Adam on all layers, rate and epochs tuned, at most as many epochs as the network was trained for",
    LINNET: "mean of the network, balanced prior, noise of the network times one scale, both by the evidence",
    NTK: "the same with mean zero, as in the paper",
    EXACT: "the linearized network with the last layer alone, whose optimum needs no epochs",
    ALONE: "Gaussian process with RBF kernel on the inputs, points of the target alone",
    RESIDUALS: "the same on what the network leaves",
}
COLORS = {
    NONE: plots.GRAY,
    FIXED: plots.YELLOW,
    FIXED_LONGER: "black",
    TUNED: plots.ORANGE,
    EVERYTHING: plots.VERMILION,
    LINNET: plots.BLUE,
    NTK: plots.SKY,
    EXACT: plots.GREEN,
    RESIDUALS: plots.PURPLE,
}


@dataclass(frozen=True)
class Case:
    """One network and the points it is adapted with."""

    model: nn.Sequential  # layers in order; the outputs are mean and log variance
    adapt: Labeled  # the points
    test: Labeled  # where to predict
    search: Search  # what fine-tuning tries, with as many epochs as the network was trained for
    unit: float = 1.0  # original units per unit of the targets, whose zero is ``level``
    level: float = 0.0  # see unit
    device: str = "cpu"  # where everything is
    seed: int = 0  # seed of everything that is drawn

    def network(self) -> dict[str, Any]:
        """The network as it is."""
        return self.scores(*gaussian(in_parts(self.model, self.test.X)))

    def tuned(self, layers: slice, *, times: int = 1) -> dict[str, Any]:
        """Fine-tuning of the last layers, with what the others compute computed once.

        A rate is given up after a tenth of the epochs without a better held-out loss, for the last layer alone, which
        costs little, after half as many epochs as the network was trained for.
        """
        clock, bottom, start = common.Clock(self.device), self.model[: layers.start], self.model[layers]
        with clock("seconds"):
            data, test = (replace(one, X=(in_parts(bottom, one.X),)) for one in (self.adapt, self.test))
            epochs = self.search.epochs
            patience = max(1, epochs // (2 if layers.start else 10))
            search = replace(self.search, epochs=times * epochs, patience=patience, batch=self.batch)
            found = fine_tune(lambda _: copy.deepcopy(start), data, search, loss=gaussian_nll, seed=self.seed)
        made = self.scores(*gaussian(in_parts(found.model, test.X)))
        return {**made, **clock.seconds, "rate": found.rate, "epochs": found.epochs}

    def published(self, *, times: int = 1) -> dict[str, Any]:
        """The last layer after as many epochs as the network was trained for, or so many times as many."""
        clock, last = common.Clock(self.device), copy.deepcopy(self.model[-1])
        with clock("seconds"):
            data, test = (replace(one, X=(in_parts(self.model[:-1], one.X),)) for one in (self.adapt, self.test))
            epochs = times * self.search.epochs
            train(last, data, epochs=epochs, batch=self.batch, loss=gaussian_nll, seed=self.seed)
        return {**self.scores(*gaussian(in_parts(last, test.X))), **clock.seconds}

    @property
    def batch(self) -> int:
        """Points of a step of fine-tuning: three steps an epoch, if there are enough."""
        return max(4, math.ceil(len(self.adapt) / 3))

    def tangent(self, **settings: Any) -> dict[str, Any]:
        """linnet's regressor."""
        clock = common.Clock(self.device)
        with clock("seconds"):
            reg = self.fitted(**settings)
        mean, std = reg.predict(self.test.X[0], return_std=True, noise=True)
        return {**self.scores(mean, std.square()), **clock.seconds}

    def fitted(self, **settings: Any) -> linnet.TangentRegressor:
        given: dict[str, Any] = {"noise": "heteroscedastic", "mean": "network", "average": False}  # as the paper
        given |= {"progress": False, "seed": self.seed}
        return linnet.TangentRegressor(self.model, **given | settings).fit(self.adapt.X[0], self.adapt.y)

    def process(self, *, residuals: bool) -> dict[str, Any]:
        """A Gaussian process on the inputs (n, d)."""
        clock = common.Clock(self.device)
        X, at = self.adapt.X[0].double(), self.test.X[0].double()
        f, base = (in_parts(self.model, (x.float(),))[:, 0].double() * residuals for x in (X, at))
        with clock("seconds"):
            one = Process(X, self.adapt.y.double() - f, kernel="rbf")
            one.fit()
        mean, variance = one.predict(at)
        return {**self.scores(mean + base, variance), **clock.seconds}

    def scores(self, mean: Tensor, variance: Tensor) -> dict[str, float]:
        y = self.test.y.double()
        return scores(mean.double(), variance.double(), y, unit=self.unit)

    def all(self, *, skip: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Scores of the contenders that are not to be skipped."""
        last = len(self.model) - 1
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            NONE: self.network,
            FIXED: self.published,
            FIXED_LONGER: lambda: self.published(times=6),
            TUNED: lambda: self.tuned(slice(last, None), times=6),
            EVERYTHING: lambda: self.tuned(slice(0, None)),
            LINNET: self.tangent,
            NTK: lambda: self.tangent(mean="zero"),
            EXACT: lambda: self.tangent(params=f"{last}.*"),
            ALONE: lambda: self.process(residuals=False),
            RESIDUALS: lambda: self.process(residuals=True),
        }
        return {name: way() for name, way in ways.items() if name not in skip}


def gaussian(f: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances (n,) of outputs (n, 2)."""
    return f[:, 0], f[:, 1].exp()


# Tables. A run is {"shift", "seed", "points", "contenders"}.

LESS = "rmse less that of the linearized network"


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By shift, number of points and contender: means and standard errors over seeds, and RMSE less linnet's."""
    out: dict[str, Any] = {}
    for shift, points in dict.fromkeys((run["shift"], run["points"]) for run in runs):
        same = [run["contenders"] for run in runs if (run["shift"], run["points"]) == (shift, points)]
        table = out.setdefault(shift, {}).setdefault(points, {})
        for name in same[0]:
            rows = [one[name] for one in same]
            keys = [key for key in ("rmse", "nll", "coverage", "seconds") if key in rows[0]]
            table[name] = summarize([{key: row[key] for key in keys} for row in rows], average)
            if name != LINNET:
                table[name][LESS] = interval([one[name]["rmse"] - one[LINNET]["rmse"] for one in same])
    return out


def part(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as a part of the results that is kept at once."""
    return {run["shift"]: {f"{run['points']} points": {f"seed {run['seed']}": run["contenders"]}}}


def run_cases(
    options: argparse.Namespace,
    key: str,
    make: Mapping[str, Callable[[int], list[Case]]],
    seeds: int,
    skip: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any], Case]:
    """Adapt and score: the tables, all parts that are kept under a key, and a case to show.

    Args:
        options: Of the command.
        key: Of the setting.
        make: By shift, from a seed to the cases.
        seeds: How many.
        skip: Contenders that take no part.
    """
    runs: list[dict[str, Any]] = []
    parts: dict[str, Any] = {}
    example: Case | None = None
    for seed in range(options.seed, options.seed + seeds):
        for shift, cases in make.items():
            for case in cases(seed):
                found = case.all(skip=skip)
                runs.append({"shift": shift, "seed": seed, "points": len(case.adapt), "contenders": found})
                parts = common.keep(options, {key: part(runs[-1])})
            print(f"{shift}, seed {seed} done", flush=True)
            example = example or case
    assert example is not None
    return summary(runs), parts, example


def rows(
    tables: Mapping[str, Any], *, said: Mapping[str, str], differs: str, unit: str, digits: int = 3
) -> Iterator[common.Row]:
    """For each shift and contender the RMSE against the points, and its difference to linnet at the most points."""
    for shift, sizes in tables.items():
        most = max(sizes)
        for name, last in sizes[most].items():
            errors = ", ".join(f"{n}: {show_error(table[name]['rmse'], digits)}" for n, table in sizes.items())
            if LESS in last:
                errors += f"; less the linearized network's at {most}: {show_interval(last[LESS], digits=digits)}"
            errors += f"; NLL at {most}: {show_error(last['nll'], 2)}"
            what = f"{shift}, {name}: RMSE{unit} by points"
            yield common.Row(what, said.get(name, "not in the paper"), errors, differs)


# Panels.


def draw_curves(ax: Axes, sizes: Mapping[int, Any], key: str) -> None:
    """A score against the number of points, one curve for each contender, with standard errors."""
    for i, (name, color) in enumerate(COLORS.items()):
        if any(name not in table for table in sizes.values()):
            continue
        x = [n * 1.025 ** (i - len(COLORS) / 2) for n in sizes]
        style = {NONE: "--", RESIDUALS: "--", FIXED: ":", FIXED_LONGER: ":"}.get(name, "-")
        values = [table[name][key] for table in sizes.values()]
        plots.draw_means(ax, x, values, fmt="o" + style, color=color, lw=1.5, capsize=2, label=name)
    plots.log_ticks(ax, list(sizes))
    ax.set_xlabel("adaptation points")
    every = [one[key]["mean"] for table in sizes.values() for one in table.values()]
    if key == "rmse":  # without what is far worse than no retraining and the linear models
        near = [table[name][key]["mean"] for table in sizes.values() for name in (NONE, LINNET, NTK)]
        ax.set_ylim(0.9 * min(every), 1.1 * max(near))
    elif key == "nll":  # without what an overconfident contender has with few points
        low, median = min(every), statistics.median(every)
        ax.set_ylim(low - 0.1 * (median - low) - 0.05, median + 1.5 * (median - low) + 0.1)
