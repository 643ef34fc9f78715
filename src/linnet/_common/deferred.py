"""Work on rows that is put off until there are many."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linnet._common.memory import TEMPORARY


class Deferred:
    """Rows that come batch by batch, and a function that is called with the rows of many batches: a GPU need not wait.

    Args:
        fn: Called with the rows of all batches so far, joined, whenever there are many, and at the end.
        most: Entries that are held before the function is called.

    Example:
        >>> sums = []
        >>> later = Deferred(lambda f: sums.append(f.sum().item()))
        >>> later.add(torch.ones(2)), later.add(torch.ones(3)), later.finish(), sums
        (None, None, None, [5.0])
    """

    def __init__(self, fn: Callable[..., object], *, most: int = TEMPORARY) -> None:
        self._fn, self._most, self._count = fn, most, 0
        self._held: list[tuple[Tensor, ...]] = []

    def add(self, *rows: Tensor) -> None:
        """Tensors with one row for each example of a batch."""
        self._held.append(rows)
        self._count += rows[0].numel()
        if self._count > self._most:
            self.finish()

    def close(self) -> None:
        """Call the function now, and at once for rows that still come."""
        self._most = -1
        self.finish()

    def finish(self) -> None:
        """Call the function with the rows that are held."""
        held, self._held, self._count = self._held, [], 0
        if held:
            self._fn(*(torch.cat(column) for column in zip(*held, strict=True)))
