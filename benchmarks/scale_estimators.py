"""Estimators on today's models: seconds of fit and prediction with defaults, beside laplace-torch where it is there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks import many_outputs
from benchmarks.models import ResNet
from benchmarks.timing import synchronize


def seconds(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Wall time of a run, and what it gives."""
    synchronize(device)
    start = time.perf_counter()
    value = run()
    synchronize(device)
    return time.perf_counter() - start, value


def peak_gib(device: str) -> float:
    """Most memory since the last reset, GiB; nan on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else float("nan")


def _images(n: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 32, 32, generator=generator).to(device)
    return x, torch.randint(0, 10, (n,), generator=generator).to(device)


def laplace(device: str, n: int = 4096, new: int = 512) -> list[dict[str, Any]]:
    """`linnet.Laplace` and laplace-torch on ResNet-20, each with its defaults; the faster of two runs each."""
    torch.manual_seed(0)
    model = ResNet(3).eval().to(device)
    (X, y), (Xn, _) = _images(n, device), _images(new, device)
    found = []
    for structure in ("kron", "diag"):
        ours: list[tuple[float, float]] = []
        for _ in range(2):
            la = linnet.Laplace(model, "classification", structure, progress=False)
            ours.append(
                (seconds(lambda la=la: la.fit(X, y), device)[0], seconds(lambda la=la: la.predict_proba(Xn), device)[0])
            )
        row: dict[str, Any] = {
            "structure": structure,
            "fit_s": min(a for a, _ in ours),
            "predict_s": min(b for _, b in ours),
        }
        try:
            theirs = [_laplace_torch(model, X, y, Xn, structure, device) for _ in range(2)]
            row["laplace_torch_fit_s"] = min(a for a, _ in theirs)
            row["laplace_torch_predict_s"] = min(b for _, b in theirs)
            row["fit ratio"] = row["laplace_torch_fit_s"] / row["fit_s"]
            row["predict ratio"] = row["laplace_torch_predict_s"] / row["predict_s"]
        except Exception as error:  # another library: whatever it raises is the finding
            row["laplace_torch"] = f"{type(error).__name__}: {error}"[:300]
        found.append(row)
    return found


def _laplace_torch(
    model: nn.Module, X: Tensor, y: Tensor, new: Tensor, structure: str, device: str
) -> tuple[float, float]:
    from laplace import Laplace  # type: ignore[import-not-found]
    from torch.utils.data import DataLoader, TensorDataset

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
    loader = DataLoader(TensorDataset(X, y), batch_size=256)
    fit = seconds(lambda: la.fit(loader), device)[0]
    return fit, seconds(lambda: [la(part) for part in new.split(256)], device)[0]


def adapters(
    model: nn.Module, x: dict[str, Tensor], device: str, classes: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Every estimator on the adapters of a language model: seconds of fit and prediction together, beside a step."""
    n = len(next(iter(x.values())))
    y = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(0))
    quiet = {"progress": False}
    jobs: dict[str, Callable[[], object]] = {
        "TangentClassifier": lambda: linnet.TangentClassifier(model, **quiet).fit(x, y).predict_proba(x),
        "TangentRegressor": lambda: (
            linnet.TangentRegressor(model, **quiet).fit(x, torch.randn(n, classes)).predict(x, return_std=True)
        ),
        "Laplace kron": lambda: linnet.Laplace(model, "classification", "kron", **quiet).fit(x, y).predict_proba(x),
        "Laplace diag": lambda: linnet.Laplace(model, "classification", "diag", **quiet).fit(x, y).predict_proba(x),
        "FisherEmbedding": lambda: linnet.FisherEmbedding(model, 16, **quiet).fit_transform(x),
    }
    for _ in range(2):
        step()
    found: dict[str, Any] = {"n": n, "step_s": seconds(step, device)[0]}
    for name, run in jobs.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = min(seconds(run, device)[0] for _ in range(2))
        except Exception as error:  # one estimator that fails must not hide the others
            found[name] = f"{type(error).__name__}: {error}"[:300]
        print(f"  {name}: {found[name]}", flush=True)
    return found


def kron(model: nn.Module, x: dict[str, Tensor], device: str, classes: int) -> dict[str, Any]:
    """`Laplace` with Kronecker factors on the adapters of a large language model: seconds and GiB."""
    n = len(next(iter(x.values())))
    y = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(0))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    la = linnet.Laplace(model, "classification", "kron", progress=False)
    fit, _ = seconds(lambda: la.fit(x, y), device)
    part = {key: t[:32] for key, t in x.items()}
    predict, _ = seconds(lambda: la.predict_proba(part), device)
    return {"n": n, "fit_s": fit, "predict_32_s": predict, "peak_gib": peak_gib(device)}


def outputs(device: str) -> dict[str, Any]:
    """Error bars of 3 x 64 x 64 outputs from 32 posterior samples."""
    return many_outputs.run(device)
