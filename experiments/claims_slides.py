"""Claims of the slides on linearized Laplace and of the talk on function space."""

from __future__ import annotations

from experiments import gains
from experiments.verdicts import (
    Finding,
    Metrics,
    Paper,
    ahead,
    below,
    every,
    of_error,
    paired,
    said,
    shifted,
    single,
    turned,
    value,
)

SLIDES = Paper("Allingham, Antorán, Fortuin 2023", "Linearised neural networks (slides)")
TALK = Paper("Damianou 2020", "Deep Learning in the Function Space (talk)")
JOINT, TURNED = "joint log likelihood", "joint log likelihood, turned by 45"
LAPLACE, EVIDENCE, ENSEMBLE = "linnet", "linnet, the evidence alone", "ensemble of 5"


# The slides: ensembles and joint predictions.


@SLIDES.claim("ensembles", "joint", "An ensemble is ahead of one network, in marginal and in joint log likelihood.")
def ensemble_ahead(metrics: Metrics) -> Finding:
    by = metrics["summary"][ENSEMBLE]["less MAP"][JOINT]
    numbers = ", ".join(f"kappa = {kappa}: {said(by[kappa])}" for kappa in ("1", "5"))
    return Finding(f"less MAP, {numbers}", every(ahead(gap) for gap in by.values()))


@SLIDES.claim("joint predictions", "joint", "In joint log likelihood, linearized Laplace is ahead of one network.")
def laplace_joint(metrics: Metrics) -> Finding:
    by = {name: metrics["summary"][name]["less MAP"][JOINT]["5"] for name in (LAPLACE, EVIDENCE)}
    numbers = ", ".join(f"{name} {said(gap, 1)}" for name, gap in by.items())
    return Finding(f"kappa = 5, less MAP: {numbers}", every(ahead(gap) for gap in by.values()))


@SLIDES.claim("joint predictions", "joint", "Ensembles are poor at joint predictions: linearized Laplace is ahead.")
def laplace_over_ensemble(metrics: Metrics) -> Finding:
    upright, turned_by = (metrics["summary"][EVIDENCE]["less ensemble"][key]["5"] for key in (JOINT, TURNED))
    safe = metrics["summary"][LAPLACE]["less ensemble"][JOINT]["5"]
    numbers = f"less an ensemble of 5, kappa = 5, upright {said(upright, 1)}, turned by 45° {said(turned_by, 1)}"
    why = (
        f"A network of 1,610 parameters, {metrics['settings']['seeds']} seeds and digits instead of ResNet-18 and "
        "CIFAR-100: upright both know most digits. This is with the prior of largest evidence; narrowed so that "
        f"marginal predictions stay good, Laplace is at {said(safe, 1)} upright. These sizes are the third tried."
    )
    return Finding(numbers, every([ahead(upright), ahead(turned_by)]), why)


@SLIDES.claim("joint predictions", "laplace_cifar", "The same with a ResNet of CIFAR: Laplace is ahead of the network.")
def laplace_joint_cifar(metrics: Metrics) -> Finding:
    rows = metrics["parts"][metrics["settings"]["shown"]]
    joint = {name: rows[name][JOINT]["5"] for name in ("MAP", "last layer", "kron", "samples") if name in rows}
    gaps = [single(score - joint["MAP"]) for name, score in joint.items() if name != "MAP"]
    if not gaps:
        raise LookupError("structures")
    numbers = ", ".join(f"{name} {score:.1f}" for name, score in joint.items())
    least, most = (pick(gap["mean"] for gap in gaps) for pick in (min, max))
    why = f"One network and one draw have no interval; structures are at {least:+.1f} to {most:+.1f} over the network."
    return Finding(f"ResNet-20, CIFAR-10, kappa = 5: {numbers}", every(ahead(gap) for gap in gaps), why)


@SLIDES.claim("ensembles", "laplace_digits", "Ensembles improve on one network, and nothing else comes up to them.")
def nothing_else(metrics: Metrics) -> Finding:
    by: dict[str, dict[str, float]] = {ENSEMBLE: {}, "auto, tune()": {}}
    for case, seeds in metrics["parts"].items():
        for seed, one in seeds.items():
            for name in by:
                by[name][f"{case}, {seed}"] = one["methods"][name]["nll"]
    gap = paired(by[ENSEMBLE], by["auto, tune()"])
    laplace = of_error(metrics["over all"]["auto, tune()"]["NLL less MAP"], len(by[ENSEMBLE]))
    numbers = f"NLL of digits, ensemble less Laplace {said(gap, 3)}; Laplace less MAP {said(laplace, 3)}"
    return Finding(numbers, ahead(turned(gap)))


# The slides: error bars and the prior.


@SLIDES.claim("don't linearise?", "not_linearized", "The network with weights drawn from its posterior underfits.")
def drawn_underfits(metrics: Metrics) -> Finding:
    gaps = {
        name: metrics["summary"][name]["evidence"]["training"]["not linearized less linear"]["nll"]
        for name in ("curve", "digits")
    }
    numbers = ", ".join(f"{name} {said(gap)}" for name, gap in gaps.items())
    return Finding(f"training NLL less the linear model's: {numbers}", every(ahead(gap) for gap in gaps.values()))


