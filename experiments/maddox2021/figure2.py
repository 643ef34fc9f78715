"""Timings: log evidence against n and against p, and Fisher-vector products (Maddox et al. 2021, figure 2).

All contenders of a size run in turn, round after round; times are medians after a first run, or that run's where it
takes long. One that fails, runs out of memory or would take too long leaves a gap and its reason. Results of the CPU
and of a GPU stand side by side: a run replaces those of its own device, and of the panels that it was asked for.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import linnet
from benchmarks.timing import timed
from experiments import common
from experiments.common import plots
from experiments.common.data import cifar10, mnist
from experiments.common.networks import lenet5, resnet
from experiments.maddox2021.contenders import (
    NOISE,
    TOLERANCE,
    TooSlow,
    by_dense,
    by_linnet,
    by_published,
    classifier,
    double_backward,
    problem,
    relative_error,
)
from linnet.fisher import fisher_vector_product
from linnet.probability import Categorical

PANELS = ("data", "parameters", "products", "trained")
TRAINED = ("LeNet-5", "ResNet-20", "ResNet-32", "ResNet-56")  # networks that are supplied
EXACT, FUNCTION, WEIGHT = "linnet, exact", "linnet, CG in function space", "linnet, CG in parameter space"
DENSE, PUBLISHED = "all rows and torch's Cholesky", "the paper's CG: jvp, vjp, linear_cg"
EXACT_PRODUCT, DIFFERENCE, BACKWARD = "linnet, exact product", "linnet, finite difference", "double backward"
COLORS = {
    EXACT: plots.BLUE,
    FUNCTION: plots.SKY,
    WEIGHT: plots.GREEN,
    DENSE: plots.GRAY,
    PUBLISHED: plots.VERMILION,
    EXACT_PRODUCT: plots.BLUE,
    DIFFERENCE: plots.ORANGE,
    BACKWARD: plots.GRAY,
}


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured on a device."""

    n: tuple[int, ...]  # examples, for the network of 803,601 parameters
    h: tuple[int, ...]  # widths of networks for 1,000 examples; they have about 20 h^2 parameters
    networks: dict[str, int]  # classifier to batch size
    examples: int = 1000  # examples of the networks of widths h
    columns: tuple[int, ...] = (1, 16)  # columns of the Fisher-vector products
    # seconds after which a contender is not tried on a larger size, and that the paper's CG may take
    limit: float = 20.0
    images: int = 64  # of the products around trained networks
    patience: float = 2.0  # seconds; a contender that takes longer is run once
    width: int = 200


SIZES = {
    "cpu": Sizes(
        (100, 200, 500, 1000, 2000, 5000),
        (7, 22, 70, 223, 707),
        {"AlexNet": 32, "PreResNet-20": 32, "PreResNet-56": 32, "PreResNet-110": 32, "WRN-16-2": 32},
    ),
    "cuda": Sizes(
        (1000, 3000, 10_000, 30_000, 100_000),
        (7, 22, 70, 223, 707, 2236),
        {"AlexNet": 512, "PreResNet-20": 512, "PreResNet-56": 512, "PreResNet-110": 512, "WRN-28-10": 128},
    ),
}
QUICK = Sizes((50, 100), (3, 7), {"AlexNet": 4, "PreResNet-20": 4}, 40, (1, 4), width=10, images=4)


# Measuring.


