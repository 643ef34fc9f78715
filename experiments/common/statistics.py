"""Means over draws with their errors and intervals, in numbers and in words; scores of Gaussian predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and a 95 % interval of it by Student's t; NaN bounds for one value.

    >>> {key: round(value, 3) for key, value in interval([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.484, 'high': 4.484, 'count': 3}
    """
    x = torch.tensor(list(values), dtype=torch.float64)
    half = math.nan if len(x) < 2 else float(student.ppf(0.975, len(x) - 1) * x.std() / math.sqrt(len(x)))
    mean = float(x.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(x)}


def average(values: Sequence[float]) -> dict[str, float]:
    """Mean and its standard error (NaN for one value)."""
    x = torch.tensor(list(values), dtype=torch.float64)
    error = float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return {"mean": float(x.mean()), "error": error}


def summarize(runs: Sequence[Any], how: Callable[[Sequence[float]], Any] = interval) -> Any:
    """The intervals, or what else `how` makes, of numbers in nested dicts with the same keys.

    >>> summarize([{"a": {"b": 1.0}}, {"a": {"b": 3.0}}], average)
    {'a': {'b': {'mean': 2.0, 'error': 1.0}}}
    """
    if isinstance(runs[0], Mapping):
        return {key: summarize([run[key] for run in runs], how) for key in runs[0]}
    return how([float(run) for run in runs])


def subtract(a: Any, b: Any) -> Any:
    """a - b in nested dicts, of the keys that both have."""
    return {key: subtract(a[key], b[key]) for key in a if key in b} if isinstance(a, Mapping) else a - b


def show_error(value: Mapping[str, float], digits: int = 2) -> str:
    """`1.23 ± 0.04`, or the mean alone where there is no standard error."""
    text = f"{value['mean']:.{digits}f}"
    return text if math.isnan(value["error"]) else f"{text} ± {value['error']:.{digits}f}"


def show_interval(gain: Mapping[str, float], *, factor: float = 1.0, digits: int = 1) -> str:
    """`+5.1 (+3.9 to +6.3)`, or the mean alone where one draw has no interval."""
    text = f"{factor * gain['mean']:+.{digits}f}"
    if math.isnan(gain["low"]):
        return text
    return f"{text} ({factor * gain['low']:+.{digits}f} to {factor * gain['high']:+.{digits}f})"


def show_value(value: Mapping[str, float], digits: int = 2) -> str:
    """`0.12 (0.10 to 0.14)`: an interval that is not one of differences.

    >>> show_value({"mean": 0.123, "low": 0.1, "high": 0.146})
    '0.12 (0.10 to 0.15)'
    """
    return show_interval(value, digits=digits).replace("+", "")


def scores(mean: Tensor, variance: Tensor, y: Tensor, *, unit: float = 1.0) -> dict[str, float]:
    """RMSE, mean negative log density and coverage of the 95 % interval of Gaussian predictions.

    Args:
        mean: Predictions (n,).
        variance: Their variances, observation noise included (n,).
        y: Targets (n,).
        unit: Original units per unit of y: RMSE and NLL are given in original units.

    >>> scores(torch.zeros(2), torch.ones(2), torch.tensor([1.0, -3.0]))["coverage"]
    0.5
    """
    if not bool((variance > 0).all()):
        raise ValueError(f"Variances must be positive; the smallest is {float(variance.min()):.3g}.")
    error = y - mean
    nll = 0.5 * (math.log(2 * math.pi) + variance.log() + error.square() / variance) + math.log(unit)
    covered = error.abs() <= 1.959964 * variance.sqrt()
    return {
        "rmse": unit * float(error.square().mean().sqrt()),
        "nll": float(nll.mean()),
        "coverage": float(covered.double().mean()),
    }
