"""What a command predicts: classes or numbers, whether the outputs of the network fit, and which label is which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from linnet.cli.data_files import Examples, Reading
from linnet.cli.network_output import NetworkOutput
from linnet.cli.task import FitData, PredictionTask, find_task, index_labels
from linnet.cli.terminal import UsageError


def found(y: list | np.ndarray, outputs: int, *, asked: str = "auto", head: str = "auto") -> PredictionTask:
    y = np.asarray(y)
    return find_task(nn.Linear(3, outputs), Examples(torch.ones(len(y), 3), y, "rows"), asked=asked, head=head)


def test_labels_in_one_column_are_labels():
    for y in ([2, 5, 2, 5], [[2], [5], [2], [5]]):
        task = found(y, 2)
        assert (task.kind, task.classes, task.outputs, task.new_head) == ("classification", (2, 5), 2, False)
        assert task.output_labels == [2, 5]


def test_numbers_need_an_output_for_each_column():
    for y, outputs, new in (
        ([0.5, 1.5], 1, False),
        ([[0.5], [1.5]], 1, False),
        ([[0.5], [1.5]], 2, True),
        ([[0.5, 1.0], [1.5, 2.0]], 2, False),
        ([[0.5, 1.0], [1.5, 2.0]], 1, True),
    ):
        task = found(y, outputs)
        assert (task.kind, task.classes, task.output_labels, task.new_head) == ("regression", (), [], new)
    assert found([0.5, 1.5], 1, head="new").new_head


def test_heads_that_fit_are_kept():
    # One output is the logit of the second of two classes.
    assert [found([0, 1, 0, 1], outputs).new_head for outputs in (1, 2, 3)] == [False, False, True]
    assert [found([0, 1, 0, 1], outputs, head="keep").new_head for outputs in (1, 2, 3)] == [False, False, False]
    assert found([0, 1, 0, 1], 3, head="keep").output_labels == [0, 1, 2]
    assert found([0, 1, 0, 1], 1).output_labels == [0, 1]
    assert found([0, 3, 0, 3], 3, head="keep").new_head and found([-1, 1, -1, 1], 3, head="keep").new_head
    assert found(["a", "b"], 3, head="keep").new_head and found(["a", "b"], 2, head="new").new_head


def test_targets_that_are_no_labels():
    with pytest.raises(UsageError, match=r"one target for each example, but there are 2\. Give one --target"):
        found([[0, 1], [1, 0]], 2, asked="classification")
    with pytest.raises(UsageError, match="needs labels, but the targets are numbers with fractions"):
        found([0.5, 1.0], 2, asked="classification")
    assert found([1.0, 2.0], 2, asked="classification").classes == (1.0, 2.0)
    with pytest.raises(UsageError, match=r"at least two classes, but all targets are 'a'\."):
        found(["a", "a"], 2)


def test_places_of_labels():
    assert index_labels(np.array(["b", "a", "b"]), ["a", "b"], "test.csv").tolist() == [1, 0, 1]
    with pytest.raises(
        UsageError, match=r"test\.csv has labels that are not among the classes: 'c'\. The classes are 'a', 'b'"
    ):
        index_labels(np.array(["b", "c"]), ["a", "b"], "test.csv")


@pytest.mark.parametrize(
    ("y", "names", "targets", "what"),
    [
        (np.array([[1], [2], [1], [2]]), ("kind",), ["kind"], "2 classes"),
        (np.array([[1, 2], [3, 4]]), ("a", "b"), ["a", "b"], "2 numbers"),
        (np.array([[1, 2], [3, 4]]), (), ["0", "1"], "2 numbers"),
        (np.array([0.5, 1.5]), (), ["0"], "a number"),
    ],
)
def test_what_a_fit_is_given(y, names, targets, what):
    train = Examples(torch.ones(len(y), 3), y, "rows")
    task = find_task(nn.Linear(3, 2), train, asked="auto", head="auto")
    data = FitData([nn.Linear(3, 2)], train, None, Reading(targets=names), task, NetworkOutput())
    assert data.targets == targets and data.what == what
    assert data.y.dtype == (y.dtype if task.classes else float) and data.y.ndim == (1 if task.classes else y.ndim)
