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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.exceptions import ConvergenceWarning, FitFailedWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, ShuffleSplit
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots, statistics
from experiments.common.data import cifar10, color_images, mnist
from experiments.common.networks import NOISE, WideResNet, dcgan_discriminator, digit_vae, load_encoder, wide_resnet
from experiments.common.training import in_parts, in_turn
from experiments.zhang2022.spectra import from_generator
from linnet.fisher import kernel_features

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
    penalties: tuple[float, ...] = (10.0, 1.0, 0.1, 0.01)


SIZES = {
    "quick": Sizes(40, 30, (4, 8), (20,), draws=1, penalties=(10.0, 1.0)),
    "cpu": Sizes(1500, 1000, labels=(500, 1000)),
    "cuda": Sizes(6000, 4000),
}


@dataclass(frozen=True)
class Case:
    """A model and its images."""

    model: nn.Module  # with its score
    score: linnet.scores.Score  # see `linnet.scores`
    train: tuple[Tensor, Tensor]  # images and labels
    test: tuple[Tensor, Tensor]  # the same
    activations: Mapping[str, Callable[[Tensor], Tensor]]  # by name, from images to features (n, d)


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

    def read(train: bool, count: int) -> tuple[Tensor, Tensor]:
        if name in (DIGIT_GAN, DIGIT_VAE):
            x, y = mnist(options.data, train, network="dcgan", count=count)
            x = (x / 2 + 0.5).flatten(1) if name == DIGIT_VAE else x
        else:
            images = cifar10 if name == TEACHER else color_images
            x, y = images(options.data, "train_1" if train and not quick else "test", count=count)
        return x.to(device), y.to(device)

    test = read(False, sizes.test)
    data = (test if quick and "mnist" not in name else read(True, sizes.train)), test
    if name == DIGIT_VAE:
        vae = digit_vae(weights).to(device)
        known = {"hidden layer": lambda x: vae.fc1(x).relu(), "code": lambda x: vae.encode(x)[0]}
        return Case(vae, linnet.scores.vae(samples=DRAWS[name]), *data, known)
    if name == TEACHER:
        net = (WideResNet(10, 1).eval() if quick else wide_resnet()).to(device)
        last = {"last layer": lambda x: F.relu(net.bn(net.groups(net.conv1(x)))).mean((2, 3))}
        return Case(net, linnet.scores.classifier(), *data, last)
    if name == VAE:
        vae = load_encoder(options, "vae").eval().to(device)
        known = {"code": lambda x: vae.encode(x)[0], "all layers": layers(vae.blocks)}
        score = linnet.scores.vae(likelihood="gaussian", noise=NOISE, samples=DRAWS[name])
        return Case(vae, score, *data, known)
    D, G = load_encoder(options, "mnist" if name == DIGIT_GAN else "gan")
    D = dcgan_discriminator(weights) if name == DIGIT_GAN else D
    D, G = D.eval().to(device), G.eval().to(device)
    lower = nn.Sequential(*list(D.main)[:-1]) if name == DIGIT_GAN else D.blocks
    known = {"last layer": lambda x: lower(x).flatten(1), "all layers": layers(lower)}
    return Case(D, from_generator(G, sizes.train), *data, known)


# Probes.


