"""A Jacobian whose factors are in memory, and what it takes to keep them there; see `linnet.Jacobian.cached`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from linnet._common.distributed import add_up, rank_and_world
from linnet._common.memory import budget, free_memory
from linnet._common.torch_settings import arithmetic, network_precision
from linnet.data.batch import Batch, leaves, move
from linnet.data.checks import check_subset_index, targets_of
from linnet.jacobian.blocks.base import Factor, Recipe
from linnet.jacobian.blocks.composite import pack
from linnet.jacobian.chunk import Chunk, Prepare
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.kronecker import Kronecker
from linnet.jacobian.plan import PRODUCTS, Engine, Request
from linnet.jacobian.proofs import Proofs
from linnet.jacobian.rule_selection import PROBE
from linnet.linalg.operator import LinearOperator

Held = tuple[Recipe, tuple[Tensor, ...]]
"""A factor in memory: how it is made, and its tensors."""

Key = tuple[Request, int]
"""Products with a number of columns."""


@final
class Cached(Jacobian):
    """A Jacobian whose factors are in memory; see `Jacobian.cached`.

    Args:
        J: The Jacobian that they come from.
        kept: Its factors, or those of chosen examples.
    """

    def __init__(self, J: Jacobian, kept: Sequence[Kept]) -> None:
        self.lin, self._settings, self._kept = J.lin, replace(J._settings, largest=None, halved=0), list(kept)
        self._rotation, self._proofs, self._agreed = J._rotation, Proofs(), True
        self.n, self.c = sum(piece.batch.n for piece in kept), J.c
        LinearOperator.__init__(self, (self.n * self.c, J.lin.p), dtype=J.dtype, device=J.device)
        self.block = self.c
        self._copies: tuple[int, list[Cached]] = (0, [])  # of all minibatches of a size

    @cached_property
    def _sample(self) -> list[Factor]:  # type: ignore[override]
        first = self._kept[0]
        return first.part(0, min(PROBE, first.batch.n)).chunk.factors

    @property
    def name(self) -> str:
        return "Jacobian"

    @property
    def by_position(self) -> bool:
        return True

    @property
    def index(self) -> Tensor:
        return torch.cat([piece.batch.index for piece in self._kept])

    @property
    def cache_size(self) -> int:
        """Bytes that are kept."""
        return sum(piece.bytes for piece in self._kept)

    @property
    def _kind(self) -> str:
        return "factors in memory"

    def cached(self, memory: float | str = "auto") -> Jacobian:
        return self

    def above_frozen(self, memory: float | str = "auto", *, folder: str | os.PathLike[str] | None = None) -> Jacobian:
        return self  # which runs no layer at all

    def outputs(self, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        if theta is not None:
            raise ValueError(
                "A cached Jacobian keeps no inputs, so it has the outputs at its own weights only; "
                "use the Jacobian that it was made from."
            )
        return self._completed(lambda: torch.cat([piece.f for piece in self._kept]))

    def kronecker(self, root: Tensor | None = None) -> Kronecker:
        raise ValueError(
            "A cached Jacobian keeps rows where they are smaller, which have no Kronecker factors; "
            "use the Jacobian that it was made from."
        )

    def at(self, theta: Mapping[str, Tensor]) -> Jacobian:
        raise ValueError(
            "A cached Jacobian keeps no inputs, so it cannot go to other weights; "
            "use the Jacobian that it was made from."
        )

    def targets(self) -> Any:
        return targets_of([piece.batch.rest for piece in self._kept], self._kind)

    def subset(self, index: Tensor) -> Cached:
        check_subset_index(index, self.n)
        index, size = index.cpu().long(), self._chunk()
        starts = torch.tensor([piece.batch.start for piece in self._kept])
        places = torch.bucketize(index, starts, right=True) - 1
        kept: list[Kept] = []
        with arithmetic(self._settings.precision, self.device):
            for a in range(0, len(index), size):
                kept += self._gathered(index[a : a + size], places[a : a + size], a)
        return Cached(self, kept)

    def _minibatches(self, chunks: Sequence[Tensor], order: Sequence[int], *, late: bool) -> Iterator[Jacobian]:
        size = len(chunks[0])
        if self._copies[0] != size:
            self.forget_minibatches()
            if self.cache_size > cache_limit("auto", self.device):
                yield from (self.subset(chunks[i]) for i in order)
                return
            self._copies = size, [self._copied(index) for index in chunks]
        for i in order:
            yield self._copies[1][i]

    def forget_minibatches(self) -> None:
        self._copies = 0, []

    def _copied(self, index: Tensor) -> Cached:
        """The examples at ``index``, with forms for products that are made once."""
        part = self.subset(index)
        return Cached(part, [replace(piece, forms={}) for piece in part._kept])

    def _gathered(self, index: Tensor, places: Tensor, start: int) -> list[Kept]:
        """The examples at ``index``, which lie in the pieces at ``places``, as one piece or, if unlike, as several."""
        order = places.argsort(stable=True)
        numbers, counts = places.unique(return_counts=True)
        parts = []
        for number, rows in zip(numbers.tolist(), index[order].split(counts.tolist()), strict=True):
            piece = self._kept[number]
            parts.append(piece.take(rows - piece.batch.start))
        if len(parts) == 1:
            return [replace(parts[0], batch=replace(parts[0].batch, start=start))]
        if all(part.alike(parts[0]) for part in parts):
            return [Kept.joined(parts, start).take(order.argsort())]
        half = len(index) // 2
        left = self._gathered(index[:half], places[:half], start)
        return left + self._gathered(index[half:], places[half:], start + half)

    def _chunks(
        self, size: int, start: int, stop: int, request: Request, k: int, along: Tensor | None
    ) -> Iterator[tuple[Batch, Chunk]]:
        for piece in self._kept:
            first, end = piece.batch.start, piece.batch.start + piece.batch.n
            low, high = max(start, first), min(stop, end)
            for a in range(low, high, size):
                part = piece.part(a - first, min(a + size, high) - first)
                ready = self._ready(request, k)
                key = (request, k) if request in PRODUCTS and self._rotation is None else None
                with arithmetic(network_precision(self._settings.precision), self.device):
                    factors = part.prepared(ready, key)
                yield part.batch, Chunk(part.f, factors)


@dataclass(frozen=True)
class Kept:
    """A chunk in memory: recipes of its factors, each with the tensors that it needs; tensors may be shared.

    Attributes:
        batch: Its examples, without their inputs.
        f: Their outputs (n, c).
        factors: Columns of the Jacobian.
        forms: The factors as each kind of products wants them, kept for the next one; None for a kind that would take
            more memory than the factors themselves, and None if nothing is to be kept.
    """

    batch: Batch
    f: Tensor
    factors: list[Held]
    forms: dict[Key, list[Factor] | None] | None = None

    @property
    def bytes(self) -> int:
        return bytes_of(self.factors) + self.f.numel() * self.f.element_size() + self.batch.rest_bytes

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.f, [recipe(tensors) for recipe, tensors in self.factors])

    def prepared(self, ready: Prepare, key: Key | None) -> list[Factor]:
        """The factors as ``ready`` makes them; ``key`` names a request whose form can be used again."""
        if key is None or self.forms is None:
            return [ready(factor) for factor in self.chunk.factors]
        if key not in self.forms:
            self.forms[key] = self._form(ready)
        form = self.forms[key]
        return [ready(factor) for factor in self.chunk.factors] if form is None else form

    def _form(self, ready: Prepare) -> list[Factor] | None:
        """All factors prepared, or None where that takes more memory than the piece itself."""
        one = self.part(0, 1)
        held = sum(t.nbytes for _, tensors in one.factors for t in tensors)
        if sum(ready(factor).bytes for factor in one.chunk.factors) > held:
            return None
        return pack([ready(factor) for factor in self.chunk.factors])

    def part(self, start: int, stop: int) -> Kept:
        """Examples start to stop, as views."""
        if (start, stop) == (0, self.batch.n):
            return self
        factors = [(recipe, tuple(t[start:stop] for t in tensors)) for recipe, tensors in self.factors]
        return Kept(self.batch.part(start, stop), self.f[start:stop], factors)

    def take(self, index: Tensor) -> Kept:
        """Copies of some examples."""
        there = move(index, self.f.device)
        taken = _once(lambda t: t.index_select(0, there))
        factors = [(recipe, tuple(taken(t) for t in tensors)) for recipe, tensors in self.factors]
        return Kept(self.batch.take(index), self.f.index_select(0, there), factors)

    def alike(self, other: Kept) -> bool:
        """Whether the two can be joined."""
        mine, theirs = (
            [(recipe, [t.shape[1:] for t in tensors]) for recipe, tensors in kept.factors] for kept in (self, other)
        )
        return mine == theirs and _shapes(self.batch) == _shapes(other.batch)

    @staticmethod
    def joined(parts: Sequence[Kept], start: int) -> Kept:
        """Pieces that are alike, as one."""
        columns = zip(*(part.factors for part in parts), strict=True)
        known: dict[tuple[int, ...], Tensor] = {}

        def join(tensors: tuple[Tensor, ...]) -> Tensor:
            key = tuple(map(id, tensors))
            if key not in known:
                known[key] = torch.cat(tensors)
            return known[key]

        factors = []
        for column in columns:
            tensors = zip(*(tensors for _, tensors in column), strict=True)
            factors.append((column[0][0], tuple(join(group) for group in tensors)))
        batch = Batch.join([part.batch for part in parts], start)
        return Kept(batch, torch.cat([part.f for part in parts]), factors)


def keep(factors: Sequence[Factor], engine: Engine) -> list[Held]:
    """Recipes and copies of the tensors of a chunk's factors, which keep nothing else alive."""
    copied = _once(_compact)
    held: list[Held] = []
    for factor in factors:
        recipe, tensors = factor.recipe, factor.tensors()
        rows = factor.n * factor.c * factor.q * tensors[-1].element_size() if tensors else 0
        if recipe is None or (rows < factor.bytes and engine in ("auto", "rows")):
            # Fewer numbers, and products need not form them again.
            expanded = factor.expand()
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
    return budget(memory, device)


def check_fits(J: Jacobian, needed: int, limit: int) -> None:
    """Raise, on all ranks, unless it fits on all ranks."""
    fits = torch.tensor(float(needed <= limit), device=J.device)
    add_up(fits)
    world = rank_and_world()[1]
    if int(fits) < world:
        where = "" if world == 1 else f" on each of {world} ranks"
        raise MemoryError(
            f"Keeping the factors of the {J.shape[0]} x {J.shape[1]} Jacobian takes about {needed:,} bytes, "
            f"{needed // J.n:,} for each of {J.n:,} examples, and {limit:,} are available for it{where}. Select fewer "
            "parameters with params=, allow more with memory=, or use a solver that goes over the data in each step."
        )
