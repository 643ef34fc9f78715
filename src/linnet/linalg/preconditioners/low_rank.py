r"""The interface of preconditioners, and preconditioners of low rank.

A preconditioner changes how fast a solve converges, never the solution. So directions that rounding has spoiled are
left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from linnet._common import TEMPORARY, full_precision
from linnet.linalg.float64 import eigh, inner, orthonormality


class Preconditioner(ABC):
    """A symmetric positive definite P, (m, m), close to the matrix of a solve, whose inverse and determinant are known.

    Attributes:
        m: Rows and columns of P.
        rank: Directions in which P is not the identity.
    """

    m: int
    rank: int

    @abstractmethod
    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R`` for R of shape (m, k)."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """``log det P``, added up in float64."""

    @abstractmethod
    def sample(self, k: int, generator: torch.Generator) -> Tensor:
        """Draws from N(0, P), (m, k). The generator's device draws, so the draws are the same on every other device."""

    @abstractmethod
    def rescale(self, ratio: Tensor) -> Preconditioner:
        """A preconditioner for ``Phi diag(ratio)`` where this one is for Phi, without a pass over the data.

        Args:
            ratio: (m,), not negative.
        """


@final
class LowRankPreconditioner(Preconditioner):
    r"""``P = I + U diag(lam) U^T``, whose powers are known too.

    Args:
        U: (m, r), orthonormal columns.
        lam: (r,), not negative.

    >>> P = LowRankPreconditioner(torch.eye(3)[:, :1], torch.tensor([3.0]))
    >>> P.multiply(torch.ones(3)), P.solve(torch.ones(3))
    (tensor([4., 1., 1.]), tensor([0.2500, 1.0000, 1.0000]))
    >>> P.log_det.exp()
    tensor(4., dtype=torch.float64)
    """

    def __init__(self, U: Tensor, lam: Tensor) -> None:
        if U.ndim != 2 or lam.shape != U.shape[1:] or U.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"A preconditioner needs U (m, r) and lam (r,) of float32 or float64; got {tuple(U.shape)} and "
                f"{tuple(lam.shape)}, {U.dtype}."
            )
        if lam.dtype != U.dtype or lam.device != U.device:
            raise TypeError(f"U is {U.dtype} on {U.device}, so lam must be too; got {lam.dtype} on {lam.device}.")
        if not bool(((lam >= 0) & torch.isfinite(lam)).all()):
            raise ValueError(
                f"lam must be finite and not negative; got {float(lam.min()):.3g} to {float(lam.max()):.3g}."
            )
        self.U, self.lam = U, lam
        self.m, self.rank = U.shape
        # One vector instead of U^T U, which would cost as much as building U.
        v = torch.arange(1, len(lam) + 1, dtype=U.dtype, device=U.device).sqrt().cos()
        with full_precision(U.device):
            off = torch.linalg.vector_norm(U.T @ (U @ v) - v) / torch.linalg.vector_norm(v).clamp_min(1e-30)
        # Rounding of the two products, as the root of m; of the entries of U; and of what made them orthonormal.
        limit = 4 * torch.finfo(U.dtype).eps * (self.m**0.5 + self.rank)
        limit += self.rank * orthonormality(self.m, self.rank, torch.float64)
        if not float(off) <= limit:
            raise ValueError(f"The columns of U must be orthonormal; U^T U is off the identity by {float(off):.1g}.")

    @staticmethod
    def from_directions(U: Tensor, lam: Tensor) -> LowRankPreconditioner:
        """``I + U diag(lam) U^T`` with nearly orthonormal U (m, r), which is overwritten, and lam in float64."""
        U, lam = _orthonormalize(U, lam)
        return LowRankPreconditioner(U, lam.to(U.dtype))

    @staticmethod
    def from_factor(Y: Tensor, C: Tensor, *, least: float = 0.01) -> LowRankPreconditioner:
        """``I + F F^T`` for ``F = Y C``, without the directions that do not matter.

        Args:
            Y: (m, r).
            C: (r, s) in float64.
            least: Leave out directions whose eigenvalue, which stands beside one, is not above this.
        """
        lam, V = eigh(C.T @ inner(Y, Y) @ C)
        kept = (lam > least) & (lam > torch.finfo(Y.dtype).eps * lam[:1])
        lam = lam[kept]
        return LowRankPreconditioner.from_directions(Y @ (C @ V[:, kept] / lam.sqrt()).to(Y.dtype), lam)

    def power(self, R: Tensor, exponent: float) -> Tensor:
        """``P^exponent R`` for R of shape (m,) or (m, k)."""
        change = torch.expm1(exponent * torch.log1p(self.lam))
        with full_precision(R.device):
            inside = self.U.T @ R
            return R + self.U @ (change * inside if R.ndim == 1 else change[:, None] * inside)

    def multiply(self, V: Tensor) -> Tensor:
        """``P V``."""
        return self.power(V, 1)

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R``, for R of shape (m,) too."""
        return self.power(R, -1)

    @property
    def log_det(self) -> Tensor:
        return torch.log1p(self.lam.double()).sum()

    def sample(self, k: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(self.m, k, dtype=self.U.dtype, device=generator.device, generator=generator)
        return self.power(z.to(self.U.device), 0.5)

    def rescale(self, ratio: Tensor, *, least: float = 0.01) -> LowRankPreconditioner:
        """As the interface says. Directions that were left out for Phi stay out, however large they are now.

        >>> P = LowRankPreconditioner(torch.eye(2)[:, :1], torch.tensor([3.0]))
        >>> P.rescale(torch.tensor([2.0, 1.0])).lam.round()
        tensor([12.])
        """
        if tuple(ratio.shape) != (self.m,):
            raise ValueError(f"P is ({self.m}, {self.m}), so ratio needs shape ({self.m},); got {tuple(ratio.shape)}.")
        return self.from_factor(ratio[:, None] * self.U, torch.diag(self.lam.double().sqrt()), least=least)

    def __repr__(self) -> str:
        return f"LowRankPreconditioner(m={self.m}, rank={self.rank}, dtype={self.U.dtype}, device={self.U.device})"


def _orthonormalize(U: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """``U diag(lam) U^T`` with nearly orthonormal U (m, r), written with orthonormal columns; overwrites U."""
    for _ in range(5):
        G = inner(U, U)
        eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
        # Products are in float64; then the entries of U are rounded, which takes at most eps from an inner product.
        close = torch.finfo(U.dtype).eps + orthonormality(len(U), len(G), torch.float64)
        if not len(G) or float((G - eye).abs().max()) <= close:
            return U, lam
        # U = Y (g^(1/2) V^T) with Y orthonormal: diagonalize what stands between Y and Y^T.
        g, V = eigh(G)
        g, V = g[g > 0.01], V[:, g > 0.01]
        inside = g.sqrt()[:, None] * V.T
        lam, E = eigh(inside * lam @ inside.T)
        lam = lam.clamp_min(0)
        C = V / g.sqrt() @ E
        for part in U.split(max(1, TEMPORARY // max(1, U.shape[1]))):
            part[:, : len(g)] = (part.double() @ C).to(U.dtype)
        U = U[:, : len(g)].contiguous()
    raise ArithmeticError(
        f"The directions of a preconditioner {tuple(U.shape)} could not be made orthonormal in {U.dtype}. Use float64, "
        f"or fewer landmarks."
    )
