r"""The linearized network as a BoTorch model: joint posteriors that are differentiable in the candidates."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import needs_extra
from linnet.interop.gpytorch import as_linearization
from linnet.jacobian import DifferentiableRows, Features, Linearization, TangentFeatures
from linnet.linalg import cholesky_, cholesky_solve
from linnet.network import Output, Params
from linnet.probability import FunctionPosterior, Posterior, PriorSpec, prior_variances
from linnet.tangent import TangentRegressor

with needs_extra("botorch", "linnet.interop.botorch"):
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior

from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

__all__ = ["TangentModel"]

InputFunction = Callable[[Tensor], Tensor]
"""A differentiable function of inputs (n, d) with values (n, c)."""


class TangentModel(Model):
    r"""The posterior of the linearized network, for BoTorch's acquisition functions.

    .. math:: f(x) = m(x) + J(x) (\theta - \theta_0), \qquad \theta - \theta_0 \sim N(0, S)

    conditioned on observations with given prior and noise, by an exact solve in float64. Where the evidence should
    choose prior and noise, fit a `linnet.TangentRegressor` and use `from_regressor`.

    Where X requires a gradient, posteriors have a graph to X, and each candidate takes a row of p numbers.

    Args:
        model: A module, or a `linnet.Linearization` (then without ``params`` and ``output``).
        X: (n, d), observed inputs.
        Y: (n, c), observed values.
        noise: Variance of the observations: a number, or one for each output, (c,).
        prior: S: "unit", "ntk" or "balanced" (all with scale one), a variance, variances by layer glob, or a tensor
            (p,).
        mean: m: "network" for the network's own outputs, or "zero".
        params: Selected parameters, as for `linnet.linearize`.
        output: Function from the module's output to (n, c), as for `linnet.linearize`.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> X = torch.linspace(0, 1, 5)[:, None]
        >>> model = TangentModel(net, X, (6 * X).sin(), noise=0.01)
        >>> posterior = model.posterior(torch.rand(7, 3, 1))  # 7 batches of 3 joint points
        >>> posterior.mean.shape, posterior.distribution.covariance_matrix.shape
        (torch.Size([7, 3, 1]), torch.Size([7, 3, 3]))
    """

    def __init__(
        self,
        model: nn.Module | Linearization,
        X: Tensor,
        Y: Tensor,
        *,
        noise: float | Tensor,
        prior: PriorSpec | Tensor = "unit",
        mean: str = "network",
        params: Params = None,
        output: Output | None = None,
    ) -> None:
        super().__init__()
        if mean not in ("network", "zero"):
            raise ValueError(f"mean must be 'network' or 'zero'; got {mean!r}.")
        if isinstance(prior, str) and prior in ("shared", "layerwise"):
            raise ValueError(
                f"The prior {prior!r} is chosen by the evidence: fit linnet.TangentRegressor(model, prior={prior!r}) "
                "and use TangentModel.from_regressor. Or pass 'unit', 'ntk', a variance, or variances by layer."
            )
        if not isinstance(X, Tensor) or X.ndim != 2:
            raise ValueError(f"TangentModel needs inputs X of shape (n, d); got {_shape(X)}.")
        lin = as_linearization(model, params, output).to(torch.float64)
        J = lin.jacobian(X.detach(), progress=False).cached_if_fits()
        _check_values(Y, (J.n, J.c), "TangentModel")
        y, variance = Y.detach().to(J.device, J.dtype), _check_noise(noise, J.c).to(J.device, J.dtype)
        features = TangentFeatures(lin, prior_variances(lin, prior, J=J))
        m = features.outputs if mean == "network" else None
        r = (y - J.outputs() if mean == "network" else y).flatten()
        S, root = features.variance, variance.rsqrt().repeat(J.n)
        M = root[:, None] * J.gram(scale=S) * root
        M.diagonal().add_(1)
        factor = cholesky_(M)
        delta = S * (J.T @ (root * cholesky_solve(factor, root * r)))
        posterior = FunctionPosterior(J, S, delta, root=root, factor=factor)
        self._set(features, posterior, c=J.c, mean=m, noise=lambda x: variance.expand(len(x), -1))
        self.train_inputs = (X.detach(),)

    @classmethod
    def from_regressor(cls, regressor: TangentRegressor) -> TangentModel:
        """The model of a fitted `linnet.TangentRegressor`, with its prior, noise, mean and solver.

        Args:
            regressor: A regressor fitted on inputs (n, d), best with ``dtype="float64"``: rows of a network in float32
                are often too coarse for acquisition functions, which differentiate them.

        Example:
            >>> X = torch.linspace(0, 1, 8)[:, None]
            >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
            >>> model = TangentModel.from_regressor(TangentRegressor(net).fit(X, (6 * X[:, 0]).sin()))
            >>> model.posterior(torch.rand(3, 1)).variance.shape
            torch.Size([3, 1])
        """
        if not hasattr(regressor, "posterior_"):
            raise ValueError("from_regressor needs a fitted TangentRegressor; call fit(X, y) first.")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        features = TangentFeatures(regressor.lin_, prior_variances(regressor.lin_, regressor.prior_variance_))
        level = regressor._level
        c = regressor._train.base.shape[1]

        def mean(x: Tensor) -> Tensor:
            f = features.outputs(x) if regressor.mean_ == "network" else _zeros(x, c, features.lin)
            return f if level is None else f + level

        scale = _check_noise(regressor.noise_, c).to(features.lin.device, features.lin.dtype)
        known = None if regressor._log_variances is None else TangentFeatures(regressor._log_variances)

        def noise(x: Tensor) -> Tensor:
            return scale.expand(len(x), -1) if known is None else scale * known.outputs(x).exp()

        self._set(features, regressor.posterior_, c=c, mean=mean, noise=noise)
        return self

    def _set(
        self,
        features: TangentFeatures,
        posterior: Posterior,
        *,
        c: int,
        mean: InputFunction | None,
        noise: InputFunction,
    ) -> None:
        self._features, self._posterior, self._c = features, posterior, c
        self._mean, self._noise = mean, noise

    @property
    def num_outputs(self) -> int:
        """c."""
        return self._c

    @property
    def batch_shape(self) -> torch.Size:
        """No batch: one posterior, for batches of inputs."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint posterior at inputs (..., q, d), a ``GPyTorchPosterior`` over q points and c outputs.

        Args:
            X: The inputs.
            output_indices: Indices of the outputs; None for all.
            observation_noise: True adds the model's noise; a tensor (..., q, c) or (..., 1, c) adds these variances.
            posterior_transform: A ``botorch.acquisition.objective.PosteriorTransform``.
        """
        if not isinstance(X, Tensor) or X.ndim < 2:
            raise ValueError(f"posterior needs inputs X of shape (..., q, d); got {_shape(X)}.")
        mean, cov = self._joint(X)
        q = X.shape[-2]
        if isinstance(observation_noise, Tensor):
            cov = _add_diagonal(cov, observation_noise.to(cov).expand_as(mean))
        elif observation_noise:
            cov = _add_diagonal(cov, self._noise_at(X).expand_as(mean))
        if output_indices is not None:
            chosen = torch.tensor(output_indices, device=cov.device)
            rows = (torch.arange(q, device=cov.device)[:, None] * self.num_outputs + chosen).flatten()
            mean, cov = mean[..., chosen], cov[..., rows[:, None], rows]
        lazy = to_linear_operator(cov)
        if mean.shape[-1] == 1:
            found = GPyTorchPosterior(MultivariateNormal(mean[..., 0], lazy))
        else:
            found = GPyTorchPosterior(MultitaskMultivariateNormal(mean, lazy))
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None) -> TangentModel:
        """The model with more observations and the same prior and noise; differentiable in the observations.

        Args:
            X: (..., n', d).
            Y: (..., n', c), perhaps with more leading dimensions, such as one for fantasies.
            noise: Variances that broadcast with Y; None for the model's own.
        """
        return _ConditionedModel(self, X, Y, noise)

    def fantasize(self, X: Tensor, sampler: Any, observation_noise: Tensor | None = None) -> TangentModel:
        """The model conditioned on observations at X (..., n', d) that are drawn from its own posterior.

        Args:
            X: Inputs of the new observations.
            sampler: A BoTorch sampler; its sample shape leads the batch shape of the new model.
            observation_noise: Variances (..., n', c) or (..., 1, c); None for the model's own.
        """
        noise = True if observation_noise is None else observation_noise
        return self.condition_on_observations(X, sampler(self.posterior(X, observation_noise=noise)), observation_noise)

    def _noise_at(self, X: Tensor) -> Tensor:
        """Noise variances at inputs (..., q, d), (..., q, c)."""
        return self._noise(X.reshape(-1, X.shape[-1])).view(*X.shape[:-1], self.num_outputs)

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., q, c) and covariance (..., q c, q c) of f at inputs (..., q, d)."""
        x = X.reshape(-1, X.shape[-1])
        batch, rows = X.shape[:-2], X.shape[-2] * self.num_outputs
        f = self._features.of(x)
        mean = (f @ self._posterior.delta).view(-1, self.num_outputs)
        mean = mean if self._mean is None else mean + self._mean(x)
        cov = self._covariances(f, batch.numel())
        return mean.view(*X.shape[:-1], self.num_outputs), cov.reshape(*batch, rows, rows)

    def _covariances(self, f: Features, count: int) -> Tensor:
        """Joint covariances of ``count`` groups of rows, (count, rows / count, rows / count)."""
        posterior = self._posterior
        rows = DifferentiableRows(f, self.num_outputs) if isinstance(f, Tensor) else f
        T = posterior.features(rows)
        T = T.reshape(count, -1, T.shape[1])
        out = (posterior.weights * T) @ T.mT
        return out if posterior.D is None else out + self._features.blocks(f, f, count)


class _ConditionedModel(TangentModel):
    """A model that has also observed (X, Y): its joint posterior at X and other inputs is conditioned on Y."""

    def __init__(self, base: TangentModel, X: Tensor, Y: Tensor, noise: Tensor | None) -> None:
        nn.Module.__init__(self)
        if not isinstance(X, Tensor) or X.ndim < 2:
            raise ValueError(f"New observations need inputs X of shape (..., n, d); got {_shape(X)}.")
        _check_values(Y, (X.shape[-2], base.num_outputs), "A new observation")
        self._base, self._X = base, X
        self._Y = Y.to(base._features.lin.device, base._features.lin.dtype)
        self._features, self._given = base._features, noise
        self._batch = torch.broadcast_shapes(base.batch_shape, X.shape[:-2], Y.shape[:-2])

    @property
    def num_outputs(self) -> int:
        return self._base.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return self._batch

    def _noise_at(self, X: Tensor) -> Tensor:
        return self._base._noise_at(X)

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        batch = torch.broadcast_shapes(self._batch, X.shape[:-2])
        seen = self._X.to(X).expand(*batch, -1, -1)
        mean, cov = self._base._joint(torch.cat([seen, X.expand(*batch, -1, -1)], -2))
        n, m = seen.shape[-2], seen.shape[-2] * self.num_outputs
        noise = self._noise_at(seen) if self._given is None else self._given.to(cov)
        C = torch.linalg.cholesky(_add_diagonal(cov[..., :m, :m], noise.expand(*batch, n, self.num_outputs)))
        T = torch.linalg.solve_triangular(C, cov[..., :m, m:], upper=False)
        r = torch.linalg.solve_triangular(C, (self._Y - mean[..., :n, :]).flatten(-2)[..., None], upper=False)
        shift = (T.mT @ r).view(*batch, -1, self.num_outputs)
        return mean[..., n:, :] + shift, cov[..., m:, m:] - T.mT @ T


def _add_diagonal(cov: Tensor, variances: Tensor) -> Tensor:
    """The covariance (..., q c, q c) with noise variances (..., q, c) on its diagonal."""
    return cov + torch.diag_embed(variances.flatten(-2))


def _zeros(x: Tensor, c: int, lin: Linearization) -> Tensor:
    return torch.zeros(len(x), c, dtype=lin.dtype, device=lin.device)


def _check_values(Y: Any, shape: tuple[int, int], who: str) -> None:
    if not isinstance(Y, Tensor) or Y.ndim < 2 or tuple(Y.shape[-2:]) != shape:
        hint = " Use Y.unsqueeze(-1)." if isinstance(Y, Tensor) and Y.ndim == 1 and shape == (len(Y), 1) else ""
        raise ValueError(
            f"{who} has {shape[0]} inputs and the network {shape[1]} outputs, so values Y need shape "
            f"(..., {shape[0]}, {shape[1]}); got {_shape(Y)}.{hint}"
        )
    if not bool(torch.isfinite(Y).all()):
        raise ValueError("Values Y must be finite, and there is NaN or infinity. Leave such observations out.")


def _check_noise(noise: Any, c: int) -> Tensor:
    """Noise variances of c outputs, (c,)."""
    given = torch.as_tensor(noise, dtype=torch.float64).detach().flatten()
    if len(given) not in (1, c) or not all(isfinite(v) and v > 0 for v in given.tolist()):
        raise ValueError(
            f"noise is a variance: one positive number, or one for each of {c} outputs; got {given.tolist()}."
        )
    return given.expand(c)


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
