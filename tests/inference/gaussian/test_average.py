"""The average over scale and noise against a mixture that is written out: each grid point a dense posterior."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import TangentRegressor
from linnet.inference.problem import assumed_noise
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal

DENSE = ["function", "weight"]
CASES: dict[str, dict[str, Any]] = {
    "both": {},
    "noise given": {"noise": 0.3},
    "prior given": {"prior": 0.5},
    "noise of each": {"noise": np.linspace(0.1, 0.6, 24).reshape(12, 2)},
    "no floor": {"noise_floor": 0.0},
}


def mlp(outputs: int = 2, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)), seed)


def problem(model: nn.Module, n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = normal(n, 3, seed=seed)
    f = model(X).detach()
    return X, f + 0.4 * torch.sin(2 * X[:, :1]) + 0.5 * normal(*f.shape, seed=seed + 2)


class Mixture(NamedTuple):
    """Mean and covariance of the displacement, and the averages."""

    mean: Tensor
    cov: Tensor
    scale: float
    noise: float


def mixture(reg: TangentRegressor, J: Tensor) -> Mixture:
    """By a grid over the logarithms of noise / scale and of the noise, each point a posterior in weight space."""
    task, free_scale, free_noise = reg._train, bool(reg.prior_.scales), isinstance(reg.noise, str)
    S0, base, r = reg.prior_.base, task.noise.base, task.r
    K = base.rsqrt()[:, None] * (J * S0 @ J.T) * base.rsqrt()
    (energy,) = assumed_noise([task])
    values, Q = torch.linalg.eigh(K)
    top = float(values[-1])
    ratios = torch.linspace(math.log(top) - 25, math.log(1e8 * top), 401, dtype=torch.float64).exp()
    noises = torch.arange(-12, 14, 0.125, dtype=torch.float64).exp()
    if not free_noise:
        noises = torch.ones(1, dtype=torch.float64)
    along = (Q.T @ (r * base.rsqrt())).square()
    logs, times = [], []
    for ratio in ratios.tolist():
        v = noises if free_scale else torch.full((1,), ratio, dtype=torch.float64)
        d = v[:, None] * (values.clamp_min(0) / ratio + 1)
        prior = -0.5 * energy / v if free_noise else torch.zeros_like(v)
        logs.append(prior - 0.5 * (d.log() + along / d).sum(1))
        times.append(v)
    logs[-1] -= math.log(2)  # the trapezoidal rule; the smallest ratio has no weight
    weights = torch.softmax(torch.cat(logs), 0).view(len(ratios), -1)
    v = torch.stack(times)
    scales = v / ratios[:, None]
    # The posterior of the weights depends on the ratio, and its covariance is the scale times that of scale one.
    deltas, cov = [], torch.zeros(J.shape[1], J.shape[1], dtype=torch.float64)
    for ratio, scale in zip(ratios.tolist(), (weights * scales).sum(1).tolist(), strict=True):
        H = torch.diag(1 / S0) + J.T @ (J / (ratio * base)[:, None])
        deltas.append(torch.linalg.solve(H, J.T @ (r / (ratio * base))))
        cov += scale * torch.linalg.inv(H)
    D, w = torch.stack(deltas, 1), weights.sum(1)
    m = D @ w
    cov += ((D - m[:, None]) * w) @ (D - m[:, None]).T
    return Mixture(m, cov, float((weights * scales).sum()), float((weights * v).sum()))


def fitted(solver: str, case: str, n: int = 12) -> tuple[TangentRegressor, Tensor, Tensor]:
    model = mlp()
    X, y = problem(model, n)
    return TangentRegressor(model, solver=solver, inputs=False, **CASES[case]).fit(X, y), X, y


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("case", CASES)
def test_the_posterior_is_the_mixture(solver: str, case: str) -> None:
    reg, X, _ = fitted(solver, case)
    assert reg.averaged_
    expected = mixture(reg, dense_jacobian(reg.model, X))
    Z = normal(5, 3, seed=9)
    A = dense_jacobian(reg.model, Z)
    mean, cov = reg.predict(Z, return_cov=True)
    torch.testing.assert_close((mean - reg.lin_(Z)).flatten(), A @ expected.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cov, A @ expected.cov @ A.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reg.posterior_.delta, expected.mean, rtol=1e-9, atol=1e-9)
    if reg.prior_.scales:
        assert reg.scales_["all"] == pytest.approx(expected.scale, rel=1e-9)
        torch.testing.assert_close(reg.prior_variance_, expected.scale * reg.prior_.base, rtol=1e-9, atol=0)
    if isinstance(reg.noise, str):
        assert reg.noise_ == pytest.approx(expected.noise, rel=1e-9)
    std = reg.predict(Z, return_std=True)[1]
    torch.testing.assert_close(std.flatten().square(), cov.diagonal(), rtol=1e-9, atol=1e-12)
    cross = reg.posterior_.cross(reg._jacobian(Z), reg._jacobian(X))
    torch.testing.assert_close(cross, A @ expected.cov @ dense_jacobian(reg.model, X).T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reg.to_module()(Z), mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("case", ["both", "noise given", "prior given"])
def test_the_evidence_is_the_largest(solver: str, case: str) -> None:
    reg, X, y = fitted(solver, case)
    largest = TangentRegressor(reg.model, solver=solver, inputs=False, average=False, **CASES[case]).fit(X, y)
    assert not largest.averaged_
    assert reg.log_evidence_ == pytest.approx(largest.log_evidence_, rel=1e-9)
    assert reg.evidence_path_ == largest.evidence_path_


def covariance(reg: TangentRegressor) -> Tensor:
    """Of the displacement, (p, p), from products with unit vectors."""
    eye = torch.eye(len(reg.posterior_.delta), dtype=torch.float64)
    return reg.posterior_.covariance(linnet.linalg.Matrix(eye))


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("later", [0, 1])
def test_draws_have_the_covariance(solver: str, later: int) -> None:
    reg, X, y = fitted(solver, "both")
    for _ in range(later):
        reg = reg.condition(X[:4] + 1, y[:4])
    # Draws are linear in standard normal numbers, so that the numbers' unit vectors give a root of the covariance.
    root = draw_root(reg)
    torch.testing.assert_close(root @ root.T, covariance(reg), rtol=1e-9, atol=1e-10)


def draw_root(reg: TangentRegressor) -> Tensor:
    posterior, p = reg.posterior_, len(reg.posterior_.delta)
    original = type(posterior)._normal
    try:
        type(posterior)._normal = lambda self, rows, k, generator: torch.eye(rows, k, dtype=torch.float64)  # type: ignore[method-assign]
        drawn = posterior.draw(p, generator=torch.Generator())
    finally:
        type(posterior)._normal = original  # type: ignore[method-assign]
    return drawn - posterior.delta[:, None]


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("sizes", [(3, 4), (1, 15)])
def test_later_data_condition_the_one_gaussian(solver: str, sizes: tuple[int, int]) -> None:
    reg, _, _ = fitted(solver, "both")
    Sigma, delta, value = covariance(reg), reg.posterior_.delta, reg.log_evidence_
    assert value is not None
    for seed, n in enumerate(sizes):
        X, y = problem(reg.model, n, seed=20 + seed)  # type: ignore[arg-type]
        A, before = dense_jacobian(reg.model, X), reg.predict(X)
        M = A @ Sigma @ A.T + reg.noise_ * torch.eye(len(A), dtype=torch.float64)
        left = (y - before).flatten()
        value += float(torch.distributions.MultivariateNormal(torch.zeros_like(left), M).log_prob(left))
        gain = Sigma @ A.T @ torch.linalg.inv(M)
        delta, Sigma = delta + gain @ left, Sigma - gain @ A @ Sigma
        reg = reg.condition(X, y)
        assert reg.averaged_
        torch.testing.assert_close(reg.posterior_.delta, delta, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(covariance(reg), Sigma, rtol=1e-9, atol=1e-9)
        assert reg.log_evidence_ == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("solver", DENSE)
def test_leaving_out_takes_the_averages(solver: str) -> None:
    reg, X, y = fitted(solver, "both")
    for found, inputs, targets in (
        (reg, X, y),
        (reg.condition(X[:3] + 1, y[:3]), torch.cat([X, X[:3] + 1]), torch.cat([y, y[:3]])),
    ):
        layers = {name: float(v[0]) for name, v in _variances(found).items()}
        plain = TangentRegressor(reg.model, solver=solver, prior=layers, noise=found.noise_, average=False)
        plain.fit(inputs, targets)
        np.testing.assert_allclose(found.loo_.mean, plain.loo_.mean, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(found.loo_.log_score, plain.loo_.log_score, rtol=1e-8)
        torch.testing.assert_close(found.influence(X), plain.influence(X), rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(found.path(X, 0.3), plain.path(X, 0.3), rtol=1e-8, atol=1e-9)


def _variances(reg: TangentRegressor) -> dict[str, Tensor]:
    return {name: v.flatten() for name, v in reg.lin_.layout.unflatten(reg.prior_variance_).items()}


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("later", [0, 1])
def test_files(solver: str, later: int, tmp_path: Path) -> None:
    reg, X, y = fitted(solver, "both")
    for _ in range(later):
        reg = reg.condition(X[:2] + 1, y[:2])
    reg.save(tmp_path / "a.safetensors")
    again = linnet.load(tmp_path / "a.safetensors", reg.model)
    Z = normal(4, 3, seed=5)
    assert again.averaged_
    assert again.get_params()["average"] is True
    for a, b in zip(reg.predict(Z, return_cov=True), again.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reg.sample(Z, 3), again.sample(Z, 3), rtol=1e-6, atol=1e-8)
    more = [found.condition(Z, reg.lin_(Z)) for found in (reg, again)]
    torch.testing.assert_close(more[0].predict(X), more[1].predict(X), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(reg.loo_.mean, again.loo_.mean, rtol=1e-10)


@pytest.mark.parametrize("solver", DENSE)
def test_weights_count_rows(solver: str) -> None:
    model = mlp()
    X, y = problem(model)
    weights = torch.arange(12) % 3
    weighted = TangentRegressor(model, solver=solver).fit(X, y, sample_weight=weights.double())
    rows = torch.repeat_interleave(torch.arange(12), weights)
    repeated = TangentRegressor(model, solver=solver).fit(X[rows], y[rows])
    for a, b in zip(weighted.predict(X, return_cov=True), repeated.predict(X, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    assert weighted.noise_ == pytest.approx(repeated.noise_, rel=1e-9)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, rel=1e-9)


def test_tasks_share_the_average() -> None:
    model = mlp()
    data = [problem(model, n, seed=s) for n, s in ((6, 0), (5, 7))]
    by_function, by_weight = (TangentRegressor(model, solver=solver).fit_tasks(data) for solver in DENSE)
    Z = normal(3, 3, seed=9)
    for a, b in zip(by_function.tasks_, by_weight.tasks_, strict=True):
        assert a.averaged_
        assert a.noise_ == by_function.noise_
        for x, y in zip(a.predict(Z, return_cov=True), b.predict(Z, return_cov=True), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"prior": "layerwise"}, 12),
        ({"noise": "per-output"}, 12),
        ({"prior": 0.5, "noise": 0.2}, 12),
        ({"average": False}, 12),
        ({}, 1),  # two numbers
        ({"solver": "cg-function"}, 12),
    ],
)
def test_where_the_maximum_is_taken(given: dict[str, Any], rows: int) -> None:
    model = mlp()
    X, y = problem(model, rows)
    assert not TangentRegressor(model, progress=False, **given).fit(X, y).averaged_


def test_many_observations_leave_nothing_to_average() -> None:
    model = mlp(1)
    X, y = problem(model, 2000)
    found, largest = (TangentRegressor(model, average=average).fit(X, y) for average in (True, False))
    assert found.noise_ == pytest.approx(largest.noise_, rel=3e-3)
    Z = normal(20, 3, seed=5)
    told: dict[str, Any] = {"return_std": True, "noise": True}
    (mean, std), (expected, known) = found.predict(Z, **told), largest.predict(Z, **told)
    torch.testing.assert_close(std, known, rtol=3e-3, atol=0)
    assert float(((mean - expected) / known).abs().max()) < 0.02
