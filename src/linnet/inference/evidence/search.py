r"""The one search of linnet for prior scales and noise: `maximize` climbs an evidence by its gradient.

The logarithms of scales and noise are the coordinates. The slope of an evidence in each coordinate is half the
difference of two positive numbers,

.. math:: \partial_{x_l} \log Z = \tfrac12 (a_l - b_l) + \mathrm{rest}_l ,

for a prior scale the penalty :math:`\theta_l^\top A_l \theta_l` and the effective dimension :math:`\gamma_l`, for the
noise the squared residuals over the noise and the observations that no parameter explains. MacKay's fixed point sets
each a equal to b. So the first step of the search is MacKay's update, :math:`x_l + \log(a_l / b_l)`, which takes the
logarithmic mean of a and b, halved, for the curvature. Later steps learn the curvature from the slopes (BFGS; Broyden's
method where slopes alone decide).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROUND = math.sqrt(np.finfo(float).eps)
Bounds = Sequence[tuple[float, float]]


class Slope(NamedTuple):
    """The derivative of an evidence in the logarithm of one scale or noise.

    Attributes:
        up: a, not negative.
        down: b, not negative.
        rest: The part of the derivative that is not ``(a - b) / 2``.
    """

    up: float
    down: float
    rest: float = 0.0

    @property
    def value(self) -> float:
        return 0.5 * (self.up - self.down) + self.rest

    @property
    def curvature(self) -> float:
        """Half the logarithmic mean of a and b.

        >>> round(Slope(1.0, math.e).value / Slope(1.0, math.e).curvature, 9)
        -1.0
        """
        low, high = sorted((abs(self.up), abs(self.down)))
        if high - low <= 1e-6 * high:
            return 0.5 * high or 1.0
        # A bound on the ratio keeps the first step finite where one of the two is zero.
        return 0.5 * (high - low) / math.log(high / max(low, 1e-12 * high))


class Evaluation(Protocol):
    """An evidence at one point: its value, and its derivatives, which not every point is asked for."""

    @property
    def value(self) -> float: ...

    @property
    def slopes(self) -> Sequence[Slope]: ...


Objective = Callable[[list[float]], Evaluation]
"""From logarithms of scales and noise to the evidence there; an ArithmeticError where rounding hides the evidence."""


@dataclass(frozen=True)
class Maximum:
    """What `maximize` found.

    Attributes:
        x: The point.
        value: The evidence there.
        path: The points and values that were accepted, from the start to the end.
        converged: False where the limit of steps ended the search.
    """

    x: list[float]
    value: float
    path: list[tuple[list[float], float]]
    converged: bool

    @property
    def rising(self) -> tuple[float, ...]:
        """The values of the path that were larger than all before."""
        values = [value for _, value in self.path]
        return tuple(v for i, v in enumerate(values) if i == 0 or v > max(values[:i]))


def maximize(
    objective: Objective,
    starts: Sequence[Sequence[float]],
    bounds: Bounds,
    *,
    gain: float = 0.0,
    steps: int = 200,
    longest: float = math.inf,
    compare: bool = True,
) -> Maximum:
    r"""Climb from the best of some starts to where the slopes vanish, or push against the bounds.

    A step is :math:`B^{-1} g` in the coordinates that may move, with g the slopes and B the curvature. A step that does
    not raise the value is shortened. Where rounding hides the rise, a step counts that lowers the slope.

    Args:
        objective: What is maximized.
        starts: One or more points. A point where the objective raises is passed over while there is another.
        bounds: The lowest and the highest value of each coordinate.
        gain: The search ends where a step promises to raise the value by no more than this. Before a step has shown the
            curvature, the search ends where no slope is larger than this.
        steps: Limit.
        longest: Limit of the change of a coordinate in one step.
        compare: False where the slopes are not the derivatives of the value (both are estimates, or the search is for a
            fixed point that is no maximum). The slopes alone decide then.

    Example:
        >>> class Peak(NamedTuple):
        ...     t: float
        ...     value = property(lambda self: -math.cosh(self.t - 2))
        ...     slopes = property(lambda self: [Slope(math.exp(2 - self.t), math.exp(self.t - 2))])
        >>> round(maximize(lambda x: Peak(*x), [[0.0]], [(-5.0, 5.0)]).x[0], 6)
        2.0
    """
    low, high = np.array(bounds, dtype=float).reshape(-1, 2).T
    x, at = _best_start(objective, [np.clip(np.array(start, dtype=float), low, high) for start in starts])
    path = [(x.tolist(), at.value)]
    if not len(x):
        return Maximum(*path[0], path, True)
    g, D = _gradient(at)
    B, bent, learned = np.diag(D), 0, False
    while True:
        free = ~(((x <= low) & (g <= 0)) | ((x >= high) & (g >= 0)))
        mackay, d = np.where(free, g / D, 0.0), np.zeros_like(x)
        d[free] = np.linalg.solve(B[np.ix_(free, free)], g[free])
        promise = 0.5 * max(float(g @ d), float(g @ mackay))
        # MacKay's curvature can be a hundred times too large, and its promise too small. So before a step has shown the
        # curvature, the top may be one e-fold away.
        possible = promise if learned else max(promise, float(np.abs(g[free]).max(initial=0.0)))
        converged = possible <= max(gain, np.finfo(float).eps * abs(at.value))
        if converged or len(path) > steps:
            break
        found = None
        for direction in (d, mackay):
            found = found or _climb(objective, x, at, g, direction, (low, high), longest, compare)
            if 2 * possible <= ROUND * abs(at.value):
                break
        converged = True
        if found is None:  # rounding hides what is left to gain
            break
        s, gained = found[0] - x, found[1].value - at.value
        x, at = found
        path.append((x.tolist(), at.value))
        if compare and 0.1 * promise <= gain and abs(gained - promise) <= 0.3 * promise:
            break  # as promised, so that less than a tenth of it is left
        before, (g, D) = g, _gradient(at)
        fall = before - g
        learned = bool(s @ fall > 1e-6 * s @ (D * s))
        if learned and not compare:  # the slopes may be those of no function, so that B need not be symmetric (Broyden)
            B, bent = B + np.outer(fall - B @ s, s) / (s @ s), 0
        elif learned:
            B, bent = B + np.outer(fall, fall) / (s @ fall) - np.outer(B @ s, B @ s) / (s @ (B @ s)), 0
        else:  # the value bends upward, so that its slopes do not tell where its top is: further, ever faster
            bent += 1
            B = np.diag(D) / 4.0**bent
    top = max(path, key=lambda point: point[1]) if compare else path[-1]
    return Maximum(*top, path, converged)


def _best_start(objective: Objective, starts: Sequence[Array]) -> tuple[Array, Evaluation]:
    found: tuple[Array, Evaluation] | None = None
    for i, x in enumerate(starts):
        try:
            at = objective(x.tolist())
        except ArithmeticError:
            if found is None and i == len(starts) - 1:
                raise
            continue
        if found is None or at.value > found[1].value:
            found = x, at
    assert found is not None
    return found


def _gradient(at: Evaluation) -> tuple[Array, Array]:
    return np.array([slope.value for slope in at.slopes]), np.array([slope.curvature for slope in at.slopes])


def _climb(
    objective: Objective,
    x: Array,
    at: Evaluation,
    g: Array,
    direction: Array,
    box: tuple[Array, Array],
    longest: float,
    compare: bool,
) -> tuple[Array, Evaluation] | None:
    """The point that a step leads to, shortened until the value rises; None where it does not."""
    rounding = ROUND * abs(at.value) if compare else math.inf
    t = min(1.0, longest / float(np.abs(direction).max(initial=1e-300)))
    for _ in range(8):
        y = np.clip(x + t * direction, *box)
        rise = float(g @ (y - x))
        if not rise > 0:  # the bounds have turned the step
            return None
        shorter = 0.5
        try:
            new = objective(y.tolist())
        except ArithmeticError:
            new = None
        if new is not None:
            gained = new.value - at.value
            if compare and gained >= 1e-4 * rise:
                return y, new
            shorter = rise / (2 * (rise - gained)) if compare else 0.5
            if abs(gained) <= rounding:
                slope = float(_gradient(new)[0] @ (y - x))
                if slope >= -0.9 * rise:
                    return y, new
                shorter = rise / (rise - slope)
        t *= min(max(shorter, 0.1), 0.5)
    return None
