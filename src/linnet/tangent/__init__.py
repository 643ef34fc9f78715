"""Door 1: `TangentRegressor`, `TangentClassifier` and `TangentGLM`, a trained network adapted to new data."""

from linnet.tangent.base import LinearizedModule, Tangent
from linnet.tangent.classifier import TangentClassifier
from linnet.tangent.glm import TangentGLM
from linnet.tangent.mean_choice import MeanTrial
from linnet.tangent.regressor import LeaveOneOut, TangentRegressor
from linnet.tangent.relinearization import Relinearization

__all__ = [
    "LeaveOneOut",
    "LinearizedModule",
    "MeanTrial",
    "Relinearization",
    "Tangent",
    "TangentClassifier",
    "TangentGLM",
    "TangentRegressor",
]
