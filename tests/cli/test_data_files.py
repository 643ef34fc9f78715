"""Files of data as inputs and targets: tables, arrays, image folders, texts, and all that can be wrong with them."""

from __future__ import annotations

import csv
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.cli import data_files
from linnet.cli.data_files import Reading, Standardization, cast_for_network, read, read_for_network
from linnet.cli.data_files.scaling import Scales, read_scaler
from linnet.cli.data_files.tables import write_csv
from linnet.cli.data_files.texts import read_texts
from linnet.cli.task import guess_kind
from linnet.cli.terminal import UsageError
from tests.support.command_cases import pictures, write_table


def table(tmp_path: Path, rows, header=("a", "b", "y"), name="t.csv") -> Path:
    return write_table(tmp_path / name, header, rows)


def refused(path: Path, reading: Reading | None = None, *, labeled: bool = True) -> str:
    with pytest.raises(UsageError) as error:
        read(path, Reading(targets=("y",)) if reading is None else reading, labeled=labeled)
    return str(error.value)


def test_columns_in_the_order_of_the_run(tmp_path):
    path = table(tmp_path, [[1, 2, 0], [3, 4, 1]])
    found = read(path, Reading(targets=("y",)), labeled=True)
    assert found.columns == ("a", "b")
    assert found.X.tolist() == [[1, 2], [3, 4]]
    assert found.X.dtype == torch.float64
    assert found.y.tolist() == [0, 1] and found.y.dtype.kind == "i"
    other = read(path, Reading(targets=("y",), columns=("b", "a")), labeled=True)
    assert other.X.tolist() == [[2, 1], [4, 3]]
    dropped = read(path, Reading(targets=("y",), drop=("a",)), labeled=True)
    assert dropped.columns == ("b",)
    several = read(path, Reading(targets=("a", "y")), labeled=True)
    assert several.y.tolist() == [[1, 0], [3, 1]]
    assert read(path, Reading(targets=("z",)), labeled=False).y is None


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [(("1", "2"), "i", [1, 2]), (("1", "2.5"), "f", [1, 2.5]), (("cat", "dog"), "U", ["cat", "dog"])],
)
def test_targets_are_what_they_look_like(tmp_path, cells, kind, values):
    found = read(table(tmp_path, [[1, 2, cell] for cell in cells]), Reading(targets=("y",)), labeled=True)
    assert found.y.dtype.kind == kind
    assert found.y.tolist() == values


@pytest.mark.parametrize(
    ("cells", "task", "values"),
    [
        (("007", "7", "08"), "auto", ["007", "7", "08"]),  # codes are no numbers
        (("007", "7"), "regression", [7.0, 7.0]),
        (("+7", "7"), "auto", ["+7", "7"]),
        (("-0", "0"), "auto", ["-0", "0"]),
        (("1_0", "2_0"), "auto", ["1_0", "2_0"]),
        (("1_0", "10"), "classification", ["1_0", "10"]),
        (("\u0661", "\u0662"), "auto", ["\u0661", "\u0662"]),  # digits of other scripts
        (
            ("123456789012345678901", "123456789012345678902"),
            "auto",
            ["123456789012345678901", "123456789012345678902"],
        ),
        ((" 7", "-8 "), "auto", [7, -8]),
        (("1e3", "+.5"), "auto", [1000.0, 0.5]),
        (("1.0", "2"), "classification", [1.0, 2.0]),
    ],
)
def test_labels_are_the_text_that_they_are(tmp_path, cells, task, values):
    path = table(tmp_path, [[1, 2, cell] for cell in cells])
    found = read(path, Reading(targets=("y",), task=task), labeled=True)
    assert found.y.tolist() == values
    if values == list(cells):
        (tmp_path / "t.tsv").write_text("".join(f"some words\t{cell}\n" for cell in cells), encoding="utf-8")
        assert read_texts(tmp_path / "t.tsv", target="label")[1].tolist() == values


