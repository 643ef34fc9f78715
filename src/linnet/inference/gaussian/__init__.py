"""Gaussian noise: conditioning by dense factors or conjugate gradients, with later data, and without earlier data."""

from linnet.inference.gaussian.closed_form import check_conditioning, condition
from linnet.inference.gaussian.solved_updates import extend_by_solves, reduce_by_solves
from linnet.inference.gaussian.updates import estimate_rounding, extend, flow, precisions, reduce, smoother

__all__ = [
    "check_conditioning",
    "condition",
    "estimate_rounding",
    "extend",
    "extend_by_solves",
    "flow",
    "precisions",
    "reduce",
    "reduce_by_solves",
    "smoother",
]
