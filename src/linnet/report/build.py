"""From a fitted estimator and data to what a report says about them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from linnet import metrics
from linnet._common import find_versions
from linnet._estimator import Linearity, as_labels, as_targets, members_of
from linnet.jacobian import Plan
from linnet.laplace import Laplace
from linnet.metrics import Z95
from linnet.probability import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    KnownNoise,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Sites,
    Weighted,
)
from linnet.report.content import Classes, Eigenvalues, Evidence, Group, Item, Linear, Missing, Numbers, Report
from linnet.report.diagnostics import Fit, compute_influence, compute_spectrum
from linnet.report.examples import Inputs, show_inputs
from linnet.report.formatting import count, number, percent
from linnet.report.html import page
from linnet.tangent import Tangent, TangentClassifier, TangentRegressor

NO_TEST = Missing("There are no test data, and a model always looks too good on the data that it was fitted to.")
NO_TRAIN = Missing("This needs the training data: pass train=(X, y).")

EXACT = 2000
"""Rows (examples times outputs) up to which influence is exact. Exact influence needs a covariance for each row."""

MEAN, MAJORITY = "predict the mean", "predict the majority"
"""Names of guesses that know the training targets alone: their mean and spread, or the share of each class."""

SHOWN = 6
"""Number of examples of a kind that are shown."""

Outcome = Classes | Numbers | Missing
T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """What a report says besides the numbers."""

    kind: str  # what made the report
    title: str  # the headline
    lede: str  # what was done
    test: Inputs = field(default_factory=Inputs)  # how test examples are shown
    train: Inputs = field(default_factory=Inputs)  # how training examples are shown
    facts: Mapping[str, str] = field(default_factory=dict)  # further facts by name
    record: Mapping[str, Any] = field(default_factory=dict)  # command, seed, versions
    names: Sequence[str] = ()  # names of the numbers that are predicted
    notes: Sequence[str] = ()  # warnings of the fit


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
    r"""Write one HTML file about a fitted TangentRegressor, TangentClassifier or Laplace. The file opens offline.

    The report holds metrics and calibration on test data, the linear model against the network itself, the examples
    with the highest and the lowest confidence, the most influential training examples, spectrum, layers, evidence and
    versions. A part that cannot be made is left out, and the report says why.

    Args:
        path: The file.
        estimator: The fitted estimator.
        X: Test inputs that the estimator has not seen: tensors or arrays, or a dict of them.
        y: Targets of the test inputs.
        train: Inputs and targets that the estimator was fitted to.
        title: The headline.
        names: Names of the classes, or of the numbers that are predicted.
        columns: Names of the input columns, for tables.
        texts: Texts from which the test inputs were made.

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
        raise ValueError("Test data are inputs and targets: give both X and y, or neither.")
    outcome: Outcome = NO_TEST if X is None else predict_outcome(estimator, X, y, names)
    members = members_of(estimator)
    kind, lin = type(estimator).__name__, members[0].lin_
    n = "" if X is None else f" The model was tested on {len(_keep_labels(y)):,} examples."
    around = "a network" if len(members) == 1 else f"{len(members)} networks"
    lede = f"{kind} around {around}, with {lin.p:,} parameters, on {lin.device} in {lin.dtype}.{n}"
    about = About(
        kind,
        title or ("Error bars for a network" if isinstance(estimator, Laplace) else "An adapted network"),
        lede,
        show_inputs(X, columns=columns, texts=texts),
        show_inputs(None if train is None else train[0], columns=columns),
        record={"seed": estimator.seed, "device": str(lin.device), "versions": find_versions()},
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
    """Everything that a report says about a fitted estimator.

    Args:
        estimator: The fitted estimator.
        about: What the report says besides the numbers.
        outcome: Predictions for test data.
        X: Test inputs.
        train: Inputs and targets that the estimator was fitted to.
        scores: Metrics of the outcome, if they are known already.
        plan: Plan of the Jacobian of the training data; by default it is made.
    """
    if X is None and isinstance(outcome, Missing):
        outcome = _leave_one_out(estimator, train, about.names) or outcome
    if train is not None and not isinstance(outcome, Missing) and outcome.guess is None:
        outcome = _guess(estimator, outcome, _keep_labels(train[1]))
    at, what = (X, "test example") if X is not None else (None if train is None else train[0], "training example")
    labels = [] if train is None else _name_targets(estimator, train[1], outcome)
    inputs = about.train if X is None else about.test
    first, facts = members_of(estimator)[0], dict(about.facts)
    if first is not estimator:
        facts |= _list_members(estimator)
    return Report(
        about.kind,
        about.title,
        about.lede,
        outcome if isinstance(outcome, Missing) else scores or score_outcome(outcome),
        outcome,
        NO_TRAIN if at is None else compare_models(first, at, outcome if X is not None else None, what=what),
        outcome if isinstance(outcome, Missing) else group_by_confidence(outcome, inputs),
        NO_TRAIN if train is None else find_influential(first, at, train, about.train, labels, what=what),
        NO_TRAIN if train is None else find_eigenvalues(first, train),
        _find_relevance(estimator),
        find_evidence(estimator),
        plan or (NO_TRAIN if train is None else first._jacobian(train[0]).plan),
        facts,
        about.record,
        notes=about.notes,
    )


def attempt(make: Callable[[], T]) -> T | Missing:
    """Make a part of a report. If this fails, the text of the error takes its place."""
    try:
        return make()
    except (ValueError, TypeError, NotImplementedError, ArithmeticError, MemoryError) as error:
        return Missing(str(error))


# Predictions and their scores.


def predict_outcome(estimator: Any, X: Any, y: Any, names: Sequence[str] = ()) -> Outcome:
    """Predictions for test data, beside the predictions of the network alone."""
    trained = getattr(estimator, "model", None) is not None
    f = compute_outputs(estimator, X) if trained else None
    likelihood = getattr(estimator, "likelihood_", None)
    if likelihood is not None and not isinstance(
        likelihood, Bernoulli | Categorical | Gaussian | Heteroscedastic | Sites
    ):
        f = None  # outputs are no predictions: logarithms of means, or a number that thresholds cut into classes
        if not isinstance(likelihood, Ordinal | Poisson | NegativeBinomial):
            return Missing(f"Reports judge classes, counts and numbers with a known noise; got {likelihood!r}.")
    if isinstance(likelihood, Poisson | NegativeBinomial):
        predict = estimator.predict_mean if isinstance(estimator, Laplace) else estimator.predict
        mean, std = predict(X, return_std=True, noise=True)
        return make_numbers(to_array(mean), to_array(std), to_array(y), names, None)
    if not isinstance(likelihood, Bernoulli | Categorical | Ordinal):
        mean, std = estimator.predict(X, return_std=True, noise=True)
        return make_numbers(to_array(mean), to_array(std), to_array(y), names, f)
    p, found = to_array(estimator.predict_proba(X)), _keep_labels(y)
    if p.ndim != 2 or found.ndim != 1:
        return Missing("Reports need one label for each example, but these data have several.")
    known = _find_classes(estimator, p.shape[1])
    unknown = sorted({str(label) for label in found.tolist() if label not in known})
    if unknown:
        raise ValueError(f"The test data have labels that the estimator does not know: {', '.join(unknown[:6])}.")
    labels = np.array([known[label] for label in found.tolist()])
    return make_classes(p, labels, list(names) or [str(label) for label in known], f)


def compute_outputs(estimator: Any, X: Any) -> Tensor:
    """The outputs of the network alone at X, (n, c); of several networks those of their mean or mean probabilities."""
    found = torch.stack([member._jacobian(X).outputs() for member in members_of(estimator)])
    if len(found) == 1 or not isinstance(getattr(estimator, "likelihood_", None), Bernoulli | Categorical):
        return found.mean(0)
    return found.sigmoid().mean(0).logit() if found.shape[2] == 1 else found.softmax(2).mean(0).log()


def _find_classes(estimator: Any, count: int) -> dict[Any, int]:
    """The place of each label among the classes."""
    return {label: i for i, label in enumerate(getattr(estimator, "classes_", np.arange(count)).tolist())}


def make_classes(p: Any, labels: np.ndarray, names: Sequence[str], outputs: Tensor | None) -> Classes:
    """Predicted classes beside the classes that the outputs (n, c) of the network say."""
    return Classes(p, labels, names, None if outputs is None else softmax(outputs))


def make_numbers(mean: Any, std: Any, target: Any, names: Sequence[str], outputs: Tensor | None) -> Numbers:
    """Predicted numbers beside the outputs (n, c) of the network, where these have the same shape."""
    mean, std, target = (np.asarray(x, dtype=float).reshape(len(x), -1) for x in (mean, std, target))
    f, c = None if outputs is None else to_array(outputs), mean.shape[1]
    default = [""] if c == 1 else [str(j + 1) for j in range(c)]
    return Numbers(mean, std, target, list(names) or default, f if f is not None and f.shape == mean.shape else None)


def _leave_one_out(estimator: Any, train: tuple[Any, Any] | None, names: Sequence[str]) -> Numbers | None:
    """Predictions of each training example from all other examples, where they have a closed form."""
    if train is None or not hasattr(estimator, "loo_"):
        return None
    found = attempt(lambda: estimator.loo_)
    if isinstance(found, Missing):
        return None
    f = None if estimator.model is None else compute_outputs(estimator, train[0])
    told = make_numbers(to_array(found.mean), to_array(found.std), to_array(train[1]), names, f)
    return replace(told, what="left-out training example")


def add_guess(outcome: Classes | Numbers, targets: np.ndarray) -> Classes | Numbers:
    """The outcome with the guess that training targets give: numbers (n, c), or places (n,) of classes."""
    if isinstance(outcome, Classes):
        shares = np.bincount(targets.astype(int), minlength=outcome.probabilities.shape[1]) / len(targets)
        return replace(outcome, guess=shares)
    y = np.asarray(targets, dtype=float).reshape(len(targets), -1)
    spread = y.std(0, ddof=1) if len(y) > 1 else np.zeros(y.shape[1])
    return replace(outcome, guess=np.stack([y.mean(0), spread])) if bool((spread > 0).all()) else outcome


def _guess(estimator: Any, outcome: Classes | Numbers, y: np.ndarray) -> Classes | Numbers:
    """The outcome with the guess that the training targets of an estimator give, as `fit` takes these targets."""
    if isinstance(outcome, Numbers):
        return add_guess(outcome, y)
    known = _find_classes(estimator, outcome.probabilities.shape[1])
    return add_guess(outcome, np.array([known[label] for label in y.tolist() if label in known]))


def score_outcome(outcome: Classes | Numbers) -> dict[str, dict[str, float]]:
    """Metrics of a guess without inputs and of the network alone, where these are known, and of the model."""
    found: dict[str, dict[str, float]] = {}
    if isinstance(outcome, Classes):
        if outcome.guess is not None:
            shares = np.tile(outcome.guess, (len(outcome.labels), 1))
            found[MAJORITY] = metrics.classification(shares, outcome.labels)
        if outcome.before is not None:
            found["the network alone"] = metrics.classification(outcome.before, outcome.labels)
        return found | {"this model": metrics.classification(outcome.probabilities, outcome.labels)}
    if outcome.guess is not None:
        mean, std = (np.tile(row, (len(outcome.target), 1)) for row in outcome.guess)
        found[MEAN] = metrics.regression(mean, std, outcome.target)
    if outcome.before is not None:
        found["the network alone"] = {"rmse": metrics.rmse(outcome.before, outcome.target)}
    return found | {"this model": metrics.regression(outcome.mean, outcome.std, outcome.target)}


def _name_targets(estimator: Any, y: Any, outcome: Any) -> list[str]:
    """Targets as text. Numbers of classes become names of classes."""
    found = _keep_labels(y)
    if found.ndim == 2:
        return [", ".join(number(float(x)) for x in row[:4]) for row in found]
    if isinstance(estimator, Laplace) and isinstance(outcome, Classes):
        return [outcome.names[int(label)] for label in found]
    return [number(float(x)) for x in found] if found.dtype.kind == "f" else [str(x) for x in found.tolist()]


def _keep_labels(y: Any) -> np.ndarray:
    """Labels or numbers as an array of their own type; one column becomes (n,)."""
    found = y.detach().cpu().numpy() if hasattr(y, "detach") else np.asarray(y)
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def softmax(f: Tensor) -> np.ndarray:
    """Class probabilities of outputs (n, c). A single output is the logit of the second class."""
    f = f.double().cpu()
    return to_array(torch.cat([torch.sigmoid(-f), torch.sigmoid(f)], 1) if f.shape[1] == 1 else f.softmax(1))


def to_array(x: Any) -> np.ndarray:
    """The values in float64, on the CPU."""
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=float)


