"""Features of the inputs beside the network, against a dense Gaussian process with the sum of both kernels."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.base import clone
from torch import Tensor, nn

import linnet
from linnet import TangentRegressor
from linnet.inference import FEATURES
from linnet.tangent.input_features import COLUMNS, LENGTHS, ROWS, SHARE, InputFeatures, propose_features
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def rough(n: int = 30, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that a small network cannot explain: values of (n,) for one output, else (n, c)."""
    X = normal(n, 3, seed=seed)
    y = torch.stack([torch.sin(2 * X[:, 0] + k) * X[:, 1] for k in range(outputs)], 1)
    y = y + 0.1 * normal(n, outputs, seed=seed + 1)
    return X, y[:, 0] if outputs == 1 else y


def kernel(reg: TangentRegressor, X: Tensor, Z: Tensor) -> Tensor:
    """The kernel of both parts between two sets of inputs, (n c, m c)."""
    features = reg._features
    assert features is not None and reg.model is not None
    c, own = reg._outputs, reg.lin_.p - 2 * len(features.frequencies) * reg._outputs
    rows = [dense_jacobian(reg.model, x, names=dict(reg.model.named_parameters())) for x in (X, Z)]
    if reg.noise == "heteroscedastic":
        rows = [one.view(len(one) // (2 * c), 2, c, -1)[:, 0].flatten(0, 1) for one in rows]
    S, variances = reg.prior_variance_[:own], reg.prior_variance_[own:]
    assert bool((variances == variances[0]).all())
    phases = [((x - features.center) / features.spread) @ features.frequencies.T for x in (X, Z)]
    phi = [torch.cat([one.cos(), one.sin()], 1) / math.sqrt(len(features.frequencies)) for one in phases]
    return rows[0] * S @ rows[1].T + variances[0] * torch.kron(phi[0] @ phi[1].T, torch.eye(c).double())


def close(a: Any, b: Any, limit: float = 1e-9) -> None:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))


def rounding_of(C: Tensor) -> float:
    """How far two solves with C may differ, relative to the solution."""
    return max(1e-9, 32 * torch.finfo(C.dtype).eps * float(torch.linalg.cond(C)))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one output": (1, {}),
    "two outputs": (2, {}),
    "noise per output": (2, {"noise": "per-output"}),
    "noise is given": (1, {"noise": 0.01}),
    "noise of each observation": (1, {"noise": torch.linspace(0.01, 0.02, 30).double()}),
    "noise of the network": (1, {"noise": "heteroscedastic"}),
    "mean of zero": (1, {"mean": "zero"}),
    "mean is given": (1, {"mean": "network"}),
}


@pytest.mark.parametrize("name", CASES)
def test_posterior_and_evidence_are_those_of_the_dense_process(name: str) -> None:
    outputs, settings = CASES[name]
    halves = 2 if settings.get("noise") == "heteroscedastic" else 1
    model, (X, y) = mlp(outputs * halves), rough(outputs=outputs)
    reg = TangentRegressor(model, inputs=True, average=False, **settings).fit(X, y)
    assert reg.inputs_ in LENGTHS and reg.solver_ == "function"
    Z, c = normal(7, 3, seed=9), outputs
    out, at = model(X).detach(), model(Z).detach()
    noise = reg.noise_ * out[:, c:].exp() if halves == 2 else torch.as_tensor(reg.noise_, dtype=torch.float64)
    noise = (noise if noise.shape == (30,) else noise.expand(30, c)).flatten()
    base = out[:, :c] if reg.mean_ == "network" else 0 * out[:, :c]
    r = y.view(30, c) - base
    C = kernel(reg, X, X) + torch.diag(noise)
    K, limit = kernel(reg, Z, X), rounding_of(C)
    assert limit < 1e-6
    mean = (K @ torch.linalg.solve(C, r.flatten())).view(7, c) + (at[:, :c] if reg.mean_ == "network" else 0)
    cov = kernel(reg, Z, Z) - K @ torch.linalg.solve(C, K.T)
    found, joint = reg.predict(Z, return_cov=True)
    close(found.view(7, c), mean, limit)
    close(joint, cov, limit)
    close(reg.predict(Z, return_std=True)[1].flatten(), cov.diagonal().sqrt(), limit)
    process = torch.distributions.MultivariateNormal(torch.zeros(30 * c).double(), C)
    close(reg.log_evidence_, process.log_prob(r.flatten()), limit)
    assert reg.selection_ is not None
    (row,) = (row for row in reg.selection_ if row.chosen)
    assert row.inputs == reg.inputs_ and row.name == reg.mean_
    close(row.log_evidence, reg.log_evidence_)
    close(row.leave_one_out, reg.loo_.log_score.sum())
    left = torch.linalg.inv(C)[:c, :c].inverse() @ torch.linalg.solve(C, r.flatten())[:c]
    close(torch.as_tensor(reg.loo_.mean).view(30, c)[0], y.view(30, c)[0] - left, limit)


