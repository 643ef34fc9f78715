"""`Linearization` and `Jacobian`: the network's derivative as a streamed linear operator."""

from linnet.jacobian.blocks.autodiff import AutodiffBlock
from linnet.jacobian.blocks.base import DenseBlock
from linnet.jacobian.cached import cache_limit
from linnet.jacobian.chunk import NetworkChunks
from linnet.jacobian.column_moments import Moments
from linnet.jacobian.differentiable_rows import DifferentiableRows, Features, TangentFeatures, needs_grad
from linnet.jacobian.gram import CurvatureSums
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.kronecker import Basis, Decomposed, Kronecker, Rotation, Turn, constant_over, other_form
from linnet.jacobian.linearization import Linearization, linearize
from linnet.jacobian.output_combinations import (
    WeightedRows,
    combine_outputs,
    estimate_column_norms,
    informative_rows,
)
from linnet.jacobian.passes import PassSettings
from linnet.jacobian.plan import Plan, _count, autodiff_wins, fused_cost, gram_cost
from linnet.jacobian.proofs import TOLERANCE, random_signs

__all__ = [
    "TOLERANCE",
    "AutodiffBlock",
    "Basis",
    "CurvatureSums",
    "Decomposed",
    "DenseBlock",
    "DifferentiableRows",
    "Features",
    "Jacobian",
    "Kronecker",
    "Linearization",
    "Moments",
    "NetworkChunks",
    "PassSettings",
    "Plan",
    "Rotation",
    "TangentFeatures",
    "Turn",
    "WeightedRows",
    "_count",
    "autodiff_wins",
    "cache_limit",
    "combine_outputs",
    "constant_over",
    "estimate_column_norms",
    "fused_cost",
    "gram_cost",
    "informative_rows",
    "linearize",
    "needs_grad",
    "other_form",
    "random_signs",
]
