"""Metrics of predictions, against numbers worked out by hand, scikit-learn and laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, root_mean_squared_error

from linnet import metrics
from tests.support.drawn import normal

SCORES = (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece)


def drawn(n: int, c: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(c, (n,), generator=torch.Generator().manual_seed(seed))
    return (2 * normal(n, c, seed=seed)).softmax(1), labels


def test_classification_agrees_with_scikit_learn():
    p, y = drawn(200, 4)
    assert metrics.accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(1)), rel=1e-12)
    assert metrics.nll(p, y) == pytest.approx(log_loss(y, p.numpy()), rel=1e-9)
    expected = ((p.numpy() - np.eye(4)[y]) ** 2).sum(1).mean()
    assert metrics.brier(p, y) == pytest.approx(expected, rel=1e-12)


def test_calibration_error_by_hand():
    # Three confidences in three bins: 0.6 right, 0.7 wrong twice, 1 right.
    p = [[0.6, 0.4], [0.3, 0.7], [0.7, 0.3], [1.0, 0.0]]
    assert metrics.ece(p, [0, 0, 1, 0], bins=10) == pytest.approx((0.4 + 2 * 0.7 + 0) / 4, rel=1e-6)
    assert metrics.ece(p, [0, 0, 1, 0], bins=1) == pytest.approx(abs(3.0 / 4 - 2 / 4), rel=1e-6)
    assert metrics.ece([[1.0], [1.0]], [0, 0]) == 0


def test_calibration_error_of_a_calibrated_prediction_is_small():
    p = (2 * normal(20_000, 3)).softmax(1)
    y = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(1))[:, 0]
    assert metrics.ece(p, y) < 0.02  # the sampling error of 15 bins is about 0.01
    sharper = p.square() / p.square().sum(1, keepdim=True)
    assert metrics.ece(sharper, y) > 0.08


def test_rounding_above_one_is_not_taken_for_logits():
    p = torch.tensor([[1 + 1e-12, 0.0], [0.0, 1 + 1e-12]], dtype=torch.float64)
    assert metrics.ece(p, [0, 1]) == pytest.approx(0, abs=1e-7)


def test_certain_and_wrong_is_infinite():
    assert metrics.nll([[1.0, 0.0]], [1]) == math.inf
    assert metrics.nll([[1.0, 0.0]], [0]) == 0
    assert metrics.brier([[1.0, 0.0]], [1]) == 2


def test_bundle_of_classification():
    p, y = drawn(30, 3)
    found = metrics.classification(p, y, bins=5)
    assert found == {
        "accuracy": metrics.accuracy(p, y),
        "nll": metrics.nll(p, y),
        "brier": metrics.brier(p, y),
        "ece": metrics.ece(p, y, bins=5),
    }
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["float32", "array", "list", "gradient"])
def test_classification_takes_what_is_at_hand(score, kind):
    p, y = drawn(20, 3)
    forms = {
        "float32": (p.float(), y.int()),
        "array": (p.numpy(), y.numpy().astype("uint8")),
        "list": (p.tolist(), y.tolist()),
        "gradient": (p.clone().requires_grad_(), y),
    }
    assert score(*forms[kind]) == pytest.approx(score(p, y), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 6))
def test_order_of_examples_and_classes_does_not_matter(seed, n, c):
    p, y = drawn(n, c, seed)
    examples = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    classes = torch.randperm(c, generator=torch.Generator().manual_seed(seed))
    for score in SCORES:
        assert score(p[examples], y[examples]) == pytest.approx(score(p, y), rel=1e-6, abs=1e-7)
        assert score(p[:, classes], classes.argsort()[y]) == pytest.approx(score(p, y), rel=1e-6, abs=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_proper_scores_are_best_at_the_truth(seed, c):
    """Expected under p, the NLL and the Brier score of any q are no better than those of p."""
    p, q = (2 * normal(2, c, seed=seed)).softmax(1)
    for score in (metrics.nll, metrics.brier):
        of_p, of_q = (
            sum(weight * score(row[None], [label]) for label, weight in enumerate(p.tolist())) for row in (p, q)
        )
        assert of_p <= of_q + 1e-12


@pytest.mark.parametrize(
    ("p", "y", "error", "match"),
    [
        ([0.5, 0.5], [0, 1], ValueError, r"shape \(n, c\); got \(2,\). For two classes stack"),
        ([[0.5, 0.5]], [0, 1], ValueError, r"labels must have shape \(1,\).*got \(2,\)"),
        ([[0.5, 0.5]], [[0]], ValueError, r"labels must have shape \(1,\).*got \(1, 1\)"),
        ([[0.5, 0.5]], [2], ValueError, r"from 0 to 1; got 2"),
        ([[0.5, 0.5]], [-1], ValueError, r"from 0 to 1; got -1"),
        ([[0.5, 0.5]], [1.0], TypeError, r"labels must be integers.*a list of torch.float64"),
        ([[0.5, 0.5]], ["a"], TypeError, r"native numbers; labels"),
        ([[1.0, 0.0], [1.5, -0.5]], [0, 0], ValueError, r"row 1 has the least entry -0.5 and the sum 1"),
        ([[1.0, 0.0], [3.0, 1.0]], [0, 0], ValueError, r"row 1 .* the sum 4. Logits need softmax"),
        ([[math.nan, 1.0]], [0], ValueError, r"probabilities must be finite; entry \[0, 0\] is nan"),
        ([[1j, 1.0]], [0], TypeError, r"probabilities must be real"),
        (torch.ones(0, 2), [], ValueError, r"at least one example; got shape \(0, 2\)"),
    ],
)
@pytest.mark.parametrize("score", SCORES)
def test_bad_probabilities_and_labels(score, p, y, error, match):
    with pytest.raises(error, match=match):
        score(p, y)


@pytest.mark.parametrize("bins", [0, -3, 2.5, True])
def test_bad_bins(bins):
    with pytest.raises(ValueError, match="bins must be a positive number"):
        metrics.ece([[0.5, 0.5]], [0], bins=bins)


def test_regression_against_torch_and_scikit_learn():
    mean, target = normal(40, 2), normal(40, 2, seed=1)
    std = normal(40, 2, seed=2).exp()
    assert metrics.rmse(mean, target) == pytest.approx(root_mean_squared_error(mean.flatten(), target.flatten()))
    expected = -torch.distributions.Normal(mean, std).log_prob(target).mean().item()
    assert metrics.gaussian_nll(mean, std, target) == pytest.approx(expected, rel=1e-12)
    assert metrics.gaussian_nll(mean, 2.0, target) == metrics.gaussian_nll(mean, torch.full_like(mean, 2), target)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_coverage_of_the_truth_is_the_level(level):
    n = 40_000
    found = metrics.coverage(np.zeros(n), 1.0, normal(n), level=level)
    assert found == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / n))  # four standard errors


def test_reliability_and_the_surest_by_hand():
    p = [[0.95, 0.05], [0.9, 0.1], [0.45, 0.55], [0.42, 0.58], [0.5, 0.5]]
    found = metrics.reliability(p, [0, 1, 1, 0, 0], bins=2)  # from a half on: all in one bin, but for what is equal
    np.testing.assert_allclose(found.confidence, [(0.95 + 0.9 + 0.55 + 0.58 + 0.5) / 5])
    np.testing.assert_allclose(found.accuracy, [3 / 5])
    found = metrics.reliability(p, [0, 1, 1, 0, 0], bins=10)
    assert found.count.tolist() == [3, 2] and found.count.dtype.kind == "i"
    np.testing.assert_allclose(found.accuracy, [2 / 3, 1 / 2])
    assert metrics.reliability([[1.0, 0.0]], [0]).count.tolist() == [1]  # the end belongs to the last bin
    np.testing.assert_allclose(metrics.kept_accuracy(p, [0, 1, 1, 0, 0]), [1, 1 / 2, 1 / 3, 1 / 2, 3 / 5])


def test_coverage_by_hand():
    target = [0.0, 1.9, -1.9, 2.1]
    assert metrics.coverage([0.0] * 4, 1.0, target) == 0.75
    assert metrics.coverage([0.0] * 4, 1.0, target, level=0.99) == 1
    assert metrics.coverage([0.0] * 4, [1.0, 0.5, 1.0, 2.0], target) == 0.75


def test_bundle_of_regression():
    mean, target = normal(10), normal(10, seed=1)
    found = metrics.regression(mean, 1.0, target, level=0.5)
    assert found == {
        "rmse": metrics.rmse(mean, target),
        "nll": metrics.gaussian_nll(mean, 1.0, target),
        "coverage": metrics.coverage(mean, 1.0, target, level=0.5),
    }


@pytest.mark.parametrize(
    ("mean", "std", "target", "match"),
    [
        (torch.zeros(3), 1.0, torch.zeros(3, 1), r"mean and target must have the same shape; got \(3,\) and \(3, 1\)"),
        (torch.zeros(3), torch.ones(2), torch.zeros(3), r"the mean's shape \(3,\); got \(2,\)"),
        (torch.zeros(3), [1.0, 0.0, 1.0], torch.zeros(3), r"std must be positive; the least entry is 0"),
        (torch.zeros(3), -1, torch.zeros(3), r"std must be positive; the least entry is -1"),
        (torch.zeros(3), 1.0, [0.0, math.inf, 0.0], r"target must be finite; entry \[1\] is inf"),
        (torch.zeros(1, 1, 1), 1.0, torch.zeros(1, 1, 1), r"shape \(n,\) or \(n, c\); got \(1, 1, 1\)"),
        (0.0, 1.0, 0.0, r"shape \(n,\) or \(n, c\); got \(\)"),
    ],
)
def test_bad_regression(mean, std, target, match):
    for score in (metrics.gaussian_nll, metrics.coverage):
        with pytest.raises(ValueError, match=match):
            score(mean, std, target)


@pytest.mark.parametrize("level", [0, 1, 95])
def test_bad_level(level):
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        metrics.coverage([0.0], 1.0, [0.0], level=level)


@pytest.mark.parametrize("score", SCORES)
def test_numbers_in_single_precision_are_scored_in_double(score):
    p, y = drawn(200, 5)
    p = p.float()
    assert score(p, y) == score(p.double(), y)


def test_regressions_in_single_precision_are_scored_in_double():
    """Errors that a square in float32 would lose beside a large one."""
    mean, std, target = torch.zeros(3), torch.full((3,), 0.1), torch.tensor([1e4, 1.0, 1.0])
    assert metrics.rmse(mean, target) == math.sqrt((1e8 + 2) / 3)
    for score in (metrics.gaussian_nll, metrics.coverage):
        assert score(mean, std, target) == score(mean.double(), std.double(), target.double())
