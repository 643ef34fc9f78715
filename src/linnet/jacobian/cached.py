"""Chunks of a Jacobian in memory, and what it takes to keep them there; see `linnet.Jacobian.cached`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from linnet._common import (
    arithmetic,
    find_budget,
    free_memory,
    network_precision,
    show_progress,
)
from linnet.data import Batch, check_subset_index, leaves, move
from linnet.jacobian.blocks.autodiff import AutodiffBlock
from linnet.jacobian.blocks.base import ColumnBlock, Recipe
from linnet.jacobian.blocks.composite import pack
from linnet.jacobian.passes import Chunk, ChunkRequest, ChunkSource, FirstExamples, Pass, PassSettings, Prepare
from linnet.jacobian.plan import PRODUCTS, Engine, Request, chunk_size
from linnet.jacobian.proofs import PROBE
from linnet.network import check_outputs_finite

if TYPE_CHECKING:
    from linnet.jacobian.chunk import NetworkChunks
    from linnet.jacobian.linearization import Linearization

Held = tuple[Recipe, tuple[Tensor, ...]]
"""A block in memory: how it is made, and its tensors."""

Key = tuple[Request, int]
"""Products with a number of columns."""


def store(chunks: NetworkChunks, memory: float | str) -> StoredChunks:
    """The chunks of a Jacobian in memory, by one pass over the data.

    Args:
        chunks: The chunks that the network makes.
        memory: Bytes that may be kept, or "auto".

    Raises:
        MemoryError: If the blocks do not fit.
    """
    limit = cache_limit(memory, chunks.lin.device)
    _check_fits(chunks, estimate_size(chunks), limit)

    def run() -> list[StoredChunk]:
        stored: list[StoredChunk] = []
        held = 0
        for chunk in store_each(chunks, chunks.n, "blocks"):
            stored.append(chunk)
            held += chunk.bytes
            if held > limit:
                break
        return stored

    stored = Pass(chunks).complete(run)
    held = sum(piece.bytes for piece in stored)
    # Where examples differ in size, the first ones do not tell.
    _check_fits(chunks, max(held, ceil(held * chunks.n / sum(piece.batch.n for piece in stored))), limit)
    return gather(chunks, stored)


def store_each(chunks: NetworkChunks, size: int, label: str) -> Iterator[StoredChunk]:
    """One chunk in memory after the other, of at most ``size`` examples, by one pass over the data of all ranks."""
    with show_progress(chunks.n, label, progress=chunks.settings.progress) as tick:
        for batch in chunks.batches(min(size, _stored_size(chunks)), 0, chunks.n):
            chunk = chunks.build_whole(batch)
            check_outputs_finite(chunk.f, batch.start)
            blocks = keep(chunk.blocks, chunks.settings.engine)
            made = [StoredChunk(batch.without_inputs(), chunk.f.clone(), blocks)]
            del chunk, blocks  # the caller's alone, who may be done with it when the next one is formed
            yield made.pop()
            tick(batch.n)


def gather(chunks: ChunkSource, stored: list[StoredChunk]) -> StoredChunks:
    """Chunks in memory, of a Jacobian or of a part of it, as a source of chunks."""
    first = replace(chunks.first, blocks=[], batch=chunks.first.batch.without_inputs())
    return StoredChunks(chunks.lin, replace(chunks.settings, largest=None, halved=0), stored, first)


def estimate_size(chunks: ChunkSource) -> int:
    """Bytes that the chunks of a Jacobian take in memory, estimated from the first examples."""
    s, first, n, size = chunks.settings, chunks.first, chunks.n, chunks.lin.dtype.itemsize
    if s.engine == "autodiff":
        return n * ((chunks.lin.p + 1) * first.c * size + first.rest)
    rows = [f for f in first.blocks if isinstance(f, AutodiffBlock)]
    given = [f for f in first.blocks if not isinstance(f, AutodiffBlock)]
    held = keep(given, s.engine)
    # What all examples share, such as the output's own gradient, is kept once for each chunk.
    shared = bytes_of(held, lambda t: t.stride(0) == 0)
    own, shared = ceil((bytes_of(held) - shared) / first.share), ceil(shared / first.share)
    each = ceil(own / given[0].n) if given else 0
    each += (sum(f.q for f in rows) + 1) * first.c * size + first.rest
    return n * each + ceil(n / _stored_size(chunks)) * shared


def _stored_size(chunks: ChunkSource) -> int:
    """Examples per chunk while chunks are kept."""
    passes = Pass(chunks)
    size = passes.chunk_size()
    if chunks.lin.device.type != "cuda" or chunks.settings.batch_size != "auto":
        return size
    # A chunk may take half of the memory. What is kept of the chunk lies beside it.
    return min(size, chunk_size(chunks.n, chunks.first.per_example, passes.chunk_room // 2))


@final
@dataclass(eq=False)
class StoredChunks(ChunkSource):
    """Chunks that are in memory: passes touch neither the network nor the data.

    Attributes:
        lin: The linearized network.
        settings: How passes are made.
        pieces: The chunks, in order.
        measured: What the first examples of the data showed.
    """

    lin: Linearization
    settings: PassSettings
    pieces: list[StoredChunk]
    measured: FirstExamples

    @cached_property
    def n(self) -> int:
        return sum(piece.batch.n for piece in self.pieces)

    @property
    def kind(self) -> str:
        return "blocks in memory"

    @property
    def by_position(self) -> bool:
        return True

    @property
    def in_memory(self) -> bool:
        return True

    @property
    def index(self) -> Tensor:
        return torch.cat([piece.batch.index for piece in self.pieces])

    @cached_property
    def first(self) -> FirstExamples:
        piece = self.pieces[0]
        return replace(self.measured, blocks=piece.part(0, min(PROBE, piece.batch.n)).chunk.blocks)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(piece.bytes for piece in self.pieces)

    def chunks(self, size: int, start: int, stop: int, request: ChunkRequest) -> Iterator[tuple[Batch, Chunk]]:
        key = (request.kind, request.k) if request.kind in PRODUCTS and request.rotation is None else None
        for piece in self.pieces:
            first, end = piece.batch.start, piece.batch.start + piece.batch.n
            low, high = max(start, first), min(stop, end)
            for a in range(low, high, size):
                part = piece.part(a - first, min(a + size, high) - first)
                with arithmetic(network_precision(self.settings.precision), self.lin.device):
                    blocks = part.prepared(request.prepare, key)
                yield part.batch, Chunk(part.f.to(self.lin.dtype), blocks)

    def with_settings(self, settings: PassSettings) -> StoredChunks:
        return replace(self, settings=settings)

    def with_lin(self, lin: Linearization) -> StoredChunks:
        return replace(self, lin=lin)

    def begin(self) -> None:
        """Nothing runs, and nothing is to be checked."""

    def forget_proofs(self) -> None:
        """Chunks were compared when they were made."""

    def rests(self, size: int) -> Iterator[Any]:
        return (piece.batch.rest for piece in self.pieces)

    def outputs(self) -> Tensor:
        """Outputs of all examples, (n, c)."""
        return torch.cat([piece.f for piece in self.pieces]).to(self.lin.dtype)

    def subset(self, index: Tensor, size: int) -> StoredChunks:
        check_subset_index(index, self.n)
        index = index.cpu().long()
        starts = torch.tensor([piece.batch.start for piece in self.pieces])
        places = torch.bucketize(index, starts, right=True) - 1
        pieces: list[StoredChunk] = []
        with arithmetic(self.settings.precision, self.lin.device):
            for a in range(0, len(index), size):
                pieces += self._gathered(index[a : a + size], places[a : a + size], a)
        return replace(self, settings=replace(self.settings, largest=None, halved=0), pieces=pieces)

    def with_forms(self) -> StoredChunks:
        """The same chunks, which keep the forms that products make of them."""
        return replace(self, pieces=[replace(piece, forms={}) for piece in self.pieces])

    def _gathered(self, index: Tensor, places: Tensor, start: int) -> list[StoredChunk]:
        """The examples at ``index``, which lie in the pieces at ``places``, as one piece or, if unlike, as several."""
        order = places.argsort(stable=True)
        numbers, counts = places.unique(return_counts=True)
        parts = []
        for number, rows in zip(numbers.tolist(), index[order].split(counts.tolist()), strict=True):
            piece = self.pieces[number]
            parts.append(piece.take(rows - piece.batch.start))
        if len(parts) == 1:
            return [replace(parts[0], batch=replace(parts[0].batch, start=start))]
        if all(part.alike(parts[0]) for part in parts):
            return [StoredChunk.joined(parts, start).take(order.argsort())]
        half = len(index) // 2
        left = self._gathered(index[:half], places[:half], start)
        return left + self._gathered(index[half:], places[half:], start + half)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in memory: recipes of its blocks, each with the tensors that it needs; tensors may be shared.

    Attributes:
        batch: Its examples, without their inputs.
        f: Their outputs (n, c).
        blocks: Columns of the Jacobian.
        forms: The blocks as each kind of products wants them, kept for the next one; None for a kind that would take
            more memory than the blocks themselves, and None if nothing is to be kept.
    """

    batch: Batch
    f: Tensor
    blocks: list[Held]
    forms: dict[Key, list[ColumnBlock] | None] | None = None

    @property
    def bytes(self) -> int:
        return bytes_of(self.blocks) + self.f.numel() * self.f.element_size() + self.batch.rest_bytes

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.f, [recipe(tensors) for recipe, tensors in self.blocks])

    def prepared(self, ready: Prepare, key: Key | None) -> list[ColumnBlock]:
        """The blocks as ``ready`` makes them; ``key`` names a request whose form can be used again."""
        if key is None or self.forms is None:
            return [ready(block) for block in self.chunk.blocks]
        if key not in self.forms:
            self.forms[key] = self._form(ready)
        form = self.forms[key]
        return [ready(block) for block in self.chunk.blocks] if form is None else form

    def _form(self, ready: Prepare) -> list[ColumnBlock] | None:
        """All blocks prepared, or None where that takes more memory than the piece itself."""
        one = self.part(0, 1)
        held = sum(t.nbytes for _, tensors in one.blocks for t in tensors)
        if sum(ready(block).bytes for block in one.chunk.blocks) > held:
            return None
        return pack([ready(block) for block in self.chunk.blocks])

    def part(self, start: int, stop: int) -> StoredChunk:
        """Examples start to stop, as views."""
        if (start, stop) == (0, self.batch.n):
            return self
        blocks = [(recipe, tuple(t[start:stop] for t in tensors)) for recipe, tensors in self.blocks]
        return StoredChunk(self.batch.part(start, stop), self.f[start:stop], blocks)

    def take(self, index: Tensor) -> StoredChunk:
        """Copies of some examples."""
        there = move(index, self.f.device)
        taken = _once(lambda t: t.index_select(0, there))
        blocks = [(recipe, tuple(taken(t) for t in tensors)) for recipe, tensors in self.blocks]
        return StoredChunk(self.batch.take(index), self.f.index_select(0, there), blocks)

    def alike(self, other: StoredChunk) -> bool:
        """Whether the two can be joined."""
        mine, theirs = (
            [(recipe, [t.shape[1:] for t in tensors]) for recipe, tensors in kept.blocks] for kept in (self, other)
        )
        return mine == theirs and _shapes(self.batch) == _shapes(other.batch)

    @staticmethod
    def joined(parts: Sequence[StoredChunk], start: int) -> StoredChunk:
        """Pieces that are alike, as one."""
        columns = zip(*(part.blocks for part in parts), strict=True)
        known: dict[tuple[int, ...], Tensor] = {}

        def join(tensors: tuple[Tensor, ...]) -> Tensor:
            key = tuple(map(id, tensors))
            if key not in known:
                known[key] = torch.cat(tensors)
            return known[key]

        blocks = []
        for column in columns:
            tensors = zip(*(tensors for _, tensors in column), strict=True)
            blocks.append((column[0][0], tuple(join(group) for group in tensors)))
        batch = Batch.join([part.batch for part in parts], start)
        return StoredChunk(batch, torch.cat([part.f for part in parts]), blocks)


