"""What `linnet demo` does: a small network on handwritten digits, its Jacobian's plan, kernel and timings."""

from __future__ import annotations

import copy
import io
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linnet import Jacobian, Plan, __version__, linearize

FIGURE, METRICS = "kernel.png", "metrics.json"
SHARES = (0.9, 0.99, 0.999)
PLAIN = "forward + backward"
BATCH = 100
LONGEST = 8  # seconds of timing, unless three runs take longer
BLUE, RED, GRAY = "#1f4e79", "#b5473c", "#9aa0a6"
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e6e9",
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}


def run(
    out: str | os.PathLike[str], *, seed: int = 0, quick: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train, linearize, show; writes ``kernel.png`` and ``metrics.json``, and returns what the latter holds.

    Args:
        out: Folder for the two files, created if missing. Nothing else in it is touched.
        seed: Of the split, the network, its training and the vectors that are multiplied.
        quick: Fewer epochs, digits and repetitions.
        console: Where to print; standard output by default.

    Raises:
        OSError: If the folder cannot be written to; before anything else is done.
    """
    began = time.perf_counter()
    console = Console(highlight=False) if console is None else console
    folder = _writable(Path(out))
    epochs, held_out, repeats = (6, 240, 3) if quick else (10, 797, 9)

    with _step(console, 1, "Train a small CNN on scikit-learn's handwritten digits, 8 x 8 pixels"):
        train, test = digits(1000, held_out, seed=seed)
        model = fit(network(seed), train, epochs=epochs, seed=seed, console=console)
        classifier = linearize(model)
        seen, unseen = ((classifier(x).argmax(1) == y).double().mean().item() for x, y in (train, test))
        console.print(f"{classifier.p:,} parameters, {len(train[0]):,} digits to train on, {held_out} held out")
        console.print(f"accuracy: {seen:.1%} on the training digits, [bold]{unseen:.1%} on those held out[/bold]")

    with _step(console, 2, "Plan its Jacobian J: the gradient of log-sum-exp(logits) for each digit"):
        by_class = test[1].argsort(stable=True)  # for the figure
        x, y = test[0][by_class], test[1][by_class]
        J = linearize(model, output=log_sum_exp).jacobian(x, progress=False)
        _print_plan(console, J.plan)

    with _step(console, 3, f"Compute the kernel K = J J^T ({J.n} x {J.n}) and its spectrum, in float64"):
        exact = linearize(copy.deepcopy(model).double(), output=log_sum_exp).jacobian(x.double())
        K = exact.gram()
        eigenvalues = torch.linalg.eigvalsh(K).flip(0)
        counts = {share: components(eigenvalues, share) for share in SHARES}
        for share, count in counts.items():
            console.print(f"{share:5.1%} of the variance lies in {count:3d} of {J.n} components")
        u = torch.randn(J.n, dtype=K.dtype, generator=torch.Generator().manual_seed(seed))
        error = ((exact @ (exact.T @ u) - K @ u).norm() / (K @ u).norm()).item()
        console.print(f"check: J (J^T u) equals K u to a relative error of {error:.0e}")
        title = f"Kernel of a digit classifier: {J.n} held-out digits, {J.shape[1]:,} parameters"
        _write(folder / FIGURE, figure(K, y, eigenvalues=eigenvalues, counts=counts, title=title))

    with _step(console, 4, f"Time passes over the {J.n} held-out digits, in float32"):
        rows = timings(model, J, data=(x, y), repeats=repeats, seed=seed, console=console)
        console.print(_timing_table(rows))
        how = f"medians of {rows[0]['runs']} runs, threads: {torch.get_num_threads()}"
        console.print(f"[dim]ratio: to {PLAIN}; {how}[/dim]")

    seconds = time.perf_counter() - began
    metrics = {
        "linnet": __version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "quick": quick,
        "seconds": seconds,
        "parameters": J.shape[1],
        "digits": {"train": len(train[0]), "test": J.n},
        "accuracy": {"train": seen, "test": unseen},
        "plan": asdict(J.plan),
        "kernel": {
            "trace": K.trace().item(),
            "components": {f"{share:.1%}": count for share, count in counts.items()},
            "product_error": error,
            "eigenvalues": eigenvalues.tolist(),
        },
        "timings": rows,
    }
    _write(folder / METRICS, (json.dumps(metrics, indent=2, allow_nan=False) + "\n").encode())
    console.print(f"\n[bold]Done in {seconds:.0f} s.[/bold] Figure and numbers:")
    for name in (FIGURE, METRICS):
        console.print(f"  {folder / name}", soft_wrap=True, markup=False)
    return metrics


def log_sum_exp(logits: Tensor) -> Tensor:
    """The negative energy of a classifier, (n,), from its logits (n, c)."""
    return logits.logsumexp(1)


def components(eigenvalues: Tensor, share: float) -> int:
    """How many of the largest eigenvalues make up a share of the sum; they come in descending order.

    >>> [components(torch.tensor([6.0, 3.0, 1.0, 0.0]), share) for share in (0.5, 0.9, 0.99)]
    [1, 2, 3]
    """
    total = eigenvalues.double().cumsum(0)
    return int((total < share * total[-1] * (1 - 1e-12)).sum()) + 1


# The network.


def digits(n: int, m: int, *, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """n digits to train on and m others: images (n, 1, 8, 8) between 0 and 1, and labels (n,)."""
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b = order[:n], order[n : n + m]
    return (x[a], y[a]), (x[b], y[b])


def network(seed: int) -> nn.Sequential:
    """Three convolutions with batch norm, then a linear layer: images (n, 1, 8, 8) to logits (n, 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential()
        for i, (a, b, stride) in enumerate([(1, 16, 1), (16, 32, 1), (32, 64, 2)], start=1):
            model.add_module(f"conv{i}", nn.Conv2d(a, b, 3, stride, padding=1, bias=False))
            model.add_module(f"norm{i}", nn.BatchNorm2d(b))
            model.add_module(f"relu{i}", nn.ReLU())
        model.add_module("pool", nn.AdaptiveAvgPool2d(1))
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(64, 10))
    return model


def fit(model: nn.Module, data: tuple[Tensor, Tensor], *, epochs: int, seed: int, console: Console) -> nn.Module:
    """Train with Adam, and return the model in eval mode."""
    x, y = data
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs=epochs, steps_per_epoch=-(-len(x) // BATCH))
    for _ in _track(console, "epoch", epochs):
        for index in torch.randperm(len(x), generator=order).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def timings(
    model: nn.Module, J: Jacobian, *, data: tuple[Tensor, Tensor], repeats: int, seed: int, console: Console
) -> list[dict[str, Any]]:
    """Median seconds of each pass over the data, with its ratio to a plain forward and backward pass.

    A slow machine repeats less often: the count is in the result, and at least 3.
    """
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    weights = list(model.parameters())
    passes: list[tuple[str, int | None, Callable[[], object]]] = [
        (PLAIN, None, lambda: torch.autograd.grad(cross_entropy(model(x), y), weights))
    ]
    for k in (1, 32):
        U, V = (torch.randn(size, k, generator=generator) for size in J.shape)
        passes += [("J @ V", k, partial(J.__matmul__, V)), ("J.T @ U", k, partial(J.T.__matmul__, U))]
        passes += [("J.normal(V) = J^T J V", k, partial(J.normal, V))]
    passes += [("J.gram() = J J^T", None, J.gram)]
    spent: list[list[float]] = [[] for _ in passes]
    began = time.perf_counter()
    for turn in _track(console, "run", repeats + 1):
        if turn > 3 and time.perf_counter() - began > LONGEST:
            break
        for times, (_, _, work) in zip(spent, passes, strict=True):
            start = time.perf_counter()
            work()
            if turn > 0:  # the first one warms up
                times.append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in spent]
    return [
        {"pass": name, "k": k, "seconds": seconds, "ratio": seconds / medians[0], "runs": len(spent[0])}
        for (name, k, _), seconds in zip(passes, medians, strict=True)
    ]


# What is printed.


@contextmanager
def _step(console: Console, number: int, what: str) -> Iterator[None]:
    console.print(f"\n[bold cyan]{number}/4[/bold cyan] [bold]{what}[/bold]")
    start = time.perf_counter()
    yield
    console.print(f"[dim]{time.perf_counter() - start:.1f} s[/dim]")


def _track(console: Console, what: str, count: int) -> Iterator[int]:
    """Count up beside a bar, on terminals; it is drawn between the turns, never during one."""
    columns = (
        TextColumn(what + " {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=silent) as progress:
        task = progress.add_task(what, total=count)
        for i in range(count):
            progress.update(task, completed=i + 1, refresh=True)
            yield i


def _print_plan(console: Console, plan: Plan) -> None:
    table = Table("layer", "rule", box=SIMPLE_HEAD)
    for title in ("parameters", "uses"):
        table.add_column(title, justify="right")
    for title in ("products", "Gram"):
        table.add_column(title)
    for line in plan.lines:
        table.add_row(line.layer, line.rule, f"{line.parameters:,}", str(line.uses), line.products, line.gram)
    console.print(f"J: {plan.shape[0]:,} x {plan.shape[1]:,}, {plan.note}; never stored")
    console.print(f"chunks of {plan.chunk:,} digits, {plan.per_example / 2**10:,.0f} KiB each")
    console.print(table)
    console.print("[dim]rows: from per-example gradients; bilinear, ghost: without forming them[/dim]")


def _timing_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("pass", box=SIMPLE_HEAD)
    for title in ("k", "ms", "ratio", "ratio / k"):
        table.add_column(title, justify="right")
    for row in rows:
        k, each = ("", "") if row["k"] is None else (str(row["k"]), f"{row['ratio'] / row['k']:.2f}")
        table.add_row(row["pass"], k, f"{1e3 * row['seconds']:.1f}", f"{row['ratio']:.2f}", each)
    return table


# The figure.


def figure(K: Tensor, labels: Tensor, *, eigenvalues: Tensor, counts: Mapping[float, int], title: str) -> bytes:
    """A kernel and its spectrum, as a PNG.

    Args:
        K: (n, n), its examples sorted by class.
        labels: (n,), ascending.
        eigenvalues: (n,), descending.
        counts: From a share of the trace to the number of components that make it up.
        title: Above the panels.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        fig = Figure(figsize=(12.5, 6.6), layout="constrained")
        FigureCanvasAgg(fig)
        fig.suptitle(title, fontsize=14, fontweight="bold")
        panels = [["spectrum", "matrix"], ["explained", "matrix"]]
        axes: dict[str, Any] = fig.subplot_mosaic(panels, width_ratios=[1, 1.25])
        _draw_spectrum(axes["spectrum"], eigenvalues, len(labels.unique()))
        _draw_explained(axes["explained"], eigenvalues, counts)
        _draw_matrix(axes["matrix"], K, labels)
        picture = io.BytesIO()
        fig.savefig(picture, dpi=150)
    return picture.getvalue()


def _draw_spectrum(ax: Any, eigenvalues: Tensor, classes: int) -> None:
    n = len(eigenvalues)
    rounding = n * torch.finfo(eigenvalues.dtype).eps * eigenvalues[0]
    shown = eigenvalues[eigenvalues > rounding].numpy()
    ax.loglog(range(1, len(shown) + 1), shown, ".-", color=BLUE, markersize=4, linewidth=1)
    ax.axvline(classes, color=GRAY, linewidth=1, linestyle=":")
    ax.annotate(
        f"{classes} classes",
        (classes, 0.06),
        (5, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
    )
    ax.set(title="Eigenvalues of K", xlabel="component", ylabel="eigenvalue")
    _count_axis(ax, n)


def _draw_explained(ax: Any, eigenvalues: Tensor, counts: Mapping[float, int]) -> None:
    """What is left, on a logarithmic axis upside down: 90, 99 and 99.9 % are equally far apart."""
    n = len(eigenvalues)
    left = 1 - eigenvalues.cumsum(0) / eigenvalues.sum()
    bottom = 10**-3.5
    ax.loglog(range(1, n + 1), left.clamp(min=bottom / 10).numpy(), color=BLUE, linewidth=2)
    for share, count in counts.items():
        ax.plot([0.9, count, count], [1 - share, 1 - share, 1], "--", color=RED, linewidth=1)
        ax.plot(count, 1 - share, "o", color=RED, markersize=5)
        ax.annotate(
            f"{count}",
            (count, 1 - share),
            (-6, 5),
            textcoords="offset points",
            ha="right",
            color=RED,
            weight="bold",
        )
    ax.set(title="Explained variance", xlabel="components kept", ylabel="share of the trace")
    ax.set_ylim(1, bottom)
    ax.set_yticks([1, *(1 - share for share in SHARES)], ["0 %", *(f"{100 * share:g} %" for share in SHARES)])
    ax.tick_params(axis="y", which="minor", length=0)
    _count_axis(ax, n)


def _count_axis(ax: Any, n: int) -> None:
    ax.set_xlim(0.9, 1.2 * n)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid()


def _draw_matrix(ax: Any, K: Tensor, labels: Tensor) -> None:
    norms = K.diagonal().sqrt()
    cosines = (K / norms / norms[:, None]).numpy()
    image = ax.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="antialiased")
    edges = [0, *torch.bincount(labels).cumsum(0).tolist()]
    for edge in edges[1:-1]:
        ax.axhline(edge - 0.5, color=GRAY, linewidth=0.5)
        ax.axvline(edge - 0.5, color=GRAY, linewidth=0.5)
    middles = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    names = [str(i) for i in range(len(middles))]
    ax.set_xticks(middles, names)
    ax.set_yticks(middles, names)
    ax.tick_params(length=0)
    ax.set(title=r"Kernel matrix, $K_{ij} / \sqrt{K_{ii} K_{jj}}$", xlabel="digit", ylabel="digit")
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.7, aspect=30, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_label("cosine of two digits' gradients")
    bar.outline.set_visible(False)


# Files.


def _writable(folder: Path) -> Path:
    """The folder, created if missing, after a file has been written to it and removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(4)}.tmp"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"linnet demo needs a folder it can write to, and {str(folder)!r} is none "
            f"({error.strerror}); choose another with --out."
        ) from error
    return folder


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # also KeyboardInterrupt
        temporary.unlink(missing_ok=True)
        raise
