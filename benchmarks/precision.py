"""How far estimators whose networks run in float32 are from the same estimators in float64.

Each job fits one estimator twice, with ``dtype="float32"`` and with ``dtype="float64"``, and compares what it predicts.
Prior scales and noise are chosen in each fit, so their differences are in the numbers too.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import linnet
from benchmarks.timing import machine

TARGET = 1e-4
"""Largest relative difference that is wanted."""

SETS = ("boston", "concrete", "energy", "wine", "kin8nm", "power", "protein")
PRIORS = ("shared", "balanced", "layerwise")
STRUCTURES = ("kron", "ekfac", "diag", "function", "lowrank", "last layer")

Data = tuple[Tensor, Tensor, Tensor]
"""Inputs and targets to fit on, and inputs to predict."""


def relative(found: Any, exact: Any) -> float:
    """The distance of two arrays relative to the length of the second.

    >>> relative([1.0, 2.0], [1.0, 2.2]) < 0.1
    True
    """
    a, b = (_vector(x) for x in (found, exact))
    return float((a - b).norm() / b.norm())


def largest(found: Any, exact: Any) -> float:
    """The largest relative difference of positive numbers."""
    a, b = (_vector(x) for x in (found, exact))
    return float(((a - b).abs() / b.abs()).max())


def furthest(found: Any, exact: Any) -> float:
    """The largest difference."""
    return float((_vector(found) - _vector(exact)).abs().max())


def _vector(x: Any) -> Tensor:
    values = x.detach() if isinstance(x, Tensor) else np.asarray(x, dtype=float)
    return torch.as_tensor(values).double().cpu().flatten()


def train(net: nn.Module, X: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int) -> nn.Module:
    """The network after some steps of Adam on all data."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(X), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net.eval()


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """A tanh network with two hidden layers of 50."""
    layers = (nn.Linear(inputs, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, outputs))
    return nn.Sequential(*layers)


