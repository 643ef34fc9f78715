"""Solves by conjugate gradients: preconditioners, right-hand sides of posterior samples, and log determinants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet._common import find_dense_budget
from linnet.jacobian import AutodiffBlock, fused_cost, gram_cost
from linnet.linalg import (
    ClassBlocks,
    cg,
    draw_landmarks,
    log_det_from_tridiagonals,
    nystrom_preconditioner,
    sketch,
)

if TYPE_CHECKING:
    from linnet.inference.problem import SolverSettings
    from linnet.jacobian import Jacobian
    from linnet.linalg import LinearOperator, Preconditioner, Product, Solution


def preconditioner_of(
    Phi: LinearOperator, J: Jacobian, weight: Any, settings: SolverSettings, space: str
) -> Preconditioner | None:
    """As the settings say, for H or M of ``Phi = J.scaled(...)`` and the curvature ``weight``."""
    kind = settings.preconditioner
    if kind == "none" or (kind in ("auto", "pivoted-cholesky") and not J.by_position):
        return None
    landmarks = 6000 if J.device.type == "cuda" else 1000
    if kind != "nystrom" and settings.rank == "auto" and (J.c > landmarks or J.has_many_outputs()):
        # One example is too many rows. A sketch of all examples takes a few columns.
        root = (
            weight.as_form("root") if isinstance(weight, ClassBlocks) else weight.sqrt() if weight.ndim == 1 else None
        )
        if space == "function" or root is None:
            return None
        return sketch(Phi, root, rank=4 * settings.samples, generator=settings.generator(2))
    if settings.rank == "auto":
        # A direction is as long as the system is large, and all are held twice while they are made.
        length = J.shape[1 if space == "weight" else 0]
        most = int(0.7 * find_dense_budget(settings.memory, J.device)) // (2 * length * J.dtype.itemsize)
        rank = max(1, min(J.n, min(landmarks, most) // J.c, _worthwhile(J)))
    else:
        rank = min(int(settings.rank), J.n)
    index = draw_landmarks(J.n, rank, settings.generator(2))
    scale = Phi.d  # type: ignore[attr-defined]
    # An eigenvalue far below one changes nothing beside the identity.
    return nystrom_preconditioner(Phi, landmarks=J.subset(index).scaled(scale), weight=weight, space=space, least=0.01)


def _worthwhile(J: Jacobian) -> int:
    """Landmarks whose kernel with an example costs no more than a few passes over it.

    That bounds nothing where kernels are cheap (dense layers), and a lot where they are not (convolutions).
    """
    passes = 400 if J.device.type == "cuda" else 40  # a GPU is at its best with kernels
    factors = [f for f in J._sample if not isinstance(f, AutodiffBlock)]
    each = sum(fused_cost(f, k=1) for f in factors)
    pair = sum(gram_cost(f) for f in factors)
    return max(1, int(passes * each / pair)) if pair > 0 and len(factors) == len(J._sample) else J.n


def draw_right_sides(J: Jacobian, settings: SolverSettings) -> tuple[Tensor, Tensor]:
    """Standard normal numbers for posterior samples: of the observations (n c, k), and of the weights (p, k)."""
    e, h = (
        torch.randn(m, settings.samples, dtype=J.dtype, generator=settings.generator(stream)).to(J.device)
        for m, stream in zip(J.shape, (3, 4), strict=True)
    )
    return e, h


def solve_with_probes(
    product: Product, B: Tensor, P: Preconditioner | None, J: Jacobian, settings: SolverSettings, what: str
) -> tuple[Solution, float, float]:
    """Solve ``A X = B`` by conjugate gradients; also ``log det A`` and its standard error, from probes beside B.

    Args:
        product: ``V`` to ``A V``.
        B: (m, k).
        P: A preconditioner; None for none.
        J: The Jacobian that A is made of.
        settings: Tolerance, iterations and probes.
        what: The solve, in words, for an error.
    """
    solution = cg(
        product,
        torch.cat([B, probes_of(P, len(B), J, settings)], 1),
        preconditioner=P,
        tolerance=settings.tolerance,
        iterations=settings.iterations,
        probes=settings.probes,
        progress=settings.progress,
    ).checked(what)
    assert solution.tridiagonals is not None
    return solution, *log_det_from_tridiagonals(solution.tridiagonals, P, len(B))


def probes_of(P: Preconditioner | None, m: int, J: Jacobian, settings: SolverSettings) -> Tensor:
    """Vectors of covariance P, for the log determinant."""
    generator = settings.generator(5)
    if P is not None:
        return P.sample(settings.probes, generator)
    return torch.randn(m, settings.probes, dtype=J.dtype, generator=generator).to(J.device)
