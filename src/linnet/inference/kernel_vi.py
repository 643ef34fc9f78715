r"""The best of all Gaussian posteriors of a likelihood on a linear model, from its dense kernel.

With f = m + Phi u and u ~ N(0, I) as in `linnet.inference.variational`, the Gaussian q(u) with the largest ELBO has

.. math:: \mu = \Phi^\top \alpha, \quad \alpha = E_q[\mathrm{residual}], \qquad
          \Sigma = (I + \Phi^\top \bar B \Phi)^{-1}, \quad \bar B = E_q[B]

(Opper and Archambeau 2009): the form of the Laplace approximation, but with averages over q where that has values at
the mode. With few labels the two are far apart. At a mode that is sure of its labels B is next to nothing, so that
Laplace takes the prior's covariance, around a mean that has moved just far enough to be sure; the posterior has its
mean much further out, since more of it lies there than on the side of the prior, where the labels forbid it.

Each iteration takes two or more Cholesky decompositions of :math:`M = I + \bar L^\top K \bar L`, with
:math:`\bar B = \bar L \bar L^\top`: one for the Newton step of the mean, and one for each covariance that is tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.newton import FLOOR
from linnet.inference.variational import FLAT, Problem, Variational
from linnet.linalg.cholesky import cholesky_, cholesky_solve, log_det_from, solve_lower
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import inner_matrix, weigh
from linnet.probability.expectations import Expected
from linnet.probability.likelihoods import Likelihood

DRAWS = 256
"""Draws for each example. Where the prior says next to nothing, few of them do not show how the covariance should
change, and the ELBO stands still too early: with 64, by about 2 at a prior standard deviation of f of 60."""


def full(
    J: LinearOperator,
    y: Tensor,
    *,
    variance: Tensor,
    mean: Tensor,
    likelihood: Likelihood,
    K: Tensor,
    start: Tensor | None = None,
    samples: int = DRAWS,
    seed: int = 0,
    tolerance: float = 1e-7,
    iterations: int = 200,
) -> Variational:
    """The Gaussian with the largest ELBO, of any mean and covariance.

    Memory: two matrices beside K.

    Args:
        J: (n c, p).
        y: Targets, as ``likelihood.targets`` takes them.
        variance: S, (p,).
        mean: m, (n, c).
        likelihood: Of the targets given f; log-concave.
        K: ``J S J^T``, (n c, n c).
        start: alpha to begin with, (n c,), such as that of a `linnet.inference.mode.newton.Mode` in function space;
            None for zero.
        samples: Draws for each example where expectations are not exact (`Categorical`), in pairs; the same throughout.
        seed: Of the draws.
        tolerance: Stop when an iteration raises the ELBO by less than this part of it.
        iterations: At most as many.

    Example:
        >>> from linnet.probability.likelihoods import Bernoulli
        >>> from linnet.linalg.matrices import Matrix
        >>> A = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
        >>> given = {"variance": torch.ones(3).double(), "mean": torch.zeros(2, 1).double(), "K": A @ A.T}
        >>> q = full(Matrix(A), torch.tensor([1.0, 0.0]), likelihood=Bernoulli(), **given)
        >>> q.converged, q.factor.shape
        (True, torch.Size([2, 2]))
    """
    problem = Problem(J, y, variance, mean, likelihood, K, samples, seed)
    n, c, m = problem.n, problem.c, len(K)
    alpha = torch.zeros_like(K[0]) if start is None else start
    if tuple(alpha.shape) != (m,):
        raise ValueError(f"start needs shape ({m},), that of alpha; got {tuple(alpha.shape)}.")
    f = mean + (K @ alpha).view(n, c)
    none = torch.zeros(n, c, dtype=mean.dtype, device=mean.device)
    at = problem.expected(f, none if likelihood.diagonal else torch.diag_embed(none))
    cov = _Covariance.of(K, at.curvature)
    at = problem.expected(f, cov.blocks)

    def bound(at: Expected, alpha: Tensor, f: Tensor, cov: _Covariance) -> float:
        return float(at.log_prob.sum()) - 0.5 * float(alpha @ (f - mean).flatten()) - cov.kl

    path, steps, converged, ratio = [bound(at, alpha, f, cov)], 0, False, math.inf
    while steps < iterations and not converged:
        steps += 1
        # The mean: u moves by H^-1 (Phi^T residual - u), which is Phi^T d.
        residual = at.residual.flatten()
        g = residual - alpha
        Kg, norms = K @ g, (float(residual @ (K @ residual)), float(alpha @ (f - mean).flatten()))
        ratio = math.sqrt(max(float(g @ Kg), 0.0)) / max(math.sqrt(max(*norms, 0.0)), FLOOR)
        d = g - _inner(K, at.curvature, Kg)
        df = (K @ d).view(n, c)
        products = (norms[1], float(alpha @ df.flatten()), float(d @ df.flatten()))
        line = LineSearch(lambda f, blocks=cov.blocks: problem.expected(f, blocks), f, df=df, products=products)  # type: ignore[misc]
        t = line.find_length()
        value, moved = path[-1], problem.expected(f + t * df, cov.blocks)
        if bound(moved, alpha + t * d, f + t * df, cov) >= value:
            alpha, f, at = alpha + t * d, f + t * df, moved
            value = bound(at, alpha, f, cov)
        # The covariance: a step of the natural gradient, which is one of the precision.
        for halvings in range(10):
            trial = _Covariance.of(K, cov.B.lerp(at.curvature, 0.5**halvings))
            there = problem.expected(f, trial.blocks)
            if bound(there, alpha, f, trial) >= value:
                cov, at = trial, there
                value = bound(at, alpha, f, cov)
                break
        path.append(value)
        converged = ratio <= FLAT and path[-1] - path[-2] <= tolerance * max(1.0, abs(value))
    return Variational(
        delta=variance * (J.T @ alpha),
        f=f,
        variances=None,
        basis=None,
        C=None,
        elbo=bound(problem.expected(f, cov.blocks, others=True), alpha, f, cov),
        path=tuple(path),
        gradient=ratio,
        iterations=steps,
        converged=converged,
        root=cov.root,
        factor=cov.factor,
    )


@dataclass(frozen=True)
class _Covariance:
    """``(I + Phi^T B Phi)^-1``.

    Attributes:
        B: (n, c) or (n, c, c).
        root: L with ``B = L L^T``, (n c,) or (n, c, c).
        factor: The Cholesky factor of M.
        blocks: The covariance of each example's f, in the shape of B.
        kl: What it adds to KL(q || N(0, I)).
    """

    B: Tensor
    root: Tensor
    factor: Tensor
    blocks: Tensor
    kl: float

    @classmethod
    def of(cls, K: Tensor, B: Tensor) -> _Covariance:
        n, c = B.shape[:2]
        root = _root(B)
        factor = cholesky_(inner_matrix(K, root))
        T = solve_lower(factor, weigh(K, root, transpose=True))
        if B.ndim == 2:
            blocks = (K.diagonal() - T.square().sum(0)).view(n, c).clamp_min(0)
        else:
            at, T = torch.arange(n, device=K.device), T.T.reshape(n, c, -1)
            blocks = K.view(n, c, n, c)[at, :, at] - T @ T.mT
        # tr M^-1 = n c - tr(B cov f), both being made of L^T K L M^-1.
        kl = 0.5 * (float(log_det_from(factor)) - float((B * blocks).sum()))
        return cls(B, root, factor, blocks, kl)


def _root(B: Tensor) -> Tensor:
    """L, (n c,) or (n, c, c), with ``B = L L^T``."""
    if B.ndim == 2:
        return B.flatten().clamp_min(0).sqrt()
    # The curvature of softmax is singular, and rounding may leave it slightly below zero.
    values, vectors = torch.linalg.eigh(B)
    return vectors * values.clamp_min(0).sqrt()[:, None, :]


def _inner(K: Tensor, B: Tensor, x: Tensor) -> Tensor:
    """``L M^-1 L^T x``, (n c,), for ``B = L L^T``."""
    root = _root(B)
    inside = cholesky_solve(cholesky_(inner_matrix(K, root)), weigh(x[:, None], root, transpose=True))
    return weigh(inside, root)[:, 0]
