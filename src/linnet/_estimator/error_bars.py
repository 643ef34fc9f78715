"""Error bars of many outputs: whether variances are exact or come from posterior samples, and how far samples are off.

An exact variance takes c backward passes of the network for c outputs. k posterior samples take k forward passes with
tangents, however many outputs there are.
"""

from __future__ import annotations

import inspect
import logging
import math
from statistics import NormalDist
from typing import Any, Literal, get_args

from sklearn.utils.validation import check_is_fitted

from linnet.jacobian import Jacobian
from linnet.linalg import LinearOperator, Stack
from linnet.probability import Posterior, SamplePosterior

Variance = Literal["auto", "exact", "samples"]

log = logging.getLogger("linnet")


def check_variance(variance: str) -> None:
    """Raise unless ``variance`` is one of the names."""
    if variance not in get_args(Variance):
        known = ", ".join(map(repr, get_args(Variance)))
        raise ValueError(f"variance must be one of {known}; got {variance!r}.")


def check_has_exact(variance: str, what: str, instead: str) -> None:
    """Raise where exact variances are asked of a posterior that is known from samples alone."""
    if variance == "exact":
        raise ValueError(
            f"variance='exact' needs the covariance of the posterior, and {what} knows samples alone. Use "
            f"variance='auto', or {instead}."
        )


def choose_variance(variance: str, posterior: Posterior, J: LinearOperator, samples: int) -> str:
    """How error bars are made: "exact", or "samples".

    Args:
        variance: What the user asked for.
        posterior: The posterior.
        J: Of the training data.
        samples: Number of samples that would be taken.
    """
    if posterior.is_point:
        return "exact"
    if posterior.known_from_samples:
        return "samples"
    if variance != "auto":
        return variance
    while isinstance(J, Stack):
        J = J.parts[0]
    if not isinstance(J, Jacobian) or not J.has_many_outputs(samples):
        return "exact"
    outputs = J.c
    log.info(
        "Error bars of %d outputs come from %d posterior samples, with a relative standard error of %.2g; exact error "
        "bars take %d backward passes for each input: variance='exact'.",
        outputs,
        samples,
        relative_error(samples),
        outputs,
    )
    return "samples"


def relative_error(samples: int) -> float:
    r"""The standard error of a standard deviation from k Gaussian samples of known mean, in units of the true one.

    .. math:: \sqrt{1 - m^2}, \qquad m = \sqrt{2 / k} \; \Gamma((k + 1) / 2) / \Gamma(k / 2)

    About ``1 / sqrt(2 k)``.

    >>> round(relative_error(32), 4), round((2 * 32) ** -0.5, 4)
    (0.1245, 0.125)
    """
    m = math.sqrt(2 / samples) * math.exp(math.lgamma((samples + 1) / 2) - math.lgamma(samples / 2))
    return math.sqrt(1 - m**2)


class ErrorBarsMixin:
    """Error bars of an estimator with a posterior: exact ones, or from samples that are drawn once.

    The samples come from the posterior and the seed alone, so that a file that holds the posterior holds the samples.

    Attributes:
        variance_: "exact" or "samples".
    """

    variance: str
    samples: int
    seed: int
    posterior_: Posterior
    variance_: str
    _drawn: tuple[Posterior, SamplePosterior]

    def predict_interval(self, X: Any, level: float = 0.95, *, noise: Any = True) -> tuple[Any, Any]:
        """The lower and the upper end of the central interval of each prediction of a number.

        The interval is that of a Gaussian with the mean and the standard deviation that `predict` returns.

        Args:
            X: Inputs.
            level: Probability of the interval.
            noise: Whether the interval is for an observation, or False for the function; see `predict`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is the probability of the interval, between 0 and 1; got {level!r}.")
        predict = getattr(self, "predict", None)
        if predict is None or "return_std" not in inspect.signature(predict).parameters:
            raise TypeError(
                f"predict_interval is for numbers, and {type(self).__name__} predicts classes, counts or times. Use "
                "predict_proba, or quantiles of sample(X, k)."
            )
        mean, std = predict(X, return_std=True, noise=noise)
        width = NormalDist().inv_cdf(0.5 + float(level) / 2) * std
        return mean - width, mean + width

    def _settle_variance(self, J: LinearOperator) -> None:
        self.variance_ = choose_variance(self.variance, self.posterior_, J, self.samples)

    @property
    def std_error_(self) -> float:
        """Relative standard error of the standard deviations: 0 where they are exact."""
        check_is_fitted(self)
        return 0.0 if self.variance_ == "exact" else relative_error(self.posterior_.most_draws(self.samples))

    @property
    def _error_bars(self) -> Posterior:
        """The posterior that gives variances."""
        return self._with_bars(self.posterior_)

    def _with_bars(self, posterior: Posterior) -> Posterior:
        """A posterior, or its samples where error bars come from samples."""
        if self.variance_ == "exact" or posterior.is_point or posterior.known_from_samples:
            return posterior
        if getattr(self, "_drawn", (None,))[0] is not posterior:
            self._drawn = posterior, SamplePosterior.of(posterior, self.samples, seed=self.seed)
        return self._drawn[1]
