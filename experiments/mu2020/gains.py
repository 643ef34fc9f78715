"""How adapted networks compare over draws of labels: what is kept of each, intervals, tables and the figure."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments import common
from experiments.common import plots, statistics
from experiments.common.statistics import interval, show_interval
from experiments.mu2020.contest import ERRORS, EVERYTHING, GRADIENTS, LINEAR, METHODS, SAME
from linnet.metrics import Z95

SCORES, TIMES = ("accuracy", "nll", "ece"), ("seconds", "predicting")
COLORS = {
    LINEAR: plots.GRAY,
    GRADIENTS: plots.BLUE,
    f"{GRADIENTS}, vi": plots.SKY,
    f"{GRADIENTS}, laplace": plots.PURPLE,
    f"{GRADIENTS}, ntk": plots.GREEN,
    SAME: plots.ORANGE,
    EVERYTHING: plots.VERMILION,
}


def pair_with_linear(runs: Sequence[Mapping[str, Any]], name: str, key: str, *, size: int) -> dict[str, float]:
    """A contender less the linear one on the same draw, over draws and data sets.

    Draws that take every label there is differ in their order alone. The interval is then one over test examples, where
    a run knows it.
    """
    rows = [run for run in runs if run["labels"] == size and name in run["contenders"]]
    found = interval([run["contenders"][name][key] - run["contenders"][LINEAR][key] for run in rows])
    known = [run["contenders"][name].get(ERRORS, {}) for run in rows if run.get("every label")]
    squares = [one[key] ** 2 for one in known if key in one]
    if not squares:
        return found
    half = Z95 * math.sqrt(sum(squares) / len(squares))
    return {**found, "low": found["mean"] - half, "high": found["mean"] + half, "over test examples": True}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By set, number of labels and contender: means with standard errors, of times on the machine of most runs."""
    out: dict[str, Any] = {}
    for run in runs:
        table = out.setdefault(run["set"], {}).setdefault(run["labels"], {})
        for name in run["contenders"]:
            table.setdefault(name, []).append((run.get("machine"), run["contenders"][name]))
    for tables in out.values():
        for table in tables.values():
            for name, rows in table.items():
                most = Counter(machine for machine, _ in rows).most_common(1)[0][0]
                there = [row for machine, row in rows if machine == most]
                table[name] = {key: statistics.average([row[key] for _, row in rows]) for key in SCORES}
                table[name] |= {key: statistics.average([row[key] for row in there]) for key in TIMES}
    return out


def differences(runs: Sequence[Mapping[str, Any]], key: str) -> dict[int, dict[str, dict[str, float]]]:
    """By number of labels and contender, the paired difference to the linear one over draws and data sets."""
    out: dict[int, dict[str, dict[str, float]]] = {}
    for size in sorted({run["labels"] for run in runs}):
        seen = [run for run in runs if run["labels"] == size]
        names = [name for name in dict.fromkeys(name for run in seen for name in run["contenders"]) if name != LINEAR]
        out[size] = {name: pair_with_linear(runs, name, key, size=size) for name in names}
    return out


def adapting(count: int, what: str) -> str:
    """How much of a network adapts, in words.

    >>> adapting(1, "block"), adapting(2, "layer")
    ('1 block adapts', '2 layers adapt')
    """
    return f"1 {what} adapts" if count == 1 else f"{count} {what}s adapt"


# What is kept: by setting, its "settings" and its "runs", one for each set, draw and number of labels.

Run = Mapping[str, Any]


