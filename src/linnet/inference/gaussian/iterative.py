"""Conditioning on Gaussian observations by conjugate gradients: mean, samples and log determinant in one block."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linnet._common import find_dense_budget
from linnet.inference.evidence import gaussian
from linnet.inference.evidence.gaussian import LOG_2PI, Choice, KernelSpectrum
from linnet.inference.iterative_solves import draw_right_sides, preconditioner_of, solve_with_probes
from linnet.inference.problem import Fit, SolverSettings, Task, assumed_noise
from linnet.jacobian import AutodiffBlock, fused_cost, gram_cost
from linnet.linalg import RowParts, lanczos_quadrature
from linnet.probability import SamplePosterior

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian
    from linnet.probability import Prior


log = logging.getLogger("linnet")

ITERATIONS = 20
"""Iterations that a solve is expected to take: more keep larger kernels, whose rows cost more than passes do."""


def condition(tasks: Sequence[Task], prior: Prior, settings: SolverSettings, *, space: str) -> list[Fit]:
    """As `linnet.inference.gaussian.closed_form.condition`, in the given space, with one scale and one noise at most to
    choose."""
    tasks = [replace(task, J=task.J.cached_if_fits()) for task in tasks]
    kernels = [_kernel_in_parts(task, prior, settings) if space == "function" else None for task in tasks]
    spectra = (
        _streamed_spectrum(task, prior, settings) if K is None else _kernel_spectrum(task, K, settings)
        for task, K in zip(tasks, kernels, strict=True)
    )
    choice = choose(tasks, prior, spectra, floor=64 * max(task.J.eps for task in tasks))
    variance = prior.variance(choice.scales if prior.scales else ())
    if space == "weight":
        return [_cg_weight(task, variance, choice, settings) for task in tasks]
    scale = choice.scales[0] if prior.scales else 1.0
    return [
        _cg_function(task, variance, choice, settings, None if K is None else (K, scale))
        for task, K in zip(tasks, kernels, strict=True)
    ]


def keeps_kernel_in_parts(J: Jacobian, settings: SolverSettings) -> bool:
    """Whether the ranks keep the kernel, each its own rows, for the iterations of "cg-function".

    The kernel of all ranks together has to fit, and to cost no more than the passes that it saves.
    """
    world, rows = J.ranks.world, J.shape[0]
    if world == 1:
        return False
    # The part of a rank, and what gathers and pads it.
    fits = 1.5 * rows**2 / world * J.dtype.itemsize <= find_dense_budget(settings.memory, J.device)
    factors = [f for f in J._sample if not isinstance(f, AutodiffBlock)]
    columns = 1 + settings.samples + settings.probes
    passes = ITERATIONS * sum(fused_cost(f, k=columns) for f in factors)
    kernel = J.n * sum(gram_cost(f) for f in factors)
    return fits and len(factors) == len(J._sample) and kernel <= passes


def _kernel_in_parts(task: Task, prior: Prior, settings: SolverSettings) -> RowParts | None:
    """``J diag(base) J^T`` in parts, where the ranks keep it."""
    J = task.J
    settings = replace(settings, memory=J.lin.agree_on_memory(settings.memory))
    if not keeps_kernel_in_parts(J, settings):
        return None
    log.info(
        "The kernel of %d rows is kept in parts by %d ranks, and solved by conjugate gradients. A Cholesky "
        "decomposition would need the whole kernel on one device.",
        J.shape[0],
        J.ranks.world,
    )
    return RowParts(J.own_gram(prior.base), block=J.c, ranks=J.ranks)


def _kernel_spectrum(task: Task, K: RowParts, settings: SolverSettings) -> KernelSpectrum:
    """By Lanczos steps on a kernel in parts."""
    root = task.noise.base.rsqrt()[:, None]
    return lanczos_spectrum(lambda U: root * (K @ (root * U)), root[:, 0] * task.r, settings)


def choose(
    tasks: Sequence[Task],
    prior: Prior,
    spectra: Iterable[KernelSpectrum],
    *,
    floor: float,
    refine: Callable[..., Choice] | None = None,
) -> Choice:
    """The scales and noises of largest evidence; those that are given stay.

    Args:
        tasks: They share scales and noises.
        prior: Its scales are chosen.
        spectra: Spectra of the tasks, as if there were one scale and one noise; made only where something is chosen.
        floor: As for `linnet.inference.evidence.gaussian.choose_one`.
        refine: Goes on from one scale and one noise to several; None where there is one of each.
    """
    noise, assumed, fixed = tasks[0].noise, assumed_noise(tasks), None if prior.scales else (1.0,)
    if fixed is not None and noise.value is not None:
        return Choice(fixed, noise.value, math.nan)
    start = gaussian.choose_one(
        gaussian.join_spectra(list(spectra)),
        scale=None if fixed is None else 1.0,
        noise=noise.value[0] if noise.value is not None and noise.count == 1 else None,
        floor=floor,
        assumed=sum(assumed),
    )
    scales = max(1, len(prior.scales))
    if refine is None or (scales == 1 and noise.count == 1):
        return start
    start = Choice(start.scales * scales, start.noise * noise.count, start.log_evidence)
    return refine(start=start, scales=fixed, noise=noise.value, assumed=assumed)


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
    spectrum = KernelSpectrum(nodes[1:].flatten(), counts.flatten(), nodes[0], energies[0])
    return spectrum.with_repeats(sum(task.noise.count_repeats()))


def _cg_weight(task: Task, variance: Tensor, choice: Choice, settings: SolverSettings) -> Fit:
    J, rows = task.J, task.noise.rows(choice.noise)
    d, weight, k = variance.sqrt(), 1 / rows, settings.samples
    Phi = J.scaled(d)
    P = preconditioner_of(Phi, J, weight, settings, "weight")
    # Right-hand sides whose covariance is H: their solutions are posterior samples.
    e, h = draw_right_sides(J, settings)
    B = Phi.T @ torch.cat([(weight * task.r)[:, None], weight.sqrt()[:, None] * e], 1)
    B[:, 1:] += h
    found = solve_with_probes(lambda V: V + Phi.normal(V, weight), B, P, J, settings, "The weight-space solve")
    solution, log_det, error = found
    delta, samples = d * solution.value[:, 0], d[:, None] * solution.value[:, 1 : 1 + k]
    u = solution.value[:, 0]
    left = task.r - J @ delta
    fit = float((weight * left.square()).sum() + u @ u)
    value = -0.5 * (fit + log_det + float(rows.double().log().sum()) + len(rows) * LOG_2PI)
    value += task.noise.repeat_evidence(choice.noise)
    posterior = SamplePosterior(delta, samples)
    return Fit(posterior, choice, variance, rows, weight * left, value, 0.5 * error, "cg-weight", solution)


def _cg_function(
    task: Task, variance: Tensor, choice: Choice, settings: SolverSettings, kernel: tuple[RowParts, float] | None
) -> Fit:
    J, rows = task.J, task.noise.rows(choice.noise)
    d, root, k = variance.sqrt(), rows.rsqrt()[:, None], settings.samples
    Phi = J.scaled(d)
    P = preconditioner_of(Phi, J, 1 / rows, settings, "function")
    # Matheron: u0 + Phi^T L M^-1 (e - L Phi u0) is a posterior sample of the whitened weights.
    e, h = draw_right_sides(J, settings)
    B = torch.cat([root * task.r[:, None], e - root * (Phi @ h)], 1)

    def product(U: Tensor) -> Tensor:
        V = root * U
        return U + root * (Phi @ (Phi.T @ V) if kernel is None else kernel[1] * (kernel[0] @ V))

    solution, log_det, error = solve_with_probes(product, B, P, J, settings, "The function-space solve")
    X = root * solution.value[:, : 1 + k]
    back = Phi.T @ X
    delta, samples = d * back[:, 0], d[:, None] * (h + back[:, 1:])
    value = -0.5 * (float(task.r @ X[:, 0]) + log_det + float(rows.double().log().sum()) + len(rows) * LOG_2PI)
    value += task.noise.repeat_evidence(choice.noise)
    posterior = SamplePosterior(delta, samples)
    return Fit(posterior, choice, variance, rows, X[:, 0], value, 0.5 * error, "cg-function", solution)


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
