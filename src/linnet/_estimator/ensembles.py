r"""Several networks as one estimator: a mixture of what its members say.

Each member is an estimator of its own, around one of the networks. With the weights :math:`w_k`, the mixture has the
mean and, by the law of total variance, the variance

.. math:: \mu = \sum_k w_k \mu_k, \qquad v = \sum_k w_k \left(v_k + (\mu_k - \mu)^2\right),

the averages of the members' probabilities, and the evidence :math:`\sum_k w_k Z_k`. A method of an estimator that has a
form for mixtures is decorated with `by_members`; `Mixture` has that form, for all estimators.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import check_samples, kind
from linnet._estimator import files
from linnet._estimator.dtypes import Dtypes
from linnet._estimator.inputs import check_inputs, convert_like
from linnet.network import check_module
from linnet.probability import Bernoulli, ClassBeliefs, Ordinal, UncertaintyScore, mix_beliefs, score_uncertainty

P = ParamSpec("P")
R = TypeVar("R")

KIND = "ensemble"
ESTIMATORS = ("TangentRegressor", "TangentClassifier", "Laplace")

COMMON = (
    *("n_features_in_", "feature_names_in_"),  # of the inputs
    *("classes_", "multilabel_", "_tensors"),  # of the labels
    *("_read", "_one_column", "_noise_each"),  # of the shapes
)
"""Attributes that all members have in common, so that the ensemble has them too."""


def is_ensemble(estimator: Any) -> bool:
    """Whether an estimator was given several networks."""
    return isinstance(estimator.model, list | tuple)


def members_of(estimator: Any) -> list[Any]:
    """The fitted estimators that predict together: those of an ensemble, or the one estimator itself."""
    return list(estimator.members_) if is_ensemble(estimator) else [estimator]


def by_members(method: Callable[P, R]) -> Callable[P, R]:
    """A method that `Mixture` answers in its place where the estimator has several networks."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        estimator, *rest = args
        if not is_ensemble(estimator):
            return method(*args, **kwargs)
        found: R = getattr(Mixture(estimator), method.__name__)(*rest, **kwargs)
        return found

    return call


