r"""The Jacobian of a network over a data set, as a linear operator.

Row ``i * c + j`` is output j of example i; columns follow ``lin.theta``, each tensor flattened. A pass holds one chunk
of examples, never (n, p). Each rank of a torch.distributed process group takes its part of the examples, and every rank
gets the same answer. Passes over the data are those of `linnet.jacobian.passes`, Gram matrices and norms of
`linnet.jacobian.gram`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet._common import messages
from linnet._common.distributed import add_up, rank_and_world, share_rows
from linnet._common.torch_settings import Precision, check_precision
from linnet.data.batch import Batch, Deferred, Given, Source
from linnet.data.sources import bar
from linnet.jacobian.blocks.autodiff import Autodiff
from linnet.jacobian.blocks.composite import add_rmatmul
from linnet.jacobian.gram import Grams, by_range
from linnet.jacobian.kronecker import Rotation
from linnet.jacobian.passes import Piece
from linnet.jacobian.proofs import Proofs
from linnet.jacobian.rule_selection import PROBE
from linnet.linalg.operator import LinearOperator, RowFn
from linnet.linalg.operator_checks import by_block, check_fn_result, check_weight
from linnet.linalg.row_weights import add_symmetric_, weigh

BatchFn = Callable[[Tensor, Batch], Tensor]


class Jacobian(Grams):
    """See `linnet.Linearization.jacobian`.

    Attributes:
        n: Examples.
        c: Outputs.
        shape: (n * c, p).
    """

    symbol = "J"

    # Products.

    def _matmul(self, V: Tensor) -> Tensor:
        k, V = V.shape[1], self._aligned(V)

        def run() -> Tensor:
            out = V.new_zeros(self.shape[0], V.shape[1])
            for piece in self._pieces("matmul", V.shape[1], "J V"):
                out[self._rows(piece)] = _product(piece, V)
                del piece  # before the next one is formed, here and below
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
                del piece
            if first:  # this rank has no examples
                out.zero_()
            add_up(out)
            return out

        return self._completed(run)[:, :k]

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        return self._fused_by_piece(lambda out, piece: fn(out, self._rows(piece)), V)

    def _fused_by_piece(
        self, fn: Callable[[Tensor, Piece], Tensor], V: Tensor, *, summed: bool = True
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
                del piece
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
                del piece
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
                del piece, rows
            out.tril_()
            add_up(out)
            return out.add_(out.tril(-1).T)

        return self._completed(run)

    def _explicit(self, piece: Piece) -> Tensor:
        """The rows of a chunk, (n c, p)."""
        out = torch.zeros(piece.batch.n * self.c, self.shape[1], dtype=self.dtype, device=self.device)
        for factor in piece.factors:
            for (start, stop), part in by_range(factor):
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
        moved.lin, moved._proofs = self.lin.at(theta), Proofs()
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
        other._proofs = Proofs()
        return other

    def steady(self) -> Jacobian:
        """The Jacobian of the same examples, the same one however they are put into chunks; see
        `linnet.jacobian.cuda.float32_convolution`.

        Only convolutions in float32 on a GPU make a difference; elsewhere it is the Jacobian itself.
        """
        if type(self) is not Jacobian or not self.lin.convolves(self._settings.precision):
            return self
        other = copy.copy(self)
        other.lin = copy.copy(self.lin)
        other.lin.steady, other._proofs = True, Proofs()
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
                    proved: AbstractContextManager[tuple[list[Tensor], Any]]
                    proved = nullcontext(([], None)) if theta else self._outputs_proved(batch)
                    with proved as (made, _), self.lin._setting(self._settings.precision):
                        f = self.lin.forward(theta, batch).to(self.dtype)
                        made.append(f)
                    messages.check_outputs_finite(f, batch.start)
                    out[batch.start : batch.start + batch.n] = f
                    tick(batch.n)
            share_rows(out, self.n, 1)
            return out

        return self._completed(run)

    def targets(self) -> Any:
        """What came with the inputs in the data, of all examples: a tensor, or whatever structure it has."""
        parts = [batch.rest for batch in self._batches(self._chunk(), 0, self.n)]
        return messages.targets_of(parts, self._source.kind)

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
        messages.check_batch_size(size, name="size", auto=False)
        # Of one size as nearly as can be: examples of a small one would count for more in every epoch.
        chunks = torch.randperm(self.n, generator=torch.Generator().manual_seed(0)).tensor_split(ceil(self.n / size))
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed))
        return self._minibatches(chunks, order.tolist(), late=late)

    def forget_minibatches(self) -> None:
        """Free what `minibatches` may have copied for the next epoch."""

    def _minibatches(self, chunks: Sequence[Tensor], order: Sequence[int], *, late: bool) -> Iterator[Jacobian]:
        """The Jacobians of the examples at each index, in an order."""
        checks = Deferred(lambda f, index: messages.check_outputs_finite(f, 0, index)) if late else None
        try:
            for part in self._read_once([chunks[i] for i in order]):
                part._late = checks
                yield part
        finally:
            if checks is not None:
                checks.close()

    def _read_once(self, chunks: Sequence[Tensor]) -> Iterator[Jacobian]:
        source = self._source
        if not source.by_position:
            raise messages.no_subset(source.kind)
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
        part._proofs, part._agreed = self._proofs, True
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
        from linnet.jacobian.cached import bytes_of, keep

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
        from linnet.jacobian.cached import Cached, Kept, cache_limit, check_fits, keep

        limit = cache_limit(memory, self.device)
        check_fits(self, self.cache_size, limit)

        def run() -> list[Kept]:
            kept: list[Kept] = []
            held = 0
            with bar(self.n, "factors", progress=self._settings.progress) as tick:
                for batch in self._batches(self._kept_chunk(), 0, self.n):
                    chunk = self._whole_chunk(batch)
                    messages.check_outputs_finite(chunk.f, batch.start)
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

    def cached_if_fits(self) -> Jacobian:
        """`cached` where the factors fit memory, else `above_frozen` where that can be, else this Jacobian."""
        try:
            return self.cached()
        except MemoryError:
            pass
        try:
            return self.above_frozen()
        except (MemoryError, ValueError):  # neither fits, or nothing is frozen
            return self

    def above_frozen(self, memory: float | str = "auto", *, folder: str | os.PathLike[str] | None = None) -> Jacobian:
        """The same Jacobian with what the frozen layers compute kept: later passes start above them.

        One pass keeps what the modules below the first selected parameter return, as far as the others read it; see
        `linnet.jacobian.frozen_layers`. That is far less than the factors of `cached`, and a pass with it costs what
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
        from linnet.jacobian.cached import cache_limit
        from linnet.jacobian.frozen_layers import Frozen, Kept, storage

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

    def rotated(self, rotation: Rotation) -> Jacobian:
        """``J Q`` for an orthonormal change of coordinates within parameters; every product is of that."""
        if self._rotation is not None:
            raise ValueError("This Jacobian is rotated already.")
        turned = copy.copy(self)
        turned._rotation = rotation
        return turned


def _product(piece: Piece, V: Tensor) -> Tensor:
    """``J V`` of a chunk, (n c, k)."""
    total = V.new_zeros(*piece.f.shape, V.shape[1])
    for factor in piece.factors:
        factor.add_matmul(V, total)
    return total.flatten(0, 1)