def test_numbers_are_plain_decimals(tmp_path):
    said = refused(table(tmp_path, [[1, "1_0", 0], [3, 4, 1]]))
    assert "line 2: column 'b' must hold numbers, but has '1_0'" in said
    said = refused(table(tmp_path, [[1, 2, "1_0"], [3, 4, "7"]]))
    assert "mixes numbers and text: line 3 has '7' and line 2 has '1_0'" in said
    for task in ("auto", "classification"):  # a gap is no class
        said = refused(table(tmp_path, [[1, 2, "nan"], [3, 4, "7"]]), Reading(targets=("y",), task=task))
        assert "line 2: column 'y' is NaN or infinite" in said


def test_labels_are_text_in_all_files_where_they_are_in_one(tmp_path):
    train = table(tmp_path, [[1, 2, "007"], [3, 4, "10"]])
    test = table(tmp_path, [[1, 2, "10"], [3, 4, "10"]], name="test.csv")
    net = torch.nn.Linear(1, 1)
    found, reading = read_for_network(train, Reading(targets=("y",)), net, labeled=True)
    assert found.y.tolist() == ["007", "10"] and reading.text
    found, again = read_for_network(test, reading, net, labeled=True)
    assert found.y.tolist() == ["10", "10"] and again.text
    assert read_for_network(test, Reading(targets=("y",)), net, labeled=True)[0].y.tolist() == [10, 10]
    (tmp_path / "t.tsv").write_text("words\t10\n")
    assert read_texts(tmp_path / "t.tsv", target="label", text=True)[1].tolist() == ["10"]


def test_cells_that_look_like_formulas(tmp_path):
    labels = ["=1+1", "+a", "-b", "@c", "\td", "\re", "'=quoted", "''+twice", "'plain'", "\uff1dwide", "a=b"]
    write_csv(tmp_path / "p.csv", {"x": np.array([-1.5] * 11), "y": np.array(labels), "=z": range(11)})
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["x", "y", "'=z"] and rows[0][0] == "-1.5"
    assert [row[1] for row in rows] == [label if label in ("'plain'", "a=b") else f"'{label}" for label in labels]
    found = read(tmp_path / "p.csv", Reading(targets=("y",), drop=("'=z",)), labeled=True)
    assert found.y.tolist() == labels
    said = refused(table(tmp_path, [[1, 2, "=a"], [3, 4, "'=a"]]))
    assert "the target 'y' has both \"'=a\" and '=a'" in said and "Rename one" in said
    with pytest.raises(ValueError, match="shorter"):
        write_csv(tmp_path / "p.csv", {"x": [1, 2], "y": [1]})
    assert len((tmp_path / "p.csv").read_text().splitlines()) > 11  # as it was


def test_semicolons_byte_order_marks_and_blank_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeffa;y\n1;2\n\n3;4\n", encoding="utf-8")
    found = read(path, Reading(targets=("y",)), labeled=True)
    assert found.X.tolist() == [[1], [3]]


def test_missing_columns_are_listed(tmp_path):
    path = table(tmp_path, [[1, 2, 0]])
    said = refused(path, Reading(targets=("price",)))
    assert "no column 'price'" in said and "'a', 'b', 'y'" in said
    said = refused(path, Reading(targets=("y",), columns=("a", "c", "d")))
    assert "'c', 'd'" in said and "'a', 'b', 'y'" in said
    assert "--drop" in refused(path, Reading(targets=("y",), drop=("q",)))
    assert "Name the column" in refused(path, Reading())
    assert "nothing to predict from" in refused(path, Reading(targets=("a", "b", "y")))


def test_mixed_types_name_column_and_line(tmp_path):
    said = refused(table(tmp_path, [[1, 2, 0], [3, "x", 1]]))
    assert "line 3: column 'b' must hold numbers, but has 'x', while line 2 has the number '2'" in said
    said = refused(table(tmp_path, [[1, 2, "0"], [3, 4, "cat"]]))
    assert "the target 'y' mixes numbers and text: line 2 has '0' and line 3 has 'cat'" in said
    path = table(tmp_path, [[1, 2, "0"], [3, 4, "cat"]])
    found = read(path, Reading(targets=("y",), task="classification"), labeled=True)
    assert found.y.tolist() == ["0", "cat"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, "", 0], [3, 4, 1]], "line 2: column 'b' is empty. Fill such cells"),
        ([[1, "nan", 0], [3, 4, 1]], "line 2: column 'b' is NaN or infinite"),
        ([[1, 2, 0], [3, 4, ""]], "line 3: column 'y' is empty"),
        ([[1, 2, 0], [3, 4]], "line 3: 2 cells, but the first line has 3 columns"),
        ([], "a header but no rows"),
    ],
)
def test_gaps(tmp_path, rows, said):
    assert said in refused(table(tmp_path, rows))


