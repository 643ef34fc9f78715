"""Forgetting: equal to a refit without the examples, back from later data, certified, and nothing remains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import linnet
from linnet import TangentClassifier, TangentGLM, TangentRegressor
from linnet.testing import dense_jacobian
from tests.support.drawn import double, normal
from tests.support.reference import dense_posterior

EXACT = ("function", "weight")
SOLVERS = (*EXACT, "cg-function", "cg-weight")
N = 40
GONE = torch.tensor([0, 7, 8, 39])
STAY = torch.tensor([i for i in range(N) if i not in GONE.tolist()])
NEW = normal(6, 3, seed=9)


def net(outputs: int = 1) -> nn.Sequential:
    return double(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)))


X = normal(N, 3, seed=1)
Y = torch.stack([X[:, 0].sin() + X[:, 1], X[:, 2]], 1) + 0.2 * normal(N, 2, seed=2)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def regressor(solver: str = "auto", outputs: int = 1, **given: Any) -> TangentRegressor:
    given = {"prior": 0.7, "noise": 0.1, "mean": "network"} | given
    if solver.startswith("cg"):
        given |= {"tolerance": 1e-10}
    return TangentRegressor(net(outputs), solver=solver, **given)


def equal(a: Any, b: Any, *, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def distance(a: Any, b: Any) -> float:
    """Of two displacements, in prior standard deviations."""
    return float(((a.posterior_.delta - b.posterior_.delta) / a.prior_variance_.sqrt()).norm())


# Regression.


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("solver", EXACT)
def test_forgetting_is_the_dense_posterior_of_the_others(solver: str, outputs: int) -> None:
    y = Y[:, :outputs]
    less = regressor(solver, outputs).fit(X, y).forget(GONE)
    model = less.model
    r = (y[STAY] - model(X[STAY]).detach()).flatten()
    J, Z = dense_jacobian(model, X[STAY]), dense_jacobian(model, NEW)
    ref = dense_posterior(J, r, variance=0.7, noise=0.1, new=Z)
    mean, C = less.predict(NEW, return_cov=True)
    equal(mean.flatten(), model(NEW).detach().flatten() + ref.shift)
    equal(C, ref.covariance)
    assert less.log_evidence_ == pytest.approx(ref.log_evidence, rel=1e-9)
    equal(less.posterior_.delta, ref.delta)
    again = less.refit(X[STAY], y[STAY])
    np.testing.assert_allclose(less.loo_.mean, again.loo_.mean, rtol=1e-8)
    equal(less.influence(NEW), again.influence(NEW))
    equal(less.path(NEW, 2.0), again.path(NEW, 2.0))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("given", [{}, {"noise": [0.1, 0.4]}, {"prior": {"0.*": 0.3, "2.*": 2.0}}])
def test_forgetting_is_a_refit(solver: str, given: dict[str, Any]) -> None:
    w = torch.linspace(0.5, 2, N)
    first = regressor(solver, 2, **given).fit(X, Y, sample_weight=w)
    before = first.predict(X)
    less, again = first.forget(GONE), first.refit(X[STAY], Y[STAY], sample_weight=w[STAY])
    close = {} if solver in EXACT else {"rtol": 1e-6, "atol": 1e-7}
    equal(less.predict(NEW), again.predict(NEW), **close)
    value = again.log_evidence_
    tolerance = 1e-9 * abs(value) + 4 * (less.log_evidence_error_ + again.log_evidence_error_)
    assert abs(less.log_evidence_ - value) <= tolerance
    assert distance(less, again) <= less.certificate_.mean + again.certificate_.mean < 1e-5
    std, expected = less.predict(NEW, return_std=True)[1], again.predict(NEW, return_std=True)[1]
    if solver in EXACT:
        prior = dense_jacobian(first.model, NEW).square().mul(first.prior_variance_).sum(1).view(6, 2)
        bound = less.certificate_.variance + again.certificate_.variance
        assert bool(((std.square() - expected.square()).abs() <= bound * prior).all()) and bound < 1e-8
    else:
        equal(std, expected, rtol=0.6, atol=0.0)  # 64 samples, each with its own draws
        assert less.certificate_.variance is None
    equal(first.predict(X), before, rtol=0, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_later_data_are_forgotten_and_all_is_as_before(solver: str) -> None:
    first = regressor(solver).fit(X, Y[:, 0])
    back = first.condition(NEW, NEW[:, 0]).forget(NEW, NEW[:, 0])
    close = {"rtol": 0, "atol": 1e-10 if solver in EXACT else 1e-7}
    equal(back.predict(X), first.predict(X), **close)
    assert back.log_evidence_ == pytest.approx(first.log_evidence_, abs=1e-10 if solver in EXACT else 1e-6)
    if solver in EXACT:
        equal(back.predict(X, return_std=True)[1], first.predict(X, return_std=True)[1], **close)


@pytest.mark.parametrize("solver", ["cg-function", "cg-weight"])
@pytest.mark.parametrize("count", [6, 60])
def test_iterative_solvers_take_more_data(solver: str, count: int) -> None:
    """Few new rows by one solve that is as wide, many by all solves again."""
    new, y = normal(count, 3, seed=20), normal(count, seed=21)
    first = regressor(solver, samples=16).fit(X, Y[:, 0])
    more, again = first.condition(new, y), first.refit(torch.cat([X, new]), torch.cat([Y[:, 0], y]))
    equal(more.predict(NEW), again.predict(NEW), rtol=1e-6, atol=1e-7)
    assert abs(more.log_evidence_ - again.log_evidence_) <= 4 * (more.log_evidence_error_ + 1e-6)
    less = more.forget(torch.arange(N, N + count))
    equal(less.predict(NEW), first.predict(NEW), rtol=1e-6, atol=1e-7)


def test_samples_of_iterative_solvers_have_the_right_covariance() -> None:
    """The average over many samples, after examples came and others went."""
    given: dict[str, Any] = {"samples": 4000, "params": "2.*"}
    first = regressor("cg-weight", **given).fit(X, Y[:, 0])
    changed = first.condition(NEW, NEW[:, 0]).forget(GONE)
    kept = torch.cat([X[STAY], NEW])
    model = first.model
    J, Z = (dense_jacobian(model, inputs)[:, -7:] for inputs in (kept, X))
    r = torch.cat([Y[STAY, 0], NEW[:, 0]]) - model(kept).detach()[:, 0]
    ref = dense_posterior(J, r, variance=0.7, noise=0.1, new=Z)
    ratio = changed.predict(X, return_std=True)[1].square() / ref.covariance.diagonal()
    assert float((ratio - 1).abs().max()) < 6 * (2 / 4000) ** 0.5


@pytest.mark.parametrize("solver", EXACT)
def test_averages(solver: str) -> None:
    """An average forgets later data as if it had not seen them, and its own data as refit does."""
    first = TangentRegressor(net(), solver=solver).fit(X, Y[:, 0])
    assert first.averaged_ and first.certificate_.mean is None
    later = first.condition(NEW[:4], NEW[:4, 0]).condition(NEW[4:], NEW[4:, 0])
    back, part = later.forget(range(N, N + 6)), later.forget([N + 1, N + 4])
    assert back.averaged_ and part.averaged_
    others = first.condition(NEW[[0, 2, 3, 5]], NEW[[0, 2, 3, 5], 0])
    for found, expected in ((back, first), (part, others)):
        equal(found.predict(X), expected.predict(X), rtol=0, atol=1e-10)
        std = (one.predict(X, return_std=True)[1] for one in (found, expected))
        equal(*std, rtol=0, atol=1e-9)
        assert found.log_evidence_ == pytest.approx(expected.log_evidence_, abs=1e-9)
    less, again = first.forget(GONE), first.refit(X[STAY], Y[STAY, 0])
    assert not less.averaged_ and less.noise_ == first.noise_ and less.scales_ == first.scales_
    equal(less.predict(NEW), again.predict(NEW))
    assert less.selection_ is None and less.evidence_path_ == ()


def test_one_after_the_other_is_all_at_once() -> None:
    for solver in EXACT:
        first = regressor(solver).fit(X, Y[:, 0])
        once, twice = first.forget(GONE), first.forget(GONE[:2]).forget(GONE[2:] - 2)
        equal(once.predict(NEW), twice.predict(NEW))
        assert once.certificate_.forgotten == twice.certificate_.forgotten == 4


def test_source_data_and_noise_of_each_observation() -> None:
    given: dict[str, Any] = {"average": False, "prior": 0.5}
    first = TangentRegressor(net(), **given).fit(X[:10], Y[:10, 0], source=(X[10:], Y[10:, 0]))
    less = first.forget([3, 20, 21])
    assert less._source == range(9, 37) and less.loo_.mean.shape == (9,)
    equal(less.predict(NEW), first.forget([20, 21]).forget([3]).predict(NEW))
    each = torch.linspace(0.1, 1, N)
    known = regressor(noise=each.tolist()).fit(X, Y[:, 0]).forget(GONE)
    direct = regressor(noise=each[STAY].tolist()).fit(X[STAY], Y[STAY, 0])
    equal(known.predict(NEW), direct.predict(NEW))
    np.testing.assert_allclose(known.noise_, each[STAY].double(), rtol=1e-7)


def test_little_noise_is_refused_rather_than_wrong() -> None:
    """In weight space a precision is subtracted: without digits left there is an error, and none in function space."""
    given: dict[str, Any] = {"prior": 1.0, "noise": 1e-9, "params": "2.bias"}
    inputs, y = X[:2], Y[:2, 0]
    with pytest.raises(ArithmeticError, match="half of the digits"):
        regressor("weight", **given | {"params": None, "noise": 1e-10}).fit(X[:3], Y[:3, 0]).forget([1])
    less = regressor("function", **given).fit(inputs, y).forget([1])
    equal(less.predict(NEW), less.refit(inputs[:1], y[:1]).predict(NEW))


# Classes and counts.


@pytest.mark.parametrize("solver", ["function", "weight", "cg-weight"])
@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
def test_classifiers_forget_and_take_more(inference: Any, solver: str) -> None:
    w = torch.linspace(0.5, 2, N)
    given: dict[str, Any] = {"inference": inference, "solver": solver, "mean": "network", "prior": 0.7}
    first = TangentClassifier(net(3), **given).fit(X, LABELS, sample_weight=w)
    less, again = first.forget(GONE), first.refit(X[STAY], LABELS[STAY], sample_weight=w[STAY])
    equal(less.predict_proba(NEW), again.predict_proba(NEW), rtol=1e-4, atol=1e-5)
    if inference == "vi":
        assert less.certificate_.mean is None
    else:
        assert distance(less, again) <= less.certificate_.mean + again.certificate_.mean < 1e-3
    if less.log_evidence_ is not None:
        assert less.log_evidence_ == pytest.approx(again.log_evidence_, abs=1e-4)
    back = first.condition(NEW, LABELS[:6]).forget(NEW, LABELS[:6])
    equal(back.predict_proba(NEW), first.predict_proba(NEW), rtol=1e-4, atol=1e-5)


def test_the_search_for_the_mode_begins_at_the_old_one() -> None:
    for solver in ("function", "weight"):
        first = TangentClassifier(net(3), inference="laplace", solver=solver, prior=0.7).fit(X, LABELS)
        less, again = first.forget([4]), first.refit(*(torch.cat([part[:4], part[5:]]) for part in (X, LABELS)))
        assert less.mode_.iterations < again.mode_.iterations


def test_labels_with_names_and_ignored_ones() -> None:
    names = np.array(["low", "mid", "high"])
    first = TangentClassifier(net(3), inference="laplace", prior=0.7, classes=names).fit(X, names[LABELS])
    less = first.forget(X[GONE], names[LABELS[GONE]])
    equal(less.predict_proba(NEW), first.forget(GONE).predict_proba(NEW), rtol=0, atol=0)
    more = less.condition(X[GONE], names[LABELS[GONE]])
    equal(more.predict_proba(NEW), first.predict_proba(NEW), rtol=1e-5, atol=1e-6)
    numbers = LABELS.clone()
    numbers[3] = -100
    one = TangentClassifier(net(3), inference="laplace", prior=0.7).fit(X, numbers)
    equal(one.condition(X[3:4], LABELS[3:4]).predict_proba(NEW), first.predict_proba(NEW), rtol=1e-5, atol=1e-6)
    assert len(one.condition(X[3:5], numbers[3:5])._observed) == N


def test_counts() -> None:
    y = torch.poisson(X[:, 0].exp(), generator=torch.Generator().manual_seed(0))
    first = TangentGLM(net(), "poisson", inference="laplace", prior=0.7).fit(X, y)
    less, again = first.forget(X[GONE], y[GONE]), first.refit(X[STAY], y[STAY])
    assert distance(less, again) <= less.certificate_.mean + again.certificate_.mean < 1e-4
    assert less.log_evidence_ == pytest.approx(again.log_evidence_, abs=1e-6)


# Data of other kinds, files, ensembles.


def test_datasets_dicts_and_streams() -> None:
    expected = regressor().fit(X, Y[:, 0]).forget(GONE).predict(NEW)
    data = TensorDataset(X, Y[:, 0])
    first = regressor().fit(data)
    equal(first.forget(GONE).predict(NEW), expected)
    equal(first.forget(TensorDataset(X[GONE], Y[GONE, 0])).predict(NEW), expected)
    with pytest.raises(TypeError, match="are to be forgotten"):
        regressor().fit(DataLoader(data, batch_size=7)).forget(GONE)

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return zip(X, Y[:, 0], strict=True)

    with pytest.raises(TypeError, match="are to be forgotten"):
        regressor("cg-weight").fit(Stream()).forget([0])


def test_ensembles_forget_too() -> None:
    several = TangentRegressor([net(), net()], prior=0.7, noise=0.1, mean="network").fit(X, Y[:, 0])
    less = several.forget(GONE)
    equal(less.predict(NEW), regressor().fit(X, Y[:, 0]).forget(GONE).predict(NEW))
    assert [one.forgotten for one in less.certificate_] == [4, 4]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("average", [False, True])
def test_nothing_remains_in_the_file(solver: str, average: bool, tmp_path: Path) -> None:
    """Rows, targets and noises of the examples that went are in no tensor and no number of the file."""
    if average and solver.startswith("cg"):
        solver = "function"
    inputs, y = torch.cat([X, 100 + NEW]), torch.cat([Y[:, 0], 1000 + NEW[:, 0]])
    given: dict[str, Any] = {"prior": "shared", "noise": "evidence"} if average else {}
    first = regressor(solver, **given).fit(inputs[:42], y[:42]).condition(inputs[42:], y[42:])
    less = first.forget(range(N, N + 6))
    path = tmp_path / "less.safetensors"
    less.save(path)
    check_gone(path, 100 + NEW, 1000 + NEW[:, 0])
    loaded = linnet.load(path, first.model)
    equal(loaded.predict(NEW), less.predict(NEW))
    assert loaded.certificate_.forgotten == 6
    equal(loaded.forget([0, 1]).predict(NEW), less.forget([0, 1]).predict(NEW), rtol=1e-6, atol=1e-7)


def test_nothing_remains_in_the_file_of_a_classifier(tmp_path: Path) -> None:
    inputs, labels = torch.cat([100 + NEW, X]), torch.cat([LABELS[:6], LABELS])
    for inference in ("laplace", "vi"):
        first = TangentClassifier(net(3), inference=inference, prior=0.7).fit(inputs, labels)
        path = tmp_path / "less.safetensors"
        first.forget(range(6)).save(path)
        check_gone(path, 100 + NEW, torch.zeros(0).double())
        loaded = linnet.load(path, first.model)
        assert len(loaded._observed) == N
        equal(loaded.forget(X[:2], LABELS[:2]).predict_proba(NEW), first.forget(range(8)).predict_proba(NEW), rtol=1e-5)


def check_gone(path: Path, rows: Tensor, targets: Tensor) -> None:
    """No number of the rows and no target, nor the mean of a target and what it was compared with, is in a file."""
    secret = torch.cat([rows.flatten(), targets])
    for name, tensor in load_file(path).items():
        values = tensor.double().flatten()
        near = torch.isclose(values[:, None], secret, rtol=1e-6, atol=0.0)
        assert not bool(near.any()), f"{name} holds what was forgotten"
        if name.startswith("behavior.input"):
            assert float(tensor.abs().max()) < 50, "the inputs that files compare networks by show their range"


def test_what_is_left_does_not_depend_on_what_was_forgotten() -> None:
    for solver in EXACT:
        found = []
        for shift in (0.0, 3.0):
            inputs, y = torch.cat([X, NEW + shift]), torch.cat([Y[:, 0], NEW[:, 0] - shift])
            less = regressor(solver).fit(inputs, y).forget(range(N, N + 6))
            found.append((*less.predict(X, return_std=True), torch.tensor(less.log_evidence_)))
        for one, other in zip(*found, strict=True):
            equal(one, other, rtol=1e-9, atol=1e-11)


# Errors.


@pytest.mark.parametrize(
    ("examples", "y", "message"),
    [
        ([40], None, "has seen 40 examples, so that their positions go from 0 to 39; got 40"),
        ([-1], None, "got -1, which was never there"),
        ([1, 1], None, "Position 1 is given 2 times"),
        ([], None, "nothing to forget"),
        (torch.zeros(3, dtype=torch.bool), None, "a mask needs as many entries; got 3"),
        (range(40), None, "nothing but the prior is left"),
        (NEW, NEW[:, 0], "6 of the 6 examples to forget are not among the 40 .* its inputs were never there"),
        (X[:2], 5 + Y[:2, 0], "2 of the 2 examples .* its inputs are there with another target"),
        (X[[0, 0]], Y[[0, 0], 0], "1 of the 2 examples"),
        (X[:2], None, "Give the targets of the examples too"),
        (X[:2], Y[:3, 0], "There are 2 examples and 3 targets"),
        (X[:2], Y[:2], "targets of the fit have 1 columns"),
    ],
)
def test_what_was_never_there(examples: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regressor().fit(X, Y[:, 0]).forget(examples, y)


def test_masks_and_single_positions() -> None:
    first = regressor().fit(X, Y[:, 0])
    mask = torch.zeros(N, dtype=torch.bool)
    mask[3] = True
    for examples in (3, [3], np.array([3]), mask, mask.numpy()):
        equal(first.forget(examples).predict(NEW), first.forget(X[3:4], Y[3:4, 0]).predict(NEW), rtol=0, atol=0)


def test_minibatches_cannot_go_on() -> None:
    clf = TangentClassifier(net(3), inference="map", solver="adam", epochs=1, prior=0.7).fit(X, LABELS)
    for call in (lambda: clf.forget([0]), lambda: clf.condition(X[:1], LABELS[:1])):
        with pytest.raises(NotImplementedError, match="solver='adam' stops short of the mode"):
            call()
