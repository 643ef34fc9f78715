"""Claims of Maddox et al. 2021."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from experiments.judge import (
    NO,
    YES,
    Claim,
    Interval,
    Metrics,
    Paper,
    Reading,
    behind,
    below,
    certify,
    combine,
    less,
    over,
    pair,
    select,
    stored,
    unpair,
    unpaired,
    widen,
    with_error,
    within,
)
from experiments.maddox2021.figure2 import DIFFERENCE, EXACT, EXACT_PRODUCT, FUNCTION, exponent, series
from experiments.maddox2021.shifts import EVERYTHING, NTK
from experiments.maddox2021.shifts import FIXED as LAST
from experiments.maddox2021.shifts import FIXED_LONGER as LONGER
from experiments.maddox2021.shifts import LINNET as LINEARIZED
from experiments.maddox2021.shifts import NONE as STAYS
from experiments.mu2020.claims import FEATURES, read_setting, read_transfer
from experiments.mu2020.table1_mu import OURS

# Figure 2.


def read_times(metrics: Metrics) -> dict[str, Any]:
    """The largest sizes with their seconds and exponents; up to 1.2 an exponent counts as nearly linear."""
    found: dict[str, Any] = {}
    for label, panel, contender in (("n", "data", FUNCTION), ("p", "parameters", EXACT)):
        points = series(metrics["devices"]["cuda"][panel], label)[contender]
        found |= {label: points[-1][0], f"{label} seconds": points[-1][1], f"{label} power": exponent(points)}
    linear = max(found["n power"], found["p power"]) <= 1.2
    return found | {"linear": certify(found["n"] >= 100_000 and found["p"] >= 90_000_000 and linear)}


def read_products(metrics: Metrics, what: str) -> dict[str, Any]:
    """Speedups and errors of finite differences for one column, and one of them to be judged."""
    products = {device: metrics["devices"][device]["products"] for device in ("cuda", "cpu")}
    rows = {
        device: [row for row in found if row["contender"] == DIFFERENCE and row["k"] == 1]
        for device, found in products.items()
    }
    speedups = {device: [row["speedup"] for row in found] for device, found in rows.items()}
    errors = {device: [row["relative error"] for row in found] for device, found in rows.items()}
    if not all(rows.values()):
        raise LookupError(DIFFERENCE)
    every = speedups["cuda"] + speedups["cpu"]
    judged = {
        "faster": min(every) - 1,
        "typical": sorted(speedups["cuda"])[len(speedups["cuda"]) // 2] - 30,
        "precise": 0.005 - max(errors["cuda"] + errors["cpu"]),
    }
    return {
        "judged": Interval.parse(judged[what]),
        "least": min(every),
        "most": max(every),
        "count": len(every),
        "best": max(rows["cuda"], key=lambda row: row["speedup"]),
        "deepest": max(rows["cpu"], key=lambda row: row["relative error"]),
        "together": max(row["speedup"] for row in products["cuda"] if row["contender"] == EXACT_PRODUCT),
        "networks": ", ".join(f"{row['network']} {row['speedup']:.1f}" for row in rows["cuda"]),
        **read_trained(metrics["devices"]["cpu"].get("trained", [])),
        "errors": "; ".join(f"{device}: {min(found):.1g} to {max(found):.1g}" for device, found in errors.items()),
    }


def read_trained(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of products around the networks that are supplied."""
    both = {
        one: {row["network"]: row["relative error"] for row in rows if row["contender"] == one}
        for one in (DIFFERENCE, EXACT_PRODUCT)
    }
    mine = ", ".join(f"{error:.1g} ({name})" for name, error in both[DIFFERENCE].items())
    return {"trained": mine or "not measured", "exact": max(both[EXACT_PRODUCT].values(), default=math.nan)}


