"""What `linnet demo` does: a network of upright digits learns turned ones from a few labels, in six ways."""

from __future__ import annotations

import io
import json
import os
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MultipleLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from linnet import TangentClassifier, __version__, metrics
from linnet._common.files import atomic_write
from linnet.cli.demo_baselines import (
    ANGLE,
    Task,
    fine_tuned,
    last_layer,
    network,
    probabilities,
    train,
    turned_digits,
)
from linnet.inference.any_likelihood import Inference

ADAPTATION, CONFIDENCE, METRICS = "adaptation.png", "confidence.png", "metrics.json"
FILES = (ADAPTATION, CONFIDENCE, METRICS)
NONE, LAST, TUNED = "no adaptation", "last layer only", "fine-tuning"
MAP, LAPLACE, VI = "tangent MAP", "tangent Laplace", "tangent VI"
METHODS = (NONE, LAST, TUNED, MAP, LAPLACE, VI)
TANGENT: dict[str, Inference] = {MAP: "map", LAPLACE: "laplace", VI: "vi"}
SCORES = {"accuracy": ("accuracy", ".1%"), "nll": ("NLL", ".2f"), "ece": ("ECE", ".3f"), "seconds": ("seconds", ".1f")}
BLUE, RED, GRAY = "#1f4e79", "#b5473c", "#9aa0a6"
COLORS = {NONE: GRAY, LAST: RED, TUNED: RED, MAP: BLUE, LAPLACE: BLUE, VI: BLUE}
FEWEST = 5  # digits that make a point of a reliability diagram
T = TypeVar("T")
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e6e9",
}


@dataclass(frozen=True)
class Result:
    """What a method made of a task.

    Attributes:
        probabilities: Of the test digits' classes, (m, 10).
        scores: Accuracy, NLL, Brier score, ECE and seconds.
        details: What was chosen or found on the way.
    """

    probabilities: Tensor
    scores: dict[str, float]
    details: dict[str, Any]


@dataclass(frozen=True)
class Split:
    """One split of the digits, the network trained on its upright ones, and the results by method."""

    seed: int
    task: Task
    model: nn.Sequential
    results: dict[str, Result]


