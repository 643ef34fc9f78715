"""Coverage of conformal intervals and sets against its exact distribution; ranks, files, errors."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

import linnet
from linnet import Laplace, TangentClassifier, TangentGLM, TangentRegressor
from linnet.conformal import Conformal, find_rank, sum_more_probable
from linnet.likelihoods import Ordinal
from tests.support.drawn import double, normal

CALIBRATION, TEST = 79, 1500


def net(outputs: int, seed: int = 0) -> nn.Module:
    return double(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)), seed)


def numbers(n: int, seed: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """Noise with heavy tails that grows to one side: no Gaussian noise of one variance."""
    X = normal(n, 2, seed=seed)
    t = torch.distributions.StudentT(2.5)
    torch.manual_seed(seed)
    noise = t.sample((n, outputs)).double() * (0.1 + 0.3 * (X[:, :1] > 0))
    y = torch.sin(2 * X[:, :1]) * torch.arange(1, outputs + 1) + noise
    return X, y[:, 0] if outputs == 1 else y


def labels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    X = normal(n, 2, seed=seed)
    logits = torch.stack([2 * X[:, 0], X[:, 1], -X[:, 0]], 1)
    return X, torch.distributions.Categorical(logits=logits).sample()


def check_covered(covered: Tensor, n: int, level: float) -> None:
    """Raise unless as many are covered as the beta-binomial distribution allows, but for one time in a million."""
    k = ceil((n + 1) * Fraction(repr(level)))
    law = scipy.stats.betabinom(len(covered), k, n + 1 - k)
    low, high = law.ppf(5e-7), law.isf(5e-7)
    assert low <= int(covered.sum()) <= high


def fitted(kind: str) -> tuple[Any, Any]:
    """An estimator that is wrong about its data, and a function that draws data."""
    if kind == "regressor":
        return TangentRegressor(net(1)).fit(*numbers(40, 0)), numbers
    if kind == "two outputs":

        def two(n: int, seed: int) -> tuple[Tensor, Tensor]:
            return numbers(n, seed, 2)

        return TangentRegressor(net(2)).fit(*two(40, 0)), two
    if kind == "laplace":
        return Laplace(net(1), "regression", prior=0.1, noise=0.001).fit(*numbers(40, 0)), numbers
    if kind == "own noise":
        X, y = numbers(40, 0)
        return TangentRegressor(net(1), noise=0.05 + X[:, 0].square()).fit(X, y), numbers
    if kind == "counts":

        def counts(n: int, seed: int) -> tuple[Tensor, Tensor]:
            X = normal(n, 2, seed=seed)
            torch.manual_seed(seed)
            return X, torch.poisson((2 + X[:, 0]).exp() * torch.distributions.Gamma(2.0, 2.0).sample((n,)).double())

        return TangentGLM(net(1), "poisson").fit(*counts(40, 0)), counts
    torch.manual_seed(0)
    if kind == "classifier":
        return TangentClassifier(net(3), inference="map").fit(*labels(40, 0)), labels
    if kind == "laplace of classes":
        return Laplace(net(3), prior=1.0).fit(*labels(40, 0)), labels
    return Laplace(net(1), Ordinal([-1.0, 1.0]), prior=1.0).fit(*labels(40, 0)), labels


NUMBERS = ["regressor", "two outputs", "laplace", "own noise", "counts"]
CLASSES = ["classifier", "laplace of classes", "ordinal"]
far = pytest.mark.filterwarnings("ignore:The network is far from a mode")


@far
@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("kind", NUMBERS)
def test_intervals_cover(kind: str, level: float) -> None:
    estimator, draw = fitted(kind)
    conformal = Conformal(estimator).calibrate(*draw(CALIBRATION, 1))
    X, y = draw(TEST, 2)
    lower, upper = conformal.predict_interval(X, level)
    assert lower.shape == upper.shape == y.shape
    inside = ((lower <= y) & (y <= upper)).reshape(TEST, -1)
    for column in inside.T:
        check_covered(column, CALIBRATION, level)


@far
@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("kind", CLASSES)
def test_sets_cover(kind: str, level: float) -> None:
    estimator, draw = fitted(kind)
    torch.manual_seed(1)
    conformal = Conformal(estimator).calibrate(*draw(CALIBRATION, 1))
    torch.manual_seed(2)
    X, y = draw(TEST, 2)
    found = conformal.predict_set(X, level)
    assert found.shape == (TEST, 3) and found.dtype == torch.bool
    assert bool(found.any(1).all())
    p = torch.as_tensor(estimator.predict_proba(X))
    scores = sum_more_probable(p, conformal._draw_shares(p, 1)).gather(1, y[:, None])[:, 0]
    # The most probable class is added where the score alone would leave a set empty.
    check_covered(scores <= conformal._quantile(level), CALIBRATION, level)
    covered = found.gather(1, y[:, None])[:, 0]
    assert int(covered.sum()) >= int((scores <= conformal._quantile(level)).sum())
    # Sets of a higher level hold those of a lower one.
    assert bool((conformal.predict_set(X, 0.95) >= found).all())


def test_coverage_over_many_calibrations() -> None:
    """The average coverage is k / (n + 1), and its spread over calibrations is that of the beta distribution."""
    estimator, draw = fitted("regressor")
    X, y = draw(6000, 3)
    mean, std = estimator.predict(X, return_std=True, noise=True)
    scores = ((y - mean).abs() / std).view(200, 30)
    level, n = 0.8, 14
    conformal = Conformal(estimator)
    covered = []
    for row in scores:
        conformal.scores_ = row[:n].sort().values
        covered.append(float((row[n:] <= conformal._quantile(level)).double().mean()))
    k = find_rank(n, level)
    law = scipy.stats.betabinom(16, k, n + 1 - k)
    assert abs(np.mean(covered) - k / (n + 1)) <= 5 * law.std() / 16 / np.sqrt(200)
    assert np.std(covered) == pytest.approx(law.std() / 16, rel=0.25)


def test_intervals_are_those_of_the_rank() -> None:
    estimator, draw = fitted("regressor")
    X, y = draw(9, 1)
    conformal = Conformal(estimator).calibrate(X, y)
    mean, std = estimator.predict(X, return_std=True, noise=True)
    q = ((y - mean).abs() / std).max()  # the ninth of nine
    lower, upper = conformal.predict_interval(X, 0.9)
    torch.testing.assert_close(upper, mean + q * std)
    torch.testing.assert_close(lower, mean - q * std)
    arrays = conformal.predict_interval(X.numpy(), 0.9)
    assert isinstance(arrays[0], np.ndarray)


@given(n=st.integers(1, 400), percent=st.integers(1, 99))
def test_ranks_in_whole_numbers(n: int, percent: int) -> None:
    level = percent / 100
    exact = -(-(n + 1) * percent // 100)
    if exact > n:
        with pytest.raises(ValueError, match=f"needs at least {-(-percent // (100 - percent))} examples, got {n}"):
            find_rank(n, level)
    else:
        assert find_rank(n, level) == exact


def test_calibration_and_predictions_of_each_seed_draw_for_themselves() -> None:
    estimator, _ = fitted("classifier")
    p = torch.full((50, 3), 1 / 3)
    drawn = [Conformal(estimator, seed=seed)._draw_shares(p, stream) for seed in (0, 1) for stream in (0, 1)]
    assert len({tuple(shares.tolist()) for shares in drawn}) == 4
    assert all(bool(((shares >= 0) & (shares < 1)).all()) for shares in drawn)


def test_too_few_examples() -> None:
    estimator, draw = fitted("regressor")
    conformal = Conformal(estimator).calibrate(*draw(20, 1))
    with pytest.raises(ValueError, match=r"level 0\.99 needs at least 99 examples, got 20"):
        conformal.predict_interval(draw(3, 2)[0], 0.99)
    for level in (0, 1, 1.5, True, "0.9"):
        with pytest.raises(ValueError, match="level is a probability between 0 and 1"):
            conformal.predict_interval(draw(3, 2)[0], level)  # type: ignore[arg-type]


def test_labels_of_any_kind() -> None:
    X, y = labels(60, 0)
    names = np.array(["a", "b", "c"])
    clf = TangentClassifier(net(3), inference="map", prior=0.5).fit(X, names[y])
    conformal = Conformal(clf).calibrate(X, names[y])
    assert conformal.classes_.tolist() == ["a", "b", "c"]
    assert conformal.predict_set(X.numpy(), 0.5).dtype == bool
    with pytest.raises(ValueError, match="Label 'd' is none of the classes"):
        conformal.calibrate(X, np.full(60, "d"))
    with pytest.raises(ValueError, match=r"need labels of shape \(60,\); got \(59,\)"):
        conformal.calibrate(X, names[y][:59])
    with pytest.raises(ValueError, match="predict_interval is for numbers"):
        conformal.predict_interval(X)


@far
@pytest.mark.parametrize("kind", ["regressor", "laplace of classes"])
def test_files(kind: str, tmp_path: Any) -> None:
    estimator, draw = fitted(kind)
    conformal = Conformal(estimator).calibrate(*draw(30, 1))
    X = draw(4, 2)[0]
    conformal.save(tmp_path / "calibration")
    estimator.save(tmp_path / "estimator")
    loaded = linnet.load(tmp_path / "estimator", estimator.model)
    again = Conformal.load(tmp_path / "calibration", loaded)
    ask = "predict_interval" if kind == "regressor" else "predict_set"
    for a, b in zip(getattr(again, ask)(X), getattr(conformal, ask)(X), strict=True):
        torch.testing.assert_close(a, b)
    other = type(estimator)(**estimator.get_params(deep=False)).fit(*draw(41, 5))
    with pytest.raises(ValueError, match="was calibrated for another fit"):
        Conformal.load(tmp_path / "calibration", other)
    if kind != "regressor":
        assert again.classes_.tolist() == [0, 1, 2]


def test_errors() -> None:
    estimator, draw = fitted("regressor")
    with pytest.raises(TypeError, match=r"Conformal takes a fitted TangentRegressor.*got Linear"):
        Conformal(nn.Linear(1, 1))
    with pytest.raises(NotFittedError, match="This TangentRegressor instance is not fitted yet"):
        Conformal(TangentRegressor(net(1)))
    conformal = Conformal(estimator)
    for call in (lambda: conformal.predict_interval(draw(3, 1)[0]), lambda: conformal.save("nowhere")):
        with pytest.raises(ValueError, match=r"call calibrate\(X, y\) first"):
            call()
    X, y = draw(20, 1)
    with pytest.raises(ValueError, match=r"have shape \(20,\), so the targets need the same; got \(19,\)"):
        conformal.calibrate(X, y[:19])
    y[3] = torch.nan
    with pytest.raises(ValueError, match="The score of calibration example 3 is not finite"):
        conformal.calibrate(X, y)
    with pytest.raises(ValueError, match="predict_set is for classes"):
        conformal.predict_set(X)
    with pytest.raises(AttributeError, match="There are no classes"):
        _ = conformal.classes_
    several = TangentClassifier(net(2), inference="map", prior=0.5).fit(X, (X > 0).long())
    with pytest.raises(NotImplementedError, match="one label of each example"):
        Conformal(several)
