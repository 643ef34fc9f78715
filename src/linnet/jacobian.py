r"""The Jacobian of a network over a data set, as a linear operator; the only loops over data.

Row ``i * c + j`` is output j of example i; columns follow ``lin.theta``, each tensor flattened. A pass holds one chunk
of examples, never (n, p). Each rank of a torch.distributed process group takes its part of the examples, and every rank
gets the same answer.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet import _checks
from linnet.autodiff import Autodiff
from linnet.batch import Batch, Deferred, Given, Source
from linnet.compound import add_rmatmul, pack
from linnet.contexts import Precision, arithmetic, check_precision, of_network
from linnet.data import bar
from linnet.distributed import add_up, rank_and_world, shard, share_rows
from linnet.factors import Factor, Outer, Rows, Scale
from linnet.kron import Kronecker, Rotation
from linnet.linearize import Chunk, Linearization
from linnet.moments import Moments
from linnet.operator_checks import by_block, check_fn_result, check_weight
from linnet.operators import LinearOperator, RowFn
from linnet.plan import (
    PLAN_COLUMNS,
    PRODUCTS,
    Engine,
    Line,
    Plan,
    Request,
    autodiff_wins,
    budget,
    check_engine,
    choose,
    chunk_size,
    fused_cost,
    prepare,
    working_size,
)
from linnet.row_weights import add_symmetric_, weigh
from linnet.structure import PROBE

CONVOLVED = 4096
"""Examples that a GPU is given at once where it convolves in float32: 20,480 of ResNet-20 took it twice as long."""

T = TypeVar("T")
BatchFn = Callable[[Tensor, Batch], Tensor]


@dataclass
class _Settings:
    """How passes are made; shared with the minibatches of a Jacobian."""

    batch_size: int | str
    memory: float | str
    precision: Precision
    engine: Engine
    progress: bool | None
    per_example: int = 1
    graph: int = 1  # bytes of an example that the network's own graph takes, without factors and rows
    rest: int = 0  # bytes of an example that are not the model's, such as targets
    largest: int | None = None  # what an out-of-memory error has left
    room: int = 0  # bytes that a chunk could have when they were asked for last
    used: int = 0  # examples per chunk of the last pass


@dataclass(frozen=True)
class _Piece:
    """A chunk, ready for one kind of request."""

    batch: Batch
    f: Tensor
    factors: list[Factor]


class Jacobian(LinearOperator):
    """See `linnet.Linearization.jacobian`.

    Attributes:
        n: Examples.
        c: Outputs.
        shape: (n * c, p).
    """

    symbol = "J"
    _rotation: Rotation | None = None  # of the columns
    _late: Deferred | None = None  # where outputs are checked, if not in every pass

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
        _checks.check_batch_size(batch_size)
        budget(memory, lin.device)
        self._settings = _Settings(batch_size, memory, precision, engine, progress)  # type: ignore[arg-type]
        self.lin, self._source = lin, source
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
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                # A view counts as itself: the first examples may be a part of all data.
                place = storage.data_ptr(), int(t.storage_offset())
                sizes[place] = max(sizes.get(place, 0), min(storage.nbytes(), t.nbytes))
            return t.detach()  # an output that its own graph saved would never be freed

        self.lin.structure(batch)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            chunk = self.lin.chunk(batch, self._settings.precision)
        _checks.check_outputs_finite(chunk.f, batch.start)
        self._settings.graph = max(1, sum(sizes.values()) // batch.n)
        for factor in chunk.factors:
            for t in factor.tensors():
                note(t)
        working = working_size(chunk.factors, self.lin.dtype.itemsize)
        self._settings.per_example = sum(sizes.values()) // batch.n + working
        self._settings.rest = batch.rest_bytes // batch.n
        self._sample, self._probe = chunk.factors, batch.part(0, min(2, batch.n))
        return chunk

    # Products.

    def _matmul(self, V: Tensor) -> Tensor:
        k, V = V.shape[1], self._aligned(V)

        def run() -> Tensor:
            out = V.new_zeros(self.shape[0], V.shape[1])
            for piece in self._pieces("matmul", V.shape[1], "J V"):
                out[self._rows(piece)] = _product(piece, V)
            share_rows(out, self.n, self.c)
            return out

        return self._completed(run)[:, :k]

    def _rmatmul(self, U: Tensor) -> Tensor:
        k, U = U.shape[1], self._aligned(U)

        def run() -> Tensor:
            out, first = U.new_empty(self.shape[1], U.shape[1]), True
            for piece in self._pieces("rmatmul", U.shape[1], "J^T U"):
                part = U[self._rows(piece)].reshape(piece.batch.n, self.c, -1)
                add_rmatmul(piece.factors, part, out, first=first)
                first = False
            if first:  # this rank has no examples
                out.zero_()
            add_up(out)
            return out

        return self._completed(run)[:, :k]

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        return self._fused_by_piece(lambda out, piece: fn(out, self._rows(piece)), V)

    def _fused_by_piece(
        self, fn: Callable[[Tensor, _Piece], Tensor], V: Tensor, *, summed: bool = True
    ) -> tuple[Tensor, Tensor]:
        """``J^T U`` and, if ``summed``, the sums of U over its rows, for ``U = fn(J V)``."""
        k, V = V.shape[1], self._aligned(V)

        def run() -> tuple[Tensor, Tensor]:
            out, first = V.new_empty(self.shape[1], V.shape[1]), True
            sums = V.new_zeros(V.shape[1] if summed else 0)
            for piece in self._pieces("fused", V.shape[1], "J^T J V", along=V):
                U = self._aligned(fn(_product(piece, V)[:, :k], piece))
                if summed:
                    sums += U.sum(0)
                add_rmatmul(piece.factors, U.reshape(piece.batch.n, self.c, -1), out, first=first)
                first = False
            if first:  # this rank has no examples
                out.zero_()
            add_up(out, *([sums] if summed else []))
            return out, sums

        out, sums = self._completed(run)
        return out[:, :k], sums[:k]

    def _dense(self, block: int) -> Tensor:
        def run() -> Tensor:
            out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            for piece in self._pieces("gram", 1, "J"):
                out[self._rows(piece)] = self._explicit(piece)
            share_rows(out, self.n, self.c)
            return out

        return self._completed(run)

    def normal_matrix(self, weight: Tensor | None = None) -> Tensor:
        """``J^T W J`` (p, p), from the rows of each chunk: about a quarter of the work of `normal`."""
        check_weight(self, weight)

        def run() -> Tensor:
            out = torch.zeros(self.shape[1], self.shape[1], dtype=self.dtype, device=self.device)
            for piece in self._pieces("gram", 1, "J^T W J"):
                rows = self._explicit(piece)
                add_symmetric_(out, rows, weigh(rows, weight, self._rows(piece)))
            out.tril_()
            add_up(out)
            return out.add_(out.tril(-1).T)

        return self._completed(run)

    def _explicit(self, piece: _Piece) -> Tensor:
        """The rows of a chunk, (n c, p)."""
        out = torch.zeros(piece.batch.n * self.c, self.shape[1], dtype=self.dtype, device=self.device)
        for factor in piece.factors:
            for (start, stop), part in _by_range(factor):
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

        def by_piece(out: Tensor, piece: _Piece) -> Tensor:
            given = out[:, 0] if vector else out
            found = fn(given, replace(piece.batch, f=piece.f))
            check_fn_result(self, found, given)
            return found[:, None] if vector else found

        return by_block(self, V, lambda block: self._fused_by_piece(by_piece, block, summed=False)[0])

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
            for piece in self._pieces("rmatmul", 1, "J^T u"):
                u = fn(replace(piece.batch, f=piece.f))
                if u.shape not in (piece.f.shape, (piece.f.numel(),)) or u.dtype != self.dtype:
                    raise ValueError(
                        f"Jacobian.pullback needs fn to return {tuple(piece.f.shape)} or ({piece.f.numel()},) in "
                        f"{self.dtype}; got {tuple(u.shape)} in {u.dtype}."
                    )
                add_rmatmul(piece.factors, u.detach().reshape(*piece.f.shape, 1), out, first=first)
                first = False
            if first:  # this rank has no examples
                out.zero_()
            add_up(out)
            return out

        return self._completed(run)[:, 0]

    def at(self, theta: Mapping[str, Tensor]) -> Jacobian:
        """The Jacobian of the same examples around other weights, as `linnet.Linearization.at`."""
        moved = copy.copy(self)
        moved.lin = self.lin.at(theta)
        return moved

    def in_precision(self, precision: Precision) -> Jacobian:
        """The Jacobian of the same examples in another precision, as `linnet.Linearization.jacobian` takes it.

        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.eye(2))
        >>> J.in_precision("high").plan.note
        'float32 on cpu, precision high'
        """
        check_precision(precision)
        other = copy.copy(self)
        other._settings = replace(self._settings, precision=precision)
        return other

    def outputs(self, theta: Mapping[str, Tensor] | None = None) -> Tensor:
        """f(x; theta0) for all examples, (n, c), or f at other values of the parameters; forward passes only."""
        theta = {} if theta is None else theta

        def run() -> Tensor:
            out = torch.zeros(self.n, self.c, dtype=self.dtype, device=self.device)
            with (
                torch.no_grad(),
                bar(self._own[1] - self._own[0], "f", progress=self._settings.progress) as tick,
            ):
                for batch in self._batches(self._chunk(columns=True)):
                    with self.lin._setting(self._settings.precision):
                        f = self.lin.forward(theta, batch).to(self.dtype)
                    _checks.check_outputs_finite(f, batch.start)
                    out[batch.start : batch.start + batch.n] = f
                    tick(batch.n)
            share_rows(out, self.n, 1)
            return out

        return self._completed(run)

    def targets(self) -> Any:
        """What came with the inputs in the data, of all examples: a tensor, or whatever structure it has."""
        parts = [batch.rest for batch in self._batches(self._chunk(), 0, self.n)]
        return _checks.targets_of(parts, self._source.kind)

    @property
    def by_position(self) -> bool:
        """Whether examples can be chosen, as `subset` does."""
        return self._source.by_position

    def minibatches(self, size: int, seed: int, *, late: bool = False) -> Iterator[Jacobian]:
        """Jacobians of random minibatches, one epoch; their batches' ``index`` says which examples they hold.

        Which examples go together is drawn once, and the order of the minibatches with every seed: a Jacobian with
        its factors in memory copies them for the first epoch only. Each is read once, so that all products with it see
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
        _checks.check_batch_size(size, name="size", auto=False)
        # Of one size as nearly as can be: examples of a small one would count for more in every epoch.
        chunks = torch.randperm(self.n, generator=torch.Generator().manual_seed(0)).tensor_split(ceil(self.n / size))
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed))
        return self._minibatches(chunks, order.tolist(), late=late)

    def _minibatches(self, chunks: Sequence[Tensor], order: Sequence[int], *, late: bool) -> Iterator[Jacobian]:
        return self._parts([chunks[i] for i in order], late=late)

    def _parts(self, chunks: Sequence[Tensor], *, late: bool) -> Iterator[Jacobian]:
        """The Jacobians of the examples at each index."""
        checks = Deferred(lambda f, index: _checks.check_outputs_finite(f, 0, index)) if late else None
        try:
            for part in self._read_once(chunks):
                part._late = checks
                yield part
        finally:
            if checks is not None:
                checks.close()

    def _read_once(self, chunks: Sequence[Tensor]) -> Iterator[Jacobian]:
        source = self._source
        if not source.by_position:
            raise _checks.no_subset(source.kind)
        if rank_and_world()[1] > 1 and not source.changes:  # each rank reads its own examples
            yield from map(self.subset, chunks)
            return
        places = self.index
        for index, batch in zip(chunks, source._gather(chunks), strict=True):
            given = replace(batch, start=0, positions=places[index]).to(self.device)
            yield self._of(Given(given, source.kind))

    def subset(self, index: Tensor) -> Jacobian:
        """The Jacobian of the examples at ``index`` (m,), in that order; for data that can be read by position."""
        return self._of(self._source.subset(index))

    def _of(self, source: Source) -> Jacobian:
        """The Jacobian of some of the examples."""
        part = object.__new__(Jacobian)
        part._settings, part.lin, part._sample = self._settings, self.lin, self._sample
        part._source, part._rotation, part._probe = source, self._rotation, self._probe
        part.n, part.c = part._source.n, self.c
        LinearOperator.__init__(part, (part.n * part.c, self.lin.p), dtype=self.dtype, device=self.device)
        part.block = part.c
        return part

    @property
    def index(self) -> Tensor:
        """Positions of the examples in the full data, (n,)."""
        indices = getattr(self._source, "indices", None)
        return torch.arange(self.n) if indices is None else indices

    # In memory.

    @property
    def cache_size(self) -> int:
        """Bytes that `cached` will keep, estimated from the first examples."""
        from linnet.cache import bytes_of, keep

        s, size = self._settings, self.dtype.itemsize
        if s.engine == "autodiff":
            return self.n * ((self.shape[1] + 1) * self.c * size + s.rest)
        rows = [f for f in self._sample if isinstance(f, Autodiff)]
        given = [f for f in self._sample if not isinstance(f, Autodiff)]
        held = keep(given, s.engine)
        # What all examples share, such as the output's own gradient, is kept once for each chunk.
        shared = bytes_of(held, lambda t: t.stride(0) == 0)
        own = bytes_of(held) - shared
        each = ceil(own / given[0].n) if given else 0
        each += (sum(f.q for f in rows) + 1) * self.c * size + s.rest
        return self.n * each + ceil(self.n / self._kept_chunk()) * shared

    def cached(self, memory: float | str = "auto") -> Jacobian:
        """The same Jacobian with its factors in memory: later products touch neither the network nor the data.

        One pass keeps, for every layer and example, the layer's input and the gradients of its output, or their
        products where those are smaller; parameters without a layer rule are kept as rows. It belongs to the weights
        and the data that it was made from, also where these change afterwards; the `Batch` that `fused` gives to its
        function has no inputs. Its `subset` and `minibatches` copy from what is kept, the latter once where there is
        room. Under torch.distributed every
        rank keeps all examples.

        Args:
            memory: Bytes that may be kept, or "auto" for a quarter of the free memory (half of a GPU's).

        Raises:
            MemoryError: Before the pass, if the factors will not fit; see `cache_size`.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.ones(3, 2)).cached()
            >>> J.shape, J.gram_diag()
            ((3, 3), tensor([3., 3., 3.]))
        """
        from linnet.cache import Cached, Kept, cache_limit, check_fits, keep

        limit = cache_limit(memory, self.device)
        check_fits(self, self.cache_size, limit)

        def run() -> list[Kept]:
            kept: list[Kept] = []
            held = 0
            with bar(self.n, "factors", progress=self._settings.progress) as tick:
                for batch in self._batches(self._kept_chunk(), 0, self.n):
                    chunk = self.lin.chunk(
                        batch, self._settings.precision, autodiff_only=self._settings.engine == "autodiff"
                    )
                    _checks.check_outputs_finite(chunk.f, batch.start)
                    factors = keep(chunk.factors, self._settings.engine)
                    kept.append(Kept(batch.without_inputs(), chunk.f.clone(), factors))
                    held += kept[-1].bytes
                    if held > limit:
                        break
                    tick(batch.n)
            return kept

        kept = self._completed(run)
        held = sum(piece.bytes for piece in kept)
        # Where examples differ in size, the first ones do not tell.
        check_fits(self, max(held, ceil(held * self.n / sum(piece.batch.n for piece in kept))), limit)
        return Cached(self, kept)

    def above_frozen(self, memory: float | str = "auto", *, folder: str | os.PathLike[str] | None = None) -> Jacobian:
        """The same Jacobian with what the frozen layers compute kept: later passes start above them.

        One pass keeps what the modules below the first selected parameter return, as far as the others read it; see
        `linnet.frozen`. That is far less than the factors of `cached`, and a pass with it costs what the selected
        layers cost. The data is still read in every pass.

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
        from linnet.cache import cache_limit
        from linnet.frozen import Frozen, Kept, storage

        if isinstance(self._source, Kept):
            return self
        first = next(iter(self._batches(min(PROBE, self.n), 0, min(PROBE, self.n))))
        frozen = Frozen(self.lin, first)
        tensors = storage(frozen, self.n, cache_limit(memory, self.device), folder)
        size = self._chunk()

        def run() -> None:
            with bar(self.n, "frozen layers", progress=self._settings.progress) as tick:
                for batch in self._batches(size, 0, self.n):
                    for t, part in zip(tensors, frozen.record(batch), strict=True):
                        t[batch.start : batch.start + batch.n] = part
                    tick(batch.n)

        self._completed(run)
        s = self._settings
        where = "in memory" if folder is None else f"in {folder}"
        given: dict[str, Any] = {"batch_size": s.batch_size, "memory": s.memory, "precision": s.precision}
        source = Kept(self._source, tensors, where)
        return Jacobian(frozen.top, source, **given, engine=s.engine, progress=s.progress)

    def _kept_chunk(self) -> int:
        size = self._chunk()
        # Beside the chunk there is what is kept, up to the other half of the memory.
        return ceil(size / 2) if self.device.type == "cuda" and self._settings.batch_size == "auto" else size

    # Gram matrices and norms.

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        if other is not None and not isinstance(other, Jacobian):
            right = other.dense().T if scale is None else scale[:, None] * other.dense().T
            return self._matmul(right)
        diagonal = Scale(None if scale is None else scale.contiguous())
        return self._grams(other, diagonal, [""], lambda factor: [("", factor)])[""]

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        if not isinstance(other, Jacobian):
            return super()._gram_normal(other, weight, scale)
        self._check_same_columns(other)
        diagonal, m = Scale(None if scale is None else scale.contiguous()), other.shape[0]

        def run() -> Tensor:
            # Added up in float64: the sum over all rows is what conditions what is made of it.
            out = torch.zeros(m, m, dtype=torch.float64, device=self.device)
            held = list(other._pieces("gram", 1, "", start=0, stop=other.n))
            for a in self._pieces("gram", 1, "K^T W K"):
                K = torch.zeros(a.batch.n * self.c, m, dtype=self.dtype, device=self.device)
                for b in held:
                    for _, x, y in _matched(a.factors, b.factors, lambda factor: [("", factor)]):
                        x.gram(y, diagonal, K[:, other._rows(b)])
                out += (K.T @ weigh(K, weight, self._rows(a))).double()
            add_up(out)
            return out.to(self.dtype)

        return self._completed(run, other)

    def layer_grams(self) -> dict[str, Tensor]:
        """Layer name to its part of the Gram matrix, (n c, n c); they add up to `gram`.

        Parameters that are tied form one layer, under their first name.
        """
        return self._grams(None, Scale(), list(self.lin.layout.layers), self._by_layer)

    def _grams(
        self,
        other: Jacobian | None,
        scale: Scale,
        names: Sequence[str],
        parts: Callable[[Factor], list[tuple[str, Factor]]],
    ) -> dict[str, Tensor]:
        """Gram matrices by name, from factors cut into named parts; every rank makes the same ones in one order."""
        right = self if other is None else other
        self._check_same_columns(right)

        def run() -> dict[str, Tensor]:
            symmetric = other is None and rank_and_world()[1] == 1
            shape = (self.shape[0], right.shape[0])
            grams = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name in names}
            for block in self._blocks():
                pieces: Iterator[_Piece]
                start = block[0].batch.start if symmetric else 0
                pieces = right._pieces("gram", 1, "gram", start=start, stop=right.n, block=block if symmetric else ())
                for b in pieces:
                    for a in block:
                        if symmetric and a.batch.start > b.batch.start:
                            continue
                        rows, columns = self._rows(a), right._rows(b)
                        for name, x, y in _matched(a.factors, b.factors, parts):
                            x.gram(y, scale, grams[name][rows, columns])
                        if symmetric and a.batch.start != b.batch.start:
                            for K in grams.values():
                                K[columns, rows] = K[rows, columns].T
            for K in grams.values():
                share_rows(K, self.n, self.c)
            return grams

        return self._completed(run, other)

    def _check_same_columns(self, other: Jacobian) -> None:
        _checks.check_same_shapes(self.lin.layout.shapes, other.lin.layout.shapes)
        if self._rotation is not other._rotation:
            raise ValueError("The two Jacobians are in different coordinates; rotate both, by the same rotation.")

    def _blocks(self) -> Iterator[list[_Piece]]:
        """This rank's examples in runs of chunks whose factors fit in memory together."""
        # Half of the memory; less once a pass has run out of it.
        limit = budget(self._settings.memory, self.device) // 2
        if self._settings.largest is not None:
            limit = min(limit, 4 * self._settings.largest * self._settings.per_example)
        block: list[_Piece] = []
        held = 0
        for piece in self._pieces("gram", 1, ""):
            size = sum(f.bytes for f in piece.factors)
            if block and held + size > limit:
                yield block
                block, held = [], 0
            block.append(piece)
            held += size
        if block:
            yield block

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        diagonal = Scale(None if scale is None else scale.contiguous())

        def run() -> Tensor:
            out = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            for piece in self._pieces("diag", 1, "diag J J^T"):
                for factor in piece.factors:
                    out[self._rows(piece)] += factor.diag(diagonal).flatten()
            share_rows(out, self.n, self.c)
            return out

        return self._completed(run)

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        diagonal = Scale(None if scale is None else scale.contiguous())

        def run() -> Tensor:
            out = torch.zeros(self.n, self.c, self.c, dtype=self.dtype, device=self.device)
            for piece in self._pieces("diag", 1, "blocks of J J^T"):
                for factor in piece.factors:
                    out[piece.batch.start : piece.batch.start + piece.batch.n] += factor.blocks(diagonal)
            share_rows(out, self.n, 1)
            return out

        return self._completed(run)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        def run() -> Tensor:
            total = torch.zeros(self.shape[1], dtype=torch.float64, device=self.device)
            for piece in self._pieces("squares", 1, "diag J^T W J"):
                part = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
                b = piece.batch
                w = weight.view(self.n, self.c) if weight is not None and weight.ndim == 1 else weight
                w = None if w is None else w[b.start : b.start + b.n]
                for factor in piece.factors:
                    factor.squares(w, part)
                total += part
            add_up(total)
            return total.to(self.dtype)

        return self._completed(run)

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

        def run() -> Moments:
            found = Moments(self.shape[1], centered=centered, device=self.device)
            for piece in self._pieces("squares", 1, "moments of J"):
                found.add(piece.factors, piece.batch.n * self.c)
            found.over_ranks()
            return found

        found = self._completed(run)
        return found.mean, found.squares / found.count

    def kronecker(self, root: Tensor | None = None) -> Kronecker:
        """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass; see `linnet.kron`.

        Args:
            root: L, None for the identity, (n, c) where it is diagonal, or (n, c, m).
        """
        if root is not None and tuple(root.shape[:2]) != (self.n, self.c):
            raise ValueError(f"J.kronecker needs a root of shape ({self.n}, {self.c}[, m]); got {tuple(root.shape)}.")
        if self._rotation is not None:
            raise ValueError("J.kronecker needs the Jacobian in the parameters' own coordinates; this one is rotated.")

        def run() -> Kronecker:
            sample = [prepare(f, "sides", k=1, engine=self._settings.engine) for f in self._sample]
            found = Kronecker(sample, layout=self.lin.layout, p=self.shape[1], dtype=self.dtype, device=self.device)
            for piece in self._pieces("sides", 1, "Kronecker factors"):
                b = piece.batch
                part = None if root is None else root[b.start : b.start + b.n]
                found.add(piece.factors, part, b.n)
            found.over_ranks()
            return found

        return self._completed(run)

    def rotated(self, rotation: Rotation) -> Jacobian:
        """``J Q`` for an orthonormal change of coordinates within parameters; every product is of that."""
        if self._rotation is not None:
            raise ValueError("This Jacobian is rotated already.")
        turned = copy.copy(self)
        turned._rotation = rotation
        return turned

    # The loop.

    @property
    def _own(self) -> tuple[int, int]:
        return shard(self.n, *rank_and_world())

    def _rows(self, piece: _Piece) -> slice:
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
        block: Sequence[_Piece] = (),
        along: Tensor | None = None,
    ) -> Iterator[_Piece]:
        """The chunks of a pass, each prepared for a request; those of ``block`` are at hand already.

        ``along`` (p, k) is what the chunks will be multiplied by, where that is known before they are made.
        """
        s = self._settings
        size = self._gram_chunk() if request == "gram" else self._chunk(columns=self._by_columns(request, k))
        s.used = size
        yield from block
        start = block[-1].batch.start + block[-1].batch.n if block else start
        first, last = (self._own[0] if start is None else start), (self._own[1] if stop is None else stop)
        with bar(max(0, last - first), label, progress=s.progress if label else False) as tick:
            for batch, chunk in self._chunks(size, first, last, request, k, along):
                factors = pack(chunk.factors) if request in PRODUCTS else chunk.factors
                yield _Piece(batch, chunk.f, factors)
                tick(batch.n)

    def _chunks(
        self, size: int, start: int, stop: int, request: Request, k: int, along: Tensor | None
    ) -> Iterator[tuple[Batch, Chunk]]:
        for batch in self._batches(size, start, stop):
            chunk = self._chunk_of(batch, request, k, along)
            yield batch, chunk
            # After the chunk's work is queued, so that a GPU does not wait for the answer.
            if self._late is None:
                _checks.check_outputs_finite(chunk.f, batch.start, batch.positions)
            else:
                self._late.add(chunk.f, batch.index)

    def _chunk_of(self, batch: Batch, request: Request, k: int, along: Tensor | None) -> Chunk:
        s, lin = self._settings, self.lin
        product = request in PRODUCTS
        ready = self._ready(request, k)
        auto = s.engine == "auto" and product and self._rotation is None
        autodiff = s.engine == "autodiff" or (auto and autodiff_wins(request, k=k, c=self.c))
        # Reverse mode adds up over the examples, which half precision is too short for.
        backward = request == "rmatmul" and lin.model_dtype == lin.dtype
        forward = autodiff and product and not backward and lin.can("forward_mode", batch)
        if s.engine == "autodiff" or (autodiff and (backward or forward)):
            graph = backward or (forward and request == "fused")
            return lin.chunk(
                batch, s.precision, autodiff_only=True, columns=forward, graph=graph, along=along, prepare=ready
            )
        few = product and (k <= self.c or not lin.can("vectorize", batch)) if lin.has_rest else False
        return lin.chunk(batch, s.precision, columns=few, prepare=ready)

    def _ready(self, request: Request, k: int) -> Callable[[Factor], Factor]:
        """Prepares a factor for a request, in the coordinates of this Jacobian."""
        ready = partial(prepare, request=request, k=k, engine=self._settings.engine)
        rotation = self._rotation
        return ready if rotation is None else lambda factor: ready(rotation(factor))

    def _by_columns(self, request: Request, k: int) -> bool:
        """Whether `_chunk_of` will leave a pass to autodiff alone, which holds no rows."""
        s, lin = self._settings, self.lin
        if s.engine != "auto" or request not in PRODUCTS or self._rotation is not None or not hasattr(self, "_probe"):
            return False
        if not autodiff_wins(request, k=k, c=self.c):
            return False
        return (request == "rmatmul" and lin.model_dtype == lin.dtype) or lin.can("forward_mode", self._probe)

    def _chunk(self, *, columns: bool = False) -> int:
        """Examples per chunk; with ``columns`` of passes that hold the network's graph and its tangents only."""
        s = self._settings
        if isinstance(s.batch_size, int):
            size = min(s.batch_size, self.n)
        else:
            each = min(s.per_example, 3 * s.graph) if columns else s.per_example
            if 8 * self.n * each > s.room:  # a minibatch that is small beside it need not ask again
                s.room = budget(s.memory, self.device)
            size = chunk_size(self.n, each, s.room)
            if columns and size > CONVOLVED and self._convolves:
                size = CONVOLVED
        return size if s.largest is None else min(size, s.largest)

    @property
    def _convolves(self) -> bool:
        """Whether passes are convolutions in float32 on a GPU."""
        exact = of_network(self._settings.precision) == "highest" and self.lin.model_dtype == torch.float32
        return self.device.type == "cuda" and exact and self.lin.has_convolutions

    def _gram_chunk(self) -> int:
        """Chunks of a Gram matrix: several, so that its symmetry halves the work."""
        size = self._chunk()
        return size if isinstance(self._settings.batch_size, int) else min(size, max(512, ceil(self.n / 16)))

    def _completed(self, run: Callable[[], T], other: Jacobian | None = None) -> T:
        """The result of a pass; out of memory on the GPU, it starts again with half the chunk (and the other's)."""
        while True:
            try:
                with arithmetic(self._settings.precision, self.device):
                    return run()
            except torch.OutOfMemoryError:
                size = self._settings.used or self._chunk()
                if size == 1:
                    raise
                if self._settings.largest is None:
                    warnings.warn(
                        f"linnet ran out of memory with chunks of {size} examples and goes on with smaller ones; "
                        "pass memory= or batch_size= to choose them.",
                        stacklevel=4,
                    )
                if other is not None:
                    other._settings.largest = max(1, other._chunk() // 2)
                self._settings.largest = self._settings.used = max(1, size // 2)
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
        structure = lin.last_structure
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


def _product(piece: _Piece, V: Tensor) -> Tensor:
    """``J V`` of a chunk, (n c, k)."""
    total = V.new_zeros(*piece.f.shape, V.shape[1])
    for factor in piece.factors:
        factor.add_matmul(V, total)
    return total.flatten(0, 1)


def _matched(
    left: Sequence[Factor],
    right: Sequence[Factor],
    parts: Callable[[Factor], list[tuple[str, Factor]]],
) -> Iterator[tuple[str, Factor, Factor]]:
    """Pairs of factors over the same columns, with a name; columns that one side lacks are zero there."""
    mine = {(name, f.ranges): f for factor in left for name, f in parts(factor)}
    theirs = {(name, f.ranges): f for factor in right for name, f in parts(factor)}
    for key in mine:
        if key in theirs:
            yield key[0], mine[key], theirs[key]
    lone = [(name, f) for (name, r), f in mine.items() if (name, r) not in theirs]
    others = [(name, f) for (name, r), f in theirs.items() if (name, r) not in mine]
    # The same parameters came in other forms (data-dependent calls, another model): meet as rows, range by range.
    cut = [(name, r, p) for name, f in lone for r, p in _by_range(f)]
    for name, (start, stop), part in cut:
        for _, f in others:
            for (a, b), other in _by_range(f):
                low, high = max(start, a), min(stop, b)
                if low < high:
                    x = Rows([(low, high)], [part[..., low - start : high - start]])
                    yield name, x, Rows([(low, high)], [other[..., low - a : high - a]])


def _by_range(factor: Factor) -> list[tuple[tuple[int, int], Tensor]]:
    rows = factor.expand()
    return list(zip(rows.ranges, rows.parts, strict=True))
