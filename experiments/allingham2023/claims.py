"""Claims of the slides on linearized Laplace."""

from __future__ import annotations

from typing import Any

from experiments.judge import Claim, Interval, Metrics, Paper, behind, certify, less, over, pair, select, stored, widen

JOINT, TURNED = "joint log likelihood", "joint log likelihood, turned by 45"
LAPLACE, EVIDENCE, ENSEMBLE = "linnet", "linnet, the evidence alone", "ensemble of 5"
TUNED, COOLED = "auto, tune()", "temperature by held-out digits"


def read_structures(metrics: Metrics) -> dict[str, Any]:
    """Structures less the network, of one draw each."""
    rows = metrics["parts"][metrics["settings"]["shown"]]
    joint = {name: rows[name][JOINT]["5"] for name in ("MAP", "last layer", "kron", "samples") if name in rows}
    gaps = {name: Interval(score - joint["MAP"]) for name, score in joint.items() if name != "MAP"}
    if not gaps:
        raise LookupError("structures")
    least, most = (pick(gap.mean for gap in gaps.values()) for pick in (min, max))
    told = ", ".join(f"{name} {score:.1f}" for name, score in joint.items())
    return {**gaps, "told": told, "least": least, "most": most}


def read_unknown(metrics: Metrics) -> dict[str, Any]:
    """Areas under the curve of unknown images, by the variance of the logits, of each structure."""
    rows = metrics["parts"][metrics["settings"]["shown"]]
    found = {f"{name}, {kind}": scores for name, row in rows.items() for kind, scores in row.get("unknown", {}).items()}
    areas = {name: one["variance of the logits"] for name, one in found.items() if "variance of the logits" in one}
    if not areas:
        raise LookupError("unknown")
    plain = [found[name]["1 - largest probability"] for name in areas]
    judged = {name: certify(area > 0.5) for name, area in areas.items()}
    told = f"{min(areas.values()):.3f} to {max(areas.values()):.3f} over {len(areas)} structures and sets"
    return {**judged, "told": told, "least": min(plain), "most": max(plain)}


def read_laplace(metrics: Metrics) -> Interval:
    """NLL of Laplace less MAP, over all networks."""
    gap = metrics["over all"][TUNED]["NLL less MAP"]
    count = len(select(metrics, f"parts > * > * > methods > {ENSEMBLE} > nll"))
    return widen(gap["mean"], gap["error"], count)


def read_evidence(metrics: Metrics) -> dict[str, Interval]:
    """By network: test log likelihood at the lambda where the evidence of the linear mode is largest, less the same
    for the evidence of the network."""

    def at(where: str) -> dict[str, float]:
        axes = [network["axis"] for network in metrics["networks"]]
        best = [max(range(len(axis[where])), key=axis[where].__getitem__) for axis in axes]
        return {str(i): axis["test"][j] for i, (axis, j) in enumerate(zip(axes, best, strict=True))}

    return {"gap": pair(at("linear mode"), at("network"))}


def invariance(kind: str) -> Any:
    """Test log likelihood that a scale of 0.1 loses."""
    return less(*(f"networks > * > choices > {kind}, at the network > {k} > test" for k in ("1", "0.1")))


def apart(units: int) -> str:
    return f"parts > * > posteriors > Bayesian network (MCMC), {units} > means apart"


AUROC = f"summary > {EVIDENCE} > scores > AUROC > Fashion-MNIST"

JOINT_LIMITS = (
    "A network of 1,610 parameters, {settings > seeds} seeds and digits instead of ResNet-18 and CIFAR-100. This is "
    "with the prior of largest evidence; narrowed so that marginal predictions stay good, Laplace is at {safe:+.1f} "
    "upright. These sizes are the third tried."
)

