"""The prior scales and the noise at which a Laplace evidence is largest: by its gradient, or MacKay's fixed point.

For structures without correlations, whose evidence takes far too large a noise, `unexplained` bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import scipy
from torch import Tensor

from linnet.inference.evidence.log_determinants import Cost
from linnet.laplace.evidence import Evidence, Terms

Method = Literal["gradient", "mackay"]

SPAN = 28.0
"""Logarithms of scales are sought this far from their start."""

FLAT = 1e-11
"""A step that changes the log evidence by no more than this part of it is the last."""


class Step(NamedTuple):
    """One step of a search.

    Attributes:
        log_evidence: There.
        scales: Prior scales.
        noise: Noise scale; one where the likelihood has none.
        dimension: The effective dimension, all groups together.
    """

    log_evidence: float
    scales: tuple[float, ...]
    noise: float
    dimension: float


@dataclass(frozen=True)
class Search:
    """What is sought, and how.

    Attributes:
        scales: Whether the prior's scales are.
        noise: Whether the noise is.
        method: "gradient" (L-BFGS on the logarithms) or "mackay" (the fixed point).
        steps: Limit.
        tolerance: Of a fixed point: the largest relative change of a last step.
        bounded: Whether the noise is that of an effective dimension below the number of rows; see `unexplained`.
    """

    scales: bool
    noise: bool
    method: Method = "gradient"
    steps: int = 500
    tolerance: float = 1e-8
    bounded: bool = False

    def __post_init__(self) -> None:
        if self.method not in ("gradient", "mackay"):
            raise ValueError(f"method must be 'gradient' or 'mackay'; got {self.method!r}.")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a positive number; got {self.steps!r}.")


Amount = TypeVar("Amount", float, Tensor)


def unexplained(rows: int, gamma: Amount, *, bounded: bool) -> Amount:
    r"""The observations that an effective dimension leaves to the noise.

    ``rows - gamma`` at the largest evidence (MacKay). :math:`\gamma = \sum_i v_i / \sigma^2` with variances v at the
    training data, which have seen observation i, so that none counts for more than one. Those of a structure without
    correlations are larger, gamma may exceed the rows, and the noise of largest evidence is far too large. Bounded,
    such a v counts as if it were to see observation i yet: :math:`v_i / (v_i + \sigma^2)`, for all together
    ``gamma / (1 + gamma / rows)``.

    >>> unexplained(100, 60.0, bounded=False), [unexplained(100, gamma, bounded=True) for gamma in (60.0, 300.0)]
    (40.0, [62.5, 25.0])
    """
    return rows / (1 + gamma / rows) if bounded else rows - gamma


def best(evidence: Evidence, search: Search, *, scales: Sequence[float], noise: float, cost: Cost) -> list[Step]:
    """Steps to the scales and noise of largest evidence; what is not sought stays.

    A bounded noise is a fixed point with the scales of largest evidence at it, and no maximum.

    Args:
        evidence: To maximize.
        search: What is sought.
        scales: To keep, or those of groups that the data say nothing about.
        noise: To keep, or to start from.
        cost: Of an evaluation: the more it costs, the fewer starts are tried.
    """
    first = evidence(scales, noise)
    if search.noise and not first.energy:
        raise ValueError(
            "The targets equal the network's outputs exactly, so that the evidence grows without bound as the noise "
            "shrinks. Give noise= as a number."
        )
    start: Point = (list(scales), noise)
    if not search.scales and not search.noise:
        return [_step(first, *start)]
    # A group without curvature, or of zeros, has no best scale.
    known = [g > 0 and q > 0 for g, q in zip(first.gamma, first.shares, strict=True)]
    start = _start(evidence, search, start, first, known, cost)
    if search.method == "mackay":
        return _mackay(evidence, search, start, known)
    if search.noise and search.bounded:
        return _alternating(evidence, search, start, known)
    # Where value and derivative are separate estimates, a line search has nothing to hold on to.
    return (_ascent if cost == "solve" else _gradient)(evidence, search, start, known)


Point = tuple[list[float], float]


def _step(terms: Terms, scales: Sequence[float], noise: float) -> Step:
    return Step(terms.value, tuple(scales), noise, sum(terms.gamma))


def _start(evidence: Evidence, search: Search, at: Point, first: Terms, known: Sequence[bool], cost: Cost) -> Point:
    """The best of a few points: scales by decades about those at which each group's share of the penalty is one.

    Where each costs a solve, the smallest that can be best: an effective dimension is at most the number of rows.
    """
    scales, noise = at
    if search.noise:
        noise *= (first.energy or 0.0) / first.rows
    points: list[Point] = [(scales, noise)]
    if search.scales and any(known):
        unit = [s * q if k else s for s, q, k in zip(scales, first.shares, known, strict=True)]
        if cost == "solve":
            return [s / first.rows if k else s for s, k in zip(unit, known, strict=True)], noise
        decades = range(-6, 7, 1 if cost == "little" else 3)
        points += [([s * 10.0**d if k else s for s, k in zip(unit, known, strict=True)], noise) for d in decades]
    return max(points, key=lambda point: _value(evidence, point))


def _value(evidence: Evidence, point: Point) -> float:
    try:
        return evidence(*point).value
    except ArithmeticError:  # too large for the precision: no candidate
        return -math.inf


def _gradient(evidence: Evidence, search: Search, start: Point, known: Sequence[bool]) -> list[Step]:
    s0, v0 = start
    path = [_step(evidence(*start), *start)]
    free = [i for i, k in enumerate(known) if k and search.scales]
    x0 = [math.log(s0[i]) for i in free] + ([math.log(v0)] if search.noise else [])
    if not x0:
        return path

    def split(x: Sequence[float]) -> Point:
        scales = list(s0)
        for i, t in zip(free, x, strict=False):
            scales[i] = math.exp(t)
        return scales, math.exp(x[-1]) if search.noise else v0

    def negative(x: Sequence[float]) -> tuple[float, list[float]]:
        try:
            terms = evidence(*split(x))
        except ArithmeticError:
            return 1e100, [0.0] * len(x0)
        slopes = [terms.slopes[i] for i in free] + ([terms.noise_slope] if search.noise else [])
        return -terms.value, [-d for d in slopes]

    def note(x: Sequence[float]) -> None:
        point = split([float(t) for t in x])
        path.append(_step(evidence(*point), *point))

    found = scipy.optimize.minimize(
        negative,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=[(x - SPAN, x + SPAN) for x in x0],
        options={"maxiter": search.steps, "ftol": 1e-14, "gtol": 1e-7},
        callback=lambda intermediate_result: note(intermediate_result.x),
    )
    if found.status == 1:
        raise ArithmeticError(
            f"The evidence was still rising after {search.steps} steps of L-BFGS. Allow more with steps=, or use fewer "
            "scales."
        )
    return path


def _ascent(evidence: Evidence, search: Search, start: Point, known: Sequence[bool]) -> list[Step]:
    """Steps along the derivatives, over the curvature that each has at least; no value is compared."""
    scales, noise = start
    path: list[Step] = []
    for _ in range(search.steps + 1):
        terms = evidence(scales, noise)
        path.append(_step(terms, scales, noise))
        moves = [
            2 * d / max(q, g) if k and search.scales else 0.0
            for d, q, g, k in zip(terms.slopes, terms.shares, terms.gamma, known, strict=True)
        ]
        more = 0.0
        if search.noise:
            assert terms.energy is not None
            more = 2 * terms.noise_slope / max(terms.energy, terms.rows - sum(terms.gamma))
        if max(abs(move) for move in [*moves, more]) <= search.tolerance:
            return path
        scales = [s * math.exp(move) for s, move in zip(scales, moves, strict=True)]
        noise *= math.exp(more)
    raise ArithmeticError(
        f"The gradient of the evidence was not zero after {search.steps} steps. Allow more with steps=, more samples=, "
        "or use method='mackay'."
    )


def _alternating(evidence: Evidence, search: Search, start: Point, known: Sequence[bool]) -> list[Step]:
    """The scales of largest evidence and the bounded noise in turn, to a fixed point of both.

    A larger noise has a smaller effective dimension, by less than its own factor, so that the steps get shorter.
    """
    inner, (scales, noise) = replace(search, noise=False), start
    path: list[Step] = []
    for _ in range(search.steps):
        path.append(_gradient(evidence, inner, (scales, noise), known)[-1])
        scales = list(path[-1].scales)
        terms = evidence(scales, noise)
        assert terms.energy is not None
        factor = terms.energy / unexplained(terms.rows, sum(terms.gamma), bounded=True)
        if abs(factor - 1) <= search.tolerance:
            return path
        noise *= factor
    raise ArithmeticError(
        f"Prior and noise were not settled after {search.steps} steps: the last one changed the noise by a factor of "
        f"{factor:.6g}. Allow more with steps=, or use narrow=False."
    )


def _mackay(evidence: Evidence, search: Search, start: Point, known: Sequence[bool]) -> list[Step]:
    scales, noise = start
    terms = evidence(scales, noise)
    path = [_step(terms, scales, noise)]
    for _ in range(search.steps):
        before = [*scales, noise]
        if search.scales:
            scales = [
                s * q / g if k and g > 0 else s
                for s, q, g, k in zip(scales, terms.shares, terms.gamma, known, strict=True)
            ]
        if search.noise:
            assert terms.energy is not None
            noise *= terms.energy / unexplained(terms.rows, sum(terms.gamma), bounded=search.bounded)
        terms = evidence(scales, noise)
        path.append(_step(terms, scales, noise))
        still = max(abs(a / b - 1) for a, b in zip([*scales, noise], before, strict=True)) <= search.tolerance
        # A group that is not needed goes to zero, ever on, long after it has stopped to count.
        rise = abs(path[-1].log_evidence - path[-2].log_evidence)
        if still or rise <= FLAT * max(1.0, abs(path[-1].log_evidence)):
            return path
    raise ArithmeticError(
        f"MacKay's fixed point was not reached in {search.steps} steps: the last one changed the log evidence by "
        f"{path[-1].log_evidence - path[-2].log_evidence:.2g}. Allow more with steps=, or use method='gradient'."
    )


def best_factor(score: Callable[[float], float]) -> float:
    """The factor from 1e-8 to 1e3 at which a score is largest: by decades, then by Brent's method."""
    found = {float(d): score(10.0**d) for d in range(-8, 4)}

    def negative(d: float) -> float:
        found[float(d)] = score(10.0 ** float(d))
        return -found[float(d)]

    top = max(found, key=found.__getitem__)
    scipy.optimize.minimize_scalar(
        negative, bounds=(max(top - 1, -8), min(top + 1, 3)), method="bounded", options={"xatol": 0.02}
    )
    return 10.0 ** max(found, key=found.__getitem__)


