r"""An earlier posterior as the prior of a new fit.

.. math:: \theta \sim N(\theta_e, P^{-1}), \qquad H = J^\top B J + P, \qquad
          \log Z = \log p(y \mid f) - \tfrac12 (\theta - \theta_e)^\top P (\theta - \theta_e)
                   + \tfrac12 \log\det P - \tfrac12 \log\det H

The structures "full", "diag" and "lowrank" add exactly; the rank of a low rank grows by that of each fit. The
structures "kron" and "ekfac" keep the diagonal of both terms in one set of Kronecker coordinates; see
`linnet.probability.common_coordinates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from linnet.probability import (
    DensePrecision,
    DiagonalPrecision,
    EarlierPosterior,
    LowRankPrecision,
    Precision,
    precision_of,
)

if TYPE_CHECKING:
    from linnet.jacobian import Linearization
    from linnet.laplace.estimator import Laplace

CARRIED = ("full", "diag", "kron", "ekfac", "lowrank")
"""Structures that take an earlier posterior as their prior."""


# From a fitted approximation to a prior.


def is_earlier(prior: Any) -> bool:
    """Whether a prior is an earlier posterior: a fitted `Laplace`, or what a file has kept of one."""
    return isinstance(prior, EarlierPosterior) or type(prior).__name__ == "Laplace"


def mean_and_precision(la: Laplace) -> tuple[Tensor, Precision]:
    """The Gaussian over all selected parameters: its mean (p,) and its precision."""
    check_is_fitted(la)
    return la.theta_ + la.posterior_.delta, precision_of(la.posterior_, memory=la.memory)


def check_earlier(la: Laplace) -> None:
    """Raise, before any pass, where an earlier posterior cannot be the prior of a fit."""
    prior = la.prior
    if not isinstance(prior, EarlierPosterior):
        check_is_fitted(prior, msg="prior= is a Laplace that is not fitted: fit the earlier one to its data first.")
        if hasattr(prior, "members_"):
            raise NotImplementedError(
                "prior= is an ensemble, a mixture of Gaussians, and a prior is one Gaussian. Give one of its members_."
            )
    if la.structure not in ("auto", *CARRIED):
        raise NotImplementedError(
            f"structure={la.structure!r} does not take an earlier posterior as its prior. Use one of "
            f"{', '.join(map(repr, CARRIED))}, or 'auto' for the structure of the earlier one."
        )


def find_earlier(la: Laplace, lin: Linearization) -> EarlierPosterior:
    """The prior of a fit whose ``prior`` is an earlier posterior, for the network of the fit."""
    given: Any = la.prior
    layout = given.layout if isinstance(given, EarlierPosterior) else given.lin_.layout
    if layout != lin.layout:
        ours, theirs = lin.layout.shapes, layout.shapes
        differ = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        told = [f"{name} has shape {_shape(ours, name)} here and {_shape(theirs, name)} there" for name in differ[:3]]
        raise ValueError(
            f"prior= is a posterior over other parameters: {'; '.join(told) or 'the same in another order'}. Both need "
            "the same architecture and the same params=."
        )
    found = given
    if not isinstance(given, EarlierPosterior):
        mean, P = mean_and_precision(given)
        found = EarlierPosterior.of(mean, P, lin.layout)
    like = lin.flat_theta
    return EarlierPosterior.of(found.mean.to(like), found.precision.to(like), lin.layout)


def choose_structure(la: Laplace, prior: EarlierPosterior) -> str:
    """The structure of a fit with an earlier posterior: that of the earlier one, or what was asked for."""
    P = prior.precision
    if la.structure == "auto":
        if isinstance(P, DensePrecision | LowRankPrecision):
            return "full" if isinstance(P, DensePrecision) else "lowrank"
        earlier = getattr(la.prior, "structure_", None)
        assert isinstance(P, DiagonalPrecision)
        return "diag" if P.rotation is None else earlier if earlier in ("kron", "ekfac") else "kron"
    rotated = isinstance(P, DiagonalPrecision) and P.rotation is not None
    known = {
        "full": True,
        "diag": isinstance(P, DiagonalPrecision) and not rotated,
        "kron": isinstance(P, DiagonalPrecision),
        "ekfac": isinstance(P, DiagonalPrecision),
        "lowrank": isinstance(P, LowRankPrecision) or (isinstance(P, DiagonalPrecision) and not rotated),
    }
    if not known[la.structure]:
        form = "Kronecker factors" if rotated else "a dense matrix" if isinstance(P, DensePrecision) else "a low rank"
        raise ValueError(
            f"The earlier posterior has the form of {form}, which structure={la.structure!r} cannot hold. Use "
            "structure='auto' for the structure of the earlier one, or 'full'."
        )
    return la.structure


def _shape(shapes: Mapping[str, Any], name: str) -> str:
    return str(tuple(shapes[name])) if name in shapes else "nothing"
