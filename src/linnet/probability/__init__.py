"""Likelihoods and their expectations, priors, and posteriors of one form: R D R^T + T diag(s) T^T."""

from linnet.probability.expectations import Expected, expected, predictive
from linnet.probability.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    likelihood_for,
)
from linnet.probability.per_site import Sites
from linnet.probability.posteriors import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    PointPosterior,
    Posterior,
    PredictiveMoments,
    SamplePosterior,
    Spread,
    SubnetworkPosterior,
    TurnedPosterior,
    WeightPosterior,
    posterior_from,
)
from linnet.probability.priors import Prior, PriorSpec, check_prior, layer_sums, make_prior, ntk_variances

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "DiagonalPosterior",
    "Expected",
    "FunctionPosterior",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "LowRankPosterior",
    "PointPosterior",
    "Posterior",
    "PredictiveMoments",
    "Prior",
    "PriorSpec",
    "SamplePosterior",
    "Sites",
    "Spread",
    "SubnetworkPosterior",
    "TurnedPosterior",
    "WeightPosterior",
    "check_prior",
    "expected",
    "layer_sums",
    "likelihood_for",
    "make_prior",
    "ntk_variances",
    "posterior_from",
    "predictive",
]
