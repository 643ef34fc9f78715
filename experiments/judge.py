"""Claims of papers as data, and the one function that judges a claim by the numbers of an experiment.

A verdict is yes or no where the 95 % interval lies on one side, not shown where the interval contains zero or comes
from one draw, and open where there is no result yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from scipy.stats import t as student

from experiments import common
from experiments.common import statistics

YES, NO, NOT_SHOWN, OPEN = "yes", "no", "not shown", "open"
VERDICTS = (YES, NO, NOT_SHOWN, OPEN)

Metrics = Mapping[str, Any]
"""The contents of the metrics.json of an experiment."""


# Intervals.


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % interval over `count` draws; the bounds of a single draw are NaN.

    The difference of two intervals is the widest that both allow. A number is an interval of no width.

    >>> 3 - Interval(1.0, 0.5, 1.5)
    Interval(mean=2.0, low=1.5, high=2.5, count=0)
    >>> f"{Interval(0.1234, 0.1, 0.15):.2f}, {Interval(0.1234, 0.1, 0.15):+.1f}, {Interval(5.0):+.1f}"
    '0.12 (0.10 to 0.15), +0.1 (+0.1 to +0.1), +5.0 (no interval)'
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0

    @classmethod
    def parse(cls, value: Any) -> Interval:
        """The interval of a number, or of a mapping of metrics.json, in which missing bounds are null."""
        if isinstance(value, Interval):
            return value
        if not isinstance(value, Mapping):
            return cls(value, value, value)
        low, high = (math.nan if value[side] is None else float(value[side]) for side in ("low", "high"))
        return cls(value["mean"], low, high, value.get("count", 0))

    def __sub__(self, other: Any) -> Interval:
        other = Interval.parse(other)
        return Interval(self.mean - other.mean, self.low - other.high, self.high - other.low)

    def __rsub__(self, other: Any) -> Interval:
        return Interval.parse(other) - self

    def __neg__(self) -> Interval:
        return Interval(-self.mean, -self.high, -self.low)

    def __rmul__(self, factor: float) -> Interval:
        return Interval(factor * self.mean, factor * self.low, factor * self.high)

    def __format__(self, spec: str) -> str:
        """With a sign, a difference, whose interval is left out where all draws agree; without, a value."""
        if spec.startswith("+") and self.low == self.high:
            return format(self.mean, spec)
        if math.isnan(self.low):
            return format(self.mean, spec) + (" (no interval)" if spec.startswith("+") else "")
        return f"{self.mean:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Summary(NamedTuple):
    """A mean and its standard error, written as `1.23 ± 0.04`."""

    mean: float
    error: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} ± {self.error:{spec}}"


def certify(holds: bool) -> Interval:
    """The interval of a fact without spread, above zero where the fact holds."""
    return Interval.parse(1.0 if holds else -1.0)


def widen(mean: float, error: float | None, count: int) -> Interval:
    """The 95 % interval of a mean of `count` values, from its standard error.

    >>> f"{widen(1.0, 0.1, 5):.2f}"
    '1.00 (0.72 to 1.28)'
    """
    half = float(student.ppf(0.975, max(count - 1, 1))) * (math.nan if error is None or count < 2 else error)
    return Interval(mean, mean - half, mean + half, count)


def pair(first: Mapping[str, float], second: Mapping[str, float]) -> Interval:
    """First less second over the seeds that both have.

    >>> pair({"a": 2.0, "b": 4.0, "c": 9.0}, {"a": 1.0, "b": 3.0}).mean
    1.0
    """
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        raise LookupError("No seed in common.")
    return Interval.parse(statistics.interval([first[seed] - second[seed] for seed in seeds]))


# Readings of metrics.


def select(metrics: Any, path: str) -> Any:
    """What lies at a path of keys: `*` takes every key that leads to the end of the path, `?` the first key.

    >>> select({"a": {"s": {"x": 1}, "t": {"x": 2}}, "b": 3}, "a > * > x"), select({"a": {"s": 5}}, "a > ?")
    ({'s': 1, 't': 2}, 5)
    """
    key, _, rest = path.partition(" > ")
    if key == "*":
        items = metrics.items() if isinstance(metrics, Mapping) else enumerate(metrics)
        found: dict[str, Any] = {}
        for name, one in items:
            try:
                value = select(one, rest) if rest else one
            except LookupError:
                continue
            inner = value.items() if "*" in rest.split(" > ") else [("", value)]
            found.update({f"{name}, {more}" if more else str(name): last for more, last in inner})
        if not found:
            raise LookupError(path)
        return found
    one = next(iter(metrics.values())) if key == "?" else metrics[key]
    return select(one, rest) if rest else one


@dataclass(frozen=True)
class Reading:
    """A function from metrics to an interval; readings subtract and scale as their intervals do."""

    read: Callable[[Metrics], Interval]

    def __call__(self, metrics: Metrics) -> Interval:
        return self.read(metrics)

    def __sub__(self, other: Any) -> Reading:
        return Reading(lambda m: self(m) - (other(m) if isinstance(other, Reading) else other))

    def __rsub__(self, other: Any) -> Reading:
        return Reading(lambda m: other - self(m))

    def __neg__(self) -> Reading:
        return Reading(lambda m: -self(m))

    def __rmul__(self, factor: float) -> Reading:
        return Reading(lambda m: factor * self(m))


def stored(path: str, times: float = 1) -> Reading:
    """An interval, or a number, as the experiment wrote it."""
    return Reading(lambda m: times * Interval.parse(select(m, path)))


def over(path: str) -> Reading:
    """The interval of the values that the `*` of a path stands for."""
    return Reading(lambda m: Interval.parse(statistics.interval(list(select(m, path).values()))))


def less(first: str, second: str, times: float = 1) -> Reading:
    """First less second, paired over what the `*` of both paths stands for."""

    def read(metrics: Metrics) -> Interval:
        return pair(*({seed: times * x for seed, x in select(metrics, path).items()} for path in (first, second)))

    return Reading(read)


def with_error(path: str, count: str) -> Reading:
    """The interval of a mean that was kept with its standard error; `count` is the path of the number of draws."""
    return Reading(lambda m: widen(select(m, path)["mean"], select(m, path)["error"], select(m, count)))


def unpair(first: Mapping[str, Any], second: Mapping[str, Any], count: int) -> Interval:
    """First less second, where only means and standard errors over `count` values were kept: a wide interval."""
    errors = [math.nan if one.get("error") is None else one["error"] for one in (first, second)]
    return widen(first["mean"] - second["mean"], math.hypot(*errors), count)


def unpaired(first: str, second: str, count: str) -> Reading:
    """`unpair` of what lies at two paths; `count` is the path of the number of draws."""
    return Reading(lambda m: unpair(select(m, first), select(m, second), select(m, count)))


# Claims.

Condition = Callable[[Interval], Sequence[Interval]]
"""From an interval to the intervals that must lie above zero."""


def ahead(value: Interval) -> Sequence[Interval]:
    return (value,)


def behind(value: Interval) -> Sequence[Interval]:
    return (-value,)


def below(bound: float) -> Condition:
    return lambda value: (bound - value,)


def within(margin: float) -> Condition:
    return lambda value: (margin - value, value - (-margin))


class Finding(NamedTuple):
    """The verdict of an experiment on a claim."""

    numbers: str  # our numbers, as a short text
    verdict: str  # one of VERDICTS, computed from the same numbers
    # where the claim did not come out, the believed cause and the evidence for the cause; else what a yes leaves open
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    A template holds fields `{name:format}`. A name is one of `compare` or `facts`, `each` for all intervals that are
    judged, `mean` for the mean over them, or a path into the metrics (see `select`), with a factor before it:
    `{100 * parts > teacher > test accuracy:.1f}`.
    """

    experiment: str  # the experiment whose metrics.json judges the claim
    text: str  # figure, table or slide, a colon, and the claim in our words
    # name to reading, or a function from metrics to names and values, of which the intervals are judged
    compare: Mapping[str, Reading] | Callable[[Metrics], Mapping[str, Any]]
    numbers: str  # our numbers, a template
    why: str = ""  # the cause where the claim did not come out, a template
    holds: Condition = ahead  # what must hold for every interval
    # more names for the templates: functions of the metrics
    facts: Mapping[str, Callable[[Metrics], Any]] = field(default_factory=dict)
    limits: str = ""  # what a yes leaves open, such as another model than the paper's: a template

    @property
    def where(self) -> str:
        return self.text.partition(": ")[0]

    @property
    def said(self) -> str:
        return self.text.partition(": ")[2]


