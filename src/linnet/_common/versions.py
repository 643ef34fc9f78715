"""Versions of linnet and of the libraries that its numbers depend on, and optional libraries that are missing."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

try:
    __version__ = version("linnet")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def find_versions() -> dict[str, str]:
    """Versions of linnet, torch, numpy and Python, by name.

    >>> list(find_versions())
    ['linnet', 'torch', 'numpy', 'python']
    """
    return {
        "linnet": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


class MissingExtra(ModuleNotFoundError):
    """An optional library is not installed."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """For imports of an optional library: the error of a missing one names the extra of linnet that installs it.

    Args:
        extra: The extra in ``pip install 'linnet[extra]'``.
        what: What needs the library.

    >>> with needs_extra("demo", "linnet demo"):
    ...     import a_library_that_is_missing
    Traceback (most recent call last):
    linnet._common.versions.MissingExtra: linnet demo needs a_library_that_is_missing: pip install 'linnet[demo]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{what} needs {error.name}: pip install 'linnet[{extra}]'", name=error.name) from error
