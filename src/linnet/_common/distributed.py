"""Sharding over the ranks of an initialized torch.distributed process group; without one, a single rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linnet._common.checksums import tensor_code, text_code


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def shard(n: int, rank: int, world: int) -> tuple[int, int]:
    """Start and stop of a rank's examples.

    >>> [shard(10, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return n * rank // world, n * (rank + 1) // world


def add_up(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the ranks."""
    if rank_and_world()[1] > 1:
        for t in tensors:
            dist.all_reduce(t)


def add_up_checksums(own: int, device: torch.device) -> str:
    """The sum over the ranks of a checksum from 0 to 2^64 - 1, modulo 2^64, as 16 hex digits."""
    every = torch.tensor(own - 2**64 if own >= 2**63 else own, device=device)
    add_up(every)
    return f"{int(every) % 2**64:016x}"


def smallest_over_ranks(value: float, device: torch.device) -> float:
    """The smallest of the ranks' values, so that all decide alike on what only some can do."""
    if rank_and_world()[1] == 1:
        return value
    t = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MIN)
    return float(t)


def check_ranks_agree(lin: Any, source: Any, **more: Any) -> None:
    """Raise on all ranks unless all have the same weights, the same data and the same of anything else.

    Each rank reads its own part of the data, so that all need all of it; a Dataset is compared by its length and a few
    of its examples. All ranks call this together.

    Args:
        lin: A `linnet.Linearization`.
        source: A `linnet.data.batch.Source`; None for no data.
        more: Other values that must be the same, by name: tensors, or values that print alike.

    Raises:
        ValueError: Says what differs, and on which ranks.
    """
    world = rank_and_world()[1]
    if world == 1:
        return
    values = {"the weights of the model": lin.network.watch.code}
    if source is not None:
        values |= {"the number of examples": source.n, "the data": source.glimpse()}
    values |= {name: int(tensor_code(v)) if isinstance(v, Tensor) else v for name, v in more.items()}
    own = torch.tensor([text_code(value) for value in values.values()], device=lin.device)
    found = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(found, own)
    others = [str(rank) for rank in range(world) if not torch.equal(found[rank], found[0])]
    if others:
        same = torch.stack([t == found[0] for t in found]).all(0).tolist()
        differ = [name.replace("_", " ") for name, agreed in zip(values, same, strict=True) if not agreed]
        raise ValueError(
            f"The ranks of torch.distributed do not compute the same: rank 0 and rank {', '.join(others)} differ in "
            f"{', '.join(differ)}. Give every rank the same weights, all of the data in the same order, and the same "
            "options; linnet shares the examples out itself."
        )


def share_rows(t: Tensor, n: int, c: int) -> None:
    """Fill in the rows of the other ranks' examples; t (n c, ...), each rank having filled its own."""
    world = rank_and_world()[1]
    for source in range(world) if world > 1 else ():
        start, stop = shard(n, source, world)
        if stop > start:
            rows = t[start * c : stop * c].contiguous()
            dist.broadcast(rows, source)
            t[start * c : stop * c] = rows
