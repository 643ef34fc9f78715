"""Tables with named columns: .csv, .tsv and .parquet; and arrays of .npz files."""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet._common.messages import listing
from linnet.cli.outputs import raw_text
from linnet.cli.terminal import UsageError

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
"""Numbers as tables have them; Python's own, such as 1_0, are more."""

CODE = re.compile(r"[+-]?[0-9]+")
"""Digits: a whole number, or a code such as 007."""

WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""Whole numbers of which each has one text, within 64 bits: neither 007 nor +7."""


@dataclass(frozen=True)
class Table:
    """Columns by name.

    Attributes:
        path: Where they come from.
        columns: (n,) each: text as it stood in the file, or what the file says it is.
        first: The line of the first row, for messages.
        typed: Whether the file says which columns are text; else all are text, and some of it stands for numbers.
    """

    path: Path
    columns: dict[str, np.ndarray]
    first: int = 1
    typed: bool = False

    @property
    def n(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, names: Sequence[str], what: str) -> None:
        """Raise unless all these columns are there."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise UsageError(
                f"{self.path} has no column {listing(missing)}, which {what}; its columns are "
                f"{listing(list(self.columns), limit=20)}."
            )

    def matrix(self, names: Sequence[str]) -> np.ndarray:
        """Columns of numbers, (n, d)."""
        return np.stack([self.numbers(name) for name in names], 1)

    def numbers(self, name: str) -> np.ndarray:
        """A column in float64; text, gaps, NaN and infinity are refused with the line."""
        cells = self.columns[name]
        if cells.dtype.kind in "biuf":
            found = cells.astype(np.float64)
        else:
            parsed = [_number(cell) for cell in cells]
            self._check(name, parsed)
            found = np.array(parsed, dtype=np.float64)
        self._check_finite(name, found)
        return found

    def _check_finite(self, name: str, found: np.ndarray) -> None:
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            raise UsageError(
                f"{self.path}, line {bad[0] + self.first}: column {name!r} is NaN or infinite, as are {len(bad)} rows "
                "in all. Fill these cells or leave the rows out."
            )

    def _check(self, name: str, parsed: Sequence[float | None]) -> None:
        cells = self.columns[name]
        wrong = [i for i, value in enumerate(parsed) if value is None]
        if not wrong:
            return
        empty = [i for i in wrong if not str(cells[i]).strip()]
        if empty and len(empty) == len(wrong):
            raise UsageError(
                f"{self.path}, line {empty[0] + self.first}: column {name!r} is empty, as are {len(empty)} rows in "
                "all. Fill these cells or leave the rows out."
            )
        at = next(i for i in wrong if i not in set(empty))
        right = next((i for i, value in enumerate(parsed) if value is not None), None)
        mixed = "" if right is None else f", while line {right + self.first} has the number {cells[right]!r}"
        raise UsageError(
            f"{self.path}, line {at + self.first}: column {name!r} must hold numbers, and has "
            f"{str(cells[at])!r}{mixed}. "
            "Leave the column out with --drop, name the columns to use with --columns, or make numbers of it."
        )

    def labels(self, name: str, task: str, *, text: bool = False) -> np.ndarray:
        """A target column: numbers, or class labels, which are the text that they are; see `whole_or_text`.

        Args:
            name: Name of the column.
            task: "auto", "classification" or "regression"; a mix of numbers and text is for classes alone.
            text: Whether the labels are text whatever they look like.
        """
        cells = self.columns[name]
        if cells.dtype.kind in "biuf":
            self._check_finite(name, cells)
            return cells
        if any(not str(cell).strip() for cell in cells):
            self._check(name, [None if not str(cell).strip() else 0.0 for cell in cells])
        texts = [str(cell) for cell in cells]
        if task == "regression":
            return self.numbers(name)
        if self.typed:
            return np.array(texts)
        if text:
            return self._decoded(name, np.array(texts))
        parsed = [_number(cell) for cell in cells]
        if all(value is not None for value in parsed) and not all(CODE.fullmatch(text.strip()) for text in texts):
            return self.numbers(name)
        if task == "auto" and any(value is not None for value in parsed) and None in parsed:
            self._mixed(name, parsed)
        return self._decoded(name, whole_or_text(texts))

    def _decoded(self, name: str, found: np.ndarray) -> np.ndarray:
        """Text without the quotation marks that `linnet.cli.outputs.write_csv` puts before formulas."""
        if found.dtype.kind != "U":
            return found
        raw = {text: raw_text(text) for text in found.tolist()}
        if len(set(raw.values())) < len(raw):
            merged = next(text for text in raw if raw[text] != text and raw[text] in raw)
            raise UsageError(
                f"{self.path}: the target {name!r} has both {merged!r} and {raw[merged]!r}. The quotation mark keeps "
                "spreadsheets from taking a label for a formula, so that linnet reads both as one label. Rename one."
            )
        return np.array([raw[text] for text in found.tolist()])

    def _mixed(self, name: str, parsed: Sequence[float | None]) -> None:
        cells = self.columns[name]
        text = next(i for i, value in enumerate(parsed) if value is None)
        number = next(i for i, value in enumerate(parsed) if value is not None)
        raise UsageError(
            f"{self.path}: the target {name!r} mixes numbers and text: line {number + self.first} has "
            f"{cells[number]!r} and line {text + self.first} has {str(cells[text])!r}. Mend it, or say --task "
            "classification if each is the name of a class."
        )


