"""Claims of Zhang et al. 2022."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from experiments.judge import (
    Claim,
    Interval,
    Metrics,
    Paper,
    Reading,
    below,
    certify,
    less,
    select,
    stored,
    unpair,
    unpaired,
    widen,
    within,
)
from experiments.maddox2021.figure2 import exponent, series
from experiments.zhang2022.inversion import FULL

# Figure 2.

SMALL = "spectra > small discriminator"
MLP, CNN = (f"spectra > classifiers > {name}, trained > nfk" for name in ("MLP", "LeNet-5"))
EXPLAIN = "components > 99.5 % > mean"

FIGURE2 = [
    Claim(
        "spectra",
        "figure 2: The NFK of a CNN concentrates on fewer components than that of an MLP.",
        {"gap": unpaired(f"{MLP} > effective rank", f"{CNN} > effective rank", "settings > seeds")},
        f"effective rank {{{CNN} > effective rank > mean:.0f}} against {{{MLP} > effective rank > mean:.0f}}, for 90 % "
        f"{{{CNN} > components > 90 % > mean:.0f}} components against {{{MLP} > components > 90 % > mean:.0f}}",
    ),
    Claim(
        "spectra",
        "figure 2: 100 components explain 99.5 % of the NFK of a trained DCGAN's discriminator.",
        {"count": stored(f"{SMALL} > trained > nfk > {EXPLAIN}")},
        f"{{{SMALL} > trained > nfk > {EXPLAIN}:.0f}} of {{{SMALL} > trained > nfk > n:,}}, "
        f"p = {{{SMALL} > trained > nfk > p:,}}",
        "The kernel divides the gradient of each parameter by its root mean square, which lifts the small ones. "
        f"Without that, as NTK, the same network needs {{{SMALL} > trained > ntk > {EXPLAIN}:.0f}} components, and "
        f"{{{SMALL} > trained > nfk > components for 99.5 % of the squared eigenvalues > mean:.0f}} if it is the "
        "squared eigenvalues that are counted: the paper may mean either. Its GAN is not given.",
        below(150),
    ),
    Claim(
        "spectra",
        "figure 2: An untrained discriminator needs many more components than a trained one.",
        {
            "gap": unpaired(
                *(f"{SMALL} > {x} > nfk > {EXPLAIN.removesuffix(' > mean')}" for x in ("untrained", "trained")),
                "settings > seeds",
            )
        },
        f"{{{SMALL} > untrained > nfk > {EXPLAIN}:.0f}} untrained, {{{SMALL} > trained > nfk > {EXPLAIN}:.0f}} "
        f"trained; difference {{gap:+.0f}}",
        "For the same reason: the division by the root mean square flattens the spectrum of either network. Without "
        f"it, as NTK, the untrained one needs {{{SMALL} > untrained > ntk > {EXPLAIN}:.0f}} and the trained one "
        f"{{{SMALL} > trained > ntk > {EXPLAIN}:.0f}}.",
    ),
]


# Figure 3.


def read_times(metrics: Metrics) -> dict[str, Any]:
    """Seconds and the exponent of the embedding, and where the kernel matrix ends."""
    points = series(metrics["parts"]["time"]["rows"], "n")
    ours, gram = points["linnet"], points["Gram matrix and truncated SVD"]
    (n, seconds), end, power = ours[-1], gram[-1][0], exponent(ours)
    linear = certify(power <= 1.2 and end <= 2**14 < n)
    return {"n": n, "seconds": seconds, "end": end, "power": power, "linear": linear}


def read_ranks(metrics: Metrics) -> dict[str, Any]:
    """The speedup of processes. Processes of one machine are no devices, so a large speedup shows nothing."""
    last = metrics["parts"]["ranks"]["rows"][-1]
    missing = 0.85 * last["ranks"] - last["speedup"]
    return {**last, "faster": Interval(-missing) if missing < 0 else certify(False)}


def read_errors(metrics: Metrics) -> dict[str, Any]:
    part = metrics["parts"]["accuracy"]
    theirs = [row["error"] for row in part["rows"] if row["contender"] == "published algorithm"][-1]
    return {**part, "theirs": theirs, "small": certify(part["error"] < 1e-7)}


FIGURE3 = [
    Claim(
        "embedding_time",
        "figure 3: Embedding takes nearly linear time, also where the kernel matrix ends.",
        read_times,
        "{seconds:.0f} s at n = {n:,}, as n^{power:.1f}; the matrix ends at {end:,} (the paper: 2^14)",
    ),
    Claim(
        "embedding_time",
        "figure 3: More devices speed the embedding up almost linearly.",
        read_ranks,
        "{speedup:.2f} times as fast with {ranks} processes of one thread (the paper: GPUs)",
        "Run with processes on one CPU, each with one thread. No run had several GPUs.",
    ),
    Claim(
        "embedding_time",
        "figure 3: Relative errors of leading eigenvalues are below 1e-7.",
        read_errors,
        "largest of {components}: {error:.0e} (the published algorithm: {theirs:.0e})",
    ),
]


# Tables 1 and 2, figure 7.

WHOLE, ALL_LAYERS, LAST_LAYER = "whole", "activations, all layers", "activations, last layer"


def probe_gap(first: str, second: str) -> Reading:
    """Accuracy of the first less that of the second in points; from standard errors over test images."""

    def read(metrics: Metrics) -> Interval:
        found = metrics["parts"]["gan"]
        probes = (found["probes"][name] for name in (first, second))
        one, other = ({"mean": 100 * probe["accuracy"], "error": 100 * probe["error"]} for probe in probes)
        return unpair(one, other, found["test images"])

    return Reading(read)


def components_less(part: str, other: str) -> Reading:
    """128 components less another representation in points, paired over test images."""
    return stored(f"parts > {part} > 128 components less the others > {other}", 100)


def describe_gan(metrics: Metrics) -> str:
    """How our GAN and its probe differ from the paper's."""
    found = metrics["parts"]["gan"]
    labels = found["training images"]
    few = f", and the probe has at most {labels:,} labels instead of 50,000" if labels < 50_000 else ""
    # The probe of the GAN that `encoders` trains now has not been run: 2,301,376 are those of the one before.
    old = ", and batch norm with which it calls no real image real" if found["parameters"] == 2_301_376 else ""
    count = f"{found['parameters'] / 1e6:.1f} million parameters"
    return f"our GAN is not theirs, which is not given; it has {count}{old}{few}"