def measure(
    contenders: Mapping[str, Callable[[], Any]], device: str, *, patience: float = 2.0, rounds: int = 3
) -> dict[str, dict[str, Any]]:
    """Name to seconds, runs, the first run's result, and on a GPU peak memory; or None with the reason."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    cuda = device.startswith("cuda")
    for name, run in contenders.items():
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds, value = timed(run, device)
        except (ArithmeticError, ImportError, MemoryError, TooSlow, torch.OutOfMemoryError) as error:
            found[name] = {"seconds": None, "reason": reason_of(error)}
        else:
            found[name] = {"seconds": seconds, "runs": 1, "value": value}
            if cuda:
                found[name]["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
            if seconds <= patience:
                times[name] = []
        if name not in times:  # it was large: let nothing of it stay
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    for _ in range(rounds):
        for name in times:
            times[name].append(timed(contenders[name], device)[0])
    for name, values in times.items():
        found[name].update(seconds=statistics.median(values), runs=len(values))
    return found


def reason_of(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).split("\n")[0] or type(error).__name__


def over_sizes(
    sizes: Sequence[int],
    make: Callable[[int], tuple[float, Mapping[str, Callable[[], Any]]]],
    device: str,
    chosen: Sizes,
    label: str,
) -> list[dict[str, Any]]:
    """Log evidences at growing sizes; ``make`` gives the number on the axis and the contenders."""
    rows: list[dict[str, Any]] = []
    points: dict[str, list[tuple[float, float]]] = {}  # size and seconds
    gone: dict[str, str] = {}
    for size in sizes:
        x, contenders = make(size)
        tried: dict[str, Callable[[], Any]] = {}
        for name, run in contenders.items():
            if name != EXACT and extrapolate(points.get(name, []), x) > chosen.limit:
                gone.setdefault(name, f"would take more than {chosen.limit:.0f} s")
            if name not in gone:
                tried[name] = run
        found = measure(tried, device, patience=chosen.patience)
        values = {name: one.pop("value", {}) for name, one in found.items()}
        for name in contenders:
            row = {label: x, "contender": name, **found.get(name, {"seconds": None, "reason": gone.get(name)})}
            row |= values.get(name, {})
            if "log evidence" in row and values[EXACT]:
                off = abs(row["log evidence"] - values[EXACT]["log evidence"])
                row["error per example"] = off / (x if label == "n" else chosen.examples)
            if row["seconds"] is not None:
                points.setdefault(name, []).append((x, row["seconds"]))
            elif name in tried:
                gone[name] = row["reason"]
            rows.append(row)
            report(f"{label} = {x:,.0f}", name, row, found[EXACT]["seconds"], "of exact")
    return rows


def extrapolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Seconds at size x, growing as between the last two points; after one, linearly if that took more than a second.

    Less than that says nothing: it is mostly what every call costs.

    >>> round(extrapolate([(10, 1.0), (100, 4.0)], 1000), 3)
    16.0
    >>> extrapolate([(10, 0.5)], 1000), extrapolate([(10, 2.0)], 1000)
    (0.5, 200.0)
    """
    if not points:
        return 0.0
    slope = exponent(points[-2:]) if len(points) > 1 else float(points[-1][1] > 1)
    return points[-1][1] * (x / points[-1][0]) ** max(0.0, slope)


def report(where: str, name: str, row: Mapping[str, Any], unit: float | None, of: str) -> None:
    """One line for each measurement, as it is made."""
    if row["seconds"] is None:
        text = f"none: {row['reason']}"
    else:
        ratio = "" if unit is None else f"{row['seconds'] / unit:8.2f} x {of}"
        text = f"{row['seconds']:10.4f} s {ratio}"
        for key in ("iterations", "error per example", "relative error"):
            text += f"   {key} {row[key]:.2g}" if key in row else ""
    print(f"{where:34s} {name:36s} {text}", flush=True)


# The panels.


def evidences(given: Any, chosen: Sizes) -> dict[str, Callable[[], Any]]:
    return {
        EXACT: partial(by_linnet, given, "function"),
        FUNCTION: partial(by_linnet, given, "cg-function"),
        WEIGHT: partial(by_linnet, given, "cg-weight"),
        DENSE: partial(by_dense, given),
        PUBLISHED: partial(by_published, given, seconds=chosen.limit),
    }


def against_data(device: str, chosen: Sizes) -> list[dict[str, Any]]:
    """Left: the network stays, n grows."""

    def make(n: int) -> tuple[float, Mapping[str, Callable[[], Any]]]:
        return n, evidences(problem(chosen.width, n, device), chosen)

    return over_sizes(chosen.n, make, device, chosen, "n")


