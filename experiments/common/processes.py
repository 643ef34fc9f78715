"""Gaussian processes to compare with: on the inputs, on a network's features, as a linear model on them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import gpytorch
import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

SMALLEST_NOISE = 1e-7
RAW = (-12.0, 1e4)
"""Bounds of hyperparameters before softplus: from 6e-6 upwards."""
LENGTHS = (0.5, 2.0, 8.0)
NOISES = (1e-3, 0.3)
"""Starts: length scales, and shares of noise in the targets' power."""


class Process(gpytorch.models.ExactGP):
    """A Gaussian process over features of the inputs, with mean zero; one or many data sets of equal size.

    With `own=False` the data sets share kernel and noise, and the evidence is summed over them; with `own=True` each
    has its own. The RBF kernel on the inputs is the plain process, the linear kernel on a network's last hidden layer
    is adaptive Bayesian linear regression (Perrone et al. 2018), the RBF kernel there deep-kernel transfer (Patacchiola
    et al. 2019).

    Args:
        X: Inputs (n, d) or (tasks, n, d).
        y: Targets (n,) or (tasks, n).
        kernel: "rbf" or "linear".
        features: From inputs (..., n, d) to features (..., n, h).
        own: Whether each data set has its own hyperparameters.
    """

    def __init__(self, X: Tensor, y: Tensor, *, kernel: str, features: nn.Module | None = None, own: bool = False):
        shape = y.shape[:-1] if own else torch.Size()
        floor = gpytorch.constraints.GreaterThan(SMALLEST_NOISE)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=floor, batch_shape=shape)
        super().__init__(X, y, likelihood)
        self.own = own
        kinds = {"rbf": gpytorch.kernels.RBFKernel, "linear": Linear}
        self.kernel = gpytorch.kernels.ScaleKernel(kinds[kernel](batch_shape=shape), batch_shape=shape)
        self.features = features if features is not None else nn.Identity()
        self.to(X)
        self.kernel.outputscale = y.square().mean(-1) if own else y.square().mean()
        self.likelihood.noise = 0.01 * self.kernel.outputscale.detach().unsqueeze(-1)

    def forward(self, X: Tensor) -> gpytorch.distributions.MultivariateNormal:
        Z = self.features(X)
        return gpytorch.distributions.MultivariateNormal(Z.new_zeros(Z.shape[:-1]), self.kernel(Z))

    def hyperparameters(self) -> list[nn.Parameter]:
        """Those of the kernel and the noise."""
        return [*self.kernel.parameters(), *self.likelihood.parameters()]

    def fit(self, *, iterations: int = 200, starts: bool = True) -> float:
        """Maximize the evidence in the hyperparameters by L-BFGS; returns it, summed over data sets.

        From the present values and, with `starts`, from others: the evidence of few points has several maxima.
        """
        first = [self.raw()]
        if starts:
            lengths = LENGTHS if self.kernel.base_kernel.has_lengthscale else (1.0,)
            first += [self.started(*pair) for pair in itertools.product(lengths, NOISES)]
        found = [self.climb(x, iterations) for x in first]
        # Data sets with hyperparameters of their own choose each for itself.
        values = torch.stack([value.expand(x[0].shape[0] if self.own else 1) for x, value in found])
        best = values.argmax(0)
        with torch.no_grad():
            for j, parameter in enumerate(self.hyperparameters()):
                every = torch.stack([x[j] for x, _ in found])
                parameter.copy_(every[best, torch.arange(len(best))] if self.own else every[best[0]])
        return float(values.amax(0).sum())

    def raw(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.hyperparameters()]

    def started(self, length: float, noise: float) -> list[Tensor]:
        """Hyperparameters to start from: the targets' power, a length scale, a share of noise."""
        power = self.train_targets.square().mean(-1) if self.own else self.train_targets.square().mean()
        self.kernel.outputscale = power
        self.likelihood.noise = (noise * power).unsqueeze(-1)
        if self.kernel.base_kernel.has_lengthscale:
            self.kernel.base_kernel.lengthscale = length
        return self.raw()

    def climb(self, start: list[Tensor], iterations: int) -> tuple[list[Tensor], Tensor]:
        """The maximum uphill from a start, and the log evidence there: summed, or (tasks,) where each has its own."""
        raw = self.hyperparameters()
        objective = self.objective()

        def value(x: np.ndarray) -> tuple[float, np.ndarray]:
            vector_to_parameters(torch.as_tensor(x, dtype=raw[0].dtype, device=raw[0].device), raw)
            loss = objective().sum()
            gradient = torch.autograd.grad(loss, raw)
            return loss.item(), torch.cat([g.flatten() for g in gradient]).cpu().double().numpy()

        x = torch.cat([t.flatten() for t in start]).cpu().double().clamp(*RAW).numpy()
        found = minimize(value, x, jac=True, method="L-BFGS-B", bounds=[RAW] * len(x), options={"maxiter": iterations})
        value(found.x)
        with torch.no_grad():
            evidence = -objective() * self.train_targets.shape[-1]
        return self.raw(), evidence if self.own else evidence.sum()

    def fit_features(self, *, steps: int = 500, rate: float = 1e-3, **settings: Any) -> float:
        """Maximize the evidence in the features' parameters too, by Adam; before and after, as `fit` with settings."""
        self.fit(**settings)
        groups = [
            {"params": list(self.features.parameters()), "lr": rate},
            {"params": self.hyperparameters(), "lr": 10 * rate},
        ]
        optimizer = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        objective = self.objective()
        for _ in range(steps):
            optimizer.zero_grad()
            objective().sum().backward()
            optimizer.step()
            schedule.step()
        return self.fit(**settings)

    def objective(self) -> Callable[[], Tensor]:
        """The negative evidence per example of each data set."""
        self.train()
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self)
        return lambda: -evidence(self(*self.train_inputs), self.train_targets)

    def hyperparameter_state(self) -> dict[str, Tensor]:
        """Of kernel and noise, to be loaded into a process over other data."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("features.")}

    def load_hyperparameters(self, state: Mapping[str, Tensor]) -> None:
        """Take over kernel and noise."""
        self.load_state_dict(dict(state), strict=self.features is None or not self.features.state_dict())

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances with noise at X, shapes of the targets."""
        self.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var(False):
            found = self.likelihood(self(X))
            return found.mean, found.variance


class Linear(gpytorch.kernels.Kernel):
    """The inner product of features; the weights' prior variance is the output scale."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: object) -> Tensor:
        return (x1 * x2).sum(-1) if diag else x1 @ x2.mT


class Features(nn.Module):
    """The last hidden layer of a network, with a constant feature for the bias; a copy, trainable.

    Args:
        model: Layers in a row, of which the last is left out.
    """

    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.body = copy.deepcopy(model[:-1])

    def forward(self, X: Tensor) -> Tensor:
        Z = self.body(X)
        return torch.cat([Z, torch.ones_like(Z[..., :1])], -1)
