"""Metrics of predictions: classification from probabilities, regression from means and standard deviations.

Every function takes tensors or arrays, computes in float64 and returns a Python number, averaged over the examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet._common import messages
from linnet.data import check_array

Z95 = 1.959963984540054
"""Standard deviations to either side that hold 95 % of a Gaussian."""


def classification(probabilities: Any, labels: Any, *, bins: int = 15) -> dict[str, float]:
    """Accuracy, NLL, Brier score and ECE in one dict.

    Args:
        probabilities: (n, c), rows that sum to 1.
        labels: (n,), integers from 0 to c - 1.
        bins: Number of bins of the calibration error.

    >>> found = classification([[0.75, 0.25], [0.5, 0.5]], [0, 1])
    >>> {name: round(value, 4) for name, value in found.items()}
    {'accuracy': 0.5, 'nll': 0.4904, 'brier': 0.3125, 'ece': 0.375}
    """
    return {
        "accuracy": accuracy(probabilities, labels),
        "nll": nll(probabilities, labels),
        "brier": brier(probabilities, labels),
        "ece": ece(probabilities, labels, bins=bins),
    }


def regression(mean: Any, std: Any, target: Any, *, level: float = 0.95) -> dict[str, float]:
    """RMSE, Gaussian NLL and coverage in one dict; see `gaussian_nll` and `coverage` for the arguments.

    >>> regression([0.0, 0.0], [1.0, 1.0], [0.0, 3.0])["coverage"]
    0.5
    """
    return {
        "rmse": rmse(mean, target),
        "nll": gaussian_nll(mean, std, target),
        "coverage": coverage(mean, std, target, level=level),
    }


# Classification.


def accuracy(probabilities: Any, labels: Any) -> float:
    """The share of examples whose most probable class is their label; of equal probabilities the first counts."""
    p, y = _check_classes(probabilities, labels)
    return (p.argmax(1) == y).double().mean().item()


def nll(probabilities: Any, labels: Any) -> float:
    """The mean negative log probability of the labels, in nats; infinite where a label was given probability zero.

    Probabilities that come from confident logits underflow in float32: take the softmax in float64.

    >>> nll([[0.5, 0.5], [1.0, 0.0]], [0, 1])
    inf
    """
    p, y = _check_classes(probabilities, labels)
    return -p[torch.arange(len(y)), y].log().mean().item()


def brier(probabilities: Any, labels: Any) -> float:
    """The mean squared distance of a row of probabilities to its label's indicator, between 0 and 2."""
    p, y = _check_classes(probabilities, labels)
    return (p - torch.nn.functional.one_hot(y, p.shape[1])).square().sum(1).mean().item()


def ece(probabilities: Any, labels: Any, *, bins: int = 15) -> float:
    """Expected calibration error of the most probable class: the mean gap of confidence and accuracy over equal bins.

    A bin holds its lower edge: a confidence of 0.8 is in the last of five bins. `reliability` has the bins.

    >>> round(ece([[0.75, 0.25], [0.9, 0.1], [0.3, 0.7]], [0, 0, 0], bins=5), 3)
    0.183
    """
    found = reliability(probabilities, labels, bins=bins)
    return float(found.count @ np.abs(found.confidence - found.accuracy) / found.count.sum())


def mean_average_precision(probabilities: Any, labels: Any) -> float:
    r"""The average precision of the ranking of the examples by each label, averaged over the labels.

    scikit-learn computes it, :math:`\sum_k (R_k - R_{k-1}) P_k` without interpolation.

    Args:
        probabilities: (n, c), or any scores that rank the examples label by label.
        labels: (n, c) of zeros and ones.

    >>> mean_average_precision([[0.9, 0.2], [0.1, 0.8], [0.8, 0.3]], [[1, 0], [0, 1], [0, 1]])
    1.0
    """
    from sklearn.metrics import average_precision_score

    p, y = _as_numbers(probabilities, "probabilities").double(), _as_numbers(labels, "labels")
    if p.ndim != 2 or y.shape != p.shape:
        raise ValueError(
            f"probabilities and labels must both have shape (n, c); got {tuple(p.shape)} and {tuple(y.shape)}."
        )
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("labels must be zeros and ones, one column for each label; some are not.")
    empty = (y.sum(0) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"Labels {empty[:6]} have no example, and their precision is not defined. Leave their columns out."
        )
    return float(average_precision_score(y.long().numpy(), p.numpy(), average="macro"))


