"""Likelihoods of counts, ordered classes and times, one of a user's own, and targets drawn from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linnet.likelihoods import Likelihood, NegativeBinomial, Ordinal, Poisson, Weibull


class Robust(Likelihood):
    """A user's own: a smooth absolute error, with nothing but a density, a mean and draws."""

    def __init__(self, width: float = 0.5) -> None:
        self.width = width

    def settings(self) -> dict[str, Any]:
        return {"width": self.width}

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -(1 + ((y - f) / self.width).square()).sqrt().sum(-1)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return f + self.width * torch.randn(f.shape, dtype=f.dtype, generator=generator)


class Together(Likelihood):
    """A user's own whose outputs are coupled: softmax of labels, by autograd alone."""

    diagonal = False

    def targets(self, y: Any, n: int, c: int, **_: Any) -> Tensor:
        return torch.as_tensor(y)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.log_softmax(f, -1).gather(-1, y.expand(f.shape[:-1])[..., None])[..., 0]

    def mean(self, f: Tensor) -> Tensor:
        return torch.softmax(f, -1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(torch.softmax(f, -1), 1, generator=generator)[:, 0]


OBSERVED: dict[str, tuple[Likelihood, int]] = {
    "poisson": (Poisson(), 2),
    "negative-binomial": (NegativeBinomial(0.6), 2),
    "ordinal": (Ordinal([-1.0, 0.2, 1.5]), 1),
    "weibull": (Weibull(1.7), 1),
    "own": (Robust(), 2),
    "own, coupled": (Together(), 3),
}
"""Each with the number of outputs of a small network."""


def draw_targets(likelihood: Likelihood, f: Tensor, seed: int = 0) -> Tensor:
    """Targets for outputs f; a third of the times are censored."""
    y = likelihood.sample(f, torch.Generator().manual_seed(seed))
    if isinstance(likelihood, Weibull):
        y[::3, 0] *= 0.6
        y[::3, 1] = 0
    return y
