"""linnet: linearized neural networks. One fast, exact Jacobian of any PyTorch model, and what follows from it."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from linnet import scores
from linnet.batch import Batch
from linnet.classifier import TangentClassifier
from linnet.curvature import fisher_vector_product
from linnet.distill import distill_loss
from linnet.fisher import FisherEmbedding
from linnet.fold import fold_batchnorm
from linnet.heads import attach_head
from linnet.jacobian import Jacobian
from linnet.laplace import Laplace
from linnet.linearize import Linearization, linearize
from linnet.online import train_with_evidence
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
    "Laplace",
    "LinearOperator",
    "Linearization",
    "LowRank",
    "Matrix",
    "Plan",
    "TangentClassifier",
    "TangentRegressor",
    "__version__",
    "attach_head",
    "distill_loss",
    "fisher_vector_product",
    "fold_batchnorm",
    "limits",
    "linearize",
    "load",
    "scores",
    "similarity",
    "train_with_evidence",
]

if TYPE_CHECKING:
    from linnet import limits
else:

    def __getattr__(name: str) -> Any:
        if name == "limits":  # imports GPyTorch, which takes its time
            return import_module("linnet.limits")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
