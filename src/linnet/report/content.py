"""What a report says, as plain data. This module knows neither estimators nor HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linnet.jacobian import Plan


@dataclass(frozen=True)
class Missing:
    """A part that is left out."""

    why: str  # the reason, in a sentence


@dataclass(frozen=True)
class Classes:
    """Predicted classes of test examples."""

    probabilities: np.ndarray  # class probabilities (n, c)
    labels: np.ndarray  # class of each example (n,), as a number
    names: Sequence[str]  # names of the c classes
    before: np.ndarray | None = None  # probabilities (n, c) of the network alone, or None
    what: str = "test example"  # name of one example
    guess: np.ndarray | None = None  # share (c,) of each class in the training data, or None

    @property
    def right(self) -> np.ndarray:
        """Whether the most probable class is the true class, (n,)."""
        return self.probabilities.argmax(1) == self.labels


@dataclass(frozen=True)
class Numbers:
    """Predicted numbers of test examples."""

    mean: np.ndarray  # predictions (n, c)
    std: np.ndarray  # standard deviations (n, c) of an observation
    target: np.ndarray  # true values (n, c)
    names: Sequence[str]  # names of the c numbers
    before: np.ndarray | None = None  # predictions (n, c) of the network alone, or None
    what: str = "test example"  # name of one example
    guess: np.ndarray | None = None  # means and standard deviations (2, c) of the training targets, or None


@dataclass(frozen=True)
class Points:
    """Examples on the first two components of an embedding."""

    xy: np.ndarray  # positions (n, 2)
    groups: Sequence[str] | None = None  # label of each example, or None


@dataclass(frozen=True)
class Linear:
    """The linear model beside the network itself with the same weights."""

    step: np.ndarray  # changes (k,) of some outputs in the linear model
    real: np.ndarray  # changes (k,) of the same outputs in the network
    error: float  # distance of both over all outputs, relative to the step
    n: int  # number of examples that were compared
    agreement: float | None = None  # share of these examples for which both predict the same class; None for numbers
    drawn: int = 0  # number of weights that were drawn from the posterior; 0 for the adapted weights
    # metrics of the network with the adapted weights, and of the linear model on the same examples
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    what: str = "test example"  # name of one example
    # Whether the network's own outputs are part of the linear model. Otherwise the model is the step alone.
    whole: bool = True


@dataclass(frozen=True)
class Shown:
    """How an example looks: a picture, a text, or the cells of a row."""

    name: str  # name of its file, or its number
    picture: str = ""  # a data: address
    text: str = ""  # beginning of the text
    cells: Sequence[tuple[str, str]] = ()  # names of columns and numbers


@dataclass(frozen=True)
class Item:
    """An example and statements about it."""

    shown: Shown  # the example
    said: Sequence[tuple[str, str]]  # titles and values of the statements
    wrong: bool = False  # whether the prediction is wrong


@dataclass(frozen=True)
class Group:
    """Examples that have something in common."""

    title: str  # the headline
    note: str  # what the examples have in common, in a sentence
    items: Sequence[Item]  # the examples


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues, descending."""

    values: np.ndarray  # eigenvalues (k,)
    n: int  # number of examples
    noise: bool = True  # Whether the unit is the noise. Data and prior then have equal weight at 1.
    explained: np.ndarray | None = None  # share (k,) of the trace up to each eigenvalue, or None


@dataclass(frozen=True)
class Evidence:
    """How the prior was chosen."""

    path: Sequence[float]  # log evidence after each step of the search
    value: float | None  # log evidence of the chosen prior
    # log evidence by the number of blocks that adapt, where several numbers were tried
    blocks: Mapping[int, float] = field(default_factory=dict)
    chosen: int | None = None  # the chosen number of blocks
    scales: Mapping[str, float] = field(default_factory=dict)  # prior scales by name
    selection: Sequence[Any] = ()  # rows of what else was compared, such as mean functions; dataclasses of one kind


@dataclass(frozen=True)
class Report:
    """Everything that a report says. None is for parts that do not apply, `Missing` for parts that are left out."""

    kind: str  # what made the report, such as "linnet adapt"
    title: str  # the headline
    lede: str  # what was done, in a sentence or two
    # metrics by method: first the network alone, last the model of the report
    scores: Mapping[str, Mapping[str, float]] | Missing | None = None
    # predictions for the test data, or positions of the data in an embedding
    outcome: Classes | Numbers | Points | Missing | None = None
    linear: Linear | Missing | None = None  # the linear model beside the network
    examples: Sequence[Group] | Missing | None = None  # groups of examples that are worth a look
    influence: Group | Missing | None = None  # training examples with the largest influence on predictions
    spectrum: Eigenvalues | Missing | None = None  # eigenvalues, which show how many directions matter
    relevance: Mapping[str, float] | Missing | None = None  # share of each layer in the adaptation
    evidence: Evidence | Missing | None = None  # how the prior was chosen
    plan: Plan | Missing | None = None  # plan of the Jacobian
    facts: Mapping[str, str] = field(default_factory=dict)  # further facts by name
    record: Mapping[str, Any] = field(default_factory=dict)  # the command, seed, versions, time
    files: Sequence[str] = ()  # names of the files beside the report
    notes: Sequence[str] = ()  # warnings of the fit
