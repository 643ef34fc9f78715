"""A matrix whose passes are counted, and a network whose examples are."""

from __future__ import annotations

from torch import Tensor, nn

from linnet.linalg import LinearOperator, RowFn


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


class Counting(nn.Module):
    """A small network that counts the examples that it is given in ``Counting.seen``, its calls in ``calls``."""

    seen = calls = 0

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        Counting.seen += len(x)
        Counting.calls += 1
        return self.b(self.a(x).tanh())
