"""Predictions as columns of a table: every number beside what the estimator itself says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import linnet
from linnet import metrics
from linnet.cli.commands.predict import predict
from linnet.cli.data_files import Examples
from linnet.cli.task import index_labels
from linnet.report import make_classes, make_numbers, score_outcome
from tests.support.command_cases import done, read_table
from tests.support.counted import Counting
from tests.support.drawn import double, normal

Z = norm.ppf(0.975)
X, NEW = normal(30, 3, seed=1), normal(12, 3, seed=2)
DATA = Examples(NEW, None, "")


def network(outputs):
    return double(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)))


def numbers(estimator, targets):
    return predict(estimator, DATA, classes=[], targets=targets)


def check_interval(columns, ending, mean, std, total):
    for name, expected in (
        ("mean", mean),
        ("std", std),
        ("std_observed", total),
        ("low95", mean - Z * total),
        ("high95", mean + Z * total),
    ):
        np.testing.assert_allclose(columns[f"{name}{ending}"], expected, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["adapted", "laplace"])
def test_one_number(kind):
    y = X[:, 0].sin() + 0.3 * X[:, 1]
    found = (
        linnet.TangentRegressor(network(1), noise=3.0).fit(X, y)
        if kind == "adapted"
        else linnet.Laplace(network(1), "regression", "full", prior=0.5, noise=3.0).fit(X, y)
    )
    told = numbers(found, ["y"])
    mean, std = (np.asarray(part) for part in found.predict(NEW, return_std=True))
    total = np.sqrt(std**2 + 3.0)
    assert list(told.columns) == ["example", "mean", "std", "std_observed", "low95", "high95"]
    assert told.columns["example"].tolist() == list(range(12))
    check_interval(told.columns, "", mean, std, total)
    np.testing.assert_allclose(told.std, total, rtol=1e-12)
    target = np.asarray(NEW[:, 0].sin())
    scores = told.score(target[:, None], [], "")
    assert scores == metrics.regression(mean, told.std, target)
    assert scores["coverage"] == np.mean(np.abs(mean - target) <= Z * total)


def test_several_numbers():
    found = linnet.TangentRegressor(network(2), noise=0.04).fit(X, X[:, :2])
    told = numbers(found, ["a", "b"])
    mean, std = (np.asarray(part) for part in found.predict(NEW, return_std=True))
    total = np.asarray(found.predict(NEW, return_std=True, noise=True)[1])
    assert len(told.columns) == 11
    for j, name in enumerate("ab"):
        check_interval(told.columns, f"_{name}", mean[:, j], std[:, j], total[:, j])
    outputs = torch.arange(24.0).view(12, 2)
    outcome = make_numbers(told.mean, told.std, np.asarray(NEW[:, 1:]), ["a", "b"], outputs)
    assert outcome.names == ["a", "b"] and np.array_equal(outcome.before, outputs)
    np.testing.assert_array_equal(outcome.std, told.std)
    np.testing.assert_array_equal(outcome.target, NEW[:, 1:])
    assert make_numbers(told.mean, told.std, np.asarray(NEW[:, 1:]), ["a", "b"], outputs[:, :1]).before is None


CLASSES = ["low", "middle", "high"]  # not sorted: the columns are in the order of the outputs


@pytest.mark.parametrize("kind", ["laplace", "vi", "error bars"])
def test_three_classes(kind):
    y = (X[:, 0] > -0.5).long() + (X[:, 0] > 0.5).long()
    if kind == "error bars":
        found = linnet.Laplace(network(3), "classification", "full", prior=0.5).fit(X, y)
        std = np.asarray(found.predict(NEW, return_std=True)[1])
    else:
        labels = np.array(CLASSES)[y]
        found = linnet.TangentClassifier(network(3), inference=kind, classes=CLASSES, prior=0.5).fit(X, labels)
        std = np.sqrt(np.diagonal(np.asarray(found.predict_logits(NEW)[1]), axis1=1, axis2=2))
    told = predict(found, DATA, classes=CLASSES, targets=[])
    p = np.asarray(found.predict_proba(NEW))
    best = p.argmax(1)
    assert len(set(best)) > 1 and std.shape == (12, 3)
    columns = told.columns
    assert list(columns) == ["example", "prediction", "probability", "logit_std", "p_low", "p_middle", "p_high"]
    assert columns["prediction"].tolist() == [CLASSES[i] for i in best]
    np.testing.assert_array_equal(columns["probability"], p.max(1))
    np.testing.assert_allclose(columns["logit_std"], [row[i] for row, i in zip(std, best, strict=True)], rtol=1e-12)
    for j, name in enumerate(CLASSES):
        np.testing.assert_array_equal(columns[f"p_{name}"], p[:, j])
    target = np.array(CLASSES)[np.arange(12) % 3]
    assert told.score(target[:, None], CLASSES, "") == metrics.classification(p, np.arange(12) % 3)
    outcome = make_classes(p, index_labels(target, CLASSES, ""), CLASSES, torch.zeros(12, 3))
    assert outcome.labels.tolist() == list(np.arange(12) % 3) and np.allclose(outcome.before, 1 / 3)


@pytest.mark.parametrize("kind", ["laplace", "error bars"])
def test_one_logit_for_two_classes(kind):
    y = (X[:, 0] > 0).long()
    if kind == "error bars":
        found = linnet.Laplace(network(1), "classification", "full", prior=0.5).fit(X, y)
        std = np.asarray(found.predict(NEW, return_std=True)[1]).reshape(-1)
    else:
        found = linnet.TangentClassifier(network(1), inference="laplace", classes=[0, 1], prior=0.5).fit(X, y)
        std = np.sqrt(np.asarray(found.predict_logits(NEW)[1])).reshape(-1)
    told = predict(found, DATA, classes=[0, 1], targets=[])
    p = np.asarray(found.predict_proba(NEW))
    assert set(told.columns["prediction"].tolist()) == {0, 1}  # the one logit speaks for both
    np.testing.assert_allclose(told.columns["logit_std"], std, rtol=1e-12)
    np.testing.assert_array_equal(told.columns["p_1"], p[:, 1])
    assert told.columns["prediction"].tolist() == (p[:, 1] > 0.5).astype(int).tolist()


def test_a_mode_has_no_standard_deviation():
    found = linnet.TangentClassifier(network(2), inference="map").fit(X, (X[:, 0] > 0).long())
    named = Examples(NEW, None, "", names=[f"{i}.png" for i in range(12)])
    told = predict(found, named, classes=[0, 1], targets=[])
    assert list(told.columns) == ["example", "prediction", "probability", "p_0", "p_1"]
    assert told.columns["example"].tolist() == named.names


def test_the_network_as_it_was():
    f, y = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), index_labels(np.array(["b", "a"]), ["a", "b"], "")
    p = np.exp(f.numpy()) / np.exp(f.numpy()).sum(1, keepdims=True)

    def score(outcome):
        return score_outcome(outcome)["the network alone"]

    assert score(make_classes(p, y, ["a", "b"], f)) == pytest.approx(metrics.classification(p, np.array([1, 0])))
    q = 1 / (1 + np.exp(-np.array([2.0, -1.0])))
    one = score(make_classes(p, y, ["a", "b"], torch.tensor([[2.0], [-1.0]])))
    assert one == pytest.approx(metrics.classification(np.stack([1 - q, q], 1), np.array([1, 0])))
    target = np.array([[1.0, 0.0], [0.0, 0.0]])
    assert score(make_numbers(target, target + 1, target, [], f)) == {"rmse": pytest.approx(np.sqrt(5 / 4))}


WIDE = normal(30, 4, seed=1)  # four columns, as `Counting` takes them


@pytest.mark.parametrize("several", [False, True])
def test_without_error_bars_numbers_take_one_pass(several, monkeypatch):
    outputs = 2 if several else 1
    found = linnet.TangentRegressor(double(Counting(outputs, 16)), noise=0.1).fit(
        WIDE, WIDE[:, :2] if several else WIDE[:, 0]
    )
    many = Examples(normal(4000, 4, seed=3), None, "")
    monkeypatch.setattr(Counting, "seen", 0)
    told = predict(found, many, classes=[], targets=list("ab")[:outputs], error_bars=False)
    assert 1 <= Counting.seen / 4000 < 1.2
    assert list(told.columns) == ["example", *(["mean_a", "mean_b"] if several else ["mean"])]
    mean = np.asarray(found.predict(many.X))
    np.testing.assert_allclose(told.mean, mean, rtol=1e-12)
    target = mean + 2.0
    assert told.score(target, [], "") == {"rmse": pytest.approx(2.0)}


@pytest.mark.parametrize("kind", ["laplace", "error bars", "map", "ensemble"])
def test_without_error_bars_classes_take_one_pass(kind, monkeypatch):
    y = (WIDE[:, 0] > 0).long()
    if kind == "error bars":
        found = linnet.Laplace(double(Counting(2, 16)), prior=0.5).fit(WIDE, y)
    else:
        model = double(Counting(2, 16))
        models = [model, double(Counting(2, 16))] if kind == "ensemble" else model
        inference = "laplace" if kind == "ensemble" else kind
        found = linnet.TangentClassifier(models, inference=inference, prior=0.5).fit(WIDE, y)
    many = Examples(normal(4000, 4, seed=3), None, "")
    monkeypatch.setattr(Counting, "seen", 0)
    told = predict(found, many, classes=[0, 1], targets=[], error_bars=False)
    assert 1 <= Counting.seen / 4000 / (2 if kind == "ensemble" else 1) < 1.2
    assert list(told.columns) == ["example", "prediction", "probability", "p_0", "p_1"]
    if kind == "error bars":
        expected = torch.as_tensor(found.predict(many.X)).softmax(1)
    else:
        members = found.members_ if kind == "ensemble" else [found]
        expected = sum(member.predict_logits(many.X)[0].softmax(1) for member in members) / len(members)
    np.testing.assert_allclose(told.probabilities, expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["laplace", "vi", "error bars"])
def test_classes_with_error_bars_take_one_pass_too(kind, monkeypatch):
    y = (WIDE[:, 0] > 0).long()
    model = double(Counting(2, 16))
    made = linnet.Laplace(model, prior=0.5) if kind == "error bars" else linnet.TangentClassifier(model, inference=kind)
    found = made.fit(WIDE, y)
    monkeypatch.setattr(Counting, "seen", 0)
    told = predict(found, Examples(normal(4000, 4, seed=3), None, ""), classes=[0, 1], targets=[])
    assert 1 <= Counting.seen / 4000 < 1.2
    assert "logit_std" in told.columns


def test_the_command_without_error_bars(made, tmp_path):
    line = ["predict", "--run", made / "run", "--data", made / "test.csv", "--out", tmp_path / "p.csv"]
    said = done(*line, "--no-error-bars")
    assert list(read_table(tmp_path / "p.csv")) == ["example", "target", "mean"]
    assert "rmse" in said and "nll" not in said and "Jacobian (30 x" in said
