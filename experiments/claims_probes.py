"""Claims of Zhang et al. 2022 on representations: tables 1 to 3, figures 4 and 7."""

from __future__ import annotations

from experiments.claims_zhang import ZHANG
from experiments.verdicts import (
    Finding,
    Metrics,
    ahead,
    every,
    paired,
    plainly,
    said,
    shifted,
    turned,
    unpaired,
    within,
)

WHOLE, ALL_LAYERS, LAST_LAYER = "whole", "activations, all layers", "activations, last layer"
MAPPED, SUMMED = "NFK, mapped to latents", "PCA, added up"


# Tables 1 and 2, figure 7.


def probe_gap(metrics: Metrics, part: str, first: str, second: str) -> dict[str, float]:
    """Accuracy of the first less that of the second in points; from standard errors over test images."""
    found = metrics["parts"][part]
    probes = (found["probes"][name] for name in (first, second))
    one, other = ({"mean": 100 * probe["accuracy"], "error": 100 * probe["error"]} for probe in probes)
    return unpaired(one, other, found["test images"])


def less(metrics: Metrics, part: str, other: str) -> dict[str, float]:
    """128 components less another representation in points, paired over test images."""
    gap = metrics["parts"][part]["128 components less the others"][other]
    return {side: 100 * gap[side] for side in ("mean", "low", "high")}


def smaller_gan(metrics: Metrics) -> str:
    """How our GAN differs from the paper's."""
    found = metrics["parts"]["gan"]
    return (
        f"our DCGAN was trained on 20,000 images and has {found['parameters'] / 1e6:.1f} million parameters (the "
        f"paper: 5.9), and the probe has at most {found['training images']:,} labels instead of 50,000"
    )


@ZHANG.claim("table 1", "nfk_probe", "The Fisher vector of a GAN's discriminator is ahead of its activations.")
def fisher_vector(metrics: Metrics) -> Finding:
    by = {name: probe_gap(metrics, "gan", WHOLE, name) for name in (LAST_LAYER, ALL_LAYERS)}
    numbers = ", ".join(f"{name.removeprefix('activations, ')} {said(gap, 1)}" for name, gap in by.items())
    why = (
        f"Believed: a discriminator has to know much for its gradients to say more than its activations, and "
        f"{smaller_gan(metrics)}. The paper's gain is 24.5 points."
    )
    return Finding(f"CIFAR-10, points less activations: {numbers}", every(ahead(gap) for gap in by.values()), why)


@ZHANG.claim("table 1", "nfk_probe", "128 components are as good as the whole Fisher vector.")
def as_the_whole(metrics: Metrics) -> Finding:
    names = {"gan": "DCGAN, CIFAR-10", "mnist gan": "DCGAN, MNIST", "teacher": "WRN-40-2"}
    by = {name: less(metrics, part, WHOLE) for part, name in names.items()}
    explained = metrics["parts"]["gan"]["explained variance"]["128"]
    numbers = ", ".join(f"{name} {said(gap, 1)}" for name, gap in by.items())
    why = (
        f"128 components hold {100 * explained:.0f} % of the variance of our DCGAN's vectors (the paper: 100 hold "
        f"99.5 %), and 256 less 128 are {said(turned(less(metrics, 'gan', '256')), 1)} points. Those of WRN-40-2, "
        "which was trained with labels, keep what the probe needs."
    )
    return Finding(f"points less the whole: {numbers}", every(within(gap, 1) for gap in by.values()), why)


@ZHANG.claim("table 1", "nfk_probe", "A VAE's components are ahead of its activations and gradients.")
def vae_components(metrics: Metrics) -> Finding:
    gap = less(metrics, "vae", ALL_LAYERS)
    found = metrics["parts"]["vae"]
    why = (
        f"128 components hold {100 * found['explained variance']['128']:.0f} % of the variance, and even the whole "
        f"vector gives {100 * found['probes'][WHOLE]['accuracy']:.1f} %: believed, not tested, that gradients of this "
        "bound say how well an image is reconstructed, not what it shows. The paper's VAE has 40 million parameters in "
        f"many layers, ours {found['parameters'] / 1e6:.1f} million, and its baseline is another network's."
    )
    return Finding(f"128 less activations of all layers, points: {said(gap, 1)}", ahead(gap), why)


