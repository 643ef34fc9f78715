r"""The leading singular vectors of an operator V (n, p) that is known through its products.

.. math:: V V^\top \approx U U^\top, \qquad U = V P = [s_1 u_1, \dots, s_k u_k], \qquad P^\top P = 1

What a large problem costs are passes over the data. Four methods serve:

* krylov: grows a block Krylov space by one pass a step, from the components of a few examples and random columns, and
  stops on an estimate of the eigenvalues' errors (`linnet.linalg.svd.block_krylov`);
* exact: the dense V V^T and its eigenvectors, for few rows;
* nystrom: the components of a few examples, and one pass;
* power: subspace iteration with over-sampling, Algorithm 4 of Zhang et al. (2022), for comparison.

The last step of each is the same: Rayleigh-Ritz in the space found, whose products with V are at hand. So U is V P to
rounding, and the residuals of the eigenpairs are known.
"""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from linnet._common import check_folder, find_dense_budget, full_precision, messages, show_progress
from linnet.linalg.float64 import eigh, find_resolved
from linnet.linalg.operator import LinearOperator
from linnet.linalg.preconditioners.nystrom import draw_landmarks
from linnet.linalg.svd.block_krylov import (
    KrylovSpace,
    RitzPairs,
    combine,
    gather_rows,
    grow_krylov_space,
    orthonormalize,
)
from linnet.linalg.svd.checkpoint import Resumable

Method = Literal["auto", "krylov", "power", "nystrom", "exact"]

OVERSAMPLES = 10
"""Columns that Algorithm 4 takes beyond k."""
LIMIT = 12
"""Passes of Algorithm 4, its 10 iterations and a product before and after, and passes after which a Krylov space is
given up; for a share of the trace, so many times as many."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Leading components of an operator V, and how good they are.

    Attributes:
        U: (n, k), ``V P``: orthogonal columns of lengths s.
        s: (k,), singular values, descending.
        P: (p, k), orthonormal right singular vectors.
        eigenvalues: (k,) of V V^T: s squared.
        passes: Passes over the data; those over a few examples are not counted.
        converged: Whether the estimated errors have reached the tolerance.
        residuals: (k,), ``||V^T V p_i - s_i^2 p_i|| / s_i^2``.
        errors: (k,), estimates of the eigenvalues' relative errors, about the squares of the residuals.
        method: The method used.
        trace: ``||V||_F^2``, the sum of all eigenvalues.
        tolerance: The tolerance that was asked for.
    """

    U: Tensor
    s: Tensor
    P: Tensor
    eigenvalues: Tensor
    passes: int
    converged: bool
    residuals: Tensor
    errors: Tensor
    method: str
    trace: float
    tolerance: float

    @property
    def explained(self) -> Tensor:
        """Each component's share of the trace, (k,)."""
        return self.eigenvalues / self.trace

    def checked(self) -> Decomposition:
        """This decomposition; raises ArithmeticError where it has not converged."""
        if self.converged:
            return self
        worst = int(self.errors.argmax())
        raise ArithmeticError(
            f"The {len(self.s)} leading components have not converged in {self.passes} passes: the largest estimated "
            f"relative error of an eigenvalue is {float(self.errors[worst]):.2g} (component {worst + 1}, relative "
            f"residual {float(self.residuals[worst]):.2g}), not the {self.tolerance:.2g} asked for. Try a larger "
            "block=, fewer components, a larger tolerance=, or float64; or give passes= to take what so many find."
        )


