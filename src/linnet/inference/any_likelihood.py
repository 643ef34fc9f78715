r"""Conditioning the linear model on observations with any likelihood: the mode, its Laplace approximation, or VI.

The objective :math:`-\log p(y \mid m + J\delta) + \tfrac12 \delta^\top S^{-1} \delta` is convex, so that the mode
is the global optimum whatever solver finds it: Newton's method with a dense kernel, with dense features, or by passes
over the data. What the evidence chooses (the scales of the prior) it chooses by the Laplace approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from linnet._common import check_fits
from linnet.inference import variational
from linnet.inference.evidence.gaussian import Choice
from linnet.inference.evidence.laplace import choose_layer_scales, choose_scale
from linnet.inference.iterative_solves import draw_right_sides, preconditioner_of, solve_with_probes
from linnet.inference.mode import adam, newton
from linnet.inference.mode.adam import Training
from linnet.inference.mode.by_passes import mode_by_passes
from linnet.inference.mode.newton import Mode
from linnet.inference.problem import SolverSettings, searches_all_features
from linnet.inference.variational import Variational
from linnet.linalg import (
    Solution,
    cholesky_,
    weigh,
    weight_from_root,
)
from linnet.linalg import log_det_from as exact_log_det
from linnet.probability import (
    DiagonalPosterior,
    FunctionPosterior,
    LowRankPosterior,
    PointPosterior,
    Posterior,
    SamplePosterior,
    WeightPosterior,
    row_curvature,
)

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian
    from linnet.linalg import Preconditioner
    from linnet.probability import Likelihood, Prior

Inference = Literal["map", "laplace", "vi"]

SUBSET_ROWS = 2000
"""Rows on which the prior's scale is chosen where all of them are too many for a dense solver."""

DRAWN = 1e-4
"""The part of an ELBO by draws that one more iteration must gain. The error of the draws is as large."""


