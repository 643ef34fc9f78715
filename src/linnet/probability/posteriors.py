r"""Gaussian posteriors over the displacement ``theta - theta0``, and what they say about f at new inputs.

Every posterior has a mean ``delta`` (p,) and answers, for the Jacobian of new inputs,

.. math:: E[f] - m = J_* \delta, \qquad \mathrm{cov}[f] = J_* \, \Sigma \, J_*^\top

in its own form of :math:`\Sigma`. Letters: S the prior variances, ``Phi = J S^(1/2)``, ``B = L L^T`` the curvature of
the likelihood (``I / noise`` for Gaussian noise), ``M = I + L^T K L``, ``H = I + Phi^T B Phi``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from linnet._common.memory import dense_budget
from linnet.jacobian.jacobian import Jacobian
from linnet.linalg.cholesky import cholesky_solve, solve_lower, solve_upper
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import weigh


class Posterior(ABC):
    """A Gaussian over the displacement.

    Subclasses write ``blocks``, ``covariance`` and ``cross``.

    Attributes:
        delta: (p,), the mean.
    """

    delta: Tensor

    def shift(self, J: Jacobian) -> Tensor:
        """``J delta``, (n, c): what adaptation adds to the mean function."""
        return (J @ self.delta).view(J.n, J.c)

    @abstractmethod
    def blocks(self, J: Jacobian) -> Tensor:
        """The covariance of the outputs of each example, (n, c, c)."""

    @abstractmethod
    def covariance(self, J: Jacobian) -> Tensor:
        """The joint covariance of all outputs of all examples, (n c, n c)."""

    @abstractmethod
    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        """The covariance of the outputs of some examples with those of others, (n c, m c)."""

    def _size(self, J: Jacobian) -> float:
        """The largest of the numbers whose difference a covariance is; 0 where it is no difference."""
        return 0.0

    def variance(self, J: Jacobian) -> Tensor:
        """The variance of each output, (n, c)."""
        return self.blocks(J).diagonal(dim1=1, dim2=2)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        """k samples of the displacement, (p, k): one product with J makes them joint samples at any inputs."""
        raise NotImplementedError(f"{type(self).__name__} has no samples of the parameters.")

    def _normal(self, rows: int, k: int, generator: torch.Generator) -> Tensor:
        """Standard normal numbers (rows, k) for this posterior."""
        z = torch.randn(rows, k, dtype=self.delta.dtype, device=generator.device, generator=generator)
        return z.to(self.delta.device)

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        """k joint samples of the outputs of all examples, less the mean function, (k, n, c)."""
        root = square_root(self.covariance(J), self._size(J))
        z = torch.randn(J.shape[0], k, dtype=J.dtype, device=generator.device, generator=generator)
        return self.shift(J) + (root @ z.to(J.device)).T.reshape(k, J.n, J.c)


def in_parts(J: Jacobian, rows: int, answer: Callable[[Jacobian], Tensor]) -> Tensor:
    """An answer (n, ...) about each example of J, from runs of them whose products with ``rows`` others fit memory.

    Args:
        J: (n c, p).
        rows: Of the matrix that the answer makes, beside c columns for each example.
        answer: From the Jacobian of some examples.
    """
    size = max(1, dense_budget("auto", J.device) // (4 * rows * J.c * J.dtype.itemsize))
    if J.n <= size or not J.by_position:
        return answer(J)
    return torch.cat([answer(J.subset(index)) for index in torch.arange(J.n).split(size)])


@final
class PointPosterior(Posterior):
    """All mass on one displacement, without error bars.

    Args:
        delta: (p,).
    """

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta

    def blocks(self, J: Jacobian) -> Tensor:
        return torch.zeros(J.n, J.c, J.c, dtype=J.dtype, device=J.device)

    def covariance(self, J: Jacobian) -> Tensor:
        return self.cross(J, J)

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        return torch.zeros(J.shape[0], other.shape[0], dtype=J.dtype, device=J.device)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None].expand(-1, k)


@final
class FunctionPosterior(Posterior):
    r""":math:`K_{**} - K_{*X} L M^{-1} L^\top K_{X*}`, from the training data's Jacobian.

    Args:
        J: Of the training data, or a stack of such; every answer is a pass over it, which is why its factors are best
            kept (`Jacobian.cached`).
        variance: S, (p,).
        delta: (p,).
        root: L, (n c,) or (n, c, c).
        factor: The lower Cholesky factor of M, (n c, n c); entries above the diagonal are not read.
    """

    def __init__(self, J: LinearOperator, variance: Tensor, delta: Tensor, *, root: Tensor, factor: Tensor) -> None:
        self.J, self.prior_variance, self.delta, self.root, self.factor = J, variance, delta, root, factor

    def half(self, J: Jacobian) -> Tensor:
        """``C^-1 L^T K(X, X*)``, (n c, m c), with ``M = C C^T``: its Gram matrix is what the data has taught."""
        cross = self.J.gram(J, scale=self.prior_variance)
        return solve_lower(self.factor, weigh(cross, self.root, transpose=True))

    def blocks(self, J: Jacobian) -> Tensor:
        return in_parts(J, len(self.factor), self._blocks)

    def _blocks(self, J: Jacobian) -> Tensor:
        T = self.half(J).T.reshape(J.n, J.c, -1)
        return J.gram_blocks(scale=self.prior_variance) - T @ T.mT

    def covariance(self, J: Jacobian) -> Tensor:
        T = self.half(J)
        return J.gram(scale=self.prior_variance) - T.T @ T

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        # From M^-1 for J alone, so that the training data may be the others at no second solve.
        T = weigh(solve_upper(self.factor, self.half(J)), self.root)
        learned = self.J.gram(other, scale=self.prior_variance)
        return J.gram(other, scale=self.prior_variance) - T.T @ learned

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        # Matheron: u + Phi^T L M^-1 (e - L^T Phi u) with u and e standard normal.
        d = self.prior_variance.sqrt()[:, None]
        u, e = self._normal(len(d), k, generator), self._normal(len(self.factor), k, generator)
        left = e - weigh(self.J @ (d * u), self.root, transpose=True)
        return self.delta[:, None] + d * (u + d * (self.J.T @ weigh(cholesky_solve(self.factor, left), self.root)))

    def _size(self, J: Jacobian) -> float:
        return float(J.gram_diag(scale=self.prior_variance).sum())

    def variance(self, J: Jacobian) -> Tensor:
        return in_parts(J, len(self.factor), self._variance)

    def _variance(self, J: Jacobian) -> Tensor:
        prior = J.gram_diag(scale=self.prior_variance)
        return nonnegative(prior - self.half(J).square().sum(0), prior).view(J.n, J.c)


@final
class WeightPosterior(Posterior):
    r""":math:`\Phi_* H^{-1} \Phi_*^\top`.

    Args:
        variance: S, (p,).
        delta: (p,).
        factor: The lower Cholesky factor of H, (p, p).
    """

    def __init__(self, variance: Tensor, delta: Tensor, *, factor: Tensor) -> None:
        self.prior_variance, self.delta, self.factor = variance, delta, factor
        # W W^T = S^(1/2) H^-1 S^(1/2), so that a covariance is a Gram matrix of J W.
        eye = torch.eye(len(delta), dtype=delta.dtype, device=delta.device)
        inverse = solve_lower(factor, eye)
        self.W = variance.sqrt()[:, None] * inverse.T

    def blocks(self, J: Jacobian) -> Tensor:
        T = (J @ self.W).view(J.n, J.c, -1)
        return T @ T.mT

    def covariance(self, J: Jacobian) -> Tensor:
        T = J @ self.W
        return T @ T.T

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        # The few examples go through all parameters, and the many are multiplied with what comes of them.
        if J.shape[0] > other.shape[0]:
            return self.cross(other, J).T
        return (other @ (self.W @ (J @ self.W).T)).T

    def variance(self, J: Jacobian) -> Tensor:
        return (J @ self.W).square().sum(1).view(J.n, J.c)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None] + self.W @ self._normal(len(self.delta), k, generator)

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        z = torch.randn(len(self.delta), k, dtype=J.dtype, device=generator.device, generator=generator)
        return self.shift(J) + (J @ (self.W @ z.to(J.device))).T.reshape(k, J.n, J.c)


class FeaturePosterior(Posterior):
    """A posterior whose covariance of f is T T^T, with features T (n c, k) of the data."""

    @abstractmethod
    def _features(self, J: Jacobian) -> Tensor: ...

    def blocks(self, J: Jacobian) -> Tensor:
        T = self._features(J).view(J.n, J.c, -1)
        return T @ T.mT

    def covariance(self, J: Jacobian) -> Tensor:
        T = self._features(J)
        return T @ T.T

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        return self._features(J) @ self._features(other).T

    def variance(self, J: Jacobian) -> Tensor:
        return self._features(J).square().sum(1).view(J.n, J.c)


@final
class SamplePosterior(FeaturePosterior):
    """Covariances estimated from posterior samples, with a relative error of about ``sqrt(2 / k)`` in a variance.

    Args:
        delta: (p,).
        samples: (p, k), of mean zero.
    """

    def __init__(self, delta: Tensor, samples: Tensor) -> None:
        self.delta, self.samples = delta, samples

    def _features(self, J: Jacobian) -> Tensor:
        return (J @ self.samples) / self.samples.shape[1] ** 0.5

    def _first(self, k: int) -> Tensor:
        if k > self.samples.shape[1]:
            raise ValueError(
                f"This posterior holds {self.samples.shape[1]} samples; {k} were asked for. Fit with samples={k}."
            )
        return self.samples[:, :k]

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        """The first k of the stored samples."""
        return self.delta[:, None] + self._first(k)

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        """The first k of the stored samples."""
        return self.shift(J) + (J @ self._first(k)).T.reshape(k, J.n, J.c)


@final
class DiagonalPosterior(Posterior):
    """Independent parameters.

    Args:
        delta: (p,).
        variances: (p,).
    """

    def __init__(self, delta: Tensor, variances: Tensor) -> None:
        self.delta, self.variances = delta, variances

    def blocks(self, J: Jacobian) -> Tensor:
        return J.gram_blocks(scale=self.variances)

    def covariance(self, J: Jacobian) -> Tensor:
        return J.gram(scale=self.variances)

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        return J.gram(other, scale=self.variances)

    def variance(self, J: Jacobian) -> Tensor:
        return J.gram_diag(scale=self.variances).view(J.n, J.c)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None] + self.variances.sqrt()[:, None] * self._normal(len(self.delta), k, generator)


@final
class LowRankPosterior(Posterior):
    r"""The prior but for r directions: :math:`S^{1/2} (I - P P^\top + P C P^\top) S^{1/2}`.

    Args:
        variance: S, (p,).
        delta: (p,).
        basis: P, (p, r), orthonormal.
        C: (r, r), the covariance along the basis.
    """

    def __init__(self, variance: Tensor, delta: Tensor, *, basis: Tensor, C: Tensor) -> None:
        self.prior_variance, self.delta, self.basis, self.C = variance, delta, basis, C

    def _features(self, J: Jacobian) -> tuple[Tensor, Tensor]:
        T = J @ (self.prior_variance.sqrt()[:, None] * self.basis)
        change = self.C - torch.eye(len(self.C), dtype=T.dtype, device=T.device)
        return T, T @ change

    def blocks(self, J: Jacobian) -> Tensor:
        T, change = (x.view(J.n, J.c, -1) for x in self._features(J))
        return J.gram_blocks(scale=self.prior_variance) + change @ T.mT

    def covariance(self, J: Jacobian) -> Tensor:
        T, change = self._features(J)
        return J.gram(scale=self.prior_variance) + change @ T.T

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        return J.gram(other, scale=self.prior_variance) + self._features(J)[1] @ self._features(other)[0].T

    def _size(self, J: Jacobian) -> float:
        return float(J.gram_diag(scale=self.prior_variance).sum())

    def variance(self, J: Jacobian) -> Tensor:
        T, change = self._features(J)
        prior = J.gram_diag(scale=self.prior_variance)
        return nonnegative(prior + (T * change).sum(1), prior).view(J.n, J.c)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        z, P = self._normal(len(self.delta), k, generator), self.basis
        along = P.T @ z
        u = z + P @ (square_root(self.C) @ self._normal(len(self.C), k, generator) - along)
        return self.delta[:, None] + self.prior_variance.sqrt()[:, None] * u


def square_root(C: Tensor, size: float = 0.0) -> Tensor:
    """The symmetric R, ``R R = C``, for a covariance that may be singular; eigenvalues clearly below zero are refused.

    Of all roots this one moves as little as C does, also where eigenvalues are equal and rounding chooses the vectors:
    the same seed gives the same samples, to rounding, on another machine and from a file.

    Args:
        C: (m, m).
        size: The size of the numbers whose difference C is, which counts for what rounding can do.
    """
    eigenvalues, Q = torch.linalg.eigh(C)
    floor = -1e4 * torch.finfo(C.dtype).eps * max(float(eigenvalues.abs().sum()), size)
    if float(eigenvalues[0]) < floor:
        raise ArithmeticError(
            f"A covariance has the eigenvalue {float(eigenvalues[0]):.3g}, below rounding ({floor:.1g}): the solve "
            "behind it was not accurate enough. Use float64 (dtype=), more noise, or a smaller tolerance."
        )
    return (Q * eigenvalues.clamp_min(0).sqrt()) @ Q.T


def nonnegative(variance: Tensor, prior: Tensor) -> Tensor:
    """Variances that are differences: rounding below zero counts as zero, more than that is refused."""
    floor = -1e4 * torch.finfo(variance.dtype).eps * prior
    if bool((variance < floor).any()):
        i = int((variance - floor).argmin())
        raise ArithmeticError(
            f"A posterior variance came out as {float(variance.flatten()[i]):.3g} of a prior one of "
            f"{float(prior.flatten()[i]):.3g}: the solve behind it was not accurate enough. Use float64 (dtype=) or "
            "more noise."
        )
    return variance.clamp_min(0)
