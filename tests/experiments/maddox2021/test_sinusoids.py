"""Tasks are sinusoids, and a small version of the experiment runs."""

import pytest
import torch

from experiments.__main__ import main
from experiments.maddox2021 import sinusoids
from tests.support.quick_runs import run_quick


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
def test_sinusoids_run(tmp_path):
    table = run_quick(tmp_path, "sinusoids", "--tasks", "3")["context points"]["5"]
    assert list(table) == list(sinusoids.METHODS)
    assert all(0 <= one["coverage"]["mean"] <= 1 for one in table.values())
    # Adapting on five points beats the network of another task.
    assert table["finite NTK, shared"]["rmse"]["mean"] < table["no adaptation"]["rmse"]["mean"]
    with pytest.raises(ValueError, match="on the CPU only; got 'cuda'"):
        main(["sinusoids", "--quick", "--device", "cuda"])


def test_tasks_are_sinusoids_with_one_percent_noise():
    tasks = sinusoids.draw(40, 300, generator())
    A, b, w = tasks.parameters.T[:, :, None]
    error = (tasks.y - A * torch.sin(w * tasks.X.squeeze(-1) + b)) / A
    assert float(error.std()) == pytest.approx(0.01, rel=0.05)
    assert float(A.min()) >= 0.1 and float(A.max()) <= 5 and float(w.min()) >= 0.5 and float(w.max()) <= 2
