"""linnet.Laplace beside laplace-torch: the same numbers, and how long they take.

laplace-torch runs in an interpreter of its own (``--peer``), with one thread, and so does linnet here: imports are not
counted on either side, everything else is. ``--only passes`` counts forward and backward passes of a fit, without
laplace-torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from benchmarks.laplace_peer import network
from benchmarks.models import ResNet
from benchmarks.timing import machine, timed
from linnet.jacobian.kronecker import Kronecker
from linnet.laplace import search

ROOT = Path(__file__).resolve().parents[1]
JOBS = [
    {"network": kind, "structure": structure, "last_layer": last}
    for kind in ("classes", "numbers", "cnn")
    for structure in ("full", "diag", "kron")
    for last in (False, True)
]


def data(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and new inputs, float64 but for the digits."""
    generator = torch.Generator().manual_seed(0)
    if kind == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        X, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
        order = torch.randperm(len(X), generator=generator)
        return X[order[:797]], y[order[:797]], X[order[797:]]
    shape = (1, 8, 8) if kind == "cnn" else (4,)
    X = torch.randn(60, *shape, dtype=torch.float64, generator=generator)
    flat = X.flatten(1)
    y = flat[:, :2].sin() if kind == "numbers" else (flat[:, 0] > 0).long() + (flat[:, 1] > 0.5).long()
    return X[:40], y[:40], X[40:]


