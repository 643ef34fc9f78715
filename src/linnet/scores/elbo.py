r"""The evidence lower bound of a variational autoencoder, one number per example and the same in every pass.

.. math:: \log p(x) \ge E_{q(z | x)} \log p(x | z) - KL(q(z | x) \| p(z))

The bound is an average over draws of z. The draws are made from the example itself (`draw_noise`). They do not depend
on the batch, the order or the device of the example, so the score is a function of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import messages

Encode = Callable[[nn.Module, Tensor], Any]
Decode = Callable[[nn.Module, Tensor], Any]
LogLikelihood = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Bound:
    """The ELBO of a model as a forward: ``bound(model, x)`` gives (n,)."""

    encode: Encode  # ``(model, x)`` to the mean and log variance of q(z | x), two tensors of one shape (n, ...)
    decode: Decode  # ``(model, z)`` to the values that the likelihood reads
    likelihood: str | LogLikelihood  # "bernoulli", "bernoulli-logits", "gaussian", or ``(x, decoded) -> (n,)``
    noise: float  # variance of the likelihood "gaussian"
    samples: int  # draws of z per example
    importance: bool  # whether to take the tighter bound of importance weights, ``log mean p(x, z) / q(z | x)``
    seed: int  # seed of the random draws

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        mean, log_variance = self._posterior(model, x)
        eps = draw_noise(x, (self.samples, *mean.shape[1:]), seed=self.seed).to(mean)
        z = mean[:, None] + (0.5 * log_variance).exp()[:, None] * eps  # (n, samples, ...)
        decoded = self.decode(model, z.flatten(0, 1))
        log_p = self._log_likelihood(x.repeat_interleave(self.samples, 0), decoded).view(len(x), self.samples)
        if self.importance:
            # log N(z; 0, 1) - log N(z; mean, variance), draw by draw
            ratio = 0.5 * (eps.square() - z.square() + log_variance[:, None]).flatten(2).sum(2)
            return torch.logsumexp(log_p + ratio, 1) - math.log(self.samples)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1)
        return log_p.mean(1) - kl

    def _posterior(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.encode(model, x)
        pair = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(t, Tensor) for t in found)
        if not pair or found[0].shape != found[1].shape or found[0].ndim < 2 or len(found[0]) != len(x):
            came = " and ".join(str(tuple(t.shape)) for t in found) if pair else messages.kind(found)
            raise ValueError(
                f"vae needs encode to return the mean and the log variance of q(z | x), two tensors of one shape "
                f"({len(x)}, ...); got {came}. Say how to read them: vae(encode=lambda model, x: (mean, log_variance))."
            )
        return found[0], found[1]

    def _log_likelihood(self, x: Tensor, decoded: Any) -> Tensor:
        given = self.likelihood
        fn = partial(LIKELIHOODS[given], noise=self.noise) if isinstance(given, str) else given
        out = fn(x, decoded)
        if not isinstance(out, Tensor) or out.shape != (len(x),):
            came = tuple(out.shape) if isinstance(out, Tensor) else messages.kind(out)
            raise ValueError(
                f"vae needs a likelihood that gives one number for each of the {len(x)} draws, ({len(x)},); got "
                f"{came}. Add up over the parts of x."
            )
        return out


def draw_noise(x: Tensor, shape: Sequence[int], *, seed: int = 0) -> Tensor:
    """Standard normal numbers that belong to each example, (n, *shape), in float64.

    The numbers are a function of the example's values (as float32) and the seed alone. They are the same in every
    batch, order, pass and process. Equal examples get equal numbers.

    Args:
        x: Examples (n, ...).
        shape: Shape of the numbers for one example.
        seed: Seed of the numbers.

    Example:
        >>> x = torch.arange(6.0).view(3, 2)
        >>> torch.equal(draw_noise(x, (4,))[1:2], draw_noise(x[1:2], (4,)))
        True
    """
    x = x.detach().reshape(len(x), -1)
    if x.is_complex():
        x = torch.view_as_real(x).flatten(1)
    # Zero has two signs, which compare equal.
    bits = (x.float() + 0.0).contiguous().view(torch.int32).long() if x.is_floating_point() else x.long()
    golden = -7046029254386353131  # 2^64 over the golden ratio, as a signed integer: the step of splitmix64
    place = _mix(torch.arange(x.shape[1], device=x.device) * golden + seed)
    key = _mix(_mix(bits + place).sum(1))  # integers wrap around, in any order of adding
    count = torch.arange(math.prod(shape), device=x.device) * golden
    uniform = ((_shift(_mix(key[:, None] + count), 11)).double() + 0.5) / 2**53
    return (torch.erfinv(2 * uniform - 1) * math.sqrt(2)).view(len(x), *shape)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit integers so that each bit changes half of the bits of the result (the finish of splitmix64)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shift(x, shift)) * factor
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Move bits down and fill with zeros; torch's own shift keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


# Log densities of x given the output of the decoder, summed over the parts of x.


def _bernoulli(x: Tensor, p: Any, noise: float) -> Tensor:
    """From probabilities. Where x is 0 or 1, a saturated p counts as its limit: 0 log 0 = 0."""
    x, p = _flatten_pair(x, p)
    one, zero = p.where(x > 0, 0.5), (1 - p).where(x < 1, 0.5)
    return (torch.where(x > 0, x * one.log(), 0.0) + torch.where(x < 1, (1 - x) * zero.log(), 0.0)).sum(1)


def _bernoulli_logits(x: Tensor, logits: Any, noise: float) -> Tensor:
    x, logits = _flatten_pair(x, logits)
    return (x * logits - nn.functional.softplus(logits)).sum(1)


def _gaussian(x: Tensor, decoded: Any, noise: float) -> Tensor:
    """From a mean, with one variance for all parts; or from a mean and a log variance."""
    mean, log_variance = decoded if isinstance(decoded, tuple | list) else (decoded, None)
    x, mean = _flatten_pair(x, mean)
    s = torch.full_like(mean, math.log(noise)) if log_variance is None else _flatten_pair(x, log_variance)[1]
    return -0.5 * ((x - mean).square() * (-s).exp() + s + math.log(2 * math.pi)).sum(1)


LIKELIHOODS = {"bernoulli": _bernoulli, "bernoulli-logits": _bernoulli_logits, "gaussian": _gaussian}
"""By name: ``(x, decoded, noise) -> (n,)``."""


def _flatten_pair(x: Tensor, decoded: Any) -> tuple[Tensor, Tensor]:
    """Both as (n, d)."""
    if not isinstance(decoded, Tensor) or len(decoded) != len(x) or decoded.numel() != x.numel():
        came = tuple(decoded.shape) if isinstance(decoded, Tensor) else messages.kind(decoded)
        raise ValueError(
            f"vae compares what decode returns with the inputs, {tuple(x.shape)} for these draws; got {came}. Say how "
            "to read it: vae(decode=lambda model, z: ...), or pass likelihood=lambda x, decoded: ..."
        )
    return x.flatten(1).to(decoded.dtype), decoded.flatten(1)
