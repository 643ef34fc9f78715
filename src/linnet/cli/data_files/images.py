"""Image folders: one folder for each class, or images without classes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet._common import listing, needs_extra
from linnet.cli.terminal import UsageError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class TooLarge(ValueError):
    """An image with more pixels than Pillow accepts: the file may be an attack."""


@dataclass(frozen=True)
class Images:
    """Images in memory."""

    X: np.ndarray  # pixels (n, channels, height, width) from 0 to 1, float32
    y: np.ndarray | None  # the folder of each image, or None where the images are in no folders
    names: list[str]  # paths of the images below the folder


def read_images(folder: Path, *, size: tuple[int, int] | None, channels: int = 3, strict: bool = False) -> Images:
    """Read all images below a folder, in the order of their names.

    Args:
        folder: A folder with one folder for each class, or with the images themselves.
        size: Height and width to resize to; None where all images have the same size.
        channels: 3 for color, 1 for gray.
        strict: Whether an image that cannot be read is an error; otherwise the image is left out.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not paths:
        raise UsageError(f"{folder} and its folders have no images ({', '.join(ENDINGS)}).")
    with needs_extra("images", "A folder of images"):
        import PIL  # noqa: F401
    arrays, inside = [], []
    skipped: list[str] = []
    large: list[str] = []
    for path in paths:
        place = path.relative_to(folder)
        try:
            arrays.append(_read(path, size, "L" if channels == 1 else "RGB"))
            inside.append(place)
        except Exception as error:  # whatever a damaged file makes Pillow raise
            if strict:
                raise UsageError(
                    f"{path} cannot be read as an image ({error}). Without --strict it is skipped."
                ) from error
            skipped.append(str(place))
            if isinstance(error, TooLarge):
                large.append(str(place))
    if not arrays:
        raise UsageError(f"None of the {len(paths)} images below {folder} can be read. The first is {skipped[0]}.")
    shapes = sorted({array.shape[:2] for array in arrays})
    if len(shapes) > 1:
        found = listing([f"{h} x {w}" for h, w in shapes])
        raise UsageError(f"The images below {folder} have several sizes ({found}). Choose one size with --size.")
    if skipped:
        warnings.warn(
            f"{len(skipped)} of {len(paths)} images cannot be read and are left out: {listing(skipped)}."
            + (f" Too large to be safe, so save smaller copies: {listing(large)}." if large else ""),
            stacklevel=2,
        )
    X = np.stack(arrays).reshape(len(arrays), *shapes[0], channels).transpose(0, 3, 1, 2)
    classes = [place.parts[0] for place in inside if len(place.parts) > 1]
    y = np.array(classes) if len(classes) == len(inside) else None
    return Images(np.ascontiguousarray(X), y, [place.as_posix() for place in inside])


def _read(path: Path, size: tuple[int, int] | None, mode: str) -> np.ndarray:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large, and below the limit
        try:
            opened = Image.open(path)
        except Image.DecompressionBombError as error:
            raise TooLarge(f"{error} Save a smaller copy of it.") from error
    with opened:
        image = opened.convert(mode)
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.float32) / 255