def read_more(metrics: Metrics) -> dict[str, Any]:
    """128 components less 32, and 256 less 128."""
    found: dict[str, Any] = {}
    told = []
    for part, name in (("gan", "GAN"), ("vae", "VAE"), ("teacher", "WRN-40-2")):
        gaps = [components_less(part, "32")(metrics), -components_less(part, "256")(metrics)]
        found |= {f"{name}, {i}": gap - (-1) for i, gap in enumerate(gaps)}  # not behind by more than a point
        told.append(f"{name} {gaps[0]:+.1f} and {gaps[1]:+.1f}")
    return {**found, "told": "; ".join(told)}


def read_few(metrics: Metrics) -> dict[str, Any]:
    """Components less activations by the number of labels: the widest interval that the two allow."""
    few = metrics["parts"]["gan"]["few labels"]
    pairs = {labels: (one, few[ALL_LAYERS][labels]) for labels, one in few["128"].items()}
    told = ", ".join(f"{n}: {100 * a['mean']:.1f} and {100 * b['mean']:.1f}" for n, (a, b) in pairs.items())
    return {**{n: Interval.parse(a) - Interval.parse(b) for n, (a, b) in pairs.items()}, "told": told}


PROBES = [
    Claim(
        "nfk_probe",
        "table 1: The Fisher vector of a GAN's discriminator is ahead of its activations.",
        {name.removeprefix("activations, "): probe_gap(WHOLE, name) for name in (LAST_LAYER, ALL_LAYERS)},
        "CIFAR-10, points less activations: {each:+.1f}",
        "Believed: a discriminator has to know much for its gradients to say more than its activations, and {gan}. The "
        "paper's gain is 24.5 points.",
        facts={"gan": describe_gan},
    ),
    Claim(
        "nfk_probe",
        "table 1: 128 components are as good as the whole Fisher vector.",
        {
            name: components_less(part, WHOLE)
            for part, name in (("gan", "GAN, CIFAR-10"), ("mnist gan", "DCGAN, MNIST"), ("teacher", "WRN-40-2"))
        },
        "points less the whole: {each:+.1f}",
        "128 components hold {100 * parts > gan > explained variance > 128:.0f} % of the variance of our GAN's "
        "vectors (the paper: 100 hold 99.5 %), and 256 less 128 are {more:+.1f} points. Those of WRN-40-2, which was "
        "trained with labels, keep what the probe needs.",
        within(1),
        {"more": -components_less("gan", "256")},
    ),
    Claim(
        "nfk_probe",
        "table 1: A VAE's components are ahead of its activations and gradients.",
        {"gap": components_less("vae", ALL_LAYERS)},
        "128 less activations of all layers, points: {gap:+.1f}",
        "128 components hold {100 * parts > vae > explained variance > 128:.0f} % of the variance, and even the whole "
        "vector gives {100 * parts > vae > probes > whole > accuracy:.1f} %: believed, not tested, that gradients of "
        "this bound say how well an image is reconstructed, not what it shows. The paper's VAE has 40 million "
        "parameters in many layers, ours {1e-6 * parts > vae > parameters:.1f} million, and its baseline is another "
        "network's.",
    ),
    Claim(
        "nfk_probe",
        "table 1, figure 7: More components are better, or as good once there are enough.",
        read_more,
        "128 less 32 and 256 less 128, points: {told}",
    ),
    Claim(
        "nfk_probe",
        "table 2: With few labels, 128 components of a GAN are a good representation.",
        read_few,
        "% by labels, components and activations, {told}",
        "As with all labels: {gan}. The paper's comparison is with semi-supervised methods, none of which is run here; "
        "ours is with the activations of the same network.",
        facts={"gan": describe_gan},
    ),
]


