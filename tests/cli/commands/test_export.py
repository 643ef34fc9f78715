"""`linnet export`: the file gives what `linnet predict` writes; errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command_cases import done, networks, read_table, refused


@pytest.fixture(scope="module")
def last_layer(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has adapted the last layer alone."""
    out = tmp_path_factory.mktemp("last") / "run"
    done("adapt", model=f"{networks(made)}:numbers", train=made / "train.csv", target="y", params="2.*", out=out)
    return out


@pytest.mark.parametrize("parameters", ["last layer", "all"])
def test_the_file_predicts_as_the_run_does(made: Path, last_layer: Path, tmp_path: Path, parameters: str) -> None:
    given: dict[str, Any] = {"run": made / "run" if parameters == "all" else last_layer, "data": made / "test.csv"}
    printed = done("export", **given, out=tmp_path / "model.pt2")
    assert "returns mean and standard deviation" in " ".join(printed.split())
    done("predict", **given, out=tmp_path / "p.csv")
    table, expected = read_table(made / "test.csv"), read_table(tmp_path / "p.csv")
    X = torch.tensor([[float(value) for value in table[name]] for name in ("age", "bmi", "bp", "s5")]).T.contiguous()
    mean, std = torch.export.load(tmp_path / "model.pt2").module()(X)
    for found, name in ((mean, "mean"), (std, "std")):
        assert found.tolist() == pytest.approx([float(value) for value in expected[name]], rel=1e-4)


def test_errors(made: Path, last_layer: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": made / "test.csv", "out": tmp_path / "model.pt2"}
    assert "--out must be a .pt2 file" in refused("export", run=last_layer, **given | {"out": tmp_path / "a.pt"})
    assert not list(tmp_path.iterdir())
