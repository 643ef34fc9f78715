"""The Jacobian of a few examples in blocks, made by the network.

A `ChunkBuilder` makes the blocks of one batch, by layer rules where they serve and by torch's autodiff elsewhere.
`NetworkChunks` makes the chunks of a data set with it, and compares each chunk with reverse mode when it is new.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linnet._common import Deferred, Precision, find_budget, forward_mode, noting_saved_tensors
from linnet.data import Batch, Source
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.blocks.autodiff import AutodiffBlock, SharedOutputs
from linnet.jacobian.blocks.base import ColumnBlock, Recipe
from linnet.jacobian.blocks.composite import combine
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.cuda.replay import Loan, Replays, can_record, try_unwatched
from linnet.jacobian.layers.rule import LayerCall, LayoutError, Rule, Slot
from linnet.jacobian.passes import Chunk, ChunkRequest, ChunkSource, FirstExamples, PassSettings, Prepare
from linnet.jacobian.plan import PRODUCTS, Request, autodiff_wins, working_size
from linnet.jacobian.proofs import PROBE, OtherBatches, RandomState, Truth
from linnet.jacobian.recording import RecordedCall, Recording, ServedCall, build_blocks, gradients, streamed
from linnet.network import address, check_outputs_finite, examples_interact

if TYPE_CHECKING:
    from linnet.jacobian.kronecker import Rotation
    from linnet.jacobian.linearization import Linearization
    from linnet.jacobian.rule_selection import RuleAssignment, RuleSelection
    from linnet.network import FunctionalModel

AGAIN = 2**24
"""Bytes of the network's graph up to which all examples of a new chunk, at most 64, are run once more in other batches;
of larger chunks it is a sixteenth. Certainty against the time of a first pass."""

ALL_OUTPUTS, FEW_OUTPUTS = 64, 8
"""Up to the first number of outputs, the first examples are differentiated in all of them, and with more outputs in the
second number of them: what a chunk takes is counted from these. The time of a first pass against its exact size."""

NOTHING = nullcontext()

Judge = Callable[[], Truth]
"""Gives what reverse mode says of a chunk."""


@final
class ChunkBuilder:
    """Turns a batch into the columns of its Jacobian.

    Args:
        network: The network.
        rules: Which layer rules serve the calls of the network.
    """

    def __init__(self, network: FunctionalModel, rules: RuleSelection) -> None:
        self.network, self.rules = network, rules

    def build_by_autodiff(
        self,
        batch: Batch,
        precision: Precision,
        *,
        columns: bool = False,
        graph: bool = False,
        along: Tensor | None = None,
        prepare: Prepare = lambda block: block,
        prove: OtherBatches | None = None,
    ) -> Chunk:
        """The Jacobian of a batch by torch's autodiff alone.

        Args:
            batch: The examples, on the device of the network.
            precision: Precision of the network's passes.
            columns: Products go column by column.
            graph: Keep the forward pass for the backward pass of a product.
            along: (p, k), what the blocks will be multiplied by; with ``columns`` and ``graph`` the forward pass gives
                the product with its first column too.
            prepare: Applied to the block.
            prove: Some of the examples in other batches, if the columns are to be compared with reverse mode. The
                columns are compared when they are used.
        """
        net = self.network
        leaves: dict[str, Tensor] = {
            name: nn.Parameter(t.detach(), requires_grad=graph) for name, t in net.theta.items()
        }
        known = shared = None
        with net.in_precision(precision), torch.enable_grad() if graph else torch.no_grad():
            if along is None or not along.shape[1] or not (columns and graph):
                f = net.forward(leaves, batch)
            else:
                views = net.layout.unflatten(along[:, 0])
                # With memory of their own, in one call: forward mode copies views, one by one and zeros first.
                copies = zip(net.theta.items(), torch._foreach_mul(list(views.values()), 1.0), strict=True)
                tangent = {name: t.to(like.dtype) for (name, like), t in copies}
                shared = SharedOutputs() if along.shape[1] > 1 else None
                with forward_mode(net.module), nullcontext() if shared is None else shared:
                    f, product = autodiff.dual(lambda theta: net.forward(theta, batch), leaves, tangent)
                known = along, product.detach().to(net.dtype)
        kept = (f, leaves) if graph else None
        judge: Judge | None = None if prove is None else partial(self.rules.judge, None, batch, precision, prove)
        names, c = tuple(net.theta), f.shape[1]
        seed = None if prove is None else prove.truth
        block = self._autodiff(names, batch, c, precision, columns, judge, seed, kept, known, shared)
        return Chunk(f.detach().to(net.dtype), [prepare(block)])

    def build_by_rules(
        self,
        batch: Batch,
        precision: Precision,
        *,
        columns: bool = False,
        few: bool = False,
        prepare: Prepare = lambda block: block,
        prove: OtherBatches | None = None,
    ) -> Chunk:
        """The Jacobian of a batch by layer rules, and by autodiff where no rule serves.

        Args:
            batch: The examples, on the device of the network.
            precision: Precision of the network's passes.
            columns: Products of autodiff go column by column.
            few: Of many outputs the layer rules make the rows of the first few alone.
            prepare: Applied to each block as soon as it is there, so that what it was made of can be freed.
            prove: Some of the examples in other batches, if the columns are to be compared with reverse mode. The
                columns of autodiff are compared when they are used, the columns of layer rules by the caller, with the
                chunk's ``truth``.
        """
        prepare = self._without_autocast(prepare)
        with self.network.in_precision(precision):
            recording = self.rules.record(batch, watched=prove is not None)
            assignment = self.rules.assign_to(recording, batch)
            if assignment.changes.spread != recording.changes.spread:
                recording = self.rules.record(batch, assignment.changes)
            truth = None if prove is None else self.rules.judge(recording, batch, precision, prove)
            signature = recording.signature
            f = recording.out.detach().to(self.network.dtype)
            blocks = self._streamed(recording, assignment, batch, prepare)
            if blocks is None:
                if not recording.uses:  # emptied by a stream that broke off
                    recording = self.rules.record(batch, assignment.changes)
                blocks, assignment = self._captured(recording, assignment, batch, prepare, few)
        if assignment.rest:
            judge = None if truth is None else partial(_same, truth)
            seed = None if prove is None else prove.truth
            blocks.append(prepare(self._autodiff(assignment.rest, batch, f.shape[1], precision, columns, judge, seed)))
        return Chunk(f, blocks, truth, signature)

    def _without_autocast(self, prepare: Prepare) -> Prepare:
        """The same outside of bf16's autocast: products of blocks are float32."""
        kind = self.network.device.type

        def prepared(block: ColumnBlock) -> ColumnBlock:
            if not torch.is_autocast_enabled(kind):
                return prepare(block)
            with torch.autocast(kind, enabled=False):
                return prepare(block)

        return prepared

    def _streamed(
        self, recording: Recording, assignment: RuleAssignment, batch: Batch, prepare: Prepare
    ) -> list[ColumnBlock] | None:
        """The blocks of a chunk with one output, each prepared during the backward pass; None if that cannot be."""
        if not assignment.streams or recording.out.shape[1] > 1 or not recording.out.requires_grad:
            return None
        if self.network.device.type != "cpu":  # a GPU would wait for Python between the layers
            return None
        uses: list[RecordedCall | None] = [use for use, k in zip(recording.uses, assignment.kept, strict=True) if k]
        kept = [k for k in assignment.kept if k]
        names = Counter(slot.name for k in kept for slot in k.slots.values())
        blocks: list[ColumnBlock] = []
        shared: list[ColumnBlock] = []

        def take(i: int, use: RecordedCall, g: Tensor) -> None:
            found = _build_blocks(use, kept[i], g, n=batch.n, dtype=self.network.row_dtype)
            if any(names[slot.name] > 1 for slot in kept[i].slots.values()):
                shared.extend(found)
            else:
                blocks.extend(prepare(block) for block in found)

        recording.uses.clear()
        try:
            assignment.streams = streamed(recording.out, uses, take)
        except LayoutError:
            assignment.streams = False
        if not assignment.streams:
            return None
        return blocks + [prepare(block) for block in combine(shared)]

    def _captured(
        self,
        recording: Recording,
        assignment: RuleAssignment,
        batch: Batch,
        prepare: Prepare,
        few: bool = False,
    ) -> tuple[list[ColumnBlock], RuleAssignment]:
        out = recording.out
        pairs = [(use, kept) for use, kept in zip(recording.uses, assignment.kept, strict=True) if kept]
        c = out.shape[1]
        rows = FEW_OUTPUTS if few and c > ALL_OUTPUTS else c
        seeds = torch.eye(rows, c, dtype=out.dtype, device=out.device)[:, None].expand(-1, len(out), -1)
        grads = gradients(out, [use for use, _ in pairs], seeds, batched=assignment.batched)
        blocks: list[ColumnBlock] = []
        for (use, kept), g in zip(pairs, grads, strict=True):
            if g is None:
                continue
            try:
                blocks += _build_blocks(use, kept, g, n=batch.n, dtype=self.network.row_dtype)
            except LayoutError:  # another number of rows than examples: data-dependent routing
                names = [slot.name for slot in kept.slots.values()]
                fewer = self.rules.leave_to_autodiff(recording.signature, names)
                return self._captured(recording, fewer, batch, prepare, few)
        return [prepare(block) for block in combine(blocks)], assignment

    def _autodiff(
        self,
        names: tuple[str, ...],
        batch: Batch,
        c: int,
        precision: Precision,
        columns: bool,
        judge: Judge | None = None,
        seed: Truth | None = None,
        graph: tuple[Tensor, Mapping[str, Tensor]] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        shared: SharedOutputs | None = None,
    ) -> AutodiffBlock:
        def forward(
            theta: Mapping[str, Tensor], part: Batch, within: AbstractContextManager[object] = NOTHING
        ) -> Tensor:
            with self.network.in_precision(precision), forward_mode(self.network.module), within:
                return self.network.forward(theta, part)

        return AutodiffBlock(
            forward,
            self.network.theta,
            names,
            self.network.layout,
            batch,
            c=c,
            dtype=self.network.dtype,
            vectorize=lambda: self.rules.can("vectorize", batch),
            columns=columns and self.rules.can("forward_mode", batch),
            judge=judge,
            seed=seed,
            deny=self.rules.deny,
            graph=graph,
            known=known,
            shared=shared,
        )


