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

import torch
from torch import Tensor

from linnet.linalg.float64 import eigh, find_resolved, inner
from linnet.linalg.operator import LinearOperator, check_weight
from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner
from linnet.linalg.row_weights import ClassBlocks, weigh


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
    check_weight(Phi, root)
    if rank < 1:
        raise ValueError(f"A sketch needs at least one column; got rank={rank!r}.")
    if generator.device != Phi.device:  # where a few thousand columns are drawn in no time
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator = torch.Generator(Phi.device).manual_seed(seed)
    E = torch.randn(Phi.shape[0], min(rank, *Phi.shape), dtype=Phi.dtype, device=Phi.device, generator=generator)
    Y = Phi.T @ weigh(E, root)
    if not bool(torch.isfinite(Y).all()):
        raise ArithmeticError("The products with Phi^T hold NaN or infinity: look at the operator and its weights.")
    Q = torch.linalg.qr(Y).Q
    del Y, E
    Y = Phi._fused(lambda U, at: weigh(weigh(U, root, at, transpose=True), root, at), Q)[0]
    T = inner(Q, Y)
    t, W = eigh(0.5 * (T + T.T))
    kept = find_resolved(t, Phi.dtype)
    return LowRankPreconditioner.from_factor(Y, W[:, kept] / t[kept].sqrt(), least=least)
