"""Splits of the UCI sets are what they claim, and a small version of the experiment runs."""

import pytest
import torch

from experiments import common
from experiments.maddox2021 import ensembles, uci
from tests.support.needed import make_uci
from tests.support.quick_runs import run_quick


def test_splits_are_standardized_by_their_training_part(tmp_path):
    data = uci.load(make_uci(tmp_path, {"boston": 60}), "boston", 2)
    assert data.X.shape == (2, 48, 3) and data.X_test.shape == (2, 12, 3)
    torch.testing.assert_close(data.X.mean(1), torch.zeros(2, 3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(data.y.std(1, correction=0), torch.ones(2).double(), rtol=1e-12, atol=0)
    assert 3 < float(data.unit[0]) < 7
    with pytest.raises(ValueError, match="boston has 2 splits; 3 were asked for"):
        uci.load(tmp_path, "boston", 3)
    with pytest.raises(FileNotFoundError, match="--data PATH"):
        uci.load(tmp_path / "nowhere", "boston", 1)


def test_real_sets_have_their_sizes():
    if not (common.DATA / "uci" / "splits.npz").exists():
        pytest.skip(f"no data under {common.DATA}")
    data = uci.load(common.DATA, "energy", 2)
    assert data.X.shape == (2, 691, 8) and data.y_test.shape == (2, 77)


def test_uci_runs(tmp_path, capsys):
    folder = make_uci(tmp_path, {"wine": 50})
    record = run_quick(tmp_path / "out", "uci", "--sets", "wine", "--splits", "1", "--data", str(folder))
    for setting in uci.SETTINGS:
        table = record["results"][setting]["wine"]
        missing = set(uci.METHODS) - set(table)
        assert missing == (set() if setting == "new" else {uci.RETRAINED})
        assert all(len(one["by split"]) == 1 and one["rmse"]["mean"] < 20 for one in table.values())
    assert "new data, ensemble of 5" in capsys.readouterr().out
    assert "| uci: new data, ensemble of 5" in (tmp_path / "out" / "README.md").read_text()


def test_splits_may_start_later(tmp_path):
    folder = make_uci(tmp_path, {"boston": 60})
    both, second = uci.load(folder, "boston", 2), uci.load(folder, "boston", 1, first=1)
    assert torch.equal(second.X[0], both.X[1]) and torch.equal(second.y_test[0], both.y_test[1])


def test_ensembles_run(tmp_path):
    folder = make_uci(tmp_path, {"boston": 50})
    record = run_quick(tmp_path / "out", "ensembles", "--data", str(folder))
    table = record["results"]["boston"]
    assert set(table) == set(ensembles.METHODS)
    assert all(len(one["by split"]) == 1 and one["rmse"]["mean"] < 20 for one in table.values())
    assert not set(ensembles.HALVES["held"]) & set(ensembles.HALVES["development"])
