r"""How targets y depend on the outputs f of a network: log density and its derivatives in f.

A `Likelihood` gives :math:`\log p(y \mid f)` for each example, its gradient in f (the residual), and the curvature
:math:`B`, the Fisher information in f: positive semi-definite, and for all but `Heteroscedastic` minus the second
derivative. ``B = L L^T`` with a root L. Both are diagonal for all but `Categorical`, and then stored as (n, c).

Every function of f takes (n, c), or more axes in front. `linnet.probability.expectations` has the averages over
Gaussian f.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Device = torch.device | str | None


class Likelihood(ABC):
    """The distribution of a target given the outputs of a network for one example.

    Attributes:
        diagonal: Whether B and its root are diagonal, and given as (n, c).
    """

    diagonal: bool = True

    @abstractmethod
    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """The targets of n examples for a network with c outputs, checked, as the other methods take them.

        Args:
            y: A tensor, array or list.
            n: Examples.
            c: Outputs of the network.
            dtype: Of floating targets; None keeps that of y, integers becoming torch's default.
            device: None keeps that of y.
        """

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f) of each example, (n,)."""

    @abstractmethod
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """The gradient of log p(y | f) in f, (n, c)."""

    @abstractmethod
    def curvature(self, f: Tensor) -> Tensor:
        """The Fisher information B in f, (n, c) where it is diagonal, else (n, c, c)."""

    @abstractmethod
    def root(self, f: Tensor) -> Tensor:
        """L with B = L L^T, of the shape of B."""

    @abstractmethod
    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]; class probabilities where y is a class."""

    @abstractmethod
    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        """KL(p(. | f) || p(. | other)) of each example, (n,)."""

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from p(. | f), in the form that `targets` returns."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@final
class Gaussian(Likelihood):
    """y ~ N(f, noise), outputs apart.

    Args:
        noise: The variance of the observation noise: one number, or (c,) for one per output.

    Example:
        >>> likelihood = Gaussian(0.25)
        >>> likelihood.residual(torch.zeros(2, 1), torch.ones(2, 1)).flatten()
        tensor([4., 4.])
        >>> likelihood.curvature(torch.zeros(2, 1)).shape
        torch.Size([2, 1])
    """

    def __init__(self, noise: float | Tensor) -> None:
        values = noise if isinstance(noise, Tensor) else torch.as_tensor(noise, dtype=torch.float64)
        if values.ndim > 1 or values.is_complex() or values.numel() == 0:
            raise ValueError(
                "The noise of Gaussian is a variance: one number, or one per output, (c,); "
                f"got {values.dtype} of shape {tuple(values.shape)}."
            )
        values, given = values.detach(), values
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ValueError(
                "The noise of Gaussian is a variance and must be positive and finite; "
                f"got {values.tolist()}. For data without noise use a small variance such as 1e-6 times that of y."
            )
        self.noise: float | Tensor = given if given.ndim else float(values)

    def __repr__(self) -> str:
        return f"Gaussian({self.noise if isinstance(self.noise, float) else self.noise.tolist()})"

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        self._variance(torch.empty(0, c))
        return _continuous("Gaussian", y, n, c, dtype, device)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        noise = self._variance(f)
        return -0.5 * ((y - f).square() / noise + torch.log(2 * math.pi * noise)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return (y - f) / self._variance(f)

    def curvature(self, f: Tensor) -> Tensor:
        return self._variance(f).reciprocal().expand(f.shape).contiguous()

    def root(self, f: Tensor) -> Tensor:
        return self._variance(f).rsqrt().expand(f.shape).contiguous()

    def mean(self, f: Tensor) -> Tensor:
        return f

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return 0.5 * ((f - other).square() / self._variance(f)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return f + self._variance(f).sqrt() * standard_normal(f.shape, f, generator)

    def _variance(self, f: Tensor) -> Tensor:
        """The noise (c,) of as many outputs as f has."""
        noise, c = self.noise, f.shape[-1]
        if isinstance(noise, float):
            return torch.full((c,), noise, dtype=f.dtype, device=f.device)
        if len(noise) != c:
            raise ValueError(
                f"Gaussian has noise for {len(noise)} outputs and the network has {c}. "
                f"Give one variance, or {c} of them."
            )
        return noise.to(f)


@final
class Heteroscedastic(Likelihood):
    """y ~ N(m, exp(s)) with m and s both outputs of the network: first the d means, then the d log variances, c = 2 d.

    The curvature is the Fisher information, exp(-s) for a mean and 1/2 for a log variance; minus the second derivative
    of log p has entries between the two as well, and can be indefinite.

    Example:
        >>> f = torch.tensor([[1.0, 0.0]])  # mean 1, variance exp(0)
        >>> Heteroscedastic().log_prob(f, torch.tensor([[1.0]]))
        tensor([-0.9189])
        >>> Heteroscedastic().curvature(f)
        tensor([[1.0000, 0.5000]])
    """

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        self.split(torch.empty(0, c))
        return _continuous("Heteroscedastic", y, n, c // 2, dtype, device)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = self.split(f)
        return -0.5 * ((y - m).square() * (-s).exp() + s + math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = self.split(f)
        scaled = (y - m) * (-s).exp()
        return torch.cat([scaled, 0.5 * ((y - m) * scaled - 1)], -1)

    def curvature(self, f: Tensor) -> Tensor:
        _, s = self.split(f)
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def root(self, f: Tensor) -> Tensor:
        _, s = self.split(f)
        return torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], -1)

    def mean(self, f: Tensor) -> Tensor:
        """The means, (n, d)."""
        return self.split(f)[0]

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        (m, s), (a, t) = self.split(f), self.split(other)
        return 0.5 * (torch.expm1(s - t) - (s - t) + (m - a).square() * (-t).exp()).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        m, s = self.split(f)
        return m + (0.5 * s).exp() * standard_normal(m.shape, m, generator)

    def split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The means and the log variances, (n, d) each."""
        if f.shape[-1] % 2:
            raise ValueError(
                "Heteroscedastic needs an even number of outputs, the means and then as many log variances; "
                f"the network has {f.shape[-1]}. Say how to read them with output=."
            )
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance


