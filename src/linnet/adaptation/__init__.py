"""`adapt`: several ways to adapt a network, compared on examples that are held out, and the best of them fitted."""

from linnet.adaptation.choice import Trial, adapt

__all__ = ["Trial", "adapt"]
