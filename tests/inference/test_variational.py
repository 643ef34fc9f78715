"""Variational posteriors against closed forms, numerical integration and general optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

from linnet import linearize
from linnet.inference import variational
from linnet.inference.mode import newton
from linnet.inference.mode.spaces import FunctionSpace
from linnet.inference.variational import Variational, draws, lowrank, meanfield
from linnet.linalg import Matrix
from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood, take_expectations
from tests.support.drawn import double, normal

N, C, P = 10, 3, 14
VARIANCE = 0.2 + normal(P, seed=9).square()


def problem(likelihood: Likelihood, *, c: int = C, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A Jacobian (N c, P), a mean (N, c), and targets drawn from the model."""
    J, mean = normal(N * c, P, seed=seed), normal(N, c, seed=seed + 1)
    f = mean + (J @ (VARIANCE.sqrt() * normal(P, seed=seed + 2))).view(N, c)
    return J, mean, likelihood.sample(f, torch.Generator().manual_seed(seed))


def whitened(q: Variational) -> tuple[Tensor, Tensor]:
    """Mean (P,) and covariance (P, P) of q in whitened weights."""
    u = q.delta / VARIANCE.sqrt()
    if q.variances is not None:
        return u, torch.diag(q.variances / VARIANCE)
    assert q.basis is not None and q.C is not None
    return u, torch.eye(P).double() + q.basis @ (q.C - torch.eye(len(q.C)).double()) @ q.basis.T


def dense_elbo(J: Tensor, y: Tensor, mean: Tensor, likelihood: Likelihood, u: Tensor, Sigma: Tensor) -> Tensor:
    """The ELBO of N(u, Sigma) for a likelihood whose expectations need no draws."""
    Phi = J * VARIANCE.sqrt()
    blocks = (Phi @ Sigma @ Phi.T).view(*mean.shape, *mean.shape)
    at = torch.arange(len(mean))
    inside = take_expectations(likelihood, mean + (Phi @ u).view(mean.shape), blocks[at, :, at], y).log_prob.sum()
    kl = 0.5 * (Sigma.trace() + u @ u - len(u) - torch.logdet(Sigma))
    return inside - kl


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()])
@pytest.mark.parametrize("kind", ["diagonal", "directions", "full"])
def test_a_part_of_the_way_from_one_covariance_to_another(likelihood: Likelihood, kind: str) -> None:
    """Of diagonals and along directions the covariance moves, of full covariances the precision."""
    J, mean, y = problem(likelihood)
    Phi, op = J * VARIANCE.sqrt(), Matrix(J, block=C)
    shared = variational._Expectations(op, y, VARIANCE, mean, likelihood, J * VARIANCE @ J.T, 4, 0)
    none, eye = shared.no_blocks(), torch.eye(P).double()
    begin: variational._Covariance
    if kind == "diagonal":
        begin = variational._Diagonal(shared, torch.ones(P).double(), none, None)
    elif kind == "directions":
        Q = torch.linalg.qr(normal(P, 4, seed=5))[0]
        F = Phi @ Q
        rest = shared.blocks(None) - shared.blocks_of(F, F)
        begin = variational._Directions(shared, Q, F, rest, torch.eye(4).double(), none)
    else:
        assert shared.K is not None
        begin = variational._Full(FunctionSpace(shared.K, 1.0), none, none.flatten(0, 1), shared.K, none)

    def covariance(of: variational._Covariance) -> Tensor:
        if not isinstance(of, variational._Full):
            return of.solve(eye)
        B = torch.block_diag(*(of.B.diag_embed() if of.B.ndim == 2 else of.B))
        return torch.linalg.inv(eye + Phi.T @ B @ Phi)

    curvatures = (likelihood.curvature(normal(N, C, seed=seed)) for seed in (6, 7))
    first, second = (begin.best(curvature) for curvature in curvatures)
    part, (A, B) = first.mix(second, 0.25), map(covariance, (first, second))
    inverse = torch.linalg.inv if kind == "full" else lambda M: M
    Sigma = inverse(inverse(A).lerp(inverse(B), 0.25))
    torch.testing.assert_close(covariance(part), Sigma, rtol=1e-9, atol=1e-12)
    blocks = (Phi @ Sigma @ Phi.T).view(N, C, N, C)[torch.arange(N), :, torch.arange(N)]
    expected = blocks.diagonal(dim1=1, dim2=2) if likelihood.diagonal else blocks
    torch.testing.assert_close(part.blocks, expected, rtol=1e-9, atol=1e-12)
    kl = 0.5 * (Sigma.trace() - P - torch.logdet(Sigma))
    assert part.kl() == pytest.approx(float(kl), rel=1e-9)


