"""Passes over a data set: chunk after chunk of a Jacobian, and how many examples each chunk takes.

A `ChunkSource` gives chunks, from the network (`linnet.jacobian.chunk`) or from memory (`linnet.jacobian.cached`).
`Pass.pieces` gives the chunks, prepared for the products that are made of them: nothing else goes through the data.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor

from linnet._common import Precision, arithmetic, find_budget, show_progress
from linnet.jacobian.blocks.base import ColumnBlock, Disproved, limit_temporaries
from linnet.jacobian.blocks.composite import pack
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.cuda.replay import free_replays
from linnet.jacobian.plan import PRODUCTS, Engine, Request, choose, chunk_size, prepare, sides_size

if TYPE_CHECKING:
    from linnet.data import Batch
    from linnet.jacobian.kronecker import Rotation
    from linnet.jacobian.linearization import Linearization
    from linnet.jacobian.proofs import Truth

CONVOLVED = 4096
"""Examples that a GPU is given at once where it convolves in float32: 20,480 of ResNet-20 took it twice as long."""

NEAR, FEWEST = 2**21, 32
"""Bytes of inputs that a CPU is given at once where it convolves, so that what layers hand on stays in its cache; and
the examples that it is given at least."""

GRAM = (0.25, 1.2)
"""Shares of a pass's memory, which is half of what is free, for a chunk of a Gram matrix and for those that it meets,
whose blocks are held: the more of these, the less often all others are formed. Beside them there are two chunks."""

INTERMEDIATE = 0.125
"""The share of ``memory=``, where it is given, for an intermediate of a product, of which there are up to three. Chunks
of more examples against larger products."""

POSITIVE = ("squares", "sides")
"""Sums of squares, where nothing cancels: each chunk adds up in the dtype of the rows, and all chunks in float64."""

T = TypeVar("T")

Prepare = Callable[[ColumnBlock], ColumnBlock]
"""From a block to the form that it is wanted in."""


@dataclass
class PassSettings:
    """How passes are made, and what they have learned about memory; shared with the minibatches of a Jacobian.

    Attributes:
        batch_size: Examples per chunk, or "auto".
        memory: Bytes that a chunk may take, or "auto".
        precision: Precision of the network's passes and of the products.
        engine: Which engine serves the layers.
        progress: False for no progress bar.
        largest: Examples per chunk that an out-of-memory error has left.
        halved: How often memory ran out.
        room: Bytes that a chunk could have when they were asked for last.
        used: Examples per chunk of the last pass.
        sizes: Examples per chunk that were chosen, by kind of pass.
    """

    batch_size: int | str = "auto"
    memory: float | str = "auto"
    precision: Precision = "highest"
    engine: Engine = "auto"
    progress: bool | None = None
    largest: int | None = None
    halved: int = 0
    room: int = 0
    used: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def renewed(self) -> PassSettings:
        """The same settings for passes that have not learned anything yet."""
        return PassSettings(self.batch_size, self.memory, self.precision, self.engine, self.progress)


@dataclass(frozen=True)
class Chunk:
    """The Jacobian of a few examples, in blocks.

    Attributes:
        f: Outputs (n, c).
        blocks: Columns; those that are missing are zero.
        truth: Gradients that the columns by layer rules must reproduce; None if the chunk is not to be proved.
        signature: The calls that the network made.
    """

    f: Tensor
    blocks: list[ColumnBlock]
    truth: Truth | None = None
    signature: tuple[Any, ...] = ()

    def copy(self, *, blocks: bool) -> Chunk:
        """The chunk with a copy of its outputs and, if ``blocks``, of its columns."""
        return replace(self, f=self.f.clone(), blocks=[f.copy() for f in self.blocks] if blocks else self.blocks)

    def is_close(self, other: Chunk) -> bool:
        """Whether another chunk of the same examples differs by rounding only."""
        pairs = [(self.f, other.f)]
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            pairs += zip(mine.tensors(), theirs.tensors(), strict=True)
        close = [
            (a - b).abs().max() <= (torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0) * b.abs().max()
            for a, b in pairs
            if a.numel()
        ]
        return bool(torch.stack(close).all())


@dataclass(frozen=True)
class FirstExamples:
    """What the first examples of a data set show.

    Attributes:
        c: Outputs.
        blocks: Columns of the Jacobian of the first examples: rows of all outputs, or of the first ones of many.
        batch: One or two of the examples.
        per_example: Bytes that an example takes in a chunk.
        graph: Bytes that an example takes in the graph of the network, without blocks and rows.
        inputs: Bytes of an example that the model takes.
        rest: Bytes of an example that the model does not take, such as targets.
    """

    c: int
    blocks: list[ColumnBlock]
    batch: Batch
    per_example: int
    graph: int
    inputs: int
    rest: int

    @property
    def planned(self) -> list[ColumnBlock]:
        """The blocks as they are with all outputs, for counts of cost alone: their tensors may hold fewer outputs."""
        return [block.with_outputs(self.c) for block in self.blocks]

    @property
    def share(self) -> float:
        """The part of all outputs that the blocks hold."""
        return min((block.c for block in self.blocks), default=self.c) / self.c


@dataclass(frozen=True)
class ChunkRequest:
    """What a pass asks of its chunks.

    Attributes:
        kind: Which products are made.
        k: Columns of the products.
        prepare: Gives a block the form and the coordinates that the products want.
        along: (p, k), what the chunks will be multiplied by, where that is known before they are made.
        rotation: The coordinates of the columns; None for the coordinates of the parameters.
    """

    kind: Request
    k: int
    prepare: Prepare
    along: Tensor | None = None
    rotation: Rotation | None = None


class ChunkSource(ABC):
    """Where the chunks of a Jacobian come from: the network, or memory.

    Attributes:
        lin: The linearized network.
        settings: How passes are made.
    """

    lin: Linearization
    settings: PassSettings

    @property
    @abstractmethod
    def n(self) -> int:
        """The number of examples."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What the data is, in a few words."""

    @property
    @abstractmethod
    def by_position(self) -> bool:
        """Whether examples can be chosen."""

    @property
    @abstractmethod
    def index(self) -> Tensor:
        """Positions of the examples in the full data, (n,)."""

    @property
    @abstractmethod
    def first(self) -> FirstExamples:
        """What the first examples show."""

    @abstractmethod
    def chunks(self, size: int, start: int, stop: int, request: ChunkRequest) -> Iterator[tuple[Batch, Chunk]]:
        """Chunks of at most ``size`` examples that cover examples start to stop."""

    @abstractmethod
    def subset(self, index: Tensor, size: int) -> ChunkSource:
        """The examples at ``index`` (m,), in that order; chunks in memory are copied, ``size`` examples at a time."""

    @abstractmethod
    def rests(self, size: int) -> Iterator[Any]:
        """What came with the inputs in the data, batch by batch."""

    def by_columns(self, kind: Request, k: int) -> bool:
        """Whether a pass is left to autodiff alone, which holds no rows."""
        return False

    @property
    @abstractmethod
    def in_memory(self) -> bool:
        """Whether passes touch neither the network nor the data."""

    @abstractmethod
    def with_settings(self, settings: PassSettings) -> ChunkSource:
        """The same chunks with other settings."""

    @abstractmethod
    def with_lin(self, lin: Linearization) -> ChunkSource:
        """The same chunks for products in another dtype."""

    @abstractmethod
    def begin(self) -> None:
        """Check, before a pass, that all ranks have the same weights and data, and that the network can be run."""

    @abstractmethod
    def forget_proofs(self) -> None:
        """Compare all chunks anew: a pass broke off, and not all of its chunks were compared."""


