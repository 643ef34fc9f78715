r"""The Laplace evidence of a network, and the prior scales and noise that maximize it.

.. math:: \log Z = \log p(y \mid f) - \tfrac12 \theta^\top A \theta + \tfrac12 \log\det A - \tfrac12 \log\det H,
          \qquad H = J^\top B J + A

with prior precisions ``A = 1 / S`` on theta itself: at the network's own weights, or at the mode that the linearized
network has under this prior (Antoran et al. 2022). With the effective dimensions of
`linnet.inference.evidence.log_determinants` its derivatives are closed forms,

.. math:: \partial_{\log s_l} \log Z = \tfrac12 \left(\theta_l^\top A_l \theta_l - \gamma_l\right), \qquad
          \partial_{\log \sigma^2} \log Z = \tfrac12 \left(\|r\|^2 / \sigma^2 - n c + \textstyle\sum_l \gamma_l\right),

and setting them to zero gives MacKay's fixed point, ``a_l = gamma_l / ||theta_l||^2`` and
``noise = ||r||^2 / (n c - gamma)``. At the mode of the linear model the curvature of a classifier moves with the prior,
which adds to the first (`linnet.inference.evidence.layer_scales.scale_gradient`) and which the fixed point leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from linnet.inference.evidence.log_determinants import LogDet
from linnet.probability.priors import Prior


@dataclass(frozen=True)
class Terms:
    """What the evidence is made of, at some scales and noise.

    Attributes:
        log_likelihood: ``log p(y | f)``.
        shares: For each group ``theta^T A theta``.
        log_det: ``log det H - log det A``.
        gamma: For each group its effective dimension.
        energy: The squared residuals over the noise; None where the likelihood has no noise.
        rows: n c.
        moved: For each group, what the curvature adds to a derivative by moving with the mode; None where it does not.
    """

    log_likelihood: float
    shares: list[float]
    log_det: float
    gamma: list[float]
    energy: float | None
    rows: int
    moved: list[float] | None = None

    @property
    def value(self) -> float:
        """The log evidence."""
        return self.log_likelihood - 0.5 * (sum(self.shares) + self.log_det)

    @property
    def slopes(self) -> list[float]:
        """Its derivatives in the logarithms of the scales."""
        still = [0.5 * (q - g) for q, g in zip(self.shares, self.gamma, strict=True)]
        return still if self.moved is None else [a + b for a, b in zip(still, self.moved, strict=True)]

    @property
    def noise_slope(self) -> float:
        """Its derivative in the logarithm of the noise."""
        return 0.0 if self.energy is None else 0.5 * (self.energy - self.rows + sum(self.gamma))


Evidence = Callable[[Sequence[float], float], Terms]
"""From prior scales and noise to the evidence and its derivatives."""


@dataclass(frozen=True)
class AtNetwork:
    """The evidence at the network's weights.

    Attributes:
        log_det: ``log det H - log det A`` and effective dimensions.
        norms: For each group ``theta^T theta`` in units of the prior's variance at unit scale.
        log_likelihood: At noise one.
        energy: The squared residuals at noise one; None where the likelihood has no noise.
        rows: n c.
    """

    log_det: LogDet
    norms: Sequence[float]
    log_likelihood: float
    energy: float | None
    rows: int

    def __call__(self, scales: Sequence[float], noise: float) -> Terms:
        log_det, gamma = self.log_det(scales, 1 / noise)
        shares = [q / s for q, s in zip(self.norms, scales, strict=True)]
        likelihood, energy = self.log_likelihood, self.energy
        if energy is not None:
            likelihood += 0.5 * energy - 0.5 * (energy / noise + self.rows * math.log(noise))
            energy /= noise
        return Terms(likelihood, shares, log_det, gamma, energy, self.rows)


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
