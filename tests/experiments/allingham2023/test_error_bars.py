"""The experiments on error bars: their parts are what they claim, and small versions run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import common
from experiments.__main__ import main
from experiments.allingham2023 import evidence, laplace_cifar, laplace_digits, laplace_uci
from experiments.common.training import find_temperature
from tests.support.needed import make_uci
from tests.support.quick_runs import count_rows, run_quick


def test_the_network_has_the_slides_size() -> None:
    assert sum(p.numel() for p in evidence.network(evidence.WIDTH, 0).parameters()) == 2593


@pytest.mark.parametrize("k", [0.1, 10.0])
def test_a_rescaled_network_is_the_same_function(k: float) -> None:
    random = torch.Generator().manual_seed(0)
    X, y = evidence.observe(30, gap=True, generator=random)
    assert float(X.abs().min()) >= 0.5 and float(X.abs().max()) <= 1.5
    model = evidence.train_network(X, y, width=6, steps=20, seed=0)
    other = evidence.rescale(model, k)
    torch.testing.assert_close(other(X), model(X), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other[3].weight, k * model[3].weight)
    found = evidence.choose(model, (X, y, *evidence.observe(20, gap=False, generator=random)))
    layerwise, shared = (found[f"{name}, at the network"] for name in ("layerwise", "shared"))
    assert layerwise[f"{k:g}"]["test"] == pytest.approx(layerwise["1"]["test"], rel=1e-4)
    assert abs(shared[f"{k:g}"]["test"] - shared["1"]["test"]) > 1e-3


@pytest.mark.slow
def test_the_evidence_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "evidence", "--networks", "1")
    axis = record["networks"][0]["axis"]
    assert len(axis["network"]) == len(axis["linear mode"]) == len(axis["test"]) == len(record["lambdas"]) == 5
    assert set(record["summary"]["choices"]) == set(evidence.CHOICES)
    assert count_rows(tmp_path, "evidence") == 1 + len(evidence.CHOICES)


def test_the_uci_experiment_runs(tmp_path: Path) -> None:
    make_uci(tmp_path, {"boston": 60})
    out = tmp_path / "out"
    record = run_quick(out, "laplace_uci", "--sets", "boston", "--data", str(tmp_path))
    table = record["results"]["boston"]
    assert set(table) == set(laplace_uci.ALONE)
    # Error bars leave the mean as it is.
    for name in laplace_uci.STRUCTURES:
        assert table[name]["rmse"]["mean"] == pytest.approx(table["MAP"]["rmse"]["mean"], rel=1e-4)
    gaps = [a["nll"] - b["nll"] for a, b in zip(table["kron"]["by split"], table["MAP"]["by split"], strict=True)]
    assert record["over sets"]["kron"]["NLL less MAP"]["mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert math.isfinite(record["over sets"]["diag"]["coverage"])


def test_the_uci_experiment_says_where_it_looked_for_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"reads uci/boston.csv from the data folder"):
        main(["laplace_uci", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    options = argparse.Namespace(quick=True, sets=["boston"], splits=None, largest=None, seed=0)
    options.data, options.device = tmp_path, "cpu"
    with pytest.raises(FileNotFoundError, match="--data PATH"):
        laplace_uci.run(options)


def test_the_uci_experiment_takes_in_what_a_peer_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer here is one that knows the network and a variance of 2, with a noise of 1."""
    make_uci(tmp_path, {"boston": 60})

    def peer(python: str, jobs: list[Any]) -> list[dict[str, Any]]:
        assert python == "somewhere" and len(jobs) == 2 * len(laplace_uci.PEERS)
        assert {told["structure"] for _, told, _ in jobs} == {"kron", "diag", "full"}
        out = []
        for model, told, (X, y, new) in jobs:
            assert y.shape == (len(X), 1) and told["network"] == [3, 50, 50, 1]
            mean = model(new).detach()
            out.append(
                {"tensors": {"mean": mean, "cov": torch.full((len(new), 1, 1), 2.0)}, "noise": 1.0, "seconds": 3}
            )
        return out

    monkeypatch.setattr(laplace_uci, "peer", peer)
    words = ["--sets", "boston", "--data", str(tmp_path), "--peer", "somewhere"]
    record = run_quick(tmp_path / "out", "laplace_uci", *words)
    table = record["results"]["boston"]
    assert set(table) == set(laplace_uci.METHODS)
    assert record["command"].endswith("--sets boston --peer PYTHON")
    for name in laplace_uci.PEERS:
        assert table[name]["seconds"] == 3
        assert table[name]["rmse"]["mean"] == pytest.approx(table["MAP"]["rmse"]["mean"], rel=1e-4)


