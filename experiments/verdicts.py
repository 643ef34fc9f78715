"""Claims of papers and what numbers say of them: yes, no, not shown, or open where there is no result yet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from experiments import common, gains

YES, NO, NOT_SHOWN, OPEN = "yes", "no", "not shown", "open"
VERDICTS = (YES, NO, NOT_SHOWN, OPEN)

Metrics = Mapping[str, Any]
"""What an experiment wrote to metrics.json."""

Interval = Mapping[str, Any]
"""A mean with the bounds of its 95 % interval, "low" and "high"; these are null or NaN after a single draw."""


class Finding(NamedTuple):
    """What an experiment says of a claim.

    Attributes:
        numbers: Ours, as a short text.
        verdict: One of VERDICTS, computed from the same numbers.
        why: What is believed to be the cause where the claim did not come out, and the evidence for it.
    """

    numbers: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        paper: Authors and year.
        where: Figure, table or slide.
        experiment: Whose metrics.json it is judged by.
        said: The claim, in our words.
        look: Its metrics to a finding; raises LookupError where these lack a part.
    """

    paper: str
    where: str
    experiment: str
    said: str
    look: Callable[[Metrics], Finding]

    def judge(self, metrics: Metrics | None) -> Finding:
        """The finding; open without metrics, or where they lack what the claim needs."""
        try:
            found = self.look(metrics) if metrics is not None else None
        except LookupError:
            found = None
        if found is None:
            return Finding("no result yet", OPEN)
        return found._replace(why="") if found.verdict == YES else found


@dataclass(frozen=True)
class Paper:
    """A paper with its claims, in the order in which they are written down."""

    authors: str
    title: str
    claims: list[Claim] = field(default_factory=list)

    def claim(self, where: str, experiment: str, said: str) -> Callable[[Callable[[Metrics], Finding]], Claim]:
        """Makes a function of the metrics a claim of this paper."""

        def keep(look: Callable[[Metrics], Finding]) -> Claim:
            self.claims.append(Claim(self.authors, where, experiment, said, look))
            return self.claims[-1]

        return keep


def metrics_of(experiment: str, folder: Path = common.RESULTS) -> Metrics | None:
    """The metrics an experiment has written, None if it has not."""
    path = folder / experiment / "metrics.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# Verdicts.


def ahead(difference: Interval) -> str:
    """Whether a difference is above zero; without an interval that is not shown, whatever its sign.

    >>> ahead({"mean": 1.0, "low": 0.5, "high": 1.5}), ahead({"mean": 1.0, "low": -0.5, "high": 2.5})
    ('yes', 'not shown')
    >>> ahead({"mean": -1.0, "low": -1.5, "high": -0.5}), ahead({"mean": 1.0, "low": None, "high": None})
    ('no', 'not shown')
    """
    low, high = _bounds(difference)
    return YES if low > 0 else NO if high < 0 else NOT_SHOWN


def below(value: Interval, bound: float) -> str:
    """Whether a value is below a bound.

    >>> below({"mean": 0.1, "low": 0.0, "high": 0.2}, 0.3)
    'yes'
    """
    return ahead(shifted(turned(value), bound))


def within(difference: Interval, margin: float) -> str:
    """Whether a difference is smaller than a margin, whatever its sign.

    >>> within({"mean": 0.1, "low": -0.5, "high": 0.7}, 1.0), within({"mean": 2.0, "low": 1.5, "high": 2.5}, 1.0)
    ('yes', 'no')
    >>> within({"mean": 0.1, "low": -1.5, "high": 1.7}, 1.0)
    'not shown'
    """
    low, high = _bounds(difference)
    return YES if low > -margin and high < margin else NO if low > margin or high < -margin else NOT_SHOWN


def plainly(holds: bool) -> str:
    """For numbers that have no spread, as counts and seconds."""
    return YES if holds else NO


def every(verdicts: Iterable[str]) -> str:
    """Of several: no where one is no, yes where all are yes.

    >>> every(["yes", "yes"]), every(["yes", "not shown"]), every(["not shown", "no"])
    ('yes', 'not shown', 'no')
    """
    all_of = set(verdicts)
    return NO if NO in all_of else YES if all_of == {YES} else NOT_SHOWN


# Intervals.


def turned(value: Interval) -> dict[str, float]:
    """The interval of the negative."""
    low, high = _bounds(value)
    return {"mean": -value["mean"], "low": -high, "high": -low}


def shifted(value: Interval, by: float) -> dict[str, float]:
    """The interval of the value plus a number."""
    low, high = _bounds(value)
    return {"mean": value["mean"] + by, "low": low + by, "high": high + by}


def single(difference: float) -> dict[str, Any]:
    """A difference of one draw, which has no interval."""
    return {"mean": difference, "low": None, "high": None}


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """First less second over the seeds that both have.

    >>> paired({"a": 2.0, "b": 4.0, "c": 9.0}, {"a": 1.0, "b": 3.0})["mean"]
    1.0
    """
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        raise LookupError("No seed in common.")
    return gains.interval([first[seed] - second[seed] for seed in seeds])


def of_error(value: Mapping[str, Any], count: int) -> dict[str, float]:
    """The 95 % interval of a mean of so many values, from its standard error.

    >>> {key: round(value, 2) for key, value in of_error({"mean": 1.0, "error": 0.1}, 5).items()}
    {'mean': 1.0, 'low': 0.72, 'high': 1.28}
    """
    error = math.nan if value.get("error") is None or count < 2 else value["error"]
    half = float(student.ppf(0.975, max(count - 1, 1))) * error
    return {"mean": value["mean"], "low": value["mean"] - half, "high": value["mean"] + half}


def unpaired(first: Mapping[str, Any], second: Mapping[str, Any], count: int) -> dict[str, float]:
    """First less second, where only means and standard errors over so many values were kept: a wide interval."""
    errors = [math.nan if one.get("error") is None else one["error"] for one in (first, second)]
    return of_error({"mean": first["mean"] - second["mean"], "error": math.hypot(*errors)}, count)


def said(difference: Interval, digits: int = 2, factor: float = 1.0) -> str:
    """`+0.44 (+0.02 to +0.85)`; says so where one draw has no interval, and has none where all draws agree."""
    low, high = _bounds(difference)
    if low == high:
        return f"{factor * difference['mean']:+.{digits}f}"
    text = gains.shown({"mean": difference["mean"], "low": low, "high": high}, digits=digits, factor=factor)
    return f"{text} (no interval)" if math.isnan(low) else text


def value(interval: Interval, digits: int = 2) -> str:
    """`0.12 (0.10 to 0.14)`: an interval that is not one of differences."""
    low, high = _bounds(interval)
    return gains.plain({"mean": interval["mean"], "low": low, "high": high}, digits)


def _bounds(interval: Interval) -> tuple[float, float]:
    low, high = (math.nan if interval[side] is None else float(interval[side]) for side in ("low", "high"))
    return low, high
