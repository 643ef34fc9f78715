"""The objective of a log-concave likelihood along one step, and the length that the step should have."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linnet.linalg import as_weight, weigh

Terms = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""From f (n, c) to log p (n,), its gradient in f (n, c), and its curvature."""


class LineSearch:
    """The objective along a step, ``psi(u + t d)``. It needs no products with Phi, because f is linear in t.

    Args:
        terms: From f (n, c) to log p (n,), its gradient in f (n, c), and its curvature.
        f: (n, c).
        df: ``Phi d``, (n, c).
        products: ``u^T u``, ``u^T d``, ``d^T d``.

    Attributes:
        flat: Whether the objective falls by less than rounding along the step.
    """

    def __init__(self, terms: Terms, f: Tensor, *, df: Tensor, products: tuple[float, float, float]) -> None:
        self.terms, self.f, self.df, self.products = terms, f, df, products
        self.value, self.slope, _ = self.evaluate(0.0)
        # The terms may cancel, so that rounding is measured by their sizes. Pairwise sums of n terms round by
        # log2(n) eps, which is at most 64 eps.
        size = 0.5 * products[0] + float(terms(f)[0].abs().sum())
        rounding = 64 * torch.finfo(f.dtype).eps * size
        self.highest = self.value + rounding
        self.flat = -self.slope < rounding

    def evaluate(self, t: float) -> tuple[float, float, float]:
        """Value, first and second derivative at the length t."""
        uu, ud, dd = self.products
        log_prob, residual, curvature = self.terms(self.f + t * self.df)
        rows = self.df.reshape(-1, 1)
        bend = rows * weigh(rows, as_weight(curvature), slice(0, len(rows)))
        value = 0.5 * (uu + 2 * t * ud + t * t * dd) - float(log_prob.sum())
        slope = ud + t * dd - float((residual * self.df).sum())
        return value, slope, dd + float(bend.sum())

    def find_length(self) -> float:
        """A length at which the slope has come down to a tenth: 1 close to the mode. 0 where there is no descent."""
        if not self.slope < 0:
            return 0.0
        low, high, t = 0.0, math.inf, 1.0
        for _ in range(100):  # a bisection ends long before
            value, slope, bend = self.evaluate(t)
            lower = value <= self.highest
            if lower and abs(slope) <= -0.1 * self.slope:
                return t
            if lower and slope < 0:
                low = t
            else:
                high = t
            newton = t - slope / bend if bend > 0 else math.inf
            if high == math.inf:
                t = min(max(newton, 2 * t), 10 * t)
            elif low < newton < high and not math.isclose(newton, t):
                t = newton
            else:
                t = 0.5 * (low + high)
        return low

    def polish(self, t: float) -> float:
        """A length near t at which the slope is nearly zero: one Newton step along the line."""
        _, slope, bend = self.evaluate(t)
        return t - slope / bend if bend > 0 and abs(slope) < 0.5 * bend * t else t
