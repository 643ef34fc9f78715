"""The sections of a report, one function for each; what is left out says why in its place."""

from __future__ import annotations

import numpy as np

from linnet.report.content import Classes, Linear, Missing, Numbers, Points, Report
from linnet.report.formatting import MINUS, count, distance, meaning, nats, number, percent
from linnet.report.html import figures, outcomes, tables
from linnet.report.html.markup import Child, Markup, h
from linnet.report.verdicts import checks

SIGNS = {"good": "✓", "fair": "~", "bad": "✕", "open": "?"}
PATH = 4
"""Steps of a search that make a figure; fewer are said in a line."""

TARGETS = 4
"""Numbers whose predictions are drawn."""

TILES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "coverage", "nll")}


def _section(name: str, title: str, *body: Child, intro: Child = None) -> Markup:
    return h("section", h("h2", title), h("p", intro, class_="intro") if intro else None, *body, id=name)


def _left_out(what: str, missing: Missing) -> Markup:
    return h("p", h("b", f"{what}: left out."), " ", missing.why, class_="missing")


def regression(report: Report) -> bool:
    """Whether numbers are predicted."""
    return isinstance(report.outcome, Numbers)


# The first screen.


def header(report: Report) -> Markup:
    """What was done, how good it is, and whether it can be trusted."""
    return h(
        "header",
        h("p", report.kind, class_="kicker"),
        h("h1", report.title),
        h("p", report.lede, class_="lede"),
        _tiles(report),
        _trust(report),
    )


def _tiles(report: Report) -> Markup | None:
    found: list[Markup] = []
    if report.scores and not isinstance(report.scores, Missing):
        methods = list(report.scores)
        last, first = report.scores[methods[-1]], report.scores[methods[0]]
        numbers = regression(report)
        for name in TILES["regression" if numbers else "classification"]:
            if name not in last:
                continue
            told = meaning(name, regression=numbers)
            before = f"{methods[0]}: {told.value(first[name])}" if len(methods) > 1 and name in first else ""
            found.append(_tile(told.title, told.value(last[name]), before or told.short or told.words))
    facts, room = list(report.facts.items()), 4 - len(found)
    for i, (title, value) in enumerate(facts[:room]):
        follows = room == 1 and i + 1 < len(facts)
        found.append(_tile(title, value, "{}: {}".format(*facts[i + 1]) if follows else ""))
    return h("div", found, class_="tiles") if found else None


def _tile(title: str, value: str, note: str) -> Markup:
    return h("div", h("p", title, class_="name"), h("p", value, class_="value"), h("p", note, class_="quiet"))


def _trust(report: Report) -> Markup | None:
    found = checks(report)
    if not found:
        return None
    items = [
        h(
            "li",
            h("span", SIGNS[check.state], class_="sign", aria_hidden="true"),
            h(
                "div",
                h("p", h("span", check.question, class_="question"), " ", h("b", check.answer)),
                h("p", check.why),
            ),
            class_=check.state,
        )
        for check in found
    ]
    return h("div", h("h2", "Can I trust it?"), h("ul", items, class_="checks"), class_="trust", id="trust")


# The sections.


def quality(report: Report) -> Markup | None:
    """Metrics, and whether confidence means what it says."""
    if report.scores is None:
        return None
    if isinstance(report.scores, Missing):
        return _section("quality", "How good it is", _left_out("Metrics and calibration", report.scores))
    body: list[Child] = [tables.scores(report.scores, regression=regression(report))]
    told = report.outcome
    if isinstance(told, Missing):
        body.append(_left_out("Calibration", told))
    elif isinstance(told, Classes):
        body.append(h("div", outcomes.reliability(told), outcomes.rejection(told), class_="figures"))
        found = tables.confusions(told)
        body.append(h("h3", "What is taken for what"))
        body.append(h("p", "Every example gets its own class.", class_="quiet") if found is None else found)
    elif isinstance(told, Numbers):
        body.append(_numbers(told))
    tested = getattr(told, "what", "test example") == "test example"
    intro = "There is no test data: each training example is predicted from all others, in closed form."
    return _section("quality", "How good it is", *body, intro=None if tested else intro)


def _numbers(told: Numbers) -> Child:
    drawn = [outcomes.predicted(told, j) for j in range(min(TARGETS, len(told.names)))]
    by_std = outcomes.error_by_std(told)
    same = _left_out(
        "Errors against stated error bars",
        Missing("All error bars are about as wide, or there are fewer than 24 predictions to group by them."),
    )
    more = len(told.names) - TARGETS
    return [
        h("div", drawn, outcomes.coverage(told), by_std, class_="figures"),
        same if by_std is None else None,
        h("p", f"{more} more targets are in predictions.csv.", class_="quiet") if more > 0 else None,
    ]


