r"""The log determinant of a posterior precision and its effective dimensions, as functions of prior scales.

.. math:: \log\det\left(I + t\, S^{1/2} G S^{1/2}\right), \qquad
          \gamma_l = \mathrm{tr}\left[I - (I + t\, S^{1/2} G S^{1/2})^{-1}\right]_{ll}, \qquad
          \partial_{\log s_l} \log\det = \gamma_l , \quad \partial_{\log t} \log\det = \sum_l \gamma_l

with G the curvature ``J^T B J`` or an approximation of it, ``S = s_l * base`` on the parameters of group l, and t one
over the noise. :math:`\gamma_l` is MacKay's number of parameters that the data determine, ``p_l - a_l tr[H^-1]_ll``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from linnet.linalg import log_det_from

Cost = Literal["little", "decomposition", "solve"]


class LogDet(ABC):
    """A log determinant in one or more prior scales.

    Attributes:
        count: Scales.
        cost: Of an evaluation: nothing to speak of, a dense decomposition, or a solve over the data.
    """

    count: int
    cost: Cost = "decomposition"

    @abstractmethod
    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        """The value, and the effective dimension of each group."""

    @abstractmethod
    def traces(self) -> list[float]:
        """The trace of ``S^(1/2) G S^(1/2)`` of each group, at unit scales."""


@final
class Separable(LogDet):
    """Of a diagonal matrix: eigenvalues, each of which belongs to one group.

    Args:
        values: (m,), eigenvalues at unit scale.
        group: (m,), the number of the scale; None for one.
        count: Scales.

    >>> log_det = Separable(torch.tensor([1.0, 3.0]).double())
    >>> [round(x, 4) for x in (log_det([1.0], 1.0)[0], *log_det([1.0], 1.0)[1])]
    [2.0794, 1.25]
    """

    cost = "little"

    def __init__(self, values: Tensor, group: Tensor | None = None, count: int = 1) -> None:
        self.values, self.group, self.count = values.double(), group, count

    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        s = self.values.new_tensor(list(scales)) * t
        x = self.values * (s[0] if self.group is None else s[self.group])
        return float(x.log1p().sum()), self._sums(x / (1 + x))

    def traces(self) -> list[float]:
        return self._sums(self.values)

    def _sums(self, x: Tensor) -> list[float]:
        if self.group is None:
            return [float(x.sum())]
        return x.new_zeros(self.count).index_add_(0, self.group, x).tolist()


@final
class Coupled(LogDet):
    r"""Of sums ``I + t sum_l s_l K_l`` with one kernel for each group; function space, or the range of a low rank.

    Args:
        kernels: Each (m, m), positive semi-definite.
    """

    def __init__(self, kernels: Sequence[Tensor]) -> None:
        self.kernels, self.count = list(kernels), len(kernels)

    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        M = torch.zeros_like(self.kernels[0])
        for s, K in zip(scales, self.kernels, strict=True):
            M.add_(K, alpha=s * t)
        M.diagonal().add_(1)
        C = _factor(M)
        inverse = torch.cholesky_inverse(C)
        gamma = [s * t * float((inverse * K).sum()) for s, K in zip(scales, self.kernels, strict=True)]
        return float(log_det_from(C)), gamma

    def traces(self) -> list[float]:
        return [float(K.diagonal().sum()) for K in self.kernels]


@final
class Dense(LogDet):
    """Of a dense G in weight space, with one group for each parameter.

    Args:
        G: (p, p), at unit scales.
        group: (p,).
        count: Scales.
    """

    def __init__(self, G: Tensor, group: Tensor, count: int) -> None:
        self.G, self.group, self.count = G, group, count

    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        root = (self.G.new_tensor(list(scales)) * t).sqrt()[self.group]
        H = root[:, None] * self.G * root
        H.diagonal().add_(1)
        C = _factor(H)
        shrunk = 1 - torch.cholesky_inverse(C).diagonal()
        return float(log_det_from(C)), self._sums(shrunk)

    def traces(self) -> list[float]:
        return self._sums(self.G.diagonal())

    def _sums(self, x: Tensor) -> list[float]:
        return x.new_zeros(self.count).index_add_(0, self.group, x).tolist()


def eigenvalues_of(K: Tensor) -> Tensor:
    """Of a positive semi-definite matrix, those that rounding has left below zero being zero."""
    return torch.linalg.eigvalsh(K).clamp_min(0)


def _factor(M: Tensor) -> Tensor:
    C, info = torch.linalg.cholesky_ex(M)
    if int(info) or not math.isfinite(float(C.diagonal().sum())):
        raise ArithmeticError(
            "A posterior precision is not positive definite in its precision, so the prior variances are too large for "
            "it. Use dtype='float64', or smaller ones."
        )
    return C
