"""A report of a fitted estimator, from Python or from a command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linnet import metrics
from linnet._common.versions import versions
from linnet.jacobian.plan import Plan
from linnet.laplace.estimator import Laplace
from linnet.probability.likelihoods import Bernoulli, Categorical
from linnet.report import chosen, gather
from linnet.report.content import Classes, Missing, Numbers, Report
from linnet.report.examples import Inputs, inputs_of
from linnet.report.formatting import number
from linnet.report.gather import array, softmax
from linnet.report.html import page
from linnet.tangent.base import Tangent

NO_TEST = Missing("There is no test data, and on the data that it was fitted to a model always looks too good.")
NO_TRAIN = Missing("This takes the data that it was fitted to: pass train=(X, y).")

Outcome = Classes | Numbers | Missing


@dataclass(frozen=True)
class About:
    """What the numbers do not say.

    Attributes:
        kind: What made the report.
        title: The headline.
        lede: What was done.
        test: How test examples are shown.
        train: How training examples are shown.
        facts: More, by name.
        record: Command, seed, versions.
        names: Of the numbers that are predicted.
        notes: What the fit warned of.
    """

    kind: str
    title: str
    lede: str
    test: Inputs = field(default_factory=Inputs)
    train: Inputs = field(default_factory=Inputs)
    facts: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()
    notes: Sequence[str] = ()


def write(
    path: str | os.PathLike[str],
    estimator: Any,
    X: Any = None,
    y: Any = None,
    *,
    train: tuple[Any, Any] | None = None,
    title: str = "",
    names: Sequence[str] = (),
    columns: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> None:
    r"""One HTML file about a fitted TangentRegressor, TangentClassifier or Laplace, which opens offline.

    It holds metrics and calibration on test data, the linear model against the network itself, the surest and the
    least sure examples, those that predictions rest on, spectrum, layers, evidence and versions. What cannot be said
    is left out, with the reason in its place.

    Args:
        path: The file.
        estimator: Fitted.
        X: Test inputs that the estimator has not seen: tensors or arrays, or a dict of them.
        y: Their targets.
        train: The inputs and targets that it was fitted to.
        title: The headline.
        names: Of the classes, or of the numbers that are predicted.
        columns: Of the inputs, for tables.
        texts: Of the test inputs, where they were made from texts.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> import linnet
        >>> X = torch.linspace(-2, 2, 20)[:, None]
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        >>> reg = linnet.TangentRegressor(model).fit(X, torch.sin(X[:, 0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/report.html", reg, X + 0.1, torch.sin(X[:, 0] + 0.1), train=(X, torch.sin(X[:, 0])))
        ...     Path(f"{folder}/report.html").read_text()[:16]
        '<!doctype html>\n'
    """
    if not isinstance(estimator, Tangent | Laplace):
        raise TypeError(
            f"A report needs a fitted TangentRegressor, TangentClassifier or Laplace; got {type(estimator)}."
        )
    if (X is None) != (y is None):
        raise ValueError("Test data are inputs and targets; give both X and y, or neither.")
    outcome: Outcome = NO_TEST if X is None else outcome_of(estimator, X, y, names)
    kind = type(estimator).__name__
    lin = estimator.lin_
    n = "" if X is None else f" and tested on {len(array_of(y)):,} examples"
    lede = f"{kind} around a network, {lin.p:,} of whose parameters take part, on {lin.device} in {lin.dtype}{n}."
    about = About(
        kind,
        title or ("Error bars for a network" if isinstance(estimator, Laplace) else "An adapted network"),
        lede,
        inputs_of(X, columns=columns, texts=texts),
        inputs_of(None if train is None else train[0], columns=columns),
        record={"seed": estimator.seed, "device": str(lin.device), "versions": versions()},
        names=names,
    )
    page.save(path, assemble(estimator, about, outcome, X=X, train=train))


def assemble(
    estimator: Any,
    about: About,
    outcome: Outcome,
    *,
    X: Any = None,
    train: tuple[Any, Any] | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    plan: Plan | None = None,
) -> Report:
    """All that can be said about a fitted estimator.

    Args:
        estimator: Fitted.
        about: What the numbers do not say.
        outcome: Predictions for test data.
        X: Its inputs.
        train: The inputs and targets that the estimator was fitted to.
        scores: Metrics of the outcome, where they are known already.
        plan: Of the Jacobian of the training data; by default it is made.
    """
    if X is None and isinstance(outcome, Missing):
        outcome = left_out_one(estimator, train, about.names) or outcome
    at, what = (X, "test example") if X is not None else (None if train is None else train[0], "training example")
    known = isinstance(outcome, Classes | Numbers)
    labels = [] if train is None else labels_of(estimator, train[1], outcome)
    return Report(
        about.kind,
        about.title,
        about.lede,
        outcome if isinstance(outcome, Missing) else scores or scores_of(outcome),
        outcome,
        NO_TRAIN if at is None else gather.linear(estimator, at, outcome if X is not None else None, what=what),
        chosen.certain(outcome, about.test if X is not None else about.train) if known else outcome,  # type: ignore[arg-type]
        NO_TRAIN if train is None else chosen.influential(estimator, at, train, about.train, labels, what=what),
        NO_TRAIN if train is None else gather.spectrum(estimator, train),
        gather.relevance(estimator),
        gather.evidence(estimator),
        plan or (NO_TRAIN if train is None else estimator._jacobian(train[0]).plan),
        about.facts,
        about.record,
        notes=about.notes,
    )


# Predictions and their scores.


def outcome_of(estimator: Any, X: Any, y: Any, names: Sequence[str] = ()) -> Outcome:
    """Predictions for test data, beside those of the network alone."""
    trained = getattr(estimator, "model", None) is not None
    f = estimator._jacobian(X).outputs() if trained else None
    likelihood = getattr(estimator, "likelihood_", None)
    if not isinstance(likelihood, Bernoulli | Categorical):
        mean, std = (_columns(array(part)) for part in estimator.predict(X, return_std=True, noise=True))
        target = _columns(array(y))
        before = None if f is None or f.shape[1] != mean.shape[1] else array(f)
        return Numbers(mean, std, target, list(names) or default_names(mean.shape[1]), before)
    p = array(estimator.predict_proba(X))
    known = getattr(estimator, "classes_", np.arange(p.shape[1]))
    found = array_of(y)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if p.ndim != 2 or found.ndim != 1:
        return Missing("Reports are about one label for each example; here are several.")
    place = {label: i for i, label in enumerate(known.tolist())}
    unknown = sorted({str(label) for label in found.tolist() if label not in place})
    if unknown:
        raise ValueError(f"The test data have labels that the estimator does not know: {', '.join(unknown[:6])}.")
    labels = np.array([place[label] for label in found.tolist()])
    return Classes(p, labels, list(names) or [str(label) for label in known], None if f is None else softmax(f))


def default_names(count: int) -> list[str]:
    """Of numbers that have none: nothing for one, and else their order."""
    return [""] if count == 1 else [str(j + 1) for j in range(count)]


def left_out_one(estimator: Any, train: tuple[Any, Any] | None, names: Sequence[str] = ()) -> Numbers | None:
    """Predictions of each training example from all others, where they come in closed form."""
    if train is None or not hasattr(estimator, "loo_"):
        return None
    found = gather.attempt(lambda: estimator.loo_)
    if isinstance(found, Missing):
        return None
    mean, std, y = (_columns(array(part)) for part in (found.mean, found.std, train[1]))
    f = array(estimator._jacobian(train[0]).outputs())
    before = f if estimator.model is not None and f.shape == mean.shape else None
    return Numbers(mean, std, y, list(names) or default_names(mean.shape[1]), before, "left-out training example")


def scores_of(outcome: Classes | Numbers) -> dict[str, dict[str, float]]:
    """Metrics of the network alone, where it is there to compare, and of the model."""
    if isinstance(outcome, Classes):
        found = {"this model": metrics.classification(outcome.probabilities, outcome.labels)}
        if outcome.before is not None:
            found = {"the network alone": metrics.classification(outcome.before, outcome.labels)} | found
        return found
    found = {"this model": metrics.regression(outcome.mean, outcome.std, outcome.target)}
    if outcome.before is not None:
        found = {"the network alone": {"rmse": metrics.rmse(outcome.before, outcome.target)}} | found
    return found


def labels_of(estimator: Any, y: Any, outcome: Any) -> list[str]:
    """Targets in words; numbers of classes by the names of these."""
    found = array_of(y)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 2:
        return [", ".join(number(float(x)) for x in row[:4]) for row in found]
    if isinstance(estimator, Laplace) and isinstance(outcome, Classes):
        return [outcome.names[int(label)] for label in found]
    return [number(float(x)) for x in found] if found.dtype.kind == "f" else [str(x) for x in found.tolist()]


def array_of(y: Any) -> np.ndarray:
    """Labels or numbers as they are."""
    return y.detach().cpu().numpy() if hasattr(y, "detach") else np.asarray(y)


def _columns(x: np.ndarray) -> np.ndarray:
    return x[:, None] if x.ndim == 1 else x
