r"""What conjugate gradients multiply with to draw posterior samples in weight space, and their preconditioner.

The system is :math:`H = I + \Phi^\top B \Phi` with :math:`\Phi = J S^{1/2}`. A pass over all its rows takes c backward
passes for each example; a network that is sure of most labels has nearly all of its curvature in a few of them
(`linnet.jacobian.output_combinations`). With these rows alone there are two ways to spare passes over all:

* a direct solve (`linnet.linalg.preconditioners.woodbury`) as the preconditioner of iterations over all rows, where the
Gram matrix of the few
  is no more work than a sketch, or where there is no memory for a sketch of them;
* a sketch of them (`linnet.linalg.preconditioners.randomized`), and iterations over them too, which start again from
the residuals of all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet._common.memory import dense_budget
from linnet.inference.gaussian.iterative import preconditioner_of
from linnet.inference.problem import Settings
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.output_combinations import informative_rows
from linnet.jacobian.plan import autodiff_wins
from linnet.linalg.conjugate_gradients import Product
from linnet.linalg.matrices import Stack
from linnet.linalg.operator import LinearOperator
from linnet.linalg.preconditioners.low_rank import Preconditioner
from linnet.linalg.preconditioners.randomized import sketch
from linnet.linalg.preconditioners.woodbury import WoodburyPreconditioner, woodbury_preconditioner
from linnet.linalg.row_weights import weight_from_root

NEAR = 10.0
"""A preconditioner serves again while no prior variance, in units of the noise, has changed by a larger factor."""

SKETCHED = 4096
"""Columns of the sketch on a GPU that forms rows: with them 64 samples of ResNet-20 take ten iterations."""

LEFT = {False: (1e-4, 1e-3), True: (0.005, 0.03)}
"""The share of the curvature's trace that a direct solve leaves to iterations over all rows, and the largest that it
may; the second pair where a sketch has no memory. A larger share takes fewer rows and more iterations."""


@dataclass(frozen=True)
class System:
    """What `linnet.linalg.conjugate_gradients.cg` takes.

    Attributes:
        product: V (p, k) to ``H V``.
        exact: The same for residuals, where the product is a coarser one.
        preconditioner: P.
    """

    product: Product
    exact: Product | None
    preconditioner: Preconditioner | None


def system_of(
    J: Jacobian,
    S: Tensor,
    L: Tensor,
    k: int,
    settings: Settings,
    *,
    kind: str = "auto",
    coarse: Jacobian | None = None,
    preconditioner: Preconditioner | None = None,
    probes: int = 0,
) -> System:
    """The system of posterior samples.

    Args:
        J: (n c, p), steady: rows that one pass has made meet products of others.
        S: Prior variances, (p,).
        L: The root of B, (n c,) or (n, c, c).
        k: Columns of the solve, without probes.
        settings: Of the solve.
        kind: "auto", "sketch", "nystrom", "pivoted-cholesky" or "none".
        coarse: J in a cheaper precision, for products.
        preconditioner: One that is made already.
        probes: Columns whose tridiagonals are wanted, which only an exact product has.
    """
    d, weight = S.sqrt(), weight_from_root(L)

    def of(op: LinearOperator, weight: Tensor | None) -> Product:
        Phi = op.scaled(d)
        return lambda V: V + Phi.normal(V, weight)

    exact = of(J, weight)
    if coarse is not None:
        P = preconditioner or _all_rows(coarse, d, L, k, settings, kind)
        return System(of(coarse, weight), exact, P)
    given = isinstance(preconditioner, WoodburyPreconditioner) or (preconditioner and probes)
    if kind not in ("auto", "sketch") or given:
        return System(exact, None, preconditioner or _all_rows(J, d, L, k, settings, kind))
    if preconditioner is None and kind == "auto" and isinstance(settings.rank, str):
        found = _direct(J, S, L, k, settings)
        if found is not None:
            return System(exact, None, found)
    few = informative_rows(J, L)
    if few is None:
        return System(exact, None, preconditioner or _all_rows(J, d, L, k, settings, kind))
    few = _in_products(few)
    if preconditioner is None:
        ones = torch.ones(few.shape[0], dtype=J.dtype, device=J.device)
        preconditioner = sketch(
            few.scaled(d), ones, rank=_columns(J, k, settings, rows=True)[0], generator=settings.generator(2)
        )
    if probes:
        return System(exact, None, preconditioner)
    return System(of(few, None), exact, preconditioner)


def again(P: Preconditioner, old: Tensor, new: Tensor, noise: float) -> Preconditioner | None:
    """The preconditioner of another solve for this prior and noise; None where they are too far apart.

    Args:
        P: Of the other solve.
        old: Its prior variances, (p,).
        new: Those of this one.
        noise: How many times as large the curvature is now.
    """
    ratio = torch.where(old > 0, new / old, 1.0) * noise
    if bool((ratio > NEAR).any() | (ratio < 1 / NEAR).any() | ((old > 0) != (new > 0)).any()):
        return None
    return P.rescale(ratio.sqrt())


def _columns(J: Jacobian, k: int, settings: Settings, *, rows: bool) -> tuple[int, bool]:
    """How many a sketch of a few rows has, or of all; and whether it is for want of memory that it has not more."""
    if not isinstance(settings.rank, str):
        return max(1, settings.rank), False
    fits = int(0.5 * dense_budget(settings.memory, J.device)) // (4 * J.shape[1] * J.dtype.itemsize)
    # Where rows are formed anyway, many more columns cost little more.
    wanted = SKETCHED if J.device.type == "cuda" else max(128, 4 * k)
    if not rows and _by_column(J, k):  # each costs as much as one of the samples in an iteration
        wanted = min(wanted, 4 * k)
    return max(1, min(wanted, fits)), fits < wanted


def _by_column(J: Jacobian, k: int) -> bool:
    return autodiff_wins("fused", k=k, c=J.c)


def _direct(J: Jacobian, S: Tensor, L: Tensor, k: int, settings: Settings) -> WoodburyPreconditioner | None:
    """A direct solve with a few rows, where it is worth its Gram matrix (m, m)."""
    columns, limited = _columns(J, k, settings, rows=True)
    fits = math.isqrt(dense_budget(settings.memory, J.device) // 24)
    if not limited:
        # On a CPU its m^2 p is then no more than the 4 m p r of a sketch, which leaves more iterations; on a GPU
        # iterations over the few rows take no time beside those over all.
        fits = min(fits, columns if J.device.type == "cuda" else 4 * columns)
    share, largest = LEFT[limited]
    R = informative_rows(J, L, share=share, most=fits, largest=largest)
    if R is None:
        return None
    return woodbury_preconditioner(R, S, generator=settings.generator(2), coarse=_in_products(R))


def _in_products(R: Stack) -> Stack:
    """On a GPU with products in tf32, of rows of the network itself.

    Those of a network that runs in tf32 are another matrix, by a percent or two.
    """
    if R.device.type != "cuda":
        return R
    return Stack([part.in_precision("products") for part in R.parts if isinstance(part, Jacobian)])


def _all_rows(J: Jacobian, d: Tensor, L: Tensor, k: int, settings: Settings, kind: str) -> Preconditioner | None:
    """A preconditioner from all rows, of a kind."""
    if kind == "none":
        return None
    if kind not in ("auto", "sketch"):
        return preconditioner_of(J.scaled(d), J, weight_from_root(L), settings, "weight")
    columns, _ = _columns(J, k, settings, rows=False)
    if J.device.type == "cuda" and not _by_column(J, k):
        J = J.in_precision("products")
    return sketch(J.scaled(d), L, rank=columns, generator=settings.generator(2))
