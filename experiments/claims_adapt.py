"""Claims of Maddox et al. 2021 on adaptation: figures 6 and 7, table 1."""

from __future__ import annotations

from experiments import gains
from experiments.claims_maddox import MADDOX
from experiments.claims_mu import FEATURES, transfer_gap, transferred, verdict
from experiments.claims_networks import LINEARIZED, NTK
from experiments.table1_mu import OURS
from experiments.verdicts import (
    NO,
    YES,
    Finding,
    Metrics,
    ahead,
    below,
    every,
    of_error,
    paired,
    plainly,
    said,
    shifted,
    turned,
    within,
)

STAYS, LAST, LONGER = "no retraining", "last layer, as published", "last layer, as published, 6 x epochs"
YEARS, FURTHER, FACES = "2012 to 2015", "2000 to 2015", "new faces"


# Figure 6.


def sinusoid_gap(metrics: Metrics, other: str, points: str) -> dict[str, float]:
    """RMSE of the finite NTK as published, less that of another."""
    rows = metrics["context points"][points]
    own, theirs = (rows[name]["rmse"]["by source"] for name in ("finite NTK, as published", other))
    return gains.interval([a - b for a, b in zip(own, theirs, strict=True)])


def sinusoids_ahead(metrics: Metrics, other: str, why: str) -> Finding:
    gap = sinusoid_gap(metrics, other, "10")
    return Finding(f"RMSE with 10 points, finite NTK less {other}: {said(gap)}", ahead(turned(gap)), why)


@MADDOX.claim("figure 6", "sinusoids", "The finite NTK is as good as an RBF process of the source task, or better.")
def sinusoids_rbf(metrics: Metrics) -> Finding:
    rows = metrics["context points"]["10"]
    why = (
        "The RBF process fails on some tasks and does well on most: its RMSE is "
        f"{rows['RBF, source']['rmse']['mean']:.2f} in the mean and {rows['RBF, source']['rmse']['median']:.2f} in the "
        f"median, that of the finite NTK {rows['finite NTK, as published']['rmse']['mean']:.2f} and "
        f"{rows['finite NTK, as published']['rmse']['median']:.2f}. With 5 points the difference is "
        f"{said(sinusoid_gap(metrics, 'RBF, source', '5'))}."
    )
    return sinusoids_ahead(metrics, "RBF, source", why)


@MADDOX.claim("figure 6", "sinusoids", "The finite NTK is clearly ahead of adaptive Bayesian linear regression (ABLR).")
def sinusoids_ablr(metrics: Metrics) -> Finding:
    rows = metrics["context points"]["10"]
    why = (
        f"Over {metrics['settings']['sources']} source tasks the difference is as large as its spread. With 20 points "
        f"it is {said(sinusoid_gap(metrics, 'ABLR, source', '20'))}, and ABLR's 95 % intervals cover "
        f"{100 * rows['ABLR, source']['coverage']['mean']:.0f} % with 10, those of the finite NTK "
        f"{100 * rows['finite NTK, as published']['coverage']['mean']:.0f} %."
    )
    return sinusoids_ahead(metrics, "ABLR, source", why)


@MADDOX.claim("figure 6, appendix", "sinusoids", "A transferred deep kernel underfits.")
def sinusoids_deep(metrics: Metrics) -> Finding:
    return sinusoids_ahead(metrics, "deep kernel, source", "")


@MADDOX.claim("figure 6", "sinusoids", "The finite NTK's predictive distributions are reasonable.")
def sinusoids_coverage(metrics: Metrics) -> Finding:
    rows, count = metrics["context points"]["10"], metrics["settings"]["sources"]
    own = of_error(rows["finite NTK, as published"]["coverage"], count)
    rbf = rows["RBF, source"]["coverage"]["mean"]
    return Finding(
        f"95 % intervals cover {100 * own['mean']:.0f} % (RBF {100 * rbf:.0f} %)", within(shifted(own, -0.95), 0.1)
    )


# Figure 7.


