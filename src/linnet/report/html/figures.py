"""The figures of a report but for those of predictions: plain data in, SVG with a caption out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linnet.report.content import Evidence, Linear, Points, Spectrum
from linnet.report.formatting import count, number, percent
from linnet.report.html.markup import Child, Markup, h
from linnet.report.html.svg import Plot, Scale, around

FAINT = 1e-3
"""Signal over noise below which directions are not drawn: the data say next to nothing about them."""

COLORS = 10
"""Groups that have a color of their own."""


def figure(title: str, plot: Markup, *caption: Child, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """A plot with its headline, what its colors mean, and what to see in it."""
    legend = [h("span", h("i", class_=f"key {kind}"), text) for kind, text in keys]
    return h(
        "figure",
        h("h3", title),
        h("p", legend, class_="legend") if legend else None,
        plot,
        h("figcaption", *caption),
    )


def linear(found: Linear) -> Markup:
    """The step of the linear model against that of the network."""
    both = around([*found.step, *found.real], "")
    plot = Plot(
        Scale(both.low, both.high, "change of an output, linear model"),
        Scale(both.low, both.high, "change of the same output, real network"),
        "Changes of the outputs: real network against linear model.",
    )
    plot.diagonal()
    for x, y in zip(found.step, found.real, strict=True):
        plot.dot(x, y, "after faint", radius=2.5)
    return figure(
        "The same step in both models",
        plot.svg(),
        "Each point is one output of one example. On the dashed line the network does what the linear model says "
        "it does.",
    )


def spectrum(found: Spectrum) -> Markup:
    """Eigenvalues by rank."""
    values = found.values[found.values > (FAINT if found.noise else 1e-9 * found.values[0])]
    values = values if len(values) else found.values[:1]
    index = np.unique(np.geomspace(1, len(values), 200).astype(int)) - 1
    low, high = float(values[-1]), float(values[0])
    low, high = (min(low, 0.3), max(high, 3.0)) if found.noise else (low, high)
    title = "signal over noise" if found.noise else "eigenvalue"
    x = Scale(1.0, max(2.0, 1.05 * len(values)), "direction, most important first", log=True)
    plot = Plot(x, Scale(low / 1.6, high * 1.6, title, log=True), "Eigenvalues, largest first.")
    if found.noise:
        plot.level(1.0, "as much noise as signal")
    plot.line(index + 1, values[index], "after")
    for i in index[:40]:
        plot.dot(i + 1, values[i], "after", radius=2.5, title=f"{i + 1}: {number(values[i])}")
    return figure("Which directions matter", plot.svg(), _spectrum_words(found))


def _spectrum_words(found: Spectrum) -> str:
    if found.noise:
        above, known = int((found.values > 1).sum()), float((found.values / (1 + found.values)).sum())
        return (
            f"On {count(found.n, 'training example')}, {above:,} of {len(found.values):,} directions have more signal "
            f"than noise; together the data settle as much as {number(known)} parameters, and the prior the rest."
        )
    rank = float(found.values.sum() ** 2 / np.square(found.values).sum())
    so_far = "" if found.explained is None else f" and {len(found.values):,} explain {percent(found.explained[-1])}"
    return f"On {count(found.n, 'example')}: as spread out as {number(rank)} equal directions{so_far}."


def evidence(found: Evidence) -> Markup:
    """The log evidence step by step."""
    steps = list(range(1, len(found.path) + 1))
    x = Scale(0.5, len(steps) + 0.5, "step of the search", lambda value: f"{value:.0f}" if value % 1 == 0 else "")
    plot = Plot(x, around(found.path, "log evidence"), "Log evidence by step of the search.")
    plot.line(steps, found.path, "after")
    for step, value in zip(steps, found.path, strict=True):
        plot.dot(step, value, "after", title=f"step {step}: {number(value)}")
    return figure(
        "How the prior was chosen",
        plot.svg(),
        "The log evidence is how probable the training targets are before they are seen. The search makes it as large "
        "as it can be; no validation data is needed.",
    )


def points(found: Points) -> Markup:
    """Examples on the first two components."""
    groups = [] if found.groups is None else sorted(set(found.groups), key=lambda name: (len(name), name))
    colored = 1 < len(groups) <= COLORS
    plot = Plot(
        around(found.xy[:, 0], "first component"),
        around(found.xy[:, 1], "second component"),
        "Examples on two components.",
    )
    for i, (x, y) in enumerate(found.xy):
        label = "" if found.groups is None else found.groups[i]
        plot.dot(x, y, f"group{groups.index(label)}" if colored else "after faint", radius=2.5, title=label)
    return figure(
        "Where the examples lie",
        plot.svg(),
        f"{count(len(found.xy), 'example')} on the two directions that matter most.",
        keys=[(f"group{i}", name) for i, name in enumerate(groups)] if colored else [],
    )