@dataclass(frozen=True)
class Reliability:
    """Examples in bins of their confidence. Bins have equal width, and empty bins are left out.

    Attributes:
        confidence: (bins,), the mean probability of the most probable class in each bin.
        accuracy: (bins,), the share of examples whose label is that class.
        count: (bins,), the number of examples.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


def reliability(probabilities: Any, labels: Any, *, bins: int = 10) -> Reliability:
    """Accuracy against confidence, bin by bin: a reliability diagram.

    >>> reliability([[0.75, 0.25], [0.9, 0.1], [0.3, 0.7]], [0, 0, 0], bins=5).accuracy
    array([0.5, 1. ])
    """
    p, y = _check_classes(probabilities, labels)
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a positive number; got {bins!r}.")
    best, chosen = p.max(1)
    place = (best * bins).long().clamp(max=bins - 1)
    here = torch.nn.functional.one_hot(place, bins).double()
    count = here.sum(0)
    some = count > 0
    sums = here.T @ torch.stack([best, (chosen == y).double()], 1)
    means = (sums[some] / count[some, None]).numpy()
    return Reliability(means[:, 0], means[:, 1], count[some].long().numpy())


def kept_accuracy(probabilities: Any, labels: Any) -> np.ndarray:
    """The accuracy on the k examples with the largest confidence, for k = 1 to n, (n,); ties keep their order.

    >>> kept_accuracy([[0.6, 0.4], [0.1, 0.9], [0.8, 0.2]], [0, 1, 1])
    array([1.        , 0.5       , 0.66666667])
    """
    p, y = _check_classes(probabilities, labels)
    best, chosen = p.max(1)
    right = (chosen == y).double()[best.argsort(descending=True, stable=True)]
    return (right.cumsum(0) / torch.arange(1, len(right) + 1)).numpy()


# Regression.


def rmse(mean: Any, target: Any) -> float:
    """Root mean squared error of means against targets of the same shape, over all entries.

    >>> rmse([0.0, 0.0], [3.0, 4.0]) == 12.5**0.5
    True
    """
    m, y = _check_alike(mean=mean, target=target)
    return (m - y).square().mean().sqrt().item()


def gaussian_nll(mean: Any, std: Any, target: Any) -> float:
    """The mean of -log N(target | mean, std^2), in nats.

    Args:
        mean: (n,) or (n, c).
        std: Standard deviations of the observations, noise included: the same shape, or one number.
        target: The same shape as the mean.
    """
    m, s, y = _check_gaussian(mean, std, target)
    return (0.5 * ((y - m) / s).square() + s.log() + 0.5 * math.log(2 * math.pi)).mean().item()


def coverage(mean: Any, std: Any, target: Any, *, level: float = 0.95) -> float:
    """The share of targets inside their central Gaussian intervals of a level. It is the level where std is right.

    Args:
        mean: (n,) or (n, c).
        std: Standard deviations of the observations, noise included: the same shape, or one number.
        target: The same shape as the mean.
        level: Probability of the interval, between 0 and 1.
    """
    m, s, y = _check_gaussian(mean, std, target)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 0.95; got {level!r}.")
    reach = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))
    return ((y - m).abs() <= reach * s).double().mean().item()


# Checks of the arguments.


def _as_numbers(value: Any, name: str) -> Tensor:
    """Anything array-like as a tensor on the CPU; raise for NaN and infinity."""
    if isinstance(value, Tensor):
        t = value.detach().cpu()
    else:
        array = np.asarray(value)
        check_array(array, name)
        t = torch.as_tensor(array)
    if t.is_complex():
        raise TypeError(f"{name} must be real numbers; got {t.dtype}.")
    if t.numel() == 0:
        raise ValueError(f"{name} must hold at least one example; got shape {tuple(t.shape)}.")
    bad = ~torch.isfinite(t)
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite; entry {at} is {t[tuple(at)].item()}.")
    return t


def _check_classes(probabilities: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Probabilities (n, c) in float64 and labels (n,); raise where they do not fit each other."""
    p, y = _as_numbers(probabilities, "probabilities").double(), _as_numbers(labels, "labels")
    if p.ndim != 2:
        hint = " For two classes stack (1 - p, p)." if p.ndim == 1 else ""
        raise ValueError(f"probabilities must have shape (n, c); got {tuple(p.shape)}.{hint}")
    if y.shape != p.shape[:1]:
        raise ValueError(
            f"labels must have shape ({len(p)},), one for each row of probabilities; got {tuple(y.shape)}."
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, the columns of probabilities; got {messages.kind(labels)} of {y.dtype}."
        )
    y = y.long()
    if y.min() < 0 or y.max() >= p.shape[1]:
        wrong = int(y.min() if y.min() < 0 else y.max())
        raise ValueError(f"labels must be columns of probabilities, from 0 to {p.shape[1] - 1}; got {wrong}.")
    off = (p.sum(1) - 1).abs()
    if bool((p < 0).any()) or bool((off > 1e-3).any()):  # room for half precision, none for logits
        row = int(torch.maximum(off, -p.amin(1)).argmax())
        raise ValueError(
            f"probabilities must be nonnegative and sum to 1; row {row} has the least entry {p[row].min().item():.3g} "
            f"and the sum {p[row].sum().item():.6g}. Logits need softmax(1) first."
        )
    return p, y


def _check_alike(**arrays: Any) -> list[Tensor]:
    """Arrays (n,) or (n, c) in float64; raise unless they have one shape."""
    tensors = {name: _as_numbers(value, name).double() for name, value in arrays.items()}
    (first, one), *others = tensors.items()
    for name, t in others:
        if t.shape != one.shape:  # broadcasting (n,) against (n, 1) would compare all pairs
            raise ValueError(
                f"{first} and {name} must have the same shape; got {tuple(one.shape)} and {tuple(t.shape)}."
            )
    if one.ndim not in (1, 2):
        raise ValueError(f"{first} must have shape (n,) or (n, c); got {tuple(one.shape)}.")
    return list(tensors.values())


def _check_gaussian(mean: Any, std: Any, target: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, y = _check_alike(mean=mean, target=target)
    s = _as_numbers(std, "std").double()
    if s.shape not in (m.shape, ()):
        raise ValueError(f"std must be one number or have the mean's shape {tuple(m.shape)}; got {tuple(s.shape)}.")
    if s.min() <= 0:
        raise ValueError(f"std must be positive; the least entry is {s.min().item():.3g}. Add the observation noise.")
    return m, s.expand_as(m), y