def error_by_seed(metrics: Metrics, case: str, points: int, method: str) -> dict[str, float]:
    """RMSE of a contender with so many adaptation points."""
    sizes = next(iter(metrics["parts"].values()))
    return {seed: one[method]["rmse"] for seed, one in sizes[case][f"{points} points"].items()}


def gap_of(metrics: Metrics, case: str, points: int, first: str, second: str) -> dict[str, float]:
    """RMSE of the first less that of the second."""
    return paired(*(error_by_seed(metrics, case, points, name) for name in (first, second)))


def gained(metrics: Metrics, case: str, points: tuple[int, int], method: str) -> dict[str, float]:
    """RMSE with few points less RMSE with many."""
    return paired(*(error_by_seed(metrics, case, count, method) for count in points))


@MADDOX.claim("figure 7a", "malaria", "The finite NTK improves with the adaptation points.")
def malaria_improves(metrics: Metrics) -> Finding:
    gap = gained(metrics, YEARS, (10, 300), NTK)
    return Finding(f"RMSE with 10 points less that with 300: {said(gap, 3)}", ahead(gap))


@MADDOX.claim("figure 7a", "malaria", "The finite NTK is ahead of no retraining, and of a last layer retrained.")
def malaria_ahead(metrics: Metrics) -> Finding:
    near, far = ([gap_of(metrics, years, 300, NTK, name) for name in (STAYS, LAST)] for years in (YEARS, FURTHER))
    mean = {name: metrics["results"][YEARS]["300"][name]["rmse"]["mean"] for name in (NTK, LINEARIZED, STAYS)}
    why = (
        f"The years differ little (RMSE {mean[STAYS]:.3f} as it is), and a process with mean zero has to learn the map "
        f"anew: with the network as its mean the same kernel reaches {mean[LINEARIZED]:.3f} instead of "
        f"{mean[NTK]:.3f}. From 2000 to 2015, a larger shift, the differences are {said(far[0], 3)} and "
        f"{said(far[1], 3)}."
    )
    numbers = f"RMSE with 300 points, less no retraining {said(near[0], 3)}, less last layer {said(near[1], 3)}"
    return Finding(numbers, every(ahead(turned(gap)) for gap in near), why)


@MADDOX.claim("figure 7a", "malaria", "The last layer stagnates, marginally better than no retraining.")
def malaria_stagnates(metrics: Metrics) -> Finding:
    gap = gained(metrics, YEARS, (30, 300), LAST)
    stays = metrics["results"][YEARS]["300"][STAYS]["rmse"]["mean"]
    longer = gap_of(metrics, YEARS, 300, LONGER, LAST)
    why = (
        f"Our budget of {metrics['settings']['epochs']} epochs of Adam is enough for a last layer: six times as many "
        f"change its RMSE with 300 points by {said(longer, 3)}. A budget that ends before the layer has learned would "
        "stagnate; the paper's region, network and budget are not in its text."
    )
    return Finding(f"RMSE with 30 points less that with 300: {said(gap, 3)}", below(gap, 0.05 * stays), why)


@MADDOX.claim("figure 7a", "malaria", "Six times the epochs bring the last layer to the finite NTK, for far more time.")
def malaria_longer(metrics: Metrics) -> Finding:
    gap = gap_of(metrics, YEARS, 300, LONGER, NTK)
    rows = metrics["results"][YEARS]["300"]
    seconds = [rows[name]["seconds"]["mean"] for name in (LONGER, NTK)]
    numbers = f"RMSE with 300 points less the finite NTK's: {said(gap, 3)}; {seconds[0]:.2g} against {seconds[1]:.1g} s"
    reached = below(gap, 0.1 * rows[NTK]["rmse"]["mean"])
    return Finding(numbers, every([reached, plainly(seconds[0] > 2 * seconds[1])]))


