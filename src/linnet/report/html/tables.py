"""Tables, bars and galleries of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linnet._common.memory import format_bytes
from linnet.jacobian.plan import Plan, _count
from linnet.report.content import Classes, Group, Item
from linnet.report.formatting import DASH, count, meaning, nats, percent
from linnet.report.html.markup import Child, Markup, h

LAYERS = 24
"""Layers of a network that are listed; the others are added up or left out with a word."""

CONFUSIONS = 8


def table(
    titles: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    *,
    right: Sequence[int] = (),
    kind: str = "",
    style: str | None = None,
) -> Markup:
    """A table that scrolls by itself where the page is too narrow.

    Args:
        titles: Of the columns.
        rows: Of cells.
        right: Columns whose cells are numbers.
        kind: A class for the style sheet.
        style: What it is to know about this table.
    """

    def cell(tag: str, j: int, value: Child) -> Markup:
        return h(tag, value, class_="num" if j in right else None, scope="col" if tag == "th" else None)

    head = h("thead", h("tr", [cell("th", j, title) for j, title in enumerate(titles)]))
    body = h("tbody", [h("tr", [cell("td", j, value) for j, value in enumerate(row)]) for row in rows])
    return h("div", h("table", head, body, class_=kind or None, style=style), class_="scroll", tabindex=0, role="group")


def scores(by_method: Mapping[str, Mapping[str, float]], *, regression: bool, explained: bool = True) -> Markup:
    """Metrics, a row for each, with what it says where that is to be explained."""
    names = list(dict.fromkeys(name for found in by_method.values() for name in found))
    rows: list[list[Child]] = []
    for name in names:
        told = meaning(name, regression=regression)
        values = {method: found[name] for method, found in by_method.items() if name in found}
        best = _best(values, told.better)
        cells: list[Child] = [
            DASH if method not in values else h("b" if method in best else "span", told.value(values[method]))
            for method in by_method
        ]
        goal = {"higher": "higher is better", "lower": "lower is better", "closer": "95 % is right"}[told.better]
        rows.append([h("strong", told.title), *cells, *([[told.words, " ", h("em", goal)]] if explained else [])])
    right = range(1, 1 + len(by_method))
    titles = ["", *by_method, *(["what it says"] if explained else [])]
    kind = "scores" if explained else ""
    return table(titles, rows, right=right, kind=kind, style=f"--methods:{len(by_method)}")


def _best(values: Mapping[str, float], better: str) -> list[str]:
    """The methods with the best value, where there are several to compare."""
    if len(values) < 2:
        return []
    cost = {m: -x if better == "higher" else abs(x - 0.95) if better == "closer" else x for m, x in values.items()}
    return [method for method, x in cost.items() if x == min(cost.values())]


def bars(shares: Mapping[str, float]) -> Markup:
    """Shares by name, the largest first; the small ones at the end of a long list as one."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    rest = ordered[LAYERS:]
    shown = [*ordered[:LAYERS], *([(f"{len(rest)} others", sum(x for _, x in rest))] if rest else [])]
    top = max((x for _, x in shown), default=0.0) or 1.0
    return h(
        "dl",
        [
            h(
                "div",
                h("dt", name),
                h("dd", h("i", style=f"width:{100 * x / top:.1f}%"), class_="bar"),
                h("dd", percent(x), class_="num"),
            )
            for name, x in shown
        ],
        class_="bars",
    )


def pairs(values: Mapping[str, Child]) -> Markup:
    """Names and values, one below the other."""
    return h("dl", [h("div", h("dt", name), h("dd", value)) for name, value in values.items()], class_="pairs")


def confusions(told: Classes) -> Markup | None:
    """Which classes are taken for which; None where all are right."""
    wrong = ~told.right
    if not wrong.any():
        return None
    kinds, times = np.unique(
        np.stack([told.labels[wrong], told.probabilities.argmax(1)[wrong]], 1), axis=0, return_counts=True
    )
    order = np.argsort(-times, kind="stable")[:CONFUSIONS]
    sizes = np.bincount(told.labels, minlength=len(told.names))
    rows = [
        [told.names[a], told.names[b], f"{k:,}", percent(k / sizes[a])]
        for (a, b), k in zip(kinds[order], times[order], strict=True)
    ]
    return h("div", table(["true class", "taken for", "times", "of this class"], rows, right=(2, 3)), class_="narrow")


def plan(found: Plan) -> Markup:
    """Which engine serves which layer."""
    rows = [
        [
            line.layer,
            line.rule,
            f"{line.parameters:,}",
            f"{line.uses:,}",
            line.products,
            line.gram,
            DASH if line.cost is None else _count(line.cost),
        ]
        for line in found.lines[:LAYERS]
    ]
    more = len(found.lines) - LAYERS
    head = (
        f"Jacobian of {count(found.n, 'example')} and {count(found.c, 'output')}: {found.shape[0]:,} by "
        f"{found.shape[1]:,}, {found.note}; chunks of {count(found.chunk, 'example')}, "
        f"{format_bytes(found.per_example)} each."
    )
    titles = ["layer", "rule", "parameters", "uses", "products", "Gram", "cost"]
    return h(
        "div",
        h("p", head),
        table(titles, rows, right=(2, 3, 6), kind="plan"),
        h("p", f"… and {count(more, 'layer')} more.", class_="quiet") if more > 0 else None,
    )


def gallery(group: Group) -> Markup:
    """Examples beside each other: pictures in a grid, texts in a list, rows in a table."""
    first = group.items[0].shown
    if first.picture:
        body = h(
            "ul",
            [h("li", _card(item), class_="wrong" if item.wrong else None) for item in group.items],
            class_="pictures",
        )
    elif first.text:
        body = h(
            "ul",
            [
                h("li", h("blockquote", item.shown.text), _said(item), class_="wrong" if item.wrong else None)
                for item in group.items
            ],
            class_="texts",
        )
    else:
        body = _rows(group.items)
    return h("div", h("h3", group.title), h("p", group.note, class_="quiet"), body, class_="gallery")


def _card(item: Item) -> Child:
    name = item.shown.name
    return [
        h("img", src=item.shown.picture, alt=name, title=name, width=96),
        _said(item),
        h("small", name, class_="quiet"),
    ]


def _said(item: Item) -> Markup:
    return h("p", [h("span", h("small", title), " ", h("b", value)) for title, value in item.said], class_="said")


def _rows(items: Sequence[Item]) -> Markup:
    said = [title for title, _ in items[0].said]
    cells = [name for name, _ in items[0].shown.cells]
    rows = [
        [
            item.shown.name,
            *(h("b", value, class_="wrong" if item.wrong else None) for _, value in item.said),
            *(value for _, value in item.shown.cells),
        ]
        for item in items
    ]
    return table(["example", *said, *cells], rows, right=range(1, 1 + len(said) + len(cells)), kind="rows")


def blocks(by_count: Mapping[int, float], chosen: int | None) -> Markup:
    """The evidence by how many blocks adapt."""
    rows = [[h("b", f"{k} (chosen)") if k == chosen else str(k), nats(value)] for k, value in by_count.items()]
    return table(["blocks from the top", "log evidence"], rows, right=(1,))