FIGURE2 = [
    Claim(
        "figure2",
        "figure 2: The log evidence takes nearly linear time in examples and in parameters.",
        read_times,
        "CG {n seconds:.1f} s at n = {n:,}, as n^{n power:.1f}; exact {p seconds:.2f} s at p = {p:,}, as "
        "p^{p power:.1f}",
    ),
    Claim(
        "figure2",
        "figure 2: A Fisher-vector product by finite differences is faster than double backward.",
        partial(read_products, what="faster"),
        "{least:.1f} to {most:.1f} times as fast, {count} networks and devices",
    ),
    Claim(
        "figure2",
        "figure 2: Finite differences are typically 30 times as fast as double backward.",
        partial(read_products, what="typical"),
        "{networks}",
        "Our double backward takes a whole batch at once and is at most {best[speedup]:.0f} times as slow "
        "({best[network]}, batch {best[batch]}); how the paper's standard implementation forms the product is not "
        "said. Exact products of 16 columns at once do reach {together:.0f} times double backward's speed.",
    ),
    Claim(
        "figure2",
        "figure 2: The relative error of finite differences is on the order of 0.001.",
        partial(read_products, what="precise"),
        "{errors}",
        "These are networks as drawn, in float32, where the error grows with depth: {deepest[relative error]:.2g} for "
        "{deepest[network]}. Around trained networks the error is {trained}. The exact product costs about as much, "
        "its error there is at most {exact:.0e}, and it is what linnet uses.",
    ),
]


# Figure 3.

STATES = ("untrained", "trained")
BEYOND = "architectures apart > beyond"
NEAR, AWAY, RMSE = "std near the data", "std away from the data", "RMSE of the posterior mean"


def seeds(which: str, case: str, key: str) -> str:
    return f"parts > {which} > * > {case} > {key}"


def wider(key: str) -> dict[str, Reading]:
    """5,000 units less 10."""
    return {which: less(seeds(which, "5000", key), seeds(which, "10", key)) for which in STATES}


def read_training(metrics: Metrics) -> dict[str, Interval]:
    """Deviations of trained networks less those of untrained ones, by width."""
    widths = metrics["results"]["trained"]
    return {f"{w}:": less(*(seeds(which, w, NEAR) for which in reversed(STATES)))(metrics) for w in widths}


def read_architectures(metrics: Metrics) -> dict[str, Any]:
    """The largest difference of errors between two architectures, less the noise."""
    table = metrics["results"]["architectures"]
    errors = {name: select(metrics, seeds("architectures", name, RMSE)) for name in table}
    means = {name: sum(by.values()) / len(by) for name, by in errors.items()}
    worst, best = (errors[pick(means, key=means.__getitem__)] for pick in (max, min))
    networks = [one["RMSE of the network"]["mean"] for one in table.values()]
    return {
        "larger": pair(worst, best) - metrics["settings"]["noise"],
        "gap": f"{pair(worst, best):+.3f}",
        "means": ", ".join(f"{name}: {mean:.3f}" for name, mean in means.items()),
        "least": min(networks),
        "most": max(networks),
    }


FIGURE3 = [
    Claim(
        "figure3",
        "figure 3: Posterior deviations away from the data rise with the width.",
        wider(AWAY),
        "5,000 units less 10: {each:+.2f}",
    ),
    Claim(
        "figure3",
        "figure 3: Posterior deviations near the data rise with the width.",
        wider(NEAR),
        "5,000 units less 10: {each:+.2f}",
        "Ten units do not fit our curves (RMSE {results > untrained > 10 > RMSE of the posterior mean:.2f}, noise "
        "{settings > noise:g}); the noise variance that they infer is {ratio:.0f} times that of 5,000 units, and with "
        "it their deviation near the data is large. 5,000 units less 100, untrained: {gap:+.3f}.",
        facts={
            "ratio": lambda m: (
                m["results"]["untrained"]["10"]["noise"]["mean"] / m["results"]["untrained"]["5000"]["noise"]["mean"]
            ),
            "gap": less(seeds("untrained", "5000", NEAR), seeds("untrained", "100", NEAR)),
        },
    ),
    Claim(
        "figure3",
        "figure 3: Trained networks have less posterior variance than untrained ones near the data.",
        read_training,
        "median deviation, trained less untrained: {each:+.3f}",
        "Believed, not tested: the features of a ReLU unit jump at its kink by its output weight, and training makes "
        "some of these large (5,000 units: {results > trained > 5000 > largest output weight > mean:.2f} against "
        "{results > untrained > 5000 > largest output weight > mean:.2f} as drawn).",
        behind,
    ),
    Claim(
        "figure3",
        "figure 3: With 5,000 units the predictions are reasonable, trained or not.",
        {which: 2 * stored("settings > noise") - over(seeds(which, "5000", RMSE)) for which in STATES},
        "RMSE untrained {untrained:.2f}, trained {trained:.2f}; noise {settings > noise:g}",
        facts={which: over(seeds(which, "5000", RMSE)) for which in STATES},
    ),
    Claim(
        "figure3",
        "figure 3: Architectures of equal size have different posteriors outside the data.",
        {"gap": unpaired(f"{BEYOND} > two architectures", f"{BEYOND} > two starts", "settings > seeds")},
        f"RMS distance of means {{{BEYOND} > two architectures:.2f}}, of two starts of one "
        f"{{{BEYOND} > two starts:.2f}}",
    ),
    Claim(
        "figure3",
        "figure 3: The performance of architectures of equal size differs vastly.",
        read_architectures,
        "RMSE {means}; largest gap {gap}",
        "All three networks fit our curve after {settings > steps:,} steps (RMSE {least:.2f} to {most:.2f}, noise "
        "{settings > noise:g}), so nothing is left to tell them apart by; the paper's data and training are not given.",
    ),
]


