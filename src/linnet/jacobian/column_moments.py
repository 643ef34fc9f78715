r"""Means and mean squares of the columns of a Jacobian that comes chunk by chunk.

The squares of a set of rows are squares of distances from the mean of these rows. The mean comes from sums of
distances from one row. Two sets of rows are joined by

.. math::
    \mu = \mu_a + \frac{b}{a + b} (\mu_b - \mu_a), \qquad
    M = M_a + M_b + \frac{a b}{a + b} (\mu_b - \mu_a)^2 ,

for a and b rows with means :math:`\mu` and sums of squares M about the means (Chan, Golub and LeVeque 1983). All terms
are positive, so nothing cancels, however far a mean is from zero. A mean is stored as its distance from the mean of the
first chunk, so that the rounding of a large mean does not matter. All sums are in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from linnet._common import Ranks
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, temporary
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.cuda import triton_kernels

Part = tuple[tuple[int, int], Tensor, Tensor, Tensor]
"""A range of columns, a number near each mean, the distance from this number to the mean, and the sum of squares."""


@final
class Moments:
    """Count, mean, and sum of squares about the mean, of p columns.

    Args:
        p: Number of columns.
        centered: Whether squares are taken about the mean. If not, squares are taken about zero, and means are zero.
        device: Device of the columns.

    >>> found = Moments(2, centered=True, device="cpu")
    >>> found.add([DenseBlock([(0, 1)], [torch.tensor([[[1.0]], [[3.0]]])])], 2)
    >>> found.count, found.mean.tolist(), found.squares.tolist()
    (2, [2.0, 0.0], [2.0, 0.0])
    """

    def __init__(self, p: int, *, centered: bool, device: torch.device | str) -> None:
        self.centered, self.count = centered, 0
        self.near = torch.zeros(p, dtype=torch.float64, device=device)
        self.more, self.squares = torch.zeros_like(self.near), torch.zeros_like(self.near)

    @property
    def mean(self) -> Tensor:
        """Mean of each column, (p,)."""
        return self.near + self.more

    def add(self, blocks: Sequence[ColumnBlock], count: int) -> None:
        """Add the ``count`` rows of a chunk. Columns without a block are zero in this chunk."""
        near, more, squares = (torch.zeros_like(self.near) for _ in range(3))
        for block in blocks:
            done = 0
            for part in _parts(block):
                rows = part.n * part.c
                for r, c, e, s in self._of(part):
                    here = slice(*r)
                    if not done:
                        near[here] = c
                    _merge(more[here], squares[here], done, c - near[here] + e, s, rows)
                done += rows
        if not self.count:
            self.near = near.clone()
        _merge(self.more, self.squares, self.count, near - self.near + more, squares, count)
        self.count += count

    def over_ranks(self, ranks: Ranks) -> None:
        """Join the rows of all ranks."""
        if ranks.world == 1:
            return
        last = ranks.rank == ranks.world - 1  # which always has examples
        near = self.near if last else torch.zeros_like(self.near)
        count = torch.tensor(float(self.count), dtype=torch.float64, device=near.device)
        near, total = near.clone(), count.clone()
        ranks.add_up(near, total)
        own = self.near - near + self.more
        more = own * (count / total)
        ranks.add_up(more)
        self.squares += count * (own - more).square()
        ranks.add_up(self.squares)
        self.near, self.more, self.count = near, more, int(total)

    def _of(self, block: ColumnBlock) -> Iterator[Part]:
        """Moments of all rows of a block, range by range."""
        if isinstance(block, EmbeddingBlock):
            yield self._of_tokens(block)
            return
        rows = block.expand()
        for r, part in zip(rows.ranges, rows.parts, strict=True):
            X = part.detach().reshape(rows.n * rows.c, -1)
            # The first row is as near to the mean as any other row.
            near = X[0] if self.centered else torch.zeros_like(X[0])
            more, squares = column_sums(X, near)
            more = more / len(X) if self.centered else torch.zeros_like(more)
            # A sum of squares below zero is a zero with rounding.
            yield r, near.double(), more, (squares - len(X) * more.square()).clamp_min(0)

    def _of_tokens(self, block: EmbeddingBlock) -> Part:
        """Moments of an embedding table. Most rows of an example are zeros, which are counted, not stored."""
        _, joined, token = block._coalesced()
        joined, rows = joined.detach().double(), block.n * block.c
        table = self.near.new_zeros(block.vocabulary, joined.shape[-1])
        absent = rows - table[:, :1].index_add(0, token, torch.full_like(joined[:, 0, :1], block.c))
        near, more = table, table
        if self.centered:
            near = table.index_add(0, token, joined.sum(1)) / rows
        D = joined - near[token][:, None]
        if self.centered:
            more = (table.index_add(0, token, D.sum(1)) - absent * near) / rows
        squares = table.index_add(0, token, D.square().sum(1)) + absent * near.square() - rows * more.square()
        return block.ranges[0], near.flatten(), more.flatten(), squares.flatten()


def column_sums(X: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows of ``X - center`` and of its squares, each (q,) in float64, for X (m, q) and center (q,).

    >>> column_sums(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0]))
    (tensor([3.], dtype=torch.float64), tensor([9.], dtype=torch.float64))
    """
    if triton_kernels.available(X) and X.stride(1) == 1:
        return triton_kernels.column_sums(X, center)
    sums, squares = (torch.empty(X.shape[1], dtype=torch.float64, device=X.device) for _ in range(2))
    step = max(1, temporary() // len(X))
    for start in range(0, X.shape[1], step):
        s = slice(start, start + step)
        D = X[:, s].double() - center[s].double()
        sums[s], squares[s] = D.sum(0), D.square_().sum(0)
    return sums, squares


def _merge(mean: Tensor, squares: Tensor, count: int, mean_b: Tensor, squares_b: Tensor, more: int) -> None:
    """Add ``more`` rows to ``count`` rows, in place."""
    shift = mean_b - mean
    total = count + more
    mean += shift * (more / total)
    squares += squares_b + shift.square_() * (count * more / total)


def _parts(block: ColumnBlock) -> Iterator[ColumnBlock]:
    """The block in parts of a few examples, so that not all of its rows are in memory at once."""
    step = max(1, temporary() // max(1, block.c * block.q))
    recipe = block.recipe
    if isinstance(block, DenseBlock | EmbeddingBlock) or recipe is None or step >= block.n:
        yield block
        return
    for start in range(0, block.n, step):
        yield recipe([t[start : start + step] for t in block.tensors()])