def test_directions_of_few_rows_are_the_leading_singular_vectors() -> None:
    """Exactly, also where no eigenvalue stands out."""
    J = normal(60, 80, seed=3)
    given = {"variance": torch.ones(80).double(), "mean": torch.zeros(60, 1).double(), "likelihood": Bernoulli()}
    q = lowrank(Matrix(J), (normal(60, seed=4) > 0).double(), rank=3, K=J @ J.T, **given)
    leading = torch.linalg.svd(J, full_matrices=False)[2][:3].T
    assert q.basis is not None
    torch.testing.assert_close(q.basis @ q.basis.T, leading @ leading.T, rtol=0, atol=1e-9)


def test_covariances_are_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the mean, and lengths of a step, leave the covariances as they are."""
    J, mean, y = problem(Categorical())
    seen, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: seen.append(A) or eigh(A))
    found = lowrank(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Categorical())
    blocks = [A for A in seen if tuple(A.shape) == (N, C, C)]
    assert len(blocks) > found.iterations
    assert all(not torch.equal(a, b) for a, b in pairwise(blocks))


# Gaussian noise: closed forms.


def test_gaussian_noise_full_rank_is_exact() -> None:
    noise = torch.tensor([0.3, 1.0, 0.1], dtype=torch.float64)
    J, mean, y = problem(Gaussian(noise))
    q = lowrank(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Gaussian(noise), rank=P).checked()
    covariance = (J * VARIANCE) @ J.T + torch.diag(noise.repeat(N))
    evidence = torch.distributions.MultivariateNormal(mean.flatten(), covariance).log_prob(y.flatten())
    assert q.elbo == pytest.approx(float(evidence), rel=1e-8)
    assert q.elbo == q.path[-1]
    delta = VARIANCE * (J.T @ torch.linalg.solve(covariance, (y - mean).flatten()))
    torch.testing.assert_close(q.delta, delta, rtol=1e-5, atol=1e-6)
    u, Sigma = whitened(q)
    Phi = J * VARIANCE.sqrt()
    H = torch.eye(P).double() + (Phi.T / noise.repeat(N)) @ Phi
    torch.testing.assert_close(Sigma, torch.linalg.inv(H), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(q.f, mean + (Phi @ u).view(N, C), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_kernel", [True, False])
def test_gaussian_noise_mean_field(with_kernel: bool) -> None:
    # The best factorized Gaussian has the posterior's mean and the diagonal of its precision.
    J, mean, y = problem(Gaussian(0.3))
    Phi = J * VARIANCE.sqrt()
    K = Phi @ Phi.T if with_kernel else None
    q = meanfield(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Gaussian(0.3), K=K).checked()
    H = torch.eye(P).double() + Phi.T @ Phi / 0.3
    assert q.variances is not None
    torch.testing.assert_close(q.variances, VARIANCE / H.diagonal(), rtol=1e-9, atol=1e-12)
    u = torch.linalg.solve(H, Phi.T @ (y - mean).flatten() / 0.3)
    torch.testing.assert_close(q.delta, VARIANCE.sqrt() * u, rtol=1e-3, atol=1e-3)
    value = dense_elbo(J, y, mean, Gaussian(0.3), u, torch.diag(1 / H.diagonal()))
    assert q.elbo == pytest.approx(float(value), rel=1e-6)


# One weight: numerical integration.


def on_a_line(J: Tensor, mean: Tensor, y: Tensor, likelihood: Likelihood, u: np.ndarray) -> np.ndarray:
    """log p(y | u) for many values of the one weight."""
    f = mean + torch.from_numpy(u)[:, None, None] * J.view(mean.shape)
    return likelihood.log_prob(f, y).sum(1).numpy()


def bound_on_a_line(J: Tensor, mean: Tensor, y: Tensor, likelihood: Likelihood, m: float, v: float) -> float:
    z, w = np.polynomial.hermite_e.hermegauss(100)
    inside = w @ on_a_line(J, mean, y, likelihood, m + math.sqrt(v) * z) / w.sum()
    return float(inside) - 0.5 * (m * m + v - 1 - math.log(v))


@pytest.mark.parametrize("likelihood", [Bernoulli(), Categorical()], ids=repr)
def test_one_weight(likelihood: Likelihood) -> None:
    n, c = 6, 2
    J, mean = 1.5 * normal(n * c, 1), normal(n, c, seed=1)
    y = likelihood.sample(mean + 0.8 * J.view(n, c), torch.Generator().manual_seed(0))
    u = np.linspace(-12, 12, 20001)  # the trapezoidal rule, exact to rounding for a density that ends within
    density = np.exp(on_a_line(J, mean, y, likelihood, u) - 0.5 * u * u) / math.sqrt(2 * math.pi)
    evidence = math.log(density.sum() * (u[1] - u[0]))
    best = minimize(
        lambda x: -bound_on_a_line(J, mean, y, likelihood, x[0], math.exp(x[1])),
        [0.0, -1.0],
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-12},
    )
    given = {"variance": torch.ones(1).double(), "mean": mean, "likelihood": likelihood, "tolerance": 1e-13}
    for fit in (meanfield, lowrank):
        q = fit(Matrix(J, block=c), y, samples=4000, **given).checked()
        v = float(q.variances if q.variances is not None else q.C)
        exact = isinstance(likelihood, Bernoulli)
        assert q.elbo < evidence
        assert q.elbo == pytest.approx(-best.fun, abs=1e-9 if exact else 5e-3)
        assert bound_on_a_line(J, mean, y, likelihood, float(q.delta), v) <= -best.fun + 1e-9
        assert float(q.delta) == pytest.approx(best.x[0], abs=1e-5 if exact else 5e-2)
        assert math.log(v) == pytest.approx(best.x[1], abs=1e-5 if exact else 5e-2)


# Any likelihood.


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000), kind=st.sampled_from(["bernoulli", "categorical"]), loud=st.sampled_from([0.1, 1, 20])
)
def test_the_bound_never_falls(seed: int, kind: str, loud: float) -> None:
    likelihood: Likelihood = Bernoulli() if kind == "bernoulli" else Categorical()
    J, mean, y = problem(likelihood, seed=seed)
    given = {"variance": loud * VARIANCE, "mean": mean, "likelihood": likelihood, "samples": 24, "seed": seed}
    for fit in (meanfield, lowrank):
        q = fit(Matrix(J, block=C), y, **given).checked()
        assert len(q.path) == q.iterations + 1
        assert all(b >= a for a, b in pairwise(q.path))


@pytest.mark.parametrize("fit", [meanfield, lowrank])
def test_the_solution_is_stationary(fit: Callable[..., Variational]) -> None:
    J, mean, y = problem(Bernoulli())
    q = fit(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Bernoulli(), tolerance=1e-14)
    u, Sigma = whitened(q)
    assert q.elbo == pytest.approx(float(dense_elbo(J, y, mean, Bernoulli(), u, Sigma)), rel=1e-10)
    u.requires_grad_()
    if q.variances is not None:
        free = torch.zeros(P).double().requires_grad_()
        scaled = torch.diag(Sigma.diagonal() * free.exp())
    else:
        # Any symmetric change of the covariance: all directions are kept here.
        assert q.basis is not None and q.basis.shape == (P, P)
        free = torch.zeros(P, P).double().requires_grad_()
        scaled = Sigma + 0.5 * (free + free.T)
    gradients = torch.autograd.grad(dense_elbo(J, y, mean, Bernoulli(), u, scaled), [u, free])
    for gradient in gradients:
        assert float(gradient.abs().max()) < 1e-5


def test_more_directions_and_then_all_give_better_bounds() -> None:
    J, mean, y = problem(Bernoulli())
    given = {"variance": 5 * VARIANCE, "mean": mean, "likelihood": Bernoulli()}
    bounds = [lowrank(Matrix(J, block=C), y, rank=r, **given).checked().elbo for r in (1, 4, 9, P)]
    assert bounds == sorted(bounds) and bounds[-1] > bounds[0] + 0.1
    assert meanfield(Matrix(J, block=C), y, **given).checked().elbo < bounds[-1]
    laplace = newton.weight_space(J * (5 * VARIANCE).sqrt(), y, mean=mean, likelihood=Bernoulli())
    assert bounds[-1] == pytest.approx(laplace.log_evidence, abs=1.0)


def test_few_directions_keep_the_prior_elsewhere() -> None:
    J, mean, y = problem(Bernoulli())
    q = lowrank(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Bernoulli(), rank=4)
    u, Sigma = whitened(q)
    assert q.elbo == pytest.approx(float(dense_elbo(J, y, mean, Bernoulli(), u, Sigma)), rel=1e-10)
    assert q.basis is not None and q.C is not None
    torch.testing.assert_close(q.basis.T @ q.basis, torch.eye(4).double(), rtol=1e-12, atol=1e-12)
    Phi = J * VARIANCE.sqrt()
    top = torch.linalg.svd(Phi).Vh[:4]
    torch.testing.assert_close((top @ q.basis).square().sum(), torch.tensor(4.0).double())
    across = torch.eye(P).double() - q.basis @ q.basis.T
    torch.testing.assert_close(across @ Sigma @ across, across, rtol=1e-9, atol=1e-12)


def test_large_kernels_take_directions_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    J, mean, y = problem(Bernoulli())
    falling = torch.logspace(1, -4, P, dtype=torch.float64)
    op, given = Matrix(J, block=C), {"variance": falling, "mean": mean, "likelihood": Bernoulli(), "rank": 4}
    exact = lowrank(op, y, **given).checked()
    monkeypatch.setattr(variational, "DENSE", 0)
    K = (J * falling) @ J.T
    for kernel in (None, K):
        q = lowrank(op, y, K=kernel, **given).checked()
        assert q.basis is not None and q.basis.shape == (P, 4)
        assert q.elbo == pytest.approx(exact.elbo, rel=1e-3)
    auto = lowrank(op, y, **{**given, "rank": "auto"}).checked()
    assert auto.basis is not None and 4 < auto.basis.shape[1] < P
    assert auto.elbo > exact.elbo


def test_the_start_does_not_matter() -> None:
    J, mean, y = problem(Bernoulli())
    given = {"variance": 5 * VARIANCE, "mean": mean, "likelihood": Bernoulli(), "tolerance": 1e-10}
    mode = newton.weight_space(J * (5 * VARIANCE).sqrt(), y, mean=mean, likelihood=Bernoulli())
    assert mode.u is not None
    for fit in (meanfield, lowrank):
        cold, far, warm = (
            fit(Matrix(J, block=C), y, start=start, **given).checked()
            for start in (None, 30 * normal(P, seed=5), (5 * VARIANCE).sqrt() * mode.u)
        )
        assert far.elbo == pytest.approx(cold.elbo, rel=1e-7) == warm.elbo
        torch.testing.assert_close(warm.delta, cold.delta, rtol=1e-3, atol=1e-3)


def test_a_network_and_parameters_without_prior_variance() -> None:
    net = double(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)))
    lin = linearize(net)
    J = lin.jacobian(normal(N, 4), batch_size=3)
    variance = torch.where(torch.arange(lin.p) < 7, 0.0, 1.0).double()
    y = torch.arange(N) % C
    given = {"variance": variance, "mean": J.outputs(), "likelihood": Categorical(), "start": 0.1 * normal(lin.p)}
    for fit in (meanfield, lowrank):
        one = fit(J, y, **given).checked()
        two = fit(J.cached(), y, **given).checked()
        dense = fit(Matrix(J.dense(), block=C), y, **given).checked()
        for other in (two, dense):
            assert other.elbo == pytest.approx(one.elbo, rel=1e-9)
            torch.testing.assert_close(other.delta, one.delta, rtol=1e-6, atol=1e-8)
        assert bool((one.delta[:7] == 0).all())


def test_single_precision() -> None:
    J, mean, y = problem(Categorical())
    for fit in (meanfield, lowrank):
        exact = fit(Matrix(J, block=C), y, variance=VARIANCE, mean=mean, likelihood=Categorical())
        given = {"variance": VARIANCE.float(), "mean": mean.float(), "likelihood": Categorical(), "tolerance": 1e-5}
        single = fit(Matrix(J.float(), block=C), y, **given).checked()
        assert single.delta.dtype == torch.float32
        assert single.elbo == pytest.approx(exact.elbo, rel=1e-2)


# Draws.


def test_draws_have_exact_moments_where_there_are_enough() -> None:
    z = draws(16, 5, C, seed=0)
    assert z.shape == (16, 5, C)
    torch.testing.assert_close(z.mean(0), torch.zeros(5, C).double(), rtol=0, atol=1e-14)
    moments = torch.einsum("snc,snd->ncd", z, z) / 16
    torch.testing.assert_close(moments, torch.eye(C).double().expand(5, C, C), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(z[:, 0], z[:, 1])
    few = draws(4, 2000, C, seed=0)
    assert float(few.mean(0).abs().max()) < 1e-15
    torch.testing.assert_close(few.square().mean(), torch.tensor(1.0).double(), rtol=0.05, atol=0)


def test_examples_may_share_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    J, mean, y = problem(Categorical())
    given = {"variance": VARIANCE, "mean": mean, "likelihood": Categorical(), "samples": 256}
    own = lowrank(Matrix(J, block=C), y, **given).checked()
    monkeypatch.setattr(variational, "DRAWS", 4 * 256 * C)  # draws for 4 of the 10 examples
    shared = lowrank(Matrix(J, block=C), y, **given).checked()
    assert shared.elbo != own.elbo
    assert shared.elbo == pytest.approx(own.elbo, abs=0.2)
    again = lowrank(Matrix(J, block=C), y, **given).checked()
    assert again.elbo == shared.elbo


# Errors.


def test_errors() -> None:
    J, mean, y = problem(Categorical())
    op, given = Matrix(J, block=C), {"variance": VARIANCE, "mean": mean, "likelihood": Categorical()}
    with pytest.raises(ValueError, match=r"mean needs shape \(n, c\); got \(30,\)"):
        meanfield(op, y, **{**given, "mean": mean.flatten()})
    with pytest.raises(ValueError, match=r"so J needs 30 rows; got shape \(27, 14\)"):
        meanfield(Matrix(J[3:], block=C), y, **given)
    with pytest.raises(ValueError, match=r"so variance needs shape \(14,\); got \(13,\)"):
        meanfield(op, y, **{**given, "variance": VARIANCE[1:]})
    with pytest.raises(TypeError, match=r"variance is torch\.float32"):
        meanfield(op, y, **{**given, "variance": VARIANCE.float()})
    with pytest.raises(ValueError, match=r"so K needs shape \(30, 30\); got \(14, 14\)"):
        lowrank(op, y, K=J.T @ J, **given)
    with pytest.raises(ValueError, match=r"start needs shape \(14,\); got \(13,\)"):
        meanfield(op, y, start=VARIANCE[1:], **given)
    with pytest.raises(ValueError, match="samples must be an even number, at least 2; got 7"):
        meanfield(op, y, samples=7, **given)
    with pytest.raises(ValueError, match='rank must be "auto" or a number from 1 to 14, the smaller side of J; got 15'):
        lowrank(op, y, rank=15, **given)
    with pytest.raises(ValueError, match="The kernel is zero on the training data"):
        lowrank(Matrix(0 * J, block=C), y, **given)
    with pytest.raises(TypeError, match="Heteroscedastic is not log-concave"):
        meanfield(Matrix(J[:20]), normal(N, 1), variance=VARIANCE, mean=normal(N, 2), likelihood=Heteroscedastic())
    with pytest.raises(NotImplementedError, match="not known to come in blocks"):
        meanfield(Matrix(J), y, **given)
    with pytest.raises(ArithmeticError, match="The ELBO was still rising after 1 iterations"):
        meanfield(op, y, iterations=1, **given).checked()
    with pytest.raises(ValueError, match="Prior variances must be finite"):
        meanfield(op, y, **{**given, "variance": math.inf * VARIANCE})
    with pytest.raises(ValueError, match="mean must be finite"):
        lowrank(op, y, **{**given, "mean": math.inf * mean})
