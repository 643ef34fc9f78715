"""Products with vectors of length p of which each rank holds a part: DTensors that are sharded over their rows.

A pass fetches the rows that belong to a parameter for the product with the columns of this parameter, and frees them
after the product. What the product adds to a result goes to the rank that holds these rows. So a rank holds its part of
V and of the result, and the rows of one parameter. The ranks need not run the same passes: a rank asks at the next
meeting of the ranks (`linnet._common.Ranks`), and the other ranks answer there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, Disproved, Range

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from linnet.jacobian.jacobian import Jacobian
    from linnet.jacobian.passes import Piece


def multiply(J: Jacobian, V: DTensor) -> DTensor:
    """``J V``, (n c, k), whole on every rank, for V (p, k) in parts."""
    given = _Given(J, V)

    def run(pieces: Iterator[Piece]) -> Tensor:
        out = torch.zeros(J.shape[0], V.shape[1], dtype=J.dtype, device=J.device)
        for piece in pieces:
            out[piece.rows] = given.multiply(piece)
        return out

    out = _complete(J, V.shape[1], "J V", run, [])
    with J.ranks.telling():
        J.ranks.share_rows(out, J.n, J.c)
    return _replicated(out, V)


def multiply_adjoint(J: Jacobian, U: DTensor) -> DTensor:
    """``J^T U``, (p, k) in parts, for U (n c, k)."""
    _check_mesh(J, U)
    whole = U.full_tensor()
    summed = _Summed(J, whole.shape[1])

    def run(pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            summed.add(piece, whole[piece.rows])

    _complete(J, whole.shape[1], "J^T U", run, [summed])
    return _sharded(summed.part, U, J.shape[1])


def multiply_fused(J: Jacobian, fn: Callable[[Tensor, Piece], Tensor], V: DTensor) -> tuple[DTensor, Tensor]:
    """``J^T U``, (p, k) in parts, and the sums of U over its rows, for ``U = fn(J V)`` and V (p, k) in parts."""
    given, summed = _Given(J, V), _Summed(J, V.shape[1])

    def run(pieces: Iterator[Piece]) -> Tensor:
        sums = torch.zeros(V.shape[1], dtype=J.dtype, device=J.device)
        for piece in pieces:
            U = fn(given.multiply(piece), piece)
            sums += U.sum(0)
            summed.add(piece, U)
        return sums

    sums = _complete(J, V.shape[1], "J^T J V", run, [summed])
    with J.ranks.telling():
        J.ranks.add_up(sums)
    return _sharded(summed.part, V, J.shape[1]), sums


def _complete(
    J: Jacobian, k: int, label: str, run: Callable[[Iterator[Piece]], Any], results: Sequence[_Summed]
) -> Any:
    """The result of a pass. Where a rank has to begin again, all ranks do: their parts hold sums of its first try."""
    ranks, passes = J.ranks, J.passes

    def attempt() -> Any:
        while True:
            for result in results:
                result.part.zero_()
            failure: Exception | None = None
            found = None
            try:
                found = run(passes.pieces("diag", k, label))
            except (Disproved, torch.OutOfMemoryError) as error:
                failure = error
            again = ranks.count(failure is not None)  # also the meeting at which other ranks ask for parts
            if failure is not None:
                raise failure
            if not again:
                return found

    return passes.complete(attempt)


@final
class _Window:
    """Some rows of a tensor (p, k), under the numbers that they have there: as much of it as one block needs."""

    def __init__(self, parts: dict[Range, Tensor], p: int) -> None:
        self.parts = parts
        some = next(iter(parts.values()))
        self.shape, self.dtype, self.device = (p, some.shape[1]), some.dtype, some.device
        self.new_zeros, self.new_empty = some.new_zeros, some.new_empty

    def __getitem__(self, key: slice | tuple[Any, ...]) -> Tensor:
        rows, *rest = key if isinstance(key, tuple) else (key,)
        for (start, stop), part in self.parts.items():
            if start <= rows.start and rows.stop <= stop:
                found = part[rows.start - start : rows.stop - start]
                return found[(slice(None), *rest)] if rest else found
        raise IndexError(f"rows {rows.start} to {rows.stop} are not here")


class _Rows:
    """The rows of a tensor (p, k), in parts of one size on the ranks.

    Args:
        J: (n c, p).
        part: The rows of this rank.
    """

    def __init__(self, J: Jacobian, part: Tensor) -> None:
        self.part, self.ranks, self.p = part, J.ranks, J.shape[1]
        self.slices = [(s.start, s.stop) for s in J.lin.layout.slices.values()]
        self.number = self.ranks.register(cast(Any, self))

    def places(self, block: ColumnBlock) -> list[int]:
        """The parameters that a block has columns of."""
        return [
            i for i, (a, b) in enumerate(self.slices) if any(a < stop and start < b for start, stop in block.ranges)
        ]

    def shares(self, place: int) -> Iterator[tuple[int, slice, slice]]:
        """The ranks that hold rows of a parameter, with the places of the rows in the parameter and on the rank."""
        a, b = self.slices[place]
        size = -(-self.p // self.ranks.world)  # as `Ranks.part`
        for rank in range(a // size, -(-b // size)):
            low, high = max(a, rank * size), min(b, (rank + 1) * size)
            yield rank, slice(low - a, high - a), slice(low - rank * size, high - rank * size)


@final
class _Given(_Rows):
    """A tensor (p, k) that a pass multiplies with."""

    def __init__(self, J: Jacobian, V: DTensor) -> None:
        _check_mesh(J, V)
        _check_rows(V)
        super().__init__(J, V.to_local().detach().contiguous())

    def assemble(self, place: int) -> Tensor:
        a, b = self.slices[place]
        whole = self.part.new_empty(b - a, self.part.shape[1])
        for rank, there, here in self.shares(place):
            if rank == self.ranks.rank:
                whole[there] = self.part[here]
            if self.ranks.world > 1:
                dist.broadcast(whole[there], group=self.ranks.group, group_src=rank)
        return whole

    def multiply(self, piece: Piece) -> Tensor:
        """``J V`` of a chunk, (n c, k)."""
        total = self.part.new_zeros(*piece.f.shape, self.part.shape[1])
        for block in piece.blocks:
            rows = {self.slices[i]: self.ranks.fetch(self.number, i) for i in self.places(block)}
            block.add_matmul(cast(Tensor, _Window(rows, self.p)), total)
        return total.flatten(0, 1)


@final
class _Summed(_Rows):
    """A tensor (p, k) that a pass adds to."""

    def __init__(self, J: Jacobian, k: int) -> None:
        start, stop = J.ranks.part(J.shape[1])
        super().__init__(J, torch.zeros(stop - start, k, dtype=J.dtype, device=J.device))
        self._pending: dict[int, Tensor] = {}

    def assemble(self, place: int) -> Tensor:
        a, b = self.slices[place]
        found = self._pending.pop(place, None)
        found = self.part.new_zeros(b - a, self.part.shape[1]) if found is None else found
        for rank, there, here in self.shares(place):
            some = found[there]
            if self.ranks.world > 1:
                dist.reduce(some, group=self.ranks.group, group_dst=rank)
            if rank == self.ranks.rank:
                self.part[here] += some
        return found

    def add(self, piece: Piece, U: Tensor) -> None:
        """Add ``J^T U`` of a chunk, for U (n c, k)."""
        U = U.reshape(piece.batch.n, piece.f.shape[1], -1)
        for block in piece.blocks:
            places = self.places(block)
            rows = {self.slices[i]: self.part.new_zeros(_length(self.slices[i]), U.shape[2]) for i in places}
            block.rmatmul(U, cast(Tensor, _Window(rows, self.p)))
            for i in places:
                self._pending[i] = rows[self.slices[i]]
                self.ranks.fetch(self.number, i)


def _length(r: Range) -> int:
    return r[1] - r[0]


def _check_mesh(J: Jacobian, V: DTensor) -> None:
    members = V.device_mesh.mesh.flatten().tolist()
    expected = J.ranks.members if J.ranks.world > 1 else members
    if V.device_mesh.ndim != 1 or members != expected:
        raise ValueError(
            f"A DTensor that J multiplies lies on a mesh of one dimension with the ranks {expected}, which share the "
            f"examples out; got a mesh of {V.device_mesh.ndim} dimensions with the ranks {members}."
        )
    if J.passes.rotation is not None:
        raise ValueError("Vectors in parts are in the parameters' own coordinates; this Jacobian is rotated.")


def _check_rows(V: DTensor) -> None:
    from torch.distributed.tensor import Shard

    if V.placements != (Shard(0),):
        raise ValueError(
            f"A DTensor that J multiplies is sharded over its rows, [Shard(0)]; got {list(V.placements)}. Use "
            "V.redistribute(placements=[Shard(0)])."
        )


def _sharded(part: Tensor, like: DTensor, p: int) -> DTensor:
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((p, part.shape[1]))
    return DTensor.from_local(part, like.device_mesh, [Shard(0)], shape=shape, stride=(part.shape[1], 1))


def _replicated(whole: Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(whole, like.device_mesh, [Replicate()])
