"""Ensembles: mixtures of linearized networks, against the formulas from the members' own numbers."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import Tensor, nn

import linnet
from linnet._estimator.ensembles import share_draws
from linnet.conformal import Conformal


def make_networks(outputs: int = 1, count: int = 3, inputs: int = 2) -> list[nn.Module]:
    networks = []
    for seed in range(count):
        torch.manual_seed(seed)
        networks.append(nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double())
    return networks


def make_numbers(n: int = 24) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 2, dtype=torch.float64)
    return X, torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(n, dtype=torch.float64)


def make_labels(n: int = 24, classes: int = 3) -> tuple[Tensor, Tensor]:
    X = torch.randn(n, 2, dtype=torch.float64)
    return X, (torch.arange(n) % classes)


@pytest.fixture
def regression() -> tuple[linnet.TangentRegressor, Tensor, Tensor]:
    X, y = make_numbers()
    return linnet.TangentRegressor(make_networks(), weights=np.array([1, 2, 1])).fit(X, y), X, y


W = np.array([0.25, 0.5, 0.25])


def test_mean_and_variance_are_those_of_the_mixture(regression: tuple[linnet.TangentRegressor, Tensor, Tensor]) -> None:
    reg, X, y = regression
    alone = [linnet.TangentRegressor(model).fit(X, y) for model in reg.model]
    at = torch.randn(7, 2, dtype=torch.float64)
    parts = [one.predict(at, return_std=True, noise=True) for one in alone]
    mean = sum(w * m for w, (m, _) in zip(W, parts, strict=True))
    second = sum(w * (s**2 + m**2) for w, (m, s) in zip(W, parts, strict=True))
    found, std = reg.predict(at, return_std=True, noise=True)
    torch.testing.assert_close(found, mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(std, (second - mean**2).sqrt(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(reg.predict(at), mean, rtol=1e-9, atol=1e-12)
    joint, cov = reg.predict(at, return_cov=True)
    torch.testing.assert_close(joint, mean, rtol=1e-9, atol=1e-12)
    parts = [one.predict(at, return_cov=True) for one in alone]
    moments = sum(w * (C + torch.outer(m, m)) for w, (m, C) in zip(W, parts, strict=True))
    torch.testing.assert_close(cov, moments - torch.outer(mean, mean), rtol=1e-9, atol=1e-11)
    assert isinstance(reg.predict(at.numpy()), np.ndarray)
    logs = np.array([one.log_evidence_ for one in alone])
    assert reg.log_evidence_ == pytest.approx(np.logaddexp.reduce(logs + np.log(W)), rel=1e-12)
    assert reg.noise_ == pytest.approx(sum(w * one.noise_ for w, one in zip(W, alone, strict=True)), rel=1e-9)


def test_several_outputs_have_a_joint_covariance_by_rows() -> None:
    X, _ = make_numbers(15)
    Y = torch.stack([X.sum(1), X[:, 0] - X[:, 1] ** 2], 1)
    reg = linnet.TangentRegressor(make_networks(2)).fit(X, Y)
    mean, cov = reg.predict(X[:4], return_cov=True)
    _, std = reg.predict(X[:4], return_std=True)
    assert mean.shape == (4, 2) and cov.shape == (8, 8)
    torch.testing.assert_close(cov.diagonal().view(4, 2), std**2, rtol=1e-9, atol=1e-12)


def test_an_ensemble_of_one_network_is_that_network() -> None:
    X, y = make_numbers()
    (model,) = make_networks(count=1)
    found, alone = linnet.TangentRegressor([model]).fit(X, y), linnet.TangentRegressor(model).fit(X, y)
    for one, other in zip(found.predict(X, return_std=True), alone.predict(X, return_std=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert found.log_evidence_ == pytest.approx(alone.log_evidence_, rel=1e-12)


def test_evidence_weights_are_posterior_probabilities_of_the_members() -> None:
    X, y = make_numbers()
    reg = linnet.TangentRegressor(make_networks(), weights="evidence").fit(X, y)
    logs = np.array([one.log_evidence_ for one in reg.members_])
    np.testing.assert_allclose(reg.weights_, np.exp(logs - np.logaddexp.reduce(logs)), rtol=1e-9)
    assert reg.log_evidence_ == pytest.approx(np.logaddexp.reduce(logs) - math.log(3))
    small = linnet.TangentRegressor(make_networks(), weights="evidence", mean="zero").fit(X, 1e-15 * y)
    assert small.log_evidence_ > 710  # whose exponential is no number
    assert small.weights_.sum() == pytest.approx(1) and bool((small.weights_ > 0).any())
    clf = linnet.TangentClassifier(make_networks(3), inference="map", solver="cg-weight", weights="evidence")
    with pytest.raises(ValueError, match="weights='evidence' needs the log evidence of each member"):
        clf.fit(*make_labels())


def test_leave_one_out_and_influence_average(regression: tuple[linnet.TangentRegressor, Tensor, Tensor]) -> None:
    reg, X, _ = regression
    found = reg.loo_
    means = np.stack([one.loo_.mean for one in reg.members_])
    np.testing.assert_allclose(found.mean, W @ means, rtol=1e-9)
    scores = np.stack([np.exp(one.loo_.log_score) for one in reg.members_])
    np.testing.assert_allclose(found.log_score, np.log(W @ scores), rtol=1e-9)
    parts = reg.influence(X[:2])
    expected = sum(w * one.influence(X[:2]) for w, one in zip(W, reg.members_, strict=True))
    torch.testing.assert_close(parts, expected, rtol=1e-9, atol=1e-12)


def test_more_data_and_other_data_go_to_all_members(regression: tuple[linnet.TangentRegressor, Tensor, Tensor]) -> None:
    reg, X, _ = regression
    new, z = make_numbers(5)
    for other in (reg.condition(new, z), reg.refit(new, z)):
        assert len(other.members_) == 3 and other.weights_.tolist() == W.tolist()
        assert not torch.allclose(other.predict(X), reg.predict(X))
    torch.testing.assert_close(
        reg.condition(new, z).predict(X),
        sum(w * one.condition(new, z).predict(X) for w, one in zip(W, reg.members_, strict=True)),
    )


def test_samples_have_the_moments_of_the_mixture(regression: tuple[linnet.TangentRegressor, Tensor, Tensor]) -> None:
    reg, X, _ = regression
    k = 4000
    drawn = reg.sample(X[:3], k, seed=1)
    assert drawn.shape == (k, 3)
    mean, cov = reg.predict(X[:3], return_cov=True)
    # Five standard errors of a mean and, with a kurtosis of at most 9, of a variance.
    assert bool(((drawn.mean(0) - mean).abs() < 5 * (cov.diagonal() / k).sqrt()).all())
    assert bool(((drawn.var(0) / cov.diagonal() - 1).abs() < 5 * math.sqrt(8 / k)).all())
    torch.testing.assert_close(reg.sample(X[:3], 5, seed=1), reg.sample(X[:3], 5, seed=1))
    assert reg.sample(X[:3].numpy(), 2, noise=True).shape == (2, 3)
    with pytest.raises(ValueError, match="k is a number of samples"):
        reg.sample(X, 0)


def test_draws_are_shared_in_proportion() -> None:
    w = np.array([0.55, 0.25, 0.2, 0.0])
    total = np.zeros(4)
    for seed in range(400):
        counts = share_draws(3, w, torch.Generator().manual_seed(seed))
        assert sum(counts) == 3 and (np.abs(np.array(counts) - 3 * w) < 1).all()
        total += counts
    assert np.abs(total / 1200 - w).max() < 5 * 0.5 / math.sqrt(1200)


@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_averages(classes: int) -> None:
    X, y = make_labels(classes=classes)
    outputs = 1 if classes == 2 else 3
    clf = linnet.TangentClassifier(make_networks(outputs), inference="laplace").fit(X, y)
    p = clf.predict_proba(X)
    torch.testing.assert_close(p, sum(one.predict_proba(X) for one in clf.members_) / 3, rtol=1e-9, atol=1e-12)
    assert clf.classes_.tolist() == list(range(classes))
    assert clf.predict(X).tolist() == p.argmax(1).tolist()
    f = clf.decision_function(X)
    back = torch.sigmoid(f) if classes == 2 else f.softmax(1)
    torch.testing.assert_close(back, p[:, 1] if classes == 2 else p, rtol=1e-9, atol=1e-12)
    mean, cov = clf.predict_logits(X)
    _, std = clf.predict_logits(X, return_std=True)
    assert mean.shape == (24, outputs) and cov.shape == (24, outputs, outputs)
    torch.testing.assert_close(cov.diagonal(dim1=1, dim2=2), std**2, rtol=1e-9, atol=1e-12)
    assert clf.sample(X[:2], 4).shape == (4, 2, outputs)
    assert clf.refit(X[:12], y[:12]).predict_proba(X).shape == p.shape
    assert 0 <= clf.score(X.numpy(), y.numpy()) <= 1
    names = np.array(["cat", "dog", "elk"])[y.numpy()]
    assert clone(clf).fit(X.numpy(), names).predict(X.numpy()).dtype.kind == "U"


def test_laplace_mixes_error_bars_probabilities_and_evidence() -> None:
    X, y = make_labels()
    la = linnet.Laplace(make_networks(3)).fit(X, y)
    torch.testing.assert_close(la.predict_proba(X), sum(one.predict_proba(X) for one in la.members_) / 3)
    logs = np.array([one.log_evidence() for one in la.members_])
    assert la.log_evidence() == pytest.approx(np.logaddexp.reduce(logs) - math.log(3))
    assert la.tune(prior="layerwise") is la
    assert la.log_evidence() == pytest.approx(la.log_evidence_)
    assert la.sample(X[:2], 5).shape == (5, 2, 3)
    X, y = make_numbers()
    la = linnet.Laplace(make_networks(), "regression").fit(X, y)
    mean, std = la.predict(X, return_std=True, noise=True)
    parts = torch.stack([one.predict(X) for one in la.members_])
    torch.testing.assert_close(mean, parts.mean(0))
    within = torch.stack([one.predict(X, return_std=True, noise=True)[1] ** 2 for one in la.members_]).mean(0)
    torch.testing.assert_close(std**2, within + parts.var(0, correction=0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.predict_mean(X), mean)
    at = X[:2].clone().requires_grad_()
    la.predict(at, return_std=True)[1].sum().backward()
    assert at.grad is not None and bool(at.grad.isfinite().all())


def test_members_without_weight_are_not_asked() -> None:
    X, y = make_numbers()
    reg = linnet.TangentRegressor(make_networks(), weights=(0, 1, 0)).fit(X, y)
    reg.members_[0].predict = None  # would raise if it were called
    mean, std = reg.predict(X, return_std=True)
    other, bars = reg.members_[1].predict(X, return_std=True)
    torch.testing.assert_close((mean, std), (other, bars))


# scikit-learn, files, conformal predictions.


def test_conventions_of_scikit_learn() -> None:
    X, y = (t.numpy() for t in make_numbers(30))
    networks = make_networks()
    reg = linnet.TangentRegressor(networks, prior="shared")
    assert reg.get_params()["model"] is networks
    other = clone(reg)
    assert other.model[0] is not networks[0] and other.weights == "uniform"
    search = GridSearchCV(reg, {"prior": ["shared", "balanced"], "weights": ["uniform", "evidence"]}, cv=2).fit(X, y)
    assert len(search.best_estimator_.members_) == 3 and search.predict(X).shape == (30,)
    assert reg.fit(X, y).n_features_in_ == 2
    reg.set_params(model=networks[0]).fit(X, y)
    assert reg.predict(X, return_std=True)[1].shape == (30,)
    reg.set_params(model=networks).fit(X, y)
    assert "lin_" not in vars(reg) and copy.deepcopy(reg).predict(X).shape == (30,)


@pytest.mark.parametrize("kind", ["regressor", "classifier", "laplace"])
def test_files_hold_all_members(kind: str, tmp_path: object) -> None:
    path = f"{tmp_path}/ensemble.safetensors"
    X, y = make_numbers() if kind == "regressor" else make_labels()
    networks = make_networks(1 if kind == "regressor" else 3)
    made = {
        "regressor": lambda: linnet.TangentRegressor(networks, weights="evidence"),
        "classifier": lambda: linnet.TangentClassifier(networks, weights=[3, 1, 1]),
        "laplace": lambda: linnet.Laplace(networks),
    }[kind]().fit(X, y)
    made.save(path)
    found = linnet.load(path, copy.deepcopy(networks))
    assert found.weights == made.weights and len(found.members_) == 3
    np.testing.assert_allclose(found.weights_, made.weights_, rtol=1e-12)
    if kind == "regressor":
        torch.testing.assert_close(found.predict(X, return_std=True), made.predict(X, return_std=True))
    else:
        torch.testing.assert_close(found.predict_proba(X), made.predict_proba(X))
    torch.testing.assert_close(found.sample(X, 3), made.sample(X, 3))
    for wrong in (networks[0], networks[:2]):
        with pytest.raises(ValueError, match="holds an ensemble of 3 networks, so load takes a list"):
            linnet.load(path, wrong)
    with pytest.raises(ValueError, match="was fitted around other weights"):
        linnet.load(path, networks[::-1])
    made.members_[0].save(path)
    with pytest.raises(ValueError, match="was fitted with one network"):
        linnet.load(path, networks)


def test_folders_in_the_style_of_hugging_face_hold_ensembles(tmp_path: object) -> None:
    pytest.importorskip("huggingface_hub")
    X, y = make_numbers()
    networks = make_networks()
    reg = linnet.TangentRegressor(networks).fit(X, y)
    reg.save_pretrained(f"{tmp_path}/adapter")
    assert "list of 3 networks" in Path(f"{tmp_path}/adapter/README.md").read_text()
    found = linnet.TangentRegressor.from_pretrained(f"{tmp_path}/adapter", model=networks)
    torch.testing.assert_close(found.predict(X), reg.predict(X))
    with pytest.raises(ValueError, match="an ensemble has several"):
        reg.save_pretrained(f"{tmp_path}/other", with_network=True)


def test_inputs_are_written_once(tmp_path: object) -> None:
    from linnet._common import files

    X, y = make_numbers()
    path = f"{tmp_path}/one.safetensors"
    linnet.TangentRegressor(make_networks(), solver="function").fit(X, y).save(path)
    tensors, _ = files.load(path, kind=["ensemble"])
    assert sum(bool(torch.equal(t, X)) for t in tensors.values() if t.shape == X.shape) == 1


def test_conformal_intervals_and_sets_of_ensembles(tmp_path: object) -> None:
    X, y = make_numbers(60)
    reg = linnet.TangentRegressor(make_networks()).fit(X[:20], y[:20])
    calibrated = Conformal(reg).calibrate(X[20:], y[20:])
    lower, upper = calibrated.predict_interval(X[:5], level=0.9)
    assert bool((lower < upper).all())
    calibrated.save(f"{tmp_path}/c.safetensors")
    again = Conformal.load(f"{tmp_path}/c.safetensors", reg)
    torch.testing.assert_close(again.predict_interval(X[:5], level=0.9), (lower, upper))
    other = linnet.TangentRegressor(make_networks()[:2]).fit(X[:20], y[:20])
    with pytest.raises(ValueError, match="was calibrated for another fit"):
        Conformal.load(f"{tmp_path}/c.safetensors", other)
    with pytest.raises(ValueError, match="is not fitted yet"):
        Conformal(linnet.TangentRegressor(make_networks()))
    X, y = make_labels(60)
    la = linnet.Laplace(make_networks(3)).fit(X[:20], y[:20])
    assert Conformal(la).calibrate(X[20:], y[20:]).predict_set(X[:5]).shape == (5, 3)


@pytest.mark.parametrize("outputs", [1, 3])
def test_report_shows_the_mixture_and_its_networks(outputs: int, tmp_path: object) -> None:
    X, y = make_numbers() if outputs == 1 else make_labels()
    doors = (linnet.TangentRegressor,) if outputs == 1 else (linnet.TangentClassifier, linnet.Laplace)
    for door in doors:
        estimator = door(make_networks(outputs), weights=[1, 2, 1]).fit(X, y)
        for test in ((X, y), (None, None)):
            linnet.report.write(f"{tmp_path}/report.html", estimator, *test, train=(X, y))
            page = Path(f"{tmp_path}/report.html").read_text()
            assert "around 3 networks" in page and "0.25, 0.5, 0.25" in page and "of the first network" in page


# Errors.


def test_errors_say_what_an_ensemble_takes() -> None:
    X, y = make_numbers()
    networks = make_networks()
    with pytest.raises(ValueError, match="The list of networks is empty"):
        linnet.TangentRegressor([]).fit(X, y)
    with pytest.raises(TypeError, match="entry 1 is a NoneType"):
        linnet.TangentRegressor([networks[0], None]).fit(X, y)
    with pytest.raises(TypeError, match=r"Entry 1 of the networks is an OrderedDict.*load_state_dict"):
        linnet.Laplace([networks[0], networks[0].state_dict()]).fit(X, y)
    with pytest.raises(ValueError, match="need the same outputs; these have 1, 3 outputs"):
        linnet.TangentRegressor([networks[0], *make_networks(3, 1)]).fit(X, y)
    with pytest.raises(ValueError, match="need the same outputs; these have 3, 4 outputs"):
        linnet.Laplace([*make_networks(3, 1), *make_networks(4, 1)]).fit(*make_labels())
    for weights, words in (
        ("best", "'uniform', 'evidence' or a weight for each"),
        ([1, 1], "3 networks, so weights needs a weight for each"),
        ([1, -1, 1], "must not be negative"),
        ([0, 0, 0], "all zero"),
    ):
        with pytest.raises(ValueError, match=words):
            linnet.TangentRegressor(networks, weights=weights).fit(X, y)
    with pytest.raises(TypeError, match=r"torch.nn.Module; got a list"):
        linnet.TangentGLM(networks, "poisson").fit(X, y.abs().round())
    reg = linnet.TangentRegressor(networks)
    with pytest.raises(AttributeError, match="no attribute 'lin_'"):
        reg.lin_  # noqa: B018
    reg.fit(X, y)
    for name in ("lin_", "posterior_", "delta_", "layer_relevance_"):
        with pytest.raises(AttributeError, match=rf"ensemble of 3 networks.*members_\[0\].{name}"):
            getattr(reg, name)
    with pytest.raises(AttributeError, match="Ask one of its members"):
        reg.to_module()
