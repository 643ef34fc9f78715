"""Gradient features against fine-tuning: an epoch of each in the same top layers, and passes to the optimum.

The network is ResNet-20; its last blocks and its head adapt, and what lies below is frozen: its forward pass counts in
both, and neither goes back through it. An epoch is Adam on minibatches. linnet's is timed as it reads the data (a
Jacobian-vector and a vector-Jacobian product), with the activations at the frozen layers kept, and with the layers'
factors kept; so is one full-batch pass, which is what a step to the optimum takes. Ratios are to fine-tuning in torch's
default memory layout, in which linnet is given network and images too; fine-tuning with channels last stands beside.
On a GPU an epoch is a tenth of a training of ten. Beside the times stand the operations of a step, since small steps on
a GPU take the time that it takes to launch them.

Passes to the optimum are counted for random images and, with a folder of data, for digits and clothes.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from benchmarks.models import MODELS
from benchmarks.timing import machine, milliseconds, operations
from linnet._common import Precision, arithmetic
from linnet.inference import SolverSettings, Training, mode_by_passes
from linnet.inference.evidence.laplace import unit_scale
from linnet.inference.mode import adam
from linnet.jacobian import Jacobian
from linnet.probability import Categorical, make_prior

CLASSES = 10
TOP = {"1 block": ["layer3.2.*", "linear.*"], "3 blocks": ["layer3.*", "linear.*"]}
# Examples of an epoch, of minibatches, and of the passes to the optimum.
SIZES = {"cuda": (20_480, (512, 2048), 20_000), "cpu": (256, (64,), 400)}
EPOCHS = {"cuda": 10, "cpu": 1}
COUNTED = 4  # minibatches
SETS, REAL = ("mnist", "fashion_mnist"), 3000  # and labels


def data(n: int, device: str) -> tuple[Tensor, Tensor]:
    """Images, standard normal, and labels from the same network with another last block and head, and some noise."""
    spec = MODELS["resnet-20"]
    X = spec.data(n).to(device)
    teacher, other = spec.build(), spec.build(seed=5)
    teacher.layer3[2], teacher.linear = other.layer3[2], other.linear  # type: ignore[index, operator]
    with torch.no_grad():
        f = torch.cat([teacher.to(device)(part) for part in X.split(1000)])
    noise = torch.randn(f.shape, generator=torch.Generator().manual_seed(3)).to(device)
    return X, ((f - f.mean(0)) / f.std(0) + 0.3 * noise).argmax(1)


def fine_tuning(model: nn.Module, names: set[str], X: Tensor, y: Tensor, size: int) -> Callable[[], None]:
    """An epoch of Adam on the same parameters of the network itself."""
    net = copy.deepcopy(model)
    for name, t in net.named_parameters():
        t.requires_grad_(name in names)
    optimizer = torch.optim.Adam([t for t in net.parameters() if t.requires_grad], lr=1e-5)

    def epoch() -> None:
        order = torch.randperm(len(X), device=X.device)
        for index in order.split(size):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(net(X[index]), y[index]).backward()
            optimizer.step()

    return epoch


def full_batch(J: Jacobian, y: Tensor) -> Callable[[], Tensor]:
    """The gradient of the loss over all examples: one pass."""
    V = torch.full((J.shape[1],), 1e-4, dtype=J.dtype, device=J.device)

    def pull(shift: Tensor, batch: linnet.Batch) -> Tensor:
        assert batch.f is not None
        labels = y[batch.index.to(y.device)]
        return ((batch.f + shift.view(batch.f.shape)).softmax(1) - F.one_hot(labels, CLASSES)).flatten()

    return lambda: J.fused(pull, V)


def epochs(top: str, device: str, precision: Precision, rounds: int, n: int, size: int) -> dict[str, Any]:
    """Milliseconds of an epoch and of a pass, and their ratios to fine-tuning."""
    model = MODELS["resnet-20"].build().to(device)
    X, y = data(n, device)
    lin = linnet.linearize(model, TOP[top])
    plain = lin.jacobian(X, precision=precision, progress=False)
    forms = {"as read": plain, "activations kept": plain.above_frozen(), "factors kept": plain.cached()}
    variance = torch.full((lin.p,), 1e-3, device=device)
    many = EPOCHS["cuda" if device.startswith("cuda") else "cpu"]
    tuning = fine_tuning(model, set(lin.theta), X, y, size)
    other = fine_tuning(_channels_last(model), set(lin.theta), _channels_last(X), y, size)
    contenders: dict[str, Callable[[], object]] = {"fine-tuning": tuning, "fine-tuning, channels last": other}
    for name, J in forms.items():
        contenders[f"epoch, {name}"] = partial(_trained, J, y, variance, size, many)
        contenders[f"pass, {name}"] = full_batch(J, y)
    with arithmetic(precision, torch.device(device)):
        times = milliseconds(contenders, device, rounds=rounds)
        times = {name: t / (many if name.startswith("epoch") else 1) for name, t in times.items()}
        counts = {"fine-tuning": operations(tuning) / ceil(n / size)}
        for name, J in forms.items():
            few = J.subset(torch.arange(min(n, COUNTED * size)))
            run = partial(_trained, few, y, variance, size, 1)
            run()  # which copies kept factors into minibatches
            counts[f"epoch, {name}"] = operations(run) / ceil(few.n / size)
    kept = {"factors": forms["factors kept"].cache_size // n}
    kept["activations"] = sum(t[0].numel() * t.element_size() for t in forms["activations kept"]._source.tensors)  # type: ignore[attr-defined]
    return {
        "top": top,
        "precision": precision,
        "n": n,
        "minibatch": size,
        "epochs of a training": many,
        "p": lin.p,
        "ms": times,
        "ratio": {name: t / times["fine-tuning"] for name, t in times.items() if name != "fine-tuning"},
        "operations of a step": counts,
        "bytes kept for an example": kept,
    }


def _channels_last(what: Any) -> Any:
    return copy.deepcopy(what).to(memory_format=torch.channels_last)


def _trained(J: Jacobian, y: Tensor, variance: Tensor, size: int, epochs: int) -> None:
    task = adam._Objective(J, y, variance.sqrt(), Categorical(), True)
    adam._train(task, Training(epochs=epochs, size=size), 1e-4, 0, False)


def optimum(top: str, device: str, n: int) -> dict[str, Any]:
    """Passes over the data to a relative gradient of 1e-4 from a fitted head, for a weak and a strong prior."""
    X, y = data(n, device)
    model = linnet.attach_head(MODELS["resnet-20"].build().to(device), X, y, penalty=1.0, progress=False)
    lin = linnet.linearize(model, TOP[top])
    J = lin.jacobian(X, progress=False)
    part = J.subset(torch.arange(min(n, 200))).cached()
    prior, likelihood = make_prior(lin, "ntk"), Categorical()
    mean = part.outputs().double()
    K = part.gram(scale=prior.base).double()
    unit = unit_scale(K, mean, likelihood, "function")  # where the data say as much as the prior
    J = J.cached_if_fits()
    rows = []
    for times in (0.3, 3.0):
        variance, f = prior.variance([times * unit]), J.outputs()
        for kind in ("auto", "nystrom", "none"):  # the first makes others where the curvature changes
            mode, P = mode_by_passes(
                J,
                y,
                variance=variance,
                mean=f,
                likelihood=likelihood,
                settings=SolverSettings(preconditioner=kind),  # type: ignore[arg-type]
                tolerance=1e-4,
            )
            rows.append(
                {
                    "scale / unit": times,
                    "preconditioner": kind,
                    "rank": 0 if P is None else P.rank,
                    "passes": mode.passes,
                    "steps": mode.iterations,
                    "gradient": mode.gradient,
                    "objective": mode.objective,
                    "converged": mode.converged,
                }
            )
    return {"top": top, "n": n, "p": lin.p, "rows": rows}


def real(name: str, device: str, n: int, folder: Path) -> dict[str, Any]:
    """The same for labels of MNIST or Fashion-MNIST and a block of the trained ResNet-20, the prior by the evidence."""
    from experiments.common.data import as_cifar10, grayscale
    from experiments.common.networks import resnet
    from experiments.common.training import in_turn
    from experiments.mu2020.contest import Top
    from experiments.mu2020.transfer import below

    net = resnet(folder / "weights", 20).to(device)
    own = copy.deepcopy(net)
    top = linnet.fold_batchnorm(Top(list(own.layer3)[-1:], own.linear).eval())
    images, labels = grayscale(folder, name, True)
    index = in_turn(labels, n, CLASSES, torch.Generator().manual_seed(0))
    X, y = below(net, 1, as_cifar10(images[index]).to(device)), labels[index]
    headed = linnet.attach_head(top, X, y, seed=0, progress=False)
    how: dict[str, Any] = {"mean": "zero", "inference": "map", "solver": "cg-weight", "dtype": "float32"}
    clf = linnet.TangentClassifier(headed, seed=0, progress=False, **how)
    start = time.perf_counter()
    clf.fit(X, y)
    seconds = time.perf_counter() - start
    return {"set": name, "n": n, "passes": clf.passes_, "seconds": seconds, "scales": clf.scales_}


def run(device: str, out: Path, *, rounds: int, only: str, n: int | None, folder: Path | None) -> None:
    """Measure, print and keep, beside what was measured before on such a machine."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    count, minibatches, larger = SIZES[kind]
    count, larger = (count, larger) if n is None else (n, n)
    precisions: tuple[Precision, ...] = ("highest", "high") if kind == "cuda" else ("highest",)
    if only == "real" and folder is None:
        raise ValueError("--only real needs a folder of data and weights: give it with --data.")
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if results.get("machine") != machine(device):
        results = {"machine": machine(device)}
    results |= {part: [] for part in ("epochs", "optimum") if only in ("all", part)}
    print(results["machine"])
    for top in TOP:
        for precision, size in product(precisions, minibatches) if only in ("all", "epochs") else ():
            row = epochs(top, device, precision, rounds, count, size)
            results["epochs"].append(row)
            known = row["ms"]["fine-tuning"]
            print(f"{top}, {precision}, minibatches of {size}: fine-tuning {known:.0f} ms", flush=True)
            for name, ratio in row["ratio"].items():
                steps = row["operations of a step"].get(name)
                print(f"    {name:24} {ratio:.2f}" + (f", {steps:.0f} operations a step" if steps else ""), flush=True)
        if only in ("all", "optimum") and top == "1 block":
            row = optimum(top, device, larger)
            results["optimum"].append(row)
            for found in row["rows"]:
                print(
                    f"{top}, n = {row['n']:,}, scale {found['scale / unit']} units, {found['preconditioner']:7} of "
                    f"rank {found['rank']}: {found['passes']} passes to a gradient of {found['gradient']:.0e}",
                    flush=True,
                )
    if folder is not None and only in ("all", "real"):
        results["real"] = []
        for name in SETS:
            found = real(name, device, n or REAL, folder)
            results["real"].append(found)
            print(f"{name}, {found['n']:,} labels: {found['passes']} passes, {found['seconds']:.0f} s", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
