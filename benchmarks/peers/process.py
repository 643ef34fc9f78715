"""One side: imports its library once, then forks for each job, so that every measurement has a process of its own.

``python -m benchmarks.peers.process SIDE`` reads lines, each the name of a folder with ``job.json`` (what to do) and
``job.pt`` (weights and data). The child that it forks writes ``SIDE.pt`` (what was found) and ``SIDE.json`` (its cost)
there, and a line with its exit status is printed when it is done. Linux only, for the memory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.jobs import MODULES, PACKAGES, network

Task = Callable[..., dict[str, Tensor]]

WARM = 12
"""Examples of the run before the measured one, which imports what is imported late and reserves what is reserved."""


def peak() -> int:
    """The most memory this process has had since `reset`, in bytes."""
    return _status("VmHWM:")


def reset() -> int:
    """Forget the most there was; what there is, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS:")


def _status(key: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(key) + 1]) * 1024


def measured(task: Task, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What a job finds; its seconds, CPU seconds and MiB beyond those that were there before."""
    told = json.loads((folder / "job.json").read_text())
    given: dict[str, Any] = torch.load(folder / "job.pt", weights_only=True)
    model = network(told["network"]).double().eval()
    model.load_state_dict(given.pop("state"))
    task(model, told, **{key: t if key == "V" else t[:WARM].clone() for key, t in given.items()})
    before = reset()
    start, used = time.perf_counter(), time.process_time()
    found = task(model, told, **given)
    numbers = {"seconds": time.perf_counter() - start, "CPU seconds": time.process_time() - used}
    return found, numbers | {"MiB": (peak() - before) / 2**20}


def child(tasks: Any, folder: Path, side: str) -> int:
    """One job; the exit status."""
    try:
        told = json.loads((folder / "job.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they warn of is not what is measured
            found, numbers = measured(getattr(tasks, told["task"]), folder)
        torch.save(found, folder / f"{side}.pt")
        (folder / f"{side}.json").write_text(json.dumps(numbers))
    except BaseException:
        (folder / f"{side}.error").write_text(traceback.format_exc())
        return 1
    return 0


def main(side: str) -> None:
    """Answer until there is nothing more to read."""
    torch.set_num_threads(1)
    tasks = importlib.import_module("benchmarks.peers.ours" if side == "linnet" else "benchmarks.peers.theirs")
    if side != "linnet":
        importlib.import_module(MODULES[side])
    packages = ("linnet", "torch") if side == "linnet" else (PACKAGES[side], "torch")
    print(json.dumps({name: version(name) for name in packages}), flush=True)
    for line in sys.stdin:
        number = os.fork()
        if number == 0:
            os._exit(child(tasks, Path(line.strip()), side))
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
