r"""The log evidence of Gaussian observations, and the hyperparameters that maximize it.

.. math:: \log N(r \mid 0, \Sigma), \qquad \Sigma = \sum_l s_l K_l + \mathrm{diag}(\sigma^2)

With one scale and one noise variance, everything there is to know about K and r is a `Spectrum`: after one
eigendecomposition (or a few Lanczos steps) every evaluation costs O(n). Several scales or noises need a Cholesky
decomposition for each evaluation, with analytic gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from scipy.optimize import brentq, minimize
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
GRID = 241
"""Points of the grid that brackets the best ratio of noise and scale."""


@dataclass(frozen=True)
class Spectrum:
    r"""What the evidence needs to know of a kernel K (m, m) and residuals r (m,).

    .. math:: \log\det(s K + \sigma^2) = \sum_j w_j \log(s \lambda_j + \sigma^2), \qquad
              r^\top (s K + \sigma^2)^{-1} r = \sum_j e_j / (s \mu_j + \sigma^2)

    An eigendecomposition gives them exactly; Lanczos gives nodes of a quadrature.

    Attributes:
        nodes: The :math:`\lambda_j`.
        weights: The :math:`w_j`, which add up to m.
        positions: The :math:`\mu_j`.
        energies: The :math:`e_j`, which add up to the squared norm of r.
    """

    nodes: Tensor
    weights: Tensor
    positions: Tensor
    energies: Tensor

    @property
    def m(self) -> float:
        return float(self.weights.sum())

    def log_evidence(self, scale: float, noise: float) -> float:
        """``log N(r | 0, scale K + noise)``.

        >>> one = torch.ones(1, dtype=torch.float64)
        >>> round(Spectrum(one, one, one, 4 * one).log_evidence(1.0, 1.0), 6)
        -2.265512
        """
        log_det = (self.weights * torch.log(scale * self.nodes + noise)).sum()
        fit = (self.energies / (scale * self.positions + noise)).sum()
        return float(-0.5 * (log_det + fit + self.m * LOG_2PI))


def exact_spectrum(K: Tensor, r: Tensor) -> Spectrum:
    """By the eigendecomposition of K (m, m), for r (m,)."""
    eigenvalues, Q = torch.linalg.eigh(K)
    # Rounding leaves eigenvalues of a singular K slightly below zero.
    nodes = eigenvalues.double().clamp_min(0).cpu()
    energies = (Q.T @ r).double().square().cpu()
    return Spectrum(nodes, torch.ones_like(nodes), nodes, energies)


def weight_spectrum(G: Tensor, b: Tensor, *, norm2: float, m: int) -> Spectrum:
    """The spectrum of ``Phi Phi^T`` (m, m) and r from ``G = Phi^T Phi`` (p, p) and ``b = Phi^T r`` (p,).

    Args:
        G: (p, p).
        b: (p,).
        norm2: The squared norm of r.
        m: The number of rows of Phi; at least as many as there are directions with an eigenvalue.
    """
    eigenvalues, Q = torch.linalg.eigh(G)
    nodes, along = eigenvalues.double().cpu(), (Q.T @ b).double().square().cpu()
    # What lies below rounding is no direction of Phi's rows.
    real = nodes > len(nodes) * torch.finfo(G.dtype).eps * nodes[-1]
    nodes, energies = nodes[real], along[real] / nodes[real]
    rest = max(norm2 - float(energies.sum()), 0.0)
    nodes = torch.cat([nodes, nodes.new_zeros(1)])
    weights = torch.cat([torch.ones_like(energies), energies.new_tensor([m - len(energies)])])
    return Spectrum(nodes, weights, nodes, torch.cat([energies, energies.new_tensor([rest])]))


def joined(spectra: Sequence[Spectrum]) -> Spectrum:
    """Of independent tasks that share the hyperparameters: their log evidences add up."""
    parts = [(s.nodes, s.weights, s.positions, s.energies) for s in spectra]
    return Spectrum(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Choice:
    """Hyperparameters and how they were found.

    Attributes:
        scales: Prior scales.
        noise: Noise variances, or scales of known ones: one, or one for each output.
        log_evidence: At these.
        path: Log evidence after each step of the search.
    """

    scales: tuple[float, ...]
    noise: tuple[float, ...]
    log_evidence: float
    path: tuple[float, ...] = field(default=(), repr=False)


def best(
    spectrum: Spectrum, *, scale: float | None = None, noise: float | None = None, floor: float = 2.0**-40
) -> Choice:
    """The scale and noise of largest evidence; what is given is kept.

    The best scale for each ratio of noise to scale is known in closed form, so that two unknowns are one; one unknown
    is bracketed on a grid over all magnitudes and refined with the analytic derivative. No start values, no restarts.

    Args:
        spectrum: Of kernel and residuals.
        scale: Of the kernel, where it is known.
        noise: Where it is known.
        floor: Noise below this share of the largest eigenvalue is not considered: rounding hides what it would mean.
    """
    if scale is not None and noise is not None:
        return Choice((scale,), (noise,), spectrum.log_evidence(scale, noise))
    top = float(torch.maximum(spectrum.nodes.max(), spectrum.positions.max()))
    energy = float(spectrum.energies.sum())
    if energy == 0:
        raise ValueError(
            "The targets equal the mean function exactly, so that the evidence grows without bound as prior and noise "
            "shrink. Give noise= (and prior=) as numbers."
        )
    if top == 0:
        if noise is None:
            noise = energy / spectrum.m
        if scale is None:
            raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
        return Choice((scale,), (noise,), spectrum.log_evidence(scale, noise))
    low, high = math.log(top * floor), math.log(top * 1e8)
    if scale is None and noise is None:

        def both(t: float) -> tuple[float, float]:
            rho = math.exp(t)
            d, e = spectrum.nodes + rho, spectrum.positions + rho
            s = float((spectrum.energies / e).sum()) / spectrum.m
            value = -0.5 * (spectrum.m * (math.log(s) + 1 + LOG_2PI) + float((spectrum.weights * d.log()).sum()))
            slope = float((spectrum.energies / e**2).sum()) / s - float((spectrum.weights / d).sum())
            return value, 0.5 * rho * slope

        t, value, path = _peak(both, low, high)
        rho = math.exp(t)
        s = float((spectrum.energies / (spectrum.positions + rho)).sum()) / spectrum.m
        if t > low:
            return Choice((s,), (s * rho,), value, path)
        # No noise. What keeps it from zero must not decide about the scale, so that is chosen once more for itself.
        _warn_of_floor(True, floor)
        return best(spectrum, noise=s * rho, floor=4 * floor / max(16.0, spectrum.m))

    def one(t: float) -> tuple[float, float]:
        # Either the noise is unknown, with scale * nodes known, or the scale is, with the noise known.
        s, v = (scale, math.exp(t)) if noise is None else (math.exp(t), noise)
        assert s is not None
        d, e = s * spectrum.nodes + v, s * spectrum.positions + v
        value = spectrum.log_evidence(s, v)
        inner, at = (v, v) if noise is None else (s * spectrum.nodes, s * spectrum.positions)
        slope = (spectrum.energies * at / e**2).sum() - (spectrum.weights * inner / d).sum()
        return value, 0.5 * float(slope)

    if noise is None:
        assert scale is not None
        shift = math.log(scale)
        t, value, path = _peak(one, low + shift, high + shift)
        _warn_of_floor(t <= low + shift, floor)
        return Choice((scale,), (math.exp(t),), value, path)
    t, value, path = _peak(one, math.log(noise) - high, math.log(noise) - low)
    _warn_of_floor(t >= math.log(noise) - low, floor)
    return Choice((math.exp(t),), (noise,), value, path)


def dense_floor(vectors: Sequence[Tensor]) -> float:
    """The floor of `best` for a kernel that is decomposed in the precision of these vectors, each as long as it."""
    return 4 * max(16, *map(len, vectors)) * torch.finfo(vectors[0].dtype).eps


def _warn_of_floor(reached: bool, floor: float) -> None:
    if reached and floor > 1e-9:  # in float64 so little noise is as good as none
        warnings.warn(
            f"The evidence asks for less noise than can be told from none in this precision, {floor:.1g} of the "
            "kernel's largest eigenvalue, which was taken instead. Use dtype='float64', or give noise= as a number.",
            stacklevel=2,
        )


def _peak(
    fn: Callable[[float], tuple[float, float]], low: float, high: float
) -> tuple[float, float, tuple[float, ...]]:
    """Where a function with known derivative is largest, by grid and root of the derivative."""
    grid = [low + (high - low) * i / (GRID - 1) for i in range(GRID)]
    values = [fn(t)[0] for t in grid]
    i = max(range(GRID), key=values.__getitem__)
    path = [values[i]]
    a, b = grid[max(i - 1, 0)], grid[min(i + 1, GRID - 1)]
    if fn(a)[1] > 0 > fn(b)[1]:
        t = brentq(lambda x: fn(x)[1], a, b, xtol=1e-12, rtol=1e-14)
        if fn(t)[0] >= values[i]:
            return t, fn(t)[0], (*path, fn(t)[0])
    return grid[i], values[i], tuple(path)  # at an end: no signal, or no noise


@dataclass(frozen=True)
class Problem:
    """One task for `best_dense`.

    Attributes:
        parts: Scale name to its kernel (m, m).
        r: (m,), the residuals.
        output: (m,), for each row the number of its noise.
    """

    parts: Mapping[str, Tensor]
    r: Tensor
    output: Tensor


def best_dense(
    problems: Sequence[Problem],
    *,
    start: Choice,
    scales: Sequence[float] | None = None,
    noise: Sequence[float] | None = None,
    steps: int = 200,
) -> Choice:
    """Several scales or noises, from ``start`` by L-BFGS on their logarithms with analytic gradients.

    The evidence never falls below that of the start. What is given as ``scales`` or ``noise`` is kept.
    """

    def evaluate(s: Sequence[float], v: Sequence[float]) -> tuple[float, list[float], list[float]]:
        total, slope_s, slope_v = 0.0, [0.0] * len(s), [0.0] * len(v)
        for problem in problems:
            value, ds, dv = dense_gradient(problem, s, v)
            total += value
            slope_s = [a + b for a, b in zip(slope_s, ds, strict=True)]
            slope_v = [a + b for a, b in zip(slope_v, dv, strict=True)]
        return total, slope_s, slope_v

    traces = [max(float(problem.parts[name].diagonal().sum()) for problem in problems) for name in problems[0].parts]
    eps = torch.finfo(problems[0].r.dtype).eps
    rows = max(len(problem.r) for problem in problems)
    return _maximized(evaluate, start, scales, noise, _Sizes(traces, rows, eps), steps)


def dense_gradient(
    problem: Problem, scales: Sequence[float], noise: Sequence[float]
) -> tuple[float, list[float], list[float]]:
    r"""Log evidence, and its derivatives in the logarithms of scales and noises.

    .. math:: \partial_{\log s_l} = \tfrac12 s_l \left(\alpha^\top K_l \alpha
              - \mathrm{tr}(\Sigma^{-1} K_l)\right), \qquad \alpha = \Sigma^{-1} r

    -inf where the sum is not positive definite in its precision.
    """
    parts, r, output = list(problem.parts.values()), problem.r, problem.output
    Sigma = torch.zeros_like(parts[0])
    for s, K in zip(scales, parts, strict=True):
        Sigma.add_(K, alpha=s)
    v = torch.tensor(list(noise), dtype=Sigma.dtype, device=Sigma.device)
    Sigma.diagonal().add_(v[output])
    L, info = torch.linalg.cholesky_ex(Sigma)
    if int(info):
        return -math.inf, [0.0] * len(parts), [0.0] * len(v)
    inverse = torch.cholesky_inverse(L)
    alpha = inverse @ r
    value = -0.5 * float(r @ alpha + len(r) * LOG_2PI) - float(L.diagonal().log().sum())
    ds = [
        0.5 * s * float(alpha @ (K @ alpha) - (inverse * K).sum()) if s else 0.0
        for s, K in zip(scales, parts, strict=True)
    ]
    pull = 0.5 * (alpha.square() - inverse.diagonal())
    dv = torch.zeros_like(v).index_add_(0, output, pull) * v
    return value, ds, [float(x) for x in dv]


Moments = tuple[Tensor, Tensor, float, int]
"""``Phi^T Phi`` (p, p), ``Phi^T r`` (p,), the squared norm of r and the number of rows, of the rows of one noise."""


def best_weight(
    tasks: Sequence[Sequence[Moments]],
    group: Tensor | None,
    *,
    start: Choice,
    scales: Sequence[float] | None = None,
    noise: Sequence[float] | None = None,
    steps: int = 200,
) -> Choice:
    """`best_dense` in weight space, from the moments of each noise's rows; gradients by reverse mode.

    Args:
        tasks: Moments, for each task and noise.
        group: (p,), the number of a parameter's scale; None for one scale.
        start: Where to begin.
        scales: Kept where given.
        noise: Kept where given.
        steps: Limit of L-BFGS.
    """
    like = tasks[0][0][1]

    def value(s: Tensor, v: Tensor) -> Tensor:
        root = (s[0] if group is None else s[group.to(s.device)]).sqrt() * torch.ones_like(like)
        total = s.new_zeros(())
        for moments in tasks:
            G = sum(m[0] / v[i] for i, m in enumerate(moments))
            b = root * sum(m[1] / v[i] for i, m in enumerate(moments))
            norm2 = sum(m[2] / v[i] for i, m in enumerate(moments))
            count = sum(m[3] * v[i].log() for i, m in enumerate(moments))
            assert isinstance(G, Tensor) and isinstance(b, Tensor)
            L, _ = torch.linalg.cholesky_ex(torch.eye(len(b)).to(G) + root[:, None] * G * root)
            half = torch.linalg.solve_triangular(L, b[:, None], upper=False)
            log_det = 2 * L.diagonal().log().sum() + count
            total = total - 0.5 * (norm2 - half.square().sum() + log_det + sum(m[3] for m in moments) * LOG_2PI)
        return total

    def evaluate(s: Sequence[float], v: Sequence[float]) -> tuple[float, list[float], list[float]]:
        logs = [torch.tensor(x, dtype=like.dtype, device=like.device).log().requires_grad_() for x in (s, v)]
        out = value(logs[0].exp(), logs[1].exp())
        if not bool(torch.isfinite(out)):
            return -math.inf, [0.0] * len(s), [0.0] * len(v)
        ds, dv = torch.autograd.grad(out, logs)
        return float(out.detach()), ds.double().cpu().tolist(), dv.double().cpu().tolist()

    count = len(start.scales)
    groups = torch.zeros(len(like), dtype=torch.long, device=like.device) if group is None else group.to(like.device)
    diagonals = [sum(m[0].diagonal() for m in moments) for moments in tasks]
    each = torch.stack([like.new_zeros(count).index_add_(0, groups, d) for d in diagonals])  # type: ignore[arg-type]
    rows = max(sum(m[3] for m in moments) for moments in tasks)
    sizes = _Sizes(each.amax(0).tolist(), rows, torch.finfo(like.dtype).eps)
    return _maximized(evaluate, start, scales, noise, sizes, steps)


Evaluate = Callable[[Sequence[float], Sequence[float]], tuple[float, list[float], list[float]]]
"""Scales and noises to the log evidence and its derivatives in their logarithms."""


@dataclass(frozen=True)
class _Sizes:
    """What a search must know of the kernels: their traces, their rows and their rounding."""

    traces: Sequence[float]
    rows: int
    eps: float

    def trace(self, scales: Sequence[float]) -> float:
        return sum(s * t for s, t in zip(scales, self.traces, strict=True))

    @property
    def floor(self) -> float:
        """Noise below this share of the trace is not considered."""
        return 4 * max(16, self.rows) * self.eps


def _maximized(
    evaluate: Evaluate,
    start: Choice,
    scales: Sequence[float] | None,
    noise: Sequence[float] | None,
    sizes: _Sizes,
    steps: int,
) -> Choice:
    start = replace(start, scales=tuple(scales or start.scales), noise=tuple(noise or start.noise))
    start = replace(start, log_evidence=evaluate(start.scales, start.noise)[0])
    if scales is not None and noise is not None:
        return start
    found = _searched(evaluate, start, (scales is None, noise is None), sizes, steps)
    if noise is None and min(found.noise) <= 1.001 * sizes.floor * sizes.trace(found.scales):
        _warn_of_floor(True, sizes.floor)
        if scales is None:  # as in `best`
            found = _searched(evaluate, found, (True, False), sizes, steps)
    return found if found.log_evidence >= start.log_evidence else start


def _searched(evaluate: Evaluate, start: Choice, free: tuple[bool, bool], sizes: _Sizes, steps: int) -> Choice:
    """By L-BFGS on logarithms: of the scales, and of the noises as shares of the trace of the whole kernel.

    So rounding, which is relative to the kernel, becomes a bound of each share alone.

    Args:
        evaluate: The function to maximize.
        start: Where to begin.
        free: Whether the scales, and whether the noises, are unknown.
        sizes: Of the kernels.
        steps: Limit.
    """
    s0, v0 = list(start.scales), list(start.noise)
    if free[0] and sizes.trace(s0) < 0.1 * sizes.rows * min(v0):
        # Where the kernel is nothing beside the noise, so are the derivatives: begin where it can be seen.
        lift = 0.1 * sizes.rows * min(v0) / (sizes.trace(s0) or 1.0)
        s0 = [s * lift for s in s0]
    x0: list[float] = []
    bounds: list[tuple[float, float]] = []
    if free[0]:
        for s, trace in zip(s0, sizes.traces, strict=True):
            top = math.inf if free[1] or trace == 0 else math.log(min(v0) / (16 * sizes.eps * len(s0) * trace))
            x0.append(min(math.log(s), top))
            bounds.append((x0[-1] - 28, min(x0[-1] + 28, top)))
    if free[1]:
        for v in v0:
            x0.append(math.log(v / sizes.trace(s0)))
            bounds.append((min(math.log(sizes.floor), x0[-1]), x0[-1] + 28))

    def split(x: Sequence[float]) -> tuple[list[float], list[float]]:
        s = [math.exp(t) for t in x[: len(s0)]] if free[0] else s0
        shares = x[len(s0) :] if free[0] else x
        return s, [math.exp(t) * sizes.trace(s) for t in shares] if free[1] else v0

    def negative(x: Sequence[float]) -> tuple[float, list[float]]:
        s, v = split(x)
        value, ds, dv = evaluate(s, v)
        if free[1]:  # the trace, and with it the noise, moves with every scale
            whole = sizes.trace(s)
            ds = [d + a * t / whole * sum(dv) for d, a, t in zip(ds, s, sizes.traces, strict=True)]
        slope = (ds if free[0] else []) + (dv if free[1] else [])
        return min(-value, 1e100), [-g for g in slope]

    path: list[float] = []
    found = minimize(
        negative,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": steps, "ftol": 1e-12, "gtol": 1e-6},
        callback=lambda intermediate_result: path.append(-float(intermediate_result.fun)),
    )
    s, v = split([float(t) for t in found.x])
    return Choice(tuple(s), tuple(v), -float(found.fun), (*start.path, *path))
