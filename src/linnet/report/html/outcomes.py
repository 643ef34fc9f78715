"""The figures of predictions: what is said against what is so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linnet import metrics
from linnet.metrics import Z95
from linnet.report.content import Classes, Numbers
from linnet.report.formatting import count, number, percent
from linnet.report.html.figures import figure
from linnet.report.html.markup import Markup
from linnet.report.html.svg import Plot, around, share

BINS = 10
POINTS = 100
"""Most points of a scatter plot with error bars."""
LEVELS = np.arange(1, 20) / 20


# Classes.


def reliability(told: Classes) -> Markup:
    """Accuracy against confidence."""
    plot = Plot(
        share("confidence: the probability it gives its own answer"), share("how often that answer is right"), ""
    )
    plot.label = "Reliability diagram: accuracy against confidence."
    plot.diagonal()
    n = len(told.labels)
    if told.before is not None:
        old = metrics.reliability(told.before, told.labels, bins=BINS)
        plot.line(old.confidence, old.accuracy, "before")
        for x, y, k in zip(old.confidence, old.accuracy, old.count, strict=True):
            plot.dot(x, y, "before", radius=_radius(k, n), title=f"{count(int(k), 'example')}: {percent(y)} right")
    new = metrics.reliability(told.probabilities, told.labels, bins=BINS)
    plot.line(new.confidence, new.accuracy, "after")
    for x, y, k in zip(new.confidence, new.accuracy, new.count, strict=True):
        plot.whisker(x, *wilson(y, int(k)), "after")
        plot.dot(x, y, "after", radius=_radius(k, n), title=f"{count(int(k), 'example')}: {percent(y)} right")
    return figure(
        "When it says 80 %, is it right 80 % of the time?",
        plot.svg(),
        "On the dashed line confidence means what it says; below it, it claims too much. Areas are numbers of "
        "examples, and the upright lines are what chance alone leaves open (95 %).",
        keys=_keys(told),
    )


def rejection(told: Classes) -> Markup:
    """The error among those that it is surest of."""
    curves = {"after": 1 - metrics.kept_accuracy(told.probabilities, told.labels)}
    if told.before is not None:
        curves = {"before": 1 - metrics.kept_accuracy(told.before, told.labels)} | curves
    first = min(len(told.labels) - 1, max(0, len(told.labels) // 20 - 1))
    most = max(0.02, *(float(curve[first:].max()) for curve in curves.values()))
    plot = Plot(share("share of examples it answers, surest first"), share("error among these", 0.0, 1.05 * most), "")
    plot.label = "Error against the share of examples that are answered."
    for kind, curve in curves.items():
        keep = np.unique(np.linspace(first, len(curve) - 1, 240).astype(int))
        plot.line((keep + 1) / len(curve), curve[keep], kind)
    half = curves["after"][max(0, len(told.labels) // 2 - 1)]
    return figure(
        "Does it know when it does not know?",
        plot.svg(),
        f"If only the surer half of the examples is answered, {percent(half)} of these answers are wrong; of all "
        f"answers it is {percent(curves['after'][-1])}. The lower the line starts, the better confidence tells right "
        "from wrong.",
        keys=_keys(told),
    )


def _keys(told: Any) -> list[tuple[str, str]]:
    return [("after", "this model"), *([("before", "the network alone")] if told.before is not None else [])]


def _radius(k: float, n: int) -> float:
    return 2.5 + 7 * math.sqrt(k / n)


def wilson(p: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share p seen in n examples.

    >>> [round(x, 3) for x in wilson(1.0, 10)]
    [0.722, 1.0]
    """
    z2 = Z95**2
    center, half = (p + z2 / (2 * n)) / (1 + z2 / n), Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n**2)) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


# Numbers.


