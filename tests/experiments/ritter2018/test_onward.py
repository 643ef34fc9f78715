"""Tasks, scores of curves, and small versions of the experiments on tasks one after another and on merging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.ritter2018 import merged, onward
from tests.support.needed import needs
from tests.support.quick_runs import count_rows, run_quick


def test_development_seeds_test_on_training_images_that_no_task_trains_on() -> None:
    X, y = torch.arange(4000.0)[:, None], torch.arange(4000) % 10
    sizes = onward.Sizes(n=(100, 100, 100), test=100)
    for seed, pool in ((onward.DEVELOPMENT, 0), (0, 4000)):
        for task in onward.draw_tasks([X, X + 4000], [y, y], "split MNIST", sizes, seed):
            assert len(task.X) == len(task.X_test) == 100 and set(task.y.tolist()) == {0, 1}
            assert bool(((task.X_test >= pool) & (task.X_test < pool + 4000)).all())
            assert not set(task.X.flatten().tolist()) & set(task.X_test.flatten().tolist())


def test_scores_of_curves() -> None:
    curve = [[0.9], [0.5, 0.8], [0.7, 0.6, 1.0]]
    assert onward.average(curve) == pytest.approx(2.3 / 3)
    assert onward.forgetting(curve) == pytest.approx(0.2)


def test_displacements_are_added() -> None:
    start, one = nn.Linear(2, 1), nn.Linear(2, 1)
    found = merged.combine(start, [one, one], 0.5)
    torch.testing.assert_close(found.weight, one.weight)


@pytest.mark.slow
def test_the_experiments_run(tmp_path: Path) -> None:
    needs("mnist.npz")
    record = run_quick(tmp_path, "onward", "--sets", "split MNIST", "--seeds", "1")
    assert set(record["summary"]["split MNIST"]) == set(onward.METHODS)
    assert count_rows(tmp_path, "onward") == len(onward.METHODS)
    record = run_quick(tmp_path, "merged", "--splits", "label halves", "--seeds", "1")
    assert set(record["summary"]["label halves"]) == set(merged.METHODS)
