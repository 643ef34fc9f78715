"""Which mean function: the one with more evidence and better leave-one-out predictions, together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linnet.inference import Fit, SolverSettings, Task
from linnet.inference.gaussian import closed_form, updates
from linnet.probability import Prior


@dataclass(frozen=True)
class MeanTrial:
    """A mean function that was compared with another one.

    Attributes:
        name: "network" or "zero".
        log_evidence: The log evidence, summed over tasks.
        leave_one_out: Log densities of all examples, each from the others, summed over examples and tasks. An
            example of weight w counts as w examples, of which one is left out.
        chosen: Whether the estimator has this mean function: the sum of both numbers is largest.
    """

    name: str
    log_evidence: float
    leave_one_out: float
    chosen: bool = False

    @property
    def score(self) -> float:
        """The sum that is compared."""
        return self.log_evidence + self.leave_one_out


def choose_mean(
    options: Mapping[str, list[Task]], prior: Prior, settings: SolverSettings
) -> tuple[str, list[Fit], tuple[MeanTrial, ...]]:
    """The name of the best mean function, the fits of its tasks, and what was compared; the first of equals wins.

    Kernels and their eigenvectors are made once: only the residuals differ.

    Args:
        options: By name, the tasks with the residuals of a mean function. All else of the tasks is the same.
        prior: Of the displacement.
        settings: How to solve, with a dense solver.
    """
    shared: dict[Any, Any] = {}
    fits = {name: closed_form.condition(tasks, prior, settings, shared=shared) for name, tasks in options.items()}
    trials = []
    for name, tasks in options.items():
        found, points = fits[name], fits[name]
        if found[0].choice.averaged:  # leave-one-out is at the average
            choice = replace(found[0].choice, averaged=False)
            points = closed_form.condition(tasks, prior, settings, choice=choice, shared=shared)
        trials.append(MeanTrial(name, sum(fit.log_evidence for fit in found), _leave_one_out(tasks, points)))
    best = max(trials, key=lambda trial: trial.score).name
    return best, fits[best], tuple(replace(trial, chosen=trial.name == best) for trial in trials)


def _leave_one_out(tasks: Sequence[Task], fits: Sequence[Fit]) -> float:
    return sum(_sum_scores(task, fit) for task, fit in zip(tasks, fits, strict=True))


def _sum_scores(task: Task, fit: Fit) -> float:
    r"""The sum over examples; of w equal examples each is left out alone, as if they had been given one by one.

    With V the noise of one of them, P the precision of their average and :math:`\alpha` its weight, one of them has

    .. math:: P_1 = (1 - 1/w) V^{-1} + P / w^2, \qquad \alpha_1 = \alpha / w

    An example of a weight below one is left out as a whole.
    """
    P = updates.precisions(task, fit)
    whole = updates.leave_one_out(task, fit, P).score
    if task.noise.weight is None:
        return float(whole.sum())
    rows = task.noise.weight
    w = rows.view(len(P), -1)[:, 0]
    noise = (fit.noise_rows * rows).view(len(P), -1)
    P = torch.diag_embed((1 - 1 / w)[:, None] / noise) + P / w[:, None, None].square()
    single = replace(task, noise=replace(task.noise, weight=None))
    one = updates.leave_one_out(single, replace(fit, alpha=fit.alpha / rows), P).score
    return float(w @ torch.where(w < 1, whole, one))
