"""Rows of the Jacobian with a graph to the inputs, for gradients of predictions in the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from linnet._common.torch_settings import forward_mode
from linnet.data.batch import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.kronecker import Rotation
from linnet.jacobian.linearization import Linearization
from linnet.jacobian.rule_selection import TOLERANCE
from linnet.linalg.operator import LinearOperator
from linnet.network import checks


class DifferentiableNetwork:
    """Outputs of a network and rows of its Jacobian, with a graph to the inputs.

    Args:
        lin: The network.

    Example:
        >>> from linnet import linearize
        >>> x = torch.ones(4, 3, requires_grad=True)
        >>> rows = DifferentiableNetwork(linearize(torch.nn.Linear(3, 2))).rows(x)
        >>> rows.shape, rows.requires_grad
        (torch.Size([8, 8]), True)
    """

    def __init__(self, lin: Linearization) -> None:
        self.lin, self._vectorizes = lin, True

    def outputs(self, x: Tensor) -> Tensor:
        """f(x; theta0), (n, c), with a graph where x requires a gradient."""
        self.lin.check_unchanged(contents=True)
        with torch.set_grad_enabled(needs_grad(x)), self.lin.network.in_precision("highest"):
            return self.lin.forward({}, _batch(x.to(self.lin.device))).to(self.lin.dtype)

    def rows(self, x: Tensor) -> Tensor:
        """J(x), (n c, p), with a graph to x."""
        self.lin.check_unchanged(contents=True)
        x = x.to(self.lin.device)
        if self._vectorizes and self.lin.rules.can("vectorize", _batch(x.detach())):
            rows = self._vectorized(x)
            if self._proven(rows, x):
                return rows
            self._vectorizes = False
        return self._one_by_one(x)

    def _proven(self, rows: Tensor, x: Tensor) -> bool:
        """Whether rows by torch.func are those of plain reverse mode, and have its derivatives in x.

        One random combination of the rows of all examples is compared: ``u^T J`` is one backward pass through the
        network, and the derivative in x of one combination of its entries a second one. Some of vmap's rules lose a
        part of that: the one of LayerNorm takes its mean and scale for constants.
        """
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(len(rows), dtype=torch.float64, generator=generator).to(rows)
        v = torch.randn(rows.shape[1], dtype=torch.float64, generator=generator).to(rows)
        theta = {name: t.detach().requires_grad_() for name, t in self.lin.theta.items()}
        with torch.enable_grad():
            f = self._forward(theta, _batch(x))
            pulled: Any = [None] * len(theta)
            if f.requires_grad:
                seeds = u.view_as(f).to(f.dtype)
                pulled = torch.autograd.grad(f, list(theta.values()), seeds, create_graph=True, allow_unused=True)
            pairs = zip(theta.values(), pulled, strict=True)
            exact = torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for t, g in pairs]).to(rows.dtype)
            found = u @ rows
            slope, exact_slope = _slope(found @ v, x), _slope(exact @ v, x)
        tolerance = TOLERANCE[self.lin.model_dtype]
        return checks.close(found, exact, tolerance) and checks.close(slope, exact_slope, tolerance)

    def _vectorized(self, x: Tensor) -> Tensor:
        found = autodiff.rows(self._forward, self.lin.theta, _batch(x), vectorize=True)
        parts = [found[name].flatten(2).flatten(0, 1) for name in self.lin.layout.names]
        return torch.cat(parts, 1).to(self.lin.dtype)

    def _one_by_one(self, x: Tensor) -> Tensor:
        found = []
        leaves = {name: t.detach().requires_grad_() for name, t in self.lin.theta.items()}
        with torch.enable_grad():
            for one in _batch(x).split(1):
                for value in self._forward(leaves, one)[0]:
                    grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)
                    pairs = zip(leaves.values(), grads, strict=True)
                    found.append(torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for t, g in pairs]))
        return torch.stack(found).to(self.lin.dtype)

    def _forward(self, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
        # The kernels that forward mode takes are also those that can be differentiated twice.
        with self.lin.network.in_precision("highest"), forward_mode(self.lin.module):
            return self.lin.forward(theta, batch)


def needs_grad(x: Tensor) -> bool:
    """Whether a result must be differentiable in x."""
    return x.requires_grad and torch.is_grad_enabled()


def product(A: LinearOperator, V: Tensor) -> Tensor:
    """``A V`` for a constant operator, differentiable in V, (cols,) or (cols, k)."""
    out: Tensor = _Product.apply(V, A)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, V: Tensor, A: LinearOperator) -> Tensor:
        ctx.A = A
        return A @ V

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return product(ctx.A.T, grads[0].contiguous()), None


def _slope(value: Tensor, x: Tensor) -> Tensor:
    """The gradient in x of a number."""
    if not value.requires_grad or not x.requires_grad:
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if slope is None else slope


def _batch(x: Tensor) -> Batch:
    return Batch((x,), {}, None, start=0, n=len(x))


@final
class DifferentiableRows(LinearOperator):
    """Rows of a Jacobian with a graph to the inputs, as an operator: all its answers have the graph too.

    Args:
        A: (n c, p).
        c: Outputs of an example.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> DifferentiableRows(x, 1).gram_diag().requires_grad
    True
    """

    def __init__(self, A: Tensor, c: int) -> None:
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.A, self.n, self.c, self.block = A, len(A) // c, c, c

    def map_parts(self, fn: Callable[[DifferentiableRows], Tensor], size: int) -> list[Tensor]:
        return [fn(self)]

    def rotated(self, rotation: Rotation) -> DifferentiableRows:
        return DifferentiableRows(rotation.rows(self.A), self.c)

    def _matmul(self, V: Tensor) -> Tensor:
        return self.A @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.A.T @ U

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        right = (self.A if scale is None else self.A * scale).T
        return self.A @ right if other is None else product(other, right).T

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        return self.A.square().sum(1) if scale is None else self.A.square() @ scale

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        A = self.A.view(self.n, self.c, -1)
        return (A if scale is None else A * scale) @ A.mT
