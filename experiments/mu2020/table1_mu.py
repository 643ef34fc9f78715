"""Gradient features of random and pretrained layers (Mu et al. 2020, tables 1 to 3).

Encoders trained without labels: the encoder of a BiGAN, as in the paper, the discriminator of a GAN and the encoder of
a VAE of CIFAR-10 (tables 1 and 2), a network that sees rotations (the form of table 3), and the discriminator of MNIST
that is supplied (table 2). Their top one, two or three blocks adapt, or all of them, by the mode or the best Gaussian
(Maddox et al. 2021, table 1). Layers below them, they, and the head are each random or pretrained: eight ways; beside
them a linear classifier, fine-tuning of the same layers, and gradient features at the fine-tuned network. Batch norm is
folded where a convolution precedes it. `--parts`, `--tops` and `--draws` measure some and keep the others, and with
`--anew` drop what earlier runs have found of these parts.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import plots, statistics
from experiments.common.data import color_images, mnist
from experiments.common.networks import dcgan_discriminator, load_encoder
from experiments.common.training import Labeled, Search, in_parts, in_turn
from experiments.mu2020.contest import Contest, Top

CLASSES = 10
PARTS = {
    "bigan": "BiGAN encoder, CIFAR-10",
    "gan": "GAN discriminator, CIFAR-10",
    "vae": "VAE encoder, CIFAR-10",
    "rotation": "rotation network, CIFAR-10",
    "mnist": "DCGAN discriminator, MNIST",
}
ADVERSARIAL = ("bigan", "gan")
TOPS = (1, 2, 3, 0)  # 0: all
ALL = "all"
BASELINE, TUNED, BOTH = "linear", "fine-tuned", "fine-tuned, gradient features"
STATES = ("random", "pretrained")
OURS = "pretrained / pretrained / pretrained"
GAUSSIAN = f"{OURS}, vi"
LABELS = {"quick": 20, "cpu": 100, "cuda": 500}
TEST = {"quick": 40, "cpu": 1000, "cuda": 5000}
SEARCH = {
    "quick": Search((1e-3,), 1),
    "cpu": Search((3e-3, 1e-3, 3e-4), 30),
    "cuda": Search((3e-3, 1e-3, 3e-4, 1e-4), 40, patience=8),
}
# Table 1: conv5, conv4-5, conv3-5 of a BiGAN's encoder.
SAID = {
    "random / random / random": (63.05, 62.74, 63.26),
    "random / random / pretrained": (64.61, 65.00, 64.85),
    "random / pretrained / random": (63.62, 63.33, 63.10),
    "random / pretrained / pretrained": (64.38, 64.31, 64.13),
    "pretrained / random / random": (67.48, 65.24, 57.41),
    "pretrained / random / pretrained": (69.11, 67.10, 62.62),
    "pretrained / pretrained / random": (68.89, 69.83, 70.30),
    OURS: (70.21, 70.74, 71.30),
    GAUSSIAN: (),
    BASELINE: (63.38,) * 3,
    TUNED: (72.27, 74.16, 77.14),
    BOTH: (72.26, 74.28, 76.84),
}
SAID_VAE = {BASELINE: (50.67,) * 3, OURS: (61.19, 63.52, 64.77), TUNED: (65.14, 70.06, 74.61)}


def encoder(part: str, options: argparse.Namespace) -> list[nn.Module]:
    """The blocks of a trained encoder, bottom to top; the last three are those that may adapt."""
    if part == "mnist":
        weights = (None, 4) if options.quick else (options.data / "weights", 64)
        main = dcgan_discriminator(weights[0], width=weights[1]).main
        # The first block is a layer without batch norm.
        return [nn.Sequential(*main[:2]), nn.Sequential(*main[2:5]), nn.Sequential(*main[5:8])]
    net = load_encoder(options, part)
    if part == "rotation":
        lower = nn.Sequential(net.conv1, *net.groups[:2])
        return [lower, *net.groups[2][:2], nn.Sequential(net.groups[2][2], net.bn, nn.ReLU())]
    return list((net[0] if part in ADVERSARIAL else net).blocks)


def images(part: str, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Training and test images with labels."""
    if part == "mnist":
        return [mnist(options.data, train, network="dcgan", count=10_000) for train in (True, False)]
    test = color_images(options.data, "test")
    if options.quick:
        return [(test[0][:500], test[1][:500]), (test[0][500:], test[1][500:])]
    # The GANs have seen all training images, the other two the first 20,000.
    return [color_images(options.data, "all" if part in ADVERSARIAL else "train"), test]


