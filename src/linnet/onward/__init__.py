"""What goes on from a fitted estimator: labels to ask for next, posteriors merged."""

from linnet.onward.merging import merge
from linnet.onward.selection import Selection, select

__all__ = ["Selection", "merge", "select"]
