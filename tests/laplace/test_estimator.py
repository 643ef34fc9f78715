"""The Laplace approximation of a network as it stands, against dense float64 references."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet import Laplace
from linnet.inference.mode.newton import function_space
from linnet.laplace import estimator
from linnet.laplace.estimator import LOOKED_AT
from linnet.laplace.search import Search, choose, choose_factor, find_largest_factor
from linnet.probability import Categorical, Gaussian, Likelihood
from tests.support.drawn import double, normal
from tests.support.laplace_cases import CASES, CLASSES, EXACT, NEW, NUMBERS, Dense, N, X, fitted, net
from tests.support.peak import peak_beside_result


@pytest.fixture(autouse=True)
def untrained() -> Iterator[None]:
    """The networks here are drawn, not trained, which is not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        yield


@pytest.mark.parametrize("structure", [*EXACT, "auto"])
@pytest.mark.parametrize("case", list(CASES))
def test_exact_structures_are_the_dense_posterior(case: str, structure: str) -> None:
    la, dense = fitted(case, structure)
    assert la.log_evidence() == pytest.approx(dense.log_evidence(), rel=1e-10)
    mean, cov = la.predict(NEW, return_cov=True)
    C = dense.covariance()
    f = dense.lin(NEW)
    if case == "log variances":
        rows = torch.arange(24).view(6, 4)[:, :2].flatten()
        f, C = f[:, :2], C[rows[:, None], rows]
    torch.testing.assert_close(mean, f[:, 0] if case == "one logit" else f, rtol=0, atol=0)
    torch.testing.assert_close(cov, C, rtol=1e-8, atol=1e-10)
    _, std = la.predict(NEW, return_std=True)
    torch.testing.assert_close(std.flatten(), C.diagonal().sqrt(), rtol=1e-8, atol=0)
    assert la.structure_ in EXACT


@pytest.mark.parametrize("prior", [2.0, {"0": 0.5, "2.weight": 1.5, "*": 0.1}, "unit"], ids=str)
def test_full_and_function_agree_for_every_fixed_prior(prior: Any) -> None:
    one, two = fitted("softmax", "full", prior, variance=1.0)[0], fitted("softmax", "function", prior, variance=1.0)[0]
    assert one.log_evidence() == pytest.approx(two.log_evidence(), rel=1e-10)
    torch.testing.assert_close(
        one.predict(NEW, return_cov=True)[1], two.predict(NEW, return_cov=True)[1], rtol=1e-8, atol=1e-11
    )
    assert one.effective_dimension_ == pytest.approx(two.effective_dimension_, rel=1e-8)


def approximation(la: Laplace, dense: Dense) -> Tensor:
    """What an approximate structure takes for G."""
    structure: Any = la._structure
    if la.structure_ == "diag":
        return torch.diag(dense.G.diagonal())
    if la.structure_ == "lowrank":
        values, vectors = torch.linalg.eigh(dense.G)
        return (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].T
    Q = structure.rotation.back(torch.eye(len(dense.G), dtype=torch.float64))
    if la.structure_ == "ekfac":
        return Q @ torch.diag((Q.T @ dense.G @ Q).diagonal()) @ Q.T
    return (Q * structure.values) @ Q.T


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "lowrank"])
@pytest.mark.parametrize("case", list(CASES))
def test_approximate_structures_are_posteriors_of_their_curvature(case: str, structure: str) -> None:
    la, dense = fitted(case, structure, rank=5)
    H = approximation(la, dense) + torch.diag(1 / dense.S)
    assert la.log_evidence() == pytest.approx(dense.log_evidence(H), rel=1e-8)
    if case == "log variances":
        return
    C = dense.covariance(H)
    torch.testing.assert_close(la.predict(NEW, return_cov=True)[1], C, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.predict(NEW, return_std=True)[1].flatten(), C.diagonal().sqrt(), rtol=1e-7, atol=0)
    sample = la.sample(NEW, 4000).reshape(4000, -1)
    seen = (sample - la.predict(NEW).reshape(1, -1)).T @ (sample - la.predict(NEW).reshape(1, -1)) / 4000
    scale = C.diagonal().sqrt()
    assert float(((seen - C) / scale[:, None] / scale).abs().max()) < 0.12


@pytest.mark.parametrize("structure", ["full", "subnetwork"])
def test_a_precision_that_rounding_would_decide_is_refused(structure: str) -> None:
    fitted("numbers", structure, 1e10)
    with pytest.raises(ArithmeticError, match="and float64 needs 2e-15 of it for numbers to be right"):
        fitted("numbers", structure, 1e14)


@pytest.mark.parametrize("step", ["fit", "tune"])
def test_weights_that_change_during_a_search_are_noticed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = net(3), estimator.laplace_search.choose
    la = Laplace(model, structure="diag")
    if step == "tune":
        la.fit(X, CLASSES)

    def choose(*args: Any, **options: Any) -> Any:
        model[0].weight.data.add_(1.0)  # type: ignore[index]
        return real(*args, **options)

    monkeypatch.setattr(estimator.laplace_search, "choose", choose)
    with pytest.raises(RuntimeError, match=r"'0\.weight' has changed since the model was linearized"):
        _ = la.tune() if step == "tune" else la.fit(X, CLASSES)


def test_low_rank_of_full_rank_is_exact() -> None:
    la, dense = fitted("softmax", "lowrank", rank=1000)
    assert la.log_evidence() == pytest.approx(dense.log_evidence(), rel=1e-6)
    torch.testing.assert_close(la.predict(NEW, return_cov=True)[1], dense.covariance(), rtol=1e-5, atol=1e-6)


