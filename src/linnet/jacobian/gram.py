"""Gram matrices, norms and curvature of Jacobians, by passes over the data: functions that `linnet.Jacobian` calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from linnet._common import Checkpoint, check_fits, find_budget, shard, show_progress
from linnet.data import Batch
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Disproved, Scale, pieces
from linnet.jacobian.blocks.composite import SumBlock, cut_by_layer
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.column_moments import Moments
from linnet.jacobian.kronecker import Kronecker
from linnet.jacobian.passes import GRAM, Chunk, Pass, Piece
from linnet.jacobian.plan import chunk_size, prepare
from linnet.jacobian.proofs import OtherBatches, random_signs
from linnet.jacobian.recording import RecordedCall, Recording, build_blocks, streamed
from linnet.linalg import ClassBlocks, blocks_of_chunk, weigh
from linnet.network import check_outputs_finite, check_same_shapes, examples_interact

if TYPE_CHECKING:
    from linnet._common import Precision
    from linnet.jacobian.chunk import NetworkChunks
    from linnet.jacobian.jacobian import Jacobian
    from linnet.jacobian.rule_selection import RuleAssignment

Cut = Callable[[ColumnBlock], list[tuple[str, ColumnBlock]]]
"""A block to its named parts."""

Placed = tuple[slice, Piece]
"""A chunk with its rows."""


def compute_gram(J: Jacobian, other: Jacobian | None, scale: Tensor | None) -> Tensor:
    """``J diag(scale) J'^T``, (n c, m c'); J' is J itself where no other is given."""
    return _compute_grams(J, other, _diagonal(scale), [""], lambda block: [("", block)])[""]


def compute_own_gram(J: Jacobian, scale: Tensor | None) -> Tensor:
    """The rows of ``J diag(scale) J^T`` that belong to the examples of this rank."""
    if J.ranks.world == 1:
        return compute_gram(J, None, scale)
    return _compute_own_grams(J, J, _diagonal(scale), [""], lambda block: [("", block)])[""]


def compute_layer_grams(J: Jacobian) -> dict[str, Tensor]:
    """Layer name to its part of ``J J^T``, (n c, n c)."""
    layout = J.lin.layout
    return _compute_grams(J, None, Scale(), list(layout.layers), lambda block: cut_by_layer(block, layout))


def compute_stacked_gram(all_: Sequence[Jacobian], scale: Tensor | None) -> Tensor | None:
    """The Gram matrix of Jacobians one above the other; None where they do not go together."""
    first, *others = all_
    alike = all(J.passes.settings.precision == first.passes.settings.precision for J in others)
    if not alike or first.ranks.world > 1:
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
        J.ranks.add_up(out)
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
        J.ranks.share_rows(out, J.n, J.c)
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
        J.ranks.share_rows(out, J.n, 1)
        return out

    return J.passes.complete(run)


def compute_column_norms(J: Jacobian, weight: Tensor | None, checkpoint: Checkpoint | None = None) -> Tensor:
    """The diagonal of ``J^T W J``, (p,)."""
    rows = J.lin.network.row_dtype

    def run() -> Tensor:
        total = torch.zeros(J.shape[1], dtype=torch.float64, device=J.device)
        for start, stop in _parts(J, {"squares": total}, checkpoint):
            for piece in J.passes.pieces("squares", 1, "diag J^T W J", start=start, stop=stop):
                b = piece.batch
                w = None if weight is None else blocks_of_chunk(weight, b.start, b.start + b.n, J.c).to(rows)
                _add_squares(piece.blocks, w, total, rows)
        J.ranks.add_up(total)
        return total.to(J.dtype)

    return J.passes.complete(run)


