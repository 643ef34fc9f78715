r"""More or fewer observations of a fit by conjugate gradients: one block solve, as wide as what comes or goes.

With H the posterior precision of the *other* observations in whitened weights, :math:`\Phi_B` the rows that come or go,
N their noise and :math:`V = H^{-1} \Phi_B^\top`,

.. math:: u_{with} = u_{without} + V (N + \Phi_B V)^{-1} (r_B - \Phi_B u_{without}), \qquad
          u_{without} = u_{with} - V N^{-1} (r_B - \Phi_B u_{with})

A posterior sample moves to :math:`x - V (N + \Phi_B V)^{-1} (\Phi_B x + e)`, :math:`e \sim N(0, N)`, where observations
come (Matheron), and to :math:`x + V z`, :math:`z \sim N(0, (N + \Phi_B V)^{-1})`, where they go: both have the right
covariance. The log determinant changes by :math:`\log\det(I + N^{-1/2} \Phi_B V N^{-1/2})`. H is at least the identity
both ways: nothing is subtracted from a precision.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import LOG_2PI
from linnet.inference.iterative_solves import preconditioner_of
from linnet.inference.problem import Fit, SolverSettings, Task
from linnet.linalg import Solution, cg, cholesky_, cholesky_solve, solve_lower, solve_upper
from linnet.probability import SamplePosterior


class _Block(NamedTuple):
    """Some rows beside all others.

    Attributes:
        V: ``S^(1/2) H^-1 Phi_B^T``, (p, k), of the other rows.
        C: The lower Cholesky factor of ``I + N^(-1/2) Phi_B V N^(-1/2)``, (k, k).
        root: ``N^(-1/2)``, (k,).
        solution: Of the solve.
    """

    V: Tensor
    C: Tensor
    root: Tensor
    solution: Solution


def extend_by_solves(task: Task, fit: Fit, new: Task, whole: Task, settings: SolverSettings) -> Fit:
    """The fit with more observations.

    Args:
        task: The observations of the fit.
        fit: Their fit.
        new: The new observations.
        whole: Both.
        settings: How to solve.
    """
    block, posterior = _solve(task, fit, new, settings), fit.posterior
    assert isinstance(posterior, SamplePosterior)
    left = block.root * (new.r - new.J @ posterior.delta)
    step = block.root * cholesky_solve(block.C, left)
    delta = posterior.delta + block.V @ step
    e = torch.randn(len(new.r), posterior.samples.shape[1], dtype=delta.dtype, generator=settings.generator(8))
    moved = block.root[:, None] * (new.J @ posterior.samples) + e.to(delta.device)
    samples = posterior.samples - block.V @ (block.root[:, None] * cholesky_solve(block.C, moved))
    value = fit.log_evidence - 0.5 * (_energy(block, left) + len(left) * LOG_2PI)
    value += new.noise.repeat_evidence(fit.choice.noise)
    return _replaced(fit, whole, SamplePosterior(delta, samples), value, block.solution)


def reduce_by_solves(fit: Fit, rest: Task, gone: Task, settings: SolverSettings) -> Fit:
    """The fit without some observations.

    Args:
        fit: The fit.
        rest: The observations that stay.
        gone: The observations that go.
        settings: How to solve.
    """
    block, posterior = _solve(rest, fit, gone, settings), fit.posterior
    assert isinstance(posterior, SamplePosterior)
    left = gone.r - gone.J @ posterior.delta
    delta = posterior.delta - block.V @ (block.root.square() * left)
    z = torch.randn(len(left), posterior.samples.shape[1], dtype=delta.dtype, generator=settings.generator(9))
    z = block.root[:, None] * solve_upper(block.C, z.to(delta.device))
    left = block.root * (gone.r - gone.J @ delta)
    value = fit.log_evidence + 0.5 * (_energy(block, left) + len(left) * LOG_2PI)
    value -= gone.noise.repeat_evidence(fit.choice.noise)
    return _replaced(fit, rest, SamplePosterior(delta, posterior.samples + block.V @ z), value, block.solution)


def _replaced(fit: Fit, task: Task, posterior: SamplePosterior, value: float, solution: Solution) -> Fit:
    rows = task.noise.rows(fit.choice.noise)
    alpha = (task.r - task.J @ posterior.delta) / rows
    return replace(fit, posterior=posterior, noise_rows=rows, alpha=alpha, log_evidence=value, solution=solution)


def _energy(block: _Block, left: Tensor) -> float:
    """Twice the negative log density of the rows given the others, without the constant.

    ``left`` are their residuals to the mean of the others, in units of their noise.
    """
    half = solve_lower(block.C, left)
    return float(half.square().sum()) + 2 * float(block.C.diagonal().log().sum() - block.root.log().sum())


def _solve(task: Task, fit: Fit, block: Task, settings: SolverSettings) -> _Block:
    """Solve for the rows of ``block``, given those of ``task``."""
    J, d = task.J, fit.variance.sqrt()
    rows, k = task.noise.rows(fit.choice.noise), block.J.shape[0]
    root = rows.rsqrt()[:, None]
    Phi, right = J.scaled(d), d[:, None] * (block.J.T @ torch.eye(k, dtype=J.dtype, device=J.device))
    given = {"tolerance": settings.tolerance, "iterations": settings.iterations, "progress": settings.progress}
    what = "The solve for the observations that come or go"
    if fit.solver == "cg-weight":
        P = preconditioner_of(Phi, J, 1 / rows, settings, "weight")
        solution = cg(lambda U: U + Phi.normal(U, 1 / rows), right, preconditioner=P, **given).checked(what)  # type: ignore[arg-type]
        whitened = solution.value
    else:
        P = preconditioner_of(Phi, J, 1 / rows, settings, "function")

        def product(U: Tensor) -> Tensor:
            return U + root * (Phi @ (Phi.T @ (root * U)))

        solution = cg(product, root * (Phi @ right), preconditioner=P, **given).checked(what)  # type: ignore[arg-type]
        whitened = right - Phi.T @ (root * solution.value)
    V, small = d[:, None] * whitened, block.noise.rows(fit.choice.noise).rsqrt()
    C = small[:, None] * (block.J @ V) * small
    C = 0.5 * (C + C.T)
    C.diagonal().add_(1)
    return _Block(V, cholesky_(C), small, solution)
