"""The likelihood of times until an event, some of which were censored: not seen to their end."""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from linnet.probability.likelihoods.base import (
    Device,
    ExponentialMean,
    as_numbers,
    check_finite,
    maximize_positive,
    weights_of,
)


@final
class Weibull(ExponentialMean):
    r"""Times until an event: ``log t = f + e / k`` with e of the Gumbel distribution (accelerated failure times).

    .. math:: P(T > t \mid f) = \exp(-(t e^{-f})^k)

    Targets have two columns, (n, 2): the time, and 1 where the event was seen at that time or 0 where the example was
    last seen without it (right censoring). A structured array with a field of booleans and a field of numbers, as
    scikit-survival has, serves too. A shape k of one is the exponential distribution.

    Args:
        shape: k, positive. None leaves it open: an estimator takes that of largest likelihood at its mean function.

    Example:
        >>> seen, censored = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]])
        >>> Weibull(1.0).log_prob(torch.zeros(1, 1), seen), Weibull(1.0).log_prob(torch.zeros(1, 1), censored)
        (tensor([-1.]), tensor([-1.]))
    """

    def __init__(self, shape: float | None = None) -> None:
        if shape is not None and not 0 < float(shape) < math.inf:
            raise ValueError(f"shape must be a positive number; got {shape!r}. One is the exponential distribution.")
        self.shape = None if shape is None else float(shape)

    def __repr__(self) -> str:
        return f"Weibull({'' if self.shape is None else format(self.shape, '.4g')})"

    @property
    def is_open(self) -> bool:
        return self.shape is None

    def settings(self) -> dict[str, Any]:
        return {} if self.shape is None else {"shape": self.shape}

    @property
    def k(self) -> float:
        """The shape, where it is known."""
        if self.shape is None:
            raise ValueError(
                "The shape of Weibull() is open: give it, as in Weibull(1.0), or let an estimator find it with fit."
            )
        return self.shape

    @property
    def powers(self) -> tuple[float, float, float]:
        first, second = math.gamma(1 + 1 / self.k), math.gamma(1 + 2 / self.k)
        return first, 0.0, second - first**2

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """Times and flags, (n, 2)."""
        y = as_numbers("Weibull", _columns(y))
        if c != 1:
            raise ValueError(
                f"Weibull needs a network with one output, the logarithm of the time; the network has {c}. Choose one "
                "with output=."
            )
        if tuple(y.shape) != (n, 2):
            hint = (
                " For times that all ended with the event, add a column of ones."
                if y.ndim == 1 or y.shape[1:] == (1,)
                else ""
            )
            raise ValueError(
                f"Weibull needs targets of shape ({n}, 2): times, and 1 where the event was seen or 0 where it was "
                f"not; got {tuple(y.shape)}.{hint}"
            )
        y = y.to(device=device, dtype=dtype or (y.dtype if y.is_floating_point() else torch.get_default_dtype()))
        check_finite("Weibull", y)
        if not bool((y[:, 0] > 0).all()):
            i = int((y[:, 0] <= 0).nonzero()[0])
            raise ValueError(f"Weibull needs times that are positive; example {i} has {float(y[i, 0])}.")
        other = (y[:, 1] != 0) & (y[:, 1] != 1)
        if bool(other.any()):
            i = int(other.nonzero()[0])
            raise ValueError(
                "Weibull needs flags 1 (the event was seen) or 0 (censored) in the second column; example "
                f"{i} has {float(y[i, 1])}."
            )
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        time, seen = y[..., :1], y[..., 1:]
        z = self.k * (time.log() - f)
        return (seen * (math.log(self.k) + z - time.log()) - z.exp())[..., 0]

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return self.k * ((self.k * (y[..., :1].log() - f)).exp() - y[..., 1:])

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        return self.k**2 * (self.k * (y[..., :1].log() - f)).exp()

    def curvature(self, f: Tensor) -> Tensor:
        """The Fisher information of a time that is seen to its end."""
        return torch.full_like(f, self.k**2)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        """Of times that are seen to their end."""
        z = self.k * (f - other)
        return (torch.expm1(z) - z)[..., 0]

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Times that are seen to their end."""
        device = f.device if generator is None else generator.device
        waiting = torch.empty(f.shape, dtype=f.dtype, device=device).exponential_(generator=generator).to(f.device)
        time = f.exp() * waiting ** (1 / self.k)
        return torch.cat([time, torch.ones_like(time)], -1)

    def fitted(self, f: Tensor, y: Tensor, weight: Tensor | None = None) -> Weibull:
        if self.shape is not None:
            return self
        if not bool((y[:, 1] > 0).any()):
            raise ValueError(
                "No event was seen, so that the times say nothing of the shape of Weibull(). Give it, as in "
                "linnet.likelihoods.Weibull(1.0)."
            )
        f, y, w = f.double(), y.double(), weights_of(weight, f).double()
        return Weibull(maximize_positive(lambda k: float((w * Weibull(k).log_prob(f, y)).sum()), 1e-2, 1e2))


def _columns(y: Any) -> Any:
    """A structured array as two columns: the field of numbers, then the field of booleans."""
    names = getattr(getattr(y, "dtype", None), "names", None)
    if isinstance(y, Tensor) or not names:
        return y
    flags = [name for name in names if y.dtype[name].kind == "b"]
    times = [name for name in names if y.dtype[name].kind in "fiu"]
    if len(flags) != 1 or len(times) != 1:
        raise TypeError(
            "A structured array of times needs one field of booleans (whether the event was seen) and one of numbers "
            f"(the time); got {y.dtype}."
        )
    return np.stack([y[times[0]].astype(float), y[flags[0]].astype(float)], 1)
