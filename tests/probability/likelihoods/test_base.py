"""Likelihoods of counts, ordered classes, times and of users: derivatives, averages, open parameters, weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from linnet.likelihoods import Gaussian, Likelihood, NegativeBinomial, Ordinal, Poisson, Weibull
from linnet.probability import (
    Categorical,
    KnownNoise,
    Sites,
    Weighted,
    as_variances,
    as_weights,
    compute_probabilities,
    describe_likelihood,
    likelihood_for,
    log_predictive,
    predict_target,
    restore_likelihood,
    take_expectations,
)
from tests.support.drawn import normal
from tests.support.observed import OBSERVED, Robust, Together, draw_targets

N = 7
every = pytest.mark.parametrize(("likelihood", "c"), OBSERVED.values(), ids=OBSERVED.keys())


def problem(likelihood: Likelihood, c: int) -> tuple[Tensor, Tensor]:
    f = normal(N, c)
    return f, draw_targets(likelihood, f)


def close(value: Tensor, reference: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(value, reference, rtol=rtol, atol=rtol)


def blocks(B: Tensor, diagonal: bool) -> Tensor:
    return torch.diag_embed(B) if diagonal else B


def hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    each = [
        torch.autograd.functional.hessian(
            lambda g, i=i: -likelihood.log_prob(g[None], y[i : i + 1]).sum(), f[i].clone()
        )
        for i in range(len(f))
    ]
    return torch.stack(each)


# Densities.


def test_densities_are_those_of_scipy() -> None:
    f = normal(N, 1)
    rate = f.exp().numpy()[:, 0]
    y = torch.arange(N).double()[:, None]
    count = y.numpy()[:, 0]
    close(Poisson().log_prob(f, y), torch.from_numpy(scipy.stats.poisson(rate).logpmf(count)))
    r = 1 / 0.6
    reference = scipy.stats.nbinom(r, r / (r + rate)).logpmf(count)
    close(NegativeBinomial(0.6).log_prob(f, y), torch.from_numpy(reference))
    time = y + 0.5
    law = scipy.stats.weibull_min(1.7, scale=rate)
    seen, censored = (torch.cat([time, torch.full_like(time, flag)], 1) for flag in (1, 0))
    close(Weibull(1.7).log_prob(f, seen), torch.from_numpy(law.logpdf(time.numpy()[:, 0])))
    close(Weibull(1.7).log_prob(f, censored), torch.from_numpy(law.logsf(time.numpy()[:, 0])))
    b = np.array([-np.inf, -1.0, 0.2, 1.5, np.inf])
    cdf = scipy.stats.logistic.cdf(b - f.numpy())
    close(Ordinal([-1.0, 0.2, 1.5]).mean(f), torch.from_numpy(np.diff(cdf, axis=1)))


def test_ordinal_keeps_its_digits_far_from_its_thresholds() -> None:
    f = torch.tensor([[60.0]], dtype=torch.float64)
    found = Ordinal([0.0, 1.0]).log_prob(f, torch.tensor([1]))
    close(found, torch.tensor([-59.0 + math.log1p(-math.exp(-1))], dtype=torch.float64))


# Derivatives.


@every
def test_residual_and_observed_curvature_are_derivatives_of_the_density(likelihood: Likelihood, c: int) -> None:
    f, y = problem(likelihood, c)
    moving = f.clone().requires_grad_()
    close(likelihood.residual(f, y), torch.autograd.grad(likelihood.log_prob(moving, y).sum(), moving)[0])
    B = blocks(likelihood.observed_curvature(f, y), likelihood.diagonal)
    close(B, hessian(likelihood, f, y))
    L = blocks(likelihood.observed_root(f, y), likelihood.diagonal)
    close(L @ L.mT, B)


@every
def test_the_observed_curvature_can_be_differentiated(likelihood: Likelihood, c: int) -> None:
    f, y = problem(likelihood, c)
    moving = f.clone().requires_grad_()
    (found,) = torch.autograd.grad(likelihood.observed_curvature(moving, y).sum(), moving)
    h = 1e-5
    for j in range(c):
        step = h * torch.eye(c).double()[j]
        up, down = (likelihood.observed_curvature(f + sign * step, y).reshape(N, -1).sum(1) for sign in (1, -1))
        close(found[:, j], (up - down) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "ordinal", "weibull"])
def test_the_fisher_information_is_the_average_over_drawn_targets(name: str) -> None:
    likelihood, c = OBSERVED[name]
    f = 0.5 * normal(3, c)
    y = likelihood.sample(f.expand(200_000, 3, c), torch.Generator().manual_seed(0))
    found = likelihood.observed_curvature(f, y)
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - likelihood.curvature(f)).abs() <= 5 * error + 1e-12).all())
    squares = likelihood.residual(f, y).square()
    error = squares.std(0) / math.sqrt(len(squares))
    assert bool(((squares.mean(0) - likelihood.curvature(f)).abs() <= 5 * error).all())


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "ordinal", "weibull"])
def test_the_curvature_of_the_divergence_is_the_fisher_information(name: str) -> None:
    likelihood, c = OBSERVED[name]
    f = normal(3, c)
    for i in range(3):
        H = torch.autograd.functional.hessian(lambda g, i=i: likelihood.kl(f[i : i + 1], g[None]).sum(), f[i].clone())
        close(torch.diag(likelihood.curvature(f)[i]), H)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "weibull"])
def test_mean_and_variance_are_those_of_draws(name: str) -> None:
    likelihood, c = OBSERVED[name]
    f = 0.5 * normal(3, c)
    y = likelihood.sample(f.expand(200_000, 3, c), torch.Generator().manual_seed(0))[..., :c]
    assert bool(((y.mean(0) - likelihood.mean(f)).abs() <= 5 * y.std(0) / math.sqrt(len(y))).all())
    torch.testing.assert_close(y.var(0), likelihood.variance(f), rtol=0.03, atol=0.0)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "ordinal", "weibull"])
def test_draws_without_a_generator_are_those_of_the_seed(name: str) -> None:
    likelihood, c = OBSERVED[name]
    f, drawn = normal(20, c), []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(likelihood.sample(f))
    assert torch.equal(*drawn) and len(drawn[0].unique()) > 1
    assert torch.equal(likelihood.targets(drawn[0], 20, c, dtype=f.dtype), drawn[0])


# Averages over Gaussian outputs.


@pytest.mark.parametrize("spread", [0.1, 0.8, 2.0])
@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "ordinal", "weibull", "own"])
def test_expectations_are_integrals(name: str, spread: float) -> None:
    likelihood, c = OBSERVED[name]
    f, y = problem(likelihood, c)
    found = take_expectations(likelihood, f, torch.full_like(f, spread**2), y)
    z = torch.linspace(-14, 14, 40_001, dtype=torch.float64)
    w = torch.exp(-0.5 * z.square())
    w = w / w.sum()
    grid = f[:, None, :] + spread * z[None, :, None]  # (N, nodes, c)
    targets = y[:, None].expand(N, len(z), *y.shape[1:])
    rtol = 1e-6 if name == "own" else 1e-8  # a fixed grid for a density that nothing is known of
    scale = float(found.log_prob.abs().max())
    assert float((found.log_prob - (w * likelihood.log_prob(grid, targets)).sum(1)).abs().max()) <= rtol * scale
    for value, each in (
        (found.residual, likelihood.residual(grid, targets)),
        (found.curvature, likelihood.observed_curvature(grid, targets)),
    ):
        reference = (w[:, None] * each).sum(1)
        assert float((value - reference).abs().max()) <= 100 * rtol * float(reference.abs().max())


def test_expectations_of_coupled_outputs_are_averages_over_draws() -> None:
    f, y = problem(Together(), 3)
    eps = normal(4, N, 3, seed=3)
    found = take_expectations(Together(), f, torch.full_like(f, 0.25), y, eps)
    draws = f + 0.5 * eps
    close(found.log_prob, Together().log_prob(draws, y).mean(0))
    close(found.curvature, torch.stack([hessian(Together(), d, y) for d in draws]).mean(0))
    with pytest.raises(ValueError, match="Together takes expectations over draws, so it needs eps"):
        take_expectations(Together(), f, torch.full_like(f, 0.25), y)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "weibull"])
def test_predicted_targets_are_those_of_draws(name: str) -> None:
    likelihood, c = OBSERVED[name]
    f, v = 0.3 * normal(3, c), torch.full((3, c), 0.2).double()
    found = predict_target(likelihood, f, v)
    draws = f + v.sqrt() * normal(400_000, 3, c, seed=5)
    means = likelihood.mean(draws)
    assert bool(((means.mean(0) - found.mean).abs() <= 5 * means.std(0) / math.sqrt(len(means))).all())
    torch.testing.assert_close(means.var(0), found.spread, rtol=0.03, atol=0.0)
    torch.testing.assert_close(likelihood.variance(draws).mean(0), found.noise(), rtol=0.03, atol=0.0)


def test_predicted_targets_of_a_likelihood_of_the_users() -> None:
    f, v = normal(4, 2), torch.full((4, 2), 0.3).double()
    found = predict_target(Robust(), f, v)
    close(found.mean, f)
    close(found.spread, v)
    with pytest.raises(NotImplementedError, match=r"Robust does not say what its variance is.*variance\(f\)"):
        found.noise()
    with pytest.raises(NotImplementedError, match="depends on several outputs together"):
        predict_target(Together(), normal(2, 3), torch.ones(2, 3).double())
    gaussian = predict_target(Gaussian(0.5), f, v)
    close(gaussian.noise(), torch.full_like(f, 0.5))


def test_probabilities_of_ordered_classes_average_over_outputs() -> None:
    likelihood = OBSERVED["ordinal"][0]
    f, v = normal(4, 1), torch.full((4, 1), 2.0).double()
    found = compute_probabilities(likelihood, f, v)
    z = torch.linspace(-14, 14, 40_001, dtype=torch.float64)
    w = torch.exp(-0.5 * z.square())
    each = likelihood.mean(f[:, None] + 2.0**0.5 * z[None, :, None])
    close(found, (each * (w / w.sum())[:, None]).sum(1), rtol=1e-8)
    close(found.sum(1), torch.ones(4).double())


def test_the_predictive_density_is_an_integral() -> None:
    f, y = problem(Poisson(), 1)
    v = torch.full_like(f, 0.3)
    z = torch.linspace(-14, 14, 40_001, dtype=torch.float64)
    w = torch.exp(-0.5 * z.square())
    each = Poisson().log_prob(f[:, None] + 0.3**0.5 * z[None, :, None], y[:, None].expand(N, len(z), 1)).exp()
    close(log_predictive(Poisson(), f, v, y), (each * (w / w.sum())).sum(1).log(), rtol=1e-8)
    with pytest.raises(NotImplementedError, match="is known for one output; the network has 2"):
        log_predictive(Poisson(), normal(2, 2), normal(2, 2), normal(2, 2))


# Open parameters.


def test_thresholds_of_largest_likelihood() -> None:
    f = normal(60, 1)
    true = Ordinal([-1.0, 0.2, 1.5])
    y = true.sample(f, torch.Generator().manual_seed(1))
    found = Ordinal().fitted(f, y)
    assert found.thresholds is not None and found.classes == 4
    b = found.thresholds.clone().requires_grad_()

    def total(b: Tensor) -> Tensor:
        edges = torch.cat([b.new_tensor([-1e3]), b, b.new_tensor([1e3])])
        p = torch.sigmoid(edges[y + 1] - f[:, 0]) - torch.sigmoid(edges[y] - f[:, 0])
        return p.log().sum()

    (gradient,) = torch.autograd.grad(total(b), b)
    assert float(gradient.abs().max()) < 1e-8
    assert true.fitted(f, y) is true


def test_weights_of_open_parameters_are_repetitions() -> None:
    f, w = normal(40, 1), torch.arange(40) % 3
    for open_, likelihood in (
        (Ordinal(), OBSERVED["ordinal"][0]),
        (NegativeBinomial(), NegativeBinomial(0.8)),
        (Weibull(), Weibull(1.7)),
    ):
        y = draw_targets(likelihood, f)
        a = open_.fitted(f, y, w.double())
        b = open_.fitted(f.repeat_interleave(w, 0), y.repeat_interleave(w, 0))
        for name, value in a.settings().items():
            np.testing.assert_allclose(value, b.settings()[name], rtol=1e-6)


def test_dispersion_and_shape_of_largest_likelihood() -> None:
    f = normal(400, 1)
    for open_, law, name in ((NegativeBinomial(), NegativeBinomial, "dispersion"), (Weibull(), Weibull, "shape")):
        y = draw_targets(law(1.4), f)
        found = open_.fitted(f, y).settings()[name]
        best = float(law(found).log_prob(f, y).sum())
        assert best >= float(law(1.4).log_prob(f, y).sum())
        for factor in (0.99, 1.01):
            assert best > float(law(found * factor).log_prob(f, y).sum())


def test_open_parameters_are_asked_for_by_name() -> None:
    f = torch.zeros(2, 1).double()
    for open_, what in ((Ordinal(), "thresholds"), (NegativeBinomial(), "dispersion"), (Weibull(), "shape")):
        with pytest.raises(ValueError, match=rf"The {what} of {type(open_).__name__}\(\) (is|are) open"):
            open_.mean(f)
    with pytest.raises(ValueError, match=r"and class 1 has no example. Give them"):
        Ordinal().fitted(f, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="there is one class"):
        Ordinal().fitted(f, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="No event was seen"):
        Weibull().fitted(f, torch.tensor([[1.0, 0.0], [2.0, 0.0]]).double())


# Weights, known noise, sites.


@every
def test_a_weight_multiplies_density_gradient_and_curvature(likelihood: Likelihood, c: int) -> None:
    f, y = problem(likelihood, c)
    w = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.0, 1.0]).double()
    weighted, packed = Weighted.pack(likelihood, y, w)
    again = weighted.targets(packed, N, c, dtype=torch.float64)
    close(again, packed)
    close(weighted.log_prob(f, packed), w * likelihood.log_prob(f, y))
    close(weighted.residual(f, packed), w[:, None] * likelihood.residual(f, y))
    B = blocks(weighted.observed_curvature(f, packed), likelihood.diagonal)
    close(B, w[:, None, None] * blocks(likelihood.observed_curvature(f, y), likelihood.diagonal))
    L = blocks(weighted.observed_root(f, packed), likelihood.diagonal)
    close(L @ L.mT, B)
    eps = None if likelihood.diagonal else normal(5, N, c, seed=2)
    cov = torch.full_like(f, 0.3)
    found, plain = take_expectations(weighted, f, cov, packed, eps), take_expectations(likelihood, f, cov, y, eps)
    close(found.log_prob, w * plain.log_prob)
    close(found.residual, w[:, None] * plain.residual)


def test_known_noise_is_gaussian_noise_of_each_observation() -> None:
    f, y, v = normal(N, 2), normal(N, 2, seed=1), normal(N, 2, seed=2).square() + 0.1
    packed = KnownNoise().targets(KnownNoise.pack(y, v), N, 2)
    close(KnownNoise().log_prob(f, packed), torch.distributions.Normal(f, v.sqrt()).log_prob(y).sum(1))
    close(blocks(KnownNoise().observed_curvature(f, packed), True), hessian(KnownNoise(), f, packed))
    many = normal(3, N, 2, seed=3)  # several outputs of an example
    for name in ("log_prob", "residual", "observed_curvature"):
        found = getattr(KnownNoise(), name)(many, packed.expand(3, N, 4))
        close(found[1], getattr(KnownNoise(), name)(many[1], packed))
    same = KnownNoise.pack(y, torch.full_like(y, 0.3))
    cov = torch.full_like(f, 0.4)
    for a, b in zip(
        take_expectations(KnownNoise(), f, cov, same), take_expectations(Gaussian(0.3), f, cov, y), strict=True
    ):
        close(a, b)


def test_sites_of_ordered_classes() -> None:
    likelihood = Sites(OBSERVED["ordinal"][0], (1, 3))
    f = normal(N, 3)
    y = OBSERVED["ordinal"][0].sample(f.reshape(-1, 1), torch.Generator().manual_seed(0)).view(N, 3)
    y[0, 1] = -100
    ignored = Sites(OBSERVED["ordinal"][0], (1, 3), ignore_index=-100)
    targets = ignored.targets(y, N, 3)
    close(blocks(ignored.observed_curvature(f, targets), True), hessian(ignored, f, targets))
    assert float(ignored.observed_curvature(f, targets)[0, 1]) == 0
    assert likelihood.log_prob(f, y.clamp(min=0)).shape == (N,)


def test_a_divergence_of_sites_is_the_sum_over_the_sites() -> None:
    sites, f, other = Sites(Categorical(), (3, 2)), normal(N, 6), normal(N, 6, seed=1)
    p, q = (x.view(N, 2, 3).softmax(2) for x in (f, other))
    close(sites.kl(f, other), (p * (p / q).log()).sum((1, 2)))


@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("weighted", [False, True])
def test_open_parameters_are_those_that_suit_the_sites_that_count(ignore_index: int | None, weighted: bool) -> None:
    f = normal(N, 3)
    y = torch.arange(3 * N).view(N, 3) % 4
    weight = 0.5 + torch.arange(N).double() % 3 if weighted else None
    each = torch.ones(N, 3).double() if weight is None else weight[:, None].expand(N, 3).clone()
    if ignore_index is not None:
        y[0, 1] = y[3, 2] = ignore_index
        each[0, 1] = each[3, 2] = 0.0
    sites = Sites(Ordinal(), (1, 3), ignore_index)
    assert sites.is_open
    found = sites.fitted(f, sites.targets(y, N, 3), weight)
    labels = y.clamp(min=0).reshape(-1)
    expected = Ordinal().fitted(f.reshape(-1, 1), labels, each.reshape(-1))
    assert isinstance(found.inner, Ordinal) and found.ignore_index == ignore_index
    close(found.inner.thresholds, expected.thresholds)


# Names and files.


@pytest.mark.parametrize("name", ["ordinal", "poisson", "negative-binomial", "weibull"])
def test_names(name: str) -> None:
    assert type(likelihood_for(name, torch.empty(0), (1,))) is type(OBSERVED[name][0])


@every
def test_a_likelihood_comes_back_from_what_a_file_holds(likelihood: Likelihood, c: int) -> None:
    found = describe_likelihood(likelihood)
    own = type(likelihood) if found["own"] else None
    f, y = problem(likelihood, c)
    close(restore_likelihood("file", found, own).log_prob(f, y), likelihood.log_prob(f, y))


def test_loading_a_likelihood_of_the_users() -> None:
    found = describe_likelihood(Robust(0.7))
    assert restore_likelihood("file", found, Robust).width == 0.7  # type: ignore[attr-defined]
    given = Robust(0.2)
    assert restore_likelihood("file", found, given) is given
    with pytest.raises(ValueError, match=r"fitted with Robust, a likelihood of your own.*likelihood=Robust\)"):
        restore_likelihood("file", found)
    with pytest.raises(ValueError, match="was fitted with the likelihood Robust; got likelihood=<class"):
        restore_likelihood("file", found, Together)
    with pytest.raises(ValueError, match="linnet's own Poisson; load it without likelihood="):
        restore_likelihood("file", describe_likelihood(Poisson()), Robust)

    class Closed(Likelihood):
        def __init__(self, needed: float) -> None: ...

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return f[:, 0]

    with pytest.raises(TypeError, match=r"Closed cannot be made from the settings of file.*settings\(\)"):
        restore_likelihood("file", describe_likelihood(Closed(1.0)), Closed)


# Bad input.


def test_likelihoods_of_users_that_cannot_serve() -> None:
    f, y = normal(3, 2), normal(3, 2, seed=1)

    class Convex(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return (y - f).square().sum(-1)

    class Coupled(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -(y - f).sum(-1).square()

    class Constant(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return torch.zeros(len(f))

    class Linear(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return (y * f).sum(-1)

    class CoupledConvex(Coupled):
        diagonal = False

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -super().log_prob(f, y)

    with pytest.raises(ValueError, match=r"Convex is not log-concave: minus the second derivative .* is -2"):
        Convex().observed_curvature(f, y)
    with pytest.raises(ValueError, match="is not log-concave"):
        CoupledConvex().observed_root(f, y)
    with pytest.raises(ValueError, match=r"Coupled says that its curvature is diagonal.*Set diagonal = False"):
        Coupled().observed_curvature(f, y)
    with pytest.raises(TypeError, match="log_prob must be made of torch functions of f"):
        Constant().residual(f, y)
    close(Linear().observed_curvature(f, y), torch.zeros_like(f))

    class Rounded(Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -0.5 * f[:, 0].square() + 0.5e-12 * f[:, 1].square()

    assert Rounded().observed_curvature(f, y).tolist() == [[1.0, 0.0]] * 3
    for name, call in (("mean", "mean"), ("Fisher information", "curvature"), ("variance", "variance")):
        with pytest.raises(NotImplementedError, match=f"Linear does not say what its {name} is"):
            getattr(Linear(), call)(f)
    with pytest.raises(NotImplementedError, match="how to draw targets"):
        Linear().sample(f)
    with pytest.raises(NotImplementedError, match="what its divergence is"):
        Linear().kl(f, f)


@pytest.mark.parametrize("law", [Poisson(), NegativeBinomial(0.5)])
def test_counts_that_are_none(law: Likelihood) -> None:
    for wrong in (-1.0, 0.5):
        with pytest.raises(ValueError, match=rf"needs counts, whole numbers .*; example 1 has \[{wrong}\]"):
            law.targets([[1.0], [wrong]], 2, 1)
    with pytest.raises(ValueError, match=r"targets that are finite; 2 of 3 .* the first is example 1: \[nan\]"):
        law.targets([[1.0], [math.nan], [math.inf]], 3, 1)


def test_ordered_labels_that_are_none() -> None:
    known = Ordinal([0.0, 1.0])
    with pytest.raises(ValueError, match=r"Label 3 of example 1 is outside 0 \.\. 2, the classes of Ordinal"):
        known.targets([0, 3], 2, 1)
    with pytest.raises(ValueError, match=r"Label -1 of example 0 is outside 0, 1, 2"):
        Ordinal().targets([-1, 3], 2, 1)
    with pytest.raises(TypeError, match="labels that are integers"):
        known.targets([0.0, 1.0], 2, 1)
    with pytest.raises(ValueError, match=r"a network with one output.*the network has 3"):
        known.targets([0, 1], 2, 3)
    with pytest.raises(ValueError, match=r"one label for each of the 2 examples, \(2,\); got \(3,\)"):
        known.targets([0, 1, 1], 2, 1)
    for wrong, message in (([1.0, 0.0], "must rise"), ([], "one fewer"), ([math.nan], "finite")):
        with pytest.raises(ValueError, match=message):
            Ordinal(wrong)


def test_times_that_are_none() -> None:
    law = Weibull(1.0)
    fields = np.array([(True, 2.0), (False, 3.0)], dtype=[("event", bool), ("time", float)])
    close(law.targets(fields, 2, 1), torch.tensor([[2.0, 1.0], [3.0, 0.0]]).double())
    with pytest.raises(ValueError, match=r"flags 1 .* or 0 .*; example 1 has 2\.0"):
        law.targets([[1.0, 1.0], [1.0, 2.0]], 2, 1)
    with pytest.raises(ValueError, match="times that are positive; example 0 has 0"):
        law.targets([[0.0, 1.0], [1.0, 1.0]], 2, 1)
    with pytest.raises(ValueError, match=r"targets of shape \(2, 2\).*got \(2,\). For times that all ended"):
        law.targets([1.0, 1.0], 2, 1)
    with pytest.raises(ValueError, match="one output, the logarithm of the time; the network has 2"):
        law.targets([[1.0, 1.0]], 1, 2)
    with pytest.raises(TypeError, match="one field of booleans"):
        law.targets(np.array([(1.0, 2.0)], dtype=[("event", float), ("time", float)]), 1, 1)
    for kind in (Weibull, NegativeBinomial):
        with pytest.raises(ValueError, match="positive"):
            kind(-1.0)


def test_weights_that_are_none() -> None:
    assert as_weights(None, 3) is None and as_weights(torch.ones(3), 3) is None
    with pytest.raises(ValueError, match=r"one weight for each of the 3 examples, shape \(3,\); got \(2,\)"):
        as_weights([1.0, 2.0], 3)
    with pytest.raises(ValueError, match="not negative; example 1 has -1"):
        as_weights([1.0, -1.0], 2)
    with pytest.raises(ValueError, match="finite and not negative; example 0 has nan"):
        as_weights([math.nan, 1.0], 2)
    with pytest.raises(ValueError, match="All 2 weights in sample_weight are zero"):
        as_weights([0, 0], 2)
    with pytest.raises(TypeError, match="sample_weight needs targets that are numbers"):
        as_weights(["a", "b"], 2)


def test_variances_that_are_none() -> None:
    assert as_variances([1.0, 2.0], 2, 3).shape == (2, 3)
    with pytest.raises(ValueError, match=r"noise for each of 2 observations needs shape \(2,\); got \(3,\)"):
        as_variances([1.0, 2.0, 3.0], 2, 1)
    with pytest.raises(ValueError, match=r"needs shape \(2,\) or \(2, 3\); got \(2, 2\)"):
        as_variances([[1.0, 2.0], [1.0, 2.0]], 2, 3)
    with pytest.raises(ValueError, match=r"positive and finite; observation 1 has \[0\.0\]"):
        as_variances([1.0, 0.0], 2, 1)
    with pytest.raises(ValueError, match="must be positive; that of 1 is not"):
        KnownNoise().targets([[0.0, 1.0], [0.0, 0.0]], 2, 1)
