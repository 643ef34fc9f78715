"""The page: one HTML file with its style sheet and pictures inside, which asks for nothing from outside."""

from __future__ import annotations

import os
from importlib.resources import files

from linnet._common.files import atomic_write
from linnet.report.content import Points, Report
from linnet.report.html import sections
from linnet.report.html.markup import Markup, h

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: its own style sheet and pictures, and nothing else; no scripts run."""

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M1 14C5 14 6 3 15 2M1 11L15 4' fill='none' stroke='%231f5fa8' stroke-width='2'/%3E%3C/svg%3E"
)


def render(report: Report) -> str:
    """The report as one HTML page; equal data give equal pages."""
    style = Markup((files("linnet.report.html") / "page.css").read_text(encoding="utf-8"))
    last = [sections.examples(report), sections.inside(report)]
    if isinstance(report.outcome, Points):  # what an embedding sees is all there is to say about it
        last.reverse()
    parts = [sections.quality(report), sections.linear(report), *last]
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=POLICY),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", f"{report.title} · linnet"),
        h("link", rel="icon", href=ICON),
        h("style", style),
    )
    versions = report.record.get("versions", {})
    made = " ".join(filter(None, ("Made by linnet", versions.get("linnet"))))
    foot = h("footer", h("p", f"{made}. This page is one file and works offline."))
    main = h("main", sections.header(report), parts, sections.record(report), foot)
    return "<!doctype html>\n" + h("html", head, h("body", main), lang="en") + "\n"


def save(path: str | os.PathLike[str], report: Report) -> None:
    """Write the page, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(render(report), encoding="utf-8")