def test_files_that_are_no_tables(tmp_path):
    empty, binary = tmp_path / "empty.csv", tmp_path / "binary.csv"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00\x81")
    assert "is empty" in refused(empty)
    assert "not a table in UTF-8" in refused(binary)
    assert "several columns with the name 'a'" in refused(table(tmp_path, [[1, 2, 3]], ("a", "a", "y")))
    assert "There is no" in refused(tmp_path / "none.csv")
    other = tmp_path / "data.xyz"
    other.write_text("1")
    assert "has an unknown ending" in refused(other)
    (tmp_path / "texts.txt").write_text("hello")
    assert "hf:" in refused(tmp_path / "texts.txt")


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow" in refused(path)

    class Column(list):
        def to_pylist(self):
            return list(self)

    class Stored:
        column_names = ("a", "y")
        num_rows = 2

        def column(self, name):
            return Column({"a": [1.5, 2.5], "y": labels}[name])

    labels: list = ["u", "v"]

    def read_stored(_):
        return Stored()

    fake, parquet = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    parquet.read_table = read_stored
    fake.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    found = read(path, Reading(targets=("y",)), labeled=True)
    assert found.X.tolist() == [[1.5], [2.5]]
    assert found.y.tolist() == ["u", "v"]
    for labels in (["007", "7"], ["1", "2"], [1, 2]):
        assert read(path, Reading(targets=("y",)), labeled=True).y.tolist() == labels  # the file says what is text
    labels = ["1", "2"]
    assert read(path, Reading(targets=("y",), task="regression"), labeled=True).y.tolist() == [1.0, 2.0]
    labels = [1.0, float("nan")]
    assert "line 2: column 'y' is NaN or infinite" in refused(path)
    labels = ["a", None]
    assert "has gaps in 'y'" in refused(path)
    monkeypatch.setattr(Stored, "num_rows", 0)
    assert "has no rows" in refused(path)


def test_arrays(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((3, 2)), y=np.arange(3), other=np.arange(3))
    found = read(path, Reading(), labeled=True)
    assert found.X.shape == (3, 2) and found.y.tolist() == [0, 1, 2]
    assert read(path, Reading(targets=("other",)), labeled=True).y.tolist() == [0, 1, 2]
    assert "no array 'z'" in refused(path, Reading(targets=("z",)))
    assert "one array of targets" in refused(path, Reading(targets=("y", "other")))
    np.savez(path, input_ids=np.ones((3, 4), int), attention_mask=np.ones((3, 4), int), y=np.arange(3))
    found = read(path, Reading(), labeled=True)
    assert set(found.X) == {"input_ids", "attention_mask"} and found.n == 3
    assert found.first(2)["input_ids"].shape == (2, 4)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.ones((3, 2)), "y": np.arange(4)}, "the same number of examples"),
        ({"y": np.arange(4)}, "no inputs"),
        ({"x": np.array([["a"], ["b"]]), "y": np.arange(2)}, "must hold numbers"),
        ({"x": np.array([[1.0], [np.nan]]), "y": np.arange(2)}, "example 1 of 'x' has NaN"),
        ({"x": np.ones((2, 1)), "y": np.array([np.inf, 1.0])}, "example 0 of 'y' has NaN"),
        ({"x": np.ones((2, 1)), "y": np.array([b"a", b"b"])}, "'y' must hold numbers or text"),
        ({"x": np.ones((2, 1)), "y": np.ones((2, 1, 1))}, "'y' must hold numbers or text"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, said):
    np.savez(tmp_path / "a.npz", **arrays)
    assert said in refused(tmp_path / "a.npz", Reading())


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], dtype=object))
    assert "cannot be read as a .npz file" in refused(tmp_path / "a.npz", Reading())
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 broken")
    assert "cannot be read as a .npz file" in refused(tmp_path / "b.npz", Reading())