@MADDOX.claim("figure 7b", "olivetti", "The linearized network is ahead for every number of adaptation points.")
def faces_ahead(metrics: Metrics) -> Finding:
    counts = [int(count) for count in metrics["results"][FACES]]
    gaps = {count: gap_of(metrics, FACES, count, LAST, LINEARIZED) for count in counts}
    numbers = ", ".join(f"{count}: {said(gap)}" for count, gap in gaps.items())
    stays = metrics["results"][FACES]["10"][STAYS]["rmse"]["mean"]
    why = (
        f"The network knows the angle of new faces to {stays:.1f} of 30 degrees without adaptation, and a few points "
        "teach nobody much: contenders are apart by less than the spread over "
        f"{metrics['settings']['seeds']} seeds until there are many. Fine-tuning of all layers with 100 points less "
        f"the linearized network: {said(gap_of(metrics, FACES, 100, 'all layers, tuned', LINEARIZED))}."
    )
    return Finding(f"last layer less linearized, degrees, {numbers}", every(ahead(gap) for gap in gaps.values()), why)


@MADDOX.claim("figure 7b", "olivetti", "The linearized network's advantage is largest with few points.")
def faces_few(metrics: Metrics) -> Finding:
    few, many = (
        {
            seed: error - error_by_seed(metrics, FACES, count, LINEARIZED)[seed]
            for seed, error in error_by_seed(metrics, FACES, count, LAST).items()
        }
        for count in (10, 100)
    )
    gap = paired(few, many)
    stays = gap_of(metrics, FACES, 10, STAYS, LINEARIZED)
    why = (
        f"Ten points move the linearized network little from where it was (no retraining less it: {said(stays)}), so "
        "no advantage can show; with 100 points it uses all layers where the last layer has used up what it can."
    )
    return Finding(f"advantage over the last layer, 10 points less 100: {said(gap)}", ahead(gap), why)


@MADDOX.claim("figure 7b", "olivetti", "All methods improve with more points.")
def faces_improve(metrics: Metrics) -> Finding:
    methods = (LAST, "all layers, tuned", LINEARIZED, NTK)
    gaps = {name: gained(metrics, FACES, (10, 100), name) for name in methods}
    numbers = ", ".join(f"{name} {said(gap)}" for name, gap in gaps.items())
    late = " and ".join(name for name, gap in gaps.items() if ahead(gap) != YES)
    why = (
        f"All do in the mean; for {late} the spread over {metrics['settings']['seeds']} draws of faces is as large as "
        "what 90 more points bring."
    )
    return Finding(f"RMSE with 10 points less that with 100: {numbers}", every(ahead(g) for g in gaps.values()), why)


# Table 1.


@MADDOX.claim("table 1", "table1_mu", "Linearizing all layers is slightly better than the top layer alone.")
def all_layers(metrics: Metrics) -> Finding:
    part = "gan" if "all" in metrics["parts"].get("gan", {}).get("rows", {}) else "mnist"
    found = metrics["parts"][part]
    whole, top = (
        {draw: 100 * one["accuracy"] for draw, one in found["rows"][which][OURS].items()} for which in ("all", "1")
    )
    gap = paired(whole, top)
    why = (
        f"{found['labels']} labels instead of 50,000: the lower layers bring parameters, but not the examples to tell "
        "which of them help. The paper gains 2.4 points (70.28 to 72.65 %) with all labels."
    )
    return Finding(
        f"DCGAN discriminator ({part}), all layers less the top block: {said(gap, 1)} points", ahead(gap), why
    )


@MADDOX.claim("table 1", "transfer", "Variational inference is slightly behind MAP in accuracy.")
def vi_behind(metrics: Metrics) -> Finding:
    by = transfer_gap(metrics, FEATURES, f"{FEATURES}, vi")
    found, draws = verdict(by), max(int(gap["count"]) for gap in by.values())
    alike = "VI is ahead of MAP" if found == NO else "the two differ by less than the interval"
    why = f"Over {draws} draws with up to {list(by)[-1]} {alike}; the paper's 0.8 points are those of 50,000 labels."
    return Finding(transferred(metrics, "MAP less VI", by), found, why)
