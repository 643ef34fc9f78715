"""Float64 arithmetic for tall blocks of columns, whatever dtype the blocks have."""

from __future__ import annotations

import torch
from torch import Tensor

from linnet._common import TEMPORARY


def inner(A: Tensor, B: Tensor) -> Tensor:
    """``A^T B`` in float64, for A (m, a) and B (m, b).

    >>> inner(torch.ones(3, 1), torch.ones(3, 2))
    tensor([[3., 3.]], dtype=torch.float64)
    """
    step = max(1, TEMPORARY // max(1, A.shape[1] + B.shape[1]))
    if A.device.type == "cpu":
        step = min(step, 4096)  # long sums round more on some processors than on others
    out = torch.zeros(A.shape[1], B.shape[1], dtype=torch.float64, device=A.device)
    for a, b in zip(A.split(step), B.split(step), strict=True):
        out += a.double().T @ b.double()  # addmm_ would go on with one long sum
    return out


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of a symmetric matrix of products with an operator.

    >>> eigh(torch.diag(torch.tensor([1.0, 2.0])))[0]
    tensor([2., 1.])
    """
    if not bool(torch.isfinite(A).all()):
        raise ArithmeticError(
            "The products with the operator hold NaN or infinity. Look at the operator, its weights and its scale: "
            "gradients may be too large, or prior variances."
        )
    values, vectors = torch.linalg.eigh(A)
    return values.flip(0), vectors.flip(1)


def find_resolved(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Which eigenvalues (r,), descending, of a Gram matrix in ``dtype`` are more than rounding.

    >>> find_resolved(torch.tensor([1.0, 1e-3, 1e-7]), torch.float32)
    tensor([ True,  True, False])
    """
    return values > 64 * torch.finfo(dtype).eps * values[:1].clamp_min(0)


def orthonormality(m: int, r: int, dtype: torch.dtype) -> float:
    r"""How far rounding may take an entry of ``U^T U`` from the identity, for U (m, r) made orthonormal in a dtype.

    ``U = X C`` adds up r terms, so that a column of U is off by at most ``(r + 1) u |X|_F |c|``, ``u = eps / 2``. That
    is ``(r + 1)^(3/2) eps`` where the condition of ``X^T X`` is at most 3. An entry of ``U^T U`` is off by twice as
    much, and the eigenvectors behind C are allowed the same again. ``U^T U``, and ``X^T X`` behind C, add up m terms in
    float64, which leaves at most ``m u`` each (Higham 2002, section 3.1), here times the condition. The bounds hold for
    every order of the sums.

    >>> orthonormality(4000, 100, torch.float64) < 3e-12
    True
    """
    return 4 * torch.finfo(dtype).eps * (r + 1) ** 1.5 + 2 * torch.finfo(torch.float64).eps * m
