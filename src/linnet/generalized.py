r"""Conditioning the linear model on observations with any likelihood: the mode, its Laplace approximation, or VI.

The objective :math:`-\log p(y \mid m + J\delta) + \tfrac12 \delta^\top S^{-1} \delta` is convex, so that the mode
is the global optimum whatever solver finds it: Newton's method with a dense kernel, with dense features, or by passes
over the data. What the evidence chooses (the scales of the prior) it chooses by the Laplace approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from linnet import newton, variational
from linnet.evidence import Choice
from linnet.iterative import cached_if_fits, preconditioner_of, probes_of
from linnet.jacobian import Jacobian
from linnet.likelihoods import Likelihood
from linnet.newton import Mode
from linnet.operators import weigh
from linnet.posterior import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    PointPosterior,
    Posterior,
    SamplePosterior,
    WeightPosterior,
)
from linnet.precondition import Preconditioner
from linnet.priors import Prior
from linnet.problem import Settings, choose_solver
from linnet.quadrature import log_det_from
from linnet.solve import Solution, cg
from linnet.variational import Variational

Inference = Literal["map", "laplace", "vi"]

SUBSET_ROWS = 2000
"""Rows on which the prior's scale is chosen where all of them are too many for a dense solver."""


@dataclass(frozen=True)
class GeneralizedFit:
    """A posterior and how it was found.

    Attributes:
        posterior: Of the displacement.
        mode: The global optimum of the objective.
        variance: S, (p,).
        choice: Prior scales.
        log_evidence: Of the Laplace approximation; None for a mode without one.
        error: Its standard error; 0 where exact.
        best: What VI found.
        solver: The one that was used.
        examples: On how many examples the prior's scale was chosen.
        solution: Convergence of an iterative solve for samples.
    """

    posterior: Posterior
    mode: Mode
    variance: Tensor
    choice: Choice
    log_evidence: float | None
    error: float
    best: Variational | None
    solver: str
    examples: int
    solution: Solution | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Observed:
    """What is conditioned on.

    Attributes:
        J: Of the inputs.
        y: Targets, as the likelihood takes them.
        mean: m, (n, c).
        likelihood: Of the targets.
    """

    J: Jacobian
    y: Tensor
    mean: Tensor
    likelihood: Likelihood


@dataclass(frozen=True)
class How:
    """How to condition.

    Attributes:
        inference: "map", "laplace" or "vi".
        family: Of VI: "lowrank" or "meanfield".
        settings: Of the solvers.
    """

    inference: Inference
    family: str
    settings: Settings

    def __post_init__(self) -> None:
        if self.inference not in ("map", "laplace", "vi"):
            raise ValueError(f"inference must be 'map', 'laplace' or 'vi'; got {self.inference!r}.")
        if self.family not in ("lowrank", "meanfield"):
            raise ValueError(f"family must be 'lowrank' or 'meanfield'; got {self.family!r}.")


def condition(data: Observed, prior: Prior, how: How) -> GeneralizedFit:
    """The posterior of the displacement."""
    solver = solver_for(data.J, prior, how.settings)
    if solver.startswith("cg"):
        return _iterative(replace(data, J=cached_if_fits(data.J)), prior, how)
    if solver == "function":
        return _function(replace(data, J=data.J.cached()), prior, how)
    return _weight(replace(data, J=cached_if_fits(data.J)), prior, how)


def solver_for(J: Jacobian, prior: Prior, settings: Settings) -> str:
    """As for Gaussian noise, but that every step and every scale tried is a decomposition: a tenth of the work."""
    if settings.solver == "cg-function":
        raise ValueError("A classifier is solved by 'function', 'weight' or 'cg-weight'; got solver='cg-function'.")
    kernels = max(1, len(prior.scales)) + 1
    solver = choose_solver(J.shape[0], J.shape[1], settings, device=J.device, kernels=kernels, steps=30)
    return "cg-weight" if solver.startswith("cg") else solver


def _function(data: Observed, prior: Prior, how: How) -> GeneralizedFit:
    J, y, mean, likelihood = data.J, data.y, data.mean, data.likelihood
    inference, settings = how.inference, how.settings
    if len(prior.scales) > 1:
        parts = J.layer_grams()
        choice = newton.best_scales(parts, y, mean=mean, likelihood=likelihood)
        K = sum(s * part for s, part in zip(choice.scales, parts.values(), strict=True))
        assert isinstance(K, Tensor)
    else:
        K = J.gram(scale=prior.base)
        choice = newton.best_scale(K, y, mean=mean, likelihood=likelihood) if prior.scales else Choice((1.0,), (), 0.0)
        K *= choice.scales[0]
    variance = prior.variance(choice.scales if prior.scales else ())
    mode = newton.function_space(
        K, y, mean=mean, likelihood=likelihood, tolerance=_goal(settings), factor=inference != "map"
    ).checked()
    delta = variance * (J.T @ mode.alpha)
    common = (mode, variance, choice)
    if inference == "map":
        return GeneralizedFit(PointPosterior(delta), *common, None, 0.0, None, "function", J.n)
    if inference == "vi":
        best = _variational(data, how, variance, delta, K=K)
        return GeneralizedFit(_posterior(best, variance), *common, mode.log_evidence, 0.0, best, "function", J.n)
    assert mode.factor is not None
    laplace = FunctionPosterior(J, variance, delta, root=mode.root, factor=mode.factor)
    return GeneralizedFit(laplace, *common, mode.log_evidence, 0.0, None, "function", J.n)


