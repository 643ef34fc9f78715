"""How long conditioning takes: the exact Gaussian process, the matrix-free one, and a laptop's.

The network is the largest of Maddox et al. 2021 (803,601 parameters); inputs are standard normal, targets a smooth
function of them with noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linnet
from benchmarks.models import MODELS
from benchmarks.timing import machine, timed

TEST = 1000


def data(n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and new inputs."""
    X = MODELS["mlp-800k"].data(n + TEST)
    noise = 0.1 * torch.randn(n + TEST, generator=torch.Generator().manual_seed(2))
    y = torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + noise
    X, y = X.to(device), y.to(device)
    return X[:n], y[:n], X[n:]


def warm(device: str) -> None:
    """Let the device load its kernels."""
    model = MODELS["mlp-800k"].build().to(device)
    X, y, new = data(3000, device)
    for solver in ("function", "cg-function"):
        reg = linnet.TangentRegressor(
            model, prior=1.0, noise=1.0, solver=solver, rank=100, tolerance=1e-2, progress=False
        )
        reg.fit(X, y).predict(new, return_std=True)


def exact(device: str, n: int = 100_000) -> dict[str, Any]:
    """Log evidence, mean and variance at 1,000 points, prior and noise given, float64, blocked Cholesky in place."""
    model = MODELS["mlp-800k"].build().to(device)
    X, y, new = data(n, device)

    def run() -> tuple[linnet.TangentRegressor, Tensor, Tensor]:
        reg = linnet.TangentRegressor(model, prior=1e-3, noise=0.01, solver="function", progress=False).fit(X, y)
        return reg, *reg.predict(new, return_std=True)

    seconds, (reg, _, std) = timed(run, device)
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
    found = {"log evidence": reg.log_evidence_, "mean std": float(std.mean()), "dtype": str(reg.lin_.dtype)}
    return {"what": "exact", "n": n, "p": reg.lin_.p, "seconds": seconds, "peak bytes": peak, **found}


def million(device: str, n: int = 1_000_000, rank: int | str = "auto") -> dict[str, Any]:
    """Mean, evidence with its standard error, and variance from 64 samples, by preconditioned conjugate gradients."""
    model = MODELS["mlp-800k"].build().to(device)
    X, y, new = data(n, device)
    lin = linnet.linearize(model)
    noise = 1e-3 * float(lin.jacobian(X[: min(n, 100_000)]).gram_diag().mean())

    def run() -> tuple[linnet.TangentRegressor, Tensor, Tensor]:
        reg = linnet.TangentRegressor(
            model,
            prior=1.0,
            noise=noise,
            solver="cg-function",
            tolerance=1e-3,
            rank=rank,
            samples=64,
            progress=False,
        ).fit(X, y)
        return reg, *reg.predict(new, return_std=True)

    seconds, (reg, _, std) = timed(run, device)
    assert reg.solution_ is not None
    return {
        "what": "matrix-free",
        "n": n,
        "p": reg.lin_.p,
        "noise": noise,
        "seconds": seconds,
        "iterations": reg.solution_.iterations,
        "residual": reg.solution_.residual,
        "log evidence": reg.log_evidence_,
        "standard error": reg.log_evidence_error_,
        "mean std": float(std.mean()),
        "peak bytes": torch.cuda.max_memory_allocated() if device.startswith("cuda") else None,
    }


def laptop(device: str, n: int = 2000) -> dict[str, Any]:
    """Everything with the defaults, hyperparameters by the evidence; beside it the same by dense matrices alone."""
    model = MODELS["mlp-800k"].build().to(device)
    X, y, new = data(n, device)

    def ours() -> Any:
        reg = linnet.TangentRegressor(model, progress=False).fit(X, y)
        return reg, *reg.predict(new, return_std=True)

    seconds, (reg, _, std) = timed(ours, device)
    found = {"noise": reg.noise_, "scale": reg.scales_["all"], "log evidence": reg.log_evidence_}
    return {"what": "laptop", "n": n, "p": reg.lin_.p, "seconds": seconds, **found, "mean std": float(std.mean())}


def run(device: str, out: Path, only: str, n: int | None) -> None:
    """Measure, print and keep."""
    jobs = {"exact": exact, "million": million, "laptop": laptop}
    chosen = [only] if only != "all" else ["laptop"] if device == "cpu" else list(jobs)
    rows = []
    for name in chosen:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if not rows:
                warm(device)
                torch.cuda.reset_peak_memory_stats()
        row = jobs[name](device) if n is None else jobs[name](device, n)
        print(json.dumps(row, indent=1), flush=True)
        rows.append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")