def test_a_subnetwork_is_the_exact_posterior_over_the_least_certain_parameters() -> None:
    la, dense = fitted("softmax", "subnetwork", size=7)
    marginal = 1 / (dense.G.diagonal() + 1 / dense.S)
    index = marginal.topk(7).indices.sort().values
    assert torch.equal(la._structure.index, index)  # type: ignore[attr-defined]
    new = dense.lin.jacobian(NEW).dense()[:, index]
    H = dense.G[index[:, None], index] + torch.diag(1 / dense.S[index])
    torch.testing.assert_close(
        la.predict(NEW, return_cov=True)[1], new @ torch.linalg.inv(H) @ new.T, rtol=1e-8, atol=1e-11
    )
    value = (
        dense.likelihood.log_prob(dense.f, dense.y).sum()
        - 0.5 * (dense.theta[index].square() / dense.S[index]).sum()
        - 0.5 * dense.S[index].log().sum()
        - 0.5 * torch.logdet(H)
    )
    assert la.log_evidence() == pytest.approx(float(value), rel=1e-10)
    everything = fitted("softmax", "subnetwork", size=10**6)[0]
    assert everything.log_evidence() == pytest.approx(dense.log_evidence(), rel=1e-10)
    Z = la.posterior_.draw(3, generator=torch.Generator().manual_seed(0))
    assert int((Z != 0).any(1).sum()) == 7


def test_samples_estimate_the_exact_posterior() -> None:
    la, dense = fitted("softmax", "samples", samples=512, tolerance=1e-6)
    variance = la.predict(NEW, return_std=True)[1].square().flatten()
    exact = dense.covariance().diagonal()
    assert float(((variance - exact) / exact).abs().max()) < 4 * math.sqrt(2 / 512)
    assert la.log_evidence() == pytest.approx(dense.log_evidence(), abs=0.5)
    assert la.sample(NEW, 512).shape == (512, 6, 3)
    with pytest.raises(ValueError, match="holds 512 samples; 600 were asked for"):
        la.sample(NEW, 600)
    assert math.isfinite(la.joint_log_likelihood(X, CLASSES, 2))


@pytest.mark.parametrize("prior", ["shared", "layerwise"])
def test_samples_are_tuned_by_both_methods(prior: Any) -> None:
    exact, _ = fitted("numbers", "full", prior, variance=1.0, noise="evidence")
    la, _ = fitted("numbers", "samples", prior, variance=1.0, noise="evidence", samples=512, tolerance=1e-5)
    found = [(dict(la.scales_), la.noise_)]
    la.tune()
    found.append((dict(la.scales_), la.noise_))
    for scales, noise in found:  # by MacKay when fitted, then by the gradient
        assert noise == pytest.approx(exact.noise_, rel=0.1)
        for name, scale in scales.items():
            assert scale == pytest.approx(exact.scales_[name], rel=0.25)
    with pytest.raises(ArithmeticError, match="not settled after 1 steps"):
        la.tune(steps=1)


def test_the_last_layer_alone() -> None:
    la, _ = fitted("softmax", "full", params="2.*")
    assert la.lin_.p == 18
    all_, _ = fitted("softmax", "full")
    less, more = la.predict(NEW, return_std=True)[1], all_.predict(NEW, return_std=True)[1]
    assert bool((less < more).all())


