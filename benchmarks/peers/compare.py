"""linnet beside its peers: seconds, memory, and how far the numbers are apart.

Each library has a process that imports it once and forks for each job (`process`), with one thread, so imports are not
counted and every measurement starts from the same state. The sides take turns, and the order changes from round to
round. Ratios are those of CPU seconds: with one thread, these are the seconds of a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benchmarks.laplace import by_adam, difference
from benchmarks.laplace import data as drawn
from benchmarks.peers.environment import ROOT, check, environment
from benchmarks.peers.jobs import JOBS, Job, in_words, network
from benchmarks.timing import machine

ONE_THREAD = {key: "1" for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Side:
    """A process that has imported a library and waits for jobs.

    Args:
        name: "linnet" or a peer.
        python: Its interpreter.
    """

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "benchmarks.peers.process", name],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions: dict[str, str] = json.loads(self._read())

    def run(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
        """What a job finds, and seconds, CPU seconds and MiB."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        if status := int(self._read()):
            error = folder / f"{self.name}.error"
            said = error.read_text()[-2000:] if error.exists() else "it left no message; was there enough memory?"
            raise RuntimeError(f"{self.name} ended with {status}:\n{said}")
        found = torch.load(folder / f"{self.name}.pt", weights_only=True)
        return found, json.loads((folder / f"{self.name}.json").read_text())

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with {self.process.wait()}; its error is above")
        return line

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.communicate()


def prepare(job: Job, folder: Path, steps: int = 20) -> int:
    """Write what both sides read, a network after some steps of Adam and its data; how many parameters are asked of."""
    X, y, new = drawn("digits")
    X, y, new = X[: job.n].double(), y[: job.n], new[: job.new].double()
    if job.task == "gp":
        y = (y.double() - 4.5) / 2.9  # which digit it is, as a number
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = network(job.network).double()
    by_adam(model, X, y[:, None] if job.task == "gp" else y, steps)
    layers = list(model.children())
    p = sum(t.numel() for t in (layers[-1] if job.last_layer else model).parameters())
    given = {"state": model.state_dict(), "X": X, "y": y}
    if job.new:
        given["new"] = new
    if job.columns:
        given["V"] = torch.randn(p, job.columns, dtype=X.dtype, generator=torch.Generator().manual_seed(1))
    torch.save(given, folder / "job.pt")
    (folder / "job.json").write_text(json.dumps(job.told()))
    return p


def row(job: Job, p: int, found: Mapping[str, Sequence[tuple[dict[str, Tensor], dict[str, float]]]]) -> dict[str, Any]:
    """One line of the table: medians over the rounds, and differences between what the two sides found.

    Args:
        job: What was done.
        p: Parameters of the network.
        found: For "linnet" and for the peer, one answer and its cost for each round.
    """
    out: dict[str, Any] = {"job": job.name, "peer": job.peer, "network": in_words(job.network), "p": p, "n": job.n}
    out |= {key: value for key, value in (("new", job.new), ("columns", job.columns)) if value}
    for side in (job.peer, "linnet"):
        costs = [cost for _, cost in found[side]]
        out[side] = {key: round(statistics.median(cost[key] for cost in costs), 4) for key in costs[0]}
    out["ratio"] = round(out[job.peer]["CPU seconds"] / out["linnet"]["CPU seconds"], 2)
    mine, theirs = found["linnet"][0][0], found[job.peer][0][0]
    if mine.keys() != theirs.keys():
        raise ValueError(f"both sides must find the same; linnet has {sorted(mine)}, {job.peer} {sorted(theirs)}")
    for name, t in mine.items():
        if t.shape != theirs[name].shape:
            raise ValueError(f"{name} of linnet is {tuple(t.shape)}, of {job.peer} {tuple(theirs[name].shape)}")
    out["differences"] = {name: difference(t, theirs[name]) for name, t in mine.items()}
    return out


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """As it is printed."""
    titles = ("job", "peer", "network", "p", "n", "CPU s, peer", "linnet", "ratio", "MiB, peer", "linnet", "difference")
    lines = [
        (
            *(str(one[key]) for key in ("job", "peer", "network")),
            *(f"{one[key]:,}" for key in ("p", "n")),
            *(f"{one[side]['CPU seconds']:.3f}" for side in (one["peer"], "linnet")),
            f"{one['ratio']:.1f}",
            *(f"{one[side]['MiB']:.0f}" for side in (one["peer"], "linnet")),
            f"{max(one['differences'].values()):.0e}",
        )
        for one in rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{word:{'<' if i < 3 else '>'}{width}}" for i, (word, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (titles, *lines)
    )


def run(
    out: Path | None,
    *,
    peer: str | None = None,
    venv: Path | None = None,
    only: str = "all",
    rounds: int = 3,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure, print and keep.

    Args:
        out: JSON file; None for no file.
        peer: An interpreter that has the peers; None makes an environment.
        venv: Where to make it, or where it was made.
        only: "all" or a peer.
        rounds: Each side does each job this often.
        quick: Small sizes, one round.
    """
    jobs = [job.quick() if quick else job for job in JOBS if only in ("all", job.peer)]
    peers = list(dict.fromkeys(job.peer for job in jobs))
    if peer is None:
        peer = environment() if venv is None else environment(venv)
    else:
        check(peer, peers)
    torch.set_num_threads(1)
    rows = []
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, peer)) for name in peers}
        sides["linnet"] = stack.enter_context(Side("linnet", sys.executable))
        versions = {key: value for side in sides.values() for key, value in side.versions.items() if key != "torch"}
        torches = {side.versions["torch"] for side in sides.values()}
        if len(torches) > 1:
            print(
                f"The sides have different versions of torch ({', '.join(sorted(torches))}): times may differ by that."
            )
        for job in jobs:
            rows.append(_measured(job, sides, 1 if quick else rounds))
            print(f"{job.name}, {in_words(job.network)}: {rows[-1]['ratio']} times {job.peer}'s speed", flush=True)
    found = {
        "machine": f"{_processor()}, {machine('cpu')}, load average {os.getloadavg()[0]:.1f} at the end",
        "versions": {"torch": " and ".join(sorted(torches)), **versions},
        "rounds": 1 if quick else rounds,
        "rows": rows,
    }
    print(f"\n{found['machine']}; " + ", ".join(f"{name} {said}" for name, said in versions.items()))
    print(table(rows))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _measured(job: Job, sides: Mapping[str, Side], rounds: int) -> dict[str, Any]:
    found: dict[str, list[tuple[dict[str, Tensor], dict[str, float]]]] = {job.peer: [], "linnet": []}
    with tempfile.TemporaryDirectory() as name:
        p = prepare(job, Path(name))
        for i in range(rounds):
            for side in list(found)[:: -1 if i % 2 else 1]:
                found[side].append(sides[side].run(Path(name)))
    return row(job, p, found)


def _processor() -> str:
    """The processor's name, where Linux says it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"
