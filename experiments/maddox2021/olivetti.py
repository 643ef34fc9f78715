"""By how much is a face rotated: a network of 20 people adapted to 20 others (Maddox et al. 2021, figure 7b).

Faces are rotated by an angle drawn from U(0, 30) degrees and cropped to 45 x 45 pixels. A LeNet-3 with outputs (mean,
log variance) learns the angles of 20 people; of the other 20 it is given some images, and the angles of the remaining
ones are to be predicted.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common
from experiments.common.adaptation import Labeled, Search, in_parts
from experiments.common.trained import gaussian_nll, lenet, train
from experiments.maddox2021 import shifts

SIZE, LARGEST, PEOPLE = 45, 30.0, 40
NAME = "new faces"
SAID = {
    shifts.LINNET: "best for every number of points, by little with many (figure 7b, no numbers in the text)",
    shifts.NTK: "as the linearized network: the paper has one curve",
    shifts.NONE: "worse than with adaptation",
    shifts.FIXED: "improves with the points, behind the linearized network",
    shifts.EVERYTHING: "improves with the points, behind the linearized network",
}


@dataclass(frozen=True)
class Sizes:
    """Rotations of each training image, epochs, numbers of points, seeds, channels and hidden units."""

    copies: int
    epochs: int
    points: tuple[int, ...]
    seeds: int
    channels: tuple[int, int] = (6, 16)
    hidden: int = 84


QUICK = Sizes(1, 1, (10, 20), 1, (2, 3), 10)
CPU = Sizes(3, 25, (10, 20, 50, 100), 8)
CUDA = Sizes(10, 60, (10, 20, 50, 100, 150), 10, (20, 50), 500)


def turned(x: Tensor, degrees: Tensor) -> Tensor:
    """Images (n, 1, h, w) turned counterclockwise by angles (n,) about their center, zero where nothing was."""
    angle = degrees * (math.pi / 180)
    zero = torch.zeros_like(angle)
    turn = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)], 1
    )
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def rotated(x: Tensor, degrees: Tensor) -> Tensor:
    """Images as `turned`, cropped to 45 x 45.

    At up to 30 degrees nothing beyond the borders of a 64 x 64 image comes into the crop.

    >>> found = rotated(torch.ones(1, 1, 64, 64), torch.tensor([30.0]))
    >>> found.shape, bool((found - 1).abs().max() < 1e-5)
    (torch.Size([1, 1, 45, 45]), True)
    """
    top, left = ((side - SIZE) // 2 for side in x.shape[-2:])
    return turned(x, degrees)[:, :, top : top + SIZE, left : left + SIZE].contiguous()


def faces(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (400, 1, 64, 64), standardized, and the person in each."""
    with np.load(common.data_file(folder, "olivetti.npz"), allow_pickle=False) as stored:
        x, who = torch.from_numpy(stored["x"]).float().unsqueeze(1), torch.from_numpy(stored["y"]).long()
    return (x - x.mean()) / x.std(), who


