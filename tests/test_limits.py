"""Kernels of infinite width: against quadrature, against wide networks, and inside GPyTorch."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import erf, ndtr
from torch import Tensor

import linnet
from linnet.limits import InfiniteWidth, infinite_width
from linnet.probability import make_prior
from tests.support.drawn import normal

CASES = [(activation, kernel) for activation in ("relu", "erf") for kernel in ("ntk", "nngp")]


def density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def expectations(activation: str, c: float, a: float, b: float) -> tuple[float, float]:
    """``E[phi(u) phi(v)]`` and that of the derivatives: quadrature over u, v given u being normal."""
    slope, left = c / a, math.sqrt(max(b - c * c / a, 1e-300))
    root = math.sqrt(a)

    def value(z: float) -> float:
        u, m = root * z, slope * root * z
        if activation == "relu":
            return u * (m * ndtr(m / left) + left * density(m / left)) * density(z)
        return erf(u) * erf(m / math.sqrt(1 + 2 * left**2)) * density(z)

    def derivative(z: float) -> float:
        u, m = root * z, slope * root * z
        if activation == "relu":
            return ndtr(m / left) * density(z)
        # E of exp(-v^2) over N(m, left^2)
        inner = math.exp(-m * m / (1 + 2 * left**2)) / math.sqrt(1 + 2 * left**2)
        return 4 / math.pi * math.exp(-u * u) * inner * density(z)

    start = 0.0 if activation == "relu" else -12.0
    return tuple(quad(fn, start, 12, epsabs=1e-13, epsrel=1e-12, limit=200)[0] for fn in (value, derivative))


def by_quadrature(x: Tensor, y: Tensor, activation: str, kernel: str, depth: int, weight: float, bias: float) -> float:
    d = len(x)
    c, a, b = (bias + weight * float(u @ v) / d for u, v in ((x, y), (x, x), (y, y)))
    theta = c
    for _ in range(depth):
        value, slope = expectations(activation, c, a, b)
        a, b = (bias + weight * expectations(activation, q * (1 - 1e-15), q, q)[0] for q in (a, b))
        c = bias + weight * value
        theta = c + weight * slope * theta
    return theta if kernel == "ntk" else c


@pytest.mark.parametrize(("activation", "kernel"), CASES)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_against_quadrature(activation, kernel, depth):
    x = normal(4, 5)
    K = infinite_width(x, x, depth=depth, activation=activation, kernel=kernel, weight_variance=1.7, bias_variance=0.3)
    for i, j in ((0, 1), (0, 2), (1, 3)):
        exact = by_quadrature(x[i], x[j], activation, kernel, depth, 1.7, 0.3)
        assert float(K[i, j]) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize(("activation", "kernel"), CASES)
def test_the_diagonal_is_the_matrix_diagonal(activation, kernel):
    how = {"depth": 3, "activation": activation, "kernel": kernel, "bias_variance": 0.2}
    x, y = normal(2, 6, 3), normal(2, 6, 3, seed=1)
    for other in (x, y, x.clone()):
        K = infinite_width(x, other, **how)
        torch.testing.assert_close(infinite_width(x, other, **how, diag=True), K.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(infinite_width(x, y, **how)[1], infinite_width(x[1], y[1], **how))
    torch.testing.assert_close(infinite_width(x, y[0], **how)[1], infinite_width(x[1], y[0], **how))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    depth=st.integers(0, 5),
    case=st.sampled_from(CASES),
    weight=st.floats(0.1, 4),
    bias=st.floats(0, 2),
)
def test_kernels_are_positive_semidefinite(seed, depth, case, weight, bias):
    x = normal(12, 2, seed=seed)
    x[6:] = x[:6] * (1 + 1e-9) if seed % 2 else -x[:6]  # nearly equal and opposite inputs
    K = infinite_width(
        x, x, depth=depth, activation=case[0], kernel=case[1], weight_variance=weight, bias_variance=bias
    )
    torch.testing.assert_close(K, K.T)
    assert torch.linalg.eigvalsh(K).min() > -1e-7 * K.diagonal().max()


def test_different_inputs_of_a_sphere_give_a_definite_kernel():
    x = torch.nn.functional.normalize(normal(30, 3), dim=1)
    for activation, kernel in CASES:
        K = infinite_width(x, x, depth=3, activation=activation, kernel=kernel, bias_variance=0.1)
        assert torch.linalg.eigvalsh(K).min() > 1e-7


def test_relu_is_homogeneous_and_depth_zero_is_linear():
    x, y = normal(3, 4), normal(2, 4, seed=1)
    K = infinite_width(x, y, depth=2)
    torch.testing.assert_close(infinite_width(3 * x, y, depth=2), 3 * K)
    torch.testing.assert_close(infinite_width(x, y, depth=0, weight_variance=4.0), x @ y.T)
    torch.testing.assert_close(infinite_width(x, 0 * y, depth=2), 0 * K)
    # Weight variance 2 keeps the variance; the NTK then grows by one kernel for each layer.
    torch.testing.assert_close(infinite_width(x, x, depth=3, diag=True), 4 * 2 * x.square().mean(1))


# Derivatives.


@pytest.mark.parametrize(("activation", "kernel"), CASES)
def test_gradients(activation, kernel):
    x, y = normal(3, 2).requires_grad_(), normal(4, 2, seed=1).requires_grad_()
    weight, bias = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.5, 0.3))

    def of(*given: Tensor) -> Tensor:
        a, b, w, v = given
        how = {"depth": 2, "activation": activation, "kernel": kernel}
        return infinite_width(a, b, weight_variance=w, bias_variance=v, **how)

    assert torch.autograd.gradcheck(of, (x, y, weight, bias))
    assert torch.autograd.gradgradcheck(of, (x, y, weight, bias))


@pytest.mark.parametrize(("activation", "kernel"), CASES)
def test_gradients_where_inputs_coincide(activation, kernel):
    how = {"depth": 2, "activation": activation, "kernel": kernel, "bias_variance": 0.1}
    x = normal(3, 2).requires_grad_()
    (both,) = torch.autograd.grad(infinite_width(x, x, **how).diagonal().sum(), x)
    (along,) = torch.autograd.grad(infinite_width(x, x, **how, diag=True).sum(), x)
    torch.testing.assert_close(both, along)
    # In one argument alone it is half of that, by symmetry.
    (one,) = torch.autograd.grad(infinite_width(x, x.detach().clone(), **how).diagonal().sum(), x)
    torch.testing.assert_close(one, both / 2)
    (zero,) = torch.autograd.grad(infinite_width(0 * x, x, **how).sum(), x)
    assert zero.isfinite().all()


# Networks of finite width.


def kernel_error(kernel: InfiniteWidth, width: int, seed: int, x: Tensor, params: str | None = None) -> float:
    """The relative error of a drawn network's kernel."""
    lin = linnet.linearize(kernel.network(x.shape[1], width, seed=seed), params)
    K = lin.jacobian(x, progress=False).gram(scale=kernel.prior(lin))
    limit = kernel(x).to_dense().detach()
    return float(torch.linalg.matrix_norm(K - limit) / torch.linalg.matrix_norm(limit))


