"""Likelihoods of the targets given the outputs of a network."""

from linnet.probability import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    Weibull,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Weibull",
]
