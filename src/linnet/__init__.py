"""linnet: linearized neural networks. One fast, exact Jacobian of any PyTorch model, and what follows from it."""

from importlib.metadata import PackageNotFoundError, version

from linnet import scores
from linnet.batch import Batch
from linnet.classifier import TangentClassifier
from linnet.curvature import fisher_vector_product
from linnet.distill import distill_loss
from linnet.fisher import FisherEmbedding
from linnet.jacobian import Jacobian
from linnet.linearize import Linearization, linearize
from linnet.operators import LinearOperator, LowRank, Matrix
from linnet.plan import Plan
from linnet.regressor import TangentRegressor
from linnet.saved import load
from linnet.similarity import similarity

try:
    __version__ = version("linnet")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Batch",
    "FisherEmbedding",
    "Jacobian",
    "LinearOperator",
    "Linearization",
    "LowRank",
    "Matrix",
    "Plan",
    "TangentClassifier",
    "TangentRegressor",
    "__version__",
    "distill_loss",
    "fisher_vector_product",
    "linearize",
    "load",
    "scores",
    "similarity",
]
