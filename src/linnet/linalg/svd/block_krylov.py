r"""Leading eigenvectors of ``A = V^T V`` from products with blocks: block Krylov spaces and what they are made of.

One pass over the data gives ``U = V X`` and ``A X = V^T U`` of a block X (p, b). The basis ``Q = [X_0, X_1, ...]``
grows by what the last product leaves outside of it, ``R = A X - Q Q^T A X``, made orthonormal; so ``A Q`` lies in the
span of Q and R, and both the Rayleigh-Ritz pairs and their residuals come without another pass:

.. math::
    T = (V Q)^\top V Q, \quad T y_i = \theta_i y_i, \quad p_i = Q y_i, \quad
    \|A p_i - \theta_i p_i\| = \|R \, y_i^{last}\| ,

with the rows of y that belong to the last block. Inner products of long columns, and all small matrices, are in float64
whatever V is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet._common import ALONE, Ranks
from linnet.linalg import float64
from linnet.linalg.float64 import eigh, orthonormality
from linnet.linalg.operator import LinearOperator

ROUNDING = 8
"""Products are trusted to this many eps of the largest: fewer would take rounding for components, more would lose small
components. Sums in blocks leave one or two eps, however long they are."""


# Pieces.


def multiply_both(V: LinearOperator, X: Tensor) -> tuple[Tensor, Tensor]:
    """``V X`` (rows, b) and ``V^T V X`` (cols, b), in one pass where the operator streams; all ranks get all rows.

    >>> from linnet.linalg.matrices import Matrix
    >>> multiply_both(Matrix(torch.tensor([[1.0, 2.0]])), torch.ones(2, 1))
    (tensor([[3.]]), tensor([[3.],
            [6.]]))
    """
    U, seen = X.new_zeros(V.shape[0], X.shape[1]), X.new_zeros(V.shape[0], 1)

    def note(part: Tensor, rows: slice | Tensor) -> Tensor:
        # Written, not added: a pass that runs out of memory starts again.
        U[rows], seen[rows] = part, 1
        return part

    W = V._fused(note, X)[0]
    V.ranks.add_up(U, seen)
    return (U if bool((seen == 1).all()) else U / seen), W


def own_rows(m: int, ranks: Ranks) -> slice:
    """The share of m rows that this rank takes where all ranks have the same tensors."""
    return slice(*ranks.part(m))


def gather_rows(X: Tensor, m: int, ranks: Ranks) -> Tensor:
    """All m rows, from the rows of each rank."""
    return ranks.gather_parts(X, m) if X.shape[1] else X.new_empty(m, 0)


def _own(X: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of a tensor that all ranks have, in memory of their own."""
    return X if ranks.world == 1 else X[own_rows(len(X), ranks)].clone()


def shared_inner(A: Tensor, B: Tensor, ranks: Ranks) -> Tensor:
    """``A^T B`` in float64, for A (m, a) and B (m, b) that all ranks have; each rank takes its share of the rows."""
    rows = own_rows(len(A), ranks)
    return _inner(A[rows], B[rows], ranks)


def _inner(A: Tensor, B: Tensor, ranks: Ranks) -> Tensor:
    """``A^T B`` in float64 from each rank's own rows of A and B."""
    out = float64.inner(A, B)
    ranks.add_up(out)
    return out


def combine(blocks: Sequence[Tensor], Y: Tensor) -> Tensor:
    """``[blocks] Y``, for blocks (m, b_i) and Y (sum of b_i, k)."""
    parts = Y.to(blocks[0].dtype).split([block.shape[1] for block in blocks])
    out = blocks[0] @ parts[0]
    for block, part in zip(blocks[1:], parts[1:], strict=True):
        out.addmm_(block, part)
    return out


def _project_out(X: Tensor, blocks: Sequence[Tensor], ranks: Ranks) -> None:
    """Subtract from X its projection on orthonormal blocks, in place; each rank has its own rows of all of them."""
    for block in blocks:
        X.addmm_(block, _inner(block, X, ranks).to(X.dtype), alpha=-1)


