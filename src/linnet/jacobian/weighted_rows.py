"""``L^T J``, the Jacobian in units of the likelihood's curvature ``B = L L^T``, as an operator."""

from __future__ import annotations

from typing import final

from torch import Tensor

from linnet.inference.mode.spaces import as_weight, inner_matrix
from linnet.linalg.operator import LinearOperator, RowFn
from linnet.linalg.row_weights import weigh


@final
class Weighted(LinearOperator):
    """``L^T J`` for a root L of the curvature: its right singular vectors are the eigenvectors of G.

    Args:
        J: (n c, p).
        root: L, (n, c) where it is diagonal, or (n, c, c).
    """

    symbol = "L^T J"

    def __init__(self, J: LinearOperator, root: Tensor) -> None:
        super().__init__(J.shape, dtype=J.dtype, device=J.device)
        self.J, self.L = J, as_weight(root)
        self.LT = self.L if self.L.ndim == 1 else self.L.mT
        self.block = J.block

    def _matmul(self, V: Tensor) -> Tensor:
        return weigh(self.J._matmul(V), self.LT, slice(0, self.shape[0]))

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.J._rmatmul(weigh(U, self.L, slice(0, self.shape[0])))

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        # The sums are those of L fn(L^T J V), which only centered operators ask for.
        return self.J._fused(lambda U, rows: weigh(fn(weigh(U, self.LT, rows), rows), self.L, rows), V)

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        if other is not None:
            raise NotImplementedError(f"{self.name} has no gram with another operator")
        M = inner_matrix(self.J.gram(scale=scale), self.L)
        M.diagonal().sub_(1)
        return M

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        if weight is not None:
            raise NotImplementedError(f"{self.name} has no column_norms with a weight")
        return self.J.column_norms(self.L.square() if self.L.ndim == 1 else self.L @ self.L.mT)


def weight_of(root: Tensor) -> Tensor:
    """B as operators take it, (n c,) or (n, c, c), from its root."""
    return root.square().flatten() if root.ndim == 2 else root @ root.mT
