r"""The log evidence of Gaussian observations, and the prior scales and noise that maximize it.

.. math:: \log N(r \mid 0, \Sigma), \qquad \Sigma = \sum_l s_l K_l + \mathrm{diag}(\sigma^2)

`choose_one` knows one kernel by its spectrum: after one eigendecomposition (or a few Lanczos steps) each evaluation
costs O(n). `choose_by_kernels` and `choose_by_moments` have several scales or noises, and each evaluation is a Cholesky
decomposition: of the kernel, or of the precision of the weights. All three climb with
`linnet.inference.evidence.search.maximize`.

Where K can explain all of r, the evidence of a few observations often grows as the noise vanishes. A prior on the
noise, an inverse gamma distribution in the limit of no weight but an energy a, keeps the noise away from zero:

.. math:: \log p(\sigma^2) = -\frac{a}{2 \sigma^2} - \log \sigma^2 + \mathrm{const}

The second term is flat in :math:`\log \sigma^2`, the coordinate of the search. The first term is what r would add to
:math:`r^\top \Sigma^{-1} r` if a part of r, of the energy a, were known to be noise. The prior can raise the noise, to
no less than a / n, and where n is large by a share of about a / (n times the noise), but never lower it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.inference.evidence.search import Slope, maximize
from linnet.linalg import cholesky_solve

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Choice:
    """Prior scales and noise that the evidence chose.

    Attributes:
        scales: Prior scales.
        noise: Noise variances, or scales of known variances: one, or one for each output.
        log_evidence: The log evidence with these scales and this noise.
        path: The rising values of what the search maximizes: the log evidence, less ``a / (2 noise)`` where a noise
            energy a is assumed.
        floored: For each noise, whether half of the noise would have more evidence, so that the noise comes from the
            assumed energy; empty where no energy is assumed.
        averaged: Whether scales and noise are averages by their evidence. The log evidence is the largest all the same.
    """

    scales: tuple[float, ...]
    noise: tuple[float, ...]
    log_evidence: float
    path: tuple[float, ...] = field(default=(), repr=False)
    floored: tuple[bool, ...] = ()
    averaged: bool = False


class GaussianTerms(NamedTuple):
    """A log evidence and its derivatives in the logarithms of scales and noises."""

    value: float
    scales: list[Slope]
    noise: list[Slope]


Evaluate = Callable[[Sequence[float], Sequence[float]], GaussianTerms]
"""From scales and noises to the evidence; an ArithmeticError where the sum is not positive definite."""


def _add(terms: Sequence[GaussianTerms]) -> GaussianTerms:
    """The evidence of independent tasks that share scales and noises."""

    def total(slopes: Sequence[Sequence[Slope]]) -> list[Slope]:
        return [Slope(*map(sum, zip(*same, strict=True))) for same in zip(*slopes, strict=True)]

    return GaussianTerms(sum(t.value for t in terms), total([t.scales for t in terms]), total([t.noise for t in terms]))


# One scale and one noise, by the spectrum of the kernel.


@dataclass(frozen=True)
class KernelSpectrum:
    r"""What the evidence needs to know of a kernel K (m, m) and residuals r (m,).

    .. math:: \log\det(s K + \sigma^2) = \sum_j w_j \log(s \lambda_j + \sigma^2), \qquad
              r^\top (s K + \sigma^2)^{-1} r = \sum_j e_j / (s \mu_j + \sigma^2)

    An eigendecomposition gives these numbers exactly; Lanczos gives the nodes of a quadrature.

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
        >>> round(KernelSpectrum(one, one, one, 4 * one).log_evidence(1.0, 1.0), 6)
        -2.265512
        """
        return self.terms([scale], [noise]).value

    def terms(self, scales: Sequence[float], noise: Sequence[float]) -> GaussianTerms:
        (s,), (v,) = scales, noise
        d, e = s * self.nodes + v, s * self.positions + v
        value = -0.5 * float((self.weights * d.log()).sum() + (self.energies / e).sum() + self.m * LOG_2PI)
        pull, share = self.energies / e.square(), self.weights / d
        by_scale = Slope(s * float((pull * self.positions).sum()), s * float((share * self.nodes).sum()))
        return GaussianTerms(value, [by_scale], [Slope(v * float(pull.sum()), v * float(share.sum()))])

    def with_repeats(self, count: float) -> KernelSpectrum:
        """With so many more observations that repeat others: they bring no new direction and no energy."""
        zero = self.nodes.new_zeros(1)
        return join_spectra([self, KernelSpectrum(zero, zero + count, zero, zero)]) if count else self

    def log_evidences(self, scales: Tensor, noises: Tensor) -> Tensor:
        """`log_evidence` for many scales and noises, (g,) each."""
        d = scales[:, None] * self.nodes + noises[:, None]
        e = scales[:, None] * self.positions + noises[:, None]
        return -0.5 * (d.log() @ self.weights + (1 / e) @ self.energies + self.m * LOG_2PI)

    def best_scales(self, ratios: Tensor) -> Tensor:
        """The scales of largest evidence where the noise is so many times the scale, (g,)."""
        return (1 / (self.positions + ratios[:, None])) @ self.energies / self.m


class Eigenpairs(NamedTuple):
    """The eigendecomposition of a matrix (k, k), and a vector along its eigenvectors.

    Attributes:
        values: (k,), rising; rounding leaves those of a singular matrix slightly below zero, which become zero.
        vectors: (k, k), in columns.
        along: (k,).
    """

    values: Tensor
    vectors: Tensor
    along: Tensor

    def with_vector(self, b: Tensor) -> Eigenpairs:
        """The same matrix with another vector b (k,)."""
        return self._replace(along=self.vectors.T @ b)


def decompose(A: Tensor, b: Tensor) -> Eigenpairs:
    """The eigenpairs of A (k, k), and b (k,) along them."""
    values, Q = torch.linalg.eigh(A)
    return Eigenpairs(values.clamp_min(0), Q, Q.T @ b)


def exact_spectrum(K: Tensor, r: Tensor) -> KernelSpectrum:
    """By the eigendecomposition of K (m, m), for r (m,)."""
    return kernel_spectrum(decompose(K, r))


def kernel_spectrum(found: Eigenpairs) -> KernelSpectrum:
    """The spectrum of a kernel and residuals that were decomposed."""
    nodes = found.values.double().cpu()
    return KernelSpectrum(nodes, torch.ones_like(nodes), nodes, found.along.double().square().cpu())


def weight_spectrum(found: Eigenpairs, *, norm2: float, m: float) -> KernelSpectrum:
    """The spectrum of ``Phi Phi^T`` (m, m) and r from ``Phi^T Phi`` (p, p) and ``Phi^T r`` (p,).

    Args:
        found: The eigenpairs of ``Phi^T Phi``, and ``Phi^T r`` along them.
        norm2: The squared norm of r.
        m: The number of rows of Phi, by their weights; without weights at least as many as there are directions with
            an eigenvalue.
    """
    nodes, along = found.values.double().cpu(), found.along.double().square().cpu()
    # A direction with an eigenvalue below rounding is no direction of Phi's rows.
    real = nodes > len(nodes) * torch.finfo(found.values.dtype).eps * nodes[-1]
    nodes, energies = nodes[real], along[real] / nodes[real]
    rest = max(norm2 - float(energies.sum()), 0.0)
    nodes = torch.cat([nodes, nodes.new_zeros(1)])
    weights = torch.cat([torch.ones_like(energies), energies.new_tensor([m - len(energies)])])
    return KernelSpectrum(nodes, weights, nodes, torch.cat([energies, energies.new_tensor([rest])]))


def join_spectra(spectra: Sequence[KernelSpectrum]) -> KernelSpectrum:
    """The spectrum of independent tasks that share scale and noise: their log evidences add up."""
    parts = [(s.nodes, s.weights, s.positions, s.energies) for s in spectra]
    return KernelSpectrum(*(torch.cat(column) for column in zip(*parts, strict=True)))


def ratio_bounds(top: float, floor: float) -> tuple[float, float]:
    """The logarithms of the smallest and the largest ratio of noise to scale, for the largest eigenvalue ``top``."""
    return math.log(floor * top), math.log(1e8 * top)


def choose_one(
    spectrum: KernelSpectrum,
    *,
    scale: float | None = None,
    noise: float | None = None,
    floor: float = 2.0**-40,
    assumed: float = 0.0,
) -> Choice:
    """The scale and noise of largest evidence; a scale or noise that is given stays.

    The search starts from the best of a grid over all magnitudes of the ratio of noise to scale.

    Args:
        spectrum: Of kernel and residuals.
        scale: Of the kernel, where it is known.
        noise: The noise variance, where it is known.
        floor: Noise below this share of the largest eigenvalue is not considered: rounding hides what it would mean.
        assumed: The energy a of the noise's prior; of no effect where the noise is known.
    """
    given = (None if scale is None else (scale,), None if noise is None else (noise,))
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
        if scale is None:
            raise ValueError("The kernel is zero on the training data: no selected parameter moves the outputs there.")
        noise = (energy + assumed) / spectrum.m
        value, half = (spectrum.log_evidence(scale, part * noise) for part in (1, 0.5))
        return Choice((scale,), (noise,), value, floored=(half > value,) if assumed else ())
    penalty = assumed if noise is None else 0.0
    zero = spectrum.nodes.new_zeros(1)
    # An energy that the kernel cannot explain, and no observation.
    penalized = join_spectra([spectrum, KernelSpectrum(zero, zero, zero, zero + penalty)])
    low, high = ratio_bounds(top, floor)
    ratios = torch.linspace(low, high, math.ceil(4 * (high - low)) + 1, dtype=torch.float64).exp()
    scales = torch.full_like(ratios, scale) if scale else noise / ratios if noise else penalized.best_scales(ratios)
    noises = torch.full_like(ratios, noise) if noise else scales * ratios
    best = int(penalized.log_evidences(scales, noises).argmax())
    start = (float(scales[best]),), (float(noises[best]),)
    sizes = _Sizes([top], floor, floor * max(4 / max(16.0, spectrum.m), 1 / 64))
    return _choose(spectrum.terms, Choice(*start, math.nan), given, sizes, (penalty,))


# Several scales or noises.


@dataclass(frozen=True)
class KernelTask:
    """One task of `choose_by_kernels`.

    Attributes:
        parts: Scale name to its kernel (m, m).
        r: (m,), the residuals.
        output: (m,), for each row the number of its noise.
        repeats: For each noise, how many more rows repeat others; empty for none.
    """

    parts: Mapping[str, Tensor]
    r: Tensor
    output: Tensor
    repeats: Sequence[float] = ()


def choose_by_kernels(
    tasks: Sequence[KernelTask],
    *,
    start: Choice,
    scales: Sequence[float] | None = None,
    noise: Sequence[float] | None = None,
    assumed: Sequence[float] = (),
) -> Choice:
    """Several scales or noises of largest evidence, from dense kernels.

    The value never falls below that of the start. Scales or noises that are given stay.

    Args:
        tasks: One or more, which share scales and noises.
        start: Where to begin.
        scales: The scales, where they are known.
        noise: The noises, where they are known.
        assumed: The energies of the noises' priors, as for `choose_one`; empty for none.
    """
    traces = [max(float(task.parts[name].diagonal().sum()) for task in tasks) for name in tasks[0].parts]
    sizes = _dense_sizes(traces, max(len(task.r) for task in tasks), tasks[0].r.dtype)

    def evaluate(s: Sequence[float], v: Sequence[float]) -> GaussianTerms:
        return _add([kernel_terms(task, s, v) for task in tasks])

    return _choose(evaluate, start, (scales, noise), sizes, assumed)


def kernel_terms(task: KernelTask, scales: Sequence[float], noise: Sequence[float]) -> GaussianTerms:
    r"""The evidence of one task.

    .. math:: \partial_{\log s_l} = \tfrac12 s_l \left(\alpha^\top K_l \alpha
              - \mathrm{tr}(\Sigma^{-1} K_l)\right), \qquad \alpha = \Sigma^{-1} r
    """
    parts, r, output = list(task.parts.values()), task.r, task.output
    Sigma = torch.zeros_like(parts[0])
    for s, K in zip(scales, parts, strict=True):
        Sigma.add_(K, alpha=s)
    v = torch.tensor(list(noise), dtype=Sigma.dtype, device=Sigma.device)
    Sigma.diagonal().add_(v[output])
    L = _factor(Sigma)
    inverse = torch.cholesky_inverse(L)
    alpha = cholesky_solve(L, r)
    value = -0.5 * float(r @ alpha + len(r) * LOG_2PI) - float(L.diagonal().log().sum())
    by_scale = [
        Slope(s * float(alpha @ (K @ alpha)), s * float((inverse * K).sum()))
        for s, K in zip(scales, parts, strict=True)
    ]
    up, down = (torch.zeros_like(v).index_add_(0, output, x) * v for x in (alpha.square(), inverse.diagonal()))
    if any(task.repeats):
        more = v.new_tensor(list(task.repeats))
        value, down = value - 0.5 * float((more * (v.log() + LOG_2PI)).sum()), down + more
    return GaussianTerms(value, by_scale, [Slope(*pair) for pair in zip(up.tolist(), down.tolist(), strict=True)])


Moments = tuple[Tensor, Tensor, float, float]
"""``Phi^T Phi`` (p, p), ``Phi^T r`` (p,), the squared norm of r and the number of rows, of the rows of one noise, by
the weights of the rows."""


def choose_by_moments(
    tasks: Sequence[Sequence[Moments]],
    group: Tensor | None,
    *,
    start: Choice,
    scales: Sequence[float] | None = None,
    noise: Sequence[float] | None = None,
    assumed: Sequence[float] = (),
) -> Choice:
    """`choose_by_kernels` in weight space.

    Args:
        tasks: For each task the moments of each noise's rows.
        group: (p,), the number of a parameter's scale; None for one scale.
        start: As for `choose_by_kernels`, and so are the others.
        scales: The scales, where they are known.
        noise: The noises, where they are known.
        assumed: The energies of the noises' priors.
    """
    like = tasks[0][0][1]
    groups = torch.zeros(len(like), dtype=torch.long, device=like.device) if group is None else group.to(like.device)
    diagonals = [sum(m[0].diagonal() for m in moments) for moments in tasks]
    count = len(start.scales)
    each = torch.stack([like.new_zeros(count).index_add_(0, groups, d) for d in diagonals])  # type: ignore[arg-type]
    sizes = _dense_sizes(
        each.amax(0).tolist(), math.ceil(max(sum(m[3] for m in moments) for moments in tasks)), like.dtype
    )

    def evaluate(s: Sequence[float], v: Sequence[float]) -> GaussianTerms:
        return _add([moment_terms(moments, groups, s, v) for moments in tasks])

    return _choose(evaluate, start, (scales, noise), sizes, assumed)


def moment_terms(
    moments: Sequence[Moments], groups: Tensor, scales: Sequence[float], noise: Sequence[float]
) -> GaussianTerms:
    r"""The evidence of one task, with u the mean of the whitened weights and A their precision (MacKay 1992).

    .. math:: \partial_{\log s_l} = \tfrac12 \sum_{k \in l} \left(u_k^2 + (A^{-1})_{kk} - 1\right), \qquad
              \partial_{\log \sigma_i^2} = \tfrac12 \left(\frac{\|r_i - \Phi_i u\|^2
              + \mathrm{tr}(\Phi_i A^{-1} \Phi_i^\top)}{\sigma_i^2} - m_i\right)
    """
    like = moments[0][1]
    root = like.new_tensor(list(scales))[groups].sqrt()
    A, b = torch.diag(torch.ones_like(like)), torch.zeros_like(like)
    for (G, part, *_), v in zip(moments, noise, strict=True):
        A.add_(root[:, None] * G * root, alpha=1 / v)
        b.add_(root * part, alpha=1 / v)
    L = _factor(A)
    inverse = torch.cholesky_inverse(L)
    u = cholesky_solve(L, b)
    up, down = (
        like.new_zeros(len(scales)).index_add_(0, groups, x).tolist() for x in (u.square(), 1 - inverse.diagonal())
    )
    w, spread = root * u, root[:, None] * inverse * root
    fit, by_noise = float(u @ u), []
    for (G, part, norm2, m), v in zip(moments, noise, strict=True):
        left = max(norm2 - 2 * float(part @ w) + float(w @ (G @ w)), 0.0) / v
        by_noise.append(Slope(left, m - float((spread * G).sum()) / v))
        fit += left + m * (math.log(v) + LOG_2PI)
    value = -0.5 * fit - float(L.diagonal().log().sum())
    return GaussianTerms(value, [Slope(*pair) for pair in zip(up, down, strict=True)], by_noise)


def _factor(M: Tensor) -> Tensor:
    L, info = torch.linalg.cholesky_ex(M)
    if int(info):
        raise ArithmeticError(
            "The covariance of the observations is not positive definite in its precision. Give more noise, or use "
            "dtype='float64'."
        )
    return L


# The search.


@dataclass(frozen=True)
class _Sizes:
    """What bounds a search.

    Attributes:
        traces: The trace of each kernel (of one kernel, its largest eigenvalue).
        floor: Noise below this share of the scaled traces is not considered.
        limit: Where the noise is given, a scaled trace above ``noise / limit`` is not considered.
        visible: The share of the noise that the scaled traces have at least where the search begins: below that the
            slopes are as small as the kernel.
        gain: As for `maximize`: more where an evaluation costs more.
    """

    traces: Sequence[float]
    floor: float
    limit: float
    visible: float = 0.0
    gain: float = 0.0

    def trace(self, scales: Sequence[float]) -> float:
        """The trace of the scaled kernels; one where it is zero."""
        return sum(s * t for s, t in zip(scales, self.traces, strict=True)) or 1.0


def dense_floor(rows: int, dtype: torch.dtype) -> float:
    """The floor of `choose_one` for kernels with so many rows in all that are decomposed in this precision.

    >>> dense_floor(1000, torch.float64) < 1e-12
    True
    """
    return 4 * max(16, rows) * torch.finfo(dtype).eps


def _dense_sizes(traces: Sequence[float], rows: int, dtype: torch.dtype) -> _Sizes:
    return _Sizes(traces, dense_floor(rows, dtype), 16 * torch.finfo(dtype).eps * len(traces), 0.1 * rows, 1e-9)


def _choose(
    evaluate: Evaluate,
    start: Choice,
    given: tuple[Sequence[float] | None, Sequence[float] | None],
    sizes: _Sizes,
    assumed: Sequence[float],
) -> Choice:
    """The scales and noises of largest evidence, and of the noises' priors where energies are assumed."""
    scales, noise = given
    start = replace(start, scales=tuple(scales or start.scales), noise=tuple(noise or start.noise))
    if scales is not None and noise is not None:
        return replace(start, log_evidence=evaluate(start.scales, start.noise).value)
    penalized = noise is None and any(assumed)
    objective = _with_prior(evaluate, assumed) if penalized else evaluate
    start = replace(start, log_evidence=objective(start.scales, start.noise).value)
    found, at_bound = _climb(objective, start, (scales is None, noise is None), sizes)
    _warn_of_floor(at_bound, sizes.floor)
    candidates = [start, found]
    if at_bound and scales is None and noise is None:
        # No noise. What keeps the noise from zero must not decide about the scales, which are chosen once more.
        candidates = [start, *(_climb(objective, point, (True, False), sizes)[0] for point in (found, start))]
    found = max(candidates, key=lambda choice: choice.log_evidence)
    if not penalized:
        return found
    value, v = evaluate(found.scales, found.noise).value, found.noise
    halves = [evaluate(found.scales, (*v[:i], 0.5 * v[i], *v[i + 1 :])).value for i in range(len(v))]
    return replace(found, log_evidence=value, floored=tuple(half > value for half in halves))


