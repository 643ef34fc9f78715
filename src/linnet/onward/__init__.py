"""What goes on from a fitted estimator: which labels to ask for next, and which data made a prediction."""

from linnet.onward.influence import Ranking, attribution
from linnet.onward.selection import Selection, select

__all__ = ["Ranking", "Selection", "attribution", "select"]