class EnsembleMixin:
    """An estimator that takes a list of networks in the place of one.

    Attributes:
        members_: The fitted estimator of each network; for a list of networks alone.
        weights_: The weight of each member, (members,).

    Example:
        >>> from linnet import TangentRegressor
        >>> X = torch.linspace(-2, 2, 20)[:, None]
        >>> models = [nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)) for _ in range(3)]
        >>> reg = TangentRegressor(models).fit(X, torch.sin(2 * X[:, 0]))
        >>> mean, std = reg.predict(X, return_std=True)
        >>> mean.shape, len(reg.members_), reg.weights_.round(2)
        (torch.Size([20]), 3, array([0.33, 0.33, 0.33]))
    """

    model: Any
    weights: str | Sequence[float]
    members_: list[Any]
    weights_: np.ndarray

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An error that names the members, for attributes that only an estimator of one network has."""
            members = vars(self).get("members_")
            if members is None or not isinstance(vars(self).get("model"), list | tuple):
                return object.__getattribute__(self, name)  # raises what a property raised, such as "not fitted"
            raise AttributeError(
                f"This {type(self).__name__} is an ensemble of {len(members)} networks, which has no {name!r} of its "
                f"own. Ask one of its members: members_[0].{name}."
            )


@final
class Mixture:
    """What an estimator with several networks says, by its members.

    Args:
        estimator: The estimator. Its settings are those of the members; what is fitted is kept there.
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    # Fitting.

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, **given: Any) -> Any:
        """Fit each member to the same data."""
        estimator = self.estimator
        models = check_networks(estimator.model)
        check_weights(estimator.weights, len(models))
        settings = estimator.get_params(deep=False)
        if settings.get("relinearize"):
            raise NotImplementedError("relinearize= is for one network, not for an ensemble: use relinearize=0.")
        for name in [name for name in vars(estimator) if name.endswith("_")]:  # of an earlier fit, of one network
            delattr(estimator, name)
        members = [type(estimator)(**settings | {"model": model, "weights": "uniform"}) for model in models]
        check_outputs_agree(members, X)
        return self._keep([member.fit(X, y, sample_weight, **given) for member in members])

    def refit(self, *args: Any, **given: Any) -> Any:
        """An ensemble of the members, each of which has seen other data alone."""
        return self._of([member.refit(*args, **given) for member in self._fitted])

    def condition(self, *args: Any, **given: Any) -> Any:
        """An ensemble of the members, each of which has seen more data."""
        return self._of([member.condition(*args, **given) for member in self._fitted])

    def forget(self, *args: Any, **given: Any) -> Any:
        """An ensemble of the members, each of which goes on without some examples."""
        return self._of([member.forget(*args, **given) for member in self._fitted])

    def certificate_(self) -> tuple[Any, ...]:
        """The certificate of each member."""
        return tuple(member.certificate_ for member in self._fitted)

    def tune(self, *args: Any, **given: Any) -> Any:
        """Choose the scales of each member anew."""
        return self._keep([member.tune(*args, **given) for member in self._fitted])

    def log_evidence(self, *args: Any, **given: Any) -> float:
        """The log evidence of the mixture."""
        members = self._fitted
        prior = check_weights(self.estimator.weights, len(members))
        return mix_evidence([member.log_evidence(*args, **given) for member in members], prior)

    def _keep(self, members: list[Any]) -> Any:
        """Take over fitted members; returns the estimator."""
        estimator, first = self.estimator, members[0]
        found = [_evidence_of(member) for member in members]
        known = [value for value in found if value is not None]
        prior = check_weights(estimator.weights, len(members))
        estimator.members_, estimator.weights_ = members, prior
        estimator.log_evidence_ = mix_evidence(known, prior) if len(known) == len(found) else None
        if isinstance(estimator.weights, str) and estimator.weights == "evidence":
            if estimator.log_evidence_ is None:
                raise ValueError(
                    "weights='evidence' needs the log evidence of each member, which this solver does not give. Use "
                    "weights='uniform', inference='laplace', or a dense solver where it fits."
                )
            logs = np.array(known)
            shares = prior * np.exp(logs - logs.max())
            estimator.weights_ = shares / shares.sum()
        for name in COMMON:
            if name in vars(first):
                setattr(estimator, name, vars(first)[name])
        if hasattr(first, "noise_"):
            given = isinstance(first.noise_, float | np.ndarray)  # and not the setting itself
            estimator.noise_ = self._average([member.noise_ for member in members]) if given else first.noise_
        if hasattr(first, "likelihood_"):
            estimator.likelihood_ = first.likelihood_
        return estimator

    def _of(self, members: list[Any]) -> Any:
        """A new ensemble of fitted members."""
        given = self.estimator.get_params(deep=False)
        return Mixture(type(self.estimator)(**given))._keep(members)

    @property
    def _fitted(self) -> list[Any]:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self.estimator, "members_")
        return list(self.estimator.members_)

    # Predictions.

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, **given: Any) -> Any:
        """Mean, with the standard deviation or the covariance."""
        asked = {"return_std": return_std, "return_cov": return_cov}
        return self._moments("predict", X, {k: v for k, v in asked.items() if v} | given, cov=return_cov)

    def predict_mean(self, X: Any, return_std: bool = False, **given: Any) -> Any:
        """The mean of the targets, with its standard deviation."""
        return self._moments("predict_mean", X, given | {"return_std": return_std})

    def predict_logits(self, X: Any, *, return_std: bool = False) -> Any:
        """Mean of the logits, with their covariance (n, c, c) or standard deviation."""
        return self._moments("predict_logits", X, {"return_std": return_std}, cov=not return_std, each=True)

    def predict_proba(self, X: Any, *args: Any, **given: Any) -> Any:
        """The averages of the members' probabilities."""
        return self._average(self._ask("predict_proba", X, *args, **given))

    def _probabilities(self, X: Any) -> Any:
        return self._average(self._ask("_probabilities", X))

    def uncertainty(
        self, X: Any, score: UncertaintyScore | Sequence[UncertaintyScore] = "moderated_energy", *, draws: int = 1000
    ) -> Any:
        """How unsure the mixture is of each input."""
        parts = self._ask("_score_beliefs", X, score, draws)
        pairs = [(w, part) for w, part in zip(self.estimator.weights_, parts, strict=True) if part is not None]
        return convert_scores(X, score, mix_beliefs(*zip(*pairs, strict=True)))

    def decision_function(self, X: Any) -> Any:
        """Logits of the averaged probabilities; for classes in an order the mean of the output."""
        likelihood, several = self.estimator.likelihood_, self.estimator.multilabel_
        if isinstance(likelihood, Ordinal):
            return self._average(self._ask("decision_function", X))
        p = self._probabilities(X)
        if isinstance(likelihood, Bernoulli):
            return convert_like(X, torch.logit(p if several else p[:, 1]))
        return convert_like(X, p.log())

    def sample(self, X: Any, k: int = 1, *, seed: int | None = None, **given: Any) -> Any:
        """k joint samples, of the members in proportion to their weights."""
        check_samples(k)
        members = self._fitted
        generator = torch.Generator().manual_seed(self.estimator.seed if seed is None else seed)
        counts = share_draws(k, self.estimator.weights_, generator)
        seeds = torch.randint(2**62, (len(members),), generator=generator).tolist()
        order = torch.randperm(k, generator=generator)
        drawn = [
            member.sample(X, count, seed=s, **given)
            for member, count, s in zip(members, counts, seeds, strict=True)
            if count
        ]
        if isinstance(drawn[0], Tensor):
            return torch.cat(drawn)[order.to(drawn[0].device)]
        return np.concatenate(drawn)[order.numpy()]

    def loo_(self) -> Any:
        """Leave-one-out predictions, with the weights that all examples gave."""
        found, w = [member.loo_ for member in self._fitted], self.estimator.weights_
        mean, std = self._mix([one.mean for one in found], [one.std for one in found])
        with np.errstate(divide="ignore"):  # a weight may be zero
            scores = np.logaddexp.reduce([np.log(v) + one.log_score for v, one in zip(w, found, strict=True)])
        return type(found[0])(mean, std, scores)

    def influence(self, X: Any) -> Any:
        """The averages of the members' influences: the mean is the average of the members' means."""
        return self._average(self._ask("influence", X))

    def _ask(self, method: str, X: Any, *args: Any, **given: Any) -> list[Any]:
        """What the members of a weight say; None for the others, whose passes are saved."""
        pairs = zip(self._fitted, self.estimator.weights_, strict=True)
        return [getattr(member, method)(X, *args, **given) if w > 0 else None for member, w in pairs]

    def _moments(self, method: str, X: Any, given: Mapping[str, Any], *, cov: bool = False, each: bool = False) -> Any:
        """Mean and spread of a method that gives both; the mean alone where no spread is asked for.

        Args:
            method: Its name.
            X: Inputs.
            given: Its other arguments.
            cov: Whether the spread is a covariance, and not a standard deviation.
            each: Whether there is a covariance for each input, and not one for all.
        """
        found = self._ask(method, X, **given)
        pairs = [(None, None) if one is None else one if isinstance(one, tuple) else (one, None) for one in found]
        means, spreads = zip(*pairs, strict=True)
        if all(spread is None for spread in spreads):
            return self._average(means)
        if not cov:
            return self._mix(means, spreads)
        mean = self._average(means)
        total: list[Any] = []
        for m, C in zip(means, spreads, strict=True):
            if m is None:
                total.append(None)
                continue
            d = m - mean if each else (m - mean).reshape(-1)
            total.append(C + d[..., :, None] * d[..., None, :])
        return mean, self._average(total)

    def _mix(self, means: Sequence[Any], stds: Sequence[Any]) -> tuple[Any, Any]:
        """Mean and standard deviation by the law of total variance."""
        mean = self._average(means)
        pairs = zip(means, stds, strict=True)
        return mean, self._average([None if m is None else s**2 + (m - mean) ** 2 for m, s in pairs]) ** 0.5

    def _average(self, values: Sequence[Any]) -> Any:
        """The weighted sum, of numbers, arrays or tensors; those of members without weight may be None."""
        pairs = zip(self.estimator.weights_, values, strict=True)
        first, *rest = [float(w) * value for w, value in pairs if w > 0]
        return sum(rest, first)

    # Files.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all members to one file; tensors that all of them share are written once."""
        estimator, members = self.estimator, self._fitted
        parts = [files.pack(member) for member in members]
        first = parts[0][0]
        shared = [key for key in first if all(key in more and _same(first[key], more[key]) for more, _ in parts[1:])]
        tensors = {f"shared.{key}": first[key] for key in shared}
        for i, (own, _) in enumerate(parts):
            tensors |= {f"{i}.{key}": value for key, value in own.items() if key not in shared}
        weights = estimator.weights
        meta = {
            "estimator": type(estimator).__name__,
            "weights": weights if isinstance(weights, str) else [float(w) for w in weights],
            "members": [meta for _, meta in parts],
        }
        files.write(members[0].lin_, path, tensors, meta, kind=KIND)


