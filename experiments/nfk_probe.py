"""Linear probes on Fisher embeddings of models trained without labels (Zhang et al. 2022, tables 1 and 2, figure 7).

Models: the DCGAN and the VAE of CIFAR-10 that `encoders` trains, the discriminator (with the generator of `encoders`)
and the VAE of MNIST, and the WRN-40-2, a classifier, of figure 7. Features: the leading 32 to 256 components of the
Fisher vectors; activations; and the whole Fisher vectors, by their kernel. One logistic regression for all, its penalty
by held-out training images. `--parts` measures some models and keeps the others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common, gains, generative
from experiments.adaptation import Clock, in_parts, in_turn
from experiments.generative import color_gan, color_images, color_vae, digit_gan, digit_vae, folder_of
from experiments.logistic import RATIOS, Logistic, fit_logistic
from experiments.pretrained import cifar10, dcgan_discriminator, mnist
from experiments.spectra import from_generator
from experiments.wrn import wide_resnet
from linnet.fisher.probes import kernel_features

GAN, VAE, TEACHER, DIGIT_GAN, DIGIT_VAE = "gan", "vae", "teacher", "mnist gan", "mnist vae"
TITLES = {
    GAN: "DCGAN of CIFAR-10",
    VAE: "VAE of CIFAR-10",
    TEACHER: "WRN-40-2 of CIFAR-10",
    DIGIT_GAN: "DCGAN of MNIST",
    DIGIT_VAE: "VAE of MNIST",
}
SAID = {
    GAN: {"128": "89.8", "256": "89.8", "whole": "89.8 (5.9M numbers)", "activations": "65.3"},
    VAE: {"128": "63.2", "256": "68.7", "activations": "61.5 (with gradients)"},
}
DIMENSIONS = (32, 64, 128, 256)
LABELS = (500, 1000, 2000, 4000)
WHOLE, ACTIVATIONS = "whole", "activations"
DRAWS = {VAE: 8, DIGIT_VAE: 64}  # of the code; with one, its noise is most of the gradient
SAID_LABELS = {"500": "79.32", "1000": "85.23", "2000": "86.18", "4000": "87.05"}  # 100 less the error rates of table 2


@dataclass(frozen=True)
class Sizes:
    """Images with labels and to predict, components, numbers of labels, draws of each, penalties that are tried."""

    train: int
    test: int
    dimensions: tuple[int, ...] = DIMENSIONS
    labels: tuple[int, ...] = LABELS
    draws: int = 3
    penalties: tuple[float, ...] = RATIOS


SIZES = {
    "quick": Sizes(40, 30, (4, 8), (20,), draws=1, penalties=(10.0, 1.0)),
    "cpu": Sizes(1500, 1000, labels=(500, 1000)),
    "cuda": Sizes(6000, 4000),
}


@dataclass(frozen=True)
class Case:
    """A model and its images.

    Attributes:
        model: With its score.
        score: See `linnet.scores`.
        train: Images and labels.
        test: The same.
        activations: By name, from images to features (n, d).
    """

    model: nn.Module
    score: linnet.scores.Score
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    activations: Mapping[str, Callable[[Tensor], Tensor]]


def layers(blocks: nn.Module, side: int = 2) -> Callable[[Tensor], Tensor]:
    """The activations after each block, averaged to a few positions, all of them side by side."""

    def features(x: Tensor) -> Tensor:
        found = []
        for part in blocks.children():
            x = part(x)
            if isinstance(part, nn.Sequential | nn.LeakyReLU):
                found.append(F.adaptive_avg_pool2d(x, side).flatten(1))
        return torch.cat(found, 1)

    return features


def case(name: str, options: argparse.Namespace, sizes: Sizes) -> Case:
    """The model of a part; small and untrained if it is to be quick."""
    device, quick = options.device, options.quick
    weights = options.data / "weights"
    if name in (DIGIT_GAN, DIGIT_VAE):
        train, test = (
            tuple(t.to(device) for t in mnist(options.data, part, network="dcgan", count=count))
            for part, count in ((True, sizes.train), (False, sizes.test))
        )
        if name == DIGIT_VAE:
            vae = digit_vae(weights).to(device)
            train, test = (((x / 2 + 0.5).flatten(1), y) for x, y in (train, test))
            known = {"hidden layer": lambda x: vae.fc1(x).relu(), "code": lambda x: vae.encode(x)[0]}
            return Case(vae, linnet.scores.vae(samples=DRAWS[name]), train, test, known)
        D = dcgan_discriminator(weights).to(device)
        small = generative.Generator(4).eval() if quick else None
        G = (small or digit_gan(folder_of(options, "dcgan_generator_mnist"))[1]).to(device)
        lower = nn.Sequential(*list(D.main)[:-1])
        known = {"last layer": lambda x: lower(x).flatten(1), "all layers": layers(lower)}
        return Case(D, from_generator(G, sizes.train), train, test, known)
    if name == TEACHER:
        test = cifar10(options.data, "test", count=sizes.test)
        train = test if quick else cifar10(options.data, "train_1", count=sizes.train)
    else:
        test = color_images(options.data, ("test",), count=sizes.test)
        train = test if quick else color_images(options.data, ("train_1",), count=sizes.train)
    train, test = (tuple(t.to(device) for t in pair) for pair in (train, test))
    if name == TEACHER:
        net = (generative.WideResNet(10, 1).eval() if quick else wide_resnet()).to(device)
        last = {"last layer": lambda x: F.relu(net.bn(net.groups(net.conv1(x)))).mean((2, 3))}
        return Case(net, linnet.scores.classifier(), train, test, last)
    if name == VAE:
        vae = (generative.ColorVAE(4).eval() if quick else color_vae(folder_of(options, "vae_cifar10"))).to(device)
        known = {"code": lambda x: vae.encode(x)[0], "all layers": layers(vae.blocks)}
        score = linnet.scores.vae(likelihood="gaussian", noise=generative.NOISE, samples=DRAWS[name])
        return Case(vae, score, train, test, known)
    tiny = (generative.ColorDiscriminator(4).eval(), generative.ColorGenerator(4).eval())
    pair = tiny if quick else color_gan(folder_of(options, "dcgan_generator_cifar10"))
    D, G = (net.to(device) for net in pair)
    known = {"last layer": lambda x: D.blocks(x).flatten(1), "all layers": layers(D.blocks)}
    return Case(D, from_generator(G, sizes.train), train, test, known)


# Probes.


def probed(
    E: Tensor, there: Tensor, one: Case, *, standardize: bool, penalties: tuple[float, ...]
) -> tuple[dict[str, Any], Tensor]:
    """A probe's accuracy and its standard error over test images, and which it is right about."""
    start = time.perf_counter()
    probe: Logistic = fit_logistic(E, one.train[1], standardize=standardize, penalty=penalties)
    right = probe.right(there, one.test[1]).double().cpu()
    found = {
        "accuracy": float(right.mean()),
        "error": float(right.std() / math.sqrt(len(right))),
        "numbers": E.shape[1],
        "held-out accuracy": probe.held_out,
        "seconds": time.perf_counter() - start,
    }
    return found, right


