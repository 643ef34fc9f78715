"""The linear datamodeling score, networks that are trained side by side, and a small version of the experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from experiments.park2023 import attribution
from experiments.park2023.peers import margin
from tests.support.needed import needs
from tests.support.quick_runs import count_rows, run_quick


def test_scores_are_rank_correlations() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(20, 3)), rng.normal(size=(20, 3))
    b[3], b[4, 1] = b[5], b[6, 1]  # ties
    expected = [spearmanr(a[:, j], b[:, j]).statistic for j in range(3)]
    assert attribution.correlate(a, b) == pytest.approx(expected)
    table, draws = attribution.judge({"TRAK, 1": b, "linnet, 1": a}, a, seed=0)
    assert table["linnet, 1"]["mean"] == pytest.approx(1) and len(draws["TRAK, 1"]) == attribution.DRAWS
    less = attribution.compare(table, draws, 1)
    assert set(less) == {"linnet, 1"} and less["linnet, 1"]["low"] > 0


def test_margins_are_log_odds() -> None:
    f, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    p = f.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(margin(f, y), (p / (1 - p)).log())


def test_networks_side_by_side_are_those_of_one_by_one() -> None:
    sizes = attribution.QUICK["mnist"]
    X, y = torch.randn(60, 784), torch.arange(60) % 10
    subsets = torch.stack([torch.randperm(60)[:40] for _ in range(2)])
    both = attribution.train("mnist", sizes, (X, y), subsets, [3, 4])
    for i in range(2):
        one = attribution.train("mnist", sizes, (X, y), subsets[i : i + 1], [3 + i])
        for key, value in one.items():
            torch.testing.assert_close(value[0], both[key][i], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    needs("mnist.npz")
    record = run_quick(tmp_path, "attribution", "--methods", "linnet, ekfac", "linnet, diag", "gradient product")
    found = record["parts"]["mnist"]
    assert len(found["scores"]) == 6 == count_rows(tmp_path, "attribution")
