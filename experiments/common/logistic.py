r"""Logistic regression by L-BFGS on a device, for many penalties at once, on features or on a kernel.

.. math:: \min_{W, b} \frac{1}{n} \sum_i -\log \mathrm{softmax}(W^\top z_i + b)_{y_i} + \frac{\lambda}{2 n} \|W\|^2

For a kernel, W is a combination of the features of the examples, and all inner products are those of the features. So
both forms take the same steps. Outputs are linear in W: a search along a line takes no product with the data, and a
step takes one product with the features and one with their transpose, or one with the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HISTORY = 10  # pairs of steps and gradients that L-BFGS holds
LOOK = 10  # steps between two looks at the gradients, which wait for the device


@dataclass(frozen=True)
class Logistic:
    """Fitted regressions, one for each penalty.

    Attributes:
        W: Weights of the features, or of the examples whose kernel it was fitted to, (penalties, d, c).
        b: Intercepts, (penalties, c).
        converged: Whether each has reached the tolerance, (penalties,).
        steps: Number of steps that were taken.
    """

    W: Tensor
    b: Tensor
    converged: Tensor
    steps: int

    def outputs(self, Z: Tensor) -> Tensor:
        """Logits (penalties, m, c) for features (m, d), or for kernels (m, n) with the examples of the fit."""
        return _multiply(Z, self.W) + self.b[:, None]


def fit_logistic(
    Z: Tensor,
    y: Tensor,
    penalties: Tensor,
    *,
    classes: int,
    kernel: bool = False,
    weight: Tensor | None = None,
    tolerance: float = 1e-4,
    steps: int = 2000,
) -> Logistic:
    """Fit regressions that differ in their penalty.

    Args:
        Z: Features (n, d), or with ``kernel=True`` a kernel (n, n).
        y: Classes (n,), from 0.
        penalties: The lambdas (k,); scikit-learn's C is the inverse of one.
        classes: Number of classes.
        kernel: Whether Z is a kernel.
        weight: Weights (n,) of the examples, zero for examples that do not count; n is then the sum.
        tolerance: Length of the gradient to stop at, over that at zero.
        steps: Largest number of steps.
    """
    k, d = len(penalties), Z.shape[1]
    weight = torch.ones_like(Z[:, 0]) if weight is None else weight.to(Z)
    total, lam = weight.sum(), (penalties.to(Z) / weight.sum())[:, None, None]
    target = torch.nn.functional.one_hot(y, classes).to(Z)

    # A vector of L-BFGS is W and b, flat; with a kernel, W and K W, and b twice: inner products take both.
    def join(W: Tensor, b: Tensor) -> Tensor:
        both = (W, _multiply(Z, W)) if kernel else (W,)
        return torch.stack([torch.cat([A.flatten(1), b], 1) for A in both])

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : d * classes].view(k, d, classes), x[:, d * classes :]

    def outputs(x: Tensor) -> Tensor:
        A, b = split(x[-1])
        return (A if kernel else _multiply(Z, A)) + b[:, None]

    def gradient(x: Tensor, f: Tensor) -> Tensor:
        r = (f.softmax(2) - target) * (weight / total)[:, None]
        W = r if kernel else _multiply(Z.T, r)
        g = join(W, r.sum(1))
        g[:, :, : d * classes] += lam[:, :, 0] * x[:, :, : d * classes]
        return g

    x = join(torch.zeros(k, d, classes).to(Z), torch.zeros(k, classes).to(Z))
    f = outputs(x)
    g = gradient(x, f)
    first = _inner(g, g).sqrt()
    converged, done = torch.zeros(k, dtype=torch.bool, device=Z.device), 0
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    for done in range(1, steps + 1):
        step = _direction(g, history)
        h = outputs(step)
        slope, bend = _ridge(x, step, d * classes, lam[:, 0, 0])
        t = _search(f, h, target, weight / total, slope, bend)
        t = torch.where(converged | ~t.isfinite(), 0.0, t)  # those that have converged stay where they are
        x = x + t[:, None] * step
        f = f + t[:, None, None] * h
        new = gradient(x, f)
        s, change = t[:, None] * step, new - g
        curvature = _inner(s, change)
        history = [*history[-HISTORY + 1 :], (s, change, torch.where(curvature > 0, 1 / curvature, 0.0))]
        g = new
        if done % LOOK == 0 or done == steps:
            # A kernel that is rounded may have inner products below zero.
            converged = _inner(g, g).abs().sqrt() <= tolerance * first
            if bool(converged.all()):
                break
            f = outputs(x)  # without the rounding of the sums
    W, b = split(x[0])
    return Logistic(W, b, converged, done)


def _multiply(Z: Tensor, W: Tensor) -> Tensor:
    """Z W_i for (k, d, c), in one product."""
    k, d, c = W.shape
    return (Z @ W.transpose(0, 1).reshape(d, k * c)).view(-1, k, c).transpose(0, 1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (k,) of the features' space."""
    return (a[0] * b[-1]).sum(1)


