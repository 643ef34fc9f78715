"""`linnet forget`: the run without examples predicts as a refit does; errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet.cli import run_folder
from linnet.cli.data_files import cast_for_network, read
from tests.support.command_cases import done, networks, read_table, refused, write_table


def cut(path: Path, to: Path, start: int, stop: int) -> Path:
    """Some rows of a table."""
    with path.open(newline="") as file:
        head, *rows = list(csv.reader(file))
    return write_table(to, head, rows[start:stop])


def load(folder: Path, table: Path) -> tuple[Any, Any, Any]:
    """The estimator of a run, its network, and the examples of a table as the network takes them."""
    run = run_folder.read(folder)
    data = read(table, run.reading, labeled=True)
    network = run_folder.load_network(folder, run, data, model=None, weights=(), device=torch.device("cpu"))
    return linnet.load(folder / run.file, network), network, cast_for_network(data, network)


def test_a_run_without_rows_predicts_as_a_refit(made: Path, tmp_path: Path) -> None:
    rows, out = cut(made / "train.csv", tmp_path / "rows.csv", 0, 3), tmp_path / "less"
    printed = " ".join(done("forget", run=made / "run", rows=rows, out=out).split())
    assert "distance from a refit in the mean" in printed and "still holds the examples" in printed
    old, _, data = load(made / "run", made / "train.csv")
    new, _, _ = load(out, made / "train.csv")
    y = data.y.reshape(-1)
    torch.testing.assert_close(new.predict(data.X), old.refit(data.X[3:], y[3:]).predict(data.X), rtol=1e-8, atol=0.0)
    facts = json.loads((out / "metrics.json").read_text())["certificates"][0]
    assert facts["forgotten"] == 3 and facts["mean"] < 1e-4
    names = {"adapter.safetensors", "metrics.json", "report.html", "run.json"}
    assert {path.name for path in out.iterdir()} == names  # and no predictions.csv or report of the earlier run
    table = tmp_path / "p.csv"
    done("predict", run=out, data=made / "test.csv", out=table)
    assert len(read_table(table)["mean"]) == 30
    assert "are not among the 57" in refused("forget", run=out, rows=rows, out=tmp_path / "again")


def test_error_bars_forget_classes(tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).normal(size=(40, 4)), ["a", "b"] * 20
    table = write_table(
        tmp_path / "train.csv", ["p", "q", "r", "s", "y"], [[*x, label] for x, label in zip(X, y, strict=True)]
    )
    out, less = tmp_path / "run", tmp_path / "less"
    given: dict[str, Any] = {"model": f"{networks(tmp_path)}:two", "train": table, "target": "y"}
    done("uncertainty", **given, structure="full", prior="0.1", params="2.*", out=out)
    printed = done("forget", run=out, rows=cut(table, tmp_path / "rows.csv", 0, 4), out=less)
    assert "the weights of the network were trained" in " ".join(printed.split())
    new, network, data = load(less, table)
    again = linnet.Laplace(network, structure="full", prior=0.1, params="2.*")
    again.fit(data.X[4:], torch.tensor([0, 1] * 18))
    expected = again.predict(data.X, return_std=True)[1]
    torch.testing.assert_close(new.predict(data.X, return_std=True)[1], expected, rtol=1e-9, atol=0.0)
    assert new.log_evidence() == pytest.approx(again.log_evidence(), rel=1e-9)


def test_errors(made: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"run": made / "run", "out": tmp_path / "less"}
    assert "are not among the 60" in refused("forget", **given, rows=made / "test.csv")
    assert "nothing but the prior is left" in refused("forget", **given, rows=made / "train.csv")
    assert not (tmp_path / "less").exists()
