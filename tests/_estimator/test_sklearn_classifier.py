"""The classifier among scikit-learn's: its own checks, and its tools with a given network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data, parametrize_with_checks
from torch import nn

from linnet.tangent import TangentClassifier
from tests.support.drawn import double, normal

DRAWN = {
    "check_sample_weight_equivalence_on_dense_data": "VI averages over draws, and repeated examples have their own"
}


@parametrize_with_checks([TangentClassifier()], expected_failed_checks=lambda _: DRAWN)
@pytest.mark.filterwarnings("ignore:The evidence of these")  # some checks draw labels
def test_scikit_learns_own_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)  # raises where the estimator does not keep to the rules


@pytest.mark.parametrize("inference", ["map", "laplace"])
def test_weights_are_repetitions_by_scikit_learns_own_check(inference: Any) -> None:
    given = TangentClassifier(inference=inference, prior=1.0)
    check_sample_weight_equivalence_on_dense_data("TangentClassifier", given)
    X, y = data()
    assert not np.allclose(given.fit(X, y).predict_proba(X), given.fit(X, y, np.arange(40)).predict_proba(X))


def network(outputs: int = 2) -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)))


def data(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    X = normal(n, 3).numpy()
    return X, np.where(X[:, 0] + 0.3 * X[:, 1] ** 2 > 0.2, "yes", "no")


def test_clones_have_the_settings_and_nothing_else() -> None:
    X, y = data()
    fitted = TangentClassifier(network(), prior=0.5, link="mc").fit(X, y)
    copied = clone(fitted)
    assert not hasattr(copied, "posterior_") and copied.prior == 0.5 and copied.link == "mc"
    assert copied.get_params().keys() == fitted.get_params().keys()
    np.testing.assert_allclose(copied.fit(X, y).predict_proba(X), fitted.predict_proba(X))


@pytest.mark.parametrize("inference", ["map", "laplace", "vi"])
def test_a_pipeline_and_cross_validation(inference: str) -> None:
    X, y = data()
    pipeline = make_pipeline(StandardScaler(), TangentClassifier(network(), inference=inference))
    assert set(pipeline.fit(X, y).predict(X)) <= {"no", "yes"}
    p = cross_val_predict(pipeline, X, y, cv=3, method="predict_proba")
    np.testing.assert_allclose(p.sum(1), 1)
    assert float(((p[:, 1] > 0.5) == (y == "yes")).mean()) > 0.7


def test_a_grid_search_over_priors() -> None:
    X, y = data()
    search = GridSearchCV(TangentClassifier(network()), {"prior": [1e-8, "shared"]}, cv=3, error_score="raise")
    assert search.fit(X, y).best_params_ == {"prior": "shared"}
    assert search.best_estimator_.classes_.tolist() == ["no", "yes"]
    assert search.score(X, y) > 0.8
