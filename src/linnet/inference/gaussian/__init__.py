"""Conditioning on observations with Gaussian noise: by dense factors, by conjugate gradients, and with later data."""

from linnet.inference.gaussian.closed_form import check_conditioning, condition
from linnet.inference.gaussian.updates import estimate_rounding, extend, flow, precisions, smoother

__all__ = [
    "check_conditioning",
    "condition",
    "estimate_rounding",
    "extend",
    "flow",
    "precisions",
    "smoother",
]
