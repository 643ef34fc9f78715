r"""Gaussian posteriors over the displacement ``theta - theta0``, and the moments of f that they give at new inputs.

Every posterior has a mean ``delta`` (p,), and its covariance of f at the inputs of a Jacobian J has one form:

.. math:: E[f] - m = J \delta, \qquad \mathrm{cov}[f] = R D R^\top + T \, \mathrm{diag}(s) \, T^\top

R are the rows of J, perhaps rotated, D is diagonal, T are a few features of each row, and s are signs or weights:

====================  =================  ==================================  =======
posterior             D                  T                                   s
====================  =================  ==================================  =======
PointPosterior        0                  none                                0
DiagonalPosterior     variances          none                                0
TurnedPosterior       variances          none; R is rotated                  0
WeightPosterior       0                  ``J S^(1/2) H^(-1/2)``              1
SubnetworkPosterior   0                  ``J[:, index] W``                   1
SamplePosterior       0                  ``J samples``                       1 / k
FunctionPosterior     S                  ``K_*X L M^(-1/2)``                 -1
KernelPosterior       S                  ``K_*X R``                          +-1
LowRankPosterior      S                  ``J S^(1/2) P |C - I|^(1/2)``       +-1
====================  =================  ==================================  =======

Letters: S the prior variances, ``Phi = J S^(1/2)``, ``B = L L^T`` the curvature of the likelihood (``I / noise`` for
Gaussian noise), ``M = I + L^T K L``, ``H = I + Phi^T B Phi``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from linnet._common import find_dense_budget
from linnet.jacobian import Rotation, autodiff_wins
from linnet.linalg import (
    Stack,
    check_conditioning,
    cholesky_,
    cholesky_solve,
    inner_matrix,
    remove_rows,
    solve_lower,
    solve_upper,
    subtract_outer_products,
    weigh,
)
from linnet.probability.expectations import FactoredCovariance

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian
    from linnet.linalg import LinearOperator
    from linnet.network import Layout

Spread = Literal["none", "variance", "blocks", "covariance", "factor"]
"""Second moments of f: none, the variance of each output (n, c), the covariance of the outputs of each example
(n, c, c), the joint covariance of all outputs (n c, n c), or a factor (n, c, k) of the covariance of the outputs of
each example, which samples have."""


class PredictiveMoments(NamedTuple):
    """Moments of the outputs at new inputs.

    Attributes:
        f: (n, c), the outputs of the network itself.
        shift: (n, c), ``J delta``: the displacement's part in the mean.
        spread: The second moments that were asked for, a tensor; a `FactoredCovariance` for "factor", None for "none".
    """

    f: Tensor
    shift: Tensor
    spread: Any


class Posterior(ABC):
    """A Gaussian over the displacement; see the module for its form.

    Attributes:
        delta: (p,), the mean.
        D: (p,), or None for zero.
        rotation: Coordinates of D; None for the parameters' own.
        weights: s, one number, or (k,).
        directions: (p, k) with ``T = J directions``, where T is such a product; else None.
        has_features: Whether T has columns.
        factored: Whether an exact solve made it, which more observations extend.
        needs_data: Whether it asks the training data's Jacobian, J, which files do not hold.
        known_from_samples: Whether covariances are estimates from samples.
        is_point: Whether there is a mean alone.
        parts: Names of the tensors of a file, which are the arguments of the constructor.
    """

    delta: Tensor
    D: Tensor | None = None
    rotation: Rotation | None = None
    weights: float | Tensor = 1.0
    directions: Tensor | None = None
    has_features: ClassVar[bool] = True
    factored: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False
    known_from_samples: ClassVar[bool] = False
    is_point: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]]

    def features(self, J: Any) -> Tensor:
        """T, (n c, k); here without columns."""
        return torch.zeros(J.shape[0], 0, dtype=J.dtype, device=J.device)

    @abstractmethod
    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        """k samples of the displacement, (p, k): one product with J makes them joint samples at any inputs."""

    @abstractmethod
    def multiply(self, V: Tensor) -> Tensor:
        """The covariance of the displacement times V, (p, k)."""

    def with_prior(self, old: Tensor, new: Tensor) -> Posterior:
        """The posterior of the same curvature with other prior variances.

        Args:
            old: The prior variances of this posterior, (p,).
            new: The others, (p,).
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it would be with another prior.")

    # Moments at the inputs of J, which is a Jacobian or rows with a graph to the inputs.

    def predict(self, J: Jacobian, spread: Spread = "none") -> PredictiveMoments:
        """Mean and second moments at the inputs of J from one recorded forward pass of each chunk."""
        if spread == "none":
            f, shift = J.outputs_and_product(self.delta)
            return PredictiveMoments(f, shift.view(J.n, J.c), None)
        if spread == "covariance":
            return self._ask(J.cached_if_fits(), self.covariance)
        V = self.directions
        if V is not None and (spread == "factor" or autodiff_wins("matmul", k=1 + V.shape[1], c=J.c)):
            return self._predict_by_directions(J, torch.cat([self.delta[:, None], V], 1), spread)
        if spread == "factor":
            raise ValueError(f"{type(self).__name__} has no covariance of a small rank; take samples of it.")
        answer = self._variance if spread == "variance" else self._blocks
        found = J.map_parts(lambda part: self._ask(part, answer), self._part_size(J))
        return PredictiveMoments(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _predict_by_directions(self, J: Jacobian, V: Tensor, spread: Spread) -> PredictiveMoments:
        """Moments from ``J V``, for V = [delta, directions] (p, 1 + k)."""
        if spread == "variance":
            f, both = J.outputs_and_product(V, fold=self._mean_and_variance)
            shift, second = (part.reshape(J.n, J.c) for part in both.T)
            return PredictiveMoments(f, shift, second)
        f, product = J.outputs_and_product(V)
        T = product[:, 1:].reshape(J.n, J.c, -1)
        second = FactoredCovariance(T * self.weights**0.5) if spread == "factor" else (self.weights * T) @ T.mT
        return PredictiveMoments(f, product[:, 0].reshape(J.n, J.c), second)

    def _mean_and_variance(self, rows: Tensor) -> Tensor:
        """The shift and the variance of each row (r, 2), of rows of ``J [delta, directions]``."""
        return torch.stack([rows[:, 0], (self.weights * rows[:, 1:].square()).sum(1)], 1)

    def _ask(self, J: Jacobian, answer: Callable[[Any], Tensor]) -> PredictiveMoments:
        f = J.outputs()
        return PredictiveMoments(f, self.shift(J) if bool(self.delta.any()) else torch.zeros_like(f), answer(J))

    def shift(self, J: Any) -> Tensor:
        """``J delta``, (n, c): the displacement's part in the mean."""
        return (J @ self.delta).view(J.n, J.c)

    def variance(self, J: Any) -> Tensor:
        """The variance of each output, (n, c)."""
        return torch.cat(J.map_parts(self._variance, self._part_size(J)))

    def blocks(self, J: Any) -> Tensor:
        """The covariance of the outputs of each example, (n, c, c)."""
        return torch.cat(J.map_parts(self._blocks, self._part_size(J)))

    def covariance(self, J: Any) -> Tensor:
        """The joint covariance of all outputs of all examples, (n c, n c)."""
        T = self.features(J)
        out = (self.weights * T) @ T.T
        return out if self.D is None else out + self._rows(J).gram(scale=self.D)

    def cross(self, J: Any, other: Any) -> Tensor:
        """The covariance of the outputs of some examples with those of others, (n c, m c)."""
        out = (self.weights * self.features(J)) @ self.features(other).T
        return out if self.D is None else out + self._rows(J).gram(self._rows(other), scale=self.D)

    def _variance(self, J: Any) -> Tensor:
        out = (self.weights * self.features(J).square()).sum(1)
        if self.D is not None:
            rows = self._rows_of_squares(J)
            prior = rows.gram_diag(scale=self.D.to(rows.dtype)).to(J.dtype)
            out = nonnegative(prior + out, prior)
        return out.view(J.n, J.c)

    def _blocks(self, J: Any) -> Tensor:
        T = self.features(J).reshape(J.n, J.c, -1)
        out = (self.weights * T) @ T.mT
        if self.D is None:
            return out
        rows = self._rows_of_squares(J)
        return out + rows.gram_blocks(scale=self.D.to(rows.dtype)).to(J.dtype)

    def _rows(self, J: Any) -> Any:
        """R."""
        return J if self.rotation is None else J.rotated(self.rotation)

    def _rows_of_squares(self, J: Any) -> Any:
        """R for its squares. Where no feature is subtracted from them, the dtype of the rows has digits enough."""
        rows = self._rows(J)
        return rows if self.has_features else rows.in_row_dtype()

    def _part_size(self, J: Any) -> int:
        """Examples whose second moments are made at once."""
        return int(J.n)

    # Samples.

    def draws(self, k: int, step: int, *, generator: torch.Generator) -> Iterator[Tensor]:
        """k samples of the displacement, at most ``step`` at a time, (p, step)."""
        for start in range(0, k, step):
            yield self.draw(min(step, k - start), generator=generator)

    def most_draws(self, usual: int) -> int:
        """How many samples there can be: ``usual``, or as many as the posterior holds."""
        return usual

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        """k joint samples of the outputs of all examples, less the mean function, (k, n, c)."""
        C = self.covariance(J)
        # A covariance that is a difference rounds as its first term does.
        size = 0.0 if self.D is None else float(self._rows(J).gram_diag(scale=self.D).sum())
        z = torch.randn(J.shape[0], k, dtype=J.dtype, device=generator.device, generator=generator)
        return self.shift(J) + (square_root(C, size) @ z.to(J.device)).T.reshape(k, J.n, J.c)

    def _normal(self, rows: int, k: int, generator: torch.Generator) -> Tensor:
        """Standard normal numbers (rows, k) for this posterior."""
        z = torch.randn(rows, k, dtype=self.delta.dtype, device=generator.device, generator=generator)
        return z.to(self.delta.device)

    # Files.

    def tensors(self) -> dict[str, Tensor]:
        """The posterior as named tensors, without the training data; `posterior_from` is the inverse."""
        out = {part: getattr(self, "prior_variance" if part == "variance" else part) for part in self.parts}
        turns = {} if self.rotation is None else self.rotation.tensors()
        return out | {f"rotation.{key}": value for key, value in turns.items()}

    # Exact solves; a posterior that is `factored` has these.

    def precisions(self, J: LinearOperator, noise: Tensor, c: int) -> Tensor:
        """The diagonal blocks of ``(K + noise)^-1``, one for each example, (n, c, c).

        Args:
            J: Of the training data, (n c, p).
            noise: (n c,), variances of the observations.
            c: Outputs.
        """
        raise NotImplementedError

    def smoother(self, J: LinearOperator, noise: Tensor, new: Jacobian) -> Tensor:
        """``K(X*, X) (K + noise)^-1``, (m c, n c), for new inputs; the arguments are those of `precisions`."""
        raise NotImplementedError

    def extended(self, J: LinearOperator, new: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        """The posterior with more observations.

        Args:
            J: Of the training data, (n c, p).
            new: Of the new data, (m c, p).
            r: Targets less the mean function, of both, ((n + m) c,).
            noise: Variances of the observations, of both.
        """
        raise NotImplementedError

    def reduced(self, J: LinearOperator, kept: Tensor, gone: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        """The posterior without some observations.

        Args:
            J: Of the training data that stay.
            kept: Rows of the training data that stay, in rising order.
            gone: Of the training data that go.
            r: Targets less the mean function, of all training data, (n c,).
            noise: Variances of the observations, (n c,).
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Extension:
    """A posterior with more observations, or with fewer.

    Attributes:
        posterior: Of all observations that count.
        J: Of their inputs.
        alpha: ``(K + noise)^-1 r``.
        energy: Twice the negative log density of the observations that came, or went, given the others, without the
            constant.
    """

    posterior: Posterior
    J: LinearOperator
    alpha: Tensor
    energy: float


@final
class PointPosterior(Posterior):
    """All mass on one displacement, without error bars.

    Args:
        delta: (p,).
    """

    parts = ("delta",)
    has_features = False
    is_point = True

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta

    def multiply(self, V: Tensor) -> Tensor:
        return torch.zeros_like(V)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None].expand(-1, k)


@final
class DiagonalPosterior(Posterior):
    """Independent parameters.

    Args:
        delta: (p,).
        variances: (p,).
    """

    parts = ("delta", "variances")
    has_features = False

    def __init__(self, delta: Tensor, variances: Tensor) -> None:
        self.delta = delta
        self.D = self.variances = variances

    def with_prior(self, old: Tensor, new: Tensor) -> DiagonalPosterior:
        return DiagonalPosterior(self.delta, _variances_with_prior(self.variances, old, new))

    def multiply(self, V: Tensor) -> Tensor:
        return self.variances[:, None] * V

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None] + self.variances.sqrt()[:, None] * self._normal(len(self.delta), k, generator)


@final
class TurnedPosterior(Posterior):
    """Independent parameters in rotated coordinates: a posterior with Kronecker factors.

    Args:
        delta: (p,).
        variances: (p,), along the rotated coordinates.
        rotation: From the parameters' coordinates to the rotated ones.
    """

    parts = ("delta", "variances")
    has_features = False

    def __init__(self, delta: Tensor, variances: Tensor, *, rotation: Rotation) -> None:
        self.delta, self.rotation = delta, rotation
        self.D = self.variances = variances

    def with_prior(self, old: Tensor, new: Tensor) -> TurnedPosterior:
        assert self.rotation is not None
        return TurnedPosterior(self.delta, _variances_with_prior(self.variances, old, new), rotation=self.rotation)

    def multiply(self, V: Tensor) -> Tensor:
        assert self.rotation is not None
        return self.rotation.back(self.variances[:, None] * self.rotation.rows(V.T).T)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        assert self.rotation is not None
        z = self._normal(len(self.delta), k, generator)
        return self.delta[:, None] + self.rotation.back(self.variances.sqrt()[:, None] * z)


@final
class SubnetworkPosterior(Posterior):
    """A posterior over some parameters; the other parameters are known.

    Args:
        delta: (p,).
        index: (k,), the parameters that are random.
        W: (k, k), a root of their covariance.
    """

    parts = ("delta", "index", "W")

    def __init__(self, delta: Tensor, *, index: Tensor, W: Tensor) -> None:
        self.delta, self.index, self.W = delta, index, W

    def features(self, J: Any) -> Tensor:
        return J.columns(self.index) @ self.W

    def with_prior(self, old: Tensor, new: Tensor) -> SubnetworkPosterior:
        inverse = torch.linalg.inv(self.W)
        precision = inverse.T @ inverse - torch.diag(1 / old[self.index]) + torch.diag(1 / new[self.index])
        inner = torch.linalg.inv(torch.linalg.cholesky(0.5 * (precision + precision.T)))
        return SubnetworkPosterior(self.delta, index=self.index, W=inner.T)

    def multiply(self, V: Tensor) -> Tensor:
        out = torch.zeros_like(V)
        out[self.index] = self.W @ (self.W.T @ V[self.index])
        return out

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        z = self.W @ self._normal(len(self.index), k, generator)
        return self.delta[:, None].repeat(1, k).index_add_(0, self.index, z)


@final
class SamplePosterior(Posterior):
    """Covariances estimated from posterior samples, with a relative error of about ``sqrt(2 / k)`` in a variance.

    Args:
        delta: (p,).
        samples: (p, k), of mean zero.
    """

    @classmethod
    def of(cls, posterior: Posterior, k: int, *, seed: int) -> SamplePosterior:
        """The posterior that k samples of another posterior stand for: the same mean, and a covariance of rank k."""
        drawn = posterior.draw(k, generator=torch.Generator().manual_seed(seed))
        return cls(posterior.delta, drawn - posterior.delta[:, None])

    parts = ("delta", "samples")
    known_from_samples = True

    def __init__(self, delta: Tensor, samples: Tensor) -> None:
        self.delta = delta
        self.directions = self.samples = samples
        self.weights = 1 / samples.shape[1]

    def features(self, J: Any) -> Tensor:
        return J @ self.samples

    def multiply(self, V: Tensor) -> Tensor:
        return self.weights * (self.samples @ (self.samples.T @ V))

    def _first(self, k: int) -> Tensor:
        if k > self.samples.shape[1]:
            raise ValueError(
                f"This posterior holds {self.samples.shape[1]} samples; {k} were asked for. Fit with samples={k}."
            )
        return self.samples[:, :k]

    def most_draws(self, usual: int) -> int:
        return self.samples.shape[1]

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        """The first k of the stored samples."""
        return self.delta[:, None] + self._first(k)

    def draws(self, k: int, step: int, *, generator: torch.Generator) -> Iterator[Tensor]:
        """The first k of the stored samples."""
        yield from self.draw(k, generator=generator).split(step, 1)

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        """The first k of the stored samples."""
        return self.shift(J) + (J @ self._first(k)).T.reshape(k, J.n, J.c)


@final
class LowRankPosterior(Posterior):
    r"""The prior but for r directions: :math:`S^{1/2} (I - P P^\top + P C P^\top) S^{1/2}`.

    Args:
        variance: S, (p,).
        delta: (p,).
        basis: P, (p, r), orthonormal.
        C: (r, r), the covariance along the basis.
    """

    parts = ("variance", "delta", "basis", "C")

    def __init__(self, variance: Tensor, delta: Tensor, *, basis: Tensor, C: Tensor) -> None:
        self.D = self.prior_variance = variance
        self.delta, self.basis, self.C = delta, basis, C
        eigenvalues, Q = torch.linalg.eigh(C - torch.eye(len(C), dtype=C.dtype, device=C.device))
        self._root, self.weights = Q * eigenvalues.abs().sqrt(), eigenvalues.sign()

    def features(self, J: Any) -> Tensor:
        return (J @ (self.prior_variance.sqrt()[:, None] * self.basis)) @ self._root

    def with_prior(self, old: Tensor, new: Tensor) -> LowRankPosterior:
        # I + P (C^-1 - I) P^T is the Hessian of whitened weights, which other deviations stretch.
        Q, R = torch.linalg.qr(torch.where(old > 0, (new / old).sqrt(), 0.0)[:, None] * self.basis)
        eye = torch.eye(len(self.C), dtype=self.C.dtype, device=self.C.device)
        C = torch.linalg.inv(eye + R @ (torch.linalg.inv(self.C) - eye) @ R.T)
        return LowRankPosterior(new, self.delta, basis=Q, C=0.5 * (C + C.T))

    def multiply(self, V: Tensor) -> Tensor:
        d, P = self.prior_variance.sqrt()[:, None], self.basis
        X = d * V
        along = P.T @ X
        return d * (X + P @ (self.C @ along - along))

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        z, P = self._normal(len(self.delta), k, generator), self.basis
        along = P.T @ z
        u = z + P @ (square_root(self.C) @ self._normal(len(self.C), k, generator) - along)
        return self.delta[:, None] + self.prior_variance.sqrt()[:, None] * u


@final
class FunctionPosterior(Posterior):
    r""":math:`K_{**} - K_{*X} L M^{-1} L^\top K_{X*}`, from the training data's Jacobian.

    Args:
        J: Of the training data, or a stack of such. Every answer is a pass over it, so its factors are best kept
            (`Jacobian.cached`).
        variance: S, (p,).
        delta: (p,).
        root: L, (n c,) or (n, c, c).
        factor: The lower Cholesky factor of M, (n c, n c); entries above the diagonal are not read.
    """

    parts = ("variance", "delta", "root", "factor")
    weights = -1.0
    factored = True
    needs_data = True

    def __init__(self, J: LinearOperator, variance: Tensor, delta: Tensor, *, root: Tensor, factor: Tensor) -> None:
        self.D = self.prior_variance = variance
        self.J, self.delta, self.root, self.factor = J, delta, root, factor

    def half(self, J: Any) -> Tensor:
        """``C^-1 L^T K(X, X*)``, (n c, m c), with ``M = C C^T``."""
        cross = weigh(J.gram(self.J, scale=self.prior_variance).T, self.root, transpose=True)
        if cross.requires_grad:
            return torch.linalg.solve_triangular(self.factor.tril(), cross, upper=False)
        return solve_lower(self.factor, cross)

    def features(self, J: Any) -> Tensor:
        return self.half(J).T

    def cross(self, J: Any, other: Any) -> Tensor:
        # From M^-1 for J alone, so that the training data may be the others at no second solve.
        T = weigh(solve_upper(self.factor, self.half(J)), self.root)
        return J.gram(other, scale=self.prior_variance) - T.T @ self.J.gram(other, scale=self.prior_variance)

    def with_prior(self, old: Tensor, new: Tensor) -> FunctionPosterior:
        M = inner_matrix(self.J.gram(scale=new), self.root)
        check_conditioning(M)
        return FunctionPosterior(self.J, new, self.delta, root=self.root, factor=cholesky_(M))

    def multiply(self, V: Tensor) -> Tensor:
        S = self.prior_variance[:, None]
        X = S * V
        left = cholesky_solve(self.factor, weigh(self.J @ X, self.root, transpose=True))
        return X - S * (self.J.T @ weigh(left, self.root))

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        # Matheron: u + Phi^T L M^-1 (e - L^T Phi u) with u and e standard normal.
        d = self.prior_variance.sqrt()[:, None]
        u, e = self._normal(len(d), k, generator), self._normal(len(self.factor), k, generator)
        left = e - weigh(self.J @ (d * u), self.root, transpose=True)
        return self.delta[:, None] + d * (u + d * (self.J.T @ weigh(cholesky_solve(self.factor, left), self.root)))

    def _part_size(self, J: Any) -> int:
        return _examples_at_once(J, len(self.factor))

    def precisions(self, J: LinearOperator, noise: Tensor, c: int) -> Tensor:
        C, rows = self.factor, len(self.factor)
        out = noise.new_empty(rows // c, c, c)
        step = max(1, 2048 // c) * c
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            eye = C.new_zeros(rows - start, stop - start)
            eye.diagonal().copy_(self.root[start:stop])
            # The columns of C^-1 L begin where the unit vector does.
            T = solve_lower(C[start:, start:], eye).T.reshape(-1, c, rows - start)
            out[start // c : stop // c] = T @ T.mT
        return out

    def smoother(self, J: LinearOperator, noise: Tensor, new: Jacobian) -> Tensor:
        return (self.root[:, None] * solve_upper(self.factor, self.half(new))).T

    def extended(self, J: LinearOperator, new: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        added, S, m = new.cached(), self.prior_variance, len(self.factor)
        root = noise[m:].rsqrt()
        # [[C, 0], [T^T, C2]]: T = C^-1 L^T K12 L2 and C2 C2^T = M22 - T^T T.
        T = self.half(added) * root
        M = root[:, None] * added.gram(scale=S) * root
        M.diagonal().add_(1)
        check_conditioning(M)
        M -= T.T @ T
        C = self.factor.new_zeros(len(r), len(r))
        C[:m, :m], C[m:, :m], C[m:, m:] = self.factor, T.T, cholesky_(M)
        whole = Stack([J if isinstance(J, Stack) else self.J, added])
        roots = torch.cat([self.root, root])
        half = solve_lower(C, (roots * r)[:, None])
        alpha = roots * solve_upper(C, half)[:, 0]
        energy = float(half[m:].square().sum()) + 2 * float(C.diagonal()[m:].log().sum() - root.log().sum())
        found = FunctionPosterior(whole, S, S * (whole.T @ alpha), root=roots, factor=C)
        return Extension(found, whole, alpha, energy)

    def reduced(self, J: LinearOperator, kept: Tensor, gone: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        C, root, S = remove_rows(self.factor, kept), self.root[kept], self.prior_variance
        half = solve_lower(C, (root * r[kept])[:, None])
        alpha = root * solve_upper(C, half)[:, 0]
        before = solve_lower(self.factor, (self.root * r)[:, None])
        energy = float(before.square().sum()) - float(half.square().sum())
        energy += 2 * float(self.factor.diagonal().log().sum() - self.root.log().sum())
        energy -= 2 * float(C.diagonal().log().sum() - root.log().sum())
        return Extension(FunctionPosterior(J, S, S * (J.T @ alpha), root=root, factor=C), J, alpha, energy)


@final
class KernelPosterior(Posterior):
    r""":math:`K_{**} + K_{*X} R \, \mathrm{diag}(\mathrm{signs}) \, R^\top K_{X*}`, from the training data's Jacobian.

    A mixture of posteriors with different scales and noises has this form, and so has every later update of it.

    Args:
        J: Of the training data, or a stack of such, as for `FunctionPosterior`.
        variance: S, (p,).
        delta: (p,).
        R: (n c, k).
        signs: (k,), each 1 or -1.
    """

    parts = ("variance", "delta", "R", "signs")
    factored = True
    needs_data = True

    def __init__(self, J: LinearOperator, variance: Tensor, delta: Tensor, *, R: Tensor, signs: Tensor) -> None:
        self.D = self.prior_variance = variance
        self.J, self.delta, self.R = J, delta, R
        self.weights = self.signs = signs

    def features(self, J: Any) -> Tensor:
        return J.gram(self.J, scale=self.prior_variance) @ self.R

    def cross(self, J: Any, other: Any) -> Tensor:
        T = (self.signs * self.features(J)) @ self.R.T
        return J.gram(other, scale=self.prior_variance) + T @ self.J.gram(other, scale=self.prior_variance)

    def multiply(self, V: Tensor) -> Tensor:
        S = self.prior_variance[:, None]
        X = S * V
        return X + S * (self.J.T @ (self.R @ (self.signs[:, None] * (self.R.T @ (self.J @ X)))))

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        # With A = Phi^T R, the symmetric root of I + A diag(signs) A^T is I + A X A^T.
        d, X = self.prior_variance.sqrt()[:, None], self._root
        z = self._normal(len(d), k, generator)
        back = self.R @ (X @ (self.R.T @ (self.J @ (d * z))))
        return self.delta[:, None] + d * (z + d * (self.J.T @ back))

    @cached_property
    def _root(self) -> Tensor:
        """X, (k, k), of `draw`, from the eigenvectors of ``A^T A`` without those below rounding."""
        values, V = torch.linalg.eigh(self.R.T @ self.J.gram(scale=self.prior_variance) @ self.R)
        real = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        values, V = values[real].sqrt(), V[:, real]
        eye = torch.eye(len(values), dtype=V.dtype, device=V.device)
        inner = values[:, None] * ((V.T * self.signs) @ V) * values
        turned = V / values
        return turned @ (square_root(eye + inner, float(values.square().sum())) - eye) @ turned.T

    def _part_size(self, J: Any) -> int:
        return _examples_at_once(J, len(self.R))

    def extended(self, J: LinearOperator, new: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        added, S, m = new.cached(), self.prior_variance, len(self.R)
        root = noise[m:].rsqrt()
        # The covariance at the new inputs and its root C, in units of the noise.
        T = root[:, None] * self.features(added)
        M = root[:, None] * added.gram(scale=S) * root
        M.diagonal().add_(1)
        check_conditioning(M)
        M += (self.signs * T) @ T.T
        C = cholesky_(M)
        # Columns [R signs T^T; 1 / noise^(1/2)] C^-T with the sign -1.
        below = root[:, None] * solve_upper(C, torch.eye(len(root), dtype=C.dtype, device=C.device))
        beside = (self.R * self.signs) @ solve_lower(C, T).T
        R = torch.cat(
            [torch.cat([self.R, beside], 1), torch.cat([below.new_zeros(len(root), self.R.shape[1]), below], 1)]
        )
        left = root * (r[m:] - added @ self.delta)
        half = solve_lower(C, left[:, None])
        whole = Stack([J if isinstance(J, Stack) else self.J, added])
        step = whole.T @ (R[:, -len(root) :] @ half)[:, 0]
        delta = self.delta + S * step
        energy = float(half.square().sum()) + 2 * float(C.diagonal().log().sum() - root.log().sum())
        found = KernelPosterior(whole, S, delta, R=R, signs=torch.cat([self.signs, -torch.ones_like(root)]))
        alpha = (r - whole @ delta) / noise
        return Extension(found, whole, alpha, energy)


@final
class WeightPosterior(Posterior):
    r""":math:`\Phi_* H^{-1} \Phi_*^\top`.

    Args:
        variance: S, (p,).
        delta: (p,).
        factor: The lower Cholesky factor of H, (p, p).
    """

    parts = ("variance", "delta", "factor")
    factored = True

    def __init__(self, variance: Tensor, delta: Tensor, *, factor: Tensor) -> None:
        self.prior_variance, self.delta, self.factor = variance, delta, factor
        # W W^T = S^(1/2) H^-1 S^(1/2), so that a covariance is a Gram matrix of J W.
        eye = torch.eye(len(delta), dtype=delta.dtype, device=delta.device)
        inverse = solve_lower(factor, eye)
        self.directions = self.W = variance.sqrt()[:, None] * inverse.T

    def features(self, J: Any) -> Tensor:
        return J @ self.W

    def cross(self, J: Any, other: Any) -> Tensor:
        # The few examples go through all parameters, and the many are multiplied with the result.
        if J.shape[0] > other.shape[0]:
            return self.cross(other, J).T
        return (other @ (self.W @ (J @ self.W).T)).T

    def with_prior(self, old: Tensor, new: Tensor) -> WeightPosterior:
        H, d = self.factor.tril() @ self.factor.tril().T, torch.where(old > 0, (new / old).sqrt(), 0.0)
        H.diagonal().sub_(1)
        H = d[:, None] * H * d
        H.diagonal().add_(1)
        check_conditioning(H)
        return WeightPosterior(new, self.delta, factor=cholesky_(H))

    def multiply(self, V: Tensor) -> Tensor:
        return self.W @ (self.W.T @ V)

    def draw(self, k: int, *, generator: torch.Generator) -> Tensor:
        return self.delta[:, None] + self.W @ self._normal(len(self.delta), k, generator)

    def sample(self, J: Jacobian, k: int, *, generator: torch.Generator) -> Tensor:
        z = self._normal(len(self.delta), k, generator)
        return self.shift(J) + (J @ (self.W @ z)).T.reshape(k, J.n, J.c)

    def precisions(self, J: LinearOperator, noise: Tensor, c: int) -> Tensor:
        B = 1 / noise.view(-1, c)
        T = (J @ self.W).view(len(B), c, -1)
        return torch.diag_embed(B) - B[:, :, None] * (T @ T.mT) * B[:, None, :]

    def smoother(self, J: LinearOperator, noise: Tensor, new: Jacobian) -> Tensor:
        return (J @ (self.W @ (new @ self.W).T)).T / noise

    def extended(self, J: LinearOperator, new: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        d, old, m = self.prior_variance.sqrt(), self.factor, J.shape[0]
        weight = 1 / noise[m:]
        H, u = old @ old.T, torch.where(d > 0, self.delta / d, 0.0)
        b = H @ u + d * (new.T @ (weight * r[m:]))
        H += d[:, None] * new.normal(torch.diag(d), weight)
        check_conditioning(H)
        C = cholesky_(0.5 * (H + H.T))
        u = cholesky_solve(C, b)
        delta, whole = d * u, Stack([J, new])
        alpha = (r - whole @ delta) / noise
        left = r[m:] - new @ self.delta
        half = solve_lower(C, (d * (new.T @ (weight * left)))[:, None])
        energy = float((weight * left.square()).sum() + noise[m:].log().sum() - half.square().sum())
        energy += 2 * float(C.diagonal().log().sum() - old.diagonal().log().sum())
        return Extension(WeightPosterior(self.prior_variance, delta, factor=C), whole, alpha, energy)

    def reduced(self, J: LinearOperator, kept: Tensor, gone: Jacobian, r: Tensor, noise: Tensor) -> Extension:
        d, old = self.prior_variance.sqrt(), self.factor
        out = torch.ones(len(r), dtype=torch.bool, device=r.device)
        out[kept] = False
        weight, left = 1 / noise[out], r[out] - gone @ self.delta
        X = d[:, None] * gone.dense().T * weight.sqrt()
        C, _ = subtract_outer_products(old, X)
        step = cholesky_solve(C, X @ (weight.sqrt() * left))
        delta = self.delta - d * step
        alpha = (r[kept] - J @ delta) / noise[kept]
        left = r[out] - gone @ delta
        half = solve_lower(old, (X @ (weight.sqrt() * left))[:, None])
        energy = float((weight * left.square()).sum() + noise[out].log().sum() - half.square().sum())
        energy += 2 * float(old.diagonal().log().sum() - C.diagonal().log().sum())
        return Extension(WeightPosterior(self.prior_variance, delta, factor=C), J, alpha, energy)


POSTERIORS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        PointPosterior,
        DiagonalPosterior,
        TurnedPosterior,
        SubnetworkPosterior,
        SamplePosterior,
        LowRankPosterior,
        FunctionPosterior,
        KernelPosterior,
        WeightPosterior,
    )
}
"""Posteriors by the names that files have for them."""


def posterior_from(kind: str, tensors: Mapping[str, Tensor], *, J: LinearOperator | None, layout: Layout) -> Posterior:
    """The posterior that `Posterior.tensors` was asked of.

    Args:
        kind: Name of its class.
        tensors: By name.
        J: Of the training data, cached; for a posterior that needs it.
        layout: Of the parameters.
    """
    parts: dict[str, Any] = {part: tensors[part] for part in POSTERIORS[kind].parts}
    prefix = "rotation."
    if kind == "TurnedPosterior":
        turns = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        parts["rotation"] = Rotation.from_tensors(turns, layout)
    if POSTERIORS[kind].needs_data:
        parts["J"] = J
    found: Posterior = POSTERIORS[kind](**parts)
    return found


def _variances_with_prior(variances: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Variances of independent parameters with other prior variances: precisions of data and prior add up."""
    data = torch.where(variances > 0, (old - variances).clamp_min(0) / (old * variances), 0.0)
    return new / (1 + new * data)


def square_root(C: Tensor, size: float = 0.0) -> Tensor:
    """The symmetric R, ``R R = C``, for a covariance that may be singular; eigenvalues clearly below zero are refused.

    Of all roots this one moves as little as C does, also where eigenvalues are equal and rounding chooses the vectors:
    the same seed gives the same samples, to rounding, on another machine and from a file.

    Args:
        C: (m, m).
        size: The size of the numbers whose difference C is, which counts for what rounding can do.
    """
    eigenvalues, Q = torch.linalg.eigh(C)
    floor = -1e4 * torch.finfo(C.dtype).eps * max(float(eigenvalues.abs().sum()), size)
    if float(eigenvalues[0]) < floor:
        raise ArithmeticError(
            f"A covariance has the eigenvalue {float(eigenvalues[0]):.3g}, below rounding ({floor:.1g}): the solve "
            "behind it was not accurate enough. Use float64 (dtype=), more noise, or a smaller tolerance."
        )
    return (Q * eigenvalues.clamp_min(0).sqrt()) @ Q.T


def _examples_at_once(J: Any, rows: int) -> int:
    """Examples of J whose products with so many rows of the training data fit memory."""
    return max(1, find_dense_budget("auto", J.device) // (4 * rows * J.c * J.dtype.itemsize))


def nonnegative(variance: Tensor, prior: Tensor) -> Tensor:
    """Variances that are differences: rounding below zero counts as zero, more than that is refused."""
    floor = -1e4 * torch.finfo(variance.dtype).eps * prior
    if bool((variance < floor).any()):
        i = int((variance - floor).argmin())
        raise ArithmeticError(
            f"A posterior variance came out as {float(variance.flatten()[i]):.3g} of a prior one of "
            f"{float(prior.flatten()[i]):.3g}: the solve behind it was not accurate enough. Use float64 (dtype=) or "
            "more noise."
        )
    return variance.clamp_min(0)
