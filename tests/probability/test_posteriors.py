"""Posteriors over the displacement: every form of the covariance against the same matrix written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from linnet import linearize
from linnet.jacobian import Jacobian
from linnet.probability import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    PointPosterior,
    Posterior,
    SamplePosterior,
    WeightPosterior,
)
from linnet.probability.posteriors import nonnegative, square_root
from tests.support.drawn import double, normal
from tests.support.reference import dense_posterior

N, M, C = 7, 4, 2


def jacobian(n: int, seed: int = 0) -> Jacobian:
    model = double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, C)))
    return linearize(model).jacobian(normal(n, 3, seed=seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks_of_b() -> Tensor:
    """Curvature (N, C, C) with blocks that are not diagonal."""
    A = normal(N, C, C, seed=9)
    return A @ A.mT + 0.1 * torch.eye(C)


class Case:
    """All exact posteriors of one problem, with the covariance of the displacement that they stand for.

    Args:
        diagonal: Whether the curvature is.
    """

    def __init__(self, *, diagonal: bool = True) -> None:
        self.J, self.new = jacobian(N), jacobian(M, seed=1)
        dense = self.J.dense()
        p = dense.shape[1]
        self.S = torch.rand(p, dtype=torch.float64, generator=generator(3)) + 0.2
        self.delta = normal(p, seed=4)
        B = torch.diag_embed(torch.rand(N, C, dtype=torch.float64, generator=generator(5)) + 0.5)
        B = B if diagonal else blocks_of_b()
        L = torch.linalg.cholesky(B)
        whole = torch.block_diag(*L)
        K = (dense * self.S) @ dense.T
        eye = torch.eye(p, dtype=torch.float64)
        M_ = torch.eye(N * C) + whole.T @ K @ whole
        Phi = dense * self.S.sqrt()
        H = eye + Phi.T @ torch.block_diag(*B) @ Phi
        root = L.diagonal(dim1=1, dim2=2).flatten() if diagonal else L
        # The weights' covariance has no direction of its own beyond the rows of Phi: a basis of them is exact.
        basis = torch.linalg.svd(Phi, full_matrices=False).Vh.T
        inner = basis.T @ torch.linalg.inv(H) @ basis
        self.covariance = self.S.sqrt()[:, None] * torch.linalg.inv(H) * self.S.sqrt()
        self.posteriors: dict[str, Posterior] = {
            "function": FunctionPosterior(
                self.J.cached(), self.S, self.delta, root=root, factor=torch.linalg.cholesky(M_)
            ),
            "weight": WeightPosterior(self.S, self.delta, factor=torch.linalg.cholesky(H)),
            "lowrank": LowRankPosterior(self.S, self.delta, basis=basis, C=inner),
        }

    def wanted(self, J: Jacobian) -> Tensor:
        return J.dense() @ self.covariance @ J.dense().T


def blocks_of(covariance: Tensor, n: int) -> Tensor:
    return torch.stack([covariance[i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(n)])


EXACT = ["function", "weight", "lowrank"]


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_exact_posteriors(name: str, diagonal: bool) -> None:
    case = Case(diagonal=diagonal)
    posterior, J = case.posteriors[name], case.new
    wanted = case.wanted(J)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(posterior.shift(J), (J.dense() @ case.delta).view(M, C), **close)
    torch.testing.assert_close(posterior.covariance(J), wanted, **close)
    torch.testing.assert_close(posterior.blocks(J), blocks_of(wanted, M), **close)
    torch.testing.assert_close(posterior.variance(J), wanted.diagonal().view(M, C), **close)
    cross = J.dense() @ case.covariance @ case.J.dense().T
    torch.testing.assert_close(posterior.cross(J, case.J), cross, **close)
    V = normal(len(case.S), 3, seed=11)
    torch.testing.assert_close(posterior.multiply(V), case.covariance @ V, **close)
    other = torch.rand(len(case.S), dtype=torch.float64, generator=generator(12)) + 0.2
    there = torch.linalg.inv(torch.linalg.inv(case.covariance) + torch.diag(1 / other - 1 / case.S))
    torch.testing.assert_close(posterior.with_prior(case.S, other).multiply(V), there @ V, rtol=1e-8, atol=1e-9)


def test_gaussian_noise_gives_the_textbook_posterior() -> None:
    J, new = jacobian(N), jacobian(M, seed=1)
    noise, S = 0.3, torch.full((J.shape[1],), 0.7, dtype=torch.float64)
    ref = dense_posterior(J.dense(), normal(N * C), variance=0.7, noise=noise, new=new.dense())
    K = J.gram(scale=S)
    factor = torch.linalg.cholesky(torch.eye(N * C) + K / noise)
    root = torch.full((N * C,), noise**-0.5, dtype=torch.float64)
    found = FunctionPosterior(J.cached(), S, ref.delta, root=root, factor=factor)
    torch.testing.assert_close(found.covariance(new), ref.covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.shift(new).flatten(), ref.shift, rtol=1e-9, atol=1e-12)


def test_the_factor_is_not_read_above_its_diagonal() -> None:
    case = Case()
    posterior = case.posteriors["function"]
    assert isinstance(posterior, FunctionPosterior)
    factor = posterior.factor + torch.triu(torch.full_like(posterior.factor, 1e6), 1)
    other = FunctionPosterior(posterior.J, case.S, case.delta, root=posterior.root, factor=factor)
    torch.testing.assert_close(other.variance(case.new), posterior.variance(case.new), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", EXACT)
def test_samples_have_the_joint_covariance(name: str) -> None:
    # An entry of the sample covariance of k draws has the variance (C_ij^2 + C_ii C_jj) / k: five standard errors.
    case, k = Case(), 20_000
    posterior, J = case.posteriors[name], case.new
    draws = posterior.sample(J, k, generator=generator())
    assert draws.shape == (k, M, C)
    wanted, centered = case.wanted(J), (draws - posterior.shift(J)).reshape(k, -1)
    variance = wanted.diagonal()
    error = ((wanted.square() + torch.outer(variance, variance)) / k).sqrt()
    assert bool(((centered.T @ centered / k - wanted).abs() < 5 * error).all())
    assert bool((centered.mean(0).abs() < 5 * (variance / k).sqrt()).all())


@pytest.mark.parametrize("name", EXACT)
def test_samples_belong_to_their_seed(name: str) -> None:
    case = Case()
    posterior, J = case.posteriors[name], case.new
    first, again = (posterior.sample(J, 3, generator=generator(seed)) for seed in (1, 1))
    other = posterior.sample(J, 3, generator=generator(2))
    assert torch.equal(first, again) and not torch.allclose(first, other)


def test_samples_where_the_data_has_settled_everything() -> None:
    # The covariance at the training inputs is a difference of numbers a million times its size.
    J = jacobian(N)
    S = torch.full((J.shape[1],), 100.0, dtype=torch.float64)
    noise = 1e-7
    M_ = torch.eye(N * C, dtype=torch.float64) + J.gram(scale=S) / noise
    root = torch.full((N * C,), noise**-0.5, dtype=torch.float64)
    zero = torch.zeros(J.shape[1], dtype=torch.float64)
    posterior = FunctionPosterior(J.cached(), S, zero, root=root, factor=torch.linalg.cholesky(M_))
    draws = posterior.sample(J, 200, generator=generator())
    assert float(draws.abs().max()) < 1e-2
    assert bool((posterior.variance(J) >= 0).all())


def test_stored_samples() -> None:
    J = jacobian(M, seed=1)
    samples, delta = normal(J.shape[1], 50, seed=7), normal(J.shape[1], seed=8)
    posterior = SamplePosterior(delta, samples)
    wanted = J.dense() @ (samples @ samples.T / 50) @ J.dense().T
    torch.testing.assert_close(posterior.covariance(J), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.blocks(J), blocks_of(wanted, M), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.variance(J), wanted.diagonal().view(M, C), rtol=1e-10, atol=1e-12)
    draws = posterior.sample(J, 3, generator=generator())
    wanted = (J.dense() @ (delta[:, None] + samples[:, :3])).T.view(3, M, C)
    torch.testing.assert_close(draws, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=r"holds 50 samples; 51 were asked for. Fit with samples=51"):
        posterior.sample(J, 51, generator=generator())


def test_independent_parameters() -> None:
    J = jacobian(M, seed=1)
    variances = torch.rand(J.shape[1], dtype=torch.float64, generator=generator())
    posterior = DiagonalPosterior(normal(J.shape[1]), variances)
    wanted = (J.dense() * variances) @ J.dense().T
    torch.testing.assert_close(posterior.covariance(J), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.blocks(J), blocks_of(wanted, M), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.variance(J), wanted.diagonal().view(M, C), rtol=1e-10, atol=1e-12)


def test_a_point_has_no_error_bars() -> None:
    J = jacobian(M, seed=1)
    posterior = PointPosterior(normal(J.shape[1]))
    assert float(posterior.variance(J).abs().sum()) == 0
    assert float(posterior.covariance(J).abs().sum()) == 0
    assert posterior.covariance(J).shape == (M * C, M * C)
    wanted = (J.dense() @ posterior.delta).view(1, M, C).expand(2, M, C)
    torch.testing.assert_close(posterior.sample(J, 2, generator=generator()), wanted, rtol=1e-12, atol=1e-12)


def test_the_prior_is_a_low_rank_posterior_without_directions() -> None:
    J = jacobian(M, seed=1)
    p = J.shape[1]
    S = torch.full((p,), 0.3, dtype=torch.float64)
    eye = torch.eye(p, dtype=torch.float64)[:, :3]
    posterior = LowRankPosterior(S, torch.zeros(p).double(), basis=eye, C=torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(posterior.covariance(J), J.gram(scale=S), rtol=1e-12, atol=1e-12)


# Roots.


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 8), r=st.integers(0, 8), seed=st.integers(0, 1000))
def test_square_roots_of_singular_covariances(m: int, r: int, seed: int) -> None:
    A = normal(m, max(r, 1), seed=seed) * (r > 0)
    R = square_root(A @ A.T)
    torch.testing.assert_close(R @ R.T, A @ A.T, rtol=1e-9, atol=1e-9)


def test_negative_eigenvalues_are_refused() -> None:
    bad = torch.diag(torch.tensor([1.0, -1e-6], dtype=torch.float64))
    with pytest.raises(ArithmeticError, match=r"eigenvalue -1e-06, below rounding.*Use float64 \(dtype=\), more noise"):
        square_root(bad)
    slightly = torch.diag(torch.tensor([1.0, -1e-14], dtype=torch.float64))
    assert float((square_root(slightly) @ square_root(slightly).T - slightly).abs().max()) < 1e-13
    # As the difference of numbers of size 1e6, it is within rounding.
    assert bool(torch.isfinite(square_root(bad, 1e7)).all())


def test_negative_variances_are_refused() -> None:
    prior = torch.tensor([1.0, 4.0], dtype=torch.float64)
    kept: Any = nonnegative(torch.tensor([0.5, -1e-15], dtype=torch.float64), prior)
    assert kept.tolist() == [0.5, 0.0]
    with pytest.raises(ArithmeticError, match=r"variance came out as -0.1 of a prior one of 4.*Use float64"):
        nonnegative(torch.tensor([0.5, -0.1], dtype=torch.float64), prior)
    assert nonnegative(torch.tensor([-1e-5]), torch.ones(1)).tolist() == [0.0]


@pytest.mark.parametrize("what", ["variance", "blocks"])
def test_answers_in_parts_are_the_same(what, monkeypatch):
    from linnet.probability import posteriors as module

    post, new = Case(diagonal=False).posteriors["function"], jacobian(11, seed=9)
    whole = getattr(post, what)(new)
    assert isinstance(post, FunctionPosterior)
    rows = len(post.factor) * new.c * 8
    monkeypatch.setattr(module, "find_dense_budget", lambda memory, device: 4 * rows * 3)  # three examples at a time
    asked = []
    half = module.FunctionPosterior.half
    monkeypatch.setattr(module.FunctionPosterior, "half", lambda self, J: asked.append(J.n) or half(self, J))
    torch.testing.assert_close(getattr(post, what)(new), whole, rtol=1e-12, atol=1e-14)
    assert asked == [3, 3, 3, 2]


@pytest.mark.parametrize("name", EXACT)
def test_draws_of_the_weights_have_their_mean_and_covariance(name: str) -> None:
    case, k = Case(), 20_000
    posterior = case.posteriors[name]
    draws = posterior.draw(k, generator=generator()) - case.delta[:, None]
    variance = case.covariance.diagonal()
    error = ((case.covariance.square() + torch.outer(variance, variance)) / k).sqrt()
    assert bool(((draws @ draws.T / k - case.covariance).abs() < 5 * error).all())
    assert bool((draws.mean(1).abs() < 5 * (variance / k).sqrt()).all())
    # The same numbers move the weights and the outputs, each to its own side.
    if name == "weight":
        f = posterior.sample(case.new, 3, generator=generator(1))
        weights = posterior.draw(3, generator=generator(1))
        torch.testing.assert_close((case.new @ weights).T.view(3, M, C), f, rtol=1e-10, atol=1e-10)


def test_draws_of_independent_parameters_are_scaled_normal_numbers() -> None:
    case = Case()
    posterior = DiagonalPosterior(case.delta, case.S)
    z = torch.randn(len(case.S), 4, dtype=torch.float64, generator=generator(3))
    wanted = case.delta[:, None] + case.S.sqrt()[:, None] * z
    torch.testing.assert_close(posterior.draw(4, generator=generator(3)), wanted, rtol=1e-12, atol=1e-12)
