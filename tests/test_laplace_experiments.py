"""The experiments on error bars: their parts are what they claim, and small versions run."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import evidence, laplace_uci
from experiments.__main__ import main


def test_the_network_has_the_slides_size() -> None:
    assert sum(p.numel() for p in evidence.network(evidence.WIDTH, 0).parameters()) == 2593


@pytest.mark.parametrize("k", [0.1, 10.0])
def test_a_rescaled_network_is_the_same_function(k: float) -> None:
    random = torch.Generator().manual_seed(0)
    X, y = evidence.observed(30, gap=True, generator=random)
    assert float(X.abs().min()) >= 0.5 and float(X.abs().max()) <= 1.5
    model = evidence.trained(X, y, width=6, steps=20, seed=0)
    other = evidence.rescaled(model, k)
    torch.testing.assert_close(other(X), model(X), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other[3].weight, k * model[3].weight)
    found = evidence.chosen(model, (X, y, *evidence.observed(20, gap=False, generator=random)))
    layerwise, shared = (found[f"{name}, at the network"] for name in ("layerwise", "shared"))
    assert layerwise[f"{k:g}"]["test"] == pytest.approx(layerwise["1"]["test"], rel=1e-4)
    assert abs(shared[f"{k:g}"]["test"] - shared["1"]["test"]) > 1e-3


def test_the_evidence_experiment_runs(tmp_path: Path) -> None:
    where = main(["evidence", "--quick", "--networks", "1", "--out", str(tmp_path)])
    record = json.loads((where / "metrics.json").read_text())
    axis = record["networks"][0]["axis"]
    assert len(axis["network"]) == len(axis["linear mode"]) == len(axis["test"]) == len(record["lambdas"]) == 5
    assert set(record["summary"]["choices"]) == set(evidence.CHOICES)
    assert (where / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "README.md").read_text().count("| evidence: ") == 1 + len(evidence.CHOICES)


def made_up(folder: Path, names: tuple[str, ...]) -> None:
    random = np.random.default_rng(0)
    (folder / "uci").mkdir()
    splits = {}
    for name in names:
        X = random.normal(size=(60, 3))
        data = np.column_stack([X, np.sin(X[:, 0]) + 0.1 * random.normal(size=60)])
        np.savetxt(folder / "uci" / f"{name}.csv", data, delimiter=",", header="a,b,c,y", comments="")
        splits[name] = np.packbits(random.permuted(np.tile(np.arange(60) < 6, (2, 1)), axis=1), axis=1)
    np.savez(folder / "uci" / "splits.npz", **splits)


def test_the_uci_experiment_runs(tmp_path: Path) -> None:
    made_up(tmp_path, ("boston",))
    out = tmp_path / "out"
    where = main(["laplace_uci", "--quick", "--sets", "boston", "--data", str(tmp_path), "--out", str(out)])
    record = json.loads((where / "metrics.json").read_text())
    table = record["results"]["boston"]
    assert set(table) == set(laplace_uci.METHODS)
    # Error bars leave the mean as it is.
    for name in laplace_uci.STRUCTURES:
        assert table[name]["rmse"]["mean"] == pytest.approx(table["MAP"]["rmse"]["mean"], rel=1e-4)
    gaps = [a["nll"] - b["nll"] for a, b in zip(table["kron"]["by split"], table["MAP"]["by split"], strict=True)]
    assert record["over sets"]["kron"]["NLL less MAP"]["mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert math.isfinite(record["over sets"]["diag"]["coverage"])
    assert (where / "figure.png").stat().st_size > 10_000


def test_the_uci_experiment_says_where_it_looked_for_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"reads uci/boston.csv from the data folder"):
        main(["laplace_uci", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    options = argparse.Namespace(quick=True, sets=["boston"], splits=None, largest=None, seed=0)
    options.data, options.device = tmp_path, "cpu"
    with pytest.raises(FileNotFoundError, match="--data PATH"):
        laplace_uci.run(options)
