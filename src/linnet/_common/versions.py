"""What a result was made with."""

from __future__ import annotations

import platform

import numpy as np
import torch

from linnet import __version__


def versions() -> dict[str, str]:
    """Of linnet and of what its numbers depend on most.

    >>> list(versions())
    ['linnet', 'torch', 'numpy', 'python']
    """
    return {
        "linnet": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
