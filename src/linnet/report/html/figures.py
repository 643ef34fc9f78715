"""The figures of a report: plain data in, SVG with a caption out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from linnet import metrics
from linnet.metrics import Z95
from linnet.report.content import Classes, Eigenvalues, Evidence, Linear, Numbers, Points
from linnet.report.formatting import count, number, percent
from linnet.report.html.svg import Child, Markup, Plot, Scale, h, make_scale, make_share_scale


def _make_figure(title: str, plot: Plot, *caption: Child, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """A plot with its headline, the meaning of its colors, and a caption."""
    legend = [h("span", h("i", class_=f"key {kind}"), text) for kind, text in keys]
    legend_line = h("p", legend, class_="legend") if legend else None
    return h("figure", h("h3", title), legend_line, plot.svg(), h("figcaption", *caption))


# Predicted classes.


def draw_reliability(told: Classes) -> Markup:
    """Accuracy against confidence."""
    plot = Plot(
        make_share_scale("confidence: the probability of the predicted class"),
        make_share_scale("how often the predicted class is right"),
        "Reliability diagram: accuracy against confidence.",
    )
    plot.diagonal()
    for p, kind in ((told.before, "before"), (told.probabilities, "after")):
        if p is None:
            continue
        found = metrics.reliability(p, told.labels, bins=10)
        plot.line(found.confidence, found.accuracy, kind)
        for x, y, k in zip(found.confidence, found.accuracy, found.count, strict=True):
            if kind == "after":
                plot.whisker(x, *compute_wilson(y, int(k)), kind)
            title = f"{count(int(k), 'example')}: {percent(y)} right"
            plot.dot(x, y, kind, radius=2.5 + 7 * math.sqrt(k / len(told.labels)), title=title)
    return _make_figure(
        "When it says 80 %, is it right 80 % of the time?",
        plot,
        "On the dashed line the confidence is correct. Below the line the confidence is too high. The area of a dot "
        "shows the number of examples. The vertical lines are 95 % intervals: differences within them can be chance.",
        keys=_make_keys(told),
    )


def draw_rejection(told: Classes) -> Markup:
    """The error among the examples with the highest confidence."""
    curves = {"after": 1 - metrics.kept_accuracy(told.probabilities, told.labels)}
    if told.before is not None:
        curves = {"before": 1 - metrics.kept_accuracy(told.before, told.labels)} | curves
    n = len(told.labels)
    first = min(n - 1, max(0, n // 20 - 1))
    most = max(0.02, *(float(curve[first:].max()) for curve in curves.values()))
    plot = Plot(
        make_share_scale("share of examples that are answered, highest confidence first"),
        make_share_scale("error among these", 0.0, 1.05 * most),
        "Error against the share of examples that are answered.",
    )
    for kind, curve in curves.items():
        keep = np.unique(np.linspace(first, len(curve) - 1, 240).astype(int))
        plot.line((keep + 1) / len(curve), curve[keep], kind)
    half, last = curves["after"][max(0, n // 2 - 1)], curves["after"][-1]
    return _make_figure(
        "Are confident answers right more often?",
        plot,
        f"Of the half of the examples with the highest confidence, {percent(half)} are wrong; of all examples, "
        f"{percent(last)} are wrong. The lower the line starts, the better confidence separates right answers from "
        "wrong answers.",
        keys=_make_keys(told),
    )


def _make_keys(told: Classes) -> list[tuple[str, str]]:
    return [("after", "this model"), *([("before", "the network alone")] if told.before is not None else [])]


def compute_wilson(p: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share p that was seen in n examples.

    >>> [round(x, 3) for x in compute_wilson(1.0, 10)]
    [0.722, 1.0]
    """
    z2 = Z95**2
    center, half = (p + z2 / (2 * n)) / (1 + z2 / n), Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n**2)) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


# Predicted numbers.


