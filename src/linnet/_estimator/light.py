"""Importing this imports scikit-learn's base without SciPy's statistics, for what has to start quickly.

scikit-learn imports ``scipy.stats`` at once and calls it in few places, and it takes as long as all else that linnet
needs of both. So while ``sklearn.base`` is imported something stands in its place that imports it when it is first
asked for anything. Afterwards the place is empty again, and whoever imports ``scipy.stats`` gets it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

STATISTICS = "scipy.stats"


class _Later(ModuleType):
    """In place of a module that is imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


if "sklearn" not in sys.modules and STATISTICS not in sys.modules:
    later = sys.modules[STATISTICS] = _Later(STATISTICS)
    try:
        import_module("sklearn.base")
    finally:
        if sys.modules.get(STATISTICS) is later:
            del sys.modules[STATISTICS]