def keep(options: argparse.Namespace, where: str, how: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Print a run and put it beside those that are kept; returns all parts.

    Args:
        options: Of the command.
        where: The setting in words.
        how: What all runs of the setting have in common.
        run: "set", "seed", "labels" and "contenders", their scores by name.
    """
    key = f"{run['set']}, draw {run['seed']}, {run['labels']} labels"
    print(f"{key}:", {name: f"{100 * one['accuracy']:.1f} %" for name, one in run["contenders"].items()}, flush=True)
    return common.keep(options, {where: {"settings": how, "runs": {key: run}}})


def draws(runs: Sequence[Run]) -> int:
    return len({run["seed"] for run in runs})


def machines(how: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Where runs were made: each says so, or else what they have in common does."""
    return ", ".join(sorted({run.get("machine") or how["machine"] for run in runs}))


def by_labels(parts: Mapping[str, Any]) -> list[str]:
    """The settings, that with the most labels first, then by name: whichever was measured last.

    >>> few, many = {"runs": {"draw 0": {"labels": 5}}}, {"runs": {"draw 0": {"labels": 9}}}
    >>> by_labels({"c": few, "b": many, "a": few})
    ['b', 'a', 'c']
    """
    return sorted(parts, key=lambda where: (-max(run["labels"] for run in parts[where]["runs"].values()), where))


def of_parts(
    parts: Mapping[str, Any],
    now: str,
    *,
    said: Mapping[str, str],
    differs: Callable[[Mapping[str, Any], Sequence[Run], Mapping[str, float]], str],
    command: str,
) -> common.Outcome:
    """Tables and rows of all settings that are kept, the numbers and the figure of the one with the most labels.

    Args:
        parts: All settings with their runs.
        now: The setting of the command, whose tables are printed last.
        said: Contenders of the table of results, and what the paper says of them.
        differs: From the settings, the runs of a contender with one number of labels and what it gains, what differs
            from the paper.
        command: That makes all of them.
    """
    if now not in parts:
        raise ValueError(f"No runs are kept of {now!r}, so there is nothing to show; there are {sorted(parts)}.")
    found = {}
    for where in sorted(parts, key=lambda where: where == now):
        part = parts[where]
        runs = sorted(part["runs"].values(), key=lambda run: (run["set"], run["labels"], run["seed"]))
        settings = {"draws": draws(runs), **part["settings"]}
        found[where] = outcome(runs, settings, title=where, said=said, differs=partial(differs, part["settings"]))
    order = by_labels(parts)
    first = found[order[0]]
    metrics = {key: value for key, value in first.metrics.items() if key != "runs"} | {"parts": parts}
    all_runs = [run for part in parts.values() for run in part["runs"].values()]
    spent = sum(one["seconds"] + one["predicting"] for run in all_runs for one in run["contenders"].values())
    rows = [row for where in order for row in found[where].rows]
    renewed = partial(of_parts, now=now, said=said, differs=differs, command=command)
    return common.Outcome(metrics, first.figure, rows, command, common.duration(spent), renewed)


def outcome(
    runs: Sequence[Run],
    settings: Mapping[str, Any],
    *,
    title: str,
    said: Mapping[str, str],
    differs: Callable[[Sequence[Run], Mapping[str, float]], str],
) -> common.Outcome:
    """Tables, figure and rows of runs.

    Args:
        runs: One for each set, draw and number of labels.
        settings: Of the experiment.
        title: Of the figure.
        said: Contenders of the table of results, and what the paper says of them.
        differs: From the runs of a contender with one number of labels and what it gains, what differs from the paper.
    """
    tables = summary(runs)
    gains = {key: differences(runs, key) for key in ("accuracy", "nll", "ece")}
    rows = []
    for n, table in gains["accuracy"].items():
        for name in [name for name in table if name in said]:
            ours = f"{show_interval(table[name], factor=100)}, {show_interval(gains['nll'][n][name], digits=3)}"
            what = f"{n:,} labels, {name} less linear: accuracy in points, NLL"
            seen = [run for run in runs if run["labels"] == n and name in run["contenders"]]
            rows.append(common.Row(what, said[name], ours, differs(seen, table[name])))
    metrics = {
        "settings": settings,
        "seconds of contenders": "of fitting above the frozen layers, the head's included; of the processor on a CPU",
        "methods": {name: text for name, text in METHODS.items() if any(name in run["contenders"] for run in runs)},
        "results": tables,
        "less the linear one": gains,
        "accuracy less the linear one, by set": {
            name: differences([run for run in runs if run["set"] == name], "accuracy") for name in tables
        },
        "runs": runs,
    }
    several = len({run.get("machine") for run in runs}) > 1
    return common.Outcome(metrics, figure(tables, gains["accuracy"], title, several=several), rows)


# The figure.


def figure(tables: Mapping[str, Any], accuracy: Mapping[int, Any], title: str, *, several: bool) -> Figure:
    """Accuracy and NLL against labels for each set; the paired gains; what it takes, on one machine or several."""
    sets: Sequence[str] = list(tables)
    picture = Figure(figsize=(3.6 * (len(sets) + 1), 6.6))
    axes = picture.subplots(2, len(sets) + 1, squeeze=False)
    for column, set_ in enumerate(sets):
        for row, (key, factor, label) in enumerate((("accuracy", 100, "accuracy, %"), ("nll", 1, "NLL"))):
            draw_curves(axes[row, column], tables[set_], key, factor)
            axes[row, column].set(xlabel="labels", ylabel=label, title=set_)
    draw_gains(axes[0, -1], accuracy)
    draw_curves(axes[1, -1], tables[sets[0]], "seconds", 1)
    where = f"{sets[0]}, not all on one machine" if several else sets[0]
    axes[1, -1].set(xlabel="labels", ylabel="seconds to fit", title=where, yscale="log")
    axes[1, -1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    picture.suptitle(title, fontsize=11)
    plots.legend_below(picture, axes[0, 0], 2 + len(sets), fontsize=8)
    return picture


def draw_curves(ax: Any, table: Mapping[int, Any], key: str, factor: float) -> None:
    """One curve for each contender, a little apart from each other, with standard errors."""
    for i, (name, color) in enumerate(COLORS.items()):
        values = {n * 1.03 ** (i - len(COLORS) / 2): table[n][name][key] for n in table if name in table[n]}
        if values:
            how = {"color": color, "lw": 1.5, "capsize": 2, "label": name}
            plots.draw_means(ax, list(values), list(values.values()), factor=factor, **how)
    plots.log_ticks(ax, list(table))


def draw_gains(ax: Any, gains: Mapping[int, Any]) -> None:
    """Differences of accuracy to the linear contender with 95 % intervals, in a group for each number of labels."""
    at, middles = 0.0, []
    for i, table in enumerate(gains.values()):
        first = at
        for name in [name for name in COLORS if name in table]:
            plots.draw_means(ax, [-at], [table[name]], factor=100, across=True, color=COLORS[name], capsize=2)
            at += 1
        if i % 2:  # tells the groups apart
            ax.axhspan(0.1 - at, 0.9 - first, color=plots.GRAY, alpha=0.1, lw=0)
        middles.append(-(first + at - 1) / 2)
        at += 0.8
    ax.axvline(0, color=plots.GRAY, lw=1)
    ax.set_yticks(middles, [f"{n:,}" for n in gains])
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="accuracy less linear, points (95 %)", ylabel="labels", title="paired over draws and sets")