# The linear model and the network.


def compare_models(estimator: Any, X: Any, outcome: Any = None, *, what: str = "test example") -> Linear | Missing:
    """Compare the linear model and the network at the adapted weights, or at weights drawn from a Laplace posterior.

    At most 1,000 of the inputs X are used. The metrics of ``outcome``, the predictions for X, are compared too.
    """
    few, index = _thin(X, 1000)
    if isinstance(estimator, Laplace):
        found = attempt(lambda: _compare_drawn(estimator.linearity(few, 4)))
    else:
        found = attempt(lambda: _compare_adapted(estimator, estimator.linearity(few), index, outcome))
    return found if isinstance(found, Missing) else replace(found, what=what)


def _thin(X: Any, most: int) -> tuple[Any, np.ndarray]:
    """At most so many inputs, evenly spaced, and their positions."""
    n = len(next(iter(X.values())) if isinstance(X, Mapping) else X)
    index = _space(n, most)
    if len(index) == n:
        return X, index

    def take(x: Any) -> Any:
        return x[torch.as_tensor(index, device=x.device)] if isinstance(x, Tensor) else x[index]

    return {name: take(x) for name, x in X.items()} if isinstance(X, Mapping) else take(X), index


def _space(n: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))


def _compare_adapted(estimator: Tangent, found: Linearity, index: np.ndarray, outcome: Any) -> Linear:
    step, real = (to_array(f - found.before) for f in (found.linear, found.network))
    whole = estimator.mean_ == "network"  # otherwise the model is the step alone, without the network's outputs
    scores: dict[str, Mapping[str, float]] = {}
    if whole and isinstance(outcome, Classes):
        y = outcome.labels[index]
        scores = {
            "this model": metrics.classification(outcome.probabilities[index], y),
            "real network": metrics.classification(softmax(found.network), y),
        }
    elif whole and isinstance(outcome, Numbers):
        y = outcome.target[index]
        scores = {
            "this model": {"rmse": metrics.rmse(outcome.mean[index], y)},
            "real network": {"rmse": metrics.rmse(to_array(found.network), y)},
        }
    agreement = found.agreement if whole and isinstance(outcome, Classes) else None
    dots = _space(step.size, 400)
    more: Any = {"scores": scores, "whole": whole}
    return Linear(step.ravel()[dots], real.ravel()[dots], found.relative_error, len(step), agreement, **more)


