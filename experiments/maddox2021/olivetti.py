"""By how much is a face rotated: a network of 20 people adapted to 20 others (Maddox et al. 2021, figure 7b).

Faces are rotated by an angle drawn from U(0, 30) degrees and cropped to 45 x 45 pixels. A LeNet-3 with outputs (mean,
log variance) learns the angles of 20 people; of the other 20 it is given some images, and the angles of the remaining
ones are to be predicted.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common
from experiments.common import plots
from experiments.common.data import turn
from experiments.common.networks import lenet
from experiments.common.training import Labeled, Search, gaussian_nll, in_parts, train
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


# Rotations of each training image, epochs, numbers of points, seeds, channels and hidden units.
QUICK = Sizes(copies=1, epochs=1, points=(10, 20), seeds=1, channels=(2, 3), hidden=10)
CPU = Sizes(copies=3, epochs=25, points=(10, 20, 50, 100), seeds=8, channels=(6, 16), hidden=84)
CUDA = Sizes(copies=10, epochs=60, points=(10, 20, 50, 100, 150), seeds=10, channels=(20, 50), hidden=500)


def rotate_and_crop(x: Tensor, degrees: Tensor) -> Tensor:
    """Images as `turned`, cropped to 45 x 45.

    At up to 30 degrees nothing beyond the borders of a 64 x 64 image comes into the crop.

    >>> found = rotate_and_crop(torch.ones(1, 1, 64, 64), torch.tensor([30.0]))
    >>> found.shape, bool((found - 1).abs().max() < 1e-5)
    (torch.Size([1, 1, 45, 45]), True)
    """
    top, left = ((side - SIZE) // 2 for side in x.shape[-2:])
    return turn(x, degrees)[:, :, top : top + SIZE, left : left + SIZE].contiguous()


def faces(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (400, 1, 64, 64), standardized, and the person in each."""
    with np.load(common.data_file(folder, "olivetti.npz"), allow_pickle=False) as stored:
        x, who = torch.from_numpy(stored["x"]).float().unsqueeze(1), torch.from_numpy(stored["y"]).long()
    return (x - x.mean()) / x.std(), who


def cases(x: Tensor, who: Tensor, sizes: Sizes, seed: int, *, device: str) -> list[shifts.Case]:
    """A network of half of the people and, for each number of points of the others, what is to be adapted."""
    random = torch.Generator().manual_seed(seed)
    people = torch.randperm(PEOPLE, generator=random)
    known = torch.isin(who, people[: PEOPLE // 2])
    source = x[known].repeat(sizes.copies, 1, 1, 1)
    new = x[~known][torch.randperm(int((~known).sum()), generator=random)]
    angles = [LARGEST * torch.rand(len(images), generator=random) for images in (source, new)]
    level, unit = float(angles[0].mean()), float(angles[0].std())

    def points(images: Tensor, degrees: Tensor) -> Labeled:
        return Labeled((rotate_and_crop(images, degrees).to(device),), ((degrees - level) / unit).to(device))

    net = lenet(SIZE, 2, channels=sizes.channels, hidden=sizes.hidden, seed=seed).to(device)
    train(net, points(source, angles[0]), epochs=sizes.epochs, batch=32, loss=gaussian_nll, seed=seed)
    target, search = points(new, angles[1]), Search((1e-2, 3e-3, 1e-3, 3e-4), sizes.epochs)
    return [shifts.Case(net, target[:n], target[n:], search, unit, level, device, seed) for n in sizes.points]


ARGUMENTS = {
    "--seeds": "draws of people, angles, networks (default: 8; cuda: 10)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train on half of the people, adapt to the others, score."""
    sizes = {"quick": QUICK, "cpu": CPU, "cuda": CUDA}[common.kind_of(options)]
    seeds = options.seeds or sizes.seeds
    x, who = faces(options.data)
    key = f"channels {sizes.channels[0]} and {sizes.channels[1]}, {sizes.hidden} hidden units"
    # A kernel of pixels says nothing of an angle.
    skip = (shifts.ALONE, shifts.RESIDUALS)
    make = {NAME: partial(cases, x, who, sizes, device=options.device)}
    tables, parts, case = shifts.run_cases(options, key, make, seeds, skip)
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
    return common.Outcome(metrics, figure(tables[NAME], examples(case)), rows)


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


def figure(sizes: dict[int, Any], shown: list[tuple[str, Tensor]]) -> Figure:
    picture = plt.figure(figsize=(12, 7))
    upper, lower = picture.subfigures(2, 1, height_ratios=(1.9, 1))
    axes = upper.subplots(1, 3)
    labels = {"rmse": "RMSE, degrees", "nll": "NLL", "coverage": "coverage of 95 % intervals"}
    for ax, (key, label) in zip(axes, labels.items(), strict=True):
        shifts.draw_curves(ax, sizes, key)
        ax.set_ylabel(label)
    axes[2].axhline(0.95, color="black", lw=0.8)
    plots.legend_below(upper, axes[0], 4, fontsize=9)
    for ax, (text, image) in zip(lower.subplots(1, len(shown)), shown, strict=True):
        ax.imshow(image.numpy(), cmap="gray")
        ax.set_title(text, fontsize=9)
        ax.axis("off")
    return picture
