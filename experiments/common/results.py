"""What the experiments share: where data and results lie, scores, figures, the table of results."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "results"

# Okabe and Ito's palette: told apart by every kind of color vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GRAY = "#cc79a7", "#56b4e9", "#c9a400", "#7f7f7f"

HEADER = ("experiment", "the paper's value", "ours", "command", "what differs", "time")
TITLE = """# Results

Written by `python -m experiments NAME`, which replaces its own rows; figures and all numbers lie in the folder of each
experiment. A result worse than the paper's stands as it is.
"""


@dataclass(frozen=True)
class Row:
    """A row of results/README.md.

    Attributes:
        what: What was measured.
        paper: The paper's value, or what it says in words.
        ours: Our value.
        differs: What differs from the paper's setting.
    """

    what: str
    paper: str
    ours: str
    differs: str


@dataclass(frozen=True)
class Outcome:
    """What an experiment hands back.

    Attributes:
        metrics: Every number, as JSON. "parts" are put beside those that other runs have kept.
        figure: The figure.
        rows: Its rows of results/README.md.
        command: For the table, where several runs made the parts; None for the command that was given.
        time: The same; None for that of this run.
        renewed: The outcome from all parts, for those that other processes kept while this one was made.
    """

    metrics: dict[str, Any]
    figure: Figure
    rows: Sequence[Row]
    command: str | None = None
    time: str | None = None
    renewed: Callable[[dict[str, Any]], Outcome] | None = None


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of all processor cores together."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{duration(self.wall)} ({duration(self.cpu)} of CPU)"


def data_file(folder: Path, name: str) -> Path:
    """The file `name` of the data folder, or an error that says where it was looked for."""
    path = Path(folder) / name
    if not path.exists():
        raise FileNotFoundError(
            f"This experiment reads {name} from the data folder; {path} does not exist. "
            f"Give the folder that holds it with --data PATH (default: {DATA})."
        )
    return path


def results_folder(out: Path | None, *, quick: bool) -> Path:
    """Where to write; small versions never replace the real results."""
    return out if out is not None else RESULTS / "quick" if quick else RESULTS


def earlier(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What an experiment wrote before: to the same folder, else to the kept results; empty if nothing."""
    folders = [results_folder(options.out, quick=options.quick)] + ([] if options.quick else [RESULTS])
    for folder in folders:
        path = Path(folder) / name / "metrics.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return {}


# Results in parts, each kept as soon as it is there: runs side by side, or cut short, keep what they had.


def keep(options: argparse.Namespace, name: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Put a part of a result, a nested dict, beside the earlier ones in metrics.json; returns all of them.

    Other processes may do so at the same time. Where both have a number, the new one stays.
    """
    where = results_folder(options.out, quick=options.quick) / name
    where.mkdir(parents=True, exist_ok=True)
    with locked(where.parent):
        record = earlier(options, name)
        record = {"experiment": name, **record, "parts": together(record.get("parts", {}), clean(part))}
        write(where / "metrics.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record["parts"]


def together(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts in one; where both have a value, the new one.

    >>> together({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    both = dict(old)
    for key, value in new.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = together(both[key], value) if nested else value
    return both


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in such a block of the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# Scores of Gaussian predictions, per example.


def scores(mean: Tensor, variance: Tensor, y: Tensor, *, unit: float = 1.0) -> dict[str, float]:
    """RMSE, mean negative log density and coverage of the 95 % interval.

    Args:
        mean: Predictions (n,).
        variance: Their variances, observation noise included (n,).
        y: Targets (n,).
        unit: Original units per unit of y: RMSE and NLL are given in original units.

    >>> scores(torch.zeros(2), torch.ones(2), torch.tensor([1.0, -3.0]))["coverage"]
    0.5
    """
    if not bool((variance > 0).all()):
        raise ValueError(f"Variances must be positive; the smallest is {float(variance.min()):.3g}.")
    error = y - mean
    nll = 0.5 * (math.log(2 * math.pi) + variance.log() + error.square() / variance) + math.log(unit)
    covered = error.abs() <= 1.959964 * variance.sqrt()
    return {
        "rmse": unit * float(error.square().mean().sqrt()),
        "nll": float(nll.mean()),
        "coverage": float(covered.double().mean()),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and its standard error (NaN for one value)."""
    x = torch.tensor(list(values), dtype=torch.float64)
    error = float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return {"mean": float(x.mean()), "error": error}


def show(value: Mapping[str, float], digits: int = 2) -> str:
    """`1.23 ± 0.04`, or the mean alone where there is no standard error."""
    text = f"{value['mean']:.{digits}f}"
    return text if math.isnan(value["error"]) else f"{text} ± {value['error']:.{digits}f}"


def ranks(values: Sequence[float]) -> list[int]:
    """1 for the smallest.

    >>> ranks([0.3, 0.1, 0.2])
    [3, 1, 2]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) + 1 for i in range(len(values))]


# Files.


def save(outcome: Outcome, folder: Path, *, name: str, command: str, spent: Spent, device: str) -> Path:
    """Write metrics.json and figure.png under folder/name and the rows into folder/README.md."""
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    with locked(folder):  # runs side by side share the table
        path, table = where / "metrics.json", folder / "README.md"
        parts = {}
        if "parts" in outcome.metrics and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8")).get("parts", {})
            parts = {"parts": together(kept, clean(outcome.metrics["parts"]))}
            if outcome.renewed is not None and parts["parts"] != clean(outcome.metrics["parts"]):
                outcome = outcome.renewed(parts["parts"])
        record = {
            "experiment": name,
            "command": command,
            "seconds": round(spent.wall, 1),
            "CPU seconds": round(spent.cpu, 1),
            "machine": machine(device),
            **outcome.metrics,
            **parts,
        }
        write(path, json.dumps(clean(record), indent=1, allow_nan=False) + "\n")
        with replacing(where / "figure.png") as temporary:
            outcome.figure.savefig(temporary, format="png", dpi=150)
        before = table.read_text(encoding="utf-8") if table.exists() else ""
        shown = outcome.command or command, outcome.time or str(spent)
        write(table, updated(before, name, *shown, outcome.rows))
    return where


def updated(text: str, name: str, command: str, time: str, rows: Sequence[Row]) -> str:
    """The page of results with the rows of one experiment replaced, in place or at the end."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    kept = [line for line in lines if not line.startswith(("| experiment ", "| ---"))]
    first = next((i for i, line in enumerate(kept) if line.startswith(f"| {name}: ")), len(kept))
    own = [line_of((f"{name}: {row.what}", row.paper, row.ours, f"`{command}`", row.differs, time)) for row in rows]
    before = [line for line in kept[:first] if not line.startswith(f"| {name}: ")]
    after = [line for line in kept[first:] if not line.startswith(f"| {name}: ")]
    table = [line_of(HEADER), line_of(["---"] * len(HEADER)), *before, *own, *after]
    return TITLE + "\n" + "\n".join(table) + "\n"


def line_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def clean(value: Any) -> Any:
    """JSON has no NaN: it becomes null. Floats keep six digits."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder, renamed to `path` when the block has ended well."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def machine(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"


@contextmanager
def style() -> Iterator[None]:
    """Settings of every figure, for the duration of a block."""
    settings = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "savefig.facecolor": "white",
    }
    with matplotlib.rc_context(settings):
        yield
