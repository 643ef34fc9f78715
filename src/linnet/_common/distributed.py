"""The processes that share the examples of a data set, and all that they say to each other.

`Ranks` is a process group of torch.distributed, or this process alone. Before every exchange the ranks meet: each rank
says what it is about to exchange, in one all-reduce of three numbers. A rank that has failed says so at the next
meeting, in place of its part, so that no rank waits for a part that never comes. Ranks that are about to exchange
different things are told apart in the same way. Both raise on all ranks.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linnet._common.checksums import tensor_code, text_code

DATA_DIMENSIONS = ("data", "dp")
"""Names of the dimension of a mesh over which examples are shared out."""

TEXT = 2048
"""Bytes of what each rank says where a meeting fails."""


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

    # Exchanges.

    def add_up(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the ranks."""
        if self.world == 1 or not tensors:
            return
        with self._exchange("the sum of " + _describe(*tensors)):
            for t in tensors:
                dist.all_reduce(t, group=self.group)

    def share_rows(self, t: Tensor, n: int, c: int = 1) -> None:
        """Fill in the rows of the other ranks' examples; t (n c, ...), each rank having filled its own."""
        world = self.world
        if world == 1 or t.numel() == 0:
            return
        start, stop = (c * i for i in self.own(n))
        most = -(-n // world) * c  # a collective takes parts of one size
        part = t.new_zeros(most, *t.shape[1:])
        part[: stop - start] = t[start:stop]
        every = t.new_empty(world * most, *t.shape[1:])
        with self._exchange(f"the rows of {_describe(t)} of {n} examples"):
            self._gather(every, part)
        for source, rows in enumerate(every.split(most)):
            start, stop = (c * i for i in shard(n, source, world))
            t[start:stop] = rows[: stop - start]

    def smallest(self, value: float) -> float:
        """The smallest of the ranks' values, so that all decide alike on what only some can do."""
        if self.world == 1:
            return value
        t = torch.tensor(value, dtype=torch.float64, device=self._device)
        with self._exchange("the smallest of a number"):
            dist.all_reduce(t, dist.ReduceOp.MIN, group=self.group)
        return float(t)

    def count(self, value: bool) -> int:
        """Of how many ranks something is true."""
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
        with self._exchange(f"whether the ranks agree on {', '.join(values)}"):
            self._gather(every.view(-1), own)
        others = [str(rank) for rank in range(world) if not torch.equal(every[rank], every[0])]
        if others:
            same = (every == every[0]).all(0).tolist()
            differ = [name.replace("_", " ") for name, agreed in zip(values, same, strict=True) if not agreed]
            raise _told(
                ValueError(
                    f"The ranks of torch.distributed do not compute the same: rank 0 and rank {', '.join(others)} "
                    f"differ in {', '.join(differ)}. Give every rank the same weights, all of the data in the same "
                    "order, and the same options; linnet shares the examples out itself."
                )
            )

    # Failures.

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that succeeds on all ranks, or raises on all of them."""
        with self.telling():
            yield
            if self.world > 1:
                self._meet("the end of a call")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks about an exception in the block, which they learn of at their next exchange."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        """Say at the next meeting that this rank has failed."""
        if self.world == 1 or getattr(error, "all_ranks_know", False):
            return
        _told(error)
        try:
            dist.all_reduce(torch.tensor([1, 0, 0], device=self._device), dist.ReduceOp.MAX, group=self.group)
            self._say(f"{type(error).__name__}\n{error}")
        except RuntimeError:  # the others are gone: the error itself is what there is to say
            return

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Meet, and then exchange in the block; no rank may fail there for reasons of its own."""
        self._meet(what)
        with self._connected(what):
            yield

    def _meet(self, what: str) -> None:
        """Raise on all ranks where one has failed, or where the ranks are about to exchange different things."""
        code = text_code(what)
        words = torch.tensor([0, code, -code], device=self._device)
        with self._connected(what):
            dist.all_reduce(words, dist.ReduceOp.MAX, group=self.group)
            failed, most, least = words.tolist()
            if not failed and most == -least:
                return
            said = self._say(f"\n{what}")
        errors = [(rank, *text.partition("\n")) for rank, text in enumerate(said) if not text.startswith("\n")]
        if errors:
            lines = [f"Rank {rank} of {self.world} failed with {kind}: {text}" for rank, kind, _, text in errors]
            raise _told(_error_of(errors[0][1])("\n".join(lines)))
        calls = "; ".join(f"rank {rank} exchanges {text[1:]}" for rank, text in enumerate(said))
        raise _told(
            RuntimeError(
                f"The ranks of torch.distributed make different calls: {calls}. Every rank has to make the same calls "
                "in the same order, with arguments of the same shapes."
            )
        )

    @contextmanager
    def _connected(self, what: str) -> Iterator[None]:
        """Say what was lost where another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise _told(
                RuntimeError(
                    f"Rank {self.rank} of {self.world} has lost the other ranks while they exchanged {what}: one of "
                    "them has ended, or did not answer within the timeout of the process group. Look at the first "
                    f"error of the other ranks. torch.distributed says: {error}"
                )
            ) from error

    def _say(self, text: str) -> list[str]:
        """What each rank says."""
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
        """Where small tensors are exchanged: on the CPU where the group can, so that no GPU is waited for."""
        if self.world == 1 or "cpu" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


ALONE = Ranks(alone=True)
"""This process, whatever groups there are."""


def shard(n: int, rank: int, world: int) -> tuple[int, int]:
    """Start and stop of a rank's examples.

    >>> [shard(10, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return n * rank // world, n * (rank + 1) // world


def _told(error: Exception) -> Exception:
    """The error, as one that all ranks know of."""
    error.all_ranks_know = True  # type: ignore[attr-defined]
    return error


def _error_of(kind: str) -> Callable[[str], Exception]:
    """The class of an error of another rank, so that callers that expect the error expect it on all ranks."""
    found = getattr(builtins, kind, None)
    plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)
    return found if plain else RuntimeError  # type: ignore[return-value]


def _describe(*tensors: Tensor) -> str:
    return ", ".join(f"{tuple(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for t in tensors)
