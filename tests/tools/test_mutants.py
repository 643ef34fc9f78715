"""`tools/mutants.py`: what is changed, what is left alone, and which lines run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCE = b'''"""1 + 1"""
LIMIT = 1 - 2


def f(x: int = 1 + 1, *, y: bool = True) -> float:
    """2 * 2"""
    if len(x) < 3:
        raise ValueError(f"{1 + 1} of {x - 1}")
    total = x.T - g(x, dim=0)
    total += x
    return h(total, -x)


def __repr__(self):
    return 1 + 1
'''


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_changes_code_in_functions_and_no_text(mutants: ModuleType) -> None:
    found = {(m.line, m.old, m.new) for m in mutants.Finder("f.py", SOURCE).found}
    assert found == {
        (7, "len(x) < 3", "False"),
        (7, "<", "<="),
        (9, ".T", ""),
        (9, "-", "+"),
        (9, "dim=0", ""),
        (9, "0", "1"),
        (10, "total += x", "pass"),
        (10, "+=", "-="),
        (11, "h(total, -x)", "(total)"),
        (11, "-x", "(x)"),
    }


def test_sample_takes_each_line_once_and_is_drawn_by_its_seed(mutants: ModuleType) -> None:
    drawn = mutants.sample({"f.py": SOURCE}, 0, 10)
    assert sorted(m.line for m in drawn) == [7, 9, 10, 11]
    assert drawn == mutants.sample({"f.py": SOURCE}, 0, 10)
    assert drawn[:2] == mutants.sample({"f.py": SOURCE}, 0, 2)
    assert any(mutants.sample({"f.py": SOURCE}, seed, 10) != drawn for seed in range(1, 5))
    assert all(mutants.changed(SOURCE, m) != SOURCE for m in drawn)


def test_probes_write_down_the_lines_that_run(mutants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    source = b'''"""Text."""
from __future__ import annotations
def f(x):
    """Text."""
    if x > 1:
        return "large"
    elif x > 0:
        return "small"
    for i in range(1):
        print(end="")
        x = -x
    return x
'''
    hits = bytearray(100)
    monkeypatch.setitem(sys.modules, "line_hits", SimpleNamespace(hits=hits))
    names: dict[str, Any] = {}
    exec(mutants.probed(source, 50), names)
    assert names["__doc__"] == names["f"].__doc__ == "Text." and not any(hits)
    assert names["f"](1) == "small"
    assert [line for line in range(100) if hits[line]] == [55, 57, 58]
    assert names["f"](-1) == 1
    assert [line for line in range(100) if hits[line]] == [55, 57, 58, 59, 60, 61, 62]