@dataclass(frozen=True)
class _Settings:
    """Options of a decomposition, with all defaults filled in.

    Attributes:
        k: Components asked for; None for a share of the trace.
        share: The share of the trace; None for k components.
        trace: ``||V||_F^2``; None if it is not known, as the exact method allows.
        tolerance: Largest relative error of the eigenvalues.
        block: Columns of a product.
        passes: Largest number of passes; None where none was given.
        seed: Seed of the first block.
        memory: Bytes that the basis, or a dense V V^T, may take.
        progress: Whether to show progress bars.
    """

    k: int | None
    share: float | None
    trace: float | None
    tolerance: float
    block: int
    passes: int | None
    seed: int
    memory: int
    progress: bool | None

    def wanted(self, theta: Tensor) -> int | None:
        """Number of wanted eigenvalues among these, which are descending; None if there are not enough of them."""
        if self.k is not None:
            return self.k
        assert self.share is not None and self.trace is not None
        found = int((theta.cumsum(0) < self.share * self.trace).sum()) + 1
        return found if found <= len(theta) else None


@dataclass
class _Found:
    """A space, and the Ritz pairs in it."""

    ritz: RitzPairs
    wanted: int
    Q: list[Tensor]
    U: list[Tensor]
    passes: int
    converged: bool
    trace: float | None = None


@torch.no_grad()
def low_rank(
    V: LinearOperator,
    k: int | float,
    *,
    method: Method | str = "auto",
    tolerance: float | None = None,
    block: int | None = None,
    passes: int | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    trace: float | None = None,
    memory: float | str = "auto",
    coarse: LinearOperator | None = None,
) -> Decomposition:
    r"""The k leading components of V.

    Args:
        V: (n, p), any operator; a Jacobian, or Fisher vectors made of one.
        k: Number of components; or, as a number between 0 and 1, the share of the trace that they explain together.
        method: See the module; "auto" is exact or krylov, whichever costs less.
        tolerance: Relative error of the eigenvalues at which krylov stops, or the rounding of V's products where that
            is larger; default 1e-7 in float64 and 1e-5 in float32.
        block: Columns of a product; default 3 k, fewer where memory is short, and k + 10 for power.
        passes: Largest number of passes; the components found by then are returned, converged or not. Default: as many
            passes as it takes, and an error if that is more than 12; for power 12, its 10 iterations and a product
            before and after.
        seed: Seed of the first block: of its random columns, and of the examples that it is made from.
        checkpoint: A folder for the state after each pass of krylov and power. A call with the same arguments goes on
            from the state, with any number of ranks. The folder is removed at the end, but stays where krylov gives up,
            so that a call with a larger tolerance or more passes can go on, too. All ranks must see the folder.
        progress: As in `linnet.Linearization.jacobian`.
        trace: ``||V||_F^2`` where it is known, as for Fisher vectors (`linnet.fisher.statistics.Statistics.trace`);
            otherwise it takes one more pass.
        memory: Bytes that the basis, or a dense V V^T, may take. A Krylov basis that would grow beyond is restarted
            from its leading vectors.
        coarse: V in a cheaper precision. Krylov passes are made with it until they have converged, and only then with
            V, often just one.

    Returns:
        The components. U is V P, the embedding of V's rows.

    Raises:
        ValueError: There are fewer than k components; says how many.
        ArithmeticError: The components have not converged, and ``passes`` was not given.

    Example:
        >>> from linnet.linalg.matrices import Matrix
        >>> V = Matrix(torch.diag(torch.tensor([3.0, 1.0, 2.0])))
        >>> found = low_rank(V, 2)
        >>> found.eigenvalues, found.method
        (tensor([9., 4.]), 'exact')
        >>> low_rank(V, 0.6).s
        tensor([3.])
    """
    messages.check_seed(seed)
    if checkpoint is not None:
        check_folder(checkpoint, "checkpoint")
    _check(V, k, method, tolerance, block, passes, trace, coarse)
    count, share = (int(k), None) if _whole(k) else (None, float(k))
    limit = int(V.ranks.smallest(find_dense_budget(memory, V.device)))
    columns = _columns(V, count, method, limit, coarse is not None) if block is None else min(block, min(V.shape))
    chosen = choose_method(V, columns, memory=limit) if method == "auto" else method
    with full_precision(V.device):
        more = int(trace is None and chosen != "exact")
        trace = squared_norm(V) if more else trace
        tolerance = tolerance if tolerance is not None else 1e-7 if V.eps == torch.finfo(torch.float64).eps else 1e-5
        settings = _Settings(count, share, trace, tolerance, columns, passes, seed, limit, progress)
        resumable = Resumable(V, checkpoint, f"{chosen} {k} {block} {seed}")
        if chosen == "krylov":
            found = _krylov(V, settings, resumable, coarse)
        elif chosen == "power":
            found = _power(V, settings, resumable)
        else:
            found = (_nystrom if chosen == "nystrom" else _exact)(V, settings)
        result = _result(V, found, chosen, settings, more)
    return result if passes is not None or chosen in ("power", "nystrom") else result.checked()


