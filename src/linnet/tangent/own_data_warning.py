"""Whether a network was trained on the data it is given: where residuals could still be learned, they are small."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.inference import Task

OWN_DATA = -2.6
"""Below this `own_data_score` linnet warns. The limit trades missed warnings against false ones: pure noise falls below
the limit about once in a hundred times."""

ROWS = 500
"""Rows that the score looks at: more of them make the score surer and their kernel larger."""


def own_data_score(task: Task, base: Tensor) -> float:
    """How the energy of the residuals grows with the eigenvalues of the kernel, in standard errors.

    Training removes residuals first along the leading eigenvectors of the kernel, and leaves them along the last. So
    on a network's own data the energies of the residuals rise from the first eigenvector to the last, while new data
    have most to learn along the first. The score is Spearman's rank correlation of eigenvalues and energies times
    sqrt(rows - 1), about a standard normal number for noise. The last steps of an optimizer leave a large gradient
    along the leading eigenvectors, so the same is done without their first quarter, and the smaller score counts.

    Args:
        task: Residuals with their Jacobian.
        base: Prior variances (p,), up to a scale.
    """
    J, r, scale = task.J, task.r, task.noise.base.rsqrt()
    if len(r) > ROWS:
        if not J.by_position or J.has_many_outputs():  # a kernel of one example would be too large
            return math.inf
        index = torch.linspace(0, J.n - 1, max(1, ROWS // J.c)).long()
        J, r, scale = J.subset(index), r.view(J.n, -1)[index].flatten(), scale.view(J.n, -1)[index].flatten()
    values, Q = torch.linalg.eigh(scale[:, None] * J.gram(scale=base) * scale)
    energy = (Q.T @ (scale * r)).square()
    # Eigenvalues that are zero but for rounding count as equal.
    values = torch.where(values <= len(r) * torch.finfo(values.dtype).eps * values[-1], 0.0, values)
    return min(_rank_correlation(values[:end], energy[:end]) for end in (len(r), len(r) - len(r) // 4))


def _rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation in standard errors; infinity where it is not defined."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    ranks = ranks - ranks.mean(1, keepdim=True)
    norms = ranks.norm(dim=1)
    return float(ranks[0] @ ranks[1] / norms.prod()) * math.sqrt(len(x) - 1) if bool(norms.all()) else math.inf


def _ranks(x: Tensor) -> Tensor:
    """Ranks of numbers from 0 on; equal numbers share the mean of their ranks."""
    _, group, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts + 1) / 2)[group].to(x)


def warn_of_own_data(tasks: Sequence[Task], base: Tensor) -> None:
    """Warn, on behalf of the caller of an estimator's method, where a network has seen a task's data.

    Args:
        tasks: Residuals with their Jacobians.
        base: Prior variances (p,), up to a scale.
    """
    for task in tasks:
        if own_data_score(task, base) < OWN_DATA:
            warnings.warn(
                "The network's residuals on these data hold almost nothing that it could still learn, as if it had "
                "been trained on them: they are smaller than its errors on new data, and with mean='network' the error "
                "bars will be too. For the error bars of a network on its own training data use linnet.Laplace; to "
                "adapt it, use data that the network has not seen.",
                stacklevel=6,
            )
            return