def test_averages_are_over_scale_and_noise_of_the_sum_of_kernels() -> None:
    model, (X, y) = mlp(), rough()
    reg = TangentRegressor(model, inputs=True).fit(X, y)
    point = TangentRegressor(model, inputs=True, average=False).fit(X, y)
    assert reg.averaged_ and not point.averaged_
    close(reg.log_evidence_, point.log_evidence_)
    C = kernel(reg, X, X) + reg.noise_ * torch.eye(30).double()
    P = torch.linalg.inv(C)
    expected = y - P @ (y - model(X).detach()[:, 0] * (reg.mean_ == "network")) / P.diagonal()
    close(reg.loo_.mean, expected, rounding_of(C))


@pytest.mark.parametrize("columns", [1, 3, 11])
def test_the_kernel_of_the_features_is_nearly_that_of_radial_basis_functions(columns: int) -> None:
    X = 2 + 3 * normal(60, columns)
    features = propose_features(X, None, dtype=torch.float64, seed=0)
    Z = (X - X.mean(0)) / X.std(0, unbiased=False)
    for length, one in zip(LENGTHS, features, strict=True):
        exact = torch.exp(-torch.cdist(Z, Z).square() / (2 * columns * length**2))
        phi = one(X)
        assert one.length == length
        torch.testing.assert_close((phi * phi).sum(1), torch.ones(60).double(), rtol=1e-12, atol=0)
        assert float((phi @ phi.T - exact).square().mean().sqrt()) < len(one.frequencies) ** -0.5


def test_a_constant_column_changes_nothing() -> None:
    X = normal(20, 2)
    a, b = (propose_features(x, None, dtype=torch.float64, seed=0)[0] for x in (X, torch.cat([X, 0 * X], 1)))
    assert bool(torch.isfinite(b.frequencies).all()) and b(torch.cat([X, 0 * X], 1)).shape == a(X).shape


def test_auto_takes_features_where_the_network_knows_little_and_none_where_it_knows() -> None:
    model = mlp()
    X, y = rough(60)
    reg = TangentRegressor(model).fit(X, y)
    assert reg.inputs_ is not None and reg.selection_ is not None
    assert [(row.name, row.inputs) for row in reg.selection_] == [
        (name, length) for length in (None, *LENGTHS) for name in ("network", "zero")
    ]
    best = max(reg.selection_, key=lambda row: row.score)
    assert best.chosen and best.inputs == reg.inputs_
    plain = TangentRegressor(model, inputs=False).fit(X, y)
    Z, z = rough(200, seed=5)
    errors = [float((one.predict(Z) - z).square().mean()) for one in (reg, plain)]
    assert errors[0] < errors[1] and plain.inputs_ is None
    for seed in range(4):  # the network's own tangent
        J = dense_jacobian(model, X)
        own = model(X).detach()[:, 0] + J @ (0.3 * normal(J.shape[1], seed=seed)) + 0.05 * normal(60, seed=seed + 1)
        assert TangentRegressor(model).fit(X, own).inputs_ is None


