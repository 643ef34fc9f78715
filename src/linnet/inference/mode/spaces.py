r"""Coordinates for Newton's method on ``f = m + Phi u``: where its steps come from, and what they cost.

`Function` has alpha with ``u = Phi^T alpha`` and a dense kernel, `Weights` has u and dense features, `Products` has u
and products with J alone. In the dense ones a step takes a Cholesky decomposition, of

.. math:: M = I + L^\top K L \quad (n c \times n c) \qquad \text{or} \qquad H = I + \Phi^\top B \Phi
          \quad (p \times p),

or, where the factor of a matrix nearby is at hand, a few products: conjugate gradients with it as preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from linnet._common.distributed import add_up
from linnet.linalg.cholesky import cholesky_, cholesky_solve
from linnet.linalg.conjugate_gradients import Product, Solvable, cg
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import RowIndex, add_symmetric_, inner_matrix, weigh, weight_from_root
from linnet.probability.likelihoods import Heteroscedastic, Likelihood

Residual = Callable[[Tensor, slice], Tensor]
"""From some rows of ``Phi u`` to the gradient of log p in f, both (r,); the rows are those of whole examples."""


class Renewed(Protocol):
    """A preconditioner for the curvature at one place and for those nearby.

    Attributes:
        passes: Over the data that it took; those over some of the examples are parts of one.
    """

    passes: float

    def at(self, root: Tensor) -> Solvable:
        """The one for a curvature with this root, without a pass over the data."""


Renew = Callable[[Tensor, int], Renewed]
"""From a root of the curvature, and how many better ones than the first have been asked for, to a preconditioner."""

BLOCK = 2**24
"""Entries of a kernel, or of features, that are weighed at once."""

NEAR = 300
"""Rows from which a step may take products with a factor nearby: smaller matrices are decomposed as fast."""

PRODUCTS = 15
"""At most as many for a step; a decomposition takes about as long."""

STALE = 2.0
"""A preconditioner is made anew where the trace of the curvature has changed by more than this factor."""

LAGGING = 1.15
"""The same where the last steps were slow."""

NEAR_MODE = 0.3
"""The relative gradient below which that is worth its passes."""

FOLLOWED = 1.02
"""Its weights are renewed, without a pass, where the trace has changed by more than this factor."""

SLOW = 40
"""It is made anew, or a better one is, after a step that took more passes."""

BETTER = 2
"""How often a better one is asked for; after that, steps take as many passes as they need."""


class Space(Protocol):
    """Coordinates x of u: alpha or u itself."""

    size: int

    def dot(self, a: Tensor, b: Tensor) -> float:
        """The inner product of two u."""

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        """``Phi u`` (n c,), which may be known but for rounding, the residual there, coordinates of
        ``u - Phi^T residual``, and whether ``Phi u`` was computed anew."""

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        """Coordinates of a step ``-H^-1 g``, where the norm of g is ``ratio`` times the reference, and Phi times it."""


class Nearby:
    """Solves with a factor that is kept from one matrix to the next.

    Args:
        factor: The lower Cholesky factor of a matrix that may be close to those that come, or None.
        tolerance: Of the relative gradient that the steps are to reach.
    """

    def __init__(self, factor: Tensor | None, tolerance: float) -> None:
        self.factor, self.tolerance = factor, tolerance

    def solve(self, R: Tensor) -> Tensor:
        assert self.factor is not None
        return cholesky_solve(self.factor, R)

    def solved(
        self, product: Product, b: Tensor, ratio: float, make: Callable[[], Tensor], *, more: float = 1.0
    ) -> Tensor:
        """x of ``A x = b``: by products with A, as accurate as the step needs it, or by its factor that ``make`` makes.

        A solution that conjugate gradients leave early, from zero, still gives a direction of descent. ``more`` is how
        much smaller the residual has to be than the gradient that it leaves.
        """
        if self.factor is not None and len(b) >= NEAR:
            limits = {"tolerance": more * forcing(ratio, self.tolerance), "iterations": PRODUCTS}
            found = cg(product, b[:, None], preconditioner=self, verify=False, progress=False, **limits)  # type: ignore[arg-type]
            if found.converged:
                return found.value[:, 0]
        self.factor = None  # its memory first
        self.factor = make()
        return cholesky_solve(self.factor, b)


def forcing(ratio: float, tolerance: float) -> float:
    """How accurate a step should be: superlinear in the end, cheap at first, never more than the last step needs."""
    return max(min(0.25, math.sqrt(ratio)), min(0.25, 0.5 * tolerance / ratio))


class Function:
    r"""``u = Phi^T alpha``: alpha is a coordinate up to the null space of K, which no inner product sees."""

    def __init__(self, K: Tensor, scale: float, near: Nearby) -> None:
        self.K, self.scale, self.near, self.size = K, scale, near, len(K)

    def push(self, x: Tensor) -> Tensor:
        return self.scale * (self.K @ x)

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ self.push(b))

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        there = self.push(x) if shift is None else shift
        r = residual(there, slice(0, len(there)))
        return there, r, x - r, shift is None

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        # H^-1 Phi^T g = Phi^T (g - L M^-1 L^T K g), the matrix inversion lemma.
        pushed = self.push(g)
        inner = weigh(pushed, root, transpose=True)

        def product(V: Tensor) -> Tensor:
            return V + weigh(self.push(weigh(V, root)), root, transpose=True)

        # A residual r leaves the gradient Phi^T L r, and inner is L^T Phi times that of g: both may grow by the root of
        # the largest eigenvalue, of which this is a lower bound.
        more = min(1.0, float(g @ pushed) / max(float(inner @ inner), 1e-300))
        d = weigh(self.near.solved(product, inner, ratio, lambda: self.factor(root), more=more), root) - g
        return d, self.push(d)

    def factor(self, root: Tensor) -> Tensor:
        return cholesky_(inner_matrix(self.K, root, scale=self.scale))


class Weights:
    """u itself, with dense features."""

    def __init__(self, Phi: Tensor, scale: float, near: Nearby) -> None:
        self.Phi, self.scale, self.near, self.size = Phi, scale, near, Phi.shape[1]

    def push(self, x: Tensor) -> Tensor:
        return math.sqrt(self.scale) * (self.Phi @ x)

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        there = self.push(x) if shift is None else shift
        r = residual(there, slice(0, len(there)))
        return there, r, x - math.sqrt(self.scale) * (self.Phi.T @ r), shift is None

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        def product(V: Tensor) -> Tensor:
            pushed = weigh(weigh(self.Phi @ V, root, transpose=True), root)
            return V + self.scale * (self.Phi.T @ pushed)

        d = -self.near.solved(product, g, ratio, lambda: self.factor(root))
        return d, self.push(d)

    def factor(self, root: Tensor) -> Tensor:
        H, c = self.Phi.new_zeros(self.size, self.size), 1 if root.ndim == 1 else root.shape[1]
        step = max(1, BLOCK // (c * self.size))
        for start in range(0, len(self.Phi) // c, step):
            A = weigh(self.Phi[c * start : c * (start + step)], root[start : start + step], transpose=True)
            add_symmetric_(H, A, A, alpha=self.scale)
        H.diagonal().add_(1)
        return cholesky_(H)


class Refresh:
    """When another preconditioner is worth its passes, and the last one at the curvature of now.

    Another one is made near the mode, where the curvature has changed by the factor `STALE` since the last (what a sure
    network has left of it lies elsewhere than at the start) or, where steps lag, by `LAGGING`, and, up to `BETTER`
    times, where they are slow.

    Args:
        renew: Makes it; None for never.

    Attributes:
        passes: Over the data that those made so far took.
        another: Whether the last one that was given is another, not the one before with other weights.
    """

    def __init__(self, renew: Renew | None) -> None:
        self.passes, self.another = 0.0, False
        self._renew = renew
        self._last: Renewed | None = None
        self._made = self._weighed = math.nan  # the trace of the curvature for which it was made, and weighed
        self._better = -1  # how often slow steps have asked for a better one

    @property
    def may_be_better(self) -> bool:
        """Whether one can be had that is better, not only newer."""
        return self._renew is not None and self._better < BETTER

    def __call__(self, root: Tensor, ratio: float, *, slow: bool, lags: bool = False) -> Solvable | None:
        """One for a root of the curvature, where the relative gradient is ``ratio``; None to keep the last."""
        size = float(root.square().sum())
        if math.isnan(self._made):
            self._made = self._weighed = size
        stale = ratio <= NEAR_MODE and _apart(size, self._made) > (LAGGING if lags else STALE)
        if self._renew is not None and (stale or (slow and self.may_be_better)):
            self._better = self._better + 1 if slow and not stale else max(self._better, 0)
            self._last = None  # its memory first
            self._last = self._renew(root, self._better)
            self.passes, self.another = self.passes + self._last.passes, True
            self._made = self._weighed = size
            return self._last.at(root)
        if self._last is not None and _apart(size, self._weighed) > FOLLOWED:
            self._weighed, self.another = size, False
            return self._last.at(root)
        return None


def _apart(a: float, b: float) -> float:
    """The factor between two numbers that are not negative."""
    low, high = sorted((a, b))
    return high / max(low, 1e-300)


class Products:
    """u itself, with products only.

    Args:
        Phi: (n c, p).
        preconditioner: Of H at the start; None for none.
        tolerance: Of the relative gradient.
        iterations: Of conjugate gradients, at most.
        renew: To the preconditioner elsewhere; None for never. `Refresh` says when; slow is a step of more than `SLOW`
            passes, and it ends early while a better one is to be had.
    """

    def __init__(
        self,
        Phi: LinearOperator,
        preconditioner: Solvable | None,
        tolerance: float,
        iterations: int,
        renew: Renew | None = None,
    ) -> None:
        self.Phi, self.preconditioner, self.tolerance, self.iterations = Phi, preconditioner, tolerance, iterations
        self.size, self.read = Phi.shape[1], 0
        self.refresh, self._last = Refresh(renew), 0  # and the passes of the last step

    @property
    def passes(self) -> int:
        """Over the data, those that preconditioners took included."""
        return self.read + math.ceil(self.refresh.passes)

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def at(self, x: Tensor, shift: Tensor | None, residual: Residual) -> tuple[Tensor, Tensor, Tensor, bool]:
        # Phi u comes with the gradient, in the same pass, so that it need not be known.
        there, r, pulled = self._pass(residual, x)
        return there, r, x - pulled, True

    def _pass(self, fn: Residual, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``Phi x``, ``fn(Phi x)`` and ``Phi^T fn(Phi x)`` in one pass over the data."""
        self.read += 1
        there, found, seen = x.new_zeros(3, self.Phi.shape[0]).unbind()

        def note(out: Tensor, rows: RowIndex) -> Tensor:
            assert isinstance(rows, slice)
            there[rows], found[rows], seen[rows] = out[:, 0], fn(out[:, 0], rows), 1
            return found[rows][:, None]

        pulled = self.Phi.fused(note, x[:, None])[:, 0]
        add_up(there, found, seen)  # each rank has seen its own rows, or all of them
        return there / seen, found / seen, pulled

    def step(self, g: Tensor, root: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        fresh = self.refresh(root, ratio, slow=self._last > SLOW)
        self.preconditioner = self.preconditioner if fresh is None else fresh
        before = self.read
        B = weight_from_root(root)
        df, lengths = g.new_zeros(self.Phi.shape[0]), list[Tensor]()
        ahead = df  # Phi times the direction that was multiplied last

        def product(V: Tensor) -> Tensor:
            nonlocal ahead
            if lengths:  # of the direction before, which is known by now
                df.addcmul_(ahead, lengths[-1])
            ahead, _, pulled = self._pass(lambda out, rows: weigh(out[:, None], B, rows)[:, 0], V[:, 0])
            return V + pulled[:, None]

        # CG stopped early still gives a direction of descent.
        early = self.refresh.may_be_better
        found = cg(
            product,
            -g[:, None],
            preconditioner=self.preconditioner,
            tolerance=forcing(ratio, self.tolerance),
            iterations=min(self.iterations, SLOW + 1) if early else self.iterations,
            verify=False,
            lengths=lengths,
            progress=False,
        )
        if lengths:
            df.addcmul_(ahead, lengths[-1])
        self._last = self.read - before
        return found.value[:, 0], df


def check_concave(likelihood: Likelihood) -> None:
    """Raise where log p is not concave in all outputs together, so that there may be several modes."""
    if isinstance(likelihood, Heteroscedastic):
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
