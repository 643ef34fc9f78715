"""Linear probes on Fisher embeddings of models trained without labels (Zhang et al. 2022, tables 1 and 2, figure 7).

Models: the GAN and the VAE of CIFAR-10 that `encoders` trains, the discriminator (with the generator of `encoders`) and
the VAE of MNIST, and the WRN-40-2, a classifier, of figure 7. Features: the leading 32 to 256 components of the Fisher
vectors; activations; and the whole Fisher vectors, by their kernel. One logistic regression for all, its penalty by
held-out training images. `--parts` measures some models and keeps the others; on a GPU, models whose weights are not
there are left as earlier runs found them. What a model has shown is kept as soon as it is there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots, statistics
from experiments.common.data import cifar10, color_images, mnist
from experiments.common.logistic import fit_probe
from experiments.common.networks import NOISE, WideResNet, dcgan_discriminator, digit_vae, load_encoder, wide_resnet
from experiments.common.training import in_parts, in_turn
from experiments.zhang2022.spectra import from_generator
from linnet.fisher import FisherEmbedding, spectrum
from linnet.jacobian import Jacobian

GAN, VAE, TEACHER, DIGIT_GAN, DIGIT_VAE = "gan", "vae", "teacher", "mnist gan", "mnist vae"
TITLES = {
    GAN: "GAN of CIFAR-10",
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
CLASSES = 10
SAMPLES = 20_000  # generated images, at most, whose gradients give the center and the scale of the vectors
FURTHER = (512, 1024, 2048)  # components whose share of the variance the whole kernel tells
BLOCK, CHUNK = 1000, 500  # examples whose whole vectors a CPU holds; examples whose vectors are made at once
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
    whole: int | None = None  # images with labels of the whole Fisher vectors; None for all


SIZES = {
    "quick": Sizes(40, 30, (4, 8), (20,), draws=1, penalties=(10.0, 1.0)),
    "cpu": Sizes(1500, 1000, labels=(500, 1000)),
    "cuda": Sizes(50_000, 10_000, labels=(*LABELS, 10_000, 50_000), penalties=(10.0, 1.0, 0.1, 0.01, 1e-3)),
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
            x, y = images(options.data, "all" if train and not quick else "test", count=count)
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
    return Case(D, from_generator(G, min(sizes.train, SAMPLES)), *data, known)


# Probes.


@dataclass
class Probes:
    """The probes of one model: rows of results, and which test images each is right about."""

    name: str
    one: Case
    sizes: Sizes
    rows: dict[str, dict[str, Any]]
    right: dict[str, Tensor]

    def add(self, key: str, E: Tensor, new: Tensor, *, choices: tuple[bool, ...] = (), kernel: bool = False) -> None:
        """Fit to the first labels; standardized or not, whatever is better on held-out images."""
        y, truth = self.one.train[1][: len(E)], self.one.test[1]
        tried = []
        for standardize in choices or (False,):
            start = time.perf_counter()
            how: dict[str, Any] = {"penalties": self.sizes.penalties, "classes": CLASSES, "kernel": kernel}
            probe = fit_probe(E, y, standardize=standardize, **how)
            hits = (probe.predict(new) == truth).double().cpu()
            row = {
                "accuracy": float(hits.mean()),
                "error": float(hits.std() / math.sqrt(len(hits))),
                "numbers": E.shape[1],
                "labels": len(y),
                "penalty": probe.penalty,
                "held-out accuracy": probe.held_out,
                "converged": bool(probe.fitted.converged.all()),
                "standardized": standardize,
                "seconds": time.perf_counter() - start,
            }
            tried.append((row, hits))
        self.rows[key], self.right[key] = max(tried, key=lambda found: found[0]["held-out accuracy"])
        row = self.rows[key]
        print(
            f"{self.name}, {key}: {100 * row['accuracy']:.1f} % with {row['numbers']:,} numbers, penalty "
            f"{row['penalty']:g}, {row['seconds']:.1f} s",
            flush=True,
        )


def measure(name: str, options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """All probes of one model."""
    one = case(name, options, sizes)
    (x, y), (new, truth) = one.train, one.test
    probes = Probes(name, one, sizes, {}, {})
    found: dict[str, Any] = {"training images": len(y), "test images": len(truth), "probes": probes.rows}
    clock = common.Clock(options.device)
    found["stage seconds"] = clock.seconds

    def keep() -> None:
        common.keep(options, {name: {**found, "seconds": sum(clock.seconds.values()), "machine": machine}})

    machine = common.machine(options.device)
    fast: dict[str, Any] = (
        {"precision": "high", "tolerance": 1e-3, "passes": 10} if options.device.startswith("cuda") else {}
    )
    emb = linnet.FisherEmbedding(one.model, max(sizes.dimensions), score=one.score, progress=False, **fast)
    with clock("embedding"):
        E = emb.fit_transform(x)
        there = emb.transform(new)
    print(f"{name}: embedded in {clock.seconds['embedding']:.1f} s, {emb.passes_} passes", flush=True)
    found |= {"parameters": emb.lin_.p, "passes": emb.passes_}
    found["largest residual of a component"] = float(torch.as_tensor(emb.residuals_).max())
    found["explained variance"] = {str(k): float(emb.explained_variance_ratio_[:k].sum()) for k in sizes.dimensions}
    with clock("probes"):
        for k in sizes.dimensions:
            probes.add(str(k), E[:, :k], there[:, :k], choices=(True, False))
    common.forget(options, name)  # only now, as there is something to put in its place
    keep()
    key, known = "", [E, there]
    with clock("probes"):
        for key, read in one.activations.items():
            known = [in_parts(read, (images,)) for images in (x, new)]
            probes.add(f"{ACTIVATIONS}, {key}", *known, choices=(True, False))
    keep()
    k = max(k for k in sizes.dimensions if k <= 128)
    with clock("few labels"):
        few = {str(k): few_labels(E[:, :k], there[:, :k], one, sizes)}
        found["few labels"] = few
        keep()
        few[f"{ACTIVATIONS}, {key}"] = few_labels(*known, one, sizes)
    del known
    if not options.skip_whole:
        keep()
        count = min(sizes.whole or len(y), len(y))
        with clock("kernel"):
            K, away = whole_kernel(emb, x[:count], new)
            found["explained variance"] |= explain(K, sizes)
        with clock("whole"):
            probes.add(WHOLE, K, away, kernel=True)
            if count < len(y):  # as many labels, to compare with
                probes.add(f"{k}, labels of the whole", E[:count, :k], there[:, :k], choices=(True, False))
        probes.rows[WHOLE]["numbers"] = emb.lin_.p - emb.dropped_columns_
    alike = {WHOLE: probes.right.get(f"{k}, labels of the whole", probes.right[str(k)])}
    found[f"{k} components less the others"] = {
        key: difference(alike.get(key, probes.right[str(k)]), hits)
        for key, hits in probes.right.items()
        if not key.startswith(str(k))
    }
    return found


@torch.no_grad()
def whole_kernel(emb: FisherEmbedding, x: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of the whole Fisher vectors of examples, (n, n), and that of new ones with them, (m, n).

    A group of vectors stays in memory while all that follow it pass by; pairs are computed once. On a GPU gradients are
    made in tf32, vectors are rounded to bfloat16, whose errors average out over millions of parameters, and sums are in
    float32.
    """
    cuda, p, start = x.is_cuda, emb.lin_.p, time.perf_counter()
    precision: Any = "high" if cuda else "highest"
    given = emb.statistics_
    made = [emb.lin_.jacobian(images, precision=precision, progress=False) for images in (x, new)]
    dtype = made[0].dtype
    center, scale = None, None
    if given is not None:
        center, scale = given.Z.to(dtype), torch.where(given.kept, given.I.rsqrt(), 0.0).to(dtype)

    def vectors(J: Jacobian, index: Tensor) -> Tensor:
        V = J.subset(index).dense()
        if center is not None and scale is not None:
            V.sub_(center).mul_(scale)
        return V.bfloat16() if cuda else V

    def multiply(V: Tensor, W: Tensor) -> Tensor:
        out = torch.mm(V, W.T, out_dtype=torch.float32) if cuda else V @ W.T
        # With more than 2^31 numbers in a matrix the last entry is where a product would go wrong.
        v, w = V[-1].float(), W[-1].float()
        off = (out[-1, -1] - v @ w).abs() / (v.norm() * w.norm())
        if not bool(off < 1e-3):
            raise ArithmeticError(f"A kernel of {tuple(V.shape)} and {tuple(W.shape)} is off by {float(off):.1g}.")
        return out

    K = torch.empty(len(x), len(x), dtype=dtype, device=x.device)
    away = K.new_empty(len(new), len(x))
    if cuda:
        torch.cuda.empty_cache()  # what earlier stages have left counts as taken
    room = 0.4 * torch.cuda.mem_get_info(x.device)[0] if cuda else 8 * p * BLOCK
    group = min(len(x), max(CHUNK, int(room / ((2 if cuda else 8) * p)) // CHUNK * CHUNK))
    memory = K.new_empty(group, p, dtype=torch.bfloat16 if cuda else dtype)
    for first in torch.arange(len(x)).split(group):
        low, high = int(first[0]), int(first[-1]) + 1
        held = memory[: high - low]
        for index in first.split(CHUNK):
            held[int(index[0]) - low : int(index[-1]) + 1 - low] = vectors(made[0], index)
        K[low:high, low:high] = multiply(held, held)
        for J, out, rest in ((made[0], K, torch.arange(high, len(x))), (made[1], away, torch.arange(len(new)))):
            for index in rest.split(CHUNK) if len(rest) else ():
                out[int(index[0]) : int(index[-1]) + 1, low:high] = multiply(vectors(J, index), held)
        K[low:high, high:] = K[high:, low:high].T
        print(f"kernel: {high:,} of {len(x):,} examples, {time.perf_counter() - start:.1f} s", flush=True)
    return K, away


def explain(K: Tensor, sizes: Sizes) -> dict[str, float]:
    """Shares of the variance that more components than the embedding's explain, by subspace iteration."""
    wanted = [k for k in FURTHER if max(sizes.dimensions) < k <= len(K) // 4]
    if not wanted:
        return {}
    Q = torch.randn(len(K), wanted[-1] + 100, generator=torch.Generator().manual_seed(0)).to(K)
    for _ in range(6):
        Q = torch.linalg.qr(K @ Q).Q
    values = torch.linalg.eigvalsh(Q.T @ (K @ Q)).double()
    found = spectrum(values, trace=float(K.diagonal().double().sum()))
    return {str(k): float(found.explained[k - 1]) for k in wanted}


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    """How much more often one is right than the other, with a 95 % interval over the test images."""
    less = a - b
    half = 1.96 * float(less.std()) / math.sqrt(len(less))
    return {"mean": float(less.mean()), "low": float(less.mean()) - half, "high": float(less.mean()) + half}


def few_labels(E: Tensor, there: Tensor, one: Case, sizes: Sizes) -> dict[str, Any]:
    """Accuracies with a few labels of the same features, as many of each class; several draws, two penalties tried.

    All labels can be drawn in one way only, and with them the draws differ in what is held out.
    """
    found = {}
    for count in sizes.labels:
        values = []
        for draw in range(sizes.draws):
            y = one.train[1].cpu()
            index = in_turn(y, count, CLASSES, torch.Generator().manual_seed(draw)).to(E.device)
            how = {"penalties": sizes.penalties[1:3], "classes": CLASSES, "seed": draw}
            probe = fit_probe(E[index], one.train[1][index], **how)
            values.append(probe.score(there, one.test[1]))
        found[str(count)] = statistics.interval(values)
        print(f"{count:,} labels, {E.shape[1]:,} numbers: {100 * found[str(count)]['mean']:.1f} %", flush=True)
    return found


# The experiment.


ARGUMENTS = {
    "--parts": {"nargs": "*", "choices": TITLES, "help": "default: those of MNIST on a CPU, else of CIFAR-10"},
    "--train": "images with labels (default: 1,500; cuda: 50,000)",
    "--test": "images to predict (default: 1,000; cuda: 10,000)",
    "--whole": "images with labels of the whole Fisher vectors (default: all)",
    "--skip-whole": {"action": "store_true", "help": "leave out the whole Fisher vectors"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    kind = common.kind_of(options)
    sizes = SIZES[kind]
    if options.train or options.test:
        train = options.train or sizes.train
        labels = tuple(count for count in sizes.labels if count <= train)
        sizes = replace(sizes, train=train, test=options.test or sizes.test, labels=labels)
    sizes = replace(sizes, whole=options.whole)
    if options.parts is None:
        options.parts = {"quick": (GAN,), "cpu": (DIGIT_GAN, DIGIT_VAE)}.get(kind) or available(options)
    parts = common.measure_parts(options, options.parts, lambda name: measure(name, options, sizes))
    ordered = {name: parts[name] for name in TITLES if name in parts}
    command = "python -m experiments nfk_probe (and --device cuda)"
    spent = common.duration(sum(part["seconds"] for part in ordered.values()))
    return common.Outcome({"parts": ordered}, figure(ordered), rows(ordered), command, spent)


def available(options: argparse.Namespace) -> tuple[str, ...]:
    """The models of CIFAR-10 whose weights are there; the others stay as earlier runs found them."""
    found = []
    for name in (GAN, VAE, TEACHER):
        try:
            wide_resnet() if name == TEACHER else load_encoder(options, name)
        except FileNotFoundError as error:
            print(f"{name} is not measured, and earlier results stay: {error}", flush=True)
        else:
            found.append(name)
    return tuple(found)


def rows(parts: Mapping[str, Any]) -> Iterator[common.Row]:
    for name, part in parts.items():
        said, title = SAID.get(name, {}), TITLES[name]
        own = "our model, as theirs is not given; " if name in (GAN, VAE) else ""
        differs = (
            f"{own}p = {part['parameters']:,}, {part['training images']:,} training and {part['test images']:,} test "
            f"images, ± is a standard error over test images; {common.duration(part['seconds'])} on {part['machine']}"
        )
        shown = {key: f"{100 * row['accuracy']:.1f} ± {100 * row['error']:.1f}" for key, row in part["probes"].items()}
        of = {
            "components": [key for key in shown if key.isdigit()],
            "activations": [key for key in shown if key.startswith(ACTIVATIONS)],
        }
        for what, keys in of.items():
            known = ", ".join(f"{key}: {said[key]}" for key in keys if key in said)
            paper = known or said.get(what, "not in the paper")
            ours = ", ".join(f"{key.removeprefix('activations, ')}: {shown[key]}" for key in keys)
            yield common.Row(f"{title}, probe on {what}, accuracy %", paper, ours, differs)
        if WHOLE in shown and any(key.endswith("components less the others") for key in part):
            key = next(key for key in part if key.endswith("components less the others"))
            gap = {k: 100 * v for k, v in part[key][WHOLE].items()}
            ours = f"{shown[WHOLE]}; {key.split()[0]} components less that {statistics.show_interval(gap)} points"
            labels = part["probes"][WHOLE].get("labels", part["training images"])
            ours += f" ({labels:,} labels)" if labels < part["training images"] else ""
            yield common.Row(f"{title}, whole Fisher vector", said.get(WHOLE, "not in the paper"), ours, differs)
        for key, table in part.get("few labels", {}).items():
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
        flat = [key for key in probes if not key[0].isdigit()]
        shades = {key: (plots.ORANGE, plots.GREEN)[i % 2] for i, key in enumerate(flat)} | {WHOLE: plots.VERMILION}
        for key in flat:
            label = f"{'whole Fisher vector' if key == WHOLE else key} ({probes[key]['numbers']:,})"
            style = "--" if key == WHOLE else ":"
            top.axhline(100 * probes[key]["accuracy"], color=shades[key], ls=style, label=label)
        plots.log_ticks(top, at, ks)
        top.set(title=f"{TITLES[name]}\n{part['training images']:,} labels", xlabel="components")
        for key, table in part.get("few labels", {}).items():
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