def test_standardization_is_that_of_the_training_data(tmp_path):
    path = table(tmp_path, [[1, 5, 0], [3, 5, 1]])
    reading = Reading(targets=("y",))
    measured = Standardization(measure=True)
    reading = measured.find_columns(read(path, reading, labeled=True), reading)
    assert reading.scaled_by is None and reading.center == (2.0, 5.0) and reading.spread == (1.0, 1.0)
    assert read(path, reading, labeled=True).X.tolist() == [[-1, 0], [1, 0]]
    other = table(tmp_path, [[4, 6, 0]], name="new.csv")
    assert read(other, reading, labeled=True).X.tolist() == [[2, 1]]
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)))
    with pytest.raises(UsageError, match="training had 2 input columns"):
        read(tmp_path / "a.npz", reading, labeled=False)
    images = read(pictures(tmp_path / "p"), Reading(channels=1), labeled=True)
    with pytest.raises(UsageError, match="for tables and for arrays"):
        measured.find_columns(images, Reading())


def scaler(folder, content):
    path = folder / "scaler.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_standardization_by_the_network_s_own_data(tmp_path):
    own = table(tmp_path, [[0, 5], [4, 5]], header="ab", name="own.csv")
    path, reading = table(tmp_path, [[1, 5, 0.5], [3, 5, 1.5]]), Reading(targets=("y",))
    found = read(path, reading, labeled=True)
    reading = Standardization(measure=True, file=own).find_columns(found, replace(reading, columns=("a", "b")))
    assert (reading.center, reading.spread, reading.scaled_by) == ((2.0, 5.0), (2.0, 1.0), str(own))
    targets = Standardization(measure=True, file=path, targets=True).find_targets(found, reading)
    assert targets == Scales((1.0,), (0.5,))
    assert Standardization(targets=True).find_targets(found, reading) == Scales((1.0,), (0.5,))
    assert Standardization(measure=True).find_targets(found, reading) is None


def test_scalers_by_name_and_in_order(tmp_path):
    path, reading = table(tmp_path, [[1, 5, 0.5], [3, 5, 1.5]]), Reading(targets=("y",))
    found = read(path, reading, labeled=True)
    pairs = {"b": {"mean": 2, "std": 4}, "a": {"mean": 1, "std": 0.5}}
    targets = {"y": {"mean": 1, "std": 3}}
    for columns, more in (
        (pairs, {"targets": targets}),
        ({"mean": [1, 2], "std": [0.5, 4]}, {"targets": {"mean": [1], "std": [3]}}),
    ):
        given = Standardization(scaler=read_scaler(scaler(tmp_path, {"columns": columns} | more)))
        new = given.find_columns(found, replace(reading, columns=("a", "b")))
        assert (new.center, new.spread) == ((1.0, 2.0), (0.5, 4.0)) and new.scaled_by.endswith("scaler.json")
        assert given.find_targets(found, reading) == Scales((1.0,), (3.0,))
    without = Standardization(scaler=read_scaler(scaler(tmp_path, {"columns": pairs})))
    assert without.find_targets(found, reading) is None
    with pytest.raises(UsageError, match=r"--scale-target: .*scaler\.json has no targets"):
        replace(without, targets=True).find_targets(found, reading)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a JSON file"),
        ("[1]", "is no scaler. A scaler is a JSON file such as"),
        ({"mean": [1, 2], "std": [1, 1]}, "is no scaler"),
        ({"columns": {"a": {"mean": 1, "std": 1}}}, "'columns' has no 'b'; it has 'a'"),
        ({"columns": {"a": 1, "b": 2}}, "has no mean and std of each name"),
        ({"columns": {"mean": [1], "std": [1]}}, "has 1 means and 1 stds, and 2 columns in the data"),
        ({"columns": {"mean": [1, 2], "std": [1, 0]}}, "must hold positive numbers"),
        ({"columns": {"mean": [1, "x"], "std": [1, 1]}}, "must hold numbers"),
        ('{"columns": {"mean": [1, NaN], "std": [1, 1]}}', "must hold finite numbers"),
    ],
)
def test_scalers_that_are_none(tmp_path, content, said):
    path, reading = table(tmp_path, [[1, 5, 0.5], [3, 5, 1.5]]), Reading(targets=("y",))
    found = read(path, reading, labeled=True)
    with pytest.raises(UsageError, match=re.escape(said)):
        Standardization(scaler=read_scaler(scaler(tmp_path, content))).find_columns(found, reading)
    with pytest.raises(UsageError, match="There is no file"):
        read_scaler(tmp_path / "none.json")


