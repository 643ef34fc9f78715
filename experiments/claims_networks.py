"""Claims of Maddox et al. 2021 on linearized classifiers (figure 4) and on Jacobians of tasks (figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claims_maddox import MADDOX
from experiments.verdicts import (
    Finding,
    Metrics,
    ahead,
    below,
    every,
    of_error,
    paired,
    said,
    unpaired,
    value,
    within,
)

NTK, LINEARIZED = "finite NTK", "linearized network"


# Figure 4.


def settings_of(metrics: Metrics, method: str) -> dict[str, Mapping[str, Any]]:
    """By network and setting: the results of a method, by variational inference where that was run."""
    found: dict[str, Mapping[str, Any]] = {}
    for network, settings in metrics["results"].items():
        for setting, methods in settings.items():
            how = "vi" if f"{method}, vi" in methods else "map"
            if f"{method}, {how}" in methods:
                fitted = setting.rsplit(", ", 1)[0]
                own = {"inference": how, "network": methods["network"]}
                found[f"{network}, {fitted}"] = {**methods[f"{method}, {how}"], **own}
    if not found:
        raise LookupError(method)
    return found


def accuracy_gap(one: Mapping[str, Any]) -> dict[str, float]:
    """In points; over draws, or over test images where there was one draw."""
    gap = one["less the network"]
    if gap["low"] is None:
        gap = of_error({"mean": gap["mean"], "error": one["standard error over test images"]}, 1000)
    return {side: 100 * gap[side] for side in ("mean", "low", "high")}


def gaps_of(metrics: Metrics, method: str) -> tuple[str, str]:
    gaps = {name: accuracy_gap(one) for name, one in settings_of(metrics, method).items()}
    numbers = "; ".join(f"{name} {said(gap)}" for name, gap in gaps.items())
    return f"points less the network: {numbers}", every(within(gap, 1) for gap in gaps.values())


@MADDOX.claim("figure 4", "figure4", "The linearized network is nearly as accurate as the network on CIFAR-10.")
def linearized_accuracy(metrics: Metrics) -> Finding:
    numbers, verdict = gaps_of(metrics, LINEARIZED)
    scale = max(one["scale"] for one in settings_of(metrics, LINEARIZED).values())
    still = f"; the network knows these images and the evidence lets nothing move (scale {scale:.0e})"
    return Finding(numbers + (still if scale < 1e-3 else ""), verdict)


@MADDOX.claim("figure 4", "figure4", "The finite NTK is nearly as accurate as the network.")
def ntk_accuracy(metrics: Metrics) -> Finding:
    found = settings_of(metrics, NTK)
    best = max(100 * one["accuracy"]["mean"] for name, one in found.items() if name.startswith("ResNet-56"))
    why = (
        "It starts from a mean of zero and learns from 100 or 500 of the 50,000 training images; with few test images "
        f"and three draws a point is also less than the interval. Its best with 56 layers is {best:.1f} % (the paper: "
        "about 92 %)."
    )
    return Finding(*gaps_of(metrics, NTK), why)


@MADDOX.claim("figure 4", "figure4", "Linearized networks are slightly worse in NLL and ECE: more overconfident.")
def ntk_calibration(metrics: Metrics) -> Finding:
    numbers, verdicts = [], []
    found = settings_of(metrics, NTK)
    for name, one in found.items():
        gaps = [unpaired(one[score], {**one["network"][score], "error": 0.0}, 3) for score in ("nll", "ece")]
        verdicts += [ahead(gap) for gap in gaps]
        numbers.append(f"{name}, {one['inference']} {said(gaps[0], 3)} and {said(gaps[1], 3)}")
    own = [one["network"]["ece"]["mean"] for one in found.values()]
    why = (
        f"The networks supplied know all training images and are overconfident themselves (ECE {min(own):.3f} to "
        f"{max(own):.3f}); a linear model fitted to a few hundred images is not sure enough to be more so. The paper's "
        "networks are others."
    )
    return Finding("NLL and ECE of the finite NTK less the network's: " + "; ".join(numbers), every(verdicts), why)


# Figure 5.


def tasks_of(metrics: Metrics, pair: str, space: str) -> dict[str, float]:
    sizes = next(iter(metrics["parts"].values()))
    return {seed: one["similarity"]["same start"][pair][space] for seed, one in sizes["tasks"].items()}


@MADDOX.claim("figure 5", "figure5", "Jacobians of two halves of MNIST are more alike than of MNIST and Fashion-MNIST.")
def halves_alike(metrics: Metrics) -> Finding:
    gaps = {}
    for space in ("function", "parameters"):
        alike, other = (tasks_of(metrics, f"MNIST1 and {name}", space) for name in ("MNIST2", "Fashion-MNIST"))
        gaps[space] = paired(alike, other)
    numbers = ", ".join(f"{space} {said(gap)}" for space, gap in gaps.items())
    return Finding(f"similarity, difference: {numbers}", every(ahead(gap) for gap in gaps.values()))


@MADDOX.claim("figure 5", "figure5", "Jacobians of MNIST and Fashion-MNIST have nearly no similarity.")
def other_task(metrics: Metrics) -> Finding:
    same, other = metrics["similarity"]["same start"], metrics["similarity"]["different starts"]
    found = {space: same["MNIST1 and Fashion-MNIST"][space] for space in ("function", "parameters")}
    why = (
        f"Our networks share their start and were trained for {metrics['settings']['epochs']} epochs: even the "
        f"untrained one agrees to {same['MNIST1 and untrained']['function']['mean']:.2f} in function space. From "
        f"different starts it is {other['MNIST1 and Fashion-MNIST']['parameters']['mean']:.2f} in parameter space, but "
        f"{other['MNIST1 and MNIST1']['parameters']['mean']:.2f} for two networks of MNIST1: how near to zero it is "
        "depends on the start more than on the task."
    )
    numbers = ", ".join(f"{space} {value(one)}" for space, one in found.items())
    return Finding(f"similarity: {numbers}", every(below(one, 0.1) for one in found.values()), why)
