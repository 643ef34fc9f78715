r"""A linear readout of features (n, d), fitted by scikit-learn: logistic regression for classes, ridge for numbers.

.. math:: \min_{W, b} \sum_i \ell(y_i, W z_i + b) + \tfrac{\lambda}{2} \|W\|^2

with z the standardized features. What is returned is in terms of the features as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from torch import nn

from linnet.heads.labels import Task, check_targets, encoded
from linnet.tangent.classifier import TangentClassifier

Penalty = Literal["cv", "evidence"] | float
PENALTIES = tuple(10.0**e for e in range(5, -4, -1))
"""Candidates of cross-validation, strongest first: each fit starts from the one before."""

ITERATIONS = 20_000


@dataclass(frozen=True)
class Readout:
    """A fitted readout, ``weight @ x + bias``.

    Attributes:
        weight: (c, d).
        bias: (c,).
        task: "classification", "multilabel" or "regression".
        classes: The label of each output (of 0 and 1 where c is 1); the columns' numbers where multi-label; else None.
        penalty: lambda, (c,) where each column has its own, else one number.
    """

    weight: np.ndarray
    bias: np.ndarray
    task: str
    classes: np.ndarray | None
    penalty: Any


@dataclass(frozen=True)
class Chosen:
    """How the penalty is chosen: "cv", "evidence" or a number, in how many folds, with which seed."""

    penalty: Penalty
    folds: int
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.penalty, str):
            if self.penalty not in ("cv", "evidence"):
                raise ValueError(f"penalty must be 'cv', 'evidence' or a positive number; got {self.penalty!r}.")
        elif isinstance(self.penalty, bool) or not (self.penalty > 0 and np.isfinite(self.penalty)):
            raise ValueError(f"penalty must be 'cv', 'evidence' or a positive number; got {self.penalty!r}.")
        if not isinstance(self.folds, int) or self.folds < 2:
            raise ValueError(f"Cross-validation needs at least 2 folds; got {self.folds!r}.")


def fit_readout(
    X: np.ndarray,
    y: Any,
    *,
    task: Task = "auto",
    classes: Sequence[Any] | None = None,
    penalty: Penalty = "cv",
    folds: int = 5,
    seed: int = 0,
) -> Readout:
    """Fit a readout of features.

    Args:
        X: Features (n, d).
        y: Labels (n,) of any kind; (n, c) of zeros and ones for several labels at once; or numbers, (n,) or (n, c).
        task: What y is; "auto" tells by its values: fractions are numbers, all else are labels.
        classes: The labels in the order of the outputs; by default those of y, sorted.
        penalty: lambda, or how to choose it: "cv" (cross-validated log loss; leave-one-out for numbers) or "evidence".
        folds: Of cross-validation.
        seed: Of the folds.

    Example:
        >>> X = np.array([[-2.0], [-1.0], [1.0], [2.0]])
        >>> found = fit_readout(X, ["no", "no", "yes", "yes"])
        >>> found.classes.tolist(), found.weight.shape, bool(found.weight[0, 0] > 0)
        (['no', 'yes'], (1, 1), True)
    """
    how = Chosen(penalty, folds, seed)
    targets, kind = check_targets(y, len(X), task)
    X = np.asarray(X, dtype=np.float64)
    center, spread = _moments(X)
    Z = (X - center) / spread
    if kind == "regression":
        if classes is not None:
            raise ValueError(
                "classes= is for labels, and y holds numbers. Leave it out, or pass task='classification'."
            )
        weight, bias, used = _ridge(Z, targets, how)
        names = None
    elif kind == "multilabel":
        if classes is not None:
            raise ValueError("classes= is for one label per example, and y has one column for each. Leave it out.")
        weight, bias, used = _multilabel(Z, targets, how)
        names = np.arange(targets.shape[1])
    else:
        names, index = encoded(targets, classes)
        chosen = _penalty(Z, index, how)
        weight, bias = _logistic(Z, index, chosen)
        used = chosen
    weight = weight / spread
    return Readout(weight, bias - weight @ center, kind, names, used)


def _moments(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread of each feature; a spread that is rounding counts as none, and is 1."""
    center, spread = X.mean(0), X.std(0)
    rounding = 64 * np.finfo(np.float32).eps * np.abs(X).max(0)
    return center, np.where(spread > rounding, spread, 1.0)


# Classes.


