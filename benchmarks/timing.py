"""Timing side by side: every contender once per round, medians over rounds, so that drift hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def milliseconds(
    contenders: Mapping[str, Callable[[], object]], device: str, *, rounds: int = 5, warmup: int = 1
) -> dict[str, float]:
    """Median wall time of each contender, after some rounds of warm-up.

    Args:
        contenders: Name to what is timed.
        device: Synchronized before the clock is read, if it is a GPU.
        rounds: Timed rounds.
        warmup: Rounds before these.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + warmup):
        for name, run in contenders.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if i >= warmup:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Wall time of one run, and what it returns."""
    synchronize(device)
    start = time.perf_counter()
    value = run()
    synchronize(device)
    return time.perf_counter() - start, value


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], object]) -> int:
    """Operations that a run hands to torch's backends, views among them: what small steps take time for.

    >>> operations(lambda: torch.ones(2) + 1)
    2
    """
    with _Counter() as counter:
        run()
    return counter.count


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def machine(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
