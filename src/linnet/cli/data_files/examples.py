"""Data files of every kind as inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common.messages import listing
from linnet.cli.data_files.images import read_images
from linnet.cli.data_files.tables import Table, read_arrays, read_table, split_arrays
from linnet.cli.data_files.texts import read_texts, tokenized
from linnet.cli.model_source import pixels_of
from linnet.cli.terminal import UsageError

LENGTH = 128
"""Tokens of a text where nobody has said how many."""


@dataclass(frozen=True)
class Reading:
    """How data files are read; kept with a run, so that new data is read alike.

    Attributes:
        targets: Columns to predict; for .npz the name of their array.
        columns: Columns that the network takes, in order; None for all others, before the training data is read.
        drop: Columns to leave out.
        task: "auto", "classification" or "regression".
        size: Height and width of images.
        channels: Of images.
        pixel_mean: Subtracted from the pixels, one for each channel; and ``pixel_std`` what they are divided by.
        pixel_std: See there.
        strict: Whether an image that cannot be read is an error.
        tokenizer: Of texts.
        max_length: Tokens of a text; None for 128.
        center: Of each column where they are standardized, and ``spread`` their standard deviations.
        spread: See there.
        text: Whether the targets of the training data are text, so that labels such as 10 are text in other files too.
    """

    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    task: str = "auto"
    size: tuple[int, int] | None = None
    channels: int = 3
    pixel_mean: tuple[float, ...] | None = None
    pixel_std: tuple[float, ...] | None = None
    strict: bool = False
    tokenizer: str | None = None
    max_length: int | None = None
    center: tuple[float, ...] | None = None
    spread: tuple[float, ...] | None = None
    text: bool = False


@dataclass(frozen=True)
class Examples:
    """Data that was read.

    Attributes:
        X: A tensor (n, ...), or a dict of them.
        y: (n,) or (n, c), or None.
        what: In words.
        names: Of the examples, where they have any: files.
        columns: Of tables.
        texts: That the inputs were made from.
    """

    X: Any
    y: np.ndarray | None
    what: str
    names: list[str] = field(default_factory=list)
    columns: tuple[str, ...] | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(next(iter(self.X.values())) if isinstance(self.X, Mapping) else self.X)

    def first(self, count: int) -> Any:
        """The inputs of the first few."""
        return self.take(np.arange(min(count, self.n)))

    def take(self, index: np.ndarray) -> Any:
        """The inputs of some."""
        at = torch.as_tensor(index)
        return {name: x[at] for name, x in self.X.items()} if isinstance(self.X, Mapping) else self.X[at]


def read(path: Path, reading: Reading, *, labeled: bool) -> Examples:
    """A file or folder of data.

    Args:
        path: A .csv, .tsv, .parquet, .npz or .txt file, or a folder of images.
        reading: How.
        labeled: Whether targets are needed; otherwise they are taken where they are.
    """
    if not path.exists():
        raise UsageError(f"There is no {path}.")
    _check_options(path, reading)
    if path.is_dir():
        found = _images(path, reading)
    elif path.suffix == ".npz":
        found = _arrays(path, reading)
    elif _is_text(path, reading):
        found = _texts(path, reading)
    elif path.suffix in (".csv", ".tsv", ".parquet"):
        found = _table(path, reading, labeled=labeled)
    else:
        more = " Text files need --model hf:..., whose tokenizer reads them." if path.suffix == ".txt" else ""
        raise UsageError(
            f"{path} has no ending that is known: .csv, .tsv, .parquet, .npz, or a folder of images.{more}"
        )
    if labeled and found.y is None:
        raise UsageError(f"{path} has no targets: {_missing(path, reading)}")
    return found


def settled(
    path: Path, reading: Reading, model: nn.Module, *, labeled: bool, standardize: bool = False
) -> tuple[Examples, Reading]:
    """Data for a network, in its precision, and the reading with what these data and the network have settled."""
    if path.is_dir():
        given = {key: value for key, value in pixels_of(model).items() if getattr(reading, key) is None}
        reading = replace(reading, **given)
    found = read(path, reading, labeled=labeled)
    text = reading.text or (found.y is not None and found.y.dtype.kind == "U")
    reading = replace(reading, columns=found.columns, text=text)
    if standardize:
        reading = standardization(found, reading)
        found = read(path, reading, labeled=labeled)
    return for_network(found, model), reading


def _check_options(path: Path, reading: Reading) -> None:
    """Raise where an option is for data of another kind, and would do nothing."""
    table = path.suffix in (".csv", ".tsv", ".parquet") and not _is_text(path, reading)
    images = (reading.size, reading.pixel_mean, reading.pixel_std, reading.strict or None)
    for given, fits, what in (
        (reading.columns or reading.drop, table, "--columns and --drop are for tables"),
        (
            reading.channels == 1 or any(x is not None for x in images),
            path.is_dir(),
            "--size, --gray, --pixel-mean, --pixel-std and --strict are for folders of images",
        ),
        (reading.max_length, _is_text(path, reading), "--max-length is for texts"),
        (reading.targets, not path.is_dir(), "--target is not for folders of images, whose folders are the classes"),
    ):
        if given and not fits:
            raise UsageError(f"{what}; {path} is something else. Leave them out.")


def _is_text(path: Path, reading: Reading) -> bool:
    return reading.tokenizer is not None and path.suffix in (".tsv", ".txt")


def _missing(path: Path, reading: Reading) -> str:
    if path.is_dir():
        return "put the images of each class into a folder of its name."
    if path.suffix == ".npz":
        return f"there is no array {_array_name(reading)!r}; name it with --target."
    return "put a tab and a label behind each text." if reading.tokenizer else "name the column with --target."


def _images(path: Path, reading: Reading) -> Examples:
    images = read_images(path, size=reading.size, channels=reading.channels, strict=reading.strict)
    X = torch.as_tensor(images.X)
    for values, apply in ((reading.pixel_mean, torch.sub), (reading.pixel_std, torch.div)):
        if values is not None:
            if len(values) != X.shape[1]:
                raise UsageError(f"The images have {X.shape[1]} channels, and there are {len(values)} means or stds.")
            X = apply(X, torch.tensor(values).view(-1, 1, 1))
    what = f"{len(X):,} images of {X.shape[1]} x {X.shape[2]} x {X.shape[3]}"
    return Examples(X, images.y, what, images.names)


def _array_name(reading: Reading) -> str:
    if len(reading.targets) > 1:
        raise UsageError("A .npz file has one array of targets; give --target once. Its columns are the targets.")
    return reading.targets[0] if reading.targets else "y"


def _arrays(path: Path, reading: Reading) -> Examples:
    X, y = split_arrays(path, read_arrays(path), _array_name(reading))
    if y is not None:
        _check_targets(path, _array_name(reading), y)
    named = X if isinstance(X, Mapping) else {"x": X}
    what = f"arrays {', '.join(f'{name} {tuple(x.shape)}' for name, x in named.items())}"
    tensors = {name: _tensor(path, name, x) for name, x in named.items()}
    if isinstance(X, Mapping):
        return Examples(tensors, y, what)
    return Examples(tensors["x"] if reading.center is None else _standardized(tensors["x"], reading, path), y, what)


def _check_targets(path: Path, name: str, y: np.ndarray) -> None:
    """Raise where an array of targets holds neither finite numbers nor text."""
    if y.dtype.kind not in "biufU" or y.ndim not in (1, 2):
        raise UsageError(
            f"{path}: the array {name!r} must hold numbers or text, (n,) or (n, c); got {y.dtype}, {y.shape}."
        )
    if y.dtype.kind == "f":
        _check_finite(path, name, y)


def _tensor(path: Path, name: str, x: np.ndarray) -> Tensor:
    if x.dtype.kind not in "biuf" or x.ndim == 0:
        raise UsageError(
            f"{path}: the array {name!r} must hold numbers, one row for each example; got {x.dtype}, {x.shape}."
        )
    _check_finite(path, name, x)
    return torch.as_tensor(np.ascontiguousarray(x))


def _check_finite(path: Path, name: str, x: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
    if len(bad):
        raise UsageError(f"{path}: example {bad[0]} of {name!r} has NaN or infinity, as have {len(bad)} in all.")


def _texts(path: Path, reading: Reading) -> Examples:
    assert reading.tokenizer is not None
    texts, y = read_texts(path, target=reading.targets[0] if reading.targets else "label", text=reading.text)
    X = tokenized(texts, reading.tokenizer, max_length=reading.max_length or LENGTH)
    longest = next(iter(X.values())).shape[1]
    return Examples(X, y, f"{len(texts):,} texts of up to {longest} tokens", texts=texts)


def _table(path: Path, reading: Reading, *, labeled: bool) -> Examples:
    table = read_table(path, separator="\t" if path.suffix == ".tsv" else None)
    if labeled and not reading.targets:
        raise UsageError(
            f"--target says which column of {path} is to be predicted; it has {listing(list(table.columns), limit=20)}."
        )
    has_targets = bool(reading.targets) and all(name in table.columns for name in reading.targets)
    if labeled:
        table.take(reading.targets, "--target names")
    names = _columns(table, reading)
    X = torch.as_tensor(table.matrix(names))
    if reading.center is not None:
        X = _standardized(X, reading, path)
    y = _target(table, reading) if has_targets else None
    return Examples(X, y, f"{table.n:,} rows of {len(names)} columns", columns=names)


def _columns(table: Table, reading: Reading) -> tuple[str, ...]:
    """The columns that the network takes."""
    if reading.columns is not None:
        table.take(reading.columns, "the network takes")
        return reading.columns
    table.take(reading.drop, "--drop names")
    left = tuple(name for name in table.columns if name not in (*reading.targets, *reading.drop))
    if not left:
        raise UsageError(f"{table.path} has no columns beside {listing(list(table.columns))}: nothing to predict from.")
    return left


def _target(table: Table, reading: Reading) -> np.ndarray:
    if len(reading.targets) == 1:
        return table.labels(reading.targets[0], reading.task, text=reading.text)
    return table.matrix(reading.targets)


# Standardization, and the network's precision.


def standardization(found: Examples, reading: Reading) -> Reading:
    """The reading that standardizes the columns as those of these data; constant ones are centered only."""
    X = found.X
    if isinstance(X, Mapping) or X.ndim != 2 or not X.is_floating_point():
        raise UsageError("--standardize is for tables and arrays (n, d) of numbers; leave it out.")
    X = X.double()
    spread = X.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    return replace(reading, center=tuple(X.mean(0).tolist()), spread=tuple(spread.tolist()))


def _standardized(X: Tensor, reading: Reading, path: Path) -> Tensor:
    assert reading.center is not None and reading.spread is not None
    if X.ndim != 2 or X.shape[1] != len(reading.center):
        raise UsageError(
            f"{path}: the inputs need {len(reading.center)} columns, as in training; got {tuple(X.shape)}."
        )
    center, spread = (torch.tensor(values, dtype=torch.float64) for values in (reading.center, reading.spread))
    return (X.double() - center) / spread


def for_network(found: Examples, model: nn.Module) -> Examples:
    """The same with numbers in the network's precision, as it was trained; whole numbers stay."""
    dtype = next(model.parameters()).dtype

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    X = {name: cast(x) for name, x in found.X.items()} if isinstance(found.X, Mapping) else cast(found.X)
    return replace(found, X=X)