def convolutions(outputs: int) -> nn.Module:
    """A small convolutional network for images of 8 by 8."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, outputs),
    )


def uci(folder: Path, name: str, most: int) -> Iterator[Tensor]:
    """Inputs and targets of two halves of the training part of the first split, and test inputs, standardized."""
    data = np.loadtxt(folder / f"uci/{name}.csv", delimiter=",", skiprows=1)
    test = np.unpackbits(np.load(folder / "uci/splits.npz")[name], axis=1)[0, : len(data)].astype(bool)
    order = np.random.default_rng(0).permutation(np.flatnonzero(~test))[: 2 * most]
    center, spread = data[order].mean(0), data[order].std(0)
    standard = torch.as_tensor((data - center) / np.where(spread > 0, spread, 1.0)).float()
    first, second = np.array_split(order, 2)
    for rows in (first, second):
        yield standard[rows, :-1]
        yield standard[rows, -1]
    yield standard[test, :-1][:most]


def compare(build: Callable[[str], Any], fit: Callable[[Any], Any], ask: Callable[[Any], dict[str, Any]]) -> Any:
    """The relative differences of what two fits answer, and the seconds that each took."""
    answers, seconds = {}, {}
    for dtype in ("float32", "float64"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # networks that are trained for a second
            start = time.perf_counter()
            answers[dtype] = ask(fit(build(dtype)))
            seconds[dtype] = time.perf_counter() - start
    how = {"probabilities": furthest, "std": largest}
    exact = answers["float64"]
    found = {key: how.get(key, relative)(value, exact[key]) for key, value in answers["float32"].items()}
    return found | {f"seconds {dtype}": value for dtype, value in seconds.items()}


def regression(net: nn.Module, data: Data, **options: Any) -> dict[str, float]:
    """`TangentRegressor`."""
    X, y, new = data

    def ask(reg: Any) -> dict[str, Any]:
        mean, std = reg.predict(new, return_std=True)
        return {"mean": mean, "std": std, "log evidence": [reg.log_evidence_], "noise": np.ravel(reg.noise_)}

    return compare(lambda d: linnet.TangentRegressor(net, dtype=d, **options), lambda reg: reg.fit(X, y), ask)


def classification(net: nn.Module, data: Data, **options: Any) -> dict[str, float]:
    """`TangentClassifier`."""
    X, y, new = data

    def ask(clf: Any) -> dict[str, Any]:
        found = {"probabilities": clf.predict_proba(new)}
        return found | ({} if clf.log_evidence_ is None else {"log evidence": [clf.log_evidence_]})

    return compare(lambda d: linnet.TangentClassifier(net, dtype=d, **options), lambda clf: clf.fit(X, y), ask)


def error_bars(net: nn.Module, data: Data, structure: str, likelihood: str) -> dict[str, float]:
    """`Laplace`; "last layer" is a full curvature of the last layer."""
    X, y, new = data
    last = f"{len(list(net.children())) - 1}.*"
    options = {"structure": "full", "params": last} if structure == "last layer" else {"structure": structure}

    def ask(la: Any) -> dict[str, Any]:
        if likelihood == "classification":
            found = {"probabilities": la.predict_proba(new)}
        else:
            found = dict(zip(("mean", "std"), la.predict(new, return_std=True), strict=True))
        return found | {"log evidence": [la.log_evidence()]}

    return compare(lambda d: linnet.Laplace(net, likelihood, dtype=d, **options), lambda la: la.fit(X, y), ask)


def embedding(net: nn.Module, data: Data) -> dict[str, float]:
    """`FisherEmbedding`: eigenvalues, and the kernel of the embedded examples."""
    X, _, new = data

    def ask(emb: Any) -> dict[str, Any]:
        Z = torch.as_tensor(emb.transform(new)).double()
        return {"eigenvalues": emb.eigenvalues_, "kernel": Z @ Z.T}

    return compare(lambda d: linnet.FisherEmbedding(net, 16, dtype=d), lambda emb: emb.fit(X), ask)


def jobs(folder: Path | None, most: int, device: str) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Names and jobs, on UCI sets where their folder is given, and on scikit-learn's digits."""
    for name in SETS if folder is not None else ():
        assert folder is not None
        torch.manual_seed(0)
        X0, y0, X, y, new = (t.to(device) for t in uci(folder, name, most))
        net = train(perceptron(X.shape[1], 1).to(device), X0, y0[:, None], F.mse_loss, 300)
        data, own = (X, y, new), (X0, y0, new)
        for prior in PRIORS:
            yield f"{name}, regressor, {prior}", partial(regression, net, data, prior=prior)
        yield f"{name}, regressor, zero mean", partial(regression, net, data, mean="zero")
        yield f"{name}, regressor, last layer", partial(regression, net, data, params="4.*", prior="shared")
        for structure in ("kron", "last layer"):
            yield f"{name}, Laplace, {structure}", partial(error_bars, net, own, structure, "regression")
    X, y = (torch.as_tensor(x).to(device) for x in load_digits(return_X_y=True))
    X, few = (X / 16).float(), min(most, 300)
    for kind, make in (("perceptron", partial(perceptron, 64)), ("convolutions", convolutions)):
        torch.manual_seed(0)
        net = train(make(10).to(device), X[:few], y[:few], F.cross_entropy, 100)
        part = slice(few, few + few // 3)
        data, own = (X[part], y[part], X[-200:]), (X[:few], y[:few], X[-200:])
        for inference in ("vi", "laplace", "map"):
            name = f"digits, {kind}, classifier, {inference}"
            yield name, partial(classification, net, data, inference=inference)
        coded = (data[0], F.one_hot(data[1], 10).float(), data[2])
        yield f"digits, {kind}, regressor", partial(regression, net, coded, mean="zero")
        for structure in STRUCTURES:
            yield f"digits, {kind}, Laplace, {structure}", partial(error_bars, net, own, structure, "classification")
        yield f"digits, {kind}, embedding", partial(embedding, net, own)


def run(data: Path | None, out: Path | None, only: str, most: int, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Print the table, and write it."""
    found: dict[str, dict[str, float]] = {}
    for name, job in jobs(data, most, device):
        if only not in name:
            continue
        found[name] = job()
        differences = [value for key, value in found[name].items() if not key.startswith("seconds")]
        mark = "  " if max(differences) <= TARGET else "! "
        print(f"{mark}{name:42s}" + "  ".join(f"{key} {value:.1e}" for key, value in found[name].items()), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(device), "target": TARGET, "jobs": found}, indent=1) + "\n")
    return found
