"""What a fit can be asked for later, against doing it the long way: refitting, removing, descending."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linnet import TangentRegressor, linearize
from linnet._estimator import Linearity
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal

DENSE = ["function", "weight"]
GIVEN: dict[str, Any] = {"mean": "network", "prior": 0.6, "noise": 0.2}


def mlp(outputs: int = 2, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def problem(model: nn.Module, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    X = normal(n, 3, seed=seed)
    f = model(X).detach()
    J = linearize(model).jacobian(X)
    return X, f + (J @ normal(J.shape[1], seed=seed + 1)).view_as(f) + 0.3 * normal(*f.shape, seed=seed + 2)


def same(a: TangentRegressor, b: TangentRegressor, Z: Tensor) -> None:
    """Every number that the two can be asked for."""
    for x, y in zip(a.predict(Z, return_cov=True), b.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(a.predict(Z, return_std=True)[1], b.predict(Z, return_std=True)[1], rtol=1e-7, atol=1e-9)
    assert a.log_evidence_ == pytest.approx(b.log_evidence_, rel=1e-9)
    np.testing.assert_allclose(a.loo_.mean, b.loo_.mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(a.loo_.log_score, b.loo_.log_score, rtol=1e-6)
    torch.testing.assert_close(a.influence(Z), b.influence(Z), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(a.path(Z, 0.7), b.path(Z, 0.7), rtol=1e-7, atol=1e-8)
    assert a.layer_relevance_ == pytest.approx(b.layer_relevance_, rel=1e-7)


# More data.


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("sizes", [(6, 3, 4), (60, 1, 20)])
def test_more_data_is_a_fit_to_all_of_it(solver: str, sizes: tuple[int, ...]) -> None:
    model = mlp()
    X, y = problem(model, sum(sizes))
    Z = normal(5, 3, seed=9)
    a, b = sizes[0], sizes[0] + sizes[1]
    first = TangentRegressor(model, solver=solver, **GIVEN).fit(X[:a], y[:a])
    before = first.predict(Z, return_cov=True)
    once = first.condition(X[a:b], y[a:b])
    twice = once.condition(X[b:], y[b:])
    same(once, TangentRegressor(model, solver=solver, **GIVEN).fit(X[:b], y[:b]), Z)
    same(twice, TangentRegressor(model, solver=solver, **GIVEN).fit(X, y), Z)
    # The first is as it was.
    same(first, TangentRegressor(model, solver=solver, **GIVEN).fit(X[:a], y[:a]), Z)
    for x, kept in zip(first.predict(Z, return_cov=True), before, strict=True):
        assert torch.equal(x, kept)


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("noise", ["evidence", "per-output", [0.1, 0.5]])
@pytest.mark.parametrize("prior", ["shared", "layerwise", "balanced"])
def test_hyperparameters_are_kept(prior: str, noise: Any, solver: str) -> None:
    model = mlp()
    X, y = problem(model, 15)
    Z = normal(4, 3, seed=9)
    first = TangentRegressor(model, average=False, prior=prior, noise=noise, solver=solver).fit(X[:11], y[:11])
    more = first.condition(X[11:], y[11:])
    assert more.scales_ == first.scales_ and np.array_equal(more.noise_, first.noise_)
    parts = {name: float(first.prior_variance_[first.lin_.layout.slices[name]][0]) for name in first.lin_.layout.shapes}
    whole = TangentRegressor(model, average=False, prior=parts, noise=first.noise_, solver=solver).fit(X, y)
    for a, b in zip(more.predict(Z, return_cov=True), whole.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    assert more.log_evidence_ == pytest.approx(whole.log_evidence_, rel=1e-8)


@pytest.mark.parametrize("solver", DENSE)
def test_more_data_with_the_networks_own_noise(solver: str) -> None:
    model = mlp(2)
    X, y = problem(mlp(1), 14)
    Z = normal(4, 3, seed=9)
    first = TangentRegressor(model, None, "network", 0.5, "heteroscedastic", solver, average=False).fit(X[:9], y[:9, 0])
    more = first.condition(X[9:], y[9:, 0])
    J = dense_jacobian(model, X, output=lambda raw: raw[:, :1])
    out = model(X).detach()
    Sigma = 0.5 * J @ J.T + torch.diag(first.noise_ * out[:, 1].exp())
    N = dense_jacobian(model, Z, output=lambda raw: raw[:, :1])
    want = model(Z).detach()[:, 0] + 0.5 * N @ J.T @ torch.linalg.solve(Sigma, y[:, 0] - out[:, 0])
    torch.testing.assert_close(more.predict(Z), want, rtol=1e-8, atol=1e-9)


def test_more_data_for_a_default_network_keeps_its_level() -> None:
    X, y = normal(20, 3), normal(20, seed=1) + 40
    first = TangentRegressor(noise=0.1, prior=0.01).fit(X[:15], y[:15])
    more = first.condition(X[15:], y[15:])
    assert abs(float(more.predict(X).mean()) - 40) < 2
    assert more.log_evidence_ < 0 and len(more.loo_.mean) == 20


def test_a_tasks_regressor_can_be_extended() -> None:
    model = mlp()
    (X, y), (U, v) = problem(model, 8), problem(model, 9, seed=50)
    reg = TangentRegressor(model, **GIVEN).fit_tasks([(X, y), (U, v)])
    more = reg.tasks_[1].condition(X, y)
    same(more, TangentRegressor(model, **GIVEN).fit(torch.cat([U, X]), torch.cat([v, y])), normal(3, 3, seed=9))


@pytest.mark.parametrize("solver", ["cg-function", "cg-weight"])
def test_iterative_fits_say_what_they_cannot_do(solver: str) -> None:
    model = mlp()
    X, y = problem(model, 12)
    reg = TangentRegressor(model, solver=solver, dtype="float64", **GIVEN).fit(X, y)
    with pytest.raises(NotImplementedError, match=rf"path of gradient flow need.*'{solver}'.*solver='function'"):
        reg.path(X, 1.0)
    with pytest.raises(NotImplementedError, match=rf"Leave-one-out.*dense solver.*'{solver}'"):
        reg.influence(X)
    with pytest.raises(NotImplementedError, match=rf"Leave-one-out.*dense solver.*'{solver}'"):
        _ = reg.loo_


# Leave-one-out and influence.


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("noise", [0.2, [0.1, 0.6]])
@pytest.mark.parametrize("n", [7, 30])
def test_leave_one_out_is_refitting_without_an_example(n: int, noise: Any, solver: str) -> None:
    model = mlp()
    X, y = problem(model, n)
    reg = TangentRegressor(model, prior=0.6, noise=noise, solver=solver).fit(X, y)
    loo = reg.loo_
    assert loo.mean.shape == loo.std.shape == (n, 2) and loo.log_score.shape == (n,)
    Z = normal(4, 3, seed=9)
    influence, whole = reg.influence(Z), reg.predict(Z)
    assert influence.shape == (4, 2, n)
    for i in range(0, n, 3):
        kept = torch.arange(n) != i
        other = TangentRegressor(model, prior=0.6, noise=noise, solver=solver).fit(X[kept], y[kept])
        mean, C = other.predict(X[i : i + 1], return_cov=True)
        C = C + torch.diag(torch.as_tensor(noise, dtype=torch.float64).expand(2))
        np.testing.assert_allclose(loo.mean[i], mean[0], rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(loo.std[i], C.diagonal().sqrt(), rtol=1e-7)
        score = torch.distributions.MultivariateNormal(mean[0], C).log_prob(y[i])
        assert loo.log_score[i] == pytest.approx(float(score), rel=1e-7)
        torch.testing.assert_close(influence[:, :, i], whole - other.predict(Z), rtol=1e-6, atol=1e-8)


def test_leave_one_out_of_one_output() -> None:
    model = mlp(1)
    X, y = problem(model, 9)
    flat = TangentRegressor(model, **GIVEN).fit(X, y[:, 0])
    column = TangentRegressor(model, **GIVEN).fit(X, y)
    assert flat.loo_.mean.shape == (9,) and column.loo_.mean.shape == (9, 1)
    np.testing.assert_allclose(flat.loo_.mean, column.loo_.mean[:, 0])
    assert isinstance(flat.loo_.mean, np.ndarray)
    assert flat.influence(X).shape == (9, 9)


def test_many_examples_are_taken_in_blocks() -> None:
    model = double(nn.Linear(3, 2))
    X, y = normal(1100, 3), normal(1100, 2, seed=1)
    fits = [TangentRegressor(model, solver=solver, **GIVEN).fit(X, y) for solver in DENSE]
    np.testing.assert_allclose(fits[0].loo_.mean, fits[1].loo_.mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fits[0].loo_.std, fits[1].loo_.std, rtol=1e-7)


# Gradient flow.


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("n", [6, 40])
@pytest.mark.parametrize("mean", ["network", "zero"])
def test_the_path_is_that_of_gradient_flow(mean: str, n: int, solver: str) -> None:
    model = mlp()
    X, y = problem(model, n)
    Z = normal(4, 3, seed=9)
    prior = {"0": 0.3, "2": 0.7}
    reg = TangentRegressor(model, mean=mean, prior=prior, noise=0.2, solver=solver).fit(X, y)
    J, N, S = dense_jacobian(model, X), dense_jacobian(model, Z), reg.prior_variance_
    f, g = (model(data).detach() if mean == "network" else torch.zeros(len(data), 2) for data in (X, Z))
    r = (y - f).flatten()
    torch.testing.assert_close(reg.path(Z, 0.0), g.double(), rtol=1e-12, atol=1e-12)
    K = (J * S) @ J.T
    for t in (0.01, 0.5, 3.0):
        # du/dt = -Phi^T (Phi u - r) for the whitened weights: the exponential of an augmented matrix.
        A = torch.zeros(len(r) + 1, len(r) + 1, dtype=torch.float64)
        A[:-1, :-1], A[:-1, -1] = -K, r
        integral = torch.linalg.matrix_exp(t * A)[:-1, -1]  # phi_t(K) r
        want = g + ((N * S) @ J.T @ integral).view_as(g)
        torch.testing.assert_close(reg.path(Z, t), want, rtol=1e-7, atol=1e-8)
    # Small explicit steps.
    u, step = torch.zeros_like(S), 1e-5
    Phi = J * S.sqrt()
    for _ in range(2000):
        u = u - step * (Phi.T @ (Phi @ u - r))
    want = g + ((N * S.sqrt()) @ u).view_as(g)
    moved = float((want - g).abs().max())
    torch.testing.assert_close(reg.path(Z, 2000 * step), want, rtol=0, atol=1e-2 * moved)


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("n", [6, 40])
def test_the_path_ends_at_least_squares(n: int, solver: str) -> None:
    model = mlp()
    X, y = problem(model, n)
    Z = normal(4, 3, seed=9)
    reg = TangentRegressor(model, solver=solver, **GIVEN).fit(X, y)
    J, N = dense_jacobian(model, X), dense_jacobian(model, Z)
    w = torch.linalg.pinv(J, rtol=1e-10) @ (y - model(X).detach()).flatten()
    want = model(Z).detach() + (N @ w).view(4, 2)
    for t in (1e12, math.inf):
        torch.testing.assert_close(reg.path(Z, t), want, rtol=1e-4, atol=1e-4)
    if n == 6:  # fewer examples than parameters: interpolation
        torch.testing.assert_close(reg.path(X, math.inf), y, rtol=1e-6, atol=1e-6)
    quiet = TangentRegressor(model, prior=0.6, noise=1e-7, solver=solver).fit(X, y)
    torch.testing.assert_close(quiet.predict(Z), want, rtol=1e-3, atol=1e-3)


def test_times_are_not_negative() -> None:
    model = mlp()
    X, y = problem(model, 6)
    reg = TangentRegressor(model, **GIVEN).fit(X, y)
    for t in (-1.0, math.nan):
        with pytest.raises(ValueError, match="t is a time and must not be negative"):
            reg.path(X, t)


# Samples.


@pytest.mark.parametrize("solver", DENSE)
def test_samples_are_joint_over_inputs(solver: str) -> None:
    # An entry of the sample covariance of k draws has the variance (C_ij^2 + C_ii C_jj) / k: five standard errors.
    model = mlp()
    X, y = problem(model, 10)
    Z, k = normal(4, 3, seed=9), 20_000
    reg = TangentRegressor(model, solver=solver, **GIVEN).fit(X, y)
    mean, C = reg.predict(Z, return_cov=True)
    for noise in (False, True):
        want = C + (0.2 * torch.eye(8) if noise else 0)
        draws = reg.sample(Z, k, noise=noise, seed=1)
        assert draws.shape == (k, 4, 2)
        centered = (draws - mean).reshape(k, -1)
        error = ((want.square() + torch.outer(want.diagonal(), want.diagonal())) / k).sqrt()
        assert bool(((centered.T @ centered / k - want).abs() < 5 * error).all())
        assert bool((centered.mean(0).abs() < 5 * (want.diagonal() / k).sqrt()).all())


@pytest.mark.parametrize("solver", ["cg-function", "cg-weight"])
def test_iterative_samples(solver: str) -> None:
    model = mlp()
    X, y = problem(model, 10)
    Z = normal(4, 3, seed=9)
    reg = TangentRegressor(model, solver=solver, dtype="float64", samples=50, **GIVEN).fit(X, y)
    draws = reg.sample(Z, 50)
    mean, C = reg.predict(Z, return_cov=True)
    centered = (draws - mean).reshape(50, -1)
    torch.testing.assert_close(centered.T @ centered / 50, C, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="holds 50 samples; 51 were asked for"):
        reg.sample(Z, 51)


@pytest.mark.parametrize("n", [12, 60])  # fewer and more rows than parameters
def test_the_path_ends_at_least_squares_where_examples_repeat(n: int) -> None:
    """Directions without an eigenvalue do not move, however long the time: rounding would blow them up."""
    model = mlp()
    X, y = problem(model, n)
    X = X[:4].repeat(n // 4, 1)
    reg = TangentRegressor(model, **GIVEN).fit(X, y)
    J, N, Z = dense_jacobian(model, X), dense_jacobian(model, normal(4, 3, seed=9)), normal(4, 3, seed=9)
    want = model(Z).detach() + (N @ (torch.linalg.pinv(J, rtol=1e-10) @ (y - model(X).detach()).flatten())).view(4, 2)
    for t in (1e14, 1e20, math.inf):
        torch.testing.assert_close(reg.path(Z, t), want, rtol=1e-6, atol=1e-6)


# The linear model next to the network.


def test_linearity_of_a_linear_network_is_exact() -> None:
    model = double(nn.Linear(3, 2))
    X, y = problem(model, 12)
    Z = normal(4, 3, seed=9)
    reg = TangentRegressor(model, **GIVEN).fit(X, y)
    at = reg.linearity(Z)
    torch.testing.assert_close(at.before, model(Z).detach(), rtol=1e-12, atol=1e-12)
    for found in (at.linear, at.network, reg.apply()(Z).detach(), reg.to_module()(Z).detach()):
        torch.testing.assert_close(found, reg.predict(Z), rtol=1e-9, atol=1e-10)
    assert at.relative_error < 1e-9 < float((at.linear - at.before).norm())


def test_what_linearity_says_by_hand() -> None:
    before, linear = torch.zeros(3, 2).double(), torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]).double()
    network = torch.tensor([[3.0, 1.0], [0.0, 3.0], [1.0, 0.0]]).double()
    at = Linearity(before + 1, linear + 1, network + 1)
    assert at.by_example.tolist() == pytest.approx([3 / 5, 1 / 2, 0])
    assert at.relative_error == pytest.approx(math.sqrt(10 / 30))
    assert at.agreement == pytest.approx(2 / 3)
    one = Linearity(before[:, :1], torch.tensor([[1.0], [-1.0], [2.0]]), torch.tensor([[2.0], [1.0], [0.5]]))
    assert one.agreement == pytest.approx(2 / 3)
    assert Linearity(before, before, network).relative_error == 0


def test_samples_take_a_seed_and_noise() -> None:
    model = mlp()
    X, y = problem(model, 12)
    Z = normal(2, 3, seed=9)
    reg, other = (TangentRegressor(model, prior=0.6, noise=0.2, seed=seed).fit(X, y) for seed in (0, 5))
    assert torch.equal(reg.sample(Z, 2, seed=5), other.sample(Z, 2))
    assert not torch.allclose(reg.sample(Z, 2, seed=5), reg.sample(Z, 2))
    added = reg.sample(Z, 5000, noise=True) - reg.sample(Z, 5000)
    # The variance of 5,000 squares of N(0, 0.2), within five standard errors.
    assert bool(((added.square().mean(0) - 0.2).abs() < 5 * 0.2 * math.sqrt(2 / 5000)).all())
    assert bool((added.mean(0).abs() < 5 * math.sqrt(0.2 / 5000)).all())


@pytest.mark.parametrize("mean", ["network", "zero"])
def test_the_adapted_module_where_forward_mode_is_not_to_be_had(mean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    X, y = problem(model, 12)
    Z = normal(4, 3, seed=9)
    reg = TangentRegressor(model, **GIVEN | {"mean": mean}).fit(X, y)
    module = reg.to_module()
    torch.testing.assert_close(module(Z), reg.predict(Z), rtol=1e-9, atol=1e-10)
    monkeypatch.setattr(type(reg.lin_.rules), "can", lambda *given, **more: False)
    torch.testing.assert_close(module(Z), reg.predict(Z), rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match="takes the tensors that the network takes"):
        module([1.0])
