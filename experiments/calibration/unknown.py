"""Scores that detect images of an unknown kind: Laplace beside a network alone and ensembles.

Networks for CIFAR-10 (ResNet-20 alone; ResNet-20, 32 and 56 as an ensemble) and for Fashion-MNIST (small LeNets, each
alone; five of them as an ensemble) see their own test images and images of other kinds. A score is good if images of
other kinds have larger values than the test images: the area under the ROC curve (AUROC) is the probability of that.
Laplace approximates the last layer. The kinds of images are in two halves, which were drawn up before any score was
measured: every method takes the score with the largest mean area on the development half, and is compared on the held
half. "moderated_energy" was added when areas of the held half had been seen, so a third group, "fresh", was drawn up
for it before that score, or any other, was measured there. Intervals (95 %) are over images, by the bootstrap; areas
of LeNets alone are means over the five networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots
from experiments.common.data import CIFAR10_MEAN, CIFAR10_STD, as_cifar10, cifar10, grayscale
from experiments.common.networks import lenet, resnet
from experiments.common.training import Labeled, in_parts, in_turn, train
from linnet.probability import (
    Categorical,
    ClassBeliefs,
    UncertaintyScore,
    describe_classes,
    make_rule,
    mix_beliefs,
    score_uncertainty,
)

DEVELOPMENT = {
    "CIFAR-10": ("Fashion-MNIST", "noise", "shuffled", "faces"),
    "Fashion-MNIST": ("gray CIFAR-10", "noise", "shuffled"),
}
HELD = {
    "CIFAR-10": ("MNIST", "smooth noise", "house numbers", "negatives"),
    "Fashion-MNIST": ("MNIST", "smooth noise", "faces"),
}
FRESH = {
    "CIFAR-10": ("maps", "numbers on photographs", "negative clothes"),
    "Fashion-MNIST": ("maps", "negative digits", "gray house numbers"),
}
PLAIN: tuple[UncertaintyScore, ...] = ("max_probability", "entropy", "energy")
MIXED: tuple[UncertaintyScore, ...] = (*PLAIN, "expected_entropy", "mutual_information")
EVERY: tuple[UncertaintyScore, ...] = (*MIXED, "relative_variance", "moderated_energy")
VARIANCE = "variance"
NETWORK, ENSEMBLE, LAPLACE, BOTH = "network", "ensemble", "Laplace", "Laplace of the ensemble"
SCORES = {NETWORK: PLAIN, ENSEMBLE: MIXED, LAPLACE: (*EVERY, VARIANCE), BOTH: (*EVERY, VARIANCE)}
MEMBERS = 5
DEFAULTS: dict[str, dict[str, Any]] = {
    "quick": {"test": 20, "unknown": 12, "train": 20, "draws": 20},
    "cpu": {"test": 400, "unknown": 200, "train": 1000, "draws": 1000},
}
ARGUMENTS = {
    "--test": "test images (default: 400)",
    "--unknown": "images of every other kind, at most (default: 200)",
    "--train": "training images of the posterior (default: 1000)",
    "--draws": "bootstrap draws (default: 1000)",
    "--families": common.several(DEVELOPMENT),
}


@dataclass(frozen=True)
class Family:
    """Networks for one set of images, and the images."""

    networks: Sequence[nn.Module]  # of the ensemble
    alone: Sequence[int]  # networks that are scored alone
    head: str  # name of the last layer
    train: Labeled  # training images of the posterior
    known: Tensor  # test images
    unknown: Mapping[str, Tensor]  # name to images of another kind


# Images.


def shuffle(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Images with square patches in a random order.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> shuffle(x, 2, torch.Generator().manual_seed(0)).flatten().sort().values.equal(x.flatten())
    True
    """
    n, c, _, w = x.shape
    count = w // size
    patches = x.unfold(2, size, size).unfold(3, size, size).reshape(n, c, count**2, size, size)
    order = torch.stack([torch.randperm(count**2, generator=generator) for _ in range(n)])
    patches = patches.gather(2, order[:, None, :, None, None].expand_as(patches))
    return patches.view(n, c, count, count, size, size).transpose(3, 4).reshape(x.shape)


