"""The mode of a linear model by passes over the data, with preconditioners that follow the curvature.

By descent (`linnet.descent`), unless the curvature is the same everywhere or there is no preconditioner; otherwise, and
from where descent came to no end, by Newton's method, whose steps are solved by conjugate gradients
(`linnet.newton.matrix_free`). The first preconditioner is made with the
curvature at the mean. Where the data has made the network sure of most labels, what is left of it lies in other
directions: those of a sketch, which is made when the curvature has become another, and with more columns when it takes
many passes all the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from linnet import newton
from linnet.descent import descend
from linnet.iterative import preconditioner_of
from linnet.jacobian import Jacobian
from linnet.likelihoods import Gaussian, Likelihood
from linnet.newton import Mode, as_weight
from linnet.plan import dense_budget
from linnet.precondition import Preconditioner
from linnet.problem import Settings
from linnet.sketch import sketch

SKETCHED = {False: 128, True: 512}
"""Columns of a sketch, and on a GPU, where columns cost little beside the rows they multiply. With 128 the mode of a
block of ResNet-20 and 3,000 digits takes 36 passes."""

GROWTH = 4
"""How many times as many columns a better sketch has."""


def mode_by_passes(
    J: Jacobian,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    settings: Settings,
    tolerance: float = 1e-6,
) -> tuple[Mode, Preconditioner | None]:
    """The mode, and its last preconditioner; the passes that these took are counted too.

    Args:
        J: (n c, p).
        y: Targets, as the likelihood takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Of the targets given f.
        settings: A preconditioner or a rank that they name is the only one.
        tolerance: Of the relative gradient.

    Raises:
        ArithmeticError: It was not found.

    Example:
        >>> import torch
        >>> from linnet import linearize
        >>> from linnet.likelihoods import Categorical
        >>> J = linearize(torch.nn.Linear(2, 3).double()).jacobian(torch.eye(2).double())
        >>> given = {"variance": torch.ones(9).double(), "mean": J.outputs(), "settings": Settings()}
        >>> mode, P = mode_by_passes(J, torch.tensor([0, 2]), likelihood=Categorical(), **given)
        >>> mode.converged, P.m
        (True, 9)
    """
    Phi = J.scaled(variance.sqrt())
    made = [preconditioner_of(Phi, J, as_weight(likelihood.curvature(mean)), settings, "weight")]

    def renew(root: Tensor, better: int) -> Preconditioner:
        columns = GROWTH**better * SKETCHED[J.device.type == "cuda"]
        # Four blocks (p, columns) are held while it is made.
        most = int(0.7 * dense_budget(settings.memory, J.device)) // (4 * J.shape[1] * J.dtype.itemsize)
        found = sketch(Phi, root, rank=max(1, min(columns, most)), generator=settings.generator(7))
        made.append(found)
        return found

    given: dict[str, Any] = {
        "variance": variance,
        "mean": mean,
        "likelihood": likelihood,
        "renew": renew if settings.preconditioner == "auto" and settings.rank == "auto" else None,
        "tolerance": tolerance,
    }
    start, passes = None, int(made[0] is not None)
    if made[0] is not None and not isinstance(likelihood, Gaussian):  # whose curvature stays as it is
        found = descend(J, y, preconditioner=made[0], **given)
        start, passes = found.u, passes + found.passes
        if found.converged:
            return replace(found, passes=passes), made[-1]
    found = newton.matrix_free(J, y, preconditioner=made[-1], start=start, **given).checked()
    return replace(found, passes=passes + found.passes), made[-1]
