"""Claims of Mu et al. 2020 on gradient features: tables 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.table1_mu import BASELINE, BOTH, OURS, TUNED
from experiments.verdicts import (
    Finding,
    Metrics,
    Paper,
    ahead,
    every,
    paired,
    said,
    within,
)

MU = Paper("Mu et al. 2020", "Gradients as Features for Deep Representation Learning")
RANDOM_TOP, RANDOM_HEAD = "pretrained / random / pretrained", "pretrained / pretrained / random"
RANDOM_BOTTOM = "random / pretrained / pretrained"
FEATURES, SAME, LINEAR = "gradient features", "fine-tuning, same block", "linear"
IMAGES = "test images of a draw"


# Tables 1 to 3.


def gaps(metrics: Metrics, part: str, first: str, second: str) -> dict[str, dict[str, float]]:
    """By the number of top blocks: accuracy of the first less that of the second in points, paired over draws."""
    found = {}
    for top, methods in metrics["parts"][part]["rows"].items():
        if top.isdigit() and first in methods and second in methods:
            by = [{draw: 100 * one["accuracy"] for draw, one in methods[name].items()} for name in (first, second)]
            found[top] = paired(*by)
    if not found:
        raise LookupError(part)
    return found


def in_words(by: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(f"top {top}: {said(gap, 1)}" for top, gap in by.items())


def verdict(by: Mapping[str, Mapping[str, float]]) -> str:
    return every(ahead(gap) for gap in by.values())


def size(metrics: Metrics, part: str) -> str:
    """How much was measured, for the reasons; the paper has 50,000 labels."""
    kept = metrics["parts"][part]
    draws = max(len(by) for methods in kept["rows"].values() for by in methods.values())
    labels = f"{kept['labels']:,} labels" if kept.get("labels") else "few labels"
    return f"{draws} draw{'s' if draws > 1 else ''} with {labels} instead of 50,000"


def mean_of(by: Mapping[str, Mapping[str, float]]) -> float:
    return sum(gap["mean"] for gap in by.values()) / len(by)


@MU.claim("tables 1, 2", "table1_mu", "Gradient features of a GAN's network are ahead of its activations.")
def gan_features(metrics: Metrics) -> Finding:
    by = gaps(metrics, "gan", OURS, BASELINE)
    why = f"{size(metrics, 'gan').capitalize()}; the gain is {mean_of(by):+.1f} points in the mean (the paper: 6 to 8)."
    return Finding(f"CIFAR-10, points: {in_words(by)}", verdict(by), why)


@MU.claim("table 1", "table1_mu", "Gradient features of random top layers are worse than of pretrained ones.")
def random_top(metrics: Metrics) -> Finding:
    by = gaps(metrics, "gan", OURS, RANDOM_TOP)
    why = (
        f"{size(metrics, 'gan').capitalize()}. In the paper the loss is 1.1, 3.6 and 8.7 points, the more layers are "
        "drawn anew; one random block above pretrained ones costs little there too."
    )
    return Finding(f"pretrained less random top, points: {in_words(by)}", verdict(by), why)


@MU.claim("table 1", "table1_mu", "With random lower layers gradient features are no better than the baseline.")
def random_bottom(metrics: Metrics) -> Finding:
    by = gaps(metrics, "gan", RANDOM_BOTTOM, BASELINE)
    why = (
        f"{size(metrics, 'gan').capitalize()}. Ours are {-mean_of(by):.1f} points behind it in the mean: above random "
        "layers the linear term has their activations too, while the paper's seems to keep the pretrained ones, as it "
        "never falls below the baseline."
    )
    return Finding(f"less the baseline, points: {in_words(by)}", every(not_above(gap) for gap in by.values()), why)


def not_above(gap: Mapping[str, float], margin: float = 1.0) -> str:
    """No better, up to a margin."""
    return ahead({side: margin - gap[other] for side, other in (("mean", "mean"), ("low", "high"), ("high", "low"))})


@MU.claim("table 1", "table1_mu", "A head trained beforehand is better than a random one.")
def random_head(metrics: Metrics) -> Finding:
    by = gaps(metrics, "gan", OURS, RANDOM_HEAD)
    why = f"{size(metrics, 'gan').capitalize()}; the paper's gain is 0.9 to 1.3 points, ours {mean_of(by):+.1f}."
    return Finding(f"pretrained less random head, points: {in_words(by)}", verdict(by), why)


@MU.claim("tables 1, 2", "table1_mu", "More top layers are slightly better than one.")
def more_layers(metrics: Metrics) -> Finding:
    found = {}
    for part, name in (("gan", "GAN"), ("vae", "VAE")):
        rows = metrics["parts"][part]["rows"]
        found[name] = paired(*({d: 100 * one["accuracy"] for d, one in rows[top][OURS].items()} for top in ("3", "1")))
    numbers = ", ".join(f"{name} {said(gap, 1)}" for name, gap in found.items())
    why = (
        f"The paper's gains are 1.1 points (GAN) and 3.6 (VAE). {size(metrics, 'vae').capitalize()}: three blocks "
        "bring more features, but not the examples to tell which of them help."
    )
    return Finding(f"three blocks less one, points: {numbers}", every(ahead(gap) for gap in found.values()), why)


@MU.claim("table 2", "table1_mu", "Gradient features are ahead for a VAE's encoder, and on another data set.")
def other_features(metrics: Metrics) -> Finding:
    vae, digits = (gaps(metrics, part, OURS, BASELINE) for part in ("vae", "mnist"))
    numbers = f"VAE, CIFAR-10, points: {in_words(vae)}; GAN, MNIST: {in_words(digits)}"
    why = f"{size(metrics, 'vae').capitalize()}; MNIST: {size(metrics, 'mnist')}."
    return Finding(numbers, every([verdict(vae), verdict(digits)]), why)


@MU.claim("tables 1, 2", "table1_mu", "Fine-tuning the same layers is ahead of gradient features.")
def fine_tuning_ahead(metrics: Metrics) -> Finding:
    by = {part: gaps(metrics, part, TUNED, OURS) for part in ("gan", "vae")}
    verdicts = [ahead(gap) for one in by.values() for gap in one.values()]
    numbers = "; ".join(f"{name}, {in_words(by[part])}" for part, name in (("gan", "GAN"), ("vae", "VAE")))
    why = (
        f"{size(metrics, 'vae').capitalize()}: rate and epochs of fine-tuning are chosen on a part of the labels, and "
        "where nothing helps there it stays at the linear classifier. A linear model with its prior by the evidence "
        "has nothing to choose."
    )
    return Finding(f"fine-tuned less gradient features, points: {numbers}", every(verdicts), why)


@MU.claim("table 1", "table1_mu", "Gradient features of a fine-tuned network do as the fine-tuned network.")
def from_fine_tuned(metrics: Metrics) -> Finding:
    by = gaps(metrics, "vae", BOTH, TUNED)
    numbers = f"VAE, less fine-tuned, points: {in_words(by)}"
    why = (
        f"They do better by {mean_of(by):.1f} points in the mean, but fine-tuning differs from draw to draw by more "
        "than a point: with few labels it stops early or learns too much, and the linear model fitted after it "
        "makes up for this."
    )
    return Finding(numbers, every(within(gap, 1) for gap in by.values()), why)


@MU.claim("table 3", "table1_mu", "Gradient features of a self-supervised network are ahead of its activations.")
def rotation_features(metrics: Metrics) -> Finding:
    by = gaps(metrics, "rotation", OURS, BASELINE)
    start = gaps(metrics, "rotation", BOTH, BASELINE)
    why = (
        f"The pretext network is ours (rotations instead of Jigsaw, WRN-22-2, trained on CIFAR-10 itself), "
        f"{size(metrics, 'rotation')}. At the network fine-tuned to the labels the same features gain "
        f"{mean_of(start):+.1f} points over the activations: it is the gradients of a network that sees angles that "
        "say little of classes."
    )
    return Finding(f"rotation network, points: {in_words(by)}", verdict(by), why)


# Table 4.


def transfer_setting(metrics: Metrics) -> str:
    """The part that claims on transfer are judged by: ResNet-20, most test images, then fewest blocks that adapt.

    One of them, as a deeper network or fewer test images for the same draws would count the same labels twice.
    """
    parts = {where: one["settings"] for where, one in metrics["parts"].items()}
    named = [where for where in parts if parts[where]["network"] == "ResNet-20"]
    if not named:
        raise LookupError("ResNet-20")
    return max(named, key=lambda where: (parts[where][IMAGES], -parts[where]["blocks that adapt"]))


def transfer_gap(metrics: Metrics, first: str, second: str) -> dict[str, dict[str, float]]:
    """By the number of labels: accuracy of the first less that of the second in points, over draws and sets.

    Of the part `transfer_setting`, wherever it has both: some take part with few labels only.
    """
    runs = metrics["parts"][transfer_setting(metrics)]["runs"]
    found: dict[str, dict[str, float]] = {}
    for size in sorted({run["labels"] for run in runs.values()}):
        of: list[dict[str, float]] = [{}, {}]
        for draw, run in runs.items():
            if run["labels"] == size and first in run["contenders"] and second in run["contenders"]:
                for by, name in zip(of, (first, second), strict=True):
                    by[draw] = 100 * run["contenders"][name]["accuracy"]
        if of[0]:
            found[f"{size:,} labels"] = paired(*of)
    if not found:
        raise LookupError(f"{first}, {second}")
    return found


def by_labels(by: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{size} {said(gap, 1)}" for size, gap in by.items())


def transferred(metrics: Metrics, what: str, by: Mapping[str, Mapping[str, float]]) -> str:
    """The numbers of a claim on transfer, with the part that they are of."""
    return f"{what}, points ({transfer_setting(metrics)}): {by_labels(by)}"


@MU.claim("table 4", "transfer", "Transferred to other data, gradient features are ahead of a linear classifier.")
def transfer_features(metrics: Metrics) -> Finding:
    by = transfer_gap(metrics, FEATURES, LINEAR)
    count = min(int(gap["count"]) for gap in by.values())
    why = f"Intervals are over {count} draws of labels or more; the paper's gains are 1.8 and 4.7 mAP."
    return Finding(transferred(metrics, "to Fashion-MNIST and MNIST", by), verdict(by), why)


@MU.claim("table 4", "transfer", "Transferred to other data, they are slightly ahead of fine-tuning the same layers.")
def transfer_fine_tuning(metrics: Metrics) -> Finding:
    by = transfer_gap(metrics, FEATURES, SAME)
    why = (
        "The paper explains its gain by the overlap of ImageNet with the target; clothes and digits are unlike "
        "CIFAR-10, and fine-tuning can move further. Its own two gains are 0.8 and 0.5 mAP."
    )
    return Finding(transferred(metrics, "less fine-tuning", by), verdict(by), why)


@MU.claim("table 4", "transfer", "With the NTK parametrization, gradient features are ahead of a linear classifier.")
def ntk_scaling(metrics: Metrics) -> Finding:
    by, balanced = (transfer_gap(metrics, name, LINEAR) for name in (f"{FEATURES}, ntk", FEATURES))
    why = (
        "A prior with the variances of that parametrization; the same features with variances by which every layer "
        f"moves the outputs as much gain, in points: {by_labels({size: balanced[size] for size in by})}. The paper "
        "trains by Adam, whose steps do not depend on the scale of a layer's gradient, until they no longer improve."
    )
    return Finding(transferred(metrics, "less a linear classifier", by), verdict(by), why)