def orthonormalize(X: Tensor, *, against: Sequence[Tensor] = (), noise: float = 0.0, ranks: Ranks = ALONE) -> Tensor:
    """An orthonormal basis of the part of X (m, b) outside the span of ``against``, without directions of no length.

    Each round makes the Gram matrix the identity as far as float64 resolves it, which is a factor of about 1e6 in the
    lengths of directions; a few rounds serve any X. A round is products of matrices, fast where a QR decomposition is
    slow, and each rank multiplies its share of the rows.

    Args:
        X: (m, b); overwritten.
        against: Orthonormal blocks, orthogonal to one another.
        noise: Directions up to this length are rounding and left out. Directions shorter than a few eps of the longest
            are always left out.
        ranks: Ranks that all have X and call this together.

    >>> orthonormalize(torch.tensor([[2.0, 2.0], [0.0, 0.0]])).abs()
    tensor([[1.],
            [0.]])
    """
    m, rows = len(X), own_rows(len(X), ranks)
    return gather_rows(_orthonormalize(X[rows], [block[rows] for block in against], noise, m, ranks), m, ranks)


def _orthonormalize(X: Tensor, against: Sequence[Tensor], noise: float, m: int, ranks: Ranks) -> Tensor:
    """`orthonormalize` for each rank's own rows of X and of ``against``, out of m rows."""
    eps, fine = torch.finfo(X.dtype).eps, torch.finfo(torch.float64).eps
    off, limit, settled = math.inf, 0.0, False
    shortest = noise
    for step in range(8):
        _project_out(X, against, ranks)
        G = _inner(X, X, ranks)
        b = len(G)
        off = float((G - torch.eye(b, dtype=G.dtype, device=G.device)).abs().max()) if b else 0.0
        # Rounding adds up as the root of the number of terms where it is random: b in X E, m in G.
        goal = eps * b**0.5 + fine * m**0.5
        # Another processor may add up less luckily. A round from a G of condition 3 or less leaves rounding alone, and
        # a further round would leave as much.
        limit = orthonormality(m, b, X.dtype) + eps * len(against)
        if step and (off <= goal or (settled and off <= limit)):
            return X
        settled = off * b <= 0.5  # by Gershgorin's theorem
        g, E = eigh(G)
        longest = float(g[0].clamp_min(0)) ** 0.5 if len(g) else 0.0
        if step == 0:
            shortest = max(shortest, ROUNDING * eps * longest)
        floor = (64 * fine * m**0.5) ** 0.5 * longest  # entries of G are rounded by about sqrt(m) eps of the largest
        length = g.clamp_min(0).sqrt()
        # Directions that float64 does not resolve in this round are left for the next one, and lengthened until then.
        kept = (length > shortest) | (length <= floor) if shortest < floor else length > shortest
        X = combine([X], E[:, kept] / length[kept].clamp_min(floor))
        shortest = shortest / floor if shortest < floor else 0.5
    raise ArithmeticError(
        f"A block of {X.shape[1]} columns and {m} rows could not be made orthonormal in {X.dtype}: X^T X is off the "
        f"identity by {off:.1g}, and rounding explains {limit:.1g}. "
        + ("Use float64, or a smaller block." if X.dtype != torch.float64 else "Use a smaller block.")
    )


# Rayleigh-Ritz.


