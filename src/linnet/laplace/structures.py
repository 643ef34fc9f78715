r"""Forms of the curvature ``G = J^T B J`` at the network, and the posteriors they give.

===========  ============================================================================  ==============
structure    what is kept                                                                  memory
===========  ============================================================================  ==============
full         G itself                                                                      p^2
function     the kernel of the training data; the same posterior as full                   (n c)^2
lowrank      the leading eigenpairs of G; the prior on the rest                            p r
kron         Kronecker factors of each layer (KFAC), exact blocks of norm layers           sum of d^2
ekfac        the same coordinates with the exact curvature along them                      sum of d^2 + p
diag         the diagonal of G                                                             p
subnetwork   G among the k parameters with the largest marginal variance, the rest fixed   k^2 + p
samples      draws from the posterior (`linnet.sampling`); all else comes from them        p k
===========  ============================================================================  ==============

A structure is fitted once, to the Jacobian and a root L of the curvature ``B = L L^T`` at unit noise; prior variances S
and noise come afterwards, as often as one likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from linnet._common import Checkpoint
from linnet.inference import Coupled, Dense, LogDet, Samples, Separable, eigenvalues_of, posterior_samples
from linnet.jacobian import (
    CurvatureSums,
    Decomposed,
    Jacobian,
    Kronecker,
    WeightedRows,
    constant_over,
    estimate_column_norms,
)
from linnet.linalg import (
    as_weight,
    check_conditioning,
    cholesky_,
    inner_matrix,
    low_rank,
    orthonormalize,
    weight_from_root,
)
from linnet.probability import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    Posterior,
    Prior,
    SubnetworkPosterior,
    TurnedPosterior,
    WeightPosterior,
)

Keep = Callable[..., Checkpoint | None]
"""From the name of a step, and a function to what else identifies the step, to its checkpoint."""


def no_checkpoint(name: str, more: Callable[[], Mapping[str, str]] = dict) -> None:
    """Keeps nothing."""


class CurvatureStructure(ABC):
    """A form of G, fitted.

    Attributes:
        name: As users write it.
    """

    name: str

    @abstractmethod
    def log_det(self, prior: Prior) -> LogDet:
        """``log det(I + S^(1/2) G S^(1/2) / noise)`` in the scales of a prior; one scale where it has none."""

    @abstractmethod
    def posterior(self, variance: Tensor, t: float) -> Posterior:
        """For prior variances (p,) and noise 1 / t; its mean displacement is zero."""

    def variance_by_factor(self, J: Jacobian, variance: Tensor, t: float) -> Callable[[float], Tensor]:
        """The variances of the outputs of J, (n, c), as a function of a factor of all prior variances (p,)."""
        kept = J.cached_if_fits()
        # The same as with the prior variances times the factor, and the kernel stays.
        return lambda factor: factor * self.posterior(variance, t * factor).variance(kept)

    @property
    def included(self) -> Tensor | None:
        """(k,), the parameters that are random; None for all."""
        return None

    def as_parts(self) -> tuple[str, dict[str, Any]]:
        """G as the name of a `linnet.probability.Precision` and its arguments."""
        raise NotImplementedError(f"structure={self.name!r} does not know its curvature as a matrix.")


@final
class FullCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L.
        G: (p, p), where it is known; None makes the pass.
    """

    name = "full"

    def __init__(self, J: Jacobian | None, root: Any, *, G: Tensor | None = None) -> None:
        if G is None:
            assert J is not None
            G = J.normal_matrix(weight_from_root(root))
        self.G = 0.5 * (G + G.T)

    def log_det(self, prior: Prior) -> LogDet:
        d = prior.base.sqrt()
        return _of_matrix(d[:, None] * self.G * d, prior)

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        return WeightPosterior(variance, torch.zeros_like(variance), factor=_precision(self.G, variance, t))

    def as_parts(self) -> tuple[str, dict[str, Any]]:
        return "DensePrecision", {"matrix": self.G}


