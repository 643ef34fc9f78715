"""A likelihood for every site (pixel, token) of an example, for networks whose outputs `FlatOutput` has flattened.

Targets have shape (n, *sites) for classes, and (n, c, *sites) for numbers.
"""

from __future__ import annotations

from math import prod
from typing import Any, final

import torch
from torch import Tensor

from linnet.probability.likelihoods import Bernoulli, Categorical, Device, Likelihood, Ordinal


@final
class Sites(Likelihood):
    """The same likelihood at every site of an example.

    Args:
        inner: Likelihood of one site.
        shape: (c, *sites), the shape of the network's output for one example.
        ignore_index: Label of sites that count for nothing, where a site has one label. The gradient and the log
            density of such a site are zero, and so is its observed curvature.

    Example:
        >>> from linnet.probability.likelihoods import Categorical
        >>> Sites(Categorical(), (3, 2, 2)).log_prob(torch.zeros(5, 12), torch.zeros(5, 4).long()).shape
        torch.Size([5])
    """

    def __init__(self, inner: Likelihood, shape: tuple[int, ...], ignore_index: int | None = None) -> None:
        one_label = isinstance(inner, Categorical | Ordinal) or (isinstance(inner, Bernoulli) and shape[0] == 1)
        self.inner, self.shape, self.ignore_index = inner, shape, ignore_index if one_label else None
        self.count = prod(shape[1:])
        self.diagonal = inner.diagonal

    def __repr__(self) -> str:
        return f"Sites({self.inner!r}, {self.shape})"

    def split(self, f: Tensor) -> Tensor:
        """From (..., sites * c) to (..., sites, c)."""
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
        ignored = torch.zeros_like(rows, dtype=torch.bool)
        if self.ignore_index is not None and not rows.is_floating_point():
            ignored = rows == self.ignore_index
            rows = rows.masked_fill(ignored, 0)
        found = self.inner.targets(rows, n * self.count, outputs, dtype=dtype, device=device)
        if bool(ignored.any()):
            found = found.masked_fill(ignored.view_as(found).to(found.device), self.ignore_index or 0)
        return found.view(n, self.count, *found.shape[1:])

    def is_kept(self, y: Tensor) -> Tensor | None:
        """Which sites count, (n, sites); None for all sites."""
        if self.ignore_index is None:
            return None
        kept = (y != self.ignore_index).view(*y.shape[:1], self.count)
        return None if bool(kept.all()) else kept

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self.is_kept(y)
        found = self.inner.log_prob(self.split(f), self._with_labels(y, kept))
        return (found if kept is None else found * kept).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self.is_kept(y)
        found = self.inner.residual(self.split(f), self._with_labels(y, kept))
        return (found if kept is None else found * kept[..., None]).flatten(-2)

    def _with_labels(self, y: Tensor, kept: Tensor | None) -> Tensor:
        """Targets with some label at the sites that do not count."""
        return y if kept is None else y.masked_fill(~kept.view_as(y), 0)

    def curvature(self, f: Tensor) -> Tensor:
        return self._place_blocks(self.inner.curvature(self.split(f)))

    def root(self, f: Tensor) -> Tensor:
        return self._place_blocks(self.inner.root(self.split(f)))

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self.is_kept(y)
        found = self.inner.observed_curvature(self.split(f), self._with_labels(y, kept))
        return self._place_blocks(self._leave_out(found, kept))

    def observed_root(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self.is_kept(y)
        found = self.inner.observed_root(self.split(f), self._with_labels(y, kept))
        return self._place_blocks(self._leave_out(found, kept))

    def _leave_out(self, blocks: Tensor, kept: Tensor | None) -> Tensor:
        """Blocks or diagonals of the sites, with zeros at the sites that do not count."""
        if kept is None:
            return blocks
        return blocks * (kept[..., None] if self.diagonal else kept[..., None, None])

    def mean(self, f: Tensor) -> Tensor:
        return self.inner.mean(self.split(f)).flatten(-2)

    def variance(self, f: Tensor) -> Tensor:
        return self.inner.variance(self.split(f)).flatten(-2)

    @property
    def is_open(self) -> bool:
        return self.inner.is_open

    def fitted(self, f: Tensor, y: Tensor, weight: Tensor | None = None) -> Sites:
        """With the parameters of the inner likelihood that suit all sites that count."""
        kept = self.is_kept(y)
        rows, labels = self.split(f).flatten(0, 1), self._with_labels(y, kept).flatten(0, 1)
        each = torch.ones_like(rows[:, 0]) if kept is None else kept.flatten().to(rows)
        each = each if weight is None else each * weight.to(rows).repeat_interleave(self.count)
        return Sites(self.inner.fitted(rows, labels, each), self.shape, self.ignore_index)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return self.inner.kl(self.split(f), self.split(other)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.sample(self.split(f), generator)

    def _place_blocks(self, blocks: Tensor) -> Tensor:
        """Matrices of the sites, (..., sites, c, c), as the blocks of one matrix; diagonals as one diagonal."""
        if self.diagonal:
            return blocks.flatten(-2)
        *front, m, c, _ = blocks.shape
        out = blocks.new_zeros(*front, m, c, m, c)
        at = torch.arange(m, device=blocks.device)
        out[..., at, :, at, :] = blocks.movedim(-3, 0)
        return out.view(*front, m * c, m * c)

    def site_blocks(self, cov: Tensor) -> Tensor:
        """The blocks of single sites, (n * sites, c, c), of covariances (n, sites * c, sites * c)."""
        n, c = len(cov), self.shape[0]
        parts = cov.view(n, self.count, c, self.count, c)
        return parts.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(n * self.count, c, c)
