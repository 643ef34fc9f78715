"""Predictions of fitted estimators as columns of a table, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import linnet
from linnet import metrics
from linnet.cli.data_files.examples import Examples
from linnet.cli.task import positions
from linnet.metrics import Z95
from linnet.report.content import Classes, Numbers
from linnet.report.gather import softmax


@dataclass(frozen=True)
class Predicted:
    """Predictions for a file.

    Attributes:
        columns: Of the table that is written.
        probabilities: (n, classes), for classes.
        mean: (n,) or (n, c), for numbers; and ``std`` the standard deviation of an observation.
        std: See there.
    """

    columns: dict[str, np.ndarray]
    probabilities: np.ndarray | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    def scores(self, y: np.ndarray, classes: list[Any], what: str) -> dict[str, float]:
        """Metrics against the targets."""
        if self.probabilities is not None:
            y = y[:, 0] if y.ndim == 2 else y
            return metrics.classification(self.probabilities, positions(y, classes, what))
        assert self.mean is not None and self.std is not None
        return metrics.regression(self.mean, self.std, y.reshape(self.mean.shape).astype(float))


def predict(estimator: Any, data: Examples, *, task: str, classes: Sequence[Any], targets: Sequence[str]) -> Predicted:
    """What a fitted TangentClassifier, TangentRegressor or Laplace says about data, with error bars."""
    named = {"example": np.array(data.names) if data.names else np.arange(data.n)}
    if task == "classification":
        return _classes(estimator, data, list(classes), named)
    mean, std = (_array(part) for part in estimator.predict(data.X, return_std=True))
    total = _array(estimator.predict(data.X, return_std=True, noise=True)[1])
    columns = dict(named)
    several = mean.ndim == 2
    for j, name in enumerate(targets if several else [""]):
        m, s, t = (part[:, j] if several else part for part in (mean, std, total))
        ending = f"_{name}" if several else ""
        columns |= {
            f"mean{ending}": m,
            f"std{ending}": s,
            f"std_observed{ending}": t,
            f"low95{ending}": m - Z95 * t,
            f"high95{ending}": m + Z95 * t,
        }
    return Predicted(columns, mean=mean, std=total)


def _classes(estimator: Any, data: Examples, classes: list[Any], named: dict[str, np.ndarray]) -> Predicted:
    p = _array(estimator.predict_proba(data.X))
    best = p.argmax(1)
    columns = named | {"prediction": np.array(classes)[best], "probability": p[np.arange(len(p)), best]}
    std = _logit_std(estimator, data)
    if std is not None:
        # One output is the logit of the second class, and speaks for both.
        columns["logit_std"] = std[np.arange(len(std)), best if std.shape[1] > 1 else np.zeros_like(best)]
    columns |= {f"p_{label}": p[:, j] for j, label in enumerate(classes)}
    return Predicted(columns, probabilities=p)


def _logit_std(estimator: Any, data: Examples) -> np.ndarray | None:
    """Standard deviations of the logits, (n, c); None for a mode alone, which has none."""
    if isinstance(estimator, linnet.Laplace):
        std = _array(estimator.predict(data.X, return_std=True)[1])
        return std if std.ndim == 2 else std[:, None]
    if estimator.inference == "map":
        return None
    covariance = torch.as_tensor(estimator.predict_logits(data.X)[1])
    return _array(covariance.diagonal(dim1=1, dim2=2).sqrt())


def before(outputs: torch.Tensor, y: np.ndarray, classes: list[Any], what: str) -> dict[str, float]:
    """Metrics of the network as it was; outputs (n, c)."""
    f = outputs.double().cpu()
    if not classes:
        return {"rmse": metrics.rmse(f, torch.as_tensor(y.reshape(f.shape).astype(float)))}
    y = y[:, 0] if y.ndim == 2 else y
    return metrics.classification(softmax(f), positions(y, classes, what))


def outcome_of(
    told: Predicted, outputs: torch.Tensor, y: np.ndarray, classes: list[Any], targets: Sequence[str]
) -> Classes | Numbers:
    """The same for a report, beside what the network alone says; outputs (n, c)."""
    if told.probabilities is not None:
        labels = positions(y.reshape(-1), classes, "The test data")
        return Classes(told.probabilities, labels, [str(label) for label in classes], softmax(outputs))
    assert told.mean is not None and told.std is not None
    n, f = len(told.mean), _array(outputs)
    mean, std, target = (part.reshape(n, -1).astype(float) for part in (told.mean, told.std, y))
    return Numbers(mean, std, target, list(targets), f if f.shape == mean.shape else None)


def _array(x: Any) -> np.ndarray:
    return x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