@torch.no_grad()
def redraw(blocks: Sequence[nn.Module], which: Sequence[bool], x: Tensor, seed: int) -> list[nn.Module]:
    """Copies of the blocks, some with new weights as torch draws them.

    From the first new one upwards, batch norm takes the statistics of images x, as it would in training.
    """
    new = [copy.deepcopy(block).eval() for block in blocks]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block, redraw in zip(new, which, strict=True):
            for layer in block.modules() if redraw else ():
                if isinstance(layer, nn.Conv2d | nn.BatchNorm2d):
                    layer.reset_parameters()
    changed = False
    for block, redraw in zip(new, which, strict=True):
        changed = changed or redraw
        if changed:
            for layer in block.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.reset_running_stats()
                    layer.momentum = None  # the average over all batches, of which there is one
            block.train()
        x = block(x)
        block.eval()
    return new


def features(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """What blocks make of images."""
    return in_parts(nn.Sequential(*blocks), (x,))


# One draw of labels.


def measure(
    part: str, top: int, draw: int, data: Sequence[tuple[Tensor, Tensor]], options: argparse.Namespace
) -> Mapping[str, Mapping[str, Any]]:
    """Accuracies of all rows of table 1, or of those of table 2, with so many blocks."""
    kind = common.kind_of(options)
    generator = torch.Generator().manual_seed(draw)
    (x, y), (x_test, y_test) = data
    index = in_turn(y, options.labels, CLASSES, generator)
    at = torch.randperm(len(y_test), generator=generator)[: options.test]
    (x, y), (new, truth) = (
        (a[i].to(options.device), b[i].to(options.device)) for a, b, i in ((x, y, index), (x_test, y_test, at))
    )
    blocks = [block.to(options.device) for block in encoder(part, options)]
    ways = [(True, True), (True, False), (False, True), (False, False)]
    place, top = str(top or ALL), top or len(blocks)
    combinations = ways if part in options.ablate and place != ALL else ways[-1:]
    rows: dict[str, dict[str, Any]] = {}
    penalty: Any = "cv"
    for lower, upper in reversed(combinations):  # the pretrained network first: its head's penalty serves all
        below = len(blocks) - top
        which = [lower] * below + [upper] * top
        network = redraw(blocks, which, x[:500], 1000 + draw)
        A, A_new = (features(network[:below], images) for images in (x, new))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw)
            width = features(network[below:], A[:2]).shape[1]
            plain = Top(network[below:], nn.Linear(width, CLASSES)).to(options.device).eval()
        if part != "rotation":  # whose batch norms come before the convolutions
            plain = linnet.fold_batchnorm(plain)
        contest = Contest(
            plain,
            Labeled((A,), y),
            Labeled((A_new,), truth),
            CLASSES,
            options.device,
            SEARCH[kind],
            draw,
            dtype="auto" if kind == "cuda" else "float32",
        )
        linear, headed = contest.linear(penalty)
        penalty = linear["penalty"]
        name = f"{STATES[not lower]} / {STATES[not upper]}"
        for head, model in (("random", plain), ("pretrained", headed)):
            if head == "pretrained" or len(combinations) > 1:
                rows[f"{name} / {head}"] = contest.tangent(model, mean="zero", inference="map")
        if not lower and not upper:
            rows[GAUSSIAN] = contest.tangent(headed, mean="zero", inference="vi")
            rows[BASELINE] = linear
            rows[TUNED], tuned = contest.tune(penalty)
            rows[BOTH] = contest.tangent(tuned, mean="zero", inference="map")
        for key, row in rows.items():
            if key.startswith(name) or (not lower and not upper):
                print(f"{part}, top {place}, draw {draw}, {key}: {100 * row['accuracy']:.1f} %", flush=True)
        kept = {key: {str(draw): row} for key, row in rows.items()}
        sizes = {"labels": options.labels, "test images": options.test}
        common.keep(options, {part: {**sizes, "rows": {place: kept}}})
    return rows


# The experiment.


ARGUMENTS = {
    "--parts": {"nargs": "*", "choices": PARTS, "help": "default: mnist; cuda: the others"},
    "--tops": common.several(TOPS, "blocks that adapt, 0 for all", type=int),
    "--draws": {"type": int, "nargs": "+", "help": "seeds of labels and test images (0 1 2)"},
    "--labels": "default: 100; cuda: 500",
    "--test": "test images of a draw (default: 1,000; cuda: 5,000)",
    "--ablate": {"nargs": "*", "choices": PARTS, "default": ["bigan"], "help": "parts with all eight ways (bigan)"},
    "--anew": {"action": "store_true", "help": "drop what earlier runs have found of the parts"},
}


