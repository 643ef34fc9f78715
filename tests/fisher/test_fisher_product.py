"""Fisher-vector products against dense ones; what the finite difference costs in digits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.fisher import fisher_vector_product
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from linnet.testing import dense_jacobian, zoo
from tests.support.drawn import double, normal

N, D, C = 7, 3, 4
LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": Gaussian(0.3),
    "gaussian per output": Gaussian(torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)),
    "heteroscedastic": Heteroscedastic(),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
}
every = pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS.keys())


def mlp() -> nn.Module:
    return double(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)))


def dense_fisher(model: nn.Module, x: Tensor, likelihood: Likelihood) -> Tensor:
    """J^T H J, each block of H the second derivative of the KL divergence in the outputs."""
    f, J = model(x).detach(), dense_jacobian(model, x)
    blocks = [
        torch.autograd.functional.hessian(lambda g, i=i: likelihood.kl(f[i : i + 1], g[None]).sum(), f[i].clone())
        for i in range(len(f))
    ]
    return J.T @ torch.block_diag(*blocks) @ J


def error(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return float((value - reference).norm() / reference.norm())


@every
@pytest.mark.parametrize("k", [None, 1, 3, 40])
def test_exact(likelihood, k):
    model, x = mlp(), normal(N, D, seed=1)
    lin = linnet.linearize(model)
    V = normal(lin.p, *(() if k is None else (k,)), seed=2)
    found = fisher_vector_product(lin, x, V, likelihood=likelihood, batch_size=3)
    assert error(found, dense_fisher(model, x, likelihood) @ V) <= 1e-9


def test_gaussian_is_the_normal_product():
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    v = normal(lin.p, seed=2)
    found = fisher_vector_product(lin, x, v, likelihood=Gaussian(0.25))
    assert error(found, 4 * lin.jacobian(x).normal(v)) <= 1e-12


@pytest.mark.parametrize(("method", "rounding"), [("exact", 1e-12), ("finite_difference", 1e-7)])
def test_sums_over_examples_not_means(method, rounding):
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    v = normal(lin.p, seed=2)
    once = fisher_vector_product(lin, x, v, likelihood=Categorical(), method=method)
    twice = fisher_vector_product(lin, torch.cat([x, x]), v, likelihood=Categorical(), method=method)
    assert error(twice, 2 * once) <= rounding


@every
def test_finite_difference(likelihood):
    model, x = mlp(), normal(N, D, seed=1)
    lin = linnet.linearize(model)
    V = normal(lin.p, 3, seed=2) * torch.tensor([1.0, 1e6, 1e-6], dtype=torch.float64)
    found = fisher_vector_product(lin, x, V, likelihood=likelihood, method="finite_difference", batch_size=3)
    exact = dense_fisher(model, x, likelihood) @ V
    for j in range(3):  # the step goes with the length of each column
        assert error(found[:, j], exact[:, j]) <= 1e-6
    vector = fisher_vector_product(lin, x, V[:, 0], likelihood=likelihood, method="finite_difference", batch_size=3)
    assert torch.equal(vector, found[:, 0])


@every
def test_finite_difference_is_of_first_order(likelihood):
    model, x = mlp(), normal(N, D, seed=1)
    lin = linnet.linearize(model)
    v = normal(lin.p, seed=2)
    exact = dense_fisher(model, x, likelihood) @ v
    errors = [
        error(fisher_vector_product(lin, x, v, likelihood=likelihood, method="finite_difference", eps=eps), exact)
        for eps in (1e-3, 1e-4, 1e-5, 1e-6)
    ]
    for large, small in pairwise(errors):
        assert small == pytest.approx(large / 10, rel=0.1)


def test_finite_difference_loses_digits_in_small_steps():
    model, x = mlp(), normal(N, D, seed=1)
    lin = linnet.linearize(model)
    v = normal(lin.p, seed=2)
    exact = dense_fisher(model, x, Categorical()) @ v
    given = {"likelihood": Categorical(), "method": "finite_difference"}
    default = error(fisher_vector_product(lin, x, v, **given), exact)
    assert error(fisher_vector_product(lin, x, v, eps=1e-13, **given), exact) > 100 * default
    assert default <= 1e-7


def test_finite_difference_in_float32():
    model, x = mlp(), normal(N, D, seed=1)
    exact = dense_fisher(model, x, Categorical())
    lin = linnet.linearize(model.float())
    v = normal(lin.p, seed=2).float()
    for method, bound in (("exact", 1e-5), ("finite_difference", 1e-2)):
        found = fisher_vector_product(lin, x.float(), v, likelihood=Categorical(), method=method)
        assert found.dtype == torch.float32
        assert error(found.double(), exact @ v.double()) <= bound


@pytest.mark.parametrize(
    "name", ["tied_weights", "frozen_layers", "dict_inputs", "inplace_residual", "raw_parameters", "resnet", "lstm"]
)
def test_architectures(name):
    case = zoo()[name]
    model, data = case.build(), case.data(4, 0)
    lin = linnet.linearize(model, output=case.output)
    J, f = case.dense(model, data), case.outputs(model, data).detach()
    v = normal(lin.p, seed=2)
    exact = J.T @ (f.sigmoid() * (1 - f.sigmoid()) * (J @ v).view_as(f)).flatten()
    assert error(fisher_vector_product(lin, data, v, likelihood=Bernoulli()), exact) <= 1e-9
    found = fisher_vector_product(lin, data, v, likelihood=Bernoulli(), method="finite_difference")
    assert error(found, exact) <= 1e-3


def test_finite_difference_of_some_parameters_leaves_the_network_as_it_is():
    model, x = mlp(), normal(N, D, seed=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    lin = linnet.linearize(model, "2.*")
    theta = {name: t.clone() for name, t in lin.theta.items()}
    v = normal(lin.p, seed=2)
    given = {"likelihood": Categorical()}
    found = fisher_vector_product(lin, x, v, method="finite_difference", **given)
    assert error(found, fisher_vector_product(lin, x, v, **given)) <= 1e-6
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(t, theta[name]) for name, t in lin.theta.items())
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(RuntimeError, match=r"'0\.weight' has changed"):
        fisher_vector_product(lin, x, v, method="finite_difference", **given)


def test_batches_from_a_loader():
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    v = normal(lin.p, seed=2)
    loader = DataLoader(TensorDataset(x, torch.arange(N)), batch_size=2)
    for method in ("exact", "finite_difference"):
        given = {"likelihood": Categorical(), "method": method}
        found = fisher_vector_product(lin, loader, v, **given)
        assert error(found, fisher_vector_product(lin, x, v, **given)) <= 1e-6


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_a_jacobian_as_data(method):
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    J, v = lin.jacobian(x, 3), normal(lin.p, seed=2)
    given = {"likelihood": Categorical(), "method": method}
    expected = fisher_vector_product(lin, x, v, batch_size=3, **given)
    assert torch.equal(fisher_vector_product(lin, J, v, **given), expected)
    for other, options in ((linnet.linearize(mlp()), {}), (lin, {"batch_size": 3}), (lin, {"memory": 1e6})):
        with pytest.raises(ValueError, match="must belong to the linearization that is given too"):
            fisher_vector_product(other, J, v, **given, **options)


def test_finite_difference_takes_one_pass_a_column(monkeypatch):
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    J, forward, calls = lin.jacobian(x), lin.network.forward.__func__, []
    monkeypatch.setattr(type(lin.network), "forward", lambda *args: (calls.append(1), forward(*args))[1])
    given = {"likelihood": Categorical(), "method": "finite_difference"}
    fisher_vector_product(lin, J, normal(lin.p, 3), eps=1e-6, **given)  # which compares the chunk
    calls.clear()
    fisher_vector_product(lin, J, normal(lin.p, 3), eps=1e-6, **given)
    assert len(calls) == 1 + 3
    calls.clear()
    fisher_vector_product(lin, J, normal(lin.p, 3), **given)
    assert len(calls) == 1 + 3 + 3  # a trial of each step, on a few examples


def test_zero_columns_and_none():
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    for method in ("exact", "finite_difference"):
        given = {"likelihood": Gaussian(1.0), "method": method}
        assert fisher_vector_product(lin, x, torch.zeros(lin.p, dtype=torch.float64), **given).abs().max() == 0
        assert fisher_vector_product(lin, x, normal(lin.p, 0), **given).shape == (lin.p, 0)


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
def test_errors(method):
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    p, given = lin.p, {"likelihood": Categorical(), "method": method}
    with pytest.raises(ValueError, match=rf"needs V of shape \({p},\) or \({p}, k\); got \(3,\)"):
        fisher_vector_product(lin, x, normal(3), **given)
    with pytest.raises(TypeError, match=r"Jacobian is torch\.float64 on cpu, so V must be too; got torch\.float32"):
        fisher_vector_product(lin, x, normal(p).float(), **given)
    with pytest.raises(ValueError, match=r"noise for 3 outputs and the network has 4"):
        fisher_vector_product(lin, x, normal(p), likelihood=Gaussian(torch.ones(3)), method=method)


def test_errors_of_methods():
    lin, x = linnet.linearize(mlp()), normal(N, D, seed=1)
    v = normal(lin.p)
    with pytest.raises(ValueError, match=r"method must be 'exact' or 'finite_difference'; got 'fd'"):
        fisher_vector_product(lin, x, v, likelihood=Categorical(), method="fd")
    with pytest.raises(ValueError, match=r"method='exact' takes none, got 0\.1"):
        fisher_vector_product(lin, x, v, likelihood=Categorical(), eps=0.1)
    for eps in (0.0, float("nan")):
        with pytest.raises(ValueError, match=r"eps must be a finite step other than zero; got"):
            fisher_vector_product(lin, x, v, likelihood=Categorical(), method="finite_difference", eps=eps)
    half = linnet.linearize(mlp().bfloat16())
    with pytest.raises(ValueError, match=r"needs weights in float32 or float64, and .* torch\.bfloat16"):
        fisher_vector_product(half, x.bfloat16(), v.float(), likelihood=Categorical(), method="finite_difference")