def draw_intervals(told: Numbers, j: int) -> Markup:
    """Predictions of number j with their intervals against the true values, for at most 100 examples."""
    order = np.argsort(told.target[:, j], kind="stable")
    keep = order[np.unique(np.linspace(0, len(order) - 1, 100).astype(int))]
    mean, reach, y = told.mean[keep, j], Z95 * told.std[keep, j], told.target[keep, j]
    name = f" of {told.names[j]}" if told.names[j] else ""
    plot = Plot(
        make_scale(y, f"true value{name}"),
        make_scale([*(mean - reach), *(mean + reach), *y], "predicted, with 95 % interval"),
        f"Predicted against true values{name}.",
    )
    plot.diagonal()
    outside = np.abs(y - mean) > reach
    for x, m, r, out in zip(y, mean, reach, outside, strict=True):
        plot.whisker(x, m - r, m + r, "bad" if out else "after")
    for x, m, out in zip(y, mean, outside, strict=True):
        plot.dot(x, m, "bad" if out else "after", radius=2.5)
    n = count(len(order), told.what)
    shown = f"All {n}." if len(keep) == len(order) else f"{len(keep)} of {n}, evenly over the true values."
    return _make_figure(
        f"Predictions{name} and their error bars",
        plot,
        f"{shown} A prediction on the dashed line is exact. {int(outside.sum())} of the {len(keep)} intervals miss the "
        "true value; about one in twenty should.",
        keys=[("after", "the interval holds the true value"), ("bad", "the interval misses the true value")],
    )


def draw_coverage(told: Numbers) -> Markup:
    """The share of true values within intervals of every level."""
    plot = Plot(
        make_share_scale("level of an interval"), make_share_scale("share of true values inside"), "Interval coverage."
    )
    levels = np.arange(1, 20) / 20
    spread = Z95 * np.sqrt(levels * (1 - levels) / len(told.target))
    low, high = np.maximum(0.0, levels - spread), np.minimum(1.0, levels + spread)
    plot.area([0.0, *levels, 1.0], [0.0, *low, 1.0], [0.0, *high, 1.0], "band")
    plot.diagonal()
    seen = [metrics.coverage(told.mean, told.std, told.target, level=float(p)) for p in levels]
    plot.line([0.0, *levels], [0.0, *seen], "after")
    for p, s in zip(levels, seen, strict=True):
        plot.dot(p, s, "after", title=f"{percent(p, 0)} intervals hold {percent(s)}")
    return _make_figure(
        "Do intervals hold enough true values?",
        plot,
        "Below the dashed line error bars are too narrow, above the line they are too wide. In the gray band the "
        "difference can be chance.",
    )


