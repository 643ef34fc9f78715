"""Weights on the rows of an operator, and symmetric products of rows."""

from __future__ import annotations

from torch import Tensor

Rows = slice | Tensor
"""The rows a chunk covers: a slice, or a long tensor of row numbers."""


def weigh(U: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
    """``W U`` for the chunk ``U`` (r, k) that covers ``rows`` of an operator.

    Args:
        U: (r, k).
        weight: The weight of *all* rows: None, (rows,) or (n, c, c). Blocks are never cut: with an (n, c, c)
            weight the chunk covers whole examples.
        rows: The rows of the chunk.

    >>> import torch
    >>> weigh(torch.ones(2, 1), torch.tensor([1.0, 2.0, 3.0]), slice(1, 3)).T
    tensor([[2., 3.]])
    """
    if weight is None:
        return U
    if weight.ndim == 1:
        return weight[rows][:, None] * U
    blocks = examples(rows, weight)
    return (weight[blocks] @ U.reshape(-1, weight.shape[-1], U.shape[1])).reshape(U.shape)


PANEL = 256
"""The narrowest panel of a symmetric product: narrower ones cost more than what they leave out."""


def add_symmetric_(out: Tensor, A: Tensor, B: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add ``alpha A^T B``, which must be symmetric, to the lower triangle of ``out``; what is above is not to be used.

    Wide panels save up to half of the products, which they leave out above the diagonal.

    Args:
        out: (m, m).
        A: (k, m).
        B: (k, m).
        alpha: A factor.

    >>> import torch
    >>> A = torch.tensor([[1.0, 2.0]])
    >>> add_symmetric_(torch.zeros(2, 2), A, A).tril()
    tensor([[1., 0.],
            [2., 4.]])
    """
    m = len(out)
    step = max(PANEL, -(-m // 8))
    for start in range(0, m, step):
        out[start:, start : start + step].addmm_(A[:, start:].T, B[:, start : start + step], alpha=alpha)
    return out


def examples(rows: Rows, weight: Tensor) -> Rows:
    """Where the weight of some rows lies along the first axis of a weight (rows,) or (n, c, c)."""
    if weight.ndim == 1:
        return rows
    c = weight.shape[-1]
    if not isinstance(rows, slice):
        return rows[::c] // c
    if rows.start % c or rows.stop % c:
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} belongs to blocks of {c} rows, and a chunk of rows "
            f"{rows.start} to {rows.stop} cuts through one. Stack operators whose rows come in blocks of {c}."
        )
    return slice(rows.start // c, rows.stop // c)
