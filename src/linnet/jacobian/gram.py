"""Gram matrices and norms of Jacobians, by passes over the data: functions that `linnet.Jacobian` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet._common import add_up, find_budget, rank_and_world, share_rows, show_progress
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Scale
from linnet.jacobian.blocks.composite import cut_by_layer
from linnet.jacobian.column_moments import Moments
from linnet.jacobian.kronecker import Kronecker
from linnet.jacobian.passes import GRAM, Piece
from linnet.jacobian.plan import prepare
from linnet.linalg import ClassBlocks, blocks_of_chunk, weigh
from linnet.network import check_same_shapes

if TYPE_CHECKING:
    from linnet.jacobian.jacobian import Jacobian

Cut = Callable[[ColumnBlock], list[tuple[str, ColumnBlock]]]
"""A block to its named parts."""

Placed = tuple[slice, Piece]
"""A chunk with its rows."""


def compute_gram(J: Jacobian, other: Jacobian | None, scale: Tensor | None) -> Tensor:
    """``J diag(scale) J'^T``, (n c, m c'); J' is J itself where no other is given."""
    return _compute_grams(J, other, _diagonal(scale), [""], lambda block: [("", block)])[""]


def compute_layer_grams(J: Jacobian) -> dict[str, Tensor]:
    """Layer name to its part of ``J J^T``, (n c, n c)."""
    layout = J.lin.layout
    return _compute_grams(J, None, Scale(), list(layout.layers), lambda block: cut_by_layer(block, layout))


def compute_stacked_gram(all_: Sequence[Jacobian], scale: Tensor | None) -> Tensor | None:
    """The Gram matrix of Jacobians one above the other; None where they do not go together."""
    first, *others = all_
    alike = all(J.passes.settings.precision == first.passes.settings.precision for J in others)
    if not alike or rank_and_world()[1] > 1:
        return None
    for J in others:
        _check_same_columns(first, J)
    return _symmetric(all_, _diagonal(scale), [""], lambda block: [("", block)])[""]


def compute_gram_normal(J: Jacobian, other: Jacobian, weight: Tensor | None, scale: Tensor | None) -> Tensor:
    """``K^T W K`` for the Gram matrix K of J with another Jacobian, (m c', m c')."""
    _check_same_columns(J, other)
    diagonal, m = _diagonal(scale), other.shape[0]

    def run() -> Tensor:
        # Added up in float64: the sum over all rows is what conditions what is made of it.
        out = torch.zeros(m, m, dtype=torch.float64, device=J.device)
        held = list(other.passes.pieces("gram", 1, "", start=0, stop=other.n))
        for a in J.passes.pieces("gram", 1, "K^T W K"):
            K = torch.zeros(a.batch.n * J.c, m, dtype=J.dtype, device=J.device)
            for b in held:
                for _, x, y in _matched(a.blocks, b.blocks, lambda block: [("", block)]):
                    x.gram(y, diagonal, K[:, b.rows])
            out += (K.T @ weigh(K, weight, a.rows)).double()
        add_up(out)
        return out.to(J.dtype)

    return J.passes.complete(run, other.passes)


def compute_gram_diagonal(J: Jacobian, scale: Tensor | None) -> Tensor:
    """The diagonal of ``J diag(scale) J^T``, (n c,)."""
    diagonal = _diagonal(scale)

    def run() -> Tensor:
        out = torch.zeros(J.shape[0], dtype=J.dtype, device=J.device)
        for piece in J.passes.pieces("diag", 1, "diag J J^T"):
            for block in piece.blocks:
                out[piece.rows] += block.diag(diagonal).flatten()
        share_rows(out, J.n, J.c)
        return out

    return J.passes.complete(run)


def compute_gram_blocks(J: Jacobian, scale: Tensor | None) -> Tensor:
    """The diagonal blocks of ``J diag(scale) J^T``, one for each example, (n, c, c)."""
    diagonal = _diagonal(scale)

    def run() -> Tensor:
        out = torch.zeros(J.n, J.c, J.c, dtype=J.dtype, device=J.device)
        for piece in J.passes.pieces("diag", 1, "blocks of J J^T"):
            for block in piece.blocks:
                out[piece.batch.start : piece.batch.start + piece.batch.n] += block.gram_blocks(diagonal)
        share_rows(out, J.n, 1)
        return out

    return J.passes.complete(run)


