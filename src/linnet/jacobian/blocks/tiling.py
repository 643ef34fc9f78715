"""Work over examples, cut so that what comes in between stays small.

Letters: ``n`` and ``m`` examples, ``c`` outputs, ``T`` uses of a weight per example, ``k`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

TEMPORARY = 1 << 26
"""Entries that an intermediate may have before a product is cut into pieces."""

Inner = Callable[[slice, slice, int], Tensor]
"""Inner products (n', T, m', T') of the sides that outputs share, for slices of examples and a group."""


def fits(entries: int) -> bool:
    """Whether an intermediate of so many entries need not be cut.

    >>> fits(10), fits(1 << 30)
    (True, False)
    """
    return entries <= TEMPORARY


def pieces(n: int, each: int) -> Iterator[slice]:
    """Slices of n examples with at most TEMPORARY entries each, for ``each`` entries per example."""
    step = max(1, min(n, TEMPORARY // max(1, each)))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def tiles(n: int, m: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of an n by m grid with ``each`` entries per cell and about TEMPORARY entries per tile."""
    side = max(1, int((TEMPORARY / max(1, each)) ** 0.5))
    step = max(side, TEMPORARY // max(1, each * min(m, side)))
    for a in range(0, n, step):
        for b in range(0, m, side):
            yield slice(a, min(a + step, n)), slice(b, min(b + side, m))


def add_products(out: Tensor, g: Tensor, h: Tensor) -> None:
    """Adds each example's ``g h`` into ``out``: g (n, c, m) and h (n, m, k) into (n, c, k).

    >>> out = torch.ones(2, 3, 1)
    >>> add_products(out, torch.ones(2, 3, 4), torch.ones(2, 4, 1))
    >>> out.flatten().tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    if g.is_cpu and h.shape[2] == 1:
        # Read as a matrix right of one row, g comes at the speed of the CPU's memory; left of one column it does not.
        out += torch.bmm(h.mT, g.mT).mT
    else:
        out.baddbmm_(g, h)


def ghost(g: Tensor, h: Tensor, inner: Inner, out: Tensor) -> None:
    r"""Adds ``sum_{groups,t,s} inner[i,t,j,s] (g_iut . h_jvs)`` into out (n c, m c'), tile by tile.

    Args:
        g: (n, c, groups, T, d).
        h: (m, c', groups, T', d).
        inner: Gives the (n', T, m', T') inner products of the other sides, for slices of examples and a group.
        out: (n c, m c').
    """
    n, c, groups, T, d = g.shape
    m, e, _, S, _ = h.shape
    for a, b in tiles(n, m, c * T * e * S):
        K = out[a.start * c : a.stop * c, b.start * e : b.stop * e]
        for j in range(groups):
            left, right = g[a, :, j].reshape(-1, d), h[b, :, j].reshape(-1, d)
            G, A = left @ right.T, inner(a, b, j)
            if c == T == e == S == 1:
                K.addcmul_(G, A[:, 0, :, 0])
            else:
                G = G.view(-1, c, T, b.stop - b.start, e, S).mul_(A[:, None, :, :, None, :])
                K += G.sum((2, 5)).view(K.shape)
