r"""Intervals and sets of classes that cover with a stated probability, whatever is wrong with the model.

Split conformal prediction: a score says how strange a target is for its prediction, and examples that the estimator has
not seen say which scores are usual. With the scores :math:`s_1, \dots, s_n` of n calibration examples, the predictions
at a level hold all targets whose score is at most the k-th smallest,

.. math:: k = \lceil (n + 1) \cdot \mathrm{level} \rceil .

Where calibration examples and new examples come from one distribution, a new target lies inside with a probability of
at least the level, and of at most ``level + 1 / (n + 1)`` where no two scores are equal: on average over inputs and
over calibration examples. Given the calibration examples, the coverage has the distribution Beta(k, n + 1 - k).

The scores use linnet's own error bars, so that intervals are wide where the estimator knows little.

- Numbers: :math:`|y - \mathrm{mean}| / \mathrm{std}`, with the standard deviation of an observation (Lei et al. 2018).
- Classes: the probability of all more probable classes and a random share of the class's own, so that a set holds more
  classes where the estimator is less sure (Romano, Sesia and Candes 2020). Without the share, an estimator that is
  often sure and wrong would have many equal scores, and sets of all classes at every level.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any, final

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from linnet._common import files, messages
from linnet._estimator import convert_like, members_of
from linnet._estimator import files as saved
from linnet.laplace import Laplace
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, KnownNoise, Ordinal
from linnet.tangent import TangentClassifier, TangentGLM, TangentRegressor

__all__ = ["Conformal"]

KIND = "conformal calibration"


@final
class Conformal:
    """A fitted estimator whose intervals or sets of classes cover as often as they say.

    Args:
        estimator: A fitted `TangentRegressor`, `TangentClassifier`, `TangentGLM` of counts, or `Laplace`. It stays as
            it is.
        seed: Seed of the random shares of classes: with a seed, predictions are the same every time.

    Attributes:
        scores_: The scores of the calibration examples, sorted: (n,), or (n, c) for several outputs.

    Example:
        >>> from torch import nn
        >>> from linnet import TangentRegressor
        >>> X = torch.linspace(-2, 2, 120, dtype=torch.float64)[:, None]
        >>> y = torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(120, dtype=torch.float64)
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        >>> reg = TangentRegressor(model).fit(X[::2], y[::2])
        >>> lower, upper = Conformal(reg).calibrate(X[1::2], y[1::2]).predict_interval(X, level=0.9)
        >>> lower.shape, bool((lower < upper).all())
        (torch.Size([120]), True)
    """

    scores_: Tensor

    def __init__(self, estimator: Any, *, seed: int = 0) -> None:
        if not isinstance(estimator, TangentRegressor | TangentClassifier | TangentGLM | Laplace):
            raise TypeError(
                "Conformal takes a fitted TangentRegressor, TangentClassifier, TangentGLM or Laplace; got "
                f"{type(estimator).__name__}."
            )
        check_is_fitted(estimator)
        messages.check_seed(seed)
        self.estimator, self.seed = estimator, seed
        self._labels: np.ndarray | None = None
        if isinstance(estimator, TangentClassifier):
            self._labels = estimator.classes_
        self._has_classes = self._labels is not None or isinstance(
            getattr(estimator, "likelihood_", None), Bernoulli | Categorical | Ordinal
        )
        several = isinstance(estimator, TangentClassifier) and estimator.multilabel_
        sites = isinstance(estimator, Laplace) and bool(estimator._read.shape)
        if several or sites:
            raise NotImplementedError("Conformal predictions are for one label of each example; this fit has several.")

    def calibrate(self, X: Any, y: Any) -> Conformal:
        """Measure the scores of examples that neither the network nor the estimator has seen.

        Args:
            X: Inputs.
            y: Targets: numbers, counts or labels, as `fit` of the estimator takes them.
        """
        scores = self._score_labels(X, y) if self._has_classes else self._score_numbers(X, y)
        if not bool(torch.isfinite(scores).all()):
            i = int((~torch.isfinite(scores)).reshape(len(scores), -1).any(1).nonzero()[0])
            raise ValueError(
                f"The score of calibration example {i} is not finite: its target, its prediction or a standard "
                "deviation of zero. Look at that example."
            )
        self.scores_ = scores.sort(0).values
        return self

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Any, Any]:
        """The lower and the upper end of an interval for the target of each input, in the shape of the predictions.

        Several outputs have intervals of their own, each of which covers with the level.

        Args:
            X: Inputs.
            level: Probability with which the target of an input lies inside.
        """
        if self._has_classes:
            raise ValueError("predict_interval is for numbers; for classes use predict_set.")
        q = self._quantile(level)
        mean, std = self._moments(X)
        shape = mean.shape
        half = q * std.reshape(len(std), -1)
        center = mean.reshape(len(mean), -1)
        lower, upper = ((center + sign * half).reshape(shape) for sign in (-1, 1))
        return convert_like(X, lower), convert_like(X, upper)

    def predict_set(self, X: Any, level: float = 0.9) -> Any:
        """Which classes the target of each input may be, (n, classes) of booleans, in the order of ``classes_``.

        A set always holds the most probable class, also where the scores alone would leave it empty, so that sets of a
        low level may cover more.

        Args:
            X: Inputs.
            level: Probability with which the class of an input is in its set.
        """
        if not self._has_classes:
            raise ValueError("predict_set is for classes; for numbers use predict_interval.")
        q = self._quantile(level)
        p = torch.as_tensor(self.estimator.predict_proba(X))
        found = sum_more_probable(p, self._draw_shares(p, 1)) <= q
        return convert_like(X, found.scatter(1, p.argmax(1, keepdim=True), True))

    @property
    def classes_(self) -> np.ndarray:
        """The label of each column of `predict_set`."""
        if self._labels is None:
            raise AttributeError("There are no classes: the estimator predicts numbers, or is not calibrated yet.")
        return self._labels

    # Scores.

    def _moments(self, X: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of an observation; of the function where each observation has its own noise."""
        estimator: Any = self.estimator
        likelihood = getattr(estimator, "likelihood_", None)
        if isinstance(estimator, TangentRegressor):
            found = estimator.predict(X, return_std=True, noise=not estimator._noise_each)
        elif isinstance(estimator, Laplace) and isinstance(likelihood, Gaussian | Heteroscedastic | KnownNoise):
            found = estimator.predict(X, return_std=True, noise=not isinstance(likelihood, KnownNoise))
        elif isinstance(estimator, Laplace):
            found = estimator.predict_mean(X, return_std=True, noise=True)
        else:
            found = estimator.predict(X, return_std=True, noise=True)
        mean, std = (torch.as_tensor(x).detach() for x in found)
        return mean, std

    def _score_numbers(self, X: Any, y: Any) -> Tensor:
        mean, std = self._moments(X)
        y = torch.as_tensor(y if isinstance(y, Tensor) else np.asarray(y)).to(mean)
        if y.shape != mean.shape:
            raise ValueError(
                f"The predictions have shape {tuple(mean.shape)}, so the targets need the same; got {tuple(y.shape)}. "
                "Intervals of censored times are not known."
            )
        return (y - mean).abs() / std

    def _score_labels(self, X: Any, y: Any) -> Tensor:
        labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        p = torch.as_tensor(self.estimator.predict_proba(X)).detach()
        if labels.shape != (len(p),):
            raise ValueError(f"{len(p)} examples need labels of shape ({len(p)},); got {labels.shape}.")
        self._labels = np.arange(p.shape[1]) if self._labels is None else self._labels
        place = {label: i for i, label in enumerate(self._labels.tolist())}
        unknown = [label for label in labels.tolist() if label not in place]
        if unknown:
            raise ValueError(f"Label {unknown[0]!r} is none of the classes {self._labels.tolist()[:6]}.")
        index = torch.tensor([place[label] for label in labels.tolist()], device=p.device)
        return sum_more_probable(p, self._draw_shares(p, 0)).gather(1, index[:, None])[:, 0]

    def _draw_shares(self, p: Tensor, stream: int) -> Tensor:
        """A random number between 0 and 1 for each row of p; calibration and predictions have streams of their own."""
        generator = torch.Generator().manual_seed(2 * self.seed + stream)
        return torch.rand(len(p), dtype=torch.float64, generator=generator).to(p)

    def _quantile(self, level: float) -> Tensor:
        """The k-th smallest score, (), or (c,) for several outputs."""
        if not hasattr(self, "scores_"):
            raise ValueError("There are no calibration examples yet: call calibrate(X, y) first.")
        return self.scores_[find_rank(len(self.scores_), level) - 1]

    # Files.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a file; the estimator has a file of its own. `load` puts both together."""
        if not hasattr(self, "scores_"):
            raise ValueError("There are no calibration examples yet: call calibrate(X, y) first.")
        meta: dict[str, Any] = {
            "seed": self.seed,
            "estimator": _fingerprint(self.estimator),
            "classes": None if self._labels is None else len(self._labels),
        }
        files.save(path, {"scores": self.scores_}, meta, kind=KIND)

    @classmethod
    def load(cls, path: str | os.PathLike[str], estimator: Any) -> Conformal:
        """The calibration that `save` wrote, of the same fitted estimator.

        Args:
            path: The file.
            estimator: The estimator, such as `linnet.load` gives it.
        """
        tensors, meta = files.load(path, kind=KIND)
        found = cls(estimator, seed=meta["seed"])
        if _fingerprint(estimator) != meta["estimator"]:
            raise ValueError(
                f"{path} was calibrated for another fit: network, posterior or prior differ. Load the estimator that "
                "was calibrated, or calibrate this one."
            )
        if meta["classes"] is not None and found._labels is None:
            found._labels = np.arange(meta["classes"])
        found.scores_ = tensors["scores"].to(members_of(estimator)[0].lin_.device)
        return found