@given(st.integers(1, 12), st.sampled_from(["full", "kron", "diag", "function"]))
@settings(max_examples=8, deadline=None)
def test_more_data_never_raises_the_variance(n: int, structure: Any) -> None:
    model = net(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stds = [
            Laplace(model, "regression", structure, 1.0, noise=0.1).fit(X[:m], NUMBERS[:m]).predict(NEW, True)[1]
            for m in (n, 2 * n)
        ]
    # A mean over examples stands on one side of a Kronecker product, so that only exact ones are ordered.
    if structure != "kron":
        assert bool((stds[1] <= stds[0] * (1 + 1e-9)).all())
    prior = (linnet.linearize(model).jacobian(NEW).gram_diag().view(6, 2)).sqrt()
    assert bool((stds[1] <= prior * (1 + 1e-9)).all())


# The evidence.


@pytest.mark.parametrize("structure", ["full", "function", "diag", "kron", "ekfac", "lowrank", "subnetwork"])
@pytest.mark.parametrize("prior", ["shared", "layerwise"])
def test_the_gradient_of_the_evidence_is_its_finite_difference(structure: Any, prior: str) -> None:
    la, _ = fitted("numbers", structure, rank=6, size=9)
    from linnet.probability import make_prior

    found = make_prior(la.lin_, prior)
    evidence = la._evidence("network", found, la._structure.log_det(found))
    scales, noise, step = [0.4, 1.7][: max(1, len(found.scales))], 0.6, 1e-4
    terms = evidence(scales, noise)
    for i in range(len(scales)):
        moved = [[s * math.exp(sign * step * (i == j)) for j, s in enumerate(scales)] for sign in (1, -1)]
        slope = (evidence(moved[0], noise).value - evidence(moved[1], noise).value) / (2 * step)
        assert terms.slopes[i].value == pytest.approx(slope, rel=1e-5)
    slope = (
        (evidence(scales, noise * math.exp(step)).value - evidence(scales, noise * math.exp(-step)).value) / 2 / step
    )
    assert terms.noise_slope().value == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("structure", ["full", "function", "kron", "diag"])
@pytest.mark.parametrize("prior", ["shared", "layerwise", "ntk", "balanced"])
def test_both_ways_to_tune_find_the_same_maximum(structure: Any, prior: Any) -> None:
    la, _ = fitted("numbers", structure, prior, variance=1.0, noise="evidence")
    first = la.tune(narrow=False).log_evidence()
    assert la.tune_path_[-1].log_evidence == pytest.approx(first, rel=1e-9)
    by_gradient = (dict(la.scales_), la.noise_)
    la.tune(method="mackay", steps=5000, narrow=False)
    assert la.log_evidence() == pytest.approx(first, rel=1e-7)
    for name, scale in la.scales_.items():
        assert scale == pytest.approx(by_gradient[0][name], rel=2e-3)
    assert la.noise_ == pytest.approx(by_gradient[1], rel=1e-3)
    for factor in (0.7, 1.4):
        moved = {name: s * factor for name, s in la.scales_.items()}
        assert la._evidence("network", la._prior, la._log_det)(list(moved.values()), la._noise).value < first
    # MacKay's equations hold there.
    theta = la.lin_.layout.flatten(la.lin_.theta)
    gamma = la.effective_dimension_
    assert float((theta.square() / la.prior_variance_).sum()) == pytest.approx(gamma, rel=1e-3)
    r = NUMBERS - la.predict(X)
    assert la.noise_ == pytest.approx(float(r.square().sum()) / (r.numel() - gamma), rel=1e-3)


UNCORRELATED = ["kron", "ekfac", "diag"]


@pytest.mark.parametrize("structure", UNCORRELATED)
@pytest.mark.parametrize("prior", ["shared", "layerwise", 0.7])
def test_the_noise_of_structures_without_correlations_is_bounded(structure: Any, prior: Any) -> None:
    la, _ = fitted("numbers", structure, prior, variance=1.0, noise="evidence")
    dense = Dense(net(2), Gaussian(1.0), NUMBERS, 1.0)
    G, rows = approximation(la, dense), 2 * N
    error = float((NUMBERS - la.predict(X)).square().sum()) / rows

    def dimension() -> float:
        """tr G (G + noise / S)^-1, of what the structure takes for G."""
        H = G + torch.diag(la.noise_ / la.prior_variance_)
        return float(torch.linalg.solve(H, G).trace())

    assert la.noise_ == pytest.approx(error * (1 + dimension() / rows), rel=1e-7)
    assert la.effective_dimension_ == pytest.approx(dimension(), rel=1e-9)
    assert la.tune_path_[-1].log_evidence == pytest.approx(la.log_evidence(), rel=1e-9)
    first = la.tune().noise_  # a variance now has its common factor
    at = la.log_evidence()
    assert la.tune(noise=False).log_evidence() == pytest.approx(at, rel=1e-9)  # the best prior at that noise
    assert float((dense.theta.square() / la.prior_variance_).sum()) == pytest.approx(dimension(), rel=1e-3)
    la.tune(method="mackay", steps=5000)
    assert la.noise_ == pytest.approx(first, rel=1e-4)
    assert la.noise_ == pytest.approx(error * (1 + dimension() / rows), rel=1e-6)
    la.tune(narrow=False)
    assert la.log_evidence() > at and la.noise_ > first
    assert la.noise_ == pytest.approx(error * rows / (rows - dimension()), rel=1e-3)
    evidence = la._evidence("network", la._prior, la._log_det)
    with pytest.raises(ArithmeticError, match=r"were not settled after 1 steps: .* use narrow=False"):
        search = Search(False, True, steps=1, bounded=True)
        choose(evidence, search, scales=la._scales, noise=la._noise, cost="little")


@given(st.floats(-4, 4), st.sampled_from(["ekfac", "diag"]))
@settings(max_examples=10, deadline=None)
def test_leaving_correlations_out_never_lowers_the_effective_dimension(log_prior: float, structure: Any) -> None:
    prior = 10.0**log_prior
    assert fitted("numbers", structure, prior)[0].effective_dimension_ >= (
        fitted("numbers", "full", prior)[0].effective_dimension_ * (1 - 1e-9)
    )


@pytest.mark.parametrize("steps", [100, 400])
def test_the_bounded_noise_is_close_to_that_of_the_exact_evidence(steps: int) -> None:
    """Closer than the training error and than the largest evidence, of networks that fit well or too well."""
    x, new = normal(60, 3, seed=3), normal(300, 3, seed=5)
    y, at_new = (t[:, 0].sin() + t[:, 1] * t[:, 2] / 2 + 0.3 * normal(len(t), seed=4) for t in (x, new))
    model = double(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)), 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    exact = Laplace(model, "regression", "full").fit(x, y)
    error = float((exact.predict(x) - y).square().mean())

    def apart(noise: float) -> float:
        return abs(math.log(noise / exact.noise_))

    def nll(la: Laplace) -> float:
        mean, std = la.predict(new, return_std=True, noise=True)
        return -float(torch.distributions.Normal(mean, std).log_prob(at_new).mean())

    for structure in UNCORRELATED:
        la = Laplace(model, "regression", structure).fit(x, y)  # type: ignore[arg-type]
        assert error < la.noise_
        if steps == 400:  # the training error is no noise of a network that fits too well
            naive = Laplace(model, "regression", structure, noise=error).fit(x, y)  # type: ignore[arg-type]
            assert nll(la) < nll(naive) - 2
        bounded = apart(la.noise_)
        assert la.effective_dimension_ > exact.effective_dimension_
        assert bounded < apart(error)
        assert 3 * bounded < apart(la.tune(narrow=False).noise_)


def test_the_best_noise_counts_where_another_was_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = NUMBERS + torch.tensor([0.1, 0.6]) * normal(N, 2, seed=8)

    def tuned() -> Laplace:
        return Laplace(net(2), "regression", "full", "shared", noise="per-output").fit(X, targets).tune(narrow=False)

    plain, search = tuned(), estimator.maximize

    def go_on(objective: Any, *given: Any, **options: Any) -> Any:
        found = search(objective, *given, **options)
        objective([t + 1 for t in found.x])
        return found

    monkeypatch.setattr(estimator, "maximize", go_on)
    found = tuned()
    torch.testing.assert_close(found.noise_, plain.noise_, rtol=1e-9, atol=0)
    assert found.log_evidence() == pytest.approx(plain.log_evidence(), rel=1e-9)
    for mine, other in zip(found.predict(NEW, return_std=True), plain.predict(NEW, return_std=True), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["full", "function"])
