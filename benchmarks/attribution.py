"""How long it takes to say what each training image does to the losses of test images, and in what memory.

Random weights, images and labels: passes take as long as with real ones. The network is fitted once ("ekfac", its
evidence and all). Attribution then runs for half of the training images and for all of them, for the largest changes
alone, so that its memory can be compared, and once for the whole matrix.
"""

from __future__ import annotations

import json
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import linnet
from benchmarks.models import Model, ResNet
from benchmarks.timing import machine, timed

SIZES = {"cpu": (1, 200, 10), "cuda": (3, 50_000, 1_000)}
"""Blocks of the ResNet, training images, test images."""

BATCH = {"cpu": 50, "cuda": 1000}
"""Images per chunk: the same for all sizes, so that memory can be compared."""


def peak(device: str) -> int:
    """Largest memory so far in bytes: of the GPU since it was asked last, or of the process."""
    if device.startswith("cuda"):
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(
    device: str, out: Path | None, n: int | None = None, tests: int | None = None, structure: Any = "ekfac"
) -> dict[str, Any]:
    """Fit, then attribute; prints the times and writes them as JSON."""
    kind = device.partition(":")[0]
    blocks, usual, usual_tests = SIZES[kind]
    n, m = n or usual, tests or usual_tests
    model = Model(lambda: ResNet(blocks), (3, 32, 32))
    net: nn.Module = model.build().to(device)
    X, X_test = model.data(n).to(device), model.data(m, seed=2).to(device)
    y, y_test = torch.arange(n, device=device) % 10, torch.arange(m, device=device) % 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network is not trained
        la = linnet.Laplace(net, structure=structure, batch_size=BATCH[kind], progress=False)
        fit, _ = timed(lambda: la.fit(X, y), device)
        record: dict[str, Any] = {
            "machine": machine(device),
            "parameters": la.lin_.p,
            "structure": structure,
            "test images": m,
            "chunk": BATCH[kind],
            "fit": {"images": n, "seconds": fit, "peak bytes": peak(device)},
        }
        for name, some in (("half", n // 2), ("all", n)):
            part = (X[:some], y[:some])
            seconds, _ = timed(lambda: linnet.attribution(la, X_test, y_test, of="loss", top=10, data=part), device)  # noqa: B023
            record[name] = {"images": some, "seconds": seconds, "peak bytes": peak(device)}
        seconds, found = timed(lambda: linnet.attribution(la, X_test, y_test, of="loss"), device)
        record["matrix"] = {"shape": list(found.shape), "seconds": seconds, "peak bytes": peak(device)}
    print(json.dumps(record, indent=1))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record
