"""What all estimators share: inputs, files, the hub."""

from linnet._estimator import behavior, files
from linnet._estimator.behavior import draw_inputs
from linnet._estimator.files import load
from linnet._estimator.hub import HubMixin
from linnet._estimator.inputs import (
    as_targets,
    check_inputs,
    default_network,
    has_fast_float64,
    has_targets_in_memory,
    like,
    list_options,
)
from linnet._estimator.linearity import Linearity
from linnet._estimator.optimizer_steps import epoch, shuffled

__all__ = [
    "HubMixin",
    "Linearity",
    "as_targets",
    "behavior",
    "check_inputs",
    "default_network",
    "draw_inputs",
    "epoch",
    "files",
    "has_fast_float64",
    "has_targets_in_memory",
    "like",
    "list_options",
    "load",
    "shuffled",
]