@dataclass(frozen=True)
class Piece:
    """A chunk, ready for one kind of request.

    Attributes:
        batch: The examples.
        f: Their outputs (n, c).
        blocks: Columns of the Jacobian.
        rows: The rows of the Jacobian that the chunk covers.
    """

    batch: Batch
    f: Tensor
    blocks: list[ColumnBlock]
    rows: slice


@final
class Pass:
    """Goes over the chunks of a Jacobian.

    Args:
        chunks: Where the chunks come from.
        rotation: The coordinates of the columns; None for the coordinates of the parameters.
    """

    def __init__(self, chunks: ChunkSource, rotation: Rotation | None = None) -> None:
        self.chunks, self.rotation = chunks, rotation
        self.lin, self.settings, self.n = chunks.lin, chunks.settings, chunks.n

    @property
    def own(self) -> tuple[int, int]:
        """Start and stop of the examples of this rank."""
        return self.lin.ranks.own(self.n)

    def pieces(
        self,
        kind: Request,
        k: int,
        label: str,
        *,
        start: int | None = None,
        stop: int | None = None,
        along: Tensor | None = None,
        room: int | None = None,
    ) -> Iterator[Piece]:
        """The chunks of a pass, each prepared for a kind of products with k columns.

        Args:
            kind: Which products.
            k: Columns of the products.
            label: Label of the progress bar; "" for none.
            start: First example; by default of this rank.
            stop: End of the examples; by default of this rank.
            along: (p, k), what the chunks will be multiplied by, where that is known before they are made.
            room: Bytes of a Gram matrix's pass, where more than its chunks has to fit into them.
        """
        s, c = self.settings, self.chunks.first.c
        if kind == "gram":
            size = self.gram_chunk_size(room)
        else:
            columns = self.rotation is None and self.chunks.by_columns(kind, k)
            size = self.chunk_size(columns=columns, sides=kind == "sides")
        s.used = size
        first, last = (self.own[0] if start is None else start), (self.own[1] if stop is None else stop)
        request = ChunkRequest(kind, k, self.prepare_for(kind, k), along, self.rotation)
        with show_progress(max(0, last - first), label, progress=s.progress if label else False) as tick:
            for batch, chunk in self.chunks.chunks(size, first, last, request):
                blocks = pack(chunk.blocks) if kind in PRODUCTS else chunk.blocks
                made = [Piece(batch, chunk.f, blocks, slice(batch.start * c, (batch.start + batch.n) * c))]
                del chunk, blocks  # the caller's alone, who may be done with it when the next one is formed
                yield made.pop()
                tick(batch.n)

    def prepare_for(self, kind: Request, k: int) -> Prepare:
        """Prepares a block for a kind of products, in the coordinates and the dtype of this pass."""
        rotation, rounds = self.rotation, kind == "gram" and self._in_tf32
        rows = self.lin.network.row_dtype
        dtype = rows if kind in POSITIVE else self.lin.dtype
        wide = self.lin.model_dtype == rows != dtype  # half precision is multiplied as it is

        def ready(block: ColumnBlock) -> ColumnBlock:
            block = block if rotation is None else rotation(block.widen(), whole=kind in ("diag", "squares"))
            if wide:  # so that rows, bilinear products and ghost products are of the same numbers
                block = block.in_dtype(dtype)
            block = prepare(block, kind, k=k, engine=self.settings.engine).in_dtype(dtype)
            return block.rounded() if rounds else block

        return ready

    @property
    def _in_tf32(self) -> bool:
        """Whether products of blocks are made by tensor cores, which cut off the last bits of what they are given."""
        exact = self.lin.device.type != "cuda" or self.lin.dtype != torch.float32
        return not exact and self.settings.precision in ("products", "high")

    # How many examples make a chunk.

    def chunk_size(self, *, columns: bool = False, sides: bool = False) -> int:
        """Examples per chunk.

        Args:
            columns: For passes that hold the network's graph and its tangents only.
            sides: For passes that hold both sides of all outer products.
        """
        s, first = self.settings, self.chunks.first
        if isinstance(s.batch_size, int):
            size = min(s.batch_size, self.n)
        else:
            each = min(first.per_example, 3 * first.graph) if columns else first.per_example
            if sides and not isinstance(s.memory, str):  # what is free has room for them
                each += sides_size(first.planned, self.lin.dtype.itemsize)
            if 8 * self.n * each > s.room:  # a minibatch that is small beside it need not ask again
                s.room = find_budget(s.memory, self.lin.device)
            size = self._settle(f"{columns} {sides} {self.n}", each, s.room)
            if columns and self.lin.network.has_convolutions:
                size = min(size, ceil(self.n / max(1, round(self.n / self._convolved))))
        return size if s.largest is None else min(size, s.largest)

    @property
    def chunk_room(self) -> int:
        """Bytes that one chunk may take."""
        return find_budget(self.settings.memory, self.lin.device)

    def _settle(self, kind: str, each: int, room: int, share: float = 1.0) -> int:
        """Examples of ``each`` bytes per chunk, in a share of the room.

        Chunks keep the size that they had before while it fits and is no less than half: the same chunks are proved
        once.
        """
        size, known = chunk_size(self.n, each, int(share * room)), self.settings.sizes.get(kind, 0)
        if not known * each <= room or not size < 2 * known:
            self.settings.sizes[kind] = size
        return self.settings.sizes[kind]

    @property
    def _convolved(self) -> int:
        """Examples that are best convolved at once, about: half as many more are no matter."""
        if self.lin.network.device.type == "cpu":
            return max(FEWEST, NEAR // max(1, self.chunks.first.inputs))
        return CONVOLVED if self.lin.network.convolves_exactly(self.settings.precision) else self.n

    @property
    def gram_room(self) -> int:
        """Bytes of which chunks of a Gram matrix take their shares: all that they take fits into ``memory=``."""
        room = self.chunk_room
        if isinstance(self.settings.memory, str):
            return room
        return int((1 - 3 * INTERMEDIATE) * room / (GRAM[1] + 2 * GRAM[0]))

    def gram_chunk_size(self, room: int | None = None) -> int:
        """Examples per chunk of a Gram matrix: several chunks, so that its symmetry halves the work."""
        s = self.settings
        if isinstance(s.batch_size, int):
            size = min(s.batch_size, self.n)
        else:
            room = self.gram_room if room is None else room
            one = self.n * self._gram_example <= room  # a single chunk meets only itself
            size = self._settle(f"gram {self.n}", self._gram_example, room, 1.0 if one else GRAM[0])
            size = min(size, max(512, ceil(self.n / 16)))
        return size if s.largest is None else min(size, s.largest)

    @property
    def _gram_example(self) -> int:
        """Bytes of an example in a Gram matrix's chunk: not all of its blocks become rows."""
        spared, first = 0, self.chunks.first
        for f in first.planned:
            if choose(f, "gram", k=1, engine=self.settings.engine) == "ghost" and not isinstance(f, EmbeddingBlock):
                sides = f.size.groups * f.size.T * (f.size.dx + f.c * f.size.dg) if isinstance(f, LazyBlock) else 0
                spared += max(0, f.c * f.q - sides)
        return max(1, first.per_example - spared * self.lin.dtype.itemsize)

    # Out of memory, or with other numbers than reverse mode.

    def complete(self, run: Callable[[], T], *others: Pass) -> T:
        """The result of a pass; out of memory on the GPU, it starts again with half the chunk (and the others')."""
        with self.lin.together():
            return self._try_until_done(run, others)

    def _try_until_done(self, run: Callable[[], T], others: Sequence[Pass]) -> T:
        s, device = self.settings, self.lin.device
        self.chunks.begin()
        given = None if isinstance(s.memory, str) else int(INTERMEDIATE * s.memory / self.lin.dtype.itemsize)
        while True:
            try:
                with arithmetic(s.precision, device), limit_temporaries(given):
                    return run()
            except Disproved as found:
                self.lin.rules.deny(found.ability)
                self.chunks.forget_proofs()
            except torch.OutOfMemoryError:
                if free_replays():
                    torch.cuda.empty_cache()
                    continue
                size = s.used or self.chunk_size()
                if size == 1 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                    raise
                if s.largest is None:
                    warnings.warn(
                        f"linnet ran out of memory with chunks of {size} examples and goes on with smaller ones; "
                        "pass memory= or batch_size= to choose them.",
                        stacklevel=5,
                    )
                for other in others:
                    other.settings.largest = max(1, other.chunk_size() // 2)
                s.largest = s.used = max(1, size // 2)
                s.halved += 1
            except BaseException:
                self.chunks.forget_proofs()
                raise
            if device.type == "cuda":
                torch.cuda.empty_cache()