@SLIDES.claim("examples", "joint", "Error bars grow away from the data.")
def error_bars_grow(metrics: Metrics) -> Finding:
    auroc = metrics["summary"][EVIDENCE]["scores"]["AUROC"]["Fashion-MNIST"]
    by = auroc["variance of the logits"]
    why = (
        "On curves they do (figure 3 above). Believed, not tested: the variance of a logit grows with its gradient, "
        "and that with the activations, whether an image shows a digit or not. The probabilities do tell them apart: "
        f"AUROC {value(auroc['1 - largest probability'])}."
    )
    numbers = f"AUROC of Fashion-MNIST against MNIST by the variance of the logits: {value(by)}"
    return Finding(numbers, ahead(shifted(by, -0.5)), why)


def test_at(metrics: Metrics, where: str) -> dict[str, float]:
    """By network: test log likelihood at the lambda where something is largest."""
    found = {}
    for i, network in enumerate(metrics["networks"]):
        axis = network["axis"]
        best = max(range(len(axis[where])), key=axis[where].__getitem__)
        found[str(i)] = axis["test"][best]
    return found


@SLIDES.claim("pathologies", "evidence", "With batch norm, the largest evidence does not give the best error bars.")
def evidence_misleads(metrics: Metrics) -> Finding:
    gap = paired(test_at(metrics, "linear mode"), test_at(metrics, "network"))
    grid = metrics["summary"]["grid"]
    best, chosen = (grid[name]["log10 lambda"]["mean"] for name in ("test", "network"))
    numbers = f"test log likelihood, evidence at the linear mode less at the network {said(gap)}; "
    return Finding(numbers + f"log10 lambda {chosen:.2f}, best {best:.2f}", ahead(gap))


@SLIDES.claim("wrong evidence", "evidence", "Scaling a normalized layer changes the evidence's choice.")
def evidence_not_invariant(metrics: Metrics) -> Finding:
    def tests(kind: str, k: str) -> dict[str, float]:
        return {str(i): one["choices"][kind][k]["test"] for i, one in enumerate(metrics["networks"])}

    kinds = ("shared, at the network", "layerwise, at the network")
    shared, layerwise = (paired(tests(kind, "1"), tests(kind, "0.1")) for kind in kinds)
    numbers = f"test log likelihood lost by a scale of 0.1: {said(shared)}; with a prior for each layer "
    return Finding(numbers + said(layerwise), ahead(shared))


@SLIDES.claim("infinite width", "snelson", "A network of 50 units looks like its Gaussian process.")
def fifty_units(metrics: Metrics) -> Finding:
    def apart(units: int) -> dict[str, float]:
        name = f"Bayesian network (MCMC), {units}"
        return {seed: one["posteriors"][name]["means apart"] for seed, one in metrics["parts"].items()}

    fifty, closer = gains.interval(list(apart(50).values())), paired(apart(10), apart(50))
    numbers = f"means apart by {value(fifty)} of the process's deviations; 10 units {said(closer)} more"
    return Finding(numbers, every([below(fifty, 0.5), ahead(closer)]))


# The talk.


@TALK.claim("initialization", "snelson", "With width, the kernel of a network as drawn tends to the process's.")
def kernels_converge(metrics: Metrics) -> Finding:
    slopes = metrics["summary"]["slopes"]
    numbers = ", ".join(f"{name} {said(slope)}" for name, slope in slopes.items())
    verdict = every(ahead(turned(slope)) for slope in slopes.values())
    return Finding(f"distance by width, slope of the logarithms: {numbers}", verdict)


@TALK.claim("5 or 90 epochs", "figure5", "The same structure trained for 5 and for 90 epochs is not the same function.")
def epochs_matter(metrics: Metrics) -> Finding:
    seeds = len(next(iter(metrics["parts"].values()))["epochs"])
    early = of_error(metrics["epochs, against 90"]["5"]["function"], seeds)
    removed = metrics["a hidden unit removed"]["function"]["mean"]
    numbers = f"similarity in function space {value(early, 3)}; with a hidden unit removed {removed:.4f}"
    why = f"{seeds} seeds: the interval of their mean reaches 1, the similarity of a network with itself."
    return Finding(numbers, below(early, 1), why)


@TALK.claim("step function", "deep_gp", "Two layers of processes learn a step better than one.")
def deep_process(metrics: Metrics) -> Finding:
    runs = metrics["parts"][metrics["settings"]["now"]]
    gaps = {}
    for key, name in (("nll", "NLL"), ("RMSE to the step", "RMSE")):
        one, deep = ({s: run[kind][key] for s, run in runs.items()} for kind in ("RBF process", "deep GP, 2 layers"))
        gaps[name] = paired(one, deep)
    numbers = ", ".join(f"{name} {said(gap, 3)}" for name, gap in gaps.items())
    tried = "settings of the deep one are the last of four tried"
    return Finding(f"one less two layers: {numbers}; {tried}", every(ahead(gap) for gap in gaps.values()))
