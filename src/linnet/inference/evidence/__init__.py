"""The evidence of a linear model, and the one search for the prior scales and the noise that maximize it."""

from linnet.inference.evidence.gaussian import LOG_2PI, Choice
from linnet.inference.evidence.laplace import add_kernels, choose_layer_scales, choose_scale, scale_slopes, unit_scale
from linnet.inference.evidence.log_determinants import Cost, Coupled, Dense, LogDet, Separable, eigenvalues_of
from linnet.inference.evidence.search import Maximum, Slope, maximize

__all__ = [
    "LOG_2PI",
    "Choice",
    "Cost",
    "Coupled",
    "Dense",
    "LogDet",
    "Maximum",
    "Separable",
    "Slope",
    "add_kernels",
    "choose_layer_scales",
    "choose_scale",
    "eigenvalues_of",
    "maximize",
    "scale_slopes",
    "unit_scale",
]
