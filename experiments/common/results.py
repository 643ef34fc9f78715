"""Where data and results lie, what an experiment hands back, the files that it leaves and the table of results."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linnet._common import atomic_write

if TYPE_CHECKING:  # slow to import, and not needed to read data
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "results"

HEADER = ("experiment", "the paper's value", "ours", "command", "what differs", "time")
TITLE = """# Results

Written by `python -m experiments NAME`, which replaces its own rows; figures and all numbers lie in the folder of each
experiment. A result worse than the paper's stands as it is.

Weights that experiments train are not in the repository. `python -m experiments wrn --device cuda` writes those of
WRN-40-2 to results/wrn (read by `embedding_time`, `nfk_probe`, `nfk_distill`); `python -m experiments encoders --device
cuda` and `python -m experiments encoders` write those of the GANs, the VAE and the rotation network to results/encoders
(read by `nfk_probe`, `inversion`, `table1_mu`). With `--quick` all experiments run without them.
"""


@dataclass(frozen=True)
class Row:
    """A row of results/README.md."""

    what: str  # what was measured
    paper: str  # the paper's value, or what it says in words
    ours: str  # our value
    differs: str  # what differs from the paper's setting


@dataclass(frozen=True)
class Outcome:
    """The numbers, rows and figure that an experiment returns."""

    metrics: dict[str, Any]  # Every number, as JSON. "parts" are put beside those that other runs have kept.
    figure: Figure  # the figure
    rows: Iterable[Row]  # its rows of results/README.md
    command: str | None = None  # for the table, where several runs made the parts; None for the command that was given
    time: str | None = None  # the same; None for that of this run
    # the outcome from all parts, for those that other processes kept while this one was made
    renewed: Callable[[dict[str, Any]], Outcome] | None = None


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of all processor cores together."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{duration(self.wall)} ({duration(self.cpu)} of CPU)"


@dataclass
class Clock:
    """Seconds of the blocks it was given: of the processor on a CPU (others may work beside), else by the clock."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


FAR, WIDE, OWN = "The network is far from a mode", "The prior that the evidence chose", "The network's residuals"
"""Beginnings of warnings: a network was stopped early; a prior is wide; data are those that the network has seen."""


@contextmanager
def expect(*beginnings: str) -> Iterator[None]:
    """Do not show warnings that begin so: what they warn of is what the experiment is about."""
    with warnings.catch_warnings():
        for beginning in beginnings:
            warnings.filterwarnings("ignore", beginning, UserWarning)
        yield


# Options.


def several(choices: Iterable[Any], text: str = "", **how: Any) -> dict[str, Any]:
    """An option that takes some of the choices, by default all of them."""
    return {"nargs": "+", "choices": choices, "default": list(choices), "help": text, **how}


def kind_of(options: argparse.Namespace) -> str:
    """The size of a run: "quick", or the kind of its device."""
    return "quick" if options.quick else options.device.partition(":")[0]


def fill(options: argparse.Namespace, defaults: Mapping[str, Mapping[str, Any]]) -> str:
    """Give the options that were left out the values of the run's kind, which is returned."""
    kind = kind_of(options)
    for name, value in defaults[kind].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return kind


def require_cpu(options: argparse.Namespace, why: str) -> None:
    """Raise if an experiment on small networks is asked to run elsewhere."""
    if options.device != "cpu":
        raise ValueError(f"{why}: {options.name} runs on the CPU only; got {options.device!r}.")


def seeds_of(options: argparse.Namespace, usual: int) -> range:
    """The seeds of `--seed` and `--seeds`."""
    return range(options.seed, options.seed + (options.seeds or usual))


# Files.


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