def trained(kind: str, X: Tensor, y: Tensor, steps: int = 300) -> nn.Module:
    """The network after some steps of Adam on all data."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = network(kind).to(X.dtype)
    return by_adam(model, X, y, steps)


def by_adam(model: nn.Module, X: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The same network after some steps on all data; targets are classes, or numbers in the shape of its outputs."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        f = model(X)
        loss = F.mse_loss(f, y) if y.is_floating_point() else F.cross_entropy(f, y)
        loss.backward()
        optimizer.step()
    return model.eval()


Job = tuple[nn.Module, dict[str, Any], tuple[Tensor, ...]]
"""A network, what to do, and inputs, targets and new inputs."""


def peer(python: str, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What laplace-torch finds, and its seconds, for each job; one process for all."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(i) for i in range(len(jobs))]
        for folder, (model, told, (X, y, new)) in zip(folders, jobs, strict=True):
            folder.mkdir()
            torch.save({"state": model.state_dict(), "X": X, "y": y, "new": new}, folder / "job.pt")
            (folder / "job.json").write_text(json.dumps(told))
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [python, "-m", "benchmarks.laplace_peer", *map(str, folders)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"laplace-torch failed in {python}:\n{done.stderr[-2000:]}")
        return [
            {
                "tensors": torch.load(folder / "found.pt", weights_only=True),
                **json.loads((folder / "found.json").read_text()),
            }
            for folder in folders
        ]


def ours(job: Job) -> dict[str, Any]:
    """The same by linnet."""
    model, told, (X, y, new) = job
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    given: dict[str, Any] = {"noise": told["noise"]} if told["likelihood"] == "regression" else {}
    start = time.perf_counter()
    la = linnet.Laplace(
        model,
        told["likelihood"],
        told["structure"],
        told["prior"],
        f"{layers[-1]}.*" if told["last_layer"] else None,
        progress=False,
        **given,
    )
    la.fit(X, y)
    fitted = time.perf_counter()
    if told["tune"]:
        la.tune("shared", noise=False)
    tuned = time.perf_counter()
    found = {}
    if told["tune"] or told["likelihood"] == "classification":
        found["probit"] = la.predict_proba(new)
    if not told["tune"]:
        mean, cov = la.predict(new, return_cov=True)
        n, c = mean.shape
        found |= {"mean": mean, "cov": cov.view(n, c, n, c).diagonal(dim1=0, dim2=2).movedim(-1, 0)}
        if told["likelihood"] == "classification":
            found["bridge"] = la.predict_proba(new, "bridge")
    done = time.perf_counter()
    return {
        "tensors": found,
        "fit": fitted - start,
        "tune": tuned - fitted,
        "predict": done - tuned,
        "seconds": done - start,
        "log evidence": la.log_evidence(),
        "prior": float(la.prior_variance_[0]),
    }


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the size of the second."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def agreement(python: str) -> list[dict[str, Any]]:
    """Evidence, covariances and probabilities at the same prior and noise."""
    jobs: list[Job] = []
    for job in JOBS:
        kind = str(job["network"])
        likelihood = "regression" if kind == "numbers" else "classification"
        told = {**job, "likelihood": likelihood, "prior": 0.4, "noise": 0.05, "batch": 16, "tune": False}
        parts = data(kind)
        jobs.append((trained(kind, *parts[:2]), told, parts))
    rows = []
    for job, theirs, made in zip(JOBS, peer(python, jobs), jobs, strict=True):
        mine = ours(made)
        row = {**job, "log evidence": mine["log evidence"], "peer's": theirs["log evidence"]}
        row["evidence"] = abs(mine["log evidence"] / theirs["log evidence"] - 1)
        row |= {name: difference(mine["tensors"][name], t) for name, t in theirs["tensors"].items()}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def speed(python: str, rounds: int) -> dict[str, Any]:
    """Fit, tune and 1,000 predictions of the digits network (26,122 parameters) with Kronecker factors."""
    parts = data("digits")
    model = trained("digits", *parts[:2], steps=200)
    told: dict[str, Any] = {"network": "digits", "structure": "kron", "last_layer": False, "tune": True}
    told |= {"likelihood": "classification", "prior": 1.0, "noise": 1.0, "batch": 100}
    job: Job = (model, told, parts)
    results = [(peer(python, [job])[0], ours(job)) for _ in range(rounds)]
    theirs, mine = (min(side, key=lambda found: found["seconds"]) for side in zip(*results, strict=True))
    keys = ("fit", "tune", "predict", "seconds", "log evidence", "prior")
    row = {
        "what": "digits MLP, kron, fit + tune + 1,000 predictions",
        "linnet": {key: mine[key] for key in keys},
        "laplace-torch": {key: theirs[key] for key in keys},
        "ratio": theirs["seconds"] / mine["seconds"],
    }
    print(json.dumps(row, indent=1), flush=True)
    return row


PARTS: dict[str, tuple[Any, str]] = {
    "first pass": (linnet.Laplace, "_first_pass"),
    "eigendecompositions": (Kronecker, "decomposed"),
    "search of the evidence": (search, "choose"),
    "narrowing": (linnet.Laplace, "_narrow"),
}
"""Parts of a fit: what has the method, and its name."""


@contextmanager
def timed_parts(device: str) -> Iterator[dict[str, float]]:
    """Adds up the seconds of each of `PARTS` while it is active."""
    seconds = dict.fromkeys(PARTS, 0.0)
    originals = {name: getattr(*place) for name, place in PARTS.items()}

    def clock(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            took, value = timed(lambda: originals[name](*args, **kwargs), device)
            seconds[name] += took
            return value

        return call

    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, clock(name))
    try:
        yield seconds
    finally:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, originals[name])


@contextmanager
def counted_backwards() -> Iterator[list[int]]:
    """Counts backward passes by the gradients that are asked for; a batched one counts for each of its outputs."""
    original, counts = torch.autograd.grad, [0]

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        counts[0] += len(grad_outputs) if kwargs.get("is_grads_batched") else 1
        return original(outputs, inputs, grad_outputs, *args, **kwargs)

    torch.autograd.grad = grad
    try:
        yield counts
    finally:
        torch.autograd.grad = original


def passes(device: str, n: int = 4096, new: int = 512) -> list[dict[str, Any]]:
    """How often ResNet-20 runs in a fit and in a prediction, and which part of the fit takes how long."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(n, 3, 32, 32, generator=generator).to(device), torch.randint(10, (n,), generator=generator)
    unseen, rows = torch.randn(new, 3, 32, 32, generator=generator).to(device), []
    for structure in ("kron", "ekfac", "diag"):
        model, seen = ResNet(3).eval().to(device), [0]
        model.conv1.register_forward_hook(lambda _, given, out, seen=seen: seen.__setitem__(0, seen[0] + len(given[0])))
        linnet.Laplace(model, structure=structure, progress=False).fit(X[:64], y[:64].to(device))  # warm-up
        seen[0], la = 0, linnet.Laplace(model, structure=structure, progress=False)
        with timed_parts(device) as parts, counted_backwards() as backwards:
            fit, _ = timed(lambda la=la: la.fit(X, y.to(device)), device)
        row: dict[str, Any] = {"structure": structure, "n": n, "fit": fit, "forwards": seen[0] / n}
        row |= {"backward calls": backwards[0], **{f"share of {name}": took / fit for name, took in parts.items()}}
        seen[0] = 0
        row["predict"], _ = timed(lambda la=la: la.predict_proba(unseen), device)
        row["forwards of a prediction"] = seen[0] / new
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def run(python: str | None, out: Path, only: str, rounds: int, device: str = "cpu", n: int = 4096) -> None:
    """Measure, print and keep."""
    if only == "passes":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the network is not trained
            passes(device, n, max(1, n // 8))
        return
    if python is None:
        raise SystemExit("--peer names the interpreter that has laplace-torch; --only passes needs none.")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine("cpu")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the small networks are not trained to a mode
        if only in ("all", "agreement"):
            found["agreement"] = agreement(python)
        if only in ("all", "speed"):
            found["speed"] = speed(python, rounds)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
