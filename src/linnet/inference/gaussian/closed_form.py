r"""Conditioning the linear model on Gaussian observations, ``r = J (theta - theta0) + noise``, by one of four solvers.

=============  ==============================================  =====================================
solver         decomposes or iterates on                       takes
=============  ==============================================  =====================================
function       Cholesky of ``M = I + L^T K L`` (n c, n c)      memory (n c)^2
weight         Cholesky of ``H = I + Phi^T B Phi`` (p, p)      memory p^2
cg-function    conjugate gradients on M                        two passes over the data an iteration, or
                                                               memory (n c)^2 of all ranks together
cg-weight      conjugate gradients on H                        one pass over the data an iteration
=============  ==============================================  =====================================

The dense ones are exact. With `SolverSettings.average`, and at most one scale and one noise to choose, they average
over both by their evidence (`linnet.inference.evidence.average`) where they have the eigenvectors of the kernel: in
weight space always, in function space up to `EXACT_ROWS` rows. More rows leave nothing to average. The mixture is one
Gaussian with the mixture's mean and covariance.

The iterative ones give the mean to a tolerance, covariances from posterior samples that are solved
for in the same block, and the log determinant by stochastic Lanczos quadrature with a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from linnet.inference.evidence import average, gaussian
from linnet.inference.evidence.gaussian import LOG_2PI, Choice
from linnet.inference.gaussian import iterative
from linnet.inference.gaussian.iterative import choose, lanczos_spectrum
from linnet.inference.problem import Average, Fit, Noise, SolverSettings, Task, assumed_noise, choose_solver
from linnet.linalg import Stack, check_conditioning, cholesky_, cholesky_solve, solve_lower, solve_upper
from linnet.probability import FunctionPosterior, KernelPosterior, Prior, WeightPosterior

if TYPE_CHECKING:
    from linnet.probability import Posterior


def condition(
    tasks: Sequence[Task],
    prior: Prior,
    settings: SolverSettings,
    *,
    choice: Choice | None = None,
    shared: dict[Any, Any] | None = None,
) -> list[Fit]:
    """The posterior of every task, with hyperparameters that all tasks share.

    Args:
        tasks: One or more; their Jacobians belong to the same network.
        prior: Of the displacement of each task.
        settings: How to solve.
        choice: The hyperparameters, for a dense solver, where they are known; None to choose them.
        shared: Where fits of the same rows, prior and known noise to other residuals find what they have in common: the
            kernels and their eigenvectors. The dense solvers fill an empty dict. None for one fit.
    """
    first = tasks[0].J
    rows = max(task.J.shape[0] for task in tasks)
    device, kernels = first.device, max(1, len(prior.scales))
    solver = choose_solver(rows, first.shape[1], settings, device=device, kernels=kernels)
    several = len(prior.scales) > 1 or (tasks[0].noise.count > 1 and tasks[0].noise.value is None)
    if solver.startswith("cg") and several:
        what = f"prior={prior.name!r}" if len(prior.scales) > 1 else "noise per output"
        raise NotImplementedError(
            f"{what} chooses several hyperparameters by the evidence, which needs a dense solver; got {solver!r} for "
            f"{rows:,} rows by {first.shape[1]:,} parameters. Use solver='function' or 'weight' where they fit, allow "
            "more memory (memory=), take prior='shared' with one noise or fewer parameters (params=), or fit on a part "
            "of the data and pass what it found."
        )
    if solver == "function":
        return _function(tasks, prior, settings, choice, shared)
    if solver == "weight":
        return _weight(tasks, prior, settings, choice, shared)
    assert choice is None
    return iterative.condition(tasks, prior, settings, space="weight" if solver == "cg-weight" else "function")


def decomposes(solver: str, rows: int, p: int, device: torch.device) -> bool:
    """Whether a solver is a dense one that has the eigenvectors of a matrix of up to `EXACT_ROWS` rows."""
    size = {"function": rows, "weight": p}.get(solver, math.inf)
    return size <= EXACT_ROWS[device.type]


def _keep(shared: dict[Any, Any] | None, key: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, made once for all fits that share."""
    if shared is None:
        return make()
    if key not in shared:
        shared[key] = make()
    return shared[key]