@final
class Bernoulli(Likelihood):
    """y in {0, 1} with logit f: two classes with one output, or c labels that are on or off apart from each other.

    Example:
        >>> f, y = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
        >>> Bernoulli().residual(f, y)
        tensor([[-0.5000,  0.5000]])
        >>> Bernoulli().curvature(f)
        tensor([[0.2500, 0.2500]])
    """

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        y = _continuous("Bernoulli", y, n, c, dtype, device)
        other = ((y != 0) & (y != 1)).any(1)
        if bool(other.any()):
            i = int(other.nonzero()[0])
            raise ValueError(
                f"Bernoulli needs targets 0 or 1; example {i} has {y[i].tolist()[:4]}. "
                "Encode the labels as 0 and 1, or use Categorical for more than two classes."
            )
        return y

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return F.logsigmoid((2 * y - 1) * f).sum(-1)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        sign = 2 * y - 1  # y - sigmoid(f), without the cancellation where they are close
        return sign * torch.sigmoid(-sign * f)

    def curvature(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f) * torch.sigmoid(-f)

    def root(self, f: Tensor) -> Tensor:
        return self.curvature(f).sqrt()

    def mean(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        on = torch.sigmoid(f) * (F.logsigmoid(f) - F.logsigmoid(other))
        off = torch.sigmoid(-f) * (F.logsigmoid(-f) - F.logsigmoid(-other))
        return (on + off).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        device = f.device if generator is None else generator.device
        u = torch.rand(f.shape, dtype=f.dtype, device=device, generator=generator)
        return (u.to(f.device) < torch.sigmoid(f)).to(f.dtype)


@final
class Categorical(Likelihood):
    """y in 0 .. c-1 with logits f (softmax).

    ``B = diag(pi) - pi pi^T`` is singular (adding a number to all logits changes nothing), so it has no inverse;
    its root is ``L = diag(sqrt(pi)) - pi sqrt(pi)^T``.

    Example:
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical().residual(f, y)
        tensor([[-0.5000,  0.5000]])
        >>> L = Categorical().root(f)
        >>> L @ L.mT
        tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]])
    """

    diagonal = False

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """Labels (n,), torch.long whatever the dtype."""
        y = _numbers("Categorical", y)
        if c < 2:
            raise ValueError(
                f"Categorical needs one output per class, at least 2; the network has {c}. Use Bernoulli for "
                "two classes with one output."
            )
        if tuple(y.shape) != (n,):
            hint = {(n, 1): " Use y[:, 0].", (n, c): " From one-hot rows take y.argmax(1)."}.get(tuple(y.shape), "")
            raise ValueError(
                f"Categorical needs one label for each of the {n} examples, shape ({n},); got {tuple(y.shape)}.{hint}"
            )
        _check_finite("Categorical", y)
        if y.is_floating_point():
            raise TypeError(f"Categorical needs labels that are integers 0 .. {c - 1}; got {y.dtype}. Use y.long().")
        outside = (y < 0) | (y >= c)
        if bool(outside.any()):
            i = int(outside.nonzero()[0])
            hint = (
                "Encode the labels as 0, 1, 2, ..."
                if int(y.min()) < 0
                else "There are more labels than outputs: attach a head with linnet.attach_head."
            )
            raise ValueError(f"Label {int(y[i])} of example {i} is outside 0 .. {c - 1}, the network's outputs. {hint}")
        return y.to(device=device, dtype=torch.long)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        log_pi = F.log_softmax(f, -1)
        return log_pi.gather(-1, y.expand(f.shape[:-1])[..., None])[..., 0]

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        # The entry of the label is the sum of the other probabilities: 1 - pi would cancel where pi is near 1.
        y = y.expand(f.shape[:-1])[..., None]
        others = torch.softmax(f, -1).scatter(-1, y, 0.0)
        return (-others).scatter(-1, y, others.sum(-1, keepdim=True))

    def curvature(self, f: Tensor) -> Tensor:
        pi = torch.softmax(f, -1)
        return laplacian(pi[..., :, None] * pi[..., None, :])

    def root(self, f: Tensor) -> Tensor:
        pi = torch.softmax(f, -1)
        c, s = f.shape[-1], pi.sqrt()
        others = pi @ (1 - torch.eye(c, dtype=f.dtype, device=f.device))  # 1 - pi, without cancellation
        L = -pi[..., :, None] * s[..., None, :]
        L.diagonal(dim1=-2, dim2=-1).copy_(s * others)
        return L

    def mean(self, f: Tensor) -> Tensor:
        return torch.softmax(f, -1)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        return (torch.softmax(f, -1) * (F.log_softmax(f, -1) - F.log_softmax(other, -1))).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        device = f.device if generator is None else generator.device
        waiting = torch.empty(f.shape, dtype=f.dtype, device=device).exponential_(generator=generator)
        return (F.log_softmax(f, -1) - waiting.to(f.device).log()).argmax(-1)  # the largest of c Gumbel variables


LIKELIHOODS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Gaussian, Heteroscedastic, Bernoulli, Categorical)
}
"""Likelihoods by the names that files have for them."""

