r"""A preconditioner by a direct solve: ``P = I + Phi^T Phi / tau`` for the few rows Phi that carry the curvature.

.. math:: P^{-1} = I - \Phi^\top \, (\tau I + \Phi \Phi^\top)^{-1} \, \Phi

takes the Gram matrix of the rows, (m, m), and two products with them for every application, and holds nothing of the
size of the parameters: where there are millions of these, a sketch has memory for a few hundred directions.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from linnet.linalg.cholesky import cholesky_, cholesky_solve, log_det_from
from linnet.linalg.operator import LinearOperator

REFINED = 2**34
"""Bytes up to which a GPU decomposes matrices of function space in float64, whatever the Jacobian is."""

LOOKED_AT = 8
"""Leading eigenvectors of the Gram matrix, and as many random vectors, that show its rounding."""


@final
class Direct:
    """``P = I + Phi^T Phi / tau``, applied by way of a Cholesky factor.

    Args:
        Phi: (m, p).
        factor: Lower, of ``tau I + Phi Phi^T``.
        tau: At least 1. The eigenvalues of ``P^-1 (I + Phi^T Phi)`` lie between 1 and it.
    """

    def __init__(self, Phi: LinearOperator, factor: Tensor, tau: float) -> None:
        self.Phi, self.factor, self.tau = Phi, factor, tau

    @property
    def m(self) -> int:
        """Rows and columns of P."""
        return self.Phi.shape[1]

    @property
    def rank(self) -> int:
        """Rows of Phi."""
        return self.Phi.shape[0]

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R`` for R of shape (p, k)."""
        inner = cholesky_solve(self.factor, (self.Phi @ R).to(self.factor.dtype), overwrite=True)
        return R - self.Phi.T @ inner.to(R.dtype)

    @property
    def log_det(self) -> Tensor:
        """``log det P``, added up in float64."""
        return log_det_from(self.factor) - self.rank * math.log(self.tau)

    def sample(self, k: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, P), (m, k), by way of the generator's device: the same on every other."""
        Phi = self.Phi
        h, e = (
            torch.randn(size, k, dtype=Phi.dtype, device=generator.device, generator=generator).to(Phi.device)
            for size in (self.m, self.rank)
        )
        return h + Phi.T @ (e / self.tau**0.5)

    def __repr__(self) -> str:
        return f"Direct(rows={self.rank}, columns={self.Phi.shape[1]}, tau={self.tau:.3g})"


@torch.no_grad()
def direct(
    R: LinearOperator, S: Tensor, *, generator: torch.Generator, coarse: LinearOperator | None = None
) -> Direct | None:
    """The preconditioner for ``I + S^(1/2) R^T R S^(1/2)``; None where rounding leaves no Cholesky factor.

    The Gram matrix beside the identity may have eigenvalues in the millions, and what rounding does to them counts in
    units of that identity. It is measured, along the leading eigenvectors and some random ones, by products with R: a
    bias, such as tensor cores have, is divided out, and tau is one and twice what is left.

    Args:
        R: (m, p).
        S: (p,), not negative.
        generator: Of the random vectors.
        coarse: R in a cheaper precision, for the Gram matrix alone.

    >>> from linnet.linalg.matrices import Matrix
    >>> P = direct(Matrix(torch.tensor([[3.0, 0.0]])), torch.ones(2), generator=torch.Generator())
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
        return Direct(Phi, cholesky_(K), tau)
    except ArithmeticError:
        return None


def _leading(K: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal columns (m, 2 `LOOKED_AT`): near the leading eigenvectors of K, and random ones."""
    m = len(K)
    V = torch.randn(m, min(m, 2 * LOOKED_AT), dtype=K.dtype, device=generator.device, generator=generator).to(K.device)
    V, rest = V[:, :LOOKED_AT], V[:, LOOKED_AT:]
    for _ in range(4):
        V = torch.linalg.qr(K @ V).Q
    return torch.linalg.qr(torch.cat([V, rest], 1)).Q