def _multilabel(Z: np.ndarray, Y: np.ndarray, how: Chosen) -> tuple[np.ndarray, np.ndarray, Any]:
    """One logistic regression for each column."""
    single = [j for j in range(Y.shape[1]) if len(np.unique(Y[:, j])) < 2]
    if single:
        raise ValueError(
            f"Each label needs examples with it and without it; columns {single[:8]} of y are the same everywhere. "
            "Leave them out."
        )
    if how.penalty == "evidence":
        chosen = [_evidence(Z, Y)] * Y.shape[1]
    else:
        chosen = [_penalty(Z, Y[:, j].astype(int), how) for j in range(Y.shape[1])]
    parts = [_logistic(Z, Y[:, j].astype(int), value) for j, value in enumerate(chosen)]
    return np.concatenate([w for w, _ in parts]), np.concatenate([b for _, b in parts]), np.array(chosen)


def _logistic(Z: np.ndarray, index: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    found = _converged(LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=ITERATIONS), Z, index)
    return found.coef_, found.intercept_


def _converged(model: LogisticRegression, Z: np.ndarray, index: np.ndarray) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return model.fit(Z, index)
        except ConvergenceWarning as warning:
            raise RuntimeError(
                f"The logistic regression of the head did not converge in {ITERATIONS} iterations with a penalty of "
                f"{1 / model.C:.3g}. Pass a larger one with penalty=."
            ) from warning


def _penalty(Z: np.ndarray, index: np.ndarray, how: Chosen) -> float:
    if not isinstance(how.penalty, str):
        return float(how.penalty)
    return _evidence(Z, index) if how.penalty == "evidence" else _cross_validated(Z, index, how)


def _cross_validated(Z: np.ndarray, index: np.ndarray, how: Chosen) -> float:
    """The penalty with the smallest log loss on examples held out."""
    counts = np.bincount(index)
    folds = min(how.folds, int(counts.max()))
    if folds < 2:
        raise ValueError(
            "Cross-validation holds examples out, and no class has two. Pass penalty='evidence' or a number."
        )
    # A class with one example would be missing where that is held out: it is always trained on.
    several = np.flatnonzero(counts[index] > 1)
    single = np.flatnonzero(counts[index] == 1)
    with warnings.catch_warnings():  # some classes have fewer examples than there are folds, which is no harm
        warnings.filterwarnings("ignore", message="The least populated class")
        splits = list(StratifiedKFold(folds, shuffle=True, random_state=how.seed).split(several, index[several]))
    losses = np.zeros(len(PENALTIES))
    for train, test in splits:
        rows, held = np.concatenate([several[train], single]), several[test]
        model = LogisticRegression(max_iter=ITERATIONS, warm_start=True)
        for i, penalty in enumerate(PENALTIES):
            _converged(model.set_params(C=1 / penalty), Z[rows], index[rows])
            p = model.predict_proba(Z[held])
            losses[i] += log_loss(index[held], p, labels=model.classes_, normalize=False)
    return PENALTIES[int(np.argmin(losses))]


def _evidence(Z: np.ndarray, y: np.ndarray) -> float:
    """The penalty with the largest Laplace evidence, one over the prior variance of the weights."""
    outputs = y.shape[1] if y.ndim == 2 else int(y.max()) + 1
    outputs = 1 if outputs == 2 and y.ndim == 1 else outputs
    linear = nn.utils.skip_init(nn.Linear, Z.shape[1], outputs, dtype=torch.float64)  # draws no random numbers
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    clf = TangentClassifier(linear, inference="map", prior="shared", progress=False).fit(Z, y)
    return 1 / clf.scales_["all"]


# Numbers.


def _ridge(Z: np.ndarray, Y: np.ndarray, how: Chosen) -> tuple[np.ndarray, np.ndarray, Any]:
    if len(Z) < 2:
        raise ValueError("Regression needs at least two examples; got one.")
    columns = Y[:, None] if Y.ndim == 1 else Y
    chosen: Any
    if how.penalty == "cv":
        chosen = np.broadcast_to(RidgeCV(PENALTIES, alpha_per_target=True).fit(Z, columns).alpha_, columns.shape[1])
    elif how.penalty == "evidence":
        fits = [BayesianRidge(max_iter=ITERATIONS).fit(Z, column) for column in columns.T]
        chosen = np.array([fit.lambda_ / fit.alpha_ for fit in fits])
    else:
        chosen = np.full(columns.shape[1], float(how.penalty))
    found = Ridge(alpha=chosen).fit(Z, columns)
    return np.atleast_2d(found.coef_), np.atleast_1d(found.intercept_), chosen if Y.ndim == 2 else float(chosen[0])
