"""How long posterior samples take: classifiers as they stand, all parameters, to a residual of 1e-2.

The prior precision is that of a weight decay of 5e-4 on the mean loss. With a folder of data the networks are trained
ones: ResNet-20 as supplied; ResNet-18 trained here for a few epochs on 100 classes, those of CIFAR-10 times ten angles
that an image is turned by; MiniLM with a head for SST-2, of which a posterior of rank 64 is timed too. Without one,
weights and images are random, and MiniLM is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from benchmarks.models import Model, ResNet, ResNet18, VisionTransformer
from benchmarks.timing import machine, synchronize
from linnet.probability import Bernoulli, Categorical
from linnet.sampling import Samples, effective_dimension, posterior_samples

DECAY = 5e-4
GIB = 2**30
TURNS = 10
EPOCHS = 30
RANK = 64


@dataclass(frozen=True, slots=True)
class Case:
    """What is sampled.

    Attributes:
        make: The network; None for one that there is only with data.
        n: Examples.
        k: Samples.
        space: As for `posterior_samples`.
        memory: Bytes for a chunk, and for what is dense; None leaves both to linnet.
    """

    make: Callable[[], nn.Module] | None
    n: int
    k: int
    space: str = "weight"
    memory: tuple[float, float] | None = None


CASES: dict[str, Case] = {
    "resnet-20": Case(lambda: ResNet(3), n=20_000, k=64),
    "minilm": Case(None, n=2_000, k=64, space="auto", memory=(8 * GIB, 16 * GIB)),
    "vit-tiny": Case(VisionTransformer, n=2_000, k=64, space="function", memory=(10 * GIB, 20 * GIB)),
    "resnet-18": Case(lambda: ResNet18(TURNS * 10), n=10_000, k=16),
    "small": Case(lambda: ResNet(1), n=32, k=16),
}


def problem(name: str, n: int, device: str, data: Path | None) -> tuple[nn.Module, Any, Tensor]:
    """The network of a case, n inputs, and labels."""
    case = CASES[name]
    if name == "minilm" and data is not None:
        from experiments.common.data import sst2, word_pieces
        from experiments.common.networks import minilm

        texts, y = sst2(data, "train")
        ids, mask = (t.to(device) for t in word_pieces(data / "weights", texts[:n]))
        X = {"input_ids": ids, "attention_mask": mask}
        net = minilm(data / "weights").to(device)
        return linnet.attach_head(net, X, y[:n].to(device), penalty=1.0, progress=False), X, y[:n].to(device)
    if case.make is None:
        raise ValueError(f"{name} needs trained weights and their data: give a folder with --data.")
    labels = torch.arange(n, device=device) % 10
    if data is None:
        return (
            Model(case.make, (3, 32, 32)).build().to(device),
            Model(nn.Identity, (3, 32, 32)).data(n).to(device),
            labels,
        )
    from experiments.common.data import cifar10
    from experiments.common.networks import resnet

    parts = [
        cifar10(data, part)
        for part in (("train_1",) if n <= 10_000 and name != "resnet-18" else ("train_1", "train_2"))
    ]
    images, labels = (torch.cat(both).to(device) for both in zip(*parts, strict=True))
    if name == "resnet-18":
        images, labels = turned(images, labels)
        return trained(case.make, images, labels), images[:n], labels[:n]
    net = resnet(data / "weights", 20) if name == "resnet-20" else Model(case.make, (3, 32, 32)).build()
    return net.to(device), images[:n], labels[:n]


def turned(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images (n, 3, h, w), the i-th turned by (i mod 10) tenths of a turn, and labels that tell class and turn.

    >>> images, labels = turned(torch.rand(3, 3, 8, 8), torch.tensor([0, 0, 4]))
    >>> images.shape, labels
    (torch.Size([3, 3, 8, 8]), tensor([ 0,  1, 42]))
    """
    turn = torch.arange(len(images), device=images.device) % TURNS
    angle = 2 * math.pi / TURNS * turn
    rotation = torch.stack([angle.cos(), -angle.sin(), 0 * angle, angle.sin(), angle.cos(), 0 * angle], 1).view(
        -1, 2, 3
    )
    grid = F.affine_grid(rotation, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False), TURNS * labels + turn


