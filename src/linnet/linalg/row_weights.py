r"""Weights on the rows of an operator, and symmetric products of rows.

A weight W is diagonal, (rows,), or block-diagonal, (n, c, c): one block for the c rows of each of n examples.
Curvatures of a likelihood come as a root L with ``W = L L^T``, in the same form. Blocks of many classes are
`ClassBlocks`: products by a formula, in place of (n, c, c) numbers.
"""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor

from linnet._common import TEMPORARY

RowIndex = slice | Tensor
"""The rows that a chunk covers: a slice, or a long tensor of row numbers."""

PANEL = 256
"""The narrowest panel of a symmetric product: a narrower panel costs more than the products that it saves."""


@final
class ClassBlocks:
    r"""Blocks of class probabilities, (n, c, c), that are never formed: the curvature of softmax, or a root of it.

    .. math:: W = w^2 (\mathrm{diag}(\pi) - \pi \pi^\top), \qquad
              L = w (\mathrm{diag}(\sqrt\pi) - \pi \sqrt\pi^\top), \qquad W = L L^\top

    Rows of L and W add up to zero in W and columns in both, so that products are made of differences to the most
    probable class: nothing cancels, however close to one a probability is.

    Args:
        pi: (n, c).
        form: Whether the blocks are W, L or the transposed L.
        w: (n,), one factor for each block; None for ones.

    Example:
        >>> W = ClassBlocks(torch.tensor([[0.5, 0.5]]), "curvature")
        >>> weigh(torch.tensor([1.0, 0.0]), W), W.dense()
        (tensor([ 0.2500, -0.2500]), tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]]))
    """

    ndim = 3

    def __init__(
        self, pi: Tensor, form: Literal["curvature", "root", "transposed"] = "root", w: Tensor | None = None
    ) -> None:
        self.pi, self.form, self.w = pi, form, w
        self.dtype, self.device = pi.dtype, pi.device

    @property
    def shape(self) -> tuple[int, int, int]:
        n, c = self.pi.shape
        return n, c, c

    def __len__(self) -> int:
        return len(self.pi)

    def __getitem__(self, index: RowIndex) -> ClassBlocks:
        return ClassBlocks(self.pi[index], self.form, None if self.w is None else self.w[index])

    def __mul__(self, factor: float | Tensor) -> ClassBlocks:
        """A root times one number, or times one number for each block, (n,)."""
        w = self.pi.new_ones(len(self)) if self.w is None else self.w
        return ClassBlocks(self.pi, self.form, w * factor)

    @property
    def mT(self) -> ClassBlocks:
        other = {"curvature": "curvature", "root": "transposed", "transposed": "root"}
        return ClassBlocks(self.pi, other[self.form], self.w)  # type: ignore[arg-type]

    def as_form(self, form: Literal["curvature", "root"]) -> ClassBlocks:
        """W of the same root, or the root of the same W."""
        return ClassBlocks(self.pi, form, self.w)

    def double(self) -> ClassBlocks:
        return ClassBlocks(self.pi.double(), self.form, None if self.w is None else self.w.double())

    def multiply(self, U: Tensor) -> Tensor:
        """The blocks times U (n, c, k)."""
        pi, s = self.pi[..., None], self.pi.sqrt()[..., None]
        most = self.pi.argmax(1)[:, None, None]
        if self.form == "root":
            out = s * U
            out = out - pi * out.sum(1, keepdim=True)
            # Columns of L add up to zero: the row of the most probable class is what the others leave.
            place = most.expand(-1, 1, U.shape[2])
            out = out.scatter(1, place, 0.0)
            out = out.scatter(1, place, -out.sum(1, keepdim=True))
        else:
            V = U - U.gather(1, most.expand(-1, 1, U.shape[2]))
            out = (pi if self.form == "curvature" else s) * (V - (pi * V).sum(1, keepdim=True))
        if self.w is None:
            return out
        return out * (self.w.square() if self.form == "curvature" else self.w)[:, None, None]

    def sizes(self) -> Tensor:
        """The trace of W of each block, (n,), which is the sum of the squares of L."""
        most = self.pi.argmax(1, keepdim=True)
        others = self.pi.scatter(1, most, 0.0).sum(1, keepdim=True)  # 1 - pi, without cancellation
        found = (self.pi * (1 - self.pi).scatter(1, most, others)).sum(1)
        return found if self.w is None else found * self.w.square()

    def dense(self) -> Tensor:
        """The blocks, (n, c, c)."""
        n, c = self.pi.shape
        return self.multiply(torch.eye(c, dtype=self.dtype, device=self.device).expand(n, c, c))


