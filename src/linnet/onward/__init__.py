"""What goes on from a fitted estimator: which labels to ask for next."""

from linnet.onward.selection import Selection, select

__all__ = ["Selection", "select"]
