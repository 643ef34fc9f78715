"""The weak prior that keeps the noise from vanishing: against dense searches, in every solver, and where it says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

import linnet
from linnet import TangentRegressor, linearize
from linnet.inference import Choice
from linnet.inference.evidence.gaussian import (
    KernelTask,
    choose_by_kernels,
    choose_by_moments,
    choose_one,
    exact_spectrum,
    kernel_terms,
)
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal
from tests.support.reference import dense_posterior

DENSE = ["function", "weight"]
ITERATIVE = ["cg-function", "cg-weight"]


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def drawn(model: nn.Module, n: int, *, noise: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and targets drawn from the linear model with unit prior: without noise, it can explain them all."""
    X = normal(n, 3, seed=seed)
    J = linearize(model).jacobian(X)
    f = model(X).detach() + (J @ normal(J.shape[1], seed=seed + 2)).view(n, -1)
    return X, f + noise**0.5 * normal(*f.shape, seed=seed + 3)


def maximum(fn: Any, starts: list[tuple[float, ...]]) -> tuple[float, list[float]]:
    """The largest value of a function of logarithms, and where."""
    found = [
        minimize(lambda x: -fn(np.exp(x)), x0, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-9})
        for x0 in starts
    ]
    top = min(found, key=lambda f: f.fun)
    return -top.fun, np.exp(top.x).tolist()


STARTS = [(0.0, -3.0), (0.5, -9.0), (-5.0, 1.0)]


# Against dense searches.


@pytest.mark.parametrize("floor", [1e-3, 0.1])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("solver", DENSE)
def test_the_penalized_evidence_is_maximal(solver: str, noise: float, floor: float) -> None:
    model = mlp()
    X, y = drawn(model, 12, noise=noise)
    J, r = dense_jacobian(model, X), (y - model(X).detach()).flatten()
    energy = floor * float(r.square().mean())

    def evidence(x: np.ndarray) -> float:
        return dense_posterior(J, r, variance=float(x[0]), noise=float(x[1]), new=J[:1]).log_evidence

    want, _ = maximum(lambda x: evidence(x) - 0.5 * energy / float(x[1]), STARTS)
    reg = TangentRegressor(model, average=False, prior="shared", solver=solver, noise_floor=floor).fit(X, y)
    at = np.array([reg.scales_["all"], reg.noise_])
    assert reg.log_evidence_ == pytest.approx(evidence(at), rel=1e-9)  # the plain one
    assert reg.log_evidence_ - 0.5 * energy / reg.noise_ == pytest.approx(want, abs=1e-6)
    plain = TangentRegressor(model, average=False, prior="shared", solver=solver, noise_floor=0).fit(X, y)
    assert plain.log_evidence_ >= reg.log_evidence_
    assert plain.noise_ < reg.noise_ and reg.noise_ >= energy / 12


@pytest.mark.parametrize("solver", DENSE)
def test_every_output_has_a_floor_of_its_own(solver: str) -> None:
    model = mlp(2)
    X, y = drawn(model, 8)
    y = y + torch.tensor([0.0, 1.5]) * normal(8, 2, seed=9)
    J, r = dense_jacobian(model, X), (y - model(X).detach()).flatten()
    energies = 1e-2 * r.view(8, 2).square().mean(0)

    def objective(x: np.ndarray) -> float:
        v = torch.tensor(x[1:])
        found = dense_posterior(J, r, variance=float(x[0]), noise=v.repeat(8), new=J[:1]).log_evidence
        return found - 0.5 * float((energies / v).sum())

    want, _ = maximum(objective, [(0.0, -3.0, 0.0), (0.5, -6.0, 1.0), (-1.0, -4.0, -1.0)])
    given: dict[str, Any] = {"noise": "per-output", "solver": solver, "noise_floor": 1e-2}
    reg = TangentRegressor(model, prior="shared", **given).fit(X, y)
    assert objective(np.array([reg.scales_["all"], *reg.noise_])) == pytest.approx(want, abs=1e-5)
    assert reg.noise_floored_.tolist() == [True, False]
    rows = torch.tensor(reg.noise_).repeat(8)
    ref = dense_posterior(J, r, variance=reg.scales_["all"], noise=rows, new=J[:1])
    assert reg.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-8)
    layers = TangentRegressor(model, prior="layerwise", **given).fit(X, y)
    assert layers.noise_floored_.shape == (2,) and bool((layers.noise_ >= energies.numpy() / 8).all())


