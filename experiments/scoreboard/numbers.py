"""Methods for regression: from a task to Gaussian predictions of its test examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.common import ensembles
from experiments.common.ensembles import Prediction, find_noise, forward
from experiments.common.processes import Process
from experiments.common.training import Labeled
from experiments.scoreboard.tasks import Task, flatten, widths_of

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates that fine-tuning tries."""
FOLDS, FEW = 5, 100
"""Folds that choose the settings of fine-tuning up to so many labels; with more labels one fold is enough."""


def outputs(networks: Sequence[nn.Module], data: Labeled) -> Tensor:
    """Outputs (members, n) of the networks."""
    with torch.no_grad():
        return torch.stack([net(*data.X)[:, 0] for net in networks])


def mix(f: Tensor, noise: Tensor) -> Prediction:
    """Mean of the members' outputs (members, n), and noise plus their disagreement."""
    return Prediction(f.mean(0), f.var(0, unbiased=False) + noise)


def keep_networks(task: Task, count: int) -> Prediction:
    """The networks as they stand; the noise is likeliest on the adaptation rows."""
    f, at = (outputs(task.networks[:count], data) for data in (task.train, task.test))
    seen = mix(f, f.new_zeros(()))
    return mix(at, find_noise(seen.mean[None], seen.variance[None], task.train.y[None])[0])


def fine_tune(task: Task, count: int, *, steps: int = 600, every: int = 10) -> Prediction:
    """Adam on all weights of each network, with rate and steps of the least error on held-out rows.

    Up to `FEW` rows, every row is held out once (five folds); with more rows a fifth is held out. The noise is the
    likeliest one of the held-out rows. Each network is then trained on all rows with its own best rate and steps.
    """
    widths, (X,), y = widths_of(task.networks[0]), task.train.X, task.train.y
    start = torch.stack([flatten(net) for net in task.networks[:count]]).float()
    X, y, n = X.float(), y.float(), len(y)
    folds = min(FOLDS, n) if n <= FEW else 1
    generator = torch.Generator().manual_seed(task.seed)
    size = n // min(FOLDS, n)
    order = torch.randperm(n, generator=generator)
    held = torch.stack([order[k * size : (k + 1) * size] for k in range(folds)])
    kept = torch.stack([order[~torch.isin(order, part)] for part in held])
    k, rates = len(RATES), torch.tensor(RATES)
    # Networks in the order (member, fold, rate).
    data = [t[part].repeat_interleave(k, 0).repeat(count, *[1] * t.ndim) for part in (kept, held) for t in (X, y)]
    seen: list[tuple[int, Tensor]] = []

    def watch(step: int, theta: Tensor) -> None:
        f = forward(theta.detach(), data[2], widths)
        seen.append((step, f.view(count, folds, k, size)))

    how: dict[str, Any] = {"steps": steps, "batch": 128, "generator": generator, "every": every}
    full = torch.full((count * folds * k,), steps)
    start_all = start.repeat_interleave(folds * k, 0)
    ensembles.train(start_all, *data[:2], widths, rate=rates.repeat(count * folds), stop=full, watch=watch, **how)
    tried = torch.stack([f for _, f in seen])  # (looks, members, folds, rates, held)
    error = (tried - y[held][None, None, :, None]).square().mean((2, 4))  # (looks, members, rates)
    best = error.transpose(0, 1).flatten(1).argmin(1)
    look, rate = best // k, best % k
    stop = torch.tensor([step for step, _ in seen])[look]
    repeated = X.expand(count, -1, -1), y.expand(count, -1)
    theta = ensembles.train(start, *repeated, widths, rate=rates[rate], stop=stop, **how).theta
    f = torch.stack([tried[look[i], i, :, rate[i]].flatten() for i in range(count)]).double()
    valid = mix(f, f.new_zeros(()))
    noise = find_noise(valid.mean[None], valid.variance[None], task.train.y[held].flatten()[None])[0]
    at = forward(theta, task.test.X[0].float().expand(count, -1, -1), widths).double()
    return mix(at, noise)


def fit_process(task: Task, *, residuals: bool) -> Prediction:
    """A Gaussian process with an RBF kernel on the rows, or on what the network leaves of them."""
    f, base = (outputs(task.networks[:1], data)[0] * residuals for data in (task.train, task.test))
    process = Process(task.train.X[0], task.train.y - f, kernel="rbf")
    process.fit(iterations=50, starts=len(f) <= FEW)
    mean, variance = process.predict(task.test.X[0])
    return Prediction(mean + base, variance)


def fit_tangent(task: Task, model: Any, **settings: Any) -> Prediction:
    """linnet's regressor."""
    return predict(linnet.TangentRegressor(model, progress=False, seed=task.seed, **settings).fit(*pair(task)), task)


def fit_last_layer(task: Task) -> Prediction:
    """Bayesian linear regression of the last layer, prior and noise by the evidence."""
    last = f"{len(task.networks[0]) - 1}.*"  # type: ignore[arg-type]
    return fit_tangent(task, task.networks[0], params=last, inputs=False)


def adapt(task: Task) -> Prediction:
    """`linnet.adapt`."""
    return predict(linnet.adapt(task.networks[0], *pair(task), seed=task.seed), task)


def pair(task: Task) -> tuple[Tensor, Tensor]:
    return task.train.X[0], task.train.y


def predict(estimator: Any, task: Task) -> Prediction:
    """Means and variances of the targets."""
    mean, std = estimator.predict(task.test.X[0], return_std=True, noise=True)
    return Prediction(mean, std.square())
