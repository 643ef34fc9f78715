"""Examples as a page can show them: pictures, the beginning of a text, or the cells of a row."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from linnet.report.content import Shown
from linnet.report.formatting import number

CELLS = 8
"""Columns of a row that are shown."""

LETTERS = 280
"""Letters of a text that are shown."""

PIXELS = 128
"""The longer side of a picture; larger ones are made smaller."""


@dataclass(frozen=True)
class Inputs:
    """Examples, and how they are shown.

    Attributes:
        names: Of the examples; without, their numbers.
        pictures: (n, 1 or 3, height, width), from 0 to 1; None without.
        texts: (n,).
        cells: (n, d), and ``columns`` the names of its columns.
        columns: See there.
    """

    names: Sequence[str] = ()
    pictures: np.ndarray | None = None
    texts: Sequence[str] = ()
    cells: np.ndarray | None = None
    columns: Sequence[str] = ()

    def shown(self, i: int) -> Shown:
        """Example i."""
        name = self.names[i] if self.names else f"no. {i + 1}"
        if self.pictures is not None:
            return Shown(name, picture=address(self.pictures[i]))
        if self.texts:
            text = self.texts[i]
            return Shown(name, text=text if len(text) <= LETTERS else text[:LETTERS].rstrip() + " …")
        if self.cells is not None:
            row = self.cells[i][:CELLS]
            names = self.columns or [f"x{j + 1}" for j in range(len(row))]
            return Shown(name, cells=[(str(k), number(float(v))) for k, v in zip(names, row, strict=False)])
        return Shown(name)


def inputs_of(X: Any, *, names: Sequence[str] = (), texts: Sequence[str] = (), columns: Sequence[str] = ()) -> Inputs:
    """How inputs of any kind are shown; those that are neither pictures, texts nor rows have their numbers alone.

    Args:
        X: Tensors or arrays, or a dict of them.
        names: Of the examples.
        texts: That the inputs were made from.
        columns: Names of columns.
    """
    if texts:
        return Inputs(names, texts=texts)
    array = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
    if isinstance(array, Mapping) or not isinstance(array, np.ndarray):
        return Inputs(names)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        return Inputs(names, pictures=_light(array.astype(float)))
    if array.ndim == 2 and array.dtype.kind in "biuf":
        return Inputs(names, cells=array, columns=columns)
    return Inputs(names)


def _light(pixels: np.ndarray) -> np.ndarray:
    """From 0 to 1: as they are where they are so already, else stretched over all pictures."""
    low, high = float(pixels.min()), float(pixels.max())
    if low >= 0 and high <= 1:
        return pixels
    return (pixels - low) / (high - low) if high > low else np.zeros_like(pixels)


def address(picture: np.ndarray) -> str:
    """A picture (1 or 3, height, width) from 0 to 1 as a data: address of a PNG."""
    from PIL import Image

    levels = np.round(255 * np.clip(picture, 0, 1)).astype(np.uint8)
    image = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    image.thumbnail((PIXELS, PIXELS))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
