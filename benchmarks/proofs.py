"""The time that comparing new chunks with reverse mode adds to the first pass over a data set.

Every round makes a new Jacobian, times its first pass, which compares every chunk, and its second one, which does not.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linnet
from benchmarks.models import MODELS
from benchmarks.passes import output
from benchmarks.timing import machine, timed
from linnet.jacobian import Jacobian

COLUMNS = 16

REQUESTS: dict[str, Callable[[Jacobian, Tensor], object]] = {
    f"J.normal(V), k = {COLUMNS}": lambda J, V: J.normal(V),
    "J.normal(v), k = 1": lambda J, V: J.normal(V[:, 0]),
    "J @ v, k = 1": lambda J, V: J @ V[:, 0],
    "J.T @ u, k = 1": lambda J, V: J.T @ torch.ones(J.shape[0], dtype=J.dtype, device=J.device),
    "J.gram_diag()": lambda J, V: J.gram_diag(),
}


def first_passes(device: str, n: int, rounds: int, name: str = "resnet-20") -> list[dict[str, Any]]:
    """Seconds of first and second passes, and their ratio, by request and number of outputs."""
    spec = MODELS[name]
    model, x = spec.build(seed=0).eval().to(device), spec.data(n, seed=0).to(device)
    found = []
    for outputs, head in ((10, None), (1, output)):
        lin = linnet.linearize(model, output=head)
        V = torch.randn(lin.p, COLUMNS, device=device)
        for request, run in REQUESTS.items():
            times: list[tuple[float, float]] = []
            for i in range(rounds + 1):
                J = lin.jacobian(x, progress=False)
                first, second = (timed(partial(run, J, V), device)[0] for _ in range(2))
                if i:
                    times.append((first, second))
            ratio = statistics.median(a / b for a, b in times)
            row = {"network": name, "n": n, "outputs": outputs, "request": request, "first / second": ratio}
            found.append(row | {"seconds": [statistics.median(column) for column in zip(*times, strict=True)]})
            print(f"{name}, {outputs:2} outputs, {request:22} first / second pass {ratio:.3f}", flush=True)
    return found


def run(device: str, out: Path | None, rounds: int, n: int | None) -> None:
    """Print the ratios and write them to a file."""
    kind = device.partition(":")[0]
    path = out or Path(__file__).parent / "results" / f"proofs-{kind}.json"
    found = first_passes(device, n or (2048 if kind == "cuda" else 128), rounds)
    path.write_text(json.dumps({"machine": machine(device), "passes": found}, indent=1) + "\n")
