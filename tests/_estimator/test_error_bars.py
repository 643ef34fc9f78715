"""Error bars from posterior samples: against exact ones, with stated standard errors, for every estimator."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import Laplace, TangentClassifier, TangentRegressor
from linnet._estimator.error_bars import relative_error
from linnet.jacobian import plan
from linnet.jacobian.kronecker import Kronecker
from linnet.probability import Categorical, FactoredCovariance, compute_probabilities
from tests.support.drawn import double, normal
from tests.support.laplace_cases import CLASSES, NEW, NUMBERS, X, net

K = 4000
STRUCTURES = ["full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork"]


@pytest.fixture(autouse=True)
def untrained() -> Iterator[None]:
    """The networks here are drawn, not trained, which is not what these tests are about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is far from a mode", UserWarning)
        yield


def estimator(kind: str, **options: Any) -> Any:
    if kind == "regressor":
        return TangentRegressor(net(2), prior=0.7, noise=0.3, **options).fit(X, NUMBERS)
    if kind in ("vi", "laplace", "map"):
        return TangentClassifier(net(3), inference=kind, prior=0.7, **options).fit(X, CLASSES)
    return Laplace(net(3), structure=kind, prior=0.7, size=20, rank=9, **options).fit(X, CLASSES)


def errors(est: Any) -> Tensor:
    if isinstance(est, TangentClassifier):
        return est.predict_logits(NEW)[1].diagonal(dim1=1, dim2=2).sqrt()
    return est.predict(NEW, return_std=True)[1]


@pytest.mark.parametrize("kind", ["regressor", "vi", "laplace", *STRUCTURES])
def test_error_bars_of_samples_are_the_exact_ones_to_their_standard_error(kind):
    exact, sampled = estimator(kind, variance="exact"), estimator(kind, variance="samples", samples=K)
    assert (exact.variance_, exact.std_error_) == ("exact", 0.0)
    assert sampled.variance_ == "samples" and sampled.std_error_ == relative_error(K)
    ratio = errors(sampled) / errors(exact)
    assert (ratio - 1).abs().max() < 4 * sampled.std_error_
    # The same weights are drawn for all inputs: errors go together, and so their mean is no better than one of them.
    assert abs(ratio.mean() - 1) < 4 * sampled.std_error_


@pytest.mark.parametrize("kind", ["regressor", "full", "kron"])
def test_error_bars_of_samples_are_those_of_the_draws(kind):
    est = estimator(kind, variance="samples", samples=7, seed=3)
    Z = est.posterior_.draw(7, generator=torch.Generator().manual_seed(3)) - est.posterior_.delta[:, None]
    T = est.lin_.jacobian(NEW).dense() @ Z
    mean, std = est.predict(NEW, return_std=True)
    torch.testing.assert_close(std.flatten(), T.square().mean(1).sqrt(), rtol=1e-9, atol=0)
    mean_too, C = est.predict(NEW, return_cov=True)
    torch.testing.assert_close(C, T @ T.T / 7, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mean, mean_too, rtol=1e-9, atol=0)
    torch.testing.assert_close(mean, est.predict(NEW), rtol=1e-9, atol=1e-12)
    again, other = (estimator(kind, variance="samples", samples=7, seed=seed) for seed in (3, 4))
    assert torch.equal(errors(again), std) and not torch.allclose(errors(other), std, rtol=0.01)


def test_joint_samples_need_no_covariance():
    reg = estimator("regressor", variance="samples")
    Z = reg.posterior_.draw(5, generator=torch.Generator().manual_seed(8))
    base = reg.lin_.jacobian(NEW).outputs() if reg.mean_ == "network" else 0.0
    expected = base + (reg.lin_.jacobian(NEW).dense() @ Z).T.reshape(5, 6, 2)
    torch.testing.assert_close(reg.sample(NEW, 5, seed=8), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("link", ["probit", "centered", "bridge", "mc"])
def test_probabilities_of_factors_are_those_of_their_covariances(link):
    f, T = normal(6, 4, seed=1), normal(6, 4, 9, seed=2)
    cov, given = T @ T.mT, {"link": link, "samples": 40_000}
    tolerance = 4 * 0.5 / math.sqrt(40_000) if link == "mc" else 1e-9
    found = [compute_probabilities(Categorical(), f, C, **given) for C in (FactoredCovariance(T), cov)]
    assert (found[0] - found[1]).abs().max() < (2**0.5 if link == "mc" else 1) * tolerance


@pytest.mark.parametrize("link", ["probit", "centered", "bridge", "mc"])
def test_probabilities_from_samples(link):
    exact, sampled = (estimator("full", variance=how, samples=K) for how in ("exact", "samples"))
    p, q = (la.predict_proba(NEW, link, draws=20_000) for la in (exact, sampled))
    assert (p - q).abs().max() < 4 * sampled.std_error_ + (4 * 0.5 / math.sqrt(20_000) if link == "mc" else 0)
    assert not torch.equal(p, q)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_probabilities_of_classifiers_from_samples(link):
    exact, sampled = (estimator("vi", variance=how, samples=K, link=link) for how in ("exact", "samples"))
    p, q = (clf.predict_proba(NEW) for clf in (exact, sampled))
    assert (p - q).abs().max() < 4 * sampled.std_error_ + (4 * 0.5 / math.sqrt(K) if link == "mc" else 0)
    assert torch.allclose(q.sum(1), torch.ones(6).double())


def test_sites_have_probabilities_from_samples():
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 3, padding=1).double()
    images, labels = normal(8, 1, 4, 4), torch.randint(3, (8, 4, 4), generator=torch.Generator().manual_seed(0))
    given = {"structure": "kron", "prior": 0.3, "samples": K}
    exact, sampled = (Laplace(model, variance=how, **given).fit(images, labels) for how in ("exact", "samples"))
    for link in ("probit", "centered", "mc"):
        p, q = (la.predict_proba(images, link) for la in (exact, sampled))
        assert p.shape == (8, 3, 4, 4) and (p - q).abs().max() < 0.1


