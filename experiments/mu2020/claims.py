"""Claims of Mu et al. 2020."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.judge import Claim, Interval, Metrics, Paper, below, less, pair, within
from experiments.mu2020.table1_mu import BASELINE, BOTH, OURS, TUNED

RANDOM_TOP, RANDOM_HEAD = "pretrained / random / pretrained", "pretrained / pretrained / random"
RANDOM_BOTTOM = "random / pretrained / pretrained"
FEATURES, SAME, LINEAR = "gradient features", "fine-tuning, same block", "linear"
IMAGES = "test images of a draw"


# Tables 1 to 3.


def network_of(metrics: Metrics, part: str) -> str:
    """The part of the paper's network: for a GAN the encoder of a BiGAN, else the discriminator."""
    return "bigan" if part == "gan" and "bigan" in metrics["parts"] else part


def read_tops(first: str, second: str, *parts: str) -> Callable[[Metrics], dict[str, Any]]:
    """Accuracy of the first less that of the second in points, by the number of top blocks of each part.

    A part is also a name for its differences in words.
    """

    def read(metrics: Metrics) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in parts:
            by = {}
            for top, methods in metrics["parts"][network_of(metrics, part)]["rows"].items():
                if top.isdigit() and first in methods and second in methods:
                    by[f"top {top}"] = less(*(f"{name} > * > accuracy" for name in (first, second)), times=100)(methods)
            if not by:
                raise LookupError(part)
            found |= {f"{part}, {top}": gap for top, gap in by.items()}
            found[part] = "; ".join(f"{top}: {gap:+.1f}" for top, gap in by.items())
        return found

    return read


def read_blocks(metrics: Metrics) -> dict[str, Any]:
    """Three blocks less one in points, of the GAN's network and the VAE's."""
    found: dict[str, Any] = {}
    for part, name in (("gan", "GAN"), ("vae", "VAE")):
        rows = metrics["parts"][network_of(metrics, part)]["rows"]
        found[name] = less(*(f"{top} > {OURS} > * > accuracy" for top in ("3", "1")), times=100)(rows)
    return found


def size(part: str) -> Callable[[Metrics], str]:
    """How much was measured, for the reasons; the paper has 50,000 labels."""

    def read(metrics: Metrics) -> str:
        kept = metrics["parts"][network_of(metrics, part)]
        draws = max(len(by) for methods in kept["rows"].values() for by in methods.values())
        labels = f"{kept['labels']:,} labels" if kept.get("labels") else "few labels"
        return f"{draws} draw{'s' if draws > 1 else ''} with {labels} instead of 50,000"

    return read


def mean_gain(first: str, second: str, part: str, sign: int = 1) -> Callable[[Metrics], float]:
    def read(metrics: Metrics) -> float:
        gaps = [gap.mean for gap in read_tops(first, second, part)(metrics).values() if isinstance(gap, Interval)]
        return sign * sum(gaps) / len(gaps)

    return read


TABLES = [
    Claim(
        "table1_mu",
        "tables 1, 2: Gradient features of a GAN's network are ahead of its activations.",
        read_tops(OURS, BASELINE, "gan"),
        "CIFAR-10, points: {gan}",
        "{size}; the gain is {mean:+.1f} points in the mean (the paper: 6 to 8).",
        facts={"size": size("gan")},
    ),
    Claim(
        "table1_mu",
        "table 1: Gradient features of random top layers are worse than of pretrained ones.",
        read_tops(OURS, RANDOM_TOP, "gan"),
        "pretrained less random top, points: {gan}",
        "{size}. In the paper the loss is 1.1, 3.6 and 8.7 points, the more layers are drawn anew; one random block "
        "above pretrained ones costs little there too.",
        facts={"size": size("gan")},
    ),
    Claim(
        "table1_mu",
        "table 1: With random lower layers gradient features are no better than the baseline.",
        read_tops(RANDOM_BOTTOM, BASELINE, "gan"),
        "less the baseline, points: {gan}",
        "{size}. Ours are {behind:.1f} points behind the baseline in the mean: above random layers the linear term has "
        "their activations too, while the paper's seems to keep the pretrained ones, as it never falls below the "
        "baseline.",
        below(1),  # no better, up to a point
        {"size": size("gan"), "behind": mean_gain(RANDOM_BOTTOM, BASELINE, "gan", -1)},
        "Another model than the paper's, and {size}: above random layers the linear term has their activations, while "
        "the paper's seems to keep the pretrained ones, as it never falls below the baseline.",
    ),
    Claim(
        "table1_mu",
        "table 1: A head trained beforehand is better than a random one.",
        read_tops(OURS, RANDOM_HEAD, "gan"),
        "pretrained less random head, points: {gan}",
        "{size}; the paper's gain is 0.9 to 1.3 points, ours {mean:+.1f}.",
        facts={"size": size("gan")},
    ),
    Claim(
        "table1_mu",
        "tables 1, 2: More top layers are slightly better than one.",
        read_blocks,
        "three blocks less one, points: GAN {GAN:+.1f}, VAE {VAE:+.1f}",
        "The paper's gains are 1.1 points (GAN) and 3.6 (VAE). {size}: three blocks bring more features, but not the "
        "examples to tell which of them help.",
        facts={"size": size("vae")},
    ),
    Claim(
        "table1_mu",
        "table 2: Gradient features are ahead for a VAE's encoder, and on another data set.",
        read_tops(OURS, BASELINE, "vae", "mnist"),
        "VAE, CIFAR-10, points: {vae}; GAN, MNIST: {mnist}",
        "{size}; MNIST: {digits}.",
        facts={"size": size("vae"), "digits": size("mnist")},
    ),
    Claim(
        "table1_mu",
        "tables 1, 2: Fine-tuning the same layers is ahead of gradient features.",
        read_tops(TUNED, OURS, "gan", "vae"),
        "fine-tuned less gradient features, points: GAN, {gan}; VAE, {vae}",
        "{size}: rate and epochs of fine-tuning are chosen on a part of the labels, and where nothing helps there it "
        "stays at the linear classifier. A linear model with its prior by the evidence has nothing to choose.",
        facts={"size": size("vae")},
    ),
    Claim(
        "table1_mu",
        "table 1: Gradient features of a fine-tuned network do as the fine-tuned network.",
        read_tops(BOTH, TUNED, "vae"),
        "VAE, less fine-tuned, points: {vae}",
        "They do better by {mean:.1f} points in the mean, but fine-tuning differs from draw to draw by more than a "
        "point: with few labels it stops early or learns too much, and the linear model fitted after it makes up for "
        "this.",
        holds=within(1),
    ),
    Claim(
        "table1_mu",
        "table 3: Gradient features of a self-supervised network are ahead of its activations.",
        read_tops(OURS, BASELINE, "rotation"),
        "rotation network, points: {rotation}",
        "The pretext network is ours (rotations instead of Jigsaw, WRN-22-2, trained on CIFAR-10 itself), {size}. At "
        "the network fine-tuned to the labels the same features gain {start:+.1f} points over the activations: it is "
        "the gradients of a network that sees angles that say little of classes.",
        facts={"size": size("rotation"), "start": mean_gain(BOTH, BASELINE, "rotation")},
    ),
]