def test_noise_for_each_output_maximizes_the_evidence(structure: Any) -> None:
    targets = NUMBERS + torch.tensor([0.1, 0.6]) * normal(N, 2, seed=8)
    model = net(2)
    la = Laplace(model, "regression", structure, "shared", noise="per-output").fit(X, targets).tune(narrow=False)
    assert la.noise_.shape == (2,)
    found = [la.scales_["all"], *la.noise_.tolist()]

    def value(hyper: list[float]) -> float:
        noise = torch.tensor(hyper[1:], dtype=torch.float64)
        return Dense(model, Gaussian(noise), targets, hyper[0]).log_evidence()

    best = value(found)
    assert la.log_evidence() == pytest.approx(best, rel=1e-7)
    for i in range(3):
        step = 1e-3
        up, down = ([x * math.exp(s * step * (i == j)) for j, x in enumerate(found)] for s in (1, -1))
        assert abs(value(up) - value(down)) / (2 * step) < 2e-3
    again = la.log_evidence()
    assert la.tune(narrow=False).log_evidence() == pytest.approx(again, rel=1e-7)
    assert len(la.tune_path_) > 2
    approximate = Laplace(model, "regression", "kron", "shared", noise="per-output").fit(X, targets)
    variances = approximate.predict(X, return_std=True)[1].square()
    error, noise = (targets - approximate.predict(X)).square().mean(0), torch.tensor(approximate.noise_)
    torch.testing.assert_close(noise, error * (1 + (variances / noise).mean(0)), rtol=1e-5, atol=0)
    assert approximate.predict(NEW, return_std=True, noise=True)[1].shape == (6, 2)
    with pytest.raises(NotImplementedError, match="at the network only"):
        la.tune(at="linear_mode", method="mackay")
    la._noise = 3.0
    la._refresh()
    with pytest.raises(ArithmeticError, match="was not settled after 1 steps"):
        la._by_output(Search(False, True, steps=1))


def test_a_fixed_prior_is_tuned_by_a_common_factor() -> None:
    la, _ = fitted("softmax", "full", {"0": 1.0, "2": 4.0}, variance=1.0)
    before = la.log_evidence()
    la.tune()
    assert la.log_evidence() >= before
    S = la.prior_variance_
    assert float(S[-1] / S[0]) == pytest.approx(4.0)
    assert la.scales_.keys() == {"all"}
    assert la.tune("layerwise").log_evidence() >= before
    assert la.log_evidence(prior={"0": 1.0, "2": 4.0}) == pytest.approx(before, rel=1e-12)


def test_the_evidence_at_other_priors_and_noise() -> None:
    la, _ = fitted("numbers", "function")
    for prior, noise in ((0.2, 0.05), (3.0, 0.3)):
        other = Laplace(net(2), "regression", "full", prior, noise=noise).fit(X, NUMBERS)
        assert la.log_evidence(prior=prior, noise=noise) == pytest.approx(other.log_evidence(), rel=1e-9)
    with pytest.raises(ValueError, match=r"without open scales; 'shared' has 1"):
        la.log_evidence(prior="shared")
    with pytest.raises(ValueError, match="regression with one noise"):
        fitted("softmax", "full")[0].log_evidence(noise=0.1)


def test_the_evidence_at_the_linear_mode_is_the_linear_models_own() -> None:
    la, dense = fitted("numbers", "full")
    m = (dense.f.flatten() - dense.J @ dense.theta)[:, None]
    Sigma = (dense.J * dense.S) @ dense.J.T + 0.3 * torch.eye(2 * N, dtype=torch.float64)
    r = NUMBERS.flatten()[:, None] - m
    exact = -0.5 * float(r.T @ torch.linalg.solve(Sigma, r) + torch.logdet(Sigma) + 2 * N * math.log(2 * math.pi))
    assert la.log_evidence("linear_mode") == pytest.approx(exact, rel=1e-9)
    assert la.log_evidence("linear_mode") > la.log_evidence("network")
    assert fitted("numbers", "function")[0].log_evidence("linear_mode") == pytest.approx(exact, rel=1e-9)


def test_the_linear_mode_of_a_classifier_is_that_of_the_tangent_door() -> None:
    la, dense = fitted("softmax", "full")
    m = dense.f - (dense.J @ dense.theta).view_as(dense.f)
    K = (dense.J * dense.S) @ dense.J.T
    mode = function_space(K, CLASSES, mean=m, likelihood=Categorical(), tolerance=1e-9)
    assert la.log_evidence("linear_mode") == pytest.approx(mode.log_evidence, rel=1e-9)
    # An approximate structure replaces the determinant, at the curvature of that mode.
    diagonal, _ = fitted("softmax", "diag")
    B = Categorical().curvature(mode.f)
    G = torch.einsum("nap,nab,nbp->p", dense.J.view(N, 3, -1), B, dense.J.view(N, 3, -1))
    value = -mode.objective - 0.5 * float((1 + dense.S * G).log().sum())
    assert diagonal.log_evidence("linear_mode") == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_bounded_noise_at_the_linear_mode(structure: Any) -> None:
    la, _ = fitted("numbers", structure, "shared", variance=1.0, noise="evidence")
    la.tune(at="linear_mode")
    terms = la._evidence("linear_mode", la._prior, la._log_det)(la._scales, la._noise)
    assert terms.energy == pytest.approx(terms.rows / (1 + sum(terms.gamma) / terms.rows), rel=2e-3)
    assert terms.slopes[0].value == pytest.approx(0, abs=1e-2)


def test_tuning_at_the_linear_mode() -> None:
    la, _ = fitted("numbers", "full", "shared", variance=1.0)
    before = la.log_evidence("linear_mode")
    la.tune(at="linear_mode", method="mackay", noise=False)
    assert la.log_evidence("linear_mode") > before
    assert la.tune_path_[-1].log_evidence == pytest.approx(la.log_evidence("linear_mode"), rel=1e-6)
    found = la.scales_["all"]
    la.tune(at="linear_mode", noise=False)
    assert la.scales_["all"] == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("prior", ["shared", "layerwise"])