def largest_factor(cost: Callable[[float], float], limit: float) -> float:
    """The largest factor up to one at which a cost, which grows with it from zero, is within a limit.

    To a tenth of the limit, or a twentieth of a decade; each guess is where the cost would be the limit if it were a
    power of the factor.

    >>> round(largest_factor(lambda s: 40 * s, 0.1), 6), largest_factor(lambda s: 40 * s, 50.0)
    (0.002375, 1.0)
    """
    found = cost(1.0)
    if found <= limit:
        return 1.0
    aim = math.log10(0.95 * limit)
    high, low, low_cost = 0.0, -math.inf, 0.0
    above, below = math.log10(found), -math.inf
    while high - low > 0.05 and not 0.9 * limit <= low_cost <= limit:
        if low == -math.inf:  # not yet on the other side: proportional, and a little further each time
            t = high - max(above - aim, 0.3)
        else:
            t = high - (high - low) * min(0.9, max(0.1, (above - aim) / (above - below)))
        found = cost(10.0**t)
        if found > limit:
            high, above = t, math.log10(found)
        else:
            low, low_cost, below = t, found, math.log10(max(found, 1e-3 * limit))
        if high < -SPAN:
            raise ArithmeticError(
                f"Averaging over the posterior costs {found:.3g} nats a training label, with prior variances as small "
                f"as {10.0**high:.1g} of those of largest evidence. Give prior= as a variance."
            )
    return 10.0**low
