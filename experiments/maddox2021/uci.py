"""Seven UCI regression sets: a 50-50 tanh network, adapted on data that it has not seen and on its own.

"new": the network is trained on one half of the training split and adapted on the other. "same": it is trained on the
whole training split and adapted on the same. All methods see the same examples; inputs and targets are standardized by
the training split, and RMSE and NLL are in the target's own units.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.ensembles import FINE_RATES, Prediction, Search, fit_networks, forward, module
from experiments.common.statistics import average, scores, summarize

SETS = ("boston", "concrete", "energy", "wine", "kin8nm", "power", "protein")
HIDDEN = (50, 50)
PRIORS = ("unit", "shared", "ntk", "balanced", "layerwise")
NETWORK, LAST, FINE, RETRAINED, ENSEMBLE = "network", "last layer", "fine-tuning", "retrained", "ensemble of 5"
TANGENTS = {f"tangent {prior}, {mean} mean": (prior, mean) for mean in ("network", "zero") for prior in PRIORS}
SETTINGS = ("new", "same")
DEFAULT = "tangent shared, network mean"

METHODS = {
    NETWORK: "as trained; noise from its errors on the adaptation data (new) or on a validation part (same)",
    LAST: "Bayesian linear regression of the last layer, network mean, prior and noise by the evidence",
    FINE: "all weights, rate and steps chosen on a fifth of the adaptation data, noise from the errors there",
    RETRAINED: "one network trained on source and adaptation data from the start (new only)",
    ENSEMBLE: "five networks trained on source and adaptation data; noise likeliest on a validation part",
    **{name: f"TangentRegressor(prior={p!r}, mean={m!r})" for name, (p, m) in TANGENTS.items()},
}


@dataclass(frozen=True)
class Split:
    """Standardized examples of several splits of one set, one split a row."""

    X: Tensor  # training inputs (s, n, d)
    y: Tensor  # training targets (s, n)
    X_test: Tensor  # test inputs (s, m, d)
    y_test: Tensor  # test targets (s, m)
    unit: Tensor  # the targets' standard deviations (s,)


def load(
    folder: Path, name: str, splits: int, *, largest: int | None = None, device: str = "cpu", first: int = 0
) -> Split:
    """Some splits of a set, standardized by their training parts.

    Args:
        folder: Data folder, with uci/NAME.csv and uci/splits.npz.
        name: One of `SETS`.
        splits: How many.
        largest: At most so many training examples, the first of each split in a random order.
        device: Where the tensors go.
        first: The first of the splits.
    """
    data = np.loadtxt(common.data_file(folder, f"uci/{name}.csv"), delimiter=",", skiprows=1)
    packed = np.load(common.data_file(folder, "uci/splits.npz"))[name]
    test = np.unpackbits(packed, axis=1)[:, : len(data)].astype(bool)
    if first + splits > len(test):
        raise ValueError(f"{name} has {len(test)} splits; {first + splits} were asked for. Give a smaller --splits.")
    rows: list[tuple[Tensor, ...]] = []
    for s in range(first, first + splits):
        order = np.random.default_rng(s).permutation(np.flatnonzero(~test[s]))[:largest]
        train, held = (torch.tensor(part, dtype=torch.float64, device=device) for part in (data[order], data[test[s]]))
        mean, std = train.mean(0), train.std(0, correction=0)
        std = torch.where(std > 0, std, 1.0)
        a, b = (train - mean) / std, (held - mean) / std
        rows.append((a[:, :-1], a[:, -1], b[:, :-1], b[:, -1], std[-1]))
    fewest = min(len(row[3]) for row in rows)
    # Splits of one set may differ by an example: the batched networks need equal sizes.
    count = min(len(row[1]) for row in rows)
    return Split(
        torch.stack([row[0][:count] for row in rows]),
        torch.stack([row[1][:count] for row in rows]),
        torch.stack([row[2][:fewest] for row in rows]),
        torch.stack([row[3][:fewest] for row in rows]),
        torch.stack([row[4] for row in rows]),
    )


def tangent(model: torch.nn.Module, X: Tensor, y: Tensor, at: Tensor, **settings: Any) -> Prediction:
    """Fit and predict; the warning about the network's own data is the point of the second setting."""
    with common.expect(common.OWN):
        fitted = linnet.TangentRegressor(model, average=False, **settings).fit(X, y)  # the largest evidence alone
    mean, std = fitted.predict(at, return_std=True, noise=True)
    return Prediction(mean, std.square())