def test_variance_of_the_features_is_a_multiple_of_that_of_the_network() -> None:
    model, (X, y) = mlp(), rough()
    reg = TangentRegressor(model, inputs=True).fit(X, y)
    J, S = dense_jacobian(model, X), reg.prior_variance_
    own = J.shape[1]
    close(S[own:].mean(), SHARE * (J.square() @ S[:own]).mean())


def test_weights_count_as_repeated_examples() -> None:
    model, (X, y) = mlp(), rough()
    w = torch.tensor([1, 2, 1] * 10)
    reg = TangentRegressor(model, inputs=True, average=False).fit(X, y, w)
    many = TangentRegressor(model, inputs=True, average=False)
    many.fit(X.repeat_interleave(w, 0), y.repeat_interleave(w, 0))
    assert reg.selection_ is not None and many.selection_ is not None
    for a, b in zip(reg.selection_, many.selection_, strict=True):
        torch.testing.assert_close(a.log_evidence, b.log_evidence, rtol=1e-6, atol=0)  # of two searches
    Z = normal(5, 3, seed=4)
    torch.testing.assert_close(reg.predict(Z), many.predict(Z), rtol=1e-4, atol=1e-5)


# Later: files, modules, more data and less data.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_files(tmp_path: Path, dtype: torch.dtype) -> None:
    model, (X, y) = mlp().to(dtype), rough()
    X = X.to(dtype)
    reg = TangentRegressor(model, inputs=True).fit(X, y)
    reg.save(tmp_path / "reg.safetensors")
    again = linnet.load(tmp_path / "reg.safetensors", model)
    Z = normal(6, 3, seed=3).to(dtype)
    assert again.inputs is True and again.inputs_ == reg.inputs_ and again.selection_ == reg.selection_
    for a, b in zip(again.predict(Z, return_std=True), reg.predict(Z, return_std=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    more = again.condition(Z, Z[:, 0])
    torch.testing.assert_close(more.predict(X), reg.condition(Z, Z[:, 0]).predict(X), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="other weights"):
        linnet.load(tmp_path / "reg.safetensors", mlp(seed=3).to(dtype))
    copied = pickle.loads(pickle.dumps(reg))
    torch.testing.assert_close(copied.predict(Z), reg.predict(Z), rtol=1e-12, atol=0)


@pytest.mark.parametrize("outputs", [1, 2])
def test_modules(outputs: int) -> None:
    model, (X, y) = mlp(outputs), rough(outputs=outputs)
    reg = TangentRegressor(model, inputs=True).fit(X, y)
    Z = normal(6, 3, seed=3)
    mean, std = reg.predict(Z, return_std=True)
    found = reg.to_module(error_bars=True)(Z)
    torch.testing.assert_close(found[0], mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found[1], std, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(reg.to_module()(Z), mean.view(6, -1), rtol=1e-9, atol=1e-9)
    asked = Z.clone().requires_grad_()
    torch.testing.assert_close(reg.to_module()(asked), mean.view(6, -1), rtol=1e-9, atol=1e-9)
    sample = reg.sample(Z, 3, seed=1)
    assert sample.shape == (3, *mean.shape) and bool(torch.isfinite(sample).all())


def test_exported_files(tmp_path: Path) -> None:
    model, (X, y) = mlp(), rough()
    reg = TangentRegressor(model, inputs=True).fit(X, y)
    reg.to_module(error_bars=True).export(tmp_path / "reg.pt2", X[:4])
    mean, std = torch.export.load(tmp_path / "reg.pt2").module()(X)
    expected = reg.predict(X, return_std=True)
    torch.testing.assert_close(mean, expected[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(std, expected[1], rtol=1e-6, atol=1e-9)


def test_more_data_and_less_data() -> None:
    model, (X, y) = mlp(), rough(40)
    reg = TangentRegressor(model, inputs=True, average=False).fit(X[:30], y[:30])
    Z = normal(5, 3, seed=4)
    more = reg.condition(X[30:], y[30:])
    for one, rows in ((more, slice(0, 40)), (reg.refit(X[10:40], y[10:40]), slice(10, 40))):
        base = model(X[rows]).detach()[:, 0] if reg.mean_ == "network" else 0
        C = kernel(reg, X[rows], X[rows])
        C.diagonal().add_(reg.noise_)
        expected = kernel(reg, Z, X[rows]) @ torch.linalg.solve(C, y[rows] - base)
        expected = expected + (model(Z).detach()[:, 0] if reg.mean_ == "network" else 0)
        close(one.predict(Z), expected, rounding_of(C))
        assert one.inputs_ == reg.inputs_
    less, same = more.forget(range(10)), reg.refit(X[10:], y[10:])
    for a, b in zip(less.predict(Z, return_std=True), same.predict(Z, return_std=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    assert FEATURES in less.certificate_.remains and FEATURES not in more.certificate_.remains
    plain = TangentRegressor(model, inputs=False).fit(X, y).forget([0])
    assert FEATURES not in plain.certificate_.remains
    late = TangentRegressor(model).fit(X[30:], y[30:], source=reg)
    torch.testing.assert_close(late.predict(Z), more.predict(Z), rtol=1e-12, atol=0)
    assert clone(reg).inputs is True


def test_influence_and_attribution() -> None:
    model, (X, y) = mlp(), rough()
    reg = TangentRegressor(model, inputs=True, average=False).fit(X, y)
    Z = normal(4, 3, seed=4)
    parts = reg.influence(Z)
    without = reg.forget([3])
    torch.testing.assert_close(parts[:, 3], reg.predict(Z) - without.predict(Z), rtol=1e-6, atol=1e-8)


# Names, and what there is no model with features for.


def test_parameters_have_the_names_of_the_network() -> None:
    model, (X, y) = mlp(), rough()
    before = copy.deepcopy(model.state_dict())
    reg = TangentRegressor(model, "2.*", inputs=True, mean="network").fit(X, y)
    assert list(reg.delta_) == ["2.weight", "2.bias", "input_features.weight"]
    assert set(reg.layer_relevance_) == {"2", "input_features"}
    assert sum(reg.layer_relevance_.values()) == pytest.approx(1)
    torch.testing.assert_close(reg.apply()(X)[:, 0], reg.predict(X), rtol=1e-9, atol=1e-9)  # linear in these weights
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_random_numbers_of_the_caller_stay() -> None:
    model, (X, y) = mlp(), rough()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = TangentRegressor(model, inputs=True).fit(X, y)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    again, other = (TangentRegressor(model, inputs=True, seed=seed).fit(X, y) for seed in (0, 1))
    assert torch.equal(first.predict(X), again.predict(X)) and not torch.equal(first.predict(X), other.predict(X))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prior": ({"prior": 0.5}, "a prior with one scale"),
    "layerwise": ({"prior": "layerwise"}, "a prior with one scale"),
    "weight space": ({"solver": "weight"}, "function space"),
    "iterative": ({"solver": "cg-weight"}, "function space"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_without_features(name: str) -> None:
    settings, reason = REFUSED[name]
    model, (X, y) = mlp(), rough()
    with pytest.raises(NotImplementedError, match=f"inputs=True.*{reason}.*Use inputs=False"):
        TangentRegressor(model, inputs=True, **settings).fit(X, y)
    assert TangentRegressor(model, **settings).fit(X, y).inputs_ is None


def test_data_without_features() -> None:
    model, (X, y) = mlp(), rough()
    given = TangentRegressor(model, inputs=True)
    with pytest.raises(NotImplementedError, match="one task"):
        given.fit_tasks([(X, y), (X, y)])
    with pytest.raises(NotImplementedError, match="without source="):
        given.fit(X, y, source=(X, y))
    with pytest.raises(NotImplementedError, match="a network of your own"):
        TangentRegressor(inputs=True).fit(X, y)
    with pytest.raises(NotImplementedError, match="one input"):
        given.fit({"input": X}, y)
    with pytest.raises(NotImplementedError, match="three observations"):
        given.fit(X[:2], y[:2])
    wide = double(nn.Linear(COLUMNS + 1, 1))
    with pytest.raises(NotImplementedError, match=f"at most {COLUMNS} columns"):
        TangentRegressor(wide, inputs=True).fit(normal(30, COLUMNS + 1), y)
    with pytest.raises(NotImplementedError, match=f"up to {ROWS:,} observations"):
        given.fit(normal(ROWS + 1, 3), normal(ROWS + 1))
    for reg in (
        TangentRegressor(model).fit_tasks([(X, y), (X, y)]),
        TangentRegressor(model).fit({"input": X}, y),
        TangentRegressor(model).fit(X, y, source=(X, y)),
        TangentRegressor(model, mean="network").fit(X, y),
        TangentRegressor(wide).fit(normal(30, COLUMNS + 1), y),
    ):
        assert reg.inputs_ is None
    with pytest.raises(ValueError, match="inputs must be True, False or 'auto'; got 'yes'"):
        TangentRegressor(model, inputs="yes").fit(X, y)


def test_members_choose_for_themselves_and_a_new_fit_chooses_anew() -> None:
    model, (X, y) = mlp(), rough(60)
    reg = TangentRegressor([model, mlp(seed=1)]).fit(X, y)
    assert all(member.inputs_ is not None for member in reg.members_)
    with pytest.raises(AttributeError, match=r"members_\[0\].inputs_"):
        _ = reg.inputs_
    one = TangentRegressor(model).fit(X, y)
    assert one.inputs_ is not None
    assert one.set_params(inputs=False).fit(X, y).inputs_ is None and list(one.delta_)[-1] == "2.bias"


def test_posteriors_over_other_features_are_not_merged() -> None:
    model, (X, y) = mlp(), rough(60)
    how = {"inputs": True, "average": False, "mean": "network", "noise": 0.1}
    parts = [TangentRegressor(model, **how).fit(X[i::2], y[i::2]) for i in range(2)]
    with pytest.raises(ValueError, match="features of the inputs"):
        linnet.merge(parts)
    assert isinstance(parts[0]._features, InputFeatures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_that_hardly_vary_and_rows_far_away(dtype: torch.dtype) -> None:
    """Phases stay small enough that their rounding does not depend on the batch."""
    X, y = rough(20)
    constant = torch.full((20, 1), 0.1 + 0.2, dtype=torch.float64)
    ulp = constant + torch.finfo(dtype).eps * (torch.arange(20) % 2)[:, None]
    rare = torch.zeros(20, 1, dtype=torch.float64)
    rare[0] = 1e-6
    X = torch.cat([X, constant, ulp, rare], 1).to(dtype)
    model = double(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))).to(dtype)
    reg = TangentRegressor(model, inputs=True, progress=False).fit(X, y.to(dtype))
    new = torch.cat([X[:5], X[:5] + 1e3, -X[:5] * 1e6])
    mean, std = reg.predict(new, return_std=True)
    assert bool(torch.isfinite(mean).all()) and bool((std > 0).all())
    alone = torch.cat([reg.predict(x[None]) for x in new])
    torch.testing.assert_close(alone, mean, rtol=1e4 * torch.finfo(dtype).eps, atol=1e3 * torch.finfo(dtype).eps)
    features = reg._features
    assert features is not None and features.spread[3] == 1 and features.spread[4] == 1 and features.spread[5] < 1e-6


def test_few_rows_for_each_column_are_no_comparison() -> None:
    X, y = rough(7)
    assert TangentRegressor(mlp(), progress=False).fit(X[:6], y[:6]).selection_[-1].inputs is None  # type: ignore[index]
    more = TangentRegressor(mlp(), progress=False).fit(X, y)
    assert more.selection_ is not None and {trial.inputs for trial in more.selection_} == {None, *LENGTHS}
    assert TangentRegressor(mlp(), inputs=True, progress=False).fit(X[:6], y[:6]).inputs_ in LENGTHS
