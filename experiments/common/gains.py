"""How adapted networks compare over draws of labels: what is kept of each, intervals, tables and the figure."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from scipy.stats import t as student

from experiments import common
from experiments.common.adaptation import ERRORS, EVERYTHING, GRADIENTS, LINEAR, METHODS, SAME
from linnet.metrics import Z95

SCORES, TIMES = ("accuracy", "nll", "ece"), ("seconds", "predicting")
COLORS = {
    LINEAR: common.GRAY,
    GRADIENTS: common.BLUE,
    f"{GRADIENTS}, vi": common.SKY,
    f"{GRADIENTS}, laplace": common.PURPLE,
    f"{GRADIENTS}, ntk": common.GREEN,
    SAME: common.ORANGE,
    EVERYTHING: common.VERMILION,
}


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and a 95 % interval of it by Student's t; NaN bounds for one value.

    >>> {key: round(value, 3) for key, value in interval([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.484, 'high': 4.484, 'count': 3}
    """
    x = torch.tensor(list(values), dtype=torch.float64)
    half = math.nan if len(x) < 2 else float(student.ppf(0.975, len(x) - 1) * x.std() / math.sqrt(len(x)))
    mean = float(x.mean())
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(x)}


def paired(runs: Sequence[Mapping[str, Any]], name: str, key: str, *, size: int) -> dict[str, float]:
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
                table[name] = {key: common.spread([row[key] for _, row in rows]) for key in SCORES}
                table[name] |= {key: common.spread([row[key] for row in there]) for key in TIMES}
    return out


def differences(runs: Sequence[Mapping[str, Any]], key: str) -> dict[int, dict[str, dict[str, float]]]:
    """By number of labels and contender, the paired difference to the linear one over draws and data sets."""
    out: dict[int, dict[str, dict[str, float]]] = {}
    for size in sorted({run["labels"] for run in runs}):
        seen = [run for run in runs if run["labels"] == size]
        names = [name for name in dict.fromkeys(name for run in seen for name in run["contenders"]) if name != LINEAR]
        out[size] = {name: paired(runs, name, key, size=size) for name in names}
    return out


def adapting(count: int, what: str) -> str:
    """How much of a network adapts, in words.

    >>> adapting(1, "block"), adapting(2, "layer")
    ('1 block adapts', '2 layers adapt')
    """
    return f"1 {what} adapts" if count == 1 else f"{count} {what}s adapt"


def verdict(gain: Mapping[str, float]) -> str:
    """What an interval of differences of accuracy says in a word."""
    if math.isnan(gain["low"]):
        return "one draw"
    return "gains" if gain["low"] > 0 else "loses" if gain["high"] < 0 else "no difference shown"


def print_tables(tables: Mapping[str, Any]) -> None:
    for set_, sizes in tables.items():
        for size, table in sizes.items():
            print(
                f"\n{set_}, {size:,} labels{'':20} accuracy, %    NLL             ECE             seconds  predicting"
            )
            for name, one in table.items():
                accuracy = {key: 100 * value for key, value in one["accuracy"].items()}
                print(
                    f"  {name:40s} {common.show(accuracy, 1):>13s} {common.show(one['nll'], 3):>15s} "
                    f"{common.show(one['ece'], 3):>15s} {one['seconds']['mean']:8.1f} {one['predicting']['mean']:8.1f}"
                )


def print_run(run: Mapping[str, Any]) -> None:
    """One line: the accuracy of each contender, with the rate and the epochs that fine-tuning chose."""
    parts = []
    for name, one in run["contenders"].items():
        chosen = f" ({one['epochs']} x {one['rate']:g})" if "rate" in one else ""
        parts.append(f"{name} {100 * one['accuracy']:.1f}{chosen}")
    print(f"{run['set']}, draw {run['seed']}, {run['labels']:,} labels: {'; '.join(parts)}", flush=True)


def shown(gain: Mapping[str, float], *, factor: float = 1.0, digits: int = 1) -> str:
    """`+5.1 (3.9 to 6.3)`, or the mean alone where one draw has no interval."""
    text = f"{factor * gain['mean']:+.{digits}f}"
    if math.isnan(gain["low"]):
        return text
    return f"{text} ({factor * gain['low']:+.{digits}f} to {factor * gain['high']:+.{digits}f})"


def plain(value: Mapping[str, float], digits: int = 2) -> str:
    """`0.12 (0.10 to 0.14)`: an interval that is not one of differences.

    >>> plain({"mean": 0.123, "low": 0.1, "high": 0.146})
    '0.12 (0.10 to 0.15)'
    """
    return shown(value, digits=digits).replace("+", "")


