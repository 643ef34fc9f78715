"""The prior scales and the noise that the Laplace evidence of a network chooses, by the search that all doors share.

For structures without correlations, whose evidence takes far too large a noise, `linnet.laplace.evidence.unexplained`
bounds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import scipy  # its optimize is imported at first use, which loading a saved fit does without

from linnet.inference import Slope, maximize

if TYPE_CHECKING:
    from linnet.inference import Cost
    from linnet.laplace.evidence import Evidence, EvidenceTerms

Method = Literal["gradient", "mackay"]


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
        scales: Whether the prior's scales are sought.
        noise: Whether the noise is sought.
        method: "gradient" for the largest evidence, or "mackay" for the fixed point of the effective dimensions, which
            leaves out that the curvature may move with the prior.
        steps: Limit.
        gain: Log evidence that is not worth another step.
        bounded: Whether the noise is that of an effective dimension below the number of rows.
        finish: Whether the search tries several starts and must reach the end. If not, the search makes so many steps
            from where it stands.
        longest: Limit of the change of a logarithm in one step.
    """

    scales: bool
    noise: bool
    method: Method = "gradient"
    steps: int = 500
    gain: float = 0.0
    bounded: bool = False
    finish: bool = True
    longest: float = math.inf

    def __post_init__(self) -> None:
        if self.method not in ("gradient", "mackay"):
            raise ValueError(f"method must be 'gradient' or 'mackay'; got {self.method!r}.")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a positive number; got {self.steps!r}.")


Point = tuple[list[float], float]


class Evaluation(NamedTuple):
    """An evidence at one point of a search."""

    value: float
    slopes: list[Slope]


def choose(evidence: Evidence, search: Search, *, scales: Sequence[float], noise: float, cost: Cost) -> list[Step]:
    """Steps to the scales and noise of largest evidence; scales or a noise that are not sought stay.

    MacKay's fixed point, and a bounded noise with the scales of largest evidence at that noise, are no maxima: there
    the slopes alone decide, as where an evidence comes from samples.

    Args:
        evidence: To maximize.
        search: What is sought.
        scales: The scales that stay, also those of groups that the data say nothing about; or where to begin.
        noise: The noise that stays, or where to begin.
        cost: Of an evaluation: the more it costs, the fewer starts are tried.
    """
    first = evidence(scales, noise)
    if search.noise and not first.energy:
        raise ValueError(
            "The targets equal the network's outputs exactly, so that the evidence grows without bound as the noise "
            "shrinks. Give noise= as a number."
        )
    at: Point = (list(scales), noise)
    if not search.scales and not search.noise:
        return [_step(first, at)]
    # A group without curvature, or of zeros, has no best scale.
    known = [search.scales and g > 0 and q > 0 for g, q in zip(first.gamma, first.shares, strict=True)]
    free = [i for i, k in enumerate(known) if k]
    seen: dict[tuple[float, ...], Step] = {}

    def join(point: Point) -> list[float]:
        return [math.log(point[0][i]) for i in free] + ([math.log(point[1])] if search.noise else [])

    def split(x: Sequence[float]) -> Point:
        found = list(scales)
        for i, t in zip(free, x, strict=False):
            found[i] = math.exp(t)
        return found, math.exp(x[-1]) if search.noise else noise

    def objective(x: list[float]) -> Evaluation:
        point = split(x)
        terms = first if point == at else evidence(*point)
        seen[tuple(x)] = _step(terms, point)
        slopes = [terms.slopes[i] for i in free]
        if search.method == "mackay":
            slopes = [slope._replace(rest=0.0) for slope in slopes]
        return Evaluation(terms.value, slopes + [terms.noise_slope(bounded=search.bounded)] * search.noise)

    starts = [join(point) for point in _starts(search, at, first, known, cost)]
    found = maximize(
        objective,
        starts,
        [(min(column) - 28, max(column) + 28) for column in zip(*starts, strict=True)],
        gain=search.gain,
        steps=search.steps,
        longest=search.longest,
        compare=search.method == "gradient" and cost != "solve" and not (search.noise and search.bounded),
    )
    if search.finish and not found.converged:
        raise ArithmeticError(
            f"Prior and noise were not settled after {search.steps} steps: the last one changed the log evidence by "
            f"{found.path[-1][1] - found.path[-2][1]:.2g}. Allow more with steps=, use fewer scales, or where the "
            "structure has no correlations, use narrow=False."
        )
    end = next(i for i, (x, _) in enumerate(found.path) if x == found.x)
    return [seen[tuple(x)] for x, _ in found.path[: end + 1]]


def _step(terms: EvidenceTerms, point: Point) -> Step:
    return Step(terms.value, tuple(point[0]), point[1], sum(terms.gamma))


def _starts(search: Search, at: Point, first: EvidenceTerms, known: Sequence[bool], cost: Cost) -> list[Point]:
    """Where the search may begin: scales by decades about those at which each group's share of the penalty is one.

    Where each evaluation is a solve, the smallest scales that can be best: an effective dimension is at most the number
    of rows.
    """
    scales, noise = at
    if not search.finish:
        return [at]
    if search.noise:
        noise *= (first.energy or 0.0) / first.rows
    if not any(known):
        return [(scales, noise)]
    unit = [s * q if k else s for s, q, k in zip(scales, first.shares, known, strict=True)]
    if cost == "solve":
        return [([s / first.rows if k else s for s, k in zip(unit, known, strict=True)], noise)]
    decades = range(-6, 7, 1 if cost == "little" else 3)
    spread = [([s * 10.0**d if k else s for s, k in zip(unit, known, strict=True)], noise) for d in decades]
    return [(scales, noise), *spread]


def choose_factor(score: Callable[[float], float]) -> float:
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


def find_largest_factor(cost: Callable[[float], float], limit: float) -> float:
    """The largest factor up to one at which a cost, which grows with it from zero, is within a limit.

    To a tenth of the limit, or a twentieth of a decade; each guess is where the cost would be the limit if it were a
    power of the factor.

    >>> round(find_largest_factor(lambda s: 40 * s, 0.1), 6), find_largest_factor(lambda s: 40 * s, 50.0)
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
        if high < -28:
            raise ArithmeticError(
                f"Averaging over the posterior costs {found:.3g} nats a training label, with prior variances as small "
                f"as {10.0**high:.1g} of those of largest evidence. Give prior= as a variance."
            )
    return 10.0**low
