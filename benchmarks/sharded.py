"""Peak memory of one rank where the weights of a network lie in parts on several ranks, beside one process.

The network is a stack of wide linear layers with small adapters: its frozen weights outweigh everything else. All
contenders build the same weights, one matrix at a time, and run the same passes.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import linnet
from benchmarks.timing import machine

TARGET = 0.35
"""Largest peak of a rank of four, with one process as 1."""


class Layer(nn.Module):
    """A frozen linear layer with a low-rank one beside it."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def build(width: int, depth: int, *, sharded: bool) -> nn.Module:
    """The network; each rank keeps its part of the frozen weights, if ``sharded``."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(width) for _ in range(depth)), nn.Linear(width, 1).requires_grad_(False))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        adapters = {t for t in model.parameters() if t.requires_grad}
        for layer in model[:-1]:
            fully_shard(layer, ignored_params=adapters)
    model.to_empty(device="cpu")
    for number, t in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        fill(t, torch.randn(t.shape, generator=generator) / width**0.5)
    return model


@torch.no_grad()
def fill(t: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, or into the part of it that this rank keeps."""
    if hasattr(t, "to_local"):
        part = t.to_local()
        part.copy_(values.chunk(dist.get_world_size())[dist.get_rank()])
    else:
        t.copy_(values)


def passes(model: nn.Module, n: int) -> list[float]:
    """Products with the Jacobian and its Gram matrix, as one number each."""
    X = torch.randn(n, model[-1].in_features, generator=torch.Generator().manual_seed(0))
    J = linnet.linearize(model).jacobian(X)
    found = J.normal(torch.ones(J.shape[1])), J.T @ torch.ones(J.shape[0]), J.gram()
    return [float(t.norm()) for t in found]


def job(width: int, depth: int, n: int, *, sharded: bool) -> dict[str, Any]:
    """Peak bytes beyond those before the network was built, seconds, and a few numbers that all contenders share."""
    passes(build(8, 1, sharded=sharded), 3)  # what is imported on the way is no memory of the network
    before, most = psutil.Process().memory_info().rss, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, start = build(width, depth, sharded=sharded), time.perf_counter()
    numbers = passes(model, n)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak <= most:
        raise RuntimeError("The peak was reached before the network was built; measure a larger network.")
    weights = sum(t.nbytes for t in model.parameters())
    return {
        "peak": peak - before,
        "weights": weights,
        "seconds": round(time.perf_counter() - start, 1),
        "numbers": numbers,
    }


def work(rank: int, world: int, folder: str, size: tuple[int, int, int]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{world}", rank=rank, world_size=world)
    try:
        found = job(*size, sharded=world > 1)
        Path(f"{folder}/{world}-{rank}.json").write_text(json.dumps(found))
    finally:
        if world > 1:
            dist.destroy_process_group()


def run(out: Path | None, width: int = 1024, depth: int = 96, n: int = 4, worlds: tuple[int, ...] = (1, 4)) -> Any:
    """Measure one process and several ranks, print a table, and write JSON."""
    table: dict[str, dict[str, Any]] = {}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # what is freed goes back to the system, of all contenders
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            mp.spawn(work, (world, folder, (width, depth, n)), nprocs=world)
            ranks = [json.loads(Path(f"{folder}/{world}-{rank}.json").read_text()) for rank in range(world)]
            table[str(world)] = max(ranks, key=lambda found: found["peak"])
    one = table["1"]
    print(f"{'ranks':>5} {'peak of a rank':>15} {'one process = 1':>16} {'seconds':>8} {'numbers apart':>14}")
    for world, row in table.items():
        row["ratio"] = round(row["peak"] / one["peak"], 3)
        pairs = zip(row["numbers"], one["numbers"], strict=True)
        row["apart"] = max(abs(a - b) / abs(b) for a, b in pairs)
        peak = f"{row['peak'] / 2**20:.0f} MiB"
        print(f"{world:>5} {peak:>15} {row['ratio']:16.2f} {row['seconds']:8.1f} {row['apart']:14.1e}")
    if out is not None:
        record = {
            "machine": f"{machine('cpu')}, {os.cpu_count()} cores",
            "width": width,
            "depth": depth,
            "examples": n,
            "target at 4 ranks": TARGET,
            "ranks": table,
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return table
