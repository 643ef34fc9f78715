"""Likelihoods of counts, with the logarithm of the mean as the output."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.probability.likelihoods.base import (
    Device,
    ExponentialMean,
    as_continuous,
    maximize_positive,
    weights_of,
)


def as_counts(name: str, y: Any, n: int, c: int, dtype: torch.dtype | None, device: Device) -> Tensor:
    """Counts (n, c) as floating numbers: whole and not negative."""
    y = as_continuous(name, y, n, c, dtype, device)
    bad = ((y < 0) | (y != y.round())).any(1)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} needs counts, whole numbers that are not negative; example {i} has {y[i].tolist()[:4]}. For other "
            "numbers use likelihood='regression'."
        )
    return y


@final
class Poisson(ExponentialMean):
    """Counts with mean and variance exp(f), outputs apart.

    Example:
        >>> Poisson().log_prob(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([-1.])
    """

    @property
    def powers(self) -> tuple[float, float, float]:
        return 1.0, 1.0, 0.0

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        return as_counts("Poisson", y, n, c, dtype, device)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f.exp()

    def curvature(self, f: Tensor) -> Tensor:
        return f.exp()

    def root(self, f: Tensor) -> Tensor:
        return (f / 2).exp()

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return (f.exp() * (f - other) - f.exp() + other.exp()).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        device = f.device if generator is None else generator.device
        return torch.poisson(f.exp().to(device), generator=generator).to(f.device)


@final
class NegativeBinomial(ExponentialMean):
    r"""Counts with mean :math:`\mu = \exp(f)` and variance :math:`\mu + \alpha \mu^2`, outputs apart.

    With g = f + log alpha, log p is y log s(g) + log s(-g) / alpha and a constant, with s the logistic function: two
    log-concave terms. The Poisson distribution is the limit of alpha = 0.

    Args:
        dispersion: alpha, positive. None leaves it open: an estimator takes that of largest likelihood at its mean
            function.

    Example:
        >>> NegativeBinomial(1.0).log_prob(torch.zeros(1, 1), torch.ones(1, 1))  # 1/2 of 1/2
        tensor([-1.3863])
    """

    def __init__(self, dispersion: float | None = None) -> None:
        if dispersion is not None and not 0 < float(dispersion) < float("inf"):
            raise ValueError(
                f"dispersion must be a positive number, the alpha of the variance mu + alpha mu^2; got {dispersion!r}. "
                "Without dispersion use Poisson."
            )
        self.dispersion = None if dispersion is None else float(dispersion)

    def __repr__(self) -> str:
        return f"NegativeBinomial({'' if self.dispersion is None else format(self.dispersion, '.4g')})"

    @property
    def is_open(self) -> bool:
        return self.dispersion is None

    def settings(self) -> dict[str, Any]:
        return {} if self.dispersion is None else {"dispersion": self.dispersion}

    @property
    def alpha(self) -> float:
        """The dispersion, where it is known."""
        if self.dispersion is None:
            raise ValueError(
                "The dispersion of NegativeBinomial() is open: give it, as in NegativeBinomial(0.5), or let an "
                "estimator find it with fit."
            )
        return self.dispersion

    @property
    def powers(self) -> tuple[float, float, float]:
        return 1.0, 1.0, self.alpha

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        return as_counts("NegativeBinomial", y, n, c, dtype, device)

    def shift(self, f: Tensor) -> Tensor:
        """g = f + log alpha."""
        return f + torch.log(torch.tensor(self.alpha, dtype=f.dtype, device=f.device))

    def constant(self, y: Tensor) -> Tensor:
        """The part of log p that does not depend on f, for each output."""
        r = 1 / self.alpha
        return torch.lgamma(y + r) - torch.lgamma(y + 1) - torch.lgamma(y.new_tensor(r))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        g = self.shift(f)
        return (y * F.logsigmoid(g) + F.logsigmoid(-g) / self.alpha + self.constant(y)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        g = self.shift(f)
        return y * torch.sigmoid(-g) - torch.sigmoid(g) / self.alpha

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        g = self.shift(f)
        return (y + 1 / self.alpha) * torch.sigmoid(g) * torch.sigmoid(-g)

    def curvature(self, f: Tensor) -> Tensor:
        return torch.sigmoid(self.shift(f)) / self.alpha

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        g, h = self.shift(f), self.shift(other)
        differ = f.exp() * (F.logsigmoid(g) - F.logsigmoid(h)) + (F.logsigmoid(-g) - F.logsigmoid(-h)) / self.alpha
        return differ.sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        device = f.device if generator is None else generator.device
        r = torch.full(f.shape, 1 / self.alpha, dtype=f.dtype, device=device)
        rate = torch._standard_gamma(r, generator=generator) * self.alpha * f.exp().to(device)
        return torch.poisson(rate, generator=generator).to(f.device)

    def fitted(self, f: Tensor, y: Tensor, weight: Tensor | None = None) -> NegativeBinomial:
        if self.dispersion is not None:
            return self
        f, y, w = f.double(), y.double(), weights_of(weight, f).double()
        return NegativeBinomial(
            maximize_positive(lambda a: float((w * NegativeBinomial(a).log_prob(f, y)).sum()), 1e-6, 1e3)
        )