def predictions(
    data: Split, setting: str, *, limit: int, search: Search, seed: int, members: int, known: dict[int, Any]
) -> Iterator[tuple[str, Prediction | list[Prediction], float]]:
    """Each method's predictions of the test examples of every split, and the seconds it took.

    Args:
        data: The splits.
        setting: "new" or "same".
        limit: Largest number of adaptation examples.
        search: How networks are trained.
        seed: Of everything drawn.
        members: Networks in the ensemble.
        known: Networks trained on the first so many examples, kept: the settings share them where nothing is left out.
    """
    X, y = data.X.float(), data.y.float()
    at = data.X_test.float()
    s, n, d = X.shape
    widths = (d, *HIDDEN, 1)
    half = n // 2 if setting == "new" else 0
    adapt = slice(half, min(n, half + limit))
    both = slice(0, adapt.stop if setting == "new" else n)  # what is seen in the end: source and adaptation data

    def generator(step: int) -> torch.Generator:
        return torch.Generator(device=X.device).manual_seed(1000 * seed + step)

    if both.stop not in known:
        start = time.perf_counter()
        fitted = fit_networks(X[:, both], y[:, both], widths, members=members, search=search, generator=generator(1))
        known[both.stop] = (*fitted, time.perf_counter() - start)
    one, ensemble, spent = known[both.stop]
    if setting == "new":
        yield RETRAINED, one.predict(at, widths), spent / members
        start = time.perf_counter()
        one, _ = fit_networks(X[:, :half], y[:, :half], widths, members=1, search=search, generator=generator(2))
        theta = one.theta[:, 0]
        noise = (forward(theta, X[:, adapt], widths) - y[:, adapt]).square().mean(1, keepdim=True)
        f = forward(theta, at, widths)
        yield NETWORK, Prediction(f.double(), noise.expand_as(f).double()), time.perf_counter() - start
    else:
        theta = one.theta[:, 0]
        yield NETWORK, one.predict(at, widths), spent / members
    yield ENSEMBLE, ensemble.predict(at, widths), spent

    start = time.perf_counter()
    tuned = replace(search, rates=FINE_RATES, decays=(0.0,), steps=min(search.steps, 2000))
    fine, _ = fit_networks(
        X[:, adapt], y[:, adapt], widths, members=1, search=tuned, generator=generator(3), start=theta
    )
    yield FINE, fine.predict(at, widths), time.perf_counter() - start

    models = [module(theta[i], widths) for i in range(s)]
    last = {"params": f"{len(models[0]) - 1}.*"}
    for name, given in {LAST: last, **{k: {"prior": p, "mean": m} for k, (p, m) in TANGENTS.items()}}.items():
        start = time.perf_counter()
        found = [tangent(models[i], data.X[i, adapt], data.y[i, adapt], data.X_test[i], **given) for i in range(s)]
        yield name, found, time.perf_counter() - start


