"""Likelihoods of classes: two of them, several, or several in an order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.probability.likelihoods.base import (
    Device,
    Likelihood,
    as_continuous,
    as_numbers,
    check_finite,
    weights_of,
)


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
        y = as_continuous("Bernoulli", y, n, c, dtype, device)
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

    def variance(self, f: Tensor) -> Tensor:
        return self.curvature(f)

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
        y = as_numbers("Categorical", y)
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
        check_finite("Categorical", y)
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


@final
class Ordinal(Likelihood):
    r"""Classes in an order, 0 < 1 < ... < K - 1, from one output: the cumulative logit model.

    .. math:: P(y \le k \mid f) = \sigma(b_k - f), \qquad b_0 < b_1 < \dots < b_{K-2}

    A larger f means a higher class. The two logistic terms of a class are log-concave, and so is their product.

    Args:
        thresholds: b, rising, one fewer than there are classes. None leaves them open: an estimator takes those of
            largest likelihood at its mean function, for which every class must have an example.

    Example:
        >>> Ordinal([-1.0, 1.0]).mean(torch.zeros(1, 1))
        tensor([[0.2689, 0.4621, 0.2689]])
    """

    def __init__(self, thresholds: Sequence[float] | Tensor | None = None) -> None:
        self.thresholds: Tensor | None = None
        if thresholds is None:
            return
        values = torch.as_tensor(thresholds, dtype=torch.float64).detach().cpu()
        if values.ndim != 1 or len(values) == 0 or not bool(torch.isfinite(values).all()):
            raise ValueError(f"thresholds are finite numbers, one fewer than there are classes; got {values.tolist()}.")
        if not bool((values.diff() > 0).all()):
            raise ValueError(f"thresholds must rise from class to class; got {values.tolist()}.")
        self.thresholds = values

    def __repr__(self) -> str:
        return "Ordinal()" if self.thresholds is None else f"Ordinal({[round(t, 4) for t in self.thresholds.tolist()]})"

    @property
    def is_open(self) -> bool:
        return self.thresholds is None

    def settings(self) -> dict[str, Any]:
        return {} if self.thresholds is None else {"thresholds": self.thresholds.tolist()}

    @property
    def classes(self) -> int | None:
        """The number of classes; None while the thresholds are open."""
        return None if self.thresholds is None else len(self.thresholds) + 1

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """Labels (n,), torch.long whatever the dtype."""
        y = as_numbers("Ordinal", y)
        if c != 1:
            raise ValueError(
                f"Ordinal needs a network with one output, which is larger for higher classes; the network has {c}. "
                "Choose one with output=, or use Categorical."
            )
        y = y[:, 0] if tuple(y.shape) == (n, 1) else y
        if tuple(y.shape) != (n,):
            raise ValueError(f"Ordinal needs one label for each of the {n} examples, ({n},); got {tuple(y.shape)}.")
        check_finite("Ordinal", y)
        if y.is_floating_point():
            raise TypeError(f"Ordinal needs labels that are integers 0, 1, 2, ...; got {y.dtype}. Use y.long().")
        outside = (y < 0) if self.classes is None else (y < 0) | (y >= self.classes)
        if bool(outside.any()):
            i = int(outside.nonzero()[0])
            known = "0, 1, 2, ..." if self.classes is None else f"0 .. {self.classes - 1}, the classes of {self!r}"
            raise ValueError(f"Label {int(y[i])} of example {i} is outside {known}.")
        return y.to(device=device, dtype=torch.long)

    def bounds(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The distances of f below the upper threshold of its class and above the lower one, (..., n, 1); infinite for
        the last and the first class. And the logarithm of the share of both terms that is the class's own."""
        b = self.known_thresholds(f)
        b = torch.cat([b.new_tensor([-math.inf]), b, b.new_tensor([math.inf])])
        lower, upper = b[y][..., None], b[y + 1][..., None]
        # s(u - f) - s(l - f) = s(u - f) s(f - l) (1 - exp(l - u)), so that nothing cancels.
        return upper - f, f - lower, torch.log(-torch.expm1(lower - upper))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        below, above, share = self.bounds(f, y)
        return (F.logsigmoid(below) + F.logsigmoid(above) + share)[..., 0]

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        below, above, _ = self.bounds(f, y)
        return torch.sigmoid(-above) - torch.sigmoid(-below)

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        below, above, _ = self.bounds(f, y)
        return sum(torch.sigmoid(x) * torch.sigmoid(-x) for x in (below, above))  # type: ignore[return-value]

    def curvature(self, f: Tensor) -> Tensor:
        """The average of the observed curvature over the classes."""
        p = self.mean(f)
        each = [self.observed_curvature(f, torch.full(f.shape[:-1], k, device=f.device)) for k in range(p.shape[-1])]
        return (p * torch.cat(each, -1)).sum(-1, keepdim=True)

    def mean(self, f: Tensor) -> Tensor:
        """Class probabilities, (n, K)."""
        return self.log_probabilities(f).exp()

    def log_probabilities(self, f: Tensor) -> Tensor:
        """log p of every class, (n, K)."""
        count = len(self.known_thresholds(f)) + 1
        each = [self.log_prob(f, torch.full(f.shape[:-1], k, device=f.device)) for k in range(count)]
        return torch.stack(each, -1)

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        p, q = self.log_probabilities(f), self.log_probabilities(other)
        return (p.exp() * (p - q)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        device = f.device if generator is None else generator.device
        u = torch.rand(f.shape, dtype=f.dtype, device=device, generator=generator).to(f.device)
        noisy = f + torch.logit(u)  # the class whose thresholds lie about f plus logistic noise
        return (noisy >= self.known_thresholds(f)).sum(-1)

    def fitted(self, f: Tensor, y: Tensor, weight: Tensor | None = None) -> Ordinal:
        """With the thresholds of largest likelihood, by Newton's method: the problem is concave."""
        if self.thresholds is not None:
            return self
        f, w = f.detach().double().cpu(), weights_of(weight, f).double().cpu()
        y = y.cpu()
        count = int(y.max()) + 1
        totals = torch.zeros(count, dtype=torch.float64).index_add_(0, y, w)
        missing = [k for k in range(count) if totals[k] <= 0]
        if missing or count < 2:
            what = f"class {missing[0]} has no example" if missing else "there is one class"
            raise ValueError(
                f"The thresholds of Ordinal() come from the labels, and {what}. Give them, as in "
                "linnet.likelihoods.Ordinal([-1.0, 0.0, 1.0]), or label the classes 0, 1, 2, ... without a gap."
            )

        def value(b: Tensor) -> Tensor:
            return (w * _OpenOrdinal(b).log_prob(f, y)).sum()

        share = totals.cumsum(0)[:-1] / totals.sum()
        b = torch.logit(share) + (w[:, None] * f).sum() / w.sum()
        for _ in range(100):
            at = b.clone().requires_grad_()
            (g,) = torch.autograd.grad(value(at), at)
            H = torch.autograd.functional.hessian(value, b)
            step = -torch.linalg.solve(H, g)
            now, t = float(value(b)), 1.0
            while t > 1e-12:  # until the thresholds rise and the likelihood does
                new = b + t * step
                if bool((new.diff() > 0).all()) and float(value(new)) >= now:
                    break
                t /= 2
            if t <= 1e-12:
                break
            b = b + t * step
            if float(step.abs().max()) * t <= 1e-12 * max(1.0, float(b.abs().max())):
                break
        return Ordinal(b)

    def known_thresholds(self, f: Tensor) -> Tensor:
        """The thresholds for outputs like f; an error where they are open."""
        if self.thresholds is None:
            raise ValueError(
                "The thresholds of Ordinal() are open: give them, as in Ordinal([-1.0, 1.0]), or let an estimator "
                "find them with fit."
            )
        return self.thresholds.to(f)


class _OpenOrdinal:
    """The log density as a function of thresholds that may require a gradient."""

    def __init__(self, thresholds: Tensor) -> None:
        self.thresholds = thresholds

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """As `Ordinal.log_prob`, without infinite terms, whose derivatives would be none."""
        b, last = self.thresholds, len(self.thresholds)
        upper, lower = b[y.clamp(max=last - 1)], b[(y - 1).clamp(min=0)]
        first, top = y == 0, y == last
        inside = ~(first | top)
        gap = torch.where(inside, upper - lower, 1.0)
        return (
            torch.where(top, 0.0, F.logsigmoid(upper - f[:, 0]))
            + torch.where(first, 0.0, F.logsigmoid(f[:, 0] - lower))
            + torch.where(inside, torch.log(-torch.expm1(-gap)), 0.0)
        )


def laplacian(W: Tensor) -> Tensor:
    """``diag(W' 1) - W'`` with W' the matrix without its diagonal: ``diag(pi) - pi pi^T`` from ``pi pi^T``.

    Rows add up to zero to the last digit, and the matrix is positive semi-definite however small the entries.
    """
    W = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(W.sum(-1)) - W
