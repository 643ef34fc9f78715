"""The deep process learns, and a small version of the experiment runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main
from experiments.damianou2020 import deep_gp
from tests.support.quick_runs import count_rows, run_quick


def test_the_experiment_says_that_it_runs_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="deep_gp runs on the CPU only; got 'cuda'"):
        main(["deep_gp", "--quick", "--device", "cuda", "--out", str(tmp_path)])


def test_scores_of_a_mixture_of_gaussians() -> None:
    y, truth = torch.tensor([0.1, 5.0]), torch.zeros(2)
    one = deep_gp.scores_of(torch.zeros(1, 2), torch.ones(1, 2), y, truth)
    again = deep_gp.scores_of(torch.zeros(3, 2), torch.ones(3, 2), y, truth)
    assert one == pytest.approx(again)
    expected = 0.5 * math.log(2 * math.pi) + 0.25 * (0.1**2 + 25)
    assert one["nll"] == pytest.approx(expected, rel=1e-6)
    assert one["coverage"] == 0.5 and one["RMSE to the step"] == 0


def test_a_deep_process_learns_more_the_longer_it_trains() -> None:
    X, y = deep_gp.observe(20, torch.Generator().manual_seed(0))
    before, after = (
        deep_gp.fit_deep(X, y, 2, deep_gp.Sizes(steps=steps, rates=(0.05,), inducing=6), seed=0)[1]["bound per point"]
        for steps in (2, 25)
    )
    assert after > before


def test_the_deep_experiment_runs_and_counts_seeds_of_other_runs(tmp_path: Path) -> None:
    run_quick(tmp_path, "deep_gp", "--seeds", "1")
    record = run_quick(tmp_path, "deep_gp", "--seeds", "1", "--seed", "1")
    assert record["settings"]["seeds"] == 2
    assert set(record["summary"]) == set(deep_gp.METHODS) - {"deep GP, 3 layers"}
    assert record["summary"]["finite NTK"]["nll"]["count"] == 2
    assert count_rows(tmp_path, "deep_gp") == len(record["summary"])
