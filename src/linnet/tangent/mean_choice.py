"""Which mean function, and whether with features of the inputs: by evidence and leave-one-out predictions, together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet.inference import SolverSettings, Task
from linnet.inference.gaussian import closed_form, updates
from linnet.probability import Prior
from linnet.tangent.input_features import SHARE, InputFeatures


@dataclass(frozen=True)
class MeanTrial:
    """A mean function, with or without features of the inputs, that was compared with others.

    Attributes:
        name: "network" or "zero".
        log_evidence: The log evidence, summed over tasks.
        leave_one_out: Log densities of all examples, each from the others, summed over examples and tasks. An
            example of weight w counts as w examples, of which one is left out.
        chosen: Whether the estimator has this mean function: the sum of both numbers is largest.
        inputs: The length scale of the features of the inputs; None for a model without them.
    """

    name: str
    log_evidence: float
    leave_one_out: float
    chosen: bool = False
    inputs: float | None = None

    @property
    def score(self) -> float:
        """The sum that is compared."""
        return self.log_evidence + self.leave_one_out


@dataclass(frozen=True)
class Candidate:
    """A mean function and perhaps features of the inputs.

    Attributes:
        name: "network" or "zero".
        shared: Kernels and their eigenvectors, for `closed_form.condition`.
        features: Of the inputs; None for a model without them.
        variance: Prior variance of the weights of the features where the scale is one.
    """

    name: str
    shared: dict[Any, Any]
    features: InputFeatures | None = None
    variance: float = 0.0


def choose_mean(
    options: Mapping[str, list[Task]],
    prior: Prior,
    settings: SolverSettings,
    *,
    features: Sequence[tuple[InputFeatures, Tensor]] = (),
    plain: bool = True,
) -> tuple[Candidate, tuple[MeanTrial, ...]]:
    """The best mean function, with or without features of the inputs, and what was compared; the first of equals wins.

    Kernels and their eigenvectors are made once for all mean functions: only the residuals differ.

    Args:
        options: By name, the tasks with the residuals of a mean function. All else of the tasks is the same.
        prior: Of the displacement.
        settings: How to solve, with a dense solver.
        features: Features of the inputs of the one task that there is, with their values (n, k); the prior has one
            scale.
        plain: Whether models without features take part.
    """
    candidates, trials = list[Candidate](), list[MeanTrial]()
    shared: dict[Any, Any] = {}
    in_functions = settings.solver == "function"
    for name, tasks in options.items() if plain else ():
        value, left_out = (_score if in_functions and len(tasks) == 1 else _try)(tasks, prior, settings, shared)
        candidates.append(Candidate(name, shared))
        trials.append(MeanTrial(name, value, left_out))
    if features:
        task, dense = next(iter(options.values()))[0], replace(settings, solver="function")
        J = shared.get(("J", 0)) or task.J.cached()
        known = shared.get(("kernels", 0))
        K = closed_form.make_kernels(replace(task, J=J), prior)["all"] if known is None else known["all"]
        average = _average_variance(K, task)
        for one, values in features:
            variance = SHARE * average
            kernels = {"all": K + variance * closed_form.whiten_(_make_kernel(values, task), task.noise.base)}
            own: dict[Any, Any] = {("J", 0): J, ("kernels", 0): kernels}
            for name, tasks in options.items():
                value, left_out = _score(tasks, prior, dense, own)
                candidates.append(Candidate(name, own, one, variance))
                trials.append(MeanTrial(name, value, left_out, inputs=one.length))
    best = max(range(len(trials)), key=lambda i: trials[i].score)
    found = candidates[best]
    if found.features is not None:
        found.shared.pop(("J", 0))  # which has no features
    return found, tuple(replace(trial, chosen=i == best) for i, trial in enumerate(trials))


def _make_kernel(values: Tensor, task: Task) -> Tensor:
    """The kernel (n c, n c) of features (n, k) of the inputs, with weights of their own for each output."""
    K, c = values @ values.T, task.base.shape[1]
    return K if c == 1 else torch.kron(K, torch.eye(c, dtype=K.dtype, device=K.device))


def _average_variance(K: Tensor, task: Task) -> float:
    """The average of the diagonal of a kernel, by the weights of the rows, from its whitened form K."""
    w = torch.ones_like(task.r) if task.noise.weight is None else task.noise.weight
    return float((w * task.noise.base * K.diagonal()).sum() / w.sum())


def _try(tasks: list[Task], prior: Prior, settings: SolverSettings, shared: dict[Any, Any]) -> tuple[float, float]:
    """The log evidence of fits and their leave-one-out log densities, both summed over tasks."""
    fits = points = closed_form.condition(tasks, prior, settings, shared=shared)
    if fits[0].choice.averaged:  # leave-one-out is at the average
        choice = replace(fits[0].choice, averaged=False)
        points = closed_form.condition(tasks, prior, settings, choice=choice, shared=shared)
    scores = [
        _sum_scores(task, fit.noise_rows, fit.alpha, updates.precisions(task, fit))
        for task, fit in zip(tasks, points, strict=True)
    ]
    return sum(fit.log_evidence for fit in fits), sum(scores)


def _score(tasks: list[Task], prior: Prior, settings: SolverSettings, shared: dict[Any, Any]) -> tuple[float, float]:
    """Both numbers of `_try` for one task in function space, without the posterior where there is an average."""
    (task,) = tasks
    found = closed_form.summarize(task, prior, settings, shared)
    if found is None:
        return _try(tasks, prior, settings, shared)
    return found.log_evidence, _sum_scores(task, found.noise_rows, found.alpha, found.precisions)


def _sum_scores(task: Task, noise_rows: Tensor, alpha: Tensor, P: Tensor) -> float:
    r"""The sum over examples; of w equal examples each is left out alone, as if they had been given one by one.

    With V the noise of one of them, P the precision of their average and :math:`\alpha` its weight, one of them has

    .. math:: P_1 = (1 - 1/w) V^{-1} + P / w^2, \qquad \alpha_1 = \alpha / w

    An example of a weight below one is left out as a whole.
    """
    whole = updates.leave_one_out(task, noise_rows, alpha, P).score
    if task.noise.weight is None:
        return float(whole.sum())
    rows = task.noise.weight
    w = rows.view(len(P), -1)[:, 0]
    noise = (noise_rows * rows).view(len(P), -1)
    P = torch.diag_embed((1 - 1 / w)[:, None] / noise) + P / w[:, None, None].square()
    single = replace(task, noise=replace(task.noise, weight=None))
    one = updates.leave_one_out(single, noise_rows, alpha / rows, P).score
    return float(w @ torch.where(w < 1, whole, one))
