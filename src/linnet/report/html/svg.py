"""A small plot in SVG: axes with round numbers, and marks whose colors the page's style sheet gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from linnet.report.formatting import MINUS, number, percent
from linnet.report.html.markup import Markup, h

Values = Sequence[float] | np.ndarray

WIDTH, HEIGHT = 440.0, 310.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 16.0, 34.0, 46.0


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        low: Where it begins.
        high: Where it ends.
        title: What it shows.
        form: How its numbers are written; by default with as many digits as tell them apart.
        log: Whether it is logarithmic.
    """

    low: float
    high: float
    title: str
    form: Callable[[float], str] | None = None
    log: bool = False

    def at(self, x: float) -> float:
        """The share of the way from one end to the other."""
        if self.log:
            return math.log(x / self.low) / math.log(self.high / self.low)
        return (x - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Round numbers along it.

        >>> Scale(0.0, 1.0, "").marks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> Scale(0.5, 2000.0, "", log=True).marks()
        [1.0, 10.0, 100.0, 1000.0]
        """
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            each = max(1, -(-(last - first) // 5))
            found = [10.0**power for power in range(first, last + 1, each)]
            return found if len(found) > 1 else [self.low, self.high]
        step = self._step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    @property
    def _step(self) -> float:
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        return next(unit * m for m in (1, 2, 5, 10) if unit * m >= 0.8 * rough)

    def text(self, mark: float) -> str:
        """How a number along it is written.

        >>> Scale(100.0, 100.5, "").text(100.2)
        '100.2'
        """
        if self.form is not None:
            return self.form(mark)
        if self.log and not 1e-3 <= mark < 1e5:
            return power(mark)
        if self.log or self.high >= 1e6 or self._step < 1e-4:
            return number(mark)
        return f"{mark:,.{max(0, -math.floor(math.log10(self._step)))}f}".replace("-", MINUS)


def power(x: float) -> str:
    """A number that is about a power of ten as one.

    >>> power(1e6) == "10\u2076"
    True
    """
    digits = str(round(math.log10(x))).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
    return f"10{digits}"


def share(title: str, low: float = 0.0, high: float = 1.0) -> Scale:
    """An axis of shares."""
    return Scale(low, high, title, lambda x: percent(x, 1 if high - low < 0.05 else 0))


def around(values: Values, title: str, *, zero: bool = False) -> Scale:
    """An axis that holds all values, with a little room; ``zero`` is part of it where asked for.

    >>> around([3.0, 3.0], "").low < 3 < around([3.0, 3.0], "").high
    True
    """
    low, high = float(min(values)), float(max(values))
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    room = 0.05 * (high - low) if high > low else max(abs(high), 1.0) * 0.5
    return Scale(low - (0.0 if zero and low == 0 else room), high + room, title)


class Plot:
    """Marks within axes, in the order in which they are added.

    Args:
        x: The axis below.
        y: The axis to the left.
        label: What the plot shows, for those who cannot see it.
    """

    def __init__(self, x: Scale, y: Scale, label: str) -> None:
        self.x, self.y, self.label = x, y, label
        self.parts: list[Markup] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Coordinates of a point."""
        return (
            LEFT + self.x.at(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.at(y) * (HEIGHT - TOP - BOTTOM),
        )

    def line(self, xs: Values, ys: Values, kind: str) -> None:
        """A line through points."""
        points = " ".join("{:.2f},{:.2f}".format(*self.place(x, y)) for x, y in zip(xs, ys, strict=True))
        self.parts.append(h("polyline", points=points, class_=f"line {kind}"))

    def area(self, xs: Values, low: Values, high: Values, kind: str) -> None:
        """What lies between two lines."""
        there = [self.place(x, y) for x, y in zip(xs, high, strict=True)]
        back = [self.place(x, y) for x, y in zip(xs, low, strict=True)][::-1]
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in there + back)
        self.parts.append(h("polygon", points=points, class_=f"area {kind}"))

    def dot(self, x: float, y: float, kind: str, *, radius: float = 3.0, title: str = "") -> None:
        """A point; ``title`` is shown where the mouse rests on it."""
        cx, cy = self.place(x, y)
        self.parts.append(
            h("circle", h("title", title) if title else None, cx=cx, cy=cy, r=float(radius), class_=f"dot {kind}")
        )

    def whisker(self, x: float, low: float, high: float, kind: str) -> None:
        """A line up and down."""
        (x1, y1), (x2, y2) = self.place(x, low), self.place(x, high)
        self.parts.append(h("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"whisker {kind}"))

    def level(self, y: float, text: str) -> None:
        """A dashed line across, with a word below its beginning."""
        (x1, y1), (x2, _) = self.place(self.x.low, y), self.place(self.x.high, y)
        self.parts.append(h("line", x1=x1, y1=y1, x2=x2, y2=y1, class_="guide"))
        self.parts.append(h("text", text, x=x1 + 6, y=y1 + 15, class_="note"))

    def diagonal(self) -> None:
        """Where both axes say the same."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        if high > low:
            self.line([low, high], [low, high], "guide")

    def svg(self) -> Markup:
        """The plot."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        frame = [h("text", self.y.title, x=0, y=14, class_="axis")]
        for mark in self.y.marks():
            _, y = self.place(self.x.low, mark)
            frame.append(h("line", x1=LEFT, y1=y, x2=right, y2=y, class_="grid"))
            frame.append(h("text", self.y.text(mark), x=LEFT - 8, y=y + 4, class_="tick", text_anchor="end"))
        for mark in self.x.marks():
            x, _ = self.place(mark, self.y.low)
            anchor = "end" if x > right - 8 else "middle"
            frame.append(h("text", self.x.text(mark), x=x, y=bottom + 18, class_="tick", text_anchor=anchor))
        frame.append(h("line", x1=LEFT, y1=bottom, x2=right, y2=bottom, class_="base"))
        frame.append(h("text", self.x.title, x=right, y=HEIGHT - 8, class_="axis", text_anchor="end"))
        return h(
            "svg",
            frame,
            self.parts,
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_label=self.label,
            class_="plot",
        )