# Dense function space.


class _FunctionSpace(NamedTuple):
    """What `_function` knows before it solves: whitened kernels and residuals, hyperparameters, eigenvectors."""

    tasks: list[Task]
    kernels: list[dict[str, Tensor]]
    residuals: list[Tensor]
    choice: Choice
    points: average.WeightedPoints | None
    decomposed: list[_Decomposed]


def _prepare_function(
    tasks: Sequence[Task],
    prior: Prior,
    settings: SolverSettings,
    choice: Choice | None,
    shared: dict[Any, Any] | None,
) -> _FunctionSpace:
    # The parts of a stack, which later data leave, are cached.
    tasks = [
        task if isinstance(task.J, Stack) else replace(task, J=_keep(shared, ("J", i), task.J.cached))
        for i, task in enumerate(tasks)
    ]
    several = len(prior.scales) > 1 or tasks[0].noise.count > 1
    kernels: list[dict[str, Tensor]] = [
        _keep(shared, ("kernels", i), partial(make_kernels, task, prior)) for i, task in enumerate(tasks)
    ]
    residuals = [task.r * task.noise.base.rsqrt() for task in tasks]

    known_spectra: list[_Decomposed] = []

    def find_spectrum(i: int, K: Tensor, r: Tensor, noise: Noise) -> gaussian.KernelSpectrum:
        repeats = sum(noise.count_repeats())
        if not several and len(r) > EXACT_ROWS[r.device.type]:
            return lanczos_spectrum(lambda V: K @ V, r, settings).with_repeats(repeats)
        pairs = _keep(shared, ("pairs", i), partial(gaussian.decompose, K, r)).with_vector(r)
        spectrum = gaussian.kernel_spectrum(pairs).with_repeats(repeats)
        known_spectra.append(_Decomposed(pairs, spectrum))
        return spectrum

    known = [(parts, r, task.noise) for parts, r, task in zip(kernels, residuals, tasks, strict=True)]
    problems = [gaussian.KernelTask(parts, r, noise.group, noise.count_repeats()) for parts, r, noise in known]
    floor = gaussian.dense_floor(sum(map(len, residuals)), residuals[0].dtype)
    points = None
    if choice is None:
        choice = choose(
            tasks,
            prior,
            (
                find_spectrum(i, reduce(torch.add, parts.values()), r, noise)
                for i, (parts, r, noise) in enumerate(known)
            ),
            floor=floor,
            refine=partial(gaussian.choose_by_kernels, problems),
        )
        points = _points(tasks, prior, settings, known_spectra, floor)
    return _FunctionSpace(tasks, kernels, residuals, choice, points, known_spectra)


def _function(
    tasks: Sequence[Task],
    prior: Prior,
    settings: SolverSettings,
    choice: Choice | None,
    shared: dict[Any, Any] | None,
) -> list[Fit]:
    tasks, kernels, residuals, choice, points, known_spectra = _prepare_function(tasks, prior, settings, choice, shared)
    if points is not None:
        pairs = zip(tasks, known_spectra, strict=True)
        return [_averaged_function(task, found, prior, choice, points) for task, found in pairs]
    fits = []
    for task, parts, whitened in zip(tasks, kernels, residuals, strict=True):
        variance = prior.variance(choice.scales if prior.scales else ())
        parts = parts if shared is None else {name: K.clone() for name, K in parts.items()}
        M, scales = _combined_(parts, choice.scales), task.r.new_tensor(choice.noise)[task.noise.group]
        whiten_(M, scales)
        M.diagonal().add_(1)
        check_conditioning(M)
        C = cholesky_(M)
        root = (task.noise.base * scales).rsqrt()
        half = solve_lower(C, (whitened * scales.rsqrt())[:, None])
        alpha = root * solve_upper(C, half)[:, 0]
        delta = variance * (task.J.T @ alpha)
        log_det = 2 * float(C.diagonal().log().sum()) - 2 * float(root.log().sum())
        value = -0.5 * (float(half.square().sum()) + log_det + len(root) * LOG_2PI)
        value += task.noise.repeat_evidence(choice.noise)
        posterior = FunctionPosterior(task.J, variance, delta, root=root, factor=C)
        fits.append(Fit(posterior, choice, variance, root**-2, alpha, value, 0.0, "function"))
    return fits


