"""The processes that share the examples of a data set, and all that they say to each other.

`Ranks` is a process group of torch.distributed, or this process alone. Before every exchange the ranks meet: each rank
says what it is about to exchange, in one all-reduce of four numbers. A rank that has failed says so at the next
meeting, in place of its part, so that no rank waits for a part that never comes. Ranks that are about to exchange
different things are told apart in the same way. Both raise on all ranks. A pass tells of its own exceptions, and a call
of an estimator of all that happen in the call (`Ranks.telling`).

A tensor may lie in parts on the ranks (`Holder`). A rank that needs the whole of it asks for it at a meeting. All ranks
then give their parts, whatever they are about to do, and meet again. So ranks may ask for different tensors, and some
ranks more often than others.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linnet._common.checksums import tensor_code, text_code
from linnet._common.memory import TEMPORARY

P = ParamSpec("P")
R = TypeVar("R")

DATA_DIMENSIONS = ("data", "dp")
"""Names of the dimension of a mesh over which examples are shared out."""

TEXT = 2048
"""Bytes of what each rank says where a meeting fails."""

PLACES = 2**24
"""Tensors that one holder can have."""


class Holder(Protocol):
    """Has tensors that lie in parts on the ranks."""

    def assemble(self, place: int) -> Tensor:
        """The whole of a tensor. All ranks call this together."""


_holders: WeakValueDictionary[int, Holder] = WeakValueDictionary()
"""Holders by their numbers, which are the same on all ranks."""


@final
class Ranks:
    """The processes that share the examples of a data set. All of them make the same calls in the same order.

    Args:
        group: A process group; None for the default group, once there is one.
        alone: Whether this process is the only one, whatever groups there are.

    Example:
        >>> ranks = Ranks()
        >>> ranks.rank, ranks.world, ranks.own(10)
        (0, 1, (0, 10))
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.group, self.alone = group, alone

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Ranks:
        """The ranks of the data dimension of a mesh; None for the default group.

        A mesh of one dimension is the data dimension. Of several dimensions it is the one called "data" or "dp".
        """
        if mesh is None:
            return cls()
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh; got {type(mesh).__name__}.")
        if mesh.ndim == 1:
            return cls(mesh.get_group())
        names = mesh.mesh_dim_names or ()
        found = [name for name in names if name in DATA_DIMENSIONS]
        if len(found) != 1:
            raise ValueError(
                f"linnet shares the examples out over one dimension of a mesh, called 'data' or 'dp'; this mesh has "
                f"{', '.join(map(repr, names)) or f'{mesh.ndim} dimensions without names'}. Pass the dimension "
                "itself, such as mesh['replicate']."
            )
        return cls(mesh.get_group(found[0]))

    @classmethod
    def of_all(cls, mesh: DeviceMesh | None) -> Ranks:
        """The ranks of all dimensions of a mesh; None for the default group."""
        if mesh is None or (isinstance(mesh, DeviceMesh) and mesh.ndim > 1 and mesh.size() == dist.get_world_size()):
            return cls()
        if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
            return cls.of(mesh)
        members = tuple(mesh.mesh.flatten().tolist())
        if members not in _groups:
            _groups[members] = dist.new_group(list(members), use_local_synchronization=True)
        return cls(_groups[members])

    @property
    def members(self) -> list[int]:
        """The ranks by their numbers in the default group."""
        return dist.get_process_group_ranks(self.group) if self.world > 1 else [0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a process group is what it is

    @property
    def world(self) -> int:
        """The number of ranks."""
        there = not self.alone and dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self.group) if there else 1

    @property
    def rank(self) -> int:
        """The number of this process."""
        return dist.get_rank(self.group) if self.world > 1 else 0

    def own(self, n: int) -> tuple[int, int]:
        """Start and stop of this rank's part of n examples."""
        return shard(n, self.rank, self.world)

    def part(self, m: int) -> tuple[int, int]:
        """Start and stop of this rank's part of m rows, as torch shards a DTensor: the last parts may be shorter.

        >>> Ranks(alone=True).part(10)
        (0, 10)
        """
        size, rank = -(-m // self.world), self.rank
        return min(m, rank * size), min(m, (rank + 1) * size)

    # Exchanges.

    def add_up(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the ranks."""
        if self.world == 1 or not tensors:
            return
        with self.exchange("the sum of " + _describe(*tensors)):
            for bucket in _make_buckets(tensors):
                flat = bucket[0] if len(bucket) == 1 else torch.cat([t.flatten() for t in bucket])
                dist.all_reduce(flat, group=self.group)
                if len(bucket) > 1:
                    for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        t.copy_(part.view(t.shape))

    def share_rows(self, t: Tensor, n: int, c: int = 1) -> None:
        """Fill in the rows of the other ranks' examples; t (n c, ...), each rank having filled its own."""
        if self.world > 1:
            start, stop = self.own(n)
            t.copy_(self.gather_rows(t[start * c : stop * c], n, c))

    def gather_rows(self, part: Tensor, n: int, c: int = 1) -> Tensor:
        """The rows of all examples, (n c, ...), from each rank's rows of its own examples."""
        world, shape = self.world, (n * c, *part.shape[1:])
        if world == 1:
            return part
        if 0 in shape:
            return part.new_empty(shape)
        most = -(-n // world) * c  # a collective takes parts of one size
        if len(part) < most:
            part = torch.cat([part, part.new_zeros(most - len(part), *shape[1:])])
        every = part.new_empty(world * most, *shape[1:])
        with self.exchange(f"the rows of {_describe(part.new_empty(()).expand(shape))} of {n} examples"):
            self._gather(every, part.contiguous())
        if len(every) == n * c:
            return every
        sizes = [c * (stop - start) for start, stop in (shard(n, rank, world) for rank in range(world))]
        return torch.cat([rows[:size] for rows, size in zip(every.split(most), sizes, strict=True)])

    def gather_parts(self, part: Tensor, m: int) -> Tensor:
        """All m rows, from each rank's `part` of them."""
        size, world = -(-m // self.world), self.world
        if world == 1:
            return part
        if len(part) < size:
            part = torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
        every = part.new_empty(world * size, *part.shape[1:])
        with self.exchange(f"the parts of {m} rows of {_describe(part[:1])}"):
            self._gather(every, part.contiguous())
        return every[:m]

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks as a mesh of one dimension, for DTensors on a kind of device."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, device)

    def share_results(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Give all ranks each tensor as its owner has it; the tensors have one dtype, and their shapes are known."""
        if self.world == 1 or not tensors:
            return
        with self.exchange("the results of " + _describe(*tensors)):
            for owner in sorted(set(owners)):
                some = [t for t, rank in zip(tensors, owners, strict=True) if rank == owner]
                flat = torch.cat([t.flatten() for t in some])
                dist.broadcast(flat, group=self.group, group_src=owner)
                for t, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                    t.copy_(part.view(t.shape))

    def smallest(self, value: float) -> float:
        """The smallest of the ranks' values, so that all decide alike on what only some can do."""
        if self.world == 1:
            return value
        t = torch.tensor(value, dtype=torch.float64, device=self._device)
        with self.exchange("the smallest of a number"):
            dist.all_reduce(t, dist.ReduceOp.MIN, group=self.group)
        return float(t)

    def count(self, value: bool) -> int:
        """Count the ranks on which a condition is true."""
        t = torch.tensor(int(value), device=self._device)
        self.add_up(t)
        return int(t)

    def add_up_checksums(self, own: int) -> str:
        """The sum over the ranks of a checksum from 0 to 2^64 - 1, modulo 2^64, as 16 hex digits."""
        every = torch.tensor(own - 2**64 if own >= 2**63 else own, device=self._device)
        self.add_up(every)
        return f"{int(every) % 2**64:016x}"

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise on all ranks unless all have the same values.

        Args:
            values: Tensors, or values that print alike, by name.

        Raises:
            ValueError: Says what differs, and on which ranks.
        """
        world = self.world
        if world == 1:
            return
        codes = [text_code(int(tensor_code(v)) if isinstance(v, Tensor) else v) for v in values.values()]
        own = torch.tensor(codes, device=self._device)
        every = own.new_empty(world, len(own))
        with self.exchange(f"whether the ranks agree on {', '.join(values)}"):
            self._gather(every.view(-1), own)
        others = [str(rank) for rank in range(world) if not torch.equal(every[rank], every[0])]
        if others:
            same = (every == every[0]).all(0).tolist()
            differ = [name.replace("_", " ") for name, agreed in zip(values, same, strict=True) if not agreed]
            raise _stop(
                ValueError(
                    f"The ranks of torch.distributed do not compute the same: rank 0 and rank {', '.join(others)} "
                    f"differ in {', '.join(differ)}. Give every rank the same weights, all of the data in the same "
                    "order, and the same options; linnet shares the examples out itself."
                )
            )

    # Tensors in parts.

    def register(self, holder: Holder) -> int:
        """The number of a holder, by which `fetch` knows it. All ranks make their holders together."""
        number = 1 - int(self.smallest(-max(_holders, default=0)))
        _holders[number] = holder
        return number

    def fetch(self, number: int, place: int) -> Tensor:
        """The whole of a tensor that lies in parts on the ranks.

        The other ranks give their parts at their next meeting.

        Args:
            number: The number of the holder.
            place: The place of the tensor there.
        """
        if self.world == 1:
            return _holders[number].assemble(place)
        wanted = number * PLACES + place
        found = self._meet("a weight that lies in parts", wanted)
        assert found is not None
        return found

    # Failures.

    def together(self) -> AbstractContextManager[None]:
        """A block that succeeds on all ranks, or raises on all of them."""
        return self.telling("the end of a call")

    @contextmanager
    def telling(self, end: str = "") -> Iterator[None]:
        """A block that tells the other ranks of its exception, which they raise at their next exchange.

        Inside another such block this one does nothing: an exception that is handled there is nothing to tell.

        Args:
            end: Description of the meeting at the end of the block; "" for no meeting.
        """
        if self.world == 1 or _inside.get():
            yield
            return
        token = _inside.set(True)
        try:
            yield
            if end:
                self._meet(end)
        except _Stop as stop:
            raise stop.error.with_traceback(stop.__traceback__) from stop.__cause__
        except Exception as error:
            self._tell(error)
            raise
        finally:
            _inside.reset(token)

    def _tell(self, error: Exception) -> None:
        """Say at the next meeting that this rank has failed."""
        try:
            dist.all_reduce(torch.tensor([1, 0, 0, 0], device=self._device), dist.ReduceOp.MAX, group=self.group)
            self._say(f"{type(error).__name__}\n{error}")
        except RuntimeError:  # the others are gone: the error itself is what there is to say
            return

    @contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        """Meet, and then exchange in the block; no rank may fail there for reasons of its own."""
        if self.world == 1:
            yield
            return
        self._meet(what)
        with self._connected(what):
            yield

    def _meet(self, what: str, wanted: int = 0) -> Tensor | None:
        """Raise on all ranks where one has failed, or where the ranks are about to exchange different things.

        Args:
            what: Description of the exchange that this rank is about to make.
            wanted: The tensor that this rank needs before it goes on; 0 for none.

        Returns:
            The whole of the tensor; None for none.
        """
        code = text_code(what)
        while True:
            words = torch.tensor([0, code, -code, wanted], device=self._device)
            with self._connected(what):
                dist.all_reduce(words, dist.ReduceOp.MAX, group=self.group)
                failed, most, least, asked = words.tolist()
                if asked and not failed:
                    found = _holders[asked // PLACES].assemble(asked % PLACES)
                    if asked == wanted:
                        return found
                    del found  # for another rank
                    continue
                if not failed and most == -least:
                    return None
                said = self._say(f"\n{what}")
            raise _stop(self._explain(said))

    def _explain(self, said: list[str]) -> Exception:
        """Make the error of a meeting that failed from the messages of all ranks."""
        errors = [(rank, *text.partition("\n")) for rank, text in enumerate(said) if not text.startswith("\n")]
        if errors:
            lines = [f"Rank {rank} of {self.world} failed with {kind}: {text}" for rank, kind, _, text in errors]
            return _error_of(errors[0][1])("\n".join(lines))
        calls = "; ".join(f"rank {rank} exchanges {text[1:]}" for rank, text in enumerate(said))
        return RuntimeError(
            f"The ranks of torch.distributed make different calls: {calls}. Every rank has to make the same calls "
            "in the same order, with arguments of the same shapes."
        )

    @contextmanager
    def _connected(self, what: str) -> Iterator[None]:
        """Say what was lost where another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise _stop(
                RuntimeError(
                    f"Rank {self.rank} of {self.world} has lost the other ranks while they exchanged {what}: one of "
                    "them has ended, or did not answer within the timeout of the process group. Look at the first "
                    f"error of the other ranks. torch.distributed says: {error}"
                )
            ) from error

    def _say(self, text: str) -> list[str]:
        """Send a text to all ranks, and return the texts of all ranks in their order."""
        own = text.encode()[:TEXT].ljust(TEXT, b"\0")
        every = torch.empty(self.world, TEXT, dtype=torch.uint8, device=self._device)
        part = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._device)
        self._gather(every.view(-1), part)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in every]

    def _gather(self, every: Tensor, part: Tensor) -> None:
        """Put the parts of all ranks, which are of one size, below each other."""
        # The older name is deprecated from torch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(every, part, group=self.group)

    @property
    def _device(self) -> torch.device:
        """The device for small exchanges: the CPU if the group can use it, because no GPU has to wait then."""
        if self.world == 1 or "cpu" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Groups of the ranks of whole meshes."""

ALONE = Ranks(alone=True)
"""This process, whatever groups there are."""


def is_sharded(t: object) -> bool:
    """Whether a tensor is a DTensor; where nobody has imported DTensor, there is none."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(t, found.DTensor)


def together(function: Callable[P, R]) -> Callable[P, R]:
    """A function that succeeds in all processes of torch.distributed, or raises in all of them."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Ranks().together():
            return function(*args, **kwargs)

    return run


def shard(n: int, rank: int, world: int) -> tuple[int, int]:
    """Start and stop of a rank's examples.

    >>> [shard(10, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return n * rank // world, n * (rank + 1) // world


def share_out(costs: Sequence[float], world: int) -> list[int]:
    """The rank that takes each of some tasks: the longest task first, each to the rank with the least to do.

    >>> share_out([1.0, 5.0, 3.0, 3.0], 2)
    [0, 0, 1, 1]
    """
    owners, loads = [0] * len(costs), [0.0] * world
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


_inside: ContextVar[bool] = ContextVar("linnet_inside_telling", default=False)


class _Stop(BaseException):
    """An error that all ranks know of, on its way to the end of `Ranks.telling`: nothing in between handles it.

    An error that only some ranks handle would leave them with other calls than the rest.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def _stop(error: Exception) -> BaseException:
    """Wrap an error that all ranks know of, so that nothing inside `Ranks.telling` handles the error."""
    return _Stop(error) if _inside.get() else error


def _error_of(kind: str) -> Callable[[str], Exception]:
    """The class of an error of another rank, so that callers that expect the error expect it on all ranks."""
    found = getattr(builtins, kind, None)
    plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)
    return found if plain else RuntimeError  # type: ignore[return-value]


def _make_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbors of one dtype, which are added up at once: each sum over the ranks takes its time to start."""
    buckets: list[list[Tensor]] = []
    held = 0
    for t in tensors:
        held += t.numel()
        if buckets and held <= TEMPORARY and buckets[-1][0].dtype == t.dtype:
            buckets[-1].append(t)
        else:
            buckets.append([t])
            held = t.numel()
    return buckets


def _describe(*tensors: Tensor) -> str:
    return ", ".join(f"{tuple(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for t in tensors)
