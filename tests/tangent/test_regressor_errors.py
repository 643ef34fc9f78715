"""What TangentRegressor says to bad input, hard problems and settings that do not exist: an error or a right answer."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from linnet import TangentRegressor, linearize
from linnet._estimator import dtypes
from linnet.inference import SolverSettings
from linnet.linalg import check_conditioning
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal
from tests.support.reference import dense_posterior

DENSE = ["function", "weight"]
ITERATIVE = ["cg-function", "cg-weight"]


def mlp(outputs: int = 1) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)))


def fit(model: nn.Module | None = None, n: int = 10, *, y: Any = None, **given: Any) -> TangentRegressor:
    model = mlp() if model is None else model
    return TangentRegressor(model, **given).fit(normal(n, 3), normal(n, seed=1) if y is None else y)


# Settings.


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prior": "wide"}, r"prior must be one of 'unit', 'shared', 'ntk', 'balanced', 'layerwise', a positive"),
        ({"prior": -1.0}, "prior is a variance and must be a positive number; got -1.0"),
        ({"prior": {"nothing": 1.0, "*": 1.0}}, "prior names 'nothing'"),
        ({"prior": {"0": 1.0}}, "no variance for '2.weight', '2.bias'"),
        ({"noise": "white"}, r"noise must be one of 'evidence', 'per-output', 'heteroscedastic' or a variance"),
        ({"noise": 0}, r"noise is a variance and must be positive; got 0. Without noise the kernel of equal"),
        ({"noise": -0.1}, "noise is a variance and must be positive"),
        ({"noise": math.nan}, "noise is a variance and must be positive"),
        ({"noise": None}, "noise is a variance and must be positive"),
        ({"noise": []}, "noise is a variance and must be positive"),
        ({"noise": [0.1, 0.2]}, r"noise for each of 10 observations needs shape \(10,\); got \(2,\)"),
        ({"solver": "lu"}, r"solver must be one of 'auto', 'function', 'weight', 'cg-function', 'cg-weight'; got 'lu'"),
        ({"preconditioner": "jacobi"}, "preconditioner must be one of 'auto', 'nystrom', 'pivoted-cholesky', 'none'"),
        ({"mean": "median"}, "mean must be one of 'auto', 'network', 'zero'; got 'median'"),
        ({"dtype": "float16"}, "dtype must be 'auto', 'float32' or 'float64'; got 'float16'"),
        ({"tolerance": 0}, "tolerance must be positive; got 0"),
        ({"iterations": 0}, "iterations must be a positive number; got 0"),
        ({"samples": 1.5}, "samples must be a positive number; got 1.5"),
        ({"rank": "full"}, "rank must be a positive number or 'auto'; got 'full'"),
        ({"memory": "much"}, "memory must be a number of bytes or 'auto'"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_settings_that_do_not_exist(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit(**given)


def test_half_precision_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="float"):
        fit(dtype=torch.float16)


@pytest.mark.parametrize("solver", ITERATIVE)
def test_iterative_solvers_choose_one_scale_and_one_noise(solver: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"prior='layerwise' chooses several.*got '{solver}'.*'function'"):
        fit(prior="layerwise", solver=solver)
    with pytest.raises(NotImplementedError, match="noise per output chooses several hyperparameters"):
        fit(mlp(2), y=normal(10, 2), noise="per-output", solver=solver)
    # Given values are no choice.
    assert fit(mlp(2), y=normal(10, 2), noise=[0.1, 0.2], prior={"*": 1.0}, solver=solver).solver_ == solver


def test_little_memory_leads_to_an_iterative_solver() -> None:
    assert fit(memory=100.0, noise=0.1, prior=1.0).solver_ == "cg-weight"


# Targets.


@pytest.mark.parametrize(
    ("outputs", "shape", "needed"),
    [
        (1, (10, 2), r"\(10,\) or \(10, 1\); got \(10, 2\)"),
        (1, (10, 1, 1), r"\(10,\) or \(10, 1\); got \(10, 1, 1\)"),
        (2, (10,), r"\(10, 2\); got \(10,\)"),
        (2, (10, 1), r"\(10, 2\); got \(10, 1\)"),
        (2, (10, 3), r"\(10, 2\); got \(10, 3\)"),
    ],
)
def test_targets_of_the_wrong_shape(outputs: int, shape: tuple[int, ...], needed: str) -> None:
    with pytest.raises(ValueError, match=f"has {outputs} outputs, so 10 examples need targets of shape {needed}"):
        fit(mlp(outputs), y=normal(*shape))


def test_targets_of_the_wrong_number() -> None:
    with pytest.raises(ValueError, match="There are 10 examples and 9 targets; give one target for each example"):
        fit(y=normal(9))
    with pytest.raises(ValueError, match="There are 10 examples and a number as targets"):
        fit(y=torch.tensor(1.0))
    reg = fit(noise=0.1)
    with pytest.raises(ValueError, match="There are 3 examples and 2 targets"):
        reg.condition(normal(3, 3), normal(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_targets_that_are_not_finite(bad: float) -> None:
    y = normal(10, seed=1)
    y[7] = bad
    for targets in (y, y.numpy(), y[:, None]):
        with pytest.raises(ValueError, match="Targets must be finite; example 7 has NaN or infinity"):
            fit(y=targets)
    reg = fit(noise=0.1)
    with pytest.raises(ValueError, match="Targets must be finite; example 7"):
        reg.condition(normal(10, 3), y)


def test_targets_that_are_not_real_numbers() -> None:
    with pytest.raises(TypeError, match="Unknown label type: targets must be real numbers; got an array of <U"):
        fit(y=["a"] * 10)
    with pytest.raises(TypeError, match="Unknown label type: targets must be real numbers; got an array of object"):
        fit(y=np.array([None] * 10))
    with pytest.raises(TypeError, match=r"targets must be real numbers; got.*complex128"):
        fit(y=np.ones(10) * 1j)
    with pytest.raises(TypeError, match=r"Targets must be real numbers; got torch.complex128"):
        fit(y=torch.ones(10, dtype=torch.complex128))


def test_targets_that_are_missing() -> None:
    match = r"fit requires y to be passed, but the target y is None.*Pass y, or data such as \(X, y\)"
    for data in (normal(5, 3), normal(5, 3).numpy(), TensorDataset(normal(5, 3))):
        with pytest.raises(ValueError, match=match):
            TangentRegressor(mlp()).fit(data)


def test_bad_targets_are_seen_before_the_network_runs_over_the_data() -> None:
    class Counting(nn.Linear):
        examples = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.examples += len(x)
            return super().forward(x)

    y = normal(5000)
    y[4000] = math.nan
    with pytest.raises(ValueError, match="example 4000"):
        TangentRegressor(nn.Sequential(Counting(3, 1))).fit(normal(5000, 3), y)
    assert Counting.examples < 1000


# Inputs.


def test_inputs_that_are_not_finite() -> None:
    X = normal(10, 3)
    X[4, 1] = math.nan
    with pytest.raises(ValueError, match="example 4"):
        TangentRegressor(mlp()).fit(X, normal(10))
    with pytest.raises(ValueError, match="NaN"):
        TangentRegressor(mlp()).fit(X.numpy(), normal(10))
    with pytest.raises(ValueError, match="example 4"):
        fit(noise=0.1).predict(X)


def test_inputs_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        TangentRegressor(mlp()).fit(sparse.dok_array(np.eye(3)), normal(3))
    with pytest.raises(ValueError, match=r"Without model= the inputs must be an array \(n, d\)"):
        TangentRegressor().fit(normal(4, 3, 2), normal(4))
    with pytest.raises(ValueError, match=r"Without model= the inputs must be an array \(n, d\)"):
        TangentRegressor().fit({"x": normal(4, 3)}, normal(4))
    with pytest.raises(ValueError, match="has 2 features, but TangentRegressor is expecting 3"):
        TangentRegressor().fit(normal(8, 3).numpy(), normal(8).numpy()).predict(normal(4, 2).numpy())


# Asking too early, or for too much.


def test_nothing_before_fit() -> None:
    reg = TangentRegressor(mlp())
    X = normal(3, 3)
    for ask in (
        lambda: reg.predict(X),
        lambda: reg.sample(X),
        lambda: reg.path(X, 1.0),
        lambda: reg.influence(X),
        lambda: reg.condition(X, normal(3)),
        lambda: reg.to_module(),
        lambda: reg.apply(),
        lambda: reg.linearity(X),
        lambda: reg.loo_,
        lambda: reg.delta_,
        lambda: reg.layer_relevance_,
    ):
        with pytest.raises(NotFittedError):
            ask()


def test_requests_that_make_no_sense() -> None:
    reg = fit(noise=0.1)
    with pytest.raises(ValueError, match="Ask for return_std or return_cov, not both"):
        reg.predict(normal(3, 3), return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="fit_tasks needs at least one"):
        TangentRegressor(mlp()).fit_tasks([])
    for k in (0, -1, 1.5):
        with pytest.raises(ValueError, match="k is a number of samples and must be positive"):
            reg.sample(normal(3, 3), k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="apply needs a network of your own"):
        TangentRegressor(noise=0.1).fit(normal(5, 3).numpy(), normal(5).numpy()).apply()


def test_a_network_that_changes_after_fit() -> None:
    model = mlp()
    reg = fit(model, noise=0.1)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"'0\.weight' has changed since the model was linearized"):
        reg.predict(normal(3, 3))


# Heteroscedastic networks.


def test_heteroscedastic_networks_have_as_many_variances_as_means() -> None:
    with pytest.raises(ValueError, match=r"as many log variances as means.*outputs \(n, 2 d\); got \(\d+, 3\)"):
        fit(mlp(3), noise="heteroscedastic")


@pytest.mark.parametrize("log_variance", [-1000.0, 1000.0])
def test_log_variances_out_of_range(log_variance: float) -> None:
    model = mlp(2)
    with torch.no_grad():
        model[2].bias[1] = log_variance
    with pytest.raises(ValueError, match=r"log variances of example 0 are too large or too small"):
        fit(model, noise="heteroscedastic")


# Hard problems.


@pytest.mark.parametrize("solver", DENSE)
@pytest.mark.parametrize("n", [5, 80])
def test_constant_targets(n: int, solver: str) -> None:
    model, Z = mlp(), normal(7, 3, seed=4)
    y = torch.full((n,), 3.0, dtype=torch.float64)
    for mean in ("network", "zero"):
        reg = TangentRegressor(model, average=False, mean=mean, solver=solver, noise_floor=0).fit(normal(n, 3), y)
        torch.testing.assert_close(reg.predict(normal(n, 3)), y, rtol=1e-2, atol=1e-2)
    # With the bias alone they are learned from any inputs.
    bias = TangentRegressor(model, average=False, params=["2.bias"], mean="zero", solver=solver, noise_floor=0).fit(
        normal(n, 3), y
    )
    torch.testing.assert_close(bias.predict(Z), torch.full((7,), 3.0, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_constant_targets_and_a_default_network() -> None:
    # Beyond the constant there is nothing left, or rounding.
    X = normal(20, 3).numpy()
    with pytest.raises(ValueError, match=r"equal the mean function exactly.*Give noise="):
        TangentRegressor().fit(X, np.full(20, 2.0))
    reg = TangentRegressor(noise=0.1, prior=1.0).fit(X, np.full(20, 0.1))
    np.testing.assert_allclose(reg.predict(X), 0.1, rtol=1e-12)


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
def test_residuals_of_zero(solver: str) -> None:
    model, X = mlp(), normal(10, 3)
    y = model(X).detach()
    for given in ({}, {"noise": 0.1}, {"prior": 1.0}):
        with pytest.raises(ValueError, match=r"targets equal the mean function exactly.*Give noise= \(and prior=\)"):
            TangentRegressor(model, solver=solver, dtype="float64", **given).fit(X, y)
    reg = TangentRegressor(model, solver=solver, prior=1.0, noise=0.1, dtype="float64").fit(X, y)
    assert float(reg.posterior_.delta.abs().max()) == 0
    torch.testing.assert_close(reg.predict(X), y, rtol=0, atol=0)
    assert bool((reg.predict(X, return_std=True)[1] > 0).all())
    assert set(reg.layer_relevance_.values()) == {0.0} and reg.linearity(X).relative_error == 0


@pytest.mark.parametrize("solver", DENSE + ITERATIVE)
def test_one_example(solver: str) -> None:
    model, X, y = mlp(), normal(1, 3), torch.tensor([2.0], dtype=torch.float64)
    for noise in ("evidence", "per-output"):
        with pytest.raises(ValueError, match=r"One observation cannot tell signal from noise.*Give noise= as a number"):
            TangentRegressor(model, noise=noise, solver=solver).fit(X, y)
    reg = TangentRegressor(model, prior=0.5, noise=0.1, solver=solver, dtype="float64", samples=4000).fit(X, y)
    Z = normal(3, 3, seed=4)
    J, r = dense_jacobian(model, X), y - model(X).detach()[0]
    ref = dense_posterior(J, r, variance=0.5, noise=0.1, new=dense_jacobian(model, Z))
    mean, std = reg.predict(Z, return_std=True)
    torch.testing.assert_close(mean, model(Z).detach()[:, 0] + ref.shift, rtol=1e-5, atol=1e-6)
    spread = 1e-8 if solver in DENSE else 5 * (2 / 4000) ** 0.5
    torch.testing.assert_close(std.square(), ref.covariance.diagonal(), rtol=spread, atol=1e-9)
    if solver in DENSE:
        # Without it there is the prior.
        assert float(reg.loo_.mean[0]) == pytest.approx(float(model(X).detach()), rel=1e-8)
        assert reg.path(X, math.inf).tolist() == pytest.approx([2.0])


def test_one_example_with_several_outputs() -> None:
    reg = TangentRegressor(mlp(3)).fit(normal(1, 3), normal(1, 3, seed=2))
    assert math.isfinite(reg.log_evidence_) and reg.predict(normal(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("solver", DENSE)
def test_duplicate_examples(solver: str) -> None:
    model, Z = mlp(), normal(4, 3, seed=4)
    X, y = normal(6, 3).repeat(2, 1), normal(12, seed=1)
    # With noise, two observations at one place are one at their mean with half of it.
    reg = TangentRegressor(model, prior=0.5, noise=0.2, solver=solver).fit(X, y)
    merged = TangentRegressor(model, prior=0.5, noise=0.1, solver=solver).fit(X[:6], 0.5 * (y[:6] + y[6:]))
    for a, b in zip(reg.predict(Z, return_cov=True), merged.predict(Z, return_cov=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    assert math.isfinite(TangentRegressor(model, solver=solver).fit(X, y).log_evidence_)
    with pytest.raises(ValueError, match=r"noise is a variance and must be positive; got 0.*equal or dependent"):
        TangentRegressor(model, noise=0, solver=solver).fit(X, y)
    with pytest.raises(ArithmeticError, match=r"kernel's largest eigenvalue, and float64 needs.*Give more noise\."):
        TangentRegressor(model, prior=0.5, noise=1e-25, solver=solver).fit(X, y)
    # Tiny, but enough for float64: still the mean.
    tiny = TangentRegressor(model, prior=0.5, noise=1e-9, solver=solver).fit(X, y)
    torch.testing.assert_close(tiny.predict(X[:6]), 0.5 * (y[:6] + y[6:]), rtol=1e-4, atol=1e-4)


@pytest.fixture
def slow_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is slow at float64, where all of a fit is in float32."""
    monkeypatch.setattr(dtypes, "has_fast_float64", lambda device: False)


