"""The table of modules in CONTRIBUTING.md: every module is in it, and imports only from those above."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import linnet

SOURCE = Path(linnet.__file__).resolve().parent
TABLE = SOURCE.parent.parent / "CONTRIBUTING.md"


def places() -> dict[str, int]:
    """Module to its row: `a.py`, or `folder/a.py`, after which plain names of that row are of the folder too."""
    found: dict[str, int] = {}
    for row, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines()):
        if not re.match(r"\| `[\w/]+\.py`", line):
            continue
        names = re.findall(r"`([\w/]+)\.py`", line.split("|")[1])
        folder = names[0].rpartition("/")[0]
        for name in names:
            found.setdefault(f"{folder}/{name}" if folder and "/" not in name else name, row)
    return found


def imported(file: Path) -> set[str]:
    """Modules of linnet that a file imports when it is imported."""
    out = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "linnet":
            inner = (node.module or "").split(".")[1:]
            out |= {"/".join(inner)} if inner else {alias.name for alias in node.names}
            out |= {"/".join([*inner, alias.name]) for alias in node.names}
    return out


@pytest.mark.skipif(not TABLE.exists(), reason="CONTRIBUTING.md is in the repository only")
def test_modules_are_in_order() -> None:
    where = places()
    modules = {file.relative_to(SOURCE).as_posix().removesuffix(".py"): file for file in SOURCE.rglob("*.py")}
    modules = {name: file for name, file in modules.items() if not name.endswith("__init__")}
    top = {name for name in modules if "/" not in name}
    assert not top - set(where), f"not in the table: {sorted(top - set(where))}"
    gone = {name for name in where if "/" not in name and name not in top}
    assert not gone, f"in the table and not there: {sorted(gone)}"
    for name in set(modules) & set(where):
        for other in imported(modules[name]) & set(where):
            assert where[other] <= where[name], f"{name}.py stands above {other}.py, which it imports"
