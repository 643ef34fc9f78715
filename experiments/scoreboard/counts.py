"""Comparisons of methods in a cell, paired over seeds, and the counts of all cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.common.statistics import average
from experiments.scoreboard.methods import ADAPT, AS_IS, FINE, FIVE, LINNET, LINNET_ENSEMBLE, METHODS, OURS

Seeds = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""The scores of a cell, by seed and by method."""


def measured(seeds: Seeds) -> list[str]:
    """Methods that every seed of a cell has, in the order of the table; one that failed for a seed is left out."""
    return [name for name in METHODS if all(name in found and "failed" not in found[name] for found in seeds.values())]


def summarize(seeds: Seeds) -> dict[str, Any]:
    """By method, the mean of every score and its standard error over the seeds."""
    out: dict[str, Any] = {}
    for name in measured(seeds):
        rows = [found[name] for found in seeds.values()]
        out[name] = {key: average([row[key] for row in rows]) for key in rows[0]}
    return out


def compare(seeds: Seeds, mine: str, other: str) -> dict[str, float]:
    """NLL of one method less that of another: the mean over seeds, and the standard error of the mean.

    >>> seeds = {"0": {"a": {"nll": 1.0}, "b": {"nll": 0.5}}, "1": {"a": {"nll": 2.0}, "b": {"nll": 1.0}}}
    >>> compare(seeds, "a", "b")
    {'mean': 0.75, 'error': 0.25}
    """
    return average([found[mine]["nll"] - found[other]["nll"] for found in seeds.values()])


def is_behind(seeds: Seeds, mine: str, other: str) -> bool:
    """Whether the NLL of a method is worse by more than one standard error; with one seed, whether it is worse."""
    gap = compare(seeds, mine, other)
    return gap["mean"] > 0 and not gap["mean"] <= gap["error"]


def rivals_of(names: Iterable[str], mine: str) -> list[str]:
    """Methods of others that a method is compared with: those of one network, or all methods for five networks."""
    return [name for name in names if name not in OURS and (mine in FIVE or name not in FIVE)]


def has_failed(seeds: Seeds, name: str) -> bool:
    """Whether a method took part and ended with an error for one of the seeds."""
    return any("failed" in found.get(name, {}) for found in seeds.values())


def place(seeds: Seeds, mine: str) -> dict[str, Any] | None:
    """Who is ahead of a method beyond the error, and who has the lowest mean of all rivals; None if not measured.

    A method that failed is behind all others.
    """
    names = measured(seeds)
    rivals = rivals_of(names, mine)
    if has_failed(seeds, mine):
        return {"verdict": "behind", "ahead": rivals, "failed": True}
    if mine not in names or not rivals:
        return None
    means = {name: average([found[name]["nll"] for found in seeds.values()])["mean"] for name in (*rivals, mine)}
    best = min(rivals, key=lambda name: means[name])
    ahead = [name for name in rivals if is_behind(seeds, mine, name)]
    verdict = "behind" if ahead else "best" if means[mine] < means[best] else "level"
    return {"verdict": verdict, "ahead": ahead, "best rival": best, "less the best rival": compare(seeds, mine, best)}


def count(cells: Sequence[Seeds]) -> dict[str, Any]:
    """Counts over cells, each of those cells that have all methods that the count compares."""
    out: dict[str, Any] = {}
    for mine in (LINNET, LINNET_ENSEMBLE, ADAPT):
        places = [found for found in (place(seeds, mine) for seeds in cells) if found is not None]
        verdicts = [one["verdict"] for one in places]
        if places:
            out[f"{mine} best or level"] = {
                "yes": sum(verdict != "behind" for verdict in verdicts),
                "best": verdicts.count("best"),
                "cells": len(places),
            }
    for mine, other in ((ADAPT, FINE), (LINNET, FINE), (LINNET, AS_IS), (ADAPT, AS_IS)):
        both = [seeds for seeds in cells if {mine, other} <= set(measured(seeds))]
        failed = sum(has_failed(seeds, mine) and other in measured(seeds) for seeds in cells)
        if both or failed:
            behind = failed + sum(is_behind(seeds, mine, other) for seeds in both)
            out[f"{mine} behind {other}"] = {"yes": behind, "cells": failed + len(both)}
        if both:
            spent = {
                name: sum(found[name]["seconds"] for seeds in both for found in seeds.values())
                for name in (mine, other)
            }
            if other == FINE:
                out[f"seconds, {mine} over {other}"] = spent[mine] / spent[other]
    return out
