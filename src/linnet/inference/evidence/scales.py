r"""Scales of the prior with the largest Laplace evidence, for any log-concave likelihood.

.. math:: \log Z(s) = \log p(y \mid f) - \tfrac12 u^\top u - \tfrac12 \log\det(I + s L^\top K L)

at the mode for the scale s (`linnet.inference.mode.newton`). The evidence of one scale is smooth in its logarithm t,
and each value takes a mode and a decomposition, so that values are what is saved: a part of the data says where to
look, a polynomial through the values nearby says where the top is, and every mode starts from the nearest one known.
Several scales are the business of `linnet.inference.evidence.layer_scales`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import Choice
from linnet.inference.mode.newton import Mode, function_space, weight_space
from linnet.linalg.cholesky import solve_lower
from linnet.probability.likelihoods import Likelihood

STEP = 4 / 3 * math.log(10.0)
GRID = [i * STEP for i in range(-3, 4)]
"""Logarithms of the scales that are tried first, in units in which data and prior weigh the same on average."""

CLIMB = 0.5
"""The shortest step in t where a part of the data has said where to begin."""

MACKAY = 1.6
"""The logarithm of ``u^T u / gamma``, MacKay's update of a scale, falls by 0.5 to 0.75 where t grows by one, and is
zero close to the best t: so many times it is the step to there (from fits of small networks with 1 to 5 outputs)."""

PROBES = 16
"""Of the trace in gamma."""

TRUSTED = 1.0
"""A polynomial is believed where it has values within this of the top, on both sides."""

GAIN = 1e-3
"""So much log evidence is not worth another mode."""

VALUES = 12
"""At most as many to refine the best one."""

PART = 400
"""Rows that are enough to know where to look; each further step takes eight times as many."""

TOLERANCE = 1e-6
"""Of the relative gradient at the modes."""

NEARBY = 1.5
"""A factor helps to find the mode at scales this close in t."""


def best_scale(
    A: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    space: str = "function",
    tolerance: float = 1e-2,
) -> Choice:
    """The factor of all prior variances with the largest Laplace evidence; `best_mode` without the mode.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        >>> choice = best_scale(K, torch.tensor([1.0, 1.0]), mean=K.new_zeros(2, 1), likelihood=Bernoulli())
        >>> choice.log_evidence > 2 * math.log(0.5)
        True
    """
    return best_mode(A, y, mean=mean, likelihood=likelihood, space=space, tolerance=tolerance)[0]


def best_mode(
    A: Tensor,
    y: Tensor,
    *,
    mean: Tensor,
    likelihood: Likelihood,
    space: str = "function",
    tolerance: float = 1e-2,
) -> tuple[Choice, Mode]:
    """The factor of all prior variances with the largest Laplace evidence, and the mode there.

    Seven scales from 1e-4 to 1e4 (more if the best is the first or the last) bracket the best one, in units in which
    an average eigenvalue of ``L^T K L`` is one. Where there are many rows, an eighth of the examples is searched so
    first, and all of them from there; only where it asks for next to no scale, or where all of them then say less than
    no scale at all, are the seven tried on all. The search ends where the logarithm of the scale is known to the
    tolerance, or where 0.001 of log evidence is all that could be gained.

    Args:
        A: K (n c, n c), or Phi (n c, p), both for a scale of one.
        y: As for `linnet.inference.mode.newton.function_space`, and so are mean and likelihood.
        mean: m, (n, c).
        likelihood: Of the targets given f.
        space: ``"function"`` for K, ``"weight"`` for Phi.
        tolerance: Of the logarithm of the scale.

    Returns:
        A choice with one scale, whose path has every value on all rows that was better than those before; and the mode
        with that scale, without its factor.
    """
    if space not in ("function", "weight"):
        raise ValueError(f"space must be 'function' or 'weight'; got {space!r}.")
    n, c = mean.shape
    evidence = _Evidence(A, likelihood.targets(y, n, c, dtype=mean.dtype, device=mean.device), mean, likelihood, space)
    evidence.search(tolerance)
    assert evidence.best is not None
    top = evidence.top
    return Choice((evidence.scale(top),), (), evidence.values[top], tuple(evidence.path)), evidence.best[1]


class _Evidence:
    """The evidence by t, the logarithm of the scale in units of `unit_scale`, where it has been asked for.

    Attributes:
        values: By t; minus infinity where rounding hides the mode.
        path: The values that were better than all before.
        best: The t of the largest one, and its mode.
    """

    def __init__(self, A: Tensor, y: Tensor, mean: Tensor, likelihood: Likelihood, space: str) -> None:
        self.A, self.y, self.mean, self.likelihood, self.space = A, y, mean, likelihood, space
        self.solve = function_space if space == "function" else weight_space
        self.unit = math.log(unit_scale(A, mean, likelihood, space))
        # The gradient at which rounding may stop a mode, which goes as far as it can: its square, the error of the
        # evidence, is rounding.
        self.reached = max(TOLERANCE, torch.finfo(mean.dtype).eps ** 0.5)
        self.values: dict[float, float] = {}
        self.path: list[float] = []
        self.best: tuple[float, Mode] | None = None
        self.last: tuple[float, Mode] | None = None
        self.hint: tuple[float, Tensor] | None = None

    @property
    def top(self) -> float:
        return max(self.values, key=self.values.__getitem__)

    def scale(self, t: float) -> float:
        return math.exp(self.unit + t)

    def __call__(self, t: float) -> float:
        if t in self.values:
            return self.values[t]
        start, near = None, None
        known = [(at, _coordinates(mode)) for at, mode in filter(None, (self.last, self.best))]
        known = known or [hint for hint in (self.hint,) if hint is not None]
        if known:
            at, x = min(known, key=lambda known: abs(known[0] - t))
            start = x * math.exp((at - t) * (1.0 if self.space == "function" else 0.5))  # from the same f
        if self.last is not None and abs(self.last[0] - t) <= NEARBY:
            near = self.last[1]
        try:
            mode = self.solve(
                self.A,
                self.y,
                mean=self.mean,
                likelihood=self.likelihood,
                scale=self.scale(t),
                start=start,
                near=near,
                tolerance=TOLERANCE,
            )
            mode = mode if mode.gradient <= self.reached else mode.checked()
        except ArithmeticError:  # no candidate: but where there is none at all, the last error is what is wrong
            if self.best is None and t >= GRID[-1]:
                raise
            self.values[t] = -math.inf
            return self.values[t]
        self.last = t, mode
        self.values[t] = mode.log_evidence
        if self.best is None or self.values[t] > self.path[-1]:
            self.best = t, replace(mode, factor=None)
            self.path.append(self.values[t])
        return self.values[t]

    def search(self, tolerance: float) -> None:
        """Find the best t to this tolerance."""
        first = self.by_part()
        if first is not None:
            self.climb(first)
        nothing = float(self.likelihood.log_prob(self.mean, self.y).sum())
        if first is None or self.values[self.top] < nothing:
            self.scan()
        self.refine(tolerance)

    def scan(self) -> None:
        """All magnitudes: a mean that is sure and wrong gives the evidence a dip before its peak."""
        for t in GRID:
            self(t)
        for sign in (-1, 1):
            # A best scale at the end of the grid; further out still the prior or the data count for nothing.
            for _ in range(2):
                end = max(self.values, key=lambda t: sign * t)
                if self.top == end:
                    self(end + sign * STEP)

    def by_part(self) -> float | None:
        """Where the evidence of an eighth of the examples is largest; None for few, or where they ask for next to none.

        The mode of the part is where the first one of all starts.
        """
        n, c = self.mean.shape
        if n * c <= 2 * PART:
            return None
        some = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: max(n // 8, PART // c)].sort().values
        some = some.to(self.mean.device)
        rows = (c * some[:, None] + torch.arange(c, device=some.device)).flatten()
        A = self.A[rows][:, rows] if self.space == "function" else self.A[rows]
        try:
            part = _Evidence(A, self.y[some], self.mean[some], self.likelihood, self.space)
            part.search(CLIMB / 2)
        except (ArithmeticError, ValueError):  # rounding spoils it, or the kernel is zero there
            return None
        assert part.best is not None
        if part.top <= GRID[1]:
            return None
        t, mode = part.best[0] + part.unit - self.unit, part.best[1]
        x = _coordinates(mode)
        if self.space == "function":
            f = self.mean + self.scale(t) * (self.A[:, rows] @ x).view(n, c)
            x = self.likelihood.residual(f, self.y).flatten()
        self.hint = t, x
        return t

    def climb(self, t: float) -> None:
        """Uphill from t, until there is a lower value on both sides; or to where the grid ends."""
        self(t)
        ahead = self._towards()
        self(t + math.copysign(min(max(abs(ahead), CLIMB), STEP / 2), ahead))
        step = CLIMB
        for _ in range(8):
            top = self.top
            lower, higher = any(t < top for t in self.values), any(t > top for t in self.values)
            if (lower and higher) or abs(top) >= GRID[-1] + 2 * STEP:
                return
            self(top + step if lower else top - step)
            step *= 2

    def _towards(self) -> float:
        """About how far it is to the best t from the last one; gamma by random signs."""
        if self.last is None or self.last[1].factor is None:
            return CLIMB
        mode, factor = self.last[1], self.last[1].factor
        signs = torch.randint(0, 2, (len(factor), PROBES), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        gamma = len(factor) - float(solve_lower(factor, signs.to(factor)).square().sum()) / PROBES
        return MACKAY * math.log(max(2 * mode.penalty, 1e-9) / max(gamma, 1e-9))

    def refine(self, tolerance: float) -> None:
        """Between the neighbors of the best one; nothing where it is the first or the last."""
        for _ in range(VALUES):
            top = self.top
            low = max((t for t in self.values if t < top), default=-math.inf)
            high = min((t for t in self.values if t > top), default=math.inf)
            if not all(math.isfinite(t) for t in (low, high)):
                return
            far = max(top - low, high - top)
            # The middle of the wider side: where there is no value beyond, or where the polynomial speaks from afar.
            middle = 0.5 * (top + (low if far == top - low else high))
            if not all(math.isfinite(self.values[t]) for t in (low, high)):
                if far <= TRUSTED:
                    return
                self(middle)
                continue
            t, gain = self._vertex(low, top, high)
            if far > TRUSTED:
                self(t if abs(t - top) > 0.5 * CLIMB else middle)
            elif abs(t - top) <= tolerance or gain <= max(GAIN, self._rounding):
                return
            else:
                self(t)

    @property
    def _rounding(self) -> float:
        return 64 * torch.finfo(self.mean.dtype).eps * abs(self.values[self.top])

    def _vertex(self, low: float, top: float, high: float) -> tuple[float, float]:
        """Where a polynomial through the nearest values is largest, between ``low`` and ``high``, and by how much."""
        others = [t for t, value in self.values.items() if math.isfinite(value) and t not in (low, top, high)]
        others.sort(key=lambda t: abs(t - top))
        for chosen in ([low, top, high, *others[:1]], [low, top, high]):
            x = np.array(chosen) - top
            P = np.linalg.solve(np.vander(x), np.array([self.values[t] for t in chosen]) - self.values[top])
            found = [float(r.real) for r in np.roots(np.polyder(P)) if r.imag == 0 and low < top + r.real < high]
            if found:
                r = max(found, key=lambda r: float(np.polyval(P, r)))
                return top + r, float(np.polyval(P, r))
        return top, 0.0


def _coordinates(mode: Mode) -> Tensor:
    return mode.alpha if mode.u is None else mode.u


def unit_scale(A: Tensor, mean: Tensor, likelihood: Likelihood, space: str) -> float:
    """The scale at which an average eigenvalue of ``L^T K L`` is one, with the larger curvature of f = 0 and f = m."""
    n, c = mean.shape
    if likelihood.diagonal:
        blocks = (A.diagonal() if space == "function" else A.square().sum(1)).view(n, c)
    elif space == "function":
        at = torch.arange(n, device=A.device)
        blocks = A.view(n, c, n, c)[at, :, at]
    else:
        blocks = A.view(n, c, -1) @ A.view(n, c, -1).mT
    largest = max(float((blocks * likelihood.curvature(f)).sum()) for f in (torch.zeros_like(mean), mean))
    if not largest > 0:
        raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
    return n * c / largest