@final
class KernelCurvature(CurvatureStructure):
    """See the module."""

    name = "function"

    def __init__(self, J: Jacobian, root: Any) -> None:
        self.J, self.root = J.cached(), as_weight(root)
        self._kernel: tuple[Tensor, Tensor] | None = None

    def log_det(self, prior: Prior) -> LogDet:
        if prior.group is not None:
            return Coupled([self._weighed(K) for K in kernels_of(self.J, prior)])
        K, factor = self._scaled(prior.base)
        return Separable(factor * eigenvalues_of(self._weighed(K)))

    def _scaled(self, variance: Tensor) -> tuple[Tensor, float]:
        """A kernel (n c, n c) and a factor whose product is ``J S J^T``: the last kernel, where it differs by one."""
        if self._kernel is not None:
            known, K = self._kernel
            factor = float(variance.max() / known.max())
            if torch.allclose(variance, factor * known, rtol=4 * torch.finfo(K.dtype).eps, atol=0.0):
                return K, factor
        self._kernel = variance, self.J.gram(scale=variance)
        return self._kernel[1], 1.0

    def _weighed(self, K: Tensor) -> Tensor:
        """``L^T K L``."""
        M = inner_matrix(K, self.root)
        M.diagonal().sub_(1)
        return M

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        K, factor = self._scaled(variance)
        M = inner_matrix(K, self.root, scale=t * factor)
        check_conditioning(M)
        C = cholesky_(M)
        return FunctionPosterior(self.J, variance, torch.zeros_like(variance), root=self.root * t**0.5, factor=C)


@final
class DiagonalCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L; None where the pass has been made.
        sums: What a pass over the data has found; None makes the pass.
        keep: Gives the checkpoint of a pass.
        values: (p,), the diagonal, where it is known; None for what J or the sums say.
    """

    name = "diag"

    def __init__(
        self,
        J: Jacobian | None,
        root: Any,
        *,
        sums: CurvatureSums | None = None,
        keep: Keep = no_checkpoint,
        values: Tensor | None = None,
    ) -> None:
        if values is not None:
            self.values = values
        elif sums is None or sums.squares is None:
            assert J is not None
            self.values = J.column_norms(weight_from_root(root), checkpoint=keep("factors"))
        else:
            self.values = sums.squares

    def log_det(self, prior: Prior) -> LogDet:
        return _of_diagonal(self.values, prior)

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        return DiagonalPosterior(torch.zeros_like(variance), variance / (1 + t * variance * self.values))

    def variance_by_factor(self, J: Jacobian, variance: Tensor, t: float) -> Callable[[float], Tensor]:
        return _diagonal_by_factor(J, self.values, variance, t)

    def as_parts(self) -> tuple[str, dict[str, Any]]:
        return "DiagonalPrecision", {"values": self.values}


@final
class KroneckerCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L; None where the pass for the factors has been made.
        corrected: EKFAC: the exact curvature along the eigenvectors of the factors.
        sums: What a pass over the data has found; None makes the pass.
        keep: Gives the checkpoint of a pass.
        factors: The factors, where they are known.

    Attributes:
        factors: The factors as they were decomposed; None for EKFAC.
    """

    def __init__(
        self,
        J: Jacobian | None,
        root: Any,
        *,
        corrected: bool = False,
        sums: CurvatureSums | None = None,
        keep: Keep = no_checkpoint,
        factors: Kronecker | Decomposed | None = None,
    ) -> None:
        self.name = "ekfac" if corrected else "kron"
        factors = sums.factors if factors is None and sums is not None else factors
        if factors is None:
            assert J is not None
            factors = J.kronecker(root, checkpoint=keep("factors"))
        if not isinstance(factors, Decomposed):
            traces, n = factors.traces, factors.n
            factors = Decomposed(*factors.decomposed(), traces, n)
        self.rotation, self.values = factors.rotation, factors.values
        self.factors = None if corrected else factors
        if corrected:
            assert J is not None
            assert root is not None
            # Eigenvectors may come out otherwise on another machine: sums along others would mean nothing.
            checkpoint = keep("squares", lambda: {"the coordinates of the factors": self.rotation.fingerprint()})
            self.values = J.rotated(self.rotation).column_norms(weight_from_root(root), checkpoint=checkpoint)

    def log_det(self, prior: Prior) -> LogDet:
        constant_over(self.rotation.turns, prior.base, self.rotation.layout)
        return _of_diagonal(self.values, prior)

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        constant_over(self.rotation.turns, variance, self.rotation.layout)
        return TurnedPosterior(
            torch.zeros_like(variance), variance / (1 + t * variance * self.values), rotation=self.rotation
        )

    def variance_by_factor(self, J: Jacobian, variance: Tensor, t: float) -> Callable[[float], Tensor]:
        return _diagonal_by_factor(J.rotated(self.rotation), self.values, variance, t)

    def as_parts(self) -> tuple[str, dict[str, Any]]:
        return "DiagonalPrecision", {"values": self.values, "rotation": self.rotation}


