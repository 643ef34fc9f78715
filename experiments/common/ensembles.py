"""Many small tanh networks trained at once: members of an ensemble, settings of a search, splits of a data set.

Networks to compare with are trained anew, fine-tuned or in ensembles; each after a search over what people tune.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Widths = Sequence[int]
RATES = (1e-3, 3e-3, 1e-2)
DECAYS = (0.0, 0.1)
FINE_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class Trained:
    """Networks at the step that was best on their validation data, or where they were told to stop."""

    theta: Tensor  # parameters (m, p), one network a row
    steps: Tensor  # gradient steps taken by each (m,)
    loss: Tensor  # mean squared error on the validation data there (m,); NaN without validation data
    valid: Tensor  # predictions of the validation data there (m, nv); empty without


def initial(m: int, widths: Widths, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Parameters (m, p) drawn as torch.nn.Linear does: uniform within 1 / sqrt(fan_in).

    >>> initial(3, (2, 5, 1), generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 21])
    """
    parts = []
    for d, h in itertools.pairwise(widths):
        draw = torch.rand(m, d * h + h, dtype=dtype, generator=generator, device=generator.device)
        parts.append((2 * draw - 1) / math.sqrt(d))
    return torch.cat(parts, 1)


def forward(theta: Tensor, X: Tensor, widths: Widths) -> Tensor:
    """Outputs (m, n) of networks with parameters (m, p) on their own inputs X (m, n, d)."""
    start = 0
    for i, (d, h) in enumerate(itertools.pairwise(widths)):
        weight = theta[:, start : start + d * h].view(-1, h, d)
        bias = theta[:, start + d * h : start + d * h + h].unsqueeze(1)
        X = torch.baddbmm(bias, X.tanh() if i else X, weight.mT)
        start += d * h + h
    return X.squeeze(-1)


def module(theta: Tensor, widths: Widths, *, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """One network, parameters (p,), as a torch module in eval mode."""
    layers: list[nn.Module] = []
    start = 0
    for d, h in itertools.pairwise(widths):
        linear = nn.Linear(d, h, dtype=dtype, device=theta.device)
        with torch.no_grad():
            linear.weight.copy_(theta[start : start + d * h].view(h, d))
            linear.bias.copy_(theta[start + d * h : start + d * h + h])
        layers += [linear, nn.Tanh()]
        start += d * h + h
    return nn.Sequential(*layers[:-1]).eval()


def train(
    theta: Tensor,
    X: Tensor,
    y: Tensor,
    widths: Widths,
    *,
    rate: Tensor,
    steps: int,
    generator: torch.Generator,
    decay: Tensor | None = None,
    batch: int = 256,
    valid: tuple[Tensor, Tensor] | None = None,
    stop: Tensor | None = None,
    every: int = 20,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Trained:
    """Adam on the squared error with cosine decay of the rate, each network with its own rate, decay and data.

    Early stopping is by keeping the best: all networks run to the end of the schedule, and each keeps the parameters
    with the smallest validation error on the way. Step 0 counts, so a start that nothing improves on is kept.

    Args:
        theta: Starting parameters (m, p).
        X: Inputs (m, n, d).
        y: Targets (m, n).
        widths: Layer widths from input to output.
        rate: Learning rates (m,).
        steps: Length of the schedule.
        generator: Draws the minibatches.
        decay: Decoupled weight decay (m,), relative to the learning rate.
        batch: Examples per step; all of them where there are fewer.
        valid: Validation inputs (m, nv, d) and targets (m, nv).
        stop: Step at which each network is taken (m,), instead of validation.
        every: Steps between looks at the validation data.
        watch: Called as watch(step, theta) at every look.

    Returns:
        The networks kept.
    """
    if (valid is None) == (stop is None):
        raise ValueError("Give either validation data (valid) or the step to stop at (stop).")
    m, n = y.shape
    theta = theta.detach().clone()
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    rate = rate.to(theta)[:, None]
    shrink = torch.zeros_like(rate) if decay is None else decay.to(theta)[:, None]
    kept = theta.clone()
    taken = torch.zeros(m, dtype=torch.long, device=theta.device)
    best = torch.full((m,), math.inf, dtype=theta.dtype, device=theta.device)
    seen = theta.new_zeros(m, 0 if valid is None else valid[1].shape[1])
    order = torch.arange(0, device=theta.device)
    last = steps if stop is None else int(stop.max())
    for step in range(last + 1):
        look = step % every == 0 or step == last
        if look and watch is not None:
            watch(step, theta)
        if valid is not None and look:
            with torch.no_grad():
                f = forward(theta, valid[0], widths)
            loss = (f - valid[1]).square().mean(1)
            better = loss < best
            kept[better], taken[better], best[better], seen[better] = theta[better], step, loss[better], f[better]
        if stop is not None:
            now = stop.to(theta.device) == step
            kept[now], taken[now] = theta[now], step
        if step == last:
            break
        if n <= batch:
            Xb, yb = X, y
        else:
            if len(order) < batch:
                order = torch.randperm(n, generator=generator, device=theta.device)
            index, order = order[:batch], order[batch:]
            Xb, yb = X[:, index], y[:, index]
        leaf = theta.requires_grad_()
        loss = (forward(leaf, Xb, widths) - yb).square().mean(1).sum()  # the sum keeps the networks apart
        (gradient,) = torch.autograd.grad(loss, leaf)
        theta = leaf.detach()
        eta = rate * (0.5 * (1 + math.cos(math.pi * step / steps)))
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (second / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8)
        theta = theta * (1 - eta * shrink) - eta * first / (1 - 0.9 ** (step + 1)) / scale
    loss = best if valid is not None else torch.full_like(best, math.nan)
    return Trained(kept, taken, loss, seen)


# A search, and networks that are trained after it.


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


def split_indices(n: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices for training and for validation."""
    order = torch.randperm(n, generator=generator, device=generator.device)
    count = max(1, round(share * n))
    return order[count:], order[:count]


def repeat(x: Tensor, k: int) -> Tensor:
    """Each entry of the first axis k times in a row."""
    return x.repeat_interleave(k, 0)


def search_settings(
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
    a, b = split_indices(n, search.share, generator)
    rate, decay = grid.repeat(s, 1).T
    found = train(
        repeat(start, k),
        repeat(X[:, a], k),
        repeat(y[:, a], k),
        widths,
        rate=rate,
        decay=decay,
        steps=search.steps,
        batch=search.batch,
        generator=generator,
        valid=(repeat(X[:, b], k), repeat(y[:, b], k)),
    )
    best = found.loss.view(s, k).argmin(1) + k * torch.arange(s, device=X.device)
    one = Trained(found.theta[best], found.steps[best], found.loss[best], found.valid[best])
    return one, rate[best], decay[best]


@dataclass(frozen=True)
class Fitted:
    """Networks trained on all their data after a search, and the noise that their validation errors show."""

    theta: Tensor  # parameters (s, members, p)
    noise: Tensor  # variance to add to the members' disagreement (s,)

    def predict(self, X: Tensor, widths: Widths, *, members: int | None = None) -> Prediction:
        """Mean over members, and noise plus their disagreement, at X (s, n, d)."""
        theta = self.theta[:, :members]
        s, k, p = theta.shape
        f = forward(theta.reshape(s * k, p), repeat(X, k), widths).view(s, k, -1)
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
    drawn = initial(s * k, widths, generator=generator, dtype=X.dtype) if start is None else repeat(start, k)
    seed = generator.initial_seed()
    again = torch.Generator(device=X.device).manual_seed(seed)
    one, rate, decay = search_settings(drawn[::k], X, y, widths, search=search, generator=again)
    a, b = split_indices(n, search.share, torch.Generator(device=X.device).manual_seed(seed))
    rate, decay = repeat(rate, k), repeat(decay, k)
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
        valid = (repeat(X[:, b], k), repeat(y[:, b], k))
        found = train(drawn, repeat(X[:, a], k), repeat(y[:, a], k), widths, valid=valid, **common)
    full = train(drawn, repeat(X, k), repeat(y, k), widths, stop=found.steps, **common)
    theta = full.theta.view(s, k, -1)
    f = found.valid.view(s, k, -1)
    single = Fitted(theta[:, :1], find_noise(f[:, 0], torch.zeros_like(f[:, 0]), y[:, b]))
    disagreement = f.var(1, unbiased=False)
    return single, Fitted(theta, find_noise(f.mean(1), disagreement, y[:, b]))


def find_noise(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The constant added to the variances (s, n) under which y (s, n) is most likely (s,), on a fine grid.

    >>> find_noise(torch.zeros(1, 4), torch.zeros(1, 4), torch.full((1, 4), 0.5)).allclose(
    ...     torch.tensor(0.25), rtol=0.01)
    True
    """
    error = (y - mean).square()
    scale = error.mean(1, keepdim=True).clamp_min(1e-12)
    grid = torch.logspace(-4, 0.5, 451, dtype=y.dtype, device=y.device)
    total = variance[:, None] + grid[:, None] * scale[:, :, None]
    nll = (total.log() + error[:, None] / total).mean(2)
    return scale[:, 0] * grid[nll.argmin(1)]
