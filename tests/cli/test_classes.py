"""Which output of a network is which class, and notes about networks that say little, from files to files."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from linnet.cli.commands.fit import _warn_of_nothing_learned
from linnet.cli.data_files import Examples
from linnet.cli.task import find_task
from linnet.cli.terminal import UsageError
from tests.support.command_cases import done, read_table, refused, write_table

NAMES = ["barolo", "grignolino", "barbera"]  # in the order of the outputs, which is not that of the alphabet
NETWORK = """
import json, pathlib
import torch
from torch import nn


def build():
    model = nn.Linear(4, 3)
    state = json.loads((pathlib.Path(__file__).parent / "weights.json").read_text())
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model


def regress():
    model = build()
    return nn.Sequential(model, Pick())


class Pick(nn.Module):
    def forward(self, x):
        return x[:, :1]
"""


@pytest.fixture(scope="module")
def wines(tmp_path_factory):
    """A folder with a trained network, and tables of wines by name and by number."""
    folder = tmp_path_factory.mktemp("wines")
    found = load_wine()
    X = (found.data[:, [0, 6, 9, 12]] - found.data[:, [0, 6, 9, 12]].mean(0)) / found.data[:, [0, 6, 9, 12]].std(0)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], found.target[order]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    inputs = torch.tensor(X[:100], dtype=torch.float32)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.tensor(y[:100])).backward()
        optimizer.step()
    (folder / "weights.json").write_text(json.dumps({k: v.tolist() for k, v in model.state_dict().items()}))
    (folder / "network.py").write_text(NETWORK)
    for name, labels in (("words", np.array(NAMES)[y]), ("numbers", y)):
        rows = [[*map(float, x), label] for x, label in zip(X, labels, strict=True)]
        header = ["alcohol", "flavanoids", "color", "proline", "wine"]
        write_table(folder / f"{name}.csv", header, rows[:100])
        write_table(folder / f"{name}_new.csv", header, rows[100:])
    return folder


def options(wines, out, labels="words", **more):
    data = {"train": wines / f"{labels}.csv", "test": wines / f"{labels}_new.csv"}
    return {"model": f"{wines}/network.py:build", "target": "wine", "out": out, **data, **more}


def accuracy(out):
    return json.loads((out / "metrics.json").read_text())["test"]


@pytest.mark.parametrize("command", ["adapt", "uncertainty"])
def test_a_guessed_order_that_cannot_be_is_refused_with_the_order_to_give(wines, tmp_path, command):
    said = refused(command, **options(wines, tmp_path / "run"))
    assert "In the order barbera, barolo, grignolino the network has" in said
    assert "--classes barolo,grignolino,barbera" in said and "--head new" in said


@pytest.mark.parametrize("command", ["adapt", "uncertainty"])
def test_named_outputs_give_the_predictions_of_numbered_ones(wines, tmp_path, command):
    more = {"inference": "map"} if command == "adapt" else {"structure": "diag"}
    said = done(command, **options(wines, tmp_path / "words", classes=",".join(NAMES), **more))
    assert "the network's outputs are the classes barolo, grignolino, barbera, as --classes says" in " ".join(
        said.split()
    )
    done(command, **options(wines, tmp_path / "numbers", "numbers", **more))
    found, expected = (read_table(tmp_path / name / "predictions.csv") for name in ("words", "numbers"))
    for i, name in enumerate(NAMES):
        np.testing.assert_allclose(np.array(found[f"p_{name}"], float), np.array(expected[f"p_{i}"], float), rtol=1e-6)
    assert found["prediction"] == [NAMES[int(i)] for i in expected["prediction"]]
    assert accuracy(tmp_path / "words").keys() == accuracy(tmp_path / "numbers").keys()
    # New data without the targets are read by the order that the run keeps.
    done("predict", run=tmp_path / "words", data=wines / "words_new.csv", out=tmp_path / "again.csv")
    assert read_table(tmp_path / "again.csv")["prediction"] == found["prediction"]


def test_a_class_that_the_data_lack_keeps_its_output(wines, tmp_path):
    rows = read_table(wines / "words.csv")
    two = [i for i, name in enumerate(rows["wine"]) if name != "barbera"]
    header = list(rows)
    few = write_table(tmp_path / "few.csv", header, [[rows[name][i] for name in header] for i in two])
    given = options(wines, tmp_path / "run", classes=",".join(NAMES), inference="map") | {"train": few}
    said = done("adapt", **given)
    assert "a new head is fitted" not in said
    assert set(read_table(tmp_path / "run" / "predictions.csv")) >= {f"p_{name}" for name in NAMES}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": "barolo,barbera"}, "--classes has 2 labels, and the network has 3 outputs"),
        ({"classes": "barolo,grignolino,merlot"}, "--classes has no 'barbera'; the data have such labels"),
        ({"classes": "barolo,barolo,barbera"}, "--classes needs a label of its own for each output"),
        ({"classes": "a,b,c", "head": "new"}, "--head new makes others"),
    ],
)
def test_classes_that_cannot_be(wines, tmp_path, given, said):
    assert said in refused("adapt", **options(wines, tmp_path / "run", **given))


def test_classes_are_no_numbers():
    with pytest.raises(UsageError, match="--classes names classes, and the targets are numbers"):
        task_of(nn.Linear(2, 1), [0.5, 1.5], asked="regression", names=("a", "b"))
    # Whole numbers are classes where they are named.
    assert task_of(nn.Linear(2, 2), [5, 7], names=("7", "5")).output_labels == [7, 5]


class Named(nn.Linear):
    def __init__(self, *names):
        super().__init__(2, len(names))
        self.config = type("Config", (), {"id2label": dict(enumerate(names))})()


def task_of(model, labels, **more):
    data = Examples(torch.randn(len(labels), 2), np.array(labels), "")
    return find_task(model, data, **{"asked": "auto", "head": "auto"} | more)


def test_names_of_a_model_are_the_order():
    found = task_of(Named("positive", "negative"), ["negative", "positive", "positive"])
    assert found.output_labels == ["positive", "negative"] and found.named_by == "the model"
    with pytest.raises(
        UsageError, match=r"names its outputs positive, negative, and the labels are bad, good.*--classes"
    ):
        task_of(Named("positive", "negative"), ["good", "bad"])
    given = task_of(Named("positive", "negative"), ["good", "bad"], names=("good", "bad"))
    assert given.output_labels == ["good", "bad"] and not given.new_head
    assert task_of(Named("positive", "negative"), ["good", "bad"], head="new").new_head
    assert task_of(Named("positive", "negative"), ["a", "b", "c"]).new_head
    plain = task_of(Named("LABEL_0", "LABEL_1"), ["good", "bad"])
    assert plain.output_labels == ["bad", "good"] and plain.named_by == ""
    numbers = task_of(Named("positive", "negative"), [0, 1, 1, 0], names=("1", "0"))
    assert numbers.output_labels == [1, 0]


def test_a_network_without_readable_outputs_needs_a_head_for_two_classes():
    class Encoder(nn.Linear):
        def forward(self, x):
            return {"hidden": super().forward(x), "other": x}

    assert task_of(Encoder(2, 3), ["a", "b", "a"]).new_head


# Columns in the order of a scaler.


def test_a_scaler_with_names_has_the_order_of_the_columns(wines, tmp_path):
    rows = read_table(wines / "numbers.csv")
    turned = ["proline", "wine", "color", "flavanoids", "alcohol"]
    table = write_table(tmp_path / "turned.csv", turned, list(zip(*(rows[name] for name in turned), strict=True)))
    scales = {name: {"mean": 0.0, "std": 1.0} for name in ("alcohol", "flavanoids", "color", "proline")}
    (tmp_path / "scaler.json").write_text(json.dumps({"columns": scales}))
    given = options(wines, tmp_path / "plain", "numbers", structure="diag")
    done("uncertainty", **given)
    done("uncertainty", **given | {"train": table, "scaler": tmp_path / "scaler.json", "out": tmp_path / "turned"})
    found, expected = (read_table(tmp_path / name / "predictions.csv") for name in ("turned", "plain"))
    np.testing.assert_allclose(np.array(found["p_0"], float), np.array(expected["p_0"], float), rtol=1e-6)


# Notes.


def notes(said):
    return " ".join(said.split())


def test_a_poor_network_is_named_without_test_data_too(wines, tmp_path):
    header = ["alcohol", "flavanoids", "color", "proline", "y"]
    rows = read_table(wines / "numbers.csv")
    y = 100 + 10 * np.array(rows["alcohol"], float)
    table = write_table(
        tmp_path / "far.csv", header, [[*(rows[name][i] for name in header[:4]), v] for i, v in enumerate(y)]
    )
    given = {"model": f"{wines}/network.py:regress", "train": table, "target": "y", "out": tmp_path / "run"}
    said = notes(done("adapt", **given))
    assert "The network as it was is no better than to predict the mean: rmse" in said
    assert "on the training data" in said
    good = notes(
        done("adapt", **options(wines, tmp_path / "good", "numbers", inference="map") | {"test": wines / "numbers.csv"})
    )
    assert "is no better than to" not in good


def test_a_poor_network_is_named_on_the_test_data(wines, tmp_path):
    """A new head is not the network's own, and nobody is told that it is poor."""
    header = ["alcohol", "flavanoids", "color", "proline", "y"]
    rows = read_table(wines / "numbers.csv")
    y = 100 + 10 * np.array(rows["alcohol"], float)
    lines = [[*(rows[name][i] for name in header[:4]), v] for i, v in enumerate(y)]
    train, test = (write_table(tmp_path / f"{i}.csv", header, lines[i::2]) for i in range(2))
    given = {"model": f"{wines}/network.py:regress", "train": train, "test": test, "target": "y"}
    said = notes(done("adapt", **given, out=tmp_path / "own"))
    assert "The network as it was is no better than to predict the mean: rmse" in said and "on the test data" in said
    assert "is no better than to" not in notes(done("adapt", **given, head="new", out=tmp_path / "new"))


def test_a_model_that_is_worse_than_its_network_says_so(wines, tmp_path):
    rng = np.random.default_rng(0)
    header = ["alcohol", "flavanoids", "color", "proline", "wine"]
    noise = write_table(
        tmp_path / "noise.csv", header, [[*rng.normal(size=4), int(label)] for label in rng.integers(3, size=90)]
    )
    given = options(wines, tmp_path / "run", "numbers", mean="zero", inference="map") | {"train": noise}
    said = notes(done("adapt", **given))
    assert "The adapted model is worse than the network as it was on the test data: nll" in said


class Scaled:
    def __init__(self, *scales):
        self.scales_ = dict(enumerate(scales))


def test_a_fit_that_learns_nothing_says_so():
    with pytest.warns(
        UserWarning, match=r"lets nothing move: the largest scale of the prior is 3e-08.* try --head new"
    ):
        _warn_of_nothing_learned(Scaled(1e-9, 3e-8), new_head=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_nothing_learned(Scaled(1e-9, 0.1), new_head=False)
