"""Examples that are worth a look: the surest, the least sure, and those that predictions rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linnet.metrics import Z95
from linnet.report import diagnostics
from linnet.report.content import Classes, Group, Item, Missing, Numbers
from linnet.report.examples import Inputs
from linnet.report.formatting import count, number, percent
from linnet.report.gather import array, attempt, some

SHOWN = 6
"""Examples of a kind that are shown."""

ENTRIES = 2**24
"""Of the covariances between test and training examples that are held at once."""

EXACT = 2000
"""Rows (examples times outputs) up to which leaving out is exact, which takes a covariance for each of them."""

ASKED = 200
"""Test examples whose predictions influence is measured on, at most."""


def certain(outcome: Classes | Numbers, inputs: Inputs) -> list[Group]:
    """The test examples that it is surest of, those that it is least sure of, and its worst mistakes."""
    if isinstance(outcome, Numbers):
        return _certain_numbers(outcome, inputs)
    confidence = outcome.probabilities.max(1)
    order = np.argsort(-confidence, kind="stable")
    wrong = [i for i in order if not outcome.right[i]][:SHOWN]

    def group(title: str, note: str, index: Sequence[int] | np.ndarray) -> Group:
        return Group(title, note, [_class_item(outcome, inputs, int(i)) for i in index])

    return [
        group("Surest of", "The largest probability for one class.", order[:SHOWN]),
        group("Least sure of", "Look at these first where more labels can be had.", order[::-1][:SHOWN]),
        group("Surest mistakes", "Wrong, and sure of it: errors of the labels are often among these.", wrong),
    ]


def _class_item(told: Classes, inputs: Inputs, i: int) -> Item:
    best = int(told.probabilities[i].argmax())
    said = [
        ("predicted", f"{told.names[best]}"),
        ("sure", percent(float(told.probabilities[i, best]))),
        ("true", told.names[int(told.labels[i])]),
    ]
    return Item(inputs.shown(i), said, wrong=not bool(told.right[i]))


def _certain_numbers(told: Numbers, inputs: Inputs) -> list[Group]:
    std = np.sqrt(np.square(told.std).mean(1))
    order = np.argsort(std, kind="stable")
    off = np.abs((told.mean - told.target) / told.std).max(1)

    def group(title: str, note: str, index: Sequence[int] | np.ndarray) -> Group:
        return Group(title, note, [_number_item(told, inputs, int(i)) for i in index])

    return [
        group("Surest of", "The narrowest error bars.", order[:SHOWN]),
        group("Least sure of", "The widest error bars: look here where more data can be had.", order[::-1][:SHOWN]),
        group(
            "Largest surprises",
            "The true value is this many standard deviations off: errors of the data are often among these.",
            np.argsort(-off, kind="stable")[:SHOWN],
        ),
    ]


def _number_item(told: Numbers, inputs: Inputs, i: int) -> Item:
    said = []
    for j, name in enumerate(list(told.names)[:2]):
        ending = f" {name}" if len(told.names) > 1 else ""
        mean, std, y = (float(x[i, j]) for x in (told.mean, told.std, told.target))
        said += [(f"predicted{ending}", f"{number(mean)} ± {number(std)}"), (f"true{ending}", number(y))]
    off = float(np.abs((told.mean[i] - told.target[i]) / told.std[i]).max())
    return Item(inputs.shown(i), [*said, ("off by", f"{off:.1f} sd")], wrong=off > Z95)


def influential(
    estimator: Any, X: Any, train: tuple[Any, Any], inputs: Inputs, labels: Sequence[str], *, what: str = "test example"
) -> Group | Missing:
    """Training examples that the predictions at X rest on most.

    Args:
        estimator: Fitted.
        X: Inputs whose predictions they are.
        train: Inputs and targets that it was fitted to.
        inputs: How the training examples are shown.
        labels: Of them.
        what: One of the inputs X.
    """
    return attempt(lambda: _influential(estimator, X, train, inputs, labels, what))


def _influential(
    estimator: Any, X: Any, train: tuple[Any, Any], inputs: Inputs, labels: Sequence[str], what: str
) -> Group:
    n = len(labels)
    if estimator.posterior_.is_point:
        raise ValueError("A mode alone has no posterior that would tell what rests on what; use another inference.")
    if estimator.posterior_.known_from_samples:
        raise ValueError(
            "The posterior is known from samples alone, whose noise would decide which examples come first."
        )
    c = estimator._jacobian(some(X, 2)[0]).c
    few, index = some(X, min(ASKED, max(1, ENTRIES // (n * c * c))))
    if hasattr(estimator, "influence") and n * c <= EXACT:
        parts = array(estimator.influence(few))
        how = "how far the prediction would move if the example were left out, exactly"
    else:
        fit = diagnostics.fitted(estimator, *train)
        parts = array(diagnostics.influence(fit, estimator.lin_.jacobian(few, progress=False)))
        how = "how far an output would move if the example were left out, to first order"
    size = np.sqrt(np.square(parts).reshape(-1, n).mean(0))
    order = np.argsort(-size, kind="stable")[:SHOWN]
    called = "target" if hasattr(estimator, "noise_") and estimator.noise_ is not None else "label"
    items = [
        Item(inputs.shown(int(i)), [("moves by", number(float(size[i]))), (called, labels[int(i)])]) for i in order
    ]
    note = f"Training examples that predictions rest on most: {how}; root mean square over {count(len(index), what)}."
    return Group("Most influential training examples", note, items)
