"""Forgetting examples beside a refit without them: the same numbers, and how long.

2,000 examples in float64 on the CPU; the prior and the noise are given, so that the refit chooses nothing. Both begin
with the fitted estimator, whose kernel or curvature is in memory, and end before the first prediction. The refit of a
regression is ``TangentRegressor.refit``, which keeps prior and noise; ``fit`` chooses them, and is timed once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import linnet
from benchmarks.timing import machine, milliseconds, timed

N, COUNTS, TEST = 2000, (1, 10, 100), 200


class Case(NamedTuple):
    """One estimator to forget with.

    Attributes:
        make: Makes the estimator around a network.
        refit: From the fitted estimator and data to the refit.
        widths: Widths of the layers of the network.
        classes: Whether the targets are classes.
    """

    make: Callable[[nn.Module], Any]
    refit: Callable[[Any, Tensor, Tensor], Any]
    widths: tuple[int, ...]
    classes: bool = False


def by_refit(fitted: Any, X: Tensor, y: Tensor) -> Any:
    return fitted.refit(X, y)


def by_fit(fitted: Any, X: Tensor, y: Tensor) -> Any:
    return type(fitted)(**fitted.get_params(deep=False)).fit(X, y)


def regressor(model: nn.Module, **given: Any) -> linnet.TangentRegressor:
    given = {"prior": 0.05, "noise": 0.01, "mean": "network"} | given
    return linnet.TangentRegressor(model, progress=False, **given)


def laplace(structure: Any) -> Callable[[nn.Module], Any]:
    return lambda model: linnet.Laplace(model, "regression", structure, prior=0.05, noise=0.01, progress=False)


def classifier(model: nn.Module, **given: Any) -> linnet.TangentClassifier:
    return linnet.TangentClassifier(model, inference="laplace", mean="network", prior=0.05, progress=False, **given)


CASES = {
    "regressor, function": Case(lambda m: regressor(m, solver="function"), by_refit, (10, 1000, 500, 1)),
    "regressor, function, small network": Case(lambda m: regressor(m, solver="function"), by_refit, (10, 128, 128, 1)),
    "regressor, defaults": Case(lambda m: linnet.TangentRegressor(m, progress=False), by_refit, (10, 128, 128, 1)),
    "regressor, weight": Case(lambda m: regressor(m, solver="weight"), by_refit, (10, 24, 16, 1)),
    "regressor, cg-weight": Case(lambda m: regressor(m, solver="cg-weight"), by_refit, (10, 24, 16, 1)),
    "classifier, function": Case(lambda m: classifier(m, solver="function"), by_refit, (10, 128, 128, 1), True),
    "classifier, weight": Case(lambda m: classifier(m, solver="weight"), by_refit, (10, 24, 16, 1), True),
    "Laplace, full": Case(laplace("full"), by_fit, (10, 24, 16, 1)),
    "Laplace, function": Case(laplace("function"), by_fit, (10, 128, 128, 1)),
    "Laplace, diag": Case(laplace("diag"), by_fit, (10, 128, 128, 1)),
    "Laplace, kron": Case(laplace("kron"), by_fit, (10, 128, 128, 1)),
}


def network(widths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def data(model: nn.Module, *, classes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets around the network's own outputs, and new inputs."""
    generator = torch.Generator().manual_seed(1)
    X, new = (torch.randn(k, 10, dtype=torch.float64, generator=generator) for k in (N, TEST))
    with torch.no_grad():
        f = model(X)
    noise = 0.1 * torch.randn(f.shape, dtype=torch.float64, generator=generator)
    y = (f + noise > f.mean()).long()[:, 0] if classes else (f + noise)[:, 0] + 0.1 * torch.sin(X[:, 0])
    return X, y, new


def evidence(found: Any) -> float:
    return float(found.log_evidence() if isinstance(found, linnet.Laplace) else found.log_evidence_)


def compare(a: Any, b: Any, new: Tensor, *, classes: bool) -> dict[str, float]:
    """Largest differences of mean, variance and evidence."""
    if classes and not isinstance(a, linnet.Laplace):
        (f, std), (g, other) = (one.predict_logits(new, return_std=True) for one in (a, b))
    else:
        (f, std), (g, other) = (one.predict(new, return_std=True) for one in (a, b))
    return {
        "mean": float((f - g).abs().max()),
        "variance": float((std.square() - other.square()).abs().max()),
        "evidence": abs(evidence(a) - evidence(b)),
    }


def measure(name: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    """One row for each number of examples to forget."""
    model = network(case.widths)
    X, y, new = data(model, classes=case.classes)
    seconds, fitted = timed(lambda: case.make(model).fit(X, y), "cpu")
    order, rows = torch.randperm(N, generator=torch.Generator().manual_seed(2)), []
    for k in COUNTS:
        gone, stay = order[:k], order[k:].sort().values
        less, again = fitted.forget(gone), case.refit(fitted, X[stay], y[stay])
        found = compare(less, again, new, classes=case.classes)
        bounds = {"bound of the mean": less.certificate_.mean, "bound of the variance": less.certificate_.variance}
        contenders = {
            "forget": lambda gone=gone: fitted.forget(gone),
            "refit": lambda stay=stay: case.refit(fitted, X[stay], y[stay]),
        }
        times = milliseconds(contenders, "cpu", rounds=rounds)  # type: ignore[arg-type]
        more = {"share": times["forget"] / times["refit"], "first fit": 1e3 * seconds}
        rows.append({"case": name, "p": less.lin_.p, "forgotten": k, **found, **bounds, **times, **more})
        print(
            f"{name:36s} {k:4d}  mean {found['mean']:.0e}  variance {found['variance']:.0e}  evidence "
            f"{found['evidence']:.0e}  forget {times['forget']:8.1f} ms  refit {times['refit']:8.1f} ms  share "
            f"{more['share']:.3f}",
            flush=True,
        )
    if isinstance(fitted, linnet.TangentRegressor):
        back = fitted.condition(new[:10], new[:10, 0]).forget(new[:10], new[:10, 0])
        found = {f"back: {key}": value for key, value in compare(back, fitted, new, classes=False).items()}
        rows[-1] |= found
        print(f"{name:36s} back  {found}", flush=True)
    return rows


def run(out: Path, only: str, rounds: int) -> None:
    """Measure, print and keep."""
    chosen = CASES if only == "all" else {only: CASES[only]}
    rows = [row for name, case in chosen.items() for row in measure(name, case, rounds)]
    if only == "all":
        found = {"machine": machine("cpu"), "n": N, "rows": rows}
        out.write_text(json.dumps(found, indent=2) + "\n")
