"""One prior scale for each layer, by the Laplace evidence of any log-concave likelihood: ``K = sum_l s_l K_l``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import scipy  # its optimize is imported at first use
import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import Choice
from linnet.inference.evidence.scales import best_scale, unit_scale
from linnet.inference.mode.newton import Mode, function_space
from linnet.linalg.cholesky import solve_lower
from linnet.probability.likelihoods import Likelihood

SPAN = math.log(1e8)
"""Scales of layers are sought this far down from the common one, and half as far up."""


def best_scales(
    parts: Mapping[str, Tensor],
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    start: Sequence[float] | None = None,
    steps: int = 50,
) -> Choice:
    """One scale for each part of ``K = sum_l s_l K_l``, by L-BFGS on their logarithms with the analytic gradient.

    The evidence rises along the path and is never below that of the start.

    Args:
        parts: Name to K_l, (n c, n c).
        y: As for `linnet.inference.mode.newton.function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        start: Scales to begin with; None for the `best_scale` of the sum, or where that is next to nothing, for
            one large enough to find out which parts matter.
        steps: At most as many.

    Returns:
        A choice with the scales in the order of the parts.
    """
    kernels = list(parts.values())
    common: Choice | None = None
    if start is None:
        K = _mixed(kernels, [1.0] * len(kernels))
        common = best_scale(K, y, mean=mean, likelihood=likelihood)
        start = [max(common.scales[0], 0.01 * unit_scale(K, mean, likelihood, "function"))] * len(kernels)
    if len(start) != len(kernels):
        raise ValueError(f"There are {len(kernels)} parts, so start needs as many scales; got {len(start)}.")
    alpha: Tensor | None = None
    path: list[float] = []
    # The evidence is off by about the square of the relative gradient, which then is rounding.
    tolerance = torch.finfo(mean.dtype).eps ** 0.5

    def negative(x: Sequence[float]) -> tuple[float, list[float]]:
        nonlocal alpha
        scales = [math.exp(t) for t in x]
        K = _mixed(kernels, scales)
        try:
            mode = function_space(K, y, mean=mean, likelihood=likelihood, start=alpha, tolerance=tolerance).checked()
        except ArithmeticError:  # rounding hides the mode: a finite wall, at which the line search turns back
            if not path:
                raise
            return 1e100, [0.0] * len(scales)
        alpha = mode.alpha
        if not path:
            path.append(mode.log_evidence)
        return -mode.log_evidence, [-g for g in scale_gradient(kernels, scales, mode=mode, likelihood=likelihood)]

    x0 = [math.log(s) for s in start]
    found = scipy.optimize.minimize(
        negative,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=[(t - SPAN, t + SPAN / 2) for t in x0],
        options={"maxiter": steps, "ftol": 1e-9, "gtol": 1e-4},
        callback=lambda intermediate_result: path.append(-float(intermediate_result.fun)),
    )
    if common is not None and common.log_evidence > -float(found.fun):
        return replace(common, scales=common.scales * len(kernels))
    return Choice(tuple(math.exp(t) for t in found.x), (), -float(found.fun), tuple(path))


def scale_gradient(
    parts: Sequence[Tensor], scales: Sequence[float], *, mode: Mode, likelihood: Likelihood
) -> list[float]:
    r"""Derivatives of the Laplace evidence in the logarithms of the scales of ``K = sum_l s_l K_l``.

    .. math:: \tfrac12 s_l \left((\alpha - w)^\top K_l \alpha - \mathrm{tr}(R K_l)\right), \qquad
              R = L M^{-1} L^\top, \qquad w = (I - R K) h

    where :math:`h = \partial_f \, \mathrm{tr}(\Sigma B(f))`, with the covariance :math:`\Sigma = K - K R K` kept: the
    mode moves with the scales and the curvature with the mode (Rasmussen and Williams, section 5.5.1, for any number
    of coupled outputs).

    Args:
        parts: The K_l, (n c, n c).
        scales: The s_l.
        mode: Of their sum, from `linnet.inference.mode.newton.function_space`.
        likelihood: Of the targets given f.
    """
    if mode.factor is None or mode.u is not None:
        raise ValueError("scale_gradient needs a mode from function_space with factor=True.")
    K, root, f = _mixed(parts, scales), mode.root, mode.f
    n, c = f.shape
    dense = torch.diag(root) if root.ndim == 1 else torch.block_diag(*root)
    V = solve_lower(mode.factor, dense.T)
    R = V.T @ V
    T = (V @ K).T.reshape(n, c, n * c)
    at = torch.arange(n, device=K.device)
    Sigma = K.view(n, c, n, c)[at, :, at] - T @ T.mT
    Sigma = Sigma.diagonal(dim1=1, dim2=2) if likelihood.diagonal else Sigma
    with torch.enable_grad():
        moving = f.detach().requires_grad_()
        trace = (Sigma * likelihood.curvature(moving)).sum()
        h = torch.autograd.grad(trace, moving)[0].flatten() if trace.requires_grad else torch.zeros_like(mode.alpha)
    ahead = mode.alpha - h + R @ (K @ h)
    return [0.5 * s * float(ahead @ (K_l @ mode.alpha) - (R * K_l).sum()) for s, K_l in zip(scales, parts, strict=True)]


def _mixed(kernels: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    K = torch.zeros_like(kernels[0])
    for s, K_l in zip(scales, kernels, strict=True):
        K.add_(K_l, alpha=s)
    return K
