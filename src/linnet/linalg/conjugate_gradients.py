r"""Conjugate gradients for many right-hand sides.

``A`` (m, m) is symmetric positive definite, and known through its products with blocks (m, k). The result comes as a
`Solution`, and ``solution.checked()`` raises where the iteration has not converged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from linnet._common import ALONE, Checkpoint, Ranks, is_sharded, show_progress
from linnet.linalg.cholesky import check_right

Product = Callable[[Tensor], Tensor]
"""``V`` (m, k) to ``A V`` (m, k)."""

COARSE = 0.03
"""After how much progress a solve with coarse products looks at its true residual: a smaller factor spends fewer exact
products, and more coarse ones that may be in vain."""


class Solvable(Protocol):
    """A preconditioner P, as far as `cg` needs it."""

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R``: (m, k) to (m, k)."""
        ...


@dataclass(frozen=True)
class Solution:
    """The solution of a linear system, and how good it is.

    Attributes:
        value: The solution, in the shape of the right-hand side.
        converged: Whether every column has reached the tolerance.
        iterations: Number of iterations made.
        residual: The largest ``||b - A x|| / ||b||`` over the columns.
        tridiagonals: (probes, q, q) in float64, see `cg`.
        tolerance: The tolerance that was asked for.
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
        """This solution; raises ArithmeticError where it has not converged.

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
    checkpoint: Checkpoint | None = None,
    progress: bool | None = None,
) -> Solution:
    r"""Solve ``A X = B`` by preconditioned conjugate gradients, all columns in one product per iteration.

    A column that has reached the tolerance is left as it is while the others go on. At the end one more product gives
    the true residuals. Where rounding has let the running residuals drift below the true ones, the iteration starts
    again from the solution found, as long as that helps. Beside B about six blocks (m, k) are held.

    The coefficients of the iteration are those of the Lanczos method: for a right-hand side z, its tridiagonal T has
    :math:`e_1^\top f(T) e_1 \approx u^\top f(P^{-1/2} A P^{-1/2}) u` with u the direction of :math:`P^{-1/2} z`.

    Args:
        product: ``V`` (m, k) to ``A V``.
        B: (m,) or (m, k), finite. A DTensor that is sharded over its rows gives a DTensor: ``product`` and the
            preconditioner then take and give such DTensors, and each rank holds its rows of all blocks.
        preconditioner: P, close to A; its ``solve`` takes (m, k). None means the identity.
        tolerance: Stop when ``||b - A x|| <= tolerance ||b||`` for every column b.
        iterations: Stop after this many iterations.
        start: The solution to start from, in the shape of B; None means zero. Zero in the columns of the probes.
        probes: The last ``probes`` columns of B give their tridiagonals. The tridiagonal of a column that converged
            early goes on as the identity, which its first row does not see.
        verify: Whether to spend the last product; without it the residual is the running one.
        exact: ``V`` to ``A V`` where ``product`` is a cheaper, coarser product. ``exact`` gives the first residual and
            the true residuals, which are computed whenever the running ones have fallen by `COARSE`. Where the true
            residuals have not fallen, ``exact`` takes the place of ``product``. Errors of ``product`` never reach the
            solution.
        checkpoint: Keeps the state after each iteration. A solve of the same system goes on from the state. The caller
            removes the checkpoint.
        progress: None shows a bar on a terminal only, False never, True always.

    Returns:
        A `Solution`, converged or not; never with NaN in its value.

    >>> A = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> found = cg(lambda V: A @ V, torch.ones(3)).checked()
    >>> found.value, found.iterations
    (tensor([1.0000, 0.5000, 0.2500]), 3)
    """
    if is_sharded(B):
        options = {"tolerance": tolerance, "iterations": iterations, "probes": probes, "verify": verify}
        return _solve_in_parts(product, B, preconditioner, start, exact, checkpoint, progress=progress, **options)
    return _solve(
        product,
        B,
        preconditioner=preconditioner,
        tolerance=tolerance,
        iterations=iterations,
        start=start,
        probes=probes,
        verify=verify,
        exact=exact,
        checkpoint=checkpoint,
        progress=progress,
        ranks=ALONE,
    )


