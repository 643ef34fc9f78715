"""`linnet select`: the examples that `linnet.select` chooses, by name; errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import linnet
from linnet.cli import run_folder
from linnet.cli.data_files import cast_for_network, read
from tests.support.command_cases import done, networks, pictures, read_table, refused


@pytest.mark.parametrize("method", ["bait", "bald"])
def test_the_command_writes_what_select_chooses(made: Path, tmp_path: Path, method: Any) -> None:
    folder, pool, out = made / "run", made / "test.csv", tmp_path / "chosen.csv"
    printed = done("select", run=folder, data=pool, out=out, count=4, method=method)
    assert f"4 of 30 examples by {method}" in " ".join(printed.split())
    run = run_folder.read(folder)
    examples = read(pool, run.reading, labeled=False)
    cpu = torch.device("cpu")
    network = run_folder.load_network(folder, run, examples, model=None, weights=(), device=cpu)
    estimator = linnet.load(folder / run.file, network)
    expected = linnet.select(estimator, cast_for_network(examples, network).X, 4, method)
    found = read_table(out)
    assert [int(i) for i in found["example"]] == expected.indices.tolist()
    assert [float(s) for s in found["score"]] == pytest.approx(expected.scores.tolist(), rel=1e-5)


def test_images_have_names(tmp_path: Path) -> None:
    images, run, out = pictures(tmp_path / "images"), tmp_path / "run", tmp_path / "chosen.csv"
    model = f"{networks(tmp_path)}:images"
    done("adapt", model=model, train=images, size=8, gray=True, inference="laplace", head="keep", out=run)
    done("select", run=run, data=images, out=out, count=3, overlap="allow")
    names = read_table(out)["example"]
    assert len(set(names)) == 3 and all(name.endswith(".png") for name in names)


def test_errors(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "chosen.csv"
    given: dict[str, Any] = {"run": made / "run", "data": made / "test.csv", "out": out}
    assert "--method must be one of" in refused("select", **given, method="entropy")
    assert "--overlap must be one of" in refused("select", **given, overlap="keep")
    assert "--out must be a .csv file" in refused("select", **given | {"out": tmp_path / "a.npz"})
    assert "the pool has 30 to choose from" in refused("select", **given, count=31)
    assert "60 of the 60 examples" in refused("select", **given | {"data": made / "train.csv"})
    assert not out.exists()
