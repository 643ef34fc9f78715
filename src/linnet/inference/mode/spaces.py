r"""Coordinates in which the mode is searched, and what a gradient and a preconditioner cost in each of them.

All of them hold the whitened weights u of ``f = m + Phi u``. They differ in what they have of Phi.

- `FunctionSpace`: ``u = Phi^T alpha``, with a dense kernel ``K = Phi Phi^T``.
- `WeightSpace`: u itself, with dense features Phi.
- `PassSpace`: u itself, with products only. A gradient is one pass over the data.

The two dense spaces precondition with a Cholesky factor of

.. math:: M = I + L^\top K L \quad (n c \times n c) \qquad \text{or} \qquad H = I + \Phi^\top B \Phi
          \quad (p \times p), \qquad B = L L^\top,

which makes the step at that curvature a Newton step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from linnet.linalg import LinearOperator, RowIndex, add_symmetric_, cholesky_, cholesky_solve, inner_matrix, weigh
from linnet.probability import Heteroscedastic, Likelihood, without_weights

Residual = Callable[[Tensor, slice], Tensor]
"""From some rows of ``Phi u`` to the gradient of log p in f there, both (r,). The rows are rows of whole examples."""

Solve = Callable[[Tensor], Tensor]
"""From a vector of a space to a vector that is about ``H^-1`` times it."""

MakeSolve = Callable[[Tensor], "Solve | None"]
"""From a root L of the curvature to a solve that fits it; None where no better solve than the last can be had."""

BLOCK = 2**24
"""Entries of a kernel, or of features, that are weighed at once: more take more memory, fewer take more calls."""


class Space(Protocol):
    """Coordinates of u. A vector is a tensor of any shape whose linear combinations are vectors too.

    Attributes:
        size: Number of coordinates.
        longest: A preconditioner serves only while the best step is at most this many times as long as it says.
    """

    size: int
    longest: float

    def vector(self, coordinates: Tensor) -> Tensor:
        """The vector with these coordinates, (size,)."""

    def coordinates(self, x: Tensor) -> Tensor:
        """The coordinates of a vector, (size,)."""

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The inner product of two vectors: of their u."""

    def evaluate(self, x: Tensor, residual: Residual) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ``Phi u`` (n c,), the residual there (n c,), and the vector of the gradient ``u - Phi^T residual``."""


class FunctionSpace:
    r"""``u = Phi^T alpha``, for ``scale * K``. A vector is the pair of alpha and ``K alpha``, (2, n c).

    Inner products of such pairs need no product with K. They do not see the part of alpha in the null space of K, which
    steps of more than twice the preconditioner's length make larger and larger: `longest` is two.
    """

    def __init__(self, K: Tensor, scale: float) -> None:
        self.K, self.scale, self.size, self.longest = K, scale, len(K), 2.0

    def vector(self, coordinates: Tensor) -> Tensor:
        return torch.stack([coordinates, self.scale * (self.K @ coordinates)])

    def coordinates(self, x: Tensor) -> Tensor:
        return x[0]

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a[0] @ b[1])

    def evaluate(self, x: Tensor, residual: Residual) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.vector(x[0])  # x[1] carries the rounding of the step
        r = residual(x[1], slice(0, self.size))
        return x, x[1], r, self.vector(x[0] - r)

    def factor(self, root: Tensor) -> Tensor:
        """The lower Cholesky factor of M."""
        return cholesky_(inner_matrix(self.K, root, scale=self.scale))

    def solve(self, q: Tensor, factor: Tensor, root: Tensor, scale: float) -> Tensor:
        """``H^-1 q`` by the factor of M for a root and a scale of K: of this kernel, or of one nearby."""
        # H^-1 Phi^T q = Phi^T (q - L M^-1 L^T K q), the matrix inversion lemma.
        inside = cholesky_solve(factor, weigh(q[1], root, transpose=True))
        return q - self.vector(scale / self.scale * weigh(inside, root))


class WeightSpace:
    """u itself, with dense features ``sqrt(scale) * Phi``."""

    def __init__(self, Phi: Tensor, scale: float) -> None:
        self.Phi, self.scale, self.size, self.longest = Phi, scale, Phi.shape[1], math.inf

    def vector(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def coordinates(self, x: Tensor) -> Tensor:
        return x

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def evaluate(self, x: Tensor, residual: Residual) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shift = math.sqrt(self.scale) * (self.Phi @ x)
        r = residual(shift, slice(0, len(shift)))
        return x, shift, r, x - math.sqrt(self.scale) * (self.Phi.T @ r)

    def factor(self, root: Tensor) -> Tensor:
        """The lower Cholesky factor of H."""
        H, c = self.Phi.new_zeros(self.size, self.size), 1 if root.ndim == 1 else root.shape[1]
        step = max(1, BLOCK // (c * self.size))
        for start in range(0, len(self.Phi) // c, step):
            A = weigh(self.Phi[c * start : c * (start + step)], root[start : start + step], transpose=True)
            add_symmetric_(H, A, A, alpha=self.scale)
        H.diagonal().add_(1)
        return cholesky_(H)

    def solve(self, q: Tensor, factor: Tensor, root: Tensor, scale: float) -> Tensor:
        """``H^-1 q`` by the factor of H: of these features, or of others nearby."""
        return cholesky_solve(factor, q)


class PassSpace:
    """u itself, with products only.

    Args:
        Phi: (n c, p).

    Attributes:
        passes: Passes over the data so far.
    """

    def __init__(self, Phi: LinearOperator) -> None:
        self.Phi, self.size, self.longest, self.passes = Phi, Phi.shape[1], math.inf, 0

    def vector(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def coordinates(self, x: Tensor) -> Tensor:
        return x

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def evaluate(self, x: Tensor, residual: Residual) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the other spaces, in one pass over the data."""
        self.passes += 1
        shift, r, seen = x.new_zeros(3, self.Phi.shape[0]).unbind()

        def pull(out: Tensor, rows: RowIndex) -> Tensor:
            assert isinstance(rows, slice)
            shift[rows], r[rows], seen[rows] = out[:, 0], residual(out[:, 0], rows), 1
            return r[rows][:, None]

        pulled = self.Phi.fused(pull, x[:, None])[:, 0]
        self.Phi.ranks.add_up(shift, r, seen)  # each rank has seen its own rows, or all of them
        return x, shift / seen, r / seen, x - pulled