def against_parameters(device: str, chosen: Sizes) -> list[dict[str, Any]]:
    """Center: the examples stay, the network grows."""

    def make(h: int) -> tuple[float, Mapping[str, Callable[[], Any]]]:
        given = problem(h, chosen.examples, device)
        return given.p, evidences(given, chosen)

    return over_sizes(chosen.h, make, device, chosen, "p")


def products(device: str, chosen: Sizes) -> list[dict[str, Any]]:
    """Right: Fisher-vector products of classifiers, in float32; errors are to double backward."""
    rows: list[dict[str, Any]] = []
    for name, n in chosen.networks.items():
        model, x = classifier(name, n, device)
        lin = linnet.linearize(model)
        J = lin.jacobian(x, progress=False)
        for k in chosen.columns:
            V = torch.randn(lin.p, k, generator=torch.Generator().manual_seed(3)).to(device)
            given = V[:, 0] if k == 1 else V
            contenders: dict[str, Callable[[], Tensor]] = {
                EXACT_PRODUCT: partial(fisher_vector_product, lin, J, given, likelihood=Categorical()),
                DIFFERENCE: partial(
                    fisher_vector_product, lin, J, given, likelihood=Categorical(), method="finite_difference"
                ),
                BACKWARD: partial(double_backward, model, x, V),
            }
            found = measure(contenders, device, patience=chosen.patience)
            values = {contender: one.pop("value", None) for contender, one in found.items()}
            first, unit = values[BACKWARD], found[BACKWARD]["seconds"]
            for contender, one in found.items():
                value = values[contender]
                row = {"network": name, "p": lin.p, "batch": n, "k": k, "contender": contender, **one}
                if contender != BACKWARD and value is not None and first is not None:
                    row["relative error"] = relative_error(value.reshape(lin.p, k), first)
                if one["seconds"] is not None and unit is not None:
                    row["speedup"] = unit / one["seconds"]
                rows.append(row)
                report(f"{name}, {n} images, k = {k}", contender, row, unit, "of double backward")
    return rows


def trained(device: str, chosen: Sizes, folder: Path | None) -> list[dict[str, Any]]:
    """Errors of finite differences around trained networks, in float32; the reference is exact, in float64."""
    rows: list[dict[str, Any]] = []
    for name in TRAINED:
        model, x = supplied(name, folder, chosen.images)
        lin, fine = linnet.linearize(model.to(device)), linnet.linearize(copy.deepcopy(model).double().to(device))
        v = torch.randn(lin.p, generator=torch.Generator().manual_seed(3)).to(device)
        given = {"likelihood": Categorical()}
        J, exact = (one.jacobian(x.to(like), progress=False) for one, like in ((lin, v), (fine, v.double())))
        wanted = fisher_vector_product(fine, exact, v.double(), **given)
        for contender, method in ((EXACT_PRODUCT, "exact"), (DIFFERENCE, "finite_difference")):
            found = fisher_vector_product(lin, J, v, method=method, **given)
            error = float((found - wanted).norm() / wanted.norm())
            rows.append({"network": name, "p": lin.p, "batch": len(x), "contender": contender, "relative error": error})
            print(f"{name}, trained, {contender}: relative error {error:.2g}", flush=True)
    return rows


