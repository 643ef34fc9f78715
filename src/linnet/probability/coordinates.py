"""Posteriors over parameters in other coordinates than their own: rotated, or only some of them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.kronecker import Rotation
from linnet.probability.posteriors import FeaturePosterior, Posterior


@final
class TurnedPosterior(Posterior):
    """Independent parameters in rotated coordinates: a posterior with Kronecker factors.

    Args:
        delta: (p,).
        variances: (p,), along the rotated coordinates.
        rotation: From the parameters' coordinates to these.
    """

    def __init__(self, delta: Tensor, variances: Tensor, *, rotation: Rotation) -> None:
        self.delta, self.variances, self.rotation = delta, variances, rotation

    def blocks(self, J: Jacobian) -> Tensor:
        return J.rotated(self.rotation).gram_blocks(scale=self.variances)

    def covariance(self, J: Jacobian) -> Tensor:
        return J.rotated(self.rotation).gram(scale=self.variances)

    def cross(self, J: Jacobian, other: Jacobian) -> Tensor:
        return J.rotated(self.rotation).gram(other.rotated(self.rotation), scale=self.variances)

    def variance(self, J: Jacobian) -> Tensor:
        return J.rotated(self.rotation).gram_diag(scale=self.variances).view(J.n, J.c)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        z = self._normal(len(self.delta), k, generator)
        return self.delta[:, None] + self.rotation.back(self.variances.sqrt()[:, None] * z)


@final
class SubnetworkPosterior(FeaturePosterior):
    """A posterior over some parameters, the others being known.

    Args:
        delta: (p,).
        index: (k,), the parameters that are random.
        W: (k, k), a root of their covariance.
    """

    def __init__(self, delta: Tensor, *, index: Tensor, W: Tensor) -> None:
        self.delta, self.index, self.W = delta, index, W

    def _features(self, J: Jacobian) -> Tensor:
        return J.columns(self.index) @ self.W

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        z = self.W @ self._normal(len(self.index), k, generator)
        return self.delta[:, None].repeat(1, k).index_add_(0, self.index, z)
