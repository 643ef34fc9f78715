r"""Cholesky factors of a matrix without some rows, and of a matrix less a few outer products.

Both take a product with an orthogonal matrix for each panel of columns, about :math:`4 m^2 k` multiply-adds for k rows
or outer products, and no decomposition of the whole matrix. Orthogonal matrices do not enlarge rounding errors. The
first is a sum and loses no digits. The second is a difference, and raises where too few digits would be left.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from linnet._common import full_precision
from linnet.linalg.cholesky import solve_lower

PANEL = 32
"""Columns of a panel at least: fewer take more calls, more take more multiply-adds."""


@torch.no_grad()
def remove_rows(L: Tensor, kept: Tensor) -> Tensor:
    r"""The lower Cholesky factor of ``A[kept][:, kept]``, from the factor L of A.

    With the columns of L split in kept and removed ones,

    .. math:: A_{kk} = L_{kk} L_{kk}^\top + L_{kr} L_{kr}^\top

    Args:
        L: (m, m), lower triangular; entries above the diagonal are not read.
        kept: (k,), row numbers in rising order.

    >>> A = torch.tensor([[4.0, 2.0, 2.0], [2.0, 5.0, 1.0], [2.0, 1.0, 5.0]])
    >>> remove_rows(torch.linalg.cholesky(A), torch.tensor([1, 2]))
    tensor([[2.2361, 0.0000],
            [0.4472, 2.1909]])
    """
    kept = kept.to(L.device)
    out = torch.ones(len(L), dtype=torch.bool, device=L.device)
    out[kept] = False
    gone = out.nonzero()[:, 0]
    factor = _take_lower(L, gone)
    if len(gone) == 0 or len(kept) == 0:
        return factor
    beside = torch.where(kept[:, None] > gone, L[kept[:, None], gone], 0.0)
    _add_outer_products_(factor, beside, int((kept < gone[0]).sum()))
    return factor


def _take_lower(L: Tensor, gone: Tensor) -> Tensor:
    """The lower triangle of L without some rows and columns: copies of whole blocks between them, which are fast."""
    ends = [-1, *gone.tolist(), len(L)]
    # From each stretch of rows that stay its first and last row in L, and its first row in the result.
    stretches = [(a + 1, b, a + 1 - i) for i, (a, b) in enumerate(pairwise(ends)) if a + 1 < b]
    out = L.new_zeros(len(L) - len(gone), len(L) - len(gone))
    for i, (start, stop, to) in enumerate(stretches):
        rows = slice(to, to + stop - start)
        for left, right, at in stretches[:i]:
            out[rows, at : at + right - left] = L[start:stop, left:right]
        out[rows, rows] = L[start:stop, start:stop].tril()
    return out


def _add_outer_products_(L: Tensor, X: Tensor, first: int) -> None:
    """Overwrite L by the factor of ``L L^T + X X^T``; the rows of X before ``first`` are zero, and X is spoiled."""
    m, k = X.shape
    step = max(PANEL, k)
    with full_precision(L.device):
        for start in range(first, m, step):
            stop = min(start + step, m)
            b = stop - start
            both = torch.cat([L[start:, start:stop], X[start:]], 1)
            Q, R = torch.linalg.qr(both[:b].mT, mode="complete")
            both = both @ Q
            L[start:, start:stop] = both[:, :b] * _signs(R.diagonal())
            L[start:stop, start:stop].tril_()
            X[start:] = both[:, b:]


@torch.no_grad()
def subtract_outer_products(L: Tensor, X: Tensor) -> tuple[Tensor, float]:
    r"""The lower Cholesky factor of ``L L^T - X X^T``, and the smallest eigenvalue of :math:`I - Z^\top Z`.

    With :math:`Z = L^{-1} X` the difference is :math:`L (I - Z Z^\top) L^\top`. The smallest eigenvalue of
    :math:`I - Z^\top Z`, from zero to one, is the share of the matrix that is left where the most is taken away:
    rounding errors grow by one over it.

    Args:
        L: (m, m), lower triangular; entries above the diagonal are not read.
        X: (m, k).

    Raises:
        ArithmeticError: The difference is not positive definite, or half of the digits would be lost.

    >>> L, left = subtract_outer_products(torch.eye(2).double() * 2, torch.tensor([[1.0], [1.0]]).double())
    >>> (L @ L.T).round(decimals=6).tolist(), round(left, 6)
    ([[3.0, -1.0], [-1.0, 3.0]], 0.5)
    """
    m, k = X.shape
    L = L.tril()
    if k == 0 or m == 0:
        return L, 1.0
    Z, eps = solve_lower(L, X), torch.finfo(L.dtype).eps
    values, V = torch.linalg.eigh(torch.eye(k, dtype=L.dtype, device=L.device) - Z.mT @ Z)
    left = float(values[0])
    if not left > eps**0.5:
        raise ArithmeticError(
            f"What is to be taken away leaves {max(left, 0.0):.1g} of a posterior precision, and "
            f"{str(L.dtype).removeprefix('torch.')} needs {eps**0.5:.1g} of it for half of the digits to be right."
        )
    D = values.sqrt()[:, None] * V.mT  # [D; Z] has orthonormal columns
    E, step = torch.zeros_like(X), max(PANEL, k)
    with full_precision(L.device):
        for start in reversed(range(0, m, step)):
            stop = min(start + step, m)
            # Columns of [E, L] are turned until the rows of Z are zero: E E^T is then X X^T.
            Q, R = torch.linalg.qr(torch.cat([D, Z[start:stop]]), mode="complete")
            D = R[:k]
            both = torch.cat([E[start:], L[start:, start:stop]], 1) @ Q
            E[start:] = both[:, :k]
            panel = both[:, k:]
            Q, R = torch.linalg.qr(panel[: stop - start].mT)
            L[start:, start:stop] = (panel @ Q) * _signs(R.diagonal())
            L[start:stop, start:stop].tril_()
    return L, left


def _signs(x: Tensor) -> Tensor:
    """1 or -1 for each number."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)
