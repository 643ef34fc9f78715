"""A matrix whose passes are counted."""

from __future__ import annotations

from torch import Tensor

from linnet.operators import LinearOperator, RowFn


class Counted(LinearOperator):
    """A matrix that counts its products."""

    def __init__(self, A: Tensor) -> None:
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.A, self.passes = A, 0

    def _matmul(self, V: Tensor) -> Tensor:
        self.passes += 1
        return self.A @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        self.passes += 1
        return self.A.T @ U

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        self.passes += 1
        U = fn(self.A @ V, slice(0, len(self.A)))
        return self.A.T @ U, U.sum(0)
