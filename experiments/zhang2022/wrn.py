"""A WRN-40-2 for CIFAR-10, which the experiments on Fisher embeddings need and nobody supplies.

Its weights, as float16, are the result: results/wrn/wrn40_2_cifar10.safetensors. They are not in the repository;
`experiments.common.networks.wide_resnet` reads them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.models import WideResNet
from experiments import common
from experiments.common import plots
from experiments.common.data import cifar10
from experiments.common.networks import WRN, store, wide_resnet
from experiments.common.training import BATCH, DECAY, RATE, accuracy, train_images

ARGUMENTS = {"--epochs": {"type": int, "default": 60}}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train, round the weights to float16, and measure the rounded network."""
    depth, width, epochs, count = (10, 1, 1, 256) if options.quick else (40, 2, options.epochs, None)
    x, y = (t.to(options.device) for t in cifar10(options.data, "train", count=count))
    test = tuple(t.to(options.device) for t in cifar10(options.data, "test", count=count))
    torch.manual_seed(options.seed)
    net = WideResNet(depth, width).to(options.device, memory_format=torch.channels_last)
    path = train_images(net, x, y, epochs=epochs, seed=options.seed, test=(test[0], test[1]))
    folder = common.own_folder(options)
    store(net, folder, WRN)
    rounded = accuracy(wide_resnet(folder, depth=depth, width=width).to(options.device), test[0], test[1])
    metrics = {
        "network": f"WRN-{depth}-{width}",
        "training images": len(x),
        "epochs": epochs,
        "batch": BATCH,
        "largest learning rate": RATE,
        "weight decay": DECAY,
        "test accuracy": path[-1]["accuracy"],
        "test accuracy in float16": rounded,
        "path": path,
    }
    differs = f"{len(x):,} of the 50,000 training images, {epochs} epochs; weights kept as float16"
    row = common.Row("test accuracy of WRN-40-2", "94.26 % (table 3, the teacher)", f"{100 * rounded:.2f} %", differs)
    return common.Outcome(metrics, figure(path), [row])


def figure(path: list[dict[str, Any]]) -> Figure:
    """The loss of each epoch, and the accuracy where it was measured."""
    result = Figure(figsize=(5, 3.2))
    left = result.subplots()
    right = left.twinx()
    for ax, key, factor, label, color in (
        (left, "loss", 1, "training loss", plots.BLUE),
        (right, "accuracy", 100, "test accuracy, %", plots.VERMILION),
    ):
        rows = [row for row in path if key in row]
        ax.plot([row["epoch"] for row in rows], [factor * row[key] for row in rows], "o-", ms=3, color=color)
        ax.set_ylabel(label, color=color)
    left.set_xlabel("epoch")
    right.grid(False)
    return result
