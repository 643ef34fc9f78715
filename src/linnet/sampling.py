"""Samples of the posterior of all parameters of a network as it stands."""

from linnet.inference import Samples, choose_space, effective_dimension, posterior_samples

__all__ = [
    "Samples",
    "choose_space",
    "effective_dimension",
    "posterior_samples",
]