@final
class LowRankCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L.
        rank: Eigenpairs.
        keep: Gives the checkpoint of the decomposition.
        options: Of `linnet.linalg.svd.truncated.low_rank`.
    """

    name = "lowrank"

    def __init__(self, J: Jacobian, root: Any, *, rank: int, keep: Keep = no_checkpoint, **options: Any) -> None:
        kept = keep("basis")
        V = WeightedRows(J, root, checksums=None if kept is None else lambda: kept.identity)
        options["checkpoint"] = None if kept is None else kept.path
        try:
            found = low_rank(V, min(rank, *J.shape), **options)
        except ValueError:  # G has no such rank: all of it, then
            found = low_rank(V, 1 - 1e3 * J.eps, **options)
        self.basis, self.s = found.P, found.s  # G ~ P s^2 P^T

    def log_det(self, prior: Prior) -> LogDet:
        W = (prior.base.sqrt()[:, None] * self.basis).mul_(self.s)
        if prior.group is None:
            return Separable(eigenvalues_of(W.T @ W))
        each = [W[prior.group == i] for i in range(len(prior.scales))]
        return Coupled([part.T @ part for part in each])

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        basis, s = self.basis, (t * variance[0]).sqrt() * self.s
        if not bool((variance == variance[0]).all()):  # else the directions stay, and no copy of them is made
            Phi = ((t * variance).sqrt()[:, None] * basis).mul_(self.s)
            # And a small decomposition: the decomposition of Phi is slow where p is millions, on GPUs.
            Q = orthonormalize(Phi.clone())
            U, s, _ = torch.linalg.svd(Q.T @ Phi, full_matrices=False)
            del Phi
            basis = Q @ U
        C = torch.diag(1 / (1 + s.square()))
        return LowRankPosterior(variance, torch.zeros_like(variance), basis=basis, C=C)

    def as_parts(self) -> tuple[str, dict[str, Any]]:
        V = self.basis * self.s
        return "LowRankPrecision", {"values": V.new_zeros(len(V)), "V": V, "signs": torch.ones_like(self.s)}


@final
class SubnetworkCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L.
        size: k.
        variance: (p,), prior variances by which the parameters are chosen.
        t: One over the noise, likewise.
    """

    name = "subnetwork"

    def __init__(self, J: Jacobian, root: Any, *, size: int, variance: Tensor, t: float) -> None:
        weight = weight_from_root(root)
        marginal = variance / (1 + t * variance * J.column_norms(weight))
        self.index = marginal.topk(min(size, len(variance))).indices.sort().values
        eye = torch.eye(len(self.index), dtype=J.dtype, device=J.device)
        G = J.columns(self.index).normal(eye, weight)
        self.G = 0.5 * (G + G.T)

    @property
    def included(self) -> Tensor | None:
        return self.index

    def log_det(self, prior: Prior) -> LogDet:
        d = prior.base[self.index].sqrt()
        group = None if prior.group is None else prior.group[self.index]
        return _of_matrix(d[:, None] * self.G * d, Prior(prior.name, prior.base[self.index], prior.scales, group))

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        part = variance[self.index]
        inner = WeightPosterior(part, torch.zeros_like(part), factor=_precision(self.G, part, t))
        return SubnetworkPosterior(torch.zeros_like(variance), index=self.index, W=inner.W)


@final
class SampledCurvature(CurvatureStructure):
    """See the module.

    Args:
        J: Of the training data.
        root: L.
        k: Draws.
        probes: Of the log determinant.
        keep: Gives the checkpoint of each solve. A search that starts again makes the same solves in the same order.
        options: Of `linnet.sampling.posterior_samples`.
    """

    name = "samples"

    def __init__(
        self, J: Jacobian, root: Any, *, k: int, probes: int = 16, keep: Keep = no_checkpoint, **options: Any
    ) -> None:
        self.J, self.root, self.k, self.probes, self.options = J, root, k, probes, options
        self.keep, self._solves = keep, 0
        self._last: tuple[float, Samples] | None = None

    def samples(self, variance: Tensor, t: float) -> Samples:
        """Draws for prior variances (p,) and noise 1 / t, started from the last ones."""
        if self._last is not None and self._last[0] == t and torch.equal(self._last[1].variance, variance):
            return self._last[1]
        start = None if self._last is None else self._last[1]
        found = posterior_samples(
            self.J,
            variance,
            self.root * t**0.5,
            self.k,
            start=start,
            probes=self.probes,
            checkpoint=self.keep(f"solve-{self._solves}"),
            **self.options,
        )
        self._last, self._solves = (t, found), self._solves + 1
        return found

    def log_det(self, prior: Prior) -> LogDet:
        return _SampledLogDet(self, prior)

    def posterior(self, variance: Tensor, t: float) -> Posterior:
        return self.samples(variance, t).posterior()


