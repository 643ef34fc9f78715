"""Natural mistakes with the command: each ends with exit code 2, and the message says what was wrong and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.command_cases import (
    diabetes,
    digits,
    done,
    networks,
    pictures,
    read_table,
    refused,
    write_table,
)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Files of a careless user: data with one mistake each, weights of other networks, and a run."""
    folder = tmp_path_factory.mktemp("mistakes")
    train, test = diabetes(folder)
    nets = networks(folder)
    done("adapt", model=f"{nets}:numbers", train=train, target="y", out=folder / "run")
    (folder / "labels").mkdir()
    diabetes(folder / "labels", labels=True)
    arrays, _ = digits(folder)
    pictures(folder / "pictures")
    columns = read_table(train)

    def save(name: str, new: dict[str, Any], without: str = "") -> None:
        table = {key: cells for key, cells in (columns | new).items() if key != without}
        write_table(folder / name, list(table), list(zip(*table.values(), strict=True)))

    save("text.csv", {"name": ["x"] * 60})
    save("gap.csv", {"bmi": ["", *columns["bmi"][1:]]})
    save("nan.csv", {"bmi": ["nan", *columns["bmi"][1:]]})
    save("id.csv", {"id": list(range(60))})
    save("fewer.csv", {}, "bp")
    save("unlabeled.csv", {}, "y")
    save("one class.csv", {"y": ["a"] * 60})
    save("other labels.csv", {"y": ["medium"] * 60})
    write_table(folder / "one row.csv", list(columns), [[1, 2, 3, 4, 0.5]])
    write_table(folder / "no rows.csv", list(columns), [])
    lines = [";".join(cell.replace(".", ",") for cell in row) for row in zip(*columns.values(), strict=True)]
    (folder / "commas.csv").write_text("\n".join([";".join(columns), *lines]))
    (folder / "sheet.xlsx").write_bytes(b"PK")
    (folder / "SHEET.CSV").write_bytes(train.read_bytes())
    (folder / "packed.csv.gz").write_bytes(b"")
    (folder / "no names.csv").write_text("\n".join(train.read_text().splitlines()[1:]))
    (folder / "utf16.csv").write_text(train.read_text(), encoding="utf-16")
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "other.pt")
    torch.save(torch.nn.Linear(3, 2), folder / "whole.pt")
    (folder / "scaler.json").write_text('{"columns": {"mean": [0], "std": [1]}}')
    return SimpleNamespace(folder=folder, nets=nets, train=train, test=test, arrays=arrays)