# Roots and weights of rows.


def check_concave(likelihood: Likelihood) -> None:
    """Raise where log p is not concave in all outputs together, so that there may be several modes."""
    if isinstance(without_weights(likelihood), Heteroscedastic):
        raise TypeError(
            "Heteroscedastic is not log-concave in means and log variances together, so its mode need not be unique. "
            "Linearize the mean alone (output=) and use Gaussian noise with the variances that the network predicts."
        )


def check_mean(mean: Tensor) -> int:
    """The number of outputs of all examples; raise unless ``mean`` has shape (n, c) and is finite."""
    if mean.ndim != 2:
        raise ValueError(f"mean needs shape (n, c); got {tuple(mean.shape)}.")
    if not bool(torch.isfinite(mean).all()):
        i = int((~torch.isfinite(mean)).any(1).nonzero()[0])
        raise ValueError(f"mean must be finite; example {i} has {mean[i].tolist()[:4]}. Check the network's outputs.")
    return mean.numel()


def check_operator(J: LinearOperator, variance: Tensor, mean: Tensor, rows: int) -> None:
    """Raise unless J (rows, p) and variance (p,) go with each other and with ``mean``."""
    if J.shape[0] != rows:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, so J needs {rows} rows; got shape {J.shape}.")
    if tuple(variance.shape) != (J.shape[1],):
        raise ValueError(
            f"J has shape {J.shape}, so variance needs shape ({J.shape[1]},); got {tuple(variance.shape)}."
        )
    check_kind("J", J, mean)
    check_kind("variance", variance, mean)
    if not bool(((variance >= 0) & torch.isfinite(variance)).all()):
        raise ValueError("Prior variances must be finite and not negative; some are not.")


def check_kind(name: str, given: Tensor | LinearOperator, mean: Tensor) -> None:
    """Raise unless ``given`` has the dtype and device of ``mean``."""
    if given.dtype != mean.dtype or given.device != mean.device:
        raise TypeError(
            f"{name} is {given.dtype} on {given.device} and mean is {mean.dtype} on {mean.device}; convert one of them."
        )
