"""Labels of classes as users give them, and the numbers of the outputs that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
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
        if unknown and not _number_outputs(found, classes):
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
    """The number of the class of each label, (n,). Numbers of outputs may stand for classes that have names."""
    if _number_outputs(labels, classes):
        return labels.astype(np.int64)
    places = {label: i for i, label in enumerate(classes.tolist())}
    unknown = sorted({str(label) for label in labels.tolist() if label not in places})
    if unknown:
        raise ValueError(f"Labels {', '.join(unknown[:6])} are not among the classes {classes.tolist()}.")
    return np.array([places[label] for label in labels.tolist()], dtype=np.int64)


def _number_outputs(labels: np.ndarray, classes: np.ndarray) -> bool:
    """Whether labels are numbers of outputs, and the classes have names."""
    whole = labels.dtype.kind in "iu" and len(labels) > 0
    return classes.dtype.kind in "UO" and whole and bool(labels.min() >= 0 and labels.max() < len(classes))


def find_output_names(model: Any, count: int) -> list[str] | None:
    """The names that a Hugging Face model has for its ``count`` outputs; None where the model has none.

    ``LABEL_0``, ``LABEL_1`` and so on stand for no name.
    """
    known = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(known, dict) or len(known) != count:
        return None
    names = [str(known.get(i, known.get(str(i), ""))) for i in range(count)]
    plain = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return None if plain or len(set(names)) < count or "" in names else names


def find_better_order(predicted: np.ndarray, codes: np.ndarray, count: int) -> list[int] | None:
    """An order of labels with which the outputs of a network agree far better than with the order that is taken.

    Args:
        predicted: The output that is largest for each example, (n,).
        codes: The number of the label of each example in the order that is taken, (n,).
        count: Number of outputs.

    Returns:
        The number of the label of each output. None where no other order agrees with half of the labels, and with more
        labels than the order that is taken by three standard deviations of chance.

    >>> labels = np.arange(30) % 3
    >>> find_better_order((labels + 1) % 3, labels, 3), find_better_order(labels, labels, 3)
    ([2, 0, 1], None)
    """
    table = np.zeros((count, count), dtype=int)
    np.add.at(table, (predicted, codes), 1)
    outputs, labels = linear_sum_assignment(-table)
    best, own, n = table[outputs, labels].sum(), np.trace(table), len(codes)
    clear = n >= 4 * count and best >= n / 2 and best - own > 3 * np.sqrt(n)
    return labels.tolist() if clear else None


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