@dataclass(frozen=True)
class RitzPairs:
    """Eigenpairs of ``A`` restricted to the span of a basis.

    Attributes:
        theta: Eigenvalues, (m,) in float64, descending.
        Y: Eigenvectors in the coordinates of the basis, (m, m) in float64.
        residuals: (m,), ``||A p - theta p||``.
        rest: An estimate of the largest eigenvalue that A has outside the span.
        eps: Rounding unit of the products.
    """

    theta: Tensor
    Y: Tensor
    residuals: Tensor
    rest: float
    eps: float

    @property
    def rank(self) -> int:
        """Number of eigenvalues that are more than rounding."""
        least = max((4 * ROUNDING * self.eps) ** 2, 64 * torch.finfo(torch.float64).eps * len(self.theta) ** 0.5)
        return int((self.theta > least * self.theta[:1].clamp_min(0)).sum())

    @property
    def errors(self) -> Tensor:
        r"""Estimates of the relative errors of theta, (m,).

        .. math:: \min\left(\frac{\rho}{\theta}, \frac{2 \rho^2}{\theta (\theta - c)}\right)

        with the residual norms rho and c = ``rest``. The first is a bound. With the true c, half of the second would be
        a bound too.
        """
        theta = self.theta.clamp_min(torch.finfo(torch.float64).tiny)
        gap = (theta - self.rest).clamp_min(torch.finfo(torch.float64).tiny)
        bound = self.residuals / theta
        return torch.minimum(bound, 2 * bound * (self.residuals / gap))

    def converged(self, wanted: int, tolerance: float) -> bool:
        """Whether the errors of wanted values have reached a tolerance, or their residuals the rounding of products."""
        rounding = ROUNDING * self.eps * float(self.theta[0].clamp_min(0))
        return bool(((self.errors <= tolerance) | (self.residuals <= rounding))[:wanted].all())


def rayleigh_ritz(T: Tensor, G: Tensor, *, rest: float, eps: float) -> RitzPairs:
    """Rayleigh-Ritz from ``T = (V Q)^T V Q`` and ``G = R^T R``, with R the part of the last product outside the basis.

    Args:
        T: (m, m) in float64.
        G: (b, b) in float64, for the last b columns of Q.
        rest: An estimate of the largest eigenvalue outside.
        eps: Rounding unit of the products.
    """
    theta, Y = eigh(T)
    y = Y[len(Y) - len(G) :]
    residuals = (y * (G @ y)).sum(0).clamp_min(0).sqrt()
    return RitzPairs(theta, Y, residuals, rest, eps)


# Block Krylov.


@dataclass
class KrylovSpace:
    """A Krylov space between two passes.

    Attributes:
        X: The next block (p, b); no columns once the space is invariant.
        Q: Blocks of the basis; each rank has its rows of them.
        U: ``V Q``, block by block; each rank has its rows of them.
        T: ``U^T U`` in float64.
        passes: Number of passes made so far.
        coarse: Whether products are still made in a cheaper precision.
        rest: For a first block, an estimate of the largest eigenvalue outside; None where nothing is known.
    """

    X: Tensor
    Q: list[Tensor]
    U: list[Tensor]
    T: Tensor
    passes: int = 0
    coarse: bool = False
    rest: float | None = None

    @staticmethod
    def start(X: Tensor, *, passes: int = 0, coarse: bool = False) -> KrylovSpace:
        """A space whose first block is X, with orthonormal columns."""
        return KrylovSpace(X, [], [], torch.zeros(0, 0, dtype=torch.float64, device=X.device), passes, coarse)

    @property
    def columns(self) -> int:
        """Number of columns of the basis."""
        return len(self.T)

    def step(self, V: LinearOperator, *, grow: bool = True) -> RitzPairs:
        """One pass: the block X joins the basis; the part of its product outside the basis becomes the next block."""
        X, m, eps, ranks = self.X, self.columns, V.eps, V.ranks
        U, R = multiply_both(V, X)
        noise = 0.5 * ROUNDING * eps * float(torch.linalg.vector_norm(R, dim=0).max())
        self.passes += 1
        self.Q.append(_own(X, ranks))
        self.U.append(_own(U, ranks))
        side = torch.cat([_inner(block, self.U[-1], ranks) for block in self.U])
        self.T = F.pad(self.T, (0, len(side) - m, 0, len(side) - m))
        self.T[:, m:], self.T[m:] = side, side.T
        basis, R = self.Q, _own(R, ranks)
        for _ in range(2):  # one projection leaves rounding of the part that it subtracts
            _project_out(R, basis, ranks)
        # Later blocks have smaller eigenvalues than earlier ones; of a first block, only the last eigenvalue is small.
        values = eigh(side[m:])[0]
        rest = float(values[0 if m else -1]) if m or self.rest is None else self.rest
        found = rayleigh_ritz(self.T, _inner(R, R, ranks), rest=rest, eps=eps)
        if grow:
            self.X = gather_rows(_orthonormalize(R, basis, noise, len(X), ranks), len(X), ranks)
        else:
            self.X = X[:, :0]
        return found

    def restart(self, found: RitzPairs, keep: int) -> None:
        """Replace the basis by its leading ``keep`` Ritz vectors: their residuals still lie in the next block."""
        Y = found.Y[:, :keep]
        self.Q, self.U = [combine(self.Q, Y)], [combine(self.U, Y)]
        self.T = torch.diag(found.theta[:keep])

    def refine(self, found: RitzPairs, keep: int, ranks: Ranks = ALONE) -> KrylovSpace:
        """A new space for products in full precision, from the leading vectors of this one and its next block.

        The first pass of the new space does the work of two: it multiplies the old vectors again, and the next block.
        """
        X = torch.cat([gather_rows(combine(self.Q, found.Y[:, :keep]), len(self.X), ranks), self.X], 1)
        rest = float(found.theta[keep]) if keep < len(found.theta) else 0.0
        return replace(KrylovSpace.start(orthonormalize(X, ranks=ranks), passes=self.passes), rest=rest)