PAPER = Paper(
    "Allingham, Antorán, Fortuin 2023",
    "Linearised neural networks (slides)",
    [
        Claim(
            "joint",
            "ensembles: An ensemble is ahead of one network, in marginal and in joint log likelihood.",
            lambda m: {
                f"kappa {k}": Interval.parse(gap) for k, gap in m["summary"][ENSEMBLE]["less MAP"][JOINT].items()
            },
            "less MAP, kappa = 1: {kappa 1:+.2f}, kappa = 5: {kappa 5:+.2f}",
        ),
        Claim(
            "joint",
            "joint predictions: In joint log likelihood, linearized Laplace is ahead of one network.",
            {name: stored(f"summary > {name} > less MAP > {JOINT} > 5") for name in (LAPLACE, EVIDENCE)},
            "kappa = 5, less MAP: {each:+.1f}",
        ),
        Claim(
            "joint",
            "joint predictions: Ensembles are poor at joint predictions: linearized Laplace is ahead.",
            {
                name: stored(f"summary > {EVIDENCE} > less ensemble > {key} > 5")
                for name, key in (("upright", JOINT), ("turned", TURNED))
            },
            "less an ensemble of 5, kappa = 5, upright {upright:+.1f}, turned by 45° {turned:+.1f}",
            f"Upright both know most digits. {JOINT_LIMITS}",
            facts={"safe": stored(f"summary > {LAPLACE} > less ensemble > {JOINT} > 5")},
            limits=f"{JOINT_LIMITS} With the first 5 seeds the interval upright contained zero.",
        ),
        Claim(
            "laplace_cifar",
            "joint predictions: The same with a ResNet of CIFAR: Laplace is ahead of the network.",
            read_structures,
            "ResNet-20, CIFAR-10, kappa = 5: {told}",
            "One network and one draw have no interval; structures are at {least:+.1f} to {most:+.1f} over the "
            "network.",
        ),
        Claim(
            "laplace_digits",
            "ensembles: Ensembles improve on one network, and nothing else comes up to them.",
            {
                name: less(*(f"parts > * > * > methods > {one} > nll" for one in (ENSEMBLE, other)))
                for name, other in (("MAP", "MAP"), ("Laplace", TUNED), ("temperature", COOLED))
            },
            "NLL of digits, ensemble less {each:+.3f}; Laplace less MAP {laplace:+.3f}",
            "A temperature that held-out digits choose comes close: the interval of the difference contains zero. It "
            "needs digits with labels that the ensemble does without.",
            facts={"laplace": read_laplace},
            holds=behind,
            limits="{settings > networks} networks of each kind; with the first 3 of them the interval of the "
            "temperature contained zero.",
        ),
        Claim(
            "not_linearized",
            "don't linearise?: The network with weights drawn from its posterior underfits.",
            {
                name: stored(f"summary > {name} > evidence > training > not linearized less linear > nll")
                for name in ("curve", "digits")
            },
            "training NLL less the linear model's: {each:+.2f}",
        ),
        Claim(
            "joint",
            "examples: Error bars grow away from the data.",
            {"above": stored(f"{AUROC} > variance of the logits") - 0.5},
            "digits: AUROC of Fashion-MNIST against MNIST by the variance of the logits: {area:.2f}",
            "On curves they do (figure 3 above). Believed, not tested: the variance of a logit grows with its "
            "gradient, and that with the activations, whether an image shows a digit or not. The probabilities do "
            "tell them apart: AUROC {told:.2f}.",
            facts={
                "area": stored(f"{AUROC} > variance of the logits"),
                "told": stored(f"{AUROC} > 1 - largest probability"),
            },
        ),
        Claim(
            "laplace_cifar",
            "examples: Error bars of a ResNet grow away from CIFAR-10.",
            read_unknown,
            "AUROC of Fashion-MNIST and MNIST against CIFAR-10 by the variance of the logits: {told}",
            "The variance ranks unknown images the wrong way round: the variance of a logit grows with the squared "
            "length of the features, and images like those of the training set have long features. Probabilities tell "
            "the images apart: AUROC {least:.2f} to {most:.2f} by the largest probability.",
        ),
        Claim(
            "evidence",
            "pathologies: With batch norm, the largest evidence does not give the best error bars.",
            read_evidence,
            "test log likelihood, evidence at the linear mode less at the network {gap:+.2f}; log10 lambda "
            "{summary > grid > network > log10 lambda > mean:.2f}, best "
            "{summary > grid > test > log10 lambda > mean:.2f}",
        ),
        Claim(
            "evidence",
            "wrong evidence: Scaling a normalized layer changes the evidence's choice.",
            {"shared": invariance("shared")},
            "test log likelihood lost by a scale of 0.1: {shared:+.2f}; with a prior for each layer {layerwise:+.2f}",
            facts={"layerwise": invariance("layerwise")},
        ),
        Claim(
            "snelson",
            "infinite width: A network of 50 units looks like its Gaussian process.",
            {"near": 0.5 - over(apart(50)), "closer": less(apart(10), apart(50))},
            "means apart by {fifty:.2f} of the process's deviations; 10 units {closer:+.2f} more",
            facts={"fifty": over(apart(50))},
        ),
    ],
    picture="snelson",
)
