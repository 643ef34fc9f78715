r"""The log evidence of Gaussian observations, and the hyperparameters that maximize it.

.. math:: \log N(r \mid 0, \Sigma), \qquad \Sigma = \sum_l s_l K_l + \mathrm{diag}(\sigma^2)

With one scale and one noise variance, everything there is to know about K and r is a `Spectrum`: after one
eigendecomposition (or a few Lanczos steps) every evaluation costs O(n). Several are the business of
`linnet.inference.evidence.search`.

Where K can explain all of r, the evidence of a few observations often grows as the noise vanishes. A prior on the
noise, an inverse gamma distribution in the limit of no weight but an energy a, keeps it away from zero:

.. math:: \log p(\sigma^2) = -\frac{a}{2 \sigma^2} - \log \sigma^2 + \mathrm{const}

In :math:`\log \sigma^2`, which the search works in, the second term is flat; the first is what r would add to
:math:`r^\top \Sigma^{-1} r` if a part of it, of the energy a, were known to be noise. It can raise the noise, to no
less than a / n, and where n is large by a share of about a / (n times the noise), but never lower it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import scipy  # its optimize is imported at first use, which loading a saved fit does without
import torch
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
        path: What the search maximizes, after each of its steps: the log evidence, less ``a / (2 noise)`` where a noise
            energy a is assumed.
        floored: For each noise, whether half of it would have more evidence, so that it comes from what is assumed;
            empty where nothing is.
    """

    scales: tuple[float, ...]
    noise: tuple[float, ...]
    log_evidence: float
    path: tuple[float, ...] = field(default=(), repr=False)
    floored: tuple[bool, ...] = ()


def best(
    spectrum: Spectrum,
    *,
    scale: float | None = None,
    noise: float | None = None,
    floor: float = 2.0**-40,
    assumed: float = 0.0,
) -> Choice:
    """The scale and noise of largest evidence; what is given is kept.

    The best scale for each ratio of noise to scale is known in closed form, so that two unknowns are one; one unknown
    is bracketed on a grid over all magnitudes and refined with the analytic derivative. No start values, no restarts.

    Args:
        spectrum: Of kernel and residuals.
        scale: Of the kernel, where it is known.
        noise: Where it is known.
        floor: Noise below this share of the largest eigenvalue is not considered: rounding hides what it would mean.
        assumed: The energy a of the noise's prior; of no effect where the noise is known.
    """
    if assumed and noise is None:
        zero = spectrum.nodes.new_zeros(1)
        # An energy that the kernel cannot explain, and no observation.
        more = joined([spectrum, Spectrum(zero, zero, zero, zero + assumed)])
        found = best(more, scale=scale, floor=floor)
        value, half = (spectrum.log_evidence(found.scales[0], part * found.noise[0]) for part in (1, 0.5))
        return replace(found, log_evidence=value, floored=(half > value,))
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
        warn_of_floor(True, floor)
        return best(spectrum, noise=s * rho, floor=floor * max(4 / max(16.0, spectrum.m), 1 / 64))

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
        warn_of_floor(t <= low + shift, floor)
        return Choice((scale,), (math.exp(t),), value, path)
    t, value, path = _peak(one, math.log(noise) - high, math.log(noise) - low)
    warn_of_floor(t >= math.log(noise) - low, floor)
    return Choice((math.exp(t),), (noise,), value, path)


def dense_floor(rows: int, dtype: torch.dtype) -> float:
    """The floor of `best` for kernels with so many rows in all that are decomposed in this precision.

    >>> dense_floor(1000, torch.float64) < 1e-12
    True
    """
    return 4 * max(16, rows) * torch.finfo(dtype).eps


def warn_of_floor(reached: bool, floor: float) -> None:
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
        t = scipy.optimize.brentq(lambda x: fn(x)[1], a, b, xtol=1e-12, rtol=1e-14)
        if fn(t)[0] >= values[i]:
            return t, fn(t)[0], (*path, fn(t)[0])
    return grid[i], values[i], tuple(path)  # at an end: no signal, or no noise
