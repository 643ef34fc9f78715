"""Processes killed while they save, or while they go on from a checkpoint: no damaged or mixed result is accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPEATS = 2  # `python -m benchmarks.kills --repeats 100` does more


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs SIGKILL and fork")
def test_what_is_left_after_a_kill_is_whole_or_refused() -> None:
    pytest.importorskip("huggingface_hub")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.kills", "--repeats", str(REPEATS), "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *kinds, summary = ran.stdout.splitlines()
    assert summary == f"damaged accepted: 0 of {REPEATS * len(kinds)}"
    assert [line.split(":")[0] for line in kinds] == [
        "checkpoint",
        "regressor",
        "classifier",
        "laplace",
        "embedding",
        "folder",
    ]
