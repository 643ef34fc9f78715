"""The mode of a linearized network by passes over the data, with preconditioners that follow the curvature.

The first preconditioner is made with the curvature at the mean. Where the data has made the network sure of most
labels, most of that curvature is gone and the rest lies in other directions. Where steps lag, a randomized
preconditioner (`linnet.linalg.preconditioners.randomized`) is made with the present curvature, from the examples that
carry most of it. Where steps lag again at nearly the same curvature, the next one has more columns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linnet._common import find_dense_budget
from linnet.inference.iterative_solves import preconditioner_of
from linnet.inference.mode.newton import Mode, pass_space
from linnet.inference.mode.spaces import Solve
from linnet.inference.problem import SolverSettings
from linnet.jacobian import Jacobian, cache_limit
from linnet.linalg import Preconditioner, sketch, square_sums
from linnet.probability import Likelihood, row_curvature

COLUMNS = {"cpu": 256, "cuda": 512}
"""Columns of the first randomized preconditioner: more take longer to make and leave fewer steps."""

SHARE = 0.9
"""Share of the curvature's trace in the examples that a preconditioner reads: a smaller share reads fewer examples."""


def mode_by_passes(
    J: Jacobian,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    settings: SolverSettings,
    tolerance: float | None = None,
    start: Tensor | None = None,
) -> tuple[Mode, Preconditioner | None]:
    """The mode, and its last preconditioner. The passes of the mode include those that preconditioners took.

    Args:
        J: (n c, p).
        y: Targets, as the likelihood takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Likelihood of the targets given f.
        settings: Settings of the solver. A preconditioner or a rank that they name is the only one.
        tolerance: Largest relative gradient; None for 1e-6, or for what the rounding of J's products allows.
        start: u to begin with, (p,); None for zero.

    Raises:
        ArithmeticError: The mode was not found.

    Example:
        >>> import torch
        >>> from linnet import linearize
        >>> from linnet.probability.likelihoods import Categorical
        >>> J = linearize(torch.nn.Linear(2, 3).double()).jacobian(torch.eye(2).double())
        >>> given = {"variance": torch.ones(9).double(), "mean": J.outputs(), "settings": SolverSettings()}
        >>> mode, P = mode_by_passes(J, torch.tensor([0, 2]), likelihood=Categorical(), **given)
        >>> mode.converged, P.m
        (True, 9)
    """
    Phi = J.scaled(variance.sqrt())
    first = preconditioner_of(Phi, J, row_curvature(likelihood, mean, y), settings, "weight")
    maker = _PreconditionerMaker(J, variance.sqrt(), first, settings)
    found = pass_space(
        J,
        y,
        variance=variance,
        mean=mean,
        likelihood=likelihood,
        solve=None if first is None else first.solve,
        make=maker.make if settings.preconditioner == "auto" and settings.rank == "auto" else None,
        start=start,
        tolerance=max(1e-6, 1e3 * J.eps) if tolerance is None else tolerance,
        iterations=settings.iterations,
    ).checked()
    return replace(found, passes=found.passes + math.ceil(maker.passes)), maker.last


class _PreconditionerMaker:
    """Makes preconditioners where steps lag.

    Args:
        J: (n c, p).
        deviation: Prior standard deviations, (p,).
        first: The first preconditioner, which took one pass; None for none.
        settings: Settings of the solver.

    Attributes:
        last: The last preconditioner.
        passes: Passes over the data that all of them took. A pass over some of the examples is a part of one.
    """

    def __init__(self, J: Jacobian, deviation: Tensor, first: Preconditioner | None, settings: SolverSettings) -> None:
        self.J, self.deviation, self.settings = J, deviation, settings
        self.last, self.passes = first, float(first is not None)
        self._trace, self._columns = math.nan, COLUMNS[J.device.type]

    def make(self, root: Tensor) -> Solve | None:
        """A preconditioner for a root of the curvature; None where it would be no better than the last."""
        J, trace = self.J, float(square_sums(root, self.J.n).sum())
        # Five blocks (p, columns) are held while it is made, and Phi times one.
        length = (5 * J.shape[1] + J.shape[0]) * J.dtype.itemsize
        most = max(1, int(0.7 * find_dense_budget(self.settings.memory, J.device)) // length)
        if 0.9 * self._trace <= trace <= self._trace / 0.9:  # nearly the curvature of the last
            if self._columns >= min(most, *J.shape, 16 * COLUMNS[J.device.type]):
                return None
            self._columns *= 4
        self._trace, self.last = trace, None  # the memory of the last first
        index = find_informative_examples(root, J)
        part = J if index is None else J.subset(index)
        if index is not None:
            root = _take_examples(root, index, J.n)
        generator = self.settings.generator(7)
        self.last = sketch(part.scaled(self.deviation), root, rank=min(self._columns, most), generator=generator)
        self.passes += 2 * part.n / J.n
        return self.last.solve


def _take_examples(root: Any, index: Tensor, n: int) -> Any:
    """The part of a root that belongs to some of n examples."""
    rows = len(root) // n
    places = (index[:, None] * rows + torch.arange(rows)).flatten()
    return root[places.to(root.device)]


def find_informative_examples(root: Tensor, J: Jacobian) -> Tensor | None:
    """The fewest examples (m,), in order, whose curvature holds `SHARE` of the trace of L L^T; L (n c,) or (n, c, c).

    None for all examples: where the few are nearly all, cannot be chosen, or where a copy of their factors has no
    memory.
    """
    each = square_sums(root, J.n).double().cpu()
    order = each.argsort(descending=True)
    count = 1 + int((each[order].cumsum(0) < SHARE * each.sum()).sum())
    if not J.by_position or count > 0.85 * J.n:  # a choice of nearly all saves nothing
        return None
    if J.in_memory and J.cache_size * count / J.n > cache_limit("auto", J.device):
        return None
    return order[:count].sort().values
