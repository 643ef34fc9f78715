"""The chains draw from posteriors that are known, and a small version of the experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.calibration import long_chain
from tests.support.drawn import normal
from tests.support.quick_runs import count_rows, run_quick


def test_chains_of_a_gaussian_likelihood_have_the_moments_of_linear_regression() -> None:
    rows, y, noise = normal(6, 4), normal(6, seed=1), 0.5
    precision = torch.eye(4, dtype=torch.float64) + rows.T @ rows / noise
    covariance = torch.linalg.inv(precision)
    mean = covariance @ rows.T @ y / noise
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, 4, dtype=torch.float64, generator=generator)
    found = long_chain.slice_sample(lambda f: -(f - y).square().sum(1) / (2 * noise), rows, start, 1000, generator)
    points = torch.stack(list(found)[200:])
    # The means of 50 independent chains say how far off their average may be.
    each, products = points.mean(0), torch.einsum("tki,tkj->kij", points, points) / len(points)
    second = covariance + torch.outer(mean, mean)
    for one, expected in ((each, mean), (products, second)):
        assert bool(((one.mean(0) - expected).abs() < 5 * one.std(0) / 50**0.5).all())


def test_scores_are_zero_for_equal_answers_and_grow_with_differences() -> None:
    mean, std = normal(5, 3), normal(5, 3, seed=1).abs()
    p, y = normal(5, 3, seed=2).softmax(1), torch.tensor([0, 1, 2, 0, 1])
    same = long_chain.compare((mean, std, p), (mean, std, p), y)
    assert set(same) == set(long_chain.SCORES) and max(abs(value) for value in same.values()) == 0
    other = torch.full((5, 3), 1 / 3, dtype=torch.float64)
    found = long_chain.compare((mean + 2 * std, 2 * std, other), (mean, std, p), y)
    assert found["mean"] == pytest.approx(2) and found["spread"] == pytest.approx(0.693147, rel=1e-5)
    assert found["probability"] == pytest.approx(50 * float((p - other).abs().sum(1).mean()))
    assert found["nll"] == pytest.approx(float((p / other)[torch.arange(5), y].log().mean()))


@pytest.mark.slow
def test_the_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "long_chain", "--problems", "curve")
    (label,) = record["summary"]
    assert set(record["summary"][label]["scores"]) == {*long_chain.METHODS, long_chain.HALVES}
    assert count_rows(tmp_path, "long_chain") == len(long_chain.METHODS) + 1
