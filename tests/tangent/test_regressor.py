"""TangentRegressor: every solver against the dense Gaussian process, hyperparameters, the adapted model, inputs."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from linnet import TangentRegressor, linearize
from linnet.inference.gaussian import closed_form
from linnet.probability import ntk_variances
from linnet.testing import dense_jacobian, zoo
from tests.support.drawn import double, normal
from tests.support.reference import Reference, dense_posterior

DENSE = ["function", "weight"]
ITERATIVE = ["cg-function", "cg-weight"]
CASES = ["mlp_elu_scalar", "mlp", "conv2d", "dict_inputs", "two_inputs"]


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def problem(model: nn.Module, n: int, m: int = 5, *, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs, targets drawn from the linear model with unit prior, and other inputs."""
    X, Z = normal(n, 3, seed=seed), normal(m, 3, seed=seed + 1)
    J = linearize(model).jacobian(X)
    f = model(X).detach() + (J @ normal(J.shape[1], seed=seed + 2)).view(n, -1)
    return X, f + noise**0.5 * normal(*f.shape, seed=seed + 3), Z


def reference(model: nn.Module, X: Any, y: Tensor, Z: Any, *, mean: str = "network", **given: Any) -> Reference:
    r = y - model(X).detach() if mean == "network" else y
    return dense_posterior(dense_jacobian(model, X), r.flatten(), new=dense_jacobian(model, Z), **given)


# Against dense algebra.


