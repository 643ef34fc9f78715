r"""Weights on the rows of an operator, and symmetric products of rows.

A weight W is diagonal, (rows,), or block-diagonal, (n, c, c): one block for the c rows of each of n examples.
Curvatures of a likelihood come as a root L with ``W = L L^T``, in the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet._common import TEMPORARY

RowIndex = slice | Tensor
"""The rows that a chunk covers: a slice, or a long tensor of row numbers."""

PANEL = 256
"""The narrowest panel of a symmetric product: a narrower panel costs more than the products that it saves."""


def weigh(U: Tensor, weight: Tensor | None, rows: RowIndex | None = None, *, transpose: bool = False) -> Tensor:
    """``W U``, or ``W^T U``, for the chunk ``U`` that covers ``rows`` of an operator.

    Args:
        U: (r, k) or (r,).
        weight: The weight of *all* rows: None, (rows,) or (n, c, c). Blocks are never cut: with an (n, c, c) weight
            the chunk covers whole examples.
        rows: The rows of the chunk; None for all rows.
        transpose: Whether to multiply by the transposed weight.

    >>> weigh(torch.ones(2, 1), torch.tensor([1.0, 2.0, 3.0]), slice(1, 3)).T
    tensor([[2., 3.]])
    """
    if weight is None:
        return U
    W = weight if rows is None else weight[find_examples(rows, weight)]
    if W.ndim == 1:
        return W * U if U.ndim == 1 else W[:, None] * U
    W = W.mT if transpose else W
    # Sizes are written out: where there is no column, torch cannot tell how many examples there are.
    return (W @ U.reshape(len(W), W.shape[-1], 1 if U.ndim == 1 else U.shape[1])).reshape(U.shape)


def find_examples(rows: RowIndex, weight: Tensor) -> RowIndex:
    """The place of the weight of some rows along the first axis of a weight (rows,) or (n, c, c)."""
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


def as_weight(blocks: Tensor) -> Tensor:
    """A weight, or a root, in the form that operators take: (n, c) becomes (n c,), and (n, c, c) stays."""
    return blocks.flatten() if blocks.ndim == 2 else blocks


def weight_from_root(root: Tensor) -> Tensor:
    """``W = L L^T`` in the form that operators take, from L (n c,), (n, c) or (n, c, c).

    >>> weight_from_root(torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """
    root = as_weight(root)
    return root.square() if root.ndim == 1 else root @ root.mT


def inner_matrix(K: Tensor, root: Tensor, *, scale: float = 1.0) -> Tensor:
    """``M = I + scale L^T K L``. The result is the only matrix of that size that is made.

    Args:
        K: (n c, n c).
        root: L, (n c,) or (n, c, c).
        scale: Factor of K.

    >>> inner_matrix(torch.ones(2, 2), torch.tensor([1.0, 2.0]))
    tensor([[2., 2.],
            [2., 5.]])
    """
    if root.ndim == 1:
        M = (K * (scale * root)).mul_(root[:, None])
    else:
        M, (n, c, _) = K.new_empty(K.shape), root.shape
        step = max(1, TEMPORARY // (c * len(K)))
        for start in range(0, n, step):
            rows = slice(c * start, c * min(start + step, n))
            right = torch.einsum("anc,ncd->and", K[rows].reshape(-1, n, c), root).reshape(-1, len(K))
            M[rows] = scale * weigh(right, root, rows, transpose=True)
    M.diagonal().add_(1)
    return M


def add_symmetric_(out: Tensor, A: Tensor, B: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add ``alpha A^T B``, which must be symmetric, to the lower triangle of ``out``; the upper triangle is spoiled.

    Wide panels save up to half of the products: those above the diagonal.

    Args:
        out: (m, m).
        A: (k, m).
        B: (k, m).
        alpha: A factor.

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
