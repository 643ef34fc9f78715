"""Likelihoods of the targets given the outputs of a network."""

from linnet.probability import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Heteroscedastic", "Likelihood"]
