"""What a posterior around a network says about new inputs: moments, probabilities, samples, joint probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet.inference import LOG_2PI
from linnet.jacobian import DifferentiableRows, Jacobian, Linearization, TangentFeatures
from linnet.network import unflattened
from linnet.probability import (
    Bernoulli,
    Categorical,
    FactoredCovariance,
    Gaussian,
    Heteroscedastic,
    KnownNoise,
    Likelihood,
    Posterior,
    PredictiveMoments,
    Sites,
    Spread,
    as_variances,
    compute_probabilities,
    log_predictive,
    without_weights,
)

ROWS = 2000
"""Rows of a joint covariance that are held at once: memory against passes over the training data."""

DRAWN = 1 << 26
"""Entries of the samples of the parameters that are held at once: memory against passes over the inputs."""


@dataclass(frozen=True)
class Predictive:
    """A network, a posterior of mean zero around its weights, and a likelihood.

    Attributes:
        lin: The network.
        posterior: Over the displacement of the parameters.
        likelihood: Of the targets, with its noise.
        shape: (c, *sites), the shape of the output of an example; () for outputs without sites.
        one_column: Whether targets had one axis, for one output.
    """

    lin: Linearization
    posterior: Posterior
    likelihood: Likelihood
    shape: tuple[int, ...]
    one_column: bool

    # Moments of f.

    def moments(self, J: Jacobian, spread: Spread) -> PredictiveMoments:
        """At the inputs of J, from one pass."""
        if spread == "none":
            f = J.outputs()
            return PredictiveMoments(f, torch.zeros_like(f), None)
        return self.posterior.predict(J, spread)

    def differentiable_moments(self, x: Tensor, spread: Spread) -> PredictiveMoments:
        """With a graph to the inputs x; every output takes a row of p numbers."""
        features = TangentFeatures(self.lin)
        f = features.outputs(x)
        if spread == "none":
            return PredictiveMoments(f, torch.zeros_like(f), None)
        J = DifferentiableRows(features.rows(x), f.shape[1])
        if spread == "factor":
            T = (self.posterior.features(J) * self.posterior.weights**0.5).reshape(*f.shape, -1)
            return PredictiveMoments(f, torch.zeros_like(f), FactoredCovariance(T))
        return PredictiveMoments(f, torch.zeros_like(f), getattr(self.posterior, spread)(J))

    def samples(self, J: Jacobian, k: int, generator: torch.Generator) -> Iterator[Tensor]:
        """k joint samples of f at the inputs of J, (some, n, c) at a time: all inputs under the same weights."""
        for Z in self.posterior.draws(k, max(1, min(k, DRAWN // J.shape[1])), generator=generator):
            f, shifts = J.outputs_and_product(Z)
            yield f + shifts.T.reshape(-1, J.n, J.c)

    # From f to the form of the targets.

    @property
    def inner(self) -> Likelihood:
        """The likelihood of one site."""
        return self.likelihood.inner if isinstance(self.likelihood, Sites) else self.likelihood

    def means(self, f: Tensor) -> Tensor:
        """The outputs that targets are compared with: all, or the means where there are log variances."""
        return f.chunk(2, -1)[0] if isinstance(self.inner, Heteroscedastic) else f

    def mean_covariance(self, C: Tensor, c: int) -> Tensor:
        """The part of a joint covariance of all outputs that belongs to `means`."""
        if not isinstance(self.inner, Heteroscedastic):
            return C
        rows = torch.arange(len(C), device=C.device).view(-1, c)[:, : c // 2].flatten()
        return C[rows[:, None], rows]

    def noise_variances(self, f: Tensor, noise: Any = True) -> Tensor:
        """Noise variances of the observations, in the shape of the means; or as the user says."""
        if not isinstance(noise, bool | np.bool_):
            n, c = self.means(f).shape[-2:]
            return as_variances(np.full(n, noise) if np.ndim(noise) == 0 else noise, n, c).to(f)
        if isinstance(self.inner, KnownNoise):
            raise ValueError(
                "The fit has a noise for each observation, and it does not know that of new ones: give their "
                "variances, as in predict(X, return_std=True, noise=variances)."
            )
        if isinstance(self.inner, Heteroscedastic):
            return f.chunk(2, -1)[1].exp()
        if not isinstance(self.inner, Gaussian):
            raise ValueError(
                f"noise=True adds the noise of observations, and {self.likelihood!r} has none that outputs have. For "
                "counts and times use predict_mean."
            )
        return 1 / self.likelihood.curvature(f)

    def shaped(self, f: Tensor) -> Tensor:
        """In the shape of the targets."""
        return f[..., 0] if self.one_column else unflattened(f, self.shape)

    def probabilities(self, moments: PredictiveMoments, *, link: str, draws: int, seed: int) -> Tensor:
        """Class probabilities in the shape of the outputs; of both classes for a single logit."""
        p = average_probabilities(self.likelihood, moments.f, moments.spread, link=link, draws=draws, seed=seed)
        if self.shape:
            sites = self.shape[1:]
            p = unflattened(p, (p.shape[1] // math.prod(sites), *sites))
        return torch.cat([1 - p, p], 1) if isinstance(self.inner, Bernoulli) and p.shape[1] == 1 else p


def average_probabilities(
    likelihood: Likelihood, f: Tensor, cov: Tensor | FactoredCovariance, *, link: str, draws: int, seed: int
) -> Tensor:
    """Class probabilities (n, c) for f ~ N(f, cov), site by site; cov (n, c), (n, c, c) or factors of that."""
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(likelihood, Sites):
        return compute_probabilities(likelihood, f, cov, link=link, samples=draws, generator=generator)
    mean = likelihood.split(f).flatten(0, 1)
    parts: Tensor | FactoredCovariance
    if isinstance(cov, FactoredCovariance):
        parts = FactoredCovariance(likelihood.split(cov.T.mT).movedim(1, -1).flatten(0, 1))
    else:
        parts = likelihood.split(cov).flatten(0, 1) if cov.ndim == 2 else likelihood.site_blocks(cov)
    found = compute_probabilities(likelihood.inner, mean, parts, link=link, samples=draws, generator=generator)
    return found.view(len(f), -1)


def log_score(likelihood: Likelihood, f: Tensor, variance: Tensor, y: Tensor) -> float:
    """The log probability of targets for independent outputs f ~ N(f, variance), (n, c) each; probit for classes.

    Only scores of classes are by the weights of the examples.
    """
    plain = without_weights(likelihood)
    inner = plain.inner if isinstance(plain, Sites) else plain
    if isinstance(inner, Bernoulli | Categorical):
        return float(likelihood.log_prob(f / (1 + math.pi / 8 * variance).sqrt(), y).sum())
    if isinstance(likelihood, Sites):
        y = y.flatten(0, 1)
        f, variance = (likelihood.split(x).flatten(0, 1) for x in (f, variance))
    if isinstance(inner, Heteroscedastic):
        (f, s), variance = inner.split(f), inner.split(variance)[0]
        noise = s.exp()
    elif isinstance(inner, Gaussian):
        noise = 1 / inner.curvature(f)
    else:
        return float(log_predictive(inner, f, variance, y).sum())
    total = variance + noise
    return float(-0.5 * ((y - f).square() / total + total.log() + LOG_2PI).sum())


def sample_root(likelihood: Likelihood, f: Tensor, draws: int, *, seed: int) -> Tensor:
    r"""L (n, c, m) with ``E[L L^T] = B``: gradients of log p(y | f) for m targets drawn from the likelihood itself.

    >>> from linnet.probability.likelihoods import Categorical
    >>> f = torch.zeros(1, 3)
    >>> L = sample_root(Categorical(), f, 20000, seed=0)
    >>> bool(torch.allclose(L @ L.mT, Categorical().curvature(f), atol=0.01))
    True
    """
    generator = torch.Generator().manual_seed(seed)
    each = [likelihood.residual(f, likelihood.sample(f, generator)) for _ in range(draws)]
    return torch.stack(each, -1) / math.sqrt(draws)


# Several inputs together.


def draw_groups(n: int, kappa: int, labels: int | None, *, classes: bool, generator: torch.Generator) -> Tensor:
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


def joint_density(likelihood: Gaussian, posterior: Posterior, J: Jacobian, y: Tensor, groups: Tensor) -> float:
    """The average over groups of the log density of their targets y (n, c) under ``N(f, cov[f] + noise)``."""
    kappa, total = groups.shape[1], 0.0
    noise = 1 / likelihood.curvature(y)
    for some in groups.split(max(1, ROWS // (kappa * J.c))):
        index = some.flatten()
        f, _, C = posterior.predict(J.subset(index), "covariance")
        assert C is not None
        C.diagonal().add_(noise[index.to(y.device)].flatten())
        at, size = torch.arange(len(some), device=C.device), kappa * J.c
        blocks = C.view(len(some), size, len(some), size)[at, :, at]
        factor = torch.linalg.cholesky(blocks)
        r = (y[index.to(y.device)] - f).view(len(some), size, 1)
        white = torch.linalg.solve_triangular(factor, r, upper=False)
        log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum()
        total -= 0.5 * float(white.square().sum() + log_det + len(index) * J.c * LOG_2PI)
    return total / len(groups)
