"""What a posterior around a network says about new inputs: moments, probabilities, joint probabilities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from linnet.inference.evidence.gaussian import LOG_2PI
from linnet.jacobian.differentiable_rows import TangentFeatures, product
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import Linearization
from linnet.linalg.row_weights import weigh
from linnet.probability.coordinates import SubnetworkPosterior, TurnedPosterior
from linnet.probability.expectations import predictive
from linnet.probability.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from linnet.probability.per_site import Sites
from linnet.probability.posteriors import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    Posterior,
    SamplePosterior,
    WeightPosterior,
    square_root,
)

ROWS = 2000
"""Rows of a joint covariance that are held at once."""


class Asked(ABC):
    """Moments of f at new inputs.

    Attributes:
        f: (n, c), the mean.
    """

    f: Tensor

    @abstractmethod
    def variance(self) -> Tensor:
        """(n, c)."""

    @abstractmethod
    def blocks(self) -> Tensor:
        """(n, c, c)."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """(n c, n c)."""


@final
class Streamed(Asked):
    """From passes over the inputs.

    Args:
        J: Of the inputs.
        posterior: Whose mean displacement is zero.
    """

    def __init__(self, J: Jacobian, posterior: Posterior) -> None:
        self.J, self.posterior = J, posterior

    @cached_property
    def f(self) -> Tensor:  # type: ignore[override]
        return self.J.outputs()

    def variance(self) -> Tensor:
        return self.posterior.variance(self.J)

    def blocks(self) -> Tensor:
        return self.posterior.blocks(self.J)

    def covariance(self) -> Tensor:
        return self.posterior.covariance(self.J)


@final
class Differentiable(Asked):
    """With a graph to the inputs; every output takes a row of p numbers.

    Args:
        lin: The network.
        posterior: Whose mean displacement is zero.
        x: Inputs that require a gradient.
    """

    def __init__(self, lin: Linearization, posterior: Posterior, x: Tensor) -> None:
        features = TangentFeatures(lin, torch.ones(lin.p, dtype=lin.dtype, device=lin.device))
        self.f = features.outputs(x)
        self._form = _form(posterior, features.rows(x))

    def covariance(self) -> Tensor:
        rows, D, T, sign = self._form
        out = T.new_zeros(()) if D is None else (rows * D) @ rows.T
        return out + sign * T @ T.T

    def blocks(self) -> Tensor:
        n, c = self.f.shape
        rows, D, T, sign = self._form
        rows, T = rows.view(n, c, -1), T.reshape(n, c, -1)
        out = T.new_zeros(()) if D is None else (rows * D) @ rows.mT
        return out + sign * T @ T.mT

    def variance(self) -> Tensor:
        return self.blocks().diagonal(dim1=1, dim2=2)


def _form(posterior: Posterior, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor, float]:
    """R, D, T and a sign with ``cov[f] = R D R^T + sign T T^T`` for rows (m, p) of a Jacobian."""
    empty = rows[:, :0]
    if isinstance(posterior, WeightPosterior):
        return rows, None, rows @ posterior.W, 1.0
    if isinstance(posterior, SubnetworkPosterior):
        return rows, None, rows[:, posterior.index] @ posterior.W, 1.0
    if isinstance(posterior, SamplePosterior):
        return rows, None, rows @ posterior.samples / posterior.samples.shape[1] ** 0.5, 1.0
    if isinstance(posterior, DiagonalPosterior):
        return rows, posterior.variances, empty, 1.0
    if isinstance(posterior, TurnedPosterior):
        return posterior.rotation.rows(rows), posterior.variances, empty, 1.0
    if isinstance(posterior, LowRankPosterior):
        S = posterior.prior_variance
        known = square_root(torch.eye(len(posterior.C), dtype=rows.dtype, device=rows.device) - posterior.C)
        return rows, S, rows @ (S.sqrt()[:, None] * posterior.basis) @ known, -1.0
    assert isinstance(posterior, FunctionPosterior)
    S = posterior.prior_variance
    cross = weigh(product(posterior.J, (rows * S).T), posterior.root, transpose=True)
    return rows, S, torch.linalg.solve_triangular(posterior.factor.tril(), cross, upper=False).T, -1.0


def probabilities(likelihood: Likelihood, f: Tensor, cov: Tensor, *, link: str, draws: int, seed: int) -> Tensor:
    """Class probabilities (n, c) for f ~ N(f, cov), site by site; cov (n, c) or (n, c, c)."""
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(likelihood, Sites):
        return predictive(likelihood, f, cov, link=link, samples=draws, generator=generator)
    mean = likelihood.split(f).flatten(0, 1)
    parts = likelihood.split(cov).flatten(0, 1) if cov.ndim == 2 else likelihood.site_blocks(cov)
    found = predictive(likelihood.inner, mean, parts, link=link, samples=draws, generator=generator)
    return found.view(len(f), -1)


def log_score(likelihood: Likelihood, f: Tensor, variance: Tensor, y: Tensor) -> float:
    """The log probability of targets for independent outputs f ~ N(f, variance), (n, c) each; probit for classes."""
    inner = likelihood
    if isinstance(likelihood, Sites):
        inner, y = likelihood.inner, y.flatten(0, 1)
        f, variance = (likelihood.split(x).flatten(0, 1) for x in (f, variance))
    if isinstance(inner, Bernoulli | Categorical):
        return float(inner.log_prob(f / (1 + math.pi / 8 * variance).sqrt(), y).sum())
    if isinstance(inner, Heteroscedastic):
        (f, s), variance = inner.split(f), inner.split(variance)[0]
        noise = s.exp()
    elif isinstance(inner, Gaussian):
        noise = 1 / inner.curvature(f)
    else:
        raise TypeError(f"Validation is known for classes and Gaussian noise; got {likelihood!r}.")
    total = variance + noise
    return float(-0.5 * ((y - f).square() / total + total.log() + LOG_2PI).sum())


def sampled_root(likelihood: Likelihood, f: Tensor, draws: int, *, seed: int) -> Tensor:
    r"""L (n, c, m) with ``E[L L^T] = B``: gradients of log p(y | f) for m targets drawn from the likelihood itself.

    >>> from linnet.probability.likelihoods import Categorical
    >>> f = torch.zeros(1, 3)
    >>> L = sampled_root(Categorical(), f, 20000, seed=0)
    >>> bool(torch.allclose(L @ L.mT, Categorical().curvature(f), atol=0.01))
    True
    """
    generator = torch.Generator().manual_seed(seed)
    each = [likelihood.residual(f, likelihood.sample(f, generator)) for _ in range(draws)]
    return torch.stack(each, -1) / math.sqrt(draws)


# Several inputs together.


def groups_of(n: int, kappa: int, labels: int | None, *, classes: bool, generator: torch.Generator) -> Tensor:
    """Examples of each group, (groups, labels); see `linnet.Laplace.joint_log_likelihood`."""
    if not isinstance(kappa, int) or not 1 <= kappa <= n:
        raise ValueError(f"kappa is a number of inputs, from 1 to the {n} that there are; got {kappa!r}.")
    if labels is not None and (not isinstance(labels, int) or labels < 1):
        raise ValueError(f"labels is a number of targets in a group and must be positive; got {labels!r}.")
    order = torch.randperm(n, generator=generator)[: n - n % kappa].view(-1, kappa)
    if labels is None:
        labels = 10 * (kappa - 1) if classes and kappa > 1 else kappa
        if labels == kappa:
            return order
    chosen = torch.randint(kappa, (len(order), labels), generator=generator)
    return order.gather(1, chosen)


def joint_log_likelihood(likelihood: Likelihood, samples: Iterable[Tensor], y: Tensor, groups: Tensor) -> float:
    """The average over groups of ``log E[prod p(y_i | f_i)]``.

    Args:
        likelihood: Of a target.
        samples: Joint samples of f, (k, n, c) each.
        y: Targets of all n examples.
        groups: (groups, labels), examples.
    """
    groups = groups.to(y.device)
    found = torch.cat([likelihood.log_prob(f, y)[:, groups].sum(-1) for f in samples])  # (draws, groups)
    return float((found.logsumexp(0) - math.log(len(found))).mean())


def joint_density(likelihood: Gaussian, posterior: Posterior, J: Jacobian, r: Tensor, groups: Tensor) -> float:
    """The average over groups of the log density of their residuals r (n, c) under ``cov[f] + noise``."""
    kappa, total = groups.shape[1], 0.0
    noise = 1 / likelihood.curvature(r)
    for some in groups.split(max(1, ROWS // (kappa * J.c))):
        index = some.flatten()
        C = posterior.covariance(J.subset(index))
        C.diagonal().add_(noise[index.to(r.device)].flatten())
        at, size = torch.arange(len(some), device=C.device), kappa * J.c
        blocks = C.view(len(some), size, len(some), size)[at, :, at]
        factor = torch.linalg.cholesky(blocks)
        white = torch.linalg.solve_triangular(factor, r[index.to(r.device)].view(len(some), size, 1), upper=False)
        log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum()
        total -= 0.5 * float(white.square().sum() + log_det + len(index) * J.c * LOG_2PI)
    return total / len(groups)