def smooth(n: int, channels: int, side: int, size: int, generator: torch.Generator) -> Tensor:
    """Random pixels of a small grid, made large."""
    x = torch.rand(n, channels, side, side, generator=generator)
    return F.interpolate(x, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)


def house_numbers(digits: Tensor, generator: torch.Generator) -> Tensor:
    """Gray digits (n, 1, 32, 32) in one color each, on backgrounds of changing color, with a little noise."""
    n = len(digits)
    ground = F.interpolate(torch.rand(n, 3, 2, 2, generator=generator), (32, 32), mode="bilinear", align_corners=False)
    color = torch.rand(n, 3, 1, 1, generator=generator)
    drawn = ground * (1 - digits) + color * digits
    return (drawn + 0.02 * torch.randn(drawn.shape, generator=generator)).clamp(0, 1)


def read_faces(options: argparse.Namespace, size: int, generator: torch.Generator) -> Tensor:
    """Faces (n, 1, size, size) in [0, 1], in a random order."""
    with np.load(common.data_file(options.data, "olivetti.npz"), allow_pickle=False) as stored:
        x = torch.from_numpy(stored["x"])
    x = x[torch.randperm(len(x), generator=generator)[: options.unknown], None].float() / 255
    return F.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp(0, 1)


def read_maps(options: argparse.Namespace, size: int, generator: torch.Generator) -> Tensor:
    """Pieces of the map of malaria in Africa (n, 1, size, size), of land alone, in [0, 1]."""
    with np.load(common.data_file(options.data, "malaria_africa_pfpr.npz"), allow_pickle=False) as stored:
        mask = np.unpackbits(stored["mask"], axis=1)[:, : stored["shape"][1]].astype(bool)
        values = np.zeros(mask.shape, dtype=np.float32)
        values[mask] = stored["pfpr_2012"]
    rows, columns = np.nonzero(mask)
    found: list[Tensor] = []
    while len(found) < options.unknown:
        i = int(torch.randint(len(rows), (), generator=generator))
        part = slice(rows[i], rows[i] + size), slice(columns[i], columns[i] + size)
        if mask[part].shape == (size, size) and mask[part].all():
            found.append(torch.from_numpy(values[part] / values.max()))
    return torch.stack(found)[:, None]


def color_family(options: argparse.Namespace) -> Family:
    """The stored ResNets for CIFAR-10."""
    random, n = torch.Generator().manual_seed(options.seed), options.unknown
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
    x, _ = cifar10(options.data, "test", count=options.test + n)
    known, others = x[: options.test], x[options.test :]
    digits = grayscale(options.data, "mnist", False)[0][n : 2 * n, None].float() / 255
    digits = F.interpolate(digits, (32, 32), mode="bilinear", align_corners=False)
    clothes = grayscale(options.data, "fashion_mnist", False)[0][n : 2 * n, None].float() / 255
    clothes = F.interpolate(clothes, (32, 32), mode="bilinear", align_corners=False)
    pixels = {
        "noise": torch.rand(n, 3, 32, 32, generator=random),
        "smooth noise": smooth(n, 3, 4, 32, random),
        "faces": read_faces(options, 32, random),
        "house numbers": house_numbers(digits, random),
        "negatives": 1 - (others * std + mean),
        "maps": read_maps(options, 32, random),
        "numbers on photographs": (others * std + mean) * (1 - digits)
        + digits * torch.rand(n, 3, 1, 1, generator=random),
        "negative clothes": 1 - clothes,
    }
    unknown = {name: (x - mean) / std for name, x in pixels.items()}
    unknown["shuffled"] = shuffle(others, 8, random)
    for name, title in (("fashion_mnist", "Fashion-MNIST"), ("mnist", "MNIST")):
        unknown[title] = as_cifar10(grayscale(options.data, name, False)[0][:n])
    X, y = cifar10(options.data, "train_1", count=2 * options.train + 200)
    chosen = in_turn(y, options.train, 10, random)
    depths = (20,) if options.quick else (20, 32, 56)
    nets = [resnet(options.data / "weights", depth) for depth in depths]
    return Family(nets, (0,), "linear", Labeled((X[chosen],), y[chosen]), known, unknown)


