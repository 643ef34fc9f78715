"""All tasks and all methods in one table: where linnet's defaults are ahead, level and behind.

Every method gets the same trained networks and the same new examples. Settings of linnet were chosen on the development
half alone. A method is behind another if its NLL is worse by more than one standard error of their paired difference
over the seeds. Every seed is kept as soon as it is measured: a run that was stopped goes on, `--only`, `--methods` and
`--seeds` measure some, and the table and the figure show all that have been kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import common
from experiments.common import plots
from experiments.common.statistics import show_error
from experiments.scoreboard import counts, methods, tasks
from experiments.scoreboard.tasks import Cell, Setting

ARGUMENTS = {
    "--only": {
        "nargs": "*",
        "metavar": "TEXT",
        "help": "cells by a part of their name; without a text, show what is kept",
    },
    "--methods": common.several(methods.METHODS, "methods to measure; others are kept as they are (default: all)"),
    "--seeds": "seeds of each cell, at most (default: all, 2 to 8)",
    "--again": {"action": "store_true", "help": "measure anew what earlier runs have kept"},
    "--jobs": {"type": int, "default": 1, "help": "processes side by side (default: 1)"},
}
SCORES = ("nll", "rmse", "accuracy", "coverage", "ece", "seconds")


def run(options: argparse.Namespace) -> common.Outcome:
    """Measure all cells, compare, count."""
    common.require_cpu(options, "Networks are small")
    cells = cells_of(options)
    wanted = [i for i, cell in enumerate(cells) if is_wanted(cell, options)]
    if options.only and not wanted:
        raise ValueError(f"No cell has one of the texts {options.only} in its name, such as 'boston, 50 labels'.")
    if options.jobs == 1:
        for index in wanted:
            measure_cell(options, index)
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(measure_cell, options), wanted))
    return outcome([(cell.half, cell.key) for cell in cells], common.kept_parts(options))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    setting = Setting(options.data, None if options.quick else tasks.CACHE, options.quick)
    return [*tasks.number_cells(setting), *tasks.class_cells(setting)]


def is_wanted(cell: Cell, options: argparse.Namespace) -> bool:
    """Whether a cell takes part; a small version has few cells, the first of each family and half."""
    if options.only is not None:
        return any(text in cell.key for text in options.only)
    return not options.quick or cell.key in tasks.QUICK


def measure_cell(options: argparse.Namespace, index: int) -> None:
    """Measure what is missing of a cell, and keep each seed."""
    torch.set_num_threads(1)
    cell = cells_of(options)[index]
    kept = {} if options.again else common.kept_parts(options).get(cell.half, {}).get(cell.key, {})
    for seed in cell.seeds[: 2 if options.quick else options.seeds]:
        known = kept.get(f"seed {seed}", {})
        if set(options.methods) <= set(known):
            continue
        task = cell.make(seed)
        names = [name for name in options.methods if name not in known and methods.takes_part(name, task)]
        found = methods.measure(task, names)
        common.keep(options, {cell.half: {cell.key: {f"seed {seed}": found}}})
    print(f"{cell.half}, {cell.key} done", flush=True)


# Tables.


def outcome(cells: Sequence[tuple[str, str]], parts: Mapping[str, Any]) -> common.Outcome:
    """Counts, rows and the figure of all that has been kept, in the order of the cells."""
    halves: dict[str, dict[str, Any]] = {}
    for half, key in cells:
        if key in parts.get(half, {}):
            halves.setdefault(half, {})[key] = parts[half][key]
    if not halves:
        raise ValueError("No cell has been measured yet: leave out --only, or give it a text of a cell's name.")
    every = [seeds for found in halves.values() for seeds in found.values()]
    counted = {half: counts.count(list(found.values())) for half, found in halves.items()}
    metrics = {
        "settings": {"networks of an ensemble": tasks.MEMBERS, "cells": len(cells), "cells measured": len(every)},
        "errors": "standard errors over seeds; comparisons are paired",
        "methods": methods.METHODS,
        "not measured": [f"{half}, {key}" for half, key in cells if key not in halves.get(half, {})],
        "failed": find_failed(halves),
        "counts": {"both halves": counts.count(every), **counted},
        "places": by_cell(halves, lambda seeds: {mine: counts.place(seeds, mine) for mine in methods.OURS}),
        "seeds": by_cell(halves, len),
        "results": by_cell(halves, counts.summarize),
        "parts": parts,
    }
    spent = sum(one.get("seconds", 0.0) for seeds in every for found in seeds.values() for one in found.values())
    return common.Outcome(
        metrics,
        figure(halves),
        list(table_rows(metrics)),
        command="python -m experiments scoreboard (in several runs, by --only and --seeds)",
        time=f"{common.duration(spent)} of CPU for all methods",
        renewed=partial(outcome, cells),
    )


def find_failed(halves: Mapping[str, Any]) -> dict[str, str]:
    """Messages of the methods that ended with an error, by half, cell, seed and method."""
    return {
        f"{half}, {key}, {seed}, {name}": one["failed"]
        for half, cells in halves.items()
        for key, seeds in cells.items()
        for seed, found in seeds.items()
        for name, one in found.items()
        if "failed" in one
    }


def by_cell(halves: Mapping[str, Any], make: Any) -> dict[str, Any]:
    return {half: {key: make(seeds) for key, seeds in cells.items()} for half, cells in halves.items()}


def table_rows(metrics: Mapping[str, Any]) -> Iterator[common.Row]:
    """The counts, and a row for each cell."""
    sizes = metrics["settings"]
    for half, found in metrics["counts"].items():
        texts = [
            f"{what}: {value:.2f}"
            if isinstance(value, float)
            else f"{what}: {value['yes']} of {value['cells']}"
            + (f" (lowest mean: {value['best']})" if "best" in value else "")
            for what, value in found.items()
        ]
        differs = f"{sizes['cells measured']} of {sizes['cells']} cells measured; by NLL, within one standard error"
        yield common.Row(half, "not in a paper", "; ".join(texts), differs)
    for half, cells in metrics["results"].items():
        for key, table in cells.items():
            others = counts.rivals_of(table, methods.LINNET_ENSEMBLE)
            best = min(others, key=lambda name: table[name]["nll"]["mean"])
            shown = [name for name in (methods.AS_IS, *methods.OURS) if name in table]
            texts = [f"{name} {show_error(table[name]['nll'])}" for name in (*(n for n in shown if n != best), best)]
            differs = f"{half} half; the last is the lowest of other methods; ± over seeds"
            yield common.Row(f"{key}, {metrics['seeds'][half][key]} seeds", "not in a paper", ", ".join(texts), differs)


# The figure.


def figure(halves: Mapping[str, Any]) -> Figure:
    """Rows are cells, columns are methods, numbers are NLL; the color says how far a method is behind the best one."""
    most = max(len(cells) for cells in halves.values())
    picture, axes = plt.subplots(
        1, len(halves), figsize=(9 * len(halves), 0.27 * most + 2.2), squeeze=False, layout="constrained"
    )
    for ax, (half, cells) in zip(axes[0], halves.items(), strict=True):
        draw_table(ax, cells)
        ax.set_title(f"{half} half", loc="left", fontsize=12, pad=12)
    picture.suptitle(
        "Test NLL, linnet in bold. Green: no method is lower by more than one standard error. The darker the red, the "
        "farther behind.\nOne network, left of the line, is compared with one network, and five networks with all.",
        fontsize=11,
    )
    return picture


def draw_table(ax: Axes, cells: Mapping[str, counts.Seeds]) -> None:
    """One half: a colored rectangle with the mean NLL for each cell and method; five networks on the right."""
    names = [name for name in methods.METHODS if any(name in counts.measured(seeds) for seeds in cells.values())]
    for row, seeds in enumerate(cells.values()):
        table = counts.summarize(seeds)
        for column, name in enumerate(names):
            if name not in table:
                continue
            others = [other for other in table if name in methods.FIVE or other not in methods.FIVE]
            gap = table[name]["nll"]["mean"] - min(table[other]["nll"]["mean"] for other in others)
            level = not any(counts.is_behind(seeds, name, other) for other in others)
            color = LEVEL if level else SHADES[sum(gap > bound for bound in BOUNDS)]
            ax.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white", lw=1))
            weight = "bold" if name in methods.OURS else "normal"
            value = table[name]["nll"]["mean"]
            text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, fontweight=weight)
    ax.set(xlim=(-0.5, len(names) - 0.5), ylim=(-0.5, len(cells) - 0.5))
    plots.name_rows(ax, list(cells))
    ax.set_xticks(range(len(names)), names, rotation=40, ha="left", fontsize=9)
    ax.xaxis.tick_top()
    for label in ax.get_xticklabels():
        label.set_fontweight("bold" if label.get_text() in methods.OURS else "normal")
    ax.axvline(sum(name not in methods.FIVE for name in names) - 0.5, color="black", lw=1.5)
    ax.tick_params(length=0, labelsize=8)
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


LEVEL = "#b7e0c4"
SHADES = ("#f7f1ea", "#f9d9c4", "#f4b49c", "#e8907c")
BOUNDS = (0.05, 0.2, 1.0)
"""Nats behind the lowest mean at which the shade changes."""
