"""The page: one HTML file with its style sheet and pictures inside. The page loads nothing from outside."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from linnet._common import atomic_write, format_bytes
from linnet.jacobian import Plan, _count
from linnet.report.content import Classes, Group, Item, Linear, Missing, Numbers, Points, Report
from linnet.report.formatting import DASH, MINUS, count, distance, explain, nats, number, percent
from linnet.report.html import figures
from linnet.report.html.svg import Child, Markup, h
from linnet.report.verdicts import check_report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser may load for the page: its own style sheet and pictures, and nothing else. No scripts run."""

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M1 14C5 14 6 3 15 2M1 11L15 4' fill='none' stroke='%231f5fa8' stroke-width='2'/%3E%3C/svg%3E"
)

LAYERS = 24
"""Number of layers that are listed. Further layers are added up, or only counted."""


def render(report: Report) -> str:
    """The report as one HTML page. Equal data give equal pages."""
    style = Markup((files("linnet.report.html") / "page.css").read_text(encoding="utf-8"))
    last = [_write_examples(report), _write_inside(report)]
    if isinstance(report.outcome, Points):
        last.reverse()
    parts = [_write_quality(report), _write_linear(report), *last]
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
    made = " ".join(filter(None, ("Made by linnet", report.record.get("versions", {}).get("linnet"))))
    foot = h("footer", h("p", f"{made}. This page is one file and works offline."))
    main = h("main", _write_header(report), parts, _write_record(report), foot)
    return "<!doctype html>\n" + h("html", head, h("body", main), lang="en") + "\n"


