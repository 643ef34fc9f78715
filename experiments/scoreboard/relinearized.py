"""Does it help to linearize again around the adapted weights? Regression cells of the scoreboard's development half.

`TangentRegressor(relinearize=k)` takes up to k damped Gauss-Newton steps, each while the evidence grows. The networks
and the examples are those of the scoreboard. The mean function is the network, or "auto", which takes no step where
zero or features of the inputs are better. Differences are paired over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.statistics import average, scores
from experiments.scoreboard import numbers, tasks
from experiments.scoreboard.tasks import DEVELOPMENT, Setting, Task

ARGUMENTS = {"--seeds": "seeds of each cell, at most (default: all, 5 to 8)"}
STEPS = (0, 1, 3)
"""Largest numbers of steps."""
MEANS = ("auto", "network")


def run(options: argparse.Namespace) -> common.Outcome:
    """Measure all cells and compare the numbers of steps."""
    common.require_cpu(options, "Networks are small")
    torch.set_num_threads(1)
    setting = Setting(options.data, None if options.quick else tasks.CACHE, options.quick)
    found: dict[str, Any] = {mean: {} for mean in MEANS}
    for cell in tasks.number_cells(setting):
        if cell.half != DEVELOPMENT or (options.quick and cell.key not in tasks.QUICK):
            continue
        made = [cell.make(seed) for seed in cell.seeds[: 2 if options.quick else options.seeds]]
        for mean in MEANS:
            found[mean][cell.key] = compare([measure(task, mean) for task in made])
            print(f"mean {mean}, {cell.key}: {tell(found[mean][cell.key])}", flush=True)
    verdicts = {mean: count(cells) for mean, cells in found.items()}
    metrics = {"errors": "standard errors over seeds, of paired differences", "cells": found, "verdicts": verdicts}
    return common.Outcome(metrics, figure(found), list(table_rows(metrics)))


def measure(task: Task, mean: str) -> dict[str, Any]:
    """Scores and seconds for each number of steps, and how many were taken."""
    out: dict[str, Any] = {}
    for steps in STEPS:
        clock = common.Clock("cpu")
        with common.expect(common.OWN, common.FAR, common.WIDE), clock("seconds"):
            reg = linnet.TangentRegressor(
                task.networks[0], mean=mean, relinearize=steps, seed=task.seed, progress=False
            ).fit(*numbers.pair(task))
        at = numbers.predict(reg, task)
        found = scores(at.mean, at.variance, task.test.y, unit=task.unit)
        taken = sum(step.accepted for step in reg.relinearized_)
        out[str(steps)] = found | clock.seconds | {"taken": taken, "log evidence": reg.log_evidence_}
    return out


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and the change of NLL and log evidence by steps."""
    out: dict[str, Any] = {"seeds": len(runs)}
    for steps in STEPS:
        rows = [run[str(steps)] for run in runs]
        mean = {key: average([row[key] for row in rows]) for key in rows[0]}
        change = {
            f"change of {key}": average([run[str(steps)][key] - run["0"][key] for run in runs])
            for key in ("nll", "log evidence")
        }
        out[str(steps)] = mean | (change if steps else {})
    return out


def is_beyond(change: Mapping[str, float]) -> bool:
    """Whether a change is larger than its standard error."""
    return abs(change["mean"]) > change["error"]


def count(found: Mapping[str, Any]) -> dict[str, Any]:
    """Cells with less and with more NLL, beyond one standard error, and the mean change over cells."""
    out = {}
    for steps in STEPS[1:]:
        changes = [cell[str(steps)]["change of nll"] for cell in found.values()]
        beyond = [change["mean"] for change in changes if is_beyond(change)]
        out[str(steps)] = {
            "better": sum(value < 0 for value in beyond),
            "worse": sum(value > 0 for value in beyond),
            "cells": len(changes),
            "mean change of nll": average([change["mean"] for change in changes]),
        }
    return out


def tell(cell: Mapping[str, Any]) -> str:
    """The NLL without steps, and by number of steps its change, the steps taken and the change of the evidence."""
    parts = [f"NLL {cell['0']['nll']['mean']:.3f}"]
    for steps in STEPS[1:]:
        one = cell[str(steps)]
        change, evidence = one["change of nll"], one["change of log evidence"]
        parts.append(
            f"up to {steps}: {change['mean']:+.3f} ± {change['error']:.3f} ({one['taken']['mean']:.1f} taken, log "
            f"evidence {evidence['mean']:+.1f})"
        )
    return "; ".join(parts)


def table_rows(metrics: Mapping[str, Any]) -> Iterator[common.Row]:
    for mean, verdicts in metrics["verdicts"].items():
        for steps, found in verdicts.items():
            change = found["mean change of nll"]
            yield common.Row(
                f"mean={mean}, relinearize={steps}",
                "not in a paper",
                f"better in {found['better']}, worse in {found['worse']} of {found['cells']} cells; mean change of the "
                f"NLL {change['mean']:+.3f} ± {change['error']:.3f}",
                "beyond one standard error over seeds; ± of the mean over cells",
            )
    for mean, cells in metrics["cells"].items():
        for key, cell in cells.items():
            yield common.Row(
                f"mean={mean}, {key}, {cell['seeds']} seeds", "not in a paper", tell(cell), "± over seeds, paired"
            )


def figure(found: Mapping[str, Any]) -> Figure:
    """The change of the NLL in each cell, with its standard error, by mean function."""
    most = max(len(cells) for cells in found.values())
    picture, axes = plt.subplots(1, len(found), figsize=(11, 0.35 * most + 1.5), sharey=True, layout="constrained")
    for ax, (mean, cells) in zip(axes, found.items(), strict=True):
        for i, steps in enumerate(STEPS[1:]):
            changes = [cell[str(steps)]["change of nll"] for cell in cells.values()]
            at = plots.place_rows(len(changes), i, len(STEPS) - 1, width=0.4)
            means, errors = ([change[key] for change in changes] for key in ("mean", "error"))
            ax.errorbar(means, at, xerr=errors, fmt="o", ms=4, label=f"up to {steps}")
        ax.axvline(0, color="black", lw=1)
        ax.set_xscale("symlog", linthresh=0.01)
        ax.set_xlabel("change of the test NLL by steps; less is better")
        ax.set_title(f"mean={mean!r}", loc="left")
    plots.name_rows(axes[0], list(found[MEANS[0]]))
    axes[0].legend()
    return picture
