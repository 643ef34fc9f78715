"""What tests of commands share: a file of networks; one run of `linnet adapt` for all that only need a run."""

from __future__ import annotations

import shutil

import pytest

from tests.support.command_cases import diabetes, done, networks


@pytest.fixture
def nets(tmp_path):
    """A file of networks: what goes before the colon of --model."""
    return networks(tmp_path)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with nets.py, train.csv, test.csv and a run. Tests must not change the files."""
    folder = tmp_path_factory.mktemp("made")
    train, test = diabetes(folder)
    nets = networks(folder)
    options = ["--model", f"{nets}:numbers", "--train", train, "--target", "y", "--test", test]
    done("adapt", *options, "--out", folder / "run")
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the run that a test may change, and a command that predicts from the copy."""
    out = tmp_path / "run"
    shutil.copytree(made / "run", out)
    return out, ["predict", "--run", out, "--data", made / "test.csv", "--out", tmp_path / "p.csv"]
