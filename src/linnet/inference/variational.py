r"""Gaussian variational posteriors of a likelihood on a linear model.

With :math:`f = m + \Phi u`, prior :math:`u \sim N(0, I)` and :math:`q(u) = N(\mu, \Sigma)`, the outputs of example i
are Gaussian with mean :math:`m_i + \Phi_i \mu` and covariance :math:`C_i = \Phi_i \Sigma \Phi_i^\top`, so that

.. math:: \mathrm{ELBO} = \sum_i E_{f_i \sim N}[\log p(y_i \mid f_i)] - \mathrm{KL}(q \,\|\, N(0, I)),

the lower bound of the log evidence, takes an expectation over c outputs for each example (local reparametrization).
There are three families of covariances:

- `meanfield`: :math:`\Sigma = \mathrm{diag}(v)`;
- `lowrank`: :math:`\Sigma = I - P P^\top + P C P^\top`, any covariance C along r orthonormal directions, the prior in
  all others. With r the rank of K it holds the best of all Gaussians;
- `full`: all of them, where K is at hand. The best one has

  .. math:: \mu = \Phi^\top \alpha, \quad \alpha = E_q[\mathrm{residual}], \qquad
            \Sigma = (I + \Phi^\top \bar B \Phi)^{-1}, \quad \bar B = E_q[B]

  (Opper and Archambeau 2009). This is the form of the Laplace approximation, but with averages over q where Laplace has
  values at the mode. With few labels the two are far apart. At a mode that is sure of its labels B is next to nothing,
  so that Laplace takes the prior's covariance, around a mean that has moved just far enough to be sure. The posterior
  has its mean much further out: more of it lies there than on the side of the prior, where the labels forbid it.

The mean is free in all families. One loop serves them. Each iteration takes a Newton step of the mean, with K where
there is one and otherwise by conjugate gradients with :math:`\Sigma` as preconditioner, and a natural gradient step of
the covariance: where the expected curvature is B, the best one has :math:`1 / v = 1 + \mathrm{diag}(\Phi^\top B
\Phi)`, :math:`C^{-1} = I + P^\top \Phi^\top B \Phi P`, or :math:`\bar B = B`. Steps are shortened until the ELBO
rises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.newton import FLOOR
from linnet.inference.mode.spaces import FunctionSpace, check_concave, check_kind, check_mean, check_operator
from linnet.linalg import LinearOperator, Solvable, as_weight, cg, cholesky_, log_det_from, solve_lower, weigh
from linnet.probability import Expected, FactoredCovariance, Likelihood, factor_covariance, take_expectations

DRAWS = 2**22
"""Numbers that are drawn: so many examples have draws of their own, and the next examples use them again."""

DENSE = 2000
"""Rows up to which directions are eigenvectors of the kernel and steps of the mean solve with it: both take n^3."""

SAMPLES = 256
"""Draws for each example of `full`. Where the prior says next to nothing, few draws do not show how the covariance
should change, and the ELBO stands still too early: with 64, by about 2 at a prior standard deviation of f of 60."""


@dataclass(frozen=True)
class Variational:
    """A Gaussian over the displacement, ``delta + S^(1/2) N(0, Sigma)``.

    Attributes:
        delta: (p,), its mean.
        f: (n, c), the mean of f.
        variances: (p,), of the displacement, S times v; only from `meanfield`.
        basis: P, (p, r), orthonormal directions of whitened weights; only from `lowrank`.
        C: (r, r), the covariance along them; only from `lowrank`.
        elbo: The lower bound of the log evidence: exact, or for `Categorical` an unbiased estimate by further draws.
        path: The ELBO at the start and after each iteration, with the draws that the iterations use; it never falls.
        gradient: Norm of the mean's gradient ``Phi^T E[residual] - u`` before the last step, relative to that of the
            larger of its two terms.
        iterations: How many.
        converged: Whether the ELBO has stopped rising, at a mean with a small gradient.
        root: L, (n c,) or (n, c, c), with ``Sigma = (I + Phi^T L L^T Phi)^-1``; only from `full`.
        factor: (n c, n c), the lower Cholesky factor of ``I + L^T K L``; only from `full`.
    """

    delta: Tensor
    f: Tensor
    elbo: float
    path: tuple[float, ...]
    gradient: float
    iterations: int
    converged: bool
    variances: Tensor | None = None
    basis: Tensor | None = None
    C: Tensor | None = None
    root: Tensor | None = None
    factor: Tensor | None = None

    def checked(self) -> Variational:
        """Itself; an error if the ELBO was still rising."""
        if not self.converged:
            raise ArithmeticError(
                f"The ELBO was still rising after {self.iterations} iterations, from {self.path[-2]:.6g} to "
                f"{self.path[-1]:.6g}. Allow more iterations, or accept a larger tolerance."
            )
        return self


def meanfield(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    K: Tensor | None = None,
    start: Tensor | None = None,
    preconditioner: Solvable | None = None,
    samples: int = 64,
    seed: int = 0,
    tolerance: float = 1e-7,
    iterations: int = 100,
) -> Variational:
    """The best Gaussian with independent parameters.

    An iteration makes about five passes over the data and as many more as CG needs iterations; it holds no more than a
    few vectors of length p.

    Args:
        J: (n c, p), with ``gram_blocks`` where the likelihood couples the outputs.
        y: Targets, as ``likelihood.targets`` takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Likelihood of the targets given f; log-concave.
        K: ``J S J^T``, (n c, n c), where it is at hand: with up to 2000 rows it solves for the steps of the mean.
        start: delta to begin with, (p,), such as the mode; None for zero.
        preconditioner: Of the Hessian ``I + Phi^T B Phi`` in the steps of the mean; None for the variances of q.
        samples: Draws for each example, where expectations are not exact (`Categorical`). They come
            in pairs z, -z and stay the same throughout.
        seed: Seed of the draws.
        tolerance: Stop when an iteration raises the ELBO by less than this part of it.
        iterations: Largest number of iterations.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> q = meanfield(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.variances.shape
        (True, torch.Size([3]))
    """
    problem = _Expectations(J, y, variance, mean, likelihood, K, samples, seed)
    covariance = _Diagonal(problem, torch.ones_like(variance), problem.no_blocks(), preconditioner)
    found, last = _ascend(problem, _Weights(problem), covariance, start, tolerance, iterations)
    return replace(found, variances=variance * last.v)


def lowrank(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    rank: int | str = "auto",
    K: Tensor | None = None,
    start: Tensor | None = None,
    samples: int = 64,
    seed: int = 0,
    tolerance: float = 1e-7,
    iterations: int = 100,
) -> Variational:
    """The best Gaussian with a full covariance along the top eigenvectors of K, and the prior's across them.

    The other arguments are those of `meanfield`.

    Args:
        rank: How many directions; the basis takes p numbers for each. ``"auto"`` takes those along which the data say
            more than a hundredth of what the prior says, up to 500 and to 2^27 numbers.
        seed: Seed of the draws, and of the search for eigenvectors of large kernels.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> q = lowrank(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.basis.shape, q.C.shape
        (True, torch.Size([3, 2]), torch.Size([2, 2]))
    """
    problem = _Expectations(J, y, variance, mean, likelihood, K, samples, seed)
    P = _find_directions(problem, rank, seed)
    F = problem.Phi @ P
    C = torch.eye(P.shape[1], dtype=P.dtype, device=P.device)
    # What the prior says across the directions; below zero only by rounding.
    rest = problem.blocks(None) - problem.blocks_of(F, F)
    covariance = _Directions(problem, P, F, rest, C, problem.no_blocks())
    found, last = _ascend(problem, _Weights(problem), covariance, start, tolerance, iterations)
    return replace(found, basis=last.P, C=last.C)


def full(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    K: Tensor,
    start: Tensor | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    tolerance: float = 1e-7,
    iterations: int = 200,
) -> Variational:
    """The Gaussian with the largest ELBO, of any mean and covariance.

    Memory: two matrices beside K. The other arguments are those of `meanfield`.

    Args:
        K: ``J S J^T``, (n c, n c).
        start: alpha to begin with, (n c,), such as that of a mode in function space; None for zero.

    Example:
        >>> from linnet.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> A = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double(), "K": A @ A.T}
        >>> q = full(Matrix(A), torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.factor.shape
        (True, torch.Size([2, 2]))
    """
    problem = _Expectations(J, y, variance, mean, likelihood, K, samples, seed)
    if start is not None and tuple(start.shape) != (len(K),):
        raise ValueError(f"start needs shape ({len(K)},), that of alpha; got {tuple(start.shape)}.")
    none = problem.no_blocks()
    covariance = _Full(FunctionSpace(K, 1.0), none, none.flatten(0, 1), K, none)
    found, last = _ascend(problem, _Kernel(problem, covariance.space), covariance, start, tolerance, iterations)
    return replace(found, root=last.root, factor=last.factor)


class _Expectations:
    """Whitened features, targets, and expectations over f, which all families share."""

    def __init__(
        self,
        J: LinearOperator,
        y: Tensor,
        variance: Tensor,
        mean: Tensor,
        likelihood: Likelihood,
        K: Tensor | None,
        samples: int,
        seed: int,
    ) -> None:
        rows = check_mean(mean)
        check_concave(likelihood)
        check_operator(J, variance, mean, rows)
        if K is not None and tuple(K.shape) != (rows, rows):
            raise ValueError(f"J has {rows} rows, so K needs shape ({rows}, {rows}); got {tuple(K.shape)}.")
        if K is not None:
            check_kind("K", K, mean)
        self.n, self.c = mean.shape
        self.y = likelihood.targets(y, self.n, self.c, dtype=mean.dtype, device=mean.device)
        self.deviation, self.mean, self.likelihood = variance.sqrt(), mean, likelihood
        self.Phi, self.K = J.scaled(self.deviation), K
        self.own = max(1, min(self.n, DRAWS // (samples * self.c)))
        self.eps, self.others = None, None
        self.last: tuple[Tensor, FactoredCovariance] | None = None  # covariances, and their roots
        if not likelihood.diagonal:
            eps = draws(samples, 2 * self.own, self.c, seed=seed).to(mean)
            self.eps, self.others = eps[:, : self.own], eps[:, self.own :]

    def take_expectations(self, f: Tensor, cov: Tensor, *, others: bool = False) -> Expected:
        """Over f with means (n, c) and covariances (n, c, c) or variances (n, c); by other draws than the ascent's."""
        eps = self.others if others else self.eps
        if eps is None:
            return take_expectations(self.likelihood, f, cov, self.y)
        if self.last is None or self.last[0] is not cov:
            self.last = None  # the memory of the last roots first
            self.last = cov, factor_covariance(cov, f)
        T, parts = self.last[1].T, []
        for start in range(0, self.n, self.own):
            part = slice(start, min(start + self.own, self.n))
            parts.append(
                take_expectations(
                    self.likelihood, f[part], FactoredCovariance(T[part]), self.y[part], eps[:, : part.stop - start]
                )
            )
        return Expected(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def blocks(self, v: Tensor | None) -> Tensor:
        """Covariances of f for ``Sigma = diag(v)``: (n, c, c), or (n, c) where the likelihood needs no more."""
        if self.likelihood.diagonal:
            return self.Phi.gram_diag(v).view(self.n, self.c)
        return self.Phi.gram_blocks(v)

    def blocks_of(self, A: Tensor, F: Tensor) -> Tensor:
        """The same of ``A F^T``, for A and F (n c, r)."""
        if self.likelihood.diagonal:
            return (A * F).sum(1).view(self.n, self.c)
        return A.view(self.n, self.c, -1) @ F.view(self.n, self.c, -1).mT

    def no_blocks(self) -> Tensor:
        """Covariances of zero, as `blocks` gives them."""
        none = torch.zeros_like(self.mean)
        return none if self.likelihood.diagonal else torch.diag_embed(none)


# The ascent.


class _Weights:
    """Vectors of the mean that are whitened weights (p,). A start is a displacement."""

    def __init__(self, problem: _Expectations) -> None:
        self.Phi, self.deviation, self.size = problem.Phi, problem.deviation, problem.Phi.shape[1]

    def vector(self, start: Tensor) -> Tensor:
        return torch.where(self.deviation > 0, start / self.deviation, 0)

    def shift(self, u: Tensor) -> Tensor:
        """``Phi u``, (n c,)."""
        return self.Phi @ u

    def pull(self, r: Tensor) -> Tensor:
        """The vector ``Phi^T r``, for r (n c,)."""
        return self.Phi.T @ r

    def dot(self, a: Tensor, b: Tensor) -> float:
        return float(a @ b)

    def weights(self, u: Tensor) -> Tensor:
        return u


class _Kernel:
    """Vectors of the mean that are pairs of `FunctionSpace`, with ``u = Phi^T alpha``. A start is alpha."""

    def __init__(self, problem: _Expectations, space: FunctionSpace) -> None:
        self.Phi, self.size = problem.Phi, space.size
        self.vector = self.pull = space.vector
        self.dot = space.dot

    def shift(self, u: Tensor) -> Tensor:
        return u[1]

    def weights(self, u: Tensor) -> Tensor:
        return self.Phi.T @ u[0]


class _Covariance(ABC):
    """A covariance of whitened weights.

    Attributes:
        blocks: The covariances of f that follow, as `_Expectations.blocks` gives them.
    """

    blocks: Tensor

    @abstractmethod
    def kl(self) -> float:
        """The part of KL(q || N(0, I)) that this covariance makes."""

    @abstractmethod
    def step(self, g: Tensor, at: Expected, ratio: float) -> tuple[Tensor, Tensor]:
        """The Newton step of the mean ``H^-1 g``, and what it adds to f, (n c,)."""

    @abstractmethod
    def best(self, curvature: Tensor) -> Self:
        """The best one where the expected curvature is this, (n, c) or (n, c, c)."""

    @abstractmethod
    def mix(self, other: Self, t: float) -> Self:
        """A part t of the way to another."""


Family = TypeVar("Family", bound=_Covariance)


def _ascend(
    problem: _Expectations,
    space: _Weights | _Kernel,
    covariance: Family,
    start: Tensor | None,
    tolerance: float,
    iterations: int,
) -> tuple[Variational, Family]:
    if start is not None and tuple(start.shape) != (space.size,):
        raise ValueError(f"start needs shape ({space.size},); got {tuple(start.shape)}.")
    u = space.vector(problem.mean.new_zeros(space.size) if start is None else start)
    f = problem.mean + space.shift(u).view(problem.n, problem.c)
    covariance = covariance.best(problem.take_expectations(f, problem.no_blocks()).curvature)
    at = problem.take_expectations(f, covariance.blocks)

    def bound(at: Expected, u: Tensor, covariance: _Covariance) -> float:
        return float(at.log_prob.sum()) - 0.5 * space.dot(u, u) - covariance.kl()

    def norm(u: Tensor) -> float:
        return math.sqrt(max(space.dot(u, u), 0.0))

    path, steps, converged, ratio = [bound(at, u, covariance)], 0, False, math.inf
    while steps < iterations and not converged:
        steps += 1
        # The mean.
        pull = space.pull(at.residual.flatten())
        g = pull - u
        ratio = norm(g) / max(norm(pull), norm(u), FLOOR)
        d, df = covariance.step(g, at, ratio)
        df, blocks = df.view(problem.n, problem.c), covariance.blocks
        line = LineSearch(
            lambda f, blocks=blocks: problem.take_expectations(f, blocks),  # type: ignore[misc]
            f,
            df=df,
            products=(space.dot(u, u), space.dot(u, d), space.dot(d, d)),
        )
        t = line.find_length()
        value, moved = path[-1], problem.take_expectations(f + t * df, blocks)
        if bound(moved, u + t * d, covariance) >= value:
            u, f, at = u + t * d, f + t * df, moved
            value = bound(at, u, covariance)
        # The covariance.
        target, t, fall = covariance.best(at.curvature), 1.0, math.nan
        for _ in range(10):
            trial = covariance.mix(target, t) if t < 1 else target
            there = problem.take_expectations(f, trial.blocks)
            reached = bound(there, u, trial)
            if reached >= value:
                covariance, at, value = trial, there, reached
                break
            # The parabola a t - b t^2 through this step and the last one, of twice the length, gains at most a t / 4.
            fall, last = value - reached, fall
            if last - 4 * fall <= 8 * tolerance * max(1.0, abs(value)):
                break
            t /= 2
        path.append(value)
        # The ELBO is off by the square of the gradient: above 0.01 a standstill is no convergence.
        converged = ratio <= 1e-2 and path[-1] - path[-2] <= tolerance * max(1.0, abs(value))
    found = Variational(
        delta=problem.deviation * space.weights(u),
        f=f,
        elbo=bound(problem.take_expectations(f, covariance.blocks, others=True), u, covariance),
        path=tuple(path),
        gradient=ratio,
        iterations=steps,
        converged=converged,
    )
    return found, covariance


def _weight_step(
    problem: _Expectations, g: Tensor, at: Expected, preconditioner: Solvable, ratio: float
) -> tuple[Tensor, Tensor]:
    """The Newton step of the mean, (p,), and what it adds to f, (n c,)."""
    B, Phi, K = as_weight(at.curvature), problem.Phi, problem.K
    if K is not None and len(K) <= DENSE:
        # H^-1 g = g - Phi^T (I + B K)^-1 B Phi g, the matrix inversion lemma.
        every = slice(0, len(K))
        Phi_g = Phi @ g
        M = weigh(K, B, every)
        M.diagonal().add_(1)
        z = torch.linalg.solve(M, weigh(Phi_g[:, None], B, every))
        return g - Phi.T @ z[:, 0], Phi_g - (K @ z)[:, 0]
    found = cg(
        lambda V: V + Phi.normal(V, B),
        g[:, None],
        preconditioner=preconditioner,
        tolerance=max(0.01, min(0.1, math.sqrt(ratio))),  # the ELBO comes close with the square of the gradient
        verify=False,
        progress=False,
    )
    d = found.value[:, 0]
    return d, Phi @ d


@dataclass(frozen=True)
class _Diagonal(_Covariance):
    """``diag(v)``."""

    problem: _Expectations
    v: Tensor
    blocks: Tensor
    preconditioner: Solvable | None

    def kl(self) -> float:
        return 0.5 * float((self.v - 1 - self.v.log()).sum())

    def solve(self, R: Tensor) -> Tensor:
        """``Sigma R``, for (p, k): about ``H^-1 R``."""
        return self.v[:, None] * R

    def step(self, g: Tensor, at: Expected, ratio: float) -> tuple[Tensor, Tensor]:
        return _weight_step(self.problem, g, at, self.preconditioner or self, ratio)

    def best(self, curvature: Tensor) -> Self:
        v = 1 / (1 + self.problem.Phi.column_norms(as_weight(curvature)))
        return replace(self, v=v, blocks=self.problem.blocks(v))

    def mix(self, other: Self, t: float) -> Self:
        return replace(self, v=self.v.lerp(other.v, t), blocks=self.blocks.lerp(other.blocks, t))


@dataclass(frozen=True)
class _Directions(_Covariance):
    """``I - P P^T + P C P^T``, with ``F = Phi P`` and the covariances ``rest`` of f across P."""

    problem: _Expectations
    P: Tensor
    F: Tensor
    rest: Tensor
    C: Tensor
    blocks: Tensor

    def kl(self) -> float:
        log_det = float(log_det_from(cholesky_(self.C.clone())))
        return 0.5 * (float(self.C.trace()) - len(self.C) - log_det)

    def solve(self, R: Tensor) -> Tensor:
        """``Sigma R``, for (p, k): about ``H^-1 R``."""
        along = self.P.T @ R
        return R + self.P @ (self.C @ along - along)

    def step(self, g: Tensor, at: Expected, ratio: float) -> tuple[Tensor, Tensor]:
        return _weight_step(self.problem, g, at, self, ratio)

    def best(self, curvature: Tensor) -> Self:
        H = self.F.T @ weigh(self.F, as_weight(curvature), slice(0, len(self.F)))
        H.diagonal().add_(1)
        C = torch.cholesky_inverse(cholesky_(H))
        return replace(self, C=C, blocks=self.rest + self.problem.blocks_of(self.F @ C, self.F))

    def mix(self, other: Self, t: float) -> Self:
        return replace(self, C=self.C.lerp(other.C, t), blocks=self.blocks.lerp(other.blocks, t))


@dataclass(frozen=True)
class _Full(_Covariance):
    """``(I + Phi^T B Phi)^-1``, with ``B = L L^T`` (n, c) or (n, c, c), the root L and the Cholesky factor of M."""

    space: FunctionSpace
    B: Tensor
    root: Tensor
    factor: Tensor
    blocks: Tensor

    def kl(self) -> float:
        # tr M^-1 = n c - tr(B cov f), both being made of L^T K L M^-1.
        return 0.5 * (float(log_det_from(self.factor)) - float((self.B * self.blocks).sum()))

    def step(self, g: Tensor, at: Expected, ratio: float) -> tuple[Tensor, Tensor]:
        root = _root(at.curvature)
        d = self.space.solve(g, self.space.factor(root), root, 1.0)
        return d, d[1]

    def best(self, curvature: Tensor) -> Self:
        K, (n, c) = self.space.K, curvature.shape[:2]
        root = _root(curvature)
        factor = self.space.factor(root)
        T = solve_lower(factor, weigh(K, root, transpose=True))
        if curvature.ndim == 2:
            blocks = (K.diagonal() - T.square().sum(0)).view(n, c).clamp_min(0)
        else:
            at, T = torch.arange(n, device=K.device), T.T.reshape(n, c, -1)
            blocks = K.view(n, c, n, c)[at, :, at] - T @ T.mT
        return replace(self, B=curvature, root=root, factor=factor, blocks=blocks)

    def mix(self, other: Self, t: float) -> Self:
        return self.best(self.B.lerp(other.B, t))  # a step of the natural gradient is one of the precision


def _root(B: Tensor) -> Tensor:
    """L, (n c,) or (n, c, c), with ``B = L L^T``."""
    if B.ndim == 2:
        return B.flatten().clamp_min(0).sqrt()
    # The curvature of softmax is singular, and rounding may leave it slightly below zero.
    values, vectors = torch.linalg.eigh(B)
    return vectors * values.clamp_min(0).sqrt()[:, None, :]


# Draws and directions.


def draws(samples: int, n: int, c: int, *, seed: int) -> Tensor:
    """Standard normal numbers (samples, n, c) in float64, in pairs z, -z.

    Those of each example have unit covariance exactly, where there are enough for it not to tie them: 4 c.

    >>> z = draws(8, 1, 2, seed=0)[:, 0]
    >>> torch.allclose(z.T @ z / 8, torch.eye(2).double()), bool(z.sum(0).abs().max() < 1e-12)
    (True, True)
    """
    if not isinstance(samples, int) or samples < 2 or samples % 2:
        raise ValueError(f"Draws come in pairs, so samples must be an even number, at least 2; got {samples!r}.")
    z = torch.randn(n, samples // 2, c, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if samples >= 4 * c:
        L = torch.linalg.cholesky(z.mT @ z / (samples // 2))
        z = torch.linalg.solve_triangular(L, z.mT, upper=False).mT
    return torch.cat([z, -z], 1).transpose(0, 1).contiguous()


def _find_directions(problem: _Expectations, rank: int | str, seed: int) -> Tensor:
    """P, (p, r): orthonormal, spanning the top right singular vectors of Phi, or nearly so where it is large."""
    Phi, (rows, p) = problem.Phi, problem.Phi.shape
    most = min(rows, p)
    if rank != "auto" and (not isinstance(rank, int) or not 1 <= rank <= most):
        raise ValueError(f'rank must be "auto" or a number from 1 to {most}, the smaller side of J; got {rank!r}.')
    limit = rank if isinstance(rank, int) else max(1, min(most, 500, 2**27 // p))
    size, generator = min(most, limit + 10), torch.Generator().manual_seed(seed)
    start = torch.randn(rows, size, dtype=torch.float64, generator=generator).to(problem.mean)
    if rows <= DENSE:
        problem.K = Phi.gram() if problem.K is None else problem.K
        lam, Q = torch.linalg.eigh(problem.K)
    elif problem.K is not None:
        # The span of any vectors gives a bound; a few powers of K bring it close to the best.
        X = _orthonormal(start)
        for _ in range(2):
            X = _orthonormal(problem.K @ X)
        lam, Q = torch.linalg.eigh(X.T @ (problem.K @ X))
        Q = X @ Q
    else:
        X = _orthonormal(Phi.normal(_orthonormal(Phi.T @ start)))
        F = Phi @ X
        lam, Q = torch.linalg.eigh(F.T @ F)
        return _orthonormal(X @ Q.flip(1)[:, : _count_worthwhile(problem, lam.flip(0)[:limit], rank)])
    lam, Q = lam.flip(0)[:limit], Q.flip(1)[:, :limit]
    kept = _count_worthwhile(problem, lam, rank)
    return _orthonormal(Phi.T @ (Q[:, :kept] / lam[:kept].sqrt()))


def _count_worthwhile(problem: _Expectations, lam: Tensor, rank: int | str) -> int:
    """How many of the eigenvalues are kept: none that is zero to rounding."""
    largest = float(lam[0])
    if not largest > 0:
        raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
    floor = 100 * len(problem.mean) * torch.finfo(lam.dtype).eps * largest
    if rank == "auto":
        bend = problem.likelihood.observed_curvature(torch.zeros_like(problem.mean), problem.y).abs().max()
        floor = max(floor, min(0.01 / float(bend), largest))
    return max(1, int((lam >= floor).sum()))


def _orthonormal(X: Tensor) -> Tensor:
    """An orthonormal basis of the span of columns."""
    return torch.linalg.qr(X).Q
