"""Error bars for networks as they stand on UCI regression sets: MAP, Laplace structures, ensembles of five.

A 50-50 tanh network is trained on the whole training split, rate and decay chosen on a fifth of it; every structure
then gets the same network and the same data. RMSE and NLL are in the target's own units. With ``--peer PYTHON``, an
interpreter that has laplace-torch, its structures are there too (but "full", which takes p^3 for every step), with one
prior variance and the noise by its own evidence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from benchmarks.laplace import Job, peer
from experiments import common
from experiments.common import plots
from experiments.common.ensembles import Prediction, Search, fit_networks, module
from experiments.common.statistics import average, show_error
from experiments.maddox2021 import uci

SETS = ("boston", "concrete", "energy", "wine")
MAP, MAP_VALID, ENSEMBLE = "MAP", "MAP, noise by validation", "ensemble of 5"
STRUCTURES: dict[str, dict[str, Any]] = {
    "exact": {"structure": "auto"},
    "exact, largest evidence": {"structure": "auto", "narrow": False},
    "exact, layerwise prior": {"structure": "auto", "prior": "layerwise"},
    "lowrank": {"structure": "lowrank", "rank": 64},
    "kron": {"structure": "kron"},
    "kron, largest evidence": {"structure": "kron", "narrow": False},
    "ekfac": {"structure": "ekfac"},
    "diag": {"structure": "diag"},
    "last layer": {"structure": "auto", "params": "4.*"},
}
PEERS: dict[str, dict[str, Any]] = {
    "laplace-torch, kron": {"structure": "kron", "last_layer": False},
    "laplace-torch, diag": {"structure": "diag", "last_layer": False},
    "laplace-torch, last layer": {"structure": "full", "last_layer": True},
}
ALONE = {
    MAP: "the network; noise is its mean squared training error",
    MAP_VALID: "the network; noise is its mean squared error on the validation part",
    ENSEMBLE: "five networks; noise likeliest on the validation part",
    **{
        name: f"Laplace({', '.join(f'{k}={v!r}' for k, v in given.items() if k != 'narrow')})"
        for name, given in STRUCTURES.items()
    },
    "exact, largest evidence": "Laplace(structure='auto'), then tune(narrow=False)",
    "kron, largest evidence": "Laplace(structure='kron'), then tune(narrow=False)",
}
METHODS = {
    **ALONE,
    **{name: "one prior and the noise by the gradient of its evidence" for name in PEERS},
    # Seen in its numbers; both libraries have the same evidence, and it is larger where the noise is much larger.
    "laplace-torch, kron": "one prior by the gradient of its evidence, which leaves the noise at the training error",
}

BOUNDED = "noise for an effective dimension below the number of observations"
NOTES = {
    "kron": BOUNDED,
    "ekfac": BOUNDED,
    "diag": BOUNDED,
    "exact, largest evidence": "the prior where the evidence is largest, which counts weights that nothing determines",
    "kron, largest evidence": "prior and noise where the evidence is largest, with far too large a noise",
    "laplace-torch, kron": "its evidence leaves the noise at the training error",
}


def predict(model: nn.Module, X: Tensor, y: Tensor, at: Tensor, given: Mapping[str, Any]) -> Prediction:
    """Fit and predict; a network that was stopped early is not at a mode, as is usual."""
    options = {key: value for key, value in given.items() if key != "narrow"}
    with common.expect(common.FAR):
        la = linnet.Laplace(model, "regression", progress=False, **options).fit(X, y)
        if "narrow" in given:
            la.tune(narrow=given["narrow"])
    mean, std = la.predict(at, return_std=True, noise=True)
    return Prediction(mean, std.square())


def by_peer(
    python: str, models: Sequence[nn.Module], data: uci.Split, *, steps: int
) -> dict[str, tuple[list[Prediction], float]]:
    """What laplace-torch predicts for the same networks, and its seconds; the noise starts at the training error."""
    widths = [data.X.shape[2], *uci.HIDDEN, 1]
    jobs: list[Job] = []
    for given in PEERS.values():
        for i, model in enumerate(models):
            with torch.no_grad():
                noise = float((model(data.X[i])[:, 0] - data.y[i]).square().mean())
            told = {**given, "likelihood": "regression", "prior": 1.0, "noise": noise, "batch": 256, "steps": steps}
            jobs.append(
                (model, {**told, "network": widths, "tune": True}, (data.X[i], data.y[i, :, None], data.X_test[i]))
            )
    found, out, s = peer(python, jobs), {}, len(models)
    for k, name in enumerate(PEERS):
        each = found[k * s : (k + 1) * s]
        predicted = [
            Prediction(one["tensors"]["mean"][:, 0], one["tensors"]["cov"][:, 0, 0] + one["noise"]) for one in each
        ]
        out[name] = predicted, sum(one["seconds"] for one in each)
    return out


def table_of(
    data: uci.Split, *, search: Search, members: int, seed: int, python: str | None = None, peer_steps: int = 300
) -> dict[str, Any]:
    """Scores of every method on every split of a set; those of laplace-torch where an interpreter has it."""
    X, y, at = data.X.float(), data.y.float(), data.X_test.float()
    s, _, d = X.shape
    widths = (d, *uci.HIDDEN, 1)
    generator = torch.Generator(device=X.device).manual_seed(1000 * seed + 1)
    start = time.perf_counter()
    one, ensemble = fit_networks(X, y, widths, members=members, search=search, generator=generator)
    spent = time.perf_counter() - start
    models = [module(one.theta[i, 0], widths) for i in range(s)]
    plain = []
    for i, model in enumerate(models):
        with torch.no_grad():
            noise = (model(data.X[i])[:, 0] - data.y[i]).square().mean()
            f = model(data.X_test[i])[:, 0]
        plain.append(Prediction(f, noise.expand_as(f)))
    found: dict[str, tuple[Prediction | list[Prediction], float]] = {
        MAP: (plain, spent / members),
        MAP_VALID: (one.predict(at, widths), spent / members),
        ENSEMBLE: (ensemble.predict(at, widths), spent),
    }
    for name, given in STRUCTURES.items():
        start = time.perf_counter()
        each = [predict(model, data.X[i], data.y[i], data.X_test[i], given) for i, model in enumerate(models)]
        found[name] = each, time.perf_counter() - start
    if python is not None:
        found |= by_peer(python, models, data, steps=peer_steps)
    out = {}
    for name, (predicted, seconds) in found.items():
        scored = uci.score(predicted, data)
        out[name] = {**uci.summary(scored), "by split": scored, "seconds": seconds / s}
    return out


ARGUMENTS = {
    "--sets": {"nargs": "+", "choices": uci.SETS, "help": f"default: {' '.join(SETS)}"},
    "--splits": "splits of each set (default: 3)",
    "--largest": "most training examples (default: 1000)",
    "--peer": {"metavar": "PYTHON", "help": "an interpreter that has laplace-torch"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All sets."""
    names = options.sets or (SETS[:2] if options.quick else SETS)
    splits = options.splits or (2 if options.quick else 3)
    largest = options.largest or (60 if options.quick else 1000)
    search = Search(steps=40, rates=(1e-2,), decays=(0.0,)) if options.quick else Search(steps=1000)
    members = 2 if options.quick else 5
    results, sizes = {}, {}
    for name in names:
        data = uci.load(options.data, name, splits, largest=largest, device=options.device)
        sizes[name] = {"splits": splits, "train": data.X.shape[1], "test": data.X_test.shape[1]}
        results[name] = table_of(
            data,
            search=search,
            members=members,
            seed=options.seed,
            python=options.peer,
            peer_steps=5 if options.quick else 300,
        )
        print(f"{name} done", flush=True)
    metrics: dict[str, Any] = {
        "settings": {"sets": sizes, "seed": options.seed, "members": members, "steps": search.steps},
        "errors": "standard errors over splits",
        "methods": METHODS,
        "over sets": over_sets(results),
        "results": results,
    }
    return common.Outcome(metrics, figure(results), rows(metrics["over sets"], sizes, largest))


