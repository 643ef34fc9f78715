"""HTML and SVG that cannot be broken by what is put into them: text is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

VOID = ("img", "meta", "br", "link")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Any
"""Markup, text or a number; None and False for nothing; or an iterable of these."""


def h(tag: str, *children: Child, **attributes: Any) -> Markup:
    """An element.

    Args:
        tag: Its name.
        children: What it holds.
        attributes: An underscore at the end is dropped and others become hyphens; None and False are left out.

    >>> h("a", "x < y", h("b", 1), class_="wide", aria_label='"')
    '<a class="wide" aria-label="&quot;">x &lt; y<b>1</b></a>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in VOID:
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
            parts.append(escape(_text(child)))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def _text(value: Any) -> str:
    """Coordinates to a hundredth, which is finer than a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
