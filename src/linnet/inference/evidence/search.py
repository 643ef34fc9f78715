r"""Several prior scales or noise variances: where the evidence is largest, by L-BFGS with analytic gradients.

.. math:: \log N(r \mid 0, \Sigma), \qquad \Sigma = \sum_l s_l K_l + \mathrm{diag}(\sigma^2)

Every evaluation is a Cholesky decomposition: of the kernel, or in weight space of the weights' precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import LOG_2PI, Choice, dense_floor, warn_of_floor

Evaluate = Callable[[Sequence[float], Sequence[float]], tuple[float, list[float], list[float]]]
"""Scales and noises to the log evidence and its derivatives in their logarithms."""


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
    assumed: Sequence[float] = (),
    steps: int = 200,
) -> Choice:
    """Several scales or noises, from ``start`` by L-BFGS on their logarithms with analytic gradients.

    What is maximized never falls below its value at the start. What is given as ``scales`` or ``noise`` is kept.
    ``assumed`` has the energies of the noises' priors, as in `linnet.inference.evidence.gaussian.best`; none where it
    is empty.
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
    rows = max(len(problem.r) for problem in problems)
    sizes = _Sizes(traces, rows, problems[0].r.dtype)
    return _maximized(evaluate, start, scales, noise, sizes, assumed, steps)


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
    assumed: Sequence[float] = (),
    steps: int = 200,
) -> Choice:
    r"""`best_dense` in weight space, from the moments of each noise's rows.

    With u the mean of the whitened weights and A the precision (MacKay 1992):

    .. math:: \partial_{\log s_l} = \tfrac12 \sum_{k \in l} \left(u_k^2 + (A^{-1})_{kk} - 1\right), \qquad
              \partial_{\log \sigma_i^2} = \tfrac12 \left(\frac{\|r_i - \Phi_i u\|^2
              + \mathrm{tr}(\Phi_i A^{-1} \Phi_i^\top)}{\sigma_i^2} - m_i\right)

    Args:
        tasks: Moments, for each task and noise.
        group: (p,), the number of a parameter's scale; None for one scale.
        start: Where to begin.
        scales: Kept where given.
        noise: Kept where given.
        assumed: As for `best_dense`.
        steps: Limit of L-BFGS.
    """
    like = tasks[0][0][1]
    groups = torch.zeros(len(like), dtype=torch.long, device=like.device) if group is None else group.to(like.device)

    def evaluate(s: Sequence[float], v: Sequence[float]) -> tuple[float, list[float], list[float]]:
        root = like.new_tensor(list(s))[groups].sqrt()
        total, ds, dv = 0.0, like.new_zeros(len(s)), [0.0] * len(v)
        for moments in tasks:
            A = torch.diag(torch.ones_like(like))
            b = torch.zeros_like(like)
            for (G, part, *_), variance in zip(moments, v, strict=True):
                A.add_(root[:, None] * G * root, alpha=1 / variance)
                b.add_(root * part, alpha=1 / variance)
            L, info = torch.linalg.cholesky_ex(A)
            if int(info):
                return -math.inf, [0.0] * len(s), [0.0] * len(v)
            inverse = torch.cholesky_inverse(L)
            u = inverse @ b
            ds.index_add_(0, groups, 0.5 * (u.square() + inverse.diagonal() - 1))
            fit = float(u @ u)
            for i, (G, part, norm2, m) in enumerate(moments):
                w = root * u
                left = max(norm2 - 2 * float(part @ w) + float(w @ (G @ w)), 0.0)
                spread = float((root[:, None] * inverse * root * G).sum())
                dv[i] += 0.5 * ((left + spread) / v[i] - m)
                fit += left / v[i] + m * math.log(v[i])
            total -= 0.5 * (fit + 2 * float(L.diagonal().log().sum()) + sum(m[3] for m in moments) * LOG_2PI)
        return total, ds.tolist(), dv

    count = len(start.scales)
    diagonals = [sum(m[0].diagonal() for m in moments) for moments in tasks]
    each = torch.stack([like.new_zeros(count).index_add_(0, groups, d) for d in diagonals])  # type: ignore[arg-type]
    rows = max(sum(m[3] for m in moments) for moments in tasks)
    sizes = _Sizes(each.amax(0).tolist(), rows, like.dtype)
    return _maximized(evaluate, start, scales, noise, sizes, assumed, steps)


@dataclass(frozen=True)
class _Sizes:
    """What a search must know of the kernels: their traces, their rows and their rounding."""

    traces: Sequence[float]
    rows: int
    dtype: torch.dtype

    def trace(self, scales: Sequence[float]) -> float:
        """Of the whole kernel; one where there is none."""
        return sum(s * t for s, t in zip(scales, self.traces, strict=True)) or 1.0

    @property
    def floor(self) -> float:
        """Noise below this share of the trace is not considered."""
        return dense_floor(self.rows, self.dtype)


def _maximized(
    evaluate: Evaluate,
    start: Choice,
    scales: Sequence[float] | None,
    noise: Sequence[float] | None,
    sizes: _Sizes,
    assumed: Sequence[float],
    steps: int,
) -> Choice:
    start = replace(start, scales=tuple(scales or start.scales), noise=tuple(noise or start.noise))
    if scales is not None and noise is not None:
        return replace(start, log_evidence=evaluate(start.scales, start.noise)[0])
    if noise is None and any(assumed):
        found = _maximized(_with_prior(evaluate, assumed), start, scales, None, sizes, (), steps)
        value, v = evaluate(found.scales, found.noise)[0], found.noise
        halves = [evaluate(found.scales, (*v[:i], 0.5 * v[i], *v[i + 1 :]))[0] for i in range(len(v))]
        return replace(found, log_evidence=value, floored=tuple(half > value for half in halves))
    start = replace(start, log_evidence=evaluate(start.scales, start.noise)[0])
    found = _searched(evaluate, start, (scales is None, noise is None), sizes, steps)
    if noise is None and min(found.noise) <= 1.001 * sizes.floor * sizes.trace(found.scales):
        warn_of_floor(True, sizes.floor)
        if scales is None:  # as in `best`
            found = _searched(evaluate, found, (True, False), sizes, steps)
    return found if found.log_evidence >= start.log_evidence else start


def _with_prior(evaluate: Evaluate, assumed: Sequence[float]) -> Evaluate:
    """The log evidence and the log prior of the noises, which is that of `linnet.inference.evidence.gaussian`."""

    def posterior(s: Sequence[float], v: Sequence[float]) -> tuple[float, list[float], list[float]]:
        value, ds, dv = evaluate(s, v)
        pull = [0.5 * a / x for a, x in zip(assumed, v, strict=True)]
        return value - sum(pull), ds, [d + b for d, b in zip(dv, pull, strict=True)]

    return posterior


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
        lift = 0.1 * sizes.rows * min(v0) / sizes.trace(s0)
        s0 = [s * lift for s in s0]
    x0: list[float] = []
    bounds: list[tuple[float, float]] = []
    if free[0]:
        for s, trace in zip(s0, sizes.traces, strict=True):
            limit = 16 * torch.finfo(sizes.dtype).eps * len(s0) * trace
            top = math.inf if free[1] or limit == 0 else math.log(min(v0) / limit)
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
    found = scipy.optimize.minimize(
        negative,
        x0,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": steps, "ftol": 1e-12, "gtol": 1e-6},
        callback=lambda intermediate_result: path.append(-float(intermediate_result.fun)),
    )
    scales, noise = split([float(t) for t in found.x])
    return Choice(tuple(scales), tuple(noise), -float(found.fun), (*start.path, *path))
