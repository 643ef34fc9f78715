r"""Linear systems: Cholesky decomposition in place, and conjugate gradients for many right-hand sides.

``A`` (m, m) is symmetric positive definite. `cholesky_` needs it in memory, once; `cg` needs only products with
blocks (m, k). What a solver found comes as a `Solution`, and ``solution.checked()`` raises where it is no solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from linnet._common.torch_settings import _tf32

Product = Callable[[Tensor], Tensor]
"""``V`` (m, k) to ``A V`` (m, k)."""

DTYPES = (torch.float32, torch.float64)
BLOCK = 2048
"""Columns of a panel: enough to keep a GPU's matrix units busy, few enough to leave little to triangular solves.

In float64 on an H200, m = 100,000 takes 6.7, 6.1, 6.1 and 6.2 s with 512, 1,024, 2,048 and 4,096.
"""

COARSE = 0.03
"""After how much progress a solve with coarse products looks at its true residual."""


class Solvable(Protocol):
    """What `cg` needs of a preconditioner P."""

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R``: (m, k) to (m, k)."""
        ...


@dataclass(frozen=True)
class Solution:
    """What a solver found, and how good it is.

    Attributes:
        value: The solution, in the shape of the right-hand side.
        converged: Whether every column has reached the tolerance.
        iterations: How many were made.
        residual: The largest ``||b - A x|| / ||b||`` over the columns.
        tridiagonals: (probes, q, q) in float64, see `cg`.
        tolerance: What was asked for.
        breakdown: Whether a direction d with ``d^T A d <= 0``, or a number that is not finite, stopped a column.
    """

    value: Tensor
    converged: bool
    iterations: int
    residual: float
    tridiagonals: Tensor | None = None
    tolerance: float | None = None
    breakdown: bool = False

    def checked(self, what: str = "the system") -> Solution:
        """Itself; ArithmeticError where it has not converged.

        >>> Solution(torch.ones(2), True, 3, 1e-9).checked().iterations
        3
        """
        if self.converged:
            return self
        wanted = "" if self.tolerance is None else f", not the {self.tolerance:.2g} asked for"
        found = f"after {self.iterations} iterations the largest relative residual is {self.residual:.2g}{wanted}"
        if self.breakdown:
            found += "; a direction of no or negative curvature stopped it, so to rounding A is not positive definite"
        raise ArithmeticError(
            f"Conjugate gradients have not solved {what}: {found}. Try more iterations, a preconditioner of larger "
            f"rank, a larger noise variance, float64, or a larger tolerance."
        )


# Dense.


@torch.no_grad()
def cholesky_(A: Tensor, *, block: int | str = "auto") -> Tensor:
    r"""Overwrite ``A`` by its lower Cholesky factor L, :math:`A = L L^\top`, with zeros above the diagonal.

    Only the lower triangle is read. Panels of ``block`` columns are finished from left to right, each by one matrix
    product with all columns to its left: every entry is written once, and beside A there are only O(m block) numbers.
    When it fails, A is spoiled.

    Args:
        A: (m, m), float32 or float64; contiguous, or a view with unit stride along its rows.
        block: Columns of a panel; ``"auto"`` leaves matrices on the CPU, and small ones, to one call of LAPACK.

    Returns:
        A itself.

    Raises:
        ArithmeticError: A is not positive definite in its precision. Nothing is ever added to its diagonal here.

    >>> cholesky_(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])
    """
    m = _check_square(A)
    if block != "auto" and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block must be a positive number of columns or 'auto'; got {block!r}.")
    if m == 0:
        return A
    size = block if isinstance(block, int) else m if A.device.type == "cpu" or m <= 2 * BLOCK else BLOCK
    largest = A.diagonal().max()
    with _full_precision(A.device):
        if size >= m and A.is_contiguous():
            # Row-major A is column-major A^T, whose upper factor LAPACK writes where it stands.
            info = torch.empty((), dtype=torch.int32, device=A.device)
            torch.linalg.cholesky_ex(A.mT, upper=True, out=(A.mT, info))
            _check_pivots(A, 0, info, largest)
            return A
        for start in range(0, m, size):
            stop = min(start + size, m)
            panel, rest = A[start:, start:stop], A[stop:, start:stop]
            if start:
                panel.addmm_(A[start:, :start], A[start:stop, :start].mT, alpha=-1)
            L, info = torch.linalg.cholesky_ex(panel[: stop - start])
            panel[: stop - start] = L
            _check_pivots(A, start, info, largest)
            if stop < m:
                rest.copy_(torch.linalg.solve_triangular(L.mT, rest, upper=True, left=False))
                A[start:stop, stop:].zero_()
    return A


