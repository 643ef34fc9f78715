"""`torchrun -m linnet embed`: several processes share the work, and one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.command_cases import digits, done, networks


def test_several_processes(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs the gloo backend")
    nets, (train, _) = networks(tmp_path), digits(tmp_path)
    options = ["embed", "--model", f"{nets}:digits", "--data", str(train), "--components", "3", "--out"]
    done(*options, tmp_path / "one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [*launcher, "-m", "linnet", *options, str(tmp_path / "two")]
    result = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Done in") == 1
    assert json.loads((tmp_path / "two" / "metrics.json").read_text())["processes"] == 2
    one, two = (np.load(tmp_path / name / "embedding.npz")["embedding"] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-3)
