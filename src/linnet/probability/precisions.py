r"""Precisions of Gaussians over all parameters, and curvatures, in the forms in which they are multiplied and divided.

A product of Gaussians adds precisions: :math:`\prod_i N(\mu_i, P_i^{-1}) \propto N(\mu, P^{-1})` with
:math:`P = \sum_i P_i` and :math:`P \mu = \sum_i P_i \mu_i`. A quotient subtracts them.

====================  ==============================================  =======================================
form                  P                                               a sum of two
====================  ==============================================  =======================================
DensePrecision        as it is                                        exact
DiagonalPrecision     diagonal, perhaps in rotated coordinates        exact in equal coordinates; else see
                                                                      `linnet.probability.common_coordinates`
LowRankPrecision      ``diag(d) + V diag(signs) V^T``                 exact; the ranks add up
====================  ==============================================  =======================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from linnet._common import check_fits
from linnet.jacobian import Jacobian, Rotation
from linnet.linalg import Stack, cholesky_solve, log_det_from, solve_lower, weight_from_root
from linnet.probability.common_coordinates import join_coordinates, project_diagonal
from linnet.probability.posteriors import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    Posterior,
    TurnedPosterior,
    WeightPosterior,
)
from linnet.probability.priors import Prior

if TYPE_CHECKING:
    from linnet.network import Layout


class Precision(ABC):
    """A symmetric matrix P, (p, p), positive semi-definite: the precision of a Gaussian, or a curvature.

    Attributes:
        p: Parameters.
        parts: Names of the tensors of a file, which are the arguments of the constructor.
    """

    p: int
    parts: ClassVar[tuple[str, ...]]

    @abstractmethod
    def multiply(self, v: Tensor) -> Tensor:
        """``P v``, (p,)."""

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor:
        """``P^-1 v``, (p,)."""

    @abstractmethod
    def quadratic(self, v: Tensor) -> Tensor:
        """``v^T P v`` for v (p,), differentiable in v."""

    @abstractmethod
    def log_det(self) -> float:
        """``log det P``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """P itself, (p, p)."""

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonal of ``P^-1``, (p,)."""

    @abstractmethod
    def relative_eigenvalues(self, G: Precision) -> Tensor:
        """The eigenvalues of ``P^-1 G`` that may not be zero, for a curvature G of the same form."""

    @abstractmethod
    def posterior(self, delta: Tensor) -> Posterior:
        """The Gaussian over the displacement with this precision and the mean delta (p,)."""

    @abstractmethod
    def to(self, like: Tensor) -> Precision:
        """P on the device and in the dtype of a tensor."""

    @abstractmethod
    def check_definite(self) -> None:
        """Raise unless P is positive definite."""

    def tensors(self) -> dict[str, Tensor]:
        """P as named tensors; `precision_from` is the inverse."""
        return {part: getattr(self, part) for part in self.parts}


def _not_definite(least: float) -> ArithmeticError:
    return ArithmeticError(
        f"A sum of precisions is not positive definite: its smallest eigenvalue is {least:.3g}. More was divided out "
        "than was there. Structures 'full', 'diag' and 'lowrank' are divided exactly."
    )


@final
class DiagonalPrecision(Precision):
    """``Q diag(values) Q^T``.

    Args:
        values: (p,).
        rotation: Q; None for the identity.
    """

    parts = ("values",)

    def __init__(self, values: Tensor, rotation: Rotation | None = None) -> None:
        self.values, self.rotation, self.p = values, rotation, len(values)

    def _turn(self, v: Tensor) -> Tensor:
        return v if self.rotation is None else self.rotation.rows(v[None])[0]

    def _turn_back(self, v: Tensor) -> Tensor:
        return v if self.rotation is None else self.rotation.back(v[:, None])[:, 0]

    def multiply(self, v: Tensor) -> Tensor:
        return self._turn_back(self.values * self._turn(v))

    def solve(self, v: Tensor) -> Tensor:
        return self._turn_back(self._turn(v) / self.values)

    def quadratic(self, v: Tensor) -> Tensor:
        return (self.values * self._turn(v).square()).sum()

    def log_det(self) -> float:
        return float(self.values.double().log().sum())

    def dense(self) -> Tensor:
        if self.rotation is None:
            return self.values.diag()
        Q = self.rotation.back(torch.eye(self.p, dtype=self.values.dtype, device=self.values.device))
        return (Q * self.values) @ Q.T

    def along(self, rotation: Rotation | None) -> DiagonalPrecision:
        """The diagonal of P in other coordinates."""
        return DiagonalPrecision(project_diagonal(self.values, self.rotation, rotation), rotation)

    def variances(self) -> Tensor:
        self.check_definite()
        return project_diagonal(1 / self.values, self.rotation, None)

    def check_definite(self) -> None:
        if not bool((self.values > 0).all()):
            raise _not_definite(float(self.values.min()))

    def to(self, like: Tensor) -> DiagonalPrecision:
        rotation = self.rotation
        if rotation is not None and (self.values.dtype, self.values.device) != (like.dtype, like.device):
            turns = {name: t.to(like) for name, t in rotation.tensors().items()}
            rotation = Rotation.from_tensors(turns, rotation.layout)
        return DiagonalPrecision(self.values.to(like), rotation)

    def relative_eigenvalues(self, G: Precision) -> Tensor:
        assert isinstance(G, DiagonalPrecision) and G.rotation is self.rotation
        return G.values / self.values

    def posterior(self, delta: Tensor) -> Posterior:
        self.check_definite()
        if self.rotation is None:
            return DiagonalPosterior(delta, 1 / self.values)
        return TurnedPosterior(delta, 1 / self.values, rotation=self.rotation)

    def tensors(self) -> dict[str, Tensor]:
        turns = {} if self.rotation is None else self.rotation.tensors()
        return super().tensors() | {f"rotation.{key}": value for key, value in turns.items()}


@final
class DensePrecision(Precision):
    """P as it is.

    Args:
        matrix: (p, p).
    """

    parts = ("matrix",)

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.p = matrix, len(matrix)

    @cached_property
    def factor(self) -> Tensor:
        """The lower Cholesky factor."""
        C, info = torch.linalg.cholesky_ex(self.matrix)
        if int(info):
            raise _not_definite(float(torch.linalg.eigvalsh(self.matrix)[0]))
        return C

    def multiply(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def solve(self, v: Tensor) -> Tensor:
        return cholesky_solve(self.factor, v[:, None])[:, 0]

    def quadratic(self, v: Tensor) -> Tensor:
        return v @ (self.matrix @ v)

    def log_det(self) -> float:
        return float(log_det_from(self.factor))

    def dense(self) -> Tensor:
        return self.matrix

    def variances(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal()

    def relative_eigenvalues(self, G: Precision) -> Tensor:
        half = solve_lower(self.factor, G.dense())
        M = solve_lower(self.factor, half.T.contiguous())
        return torch.linalg.eigvalsh(0.5 * (M + M.T)).clamp_min(0)

    def check_definite(self) -> None:
        _ = self.factor

    def to(self, like: Tensor) -> DensePrecision:
        return DensePrecision(self.matrix.to(like))

    def posterior(self, delta: Tensor) -> Posterior:
        # H = P in units of one: the form of `WeightPosterior` with a prior variance of one.
        return WeightPosterior(torch.ones_like(delta), delta, factor=self.factor)


@final
class LowRankPrecision(Precision):
    """``diag(values) + V diag(signs) V^T``.

    Args:
        values: (p,).
        V: (p, r).
        signs: (r,), each 1 or -1.
    """

    parts = ("values", "V", "signs")

    def __init__(self, values: Tensor, V: Tensor, signs: Tensor) -> None:
        self.values, self.V, self.signs, self.p = values, V, signs, len(values)

    @cached_property
    def _core(self) -> tuple[Tensor, Tensor]:
        """An orthonormal basis Q and C, ``P^-1 = S^(1/2) (I - Q Q^T + Q C Q^T) S^(1/2)`` with S = 1 / values."""
        if not bool((self.values > 0).all()):
            raise _not_definite(float(self.values.min()))
        Q, R = torch.linalg.qr(self.values.rsqrt()[:, None] * self.V)
        M = (R * self.signs) @ R.T
        M.diagonal().add_(1)
        factor, info = torch.linalg.cholesky_ex(0.5 * (M + M.T))
        if int(info):
            raise _not_definite(float(torch.linalg.eigvalsh(M)[0]))
        return Q, torch.cholesky_inverse(factor)

    def multiply(self, v: Tensor) -> Tensor:
        return self.values * v + self.V @ (self.signs * (self.V.T @ v))

    def solve(self, v: Tensor) -> Tensor:
        Q, C = self._core
        d = self.values.rsqrt()
        along = Q.T @ (d * v)
        return d * (d * v + Q @ (C @ along - along))

    def quadratic(self, v: Tensor) -> Tensor:
        return (self.values * v.square()).sum() + (self.signs * (self.V.T @ v).square()).sum()

    def log_det(self) -> float:
        return float(self.values.double().log().sum()) - float(torch.linalg.slogdet(self._core[1])[1])

    def dense(self) -> Tensor:
        return self.values.diag() + (self.V * self.signs) @ self.V.T

    def variances(self) -> Tensor:
        Q, C = self._core
        return (1 + ((Q @ C - Q) * Q).sum(1)) / self.values

    def relative_eigenvalues(self, G: Precision) -> Tensor:
        assert isinstance(G, LowRankPrecision) and not bool(G.values.any())
        Q, C = self._core
        W = self.values.rsqrt()[:, None] * G.V
        along = Q.T @ W
        M = W.T @ W + along.T @ (C @ along - along)
        return torch.linalg.eigvalsh(0.5 * (M + M.T)).clamp_min(0)

    def check_definite(self) -> None:
        _ = self._core

    def to(self, like: Tensor) -> LowRankPrecision:
        return LowRankPrecision(self.values.to(like), self.V.to(like), self.signs.to(like))

    def posterior(self, delta: Tensor) -> Posterior:
        Q, C = self._core
        return LowRankPosterior(1 / self.values, delta, basis=Q, C=C)


PRECISIONS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (DiagonalPrecision, DensePrecision, LowRankPrecision)
}
"""Precisions by the names that files have for them."""


def precision_from(kind: str, tensors: Mapping[str, Tensor], *, layout: Layout) -> Precision:
    """The precision that `Precision.tensors` was asked of."""
    parts: dict[str, Any] = {part: tensors[part] for part in PRECISIONS[kind].parts}
    prefix = "rotation."
    turns = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    if turns:
        parts["rotation"] = Rotation.from_tensors(turns, layout)
    found: Precision = PRECISIONS[kind](**parts)
    return found


def precision_of(posterior: Posterior, *, memory: float | str = "auto") -> Precision:
    """The precision of a posterior; raises for a posterior that does not know its own.

    Args:
        posterior: Over the displacement.
        memory: Bytes that a dense matrix may take, or "auto".
    """
    prior = getattr(posterior, "prior_variance", None)
    prior = getattr(posterior, "variances", None) if prior is None else prior
    if prior is not None and not bool((prior > 0).all()):
        raise ValueError(
            f"{int((prior <= 0).sum()):,} parameters have a prior variance of zero: their precision is infinite. Leave "
            "them out with params=."
        )
    if isinstance(posterior, DiagonalPosterior | TurnedPosterior):
        return DiagonalPrecision(1 / posterior.variances, posterior.rotation)
    if isinstance(posterior, WeightPosterior):
        d = posterior.prior_variance.rsqrt()
        C = d[:, None] * posterior.factor.tril()
        return DensePrecision(C @ C.T)
    if isinstance(posterior, LowRankPosterior):
        values, U = torch.linalg.eigh(posterior.C)
        left = 1 / values - 1
        V = posterior.prior_variance.rsqrt()[:, None] * (posterior.basis @ (U * left.abs().sqrt()))
        return LowRankPrecision(1 / posterior.prior_variance, V, torch.where(left < 0, -1.0, 1.0).to(V))
    if isinstance(posterior, FunctionPosterior):
        J = posterior.J
        check_fits(
            4 * J.shape[1] ** 2 * J.dtype.itemsize,
            memory,
            J.device,
            what=f"The precision of {J.shape[1]:,} parameters, from a posterior in function space",
            instead="Use another structure, such as 'kron', 'diag' or 'lowrank', or fewer parameters (params=)",
        )
        weight, start = weight_from_root(posterior.root), 0
        G = posterior.prior_variance.new_zeros(J.shape[1], J.shape[1])
        for part in J.parts if isinstance(J, Stack) else [J]:
            assert isinstance(part, Jacobian)
            size = part.shape[0] // (1 if weight.ndim == 1 else weight.shape[-1])
            G += part.normal_matrix(weight[start : start + size])
            start += size
        G = 0.5 * (G + G.T)
        G.diagonal().add_(1 / posterior.prior_variance)
        return DensePrecision(G)
    raise NotImplementedError(
        f"{type(posterior).__name__} does not know its precision, so that it is neither a prior, nor a penalty, nor "
        "merged. Laplace: fit with structure='full', 'diag', 'kron', 'ekfac' or 'lowrank'. TangentRegressor: fit with "
        "solver='weight' and average=False. TangentClassifier: fit with solver='weight' and inference='laplace'."
    )


def add_precisions(terms: Sequence[tuple[float, Precision]]) -> Precision:
    """``sum_i w_i P_i``; see the module for what is exact."""
    if any(isinstance(P, DensePrecision) for _, P in terms):
        return DensePrecision(sum_up([w * P.dense() for w, P in terms]))
    low = [(w, P) for w, P in terms if isinstance(P, LowRankPrecision)]
    diagonal = [(w, P) for w, P in terms if isinstance(P, DiagonalPrecision)]
    if low:
        if any(P.rotation is not None for _, P in diagonal):
            raise ValueError(
                "A low rank is not added to Kronecker factors. Use one structure for all, or structure='full'."
            )
        values = sum_up([w * P.values for w, P in diagonal] + [w * P.values for w, P in low])
        V = torch.cat([abs(w) ** 0.5 * P.V for w, P in low], 1)
        signs = torch.cat([P.signs if w > 0 else -P.signs for w, P in low])
        return LowRankPrecision(values, V, signs)
    rotation = None
    if any(P.rotation is not None for _, P in diagonal):
        # A term that is divided out has no directions of its own.
        rotation = join_coordinates([(P.rotation, w * P.values) for w, P in diagonal if w > 0])
    return DiagonalPrecision(sum_up([w * P.along(rotation).values for w, P in diagonal]), rotation)


def sum_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor or more."""
    found = tensors[0].clone()
    for tensor in tensors[1:]:
        found += tensor
    return found


@dataclass(frozen=True, kw_only=True)
class EarlierPosterior(Prior):
    """An earlier posterior as a prior: ``theta ~ N(mean, P^-1)``.

    Attributes:
        base: (p,), the marginal variances.
        mean: (p,).
        precision: P.
    """

    name: str = "earlier"
    mean: Tensor
    precision: Precision
    layout: Layout

    @classmethod
    def of(cls, mean: Tensor, precision: Precision, layout: Layout) -> EarlierPosterior:
        """The prior for a mean and a precision over the parameters of a layout."""
        return cls(base=precision.variances(), mean=mean, precision=precision, layout=layout)