def trained(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> nn.Module:
    """The network after some epochs of SGD with momentum and this file's weight decay."""
    from experiments.common.training import train_images as train

    net = Model(make, (3, 32, 32)).build().to(x.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(net, x, y, epochs=EPOCHS, seed=0, batch=256, rate=0.1, mirror=False)  # a mirrored image is turned back
    return net.to(memory_format=torch.contiguous_format).eval()


def measured(
    name: str,
    device: str,
    *,
    n: int | None = None,
    precision: str = "highest",
    data: Path | None = None,
    given: tuple[nn.Module, Any, Tensor] | None = None,
) -> dict[str, Any]:
    """Time, iterations, true residual and memory of one case.

    Args:
        name: Of the case.
        device: Where.
        n: Another number of examples.
        precision: Of the iterations; "highest" leaves them to linnet. Residuals are always in full precision.
        data: Folder of data and weights.
        given: The network, its inputs and labels, where they are made already.
    """
    case = CASES[name]
    model, X, y = given or problem(name, n or case.n, device, data)
    lin = linnet.linearize(model)
    memory, dense = case.memory or ("auto", "auto")
    J = lin.jacobian(X, memory=memory, progress=True).steady()  # minutes, of which a log should tell
    coarse = None if precision == "highest" else lin.jacobian(X, precision=precision, memory=memory, progress=False)  # type: ignore[arg-type]
    S = torch.full((lin.p,), 1 / (DECAY * J.n), device=device)
    begin(device)
    start = time.perf_counter()
    L = (Bernoulli() if J.c == 1 else Categorical()).root(J.outputs())
    space = case.space
    found = posterior_samples(J, S, L, case.k, space=space, memory=dense, coarse=coarse, progress=True)  # type: ignore[arg-type]
    synchronize(device)
    seconds, peak = time.perf_counter() - start, peak_of(device)
    gamma, error = effective_dimension(J, L, found.Z)
    solution = found.solution
    f = J.outputs()
    right = float(((f[:, 0] > 0) == y if J.c == 1 else f.argmax(1) == y).double().mean())
    return {
        "what": name,
        "n": J.n,
        "c": J.c,
        "p": lin.p,
        "samples": case.k,
        "space": found.space,
        "precision of the iterations": "linnet's own" if precision == "highest" else precision,
        "data": "random" if data is None else "SST-2" if name == "minilm" else "CIFAR-10",
        "accuracy of the network on these": right,
        "seconds": seconds,
        "peak GiB": peak,
        "iterations": None if solution is None else solution.iterations,
        "residual": None if solution is None else solution.residual,
        "residual, highest precision": residual(J, S, L, found),
        "preconditioner": None if found.preconditioner is None else type(found.preconditioner).__name__,
        "rank of the preconditioner": None if found.preconditioner is None else found.preconditioner.rank,
        "effective dimension": gamma,
        "its standard error": error,
    }


def low_rank(name: str, device: str, given: tuple[nn.Module, Any, Tensor]) -> dict[str, Any]:
    """Time and memory of a posterior from the leading eigenpairs, `Laplace(structure="lowrank")`."""
    model, X, y = given
    case, n = CASES[name], len(y)
    begin(device)
    start = time.perf_counter()
    prior = 1 / (DECAY * n)
    la = linnet.Laplace(
        model,
        structure="lowrank",
        rank=RANK,
        prior=prior,
        dtype=torch.float32,
        memory=case.memory[0] if case.memory else "auto",
        progress=False,
    ).fit(X, y)
    synchronize(device)
    return {
        "what": f"{name}, lowrank",
        "n": n,
        "rank": RANK,
        "dtype": str(la.prior_variance_.dtype).removeprefix("torch."),
        "seconds": time.perf_counter() - start,
        "peak GiB": peak_of(device),
        "effective dimension": la.effective_dimension_,
    }


def begin(device: str) -> None:
    synchronize(device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_of(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if device.startswith("cuda") else None


def residual(J: linnet.Jacobian, S: Tensor, L: Tensor, found: Samples) -> float:
    """The largest ``||b - H u|| / ||Phi^T L e||`` over the first four samples, every product in full precision."""
    from linnet.inference import SolverSettings
    from linnet.linalg import as_weight, weigh

    L, k = as_weight(L), min(4, found.k)
    d, settings = S.sqrt()[:, None], SolverSettings(seed=found.seed)
    e = torch.randn(J.shape[0], found.k, generator=settings.generator(3))[:, :k].to(S.device)
    h = torch.randn(J.shape[1], found.k, generator=settings.generator(4))[:, :k].to(S.device)
    data = d * (J.T @ weigh(e, L))
    B = L.square() if L.ndim == 1 else L @ L.mT
    left = data + h - found.Z[:, :k] / d - d * J.normal(found.Z[:, :k].contiguous(), B)
    return float((left.norm(dim=0) / data.norm(dim=0)).max())


def run(device: str, out: Path, only: str, *, n: int | None, precision: str, data: Path | None) -> None:
    """Measure, print and keep; cases that are not measured now keep what an earlier run found."""
    chosen = [only] if only != "all" else ["small"] if device == "cpu" else [name for name in CASES if name != "small"]
    rows: list[Mapping[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    for name in chosen:
        given = problem(name, n or CASES[name].n, device, data)
        new = [measured(name, device, precision=precision, data=data, given=given)]
        print(json.dumps(new[-1], indent=1), flush=True)
        if name == "minilm":
            new.append(low_rank(name, device, given))
            print(json.dumps(new[-1], indent=1), flush=True)
        del given
        names = {row["what"] for row in new}
        rows = [row for row in rows if row["what"] not in names] + new
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")
