"""Blocks made of others: rows that are formed when they are asked for, packed side by side, or added up.

A chunk's Jacobian is a list of blocks over disjoint columns: `combine` makes it so where parameters are used more than
once, `pack` makes it short, and `add_rmatmul` multiplies with all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Range, Recipe
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock

if TYPE_CHECKING:
    from linnet.network import Layout


@final
class PackedBlock(ColumnBlock):
    """Many small `DenseBlock` side by side, so that a product is one call instead of many; for products.

    Args:
        ranges: Where the columns lie.
        rows: (n, c, q), all of them.
    """

    def __init__(self, ranges: Sequence[Range], rows: Tensor) -> None:
        super().__init__(ranges, n=rows.shape[0], c=rows.shape[1])
        self._whole, self._rows = rows, rows.flatten(0, 1)
        self._index = _positions(self.ranges, rows.device)

    @classmethod
    def of(cls, parts: Sequence[DenseBlock]) -> PackedBlock:
        """Rows over disjoint columns, as one."""
        return cls([r for f in parts for r in f.ranges], torch.cat([t for f in parts for t in f.parts], -1))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._whole,)

    def expand(self) -> DenseBlock:
        sizes = [stop - start for start, stop in self.ranges]
        return DenseBlock(self.ranges, self._whole.split(sizes, -1))

    def matmul(self, V: Tensor) -> Tensor:
        return (self._rows @ V[self._index]).view(self.n, self.c, -1)

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        out.view(self.n * self.c, -1).addmm_(self._rows, V.index_select(0, self._index))

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        out.index_add_(0, self._index, self._rows.T @ U.reshape(self.n * self.c, -1))

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        out.index_copy_(0, self._index, self._rows.T @ U.reshape(self.n * self.c, -1))


@lru_cache(maxsize=64)
def _positions(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)


def pack(blocks: Sequence[ColumnBlock], *, small: int = 2048) -> list[ColumnBlock]:
    """The blocks with their small rows (norms, biases) packed into one."""
    few = [f for f in blocks if isinstance(f, DenseBlock) and f.q <= small]
    if len(few) < 4:
        return list(blocks)
    return [*(f for f in blocks if not (isinstance(f, DenseBlock) and f.q <= small)), PackedBlock.of(few)]


@final
class SumBlock(ColumnBlock):
    """Columns to which several uses of the same parameter contribute: the rows add up before any product."""

    def __init__(self, parts: Sequence[ColumnBlock]) -> None:
        super().__init__(parts[0].ranges, n=parts[0].n, c=parts[0].c)
        self.parts = tuple(parts)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    @property
    def recipe(self) -> Recipe | None:
        recipes = tuple((part.recipe, len(part.tensors())) for part in self.parts)
        return None if any(recipe is None for recipe, _ in recipes) else Recipe(_sum_again, (recipes,))

    def widen(self) -> SumBlock:
        return SumBlock([part.widen() for part in self.parts])

    def _converted(self, dtype: torch.dtype) -> SumBlock:
        return SumBlock([part.in_dtype(dtype) for part in self.parts])

    def expand(self) -> DenseBlock:
        rows = [part.expand().parts for part in self.parts]
        return DenseBlock(self.ranges, [sum(column[1:], start=column[0]) for column in zip(*rows, strict=True)])

    def matmul(self, V: Tensor) -> Tensor:
        products = [part.matmul(V) for part in self.parts]
        return sum(products[1:], start=products[0])

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        for part in self.parts:
            part.rmatmul(U, out)


def _sum_again(tensors: Sequence[Tensor], recipes: Sequence[tuple[Recipe, int]]) -> ColumnBlock:
    left = iter(tensors)
    return SumBlock([recipe(list(islice(left, count))) for recipe, count in recipes])


def combine(blocks: Sequence[ColumnBlock]) -> list[ColumnBlock]:
    """One block per range: contributions of tied parameters are put together before any product.

    Several `OuterProductBlock` over the same ranges become one with their uses side by side, and so do uses of an
    embedding table (see `_merge_tables`). Blocks that are unlike become a `SumBlock`. Blocks that share a weight but
    not the bias, or only part of a range, are split or padded first.
    """
    spans = sorted((start, stop, i) for i, f in enumerate(blocks) for start, stop in f.ranges)
    owner = list(range(len(blocks)))  # the first block of the group that each belongs to

    def root(i: int) -> int:
        while owner[i] != i:
            i = owner[i]
        return i

    reach, last = -1, -1
    for start, stop, i in spans:
        if start < reach:
            a, b = sorted((root(last), root(i)))
            owner[b] = a
        if stop > reach:
            reach, last = stop, i
    groups: dict[int, list[ColumnBlock]] = {}
    for i, block in enumerate(blocks):
        groups.setdefault(root(i), []).append(block)
    return [f for group in groups.values() for f in (group if len(group) == 1 else _merge(group))]


def _merge(group: Sequence[ColumnBlock]) -> list[ColumnBlock]:
    """Overlapping blocks as blocks over disjoint ranges."""
    if len({f.ranges for f in group}) == 1:
        outers = [f for f in group if isinstance(f, OuterProductBlock)]
        shapes = {(f.weight, f.bias, f.swapped, f.x.shape[1], f.x.shape[3]) for f in outers}
        if len(outers) == len(group) and len(shapes) == 1:
            x = torch.cat([f.x for f in outers], 2)
            g = torch.cat([f.g for f in outers], 3)
            first = outers[0]
            return [OuterProductBlock(x, g, weight=first.weight, bias=first.bias, swapped=first.swapped)]
        table = _merge_tables(group)
        return [SumBlock(group) if table is None else table]
    if any(isinstance(f, OuterProductBlock) and len(f.ranges) == 2 for f in group):
        split: list[ColumnBlock] = []
        for f in group:
            if isinstance(f, OuterProductBlock) and f.weight is not None and f.bias is not None:
                split.append(OuterProductBlock(f.x, f.g, weight=f.weight, swapped=f.swapped))
                split.append(DenseBlock([f.bias], [f.joined]))
            else:
                split.append(f)
        return combine(split)
    if any(len(f.ranges) > 1 for f in group):
        expanded = [f.expand() for f in group]
        singles = [DenseBlock([r], [part]) for f in expanded for r, part in zip(f.ranges, f.parts, strict=True)]
        return combine(singles)
    start = min(f.ranges[0][0] for f in group)
    stop = max(f.ranges[0][1] for f in group)
    total = None
    for f in group:
        part = f.expand().parts[0]
        total = part.new_zeros(f.n, f.c, stop - start) if total is None else total
        a, b = f.ranges[0]
        total[..., a - start : b - start] += part
    assert total is not None
    return [DenseBlock([(start, stop)], [total])]


def _merge_tables(group: Sequence[ColumnBlock]) -> EmbeddingBlock | None:
    """Uses of an embedding table, also as the weight of a layer of which few outputs count, as one; None if unlike.

    A language model whose last layer is its table of tokens has an output for each token. If the numbers that are
    differentiated read a few of these outputs, the last layer has gradients in a few rows of the table, as tokens have.
    """
    tables = [f for f in group if isinstance(f, EmbeddingBlock)]
    outers = [f for f in group if isinstance(f, OuterProductBlock) and f.x.shape[1] == 1 and not f.swapped]
    if not tables or len(tables) + len(outers) < len(group):
        return None
    ids, g, formed = [f.ids for f in tables], [f.g for f in tables], 0
    for f in outers:
        used = f.g.any(dim=(0, 1, 2, 3)).nonzero()[:, 0]
        T, dg, dx = f.x.shape[2], f.g.shape[-1], f.x.shape[-1]
        if 2 * len(used) > dg or len(used) * dx > T * dg:
            return None
        left, right = f.g[:, :, 0].index_select(3, used).mT, f.x  # (n, c, used, T), (n, 1, T, dx)
        ids.append(used.expand(f.n, -1))
        with torch.autocast(left.device.type, enabled=False):
            g.append(left.to(g[0].dtype) @ right.to(g[0].dtype))
        formed += f.bytes
    return EmbeddingBlock(torch.cat(ids, 1), torch.cat(g, 2), group[0].ranges[0], dropped=False, formed=formed)


def add_rmatmul(blocks: Sequence[ColumnBlock], U: Tensor, out: Tensor, *, first: bool) -> None:
    """Adds ``J^T U`` of all blocks into ``out`` (p, k), or writes it where ``out`` is not yet filled.

    Args:
        blocks: Over disjoint columns.
        U: (n, c, k).
        out: (p, k).
        first: Nothing has been written to ``out``.
    """
    if not first:
        for block in blocks:
            block.rmatmul(U, out)
        return
    covered = sorted(r for block in blocks for r in block.ranges)
    edges = [0, *(edge for r in covered for edge in r), len(out)]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if start < stop:
            out[start:stop].zero_()
    for block in blocks:
        block.write_rmatmul(U, out)


def cut_by_layer(block: ColumnBlock, layout: Layout) -> list[tuple[str, ColumnBlock]]:
    """The block cut into the columns of each layer, by the name of the layer."""
    layers = [_layer_at(r[0], layout) for r in block.ranges]
    if len(set(layers)) == 1:
        return [(layers[0], block)]
    if isinstance(block, OuterProductBlock):
        one = OuterProductBlock(block.x, block.g, weight=block.weight, swapped=block.swapped)
        two = OuterProductBlock(block.x, block.g, weight=None, bias=block.bias)
        return [(layers[0], one), (layers[1], two)]
    rows = block.expand()
    return [(layer, DenseBlock([r], [part])) for layer, r, part in zip(layers, rows.ranges, rows.parts, strict=True)]


def _layer_at(position: int, layout: Layout) -> str:
    for layer, names in layout.layers.items():
        for name in names:
            where = layout.slices[name]
            if where.start <= position < where.stop:
                return layer
    raise AssertionError(position)