@pytest.mark.parametrize("solver", DENSE)
def test_a_network_in_float32_is_solved_in_float64(solver: str) -> None:
    model, X, y, Z = mlp(), normal(60, 3), normal(60, seed=1), normal(5, 3, seed=4)
    for noise in (0.1, 1e-5):
        reg = TangentRegressor(model, prior=1.0, noise=noise, dtype="float32", solver=solver).fit(X, y)
        want = TangentRegressor(model, prior=1.0, noise=noise, solver=solver).fit(X, y)
        assert reg.log_evidence_ == pytest.approx(want.log_evidence_, rel=1e-4)
        torch.testing.assert_close(reg.predict(Z), want.predict(Z), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("slow_float64")
@pytest.mark.parametrize("solver", DENSE)
def test_float32_is_refused_where_it_would_be_wrong(solver: str) -> None:
    model, X, y, Z = mlp(), normal(60, 3), normal(60, seed=1), normal(5, 3, seed=4)
    with pytest.raises(ArithmeticError, match=r"float32 needs.*Give more noise, or use dtype='float64'"):
        TangentRegressor(model, prior=1.0, noise=1e-5, dtype="float32", solver=solver).fit(X, y)
    exact = TangentRegressor(model, prior=1.0, noise=1e-5, dtype="float64", solver=solver).fit(X, y)
    assert math.isfinite(exact.log_evidence_)
    reg = TangentRegressor(model, prior=1.0, noise=0.1, dtype="float32", solver=solver).fit(X, y)
    assert reg.predict(Z).dtype == torch.float32
    want = TangentRegressor(model, prior=1.0, noise=0.1, dtype="float64", solver=solver).fit(X, y)
    assert reg.log_evidence_ == pytest.approx(want.log_evidence_, rel=1e-3)
    torch.testing.assert_close(reg.predict(Z).double(), want.predict(Z), rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("slow_float64")
@pytest.mark.parametrize("solver", DENSE)
def test_float32_says_where_it_stops_the_evidence(solver: str) -> None:
    model, X = mlp(), normal(100, 3)
    y = model(X).detach().flatten() + dense_jacobian(model, X) @ normal(41, seed=5)
    with pytest.warns(UserWarning, match=r"less noise than can be told from none.*dtype='float64'"):
        TangentRegressor(model, dtype="float32", solver=solver).fit(X, y)


def test_conditioning_is_that_of_the_largest_eigenvalue() -> None:
    Q = torch.linalg.qr(normal(30, 30))[0]
    for dtype, top in ((torch.float32, 1e6), (torch.float64, 1e15)):
        fine, poor = torch.ones(30), torch.ones(30)
        fine[3], poor[3] = 0.1 * top, 10 * top
        check_conditioning(((Q * fine) @ Q.T).to(dtype))
        with pytest.raises(ArithmeticError, match="of the kernel's largest eigenvalue"):
            check_conditioning(((Q * poor) @ Q.T).to(dtype))


@pytest.mark.usefixtures("slow_float64")
def test_conditioning_on_more_data_is_checked_too() -> None:
    model, X, y = mlp(), normal(40, 3), normal(40, seed=1)
    for solver in DENSE:
        reg = TangentRegressor(model, prior=1.0, noise=2e-4, dtype="float32", solver=solver).fit(X[:1], y[:1])
        with pytest.raises(ArithmeticError, match="float32 needs"):
            reg.condition(X.repeat(20, 1), y.repeat(20))


@pytest.mark.parametrize("solver", ITERATIVE)
def test_conjugate_gradients_that_do_not_converge(solver: str) -> None:
    model, X, y = mlp(), normal(60, 3), normal(60, seed=1)
    with pytest.raises(ArithmeticError, match=r"after 2 iterations.*Try more iterations, a preconditioner of larger"):
        TangentRegressor(
            model, prior=1.0, noise=1e-3, solver=solver, iterations=2, preconditioner="none", dtype="float64"
        ).fit(X, y)


@pytest.mark.parametrize("preconditioner", ["nystrom", "pivoted-cholesky", "none"])
@pytest.mark.parametrize("solver", ITERATIVE)
def test_preconditioners_change_the_work_and_not_the_answer(solver: str, preconditioner: str) -> None:
    model, X, y, Z = mlp(), normal(60, 3), normal(60, seed=1), normal(5, 3, seed=4)
    want = TangentRegressor(model, mean="network", prior=1.0, noise=0.1).fit(X, y)
    reg = TangentRegressor(
        model,
        prior=1.0,
        noise=0.1,
        solver=solver,
        preconditioner=preconditioner,
        rank=10,
        dtype="float64",
        tolerance=1e-8,
    ).fit(X, y)
    torch.testing.assert_close(reg.predict(Z), want.predict(Z), rtol=1e-4, atol=1e-6)
    # 16 probes: four standard errors, and what the estimate of the standard error itself is off.
    assert abs(reg.log_evidence_ - want.log_evidence_) < 4.5 * reg.log_evidence_error_
    assert 0 < reg.log_evidence_error_ < 10


def test_a_kernel_of_zero() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    model = double(Silent())
    for solver in DENSE:
        with pytest.raises(ValueError, match="no selected parameter moves the outputs"):
            TangentRegressor(model, params=["b.*"], solver=solver).fit(normal(10, 3), normal(10, seed=1))
        reg = TangentRegressor(model, params=["b.*"], mean="network", prior=1.0, solver=solver)
        reg.fit(normal(10, 3), normal(10, seed=1))
        r = normal(10, seed=1) - model(normal(10, 3)).detach()[:, 0]
        assert reg.noise_ == pytest.approx((1 + reg.noise_floor / 10) * float(r.square().mean()))


# The network's own data.


def trained(X: Tensor, y: Tensor, *, steps: int) -> nn.Module:
    model = double(nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)), seed=3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X)[:, 0] - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return model