def supplied(name: str, folder: Path | None, count: int) -> tuple[torch.nn.Module, Tensor]:
    """A trained network and test images of its data set; without a folder, a network as drawn and random images."""
    weights, small = None if folder is None else folder / "weights", name == "LeNet-5"
    net = lenet5(weights) if small else resnet(weights, int(name.partition("-")[2]))
    if folder is None:
        return net, torch.rand(count, 1 if small else 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return net, mnist(folder, False, count=count)[0] if small else cifar10(folder, "test", count=count)[0]


# The experiment.


ARGUMENTS = {"--panels": common.several(PANELS, "what to measure; the others stay as they are")}


def run(options: argparse.Namespace) -> common.Outcome:
    """Measure, and put the numbers beside those of the other device."""
    kind = torch.device(options.device).type
    if kind not in SIZES:
        raise ValueError(f"The sizes are chosen for --device cpu and cuda; got {options.device!r}.")
    chosen, begun = QUICK if options.quick else SIZES[kind], time.perf_counter()
    before = common.earlier(options)
    devices = before.get("devices", {})
    own = devices.setdefault(kind, {})
    own["machine"] = common.machine(options.device)
    panels = {"data": against_data, "parameters": against_parameters, "products": products}
    panels["trained"] = partial(trained, folder=None if options.quick else options.data)
    for name in options.panels:
        start = time.perf_counter()
        own[name] = panels[name](options.device, chosen)
        print(f"{name}: {common.duration(time.perf_counter() - start)}", flush=True)
    settings = {
        "evidence": f"prior variance 1, noise {NOISE:g} of the kernel's mean diagonal, float64, CG to {TOLERANCE:g}",
        "products": "categorical likelihood, random images and weights, float32 without tf32, eval mode",
        "limit in seconds": {device: sizes.limit for device, sizes in SIZES.items()},
    }
    ordered = {device: devices[device] for device in SIZES if device in devices}
    metrics: dict[str, Any] = {"settings": settings, "devices": ordered}
    if set(options.panels) == set(PANELS) or not before:
        return common.Outcome(metrics, figure(ordered), table_rows(ordered))
    # Other panels stay as earlier runs have measured them.
    metrics["commands"] = list(dict.fromkeys([*before.get("commands", [before["command"]]), options.command]))
    metrics["seconds of all runs"] = before.get("seconds of all runs", before["seconds"]) + time.perf_counter() - begun
    spent = common.duration(metrics["seconds of all runs"])
    return common.Outcome(metrics, figure(ordered), table_rows(ordered), "; ".join(metrics["commands"]), spent)


# Tables and the figure.


def series(rows: Sequence[Mapping[str, Any]], label: str) -> dict[str, list[tuple[float, float]]]:
    """Contender to its points (size, seconds)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["seconds"] is not None:
            found.setdefault(row["contender"], []).append((row[label], row["seconds"]))
    return found


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the last two thirds of the points in a log-log plot.

    >>> round(exponent([(1, 9), (10, 5), (100, 50), (1000, 500)]), 3)
    1.0
    """
    last = points[len(points) // 3 :]
    x, y = ([math.log(point[i]) for point in last] for i in (0, 1))
    return statistics.linear_regression(x, y).slope if len(last) > 1 else math.nan


def table_rows(devices: Mapping[str, Mapping[str, Any]]) -> Iterator[common.Row]:
    for device, found in devices.items():
        where = f"`--device {device}`, {found['machine']}"
        where += "".join(f"; {key}: {value}" for key, value in found.get("notes", {}).items())
        for name, label, of, paper in (
            ("data", "n", "n", "mean and variance at n = 100,000 in under five minutes; nearly linear in n"),
            ("parameters", "p", "p, 1,000 examples", "nearly linear to nearly 1e8 parameters"),
        ):
            if name not in found:
                continue
            reached = []
            for contender, by in series(found[name], label).items():
                text = f"{contender}: {seconds_of(by[-1][1])} at {label} = {by[-1][0]:,}"
                text += f", grows as {label}^{exponent(by):.1f}" if len(by) > 1 else ""
                mine = [row for row in found[name] if row["contender"] == contender and "iterations" in row]
                off = max((row.get("error per example", math.nan) for row in mine), default=None)
                reached.append(text if off is None else f"{text}, off by up to {off:.0e} per example")
            differs = f"log evidence alone, float64; {where}"
            yield common.Row(f"log evidence against {of}", paper, "; ".join(reached), differs)
        if "products" not in found:
            continue
        for k in dict.fromkeys(row["k"] for row in found["products"]):
            those = [row for row in found["products"] if row["k"] == k]
            for contender, paper in ((DIFFERENCE, "about 30"), (EXACT_PRODUCT, "not in the paper")):
                mine = [row for row in those if row["contender"] == contender and "speedup" in row]
                text = ", ".join(f"{row['network']} {row['speedup']:.1f}" for row in mine)
                differs = f"random images and weights; {where}"
                what = f"speedup over double backward, {contender.removeprefix('linnet, ')}, k = {k}"
                yield common.Row(what, paper if k == 1 else "not in the paper", text, differs)
        mine = [row for row in found["products"] if row["contender"] == DIFFERENCE and "relative error" in row]
        errors = sorted(row["relative error"] for row in mine)
        if errors:
            text = f"{errors[0]:.1g} to {errors[-1]:.1g}"
            what = "relative error of the finite difference"
            yield common.Row(what, "on the order of 0.001", text, f"untrained networks; {where}")
        if rows := found.get("trained"):
            errors = {
                one: ", ".join(
                    f"{row['network']} {row['relative error']:.1g}" for row in rows if row["contender"] == one
                )
                for one in (DIFFERENCE, EXACT_PRODUCT)
            }
            text = f"{errors[DIFFERENCE]}; of the exact product in float32: {errors[EXACT_PRODUCT]}"
            what = "relative error of the finite difference around trained networks"
            count = f"supplied networks, {rows[0]['batch']} test images, against the exact product in float64; {where}"
            yield common.Row(what, "on the order of 0.001", text, count)


def seconds_of(value: float) -> str:
    return f"{value:.0f} s" if value >= 9.5 else f"{value:.2g} s"


def figure(devices: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A row for each device: time against n, time against p, speedup of the products."""
    picture, axes = plt.subplots(len(devices), 3, figsize=(15, 4.6 * len(devices)), squeeze=False)
    for (left, center, right), (device, found) in zip(axes, devices.items(), strict=True):
        title = {"cpu": "CPU", "cuda": "GPU"}[device]
        for ax, name, label, text in (
            (left, "data", "n", "examples, 803,601 parameters"),
            (center, "parameters", "p", "parameters, 1,000 examples"),
        ):
            for contender, points in series(found.get(name, []), label).items():
                ax.loglog(*zip(*points, strict=True), "o-", ms=4, color=COLORS[contender], label=contender)
            ax.set_xlabel(text)
            ax.set_ylabel("seconds for the log evidence")
            ax.set_title(f"{title}: {found['machine'].split(', ')[0]}")
        if "data" in found and device == "cuda":
            left.axhline(300, color="black", lw=0.8, ls=":")
            left.annotate("the paper: five minutes", (left.get_xlim()[0] * 1.2, 320), fontsize=8, va="bottom")
        bars(right, found.get("products", []))
    for ax in axes[0, :2]:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    return picture


def bars(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Speedups over double backward by network; hatched for blocks of columns."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    columns = list(dict.fromkeys(row["k"] for row in rows))
    kinds = [(contender, k) for k in columns for contender in (EXACT_PRODUCT, DIFFERENCE)]
    width = 0.8 / max(1, len(kinds))
    for j, (contender, k) in enumerate(kinds):
        found = {row["network"]: row.get("speedup") for row in rows if (row["contender"], row["k"]) == (contender, k)}
        heights = [found.get(network) or 0.0 for network in networks]
        places = [i + (j - (len(kinds) - 1) / 2) * width for i in range(len(networks))]
        text = f"{contender.removeprefix('linnet, ')}, k = {k}"
        hatch = "" if k == columns[0] else "///"
        drawn = ax.bar(places, heights, width, color=COLORS[contender], hatch=hatch, edgecolor="white", label=text)
        ax.bar_label(drawn, fmt="%.1f", fontsize=7)
    ax.axhline(1, color="black", lw=0.8)
    ax.set_xticks(range(len(networks)), networks, rotation=15)
    ax.set_ylabel("speedup over double backward")
    ax.set_title("Fisher-vector products (the paper: about 30)")
    if rows:
        ax.set_ylim(top=1.45 * ax.get_ylim()[1])  # room for the legend above the bars
        ax.legend(fontsize=8, loc="upper left", ncols=2)
