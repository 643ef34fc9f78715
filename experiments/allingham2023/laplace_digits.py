"""Probabilities of small networks on scikit-learn's digits: alone, with error bars, in ensembles, with a temperature.

An MLP and a CNN are trained on 100 digits by Adam, as people do, until they are sure of almost all of them, with and
without weight decay; 100 more digits are held out for what needs them, and 500 others are for the test. What averaging
may cost on training labels (`Laplace.tune`) was settled on networks of seed 0, which are not among these. Every network
is kept as soon as it is there: `--kinds` does some, and the table and the figure show all that have been kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.networks import draw_network
from experiments.common.statistics import average, show_error, summarize
from experiments.common.training import Labeled, find_temperature, train
from linnet import metrics
from linnet.probability import Categorical, compute_probabilities

MAP, TEMPERATURE, ENSEMBLE, DEFAULT = "MAP", "temperature by held-out digits", "ensemble of 5", "auto, tune()"
KINDS, HELD = ("MLP", "CNN"), 100
DECAYS = (0.0, 1e-3)
LINKS = ("centered", "mc", "bridge")
ALONE = "auto, the evidence alone"
STRUCTURES: dict[str, dict[str, Any]] = {
    "kron, tune()": {"structure": "kron"},
    "kron, tune('layerwise')": {"structure": "kron", "prior": "layerwise"},
    "ekfac, tune()": {"structure": "ekfac"},
    "diag, tune()": {"structure": "diag"},
    "last layer, tune()": {"params": "last"},
}
METHODS = {
    MAP: "softmax of the network",
    TEMPERATURE: "the network's logits over one number, likeliest on the held-out digits",
    ENSEMBLE: "the average probability of five networks",
    DEFAULT: "Laplace(model).fit(X, y).tune(), predict_proba(X)",
    **{f"{DEFAULT}, {link}": f"the same, predict_proba(X, {link!r})" for link in LINKS},
    ALONE: "tune(narrow=False): the largest evidence, whatever averaging costs",
    f"{ALONE}, mc": "the same, averages over draws",
    f"{ALONE}, bridge": "the same, predict_proba(X, 'bridge')",
    "auto, tune(validation)": "the prior's size by the held-out digits",
    **{name: f"Laplace(model, {given})" for name, given in STRUCTURES.items()},
}


class Digits(NamedTuple):
    """Training, held-out and test digits: inputs (n, 64) in [0, 1], float64, and labels (n,)."""

    X: Tensor
    y: Tensor
    X_held: Tensor
    y_held: Tensor
    X_test: Tensor
    y_test: Tensor


def digits(n: int, seed: int, *, test: int) -> Digits:
    """A random split."""
    found = load_digits()
    X, y = torch.tensor(found.data / 16), torch.tensor(found.target)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    parts = order[:n], order[n : n + HELD], order[n + HELD :][:test]
    return Digits(*(t for part in parts for t in (X[part], y[part])))


def network(kind: str) -> nn.Sequential:
    """For digits (n, 64): the MLP has 26,122 parameters, the CNN 1,898."""
    if kind == "MLP":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train_digits(kind: str, data: Digits, *, decay: float, epochs: int, seed: int) -> nn.Sequential:
    """Adam on minibatches of 64, from weights as torch draws them; float64 afterwards."""
    model = draw_network(lambda: network(kind), seed)
    rate = 1e-3 if kind == "MLP" else 3e-3
    return train(model, Labeled((data.X.float(),), data.y), epochs=epochs, rate=rate, seed=seed, decay=decay).double()


def probabilities(model: nn.Sequential, others: Sequence[nn.Module], data: Digits) -> dict[str, tuple[Tensor, float]]:
    """Of every method on the test digits, and its seconds; and what error bars looked like."""
    X, y, X_held, y_held, X_test, _ = data
    with torch.no_grad():
        f, held = model(X_test), model(X_held)
        alike = [m(X_test).softmax(1) for m in (model, *others)]
    out = {
        MAP: (alike[0], 0.0),
        TEMPERATURE: ((f / find_temperature(held, y_held)).softmax(1), 0.0),
        ENSEMBLE: (torch.stack(alike).mean(0), 0.0),
    }

    def note(name: str, tuned: Callable[[], linnet.Laplace], links: Sequence[str] = ()) -> None:
        start = time.perf_counter()
        found, _ = average_links(tuned(), X_test, ("probit", *links))
        spent = time.perf_counter() - start
        out.update({name if link == "probit" else f"{name}, {link}": (p, spent) for link, p in found.items()})

    exact = linnet.Laplace(model, progress=False).fit(X, y)
    note(DEFAULT, exact.tune, LINKS)
    note("auto, tune(validation)", lambda: exact.tune(validation=(X_held, y_held)))
    note(ALONE, lambda: tune_alone(exact), ("mc", "bridge"))
    for name, given in STRUCTURES.items():
        given = {**given, "params": f"{len(model) - 1}.*"} if "params" in given else given
        note(name, lambda given=given: linnet.Laplace(model, progress=False, **given).fit(X, y).tune())  # type: ignore[misc]
    return out


def average_links(la: linnet.Laplace, X: Tensor, links: Sequence[str]) -> tuple[dict[str, Tensor], Tensor]:
    """Probabilities as `Laplace.predict_proba` has them, and variances of the logits (n, c); one pass for all links."""
    f, C = la.predict(X), la.posterior_.blocks(la.lin_.jacobian(X, progress=False))
    found = {link: compute_probabilities(Categorical(), f, C, link=link).double() for link in links}
    return found, C.diagonal(dim1=1, dim2=2)


def tune_alone(la: linnet.Laplace) -> linnet.Laplace:
    """The largest evidence; that it is too wide is the point."""
    with common.expect(common.WIDE):
        return la.tune("shared", narrow=False)


ARGUMENTS = {
    "--kinds": common.several(KINDS, "default: both"),
    "--decays": {"type": float, "nargs": "+", "default": list(DECAYS), "help": "default: 0 and 1e-3"},
    "--networks": "networks of each kind (default: 3)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Both kinds, with and without decay, several seeds."""
    count = options.networks or (2 if options.quick else 3)
    n, epochs, test, members = (20, 60, 60, 2) if options.quick else (100, 200, 500, 5)
    parts: dict[str, Any] = {}
    for kind in options.kinds:
        for decay in options.decays:
            case = f"{kind}, decay {decay:g}"
            for i in range(count):
                seed = 1 + 100 * options.seed + i
                data = digits(n, seed, test=test)
                one, *others = [
                    train_digits(kind, data, decay=decay, epochs=epochs, seed=seed + 1000 * j) for j in range(members)
                ]
                found = probabilities(one, others, data)
                scores = {
                    name: {**metrics.classification(p, data.y_test), "seconds": spent}
                    for name, (p, spent) in found.items()
                }
                with torch.no_grad():
                    loss = float(nn.functional.cross_entropy(one(data.X), data.y))
                kept = {case: {f"seed {seed}": {"training loss": loss, "methods": scores}}}
                parts = common.keep(options, kept)
            print(f"{case} done", flush=True)
    each = {case: list(found.values()) for case, found in sorted(parts.items(), reverse=True)}
    summary = {case: summarize_networks(found) for case, found in each.items()}
    overall = summarize_networks([one for found in each.values() for one in found])
    record = {
        "settings": {"networks": count, "train": n, "held out": HELD, "test": len(data.y_test), "epochs": epochs},
        "errors": "standard errors over networks; less MAP: paired",
        "methods": METHODS,
        "over all": overall,
        "cases": summary,
        "parts": parts,
    }
    command = None if set(options.kinds) == set(KINDS) else "python -m experiments laplace_digits"
    return common.Outcome(record, figure(summary), rows(overall, summary, count, n), command)