def gray_family(options: argparse.Namespace) -> Family:
    """LeNets for Fashion-MNIST, which are trained here."""
    random, n = torch.Generator().manual_seed(options.seed), options.unknown
    x, y = grayscale(options.data, "fashion_mnist", True)
    count = 200 if options.quick else 6000
    x, y = x[:count, None].float() / 255, y[:count]
    nets = []
    for seed in range(2 if options.quick else MEMBERS):
        net = lenet(28, 10, seed=options.seed + seed)
        epochs = 1 if options.quick else 8
        nets.append(train(net, Labeled((x,), y), epochs=epochs, rate=3e-3, seed=options.seed + seed).eval())
    test = grayscale(options.data, "fashion_mnist", False)[0][: options.test + n, None].float() / 255
    known, others = test[: options.test], test[options.test :]
    colors = cifar10(options.data, "test", count=n)[0]
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CIFAR10_MEAN, CIFAR10_STD))
    gray = (colors * std + mean).mean(1, keepdim=True)
    digits = grayscale(options.data, "mnist", False)[0][: 2 * n, None].float() / 255
    larger = F.interpolate(digits[n:], (32, 32), mode="bilinear", align_corners=False)
    unknown = {
        "gray CIFAR-10": F.interpolate(gray, (28, 28), mode="bilinear", antialias=True).clamp(0, 1),
        "noise": torch.rand(n, 1, 28, 28, generator=random),
        "shuffled": shuffle(others, 7, random),
        "MNIST": digits[:n],
        "smooth noise": smooth(n, 1, 4, 28, random),
        "faces": read_faces(options, 28, random),
        "maps": read_maps(options, 28, random),
        "negative digits": 1 - digits[n:],
        "gray house numbers": house_numbers(larger, random).mean(1, keepdim=True)[..., 2:30, 2:30],
    }
    few = Labeled((x[: options.train],), y[: options.train])
    return Family(nets, range(len(nets)), "9", few, known, unknown)


FAMILIES = {"CIFAR-10": color_family, "Fashion-MNIST": gray_family}


# Scores.


def of_networks(outputs: Sequence[Tensor]) -> ClassBeliefs:
    """The beliefs of networks as they stand, from their logits (n, c), averaged."""
    rule = make_rule(Categorical(), 1, outputs[0], 2, torch.Generator())  # of no use without a variance
    return mix_beliefs(
        [1 / len(outputs)] * len(outputs), [describe_classes(Categorical(), f, None, rule) for f in outputs]
    )


def fit(family: Family) -> linnet.Laplace:
    """Laplace of the last layers of all networks."""
    with common.expect(common.FAR):
        networks = list(family.networks)
        la = linnet.Laplace(networks, structure="full", params=f"{family.head}.*", dtype="float32", progress=False)
        return la.fit(family.train.X[0], family.train.y)


def ask(la: linnet.Laplace, x: Tensor) -> dict[str, Tensor]:
    """All scores of Laplace, and the variance of the logits."""
    return la.uncertainty(x, EVERY) | {VARIANCE: la.predict(x, return_std=True)[1].square().mean(1)}


def score_all(family: Family, la: linnet.Laplace) -> dict[str, list[dict[str, dict[str, Tensor]]]]:
    """Scores by method, network, score and kind of images; the test images have the name "".

    Args:
        family: Networks and images.
        la: Laplace of all networks, whose members are Laplace of one network each.
    """
    images = {"": family.known, **family.unknown}
    f = {kind: [in_parts(net, (x,)).double() for net in family.networks] for kind, x in images.items()}

    def plain(names: Sequence[UncertaintyScore], which: Sequence[int]) -> dict[str, dict[str, Tensor]]:
        beliefs = {kind: of_networks([outputs[i] for i in which]) for kind, outputs in f.items()}
        return {name: {kind: score_uncertainty(name, one) for kind, one in beliefs.items()} for name in names}

    def with_bars(la: linnet.Laplace) -> dict[str, dict[str, Tensor]]:
        asked = {kind: ask(la, x) for kind, x in images.items()}
        return {name: {kind: one[name] for kind, one in asked.items()} for name in (*EVERY, VARIANCE)}

    return {
        NETWORK: [plain(PLAIN, [i]) for i in family.alone],
        ENSEMBLE: [plain(MIXED, range(len(family.networks)))],
        LAPLACE: [with_bars(la.members_[i]) for i in family.alone],
        BOTH: [with_bars(la)],
    }