def compute_column_norms(J: Jacobian, weight: Tensor | None) -> Tensor:
    """The diagonal of ``J^T W J``, (p,)."""
    rows = J.lin.network.row_dtype

    def run() -> Tensor:
        total = torch.zeros(J.shape[1], dtype=torch.float64, device=J.device)
        for piece in J.passes.pieces("squares", 1, "diag J^T W J"):
            part = torch.zeros(J.shape[1], dtype=rows, device=J.device)
            b = piece.batch
            w = None if weight is None else blocks_of_chunk(weight, b.start, b.start + b.n, J.c).to(rows)
            for block in piece.blocks:
                block.squares(w, part)
            total += part
        add_up(total)
        return total.to(J.dtype)

    return J.passes.complete(run)


def compute_moments(J: Jacobian, *, centered: bool) -> Moments:
    """Means and squares of the columns, in one pass."""

    def run() -> Moments:
        found = Moments(J.shape[1], centered=centered, device=J.device)
        for piece in J.passes.pieces("squares", 1, "moments of J"):
            found.add(piece.blocks, piece.batch.n * J.c)
        found.over_ranks()
        return found

    return J.passes.complete(run)


def compute_kronecker(J: Jacobian, root: Tensor | ClassBlocks | None) -> Kronecker:
    """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass."""
    first, engine = J.passes.chunks.first, J.passes.settings.engine

    def run() -> Kronecker:
        sample = [prepare(f, "sides", k=1, engine=engine) for f in first.blocks]
        found = Kronecker(sample, layout=J.lin.layout, p=J.shape[1], dtype=J.dtype, device=J.device)
        for piece in J.passes.pieces("sides", 1, "Kronecker factors"):
            b = piece.batch
            part = None
            if root is not None:
                part = blocks_of_chunk(root, b.start, b.start + b.n, J.c).to(J.lin.network.row_dtype)
            found.add(piece.blocks, part, b.n)
        found.over_ranks()
        return found

    return J.passes.complete(run)


def _diagonal(scale: Tensor | None) -> Scale:
    return Scale(None if scale is None else scale.contiguous())


def _check_same_columns(J: Jacobian, other: Jacobian) -> None:
    check_same_shapes(J.lin.layout.shapes, other.lin.layout.shapes)
    if J.passes.rotation is not other.passes.rotation:
        raise ValueError("The two Jacobians are in different coordinates; rotate both, by the same rotation.")


def _compute_grams(
    J: Jacobian, other: Jacobian | None, scale: Scale, names: Sequence[str], parts: Cut
) -> dict[str, Tensor]:
    """Gram matrices by name, from blocks cut into named parts; every rank makes the same ones in one order."""
    if other is None and rank_and_world()[1] == 1:
        return _symmetric([J], scale, names, parts)
    right = J if other is None else other
    _check_same_columns(J, right)

    def run() -> dict[str, Tensor]:
        shape = (J.shape[0], right.shape[0])
        grams = {name: torch.zeros(shape, dtype=J.dtype, device=J.device) for name in names}
        room, (start, stop) = find_budget(J.passes.settings.memory, J.device), J.passes.own
        with _pairs(J, (stop - start) * J.c * right.shape[0]) as tick:
            for group, _ in _groups([J], room):
                for columns, b in _placed([right], room, start=0, stop=right.n):
                    for rows, a in group:
                        tick(_meet(a, b, scale, parts, {name: K[rows, columns] for name, K in grams.items()}))
                    del a, b  # before the next ones are formed
        for K in grams.values():
            share_rows(K, J.n, J.c)
        return grams

    return J.passes.complete(run, right.passes)


