"""Words of errors, and checks of options that say what was needed, what came and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path


def kind(value: object) -> str:
    """How an error names a value's type: ``a Tensor``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def listing(names: Sequence[str], *, limit: int = 6) -> str:
    """The first few names for an error: ``'a', 'b' and 4 more``."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def check_memory(memory: object) -> None:
    """``memory`` is a positive number of bytes, or "auto"."""
    if isinstance(memory, str) and memory == "auto":
        return
    if isinstance(memory, bool) or not isinstance(memory, Real):
        hint = " For a gigabyte write memory=1e9." if isinstance(memory, str) else ""
        raise ValueError(f"memory must be a number of bytes or 'auto'; got {memory!r}.{hint}")
    if not memory > 0:  # type: ignore[operator]
        raise ValueError(f"memory must be a positive number of bytes; got {memory!r}.")


def check_seed(seed: object) -> None:
    """``seed`` is a whole number that torch's generators take."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**64:
        hint = " For other draws in every run take seed=torch.seed()." if seed is None else ""
        raise ValueError(f"seed must be a whole number, from -2**63 to 2**64 - 1; got {seed!r}.{hint}")


def check_samples(k: object) -> None:
    """``k`` is a number of samples to draw."""
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k is a number of samples and must be positive; got {k!r}.")


def check_writable(path: str | os.PathLike[str], name: str) -> None:
    """A file can be written at ``path``; ``name`` is the argument that names it."""
    place = Path(path)
    if place.is_dir():
        raise IsADirectoryError(f"{name} names a file to write, and {place} is a folder. Name a file in it.")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{name} names {place}, and there is no folder {place.parent}. Make the folder first.")
    if not os.access(place.parent, os.W_OK) or (place.exists() and not os.access(place, os.W_OK)):
        raise PermissionError(f"{name} names {place}, which cannot be written. Name a file that can be.")


def check_batch_size(size: object, *, name: str = "batch_size", auto: bool = True) -> None:
    """A batch size is a positive number or, where that is a choice, "auto"."""
    if auto and size == "auto":
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        choice = " or 'auto'" if auto else ""
        raise ValueError(f"{name} must be a positive number of examples{choice}; got {size!r}.")
