"""The regressor among scikit-learn's: its own checks, and its tools with a given network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import make_scorer, mean_squared_error
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from linnet import TangentRegressor
from tests.support.drawn import double, normal


@parametrize_with_checks([TangentRegressor()])
def test_scikit_learns_own_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)  # raises where the estimator does not keep to the rules


def network(outputs: int = 1) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)))


def data(n: int = 60, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    X = normal(n, 3)
    y = torch.sin(X[:, :outputs]) + 0.1 * normal(n, outputs, seed=1)
    return X.numpy(), (y[:, 0] if outputs == 1 else y).numpy()


# A given network.


def test_clones_have_the_settings_and_nothing_else() -> None:
    model, (X, y) = network(), data()
    fitted = TangentRegressor(model, prior=0.5, tolerance=1e-4).fit(X, y)
    copied = clone(fitted)
    assert not hasattr(copied, "posterior_")
    assert copied.get_params().keys() == fitted.get_params().keys()
    assert copied.prior == 0.5 and copied.tolerance == 1e-4
    for name, tensor in model.state_dict().items():
        assert torch.equal(copied.model.state_dict()[name], tensor)
    np.testing.assert_allclose(copied.fit(X, y).predict(X), fitted.predict(X))


def test_parameters_can_be_set() -> None:
    reg = TangentRegressor(network()).set_params(prior="ntk", noise=0.2)
    assert reg.get_params()["prior"] == "ntk" and reg.noise == 0.2
    with pytest.raises(ValueError, match="Invalid parameter 'scale'"):
        reg.set_params(scale=1.0)


def test_a_grid_search_over_priors_and_noise() -> None:
    X, y = data()
    grid = {"prior": ["shared", 1e-6], "noise": ["evidence", 0.01]}
    search = GridSearchCV(TangentRegressor(network()), grid, cv=3, error_score="raise").fit(X, y)
    assert search.best_params_["prior"] == "shared" and search.best_score_ > 0.5
    assert search.predict(X).shape == (60,)
    np.testing.assert_allclose(search.predict(X), search.best_estimator_.predict(X))


def test_a_pipeline() -> None:
    X, y = data(outputs=2)
    scaled = StandardScaler().fit(1000 * X).transform(1000 * X)
    pipeline = make_pipeline(StandardScaler(), TangentRegressor(network(2), noise=0.1))
    found = pipeline.fit(1000 * X, y).predict(1000 * X)
    np.testing.assert_allclose(found, TangentRegressor(network(2), noise=0.1).fit(scaled, y).predict(scaled))
    mean, std = pipeline.predict(1000 * X, return_std=True)
    assert mean.shape == std.shape == (60, 2)
    names = {"tangentregressor__prior": [1e-6, 1.0]}
    search = GridSearchCV(pipeline, names, cv=3, scoring="neg_mean_squared_error", error_score="raise").fit(X, y)
    assert search.best_params_ == {"tangentregressor__prior": 1.0}


def test_cross_validation() -> None:
    X, y = data()
    reg = TangentRegressor(network(), prior=1.0, noise=0.05)
    found = cross_val_predict(reg, X, y, cv=len(X))
    # Leaving one out at a time is what the closed form gives.
    np.testing.assert_allclose(found, reg.fit(X, y).loo_.mean, rtol=1e-7, atol=1e-8)
    scores = cross_val_score(reg, X, y, cv=3, scoring=make_scorer(mean_squared_error), error_score="raise")
    assert scores.shape == (3,) and bool((scores < 0.5 * np.var(y)).all())


def test_scores_are_those_of_a_regressor() -> None:
    X, y = data()
    reg = TangentRegressor(network()).fit(X, y)
    want = 1 - np.square(y - reg.predict(X)).sum() / np.square(y - y.mean()).sum()
    assert reg.score(X, y) == pytest.approx(want)
    assert reg.n_features_in_ == 3
