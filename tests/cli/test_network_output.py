"""Which output of a network a command reads, and in which units, from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import linnet
from linnet.cli.network_output import NetworkOutput, describe_outputs, select_output
from tests.support.command_cases import diabetes, done, read_table, refused, write_table

SEVERAL = """
import torch
from torch import nn


class Several(nn.Module):
    def __init__(self, form):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.form = form

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.form(hidden, self.head(hidden))


def plain():
    return Several(lambda hidden, out: out)


def pair():
    return Several(lambda hidden, out: (hidden, out))


def named():
    return Several(lambda hidden, out: {"hidden": hidden, "score": out})


def encoder():
    return Several(lambda hidden, out: {"hidden": hidden})


def in_units():  # of targets with mean 1.5 and standard deviation 0.8
    return Several(lambda hidden, out: (out - 1.5) / 0.8)
"""


@pytest.fixture
def files(tmp_path):
    """A file of networks, training and test data."""
    path = tmp_path / "several.py"
    path.write_text(SEVERAL)
    train, test = diabetes(tmp_path)
    return path, {"train": train, "test": test, "target": "y", "mean": "network"}


def numbers(folder: Path) -> np.ndarray:
    told = read_table(folder / "predictions.csv")
    return np.array([[float(cell) for cell in told[name]] for name in ("mean", "std", "std_observed")])


def test_an_output_by_position_or_name(tmp_path, files):
    path, given = files
    done("adapt", model=f"{path}:plain", out=tmp_path / "plain", **given)
    for name, output in (("pair", "1"), ("named", "score"), ("named", "1")):
        out = tmp_path / f"{name}{output}"
        done("adapt", model=f"{path}:{name}", out=out, output=output, **given)
        np.testing.assert_allclose(numbers(out), numbers(tmp_path / "plain"), rtol=1e-12)
        assert json.loads((out / "run.json").read_text())["output"]["part"] == output
        # A new process reads the output again.
        done("predict", run=out, data=given["test"], out=tmp_path / f"{name}{output}.csv")
        told = read_table(tmp_path / f"{name}{output}.csv")
        np.testing.assert_allclose(np.array(told["mean"], float), numbers(out)[0], rtol=1e-12)


def test_networks_of_several_outputs_name_the_option(tmp_path, files):
    path, given = files
    inputs = {"out": tmp_path / "run", **{name: given[name] for name in ("train", "target")}}
    for command in ("adapt", "uncertainty"):
        more = {"head": "keep"} if command == "adapt" else {}
        said = refused(command, model=f"{path}:pair", **inputs, **more)
        assert "a tuple of 2 parts: 0 (a tensor of shape (2, 6)), 1 (a tensor of shape (2, 1))" in said
        assert "--output" in said
    said = refused("adapt", model=f"{path}:named", output="logit", **inputs)
    assert "--output logit" in said and "hidden (a tensor" in said and "score (a tensor" in said
    assert "--output 2" in refused("adapt", model=f"{path}:pair", output="2", **inputs)


def test_networks_without_readable_outputs_get_a_head(tmp_path, files):
    path, given = files
    given.pop("mean")
    said = done("adapt", model=f"{path}:encoder", out=tmp_path / "run", features="body", **given)
    assert "a new head is fitted" in said and "the network returns no tensor of outputs" in said
    done("predict", run=tmp_path / "run", data=given["test"], out=tmp_path / "p.csv")


def test_outputs_in_other_units_are_scaled_back(tmp_path, files):
    path, given = files
    scaler = tmp_path / "scaler.json"
    one = {"mean": 0.0, "std": 1.0}
    columns = {name: one for name in ("age", "bmi", "bp", "s5")}
    scaler.write_text(json.dumps({"columns": columns, "targets": {"y": {"mean": 1.5, "std": 0.8}}}))
    for command in ("adapt", "uncertainty"):
        data = given if command == "adapt" else {k: v for k, v in given.items() if k != "mean"}
        done(command, model=f"{path}:plain", out=tmp_path / f"{command} plain", **data)
        said = done(command, model=f"{path}:in_units", scaler=scaler, out=tmp_path / command, **data)
        assert "outputs of the network are scaled back by" in said and "columns are standardized by" in said
        found, expected = numbers(tmp_path / command), numbers(tmp_path / f"{command} plain")
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        done("predict", run=tmp_path / command, data=data["test"], out=tmp_path / f"{command}.csv")
        told = read_table(tmp_path / f"{command}.csv")
        np.testing.assert_allclose(np.array(told["std"], float), found[1], rtol=1e-9)


def test_scales_of_the_network_s_own_data(tmp_path, files):
    path, given = files
    own = read_table(given["train"])
    other = {name: [str(3 * float(cell) + 1) for cell in cells] for name, cells in own.items()}
    source = write_table(tmp_path / "own.csv", list(other), list(zip(*other.values(), strict=True)))
    given.pop("mean")
    more = {"standardize": True, "scale_target": True, "source": source}
    said = done("adapt", model=f"{path}:plain", out=tmp_path / "run", **more, **given)
    assert f"columns are standardized by {source}" in said and "--standardize measures" not in said
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    X, y = (np.array([other[name] for name in names], float) for names in (("age", "bmi", "bp", "s5"), ("y",)))
    np.testing.assert_allclose(run["reading"]["center"], X.mean(1), rtol=1e-12)
    np.testing.assert_allclose(run["reading"]["spread"], X.std(1), rtol=1e-12)
    np.testing.assert_allclose(run["output"]["center"], y.mean(1), rtol=1e-12)
    np.testing.assert_allclose(run["output"]["spread"], y.std(1), rtol=1e-12)


def test_new_data_are_not_the_network_s_own(tmp_path, files):
    path, given = files
    said = done("adapt", model=f"{path}:plain", out=tmp_path / "run", standardize=True, **given)
    assert f"--standardize measures {given['train']}" in " ".join(said.split())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["reading"]["scaled_by"] is None


def test_scales_of_targets_need_numbers_and_the_network_s_head(tmp_path, files):
    path, given = files
    given.pop("mean")
    said = refused("adapt", model=f"{path}:plain", out=tmp_path / "run", scale_target=True, head="new", **given)
    assert "a new head is fitted to the targets as they are" in said
    train, _ = diabetes(tmp_path, labels=True)
    said = refused("adapt", model=f"{path}:plain", out=tmp_path / "run", scale_target=True, train=train, target="y")
    assert "classes have no scale" in said


def test_the_hook_is_part_of_the_linear_model():
    torch.manual_seed(0)
    X, y = torch.randn(20, 4).double(), torch.randn(20).double()
    body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x):
            return 2.5 * self.body(x) - 4

    given = {"prior": 0.1, "noise": 0.3, "mean": "network"}
    expected = linnet.TangentRegressor(Scaled(), **given).fit(X, y).predict(X, return_std=True)
    hooked = NetworkOutput(None, (-4.0,), (2.5,)).attach(body)
    found = linnet.TangentRegressor(hooked, **given).fit(X, y).predict(X, return_std=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_scales_fit_the_outputs():
    network = NetworkOutput(None, (0.0, 1.0), (1.0, 2.0)).attach(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="has 3 outputs, but the scaler has 2 targets"):
        network(torch.zeros(2, 2))


def test_outputs_in_words():
    assert describe_outputs(None) == "None"
    assert describe_outputs([torch.zeros(2)]) == "a list of 1 part: 0 (a tensor of shape (2,))"
    with pytest.raises(ValueError, match="--output 0: the network returns a tensor of shape"):
        select_output(torch.zeros(3, 2), "0")
    with pytest.raises(ValueError, match=r"a tuple of 1 part: 0 \(an int\), and an int there"):
        select_output((3,), "0")
