"""Outputs with sites (pixels, tokens): several output vectors for each example, as one flat vector.

The first axis of an output holds the examples, and the second axis the outputs proper (classes, channels), as in
torch's losses. All further axes are sites. An output (n, c, h, w) holds h w observations of c outputs. It is flattened
to (n, h w c) with the sites first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from linnet.network import checks


@final
class FlatOutput:
    """Reads what a model returns as (n, sites * c), and remembers the shape that it had.

    Args:
        output: The same as for `linnet.linearize`.

    Attributes:
        shape: (c, *sites) of the last output with sites; () where no output had sites.

    Example:
        >>> import torch
        >>> read = FlatOutput()
        >>> read(torch.zeros(5, 3, 2, 4)).shape, read.shape
        (torch.Size([5, 24]), (3, 2, 4))
    """

    def __init__(self, output: Callable[[Any], Tensor] | None = None) -> None:
        self.output = output
        self.shape: tuple[int, ...] = ()

    def __call__(self, raw: Any) -> Tensor:
        out = checks.output_tensor(raw) if self.output is None else self.output(raw)
        if not isinstance(out, Tensor) or out.ndim <= 2:
            return out
        self.shape = tuple(out.shape[1:])
        return out.movedim(1, -1).flatten(1)


def unflattened(f: Tensor, shape: tuple[int, ...]) -> Tensor:
    """From (..., sites * c) to (..., c, *sites), for the ``shape`` of a `FlatOutput`.

    Example:
        >>> import torch
        >>> unflattened(torch.zeros(5, 24), (3, 2, 4)).shape
        torch.Size([5, 3, 2, 4])
    """
    return f.unflatten(-1, (*shape[1:], shape[0])).movedim(-1, f.ndim - 1) if shape else f