NAMES = ("classification", "regression", "heteroscedastic")
"""Names that users may write for a likelihood."""


def likelihood_for(
    name: str | Likelihood, targets: Tensor | np.ndarray, outputs: Sequence[int], *, noise: float | Tensor = 1.0
) -> Likelihood:
    """The likelihood that a user's name stands for.

    "regression" is `Gaussian`. "classification" is `Bernoulli` for one output, and for several outputs with a target
    for each of them, labels that are on or off; else it is `Categorical`.

    Args:
        name: One of `NAMES`, or a likelihood, which is returned as it is.
        targets: Their number of axes tells whether there is a target for each output.
        outputs: Shape of the output of an example, (c,) or (c, *sites).
        noise: Variance of "regression".

    >>> [likelihood_for("classification", torch.zeros(shape), (3,)) for shape in ((5,), (5, 3))]
    [Categorical(), Bernoulli()]
    """
    if isinstance(name, Likelihood):
        return name
    if name not in NAMES:
        raise ValueError(
            f"likelihood must be one of {', '.join(map(repr, NAMES))} or a linnet.likelihoods.Likelihood; got {name!r}."
        )
    if name == "regression":
        return Gaussian(noise)
    if name == "heteroscedastic":
        return Heteroscedastic()
    return Bernoulli() if outputs[0] == 1 or targets.ndim == 1 + len(outputs) else Categorical()


# Targets.


def _numbers(name: str, y: Any) -> Tensor:
    """Targets as a tensor of real numbers."""
    if not isinstance(y, Tensor):
        array = np.asarray(y)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"{name} needs targets that are numbers; got {type(y).__name__} of {array.dtype}. "
                "Encode labels as integers first."
            )
        # A copy: tensors cannot share arrays that are read-only or of unsigned integers.
        y = torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "biu" else array.dtype.newbyteorder("=")))
    if y.is_complex():
        raise TypeError(f"{name} needs targets that are real numbers; got {y.dtype}.")
    return y.detach()


def _continuous(name: str, y: Any, n: int, d: int, dtype: torch.dtype | None, device: Device) -> Tensor:
    """Floating targets (n, d), from (n,) too where d = 1."""
    y = _numbers(name, y)
    y = y.to(device=device, dtype=dtype or (y.dtype if y.is_floating_point() else torch.get_default_dtype()))
    if tuple(y.shape) not in (((n, 1), (n,)) if d == 1 else ((n, d),)):
        one = f" or ({n},)" if d == 1 else ""
        raise ValueError(f"{name} needs targets of shape ({n}, {d}){one}, a row per example; got {tuple(y.shape)}.")
    _check_finite(name, y)
    return y.reshape(n, d)


def _check_finite(name: str, y: Tensor) -> None:
    bad = ~torch.isfinite(y).reshape(len(y), -1).all(1)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} needs targets that are finite; {int(bad.sum())} of {len(y)} examples have NaN or infinity, the "
            f"first is example {i}: {y[i].flatten().tolist()[:4]}. Remove them, with their inputs."
        )


# Matrices and draws.


def laplacian(W: Tensor) -> Tensor:
    """``diag(W' 1) - W'`` with W' the matrix without its diagonal: ``diag(pi) - pi pi^T`` from ``pi pi^T``.

    Rows add up to zero to the last digit, and the matrix is positive semi-definite however small the entries.
    """
    W = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(W.sum(-1)) - W


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws from N(0, 1) for ``like``, made on the generator's device: a seed gives the same ones everywhere."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)
