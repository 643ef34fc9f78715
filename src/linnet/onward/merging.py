r"""Posteriors of one network that saw different data, multiplied.

Each of k estimators holds a prior times the likelihood of its own data. The product of the posteriors holds the prior k
times, and so the prior is divided out k - 1 times:

.. math:: P = \sum_i P_i - (k - 1) A, \qquad P \mu = \sum_i P_i \mu_i - (k - 1) A \mu_0

with posteriors :math:`N(\mu_i, P_i^{-1})` and the shared prior :math:`N(\mu_0, A^{-1})`. For Gaussian noise and one
linear model the result is the posterior of all data together. The same terms give the evidence of all data,

.. math:: \log Z = \sum_i \log Z_i + \tfrac12 \Big(\sum_i \log\det P_i - (k - 1) \log\det A - \log\det P
          - \sum_i \mu_i^\top P_i \mu_i + (k - 1) \mu_0^\top A \mu_0 + \mu^\top P \mu\Big) .

Posteriors with Kronecker factors have no exact sum in that form. Their mean comes from the exact sum of the precisions,
by conjugate gradients over the parameters alone; the precision of the result is the approximation of
`linnet.probability.common_coordinates`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linnet._common import kind
from linnet._estimator import files as saved
from linnet._estimator import is_ensemble
from linnet.laplace import Laplace
from linnet.linalg import cg
from linnet.network import select
from linnet.probability import (
    DensePrecision,
    DiagonalPrecision,
    EarlierPosterior,
    Posterior,
    Precision,
    WeightPosterior,
    add_precisions,
    describe_likelihood,
    precision_of,
)
from linnet.tangent import TangentClassifier, TangentGLM, TangentRegressor


class GaussianProduct(NamedTuple):
    """A product of Gaussians.

    Attributes:
        mean: (p,).
        precision: P.
        log_overlap: The logarithm of its integral.
    """

    mean: Tensor
    precision: Precision
    log_overlap: float


def merge(estimators: Sequence[Any]) -> Any:
    """One estimator from several that saw different data: their posteriors multiplied, the shared prior divided out.

    The result predicts as if one estimator had seen all data; no data are needed, so that estimators may come from
    files of several sites. The result holds posterior and settings, and no data: no inputs, no targets, no example of
    the network's outputs. ``merge([estimator])`` is the same estimator without its data, as a file to send.

    `linnet.TangentRegressor`, `linnet.TangentClassifier` and `linnet.TangentGLM` are merged around the same weights.
    Each `linnet.Laplace` is around the weights of its own network; the networks have one architecture and went on from
    the same weights. The result is around a new network with the precision-weighted average of their weights, which is
    ``merged.model``. With equal precisions this is the plain average of the weights.

    All estimators need the same prior, which the result has once: ``prior=`` as a number, by layer, or for `Laplace`
    the same earlier posterior. A prior whose scale the evidence of each site chooses is another one for each site.

    Args:
        estimators: Fitted estimators of one class.

    Returns:
        An estimator of the same class. Its evidence is that of all data. What needs training data (``tune``, ``loo_``)
        raises.

    Example:
        >>> X, y = torch.randn(40, 3), torch.randn(40)
        >>> model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        >>> how = {"prior": 0.1, "noise": 0.5, "mean": "network", "solver": "weight"}
        >>> a, b = (TangentRegressor(model, **how).fit(X[i::2], y[i::2]) for i in range(2))
        >>> both = TangentRegressor(model, **how).fit(X, y)
        >>> torch.allclose(merge([a, b]).predict(X), both.predict(X))
        True
    """
    found = list(estimators) if isinstance(estimators, Sequence) else []
    if not found:
        raise ValueError(f"merge takes a list of fitted estimators; got {kind(estimators)}.")
    _check_kinds(found)
    return _merge_laplace(found) if isinstance(found[0], Laplace) else _merge_tangent(found)


def _check_kinds(found: Sequence[Any]) -> None:
    from sklearn.utils.validation import check_is_fitted

    kinds = {type(one) for one in found}
    if len(kinds) > 1 or not kinds <= {Laplace, TangentRegressor, TangentClassifier, TangentGLM}:
        raise TypeError(
            "merge takes estimators of one class: Laplace, TangentRegressor, TangentClassifier or TangentGLM; got "
            f"{', '.join(sorted(one.__name__ for one in kinds))}."
        )
    for i, one in enumerate(found):
        check_is_fitted(one)
        if is_ensemble(one):
            raise NotImplementedError(
                f"Estimator {i} is an ensemble, a mixture of Gaussians. Merge its members_ one by one: the first of "
                "each site, the second of each, and so on."
            )


def multiply(
    means: Sequence[Tensor], precisions: Sequence[Precision], prior: tuple[Tensor, Precision]
) -> GaussianProduct:
    """The product of Gaussians that share a prior, which is divided out of all but one.

    Args:
        means: Each (p,).
        precisions: Of each.
        prior: Mean and precision of the prior.
    """
    more = len(means) - 1
    terms: list[tuple[float, Precision]] = [
        *((1.0, P) for P in precisions),
        *(((-float(more), prior[1]),) if more else ()),
    ]
    P = add_precisions(terms)
    P.check_definite()
    # Around the average: far from zero, sums of quadratics would round.
    center = torch.stack(list(means)).mean(0)
    shifts = [*(mean - center for mean in means), *((prior[0] - center,) if more else ())]
    pulls = [w * Q.multiply(shift) for (w, Q), shift in zip(terms, shifts, strict=True)]
    pull = torch.stack(pulls).sum(0)
    step = P.solve(pull)
    if isinstance(P, DiagonalPrecision) and P.rotation is not None and more:
        tolerance = 1e3 * torch.finfo(pull.dtype).eps
        solution = cg(lambda V: _product(terms, V), pull[:, None], preconditioner=_Columns(P), tolerance=tolerance)
        step = solution.checked("the mean of a product of Gaussians with Kronecker factors").value[:, 0]
    inner = sum(float(shift @ part) for shift, part in zip(shifts, pulls, strict=True)) - float(step @ pull)
    log_dets = sum(w * Q.log_det() for w, Q in terms) - P.log_det()
    return GaussianProduct(center + step, P, 0.5 * (log_dets - inner))


def _product(terms: Sequence[tuple[float, Precision]], V: Tensor) -> Tensor:
    return torch.stack([sum_of(w * Q.multiply(v) for w, Q in terms) for v in V.T], 1)


def sum_of(parts: Any) -> Tensor:
    """The sum of tensors of one shape."""
    return torch.stack(list(parts)).sum(0)


class _Columns:
    """A precision as a preconditioner."""

    def __init__(self, P: Precision) -> None:
        self.P = P

    def solve(self, R: Tensor) -> Tensor:
        """``P^-1 R``."""
        return torch.stack([self.P.solve(r) for r in R.T], 1)


# What has to be the same.


def _check_layouts(found: Sequence[Any]) -> None:
    first = found[0].lin_.layout
    for i, one in enumerate(found):
        if one.lin_.layout != first:
            ours, theirs = first.shapes, one.lin_.layout.shapes
            differ = sorted(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))[:5]
            raise ValueError(
                f"Estimators 0 and {i} are posteriors over other parameters: they differ in "
                f"{', '.join(differ) or 'the order of the parameters'}. Fit all with the same architecture and params=."
            )


def _check_features(found: Sequence[Any]) -> None:
    states = [{} if one._features is None else one._features.state_dict() for one in found]
    for i, state in enumerate(states):
        same = state.keys() == states[0].keys() and all(torch.equal(t, states[0][key]) for key, t in state.items())
        if not same:
            raise ValueError(
                f"Estimators 0 and {i} have other features of the inputs (inputs_), which come from the data of each. "
                "Fit all with inputs=False."
            )


def _check_variances(found: Sequence[Any]) -> None:
    first = found[0].prior_variance_
    eps = torch.finfo(first.dtype).eps
    for i, one in enumerate(found):
        other = one.prior_variance_.to(first)
        if not torch.allclose(other, first, rtol=64 * eps, atol=0.0):
            a, b = (t.min().item() for t in (first, other))
            raise ValueError(
                f"Estimators 0 and {i} have other priors: their smallest prior variances are {a:.4g} and {b:.4g}. A "
                f"product of posteriors holds one shared prior. Fit all with the same prior=, a number or a variance "
                f"for each layer; prior={found[0].prior!r} may be another one for other data."
            )


def _check_likelihoods(described: Sequence[Any]) -> None:
    for i, one in enumerate(described):
        if one != described[0]:
            raise ValueError(
                f"Estimators 0 and {i} have other likelihoods: {described[0]} and {one}. Fit all with the same one; "
                "give noise= as a number."
            )


# Estimators around one set of weights.


def _merge_tangent(found: Sequence[Any]) -> Any:
    for one in found:
        one._check_own_weights("merge")
    _check_features(found)
    _check_layouts(found)
    bases = [None if one.model is None else saved.base_of(one) for one in found]
    for i, base in enumerate(bases):
        if base is None or base != bases[0]:
            raise ValueError(
                f"Estimators 0 and {i} are around other weights: their networks have the checksums {bases[0]} and "
                f"{base}. Give all sites the same trained network, as model=."
            )
    first = found[0]
    for i, one in enumerate(found):
        if one.mean_ != first.mean_:
            raise ValueError(
                f"Estimators 0 and {i} have the mean functions {first.mean_!r} and {one.mean_!r}. Fit all with the "
                "same mean=, 'network' or 'zero'."
            )
        if one._source is not None:
            raise NotImplementedError(
                f"Estimator {i} has seen source data, which would count once for each estimator. Fit without source=, "
                "and merge with an estimator of the source data."
            )
        if getattr(one, "averaged_", False):
            raise ValueError(
                f"Estimator {i} is an average over prior scales and noises, and not one prior times one likelihood. "
                "Fit with average=False, or give prior= and noise= as numbers."
            )
    _check_variances(found)
    described: list[Any] = []
    for one in found:
        if isinstance(one, TangentRegressor):
            described.append(f"noise={one.noise_}")
        elif isinstance(one, TangentClassifier):
            described.append((describe_likelihood(one.likelihood_), f"classes {one.classes_.tolist()}"))
        else:
            described.append(describe_likelihood(one.likelihood_))
    _check_likelihoods(described)
    S = first.prior_variance_
    precisions = [precision_of(one.posterior_, memory=one.memory) for one in found]
    prior = torch.zeros_like(S), DiagonalPrecision(1 / S)
    product = multiply([one.posterior_.delta.to(S) for one in found], _on_device(precisions, S), prior)
    known = [one.log_evidence_ for one in found]
    evidence = None if None in known else sum(known) + product.log_overlap
    return first._without_examples(_posterior_of(product, S), evidence)


def _posterior_of(product: GaussianProduct, S: Tensor) -> Posterior:
    """The posterior of a product, in the form that takes more observations where there is one."""
    P = product.precision
    if not isinstance(P, DensePrecision):
        return P.posterior(product.mean)
    return WeightPosterior(S, product.mean, factor=S.sqrt()[:, None] * P.factor)


def _on_device(precisions: Sequence[Precision], like: Tensor) -> list[Precision]:
    """Precisions on one device and in one dtype."""
    return [P.to(like) for P in precisions]


# Approximations around networks of their own.


def _merge_laplace(found: Sequence[Laplace]) -> Laplace:
    _check_layouts(found)
    first = found[0]
    _check_other_weights(found)
    _check_likelihoods([_describe(one) for one in found])
    _check_labels(found)
    theta = first.theta_
    means = [(one.theta_ + one.posterior_.delta).to(theta) for one in found]
    precisions = _on_device([precision_of(one.posterior_, memory=one.memory) for one in found], theta)
    product = multiply(means, precisions, _shared_prior(found))
    network = copy.deepcopy(first.lin_.given)
    moved = first.lin_.layout.unflatten(product.mean)
    with torch.no_grad():
        for name, parameter in select(network, list(first.lin_.theta)).items():
            parameter.copy_(moved[name])
    evidence = sum(one.log_evidence() for one in found) + product.log_overlap
    posterior = product.precision.posterior(torch.zeros_like(product.mean))
    return first._without_examples(network, posterior, evidence)


def _describe(la: Laplace) -> Any:
    noise = "" if la.noise_ is None else f"noise={la.noise_}"
    settings = describe_likelihood(la._predictive.inner)
    return settings["name"], "" if noise else settings["settings"], noise


def _check_labels(found: Sequence[Laplace]) -> None:
    labels = [one.classes_.tolist() if hasattr(one, "classes_") else None for one in found]
    for i, one in enumerate(labels):
        if one != labels[0]:
            raise ValueError(
                f"Estimators 0 and {i} have other labels for the same outputs: {labels[0]} and {one}. Give all sites "
                "the same classes=."
            )


def _shared_prior(found: Sequence[Laplace]) -> tuple[Tensor, Precision]:
    first = found[0]
    earlier = [one._earlier for one in found]
    theta = first.theta_
    if all(one is None for one in earlier):
        _check_variances(found)
        return torch.zeros_like(theta), DiagonalPrecision(1 / first.prior_variance_)
    a = earlier[0]
    for i, b in enumerate(earlier):
        if a is None or b is None or not _equal(a, b):
            raise ValueError(
                f"Estimators 0 and {i} have other priors: both need the same earlier posterior as prior=. Fit it once, "
                "and give it to all sites."
            )
    _check_variances(found)
    assert a is not None
    factor = float((first.prior_variance_ / a.base).max())  # of `Laplace.tune`
    return a.mean, add_precisions([(1 / factor, a.precision)])


def _equal(a: EarlierPosterior, b: EarlierPosterior) -> bool:
    ours, theirs = ({"mean": one.mean, **one.precision.tensors()} for one in (a, b))
    return ours.keys() == theirs.keys() and all(
        t.shape == theirs[name].shape and torch.equal(t, theirs[name].to(t)) for name, t in ours.items()
    )


def _check_other_weights(found: Sequence[Laplace]) -> None:
    """Raise unless all parameters and buffers that are not random are the same."""
    first = _fixed(found[0])
    for i, one in enumerate(found):
        one.lin_.check_unchanged(contents=True)
        other = _fixed(one)
        differ = [n for n in {**first, **other} if n not in first or n not in other or not _same(first[n], other[n])]
        if differ:
            raise ValueError(
                f"The networks of estimators 0 and {i} have other weights outside the parameters of the posterior: "
                f"{', '.join(sorted(differ)[:5])}. Train with these frozen (batch norm in evaluation mode), or take "
                "them into params=."
            )


def _fixed(la: Laplace) -> dict[str, Tensor]:
    model: nn.Module = la.lin_.given
    chosen = {id(t) for t in select(model, list(la.lin_.theta)).values()}
    parameters = {name: t for name, t in model.named_parameters() if id(t) not in chosen}
    return {**parameters, **dict(model.named_buffers())}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b.to(a))
