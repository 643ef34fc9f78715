"""How long posterior samples take: classifiers as they stand, all parameters, to a residual of 1e-2.

The prior precision is that of a weight decay of 5e-4 on the mean loss. Weights and images are random unless there is a
folder with trained ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks.models import Model, ResNet, ResNet18, VisionTransformer
from benchmarks.timing import machine, synchronize
from linnet.likelihoods import Categorical
from linnet.sampling import Samples, effective_dimension, posterior_samples

DECAY = 5e-4
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """What is sampled.

    Attributes:
        make: The network.
        n: Examples.
        k: Samples.
        space: As for `posterior_samples`.
        memory: Bytes for a chunk, and for what is dense; None leaves both to linnet.
    """

    make: Callable[[], nn.Module]
    n: int
    k: int
    space: str = "weight"
    memory: tuple[float, float] | None = None


CASES: dict[str, Case] = {
    "resnet-20": Case(lambda: ResNet(3), n=20_000, k=64),
    "vit-tiny": Case(VisionTransformer, n=2_000, k=64, memory=(10 * GIB, 20 * GIB)),
    "vit-tiny-exact": Case(VisionTransformer, n=2_000, k=64, space="function", memory=(10 * GIB, 20 * GIB)),
    "resnet-18": Case(lambda: ResNet18(100), n=10_000, k=16),
    "small": Case(lambda: ResNet(1), n=32, k=16),
}


def network(name: str, data: Path | None) -> nn.Module:
    """The network of a case, with trained weights where there are some."""
    if name == "resnet-20" and data is not None:
        from experiments.pretrained import resnet

        return resnet(data / "weights", 20)
    return Model(CASES[name].make, (3, 32, 32)).build()


def images(n: int, data: Path | None) -> Tensor:
    """n images (n, 3, 32, 32), of CIFAR-10 where there is a folder."""
    if data is None:
        return Model(nn.Identity, (3, 32, 32)).data(n)
    from experiments.pretrained import cifar10

    parts = [cifar10(data, "train_1", count=n)[0]]
    if n > len(parts[0]):
        parts.append(cifar10(data, "train_2", count=n - len(parts[0]))[0])
    return torch.cat(parts)[:n]


def measured(
    name: str, device: str, *, n: int | None = None, precision: str = "high", data: Path | None = None
) -> dict[str, Any]:
    """Time, iterations, true residual and memory of one case."""
    case = CASES[name]
    X = images(n or case.n, data).to(device)
    lin = linnet.linearize(network(name, data).to(device))
    memory, dense = case.memory or ("auto", "auto")
    J = lin.jacobian(X, precision=precision, memory=memory, progress=False)
    S = torch.full((lin.p,), 1 / (DECAY * J.n), device=device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    synchronize(device)
    start = time.perf_counter()
    L = Categorical().root(J.outputs())
    found = posterior_samples(J, S, L, case.k, space=case.space, memory=dense, progress=False)  # type: ignore[arg-type]
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / GIB if device.startswith("cuda") else None
    gamma, error = effective_dimension(J, L, found.Z)
    solution = found.solution
    return {
        "what": name,
        "n": J.n,
        "c": J.c,
        "p": lin.p,
        "samples": case.k,
        "precision": precision,
        "data": "random" if data is None else "CIFAR-10",
        "seconds": seconds,
        "peak GiB": peak,
        "iterations": None if solution is None else solution.iterations,
        "residual": None if solution is None else solution.residual,
        "residual, highest precision": residual(lin, X, S, L, found, memory),
        "rank of the preconditioner": None if found.preconditioner is None else found.preconditioner.rank,
        "effective dimension": gamma,
        "its standard error": error,
    }


def residual(lin: linnet.Linearization, X: Tensor, S: Tensor, L: Tensor, found: Samples, memory: float | str) -> float:
    """The largest ``||b - H u|| / ||Phi^T L e||`` over the first four samples, every product in full precision."""
    from linnet.posterior import by_root
    from linnet.problem import Settings

    J, k = lin.jacobian(X, memory=memory, progress=False), min(4, found.k)
    d, settings = S.sqrt()[:, None], Settings(seed=found.seed)
    e = torch.randn(J.shape[0], found.k, generator=settings.generator(3))[:, :k].to(X.device)
    h = torch.randn(J.shape[1], found.k, generator=settings.generator(4))[:, :k].to(X.device)
    data = d * (J.T @ by_root(L, e))
    left = data + h - found.Z[:, :k] / d - d * J.normal(found.Z[:, :k].contiguous(), L @ L.mT)
    return float((left.norm(dim=0) / data.norm(dim=0)).max())


def run(device: str, out: Path, only: str, *, n: int | None, precision: str, data: Path | None) -> None:
    """Measure, print and keep."""
    chosen = [only] if only != "all" else ["small"] if device == "cpu" else [name for name in CASES if name != "small"]
    rows = []
    for name in chosen:
        if device.startswith("cuda"):
            measured(name, device, n=64, precision=precision, data=data)  # let the device load its kernels
            torch.cuda.empty_cache()
        rows.append(measured(name, device, n=n, precision=precision, data=data))
        print(json.dumps(rows[-1], indent=1), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")
