"""What a report says, as plain data: nothing here knows of estimators, and nothing of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linnet.jacobian.plan import Plan


@dataclass(frozen=True)
class Missing:
    """A part that is left out.

    Attributes:
        why: In a sentence.
    """

    why: str


@dataclass(frozen=True)
class Classes:
    """Predicted classes of test examples.

    Attributes:
        probabilities: (n, c).
        labels: (n,), the number of each example's class.
        names: (c,), of the classes.
        before: (n, c), the probabilities of the network alone; None without.
        what: One of the examples.
    """

    probabilities: np.ndarray
    labels: np.ndarray
    names: Sequence[str]
    before: np.ndarray | None = None
    what: str = "test example"

    @property
    def right(self) -> np.ndarray:
        """(n,), whether the most probable class is the right one."""
        return self.probabilities.argmax(1) == self.labels


@dataclass(frozen=True)
class Numbers:
    """Predicted numbers of test examples.

    Attributes:
        mean: (n, c).
        std: (n, c), of an observation.
        target: (n, c).
        names: (c,), of the numbers.
        before: (n, c), what the network alone says; None without.
        what: One of the examples.
    """

    mean: np.ndarray
    std: np.ndarray
    target: np.ndarray
    names: Sequence[str]
    before: np.ndarray | None = None
    what: str = "test example"


@dataclass(frozen=True)
class Points:
    """Examples on the first two components of an embedding.

    Attributes:
        xy: (n, 2).
        groups: (n,), the label of each; None without.
    """

    xy: np.ndarray
    groups: Sequence[str] | None = None


@dataclass(frozen=True)
class Linear:
    """The linear model next to the network itself with the same weights.

    Attributes:
        step: (k,), how far outputs move in the linear model, some of them.
        real: (k,), how far the same outputs of the network move.
        error: The distance of the two, relative to the step; over all outputs.
        n: Examples that were compared.
        agreement: The share of them whose most probable class is the same; None for numbers.
        drawn: How many weights were drawn from the posterior; 0 where the weights are the adapted ones.
        scores: Metrics of the network with the adapted weights, and of the linear model on the same examples.
        what: One of the examples.
        whole: Whether the network's own outputs are part of the linear model, which is else the step alone.
    """

    step: np.ndarray
    real: np.ndarray
    error: float
    n: int
    agreement: float | None = None
    drawn: int = 0
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    what: str = "test example"
    whole: bool = True


@dataclass(frozen=True)
class Shown:
    """What an example looks like: a picture, a text, or the cells of a row.

    Attributes:
        name: Of its file, or its number.
        picture: A data: address.
        text: Its beginning.
        cells: Names of columns and numbers.
    """

    name: str
    picture: str = ""
    text: str = ""
    cells: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Item:
    """An example and what is said about it.

    Attributes:
        shown: The example.
        said: Titles and values.
        wrong: Whether the prediction is wrong.
    """

    shown: Shown
    said: Sequence[tuple[str, str]]
    wrong: bool = False


@dataclass(frozen=True)
class Group:
    """Examples that have something in common.

    Attributes:
        title: What.
        note: In a sentence.
        items: The examples.
    """

    title: str
    note: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, descending.

    Attributes:
        values: (k,).
        n: Of how many examples.
        noise: Whether they are in units of the noise, so that one is where data and prior count alike.
        explained: (k,), the share of the trace so far; None where that is not the point.
    """

    values: np.ndarray
    n: int
    noise: bool = True
    explained: np.ndarray | None = None


@dataclass(frozen=True)
class Evidence:
    """How the prior was chosen.

    Attributes:
        path: The log evidence after each step of the search.
        value: In the end.
        blocks: The log evidence by how many blocks adapt, where that was tried.
        chosen: How many were.
        scales: Prior scales by name.
    """

    path: Sequence[float]
    value: float | None
    blocks: Mapping[int, float] = field(default_factory=dict)
    chosen: int | None = None
    scales: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All that a report says. None is for what does not apply, `Missing` for what is left out.

    Attributes:
        kind: What made it: "linnet adapt".
        title: The headline.
        lede: What was done, in a sentence or two.
        scores: Metrics by method, the last of which the report is about; the first is the network alone.
        outcome: Predictions for the test data, or where an embedding puts the data.
        linear: Whether the network is linear here.
        examples: The surest, the least sure, ...
        influence: Training examples that predictions rest on most.
        spectrum: How many directions matter.
        relevance: Each layer's share in the adaptation.
        evidence: How the prior was chosen.
        plan: Of the Jacobian.
        facts: What else there is to know, by name.
        record: The command, seed, versions, time.
        files: Written beside the report.
        notes: What the fit warned of.
    """

    kind: str
    title: str
    lede: str
    scores: Mapping[str, Mapping[str, float]] | Missing | None = None
    outcome: Classes | Numbers | Points | Missing | None = None
    linear: Linear | Missing | None = None
    examples: Sequence[Group] | Missing | None = None
    influence: Group | Missing | None = None
    spectrum: Spectrum | Missing | None = None
    relevance: Mapping[str, float] | Missing | None = None
    evidence: Evidence | Missing | None = None
    plan: Plan | Missing | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    notes: Sequence[str] = ()