# Figure 4.


def settings_of(metrics: Metrics, method: str) -> dict[str, Mapping[str, Any]]:
    """By network and setting: the results of a method, by variational inference where that was run."""
    found: dict[str, Mapping[str, Any]] = {}
    for network, settings in metrics["results"].items():
        for setting, methods in settings.items():
            how = "vi" if f"{method}, vi" in methods else "map"
            if f"{method}, {how}" in methods:
                own = {"inference": how, "network": methods["network"]}
                found[f"{network}, {setting.rsplit(', ', 1)[0]}"] = {**methods[f"{method}, {how}"], **own}
    if not found:
        raise LookupError(method)
    return found


def accuracy_gaps(method: str) -> Callable[[Metrics], dict[str, Interval]]:
    """In points, less the network; over draws, or over test images where there was one draw."""

    def read(one: Mapping[str, Any]) -> Interval:
        gap = one["less the network"]
        single = gap["low"] is None
        return widen(gap["mean"], one["standard error over test images"], 1000) if single else Interval.parse(gap)

    return lambda metrics: {name: 100 * read(one) for name, one in settings_of(metrics, method).items()}


STILL = 1e-3
"""A scale of the prior below which the linearized network is the network itself."""


def read_linearized(metrics: Metrics) -> dict[str, Any]:
    """Accuracies less the network's. A linearized network that does not move shows nothing."""
    found = settings_of(metrics, LINEARIZED)
    moved = {name: one["scale"] >= STILL for name, one in found.items()}
    gaps = {
        name: gap if moved[name] else Interval(gap.mean) for name, gap in accuracy_gaps(LINEARIZED)(metrics).items()
    }
    return {**gaps, "scale": max(one["scale"] for one in found.values()), "still": len(moved) - sum(moved.values())}


def read_calibration(metrics: Metrics) -> dict[str, Any]:
    """NLL and ECE of the finite NTK less those of the network."""
    found, told = settings_of(metrics, NTK), []
    gaps: dict[str, Interval] = {}
    for name, one in found.items():
        both = [unpair(one[score], {**one["network"][score], "error": 0.0}, 3) for score in ("nll", "ece")]
        gaps |= {f"{name}, {i}": gap for i, gap in enumerate(both)}
        told.append(f"{name}, {one['inference']} {both[0]:+.3f} and {both[1]:+.3f}")
    own = [one["network"]["ece"]["mean"] for one in found.values()]
    return {**gaps, "told": "; ".join(told), "least": min(own), "most": max(own)}


FIGURE4 = [
    Claim(
        "figure4",
        "figure 4: The linearized network is nearly as accurate as the network on CIFAR-10.",
        read_linearized,
        "points less the network: {each:+.2f;}",
        "In {still} settings the linearized network is the network: the network knows these images, and the evidence "
        "lets nothing move (largest scale {scale:.0e}). The gap is zero by construction there.",
        within(1),
    ),
    Claim(
        "figure4",
        "figure 4: The finite NTK is nearly as accurate as the network.",
        accuracy_gaps(NTK),
        "points less the network: {each:+.2f;}",
        "It starts from a mean of zero and learns from 100 or 500 of the 50,000 training images; with few test images "
        "and three draws a point is also less than the interval. Its best with 56 layers is {best:.1f} % (the paper: "
        "about 92 %).",
        within(1),
        {
            "best": lambda m: max(
                100 * x["accuracy"]["mean"] for n, x in settings_of(m, NTK).items() if "ResNet-56" in n
            )
        },
    ),
    Claim(
        "figure4",
        "figure 4: Linearized networks are slightly worse in NLL and ECE: more overconfident.",
        read_calibration,
        "NLL and ECE of the finite NTK less the network's: {told}",
        "The networks supplied know all training images and are overconfident themselves (ECE {least:.3f} to "
        "{most:.3f}); a linear model fitted to a few hundred images is not sure enough to be more so. The paper's "
        "networks are others.",
    ),
]


