r"""What a fit depends on: the influence of training examples, and how many directions the data determine.

Every estimator has a Gaussian posterior over the displacement, and training data with a Jacobian J, a curvature
:math:`B = L L^\top` and residuals :math:`r = \partial \log p(y \mid f) / \partial f`. Both follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet._estimator import as_targets
from linnet.jacobian import Jacobian
from linnet.laplace import Laplace
from linnet.linalg import weigh
from linnet.probability import Posterior, Weighted
from linnet.tangent import Tangent


@dataclass(frozen=True)
class Fit:
    """A fit and its training data."""

    J: Jacobian  # jacobian of the training data
    posterior: Posterior  # posterior over the displacement
    variance: Tensor  # prior variances S, (p,)
    root: Tensor  # L at the posterior mean, (n c,) or (n, c, c)
    residual: Tensor  # gradient of log p(y | f) at the posterior mean, (n, c)


def gather_fit(estimator: Any, X: Any, y: Any) -> Fit:
    """The fit of a TangentRegressor, TangentClassifier or Laplace.

    Args:
        estimator: The fitted estimator.
        X: Training inputs.
        y: Training targets.
    """
    from linnet.tangent import TangentClassifier, TangentRegressor, as_labels

    if not isinstance(estimator, Laplace | Tangent):
        raise TypeError(f"A fitted TangentRegressor, TangentClassifier or Laplace is needed; got {type(estimator)}.")
    if isinstance(estimator, Laplace):
        J = estimator._jacobian(X)
        f = J.outputs()
        targets = estimator.likelihood_.targets(as_targets(y, J), J.n, J.c, dtype=J.dtype, device=J.device)
    else:
        J = estimator._new_inputs(X)
        found = estimator.posterior_.predict(J)
        f = estimator._mean_function(found.f) + found.shift
        if isinstance(estimator, TangentRegressor):
            rows = estimator._fit_.noise_rows
            if len(rows) != f.numel():
                raise ValueError(
                    f"The regressor was fitted to {len(rows) // J.c} observations, and there are {J.n} inputs. Give "
                    "the data of fit, without examples of weight 0."
                )
            precision = 1 / rows.view(J.n, J.c)
            residual = precision * (estimator._targets(y, J).view(J.n, J.c) - f)
            return Fit(J, estimator.posterior_, estimator.prior_variance_, precision.sqrt().flatten(), residual)
        if isinstance(estimator, TangentClassifier):
            targets = estimator._encode(as_labels(y, J.n), J, estimator.classes_, estimator.likelihood_)
        else:
            targets = estimator.likelihood_.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)
    likelihood, weight = estimator.likelihood_, estimator._weight
    if weight is not None:
        if len(weight) != J.n:
            raise ValueError(
                f"The estimator was fitted to {len(weight)} examples of a weight above 0, and there are {J.n} inputs. "
                "Give the data of fit, without examples of weight 0."
            )
        likelihood, targets = Weighted.pack(likelihood, targets, weight.to(f))
    root = likelihood.observed_root(f, targets)
    root = root.flatten() if root.ndim == 2 else root
    return Fit(J, estimator.posterior_, estimator.prior_variance_, root, likelihood.residual(f, targets))


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
    J, root, fewest = fit.J, fit.root, 8
    few = min(J.n, rows // J.c)
    if few < min(fewest, J.n):
        raise ValueError(
            f"With {J.c:,} outputs, the kernel of only {few} examples can be decomposed, but at least {fewest} are "
            "needed."
        )
    if few < J.n:
        index = torch.linspace(0, J.n - 1, few).long()
        J = J.subset(index)
        root = root.view(fit.J.n, -1)[index].flatten() if root.ndim == 1 else root[index]
    half = weigh(J.gram(scale=fit.variance), root, transpose=True)
    M = weigh(half.T.contiguous(), root, transpose=True)
    values = torch.linalg.eigvalsh(0.5 * (M + M.T).double()).flip(0)
    return values.clamp_min(0).cpu().numpy(), few  # values below zero are rounding errors