def own_folder(options: argparse.Namespace) -> Path:
    """The folder that the experiment writes to."""
    return results_folder(options.out, quick=options.quick) / options.name


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The metrics of an earlier run, from the same folder or else from the kept results; empty if there are none."""
    for folder in [own_folder(options)] + ([] if options.quick else [RESULTS / options.name]):
        if (folder / "metrics.json").exists():
            return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return {}


# Results in parts, each kept as soon as it is there: runs side by side, or cut short, keep what they had.


def kept_parts(options: argparse.Namespace) -> dict[str, Any]:
    """The parts that earlier runs have kept."""
    return earlier(options).get("parts", {})


def keep(options: argparse.Namespace, part: Mapping[str, Any]) -> dict[str, Any]:
    """Put a part of a result, a nested dict, beside the earlier ones in metrics.json; returns all of them.

    Other processes may do so at the same time. Where both have a number, the new one stays. The commands that parts
    come from are kept, the latest last.
    """
    where = own_folder(options)
    where.mkdir(parents=True, exist_ok=True)
    with lock(where.parent):
        record = earlier(options)
        command = getattr(options, "command", None)  # options that were not read from a command line have none
        commands = [one for one in record.get("commands", []) if one != command] + [command] * (command is not None)
        parts = merge(record.get("parts", {}), clean(part))
        record = {"experiment": options.name, **record, "commands": commands, "parts": parts}
        write(where / "metrics.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record["parts"]


def forget(options: argparse.Namespace, *names: str) -> None:
    """Drop parts that earlier runs have kept, as they are measured anew: what is not measured again must not stay."""
    where = own_folder(options)
    where.mkdir(parents=True, exist_ok=True)
    with lock(where.parent):
        record = earlier(options)
        record = {**record, "parts": {key: part for key, part in record.get("parts", {}).items() if key not in names}}
        write(where / "metrics.json", json.dumps(record, indent=1, allow_nan=False) + "\n")


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts in one; where both have a value, the new one.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    both = dict(old)
    for key, value in new.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merge(both[key], value) if nested else value
    return both


def measure_parts(
    options: argparse.Namespace, names: Sequence[str], measure: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Measure parts of an experiment by name and keep each, with its seconds and the machine; returns all parts."""
    parts = kept_parts(options)
    for name in names:
        clock = Clock(options.device)
        with clock("seconds"):
            found = measure(name)
        found |= {**clock.seconds, "machine": machine(options.device)}
        print(f"{name}: { ({key: value for key, value in found.items() if key != 'path'}) }", flush=True)
        parts = keep(options, {name: found})
    return parts


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Only one process at a time is in such a block of the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# The table of results.


def save(outcome: Outcome, folder: Path, *, name: str, command: str, spent: Spent, device: str) -> Path:
    """Write metrics.json and the figure under folder/name and the rows into folder/README.md. Figures are closed.

    The command, the time and the machine are those of this run. If the run kept no part and drew the parts of earlier
    runs, they stay those of the last run that kept one.
    """
    from matplotlib import pyplot

    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    with lock(folder):  # runs side by side share the table
        path, table = where / "metrics.json", folder / "README.md"
        parts: dict[str, Any] = {}
        made = {"command": command, "seconds": round(spent.wall, 1), "CPU seconds": round(spent.cpu, 1)}
        made |= {"machine": machine(device)}
        if "parts" in outcome.metrics and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            commands = before.get("commands", [])
            parts = {"commands": commands} if commands else {}
            parts |= {"parts": merge(before.get("parts", {}), clean(outcome.metrics["parts"]))}
            if command not in commands:
                made = {key: before.get(key, value) for key, value in made.items()}
            if outcome.renewed is not None and parts["parts"] != clean(outcome.metrics["parts"]):
                outcome = outcome.renewed(parts["parts"])
        rows = list(outcome.rows)
        record = {
            "experiment": name,
            **made,
            **outcome.metrics,
            **parts,
        }
        write(path, json.dumps(clean(record), indent=1, allow_nan=False) + "\n")
        for ending in ("png", "svg"):
            with atomic_write(where / f"figure.{ending}") as temporary:
                outcome.figure.savefig(temporary, format=ending, dpi=150)
        page = table.read_text(encoding="utf-8") if table.exists() else ""
        shown = outcome.command or made["command"], outcome.time or str(spent)
        write(table, update_table(page, name, *shown, rows))
    pyplot.close("all")  # matplotlib keeps figures until they are closed
    for row in rows:
        print(f"{row.what}: {row.ours}")
    return where


def update_table(text: str, name: str, command: str, spent: str, rows: Sequence[Row]) -> str:
    """The page of results with the rows of one experiment replaced, in place or at the end."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    kept = [line for line in lines if not line.startswith(("| experiment ", "| ---"))]
    first = next((i for i, line in enumerate(kept) if line.startswith(f"| {name}: ")), len(kept))
    own = [line_of((f"{name}: {row.what}", row.paper, row.ours, f"`{command}`", row.differs, spent)) for row in rows]
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
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def machine(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}"
