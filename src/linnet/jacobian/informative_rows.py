r"""The few rows of ``L^T J`` that carry nearly all of the curvature ``J^T B J``, ``B = L L^T``.

A classifier that is sure of most labels has a curvature near zero there: of ResNet-20 on 2,000 of its training images,
3 % of the rows hold 99 % of the trace of B, and 13 % hold 99.99 %. Products with those alone take a fraction of the
backward passes. They are for preconditioners, and for iterations whose residuals come from all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.output_combinations import combined
from linnet.linalg.matrices import Stack

SMALL = 256
"""Outputs up to which the blocks of B are decomposed; columns of L are taken as they are where there are more, which
takes up to twice the rows."""

WORTH = 0.3
"""The largest share of the rows that is worth while."""


@torch.no_grad()
def reduced(
    J: Jacobian, root: Tensor, *, share: float = 1e-4, most: int | None = None, largest: float = 0.03
) -> Stack | None:
    """R (m, p) with ``R^T R`` close to ``J^T B J``; None where that takes too many rows, or J cannot choose examples.

    What is left out has no more than a share of B's trace, wherever it is. Examples that need 1, 2, 3, 4, 6, 8, 12 ...
    rows go together, each group by a Jacobian of its own.

    Args:
        J: (n c, p).
        root: L, (n, c, c).
        share: Of the trace.
        most: Rows that there may be; where a share takes more, a larger one is left out.
        largest: Share that may be left out then.

    Example:
        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 3)).jacobian(torch.ones(9, 2))
        >>> L = torch.zeros(9, 3, 3)
        >>> L[4, 0, 0] = 2.0
        >>> reduced(J, L).shape
        (1, 9)
    """
    if root.ndim != 3 or J.in_memory or not J.by_position:
        return None
    columns = _columns(root)
    squares = columns.square().sum(1).double()  # (n, c), falling
    if not float(squares.sum()) > 0:
        return None
    rows = WORTH * J.shape[0] if most is None else min(most, WORTH * J.shape[0])
    groups = _groups(squares, share)
    while sum(len(index) * q for index, q in groups) > rows:
        share *= 10**0.25
        if most is None or share > largest:
            return None
        groups = _groups(squares, share)
    return Stack([combined(J.subset(index.cpu()), columns[index, :, :q]) for index, q in groups])


def _groups(squares: Tensor, share: float) -> list[tuple[Tensor, int]]:
    """Indices of examples, and how many columns each of them needs; squares (n, c) falls along its rows."""
    order, _ = squares.flatten().sort()
    dropped = int((order.cumsum(0) <= share * order.sum()).sum())
    needed = (squares >= order[min(dropped, len(order) - 1)]).sum(1)
    groups, low, widest = [], 0, int(needed.max())
    steps = sorted(
        {2**i * half // 2 for i in range(widest.bit_length()) for half in (2, 3)}
    )  # 1, 2, 3, 4, 6, 8, 12 ...
    for q in (*(q for q in steps if q < widest), widest):
        index = ((needed > low) & (needed <= q)).nonzero()[:, 0]
        if len(index):
            groups.append((index, q))
        low = max(low, q)
    return groups


def _columns(root: Tensor) -> Tensor:
    """Columns (n, c, c) with the same ``L L^T``, longest first: as few long ones as can be where c is small."""
    c = root.shape[-1]
    if c <= SMALL:
        values, vectors = torch.linalg.eigh((root @ root.mT).double())
        return (vectors * values.clamp_min(0).sqrt()[:, None]).flip(2).to(root.dtype)
    order = root.square().sum(1).argsort(1, descending=True)
    return root.gather(2, order[:, None].expand_as(root))
