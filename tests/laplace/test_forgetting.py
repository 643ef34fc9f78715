"""Laplace approximations that forget and take more: equal to a fit with the same prior and noise."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import linnet
from linnet import Laplace
from linnet.jacobian import kronecker
from tests.support.drawn import double, normal

STRUCTURES = ("full", "function", "diag", "kron", "ekfac", "lowrank", "subnetwork", "samples")
SUMS = ("full", "function", "diag", "kron")
N = 30
GONE = torch.tensor([0, 5, 6, 29])
STAY = torch.tensor([i for i in range(N) if i not in GONE.tolist()])
NEW = normal(5, 3, seed=9)


def net(outputs: int) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)))


X = normal(N, 3, seed=1)
KINDS = ("regression", "classification", "poisson")
OUTPUTS = {"regression": 2, "classification": 3, "poisson": 1}


def targets(kind: str, model: nn.Module, inputs: Tensor) -> Tensor:
    f, noise = model(inputs).detach(), 0.3 * normal(len(inputs), OUTPUTS[kind], seed=4)
    if kind == "regression":
        return f + noise
    return (f + noise).argmax(1) if kind == "classification" else f[:, 0].exp().round()


def laplace(kind: str, structure: Any, **given: Any) -> Laplace:
    given = {"prior": 0.5, "noise": 0.2 if kind == "regression" else None} | given
    if structure == "samples":
        given |= {"tolerance": 1e-9}
    return Laplace(net(OUTPUTS[kind]), kind, structure, size=9, rank=12, **given)


def equal(a: Any, b: Any, **close: Any) -> None:
    torch.testing.assert_close(a, b, **{"rtol": 1e-8, "atol": 1e-11} | close)


def check_same(found: Laplace, expected: Laplace, *, covariances: bool = True) -> None:
    if covariances:
        for a, b in zip(found.predict(NEW, return_cov=True), expected.predict(NEW, return_cov=True), strict=True):
            equal(a, b)
    assert found.log_evidence() == pytest.approx(expected.log_evidence(), rel=1e-9, abs=1e-9)
    for name in ("effective_dimension_", "gradient_norm_", "gradient_ratio_"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-7), name


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_is_a_fit_without_the_examples(kind: str, structure: Any) -> None:
    w = torch.linspace(0.5, 2, N)
    first = laplace(kind, structure)
    y = targets(kind, first.model, X)
    before = first.fit(X, y, sample_weight=w).predict(NEW, return_std=True)
    less = first.forget(GONE)
    check_same(less, laplace(kind, structure).fit(X[STAY], y[STAY], sample_weight=w[STAY]))
    equal(first.predict(NEW, return_std=True)[1], before[1], rtol=0, atol=0)
    found = less.certificate_
    assert found.forgotten == 4 and found.mean == 0 and "network were trained" in found.remains[0]
    assert (found.variance is not None and found.variance < 1e-9) == (structure in SUMS)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_more_examples(structure: Any) -> None:
    first = laplace("classification", structure)
    y = targets("classification", first.model, X)
    more = first.fit(X[:25], y[:25]).condition(X[25:], y[25:])
    check_same(more, laplace("classification", structure).fit(X, y))
    if structure in SUMS:
        check_same(more.forget(X[25:], y[25:]), first)


def test_what_comes_later_still_works() -> None:
    """The search for the prior, the evidence elsewhere, and samples go on from the examples that stay."""
    for structure in SUMS:
        given: dict[str, Any] = {"prior": "layerwise", "noise": None}
        first = laplace("regression", structure, **given)
        y = targets("regression", first.model, X)
        less = first.fit(X, y).forget(GONE)
        assert less.scales_ == first.scales_ and less.noise_ == first.noise_ and less.tune_path_ == ()
        again = laplace("regression", structure, **given).fit(X[STAY], y[STAY])
        assert less.log_evidence(prior=0.3) == pytest.approx(again.log_evidence(prior=0.3, noise=less.noise_), rel=1e-9)
        assert less.tune().log_evidence() == pytest.approx(again.tune().log_evidence(), rel=1e-4)
        assert less.sample(NEW, 2).shape == (2, 5, 2)


def test_noise_of_each_observation() -> None:
    each = torch.linspace(0.1, 1, N)[:, None].expand(N, 2).double()
    first = laplace("regression", "full", noise=each)
    y = targets("regression", first.model, X)
    less = first.fit(X, y).forget(X[GONE], y[GONE])
    check_same(less, laplace("regression", "full", noise=each[STAY]).fit(X[STAY], y[STAY]))
    with pytest.raises(NotImplementedError, match="a noise for each observation"):
        first.condition(NEW, y[:5])


@pytest.mark.parametrize("structure", SUMS)
@pytest.mark.parametrize("kind", KINDS)
def test_files_forget(kind: str, structure: Any, tmp_path: Path) -> None:
    """A file holds no training data but checksums, and forgets examples that are given with their targets."""
    first, path = laplace(kind, structure), tmp_path / "la.safetensors"
    inputs = X.clone()
    inputs[GONE] += 10
    y = targets(kind, first.model, inputs)
    first.fit(inputs, y, sample_weight=torch.linspace(0.5, 2, N)).save(path)
    loaded = linnet.load(path, first.model)
    less, expected = loaded.forget(inputs[GONE], y[GONE]), first.forget(GONE)
    equal(less.predict(NEW, return_cov=True)[1], expected.predict(NEW, return_cov=True)[1], rtol=1e-6, atol=1e-9)
    assert less.log_evidence() == pytest.approx(expected.log_evidence(), rel=1e-8)
    assert math.isnan(less.gradient_norm_)
    less.save(path)
    again = linnet.load(path, first.model)
    equal(again.predict(NEW, return_std=True)[1], less.predict(NEW, return_std=True)[1])
    assert again.certificate_.forgotten == 4
    for name, tensor in load_file(path).items():
        near = torch.isclose(tensor.double().flatten()[:, None], inputs[GONE].flatten(), rtol=1e-6, atol=0.0)
        assert not bool(near.any()), f"{name} holds what was forgotten"
    with pytest.raises(ValueError, match="4 of the 4 examples to forget are not among the 26"):
        again.forget(inputs[GONE], y[GONE])
    with pytest.raises(ValueError, match="positions say nothing"):
        again.forget([0])


def test_errors(tmp_path: Path) -> None:
    first = laplace("classification", "ekfac")
    y = targets("classification", first.model, X)
    first.fit(X, y)
    for examples, labels, message in (
        ([30], None, "positions go from 0 to 29; got 30"),
        (NEW, y[:5], "its inputs were never there"),
        (X[:1], (y[:1] + 1) % 3, "with another target"),
        (range(30), None, "nothing but the prior is left"),
    ):
        with pytest.raises(ValueError, match=message):
            first.forget(examples, labels)
    first.save(tmp_path / "la.safetensors")
    loaded = linnet.load(tmp_path / "la.safetensors", first.model)
    with pytest.raises(NotImplementedError, match="structure='ekfac' is made again"):
        loaded.forget(X[:1], y[:1])
    with pytest.raises(ValueError, match="condition needs the training data"):
        loaded.condition(X[:1], y[:1])


def test_sketched_factors_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = laplace("classification", "kron"), laplace("classification", "kron")
    y = targets("classification", first.model, X)
    monkeypatch.setattr(kronecker, "CUBES", {"cpu": 0})
    first.fit(X, y).save(tmp_path / "la.safetensors")
    check_same(first.forget(GONE), second.fit(X[STAY], y[STAY]))
    with pytest.raises(NotImplementedError, match="a factor is sketched"):
        linnet.load(tmp_path / "la.safetensors", first.model).forget(X[:1], y[:1])


def test_drawn_labels_and_ensembles() -> None:
    first = laplace("classification", "diag", draws=3)
    y = targets("classification", first.model, X)
    check_same(first.fit(X, y).forget(GONE), laplace("classification", "diag", draws=3).fit(X[STAY], y[STAY]))
    several = Laplace([net(3), net(3)], "classification", "full", 0.5).fit(X, y)
    equal(
        several.forget(GONE).predict_proba(NEW),
        laplace("classification", "full").fit(X[STAY], y[STAY]).predict_proba(NEW),
    )


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_an_earlier_posterior_stays_the_prior(structure: str, tmp_path: Path) -> None:
    y = torch.arange(N) % 3
    first, second = net(3), net(3)
    with torch.no_grad():
        second[0].weight.add_(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the networks are not trained
        earlier = Laplace(first, structure=structure, prior=0.5).fit(X[:10], y[:10])
        la = Laplace(second, structure=structure, prior=earlier).fit(X[10:], y[10:])
        less, more = la.forget([0, 5]), la.forget(list(range(10, 20))).condition(X[20:], y[20:])
        kept = torch.tensor([i for i in range(10, 30) if i not in (10, 15)])
        again = Laplace(second, structure=structure, prior=earlier).fit(X[kept], y[kept])
    for found, expected in ((less, again), (more, la)):
        for a, b in zip(found.predict(X, return_std=True), expected.predict(X, return_std=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        assert found.log_evidence() == pytest.approx(expected.log_evidence(), rel=1e-8)
    la.save(tmp_path / "la")
    with pytest.raises(NotImplementedError, match="earlier posterior as its prior is made again"):
        linnet.load(tmp_path / "la", second).forget(X[10:11], y[10:11])