def test_rows_have_the_names_of_their_column(tmp_path):
    path = table(tmp_path, [["p1", 5, 0], ["'=2", 6, 1]], header=["id", "a", "y"])
    reading = Reading(targets=("y",), row_id="id")
    found = read(path, reading, labeled=True)
    assert found.names == ["p1", "=2"] and found.columns == ("a",)
    new = table(tmp_path, [[5], [6]], header="a", name="new.csv")
    assert read(new, replace(reading, columns=("a",)), labeled=False).names == []
    with pytest.raises(UsageError, match="has no column 'id', which --id names"):
        read(table(tmp_path, [[5, 0], [6, 1]], header="ay"), reading, labeled=True)
    with pytest.raises(UsageError, match="line 3: column 'id' is empty"):
        read(table(tmp_path, [["p", 5, 0], ["", 6, 1]], header=["id", "a", "y"]), reading, labeled=True)
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)))
    with pytest.raises(UsageError, match="--id is for tables"):
        read(tmp_path / "a.npz", reading, labeled=False)


def test_numbers_take_the_precision_of_the_network(tmp_path):
    np.savez(tmp_path / "a.npz", ids=np.ones((2, 3), int), weight=np.ones((2, 3)))
    found = cast_for_network(read(tmp_path / "a.npz", Reading(), labeled=False), torch.nn.Linear(1, 1))
    assert found.X["ids"].dtype == torch.int64 and found.X["weight"].dtype == torch.float32


def test_image_folders(tmp_path):
    folder = pictures(tmp_path / "p")
    found = read(folder, Reading(channels=1), labeled=True)
    assert found.X.shape == (12, 1, 8, 8) and float(found.X.min()) >= 0 and float(found.X.max()) <= 1
    assert found.X.dtype == torch.float32
    assert found.y.tolist() == ["across"] * 6 + ["down"] * 6
    assert found.names[0] == "across/0.png"
    small = read(folder, Reading(size=(4, 5), pixel_mean=(0.5,) * 3, pixel_std=(0.5,) * 3), labeled=True)
    assert small.X.shape == (12, 3, 4, 5) and float(small.X.min()) < 0
    flat = read(folder / "down", Reading(channels=1), labeled=False)
    assert flat.y is None and flat.n == 6
    assert "put the images of each class into a folder" in refused(folder / "down", Reading(channels=1))
    assert "1 channels, but there are 3" in refused(folder, Reading(channels=1, pixel_mean=(0.5,) * 3))


def test_images_are_files_with_the_ending_of_an_image(tmp_path):
    folder = pictures(tmp_path / "p")
    (folder / "down" / "notes.txt").write_text("no image")
    (folder / "down" / "older.png").mkdir()
    assert read(folder, Reading(channels=1, strict=True), labeled=True).n == 12


def test_unreadable_images_are_counted_or_stop(tmp_path):
    folder = pictures(tmp_path / "p")
    whole = (folder / "down" / "0.png").read_bytes()
    (folder / "down" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "across" / "text.png").write_text("no image")
    with pytest.warns(UserWarning, match="2 of 14 images cannot be read and are left out: 'across/text.png'"):
        found = read(folder, Reading(channels=1), labeled=True)
    assert found.n == len(found.y) == len(found.names) == 12
    said = refused(folder, Reading(channels=1, strict=True))
    assert "text.png cannot be read as an image" in said and "Without --strict it is skipped" in said


