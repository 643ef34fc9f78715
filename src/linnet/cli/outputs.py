"""Files that commands write: tables of predictions, JSON, arrays."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linnet._common.files import atomic_write

FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Beginnings of cells that spreadsheets take for formulas, behind any number of quotation marks; the last four are the
full-width forms of = + - @."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """JSON, whole or not at all; what is not a finite number becomes null."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(as_json(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(path: Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """A table with named columns, whole or not at all; numbers in full.

    Text that spreadsheets would take for a formula gets a quotation mark in front, as OWASP advises ("CSV injection");
    `raw_text` takes it away again.
    """
    lists = [column.tolist() if isinstance(column, np.ndarray) else list(column) for column in columns.values()]
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([safe_text(name) for name in columns])
        writer.writerows([safe_text(cell) for cell in row] for row in zip(*lists, strict=True))


def safe_text(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula; numbers stay as they are.

    >>> safe_text("=1+1"), safe_text("'=1"), safe_text("a=1"), safe_text(-1.5)
    ("'=1+1", "''=1", 'a=1', -1.5)
    """
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def raw_text(cell: str) -> str:
    """The text that `safe_text` was given.

    >>> raw_text("'=1+1"), raw_text("''=1"), raw_text("'a'"), raw_text("=1")
    ('=1+1', "'=1", "'a'", '=1')
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A .npz file, whole or not at all."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def as_json(value: Any) -> Any:
    """The value as JSON can hold it; a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