FIT = ["--model", "{nets}:numbers", "--train", "{train}", "--target", "y", "--out", "{folder}/out"]
READ = ["--run", "{folder}/run", "--data", "{test}", "--out", "{folder}/out.csv"]
MISTAKES: list[tuple[str, list[str], list[str]]] = [
    # The target and the data.
    ("adapt", ["--target", "z"], ["no column 'z'", "--target", "Its columns are 'age'"]),
    ("adapt", ["--train", "{folder}/none.csv"], ["There is no", "none.csv"]),
    ("adapt", ["--train", "{folder}/sheet.xlsx"], ["Save the sheet as .csv"]),
    ("adapt", ["--train", "{folder}/SHEET.CSV"], ["unknown ending", "small letters"]),
    ("adapt", ["--train", "{folder}/packed.csv.gz"], ["unknown ending", "Unpack the file first"]),
    ("adapt", ["--train", "{folder}/no names.csv"], ["no column 'y'", "here it has numbers: add a line"]),
    ("adapt", ["--train", "{folder}/utf16.csv"], ["not a table in UTF-8", "Save it as CSV UTF-8"]),
    ("adapt", ["--train", "{folder}/text.csv"], ["line 2: column 'name' must hold numbers", "--drop"]),
    ("adapt", ["--train", "{folder}/gap.csv"], ["line 2: column 'bmi' is empty", "Fill such cells"]),
    ("adapt", ["--train", "{folder}/nan.csv"], ["line 2: column 'bmi' is NaN", "Fill such cells"]),
    ("adapt", ["--train", "{folder}/id.csv"], ["5 columns of inputs", "'id'", "--columns", "--drop"]),
    ("adapt", ["--train", "{folder}/commas.csv"], ["decimal point in place of the comma"]),
    ("adapt", ["--train", "{folder}/one row.csv"], ["has one example", "Give more"]),
    ("adapt", ["--train", "{folder}/no rows.csv"], ["has a header but no rows"]),
    ("adapt", ["--train", "{folder}/one class.csv"], ["at least two classes"]),
    ("adapt", ["--train", "{arrays}"], ["does not take these data", "shapes x (30, 64)"]),
    ("adapt", ["--train", "{folder}/pictures", "--model", "{nets}:images"], ["--target is not for folders of images"]),
    ("adapt", ["--test", "{folder}/fewer.csv"], ["no column 'bp'", "which the network takes"]),
    ("adapt", ["--test", "{folder}/unlabeled.csv"], ["no column 'y'"]),
    (
        "adapt",
        ["--train", "{folder}/labels/train.csv", "--test", "{folder}/other labels.csv"],
        ["labels that are not among the classes: 'medium'", "The classes are 'high', 'low'"],
    ),
    ("adapt", ["--columns", "age,bmi,bp,bp"], ["--columns names 'bp' twice"]),
    ("adapt", ["--columns", "age,bmi,bp,y"], ["--columns names the target 'y', which the network would then see"]),
    ("adapt", ["--id", "y"], ["--id and --target both name 'y'"]),
    ("adapt", ["--drop", "bpp"], ["no column 'bpp'", "--drop"]),
    # What is predicted.
    ("adapt", ["--task", "classification"], ["needs labels, but the targets are numbers with fractions"]),
    ("adapt", ["--classes", "low,high"], ["--classes names labels, but the targets are numbers with fractions"]),
    ("adapt", ["--task", "regression", "--train", "{folder}/labels/train.csv"], ["must hold numbers, but has 'high'"]),
    ("adapt", ["--task", "regresion"], ["--task must be one of auto, classification, regression"]),
    ("adapt", ["--inference", "vi"], ["is for classes", "leave --inference out"]),
    ("adapt", ["--head", "keep", "--model", "{nets}:three"], ["3 outputs cannot be a number", "Leave --head out"]),
    # The network and its weights.
    ("adapt", ["--model", "{nets}"], ["names no function", "module:function"]),
    ("adapt", ["--model", "{nets}:nubmers"], ["has no 'nubmers'", "'numbers'"]),
    ("adapt", ["--model", "{folder}/nots.py:numbers"], ["There is no file"]),
    ("adapt", ["--model", "mymodels:build"], ["No module named", "Modules are searched in"]),
    ("adapt", ["--model", "{nets}:drawn"], ["drawn at random", "--weights", "--random-weights"]),
    ("adapt", ["--weights", "{folder}/none.pt"], ["There is no file", "with weights"]),
    ("adapt", ["--weights", "{folder}/other.pt"], ["missing: '0.weight'", "not in the network: 'weight'"]),
    ("adapt", ["--weights", "{folder}/whole.pt"], ["a whole network", "Save model.state_dict()"]),
    ("uncertainty", ["--model", "{nets}:three"], ["3 outputs, but the targets are a number", "linnet adapt"]),
    # Options.
    ("adapt", ["--params", "fc.*"], ["--params 'fc.*' matches none", "'0.weight'"]),
    ("adapt", ["--top", "99"], ["Ask for 0 to 1 of them", "--params"]),
    ("adapt", ["--top", "all"], ["--top must be a number of blocks or 'evidence'"]),
    ("adapt", ["--prior", "balnced"], ["--prior must be one of", "balanced"]),
    ("uncertainty", ["--structure", "kronecker"], ["--structure must be one of", "kron"]),
    ("adapt", ["--device", "gpu"], ["--device must be auto, cpu, cuda"]),
    ("adapt", ["--size", "small"], ["--size must be a number of pixels"]),
    ("adapt", ["--scaler", "{folder}/scaler.json"], ["has 1 means and 1 stds, and 4 columns in the data"]),
    ("adapt", ["--scaler", "{folder}/scaler.json", "--standardize"], ["Give one of them"]),
    ("adapt", ["--epochs", "3"], ["No such option", "--epochs"]),
    ("adapt", ["--out", "{folder}/run"], ["exists", "--force"]),
    # Runs.
    ("predict", ["--run", "{folder}/nowhere"], ["does not exist", "linnet adapt, uncertainty or embed has written"]),
    ("predict", ["--run", "{folder}"], ["has no run.json"]),
    ("predict", ["--run", "{folder}/run/run.json"], ["needs a folder", "run.json is a file"]),
    ("predict", ["--data", "{folder}/fewer.csv"], ["no column 'bp'"]),
    ("predict", ["--data", "{arrays}"], ["has read a table with the columns 'age'", "needs a .csv"]),
    ("predict", ["--out", "{folder}/p.xlsx"], ["--out must be a .csv file"]),
    ("select", ["--count", "100"], ["the pool has 30", "Ask for fewer"]),
    ("select", ["--method", "random"], ["--method must be one of"]),
    ("forget", ["--rows", "{test}"], ["were never there"]),
    ("attribute", ["--train", "{test}"], ["30 of the 30 examples", "are not among the 60 that the fit has seen"]),
    ("export", ["--out", "{folder}/net.pt"], [".pt2 file (torch.export) or an .onnx file"]),
    ("similarity", ["--model", "{nets}:numbers", "--data", "{train}", "--target", "y"], ["give --model twice"]),
    ("info", [], ["a saved file, a run folder, or --model"]),
]


