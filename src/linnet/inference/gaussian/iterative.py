"""Conditioning on Gaussian observations by conjugate gradients: mean, samples and log determinant in one block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnet._common import find_dense_budget
from linnet.inference.evidence import gaussian
from linnet.inference.evidence.gaussian import LOG_2PI, Choice, KernelSpectrum
from linnet.inference.problem import Fit, SolverSettings, Task, assumed_noise
from linnet.jacobian import AutodiffBlock, fused_cost, gram_cost
from linnet.linalg import (
    ClassBlocks,
    cg,
    draw_landmarks,
    lanczos_quadrature,
    log_det_from_tridiagonals,
    nystrom_preconditioner,
    sketch,
)
from linnet.probability import SamplePosterior

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian
    from linnet.linalg import LinearOperator, Preconditioner
    from linnet.probability import Prior


def condition(tasks: Sequence[Task], prior: Prior, settings: SolverSettings, *, space: str) -> list[Fit]:
    """As `linnet.inference.gaussian.closed_form.condition`, in the given space, with one scale and one noise at most to
    choose."""
    tasks = [replace(task, J=task.J.cached_if_fits()) for task in tasks]
    noise = tasks[0].noise
    fixed = () if prior.scales else (1.0,)
    if fixed and noise.value is not None:
        choice = Choice(fixed, noise.value, math.nan)
    else:
        spectra = [_streamed_spectrum(task, prior, settings) for task in tasks]
        choice = gaussian.choose_one(
            gaussian.join_spectra(spectra),
            scale=fixed[0] if fixed else None,
            noise=noise.value[0] if noise.value else None,
            floor=64 * max(task.J.eps for task in tasks),
            assumed=sum(assumed_noise(tasks)),
        )
    variance = prior.variance(choice.scales if prior.scales else ())
    solve = _cg_weight if space == "weight" else _cg_function
    return [solve(task, variance, choice, settings) for task in tasks]


def _streamed_spectrum(task: Task, prior: Prior, settings: SolverSettings) -> KernelSpectrum:
    r"""By Lanczos in weight space, one pass a step, started at ``Phi^T r`` and at ``Phi^T z`` of random probes z.

    The nodes of ``Phi^T Phi`` are those of the kernel, and the energy of r at an eigenvalue is that of ``Phi^T r``
    divided by it; what is missing from the squared norm of r lies where the kernel is zero.
    """
    root, J = task.noise.base.rsqrt(), task.J
    Phi, m = J.scaled(prior.base.sqrt()), J.shape[0]
    z = torch.randn(m, settings.probes, dtype=J.dtype, generator=settings.generator(1)).to(J.device)
    B = torch.cat([(root * task.r)[:, None], z], 1)
    found = lanczos_quadrature(lambda V: Phi.normal(V, root.square()), Phi.T @ (root[:, None] * B), steps=60)
    nodes, weights, norms2 = (x.double().cpu() for x in found)
    real = nodes > 1e3 * J.eps * nodes.max()
    energies = torch.where(real, weights * norms2[:, None] / nodes, 0.0)
    nodes = torch.where(real, nodes, 0.0)
    total = B.double().square().sum(0).cpu()
    nodes = torch.cat([nodes, nodes.new_zeros(len(nodes), 1)], 1)
    energies = torch.cat([energies, (total - energies.sum(1)).clamp_min(0)[:, None]], 1)
    counts = energies[1:] / energies[1:].sum(1, keepdim=True) * (m / settings.probes)
    return KernelSpectrum(nodes[1:].flatten(), counts.flatten(), nodes[0], energies[0])


def preconditioner_of(
    Phi: LinearOperator, J: Jacobian, weight: Any, settings: SolverSettings, space: str
) -> Preconditioner | None:
    """As the settings say, for H or M of ``Phi = J.scaled(...)`` and the curvature ``weight``."""
    kind = settings.preconditioner
    if kind == "none" or (kind in ("auto", "pivoted-cholesky") and not J.by_position):
        return None
    landmarks = 6000 if J.device.type == "cuda" else 1000
    if kind != "nystrom" and settings.rank == "auto" and (J.c > landmarks or J.has_many_outputs()):
        # One example is too many rows. A sketch of all examples takes a few columns.
        root = (
            weight.as_form("root") if isinstance(weight, ClassBlocks) else weight.sqrt() if weight.ndim == 1 else None
        )
        if space == "function" or root is None:
            return None
        return sketch(Phi, root, rank=4 * settings.samples, generator=settings.generator(2))
    if settings.rank == "auto":
        # A direction is as long as the system is large, and all are held twice while they are made.
        length = J.shape[1 if space == "weight" else 0]
        most = int(0.7 * find_dense_budget(settings.memory, J.device)) // (2 * length * J.dtype.itemsize)
        rank = max(1, min(J.n, min(landmarks, most) // J.c, _worthwhile(J)))
    else:
        rank = min(int(settings.rank), J.n)
    index = draw_landmarks(J.n, rank, settings.generator(2))
    scale = Phi.d  # type: ignore[attr-defined]
    # An eigenvalue far below one changes nothing beside the identity.
    return nystrom_preconditioner(Phi, landmarks=J.subset(index).scaled(scale), weight=weight, space=space, least=0.01)


def _worthwhile(J: Jacobian) -> int:
    """Landmarks whose kernel with an example costs no more than a few passes over it.

    That bounds nothing where kernels are cheap (dense layers), and a lot where they are not (convolutions).
    """
    passes = 400 if J.device.type == "cuda" else 40  # a GPU is at its best with kernels
    factors = [f for f in J._sample if not isinstance(f, AutodiffBlock)]
    each = sum(fused_cost(f, k=1) for f in factors)
    pair = sum(gram_cost(f) for f in factors)
    return max(1, int(passes * each / pair)) if pair > 0 and len(factors) == len(J._sample) else J.n


def _cg_weight(task: Task, variance: Tensor, choice: Choice, settings: SolverSettings) -> Fit:
    J, rows = task.J, task.noise.rows(choice.noise)
    d, weight, k = variance.sqrt(), 1 / rows, settings.samples
    Phi = J.scaled(d)
    P = preconditioner_of(Phi, J, weight, settings, "weight")
    # Right-hand sides whose covariance is H: their solutions are posterior samples.
    e = torch.randn(J.shape[0], k, dtype=J.dtype, generator=settings.generator(3)).to(J.device)
    h = torch.randn(J.shape[1], k, dtype=J.dtype, generator=settings.generator(4)).to(J.device)
    first = torch.cat([(weight * task.r)[:, None], weight.sqrt()[:, None] * e], 1)
    B = Phi.T @ first
    B[:, 1:] += h
    B = torch.cat([B, probes_of(P, J.shape[1], J, settings)], 1)
    solution = cg(
        lambda V: V + Phi.normal(V, weight),
        B,
        preconditioner=P,
        tolerance=settings.tolerance,
        iterations=settings.iterations,
        probes=settings.probes,
        progress=settings.progress,
    ).checked("The weight-space solve")
    delta, samples = d * solution.value[:, 0], d[:, None] * solution.value[:, 1 : 1 + k]
    u = solution.value[:, 0]
    left = task.r - J @ delta
    assert solution.tridiagonals is not None
    log_det, error = log_det_from_tridiagonals(solution.tridiagonals, P, J.shape[1])
    fit = float((weight * left.square()).sum() + u @ u)
    value = -0.5 * (fit + log_det + float(rows.double().log().sum()) + len(rows) * LOG_2PI)
    posterior = SamplePosterior(delta, samples)
    return Fit(posterior, choice, variance, rows, weight * left, value, 0.5 * error, "cg-weight", solution)


def _cg_function(task: Task, variance: Tensor, choice: Choice, settings: SolverSettings) -> Fit:
    J, rows = task.J, task.noise.rows(choice.noise)
    d, root, k = variance.sqrt(), rows.rsqrt()[:, None], settings.samples
    Phi = J.scaled(d)
    P = preconditioner_of(Phi, J, 1 / rows, settings, "function")
    # Matheron: u0 + Phi^T L M^-1 (e - L Phi u0) is a posterior sample of the whitened weights.
    e = torch.randn(J.shape[0], k, dtype=J.dtype, generator=settings.generator(3)).to(J.device)
    h = torch.randn(J.shape[1], k, dtype=J.dtype, generator=settings.generator(4)).to(J.device)
    B = torch.cat([root * task.r[:, None], e - root * (Phi @ h), probes_of(P, J.shape[0], J, settings)], 1)
    solution = cg(
        lambda U: U + root * (Phi @ (Phi.T @ (root * U))),
        B,
        preconditioner=P,
        tolerance=settings.tolerance,
        iterations=settings.iterations,
        probes=settings.probes,
        progress=settings.progress,
    ).checked("The function-space solve")
    X = root * solution.value[:, : 1 + k]
    back = Phi.T @ X
    delta, samples = d * back[:, 0], d[:, None] * (h + back[:, 1:])
    assert solution.tridiagonals is not None
    log_det, error = log_det_from_tridiagonals(solution.tridiagonals, P, J.shape[0])
    value = -0.5 * (float(task.r @ X[:, 0]) + log_det + float(rows.double().log().sum()) + len(rows) * LOG_2PI)
    posterior = SamplePosterior(delta, samples)
    return Fit(posterior, choice, variance, rows, X[:, 0], value, 0.5 * error, "cg-function", solution)


def probes_of(P: Preconditioner | None, m: int, J: Jacobian, settings: SolverSettings) -> Tensor:
    """Vectors of covariance P, for the log determinant."""
    generator = settings.generator(5)
    if P is not None:
        return P.sample(settings.probes, generator)
    return torch.randn(m, settings.probes, dtype=J.dtype, generator=generator).to(J.device)


def lanczos_spectrum(
    product: Callable[[Tensor], Tensor], r: Tensor, settings: SolverSettings, *, steps: int = 100
) -> KernelSpectrum:
    """From Lanczos steps on the kernel, started at r and at random probes."""
    z = torch.randn(len(r), settings.probes, dtype=r.dtype, generator=settings.generator(1)).to(r.device)
    nodes, weights, norms2 = lanczos_quadrature(product, torch.cat([r[:, None], z], 1), steps=steps)
    nodes, weights, norms2 = (x.double().cpu() for x in (nodes, weights, norms2))
    nodes = nodes.clamp_min(0)
    counts = weights[1:] * (len(r) / settings.probes)
    return KernelSpectrum(nodes[1:].flatten(), counts.flatten(), nodes[0], weights[0] * norms2[0])
