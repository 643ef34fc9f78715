"""The mode of a linear model by passes over the data, with preconditioners that follow the curvature.

By descent (`linnet.inference.mode.lbfgs`), unless the curvature is the same everywhere or there is no preconditioner;
otherwise, and from where descent came to no end, by Newton's method, whose steps are solved by conjugate gradients
(`linnet.inference.mode.newton.matrix_free`). The first preconditioner is made with the curvature at the mean. Where the
data has made the network sure of most labels, what is left of it lies in other directions: those of a sketch, which is
made when the curvature has become another, and with more columns when it takes many passes all the same. It reads the
examples that carry the curvature, and follows it without a pass until another one is made
(`linnet.linalg.preconditioners.randomized.Sketch`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from linnet._common.memory import dense_budget
from linnet.inference.gaussian.iterative import preconditioner_of
from linnet.inference.mode import newton
from linnet.inference.mode.lbfgs import descend
from linnet.inference.mode.newton import Mode
from linnet.inference.problem import Settings
from linnet.jacobian.cached import cache_limit
from linnet.jacobian.jacobian import Jacobian
from linnet.linalg.preconditioners.low_rank import Preconditioner
from linnet.linalg.preconditioners.randomized import Sketch
from linnet.linalg.row_weights import as_weight
from linnet.probability.likelihoods import Gaussian, Likelihood

SKETCHED = {False: 256, True: 512}
"""Columns of a sketch, and on a GPU, where columns cost little beside the rows they multiply."""

SHARE = 0.9
"""Of the curvature's trace, which the examples that a sketch reads hold."""

NEARLY_ALL = 0.85
"""The share of the examples that is not worth choosing."""

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
        >>> from linnet.probability.likelihoods import Categorical
        >>> J = linearize(torch.nn.Linear(2, 3).double()).jacobian(torch.eye(2).double())
        >>> given = {"variance": torch.ones(9).double(), "mean": J.outputs(), "settings": Settings()}
        >>> mode, P = mode_by_passes(J, torch.tensor([0, 2]), likelihood=Categorical(), **given)
        >>> mode.converged, P.m
        (True, 9)
    """
    Phi = J.scaled(variance.sqrt())
    first = preconditioner_of(Phi, J, as_weight(likelihood.curvature(mean)), settings, "weight")
    made: list[_Leading] = []  # the last one alone

    def renew(root: Tensor, better: int) -> _Leading:
        columns = GROWTH**better * SKETCHED[J.device.type == "cuda"]
        # Five blocks (p, columns) are held while it is made, and Phi times one.
        length = 5 * J.shape[1] + J.shape[0]
        most = int(0.7 * dense_budget(settings.memory, J.device)) // (length * J.dtype.itemsize)
        made.clear()
        made.append(_Leading(J, variance.sqrt(), root, max(1, min(columns, most)), settings.generator(7)))
        return made[0]

    def last(at: Mode | None) -> Preconditioner | None:
        return first if at is None or not made else made[0].at(at.root)

    given: dict[str, Any] = {
        "variance": variance,
        "mean": mean,
        "likelihood": likelihood,
        "renew": renew if settings.preconditioner == "auto" and settings.rank == "auto" else None,
        "tolerance": tolerance,
    }
    found, passes = None, int(first is not None)
    if first is not None and not isinstance(likelihood, Gaussian):  # whose curvature stays as it is
        found = descend(J, y, preconditioner=first, **given)
        passes += found.passes
        if found.converged:
            return replace(found, passes=passes), last(found)
    start = None if found is None else found.u
    found = newton.matrix_free(J, y, preconditioner=last(found), start=start, **given).checked()
    return replace(found, passes=passes + found.passes), last(found)


@final
class _Leading:
    """A sketch of the examples that carry the curvature.

    Args:
        J: (n c, p).
        scale: Of its columns, (p,).
        root: L at the curvature that it is made for, (n c,) or (n, c, c).
        columns: Of the sketch.
        generator: Of what is drawn.

    Attributes:
        passes: Over the data that it took.
    """

    def __init__(self, J: Jacobian, scale: Tensor, root: Tensor, columns: int, generator: torch.Generator) -> None:
        self._n, self._index = J.n, carrying(root, J)
        self.passes = 2.0 if self._index is None else 2.0 * len(self._index) / J.n
        part = J if self._index is None else J.subset(self._index)
        self._sketch = Sketch(part.scaled(scale), self._of(root), rank=columns, generator=generator)

    def _of(self, root: Tensor) -> Tensor:
        """The same root for the examples that it reads."""
        if self._index is None:
            return root
        return root.unflatten(0, (self._n, -1))[self._index.to(root.device)].flatten(0, 1)

    def at(self, root: Tensor) -> Preconditioner:
        """The preconditioner for the curvature with this root."""
        return self._sketch.at(self._of(root))


def carrying(root: Tensor, J: Jacobian) -> Tensor | None:
    """The fewest examples (m,), in order, whose curvature holds `SHARE` of the trace of L L^T; L (n c,) or (n, c, c).

    None for all of them, where these are nearly all, cannot be chosen, or where a copy of their factors has no memory.
    """
    each = root.square().view(J.n, -1).sum(1).double().cpu()
    order = each.argsort(descending=True)
    count = 1 + int((each[order].cumsum(0) < SHARE * each.sum()).sum())
    if not J.by_position or count > NEARLY_ALL * J.n:
        return None
    if J.in_memory and J.cache_size * count / J.n > cache_limit("auto", J.device):
        return None
    return order[:count].sort().values
