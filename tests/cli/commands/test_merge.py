"""`linnet merge`: the merged run predicts as a run on all data does; errors."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import linnet
from linnet.cli import model_source
from tests.support.command_cases import diabetes, done, networks, read_table, refused, write_table


@pytest.fixture
def sites(tmp_path):
    """Tables of two sites, of both together, and of new examples; and a file of networks."""
    train, test = diabetes(tmp_path)
    with train.open(newline="") as file:
        head, *rows = list(csv.reader(file))
    parts = [write_table(tmp_path / f"{i}.csv", head, rows[i::2]) for i in range(2)]
    return parts, train, test, networks(tmp_path)


def predictions(path):
    told = read_table(path)
    return np.array([[float(cell) for cell in told[name]] for name in ("mean", "std_observed")])


def test_merged_adaptations_predict_as_one_on_all_data(tmp_path, sites):
    parts, train, test, nets = sites
    how = {"model": f"{nets}:numbers", "target": "y", "prior": "0.5", "noise": "0.3", "mean": "network"}
    for i, part in enumerate(parts):
        done("adapt", train=part, out=tmp_path / f"site {i}", **how)
    done("adapt", train=train, test=test, out=tmp_path / "whole", **how)
    said = done("merge", "--run", tmp_path / "site 0", "--run", tmp_path / "site 1", "--out", tmp_path / "both")
    done("predict", run=tmp_path / "both", data=test, out=tmp_path / "p.csv")
    np.testing.assert_allclose(
        predictions(tmp_path / "p.csv"), predictions(tmp_path / "whole" / "predictions.csv"), rtol=1e-8
    )
    facts, whole = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("both", "whole"))
    assert facts["log_evidence"] == pytest.approx(whole["log_evidence"], rel=1e-8)
    assert f"log evidence of all data: {whole['log_evidence']:.1f}" in said
    assert "Several runs as one" in (tmp_path / "both" / "report.html").read_text()


def test_merged_error_bars_are_around_the_average_network(tmp_path, sites):
    parts, _, test, nets = sites
    given = []
    for i, part in enumerate(parts):
        network = model_source.load_network(f"{nets}:numbers", None, seed=0, device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.01 * (i + 1)
        save_file(network.state_dict(), tmp_path / f"{i}.safetensors")
        given.append((part, tmp_path / f"{i}.safetensors"))
    how = {"model": f"{nets}:numbers", "target": "y", "prior": "0.5", "noise": "0.3", "structure": "full"}
    for i, (part, weights) in enumerate(given):
        done("uncertainty", train=part, weights=weights, out=tmp_path / f"site {i}", **how)
    out = tmp_path / "both"
    done("merge", "--run", tmp_path / "site 0", "--run", tmp_path / "site 1", "--out", out)
    fits = []
    for i in range(2):
        network = model_source.load_network(f"{nets}:numbers", given[i][1], seed=0, device=torch.device("cpu"))
        fits.append(linnet.load(tmp_path / f"site {i}" / "laplace.safetensors", network))
    expected = linnet.merge(fits)
    for name, value in load_file(out / "weights.safetensors").items():
        torch.testing.assert_close(value, expected.model.state_dict()[name])
    assert json.loads((out / "run.json").read_text())["weights"] == "weights.safetensors"
    moved = out.rename(tmp_path / "moved")
    done("predict", run=moved, data=test, out=tmp_path / "p.csv")
    X = torch.tensor(np.array([read_table(test)[name] for name in ("age", "bmi", "bp", "s5")], dtype=np.float32).T)
    mean, std = expected.predict(X, return_std=True, noise=True)
    np.testing.assert_allclose(predictions(tmp_path / "p.csv"), np.stack([mean.numpy(), std.numpy()]), rtol=1e-6)


def test_runs_that_cannot_be_merged(tmp_path, sites):
    parts, _, _, nets = sites
    how = {"model": f"{nets}:numbers", "target": "y", "mean": "network"}
    done("adapt", train=parts[0], out=tmp_path / "a", prior="0.5", noise="0.3", **how)
    done("adapt", train=parts[1], out=tmp_path / "b", **how)
    done("adapt", train=parts[1], out=tmp_path / "fewer", columns="s5,bp,bmi,age", prior="0.5", noise="0.3", **how)
    done("adapt", train=parts[1], out=tmp_path / "head", **how | {"model": f"{nets}:three", "mean": "auto"})

    def merge(*runs, **more):
        words = [word for run in runs for word in ("--run", tmp_path / run)]
        return refused("merge", *words, "--out", tmp_path / "both", **more)

    assert "average" in merge("a", "b") or "other priors" in merge("a", "b")
    assert "differ in the columns" in merge("a", "fewer") and "--columns" in merge("a", "fewer")
    assert "has a head of its own" in merge("a", "head")
    assert "got 3 for 2 runs" in refused(
        *("merge", "--run", tmp_path / "a", "--run", tmp_path / "a", "--out", tmp_path / "both"),
        *(word for _ in range(3) for word in ("--weights", tmp_path / "w.pt")),
    )
    assert not (tmp_path / "both").exists()


def test_noise_of_classes(tmp_path, nets):
    train, _ = diabetes(tmp_path, labels=True)
    given = {"model": f"{nets}:two", "train": train, "target": "y", "out": tmp_path / "run"}
    assert "classes have none" in refused("adapt", noise="0.1", **given)
    for noise in ("-1", "much", "inf"):
        assert "--noise must be evidence, per-output or a positive variance" in refused("adapt", noise=noise, **given)
