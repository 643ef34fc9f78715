"""Networks to compare with: trained anew, fine-tuned, in ensembles; each after a search over what people tune."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.common.ensembles import Trained, Widths, forward, initial, train

RATES = (1e-3, 3e-3, 1e-2)
DECAYS = (0.0, 0.1)
FINE_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Prediction:
    """Gaussian predictions, noise included: means and variances (..., n)."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Search:
    """How networks are trained: the schedule, and the share of the data that chooses."""

    steps: int = 2000
    batch: int = 256
    share: float = 0.2
    rates: Sequence[float] = RATES
    decays: Sequence[float] = DECAYS


def parts(n: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices for training and for validation."""
    order = torch.randperm(n, generator=generator, device=generator.device)
    count = max(1, round(share * n))
    return order[count:], order[:count]


def repeated(x: Tensor, k: int) -> Tensor:
    """Each entry of the first axis k times in a row."""
    return x.repeat_interleave(k, 0)


def searched(
    start: Tensor, X: Tensor, y: Tensor, widths: Widths, *, search: Search, generator: torch.Generator
) -> tuple[Trained, Tensor, Tensor]:
    """The best learning rate and decay of each data set, by validation.

    Args:
        start: Starting parameters (s, p), one per data set.
        X: Inputs (s, n, d).
        y: Targets (s, n).
        widths: Layer widths.
        search: The settings tried.
        generator: Draws the validation part and the minibatches.

    Returns:
        The best networks (s), trained on the training part alone; their rates and decays (s,).
    """
    s, n = y.shape
    grid = torch.tensor(list(itertools.product(search.rates, search.decays)), dtype=X.dtype, device=X.device)
    k = len(grid)
    a, b = parts(n, search.share, generator)
    rate, decay = grid.repeat(s, 1).T
    found = train(
        repeated(start, k),
        repeated(X[:, a], k),
        repeated(y[:, a], k),
        widths,
        rate=rate,
        decay=decay,
        steps=search.steps,
        batch=search.batch,
        generator=generator,
        valid=(repeated(X[:, b], k), repeated(y[:, b], k)),
    )
    best = found.loss.view(s, k).argmin(1) + k * torch.arange(s, device=X.device)
    one = Trained(found.theta[best], found.steps[best], found.loss[best], found.valid[best])
    return one, rate[best], decay[best]


@dataclass(frozen=True)
class Fitted:
    """Networks trained on all their data after a search, and the noise that their validation errors show.

    Attributes:
        theta: Parameters (s, members, p).
        noise: Variance to add to the members' disagreement (s,).
    """

    theta: Tensor
    noise: Tensor

    def predict(self, X: Tensor, widths: Widths, *, members: int | None = None) -> Prediction:
        """Mean over members, and noise plus their disagreement, at X (s, n, d)."""
        theta = self.theta[:, :members]
        s, k, p = theta.shape
        f = forward(theta.reshape(s * k, p), repeated(X, k), widths).view(s, k, -1)
        variance = f.var(1, unbiased=False) + self.noise[:, None]
        return Prediction(f.mean(1).double(), variance.double())


def fit_networks(
    X: Tensor,
    y: Tensor,
    widths: Widths,
    *,
    members: int,
    search: Search,
    generator: torch.Generator,
    start: Tensor | None = None,
) -> tuple[Fitted, Fitted]:
    """One network and an ensemble per data set, tuned on a validation part, then trained on everything.

    Rate and decay come from a search with one network; every member then finds its number of steps on the same
    validation part and is trained again, on all data, for as many. The noise is what makes the validation data most
    likely, given the mean and the disagreement there.

    Args:
        X: Inputs (s, n, d).
        y: Targets (s, n).
        widths: Layer widths.
        members: Networks in the ensemble.
        search: The settings tried.
        generator: Randomness.
        start: Parameters to start from (s, p), for fine-tuning; drawn where None.

    Returns:
        The first network alone and the ensemble of all members.
    """
    s, n = y.shape
    k = members
    drawn = initial(s * k, widths, generator=generator, dtype=X.dtype) if start is None else repeated(start, k)
    seed = generator.initial_seed()
    again = torch.Generator(device=X.device).manual_seed(seed)
    one, rate, decay = searched(drawn[::k], X, y, widths, search=search, generator=again)
    a, b = parts(n, search.share, torch.Generator(device=X.device).manual_seed(seed))
    rate, decay = repeated(rate, k), repeated(decay, k)
    common: dict[str, Any] = {
        "rate": rate,
        "decay": decay,
        "steps": search.steps,
        "batch": search.batch,
        "generator": generator,
    }
    if k == 1:
        found = one
    else:
        valid = (repeated(X[:, b], k), repeated(y[:, b], k))
        found = train(drawn, repeated(X[:, a], k), repeated(y[:, a], k), widths, valid=valid, **common)
    full = train(drawn, repeated(X, k), repeated(y, k), widths, stop=found.steps, **common)
    theta = full.theta.view(s, k, -1)
    f = found.valid.view(s, k, -1)
    single = Fitted(theta[:, :1], likeliest_noise(f[:, 0], torch.zeros_like(f[:, 0]), y[:, b]))
    disagreement = f.var(1, unbiased=False)
    return single, Fitted(theta, likeliest_noise(f.mean(1), disagreement, y[:, b]))


def likeliest_noise(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The constant added to the variances (s, n) under which y (s, n) is most likely (s,), on a fine grid.

    >>> likeliest_noise(torch.zeros(1, 4), torch.zeros(1, 4), torch.full((1, 4), 0.5)).allclose(
    ...     torch.tensor(0.25), rtol=0.01)
    True
    """
    error = (y - mean).square()
    scale = error.mean(1, keepdim=True).clamp_min(1e-12)
    grid = torch.logspace(-4, 0.5, 451, dtype=y.dtype, device=y.device)
    total = variance[:, None] + grid[:, None] * scale[:, :, None]
    nll = (total.log() + error[:, None] / total).mean(2)
    return scale[:, 0] * grid[nll.argmin(1)]