def measured(name: str, options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """All probes of one model."""
    one = case(name, options, sizes)
    (x, y), (new, truth) = one.train, one.test
    rows: dict[str, dict[str, Any]] = {}
    right: dict[str, Tensor] = {}

    def add(key: str, E: Tensor, there: Tensor, choices: tuple[bool, ...]) -> None:
        # Standardized or not, whatever is better on held-out images.
        given = {"penalties": sizes.penalties}
        tried = [(standardize, *probed(E, there, one, standardize=standardize, **given)) for standardize in choices]
        standardize, row, hits = max(tried, key=lambda found: found[1]["held-out accuracy"])
        rows[key], right[key] = {**row, "standardized": standardize}, hits
        print(f"{name}, {key}: {100 * row['accuracy']:.1f} % with {row['numbers']:,} numbers", flush=True)

    start = time.perf_counter()
    fast: dict[str, Any] = {"precision": "high", "tolerance": 1e-4} if options.device.startswith("cuda") else {}
    emb = linnet.FisherEmbedding(one.model, max(sizes.dimensions), score=one.score, progress=False, **fast)
    E = emb.fit_transform(x)
    there = emb.transform(new)
    seconds = {"embedding": time.perf_counter() - start}
    for k in sizes.dimensions:
        add(str(k), E[:, :k], there[:, :k], (True, False))
    with torch.no_grad():
        for key, read in one.activations.items():
            here, away = (in_parts(read, (images,)) for images in (x, new))
            add(f"{ACTIVATIONS}, {key}", here, away, (True, False))
    if not options.skip_whole:
        start = time.perf_counter()
        full, away = kernel_features(emb.gram(x), emb.gram(new, x))
        seconds["kernel"] = time.perf_counter() - start
        add(WHOLE, full, away, (False,))
        rows[WHOLE]["numbers"] = emb.lin_.p - emb.dropped_columns_
    few = {key: few_labels(E[:, :k], there[:, :k], one, sizes) for key, k in middle(sizes).items()}
    key, read = list(one.activations.items())[-1]
    with torch.no_grad():
        here, away = (in_parts(read, (images,)) for images in (x, new))
    few[f"{ACTIVATIONS}, {key}"] = few_labels(here, away, one, sizes)
    reference = str(max(k for k in sizes.dimensions if k <= 128))
    less = {key: difference(right[reference], hits) for key, hits in right.items() if key != reference}
    return {
        "parameters": emb.lin_.p,
        "training images": len(y),
        "test images": len(truth),
        "explained variance": {str(k): float(emb.explained_variance_ratio_[:k].sum()) for k in sizes.dimensions},
        "probes": rows,
        f"{reference} components less the others": less,
        "few labels": few,
        "stage seconds": seconds,
    }


def middle(sizes: Sizes) -> dict[str, int]:
    """The number of components that few labels are tried with."""
    k = max(k for k in sizes.dimensions if k <= 128)
    return {str(k): k}


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    """How much more often one is right than the other, with a 95 % interval over the test images."""
    less = a - b
    half = 1.96 * float(less.std()) / math.sqrt(len(less))
    return {"mean": float(less.mean()), "low": float(less.mean()) - half, "high": float(less.mean()) + half}


def few_labels(E: Tensor, there: Tensor, one: Case, sizes: Sizes) -> dict[str, Any]:
    """Accuracies with a few labels of the same features, as many of each class; several draws, two penalties tried."""
    found = {}
    for count in sizes.labels:
        values = []
        for draw in range(sizes.draws):
            y = one.train[1].cpu()
            index = in_turn(y, count, 10, torch.Generator().manual_seed(draw)).to(E.device)
            probe = fit_logistic(E[index], one.train[1][index], penalty=sizes.penalties[1:3], seed=draw)
            values.append(float(probe.right(there, one.test[1]).double().mean()))
        found[str(count)] = gains.interval(values)
    return found


# The experiment.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="*", choices=TITLES, default=None, help="default: those of MNIST on a CPU, else of CIFAR-10"
    )
    parser.add_argument("--train", type=int, default=None, help="images with labels (default: 1,500; cuda: 6,000)")
    parser.add_argument("--test", type=int, default=None, help="images to predict (default: 1,000; cuda: 4,000)")
    parser.add_argument("--skip-whole", action="store_true", help="leave out the whole Fisher vectors")