def run(options: argparse.Namespace) -> common.Outcome:
    kind = common.kind_of(options)
    options.labels, options.test = options.labels or LABELS[kind], options.test or TEST[kind]
    if options.parts is None:
        options.parts = {"quick": ["bigan"], "cpu": ["mnist"]}.get(kind, ["bigan", "gan", "vae", "rotation"])
    options.draws = options.draws or ([0] if options.quick else [0, 1, 2])
    if options.anew:
        common.forget(options, *options.parts)
    parts = common.kept_parts(options)
    for part in options.parts:
        start, data = time.perf_counter(), images(part, options)
        count = min(3, len(encoder(part, options)) - 1)  # below the blocks that adapt there is at least one
        tops = [top for top in options.tops if top <= count]
        for draw in options.draws:
            for top in tops[:2] if options.quick else tops:
                measure(part, top, draw, data, options)
        spent = {"seconds": time.perf_counter() - start, "machine": common.machine(options.device)}
        parts = common.keep(options, {part: {"last run": spent}})
    ordered = {part: parts[part] for part in PARTS if part in parts}
    tables = {part: table(found) for part, found in ordered.items()}
    command = "python -m experiments table1_mu (and --device cuda)"
    all_rows = [row for part in ordered.values() for names in part["rows"].values() for row in names.values()]
    spent = common.duration(sum(one["seconds"] for draws in all_rows for one in draws.values()))
    found = {"accuracy, %": tables, "parts": ordered}
    return common.Outcome(found, figure(tables, ordered), rows(tables, ordered), command, spent)


def table(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By number of blocks and row: accuracy in percent, and less the linear classifier, over draws."""
    out: dict[str, dict[str, Any]] = {}
    for top, names in found["rows"].items():
        linear = names.get(BASELINE, {})
        for name, draws in names.items():
            values = [100 * one["accuracy"] for one in draws.values()]
            less = [100 * (one["accuracy"] - linear[i]["accuracy"]) for i, one in draws.items() if i in linear]
            cell = {"accuracy": statistics.interval(values), "less linear": statistics.interval(less or [float("nan")])}
            out.setdefault(top, {})[name] = cell
    return out


def said(part: str, name: str, top: str) -> str:
    """The paper's accuracy, where it has one."""
    known = SAID if part == "bigan" else SAID_VAE if part == "vae" else {}
    if name in (OURS, GAUSSIAN) and (top == ALL or name == GAUSSIAN):
        return "all layers slightly ahead of the top one, the mode of the best Gaussian (Maddox et al., table 1)"
    return f"{known[name][int(top) - 1]:.2f}" if known.get(name) and top != ALL else "not in the paper"


def rows(tables: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[common.Row]:
    for part, tops in tables.items():
        found = parts[part]
        less = " instead of 50,000" if part in (*ADVERSARIAL, "vae") else ""
        differs = f"{found.get('labels', 0):,} labels{less}, {found.get('test images', 0):,} test images"
        for top, names in tops.items():
            for name in (*SAID,):
                if name in names:
                    cell = names[name]
                    ours = statistics.show_interval(cell["accuracy"]).replace("+", "")
                    if name != BASELINE:
                        ours += f"; less linear {statistics.show_interval(cell['less linear'])}"
                    what = f"{PARTS[part]}, {'all blocks' if top == ALL else f'top {top}'}, {name}: accuracy %"
                    text = f"{differs}, {cell['accuracy']['count']} draws, 95 % interval"
                    yield common.Row(what, said(part, name, top), ours, text)


def figure(tables: Mapping[str, Any], parts: Mapping[str, Any]) -> Figure:
    """A panel for each encoder: accuracy less that of the linear classifier, with one, two and three blocks."""
    shades = {"1": plots.SKY, "2": plots.BLUE, "3": plots.PURPLE, ALL: plots.GREEN}
    result = Figure(figsize=(5.2 * max(1, len(tables)), 4.6))
    axes = result.subplots(1, max(1, len(tables)), squeeze=False)[0]
    for ax, (part, tops) in zip(axes, tables.items(), strict=False):
        names = [name for name in SAID if name != BASELINE and any(name in of for of in tops.values())]
        for j, (top, of) in enumerate(sorted(tops.items())):
            at = [names.index(name) - 0.22 * (1 - j) for name in names if name in of]
            gaps = [of[name]["less linear"] for name in names if name in of]
            label = top if top == ALL else f"top {top}"
            plots.draw_means(ax, at, gaps, across=True, color=shades[top], capsize=2, label=label)
        ax.axvline(0, color=plots.GRAY, lw=1)
        plots.name_rows(ax, names)
        ax.set_ylabel("lower layers / upper layers / head")
        linear = next(of[BASELINE]["accuracy"]["mean"] for of in tops.values())
        title = f"{PARTS[part]}\n{parts[part].get('labels', 0):,} labels, linear {linear:.1f} %"
        ax.set(xlabel="points above linear (95 %, paired)", title=title)
        ax.legend(fontsize=8)
    return result
