"""What is to be predicted: classes or numbers, and which class is which output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from linnet._common import messages
from linnet.cli.data_files.examples import Examples
from linnet.cli.terminal import UsageError, as_usage
from linnet.data.sources import as_source
from linnet.network import checks

FEW = 50
"""Most different whole numbers that are taken for classes."""


@dataclass(frozen=True)
class Goal:
    """What the network is to predict.

    Attributes:
        task: "classification" or "regression".
        why: How that is known.
        classes: The label of each class, sorted; none for regression.
        outputs: Of the network.
        new_head: Whether it needs a head of its own for them.
    """

    task: str
    why: str
    classes: tuple[Any, ...]
    outputs: int
    new_head: bool


def task_of(y: np.ndarray, asked: str) -> tuple[str, str]:
    """Classification or regression, and why.

    >>> task_of(np.array(["a", "b"]), "auto")
    ('classification', 'the targets are text')
    >>> task_of(np.array([0.5, 1.0]), "auto")[0], task_of(np.array([3, 4, 3, 4]), "auto")[0]
    ('regression', 'classification')
    """
    text = y.dtype.kind not in "biuf"
    if asked == "regression" and text:
        raise UsageError(f"--task regression needs numbers, and the targets are text such as {str(y.flat[0])!r}.")
    if asked != "auto":
        return asked, "--task says so"
    if text:
        return "classification", "the targets are text"
    if y.dtype.kind == "b" and y.ndim == 1:
        return "classification", "the targets are true or false"
    if y.ndim == 2 and y.shape[1] > 1:
        return "regression", "there are several targets"
    if y.dtype.kind == "f":
        return "regression", "the targets are numbers with fractions"
    count = len(np.unique(y))
    if count <= FEW and 2 * count <= y.size:
        return "classification", f"the targets are {count} whole numbers"
    return "regression", f"the targets are {count} different whole numbers"


def goal_of(model: nn.Module, data: Examples, *, task: str, head: str) -> Goal:
    """What to predict, and whether the network's outputs serve.

    Args:
        model: The network.
        data: With targets.
        task: "auto", "classification" or "regression".
        head: "auto" for a new head where there are not as many outputs as classes or numbers; "new" in any case; "keep"
            where labels that are numbers of outputs are meant as such, though not all of them occur.
    """
    assert data.y is not None
    found, why = task_of(data.y, task)
    y = data.y[:, 0] if data.y.ndim == 2 and data.y.shape[1] == 1 else data.y
    outputs = outputs_of(model, data)
    if found == "regression":
        needed = y.shape[1] if y.ndim == 2 else 1
        return Goal(found, why, (), outputs, head == "new" or needed != outputs)
    if y.ndim != 1:
        raise UsageError(f"Classes need one target for each example; there are {y.shape[1]}. Give one --target.")
    if y.dtype.kind == "f" and bool((y != np.round(y)).any()):
        raise UsageError("--task classification needs labels, and the targets are numbers with fractions.")
    classes = tuple(np.unique(y).tolist())
    if len(classes) < 2:
        raise UsageError(f"Classification needs at least two classes; all targets are {classes[0]!r}.")
    serves = len(classes) == _count(outputs) or (head == "keep" and _are_outputs(classes, outputs))
    return Goal(found, why, classes, outputs, head == "new" or not serves)


def _count(outputs: int) -> int:
    """Classes of so many outputs: one output is the logit of the second of two."""
    return max(2, outputs)


def _are_outputs(classes: tuple[Any, ...], outputs: int) -> bool:
    """Whether the labels are numbers of outputs."""
    return all(type(label) is int and 0 <= label < _count(outputs) for label in classes)


def classes_of(goal: Goal) -> list[Any]:
    """The label of each output of a network that is kept as it is."""
    if _are_outputs(goal.classes, goal.outputs):
        return list(range(_count(goal.outputs)))
    return list(goal.classes)


def positions(y: np.ndarray, classes: list[Any], what: str) -> np.ndarray:
    """The number of each label among the classes."""
    known = {label: i for i, label in enumerate(classes)}
    unknown = [label for label in np.unique(y).tolist() if label not in known]
    if unknown:
        raise UsageError(
            f"{what} has labels that are not among the classes: {messages.listing([str(label) for label in unknown])}; "
            f"the classes are {messages.listing([str(label) for label in classes], limit=12)}."
        )
    return np.array([known[label] for label in y.tolist()])


def trained_on(train: Examples, classes: list[Any]) -> np.ndarray:
    """Training targets as `linnet.Laplace` takes them: numbers of classes, or numbers."""
    assert train.y is not None
    if classes:
        return positions(train.y.reshape(-1), classes, "The data")
    return np.asarray(train.y).astype(float)


def wanted(goal: Goal, train: Examples) -> str:
    """What is to be predicted, in words."""
    assert train.y is not None
    if goal.classes:
        return f"{len(goal.classes)} classes"
    return f"{train.y.shape[1] if train.y.ndim == 2 else 1} numbers"


def outputs_of(model: nn.Module, data: Examples, what: str = "these data") -> int:
    """How many outputs the network has, from a look at two examples of ``what``."""
    device = next(model.parameters()).device
    with as_usage(f"The network does not take {what}: "):
        batch = next(iter(as_source(data.first(2), model.forward).batches(2))).to(device)
        with torch.no_grad():
            out = checks.output_tensor(model(*batch.args, **batch.kwargs))
    return 1 if out.ndim == 1 else out.shape[1]
