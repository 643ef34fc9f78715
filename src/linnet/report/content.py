"""What a report says, as plain data. This module knows neither estimators nor HTML."""

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
        why: The reason, in a sentence.
    """

    why: str


@dataclass(frozen=True)
class Classes:
    """Predicted classes of test examples.

    Attributes:
        probabilities: Class probabilities (n, c).
        labels: Class of each example (n,), as a number.
        names: Names of the c classes.
        before: Probabilities (n, c) of the network alone, or None.
        what: Name of one example.
    """

    probabilities: np.ndarray
    labels: np.ndarray
    names: Sequence[str]
    before: np.ndarray | None = None
    what: str = "test example"

    @property
    def right(self) -> np.ndarray:
        """Whether the most probable class is the true class, (n,)."""
        return self.probabilities.argmax(1) == self.labels


@dataclass(frozen=True)
class Numbers:
    """Predicted numbers of test examples.

    Attributes:
        mean: Predictions (n, c).
        std: Standard deviations (n, c) of an observation.
        target: True values (n, c).
        names: Names of the c numbers.
        before: Predictions (n, c) of the network alone, or None.
        what: Name of one example.
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
        xy: Positions (n, 2).
        groups: Label of each example, or None.
    """

    xy: np.ndarray
    groups: Sequence[str] | None = None


@dataclass(frozen=True)
class Linear:
    """The linear model beside the network itself with the same weights.

    Attributes:
        step: Changes (k,) of some outputs in the linear model.
        real: Changes (k,) of the same outputs in the network.
        error: Distance of both over all outputs, relative to the step.
        n: Number of examples that were compared.
        agreement: Share of these examples for which both predict the same class; None for numbers.
        drawn: Number of weights that were drawn from the posterior; 0 for the adapted weights.
        scores: Metrics of the network with the adapted weights, and of the linear model on the same examples.
        what: Name of one example.
        whole: Whether the network's own outputs are part of the linear model. Otherwise the model is the step alone.
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
    """How an example looks: a picture, a text, or the cells of a row.

    Attributes:
        name: Name of its file, or its number.
        picture: A data: address.
        text: Beginning of the text.
        cells: Names of columns and numbers.
    """

    name: str
    picture: str = ""
    text: str = ""
    cells: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Item:
    """An example and statements about it.

    Attributes:
        shown: The example.
        said: Titles and values of the statements.
        wrong: Whether the prediction is wrong.
    """

    shown: Shown
    said: Sequence[tuple[str, str]]
    wrong: bool = False


@dataclass(frozen=True)
class Group:
    """Examples that have something in common.

    Attributes:
        title: The headline.
        note: What the examples have in common, in a sentence.
        items: The examples.
    """

    title: str
    note: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues, descending.

    Attributes:
        values: Eigenvalues (k,).
        n: Number of examples.
        noise: Whether the unit is the noise. Data and prior then have equal weight at 1.
        explained: Share (k,) of the trace up to each eigenvalue, or None.
    """

    values: np.ndarray
    n: int
    noise: bool = True
    explained: np.ndarray | None = None


@dataclass(frozen=True)
class Evidence:
    """How the prior was chosen.

    Attributes:
        path: Log evidence after each step of the search.
        value: Log evidence of the chosen prior.
        blocks: Log evidence by the number of blocks that adapt, where several numbers were tried.
        chosen: The chosen number of blocks.
        scales: Prior scales by name.
    """

    path: Sequence[float]
    value: float | None
    blocks: Mapping[int, float] = field(default_factory=dict)
    chosen: int | None = None
    scales: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that a report says. None is for parts that do not apply, `Missing` for parts that are left out.

    Attributes:
        kind: What made the report, such as "linnet adapt".
        title: The headline.
        lede: What was done, in a sentence or two.
        scores: Metrics by method: first the network alone, last the model of the report.
        outcome: Predictions for the test data, or positions of the data in an embedding.
        linear: The linear model beside the network.
        examples: Groups of examples that are worth a look.
        influence: Training examples with the largest influence on predictions.
        spectrum: Eigenvalues, which show how many directions matter.
        relevance: Share of each layer in the adaptation.
        evidence: How the prior was chosen.
        plan: Plan of the Jacobian.
        facts: Further facts by name.
        record: The command, seed, versions, time.
        files: Names of the files beside the report.
        notes: Warnings of the fit.
    """

    kind: str
    title: str
    lede: str
    scores: Mapping[str, Mapping[str, float]] | Missing | None = None
    outcome: Classes | Numbers | Points | Missing | None = None
    linear: Linear | Missing | None = None
    examples: Sequence[Group] | Missing | None = None
    influence: Group | Missing | None = None
    spectrum: Eigenvalues | Missing | None = None
    relevance: Mapping[str, float] | Missing | None = None
    evidence: Evidence | Missing | None = None
    plan: Plan | Missing | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    notes: Sequence[str] = ()