def square_sums(root: Tensor | ClassBlocks, n: int) -> Tensor:
    """The sum of the squares of L of each of n examples, (n,)."""
    squares = root.sizes() if isinstance(root, ClassBlocks) else root.square()
    return squares.reshape(n, -1).sum(1)


def blocks_of_chunk(weight: Any, start: int, stop: int, c: int) -> Tensor:
    """A weight, or a root, of examples start to stop with c rows each: (m, c) or (m, c, c)."""
    if not isinstance(weight, ClassBlocks):
        return (weight.view(-1, c) if weight.ndim == 1 else weight)[start:stop]
    sites = c // weight.shape[1]
    parts = weight[slice(start * sites, stop * sites)].dense()
    if sites == 1:
        return parts
    m, d = stop - start, weight.shape[1]
    out = parts.new_zeros(m, sites, d, sites, d)
    at = torch.arange(sites, device=parts.device)
    out[:, at, :, at, :] = parts.view(m, sites, d, d).movedim(1, 0)
    return out.view(m, c, c)


def weigh(U: Tensor, weight: Any, rows: RowIndex | None = None, *, transpose: bool = False) -> Tensor:
    """``W U``, or ``W^T U``, for the chunk ``U`` that covers ``rows`` of an operator.

    Args:
        U: (r, k) or (r,).
        weight: The weight of *all* rows: None, (rows,), (n, c, c) or `ClassBlocks`. Blocks are never cut: with an
            (n, c, c) weight the chunk covers whole examples.
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
    columns = U.reshape(len(W), W.shape[-1], 1 if U.ndim == 1 else U.shape[1])
    return (W.multiply(columns) if isinstance(W, ClassBlocks) else W @ columns).reshape(U.shape)


def find_examples(rows: RowIndex, weight: Tensor | ClassBlocks) -> RowIndex:
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


def as_weight(blocks: Any) -> Any:
    """A weight, or a root, in the form that operators take: (n, c) becomes (n c,), and (n, c, c) stays."""
    return blocks.flatten() if blocks.ndim == 2 else blocks


def weight_from_root(root: Any) -> Any:
    """``W = L L^T`` in the form that operators take, from L (n c,), (n, c) or (n, c, c).

    >>> weight_from_root(torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """
    if isinstance(root, ClassBlocks):
        return root.as_form("curvature")
    root = as_weight(root)
    return root.square() if root.ndim == 1 else root @ root.mT


def inner_matrix(K: Tensor, root: Any, *, scale: float = 1.0) -> Tensor:
    """``M = I + scale L^T K L``. The result is the only matrix of that size that is made.

    Args:
        K: (n c, n c).
        root: L, (n c,), (n, c, c) or `ClassBlocks`.
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
            if isinstance(root, ClassBlocks):
                right = weigh(K[rows].T, root, transpose=True).T  # (L^T K)^T, of a symmetric K
            else:
                right = torch.einsum("anc,ncd->and", K[rows].reshape(-1, n, c), root).reshape(-1, len(K))
            M[rows] = scale * weigh(right, root, rows, transpose=True)
    M.diagonal().add_(1)
    return M


def mirror_(out: Tensor) -> Tensor:
    """Copy the lower triangle of a square matrix into the upper one, panel by panel: there is no second matrix.

    >>> mirror_(torch.tensor([[1.0, 9.0], [2.0, 3.0]]))
    tensor([[1., 2.],
            [2., 3.]])
    """
    for start in range(0, len(out), PANEL):
        stop = start + PANEL
        corner = out[start:stop, start:stop].tril_()
        corner += corner.tril(-1).T
        out[start:stop, stop:] = out[stop:, start:stop].T
    return out


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