def find_rank(n: int, level: float) -> int:
    """The rank ``ceil((n + 1) level)`` of the score that n calibration examples have at a level, in whole numbers.

    >>> find_rank(99, 0.99), find_rank(9, 0.9), find_rank(19, 0.9)
    (99, 9, 18)
    """
    if isinstance(level, bool) or not isinstance(level, int | float | np.floating) or not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1; got {level!r}.")
    share = Fraction(repr(float(level)))  # 0.9 is nine tenths, and not the nearest binary number
    least = math.ceil(share / (1 - share))
    if n < least:
        raise ValueError(f"level {level:g} needs at least {least} examples, got {n}. Ask for a lower level.")
    return math.ceil((n + 1) * share)


def sum_more_probable(p: Tensor, share: Tensor) -> Tensor:
    """For each class the probability of all more probable ones, and a share (n,) of its own, (n, K).

    >>> sum_more_probable(torch.tensor([[0.25, 0.5, 0.25]]), torch.ones(1))
    tensor([[0.7500, 0.5000, 1.0000]])
    """
    values, order = p.sort(dim=1, descending=True, stable=True)
    sums = values.cumsum(1) - (1 - share[:, None]) * values
    return torch.empty_like(p).scatter_(1, order, sums)


def _fingerprint(estimator: Any) -> str:
    """What tells one fit from another."""
    found = []
    for member in members_of(estimator):
        parts = saved.posterior_tensors(member.posterior_) | {"prior": member.prior_variance_}
        found.append(f"{saved.base_of(member)} {files.fingerprint(parts)}")
    return " ".join(found)
