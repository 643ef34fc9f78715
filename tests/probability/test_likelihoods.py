"""Likelihoods against autodiff, numerical integration and counting; bad targets."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special
from torch import Tensor

from linnet.probability import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    compute_probabilities,
    factor_covariance,
    take_expectations,
)
from tests.support.drawn import normal

N, C = 6, 4
LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": Gaussian(0.3),
    "gaussian per output": Gaussian(torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)),
    "heteroscedastic": Heteroscedastic(),
    "bernoulli": Bernoulli(),
    "categorical": Categorical(),
}
every = pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS.keys())


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def outputs(seed: int = 0) -> Tensor:
    return normal(N, C, seed=seed)


def targets(likelihood: Likelihood) -> Tensor:
    if isinstance(likelihood, Categorical):
        y = torch.tensor([0, 3, 1, 2, 2, 0])
    elif isinstance(likelihood, Bernoulli):
        y = (normal(N, C, seed=5) > 0).double()
    else:
        y = normal(N, C // 2 if isinstance(likelihood, Heteroscedastic) else C, seed=5)
    return likelihood.targets(y, N, C, dtype=torch.float64)


def blocks(B: Tensor) -> Tensor:
    return torch.diag_embed(B) if B.ndim == 2 else B


def covariance(seed: int = 3, *, rank: int = C) -> Tensor:
    A = normal(N, C, rank, seed=seed)
    return A @ A.mT


def torch_distribution(likelihood: Likelihood, f: Tensor) -> torch.distributions.Distribution:
    if isinstance(likelihood, Gaussian):
        return torch.distributions.Normal(f, torch.as_tensor(likelihood.noise, dtype=f.dtype).sqrt())
    if isinstance(likelihood, Heteroscedastic):
        return torch.distributions.Normal(f[:, : C // 2], (0.5 * f[:, C // 2 :]).exp())
    if isinstance(likelihood, Bernoulli):
        return torch.distributions.Bernoulli(logits=f)
    return torch.distributions.Categorical(logits=f)


# Density, derivatives, divergence.


@every
def test_log_density(likelihood):
    f, y = outputs(), targets(likelihood)
    reference = torch_distribution(likelihood, f).log_prob(y)
    close(likelihood.log_prob(f, y), reference if reference.ndim == 1 else reference.sum(1))


@every
def test_residual_is_the_gradient(likelihood):
    f, y = outputs().requires_grad_(), targets(likelihood)
    close(likelihood.residual(f.detach(), y), torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)[0])


@every
def test_curvature_is_the_second_derivative_of_kl(likelihood):
    """The Fisher information is the Hessian of KL(p(. | f) || p(. | g)) in g at g = f, for any likelihood."""
    f = outputs()
    B = likelihood.curvature(f)
    assert B.shape == ((N, C) if likelihood.diagonal else (N, C, C))
    for i in range(N):
        H = torch.autograd.functional.hessian(lambda g, i=i: likelihood.kl(f[i : i + 1], g[None]).sum(), f[i].clone())
        close(blocks(B)[i], H)


@pytest.mark.parametrize("name", ["gaussian", "gaussian per output", "bernoulli", "categorical"])
def test_curvature_is_minus_the_second_derivative_of_log_density(name):
    likelihood, f = LIKELIHOODS[name], outputs()
    y, B = targets(likelihood), blocks(likelihood.curvature(f))
    for i in range(N):
        H = torch.autograd.functional.hessian(
            lambda g, i=i: -likelihood.log_prob(g[None], y[i : i + 1]).sum(), f[i].clone()
        )
        close(B[i], H)


@every
def test_root(likelihood):
    f = outputs()
    L = likelihood.root(f)
    assert L.shape == likelihood.curvature(f).shape
    close(blocks(L) @ blocks(L).mT, blocks(likelihood.curvature(f)))


@pytest.mark.parametrize("name", ["gaussian", "gaussian per output", "bernoulli", "categorical"])
def test_residual_is_target_minus_mean(name):
    likelihood, f = LIKELIHOODS[name], outputs()
    y = targets(likelihood)
    error = (torch.nn.functional.one_hot(y, C) if name == "categorical" else y) - likelihood.mean(f)
    noise = likelihood.noise if isinstance(likelihood, Gaussian) else 1.0
    close(likelihood.residual(f, y), error / noise)


@every
def test_kl(likelihood):
    f, g = outputs(), outputs(9)
    p, q = (torch_distribution(likelihood, x) for x in (f, g))
    reference = torch.distributions.kl_divergence(p, q)
    close(likelihood.kl(f, g), reference if reference.ndim == 1 else reference.sum(1))
    assert (likelihood.kl(f, g) > 0).all()
    assert likelihood.kl(f, f).abs().max() <= 1e-15


@every
def test_more_axes_in_front(likelihood):
    f, y = normal(3, N, C), targets(likelihood)
    for method in (likelihood.curvature, likelihood.root, likelihood.mean):
        assert torch.equal(method(f)[1], method(f[1]))
    assert torch.equal(likelihood.log_prob(f, y)[2], likelihood.log_prob(f[2], y))
    assert torch.equal(likelihood.residual(f, y)[2], likelihood.residual(f[2], y))


@every
def test_samples_have_the_moments_of_the_likelihood(likelihood):
    """The mean over draws of y, and E[residual residual^T] = B, within 5 standard errors."""
    k, f = 20_000, outputs()[:1]
    y = likelihood.sample(f.expand(k, C), torch.Generator().manual_seed(0))
    assert y.shape == targets(likelihood)[:1].expand(k, *targets(likelihood).shape[1:]).shape
    seen = torch.nn.functional.one_hot(y, C).double() if isinstance(likelihood, Categorical) else y
    error = seen.mean(0) - likelihood.mean(f)[0]
    assert (error.abs() <= 5 * seen.std(0) / math.sqrt(k)).all()
    r = likelihood.residual(f.expand(k, C), y)
    products = r[:, :, None] * r[:, None, :]
    error = products.mean(0) - blocks(likelihood.curvature(f))[0]
    assert (error.abs() <= 5 * products.std(0) / math.sqrt(k) + 1e-12).all()
    again = likelihood.sample(f.expand(k, C), torch.Generator().manual_seed(0))
    assert torch.equal(y, again)


def test_samples_without_a_generator():
    f = outputs()
    torch.manual_seed(0)
    drawn = [likelihood.sample(f) for likelihood in LIKELIHOODS.values()]
    torch.manual_seed(0)
    assert all(torch.equal(a, li.sample(f)) for a, li in zip(drawn, LIKELIHOODS.values(), strict=True))


# Huge logits.


@pytest.mark.parametrize("size", [40.0, 1e3, 1e30])
def test_huge_logits_two_classes(size):
    """Bernoulli(f) and Categorical(0, f) are the same distribution, whatever the size of the logit."""
    f = torch.tensor([[size], [-size], [size], [-size]], dtype=torch.float64)
    y = torch.tensor([[1.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    two = torch.cat([torch.zeros_like(f), f], 1)
    one, other = Bernoulli(), Categorical()
    label = y[:, 0].long()
    reference = torch.tensor([0.0, -size, -size, 0.0], dtype=torch.float64)
    for value in (one.log_prob(f, y), other.log_prob(two, label)):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(other.residual(two, label)[:, 1:], one.residual(f, y), rtol=1e-12, atol=0)
    # Entries of exp(-40) keep their digits, although 1 - pi is zero there.
    torch.testing.assert_close(other.curvature(two)[:, 1:, 1], one.curvature(f), rtol=1e-12, atol=0)
    torch.testing.assert_close(other.curvature(two)[:, 0, 0], one.curvature(f)[:, 0], rtol=1e-12, atol=0)
    L = other.root(two)
    torch.testing.assert_close(L @ L.mT, other.curvature(two), rtol=1e-12, atol=0)
    for likelihood, g in ((one, f), (other, two)):
        divergence = likelihood.kl(g, g.flip(0))
        assert torch.isfinite(divergence).all()
        torch.testing.assert_close(divergence, torch.full_like(divergence, size), rtol=1e-12, atol=0)


def test_curvature_of_sure_predictions_is_positive_semi_definite():
    f = torch.tensor([[60.0, 0.0, -3.0], [0.0, 40.0, 39.0]], dtype=torch.float64)
    B = Categorical().curvature(f)
    assert B.sum(-1).abs().max() <= 1e-16 * B.abs().max()
    assert (B.diagonal(dim1=1, dim2=2) > 0).all()
    for b in B:
        values = torch.linalg.eigvalsh(b / b.abs().max())
        assert values.min() >= -1e-15


# Expectations over Gaussian outputs.


@pytest.mark.parametrize("sign", [0.0, 1.0])
@pytest.mark.parametrize("std", [0.0, 0.3, 0.999, 1.001, 4.0, 60.0, 1e4])
@pytest.mark.parametrize("mean", [-30.0, -1.2, 0.0, 2.5, 300.0])
def test_bernoulli_expectations_by_integration(mean, std, sign):
    y = torch.tensor([[sign]], dtype=torch.float64)
    moments = (torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[std**2]], dtype=torch.float64))
    found = take_expectations(Bernoulli(), *moments, y)

    def integral(g) -> float:
        if std == 0:
            return float(g(mean))
        kinks = {min(max((q - mean) / std, -12.0), 12.0) for q in (-40, -8, -2, 0, 2, 8, 40)}
        value = 0.0
        ends = sorted({-12.0, 12.0, *kinks, *np.linspace(-11, 11, 23)})
        for a, b in pairwise(ends):
            value += integrate.fixed_quad(
                lambda z: g(mean + std * z) * np.exp(-z * z / 2) / math.sqrt(2 * math.pi), a, b, n=60
            )[0]
        return value

    s = 2 * sign - 1
    references = (
        integral(lambda f: special.log_expit(s * f)),
        integral(lambda f: sign - special.expit(f)),
        integral(lambda f: special.expit(f) * special.expit(-f)),
    )
    for value, reference in zip(found, references, strict=True):
        assert value.item() == pytest.approx(reference, rel=1e-10, abs=1e-11)


def test_gaussian_expectations():
    f, cov = outputs(), covariance()
    likelihood = LIKELIHOODS["gaussian per output"]
    y = targets(likelihood)
    found = take_expectations(likelihood, f, cov, y)
    noise = likelihood.noise
    variances = cov.diagonal(dim1=1, dim2=2)
    close(found.log_prob, -0.5 * (((y - f) ** 2 + variances) / noise + torch.log(2 * math.pi * noise)).sum(1))
    close(found.residual, (y - f) / noise)
    close(found.curvature, (1 / noise).expand(N, C))
    close(take_expectations(likelihood, f, variances, y).log_prob, found.log_prob)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_root_of_the_covariances_serves_as_well(name):
    likelihood, f, cov = LIKELIHOODS[name], outputs(), covariance()
    eps = normal(7, N, C, seed=8)
    given = (f, cov, targets(likelihood), eps)
    for found, wanted in zip(
        take_expectations(likelihood, f, factor_covariance(cov, f), *given[2:]),
        take_expectations(likelihood, *given),
        strict=True,
    ):
        close(found, wanted)
    assert not bool(factor_covariance(0 * cov, f).T.any())


def test_heteroscedastic_expectations():
    """Against a tensor quadrature over each mean and its log variance, which are correlated."""
    f, cov, likelihood = outputs(), 0.3 * covariance(), Heteroscedastic()
    y, d = targets(likelihood), C // 2
    found = take_expectations(likelihood, f, cov, y)
    z, w = np.polynomial.hermite_e.hermegauss(40)
    w = torch.from_numpy(np.outer(w, w).flatten() / w.sum() ** 2)
    grid = torch.from_numpy(np.stack(np.meshgrid(z, z, indexing="ij"), -1).reshape(-1, 2))
    values = [torch.zeros(N).double(), torch.zeros(N, C).double(), torch.zeros(N, C).double()]
    for i in range(N):
        for j in range(d):
            pair = [j, j + d]
            L = torch.linalg.cholesky(cov[i][pair][:, pair])
            g, target = f[i, pair] + grid @ L.T, y[i, j].expand(len(grid), 1)
            values[0][i] += (w * likelihood.log_prob(g, target)).sum()
            values[1][i, pair] += w @ likelihood.residual(g, target)
            values[2][i, pair] += w @ likelihood.curvature(g)
    for value, reference in zip(found, values, strict=True):
        close(value, reference)


def test_categorical_expectations_are_averages_over_draws():
    f, cov, likelihood = outputs(), covariance(rank=2), Categorical()
    y, eps = targets(likelihood), normal(50, N, C, seed=8)
    found = take_expectations(likelihood, f, cov, y, eps)
    values, vectors = torch.linalg.eigh(cov)
    root = vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT
    drawn = [f + (root @ e[:, :, None])[:, :, 0] for e in eps]
    close(found.log_prob, torch.stack([likelihood.log_prob(g, y) for g in drawn]).mean(0))
    close(found.residual, torch.stack([likelihood.residual(g, y) for g in drawn]).mean(0))
    close(found.curvature, torch.stack([likelihood.curvature(g) for g in drawn]).mean(0))
    shared = take_expectations(likelihood, f, cov, y, eps[:, :1])
    close(shared.log_prob, take_expectations(likelihood, f, cov, y, eps[:, :1].expand(-1, N, -1)).log_prob)


def test_categorical_expectations_of_independent_logits():
    f, variance, likelihood = outputs(), normal(N, C, seed=2).square(), Categorical()
    y, eps = targets(likelihood), normal(10, N, C, seed=8)
    for a, b in zip(
        take_expectations(likelihood, f, variance, y, eps),
        take_expectations(likelihood, f, torch.diag_embed(variance), y, eps),
        strict=True,
    ):
        close(a, b)


def test_categorical_expectations_converge_to_the_integral():
    """Two logits: their difference is the logit of a Bernoulli."""
    f, cov = outputs()[:, :2], covariance()[:, :2, :2]
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    draws = 40_000
    found = take_expectations(Categorical(), f, cov, y, normal(draws, N, 2, seed=1))
    variance = cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]
    exact = take_expectations(Bernoulli(), f[:, 1:] - f[:, :1], variance[:, None], y[:, None].double())
    spread = 4 * variance.sqrt().max() / math.sqrt(draws)  # log p is 1-Lipschitz in the difference
    assert (found.log_prob - exact.log_prob).abs().max() <= spread
    assert (found.residual[:, 1:] - exact.residual).abs().max() <= 4 * 0.5 / math.sqrt(draws)
    assert (found.curvature[:, 1, 1] - exact.curvature[:, 0]).abs().max() <= 4 * 0.125 / math.sqrt(draws)


@every
def test_expected_residual_is_the_gradient_in_the_mean(likelihood):
    y, eps = targets(likelihood), normal(20, N, C, seed=4)
    mean = outputs().requires_grad_()
    total = take_expectations(likelihood, mean, covariance(), y, eps).log_prob.sum()
    gradient = torch.autograd.grad(total, mean)[0]
    close(take_expectations(likelihood, mean.detach(), covariance(), y, eps).residual, gradient)


@every
def test_expectations_without_variance_are_values(likelihood):
    f, y = outputs(), targets(likelihood)
    found = take_expectations(likelihood, f, torch.zeros(N, C, C).double(), y, normal(2, N, C))
    close(found.log_prob, likelihood.log_prob(f, y))
    close(found.residual, likelihood.residual(f, y))
    close(found.curvature, likelihood.curvature(f))


def test_expectations_need_draws_and_covariances():
    f, y = outputs(), targets(Categorical())
    with pytest.raises(ValueError, match=r"needs eps of shape \(s, 6, 4\), standard normal; got None"):
        take_expectations(Categorical(), f, covariance(), y)
    with pytest.raises(ValueError, match=r"needs eps of shape \(s, 6, 4\).*got \(5, 4\)"):
        take_expectations(Categorical(), f, covariance(), y, normal(5, C))
    with pytest.raises(ValueError, match=r"cov needs shape \(6, 4, 4\), or \(6, 4\) for variances; got \(6, 3, 3\)"):
        take_expectations(Categorical(), f, covariance()[:, :3, :3], y, normal(5, N, C))
    with pytest.raises(TypeError, match=r"of a linnet.likelihoods.Likelihood; got 'probit'"):
        take_expectations("probit", f, covariance(), y)
    wrong = covariance()
    wrong[2] = -torch.eye(C, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"example 2 has eigenvalue -1, the largest is"):
        take_expectations(Categorical(), f, wrong, y, normal(5, N, C))
    with pytest.raises(ValueError, match=r"not positive semi-definite: example 2 has variance -1"):
        take_expectations(Gaussian(1.0), f, wrong, normal(N, C))
    wrong[2] = float("nan")
    with pytest.raises(ValueError, match=r"example 2 has variance nan"):
        compute_probabilities(Bernoulli(), f, wrong)


# Predictive probabilities.


def test_probit_link():
    f, cov = outputs(), covariance()
    scaled = f / torch.sqrt(1 + math.pi / 8 * cov.diagonal(dim1=1, dim2=2))
    close(compute_probabilities(Categorical(), f, cov), torch.softmax(scaled, 1))
    close(compute_probabilities(Bernoulli(), f, cov), torch.sigmoid(scaled))
    close(compute_probabilities(Bernoulli(), f, cov.diagonal(dim1=1, dim2=2)), torch.sigmoid(scaled))


def test_monte_carlo_link_one_logit():
    """Against the integral; 5 standard errors. The draws are the default generator's."""
    f, variance = outputs(), normal(N, C, seed=6).square() * 4
    exact = (take_expectations(Bernoulli(), f, variance, torch.zeros_like(f)).residual).neg()
    found = compute_probabilities(Bernoulli(), f, variance, link="mc", samples=20_000)
    assert (found - exact).abs().max() <= 5 * 0.5 / math.sqrt(20_000)
    assert torch.equal(found, compute_probabilities(Bernoulli(), f, variance, link="mc", samples=20_000))
    probit = compute_probabilities(Bernoulli(), f, variance)
    assert (probit - exact).abs().max() <= 0.03