def compute_grouped_squares(J: Jacobian, parts: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """For each row the sum of ``scale_j J_ij^2`` over the columns j of each group, (n c, count).

    Args:
        J: (n c, p).
        parts: Pairs of a scale (p,) and the number of the group of each column (p,); the sums add up.
        count: Number of groups.
    """

    def run() -> Tensor:
        out = torch.zeros(J.shape[0], count, dtype=J.dtype, device=J.device)
        sums = _GroupedSums(parts, count, like=out, room=J.passes.chunk_room)
        if streams(J.passes):
            stream_grouped_squares(J, sums, out)
        else:
            for piece in J.passes.pieces("diag", 1, "squares of J"):
                total = out.new_zeros(count, piece.batch.n * J.c)
                for block in piece.blocks:
                    sums.add(block, total)
                out[piece.rows] = total.T
                del piece
        J.ranks.share_rows(out, J.n, J.c)
        return out

    return J.passes.complete(run)


class _GroupedSums:
    """Adds up the squares of rows by the groups of their columns, with a scale for each column.

    One sparse product is several times as fast as adding up the columns of each group. The sparse matrices are the same
    for all chunks, and are kept where they fit.

    Args:
        parts: Pairs of a scale (p,) and the number of the group of each column (p,); the sums add up.
        count: Number of groups.
        like: A tensor of the device and dtype of the sums.
        room: Bytes that a chunk may take; the matrices may take a quarter of them.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]], count: int, *, like: Tensor, room: int) -> None:
        self._parts, self._count, self._like = parts, count, like
        self._kept: dict[tuple[int, int], Tensor] = {}
        entries = sum(scale.numel() for scale, _ in parts)
        self._keeps = 4 * entries * (16 + like.element_size()) <= room  # two indices and a number for each entry

    def add(self, block: ColumnBlock, total: Tensor) -> None:
        """Add the sums of the rows of a block to a tensor (count, rows)."""
        for (a, b), rows in by_range(block):
            for cut in pieces(b - a, total.shape[1]):
                squares = rows[..., cut].flatten(0, 1).T.contiguous().to(total).square()
                total += torch.sparse.mm(self._groups(a + cut.start, a + cut.stop), squares)

    def _groups(self, start: int, stop: int) -> Tensor:
        """The sparse matrix (count, columns) that adds up some columns by their groups."""
        if (start, stop) in self._kept:
            return self._kept[start, stop]
        groups = torch.cat([group[start:stop] for _, group in self._parts])
        columns = torch.arange(stop - start, device=groups.device).repeat(len(self._parts))
        scales = torch.cat([scale[start:stop] for scale, _ in self._parts]).to(self._like)
        size, index = (self._count, stop - start), torch.stack([groups, columns])
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch 2.11 warns of a choice that is not made here
            found = torch.sparse_coo_tensor(index, scales, size, check_invariants=False).coalesce()
        if self._keeps:
            self._kept[start, stop] = found
        return found


def compute_moments(J: Jacobian, *, centered: bool) -> Moments:
    """Means and squares of the columns, in one pass."""

    def run() -> Moments:
        found = Moments(J.shape[1], centered=centered, device=J.device)
        for piece in J.passes.pieces("squares", 1, "moments of J"):
            found.add(piece.blocks, piece.batch.n * J.c)
        found.over_ranks(J.ranks)
        return found

    return J.passes.complete(run)


def compute_kronecker(
    J: Jacobian, root: Tensor | ClassBlocks | None, checkpoint: Checkpoint | None = None
) -> Kronecker:
    """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass."""

    def run() -> Kronecker:
        found = _empty_kronecker(J)
        for start, stop in _parts(J, found.sums, checkpoint):
            for piece in J.passes.pieces("sides", 1, "Kronecker factors", start=start, stop=stop):
                b = piece.batch
                part = None
                if root is not None:
                    part = blocks_of_chunk(root, b.start, b.start + b.n, J.c).to(J.lin.network.row_dtype)
                found.add(piece.blocks, part, b.n)
        _count_examples(found, J)
        found.over_ranks(J.ranks)
        return found

    return J.passes.complete(run)


PARTS = 16
"""Parts of a pass with a checkpoint: an interruption loses a part, and every part ends with a sum over the ranks and a
write."""


def _parts(J: Jacobian, sums: Mapping[str, Tensor], checkpoint: Checkpoint | None) -> Iterator[tuple[int, int]]:
    """Start and stop of this rank's examples in each part of a pass; without a checkpoint there is one part.

    All ranks share out each part, and what they have added up is saved after the part. So a pass goes on with any
    number of ranks.

    Args:
        J: (n c, p).
        sums: What the pass adds to: sums over the examples of this rank.
        checkpoint: Where the sums of all ranks are kept.
    """
    if checkpoint is None:
        yield J.passes.own
        return
    ranks, done, found = J.ranks, 0, checkpoint.load(device=J.device)
    if found is not None:
        tensors, done = found[0], found[1]["examples"]
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in sums.items()}:
            raise ValueError(
                f"{checkpoint.path} holds sums of other shapes than this pass makes: memory decides which factors are "
                "decomposed whole. Pass the memory= of the first run, or remove the folder."
            )
        if ranks.rank == 0:  # the others begin with zero
            for name, t in sums.items():
                t.copy_(tensors[name])
    start, stop = J.passes.own
    count = int(ranks.smallest(min(PARTS, max(1, (stop - start) // J.passes.chunk_size()))))
    while done < J.n:
        end = -(-(done * count // J.n + 1) * J.n // count)
        first, last = shard(end - done, ranks.rank, ranks.world)
        yield done + first, done + last
        done = end
        total = {name: t if ranks.world == 1 else t.clone() for name, t in sums.items()}
        ranks.add_up(*total.values())
        checkpoint.save(total, {"examples": done})


def _count_examples(factors: Kronecker, J: Jacobian) -> None:
    """Let each rank count its share of the examples, whichever rank and run has added them."""
    start, stop = J.passes.own
    factors.n = stop - start


Form = Literal["kron", "diag"]
"""Forms of a curvature that add up over the examples: Kronecker factors, or the diagonal."""

ByChunk = Callable[[Batch], Tensor]
"""From a chunk, whose outputs are ``batch.f`` (n, c), to a tensor for its examples."""


@dataclass(frozen=True)
class CurvatureSums:
    """What one pass over the data tells about a network and its likelihood.

    Attributes:
        f: Outputs, (n, c).
        gradient: ``J^T u``, (p,).
        factors: Kronecker factors of ``J^T L L^T J``; None for the form "diag".
        squares: The diagonal of ``J^T L L^T J``, (p,); None for the form "kron".
    """

    f: Tensor
    gradient: Tensor
    factors: Kronecker | None = None
    squares: Tensor | None = None


def compute_curvature(
    J: Jacobian, form: Form, root: ByChunk, u: ByChunk, checkpoint: Checkpoint | None = None
) -> CurvatureSums:
    """Outputs, curvature and gradient in one pass; the root of each chunk comes from the outputs of the chunk.

    Args:
        J: (n c, p).
        form: Which curvature.
        root: Gives L, (n, c) where it is diagonal, or (n, c, m).
        u: Gives the (n, c) that the gradient takes.
        checkpoint: Keeps the sums after each part of the pass.
    """

    rows = J.lin.network.row_dtype

    def run() -> CurvatureSums:
        f = torch.zeros(J.n, J.c, dtype=J.dtype, device=J.device)
        gradient, squares = (torch.zeros(J.shape[1], dtype=torch.float64, device=J.device) for _ in range(2))
        factors = _empty_kronecker(J) if form == "kron" else None
        sums = {"f": f, "gradient": gradient}
        sums |= {"squares": squares} if factors is None else factors.sums
        streamed = factors is not None and streams(J.passes)
        for start, stop in _parts(J, sums, checkpoint):
            if streamed:
                assert factors is not None
                add_streams(J.passes, factors, f, gradient, start, stop, root=root, u=u)
                continue
            for piece in J.passes.pieces(
                "sides" if form == "kron" else "squares", 1, "curvature", start=start, stop=stop
            ):
                b = replace(piece.batch, f=piece.f)
                f[b.start : b.start + b.n] = piece.f
                L = root(b).to(rows)
                if factors is None:
                    _add_squares(piece.blocks, L.square() if L.ndim == 2 else L @ L.mT, squares, rows)
                else:
                    factors.add(piece.blocks, L, b.n)
                part = torch.zeros(J.shape[1], 1, dtype=rows, device=J.device)
                for block in piece.blocks:
                    block.rmatmul(u(b)[..., None].to(rows), part)
                gradient += part[:, 0]
                del piece
        return finish(f, gradient, factors, squares)

    def finish(f: Tensor, gradient: Tensor, factors: Kronecker | None, squares: Tensor) -> CurvatureSums:
        """Put the sums of all ranks together."""
        if checkpoint is None:
            J.ranks.share_rows(f, J.n, 1)
        else:  # the examples of a rank are others in each part
            J.ranks.add_up(f)
        if factors is not None:
            _count_examples(factors, J)
            factors.over_ranks(J.ranks)
            J.ranks.add_up(gradient)
            return CurvatureSums(f, gradient.to(J.dtype), factors=factors)
        J.ranks.add_up(gradient, squares)
        return CurvatureSums(f, gradient.to(J.dtype), squares=squares.to(J.dtype))

    return J.passes.complete(run)


def _empty_kronecker(J: Jacobian) -> Kronecker:
    """Sums to add the Kronecker factors of J to."""
    first, engine = J.passes.chunks.first, J.passes.settings.engine
    sample = [prepare(f, "sides", k=1, engine=engine) for f in first.blocks]
    memory = J.passes.settings.memory
    return Kronecker(
        sample,
        layout=J.lin.layout,
        p=J.shape[1],
        dtype=J.dtype,
        device=J.device,
        rows=J.shape[0],
        memory=memory,
        rows_dtype=J.lin.network.row_dtype,
    )


def _add_squares(blocks: Sequence[ColumnBlock], weight: Tensor | None, total: Tensor, dtype: torch.dtype) -> None:
    """Adds the diagonal of ``J^T W J`` of a chunk to a sum in float64, (p,); weight (n, c) or (n, c, c)."""
    part = torch.zeros_like(total, dtype=dtype)
    for block in blocks:
        block.squares(weight, part)
    total += part


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
    if other is None and J.ranks.world == 1:
        return _symmetric([J], scale, names, parts)
    if other is None:
        grams = _compute_shared_grams(J, scale, names, parts)
    else:
        grams = _compute_own_grams(J, other, scale, names, parts)
    with J.ranks.telling():
        whole = {name: J.ranks.gather_rows(K, J.n, J.c) for name, K in grams.items()}
    for K in whole.values() if other is None else ():
        for rank in range(J.ranks.world):
            for rows, columns in _cells(J.n, rank, J.ranks.world):
                mine, theirs = (slice(a * J.c, b * J.c) for a, b in (rows, columns))
                K[theirs, mine] = K[mine, theirs].T
    return whole


def _cells(n: int, rank: int, world: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Which pairs of examples a rank takes beside the pairs among its own: each pair of ranks meets once.

    A rank takes the examples of the ranks behind it, around the circle and half of the way. Of two ranks that are
    opposite each other, each takes half of the first rank's examples.

    Returns:
        Start and stop of the rank's own examples, and of those of another rank.

    >>> _cells(8, 0, 2), _cells(8, 1, 2)
    ([((0, 2), (4, 8))], [((4, 8), (2, 4))])
    """
    own = shard(n, rank, world)
    found = [(own, shard(n, (rank + i) % world, world)) for i in range(1, (world + 1) // 2)]
    if world % 2 == 0:
        other = shard(n, (rank + world // 2) % world, world)
        first = min(own, other, key=lambda r: r[0])
        middle = (first[0] + first[1]) // 2
        if rank < world // 2:
            found.append(((own[0], middle), other))
        else:
            found.append((own, (middle, other[1])))
    return found


def _compute_shared_grams(J: Jacobian, scale: Scale, names: Sequence[str], parts: Cut) -> dict[str, Tensor]:
    """The rows of symmetric Gram matrices that belong to the examples of this rank.

    Only the pairs are filled in that this rank takes (`_cells`), and the pairs of its own examples.
    """

    def run() -> dict[str, Tensor]:
        room, (start, stop), c = J.passes.gram_room, J.passes.own, J.c
        grams = _zeros(J, names, (stop - start) * c, J.shape[0])
        cells = _cells(J.n, J.ranks.rank, J.ranks.world)

        def meet(rows: slice, columns: slice, a: Piece, b: Piece) -> int:
            own = slice(rows.start - start * c, rows.stop - start * c)
            return _meet(a, b, scale, parts, {name: K[own, columns] for name, K in grams.items()})

        with _pairs(J, (stop - start) * c * J.shape[0]) as tick:
            for group, behind in _groups([J], room):
                for columns, b in chain(group, _placed([J], room, *behind, stop=stop)):
                    for rows, a in group:
                        if rows.start <= columns.start:
                            tick(2 * meet(rows, columns, a, b))
                        if rows.start < columns.start:
                            low = slice(columns.start - start * c, columns.stop - start * c)
                            high = slice(rows.start - start * c, rows.stop - start * c)
                            for K in grams.values():
                                K[low, rows] = K[high, columns].T
                    del a, b  # before the next ones are formed
                for (_, last), (first, end) in cells:
                    for columns, b in _placed([J], room, start=first, stop=end):
                        for rows, a in group:
                            if rows.start < last * c:
                                tick(2 * meet(rows, columns, a, b))
                        del a, b
        return grams

    return J.passes.complete(run)


def _compute_own_grams(
    J: Jacobian, right: Jacobian, scale: Scale, names: Sequence[str], parts: Cut
) -> dict[str, Tensor]:
    """The rows of Gram matrices that belong to the examples of this rank."""
    _check_same_columns(J, right)

    def run() -> dict[str, Tensor]:
        room, (start, stop) = J.passes.gram_room, J.passes.own
        shape = ((stop - start) * J.c, right.shape[0])
        grams = _zeros(J, names, *shape)
        with _pairs(J, shape[0] * shape[1]) as tick:
            for group, _ in _groups([J], room):
                for columns, b in _placed([right], room, start=0, stop=right.n):
                    for rows, a in group:
                        own = slice(rows.start - start * J.c, rows.stop - start * J.c)
                        tick(_meet(a, b, scale, parts, {name: K[own, columns] for name, K in grams.items()}))
                    del a, b  # before the next ones are formed
        return grams

    return J.passes.complete(run, right.passes)


def _symmetric(all_: Sequence[Jacobian], scale: Scale, names: Sequence[str], parts: Cut) -> dict[str, Tensor]:
    """Gram matrices of Jacobians one above the other, by name: every two chunks meet once."""
    first, *others = all_

    def run() -> dict[str, Tensor]:
        m = sum(J.shape[0] for J in all_)
        grams = _zeros(first, names, m, m)
        room = first.passes.gram_room
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


def _zeros(J: Jacobian, names: Sequence[str], rows: int, columns: int) -> dict[str, Tensor]:
    """Gram matrices to add to, by name; raise before any pass where they do not fit."""
    matrices = "The Gram matrix" if len(names) == 1 else f"{len(names):,} Gram matrices"
    check_fits(
        len(names) * rows * columns * J.dtype.itemsize,
        "auto",
        J.device,
        what=f"{matrices} of {rows:,} by {columns:,} rows",
        instead="Use products such as J @ (J.T @ U), J.gram_diag(), or fewer examples or outputs",
    )
    return {name: torch.zeros(rows, columns, dtype=J.dtype, device=J.device) for name in names}


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


# Networks whose gradients do not fit memory: one backward pass for each seed.
#
# A chunk as other passes make it holds the gradients (n, c, T, d) of all layers at once. A stream starts a backward
# pass from one seed (n, c): a column of the curvature's root, or an output. Each layer hands its block over during
# the pass, and the gradient is freed. A chunk takes the memory of a training step.

SMALL = 256
"""Outputs up to which the curvature of an example is decomposed, so that columns of zeros take no backward pass."""


def streams(passes: Pass) -> bool:
    """Whether chunks come by streams: the gradients of a chunk do not fit memory, and every layer can hand them over.

    Convolutions do not stream, because each column would make their patches again.
    """
    chunks, s = passes.chunks, passes.settings
    if chunks.in_memory or s.engine != "auto" or passes.lin.rules.denied("stream"):
        return False
    first, rules = chunks.first, passes.lin.rules
    if rules.has_rest or any(isinstance(block, LazyBlock | SumBlock) for block in first.blocks):
        return False
    size = passes.n if isinstance(s.batch_size, str) else min(s.batch_size, passes.n)
    return _can_stream(rules.last) and size * first.per_example > find_budget(s.memory, passes.lin.device)


def _can_stream(assignment: RuleAssignment) -> bool:
    """Whether all parameters have rules, and each of them one use."""
    names = Counter(slot.name for kept in assignment.kept if kept for slot in kept.slots.values())
    once = all(count == 1 for count in names.values())
    return once and not assignment.rest and not assignment.changes.spread


def _stream(
    passes: Pass,
    start: int,
    stop: int,
    label: str,
    make: Callable[[Batch, OtherBatches | None], Chunk],
    *,
    rows: bool = False,
) -> Iterator[tuple[Batch, Tensor]]:
    """The chunks of a stream, each with its outputs (n, c).

    Args:
        passes: Goes over the data.
        start: First example.
        stop: End of the examples.
        label: Label of the progress bar.
        make: Makes a chunk (`_stream_chunk`), which is compared with reverse mode where other batches are given.
        rows: Whether the rows of each layer are formed.
    """
    s, chunks = passes.settings, passes.chunks
    assert not chunks.in_memory
    source = cast("NetworkChunks", chunks)
    s.used = _stream_size(passes, rows=rows)
    with show_progress(stop - start, label, progress=s.progress) as tick:
        for batch in source.batches(s.used, start, stop):
            yield batch, source.prove("stream", batch, partial(make, batch)).f
            tick(batch.n)


def add_streams(
    passes: Pass,
    factors: Kronecker,
    f: Tensor,
    gradient: Tensor,
    start: int,
    stop: int,
    *,
    root: Callable[[Batch], Tensor],
    u: Callable[[Batch], Tensor],
) -> None:
    """Add the curvature of some examples to factors, the outputs and ``J^T u`` to tensors.

    Args:
        passes: Goes over the data.
        factors: Sums of the curvature.
        f: (n, c), takes the outputs.
        gradient: (p,), takes ``J^T u``.
        start: First example.
        stop: End of the examples.
        root: From a chunk with its outputs to L, (n, c) where it is diagonal, or (n, c, m).
        u: From a chunk with its outputs to (n, c).

    Raises:
        Disproved: Where a layer does not hand over its gradient, or hands over a wrong one.
    """
    make = partial(_stream_curvature, passes, factors, gradient, root, u)
    for batch, outputs in _stream(passes, start, stop, "curvature", make):
        f[batch.start : batch.start + batch.n] = outputs


def _stream_curvature(
    passes: Pass,
    factors: Kronecker,
    gradient: Tensor,
    root: Callable[[Batch], Tensor],
    u: Callable[[Batch], Tensor],
    batch: Batch,
    apart: OtherBatches | None,
) -> Chunk:
    """Adds the curvature of a chunk to factors, and its ``J^T u`` to the gradient."""
    net = passes.lin.network
    part = torch.zeros(passes.lin.p, 1, dtype=net.row_dtype, device=net.device)
    count, shares, given = 0, part, list[bool]()

    def seeds(with_outputs: Batch) -> Tensor:
        nonlocal count, shares, given
        columns = _root_columns(root(with_outputs))
        wanted = u(with_outputs).to(columns)
        found = _shares_of(columns, wanted, 1e-9)  # as exact as products are
        count, all_ = len(columns), columns
        if found is None:  # u is no sum of the columns: J^T u takes a backward pass of its own, the last one
            all_ = torch.cat([columns, wanted[None]])
            found = torch.zeros(all_.shape[:2], device=columns.device)
            found[-1] = 1.0
        shares, given = found.to(net.row_dtype), found.any(1).tolist()
        return all_

    def take(m: int, block: ColumnBlock) -> None:
        if m < count:
            factors.add([prepare(block, "sides", k=1)], None, 0, inputs=m == 0)
        if given[m]:
            block.rmatmul(shares[m][:, None, None], part)

    chunk = _stream_chunk(passes, batch, apart, seeds=seeds, take=take)
    factors.n += batch.n
    gradient += part[:, 0]
    return chunk


def stream_grouped_squares(J: Jacobian, sums: _GroupedSums, out: Tensor) -> None:
    """Write the sums of squares of all rows of J by the groups of their columns into ``out`` (n c, count)."""
    passes, c = J.passes, J.c
    ready = passes.prepare_for("diag", 1)

    def make(batch: Batch, apart: OtherBatches | None) -> Chunk:
        totals = out.new_zeros(c, out.shape[1], batch.n)

        def seeds(with_outputs: Batch) -> Tensor:
            return torch.eye(c, dtype=out.dtype, device=out.device)[:, None].expand(-1, batch.n, -1)

        chunk = _stream_chunk(
            passes, batch, apart, seeds=seeds, take=lambda m, block: sums.add(ready(block), totals[m])
        )
        rows = slice(batch.start * c, (batch.start + batch.n) * c)
        out[rows] = totals.permute(2, 0, 1).flatten(0, 1)
        return chunk

    for _ in _stream(passes, *passes.own, "squares of J", make, rows=True):
        pass


def _stream_size(passes: Pass, *, rows: bool = False) -> int:
    """Examples per chunk: their graph, and the gradient of the layer whose gradient is longest, or its rows."""
    s, first = passes.settings, passes.chunks.first
    if isinstance(s.batch_size, int):
        size = min(s.batch_size, passes.n)
    else:
        each = [f.size.T * f.size.groups * (f.size.dx + f.size.dg) + rows * f.q for f in first.blocks]
        room = find_budget(s.memory, passes.lin.device)
        # Layers with many uses keep a GPU busy with few examples: larger chunks take memory, and save no time.
        room = room // 4 if isinstance(s.memory, str) else room
        size = chunk_size(passes.n, first.graph + 4 * max(each, default=0) * passes.lin.dtype.itemsize, room)
    return size if s.largest is None else min(size, s.largest)


def _stream_chunk(
    passes: Pass,
    batch: Batch,
    apart: OtherBatches | None,
    *,
    seeds: Callable[[Batch], Tensor],
    take: Callable[[int, ColumnBlock], None],
) -> Chunk:
    """A chunk by one backward pass for each seed, compared with reverse mode where it is new (``apart`` is given).

    Args:
        passes: Goes over the data.
        batch: The examples.
        apart: Some of the examples in other batches; None if the chunk is not to be compared.
        seeds: From the examples with their outputs to the seeds, (m, n, c).
        take: Called with the number of a seed and, layer by layer, the block (n, 1, q) of its backward pass.

    Raises:
        Disproved: Where a layer does not hand over its gradient, or hands over a wrong one.
    """
    lin, precision = passes.lin, passes.settings.precision
    net, rules = lin.network, lin.rules
    with net.in_precision(precision):
        recording = rules.record(batch, watched=apart is not None)
        assignment = rules.assign_to(recording, batch)
        if not _can_stream(assignment) or not recording.out.requires_grad:
            raise Disproved("stream")
        out = recording.out
        f = out.detach().to(net.dtype)
        check_outputs_finite(f, batch.start, batch.positions)
        wanted = seeds(replace(batch, f=f)).to(out)
        signs = random_signs(*wanted.shape[:2], seed=batch.start + 1, like=out.detach())
        truth = None
        if apart is not None:
            truth = rules.truth(recording, torch.einsum("mn,mnc->nc", signs, wanted), precision)
            _check_apart(recording, batch, apart, passes, precision)
        rows = net.row_dtype
        found = torch.zeros(lin.p, 1, dtype=rows, device=net.device)
        kept = [served for served in assignment.kept if served]
        uses = [use for use, served in zip(recording.uses, assignment.kept, strict=True) if served]
        recording.uses.clear()
        for m, seed in enumerate(wanted):

            def hand_over(i: int, use: RecordedCall, g: Tensor, m: int = m) -> None:
                with torch.autocast(net.device.type, enabled=False):
                    for block in build_blocks(use, kept[i], g, n=batch.n, dtype=rows):
                        block = block.widen()
                        take(m, block)
                        if truth is not None:
                            block.rmatmul(signs[m].to(rows)[:, None, None], found)

            last = m + 1 == len(wanted)
            given: list[RecordedCall | None] = list(uses)
            if last:
                uses.clear()
            if not streamed(out, given, hand_over, seed=seed, keep=not last):
                raise Disproved("stream")
    if truth is not None and truth.judges and truth.different(found.to(truth.G))[0]:
        raise Disproved("stream")
    return Chunk(f, [])


def _check_apart(recording: Recording, batch: Batch, apart: OtherBatches, passes: Pass, precision: Precision) -> None:
    """Raise where gradients of some examples are others in another batch."""
    if apart.truth is None:
        return
    whole = passes.lin.rules.truth(recording, apart.truth.U[..., 0].to(recording.out), precision)
    if whole.judges and apart.truth.judges and apart.truth.different(whole.G)[0]:
        raise examples_interact(batch.start, batch.n)


def _shares_of(columns: Tensor, u: Tensor, tolerance: float) -> Tensor | None:
    """Numbers a (m, n) with ``u = sum over m of a * columns``, (n, c) from (m, n, c); None if there are none.

    The columns of an example are orthogonal to each other, else the answer is None: numbers from columns that are not
    orthogonal could be large and cancel.

    Args:
        columns: (m, n, c).
        u: (n, c).
        tolerance: What may be left of the u of an example, relative to that u.

    >>> _shares_of(torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[1.0, 3.0]]), 1e-7)
    tensor([[0.5000],
            [3.0000]], dtype=torch.float64)
    >>> _shares_of(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[1.0, 3.0]]), 1e-7)
    """
    if len(columns) > u.shape[1]:
        return None  # more columns than outputs are not orthogonal
    L, u = columns.movedim(0, -1).double(), u.double()  # (n, c, m)
    squares = L.square().sum(1)
    products, sizes = L.mT @ L - torch.diag_embed(squares), squares.sqrt()
    bounds = 4 * u.shape[1] * torch.finfo(L.dtype).eps * sizes[:, :, None] * sizes[:, None]
    a = (L * u[..., None]).sum(1) / squares.where(squares > 0, 1.0)
    left = (u - (L @ a[..., None])[..., 0]).norm(dim=1)
    return a.T if bool((products.abs() <= bounds).all() & (left <= tolerance * u.norm(dim=1)).all()) else None


def _root_columns(root: Tensor) -> Tensor:
    """Columns (m, n, c) with the same ``L L^T``, without those that are zero in all examples."""
    if root.ndim == 2:
        return torch.diag_embed(root).movedim(-1, 0)
    if root.shape[1] > SMALL:
        return root.movedim(-1, 0)
    values, vectors = torch.linalg.eigh((root @ root.mT).double())
    columns = vectors * values.clamp_min(0).sqrt()[:, None]
    count = columns.square().sum(1).amax(0)  # (c,), rising
    matter = count > len(count) * torch.finfo(root.dtype).eps * count.amax()  # less is rounding of the eigenvalues
    return columns[:, :, matter].movedim(-1, 0)
