r"""A linear readout of features (n, d), fitted by scikit-learn: logistic regression for classes, ridge for numbers.

.. math:: \min_{W, b} \sum_i \ell(y_i, W z_i + b) + \tfrac{\lambda}{2} \|W\|^2

with z the standardized features. The fitted readout takes the features as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from linnet.heads.network import Readout
from linnet.tangent import TangentClassifier

Task = Literal["auto", "classification", "multilabel", "regression"]
Penalty = Literal["cv", "evidence"] | float
PENALTIES = tuple(10.0**e for e in range(5, -4, -1))
"""Candidates of the cross-validation, strongest first: each fit starts from the fit before."""

ITERATIONS = 20_000
"""Limit of the solvers. Fits that need more are refused rather than waited for."""


@dataclass(frozen=True)
class PenaltyChoice:
    """How to choose the penalty: "cv", "evidence" or a number; the number of folds and their seed."""

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
    weight: np.ndarray | None = None,
) -> Readout:
    """Fit a readout of features.

    Args:
        X: Features (n, d).
        y: Labels (n,) of any kind; (n, c) of zeros and ones for several labels at once; or numbers, (n,) or (n, c).
        task: Kind of y; "auto" decides by its values: fractions are numbers, all else are labels.
        classes: The labels in the order of the outputs; by default the labels of y, sorted.
        penalty: lambda, or how to choose it: "cv" (cross-validated log loss; leave-one-out for numbers) or "evidence".
        folds: Number of folds of the cross-validation.
        seed: Seed of the folds.
        weight: How many times each example counts, (n,); None for once.

    Example:
        >>> X = np.array([[-2.0], [-1.0], [1.0], [2.0]])
        >>> found = fit_readout(X, ["no", "no", "yes", "yes"])
        >>> found.classes.tolist(), found.weight.shape, bool(found.weight[0, 0] > 0)
        (['no', 'yes'], (1, 1), True)
    """
    how = PenaltyChoice(penalty, folds, seed)
    targets, kind = check_targets(y, len(X), task)
    X = np.asarray(X, dtype=np.float64)
    w = np.ones(len(X)) if weight is None else weight
    center, spread = _find_moments(X, w)
    Z = (X - center) / spread
    if kind == "regression":
        if classes is not None:
            raise ValueError(
                "classes= is for labels, and y holds numbers. Leave it out, or pass task='classification'."
            )
        weight, bias, used = _fit_ridge(Z, targets, w, how)
        names = None
    elif kind == "multilabel":
        if classes is not None:
            raise ValueError("classes= is for one label per example, and y has one column for each. Leave it out.")
        weight, bias, used = _fit_columns(Z, targets, w, how)
        names = np.arange(targets.shape[1])
    else:
        names, index = encode_labels(targets, classes)
        chosen = _choose_penalty(Z, index, w, how)
        weight, bias = _fit_logistic(Z, index, w, chosen)
        used = chosen
    weight = weight / spread
    return Readout(weight, bias - weight @ center, kind, names, used)


# Targets.


def check_targets(y: Any, n: int, task: Task) -> tuple[np.ndarray, str]:
    """Targets as an array, (n,) or (n, c), and their kind."""
    if task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(map(repr, get_args(Task)))}; got {task!r}.")
    y = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != n or y.size == 0:
        raise ValueError(f"There are {n} examples, so y needs shape ({n},) or ({n}, c); got {y.shape}.")
    if y.dtype.kind in "fc" and not np.isfinite(y).all():
        bad = int(np.argmax(~np.isfinite(y).reshape(n, -1).all(1)))
        raise ValueError(f"y must not be NaN or infinite; that of example {bad} is. Leave it out.")
    number = y.dtype.kind in "biuf"
    zeros_and_ones = number and bool(np.isin(y, (0, 1)).all())
    if task == "auto":
        whole = y.dtype.kind != "f" or bool((y == np.round(y)).all())
        if y.ndim == 2:
            task = "multilabel" if zeros_and_ones else "regression"
            if task == "regression" and y.dtype.kind in "iu":
                raise ValueError(
                    f"y has shape {y.shape} and whole numbers other than 0 and 1: are they labels or numbers? Pass one "
                    "label for each example, columns of zeros and ones, or task='regression'."
                )
        else:
            task = "classification" if whole else "regression"
    if task == "multilabel" and (y.ndim != 2 or not zeros_and_ones):
        raise ValueError(f"Several labels at once need y of shape (n, c) with zeros and ones; got shape {y.shape}.")
    if task == "classification" and y.ndim != 1:
        raise ValueError(f"Classes need one label for each example, y of shape ({n},); got {y.shape}.")
    if task == "regression" and not number:
        raise TypeError(f"Regression needs real numbers; y is an array of {y.dtype}.")
    return (y.astype(np.float64) if task == "regression" else y), task


def encode_labels(y: np.ndarray, classes: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """The classes in order, and each label's position among them."""
    try:
        found = np.unique(y)
    except TypeError as error:
        raise TypeError(f"Labels must be of one kind, so that they can be sorted: {error}.") from error
    if len(found) < 2:
        raise ValueError(f"A head for classes needs labels of at least two; all {len(y)} labels are {found[0]!r}.")
    if classes is None:
        return found, np.searchsorted(found, y)
    names = np.asarray(classes)
    known = {label: i for i, label in enumerate(names.tolist())}
    unknown = [label for label in found.tolist() if label not in known]
    if unknown or len(known) != len(names):
        raise ValueError(
            f"classes= needs every label once; got {names.tolist()[:8]}"
            + (f" without {unknown[:8]}." if unknown else ".")
        )
    missing = [label for label in names.tolist() if label not in set(found.tolist())]
    if missing:
        raise ValueError(
            f"There are {len(names)} classes and no example of {len(missing)} of them ({missing[:8]}), from {len(y)} "
            "examples: a head cannot be fitted to them. Add an example of each, or leave them out of classes=."
        )
    return names, np.array([known[label] for label in y.tolist()])


