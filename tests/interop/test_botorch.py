"""The tangent model inside BoTorch, against closed forms, finite differences and a search on a grid."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import linnet
from linnet.tangent import TangentRegressor
from tests.support.drawn import double, normal

pytest.importorskip("botorch", reason="BoTorch is not installed: pip install 'linnet[botorch]'")

from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

from linnet.interop.botorch import TangentModel

D = 2
NOISE = torch.tensor(0.1, dtype=torch.float64)


def network(c: int = 1, d: int = D) -> nn.Module:
    return double(nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, c)))


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """J of inputs (n, d), by torch alone."""
    theta = {name: t.detach() for name, t in model.named_parameters()}
    found = jacrev(lambda th: functional_call(model, th, (x,)).flatten())(theta)
    return torch.cat([found[name].flatten(1) for name in theta], 1).detach()


def reference(
    net: nn.Module, X: Tensor, Y: Tensor, x: Tensor, *, noise: Tensor, S: Tensor | float = 1.0, mean: str = "network"
) -> tuple[Tensor, Tensor]:
    """Mean (m, c) and covariance (m c, m c) at x by the textbook."""
    A, B = dense(net, X), dense(net, x)
    f, g = (net(X).detach(), net(x).detach()) if mean == "network" else (0.0, torch.zeros(len(x), Y.shape[1]))
    M = (A * S) @ A.T + torch.diag(noise.expand_as(Y).flatten())
    cross = (B * S) @ A.T
    shift = cross @ torch.linalg.solve(M, (Y - f).flatten())
    return g + shift.view(len(x), -1), (B * S) @ B.T - cross @ torch.linalg.solve(M, cross.T)


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


def observations(c: int = 1, n: int = 7) -> tuple[Tensor, Tensor]:
    X = normal(n, D)
    return X, torch.cat([X.sin().sum(1, keepdim=True) * (j + 1) for j in range(c)], 1) + 0.1 * normal(n, c, seed=3)


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("mean", ["network", "zero"])
def test_posterior_is_the_textbooks(c: int, mean: str) -> None:
    net, (X, Y) = network(c), observations(c)
    noise = torch.tensor([0.1, 0.3], dtype=torch.float64)[:c]
    S = normal(sum(t.numel() for t in net.parameters()), seed=5).square()
    model = TangentModel(net, X, Y, noise=noise, prior=S, mean=mean)
    assert model.num_outputs == c and model.batch_shape == torch.Size()
    x = normal(3, 4, D, seed=1)
    posterior = model.posterior(x)
    noisy = model.posterior(x, observation_noise=True)
    for i in range(3):
        m, C = reference(net, X, Y, x[i], noise=noise, S=S, mean=mean)
        close(posterior.mean[i], m)
        close(posterior.distribution.covariance_matrix[i], C)
        close(posterior.variance[i], C.diagonal().view(4, c))
        close(noisy.variance[i], C.diagonal().view(4, c) + noise)
    close(model.posterior(x[0]).mean, posterior.mean[0])
    close(model.posterior(x[:, None]).distribution.covariance_matrix[:, 0], posterior.distribution.covariance_matrix)
    given = torch.full((1, c), 0.7, dtype=torch.float64)
    close(model.posterior(x, observation_noise=given).variance, posterior.variance + 0.7)


def test_outputs_are_chosen_and_transformed() -> None:
    net, (X, Y) = network(2), observations(2)
    model, x = TangentModel(net, X, Y, noise=0.1), normal(4, D, seed=1)
    m, C = reference(net, X, Y, x, noise=NOISE)
    second = model.posterior(x, output_indices=[1])
    close(second.mean, m[:, 1:])
    close(second.distribution.covariance_matrix, C[1::2, 1::2])
    swapped = model.posterior(x, output_indices=[1, 0])
    close(swapped.variance, C.diagonal().view(4, 2).flip(1))
    w = torch.tensor([0.5, 2.0], dtype=torch.float64)
    total = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(w))
    close(total.mean, m @ w[:, None])
    close(total.variance[:, 0], torch.stack([w @ C[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] @ w for i in range(4)]))


@pytest.mark.parametrize("c", [1, 2])
def test_posteriors_are_differentiable_in_the_candidates(c: int) -> None:
    net, (X, Y) = network(c), observations(c)
    model = TangentModel(net, X, Y, noise=0.1)
    x = normal(2, 2, D, seed=1).requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(x, observation_noise=True)
        return posterior.mean, posterior.distribution.covariance_matrix

    for with_graph, without in zip(moments(x), moments(x.detach()), strict=True):
        assert with_graph.requires_grad and not without.requires_grad
        close(with_graph.detach(), without)
    assert torch.autograd.gradcheck(moments, (x,))


def test_a_float32_network_is_solved_in_float64_and_left_alone() -> None:
    net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1))
    X, Y = observations()
    posterior = TangentModel(net, X.float(), Y.float(), noise=0.1).posterior(X.float())
    assert posterior.mean.dtype == torch.float64 and net[0].weight.dtype == torch.float32
    m, _ = reference(copy.deepcopy(net).double(), X.float().double(), Y.float().double(), X, noise=NOISE)
    close(posterior.mean, m, 1e-6)


@pytest.mark.parametrize("q", [1, 2])
def test_optimize_acqf_finds_the_best_candidates_in_one_dimension(q: int) -> None:
    torch.manual_seed(0)
    net = network(d=1)
    X = torch.tensor([[0.05], [0.3], [0.55], [0.95]], dtype=torch.float64)
    Y = (6 * X).sin()
    model = TangentModel(net, X, Y, noise=1e-3, mean="zero")
    grid = torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    if q == 1:
        acquisition = LogExpectedImprovement(model, best_f=Y.max())
    else:
        sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
        acquisition = qLogExpectedImprovement(model, best_f=Y.max(), sampler=sampler)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    candidates, value = optimize_acqf(acquisition, bounds, q=q, num_restarts=4, raw_samples=32)
    assert candidates.shape == (q, 1)
    with torch.no_grad():
        if q == 1:
            values = acquisition(grid[:, None])
            close(candidates, grid[values.argmax()][None], 5e-3)
        else:
            coarse = grid[::20]
            pairs = torch.combinations(coarse[:, 0])[:, :, None]
            values = acquisition(pairs)
        assert value >= values.max() - 1e-6


def test_optimizing_the_mean_of_a_fitted_posterior() -> None:
    from botorch.acquisition import PosteriorMean

    torch.manual_seed(0)
    X = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    model = TangentModel(network(d=1), X, -((X - 0.37) ** 2), noise=1e-6, prior=10.0)
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    candidate, _ = optimize_acqf(PosteriorMean(model), bounds, q=1, num_restarts=2, raw_samples=8)
    assert float(candidate) == pytest.approx(0.37, abs=1e-2)


@pytest.mark.parametrize("c", [1, 2])
def test_conditioning_equals_fitting_all_the_data(c: int) -> None:
    net, (X, Y) = network(c), observations(c, n=9)
    x = normal(3, D, seed=1)
    model = TangentModel(net, X[:5], Y[:5], noise=0.1)
    twice = model.condition_on_observations(X[5:7], Y[5:7]).condition_on_observations(X[7:], Y[7:])
    m, C = reference(net, X, Y, x, noise=NOISE)
    close(twice.posterior(x).mean, m)
    close(twice.posterior(x).distribution.covariance_matrix, C)
    assert twice.num_outputs == c
    noise = torch.full((9, c), 0.1, dtype=torch.float64)
    noise[5:] = 0.4
    given = model.condition_on_observations(X[5:], Y[5:], noise=noise[5:])
    close(given.posterior(x).mean, reference(net, X, Y, x, noise=noise)[0])


def test_fantasies() -> None:
    net, (X, Y) = network(), observations()
    model = TangentModel(net, X, Y, noise=0.1)
    new, x = normal(2, 3, D, seed=1), normal(2, 4, D, seed=2)
    sampler = SobolQMCNormalSampler(torch.Size([5]), seed=0)
    fantasy = model.fantasize(new, sampler)
    assert fantasy.batch_shape == (5, 2)
    posterior = fantasy.posterior(x)
    assert posterior.mean.shape == (5, 2, 4, 1)
    drawn = sampler(model.posterior(new, observation_noise=True))
    m, C = reference(net, torch.cat([X, new[1]]), torch.cat([Y, drawn[3, 1]]), x[1], noise=NOISE)
    close(posterior.mean[3, 1], m)
    close(posterior.distribution.covariance_matrix[3, 1], C)
    gradient = qKnowledgeGradient(model, num_fantasies=3)
    candidates = normal(2, 4, D, seed=4).requires_grad_()
    value = gradient(candidates)
    value.sum().backward()
    assert value.shape == (2,) and bool(candidates.grad.isfinite().all()) and bool((candidates.grad != 0).all())


@pytest.mark.parametrize("solver", ["function", "weight"])
@pytest.mark.parametrize("mean", ["network", "zero"])
def test_from_a_regressor(solver: str, mean: str) -> None:
    net, (X, Y) = network(2), observations(2, n=20)
    regressor = TangentRegressor(net, mean=mean, prior="ntk", noise=[0.1, 0.3], solver=solver).fit(X, Y)
    model, x = TangentModel.from_regressor(regressor), normal(4, D, seed=1)
    m, C = regressor.predict(x, return_cov=True)
    posterior = model.posterior(x)
    close(posterior.mean, m)
    close(posterior.distribution.covariance_matrix, C)
    noisy = regressor.predict(x, return_std=True, noise=True)[1]
    close(model.posterior(x, observation_noise=True).variance, noisy.square())
    x.requires_grad_()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        posterior = model.posterior(x)
        return posterior.mean, posterior.variance

    assert torch.autograd.gradcheck(moments, (x[:2],))


def test_from_a_regressor_with_samples_a_level_or_a_variance_head() -> None:
    net, (X, Y) = network(), observations(n=20)
    x = normal(3, D, seed=1)
    sampled = TangentRegressor(net, solver="cg-weight", noise=0.1, prior=1.0, dtype="float64").fit(X, Y)
    model = TangentModel.from_regressor(sampled)
    close(model.posterior(x).variance, sampled.predict(x, return_std=True)[1].square())
    untrained = TangentRegressor(noise=0.1).fit(X.numpy(), Y.numpy())
    close(
        TangentModel.from_regressor(untrained).posterior(x).mean,
        torch.as_tensor(np.asarray(untrained.predict(x.numpy()))).view(3, 1),
    )
    heads = network(2)
    both = TangentRegressor(heads, noise="heteroscedastic").fit(X, Y)
    model = TangentModel.from_regressor(both)
    assert model.num_outputs == 1
    close(
        model.posterior(x, observation_noise=True).variance[:, 0],
        both.predict(x, return_std=True, noise=True)[1].flatten().square(),
    )


def test_balanced_prior_and_linearizations() -> None:
    net, (X, Y) = network(), observations()
    lin = linnet.linearize(net, "2.*")
    x = normal(3, D, seed=1)
    J = lin.jacobian(X)
    S = J.n * J.c / J.column_norms().sum()
    balanced = TangentModel(lin, X, Y, noise=0.1, prior="balanced")
    close(
        balanced.posterior(x).mean, TangentModel(net, X, Y, noise=0.1, prior=float(S), params="2.*").posterior(x).mean
    )


def test_errors() -> None:
    net, (X, Y) = network(), observations()
    with pytest.raises(ValueError, match=r"shape \(n, d\); got \(2, 7, 2\)"):
        TangentModel(net, X.expand(2, 7, 2), Y, noise=0.1)
    with pytest.raises(ValueError, match=r"got \(7,\). Use Y.unsqueeze\(-1\)"):
        TangentModel(net, X, Y[:, 0], noise=0.1)
    with pytest.raises(ValueError, match=r"need shape \(..., 7, 1\); got \(6, 1\)"):
        TangentModel(net, X, Y[:6], noise=0.1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        TangentModel(net, X, Y * torch.nan, noise=0.1)
    for bad in (0.0, -1.0, torch.ones(2), float("nan")):
        with pytest.raises(ValueError, match="noise is a variance"):
            TangentModel(net, X, Y, noise=bad)
    with pytest.raises(ValueError, match="'network' or 'zero'; got 'constant'"):
        TangentModel(net, X, Y, noise=0.1, mean="constant")
    with pytest.raises(ValueError, match="chosen by the evidence"):
        TangentModel(net, X, Y, noise=0.1, prior="layerwise")
    with pytest.raises(ArithmeticError, match="not positive definite"):
        TangentModel(net, X[:1].expand(3, 2), Y[:3], noise=1e-20)
    with pytest.raises(ValueError, match="fitted TangentRegressor"):
        TangentModel.from_regressor(TangentRegressor(net))
    model = TangentModel(net, X, Y, noise=0.1)
    with pytest.raises(ValueError, match=r"shape \(..., q, d\); got \(2,\)"):
        model.posterior(X[0])
    with pytest.raises(ValueError, match=r"inputs X of shape \(..., n, d\); got \(2,\)"):
        model.condition_on_observations(X[0], Y[0])
    with pytest.raises(ValueError, match=r"need shape \(..., 7, 1\); got \(2, 1\)"):
        model.condition_on_observations(X, Y[:2])
