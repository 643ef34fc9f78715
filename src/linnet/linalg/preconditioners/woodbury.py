r"""A direct solve as a preconditioner: ``P = I + Phi^T Phi / tau`` for the few rows Phi that carry the curvature.

.. math:: P^{-1} = I - \Phi^\top \, (\tau I + \Phi \Phi^\top)^{-1} \, \Phi

takes the Gram matrix of the rows, (m, m), and two products with the rows for every application. Nothing of the size of
the parameters is held: where there are millions of parameters, a sketch has memory for a few hundred directions.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from linnet.linalg.cholesky import cholesky_, cholesky_solve, log_det_from
from linnet.linalg.operator import LinearOperator
from linnet.linalg.preconditioners.low_rank import Preconditioner

REFINED = 2**34
"""Bytes up to which a GPU decomposes matrices of function space in float64: more time for more accuracy."""


@final
class WoodburyPreconditioner(Preconditioner):
    """``P = I + Phi^T Phi / tau``, applied by way of a Cholesky factor.

    Args:
        Phi: (m, p).
        factor: Lower, of ``tau I + Phi Phi^T``.
        tau: At least 1. The eigenvalues of ``P^-1 (I + Phi^T Phi)`` lie between 1 and tau.
    """

    def __init__(self, Phi: LinearOperator, factor: Tensor, tau: float) -> None:
        self.Phi, self.factor, self.tau = Phi, factor, tau
        self.rank, self.m = Phi.shape

    def solve(self, R: Tensor) -> Tensor:
        inner = cholesky_solve(self.factor, (self.Phi @ R).to(self.factor.dtype), overwrite=True)
        return R - self.Phi.T @ inner.to(R.dtype)

    @property
    def log_det(self) -> Tensor:
        return log_det_from(self.factor) - self.rank * math.log(self.tau)

    def sample(self, k: int, generator: torch.Generator) -> Tensor:
        Phi = self.Phi
        h, e = (
            torch.randn(size, k, dtype=Phi.dtype, device=generator.device, generator=generator).to(Phi.device)
            for size in (self.m, self.rank)
        )
        return h + Phi.T @ (e / self.tau**0.5)

    def rescale(self, ratio: Tensor) -> WoodburyPreconditioner:
        """P itself: another one costs a Gram matrix, and this one some more iterations."""
        return self

    def __repr__(self) -> str:
        return f"WoodburyPreconditioner(rows={self.rank}, columns={self.Phi.shape[1]}, tau={self.tau:.3g})"


@torch.no_grad()
def woodbury_preconditioner(
    R: LinearOperator, S: Tensor, *, generator: torch.Generator, coarse: LinearOperator | None = None
) -> WoodburyPreconditioner | None:
    """The preconditioner for ``I + S^(1/2) R^T R S^(1/2)``; None where rounding leaves no Cholesky factor.

    The Gram matrix beside the identity may have eigenvalues in the millions, and their rounding counts in units of that
    identity. Products with R measure the rounding along the leading eigenvectors and along some random vectors. A bias,
    such as tensor cores have, is divided out, and tau is one plus twice the rest.

    Args:
        R: (m, p).
        S: (p,), not negative.
        generator: Source of the random vectors.
        coarse: R in a cheaper precision, for the Gram matrix alone.

    >>> from linnet.linalg.matrices import Matrix
    >>> P = woodbury_preconditioner(Matrix(torch.tensor([[3.0, 0.0]])), torch.ones(2), generator=torch.Generator())
    >>> P.solve(torch.ones(2, 1)).T
    tensor([[0.1000, 1.0000]])
    """
    Phi = R.scaled(S.sqrt())
    K = (R if coarse is None else coarse).gram(scale=S)
    if not bool(torch.isfinite(K).all()):
        raise ArithmeticError("The Gram matrix of the leading rows holds NaN or infinity: look at the Jacobian.")
    Q = _leading(K, generator)
    truth, found = (Phi @ (Phi.T @ Q)).double(), (K @ Q).double()
    bias = float((truth * found).sum() / found.square().sum().clamp_min(1e-300))
    left = float(torch.linalg.matrix_norm(bias * found - truth, 2))
    if bias <= 0:
        return None
    if K.device.type == "cpu" or 8 * K.numel() <= REFINED:
        K = K.double()
    K *= bias
    tau = 1 + 2 * left
    K.diagonal().add_(tau)
    try:
        return WoodburyPreconditioner(Phi, cholesky_(K), tau)
    except ArithmeticError:
        return None


def _leading(K: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal columns (m, 16): eight near the leading eigenvectors of K, and eight random ones."""
    m = len(K)
    V = torch.randn(m, min(m, 16), dtype=K.dtype, device=generator.device, generator=generator).to(K.device)
    V, rest = V[:, :8], V[:, 8:]
    for _ in range(4):
        V = torch.linalg.qr(K @ V).Q
    return torch.linalg.qr(torch.cat([V, rest], 1)).Q