def _direction(g: Tensor, history: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The two loops of L-BFGS (Nocedal and Wright 2006, algorithm 7.4), for each regression its own."""
    q, kept = g, []
    for s, change, rho in reversed(history):
        alpha = rho * _inner(s, q)
        q = q - alpha[:, None] * change
        kept.append(alpha)
    if history:
        s, change, rho = history[-1]
        size = _inner(change, change)
        q = q * torch.where((rho > 0) & (size > 0), 1 / (rho * size), 1.0)[:, None]
    for (s, change, rho), alpha in zip(history, reversed(kept), strict=True):
        q = q + (alpha - rho * _inner(change, q))[:, None] * s
    return -q


def _ridge(x: Tensor, step: Tensor, count: int, lam: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of the penalty along a step, at its start."""
    inner = [(a[0, :, :count] * step[-1, :, :count]).sum(1) for a in (x, step)]
    return lam * inner[0], lam * inner[1]


def _search(f: Tensor, h: Tensor, target: Tensor, weight: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
    """The lengths (k,) of steps: Newton's method on the loss along the line, which is convex."""
    t = torch.ones_like(slope)
    for _ in range(5):
        p = (f + t[:, None, None] * h).softmax(2)
        mean = (p * h).sum(2)
        first = ((mean - (target * h).sum(2)) * weight).sum(1) + slope + t * bend
        second = (((p * h.square()).sum(2) - mean.square()) * weight).sum(1) + bend
        t = torch.minimum(torch.maximum(t - first / second.clamp_min(1e-30), 0.1 * t), 10 * t)
    return t


# Probes with a penalty that is chosen.


@dataclass(frozen=True)
class Probe:
    """A fitted regression of the standardized features, or of the centered kernel."""

    prepare: Callable[[Tensor], Tensor]  # new features (m, d), or kernels (m, n), as the regression takes them
    fitted: Logistic  # of one penalty
    penalty: float  # over the mean squared length of the features
    held_out: float  # accuracy on the examples that were held out to choose it

    def logits(self, E: Tensor) -> Tensor:
        return self.fitted.outputs(self.prepare(E))[0]

    def predict(self, E: Tensor) -> Tensor:
        return self.logits(E).argmax(1)

    def score(self, E: Tensor, y: Tensor) -> float:
        return float((self.predict(E) == y).double().mean())


def fit_probe(
    E: Tensor,
    y: Tensor,
    *,
    penalties: tuple[float, ...],
    classes: int | None = None,
    standardize: bool = True,
    kernel: bool = False,
    seed: int = 0,
) -> Probe:
    """A logistic regression, with the penalty of the best accuracy on a fifth of the examples that is held out.

    Args:
        E: Features (n, d), or a kernel (n, n), which is centered in place.
        y: Classes (n,).
        penalties: The penalties that are tried, strongest first, over the mean squared length of the features. A
            penalty with which the fit does not converge is not taken, unless none does.
        classes: How many; None for the largest of y and one.
        standardize: Whether each feature is divided by its spread; a kernel's are not.
        kernel: Whether E is one.
        seed: Seed of the draw of the held-out examples.
    """
    classes = int(y.max()) + 1 if classes is None else classes
    Z, prepare = _center(E) if kernel else _standardize(E, standardize)
    held = torch.zeros(len(y), dtype=torch.bool)
    held[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[: max(1, len(y) // 5)]] = True
    held = held.to(y.device)
    lam = torch.tensor(penalties, dtype=Z.dtype, device=Z.device)
    tried = fit_logistic(Z, y, lam, classes=classes, kernel=kernel, weight=(~held).to(Z))
    right = (tried.outputs(Z[held]).argmax(2) == y[held]).double().mean(1)
    usable = tried.converged | ~tried.converged.any()
    best = int(torch.where(usable, right, -1.0).argmax())
    fitted = fit_logistic(Z, y, lam[best : best + 1], classes=classes, kernel=kernel)
    return Probe(prepare, fitted, penalties[best], float(right[best]))


def _standardize(E: Tensor, spread: bool) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Centered features of mean squared length one, and how to prepare others; float32 on a GPU, else float64."""
    dtype = torch.float32 if E.is_cuda else torch.float64
    Z = E.to(dtype, copy=True)
    mean = Z.mean(0)
    Z -= mean
    scale = Z.square().mean(0).sqrt() if spread else torch.ones_like(mean)
    scale = torch.where(scale > 0, scale, 1.0)
    Z /= scale
    length = Z.square().sum(1).mean().sqrt()
    Z /= length
    return Z, lambda new: (new.to(dtype) - mean) / (scale * length)


def _center(K: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The kernel of centered features of mean squared length one, in place; and how to prepare that of others."""
    rows = K.mean(1)
    whole = rows.mean()
    K.sub_(rows[:, None]).sub_(rows - whole)
    size = K.diagonal().mean()
    K /= size
    return K, lambda new: (new - new.mean(1, keepdim=True) - rows + whole) / size