def test_tuning_a_classifier_at_the_linear_mode(prior: Any) -> None:
    la, _ = fitted("softmax", "function")
    before = la.log_evidence("linear_mode")
    la.tune(prior, at="linear_mode", narrow=False)
    best = la.log_evidence("linear_mode")
    assert best > before
    evidence = la._evidence("linear_mode", la._prior, la._log_det)
    for i in range(len(la._scales)):
        scales, step = [0.4, 1.7][: len(la._scales)], 1e-4
        moved = [[s * math.exp(sign * step * (i == j)) for j, s in enumerate(scales)] for sign in (1, -1)]
        slope = (evidence(moved[0], 1.0).value - evidence(moved[1], 1.0).value) / (2 * step)
        assert evidence(scales, 1.0).slopes[i].value == pytest.approx(slope, rel=1e-5)
        assert evidence([s * (1.3 if i == j else 1) for j, s in enumerate(la._scales)], 1.0).value < best + 1e-7
    la.tune(prior, at="linear_mode", method="mackay", narrow=False)  # which leaves out that the curvature moves
    assert best - 3 < la.log_evidence("linear_mode") < best + 1e-6
    with pytest.raises(NotImplementedError, match="Use method='mackay'"):
        fitted("softmax", "kron")[0].tune(at="linear_mode")
    approximate = fitted("softmax", "kron")[0].tune(at="linear_mode", method="mackay")
    assert len(approximate.tune_path_) > 1


