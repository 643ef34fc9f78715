"""Tables with named columns: .csv, .tsv and .parquet; and arrays of .npz files.

The csv module of Python reads .csv files, also where pyarrow or pandas are installed: a cell keeps its text (``007`` is
not 7, and a class may have the name ``NA``), an error names its line, and a file means the same on every machine.
45,730 rows of ten columns take 0.4 s; pyarrow takes 0.04 s.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet._common import atomic_write, listing
from linnet.cli.terminal import UsageError

NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
"""Numbers as tables have them. Python accepts more, such as 1_0."""

CODE = re.compile(r"[+-]?[0-9]+")
"""Digits: a whole number, or a code such as 007."""

WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""Whole numbers that have only one text, within 64 bits: neither 007 nor +7."""

FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Beginnings of cells that spreadsheets take for formulas, behind any number of quotation marks. The last four are the
full-width forms of = + - @."""


@dataclass(frozen=True)
class Table:
    """Columns by name."""

    path: Path  # the file
    # columns (n,): text as it stands in the file, or values of the type that the file says
    columns: dict[str, np.ndarray]
    first: int = 1  # line of the first row, for messages
    # Whether the file says which columns are text. Otherwise all columns are text, and some hold numbers.
    typed: bool = False

    @property
    def n(self) -> int:
        return len(next(iter(self.columns.values())))

    def check_columns(self, names: Sequence[str], what: str) -> None:
        """Raise unless the table has all these columns."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            known = listing(list(self.columns), limit=20)
            more = ""
            if all(_parse_number(name) is not None for name in self.columns):
                more = " The first line of a table has the names of its columns, and here it has numbers: add a line."
            raise UsageError(
                f"{self.path} has no column {listing(missing)}, which {what}. Its columns are {known}.{more}"
            )

    def matrix(self, names: Sequence[str]) -> np.ndarray:
        """Columns of numbers, (n, d)."""
        return np.stack([self.numbers(name) for name in names], 1)

    def numbers(self, name: str) -> np.ndarray:
        """A column in float64. Text, gaps, NaN and infinity are refused, and the error names the line."""
        cells = self.columns[name]
        if cells.dtype.kind in "biuf":
            found = cells.astype(np.float64)
        else:
            parsed = [_parse_number(cell) for cell in cells]
            self._check_numbers(name, parsed)
            found = np.array(parsed, dtype=np.float64)
        self._check_finite(name, found)
        return found

    def _check_finite(self, name: str, found: np.ndarray) -> None:
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            self._refuse_rows(name, "NaN or infinite", bad)

    def _refuse_rows(self, name: str, what: str, rows: Sequence[int] | np.ndarray) -> None:
        raise UsageError(
            f"{self.path}, line {rows[0] + self.first}: column {name!r} is {what}"
            + (f", as in {len(rows)} rows in all. " if len(rows) > 1 else ". ")
            + "Fill such cells, or leave the rows out."
        )

    def _check_numbers(self, name: str, parsed: Sequence[float | None]) -> None:
        cells = self.columns[name]
        wrong = [i for i, value in enumerate(parsed) if value is None]
        empty = [i for i in wrong if not str(cells[i]).strip()]
        if not wrong:
            return
        if len(empty) == len(wrong):
            self._refuse_rows(name, "empty", empty)
        at = next(i for i in wrong if i not in set(empty))
        right = next((i for i, value in enumerate(parsed) if value is not None), None)
        comma = ""
        if _parse_number(str(cells[at]).strip().replace(",", ".", 1)) is not None:
            comma = " Numbers need a decimal point in place of the comma."
        mixed = "" if right is None else f", while line {right + self.first} has the number {cells[right]!r}"
        raise UsageError(
            f"{self.path}, line {at + self.first}: column {name!r} must hold numbers, but has "
            f"{str(cells[at])!r}{mixed}.{comma} Leave the column out with --drop, name the columns to use with "
            "--columns, or replace the text by numbers."
        )

    def labels(self, name: str, task: str, *, text: bool = False) -> np.ndarray:
        """A target column: numbers, or class labels as they stand in the file; see `parse_labels`.

        Args:
            name: Name of the column.
            task: "auto", "classification" or "regression". Only classes may mix numbers and text.
            text: Whether the labels are text, whatever they look like.
        """
        cells = self.columns[name]
        if cells.dtype.kind in "biuf":
            self._check_finite(name, cells)
            return cells
        texts = [str(cell) for cell in cells]
        empty = [i for i, cell in enumerate(texts) if not cell.strip()]
        if empty:
            self._refuse_rows(name, "empty", empty)
        if task == "regression":
            return self.numbers(name)
        if self.typed:
            return np.array(texts)
        if text:
            return self._remove_quotes(name, np.array(texts))
        parsed = [_parse_number(cell) for cell in cells]
        if None not in parsed and not all(CODE.fullmatch(cell.strip()) for cell in texts):
            return self.numbers(name)
        if task == "auto" and None in parsed and any(value is not None for value in parsed):
            i, j = (next(k for k, value in enumerate(parsed) if (value is None) == text) for text in (False, True))
            raise UsageError(
                f"{self.path}: the target {name!r} mixes numbers and text: line {i + self.first} has {texts[i]!r} and "
                f"line {j + self.first} has {texts[j]!r}. Correct the column, or pass --task classification if each "
                "cell is the name of a class."
            )
        return self._remove_quotes(name, parse_labels(texts))

    def _remove_quotes(self, name: str, found: np.ndarray) -> np.ndarray:
        """Text without the quotation marks that `write_csv` puts before formulas."""
        if found.dtype.kind != "U":
            return found
        raw = {text: restore_text(text) for text in found.tolist()}
        if len(set(raw.values())) < len(raw):
            merged = next(text for text in raw if raw[text] != text and raw[text] in raw)
            raise UsageError(
                f"{self.path}: the target {name!r} has both {merged!r} and {raw[merged]!r}. The quotation mark keeps "
                "spreadsheets from reading a label as a formula, so linnet reads both as one label. Rename one."
            )
        return np.array([raw[text] for text in found.tolist()])


