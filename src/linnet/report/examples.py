"""Examples as a page shows them: pictures, the beginning of a text, or the cells of a row."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from linnet._common import needs_extra
from linnet.report.content import Shown
from linnet.report.formatting import number


@dataclass(frozen=True)
class Inputs:
    """Examples, and how they are shown."""

    names: Sequence[str] = ()  # names of the examples; by default their numbers
    pictures: np.ndarray | None = None  # pixels (n, 1 or 3, height, width) from 0 to 1, or None
    texts: Sequence[str] = ()  # texts of the examples
    cells: np.ndarray | None = None  # rows (n, d) of a table, or None
    columns: Sequence[str] = ()  # names of the columns of ``cells``

    def show(self, i: int) -> Shown:
        """Example i: a picture, the first 280 letters of a text, or the first 8 cells of a row."""
        name = self.names[i] if self.names else f"no. {i + 1}"
        if self.pictures is not None:
            return Shown(name, picture=encode_picture(self.pictures[i]))
        if self.texts:
            text = self.texts[i]
            return Shown(name, text=text if len(text) <= 280 else text[:280].rstrip() + " …")
        if self.cells is not None:
            row = self.cells[i][:8]
            names = self.columns or [f"x{j + 1}" for j in range(len(row))]
            return Shown(name, cells=[(str(k), number(float(v))) for k, v in zip(names, row, strict=False)])
        return Shown(name)


def show_inputs(X: Any, *, names: Sequence[str] = (), texts: Sequence[str] = (), columns: Sequence[str] = ()) -> Inputs:
    """How inputs of any kind are shown. Other inputs than pictures, texts and rows are shown by their number.

    Args:
        X: Tensors or arrays, or a dict of them.
        names: Names of the examples.
        texts: Texts from which the inputs were made.
        columns: Names of the columns.
    """
    if texts:
        return Inputs(names, texts=texts)
    array = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
    if isinstance(array, Mapping) or not isinstance(array, np.ndarray):
        return Inputs(names)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        return Inputs(names, pictures=_stretch(array.astype(float)))
    if array.ndim == 2 and array.dtype.kind in "biuf":
        return Inputs(names, cells=array, columns=columns)
    return Inputs(names)


def _stretch(pixels: np.ndarray) -> np.ndarray:
    """Pixels from 0 to 1. Other pixels are stretched to this range, over all pictures together."""
    low, high = float(pixels.min()), float(pixels.max())
    if low >= 0 and high <= 1:
        return pixels
    return (pixels - low) / (high - low) if high > low else np.zeros_like(pixels)


def encode_picture(picture: np.ndarray) -> str:
    """A picture (1 or 3, height, width) from 0 to 1 as the data: address of a PNG of at most 128 pixels a side."""
    with needs_extra("images", "A report with pictures"):
        from PIL import Image

    levels = np.round(255 * np.clip(picture, 0, 1)).astype(np.uint8)
    image = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    image.thumbnail((128, 128))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