def solve_lower(L: Tensor, B: Tensor, *, overwrite: bool = False) -> Tensor:
    """X of ``L X = B``; only the lower triangle of L is read.

    Args:
        L: (m, m), lower triangular; never copied.
        B: (m,) or (m, k).
        overwrite: Whether X may take the place of B.

    >>> solve_lower(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([2.0, 5.0]))
    tensor([1., 2.])
    """
    return _substitute(L, B, overwrite, transposed=False)


def solve_upper(L: Tensor, B: Tensor, *, overwrite: bool = False) -> Tensor:
    """X of ``L^T X = B``; the arguments are those of `solve_lower`.

    >>> solve_upper(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([4.0, 4.0]))
    tensor([1., 2.])
    """
    return _substitute(L, B, overwrite, transposed=True)


def cholesky_solve(L: Tensor, B: Tensor, *, overwrite: bool = False) -> Tensor:
    """X of ``L L^T X = B``; the arguments are those of `solve_lower`."""
    return solve_upper(L, solve_lower(L, B, overwrite=overwrite), overwrite=True)


def log_det_from(L: Tensor) -> Tensor:
    """``log det(L L^T)``, added up in float64.

    >>> round(float(log_det_from(torch.eye(3) * 2)), 6)
    4.158883
    """
    return 2 * L.diagonal().double().log().sum()


def check_conditioning(M: Tensor) -> None:
    """Raise where M, whose smallest eigenvalue is about one, is more than its precision can tell from singular.

    Well before its decomposition fails, the numbers that it gives are wrong.
    """
    eps = torch.finfo(M.dtype).eps
    v = torch.randn(len(M), dtype=M.dtype, generator=torch.Generator().manual_seed(0)).to(M.device)
    for _ in range(8):  # the norm of M v is never above the largest eigenvalue, and soon close to it
        v = M @ (v / v.norm())
    if 10 * eps * float(v.norm()) > 1:
        kind = str(M.dtype).removeprefix("torch.")
        more = "" if M.dtype == torch.float64 else ", or use dtype='float64'"
        raise ArithmeticError(
            f"The noise is {1 / float(v.norm()):.1g} of the kernel's largest eigenvalue, and {kind} needs "
            f"{10 * eps:.1g} of it for numbers to be right. Give more noise{more}."
        )


@torch.no_grad()
def _substitute(L: Tensor, B: Tensor, overwrite: bool, *, transposed: bool) -> Tensor:
    """Forward or backward substitution in blocks of rows: matrix products with all that is solved already."""
    m = _check_square(L)
    _check_right(B, m, L)
    B = B if overwrite else B.clone()
    X = B[:, None] if B.ndim == 1 else B
    starts = range(0, m, BLOCK)
    with _full_precision(L.device):
        for start in reversed(starts) if transposed else starts:
            stop = min(start + BLOCK, m)
            part, diagonal = X[start:stop], L[start:stop, start:stop]
            if transposed and stop < m:
                part.addmm_(L[stop:, start:stop].mT, X[stop:], alpha=-1)
            elif not transposed and start:
                part.addmm_(L[start:stop, :start], X[:start], alpha=-1)
            part.copy_(torch.linalg.solve_triangular(diagonal.mT if transposed else diagonal, part, upper=transposed))
    return B


# Conjugate gradients.


