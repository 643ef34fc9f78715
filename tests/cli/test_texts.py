"""Texts for Hugging Face models: columns of tables, first lines of text files, folders without a tokenizer."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.cli import data_files
from linnet.cli.data_files import Reading, read, read_for_network
from linnet.cli.data_files.texts import TOKENIZER_FILES, read_texts, tokenize
from linnet.cli.model_source import load_network, quiet_transformers
from linnet.cli.terminal import UsageError
from tests.cli.commands.test_embed import bert
from tests.support.command_cases import done, read_table, refused, write_table

TEXTS = ["a good film", "bad film", "good", "a bad bad film"]
LABELS = ["pos", "neg", "pos", "neg"]


@pytest.fixture
def tokens(monkeypatch):
    """A tokenizer that needs no transformers."""

    def call(texts, tokenizer, *, max_length):
        return {"input_ids": torch.ones(len(texts), min(3, max_length), dtype=torch.long)}

    monkeypatch.setattr(data_files, "tokenize", call)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return bert(tmp_path_factory.mktemp("texts") / "bert")


def reviews(path: Path, **columns) -> Path:
    """A table with the texts, their labels and further columns, in the order of the arguments."""
    known = {"review": TEXTS, "label": LABELS}
    table = {name: known[name] if cells is None else cells for name, cells in columns.items()}
    return write_table(path, list(table), list(zip(*table.values(), strict=True)))


def said_of(path: Path, **given) -> str:
    with pytest.raises(UsageError) as error:
        read(path, Reading(**({"tokenizer": "some", "targets": ("label",)} | given)), labeled=True)
    return str(error.value)


# Columns of tables.


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize(
    ("columns", "given"),
    [
        ({"review": None, "label": None}, {}),
        ({"label": None, "review": None}, {}),
        ({"who": list("abcd"), "review": None, "label": None}, {"drop": ("who",)}),
        ({"who": list("abcd"), "review": None, "label": None}, {"columns": ("review",)}),
        ({"who": list("abcd"), "label": None, "review": None}, {"row_id": "who"}),
    ],
)
def test_the_only_column_of_text_is_read_as_texts(tmp_path, columns, given):
    found = read(reviews(tmp_path / "t.csv", **columns), Reading(("label",), tokenizer="some", **given), labeled=True)
    assert found.texts == TEXTS and found.y.tolist() == LABELS and found.columns == ("review",)
    assert found.what == "4 texts of up to 3 tokens" and set(found.X) == {"input_ids"}
    assert found.names == (list("abcd") if "row_id" in given else [])
    assert "shapes input_ids (4, 3)" in found.hint


@pytest.mark.usefixtures("tokens")
def test_new_texts_are_read_as_the_training_data_were(tmp_path):
    train = reviews(tmp_path / "t.csv", who=list("abcd"), review=None, label=None)
    reading = Reading(("label",), tokenizer="some", row_id="who", max_length=2)
    network = torch.nn.Linear(1, 1)
    _, reading = read_for_network(train, reading, network, labeled=True)
    assert reading.columns == ("review",) and reading.text_column
    for name, columns in {
        "labeled": {"label": None, "review": None, "who": list("efgh")},
        "unlabeled": {"review": None, "more": [1, 2, 3, 4], "who": list("efgh")},
        "numbers": {"review": ["7", "8", "9", "10"], "who": list("efgh")},
    }.items():
        found = read(reviews(tmp_path / f"{name}.csv", **columns), reading, labeled=False)
        assert found.texts == [str(cell) for cell in columns["review"] or TEXTS] and found.names == list("efgh")
        assert (found.y is None) == (name != "labeled") and found.X["input_ids"].shape == (4, 2)
    (tmp_path / "new.tsv").write_text("who\treview\nx\t10\n")  # a table of tabs
    found = read(tmp_path / "new.tsv", reading, labeled=False)
    assert found.texts == ["10"] and found.names == ["x"] and found.what.startswith("1 text of")
    (tmp_path / "other.csv").write_text("text\ngood\n")
    with pytest.raises(UsageError, match="no column 'review', which the network takes"):
        read(tmp_path / "other.csv", reading, labeled=False)


@pytest.mark.usefixtures("tokens")
def test_columns_of_numbers_are_numbers(tmp_path):
    path = reviews(tmp_path / "t.csv", review=[1, 2.5, -3, 4], label=None)
    found, reading = read_for_network(path, Reading(("label",), tokenizer="x"), torch.nn.Linear(1, 1), labeled=True)
    assert found.X.tolist() == [[1], [2.5], [-3], [4]] and not found.texts and not reading.text_column
    without = reviews(tmp_path / "w.csv", review=None, label=None)
    assert "column 'review' must hold numbers" in said_of(without, tokenizer=None)  # no model of texts


@pytest.mark.usefixtures("tokens")
def test_several_columns_with_text_ask_for_one(tmp_path):
    path = reviews(tmp_path / "t.csv", title=TEXTS, review=None, label=None)
    said = said_of(path)
    assert "of which 'title', 'review' are text" in said and "--columns title" in said
    assert said_of(path, columns=("review", "title")) == said.replace("'title', 'review'", "'review', 'title'").replace(
        "--columns title", "--columns review"
    )
    said = said_of(reviews(tmp_path / "n.csv", number=[1, 2, 3, 4], review=None, label=None))
    assert "the columns 'number', 'review', of which 'review' is text" in said and "--columns review" in said
    said = said_of(reviews(tmp_path / "gap.csv", review=["good", " ", "bad", ""], label=None))
    assert "line 3: the text is missing, as in 2 lines" in said


@pytest.mark.usefixtures("tokens")
def test_tabs_with_more_columns_than_a_text_and_a_label(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text('who\treview\tstars\na\t"good film\t5\nb\tbad\t1\n')
    found = read(path, Reading(("stars",), tokenizer="some", row_id="who"), labeled=True)
    assert found.texts == ['"good film', "bad"] and found.names == ["a", "b"] and found.y.tolist() == [5, 1]
    assert read(path, Reading(("stars",), tokenizer="some", drop=("who",)), labeled=True).texts == found.texts
    assert "'who', 'review' are text" in said_of(path, targets=("stars",))
    assert "has 3 columns" in (said := said_of(path, targets=())) and "--columns" in said and "--target" in said


@pytest.mark.usefixtures("tokens")
def test_parquet_says_which_column_is_text(tmp_path, monkeypatch):
    fake, parquet = types.ModuleType("pyarrow"), types.ModuleType("pyarrow.parquet")
    stored = {"review": ["7", "8"], "label": [0, 1]}

    class Column(list):
        to_pylist = list.copy

    class Stored:
        column_names, num_rows = tuple(stored), 2

        def column(self, name):
            return Column(stored[name])

    parquet.read_table = lambda _: Stored()
    fake.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    found = read(path, Reading(("label",), tokenizer="some"), labeled=True)
    assert found.texts == ["7", "8"] and found.y.tolist() == [0, 1]
    stored["review"] = [7, 8]
    assert read(path, Reading(("label",), tokenizer="some"), labeled=True).X.tolist() == [[7], [8]]


def test_options_of_texts(tmp_path):
    (tmp_path / "t.txt").write_text("good\n")
    assert "--columns and --drop are for tables" in said_of(tmp_path / "t.txt", columns=("a",))
    path = reviews(tmp_path / "t.csv", review=None, label=None)
    assert "--max-length is for texts" in said_of(path, tokenizer=None, max_length=3)


# First lines of text files.


def lines(path: Path, first: str, labels=LABELS) -> Path:
    rows = [f"{text}\t{label}\n" for text, label in zip(TEXTS, labels, strict=True)]
    path.write_text("".join([f"{first}\n", *rows]))
    return path


@pytest.mark.parametrize("first", ["review\tsentiment", "Text\tLabel", "TWEET\tClass", "text_a\ty", "sentence\tscore"])
def test_names_of_columns_in_the_first_line(tmp_path, first):
    path = lines(tmp_path / "t.tsv", first)
    assert read_texts(path, target="label")[0] == TEXTS
    (tmp_path / "t.txt").write_text("\n".join([first.split("\t")[0], *TEXTS]))
    assert read_texts(tmp_path / "t.txt", target="label") == (TEXTS, None)


@pytest.mark.parametrize(
    ("first", "labels", "why"),
    [
        ("Bewertung\tKlasse", LABELS, "every other label occurs more than once"),
        ("good film\tpositive", LABELS, "every other label occurs more than once"),
        ("Bewertung\tSterne", [1.5, 2.5, 3.5, 4.5], "all other labels are numbers"),
    ],
)
def test_a_first_line_that_may_be_names_is_asked_about(tmp_path, first, labels, why):
    path = lines(tmp_path / "t.tsv", first, labels)
    with pytest.raises(UsageError, match=r"line 1: is .* the names of the columns\?") as error:
        read_texts(path, target="label")
    assert why in str(error.value) and "text<TAB>label" in str(error.value)
    path.write_text("text\tlabel\n" + path.read_text())
    assert len(read_texts(path, target="label")[0]) == 5  # the first line is an example
    assert len(read_texts(lines(path, first, labels), target=first.split("\t")[1])[0]) == 4  # its name is the target


@pytest.mark.parametrize(
    ("first", "labels"),
    [
        ("good film\tpos", LABELS),
        ("good film\tfair", ["pos", "neg", "poor", "neg"]),  # another label occurs once too
        ("good film\t5", [1, 2, 1, 2]),  # a number among numbers
        ("good film, one of the best of a good year\tgreat", LABELS),  # too long for a name
        ("title\tpos", LABELS),  # a text of one word
    ],
)
def test_a_first_line_that_is_an_example(tmp_path, first, labels):
    texts, y = read_texts(lines(tmp_path / "t.tsv", first, labels), target="label")
    assert texts == [first.split("\t")[0], *TEXTS] and len(y) == 5


def test_few_lines_are_examples(tmp_path):
    (tmp_path / "t.tsv").write_text("good film\tpos\nbad\tneg\nbad film\tneg\n")
    assert len(read_texts(tmp_path / "t.tsv", target="label")[0]) == 3


def test_a_label_before_the_text(tmp_path, tokens):
    path = tmp_path / "t.tsv"
    path.write_text("Label\ttext\npos\tgood film\nneg\tbad\n")
    with pytest.raises(UsageError, match=r"the label before the text.*--target Label --columns text"):
        read_texts(path, target="label")
    found = read(path, Reading(("Label",), columns=("text",), tokenizer="some"), labeled=True)
    assert found.texts == ["good film", "bad"] and found.y.tolist() == ["pos", "neg"]


# Models, tokenizers and what transformers prints.


def test_a_folder_without_a_tokenizer(tmp_path, model):
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    for name in TOKENIZER_FILES:
        (bare / name).unlink(missing_ok=True)
    assert {path.name for path in bare.iterdir()} == {"config.json", "model.safetensors"}
    train = reviews(tmp_path / "t.csv", review=None, label=None)
    said = refused("adapt", model=f"hf:{bare}", train=train, target="label", out=tmp_path / "run")
    assert "has no tokenizer: none of tokenizer.json" in said and "tokenizer.save_pretrained" in said


def test_a_tokenizer_that_knows_no_word(tmp_path, model):
    assert tokenize(["good film", "bad zzz"], str(model), max_length=8)["input_ids"].shape == (2, 4)
    for texts, part in (
        (["ein guter Streifen", "schlecht"], "4 of the 4 tokens"),
        (["x " * 10 + "good"], "10 of the 11"),
    ):
        with pytest.raises(UsageError, match=r"tokenizer\.save_pretrained") as error:
            tokenize(texts, str(model), max_length=16)
        assert f"does not know {part}" in str(error.value)
    empty = Path(shutil.copytree(model, tmp_path / "empty"))
    (empty / "vocab.txt").unlink()
    (empty / "tokenizer.json").unlink()  # transformers makes a tokenizer without words from what is left
    with pytest.raises(UsageError, match=r"does not know 3 of the 3 tokens|finds no tokenizer"):
        tokenize(["good film", "bad"], str(empty), max_length=8)


def test_a_tokenizer_whose_unknown_token_is_its_padding(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "good": 1, "film": 2}, unk_token="[PAD]"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for more in ({"unk_token": "[PAD]"}, {}):
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=split, pad_token="[PAD]", **more)
        made.save_pretrained(tmp_path)
        assert tokenize(["good", "film " * 30], str(tmp_path), max_length=30)["input_ids"].shape == (2, 30)


def test_a_folder_that_does_not_exist(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")

    def fail(path):
        raise OSError("no access")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(
        UsageError, match=r"^There is no folder nonexist here, and transformers finds no model .*no access"
    ):
        load_network("hf:nonexist", None, seed=0, device=torch.device("cpu"))
    with pytest.raises(UsageError, match=r"^There is no folder nonexist here, and transformers finds no tokenizer"):
        tokenize(["good"], "nonexist", max_length=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^transformers finds no model at 'empty'"):
        load_network("hf:empty", None, seed=0, device=torch.device("cpu"))


def test_no_progress_bars(model, capsys):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        load_network(f"hf:{model}", None, seed=0, device=torch.device("cpu"))
        assert "Loading weights" not in capsys.readouterr().err
        assert logging.is_progress_bar_enabled()
        with pytest.raises(ZeroDivisionError), quiet_transformers():
            assert not logging.is_progress_bar_enabled()
            _ = 1 / 0
        assert logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        with quiet_transformers():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def test_a_table_of_texts_from_adapt_to_predict(tmp_path, model):
    rows = [[f"r{i}", text, label] for i, (text, label) in enumerate(zip(TEXTS * 2, LABELS * 2, strict=True))]
    train = write_table(tmp_path / "train.csv", ["who", "review", "label"], rows)
    new = write_table(tmp_path / "new.csv", ["review", "who"], [[row[1], row[0]] for row in rows])
    out = tmp_path / "run"
    how = {"target": "label", "id": "who", "params": "classifier.*", "inference": "map"}
    said = done("adapt", model=f"hf:{model}", train=train, test=train, out=out, **how)
    assert "train.csv: 8 texts of up to 6 tokens" in said and "Loading weights" not in said
    done("predict", "--run", out, "--data", new, "--out", tmp_path / "new-p.csv")
    done("predict", "--run", out, "--data", train, "--out", tmp_path / "train-p.csv")
    tested, unlabeled, labeled = (
        read_table(path) for path in (out / "predictions.csv", tmp_path / "new-p.csv", tmp_path / "train-p.csv")
    )
    assert tested["example"] == unlabeled["example"] == [row[0] for row in rows]
    assert labeled["target"] == [row[2] for row in rows] and "target" not in unlabeled
    for told in (unlabeled, labeled):
        p, q = (np.array(table["p_pos"], float) for table in (tested, told))
        np.testing.assert_allclose(q, p, rtol=1e-9)