def test_monte_carlo_link_of_correlated_logits():
    """Logits that only vary together leave the probabilities as they are; the probit link cannot know."""
    f, together = outputs(), torch.full((N, C, C), 9.0, dtype=torch.float64)
    close(compute_probabilities(Categorical(), f, together, link="mc", samples=100), torch.softmax(f, 1), rtol=1e-6)
    found = compute_probabilities(Categorical(), f, covariance(), link="mc", samples=5000)
    close(found.sum(1), torch.ones(N).double())
    draws = torch.distributions.MultivariateNormal(f, covariance() + 1e-9 * torch.eye(C)).sample((20_000,))
    assert (found - torch.softmax(draws, -1).mean(0)).abs().max() <= 5 * 0.5 / math.sqrt(5000)


@settings(max_examples=8, deadline=None)
@given(rows=st.sets(st.integers(0, N - 1), min_size=1), seed=st.integers(0, 9))
def test_probabilities_do_not_depend_on_other_examples(rows, seed):
    index = torch.tensor(sorted(rows))
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    f, cov = outputs(), covariance()
    whole = compute_probabilities(Categorical(), f, cov, link="mc", samples=64, generator=generators[0])
    part = compute_probabilities(Categorical(), f[index], cov[index], link="mc", samples=64, generator=generators[1])
    close(part, whole[index], rtol=1e-12)