def test_many_outputs_take_samples_and_say_so(caplog, monkeypatch):
    monkeypatch.setattr(plan, "CHEAP", 0.0)
    wide = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 40)))
    y = normal(24, 40, seed=2)
    with caplog.at_level(logging.INFO, logger="linnet"):
        for structure, draws in (("diag", 2), ("kron", 2), ("ekfac", 2), ("subnetwork", 2), ("auto", None)):
            la = Laplace(wide, "regression", structure, prior=0.5, noise=0.1, samples=2).fit(X, y)
            assert (la.variance_, la.draws_) == ("samples", draws)
            assert la.predict(NEW, return_std=True)[1].shape == (6, 40)
        assert la.structure_ == "samples"
        reg = TangentRegressor(wide, prior=0.5, noise=0.1, samples=2).fit(X, y)
    assert (reg.variance_, reg.solver_) == ("samples", "cg-weight")
    assert "2 posterior samples" in caplog.text and "2 labels drawn for each example" in caplog.text
    exact = Laplace(wide, "regression", "kron", prior=0.5, noise=0.1, samples=3).fit(X, y)
    assert (exact.variance_, exact.draws_) == ("exact", None)
    monkeypatch.undo()  # a network whose rows cost next to nothing has exact error bars
    cheap = Laplace(wide, "regression", "kron", prior=0.5, noise=0.1, samples=2).fit(X, y)
    assert (cheap.variance_, cheap.draws_) == ("exact", None)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_drawn_fisher_information_is_unbiased(structure, monkeypatch):
    monkeypatch.setattr(plan, "CHEAP", 0.0)
    kept: list[Kronecker] = []
    decomposed = Kronecker.decomposed
    monkeypatch.setattr(Kronecker, "decomposed", lambda self: kept.append(self) or decomposed(self))
    wide = double(nn.Linear(3, 40))
    y, seeds = normal(24, 40, seed=2), 60
    given: dict[str, Any] = {"structure": structure, "prior": 0.5, "noise": 0.1, "samples": 2}
    exact = Laplace(wide, "regression", draws=None, **given).fit(X, y)
    drawn = [Laplace(wide, "regression", seed=seed, **given).fit(X, y) for seed in range(seeds)]
    assert {la.draws_ for la in drawn} == {2}
    if structure == "diag":
        found, truth = torch.stack([la._structure.values for la in drawn]), exact._structure.values
    else:
        assert len(kept) == 1 + seeds
        pairs = [next(iter(factors.pairs.values())) for factors in kept]
        truth, *each = (pair.G.diagonal(dim1=1, dim2=2).flatten() for pair in pairs)
        found = torch.stack(each)
    z = (found.mean(0) - truth) / (found.std(0) / math.sqrt(seeds))
    assert z.abs().max() < 4.5  # of up to 160 numbers, normal


def test_files_hold_how_error_bars_are_made(tmp_path: Path):
    for kind in ("regressor", "full", "kron", "vi", "function"):
        est = estimator(kind, variance="samples", samples=5)
        est.save(tmp_path / kind)
        again = linnet.load(tmp_path / kind, est.model)
        assert (again.variance_, again.std_error_) == ("samples", est.std_error_)
        torch.testing.assert_close(errors(again), errors(est), rtol=1e-9, atol=0)


def test_error_bars_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="variance must be one of 'auto', 'exact', 'samples'; got 'some'"):
        estimator("regressor", variance="some")
    with pytest.raises(ValueError, match="structure='samples' knows samples alone"):
        estimator("samples", variance="exact")
    with pytest.raises(ValueError, match="solver='cg-weight' knows samples alone"):
        estimator("regressor", variance="exact", solver="cg-weight")
    with pytest.raises(ValueError, match="inference='laplace' with solver='cg-weight' knows samples alone"):
        estimator("laplace", variance="exact", solver="cg-weight")
    with pytest.raises(ValueError, match="draws must be 'auto', None or a positive number"):
        estimator("kron", draws=0)
    clf = estimator("vi", variance="samples", memory=1e6)
    with pytest.raises(MemoryError, match=r"draw outputs with sample\(X, k\)"):
        clf.predict_logits(NEW.repeat(5000, 1))
    assert estimator("map").variance_ == "exact" and estimator("samples").variance_ == "samples"


def test_the_standard_error_is_that_of_a_standard_deviation():
    z = normal(200_000, 10, seed=4)
    found = z.square().mean(1).sqrt().std()
    assert abs(float(found) / relative_error(10) - 1) < 4 / math.sqrt(2 * 200_000)


def test_error_bars_from_samples_have_gradients_in_the_inputs():
    la = estimator("full", variance="samples", samples=5)
    x = NEW.clone().requires_grad_()
    std = la.predict(x, return_std=True)[1]
    torch.testing.assert_close(std.detach(), errors(la), rtol=1e-9, atol=0)
    (g,) = torch.autograd.grad(std.sum(), x)
    step = 1e-6 * normal(6, 3, seed=9)
    ends = [la.predict(NEW + sign * step, return_std=True)[1].sum() for sign in (1, -1)]
    torch.testing.assert_close((g * step).sum(), (ends[0] - ends[1]) / 2, rtol=1e-5, atol=0)
    assert la.predict_proba(x, "mc", draws=50).requires_grad