def _with_prior(evaluate: Evaluate, assumed: Sequence[float]) -> Evaluate:
    """The log evidence and the log prior of the noises."""

    def penalize(s: Sequence[float], v: Sequence[float]) -> GaussianTerms:
        terms, pull = evaluate(s, v), [a / x for a, x in zip(assumed, v, strict=True)]
        noise = [slope._replace(up=slope.up + b) for slope, b in zip(terms.noise, pull, strict=True)]
        return GaussianTerms(terms.value - 0.5 * sum(pull), terms.scales, noise)

    return penalize


def _warn_of_floor(reached: bool, floor: float) -> None:
    if reached and floor > 1e-9:  # in float64 so little noise is as good as none
        warnings.warn(
            f"The evidence asks for less noise than can be told from none in this precision, {floor:.1g} of the "
            "kernel's largest eigenvalue, which was taken instead. Use dtype='float64', or give noise= as a number.",
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Moved:
    """An evidence in the coordinates of `_climb`."""

    value: float
    slopes: list[Slope]


def _climb(evaluate: Evaluate, start: Choice, free: tuple[bool, bool], sizes: _Sizes) -> tuple[Choice, bool]:
    """The search over logarithms of the scales, and of the noises as shares of the trace of the scaled kernels.

    So rounding, which is relative to the kernels, bounds each share alone.

    Args:
        evaluate: The evidence.
        start: Where to begin.
        free: Whether the scales, and whether the noises, are unknown.
        sizes: What bounds the search.

    Returns:
        The choice, and whether a noise, or the one scale beside a given noise, lies where rounding bounds it.
    """
    s0, v0 = list(start.scales), list(start.noise)
    x0: list[float] = []
    bounds: list[tuple[float, float]] = []
    wide = 28.0  # twelve decades
    if free[0]:
        lift = max(1.0, sizes.visible * min(v0) / sizes.trace(s0))
        s0 = [s * lift for s in s0]
        for s, trace in zip(s0, sizes.traces, strict=True):
            x0.append(math.log(s))
            top = math.inf if free[1] or not trace else math.log(min(v0) / (sizes.limit * trace))
            bounds.append((x0[-1] - wide, min(x0[-1] + wide, max(x0[-1], top))))
    if free[1]:
        for v in v0:
            x0.append(math.log(v / sizes.trace(s0)))
            bounds.append((math.log(sizes.floor), x0[-1] + wide))

    def split(x: Sequence[float]) -> tuple[list[float], list[float]]:
        s = [math.exp(t) for t in x[: len(s0)]] if free[0] else s0
        shares = x[len(s0) :] if free[0] else x
        return s, [math.exp(t) * sizes.trace(s) for t in shares] if free[1] else v0

    def objective(x: list[float]) -> _Moved:
        s, v = split(x)
        terms = evaluate(s, v)
        slopes = terms.scales if free[0] else []
        if free[1]:  # the trace, and with it the noise, moves with every scale
            parts = [a * t / sizes.trace(s) for a, t in zip(s, sizes.traces, strict=True)]
            up, down = (sum(column) for column in zip(*((n.up, n.down) for n in terms.noise), strict=True))
            slopes = [Slope(a.up + w * up, a.down + w * down) for a, w in zip(slopes, parts, strict=False)]
        return _Moved(terms.value, [*slopes, *(terms.noise if free[1] else [])])

    found = maximize(objective, [x0], bounds, gain=sizes.gain)
    scales, noise = split(found.x)
    choice = Choice(tuple(scales), tuple(noise), found.value, (*start.path, *found.rising))
    if free[1]:
        return choice, min(noise) <= 1.001 * sizes.floor * sizes.trace(scales)
    return choice, len(scales) == 1 and found.x[0] >= bounds[0][1]