def _compare_drawn(found: Sequence[Linearity]) -> Linear:
    step = np.stack([to_array(one.linear - one.before) for one in found])
    real = np.stack([to_array(one.network - one.before) for one in found])
    length = float(np.linalg.norm(step))
    error = float(np.linalg.norm(real - step)) / length if length > 0 else 0.0
    dots = _space(step.size, 400)
    return Linear(step.ravel()[dots], real.ravel()[dots], error, step.shape[1], drawn=len(found))


# Examples that are worth a look.


def group_by_confidence(outcome: Classes | Numbers, inputs: Inputs) -> list[Group]:
    """The test examples with the highest confidence, with the lowest confidence, and the worst mistakes."""
    if isinstance(outcome, Classes):
        order = np.argsort(-outcome.probabilities.max(1), kind="stable")
        worst = np.array([i for i in order if not outcome.right[i]], dtype=int)
        texts = [
            ("Highest confidence", "The largest probability for one class."),
            ("Lowest confidence", "Label examples like these first if you can get more labels."),
            ("Confident mistakes", "Wrong, with high confidence. Wrong labels are often among these examples."),
        ]
        describe: Any = _describe_class
    else:
        order = np.argsort(np.square(outcome.std).mean(1), kind="stable")
        worst = np.argsort(-np.abs((outcome.mean - outcome.target) / outcome.std).max(1), kind="stable")
        texts = [
            ("Highest confidence", "The narrowest error bars."),
            ("Lowest confidence", "The widest error bars. Collect data like these first if you can get more data."),
            (
                "Largest surprises",
                "The largest errors in standard deviations. Errors of the data are often among these examples.",
            ),
        ]
        describe = _describe_numbers
    return [
        Group(title, note, [describe(outcome, inputs, int(i)) for i in index[:SHOWN]])
        for (title, note), index in zip(texts, (order, order[::-1], worst), strict=True)
    ]


