"""Ranks that disagree, fail or die: the others end soon, with an error that says what has happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
REPEATS = 1  # `python -m benchmarks.failures --repeats 20` does more


@pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_gloo_available(), reason="needs fork and the gloo backend")
def test_a_failure_of_one_rank_ends_all_ranks_with_the_right_error() -> None:
    pytest.importorskip("gpytorch", reason="needs the extra gpytorch")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    # A test measures no time: ranks that end at all, however busy the machine is, will do.
    command = [sys.executable, "-m", "benchmarks.failures", "--repeats", str(REPEATS), "--seed", "1", "--seconds", "60"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *faults, _, summary = ran.stdout.splitlines()
    assert summary == f"wrong: 0 of {REPEATS * len(faults)}"
    known = ["weights", "data", "options", "versions", "calls", "raising", "killed"]
    assert [line.split(":")[0] for line in faults] == known
    for line in faults:
        assert set(line.split(": ")[1].split()[1::2]) <= {"told", "finished"}, line
