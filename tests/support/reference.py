"""The Gaussian process behind the regressor in dense float64 algebra: what every solver is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Posterior of ``r = J delta + noise`` at other inputs.

    Attributes:
        shift: (m c,), the mean's change at the other inputs.
        covariance: (m c, m c).
        log_evidence: ``log N(r | 0, J S J^T + noise)``.
        delta: (p,).
        alpha: (n c,).
    """

    shift: Tensor
    covariance: Tensor
    log_evidence: float
    delta: Tensor
    alpha: Tensor


def dense_posterior(J: Tensor, r: Tensor, *, variance: Tensor | float, noise: Tensor | float, new: Tensor) -> Reference:
    """By one inverse of the covariance of the observations.

    Args:
        J: (n c, p).
        r: (n c,).
        variance: S, (p,) or a number.
        noise: (n c,) or a number.
        new: (m c, p), the Jacobian of the other inputs.
    """
    S = torch.as_tensor(variance, dtype=J.dtype).expand(J.shape[1])
    Sigma = (J * S) @ J.T + torch.diag(torch.as_tensor(noise, dtype=J.dtype).expand(len(r)))
    inverse = torch.linalg.inv(Sigma)
    alpha = inverse @ r
    cross = (new * S) @ J.T
    value = -0.5 * float(r @ alpha + torch.linalg.slogdet(Sigma)[1] + len(r) * math.log(2 * math.pi))
    return Reference(
        shift=cross @ alpha,
        covariance=(new * S) @ new.T - cross @ inverse @ cross.T,
        log_evidence=value,
        delta=S * (J.T @ alpha),
        alpha=alpha,
    )