def _weight(data: Observed, prior: Prior, how: How) -> GeneralizedFit:
    J, y, mean, likelihood = data.J, data.y, data.mean, data.likelihood
    inference, settings = how.inference, how.settings
    if len(prior.scales) > 1:
        raise NotImplementedError(
            "prior='layerwise' for a classifier needs the layers' kernels, (n c)^2 each, and they do not fit memory "
            "here. Use prior='shared', fewer examples, or more memory (memory=, solver='function')."
        )
    Phi = J.scaled(prior.base.sqrt()).dense(limit=2**62)
    choice = (
        newton.best_scale(Phi, y, mean=mean, likelihood=likelihood, space="weight")
        if prior.scales
        else Choice((1.0,), (), 0.0)
    )
    variance = prior.variance(choice.scales if prior.scales else ())
    mode = newton.weight_space(
        Phi,
        y,
        mean=mean,
        likelihood=likelihood,
        scale=choice.scales[0],
        tolerance=_goal(settings),
        factor=inference != "map",
    ).checked()
    assert mode.u is not None
    delta = variance.sqrt() * mode.u
    common = (mode, variance, choice)
    if inference == "map":
        return GeneralizedFit(PointPosterior(delta), *common, None, 0.0, None, "weight", J.n)
    if inference == "vi":
        best = _variational(data, how, variance, delta)
        return GeneralizedFit(_posterior(best, variance), *common, mode.log_evidence, 0.0, best, "weight", J.n)
    assert mode.factor is not None
    laplace = WeightPosterior(variance, delta, factor=mode.factor)
    return GeneralizedFit(laplace, *common, mode.log_evidence, 0.0, None, "weight", J.n)


def _iterative(data: Observed, prior: Prior, how: How) -> GeneralizedFit:
    J, y, mean, likelihood = data.J, data.y, data.mean, data.likelihood
    inference, settings = how.inference, how.settings
    choice, examples = Choice((1.0,) * max(1, len(prior.scales)), (), 0.0), J.n
    if prior.scales:
        # The evidence of a random part of the data, which has the same prior.
        examples = min(J.n, max(1, SUBSET_ROWS // J.c))
        index = torch.randperm(J.n, generator=settings.generator(6))[:examples].sort().values
        part = condition(
            Observed(J.subset(index), y[index.to(y.device)], mean[index.to(mean.device)], likelihood),
            prior,
            replace(how, inference="map", settings=replace(settings, solver="function")),
        )
        choice = part.choice
    variance = prior.variance(choice.scales if prior.scales else ())
    Phi = J.scaled(variance.sqrt())
    B = likelihood.curvature(mean)
    weight = B.flatten() if B.ndim == 2 else B
    P = preconditioner_of(Phi, J, weight, settings, "weight")
    mode = newton.matrix_free(
        J, y, variance=variance, mean=mean, likelihood=likelihood, preconditioner=P, tolerance=_goal(settings)
    ).checked()
    assert mode.u is not None
    d = variance.sqrt()
    delta = d * mode.u
    if inference == "map":
        return GeneralizedFit(PointPosterior(delta), mode, variance, choice, None, 0.0, None, "cg-weight", examples)
    if inference == "vi":
        best = _variational(data, how, variance, delta, preconditioner=P)
        posterior = _posterior(best, variance)
        return GeneralizedFit(posterior, mode, variance, choice, None, 0.0, best, "cg-weight", examples)
    k, root = settings.samples, mode.root
    B = likelihood.curvature(mode.f)
    weight = B.flatten() if B.ndim == 2 else B
    P = preconditioner_of(Phi, J, weight, settings, "weight")
    e = torch.randn(J.shape[0], k, dtype=J.dtype, generator=settings.generator(3)).to(J.device)
    h = torch.randn(J.shape[1], k, dtype=J.dtype, generator=settings.generator(4)).to(J.device)
    right = Phi.T @ weigh(e, root, slice(0, J.shape[0])) + h
    solution = cg(
        lambda V: V + Phi.normal(V, weight),
        torch.cat([right, probes_of(P, J.shape[1], J, settings)], 1),
        preconditioner=P,
        tolerance=settings.tolerance,
        iterations=settings.iterations,
        probes=settings.probes,
        progress=settings.progress,
    ).checked("The solve for posterior samples")
    assert solution.tridiagonals is not None
    log_det, error = log_det_from(solution.tridiagonals, P, J.shape[1])
    posterior = SamplePosterior(delta, d[:, None] * solution.value[:, :k])
    value = -mode.objective - 0.5 * log_det
    return GeneralizedFit(
        posterior, mode, variance, choice, value, 0.5 * error, None, "cg-weight", examples, solution=solution
    )


def _variational(
    data: Observed,
    how: How,
    variance: Tensor,
    delta: Tensor,
    *,
    K: Tensor | None = None,
    preconditioner: Preconditioner | None = None,
) -> Variational:
    """The best Gaussian of a family, started at the mode."""
    samples = how.settings.samples
    given: dict[str, Any] = {
        "variance": variance,
        "mean": data.mean,
        "likelihood": data.likelihood,
        "start": delta,
        "samples": samples + samples % 2,  # draws come in pairs
        "seed": how.settings.seed,
        "K": K,
    }
    if how.family == "lowrank":
        return variational.lowrank(data.J, data.y, **given).checked()
    return variational.meanfield(data.J, data.y, preconditioner=preconditioner, **given).checked()


def _posterior(best: Variational, variance: Tensor) -> Posterior:
    if best.variances is not None:
        return DiagonalPosterior(best.delta, best.variances)
    assert best.basis is not None and best.C is not None
    return LowRankPosterior(variance, best.delta, basis=best.basis, C=best.C)


def _goal(settings: Settings) -> float:
    """Of Newton's method: 1e-6 unless the user wants less."""
    return max(settings.tolerance, 1e-6)
