r"""Fisher statistics: they turn the Jacobian of a score into Fisher vectors.

.. math:: V = (J - 1 Z^\top) \, \mathrm{diag}(I)^{-1/2}, \qquad
    Z = \mathrm{mean}(J), \quad I = \mathrm{mean}((J - 1 Z^\top)^2)

with means over the examples, and V over the columns that carry information.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.data import SingleBatch
from linnet.jacobian import DenseBlock, Jacobian, Linearization, Moments, random_signs
from linnet.linalg import LinearOperator
from linnet.network import Layout


@dataclass(frozen=True, eq=False)
class Statistics:
    """Center and diagonal Fisher information of the parameters.

    Attributes:
        Z: (p,) in float64, the mean of each column of J; zeros where scores are not centered.
        I: (p,) in float64, the mean square about Z.
        kept: (p,), whether a column carries information.
        dropped: Number of columns that carry no information.
        n: Number of examples that the statistics were computed from.
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
        # In float64, where the information of small columns does not vanish.
        Z, scale = self.Z[self.kept].to(J.dtype), self.I[self.kept].rsqrt().to(J.dtype)
        V = J.columns(self.kept) if self.dropped else J
        return (V.centered(Z) if bool(Z.any()) else V).scaled(scale)

    @property
    def trace(self) -> float:
        """``||V||_F^2`` of the Fisher vectors of the data that the statistics come from: n for each kept column."""
        return float(self.n) * (len(self.kept) - self.dropped)


def fisher_statistics(J: Jacobian, *, centered: bool, stored: Jacobian | None = None) -> Statistics:
    r"""Center and diagonal Fisher information of a score, in one pass over the data.

    Sums are in float64 and of squares about the mean, so that nothing cancels. Two kinds of columns are dropped:
    columns of zeros, and columns that would be constant but for rounding, such as the gradient of a bias before a
    normalization. The scale would blow up their noise to the size of everything else. The size of a column does not
    tell noise from a small signal. So the rows of 16 examples are made again with weights that are moved by as much as
    rounding moves them, four times and at random, and E is the distance of J's rows from them:

    .. math:: \text{column } j \text{ is dropped where} \quad
        \sum_i (E_{ij} - \bar E_j)^2 > \tfrac{1}{4} \sum_i (J_{ij} - \bar J_j)^2

    at least once, in each half of the examples: there, leaving the column out changes the kernel less than
    keeping it does. An example that crosses a kink of the network only because of rounding is in one half alone. A
    column is also kept where ``I_j`` is more than 1 / eps times the mean square of E: then examples outside the 16
    carry a signal. The network runs in its own dtype, and its frozen weights are shared.

    Args:
        J: The Jacobian of a scalar score, (n, p): over the data, or over samples of the model.
        centered: Whether Z is the mean of J; else it is zero.
        stored: J with its factors in memory, where they are.

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
    Z, I = (J if stored is None else stored).moments(centered=centered)  # noqa: E741
    layout = J.lin.layout
    check_finite(Z, I, layout)
    columns = (I > 0) & ~rounding(J, I, centered=centered)
    return Statistics(Z, I, columns, int((~columns).sum()), J.n)


def rounding(J: Jacobian, I: Tensor, *, centered: bool) -> Tensor:  # noqa: E741
    """Which columns of J, with the mean squares I (p,), are rounding noise, (p,); see `fisher_statistics`."""
    count = min(16, J.n)
    if J.by_position:
        index = torch.arange(count) * J.n // count
        few = J.subset(index)
    else:
        source = SingleBatch(next(iter(J._source.batches(count, 0, count))), "first examples")
        few, count = J.over(source), source.n  # a loader's own batches may be smaller
    J.lin.check_unchanged(contents=True)
    eps = torch.finfo(J.lin.rules.coarsest).eps
    halves = [torch.arange(count)[h::2] for h in (0, 1)] if count >= 4 else [torch.arange(count)]
    judges = [few.near(_shaken(J.lin, eps, seed)) for seed in range(4)]
    found = _squares(few, judges, halves, centered=centered)
    noise = count * I <= sum(off for _, off in found) / eps
    for squares, off in found:
        noise &= off > 0.25 * squares
    return noise


def _shaken(lin: Linearization, eps: float, seed: int) -> dict[str, Tensor]:
    """Weights that differ from the network's own by about eps of each, with random signs."""
    return {name: t + eps * t * random_signs(*t.shape, seed=seed, like=t) for name, t in lin.theta.items()}


def _squares(
    J: Jacobian, judges: list[Jacobian], parts: list[Tensor], *, centered: bool
) -> list[tuple[Tensor, Tensor]]:
    """For each part of the examples, sums of squares of the columns of J and of their distance from a judge's, (p,).

    The distance is the largest from any judge: by chance, one may round as J does.
    """
    p = J.shape[1]
    sums = [[Moments(p, centered=centered, device=J.device) for _ in range(1 + len(judges))] for _ in parts]
    # The rows of both, their difference, and its squares in float64.
    most = J.passes.chunk_room // (24 * max(1, p))
    for index in torch.arange(J.n).split(max(1, most)):
        A = J.subset(index).dense()
        for i, judge in enumerate([None, *judges]):
            rows = A if judge is None else A - judge.subset(index).dense()
            for part, own in zip(parts, sums, strict=True):
                some = rows[torch.isin(index, part).to(rows.device)]
                if len(some):
                    own[i].add([DenseBlock([(0, p)], [some[:, None]])], len(some))
    return [(own.squares, torch.stack([one.squares for one in off]).amax(0)) for own, *off in sums]


def check_finite(Z: Tensor, I: Tensor, layout: Layout) -> None:  # noqa: E741
    """Raise, naming the parameter, if a mean or mean square is not finite."""
    for name, s in layout.slices.items():
        if not bool((torch.isfinite(Z[s]) & torch.isfinite(I[s])).all()):
            raise ValueError(
                f"The gradient of the score with respect to {name!r} is not finite for some example, though the score "
                "is. Look for a square root or logarithm at zero, or an overflow (try float64)."
            )