@dataclass(frozen=True)
class ModeFit:
    """A posterior and how it was found.

    Attributes:
        posterior: Posterior of the displacement.
        mode: The global optimum of the objective.
        variance: S, (p,).
        choice: Prior scales.
        solver: The solver that was used.
        examples: Number of examples on which the prior's scale was chosen.
        log_evidence: Log evidence of the Laplace approximation; None where it would take a solve that nothing else
            needs.
        error: Standard error of the log evidence; 0 where exact.
        best: The Gaussian that VI found.
        passes: Passes over the data until the mode was found; 1 where that takes a dense matrix.
        path: The objective by epoch, for training on minibatches.
        solution: Convergence of an iterative solve for samples.
    """

    posterior: Posterior
    mode: Mode
    variance: Tensor
    choice: Choice
    solver: str
    examples: int
    log_evidence: float | None = None
    error: float = 0.0
    best: Variational | None = None
    passes: int = 1
    path: tuple[float, ...] = ()
    solution: Solution | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Observations:
    """The observations that the posterior is conditioned on.

    Attributes:
        J: The Jacobian of the inputs.
        y: Targets, as the likelihood takes them.
        mean: m, (n, c).
        likelihood: Likelihood of the targets.
        start: A displacement (p,) that is near the mode, such as the mode for nearly the same data; None for zero.
    """

    J: Jacobian
    y: Tensor
    mean: Tensor
    likelihood: Likelihood
    start: Tensor | None = None

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of the search for a scale.

        If the mean function is zero, the scale has a hyperprior: a scale of zero would mean that inputs tell nothing.
        """
        nothing = not bool(self.mean.any())
        return {"mean": self.mean, "likelihood": self.likelihood, "hyperprior": nothing}

    def start_in_whitened_weights(self, variance: Tensor) -> Tensor | None:
        """u of the start, (p,)."""
        d = variance.sqrt()
        return None if self.start is None else torch.where(d > 0, self.start / torch.where(d > 0, d, 1.0), 0.0)


@dataclass(frozen=True)
class InferenceOptions:
    """How to condition.

    Attributes:
        inference: "map", "laplace" or "vi".
        family: The covariance family of VI, "full", "lowrank" or "meanfield"; "auto" is "full" where a dense kernel
            serves, else "lowrank".
        settings: Settings of the solvers.
    """

    inference: Inference
    family: str
    settings: SolverSettings

    def __post_init__(self) -> None:
        if self.inference not in ("map", "laplace", "vi"):
            raise ValueError(f"inference must be 'map', 'laplace' or 'vi'; got {self.inference!r}.")
        if self.family not in ("auto", "full", "lowrank", "meanfield"):
            raise ValueError(f"family must be 'auto', 'full', 'lowrank' or 'meanfield'; got {self.family!r}.")


def condition(data: Observations, prior: Prior, how: InferenceOptions, solver: str) -> ModeFit:
    """The posterior of the displacement, by a solver that `linnet.inference.problem.choose_likelihood_solver` chose."""
    return {"function": _function, "weight": _weight, "cg-weight": _iterative}[solver](data, prior, how)


def _function(data: Observations, prior: Prior, how: InferenceOptions) -> ModeFit:
    J = data.J
    K, choice, start = _kernel(data, prior)
    near = None
    if data.start is not None and not prior.scales:
        f = data.mean + (J @ data.start).view_as(data.mean)
        near = newton.step_in_function_space(K, data.y, f=f, mean=data.mean, likelihood=data.likelihood)
        start = near.alpha
    variance = prior.variance(choice.scales if prior.scales else ())
    given: dict[str, Any] = {"mean": data.mean, "likelihood": data.likelihood, "tolerance": _goal(how.settings)}
    mode = newton.function_space(K, data.y, start=start, near=near, **given).checked()
    delta = variance * (J.T @ mode.alpha)
    posterior: Posterior = PointPosterior(delta)
    best = None
    if how.inference == "vi":
        best = _fit_variational(data, how, variance, delta, K=K, alpha=mode.alpha)
        posterior = _posterior(best, variance, J)
    elif how.inference == "laplace":
        assert mode.factor is not None
        posterior = FunctionPosterior(J, variance, delta, root=mode.root, factor=mode.factor)
    small = replace(mode, factor=None) if how.inference == "map" else mode
    return ModeFit(posterior, small, variance, choice, "function", J.n, mode.log_evidence, best=best)


def _kernel(data: Observations, prior: Prior) -> tuple[Tensor, Choice, Tensor | None]:
    """The kernel with the best scales, these, and the alpha of the mode where it came with them."""
    J, given = data.J, {"mean": data.mean, "likelihood": data.likelihood}
    if len(prior.scales) > 1:
        parts = J.layer_grams()
        choice = choose_layer_scales(parts, data.y, **given)  # type: ignore[arg-type]
        K = sum(s * part for s, part in zip(choice.scales, parts.values(), strict=True))
        assert isinstance(K, Tensor)
        return K, choice, None
    K = J.gram(scale=prior.base)
    if not prior.scales:
        return K, Choice((1.0,), (), 0.0), None
    choice, mode = choose_scale(K, data.y, **data.known)
    return K.mul_(choice.scales[0]), choice, mode.alpha


def _weight(data: Observations, prior: Prior, how: InferenceOptions) -> ModeFit:
    J, (rows, p) = data.J, data.J.shape
    examples = J.n
    if searches_all_features(rows, p, J.device):
        choice, mode = _features(data, prior, how.settings)
        variance = prior.variance(choice.scales if prior.scales else ())
    else:
        choice, examples = _choose_on_part(J, data.y, prior, data.likelihood, how.settings, mean=data.mean)
        variance = prior.variance(choice.scales if prior.scales else ())
        mode, _ = _by_passes(data, variance, how.settings)
        mode = _with_hessian(J, variance, mode)
    assert mode.u is not None
    delta = variance.sqrt() * mode.u
    posterior: Posterior = PointPosterior(delta)
    best = None
    if how.inference == "vi":
        best = _fit_variational(data, how, variance, delta)
        posterior = _posterior(best, variance, J)
    elif how.inference == "laplace":
        assert mode.factor is not None
        posterior = WeightPosterior(variance, delta, factor=mode.factor)
    small = replace(mode, factor=None) if how.inference == "map" else mode
    return ModeFit(posterior, small, variance, choice, "weight", examples, mode.log_evidence, best=best)


def _features(data: Observations, prior: Prior, settings: SolverSettings) -> tuple[Choice, Mode]:
    """The best scale on all of the data, and the mode there, from dense features."""
    if len(prior.scales) > 1:
        raise NotImplementedError(
            "prior='layerwise' for a classifier needs the layers' kernels, (n c)^2 each, and they do not fit memory "
            "here. Use prior='shared', fewer examples, or more memory (memory=, solver='function')."
        )
    Phi, given = data.J.scaled(prior.base.sqrt()).dense(limit=2**62), {"mean": data.mean, "likelihood": data.likelihood}
    choice, start = Choice((1.0,), (), 0.0), None
    if prior.scales:
        choice, found = choose_scale(Phi, data.y, space="weight", **data.known)
        start = found.u
    else:
        start = data.start_in_whitened_weights(prior.base)
    mode = newton.weight_space(
        Phi,
        data.y,
        scale=choice.scales[0],
        start=start,
        tolerance=_goal(settings),
        **given,  # type: ignore[arg-type]
    )
    return choice, mode.checked()


def _with_hessian(J: Jacobian, variance: Tensor, mode: Mode) -> Mode:
    """The mode with the factor of its Hessian in weight space, from one pass over the data."""
    d = variance.sqrt()
    H = J.normal_matrix(weight_from_root(mode.root)).mul_(d).mul_(d[:, None])
    H.diagonal().add_(1)
    factor = cholesky_(H)
    return replace(mode, factor=factor, log_det=float(exact_log_det(factor)))


def _by_passes(data: Observations, variance: Tensor, settings: SolverSettings) -> tuple[Mode, Preconditioner | None]:
    return mode_by_passes(
        data.J,
        data.y,
        variance=variance,
        mean=data.mean,
        likelihood=data.likelihood,
        settings=settings,
        tolerance=_goal(settings),
        start=data.start_in_whitened_weights(variance),
    )


def _iterative(data: Observations, prior: Prior, how: InferenceOptions) -> ModeFit:
    J, settings = data.J, how.settings
    choice, examples = _choose_on_part(J, data.y, prior, data.likelihood, settings, mean=data.mean)
    variance = prior.variance(choice.scales if prior.scales else ())
    mode, P = _by_passes(data, variance, settings)
    assert mode.u is not None
    d = variance.sqrt()
    delta = d * mode.u
    fit = ModeFit(PointPosterior(delta), mode, variance, choice, "cg-weight", examples, passes=mode.passes)
    if how.inference == "map":
        return fit
    if how.inference == "vi":
        best = _fit_variational(data, how, variance, delta, preconditioner=P)
        return replace(fit, posterior=_posterior(best, variance, J), best=best)
    k, root, Phi = settings.samples, mode.root, J.scaled(d)
    weight = row_curvature(data.likelihood, mode.f, data.y)
    P = preconditioner_of(Phi, J, weight, settings, "weight")
    e, h = draw_right_sides(J, settings)
    right = Phi.T @ weigh(e, root, slice(0, J.shape[0])) + h
    what = "The solve for posterior samples"
    solution, log_det, error = solve_with_probes(lambda V: V + Phi.normal(V, weight), right, P, J, settings, what)
    posterior = SamplePosterior(delta, d[:, None] * solution.value[:, :k])
    value = -mode.objective - 0.5 * log_det
    return replace(fit, posterior=posterior, log_evidence=value, error=0.5 * error, solution=solution)


def _choose_on_part(
    J: Jacobian, y: Tensor, prior: Prior, likelihood: Likelihood, settings: SolverSettings, *, mean: Tensor | None
) -> tuple[Choice, int]:
    """Scales with the evidence of a random part of the data, which has the same prior, and how many examples that are.

    Without ``mean`` it is the network's output, of the examples as they are read for it.
    """
    if not prior.scales:
        return Choice((1.0,), (), 0.0), J.n
    examples = min(J.n, max(1, SUBSET_ROWS // J.c))
    if J.c > SUBSET_ROWS:
        check_fits(
            24 * J.c**2,
            settings.memory,
            J.device,
            what=f"The evidence that chooses the scale of the prior, for {J.c:,} outputs,",
            instead="Give prior= as a variance, or fewer outputs (output=)",
        )
    index = torch.randperm(J.n, generator=settings.generator(6))[:examples].sort().values
    part = J.subset(index).cached()
    base = part.outputs() if mean is None else mean[index.to(mean.device)]
    return _kernel(Observations(part, y[index.to(y.device)], base, likelihood), prior)[1], examples


def train(
    J: Jacobian,
    y: Tensor,
    prior: Prior,
    likelihood: Likelihood,
    settings: SolverSettings,
    *,
    network: bool = True,
    training: Training,
) -> ModeFit:
    """The mode by Adam on minibatches; the examples may be others whenever they are read.

    Args:
        J: Of the inputs.
        y: Targets, as the likelihood takes them.
        prior: Its scale is chosen on a part of the data, as it is read for that.
        likelihood: Of the targets.
        settings: Of that choice.
        network: Whether the mean function is the network's output, else zero.
        training: Epochs, minibatches, learning rate.
    """
    zero = None if network else torch.zeros(J.n, J.c, dtype=J.dtype, device=J.device)
    choice, examples = _choose_on_part(J, y, prior, likelihood, settings, mean=zero)
    variance = prior.variance(choice.scales if prior.scales else ())
    given: dict[str, Any] = {"network": network, "seed": settings.seed, "progress": settings.progress}
    # Minibatches leave far more than rounding: steps are in the dtype of the rows.
    rows = J.in_row_dtype()
    given |= {"variance": variance.to(rows.dtype), "likelihood": likelihood, "training": training}
    found = adam.train_by_adam(rows, y, **given)
    assert found.mode.u is not None
    posterior = PointPosterior(variance.sqrt() * found.mode.u.to(variance.dtype))
    passes = found.mode.passes
    return ModeFit(posterior, found.mode, variance, choice, "adam", examples, passes=passes, path=found.path)


def _fit_variational(
    data: Observations,
    how: InferenceOptions,
    variance: Tensor,
    delta: Tensor,
    *,
    K: Tensor | None = None,
    alpha: Tensor | None = None,
    preconditioner: Preconditioner | None = None,
) -> Variational:
    """The best Gaussian of a family, started at the mode: delta, or where there is a kernel K, alpha."""
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
    if not data.likelihood.diagonal:
        given["tolerance"] = DRAWN
    if K is not None and how.family in ("auto", "full"):
        given |= {"start": alpha, "samples": max(given["samples"], variational.SAMPLES)}
        return variational.full(data.J, data.y, **given).checked()
    if how.family == "full":
        raise NotImplementedError(
            "family='full' has a covariance in function space, which takes solver='function'. Use family='lowrank', or "
            "'auto', which is the one where it can be and else the other."
        )
    if how.family != "meanfield":
        return variational.lowrank(data.J, data.y, **given).checked()
    return variational.meanfield(data.J, data.y, preconditioner=preconditioner, **given).checked()


def _posterior(best: Variational, variance: Tensor, J: Jacobian) -> Posterior:
    if best.factor is not None and best.root is not None:
        return FunctionPosterior(J, variance, best.delta, root=best.root, factor=best.factor)
    if best.variances is not None:
        return DiagonalPosterior(best.delta, best.variances)
    assert best.basis is not None and best.C is not None
    return LowRankPosterior(variance, best.delta, basis=best.basis, C=best.C)


def _goal(settings: SolverSettings) -> float:
    """Of Newton's method: 1e-6 unless the user wants less."""
    return max(settings.tolerance, 1e-6)