def describe(family: Family, la: linnet.Laplace) -> dict[str, Any]:
    """Why variances rank images the wrong way: logits, variances and inputs of the last layer of the first network."""
    net, la, kept = family.networks[0], la.members_[0], list[Tensor]()
    handle = net.get_submodule(family.head).register_forward_hook(
        lambda module, inputs, out: kept.append(inputs[0].detach())
    )
    found: dict[str, Any] = {}
    for kind, x in {"test images": family.known, **family.unknown}.items():
        kept.clear()
        f = in_parts(net, (x,)).double()
        length = torch.cat(kept).double().square().sum(1) + 1  # with the bias
        v = la.predict(x, return_std=True)[1].square().mean(1).double()
        found[kind] = {
            "squared length of the last layer's input": float(length.mean()),
            "variance of a logit": float(v.mean()),
            "largest logit less the mean logit": float((f - f.mean(1, keepdim=True)).amax(1).mean()),
            "rank correlation of variance and squared length": float(spearmanr(v, length).statistic),
        }
    handle.remove()
    return found


# Areas.


class Draws:
    """Bootstrap weights of the test images and of each kind, the same for all methods; the first draw is all images."""

    def __init__(self, counts: Mapping[str, int], draws: int, seed: int) -> None:
        random = np.random.default_rng(seed)

        def weights(n: int) -> Tensor:
            drawn = random.multinomial(n, [1 / n] * n, size=draws) / n
            return torch.as_tensor(np.vstack([np.full(n, 1 / n), drawn]))

        self.weights = {kind: weights(n) for kind, n in counts.items()}

    def area(self, scores: Mapping[str, Tensor], kind: str) -> Tensor:
        """Areas (1 + draws,): how often an image of a kind has a larger score than a test image."""
        a, b = scores[""].double()[:, None], scores[kind].double()[None]
        above = (b > a).double() + 0.5 * (b == a).double()
        return ((self.weights[""] @ above) * self.weights[kind]).sum(1)


def summarize(areas: Tensor) -> dict[str, float]:
    """The area with a 95 % interval."""
    low, high = areas[1:].quantile(torch.tensor([0.025, 0.975], dtype=areas.dtype)).tolist()
    return {"mean": float(areas[0]), "low": low, "high": high}


def run(options: argparse.Namespace) -> common.Outcome:
    """Both families of networks."""
    common.require_cpu(options, "The networks are small")
    common.fill(options, DEFAULTS)
    areas: dict[str, dict[str, dict[str, dict[str, Tensor]]]] = {}
    why = {}
    for name in options.families:
        family = FAMILIES[name](options)
        la = fit(family)
        counts = {"": len(family.known), **{kind: len(x) for kind, x in family.unknown.items()}}
        draws = Draws(counts, options.draws, options.seed)
        areas[name] = {
            method: {
                score: {
                    kind: torch.stack([draws.area(one[score], kind) for one in several]).mean(0)
                    for kind in family.unknown
                }
                for score in SCORES[method]
            }
            for method, several in score_all(family, la).items()
        }
        why[name] = describe(family, la)
        print(f"{name} done", flush=True)
    chosen = choose(areas)
    compared = {name: compare(areas, chosen, group) for name, group in (("held", HELD), ("fresh", FRESH))}
    metrics = {
        "settings": {key: getattr(options, key) for key in ("test", "unknown", "train", "draws", "seed")},
        "groups": {"development": DEVELOPMENT, "held": HELD, "fresh": FRESH},
        "why": why,
        "chosen": chosen,
        "compared": compared,
        "areas": {
            name: {
                method: {score: {kind: summarize(a) for kind, a in kinds.items()} for score, kinds in scores.items()}
                for method, scores in methods.items()
            }
            for name, methods in areas.items()
        },
    }
    return common.Outcome(metrics, figure(areas, chosen), rows(compared, chosen))


