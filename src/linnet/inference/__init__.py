"""Data, prior and likelihood to posterior and evidence."""

from linnet.inference.any_likelihood import Inference, InferenceOptions, ModeFit, Observations
from linnet.inference.certificate import (
    CHOSEN,
    FEATURES,
    HEAD,
    STANDARD,
    TRAINED,
    Certificate,
    bound_distance,
    bound_rounding,
)
from linnet.inference.evidence.gaussian import LOG_2PI, Choice
from linnet.inference.evidence.laplace import add_kernels, scale_slopes
from linnet.inference.evidence.log_determinants import Cost, Coupled, Dense, LogDet, Separable, eigenvalues_of
from linnet.inference.evidence.search import Slope, maximize
from linnet.inference.gaussian.iterative import keeps_kernel_in_parts
from linnet.inference.mode.adam import Training, check_only_map
from linnet.inference.mode.by_passes import mode_by_passes
from linnet.inference.mode.newton import Mode
from linnet.inference.problem import (
    Average,
    Fit,
    Noise,
    SolverSettings,
    Task,
    check_covariance_fits,
    check_outputs_fit,
    choose_likelihood_solver,
    choose_solver,
    searches_all_features,
)
from linnet.inference.samples import Samples, choose_space, effective_dimension, posterior_samples, solve_posterior

__all__ = [
    "CHOSEN",
    "FEATURES",
    "HEAD",
    "LOG_2PI",
    "STANDARD",
    "TRAINED",
    "Average",
    "Certificate",
    "Choice",
    "Cost",
    "Coupled",
    "Dense",
    "Fit",
    "Inference",
    "InferenceOptions",
    "LogDet",
    "Mode",
    "ModeFit",
    "Noise",
    "Observations",
    "Samples",
    "Separable",
    "Slope",
    "SolverSettings",
    "Task",
    "Training",
    "add_kernels",
    "bound_distance",
    "bound_rounding",
    "check_covariance_fits",
    "check_only_map",
    "check_outputs_fit",
    "choose_likelihood_solver",
    "choose_solver",
    "choose_space",
    "effective_dimension",
    "eigenvalues_of",
    "keeps_kernel_in_parts",
    "maximize",
    "mode_by_passes",
    "posterior_samples",
    "scale_slopes",
    "searches_all_features",
    "solve_posterior",
]
