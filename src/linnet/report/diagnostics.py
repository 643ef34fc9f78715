r"""What a fit depends on: the influence of training examples, and how many directions the data determine.

Every estimator has a Gaussian posterior over the displacement, and training data with a Jacobian J, a curvature
:math:`B = L L^\top` and residuals :math:`r = \partial \log p(y \mid f) / \partial f`. Both follow from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from linnet.linalg import weigh

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian
    from linnet.probability import Posterior


@dataclass(frozen=True)
class Fit:
    """A fit and its training data."""

    J: Jacobian  # jacobian of the training data
    posterior: Posterior  # posterior over the displacement
    variance: Tensor  # prior variances S, (p,)
    root: Callable[[Tensor], Tensor]  # from the positions of m examples to L at the posterior mean, (m c,) or (m, c, c)
    residual: Tensor  # gradient of log p(y | f) at the posterior mean, (n, c)


def compute_influence(fit: Fit, J: Jacobian) -> Tensor:
    r"""The contribution of each training example to each output at other inputs, to first order, (m, c, n).

    .. math:: \mathrm{cov}(f(x), f(x_i) \mid y) \, r_i

    The contribution is the change of f(x) as the weight of example i in the data goes from zero to one, at the rate
    that f(x) changes at weight one (the infinitesimal jackknife). For Gaussian noise `TangentRegressor.influence` has
    the exact change.

    Args:
        fit: A fit with n training examples.
        J: Jacobian of m inputs.
    """
    n, c = fit.residual.shape
    C = fit.posterior.cross(J, fit.J).reshape(J.n, J.c, n, c)
    return (C * fit.residual).sum(3)


def compute_spectrum(fit: Fit, *, rows: int = 1000) -> tuple[np.ndarray, int]:
    r"""Eigenvalues of :math:`L^\top K L` on evenly spaced training examples, descending; and how many examples.

    An eigenvalue is a signal-to-noise ratio: the data determine the share l / (1 + l) of a direction with eigenvalue l,
    and the prior determines the rest.

    Args:
        fit: A fit whose training data can be read by position.
        rows: Largest number of rows (examples times outputs) of the kernel that is decomposed.
    """
    J, fewest = fit.J, 8
    few = min(J.n, rows // J.c)
    if few < min(fewest, J.n):
        raise ValueError(
            f"With {J.c:,} outputs, the kernel of only {few} examples can be decomposed, but at least {fewest} are "
            "needed."
        )
    index = torch.linspace(0, J.n - 1, few).long() if few < J.n else torch.arange(J.n)
    J, root = J.subset(index) if few < J.n else J, fit.root(index)
    half = weigh(J.gram(scale=fit.variance), root, transpose=True)
    M = weigh(half.T.contiguous(), root, transpose=True)
    values = torch.linalg.eigvalsh(0.5 * (M + M.T).double()).flip(0)
    return values.clamp_min(0).cpu().numpy(), few  # values below zero are rounding errors
