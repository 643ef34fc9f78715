"""`adapt`: several ways to adapt a network, compared on examples that are held out, and the best of them fitted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet.adaptation.choice import Trial, adapt

__all__ = ["Trial", "adapt"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("linnet.adaptation.choice"), name)
