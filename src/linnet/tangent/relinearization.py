r"""Gauss-Newton beyond the tangent: the network is linearized again around the adapted weights.

The prior of the weights stays :math:`N(\theta_0, S)`, centered at the weights of the given network. Around weights
:math:`\theta_k` the network is :math:`f(\theta_k) + J_k (\theta - \theta_k)`, so that the displacement from
:math:`\theta_0` has the prior :math:`N(0, S)` and the mean function
:math:`f(\theta_k) - J_k (\theta_k - \theta_0)`. Each linearization is thus a tangent fit with another mean function. A
step goes from :math:`\theta_k` towards the mode of this fit, and is halved until the true objective falls:

.. math:: -\log p(y \mid f(\theta)) + \tfrac12 (\theta - \theta_0)^\top S^{-1} (\theta - \theta_0) .

The prior's scales and the noise are those of the largest evidence of each linearization; given as numbers, they stay,
and all steps lower one objective. The judge is this evidence: a step whose evidence does not grow is not taken, and
ends the search.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linnet.network import check_whole, select

if TYPE_CHECKING:
    from linnet.probability import Prior
    from linnet.tangent.base import Tangent

HALVINGS = 10
"""Shortest step: a thousandth of the way to the mode. A step that must be shorter gains next to nothing."""


@dataclass(frozen=True)
class Relinearization:
    """One step, and what it gave.

    Attributes:
        length: The part of the way to the mode of the last linearization; 0 where no length lowers the objective.
        before: The true objective at the last weights, with the prior and the noise that were found there.
        after: The same at the new weights.
        log_evidence: The log evidence of the network that is linearized around the new weights; before the first step,
            the log evidence of the tangent.
        accepted: Whether the step was taken.
    """

    length: float
    before: float
    after: float
    log_evidence: float
    accepted: bool


@dataclass(frozen=True)
class Around:
    """Weights around which the network is linearized, in place of its own.

    Attributes:
        network: A copy of the network with these weights.
        shift: (p,), how far these weights are from the network's own, where the prior is centered.
        prior: The prior of the first linearization. Its scales are chosen anew.
    """

    network: nn.Module
    shift: Tensor
    prior: Prior


def find_weights(
    first: Tangent, fit: Callable[[Around], Tangent], *, most: int
) -> tuple[Around | None, tuple[Relinearization, ...]]:
    """The weights of the last step whose evidence has grown, or None for the network's own; and all steps.

    Args:
        first: The tangent at the mode, with the mean function "network".
        fit: From weights to the tangent at the mode there.
        most: Number of steps, at most.
    """
    check_whole(first.lin_.given, "relinearize=")
    at, around, steps = first, None, list[Relinearization]()
    while len(steps) < most:
        evidence = at.log_evidence_
        assert evidence is not None
        length, before, after = find_length(at, around)
        if length == 0:
            steps.append(Relinearization(0.0, before, before, evidence, accepted=False))
            break
        moved = move(at, length, around)
        trial = fit(moved)
        assert trial.log_evidence_ is not None
        rounding = math.sqrt(torch.finfo(trial.lin_.dtype).eps) * max(1.0, abs(evidence))
        grows = trial.log_evidence_ > evidence + rounding
        steps.append(Relinearization(length, before, after, trial.log_evidence_, accepted=grows))
        if not grows:
            break
        at, around = trial, moved
    return around, tuple(steps)


def find_length(at: Tangent, around: Around | None) -> tuple[float, float, float]:
    """The first of the lengths 1, 1/2, 1/4, ... that lowers the true objective, and the objective before and after."""
    lin, step = at.lin_, at.posterior_.delta
    S, start = at.prior_variance_, torch.zeros_like(step) if around is None else around.shift
    J = at._jacobian(at._train_inputs[0])

    def objective(t: float) -> float:
        d = start + t * step
        penalty = 0.5 * float(torch.where(S > 0, d.square() / torch.where(S > 0, S, 1.0), 0.0).sum())
        return at._loss_of(J.outputs(lin.move_theta(t * step))) + penalty

    before = objective(0.0)
    for halvings in range(HALVINGS + 1):
        after = objective(0.5**halvings)
        if after < before:
            return 0.5**halvings, before, after
    return 0.0, before, before


def move(at: Tangent, length: float, around: Around | None) -> Around:
    """The weights of a step. The shift is measured at the weights that were written, which may be rounded."""
    lin = at.lin_
    network, steps = copy.deepcopy(lin.given), lin.layout.unflatten(length * at.posterior_.delta)
    change = []
    with torch.no_grad():
        old = select(lin.given, list(lin.theta))
        for name, parameter in select(network, list(lin.theta)).items():
            parameter += steps[name].to(parameter)
            change.append((parameter.to(steps[name]) - old[name].to(steps[name])).flatten())
    shift = torch.cat(change)
    prior = at.prior_ if around is None else around.prior
    return Around(network, shift if around is None else around.shift + shift, prior)


def relinearize(
    estimator: Tangent, fit: Callable[[Tangent, Around | None], Any], *, changed: dict[str, Any]
) -> tuple[Around | None, tuple[Relinearization, ...]]:
    """`find_weights` for the settings of an estimator that is fitted to one set of data.

    Args:
        estimator: The estimator, which has not been fitted.
        fit: Fits an estimator around some weights, or around the network's own.
        changed: Settings in which the fits differ from the estimator: they need no more than the mode.
    """
    check_settings(estimator)
    settings = estimator.get_params(deep=False) | changed | {"relinearize": 0, "progress": False}

    def make(around: Around | None) -> Tangent:
        made = type(estimator)(**settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit that follows says the same
            fit(made, around)
        return made

    first = make(None)
    if first.mean_ != "network":
        return None, ()
    if first.solver_.startswith("cg"):
        raise NotImplementedError(
            f"relinearize= compares the evidences of dense solvers, and these data take solver={first.solver_!r}. Use "
            "fewer examples or parameters (params=, top=), or relinearize=0."
        )
    return find_weights(first, make, most=estimator.relinearize)


def check_settings(estimator: Any) -> None:
    """Raise where a setting does not go with other weights."""
    k = estimator.relinearize
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"relinearize is the largest number of steps, 0 for none; got {k!r}.")
    refused = {
        "model=None": estimator.model is None,
        "mean='zero'": estimator.mean == "zero",
        "top='evidence'": estimator.top == "evidence",
        "inputs=True": getattr(estimator, "inputs", False) is True,
        "noise='heteroscedastic'": getattr(estimator, "noise", None) == "heteroscedastic" if k else False,
        f"solver={estimator.solver!r}": estimator.solver in ("cg-function", "cg-weight", "adam"),
    }
    for name in [name for name, there in refused.items() if there and k]:
        raise NotImplementedError(
            f"relinearize= writes the mean back into the weights of a trained network, and judges by the evidence of a "
            f"dense solver; it does not go with {name}. Use relinearize=0, or another setting there."
        )