class Summary(NamedTuple):
    """What a fit of one task in function space would find, without its posterior.

    Attributes:
        log_evidence: As that of a `Fit`.
        noise_rows: (n c,), the average noise variance of each observation.
        alpha: (n c,), ``(K + noise)^-1 r`` with the average scale and noise.
        precisions: (n, c, c), the diagonal blocks of ``(K + noise)^-1`` with them.
    """

    log_evidence: float
    noise_rows: Tensor
    alpha: Tensor
    precisions: Tensor


def summarize(task: Task, prior: Prior, settings: SolverSettings, shared: dict[Any, Any]) -> Summary | None:
    """The summary of `condition` in function space, by the eigenvectors of the kernel; None where nothing is averaged.

    Args:
        task: The task.
        prior: Of the displacement.
        settings: How to solve.
        shared: As for `condition`.
    """
    found = _prepare_function([task], prior, settings, None, shared)
    if found.points is None:
        return None
    (values, Q, along), c = found.decomposed[0].pairs, task.base.shape[1]
    inverse, W = 1 / (found.points.scale * values + found.points.noise), task.noise.base.rsqrt()
    T = (W[:, None] * Q).view(-1, c, len(values))
    return Summary(
        _find_log_evidence(task, found.decomposed[0], found.choice),
        task.noise.rows((found.points.noise,)),
        W * (Q @ (inverse * along)),
        (T * inverse) @ T.mT,
    )


def make_kernels(task: Task, prior: Prior) -> dict[str, Tensor]:
    """The whitened kernel of each scale of the prior."""
    parts = task.J.layer_grams() if len(prior.scales) > 1 else {"all": task.J.gram(scale=prior.base)}
    for K in parts.values():
        whiten_(K, task.noise.base)
    return parts


def whiten_(K: Tensor, variance: Tensor) -> Tensor:
    """K with rows and columns divided by standard deviations, in place."""
    if bool((variance != 1).any()):
        root = variance.rsqrt()
        K.mul_(root[:, None]).mul_(root)
    return K


def _combined_(parts: dict[str, Tensor], scales: Sequence[float]) -> Tensor:
    """The sum of scaled kernels, in the memory of the first."""
    total, *others = parts.values()
    total.mul_(scales[0])
    for K, s in zip(others, scales[1:], strict=True):
        total.add_(K, alpha=s)
    return total


EXACT_ROWS = {"cpu": 4096, "cuda": 12_288}
"""Rows up to which hyperparameters come from an eigendecomposition rather than from Lanczos steps."""


# Dense weight space.


