"""Estimators on today's models: seconds of fit and prediction with defaults, beside laplace-torch where it is there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from benchmarks import many_outputs
from benchmarks.models import ResNet
from benchmarks.timing import synchronize

MEMORY = 22 * 2**30
"""Bytes that a pass over a 7 B model may take."""


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


def laplace(device: str, n: int = 4096, new: int = 512) -> Iterator[list[dict[str, Any]]]:
    """`linnet.Laplace` and laplace-torch on ResNet-20, each with its defaults; the faster of two runs each.

    Yields all rows so far, after each row.

    laplace-torch has no Kronecker factors of batch norms, so both take the network with its batch norms folded too.
    """
    torch.manual_seed(0)
    plain = ResNet(3).eval().to(device)
    networks = {"ResNet-20": plain, "ResNet-20, batch norms folded": linnet.fold_batchnorm(plain)}
    (X, y), (Xn, _) = _images(n, device), _images(new, device)
    found = []
    for network, model in networks.items():
        for structure in ("kron", "diag"):
            ours: list[tuple[float, float]] = []
            for _ in range(2):
                la = linnet.Laplace(model, "classification", structure, progress=False)
                fit = seconds(lambda la=la: la.fit(X, y), device)[0]
                ours.append((fit, seconds(lambda la=la: la.predict_proba(Xn), device)[0]))
            row: dict[str, Any] = {
                "network": network,
                "structure": structure,
                "fit_s": min(a for a, _ in ours),
                "predict_s": min(b for _, b in ours),
            }
            theirs = _laplace_torch(model, X, y, Xn, structure, device)
            if "fit_s" in theirs:
                row["laplace_torch_fit_s"], row["laplace_torch_predict_s"] = theirs["fit_s"], theirs["predict_s"]
                row["laplace_torch_batch"] = theirs["batch"]
                row["fit ratio"] = row["laplace_torch_fit_s"] / row["fit_s"]
                row["predict ratio"] = row["laplace_torch_predict_s"] / row["predict_s"]
            else:
                row["laplace_torch"] = theirs["error"]
            found.append(row)
            yield found


def _laplace_torch(model: nn.Module, X: Tensor, y: Tensor, new: Tensor, structure: str, device: str) -> dict[str, Any]:
    """Seconds of laplace-torch with the largest batch that fits, the faster of two runs; or why it does not run."""
    from torch.utils.data import DataLoader, TensorDataset

    for batch in (256, 64, 16):
        try:
            from laplace import Laplace  # type: ignore[import-not-found]

            times: list[tuple[float, float]] = []
            for _ in range(2):
                la = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
                loader = DataLoader(TensorDataset(X, y), batch_size=batch)
                fit = seconds(lambda la=la, loader=loader: la.fit(loader), device)[0]
                parts = new.split(batch)
                predict = seconds(lambda la=la, parts=parts: [la(part) for part in parts], device)[0]
                times.append((fit, predict))
            return {"fit_s": min(a for a, _ in times), "predict_s": min(b for _, b in times), "batch": batch}
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception as error:  # another library: whatever it raises is the finding
            return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"error": "out of memory with batches of 16"}


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
    # By default linnet would take half of the memory.
    la = linnet.Laplace(model, "classification", "kron", memory=MEMORY, progress=False)
    fit, _ = seconds(lambda: la.fit(x, y), device)
    part = {key: t[:32] for key, t in x.items()}
    predict, _ = seconds(lambda: la.predict_proba(part), device)
    return {"n": n, "fit_s": fit, "predict_32_s": predict, "peak_gib": peak_gib(device), "memory": MEMORY}


def outputs(device: str) -> dict[str, Any]:
    """Error bars of 3 x 64 x 64 outputs from 32 posterior samples."""
    return many_outputs.run(device)
