"""Columns of the Jacobian that belong to an embedding table: most rows of the table are zero for most examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Range, Recipe, Scale, Size, as_tf32, ghost, pieces


@final
class EmbeddingBlock(ColumnBlock):
    r"""An embedding table's columns: :math:`G_{iu} = \sum_t e_{\mathrm{id}_{it}} g_{iut}^\top`.

    Args:
        ids: (n, T) row numbers of the table; -1 where the gradient is to be dropped (padding).
        g: (n, c, T, d).
        table: Range of the table, laid out as (rows, d).
        dropped: Whether there may be such ids; else nothing is looked at, which a GPU would be waited for.
        formed: Bytes of what the block was formed from, which was there for a moment.
    """

    def __init__(self, ids: Tensor, g: Tensor, table: Range, *, dropped: bool = True, formed: int = 0) -> None:
        super().__init__([table], n=g.shape[0], c=g.shape[1])
        self.formed = formed
        kept = ids >= 0 if dropped else None
        self.ids = ids if kept is None else ids.clamp(min=0)
        # On a GPU the question whether all are kept would wait for the answer.
        self.g = g if kept is None or (g.is_cpu and bool(kept.all())) else g * kept[:, None, :, None]
        self.vocabulary = (table[1] - table[0]) // g.shape[-1]

    @property
    def size(self) -> Size:
        return Size(self.q, self.ids.shape[1], 1, self.g.shape[-1])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.g

    @property
    def recipe(self) -> Recipe:
        return Recipe(_tokens_again, self.ranges)

    def _converted(self, dtype: torch.dtype) -> EmbeddingBlock:
        return EmbeddingBlock(self.ids, self.g.to(dtype), self.ranges[0], dropped=False)

    def rounded(self) -> EmbeddingBlock:
        return EmbeddingBlock(self.ids, as_tf32(self.g), self.ranges[0], dropped=False)

    def _view(self, flat: Tensor) -> Tensor:
        start, stop = self.ranges[0]
        return flat[start:stop].view(self.vocabulary, -1)

    def expand(self) -> DenseBlock:
        d = self.g.shape[-1]
        rows = self.g.new_zeros(self.n, self.c, self.vocabulary, d)
        index = self.ids[:, None, :, None].expand_as(self.g)
        return DenseBlock(self.ranges, [rows.scatter_add_(2, index, self.g).flatten(2)])

    def matmul(self, V: Tensor) -> Tensor:
        k, table = V.shape[1], self._view(V)
        out = V.new_empty(self.n, self.c, k)
        for s in pieces(self.n, self.g[0, 0].numel() * k):
            out[s] = self.g[s].flatten(2) @ table[self.ids[s]].view(self.ids[s].shape[0], -1, k)
        return out

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        k, table = U.shape[2], self._view(out)
        for s in pieces(self.n, self.g[0, 0].numel() * k):
            h = self.g[s].flatten(2).mT @ U[s]
            table.index_add_(0, self.ids[s].flatten(), h.view(-1, self.g.shape[-1] * k))

    def gram(self, other: ColumnBlock, scale: Scale, out: Tensor) -> None:
        constant = scale.constant(self.ranges[0])
        if not isinstance(other, EmbeddingBlock) or constant is None:
            return self.expand().gram(other.expand(), scale, out)
        mine, theirs = self.ids, other.ids

        def inner(a: slice, b: slice, j: int) -> Tensor:
            same = mine[a][:, :, None, None] == theirs[b][None, None]
            return same.to(self.g.dtype) * constant

        ghost(self.g[:, :, None], other.g[:, :, None], inner, out)

    def diag(self, scale: Scale) -> Tensor:
        example, joined, token = self._coalesced()
        squared = joined.square()
        if scale.vector is not None:
            squared = squared * self._view(scale.vector)[token][:, None]
        return squared.new_zeros(self.n, self.c).index_add_(0, example, squared.sum(-1))

    def gram_blocks(self, scale: Scale) -> Tensor:
        example, joined, token = self._coalesced()
        left = joined if scale.vector is None else joined * self._view(scale.vector)[token][:, None]
        return joined.new_zeros(self.n, self.c, self.c).index_add_(0, example, left @ joined.mT)

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per (example, token) pair that occurs: the example, the summed gradient (c, d), the token."""
        keys = self.ids + self.vocabulary * torch.arange(self.n, device=self.ids.device)[:, None]
        pairs, inverse = keys.flatten().unique(return_inverse=True)
        g = self.g.transpose(1, 2).flatten(0, 1)  # (n T, c, d)
        joined = g.new_zeros(len(pairs), *g.shape[1:]).index_add_(0, inverse, g)
        return pairs // self.vocabulary, joined, pairs % self.vocabulary

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        example, joined, token = self._coalesced()
        if weight is None:
            weighted = joined
        elif weight.ndim == 2:
            weighted = weight[example][..., None] * joined
        else:
            weighted = weight[example] @ joined
        self._view(out).index_add_(0, token, (weighted * joined).sum(1))


def _tokens_again(tensors: Sequence[Tensor], table: Range) -> ColumnBlock:
    ids, g = tensors
    return EmbeddingBlock(ids, g, table, dropped=False)