def run(
    out: str | os.PathLike[str], *, seed: int = 0, quick: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train, adapt, compare; writes two figures and ``metrics.json``, and returns what the latter holds.

    Args:
        out: Folder for the files, created if missing. Nothing else in it is touched.
        seed: Of the splits, the networks and their training.
        quick: One split rather than three, fewer labels, digits and epochs.
        console: Where to print; standard output by default.

    Raises:
        OSError: If the folder cannot be written to; before anything else is done.
    """
    # Networks as small as these are slower on several threads, and much slower where others want the cores too.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):  # numpy's and scikit-learn's
            return _run(out, seed=seed, quick=quick, console=console)
    finally:
        torch.set_num_threads(threads)


def _run(out: str | os.PathLike[str], *, seed: int, quick: bool, console: Console | None) -> dict[str, Any]:
    began = time.perf_counter()
    console = Console(highlight=False) if console is None else console
    folder = _writable(Path(out))
    count, each, test, epochs, longest = (1, 4, 200, 6, 10) if quick else (3, 5, None, 15, 30)

    with _step(console, 1, "Train a small CNN on upright digits: scikit-learn's, 8 x 8 pixels"):
        splits = [
            _trained(turned_digits(each, test, seed=s), epochs=epochs, seed=s)
            for s in _track(console, "network", range(1000 * seed, 1000 * seed + count))
        ]
        first = splits[0].task
        upright = [metrics.accuracy(probabilities(s.model, s.task.upright), s.task.test[1]) for s in splits]
        parameters = sum(p.numel() for p in splits[0].model.parameters())
        sizes = {"source": len(first.source[0]), "labels": len(first.few[0]), "test": len(first.test[0])}
        console.print(f"random splits: {count}; {parameters:,} parameters, trained on {sizes['source']:,} digits each")
        console.print(f"accuracy on {sizes['test']} other upright digits: [bold]{_over(upright, '.1%')}[/bold]")

    with _step(console, 2, f"New task: digits turned by {ANGLE} degrees, {sizes['labels']} labels; adapt"):
        work = [(split, method) for split in splits for method in METHODS]
        for split, method in _track(console, "adaptation", work):
            split.results[method] = adapt(method, split, longest=longest)
        console.print(_table(splits))
        spread = f", ± standard deviation over {count} splits" if count > 1 else ""
        console.print(f"[dim]{sizes['test']} test digits{spread}; NLL in nats; seconds with[/dim]")
        console.print("[dim]all tuning: cross-validation of the labels or, for tangent, the evidence[/dim]")

    with _step(console, 3, "Look closer at the tangent model, and draw"):
        for line in _closer(splits[0].results):
            console.print(line)
        _write(folder / ADAPTATION, adaptation_figure(splits))
        _write(folder / CONFIDENCE, confidence_figure(splits))

    seconds = time.perf_counter() - began
    found = {
        "linnet": __version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "quick": quick,
        "seconds": seconds,
        "parameters": parameters,
        "digits": sizes,
        "upright_accuracy": upright,
        "methods": {
            method: {
                **{name: [s.results[method].scores[name] for s in splits] for name in splits[0].results[method].scores},
                "details": [s.results[method].details for s in splits],
            }
            for method in METHODS
        },
    }
    _write(folder / METRICS, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())
    console.print(f"\n[bold]Done in {seconds:.0f} s.[/bold] Figures and numbers:")
    for name in FILES:
        console.print(f"  {folder / name}", soft_wrap=True, markup=False)
    return found


# The work.


def _trained(task: Task, *, epochs: int, seed: int) -> Split:
    model = network(seed)
    train(model, task.source, epochs=epochs, seed=seed)
    return Split(seed, task, model, {})


def adapt(method: str, split: Split, *, longest: int) -> Result:
    """Adapt a split's network to its turned digits, and score the predictions.

    Args:
        method: One of `METHODS`.
        split: The digits and the network, which is left as it is.
        longest: Most epochs of fine-tuning.
    """
    model, few, (x, y) = split.model, split.task.few, split.task.test
    classifier: TangentClassifier | None = None
    details: dict[str, Any] = {}
    start = time.perf_counter()
    if method == NONE:
        p = probabilities(model, x)
    elif method == LAST:
        p, details = last_layer(model, few, x, seed=split.seed)
    elif method == TUNED:
        p, details = fine_tuned(model, few, x, seed=split.seed, longest=longest)
    else:
        classifier = TangentClassifier(model, inference=TANGENT[method], link="mc", seed=split.seed)
        p = classifier.fit(*few).predict_proba(x)
    seconds = time.perf_counter() - start
    if classifier is not None:
        linearity = classifier.linearity(x)
        details = {
            "prior_variance": classifier.scales_["all"],
            "log_evidence": classifier.log_evidence_,
            "elbo": classifier.elbo_,
            "layers": classifier.layer_relevance_,
            "linearity": {"relative_error": linearity.relative_error, "agreement": linearity.agreement},
        }
    return Result(p, {**metrics.classification(p, y), "seconds": seconds}, details)


# What is printed.


@contextmanager
def _step(console: Console, number: int, what: str) -> Iterator[None]:
    console.print(f"\n[bold cyan]{number}/3[/bold cyan] [bold]{what}[/bold]")
    start = time.perf_counter()
    yield
    console.print(f"[dim]{time.perf_counter() - start:.1f} s[/dim]")


def _track(console: Console, what: str, items: Sequence[T]) -> Iterator[T]:
    """The items beside a bar, on terminals; it is drawn between the turns, never during one."""
    columns = (
        TextColumn(what + " {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=silent) as progress:
        task = progress.add_task(what, total=len(items))
        for i, item in enumerate(items):
            progress.update(task, completed=i + 1, refresh=True)
            yield item


def _over(values: Sequence[float], form: str) -> str:
    """A mean over splits, with the standard deviation if there is one.

    >>> _over([0.5], ".2f"), _over([1.0, 2.0, 3.0], ".1f")
    ('0.50', '2.0 ± 1.0')
    """
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    spread = format(statistics.stdev(values), form).removesuffix("%")
    return f"{mean.removesuffix('%')} ± {spread}{'%' if form.endswith('%') else ''}"


def _scores(splits: Sequence[Split], method: str, name: str) -> list[float]:
    return [split.results[method].scores[name] for split in splits]


def _table(splits: Sequence[Split]) -> Table:
    table = Table("method", box=SIMPLE_HEAD)
    for title, _ in SCORES.values():
        table.add_column(title, justify="right")
    for method in METHODS:
        cells = [_over(_scores(splits, method, name), form) for name, (_, form) in SCORES.items()]
        table.add_row(method, *cells)
    return table


def _closer(results: dict[str, Result]) -> Iterator[str]:
    """What the tangent model says about itself."""
    mode, laplace, vi = (results[method].details for method in (MAP, LAPLACE, VI))
    yield f"scale of the prior, chosen by the evidence: {mode['prior_variance']:.2g}"
    yield f"log evidence by Laplace {laplace['log_evidence']:.1f}; lower bound by VI {vi['elbo']:.1f}"
    yield "share of each layer: " + ", ".join(f"{layer} {share:.0%}" for layer, share in mode["layers"].items())
    linearity = mode["linearity"]
    yield f"how linear: with the new weights the network itself reads {linearity['agreement']:.0%} of the digits"
    yield f"as the linear model does, and its logits are off by {linearity['relative_error']:.0%} of the change"


# The figures.


def adaptation_figure(splits: Sequence[Split]) -> bytes:
    """The task and every method's scores, as a PNG."""
    with _figure(12.5, 7.2) as (fig, png):
        labels, test, count = len(splits[0].task.few[0]), len(splits[0].task.test[0]), len(splits)
        note = "" if count == 1 else f"; small dots: {count} random splits, large dots: their means"
        note = f"turned by {ANGLE} degrees; {labels} labels to adapt with, {test} digits to test on{note}"
        _frame(fig, "A network of upright digits meets turned ones", note)
        top, bottom = fig.subfigures(2, 1, height_ratios=[1, 1.35])
        _draw_task(top, splits[0])
        axes = bottom.subplots(1, len(SCORES), sharey=True)
        for ax, (name, (title, form)) in zip(axes, SCORES.items(), strict=True):
            _draw_scores(ax, splits, name, form)
            better = "higher is better" if name == "accuracy" else "lower is better"
            ax.set(title=title, xlabel=better)
        axes[0].set_yticks(range(len(METHODS)), METHODS)
        axes[0].set_ylim(len(METHODS) - 0.5, -0.7)
    return png.getvalue()


def confidence_figure(splits: Sequence[Split]) -> bytes:
    """Confidence against accuracy, what it is good for, and the digits that are least sure, as a PNG."""
    with _figure(12.5, 7.4) as (fig, png):
        note = f"above: areas are numbers of digits, and bins of fewer than {FEWEST} are left out"
        _frame(fig, "How far confidence can be trusted", note)
        top, bottom = fig.subfigures(2, 1, height_ratios=[1, 1.2])
        axes = top.subplots(1, len(METHODS) - 1, sharey=True)
        for ax, method in zip(axes, METHODS[1:], strict=True):
            _draw_reliability(ax, splits, method)
        axes[0].set_ylabel("accuracy")
        left, right = bottom.subfigures(1, 2, width_ratios=[1, 1.7])
        _draw_rejection(left.subplots(), splits)
        _draw_unsure(right, splits[0])
    return png.getvalue()


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, io.BytesIO]]:
    """An empty figure, and the PNG that it becomes; the user's matplotlib settings are neither used nor changed."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        fig, png = Figure(figsize=(width, height), layout="constrained"), io.BytesIO()
        FigureCanvasAgg(fig)
        yield fig, png
        fig.savefig(png, dpi=150)


def _frame(fig: Any, title: str, note: str) -> None:
    fig.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    fig.supxlabel(note, fontsize=10, color="#5f6368", x=0.01, ha="left")


def _draw_task(fig: Any, split: Split) -> None:
    """One test digit of each class, upright and turned, with what is read before and after adaptation."""
    (x, y), upright = split.task.test, split.task.upright
    chosen = [int((y == label).nonzero()[0]) for label in range(10)]
    readings = (
        probabilities(split.model, upright).argmax(1),
        split.results[NONE].probabilities.argmax(1),
        split.results[VI].probabilities.argmax(1),
    )
    axes = fig.subplots(2, 10)
    for column, i in enumerate(chosen):
        for ax, image in zip(axes[:, column], (upright[i, 0], x[i, 0]), strict=True):
            _draw_digit(ax, image)
        before, turned, after = (int(reading[i]) for reading in readings)
        for ax, at, reading in ((axes[0], 1.0, before), (axes[1], 1.0, turned), (axes[1], -0.34, after)):
            color = BLUE if reading == column else RED
            ax[column].text(
                0.5, at, str(reading), transform=ax[column].transAxes, ha="center", va="bottom", color=color
            )
    for ax, at, text in (
        (axes[0, 0], 1.0, "upright: the network reads"),
        (axes[1, 0], 1.0, "turned: the network reads"),
        (axes[1, 0], -0.34, f"turned: {VI} reads"),
    ):
        ax.text(-0.3, at, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=10)


def _draw_digit(ax: Any, image: Tensor) -> None:
    ax.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=1)
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color=GRAY, linewidth=0.5)


def _draw_scores(ax: Any, splits: Sequence[Split], name: str, form: str) -> None:
    for row, method in enumerate(METHODS):
        values, color = _scores(splits, method, name), COLORS[method]
        mean = statistics.fmean(values)
        ax.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=5, markeredgewidth=0)
        ax.plot(mean, row, "o", color=color, markersize=8)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}
        text = {"textcoords": "offset points", "ha": "center", "color": color, "bbox": box}
        ax.annotate(format(mean, form), (mean, row), (0, 8), **text)
    if name == "accuracy":
        ax.set_xlim(-0.05, 1.1)
        ax.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    elif name == "seconds":
        ax.margins(x=0.18)
    else:
        ax.set_xscale("log")
        ax.margins(x=0.18)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)


def _draw_reliability(ax: Any, splits: Sequence[Split], method: str, bins: int = 10) -> None:
    """Accuracy against confidence in bins, of the digits of all splits."""
    found = metrics.reliability(*_told(splits, method), bins=bins)
    for x, y, count in zip(found.confidence, found.accuracy, found.count, strict=True):
        if count < FEWEST:
            continue
        ax.plot([x, x], [x, y], color=COLORS[method], linewidth=1)
        ax.scatter(x, y, s=20 + 500 * count / found.count.sum(), color=COLORS[method], alpha=0.85, linewidths=0)
    ax.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", zorder=0)
    ece = statistics.fmean(_scores(splits, method, "ece"))
    ax.text(0.96, 0.04, f"ECE {ece:.3f}", transform=ax.transAxes, ha="right")
    ax.set(title=method, xlabel="confidence", xlim=(0, 1.06), ylim=(0, 1.06), aspect="equal")
    ax.set_xticks([0, 0.5, 1])
    ax.set_yticks([0, 0.5, 1])
    ax.grid()


def _draw_rejection(ax: Any, splits: Sequence[Split]) -> None:
    """The accuracy where only the most confident digits are read."""
    styles = {LAST: (RED, ":"), TUNED: (RED, "-"), MAP: (BLUE, ":"), LAPLACE: (BLUE, "--"), VI: (BLUE, "-")}
    for method, (color, line) in styles.items():
        kept = metrics.kept_accuracy(*_told(splits, method))
        share = torch.arange(1, len(kept) + 1) / len(kept)
        shown = share >= 0.2
        ax.plot(share[shown], kept[shown], line, color=color, linewidth=1.8, label=method)
    ax.set(title="Accuracy on the digits it is surest of", xlabel="share of the digits that it reads")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.yaxis.set_major_locator(MultipleLocator(0.05))
    ax.legend(frameon=False, loc="lower left", fontsize=10)
    ax.grid()


def _draw_unsure(fig: Any, split: Split, count: int = 6) -> None:
    """The test digits with the most even probabilities."""
    p, (x, y) = split.results[VI].probabilities, split.task.test
    chosen = p.amax(1).argsort(stable=True)[:count].tolist()
    fig.suptitle(f"The digits that {VI} is least sure of", fontsize=12, x=0.02, ha="left")
    axes = fig.subplots(2, count, sharey="row", height_ratios=[1.1, 1])
    for (picture, bars), i in zip(axes.T, chosen, strict=True):
        _draw_digit(picture, x[i, 0])
        picture.set_title(f"a {int(y[i])}", loc="center", fontsize=11, color=BLUE)
        colors = [BLUE if label == int(y[i]) else GRAY for label in range(10)]
        bars.bar(range(10), p[i].tolist(), color=colors, width=0.8)
        bars.set(xticks=range(0, 10, 3), ylim=(0, 0.5), yticks=[0, 0.25, 0.5])
        bars.tick_params(axis="x", length=0)
    axes[1, 0].set_ylabel("probability")


def _told(splits: Sequence[Split], method: str) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of the test digits of all splits."""
    p = [split.results[method].probabilities for split in splits]
    return torch.cat(p), torch.cat([split.task.test[1] for split in splits])


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
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