def normalized(k: float) -> nn.Module:
    """A network whose first layer is normalized; its weights times k make no difference to the function."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    model.train()(X)
    model.eval()
    with torch.no_grad():
        model[0].weight *= k
        model[0].bias *= k
        model[1].running_mean *= k
        model[1].running_var *= k**2
        model[1].eps *= k**2
    return model


@pytest.mark.parametrize("at", ["network", "linear_mode"])
def test_scaling_a_normalized_layer_changes_no_layerwise_choice(at: Any) -> None:
    found = []
    for k in (1.0, 7.0):
        model = normalized(k)
        la = Laplace(model, "regression", "full", 1.0, noise=0.1).fit(X, NUMBERS)
        fixed = la.log_evidence(at)
        la.tune("layerwise", noise=False, method="gradient", at=at)
        found.append((fixed, la.log_evidence(at), la.predict(NEW, return_std=True)[1], la.scales_["0"]))
    one, two = found
    assert abs(one[0] - two[0]) > 1  # what a fixed prior thinks of it
    assert two[1] == pytest.approx(one[1], rel=1e-6)
    torch.testing.assert_close(two[2], one[2], rtol=1e-3, atol=0)
    assert two[3] == pytest.approx(49 * one[3], rel=1e-2)


def test_a_layer_that_the_data_do_not_reach_keeps_its_scale() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) * 0

    la = Laplace(double(Two()), "regression", "full", "layerwise").fit(X, NUMBERS)
    assert la.scales_["b"] == 1.0
    assert la.scales_["a"] != 1.0
    assert la.tune(method="mackay").scales_["b"] == 1.0


@pytest.mark.parametrize("case", ["softmax", "one logit", "labels", "numbers", "log variances"])
def test_held_out_data_settle_the_size(case: str) -> None:
    y = CASES[case][3]
    la, _ = fitted(case, "kron", "shared", variance=1.0)
    la.tune(validation=(X, y))
    best, n = la.scales_["all"], len(la.tune_path_)
    assert n > 1
    assert la.log_evidence() == pytest.approx(la.tune_path_[-1].log_evidence, rel=1e-9)

    def score(scale: float) -> float:
        model = net(CASES[case][0])
        noise = {"noise": la.noise_} if case == "numbers" else {}
        at = Laplace(model, CASES[case][1], "kron", scale, **noise).fit(X, y)
        if case in ("numbers", "log variances"):
            mean, std = at.predict(X, return_std=True, noise=True)
            return float(torch.distributions.Normal(mean, std).log_prob(y).sum())
        p = at.predict_proba(X)
        if case == "labels":
            return float((y * p.log() + (1 - y) * (1 - p).log()).sum())
        return float(p.gather(1, y[:, None]).log().sum())

    # A network that is sure and wrong wants all the variance it can have.
    edge = best / la.tune_path_[-2].scales[0] > 990
    factors = (0.5, 0.8) if edge else (0.5, 0.8, 1.25, 2.0)
    assert score(best) >= max(score(best * factor) for factor in factors) - 1e-3


def digits_case(kind: str, n: int) -> tuple[nn.Module, list[Tensor]]:
    """A network trained on n digits until it is sure of all of them; training, held-out and test data."""
    found = load_digits()
    pixels, labels = torch.tensor(found.data / 16), torch.tensor(found.target)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    parts = order[:n], order[n : n + 200], order[-300:]
    torch.manual_seed(0)  # weights as torch draws them, which is what the size of a prior is about
    if kind == "mlp":
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    else:
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        layers = [nn.Unflatten(1, (1, 8, 8)), first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[parts[0]]), labels[parts[0]]).backward()
        optimizer.step()
    return model, [t for part in parts for t in (pixels[part], labels[part])]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_digits_are_no_worse_for_error_bars(kind: str) -> None:
    """The default prior costs next to nothing on training and on test labels, where the evidence alone costs much.

    With held-out digits it is no worse than the network where the size is chosen, to the step of the search.
    """
    model, (X_train, y_train, X_held, y_held, X_test, y_test) = digits_case(kind, 60)
    la = Laplace(model).fit(X_train, y_train)
    assert la.structure_ == "function"
    assert la.narrowed_ < 1
    assert la.tune_path_[-1].scales[0] == pytest.approx(la.narrowed_ * la.tune_path_[-2].scales[0])
    assert la.largest_evidence_ == la.tune_path_[-2].log_evidence > la.log_evidence()

    def nll(p: Tensor, y: Tensor) -> float:
        return float(-p.gather(1, y[:, None]).log().mean())

    def network(inputs: Tensor) -> Tensor:
        return model(inputs).softmax(1).detach()

    alone, scale = nll(network(X_test), y_test), la.scales_["all"]
    la.tune()
    assert la.scales_["all"] == pytest.approx(scale, rel=0.1)
    spared = nll(la.predict_proba(X_train), y_train) - nll(network(X_train), y_train)
    each = -network(X_train).gather(1, y_train[:, None]).log()
    assert 0 < spared <= max(0.005, float(each.std(correction=0)) / 60**0.5) + 1e-9
    assert nll(la.predict_proba(X_test), y_test) < alone + 0.01
    with pytest.warns(UserWarning, match="error bars too wide .* on 60 training examples .* by the network and"):
        la.tune(narrow=False)
    assert la.narrowed_ == 1
    assert nll(la.predict_proba(X_test), y_test) > alone + 0.2
    la.tune(validation=(X_held, y_held))  # silent now
    assert la.narrowed_ == 1
    assert nll(la.predict_proba(X_held), y_held) <= nll(network(X_held), y_held) + 1e-6


@given(st.floats(-9, 2), st.floats(0.5, 2.0), st.floats(-3, 1))
@settings(max_examples=40, deadline=None)
def test_the_largest_factor_is_within_the_limit_and_hardly_less(log_a: float, power: float, log_limit: float) -> None:
    a, limit, asked = 10.0**-log_a, 10.0**log_limit, []

    def cost(factor: float) -> float:
        asked.append(factor)
        return a * factor**power / (1 + factor**power)

    found = find_largest_factor(cost, limit)
    assert found <= 1 and len(asked) < 40
    assert cost(found) <= limit
    assert found == 1 or cost(min(1.0, found * 10**0.06)) > 0.89 * limit


def test_a_cost_that_does_not_go_away_is_said() -> None:
    with pytest.raises(ArithmeticError, match="costs 3 nats a training label"):
        find_largest_factor(lambda factor: 3.0, 0.1)


def test_a_prior_that_labels_bear_stays_as_the_evidence_has_it() -> None:
    x = normal(200, 2, seed=3)
    y = (x[:, 0] + 0.7 * normal(200, seed=4) > 0).long()  # classes that overlap: the network is not sure of them
    model = double(nn.Linear(2, 2), 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(x), y, reduction="sum")
        value.backward()
        return value

    optimizer.step(loss)
    la = Laplace(model).fit(x, y)
    assert la.narrowed_ == 1
    assert la.tune(narrow=False).scales_["all"] == pytest.approx(la.tune().scales_["all"], rel=1e-6)


# Data, and what is refused.


def test_datasets_and_loaders() -> None:
    model = net(3)
    la = Laplace(model, prior=0.7).fit(X, CLASSES)
    data = TensorDataset(X, CLASSES)
    for given_data in (data, DataLoader(data, batch_size=7)):
        other = Laplace(model, prior=0.7).fit(given_data)
        assert other.log_evidence() == pytest.approx(la.log_evidence(), rel=1e-10)
    with pytest.raises(ValueError, match="drop_last"):
        Laplace(model, prior=0.7).fit(DataLoader(data, batch_size=7, drop_last=True))


def test_a_network_far_from_a_mode_is_told_how_far() -> None:
    model = double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), 2)
    many = normal(300, 3, seed=7)
    labels = (many[:, 0] > 0).long() + (many[:, 1] > 0.5).long()
    with pytest.warns(UserWarning, match=r"gradient of log p\(y \| f\) has norm .* times what noise"):
        far = Laplace(model, prior=1.0, structure="kron").fit(many, labels)
    assert far.gradient_ratio_ > 3
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters()) / 2
        value = nn.functional.cross_entropy(model(many), labels, reduction="sum") + penalty
        value.backward()
        return value

    optimizer.step(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = Laplace(model, prior=1.0, structure="kron").fit(many, labels)
    assert near.gradient_ratio_ < 1
    assert near.gradient_norm_ < 1e-2 < far.gradient_norm_


class Bent(Likelihood):
    """A likelihood whose curvature is not positive semi-definite."""

    def targets(self, y: Any, n: int, c: int, **_: Any) -> Tensor:
        return torch.as_tensor(y, dtype=torch.float64).view(n, c)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -(f - y).square().sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return 2 * (y - f)

    def curvature(self, f: Tensor) -> Tensor:
        return -torch.ones_like(f)

    def root(self, f: Tensor) -> Tensor:
        return torch.ones_like(f)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return (f - other).square().sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return f


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"structure": "dense"}, ValueError, r"structure must be one of 'auto', 'full'.*got 'dense'"),
        ({"likelihood": "gamma"}, ValueError, r"likelihood must be one of 'classification'.*got 'gamma'"),
        ({"prior": -1.0}, ValueError, "prior is a variance and must be a positive number"),
        ({"prior": "flat"}, ValueError, "prior must be one of"),
        ({"noise": 0.1}, ValueError, "noise= belongs to likelihood='regression'"),
        (
            {"likelihood": "regression", "noise": "some"},
            ValueError,
            "noise must be 'evidence', 'per-output' or",
        ),
        ({"likelihood": "regression", "noise": -1.0}, ValueError, "must be positive and finite"),
        ({"rank": 0}, ValueError, "rank must be a positive number; got 0"),
        ({"size": -3}, ValueError, "size must be a positive number"),
        ({"draws": 0}, ValueError, "draws must be .auto., None or a positive number"),
        ({"dtype": "half"}, ValueError, "dtype must be 'auto', 'float32' or 'float64'"),
        ({"likelihood": Bent()}, ValueError, "not positive semi-definite"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], kind: type[Exception], match: str) -> None:
    y = torch.zeros(N, 3) if options.get("likelihood") not in (None, "classification") else CLASSES
    with pytest.raises(kind, match=match):
        Laplace(net(3), **{"prior": 1.0, **options}).fit(X, y)


METHODS = ("targets", "log_prob", "residual", "curvature", "root", "mean", "kl", "sample")


def test_bad_data_is_refused() -> None:
    model = net(3)
    bad = X.clone()
    bad[4, 1] = math.nan
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        Laplace(model, prior=1.0).fit(bad, CLASSES)
    with pytest.raises(ValueError, match=r"Label 3 of example 0 is outside 0 \.\. 2"):
        Laplace(model, prior=1.0).fit(X, torch.full((N,), 3))
    with pytest.raises(ValueError, match="24 examples and 5 targets"):
        Laplace(model, prior=1.0).fit(X, CLASSES[:5])
    la = Laplace(model, prior=1.0).fit(X, CLASSES)
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        la.predict(bad)
    with pytest.raises(ValueError, match="return_std or return_cov"):
        la.predict(X, return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="k is a number of samples"):
        la.sample(X, 0)
    own = {name: (lambda self, *a, name=name, **k: getattr(Categorical(), name)(*a, **k)) for name in METHODS}
    unknown = type("Own", (Likelihood,), {"diagonal": False, **own})()  # classes have a formula, others have blocks
    with pytest.raises(MemoryError, match=r"24 examples with 3 outputs takes .* with draws=1"):
        Laplace(model, unknown, structure="kron", prior=1.0, memory=4000, batch_size=24).fit(X, CLASSES)
    with pytest.raises(ValueError, match="at must be"):
        la.log_evidence("mode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="method must be"):
        la.tune(method="newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no noise variance"):
        la.tune(noise=True)
    with pytest.raises(ArithmeticError, match="not settled after 2 steps"):
        la.tune(method="mackay", steps=2)
    with pytest.raises(NotImplementedError, match="at='network'"):
        fitted("softmax", "subnetwork", size=4)[0].log_evidence("linear_mode")
    with pytest.raises(Exception, match="not fitted"):
        Laplace(model).predict(X)


def test_targets_that_equal_the_outputs_leave_the_noise_open() -> None:
    model = net(2)
    with pytest.raises(ValueError, match="equal the network's outputs exactly"):
        Laplace(model, "regression").fit(X, linnet.linearize(model)(X))


def test_the_module_is_left_alone_and_watched() -> None:
    model = net(3)
    before = copy.deepcopy(model.state_dict())
    la = Laplace(model, structure="kron", prior=1.0).fit(X, CLASSES)
    la.predict_proba(NEW)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(RuntimeError, match="changed"):
        la.predict(NEW)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_first_pass_gives_what_passes_of_their_own_give(case: str, structure: str) -> None:
    """Outputs, curvature and gradient come from one pass; the references are separate passes and the dense gradient."""
    la, _ = fitted(case, structure, variance=0.7)
    J = la._J
    torch.testing.assert_close(la._f, J.outputs(), rtol=1e-12, atol=1e-12)
    other = la._fitted(la._unit.root(la._f))
    torch.testing.assert_close(la._structure.values, other.values, rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined]
    residual = la.likelihood_.residual(la._f, la._y).flatten()
    theta = la.lin_.layout.flatten(la.lin_.theta)
    g = J.dense().T @ residual - theta / la.prior_variance_
    assert la.gradient_norm_ == pytest.approx(float(g.norm()), rel=1e-9)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full"])
def test_variances_of_many_priors_come_from_one_pass(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each output gives, for any factor of the prior variances, the variances of that posterior."""
    la, _ = fitted("softmax", structure)
    J, S, t = la.lin_.jacobian(NEW), la.prior_variance_, 1 / la._noise
    variance = la._structure.variance_by_factor(J, S, t)
    if structure != "full":
        monkeypatch.setattr(linnet.Jacobian, "grouped_squares", None)  # the pass has been made
    for factor in (1e-6, 1e-3, 0.3, 1.0, 40.0, 1e6):
        exact = la._structure.posterior(factor * S, t).variance(J)
        torch.testing.assert_close(variance(factor), exact, rtol=1e-9 if structure == "full" else 4e-5, atol=0)


