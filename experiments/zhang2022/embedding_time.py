"""How long the components of a Fisher kernel take, and how good they are (Zhang et al. 2022, figure 3).

Three panels: seconds against n for WRN-40-2 on CIFAR-10, 32 components; the error of the 128 leading eigenvalues of
LeNet-5 on MNIST against the passes made; the speedup with more ranks. `--panels` measures some and keeps the others.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from benchmarks import rivals
from benchmarks.models import WideResNet
from benchmarks.timing import timed
from experiments import common
from experiments.common import plots
from experiments.common.data import augment, cifar10, mnist
from experiments.common.networks import lenet5, wide_resnet
from experiments.zhang2022.ranks import launch
from linnet._common import Precision, arithmetic
from linnet.fisher import Statistics
from linnet.linalg import low_rank

PANELS = ("time", "accuracy", "ranks")
LINNET, PUBLISHED, GRAM = "linnet", "published algorithm", "Gram matrix and truncated SVD"
PRECISE = "published algorithm without tf32"
COLORS = {LINNET: plots.BLUE, PUBLISHED: plots.VERMILION, GRAM: plots.GREEN}
ITERATIONS = 10  # of the published algorithm
TOLERANCE = 1e-4  # of linnet's eigenvalues in the timings


@dataclass(frozen=True)
class Sizes:
    """The sizes and methods that are measured."""

    n: tuple[int, ...]  # examples of the timings
    published: tuple[int, ...]  # those of n that the published algorithm is tried on
    whole: int  # up to so many, it runs all its iterations, above one; with so many, also without tf32
    exact: int  # up to so many, errors to the exact eigenvalues in float64 are given
    gram: int  # up to so many, the Gram matrix is tried
    components: int  # components of the timings
    images: int  # images of the accuracy
    leading: int  # components of the accuracy
    ranks: tuple[int, ...]  # numbers of processes
    shared: int  # images that the ranks share
    krylov: tuple[int, ...] = (1, 2, 3, 4, 5, 6)  # passes of linnet's that errors are given for
    power: tuple[int, ...] = (2, 3, 4, 6, 8, 10, 12)  # passes of the published algorithm's
    small: bool = False  # whether to take a small network instead of WRN-40-2


FULL = Sizes(
    (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 20_000, 32_768, 65_536),
    published=(128, 512, 1024, 4096),
    whole=512,
    exact=1024,
    gram=16_384,
    components=32,
    images=10_000,
    leading=128,
    ranks=(1, 2, 4, 8, 16),
    shared=4096,
)
QUICK = Sizes((8, 10), (8, 10), 8, 10, 10, 4, 24, 4, (1, 2), 24, krylov=(1, 2), power=(2, 3), small=True)


# Seconds against n.


def images(folder: Path, n: int) -> Tensor:
    """n images of CIFAR-10: the training images, the test images, then shifted and mirrored copies."""
    parts: list[Tensor] = []
    for part in ("train_1", "train_2", "test"):
        have = sum(map(len, parts))
        if have < n:
            parts.append(cifar10(folder, part, count=min(10_000, n - have))[0])
    X = torch.cat(parts)
    generator = torch.Generator().manual_seed(0)
    while len(X) < n:
        X = torch.cat([X, augment(X[: min(len(X), n - len(X))], generator)])
    return X


def output(raw: Tensor) -> Tensor:
    return raw.logsumexp(1)


def embed(model: nn.Module, k: int, X: Tensor, **settings: Any) -> linnet.FisherEmbedding:
    """The public call that is timed; the embedding of X is kept with it."""
    found = linnet.FisherEmbedding(model, k, progress=False, **settings)
    found.embedding = found.fit_transform(X)
    return found


def operands(found: linnet.FisherEmbedding) -> dict[str, Tensor]:
    """Center and scale of the Fisher vectors, for the rivals; columns that linnet drops get the scale zero."""
    statistics: Statistics | None = found.statistics_
    assert statistics is not None
    scale = torch.where(statistics.kept, statistics.I.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    return {"center": statistics.Z.float(), "scale": scale.float()}


def exact_values(found: linnet.FisherEmbedding, X: Tensor) -> Tensor:
    """The eigenvalues of the same Fisher vectors, by the exact decomposition in float64."""
    assert found.statistics_ is not None
    V = found.statistics_.vectors(found.lin_.to(torch.float64).jacobian(X, progress=False))
    return low_rank(V, found.n_components_, method="exact").eigenvalues


def against_n(options: argparse.Namespace, chosen: Sizes) -> dict[str, Any]:
    """Rows (n, contender) with seconds, peak memory and, where n is small, the largest error."""
    device, k = options.device, chosen.components
    model: nn.Module = WideResNet(10, 1).eval() if chosen.small else wide_resnet()
    model = model.to(device)
    X = images(options.data, max(chosen.n)).to(device)
    for _ in range(2):
        embed(model, k, X[: min(2048, max(chosen.n))], precision="high", tolerance=TOLERANCE)  # warm
    rows: list[dict[str, Any]] = []
    for n in chosen.n:
        part = X[:n]
        given: dict[str, Tensor] = {}

        def ours(part: Tensor = part, given: dict[str, Tensor] = given) -> tuple[Tensor, dict[str, Any]]:
            found = embed(model, k, part, precision="high", tolerance=TOLERANCE)
            given.update(operands(found))
            return found.eigenvalues_, {"passes": found.passes_, "method": found.method_}

        def published(n: int = n, part: Tensor = part, given: dict[str, Tensor] = given) -> tuple[Tensor | None, dict]:
            iterations = ITERATIONS if n <= chosen.whole else 1
            values = rivals.algorithm4(model, output, part, k, **given, iterations=iterations)
            return (values if n <= chosen.whole else None), {"iterations": iterations}

        def gram(part: Tensor = part, given: dict[str, Tensor] = given) -> tuple[Tensor, dict[str, Any]]:
            return rivals.gram_svd(model, output, part, k, **given), {}

        exact = exact_values(embed(model, k, part, precision="high"), part) if n <= chosen.exact else None
        contenders: dict[str, Callable[[], tuple[Tensor | None, dict[str, Any]]]] = {LINNET: ours}
        if n in chosen.published:
            contenders[PUBLISHED] = published
        if n == chosen.whole:
            contenders[PRECISE] = published
        if n <= chosen.gram:
            contenders[GRAM] = gram
        for name, run in contenders.items():
            precision: Precision = "highest" if name == PRECISE else "high"
            rows.append({"n": n, "contender": name, **measure(run, device, exact, precision)})
            report(rows[-1])
    return {"network": "WRN-10-1" if chosen.small else "WRN-40-2", "components": k, "rows": rows}


def measure(
    run: Callable[[], tuple[Tensor | None, dict[str, Any]]], device: str, exact: Tensor | None, precision: Precision
) -> dict[str, Any]:
    """Seconds, the smaller of two runs where one is short; peak memory; the error."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        with arithmetic(precision, torch.device(device)):
            seconds, (values, more) = timed(run, device)
            if seconds < 12 and "iterations" not in more:
                seconds = min(seconds, timed(run, device)[0])
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return {"seconds": None, "reason": "out of memory"}
    row: dict[str, Any] = {"seconds": seconds, **more}
    if "iterations" in more:  # each iteration makes a product and an adjoint one, and so do start and end together
        row["measured seconds"] = seconds
        row["seconds"] = seconds * (ITERATIONS + 1) / (more["iterations"] + 1)
    if cuda:
        row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.empty_cache()
    if exact is not None and values is not None:
        row["largest relative error"] = largest_error(values, exact)
    return row


