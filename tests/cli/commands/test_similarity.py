"""`linnet similarity`: how similar networks are on the same data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import linnet
from linnet.cli import model_source
from tests.support.command_cases import digits, done, refused

CPU = torch.device("cpu")


def test_similarity(tmp_path, nets):
    train, _ = digits(tmp_path)
    for seed in (1, 2):
        torch.save(
            model_source.load_network(f"{nets}:digits", None, seed=seed, device=CPU).state_dict(),
            tmp_path / f"{seed}.pt",
        )
    line = ["similarity", "--model", f"{nets}:digits", "--data", train]
    weights = ["--weights", tmp_path / "1.pt", "--weights", tmp_path / "2.pt"]
    done(*line, *weights, "--out", tmp_path / "s.json")
    found = json.loads((tmp_path / "s.json").read_text())
    a, b = (model_source.load_network(f"{nets}:digits", tmp_path / f"{seed}.pt", seed=0, device=CPU) for seed in (1, 2))
    X = torch.tensor(np.load(train)["x"], dtype=torch.float32)
    assert found["similarity"][0][1] == pytest.approx(linnet.similarity(a, b, X), rel=1e-6)
    assert found["similarity"][0][0] == 1
    done(*line, *weights, "--space", "parameters")
    assert "give --model twice" in refused(*line)
    assert "--space must be" in refused(*line, *weights, "--space", "weights")
    assert "Give --weights once for each --model" in refused(
        *line, "--model", f"{nets}:digits", "--weights", tmp_path / "1.pt"
    )
    assert "shapes cannot be multiplied" in refused(*line, "--model", f"{nets}:numbers")
