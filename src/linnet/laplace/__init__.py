"""Door 2: `Laplace`, error bars for a network as it stands, and `train_with_evidence`."""

from linnet.laplace.estimator import Laplace
from linnet.laplace.forgetting import codes_of, codes_of_examples
from linnet.laplace.penalty import QuadraticPenalty
from linnet.laplace.predictive import Predictive, draw_groups, joint_log_likelihood
from linnet.laplace.training import train_with_evidence

__all__ = [
    "Laplace",
    "Predictive",
    "QuadraticPenalty",
    "codes_of",
    "codes_of_examples",
    "draw_groups",
    "joint_log_likelihood",
    "train_with_evidence",
]