def summarize_networks(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores over networks, and the NLL less that of the same network alone."""
    each = [one["methods"] for one in found]
    out = summarize([{name: one[name] for name in METHODS} for one in each], average)
    for name in METHODS:
        out[name]["NLL less MAP"] = average([one[name]["nll"] - one[MAP]["nll"] for one in each])
    return out


def rows(overall: Mapping[str, Any], cases: Mapping[str, Any], count: int, n: int) -> list[common.Row]:
    differs = f"an MLP and a CNN, decay {' and '.join(f'{d:g}' for d in DECAYS)}, {n} training digits; ± over networks"
    out = [
        common.Row(
            f"{name}: NLL - MAP, ECE, accuracy",
            "not on the slides",
            f"{show_error(one['NLL less MAP'], 4)}, {one['ece']['mean']:.3f}, {100 * one['accuracy']['mean']:.1f} %",
            f"{differs} ({count} of each)",
        )
        for name, one in overall.items()
    ]
    told = "; ".join(
        f"{case}: {show_error(one[DEFAULT]['nll'], 3)} (MAP {show_error(one[MAP]['nll'], 3)})"
        for case, one in cases.items()
    )
    return [*out, common.Row(f"{DEFAULT}, test NLL by network", "not on the slides", told, differs)]


def figure(cases: Mapping[str, Any]) -> Figure:
    """NLL less MAP's, method by method."""
    names = [name for name in METHODS if name != MAP]
    colors, markers = (plots.BLUE, plots.SKY, plots.VERMILION, plots.ORANGE), "osD^"
    picture, ax = plt.subplots(figsize=(8, 0.36 * len(names) + 1.8))
    for i, (case, found) in enumerate(cases.items()):
        gaps = [found[name]["NLL less MAP"] for name in names]
        how = {"across": True, "fmt": markers[i], "color": colors[i], "ms": 5, "lw": 1, "label": case}
        plots.draw_means(ax, plots.place_rows(len(names), i, 4, 0.6), gaps, **how)
    ax.axvline(0, color="black", lw=1)
    ax.set_xscale("symlog", linthresh=0.02, linscale=1.5)
    plots.name_rows(ax, names)
    ax.set_xlabel("test NLL less the network's own (left is better; linear to ±0.02, then logarithmic)")
    picture.legend(loc="outside lower center", ncols=4)
    return picture
