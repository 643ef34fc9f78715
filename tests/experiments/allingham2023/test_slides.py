"""The experiments of the slides and the talk: their parts are what they claim, and small versions run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import linnet
from experiments.__main__ import main
from experiments.allingham2023 import joint, not_linearized, snelson
from experiments.common.statistics import subtract, summarize
from linnet.probability import Gaussian
from tests.support.quick_runs import count_rows, run_quick


@pytest.mark.parametrize("name", ["snelson", "not_linearized"])
def test_small_experiments_say_that_they_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} runs on the CPU only; got 'cuda'"):
        main([name, "--quick", "--device", "cuda", "--out", str(tmp_path)])


# Widths.


def test_snelson_data_have_a_gap_and_the_same_seed_draws_them_again() -> None:
    low, high = ((end - 3) / 1.5 for end in snelson.GAP)
    X, y = snelson.observe(200, torch.Generator().manual_seed(0), gap=True)
    assert not bool((X.gt(low) & X.lt(high)).any())
    assert float(X.min()) >= -2 and float(X.max()) <= 2
    again = snelson.observe(200, torch.Generator().manual_seed(0), gap=True)
    assert torch.equal(X, again[0]) and torch.equal(y, again[1])
    everywhere, _ = snelson.observe(200, torch.Generator().manual_seed(0), gap=False)
    assert bool((everywhere.gt(low) & everywhere.lt(high)).any())


def test_the_process_of_a_network_is_that_of_its_kernel() -> None:
    """A regressor with the limit's prior has the posterior of the network's own Gram matrix."""
    limit = snelson.Limit(2.0, 0.5, 0.1)
    data = snelson.observe(12, torch.Generator().manual_seed(0), gap=True)
    at = snelson.scale(torch.linspace(0, 6, 5, dtype=torch.float64))
    net = limit.network(7, 3)
    kernel = snelson.InfiniteWidth(3, "erf", weight_variance=2.0, bias_variance=0.5).double()
    for which in snelson.LIMIT:
        mean, std = snelson.condition(net, which, limit, data, at)
        lin = linnet.linearize(net, snelson.parts_of(which))
        S = kernel.prior(lin)
        J, new = (lin.jacobian(x, progress=False) for x in (data[0], at))
        C = J.gram(scale=S) + 0.1 * torch.eye(12, dtype=torch.float64)
        cross = J.gram(new, scale=S)
        torch.testing.assert_close(mean, cross.T @ torch.linalg.solve(C, data[1]), rtol=1e-7, atol=1e-9)
        variance = new.gram_diag(scale=S).flatten() - (cross * torch.linalg.solve(C, cross)).sum(0)
        torch.testing.assert_close(std.square(), variance, rtol=1e-6, atol=1e-9)


def test_the_noise_of_the_likeliest_limit_is_near_the_truth() -> None:
    X, y = snelson.observe(60, torch.Generator().manual_seed(1), gap=True)
    limit = snelson.find_limit(X, y)
    assert 0.25 < limit.noise / snelson.NOISE**2 < 4
    other = snelson.Limit(limit.weight, limit.bias, 3 * limit.noise)
    best, worse = (float(snelson.log_evidence(one.kernel("nngp", X, X), y, one.noise)) for one in (limit, other))
    assert best > worse


def test_a_sampled_network_without_data_worth_the_name_is_its_prior() -> None:
    """With noise that drowns the data the posterior of the Bayesian network is its prior: mean zero, NNGP variance."""
    limit = snelson.Limit(1.5, 0.3, 1e6)
    X, y = snelson.observe(4, torch.Generator().manual_seed(0), gap=True)
    at = X[:2]
    mean, std, _ = snelson.sample_bayesian(limit, 40, (X, y), at, draws=600, seed=0)
    prior = limit.kernel("nngp", at, at).diagonal()
    torch.testing.assert_close(std.square(), prior, rtol=0.1, atol=0.0)
    assert float(mean.abs().max()) < 1e-2


def test_the_snelson_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "snelson", "--seeds", "1")
    found = record["summary"]
    assert set(found["kernels"]) == {"8", "32"}
    assert found["posteriors"]["NNGP"]["means apart"]["mean"] == 0
    assert found["slopes"]["last layer"]["mean"] < 0
    assert count_rows(tmp_path, "snelson") == 2 + 5


# Not linearized.


def test_averages_over_draws_of_a_density() -> None:
    f = torch.tensor([[[0.0]], [[2.0]]])
    y = torch.tensor([[1.0]])
    expected = -0.5 * (1 / 0.5 + math.log(2 * math.pi * 0.5))
    assert not_linearized.log_probability(Gaussian(0.5), f, y) == pytest.approx(expected, rel=1e-6)


def test_draws_go_through_both_models() -> None:
    sizes = not_linearized.QUICK
    given = not_linearized.problem(not_linearized.CURVE, sizes, 0)
    X = given.train[0]
    # Next to its own weights a network is linear.
    tight = not_linearized.posterior(given.model, given.train, given.case, 1e8)
    f = not_linearized.draw_outputs(tight, X, 4, seed=0)
    step = f[not_linearized.LINEAR] - f[not_linearized.MAP]
    apart = f[not_linearized.NETWORK] - f[not_linearized.LINEAR]
    assert float(step.norm()) > 0 and float(apart.norm()) < 1e-2 * float(step.norm())
    torch.testing.assert_close(f[not_linearized.MAP][0], given.model(X).detach())
    wide = not_linearized.posterior(given.model, given.train, given.case, 0.1)
    g = not_linearized.draw_outputs(wide, X, 20, seed=0)
    worse, better = (
        not_linearized.scores_of(given.case, g[way], given.train[1])["error"]
        for way in (not_linearized.NETWORK, not_linearized.LINEAR)
    )
    assert worse > better


def test_the_not_linearized_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "not_linearized", "--networks", "1")
    for case in (not_linearized.CURVE, not_linearized.DIGITS):
        assert set(record["summary"][case]) == {"100", "1", "evidence"}
        cell = record["parts"][case]["seed 0"]["1"]["test"]
        assert cell[not_linearized.NETWORK]["nll"] != cell[not_linearized.LINEAR]["nll"]
    assert count_rows(tmp_path, "not_linearized") == 8


# Joint.


def stored(folder: Path) -> None:
    """Images in place of MNIST and Fashion-MNIST: a bright square whose place is the label, and noise."""
    random = np.random.default_rng(0)
    for name in ("mnist", "fashion_mnist"):
        arrays = {}
        for part, n in (("train", 120), ("test", 60)):
            x, y = random.integers(0, 80, (n, 28, 28)), np.arange(n) % 10
            for i, k in enumerate(y if name == "mnist" else []):
                x[i, 5 * (k // 4) + 4 : 5 * (k // 4) + 9, 6 * (k % 4) : 6 * (k % 4) + 5] = 255
            arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y.astype(np.uint8)}
        np.savez(folder / f"{name}.npz", **arrays)


def test_the_joint_experiment_runs(tmp_path: Path) -> None:
    stored(tmp_path)
    record = run_quick(tmp_path / "out", "joint", "--seeds", "1", "--data", str(tmp_path))
    (seeds,) = record["parts"].values()
    found = seeds["seed 0"]["methods"]
    assert set(found) == set(joint.METHODS)
    for one in found.values():
        assert list(one["joint log likelihood"]) == ["1", "2", "3", "4", "5"]
        assert 0 <= one["AUROC"][joint.UNKNOWN]["entropy"] <= 1
    for name in (joint.MAP, joint.ENSEMBLE):
        # Of one network or several, the joint likelihood of one label is that of the average probability.
        single, upright = found[name]["joint log likelihood"]["1"], found[name]["angles"]["0"]
        assert single == pytest.approx(-upright["nll"], rel=1e-4)
    assert "variance of the logits" in found[joint.ENSEMBLE]["AUROC"][joint.UNKNOWN]
    assert "variance of the logits" not in found[joint.MAP]["AUROC"][joint.UNKNOWN]
    gap = record["summary"][joint.DEFAULT]["less ensemble"]["joint log likelihood"]["5"]["mean"]
    both = [found[name]["joint log likelihood"]["5"] for name in (joint.DEFAULT, joint.ENSEMBLE)]
    assert gap == pytest.approx(both[0] - both[1], rel=1e-4, abs=1e-4)
    assert count_rows(tmp_path / "out", "joint") == 3 * len(joint.METHODS)


def test_the_joint_experiment_counts_seeds_of_other_runs(tmp_path: Path) -> None:
    assert subtract({"a": {"b": 3.0, "c": 1.0}}, {"a": {"b": 1.0}}) == {"a": {"b": 2.0}}
    assert summarize([{"a": 1.0}, {"a": 3.0}])["a"]["mean"] == 2
    with pytest.raises(FileNotFoundError, match=r"reads mnist.npz from the data folder"):
        main(["joint", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
