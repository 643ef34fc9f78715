"""`linnet attribute`: the training examples that `linnet.attribution` ranks first, by name; errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet.cli import run_folder
from linnet.cli.data_files import cast_for_network, read
from tests.support.command_cases import done, networks, pictures, read_table, refused


@pytest.mark.parametrize("of", ["auto", "output"])
def test_the_command_writes_what_attribution_finds(made: Path, tmp_path: Path, of: str) -> None:
    folder, out = made / "run", tmp_path / "found.csv"
    files = {"train": made / "train.csv", "data": made / "test.csv"}
    printed = " ".join(done("attribute", run=folder, **files, out=out, top=3, of=of).split())
    assert ("loss, in nats, of 30" if of == "auto" else "output of 30") in printed
    run = run_folder.read(folder)
    train, test = (read(files[name], run.reading, labeled=name == "train") for name in files)
    network = run_folder.load_network(folder, run, test, model=None, weights=(), device=torch.device("cpu"))
    estimator = linnet.load(folder / run.file, network)
    X, X_train = (cast_for_network(one, network).X for one in (test, train))
    data = (X_train, train.y.astype(float))
    how: Any = {"of": "output"} if of == "output" else {"of": "loss", "y": test.y.astype(float)}
    expected = linnet.attribution(estimator, X, top=3, data=data, **how)
    found = read_table(out)
    assert [int(i) for i in found["training_example"]] == expected.indices.flatten().tolist()
    assert [float(s) for s in found["change"]] == pytest.approx(expected.changes.flatten().tolist(), rel=1e-5)
    assert [int(i) for i in found["example"]] == np.repeat(np.arange(30), 3).tolist()
    assert [int(i) for i in found["rank"]] == [1, 2, 3] * 30


def test_classes_of_images(tmp_path: Path) -> None:
    images, run, out = pictures(tmp_path / "images"), tmp_path / "run", tmp_path / "found.csv"
    model = f"{networks(tmp_path)}:images"
    done("uncertainty", model=model, train=images, size=8, gray=True, structure="kron", out=run)
    done("attribute", run=run, train=images, data=images, out=out, top=2, of="output")
    found = read_table(out)
    assert all(name.endswith(".png") for name in found["training_example"])
    assert len(set(found["output"])) == 2 and len(found["rank"]) == 4 * len(set(found["example"]))


def test_errors(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    given: dict[str, Any] = {"run": made / "run", "train": made / "train.csv", "data": made / "test.csv", "out": out}
    assert "--of must be one of" in refused("attribute", **given, of="logit")
    assert "--rank must be one of" in refused("attribute", **given, rank="best")
    assert "--out must be a .csv file" in refused("attribute", **given | {"out": tmp_path / "a.npz"})
    assert not out.exists()
