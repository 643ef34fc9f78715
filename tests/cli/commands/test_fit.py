"""`linnet adapt`, `uncertainty` and `predict`, from files to files."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import linnet
from linnet.cli import model_source
from tests.support.command_cases import diabetes, digits, done, pictures, read_table, refused, write_table


def test_regression_from_tables(tmp_path, nets, monkeypatch):
    train, test = diabetes(tmp_path)
    weights, out = tmp_path / "w.safetensors", tmp_path / "run"
    save_file(
        model_source.load_network(f"{nets}:numbers", None, seed=7, device=torch.device("cpu")).state_dict(), weights
    )
    monkeypatch.setattr(sys, "argv", ["/usr/bin/linnet", "adapt", "--out", "my run"])
    files = {"weights": weights, "train": train, "test": test, "out": out}
    said = done("adapt", model=f"{nets}:numbers", **files, target="y", standardize=True)
    for part in "60 rows of 4 columns", "regression, because", "37 of 37 parameters", "Jacobian (60 x 37)", "of memory":
        assert part in said
    for part in "log evidence", "noise standard deviation", "layers that adapt most":
        assert part in said
    written = "adapter.safetensors metrics.json predictions.csv report.html run.json"
    assert sorted(path.name for path in out.iterdir()) == written.split()
    for path in out.iterdir():
        assert str(path) in said
    found = json.loads((out / "metrics.json").read_text())
    assert found["command"] == "linnet adapt --out 'my run'"
    assert found["versions"]["linnet"] == linnet.__version__ and found["seed"] == 0
    assert found["test"]["adapted"]["rmse"] < found["test"]["network as it was"]["rmse"]
    # The same by hand.
    rows = [np.array(list(map(float, column))) for column in read_table(train).values()]
    X, y = np.stack(rows[:4], 1), rows[4]
    Z = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    model = model_source.load_network(f"{nets}:numbers", weights, seed=0, device=torch.device("cpu"))
    reg = linnet.TangentRegressor(model).fit(Z, y)
    assert found["log_evidence"] == pytest.approx(reg.log_evidence_, rel=1e-9)
    new = np.stack([np.array(list(map(float, column))) for column in read_table(test).values()][:4], 1)
    mean, std = reg.predict(torch.tensor((new - X.mean(0)) / X.std(0), dtype=torch.float32), return_std=True)
    told = read_table(out / "predictions.csv")
    np.testing.assert_allclose(np.array(told["mean"], float), mean.numpy(), rtol=1e-9)
    np.testing.assert_allclose(np.array(told["std"], float), std.numpy(), rtol=1e-7)
    assert all(float(a) < float(b) for a, b in zip(told["std"], told["std_observed"], strict=True))
    # And from the files, without the target and with the columns in another order.
    columns = read_table(test)
    moved = write_table(
        tmp_path / "new.csv",
        ["s5", "age", "bp", "bmi"],
        list(zip(*(columns[k] for k in ("s5", "age", "bp", "bmi")), strict=True)),
    )
    said = done("predict", "--run", out, "--data", moved, "--out", tmp_path / "p.csv")
    assert "its code is imported" in said and "TangentRegressor" in said
    again = read_table(tmp_path / "p.csv")
    np.testing.assert_allclose(np.array(again["mean"], float), np.array(told["mean"], float), rtol=1e-9)
    np.testing.assert_allclose(np.array(again["low95"], float), np.array(told["low95"], float), rtol=1e-7)
    assert "exists" in refused("predict", "--run", out, "--data", moved, "--out", tmp_path / "p.csv")
    assert "must be a .csv file" in refused("predict", "--run", out, "--data", moved, "--out", tmp_path / "o.npz")
    fewer = write_table(tmp_path / "few.csv", ["age", "bmi"], [[1, 2]])
    assert "no column 'bp', 's5'" in refused("predict", "--run", out, "--data", fewer, "--out", tmp_path / "q.csv")
    # Other weights than those of the run are refused by their checksum.
    torch.save({k: t + 1 for k, t in model.state_dict().items()}, tmp_path / "other.pt")
    said = refused(
        "predict", "--run", out, "--data", moved, "--out", tmp_path / "q.csv", "--weights", tmp_path / "other.pt"
    )
    assert "fitted around other weights" in said
    assert not (tmp_path / "q.csv").exists()


def test_classes_from_arrays(tmp_path, nets):
    train, test = digits(tmp_path)
    out = tmp_path / "run"
    files = {"model": f"{nets}:digits", "train": train, "test": test, "out": out}
    said = done("adapt", **files, top=1, seed=4)
    network = model_source.load_network(f"{nets}:digits", None, seed=4, device=torch.device("cpu"))
    assert linnet.load(out / "adapter.safetensors", network).seed == 4
    assert "classification, because the targets are 3 whole numbers" in said
    assert "the network's outputs are the classes 0, 1, 2" in said
    assert "inference: vi" in said
    told = read_table(out / "predictions.csv")
    p = np.array([told[f"p_{label}"] for label in range(3)], float).T
    np.testing.assert_allclose(p.sum(1), 1)
    assert [int(label) for label in told["prediction"]] == p.argmax(1).tolist()
    assert all(float(s) > 0 for s in told["logit_std"])
    assert json.loads((out / "metrics.json").read_text())["test"]["adapted"]["accuracy"] > 0.8
    said = done("predict", "--run", out, "--data", test, "--out", tmp_path / "p.csv")
    assert "accuracy" in said
    again = read_table(tmp_path / "p.csv")
    assert again["prediction"] == told["prediction"]


def test_a_new_head_for_other_classes(tmp_path, nets):
    train, test = diabetes(tmp_path, labels=True)
    out = tmp_path / "run"
    files = {"train": train, "test": test, "out": out}
    said = done("adapt", model=f"{nets}:numbers", **files, target="y", head="new", inference="map")
    assert "a new head is fitted" in said and "--head new asks for it" in said
    assert "mean function: zero" in said
    assert (out / "head.safetensors").is_file()
    told = read_table(out / "predictions.csv")
    assert set(told["prediction"]) <= {"high", "low"}
    assert "logit_std" not in told  # a mode has no error bars
    done("predict", "--run", out, "--data", test, "--out", tmp_path / "p.csv")
    again = read_table(tmp_path / "p.csv")
    np.testing.assert_allclose(np.array(again["p_high"], float), np.array(told["p_high"], float), rtol=1e-6)


def test_a_new_head_where_outputs_do_not_fit(tmp_path, nets):
    train, _ = diabetes(tmp_path)
    said = done("adapt", "--model", f"{nets}:two", "--train", train, "--target", "y", "--out", tmp_path / "run")
    assert "because the network has 2 outputs, for these numbers" in said
    done("predict", "--run", tmp_path / "run", "--data", train, "--out", tmp_path / "p.csv")
    assert len(read_table(tmp_path / "p.csv")["mean"]) == 60


def test_labels_that_are_numbers_of_outputs(tmp_path, nets):
    train, _ = digits(tmp_path)
    with np.load(train) as file:
        x, y = file["x"], file["y"]
    np.savez(train, x=x[y < 2], y=y[y < 2])
    line = ["adapt", "--model", f"{nets}:digits", "--train", train, "--inference", "map"]
    assert "a new head is fitted" in done(*line, "--out", tmp_path / "new")
    said = done(*line, "--head", "keep", "--out", tmp_path / "kept")
    assert "the network's outputs are the classes 0, 1, 2" in said
    assert not (tmp_path / "kept" / "head.safetensors").exists()


def test_several_numbers(tmp_path, nets):
    train, _ = diabetes(tmp_path)
    columns = read_table(train)
    columns["z"] = [str(2 * float(value)) for value in columns["y"]]
    path = write_table(tmp_path / "both.csv", list(columns), list(zip(*columns.values(), strict=True)))
    out = tmp_path / "run"
    options = ["--target", "y", "--target", "z", "--test", path, "--out", out]
    done("adapt", "--model", f"{nets}:two", "--train", path, *options)
    told = read_table(out / "predictions.csv")
    assert {"mean_y", "std_y", "mean_z", "low95_z", "high95_z"} <= set(told)
    assert not (out / "head.safetensors").exists()


def test_image_folders(tmp_path, nets):
    folder, out = pictures(tmp_path / "images"), tmp_path / "run"
    (folder / "down" / "broken.png").write_text("no image")
    line = ["adapt", "--model", f"{nets}:images", "--train", folder, "--out", out, "--gray", "--inference", "laplace"]
    said = done(*line)
    assert "Note: 1 of 13 images cannot be read and are left out: 'down/broken.png'." in " ".join(said.split())
    assert "12 images of 1 x 8 x 8, pixels from 0 to 1" in said
    assert "pixels from 0 to 1" not in (tmp_path / "run" / "report.html").read_text()
    assert "classes across, down" in said
    assert "cannot be read as an image" in refused(*line, "--strict", "--force")
    done("predict", "--run", out, "--data", folder / "across", "--out", tmp_path / "p.csv")
    told = read_table(tmp_path / "p.csv")
    assert told["example"][0] == "0.png" and len(told["p_down"]) == 6


def test_uncertainty(tmp_path, nets):
    train, test = diabetes(tmp_path)
    out = tmp_path / "run"
    model = model_source.load_network(f"{nets}:numbers", None, seed=0, device=torch.device("cpu"))
    columns = [torch.tensor(list(map(float, column))) for column in read_table(train).values()]
    X, y = torch.stack(columns[:4], 1), columns[4]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def loss():
        optimizer.zero_grad()
        value = (model(X)[:, 0] - y).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    files = {"weights": tmp_path / "w.pt", "train": train, "test": test, "out": out}
    said = done("uncertainty", model=f"{nets}:numbers", **files, target="y", structure="full", seed=5)
    assert "structure 'full'" in said and "with error bars" in said
    assert "of 37 parameters are determined by the data" in said and "noise standard deviation" in said
    (kept,) = out.glob("*.safetensors")
    assert linnet.load(kept, model).seed == 5
    told = read_table(out / "predictions.csv")
    la = linnet.Laplace(model, "regression", "full").fit(X, y.double())
    mean, std = la.predict(
        torch.stack([torch.tensor(list(map(float, c))) for c in read_table(test).values()][:4], 1), return_std=True
    )
    np.testing.assert_allclose(np.array(told["mean"], float), mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(np.array(told["std"], float), std.numpy(), rtol=1e-4)
    done("predict", "--run", out, "--data", test, "--out", tmp_path / "p.csv")
    again = read_table(tmp_path / "p.csv")
    np.testing.assert_allclose(np.array(again["std"], float), np.array(told["std"], float), rtol=1e-6)
    train, _ = diabetes(tmp_path, labels=True)
    wrong = {"model": f"{nets}:digits", "train": train, "target": "y", "out": tmp_path / "no"}
    assert "The network does not take these data" in refused("uncertainty", **wrong)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("command", ["adapt", "uncertainty"])
def test_samples_say_how_far_off_they_are(tmp_path, nets, command):
    train, _ = diabetes(tmp_path)
    files = {"model": f"{nets}:numbers", "train": train, "out": tmp_path / "run"}
    said = done(command, **files, target="y", variance="samples")
    assert "error bars from posterior samples, with a relative standard error of" in said


def test_error_bars_are_for_the_networks_own_targets(tmp_path, nets):
    train, _ = digits(tmp_path)
    np.savez(train, x=np.load(train)["x"], y=np.arange(30) % 5)
    said = refused("uncertainty", "--model", f"{nets}:digits", "--train", train, "--out", tmp_path / "run")
    assert "3 outputs, but the targets are 5 classes" in said and "Use linnet adapt" in said


@pytest.mark.parametrize("command", ["adapt", "uncertainty"])
def test_several_weights_make_an_ensemble(command, tmp_path, nets):
    train, test = diabetes(tmp_path)
    out, paths = tmp_path / "run", [tmp_path / f"{seed}.safetensors" for seed in (7, 8)]
    network = model_source.load_network(f"{nets}:numbers", None, seed=7, device=torch.device("cpu"))
    for factor, path in zip((1.0, 1.5), paths, strict=True):
        save_file({name: factor * value for name, value in network.state_dict().items()}, path)
    given = {"train": train, "test": test, "out": out, "target": "y", "standardize": True}
    flags = [flag for path in paths for flag in ("--weights", path)]
    said = done(command, *flags, model=f"{nets}:numbers", **given)
    assert "an ensemble of 2 networks" in said and "weights of the networks: 0.5, 0.5" in said
    found = json.loads((out / "metrics.json").read_text())
    assert len(found["members"]) == 2 and found["weights"] == [0.5, 0.5]
    page = (out / "report.html").read_text()
    assert "weights of the networks" in page and "of the first network" in page
    told = read_table(out / "predictions.csv")
    done("predict", "--run", out, "--data", test, "--out", tmp_path / "p.csv")
    assert read_table(tmp_path / "p.csv")["mean"] == told["mean"]
    flags = [flag for path in paths[::-1] for flag in ("--weights", path)]
    said = refused("predict", "--run", out, "--data", test, "--out", tmp_path / "q.csv", *flags)
    assert "was fitted around other weights" in said
    assert str(paths[0]) in done("info", out)
    one = done(command, "--weights", paths[0], "--force", model=f"{nets}:numbers", **given)
    assert "an ensemble of" not in one


def test_networks_of_an_ensemble_keep_their_heads(tmp_path, nets):
    train, _ = diabetes(tmp_path)
    flags = []
    for seed in (7, 8):
        path = tmp_path / f"{seed}.safetensors"
        network = model_source.load_network(f"{nets}:numbers", None, seed=seed, device=torch.device("cpu"))
        save_file(network.state_dict(), path)
        flags += ["--weights", path]
    given = {"model": f"{nets}:numbers", "train": train, "out": tmp_path / "run", "target": "y", "head": "new"}
    assert "An ensemble needs networks whose outputs fit" in refused("adapt", *flags, **given)


@pytest.mark.parametrize("labels", [False, True])
def test_data_that_the_network_was_trained_on(tmp_path, nets, labels):
    train, test = diabetes(tmp_path, labels=labels)
    columns = read_table(train)
    both = list(zip(*columns.values(), strict=True))
    few, old = (
        write_table(tmp_path / f"{name}.csv", list(columns), rows)
        for name, rows in (("few", both[:20]), ("old", both[20:]))
    )
    network = f"{nets}:two" if labels else f"{nets}:numbers"
    given = {"model": network, "train": few, "test": test, "target": "y", "source": old, "out": tmp_path / "run"}
    said = done("adapt", **given)
    assert "old.csv: 40 rows of 4 columns, which the network was trained on" in said
    assert "mean function: zero" in said
    assert f"a dense kernel ({60 * (1 + labels)} x " in said or "weights (" in said
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found["examples"] == 20 and found["source_examples"] == 40
    assert "own training" in (tmp_path / "run" / "report.html").read_text()
    # The same by hand.
    X, y = np.array([row[:4] for row in both], float), np.array([row[4] for row in both])
    y = y if labels else y.astype(float)
    X, model = (
        torch.tensor(X, dtype=torch.float32),
        model_source.load_network(network, None, seed=0, device=torch.device("cpu")),
    )
    kind = linnet.TangentClassifier(model, classes=["high", "low"]) if labels else linnet.TangentRegressor(model)
    fitted = kind.fit(X[:20], y[:20], source=(X[20:], y[20:]))
    assert found["log_evidence"] == pytest.approx(fitted.log_evidence_, rel=1e-9)
    done("predict", "--run", tmp_path / "run", "--data", test, "--out", tmp_path / "p.csv")
    again, first = read_table(tmp_path / "p.csv"), read_table(tmp_path / "run" / "predictions.csv")
    assert list(again) == list(first)
    for name, column in first.items():
        if isinstance(column[0], str) and not column[0].lstrip("-").replace(".", "").replace("e-", "").isdigit():
            assert again[name] == column
        else:  # sums of another alignment of memory round in another way
            assert [float(v) for v in again[name]] == pytest.approx([float(v) for v in column], rel=1e-12)


def test_source_data_that_cannot_be(tmp_path, nets):
    train, test = diabetes(tmp_path)
    given = {"model": f"{nets}:numbers", "train": train, "out": tmp_path / "run", "target": "y"}
    assert "needs a mean function of zero" in refused("adapt", source=test, mean="network", **given)
    assert "There is no" in refused("adapt", source=tmp_path / "none.csv", **given)
    assert "keeps its outputs" in refused("adapt", source=test, head="new", **given)
    other = write_table(tmp_path / "other.csv", ["age", "bmi", "bp", "s5", "y"], [[1, 2, 3, 4, "high"]] * 3)
    assert "must be numbers of the same shape" in refused("adapt", source=other, **given)
    assert "No such option" in refused("uncertainty", source=test, **given)


def test_features_of_the_inputs_and_other_weights(tmp_path, nets):
    train, _ = diabetes(tmp_path)
    how = {"model": f"{nets}:numbers", "train": train, "target": "y", "standardize": True, "random_weights": True}
    said = done("adapt", **how, input_features="yes", out=tmp_path / "with")
    lengths = re.findall(r"features of the inputs: length scale ([\d.]+)", said)
    assert len(lengths) == 1
    saved = linnet.load(
        tmp_path / "with" / "adapter.safetensors",
        model_source.load_network(how["model"], None, seed=0, device=torch.device("cpu")),
    )
    assert saved.inputs is True and saved.inputs_ == float(lengths[0])
    said = done("adapt", **how, input_features="no", relinearize=2, mean="network", out=tmp_path / "without")
    assert "features of the inputs" not in said and "linearized again: log evidence" in said
    message = refused("adapt", **how, input_features="true", out=tmp_path / "never")
    assert "--input-features must be one of auto, yes, no; got 'true'" in " ".join(message.split())