@torch.no_grad()
def cg(
    product: Product,
    B: Tensor,
    *,
    preconditioner: Solvable | None = None,
    tolerance: float = 1e-6,
    iterations: int = 1000,
    start: Tensor | None = None,
    probes: int = 0,
    verify: bool = True,
    exact: Product | None = None,
    lengths: list[Tensor] | None = None,
    progress: bool | None = None,
) -> Solution:
    r"""Solve ``A X = B`` by preconditioned conjugate gradients, all columns in one product per iteration.

    A column that has reached the tolerance is left as it is while the others go on. At the end one more product gives
    the true residuals; where rounding has let the running ones drift below them, the iteration starts again from the
    solution found, as long as that helps. Beside B it holds about six blocks (m, k).

    The coefficients of the iteration are those of the Lanczos method: for a right-hand side z, its tridiagonal T has
    :math:`e_1^\top f(T) e_1 \approx u^\top f(P^{-1/2} A P^{-1/2}) u` with u the direction of :math:`P^{-1/2} z`.

    Args:
        product: ``V`` (m, k) to ``A V``.
        B: (m,) or (m, k), finite.
        preconditioner: P, close to A; its ``solve`` takes (m, k). None means the identity.
        tolerance: Stop when ``||b - A x|| <= tolerance ||b||`` for every column b.
        iterations: Stop after this many.
        start: Where to start from, in the shape of B; None means zero. Zero in the columns of the probes.
        probes: The last ``probes`` columns of B give their tridiagonals; one that converged early goes on as the
            identity, which its first row does not see.
        verify: Whether to spend the last product; without it the residual is the running one.
        exact: ``V`` to ``A V`` where ``product`` is a cheaper, coarser one. It gives the first residual and the true
            ones, which are looked at whenever the running ones have fallen by `COARSE`; where that was no progress it
            takes the place of ``product``. Errors of ``product`` never reach the solution.
        lengths: Gets, after each product, how far the columns move along the directions that were multiplied, (k,).
        progress: None shows a bar on a terminal only, False never, True always.

    Returns:
        A `Solution`, converged or not; never with NaN in its value.

    >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> found = cg(lambda V: A @ V, torch.ones(3)).checked()
    >>> found.value, found.iterations
    (tensor([1.0000, 0.5000, 0.2500]), 3)
    """
    _check_right(B, B.shape[0], B)
    right = B[:, None] if B.ndim == 1 else B
    X = _start(start, B, probes).reshape(right.shape)
    if not tolerance > 0 or iterations < 1:
        raise ValueError(f"cg needs tolerance > 0 and at least 1 iteration; got {tolerance!r} and {iterations!r}.")
    norms = torch.linalg.vector_norm(right, dim=0)
    if not bool(torch.isfinite(norms).all()):
        raise ValueError("cg needs a finite right-hand side; B holds NaN, infinity, or numbers whose squares overflow.")
    X[:, norms == 0] = 0
    if exact is not None and (probes or not verify):
        raise ValueError(
            "exact= is for solves alone: without probes, whose tridiagonals come from product, and with verify=True."
        )
    true, coarse = (product, False) if exact is None else (exact, True)
    R = right.clone() if start is None else right - true(X)
    state = _Columns(X, R, norms * tolerance, [] if lengths is None else lengths)
    solve = (lambda R: R) if preconditioner is None else preconditioner.solve
    total, before = 0, math.inf
    with _bar(iterations, norms, progress) as tick:
        while True:
            first = total == 0
            if coarse:
                now = torch.linalg.vector_norm(state.R, dim=0)
                state.goal = torch.maximum(COARSE * now, 0.7 * tolerance * norms)
            total += state.descend(product, solve, iterations - total, probes if first else 0, tick)
            if verify:
                state.R = right - true(X)
            sizes = torch.linalg.vector_norm(state.R, dim=0)
            ratios = torch.where(norms > 0, sizes / norms, 0).nan_to_num(nan=math.inf)
            worst = float(ratios.max()) if len(ratios) else 0.0
            if coarse and worst > max(tolerance, 0.5 * before):
                # The errors lie where A is largest: the residual sees them most, and a few exact steps remove them.
                product, coarse, state.goal = true, False, norms * tolerance
                state.broken[:] = False
                before = math.inf
            again = bool(((sizes > norms * tolerance) & ~state.broken).any())
            if not again or not verify or total >= iterations or worst > 0.9 * before:
                break
            before = worst
    return Solution(
        value=X.reshape(B.shape),
        converged=worst <= tolerance,
        iterations=total,
        residual=worst,
        tridiagonals=state.tridiagonals() if probes else None,
        tolerance=tolerance,
        breakdown=bool(state.broken.any()),
    )


class _Columns:
    """The columns of a block while conjugate gradients work on them.

    Args:
        X: (m, k), updated in place.
        R: (m, k), ``B - A X``.
        goal: (k,), the norm that a column of R must come down to.
        lengths: Gets the steps.
    """

    def __init__(self, X: Tensor, R: Tensor, goal: Tensor, lengths: list[Tensor]) -> None:
        self.X, self.R, self.goal, self.lengths = X, R, goal, lengths
        self.broken = torch.zeros_like(goal, dtype=torch.bool)
        self.coefficients: list[tuple[Tensor, Tensor]] = []

    def descend(self, product: Product, solve: Product, limit: int, probes: int, tick: Callable[[Tensor], Any]) -> int:
        """Iterate until every column is done; the number of iterations."""
        active = (torch.linalg.vector_norm(self.R, dim=0) > self.goal) & ~self.broken
        Z = solve(self.R)
        rz = (self.R * Z).sum(0)
        D = torch.where(active, Z, 0)
        for step in range(limit):
            if not bool(active.any()):
                return step
            AD = product(D)
            curvature = (D * AD).sum(0)
            alpha = rz / curvature
            good = active & (curvature > 0) & (rz > 0) & torch.isfinite(alpha)
            self.broken |= active & ~good
            alpha = torch.where(good, alpha, 0)
            self.lengths.append(alpha)
            # Not by alpha = 0 alone: a direction that is not finite would spoil its column.
            self.X.addcmul_(torch.where(good, D, 0), alpha)
            self.R.addcmul_(torch.where(good, AD, 0), alpha, value=-1)
            sizes = torch.linalg.vector_norm(self.R, dim=0)
            active = good & (sizes > self.goal)
            Z = solve(self.R)
            new = (self.R * Z).sum(0)
            beta = torch.where(active & (new > 0), new / rz, 0)
            if probes:
                self.coefficients.append((alpha[-probes:], beta[-probes:]))
            D = torch.where(active, Z + beta * D, 0)
            rz = new
            tick(sizes)
        return limit

    def tridiagonals(self) -> Tensor:
        """(probes, q, q): the Lanczos matrices of the recorded columns, continued by the identity."""
        if not self.coefficients:
            raise ArithmeticError("cg has no tridiagonal for its probes: all of them are zero. Draw others.")
        alpha, beta = (torch.stack(rows, -1).double() for rows in zip(*self.coefficients, strict=True))
        made = alpha > 0
        inverse = torch.where(made, 1 / alpha, 1)
        main = inverse.clone()
        main[:, 1:] += torch.where(made[:, 1:], beta[:, :-1] * inverse[:, :-1], 0)
        side = torch.where(made[:, 1:], beta[:, :-1].sqrt() * inverse[:, :-1], 0)
        return torch.diag_embed(main) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)