@pytest.mark.parametrize("mean", ["network", "zero"])
@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
@pytest.mark.parametrize("name", CASES)
def test_every_solver_gives_the_dense_posterior(name: str, solver: str, mean: str) -> None:
    case = zoo()[name]
    model, n, m = case.build(), 9, 4
    X, Z = case.data(n, 0), case.data(m, 1)
    f, g = (case.outputs(model, data).detach() for data in (X, Z))
    y = f + normal(*f.shape, seed=3)
    base, added = (f, g) if mean == "network" else (torch.zeros_like(f), torch.zeros_like(g))
    ref = dense_posterior(case.dense(model, X), (y - base).flatten(), variance=0.7, noise=0.3, new=case.dense(model, Z))
    reg = TangentRegressor(
        model, None, mean, 0.7, 0.3, solver, output=case.output, dtype="float64", tolerance=1e-8, samples=2000
    )
    found, covariance = reg.fit(X, y).predict(Z, return_cov=True)
    also, std = reg.predict(Z, return_std=True)
    close = {"rtol": 1e-8, "atol": 1e-9} if solver in DENSE else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, added + ref.shift.view_as(added), **close)
    torch.testing.assert_close(found, also, rtol=0, atol=0)
    torch.testing.assert_close(reg.posterior_.delta, ref.delta, **close)
    assert reg.solver_ == solver
    variance = ref.covariance.diagonal()
    if solver in DENSE:
        assert reg.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-8) and reg.log_evidence_error_ == 0
        torch.testing.assert_close(covariance, ref.covariance, **close)
        torch.testing.assert_close(std.square(), variance.view_as(added), **close)
    else:
        # The preconditioner has seen all examples, so that the log determinant is exact.
        assert reg.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-4)
        assert reg.solution_.converged and reg.solution_.residual <= 1e-8
        # From 2,000 samples: five standard errors.
        error = ((ref.covariance.square() + torch.outer(variance, variance)) / 2000).sqrt()
        assert bool(((covariance - ref.covariance).abs() < 5 * error).all())
        torch.testing.assert_close(std.square().flatten(), covariance.diagonal(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
@pytest.mark.parametrize("noise", [0.2, [0.05, 0.1, 2.0]])
@pytest.mark.parametrize("prior", [0.5, "unit", {"0": 0.1, "2.bias": 3.0, "*": 1.0}, "ntk"])
def test_priors_and_noises(prior: Any, noise: Any, solver: str) -> None:
    model = mlp(3)
    X, y, Z = problem(model, 20)
    lin = linearize(model)
    reg = TangentRegressor(model, None, "network", prior, noise, solver, average=False, dtype="float64", tolerance=1e-8)
    found = reg.fit(X, y).predict(Z)
    if prior == "ntk":
        variance = ntk_variances(lin) * reg.scales_["all"]
    elif isinstance(prior, dict):
        parts = {"0.weight": 0.1, "0.bias": 0.1, "2.weight": 1.0, "2.bias": 3.0}
        variance = torch.cat([torch.full((t.numel(),), parts[k], dtype=torch.float64) for k, t in lin.theta.items()])
    else:
        variance = torch.full((lin.p,), 1.0 if prior == "unit" else prior, dtype=torch.float64)
    torch.testing.assert_close(reg.prior_variance_, variance, rtol=1e-12, atol=0)
    rows = torch.as_tensor(noise, dtype=torch.float64).expand(3).repeat(20)
    ref = reference(model, X, y, Z, variance=variance, noise=rows)
    close = {"rtol": 1e-8, "atol": 1e-9} if solver in DENSE else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, model(Z).detach() + ref.shift.view(5, 3), **close)
    exact = 1e-8 if solver in DENSE else 1e-4
    assert reg.log_evidence_ == pytest.approx(ref.log_evidence, rel=exact, abs=5 * reg.log_evidence_error_)
    assert reg.noise_ == noise
    noisy = reg.predict(Z, return_std=True, noise=True)[1].square() - reg.predict(Z, return_std=True)[1].square()
    torch.testing.assert_close(noisy, rows.view(20, 3)[:5], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n", [8, 90])
@pytest.mark.parametrize("noise", ["evidence", "per-output"])
@pytest.mark.parametrize("prior", ["shared", "ntk", "balanced", "layerwise"])
def test_weight_space_is_function_space(prior: str, noise: str, n: int) -> None:
    model = mlp(2)
    X, y, Z = problem(model, n, noise=0.3)
    chosen = TangentRegressor(model, prior=prior, noise=noise, solver="function").fit(X, y)
    again = TangentRegressor(model, prior=prior, noise=noise, solver="weight").fit(X, y)
    assert again.log_evidence_ == pytest.approx(chosen.log_evidence_, abs=1e-6)
    # Where the maximum is flat they may stop at points nearby: the same hyperparameters must give the same numbers.
    by_name = {name: s if s > 1e-9 else 1e-9 for name, s in chosen.scales_.items()}
    given: Any = by_name if prior == "layerwise" else float(chosen.scales_["all"])
    one, other = (
        TangentRegressor(model, mean=chosen.mean_, prior=given, noise=chosen.noise_, solver=solver).fit(X, y)
        for solver in DENSE
    )
    for a, b in zip(one.predict(Z, return_cov=True), other.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(b.abs().max()))
    assert one.log_evidence_ == pytest.approx(other.log_evidence_, rel=1e-8)
    torch.testing.assert_close(one._fit_.alpha, other._fit_.alpha, rtol=1e-7, atol=1e-8)


def test_more_rows_than_parameters_and_fewer() -> None:
    model = mlp()
    for n, solver in [(6, "function"), (300, "weight")]:
        X, y, _ = problem(model, n)
        assert TangentRegressor(model).fit(X, y).solver_ == solver


# Hyperparameters.


@pytest.mark.parametrize("solver", DENSE)
def test_the_evidence_is_maximal(solver: str) -> None:
    model = mlp()
    X, y, _ = problem(model, 30, noise=0.2)
    J, r = dense_jacobian(model, X), (y - model(X).detach()).flatten()

    def negative(x: np.ndarray) -> float:
        s, v = np.exp(x)
        return -dense_posterior(J, r, variance=float(s), noise=float(v), new=J[:1]).log_evidence

    starts = [(0.0, 0.0), (-5.0, 0.0), (2.0, -4.0), (-2.0, -8.0)]
    want = max(-minimize(negative, x0, method="Nelder-Mead").fun for x0 in starts)
    reg = TangentRegressor(model, average=False, prior="shared", solver=solver, noise_floor=0).fit(X, y)
    assert reg.log_evidence_ >= want - 1e-6
    assert reg.log_evidence_ == pytest.approx(-negative(np.log([reg.scales_["all"], reg.noise_])), rel=1e-9)
    fixed = TangentRegressor(model, average=False, prior=0.5, solver=solver).fit(X, y)
    assert fixed.scales_ == {} and fixed.log_evidence_ <= reg.log_evidence_
    quiet = TangentRegressor(model, average=False, noise=0.2, solver=solver).fit(X, y)
    assert quiet.noise_ == 0.2 and quiet.log_evidence_ <= reg.log_evidence_


@pytest.mark.parametrize("solver", ITERATIVE)
def test_iterative_solvers_in_float32(solver: str) -> None:
    model = mlp(2)
    X, y, Z = problem(model, 60)
    want = TangentRegressor(model, prior=1.0, noise=0.1).fit(X, y)
    reg = TangentRegressor(model, prior=1.0, noise=0.1, solver=solver, dtype="float32", tolerance=1e-5).fit(X, y)
    assert (reg.lin_.model_dtype, reg.predict(Z).dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(reg.predict(Z), want.predict(Z), rtol=1e-3, atol=1e-3)
    assert reg.log_evidence_ == pytest.approx(want.log_evidence_, rel=1e-3, abs=5 * reg.log_evidence_error_)


@pytest.mark.parametrize("solver", ITERATIVE)
@pytest.mark.parametrize("n", [15, 60])
def test_iterative_hyperparameters_lose_little_evidence(n: int, solver: str) -> None:
    model = mlp()
    X, y, _ = problem(model, n, noise=0.2)
    exact = TangentRegressor(model, prior="shared").fit(X, y)
    found = TangentRegressor(model, prior="shared", solver=solver, dtype="float64").fit(X, y)
    at = TangentRegressor(model, prior=found.scales_["all"], noise=found.noise_).fit(X, y)
    assert -1e-6 <= exact.log_evidence_ - at.log_evidence_ < 0.3
    assert found.log_evidence_ == pytest.approx(at.log_evidence_, rel=1e-4, abs=5 * found.log_evidence_error_)


def test_many_rows_leave_the_hyperparameters_to_lanczos(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    X, y, _ = problem(model, 60, noise=0.2)
    exact = TangentRegressor(model, prior="shared", solver="function").fit(X, y)
    monkeypatch.setitem(closed_form.EXACT_ROWS, "cpu", 50)
    found = TangentRegressor(model, prior="shared", solver="function").fit(X, y)
    assert 0 < exact.log_evidence_ - found.log_evidence_ < 0.3  # the evidence of what was chosen is exact
    given = TangentRegressor(model, prior=found.scales_["all"], noise=found.noise_).fit(X, y)
    assert found.log_evidence_ == pytest.approx(given.log_evidence_, rel=1e-9)


def test_richer_priors_and_noises_have_more_evidence() -> None:
    model = mlp(2)
    X, y, _ = problem(model, 40)
    y = y + torch.tensor([0.0, 2.0]) * normal(40, 2, seed=9)

    def fitted(**given: Any) -> TangentRegressor:
        return TangentRegressor(model, noise_floor=0, **given).fit(X, y)

    shared, layers = fitted(prior="shared"), fitted(prior="layerwise")
    outputs, both = fitted(prior="shared", noise="per-output"), fitted(prior="layerwise", noise="per-output")
    assert set(layers.scales_) == {"0", "2"}
    assert outputs.noise_.shape == (2,) and outputs.noise_[1] > 10 * outputs.noise_[0]
    assert layers.log_evidence_ >= shared.log_evidence_ - 1e-9
    assert outputs.log_evidence_ > shared.log_evidence_ + 10
    assert both.log_evidence_ >= max(layers.log_evidence_, outputs.log_evidence_) - 1e-6
    variance = torch.cat([torch.full((32,), both.scales_["0"]), torch.full((18,), both.scales_["2"])]).double()
    rows = torch.tensor(both.noise_).repeat(40)
    ref = reference(model, X, y, X[:1], variance=both.prior_variance_, noise=rows)
    torch.testing.assert_close(both.prior_variance_, variance, rtol=1e-6, atol=0)
    assert both.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-8)
    assert len(both.evidence_path_) > 1 and both.evidence_path_[-1] == pytest.approx(both.log_evidence_, rel=1e-6)


def test_the_layer_that_changed_is_found() -> None:
    model = mlp()
    X = normal(60, 3)
    J = dense_jacobian(model, X)
    step = torch.zeros(J.shape[1], dtype=torch.float64)
    step[-9:] = normal(9, seed=5)
    y = model(X).detach().flatten() + J @ step + 0.01 * normal(60, seed=6)
    reg = TangentRegressor(model, prior="layerwise").fit(X, y)
    assert reg.scales_["0"] < 1e-2 * reg.scales_["2"]
    assert reg.layer_relevance_["2"] > 0.95


def test_no_signal_leaves_the_network_alone() -> None:
    model = mlp()
    X = normal(100, 3)
    y = model(X).detach() + normal(100, 1, seed=5)
    reg = TangentRegressor(model).fit(X, y)
    rms = float((reg.predict(X) - model(X).detach()).square().mean()) ** 0.5
    assert rms < 0.5 and reg.noise_ == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize("solver", DENSE)
def test_targets_without_noise_are_interpolated(solver: str) -> None:
    model = mlp()
    X = normal(100, 3)
    J = dense_jacobian(model, X)
    w = normal(J.shape[1], seed=5)
    y = model(X).detach().flatten() + J @ w
    reg = TangentRegressor(model, solver=solver, noise_floor=0).fit(X, y)
    torch.testing.assert_close(reg.predict(X), y, rtol=1e-5, atol=1e-5)
    Z = normal(20, 3, seed=7)
    wanted = model(Z).detach().flatten() + dense_jacobian(model, Z) @ w
    torch.testing.assert_close(reg.predict(Z), wanted, rtol=1e-3, atol=1e-3)


def test_per_output_noise_and_a_fixed_prior() -> None:
    model = mlp(2)
    X, y, _ = problem(model, 30)
    fits = [TangentRegressor(model, prior=1.0, noise="per-output", solver=solver).fit(X, y) for solver in DENSE]
    assert fits[0].noise_ == pytest.approx(fits[1].noise_, rel=1e-3)
    free = TangentRegressor(model, prior="shared", noise="per-output").fit(X, y)
    assert free.log_evidence_ >= fits[0].log_evidence_


# Heteroscedastic networks.


class TwoHeads(nn.Module):
    """Means and log variances, (n, 2 d)."""

    def __init__(self, d: int = 1) -> None:
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(3, 6), nn.Linear(6, d), nn.Linear(6, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return torch.cat([self.mean(h), self.log_variance(h)], 1)


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
@pytest.mark.parametrize("d", [1, 2])
def test_heteroscedastic_noise_is_the_networks_times_a_scale(d: int, solver: str) -> None:
    model = double(TwoHeads(d))
    X, Z = normal(25, 3), normal(4, 3, seed=1)
    out, new = model(X).detach(), model(Z).detach()
    y = out[:, :d] + out[:, d:].exp().sqrt() * normal(25, d, seed=2)
    reg = TangentRegressor(
        model,
        average=False,
        prior=0.3,
        noise="heteroscedastic",
        solver=solver,
        dtype="float64",
        tolerance=1e-8,
        samples=2000,
    ).fit(X, y)
    J, K = (
        dense_jacobian(model, data, output=lambda raw: raw[:, :d], names=dict(model.named_parameters()))
        for data in (X, Z)
    )
    rows = reg.noise_ * out[:, d:].exp()
    ref = dense_posterior(J, (y - out[:, :d]).flatten(), variance=0.3, noise=rows.flatten(), new=K)
    mean, std = reg.predict(Z, return_std=True)
    close = {"rtol": 1e-8, "atol": 1e-9} if solver in DENSE else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mean, new[:, :d] + ref.shift.view(4, d), **close)
    spread = {"rtol": 1e-8, "atol": 1e-9} if solver in DENSE else {"rtol": 5 * (2 / 2000) ** 0.5, "atol": 0}
    torch.testing.assert_close(std.square().flatten(), ref.covariance.diagonal(), **spread)
    assert reg.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-4, abs=5 * reg.log_evidence_error_)
    noisy = reg.predict(Z, return_std=True, noise=True)[1].square() - std.square()
    torch.testing.assert_close(noisy, reg.noise_ * new[:, d:].exp(), rtol=1e-6, atol=1e-9)
    if solver in DENSE:  # the scale is the best one
        for factor in (0.99, 1.01):
            other = dense_posterior(J, (y - out[:, :d]).flatten(), variance=0.3, noise=factor * rows.flatten(), new=K)
            assert other.log_evidence < reg.log_evidence_


def test_heteroscedastic_outputs_are_chosen_before_they_are_halved() -> None:
    model = double(TwoHeads(2))
    X = normal(15, 3)
    y = normal(15, 2, seed=2)
    both = TangentRegressor(model, noise="heteroscedastic").fit(X, y)
    again = TangentRegressor(model, noise="heteroscedastic", output=lambda raw: raw.clamp(max=100)).fit(X, y)
    assert both.log_evidence_ == pytest.approx(again.log_evidence_, rel=1e-10)
    one = TangentRegressor(model, noise="heteroscedastic", output=lambda raw: raw[:, ::2]).fit(X, y[:, 0])
    assert one.predict(X).shape == (15,)


# Several tasks.


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize(("prior", "noise"), [("shared", "evidence"), ("layerwise", "per-output")])
def test_tasks_share_hyperparameters(prior: str, noise: str, solver: str) -> None:
    model = mlp(2)
    data = [problem(model, n, seed=100 * n)[:2] for n in (8, 20, 13)]
    Z = normal(4, 3, seed=1)
    how: Any = {"mean": "network", "average": False, "solver": solver}
    reg = TangentRegressor(model, prior=prior, noise=noise, **how).fit_tasks(data)
    assert len(reg.tasks_) == 3 and reg.tasks_[0] is reg
    given: Any = reg.scales_["all"] if prior == "shared" else reg.scales_
    total = sum(task.log_evidence_ for task in reg.tasks_)
    for task, (X, y) in zip(reg.tasks_, data, strict=True):
        single = TangentRegressor(model, prior=given, noise=reg.noise_, **how).fit(X, y)
        for a, b in zip(task.predict(Z, return_cov=True), single.predict(Z, return_cov=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
        assert task.log_evidence_ == pytest.approx(single.log_evidence_, rel=1e-9)
        assert task.scales_ == reg.scales_
    for factor in (0.95, 1.05):  # the sum is at its maximum
        for changed in ("scale", "noise"):
            s = {k: v * (factor if changed == "scale" else 1) for k, v in reg.scales_.items()}
            v = np.asarray(reg.noise_) * (factor if changed == "noise" else 1)
            prior_given: Any = s["all"] if prior == "shared" else s
            fits = [TangentRegressor(model, prior=prior_given, noise=v, **how).fit(X, y) for X, y in data]
            assert sum(fit.log_evidence_ for fit in fits) < total


def test_iterative_tasks() -> None:
    model = mlp()
    data = [problem(model, n, seed=100 * n)[:2] for n in (10, 20)]
    given = {"prior": 0.5, "noise": 0.2, "dtype": "float64", "tolerance": 1e-8}
    reg = TangentRegressor(model, solver="cg-weight", **given).fit_tasks(data)
    for task, (X, y) in zip(reg.tasks_, data, strict=True):
        want = TangentRegressor(model, **given).fit(X, y)
        torch.testing.assert_close(task.predict(X), want.predict(X), rtol=1e-5, atol=1e-6)


def test_one_task_is_a_fit_and_a_fit_has_no_tasks() -> None:
    model = mlp()
    X, y, Z = problem(model, 12)
    reg = TangentRegressor(model).fit_tasks([(X, y)])
    alone = TangentRegressor(model).fit(X, y)
    torch.testing.assert_close(reg.predict(Z), alone.predict(Z), rtol=1e-10, atol=1e-12)
    reg.fit(X, y)
    assert not hasattr(reg, "tasks_")


# The adapted model.


@pytest.mark.parametrize("mean", ["network", "zero"])
@pytest.mark.parametrize("name", ["mlp", "dict_inputs", "two_inputs", "conv2d", "lstm"])
def test_to_module_predicts(name: str, mean: str) -> None:
    case = zoo()[name]
    model = case.build()
    X, Z = case.data(9, 0), case.data(4, 1)
    y = case.outputs(model, X).detach() + normal(9, case.outputs(model, X).shape[1], seed=2)
    reg = TangentRegressor(model, mean=mean, output=case.output).fit(X, y)
    module = reg.to_module()
    found = module(**Z) if isinstance(Z, dict) else module(*Z) if isinstance(Z, tuple) else module(Z)
    torch.testing.assert_close(found, reg.predict(Z), rtol=1e-8, atol=1e-10)


def test_the_module_of_a_default_network_has_its_level() -> None:
    X, y = normal(20, 3).numpy(), 100 + normal(20, 2, seed=1).numpy()
    reg = TangentRegressor().fit(X, y)
    np.testing.assert_allclose(reg.to_module()(torch.tensor(X)), reg.predict(X), rtol=1e-8)
    assert abs(float(reg.predict(X).mean()) - 100) < 1


def test_the_module_takes_tensors() -> None:
    model = mlp()
    X, y, _ = problem(model, 8)
    with pytest.raises(TypeError, match="takes the tensors that the network takes"):
        TangentRegressor(model).fit(X, y).to_module()("text")


class Stopped(nn.Module):
    """Without a gradient of the first layer where the first input is large, which forward mode does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        h = self.a(x).tanh()
        with torch.no_grad():
            still = self.a(x).tanh()
        out = self.b(torch.where(x[:, :1] > 1, still, h))
        return out if factor is None else out * factor


def test_the_module_is_differentiated_by_reverse_mode_alone() -> None:
    model = Stopped().double()
    X = normal(9, 3).clamp(max=1)
    reg = TangentRegressor(model, prior=1.0, noise=0.1).fit(X, normal(9, 2, seed=1))
    module, delta = reg.to_module(), reg.posterior_.delta
    for Z in (X[:4], X[:4] + 3):  # what the first examples do not show
        Z = Z.clone().requires_grad_()
        f = model(Z)
        rows = [torch.autograd.grad(v, model.parameters(), create_graph=True) for v in f.flatten()]
        expected = f + torch.stack([torch.cat([g.flatten() for g in row]) @ delta for row in rows]).view_as(f)
        found = module(Z)
        torch.testing.assert_close(found, expected)
        u = normal(4, 2, seed=3)
        slopes = [torch.autograd.grad((out * u).sum(), Z, retain_graph=True)[0] for out in (found, expected)]
        torch.testing.assert_close(*slopes)


def test_the_module_takes_optional_arguments() -> None:
    model = Stopped().double()
    X = normal(9, 3).clamp(max=1)
    module = TangentRegressor(model, prior=1.0, noise=0.1).fit(X, normal(9, 2, seed=1)).to_module()
    factor = torch.full((9, 1), 2.0, dtype=torch.float64)
    torch.testing.assert_close(module(X, factor), 2 * module(X))
    torch.testing.assert_close(module(X, factor=factor), 2 * module(X))
    torch.testing.assert_close(module(X.clone().requires_grad_(), factor), 2 * module(X))


def test_apply_writes_the_weights_into_a_copy() -> None:
    model = mlp()
    X, y, Z = problem(model, 20)
    before = copy.deepcopy(model.state_dict())
    reg = TangentRegressor(model, params=["2.*"], mean="network").fit(X, y)
    changed = reg.apply()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
        moved = changed.state_dict()[name] - tensor
        want = reg.delta_.get(name, torch.zeros_like(tensor))
        torch.testing.assert_close(moved, want, rtol=1e-9, atol=1e-12)
    # The last layer is linear in its parameters: the network with these weights is the linear model.
    torch.testing.assert_close(changed(Z), reg.predict(Z).view_as(changed(Z)), rtol=1e-9, atol=1e-10)
    assert set(reg.delta_) == {"2.weight", "2.bias"}


def test_apply_warns_of_weights_that_move_too_far() -> None:
    """The first layer alone, and targets far from the outputs: the copy is measured on the training data."""
    model = mlp()
    X, y, _ = problem(model, 20)
    y = model(X)[:, 0].detach() + 5 * normal(20, seed=4)
    reg = TangentRegressor(model, params=["0.*"], mean="network", prior=1e3, noise=1e-3).fit(X, y)
    with pytest.warns(UserWarning, match=r"worse than the network that was given: .* was (\S+)\. The weights") as found:
        changed = reg.apply()
    assert found[0].filename == __file__
    errors = [float((net(X)[:, 0].detach() - y).square().mean()) for net in (changed, model)]
    stated = re.search(r"is (\S+), and was (\S+)\. The", str(found[0].message))
    assert stated is not None
    assert [float(x) for x in stated.groups()] == pytest.approx(errors, rel=1e-2) and errors[0] > errors[1]


def test_linearity() -> None:
    model = mlp()
    X, y, Z = problem(model, 20)
    last = TangentRegressor(model, params=["2.*"]).fit(X, y).linearity(Z)
    assert last.relative_error < 1e-12
    errors = []
    for scale in (1e-1, 1e-2, 1e-3):
        small = model(X).detach() + scale * (y - model(X).detach())
        reg = TangentRegressor(model, prior=1.0, noise=0.1).fit(X, small)
        found = reg.linearity(Z)
        torch.testing.assert_close(found.linear[:, 0], reg.predict(Z)[:, 0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(found.network, reg.apply()(Z).detach(), rtol=1e-9, atol=1e-10)
        assert found.by_example.shape == (5,)
        errors.append(found.relative_error)
    assert errors[0] > 1e-4  # a tanh network is not linear
    assert errors[1] < 0.2 * errors[0] and errors[2] < 0.2 * errors[1]
    assert "relative_error" in repr(found) and 0 <= found.agreement <= 1


@pytest.mark.parametrize("solver", DENSE)
def test_layer_relevance_is_the_layers_part_of_the_norm(solver: str) -> None:
    model = mlp(2)
    X, y, _ = problem(model, 15)
    reg = TangentRegressor(model, prior="ntk", solver=solver).fit(X, y)
    S, alpha = reg.prior_variance_, reg._fit_.alpha
    parts = {}
    J = dense_jacobian(model, X)
    for layer, names in reg.lin_.layout.layers.items():
        part = torch.zeros_like(S)
        for name in names:
            part[reg.lin_.layout.slices[name]] = S[reg.lin_.layout.slices[name]]
        parts[layer] = float(alpha @ ((J * part) @ J.T) @ alpha)
    total = sum(parts.values())
    assert reg.layer_relevance_ == pytest.approx({layer: part / total for layer, part in parts.items()}, rel=1e-7)
    assert sum(reg.layer_relevance_.values()) == pytest.approx(1, rel=1e-12)


# What prediction does not do.


class Once(Dataset):
    """Examples that can be read only while it is open; counts what is read."""

    def __init__(self, X: Tensor, y: Tensor) -> None:
        self.X, self.y, self.open, self.read = X, y, True, 0

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not self.open:
            raise RuntimeError("The training data was read after fit.")
        self.read += 1
        return self.X[i], self.y[i]


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
def test_prediction_does_not_read_the_training_data(solver: str) -> None:
    model = mlp()
    X, y, Z = problem(model, 30)
    data = Once(X, y[:, 0])
    reg = TangentRegressor(model, solver=solver, samples=8).fit(data)
    data.open = False
    assert data.read >= 30
    reg.predict(Z)
    reg.predict(Z, return_std=True)
    reg.predict(Z, return_cov=True)
    reg.sample(Z, 3)
    reg.to_module()(Z)
    reg.linearity(Z)
    assert reg.layer_relevance_ and reg.delta_
    if solver in DENSE:
        reg.path(Z, 1.0)
        reg.influence(Z)
        assert len(reg.loo_.mean) == 30
        more = reg.condition(normal(3, 3, seed=8), normal(3, seed=9))
        more.predict(Z, return_std=True)
        more.path(Z, 1.0)
        assert len(more.loo_.mean) == 33


def test_the_training_data_may_change_after_fit() -> None:
    model = mlp()
    X, y, Z = problem(model, 30)
    reg = TangentRegressor(model).fit(X, y)
    want = reg.predict(Z, return_cov=True)
    X.mul_(float("nan"))
    y.mul_(float("nan"))
    for a, b in zip(reg.predict(Z, return_cov=True), want, strict=True):
        assert torch.equal(a, b)


# Inputs and outputs.


def test_arrays_give_arrays_and_tensors_give_tensors() -> None:
    model = mlp(2)
    X, y, Z = problem(model, 12)
    reg = TangentRegressor(model).fit(X, y)
    other = TangentRegressor(model).fit(X.numpy(), y.numpy())
    for found in (reg.predict(Z), reg.sample(Z, 2), reg.path(Z, 1.0), reg.influence(Z)):
        assert isinstance(found, Tensor)
    for found in (other.predict(Z.numpy()), other.sample(Z.numpy(), 2), other.influence(Z.numpy())):
        assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(other.predict(Z.numpy()), reg.predict(Z).numpy(), rtol=1e-10)
    assert isinstance(reg.predict(Z.numpy()), np.ndarray)
    assert reg.predict(Z.tolist()).shape == (5, 2)
    assert isinstance(reg.predict(DataLoader(TensorDataset(Z), batch_size=2)), Tensor)


def test_shapes_follow_the_targets() -> None:
    model = mlp()
    X, y, Z = problem(model, 12)
    flat, column = TangentRegressor(model).fit(X, y[:, 0]), TangentRegressor(model).fit(X, y)
    assert flat.predict(Z).shape == (5,) and column.predict(Z).shape == (5, 1)
    assert flat.predict(Z, return_std=True)[1].shape == (5,)
    assert flat.predict(Z, return_cov=True)[1].shape == column.predict(Z, return_cov=True)[1].shape == (5, 5)
    assert flat.sample(Z, 3).shape == (3, 5) and column.sample(Z, 3).shape == (3, 5, 1)
    assert flat.influence(Z).shape == (5, 12) and column.influence(Z).shape == (5, 1, 12)
    assert flat.path(Z, 2.0).shape == (5,) and flat.loo_.mean.shape == (12,) and column.loo_.mean.shape == (12, 1)
    two = TangentRegressor(mlp(2)).fit(X, y.expand(12, 2))
    assert two.predict(Z, return_cov=True)[1].shape == (10, 10)


def test_float64_arrays_and_a_float32_network() -> None:
    model = mlp().float()
    X, y, Z = (t.numpy() for t in problem(mlp(), 12))
    found = TangentRegressor(model).fit(X, y).predict(Z)
    want = TangentRegressor(copy.deepcopy(model).double()).fit(X, y).predict(Z)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, want, rtol=1e-10)
    assert next(model.parameters()).dtype == torch.float32
    single = TangentRegressor(model, dtype="float32", noise=0.1).fit(X, y).predict(Z)
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, TangentRegressor(model, noise=0.1).fit(X, y).predict(Z), rtol=1e-5, atol=1e-5)
    same = TangentRegressor(model, dtype=torch.float32, noise=0.1).fit(X, y).predict(Z)
    np.testing.assert_allclose(same, single)


def test_data_that_carries_its_targets() -> None:
    model = mlp()
    X, y, Z = problem(model, 12)
    want = TangentRegressor(model).fit(X, y[:, 0]).predict(Z)
    kinds: list[Any] = [
        (X, y[:, 0]),
        TensorDataset(X, y[:, 0]),
        Once(X, y[:, 0]),
        DataLoader(TensorDataset(X, y[:, 0]), batch_size=5),
    ]
    for data in kinds:
        torch.testing.assert_close(TangentRegressor(model).fit(data).predict(Z), want, rtol=1e-9, atol=1e-10)
    # Targets that are given count, whatever else the data carries.
    zeros = TensorDataset(X, torch.zeros(12))
    torch.testing.assert_close(TangentRegressor(model).fit(zeros, y[:, 0]).predict(Z), want, rtol=1e-9, atol=1e-10)


def test_integer_and_list_targets() -> None:
    model = mlp()
    X, _, Z = problem(model, 12)
    y = torch.arange(12)
    want = TangentRegressor(model).fit(X, y.double()).predict(Z)
    for targets in (y, y.tolist(), y.numpy()):
        torch.testing.assert_close(TangentRegressor(model).fit(X, targets).predict(Z), want, rtol=1e-10, atol=0)


def test_results_carry_no_graph() -> None:
    model = mlp()
    X, y, Z = problem(model, 12)
    for params in (None, ["2.*"], ["0.*"]):
        reg = TangentRegressor(model, params=params).fit(X, y)
        found = [reg.posterior_.delta, *reg.predict(Z, return_std=True), *reg.predict(Z, return_cov=True)]
        found += [reg.sample(Z, 2), reg.path(Z, 1.0), reg.influence(Z), reg.linearity(Z).linear]
        assert not any(t.requires_grad for t in found)


def test_gradients_are_nobodys_business() -> None:
    model = mlp(2)
    X, y, Z = problem(model, 20)
    want = {
        (solver, prior): TangentRegressor(model, prior=prior, solver=solver).fit(X, y).predict(Z)
        for solver in DENSE
        for prior in ("shared", "layerwise")
    }
    with_graph = TangentRegressor(model, prior="shared").fit(X.clone().requires_grad_(), y.clone().requires_grad_())
    torch.testing.assert_close(with_graph.predict(Z.clone().requires_grad_()), want["function", "shared"])
    for mode in (torch.no_grad, torch.inference_mode):
        for (solver, prior), wanted in want.items():
            with mode():
                found = TangentRegressor(model, prior=prior, solver=solver).fit(X, y).predict(Z)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda reg: pickle.loads(pickle.dumps(reg))])
def test_copies_of_a_fitted_regressor(duplicate: Any) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.add_(0.1)  # as training does
    X, y, Z = problem(model, 20)
    reg = TangentRegressor(model).fit_tasks([(X, y), (X[:9], y[:9])])
    other = duplicate(reg)
    for a, b in zip(reg.tasks_, other.tasks_, strict=True):
        for x, z in zip(a.predict(Z, return_cov=True), b.predict(Z, return_cov=True), strict=True):
            assert torch.equal(x, z)
    with torch.no_grad():
        other.model[0].weight.add_(0.1)
    with pytest.raises(RuntimeError, match="has changed since the model was linearized"):
        other.predict(Z)
    assert torch.isfinite(reg.predict(Z)).all()
    with pytest.raises(RuntimeError, match="has changed since the model was linearized"):
        duplicate(other).predict(Z)


def test_chunks_do_not_matter() -> None:
    model = mlp(2)
    X, y, Z = problem(model, 13)
    whole, parts = TangentRegressor(model).fit(X, y), TangentRegressor(model, batch_size=3).fit(X, y)
    for a, b in zip(whole.predict(Z, return_cov=True), parts.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_default_network() -> None:
    X = np.linspace(-3, 3, 40)[:, None] * 100
    y = np.sin(X[:, 0] / 100) + 50
    reg = TangentRegressor().fit(X, y)
    assert reg.score(X, y) > 0.99
    std = reg.predict(np.array([[2000.0]]), return_std=True)[1]
    assert std[0] > 10 * reg.predict(X[:1], return_std=True)[1][0]
    two = TangentRegressor().fit(X, np.stack([y, -y], 1))
    np.testing.assert_allclose(two.predict(X)[:, 0], -two.predict(X)[:, 1], atol=0.05)
    torch.testing.assert_close(
        TangentRegressor().fit(torch.tensor(X), torch.tensor(y)).predict(torch.tensor(X)), torch.tensor(reg.predict(X))
    )


def test_the_network_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    reg = TangentRegressor(model, noise=0.1, prior=1.0).fit(normal(10, 3).float(), normal(10))
    reg.sample(normal(4, 3).float(), 2)
    assert model.training and torch.equal(state, torch.random.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_seeds_decide_what_is_drawn() -> None:
    model = mlp()
    X, y, Z = problem(model, 12)
    reg = TangentRegressor(model, seed=3).fit(X, y)
    assert torch.equal(reg.sample(Z, 2), reg.sample(Z, 2))
    assert torch.equal(reg.sample(Z, 2), reg.sample(Z, 2, seed=3))
    assert not torch.equal(reg.sample(Z, 2), reg.sample(Z, 2, seed=4))
    cg = [TangentRegressor(model, solver="cg-weight", noise=0.1, seed=s).fit(X, y) for s in (0, 0, 1)]
    assert torch.equal(cg[0].predict(Z, return_std=True)[1], cg[1].predict(Z, return_std=True)[1])
    assert not torch.equal(cg[0].predict(Z, return_std=True)[1], cg[2].predict(Z, return_std=True)[1])