def draw_error_by_std(told: Numbers) -> Markup | None:
    """The error of predictions in groups of increasing standard deviation; None if all are about the same."""
    error, std = np.abs(told.mean - told.target).ravel(), told.std.ravel()
    bins = min(8, len(std) // 8)
    if bins < 3 or std.max() < 1.02 * std.min():
        return None
    parts = np.array_split(np.argsort(std, kind="stable"), bins)
    said = [float(np.sqrt(np.square(std[i]).mean())) for i in parts]
    seen = [float(np.sqrt(np.square(error[i]).mean())) for i in parts]
    # The relative standard error of a root mean square of k numbers is about 1 / sqrt(2 k).
    high = [e * (1 + Z95 / math.sqrt(2 * len(i))) for e, i in zip(seen, parts, strict=True)]
    x = make_scale(said, "standard deviation of the prediction")
    plot = Plot(x, make_scale([*high, *said], "typical error", zero=True), "Error against standard deviation.")
    plot.line([x.low, x.high], [x.low, x.high], "guide")
    plot.line(said, seen, "after")
    for i, s, e, top in zip(parts, said, seen, high, strict=True):
        plot.whisker(s, max(0.0, 2 * e - top), top, "after")
        plot.dot(s, e, "after", radius=4, title=f"{count(len(i), 'prediction')}: {number(e)}")
    return _make_figure(
        "Do wide error bars mean large errors?",
        plot,
        f"Predictions in {bins} groups, from narrow to wide error bars. The errors should grow along the dashed line. "
        "The vertical lines are 95 % intervals: differences within them can be chance.",
    )


# The model.


def draw_linear(found: Linear) -> Markup:
    """The step of the linear model against the step of the network."""
    both = make_scale([*found.step, *found.real], "")
    plot = Plot(
        Scale(both.low, both.high, "change of an output, linear model"),
        Scale(both.low, both.high, "change of the same output, real network"),
        "Changes of the outputs: real network against linear model.",
    )
    plot.diagonal()
    for x, y in zip(found.step, found.real, strict=True):
        plot.dot(x, y, "after faint", radius=2.5)
    caption = "Each point is one output of one example. On the dashed line the network agrees with the linear model."
    return _make_figure("The same step in both models", plot, caption)


def draw_eigenvalues(found: Eigenvalues) -> Markup:
    """Eigenvalues by rank. Directions with a signal-to-noise ratio below 1/1000 are not drawn."""
    values = found.values[found.values > (1e-3 if found.noise else 1e-9 * found.values[0])]
    values = values if len(values) else found.values[:1]
    index = np.unique(np.geomspace(1, len(values), 200).astype(int)) - 1
    low, high = float(values[-1]), float(values[0])
    low, high = (min(low, 0.3), max(high, 3.0)) if found.noise else (low, high)
    title = "signal over noise" if found.noise else "eigenvalue"
    x = Scale(1.0, max(2.0, 1.05 * len(values)), "direction, most important first", log=True)
    plot = Plot(x, Scale(low / 1.6, high * 1.6, title, log=True), "Eigenvalues, largest first.")
    if found.noise:
        plot.level(1.0, "as much noise as signal", above=float(values[-1]) < 1)
    plot.line(index + 1, values[index], "after")
    for i in index[:40]:
        plot.dot(i + 1, values[i], "after", radius=2.5, title=f"{i + 1}: {number(values[i])}")
    if found.noise:
        above, known = int((found.values > 1).sum()), float((found.values / (1 + found.values)).sum())
        caption = (
            f"On {count(found.n, 'training example')}, {above:,} of {len(found.values):,} directions have more signal "
            f"than noise. Together the data determine {number(known)} parameters; the prior determines the rest."
        )
    else:
        rank = float(found.values.sum() ** 2 / np.square(found.values).sum())
        all_of = (
            ""
            if found.explained is None
            else f" {len(found.values):,} directions explain {percent(found.explained[-1])}."
        )
        caption = f"On {count(found.n, 'example')}, the spread is that of {number(rank)} equal directions.{all_of}"
    return _make_figure("Which directions matter", plot, caption)


def draw_evidence(found: Evidence) -> Markup:
    """The log evidence by step of the search."""
    steps = list(range(1, len(found.path) + 1))
    x = Scale(0.5, len(steps) + 0.5, "step of the search", lambda value: f"{value:.0f}" if value % 1 == 0 else "")
    plot = Plot(x, make_scale(found.path, "log evidence"), "Log evidence by step of the search.")
    plot.line(steps, found.path, "after")
    for step, value in zip(steps, found.path, strict=True):
        plot.dot(step, value, "after", title=f"step {step}: {number(value)}")
    return _make_figure(
        "How the prior was chosen",
        plot,
        "The log evidence is the log probability of the training targets before they are seen. The search maximizes "
        "the log evidence, and needs no validation data.",
    )


def draw_points(found: Points) -> Markup:
    """Examples on the first two components; up to ten groups have a color of their own."""
    groups = [] if found.groups is None else sorted(set(found.groups), key=lambda name: (len(name), name))
    colored = 1 < len(groups) <= 10
    plot = Plot(
        make_scale(found.xy[:, 0], "first component"),
        make_scale(found.xy[:, 1], "second component"),
        "Examples on two components.",
    )
    for i, (x, y) in enumerate(found.xy):
        label = "" if found.groups is None else found.groups[i]
        plot.dot(x, y, f"group{groups.index(label)}" if colored else "after faint", radius=2.5, title=label)
    return _make_figure(
        "Where the examples lie",
        plot,
        f"{count(len(found.xy), 'example')} on the two most important directions.",
        keys=[(f"group{i}", name) for i, name in enumerate(groups)] if colored else [],
    )
