r"""What a fit rests on: the training examples behind its predictions, and how many directions the data determine.

Every estimator has a Gaussian posterior over the displacement, and training data with a Jacobian J, a curvature
:math:`B = L L^\top` and residuals :math:`r = \partial \log p(y \mid f) / \partial f`; all else follows from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet._estimator.inputs import as_targets
from linnet.jacobian.jacobian import Jacobian
from linnet.laplace.estimator import Laplace
from linnet.probability.posteriors import Posterior, by_root
from linnet.tangent.base import Tangent

ROWS = 1000
"""Rows (examples times outputs) whose kernel is decomposed for a spectrum."""

FEWEST = 8
"""Examples that a spectrum is made from, at least."""


@dataclass(frozen=True)
class Fitted:
    """A fit and the data that it was made from.

    Attributes:
        J: Of the training data.
        posterior: Over the displacement.
        variance: S, (p,).
        root: L at the posterior mean, (n c,), or (n, c, c).
        residual: The gradient of log p(y | f) there, (n, c).
    """

    J: Jacobian
    posterior: Posterior
    variance: Tensor
    root: Tensor
    residual: Tensor


def fitted(estimator: Any, X: Any, y: Any) -> Fitted:
    """What a TangentRegressor, TangentClassifier or Laplace was fitted to, as the posterior sees it.

    Args:
        estimator: Fitted.
        X: The inputs it was fitted to.
        y: Their targets.
    """
    from linnet.tangent.classifier import TangentClassifier, label_array

    if isinstance(estimator, Laplace):
        J = estimator._jacobian(X)
        f = J.outputs()
        likelihood = estimator.likelihood_
        targets = likelihood.targets(as_targets(y, J), J.n, J.c, dtype=J.dtype, device=J.device)
    elif isinstance(estimator, TangentClassifier):
        J = estimator._new_inputs(X)
        f = _mean(estimator, J)
        likelihood = estimator.likelihood_
        targets = estimator._encode(label_array(y, J.n), J, estimator.classes_)
    elif isinstance(estimator, Tangent):
        return _gaussian(estimator, X, y)
    else:
        raise TypeError(f"A fitted TangentRegressor, TangentClassifier or Laplace is needed; got {type(estimator)}.")
    root = likelihood.root(f)
    return Fitted(
        J,
        estimator.posterior_,
        estimator.prior_variance_,
        root.flatten() if root.ndim == 2 else root,
        likelihood.residual(f, targets),
    )


def _gaussian(estimator: Any, X: Any, y: Any) -> Fitted:
    J = estimator._new_inputs(X)
    f = _mean(estimator, J)
    precision = 1 / estimator._noise_at(f, X)
    residual = precision * (estimator._targets(y, J).view(J.n, J.c) - f)
    return Fitted(J, estimator.posterior_, estimator.prior_variance_, precision.sqrt().flatten(), residual)


def _mean(estimator: Any, J: Jacobian) -> Tensor:
    """The posterior mean at the inputs of J, (n, c)."""
    found = estimator.posterior_.predict(J)
    return estimator._mean_function(found.f) + found.shift


def influence(fit: Fitted, J: Jacobian) -> Tensor:
    r"""What each training example adds to each output at other inputs, to first order, (m, c, n).

    .. math:: \mathrm{cov}(f(x), f(x_i) \mid y) \, r_i

    It is how far f(x) moves as the weight of example i in the data goes from zero to one, at the rate that it has at
    one (the infinitesimal jackknife). For Gaussian noise `TangentRegressor.influence` has the whole way.

    Args:
        fit: With n training examples.
        J: Of m inputs.
    """
    n, c = fit.residual.shape
    C = fit.posterior.cross(J, fit.J).view(J.n, J.c, n, c)
    return (C * fit.residual).sum(3)


def spectrum(fit: Fitted, *, rows: int = ROWS) -> tuple[np.ndarray, int]:
    r"""Eigenvalues of :math:`L^\top K L` on evenly spaced training examples, descending; and how many examples.

    They are signal over noise: of a direction with eigenvalue l the data determine the share l / (1 + l), and the prior
    the rest.

    Args:
        fit: With training data that can be read by position.
        rows: Examples times outputs, at most.
    """
    J, root = fit.J, fit.root
    few = min(J.n, rows // J.c)
    if few < min(FEWEST, J.n):
        raise ValueError(
            f"{J.c:,} outputs leave {few} examples to decompose the kernel of; at least {FEWEST} are needed."
        )
    if few < J.n:
        index = torch.linspace(0, J.n - 1, few).long()
        J = J.subset(index)
        root = root.view(fit.J.n, -1)[index].flatten() if root.ndim == 1 else root[index]
    half = by_root(root, J.gram(scale=fit.variance), transpose=True)
    M = by_root(root, half.T.contiguous(), transpose=True)
    values = torch.linalg.eigvalsh(0.5 * (M + M.T).double()).flip(0)
    return values.clamp_min(0).cpu().numpy(), few  # what is below zero is rounding
