"""linnet: linearized neural networks. One fast, exact Jacobian of any PyTorch model, and what follows from it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnet._common import __version__
from linnet.data import Batch
from linnet.jacobian import Jacobian, Linearization, Plan, linearize
from linnet.linalg import LinearOperator, LowRank, Matrix

if TYPE_CHECKING:
    from linnet import conformal, likelihoods, limits, metrics, report, sampling, scores
    from linnet._estimator import load
    from linnet.adaptation import adapt
    from linnet.fisher import FisherEmbedding, distill_loss, fisher_vector_product, similarity
    from linnet.heads import attach_head
    from linnet.laplace import Laplace, train_with_evidence
    from linnet.network import fold_batchnorm
    from linnet.onward import merge, select
    from linnet.tangent import TangentClassifier, TangentGLM, TangentRegressor

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
    "TangentGLM",
    "TangentRegressor",
    "__version__",
    "adapt",
    "attach_head",
    "conformal",
    "distill_loss",
    "fisher_vector_product",
    "fold_batchnorm",
    "likelihoods",
    "limits",
    "linearize",
    "load",
    "merge",
    "metrics",
    "report",
    "sampling",
    "scores",
    "select",
    "similarity",
    "train_with_evidence",
]

# Imported when the name is asked for: scikit-learn and GPyTorch take longer to import than all the rest.
_ROOMS = {
    "FisherEmbedding": "fisher",
    "Laplace": "laplace.estimator",
    "TangentClassifier": "tangent.classifier",
    "TangentGLM": "tangent.glm",
    "TangentRegressor": "tangent.regressor",
    "adapt": "adaptation.choice",
    "attach_head": "heads",
    "distill_loss": "fisher",
    "fisher_vector_product": "fisher",
    "fold_batchnorm": "network",
    "load": "_estimator.files",
    "merge": "onward",
    "select": "onward",
    "similarity": "fisher",
    "train_with_evidence": "laplace.training",
}
_MODULES = ("conformal", "likelihoods", "limits", "metrics", "report", "sampling", "scores", "testing")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"linnet.{name}")
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"linnet.{_ROOMS[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
