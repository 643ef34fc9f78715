"""Standard deviations and intervals through scikit-learn's transformations of targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

from linnet import TangentRegressor
from linnet.interop.scikit_learn import TransformedTargetRegressor


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


X = np.random.default_rng(0).normal(size=(25, 2))
Y = 100 + 30 * np.sin(X[:, 0]) + 3 * X[:, 1]


@pytest.mark.parametrize("columns", [1, 2])
def test_standardized_targets(columns):
    y = Y if columns == 1 else np.stack([Y, 5 - 2 * Y], 1)
    both = TransformedTargetRegressor(TangentRegressor(net(columns)), transformer=StandardScaler()).fit(X, y)
    center, scale = y.mean(0), y.std(0)
    alone = TangentRegressor(net(columns)).fit(X, (y - center) / scale)
    mean, std = alone.predict(X, return_std=True, noise=True)
    found = both.predict(X, return_std=True, noise=True)
    np.testing.assert_allclose(found[0], mean * scale + center, rtol=1e-9)
    np.testing.assert_allclose(found[1], std * scale, rtol=1e-7)
    np.testing.assert_allclose(both.predict(X), found[0], rtol=1e-9)
    low, high = both.predict_interval(X, 0.9)
    np.testing.assert_allclose(high - low, 2 * 1.6448536269514722 * found[1], rtol=1e-7)


def test_intervals_of_logarithms():
    given = {"func": np.log, "inverse_func": np.exp, "check_inverse": False}
    both = TransformedTargetRegressor(TangentRegressor(net()), **given).fit(X, Y)
    mean, std = TangentRegressor(net()).fit(X, np.log(Y)).predict(X, return_std=True)
    low, high = both.predict_interval(X, 0.95, noise=False)
    np.testing.assert_allclose(low, np.exp(mean - 1.959963984540054 * std), rtol=1e-9)
    np.testing.assert_allclose(high, np.exp(mean + 1.959963984540054 * std), rtol=1e-9)
    with pytest.raises(ValueError, match=r"not a shift and a scale.*predict_interval"):
        both.predict(X, return_std=True)


def test_falling_transformations_have_ordered_intervals():
    turned = FunctionTransformer(np.negative, np.negative)
    both = TransformedTargetRegressor(TangentRegressor(net()), transformer=turned).fit(X, Y)
    low, high = both.predict_interval(X)
    assert (low < high).all() and (both.predict(X, return_std=True)[1] > 0).all()