def read_table(path: Path, *, separator: str | None = None) -> Table:
    """A .csv, .tsv or .parquet file with named columns."""
    if path.suffix == ".parquet":
        return _parquet(path)
    header, rows = rows_of(path, separator)
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise UsageError(f"{path} has several columns of the name {listing(doubled)}; give each its own.")
    if not rows:
        raise UsageError(f"{path} has a header and no rows.")
    columns = {name: np.array(cells, dtype=object) for name, cells in zip(header, zip(*rows, strict=True), strict=True)}
    return Table(path, columns, first=2)


def rows_of(path: Path, separator: str | None = None) -> tuple[list[str], list[list[str]]]:
    """The first line and all others, each with as many cells; blank lines do not count."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            if separator is None:
                separator = ";" if ";" in start and "," not in start else ","
            tabs = separator == "\t"  # texts may begin with a quotation mark
            reader = csv.reader(file, delimiter=separator, quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL)
            lines = [row for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a table in UTF-8 text ({error}).") from error
    if not lines:
        raise UsageError(f"{path} is empty.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise UsageError(
                f"{path}, line {i + 2}: {len(row)} cells, and the first line has {len(header)} columns "
                f"({listing(header)})."
            )
    return header, rows


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path} is a parquet file, and reading it needs pyarrow: pip install pyarrow, or save it as .csv or .npz."
        ) from error
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow's own classes are only known where it is installed
        raise UsageError(f"{path} cannot be read as a parquet file ({error}).") from error
    columns = {name: np.asarray(table.column(name).to_pylist()) for name in table.column_names}
    if not columns or table.num_rows == 0:
        raise UsageError(f"{path} has no rows.")
    gaps = [name for name, cells in columns.items() if cells.dtype == object and any(cell is None for cell in cells)]
    if gaps:
        raise UsageError(f"{path} has gaps in {listing(gaps)}. Fill them or leave the rows out.")
    return Table(path, columns, typed=True)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, never unpickled."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise UsageError(f"{path} cannot be read as a .npz file of arrays ({error}).") from error
    if not arrays:
        raise UsageError(f"{path} holds no arrays.")
    return arrays


def split_arrays(path: Path, arrays: Mapping[str, np.ndarray], target: str) -> tuple[Any, np.ndarray | None]:
    """Inputs and targets: ``x`` and the target's array; without an ``x``, all others by name, as keyword arguments."""
    y = arrays.get(target)
    rest = {name: value for name, value in arrays.items() if name != target}
    if not rest:
        raise UsageError(f"{path} holds {listing(list(arrays))}, and no inputs: save them as x.")
    X: Any = rest.get("x", rest)
    sizes = {name: value.shape[:1] for name, value in (rest.items() if X is rest else {"x": X}.items())}
    if y is not None:
        sizes[target] = y.shape[:1]
    if len(set(sizes.values())) != 1 or () in sizes.values():
        counts = ", ".join(f"{name} {arrays[name].shape}" for name in sizes)
        raise UsageError(f"{path}: all arrays need as many examples, along their first axis; got {counts}.")
    return X, y


def whole_or_text(texts: Sequence[str]) -> np.ndarray:
    """Class labels: whole numbers where each has one text alone, otherwise the text as it is.

    >>> whole_or_text(["7", "10"]), whole_or_text(["007", "7"]), whole_or_text(["1_0", "10"])
    (array([ 7, 10]), array(['007', '7'], dtype='<U3'), array(['1_0', '10'], dtype='<U3'))
    """
    if all(WHOLE.fullmatch(text.strip()) for text in texts):
        return np.array([int(text) for text in texts], dtype=np.int64)
    return np.array(list(texts))


def _number(cell: Any) -> float | None:
    """A plain decimal number, NaN or infinity; None for all else."""
    if isinstance(cell, str) and not NUMBER.fullmatch(cell.strip()):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None