class Paper(NamedTuple):
    """A paper with its claims, in the order in which they are written down.

    Attributes:
        authors: The authors and the year.
        title: The title.
        claims: What the paper says about which method is ahead.
        picture: The experiment whose figure stands for the paper.
    """

    authors: str
    title: str
    claims: Sequence[Claim]
    picture: str


class Each(dict[str, Interval]):
    """Intervals by name, written one after the other; with `;` in the format, semicolons stand between them."""

    def __format__(self, spec: str) -> str:
        return ("; " if ";" in spec else ", ").join(f"{name} {one:{spec.strip(';')}}" for name, one in self.items())


class Writer(Formatter):
    """Fills in a template from names, and from paths into the metrics."""

    def __init__(self, metrics: Metrics, names: Mapping[str, Any]):
        self.metrics, self.names = metrics, names

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        if " > " not in field_name:
            return (super().get_field(field_name, (), self.names)[0], field_name)
        factor, _, path = field_name.rpartition(" * ")
        value = select(self.metrics, path)
        if isinstance(value, Mapping):
            return Summary(value["mean"], value["error"]), field_name
        return (float(factor) * value if factor else value), field_name


def judge(claim: Claim, metrics: Metrics | None) -> Finding:
    """The finding of a claim; open without metrics, or where the metrics lack what the claim needs."""
    try:
        if metrics is None:
            raise LookupError(claim.experiment)
        compare = claim.compare
        names = dict(compare(metrics) if callable(compare) else {name: read(metrics) for name, read in compare.items()})
        judged = Each({name: value for name, value in names.items() if isinstance(value, Interval)})
        names |= {"each": judged, "mean": sum(value.mean for value in judged.values()) / len(judged)}
        write = Writer(metrics, names | {name: read(metrics) for name, read in claim.facts.items()}).format
        verdict = combine(part for value in judged.values() for part in claim.holds(value))
        return Finding(write(claim.numbers), verdict, write(claim.limits if verdict == YES else claim.why))
    except LookupError:
        return Finding("no result yet", OPEN)


def combine(intervals: Iterable[Interval]) -> str:
    """Whether intervals lie above zero: no where one lies below, yes where all lie above.

    >>> above, below, both = Interval(1.0, 0.5, 1.5), Interval(-1.0, -1.5, -0.5), Interval(1.0, -0.5, 2.5)
    >>> combine([above]), combine([above, both]), combine([both, below]), combine([Interval(5.0)])
    ('yes', 'not shown', 'no', 'not shown')
    """
    signs = [YES if one.low > 0 else NO if one.high < 0 else NOT_SHOWN for one in intervals]
    return NO if NO in signs else YES if set(signs) == {YES} else NOT_SHOWN


def metrics_of(experiment: str, folder: Path = common.RESULTS) -> Metrics | None:
    """The metrics an experiment has written, None if it has not."""
    path = folder / experiment / "metrics.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
