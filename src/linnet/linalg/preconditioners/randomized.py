r"""A preconditioner from random combinations of the rows of an operator, for ``H = I + Phi^T B Phi``.

The randomized Nystrom approximation (Halko, Martinsson and Tropp 2011; Frangella, Tropp and Udell 2023) of
:math:`G = \Phi^\top B \Phi` from a basis Q (p, r),

.. math:: G \approx G Q \, (Q^\top G Q)^+ \, (G Q)^\top, \qquad
          Q = \mathrm{orth}(\Phi^\top L E), \quad E \sim N(0, 1), \quad B = L L^\top

takes one product with ``Phi^T`` and one fused pass, both with r columns. It sees all rows, where
`linnet.linalg.preconditioners.nystrom.nystrom` sees those of a few examples, and it keeps what couples Q to the rest of
the space: for the samples of a small convolutional classifier 64 columns take conjugate gradients from 56 iterations to
6, where 50 landmarks, 500 rows, take them to 19. With many outputs an example is many rows, and r columns stay r
columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from linnet._common.distributed import add_up
from linnet.linalg.operator import LinearOperator
from linnet.linalg.operator_checks import check_weight
from linnet.linalg.preconditioners.nystrom import ENTRIES, SPOILED, Preconditioner, _eigh, _orthonormal
from linnet.linalg.row_weights import Rows, weigh
from linnet.probability.posteriors import by_root


@torch.no_grad()
def sketch(
    Phi: LinearOperator, root: Tensor, *, rank: int, generator: torch.Generator, least: float = 0.01
) -> Preconditioner:
    """``P = I + U diag(lam) U^T`` with the leading eigenpairs of ``Phi^T B Phi``, as far as r columns show them.

    Its directions lie in the range of ``Phi^T``, so that conjugate gradients that start there stay there. While it is
    made, about four blocks (cols, r) are held.

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
    return _leading(seen.Y, seen.W / seen.t.sqrt(), seen.G, least)


