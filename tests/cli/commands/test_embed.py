"""`linnet embed` and `linnet spectrum`, and texts for Hugging Face models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import linnet
from linnet.cli import model_source
from tests.support.command_cases import digits, done, pictures, read_table, refused

CPU = torch.device("cpu")


def test_embed_and_what_it_says_about_new_data(tmp_path, nets):
    train, test = digits(tmp_path)
    out = tmp_path / "run"
    said = done("embed", "--model", f"{nets}:digits", "--data", train, "--components", 3, "--out", out)
    assert "effective rank" in said and "Jacobian (30 x 275)" in said
    written = "embedding.npz embedding.safetensors metrics.json report.html run.json"
    assert sorted(path.name for path in out.iterdir()) == written.split()
    with np.load(out / "embedding.npz") as file:
        E, values, y = file["embedding"], file["eigenvalues"], file["y"]
    assert E.shape == (30, 3) and y.tolist() == np.load(train)["y"].tolist()
    np.testing.assert_allclose(np.square(E).sum(0), values, rtol=1e-4)
    model = model_source.load_network(f"{nets}:digits", None, seed=0, device=CPU)
    X, Z = (torch.tensor(np.load(path)["x"], dtype=torch.float32) for path in (train, test))
    embedding = linnet.FisherEmbedding(model, 3).fit(X)
    np.testing.assert_allclose(values, embedding.eigenvalues_, rtol=1e-5)
    done("predict", "--run", out, "--data", test, "--out", tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz") as file:
        np.testing.assert_allclose(file["embedding"], embedding.transform(Z), rtol=1e-3, atol=1e-3)
    assert "must be a .npz file" in refused("predict", "--run", out, "--data", test, "--out", tmp_path / "e.csv")
    given = {"run": out, "out": tmp_path / "no"}
    for command, more in (
        ("select", {"data": test}),
        ("attribute", {"data": test, "train": train}),
        ("export", {"data": test}),
        ("forget", {"rows": train}),
    ):
        assert "was made by linnet embed, which fits no posterior" in refused(command, **given, **more)


def test_vectors_of_images_have_the_names_of_their_files(tmp_path, nets):
    folder, out = pictures(tmp_path / "images"), tmp_path / "run"
    done("embed", model=f"{nets}:images", data=folder, out=out, gray=True, components=2)
    done("predict", run=out, data=folder / "across", out=tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz") as file:
        assert file["names"].tolist() == sorted(path.name for path in (folder / "across").iterdir())
        assert file["embedding"].shape == (len(file["names"]), 2)


def test_data_that_the_network_does_not_take(tmp_path, nets):
    train, test = digits(tmp_path)
    with np.load(test) as file:
        np.savez(tmp_path / "wrong.npz", x=file["x"][:, :10])
    line = ("embed", "--model", f"{nets}:digits", "--components", "2")
    done(*line, "--data", train, "--out", tmp_path / "run")
    for refusal in (
        refused(*line, "--data", tmp_path / "wrong.npz", "--out", tmp_path / "no"),
        refused("predict", "--run", tmp_path / "run", "--data", tmp_path / "wrong.npz", "--out", tmp_path / "e.npz"),
    ):
        assert "The network does not take these data" in refusal
    assert not (tmp_path / "no").exists() and not (tmp_path / "e.npz").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--components", "0"], "--components must be"),
        (["--components", "x"], "--components must be"),
        (["--components", "99"], "Ask for at most 30"),
        (["--score", "best"], "--score must be one of"),
        (["--top", "evidence"], "--top must be a number of blocks; got 'evidence'"),
        (["--kernel", "rbf"], "--kernel must be"),
        (["--method", "qr"], "--method must be one of"),
    ],
)
def test_embeddings_that_cannot_be(tmp_path, nets, more, said):
    train, _ = digits(tmp_path)
    assert said in refused("embed", "--model", f"{nets}:digits", "--data", train, "--out", tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()


def test_spectrum(tmp_path, nets):
    train, _ = digits(tmp_path)
    line = ["spectrum", "--model", f"{nets}:digits", "--data", train]
    said = done(*line, "--out", tmp_path / "s.npz")
    assert "of the trace: 50% by" in said
    with np.load(tmp_path / "s.npz") as file:
        values, explained = file["eigenvalues"], file["explained"]
    assert len(values) == 30 and explained[-1] == pytest.approx(1)
    said = done(*line, "--components", 4)
    assert f"{values[3]:.4g}" in said
    assert "exists" in refused(*line, "--out", tmp_path / "s.npz")
    assert "must be a .npz file" in refused(*line, "--out", tmp_path / "s.csv")
    done(*line, "--out", tmp_path / "s.npz", "--force", "--kernel", "ntk")
    with np.load(tmp_path / "s.npz") as file:
        assert not np.allclose(file["eigenvalues"], values)


def bert(folder):
    """A tiny untrained model with a tokenizer of its own, as transformers saves them."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
    (folder / "vocab.txt").parent.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        num_labels=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_texts_with_a_hugging_face_model(tmp_path):
    model, out = bert(tmp_path / "bert"), tmp_path / "run"
    train, new = tmp_path / "train.tsv", tmp_path / "new.txt"
    train.write_text("text\tlabel\n" + "a good film\tpos\nbad film\tneg\ngood\tpos\na bad bad film\tneg\n" * 2)
    new.write_text("good good film\nbad\n")
    said = done("adapt", model=f"hf:{model}", train=train, test=train, out=out, params="classifier.*", inference="map")
    assert "8 texts of up to 6 tokens" in said and "18 of " in said
    assert "<blockquote>a bad bad film</blockquote>" in (out / "report.html").read_text()
    done("predict", "--run", out, "--data", new, "--out", tmp_path / "p.csv")
    told = read_table(tmp_path / "p.csv")
    assert set(told) == {"example", "prediction", "probability", "p_neg", "p_pos"}
    assert len(told["p_pos"]) == 2