# Figure 5.

SPACES = ("function", "parameters")


def similarity(pair: str, space: str) -> str:
    return f"parts > ? > tasks > * > similarity > same start > MNIST1 and {pair} > {space}"


FIGURE5 = [
    Claim(
        "figure5",
        "figure 5: Jacobians of two halves of MNIST are more alike than of MNIST and Fashion-MNIST.",
        {space: less(similarity("MNIST2", space), similarity("Fashion-MNIST", space)) for space in SPACES},
        "similarity, difference: {each:+.2f}",
    ),
    Claim(
        "figure5",
        "figure 5: Jacobians of MNIST and Fashion-MNIST have nearly no similarity.",
        {space: stored(f"similarity > same start > MNIST1 and Fashion-MNIST > {space}") for space in SPACES},
        "similarity: {each:.2f}",
        "Our networks share their start and were trained for {settings > epochs} epochs: even the untrained one agrees "
        "to {similarity > same start > MNIST1 and untrained > function > mean:.2f} in function space. From different "
        "starts it is {similarity > different starts > MNIST1 and Fashion-MNIST > parameters > mean:.2f} in parameter "
        "space, but {similarity > different starts > MNIST1 and MNIST1 > parameters > mean:.2f} for two networks of "
        "MNIST1: how near to zero it is depends on the start more than on the task.",
        below(0.1),
    ),
]


# Figure 6.

TEN = "context points > 10"
PUBLISHED, RBF, ABLR = "finite NTK, as published", "RBF, source", "ABLR, source"


def sinusoid_gap(other: str, points: int = 10) -> Reading:
    """RMSE of the finite NTK as published, less that of another method."""
    return less(*(f"context points > {points} > {name} > rmse > by source > *" for name in (PUBLISHED, other)))


FIGURE6 = [
    Claim(
        "sinusoids",
        "figure 6: The finite NTK is as good as an RBF process of the source task, or better.",
        {"gap": sinusoid_gap(RBF)},
        f"RMSE with 10 points, finite NTK less {RBF}: {{gap:+.2f}}",
        f"The RBF process fails on some tasks and does well on most: its RMSE is {{{TEN} > {RBF} > rmse > mean:.2f}} "
        f"in the mean and {{{TEN} > {RBF} > rmse > median:.2f}} in the median, that of the finite NTK "
        f"{{{TEN} > {PUBLISHED} > rmse > mean:.2f}} and {{{TEN} > {PUBLISHED} > rmse > median:.2f}}. With 5 points "
        f"the difference is {{few:+.2f}}.",
        behind,
        {"few": sinusoid_gap(RBF, 5)},
    ),
    Claim(
        "sinusoids",
        "figure 6: The finite NTK is clearly ahead of adaptive Bayesian linear regression (ABLR).",
        {"gap": sinusoid_gap(ABLR)},
        f"RMSE with 10 points, finite NTK less {ABLR}: {{gap:+.2f}}",
        "Over {settings > sources} source tasks the difference is as large as its spread. With 20 points it is "
        f"{{many:+.2f}}, and ABLR's 95 % intervals cover {{100 * {TEN} > {ABLR} > coverage > mean:.0f}} % with 10, "
        f"those of the finite NTK {{100 * {TEN} > {PUBLISHED} > coverage > mean:.0f}} %.",
        behind,
        {"many": sinusoid_gap(ABLR, 20)},
    ),
    Claim(
        "sinusoids",
        "figure 6, appendix: A transferred deep kernel underfits.",
        {name: sinusoid_gap(f"deep kernel, {name}") for name in ("source", "shared")},
        "RMSE with 10 points, finite NTK less deep kernel, by hyperparameters: {each:+.2f}",
        "With the hyperparameters of the source tasks the deep kernel underfits. With hyperparameters that all tasks "
        f"share, its RMSE is {{{TEN} > deep kernel, shared > rmse > mean:.2f}}, that of the finite NTK "
        f"{{{TEN} > {PUBLISHED} > rmse > mean:.2f}}.",
        behind,
    ),
    Claim(
        "sinusoids",
        "figure 6: The finite NTK's predictive distributions are reasonable.",
        {"off": with_error(f"{TEN} > {PUBLISHED} > coverage", "settings > sources") - 0.95},
        f"95 % intervals cover {{100 * {TEN} > {PUBLISHED} > coverage > mean:.0f}} % "
        f"(RBF {{100 * {TEN} > {RBF} > coverage > mean:.0f}} %)",
        holds=within(0.1),
    ),
]


