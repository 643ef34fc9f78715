r"""The Laplace evidence of a network: at the network's own weights, and at the mode of the linearized network.

.. math:: \log Z = \log p(y \mid f) - \tfrac12 \theta^\top A \theta + \tfrac12 \log\det A - \tfrac12 \log\det H,
          \qquad H = J^\top B J + A

with prior precisions ``A = 1 / S`` on theta itself. With the effective dimensions of
`linnet.inference.evidence.log_determinants` the derivatives are closed forms,

.. math:: \partial_{\log s_l} \log Z = \tfrac12 \left(\theta_l^\top A_l \theta_l - \gamma_l\right), \qquad
          \partial_{\log \sigma^2} \log Z = \tfrac12 \left(\|r\|^2 / \sigma^2 - n c + \textstyle\sum_l \gamma_l\right),

and setting them to zero gives MacKay's fixed point, ``a_l = gamma_l / ||theta_l||^2`` and
``noise = ||r||^2 / (n c - gamma)``.

The network's weights are a mode of its own loss, with its own regularizer if there was one. The linear model

.. math:: h(\theta) = f(\theta_0) + J (\theta - \theta_0), \qquad \theta \sim N(0, S)

has another mode, which its evidence asks for (Antoran et al. 2022): in networks with normalization layers the scale of
the weights is arbitrary, the loss says nothing about that scale, and ``theta0^T A theta0`` says nothing with it. There
the curvature of a classifier moves with the prior. That adds to the first derivative
(`linnet.inference.evidence.laplace.scale_slopes`), and MacKay's fixed point leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from linnet.inference import (
    LogDet,
    Mode,
    Slope,
    SolverSettings,
    add_kernels,
    choose_solver,
    mode_by_passes,
    scale_slopes,
)
from linnet.inference.mode import newton
from linnet.jacobian import Jacobian
from linnet.probability import Likelihood, Prior, row_root

Amount = TypeVar("Amount", float, Tensor)


def unexplained(rows: float, gamma: Amount, *, bounded: bool) -> Amount:
    r"""The observations that an effective dimension leaves to the noise.

    ``rows - gamma`` at the largest evidence (MacKay). :math:`\gamma = \sum_i v_i / \sigma^2` with variances v at the
    training data, which have seen observation i, so that no observation counts for more than one. The variances of a
    structure without correlations are larger, gamma may exceed the rows, and the noise of largest evidence is far too
    large. Bounded, such a v counts as if it were to see observation i yet: :math:`v_i / (v_i + \sigma^2)`, for all
    together ``gamma / (1 + gamma / rows)``.

    >>> unexplained(100, 60.0, bounded=False), [unexplained(100, gamma, bounded=True) for gamma in (60.0, 300.0)]
    (40.0, [62.5, 25.0])
    """
    return rows / (1 + gamma / rows) if bounded else rows - gamma


@dataclass(frozen=True)
class EvidenceTerms:
    """What the evidence is made of, at some scales and noise.

    Attributes:
        log_likelihood: ``log p(y | f)``.
        shares: For each group ``theta^T A theta``.
        log_det: ``log det H - log det A``.
        gamma: For each group its effective dimension.
        energy: The squared residuals over the noise; None where the likelihood has no noise.
        rows: n c, by the weights of the examples.
        moved: For each group, what the curvature adds to the derivative by moving with the mode; None for nothing.
    """

    log_likelihood: float
    shares: list[float]
    log_det: float
    gamma: list[float]
    energy: float | None
    rows: float
    moved: list[float] | None = None

    @property
    def value(self) -> float:
        """The log evidence."""
        return self.log_likelihood - 0.5 * (sum(self.shares) + self.log_det)

    @property
    def slopes(self) -> list[Slope]:
        """Its derivatives in the logarithms of the scales."""
        moved = self.moved or [0.0] * len(self.gamma)
        return [Slope(*terms) for terms in zip(self.shares, self.gamma, moved, strict=True)]

    def noise_slope(self, *, bounded: bool = False) -> Slope:
        """Its derivative in the logarithm of the noise; bounded, what vanishes at the bounded noise instead."""
        return Slope(self.energy or 0.0, unexplained(self.rows, sum(self.gamma), bounded=bounded))


Evidence = Callable[[Sequence[float], float], EvidenceTerms]
"""From prior scales and noise to the evidence and its derivatives."""


@dataclass(frozen=True)
class AtNetwork:
    """The evidence at the network's weights.

    Attributes:
        log_det: ``log det H - log det A`` and effective dimensions.
        norms: For each group ``theta^T theta`` in units of the prior's variance at unit scale.
        log_likelihood: At noise one.
        energy: The squared residuals at noise one; None where the likelihood has no noise.
        rows: n c, by the weights of the examples.
    """

    log_det: LogDet
    norms: Sequence[float]
    log_likelihood: float
    energy: float | None
    rows: float

    def __call__(self, scales: Sequence[float], noise: float) -> EvidenceTerms:
        log_det, gamma = self.log_det(scales, 1 / noise)
        shares = [q / s for q, s in zip(self.norms, scales, strict=True)]
        likelihood, energy = self.log_likelihood, self.energy
        if energy is not None:
            likelihood += 0.5 * energy - 0.5 * (energy / noise + self.rows * math.log(noise))
            energy /= noise
        return EvidenceTerms(likelihood, shares, log_det, gamma, energy, self.rows)


def group_norms(theta: Tensor, prior: Prior, index: Tensor | None = None) -> list[float]:
    """``theta^T theta`` over the prior's base, for each of its groups; parameters of variance zero are fixed.

    Args:
        theta: (p,).
        prior: Of them.
        index: Those that count; None for all.
    """
    squares = (theta.double().square() / prior.base.double()).where(prior.base > 0, 0.0)
    group = prior.group
    if index is not None:
        squares, group = squares[index], None if group is None else group[index]
    if group is None:
        return [float(squares.sum())]
    return squares.new_zeros(len(prior.scales)).index_add_(0, group, squares).tolist()


@dataclass(frozen=True)
class LinearModel:
    """The linearized network and its data.

    Attributes:
        J: Of the training data.
        y: Targets, as the likelihood takes them.
        mean: h at theta = 0, (n, c): ``f(theta0) - J theta0``.
        settings: How to solve.
        rows: n c, by the weights of the examples.
    """

    J: Jacobian
    y: Tensor
    mean: Tensor
    settings: SolverSettings
    rows: float

    def mode(self, likelihood: Likelihood, variance: Tensor) -> tuple[Mode, Tensor]:
        """The mode, and its theta (p,), for prior variances (p,)."""
        J, d = self.J, variance.sqrt()
        rows, p = J.shape
        solver = choose_solver(rows, p, self.settings, device=J.device, kernels=2, steps=30, features=rows)
        if solver == "function":
            K = J.gram(scale=variance)
            found = newton.function_space(K, self.y, mean=self.mean, likelihood=likelihood, factor=False).checked()
            return found, variance * (J.T @ found.alpha)
        if solver == "weight":
            Phi = J.scaled(d).dense(limit=2**62)
            found = newton.weight_space(Phi, self.y, mean=self.mean, likelihood=likelihood, factor=False).checked()
        else:
            given = {"mean": self.mean, "likelihood": likelihood, "settings": self.settings}
            found, _ = mode_by_passes(J, self.y, variance=variance, **given)  # type: ignore[arg-type]
        assert found.u is not None
        return found, d * found.u


@dataclass(frozen=True)
class AtLinearMode:
    """The evidence at the mode of the linear model, which moves with the prior.

    Attributes:
        model: The linear model.
        prior: Of theta.
        likelihood: For a noise scale.
        log_det: For the root of the curvature at a mode, (n, c) or (n, c, c).
        energy: From outputs (n, c) to the squared residuals at noise one; None where the likelihood has no noise.
    """

    model: LinearModel
    prior: Prior
    likelihood: Callable[[float], Likelihood]
    log_det: Callable[[Tensor], LogDet]
    energy: Callable[[Tensor], float] | None

    def __call__(self, scales: Sequence[float], noise: float) -> EvidenceTerms:
        variance = self.prior.variance(list(scales)) if self.prior.scales else self.prior.base * scales[0]
        likelihood = self.likelihood(noise)
        mode, theta = self.model.mode(likelihood, variance)
        unit = self.likelihood(1.0)
        log_det, gamma = self.log_det(row_root(unit, mode.f, self.model.y))(scales, 1 / noise)
        shares = [q / s for q, s in zip(group_norms(theta, self.prior), scales, strict=True)]
        energy = None if self.energy is None else self.energy(mode.f) / noise
        return EvidenceTerms(mode.log_likelihood, shares, log_det, gamma, energy, self.model.rows)


@dataclass(frozen=True)
class AtKernelMode:
    """The same by dense kernels, for a likelihood without noise: exact, with the derivative of the moving curvature.

    Attributes:
        kernels: For each group its part of ``J S J^T`` at unit scale, (n c, n c).
        y: Targets.
        mean: h at theta = 0, (n, c).
        likelihood: Of the targets.
    """

    kernels: list[Tensor]
    y: Tensor
    mean: Tensor
    likelihood: Likelihood

    def __call__(self, scales: Sequence[float], noise: float) -> EvidenceTerms:
        K = add_kernels(self.kernels, scales)
        mode = newton.function_space(K, self.y, mean=self.mean, likelihood=self.likelihood, tolerance=1e-8).checked()
        assert mode.log_det is not None
        slopes = scale_slopes(self.kernels, scales, self.y, mode=mode, likelihood=self.likelihood)
        shares, gamma, moved = (list(column) for column in zip(*slopes, strict=True))
        return EvidenceTerms(mode.log_likelihood, shares, mode.log_det, gamma, None, len(K), moved)
