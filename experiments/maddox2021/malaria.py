"""Malaria prevalence of one year, adapted to another (Maddox et al. 2021, section 5 and figure 7a).

A heteroscedastic tanh network with three layers learns the map of 2012 from 2,000 points, and the map of 2015 is to be
predicted from few: the paper's target, 2016, is not in this release of the Malaria Atlas Project. The same from the map
of 2000, a larger shift. The region is that of Balandat et al. 2020, around Nigeria, or all of Africa.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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
from experiments.common.networks import perceptron
from experiments.common.training import Labeled, Search, gaussian_nll, in_parts, train
from experiments.maddox2021 import shifts

SHIFTS = {"2012": "2012 to 2015", "2000": "2000 to 2015"}
TARGET = "2015"
# Longitudes and latitudes.
REGIONS = {"nigeria": (2.5, 15.0, 4.0, 14.0), "africa": (-180.0, 180.0, -90.0, 90.0)}
SOURCE = 2000
RATE = 3e-3
"""Of training, the best of 0.001, 0.003 and 0.01 for other points of 2012."""
SAID = {
    shifts.NONE: "worst (figure 7a, no numbers in the text)",
    shifts.FIXED: "stagnates, marginally better than no retraining",
    shifts.FIXED_LONGER: "comparable with the finite NTK",
    shifts.NTK: "improves with the points, best",
}


STEP = 3
"""Every third row and column of a map is shown."""


# Hidden units, epochs of training, numbers of points, test points, seeds, rates of fine-tuning.
QUICK = Sizes(width=20, epochs=5, points=(10, 20), test=200, seeds=1, rates=(1e-2,))
CPU = Sizes(width=200, epochs=150, points=(10, 30, 100, 300), test=1000, seeds=5, rates=(1e-2, 3e-3, 1e-3))
CUDA = Sizes(width=500, epochs=500, points=(10, 30, 100, 300, 1000), test=5000, seeds=10, rates=(1e-2, 3e-3, 1e-3))


@dataclass(frozen=True)
class Maps:
    """Pixels of a region."""

    X: Tensor  # longitude and latitude, standardized (m, 2)
    place: Tensor  # row and column on the map (m, 2)
    rates: dict[str, Tensor]  # prevalence by year, (m,) each


def load(folder: Path, region: str) -> Maps:
    """The pixels with a prevalence, north to south."""
    with np.load(common.data_file(folder, "malaria_africa_pfpr.npz"), allow_pickle=False) as stored:
        mask = np.unpackbits(stored["mask"], axis=1)[:, : stored["shape"][1]].astype(bool)
        row, column = np.nonzero(mask)
        degrees = np.stack([stored["lon"][column], stored["lat"][row]], 1)
        west, east, south, north = REGIONS[region]
        (lon, lat) = degrees.T
        kept = (lon > west) & (lon < east) & (lat > south) & (lat < north)
        rates = {year: torch.from_numpy(stored[f"pfpr_{year}"][kept]).float() for year in (*SHIFTS, TARGET)}
    x = torch.from_numpy(degrees[kept]).float()
    place = torch.from_numpy(np.stack([row, column], 1)[kept])
    return Maps((x - x.mean(0)) / x.std(0), place - place.amin(0), rates)


ARGUMENTS = {
    "--region": {"choices": REGIONS, "default": "nigeria"},
    "--width": "hidden units (default: 200; cuda: the paper's 500)",
    "--seeds": "draws of points and networks (default: 5; cuda: 10)",
}


def run(options: argparse.Namespace) -> common.Outcome:
    """Train on one year, adapt to another, score."""
    sizes = {"quick": QUICK, "cpu": CPU, "cuda": CUDA}[common.kind_of(options)]
    maps = load(options.data, options.region)
    width, seeds = options.width or sizes.width, options.seeds or sizes.seeds
    make = {
        shift: partial(cases, maps, year, sizes, width=width, device=options.device) for year, shift in SHIFTS.items()
    }
    tables, parts, case = shifts.run_cases(options, f"{options.region}, {width} units", make, seeds)
    settings = {
        "region": options.region,
        "network": f"2-{width}-{width}-2, tanh",
        "training points": SOURCE,
        "epochs": sizes.epochs,
        "test points": sizes.test,
        "seeds": seeds,
        "seed": options.seed,
        "rates of fine-tuning": sizes.rates,
        "RMSE": "of prevalence, a share of children from 0 to 1",
    }
    metrics = {"settings": settings, "methods": shifts.METHODS, "results": tables, "parts": parts}
    differs = (
        f"2015 stands for 2016, which is not available; {options.region}, {width} hidden units, {SOURCE:,} points and "
        f"{sizes.epochs} epochs of 2012 or 2000; rate and epochs of fine-tuning by held-out points; mean ± standard "
        f"error over {seeds} seeds, 95 % intervals paired"
    )
    rows = shifts.rows(tables, said=SAID, differs=differs, unit=" of prevalence")
    return common.Outcome(metrics, figure(tables, pictures(maps, case, next(iter(SHIFTS)))), rows)


def cases(maps: Maps, year: str, sizes: Sizes, seed: int, *, width: int, device: str) -> list[shifts.Case]:
    """One network of the source year and, for each number of points of the target, what is to be adapted."""
    order = torch.randperm(len(maps.X), generator=torch.Generator().manual_seed(seed))
    most = max(sizes.points)
    source, adapt, test = order.split([SOURCE, most, len(order) - SOURCE - most])
    test = test[: sizes.test]
    level, unit = maps.rates[year][source].mean(), maps.rates[year][source].std()

    def points(index: Tensor, which: str) -> Labeled:
        return Labeled((maps.X[index].to(device),), ((maps.rates[which][index] - level) / unit).to(device))

    net = perceptron((2, width, width, 2), seed=seed).to(device)
    train(net, points(source, year), epochs=sizes.epochs, rate=RATE, batch=SOURCE // 10, loss=gaussian_nll, seed=seed)
    search = Search(sizes.rates, sizes.epochs)
    return [
        shifts.Case(
            net, points(adapt[:n], TARGET), points(test, TARGET), search, float(unit), float(level), device, seed
        )
        for n in sizes.points
    ]


# The figure.


def pictures(maps: Maps, case: shifts.Case, year: str) -> list[tuple[str, Tensor]]:
    """Maps of the target year: as it is, as the network has it, and as the adapted network has it, with its spread."""
    shown = (maps.place % STEP == 0).all(1)
    X = maps.X[shown].to(case.device)
    mean, std = (t.float().cpu() for t in case.fitted().predict(X, return_std=True))
    network = in_parts(case.model, (X,))[:, 0].cpu()
    values = {
        f"{TARGET}": maps.rates[TARGET][shown],
        f"network of {year}": case.level + case.unit * network,
        f"adapted with {len(case.adapt)} points": case.level + case.unit * mean,
        "its standard deviation": case.unit * std,
    }
    row, column = (maps.place[shown] // STEP).T
    out = []
    for title, value in values.items():
        image = torch.full((int(row.max()) + 1, int(column.max()) + 1), torch.nan)
        image[row, column] = value
        out.append((title, image))
    return out


def figure(tables: dict[str, Any], shown: list[tuple[str, Tensor]]) -> Figure:
    """RMSE and NLL against points for each shift; below, maps."""
    picture = plt.figure(figsize=(13, 7.6))
    upper, lower = picture.subfigures(2, 1, height_ratios=(1.4, 1))
    axes = upper.subplots(1, 4)
    panels = [
        (shift, key, label) for shift in tables for key, label in (("rmse", "RMSE of prevalence"), ("nll", "NLL"))
    ]
    for ax, (shift, key, label) in zip(axes, panels, strict=True):
        shifts.draw_curves(ax, tables[shift], key)
        ax.set(title=shift, ylabel=label)
    plots.legend_below(upper, axes[0], 5, fontsize=9)
    top = float(shown[0][1].nan_to_num().max())
    for ax, (title, values) in zip(lower.subplots(1, 4), shown, strict=True):
        how = {"cmap": "viridis"} if title.startswith("its") else {"cmap": "magma", "vmax": top}
        image = ax.imshow(values.numpy(), vmin=0, **how)
        ax.set_title(title)
        ax.axis("off")
        lower.colorbar(image, ax=ax, shrink=0.8)
    return picture