@ZHANG.claim("table 1, figure 7", "nfk_probe", "More components are better, or as good once there are enough.")
def more_components(metrics: Metrics) -> Finding:
    numbers, verdicts = [], []
    for part, name in (("gan", "GAN"), ("vae", "VAE"), ("teacher", "WRN-40-2")):
        gaps = less(metrics, part, "32"), turned(less(metrics, part, "256"))
        numbers.append(f"{name} {said(gaps[0], 1)} and {said(gaps[1], 1)}")
        verdicts += [ahead(shifted(gap, 1)) for gap in gaps]  # not behind by more than a point
    return Finding("128 less 32 and 256 less 128, points: " + "; ".join(numbers), every(verdicts))


@ZHANG.claim("table 2", "nfk_probe", "With few labels, 128 components of a GAN are a good representation.")
def few_labels(metrics: Metrics) -> Finding:
    found = metrics["parts"]["gan"]["few labels"]
    pairs = [(labels, one, found[ALL_LAYERS][labels]) for labels, one in found["128"].items()]
    numbers = ", ".join(f"{labels}: {100 * a['mean']:.1f} and {100 * b['mean']:.1f}" for labels, a, b in pairs)
    ends = ("mean", "mean"), ("low", "high"), ("high", "low")  # the widest that the two intervals allow
    gaps = [{side: a[side] - b[other] for side, other in ends} for _, a, b in pairs]
    why = (
        f"As with all labels: {smaller_gan(metrics)}. The paper's comparison is with semi-supervised methods, none of "
        "which is run here; ours is with the activations of the same network."
    )
    return Finding(f"% by labels, components and activations, {numbers}", every(ahead(gap) for gap in gaps), why)


# Table 3.


def students(metrics: Metrics, method: str) -> dict[str, float]:
    return {seed: 100 * one["test accuracy"] for seed, one in metrics["parts"]["students"][method].items()}


@ZHANG.claim("table 3", "nfk_distill", "A student taught by the NFK is ahead of the student alone.")
def nfkd_alone(metrics: Metrics) -> Finding:
    gap = paired(students(metrics, "NFKD"), students(metrics, "student"))
    return Finding(f"WRN-16-1, points: {said(gap)}", ahead(gap), "Few seeds; the paper's gain is 1.7 points.")


@ZHANG.claim("table 3", "nfk_distill", "Teaching by the NFK is ahead of KD and of attention transfer (AT).")
def nfkd_others(metrics: Metrics) -> Finding:
    by = {name: paired(students(metrics, "NFKD"), students(metrics, name)) for name in ("KD", "AT")}
    epochs = next(iter(metrics["parts"]["students"]["NFKD"].values()))["epochs"]
    teacher = 100 * metrics["parts"]["teacher"]["test accuracy"]
    tried = metrics["parts"]["tuning"]
    held = {name: 100 * max(one["held-out accuracy"] for one in tried[name].values()) for name in ("NFKD", "KD")}
    why = (
        f"{epochs} epochs of 20,000 images instead of 250 of 50,000, and a teacher of {teacher:.1f} instead of 94.3 %. "
        f"In the short runs of the search NFKD was at {held['NFKD']:.0f} % where KD was at {held['KD']:.0f}: believed, "
        "not tested, that matching 20 components slows a student at first, and that the schedule is too short for it."
    )
    numbers = ", ".join(f"{name} {said(gap)}" for name, gap in by.items())
    return Finding(f"points less {numbers}", every(ahead(gap) for gap in by.values()), why)


# Figure 4.


@ZHANG.claim("figure 4", "inversion", "Images inverted from 100 components show what they should better than PCA's.")
def inversion_faithful(metrics: Metrics) -> Finding:
    part = metrics["parts"]["mnist"]
    right = {name: 100 * part[name]["digits read right"] for name in (MAPPED, SUMMED)}
    latents = part[MAPPED]["latents explained, new generated images"]
    errors = [part[name]["squared error of a pixel"] for name in (SUMMED, MAPPED)]
    why = (
        f"The linear map explains {100 * latents:.0f} % of the latents of new images of our DCGAN, so its images are "
        "sharp, but of another digit more often; sums of 100 components of PCA are blurred and nearly complete "
        f"(squared error {errors[0]:.3f} against {errors[1]:.3f}). The paper shows pictures and no number."
    )
    numbers = "digits read right: " + ", ".join(f"{name} {share:.1f} %" for name, share in right.items())
    return Finding(numbers, plainly(right[MAPPED] > right[SUMMED]), why)