def errors(kernel: InfiniteWidth, widths: tuple[int, ...], seeds: int, params: str | None = None) -> list[float]:
    """Root mean squares over seeds, one for each width."""
    x = normal(4, 3)
    return [
        math.sqrt(sum(kernel_error(kernel, width, seed, x, params) ** 2 for seed in range(seeds)) / seeds)
        for width in widths
    ]


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_the_tangent_kernel_of_wide_networks_converges(activation):
    widths = (64, 256, 1024, 4096)
    found = errors(InfiniteWidth(1, activation, bias_variance=0.2).double(), widths, 12)
    slope = math.log(found[-1] / found[0]) / math.log(widths[-1] / widths[0])
    assert -0.65 < slope < -0.35  # one over the root of the width
    assert all(error < 3 / math.sqrt(width) for error, width in zip(found, widths, strict=True))


def test_deep_wide_networks_converge():
    found = errors(InfiniteWidth(3, "relu", bias_variance=0.2).double(), (32, 512), 8)
    assert found[1] < found[0] / 2 and found[1] < 0.25


def test_the_last_layer_has_the_covariance_of_the_network():
    found = errors(InfiniteWidth(2, "relu", kernel="nngp", bias_variance=0.2).double(), (32, 512), 20, "4.*")
    assert found[1] < found[0] / 2.5 and found[1] < 0.2


