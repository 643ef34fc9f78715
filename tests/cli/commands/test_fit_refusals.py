"""What `linnet adapt` and `predict` refuse, and what is left after a failure: nothing, or what there was."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from safetensors import SafetensorError

from linnet.cli import run_folder
from linnet.cli.commands import fit
from tests.support.command_cases import diabetes, done, read_table, refused, run


@pytest.fixture
def line(tmp_path, nets):
    """A command that works, to be changed."""
    train, _ = diabetes(tmp_path)
    return ["adapt", "--model", f"{nets}:numbers", "--train", train, "--target", "y", "--out", tmp_path / "run"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--params", "9.*"], "'9.*'"),
        (["--params", "0.*", "--top", "1"], "Give one of them"),
        (["--top", "7"], "blocks below its head"),
        (["--top", "x"], "number of blocks or 'evidence'"),
        (["--features", "0"], "--features is for a new head"),
        (["--head", "best"], "--head must be one of"),
        (["--gray"], "for folders of images"),
        (["--strict"], "for folders of images"),
        (["--max-length", "9"], "--max-length is for texts"),
        (["--drop", "q"], "no column 'q'"),
        (["--drop", "q", "--columns", "age"], "nothing to --drop"),
        (["--prior", "wide"], "--prior must be one of"),
        (["--prior", "-1"], "positive"),
        (["--inference", "hmc"], "--inference must be one of"),
        (["--inference", "vi"], "Regression is exact"),
        (["--mean", "best"], "--mean must be one of"),
        (["--task", "ranking"], "--task must be one of"),
        (["--task", "classification"], "needs labels, but the targets are numbers with fractions"),
        (["--device", "tpu9"], "--device must be"),
        (["--size", "3x4x5"], "--size must be"),
        (["--pixel-mean", "a"], "--pixel-mean must be"),
        (["--seed", "-1"], "Invalid value"),
        (["--test", "none.csv"], "There is no none.csv"),
    ],
)
def test_options_that_make_no_sense(tmp_path, line, more, said):
    output = refused(*line, *more)
    assert said in output
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".run*"))


@pytest.fixture
def no_work(monkeypatch):
    """Long work fails the test."""

    def work(*_, **__):
        pytest.fail("This has to be refused before a pass over the data.")

    monkeypatch.setattr(fit, "_attach_head", work)
    monkeypatch.setattr(fit, "_fit_laplace", work)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--params", "9.*"], "'9.*'"),
        (["--top", "7"], "blocks below its head"),
        (["--prior", "nope.*=1,*=2"], "prior names 'nope.*'"),
        (["--prior", "0.*=1"], "prior gives no variance for '2.weight', '2.bias'"),
        (["--params", "0.*", "--prior", "2.*=1"], "prior gives no variance for '0.weight', '0.bias'"),
        (["--top", "evidence", "--prior", "nope=1"], "prior gives no variance"),
        (["--features", "nope"], "'nope' names no module"),
        (["--inference", "vi"], "Regression is exact"),
    ],
)
def test_options_are_checked_before_a_head_is_fitted(tmp_path, nets, line, no_work, more, said):
    assert said in refused(*line, "--model", f"{nets}:three", *more)
    assert not (tmp_path / "run").exists()


def test_priors_of_error_bars_are_checked_first(line, no_work):
    assert "prior names 'nope.*'" in refused("uncertainty", *line[1:], "--prior", "nope.*=1,*=2")


@pytest.mark.parametrize("command", ["adapt", "uncertainty"])
def test_test_files_are_checked_first(tmp_path, nets, no_work, command):
    random = np.random.default_rng(0)

    def arrays(name, width, y):
        np.savez(tmp_path / name, x=random.normal(size=(len(y), width)), y=y)
        return tmp_path / name

    labels = arrays("labels.npz", 4, np.arange(12) % 3)
    numbers = arrays("numbers.npz", 4, random.normal(size=(12, 2)))

    def said(model, train, test):
        line = [command, "--model", f"{nets}:{model}", "--train", train, "--test", test]
        return refused(*line, "--out", tmp_path / "run")

    test = arrays("test.npz", 5, np.arange(12) % 3)
    text = said("three", labels, test)
    assert f"The network does not take {test}: " in text and "mat1 and mat2" in text
    test = arrays("test.npz", 4, np.arange(12) % 4)
    assert f"{test} has labels that are not among the classes: '3'. The classes are '0', '1', '2'" in said(
        "three", labels, test
    )
    for y in (random.normal(size=(12, 3)), random.normal(size=12), np.array(["a"] * 12)):
        test = arrays("test.npz", 4, y)
        assert f"{test}: the targets must be numbers of the same shape as in {numbers}" in said("two", numbers, test)
    assert not (tmp_path / "run").exists()


def test_targets_of_another_shape_are_not_scored(tmp_path, nets):
    """New data need no targets, and strange ones must not cost the predictions."""
    x = np.random.default_rng(0).normal(size=(5, 4))
    np.savez(tmp_path / "train.npz", x=x, y=x[:, 0])
    done("adapt", "--model", f"{nets}:numbers", "--train", tmp_path / "train.npz", "--out", tmp_path / "run")
    for i, y in enumerate((np.ones((5, 2)), np.array(["a"] * 5), np.ones(5))):
        np.savez(tmp_path / "new.npz", x=x, y=y)
        out = tmp_path / f"{i}.csv"
        said = done("predict", "--run", tmp_path / "run", "--data", tmp_path / "new.npz", "--out", out)
        assert len(read_table(out)["mean"]) == 5 and ("rmse" in said) == (y.shape == (5,) and y.dtype.kind == "f")


def test_outputs_that_cannot_be_kept(tmp_path, nets, line):
    said = refused(*line, "--model", f"{nets}:two", "--head", "keep")
    assert "the network's 2 outputs cannot be a number" in said
    labels, _ = diabetes(tmp_path, labels=True)
    said = refused(*line, "--train", labels, "--model", f"{nets}:three", "--head", "keep")
    assert "the network's 3 outputs cannot be 2 classes" in said


def test_labels_that_training_has_not_seen(tmp_path, nets):
    train, test = diabetes(tmp_path, labels=True)
    test.write_text(test.read_text().replace("low", "middle"))
    said = refused(
        "adapt", "--model", f"{nets}:two", "--train", train, "--target", "y", "--test", test, "--out", tmp_path / "run"
    )
    assert "labels that are not among the classes: 'middle'. The classes are 'high', 'low'" in said


def test_an_output_folder_that_exists(tmp_path, line):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "predictions.csv").write_text("of an earlier run")
    said = refused(*line)
    assert "exists" in said and "--force" in said
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "predictions.csv"]
    done(*line, "--force")
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "adapter.safetensors").is_file() and not (out / "predictions.csv").exists()
    assert not list(tmp_path.glob(".run*"))
    (tmp_path / "file").write_text("x")
    said = refused(*line[:-1], tmp_path / "file", "--force")
    assert "needs a folder" in said


@pytest.mark.parametrize("where", ["json", "safetensors"])
def test_a_full_disk_leaves_what_there_was(tmp_path, line, copied, monkeypatch, where):
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    error = OSError(errno.ENOSPC, "No space left on device")

    def full(*_, **__):
        raise error

    if where == "json":
        monkeypatch.setattr(run_folder, "write_json", full)
    else:
        error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        monkeypatch.setattr("linnet._common.files.save_file", full)
    said = refused(*line, "--force", code=1)
    assert "The disk is full" in said and "Nothing was written" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert not list(tmp_path.glob(".run*"))


def test_interrupted(tmp_path, line, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "_fit_tangent", stop)
    assert "Interrupted. No unfinished file was written." in refused(*line, code=130)
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".run*"))


def test_networks_that_end_the_program(tmp_path, line):
    """sys.exit(0) in the code of a network is no success."""
    path = tmp_path / "ends.py"
    path.write_text(
        "import sys\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        if len(x) > 2:\n            sys.exit(0)\n        return super().forward(x)\n\n\n"
        "def build():\n    return Net(4, 1)\n"
    )
    said = refused(*line, "--random-weights", "--model", f"{path}:build", code=1)
    assert "The code of the network ended the command" in said
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".run*"))


def test_failures_on_the_way(tmp_path, line, monkeypatch):
    def fail(*_, **__):
        raise ArithmeticError("did not converge")

    monkeypatch.setattr(fit, "_fit_tangent", fail)
    said = refused(*line, code=1)
    assert "did not converge" in said and "--traceback" in said
    result = run("--traceback", *line)
    assert isinstance(result.exception, ArithmeticError)


def test_runs_that_are_none(tmp_path, line, copied):
    train = line[4]
    for folder in (tmp_path, tmp_path / "none", tmp_path / "no" / "where"):
        said = refused("predict", "--run", folder, "--data", train, "--out", tmp_path / "p.csv")
        assert "--run needs a folder" in said
    (tmp_path / "run.json").write_text("{")
    assert "is damaged" in refused("predict", "--run", tmp_path, "--data", train, "--out", tmp_path / "p.csv")
    (tmp_path / "run.json").write_text("[]")
    said = refused("predict", "--run", tmp_path, "--data", train, "--out", tmp_path / "p.csv")
    assert "is damaged (it holds no JSON object)" in said
    path = copied[0] / "run.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 99'))
    assert "format 99" in refused("predict", "--run", path.parent, "--data", train, "--out", tmp_path / "p.csv")
