"""The ratio that tells a network's own training data, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import linnet
from linnet.inference import Noise, Task
from linnet.tangent.own_data_warning import own_data_ratio


def task(energy: torch.Tensor, noise: float | torch.Tensor = 1.0) -> Task:
    """Residuals whose energies lie along the eigenvectors of a diagonal kernel, the largest eigenvalue first."""
    n = len(energy)
    model = nn.Linear(n, 1, bias=False).double()
    X = torch.diag(torch.linspace(2, 1, n, dtype=torch.float64))
    J, r = linnet.linearize(model).jacobian(X), energy.sqrt()
    known = Noise(torch.ones(n, dtype=torch.float64) * noise, torch.zeros(n, dtype=torch.long))
    return Task(J, r, known, torch.zeros(n, 1))


def test_the_leading_quarter_is_compared_with_the_rest() -> None:
    energy = torch.tensor([4.0, 9.0, 1.0, 2.0, 4.0, 1.0, 1.0, 3.0, 2.0, 2.0, 1.0, 1.0]).double()
    S = torch.ones(12, dtype=torch.float64)
    # The median of 4, 9 and 1, and the mean of the nine others.
    wanted = 4.0 / (0.455 * 17 / 9)
    assert own_data_ratio(task(energy), S) == pytest.approx(wanted, rel=1e-9)
    assert own_data_ratio(task(energy, noise=7.0), S) == pytest.approx(wanted, rel=1e-9)
    assert own_data_ratio(task(energy), 3 * S) == pytest.approx(wanted, rel=1e-9)
    assert own_data_ratio(task(energy * (torch.arange(12) < 3)), S) == math.inf


def test_rows_count_by_their_noise() -> None:
    """With noise that falls faster than the kernel the last rows come first; energies are those of whitened rows."""
    energy = torch.tensor([1.0, 2.0, 4.0, 1.0, 1.0, 3.0, 5.0, 7.0]).double()
    noise = torch.linspace(2, 1, 8, dtype=torch.float64) ** 4
    white = (energy / noise).flip(0)
    wanted = float(white[:2].min() / (0.455 * white[2:].mean()))  # torch takes the lower of two as their median
    assert own_data_ratio(task(energy, noise), torch.ones(8, dtype=torch.float64)) == pytest.approx(wanted, rel=1e-9)


def test_of_many_rows_some_are_looked_at() -> None:
    """600 rows: examples from the first to the last."""
    many = task(torch.ones(600, dtype=torch.float64))
    assert own_data_ratio(many, torch.ones(600, dtype=torch.float64)) == pytest.approx(1 / 0.455, rel=1e-9)
