"""Factors made of others: rows that are formed when they are asked for, packed side by side, or added up.

A chunk's Jacobian is a list of factors over disjoint columns: `combine` makes it so where parameters are used more than
once, `pack` makes it short, and `add_rmatmul` multiplies with all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import final

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import Factor, Range, Recipe, Rows, Size
from linnet.jacobian.blocks.outer_product import Outer
from linnet.network.parameters import Layout


@final
class Lazy(Factor):
    """Columns whose rows come from a function, formed when they are first asked for (convolutions).

    Args:
        ranges: Where the columns lie.
        rows: Gives one (n, c, q) tensor per range.
        outer: Gives the same columns as an `Outer` (patches), or None where there is none.
        size: The numbers of that outer product.
        held: The tensors that the functions hold on to: the input and the gradient that the rule was given.
        products: Gives the form that is best for products where it is neither rows nor an outer product, else None.
        few: Gives the form that is best for products with few columns, in place of the outer product.
        last: The axes of what is held that such products are faster with as the last ones in memory.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        rows: Callable[[], Sequence[Tensor]],
        *,
        n: int,
        c: int,
        size: Size,
        held: tuple[Tensor, ...],
        outer: Callable[[], Outer] | None = None,
        products: Callable[[], Factor | None] | None = None,
        few: Callable[[], Factor] | None = None,
        last: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(ranges, n=n, c=c)
        self._rows, self._outer, self._size, self._held = rows, outer, size, held
        self._products, self._few, self.last = products, few, last
        self.again: Recipe | None = None

    @property
    def size(self) -> Size:
        return self._size

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held

    @property
    def recipe(self) -> Recipe | None:
        return self.again

    def expand(self) -> Rows:
        return Rows(self.ranges, self._rows())

    def for_products(self) -> Factor:
        """Rows, in the order that is cheapest to write."""
        found = None if self._products is None else self._products()
        return self.expand() if found is None else found

    def factored(self) -> Factor:
        """The outer-product form where there is one."""
        return self if self._outer is None else self._outer()

    def for_few(self) -> Factor:
        """What multiplies few columns without rows: the outer product, unless there is a better form."""
        return self.factored() if self._few is None else self._few()


@final
class Taps(Factor):
    """Rows of a convolution with the channels last, which is cheaper to write; for products.

    Args:
        weight: Range of the weight, laid out as (out, channels, taps).
        rows: (n c, out, taps, channels).
        n: Examples.
        bias: Range of the bias and its rows (n, c, out), or None.
    """

    def __init__(self, weight: Range, rows: Tensor, *, n: int, bias: tuple[Range, Tensor] | None = None) -> None:
        self._others = [] if bias is None else [Rows([bias[0]], [bias[1]])]
        ranges = [weight, *(r for f in self._others for r in f.ranges)]
        super().__init__(ranges, n=n, c=rows.shape[0] // n)
        self._weight, self._rows = weight, rows

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._rows, *(t for f in self._others for t in f.tensors()))

    def expand(self) -> Rows:
        rows = self._rows.transpose(2, 3).reshape(self.n, self.c, -1)
        return Rows(self.ranges, [rows, *(t for f in self._others for t in f.tensors())])

    def _columns(self, V: Tensor) -> Tensor:
        """The weight's part of V (p, k) with the channels after the taps, as a view."""
        out, taps, channels = self._rows.shape[1:]
        return V[slice(*self._weight)].view(out, channels, taps, -1).transpose(1, 2)

    def matmul(self, V: Tensor) -> Tensor:
        total = self._rows.flatten(1) @ self._columns(V).reshape(-1, V.shape[1])
        return sum((f.matmul(V) for f in self._others), start=total.view(self.n, self.c, -1))

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        columns = self._columns(out)
        columns += (self._rows.flatten(1).T @ U.reshape(self.n * self.c, -1)).view(columns.shape)
        for f in self._others:
            f.rmatmul(U, out)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        columns = self._columns(out)
        columns.copy_((self._rows.flatten(1).T @ U.reshape(self.n * self.c, -1)).view(columns.shape))
        for f in self._others:
            f.write_rmatmul(U, out)


@final
class Packed(Factor):
    """Many small `Rows` side by side, so that a product is one call instead of many; for products.

    Args:
        ranges: Where the columns lie.
        rows: (n, c, q), all of them.
    """

    def __init__(self, ranges: Sequence[Range], rows: Tensor) -> None:
        super().__init__(ranges, n=rows.shape[0], c=rows.shape[1])
        self._whole, self._rows = rows, rows.flatten(0, 1)
        self._index = _positions(self.ranges, rows.device)

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> Packed:
        """Rows over disjoint columns, as one."""
        return cls([r for f in parts for r in f.ranges], torch.cat([t for f in parts for t in f.parts], -1))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._whole,)

    def expand(self) -> Rows:
        sizes = [stop - start for start, stop in self.ranges]
        return Rows(self.ranges, self._whole.split(sizes, -1))

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


def pack(factors: Sequence[Factor], *, small: int = 2048) -> list[Factor]:
    """The factors with their small rows (norms, biases) packed into one."""
    few = [f for f in factors if isinstance(f, Rows) and f.q <= small]
    if len(few) < 4:
        return list(factors)
    return [*(f for f in factors if not (isinstance(f, Rows) and f.q <= small)), Packed.of(few)]


@final
class Sum(Factor):
    """Columns to which several uses of the same parameter contribute: the rows add up before any product."""

    def __init__(self, parts: Sequence[Factor]) -> None:
        super().__init__(parts[0].ranges, n=parts[0].n, c=parts[0].c)
        self.parts = tuple(parts)

    @property
    def size(self) -> Size:
        return Size(self.q)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    @property
    def recipe(self) -> Recipe | None:
        recipes = tuple((part.recipe, len(part.tensors())) for part in self.parts)
        return None if any(recipe is None for recipe, _ in recipes) else Recipe(_sum_again, (recipes,))

    def expand(self) -> Rows:
        rows = [part.expand().parts for part in self.parts]
        return Rows(self.ranges, [sum(column[1:], start=column[0]) for column in zip(*rows, strict=True)])

    def matmul(self, V: Tensor) -> Tensor:
        products = [part.matmul(V) for part in self.parts]
        return sum(products[1:], start=products[0])

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        for part in self.parts:
            part.rmatmul(U, out)


def _sum_again(tensors: Sequence[Tensor], recipes: Sequence[tuple[Recipe, int]]) -> Factor:
    left = iter(tensors)
    return Sum([recipe(list(islice(left, count))) for recipe, count in recipes])


def combine(factors: Sequence[Factor]) -> list[Factor]:
    """One factor per range: contributions of tied parameters are put together before any product.

    Several `Outer` over the same ranges become one with their uses side by side; unlike ones become a `Sum`.
    Factors that share a weight but not the bias, or only part of a range, are split or padded first.
    """
    spans = sorted((start, stop, i) for i, f in enumerate(factors) for start, stop in f.ranges)
    owner = list(range(len(factors)))  # the first factor of the group that each belongs to

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
    groups: dict[int, list[Factor]] = {}
    for i, factor in enumerate(factors):
        groups.setdefault(root(i), []).append(factor)
    return [f for group in groups.values() for f in (group if len(group) == 1 else _merge(group))]


def _merge(group: Sequence[Factor]) -> list[Factor]:
    """Overlapping factors as factors over disjoint ranges."""
    if len({f.ranges for f in group}) == 1:
        outers = [f for f in group if isinstance(f, Outer)]
        shapes = {(f.weight, f.bias, f.swapped, f.x.shape[1], f.x.shape[3]) for f in outers}
        if len(outers) == len(group) and len(shapes) == 1:
            x = torch.cat([f.x for f in outers], 2)
            g = torch.cat([f.g for f in outers], 3)
            first = outers[0]
            return [Outer(x, g, weight=first.weight, bias=first.bias, swapped=first.swapped)]
        return [Sum(group)]
    if any(isinstance(f, Outer) and len(f.ranges) == 2 for f in group):
        split: list[Factor] = []
        for f in group:
            if isinstance(f, Outer) and f.weight is not None and f.bias is not None:
                split.append(Outer(f.x, f.g, weight=f.weight, swapped=f.swapped))
                split.append(Rows([f.bias], [f.joined]))
            else:
                split.append(f)
        return combine(split)
    if any(len(f.ranges) > 1 for f in group):
        expanded = [f.expand() for f in group]
        singles = [Rows([r], [part]) for f in expanded for r, part in zip(f.ranges, f.parts, strict=True)]
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
    return [Rows([(start, stop)], [total])]


def add_rmatmul(factors: Sequence[Factor], U: Tensor, out: Tensor, *, first: bool) -> None:
    """Adds ``J^T U`` of all factors into ``out`` (p, k), or writes it where ``out`` is not yet filled.

    Args:
        factors: Over disjoint columns.
        U: (n, c, k).
        out: (p, k).
        first: Nothing has been written to ``out``.
    """
    if not first:
        for factor in factors:
            factor.rmatmul(U, out)
        return
    covered = sorted(r for factor in factors for r in factor.ranges)
    edges = [0, *(edge for r in covered for edge in r), len(out)]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if start < stop:
            out[start:stop].zero_()
    for factor in factors:
        factor.write_rmatmul(U, out)


def cut_by_layer(factor: Factor, layout: Layout) -> list[tuple[str, Factor]]:
    """The factor cut into the columns of each layer, by the name of the layer."""
    layers = [_layer_at(r[0], layout) for r in factor.ranges]
    if len(set(layers)) == 1:
        return [(layers[0], factor)]
    if isinstance(factor, Outer):
        one = Outer(factor.x, factor.g, weight=factor.weight, swapped=factor.swapped)
        two = Outer(factor.x, factor.g, weight=None, bias=factor.bias)
        return [(layers[0], one), (layers[1], two)]
    rows = factor.expand()
    return [(layer, Rows([r], [part])) for layer, r, part in zip(layers, rows.ranges, rows.parts, strict=True)]


def _layer_at(position: int, layout: Layout) -> str:
    for layer, names in layout.layers.items():
        for name in names:
            where = layout.slices[name]
            if where.start <= position < where.stop:
                return layer
    raise AssertionError(position)