ARGUMENTS = {
    "--sets": {"nargs": "+", "choices": SETS, "help": "default: all seven"},
    "--splits": "splits of each set (default: 5, large sets 2)",
    "--limit": "largest number of adaptation examples (default: 1000)",
    "--steps": "of a network's training (default: 2000, large sets 4000)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """All sets in both settings."""
    names = options.sets or (SETS[:2] if options.quick else SETS)
    limit = options.limit or (40 if options.quick else 1000)
    members = 2 if options.quick else 5
    results: dict[str, dict[str, Any]] = {setting: {} for setting in SETTINGS}
    sizes: dict[str, Any] = {}
    for name in names:
        large = name in ("kin8nm", "power", "protein")
        splits = options.splits or (2 if options.quick or large else 5)
        data = load(options.data, name, splits, largest=100 if options.quick else None, device=options.device)
        n = data.X.shape[1]
        if options.quick:
            search = Search(steps=40, rates=(1e-2,), decays=(0.0,))
        else:
            search = Search(steps=options.steps or (4000 if large else 2000), batch=256 if large else 128)
        known: dict[int, Any] = {}
        sizes[name] = {"splits": splits, "train": n, "test": data.X_test.shape[1], "features": data.X.shape[2]}
        sizes[name] |= {"steps": search.steps, "batch": search.batch}
        for setting in SETTINGS:
            sizes[name][f"adapted on ({setting})"] = min(limit, n - n // 2 if setting == "new" else n)
            table: dict[str, Any] = {}
            for method, found, seconds in predictions(
                data, setting, limit=limit, search=search, seed=options.seed, members=members, known=known
            ):
                rows = score(found, data)
                table[method] = {**summary(rows), "by split": rows, "seconds": seconds / splits}
            results[setting][name] = table
            print(f"{name}, {setting} data done", flush=True)
    ranking = {setting: rank(results[setting]) for setting in SETTINGS}
    metrics = {
        "settings": {"sets": sizes, "limit": limit, "seed": options.seed, "members": members},
        "errors": "standard errors over splits",
        "methods": METHODS,
        "ranking": ranking,
        "results": results,
    }
    return common.Outcome(metrics, figure(results), table_rows(results, ranking, limit))


def score(found: Prediction | Sequence[Prediction], data: Split) -> list[dict[str, float]]:
    """Scores of each split."""
    if isinstance(found, Prediction):
        found = [Prediction(mean, variance) for mean, variance in zip(found.mean, found.variance, strict=True)]
    return [
        scores(one.mean, one.variance, y, unit=float(unit))
        for one, y, unit in zip(found, data.y_test, data.unit, strict=True)
    ]


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return summarize(rows, average)


def rank_of(values: Sequence[float]) -> list[int]:
    """1 for the smallest.

    >>> rank_of([0.3, 0.1, 0.2])
    [3, 1, 2]
    """
    return [sorted(values).index(value) + 1 for value in values]


def rank(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over sets: mean rank among all methods and among tangent methods, and NLL less that of the network.

    Over splits: the NLL less that of the default prior and mean.
    """
    out: dict[str, Any] = {}
    methods = [m for m in METHODS if all(m in table for table in results.values())]
    own = [m for m in methods if m in TANGENTS]
    collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for table in results.values():
        base = table[NETWORK]["nll"]["mean"]
        for group, key in ((methods, "rank"), (own, "rank among tangents")):
            for method, place in zip(group, rank_of([table[m]["nll"]["mean"] for m in group]), strict=True):
                collected[method][key].append(place)
        for method in methods:
            collected[method]["NLL less network"].append(table[method]["nll"]["mean"] - base)
            ratio = table[method]["rmse"]["mean"] / table[NETWORK]["rmse"]["mean"]
            collected[method]["RMSE over network"].append(ratio)
            collected[method]["coverage"].append(table[method]["coverage"]["mean"])
    for method in methods:
        out[method] = {key: float(np.mean(values)) for key, values in collected[method].items()}
        # Paired over all splits of all sets: which prior to choose.
        gaps = [
            mine["nll"] - other["nll"]
            for table in results.values()
            for mine, other in zip(table[method]["by split"], table[DEFAULT]["by split"], strict=True)
        ]
        out[method]["NLL less default, over splits"] = average(gaps)
    return dict(sorted(out.items(), key=lambda item: item[1]["rank"]))


def table_rows(
    results: Mapping[str, Mapping[str, Any]], ranking: Mapping[str, Any], limit: int
) -> Iterator[common.Row]:
    """Per setting and method, the means over sets."""
    for setting in SETTINGS:
        tangents = [m for m in ranking[setting] if m in TANGENTS]
        shown = [NETWORK, LAST, FINE, *([RETRAINED] if setting == "new" else []), ENSEMBLE, *tangents[:3]]
        if DEFAULT not in shown:
            shown.append(DEFAULT)
        for method in shown:
            one = ranking[setting][method]
            yield common.Row(
                f"{setting} data, {method}: NLL - network, RMSE / network, coverage",
                "not in the paper",
                f"{one['NLL less network']:+.3f}, {one['RMSE over network']:.3f}, {100 * one['coverage']:.0f} % "
                f"(mean rank {one['rank']:.1f})",
                f"means over {len(results[setting])} sets, at most {limit:,} adaptation examples",
            )


def figure(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """NLL less that of the network, per set and method, in both settings."""
    methods = {
        LAST: (plots.GRAY, "s"),
        FINE: (plots.VERMILION, "v"),
        ENSEMBLE: (plots.ORANGE, "D"),
        "tangent shared, network mean": (plots.BLUE, "o"),
        "tangent layerwise, network mean": (plots.PURPLE, "o"),
        "tangent shared, zero mean": (plots.GREEN, "^"),
    }
    names = list(results["new"])
    picture, axes = plt.subplots(1, 2, figsize=(11, 0.62 * len(names) + 2.2), sharex=True, sharey=True)
    for ax, setting in zip(axes, SETTINGS, strict=True):
        for i, (method, (color, marker)) in enumerate(methods.items()):
            gains = []
            for table in results[setting].values():
                pairs = zip(table[method]["by split"], table[NETWORK]["by split"], strict=True)
                gains.append(average([a["nll"] - b["nll"] for a, b in pairs]))
            how = {"across": True, "fmt": marker, "color": color, "ms": 5, "lw": 1, "label": method}
            plots.draw_means(ax, plots.place_rows(len(names), i, len(methods), 0.66), gains, **how)
        ax.axvline(0, color="black", lw=1)
        ax.set_xlabel("test NLL less the network's (left is better)")
        ax.grid(axis="y", visible=False)
        for row in range(len(names) - 1):
            ax.axhline(row + 0.5, color="black", lw=0.4, alpha=0.3)
    axes[0].set_title("adapted on data the network has not seen")
    axes[1].set_title("adapted on the network's own training data")
    plots.name_rows(axes[0], names)
    plots.legend_below(picture, axes[0], 3)
    return picture
