"""A WRN-40-2 for CIFAR-10, which the experiments on Fisher embeddings need and nobody supplies.

Its weights, as float16, are the result: results/wrn/wrn40_2_cifar10.safetensors. Read them with `wide_resnet`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.models import WideResNet
from experiments import common
from experiments.common.adaptation import in_parts
from experiments.common.pretrained import cifar10, loaded, stored

FILE = "wrn40_2_cifar10"
BATCH, RATE, DECAY = 256, 0.2, 5e-4
PAD = 4  # pixels that an image is shifted by at most


def wide_resnet(folder: Path = common.RESULTS / "wrn", *, depth: int = 40, width: int = 2) -> WideResNet:
    """The trained network, in eval mode and float32."""
    return loaded(WideResNet(depth, width), folder, FILE)


def augmented(x: Tensor, generator: torch.Generator, *, mirror: bool = True) -> Tensor:
    """Each image (n, 3, h, w) shifted by up to four pixels and, unless told otherwise, mirrored half of the time.

    >>> augmented(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).unique()
    tensor([1.])
    """
    n, _, h, w = x.shape
    padded = F.pad(x, (PAD,) * 4, mode="reflect")
    shift = torch.randint(2 * PAD + 1, (2, n, 1), generator=generator, device=x.device)
    rows = shift[0] + torch.arange(h, device=x.device)
    columns = shift[1] + torch.arange(w, device=x.device)
    mirrored = torch.rand(n, 1, generator=generator, device=x.device) < 0.5 * mirror
    columns = torch.where(mirrored, columns.flip(1), columns)
    example = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[example, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(in_parts(net.eval(), (x,), 500).argmax(1).eq(y).double().mean())


def of_labels(net: nn.Module, images: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of a classifier: what is minimized if nothing else is said."""
    return F.cross_entropy(net(images), y)


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    seed: int,
    test: tuple[Tensor, Tensor] | None = None,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = of_labels,
    batch: int = BATCH,
    rate: float = RATE,
    adam: bool = False,
    mirror: bool = True,
) -> list[dict[str, Any]]:
    """SGD with momentum, a rate that rises and falls once, shifted and mirrored images; on a GPU in bfloat16.

    Args:
        net: Trained in place.
        x: Images (n, 3, h, w).
        y: Their labels (n,).
        epochs: Over all images.
        seed: Of the order and of the shifts.
        test: Images and labels to measure the accuracy on, now and then and at the end.
        loss_of: From the network, images and labels to the mean loss.
        batch: Images of a step.
        rate: The largest.
        adam: Adam instead of SGD, in float32 and without weight decay.
        mirror: Whether images are, not where that changes their label.

    Returns:
        For each epoch the mean loss and, where it was measured, the accuracy.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if adam:
        optimizer = torch.optim.Adam(net.parameters(), rate)
    else:
        optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=DECAY, nesterov=True)
    steps = math.ceil(len(x) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps, pct_start=0.2)
    path: list[dict[str, Any]] = []
    for epoch in range(epochs):
        net.train()
        total = torch.zeros((), device=x.device)
        for index in torch.randperm(len(x), generator=generator, device=x.device).split(batch):
            images = augmented(x[index], generator, mirror=mirror).contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and not adam):
                loss = loss_of(net, images, y[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(index)
        row: dict[str, Any] = {"epoch": epoch + 1, "loss": float(total) / len(x)}
        if test is not None and (epoch % 5 == 4 or epoch == epochs - 1):
            row["accuracy"] = accuracy(net, *test)
            print(f"epoch {epoch + 1}: loss {row['loss']:.3f}, test accuracy {100 * row['accuracy']:.2f} %", flush=True)
        path.append(row)
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=60)


def run(options: argparse.Namespace) -> common.Outcome:
    """Train, round the weights to float16, and measure the rounded network."""
    depth, width, epochs, count = (10, 1, 1, 256) if options.quick else (40, 2, options.epochs, None)
    parts = [cifar10(options.data, part, count=count) for part in ("train_1", "train_2")]
    x, y = (torch.cat(both).to(options.device) for both in zip(*parts, strict=True))
    test = tuple(t.to(options.device) for t in cifar10(options.data, "test", count=count))
    torch.manual_seed(options.seed)
    net = WideResNet(depth, width).to(options.device, memory_format=torch.channels_last)
    path = train(net, x, y, epochs=epochs, seed=options.seed, test=(test[0], test[1]))
    folder = common.results_folder(options.out, quick=options.quick) / "wrn"
    stored(net, folder, FILE)
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
    with common.style():
        result = Figure(figsize=(5, 3.2))
        axes = result.subplots()
        measured = [row for row in path if "accuracy" in row]
        axes.plot([row["epoch"] for row in path], [row["loss"] for row in path], color=common.BLUE)
        axes.set(xlabel="epoch", ylabel="training loss")
        axes.yaxis.label.set_color(common.BLUE)
        right = axes.twinx()
        right.plot(
            [row["epoch"] for row in measured],
            [100 * row["accuracy"] for row in measured],
            "o-",
            color=common.VERMILION,
        )
        right.set_ylabel("test accuracy, %", color=common.VERMILION)
        right.grid(False)
    return result
