"""`linnet adapt` on a CSV of 10,000 rows, in a fresh process, beside plain fine-tuning of the same network.

A small network is trained on one task and adapted to another, close to it, whose rows are in the file. Seconds are
those of a user who waits: imports, reading the file, the fit, the test, all that is written. CPU seconds add up over
the threads and vary less with what else a machine does. Fine-tuning is Adam with the same start, in a process of its
own; it needs a learning rate and gives no error bars.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.timing import machine

FEATURES = 20
TESTED = 1000
EPOCHS = 20


@dataclass(frozen=True)
class Case:
    """A task: hidden units, and outputs (1 is regression)."""

    hidden: tuple[int, ...]
    outputs: int

    def network(self) -> nn.Sequential:
        sizes = [FEATURES, *self.hidden, self.outputs]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f[:, 0], y) if self.outputs == 1 else F.cross_entropy(f, y.long())


CASES = {
    "classes": Case((32,), 3),
    "classes_deep": Case((50, 50), 3),
    "regression": Case((32,), 1),
    "regression_deep": Case((50, 50), 1),
}

# What --model names.
classes, classes_deep, regression, regression_deep = (case.network for case in CASES.values())


def drawn(case: Case, n: int, *, change: float, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of a random network of 30 units, or of one that differs from it by ``change``."""

    def normal(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    W = (normal(FEATURES, 30, seed=100) + change * normal(FEATURES, 30, seed=101)) / FEATURES**0.5
    X = normal(n, FEATURES, seed=seed)
    f = torch.tanh(1.5 * X @ W) @ normal(30, case.outputs, seed=102) / 30**0.5
    if case.outputs == 1:
        return X, f[:, 0] + 0.1 * normal(n, seed=seed + 1)
    gumbel = -torch.rand(n, case.outputs, generator=torch.Generator().manual_seed(seed + 1)).log_().neg_().log_()
    return X, (4 * f + gumbel).argmax(1)


def trained(case: Case, net: nn.Module, X: Tensor, y: Tensor, *, epochs: int, rate: float, seed: int = 0) -> nn.Module:
    """By Adam on minibatches of 128, its rate falling to zero."""
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    steps = epochs * -(-len(X) // 128)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(X), generator=generator).split(128):
            optimizer.zero_grad()
            case.loss(net(X[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return net


def prepare(folder: Path, name: str, n: int) -> None:
    """Write weights.safetensors, train.csv and test.csv."""
    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = case.network()
    trained(case, net, *drawn(case, 4000, change=0.0, seed=0), epochs=20, rate=1e-2)
    save_file(dict(net.state_dict()), folder / "weights.safetensors")
    for file, rows, seed in (("train.csv", n, 10), ("test.csv", TESTED, 20)):
        X, y = drawn(case, rows, change=0.5, seed=seed)
        with (folder / file).open("w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow([*(f"x{j}" for j in range(FEATURES)), "y"])
            for x, target in zip(X.tolist(), y.tolist(), strict=True):
                writer.writerow([*(f"{value:.6g}" for value in x), target if case.outputs > 1 else f"{target:.6g}"])


def tune(folder: str, name: str, epochs: int) -> None:
    """Fine-tune on the file; prints the loss on the test file."""
    case, at = CASES[name], Path(folder)
    net = case.network()
    net.load_state_dict(load_file(at / "weights.safetensors"))
    X, y, new, wanted = (t for file in ("train.csv", "test.csv") for t in _read(at / file))
    trained(case, net, X, y, epochs=epochs, rate=1e-3)
    with torch.no_grad():
        print(float(case.loss(net(new), wanted)))


def _read(file: Path) -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.float32))
    return table[:, :-1].contiguous(), table[:, -1].contiguous()


def timed(command: Sequence[str], threads: int, source: Path | None = None) -> tuple[dict[str, float], str]:
    """Seconds and CPU seconds of a process, and what it printed.

    Args:
        command: To run.
        threads: Of torch.
        source: Where to import linnet from; None as this process does.
    """
    root = Path(__file__).parents[1]
    paths = [str(p) for p in (source, root) if p is not None]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu seconds": used}, done.stdout


def measured(name: str, threads: int, n: int, source: Path | None) -> dict[str, Any]:
    """One case: the command, and fine-tuning beside it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder, name, n)
        out, load = folder / "run", round(os.getloadavg()[0], 1)  # of other work, which costs seconds
        options = {"model": f"benchmarks.command:{name}", "target": "y", "out": str(out)}
        options |= {key: str(folder / f"{key}.csv") for key in ("train", "test")}
        options["weights"] = str(folder / "weights.safetensors")
        pairs = [part for key, value in options.items() for part in (f"--{key}", value)]
        adapt, _ = timed([sys.executable, "-m", "linnet", "adapt", *pairs], threads, source)
        kept = json.loads((out / "metrics.json").read_text())
        code = f"from benchmarks.command import tune; tune({made!r}, {name!r}, {EPOCHS})"
        plain, printed = timed([sys.executable, "-c", code], threads)
    found = {key: kept[key] for key in ("parameters", "solver", "log_evidence", "prior_scales", "test")}
    return {
        "case": name,
        "rows": n,
        "threads": threads,
        "load before": load,
        "adapt": adapt,
        "fine-tuning": {**plain, "epochs": EPOCHS, "test loss": float(printed.split()[-1])},
        **found,
    }


def run(out: Path, *, only: str, n: int, threads: Sequence[int], source: Path | None) -> None:
    """Measure, print and keep."""
    rows: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"machine": f"{os.cpu_count()} CPU cores, {machine('cpu').split(', ')[1]}", "rows": rows}
    for name in CASES if only == "all" else (only,):
        for count in threads:
            row = measured(name, count, n, source)
            rows.append(row)
            ours, plain = row["adapt"], row["fine-tuning"]
            print(
                f"{name:15} p = {row['parameters']:5,}, {row['solver']:9}, {count} threads: "
                f"adapt {ours['seconds']:5.1f} s (CPU {ours['cpu seconds']:5.1f}), "
                f"{EPOCHS} epochs {plain['seconds']:5.1f} s (CPU {plain['cpu seconds']:5.1f})",
                flush=True,
            )
            out.write_text(json.dumps(kept, indent=1) + "\n")
