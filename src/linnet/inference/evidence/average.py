r"""The average over a prior scale and a noise by their evidence, in place of the maximum.

Few observations hardly tell how large the scale s and the noise :math:`\sigma^2` are, and the pair of largest evidence
is often one that explains too much. The average weighs all pairs. With the ratio :math:`\rho = \sigma^2 / s`, the noise
integrates in closed form under the prior :math:`1 / \sigma^2` and the assumed energy a of
`linnet.inference.evidence.gaussian`:

.. math:: p(r \mid \rho) \propto \prod_j (\lambda_j / \rho + 1)^{-1/2} \, (Q_\rho + a)^{-m/2}, \qquad
          Q_\rho = \sum_j \frac{e_j}{\lambda_j / \rho + 1}, \qquad
          E[\sigma^2 \mid \rho] = \frac{Q_\rho + a}{m - 2}

Where the scale or the noise is known, the ratio stands for the other one, and the evidence is that of a Gaussian.

All ratios that the search for the maximum considers are equally likely beforehand, in their logarithm. A prior that
prefers ratios near one did worse on new rows of UCI sets and on sinusoids without noise alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import KernelSpectrum, ratio_bounds


@dataclass(frozen=True)
class WeightedPoints:
    """A grid of scales and noises with their weights, float64 on the CPU.

    Attributes:
        weights: (g,), which add up to one.
        ratios: (g,), noise over scale.
        scales: (g,), the mean of the scale at each ratio.
        noises: (g,), the mean of the noise at each ratio.
    """

    weights: Tensor
    ratios: Tensor
    scales: Tensor
    noises: Tensor

    @property
    def scale(self) -> float:
        """The average scale."""
        return float(self.weights @ self.scales)

    @property
    def noise(self) -> float:
        """The average noise."""
        return float(self.weights @ self.noises)


def can_average(spectrum: KernelSpectrum, *, scale: float | None, noise: float | None) -> bool:
    """Whether there is a scale or noise to average over, and whether the average is finite.

    Where scale and noise are both unknown, Student's t distribution has a variance from three observations on.
    """
    if scale is not None and noise is not None:
        return False
    known = scale is not None or noise is not None
    return (known or spectrum.m >= 3) and bool(spectrum.nodes.max() > 0) and bool(spectrum.energies.sum() > 0)


def weigh_points(
    spectrum: KernelSpectrum, *, scale: float | None, noise: float | None, floor: float, assumed: float
) -> WeightedPoints:
    """The points that the average goes over; arguments as for `linnet.inference.evidence.gaussian.choose_one`.

    The points are equally spaced in the logarithm of the ratio, over all ratios whose weight is not rounding beside the
    largest one, and so dense that no point holds more than a fifth of all weight: for a bell curve half a standard
    deviation apart, where the sum equals the integral to rounding.

    >>> one = torch.ones(4, dtype=torch.float64)
    >>> points = weigh_points(KernelSpectrum(one, one, one, one), scale=1.0, noise=None, floor=1e-12, assumed=0.0)
    >>> round(float(points.weights.sum()), 9), points.scale, points.noise > 0
    (1.0, 1.0, True)
    """
    top = float(torch.maximum(spectrum.nodes.max(), spectrum.positions.max()))
    (low, high), step = ratio_bounds(top, floor), 0.5
    while True:
        count = math.ceil((high - low) / step) + 1
        logs = torch.linspace(low, high, count, dtype=torch.float64)
        value, scales, noises = _weigh(spectrum, logs.exp(), scale, noise, assumed)
        value[[0, -1]] -= math.log(2)  # the trapezoidal rule
        weights = torch.softmax(value, 0)
        if float(weights.max()) <= 0.2 or count > 10_000:
            break
        seen = (weights > torch.finfo(torch.float64).eps * weights.max()).nonzero()[:, 0]
        first, last = max(int(seen[0]) - 1, 0), min(int(seen[-1]) + 1, count - 1)
        low, high, step = float(logs[first]), float(logs[last]), 0.5 * float(logs[1] - logs[0])
    kept = weights > torch.finfo(torch.float64).eps * weights.max()
    weights = weights[kept] / weights[kept].sum()
    return WeightedPoints(weights, logs.exp()[kept], scales[kept], noises[kept])


def _weigh(
    spectrum: KernelSpectrum, ratios: Tensor, scale: float | None, noise: float | None, assumed: float
) -> tuple[Tensor, Tensor, Tensor]:
    """For each ratio (g,) its log weight, and the means of scale and noise."""
    m = spectrum.m
    log_det = (spectrum.nodes / ratios[:, None]).log1p() @ spectrum.weights
    energy = (1 / (spectrum.positions / ratios[:, None] + 1)) @ spectrum.energies
    if noise is not None:
        noises = torch.full_like(ratios, noise)
        value = -0.5 * (log_det + energy / noise)
    elif scale is not None:
        noises = scale * ratios
        value = -0.5 * (log_det + m * noises.log() + (energy + assumed) / noises)
    else:
        noises = (energy + assumed) / (m - 2)
        value = -0.5 * (log_det + m * (energy + assumed).log())
    scales = noises / ratios if scale is None else torch.full_like(ratios, scale)
    return value, scales, noises


@dataclass(frozen=True)
class MixtureMoments:
    r"""The first two moments of the mixture over all points, along the eigenvectors of the kernel.

    With ``c_g = along / (values + ratio_g)``, the mixture of all points has

    .. math:: \mathrm{mean} = \sum_g w_g c_g, \qquad \mathrm{shrink} = \sum_g \frac{w_g t_g}{\lambda + \rho_g}, \qquad
              \mathrm{between} \, \mathrm{between}^\top = \sum_g w_g (c_g - \mathrm{mean})(c_g - \mathrm{mean})^\top

    with :math:`t_g` the scales, or the noises.

    Attributes:
        mean: (k,).
        shrink: (k,).
        between: (k, few).
    """

    mean: Tensor
    shrink: Tensor
    between: Tensor


def mix(points: WeightedPoints, values: Tensor, along: Tensor, times: Tensor) -> MixtureMoments:
    """The moments for eigenvalues (k,), a vector (k,) along their eigenvectors, and the scales or noises (g,)."""
    w, ratios, times = (x.to(values) for x in (points.weights, points.ratios, times))
    inverse = 1 / (values[:, None] + ratios)  # (k, g)
    each = along[:, None] * inverse
    mean = each @ w
    left, sizes, _ = torch.linalg.svd((each - mean[:, None]) * w.sqrt(), full_matrices=False)
    real = sizes > torch.finfo(values.dtype).eps * max(each.shape) * sizes[:1]
    return MixtureMoments(mean, inverse @ (w * times), (left * sizes)[:, real])