def _weight(
    tasks: Sequence[Task],
    prior: Prior,
    settings: SolverSettings,
    choice: Choice | None,
    shared: dict[Any, Any] | None,
) -> list[Fit]:
    tasks = [
        task if isinstance(task.J, Stack) else replace(task, J=_keep(shared, ("J", i), task.J.cached_if_fits))
        for i, task in enumerate(tasks)
    ]
    noise = tasks[0].noise
    d = prior.base.sqrt()
    moments = []
    for i, task in enumerate(tasks):
        found, counts = [], task.noise.count_rows().tolist()
        for g in range(noise.count):
            weight = torch.where(task.noise.group == g, 1 / task.noise.base, 0.0)
            G = _keep(shared, ("moments", i, g), partial(_make_moments, task, d, weight))
            b = d * (task.J.T @ (weight * task.r))
            found.append((G, b, float((weight * task.r.square()).sum()), counts[g]))
        moments.append(found)
    decomposed: list[_Decomposed] = []
    floor = gaussian.dense_floor(
        max(len(d), math.ceil(sum(m for found in moments for *_, m in found))), prior.base.dtype
    )
    points = None
    if choice is None:
        choice = _weight_choice(tasks, moments, prior, decomposed, floor, shared)
        points = _points(tasks, prior, settings, decomposed, floor)
    if points is not None:
        pairs = zip(tasks, decomposed, strict=True)
        return [_averaged_weight(task, found, prior, choice, points) for task, found in pairs]
    fits = []
    for task, found in zip(tasks, moments, strict=True):
        ones = replace(prior, base=torch.ones_like(prior.base))  # a layer may have the variance zero
        scales = ones.variance(choice.scales if prior.scales else ())
        root = scales.sqrt()
        H = sum(G / v for (G, *_), v in zip(found, choice.noise, strict=True))
        b = root * sum(b / v for (_, b, *_), v in zip(found, choice.noise, strict=True))
        assert isinstance(H, Tensor)
        H = root[:, None] * H * root
        H.diagonal().add_(1)
        check_conditioning(H)
        C = cholesky_(H)
        u = cholesky_solve(C, b)
        variance, rows = prior.base * scales, task.noise.rows(choice.noise)
        delta = variance.sqrt() * u
        left = task.r - task.J @ delta
        value = -0.5 * (
            float((left.square() / rows).sum() + u @ u + rows.log().sum())
            + 2 * float(C.diagonal().log().sum())
            + len(rows) * LOG_2PI
        )
        value += task.noise.repeat_evidence(choice.noise)
        posterior = WeightPosterior(variance, delta, factor=C)
        fits.append(Fit(posterior, choice, variance, rows, left / rows, value, 0.0, "weight"))
    return fits


def _make_moments(task: Task, d: Tensor, weight: Tensor) -> Tensor:
    """``Phi^T W Phi`` (p, p): d on both sides."""
    G = d[:, None] * task.J.normal_matrix(weight) * d
    return 0.5 * (G + G.T)


def _weight_choice(
    tasks: Sequence[Task],
    moments: list[list[gaussian.Moments]],
    prior: Prior,
    decomposed: list[_Decomposed],
    floor: float,
    shared: dict[Any, Any] | None,
) -> Choice:
    """The choice; ``decomposed`` receives what was decomposed for it."""

    def find_spectrum(i: int, found: list[gaussian.Moments]) -> gaussian.KernelSpectrum:
        G, b, norm2, m = (sum(column) for column in zip(*found, strict=True))  # as if all outputs had one noise
        pairs = _keep(shared, ("pairs", i), partial(gaussian.decompose, G, b)).with_vector(b)
        spectrum = gaussian.weight_spectrum(pairs, norm2=norm2, m=m)
        decomposed.append(_Decomposed(pairs, spectrum))
        return spectrum

    refine = partial(gaussian.choose_by_moments, moments, prior.group)
    return choose(tasks, prior, starmap(find_spectrum, enumerate(moments)), floor=floor, refine=refine)


# The average over scale and noise.


class _Decomposed(NamedTuple):
    """A whitened kernel, or the moments of the weights, by its eigenvectors."""

    pairs: gaussian.Eigenpairs
    spectrum: gaussian.KernelSpectrum


def _points(
    tasks: Sequence[Task], prior: Prior, settings: SolverSettings, found: Sequence[_Decomposed], floor: float
) -> average.WeightedPoints | None:
    """What the average goes over; None where the maximum of the evidence is taken."""
    noise = tasks[0].noise
    if not settings.average or len(prior.scales) > 1 or noise.count > 1 or len(found) < len(tasks):
        return None
    spectrum = gaussian.join_spectra([one.spectrum for one in found])
    scale, value = None if prior.scales else 1.0, None if noise.value is None else noise.value[0]
    if not average.can_average(spectrum, scale=scale, noise=value):
        return None
    return average.weigh_points(spectrum, scale=scale, noise=value, floor=floor, assumed=sum(assumed_noise(tasks)))