@final
class Sketch:
    r"""A sketch that serves other curvatures too, without another pass over the data.

    The pass has seen :math:`\Phi Q`, so that :math:`Q^\top G' Q` is known for every :math:`G' = \Phi^\top B' \Phi`.
    What couples Q to the rest is taken over,

    .. math:: G' \approx F \, (Q^\top G' Q) \, F^\top, \qquad F = G Q \, (Q^\top G Q)^+,

    which for B is the approximation of `sketch`, and for all B' where Q spans the row space of Phi exact.

    Args:
        Phi: As for `sketch`, and so are the others. Two blocks (cols, r) and one (rows, r) are kept.
        root: L at the curvature that Q is made for.
        rank: r.
        generator: Source of E.
        least: Of eigenvalues.

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
        self._rows = torch.zeros(rows, _rank(Phi, rank), dtype=Phi.dtype, device=Phi.device)
        seen = torch.zeros(rows, dtype=Phi.dtype, device=Phi.device)

        def note(U: Tensor, at: Rows) -> None:
            self._rows[at], seen[at] = U, 1

        self._seen, self._least = _look(Phi, root, rank, generator, note), least
        every = seen.clone()
        add_up(every)  # each rank has seen its own rows, or all of them
        self._rows *= (seen / every.sqrt())[:, None]

    @torch.no_grad()
    def at(self, root: Tensor) -> Preconditioner:
        """The preconditioner for another curvature, from its root L, in the form of the first."""
        seen, transposed = self._seen, root if root.ndim == 1 else root.mT
        T, c = torch.zeros_like(seen.G), 1 if root.ndim == 1 else root.shape[1]
        step = max(1, ENTRIES // max(1, self._rows.shape[1]) // c) * c
        for start in range(0, len(self._rows), step):
            at = slice(start, min(start + step, len(self._rows)))
            X = weigh(self._rows[at], transposed, at).double()
            T += X.T @ X
        add_up(T)
        t, R = _eigh(seen.W.T @ T @ seen.W)
        return _leading(seen.Y, seen.W / seen.t @ (R * t.clamp_min(0).sqrt()), seen.G, self._least)


@dataclass(frozen=True)
class _Seen:
    """What a sketch has seen of G.

    Attributes:
        Y: ``G Q``, (cols, r).
        W: (r, s) in float64, eigenvectors of ``Q^T G Q`` whose eigenvalues are more than rounding.
        t: (s,) in float64, those eigenvalues.
        G: ``Y^T Y`` in float64.
    """

    Y: Tensor
    W: Tensor
    t: Tensor
    G: Tensor


def _rank(Phi: LinearOperator, rank: int) -> int:
    if rank < 1:
        raise ValueError(f"A sketch needs at least one column; got rank={rank!r}.")
    return min(rank, *Phi.shape)


@torch.no_grad()
def _look(
    Phi: LinearOperator,
    root: Tensor,
    rank: int,
    generator: torch.Generator,
    note: Callable[[Tensor, Rows], None] | None = None,
) -> _Seen:
    """One product with ``Phi^T`` and one fused pass; ``note`` is given ``Phi Q``, rows by rows."""
    check_weight(Phi, root)
    if generator.device != Phi.device:  # where a few thousand columns are drawn in no time
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator = torch.Generator(Phi.device).manual_seed(seed)
    E = torch.randn(Phi.shape[0], _rank(Phi, rank), dtype=Phi.dtype, device=Phi.device, generator=generator)
    Y = Phi.T @ by_root(root, E)
    if not bool(torch.isfinite(Y).all()):
        raise ArithmeticError("The products with Phi^T hold NaN or infinity: look at the operator and its weights.")
    Q = torch.linalg.qr(Y).Q
    del Y, E
    transposed = root if root.ndim == 1 else root.mT

    def weighed(U: Tensor, at: Rows) -> Tensor:
        if note is not None:
            note(U, at)
        return weigh(weigh(U, transposed, at), root, at)

    Y = Phi._fused(weighed, Q)[0]
    T, G = (torch.zeros(Q.shape[1], Q.shape[1], dtype=torch.float64, device=Phi.device) for _ in range(2))
    step = max(1, ENTRIES // Q.shape[1])
    for q, y in zip(Q.split(step), Y.split(step), strict=True):
        T += q.double().T @ y.double()
        G += y.double().T @ y.double()
    t, W = _eigh(0.5 * (T + T.T))
    kept = t > SPOILED * torch.finfo(Phi.dtype).eps * t[-1].clamp_min(0)
    return _Seen(Y, W[:, kept], t[kept], G)


@torch.no_grad()
def rescaled(P: Preconditioner, ratio: Tensor, *, least: float = 0.01) -> Preconditioner:
    """The preconditioner for ``Phi diag(ratio)``, from that for Phi, without a pass over the data.

    Args:
        P: (cols, cols).
        ratio: (cols,), not negative.
        least: As in `sketch`. What was left out for Phi stays out, however large it is now.

    >>> P = Preconditioner(torch.eye(2)[:, :1], torch.tensor([3.0]))
    >>> rescaled(P, torch.tensor([2.0, 1.0])).lam.round()
    tensor([12.])
    """
    if tuple(ratio.shape) != (P.m,):
        raise ValueError(f"P is ({P.m}, {P.m}), so ratio needs shape ({P.m},); got {tuple(ratio.shape)}.")
    Y = ratio[:, None] * P.U
    G = torch.zeros(P.rank, P.rank, dtype=torch.float64, device=Y.device)
    for y in Y.split(max(1, ENTRIES // max(1, P.rank))):
        G += y.double().T @ y.double()
    return _leading(Y, torch.diag(P.lam.double().sqrt()), G, least)


def _leading(Y: Tensor, C: Tensor, G: Tensor, least: float) -> Preconditioner:
    """``I + F F^T`` for ``F = Y C``, with Y (cols, r), C (r, s) and ``G = Y^T Y`` in float64; what matters of it."""
    lam, V = _eigh(C.T @ G @ C)
    lam, V = lam.flip(0), V.flip(1)
    kept = (lam > least) & (lam > torch.finfo(Y.dtype).eps * lam[:1])
    lam = lam[kept]
    U, lam = _orthonormal(Y @ (C @ V[:, kept] / lam.sqrt()).to(Y.dtype), lam)
    return Preconditioner(U, lam.to(U.dtype))