def test_an_image_that_is_too_large_is_left_out_or_stops(tmp_path, monkeypatch):
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    folder = pictures(tmp_path / "p")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)  # 64 pixels are above one limit, 100 above the other
    assert read(folder, Reading(channels=1), labeled=True).n == 12
    Image.new("L", (10, 10)).save(folder / "down" / "large.png")
    with pytest.warns(UserWarning, match=r"1 of 13 images .* save smaller copies: 'down/large.png'"):
        found = read(folder, Reading(channels=1), labeled=True)
    assert found.n == 12 and "down/large.png" not in found.names
    said = refused(folder, Reading(channels=1, strict=True))
    assert "large.png cannot be read as an image (Image size (100 pixels) exceeds limit" in said
    assert "Save a smaller copy of it" in said


def test_whatever_a_damaged_image_raises(tmp_path, monkeypatch):
    from linnet.cli.data_files import images

    folder, read_one = pictures(tmp_path / "p"), images._read

    def damaged(path, size, mode):
        if path.name == "0.png":
            raise EOFError("the file ends")
        return read_one(path, size, mode)

    monkeypatch.setattr(images, "_read", damaged)
    with pytest.warns(UserWarning, match="2 of 12 images cannot be read"):
        assert read(folder, Reading(channels=1), labeled=True).n == 10


def test_folders_without_images_and_of_several_sizes(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    assert "have no images" in refused(tmp_path, Reading())
    folder = pictures(tmp_path / "p")
    Image.new("L", (5, 9)).save(folder / "down" / "large.png")
    said = refused(folder, Reading(channels=1))
    assert "'8 x 8', '9 x 5'" in said and "--size" in said
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "a" / "x.jpg").write_text("no image")
    assert "None of the 1 images" in refused(tmp_path / "bad", Reading())


@pytest.mark.parametrize("text", [True, False])
def test_labels_of_texts_are_what_they_were_in_training(tmp_path, monkeypatch, text):
    (tmp_path / "t.tsv").write_text("good\t10\nbad\t20\n")
    monkeypatch.setattr(data_files, "tokenize", lambda texts, *_, **__: {"input_ids": torch.ones(len(texts), 3)})
    found = read(tmp_path / "t.tsv", Reading(tokenizer="some", text=text), labeled=True)
    assert found.y.tolist() == (["10", "20"] if text else [10, 20]) and found.texts == ["good", "bad"]
    assert found.what == "2 texts of up to 3 tokens"


def test_texts(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text('good "film\t1\nbad film\t0\n')
    texts, y = read_texts(path, target="label")
    assert texts == ['good "film', "bad film"] and y.tolist() == [1, 0]
    path.write_text("sentence\tlabel\ngood film\tpos\n")
    texts, y = read_texts(path, target="label")
    assert texts == ["good film"] and y.tolist() == ["pos"]
    path.write_text("one\ntwo\n")
    assert read_texts(path, target="label") == (["one", "two"], None)
    for content, said in (
        ("a\tb\tc\n", "3 columns"),
        ("text\tlabel\n", "no texts"),
        (" \t1\nb\t0\n", "line 1: the text is missing"),
        ("a\t1\nb\n", "line 2: 1 cells"),
    ):
        path.write_text(content)
        with pytest.raises(UsageError, match=said):
            read_texts(path, target="label")


def test_options_for_data_of_another_kind(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 2)), y=np.arange(2))
    for reading in (Reading(columns=("a",)), Reading(drop=("a",))):
        assert "for tables" in refused(tmp_path / "a.npz", reading)
    assert "for folders of images" in refused(tmp_path / "a.npz", Reading(size=(2, 2)))
    folder = pictures(tmp_path / "p")
    assert "whose folders are the classes" in refused(folder, Reading(targets=("y",), channels=1))
    assert "--max-length is for texts" in refused(folder, Reading(max_length=3, channels=1))


def test_which_task():
    assert guess_kind(np.array([True, False]), "auto")[0] == "classification"
    assert guess_kind(np.arange(100), "auto")[0] == "regression"
    assert guess_kind(np.arange(100) % 60, "auto")[0] == "regression"
    assert guess_kind(np.arange(100) % 7, "auto") == ("classification", "the targets are 7 whole numbers")
    assert guess_kind(np.arange(100) % 7, "regression") == ("regression", "--task says so")
    assert guess_kind(np.ones((4, 2), int), "auto")[0] == "regression"
    with pytest.raises(UsageError, match="needs numbers, but the targets are text such as 'a'"):
        guess_kind(np.array(["a", "b"]), "regression")