# Figure 7.

YEARS, FURTHER, FACES = "2012 to 2015", "2000 to 2015", "new faces"


def errors(case: str, points: int | str, method: str) -> str:
    """RMSE of a contender with so many adaptation points."""
    return f"parts > ? > {case} > {points} points > * > {method} > rmse"


def gap_of(case: str, points: int | str, first: str, second: str) -> Reading:
    """RMSE of the first less that of the second."""
    return less(errors(case, points, first), errors(case, points, second))


def gained(case: str, few: int, many: int, method: str) -> Reading:
    """RMSE with few points less RMSE with many."""
    return less(errors(case, few, method), errors(case, many, method))


def kept(name: str, key: str = "rmse", *, case: str = f"{YEARS} > 300") -> str:
    """Path of a mean over seeds."""
    return f"results > {case} > {name} > {key} > mean"


def read_faces(metrics: Metrics) -> dict[str, Interval]:
    return {f"{count}:": gap_of(FACES, count, LAST, LINEARIZED)(metrics) for count in metrics["results"][FACES]}


def read_few(metrics: Metrics) -> dict[str, Interval]:
    """The advantage over the last layer with 10 points less that with 100."""
    few, many = (
        {seed: error - own[seed] for seed, error in last.items()}
        for last, own in ([select(metrics, errors(FACES, n, x)) for x in (LAST, LINEARIZED)] for n in (10, 100))
    )
    return {"gap": pair(few, many)}


FACES_METHODS = (LAST, EVERYTHING, LINEARIZED, NTK)


def read_late(metrics: Metrics) -> str:
    """The methods that are not shown to improve."""
    gains = {name: gained(FACES, 10, 100, name)(metrics) for name in FACES_METHODS}
    return " and ".join(name for name, gain in gains.items() if combine([gain]) != YES)


STAGNATION = gained(YEARS, 30, 300, LAST)
REACHED = gap_of(YEARS, 300, LONGER, NTK)

MORE_FACES = "{settings > seeds} seeds; with the first 8 of them the intervals contained zero."

