"""Whether the error bars of the regressor mean what they say, on data drawn from its own model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from linnet import TangentRegressor, linearize
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def test_intervals_cover_what_they_promise_on_data_from_the_model() -> None:
    model = mlp()
    X, Z = normal(40, 3), normal(50, 3, seed=1)
    J, N = dense_jacobian(model, X), dense_jacobian(model, Z)
    f, g = model(X).detach().flatten(), model(Z).detach().flatten()
    scale, noise, draws = 0.5, 0.1, 200
    w = scale**0.5 * normal(draws, J.shape[1], seed=1)
    y = f + w @ J.T + noise**0.5 * normal(draws, 40, seed=2)
    truth = g + w @ N.T
    observed = truth + noise**0.5 * normal(draws, 50, seed=3)

    def covered(regs: list[TangentRegressor], values: Tensor, *, noisy: bool) -> float:
        found = [reg.predict(Z, return_std=True, noise=noisy) for reg in regs]
        mean, std = (torch.stack(column) for column in zip(*found, strict=True))
        return float(((values - mean).abs() < 1.96 * std).double().mean())

    known = TangentRegressor(model, prior=scale, noise=noise).fit_tasks([(X, targets) for targets in y]).tasks_
    some = 60  # 3000 intervals
    chosen = [TangentRegressor(model).fit(X, targets) for targets in y[:some]]
    assert 0.93 <= covered(known, truth, noisy=False) <= 0.97
    assert 0.93 <= covered(known, observed, noisy=True) <= 0.97
    assert 0.93 <= covered(chosen, observed[:some], noisy=True) <= 0.97


@pytest.mark.parametrize("noise", [0.01, 10.0])
def test_intervals_cover_with_five_observations_where_prior_and_noise_are_given(noise: float) -> None:
    model = mlp()
    X, Z = normal(5, 3), normal(20, 3, seed=1)
    J, N = dense_jacobian(model, X), dense_jacobian(model, Z)
    f, g = model(X).detach().flatten(), model(Z).detach().flatten()
    scale, draws = 0.5, 100
    w = scale**0.5 * normal(draws, J.shape[1], seed=1)
    y = f + w @ J.T + noise**0.5 * normal(draws, 5, seed=2)
    truth = g + w @ N.T
    observed = truth + noise**0.5 * normal(draws, 20, seed=3)
    tasks = (
        TangentRegressor(model, mean="network", prior=scale, noise=noise)
        .fit_tasks([(X, targets) for targets in y])
        .tasks_
    )
    new = linearize(model).jacobian(Z).cached()
    mean = g + torch.stack([reg.posterior_.shift(new)[:, 0] for reg in tasks])
    variance = torch.stack([reg.posterior_.variance(new)[:, 0] for reg in tasks])
    for values, added in ((truth, 0.0), (observed, noise)):
        inside = ((values - mean).abs() < 1.96 * (variance + added).sqrt()).double().mean(1)  # of each data set
        error = float(inside.std()) / draws**0.5
        assert abs(float(inside.mean()) - 0.95) < 3 * error


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 12), more=st.integers(1, 5), seed=st.integers(0, 1000), noise=st.floats(1e-3, 10))
def test_variance_never_rises_with_more_data(n: int, more: int, seed: int, noise: float) -> None:
    model = mlp(2, seed=seed)
    X, y, Z = normal(n + more, 3, seed=seed), normal(n + more, 2, seed=seed + 1), normal(5, 3, seed=seed + 2)
    prior = (0.5 * dense_jacobian(model, Z).square().sum(1)).sqrt().view(5, 2)
    for solver in ("function", "weight"):
        reg = TangentRegressor(model, prior=0.5, noise=noise, solver=solver)
        few = reg.fit(X[:n], y[:n]).predict(Z, return_std=True)[1]
        many = reg.fit(X, y).predict(Z, return_std=True)[1]
        assert bool((many <= few * (1 + 1e-7)).all()) and bool((few <= prior * (1 + 1e-7)).all())
        assert bool((many < prior).all())
        assert torch.isfinite(many).all()
