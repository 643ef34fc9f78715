"""Files that commands write: a folder that appears whole, tables of predictions, JSON."""

from __future__ import annotations

import csv
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from linnet.commands.shared import UsageError, is_first
from linnet.io import whole

KNOWN = (
    "adapter.safetensors",
    "laplace.safetensors",
    "embedding.safetensors",
    "head.safetensors",
    "embedding.npz",
    "predictions.csv",
    "metrics.json",
    "run.json",
    "report.html",
)
"""What commands write into their folders; --force replaces these and nothing else."""


@contextmanager
def folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder, whose files are in ``out`` when all has gone well; otherwise nothing has changed.

    Args:
        out: Must not exist, unless ``force``.
        force: Replace the files of an earlier run; other files in the folder stay.
    """
    check_free(out, force=force, is_folder=True)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise UsageError(f"--out needs a folder that can be made, and {out} cannot ({error.strerror}).") from error
    try:
        yield temporary
        if is_first():
            _publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, out: Path) -> None:
    if not out.exists():
        os.replace(temporary, out)
        return
    new = {path.name for path in temporary.iterdir()}
    for name in new:
        os.replace(temporary / name, out / name)
    for name in set(KNOWN) - new:  # of the earlier run, which the new files do not belong to
        (out / name).unlink(missing_ok=True)


def check_free(out: Path, *, force: bool, is_folder: bool = False) -> None:
    """Raise where the output is already there and may not be replaced."""
    if not out.exists():
        return
    if out.is_dir() != is_folder:
        raise UsageError(f"--out needs a {'folder' if is_folder else 'file'}, and {out} is none; choose another.")
    if not force:
        what = "its files are" if is_folder else "it is"
        raise UsageError(f"{out} exists. Choose another --out, or pass --force, and {what} replaced.")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """JSON, whole or not at all; what is not a finite number becomes null."""
    with whole(path) as temporary:
        temporary.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """A table with named columns, whole or not at all; numbers in full."""
    lists = [column.tolist() if isinstance(column, np.ndarray) else list(column) for column in columns.values()]
    with whole(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*lists, strict=True))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A .npz file, whole or not at all."""
    with whole(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
