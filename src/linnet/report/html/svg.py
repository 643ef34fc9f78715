"""HTML and SVG elements with escaped text; and a small plot with axes and marks, whose colors are in page.css.

Why no matplotlib: a report needs no extra, and matplotlib is in the extra ``demo``. A figure has the colors of the page
in light and in dark mode, because a style sheet colors it, and a title under the mouse for each mark. matplotlib fixes
the colors in the file. Its SVG of 100 error bars has 35 kB with text and 43 kB with text as paths; this module's has
16 kB.

Why no Jinja2: `h` and `join` are the whole of what a template engine would replace, about 50 lines. The conditions, the
loops and the formats of `linnet.report.html.page` would move into templates, where mypy does not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from linnet.report.formatting import MINUS, number, percent

Values = Sequence[float] | np.ndarray
Child = Any
"""Markup, text or a number; None and False for nothing; or an iterable of these."""


class Markup(str):
    """Text that is HTML already. All other text is escaped."""

    __slots__ = ()


def h(tag: str, *children: Child, **attributes: Any) -> Markup:
    """An element.

    Args:
        tag: Name of the element.
        children: Content of the element.
        attributes: Attributes by name. An underscore at the end is dropped, other underscores become hyphens, and
            attributes that are None or False are left out.

    >>> h("a", "x < y", h("b", 1), class_="wide", aria_label='"')
    '<a class="wide" aria-label="&quot;">x &lt; y<b>1</b></a>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_format(value))}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in ("img", "meta", "br", "link"):  # elements without content
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Several pieces, one after the other.

    >>> join(["a & b", None, [h("br")]])
    'a &amp; b<br>'
    """
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(escape(_format(child)))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def _format(value: Any) -> str:
    """Text of a value. Coordinates have two decimals, which is finer than a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """One axis."""

    low: float  # beginning of the axis
    high: float  # end of the axis
    title: str  # title of the axis
    # how its numbers are written; by default with enough digits to tell them apart
    form: Callable[[float], str] | None = None
    log: bool = False  # whether the axis is logarithmic

    def at(self, x: float) -> float:
        """Position of a number along the axis, from 0 to 1."""
        if self.log:
            return math.log(x / self.low) / math.log(self.high / self.low)
        return (x - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Round numbers along the axis.

        >>> Scale(0.0, 1.0, "").marks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> Scale(0.5, 2000.0, "", log=True).marks()
        [1.0, 10.0, 100.0, 1000.0]
        >>> Scale(1.0, 8.4, "", log=True).marks()
        [1.0, 2.0, 5.0]
        """
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            each = max(1, -(-(last - first) // 5))
            found = [10.0**power for power in range(first, last + 1, each)]
            if len(found) < 2:  # 1, 2 and 5 where the axis is short
                fine = [unit * 10.0**power for power in range(first - 1, last + 1) for unit in (1, 2, 5)]
                found = [mark for mark in fine if self.low <= mark <= self.high]
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
        """A number along the axis as text.

        >>> Scale(100.0, 100.5, "").text(100.2)
        '100.2'
        >>> Scale(1.0, 1e7, "", log=True).text(1e6) == "10\u2076"
        True
        """
        if self.form is not None:
            return self.form(mark)
        if self.log and not 1e-3 <= mark < 1e5:
            power = str(round(math.log10(mark)))
            return "10" + power.translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))
        if self.log or self.high >= 1e6 or self._step < 1e-4:
            return number(mark)
        return f"{mark:,.{max(0, -math.floor(math.log10(self._step)))}f}".replace("-", MINUS)


def make_share_scale(title: str, low: float = 0.0, high: float = 1.0) -> Scale:
    """An axis of shares, with a decimal where the axis is short.

    >>> [make_share_scale("", 0.0, high).text(0.012) for high in (1.0, 0.04)]
    ['1 %', '1.2 %']
    """
    return Scale(low, high, title, lambda x: percent(x, 1 if high - low < 0.05 else 0))


def make_scale(values: Values, title: str, *, zero: bool = False) -> Scale:
    """An axis that holds all values, with a little room; and zero, if ``zero``.

    >>> make_scale([3.0, 3.0], "").low < 3 < make_scale([3.0, 3.0], "").high
    True
    """
    low, high = float(min(values)), float(max(values))
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    room = 0.05 * (high - low) if high > low else max(abs(high), 1.0) * 0.5
    return Scale(low - (0.0 if zero and low == 0 else room), high + room, title)


class Plot:
    """Marks within axes, in the order in which they are added.

    Args:
        x: The horizontal axis.
        y: The vertical axis.
        label: What the plot shows, for readers who cannot see it.
    """

    width, height = 440.0, 310.0
    right, top, bottom = 424.0, 34.0, 264.0  # edges of the area of the marks, but for the left one

    def __init__(self, x: Scale, y: Scale, label: str) -> None:
        self.x, self.y, self.label = x, y, label
        self.left = max(54.0, 14.0 + 8.0 * max(len(y.text(mark)) for mark in y.marks()))  # the numbers have room
        self.parts: list[Markup] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Coordinates of a point."""
        return (
            self.left + self.x.at(x) * (self.right - self.left),
            self.bottom - self.y.at(y) * (self.bottom - self.top),
        )

    def line(self, xs: Values, ys: Values, kind: str) -> None:
        """Add a line through points."""
        points = " ".join("{:.2f},{:.2f}".format(*self.place(x, y)) for x, y in zip(xs, ys, strict=True))
        self.parts.append(h("polyline", points=points, class_=f"line {kind}"))

    def area(self, xs: Values, low: Values, high: Values, kind: str) -> None:
        """Add the area between two lines."""
        there = [self.place(x, y) for x, y in zip(xs, high, strict=True)]
        back = [self.place(x, y) for x, y in zip(xs, low, strict=True)][::-1]
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in there + back)
        self.parts.append(h("polygon", points=points, class_=f"area {kind}"))

    def dot(self, x: float, y: float, kind: str, *, radius: float = 3.0, title: str = "") -> None:
        """Add a point. The title is shown when the mouse is over the point."""
        (cx, cy), tip = self.place(x, y), h("title", title) if title else None
        self.parts.append(h("circle", tip, cx=cx, cy=cy, r=float(radius), class_=f"dot {kind}"))

    def whisker(self, x: float, low: float, high: float, kind: str) -> None:
        """Add a vertical line."""
        (x1, y1), (x2, y2) = self.place(x, low), self.place(x, high)
        self.parts.append(h("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"whisker {kind}"))

    def level(self, y: float, text: str, *, above: bool) -> None:
        """Add a dashed horizontal line with a text above or below its end."""
        (x1, y1), (x2, _) = self.place(self.x.low, y), self.place(self.x.high, y)
        self.parts.append(h("line", x1=x1, y1=y1, x2=x2, y2=y1, class_="guide"))
        self.parts.append(h("text", text, x=x2 - 4, y=y1 + (-6 if above else 15), class_="note", text_anchor="end"))

    def diagonal(self) -> None:
        """Add the line on which both axes have the same number."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        if high > low:
            self.line([low, high], [low, high], "guide")

    def svg(self) -> Markup:
        """The plot as SVG."""
        left, right, bottom = self.left, self.right, self.bottom
        frame = [h("text", self.y.title, x=0, y=14, class_="axis")]
        for mark in self.y.marks():
            _, y = self.place(self.x.low, mark)
            frame.append(h("line", x1=left, y1=y, x2=right, y2=y, class_="grid"))
            frame.append(h("text", self.y.text(mark), x=left - 8, y=y + 4, class_="tick", text_anchor="end"))
        for mark in self.x.marks():
            x, _ = self.place(mark, self.y.low)
            anchor = "end" if x > right - 8 else "middle"
            frame.append(h("text", self.x.text(mark), x=x, y=bottom + 18, class_="tick", text_anchor=anchor))
        frame.append(h("line", x1=left, y1=bottom, x2=right, y2=bottom, class_="base"))
        frame.append(h("text", self.x.title, x=right, y=self.height - 8, class_="axis", text_anchor="end"))
        box = f"0 0 {self.width:g} {self.height:g}"
        return h("svg", frame, self.parts, viewBox=box, role="img", aria_label=self.label, class_="plot")
