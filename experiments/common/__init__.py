"""What the experiments share: where data and results lie, scores, figures, the table of results."""

from experiments.common.results import *  # noqa: F403
from experiments.common.results import line_of as line_of
