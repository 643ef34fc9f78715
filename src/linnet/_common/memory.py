"""Memory: how much is free, and how much of it a computation may take."""

from __future__ import annotations

import psutil
import torch

from linnet._common.messages import check_memory

TEMPORARY = 2**24
"""Numbers that a temporary tensor may hold: enough to keep a GPU busy, few beside what is computed from them."""


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of a GPU within `torch.cuda.set_per_process_memory_fraction`."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    available, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    within = int(torch.cuda.get_per_process_memory_fraction(device.index) * total) - taken
    return max(0, min(available + torch.cuda.memory_reserved(device) - taken, within))


def find_budget(memory: float | str, device: torch.device) -> int:
    """Bytes that a chunk may take: as given, or a fraction of the free memory."""
    check_memory(memory)
    if not isinstance(memory, str):
        return int(memory)
    return int(0.5 * free_memory(device)) if device.type == "cuda" else int(min(0.25 * free_memory(device), 2**30))


def find_dense_budget(memory: float | str, device: torch.device) -> int:
    """Bytes that dense matrices may take: as given, or most of the free memory."""
    if isinstance(memory, str) and memory == "auto":
        return int((0.9 if device.type == "cuda" else 0.5) * free_memory(device))
    return find_budget(memory, device)


def check_fits(needed: float, memory: float | str, device: torch.device, *, what: str, instead: str) -> None:
    """Raise before dense matrices are made that do not fit.

    Args:
        needed: Bytes that the matrices take.
        memory: Bytes that the matrices may take; "auto" is all free memory.
        device: Device of the matrices.
        what: The computation that needs the matrices, the subject of "takes".
        instead: The choice that needs less memory.
    """
    if isinstance(memory, str) and memory == "auto":
        limit = free_memory(device)
        there, more = f"{format_bytes(limit)} are free", ""
    else:
        limit = find_budget(memory, device)
        there, more = f"memory= allows {format_bytes(limit)}", ", or allow more with memory="
    if needed > limit:
        raise MemoryError(f"{what} takes {format_bytes(needed)}, and {there}. {instead}{more}.")


def format_bytes(number: float) -> str:
    """A number of bytes for a reader.

    >>> format_bytes(50_000)
    '48.8 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
