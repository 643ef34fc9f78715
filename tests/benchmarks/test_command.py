"""What `python -m benchmarks command` prepares and compares; no timing here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import command
from benchmarks.command import CASES, drawn, prepare, timed, tune


def test_files_and_networks_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "trained", lambda case, net, X, y, **given: net)
    for name, case in CASES.items():
        net = getattr(command, name)()
        assert sum(p.numel() for p in net.parameters()) == {"classes": 771, "regression": 705}.get(
            name, 3753 if case.outputs == 3 else 3651
        )
        prepare(tmp_path, name, 30)
        X, y = command._read(tmp_path / "train.csv")
        exact, targets = drawn(case, 30, change=0.5, seed=10)
        torch.testing.assert_close(X, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, targets.float(), rtol=1e-5, atol=1e-5)
        tune(str(tmp_path), name, 1)
        assert float(capsys.readouterr().out) > 0


def test_targets_are_all_classes_and_change_with_the_task() -> None:
    _, y = drawn(CASES["classes"], 500, change=0.0, seed=0)
    _, other = drawn(CASES["classes"], 500, change=0.5, seed=0)
    assert set(y.tolist()) == {0, 1, 2} and 0.05 < float((y != other).float().mean()) < 0.6


def test_a_command_that_fails_is_an_error() -> None:
    used, printed = timed([sys.executable, "-c", "print(7)"], 1)
    assert printed == "7\n" and used["seconds"] > 0
    with pytest.raises(RuntimeError, match=r"ended with 3:\n"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], 1)
