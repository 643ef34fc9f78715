"""How far a posterior that has forgotten examples can be from a fit without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHOSEN = (
    "prior variances, noise, mean function and parameters of the likelihood that fit has chosen were chosen with the "
    "examples that are forgotten"
)
STANDARD = "the network standardizes its inputs, and the mean function has its level, from all examples of the fit"
FEATURES = "the features of the inputs are in units of the mean and the standard deviation of all examples of the fit"
HEAD = "the head of the network was fitted with the examples that are forgotten (attach_head)"
TRAINED = (
    "the weights of the network were trained with whatever they were trained with: forgetting changes the error bars "
    "around them alone"
)


@dataclass(frozen=True)
class Certificate:
    """How far a posterior can be from a refit: a fit to the examples that stay, with the same prior and noise.

    Attributes:
        forgotten: How many examples were forgotten, by all calls of ``forget`` together.
        mean: Bound of the difference of the mean of f at any input from that of the refit, in units of the prior
            standard deviation of f there; None where there is no bound.
        variance: Bound of the difference of the variance of f at any input, in units of the prior variance there; None
            where there is no bound: for samples, for likelihoods without a closed form, and for structures of
            `linnet.Laplace` that were made again, which are those of the refit itself.
        remains: What still depends on the examples that were forgotten, in words: no bound covers it.
    """

    forgotten: int
    mean: float | None
    variance: float | None
    remains: tuple[str, ...] = ()


def bound_distance(
    J: Any, variance: Tensor, delta: Tensor, residual: Callable[[Tensor], Tensor], size: Callable[[Tensor], Tensor]
) -> float:
    r"""Bound of the distance of a displacement from the mode, in whitened weights.

    The negative log posterior :math:`\psi(u)` is strongly convex with modulus one, so that
    :math:`\|u - u^*\| \le \|\nabla\psi(u)\|`, and the mean at an input with features :math:`\phi` is off by
    :math:`|\phi|` times that at most: :math:`|\phi|` is the prior standard deviation there. What rounding may hide of
    the gradient is added.

    Args:
        J: Of the examples that stay, (n c, p).
        variance: S, (p,).
        delta: The displacement, (p,).
        residual: From ``J delta`` (n c,) to the gradient of log p in f, (n c,).
        size: From ``J delta`` to the size of the numbers whose difference the residual is, (n c,).
    """
    d = variance.sqrt()
    shift = J @ delta
    u = torch.where(d > 0, delta / torch.where(d > 0, d, 1.0), 0.0)
    gradient = u - d * (J.T @ residual(shift))
    largest = (J.gram_diag(scale=variance) * size(shift).square()).sum().sqrt()
    rounding = J.eps * (float(u.norm()) + len(shift) ** 0.5 * float(largest))
    return float(gradient.norm()) + rounding


def bound_rounding(factor: Tensor, *, left: float = 1.0) -> float:
    """Bound, to first order, of what rounding does to variances: eps times size times trace of ``C C^T``.

    Args:
        factor: C, (m, m), the lower Cholesky factor of a precision that is at least the identity.
        left: The share of the precision that a downdate has left.
    """
    return len(factor) * torch.finfo(factor.dtype).eps * float(factor.tril().square().sum()) / left
