"""What all commands share: errors and exit codes, notes, tables, a record of what was run, several processes."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError

from linnet._common.distributed import rank_and_world
from linnet._common.versions import versions

USAGE, FAILURE = 2, 1
"""Exit codes: the command or its files have to change; it failed on the way."""

OWN = (ValueError, TypeError, ArithmeticError, MemoryError, OSError, SafetensorError)
"""Errors whose text says enough by itself."""


class UsageError(Exception):
    """Something about the command or its input files has to change."""


class Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def reported(*, traceback: bool = False) -> Iterator[None]:
    """Turn errors into one message and an exit code, and warnings into notes.

    SIGTERM ends a command as Ctrl-C does, so that temporary files are removed.

    Args:
        traceback: Whether errors that are not about usage are raised as they are.
    """
    with warnings.catch_warnings(), _terminable():
        warnings.filterwarnings("default", category=UserWarning)  # each once
        warnings.showwarning = _note
        try:
            yield
        except UsageError as error:
            raise _exit(str(error), USAGE) from error
        except (KeyboardInterrupt, Terminated) as error:
            what = "Interrupted" if isinstance(error, KeyboardInterrupt) else "Terminated"
            raise _exit(f"{what}; nothing unfinished was written.", FAILURE) from error
        except (SystemExit, typer.Exit) as error:  # linnet's own come from here alone
            raise _exit(f"The code of the network ended the command ({type(error).__name__}).", FAILURE) from error
        except Exception as error:
            if traceback:
                raise
            raise _exit(_message(error), FAILURE) from error


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise `Terminated` where the process gets SIGTERM, once; signals are for the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one must not stop the cleaning up
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def as_usage(what: str = "") -> Iterator[None]:
    """Errors of linnet and torch about what they were given, before the work begins, as errors of usage."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise UsageError(f"{what}{error}") from error


def _exit(message: str, code: int) -> typer.Exit:
    errors = Console(stderr=True, highlight=False)
    errors.print(f"Error: {message}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(code)


def _message(error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (isinstance(error, SafetensorError) and "No space left" in str(error)):
        return f"The disk is full ({error}), and nothing was written. Make room, or choose another place with --out."
    named = str(error) if isinstance(error, OWN) and str(error) else f"{type(error).__name__}: {error}"
    return f"{named}\n`linnet --traceback` and the same command show where it happened."


def _note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    if rank_and_world()[0] == 0 and issubclass(category, UserWarning):
        errors = Console(stderr=True, highlight=False)
        errors.print(f"Note: {message}", style="yellow", markup=False, soft_wrap=True)


@contextmanager
def noted() -> Iterator[list[str]]:
    """The notes of what is done meanwhile, which are printed as ever."""
    said: list[str] = []
    show = warnings.showwarning

    def both(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            said.append(str(message))
        show(message, category, *rest, **more)

    warnings.showwarning = both
    try:
        yield said
    finally:
        warnings.showwarning = show


# What is printed.


class Printer:
    """Prints steps with the time each takes; silent on all processes but the first."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console(highlight=False, quiet=rank_and_world()[0] != 0) if console is None else console
        self.began = time.perf_counter()

    @contextmanager
    def step(self, what: str, *, about: float | None = None) -> Iterator[None]:
        """A headline, and how long it took; on terminals, while it runs, the time left of ``about`` so many seconds."""
        self.console.print(f"\n[bold cyan]{what}[/bold cyan]")
        start = time.perf_counter()
        if about is None or not self.console.is_terminal:
            yield
        else:
            with Progress(SpinnerColumn(), _Left(about), console=self.console, transient=True) as progress:
                progress.add_task(what, total=None)
                yield
        self.console.print(f"[dim]{time.perf_counter() - start:.1f} s[/dim]")

    def say(self, text: str) -> None:
        """A line that is not wrapped."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column and those without a title to the left, all others to the right."""
        table = Table(titles[0], box=SIMPLE_HEAD)
        for title in titles[1:]:
            table.add_column(title, justify="right" if title else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def scores(self, by_method: Mapping[str, Mapping[str, float]]) -> None:
        """Metrics, one row for each method; a dash where a method has none."""
        names = list(dict.fromkeys(name for scores in by_method.values() for name in scores))
        rows = [
            [method, *(f"{scores[name]:.4g}" if name in scores else "-" for name in names)]
            for method, scores in by_method.items()
        ]
        self.table(["", *names], rows)

    def written(self, folder: Path, names: Sequence[str]) -> None:
        """The end: how long all took, and what was written."""
        self.console.print(f"\n[bold]Done in {time.perf_counter() - self.began:.1f} s.[/bold] Written:")
        for name in names:
            self.say(f"  {folder / name}")


class _Left(ProgressColumn):
    """Time since the start, and what is left of an estimate."""

    def __init__(self, about: float) -> None:
        super().__init__()
        self.about = about

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        left = self.about - elapsed
        return Text(f"{elapsed:.0f} s, " + (f"about {left:.0f} s left" if left > 0 else "longer than estimated"))


def record(seed: int, device: torch.device, **more: Any) -> dict[str, Any]:
    """What has to be known to run a command again."""
    return {
        "command": shlex.join([Path(sys.argv[0]).stem.replace("__main__", "linnet"), *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "processes": rank_and_world()[1],
        "versions": versions(),
        **more,
    }


# Where it runs.


def device_of(name: str) -> torch.device:
    """The device of a name: "auto" is a GPU where there is one, this process's own where there are several."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N; got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name} needs a GPU that torch can use, and there is none; leave --device out.")
    return device


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the other processes where `torchrun` has started several."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process prints and writes."""
    return rank_and_world()[0] == 0