def expected_error(found: RitzPairs, wanted: int, block: int) -> float:
    r"""The largest error to expect after one more step, from the largest error now.

    A step divides errors by :math:`(z + \sqrt{z^2 - 1})^2` in the long run, with z = 2 theta_k / theta_(b + 1) - 1 for
    k wanted values and blocks of b columns (Saad 1980), and a factor 4 is for safety. Infinite while the space is
    one block, which says nothing of later blocks.
    """
    if len(found.theta) <= block or wanted > block:
        return math.inf
    z = 2 * float(found.theta[wanted - 1] / found.theta[block].clamp_min(1e-300)) - 1
    return 4 * float(found.errors[:wanted].max()) / (z + math.sqrt(z * z - 1)) ** 2


def grow_krylov_space(
    V: LinearOperator,
    state: KrylovSpace,
    count: Callable[[Tensor], int | None],
    *,
    tolerance: float,
    limit: int,
    capacity: int,
    after: Callable[[KrylovSpace, RitzPairs], None],
    ahead: bool = False,
) -> tuple[RitzPairs, int, bool]:
    """Grow a Krylov space until enough eigenvalues have converged.

    Args:
        V: The operator.
        state: The space to start from; it is changed.
        count: Says how many of the Ritz values, which are given in descending order, are wanted; None while there are
            not enough.
        tolerance: Largest relative error of the wanted values, as `RitzPairs.errors` estimates it.
        limit: Largest number of passes.
        capacity: Columns that the basis may have before it is restarted.
        after: Called after each pass that is not the last, when the next can start.
        ahead: Stop one step early, when the next one can be expected to bring the errors to the tolerance.

    Returns:
        The last Ritz pairs, how many of them are wanted, and whether those have converged.
    """
    while True:
        found = state.step(V)
        wanted, m = count(found.theta), len(found.theta)
        enough = wanted is not None and wanted <= m and found.converged(wanted, tolerance)
        if ahead and wanted is not None and wanted <= m:
            enough = enough or expected_error(found, wanted, state.Q[0].shape[1]) <= tolerance
        if enough or state.passes >= limit or state.X.shape[1] == 0:
            # In an invariant space there is all that there is.
            whole = state.X.shape[1] == 0 and found.converged(m, tolerance)
            return found, m if wanted is None else wanted, enough or whole
        if state.columns + state.X.shape[1] > capacity:
            # All that there is room for: 8 passes where keeping a block less takes 21.
            keep = capacity - state.X.shape[1]
            if wanted is None or wanted > keep:
                raise MemoryError(
                    f"A Krylov basis of {capacity} columns is all that memory allows, and more than {keep} components "
                    "are wanted. Ask for a smaller share, take a smaller block=, or allow more with memory=."
                )
            state.restart(found, keep)
        after(state, found)