def keep(blocks: Sequence[ColumnBlock], engine: Engine) -> list[Held]:
    """Recipes and copies of the tensors of a chunk's blocks, which keep nothing else alive."""
    copied = _once(_compact)
    held: list[Held] = []
    for block in blocks:
        recipe, tensors = block.recipe, block.tensors()
        rows = block.n * block.c * block.q * tensors[-1].element_size() if tensors else 0
        if recipe is None or (rows < block.bytes and engine in ("auto", "rows")):
            # Fewer numbers, and products need not form them again.
            expanded = block.expand()
            held.append((expanded.recipe, tuple(_compact(t) for t in expanded.parts)))
        else:
            held.append((recipe, tuple(copied(t) for t in recipe.laid_out(tensors))))
    return held


def _compact(t: Tensor) -> Tensor:
    """A contiguous copy without graph; axes along which a tensor only repeats stay so."""
    t = t.detach()
    core = t
    for axis, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        core = core.narrow(axis, 0, 1) if stride == 0 and size > 1 else core
    return core.clone(memory_format=torch.contiguous_format).expand(t.shape)


def _once(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function, with one result for all tensors that are the same view of the same memory."""
    known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def once(t: Tensor) -> Tensor:
        key = (t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, t.shape, t.stride())
        if key not in known:
            known[key] = (t, fn(t))  # with t itself, lest its memory be given to another tensor
        return known[key][1]

    return once


def bytes_of(held: Sequence[Held], which: Callable[[Tensor], bool] = lambda t: True) -> int:
    """Memory of the tensors that ``which`` chooses; what several share counts once."""
    storages = [t.untyped_storage() for _, tensors in held for t in tensors if which(t)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _shapes(batch: Batch) -> list[tuple[Any, ...]]:
    """What must agree for the rest of two batches to be joined."""
    return [
        (name, leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else (name,) for name, leaf in leaves(batch.rest)
    ]


def cache_limit(memory: float | str, device: torch.device) -> int:
    """Bytes that may be kept: those given, or a part of what is free."""
    if memory == "auto" and device.type != "cuda":
        return int(0.25 * free_memory(device))
    return find_budget(memory, device)


def _check_fits(chunks: NetworkChunks, needed: int, limit: int) -> None:
    """Raise, on all ranks, unless the blocks fit on all ranks."""
    n, c, p = chunks.n, chunks.first.c, chunks.lin.p
    world = chunks.lin.ranks.world
    if chunks.lin.ranks.count(needed <= limit) < world:
        where = "" if world == 1 else f" on each of {world} ranks"
        raise MemoryError(
            f"Keeping the blocks of the {n * c} x {p} Jacobian takes about {needed:,} bytes, "
            f"{needed // n:,} for each of {n:,} examples, and {limit:,} are available for it{where}. Select fewer "
            "parameters with params=, allow more with memory=, or use a solver that goes over the data in each step."
        )
