"""Error bars through scikit-learn's transformations of targets."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.compose import TransformedTargetRegressor as PlainTransformedTargetRegressor
from sklearn.utils.validation import check_is_fitted


class TransformedTargetRegressor(PlainTransformedTargetRegressor):
    """`sklearn.compose.TransformedTargetRegressor` whose predictions have standard deviations and intervals.

    The arguments and the fit are those of scikit-learn. The regressor is a `linnet.TangentRegressor`, a
    `linnet.Laplace` or another one whose ``predict`` takes ``return_std``.

    Example:
        >>> import torch
        >>> from sklearn.preprocessing import StandardScaler
        >>> from linnet import TangentRegressor
        >>> X = np.linspace(-2, 2, 30)[:, None]
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> scaled = TransformedTargetRegressor(TangentRegressor(model), transformer=StandardScaler())
        >>> mean, std = scaled.fit(X, 100 + 50 * X[:, 0]).predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((30,), (30,))
    """

    def predict(self, X: Any, return_std: bool = False, **given: Any) -> Any:
        """The mean in the units of the targets, with its standard deviation where asked for.

        Standard deviations need a transformation by shift and scale, such as `StandardScaler`. Others raise; their
        intervals are known: see `predict_interval`.

        Args:
            X: Inputs.
            return_std: Also the standard deviation.
            given: Arguments of the regressor's ``predict``, such as ``noise=True``.
        """
        if not return_std:
            return super().predict(X, **given)
        mean, std = self._predict_inside(X, **given)
        low, middle, high = (self._to_units(value) for value in (mean - std, mean, mean + std))
        size = np.abs(np.stack([low, middle, high])).max()
        if np.abs(low + high - 2 * middle).max() > 1e3 * np.finfo(middle.dtype).eps * size:
            raise ValueError(
                "The transformation of the targets is not a shift and a scale, so that standard deviations have no "
                "meaning in the units of the targets. Use predict_interval(X, level), which is exact for it."
            )
        return middle, np.abs(high - low) / 2

    def predict_interval(self, X: Any, level: float = 0.95, **given: Any) -> tuple[Any, Any]:
        """The ends of the central interval of each prediction, exact for every monotone transformation.

        Args:
            X: Inputs.
            level: Probability of the interval.
            given: ``noise=False`` for the interval of the function.
        """
        check_is_fitted(self)
        ends = [self._to_units(np.asarray(end)) for end in self.regressor_.predict_interval(X, level, **given)]
        return np.minimum(*ends), np.maximum(*ends)

    def _predict_inside(self, X: Any, **given: Any) -> tuple[Any, Any]:
        """Mean and standard deviation of the transformed targets."""
        check_is_fitted(self)
        mean, std = self.regressor_.predict(X, return_std=True, **given)
        return np.asarray(mean), np.asarray(std)

    def _to_units(self, values: Any) -> Any:
        """Transformed targets in the units of the targets."""
        columns = values.reshape(len(values), -1)
        found = np.asarray(self.transformer_.inverse_transform(columns))
        return found.reshape(values.shape)
