"""Labels of classes as users give them, and the numbers of the outputs that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor


def as_labels(y: Any, n: int) -> np.ndarray:
    """Labels as an array (n,), or (n, c) of zeros and ones."""
    y = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = column_or_1d(y, warn=True)
    if y.ndim not in (1, 2) or len(y) != n:
        raise ValueError(f"{n} examples need labels of shape ({n},), or ({n}, c) of zeros and ones; got {y.shape}.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ValueError(f"Labels must not be NaN or infinite; example {int(np.argmax(~np.isfinite(y)))} is.")
    if y.ndim == 1:
        check_is_no_regression(y, "linnet.TangentRegressor and Laplace(likelihood='regression') take numbers")
        check_classification_targets(y)
    elif y.dtype.kind not in "biuf":
        raise TypeError(f"Several labels at once, ({n}, c), must be zeros and ones; got an array of {y.dtype.str[1:]}.")
    return y


def name_classes(labels: np.ndarray, count: int, given: Sequence[Any] | None) -> np.ndarray:
    """The label of each of ``count`` classes."""
    found = np.unique(labels)
    if given is not None:
        classes = np.asarray(given)
        if len(classes) != count or len(set(classes.tolist())) != count:
            raise ValueError(
                f"The network has {count} classes, so classes= needs as many different labels; got {given}."
            )
        unknown = [label for label in found.tolist() if label not in set(classes.tolist())]
        if unknown:
            raise ValueError(f"Labels {unknown[:6]} are not among classes={classes.tolist()[:6]}.")
        return classes
    if len(found) > count:
        raise ValueError(
            f"There are {len(found)} labels and the network has {count} classes. Give it a new head first "
            "with linnet.attach_head."
        )
    whole = found.dtype.kind in "iu" or (found.dtype.kind == "f" and bool((found == found.astype(int)).all()))
    if whole and found.min() >= 0 and found.max() < count:
        return np.arange(count).astype(found.dtype)
    if found.dtype.kind == "b":
        return np.array([False, True]) if count == 2 else found
    if len(found) == count:
        return found
    raise ValueError(
        f"The network has {count} classes and the labels are {found.tolist()[:6]}: which output is which? "
        "Pass classes=, the label of each output in order."
    )


def find_codes(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The number of the class of each label, (n,)."""
    places = {label: i for i, label in enumerate(classes.tolist())}
    unknown = sorted({str(label) for label in labels.tolist() if label not in places})
    if unknown:
        raise ValueError(f"Labels {', '.join(unknown[:6])} are not among the classes {classes.tolist()}.")
    return np.array([places[label] for label in labels.tolist()], dtype=np.int64)


def check_is_no_regression(y: Any, instead: str = "Pass likelihood='regression'") -> None:
    """Raise where the targets of a classifier are numbers with fractions; ``instead`` says what takes them."""
    if y is None or not isinstance(y, Tensor | np.ndarray):
        return
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) and y.is_floating_point() else y
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or not np.isfinite(values).all():
        return
    fractions = values[values != np.round(values)]
    if len(fractions):
        raise ValueError(
            f"Unknown label type: the targets are numbers with fractions, such as {float(fractions.flat[0]):.6g}, and "
            f"a classifier needs labels. {instead}."
        )