def test_outputs_of_wide_networks_have_the_nngp_covariance():
    kernel = InfiniteWidth(2, "erf", kernel="nngp", weight_variance=1.5, bias_variance=0.2).double()
    x = normal(3, 2)
    with torch.no_grad():
        f = torch.cat([kernel.network(2, 200, seed=seed, outputs=8)(x) for seed in range(250)], 1)
        K = kernel(x).to_dense()
    spread = (K.diagonal()[:, None] * K.diagonal() + K.square()).sqrt() / f.shape[1] ** 0.5
    assert ((f @ f.T / f.shape[1] - K).abs() < 4 * spread + 0.02 * K.abs().max()).all()


def test_unit_variances_are_the_ntk_prior():
    kernel = InfiniteWidth(1, "erf", weight_variance=1.0, bias_variance=1.0)
    lin = linnet.linearize(kernel.network(3, 7))
    torch.testing.assert_close(kernel.prior(lin), make_prior(lin, "ntk").base)


# As a GPyTorch kernel.


def test_a_gaussian_process_with_it():
    x, y = normal(20, 2), normal(20, seed=1)

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), InfiniteWidth(2, bias_variance=0.5)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process().double()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    optimizer = torch.optim.Adam(process.parameters(), lr=0.1)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = -marginal(process(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert {name for name, _ in process.covar_module.named_parameters()} == {
        "raw_weight_variance",
        "raw_bias_variance",
    }
    process.eval()
    new = normal(4, 2, seed=2)
    with torch.no_grad():
        found = process(new)
        K, cross = process.covar_module(x).to_dense(), process.covar_module(new, x).to_dense()
        K = K + process.likelihood.noise * torch.eye(20)
        torch.testing.assert_close(found.mean, cross @ torch.linalg.solve(K, y), rtol=1e-6, atol=1e-6)


def test_batches_of_hyperparameters_and_chosen_columns():
    kernel = InfiniteWidth(1, bias_variance=0.1, batch_shape=torch.Size([3])).double()
    kernel.raw_weight_variance.data[1] += 1
    x = normal(4, 2)
    K = kernel(x).to_dense()
    assert K.shape == (3, 4, 4)
    torch.testing.assert_close(kernel(x, diag=True), K.diagonal(dim1=1, dim2=2))
    weight = float(kernel.weight_variance[1].detach())
    exact = infinite_width(x, x, depth=1, weight_variance=weight, bias_variance=0.1)
    torch.testing.assert_close(K[1], exact, rtol=1e-6, atol=1e-6)
    one = InfiniteWidth(1, active_dims=(0, 2)).double()
    wide = normal(4, 3)
    torch.testing.assert_close(one(wide).to_dense(), infinite_width(wide[:, [0, 2]], wide[:, [0, 2]], depth=1))
    with pytest.raises(ValueError, match="one pair of variances"):
        kernel.network(2, 5)


def test_single_precision():
    x = normal(10, 50)
    for activation, kernel in CASES:
        how = {"depth": 3, "activation": activation, "kernel": kernel, "bias_variance": 0.1}
        K, exact = infinite_width(x.float(), x.float(), **how), infinite_width(x, x, **how)
        assert K.dtype == torch.float32
        torch.testing.assert_close(K.double(), exact, rtol=1e-4, atol=1e-5)


def test_errors():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="number of hidden layers, 0 or more; got -1"):
        InfiniteWidth(-1)
    with pytest.raises(ValueError, match="activation must be one of 'relu', 'erf'; got 'tanh'"):
        InfiniteWidth(1, "tanh")
    with pytest.raises(ValueError, match="kernel must be one of 'ntk', 'nngp'; got 'gp'"):
        infinite_width(x, x, depth=1, kernel="gp")
    with pytest.raises(ValueError, match="weight_variance must be positive"):
        InfiniteWidth(1, weight_variance=0.0)
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(2, 4\)"):
        infinite_width(x, torch.ones(2, 4), depth=1)
    with pytest.raises(NotImplementedError, match="no last_dim_is_batch"):
        InfiniteWidth(1).forward(x, x, last_dim_is_batch=True)


@pytest.mark.parametrize("kernel", ["ntk", "nngp"])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_units_of_the_inputs_do_not_matter_without_biases(kernel: str, size: float) -> None:
    """A ReLU network without biases is homogeneous, also for inputs of very different lengths."""
    x, y = normal(4, 3), normal(5, 3, seed=1)
    plain = infinite_width(x, y, depth=2, kernel=kernel)
    torch.testing.assert_close(infinite_width(size * x, y, depth=2, kernel=kernel), size * plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(infinite_width(x, size * y, depth=2, kernel=kernel), size * plain, rtol=1e-12, atol=0)
