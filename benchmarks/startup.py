"""How long linnet takes to start: to import, and from a saved file to the first prediction, in fresh processes."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import linnet
from benchmarks.timing import machine

TARGETS = {"import linnet": 0.7, "load": 2.0}
"""Seconds beyond `import torch`."""

IMPORTS = {"python": "", "import torch": "import torch", "import linnet": "import torch, linnet"}
LOAD = """
import torch, linnet
from benchmarks.startup import network
estimator = linnet.load({path!r}, network({outputs}))
estimator.{ask}(torch.randn(5, 8))
"""


def network(outputs: int) -> nn.Module:
    """The network that the files belong to; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, outputs))


def files(folder: Path) -> dict[str, str]:
    """Fits and saves one of each estimator; their names, and the code that loads each and asks it something."""
    X = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    labels = X[:, :3].argmax(1)
    one, three = network(1), network(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these networks are not trained
        error_bars = linnet.Laplace(three, prior=0.1).fit(X, three(X).argmax(1))
    fitted = {
        "TangentRegressor": (linnet.TangentRegressor(one).fit(X, X[:, 0].sin()), 1, "predict"),
        "TangentClassifier": (linnet.TangentClassifier(three).fit(X, labels), 3, "predict_proba"),
        "Laplace": (error_bars, 3, "predict_proba"),
        "FisherEmbedding": (linnet.FisherEmbedding(three, 16).fit(X), 3, "transform"),
    }
    codes = {}
    for name, (estimator, outputs, ask) in fitted.items():
        path = str(folder / f"{name}.safetensors")
        estimator.save(path)
        codes[f"load {name}"] = LOAD.format(path=path, outputs=outputs, ask=ask)
    return codes


def seconds(code: str) -> tuple[float, float]:
    """Wall and CPU seconds of a fresh process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parents[1])
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(out: Path | None, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Medians over rounds, every contender once per round after one to warm up; written as JSON and printed."""
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        codes = IMPORTS | files(Path(folder))
        for i in range(rounds + 1):
            for name, code in codes.items():
                found = seconds(code)
                if i:
                    times.setdefault(name, []).append(found)
    table: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*values, strict=True))
        table[name] = {"seconds": round(wall, 3), "CPU seconds": round(cpu, 3)}
    base = table["import torch"]
    print(
        f"{'in a fresh process':24} {'seconds':>8} {'beyond torch':>13} {'of CPU':>7} {'torch = 1':>10} {'target':>7}"
    )
    for name, row in table.items():
        row["beyond torch"] = round(row["seconds"] - base["seconds"], 3)
        row["CPU beyond torch"] = round(row["CPU seconds"] - base["CPU seconds"], 3)
        row["ratio to torch"] = round(row["seconds"] / base["seconds"], 3)
        target = next((f"{limit:.1f}" for key, limit in TARGETS.items() if name.startswith(key)), "")
        print(
            f"{name:24} {row['seconds']:8.2f} {row['beyond torch']:13.2f} {row['CPU beyond torch']:7.2f} "
            f"{row['ratio to torch']:10.2f} {target:>7}"
        )
    if out is not None:
        record = {
            "machine": f"{machine('cpu')}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end",
            "rounds": rounds,
            "targets beyond torch": TARGETS,
            "times": table,
        }
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return table