def _columns(V: LinearOperator, k: int | None, method: str, memory: int, coarse: bool) -> int:
    """Number of columns of a block where none is given."""
    most = min(V.shape)
    if method == "power":
        return min(most, (k or 128) + OVERSAMPLES)
    # Passes cost more than columns do: three a component save one or two of them. What fits is as in _capacity.
    good = 128 if k is None else max(3 * k, 32)
    fits = (_columns_in(V, memory) - 2 * (k or good)) // (10 if coarse else 5)
    return min(most, good, max(fits, (k or 1) + OVERSAMPLES))


def _result(V: LinearOperator, found: _Found, method: str, s: _Settings, more: int) -> Decomposition:
    rank, wanted = found.ritz.rank, found.wanted
    if s.k is None:  # what is missing of the share is rounding
        wanted = min(wanted, rank)
    if rank < wanted:
        raise TooFewComponents(V, rank, wanted)
    trace = found.trace if s.trace is None else s.trace
    assert trace is not None
    Y, theta = found.ritz.Y[:, :wanted], found.ritz.theta[:wanted]
    return Decomposition(
        U=gather_rows(combine(found.U, Y), V.shape[0], V.ranks),
        s=theta.sqrt().to(V.dtype),
        P=gather_rows(combine(found.Q, Y), V.shape[1], V.ranks),
        eigenvalues=theta.to(V.dtype),
        passes=found.passes + more,
        converged=found.converged,
        residuals=(found.ritz.residuals[:wanted] / theta).to(V.dtype),
        errors=found.ritz.errors[:wanted].to(V.dtype),
        method=method,
        trace=trace,
        tolerance=s.tolerance,
    )


class TooFewComponents(ValueError):
    """More components are asked for than have singular values above rounding.

    Attributes:
        rank: The number of these components.
    """

    def __init__(self, V: LinearOperator, rank: int, wanted: int) -> None:
        hint = f"Ask for at most {rank}." if rank else "All its products are zero."
        super().__init__(
            f"{V.name} of shape {V.shape} has {rank} components whose singular values are more than rounding; "
            f"{wanted} were asked for. {hint}"
        )
        self.rank = rank


# Methods.