def _find_moments(X: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread of each feature, by weights. A spread that is no more than rounding becomes 1."""
    center = np.average(X, 0, w)
    spread = np.sqrt(np.average((X - center) ** 2, 0, w))
    rounding = 64 * np.finfo(np.float32).eps * np.abs(X).max(0)
    return center, np.where(spread > rounding, spread, 1.0)


# Classes.


def _fit_columns(Z: np.ndarray, Y: np.ndarray, w: np.ndarray, how: PenaltyChoice) -> tuple[np.ndarray, np.ndarray, Any]:
    """One logistic regression for each column."""
    single = [j for j in range(Y.shape[1]) if len(np.unique(Y[:, j])) < 2]
    if single:
        raise ValueError(
            f"Each label needs examples with it and without it; columns {single[:8]} of y are the same everywhere. "
            "Leave them out."
        )
    if how.penalty == "evidence":
        chosen = [_maximize_evidence(Z, Y, w)] * Y.shape[1]
    else:
        chosen = [_choose_penalty(Z, Y[:, j].astype(int), w, how) for j in range(Y.shape[1])]
    parts = [_fit_logistic(Z, Y[:, j].astype(int), w, value) for j, value in enumerate(chosen)]
    return np.concatenate([w for w, _ in parts]), np.concatenate([b for _, b in parts]), np.array(chosen)


def _fit_logistic(Z: np.ndarray, index: np.ndarray, w: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    found = _fit_to_convergence(LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=ITERATIONS), Z, index, w)
    return found.coef_, found.intercept_


def _fit_to_convergence(
    model: LogisticRegression, Z: np.ndarray, index: np.ndarray, w: np.ndarray
) -> LogisticRegression:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return model.fit(Z, index, w)
        except ConvergenceWarning as warning:
            raise RuntimeError(
                f"The logistic regression of the head did not converge in {ITERATIONS} iterations with a penalty of "
                f"{1 / model.C:.3g}. Pass a larger one with penalty=."
            ) from warning


def _choose_penalty(Z: np.ndarray, index: np.ndarray, w: np.ndarray, how: PenaltyChoice) -> float:
    if not isinstance(how.penalty, str):
        return float(how.penalty)
    return _maximize_evidence(Z, index, w) if how.penalty == "evidence" else _cross_validate(Z, index, w, how)


def _cross_validate(Z: np.ndarray, index: np.ndarray, w: np.ndarray, how: PenaltyChoice) -> float:
    """The penalty with the smallest log loss on examples held out, by their weights."""
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
            _fit_to_convergence(model.set_params(C=1 / penalty), Z[rows], index[rows], w[rows])
            p = model.predict_proba(Z[held])
            losses[i] += log_loss(index[held], p, labels=model.classes_, normalize=False, sample_weight=w[held])
    return PENALTIES[int(np.argmin(losses))]


def _maximize_evidence(Z: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    """The penalty with the largest Laplace evidence, one over the prior variance of the weights."""
    outputs = y.shape[1] if y.ndim == 2 else int(y.max()) + 1
    outputs = 1 if outputs == 2 and y.ndim == 1 else outputs
    linear = nn.utils.skip_init(nn.Linear, Z.shape[1], outputs, dtype=torch.float64)  # draws no random numbers
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    clf = TangentClassifier(linear, inference="map", prior="shared", progress=False).fit(Z, y, w)
    return 1 / clf.scales_["all"]


# Numbers.


def _fit_ridge(Z: np.ndarray, Y: np.ndarray, w: np.ndarray, how: PenaltyChoice) -> tuple[np.ndarray, np.ndarray, Any]:
    if len(Z) < 2:
        raise ValueError("Regression needs at least two examples; got one.")
    columns = Y[:, None] if Y.ndim == 1 else Y
    chosen: Any
    if how.penalty == "cv":
        chosen = np.broadcast_to(
            RidgeCV(PENALTIES, alpha_per_target=True).fit(Z, columns, sample_weight=w).alpha_, columns.shape[1]
        )
    elif how.penalty == "evidence":
        fits = [BayesianRidge(max_iter=ITERATIONS).fit(Z, column, sample_weight=w) for column in columns.T]
        chosen = np.array([fit.lambda_ / fit.alpha_ for fit in fits])
    else:
        chosen = np.full(columns.shape[1], float(how.penalty))
    found = Ridge(alpha=chosen).fit(Z, columns, sample_weight=w)
    return np.atleast_2d(found.coef_), np.atleast_1d(found.intercept_), chosen if Y.ndim == 2 else float(chosen[0])