def read(path: Any, tensors: dict[str, Tensor], meta: dict[str, Any], model: Any, **given: Any) -> Any:
    """The ensemble that `Mixture.save` wrote, as `linnet.load` asks for it."""
    count = len(meta["members"])
    if not isinstance(model, list | tuple) or len(model) != count:
        what = f"a list of {len(model)}" if isinstance(model, list | tuple) else kind(model)
        raise ValueError(f"{path} holds an ensemble of {count} networks, so load takes a list of as many; got {what}.")
    module = import_module(files.READERS[files.KINDS[meta["estimator"]]])
    shared = files.strip("shared.", tensors)
    members = [
        module.read(path, shared | files.strip(f"{i}.", tensors), meta["members"][i], model[i], **given)
        for i in range(count)
    ]
    settings = members[0].get_params(deep=False) | {"model": model, "weights": meta["weights"]}
    return Mixture(type(members[0])(**settings))._keep(members)


# Checks.


def check_networks(models: Any) -> list[nn.Module]:
    """The networks of an ensemble; raises where there are none, or where one of them is something else."""
    if len(models) == 0:
        raise ValueError("The list of networks is empty. Give the trained networks, as in [first, second], or one.")
    for i, model in enumerate(models):
        if isinstance(model, Mapping):
            raise TypeError(
                f"Entry {i} of the networks is {kind(model)}, such as a state dict. An ensemble takes modules: make a "
                "copy.deepcopy of the network for each checkpoint, and load the checkpoint with load_state_dict."
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"An ensemble takes a list of torch.nn.Modules; entry {i} is {kind(model)}.")
    return [check_module(model) for model in models]


