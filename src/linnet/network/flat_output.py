"""Networks with more than one output vector per example: pixels, tokens.

The rule: the first axis of the output are the examples and the second the outputs proper (classes, channels), as
torch's losses have it; all further axes are sites. An output (n, c, h, w) is h w observations of c outputs, flattened
to (n, h w c) with the sites first, and targets follow: (n, h, w) for classes, (n, c, h, w) for numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from linnet._common import messages
from linnet.probability.likelihoods import Device, Likelihood


@final
class FlatOutput:
    """What a model returns as (n, sites * c); the shape that it had is remembered.

    Args:
        output: As for `linnet.linearize`.

    Example:
        >>> read = FlatOutput()
        >>> read(torch.zeros(5, 3, 2, 4)).shape, read.shape
        (torch.Size([5, 24]), (3, 2, 4))
    """

    def __init__(self, output: Callable[[Any], Tensor] | None = None) -> None:
        self.output = output
        self.shape: tuple[int, ...] = ()

    def __call__(self, raw: Any) -> Tensor:
        out = messages.output_tensor(raw) if self.output is None else self.output(raw)
        if not isinstance(out, Tensor) or out.ndim <= 2:
            return out
        self.shape = tuple(out.shape[1:])
        return out.movedim(1, -1).flatten(1)


def unflattened(f: Tensor, shape: tuple[int, ...]) -> Tensor:
    """From (..., sites * c) to (..., c, *sites), for the ``shape`` of a `FlatOutput`.

    >>> unflattened(torch.zeros(5, 24), (3, 2, 4)).shape
    torch.Size([5, 3, 2, 4])
    """
    return f.unflatten(-1, (*shape[1:], shape[0])).movedim(-1, f.ndim - 1) if shape else f


@final
class Sites(Likelihood):
    """The same likelihood at every site of an example.

    Args:
        inner: Of one site.
        shape: (c, *sites).
    """

    def __init__(self, inner: Likelihood, shape: tuple[int, ...]) -> None:
        self.inner, self.shape = inner, shape
        self.count = prod(shape[1:])
        self.diagonal = inner.diagonal

    def __repr__(self) -> str:
        return f"Sites({self.inner!r}, {self.shape})"

    def split(self, f: Tensor) -> Tensor:
        """(..., sites * c) to (..., sites, c)."""
        return f.unflatten(-1, (self.count, self.shape[0]))

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        y = torch.as_tensor(y)
        outputs, *sites = self.shape
        if tuple(y.shape) == (n, *self.shape):
            rows = y.movedim(1, -1).reshape(n * self.count, outputs)
        elif tuple(y.shape) == (n, *sites):
            rows = y.reshape(n * self.count)
        else:
            raise ValueError(
                f"The network's output has shape ({n}, {', '.join(map(str, self.shape))}), so targets need shape "
                f"({n}, {', '.join(map(str, sites))}) for classes, or that of the output; got {tuple(y.shape)}."
            )
        found = self.inner.targets(rows, n * self.count, outputs, dtype=dtype, device=device)
        return found.view(n, self.count, *found.shape[1:])

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.inner.log_prob(self.split(f), y).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.inner.residual(self.split(f), y).flatten(-2)

    def curvature(self, f: Tensor) -> Tensor:
        return self._placed(self.inner.curvature(self.split(f)))

    def root(self, f: Tensor) -> Tensor:
        return self._placed(self.inner.root(self.split(f)))

    def mean(self, f: Tensor) -> Tensor:
        return self.inner.mean(self.split(f)).flatten(-2)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return self.inner.kl(self.split(f), self.split(other)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.sample(self.split(f), generator)

    def _placed(self, blocks: Tensor) -> Tensor:
        """Matrices of the sites, (..., sites, c, c), as the blocks of one; diagonals as one diagonal."""
        if self.diagonal:
            return blocks.flatten(-2)
        *front, m, c, _ = blocks.shape
        out = blocks.new_zeros(*front, m, c, m, c)
        at = torch.arange(m, device=blocks.device)
        out[..., at, :, at, :] = blocks.movedim(-3, 0)
        return out.view(*front, m * c, m * c)

    def site_blocks(self, cov: Tensor) -> Tensor:
        """The blocks of single sites of covariances (n, sites * c, sites * c), (n * sites, c, c)."""
        n, c = len(cov), self.shape[0]
        parts = cov.view(n, self.count, c, self.count, c)
        return parts.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(n * self.count, c, c)
