"""Figures: colors, the style of all figures, means with error bars, axes and legends that recur."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np

# Okabe and Ito's palette: told apart by every kind of color vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GRAY = "#cc79a7", "#56b4e9", "#c9a400", "#7f7f7f"


@contextmanager
def style() -> Iterator[None]:
    """Settings of every figure, for the duration of a block."""
    settings = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "savefig.facecolor": "white",
    }
    with matplotlib.rc_context(settings):
        yield


def draw_means(
    ax: Any, at: Any, values: Sequence[Mapping[str, float]], *, factor: float = 1.0, across: bool = False, **style: Any
) -> None:
    """Means with their standard errors or intervals, where there are any.

    Args:
        ax: Where to draw.
        at: Places of the means.
        values: "mean" with "error", or with "low" and "high"; NaN or None for one draw.
        factor: Of all numbers.
        across: Means lie on the horizontal axis.
        style: As for `errorbar`.
    """

    def number(one: Mapping[str, Any], key: str) -> float:
        return float("nan") if one.get(key) is None else one[key]

    mean = factor * np.array([one["mean"] for one in values])
    if all("low" in one for one in values):
        ends = factor * np.array([[number(one, side) for one in values] for side in ("low", "high")])
    else:
        half = factor * np.array([number(one, "error") for one in values])
        ends = np.stack([mean - half, mean + half])
    bars = np.nan_to_num(np.abs(ends - mean))
    how = {"ms": 4, "lw": 1.2, **style}
    if across:
        ax.errorbar(mean, at, xerr=bars, **{"fmt": "o", **how})
    else:
        ax.errorbar(at, mean, yerr=bars, **{"fmt": "o-", **how})


def draw_posterior(ax: Any, x: Any, mean: Any, std: Any, *, color: str, alpha: float = 0.3, **style: Any) -> None:
    """A mean with two standard deviations on both sides."""
    ax.fill_between(x, mean - 2 * std, mean + 2 * std, color=color, alpha=alpha, lw=0)
    ax.plot(x, mean, color=color, **style)


def log_ticks(ax: Any, at: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """A logarithmic horizontal axis with ticks at the given places alone."""
    ax.set_xscale("log")
    ax.set_xticks(list(at), [f"{n:,}" for n in at] if labels is None else list(labels))
    ax.minorticks_off()


def name_rows(ax: Any, names: Sequence[str], *, lines: bool = False) -> None:
    """Names on the vertical axis, the first at the top; with lines between them."""
    ax.set_yticks(range(len(names)), list(names))
    ax.invert_yaxis()
    for row in range(len(names) - 1) if lines else ():
        ax.axhline(row + 0.5, color="black", lw=0.4, alpha=0.3)


def place_rows(count: int, i: int, of: int, width: float = 0.8) -> list[float]:
    """Places of series `i` in `count` rows, each of which holds `of` series side by side."""
    return [row + width / of * (i - (of - 1) / 2) for row in range(count)]


def legend_below(picture: Any, ax: Any, columns: int, **style: Any) -> None:
    """One legend below all panels, with what the panel `ax` shows."""
    picture.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns, **style)


def mosaic(images: Any, columns: int) -> Any:
    """Images (n, c, h, w) side by side, as an array for imshow.

    >>> import torch
    >>> mosaic(torch.zeros(6, 1, 2, 2), 3).shape
    (4, 6)
    """
    n, c, h, w = images.shape
    rows = n // columns
    grid = images[: rows * columns].view(rows, columns, c, h, w).permute(0, 3, 1, 4, 2)
    grid = grid.reshape(rows * h, columns * w, c)
    return (grid[..., 0] if c == 1 else grid).cpu().numpy()