def cases(x: Tensor, who: Tensor, sizes: Sizes, *, seed: int, device: str) -> list[shifts.Case]:
    """A network of half of the people and, for each number of points of the others, what is to be adapted."""
    random = torch.Generator().manual_seed(seed)
    people = torch.randperm(PEOPLE, generator=random)
    known = torch.isin(who, people[: PEOPLE // 2])
    source = x[known].repeat(sizes.copies, 1, 1, 1)
    new = x[~known][torch.randperm(int((~known).sum()), generator=random)]
    angles = [LARGEST * torch.rand(len(images), generator=random) for images in (source, new)]
    level, unit = float(angles[0].mean()), float(angles[0].std())

    def points(images: Tensor, degrees: Tensor) -> Labeled:
        return Labeled((rotated(images, degrees).to(device),), ((degrees - level) / unit).to(device))

    net = lenet(SIZE, 2, channels=sizes.channels, hidden=sizes.hidden, seed=seed).to(device)
    train(net, points(source, angles[0]), epochs=sizes.epochs, batch=32, loss=gaussian_nll, seed=seed)
    target, search = points(new, angles[1]), Search((1e-2, 3e-3, 1e-3, 3e-4), sizes.epochs)
    return [shifts.Case(net, target[:n], target[n:], search, unit, level, device, seed) for n in sizes.points]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=int, default=None, help="draws of people, angles, networks (default: 8; cuda: 10)"
    )


def run(options: argparse.Namespace) -> common.Outcome:
    """Train on half of the people, adapt to the others, score."""
    sizes = QUICK if options.quick else CUDA if options.device.startswith("cuda") else CPU
    seeds = options.seeds or sizes.seeds
    x, who = faces(options.data)
    runs: list[dict[str, Any]] = []
    parts: dict[str, Any] = {}
    shown: list[tuple[str, Tensor]] = []
    key = f"channels {sizes.channels[0]} and {sizes.channels[1]}, {sizes.hidden} hidden units"
    for seed in range(options.seed, options.seed + seeds):
        for case in cases(x, who, sizes, seed=seed, device=options.device):
            found = case.all(skip=(shifts.ALONE, shifts.RESIDUALS))  # a kernel of pixels says nothing of an angle
            runs.append({"shift": NAME, "seed": seed, "points": len(case.adapt), "contenders": found})
            parts = common.keep(options, "olivetti", {key: shifts.part(runs[-1])})
        print(f"seed {seed} done", flush=True)
        shown = shown or examples(case)
    tables = shifts.summary(runs)
    shifts.print_tables(tables)
    settings = {
        "network": f"LeNet-3, {key}",
        "rotations of each training image": sizes.copies,
        "epochs": sizes.epochs,
        "people": "20 to train on, 20 to adapt to",
        "seeds": seeds,
        "seed": options.seed,
        "RMSE": "in degrees",
    }
    metrics = {"settings": settings, "methods": shifts.METHODS, "results": tables, "parts": parts}
    differs = (
        f"LeNet-3 with {key}, {sizes.copies} rotations of each training image, {sizes.epochs} epochs; rate and epochs "
        f"of tuned contenders by held-out points; mean ± standard error over {seeds} seeds, 95 % intervals paired"
    )
    rows = shifts.rows(tables, said=SAID, differs=differs, unit=" in degrees", digits=2)
    return common.Outcome(metrics, figure(tables, shown), rows)


# The figure.


def examples(case: shifts.Case) -> list[tuple[str, Tensor]]:
    """New faces with their angle, and what the network says before and after its adaptation."""
    X = case.test.X[0][:8]
    before, (after, std) = in_parts(case.model, (X,))[:, 0], case.fitted().predict(X, return_std=True, noise=True)
    angle = [case.level + case.unit * t.double().cpu() for t in (case.test.y[:8], before, after)]
    texts = [
        f"{true:.0f}°\nnetwork {old:.0f}°\nadapted {new:.0f} ± {case.unit * float(s):.0f}°"
        for true, old, new, s in zip(*angle, std, strict=True)
    ]
    return list(zip(texts, X[:, 0].cpu(), strict=True))


def figure(tables: dict[str, Any], shown: list[tuple[str, Tensor]]) -> Figure:
    sizes = tables[NAME]
    with common.style():
        picture = plt.figure(figsize=(12, 7))
        upper, lower = picture.subfigures(2, 1, height_ratios=(1.9, 1))
        axes = upper.subplots(1, 3)
        for ax, (key, label) in zip(
            axes, {"rmse": "RMSE, degrees", "nll": "NLL", "coverage": "coverage of 95 % intervals"}.items(), strict=True
        ):
            shifts.curves(ax, sizes, key)
            ax.set_ylabel(label)
        axes[0].set_ylim(*shifts.error_range(sizes))
        axes[1].set_ylim(*shifts.likely_range(sizes))
        axes[2].axhline(0.95, color="black", lw=0.8)
        handles, names = axes[0].get_legend_handles_labels()
        upper.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9)
        for ax, (text, image) in zip(lower.subplots(1, len(shown)), shown, strict=True):
            ax.imshow(image.numpy(), cmap="gray")
            ax.set_title(text, fontsize=9)
            ax.axis("off")
    return picture