def read_table(path: Path, *, separator: str | None = None) -> Table:
    """Read a .csv, .tsv or .parquet file with named columns."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    header, rows = read_rows(path, separator)
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise UsageError(f"{path} has several columns with the name {listing(doubled)}. Give each its own name.")
    if not rows:
        raise UsageError(f"{path} has a header but no rows.")
    columns = {name: np.array(cells, dtype=object) for name, cells in zip(header, zip(*rows, strict=True), strict=True)}
    return Table(path, columns, first=2)


def read_rows(path: Path, separator: str | None = None) -> tuple[list[str], list[list[str]]]:
    """The first line, and all other lines with the same number of cells. Blank lines are skipped."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            tabs = separator == "\t"  # texts may begin with a quotation mark
            if separator is None:
                separator = next((one for one in ",;\t" if one in start), ",")
            reader = csv.reader(file, delimiter=separator, quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL)
            lines = [row for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a table in UTF-8 text ({error}). Save it as CSV UTF-8.") from error
    if not lines:
        raise UsageError(f"{path} is empty.")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    for i, row in enumerate(rows):
        if len(row) != len(header):
            raise UsageError(
                f"{path}, line {i + 2}: {len(row)} cells, but the first line has {len(header)} columns "
                f"({listing(header)})."
            )
    return header, rows


def _read_parquet(path: Path) -> Table:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path} is a parquet file, and reading it needs pyarrow: pip install pyarrow, or save it as .csv or .npz."
        ) from error
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow has error classes of its own
        raise UsageError(f"{path} cannot be read as a parquet file ({error}).") from error
    columns = {name: np.asarray(table.column(name).to_pylist()) for name in table.column_names}
    if not columns or table.num_rows == 0:
        raise UsageError(f"{path} has no rows.")
    gaps = [name for name, cells in columns.items() if cells.dtype == object and any(cell is None for cell in cells)]
    if gaps:
        raise UsageError(f"{path} has gaps in {listing(gaps)}. Fill them, or leave the rows out.")
    return Table(path, columns, typed=True)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file. Nothing is unpickled."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise UsageError(f"{path} cannot be read as a .npz file of arrays ({error}).") from error
    if not arrays:
        raise UsageError(f"{path} holds no arrays.")
    return arrays


def split_arrays(path: Path, arrays: Mapping[str, np.ndarray], target: str) -> tuple[Any, np.ndarray | None]:
    """Inputs and targets: ``x`` and the target's array. Without an ``x``, all other arrays are keyword arguments."""
    y = arrays.get(target)
    rest = {name: value for name, value in arrays.items() if name != target}
    if not rest:
        raise UsageError(f"{path} holds {listing(list(arrays))}, and no inputs. Save the inputs as x.")
    X: Any = rest.get("x", rest)
    used = [*(rest if X is rest else ["x"]), *([] if y is None else [target])]
    lengths = {arrays[name].shape[:1] for name in used}
    if len(lengths) != 1 or () in lengths:
        counts = ", ".join(f"{name} {arrays[name].shape}" for name in used)
        raise UsageError(f"{path}: all arrays need the same number of examples, along their first axis; got {counts}.")
    return X, y


def parse_labels(texts: Sequence[str]) -> np.ndarray:
    """Class labels: whole numbers where each number has only one text, otherwise the text.

    >>> parse_labels(["7", "10"]), parse_labels(["007", "7"]), parse_labels(["1_0", "10"])
    (array([ 7, 10]), array(['007', '7'], dtype='<U3'), array(['1_0', '10'], dtype='<U3'))
    """
    if all(WHOLE.fullmatch(text.strip()) for text in texts):
        return np.array([int(text) for text in texts], dtype=np.int64)
    return np.array(list(texts))


def _parse_number(cell: Any) -> float | None:
    """A plain decimal number, NaN or infinity; None for everything else."""
    if isinstance(cell, str) and not NUMBER.fullmatch(cell.strip()):
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def write_csv(path: Path, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
    """Write a complete table with named columns, or no file at all. Numbers have all their digits.

    Text that spreadsheets would read as a formula gets a quotation mark in front, as OWASP advises ("CSV injection").
    `restore_text` removes the mark.
    """
    lists = [column.tolist() if isinstance(column, np.ndarray) else list(column) for column in columns.values()]
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([quote_formula(name) for name in columns])
        writer.writerows([quote_formula(cell) for cell in row] for row in zip(*lists, strict=True))


def quote_formula(cell: Any) -> Any:
    """A cell that no spreadsheet reads as a formula. Numbers are returned unchanged.

    >>> quote_formula("=1+1"), quote_formula("'=1"), quote_formula("a=1"), quote_formula(-1.5)
    ("'=1+1", "''=1", 'a=1', -1.5)
    """
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def restore_text(cell: str) -> str:
    """The text that `quote_formula` was given.

    >>> restore_text("'=1+1"), restore_text("''=1"), restore_text("'a'"), restore_text("=1")
    ('=1+1', "'=1", "'a'", '=1')
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell
