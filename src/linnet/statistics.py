r"""Fisher statistics: what turns the Jacobian of a score into Fisher vectors.

.. math:: V = (J - 1 Z^\top) \, \mathrm{diag}(I)^{-1/2}, \qquad
    Z = \mathrm{mean}(J), \quad I = \mathrm{mean}((J - 1 Z^\top)^2)

with means over the examples, and V over the columns that carry information.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.jacobian import Jacobian
from linnet.operators import LinearOperator
from linnet.params import Layout

NOISE = 64
"""A column whose entries are below this many eps of its module's largest is rounding."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Centre and diagonal Fisher information of the parameters.

    Attributes:
        Z: (p,) in float64, the mean of each column of J; zeros where scores are not centered.
        I: (p,) in float64, the mean square about Z.
        kept: (p,), whether a column carries information.
        dropped: How many do not.
        n: Examples that they were computed from.
    """

    Z: Tensor
    I: Tensor  # noqa: E741 (the paper's letter)
    kept: Tensor
    dropped: int
    n: int

    def vectors(self, J: LinearOperator) -> LinearOperator:
        """The Fisher vectors ``(J - 1 Z^T) diag(I)^(-1/2)`` of any data, over the kept columns: (n, kept).

        Args:
            J: The Jacobian of the score that the statistics belong to, of any data.
        """
        if J.shape[1] != len(self.kept):
            raise ValueError(
                f"The statistics are those of {len(self.kept)} parameters, so J needs as many columns; got "
                f"{J.name} of shape {J.shape}."
            )
        if self.dropped == len(self.kept):
            raise ValueError(
                f"All {self.dropped} columns are constant over the {self.n} examples that the statistics come from, so "
                "there are no Fisher vectors. Look at the score, the selected parameters and the data."
            )
        # Made in float64, where the information of small columns does not vanish.
        Z, scale = self.Z[self.kept].to(J.dtype), self.I[self.kept].rsqrt().to(J.dtype)
        V = J.columns(self.kept) if self.dropped else J
        return (V.centered(Z) if bool(Z.any()) else V).scaled(scale)

    @property
    def trace(self) -> float:
        """``||V||_F^2`` of the Fisher vectors of the data that the statistics come from: n for each kept column."""
        return float(self.n) * (len(self.kept) - self.dropped)


def fisher_statistics(J: Jacobian, *, centered: bool) -> Statistics:
    r"""Centre and diagonal Fisher information of a score, in one pass over the data.

    Sums are in float64 and of squares about the mean, so that nothing cancels. A column is dropped when
    ``I_j <= (64 eps)^2 max(mean(J^2))``, the maximum over the columns of its module: exact zeros come out as rounding
    noise, which the scale would blow up to the size of everything else. ``eps`` is that of J's dtype.

    Args:
        J: The Jacobian of a scalar score, (n, p): over the data, or over samples of the model.
        centered: Whether Z is the mean of J; else it is zero.

    Example:
        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> found = fisher_statistics(J, centered=True)
        >>> found.Z.tolist(), found.I.tolist(), found.kept
        ([2.0, 0.0, 1.0], [1.0, 0.0, 0.0], tensor([ True, False, False]))
        >>> found.vectors(J).dense()
        tensor([[-1.],
                [ 1.]])
    """
    if J.c != 1:
        raise ValueError(
            f"Fisher statistics need one score per example; the Jacobian has {J.c} outputs for each of {J.n} examples. "
            "Reduce them to one number with output=, as the scores of linnet.scores do."
        )
    Z, I = J.moments(centered=centered)  # noqa: E741
    layout = J.lin.layout
    check_finite(Z, I, layout)
    kept = torch.zeros_like(I, dtype=torch.bool)
    eps = torch.finfo(J.dtype).eps
    whole = I + Z.square()  # the mean of J^2
    for names in layout.layers.values():
        columns = [s for s in (layout.slices[name] for name in names) if s.stop > s.start]
        largest = max((float(whole[s].max()) for s in columns), default=0.0)
        for s in columns:
            kept[s] = I[s] > (NOISE * eps) ** 2 * largest
    return Statistics(Z, I, kept, int((~kept).sum()), J.n)


def check_finite(Z: Tensor, I: Tensor, layout: Layout) -> None:  # noqa: E741
    """Raise, naming the parameter, if a mean or mean square is not finite."""
    for name, s in layout.slices.items():
        if not bool((torch.isfinite(Z[s]) & torch.isfinite(I[s])).all()):
            raise ValueError(
                f"The gradient of the score with respect to {name!r} is not finite for some example, though the score "
                "is. Look for a square root or logarithm at zero, or an overflow (try float64)."
            )