def test_the_networks_own_data_earns_a_warning() -> None:
    X = normal(300, 3)
    y = torch.sin(2 * X[:, 0]) * X[:, 1] + 0.3 * normal(300, seed=1)
    model = trained(X[:150], y[:150], steps=300)
    with pytest.warns(UserWarning, match=r"as if it had been trained on them.*use linnet.Laplace; to") as found:
        TangentRegressor(model).fit(X[:150], y[:150])
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TangentRegressor(model).fit(X[150:], y[150:])  # data that it has not seen
        TangentRegressor(model).fit(X[150:], y[150:] + 10)  # another task
        TangentRegressor(model, mean="zero").fit(X[:150], y[:150])
        TangentRegressor(model, noise=0.1).fit(X[:20], y[:20])  # too few to tell


def test_noise_alone_earns_no_warning() -> None:
    model = mlp()
    lin = linearize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(20):
            X = normal(400, 3, seed=100 + seed)
            TangentRegressor(model, prior=1.0, noise=1.0).fit(X, lin(X)[:, 0] + normal(400, seed=200 + seed))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be positive; got 0.0"),
        ({"tolerance": float("nan")}, "tolerance must be positive; got nan"),
        ({"iterations": 0}, "iterations must be a positive number; got 0"),
        ({"samples": 0}, "samples must be a positive number; got 0"),
        ({"probes": 0}, "probes must be a positive number; got 0"),
        ({"rank": 0}, "rank must be a positive number or 'auto'; got 0"),
        ({"rank": "most"}, "rank must be a positive number or 'auto'; got 'most'"),
        ({"solver": "qr"}, "solver must be one of .*; got 'qr'"),
        ({"preconditioner": "jacobi"}, "preconditioner must be one of .*; got 'jacobi'"),
    ],
)
def test_settings_of_solvers_at_their_bounds(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SolverSettings(**given)
    least = SolverSettings(tolerance=1e-300, iterations=1, samples=1, probes=1, rank=1)
    assert (least.iterations, least.rank) == (1, 1)
    # Every purpose has draws of its own, and the same seed gives the same ones.
    first, again, other, seeded = (
        torch.rand(3, generator=settings.generator(step))
        for settings, step in ((least, 0), (SolverSettings(), 0), (least, 1), (SolverSettings(seed=1), 0))
    )
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, seeded)