# Table 3.


def students_less(method: str) -> Reading:
    """NFKD less another method in points."""
    return less(*(f"parts > students > {name} > * > test accuracy" for name in ("NFKD", method)), times=100)


def held_out(method: str) -> Callable[[Metrics], float]:
    """The best accuracy of the short runs of the search."""
    return lambda m: 100 * max(select(m, f"parts > tuning > {method} > * > held-out accuracy").values())


TABLE3 = [
    Claim(
        "nfk_distill",
        "table 3: A student taught by the NFK is ahead of the student alone.",
        {"gap": students_less("student")},
        "WRN-16-1, points: {gap:+.2f}",
        "Few seeds; the paper's gain is 1.7 points.",
    ),
    Claim(
        "nfk_distill",
        "table 3: Teaching by the NFK is ahead of KD and of attention transfer (AT).",
        {name: students_less(name) for name in ("KD", "AT")},
        "points less {each:+.2f}",
        "{parts > students > NFKD > ? > epochs} epochs of 20,000 images instead of 250 of 50,000, and a teacher of "
        "{100 * parts > teacher > test accuracy:.1f} instead of 94.3 %. In the short runs of the search NFKD was at "
        "{nfkd:.0f} % where KD was at {kd:.0f}: believed, not tested, that matching 20 components slows a student at "
        "first, and that the schedule is too short for it.",
        facts={"nfkd": held_out("NFKD"), "kd": held_out("KD")},
    ),
]


# Figure 4.


def share_gap(first: float, second: float, count: int) -> Interval:
    """First less second in points: two shares of so many digits each."""
    error = math.sqrt((first * (1 - first) + second * (1 - second)) / count)
    return widen(100 * (first - second), 100 * error, count)


def read_inversion(metrics: Metrics) -> dict[str, Any]:
    """Digits that LeNet-5 reads right, and squared errors, of images mapped to latents and of sums of components.

    The classes of CIFAR-10 that ResNet-20 reads right are for the reason: the paper has digits.
    """
    mapped, summed = "NFK, mapped to latents", "PCA, added up"
    part, color = metrics["parts"]["mnist"], metrics["parts"]["cifar10"]
    names, count = (mapped, "PCA, mapped to latents", summed), part.get("test images", FULL.real)
    right = {name: 100 * part[name]["digits read right"] for name in names}
    classes = {name: color[name]["classes read right"] for name in names}
    return {
        "color": share_gap(classes[mapped], classes[summed], color["test images"]),
        "color like for like": share_gap(classes[mapped], classes[names[1]], color["test images"]),
        "alike": share_gap(*(part[name]["digits read right"] for name in names[:2]), count),
        "better": certify(right[mapped] > right[summed]),
        "told": ", ".join(f"{name} {share:.1f} %" for name, share in right.items()),
        "latents": 100 * part[mapped]["latents explained, new generated images"],
        "summed": part[summed]["squared error of a pixel"],
        "mapped": part[mapped]["squared error of a pixel"],
    }


FIGURE4 = [
    Claim(
        "inversion",
        "figure 4: Images inverted from 100 components show what they should better than PCA's.",
        read_inversion,
        "digits read right: {told}",
        "Like for like, where principal components are mapped to latents too, the NFK is ahead by {alike:+.1f} points. "
        "The linear map explains {latents:.0f} % of the latents of new images of our DCGAN, so its images are sharp, "
        "but of another digit more often; sums of 100 components of PCA are blurred and nearly complete (squared error "
        "{summed:.3f} against {mapped:.3f}). For the GAN of CIFAR-10, the share of images whose class ResNet-20 "
        "reads right, less that of PCA's sums: {color:+.1f} points; less that of PCA mapped to latents too: "
        "{color like for like:+.1f}. The paper shows pictures of digits and no number.",
    ),
]

PAPER = Paper(
    "Zhang et al. 2022",
    "Learning Representation from Neural Fisher Kernel with Low-rank Approximation",
    [*FIGURE2, *FIGURE3, *PROBES, *TABLE3, *FIGURE4],
    picture="inversion",
)
