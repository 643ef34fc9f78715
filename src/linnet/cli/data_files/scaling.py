"""Means and spreads by which the columns of a table, and its targets, are standardized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linnet._common import listing
from linnet.cli.terminal import UsageError

FORM = """A scaler is a JSON file such as
{"columns": {"age": {"mean": 48.5, "std": 13.1}, "bmi": {"mean": 26.4, "std": 4.4}},
 "targets": {"y": {"mean": 152.1, "std": 77.0}}}
or, in the order of the columns, {"columns": {"mean": [48.5, 26.4], "std": [13.1, 4.4]}}. "targets" may be missing."""


@dataclass(frozen=True)
class Scales:
    """Mean and standard deviation of each of several columns."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def measure(cls, values: NDArray[Any]) -> Scales:
        """Of the columns of a matrix (n, d). A constant column has the standard deviation 1."""
        values = np.asarray(values, dtype=np.float64)
        std = values.std(0)
        return cls(tuple(values.mean(0).tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


@dataclass(frozen=True)
class Scaler:
    """The content of a JSON file with scales."""

    path: Path
    columns: Mapping[str, Any]
    targets: Mapping[str, Any] | None

    def find_columns(self, names: Sequence[str] | None) -> Scales:
        """The scales of the columns of a table, or of an array where ``names`` is None."""
        return self._find(self.columns, "columns", names)

    def find_targets(self, names: Sequence[str], count: int) -> Scales | None:
        """The scales of the targets, if the file has any; ``count`` is the number of targets."""
        if self.targets is None:
            return None
        found = self._find(self.targets, "targets", names if len(names) == count else None)
        if len(found.mean) != count:
            raise UsageError(f"{self.path} has {len(found.mean)} targets, but the data have {count}.")
        return found

    def _find(self, given: Mapping[str, Any], what: str, names: Sequence[str] | None) -> Scales:
        mean, std = ([x] if isinstance(x, int | float) else x for x in (given.get("mean"), given.get("std")))
        if isinstance(mean, list) and isinstance(std, list):
            if len(mean) != len(std) or (names is not None and len(mean) != len(names)):
                needed = "" if names is None else f", and {len(names)} {what} in the data"
                raise UsageError(f"{self.path}: {what!r} has {len(mean)} means and {len(std)} stds{needed}.")
        elif names is None:
            raise UsageError(f"{self.path}: these data have no names of {what}. {FORM}")
        else:
            missing = [name for name in names if name not in given]
            if missing:
                raise UsageError(
                    f"{self.path}: {what!r} has no {listing(missing)}; it has {listing(list(given), limit=20)}. {FORM}"
                )
            pairs = [given[name] for name in names]
            if not all(isinstance(pair, dict) and {"mean", "std"} <= pair.keys() for pair in pairs):
                raise UsageError(f"{self.path}: {what!r} has no mean and std of each name. {FORM}")
            mean, std = ([pair[key] for pair in pairs] for key in ("mean", "std"))
        return Scales(*(self._check(what, key, values) for key, values in (("mean", mean), ("std", std))))

    def _check(self, what: str, key: str, values: Sequence[Any]) -> tuple[float, ...]:
        try:
            found = np.array([float(value) for value in values])
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.path}: {key} of {what!r} must hold numbers ({error}).") from error
        if not np.isfinite(found).all() or (key == "std" and not (found > 0).all()):
            needed = "positive numbers" if key == "std" else "finite numbers"
            raise UsageError(f"{self.path}: {key} of {what!r} must hold {needed}; got {list(values)}.")
        return tuple(found.tolist())


def read_scaler(path: Path) -> Scaler:
    """Read a JSON file with scales."""
    if not path.is_file():
        raise UsageError(f"There is no file {path} with a scaler.")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON file ({error}). {FORM}") from error
    parts = [found.get(name) for name in ("columns", "targets")] if isinstance(found, dict) else [None, None]
    if not isinstance(parts[0], dict) or not isinstance(parts[1], dict | None):
        raise UsageError(f"{path} is no scaler. {FORM}")
    return Scaler(path, parts[0], parts[1])
