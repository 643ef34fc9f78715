r"""The mode of the linearized network under the prior of `linnet.Laplace`, and the evidence there.

The network's weights are a mode of its own loss, with its own regularizer if there was one; the linear model

.. math:: h(\theta) = f(\theta_0) + J (\theta - \theta_0), \qquad \theta \sim N(0, S)

has another, which its evidence asks for (Antoran et al. 2022): in networks with normalization layers the scale of the
weights is arbitrary, the loss says nothing about it, and ``theta0^T A theta0`` with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.inference.evidence import layer_scales
from linnet.inference.evidence.log_determinants import LogDet
from linnet.inference.mode import newton
from linnet.inference.mode.by_passes import mode_by_passes
from linnet.inference.mode.newton import Mode
from linnet.inference.problem import SolverSettings, choose_solver
from linnet.jacobian.jacobian import Jacobian
from linnet.laplace.evidence import Terms, group_norms
from linnet.linalg.cholesky import solve_lower
from linnet.probability.likelihoods import Likelihood
from linnet.probability.posteriors import by_root
from linnet.probability.priors import Prior


@dataclass(frozen=True)
class LinearModel:
    """The linearized network and its data.

    Attributes:
        J: Of the training data.
        y: Targets, as the likelihood takes them.
        mean: h at theta = 0, (n, c): ``f(theta0) - J theta0``.
        settings: How to solve.
    """

    J: Jacobian
    y: Tensor
    mean: Tensor
    settings: SolverSettings

    def mode(self, likelihood: Likelihood, variance: Tensor) -> tuple[Mode, Tensor]:
        """The mode, and its theta (p,), for prior variances (p,)."""
        J, d = self.J, variance.sqrt()
        rows, p = J.shape
        solver = choose_solver(rows, p, self.settings, device=J.device, kernels=2, steps=30, features=rows)
        if solver == "function":
            K = J.gram(scale=variance)
            found = newton.function_space(K, self.y, mean=self.mean, likelihood=likelihood, factor=False).checked()
            return found, variance * (J.T @ found.alpha)
        if solver == "weight":
            Phi = J.scaled(d).dense(limit=2**62)
            found = newton.weight_space(Phi, self.y, mean=self.mean, likelihood=likelihood, factor=False).checked()
        else:
            given = {"mean": self.mean, "likelihood": likelihood, "settings": self.settings}
            found, _ = mode_by_passes(J, self.y, variance=variance, **given)  # type: ignore[arg-type]
        assert found.u is not None
        return found, d * found.u


@dataclass(frozen=True)
class AtLinearMode:
    """The evidence at the mode of the linear model, which moves with the prior.

    Attributes:
        model: The linear model.
        prior: Of theta.
        likelihood: For a noise scale.
        log_det: For the root of the curvature at a mode, (n, c) or (n, c, c).
        energy: From outputs (n, c) to the squared residuals at noise one; None where the likelihood has no noise.
    """

    model: LinearModel
    prior: Prior
    likelihood: Callable[[float], Likelihood]
    log_det: Callable[[Tensor], LogDet]
    energy: Callable[[Tensor], float] | None

    def __call__(self, scales: Sequence[float], noise: float) -> Terms:
        variance = self.prior.variance(list(scales)) if self.prior.scales else self.prior.base * scales[0]
        likelihood = self.likelihood(noise)
        mode, theta = self.model.mode(likelihood, variance)
        unit = self.likelihood(1.0)
        log_det, gamma = self.log_det(unit.root(mode.f))(scales, 1 / noise)
        shares = [q / s for q, s in zip(group_norms(theta, self.prior), scales, strict=True)]
        energy = None if self.energy is None else self.energy(mode.f) / noise
        return Terms(mode.log_likelihood, shares, log_det, gamma, energy, mode.f.numel())


@dataclass(frozen=True)
class AtKernelMode:
    """The same by dense kernels, for a likelihood without noise: exact, with the derivative of the moving curvature.

    Attributes:
        kernels: For each group its part of ``J S J^T`` at unit scale, (n c, n c).
        y: Targets.
        mean: h at theta = 0, (n, c).
        likelihood: Of the targets.
    """

    kernels: list[Tensor]
    y: Tensor
    mean: Tensor
    likelihood: Likelihood

    def __call__(self, scales: Sequence[float], noise: float) -> Terms:
        K = sum(s * K_l for s, K_l in zip(scales, self.kernels, strict=True))
        assert isinstance(K, Tensor)
        mode = newton.function_space(K, self.y, mean=self.mean, likelihood=self.likelihood, tolerance=1e-8).checked()
        assert mode.factor is not None and mode.log_det is not None
        V = solve_lower(
            mode.factor, by_root(mode.root, torch.eye(len(K), dtype=K.dtype, device=K.device)).T.contiguous()
        )
        R = V.T @ V  # L M^-1 L^T
        gamma = [s * float((R * K_l).sum()) for s, K_l in zip(scales, self.kernels, strict=True)]
        shares = [s * float(mode.alpha @ (K_l @ mode.alpha)) for s, K_l in zip(scales, self.kernels, strict=True)]
        slopes = layer_scales.scale_gradient(self.kernels, scales, mode=mode, likelihood=self.likelihood)
        moved = [d - 0.5 * (q - g) for d, q, g in zip(slopes, shares, gamma, strict=True)]
        return Terms(mode.log_likelihood, shares, mode.log_det, gamma, None, len(K), moved)
