"""From a fitted estimator and data to what a report says about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from linnet import metrics
from linnet._estimator.linearity import Linearity
from linnet.laplace.estimator import Laplace
from linnet.report import diagnostics
from linnet.report.content import Classes, Evidence, Linear, Missing, Numbers, Spectrum
from linnet.tangent.base import Tangent

COMPARED = 1000
"""Test examples on which the linear model is compared with the network."""

DRAWN = 4
"""Weights that are drawn from a posterior for that."""

DOTS = 400
"""Outputs of these that are drawn."""

T = TypeVar("T")


def attempt(make: Callable[[], T]) -> T | Missing:
    """A part, or what prevents it, in the words of the error."""
    try:
        return make()
    except (ValueError, TypeError, NotImplementedError, ArithmeticError, MemoryError) as error:
        return Missing(str(error))


def some(X: Any, most: int) -> tuple[Any, np.ndarray]:
    """At most so many of the inputs, evenly spaced, and their positions."""
    first = next(iter(X.values())) if isinstance(X, Mapping) else X
    n = len(first)
    index = np.arange(n) if n <= most else np.unique(np.linspace(0, n - 1, most).astype(int))
    if len(index) == n:
        return X, index
    take = torch.as_tensor(index)
    if isinstance(X, Mapping):
        return {name: x[take.to(x.device)] if isinstance(x, Tensor) else x[index] for name, x in X.items()}, index
    return (X[take.to(X.device)] if isinstance(X, Tensor) else X[index]), index


# The linear model and the network.


def linear(estimator: Any, X: Any, outcome: Any = None, *, what: str = "test example") -> Linear | Missing:
    """Compare them: at the adapted weights, or at weights drawn from the posterior of `Laplace`.

    Args:
        estimator: Fitted.
        X: Inputs at which they are compared.
        outcome: Predictions for them, whose metrics are compared too.
        what: One of the inputs.
    """
    few, index = some(X, COMPARED)
    if isinstance(estimator, Laplace):
        found = attempt(lambda: _drawn(estimator.linearity(few, DRAWN)))
    else:
        found = attempt(lambda: _adapted(estimator, estimator.linearity(few), index, outcome))
    return found if isinstance(found, Missing) else replace(found, what=what)


def _adapted(estimator: Tangent, found: Linearity, index: np.ndarray, outcome: Any) -> Linear:
    step, real = (array(f - found.before) for f in (found.linear, found.network))
    around_network = estimator._mean == "network"  # else the step alone is the model, and the network is another
    classes = isinstance(outcome, Classes)
    scores: dict[str, Mapping[str, float]] = {}
    if around_network and isinstance(outcome, Classes):
        y = outcome.labels[index]
        scores = {
            "this model": metrics.classification(outcome.probabilities[index], y),
            "real network": metrics.classification(softmax(found.network), y),
        }
    elif around_network and isinstance(outcome, Numbers):
        y = outcome.target[index]
        scores = {
            "this model": {"rmse": metrics.rmse(outcome.mean[index], y)},
            "real network": {"rmse": metrics.rmse(array(found.network), y)},
        }
    agreement = found.agreement if around_network and classes else None
    keep = _dots(step.size)
    return Linear(
        step.ravel()[keep],
        real.ravel()[keep],
        found.relative_error,
        len(step),
        agreement,
        scores=scores,
        whole=around_network,
    )


def _drawn(found: Sequence[Linearity]) -> Linear:
    steps = np.stack([array(one.linear - one.before) for one in found])
    reals = np.stack([array(one.network - one.before) for one in found])
    length = float(np.linalg.norm(steps))
    error = float(np.linalg.norm(reals - steps)) / length if length > 0 else 0.0
    keep = _dots(steps.size)
    return Linear(steps.ravel()[keep], reals.ravel()[keep], error, steps.shape[1], drawn=len(found))


def _dots(size: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, DOTS)).astype(int))


def softmax(f: Tensor) -> np.ndarray:
    """Class probabilities of a network's outputs, (n, c); one output is the logit of the second class."""
    f = f.double().cpu()
    return array(torch.cat([torch.sigmoid(-f), torch.sigmoid(f)], 1) if f.shape[1] == 1 else f.softmax(1))


# What was learned.


def spectrum(estimator: Any, train: tuple[Any, Any]) -> Spectrum | Missing:
    """Signal over noise of the directions that the training data know."""

    def make() -> Spectrum:
        values, n = diagnostics.spectrum(diagnostics.fitted(estimator, *train))
        return Spectrum(values, n)

    return attempt(make)


def relevance(estimator: Any) -> dict[str, float] | Missing:
    """Each layer's share in the adaptation."""
    if isinstance(estimator, Laplace):
        return Missing("Error bars leave the network as it is, so that no layer adapts.")
    return dict(estimator.layer_relevance_)


def evidence(estimator: Any) -> Evidence | Missing:
    """How the prior was chosen."""
    scales = {name: float(value) for name, value in estimator.scales_.items()}
    if isinstance(estimator, Laplace):
        steps: Sequence[Any] = estimator.tune_path_
        value = attempt(lambda: float(estimator.log_evidence()))
        return Evidence(
            [step.log_evidence for step in steps], None if isinstance(value, Missing) else value, scales=scales
        )
    found = estimator.log_evidence_
    return Evidence(
        [float(value) for value in getattr(estimator, "evidence_path_", ()) if math.isfinite(value)],
        None if found is None else float(found),
        dict(estimator.top_path_ or {}),
        estimator.top_,
        scales,
    )


def array(x: Any) -> np.ndarray:
    """In float64, on the CPU."""
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=float)
