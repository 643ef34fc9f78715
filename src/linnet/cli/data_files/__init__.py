"""Data files of every kind as inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import listing
from linnet.cli.data_files.images import read_images
from linnet.cli.data_files.scaling import FORM, Scaler, Scales
from linnet.cli.data_files.tables import Table, read_arrays, read_rows, read_table, restore_text, split_arrays
from linnet.cli.data_files.texts import check_texts, find_text_column, read_texts, tokenize
from linnet.cli.model_source import find_pixel_settings
from linnet.cli.terminal import UsageError

TABLES = (".csv", ".tsv", ".parquet")
"""Endings of tables."""


@dataclass(frozen=True)
class Reading:
    """How data files are read. A run keeps its reading, so that new data are read in the same way."""

    targets: tuple[str, ...] = ()  # columns to predict; for .npz the name of their array
    # columns that the network takes, in order; None for all others, before the training data are read
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()  # columns to leave out
    task: str = "auto"  # "auto", "classification" or "regression"
    size: tuple[int, int] | None = None  # height and width of images
    channels: int = 3  # number of channels of images
    pixel_mean: tuple[float, ...] | None = None  # one number for each channel, which is subtracted from the pixels
    pixel_std: tuple[float, ...] | None = None  # one number for each channel, by which the pixels are divided
    row_id: str | None = None  # column of a table with the names of its rows
    strict: bool = False  # whether an image that cannot be read is an error
    tokenizer: str | None = None  # tokenizer of texts
    max_length: int | None = None  # largest number of tokens of a text; None for 128
    text_column: bool = False  # whether the only column of the training data was read as texts
    center: tuple[float, ...] | None = None  # mean of each column, where the columns are standardized
    spread: tuple[float, ...] | None = None  # standard deviation of each column, where the columns are standardized
    scaled_by: str | None = None  # file with the means and standard deviations; None for the training data
    # Whether the targets of the training data are text. Labels such as 10 are then text in other files too.
    text: bool = False


@dataclass(frozen=True)
class Examples:
    """Data that were read."""

    X: Any  # a tensor (n, ...), or a dict of tensors
    y: np.ndarray | None  # targets (n,) or (n, c), or None
    what: str  # the data in words
    names: list[str] = field(default_factory=list)  # names of the examples, where they are files or have an id
    columns: tuple[str, ...] | None = None  # names of the columns of a table
    texts: list[str] = field(default_factory=list)  # the texts from which the inputs were made
    scale: str = ""  # the units of pixels, in words

    @property
    def description(self) -> str:
        """The data in words, with the units that the network sees."""
        return ", ".join(filter(None, (self.what, self.scale)))

    @property
    def n(self) -> int:
        return len(next(iter(self.X.values())) if isinstance(self.X, Mapping) else self.X)

    @property
    def hint(self) -> str:
        """What the data are, and the options that change it, where a network does not take them."""
        if self.columns is not None and not self.texts:
            return (
                f"The table has {len(self.columns)} columns of inputs: {listing(self.columns, limit=12)}. Name those "
                "that the network takes with --columns, or leave some out with --drop."
            )
        if not isinstance(self.X, Mapping) and self.X.ndim == 4 and self.names:
            size = " x ".join(map(str, self.X.shape[2:]))
            return f"The images have {self.X.shape[1]} channels (--gray reads one) and {size} pixels (--size)."
        named = self.X if isinstance(self.X, Mapping) else {"x": self.X}
        return f"The inputs have the shapes {', '.join(f'{name} {tuple(x.shape)}' for name, x in named.items())}."

    def first(self, count: int) -> Any:
        """The inputs of the first examples."""
        return self.take(np.arange(min(count, self.n)))

    def take(self, index: np.ndarray) -> Any:
        """The inputs of some examples."""
        return _apply(lambda x: x[torch.as_tensor(index)], self.X)


def _apply(function: Any, X: Any) -> Any:
    return {name: function(x) for name, x in X.items()} if isinstance(X, Mapping) else function(X)


def move(X: Any, device: torch.device) -> Any:
    """Inputs on a device."""
    return _apply(lambda x: x.to(device), X)


def read(path: Path, reading: Reading, *, labeled: bool) -> Examples:
    """Read a file or a folder of data.

    Args:
        path: A .csv, .tsv, .parquet, .npz or .txt file, or a folder of images.
        reading: How the data are read.
        labeled: Whether targets are required. Otherwise targets are read where the file has them.
    """
    if not path.exists():
        raise UsageError(f"There is no {path}.")
    _check_options(path, reading)
    if path.is_dir():
        found = _read_images(path, reading)
    elif path.suffix == ".npz":
        found = _read_arrays(path, reading)
    elif _has_lines_of_text(path, reading):
        found = _read_texts(path, reading)
    elif path.suffix in TABLES:
        found = _read_table(path, reading, labeled=labeled)
    else:
        more = " Text files need --model hf:..., whose tokenizer reads them." if path.suffix == ".txt" else ""
        more = " Save the sheet as .csv." if path.suffix in (".xlsx", ".xls", ".ods") else more
        more = " Write the ending in small letters." if path.suffix != path.suffix.lower() else more
        more = " Unpack the file first." if path.suffix in (".gz", ".zip", ".bz2", ".xz") else more
        raise UsageError(
            f"{path} has an unknown ending. Known are .csv, .tsv, .parquet, .npz, and folders of images.{more}"
        )
    if labeled and found.y is None:
        raise UsageError(f"{path} has no targets: {_say_where_targets_go(path, reading)}")
    return found


@dataclass(frozen=True)
class Standardization:
    """How columns, and the outputs of a network, are standardized, before any file is read."""

    measure: bool = False  # whether to measure means and standard deviations
    file: Path | None = None  # data that are measured; None for the training data
    scaler: Scaler | None = None  # means and standard deviations that the owner of the network gives
    targets: bool = False  # whether the network gives standardized targets

    @property
    def measures_targets(self) -> bool:
        """Whether means and standard deviations of targets are measured."""
        return self.targets and self.scaler is None

    def find_columns(self, found: Examples, reading: Reading, *, ordered: bool = True) -> Reading:
        """The reading that standardizes the columns of data that were read by the given reading.

        Where the order of the columns is not given, ``ordered`` is False, and a scaler with names has the order.
        """
        if self.scaler is None and not self.measure:
            return reading
        X = found.X
        if isinstance(X, Mapping) or X.ndim != 2 or not X.is_floating_point():
            option = "--scaler" if self.scaler else "--standardize"
            raise UsageError(f"{option} is for tables and for arrays (n, d) of numbers. Leave it out.")
        if self.scaler is not None:
            names = found.columns
            if not ordered and names is not None and set(names) <= set(self.scaler.columns):
                names = tuple(name for name in self.scaler.columns if name in names)
                reading = replace(reading, columns=names)
            scales = self.scaler.find_columns(names)
            if len(scales.mean) != X.shape[1]:
                raise UsageError(f"{self.scaler.path} has {len(scales.mean)} columns, but the data have {X.shape[1]}.")
            return replace(reading, center=scales.mean, spread=scales.std, scaled_by=str(self.scaler.path))
        scales = Scales.measure((found if self.file is None else read(self.file, reading, labeled=False)).X.numpy())
        origin = None if self.file is None else str(self.file)
        return replace(reading, center=scales.mean, spread=scales.std, scaled_by=origin)

    def find_targets(self, found: Examples, reading: Reading) -> Scales | None:
        """The means and standard deviations of the targets of a network that gives standardized targets, else None."""
        assert found.y is not None
        y = found.y.reshape(found.n, -1)
        scales = None if self.scaler is None else self.scaler.find_targets(reading.targets, y.shape[1])
        if scales is not None or not self.targets:
            return scales
        if self.scaler is not None:
            raise UsageError(f"--scale-target: {self.scaler.path} has no targets. {FORM}")
        if self.file is not None:
            known = read(self.file, reading, labeled=True).y
            assert known is not None
            y = known.reshape(len(known), -1)
        return Scales.measure(y)


def read_for_network(
    path: Path,
    reading: Reading,
    model: nn.Module,
    *,
    labeled: bool,
    standardization: Standardization | None = None,
) -> tuple[Examples, Reading]:
    """Read data in the precision of a network; and the reading, completed by what the data and the network say."""
    if path.is_dir():
        given = {key: value for key, value in find_pixel_settings(model).items() if getattr(reading, key) is None}
        reading = replace(reading, **given)
    found = read(path, reading, labeled=labeled)
    ordered, text = reading.columns is not None, reading.text or (found.y is not None and found.y.dtype.kind == "U")
    reading = replace(
        reading, columns=found.columns, text=text, text_column=found.columns is not None and bool(found.texts)
    )
    if standardization is not None:
        plain, reading = reading, standardization.find_columns(found, reading, ordered=ordered)
        found = found if reading is plain else read(path, reading, labeled=labeled)
    return cast_for_network(found, model), reading


def _check_options(path: Path, reading: Reading) -> None:
    """Raise where an option is for data of another kind, and would do nothing."""
    table = path.suffix in TABLES
    texts = reading.tokenizer is not None and path.suffix in (*TABLES, ".txt")
    images = reading.channels == 1 or reading.size or reading.pixel_mean or reading.pixel_std or reading.strict
    for given, fits, what in (
        (reading.columns or reading.drop, table, "--columns and --drop are for tables"),
        (reading.row_id, table, "--id is for tables"),
        (images, path.is_dir(), "--size, --gray, --pixel-mean, --pixel-std and --strict are for folders of images"),
        (reading.max_length, texts, "--max-length is for texts"),
        (reading.targets, not path.is_dir(), "--target is not for folders of images, whose folders are the classes"),
    ):
        if given and not fits:
            raise UsageError(f"{what}, and {path} is something else. Leave the option out.")


def _has_lines_of_text(path: Path, reading: Reading) -> bool:
    """Whether a file has lines of a text and a label, and no columns that the reading names."""
    if reading.tokenizer is None or path.suffix not in (".tsv", ".txt"):
        return False
    if path.suffix == ".txt":
        return True
    if reading.columns is not None or reading.drop or reading.row_id is not None:
        return False
    header = read_rows(path, "\t")[0]
    return len(header) < 3 or not any(name in header for name in reading.targets)


def _say_where_targets_go(path: Path, reading: Reading) -> str:
    if path.is_dir():
        return "put the images of each class into a folder with the name of the class."
    if path.suffix == ".npz":
        return f"there is no array {_array_name(reading)!r}. Name the array with --target."
    lines = _has_lines_of_text(path, reading)
    return "put a tab and a label behind each text." if lines else "name the column with --target."


def _read_images(path: Path, reading: Reading) -> Examples:
    images = read_images(path, size=reading.size, channels=reading.channels, strict=reading.strict)
    X = torch.as_tensor(images.X)
    for values, apply in ((reading.pixel_mean, torch.sub), (reading.pixel_std, torch.div)):
        if values is not None:
            if len(values) != X.shape[1]:
                raise UsageError(f"The images have {X.shape[1]} channels, but there are {len(values)} means or stds.")
            X = apply(X, torch.tensor(values).view(-1, 1, 1))
    what = f"{len(X):,} images of {X.shape[1]} x {X.shape[2]} x {X.shape[3]}"
    return Examples(X, images.y, what, images.names, scale=_describe_pixels(reading))


def _describe_pixels(reading: Reading) -> str:
    """Which pixels the network sees, in words.

    >>> _describe_pixels(Reading()), _describe_pixels(Reading(pixel_mean=(0.5, 0.4), pixel_std=(0.25, 0.25)))
    ('pixels from 0 to 1', 'pixels less 0.5, 0.4, over 0.25, 0.25')
    """
    mean, std = (", ".join(f"{x:.4g}" for x in values or ()) for values in (reading.pixel_mean, reading.pixel_std))
    parts = [f"less {mean}" if mean else "", f"over {std}" if std else ""]
    return "pixels " + (", ".join(filter(None, parts)) or "from 0 to 1")


def _array_name(reading: Reading) -> str:
    if len(reading.targets) > 1:
        raise UsageError("A .npz file has one array of targets. Give --target once; the columns are the targets.")
    return reading.targets[0] if reading.targets else "y"


def _read_arrays(path: Path, reading: Reading) -> Examples:
    target = _array_name(reading)
    X, y = split_arrays(path, read_arrays(path), target)
    if y is not None:
        if y.dtype.kind not in "biufU" or y.ndim not in (1, 2):
            raise UsageError(
                f"{path}: the array {target!r} must hold numbers or text, (n,) or (n, c); got {y.dtype}, {y.shape}."
            )
        _check_finite(path, target, y)
    named = X if isinstance(X, Mapping) else {"x": X}
    what = f"arrays {', '.join(f'{name} {tuple(x.shape)}' for name, x in named.items())}"
    tensors = {name: _make_tensor(path, name, x) for name, x in named.items()}
    if isinstance(X, Mapping):
        return Examples(tensors, y, what)
    return Examples(_standardize(tensors["x"], reading, path), y, what)


def _make_tensor(path: Path, name: str, x: np.ndarray) -> Tensor:
    if x.dtype.kind not in "biuf" or x.ndim == 0:
        raise UsageError(
            f"{path}: the array {name!r} must hold numbers, one row for each example; got {x.dtype}, {x.shape}."
        )
    _check_finite(path, name, x)
    return torch.as_tensor(np.ascontiguousarray(x))


def _check_finite(path: Path, name: str, x: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1) if x.dtype.kind == "f" else [])
    if len(bad):
        raise UsageError(f"{path}: example {bad[0]} of {name!r} has NaN or infinity; {len(bad)} examples have.")


def _read_texts(path: Path, reading: Reading) -> Examples:
    texts, y = read_texts(path, target=reading.targets[0] if reading.targets else "label", text=reading.text)
    X, what = _tokenize(texts, reading)
    return Examples(X, y, what, texts=texts)


def _tokenize(texts: list[str], reading: Reading) -> tuple[dict[str, Tensor], str]:
    """The tokens of texts, and what they are in words."""
    assert reading.tokenizer is not None
    X = tokenize(texts, reading.tokenizer, max_length=reading.max_length or 128)
    longest = next(iter(X.values())).shape[1]
    return X, f"{len(texts):,} text{'s' if len(texts) != 1 else ''} of up to {longest} tokens"


def _read_table(path: Path, reading: Reading, *, labeled: bool) -> Examples:
    targets = reading.targets
    table = read_table(path, separator="\t" if path.suffix == ".tsv" else None)
    if labeled:
        if not targets:
            known = listing(list(table.columns), limit=20)
            raise UsageError(f"Name the column of {path} to predict with --target. Its columns are {known}.")
        table.check_columns(targets, "--target names")
    names = _choose_columns(table, reading)
    text = None if reading.tokenizer is None else find_text_column(table, names, known=reading.text_column)
    texts = [] if text is None else [str(cell) for cell in table.columns[text].tolist()]
    X: Any
    if texts:
        check_texts(path, texts, first=table.first)
        X, what = _tokenize(texts, reading)
    else:
        X = _standardize(torch.as_tensor(table.matrix(names)), reading, path)
        rows, columns = ("s" if count != 1 else "" for count in (table.n, len(names)))
        what = f"{table.n:,} row{rows} of {len(names)} column{columns}"
    y = None
    if targets and all(name in table.columns for name in targets):
        one = len(targets) == 1
        y = table.labels(targets[0], reading.task, text=reading.text) if one else table.matrix(targets)
    return Examples(X, y, what, _name_rows(table, reading), columns=names, texts=texts)


def _name_rows(table: Table, reading: Reading) -> list[str]:
    """The names of the rows, where a column has them. New data may have no such column."""
    if reading.row_id is None or reading.row_id not in table.columns:
        return []
    names = [restore_text(str(cell).strip()) for cell in table.columns[reading.row_id].tolist()]
    if "" in names:
        at = names.index("") + table.first
        raise UsageError(f"{table.path}, line {at}: column {reading.row_id!r} is empty, and --id names it.")
    return names


def _choose_columns(table: Table, reading: Reading) -> tuple[str, ...]:
    """The columns that the network takes."""
    if reading.columns is not None:
        table.check_columns(reading.columns, "the network takes")
        return reading.columns
    table.check_columns(reading.drop, "--drop names")
    table.check_columns(() if reading.row_id is None else (reading.row_id,), "--id names")
    unused = (*reading.targets, *reading.drop, reading.row_id)
    left = tuple(name for name in table.columns if name not in unused)
    if not left:
        raise UsageError(
            f"{table.path} has no columns besides {listing(list(table.columns))}: there is nothing to predict from."
        )
    return left


# Standardization, and the precision of the network.


def _standardize(X: Tensor, reading: Reading, path: Path) -> Tensor:
    if reading.center is None or reading.spread is None:
        return X
    if X.ndim != 2 or X.shape[1] != len(reading.center):
        raise UsageError(f"{path}: training had {len(reading.center)} input columns; got {tuple(X.shape)}.")
    center, spread = (torch.tensor(values, dtype=torch.float64) for values in (reading.center, reading.spread))
    return (X.double() - center) / spread


def cast_for_network(found: Examples, model: nn.Module) -> Examples:
    """The data with fractions in the precision of the network; whole numbers stay whole numbers."""
    dtype = next(model.parameters()).dtype
    return replace(found, X=_apply(lambda x: x.to(dtype) if x.is_floating_point() else x, found.X))
