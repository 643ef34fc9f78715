"""Examples that count more or less than once."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor

from linnet.probability.likelihoods.base import Device, Likelihood, as_numbers


@final
class Weighted(Likelihood):
    """A likelihood whose log density is multiplied by a weight of each example.

    An example of weight two counts as the same example given twice, in the mode, in the curvature and in the evidence.
    The weights travel with the targets, (n, k + 1): the numbers of each target, then its weight.

    Args:
        inner: The likelihood of one example.
        shape: Shape of the target of an example.
        integer: Whether targets are labels.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> likelihood, y = Weighted.pack(Bernoulli(), torch.ones(2, 1), torch.tensor([1.0, 3.0]))
        >>> likelihood.residual(torch.zeros(2, 1), y).flatten()
        tensor([0.5000, 1.5000])
    """

    def __init__(self, inner: Likelihood, shape: tuple[int, ...], integer: bool) -> None:
        self.inner, self.shape, self.integer = inner, shape, integer
        self.diagonal = inner.diagonal

    @classmethod
    def pack(cls, inner: Likelihood, y: Tensor, weight: Tensor) -> tuple[Self, Tensor]:
        """The likelihood, and targets with their weights; y as ``inner.targets`` gives them, weight (n,)."""
        packed = torch.cat([y.to(weight).reshape(len(y), -1), weight[:, None]], 1)
        return cls(inner, tuple(y.shape[1:]), not y.is_floating_point()), packed

    def with_inner(self, inner: Likelihood) -> Weighted:
        """The same weights with another likelihood."""
        return Weighted(inner, self.shape, self.integer)

    def __repr__(self) -> str:
        return f"Weighted({self.inner!r})"

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as the inner likelihood takes them, and weights (n,)."""
        found = y[..., :-1].reshape(*y.shape[:-1], *self.shape)
        return found.long() if self.integer else found, y[..., -1]

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        y = torch.as_tensor(y, dtype=dtype, device=device)
        found, weight = self.split(y)
        found = self.inner.targets(found, n, c, dtype=dtype, device=device)
        return self.pack(self.inner, found, weight)[1]

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.split(y)
        return w * self.inner.log_prob(f, y)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.split(y)
        return w[..., None] * self.inner.residual(f, y)

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.split(y)
        B = self.inner.observed_curvature(f, y)
        return B * (w[..., None] if self.diagonal else w[..., None, None])

    def observed_root(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.split(y)
        L = self.inner.observed_root(f, y)
        return L * (w[..., None] if self.diagonal else w[..., None, None]).sqrt()

    def curvature(self, f: Tensor) -> Tensor:
        """Of an example of weight one."""
        return self.inner.curvature(f)

    def mean(self, f: Tensor) -> Tensor:
        return self.inner.mean(f)

    def variance(self, f: Tensor) -> Tensor:
        return self.inner.variance(f)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return self.inner.kl(f, other)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets of the inner likelihood, without weights."""
        return self.inner.sample(f, generator)


def without_weights(likelihood: Likelihood) -> Likelihood:
    """The likelihood of an example of weight one."""
    return likelihood.inner if isinstance(likelihood, Weighted) else likelihood


def as_weights(sample_weight: Any, n: int) -> Tensor | None:
    """Weights of n examples, checked, (n,) in float64; None where every weight is one.

    >>> as_weights([1, 2], 2), as_weights([1.0, 1.0], 2)
    (tensor([1., 2.], dtype=torch.float64), None)
    """
    if sample_weight is None:
        return None
    w = as_numbers("sample_weight", sample_weight)
    if tuple(w.shape) != (n,):
        raise ValueError(
            f"sample_weight needs one weight for each of the {n} examples, shape ({n},); got {tuple(w.shape)}."
        )
    w = w.double()
    bad = ~torch.isfinite(w) | (w < 0)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"sample_weight must be finite and not negative; example {i} has {float(w[i])}. Leave an example out with "
            "the weight 0."
        )
    if not bool((w > 0).any()):
        raise ValueError(f"All {n} weights in sample_weight are zero: there is nothing to fit.")
    return None if bool((w == 1).all()) else w
