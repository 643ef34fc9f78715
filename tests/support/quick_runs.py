"""Small versions of experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.__main__ import main


def run_quick(folder: Path, name: str, *more: str) -> dict[str, Any]:
    """The metrics that a small run of an experiment writes to a folder, beside a figure and rows of the table."""
    where = main([name, "--quick", *more, "--out", str(folder)])
    assert (where / "figure.png").stat().st_size > 10_000
    assert count_rows(folder, name) > 0
    return json.loads((where / "metrics.json").read_text())


def count_rows(folder: Path, name: str) -> int:
    """How many rows of the table of results an experiment has."""
    return (folder / "README.md").read_text().count(f"| {name}: ")