def _averaged_function(
    task: Task, found: _Decomposed, prior: Prior, choice: Choice, points: average.WeightedPoints
) -> Fit:
    r"""The mixture in function space, with :math:`\bar s` the average scale and all else as in `average.mix`.

    .. math:: \delta = \bar S J^\top \alpha, \quad \alpha = W Q \, \mathrm{mean} / \bar s, \qquad
              \mathrm{cov} = \bar S - \bar S J^\top W Q \, (\mathrm{shrink} - \mathrm{between} \,
              \mathrm{between}^\top) \, Q^\top W J \bar S / \bar s^2
    """
    values, Q, along = found.pairs
    moments, scale = average.mix(points, values, along, points.scales), points.scale
    variance, W = prior.variance((scale,) if prior.scales else ()), task.noise.base.rsqrt() / scale
    alpha = W * (Q @ moments.mean)
    R = W[:, None] * torch.cat([Q * moments.shrink.sqrt(), Q @ moments.between], 1)
    signs = torch.cat([-torch.ones_like(values), torch.ones_like(moments.between[0])])
    posterior = KernelPosterior(task.J, variance, variance * (task.J.T @ alpha), R=R, signs=signs)
    return _averaged(task, found, choice, points, posterior, variance, alpha, "function")


def _averaged_weight(
    task: Task, found: _Decomposed, prior: Prior, choice: Choice, points: average.WeightedPoints
) -> Fit:
    r"""The mixture in weight space, with all as in `average.mix`.

    .. math:: \delta = S_0^{1/2} Q \, \mathrm{mean}, \qquad \mathrm{cov} = S_0^{1/2} Q \, (\mathrm{shrink}
              + \mathrm{between} \, \mathrm{between}^\top) \, Q^\top S_0^{1/2}
    """
    values, Q, along = found.pairs
    moments, scale = average.mix(points, values, along, points.noises), points.scale
    variance = prior.variance((scale,) if prior.scales else ())
    # The inverse of the covariance in units of the prior's, by Woodbury's formula.
    root = moments.shrink.rsqrt()
    V = root[:, None] * moments.between
    inner = torch.eye(V.shape[1], dtype=V.dtype, device=V.device) + V.T @ V
    half = solve_lower(torch.linalg.cholesky(inner), V.T)
    H = torch.eye(len(root), dtype=V.dtype, device=V.device) - half.T @ half
    turned = Q * root
    H = scale * turned @ H @ turned.T
    check_conditioning(H)
    delta = prior.base.sqrt() * (Q @ moments.mean)
    posterior = WeightPosterior(variance, delta, factor=cholesky_(0.5 * (H + H.T)))
    # Each point has alpha = (r - J delta) / noise.
    shares = (points.weights / points.ratios).to(values)
    late = along * ((1 / (values[:, None] + points.ratios.to(values))) @ shares)
    alpha = task.r * shares.sum() - task.J @ (prior.base.sqrt() * (Q @ late))
    alpha = alpha / (scale * task.noise.base)
    return _averaged(task, found, choice, points, posterior, variance, alpha, "weight")


def _averaged(
    task: Task,
    found: _Decomposed,
    choice: Choice,
    points: average.WeightedPoints,
    posterior: Posterior,
    variance: Tensor,
    alpha: Tensor,
    solver: str,
) -> Fit:
    """The fit with averages in place of the choice, whose evidence stays."""
    value = _find_log_evidence(task, found, choice)
    kept = replace(choice, scales=(points.scale,), noise=(points.noise,), averaged=True)
    rows, before = task.noise.rows(kept.noise), Average(len(alpha), posterior.delta, alpha, value)
    return Fit(posterior, kept, variance, rows, alpha, value, 0.0, solver, average=before)


def _find_log_evidence(task: Task, found: _Decomposed, choice: Choice) -> float:
    w = torch.ones_like(task.r) if task.noise.weight is None else task.noise.weight
    known = 0.5 * float((w * (task.noise.base * w).log()).sum())
    return found.spectrum.log_evidence(choice.scales[0], choice.noise[0]) - known
