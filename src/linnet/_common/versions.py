"""Versions of linnet and of the libraries that its numbers depend on."""

from __future__ import annotations

import platform
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
