r"""Multinomial logistic regression on tensors, where they are: probes with many features, on a GPU.

.. math:: \min_{W, b} -\sum_i \log \mathrm{softmax}(W z_i + b)_{y_i} + \tfrac{\lambda}{2} \|W\|^2

`linnet.fisher.probes.linear_probe` is scikit-learn's, for a few hundred features on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RATIOS = (10.0, 1.0, 0.1, 0.01)
"""Penalties that are tried, over the mean squared length of the features; strongest first."""

ITERATIONS = 2000
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Logistic:
    """A fitted logistic regression.

    Attributes:
        weight: (c, d), of standardized features.
        bias: (c,).
        center: (d,), subtracted from the features.
        spread: (d,) or one number, that they are then divided by.
        penalty: lambda.
        held_out: Accuracy on the examples that chose the penalty; NaN where it was given.
    """

    weight: Tensor
    bias: Tensor
    center: Tensor
    spread: Tensor
    penalty: float
    held_out: float

    def logits(self, E: Any) -> Tensor:
        """(n, c)."""
        return ((torch.as_tensor(E).to(self.weight) - self.center) / self.spread) @ self.weight.T + self.bias

    def predict(self, E: Any) -> Tensor:
        """The class of each example, (n,)."""
        return self.logits(E).argmax(1)

    def right(self, E: Any, y: Any) -> Tensor:
        """Which examples it is right about, (n,)."""
        return self.predict(E) == torch.as_tensor(y).to(self.weight.device)


def fit_logistic(
    E: Any,
    y: Any,
    *,
    penalty: float | Sequence[float] = RATIOS,
    standardize: bool = True,
    held: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Logistic:
    """Fit by L-BFGS, on the device of the features.

    Args:
        E: Features (n, d).
        y: Classes (n,), whole numbers from 0.
        penalty: lambda over the mean squared length of the features; of several, the one with the best accuracy on
            held-out examples; those weaker than one that does not converge are not tried.
        standardize: Whether each feature is divided by its spread; else all by one number, the root mean square.
        held: Share of the examples that is held out.
        seed: Of which.
        dtype: Of the computation.

    Raises:
        RuntimeError: If the gradient does not fall to 1e-3 of what it is at zero weights.

    Example:
        >>> E = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> fit_logistic(E, [0, 0, 1, 1], penalty=0.1).predict(E)
        tensor([0, 0, 1, 1])
    """
    E = torch.as_tensor(E).detach().to(dtype)
    y = torch.as_tensor(y).to(E.device)
    if E.ndim != 2 or y.shape != (len(E),) or y.is_floating_point() or int(y.min()) < 0:
        raise ValueError(
            f"A logistic regression needs features (n, d) and classes (n,), numbers from 0; got {tuple(E.shape)} and "
            f"{tuple(y.shape)} of {y.dtype}."
        )
    classes = int(y.max()) + 1
    if classes < 2:
        raise ValueError("A logistic regression tells classes apart, and there is one only.")
    center = E.mean(0)
    Z = E - center
    one = Z.square().mean().sqrt()
    if not float(one) > 0:
        raise ValueError("The features are all the same, so they tell no classes apart.")
    spread = one
    if standardize:
        own = Z.square().mean(0).sqrt()
        spread = torch.where(own > 64 * torch.finfo(torch.float32).eps * E.abs().amax(0), own, math.inf)  # constants
    Z = Z / spread
    length = float(Z.square().sum(1).mean())
    ratios = [float(penalty)] if isinstance(penalty, int | float) else sorted(map(float, penalty), reverse=True)
    best, accuracy = ratios[0], math.nan
    if len(ratios) > 1:
        order = torch.randperm(len(Z), generator=torch.Generator().manual_seed(seed)).to(Z.device)
        away, rest = order[: max(1, round(held * len(Z)))], order[max(1, round(held * len(Z))) :]
        accuracy, start = -1.0, None
        for ratio in ratios:  # each fit starts from the one before, and is only looked at for its accuracy
            try:
                start = _minimized(Z[rest], y[rest], classes, ratio * length, start, tolerance=10 * TOLERANCE)
            except RuntimeError:
                if start is None:
                    raise
                break  # weaker ones would converge even less
            now = float((_logits(Z[away], start).argmax(1) == y[away]).double().mean())
            if now > accuracy:
                best, accuracy = ratio, now
    found = _minimized(Z, y, classes, best * length, None)
    return Logistic(found[:, :-1], found[:, -1], center, spread, best * length, accuracy)


def _logits(Z: Tensor, weights: Tensor) -> Tensor:
    return Z @ weights[:, :-1].T + weights[:, -1]


def _minimized(
    Z: Tensor, y: Tensor, classes: int, penalty: float, start: Tensor | None, *, tolerance: float | None = None
) -> Tensor:
    """Weights and biases (c, d + 1)."""
    weights = Z.new_zeros(classes, Z.shape[1] + 1) if start is None else start.clone()

    def objective(weights: Tensor) -> Tensor:
        # Over n, so that the line search sees numbers of one size.
        return F.cross_entropy(_logits(Z, weights), y) + 0.5 * penalty / len(Z) * weights[:, :-1].square().sum()

    def gradient(at: Tensor) -> float:
        at = at.detach().requires_grad_()
        return float(torch.autograd.grad(objective(at), at)[0].norm())

    with torch.enable_grad():
        limit = (tolerance or TOLERANCE) * gradient(torch.zeros_like(weights))
        weights.requires_grad_()
        optimizer = torch.optim.LBFGS(
            [weights],
            max_iter=ITERATIONS,
            max_eval=2 * ITERATIONS,
            history_size=20,
            tolerance_grad=limit / math.sqrt(weights.numel()),  # of the largest entry
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = objective(weights)
            loss.backward()
            return loss

        optimizer.step(closure)
        left = gradient(weights)
    if left > 10 * limit:
        raise RuntimeError(
            f"The logistic regression did not converge in {ITERATIONS} iterations: its gradient is {left:.2g}, and "
            f"{limit:.2g} was asked for. Pass a larger penalty=."
        )
    return weights.detach()