def mean_area(areas: Mapping[str, Any], method: str, score: str, half: Mapping[str, Sequence[str]]) -> Tensor:
    """The mean over the kinds of a half, and over families, (1 + draws,)."""
    each = [torch.stack([areas[name][method][score][kind] for kind in half[name]]).mean(0) for name in areas]
    return torch.stack(each).mean(0)


def choose(areas: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The score of each method with the largest mean area on the development half, and the areas of all scores."""
    found = {}
    for method, scores in SCORES.items():
        means: dict[str, float] = {score: float(mean_area(areas, method, score, DEVELOPMENT)[0]) for score in scores}
        found[method] = {"score": max(means, key=means.__getitem__), "development": means}
    return found


def compare(areas: Mapping[str, Any], chosen: Mapping[str, Any], group: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Areas of the chosen scores on a group, by family and over both, and what they are ahead of an ensemble."""
    found: dict[str, Any] = {}
    families: list[Mapping[str, Any]] = [{name: areas[name]} for name in areas]
    for some in [*families, areas] if len(areas) > 1 else families:
        each = {method: mean_area(some, method, chosen[method]["score"], group) for method in SCORES}
        found[" and ".join(some)] = {
            method: {"area": summarize(a), "less the ensemble": summarize(a - each[ENSEMBLE])}
            for method, a in each.items()
        }
    return found


def rows(compared: Mapping[str, Any], chosen: Mapping[str, Any]) -> Iterator[common.Row]:
    for group, families in compared.items():
        for name, methods in families.items():
            for method, found in methods.items():
                area, gap = (
                    f"{one['mean']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
                    for one in (found["area"], found["less the ensemble"])
                )
                less = "" if method == ENSEMBLE else f"; less the ensemble's {gap}"
                table = HELD if group == "held" else FRESH
                kinds = "; ".join(dict.fromkeys(kind for one in name.split(" and ") for kind in table[one]))
                yield common.Row(
                    f"{method}: AUROC of {name} against other kinds of images, {group}",
                    "not in a paper",
                    f"{chosen[method]['score']} {area}{less}",
                    f"mean over {kinds}",
                )


def figure(areas: Mapping[str, Any], chosen: Mapping[str, Any]) -> Figure:
    """The area of each kind of images, for the chosen scores and for the variance of the logits."""
    shown = {f"{method}: {chosen[method]['score']}": (method, chosen[method]["score"]) for method in SCORES}
    shown["Laplace: variance of the logits"] = (LAPLACE, VARIANCE)
    palette = (plots.GRAY, plots.BLUE, plots.VERMILION, plots.PURPLE, plots.YELLOW)
    picture, axes = plt.subplots(1, len(areas), figsize=(5.5 * len(areas), 4.5), squeeze=False)
    for ax, (name, methods) in zip(axes[0], areas.items(), strict=True):
        kinds = [*DEVELOPMENT[name], *HELD[name], *FRESH[name]]
        for k, (label, (method, score)) in enumerate(shown.items()):
            found = [summarize(methods[method][score][kind]) for kind in kinds]
            at = [i + 0.12 * (k - 2) for i in range(len(kinds))]
            value = [one["mean"] for one in found]
            bars = [[v - one["low"] for v, one in zip(value, found, strict=True)]]
            bars.append([one["high"] - v for v, one in zip(value, found, strict=True)])
            ax.errorbar(value, at, xerr=np.maximum(bars, 0), fmt="o", ms=3, color=palette[k], label=label)
        for border in (len(DEVELOPMENT[name]), len(DEVELOPMENT[name]) + len(HELD[name])):
            ax.axhline(border - 0.5, color="0.7", lw=0.8)
        ax.set(xlabel="AUROC", title=f"{name} against")
        ax.set_yticks(range(len(kinds)), kinds)
        ax.invert_yaxis()
    plots.legend_below(picture, axes[0][0], 3)
    return picture
