"""What goes on from a fitted estimator: labels to ask for next, data that made a prediction, posteriors merged."""

from linnet.onward.influence import Ranking, attribution
from linnet.onward.merging import merge
from linnet.onward.selection import Selection, select

__all__ = ["Ranking", "Selection", "attribution", "merge", "select"]
