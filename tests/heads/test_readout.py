"""Readouts of features: what is taken for a constant."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from linnet.heads.readout import fit_readout


def test_rounding_of_constants_is_no_feature_and_small_features_count() -> None:
    draw = np.random.default_rng(0)
    y = draw.random(80) < 0.5
    small = 1e-6 * (y + draw.standard_normal(80))
    constant = np.float32(-3e3) + np.spacing(np.float32(3e3)) * draw.integers(-1, 2, 80)  # a large constant, rounded
    found = fit_readout(np.stack([small, constant], 1), y, penalty=1.0)
    Z = (small - small.mean()) / small.std()
    alone = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit(Z[:, None], y)
    assert found.weight.shape == (1, 2)
    # Whitened by a spread of one, the rounded constant moves by 2e-4, and its weight is as small.
    assert abs(float(found.weight[0, 1])) < 1e-2
    assert float(found.weight[0, 0]) * small.std() == pytest.approx(float(alone.coef_[0, 0]), rel=1e-3)
