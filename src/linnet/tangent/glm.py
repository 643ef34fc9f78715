"""Door 1, counts, times and likelihoods of users: the linearized network as a generalized linear model."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import check_samples, together
from linnet._estimator import HubMixin, check_variance, convert_like
from linnet.inference import Inference
from linnet.jacobian import Jacobian
from linnet.network import Params
from linnet.probability import (
    Bernoulli,
    Categorical,
    Likelihood,
    Ordinal,
    PriorSpec,
    check_prior,
    likelihood_for,
    log_predictive,
    predict_target,
)
from linnet.tangent.base import Mean, Tangent
from linnet.tangent.generalized import Generalized


class TangentGLM(HubMixin, Generalized):
    r"""Adapt a trained network to counts, to times until an event, or to targets with a likelihood of your own.

    .. math:: y \sim p(y \mid f(x)), \qquad f(x) = m(x) + J(x) (\theta - \theta_0), \qquad
              \theta - \theta_0 \sim N(0, S)

    A generalized linear model whose features are the gradients of the network: log p is concave in f, so that the
    problem is convex. For counts and times the outputs of the network are logarithms of means or times.

    Args:
        model: The trained network.
        likelihood: "poisson" (counts), "negative-binomial" (counts with more spread), "weibull" (times until an event,
            some of them censored: targets (n, 2), see `linnet.likelihoods.Weibull`), or a
            `linnet.likelihoods.Likelihood`, such as one of your own. A dispersion or a shape that is left open is that
            of largest likelihood at the mean function.
        params: Which parameters adapt; see `linnet.linearize`.
        inference: "vi" (the best Gaussian), "laplace" (a Gaussian at the mode) or "map" (the mode alone: no error
            bars).
        mean: "network", "zero" or "auto", as for `TangentClassifier`.
        prior: As for `TangentRegressor`; scales are chosen by the Laplace evidence.
        solver: "auto", "function", "weight" or "cg-weight", and with ``inference="map"`` also "adam"; as for
            `TangentClassifier`.
        top: How many blocks adapt, as for `TangentRegressor`.
        family: Of VI, as for `TangentClassifier`.
        epochs: Number of epochs of "adam".
        minibatch: Number of examples of a step of "adam".
        learning_rate: First learning rate of "adam", in prior standard deviations; "auto" is the best first step.
        output: How to read the model's outputs; see `linnet.linearize`.
        dtype: Dtype of the network, as for `TangentRegressor`.
        tolerance: Relative residual of iterative solves, as for `TangentClassifier`.
        iterations: Limit of iterative solves.
        preconditioner: "auto", "nystrom" or "none".
        rank: Number of examples that the preconditioner is made from, or "auto".
        samples: Posterior samples of the iterative solver and of error bars.
        variance: How error bars are made: "exact", "samples" or "auto", as for `TangentRegressor`.
        memory: Bytes that dense matrices may take, or "auto".
        batch_size: Number of examples per chunk, or "auto".
        seed: Seed of all random draws.
        progress: False for no progress bars.

    Attributes:
        likelihood_: The likelihood, with the parameters that were found.
        mean_: The mean function, "network" or "zero".
        scales_: Prior scales by name.
        log_evidence_: Of the Laplace approximation, as for `TangentClassifier`.
        elbo_: The bound of the log evidence that VI reached.
        layer_relevance_: Each layer's share in the adaptation.
        variance_: "exact" or "samples".

    Example:
        >>> X = torch.linspace(-2, 2, 40)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        >>> y = torch.poisson(torch.exp(1 + torch.sin(2 * X[:, 0])), generator=torch.Generator().manual_seed(0))
        >>> glm = TangentGLM(model, "poisson").fit(X, y)
        >>> mean, std = glm.predict(X, return_std=True)
        >>> mean.shape, bool((mean > 0).all()), bool((std > 0).all())
        (torch.Size([40]), True, True)
    """

    _SHARED = (*Generalized._SHARED, "_one_column")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood = "poisson",
        params: Params = None,
        inference: Inference = "vi",
        mean: Mean = "auto",
        prior: PriorSpec = "balanced",
        solver: str = "auto",
        *,
        top: int | str | None = None,
        family: str = "auto",
        epochs: int = 30,
        minibatch: int = 128,
        learning_rate: float | str = "auto",
        output: Any = None,
        dtype: Any = "auto",
        tolerance: float | str = "auto",
        iterations: int = 1000,
        preconditioner: str = "auto",
        rank: int | str = "auto",
        samples: int = 64,
        variance: str = "auto",
        memory: float | str = "auto",
        batch_size: int | str = "auto",
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.model, self.likelihood, self.params, self.inference = model, likelihood, params, inference
        self.mean, self.prior, self.solver, self.top, self.family = mean, prior, solver, top, family
        self.epochs, self.minibatch, self.learning_rate = epochs, minibatch, learning_rate
        self.output, self.dtype, self.tolerance, self.iterations = output, dtype, tolerance, iterations
        self.preconditioner, self.rank, self.samples, self.variance = preconditioner, rank, samples, variance
        self.memory, self.batch_size, self.seed, self.progress = memory, batch_size, seed, progress

    @together
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, source: Any = None) -> TangentGLM:
        """Condition on targets y, as the likelihood takes them; data that carries its targets (a Dataset) needs no y.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, (n,): it multiplies the log likelihood. An example of
                weight 2 counts as the same example given twice, in the evidence too; one of weight 0 is left out.
            source: All data that the network was trained on, ``(X0, y0)`` or a Dataset of both, as for
                `TangentRegressor`: their posterior is the prior of the new task, and the mean function is zero.
        """
        self.top_path_ = None
        if isinstance(source, Tangent):
            self._carry_on(source, X, y, sample_weight)
            return self
        if self.top == "evidence" and self.solver != "adam":
            self._fit_by_evidence(X, y, sample_weight, source)
            return self
        check_prior(self.prior)
        check_variance(self.variance)
        self._check_likelihood()
        self._how()  # its errors come before any work
        inputs = self._inputs(X, reset=True)
        self._fit_likelihood(inputs, y, sample_weight, source)
        return self

    def _check_likelihood(self) -> None:
        found = likelihood_for(self.likelihood, torch.empty(0), (2,))
        if self.likelihood == "regression":
            raise ValueError("For numbers with Gaussian noise use linnet.TangentRegressor, which has a closed form.")
        if isinstance(found, Bernoulli | Categorical | Ordinal):
            raise ValueError(f"For classes use linnet.TangentClassifier(likelihood=...); got {found!r}.")

    @together
    def refit(self, X: Any, y: Any = None, sample_weight: Any = None) -> TangentGLM:
        """An estimator that has seen (X, y) alone, with the prior and the likelihood found here: task after task.

        No scale is chosen anew. This one stays as it is.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, as for `fit`.
        """
        check_is_fitted(self)
        other: TangentGLM = self._refit_likelihood(self._inputs(X, reset=False), y, sample_weight)
        return other

    def _observe(self, y: Any, J: Jacobian, *, refit: bool) -> Tensor:
        y = J.targets() if y is None else y
        if not refit:
            self.likelihood_ = likelihood_for(self.likelihood, torch.empty(0), (J.c,))
        found = self.likelihood_.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)
        self._one_column = (J.c == 1 and getattr(y, "ndim", 1) == 1) or (found.ndim > 1 and found.shape[1] != J.c)
        return found

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta, tensors = super()._state()
        return meta | {"one_column": self._one_column}, tensors

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        super()._set_state(meta, tensors, J)
        self._one_column = meta["one_column"]

    # Predictions.

    @together
    def predict(self, X: Any, return_std: bool = False, *, noise: bool = False) -> Any:
        """The mean of the targets at X, averaged over the posterior, with its standard deviation.

        Args:
            X: Inputs.
            return_std: Also the standard deviation of E[y | f]: how well the mean is known.
            noise: Whether the standard deviation is that of an observation: a count, or a time.
        """
        check_is_fitted(self)
        if self.inference == "map":
            if return_std:
                raise ValueError(
                    "inference='map' finds the mode alone, which has no error bars. Use 'vi' or 'laplace'."
                )
            return convert_like(X, self._shaped(self.likelihood_.mean(self._predict(X)[0])))
        f, v = self._predict(X, "variance")
        found = predict_target(self.likelihood_, f, v)
        mean = convert_like(X, self._shaped(found.mean))
        if not return_std:
            return mean
        total = found.spread + found.noise() if noise else found.spread
        return mean, convert_like(X, self._shaped(total.sqrt()))

    @together
    def predict_outputs(self, X: Any, *, return_std: bool = False) -> Any:
        """The mean of the outputs f at X, (n, c): the logarithms of the means of counts and times.

        Args:
            X: Inputs.
            return_std: Also their standard deviation, (n, c).
        """
        check_is_fitted(self)
        f, v = self._predict(X, "variance" if return_std else "none")
        return (convert_like(X, f), convert_like(X, v.sqrt())) if return_std else convert_like(X, f)

    @together
    def sample(self, X: Any, k: int = 1, *, noise: bool = False, seed: int | None = None) -> Any:
        """k joint samples of E[y | f] at X, (k, n) or (k, n, c); with ``noise`` of the targets themselves.

        Times that are drawn have two columns, (k, n, 2), as `fit` takes them, and are seen to their end.
        """
        check_is_fitted(self)
        check_samples(k)
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        f = self._sample(X, k, generator)
        if noise:
            y = self.likelihood_.sample(f, generator)
            return convert_like(X, y[..., 0] if self._one_column and y.shape[-1] == 1 else y)
        found = self.likelihood_.mean(f)
        return convert_like(X, found[..., 0] if self._one_column else found)

    @together
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The average log probability of the targets y at X, for a network with one output."""
        check_is_fitted(self)
        J = self._new_inputs(X)
        y = self.likelihood_.targets(J.targets() if y is None else y, J.n, J.c, dtype=J.dtype, device=J.device)
        if self.inference == "map":
            each = self.likelihood_.log_prob(self._predict(X)[0], y)
        else:
            each = log_predictive(self.likelihood_, *self._predict(X, "variance"), y)
        w = torch.ones_like(each) if sample_weight is None else torch.as_tensor(sample_weight).to(each)
        return float((w * each).sum() / w.sum())

    def _shaped(self, value: Tensor) -> Tensor:
        return value[:, 0] if self._one_column else value