def _same(truth: Truth) -> Truth:
    return truth


def _build_blocks(use: RecordedCall, kept: ServedCall, g: Tensor, *, n: int, dtype: torch.dtype) -> list[ColumnBlock]:
    """Columns of the Jacobian from one use, each with its recipe."""
    found = build_blocks(use, kept, g, n=n, dtype=dtype)
    for block in found:
        if isinstance(block, LazyBlock):
            slots = {role: slot for role, slot in kept.slots.items() if slot.range in block.ranges}
            block.again = Recipe(_lazy_again, (use.rule, use.call.conf, slots, kept.layout), block.last)
    return found


def _lazy_again(
    tensors: Sequence[Tensor], rule: Rule, conf: dict[str, Any], slots: Mapping[str, Slot], layout: str
) -> ColumnBlock:
    x, g = tensors
    return rule.make_blocks(LayerCall(None, {}, conf), x, g, slots, layout)[0]


def _check_finite(chunk: tuple[Tensor, Tensor, Batch] | None) -> None:
    """Raise if the outputs of a chunk are not finite: whether they are, the outputs, the examples."""
    if chunk is not None and not bool(chunk[0]):
        check_outputs_finite(chunk[1], chunk[2].start, chunk[2].positions)  # says which example it is


class Proofs:
    """Which chunks have been compared, and by which way they were made."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()

    def claim(self, way: str, batch: Batch) -> bool:
        """Whether a chunk made in this way is new; from then on it is not."""
        key = (way, *_composition(batch))
        new = key not in self._seen
        self._seen.add(key)
        return new

    def has(self, way: str, batch: Batch) -> bool:
        """Whether a chunk made in this way has been claimed."""
        return (way, *_composition(batch)) in self._seen

    def forget(self) -> None:
        """All chunks are new again: a pass broke off, and its claims were not all met."""
        self._seen.clear()


def _composition(batch: Batch) -> tuple[Any, ...]:
    """Which examples a batch holds, in which order."""
    if batch.positions is None:
        return batch.start, batch.n
    positions = batch.positions.cpu().contiguous().numpy()
    return batch.n, hashlib.blake2b(positions.tobytes(), digest_size=16).digest()


@final
@dataclass(eq=False)
class NetworkChunks(ChunkSource):
    """Chunks that the network makes of a data set, each compared with reverse mode when it is new.

    Attributes:
        lin: The linearized network.
        source: The data.
        settings: How passes are made.
        proofs: Which chunks have been compared with reverse mode.
        late: Checks outputs when all minibatches have been taken; None checks them in every pass.
        agreed: Whether the ranks have found that they have the same weights and data.
        whole: The chunks whose first examples stand for the first examples here; None for these themselves.
        replays: Chunks that a GPU has recorded.
    """

    lin: Linearization
    source: Source
    settings: PassSettings
    proofs: Proofs = field(default_factory=Proofs)
    late: Deferred | None = None
    agreed: bool = False
    whole: NetworkChunks | None = None
    replays: Replays[Chunk] = field(default_factory=Replays)

    @property
    def n(self) -> int:
        return self.source.n

    @property
    def kind(self) -> str:
        return self.source.kind

    @property
    def by_position(self) -> bool:
        return self.source.by_position

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def index(self) -> Tensor:
        indices = getattr(self.source, "indices", None)
        return torch.arange(self.n) if indices is None else indices

    def around(self, lin: Linearization) -> NetworkChunks:
        """The chunks of the same data by another network with the same layers."""
        return replace(self, lin=lin, proofs=Proofs(), whole=self, replays=Replays())

    def over(self, source: Source, late: Deferred | None = None) -> NetworkChunks:
        """The chunks of other examples of the same kind."""
        return replace(self, source=source, late=late, agreed=True, whole=self)

    def renewed(self, lin: Linearization, source: Source) -> NetworkChunks:
        """The chunks of another network and other data, which passes have learned nothing about."""
        return NetworkChunks(lin, source, self.settings.renewed())

    def subset(self, index: Tensor, size: int) -> NetworkChunks:
        return self.over(self.source.subset(index))

    def with_settings(self, settings: PassSettings) -> NetworkChunks:
        return replace(self, settings=settings, proofs=Proofs(), whole=self, replays=Replays())

    def with_lin(self, lin: Linearization) -> NetworkChunks:
        return replace(self, lin=lin, whole=self, replays=Replays())

    def begin(self) -> None:
        if not self.agreed:
            self.agreed = True
            s = self.settings
            self.lin.check_ranks_agree(self.source, precision=s.precision, engine=s.engine)
        _ = self.first

    def forget_proofs(self) -> None:
        self.proofs.forget()
        self.replays.clear()

    # The first examples.

    @cached_property
    def first(self) -> FirstExamples:
        if self.whole is not None:
            return self.whole.first
        batch = next(iter(self.source.batches(min(PROBE, self.n)))).to(self.lin.device)
        with self.lin.together():
            self.lin.network.check_parallel(batch)
            return self._measure(batch)

    def _measure(self, batch: Batch) -> FirstExamples:
        """Check the network on the first examples and measure what an example takes."""
        self.lin.network.check_unchanged()
        sizes: dict[tuple[int, int], int] = {}
        module = self.lin.module
        weights = (*self.lin.theta.values(), *module.parameters(), *module.buffers())
        own = {address(t) for t in weights}

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

        rules = self.lin.rules
        build = partial(self.lin.chunks.build_by_rules, batch, self.settings.precision, few=True)
        if not rules.assignments:
            rules.assign(batch)
        known = -1
        while known != len(rules.assignments):  # checks of new calls would count as memory
            known = len(rules.assignments)
            sizes.clear()
            try:
                with noting_saved_tensors(note):
                    chunk = build()
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                with _Results(note):  # torch.func inside the network allows no hooks: all results are about as much
                    chunk = build()
        check_outputs_finite(chunk.f, batch.start)
        graph = max(1, sum(sizes.values()) // batch.n)
        for block in chunk.blocks:
            for t in block.tensors():
                note(t)
        blocks = sum(sizes.values()) - graph * batch.n
        found = FirstExamples(
            c=chunk.f.shape[1],
            blocks=chunk.blocks,
            batch=batch.part(0, min(2, batch.n)),
            per_example=0,
            graph=graph,
            inputs=batch.input_bytes // batch.n,
            rest=batch.rest_bytes // batch.n,
        )
        each = int(graph * batch.n + blocks / found.share) // batch.n
        return replace(found, per_example=each + working_size(found.planned, self.lin.dtype.itemsize))

    # Chunks.

    def batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches of at most ``size`` examples on the device of the network."""
        self.lin.network.check_unchanged()
        if stop > start:
            for batch in self.source._batches(size, start, stop):  # the range is that of a shard
                yield batch.to(self.lin.device)

    def rests(self, size: int) -> Iterator[Any]:
        return (batch.rest for batch in self.batches(size, 0, self.n))

    def chunks(self, size: int, start: int, stop: int, request: ChunkRequest) -> Iterator[tuple[Batch, Chunk]]:
        last: tuple[Tensor, Tensor, Batch] | None = None
        for batch in self.batches(size, start, stop):
            loan = self._borrow(batch, request)
            # A product is done with a chunk before the next chunk is made; other passes hold several.
            hold = request.kind not in PRODUCTS
            made = [self.build(batch, request) if loan is None else loan.value.copy(blocks=hold)]
            f = made[0].f
            try:
                yield batch, made.pop()
            finally:
                if loan is not None:
                    loan.give_back()
            if self.late is not None:
                self.late.add(f, batch.index)
            else:  # a GPU is asked for the answer when it has the work of the next chunk
                _check_finite(last)
                last = f.isfinite().all(), f, batch
        _check_finite(last)

    def by_columns(self, kind: Request, k: int) -> bool:
        if self.settings.engine != "auto" or kind not in PRODUCTS or not autodiff_wins(kind, k=k, c=self.first.c):
            return False
        return self._by_backward(kind) or self.lin.rules.can("forward_mode", self.first.batch)

    def _by_backward(self, kind: Request) -> bool:
        # Reverse mode adds up over the examples, which half precision is too short for.
        return kind == "rmatmul" and not self.lin.rules.differentiates_in_half

    def _borrow(self, batch: Batch, request: ChunkRequest) -> Loan[Chunk] | None:
        """The chunk of a batch as a GPU has recorded it; None if there is no such record.

        Only chunks that have been compared with reverse mode are recorded and played.
        """
        s, lin = self.settings, self.lin
        if not self._records or request.rotation is not None or not self.proofs.has("rules", batch):
            return None
        if self._prefers_autodiff(request):
            return None
        make = partial(lin.chunks.build_by_rules, precision=s.precision, prepare=request.prepare)
        key, room = (request.kind, request.k, s.precision, s.engine), partial(find_budget, s.memory, lin.device)
        needs = batch.n * self.first.per_example
        how: dict[str, Any] = {"needs": needs, "room": room, "allowed": lambda: self._can_replay}
        return self.replays.borrow(key, batch, make, Chunk.is_close, **how)

    @cached_property
    def _records(self) -> bool:
        """Whether the device of the network can record chunks."""
        return can_record(self.lin.device)

    @cached_property
    def _can_replay(self) -> bool:
        """Whether a GPU can record chunks: the network never looks at numbers."""
        if not self._records or self.settings.memory != "auto" or self.source.changes:
            return False
        make = partial(self.lin.chunks.build_by_rules, self.first.batch, self.settings.precision)
        return not self.lin.rules.has_rest and try_unwatched(make) is not None

    def _prefers_autodiff(self, request: ChunkRequest) -> bool:
        """Whether autodiff alone is the cheapest way for a request."""
        auto = self.settings.engine == "auto" and request.kind in PRODUCTS and request.rotation is None
        wins = auto and autodiff_wins(request.kind, k=request.k, c=self.first.c)
        return self.settings.engine == "autodiff" or wins

    def build(self, batch: Batch, request: ChunkRequest) -> Chunk:
        """The chunk of a batch, in the way that is cheapest for a request."""
        s, lin, kind, k = self.settings, self.lin, request.kind, request.k
        product, c = kind in PRODUCTS, self.first.c
        autodiff = self._prefers_autodiff(request)
        backward = self._by_backward(kind)
        forward = autodiff and product and not backward and lin.rules.can("forward_mode", batch)
        if s.engine == "autodiff" or (autodiff and (backward or forward)):
            graph = backward or (forward and kind == "fused")
            way = "backward" if backward else f"forward, {kind}, {k > 1}" if forward else "rows"
            how: dict[str, Any] = {"columns": forward, "graph": graph, "along": request.along}
            return self._by_autodiff(way, batch, prepare=request.prepare, **how)
        few = product and (k <= c or not lin.rules.can("vectorize", batch)) if lin.rules.has_rest else False
        return self._by_rules(batch, rotation=request.rotation, columns=few, prepare=request.prepare)

    def build_whole(self, batch: Batch) -> Chunk:
        """The chunk of a batch in the coordinates of the parameters, prepared for nothing."""
        return self._by_autodiff("rows", batch) if self.settings.engine == "autodiff" else self._by_rules(batch)

    def _by_autodiff(self, way: str, batch: Batch, **how: Any) -> Chunk:
        build = partial(self.lin.chunks.build_by_autodiff, batch, self.settings.precision, **how)
        return self.prove(way, batch, lambda apart: build(prove=apart))

    def _by_rules(self, batch: Batch, *, rotation: Rotation | None = None, columns: bool = False, **how: Any) -> Chunk:
        """A chunk by layer rules, without the rules that gave other numbers than reverse mode."""
        rules, layout = self.lin.rules, self.lin.layout
        build = partial(self.lin.chunks.build_by_rules, batch, self.settings.precision, columns=columns, **how)

        def make(apart: OtherBatches | None) -> Chunk:
            while True:
                chunk = build(prove=apart)
                if chunk.truth is None or not chunk.truth.judges:
                    return chunk
                rest = rules.last.rest  # autodiff's columns are compared when they are used
                own = {layout.offsets[name] for name in rest}
                ruled = [f for f in chunk.blocks if f.ranges[0][0] not in own]
                wrong, *mixed = (names.difference(rest) for names in chunk.truth.disagreeing(ruled, rotation))
                if not wrong:
                    if any(mixed):
                        raise examples_interact(batch.start, batch.n)
                    return replace(chunk, truth=None)
                rules.doubt(chunk.signature, [name for name in self.lin.theta if name in wrong])

        return self.prove("rules, columns" if columns else "rules", batch, make)

    def prove(self, way: str, batch: Batch, make: Callable[[OtherBatches | None], Chunk]) -> Chunk:
        """A chunk that is compared with reverse mode and with other batches where it is new."""
        new = self.source.changes or self.proofs.claim(way, batch)
        first = new and (self.source.changes or self.proofs.claim("derivatives", batch))
        with self.outputs_proved(batch, derivatives=first) as (made, apart):
            chunk = make((apart or OtherBatches([], None, False)) if new else None)
            made.append(chunk.f)
        return chunk

    @contextmanager
    def outputs_proved(
        self, batch: Batch, *, derivatives: bool = False
    ) -> Iterator[tuple[list[Tensor], OtherBatches | None]]:
        """Compares the outputs that are put into the list with those in other batches, if the chunk is new."""
        made: list[Tensor] = []
        if not derivatives and not self.proofs.claim("outputs", batch):
            yield made, None
            return
        self.proofs.claim("outputs", batch)
        rules, precision = self.lin.rules, self.settings.precision
        before = RandomState(self.lin.device)
        few = max(2, min(64, AGAIN // self.first.graph))
        apart = rules.apart(batch, precision, few=few, derivatives=derivatives)
        yield made, apart
        random = apart.draws or before.moved()
        rules.check_outputs(batch, made[0], precision, apart, random=random)


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
