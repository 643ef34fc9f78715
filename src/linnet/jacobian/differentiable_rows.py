r"""Tangent features of inputs that other libraries hold: constant by the fast Jacobian, or differentiable in the input.

The kernel is :math:`k(x, x') = J(x) \, S \, J(x')^\top`. Where an input requires a gradient, as candidates of an
acquisition function do, its rows of J are formed by torch.func with a graph; all other inputs stay streamed operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from linnet._common import forward_mode
from linnet.data import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.proofs import TOLERANCE
from linnet.linalg import LinearOperator
from linnet.network import checks

if TYPE_CHECKING:
    from linnet.jacobian.jacobian import Jacobian
    from linnet.jacobian.kronecker import Rotation
    from linnet.jacobian.linearization import Linearization

Features = LinearOperator | Tensor
"""Rows of J: an operator, or a tensor (rows, p) with a graph to the inputs."""

KEPT = 4  # inputs whose Jacobians are remembered: the training data and a few test sets


@dataclass
class _Known:
    """Inputs that have been seen, and what is known of them."""

    x: Tensor
    J: Jacobian
    uses: int = 0
    gram: Tensor | None = None
    version: int = -1


class TangentFeatures:
    """J and S of a linearized network, for inputs (n, d).

    Its network and variances never change, so that a deep copy is itself; Jacobians of recent inputs are kept here.

    Args:
        lin: The network.
        variance: The diagonal of S, (p,); None for ones.

    Example:
        >>> from linnet import linearize
        >>> lin = linearize(torch.nn.Linear(3, 2))
        >>> features = TangentFeatures(lin)
        >>> x = torch.ones(4, 3, requires_grad=True)
        >>> features.of(x).shape, features.of(torch.ones(5, 3)).shape
        (torch.Size([8, 8]), (10, 8))
        >>> features.cross(features.of(x), features.of(torch.ones(5, 3))).shape
        torch.Size([8, 10])
    """

    def __init__(self, lin: Linearization, variance: Tensor | None = None) -> None:
        ones = torch.ones(lin.p, dtype=lin.dtype, device=lin.device)
        self.lin, self.variance = lin, ones if variance is None else variance
        self._known: list[_Known] = []
        self._c: int | None = None
        self._vectorizes = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TangentFeatures:
        return self

    def outputs_per_input(self, x: Tensor) -> int:
        """c, from the network's output for the first of the inputs (..., n, d)."""
        if self._c is None:
            self._c = self.lin(x.detach().reshape(-1, x.shape[-1])[:1]).shape[1]
        return self._c

    def outputs(self, x: Tensor) -> Tensor:
        """f(x; theta0), (n, c), with a graph where x requires a gradient."""
        self.lin.check_unchanged(contents=True)
        with torch.set_grad_enabled(needs_grad(x)), self.lin.network.in_precision("highest"):
            return self.lin.forward({}, _batch(x.to(self.lin.device))).to(self.lin.dtype)

    # Rows of J.

    def of(self, x: Tensor) -> Features:
        """The rows of inputs (n, d): with a graph where x requires a gradient."""
        if needs_grad(x):
            return self.rows(x)
        entry = self._find(x)
        entry.uses += 1
        if entry.uses == 2:  # what is asked for twice will be asked for again
            entry.J = entry.J.cached_if_fits()
        return entry.J

    def _find(self, x: Tensor) -> _Known:
        """What is known of inputs with these values; the least recently used are forgotten."""
        self.lin.check_unchanged(contents=True)
        x = x.detach()
        for i, entry in enumerate(self._known):
            alike = (entry.x.shape, entry.x.dtype, entry.x.device) == (x.shape, x.dtype, x.device)
            if alike and torch.equal(entry.x, x):
                self._known.insert(0, self._known.pop(i))
                return entry
        own = x.clone()  # the caller may write into x
        self._known.insert(0, _Known(own, self.lin.jacobian(own, progress=False)))
        del self._known[KEPT:]
        return self._known[0]

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
        u = torch.randn(len(rows), generator=generator).to(rows)
        v = torch.randn(rows.shape[1], generator=generator).to(rows)
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
        tolerance = TOLERANCE[self.lin.rules.coarsest]
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

    # Kernels of rows.

    def gram(self, x: Tensor, *, keep: bool) -> Tensor:
        """The kernel matrix of inputs without gradients, (n c, n c); remembered with them if ``keep``."""
        entry = self._find(x)
        if entry.gram is not None and entry.gram._version == entry.version:  # not written into by its user
            return entry.gram
        gram = entry.J.gram(scale=self.variance)
        if keep:
            entry.gram, entry.version = gram, gram._version
        return gram

    def cross(self, a: Features, b: Features) -> Tensor:
        """``A S B^T``, (rows of a, rows of b)."""
        if isinstance(a, Tensor):
            return (a * self.variance) @ b.T if isinstance(b, Tensor) else self.cross(b, a).T
        if isinstance(b, Tensor):
            return product(a, (b * self.variance).T)
        return a.gram(None if a is b else b, scale=self.variance)

    def blocks(self, a: Features, b: Features, count: int) -> Tensor:
        """The ``count`` diagonal blocks of `cross`, (count, rows of a / count, rows of b / count)."""
        if count == 1:
            return self.cross(a, b)[None]
        rows, columns = a.shape[0] // count, b.shape[0] // count
        if not isinstance(a, Tensor) and a is b and rows == a.block:
            return a.gram_blocks(scale=self.variance)
        constant = not isinstance(a, Tensor) and not isinstance(b, Tensor)
        if constant and max(a.shape[0], b.shape[0]) <= self.lin.p:
            # The whole matrix takes less memory than the rows themselves.
            K = self.cross(a, b).view(count, rows, count, columns)
            return K.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        left, right = _dense(a).view(count, rows, -1), _dense(b).view(count, columns, -1)
        return (left * self.variance) @ right.mT


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


def _dense(a: Features) -> Tensor:
    return a if isinstance(a, Tensor) else a.dense(limit=a.shape[0] * a.shape[1])


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

    def in_row_dtype(self) -> DifferentiableRows:
        """The rows as they are: their dtype is the dtype of their products."""
        return self

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
