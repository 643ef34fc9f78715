r"""Cholesky decomposition in place, and solves with the factor.

``A`` (m, m) is symmetric positive definite, and held in memory once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet._common import full_precision

DTYPES = (torch.float32, torch.float64)
BLOCK = 2048
"""Columns of a panel: enough to keep a GPU's matrix units busy, few enough to leave little to triangular solves.

In float64 on an H200, m = 100,000 takes 6.7, 6.1, 6.1 and 6.2 s with 512, 1,024, 2,048 and 4,096.
"""


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
    with full_precision(A.device):
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
    check_right(B, m, L)
    B = B if overwrite else B.clone()
    X = B[:, None] if B.ndim == 1 else B
    starts = range(0, m, BLOCK)
    with full_precision(L.device):
        for start in reversed(starts) if transposed else starts:
            stop = min(start + BLOCK, m)
            part, diagonal = X[start:stop], L[start:stop, start:stop]
            if transposed and stop < m:
                part.addmm_(L[stop:, start:stop].mT, X[stop:], alpha=-1)
            elif not transposed and start:
                part.addmm_(L[start:stop, :start], X[:start], alpha=-1)
            part.copy_(torch.linalg.solve_triangular(diagonal.mT if transposed else diagonal, part, upper=transposed))
    return B


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


def check_right(B: Tensor, m: int, like: Tensor) -> None:
    if B.ndim not in (1, 2) or B.shape[0] != m:
        raise ValueError(f"A right-hand side ({m},) or ({m}, k) is needed; got {tuple(B.shape)}.")
    if B.dtype not in DTYPES or B.dtype != like.dtype or B.device != like.device:
        raise TypeError(
            f"A right-hand side of float32 or float64 that matches {like.dtype} on {like.device} is needed; got "
            f"{B.dtype} on {B.device}."
        )