# Digits.


def test_a_temperature_is_the_likeliest() -> None:
    f = torch.randn(10_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.distributions.Categorical(logits=f / 2.5).sample()
    found = find_temperature(f, y)
    assert 2 < found < 3
    losses = [float(torch.nn.functional.cross_entropy(f / (found * k), y)) for k in (1.0, 0.9, 1.1)]
    assert losses[0] < min(losses[1:])


@pytest.mark.slow
def test_the_digits_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "laplace_digits", "--networks", "1")
    assert set(record["cases"]) == {f"{kind}, decay {d:g}" for kind in ("MLP", "CNN") for d in laplace_digits.DECAYS}
    for found in record["parts"].values():
        scores = found["seed 1"]["methods"]
        assert set(scores) == set(laplace_digits.METHODS)
        base = scores["MAP"]
        # A temperature leaves the classes as they are, and so does probit averaging, but for near ties.
        assert scores[laplace_digits.TEMPERATURE]["accuracy"] == base["accuracy"]
        assert scores[laplace_digits.DEFAULT]["nll"] < scores[laplace_digits.ALONE]["nll"]
    assert (tmp_path / "README.md").read_text().count("| laplace_digits: ") == 1 + len(laplace_digits.METHODS)


# CIFAR-10.


def test_areas_under_the_curve() -> None:
    sure, unsure = torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([[0.5, 0.5], [0.6, 0.4]])
    v = torch.ones(2, 2)
    found = laplace_cifar.areas((sure, v), (unsure, 2 * v))
    assert found == {"1 - largest probability": 1.0, "entropy": 1.0, "variance of the logits": 1.0}
    assert laplace_cifar.areas((sure, None), (sure, None)) == {"1 - largest probability": 0.5, "entropy": 0.5}


def test_joint_log_likelihoods_of_one_sample_are_sums() -> None:
    f = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(12) % 3
    options = argparse.Namespace(seed=0)
    found = laplace_cifar.alone(f, y, options)["joint log likelihood"]
    assert found["1"] == pytest.approx(-float(torch.nn.functional.cross_entropy(f, y)), rel=1e-12)
    again = laplace_cifar.joint(f.expand(5, -1, -1), y, options)["joint log likelihood"]
    assert again == pytest.approx(found, rel=1e-12)
    assert list(found) == ["1", "2", "3", "4", "5"]


@pytest.mark.skipif(
    not (common.DATA / "cifar10_test.npz").exists(), reason="the images of CIFAR-10 and the weights of ResNet-20"
)
@pytest.mark.slow
def test_the_cifar_experiment_runs(tmp_path: Path) -> None:
    record = run_quick(tmp_path, "laplace_cifar", "--methods", "last layer")
    (found,) = record["parts"].values()
    assert set(found) == {"MAP", "last layer", f"last layer{laplace_cifar.ALONE}"}
    assert found["last layer"]["narrowed"] < 1 == found[f"last layer{laplace_cifar.ALONE}"]["narrowed"]
    (tmp_path / "laplace_cifar" / "figure.png").unlink()
    assert run_quick(tmp_path, "laplace_cifar", "--methods")["parts"] == record["parts"]