def test_probabilities_in_many_blocks():
    f, cov = normal(1500, 1000), normal(1500, 1000, seed=1).square()
    found = compute_probabilities(Categorical(), f, cov, link="mc", samples=5)
    eps = torch.randn(5, 1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    close(found, torch.stack([torch.softmax(f + cov.sqrt() * e, 1) for e in eps]).mean(0))


def test_predictive_errors():
    f, cov = outputs(), covariance()
    with pytest.raises(TypeError, match=r"for Bernoulli, Categorical and Ordinal; got Gaussian\(0\.3\)"):
        compute_probabilities(Gaussian(0.3), f, cov)
    with pytest.raises(ValueError, match=r"link must be 'probit', 'centered', 'bridge' or 'mc'; got 'logit'"):
        compute_probabilities(Bernoulli(), f, cov, link="logit")
    with pytest.raises(ValueError, match=r"samples must be a positive number of draws; got 0"):
        compute_probabilities(Bernoulli(), f, cov, link="mc", samples=0)
    with pytest.raises(ValueError, match=r"cov needs shape \(6, 4, 4\)"):
        compute_probabilities(Bernoulli(), f, cov[:3])


# Targets.


def test_targets_of_every_kind():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    for y in ([0.0, 1.0, 2.0], frozen, np.arange(3, dtype=np.uint16), torch.arange(3), np.arange(3.0)[:, None]):
        found = Gaussian(1.0).targets(y, 3, 1, dtype=torch.float64)
        assert found.dtype == torch.float64
        assert found.tolist() == [[0.0], [1.0], [2.0]]
    assert Gaussian(1.0).targets(np.arange(3.0), 3, 1).dtype == torch.float64
    assert Gaussian(1.0).targets([0, 1, 2], 3, 1).dtype == torch.get_default_dtype()
    assert Bernoulli().targets([True, False], 2, 1, dtype=torch.float32).tolist() == [[1.0], [0.0]]
    for y in ([0, 2, 1], np.array([0, 2, 1], dtype=np.uint8), torch.tensor([0, 2, 1], dtype=torch.int32)):
        labels = Categorical().targets(y, 3, 3, dtype=torch.float32)
        assert (labels.dtype, labels.tolist()) == (torch.long, [0, 2, 1])
    assert Heteroscedastic().targets([1.0, 2.0], 2, 2).shape == (2, 1)
    y = torch.zeros(2, 1, requires_grad=True)
    assert not Gaussian(1.0).targets(y, 2, 1).requires_grad
    checked = Categorical().targets([0, 1], 2, 2)
    assert torch.equal(Categorical().targets(checked, 2, 2), checked)


@pytest.mark.parametrize(
    ("likelihood", "y", "c", "error", "text"),
    [
        pytest.param(Gaussian(1.0), torch.zeros(5), 2, ValueError, r"shape \(5, 2\), a row per example; got \(5,\)"),
        pytest.param(Gaussian(1.0), torch.zeros(4), 1, ValueError, r"shape \(5, 1\) or \(5,\), .*; got \(4,\)"),
        pytest.param(Gaussian(1.0), torch.zeros(5, 1, 1), 1, ValueError, r"got \(5, 1, 1\)"),
        pytest.param(Gaussian(1.0), [0, 1, np.nan, 3, np.nan], 1, ValueError, r"2 of 5 .* example 2: \[nan\]"),
        pytest.param(Gaussian(1.0), [0, 1, 2, np.inf, 0], 1, ValueError, r"1 of 5 examples .* example 3: \[inf\]"),
        pytest.param(Gaussian(1.0), ["a"] * 5, 1, TypeError, r"targets that are numbers; got list of <U1"),
        pytest.param(Gaussian(1.0), torch.zeros(5) * 1j, 1, TypeError, r"real numbers; got torch\.complex64"),
        pytest.param(Gaussian(torch.ones(3)), torch.zeros(5, 2), 2, ValueError, r"noise for 3 outputs .* has 2\. Give"),
        pytest.param(Heteroscedastic(), torch.zeros(5, 2), 3, ValueError, r"even number of outputs, .* network has 3"),
        pytest.param(Heteroscedastic(), torch.zeros(5, 4), 4, ValueError, r"shape \(5, 2\).*; got \(5, 4\)"),
        pytest.param(Bernoulli(), [0, 1, -1, 1, 2], 1, ValueError, r"targets 0 or 1; example 2 has \[-1\.0\]"),
        pytest.param(Bernoulli(), [0, 1, 0.5, 1, 0], 1, ValueError, r"example 2 has \[0\.5\]\. Encode"),
        pytest.param(Bernoulli(), [0, np.nan, 0, 1, 0], 1, ValueError, r"example 1: \[nan\]"),
        pytest.param(Categorical(), [0, 1, 2, 3, 4], 3, ValueError, r"Label 3 of example 3 .* 0 \.\. 2.*attach_head"),
        pytest.param(Categorical(), [0, -1, 2, 3, 4], 3, ValueError, r"Label -1 of example 1.*Encode the labels as 0"),
        pytest.param(Categorical(), torch.zeros(5), 3, TypeError, r"integers 0 \.\. 2; got torch\.float32. Use y"),
        pytest.param(Categorical(), [0, 1, np.nan, 1, 1], 3, ValueError, r"example 2: \[nan\]"),
        pytest.param(Categorical(), torch.zeros(5, 3), 3, ValueError, r"got \(5, 3\)\. From one-hot rows take y\.argm"),
        pytest.param(Categorical(), torch.zeros(5, 1), 3, ValueError, r"got \(5, 1\)\. Use y\[:, 0\]"),
        pytest.param(Categorical(), [0, 1, 2], 3, ValueError, r"each of the 5 examples, shape \(5,\); got \(3,\)\.$"),
        pytest.param(Categorical(), [0] * 5, 1, ValueError, r"at least 2; the network has 1\. Use Bernoulli"),
        pytest.param(Categorical(), list("abcde"), 5, TypeError, r"numbers; got list of <U1\. Encode labels"),
    ],
)
def test_bad_targets(likelihood, y, c, error, text):
    with pytest.raises(error, match=text):
        likelihood.targets(y, 5, c, dtype=torch.float64)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf"), torch.tensor([1.0, 0.0]), [1.0, -2.0]])
def test_noise_is_positive(noise):
    with pytest.raises(ValueError, match=r"a variance and must be positive and finite; got"):
        Gaussian(noise)


@pytest.mark.parametrize("noise", [torch.ones(2, 2), torch.ones(0), torch.ones(2) * 1j])
def test_noise_is_one_or_one_per_output(noise):
    with pytest.raises(ValueError, match=r"one number, or one per output, \(c,\); got torch\."):
        Gaussian(noise)


def test_noise_keeps_its_digits():
    assert Gaussian(0.1).noise == 0.1
    assert Gaussian(torch.tensor(0.5)).noise == 0.5
    assert Gaussian([0.1, 0.2]).noise.tolist() == [0.1, 0.2]
    assert repr(Gaussian(0.1)) == "Gaussian(0.1)"
    assert repr(Categorical()) == "Categorical()"
    with pytest.raises(ValueError, match=r"noise for 2 outputs and the network has 3\. Give one variance, or 3"):
        Gaussian(torch.ones(2)).curvature(torch.zeros(5, 3))


@every
def test_dtype_is_kept(likelihood):
    f, y = outputs().float(), targets(likelihood)
    y = y if y.dtype == torch.long else y.float()
    for value in (likelihood.log_prob(f, y), likelihood.residual(f, y), likelihood.curvature(f), likelihood.root(f)):
        assert value.dtype == torch.float32
    found = take_expectations(likelihood, f, covariance().float(), y, normal(3, N, C).float())
    reference = take_expectations(likelihood, outputs(), covariance(), targets(likelihood), normal(3, N, C))
    for value, exact in zip(found, reference, strict=True):
        assert value.dtype == torch.float32
        close(value.double(), exact, rtol=1e-4)
    assert likelihood.kl(f, outputs(9).float()).dtype == torch.float32