def _describe_class(told: Classes, inputs: Inputs, i: int) -> Item:
    best = int(told.probabilities[i].argmax())
    said = [
        ("predicted", f"{told.names[best]}"),
        ("sure", percent(float(told.probabilities[i, best]))),
        ("true", told.names[int(told.labels[i])]),
    ]
    return Item(inputs.show(i), said, wrong=not bool(told.right[i]))


def _describe_numbers(told: Numbers, inputs: Inputs, i: int) -> Item:
    said = []
    for j, name in enumerate(list(told.names)[:2]):
        ending = f" {name}" if len(told.names) > 1 else ""
        mean, std, y = (float(x[i, j]) for x in (told.mean, told.std, told.target))
        said += [(f"predicted{ending}", f"{number(mean)} ± {number(std)}"), (f"true{ending}", number(y))]
    off = float(np.abs((told.mean[i] - told.target[i]) / told.std[i]).max())
    return Item(inputs.show(i), [*said, ("off by", f"{off:.1f} sd")], wrong=off > Z95)


def find_influential(
    estimator: Any, X: Any, train: tuple[Any, Any], inputs: Inputs, labels: Sequence[str], *, what: str = "test example"
) -> Group | Missing:
    """The training examples with the largest influence on the predictions at X.

    ``inputs`` and ``labels`` say how the training examples are shown; ``what`` is the name of one input of X.
    """

    def make() -> Group:
        n = len(labels)
        if estimator.posterior_.is_point:
            raise ValueError("A mode has no posterior, so influence is not defined. Use another inference.")
        if estimator.posterior_.known_from_samples:
            raise ValueError("The posterior is known from samples only, and their noise would decide the order.")
        c = estimator._jacobian(_thin(X, 2)[0]).c
        # At most 200 inputs, and at most 2^24 covariances between test and training examples at once.
        few, index = _thin(X, min(200, max(1, 2**24 // (n * c * c))))
        if hasattr(estimator, "influence") and n * c <= EXACT:
            parts = to_array(estimator.influence(few))
            how = "how far the prediction would move without the example, exactly"
        else:
            fit = gather_fit(estimator, *train)
            parts = to_array(compute_influence(fit, estimator.lin_.jacobian(few, progress=False)))
            how = "how far an output would move without the example, to first order"
        size = np.sqrt(np.square(parts).reshape(-1, n).mean(0))
        order = np.argsort(-size, kind="stable")[:SHOWN]
        called = "target" if getattr(estimator, "noise_", None) is not None else "label"
        items = [Item(inputs.show(i), [("moves by", number(float(size[i]))), (called, labels[i])]) for i in order]
        note = f"Influence is {how}; root mean square over {count(len(index), what)}."
        return Group("Most influential training examples", note, items)

    return attempt(make)


# What was learned.


def gather_fit(estimator: Any, X: Any, y: Any) -> Fit:
    """The fit of a TangentRegressor, TangentClassifier or Laplace.

    Args:
        estimator: The fitted estimator.
        X: Training inputs.
        y: Training targets.
    """
    if not isinstance(estimator, Laplace | Tangent):
        raise TypeError(f"A fitted TangentRegressor, TangentClassifier or Laplace is needed; got {type(estimator)}.")
    if isinstance(estimator, Laplace):
        J = estimator._jacobian(X)
        f = J.outputs()
        y = as_targets(estimator._encode_labels(y, J), J)
        if isinstance(estimator.likelihood_, KnownNoise):
            known = _of_all(estimator._noise_each, J.n)
            y = KnownNoise.pack(y.to(known).view(J.n, J.c), known)
        targets = estimator.likelihood_.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)
    else:
        J = estimator._new_inputs(X)
        found = estimator.posterior_.predict(J)
        f = estimator._mean_function(found.f) + found.shift
        if isinstance(estimator, TangentRegressor):
            own = estimator._noise_each or estimator._train.noise.weight is not None
            rows = estimator._fit_.noise_rows.view(-1, J.c)
            precision = 1 / (_of_all(rows, J.n) if own else estimator._noise_at(f, X))
            residual = precision * (estimator._targets(y, J).view(J.n, J.c) - f)

            def root(index: Tensor) -> Tensor:
                return precision[index].sqrt().flatten()

            return Fit(J, estimator.posterior_, estimator.prior_variance_, root, residual)
        if isinstance(estimator, TangentClassifier):
            targets = estimator._encode(as_labels(y, J.n), J, estimator.classes_, estimator.likelihood_)
        else:
            targets = estimator.likelihood_.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)
    likelihood = estimator.likelihood_
    if estimator._weight is not None:
        likelihood, targets = Weighted.pack(likelihood, targets, _of_all(estimator._weight, J.n).to(f))

    def observed_root(index: Tensor) -> Tensor:
        L = likelihood.observed_root(f[index], targets[index])
        return L.flatten() if L.ndim == 2 else L

    return Fit(J, estimator.posterior_, estimator.prior_variance_, observed_root, likelihood.residual(f, targets))


def _of_all(values: Tensor, n: int) -> Tensor:
    """Weights or variances of the training examples, where these are the n examples that are asked for."""
    if len(values) != n:
        raise ValueError(
            f"The estimator was fitted to {len(values)} examples with weights or variances of their own, and there are "
            f"{n} inputs. Give the data of fit, without examples of weight 0."
        )
    return values


def find_eigenvalues(estimator: Any, train: tuple[Any, Any]) -> Eigenvalues | Missing:
    """Signal over noise of the directions that the training data determine."""
    return attempt(lambda: Eigenvalues(*compute_spectrum(gather_fit(estimator, *train))))


def _find_relevance(estimator: Any) -> dict[str, float] | Missing:
    """The share of each layer in the adaptation."""
    if isinstance(estimator, Laplace):
        return Missing("Error bars do not change the network, so no layer adapts.")
    members = members_of(estimator)
    shares = [dict(member.layer_relevance_) for member in members]
    return {layer: sum(share.get(layer, 0.0) for share in shares) / len(members) for layer in shares[0]}


def _list_members(estimator: Any) -> dict[str, str]:
    """Facts about the networks of an ensemble."""
    members, weights = estimator.members_, estimator.weights_
    found = [find_evidence(member).value for member in members]
    return {
        "networks": f"{len(members)}",
        "weights of the networks": ", ".join(number(float(w)) for w in weights),
        "log evidence of each": ", ".join("unknown" if value is None else number(value) for value in found),
        "linear model, influence, directions": "of the first network",
    }


def find_evidence(estimator: Any) -> Evidence:
    """How the prior was chosen; of several networks their evidence together and the scales of each."""
    members = members_of(estimator)
    if members[0] is not estimator:
        named = {f"network {i + 1}, {name}": v for i, m in enumerate(members) for name, v in m.scales_.items()}
        return Evidence([], estimator.log_evidence_, scales={name: float(value) for name, value in named.items()})
    scales = {name: float(value) for name, value in estimator.scales_.items()}
    if isinstance(estimator, Laplace):
        value = attempt(lambda: float(estimator.largest_evidence_))
        steps = estimator.tune_path_ if estimator.narrowed_ == 1 else estimator.tune_path_[:-1]
        path = [step.log_evidence for step in steps]
        return Evidence(path, None if isinstance(value, Missing) else value, scales=scales)
    found = estimator.log_evidence_
    return Evidence(
        [float(value) for value in getattr(estimator, "evidence_path_", ()) if math.isfinite(value)],
        None if found is None else float(found),
        dict(estimator.top_path_ or {}),
        estimator.top_,
        scales,
        estimator.selection_ or (),
    )
