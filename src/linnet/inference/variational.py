r"""Gaussian variational posteriors of a likelihood on a linear model.

With :math:`f = m + \Phi u`, prior :math:`u \sim N(0, I)` and :math:`q(u) = N(\mu, \Sigma)`, the outputs of example i
are Gaussian with mean :math:`m_i + \Phi_i \mu` and covariance :math:`C_i = \Phi_i \Sigma \Phi_i^\top`, so that

.. math:: \mathrm{ELBO} = \sum_i E_{f_i \sim N}[\log p(y_i \mid f_i)] - \mathrm{KL}(q \,\|\, N(0, I)),

the lower bound of the log evidence, takes an expectation over c outputs for each example (local reparametrization).
There are two families of covariances here, and all of them in `linnet.inference.kernel_vi`, where K is at hand:

- `meanfield`: :math:`\Sigma = \mathrm{diag}(v)`;
- `lowrank`: :math:`\Sigma = I - P P^\top + P C P^\top`, any covariance C along r orthonormal directions, the prior in
  all others. With r the rank of K it holds the best of all Gaussians.

The mean is free in both. Each iteration takes a Newton step of the mean, with K where there is one and otherwise by
conjugate gradients with :math:`\Sigma` as preconditioner, and a natural gradient step of the covariance: where the
expected curvature is B, the best one has :math:`1 / v = 1 + \mathrm{diag}(\Phi^\top B \Phi)` or
:math:`C^{-1} = I + P^\top \Phi^\top B \Phi P`. Steps are shortened until the ELBO rises.
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
from linnet.inference.mode.spaces import check_concave, check_kind, check_mean, check_operator
from linnet.linalg.cholesky import cholesky_, log_det_from
from linnet.linalg.conjugate_gradients import Solvable, cg
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import as_weight, weigh
from linnet.probability.expectations import Expected, expected
from linnet.probability.likelihoods import Likelihood

DRAWS = 2**22
"""Numbers that are drawn: so many examples have draws of their own, and the next ones use them again."""

DENSE = 2000
"""Rows up to which the directions are eigenvectors of the kernel itself."""

FLAT = 1e-2
"""The relative gradient above which a standstill is no convergence. The ELBO is off by its square."""

POWERS = 2
"""Of a kernel that is too large for its eigenvectors."""

RANK = 500
ENTRIES = 2**27
"""What "auto" allows: directions, and numbers in their basis."""

MATTERS = 1e-2
"""A direction is kept where the data say at least this part of what the prior says: curvature times eigenvalue."""


@dataclass(frozen=True)
class Variational:
    """A Gaussian over the displacement, ``delta + S^(1/2) N(0, Sigma)``.

    Attributes:
        delta: (p,), its mean.
        f: (n, c), the mean of f.
        variances: (p,), of the displacement, S times v; None but from `meanfield`.
        basis: P, (p, r), orthonormal directions of whitened weights; None but from `lowrank`.
        C: (r, r), the covariance along them; None but from `lowrank`.
        elbo: The lower bound of the log evidence: exact, or for `Categorical` an unbiased estimate by further draws.
        path: The ELBO at the start and after each iteration, with the draws that the iterations use; it never falls.
        gradient: Norm of the mean's gradient ``Phi^T E[residual] - u`` before the last step, relative to that of the
            larger of its two terms.
        iterations: How many.
        converged: Whether the ELBO has stopped rising, at a mean with a small gradient.
        root: L, (n c,) or (n, c, c), with ``Sigma = (I + Phi^T L L^T Phi)^-1``; None but from
            `linnet.inference.kernel_vi`.
        factor: (n c, n c), the lower Cholesky factor of ``I + L^T K L``; None as root is.
    """

    delta: Tensor
    f: Tensor
    variances: Tensor | None
    basis: Tensor | None
    C: Tensor | None
    elbo: float
    path: tuple[float, ...]
    gradient: float
    iterations: int
    converged: bool
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
        likelihood: Of the targets given f; log-concave.
        K: ``J S J^T``, (n c, n c), where it is at hand: with up to 2000 rows it solves for the steps of the mean.
        start: delta to begin with, (p,), such as the mode; None for zero.
        preconditioner: Of the Hessian ``I + Phi^T B Phi`` in the steps of the mean; None for the variances of q.
        samples: Draws for each example, where expectations are not exact (`Categorical`). They come
            in pairs z, -z and stay the same throughout.
        seed: Of the draws.
        tolerance: Stop when an iteration raises the ELBO by less than this part of it.
        iterations: At most as many.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> q = meanfield(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.variances.shape
        (True, torch.Size([3]))
    """
    problem = Problem(J, y, variance, mean, likelihood, K, samples, seed)
    covariance = _Diagonal(problem, torch.ones_like(variance), torch.zeros_like(mean))
    found, last = _ascend(problem, covariance, start, preconditioner, tolerance, iterations)
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

    Args:
        J: As for `meanfield`, and so are the others.
        y: Targets, as ``likelihood.targets`` takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Of the targets given f; log-concave.
        rank: How many directions; the basis takes p numbers for each. ``"auto"`` takes those along which the data say
            more than a hundredth of what the prior says, up to 500 and to 2^27 numbers.
        K: ``J S J^T``, (n c, n c), where it is at hand.
        start: delta to begin with, (p,), such as the mode; None for zero.
        samples: Draws for each example, where expectations are not exact.
        seed: Of the draws, and of the search for eigenvectors of large kernels.
        tolerance: Stop when an iteration raises the ELBO by less than this part of it.
        iterations: At most as many.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> J = Matrix(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64))
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double()}
        >>> q = lowrank(J, torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.basis.shape, q.C.shape
        (True, torch.Size([3, 2]), torch.Size([2, 2]))
    """
    problem = Problem(J, y, variance, mean, likelihood, K, samples, seed)
    P = _directions(problem, rank, seed)
    F = problem.Phi @ P
    C = torch.eye(P.shape[1], dtype=P.dtype, device=P.device)
    # What the prior says across the directions; below zero only by rounding.
    rest = problem.blocks(None) - problem.blocks_of(F, F)
    covariance = _Directions(problem, P, F, rest, C, torch.zeros_like(mean))
    found, last = _ascend(problem, covariance, start, None, tolerance, iterations)
    return replace(found, basis=last.P, C=last.C)


class Problem:
    """What all families share: whitened features, targets, and expectations over f."""

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
        if not likelihood.diagonal:
            eps = draws(samples, 2 * self.own, self.c, seed=seed).to(mean)
            self.eps, self.others = eps[:, : self.own], eps[:, self.own :]

    def expected(self, f: Tensor, cov: Tensor, *, others: bool = False) -> Expected:
        """Over f with means (n, c) and covariances (n, c, c) or variances (n, c); by other draws than the ascent's."""
        eps = self.others if others else self.eps
        if eps is None:
            return expected(self.likelihood, f, cov, self.y)
        parts = []
        for start in range(0, self.n, self.own):
            part = slice(start, min(start + self.own, self.n))
            parts.append(expected(self.likelihood, f[part], cov[part], self.y[part], eps[:, : part.stop - start]))
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


# The ascent.


class _Covariance(ABC):
    """A covariance of whitened weights.

    Attributes:
        blocks: The covariances of f that follow, as `Problem.blocks` gives them.
    """

    blocks: Tensor

    @abstractmethod
    def kl(self) -> float:
        """What it adds to KL(q || N(0, I))."""

    @abstractmethod
    def solve(self, R: Tensor) -> Tensor:
        """``Sigma R``, for (p, k): about ``H^-1 R``."""

    @abstractmethod
    def best(self, B: Tensor) -> Self:
        """The best one where the expected curvature is B."""

    @abstractmethod
    def mixed(self, other: Self, t: float) -> Self:
        """A part t of the way to another."""


Family = TypeVar("Family", bound=_Covariance)


def _ascend(
    problem: Problem,
    covariance: Family,
    start: Tensor | None,
    preconditioner: Solvable | None,
    tolerance: float,
    iterations: int,
) -> tuple[Variational, Family]:
    Phi, p = problem.Phi, problem.Phi.shape[1]
    u = torch.zeros_like(problem.deviation)
    if start is not None:
        if tuple(start.shape) != (p,):
            raise ValueError(f"start needs shape ({p},); got {tuple(start.shape)}.")
        u = torch.where(problem.deviation > 0, start / problem.deviation, 0)
    f = problem.mean + (Phi @ u).view(problem.n, problem.c)
    at = problem.expected(f, torch.zeros_like(covariance.blocks))
    covariance = covariance.best(as_weight(at.curvature))
    at = problem.expected(f, covariance.blocks)

    def bound(at: Expected, u: Tensor, covariance: _Covariance) -> float:
        return float(at.log_prob.sum()) - 0.5 * float(u @ u) - covariance.kl()

    path, steps, converged, ratio = [bound(at, u, covariance)], 0, False, math.inf
    while steps < iterations and not converged:
        steps += 1
        # The mean.
        pull = Phi.T @ at.residual.flatten()
        g = pull - u
        ratio = float(g.norm()) / max(float(pull.norm()), float(u.norm()), FLOOR)
        d, df = _step(problem, g, at, preconditioner or covariance, ratio)
        blocks = covariance.blocks
        line = LineSearch(
            lambda f, blocks=blocks: problem.expected(f, blocks),  # type: ignore[misc]
            f,
            df=df,
            products=(float(u @ u), float(u @ d), float(d @ d)),
        )
        t = line.find_length()
        value, moved = path[-1], problem.expected(f + t * df, blocks)
        if bound(moved, u + t * d, covariance) >= value:
            u, f, at = u + t * d, f + t * df, moved
            value = bound(at, u, covariance)
        # The covariance: its f-covariances are linear in it, so that shorter steps need no passes.
        target = covariance.best(as_weight(at.curvature))
        for halvings in range(10):
            trial = covariance.mixed(target, 0.5**halvings)
            there = problem.expected(f, trial.blocks)
            if bound(there, u, trial) >= value:
                covariance, at = trial, there
                value = bound(at, u, covariance)
                break
        path.append(value)
        converged = ratio <= FLAT and path[-1] - path[-2] <= tolerance * max(1.0, abs(value))
    found = Variational(
        delta=problem.deviation * u,
        f=f,
        variances=None,
        basis=None,
        C=None,
        elbo=bound(problem.expected(f, covariance.blocks, others=True), u, covariance),
        path=tuple(path),
        gradient=ratio,
        iterations=steps,
        converged=converged,
    )
    return found, covariance


def _step(problem: Problem, g: Tensor, at: Expected, preconditioner: Solvable, ratio: float) -> tuple[Tensor, Tensor]:
    """The Newton step of the mean, (p,), and what it adds to f, (n, c)."""
    B, Phi, K = as_weight(at.curvature), problem.Phi, problem.K
    if K is not None and len(K) <= DENSE:
        # H^-1 g = g - Phi^T (I + B K)^-1 B Phi g, the matrix inversion lemma.
        every = slice(0, len(K))
        Phi_g = Phi @ g
        M = weigh(K, B, every)
        M.diagonal().add_(1)
        z = torch.linalg.solve(M, weigh(Phi_g[:, None], B, every))
        return g - Phi.T @ z[:, 0], (Phi_g - (K @ z)[:, 0]).view(problem.n, problem.c)
    found = cg(
        lambda V: V + Phi.normal(V, B),
        g[:, None],
        preconditioner=preconditioner,
        tolerance=max(0.01, min(0.1, math.sqrt(ratio))),  # the ELBO comes close with the square of the gradient
        verify=False,
        progress=False,
    )
    d = found.value[:, 0]
    return d, (Phi @ d).view(problem.n, problem.c)


@dataclass(frozen=True)
class _Diagonal(_Covariance):
    problem: Problem
    v: Tensor
    blocks: Tensor

    def kl(self) -> float:
        return 0.5 * float((self.v - 1 - self.v.log()).sum())

    def solve(self, R: Tensor) -> Tensor:
        return self.v[:, None] * R

    def best(self, B: Tensor) -> Self:
        v = 1 / (1 + self.problem.Phi.column_norms(B))
        return replace(self, v=v, blocks=self.problem.blocks(v))

    def mixed(self, other: Self, t: float) -> Self:
        return replace(self, v=self.v.lerp(other.v, t), blocks=self.blocks.lerp(other.blocks, t))


@dataclass(frozen=True)
class _Directions(_Covariance):
    problem: Problem
    P: Tensor
    F: Tensor
    rest: Tensor
    C: Tensor
    blocks: Tensor

    def kl(self) -> float:
        log_det = float(log_det_from(cholesky_(self.C.clone())))
        return 0.5 * (float(self.C.trace()) - len(self.C) - log_det)

    def solve(self, R: Tensor) -> Tensor:
        along = self.P.T @ R
        return R + self.P @ (self.C @ along - along)

    def best(self, B: Tensor) -> Self:
        H = self.F.T @ weigh(self.F, B, slice(0, len(self.F)))
        H.diagonal().add_(1)
        C = torch.cholesky_inverse(cholesky_(H))
        return replace(self, C=C, blocks=self.rest + self.problem.blocks_of(self.F @ C, self.F))

    def mixed(self, other: Self, t: float) -> Self:
        return replace(self, C=self.C.lerp(other.C, t), blocks=self.blocks.lerp(other.blocks, t))


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


def _directions(problem: Problem, rank: int | str, seed: int) -> Tensor:
    """P, (p, r): orthonormal, spanning the top right singular vectors of Phi, or nearly so where it is large."""
    Phi, (rows, p) = problem.Phi, problem.Phi.shape
    most = min(rows, p)
    if rank != "auto" and (not isinstance(rank, int) or not 1 <= rank <= most):
        raise ValueError(f'rank must be "auto" or a number from 1 to {most}, the smaller side of J; got {rank!r}.')
    limit = rank if isinstance(rank, int) else max(1, min(most, RANK, ENTRIES // p))
    size, generator = min(most, limit + 10), torch.Generator().manual_seed(seed)
    start = torch.randn(rows, size, dtype=torch.float64, generator=generator).to(problem.mean)
    if rows <= DENSE:
        problem.K = Phi.gram() if problem.K is None else problem.K
        lam, Q = torch.linalg.eigh(problem.K)
    elif problem.K is not None:
        # The span of any vectors gives a bound; a few powers of K bring it close to the best.
        X = _orthonormal(start)
        for _ in range(POWERS):
            X = _orthonormal(problem.K @ X)
        lam, Q = torch.linalg.eigh(X.T @ (problem.K @ X))
        Q = X @ Q
    else:
        X = _orthonormal(Phi.T @ start)
        for _ in range(POWERS - 1):
            X = _orthonormal(Phi.normal(X))
        F = Phi @ X
        lam, Q = torch.linalg.eigh(F.T @ F)
        return _orthonormal(X @ Q.flip(1)[:, : _worth(problem, lam.flip(0)[:limit], rank)])
    lam, Q = lam.flip(0)[:limit], Q.flip(1)[:, :limit]
    kept = _worth(problem, lam, rank)
    return _orthonormal(Phi.T @ (Q[:, :kept] / lam[:kept].sqrt()))


def _worth(problem: Problem, lam: Tensor, rank: int | str) -> int:
    """How many of the eigenvalues are kept: none that is zero to rounding."""
    largest = float(lam[0])
    if not largest > 0:
        raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
    floor = 100 * len(problem.mean) * torch.finfo(lam.dtype).eps * largest
    if rank == "auto":
        bend = problem.likelihood.curvature(torch.zeros_like(problem.mean)).abs().max()
        floor = max(floor, min(MATTERS / float(bend), largest))
    return max(1, int((lam >= floor).sum()))


def _orthonormal(X: Tensor) -> Tensor:
    """An orthonormal basis of the span of columns."""
    return torch.linalg.qr(X).Q
