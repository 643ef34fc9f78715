r"""A preconditioner from random combinations of the rows of an operator, for ``H = I + Phi^T B Phi``.

The randomized Nystrom approximation (Halko, Martinsson and Tropp 2011; Frangella, Tropp and Udell 2023) of
:math:`G = \Phi^\top B \Phi` from a basis Q (p, r),

.. math:: G \approx G Q \, (Q^\top G Q)^+ \, (G Q)^\top, \qquad
          Q = \mathrm{orth}(\Phi^\top L E), \quad E \sim N(0, 1), \quad B = L L^\top

takes one product with ``Phi^T`` and one fused pass, both with r columns. The approximation sees all rows, where
`linnet.linalg.preconditioners.nystrom` sees the rows of a few examples, and it keeps the coupling of Q to the
rest of the space: for the samples of a small convolutional classifier 64 columns take conjugate gradients from 56
iterations to 6, where 50 landmarks, 500 rows, take them to 19. With many outputs an example is many rows, and r columns
stay r columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from linnet._common import TEMPORARY
from linnet.linalg.float64 import eigh, find_resolved, inner
from linnet.linalg.operator import LinearOperator, check_weight
from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner
from linnet.linalg.row_weights import ClassBlocks, RowIndex, weigh


@torch.no_grad()
def sketch(
    Phi: LinearOperator,
    root: Tensor | ClassBlocks,
    *,
    rank: int,
    generator: torch.Generator,
    least: float = 0.01,
) -> LowRankPreconditioner:
    """``P = I + U diag(lam) U^T`` with the leading eigenpairs of ``Phi^T B Phi``, as far as r columns show them.

    The directions lie in the range of ``Phi^T``, so that conjugate gradients that start there stay there. While the
    preconditioner is made, about four blocks (cols, r) are held.

    Args:
        Phi: (rows, cols), for example ``J.scaled(S.sqrt())``.
        root: L with ``B = L L^T``: (rows,), or (n, c, c) for blocks.
        rank: r.
        generator: Source of E.
        least: Leave out directions whose eigenvalue, which stands beside one, is not above this.

    >>> from linnet.linalg.matrices import Matrix
    >>> Phi, L = Matrix(torch.tensor([[3.0, 0.0], [0.0, 0.01]])), torch.ones(2)
    >>> P = sketch(Phi, L, rank=2, generator=torch.Generator().manual_seed(0))
    >>> P.rank, P.multiply(torch.ones(2))
    (1, tensor([10.,  1.]))
    """
    seen = _look(Phi, root, rank, generator)
    return LowRankPreconditioner.from_factor(seen.Y, seen.W / seen.t.sqrt(), least=least)


@final
class Sketch:
    r"""A sketch that serves other curvatures too, without another pass over the data.

    The pass has seen :math:`\Phi Q`, so that :math:`Q^\top G' Q` is known for every :math:`G' = \Phi^\top B' \Phi`.
    The coupling of Q to the rest is taken over,

    .. math:: G' \approx F \, (Q^\top G' Q) \, F^\top, \qquad F = G Q \, (Q^\top G Q)^+,

    which for B is the approximation of `sketch`, and is exact for all B' where Q spans the row space of Phi.

    Args:
        Phi: As for `sketch`, and so are the other arguments. Two blocks (cols, r) and one block (rows, r) are kept.
        root: L at the curvature that Q is made for.
        rank: r.
        generator: Source of E.
        least: Leave out directions whose eigenvalue is not above this.

    Example:
        >>> from linnet.linalg.matrices import Matrix
        >>> Phi, L = Matrix(torch.eye(2)), torch.ones(2)
        >>> P = Sketch(Phi, L, rank=2, generator=torch.Generator().manual_seed(0)).at(torch.tensor([2.0, 3.0]))
        >>> P.multiply(torch.ones(2)).round()
        tensor([ 5., 10.])
    """

    def __init__(
        self, Phi: LinearOperator, root: Tensor, *, rank: int, generator: torch.Generator, least: float = 0.01
    ) -> None:
        rows = Phi.shape[0]
        self._rows = torch.zeros(rows, _check_rank(Phi, rank), dtype=Phi.dtype, device=Phi.device)
        seen = torch.zeros(rows, dtype=Phi.dtype, device=Phi.device)

        def note(U: Tensor, at: RowIndex) -> None:
            self._rows[at], seen[at] = U, 1

        self._seen, self._least, self._ranks = _look(Phi, root, rank, generator, note), least, Phi.ranks
        self._gram = inner(self._seen.Y, self._seen.Y)
        every = seen.clone()
        Phi.ranks.add_up(every)  # each rank has seen its own rows, or all of them
        self._rows *= (seen / every.sqrt())[:, None]

    @torch.no_grad()
    def at(self, root: Tensor) -> LowRankPreconditioner:
        """The preconditioner for another curvature, from its root L in the form of the first."""
        seen, c = self._seen, 1 if root.ndim == 1 else root.shape[1]
        T = torch.zeros_like(self._gram)
        step = max(1, TEMPORARY // max(1, self._rows.shape[1]) // c) * c
        for start in range(0, len(self._rows), step):
            at = slice(start, min(start + step, len(self._rows)))
            X = weigh(self._rows[at], root, at, transpose=True).double()
            T += X.T @ X
        self._ranks.add_up(T)
        t, R = eigh(seen.W.T @ T @ seen.W)
        C = seen.W / seen.t @ (R * t.clamp_min(0).sqrt())
        return LowRankPreconditioner.from_factor(seen.Y, C, least=self._least, gram=self._gram)


@dataclass(frozen=True)
class _Seen:
    """The part of G that a sketch has seen.

    Attributes:
        Y: ``G Q``, (cols, r).
        W: (r, s) in float64, eigenvectors of ``Q^T G Q`` whose eigenvalues are more than rounding.
        t: (s,) in float64, the eigenvalues.
    """

    Y: Tensor
    W: Tensor
    t: Tensor


def _check_rank(Phi: LinearOperator, rank: int) -> int:
    if rank < 1:
        raise ValueError(f"A sketch needs at least one column; got rank={rank!r}.")
    return min(rank, *Phi.shape)


@torch.no_grad()
def _look(
    Phi: LinearOperator,
    root: Tensor | ClassBlocks,
    rank: int,
    generator: torch.Generator,
    note: Callable[[Tensor, RowIndex], None] | None = None,
) -> _Seen:
    """One product with ``Phi^T`` and one fused pass; ``note`` is given ``Phi Q``, rows by rows."""
    check_weight(Phi, root)
    if generator.device != Phi.device:  # where a few thousand columns are drawn in no time
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator = torch.Generator(Phi.device).manual_seed(seed)
    E = torch.randn(Phi.shape[0], _check_rank(Phi, rank), dtype=Phi.dtype, device=Phi.device, generator=generator)
    Y = Phi.T @ weigh(E, root)
    if not bool(torch.isfinite(Y).all()):
        raise ArithmeticError("The products with Phi^T hold NaN or infinity: look at the operator and its weights.")
    Q = torch.linalg.qr(Y).Q
    del Y, E

    def weigh_twice(U: Tensor, at: RowIndex) -> Tensor:
        if note is not None:
            note(U, at)
        return weigh(weigh(U, root, at, transpose=True), root, at)

    Y = Phi._fused(weigh_twice, Q)[0]
    T = inner(Q, Y)
    t, W = eigh(0.5 * (T + T.T))
    kept = find_resolved(t, Phi.dtype)
    return _Seen(Y, W[:, kept], t[kept])
