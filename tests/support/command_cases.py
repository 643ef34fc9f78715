"""What the tests of the commands share: small networks in a module, files of data, and running a command."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from typer.testing import CliRunner

from linnet.cli import app

NETWORKS = """
import torch
from torch import nn


def trained(build):
    # Weights that do not depend on the seed of the command, as those of a function that loads its weights.
    def call():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return call


def drawn():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def half_drawn():
    model = numbers()
    return nn.Sequential(model[0], nn.Tanh(), nn.Linear(6, 1))


@trained
def numbers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


@trained
def two():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@trained
def three():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@trained
def digits():
    return nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 3))


@trained
def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2))


def broken():
    raise ZeroDivisionError("no such thing")


def no_network():
    return 3


number = 3
"""


def run(*arguments: Any, **options: Any) -> Any:
    """Run a command; options as words, or by name: `out=path` for --out, `gray=True` for a flag."""
    words = list(arguments)
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*arguments: Any, **options: Any) -> str:
    """Run a command that has to succeed; what it printed."""
    result = run(*arguments, **options)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: Any, code: int = 2, **options: Any) -> str:
    """Run a command that has to fail; what it said, on one line."""
    result = run(*arguments, **options)
    assert result.exit_code == code, result.output
    assert "Error: " in result.output or "Usage:" in result.output, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def networks(folder: Path) -> str:
    """A file of networks; what goes before the colon of --model."""
    path = folder / "nets.py"
    path.write_text(NETWORKS)
    return str(path)


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def read_table(path: Path) -> dict[str, list[str]]:
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def diabetes(folder: Path, *, labels: bool = False) -> tuple[Path, Path]:
    """Training and test tables of four columns and a target ``y``: numbers, or "high" and "low"."""
    data = load_diabetes()
    X, y = 20 * data.data[:, [0, 2, 3, 8]], data.target / 100
    targets = ["high" if value > 1.4 else "low" for value in y] if labels else y.tolist()
    rows = [[*map(float, x), target] for x, target in zip(X, targets, strict=True)]
    header = ["age", "bmi", "bp", "s5", "y"]
    return (
        write_table(folder / "train.csv", header, rows[:60]),
        write_table(folder / "test.csv", header, rows[60:90]),
    )


def digits(folder: Path) -> tuple[Path, Path]:
    """Training and test arrays of the digits 0, 1 and 2."""
    data = load_digits(n_class=3)
    X, y = data.data / 16, data.target
    np.savez(folder / "train.npz", x=X[:30], y=y[:30])
    np.savez(folder / "test.npz", x=X[30:60], y=y[30:60])
    return folder / "train.npz", folder / "test.npz"


def pictures(folder: Path, *, count: int = 6) -> Path:
    """A folder of gray images of 8 x 8 pixels in two classes, one with lines across and one with lines down."""
    Image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    random = np.random.default_rng(0)
    for name, stripes in (("across", np.arange(8)[:, None]), ("down", np.arange(8)[None])):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = 255 * ((stripes + i) % 4 < 2) * np.ones((8, 8)) * random.uniform(0.7, 1, (8, 8))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder
