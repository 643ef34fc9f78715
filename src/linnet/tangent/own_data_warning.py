"""Whether a network was trained on the data it is given: its residuals there are smaller than its errors elsewhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.inference import Task

OWN_DATA = 0.25
"""Below this ratio of `own_data_ratio` the network must have been trained on the data."""

OWN_ROWS = (100, 500)
"""Fewer rows say nothing, since the ratio of pure noise falls below the limit once in a hundred times; more are not
needed."""


def own_data_ratio(task: Task, base: Tensor) -> float:
    """Energy of the residuals where the network could have followed them, relative to where it could hardly.

    The median energy along the leading quarter of the kernel's eigenvectors, relative to what the mean of the others
    would make it: about one for noise, more where there is something to learn, and little for data that the network
    was trained on, even where an optimizer's last steps have left some gradient along the first few of them.
    """
    J, r, scale = task.J, task.r, task.noise.base.rsqrt()
    if len(r) > OWN_ROWS[1]:
        if not J.by_position or J.has_many_outputs():  # a kernel of one example would be too large
            return math.inf
        index = torch.linspace(0, J.n - 1, max(1, OWN_ROWS[1] // J.c)).long()
        J, r, scale = J.subset(index), r.view(J.n, -1)[index].flatten(), scale.view(J.n, -1)[index].flatten()
    Q = torch.linalg.eigh(scale[:, None] * J.gram(scale=base) * scale)[1]
    energy = (Q.T @ (scale * r)).square().flip(0)
    q = len(r) // 4
    rest = 0.455 * energy[q:].mean()  # 0.455 is the median of the square of a standard normal number
    return float(energy[:q].median() / rest) if float(rest) > 0 else math.inf


def warn_of_own_data(tasks: Sequence[Task], base: Tensor) -> None:
    """Warn, on behalf of the caller of an estimator's method, where a network has seen a task's data.

    Args:
        tasks: Residuals with their Jacobians.
        base: Prior variances (p,), up to a scale.
    """
    for task in tasks:
        if len(task.r) >= OWN_ROWS[0] and own_data_ratio(task, base) < OWN_DATA:
            warnings.warn(
                "The network's residuals on these data hold almost nothing that it could still learn, as if it had "
                "been trained on them: they are smaller than its errors on new data, and with mean='network' the error "
                "bars will be too. Use mean='zero', or data that the network has not seen.",
                stacklevel=5,
            )
            return
