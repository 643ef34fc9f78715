"""Numbers and metrics in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUS = "\u2212"
DASH = "\u2013"


@dataclass(frozen=True)
class Meaning:
    """What a metric says.

    Attributes:
        title: As readers know it.
        words: In a sentence.
        better: "higher", "lower", or "closer" to ``best``.
        percent: Whether it is a share.
        short: The same as ``words`` where there is little room.
    """

    title: str
    words: str
    better: str = "lower"
    percent: bool = False
    short: str = ""

    def value(self, x: float) -> str:
        return percent(x) if self.percent else number(x)


MEANINGS = {
    "accuracy": Meaning("Accuracy", "How many of the test examples get their own class.", "higher", True),
    "nll": Meaning(
        "Log loss",
        "How surprised it is by the true class, in nats: 0 would be sure and right each time, and being sure and wrong "
        "costs most.",
    ),
    "brier": Meaning("Brier score", "The squared distance of the probabilities to the truth, from 0 to 2."),
    "ece": Meaning(
        "Calibration error", "How far stated confidence is from how often it is right, on average.", percent=True
    ),
    "rmse": Meaning("Typical error", "Root mean squared error, in the units of the target."),
    "coverage": Meaning(
        "Inside 95 % intervals", "How many true values lie in their error bars.", "closer", True, "95 % is right"
    ),
}
DENSITY = Meaning(
    "Log loss",
    "Minus the log density of the true values, in nats: it falls with small errors and with error bars that fit them.",
    short="errors and error bars in one number; lower is better",
)


def meaning(name: str, *, regression: bool) -> Meaning:
    """Of a metric by its short name; one that is not known speaks for itself."""
    if regression and name == "nll":
        return DENSITY
    return MEANINGS.get(name, Meaning(name, ""))


def number(x: float) -> str:
    """Three digits, and a minus sign that is one.

    >>> number(0.012345), number(1234567.0)
    ('0.0123', '1,230,000')
    >>> number(-1e-7) == f"{MINUS}1e{MINUS}7"
    True
    """
    if not math.isfinite(x):
        return "not a number" if math.isnan(x) else "∞" if x > 0 else f"{MINUS}∞"
    if x == 0:
        return "0"
    if not 1e-4 <= abs(x) < 1e9:
        first, power = f"{x:.2e}".split("e")
        return f"{first.rstrip('0').rstrip('.')}e{int(power)}".replace("-", MINUS)
    digits = max(0, 2 - math.floor(math.log10(abs(x))))
    rounded = round(x, 2 - math.floor(math.log10(abs(x))))
    text = f"{rounded:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


def nats(x: float) -> str:
    """A log evidence: to a tenth, below which it says nothing.

    >>> nats(1234.56)
    '1,234.6'
    """
    return f"{x:,.1f}".replace("-", MINUS)


def percent(x: float, digits: int = 1) -> str:
    """A share.

    >>> percent(0.9312), percent(1.0), percent(0.0004, 0)
    ('93.1 %', '100 %', '0 %')
    """
    if not math.isfinite(x):
        return number(x)
    text = f"{100 * x:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def distance(x: float) -> str:
    """Of two models, relative to a step.

    >>> distance(0.123), distance(5.74)
    ('12 % of the step', '5.74 times the step')
    """
    return f"{percent(x, 0)} of the step" if x <= 1 else f"{number(x)} times the step"


def count(n: int, what: str) -> str:
    """How many of something.

    >>> count(1, "example"), count(1200, "example")
    ('1 example', '1,200 examples')
    """
    return f"{n:,} {what}" + ("" if n == 1 else "s")
