"""What all commands share: errors and exit codes, notes, printing, the record of a run, devices and processes."""

from __future__ import annotations

import errno
import os
import re
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
from rich.table import Table
from safetensors import SafetensorError

from linnet._common import MissingExtra, Ranks, find_versions

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: the user has to change the command or its files; the command failed while it ran."""


class UsageError(Exception):
    """The user has to change the command or its input files."""


class Terminated(BaseException):
    """The process has received SIGTERM."""


@contextmanager
def report_errors(*, traceback: bool = False) -> Iterator[None]:
    """Turn errors into one message and an exit code, and warnings into notes.

    SIGTERM ends a command as Ctrl-C does, so that temporary files are removed.

    Args:
        traceback: Whether errors that are not `UsageError` are raised unchanged.
    """
    with warnings.catch_warnings(), _raise_on_sigterm():
        warnings.filterwarnings("default", category=UserWarning)  # each warning once
        warnings.showwarning = _print_note
        try:
            yield
        except (UsageError, MissingExtra) as error:
            raise _exit(str(error), USAGE) from error
        except (KeyboardInterrupt, Terminated) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            what, code = ("Interrupted", INTERRUPTED) if interrupted else ("Terminated", FAILURE)
            raise _exit(f"{what}. No unfinished file was written.", code) from error
        except (SystemExit, typer.Exit) as error:  # linnet itself exits only here
            raise _exit(f"The code of the network ended the command ({type(error).__name__}).", FAILURE) from error
        except Exception as error:
            if traceback:
                raise
            raise _exit(_describe_error(error), FAILURE) from error


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def blame_input(what: str = "", hint: str = "") -> Iterator[None]:
    """Turn errors that linnet or torch raise about their arguments, before the work begins, into `UsageError`.

    Args:
        what: Text before the error.
        hint: A sentence after the error.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        text = f"{what}{_name_options(str(error))}"
        raise UsageError(f"{text.rstrip('.')}. {hint}" if hint else text) from error


def _name_options(text: str) -> str:
    """An error of the library with the options of the command in place of arguments.

    >>> _name_options("params='fc.*' matches none. Choose others with params=.")
    "--params 'fc.*' matches none. Choose others with --params."
    """
    for argument, option in (("params", "--params"), ("data", "--train")):
        text = re.sub(rf"\b{argument}=(?=['\"\[])", f"{option} ", text)
        text = re.sub(rf"\b{argument}=(?=\W|$)", option, text)
    return text


def _exit(message: str, code: int) -> typer.Exit:
    _print_error_line(f"Error: {message}", "red")
    return typer.Exit(code)


def _print_error_line(text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(text, style=style, markup=False, soft_wrap=True)


def _describe_error(error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (isinstance(error, SafetensorError) and "No space left" in str(error)):
        return f"The disk is full ({error}). Nothing was written. Free some space, or choose another place with --out."
    # The text of these errors is enough; other errors need the name of their class.
    clear = isinstance(error, ValueError | TypeError | ArithmeticError | MemoryError | OSError | SafetensorError)
    text = str(error) if clear and str(error) else f"{type(error).__name__}: {error}"
    return f"{text}\nRun `linnet --traceback` with the same command to see where the error happened."


def _print_note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if is_first_process() and issubclass(category, UserWarning):
        _print_error_line(f"Note: {message}", "yellow")


@contextmanager
def collect_notes(notes: list[str] | None = None) -> Iterator[list[str]]:
    """Collect the warnings of a block, behind earlier ``notes`` if these are given. Warnings are printed as well."""
    notes = [] if notes is None else notes
    show = warnings.showwarning

    def collect(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            notes.append(str(message))
        show(message, category, *rest, **more)

    warnings.showwarning = collect
    try:
        yield notes
    finally:
        warnings.showwarning = show


class Printer:
    """Prints the steps of a command, and how long each step takes. Only the first process prints."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, quiet=not is_first_process())
        self.began = time.perf_counter()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Print a headline before the block, and the seconds after the block."""
        self.console.print(f"\n[bold cyan]{what}[/bold cyan]")
        start = time.perf_counter()
        yield
        self.console.print(f"[dim]{time.perf_counter() - start:.1f} s[/dim]")

    def say(self, text: str) -> None:
        """Print a line without wrapping."""
        self.console.print(text, markup=False, soft_wrap=True)

    def print_table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. The first column and columns without a title are aligned left, the others right."""
        table = Table(titles[0], box=SIMPLE_HEAD)
        for title in titles[1:]:
            table.add_column(title, justify="right" if title else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def print_scores(self, by_method: Mapping[str, Mapping[str, float]]) -> None:
        """Print one row of metrics for each method, with a dash where a method has no value."""
        names = list(dict.fromkeys(name for scores in by_method.values() for name in scores))
        rows = [
            [method, *(f"{scores[name]:.4g}" if name in scores else "-" for name in names)]
            for method, scores in by_method.items()
        ]
        self.print_table(["", *names], rows)

    def print_written(self, folder: Path, names: Sequence[str]) -> None:
        """Print how long the command took, and which files it wrote."""
        self.console.print(f"\n[bold]Done in {time.perf_counter() - self.began:.1f} s.[/bold] Written:")
        for name in names:
            self.say(f"  {folder / name}")


def describe_run(seed: int, device: torch.device, **more: Any) -> dict[str, Any]:
    """Everything that is needed to run a command again."""
    return {
        "command": shlex.join([Path(sys.argv[0]).stem.replace("__main__", "linnet"), *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "processes": Ranks().world,
        "versions": find_versions(),
        **more,
    }


def choose_device(name: str) -> torch.device:
    """The device of a name. "auto" is a GPU where there is one; each of several processes takes a GPU of its own."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N; got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name} needs a GPU, but torch finds no GPU. Leave --device out.")
    return device


@contextmanager
def join_processes(device: torch.device) -> Iterator[None]:
    """Join the other processes where a launcher has started several: all of them finish, or all raise.

    `torchrun` and `accelerate launch` start processes that do not know each other yet. Ray Train has joined them.
    """
    joined = int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized()
    if not joined:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        with Ranks().together():
            yield
    finally:
        if not joined:
            dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this process prints and writes."""
    return Ranks().rank == 0