def check_weights(weights: Any, count: int) -> np.ndarray:
    """The weights of the members before any data, (members,), which add up to one.

    >>> check_weights([1, 3], 2), check_weights("evidence", 2)
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    if isinstance(weights, str):
        if weights not in ("uniform", "evidence"):
            raise ValueError(f"weights must be 'uniform', 'evidence' or a weight for each network; got {weights!r}.")
        return np.full(count, 1 / count)
    found = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights, dtype=float)
    if found.shape != (count,):
        raise ValueError(f"There are {count} networks, so weights needs a weight for each; got shape {found.shape}.")
    if not np.isfinite(found).all() or (found < 0).any() or found.sum() == 0:
        raise ValueError(f"weights must not be negative, infinite or all zero; got {found.tolist()}.")
    return found / found.sum()


def check_outputs_agree(members: Sequence[Any], X: Any) -> None:
    """Raise where the networks have different numbers of outputs; a few examples tell."""
    counts = []
    for member in members:
        inputs = check_inputs(member, X, reset=True)
        member._attach(member.model, Dtypes(None, torch.float64))
        counts.append(member._jacobian(inputs).c)
    if len(set(counts)) > 1:
        raise ValueError(
            f"The networks of an ensemble need the same outputs; these have {', '.join(map(str, counts))} outputs. "
            "Choose outputs with output=, or give the networks heads of one size (linnet.attach_head)."
        )


# Numbers.


def convert_scores(X: Any, score: UncertaintyScore | Sequence[UncertaintyScore], beliefs: ClassBeliefs) -> Any:
    """One score, or a dict of several, in the form of the inputs X."""
    if isinstance(score, str):
        return convert_like(X, score_uncertainty(score, beliefs))
    return {name: convert_like(X, score_uncertainty(name, beliefs)) for name in score}


def mix_evidence(logs: Sequence[float], weights: Sequence[float] | np.ndarray) -> float:
    """The log of the weighted sum of evidences, from their logs.

    >>> round(mix_evidence([-1000.0, -1000.0], [0.5, 0.5]), 6)
    -1000.0
    """
    top = max(logs)
    return top + math.log(sum(w * math.exp(value - top) for value, w in zip(logs, weights, strict=True) if w > 0))


def share_draws(k: int, weights: np.ndarray, generator: torch.Generator) -> list[int]:
    """How many of k draws each member has: k times its weight on average, and never one more or less than that.

    >>> share_draws(10, np.array([0.5, 0.3, 0.2]), torch.Generator().manual_seed(0))
    [5, 3, 2]
    """
    ends = np.cumsum(weights)
    places = (np.arange(k) + float(torch.rand((), generator=generator, dtype=torch.float64))) / k
    member = np.searchsorted(ends / ends[-1], places, side="right")
    return np.bincount(member, minlength=len(weights)).tolist()


def _evidence_of(member: Any) -> float | None:
    found = getattr(member, "log_evidence", None)
    value = found() if callable(found) else member.log_evidence_
    return None if value is None else float(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