def run(options: argparse.Namespace) -> common.Outcome:
    kind = "quick" if options.quick else options.device.partition(":")[0]
    sizes = SIZES[kind]
    if options.train or options.test:
        train = options.train or sizes.train
        labels = tuple(count for count in sizes.labels if count <= train)
        sizes = replace(sizes, train=train, test=options.test or sizes.test, labels=labels)
    if options.parts is None:
        options.parts = {"quick": (GAN,), "cpu": (DIGIT_GAN, DIGIT_VAE)}.get(kind, (GAN, VAE, TEACHER))
    parts = common.earlier(options, "nfk_probe").get("parts", {})
    for name in options.parts:
        clock = Clock(options.device)
        with clock("seconds"):
            found = measured(name, options, sizes)
        found |= {**clock.seconds, "machine": common.machine(options.device)}
        parts = common.keep(options, "nfk_probe", {name: found})
    ordered = {name: parts[name] for name in TITLES if name in parts}
    command = "python -m experiments nfk_probe (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in ordered.values()))
    return common.Outcome({"parts": ordered}, figure(ordered), rows(ordered), command, spent)


def rows(parts: Mapping[str, Any]) -> list[common.Row]:
    result = []
    for name, part in parts.items():
        said, title = SAID.get(name, {}), TITLES[name]
        differs = (
            f"p = {part['parameters']:,}, {part['training images']:,} training and {part['test images']:,} test "
            f"images, ± is a standard error over test images; {common.duration(part['seconds'])} on {part['machine']}"
        )
        shown = {key: f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}" for key, row in part["probes"].items()}
        of = {"components": [key for key in shown if key.isdigit()], "activations": [k for k in shown if "," in k]}
        for what, keys in of.items():
            paper = ", ".join(f"{key}: {said[key]}" for key in keys if key in said) or said.get(
                what, "not in the paper"
            )
            ours = ", ".join(f"{key.removeprefix('activations, ')}: {shown[key]}" for key in keys)
            result.append(common.Row(f"{title}, probe on {what}, accuracy %", paper, ours, differs))
        if WHOLE in shown:
            key = next(key for key in part if key.endswith("components less the others"))
            gap = {k: 100 * v for k, v in part[key][WHOLE].items()}
            ours = f"{shown[WHOLE]}; {key.split()[0]} components less that {gains.shown(gap)} points"
            result.append(
                common.Row(f"{title}, whole Fisher vector", said.get(WHOLE, "not in the paper"), ours, differs)
            )
        for key, table in part["few labels"].items():
            ours = ", ".join(f"{n}: {100 * v['mean']:.1f}" for n, v in table.items())
            known = name == GAN and key.isdigit()
            paper = ", ".join(f"{n}: {v}" for n, v in SAID_LABELS.items()) if known else "not in the paper"
            what = f"{title}, few labels, {key}{' components' if key.isdigit() else ''}, accuracy %"
            result.append(common.Row(what, paper, ours, f"means of draws of labels; {differs}"))
    return result


