"""Numbers and metrics as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUS = "\u2212"
DASH = "\u2013"


@dataclass(frozen=True)
class Meaning:
    """What a metric says."""

    title: str  # name of the metric
    words: str  # meaning of the metric, in a sentence
    better: str = "lower"  # "higher", "lower", or "closer" to 95 %
    percent: bool = False  # whether the metric is a share
    short: str = ""  # a shorter form of ``words``

    def format(self, x: float) -> str:
        return percent(x) if self.percent else number(x)


MEANINGS = {
    "accuracy": Meaning("Accuracy", "The share of test examples whose class is predicted correctly.", "higher", True),
    "nll": Meaning(
        "Log loss", "Minus the log probability of the true class, in nats. 0 is perfect; confident mistakes cost most."
    ),
    "brier": Meaning("Brier score", "The squared distance between the probabilities and the truth, from 0 to 2."),
    "ece": Meaning("Calibration error", "The average distance between confidence and accuracy.", percent=True),
    "rmse": Meaning("Typical error", "Root mean squared error, in the units of the target."),
    "coverage": Meaning(
        "Inside 95 % intervals", "The share of true values inside their error bars.", "closer", True, "95 % is right"
    ),
}
DENSITY = Meaning(
    "Log loss",
    "Minus the log density of the true values, in nats. Small errors and fitting error bars lower it.",
    short="errors and error bars in one number; lower is better",
)


def explain(name: str, *, regression: bool) -> Meaning:
    """The meaning of a metric. An unknown metric has its name as title and no words."""
    if regression and name == "nll":
        return DENSITY
    return MEANINGS.get(name, Meaning(name, ""))


def number(x: float) -> str:
    """A number with three digits and a true minus sign.

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
    """A log evidence to a tenth. Smaller differences have no meaning.

    >>> nats(1234.56)
    '1,234.6'
    """
    return f"{x:,.1f}".replace("-", MINUS)


def percent(x: float, digits: int = 1) -> str:
    """A share in percent.

    >>> percent(0.9312), percent(1.0), percent(0.0004, 0)
    ('93.1 %', '100 %', '0 %')
    """
    if not math.isfinite(x):
        return number(x)
    text = f"{100 * x:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def distance(x: float) -> str:
    """The distance between two models, relative to a step.

    >>> distance(0.123), distance(5.74)
    ('12 % of the step', '5.74 times the step')
    """
    return f"{percent(x, 0)} of the step" if x <= 1 else f"{number(x)} times the step"


def count(n: int, what: str, many: str = "") -> str:
    """A number of things.

    >>> count(1, "example"), count(1200, "example"), count(3, "class", "classes")
    ('1 example', '1,200 examples', '3 classes')
    """
    return f"{n:,} {what if n == 1 else many or f'{what}s'}"