FIGURE7 = [
    Claim(
        "malaria",
        "figure 7a: The finite NTK improves with the adaptation points.",
        {"gap": gained(YEARS, 10, 300, NTK)},
        "RMSE with 10 points less that with 300: {gap:+.3f}",
    ),
    Claim(
        "malaria",
        "figure 7a: The finite NTK is ahead of no retraining, and of a last layer retrained.",
        {"stays": gap_of(YEARS, 300, NTK, STAYS), "last": gap_of(YEARS, 300, NTK, LAST)},
        "RMSE with 300 points, less no retraining {stays:+.3f}, less last layer {last:+.3f}",
        f"The years differ little (RMSE {{{kept(STAYS)}:.3f}} as it is), and a process with mean zero has to learn the "
        f"map anew: with the network as its mean the same kernel reaches {{{kept(LINEARIZED)}:.3f}} instead of "
        f"{{{kept(NTK)}:.3f}}. From 2000 to 2015, a larger shift, the differences are {{far:+.3f}} and "
        "{far last:+.3f}.",
        behind,
        {"far": gap_of(FURTHER, 300, NTK, STAYS), "far last": gap_of(FURTHER, 300, NTK, LAST)},
    ),
    Claim(
        "malaria",
        "figure 7a: The last layer stagnates, marginally better than no retraining.",
        {"little": 0.05 * stored(kept(STAYS)) - STAGNATION},
        "RMSE with 30 points less that with 300: {gap:+.3f}",
        "Our budget of {settings > epochs} epochs of Adam is enough for a last layer: six times as many change its "
        "RMSE with 300 points by {longer:+.3f}. A budget that ends before the layer has learned would stagnate; the "
        "paper's region, network and budget are not in its text.",
        facts={"gap": STAGNATION, "longer": gap_of(YEARS, 300, LONGER, LAST)},
    ),
    Claim(
        "malaria",
        "figure 7a: Six times the epochs bring the last layer to the finite NTK, for far more time.",
        {
            "behind": gap_of(YEARS, 300, LAST, NTK),
            "reached": 0.1 * stored(kept(NTK)) - REACHED,
            "longer": stored(kept(LONGER, "seconds")) - 2 * stored(kept(NTK, "seconds")),
        },
        f"RMSE with 300 points less the finite NTK's: {{behind:+.3f}}, with six times the epochs {{gap:+.3f}}; "
        f"{{{kept(LONGER, 'seconds')}:.2g}} against {{{kept(NTK, 'seconds')}:.1g}} s",
        "The last layer is ahead of the finite NTK with the first budget already, so more epochs have nothing to "
        "bring. The process has a mean of zero; see above.",
        facts={"gap": REACHED},
    ),
    Claim(
        "olivetti",
        "figure 7b: The linearized network is ahead for every number of adaptation points.",
        read_faces,
        "last layer less linearized, degrees, {each:+.2f}",
        f"The network knows the angle of new faces to {{{kept(STAYS, case=f'{FACES} > 10')}:.1f}} of 30 degrees "
        "without adaptation, and a few points teach nobody much: contenders are apart by less than the spread over "
        f"{{settings > seeds}} seeds until there are many. Fine-tuning of all layers with 100 points less the "
        f"linearized network: {{tuned:+.2f}}.",
        facts={"tuned": gap_of(FACES, 100, EVERYTHING, LINEARIZED)},
        limits=MORE_FACES,
    ),
    Claim(
        "olivetti",
        "figure 7b: The linearized network's advantage is largest with few points.",
        read_few,
        "advantage over the last layer, 10 points less 100: {gap:+.2f}",
        "Ten points move the linearized network little from where it was (no retraining less it: {stays:+.2f}), so no "
        "advantage can show; with 100 points it uses all layers where the last layer has used up what it can.",
        facts={"stays": gap_of(FACES, 10, STAYS, LINEARIZED)},
    ),
    Claim(
        "olivetti",
        "figure 7b: All methods improve with more points.",
        {name: gained(FACES, 10, 100, name) for name in FACES_METHODS},
        "RMSE with 10 points less that with 100: {each:+.2f}",
        "All do in the mean; for {late} the spread over {settings > seeds} draws of faces is as large as what 90 more "
        "points bring.",
        facts={"late": read_late},
        limits=MORE_FACES,
    ),
]


# Table 1.


def read_layers(metrics: Metrics) -> dict[str, Any]:
    """All layers less the top block in points; of the GAN of CIFAR-10 where it was run, else of MNIST."""
    part = "gan" if "all" in metrics["parts"].get("gan", {}).get("rows", {}) else "mnist"
    gap = less(*(f"parts > {part} > rows > {top} > {OURS} > * > accuracy" for top in ("all", "1")), times=100)
    return {"gap": gap(metrics), "part": part, "labels": metrics["parts"][part]["labels"]}


def read_draws(metrics: Metrics) -> str:
    """How variational inference compares, in words."""
    by = read_transfer(FEATURES, f"{FEATURES}, vi")(metrics)
    alike = "VI is ahead of MAP" if combine(by.values()) == NO else "the two differ by less than the interval"
    return f"Over {max(gap.count for gap in by.values())} draws with up to {list(by)[-1]} {alike}"


TABLE1 = [
    Claim(
        "table1_mu",
        "table 1: Linearizing all layers is slightly better than the top layer alone.",
        read_layers,
        "DCGAN discriminator ({part}), all layers less the top block: {gap:+.1f} points",
        "{labels} labels instead of 50,000: the lower layers bring parameters, but not the examples to tell which of "
        "them help. The paper gains 2.4 points (70.28 to 72.65 %) with all labels.",
    ),
    Claim(
        "transfer",
        "table 1: Variational inference is slightly behind MAP in accuracy.",
        read_transfer(FEATURES, f"{FEATURES}, vi"),
        "MAP less VI, points ({setting}): {each:+.1f}",
        "{draws}; the paper's 0.8 points are those of 50,000 labels.",
        facts={"setting": read_setting, "draws": read_draws},
    ),
]

PAPER = Paper(
    "Maddox et al. 2021",
    "Fast Adaptation with Linearized Neural Networks",
    [*FIGURE2, *FIGURE3, *FIGURE4, *FIGURE5, *FIGURE6, *FIGURE7, *TABLE1],
    picture="figure2",
)