def figure(parts: Mapping[str, Any]) -> Figure:
    """Above, accuracy against components; below, against labels. A column for each model."""
    with common.style():
        result = Figure(figsize=(3.4 * max(len(parts), 2), 6.2))
        axes = result.subplots(2, max(len(parts), 1), squeeze=False)
        colors = (common.ORANGE, common.GREEN)
        for (top, below), (name, part) in zip(axes.T, parts.items(), strict=False):
            probes = part["probes"]
            ks = [key for key in probes if key.isdigit()]
            values, errors = ([100 * probes[k][key] for k in ks] for key in ("accuracy", "error"))
            at = [int(k) for k in ks]
            top.errorbar(at, values, yerr=errors, fmt="o-", color=common.BLUE, capsize=2, label="NFK components")
            flat = {key: row for key, row in probes.items() if not key.isdigit()}
            shades = {key: common.VERMILION if key == WHOLE else colors[i % 2] for i, key in enumerate(flat)}
            for key, row in flat.items():
                label = f"whole Fisher vector ({row['numbers']:,})" if key == WHOLE else f"{key} ({row['numbers']:,})"
                top.axhline(100 * row["accuracy"], color=shades[key], ls="--" if key == WHOLE else ":", label=label)
            top.set_xscale("log", base=2)
            top.set_xticks(at, ks)
            top.set(title=f"{TITLES[name]}\n{part['training images']:,} labels", xlabel="components")
            top.legend(fontsize=7, loc="lower right")
            for key, table in part["few labels"].items():
                color, label = (common.BLUE, f"{key} NFK components") if key.isdigit() else (shades[key], key)
                counts = [int(n) for n in table]
                mean = [100 * v["mean"] for v in table.values()]
                half = [100 * (v["high"] - v["mean"]) if v["high"] is not None else 0.0 for v in table.values()]
                below.errorbar(counts, mean, yerr=half, fmt="o-", color=color, capsize=2, label=label)
            below.set_xscale("log")
            below.set_xticks(counts, [f"{n:,}" for n in counts])
            below.minorticks_off()
            below.set(xlabel="labels")
            below.legend(fontsize=7, loc="lower right")
        for ax in axes.flat:  # room for the legend
            low, high = ax.get_ylim()
            ax.set_ylim(low - 0.4 * (high - low), high)
        for ax in axes[:, 0]:
            ax.set_ylabel("test accuracy, %")
    return result