def largest_error(values: Tensor, exact: Tensor) -> float:
    return float(((values.double() - exact) / exact).abs().max())


def report(row: Mapping[str, Any]) -> None:
    text = f"none: {row['reason']}" if row["seconds"] is None else f"{row['seconds']:9.3f} s"
    for key in ("passes", "iterations", "peak GB", "largest relative error"):
        text += f"   {key} {row[key]:.3g}" if key in row else ""
    print(f"n = {row['n']:7,d}   {row['contender']:32s} {text}", flush=True)


# Errors against passes.


def accuracy(options: argparse.Namespace, chosen: Sizes) -> dict[str, Any]:
    """Largest relative error of the leading eigenvalues after each pass, all in float64."""
    net = lenet5(options.data / "weights").to(options.device)
    X = mnist(options.data, False, count=chosen.images)[0].to(options.device)
    fit = partial(embed, net, chosen.leading, X, dtype="float64")
    seconds, exact = timed(lambda: fit(method="exact"), options.device)
    reference = exact.eigenvalues_
    print(f"exact: {seconds:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for name, method, passes in ((LINNET, "krylov", chosen.krylov), (PUBLISHED, "power", chosen.power)):
        for count in passes:
            found = fit(method=method, passes=count)
            if len(found.eigenvalues_) == len(reference):
                rows.append({"contender": name, "passes": count, "error": largest_error(found.eigenvalues_, reference)})
                print(f"{name:32s} {count:3d} passes   error {rows[-1]['error']:.2g}", flush=True)
    seconds, default = timed(lambda: fit(method="krylov"), options.device)
    again = default.transform(X)
    scale = default.embedding.norm(dim=0)
    return {
        "network": "LeNet-5",
        "images": len(X),
        "components": chosen.leading,
        "rows": rows,
        "passes taken": default.passes_,
        "error": largest_error(default.eigenvalues_, reference),
        "embedding against transform": float(((again - default.embedding).norm(dim=0) / scale).max()),
        "seconds": seconds,
    }


# More ranks.


def ranks(options: argparse.Namespace, chosen: Sizes) -> dict[str, Any]:
    """Seconds with 1, 2, ... processes of one thread each, and how far eigenvalues are from those of one."""
    rows: list[dict[str, Any]] = []
    reference: Tensor | None = None
    most = os.cpu_count() or 1
    for count in chosen.ranks:
        if count > most:
            break
        found = launch(count, data=options.data, n=chosen.shared, components=chosen.components)
        values = torch.tensor(found["eigenvalues"], dtype=torch.float64)
        reference = values if reference is None else reference
        rows.append({"ranks": count, "seconds": found["seconds"], "difference": largest_error(values, reference)})
        rows[-1]["speedup"] = rows[0]["seconds"] / found["seconds"]
        print(f"{count} ranks: {found['seconds']:.2f} s, speedup {rows[-1]['speedup']:.2f}", flush=True)
    return {"network": "LeNet-5", "images": chosen.shared, "components": chosen.components, "rows": rows}


# The experiment.


ARGUMENTS = {"--panels": common.several(PANELS, "what to measure; the others stay as they are")}


def run(options: argparse.Namespace) -> common.Outcome:
    chosen = QUICK if options.quick else FULL
    panels = common.kept_parts(options)
    measures = {"time": against_n, "accuracy": accuracy, "ranks": ranks}
    for name in options.panels:
        where = "cpu" if name == "ranks" else options.device
        found = {"machine": common.machine(where), **measures[name](options, chosen)}
        panels = common.keep(options, {name: found})
    return outcome(panels)


def outcome(panels: Mapping[str, Any]) -> common.Outcome:
    ordered = {name: panels[name] for name in PANELS if name in panels}
    settings = {
        "precision": f"timings in float32 with tf32 for all; linnet to {TOLERANCE:g}, its last pass and statistics "
        "without tf32 and counted in; the published algorithm and the Gram matrix are given the statistics",
        "accuracy": "float64",
    }
    return common.Outcome({"settings": settings, "parts": ordered}, figure(ordered), table(ordered))


def table(panels: Mapping[str, Any]) -> Iterator[common.Row]:
    if "time" in panels:
        found = panels["time"]
        at = {(row["n"], row["contender"]): row for row in found["rows"]}
        seconds = {key: row["seconds"] for key, row in at.items()}
        sizes = sorted({n for n, _ in at})
        last, most = max(n for n, name in at if name == PUBLISHED), sizes[-1]
        ratio, far = (seconds[last, PUBLISHED] * n / last / seconds[n, LINNET] for n in (last, most))
        slower = [seconds[n, name] / n * most / seconds[most, LINNET] for n, name in at if name == PRECISE]
        errors = [
            max(row.get("largest relative error", 0.0) for row in found["rows"] if row["contender"] == name)
            for name in (LINNET, PUBLISHED)
        ]
        ours = ", ".join(f"{seconds[n, LINNET]:.3g} s at n = {n:,}" for n in sizes if n >= last)
        ours += f"; the published algorithm takes {ratio:.0f} times as long at n = {last:,} and {far:.0f} times, by "
        ours += f"extrapolation, at {most:,}; largest errors {errors[0]:.1g} against {errors[1]:.1g}"
        ours += f"; without tf32, {slower[0]:.0f} times, by extrapolation" if slower else ""
        what = f"{found['components']} components of {found['network']} against n"
        paper = "its algorithm takes nearly linear time; the Gram matrix ends at 2^14"
        whole = "the published algorithm above its largest whole run from one iteration"
        yield common.Row(what, paper, ours, f"{found['machine']}; {whole}")
    if "accuracy" in panels:
        found = panels["accuracy"]
        power = min(row["error"] for row in found["rows"] if row["contender"] == PUBLISHED)
        what = f"{found['components']} leading eigenvalues of {found['network']}, {found['images']:,} MNIST images"
        ours = f"largest relative error {found['error']:.1e} after {found['passes taken']} passes; the published "
        ours += f"algorithm {power:.1e} after 12"
        differs = f"against the exact decomposition in float64; {found['machine']}"
        yield common.Row(what, "errors small for the leading modes, in a figure", ours, differs)
    if "ranks" in panels:
        found = panels["ranks"]
        text = ", ".join(f"{row['speedup']:.1f} with {row['ranks']}" for row in found["rows"])
        ours = f"{text}; same eigenvalues to {max(row['difference'] for row in found['rows']):.0e}"
        differs = f"processes of one thread each, {found['network']}, {found['images']:,} images; {found['machine']}"
        yield common.Row("speedup with ranks", "almost linear in the number of GPUs", ours, differs)


def figure(panels: Mapping[str, Any]) -> Figure:
    draw = {"time": draw_time, "accuracy": draw_accuracy, "ranks": draw_ranks}
    result = Figure(figsize=(4.2 * len(panels), 3.6))
    for axes, (name, found) in zip(result.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        draw[name](axes, found)
        axes.legend(fontsize=8)
    return result


def draw_time(axes: Axes, found: Mapping[str, Any]) -> None:
    for name, color in COLORS.items():
        points = [(row["n"], row["seconds"]) for row in found["rows"] if row["contender"] == name and row["seconds"]]
        axes.loglog(*zip(*points, strict=True), "o-", color=color, markersize=4, label=name)
        gone = [row["n"] for row in found["rows"] if row["contender"] == name and row["seconds"] is None]
        if gone:
            axes.plot(gone[0], points[-1][1] * 2, "x", color=color, markersize=8, markeredgewidth=2)
    last = [row for row in found["rows"] if row["contender"] == PUBLISHED][-1]
    most = max(row["n"] for row in found["rows"])
    if most > last["n"]:
        axes.loglog(
            (last["n"], most), (last["seconds"], last["seconds"] * most / last["n"]), "--", color=COLORS[PUBLISHED]
        )
    axes.set(xlabel="examples", ylabel="seconds", title=f"{found['network']}, {found['components']} components")


def draw_accuracy(axes: Axes, found: Mapping[str, Any]) -> None:
    for name in (LINNET, PUBLISHED):
        points = [(row["passes"], row["error"]) for row in found["rows"] if row["contender"] == name]
        axes.semilogy(*zip(*points, strict=True), "o-", color=COLORS[name], markersize=4, label=name)
    title = f"{found['network']}, {found['components']} components, {found['images']:,} images"
    axes.set(xlabel="passes over the data", ylabel="largest relative error of an eigenvalue", title=title)


def draw_ranks(axes: Axes, found: Mapping[str, Any]) -> None:
    counts: Sequence[int] = [row["ranks"] for row in found["rows"]]
    axes.loglog(counts, counts, "--", color=plots.GRAY, label="linear", base=2)
    axes.loglog(counts, [row["speedup"] for row in found["rows"]], "o-", color=plots.BLUE, label=LINNET, base=2)
    axes.set(xlabel="ranks, one thread each", ylabel="speedup", title=f"{found['network']}, {found['images']:,} images")
    axes.set_xticks(counts, [str(count) for count in counts])