def _krylov(V: LinearOperator, s: _Settings, resumable: Resumable, coarse: LinearOperator | None) -> _Found:
    if coarse is not None:
        most, least = _room_for_columns(V, s, coarse=True)
        coarse = coarse if most >= least else None  # the block is wider where V takes over from the coarse operator
    capacity = _capacity(V, s, coarse is not None)
    state = resumable.load()
    if state is None:
        first = V if coarse is None else coarse
        state = KrylovSpace.start(mixed_block(first, s.block, seed=s.seed, memory=s.memory), coarse=coarse is not None)
    limit = s.passes or (LIMIT if s.k is not None else LIMIT * LIMIT)
    with show_progress(None, "low rank", progress=s.progress, unit="passes") as tick:

        def after(state: KrylovSpace, found: RitzPairs) -> None:
            resumable.save(state)
            tick(1, lambda: f"error {float(found.errors[: s.wanted(found.theta)].max()):.1e}")

        while True:
            operator = coarse if state.coarse and coarse is not None else V
            # The last pass is V's own, whatever the coarse operator has come to.
            most = limit - 1 if state.coarse else limit
            found, wanted, converged = grow_krylov_space(
                operator,
                state,
                s.wanted,
                tolerance=s.tolerance,
                limit=most,
                capacity=capacity,
                after=after,
                ahead=state.coarse,
            )
            if not state.coarse:
                break
            state = state.refine(found, max(wanted + OVERSAMPLES, s.block), V.ranks)
            after(state, found)
    if wanted > state.columns and state.X.shape[1]:
        raise ArithmeticError(
            f"{state.passes} passes with blocks of {s.block} columns make a space of {state.columns}, too few for "
            f"{wanted} components. Take a larger block=, or allow more passes=."
        )
    if converged or s.passes is not None:
        resumable.remove()
    return _Found(found, wanted, state.Q, state.U, state.passes, converged)


def _more_columns(k: int, block: int, coarse: bool) -> int:
    """Columns that the block has in excess where products in full precision take over from coarse ones."""
    return max(k + OVERSAMPLES, block) if coarse else 0


def _room_for_columns(V: LinearOperator, s: _Settings, *, coarse: bool) -> tuple[int, int]:
    """Columns that a Krylov basis may have, and that it must have; beside it lie three blocks and the result.

    Each rank holds its rows of the basis, and all rows of the blocks and of the result.
    """
    result = s.block if s.k is None else s.k
    block = s.block + _more_columns(result, s.block, coarse)
    return (_columns_in(V, s.memory) - 3 * block - result) * V.ranks.world, result + 2 * block


def _capacity(V: LinearOperator, s: _Settings, coarse: bool) -> int:
    """Columns that a Krylov basis may have; raise where memory holds too few."""
    capacity, least = _room_for_columns(V, s, coarse=coarse)
    if capacity < least:
        fits = _columns_in(V, s.memory)
        needed = fits - capacity // V.ranks.world + -(-least // V.ranks.world)
        raise MemoryError(
            f"A Krylov basis of {V.name} {V.shape} needs room for {needed} columns of {sum(V.shape):,} numbers, "
            f"and half of the memory, {s.memory // 2:,} bytes, holds {fits}. Ask for fewer components, a smaller "
            "block=, fewer parameters with params=, or allow more with memory=."
        )
    return capacity


def _columns_in(V: LinearOperator, memory: int) -> int:
    """Columns of V and V^T that half of the memory holds; the other half is for the passes."""
    return memory // 2 // (sum(V.shape) * V.dtype.itemsize)


def _power(V: LinearOperator, s: _Settings, resumable: Resumable) -> _Found:
    """Algorithm 4; a product with V and one with V^T are one pass here."""
    state = resumable.load()
    if state is None:
        Omega = V._rmatmul(random_normal(V.shape[0], s.block, V, seed=s.seed))  # lines 2 and 3
        state = KrylovSpace.start(Omega)
        state.passes = 1
        resumable.save(state)
    passes = s.passes or LIMIT
    with show_progress(None, "low rank", progress=s.progress, unit="passes") as tick:
        while state.passes < passes - 1:
            state.X = orthonormalize(V.normal(state.X), ranks=V.ranks)  # lines 5 to 7
            state.passes += 1
            resumable.save(state)
            tick(1)
    found = _single(V, orthonormalize(state.X, ranks=V.ranks), s, passes=state.passes + 1)  # lines 9 to 12
    resumable.remove()
    return found


def _nystrom(V: LinearOperator, s: _Settings) -> _Found:
    if V.rows(torch.zeros(1, dtype=torch.long)) is None:
        # Combinations of all rows instead of a few rows.
        X = V._rmatmul(random_normal(V.shape[0], s.block, V, seed=s.seed))
        return _single(V, orthonormalize(X, ranks=V.ranks), s, passes=2)
    # All that is known comes from the landmarks, so they are more than for a start.
    return _single(V, landmark_block(V, s.block, seed=s.seed, memory=s.memory, each=10), s, passes=1)


