"""linnet: linearized neural networks. One fast, exact Jacobian of any PyTorch model, and what follows from it."""

from importlib.metadata import PackageNotFoundError, version

from linnet.batch import Batch
from linnet.jacobian import Jacobian
from linnet.linearize import Linearization, linearize
from linnet.operators import LinearOperator, LowRank, Matrix
from linnet.plan import Plan

try:
    __version__ = version("linnet")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Batch",
    "Jacobian",
    "LinearOperator",
    "Linearization",
    "LowRank",
    "Matrix",
    "Plan",
    "__version__",
    "linearize",
]