def test_outputs_that_are_not_finite_are_named_in_the_first_pass() -> None:
    model = net(3)
    with torch.no_grad():
        model[-1].bias.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"(?i)finite"):
        Laplace(model, structure="kron", prior=1.0).fit(X, CLASSES)


def test_float32_is_close() -> None:
    model = net(3)
    exact = Laplace(model, structure="kron", prior=0.7).fit(X, CLASSES)
    for structure in ("kron", "diag", "full"):
        one = Laplace(copy.deepcopy(model).float(), structure=structure, prior=0.7, dtype="float32")
        one.fit(X.float(), CLASSES)
        assert (one.lin_.model_dtype, one.predict(NEW.float()).dtype) == (torch.float32, torch.float64)
        assert math.isfinite(one.log_evidence())
        if structure == "kron":
            assert one.log_evidence() == pytest.approx(exact.log_evidence(), rel=1e-5)


@pytest.mark.parametrize("t", [-7.6, -3.3, 0.0, 0.45, 2.8])
def test_the_best_factor_is_found_between_the_decades(t: float) -> None:
    found = choose_factor(lambda factor: -((math.log10(factor) - t) ** 2))
    assert math.log10(found) == pytest.approx(t, abs=0.05)


def test_the_best_factor_stays_between_its_ends() -> None:
    assert choose_factor(lambda factor: factor) == pytest.approx(1e3)
    assert choose_factor(lambda factor: -factor) == pytest.approx(1e-8)


@pytest.mark.parametrize("size", [12.0, 1000.0])
@pytest.mark.parametrize("sites", [False, True])
def test_narrowing_spends_all_that_the_training_labels_bear(size: float, sites: bool) -> None:
    """The standard error of the network's loss, or 0.005 nats a label where the network is surer than that."""
    model = nn.Sequential(double(nn.Conv2d(3, 4, 1) if sites else nn.Linear(3, 4), 2), Times(size))
    x = normal(40, 3, 2, 2, seed=3) if sites else normal(40, 3, seed=3)
    y = model(x).argmax(1)
    la = Laplace(model, "classification", "full").fit(x, y)
    each = -model(x).detach().log_softmax(1).gather(1, y[:, None]).flatten(1).mean(1)  # of an example
    limit = max(0.005, float(each.std(correction=0)) / 40**0.5)
    assert la.narrowed_ < 1 and (limit > 0.005) == (size == 12.0)
    spent = float(-la.predict_proba(x).log().gather(1, y[:, None]).mean() - each.mean())
    assert 0.85 * limit <= spent <= limit * (1 + 1e-6)
    assert la.scales_["all"] == pytest.approx(la.narrowed_ * la.tune_path_[-2].scales[0], rel=1e-9)