def save(path: str | os.PathLike[str], report: Report) -> None:
    """Write the complete page, or no file at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(render(report), encoding="utf-8")


def _make_section(name: str, title: str, *body: Child, intro: Child = None) -> Markup:
    return h("section", h("h2", title), h("p", intro, class_="intro") if intro else None, *body, id=name)


def _explain_missing(what: str, missing: Missing) -> Markup:
    return h("p", h("b", f"{what}: left out."), " ", missing.why, class_="missing")


# The first screen.


def _write_header(report: Report) -> Markup:
    """What was done, how good the model is, and whether it can be trusted."""
    return h(
        "header",
        h("p", report.kind, class_="kicker"),
        h("h1", report.title),
        h("p", report.lede, class_="lede"),
        _make_tiles(report),
        _write_checks(report),
    )


def _make_tiles(report: Report) -> Markup | None:
    found: list[Markup] = []
    if report.scores and not isinstance(report.scores, Missing):
        methods, numbers = list(report.scores), isinstance(report.outcome, Numbers)
        old, last = methods[max(0, len(methods) - 2)], report.scores[methods[-1]]
        first = report.scores[old]
        for name in ("rmse", "coverage", "nll") if numbers else ("accuracy", "nll", "ece"):
            if name in last:
                told = explain(name, regression=numbers)
                before = f"{old}: {told.format(first[name])}" if len(methods) > 1 and name in first else ""
                found.append(_make_tile(told.title, told.format(last[name]), before or told.short or told.words))
    facts, room = list(report.facts.items()), 4 - len(found)
    for i, (title, value) in enumerate(facts[:room]):
        follows = room == 1 and i + 1 < len(facts)
        found.append(_make_tile(title, value, "{}: {}".format(*facts[i + 1]) if follows else ""))
    return h("div", found, class_="tiles") if found else None


def _make_tile(title: str, value: str, note: str) -> Markup:
    return h("div", h("p", title, class_="name"), h("p", value, class_="value"), h("p", note, class_="quiet"))


def _write_checks(report: Report) -> Markup | None:
    signs = {"good": "✓", "fair": "~", "bad": "✕", "open": "?"}
    items = []
    for check in check_report(report):
        question = h("p", h("span", check.question, class_="question"), " ", h("b", check.answer))
        sign = h("span", signs[check.state], class_="sign", aria_hidden="true")
        items.append(h("li", sign, h("div", question, h("p", check.why)), class_=check.state))
    if not items:
        return None
    return h("div", h("h2", "Can I trust it?"), h("ul", items, class_="checks"), class_="trust", id="trust")


# The sections.


def _write_quality(report: Report) -> Markup | None:
    """Metrics, and whether the confidence is correct."""
    if report.scores is None:
        return None
    title, told = "How good it is", report.outcome
    if isinstance(report.scores, Missing):
        return _make_section("quality", title, _explain_missing("Metrics and calibration", report.scores))
    body: list[Child] = [_tabulate_scores(report.scores, regression=isinstance(told, Numbers))]
    if isinstance(told, Missing):
        body.append(_explain_missing("Calibration", told))
    elif isinstance(told, Classes):
        body.append(h("div", figures.draw_reliability(told), figures.draw_rejection(told), class_="figures"))
        found = _tabulate_confusions(told)
        body.append(h("h3", "Which classes are confused"))
        body.append(h("p", "No example is confused.", class_="quiet") if found is None else found)
    elif isinstance(told, Numbers):
        body.append(_draw_numbers(told))
    tested = getattr(told, "what", "test example") == "test example"
    intro = "There are no test data. Each training example is predicted from all other examples, in closed form."
    return _make_section("quality", title, *body, intro=None if tested else intro)


def _draw_numbers(told: Numbers) -> Child:
    most = 4
    drawn = [figures.draw_intervals(told, j) for j in range(min(most, len(told.names)))]
    by_std = figures.draw_error_by_std(told)
    why = Missing("All error bars have about the same width, or there are fewer than 24 predictions.")
    more = len(told.names) - most
    return [
        h("div", drawn, figures.draw_coverage(told), by_std, class_="figures"),
        _explain_missing("Errors against error bars", why) if by_std is None else None,
        h("p", f"{more} more targets are in predictions.csv.", class_="quiet") if more > 0 else None,
    ]


def _write_linear(report: Report) -> Markup | None:
    """The linear model against the network itself."""
    found, title = report.linear, "The linear model and the real network"
    if found is None:
        return None
    if isinstance(found, Missing):
        return _make_section("linear", title, _explain_missing("The comparison", found))
    facts: dict[str, Child] = {"difference": distance(found.error), "compared on": count(found.n, found.what)}
    if found.agreement is not None:
        facts["same class"] = f"{percent(found.agreement)} of these"
    body: list[Child] = [_list_pairs(facts)]
    if found.scores:
        numbers = isinstance(report.outcome, Numbers)
        body += [h("h3", "On these examples"), _tabulate_scores(found.scores, regression=numbers, explained=False)]
    words = h("div", h("p", _explain_linear(found)), *body)
    return _make_section("linear", title, h("div", words, figures.draw_linear(found), class_="figures"))


def _explain_linear(found: Linear) -> str:
    network = "f(x; θ₀) + " if found.whole else ""
    model = f"linnet predicts with the linear model {network}J(x)(θ {MINUS} θ₀), which has an exact solution. "
    if found.drawn:
        return (
            f"{model}The error bars come from weights θ around the trained weights. Here {found.drawn} such weights "
            "were drawn, and the network was run with each. If both models agree, the error bars hold for the "
            "network too."
        )
    if not found.whole:
        return (
            f"{model}Here the network was run with the adapted weights θ, and the change of the network is compared "
            "with the change of the linear model. The model is the change alone: the network with these weights is "
            "another model."
        )
    return (
        f"{model}Here the network was run with the adapted weights θ. If both models agree, you can write the weights "
        "into the network (apply()) and use the network. If they do not agree, use this model."
    )


def _write_examples(report: Report) -> Markup | None:
    """Examples that are worth a look."""
    if report.examples is None and report.influence is None:
        return None
    body: list[Child] = []
    if isinstance(report.examples, Missing):
        body.append(_explain_missing("Examples by confidence", report.examples))
    else:
        body += [_show_group(group) for group in report.examples or () if group.items]
    if isinstance(report.influence, Missing):
        body.append(_explain_missing("Most influential training examples", report.influence))
    elif report.influence is not None and report.influence.items:
        body.append(_show_group(report.influence))
    return _make_section("examples", "Examples", *body)


def _write_inside(report: Report) -> Markup | None:
    """What the data determine: spectrum, layers, evidence."""
    drawn: list[Child] = []
    left: list[Child] = []
    if isinstance(report.outcome, Points):
        drawn.append(figures.draw_points(report.outcome))
    if isinstance(report.spectrum, Missing):
        left.append(_explain_missing("Spectrum", report.spectrum))
    elif report.spectrum is not None and np.any(report.spectrum.values > 0):
        drawn.append(figures.draw_eigenvalues(report.spectrum))
    if isinstance(report.relevance, Missing):
        left.append(_explain_missing("Layer relevance", report.relevance))
    elif report.relevance is not None:
        caption = "The share of each layer in the change of the network."
        bars = _draw_bars(report.relevance)
        drawn.append(h("figure", h("h3", "Which layers adapt"), bars, h("figcaption", caption)))
    found = report.evidence
    if isinstance(found, Missing):
        left.append(_explain_missing("Evidence path", found))
    elif found is not None:
        drawn_path = len(found.path) >= 4  # fewer steps need no figure
        if drawn_path:
            drawn.append(figures.draw_evidence(found))
        if found.blocks:
            caption = "One more block adapts at a time, from the top, while the log evidence rises."
            rows = [
                [h("b", f"{k} (chosen)") if k == found.chosen else str(k), nats(value)]
                for k, value in found.blocks.items()
            ]
            blocks = _make_table(["blocks from the top", "log evidence"], rows, right=(1,))
            drawn.append(h("figure", h("h3", "How many blocks adapt"), blocks, h("figcaption", caption)))
        if found.selection:
            drawn.append(_show_selection(found.selection))
        facts: dict[str, Child] = {} if found.value is None else {"log evidence": nats(found.value)}
        if len(found.path) > 1 and not drawn_path:
            facts["log evidence by step"] = ", ".join(nats(value) for value in found.path)
        facts |= {f"prior scale, {name}": number(value) for name, value in list(found.scales.items())[:LAYERS]}
        left.append(_list_pairs(facts) if facts else None)
    if not drawn and not left:
        return None
    title = "What the embedding sees" if isinstance(report.outcome, Points) else "What the model has learned"
    return _make_section("inside", title, h("div", drawn, class_="figures") if drawn else None, left)


def _show_selection(rows: Sequence[Any]) -> Markup:
    """A table of what was compared, with the chosen row in bold."""
    titles = [x.name for x in dataclasses.fields(rows[0]) if x.name != "chosen"]
    titles = [title for title in titles if any(getattr(row, title) is not None for row in rows)]
    right = [j for j, title in enumerate(titles) if any(isinstance(getattr(row, title), float) for row in rows)]

    def show(row: Any, title: str) -> Child:
        value = getattr(row, title)
        text = "" if value is None else number(value) if isinstance(value, float) else str(value)
        return h("b", f"{text} (chosen)") if title == "name" and row.chosen else text

    cells = [[show(row, title) for title in titles] for row in rows]
    table = _make_table([title.replace("_", " ") for title in titles], cells, right=right)
    caption = "The same data were fitted in each way, and one way was chosen."
    return h("figure", h("h3", "What was compared"), table, h("figcaption", caption))


def _write_record(report: Report) -> Markup:
    """How to make the model again."""
    kept = dict(report.record)
    command, versions = kept.pop("command", None), kept.pop("versions", {})
    facts: dict[str, Child] = dict(report.facts)
    facts |= {name: str(value) for name, value in kept.items() if value is not None}
    if versions:
        facts["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    if report.files:
        facts["files beside this page"] = ", ".join(report.files)
    plan: Child = None
    if isinstance(report.plan, Missing):
        plan = _explain_missing("Plan", report.plan)
    elif report.plan is not None:
        plan = [h("h3", "Plan"), _show_plan(report.plan)]
    lines = [h("h3", "The command"), h("pre", h("code", command))] if command else None
    return _make_section("record", "How the model was made", lines, _list_pairs(facts) if facts else None, plan)


# Tables, bars and galleries.


def _make_table(
    titles: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    *,
    right: Sequence[int] = (),
    kind: str = "",
    style: str | None = None,
) -> Markup:
    """A table that scrolls by itself where the page is too narrow.

    Args:
        titles: Titles of the columns.
        rows: Cells of the rows.
        right: Columns of numbers, which are aligned right.
        kind: Class in the style sheet.
        style: Variables for the style sheet.
    """

    def make_cell(tag: str, j: int, value: Child) -> Markup:
        return h(tag, value, class_="num" if j in right else None, scope="col" if tag == "th" else None)

    head = h("thead", h("tr", [make_cell("th", j, title) for j, title in enumerate(titles)]))
    body = h("tbody", [h("tr", [make_cell("td", j, value) for j, value in enumerate(row)]) for row in rows])
    return h("div", h("table", head, body, class_=kind or None, style=style), class_="scroll", tabindex=0, role="group")


def _tabulate_scores(
    by_method: Mapping[str, Mapping[str, float]], *, regression: bool, explained: bool = True
) -> Markup:
    """One row for each metric, with an explanation if ``explained``."""
    goals = {"higher": "higher is better", "lower": "lower is better", "closer": "95 % is right"}
    rows: list[list[Child]] = []
    for name in dict.fromkeys(name for found in by_method.values() for name in found):
        told = explain(name, regression=regression)
        values = {method: found[name] for method, found in by_method.items() if name in found}
        best = _find_best(values, told.better)
        cells: list[Child] = [
            DASH if method not in values else h("b" if method in best else "span", told.format(values[method]))
            for method in by_method
        ]
        words = [[told.words, " ", h("em", goals[told.better])]] if explained else []
        # The name that the console and metrics.json have stands below the title.
        key = h("small", name, class_="quiet") if told.title.lower() != name else None
        rows.append([[h("strong", told.title), key], *cells, *words])
    titles = ["", *by_method, *(["meaning"] if explained else [])]
    kind, style = "scores" if explained else "", f"--methods:{len(by_method)}"
    return _make_table(titles, rows, right=range(1, 1 + len(by_method)), kind=kind, style=style)


def _find_best(values: Mapping[str, float], better: str) -> list[str]:
    """The methods with the best value, where there are several methods."""
    if len(values) < 2:
        return []
    cost = {m: -x if better == "higher" else abs(x - 0.95) if better == "closer" else x for m, x in values.items()}
    return [method for method, x in cost.items() if x == min(cost.values())]


def _draw_bars(shares: Mapping[str, float]) -> Markup:
    """Shares by name, the largest first. The small shares of a long list are added up."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    rest = ordered[LAYERS:]
    shown = [*ordered[:LAYERS], *([(f"{len(rest)} others", sum(x for _, x in rest))] if rest else [])]
    top = max((x for _, x in shown), default=0.0) or 1.0
    rows = []
    for name, x in shown:
        bar = h("dd", h("i", style=f"width:{100 * x / top:.1f}%"), class_="bar")
        rows.append(h("div", h("dt", name), bar, h("dd", percent(x), class_="num")))
    return h("dl", rows, class_="bars")


