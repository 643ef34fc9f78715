"""Sharding over the ranks of an initialized torch.distributed process group; without one, a single rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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


def smallest(value: float, device: torch.device) -> float:
    """The smallest of the ranks' values, so that all decide alike on what only some can do."""
    if rank_and_world()[1] == 1:
        return value
    t = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MIN)
    return float(t)


def share_rows(t: Tensor, n: int, c: int) -> None:
    """Fill in the rows of the other ranks' examples; t (n c, ...), each rank having filled its own."""
    world = rank_and_world()[1]
    for source in range(world) if world > 1 else ():
        start, stop = shard(n, source, world)
        if stop > start:
            rows = t[start * c : stop * c].contiguous()
            dist.broadcast(rows, source)
            t[start * c : stop * c] = rows