@pytest.mark.parametrize("weight", [False, True])
def test_searches_of_several_scales_know_the_prior(weight: bool) -> None:
    parts = [normal(10, q, seed=q) for q in (7, 8)]
    r = parts[0] @ normal(7, seed=1) + 0.3 * parts[1] @ normal(8, seed=2)
    group = torch.repeat_interleave(torch.arange(2), torch.tensor([7, 8]))
    problem = KernelTask({"a": parts[0] @ parts[0].T, "b": parts[1] @ parts[1].T}, r, torch.zeros(10, dtype=torch.long))
    Phi, start, a = torch.cat(parts, 1), Choice((1.0, 1.0), (1.0,), math.nan), 0.05
    if weight:
        found = choose_by_moments([[(Phi.T @ Phi, Phi.T @ r, float(r @ r), 10)]], group, start=start, assumed=[a])
    else:
        found = choose_by_kernels([problem], start=start, assumed=[a])
    value, by_scale, by_noise = kernel_terms(problem, found.scales, found.noise)
    ds, dv = ([slope.value for slope in slopes] for slopes in (by_scale, by_noise))
    assert found.log_evidence == pytest.approx(value, rel=1e-9)
    assert max(abs(x) for x in ds) < 1e-3
    assert dv[0] == pytest.approx(-0.5 * a / found.noise[0], abs=1e-3)
    assert found.path[-1] == pytest.approx(value - 0.5 * a / found.noise[0], rel=1e-6)
    given = choose_by_kernels([problem], start=start, noise=(0.2,), assumed=[a])
    assert given == choose_by_kernels([problem], start=start, noise=(0.2,))


# Laws.


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), m=st.integers(2, 20), share=st.floats(1e-5, 0.5), unit=st.floats(-4, 4))
def test_the_noise_stays_above_the_floor_in_any_units(seed: int, m: int, share: float, unit: float) -> None:
    Phi = normal(m, 25, seed=seed)
    r = Phi @ normal(25, seed=seed + 1)
    spectrum, mean = exact_spectrum(Phi @ Phi.T, r), float(r.square().mean())
    found = choose_one(spectrum, assumed=share * mean)
    assert found.noise[0] >= (1 - 1e-9) * share * mean / m
    assert found.noise[0] >= choose_one(spectrum).noise[0] * (1 - 1e-6)
    assert found.log_evidence == pytest.approx(spectrum.log_evidence(found.scales[0], found.noise[0]), rel=1e-12)
    factor = 10.0**unit
    other = choose_one(exact_spectrum(Phi @ Phi.T, factor * r), assumed=share * mean * factor**2)
    assert other.log_evidence == pytest.approx(found.log_evidence - m * math.log(factor), abs=1e-6)


def test_what_is_given_is_not_touched() -> None:
    model = mlp()
    X, y = drawn(model, 6)
    floors = [TangentRegressor(model, prior=0.7, noise=1e-6, noise_floor=share).fit(X, y) for share in (0.0, 0.5)]
    assert [reg.noise_ for reg in floors] == [1e-6, 1e-6]
    assert not any(reg.noise_floored_ for reg in floors)
    assert floors[0].log_evidence_ == floors[1].log_evidence_
    scaled = [TangentRegressor(model, noise=1e-3, noise_floor=share).fit(X, y).scales_["all"] for share in (0.0, 0.5)]
    assert scaled[0] == scaled[1]


@pytest.mark.parametrize("prior", ["shared", "balanced", "layerwise"])
@pytest.mark.parametrize("solver", DENSE)
def test_many_observations_are_hardly_changed(solver: str, prior: str) -> None:
    model = mlp()
    # In function space 1,000 examples take a while, so that one prior is enough there.
    n = 1000 if solver == "weight" or prior == "shared" else 300
    X, y = drawn(model, n, noise=0.1)
    kept, free = (TangentRegressor(model, prior=prior, solver=solver, noise_floor=a).fit(X, y) for a in (1e-3, 0.0))
    assert kept.noise_ == pytest.approx(free.noise_, rel=1e-3)
    assert kept.log_evidence_ == pytest.approx(free.log_evidence_, rel=1e-6)
    assert kept.noise_floored_ is False and free.noise_floored_ is False