def fit_probe(
    E: Tensor, y: Tensor, *, penalties: Sequence[float], standardize: bool = True, seed: int = 0
) -> tuple[Pipeline, float]:
    """A logistic regression, with the penalty of the best accuracy on a fifth of the examples that is held out.

    Args:
        E: Features (n, d).
        y: Classes (n,).
        penalties: Those tried, strongest first, over the mean squared length of the features. A penalty with which the
            fit does not converge is not taken.
        standardize: Whether each feature is divided by its spread.
        seed: Of the examples that are held out.

    Returns:
        The probe, and its accuracy on these.
    """
    scaler = StandardScaler(with_std=standardize)
    Z = scaler.fit_transform(as_array(E))
    strengths = {"C": 1 / (np.square(Z).sum(1).mean() * np.array(penalties))}
    split = ShuffleSplit(1, test_size=0.2, random_state=seed)
    search = GridSearchCV(LogisticRegression(max_iter=2000), strengths, cv=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        warnings.simplefilter("ignore", FitFailedWarning)
        search.fit(Z, as_array(y))
    return make_pipeline(scaler, search.best_estimator_), float(search.best_score_)


def as_array(x: Tensor) -> np.ndarray:
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def probe_features(
    E: Tensor, there: Tensor, one: Case, *, standardize: bool, penalties: tuple[float, ...]
) -> tuple[dict[str, Any], Tensor]:
    """A probe's accuracy and its standard error over test images, and which it is right about."""
    start = time.perf_counter()
    probe, held_out = fit_probe(E, one.train[1], standardize=standardize, penalties=penalties)
    right = torch.as_tensor(probe.predict(as_array(there)) == as_array(one.test[1])).double()
    found = {
        "accuracy": float(right.mean()),
        "error": float(right.std() / math.sqrt(len(right))),
        "numbers": E.shape[1],
        "held-out accuracy": held_out,
        "seconds": time.perf_counter() - start,
    }
    return found, right


def measure(name: str, options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """All probes of one model."""
    one = case(name, options, sizes)
    (x, y), (new, truth) = one.train, one.test
    rows: dict[str, dict[str, Any]] = {}
    right: dict[str, Tensor] = {}

    def add(key: str, E: Tensor, there: Tensor, choices: tuple[bool, ...]) -> None:
        # Standardized or not, whatever is better on held-out images.
        given = {"penalties": sizes.penalties}
        tried = [(choice, *probe_features(E, there, one, standardize=choice, **given)) for choice in choices]
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
    for key, read in one.activations.items():
        known = [in_parts(read, (images,)) for images in (x, new)]
        add(f"{ACTIVATIONS}, {key}", *known, (True, False))
    if not options.skip_whole:
        start = time.perf_counter()
        full, away = kernel_features(emb.gram(x), emb.gram(new, x))
        seconds["kernel"] = time.perf_counter() - start
        add(WHOLE, full, away, (False,))
        rows[WHOLE]["numbers"] = emb.lin_.p - emb.dropped_columns_
    k = max(k for k in sizes.dimensions if k <= 128)
    reference = str(k)
    few = {reference: few_labels(E[:, :k], there[:, :k], one, sizes)}
    few[f"{ACTIVATIONS}, {key}"] = few_labels(*known, one, sizes)
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
            probe, _ = fit_probe(E[index], one.train[1][index], penalties=sizes.penalties[1:3], seed=draw)
            values.append(float(probe.score(as_array(there), as_array(one.test[1]))))
        found[str(count)] = statistics.interval(values)
    return found


# The experiment.


ARGUMENTS = {
    "--parts": {"nargs": "*", "choices": TITLES, "help": "default: those of MNIST on a CPU, else of CIFAR-10"},
    "--train": "images with labels (default: 1,500; cuda: 6,000)",
    "--test": "images to predict (default: 1,000; cuda: 4,000)",
    "--skip-whole": {"action": "store_true", "help": "leave out the whole Fisher vectors"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    kind = common.kind_of(options)
    sizes = SIZES[kind]
    if options.train or options.test:
        train = options.train or sizes.train
        labels = tuple(count for count in sizes.labels if count <= train)
        sizes = replace(sizes, train=train, test=options.test or sizes.test, labels=labels)
    if options.parts is None:
        options.parts = {"quick": (GAN,), "cpu": (DIGIT_GAN, DIGIT_VAE)}.get(kind, (GAN, VAE, TEACHER))
    parts = common.measure_parts(options, options.parts, lambda name: measure(name, options, sizes))
    ordered = {name: parts[name] for name in TITLES if name in parts}
    command = "python -m experiments nfk_probe (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in ordered.values()))
    return common.Outcome({"parts": ordered}, figure(ordered), rows(ordered), command, spent)


def rows(parts: Mapping[str, Any]) -> Iterator[common.Row]:
    for name, part in parts.items():
        said, title = SAID.get(name, {}), TITLES[name]
        differs = (
            f"p = {part['parameters']:,}, {part['training images']:,} training and {part['test images']:,} test "
            f"images, ± is a standard error over test images; {common.duration(part['seconds'])} on {part['machine']}"
        )
        shown = {key: f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}" for key, row in part["probes"].items()}
        of = {"components": [key for key in shown if key.isdigit()], "activations": [k for k in shown if "," in k]}
        for what, keys in of.items():
            known = ", ".join(f"{key}: {said[key]}" for key in keys if key in said)
            paper = known or said.get(what, "not in the paper")
            ours = ", ".join(f"{key.removeprefix('activations, ')}: {shown[key]}" for key in keys)
            yield common.Row(f"{title}, probe on {what}, accuracy %", paper, ours, differs)
        if WHOLE in shown:
            key = next(key for key in part if key.endswith("components less the others"))
            gap = {k: 100 * v for k, v in part[key][WHOLE].items()}
            ours = f"{shown[WHOLE]}; {key.split()[0]} components less that {statistics.show_interval(gap)} points"
            yield common.Row(f"{title}, whole Fisher vector", said.get(WHOLE, "not in the paper"), ours, differs)
        for key, table in part["few labels"].items():
            ours = ", ".join(f"{n}: {100 * v['mean']:.1f}" for n, v in table.items())
            known = name == GAN and key.isdigit()
            paper = ", ".join(f"{n}: {v}" for n, v in SAID_LABELS.items()) if known else "not in the paper"
            what = f"{title}, few labels, {key}{' components' if key.isdigit() else ''}, accuracy %"
            yield common.Row(what, paper, ours, f"means of draws of labels; {differs}")


def figure(parts: Mapping[str, Any]) -> Figure:
    """Above, accuracy against components; below, against labels. A column for each model."""
    result = Figure(figsize=(3.4 * max(len(parts), 2), 6.2))
    axes = result.subplots(2, max(len(parts), 1), squeeze=False)
    for (top, below), (name, part) in zip(axes.T, parts.items(), strict=False):
        probes = {key: {**row, "mean": row["accuracy"]} for key, row in part["probes"].items()}
        ks = [key for key in probes if key.isdigit()]
        at = [int(k) for k in ks]
        own = {"color": plots.BLUE, "capsize": 2, "factor": 100}
        plots.draw_means(top, at, [probes[k] for k in ks], **own, label="NFK components")
        flat = [key for key in probes if not key.isdigit()]
        shades = {key: (plots.ORANGE, plots.GREEN)[i % 2] for i, key in enumerate(flat)} | {WHOLE: plots.VERMILION}
        for key in flat:
            label = f"{'whole Fisher vector' if key == WHOLE else key} ({probes[key]['numbers']:,})"
            style = "--" if key == WHOLE else ":"
            top.axhline(100 * probes[key]["accuracy"], color=shades[key], ls=style, label=label)
        plots.log_ticks(top, at, ks)
        top.set(title=f"{TITLES[name]}\n{part['training images']:,} labels", xlabel="components")
        for key, table in part["few labels"].items():
            label = f"{key} NFK components" if key.isdigit() else key
            given = own | {"color": shades.get(key, plots.BLUE), "label": label}
            plots.draw_means(below, [int(n) for n in table], list(table.values()), **given)
            plots.log_ticks(below, [int(n) for n in table])
        below.set(xlabel="labels")
    for ax in axes.flat:  # room for the legend
        low, high = ax.get_ylim()
        ax.set_ylim(low - 0.4 * (high - low), high)
        ax.legend(fontsize=7, loc="lower right")
    for ax in axes[:, 0]:
        ax.set_ylabel("test accuracy, %")
    return result