def _list_pairs(values: Mapping[str, Child]) -> Markup:
    """Names and values, one below the other."""
    return h("dl", [h("div", h("dt", name), h("dd", value)) for name, value in values.items()], class_="pairs")


def _tabulate_confusions(told: Classes) -> Markup | None:
    """The eight most frequent confusions of classes; None if all predictions are right."""
    wrong = ~told.right
    if not wrong.any():
        return None
    pairs = np.stack([told.labels[wrong], told.probabilities.argmax(1)[wrong]], 1)
    kinds, times = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-times, kind="stable")[:8]
    sizes = np.bincount(told.labels, minlength=len(told.names))
    rows = [
        [told.names[a], told.names[b], f"{k:,}", percent(k / sizes[a])]
        for (a, b), k in zip(kinds[order], times[order], strict=True)
    ]
    titles = ["true class", "predicted class", "times", "of this class"]
    return h("div", _make_table(titles, rows, right=(2, 3)), class_="narrow")


def _show_plan(found: Plan) -> Markup:
    """How linnet computes with each layer."""
    rows = []
    for line in found.lines[:LAYERS]:
        cost = DASH if line.cost is None else _count(line.cost)
        sizes = f"{line.parameters:,}", f"{line.uses:,}"
        rows.append([line.layer, line.rule, *sizes, line.products, line.gram, cost])
    more = len(found.lines) - LAYERS
    words = (
        f"Jacobian of {count(found.n, 'example')} and {count(found.c, 'output')}: {found.shape[0]:,} by "
        f"{found.shape[1]:,}, {found.note}; chunks of {count(found.chunk, 'example')}, "
        f"{format_bytes(found.per_example)} each."
    )
    titles = ["layer", "rule", "parameters", "uses", "products", "Gram", "cost"]
    return h(
        "div",
        h("p", words),
        _make_table(titles, rows, right=(2, 3, 6), kind="plan"),
        h("p", f"… and {count(more, 'more layer')}.", class_="quiet") if more > 0 else None,
    )