def _exact(V: LinearOperator, s: _Settings) -> _Found:
    K = V.gram().double()
    trace = float(K.diagonal().sum())
    s = replace(s, trace=trace) if s.trace is None else s
    theta, E = eigh(K)
    del K
    dense = RitzPairs(theta, E, torch.zeros_like(theta), 0.0, V.eps)
    wanted = s.wanted(theta.clamp_min(0)) or len(theta)
    if dense.rank < wanted:
        return _Found(dense, wanted, [], [], 1, False)
    P = V._rmatmul((E[:, :wanted] / theta[:wanted].sqrt()).to(V.dtype))
    rest = float(theta[wanted]) if wanted < len(theta) else 0.0
    found = _single(V, orthonormalize(P, ranks=V.ranks), replace(s, k=wanted), passes=3, rest=rest)
    return replace(found, trace=trace)


def _single(V: LinearOperator, X: Tensor, s: _Settings, *, passes: int, rest: float | None = None) -> _Found:
    """Rayleigh-Ritz in the span of X, by one pass."""
    if X.shape[1] == 0:
        raise TooFewComponents(V, 0, s.k or 1)
    state = KrylovSpace.start(X)
    found = state.step(V, grow=False)
    found = found if rest is None else replace(found, rest=rest)
    wanted, m = s.wanted(found.theta), len(found.theta)
    converged = wanted is not None and found.converged(wanted, s.tolerance)
    return _Found(found, m if wanted is None else wanted, state.Q, state.U, passes, converged)


# The first block.


def random_normal(rows: int, columns: int, V: LinearOperator, *, seed: int) -> Tensor:
    """Standard normal numbers of V's kind, drawn on its device: a block may have very many."""
    generator = torch.Generator(V.device).manual_seed(seed)
    return torch.randn(rows, columns, dtype=V.dtype, device=V.device, generator=generator)