def linear(report: Report) -> Markup | None:
    """The linear model against the network itself."""
    found = report.linear
    if found is None:
        return None
    title = "The linear model and the real network"
    if isinstance(found, Missing):
        return _section("linear", title, _left_out("The comparison", found))
    facts: dict[str, Child] = {
        "apart": distance(found.error),
        "compared on": count(found.n, found.what),
    }
    if found.agreement is not None:
        facts["same class"] = f"{percent(found.agreement)} of these"
    body: list[Child] = [tables.pairs(facts)]
    if found.scores:
        body += [
            h("h3", "On these examples"),
            tables.scores(found.scores, regression=regression(report), explained=False),
        ]
    words = h("div", h("p", _linear_words(found)), *body)
    return _section("linear", title, h("div", words, figures.linear(found), class_="figures"))


def _linear_words(found: Linear) -> str:
    network = "f(x; θ₀) + " if found.whole else ""
    model = f"linnet predicts with the linear model {network}J(x)(θ {MINUS} θ₀), which has an exact answer. "
    if found.drawn:
        return (
            f"{model}Its error bars come from weights θ around the trained ones. Here {found.drawn} such weights were "
            "drawn, and the network was run with each. Where the two agree, the error bars are the network's too."
        )
    if not found.whole:
        return (
            f"{model}Here the network itself was run with the adapted weights θ, and its change is compared with the "
            "linear one. The model is the change alone, so that the network with these weights is another one."
        )
    return (
        f"{model}Here the network itself was run with the adapted weights θ. Where the two agree, you may write the "
        "weights into the network (apply()) and ship that; where they do not, ship this model."
    )


def examples(report: Report) -> Markup | None:
    """The surest, the least sure, and those that predictions rest on."""
    if report.examples is None and report.influence is None:
        return None
    body: list[Child] = []
    if isinstance(report.examples, Missing):
        body.append(_left_out("Most and least certain examples", report.examples))
    else:
        body += [tables.gallery(group) for group in report.examples or () if group.items]
    if isinstance(report.influence, Missing):
        body.append(_left_out("Most influential training examples", report.influence))
    elif report.influence is not None and report.influence.items:
        body.append(tables.gallery(report.influence))
    return _section("examples", "Examples", *body)


def inside(report: Report) -> Markup | None:
    """What the data determine: spectrum, layers, evidence."""
    drawn: list[Child] = []
    left: list[Child] = []
    if isinstance(report.outcome, Points):
        drawn.append(figures.points(report.outcome))
    if isinstance(report.spectrum, Missing):
        left.append(_left_out("Spectrum", report.spectrum))
    elif report.spectrum is not None and np.any(report.spectrum.values > 0):
        drawn.append(figures.spectrum(report.spectrum))
    if isinstance(report.relevance, Missing):
        left.append(_left_out("Layer relevance", report.relevance))
    elif report.relevance is not None:
        caption = "Each layer's share in what the data made the network change."
        drawn.append(
            h("figure", h("h3", "Which layers adapt"), tables.bars(report.relevance), h("figcaption", caption))
        )
    if isinstance(report.evidence, Missing):
        left.append(_left_out("Evidence path", report.evidence))
    elif report.evidence is not None:
        found = report.evidence
        if len(found.path) >= PATH:
            drawn.append(figures.evidence(found))
        if found.blocks:
            caption = "One block more at a time adapts, from the top, while the log evidence rises."
            rows = tables.blocks(found.blocks, found.chosen)
            drawn.append(h("figure", h("h3", "How many blocks adapt"), rows, h("figcaption", caption)))
        facts: dict[str, Child] = {} if found.value is None else {"log evidence": nats(found.value)}
        if 1 < len(found.path) < PATH:
            facts["log evidence by step"] = ", ".join(nats(value) for value in found.path)
        facts |= {f"prior scale, {name}": number(value) for name, value in list(found.scales.items())[: tables.LAYERS]}
        left.append(tables.pairs(facts) if facts else None)
    if not drawn and not left:
        return None
    title = "What the embedding sees" if isinstance(report.outcome, Points) else "What it has learned"
    return _section("inside", title, h("div", drawn, class_="figures") if drawn else None, left)


def record(report: Report) -> Markup:
    """How to make it again."""
    kept = dict(report.record)
    command, versions = kept.pop("command", None), kept.pop("versions", {})
    facts: dict[str, Child] = dict(report.facts)
    facts |= {name: str(value) for name, value in kept.items() if value is not None}
    if versions:
        facts["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    if report.files:
        facts["files beside this one"] = ", ".join(report.files)
    plan: Child = None
    if isinstance(report.plan, Missing):
        plan = _left_out("Plan", report.plan)
    elif report.plan is not None:
        plan = [h("h3", "Plan"), tables.plan(report.plan)]
    lines = [h("h3", "The command"), h("pre", h("code", command))] if command else None
    return _section("record", "How it was made", lines, tables.pairs(facts) if facts else None, plan)
