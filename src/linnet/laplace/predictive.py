"""What a Laplace approximation is asked: f with its error bars, probabilities, samples, joint probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from linnet._common.distributed import check_ranks_agree
from linnet._estimator.portable import Portable
from linnet.data.batch import Batch
from linnet.inference.problem import check_covariance_fits
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import Linearization
from linnet.laplace import predictions
from linnet.network.flat_output import FlatOutput, unflattened
from linnet.probability.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood
from linnet.probability.per_site import Sites
from linnet.probability.posteriors import Posterior, SamplePosterior
from linnet.tangent.base import Linearity, as_targets, checked_inputs, like

DRAWN = 1 << 26
"""Entries of the samples of the parameters that are held at once."""


LEAST = 1 << 26
"""Bytes that a pass over the data may take however little ``memory`` allows: a chunk needs room for an example."""


class Predictive(Portable, BaseEstimator):
    """Base of `linnet.Laplace`: a network, a posterior of mean zero around its weights, and a likelihood.

    Attributes:
        lin_: The linearization.
        posterior_: Over the displacement of the parameters.
        likelihood_: With its noise.
    """

    batch_size: int | str
    memory: float | str
    progress: bool | None
    seed: int

    lin_: Linearization
    posterior_: Posterior
    likelihood_: Likelihood
    n_features_in_: int
    _unit: Likelihood
    _read: FlatOutput
    _noise_base: Tensor | None
    _one_column: bool
    _probe: Batch | None

    def _jacobian(self, X: Any) -> Jacobian:
        memory = self.memory if isinstance(self.memory, str) else max(self.memory, LEAST)
        J = self.lin_.jacobian(X, batch_size=self.batch_size, memory=memory, progress=self.progress)
        check_ranks_agree(self.lin_, J._source)
        return J

    # Predictions.

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, *, noise: bool = False) -> Any:
        """f at X, which is the network's own output (logits, for a classifier), with its error bars.

        Where X is a tensor that requires a gradient, so do the results.

        Args:
            X: Inputs.
            return_std: Also the standard deviation of f, in the same shape.
            return_cov: Also the joint covariance, (n, n), or (n c, n c) with row ``i * c + j`` for output j of input i.
            noise: Whether these include the noise of an observation.
        """
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not both.")
        check_is_fitted(self)
        asked = self._ask(X)
        if return_cov and isinstance(asked, predictions.Streamed):
            check_covariance_fits(asked.J, self.memory)
        mean = self._means(asked.f)
        if not (return_std or return_cov):
            return like(X, self._shaped(mean))
        added = self._noise_at(asked.f) if noise else torch.zeros_like(mean)
        if return_cov:
            C = self._mean_part(asked.covariance(), asked.f.shape[1])
            return like(X, self._shaped(mean)), like(X, C + torch.diag(added.flatten()))
        variance = self._means(asked.variance())
        return like(X, self._shaped(mean)), like(X, self._shaped((variance + added).sqrt()))

    def predict_proba(self, X: Any, link: str = "probit", *, draws: int = 1000) -> Any:
        """Class probabilities averaged over the posterior, (n, classes); of each label where these are on or off.

        Args:
            X: Inputs.
            link: "probit" (each logit scaled down by its own variance), "centered" (the same less what moves all logits
                together, and so no probability), "bridge" (the Laplace bridge to a Dirichlet distribution) or "mc"
                (Monte Carlo, with all covariances).
            draws: Of "mc".
        """
        check_is_fitted(self)
        inner = self._inner
        if not isinstance(inner, Bernoulli | Categorical):
            raise ValueError(f"predict_proba is for classes; the likelihood is {inner!r}. Use predict.")
        asked = self._ask(X)
        cov = asked.variance() if link == "probit" else asked.blocks()
        p = predictions.probabilities(self._unit, asked.f, cov, link=link, draws=draws, seed=self.seed)
        p = unflattened(p, self._read.shape)
        one = isinstance(inner, Bernoulli) and p.shape[1] == 1
        return like(X, torch.cat([1 - p, p], 1) if one else p)

    def sample(self, X: Any, k: int = 1, *, noise: bool = False, seed: int | None = None) -> Any:
        """k joint samples of f at X, (k, n) or (k, n, c): all inputs under the same weights."""
        check_is_fitted(self)
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k is a number of samples and must be positive; got {k!r}.")
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        J = self._jacobian(checked_inputs(self, X, reset=False))
        f = torch.cat(list(self._samples(J, J.outputs(), k, generator)))
        found = self._means(f)
        if noise:
            z = torch.randn(found.shape, dtype=f.dtype, generator=generator).to(f.device)
            found = found + self._noise_at(f).sqrt() * z
        return like(X, self._shaped(found))

    def linearity(self, X: Any, k: int = 4, *, seed: int | None = None) -> list[Linearity]:
        """Compare the linear model with the network itself, at X, for each of k weights drawn from the posterior.

        Where they differ, the error bars are those of the linear model alone: networks with weights drawn from the
        posterior would say something else.
        """
        check_is_fitted(self)
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k is a number of samples and must be positive; got {k!r}.")
        J = self._jacobian(checked_inputs(self, X, reset=False))
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        Z, before = self.posterior_.draw(k, generator=generator), J.outputs()
        shifts = (J @ Z).T.reshape(k, J.n, J.c)
        found = []
        for z, shift in zip(Z.T, shifts, strict=True):
            moved = {name: t + self.lin_.layout.unflatten(z)[name] for name, t in self.lin_.theta.items()}
            found.append(Linearity(before, before + shift, J.outputs(moved)))
        return found

    def joint_log_likelihood(
        self,
        X: Any,
        y: Any = None,
        kappa: int = 1,
        *,
        labels: int | None = None,
        draws: int | None = None,
        seed: int = 0,
    ) -> float:
        """The average log probability that the posterior gives to the targets of several inputs together.

        Examples are split at random into groups of kappa. For classes, ``labels`` of them are drawn from each group
        with repetition (Osband et al. 2022), so that what is learned about one input counts for the next; the default
        is 10 (kappa - 1), and for kappa = 1 the usual log likelihood of single labels. For numbers it is the exact
        density of the targets of all kappa.

        Args:
            X: Inputs.
            y: Targets; None where they come with the inputs.
            kappa: Inputs in a group.
            labels: Targets in a group.
            draws: Joint samples that the average is over; by default 1,000, or as many as the posterior holds.
            seed: Of groups and samples.
        """
        check_is_fitted(self)
        J = self._jacobian(checked_inputs(self, X, reset=False))
        f = J.outputs()
        targets = self._unit.targets(as_targets(y, J), J.n, J.c, dtype=J.dtype, device=J.device)
        generator = torch.Generator().manual_seed(seed)
        groups = predictions.groups_of(J.n, kappa, labels, classes=self._noise_base is None, generator=generator)
        if isinstance(self.likelihood_, Gaussian) and labels is None and J.by_position:
            return predictions.joint_density(self.likelihood_, self.posterior_, J, targets - f, groups)
        return predictions.joint_log_likelihood(
            self.likelihood_, self._samples(J, f, self._most(draws), generator), targets, groups
        )

    def _most(self, draws: int | None) -> int:
        """Draws where none are asked for: as many as there are, or 1,000."""
        if draws is not None:
            return draws
        return self.posterior_.samples.shape[1] if isinstance(self.posterior_, SamplePosterior) else 1000

    def _samples(self, J: Jacobian, f: Tensor, k: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Joint samples of f, (some, n, c) at a time."""
        step = max(1, min(k, DRAWN // J.shape[1]))
        if isinstance(self.posterior_, SamplePosterior):
            parts: Iterable[Tensor] = self.posterior_.draw(k, generator=generator).split(step, 1)
        else:
            sizes = [min(step, k - i) for i in range(0, k, step)]
            parts = (self.posterior_.draw(size, generator=generator) for size in sizes)
        for Z in parts:
            yield f + (J @ Z).T.reshape(-1, J.n, J.c)

    def _ask(self, X: Any) -> predictions.Asked:
        if isinstance(X, Tensor) and X.requires_grad and torch.is_grad_enabled():
            self.lin_.check_unchanged(contents=True)
            return predictions.Differentiable(self.lin_, self.posterior_, X)
        return predictions.Streamed(self._jacobian(checked_inputs(self, X, reset=False)), self.posterior_)

    # Shapes.

    @property
    def _inner(self) -> Likelihood:
        """The likelihood of one site."""
        return self._unit.inner if isinstance(self._unit, Sites) else self._unit

    def _means(self, f: Tensor) -> Tensor:
        """The outputs that targets are compared with: all, or the means where there are log variances."""
        return f.chunk(2, -1)[0] if isinstance(self._inner, Heteroscedastic) else f

    def _mean_part(self, C: Tensor, c: int) -> Tensor:
        if not isinstance(self._inner, Heteroscedastic):
            return C
        rows = torch.arange(len(C), device=C.device).view(-1, c)[:, : c // 2].flatten()
        return C[rows[:, None], rows]

    def _noise_at(self, f: Tensor) -> Tensor:
        """Noise variances of the observations, in the shape of the means."""
        if isinstance(self._inner, Heteroscedastic):
            return f.chunk(2, -1)[1].exp()
        if self._noise_base is None:
            raise ValueError(f"noise=True adds the noise of observations, and {self._unit!r} has none.")
        return 1 / self.likelihood_.curvature(f)

    def _shaped(self, f: Tensor) -> Tensor:
        return f[..., 0] if self._one_column else unflattened(f, self._read.shape)
