"""UCI regression sets: five networks instead of one, and the source data of the network beside the new data.

The networks are trained on one half of the training split and adapted on the other. Choices were made on the
development half of sets and splits; the numbers to report are those of the held half, which is the default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.ensembles import Prediction, Search, fit_networks, forward, module
from experiments.common.statistics import average, show_error
from experiments.maddox2021 import uci

HALVES = {
    "held": {"concrete": (5, 5), "power": (5, 5), "protein": (3, 2)},
    "development": {"boston": (0, 5), "energy": (0, 5), "kin8nm": (0, 5), "wine": (0, 5)},
}
"""For each half its sets, with the first split and how many splits."""

LARGEST = 1200
"""Training examples of a split, half of them source: more of them take longer."""

NETWORK, RETRAINED = "network", "ensemble of 5, retrained"
ONE, FIVE, BY_EVIDENCE = "tangent", "tangent of 5", "tangent of 5, evidence weights"
SOURCE, BOTH = "tangent with source", "tangent of 5 with source"
METHODS = {
    NETWORK: "as trained on the source; noise from its errors on the new data",
    RETRAINED: "five networks trained on source and new data; noise likeliest on a validation part",
    ONE: "TangentRegressor(model).fit(X, y)",
    FIVE: "TangentRegressor(models).fit(X, y)",
    BY_EVIDENCE: "TangentRegressor(models, weights='evidence').fit(X, y)",
    SOURCE: "TangentRegressor(model).fit(X, y, source=(X0, y0))",
    BOTH: "TangentRegressor(models).fit(X, y, source=(X0, y0))",
}

ARGUMENTS = {
    "--half": {"choices": tuple(HALVES), "default": "held", "help": "which sets and splits (default: held)"},
    "--largest": f"training examples of a split, half of them source (default: {LARGEST})",
    "--steps": "of a network's training (default: 2000)",
}


def predictions(data: uci.Split, *, search: Search, seed: int, members: int) -> Iterator[tuple[str, Any, float]]:
    """Each method's predictions of the test examples of every split, and the seconds it took."""
    X, y, at = data.X.float(), data.y.float(), data.X_test.float()
    s, n, d = X.shape
    half, widths = n // 2, (d, *uci.HIDDEN, 1)

    def train(stop: int, step: int) -> Any:
        generator = torch.Generator(device=X.device).manual_seed(1000 * seed + step)
        return fit_networks(X[:, :stop], y[:, :stop], widths, members=members, search=search, generator=generator)[1]

    start = time.perf_counter()
    yield RETRAINED, train(n, 1).predict(at, widths), time.perf_counter() - start
    start = time.perf_counter()
    theta = train(half, 2).theta
    one = theta[:, 0]
    noise = (forward(one, X[:, half:], widths) - y[:, half:]).square().mean(1, keepdim=True)
    f = forward(one, at, widths)
    yield NETWORK, Prediction(f.double(), noise.expand_as(f).double()), (time.perf_counter() - start) / members
    networks = [[module(theta[i, k], widths) for k in range(members)] for i in range(s)]
    for name in (ONE, FIVE, BY_EVIDENCE, SOURCE, BOTH):
        start, found = time.perf_counter(), []
        for i in range(s):
            models: Any = networks[i] if name in (FIVE, BY_EVIDENCE, BOTH) else networks[i][0]
            settings: Any = {
                "mean": "network",
                "average": False,
            }  # with a source the mean is zero
            settings |= {"weights": "evidence"} if name == BY_EVIDENCE else {}
            source = (data.X[i, :half], data.y[i, :half]) if name in (SOURCE, BOTH) else None
            with common.expect(common.OWN):
                reg = linnet.TangentRegressor(models, **settings).fit(data.X[i, half:], data.y[i, half:], source=source)
            mean, std = reg.predict(data.X_test[i], return_std=True, noise=True)
            found.append(Prediction(mean, std.square()))
        yield name, found, time.perf_counter() - start


def run(options: argparse.Namespace) -> common.Outcome:
    """All sets of a half."""
    sets = {"boston": (0, 1)} if options.quick else HALVES[options.half]
    largest = options.largest or (80 if options.quick else LARGEST)
    members = 2 if options.quick else 5
    search = Search(steps=40, rates=(1e-2,), decays=(0.0,)) if options.quick else Search(options.steps or 2000, 128)
    results: dict[str, Any] = {}
    for name, (first, splits) in sets.items():
        data = uci.load(options.data, name, splits, largest=largest, device=options.device, first=first)
        table: dict[str, Any] = {}
        for method, found, seconds in predictions(data, search=search, seed=options.seed, members=members):
            rows = uci.score(found, data)
            table[method] = {**uci.summary(rows), "by split": rows, "seconds": seconds / splits}
        results[name] = table
        print(f"{name} done", flush=True)
    metrics = {
        "settings": {"sets": sets, "half": options.half, "largest": largest, "seed": options.seed, "members": members},
        "errors": "standard errors over splits",
        "methods": METHODS,
        "results": results,
    }
    return common.Outcome(metrics, figure(results), table_rows(results, largest))


def table_rows(results: Mapping[str, Any], largest: int) -> Iterator[common.Row]:
    """Per method the NLL and the coverage on each set."""
    for method in METHODS:
        cells = [f"{name} {show_error(table[method]['nll'], 3)}" for name, table in results.items()]
        covered = ", ".join(f"{100 * table[method]['coverage']['mean']:.0f}" for table in results.values())
        yield common.Row(
            f"{method}: NLL by set; coverage",
            "not in the paper",
            f"{', '.join(cells)}; {covered} %",
            f"at most {largest // 2:,} source and as many new examples",
        )


def figure(results: Mapping[str, Any]) -> Figure:
    """NLL less that of one linearization, per set and method."""
    methods = {
        NETWORK: (plots.GRAY, "s"),
        RETRAINED: (plots.ORANGE, "D"),
        FIVE: (plots.BLUE, "o"),
        SOURCE: (plots.GREEN, "^"),
        BOTH: (plots.PURPLE, "v"),
    }
    names = list(results)
    picture, ax = plt.subplots(figsize=(7, 0.7 * len(names) + 2))
    for i, (method, (color, marker)) in enumerate(methods.items()):
        gains = []
        for table in results.values():
            pairs = zip(table[method]["by split"], table[ONE]["by split"], strict=True)
            gains.append(average([a["nll"] - b["nll"] for a, b in pairs]))
        how = {"across": True, "fmt": marker, "color": color, "ms": 5, "lw": 1, "label": method}
        plots.draw_means(ax, plots.place_rows(len(names), i, len(methods), 0.66), gains, **how)
    ax.axvline(0, color="black", lw=1)
    ax.set_xlabel("test NLL less that of one linearized network (left is better)")
    ax.grid(axis="y", visible=False)
    plots.name_rows(ax, names)
    plots.legend_below(picture, ax, 3)
    return picture