def landmark_count(n: int, block: int, c: int, memory: int, *, each: int = 3) -> int:
    """Examples for a start of ``block`` columns: ``each`` rows a column, but no more than half, or than memory allows.

    >>> landmark_count(10_000, 256, 1, 2**30)
    768
    """
    most = min(4096, int((memory / 64) ** 0.5))
    return max(1, min(n // 2, min(most, max(each * block, 256)) // c))


def mixed_block(V: LinearOperator, block: int, *, seed: int, memory: int) -> Tensor:
    """Orthonormal columns (p, block) to start from: two thirds from a few examples, one third random.

    Examples alone know nothing of components that belong to single others, as Fisher vectors have them, and random
    columns see every component but none well. Largest relative errors of LeNet-5's 32 leading eigenvalues on 10,000
    digits, with 96 columns:

    ============  ======  ======  ======  ======
    pass          2       3       4       5
    ============  ======  ======  ======  ======
    examples      5e-2    2e-2    7e-4    9e-7
    random        1e-1    3e-3    2e-5    4e-8
    both          6e-2    2e-3    1e-5    2e-8
    ============  ======  ======  ======  ======
    """
    X = landmark_block(V, max(1, block - block // 3), seed=seed, memory=memory)
    if X.shape[1] == block:
        return X
    more = random_normal(V.shape[1], block - X.shape[1], V, seed=seed)
    return torch.cat([X, orthonormalize(more, against=[X], ranks=V.ranks)], 1)


def landmark_block(V: LinearOperator, block: int, *, seed: int, memory: int, each: int = 3) -> Tensor:
    """Orthonormal columns (p, block): right singular vectors of some rows of V, filled up with random ones."""
    c = V.block or 1
    n = V.shape[0] // c
    generator = torch.Generator().manual_seed(seed)
    few = V.rows(draw_landmarks(n, landmark_count(n, block, c, memory, each=each), generator))
    found: list[Tensor] = []
    if few is not None and few.has_gram:
        theta, E = eigh(few.gram().double())
        theta, E = theta[:block], E[:, :block]
        kept = find_resolved(theta, V.dtype)
        if bool(kept.any()):
            X = few._rmatmul((E[:, kept] / theta[kept].sqrt()).to(V.dtype))
            found.append(orthonormalize(X, ranks=V.ranks))
    missing = block - sum(X.shape[1] for X in found)
    if missing:
        more = random_normal(V.shape[1], missing, V, seed=seed + 1)
        found.append(orthonormalize(more, against=found, ranks=V.ranks))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


# Choices.


def choose_method(V: LinearOperator, block: int, *, memory: int) -> str:
    """Exact where the dense V V^T fits into memory and costs less than four Krylov passes, or a Krylov basis does not
    fit, as where there are many more parameters than rows; else krylov.

    >>> from linnet.linalg.matrices import Matrix
    >>> choose_method(Matrix(torch.ones(100, 1000)), 20, memory=2**30)
    'exact'
    """
    n, p = V.shape
    gram, eigh = 0.5 * n * n * p, 10.0 * n**3
    steps = 4 * (2.0 * n * p * block) + p * (4.0 * block) ** 2
    if not (V.has_gram and 32 * n * n <= memory):
        return "krylov"
    return "exact" if gram + eigh <= steps or _columns_in(V, memory) < 6 * block else "krylov"


def squared_norm(V: LinearOperator) -> float:
    """``||V||_F^2`` in one pass; nothing cancels where columns are centered.

    >>> from linnet.linalg.matrices import Matrix
    >>> squared_norm(Matrix(torch.tensor([[1.0, 2.0]])))
    5.0
    """
    found = V.moments(centered=False)
    return float(V.column_norms().double().sum()) if found is None else V.shape[0] * float(found[1].sum())


def _check(
    V: Any,
    k: Any,
    method: str,
    tolerance: float | None,
    block: int | None,
    passes: int | None,
    trace: float | None,
    coarse: LinearOperator | None,
) -> None:
    if not isinstance(V, LinearOperator):
        raise TypeError(f"low_rank needs a linear operator; got {type(V).__name__}. For a tensor use Matrix(tensor).")
    if V.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"low_rank needs an operator in float32 or float64; got {V.dtype}.")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}; got {method!r}.")
    whole, most = _whole(k), min(V.shape)
    if not (whole and k >= 1) and not (isinstance(k, numbers.Real) and 0 < float(k) < 1):
        raise ValueError(
            "k must be a positive whole number of components, or the share of the trace to explain, between 0 and 1; "
            f"got {k!r}."
        )
    if k > most:
        raise ValueError(
            f"{V.name} of shape {V.shape} has at most {most} components; {k} were asked for. Ask for at most {most}."
        )
    fewest = k if whole and method in ("power", "nystrom") else 1
    apart = method == "power" or coarse is not None  # a first or last pass that is not like the others
    for name, value, least in (("block", block, fewest), ("passes", passes, 2 if apart else 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name} must be a whole number, at least {least} here; got {value!r}.")
    for name, number in (("tolerance", tolerance), ("trace", trace)):
        if number is not None and not number >= 0:
            raise ValueError(f"{name} must not be negative; got {number!r}.")
    if coarse is not None and (method not in ("auto", "krylov") or coarse.shape != V.shape or coarse.dtype != V.dtype):
        raise ValueError(
            f"coarse serves the methods 'krylov' and 'auto', with an operator like V, {V.shape} in {V.dtype}; got "
            f"{coarse.shape} in {coarse.dtype} for {method!r}."
        )


def _whole(k: Any) -> bool:
    return isinstance(k, numbers.Integral) and not isinstance(k, bool)
