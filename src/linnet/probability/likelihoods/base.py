"""The base of all likelihoods, checks of targets, and draws."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Device = torch.device | str | None


class Likelihood(ABC):
    """The distribution of a target given the outputs of a network for one example.

    A likelihood of your own needs `log_prob`. The gradient and the curvature then come from autograd. Predictions of
    targets need `mean`, drawn targets need `sample`, `variance` is the noise that ``noise=True`` adds. log p must be
    concave in the outputs, so that the mode is unique; an error says so where it is not.

    Attributes:
        diagonal: Whether B and its root are diagonal, and given as (n, c): no output changes the gradient of another.

    Example:
        >>> class Laplacian(Likelihood):  # smooth near zero
        ...     def log_prob(self, f, y):
        ...         return -(1 + (y - f).square()).sqrt().sum(-1)
        >>> Laplacian().residual(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.7071]])
        >>> Laplacian().observed_curvature(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.3536]])
    """

    diagonal: bool = True

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f) of each example, (n,)."""

    def targets(self, y: Any, n: int, c: int, *, dtype: torch.dtype | None = None, device: Device = None) -> Tensor:
        """The targets of n examples for a network with c outputs, checked, as the other methods take them.

        Targets that are returned may be given again. By default there is one finite number for each output.

        Args:
            y: A tensor, array or list.
            n: Examples.
            c: Outputs of the network.
            dtype: Of floating targets; None keeps that of y, integers becoming torch's default.
            device: None keeps that of y.
        """
        return as_continuous(type(self).__name__, y, n, c, dtype, device)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """The gradient of log p(y | f) in f, (n, c)."""
        return _differentiate(lambda g: self.log_prob(g, y).sum(), f)

    def curvature(self, f: Tensor) -> Tensor:
        """The Fisher information B in f, (n, c) where it is diagonal, else (n, c, c)."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its Fisher information is. Give the class a method curvature(f)."
        )

    def root(self, f: Tensor) -> Tensor:
        """L with B = L L^T, of the shape of B."""
        return find_root(self.curvature(f), diagonal=self.diagonal)

    def observed_curvature(self, f: Tensor, y: Tensor) -> Tensor:
        """The curvature for the targets that were observed, positive semi-definite, of the shape of B.

        Minus the second derivative of log p(y | f). A likelihood whose second derivative does not depend on y has the
        Fisher information, and so has one whose second derivative is not positive semi-definite.
        """
        if type(self).curvature is not Likelihood.curvature:
            return self.curvature(f)
        return self._second_derivative(f, y)

    def observed_root(self, f: Tensor, y: Tensor) -> Tensor:
        """L with `observed_curvature` = L L^T."""
        kind = type(self)
        if kind.root is not Likelihood.root and kind.observed_curvature is Likelihood.observed_curvature:
            return self.root(f)
        return find_root(self.observed_curvature(f, y), diagonal=self.diagonal)

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]; class probabilities where y is a class."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its mean is. Give the class a method mean(f), of E[y | f]."
        )

    def variance(self, f: Tensor) -> Tensor:
        """The variance of y given f, of the shape of the mean: the noise of an observation."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its variance is. Give the class a method variance(f), of "
            "Var[y | f]."
        )

    def kl(self, f: Tensor, other: Tensor) -> Tensor:
        """KL(p(. | f) || p(. | other)) of each example, (n,)."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its divergence is. Give the class a method kl(f, other)."
        )

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from p(. | f), in the form that `targets` returns."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how to draw targets. Give the class a method sample(f, generator)."
        )

    @property
    def is_open(self) -> bool:
        """Whether the likelihood has parameters that were left open, for `fitted` to find."""
        return False

    def fitted(self, f: Tensor, y: Tensor, weight: Tensor | None = None) -> Likelihood:
        """This likelihood; where it has parameters that were left open, with those of largest likelihood at outputs f.

        Args:
            f: (n, c).
            y: Targets, as `targets` returns them.
            weight: How many times each example counts, (n,); None for once.
        """
        return self

    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor that make this likelihood again, as JSON can hold them."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _second_derivative(self, f: Tensor, y: Tensor) -> Tensor:
        """Minus the Hessian of log p by autograd: checked to be diagonal where it should be, and without a negative
        eigenvalue."""
        keep = f.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():
            g = f if keep else f.detach().requires_grad_()
            r = self.residual(g, y)
            rows = []
            for j in range(f.shape[-1]):
                part = r[..., j].sum()
                found = None
                if part.requires_grad:
                    (found,) = torch.autograd.grad(part, g, retain_graph=True, create_graph=keep, allow_unused=True)
                rows.append(torch.zeros_like(f) if found is None else -found)
        H = torch.stack(rows, -2)
        if not self.diagonal:
            return 0.5 * (H + H.mT)
        B = H.diagonal(dim1=-2, dim2=-1)
        rest = (H - torch.diag_embed(B)).detach()
        if bool((rest != 0).any()):
            raise ValueError(
                f"{type(self).__name__} says that its curvature is diagonal, and some output changes the gradient of "
                "another. Set diagonal = False in the class."
            )
        if bool((B < 0).any()):
            _check_concave(B.detach(), type(self).__name__)
            B = B.clamp(min=0)
        return B


def find_root(B: Tensor, *, diagonal: bool) -> Tensor:
    """L with B = L L^T: of a diagonal (n, c), or the symmetric root of blocks (n, c, c)."""
    if diagonal:
        return B.sqrt()
    values, vectors = torch.linalg.eigh(B)
    _check_concave(values, "This likelihood")
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def _check_concave(values: Tensor, name: str) -> None:
    """Raise where curvatures are negative by more than rounding."""
    least, most = float(values.min()), float(values.abs().max())
    if least < -math.sqrt(torch.finfo(values.dtype).eps) * most:
        raise ValueError(
            f"{name} is not log-concave: minus the second derivative of log p(y | f) is {least:.3g} at some example, "
            "so that there may be several modes. Use a likelihood whose log p is concave in f."
        )


def _differentiate(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """The gradient of a number at f; with a graph where f has one."""
    keep = f.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad():
        g = f if keep else f.detach().requires_grad_()
        value = function(g)
        if not value.requires_grad:
            raise TypeError("log_prob must be made of torch functions of f, so that autograd can follow it.")
        (found,) = torch.autograd.grad(value, g, create_graph=keep)
    return found


class ExponentialMean(Likelihood):
    """Base of likelihoods whose mean is a number times exp(f), so that averages over Gaussian f have a closed form."""

    @property
    @abstractmethod
    def powers(self) -> tuple[float, float, float]:
        """a, b and d with ``E[y | f] = a exp(f)`` and ``Var[y | f] = b exp(f) + d exp(2 f)``."""

    def mean(self, f: Tensor) -> Tensor:
        return self.powers[0] * f.exp()

    def variance(self, f: Tensor) -> Tensor:
        _, b, d = self.powers
        return b * f.exp() + d * (2 * f).exp()


def maximize_positive(objective: Callable[[float], float], low: float, high: float) -> float:
    """The number between two positive ones at which an objective is largest: by a grid of logarithms, then by sections.

    >>> round(maximize_positive(lambda t: -(t - 3) ** 2, 0.01, 100.0), 6)
    3.0
    """
    a, b, count = math.log(low), math.log(high), 65
    step = (b - a) / (count - 1)
    values = [objective(math.exp(a + i * step)) for i in range(count)]
    top = max(range(count), key=values.__getitem__)
    left, right = a + max(top - 1, 0) * step, a + min(top + 1, count - 1) * step
    golden = (math.sqrt(5) - 1) / 2
    while right - left > 1e-9:
        x, z = right - golden * (right - left), left + golden * (right - left)
        if objective(math.exp(x)) >= objective(math.exp(z)):
            right = z
        else:
            left = x
    return math.exp(0.5 * (left + right))


def weights_of(weight: Tensor | None, f: Tensor) -> Tensor:
    """How many times each example counts, (n,); ones where nothing is said."""
    return torch.ones(len(f), dtype=f.dtype, device=f.device) if weight is None else weight.to(f)


# Targets.


def as_numbers(name: str, y: Any) -> Tensor:
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


def as_continuous(name: str, y: Any, n: int, d: int, dtype: torch.dtype | None, device: Device) -> Tensor:
    """Floating targets (n, d), from (n,) too where d = 1."""
    y = as_numbers(name, y)
    y = y.to(device=device, dtype=dtype or (y.dtype if y.is_floating_point() else torch.get_default_dtype()))
    if tuple(y.shape) not in (((n, 1), (n,)) if d == 1 else ((n, d),)):
        one = f" or ({n},)" if d == 1 else ""
        raise ValueError(f"{name} needs targets of shape ({n}, {d}){one}, a row per example; got {tuple(y.shape)}.")
    check_finite(name, y)
    return y.reshape(n, d)


def check_finite(name: str, y: Tensor) -> None:
    bad = ~torch.isfinite(y).reshape(len(y), -1).all(1)
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} needs targets that are finite; {int(bad.sum())} of {len(y)} examples have NaN or infinity, the "
            f"first is example {i}: {y[i].flatten().tolist()[:4]}. Remove them, with their inputs."
        )


# Draws.


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws from N(0, 1) for ``like``, made on the generator's device: a seed gives the same ones everywhere."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)
