"""Targets of a head: what they are (classes, several labels at once, numbers), and classes as positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

Task = Literal["auto", "classification", "multilabel", "regression"]


def check_targets(y: Any, n: int, task: Task) -> tuple[np.ndarray, str]:
    """Targets as an array, (n,) or (n, c), and what they are."""
    if task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(map(repr, get_args(Task)))}; got {task!r}.")
    y = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != n or y.size == 0:
        raise ValueError(f"There are {n} examples, so y needs shape ({n},) or ({n}, c); got {y.shape}.")
    if y.dtype.kind in "fc" and not np.isfinite(y).all():
        bad = int(np.argmax(~np.isfinite(y).reshape(n, -1).all(1)))
        raise ValueError(f"y must not be NaN or infinite; that of example {bad} is. Leave it out.")
    number = y.dtype.kind in "biuf"
    zeros_and_ones = number and bool(np.isin(y, (0, 1)).all())
    if task == "auto":
        whole = y.dtype.kind != "f" or bool((y == np.round(y)).all())
        if y.ndim == 2:
            task = "multilabel" if zeros_and_ones else "regression"
            if task == "regression" and y.dtype.kind in "iu":
                raise ValueError(
                    f"y has shape {y.shape} and whole numbers other than 0 and 1: are they labels or numbers? Pass one "
                    "label for each example, columns of zeros and ones, or task='regression'."
                )
        else:
            task = "classification" if whole else "regression"
    if task == "multilabel" and (y.ndim != 2 or not zeros_and_ones):
        raise ValueError(f"Several labels at once need y of shape (n, c) with zeros and ones; got shape {y.shape}.")
    if task == "classification" and y.ndim != 1:
        raise ValueError(f"Classes need one label for each example, y of shape ({n},); got {y.shape}.")
    if task == "regression" and not number:
        raise TypeError(f"Regression needs real numbers; y is an array of {y.dtype}.")
    return (y.astype(np.float64) if task == "regression" else y), task


def encoded(y: np.ndarray, classes: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """The classes in order, and each label's position among them."""
    try:
        found = np.unique(y)
    except TypeError as error:
        raise TypeError(f"Labels must be of one kind, so that they can be sorted: {error}.") from error
    if len(found) < 2:
        raise ValueError(f"A head for classes needs labels of at least two; all {len(y)} labels are {found[0]!r}.")
    if classes is None:
        return found, np.searchsorted(found, y)
    names = np.asarray(classes)
    known = {label: i for i, label in enumerate(names.tolist())}
    unknown = [label for label in found.tolist() if label not in known]
    if unknown or len(known) != len(names):
        raise ValueError(
            f"classes= needs every label once; got {names.tolist()[:8]}"
            + (f" without {unknown[:8]}." if unknown else ".")
        )
    missing = [label for label in names.tolist() if label not in set(found.tolist())]
    if missing:
        raise ValueError(
            f"There are {len(names)} classes and no example of {len(missing)} of them ({missing[:8]}), from {len(y)} "
            "examples: a head cannot be fitted to them. Add an example of each, or leave them out of classes=."
        )
    return names, np.array([known[label] for label in y.tolist()])