def predicted(told: Numbers, j: int) -> Markup:
    """Predictions with their intervals against the truth, for one of the numbers."""
    order = np.argsort(told.target[:, j], kind="stable")
    keep = order[np.unique(np.linspace(0, len(order) - 1, POINTS).astype(int))]
    mean, reach, y = told.mean[keep, j], Z95 * told.std[keep, j], told.target[keep, j]
    name = f" of {told.names[j]}" if told.names[j] else ""
    plot = Plot(
        around(y, f"true value{name}"),
        around([*(mean - reach), *(mean + reach), *y], "predicted, with 95 % interval"),
        "",
    )
    plot.label = f"Predicted against true values{name}."
    plot.diagonal()
    outside = np.abs(y - mean) > reach
    for x, m, r, out in zip(y, mean, reach, outside, strict=True):
        plot.whisker(x, m - r, m + r, "bad" if out else "after")
    for x, m, out in zip(y, mean, outside, strict=True):
        plot.dot(x, m, "bad" if out else "after", radius=2.5)
    n = count(len(order), told.what)
    shown = f"All {n}." if len(keep) == len(order) else f"{len(keep)} of {n}, evenly over the true values."
    return figure(
        f"Predictions{name} and their error bars",
        plot.svg(),
        f"{shown} A prediction on the dashed line is exact; "
        f"{int(outside.sum())} of the {len(keep)} intervals drawn miss it, and about one in twenty is meant to.",
        keys=[("after", "interval holds the true value"), ("bad", "interval misses it")],
    )


def coverage(told: Numbers) -> Markup:
    """How many targets lie within intervals of every level."""
    plot = Plot(share("what an interval promises"), share("how many true values it holds"), "Coverage of intervals.")
    n = len(told.target)
    spread = [Z95 * math.sqrt(p * (1 - p) / n) for p in LEVELS]
    low = [max(0.0, p - s) for p, s in zip(LEVELS, spread, strict=True)]
    high = [min(1.0, p + s) for p, s in zip(LEVELS, spread, strict=True)]
    plot.area([0.0, *LEVELS, 1.0], [0.0, *low, 1.0], [0.0, *high, 1.0], "band")
    plot.diagonal()
    seen = [metrics.coverage(told.mean, told.std, told.target, level=float(p)) for p in LEVELS]
    plot.line([0.0, *LEVELS], [0.0, *seen], "after")
    for p, s in zip(LEVELS, seen, strict=True):
        plot.dot(p, s, "after", title=f"{percent(p, 0)} intervals hold {percent(s)}")
    return figure(
        "Do intervals hold what they promise?",
        plot.svg(),
        "Below the dashed line error bars are too narrow, above it too wide. In the gray band the difference may be "
        "chance.",
    )


def error_by_std(told: Numbers) -> Markup | None:
    """The error of the surest predictions, of the next, and so on; None where all are about as sure."""
    error, std = np.abs(told.mean - told.target).ravel(), told.std.ravel()
    bins = min(8, len(std) // 8)
    if bins < 3 or std.max() < 1.02 * std.min():
        return None
    parts = np.array_split(np.argsort(std, kind="stable"), bins)
    said = [float(np.sqrt(np.square(std[i]).mean())) for i in parts]
    seen = [float(np.sqrt(np.square(error[i]).mean())) for i in parts]
    # The relative standard error of a root mean square of k numbers is about 1 / sqrt(2 k).
    high = [e * (1 + Z95 / math.sqrt(2 * len(i))) for e, i in zip(seen, parts, strict=True)]
    x, y = around(said, "standard deviation it states"), around([*high, *said], "typical error it makes", zero=True)
    plot = Plot(x, y, "Error against stated standard deviation.")
    plot.line([x.low, x.high], [x.low, x.high], "guide")
    plot.line(said, seen, "after")
    for i, s, e, top in zip(parts, said, seen, high, strict=True):
        plot.whisker(s, max(0.0, 2 * e - top), top, "after")
        plot.dot(s, e, "after", radius=4, title=f"{count(len(i), 'prediction')}: {number(e)}")
    return figure(
        "Does it know when it does not know?",
        plot.svg(),
        f"Predictions from the surest to the least sure, in {bins} groups. Errors should grow along the dashed "
        "line; the upright lines are what chance alone leaves open (95 %).",
    )
