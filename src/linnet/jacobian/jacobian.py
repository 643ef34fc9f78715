r"""The Jacobian of a network over a data set, as a linear operator.

Row ``i * c + j`` is output j of example i; columns follow ``lin.theta``, each tensor flattened. A pass holds one chunk
of examples, never (n, p). Each rank of a torch.distributed process group takes its part of the examples, and every rank
gets the same answer. `linnet.jacobian.passes` goes over the data, `linnet.jacobian.gram` makes Gram matrices and norms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any, TypeVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet._common import (
    Checkpoint,
    Deferred,
    Precision,
    check_fits,
    check_precision,
    files,
    is_sharded,
    messages,
    show_progress,
)
from linnet.data import Batch, SingleBatch, Source, no_subset, targets_of
from linnet.jacobian import gram
from linnet.jacobian.blocks import in_parts
from linnet.jacobian.blocks.base import ColumnBlock
from linnet.jacobian.blocks.composite import add_rmatmul, cut_by_layer
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.cached import StoredChunks, cache_limit, estimate_size, gather, store, store_each
from linnet.jacobian.chunk import ChunkSource, NetworkChunks
from linnet.jacobian.frozen_layers import SourceWithActivations, store_activations
from linnet.jacobian.kronecker import Kronecker, Rotation
from linnet.jacobian.passes import Pass, Piece
from linnet.jacobian.plan import Plan, Request, describe, has_many_outputs
from linnet.linalg import (
    ClassBlocks,
    LinearOperator,
    RowFn,
    add_symmetric_,
    apply_to_columns,
    check_fn_result,
    check_kind,
    check_vector,
    check_weight,
    mirror_,
    weigh,
)
from linnet.network import check_outputs_finite

T = TypeVar("T")

BatchFn = Callable[[Tensor, Batch], Tensor]


@final
class Jacobian(LinearOperator):
    """See `linnet.Linearization.jacobian`.

    Nothing runs when a Jacobian is made. The first pass, or the first question for ``c`` or ``shape``, runs the network
    on a few examples.

    Args:
        chunks: Where the chunks of the Jacobian come from: the network, or memory.
        rotation: The coordinates of the columns; None for the coordinates of the parameters.

    Attributes:
        lin: The linearized network.
        n: Examples.
        c: Outputs.
        shape: (n * c, p).
        passes: Goes over the chunks.
    """

    symbol = "J"

    def __init__(self, chunks: ChunkSource, *, rotation: Rotation | None = None) -> None:
        self.passes, self.lin, self.n = Pass(chunks, rotation), chunks.lin, chunks.n
        self.dtype, self.device, self.ranks = self.lin.dtype, self.lin.device, self.lin.ranks
        self._copies: tuple[int, list[Jacobian]] = (0, [])  # of all minibatches of a size

    @cached_property
    def c(self) -> int:
        return self.passes.chunks.first.c

    @cached_property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return self.n * self.c, self.lin.p

    @cached_property
    def block(self) -> int:  # type: ignore[override]
        return self.c

    @property
    def eps(self) -> float:
        """The relative rounding of products: of the network's passes, unless all blocks are in memory.

        Products with blocks in memory are in ``dtype``. Convolutions with few columns are not: they convolve.
        """
        exact = self.in_memory and not any(isinstance(block, LazyBlock) for block in self._sample)
        return torch.finfo(self.dtype if exact else self.lin.network.row_dtype).eps

    @property
    def plan(self) -> Plan:
        """Which engine serves each layer, chunk and memory; print it."""
        return describe(self.passes)

    @property
    def in_memory(self) -> bool:
        """Whether products touch neither the network nor the data, as after `cached`."""
        return self.passes.chunks.in_memory

    @property
    def _source(self) -> Source:
        return self.network_chunks().source

    @property
    def _sample(self) -> list[ColumnBlock]:
        """Columns of the Jacobian of the first examples, for counts of cost."""
        return self.passes.chunks.first.planned

    def network_chunks(self, why: str = "keeps no inputs") -> NetworkChunks:
        """The chunks that the network makes; raise where they are in memory."""
        chunks = self.passes.chunks
        if not isinstance(chunks, NetworkChunks):
            raise ValueError(f"A cached Jacobian {why}; use the Jacobian that it was made from.")
        return chunks

    def with_chunks(self, chunks: ChunkSource) -> Jacobian:
        """A Jacobian of other chunks in the same coordinates."""
        return Jacobian(chunks, rotation=self.passes.rotation)

    # Products.

    def _matmul(self, V: Tensor) -> Tensor:
        if is_sharded(V):
            return in_parts.multiply(self, cast(Any, V))
        k, V = V.shape[1], self._aligned(V)

        def run() -> Tensor:
            out = V.new_zeros(self.shape[0], V.shape[1])
            for piece in self.passes.pieces("matmul", V.shape[1], "J V"):
                out[piece.rows] = _product(piece, V)
                del piece  # before the next one is formed, here and below
            self.ranks.share_rows(out, self.n, self.c)
            return out

        return self.passes.complete(run)[:, :k]

    def _rmatmul(self, U: Tensor) -> Tensor:
        if is_sharded(U):
            return in_parts.multiply_adjoint(self, cast(Any, U))
        k, U = U.shape[1], self._aligned(U)

        def run() -> Tensor:
            out, first = U.new_empty(self.shape[1], U.shape[1]), True
            for piece in self.passes.pieces("rmatmul", U.shape[1], "J^T U"):
                part = U[piece.rows].reshape(piece.batch.n, self.c, -1)
                add_rmatmul(piece.blocks, part, out, first=first)
                first = False
                del piece
            if first:  # this rank has no examples
                out.zero_()
            self.ranks.add_up(out)
            return out

        return self.passes.complete(run)[:, :k]

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        return self._fused_by_piece(lambda out, piece: fn(out, piece.rows), V)

    def _fused_by_piece(
        self, fn: Callable[[Tensor, Piece], Tensor], V: Tensor, *, summed: bool = True
    ) -> tuple[Tensor, Tensor]:
        """``J^T U`` and, if ``summed``, the sums of U over its rows, for ``U = fn(J V)``."""
        if is_sharded(V):
            return in_parts.multiply_fused(self, fn, cast(Any, V))
        k, V = V.shape[1], self._aligned(V)

        def run() -> tuple[Tensor, Tensor]:
            out, first = V.new_empty(self.shape[1], V.shape[1]), True
            sums = V.new_zeros(V.shape[1] if summed else 0)
            for piece in self.passes.pieces("fused", V.shape[1], "J^T J V", along=V):
                U = self._aligned(fn(_product(piece, V)[:, :k], piece))
                if summed:
                    sums += U.sum(0)
                add_rmatmul(piece.blocks, U.reshape(piece.batch.n, self.c, -1), out, first=first)
                first = False
                del piece
            if first:  # this rank has no examples
                out.zero_()
            self.ranks.add_up(out, *([sums] if summed else []))
            return out, sums

        out, sums = self.passes.complete(run)
        return out[:, :k], sums[:k]

    def _dense(self, block: int) -> Tensor:
        def run() -> Tensor:
            out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            for piece in self.passes.pieces("gram", 1, "J"):
                out[piece.rows] = self._explicit(piece)
                del piece
            self.ranks.share_rows(out, self.n, self.c)
            return out

        return self.passes.complete(run)

    def normal_matrix(self, weight: Tensor | None = None) -> Tensor:
        """``J^T W J`` (p, p), from the rows of each chunk: about a quarter of the work of `normal`."""
        check_weight(self, weight)

        def run() -> Tensor:
            p = self.shape[1]
            what = f"J^T W J of {p:,} parameters"
            instead = "Use products such as J.normal(V), or fewer parameters (params=)"
            check_fits(p * p * self.dtype.itemsize, "auto", self.device, what=what, instead=instead)
            out = torch.zeros(p, p, dtype=self.dtype, device=self.device)
            for piece in self.passes.pieces("gram", 1, "J^T W J"):
                rows = self._explicit(piece)
                add_symmetric_(out, rows, weigh(rows, weight, piece.rows))
                del piece, rows
            self.ranks.add_up(out.tril_())
            return mirror_(out)

        return self.passes.complete(run)

    def _explicit(self, piece: Piece) -> Tensor:
        """The rows of a chunk, (n c, p)."""
        out = torch.zeros(piece.batch.n * self.c, self.shape[1], dtype=self.dtype, device=self.device)
        for block in piece.blocks:
            for (start, stop), part in gram.by_range(block):
                out[:, start:stop] = part.reshape(len(out), -1)
        return out

    def _aligned(self, V: Tensor) -> Tensor:
        """Contiguous, and on a GPU with columns to a multiple of four, without which its matrix units are slow."""
        extra = -V.shape[1] % 4 if self.device.type == "cuda" and V.shape[1] > 16 else 0
        return F.pad(V, (0, extra)) if extra else V.contiguous()

    def fused(self, fn: BatchFn, V: Tensor) -> Tensor:  # type: ignore[override]
        r""":math:`J^\top \mathrm{fn}(J V)` in one pass: the gradient of any loss on the linearized outputs.

        Args:
            fn: Called once per chunk as ``fn(JV, batch)``, with the chunk's rows of ``J V``, (r,) for a vector V or
                (r, k), and the `Batch`: ``batch.f`` are the network's outputs (n, c), ``batch.rest`` what came with the
                data (targets), ``batch.index`` the examples' positions. Returns a tensor of the shape of JV.
            V: (p,) or (p, k).

        Example:
            >>> import linnet
            >>> X, y = torch.ones(6, 2), torch.zeros(6)
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian((X, y))
            >>> J.fused(lambda JV, batch: batch.f.flatten() + JV - batch.rest, torch.zeros(J.shape[1])).shape
            torch.Size([3])
        """
        vector = isinstance(V, Tensor) and V.ndim == 1

        def by_piece(out: Tensor, piece: Piece) -> Tensor:
            given = out[:, 0] if vector else out
            found = fn(given, replace(piece.batch, f=piece.f))
            check_fn_result(self, found, given)
            return found[:, None] if vector else found

        return apply_to_columns(self, V, lambda block: self._fused_by_piece(by_piece, block, summed=False)[0])

    def pullback(self, fn: Callable[[Batch], Tensor]) -> Tensor:
        r""":math:`J^\top u` for a u that depends on the outputs, (p,): one forward and one backward pass.

        With u the gradient of a loss with respect to the outputs it is the gradient with respect to the parameters.

        Args:
            fn: Called once per chunk with the `Batch`: ``batch.f`` are the network's outputs (n, c), ``batch.rest``
                what came with the data, ``batch.index`` the examples' positions. Returns u of the chunk, (n, c) or
                (n * c,).

        Example:
            >>> import linnet
            >>> X, y = torch.ones(6, 2), torch.zeros(6, 1)
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian((X, y))
            >>> J.pullback(lambda batch: batch.f - batch.rest).shape
            torch.Size([3])
        """

        def run() -> Tensor:
            out, first = torch.empty(self.shape[1], 1, dtype=self.dtype, device=self.device), True
            for piece in self.passes.pieces("rmatmul", 1, "J^T u"):
                u = fn(replace(piece.batch, f=piece.f))
                if u.shape not in (piece.f.shape, (piece.f.numel(),)) or u.dtype != self.dtype:
                    raise ValueError(
                        f"Jacobian.pullback needs fn to return {tuple(piece.f.shape)} or ({piece.f.numel()},) in "
                        f"{self.dtype}; got {tuple(u.shape)} in {u.dtype}."
                    )
                add_rmatmul(piece.blocks, u.detach().reshape(*piece.f.shape, 1), out, first=first)
                first = False
            if first:  # this rank has no examples
                out.zero_()
            self.ranks.add_up(out)
            return out

        return self.passes.complete(run)[:, 0]

    def at(self, theta: Mapping[str, Tensor]) -> Jacobian:
        """The Jacobian of the same examples around other weights, as `linnet.Linearization.at`."""
        chunks = self.network_chunks("keeps no inputs, so it cannot go to other weights")
        return self.with_chunks(chunks.around(self.lin.at(theta)))

    def near(self, theta: Mapping[str, Tensor]) -> Jacobian:
        """The Jacobian around weights that are so close that what was compared before holds there too."""
        moved = self.at(theta)
        return moved.with_chunks(replace(moved.network_chunks(), proofs=self.network_chunks().proofs))

    def in_precision(self, precision: Precision) -> Jacobian:
        """The Jacobian of the same examples in another precision, as `linnet.Linearization.jacobian` takes it.

        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.eye(2))
        >>> J.in_precision("high").plan.note
        'float32 on cpu, precision high'
        """
        check_precision(precision)
        return self.with_chunks(self.passes.chunks.with_settings(replace(self.passes.settings, precision=precision)))

    def in_row_dtype(self) -> Jacobian:
        """The same Jacobian with products in the dtype of its rows; see `linnet.Linearization.with_products`.

        That is enough for sums of squares, and quicker.

        >>> import linnet
        >>> lin = linnet.linearize(torch.nn.Linear(2, 1)).with_products(torch.float64)
        >>> lin.jacobian(torch.eye(2)).in_row_dtype().gram_diag().dtype
        torch.float32
        """
        dtype = self.lin.network.row_dtype
        if dtype == self.dtype:
            return self
        return self.with_chunks(self.passes.chunks.with_lin(self.lin.with_products(dtype)))

    def steady(self) -> Jacobian:
        """The Jacobian of the same examples, the same one however they are put into chunks; see
        `linnet.jacobian.cuda.float32_convolution`.

        Only convolutions in float32 on a GPU make a difference; elsewhere it is the Jacobian itself.
        """
        chunks, precision = self.passes.chunks, self.passes.settings.precision
        if not isinstance(chunks, NetworkChunks) or not self.lin.network.convolves_exactly(precision):
            return self
        return self.with_chunks(chunks.around(self.lin.steady()))

    def outputs(self, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        """f(x; theta0) for all examples, (n, c), or f at other values of the parameters; forward passes only."""
        passes, chunks = self.passes, self.passes.chunks
        if isinstance(chunks, StoredChunks) and theta is None:
            return passes.complete(chunks.outputs)
        chunks = self.network_chunks("keeps no inputs, so it has the outputs at its own weights only")
        theta, precision = {} if theta is None else theta, passes.settings.precision

        def run() -> Tensor:
            out = torch.zeros(self.n, self.c, dtype=self.dtype, device=self.device)
            start, stop = passes.own
            with torch.no_grad(), show_progress(stop - start, "f", progress=passes.settings.progress) as tick:
                for batch in chunks.batches(passes.chunk_size(columns=True), start, stop):
                    proved: AbstractContextManager[tuple[list[Tensor], Any]]
                    proved = nullcontext(([], None)) if theta else chunks.outputs_proved(batch)
                    with proved as (made, _), self.lin.network.in_precision(precision):
                        f = self.lin.network.forward(theta, batch).to(self.dtype)
                        made.append(f)
                    check_outputs_finite(f, batch.start)
                    out[batch.start : batch.start + batch.n] = f
                    tick(batch.n)
            self.ranks.share_rows(out, self.n, 1)
            return out

        return self.passes.complete(run)

    def outputs_and_product(
        self, V: Tensor, *, fold: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """f (n, c) and ``J V``, (n c,) or (n c, k), from one pass.

        Args:
            V: (p,) or (p, k).
            fold: Applied to the rows (r, k) of ``J V`` of each chunk. The answer (r, k') takes the place of the rows:
                k columns of all rows are never held.

        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(6, 2))
        >>> [t.shape for t in J.outputs_and_product(torch.ones(3, 2))]
        [torch.Size([6, 1]), torch.Size([6, 2])]
        >>> J.outputs_and_product(torch.ones(3, 2), fold=lambda rows: rows.square().sum(1, keepdim=True))[1].shape
        torch.Size([6, 1])
        """
        k, aligned = V[..., None].shape[1], self._aligned(V.reshape(len(V), -1))
        # One column goes through the network together with the outputs.
        kind: Request = "fused" if k == 1 else "matmul"

        def run() -> tuple[Tensor, Tensor]:
            f = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            width = k if fold is None else fold(f.new_zeros(1, k)).shape[1]
            out = aligned.new_zeros(self.shape[0], width)
            for piece in self.passes.pieces(kind, aligned.shape[1], "f and J V", along=aligned):
                rows = _product(piece, aligned)[:, :k]
                f[piece.rows], out[piece.rows] = piece.f.flatten(), rows if fold is None else fold(rows)
                del piece, rows
            self.ranks.share_rows(f, self.n, self.c)
            self.ranks.share_rows(out, self.n, self.c)
            return f.view(self.n, self.c), out

        f, out = self.passes.complete(run)
        return f, out if fold is not None else out.reshape(self.shape[0], *V.shape[1:])

    def fold_product(
        self, fn: Callable[[T, Tensor, Batch], T], V: Tensor, start: Callable[[], T], *, by_layer: bool = False
    ) -> T:
        """What becomes of a state as chunk after chunk of ``J V`` is shown to it: no rows of ``J V`` are kept.

        Args:
            fn: Called once per chunk as ``fn(state, JV, batch)``, with the rows of ``J V`` of the chunk, (r, k), and
                the `Batch`. Returns the next state. Under torch.distributed each rank sees its own examples.
            V: (p, k).
            start: Makes the first state. A pass that runs out of memory starts again, from a new state.
            by_layer: Whether ``fn`` gets the part of each layer, (layers, r, k), in the order of ``lin.layout.layers``.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(6, 2))
            >>> J.fold_product(lambda top, JV, batch: max(top, float(JV.max())), torch.ones(3, 2), lambda: 0.0)
            3.0
        """
        if V.ndim != 2 or len(V) != self.shape[1]:
            raise ValueError(f"fold_product needs V of shape ({self.shape[1]}, k); got {tuple(V.shape)}.")
        check_kind(self, "V", V)
        k, V = V.shape[1], self._aligned(V)

        def run() -> T:
            state = start()
            for piece in self.passes.pieces("matmul", V.shape[1], "J V"):
                rows = self._product_by_layer(piece, V) if by_layer else _product(piece, V)
                state = fn(state, rows[..., :k], replace(piece.batch, f=piece.f))
                del piece, rows
            return state

        return self.passes.complete(run)

    def _product_by_layer(self, piece: Piece, V: Tensor) -> Tensor:
        """The part of each layer in ``J V`` of a chunk, (layers, n c, k)."""
        layout = self.lin.layout
        place = {layer: i for i, layer in enumerate(layout.layers)}
        out = V.new_zeros(len(place), *piece.f.shape, V.shape[1])
        for block in piece.blocks:
            for layer, part in cut_by_layer(block, layout):
                part.add_matmul(V, out[place[layer]])
        return out.flatten(1, 2)

    def map_parts(self, fn: Callable[[Jacobian], T], size: int) -> list[T]:
        """The answers of ``fn`` about each part of the examples: one pass for everything that it asks of a part.

        Args:
            fn: Called with the Jacobians of parts, in order, whose blocks and outputs are in memory, as `cached` has
                them. Under torch.distributed, and of a Jacobian in memory, each part is a `subset`.
            size: Largest number of examples of a part.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(6, 2))
            >>> [(f.shape, d.tolist()) for f, d in J.map_parts(lambda part: (part.outputs(), part.gram_diag()), 4)]
            [(torch.Size([4, 1]), [3.0, 3.0, 3.0, 3.0]), (torch.Size([2, 1]), [3.0, 3.0])]
        """
        if self.in_memory or self.ranks.world > 1:
            size = int(self.ranks.smallest(size))
            if self.n <= size or not self.by_position:
                return [fn(self)]
            return [fn(self.subset(index)) for index in torch.arange(self.n).split(size)]

        chunks = self.network_chunks()

        def run() -> list[T]:
            parts = (replace(one, batch=replace(one.batch, start=0)) for one in store_each(chunks, size, "parts"))
            return [fn(self.with_chunks(gather(chunks, [part]))) for part in parts]

        return self.passes.complete(run)

    def targets(self) -> Any:
        """What came with the inputs in the data, of all examples: a tensor, or whatever structure it has."""
        chunks = self.passes.chunks
        return targets_of(list(chunks.rests(self.passes.chunk_size())), chunks.kind)

    @property
    def by_position(self) -> bool:
        """Whether examples can be chosen, as `subset` does."""
        return self.passes.chunks.by_position

    @property
    def index(self) -> Tensor:
        """Positions of the examples in the full data, (n,)."""
        return self.passes.chunks.index

    def subset(self, index: Tensor) -> Jacobian:
        """The Jacobian of the examples at ``index`` (m,), in that order; for data that can be read by position."""
        chunks = self.passes.chunks
        return self.with_chunks(chunks.subset(index, self.passes.chunk_size() if self.in_memory else 0))

    def rows(self, index: Tensor) -> Jacobian | None:
        return self.subset(index) if self.by_position else None

    def checksums(self) -> dict[str, str]:
        source = self._source
        own = source.code(*self.ranks.own(source.n))
        weights = f"{self.lin.network.code:016x} {files.fingerprint(self.lin.theta)}"
        return {"the data": self.ranks.add_up_checksums(own), "the weights": weights}

    def over(self, source: Source, late: Deferred | None = None) -> Jacobian:
        """The Jacobian of other examples of the same kind.

        Args:
            source: The examples.
            late: Takes the outputs in place of the check that outputs are finite.
        """
        return self.with_chunks(self.network_chunks("keeps no inputs").over(source, late))

    def minibatches(self, size: int, seed: int, *, late: bool = False) -> Iterator[Jacobian]:
        """Jacobians of random minibatches, one epoch; their batches' ``index`` says which examples they hold.

        Which examples go together is drawn once, and the order of the minibatches with every seed: a Jacobian with
        its blocks in memory copies them for the first epoch only. Each is read once, so that all products with it see
        the same examples, and read anew in the next epoch.

        Args:
            size: Examples per minibatch; some have one less where they do not add up to n.
            seed: Of the order: take another one for each epoch.
            late: Whether outputs that are not finite are looked for when all minibatches have been taken, instead of in
                every product: a GPU then never waits for Python. For loops that go to the end of the epoch.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(5, 2))
            >>> sorted(minibatch.n for minibatch in J.minibatches(2, seed=0))
            [1, 2, 2]
        """
        messages.check_batch_size(size, name="size", auto=False)
        # Of one size as nearly as can be: examples of a small one would count for more in every epoch.
        chunks = torch.randperm(self.n, generator=torch.Generator().manual_seed(0)).tensor_split(ceil(self.n / size))
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed))
        if self.in_memory:
            return self._copied_minibatches(chunks, order.tolist())
        return self._read_minibatches(chunks, order.tolist(), late=late)

    def forget_minibatches(self) -> None:
        """Free what `minibatches` may have copied for the next epoch."""
        self._copies = 0, []

    def _copied_minibatches(self, chunks: Sequence[Tensor], order: Sequence[int]) -> Iterator[Jacobian]:
        """Minibatches of chunks in memory, copied once where there is room."""
        size = len(chunks[0])
        if self._copies[0] != size:
            self.forget_minibatches()
            if self.cache_size > cache_limit("auto", self.device):
                yield from (self.subset(chunks[i]) for i in order)
                return
            self._copies = size, [self._copy(index) for index in chunks]
        for i in order:
            yield self._copies[1][i]

    def _copy(self, index: Tensor) -> Jacobian:
        """The examples at ``index``, with forms for products that are made once."""
        part = self.subset(index).passes.chunks
        assert isinstance(part, StoredChunks)
        return Jacobian(part.with_forms(), rotation=self.passes.rotation)

    def _read_minibatches(self, chunks: Sequence[Tensor], order: Sequence[int], *, late: bool) -> Iterator[Jacobian]:
        """Minibatches that are read from the data, each once."""
        whole, source = self.network_chunks(), self._source
        if not source.by_position:
            raise no_subset(source.kind)
        checks = Deferred(lambda f, index: check_outputs_finite(f, 0, index)) if late else None
        parts: Iterator[Source]
        taken = [chunks[i] for i in order]
        if self.ranks.world > 1 and not source.changes:  # each rank reads its own examples
            parts = map(source.subset, taken)
        else:
            places, read = self.index, zip(taken, source._gather(taken), strict=True)
            batches = (replace(batch, start=0, positions=places[index]).to(self.device) for index, batch in read)
            parts = (SingleBatch(batch, source.kind) for batch in batches)
        try:
            for part in parts:
                yield self.with_chunks(whole.over(part, checks))
        finally:
            if checks is not None:
                checks.close()

    # In memory.

    @property
    def cache_size(self) -> int:
        """Bytes that `cached` keeps, estimated from the first examples, or the bytes that it has kept."""
        chunks = self.passes.chunks
        return chunks.bytes if isinstance(chunks, StoredChunks) else estimate_size(chunks)

    def cached(self, memory: float | str = "auto") -> Jacobian:
        """The same Jacobian with its blocks in memory: later products touch neither the network nor the data.

        One pass keeps, for every layer and example, the layer's input and the gradients of its output, or their
        products where those are smaller; parameters without a layer rule are kept as rows. It belongs to the weights
        and the data that it was made from, also where these change afterwards; the `Batch` that `fused` gives to its
        function has no inputs. Its `subset` and `minibatches` copy from what is kept, the latter once where there is
        room. Under torch.distributed every
        rank keeps all examples.

        Args:
            memory: Bytes that may be kept, or "auto" for a quarter of the free memory (half of a GPU's).

        Raises:
            MemoryError: Before the pass, if the blocks will not fit; see `cache_size`.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(3, 2)).cached()
            >>> J.shape, J.gram_diag()
            ((3, 3), tensor([3., 3., 3.]))
        """
        return self if self.in_memory else self.with_chunks(store(self.network_chunks(), memory))

    def has_many_outputs(self, k: int = 64) -> bool:
        """Whether answers from all rows, a backward pass for each output, cost far more than answers from k columns."""
        return has_many_outputs(self._sample, self.c, k)

    def cached_if_fits(self) -> Jacobian:
        """`cached` where that fits into memory, else `above_frozen` where that can be, else the Jacobian itself.

        Of many outputs no rows are kept: their backward passes cost more than products with the network.
        """
        try:
            if self.in_memory or not self.has_many_outputs():
                return self.cached()
        except MemoryError:
            pass
        try:
            return self.above_frozen()
        except (MemoryError, ValueError):  # that too, or nothing is frozen
            return self

    def above_frozen(self, memory: float | str = "auto", *, folder: str | os.PathLike[str] | None = None) -> Jacobian:
        """The same Jacobian with what the frozen layers compute kept: later passes start above them.

        One pass keeps what the modules below the first selected parameter return, as far as the others read it; see
        `linnet.jacobian.frozen_layers`. That is far less than the blocks of `cached`, and a pass with it costs what
        the selected layers cost. The data is still read in every pass.

        Args:
            memory: Bytes that may be kept in memory, as for `cached`.
            folder: Keep it in a temporary file there instead, of at most half of what is free.

        Raises:
            MemoryError: Before the pass, if it will not fit.
            ValueError: If there is no frozen layer, or the network cannot be started above them.

        Example:
            >>> import linnet
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> J = linnet.linearize(model, "2.*").jacobian(torch.ones(3, 2)).above_frozen()
            >>> J.shape, J.gram_diag().shape
            ((3, 5), torch.Size([3]))
        """
        if self.in_memory or isinstance(self._source, SourceWithActivations):
            return self
        return Jacobian(store_activations(self.network_chunks(), cache_limit(memory, self.device), folder))

    def rotated(self, rotation: Rotation) -> Jacobian:
        """``J Q`` for an orthonormal change of coordinates within parameters; every product is of that."""
        if self.passes.rotation is not None:
            raise ValueError("This Jacobian is rotated already.")
        return Jacobian(self.passes.chunks, rotation=rotation)

    # Gram matrices and norms.

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        if other is not None and not isinstance(other, Jacobian):
            right = other.dense().T if scale is None else scale[:, None] * other.dense().T
            return self._matmul(right)
        return gram.compute_gram(self, other, scale)

    def _stacked_gram(self, below: Sequence[LinearOperator], scale: Tensor | None) -> Tensor | None:
        others = [op for op in below if isinstance(op, Jacobian)]
        return gram.compute_stacked_gram([self, *others], scale) if len(others) == len(below) else None

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        if not isinstance(other, Jacobian):
            return super()._gram_normal(other, weight, scale)
        return gram.compute_gram_normal(self, other, weight, scale)

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        return gram.compute_gram_diagonal(self, scale)

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        return gram.compute_gram_blocks(self, scale)

    def column_norms(self, weight: Tensor | None = None, *, checkpoint: Checkpoint | None = None) -> Tensor:
        r"""The diagonal of :math:`J^\top W J`, (p,): squared column norms; ``weight`` as in `normal`.

        Args:
            weight: W.
            checkpoint: Keeps the sums after each part of the pass, so that a pass that was interrupted goes on.
        """
        check_weight(self, weight)
        return gram.compute_column_norms(self, weight, checkpoint)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        return gram.compute_column_norms(self, weight)

    def grouped_squares(self, parts: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
        """For each row the sum of ``scale_j J_ij^2`` over the columns j of each group, (n c, count), in one pass.

        Args:
            parts: Pairs of a scale (p,) and the number of the group of each column (p,); the sums add up.
            count: Number of groups.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.tensor([[1.0, 2.0]]))
            >>> J.grouped_squares([(torch.ones(3), torch.tensor([1, 1, 0]))], 2).tolist()
            [[1.0, 5.0]]
        """
        return gram.compute_grouped_squares(self, parts, count)

    def own_gram(self, scale: Tensor | None = None) -> Tensor:
        """The rows of ``gram(scale=scale)`` that belong to the examples of this rank; all rows of a single process.

        The ranks together hold a Gram matrix that none of them could hold alone; see `linnet.linalg.RowParts`.
        """
        check_vector(self, "own_gram", "scale", scale, self.shape[1])
        return gram.compute_own_gram(self, scale)

    def layer_grams(self) -> dict[str, Tensor]:
        """Layer name to its part of the Gram matrix, (n c, n c); they add up to `gram`.

        Parameters that are tied form one layer, under their first name.
        """
        return gram.compute_layer_grams(self)

    def moments(self, *, centered: bool = True) -> tuple[Tensor, Tensor]:
        """The mean of each column and its mean square about that, (p,) and (p,) in float64, in one pass.

        Nothing cancels, however far a mean is from zero; `column_norms` is cheaper where that is no matter.

        Args:
            centered: False takes the squares about zero and gives zeros for the means.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
            >>> [x.tolist() for x in J.moments()]
            [[2.0, 2.0, 1.0], [1.0, 4.0, 0.0]]
        """
        found = gram.compute_moments(self, centered=centered)
        return found.mean, found.squares / found.count

    def kronecker(self, root: Tensor | ClassBlocks | None = None, *, checkpoint: Checkpoint | None = None) -> Kronecker:
        """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass; see `linnet.jacobian.kronecker`.

        Args:
            root: L, None for the identity, (n, c) where it is diagonal, or (n, c, m).
            checkpoint: Keeps the sums after each part of the pass, so that a pass that was interrupted goes on.
        """
        self._check_kronecker()
        if root is not None and not isinstance(root, ClassBlocks) and tuple(root.shape[:2]) != (self.n, self.c):
            raise ValueError(f"J.kronecker needs a root of shape ({self.n}, {self.c}[, m]); got {tuple(root.shape)}.")
        return gram.compute_kronecker(self, root, checkpoint)

    def curvature(
        self, form: gram.Form, root: gram.ByChunk, u: gram.ByChunk, *, checkpoint: Checkpoint | None = None
    ) -> gram.CurvatureSums:
        """Outputs, ``J^T u`` and the sums of a form of ``J^T L L^T J``, all in one pass.

        Args:
            form: "kron" as `kronecker`, or "diag" as `column_norms`.
            root: From a chunk, whose outputs are ``batch.f``, to L, (n, c) where it is diagonal, or (n, c, m).
            u: From a chunk to (n, c).
            checkpoint: Keeps the sums after each part of the pass, so that a pass that was interrupted goes on.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
            >>> found = J.curvature("diag", lambda batch: torch.ones(2, 1), lambda batch: torch.ones(2, 1))
            >>> found.f.shape, found.gradient.tolist(), found.squares.tolist()
            (torch.Size([2, 1]), [4.0, 4.0, 2.0], [10.0, 16.0, 2.0])
        """
        if form == "kron":
            self._check_kronecker()
        return gram.compute_curvature(self, form, root, u, checkpoint)

    def _check_kronecker(self) -> None:
        self.network_chunks("keeps rows where they are smaller, which have no Kronecker factors")
        if self.passes.rotation is not None:
            raise ValueError("J.kronecker needs the Jacobian in the parameters' own coordinates; this one is rotated.")


def _product(piece: Piece, V: Tensor) -> Tensor:
    """``J V`` of a chunk, (n c, k)."""
    total = V.new_zeros(*piece.f.shape, V.shape[1])
    for block in piece.blocks:
        block.add_matmul(V, total)
    return total.flatten(0, 1)