@pytest.mark.parametrize(("command", "mistake", "parts"), MISTAKES, ids=[f"{c} {' '.join(m)}" for c, m, _ in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(given, command, mistake, parts):
    base = {"adapt": FIT, "uncertainty": FIT}.get(command, READ if command not in ("similarity", "info") else [])
    options = dict(zip(base[::2], base[1::2], strict=True))
    flags = [word for word in mistake if word == "--standardize"]
    named = [word for word in mistake if word not in flags]
    options |= dict(zip(named[::2], named[1::2], strict=True))
    if command == "forget":
        options.pop("--data")
        options["--out"] = "{folder}/less"
    if "pictures" in options.get("--train", ""):
        assert options["--target"] == "y"
    words = [word for pair in options.items() for word in pair] + flags
    said = refused(command, *(word.format(**vars(given)) for word in words))
    for part in parts:
        assert part in said, said
    assert not any((given.folder / name).exists() for name in ("out", "out.csv", "less"))


def test_pictures_say_their_channels(given):
    out = given.folder / "pictures run"
    said = refused("adapt", model=f"{given.nets}:images", train=given.folder / "pictures", out=out)
    assert "The images have 3 channels (--gray reads one)" in said


def test_a_run_without_its_files(given, tmp_path):
    run = Path(shutil.copytree(given.folder / "run", tmp_path / "run"))
    (run / "adapter.safetensors").unlink()
    said = refused("predict", run=run, data=given.test, out=tmp_path / "p.csv")
    assert "adapter.safetensors is missing" in said and "Copy the folder again" in said


def test_test_data_that_are_training_data(given, tmp_path):
    """The metrics of such examples look good and say nothing. The note is in the report too."""
    rows = given.train.read_text().splitlines()
    (tmp_path / "test.csv").write_text("\n".join([*given.test.read_text().splitlines(), *rows[1:8]]))
    how = {"model": f"{given.nets}:numbers", "target": "y"}
    said = done("adapt", **how, train=given.train, test=tmp_path / "test.csv", out=tmp_path / "run")
    note = f"7 of the 37 examples of {tmp_path / 'test.csv'} are in {given.train} too"
    assert note in said and note in (tmp_path / "run" / "report.html").read_text()
    assert " too. Metrics" not in done("adapt", **how, train=given.train, test=given.test, out=tmp_path / "clean")


def test_tabs_in_a_csv_file(given, tmp_path):
    tabs = tmp_path / "train.csv"
    tabs.write_text(given.train.read_text().replace(",", "\t"))
    done("adapt", model=f"{given.nets}:numbers", target="y", train=tabs, out=tmp_path / "run")


def test_a_target_that_is_named_twice(given, tmp_path):
    said = refused(
        "adapt", "--target", "y", model=f"{given.nets}:numbers", train=given.train, target="y", out=tmp_path / "run"
    )
    assert "--target names 'y' twice" in said


def test_targets_that_are_scaled_by_new_data(given, tmp_path):
    how = {"model": f"{given.nets}:numbers", "target": "y", "train": given.train}
    said = done("adapt", "--scale-target", **how, out=tmp_path / "run")
    assert f"--scale-target measures {given.train}. A network that was trained on other data" in said
