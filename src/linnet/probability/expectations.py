"""Averages of a likelihood over Gaussian outputs, f ~ N(mean, cov) example by example.

What variational inference maximizes is made of `take_expectations`; class probabilities are `compute_probabilities`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.probability.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    ExponentialMean,
    Gaussian,
    Heteroscedastic,
    KnownNoise,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Weibull,
    Weighted,
    laplacian,
    standard_normal,
)


@dataclass(frozen=True)
class FactoredCovariance:
    """The covariance ``T T^T`` of each example, which is never formed.

    Attributes:
        T: (n, c, k).
    """

    T: Tensor


Covariance = Tensor | FactoredCovariance
"""Covariances (n, c, c), variances (n, c), or factors."""


class Expected(NamedTuple):
    """Expectations of a likelihood over Gaussian outputs.

    Attributes:
        log_prob: E[log p(y | f)], (n,).
        residual: E[residual], (n, c): the gradient of the first in the mean of f.
        curvature: E[B], (n, c) where the likelihood is diagonal, else (n, c, c).
    """

    log_prob: Tensor
    residual: Tensor
    curvature: Tensor


def take_expectations(
    likelihood: Likelihood, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None = None
) -> Expected:
    r"""Expectations of log p, residual and curvature over f ~ N(mean, cov), example by example.

    `Gaussian`, `Heteroscedastic`, `Poisson` and `Weibull` are exact; `Bernoulli`, `Ordinal` and `NegativeBinomial` are
    by quadrature, to about 1e-11 for any variance. A likelihood of the user's own is by a sum over 128 outputs, from
    -8.5 to 8.5 standard deviations, where it is diagonal, and else over draws.
    `Categorical` averages over the draws :math:`f = \mathrm{mean} + \mathrm{cov}^{1/2} \epsilon` with the symmetric
    root, so that with fixed draws its first value is a smooth function of mean and cov, and its second that function's
    exact gradient in the mean.

    Args:
        likelihood: Any of `linnet.likelihoods`.
        mean: (n, c).
        cov: (n, c, c), or (n, c) for variances of independent outputs; or `factor_covariance` of them, which is made
            once for many means.
        y: Targets, as `Likelihood.targets` gives them.
        eps: Standard normal draws (s, n, c), or (s, 1, c) for the same ones at every example; only likelihoods that
            are not diagonal need them.

    Example:
        >>> found = take_expectations(Bernoulli(), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        >>> [round(t.item(), 4) for t in found]
        [-0.8061, 0.5, 0.2066]
    """
    _check_moments(mean, cov)
    return _expected(likelihood, mean, cov, y, eps)


def compute_probabilities(
    likelihood: Likelihood,
    mean: Tensor,
    cov: Covariance,
    *,
    link: str = "probit",
    samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Class probabilities E[p(y | f)] with f ~ N(mean, cov), (n, c); for `Bernoulli` those of 1.

    Args:
        likelihood: `Bernoulli`, `Categorical`, `Ordinal`, or one of the user's own, whose probabilities are always by
            "mc".
        mean: (n, c).
        cov: (n, c, c), or (n, c) for variances of independent outputs, or factors (n, c, k) of the covariances.
        link: "probit" scales each logit by :math:`1 / \sqrt{1 + \pi v / 8}` with its own variance v, and is an
            approximation that leaves out covariances; "centered" does the same to logits less their average, whose
            variance leaves out what moves all logits together and no probability; "bridge" is the mean of the Dirichlet
            distribution whose Laplace approximation in the logits f is (Hobbhahn et al. 2022), for `Categorical`; "mc"
            averages over draws of f.
        samples: Draws of "mc"; the standard error of a probability is at most ``0.5 / sqrt(samples)``.
        generator: Of the draws; by default one with seed 0. All examples share them, so that the probabilities of an
            example do not depend on which others are asked for.

    Example:
        >>> compute_probabilities(Bernoulli(), torch.ones(1, 1), torch.full((1, 1), 100.0))
        tensor([[0.5393]])
    """
    _check_moments(mean, cov)
    if LIKELIHOODS.get(type(likelihood).__name__) is not type(likelihood):
        link = "mc"  # all that is known of a user's likelihood is its mean
    elif not isinstance(likelihood, Bernoulli | Categorical | Ordinal):
        raise TypeError(
            "compute_probabilities gives probabilities of classes, for Bernoulli, Categorical and Ordinal; got "
            f"{likelihood!r}. For regression use the mean and variance of f and the noise."
        )
    if isinstance(likelihood, Ordinal):
        return _ordinal_probabilities(likelihood, mean, _marginal(cov, mean))
    if link == "probit":
        return likelihood.mean(mean / (1 + math.pi / 8 * _marginal(cov, mean)).sqrt())
    if link == "centered":
        mean, v = _centered(likelihood, mean, cov)
        return likelihood.mean(mean / (1 + math.pi / 8 * v).sqrt())
    if link == "bridge":
        return _bridge(likelihood, mean, cov)
    if link != "mc":
        raise ValueError(f"link must be 'probit', 'centered', 'bridge' or 'mc'; got {link!r}.")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be a positive number of draws; got {samples!r}.")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    n, c = mean.shape
    root = _square_root(cov, mean)
    total = torch.zeros_like(likelihood.mean(mean))
    eps = standard_normal((samples, 1, root.shape[-1]), mean, generator)
    for part in eps.split(max(1, 2**22 // max(1, n * c))):  # so that the draws of f take little memory
        total += likelihood.mean(mean + _times(root, part)).sum(0)
    return total / samples


def _ordinal_probabilities(likelihood: Ordinal, mean: Tensor, v: Tensor) -> Tensor:
    """Probabilities of all classes, (n, K): differences of E[s(b - f)], by quadrature whatever the link."""
    std = v.sqrt()
    # E[s(b - f)] is what `_logistic` calls a miss.
    below = [_logistic(mean - b, std)[1] for b in likelihood.known_thresholds(mean).unbind()]
    edges = torch.cat([torch.zeros_like(mean), *below, torch.ones_like(mean)], 1)
    return edges.diff(dim=1).clamp(min=0)  # below zero only by rounding


def _centered(likelihood: Likelihood, mean: Tensor, cov: Covariance) -> tuple[Tensor, Tensor]:
    """Logits less their average over the classes, and their variances; logits of labels on or off have no average."""
    if not isinstance(likelihood, Categorical):
        return mean, _marginal(cov, mean)
    (sums, total), c = _sums(cov), mean.shape[1]
    v = _marginal(cov, mean) - 2 / c * sums + total / c**2
    return mean - mean.mean(-1, keepdim=True), _nonnegative(v, "variance")


def _sums(cov: Covariance) -> tuple[Tensor, Tensor]:
    """The covariance of each output with the sum of all outputs, (n, c), and the variance of that sum, (n, 1)."""
    if isinstance(cov, FactoredCovariance):
        along = cov.T.sum(1, keepdim=True)
        return (cov.T * along).sum(-1), along.square().sum(-1)
    sums = cov if cov.ndim == 2 else cov.sum(-1)
    return sums, sums.sum(-1, keepdim=True)


def _bridge(likelihood: Likelihood, mean: Tensor, cov: Covariance) -> Tensor:
    """Dirichlet parameters ``(1 - 2 / c + exp(m) sum exp(-m) / c^2) / v``, for f given that its entries add up to 0."""
    if not isinstance(likelihood, Categorical):
        raise TypeError(f"link='bridge' is for several classes; got {likelihood!r}. Use 'probit' or 'mc'.")
    ones, total = _sums(cov)
    share = torch.where(total > 0, ones / total, torch.full_like(ones, 1 / mean.shape[1]))
    mean = mean - share * mean.sum(-1, keepdim=True)
    v = _marginal(cov, mean) - share * ones
    c = mean.shape[1]
    # Where nothing is left to vary the Dirichlet distribution is a point: all that counts is in the numerator.
    log_alpha = torch.log(1 - 2 / c + torch.exp(mean + torch.logsumexp(-mean, 1, keepdim=True)) / c**2)
    tiny = torch.finfo(v.dtype).tiny
    return torch.softmax(log_alpha - v.clamp_min(tiny).log(), 1)


# By likelihood.


@singledispatch
def _expected(likelihood: Likelihood, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    """See `take_expectations`; the moments are checked."""
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"Expectations are over the density of a linnet.likelihoods.Likelihood; got {likelihood!r}.")
    if not likelihood.diagonal:
        _check_draws(likelihood, eps, mean)
        assert eps is not None
        f = mean + _times(_square_root(cov, mean), eps)
        return Expected(
            likelihood.log_prob(f, y).mean(0),
            likelihood.residual(f, y).mean(0),
            likelihood.observed_curvature(f, y).mean(0),
        )
    # Outputs are apart, so that all of them may stand at the same node at once.
    std = _marginal(cov, mean).sqrt()
    log_prob, residual, curvature = torch.zeros_like(mean[:, 0]), torch.zeros_like(mean), torch.zeros_like(mean)
    for z, w in nodes():
        f = mean + z * std
        log_prob += w * likelihood.log_prob(f, y)
        residual += w * likelihood.residual(f, y)
        curvature += w * likelihood.observed_curvature(f, y)
    return Expected(log_prob, residual, curvature)


@_expected.register
def _weighted(likelihood: Weighted, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    y, w = likelihood.split(y)
    found = _expected(likelihood.inner, mean, cov, y, eps)
    blocks = w[:, None] if likelihood.diagonal else w[:, None, None]
    return Expected(w * found.log_prob, w[:, None] * found.residual, blocks * found.curvature)


@_expected.register
def _poisson(likelihood: Poisson, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    rate = (mean + 0.5 * _marginal(cov, mean)).exp()
    return Expected((y * mean - rate - torch.lgamma(y + 1)).sum(-1), y - rate, rate)


@_expected.register
def _weibull(likelihood: Weibull, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    k, (time, seen) = likelihood.k, (y[:, :1], y[:, 1:])
    z = k * (time.log() - mean)
    hazard = (z + 0.5 * k**2 * _marginal(cov, mean)).exp()
    log_prob = seen * (math.log(k) + z - time.log()) - hazard
    return Expected(log_prob[:, 0], k * (hazard - seen), k**2 * hazard)


@_expected.register
def _negative_binomial(
    likelihood: NegativeBinomial, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None
) -> Expected:
    std, r, g = _marginal(cov, mean).sqrt(), 1 / likelihood.alpha, likelihood.shift(mean)
    up, miss, curvature = _logistic(g, std)
    down, other, _ = _logistic(-g, std)
    log_prob = (y * up + r * down + likelihood.constant(y)).sum(-1)
    return Expected(log_prob, y * miss - r * other, (y + r) * curvature)


@_expected.register
def _ordinal(likelihood: Ordinal, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    below, above, share = likelihood.bounds(mean, y)
    std = _marginal(cov, mean).sqrt()
    parts = []
    for x in (below, above):  # the first and the last class have one of the two
        there = torch.isfinite(x)
        parts.append([torch.where(there, t, 0.0) for t in _logistic(torch.where(there, x, 0.0), std)])
    (low, under, bend), (high, over, turn) = parts
    return Expected((low + high + share)[:, 0], over - under, bend + turn)


@_expected.register
def _known_noise(likelihood: KnownNoise, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    curvature = likelihood.observed_curvature(mean, y)
    spread = 0.5 * (_marginal(cov, mean) * curvature).sum(-1)
    return Expected(likelihood.log_prob(mean, y) - spread, likelihood.residual(mean, y), curvature)


@_expected.register
def _gaussian(likelihood: Gaussian, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    curvature = likelihood.curvature(mean)
    spread = 0.5 * (_marginal(cov, mean) * curvature).sum(-1)
    return Expected(likelihood.log_prob(mean, y) - spread, likelihood.residual(mean, y), curvature)


@_expected.register
def _heteroscedastic(
    likelihood: Heteroscedastic, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None
) -> Expected:
    # E[g(m) exp(-s)] = E[exp(-s)] E[g(m - cov(m, s))]: weighting a Gaussian by exp(-s) only shifts its mean.
    (m, s), (v, w) = likelihood.split(mean), likelihood.split(_marginal(cov, mean))
    d = m.shape[-1]
    if isinstance(cov, FactoredCovariance):
        cross = (cov.T[:, :d] * cov.T[:, d:]).sum(-1)
    else:
        cross = cov[:, :d, d:].diagonal(dim1=-2, dim2=-1) if cov.ndim == 3 else torch.zeros_like(m)
    precision = (0.5 * w - s).exp()
    error = y - m + cross
    squares = precision * (error.square() + v)
    return Expected(
        -0.5 * (squares + s + math.log(2 * math.pi)).sum(-1),
        torch.cat([precision * error, 0.5 * (squares - 1)], -1),
        torch.cat([precision, torch.full_like(s, 0.5)], -1),
    )


@_expected.register
def _bernoulli(likelihood: Bernoulli, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    sign = 2 * y - 1
    log_prob, miss, curvature = _logistic(sign * mean, _marginal(cov, mean).sqrt())
    return Expected(log_prob.sum(-1), sign * miss, curvature)


@_expected.register
def _categorical(likelihood: Categorical, mean: Tensor, cov: Covariance, y: Tensor, eps: Tensor | None) -> Expected:
    _check_draws(likelihood, eps, mean)
    assert eps is not None
    log_pi = F.log_softmax(mean + _times(_square_root(cov, mean), eps), -1)
    pi, label = log_pi.exp(), y[:, None]
    # As in `Categorical.residual`: the entry of the label is the sum of the other probabilities.
    others = pi.mean(0).scatter(-1, label, 0.0)
    return Expected(
        log_pi.mean(0).gather(-1, label)[:, 0],
        (-others).scatter(-1, label, others.sum(-1, keepdim=True)),
        laplacian(torch.einsum("snc,snd->ncd", pi, pi) / len(pi)),
    )


def _check_draws(likelihood: Likelihood, eps: Tensor | None, mean: Tensor) -> None:
    n, c = mean.shape
    if eps is None or eps.ndim != 3 or eps.shape[0] == 0 or eps.shape[1] not in (1, n) or eps.shape[2] != c:
        raise ValueError(
            f"{type(likelihood).__name__} takes expectations over draws, so it needs eps of shape (s, {n}, {c}), "
            f"standard normal; got {None if eps is None else tuple(eps.shape)}."
        )


# Targets.


class PredictedTarget(NamedTuple):
    """The first moments of a target over Gaussian outputs, (n, c) each.

    Attributes:
        mean: E[y].
        spread: The variance of E[y | f]: what is not known of the function.
        noise: E[Var[y | f]]: the noise of an observation.
    """

    mean: Tensor
    spread: Tensor
    noise: Callable[[], Tensor]


def predict_target(likelihood: Likelihood, mean: Tensor, variance: Tensor) -> PredictedTarget:
    """The moments of a target for independent outputs f ~ N(mean, variance), (n, c) each.

    Closed forms for Gaussian noise, counts and times. Else a sum over 128 outputs, for a likelihood whose
    mean of an output depends on that output alone.

    Example:
        >>> found = predict_target(Poisson(), torch.zeros(1, 1), torch.full((1, 1), 0.5))
        >>> round(float(found.mean), 4), round(float(found.spread), 4), round(float(found.noise()), 4)
        (1.284, 1.0696, 1.284)
    """
    v = _marginal(variance, mean)
    if isinstance(likelihood, Gaussian):
        return PredictedTarget(mean, v, lambda: likelihood.variance(mean))
    if isinstance(likelihood, ExponentialMean):
        a, b, d = likelihood.powers
        first, second = (mean + 0.5 * v).exp(), (2 * mean + 2 * v).exp()
        return PredictedTarget(a * first, a**2 * first.square() * torch.expm1(v), lambda: b * first + d * second)
    if not likelihood.diagonal:
        raise NotImplementedError(
            f"The mean of a target of {likelihood!r} depends on several outputs together, and averages of such means "
            "are not known. Use predict_outputs, or sample."
        )
    std, rule = v.sqrt(), nodes()
    means = [likelihood.mean(mean + z * std) for z, _ in rule]
    if means[0].shape != mean.shape:
        raise ValueError(
            f"mean(f) of {likelihood!r} must have the shape of f, {tuple(mean.shape)}; got {tuple(means[0].shape)}."
        )
    average = sum(w * m for m, (_, w) in zip(means, rule, strict=True))
    spread = sum(w * (m - average).square() for m, (_, w) in zip(means, rule, strict=True))
    assert isinstance(average, Tensor) and isinstance(spread, Tensor)

    def noise() -> Tensor:
        found = sum(w * likelihood.variance(mean + z * std) for z, w in rule)
        assert isinstance(found, Tensor)
        return found

    return PredictedTarget(average, spread, noise)


def log_predictive(likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """log E[p(y | f)] of each example (n,) for one output f ~ N(mean, variance), (n, 1) each, by quadrature."""
    if mean.shape[1] != 1:
        raise NotImplementedError(
            f"The predictive density of {likelihood!r} is known for one output; the network has {mean.shape[1]}."
        )
    std = _marginal(variance, mean).sqrt()
    terms = [likelihood.log_prob(mean + z * std, y) + math.log(w) for z, w in nodes()]
    return torch.stack(terms).logsumexp(0)


# Gaussian outputs.


def _check_moments(mean: Tensor, cov: Covariance) -> None:
    n, c = mean.shape
    if isinstance(cov, FactoredCovariance):
        if tuple(cov.T.shape[:2]) != (n, c) or cov.T.ndim != 3:
            raise ValueError(
                f"The mean has shape ({n}, {c}), so T needs shape ({n}, {c}, k); got {tuple(cov.T.shape)}."
            )
    elif tuple(cov.shape) not in ((n, c), (n, c, c)):
        raise ValueError(
            f"The mean has shape ({n}, {c}), so cov needs shape ({n}, {c}, {c}), or ({n}, {c}) for variances; "
            f"got {tuple(cov.shape)}."
        )


def _marginal(cov: Covariance, mean: Tensor) -> Tensor:
    """Variances (n, c)."""
    if isinstance(cov, FactoredCovariance):
        return cov.T.square().sum(-1)
    return _nonnegative(cov if cov.ndim == 2 else cov.diagonal(dim1=-2, dim2=-1), "variance")


def _nonnegative(values: Tensor, what: str) -> Tensor:
    """Values that are negative by rounding become zero; others are an error."""
    if values.numel() == 0:
        return values
    finite = torch.isfinite(values)
    largest = torch.where(finite, values, 0.0).max()
    bad = ~(finite & (values >= -math.sqrt(torch.finfo(values.dtype).eps) * largest)).all(1)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"The covariance of f is not positive semi-definite: example {i} has {what} {float(values[i].min()):.3g}, "
            f"the largest is {float(largest):.3g}. Compute the posterior in float64, or with more noise."
        )
    return values.clamp(min=0)


def factor_covariance(cov: Tensor, mean: Tensor) -> FactoredCovariance:
    """Covariances (n, c, c) by their symmetric roots, for expectations at many means.

    >>> factor_covariance(torch.tensor([[[4.0]]]), torch.zeros(1, 1)).T
    tensor([[[2.]]])
    """
    return FactoredCovariance(_square_root(cov, mean))


def _square_root(cov: Covariance, mean: Tensor) -> Tensor:
    """The symmetric square root of each block, or of each variance; blocks may be singular. A factor is a root."""
    if isinstance(cov, FactoredCovariance):
        return cov.T
    if cov.ndim == 2:
        return _marginal(cov, mean).sqrt()
    if not bool(cov.any()):
        return cov
    values, vectors = torch.linalg.eigh(cov)
    return (vectors * _nonnegative(values, "eigenvalue").sqrt()[..., None, :]) @ vectors.mT


def _times(root: Tensor, eps: Tensor) -> Tensor:
    """Draws (s, n, c) with the square root of `_square_root`, from standard normal ones (s, n or 1, c or k)."""
    return root * eps if root.ndim == 2 else torch.einsum("ncd,snd->snc", root, eps.expand(-1, len(root), -1))


@cache
def _rules() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Nodes and weights: of N(0, 1), and of the integral from 0 to 40, dense near 0."""
    z, w = np.polynomial.hermite_e.hermegauss(32)
    a, v = np.polynomial.legendre.leggauss(48)
    a, v = (a + 1) / 2, v / 2
    hermite = list(zip(z.tolist(), (w / w.sum()).tolist(), strict=True))
    return hermite, list(zip((40 * a**2).tolist(), (80 * a * v).tolist(), strict=True))


@cache
def nodes() -> list[tuple[float, float]]:
    """Nodes and weights of N(0, 1) for any smooth function: the trapezoidal rule, which sees details of a tenth of a
    standard deviation anywhere, where Gauss-Hermite quadrature sees them near zero alone."""
    z = np.linspace(-8.5, 8.5, 128)
    w = np.exp(-0.5 * z**2)
    return list(zip(z.tolist(), (w / w.sum()).tolist(), strict=True))


def _logistic(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""E[log s(f)], E[s(-f)] and E[s(f) s(-f)] for the logistic function s and f ~ N(mean, std^2).

    Gauss-Hermite quadrature, exact to 1e-12 up to std 1, fails where std is large: s is a step there. What remains of
    each function beside its limit (min(f, 0), a step, and zero) is a bump around f = 0 that decays like exp(-|f|),
    and its integral against a Gaussian density that is wider than it is as exact by Gauss-Legendre quadrature.
    """
    hermite, legendre = _rules()
    wide = std > 1
    narrow, sigma = torch.where(wide, 0.0, std), torch.where(wide, std, 1.0)
    inner = [torch.zeros_like(mean) for _ in range(3)]
    for z, w in hermite:
        f = mean + z * narrow
        on, off = torch.sigmoid(f), torch.sigmoid(-f)
        for total, value in zip(inner, (F.logsigmoid(f), off, on * off), strict=True):
            total += w * value
    center = mean / sigma
    left = torch.special.ndtr(-center)
    outer = [mean * left - sigma * _density(center), left.clone(), torch.zeros_like(mean)]
    for t, w in legendre:
        above, below = (w * _density((side * t - mean) / sigma) / sigma for side in (1, -1))
        q = 1 / (1 + math.exp(t))
        outer[0] -= math.log1p(math.exp(-t)) * (above + below)
        outer[1] += q * (above - below)
        outer[2] += q * (1 - q) * (above + below)
    log_prob, miss, curvature = (torch.where(wide, b, a) for a, b in zip(inner, outer, strict=True))
    return log_prob, miss, curvature


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
