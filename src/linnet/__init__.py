"""linnet: linearized neural networks. One fast, exact Jacobian of any PyTorch model, and what follows from it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnet import scores
from linnet._common.versions import __version__
from linnet.data.batch import Batch
from linnet.fisher.comparison import similarity
from linnet.fisher.distillation import distill_loss
from linnet.fisher.fisher_product import fisher_vector_product
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import Linearization, linearize
from linnet.jacobian.plan import Plan
from linnet.linalg.matrices import LowRank, Matrix
from linnet.linalg.operator import LinearOperator
from linnet.network.batchnorm_folding import fold_batchnorm

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
    "report",
    "scores",
    "similarity",
    "train_with_evidence",
]

# What imports scikit-learn or GPyTorch, which take longer than all the rest, comes when it is asked for.
_LATER = {
    "FisherEmbedding": "fisher.embedding",
    "Laplace": "laplace.estimator",
    "TangentClassifier": "tangent.classifier",
    "TangentRegressor": "tangent.regressor",
    "attach_head": "heads.attach",
    "load": "_estimator.files",
    "train_with_evidence": "laplace.training",
}

if TYPE_CHECKING:
    from linnet import limits, report
    from linnet._estimator.files import load
    from linnet.fisher.embedding import FisherEmbedding
    from linnet.heads.attach import attach_head
    from linnet.laplace.estimator import Laplace
    from linnet.laplace.training import train_with_evidence
    from linnet.tangent.classifier import TangentClassifier
    from linnet.tangent.regressor import TangentRegressor
else:

    def __getattr__(name: str) -> Any:
        if name in ("limits", "report"):
            return import_module(f"linnet.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"linnet.{_LATER[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