def _symmetric(all_: Sequence[Jacobian], scale: Scale, names: Sequence[str], parts: Cut) -> dict[str, Tensor]:
    """Gram matrices of Jacobians one above the other, by name: every two chunks meet once."""
    first, *others = all_

    def run() -> dict[str, Tensor]:
        m = sum(J.shape[0] for J in all_)
        grams = {name: torch.zeros(m, m, dtype=first.dtype, device=first.device) for name in names}
        room = find_budget(first.passes.settings.memory, first.device)  # beside them
        with _pairs(first, m * m) as tick:
            for group, behind in _groups(all_, room):
                for columns, b in chain(group, _placed(all_, room, *behind)):
                    for rows, a in group:
                        if rows.start > columns.start:
                            continue
                        done = _meet(a, b, scale, parts, {name: K[rows, columns] for name, K in grams.items()})
                        if rows.start != columns.start:
                            done *= 2
                            for K in grams.values():
                                K[columns, rows] = K[rows, columns].T
                        tick(done)
                    del a, b  # before the next ones are formed
        return grams

    return first.passes.complete(run, *(J.passes for J in others))


def _pairs(J: Jacobian, total: int) -> AbstractContextManager[Callable[[int], Any]]:
    """The bar of a Gram matrix, over its entries: a pass forms chunks again for every block of them."""
    return show_progress(total, "gram", progress=J.passes.settings.progress, unit="pairs of rows")


def _placed(
    all_: Sequence[Jacobian],
    room: int,
    op: int = 0,
    start: int | None = None,
    *,
    stop: int | None = None,
) -> Iterator[Placed]:
    """Chunks of Jacobians one above the other, from an example of one of them on, with their rows among all."""
    above = sum(part.shape[0] for part in all_[:op])
    for part in all_[op:]:
        for piece in part.passes.pieces("gram", 1, "", start=start, stop=stop, room=room):
            rows, handed = piece.rows, [piece]
            del piece  # it is the caller's alone while the next one is formed
            yield slice(above + rows.start, above + rows.stop), handed.pop()
        above, start = above + part.shape[0], None


def _groups(all_: Sequence[Jacobian], room: int) -> Iterator[tuple[list[Placed], tuple[int, int]]]:
    """Runs of chunks whose blocks fit in memory together, and which Jacobian and example come behind them.

    A run is emptied when the next one is asked for.
    """
    limit = int(GRAM[1] * room) >> all_[0].passes.settings.halved
    group: list[Placed] = []
    held = above = number = 0
    for rows, piece in _placed(all_, room):
        while rows.start >= above + all_[number].shape[0]:
            above, number = above + all_[number].shape[0], number + 1
        size = sum(f.bytes for f in piece.blocks)
        if group and held + size > limit:
            yield group, (number, piece.batch.start)
            group.clear()
            held = 0
        group.append((rows, piece))
        held += size
        del piece
    if group:
        yield group, (len(all_), 0)


def _meet(a: Piece, b: Piece, scale: Scale, parts: Cut, out: Mapping[str, Tensor]) -> int:
    """Adds the Gram matrices of two chunks, by name; how many pairs of rows they have."""
    for name, x, y in _matched(a.blocks, b.blocks, parts):
        x.gram(y, scale, out[name])
    return max((K.numel() for K in out.values()), default=0)


def _matched(
    left: Sequence[ColumnBlock],
    right: Sequence[ColumnBlock],
    parts: Cut,
) -> Iterator[tuple[str, ColumnBlock, ColumnBlock]]:
    """Pairs of blocks over the same columns, with a name; columns that one side lacks are zero there."""
    mine = {(name, f.ranges): f for block in left for name, f in parts(block)}
    theirs = {(name, f.ranges): f for block in right for name, f in parts(block)}
    for key in mine:
        if key in theirs:
            yield key[0], mine[key], theirs[key]
    lone = [(name, f) for (name, r), f in mine.items() if (name, r) not in theirs]
    others = [(name, f) for (name, r), f in theirs.items() if (name, r) not in mine]
    # The same parameters came in other forms (data-dependent calls, another model): meet as rows, range by range.
    cut = [(name, r, p) for name, f in lone for r, p in by_range(f)]
    for name, (start, stop), part in cut:
        for _, f in others:
            for (a, b), other in by_range(f):
                low, high = max(start, a), min(stop, b)
                if low < high:
                    x = DenseBlock([(low, high)], [part[..., low - start : high - start]])
                    yield name, x, DenseBlock([(low, high)], [other[..., low - a : high - a]])


def by_range(block: ColumnBlock) -> list[tuple[tuple[int, int], Tensor]]:
    """The rows of a block, range by range."""
    rows = block.expand()
    return list(zip(rows.ranges, rows.parts, strict=True))