class Times(nn.Module):
    """Its input times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_the_factor_of_held_out_data_is_the_best_of_a_grid(spread: float) -> None:
    """Against fits with the prior variance given: what data have determined does not widen with the prior."""
    model = net(CASES["numbers"][0])
    held = normal(25, X.shape[1], seed=11)
    targets = model(held).detach() + spread * normal(25, NUMBERS.shape[1], seed=12)
    la = Laplace(model, CASES["numbers"][1], "full", "shared").fit(X, NUMBERS).tune(validation=(held, targets))
    first, best = la.tune_path_[-2].scales[0], la.scales_["all"]

    def score(scale: float) -> float:
        at = Laplace(model, CASES["numbers"][1], "full", scale, noise=la.noise_).fit(X, NUMBERS)
        mean, std = at.predict(held, return_std=True, noise=True)
        return float(torch.distributions.Normal(mean, std).log_prob(targets).sum())

    grid = [score(first * 10**d) for d in torch.arange(-8, 3.01, 0.5).tolist()]
    assert score(best) >= max(grid) - 1e-3
    assert 1e-8 * (1 - 1e-9) <= best / first <= 1e3 * (1 + 1e-9)


@pytest.mark.parametrize("prior", ["shared", "layerwise"])
@pytest.mark.parametrize("structure", ["full", "function", "lowrank"])
def test_a_regression_lies_half_way_between_determined_and_all_weights(structure: Any, prior: Any) -> None:
    la = Laplace(net(2), "regression", structure, prior).fit(X, NUMBERS)
    before, after = la.tune_path_[-2:]
    gamma = la._log_det(before.scales, 1 / before.noise)[1]
    layout = la.lin_.layout.layers
    counts = [la.lin_.p] if prior == "shared" else [sum(t.numel() for t in group) for group in _tensors(la)]
    assert len(gamma) == len(counts) == len(layout if prior == "layerwise" else [0])
    wanted = [s * math.sqrt(g / p) for s, g, p in zip(before.scales, gamma, counts, strict=True)]
    assert after.scales == pytest.approx(wanted, rel=1e-9) and after.noise == before.noise
    assert la.narrowed_ < 1 and tuple(la.scales_.values()) == after.scales
    assert la.tune(narrow=False).narrowed_ == 1


def _tensors(la: Laplace) -> list[list[Tensor]]:
    """The selected parameters of each layer."""
    theta = la.lin_.theta
    return [[t for name, t in theta.items() if name.rpartition(".")[0] == layer] for layer in la.scales_]


def test_error_bars_of_a_network_that_fits_its_targets_too_well_hold() -> None:
    """Intervals of 95 % and log probabilities on new data, beside those of the largest evidence alone: too wide."""
    torch.manual_seed(0)
    inputs = torch.randn(1100, 4)
    targets = torch.sin(2 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2] + 0.3 * torch.randn(1100)
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(400):
        optimizer.param_groups[0]["lr"] = 5e-3 if epoch < 300 else 5e-4
        optimizer.zero_grad()
        (model(inputs[:100])[:, 0] - targets[:100]).square().mean().backward()
        optimizer.step()

    def scores(la: Laplace) -> tuple[float, float]:
        mean, std = la.predict(inputs[100:], return_std=True, noise=True)
        z = (targets[100:] - mean) / std
        return float((z.abs() < 1.96).double().mean()), float((z.square() / 2 + std.log()).mean())

    la = Laplace(model, "regression").fit(inputs[:100], targets[:100])
    (held, nll), (wide, worse) = scores(la), scores(la.tune(narrow=False))
    assert 0.93 < held < wide
    assert nll < worse - 0.2


def test_a_prior_that_is_given_is_not_narrowed() -> None:
    model, x = nn.Sequential(double(nn.Linear(3, 4), 2), Times(12.0)), normal(40, 3, seed=3)
    la = Laplace(model, "classification", "full", 5.0).fit(x, model(x).argmax(1))
    assert la.narrowed_ == 1 and bool((la.prior_variance_ == 5.0).all())
    assert la.largest_evidence_ == la.log_evidence()


def test_narrowing_looks_at_some_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own loss is what averaging is compared with; the standard error is that of all."""
    monkeypatch.setattr("linnet.laplace.estimator.LOOKED_AT", 8)
    model, x = nn.Sequential(double(nn.Linear(3, 4), 2), Times(12.0)), normal(40, 3, seed=3)
    y = model(x).argmax(1)
    la = Laplace(model, "classification", "full").fit(x, y)
    each = -model(x).detach().log_softmax(1).gather(1, y[:, None])[:, 0]
    index = torch.randperm(40, generator=torch.Generator().manual_seed(la.seed))[:8]
    spent = -la.predict_proba(x[index]).log().gather(1, y[index, None])[:, 0].mean() - each[index].mean()
    limit = max(0.005, float(each.std(correction=0)) / 40**0.5)
    assert la.narrowed_ < 1 and 0.85 * limit <= float(spent) <= limit * (1 + 1e-6)


def test_fewer_examples_are_looked_at_where_there_are_many_classes() -> None:
    la = Laplace(net(3), structure="diag", prior=0.7).fit(X, CLASSES)
    la._f = torch.zeros(5000, 4096)
    assert len(la._looked_at()) == 2**24 // 4096**2
    la._f = torch.zeros(5000, 2)
    assert len(la._looked_at()) == min(5000, LOOKED_AT)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_structures_hold_memory(structure: str) -> None:
    """A fit takes little more than a pass may take: outputs, and a table of variances for a few examples."""
    n, c, limit = 600, 4, 3e6
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten())
    model = double(model.append(nn.Linear(8 * 36, c)))
    x = normal(n, 2, 6, 6)
    table = 200 * c * 386 * 8
    whole = 8 * n * c * sum(t.numel() for t in model.parameters())  # all rows, which a pass of one chunk would hold
    assert whole > 3 * (limit + 2 * table)
    la = Laplace(model, structure=structure, memory=limit)
    assert peak_beside_result(lambda: la.fit(x, torch.arange(n) % c)) < 1.3 * limit + 2 * table
    with pytest.raises(MemoryError, match=r"Kronecker factors of all layers takes .* memory= allows 9.8 KiB"):
        Laplace(model, structure=structure, memory=10_000).fit(x, torch.arange(n) % c)
