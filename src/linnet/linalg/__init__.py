"""Operators and their algebra, solves, preconditioners, singular vectors: knows no network and no data."""

from linnet.linalg.cholesky import check_conditioning, cholesky_, cholesky_solve, log_det_from, solve_lower, solve_upper
from linnet.linalg.cholesky_updates import remove_rows, subtract_outer_products
from linnet.linalg.conjugate_gradients import Product, Solution, Solvable, cg
from linnet.linalg.lanczos import lanczos_quadrature, log_det_from_tridiagonals
from linnet.linalg.matrices import LowRank, Matrix, RowParts, Stack
from linnet.linalg.operator import (
    LinearOperator,
    RowFn,
    apply_to_columns,
    check_fn_result,
    check_kind,
    check_vector,
    check_weight,
)
from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner, Preconditioner
from linnet.linalg.preconditioners.nystrom import draw_landmarks, nystrom_preconditioner
from linnet.linalg.preconditioners.randomized import sketch
from linnet.linalg.preconditioners.woodbury import REFINED, WoodburyPreconditioner, woodbury_preconditioner
from linnet.linalg.row_weights import (
    ClassBlocks,
    RowIndex,
    add_symmetric_,
    as_weight,
    blocks_of_chunk,
    inner_matrix,
    mirror_,
    square_sums,
    weigh,
    weight_from_root,
)
from linnet.linalg.svd.block_krylov import orthonormalize
from linnet.linalg.svd.truncated import Decomposition, TooFewComponents, low_rank

__all__ = [
    "REFINED",
    "ClassBlocks",
    "Decomposition",
    "LinearOperator",
    "LowRank",
    "LowRankPreconditioner",
    "Matrix",
    "Preconditioner",
    "Product",
    "RowFn",
    "RowIndex",
    "RowParts",
    "Solution",
    "Solvable",
    "Stack",
    "TooFewComponents",
    "WoodburyPreconditioner",
    "add_symmetric_",
    "apply_to_columns",
    "as_weight",
    "blocks_of_chunk",
    "cg",
    "check_conditioning",
    "check_fn_result",
    "check_kind",
    "check_vector",
    "check_weight",
    "cholesky_",
    "cholesky_solve",
    "draw_landmarks",
    "inner_matrix",
    "lanczos_quadrature",
    "log_det_from",
    "log_det_from_tridiagonals",
    "low_rank",
    "mirror_",
    "nystrom_preconditioner",
    "orthonormalize",
    "remove_rows",
    "sketch",
    "solve_lower",
    "solve_upper",
    "square_sums",
    "subtract_outer_products",
    "weigh",
    "weight_from_root",
    "woodbury_preconditioner",
]
