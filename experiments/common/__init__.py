"""What the experiments share: results and their table, statistics, data, networks, training, Gaussian processes."""

from experiments.common.results import *  # noqa: F403