def _solve_in_parts(
    product: Product,
    B: Any,
    preconditioner: Solvable | None,
    start: Any,
    exact: Product | None,
    checkpoint: Checkpoint | None,
    **options: Any,
) -> Solution:
    """`cg` for a right-hand side of which each rank has its rows."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, k = B.device_mesh, B.shape[1] if B.ndim == 2 else 1
    if mesh.ndim != 1 or B.placements != (Shard(0),):
        raise ValueError(
            f"cg takes a DTensor that is sharded over its rows, [Shard(0)], on a mesh of one dimension; got "
            f"{list(B.placements)} on a mesh of {mesh.ndim}."
        )
    if checkpoint is not None or (start is not None and not is_sharded(start)):
        raise ValueError("cg with a DTensor takes no checkpoint, and a start that is a DTensor like B.")

    def whole(part: Tensor) -> Any:
        shape = B.shape if part.ndim == 1 else torch.Size((len(B), part.shape[1]))
        return DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=(k, 1)[2 - part.ndim :])

    def in_parts(function: Product) -> Product:
        return lambda V: cast(Any, function(whole(V))).to_local()

    @final
    class InParts:
        def solve(self, R: Tensor) -> Tensor:
            assert preconditioner is not None
            return in_parts(preconditioner.solve)(R)

    found = _solve(
        in_parts(product),
        B.to_local(),
        preconditioner=None if preconditioner is None else InParts(),
        start=None if start is None else start.to_local(),
        exact=None if exact is None else in_parts(exact),
        checkpoint=None,
        ranks=Ranks(mesh.get_group()),
        **options,
    )
    return replace(found, value=whole(found.value))


def _solve(
    product: Product,
    B: Tensor,
    *,
    preconditioner: Solvable | None,
    tolerance: float,
    iterations: int,
    start: Tensor | None,
    probes: int,
    verify: bool,
    exact: Product | None,
    checkpoint: Checkpoint | None,
    progress: bool | None,
    ranks: Ranks,
) -> Solution:
    """`cg`, for the rows of B that each of some ranks has; sums over rows are over those of all ranks."""
    check_right(B, B.shape[0], B)
    right = B[:, None] if B.ndim == 1 else B
    X = _start(start, B, probes).reshape(right.shape)
    if not tolerance > 0 or iterations < 1:
        raise ValueError(f"cg needs tolerance > 0 and at least 1 iteration; got {tolerance!r} and {iterations!r}.")
    norms = _norms(right, ranks)
    if not bool(torch.isfinite(norms).all()):
        raise ValueError("cg needs a finite right-hand side; B holds NaN, infinity, or numbers whose squares overflow.")
    X[:, norms == 0] = 0
    if exact is not None and (probes or not verify):
        raise ValueError(
            "exact= is for solves alone: without probes, whose tridiagonals come from product, and with verify=True."
        )
    true, coarse = (product, False) if exact is None else (exact, True)
    state = _Columns(X, X, norms * tolerance, ranks)
    solve = (lambda R: R) if preconditioner is None else preconditioner.solve
    total, before, first = 0, math.inf, True
    found = None if checkpoint is None else checkpoint.load(device=B.device)
    if found is None:
        state.R = right.clone() if start is None else right - true(X)
    else:
        assert checkpoint is not None
        tensors, meta = found
        check_same_system(checkpoint, tensors["norms"], norms)
        state.restore(tensors)
        total, first, coarse = meta["total"], meta["first"], coarse and meta["coarse"]
        before = math.inf if meta["before"] is None else meta["before"]
        product = product if coarse else true
    with show_progress(iterations, "CG", progress=progress, unit="iterations") as tick:

        def count(sizes: Tensor) -> None:
            tick(1, lambda: f"residual {float(torch.where(norms > 0, sizes / norms, 0).max()):.1e}")

        def save(steps: int) -> None:
            if checkpoint is not None:
                meta = {"total": total + steps, "first": first, "coarse": coarse}
                kept = {"before": None if math.isinf(before) else before}
                checkpoint.save({**state.tensors(), "norms": norms}, meta | kept)

        while True:
            if coarse and state.D is None:
                now = _norms(state.R, ranks)
                state.goal = torch.maximum(COARSE * now, 0.7 * tolerance * norms)
            total += state.descend(product, solve, iterations - total, probes if first else 0, count, save)
            first = False
            if verify:
                state.R = right - true(X)
            sizes = _norms(state.R, ranks)
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
        ranks: Ranks that each have rows of X and R.

    Attributes:
        D: (m, k), the next direction; None before a descent.
        rz: (k,), the inner products of R with the preconditioned R.
        active: (k,), the columns that are not done.
    """

    def __init__(self, X: Tensor, R: Tensor, goal: Tensor, ranks: Ranks) -> None:
        self.X, self.R, self.goal, self.ranks = X, R, goal, ranks
        self.broken = torch.zeros_like(goal, dtype=torch.bool)
        self.coefficients: list[tuple[Tensor, Tensor]] = []
        self.D: Tensor | None = None
        self.rz = self.active = self.broken

    def tensors(self) -> dict[str, Tensor]:
        """The state between two iterations."""
        assert self.D is not None
        found = {name: getattr(self, name) for name in ("X", "R", "goal", "broken", "D", "rz", "active")}
        if self.coefficients:
            alpha, beta = zip(*self.coefficients, strict=True)
            found |= {"alpha": torch.stack(alpha), "beta": torch.stack(beta)}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a state that `tensors` gave."""
        self.X.copy_(tensors["X"])
        for name in ("R", "goal", "broken", "D", "rz", "active"):
            setattr(self, name, tensors[name])
        if "alpha" in tensors:
            self.coefficients = list(zip(tensors["alpha"], tensors["beta"], strict=True))

    def descend(
        self,
        product: Product,
        solve: Product,
        limit: int,
        probes: int,
        count: Callable[[Tensor], None],
        save: Callable[[int], None],
    ) -> int:
        """Iterate until every column is done.

        Args:
            product: ``V`` to ``A V``.
            solve: ``R`` to ``P^-1 R``.
            limit: Largest number of iterations.
            probes: Columns whose coefficients are recorded.
            count: Gets the residuals' norms after each iteration.
            save: Gets the number of iterations so far, when the next iteration can start.

        Returns:
            The number of iterations.
        """
        if self.D is None:
            self.active = (_norms(self.R, self.ranks) > self.goal) & ~self.broken
            Z = solve(self.R)
            self.rz = _inner(self.R, Z, self.ranks)
            self.D = torch.where(self.active, Z, 0)
        steps = self._iterate(product, solve, limit, probes, count, save)
        self.D = None
        return steps

    def _iterate(
        self,
        product: Product,
        solve: Product,
        limit: int,
        probes: int,
        count: Callable[[Tensor], None],
        save: Callable[[int], None],
    ) -> int:
        D, rz, active = self.D, self.rz, self.active
        assert D is not None
        for step in range(limit):
            if not bool(active.any()):
                return step
            AD = product(D)
            curvature = _inner(D, AD, self.ranks)
            alpha = rz / curvature
            good = active & (curvature > 0) & (rz > 0) & torch.isfinite(alpha)
            self.broken |= active & ~good
            alpha = torch.where(good, alpha, 0)
            # Not by alpha = 0 alone: a direction that is not finite would spoil its column.
            self.X.addcmul_(torch.where(good, D, 0), alpha)
            self.R.addcmul_(torch.where(good, AD, 0), alpha, value=-1)
            sizes = _norms(self.R, self.ranks)
            active = good & (sizes > self.goal)
            Z = solve(self.R)
            new = _inner(self.R, Z, self.ranks)
            beta = torch.where(active & (new > 0), new / rz, 0)
            if probes:
                self.coefficients.append((alpha[-probes:], beta[-probes:]))
            D = torch.where(active, Z + beta * D, 0)
            rz = new
            count(sizes)
            self.D, self.rz, self.active = D, rz, active
            save(step + 1)
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


def _inner(A: Tensor, B: Tensor, ranks: Ranks) -> Tensor:
    """Inner products of columns, (k,), over the rows of all ranks."""
    out = (A * B).sum(0)
    ranks.add_up(out)
    return out


def _norms(A: Tensor, ranks: Ranks) -> Tensor:
    """Norms of columns, (k,), over the rows of all ranks."""
    own = torch.linalg.vector_norm(A, dim=0)
    if ranks.world == 1:
        return own
    ranks.add_up(own.square_())
    return own.sqrt_()


def check_same_system(checkpoint: Checkpoint, known: Tensor, norms: Tensor) -> None:
    """Raise unless right-hand sides have the norms that a checkpoint has kept, to rounding."""
    close = torch.finfo(norms.dtype).eps ** 0.5
    if known.shape != norms.shape or not bool(((known - norms).abs() <= close * norms).all()):
        raise ValueError(
            f"{checkpoint.path} belongs to another computation: its right-hand sides have other norms. The data, the "
            "curvature or the prior have changed; remove the folder or name another."
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