@final
class _SampledLogDet(LogDet):
    """Estimates, all from the same draws: the seed is fixed, so that it is a smooth function."""

    cost = "solve"

    def __init__(self, structure: SampledCurvature, prior: Prior) -> None:
        self.structure, self.prior, self.count = structure, prior, max(1, len(prior.scales))

    def __call__(self, scales: Sequence[float], t: float) -> tuple[float, list[float]]:
        variance = self.prior.variance(list(scales)) if self.prior.scales else self.prior.base * scales[0]
        found = self.structure.samples(variance, t)
        by_layer = found.effective_dimensions(self.structure.J.lin.layout)
        assert found.log_det is not None
        if self.count == 1:
            return found.log_det, [sum(value for value, _ in by_layer.values())]
        return found.log_det, [by_layer[name][0] for name in self.prior.scales]

    def traces(self) -> list[float]:
        values = estimate_column_norms(self.structure.J, self.structure.root)
        return _of_diagonal(values, self.prior).traces()


# Matrices.


def kernels_of(J: Jacobian, prior: Prior) -> list[Tensor]:
    """The part of ``J S J^T`` of each scale of a prior, at unit scales, (n c, n c)."""
    if prior.group is None:
        return [J.gram(scale=prior.base)]
    if bool((prior.base == 1).all()) and prior.scales == tuple(J.lin.layout.layers):
        grams = J.layer_grams()
        return [grams[name] for name in prior.scales]
    return [J.gram(scale=prior.base * (prior.group == i)) for i in range(len(prior.scales))]


OCTAVES, STEPS = 64, 6
"""Octaves below the largest curvature that are told apart, and nodes in each: the memory of a table for each output
against an error of 4e-6 in a variance."""


def table_bytes(J: Jacobian) -> int:
    """Bytes of the table of `_diagonal_by_factor`."""
    return J.shape[0] * (OCTAVES * STEPS + 2) * J.dtype.itemsize


def _diagonal_by_factor(J: Jacobian, values: Tensor, variance: Tensor, t: float) -> Callable[[float], Tensor]:
    r"""From one pass the variances :math:`\sum_j R_{ij}^2 s S_j / (1 + s t S_j \lambda_j)` as a function of a factor s.

    The sum over j is the sum over nodes in :math:`\log S_j \lambda_j`, between which each term is a cubic polynomial:
    a table with a few hundred numbers for each output answers for every s.

    Args:
        J: R, in the coordinates of the curvature.
        values: The curvature lambda, (p,).
        variance: S, (p,).
        t: One over the noise.
    """
    u = (variance * values).double().clamp_min(0)
    top = u.max().clamp_min(torch.finfo(torch.float64).tiny)
    last = OCTAVES * STEPS
    place = STEPS * (top / u).log2()  # no curvature is a place infinitely far down
    far, low = place > last, place.clamp(max=last).floor().long().clamp(1, last - 2)
    r = (place - low).masked_fill(far, 0.0)
    # From each column its parts at the four nodes around it; the last node has no curvature.
    cubic = [
        (-1, -r * (r - 1) * (r - 2) / 6),
        (0, (r + 1) * (r - 1) * (r - 2) / 2),
        (1, -(r + 1) * r * (r - 2) / 2),
        (2, (r + 1) * r * (r - 1) / 6),
    ]
    low = low.masked_fill(far, last + 1)
    parts = [(variance * share.to(variance.dtype), (low + i).clamp(max=last + 1)) for i, share in cubic]
    W = J.in_row_dtype().grouped_squares(parts, last + 2).to(J.dtype)
    nodes = top * 2.0 ** (-torch.arange(last + 2, dtype=torch.float64, device=u.device) / STEPS)
    nodes[-1] = 0.0
    return lambda factor: (W @ (factor / (1 + t * factor * nodes)).to(W)).view(J.n, J.c)


def _precision(G: Tensor, variance: Tensor, t: float) -> Tensor:
    """The lower Cholesky factor of ``I + t S^(1/2) G S^(1/2)``."""
    d = (t * variance).sqrt()
    H = d[:, None] * G * d
    H.diagonal().add_(1)
    check_conditioning(H)
    return cholesky_(H)


def _of_matrix(G: Tensor, prior: Prior) -> LogDet:
    if prior.group is None:
        return Separable(eigenvalues_of(G))
    return Dense(G, prior.group, len(prior.scales))


def _of_diagonal(values: Tensor, prior: Prior) -> LogDet:
    return Separable(values * prior.base, prior.group, max(1, len(prior.scales)))
