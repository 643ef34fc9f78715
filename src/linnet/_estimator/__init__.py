"""What all estimators share: inputs, files, the hub."""

from linnet._estimator import behavior, files
from linnet._estimator.behavior import drawn_inputs
from linnet._estimator.files import load
from linnet._estimator.hub import HubMixin
from linnet._estimator.inputs import (
    as_targets,
    at_hand,
    checked_inputs,
    default_network,
    fast_float64,
    like,
    plain_options,
)
from linnet._estimator.linearity import Linearity
from linnet._estimator.optimizer_steps import epoch, shuffled

__all__ = [
    "HubMixin",
    "Linearity",
    "as_targets",
    "at_hand",
    "behavior",
    "checked_inputs",
    "default_network",
    "drawn_inputs",
    "epoch",
    "fast_float64",
    "files",
    "like",
    "load",
    "plain_options",
    "shuffled",
]