# Table 4.


def read_setting(metrics: Metrics) -> str:
    """The part that judges claims on transfer: ResNet-20, most test images, then fewest blocks that adapt.

    It is one part, as a deeper network or fewer test images for the same draws would count the same labels twice.
    """
    parts = {where: one["settings"] for where, one in metrics["parts"].items()}
    named = [where for where in parts if parts[where]["network"] == "ResNet-20"]
    if not named:
        raise LookupError("ResNet-20")
    return max(named, key=lambda where: (parts[where][IMAGES], -parts[where]["blocks that adapt"]))


def read_transfer(first: str, second: str) -> Callable[[Metrics], dict[str, Interval]]:
    """By the number of labels: accuracy of the first less that of the second in points, over draws and sets.

    Draws that lack one of the two do not count: some contenders take part with few labels only.
    """

    def read(metrics: Metrics) -> dict[str, Interval]:
        runs = metrics["parts"][read_setting(metrics)]["runs"]
        found: dict[str, Interval] = {}
        for labels in sorted({run["labels"] for run in runs.values()}):
            by = [
                {
                    draw: 100 * run["contenders"][name]["accuracy"]
                    for draw, run in runs.items()
                    if run["labels"] == labels and name in run["contenders"]
                }
                for name in (first, second)
            ]
            if by[0].keys() & by[1].keys():
                found[f"{labels:,} labels"] = pair(*by)
        if not found:
            raise LookupError(f"{first}, {second}")
        return found

    return read


def read_balanced(metrics: Metrics) -> str:
    """What the balanced prior gains with the numbers of labels that the NTK parametrization has."""
    by, balanced = (read_transfer(name, LINEAR)(metrics) for name in (f"{FEATURES}, ntk", FEATURES))
    return ", ".join(f"{labels} {balanced[labels]:+.1f}" for labels in by)


TABLE4 = [
    Claim(
        "transfer",
        "table 4: Transferred to other data, gradient features are ahead of a linear classifier.",
        read_transfer(FEATURES, LINEAR),
        "to Fashion-MNIST and MNIST, points ({setting}): {each:+.1f}",
        "Intervals are over {count} draws of labels or more; the paper's gains are 1.8 and 4.7 mAP.",
        facts={
            "setting": read_setting,
            "count": lambda m: min(gap.count for gap in read_transfer(FEATURES, LINEAR)(m).values()),
        },
    ),
    Claim(
        "transfer",
        "table 4: Transferred to other data, they are slightly ahead of fine-tuning the same layers.",
        read_transfer(FEATURES, SAME),
        "less fine-tuning, points ({setting}): {each:+.1f}",
        "The paper explains its gain by the overlap of ImageNet with the target; clothes and digits are unlike "
        "CIFAR-10, and fine-tuning can move further. Its own two gains are 0.8 and 0.5 mAP.",
        facts={"setting": read_setting},
    ),
    Claim(
        "transfer",
        "table 4: With the NTK parametrization, gradient features are ahead of a linear classifier.",
        read_transfer(f"{FEATURES}, ntk", LINEAR),
        "less a linear classifier, points ({setting}): {each:+.1f}",
        "A prior with the variances of that parametrization; the same features with variances by which every layer "
        "moves the outputs as much gain, in points: {balanced}. The paper trains by Adam, whose steps do not depend on "
        "the scale of a layer's gradient, until they no longer improve.",
        facts={"setting": read_setting, "balanced": read_balanced},
    ),
]

PAPER = Paper(
    "Mu et al. 2020",
    "Gradients as Features for Deep Representation Learning",
    [*TABLES, *TABLE4],
    picture="transfer",
)
