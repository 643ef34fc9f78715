"""The commands under torchrun, accelerate and Ray Train: several processes share the work, and one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.cli import app
from tests.support.command_cases import digits, done, networks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs the gloo backend")

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
    # On a machine without GPUs this starts two processes on the CPU.
    "accelerate": [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "--module"),
    ],
}


def commands(folder: Path) -> dict[str, list[str]]:
    """What to run, without the folder for the results."""
    nets, (train, _) = networks(folder), digits(folder)
    model = ["--model", f"{nets}:digits"]
    return {
        "embed": ["embed", *model, "--data", str(train), "--components", "3", "--out"],
        "adapt": ["adapt", *model, "--train", str(train), "--inference", "map", "--out"],
        "uncertainty": ["uncertainty", *model, "--train", str(train), "--structure", "diag", "--out"],
    }


def check_same(name: str, one: Path, two: Path) -> None:
    """The run of two processes has found what the run of one process has found."""
    found = [json.loads((run / "metrics.json").read_text()) for run in (one, two)]
    assert [run["processes"] for run in found] == [1, 2]
    if name == "embed":
        vectors = [np.load(run / "embedding.npz")["embedding"] for run in (one, two)]
        np.testing.assert_allclose(vectors[1], vectors[0], rtol=1e-3, atol=1e-3)
    else:
        file = "adapter.safetensors" if name == "adapt" else "laplace.safetensors"
        assert (two / file).exists()
    if name == "uncertainty":
        assert found[1]["log_evidence"] == pytest.approx(found[0]["log_evidence"], rel=1e-3)


@pytest.mark.parametrize(
    ("launcher", "name"), [("torchrun", "embed"), ("accelerate", "adapt"), ("torchrun", "uncertainty")]
)
def test_two_processes(tmp_path, launcher, name):
    if launcher == "accelerate":
        pytest.importorskip("accelerate", reason="needs accelerate")
    options = commands(tmp_path)[name]
    done(*options, tmp_path / "one")
    line = [sys.executable, "-m", *LAUNCHERS[launcher], "linnet", *options, str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Done in") == 1
    check_same(name, tmp_path / "one", tmp_path / "two")


def train_loop(config: dict[str, Any]) -> None:
    """One worker of Ray Train, which has joined the others."""
    for line in config["lines"]:
        app(line, standalone_mode=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Ray itself
def test_workers_of_ray_train(tmp_path):
    ray = pytest.importorskip("ray", reason="needs ray: pip install linnet[ray]")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    given = commands(tmp_path)
    lines = [[*options, str(tmp_path / f"{name} two")] for name, options in given.items()]
    paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": paths})
    try:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"lines": lines},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    for name, options in given.items():
        done(*options, tmp_path / f"{name} one")
        check_same(name, tmp_path / f"{name} one", tmp_path / f"{name} two")
