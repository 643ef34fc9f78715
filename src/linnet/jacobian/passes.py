"""Passes over a data set: the chunks of a Jacobian, how many examples each takes, and what they are made of.

`Passes._pieces` gives chunk after chunk, prepared for what is asked of it: nothing else goes through the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linnet._common import messages
from linnet._common.deferred import Deferred
from linnet._common.distributed import check_ranks_agree, rank_and_world, shard
from linnet._common.memory import budget
from linnet._common.progress import bar
from linnet._common.torch_settings import Precision, arithmetic, check_precision, noting_saved_tensors
from linnet.data.batch import Batch, Source
from linnet.jacobian.blocks.autodiff import Autodiff
from linnet.jacobian.blocks.base import Factor, Rows
from linnet.jacobian.blocks.composite import Lazy, pack
from linnet.jacobian.blocks.embedding_table import Tokens
from linnet.jacobian.blocks.outer_product import Outer
from linnet.jacobian.chunk import Chunk, Prepare
from linnet.jacobian.kronecker import Rotation
from linnet.jacobian.linearization import Linearization
from linnet.jacobian.plan import (
    PLAN_COLUMNS,
    PRODUCTS,
    Engine,
    Line,
    Plan,
    Request,
    autodiff_wins,
    check_engine,
    choose,
    chunk_size,
    fused_cost,
    prepare,
    working_size,
)
from linnet.jacobian.proofs import Apart, Disproved, Proofs, RandomState
from linnet.jacobian.rule_selection import PROBE
from linnet.linalg.operator import LinearOperator
from linnet.network import checks

CONVOLVED = 4096
"""Examples that a GPU is given at once where it convolves in float32: 20,480 of ResNet-20 took it twice as long."""

NEAR, FEWEST = 2**21, 32
"""Bytes of inputs that a CPU is given at once where it convolves, so that what layers hand on stays in its cache; and
the examples that it is given at least."""

GRAM = (0.25, 1.2)
"""Shares of a pass's memory, which is half of what is free, for a chunk of a Gram matrix and for those that it meets,
whose factors are held: the more of these, the less often all others are formed. Beside them there are two chunks."""

AGAIN = 2**24
"""Bytes of the network's graph up to which all examples of a new chunk, at most 64, are run once more in other batches;
of larger chunks it is a sixteenth. Certainty against the time of a first pass."""

T = TypeVar("T")


@dataclass
class Passing:
    """How passes are made; shared with the minibatches of a Jacobian."""

    batch_size: int | str
    memory: float | str
    precision: Precision
    engine: Engine
    progress: bool | None
    per_example: int = 1
    graph: int = 1  # bytes of an example that the network's own graph takes, without factors and rows
    inputs: int = 0  # bytes of an example that the model takes
    rest: int = 0  # bytes of an example that are not the model's, such as targets
    largest: int | None = None  # what an out-of-memory error has left
    halved: int = 0  # how often there was one
    room: int = 0  # bytes that a chunk could have when they were asked for last
    used: int = 0  # examples per chunk of the last pass
    sizes: dict[str, int] = field(default_factory=dict)  # examples per chunk that were chosen, by kind of pass


@dataclass(frozen=True)
class Piece:
    """A chunk, ready for one kind of request."""

    batch: Batch
    f: Tensor
    factors: list[Factor]


class _Results(TorchFunctionMode):
    """Notes every tensor that a torch function returns."""

    def __init__(self, note: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.note(out)
        return out


class Passes(LinearOperator):
    """What `linnet.jacobian.jacobian.Jacobian` is made of.

    Attributes:
        n: Examples.
        c: Outputs.
    """

    _rotation: Rotation | None = None  # of the columns
    _late: Deferred | None = None  # where outputs are checked, if not in every pass
    _proofs: Proofs  # which chunks have been compared with reverse mode
    _agreed = False  # whether the ranks have found that they have the same weights and data

    def __init__(
        self,
        lin: Linearization,
        source: Source,
        *,
        batch_size: int | str = "auto",
        memory: float | str = "auto",
        precision: Precision = "highest",
        engine: str = "auto",
        progress: bool | None = None,
    ) -> None:
        check_precision(precision)
        check_engine(engine)
        messages.check_batch_size(batch_size)
        budget(memory, lin.device)
        self._settings = Passing(batch_size, memory, precision, engine, progress)  # type: ignore[arg-type]
        self.lin, self._source = lin, source
        self._proofs = Proofs()
        self.n = source.n
        first = next(iter(source.batches(min(PROBE, source.n)))).to(lin.device)
        chunk = self._first(first)
        self.c = chunk.f.shape[1]
        super().__init__((self.n * self.c, lin.p), dtype=lin.dtype, device=lin.device)
        self.block = self.c

    def _first(self, batch: Batch) -> Chunk:
        """Check the model on the first examples and measure what an example takes."""
        self.lin.check_unchanged()
        sizes: dict[tuple[int, int], int] = {}
        own = {t.untyped_storage().data_ptr() for t in self.lin.theta.values()}

        def note(t: Tensor) -> Tensor:
            try:
                storage = t.untyped_storage()
                place, size = (storage.data_ptr(), int(t.storage_offset())), min(storage.nbytes(), t.nbytes)
            except (RuntimeError, NotImplementedError):  # a sparse tensor, or one inside a torch.func transform
                place, size = (id(t), -1), t.numel() * t.element_size()
            if place[0] not in own:
                # A view counts as itself: the first examples may be a part of all data.
                sizes[place] = max(sizes.get(place, 0), size)
            return t.detach()  # an output that its own graph saved would never be freed

        self.lin.rules.assign(batch)
        try:
            with noting_saved_tensors(note):
                chunk = self.lin.chunks.build_by_rules(batch, self._settings.precision)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            with _Results(note):  # torch.func inside the network allows no hooks: all results are about as much
                chunk = self.lin.chunks.build_by_rules(batch, self._settings.precision)
        checks.check_outputs_finite(chunk.f, batch.start)
        self._settings.graph = max(1, sum(sizes.values()) // batch.n)
        for factor in chunk.factors:
            for t in factor.tensors():
                note(t)
        working = working_size(chunk.factors, self.lin.dtype.itemsize)
        self._settings.per_example = sum(sizes.values()) // batch.n + working
        self._settings.inputs, self._settings.rest = batch.input_bytes // batch.n, batch.rest_bytes // batch.n
        self._sample, self._probe = chunk.factors, batch.part(0, min(2, batch.n))
        return chunk

    # The loop.

    @property
    def _own(self) -> tuple[int, int]:
        return shard(self.n, *rank_and_world())

    def _rows(self, piece: Piece) -> slice:
        start = piece.batch.start * self.c
        return slice(start, start + piece.batch.n * self.c)

    def _batches(self, size: int, start: int | None = None, stop: int | None = None) -> Iterator[Batch]:
        self.lin.check_unchanged()
        own = self._own
        first, last = own[0] if start is None else start, own[1] if stop is None else stop
        if last > first:
            for batch in self._source.batches(size, first, last):
                yield batch.to(self.device)

    def _pieces(
        self,
        request: Request,
        k: int,
        label: str,
        *,
        start: int | None = None,
        stop: int | None = None,
        along: Tensor | None = None,
        room: int | None = None,
    ) -> Iterator[Piece]:
        """The chunks of a pass, each prepared for a request.

        ``along`` (p, k) is what the chunks will be multiplied by, where that is known before they are made; ``room``
        the bytes of a Gram matrix's pass, where more than its chunks has to fit into them.
        """
        s = self._settings
        size = self._gram_chunk(room) if request == "gram" else self._chunk(columns=self._by_columns(request, k))
        s.used = size
        first, last = (self._own[0] if start is None else start), (self._own[1] if stop is None else stop)
        with bar(max(0, last - first), label, progress=s.progress if label else False) as tick:
            for batch, chunk in self._chunks(size, first, last, request, k, along):
                factors = pack(chunk.factors) if request in PRODUCTS else chunk.factors
                made = [Piece(batch, chunk.f, factors)]
                del chunk, factors  # the caller's alone, who may be done with it when the next one is formed
                yield made.pop()
                tick(batch.n)

    def _chunks(
        self, size: int, start: int, stop: int, request: Request, k: int, along: Tensor | None
    ) -> Iterator[tuple[Batch, Chunk]]:
        for batch in self._batches(size, start, stop):
            made = [self._chunk_of(batch, request, k, along)]
            f = made[0].f
            yield batch, made.pop()
            # After the chunk's work is queued, so that a GPU does not wait for the answer.
            if self._late is None:
                checks.check_outputs_finite(f, batch.start, batch.positions)
            else:
                self._late.add(f, batch.index)

    def _chunk_of(self, batch: Batch, request: Request, k: int, along: Tensor | None) -> Chunk:
        s, lin = self._settings, self.lin
        product = request in PRODUCTS
        ready = self._ready(request, k)
        auto = s.engine == "auto" and product and self._rotation is None
        autodiff = s.engine == "autodiff" or (auto and autodiff_wins(request, k=k, c=self.c))
        # Reverse mode adds up over the examples, which half precision is too short for.
        backward = request == "rmatmul" and lin.model_dtype == lin.dtype
        forward = autodiff and product and not backward and lin.rules.can("forward_mode", batch)
        if s.engine == "autodiff" or (autodiff and (backward or forward)):
            graph = backward or (forward and request == "fused")
            way = "backward" if backward else f"forward, {request}, {k > 1}" if forward else "rows"

            make = partial(lin.chunks.build_by_autodiff, batch, s.precision, columns=forward, graph=graph, along=along)
            return self._proved(way, batch, partial(make, prepare=ready))
        few = product and (k <= self.c or not lin.rules.can("vectorize", batch)) if lin.rules.has_rest else False
        return self._by_rules(batch, ready, columns=few)

    def _whole_chunk(self, batch: Batch) -> Chunk:
        """A chunk in the parameters' own coordinates, prepared for nothing."""
        if self._settings.engine != "autodiff":
            return self._by_rules(batch)
        return self._proved("rows", batch, partial(self.lin.chunks.build_by_autodiff, batch, self._settings.precision))

    def _by_rules(self, batch: Batch, ready: Prepare | None = None, *, columns: bool = False) -> Chunk:
        """A chunk by layer rules, without those that gave other numbers than reverse mode."""
        rotation = None if ready is None else self._rotation
        make_chunk = partial(self.lin.chunks.build_by_rules, batch, self._settings.precision, columns=columns)
        if ready is not None:
            make_chunk = partial(make_chunk, prepare=ready)

        def make(prove: Apart | None) -> Chunk:
            while True:
                chunk = make_chunk(prove=prove)
                if chunk.truth is None or not chunk.truth.judges:
                    return chunk
                rest = self.lin.rules.last.rest  # autodiff's columns are compared when they are used
                own = {self.lin.layout.offsets[name] for name in rest}
                ruled = [f for f in chunk.factors if f.ranges[0][0] not in own]
                wrong, *mixed = (names.difference(rest) for names in chunk.truth.disagreeing(ruled, rotation))
                if not wrong:
                    if any(mixed):
                        raise checks.examples_interact(batch.start, batch.n)
                    return replace(chunk, truth=None)
                self.lin.rules.doubt(chunk.signature, [name for name in self.lin.theta if name in wrong])

        return self._proved("rules, columns" if columns else "rules", batch, make)

    def _proved(self, way: str, batch: Batch, make: Callable[..., Chunk]) -> Chunk:
        """A chunk that is compared with reverse mode and with other batches where it is new."""
        new = self._source.changes or self._proofs.claim(way, batch)
        first = new and (self._source.changes or self._proofs.claim("derivatives", batch))
        with self._outputs_proved(batch, derivatives=first) as (made, apart):
            chunk = make(prove=(apart or Apart([], None, False)) if new else None)
            made.append(chunk.f)
        return chunk

    @contextmanager
    def _outputs_proved(
        self, batch: Batch, *, derivatives: bool = False
    ) -> Iterator[tuple[list[Tensor], Apart | None]]:
        """Compares the outputs that are put into the list with those in other batches, if the chunk is new."""
        made: list[Tensor] = []
        if not derivatives and not self._proofs.claim("outputs", batch):
            yield made, None
            return
        self._proofs.claim("outputs", batch)
        before = RandomState(self.device)
        few = max(2, min(64, AGAIN // self._settings.graph))
        apart = self.lin.rules.apart(batch, self._settings.precision, few=few, derivatives=derivatives)
        yield made, apart
        random = apart.draws or before.moved()
        self.lin.rules.check_outputs(batch, made[0], self._settings.precision, apart, random=random)

    def _ready(self, request: Request, k: int) -> Callable[[Factor], Factor]:
        """Prepares a factor for a request, in the coordinates of this Jacobian."""
        rotation, rounds = self._rotation, request == "gram" and self._in_tf32

        def ready(factor: Factor) -> Factor:
            factor = factor if rotation is None else rotation(factor)
            factor = prepare(factor, request, k=k, engine=self._settings.engine)
            return factor.rounded() if rounds else factor

        return ready

    @property
    def _in_tf32(self) -> bool:
        """Whether products of factors are made by tensor cores, which cut off the last bits of what they are given."""
        exact = self.device.type != "cuda" or self.dtype != torch.float32
        return not exact and self._settings.precision in ("products", "high")

    def _by_columns(self, request: Request, k: int) -> bool:
        """Whether `_chunk_of` will leave a pass to autodiff alone, which holds no rows."""
        s, lin = self._settings, self.lin
        if s.engine != "auto" or request not in PRODUCTS or self._rotation is not None or not hasattr(self, "_probe"):
            return False
        if not autodiff_wins(request, k=k, c=self.c):
            return False
        return (request == "rmatmul" and lin.model_dtype == lin.dtype) or lin.rules.can("forward_mode", self._probe)

    def _chunk(self, *, columns: bool = False) -> int:
        """Examples per chunk; with ``columns`` of passes that hold the network's graph and its tangents only."""
        s = self._settings
        if isinstance(s.batch_size, int):
            size = min(s.batch_size, self.n)
        else:
            each = min(s.per_example, 3 * s.graph) if columns else s.per_example
            if 8 * self.n * each > s.room:  # a minibatch that is small beside it need not ask again
                s.room = budget(s.memory, self.device)
            size = self._settled(f"{columns} {self.n}", chunk_size(self.n, each, s.room))
            if columns and self.lin.network.has_convolutions:
                size = min(size, ceil(self.n / max(1, round(self.n / self._convolved))))
        return size if s.largest is None else min(size, s.largest)

    def _settled(self, kind: str, size: int) -> int:
        """The size that chunks had before, unless memory has shrunk or doubled: the same chunks are proved once."""
        known = self._settings.sizes.get(kind, 0)
        if not known <= size < 2 * known:
            self._settings.sizes[kind] = size
        return self._settings.sizes[kind]

    @property
    def _convolved(self) -> int:
        """Examples that are best convolved at once, about: half as many more are no matter."""
        if self.lin.network.device.type == "cpu":
            return max(FEWEST, NEAR // max(1, self._settings.inputs))
        return CONVOLVED if self.lin.network.convolves_exactly(self._settings.precision) else self.n

    def _gram_chunk(self, room: int | None = None) -> int:
        """Chunks of a Gram matrix: several, so that its symmetry halves the work."""
        s = self._settings
        if isinstance(s.batch_size, int):
            size = min(s.batch_size, self.n)
        else:
            room = budget(s.memory, self.device) if room is None else room
            size = min(chunk_size(self.n, self._gram_example, int(GRAM[0] * room)), max(512, ceil(self.n / 16)))
            size = self._settled(f"gram {self.n}", size)
        return size if s.largest is None else min(size, s.largest)

    @property
    def _gram_example(self) -> int:
        """Bytes of an example in a Gram matrix's chunk: not all of its factors become rows."""
        s, spared = self._settings, 0
        for f in self._sample:
            if choose(f, "gram", k=1, engine=s.engine) == "ghost" and not isinstance(f, Tokens):
                sides = f.size.groups * f.size.T * (f.size.dx + f.c * f.size.dg) if isinstance(f, Lazy) else 0
                spared += max(0, f.c * f.q - sides)
        return max(1, s.per_example - spared * self.dtype.itemsize)

    def _completed(self, run: Callable[[], T], *others: Passes) -> T:
        """The result of a pass; out of memory on the GPU, it starts again with half the chunk (and the others')."""
        if not self._agreed:
            self._agreed = True
            check_ranks_agree(self.lin, self._source)
        while True:
            try:
                with arithmetic(self._settings.precision, self.device):
                    return run()
            except Disproved as found:
                self.lin.rules.deny(found.ability)
                self._proofs.forget()
            except torch.OutOfMemoryError:
                size = self._settings.used or self._chunk()
                if size == 1 or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                    raise
                if self._settings.largest is None:
                    warnings.warn(
                        f"linnet ran out of memory with chunks of {size} examples and goes on with smaller ones; "
                        "pass memory= or batch_size= to choose them.",
                        stacklevel=4,
                    )
                for other in others:
                    other._settings.largest = max(1, other._chunk() // 2)
                self._settings.largest = self._settings.used = max(1, size // 2)
                self._settings.halved += 1
            except BaseException:
                self._proofs.forget()
                raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    # What it is made of.

    @property
    def plan(self) -> Plan:
        """Which engine serves each layer, chunk and memory; print it."""
        return self._plan()

    @property
    def _kind(self) -> str:
        return self._source.kind

    def _by_layer(self, factor: Factor) -> list[tuple[str, Factor]]:
        """The factor cut into its layers' columns."""
        layers = [self._layer_at(r[0]) for r in factor.ranges]
        if len(set(layers)) == 1:
            return [(layers[0], factor)]
        if isinstance(factor, Outer):
            one = Outer(factor.x, factor.g, weight=factor.weight, swapped=factor.swapped)
            two = Outer(factor.x, factor.g, weight=None, bias=factor.bias)
            return [(layers[0], one), (layers[1], two)]
        rows = factor.expand()
        return [(layer, Rows([r], [part])) for layer, r, part in zip(layers, rows.ranges, rows.parts, strict=True)]

    def _layer_at(self, position: int) -> str:
        for layer, names in self.lin.layout.layers.items():
            for name in names:
                where = self.lin.layout.slices[name]
                if where.start <= position < where.stop:
                    return layer
        raise AssertionError(position)

    def _plan(self) -> Plan:
        s, lin = self._settings, self.lin
        structure = lin.rules.last
        found: dict[str, tuple[int, set[str], set[str]]] = {}
        costs: dict[str, float] = {}
        for factor in self._sample:
            for layer, part in self._by_layer(factor) if not isinstance(factor, Autodiff) else ():
                uses, products, gram = found.get(layer, (0, set(), set()))
                products = products | {choose(part, "fused", k=PLAN_COLUMNS, engine=s.engine)}
                gram = gram | {choose(part, "gram", k=1, engine=s.engine)}
                found[layer] = (max(uses, part.size.T), products, gram)
                costs[layer] = costs.get(layer, 0) + fused_cost(part, k=PLAN_COLUMNS, engine=s.engine)
        lines = []
        for layer, names in lin.layout.layers.items():
            rules = dict.fromkeys(structure.rules.get(name, "") for name in names)
            unused = all(name in structure.unused for name in names)
            rest = any(name in structure.rest for name in names)
            uses, products, gram = found.get(layer, (0, set(), set()))
            if s.engine == "autodiff":
                products, gram = {"autodiff"}, {"autodiff rows"}
            elif rest:
                products, gram = products | {"autodiff"}, gram | {"autodiff rows"}
            lines.append(
                Line(
                    layer=layer,
                    rule=" + ".join(r for r in rules if r) or ("unused" if unused else "none"),
                    parameters=sum(lin.layout.shapes[name].numel() for name in names),
                    uses=uses,
                    products=", ".join(sorted(products)) or "zero",
                    gram=", ".join(sorted(gram)) or "zero",
                    cost=None if rest or s.engine == "autodiff" else costs.get(layer, 0),
                )
            )
        world = rank_and_world()[1]
        note = f"{str(self.dtype).removeprefix('torch.')} on {self.device}, precision {s.precision}"
        return Plan(
            lines=tuple(lines),
            shape=self.shape,
            n=self.n,
            c=self.c,
            chunk=self._chunk(),
            per_example=s.per_example,
            budget=budget(s.memory, self.device),
            data=self._kind,
            note=note if world == 1 else f"{note}, {world} ranks",
        )
