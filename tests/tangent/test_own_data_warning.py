"""The score that tells a network's own training data, by hand and on trained networks."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import linnet
from linnet.inference import Noise, Task
from linnet.tangent.own_data_warning import OWN_DATA, own_data_score


def task(energy: torch.Tensor, noise: float | torch.Tensor = 1.0, *, rank: int | None = None) -> Task:
    """Residuals whose energies lie along the eigenvectors of a diagonal kernel, the largest eigenvalue first."""
    n = len(energy)
    model = nn.Linear(n, 1, bias=False).double()
    values = torch.linspace(2, 1, n, dtype=torch.float64) * (torch.arange(n) < (n if rank is None else rank))
    J, r = linnet.linearize(model).jacobian(torch.diag(values)), energy.sqrt()
    known = Noise(torch.ones(n, dtype=torch.float64) * noise, torch.zeros(n, dtype=torch.long))
    return Task(J, r, known, torch.zeros(n, 1))


def expected(values: torch.Tensor, energy: torch.Tensor) -> float:
    """The smaller rank correlation of all pairs, and of those without the largest quarter of the values."""
    order = values.argsort(stable=True)
    values, energy, n = values[order], energy[order], len(values)
    return min(spearmanr(values[:m], energy[:m]).statistic * math.sqrt(m - 1) for m in (n, n - n // 4))


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.float64)


def test_the_score_is_a_rank_correlation_in_standard_errors() -> None:
    energy = torch.tensor([4.0, 9.0, 1.5, 2.0, 4.5, 1.0, 0.1, 3.0, 2.5, 2.2, 1.1, 1.2]).double()
    wanted = expected(torch.arange(12, 0, -1), energy)
    assert wanted > 0
    assert own_data_score(task(energy), ones(12)) == pytest.approx(wanted, rel=1e-9)
    assert own_data_score(task(energy, noise=7.0), ones(12)) == pytest.approx(wanted, rel=1e-9)
    assert own_data_score(task(energy), 3 * ones(12)) == pytest.approx(wanted, rel=1e-9)
    rising = own_data_score(task(energy.flip(0)), ones(12))
    assert rising == pytest.approx(expected(torch.arange(12, 0, -1), energy.flip(0)), rel=1e-9) and rising < 0


def test_a_gradient_that_an_optimizer_left_does_not_hide_the_rest() -> None:
    energy = torch.arange(40, dtype=torch.float64) + 1
    energy[:8] = 1e3 + torch.arange(8)
    assert own_data_score(task(energy), ones(40)) == pytest.approx(expected(torch.arange(40, 0, -1), energy), rel=1e-9)
    assert own_data_score(task(energy), ones(40)) < -3 < spearmanr(torch.arange(40, 0, -1), energy).statistic


def test_eigenvalues_of_rounding_have_one_rank() -> None:
    energy = torch.tensor([4.0, 9.0, 1.5, 2.0, 4.5, 1.0, 0.1, 3.0]).double()
    wanted = expected(torch.tensor([8, 7, 6, 5, 4, 0, 0, 0]), energy)
    assert own_data_score(task(energy, rank=5), ones(8)) == pytest.approx(wanted, rel=1e-9)
    assert own_data_score(task(energy, rank=0), ones(8)) == math.inf


def test_rows_count_by_their_noise() -> None:
    """With noise that falls faster than the kernel the last rows come first; energies are those of whitened rows."""
    energy = torch.tensor([1.0, 2.0, 4.0, 1.1, 1.2, 3.0, 5.0, 7.0]).double()
    noise = torch.linspace(2, 1, 8, dtype=torch.float64) ** 4
    wanted = expected(torch.arange(8), energy / noise)
    assert own_data_score(task(energy, noise), ones(8)) == pytest.approx(wanted, rel=1e-9)


def test_of_many_rows_some_are_looked_at() -> None:
    """1,000 rows: examples from the first to the last."""
    energy = torch.arange(1000, dtype=torch.float64) + 1
    assert own_data_score(task(energy), ones(1000)) == pytest.approx(-math.sqrt(499), rel=1e-9)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_networks_that_adam_trained_are_told(activation: type[nn.Module]) -> None:
    """Minibatches of 16 leave a gradient along the leading eigenvectors."""
    torch.manual_seed(1)
    X = torch.randn(300, 5)
    y = torch.sin(2 * X[:, 0]) * X[:, 1] + 0.5 * torch.randn(300)
    model = nn.Sequential(nn.Linear(5, 30), activation(), nn.Linear(30, 30), activation(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(80):
        optimizer.param_groups[0]["lr"] = 1e-2 if epoch < 60 else 1e-3
        for i in torch.randperm(150).split(16):
            optimizer.zero_grad()
            (model(X[i])[:, 0] - y[i]).square().mean().backward()
            optimizer.step()
    with pytest.warns(UserWarning, match="as if it had been trained on them"):
        linnet.TangentRegressor(model).fit(X[:150], y[:150])
    regressor = linnet.TangentRegressor(model).fit(X[150:], y[150:])
    assert own_data_score(regressor._train, regressor.prior_.base) > OWN_DATA + 1
