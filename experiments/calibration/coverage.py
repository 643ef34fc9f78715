"""Do 95 % intervals hold? Seven UCI sets: few and many new rows, a network's own rows, and Laplace.

"new": a 50-50 tanh network is trained on one half of the training rows and adapted on 5 to all rows of the other half.
"own": the network is trained on all training rows and then gets the same rows again. All scores are those of the test
rows of the split, noise included, with targets in units of their standard deviation. Defaults were chosen on boston,
energy, kin8nm and wine, splits 0 to 4; the splits that are reported begin at 5 (protein has 5 splits: 3 and 4).
"drawn": data from the linear model itself, a network with 65 parameters and a prior variance of 0.25; the mean function
is the network.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import networks
from experiments.common.ensembles import Prediction, initial, module, train
from experiments.common.statistics import average, scores, summarize
from experiments.maddox2021 import uci

DEVELOPMENT = ("boston", "energy", "kin8nm", "wine")
HELD = tuple(name for name in uci.SETS if name not in DEVELOPMENT)
ROWS = 1000  # training rows of a split, at most: half of them for the network of "new"
SIZES = (5, 10, 20, 50, 100)  # rows that a network is adapted on, beside all of them
NETWORK, DEFAULT = "network", "TangentRegressor"
PLAIN, MAXIMUM = "TangentRegressor(mean='network')", "TangentRegressor(mean='network', average=False)"
TANGENTS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    PLAIN: {"mean": "network"},
    MAXIMUM: {"mean": "network", "average": False},
}
LAPLACE = {f"Laplace, {structure}": structure for structure in ("auto", "kron", "diag")}
METHODS = {
    NETWORK: "as trained; the noise is its mean squared error on the adaptation rows",
    DEFAULT: "the default, which chooses the mean function and features of the inputs",
    PLAIN: "the network as the mean function; averages over prior scale and noise by their evidence, as the default",
    MAXIMUM: "the same with prior scale and noise of largest evidence",
    **{name: f"Laplace(net, 'regression', structure={structure!r})" for name, structure in LAPLACE.items()},
}

ARGUMENTS = {
    "--sets": {"nargs": "+", "choices": uci.SETS, "help": "default: all seven"},
    "--splits": "splits of each set (default: 3)",
    "--first": "the first split (default: 5, for protein 3)",
    "--steps": "of a network's training (default: 1000)",
}


def train_networks(X: Tensor, y: Tensor, *, steps: int, seed: int) -> list[nn.Module]:
    """One network for each split, by Adam with a falling rate and without a validation part."""
    widths = (X.shape[2], *uci.HIDDEN, 1)
    generator = torch.Generator().manual_seed(seed)
    theta = initial(len(X), widths, generator=generator)
    rate, stop = torch.full((len(X),), 1e-2), torch.full((len(X),), steps)
    X, y = X.float(), y.float()
    found = train(theta, X, y, widths, rate=rate, steps=steps, batch=128, stop=stop, generator=generator)
    return [module(one, widths) for one in found.theta]


def predict_network(model: nn.Module, X: Tensor, y: Tensor, at: Tensor) -> Prediction:
    with torch.no_grad():
        noise, f = (model(X)[:, 0] - y).square().mean(), model(at)[:, 0]
    return Prediction(f, noise.expand_as(f))


def predict_tangent(model: nn.Module, X: Tensor, y: Tensor, at: Tensor, **settings: Any) -> Prediction:
    with common.expect(common.OWN):
        reg = linnet.TangentRegressor(model, progress=False, **settings).fit(X, y)
    mean, std = reg.predict(at, return_std=True, noise=True)
    return Prediction(mean, std.square())


def predict_laplace(model: nn.Module, X: Tensor, y: Tensor, at: Tensor, structure: str) -> Prediction:
    with common.expect(common.FAR):
        la = linnet.Laplace(model, "regression", structure=structure, progress=False).fit(X, y)
    mean, std = la.predict(at, return_std=True, noise=True)
    return Prediction(mean, std.square())


def predictions(data: uci.Split, sizes: Sequence[int], *, steps: int, seed: int) -> Iterator[tuple[str, str, int, Any]]:
    """The setting, the method, the split and the prediction of its test rows."""
    n = data.X.shape[1]
    half = n // 2
    for i, model in enumerate(train_networks(data.X[:, :half], data.y[:, :half], steps=steps, seed=seed)):
        X, y, at = data.X[i, half:], data.y[i, half:], data.X_test[i]
        for size in (*(size for size in sizes if size < len(y)), len(y)):
            setting = "new, all rows" if size == len(y) else f"new, {size} rows"
            for start in range(0, min(len(y), 4 * size) - size + 1, size) if size <= 20 else (0,):
                part = slice(start, start + size)
                yield setting, NETWORK, i, predict_network(model, X[part], y[part], at)
                for name, given in TANGENTS.items():
                    yield setting, name, i, predict_tangent(model, X[part], y[part], at, **given)
    for i, model in enumerate(train_networks(data.X, data.y, steps=steps, seed=seed + 1)):
        X, y, at = data.X[i], data.y[i], data.X_test[i]
        yield "own", NETWORK, i, predict_network(model, X, y, at)
        for name, given in TANGENTS.items():
            yield "own", name, i, predict_tangent(model, X, y, at, **given)
        for name, structure in LAPLACE.items():
            yield "own", name, i, predict_laplace(model, X, y, at, structure)


def cover_drawn(observations: int, noise: float, *, sets: int, seed: int) -> dict[str, float]:
    """The share of new values inside 95 % intervals, of 20 new inputs for each data set that the model draws."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    model = networks.perceptron((2, 16, 1), seed=seed).double()
    inside: dict[str, list[float]] = defaultdict(list)
    for _ in range(sets):
        X = normal(observations + 20, 2)
        J = linnet.linearize(model).jacobian(X)
        truth = J.outputs()[:, 0] + J @ (0.5 * normal(J.shape[1]))
        y = truth + noise**0.5 * normal(len(truth))
        for name, given in (("", {}), (", noise given", {"noise": noise}), (", largest evidence", {"average": False})):
            with common.expect(common.OWN):
                reg = linnet.TangentRegressor(model, mean="network", prior="shared", progress=False, **given)
                reg.fit(X[:observations], y[:observations])
            for what, values in (("function", truth), ("observation", y)):
                mean, std = reg.predict(X[observations:], return_std=True, noise=what == "observation")
                error = (values[observations:] - mean).abs()
                inside[what + name].append(float((error <= 1.959964 * std).double().mean()))
    return {name: sum(values) / sets for name, values in inside.items()}


def run(options: argparse.Namespace) -> common.Outcome:
    """All sets."""
    names = options.sets or (uci.SETS[:1] if options.quick else uci.SETS)
    count, steps = options.splits or (1 if options.quick else 3), options.steps or (40 if options.quick else 1000)
    results: dict[str, Any] = {}
    for name in names:
        first = (3 if name == "protein" else 5) if options.first is None else options.first
        count_here = min(count, 2) if name == "protein" and options.first is None else count
        data = uci.load(options.data, name, first + count_here, largest=60 if options.quick else ROWS)
        data = uci.Split(data.X[first:], data.y[first:], data.X_test[first:], data.y_test[first:], data.unit[first:])
        rows: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
        sizes = SIZES[:1] if options.quick else SIZES
        for setting, method, i, one in predictions(data, sizes, steps=steps, seed=options.seed):
            rows[setting][method].append(scores(one.mean, one.variance, data.y_test[i]))
        results[name] = {s: {m: summarize(found, average) for m, found in table.items()} for s, table in rows.items()}
        print(f"{name} done", flush=True)
    drawn = [
        {"observations": n, "noise": noise, **cover_drawn(n, noise, sets=2 if options.quick else 60, seed=options.seed)}
        for n in (5, 10, 20, 50)
        for noise in (0.01, 1.0, 10.0)
    ]
    halves = {"development": DEVELOPMENT, "held": HELD}
    means = {
        half: mean_over({name: results[name] for name in members if name in results})
        for half, members in halves.items()
        if set(members) & set(results)
    }
    metrics = {
        "settings": {"rows": ROWS, "splits": count, "steps": steps, "seed": options.seed},
        "halves": halves,
        "errors": "standard errors over splits and draws",
        "methods": METHODS,
        "means": means,
        "drawn": drawn,
        "results": results,
    }
    return common.Outcome(metrics, figure(results), table_rows(means))


def mean_over(results: Mapping[str, Any]) -> dict[str, Any]:
    """NLL and coverage, averaged over sets, and the smallest and largest coverage of a set."""
    found: dict[str, Any] = {}
    for setting, methods in next(iter(results.values())).items():
        found[setting] = {}
        for method in methods:
            each = [table[setting][method] for table in results.values() if setting in table]
            covered = [one["coverage"]["mean"] for one in each]
            found[setting][method] = {
                "nll": sum(one["nll"]["mean"] for one in each) / len(each),
                "coverage": sum(covered) / len(each),
                "coverage of sets": (min(covered), max(covered)),
            }
    return found


def table_rows(means: Mapping[str, Any]) -> Iterator[common.Row]:
    for half, settings in means.items():
        for setting, methods in settings.items():
            each = [
                f"{method} {value['nll']:.2f}, {value['coverage']:.3f} ({low:.3f} to {high:.3f})"
                for method, value in methods.items()
                for low, high in [value["coverage of sets"]]
            ]
            sets = ", ".join(DEVELOPMENT if half == "development" else HELD)
            what = f"{setting}: NLL, coverage of 95 % intervals (smallest and largest of the {half} sets)"
            yield common.Row(what, "not in a paper", "; ".join(each), f"means over {sets}; targets standardized")


def figure(results: Mapping[str, Any]) -> Figure:
    """Coverage of every set in every setting."""
    settings = list(dict.fromkeys(setting for table in results.values() for setting in table))
    picture, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    new = [setting for setting in settings if setting != "own"]
    for ax, shown, methods in (
        (axes[0], new, (NETWORK, MAXIMUM, PLAIN, DEFAULT)),
        (axes[1], ["own"], (NETWORK, DEFAULT, *LAPLACE)),
    ):
        places = [f"{s}" for s in shown] if len(shown) > 1 else list(methods)
        ax.axhspan(0.93, 0.97, color="0.9")
        for k, method in enumerate(methods):
            values = [[table[s][method]["coverage"]["mean"] for table in results.values() if s in table] for s in shown]
            x = range(len(shown)) if len(shown) > 1 else [k]
            for at, several in zip(x, values, strict=True):
                label = method if at == x[0] and len(shown) > 1 else None
                ax.plot(
                    [at + 0.15 * (k - 1.5) * (len(shown) > 1)] * len(several), several, ".", color=f"C{k}", label=label
                )
        ax.set_xticks(range(len(places)), [place.removeprefix("new, ") for place in places], rotation=20)
        ax.set_title("new rows" if len(shown) > 1 else "the network's own rows")
    axes[0].set_ylabel("coverage of 95 % intervals")
    axes[0].legend(fontsize=7)
    return picture