# Every solver, and what is said.


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
def test_few_observations_without_noise_are_said_to_be_so(solver: str) -> None:
    model = mlp()
    X, y = drawn(model, 10)
    r = (y - model(X).detach()).flatten()
    reg = TangentRegressor(model, average=False, prior="shared", solver=solver, dtype="float64").fit(X, y)
    assert reg.noise_floored_ is True
    assert reg.noise_ >= 1e-4 * float(r.square().mean())  # a thousandth of one of ten
    dense = TangentRegressor(model, average=False, prior="shared").fit(X, y)
    assert reg.noise_ == pytest.approx(dense.noise_, rel=1e-6 if solver in DENSE else 0.5)
    noisy = TangentRegressor(model, average=False, prior="shared", solver=solver, dtype="float64").fit(
        *drawn(model, 60, noise=0.5)
    )
    assert noisy.noise_floored_ is False


def test_tasks_have_one_floor() -> None:
    model = mlp()
    tasks = [drawn(model, 6, seed=seed) for seed in (0, 10, 20)]
    reg = TangentRegressor(model, prior="shared").fit_tasks(tasks)
    r = torch.cat([(y - model(X).detach()).flatten() for X, y in tasks])
    assert reg.noise_ >= 1e-3 * float(r.square().mean()) / 18
    assert all(task.noise_floored_ is True and task.noise_ == reg.noise_ for task in reg.tasks_)


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
def test_the_scale_of_known_variances_has_a_floor(solver: str) -> None:
    model = mlp(2)
    X = normal(6, 3)
    out = model(X).detach()
    J = dense_jacobian(model, X, output=lambda raw: raw[:, :1], names=dict(model.named_parameters()))
    step = (J @ normal(J.shape[1], seed=4))[:, None]
    given: dict[str, Any] = {"prior": "shared", "noise": "heteroscedastic", "solver": solver, "dtype": "float64"}
    reg = TangentRegressor(model, **given).fit(X, out[:, :1] + step)
    least = 1e-3 * float((step.square() / out[:, 1:].exp()).mean()) / 6
    assert reg.noise_ >= least and reg.noise_floored_ is True


def test_it_is_kept_by_condition_and_in_files(tmp_path: Path) -> None:
    model = mlp()
    X, y = drawn(model, 14)
    reg = TangentRegressor(model, prior="shared", noise_floor=2e-3).fit(X[:10], y[:10])
    assert reg.noise_floored_ is True
    more = reg.condition(X[10:], y[10:])
    assert more.noise_floored_ is True and more.noise_ == reg.noise_
    reg.save(tmp_path / "reg.safetensors")
    loaded = linnet.load(tmp_path / "reg.safetensors", model)
    assert loaded.noise_floor == 2e-3 and loaded.noise_floored_ is True
    assert loaded.condition(X[10:], y[10:]).noise_floored_ is True


@pytest.mark.parametrize("floor", [-1e-3, 1.0, math.nan, "auto", True, None])
def test_a_floor_is_a_share(floor: Any) -> None:
    with pytest.raises(ValueError, match=r"noise_floor is the share.*0 for none, or a number below 1; got"):
        TangentRegressor(mlp(), noise_floor=floor).fit(*drawn(mlp(), 5))


def test_error_bars_of_few_observations_hold() -> None:
    # Without the floor, some of these fits to five points have no noise and are certain of what is wrong.
    layers = [nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)]
    model = double(nn.Sequential(*layers), 0)
    at = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None]
    scores: dict[float, list[float]] = {0.0: [], 1e-3: []}
    for seed in range(10):
        X = 4 * torch.rand(5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 2
        y = torch.sin(3 * X[:, 0] + seed) + 0.1 * normal(5, seed=seed)
        for floor, kept in scores.items():
            reg = TangentRegressor(model, average=False, mean="zero", prior="shared", noise_floor=floor).fit(X, y)
            mean, std = reg.predict(at, return_std=True, noise=True)
            error = (mean - torch.sin(3 * at[:, 0] + seed)) / std
            kept.append(float((0.5 * error.square() + std.log()).mean()))
    assert np.mean(scores[0.0]) > 1000
    assert np.mean(scores[1e-3]) < 3
    assert np.median(scores[1e-3]) < np.median(scores[0.0])