@contextmanager
def _bar(total: int, norms: Tensor, progress: bool | None) -> Iterator[Callable[[Tensor], Any]]:
    """Counts iterations, given the norms of their residuals, and shows the largest of these."""
    disable = None if progress is None else not progress
    with tqdm(total=total, desc="CG", unit=" iterations", delay=2, leave=False, disable=disable) as shown:

        def tick(sizes: Tensor) -> None:
            if not shown.disable and len(sizes):
                worst = float(torch.where(norms > 0, sizes / norms, 0).max())
                shown.set_postfix_str(f"residual {worst:.1e}", refresh=False)
            shown.update()

        yield tick


# Settings and checks.


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no tf32; unlike `contexts.arithmetic` it stays in inference mode, to write to its tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(_tf32(False))
        yield


def _check_pivots(A: Tensor, start: int, info: Tensor, largest: Tensor) -> None:
    """Raise where the block at ``start`` of the factor was not to be had."""
    diagonal, failed = A.diagonal(), int(info)
    bad = ~torch.isfinite(diagonal)
    if failed == 0 and not bool(bad.any()):
        return
    row = start + failed - 1 if failed else int(bad.nonzero()[0])
    eps = torch.finfo(A.dtype).eps
    # Not the pivot itself: some libraries leave the root of a negative number there.
    if failed == 0 or not bool(torch.isfinite(largest) & torch.isfinite(A[row, :row]).all()):
        raise ArithmeticError(f"The matrix {tuple(A.shape)} holds NaN or infinity at or before row {row}.")
    known = "it is the first" if row == 0 else f"the smallest before it is {float(diagonal[:row].min()) ** 2:.2g}"
    raise ArithmeticError(
        f"The matrix {tuple(A.shape)} is not positive definite in {str(A.dtype).removeprefix('torch.')}: the pivot of "
        f"row {row} is not positive; {known}, the largest diagonal entry is {float(largest):.2g}, and rounding blurs "
        f"pivots below about {eps * len(A) * float(largest):.1g}. Add more noise, use float64, or remove duplicate "
        f"examples."
    )


def _check_square(A: Tensor) -> int:
    if A.ndim != 2 or A.shape[0] != A.shape[1] or A.dtype not in DTYPES:
        raise ValueError(f"A matrix (m, m) of float32 or float64 is needed; got {tuple(A.shape)}, {A.dtype}.")
    return A.shape[0]


def _check_right(B: Tensor, m: int, like: Tensor) -> None:
    if B.ndim not in (1, 2) or B.shape[0] != m:
        raise ValueError(f"A right-hand side ({m},) or ({m}, k) is needed; got {tuple(B.shape)}.")
    if B.dtype not in DTYPES or B.dtype != like.dtype or B.device != like.device:
        raise TypeError(
            f"A right-hand side of float32 or float64 that matches {like.dtype} on {like.device} is needed; got "
            f"{B.dtype} on {B.device}."
        )


def _start(start: Tensor | None, B: Tensor, probes: int) -> Tensor:
    k = 1 if B.ndim == 1 else B.shape[1]
    if not 0 <= probes <= k:
        raise ValueError(f"B has {k} columns, so probes must be between 0 and {k}; got {probes}.")
    if start is None:
        return torch.zeros_like(B)
    if start.shape != B.shape or start.dtype != B.dtype or start.device != B.device:
        raise ValueError(
            f"cg needs start like B, {tuple(B.shape)} of {B.dtype} on {B.device}; got {tuple(start.shape)} of "
            f"{start.dtype} on {start.device}."
        )
    if probes and bool(start.reshape(len(B), k)[:, -probes:].any()):
        raise ValueError(f"The last {probes} columns are probes, which start from zero; got others in start.")
    return start.clone()
