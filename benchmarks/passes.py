"""The fused pass J^T (J V) against a training step, the published product, and rows by vmap(grad).

Each network has one output per example (the log-sum-exp of its logits) and V has k = 42 columns. A training step
(plain forward and backward in all parameters) is timed in both memory layouts and the faster one counts; so is
linnet's pass. The published product and vmap(grad) run on fewer examples where memory or patience asks for it, and are
scaled to the same number.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks import rivals
from benchmarks.models import MODELS
from benchmarks.timing import machine, milliseconds, synchronize
from linnet._common import Precision, arithmetic

K = 42
# Examples for linnet and the training step; for the published product; for vmap(grad).
SIZES = {
    "cuda": {
        "wrn-40-2": (2048, 128, 512),
        "resnet-20": (2048, 256, 512),
        "vit-tiny": (2048, 64, 256),
        "mlp-800k": (8192, 8192, 1024),
    },
    "cpu": {
        "wrn-40-2": (16, 4, 8),
        "resnet-20": (64, 16, 32),
        "vit-tiny": (16, 4, 8),
        "mlp-800k": (256, 256, 128),
    },
}


def output(raw: Tensor) -> Tensor:
    return raw.logsumexp(1) if raw.shape[1] > 1 else raw[:, 0]


def network(name: str, precision: Precision, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds and ratios of one network at one precision."""
    n, n_published, n_rows = SIZES["cuda" if device.startswith("cuda") else "cpu"][name]
    spec = MODELS[name]
    model = spec.build(seed=0).eval().to(device)
    x = spec.data(n, seed=0).to(device)
    V = torch.randn(sum(t.numel() for t in model.parameters()), K, device=device)
    layouts = {"contiguous": torch.contiguous_format}
    if any(isinstance(m, nn.Conv2d) for m in model.modules()) and name != "vit-tiny":
        layouts["channels_last"] = torch.channels_last
    with arithmetic(precision, torch.device(device)):
        contenders: dict[str, Callable[[], object]] = {}
        for layout, form in layouts.items():
            net, inputs = copy.deepcopy(model), x
            if x.ndim == 4:
                net, inputs = net.to(memory_format=form), x.to(memory_format=form)
            J = linnet.linearize(net, output=output).jacobian(inputs, precision=precision, progress=False)
            contenders[f"step {layout}"] = partial(rivals.plain, net, output, inputs)
            contenders[f"fused {layout}"] = partial(J.normal, V)
        times = milliseconds(contenders, device, rounds=rounds)
        steps = {layout: times[f"step {layout}"] for layout in layouts}
        fused = {layout: times[f"fused {layout}"] for layout in layouts}
        chunk = 6 if device.startswith("cuda") else 7
        others = milliseconds(
            {
                "published": lambda: rivals.published(model, output, x[:n_published], V, chunk=chunk),
                "vmap_rows": lambda: rivals.per_example_rows(model, output, x[:n_rows], V, chunk=n_rows // 2),
            },
            device,
            rounds=max(1, rounds // 2),
        )
    step, best = min(steps.values()), min(fused.values())
    published, by_rows = others["published"] * n / n_published, others["vmap_rows"] * n / n_rows
    return {
        "network": name,
        "precision": precision,
        "n": n,
        "k": K,
        "step_ms": steps,
        "fused_ms": fused,
        "published_ms": published,
        "vmap_rows_ms": by_rows,
        "fused / step": best / step,
        "fused / step, same layout": {layout: fused[layout] / steps[layout] for layout in layouts},
        "published / fused": published / best,
        "vmap rows / fused": by_rows / best,
        "plan": str(J.plan).splitlines()[:2],
    }


def gram(device: str, n: int, dtype: torch.dtype = torch.float32, rounds: int = 3) -> dict[str, Any]:
    """The exact Gram matrix of the 803,601-parameter MLP."""
    spec = MODELS["mlp-800k"]
    model, x = spec.build(seed=0).eval().to(device, dtype), spec.data(n, seed=0).to(device, dtype)
    J = linnet.linearize(model).jacobian(x, progress=False)
    run = milliseconds({"gram": lambda: J.gram()}, device, rounds=rounds)
    return {"n": n, "dtype": str(dtype), "seconds": run["gram"] / 1e3}


class Generated(torch.utils.data.Dataset[Tensor]):
    """Examples made when they are asked for, so that the data takes no memory."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i))


def peak(n: int, device: str) -> int:
    """Peak bytes of one fused pass of ResNet-20 over n streamed images (this process has done nothing else)."""
    model = MODELS["resnet-20"].build(seed=0).eval().to(device)
    lin = linnet.linearize(model, output=output)
    J = lin.jacobian(Generated(n), 100, progress=False)
    V = torch.randn(lin.p, K, device=device)
    J.normal(V)
    synchronize(device)
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024


def memory(device: str) -> dict[str, Any]:
    """Peak memory of a pass over 1,000 and over 20,000 examples, each in a process of its own."""
    found = {}
    for n in (1000, 20000):
        command = [sys.executable, "-m", "benchmarks", "peak", "--device", device, "--n", str(n)]
        found[n] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return {"peak_bytes": found, "ratio": found[20000] / found[1000]}


def run(device: str, out: Path | None, rounds: int, only: str) -> None:
    """Everything; prints a line per measurement and writes JSON."""
    precisions: tuple[Precision, ...] = ("high", "highest") if device.startswith("cuda") else ("highest",)
    results: dict[str, Any] = {"machine": machine(device), "passes": []}
    print(results["machine"])
    for name in [name for name in MODELS if only in ("all", name)]:
        for precision in precisions:
            r = network(name, precision, device, rounds)
            results["passes"].append(r)
            step, fused = min(r["step_ms"].values()), min(r["fused_ms"].values())
            print(
                f"{name:10} {precision:8} step {step:9.1f} ms  fused {fused:9.1f} ms  fused/step {fused / step:.2f}"
                f"  published/fused {r['published / fused']:.0f}  vmap rows/fused {r['vmap rows / fused']:.1f}",
                r["fused / step, same layout"],
                flush=True,
            )
    if only in ("all", "gram"):
        cuda = device.startswith("cuda")
        sizes = [(100_000, torch.float32), (100_000, torch.float64)] if cuda else [(2_000, torch.float32)]
        results["gram"] = [gram(device, n, dtype) for n, dtype in sizes]
        for r in results["gram"]:
            print(f"gram       n = {r['n']:,} {r['dtype']} in {r['seconds']:.2f} s", flush=True)
    if only in ("all", "memory"):
        results["memory"] = memory(device)
        print(f"memory     {results['memory']}", flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")