def _show_group(group: Group) -> Markup:
    """Examples beside each other: pictures in a grid, texts in a list, rows in a table."""
    first = group.items[0].shown
    if first.picture or first.text:
        items = [h("li", _show_item(item), class_="wrong" if item.wrong else None) for item in group.items]
        body = h("ul", items, class_="pictures" if first.picture else "texts")
    else:
        body = _tabulate_items(group.items)
    return h("div", h("h3", group.title), h("p", group.note, class_="quiet"), body, class_="gallery")


def _show_item(item: Item) -> Child:
    name = item.shown.name
    said = h("p", [h("span", h("small", title), " ", h("b", value)) for title, value in item.said], class_="said")
    if item.shown.text:
        return [h("blockquote", item.shown.text), said]
    picture = h("img", src=item.shown.picture, alt=name, title=name, width=96)
    return [picture, said, h("small", name, class_="quiet")]


def _tabulate_items(items: Sequence[Item]) -> Markup:
    titles = [title for title, _ in (*items[0].said, *items[0].shown.cells)]
    rows = [
        [
            item.shown.name,
            *(h("b", value, class_="wrong" if item.wrong else None) for _, value in item.said),
            *(value for _, value in item.shown.cells),
        ]
        for item in items
    ]
    return _make_table(["example", *titles], rows, right=range(1, 1 + len(titles)), kind="rows")