def bars(ax: Any, x: Any, values: Sequence[Mapping[str, float]], **style: Any) -> None:
    """Means with their intervals, joined by a line; style as for `errorbar`."""
    mean = torch.tensor([one["mean"] for one in values], dtype=torch.float64)
    ends = torch.tensor([[one[side] for one in values] for side in ("low", "high")], dtype=torch.float64)
    ax.errorbar(x, mean, yerr=(ends - mean).abs().nan_to_num(), **{"fmt": "o-", "ms": 4, "lw": 1.2, **style})


# What is kept: by setting, its "settings" and its "runs", one for each set, draw and number of labels.

Run = Mapping[str, Any]


def keep(options: argparse.Namespace, name: str, where: str, how: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Print a run and put it beside those that are kept; returns all parts.

    Args:
        options: Of the command.
        name: Of the experiment.
        where: The setting in words.
        how: What all runs of the setting have in common.
        run: "set", "seed", "labels" and "contenders", their scores by name.
    """
    print_run(run)
    key = f"{run['set']}, draw {run['seed']}, {run['labels']} labels"
    return common.keep(options, name, {where: {"settings": how, "runs": {key: run}}})


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
        print(f"\n{where}")
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
    print_tables(tables)
    print("\naccuracy less that of the linear one, points, 95 % interval over draws and sets")
    rows = []
    for n, table in gains["accuracy"].items():
        for name, gain in table.items():
            print(f"  {n:6,} {name:40s} {shown(gain, factor=100):26s} {verdict(gain)}")
            if name in said:
                ours = f"{shown(gain, factor=100)}, {shown(gains['nll'][n][name], digits=3)}"
                what = f"{n:,} labels, {name} less linear: accuracy in points, NLL"
                seen = [run for run in runs if run["labels"] == n and name in run["contenders"]]
                rows.append(common.Row(what, said[name], ours, differs(seen, gain)))
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
    with common.style():
        picture = Figure(figsize=(3.6 * (len(sets) + 1), 6.6))
        axes = picture.subplots(2, len(sets) + 1, squeeze=False)
        for column, set_ in enumerate(sets):
            for row, (key, factor, label) in enumerate((("accuracy", 100, "accuracy, %"), ("nll", 1, "NLL"))):
                ax = axes[row, column]
                curves(ax, tables[set_], key, factor)
                ax.set(xlabel="labels", ylabel=label, title=set_)
        paired_panel(axes[0, -1], accuracy)
        curves(axes[1, -1], tables[sets[0]], "seconds", 1)
        where = f"{sets[0]}, not all on one machine" if several else sets[0]
        axes[1, -1].set(xlabel="labels", ylabel="seconds to fit", title=where, yscale="log")
        axes[1, -1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        picture.suptitle(title, fontsize=11)
        handles, names = axes[0, 0].get_legend_handles_labels()
        picture.legend(handles, names, loc="outside lower center", ncols=2 + len(sets), fontsize=8)
    return picture


def curves(ax: Any, table: Mapping[int, Any], key: str, factor: float) -> None:
    """One curve for each contender, a little apart from each other, with standard errors."""
    for i, (name, color) in enumerate(COLORS.items()):
        at = [n for n in table if name in table[n]]
        if not at:
            continue
        x = [n * 1.03 ** (i - len(COLORS) / 2) for n in at]
        mean = [factor * table[n][name][key]["mean"] for n in at]
        error = [factor * table[n][name][key]["error"] for n in at]
        ax.errorbar(x, mean, yerr=error, fmt="o-", color=color, ms=4, lw=1.5, capsize=2, label=name)
    ax.set_xscale("log")
    ax.set_xticks(list(table), [f"{n:,}" for n in table])
    ax.minorticks_off()


def paired_panel(ax: Any, gains: Mapping[int, Any]) -> None:
    """Differences of accuracy to the linear contender with 95 % intervals, in a group for each number of labels."""
    at, middles = 0.0, []
    for i, table in enumerate(gains.values()):
        first = at
        for name, color in COLORS.items():
            if name in table:
                mean, low, high = (100 * table[name][key] for key in ("mean", "low", "high"))
                ax.errorbar([mean], [-at], xerr=[[mean - low], [high - mean]], fmt="o", color=color, ms=4, capsize=2)
                at += 1
        if i % 2:  # tells the groups apart
            ax.axhspan(0.1 - at, 0.9 - first, color=common.GRAY, alpha=0.1, lw=0)
        middles.append(-(first + at - 1) / 2)
        at += 0.8
    ax.axvline(0, color=common.GRAY, lw=1)
    ax.set_yticks(middles, [f"{n:,}" for n in gains])
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="accuracy less linear, points (95 %)", ylabel="labels", title="paired over draws and sets")