def methods_of(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Those that every set has."""
    return [method for method in METHODS if all(method in table for table in results.values())]


def gaps(table: Mapping[str, Any], method: str) -> list[float]:
    """NLL less MAP's, split by split."""
    return [a["nll"] - b["nll"] for a, b in zip(table[method]["by split"], table[MAP]["by split"], strict=True)]


def over_sets(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """NLL less MAP's over all splits, RMSE over MAP's and coverage averaged over sets."""
    out = {}
    for method in methods_of(results):
        out[method] = {
            "NLL less MAP": average([gap for table in results.values() for gap in gaps(table, method)]),
            "RMSE over MAP": float(
                np.mean([t[method]["rmse"]["mean"] / t[MAP]["rmse"]["mean"] for t in results.values()])
            ),
            "coverage": float(np.mean([t[method]["coverage"]["mean"] for t in results.values()])),
        }
    return out


def rows(summary: Mapping[str, Any], sizes: Mapping[str, Any], largest: int) -> list[common.Row]:
    splits = next(iter(sizes.values()))["splits"]
    differs = f"{', '.join(sizes)}; {splits} splits, at most {largest:,} training examples; ± over all splits"
    return [
        common.Row(
            f"{method}: NLL - MAP, RMSE / MAP, coverage",
            "not on the slides",
            f"{show_error(one['NLL less MAP'], 3)}, {one['RMSE over MAP']:.3f}, {100 * one['coverage']:.0f} %",
            f"{differs}; {NOTES[method]}" if method in NOTES else differs,
        )
        for method, one in summary.items()
    ]


def figure(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """NLL less MAP's, per set and method."""
    names: Sequence[str] = list(results)
    methods = [method for method in methods_of(results) if method != MAP]
    palette = (plots.GRAY, plots.ORANGE, plots.BLUE, plots.BLUE, plots.SKY, plots.GREEN, plots.PURPLE, plots.PURPLE)
    palette += (plots.YELLOW, plots.VERMILION, "black")
    # A peer's structure has the color of ours, as a cross; the largest evidence of one that has another noise, hollow.
    alike = (plots.PURPLE, plots.VERMILION, "black")
    colors = dict(zip([*list(ALONE)[1:], *PEERS], (*palette, *alike), strict=True))
    picture, ax = plt.subplots(figsize=(8, 0.95 * len(names) + 2.2))
    for i, method in enumerate(methods):
        how = {"color": colors[method], "ms": 5, "lw": 1, "label": method}
        how["fmt"] = "x" if method in PEERS else "os^Dv"[i % 5]
        how["mfc"] = "none" if "narrow" in STRUCTURES.get(method, {}) else colors[method]
        found = [average(gaps(results[name], method)) for name in names]
        plots.draw_means(ax, plots.place_rows(len(names), i, len(methods)), found, across=True, **how)
    ax.axvline(0, color="black", lw=1)
    plots.name_rows(ax, names, lines=True)
    ax.set_xlabel("test NLL less MAP's (left is better)")
    ax.grid(axis="y", visible=False)
    picture.legend(loc="outside lower center", ncols=3)
    return picture
