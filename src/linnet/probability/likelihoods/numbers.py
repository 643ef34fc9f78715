"""Likelihoods of numbers with Gaussian noise."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from linnet.probability.likelihoods.base import Device, Likelihood, as_continuous, as_numbers, standard_normal


@final
class Gaussian(Likelihood):
    """y ~ N(f, noise), outputs apart.

    Args:
        noise: The variance of the observation noise: one number, or (c,) for one per output.

    Example:
        >>> likelihood = Gaussian(0.25)
        >>> likelihood.residual(torch.zeros(2, 1), torch.ones(2, 1)).flatten()
        tensor([4., 4.])
        >>> likelihood.curvature(torch.zeros(2, 1)).shape
        torch.Size([2, 1])
    """

    def __init__(self, noise: float | Tensor) -> None:
        values = noise if isinstance(noise, Tensor) else torch.as_tensor(noise, dtype=torch.float64)
        if values.ndim > 1 or values.is_complex() or values.numel() == 0:
            raise ValueError(
                "The noise of Gaussian is a variance: one number, or one per output, (c,); "
                f"got {values.dtype} of shape {tuple(values.shape)}."
            )
        values, given = values.detach(), values
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ValueError(
                "The noise of Gaussian is a variance and must be positive and finite; "
                f"got {values.tolist()}. For data without noise use a small variance such as 1e-6 times that of y."
            )
        self.noise: float | Tensor = given if given.ndim else float(values)

    def __repr__(self) -> str:
        return f"Gaussian({self.noise if isinstance(self.noise, float) else self.noise.tolist()})"

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        self._variance(torch.empty(0, c))
        return as_continuous("Gaussian", y, n, c, dtype, device)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        noise = self._variance(f)
        return -0.5 * ((y - f).square() / noise + torch.log(2 * math.pi * noise)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return (y - f) / self._variance(f)

    def curvature(self, f: Tensor) -> Tensor:
        return self._variance(f).reciprocal().expand(f.shape).contiguous()

    def root(self, f: Tensor) -> Tensor:
        return self._variance(f).rsqrt().expand(f.shape).contiguous()

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return self._variance(f).expand(f.shape)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return 0.5 * ((f - other).square() / self._variance(f)).sum(-1)

    def settings(self) -> dict[str, Any]:
        return {"noise": self.noise if isinstance(self.noise, float) else self.noise.tolist()}

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return f + self._variance(f).sqrt() * standard_normal(f.shape, f, generator)

    def _variance(self, f: Tensor) -> Tensor:
        """The noise (c,) of as many outputs as f has."""
        noise, c = self.noise, f.shape[-1]
        if isinstance(noise, float):
            return torch.full((c,), noise, dtype=f.dtype, device=f.device)
        if len(noise) != c:
            raise ValueError(
                f"Gaussian has noise for {len(noise)} outputs and the network has {c}. "
                f"Give one variance, or {c} of them."
            )
        return noise.to(f)


@final
class Heteroscedastic(Likelihood):
    """y ~ N(m, exp(s)) with m and s both outputs of the network: first the d means, then the d log variances, c = 2 d.

    The curvature is the Fisher information, exp(-s) for a mean and 1/2 for a log variance; minus the second derivative
    of log p has entries between the two as well, and can be indefinite.

    Example:
        >>> f = torch.tensor([[1.0, 0.0]])  # mean 1, variance exp(0)
        >>> Heteroscedastic().log_prob(f, torch.tensor([[1.0]]))
        tensor([-0.9189])
        >>> Heteroscedastic().curvature(f)
        tensor([[1.0000, 0.5000]])
    """

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        self.split(torch.empty(0, c))
        return as_continuous("Heteroscedastic", y, n, c // 2, dtype, device)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = self.split(f)
        return -0.5 * ((y - m).square() * (-s).exp() + s + math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = self.split(f)
        scaled = (y - m) * (-s).exp()
        return torch.cat([scaled, 0.5 * ((y - m) * scaled - 1)], -1)

    def curvature(self, f: Tensor) -> Tensor:
        _, s = self.split(f)
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def root(self, f: Tensor) -> Tensor:
        _, s = self.split(f)
        return torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], -1)

    def mean(self, f: Tensor) -> Tensor:
        """The means, (n, d)."""
        return self.split(f)[0]

    def variance(self, f: Tensor) -> Tensor:
        return self.split(f)[1].exp()

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        (m, s), (a, t) = self.split(f), self.split(other)
        return 0.5 * (torch.expm1(s - t) - (s - t) + (m - a).square() * (-t).exp()).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        m, s = self.split(f)
        return m + (0.5 * s).exp() * standard_normal(m.shape, m, generator)

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The means and the log variances, (n, d) each."""
        if f.shape[-1] % 2:
            raise ValueError(
                "Heteroscedastic needs an even number of outputs, the means and then as many log variances; "
                f"the network has {f.shape[-1]}. Say how to read them with output=."
            )
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance


@final
class KnownNoise(Likelihood):
    """y ~ N(f, v) with a variance v that is known for each observation.

    The targets hold the observations and then their variances, (n, 2 c): `pack` puts them together.

    Example:
        >>> y = KnownNoise.pack(torch.zeros(2, 1), torch.tensor([[1.0], [4.0]]))
        >>> KnownNoise().observed_curvature(torch.zeros(2, 1), y).flatten()
        tensor([1.0000, 0.2500])
    """

    @staticmethod
    def pack(y: Tensor, noise: Tensor) -> Tensor:
        """Targets from observations and variances, (n, c) each."""
        return torch.cat([y, noise.to(y)], 1)

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        y = as_continuous("KnownNoise", y, n, 2 * c, dtype, device)
        if not bool((y[:, c:] > 0).all()):
            i = int((y[:, c:] <= 0).any(1).nonzero()[0])
            raise ValueError(f"The noise of an observation is a variance and must be positive; that of {i} is not.")
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, v = y.chunk(2, -1)
        return -0.5 * ((y - f).square() / v + torch.log(2 * math.pi * v)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        y, v = y.chunk(2, -1)
        return (y - f) / v

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        return y.chunk(2, -1)[1].reciprocal().expand(f.shape).contiguous()

    def mean(self, f: Tensor) -> Tensor:
        return f


def as_variances(noise: Any, n: int, c: int) -> Tensor:
    """A known variance for each observation, (n, c), from (n,), (n, 1) or (n, c), checked.

    >>> as_variances([1.0, 2.0], 2, 1)
    tensor([[1.],
            [2.]], dtype=torch.float64)
    """
    values = as_numbers("noise", noise)
    values = values if values.is_floating_point() else values.double()
    if tuple(values.shape) not in ((n,), (n, 1), (n, c)):
        several = f" or ({n}, {c})" if c > 1 else ""
        raise ValueError(
            f"noise for each of {n} observations needs shape ({n},){several}; got {tuple(values.shape)}. One number "
            "is the noise of all."
        )
    bad = ~(torch.isfinite(values) & (values > 0)).reshape(n, -1).all(1)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"noise is a variance and must be positive and finite; observation {i} has {values[i].flatten().tolist()}."
        )
    return values.reshape(n, -1).expand(n, c)
