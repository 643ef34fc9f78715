"""Claims of Maddox et al. 2021 on timings (figure 2) and posteriors (figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import common, gains
from experiments.figure2 import exponent, series
from experiments.verdicts import (
    Finding,
    Metrics,
    Paper,
    ahead,
    below,
    every,
    paired,
    plainly,
    said,
    shifted,
    turned,
    unpaired,
    value,
)

MADDOX = Paper("Maddox et al. 2021", "Fast Adaptation with Linearized Neural Networks")
CG = "linnet, CG in function space"
EXACT = "linnet, exact"
FINITE = "linnet, finite difference"
NEARLY_LINEAR = 1.2
"""An exponent up to this counts as nearly linear."""


# Figure 2.


@MADDOX.claim("figure 2", "figure2", "The log evidence takes nearly linear time in examples and in parameters.")
def nearly_linear(metrics: Metrics) -> Finding:
    rows = metrics["devices"]["cuda"]
    data, parameters = series(rows["data"], "n")[CG], series(rows["parameters"], "p")[EXACT]
    (n, by_n), (p, by_p) = data[-1], parameters[-1]
    powers = exponent(data), exponent(parameters)
    numbers = f"CG {by_n:.1f} s at n = {n:,}, as n^{powers[0]:.1f}; exact {by_p:.2f} s at p = {p:,}, "
    numbers += f"as p^{powers[1]:.1f}"
    return Finding(numbers, plainly(n >= 100_000 and p >= 90_000_000 and max(powers) <= NEARLY_LINEAR))


def one_column(metrics: Metrics, device: str) -> list[Mapping[str, Any]]:
    rows = metrics["devices"][device]["products"]
    found = [row for row in rows if row["contender"] == FINITE and row["k"] == 1]
    if not found:
        raise LookupError(FINITE)
    return found


@MADDOX.claim("figure 2", "figure2", "A Fisher-vector product by finite differences is faster than double backward.")
def differences_are_faster(metrics: Metrics) -> Finding:
    rows = one_column(metrics, "cuda") + one_column(metrics, "cpu")
    speedups = [row["speedup"] for row in rows]
    numbers = f"{min(speedups):.1f} to {max(speedups):.1f} times as fast, {len(rows)} networks and devices"
    return Finding(numbers, plainly(min(speedups) > 1))


@MADDOX.claim("figure 2", "figure2", "Finite differences are typically 30 times as fast as double backward.")
def thirty_times(metrics: Metrics) -> Finding:
    rows = one_column(metrics, "cuda")
    best = max(rows, key=lambda row: row["speedup"])
    every_product = metrics["devices"]["cuda"]["products"]
    together = max(row["speedup"] for row in every_product if row["contender"] == "linnet, exact product")
    numbers = ", ".join(f"{row['network']} {row['speedup']:.1f}" for row in rows)
    why = (
        f"Our double backward takes a whole batch at once and is at most {best['speedup']:.0f} times as slow "
        f"({best['network']}, batch {best['batch']}); how the paper's standard implementation forms the product is not "
        f"said. Exact products of 16 columns at once do reach {together:.0f} times double backward's speed."
    )
    return Finding(numbers, plainly(sorted(row["speedup"] for row in rows)[len(rows) // 2] >= 30), why)


@MADDOX.claim("figure 2", "figure2", "The relative error of finite differences is on the order of 0.001.")
def error_of_differences(metrics: Metrics) -> Finding:
    by = {device: [row["relative error"] for row in one_column(metrics, device)] for device in ("cuda", "cpu")}
    numbers = "; ".join(f"{device}: {min(errors):.1g} to {max(errors):.1g}" for device, errors in by.items())
    deep = max(one_column(metrics, "cpu"), key=lambda row: row["relative error"])
    why = (
        f"Ours are networks as drawn, in float32, where the error grows with depth: {deep['relative error']:.2g} for "
        f"{deep['network']}. The exact product costs about as much and is what linnet uses."
    )
    return Finding(numbers, plainly(max(by["cuda"] + by["cpu"]) < 0.005), why)


# Figure 3.


def by_seed(metrics: Metrics, which: str, case: str, key: str) -> dict[str, float]:
    return {seed: cases[case][key] for seed, cases in metrics["parts"][which].items()}


def wider(metrics: Metrics, key: str) -> tuple[str, str]:
    """5,000 units less 10, untrained and trained."""
    found = {
        which: paired(by_seed(metrics, which, "5000", key), by_seed(metrics, which, "10", key))
        for which in ("untrained", "trained")
    }
    numbers = "5,000 units less 10: " + ", ".join(f"{which} {said(gap)}" for which, gap in found.items())
    return numbers, every(ahead(gap) for gap in found.values())


@MADDOX.claim("figure 3", "figure3", "Posterior deviations away from the data rise with the width.")
def width_away(metrics: Metrics) -> Finding:
    return Finding(*wider(metrics, "std away from the data"))


@MADDOX.claim("figure 3", "figure3", "Posterior deviations near the data rise with the width.")
def width_near(metrics: Metrics) -> Finding:
    rmse = metrics["results"]["untrained"]["10"]["RMSE of the posterior mean"]
    kept = [metrics["results"]["untrained"][width]["noise"]["mean"] for width in ("10", "5000")]
    gap = paired(*(by_seed(metrics, "untrained", width, "std near the data") for width in ("5000", "100")))
    why = (
        f"Ten units do not fit our curves (RMSE {common.show(rmse)}, noise {metrics['settings']['noise']:g}); the "
        f"noise variance that they infer is {kept[0] / kept[1]:.0f} times that of 5,000 units, and with it their "
        f"deviation near the data is large. 5,000 units less 100, untrained: {said(gap, 3)}."
    )
    return Finding(*wider(metrics, "std near the data"), why)


@MADDOX.claim("figure 3", "figure3", "Trained networks have less posterior variance than untrained ones near the data.")
def trained_have_less(metrics: Metrics) -> Finding:
    gaps = {}
    for width in metrics["results"]["trained"]:
        trained, untrained = (by_seed(metrics, which, width, "std near the data") for which in ("trained", "untrained"))
        gaps[width] = paired(trained, untrained)
    weights = [metrics["results"][which]["5000"]["largest output weight"]["mean"] for which in ("trained", "untrained")]
    numbers = "median deviation, trained less untrained: " + ", ".join(f"{w}: {said(g, 3)}" for w, g in gaps.items())
    why = (
        "Believed, not tested: the features of a ReLU unit jump at its kink by its output weight, and training makes "
        f"some of these large (5,000 units: {weights[0]:.2f} against {weights[1]:.2f} as drawn)."
    )
    return Finding(numbers, every(ahead(turned(gap)) for gap in gaps.values()), why)


@MADDOX.claim("figure 3", "figure3", "With 5,000 units the predictions are reasonable, trained or not.")
def wide_is_reasonable(metrics: Metrics) -> Finding:
    noise = metrics["settings"]["noise"]
    found = {
        which: gains.interval(list(by_seed(metrics, which, "5000", "RMSE of the posterior mean").values()))
        for which in ("untrained", "trained")
    }
    numbers = "RMSE " + ", ".join(f"{which} {value(one)}" for which, one in found.items()) + f"; noise {noise:g}"
    return Finding(numbers, every(below(one, 2 * noise) for one in found.values()))


@MADDOX.claim("figure 3", "figure3", "Architectures of equal size have different posteriors outside the data.")
def architectures_apart(metrics: Metrics) -> Finding:
    beyond = metrics["architectures apart"]["beyond"]
    gap = unpaired(beyond["two architectures"], beyond["two starts"], metrics["settings"]["seeds"])
    numbers = f"RMS distance of means {common.show(beyond['two architectures'])}, of two starts of one "
    return Finding(numbers + common.show(beyond["two starts"]), ahead(gap))


@MADDOX.claim("figure 3", "figure3", "The performance of architectures of equal size differs vastly.")
def architectures_differ(metrics: Metrics) -> Finding:
    names = list(metrics["results"]["architectures"])
    errors = {name: by_seed(metrics, "architectures", name, "RMSE of the posterior mean") for name in names}
    means = {name: sum(by.values()) / len(by) for name, by in errors.items()}
    worst, best = max(names, key=means.__getitem__), min(names, key=means.__getitem__)
    gap, noise = paired(errors[worst], errors[best]), metrics["settings"]["noise"]
    networks = [metrics["results"]["architectures"][name]["RMSE of the network"]["mean"] for name in names]
    why = (
        f"All three networks fit our curve after {metrics['settings']['steps']:,} steps (RMSE {min(networks):.2f} to "
        f"{max(networks):.2f}, noise {noise:g}), so nothing is left to tell them apart by; the "
        "paper's data and training are not given."
    )
    numbers = ", ".join(f"{name}: {mean:.3f}" for name, mean in means.items())
    return Finding(f"RMSE {numbers}; largest gap {said(gap, 3)}", ahead(shifted(gap, -noise)), why)
