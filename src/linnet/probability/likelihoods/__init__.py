r"""How targets y depend on the outputs f of a network: log density and its derivatives in f.

A `Likelihood` gives :math:`\log p(y \mid f)` for each example, its gradient in f (the residual), and the curvature
:math:`B`, positive semi-definite: the Fisher information (``curvature``), which depends on f alone, and minus the
second derivative for the targets that were observed (``observed_curvature``), which is the same for all but counts with
dispersion, ordered classes and censored times. For `Heteroscedastic` both are the Fisher information. ``B = L L^T``
with a root L. Both are diagonal for all but `Categorical`, and then stored as (n, c).

Every function of f takes (n, c), or more axes in front. `linnet.probability.expectations` has the averages over
Gaussian f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from linnet.probability.likelihoods.base import Device, ExponentialMean, Likelihood, as_continuous, standard_normal
from linnet.probability.likelihoods.classes import Bernoulli, Categorical, Ordinal, laplacian
from linnet.probability.likelihoods.counts import NegativeBinomial, Poisson
from linnet.probability.likelihoods.numbers import Gaussian, Heteroscedastic, KnownNoise, as_variances
from linnet.probability.likelihoods.times import Weibull
from linnet.probability.likelihoods.weighted import Weighted, as_weights, without_weights

__all__ = [
    "LIKELIHOODS",
    "NAMES",
    "Bernoulli",
    "Categorical",
    "Device",
    "ExponentialMean",
    "Gaussian",
    "Heteroscedastic",
    "KnownNoise",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "Weibull",
    "Weighted",
    "as_continuous",
    "as_variances",
    "as_weights",
    "describe_likelihood",
    "laplacian",
    "likelihood_for",
    "restore_likelihood",
    "standard_normal",
    "without_weights",
]

LIKELIHOODS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Gaussian,
        Heteroscedastic,
        KnownNoise,
        Bernoulli,
        Categorical,
        Ordinal,
        Poisson,
        NegativeBinomial,
        Weibull,
    )
}
"""Likelihoods by the names that files have for them."""

_SIMPLE: dict[str, type[Any]] = {
    "heteroscedastic": Heteroscedastic,
    "ordinal": Ordinal,
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "weibull": Weibull,
}

NAMES = ("classification", "regression", *_SIMPLE)
"""Names that users may write for a likelihood."""


def likelihood_for(
    name: str | Likelihood, targets: Tensor | np.ndarray, outputs: Sequence[int], *, noise: float | Tensor = 1.0
) -> Likelihood:
    """The likelihood that a user's name stands for.

    "regression" is `Gaussian`. "classification" is `Bernoulli` for one output, and for several outputs with a target
    for each of them, labels that are on or off; else it is `Categorical`. "ordinal", "negative-binomial" and "weibull"
    have parameters that `Likelihood.fitted` finds.

    Args:
        name: One of `NAMES`, or a likelihood, which is returned as it is.
        targets: Their number of axes tells whether there is a target for each output.
        outputs: Shape of the output of an example, (c,) or (c, *sites).
        noise: Variance of "regression".

    >>> import torch
    >>> [likelihood_for("classification", torch.zeros(shape), (3,)) for shape in ((5,), (5, 3))]
    [Categorical(), Bernoulli()]
    """
    if isinstance(name, Likelihood):
        return name
    if name not in NAMES:
        raise ValueError(
            f"likelihood must be one of {', '.join(map(repr, NAMES))} or a linnet.likelihoods.Likelihood; got {name!r}."
        )
    if name == "regression":
        return Gaussian(noise)
    if name in _SIMPLE:
        return _SIMPLE[name]()
    return Bernoulli() if outputs[0] == 1 or targets.ndim == 1 + len(outputs) else Categorical()


# Files.


def describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """What a file holds of a likelihood: its name, its settings, and whether the class is a user's own."""
    name = type(likelihood).__name__
    return {"name": name, "settings": likelihood.settings(), "own": LIKELIHOODS.get(name) is not type(likelihood)}


def restore_likelihood(path: Any, found: dict[str, Any], given: Any = None) -> Likelihood:
    """The likelihood that a file describes.

    Args:
        path: The file, for errors.
        found: What `describe_likelihood` wrote.
        given: The class of a user's own likelihood, or such a likelihood itself; None for linnet's own.
    """
    name = found["name"]
    if not found["own"]:
        if given is not None:
            raise ValueError(f"{path} was fitted with linnet's own {name}; load it without likelihood=.")
        return LIKELIHOODS[name](**found["settings"])
    if given is None:
        raise ValueError(
            f"{path} was fitted with {name}, a likelihood of your own, and a file does not hold its code. Pass the "
            f"class: linnet.load(path, model, likelihood={name})."
        )
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Likelihood) or kind.__name__ != name:
        raise ValueError(f"{path} was fitted with the likelihood {name}; got likelihood={given!r}.")
    if not isinstance(given, type):
        return given
    try:
        return kind(**found["settings"])
    except TypeError as error:
        raise TypeError(
            f"{name} cannot be made from the settings of {path}, {found['settings']} ({error}). Give the class a "
            "method settings() that returns the arguments of its constructor, or pass the likelihood itself as "
            "likelihood=."
        ) from error
