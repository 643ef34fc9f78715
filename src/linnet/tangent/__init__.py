"""Door 1: `TangentRegressor` and `TangentClassifier`, a trained network adapted to new data in closed form."""

from linnet.tangent.base import LinearizedModule, Tangent
from linnet.tangent.classifier import TangentClassifier, as_labels
from linnet.tangent.regressor import LeaveOneOut, TangentRegressor

__all__ = ["LeaveOneOut", "LinearizedModule", "Tangent", "TangentClassifier", "TangentRegressor", "as_labels"]
