"""Several gloo processes on one machine: how long passes take, and how many bytes each rank receives.

    python -m benchmarks ranks

The bytes come from the TCP connections of a process, as Linux counts them, and stand beside the formula: a sum of S
bytes over w ranks brings 2 (w - 1) / w S bytes to each rank, and rows of S bytes together bring (w - 1) / w S. Each
exchange is preceded by a sum of 24 bytes, in which the ranks find out about failures. Times are those of the wall and
of the processor, the latter of all ranks together; efficiency is the processor's time of one process against them.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import linnet
from benchmarks.timing import milliseconds

COLUMNS = 16


def convolutional() -> nn.Module:
    """7,258 parameters, ten outputs."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 10)),
    )


def received() -> int:
    """Bytes that the TCP connections of this process have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since
            continue
        with one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
    return total


@dataclass(frozen=True)
class Job:
    """A computation that all ranks make together.

    Attributes:
        run: The computation.
        summed: Bytes that are added up over the ranks.
        gathered: Bytes of all rows that the ranks put together.
        given: Bytes that one rank has and sends to all.
        owned: Bytes of sums that go to the one rank that holds them. gloo lets each rank add up a part of them, and
            then sends the parts to this rank.
    """

    run: Callable[[], Any]
    summed: int = 0
    gathered: int = 0
    given: int = 0
    owned: int = 0

    def bytes(self, world: int) -> float:
        """Bytes that a rank receives, on average over the ranks."""
        owned = (1 + 1 / world) * self.owned
        return (world - 1) / world * (2 * self.summed + self.gathered + self.given + owned)


def jobs(n: int) -> dict[str, Job]:
    torch.manual_seed(0)
    lin, X = linnet.linearize(convolutional()), torch.randn(n, 1, 8, 8)
    J, few = lin.jacobian(X, progress=False), lin.jacobian(X[: n // 8], progress=False)
    rows, p = J.shape
    V, U = torch.randn(p, COLUMNS), torch.randn(rows, COLUMNS)
    parts = distribute_tensor(V, J.ranks.mesh("cpu"), [Shard(0)]) if dist.is_initialized() else V
    size = J.dtype.itemsize
    factors = J.kronecker()
    sides = [t for pair in factors.pairs.values() for side in (pair.inputs, pair.gradients) for t in side.sums]
    blocks = [*sides, *factors.exact.values()]
    sums = 8 * (1 + p + sum(t.numel() for t in blocks))
    pairs = [(t.numel() + t.shape[-1]) * 8 for t in blocks]
    return {
        "outputs": Job(J.outputs, gathered=size * rows),
        "J V": Job(lambda: J @ V, gathered=size * rows * COLUMNS),
        "J^T U": Job(lambda: J.T @ U, summed=size * p * COLUMNS),
        "J^T J V": Job(lambda: J.normal(V), summed=size * (p + 1) * COLUMNS),
        "J V in parts": Job(lambda: J @ parts, gathered=size * rows * COLUMNS, given=size * p * COLUMNS),
        "J^T J V in parts": Job(lambda: J.normal(parts), given=size * p * COLUMNS, owned=size * p * COLUMNS),
        "Gram matrix": Job(few.gram, gathered=size * few.shape[0] ** 2),
        "Gram matrix in parts": Job(few.own_gram),
        "Kronecker factors": Job(J.kronecker, summed=sums),
        "their eigenvectors": Job(factors.decomposed, given=sum(pairs)),
    }


def work(rank: int, world: int, folder: str, n: int, rounds: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if world > 1:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{world}", rank=rank, world_size=world)
    found = {}
    for name, job in jobs(n).items():
        job.run()  # chunks are compared once, and connections opened
        before = received()
        job.run()
        counted = torch.tensor(float(received() - before))
        if world > 1:
            dist.all_reduce(counted)
        begun = time.process_time()
        ms = milliseconds({name: job.run}, "cpu", rounds=rounds, warmup=0)[name]
        spent = torch.tensor(1e3 * (time.process_time() - begun) / rounds)
        if world > 1:
            dist.all_reduce(spent)
        found[name] = {"ms": ms, "cpu": float(spent), "bytes": float(counted) / world, "formula": job.bytes(world)}
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def run(out: Path | None, n: int, rounds: int, worlds: tuple[int, ...] = (1, 2, 4)) -> dict[str, dict[str, Any]]:
    """Print a table, and write it as JSON."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            mp.spawn(work, args=(world, folder, n, rounds), nprocs=world)
            for name, one in json.loads(Path(folder, f"{world}.json").read_text()).items():
                found.setdefault(name, {})[str(world)] = one
    cores = os.cpu_count()
    print(f"{n:,} examples, 10 outputs, 7,258 parameters, {COLUMNS} columns; Gram matrices of {n // 8} examples")
    print(f"float32, one thread a rank, {cores} cores; the time of the processor is that of all ranks together")
    print(f"{'':22} {'ranks':>5} {'ms':>9} {'CPU ms':>9} {'efficiency':>10} {'bytes a rank':>13} {'formula':>13}")
    for name, by_world in found.items():
        for world, one in by_world.items():
            # Efficiency uses processor time, because other processes on the machine do not change processor time.
            one["efficiency"] = by_world["1"]["cpu"] / one["cpu"] if "1" in by_world else None
            share = f"{one['efficiency']:.2f}" if one["efficiency"] else "-"
            times = f"{one['ms']:9.1f} {one['cpu']:9.1f}"
            print(f"{name:22} {world:>5} {times} {share:>10} {one['bytes']:13,.0f} {one['formula']:13,.0f}")
    if out is not None:
        facts = {"n": n, "columns": COLUMNS, "cores": cores, "threads": 1, "torch": torch.__version__}
        out.write_text(json.dumps({**facts, "found": found}, indent=1) + "\n")
    return found
