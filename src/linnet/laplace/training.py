r"""Training with the prior chosen on the way by the Laplace evidence (Immer et al. 2021; MacKay 1992).

Steps of an ordinary optimizer on the log posterior alternate with steps on the prior's scales and the noise,

.. math:: \theta \to \text{fewer} \; -\log p(y \mid f(\theta)) + \tfrac12 \theta^\top A \theta, \qquad
          A, \sigma^2 \to \text{more} \; \log p(y \mid f) - \tfrac12 \theta^\top A \theta
          + \tfrac12 \log\det A - \tfrac12 \log\det H

so that no validation data is needed for the weight decay, which is A. Where the first steps run until nothing changes,
this is MacKay's loop of training and re-estimation. The evidence is that of `linnet.laplace.evidence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from linnet._estimator import Dtypes, as_targets, epoch, make_jacobian, shuffle
from linnet.data import Batch, Source, as_source
from linnet.jacobian import Jacobian, linearize
from linnet.laplace.evidence import AtNetwork, group_norms
from linnet.laplace.search import Method, Search, Step, choose
from linnet.laplace.structures import (
    CurvatureStructure,
    DiagonalCurvature,
    FullCurvature,
    KernelCurvature,
    KroneckerCurvature,
)
from linnet.network import FlatOutput, Output, Params, check_module, check_whole
from linnet.probability import Gaussian, Likelihood, PriorSpec, Sites, check_prior, likelihood_for, make_prior

StructureName = Literal["kron", "ekfac", "diag", "full", "function"]
STRUCTURES: dict[str, Callable[[Jacobian, Tensor], CurvatureStructure]] = {
    "kron": KroneckerCurvature,
    "ekfac": lambda J, root: KroneckerCurvature(J, root, corrected=True),
    "diag": DiagonalCurvature,
    "full": FullCurvature,
    "function": KernelCurvature,
}


@dataclass(frozen=True)
class EvidenceStep:
    """What an evidence step found.

    Attributes:
        epoch: After how many epochs of training.
        loss: Mean loss of the epoch before it.
        log_evidence: Of the weights then, with these scales and this noise.
        scales: Prior variances, or what the prior's base is multiplied by, by name.
        noise: Noise variance; None where the likelihood has none.
        dimension: The effective dimension: parameters that the data determine.
    """

    epoch: int
    loss: float
    log_evidence: float
    scales: dict[str, float]
    noise: float | None
    dimension: float


@dataclass(frozen=True)
class TrainedWithEvidence:
    """A network trained with its prior.

    Attributes:
        model: The network that was given, trained in place, in eval mode.
        best: The step that it stands at: of largest evidence, or the last.
        prior_variance: (p,), of the parameters in the order of ``linnet.linearize(model, params).theta``.
        prior: The same as `linnet.Laplace` takes it: a variance, or variances by layer; None for a prior that is
            neither.
        path: All evidence steps.
        losses: The mean loss of each epoch.
    """

    model: nn.Module
    best: EvidenceStep
    prior_variance: Tensor = field(repr=False)
    prior: float | dict[str, float] | None
    path: tuple[EvidenceStep, ...] = field(repr=False)
    losses: tuple[float, ...] = field(repr=False)

    @property
    def log_evidence(self) -> float:
        """Of ``best``."""
        return self.best.log_evidence

    @property
    def noise(self) -> float | None:
        """Of ``best``."""
        return self.best.noise


def train_with_evidence(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood = "classification",
    *,
    structure: StructureName = "kron",
    prior: PriorSpec = "layerwise",
    noise: float | None = None,
    params: Params = None,
    output: Output | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    epochs: int = 100,
    batch_size: int = 128,
    burn_in: int = 10,
    every: int = 1,
    steps: int | None = 10,
    rate: float = 0.1,
    method: Method = "gradient",
    keep: Literal["best", "last"] = "best",
    seed: int = 0,
    progress: Callable[[EvidenceStep], None] | None = None,
) -> TrainedWithEvidence:
    """Train a network **in place**, its weight decay (and noise) chosen by the evidence as it goes.

    The loss is the mean negative log likelihood plus the penalty ``theta^T A theta / (2 n)``; for Gaussian noise both
    are multiplied by the noise variance, so that the length of a step does not hang on it. Every evidence step reads
    all data once or a few times, whatever the structure takes.

    MacKay's loop is the case where training runs to convergence and the evidence to its maximum: L-BFGS on all data at
    once (``optimizer=lambda p: torch.optim.LBFGS(p, max_iter=500, line_search_fn="strong_wolfe")``,
    ``batch_size=n``), ``burn_in=0``, ``method="mackay"``, ``steps=None``, ``keep="last"``.

    Args:
        model: The network, on its device.
        data: Inputs with targets: a tuple of tensors, a dict, a Dataset or a DataLoader, as for
            ``lin.jacobian``. Shuffled where it can be read by position.
        likelihood: "classification", "regression", "heteroscedastic", "poisson", or a `linnet.likelihoods.Likelihood`:
            ordered classes, counts with dispersion and times with the parameters of theirs.
        structure: Of the curvature in the evidence, see `linnet.laplace.structures`: "kron", "ekfac", "diag", "full",
            "function".
        prior: "layerwise", "shared" or "ntk", whose scales are chosen; or fixed: "unit", a variance, variances by
            layer.
        noise: Variance of the noise of "regression"; None chooses it.
        params: Which parameters have the prior, as for `linnet.linearize`; others are trained without one.
        output: How to read the model's outputs, as for `linnet.linearize`.
        optimizer: From parameters to an optimizer.
        schedule: From the optimizer to a schedule, stepped once an epoch.
        epochs: Passes over the data.
        batch_size: Examples per step.
        burn_in: Epochs before the first evidence step.
        every: Epochs between evidence steps.
        steps: Updates in each evidence step; None goes on to the maximum.
        rate: Limit of the change of the logarithm of a scale or the noise in one update, for ``method="gradient"`` with
            a number of steps.
        method: "gradient", or "mackay" for the fixed point of the effective dimensions.
        keep: "best" goes back to the weights of largest evidence, "last" stays with the last evidence step's.
        seed: Of the order of the examples.
        progress: Called after each evidence step.

    Example:
        >>> X = torch.linspace(-2, 2, 40)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
        >>> found = train_with_evidence(model, (X, torch.sin(2 * X)), "regression", epochs=12, burn_in=10)
        >>> len(found.path), sorted(found.prior), found.noise > 0
        (2, ['0', '2'], True)
    """
    model = check_module(model)
    check_whole(model, "train_with_evidence")
    _check(likelihood, structure, prior, noise, epochs, batch_size, burn_in, every, steps, rate, method, keep)
    source = as_source(data, model)
    chosen = Hyperparameters(
        model,
        source,
        likelihood=likelihood,
        structure=structure,
        prior=prior,
        noise=noise,
        params=params,
        output=output,
    )
    maker = optimizer([p for p in model.parameters() if p.requires_grad])
    plan = None if schedule is None else schedule(maker)
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    path: list[EvidenceStep] = []
    kept: tuple[int, dict[str, Tensor], Tensor, float | dict[str, float] | None] | None = None
    for number in range(1, epochs + 1):
        model.train()
        losses.append(epoch(chosen.loss, shuffle(source, batch_size, random), maker))
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(
                f"The loss is {losses[-1]} in epoch {number}: the steps are too long. Give another optimizer=, with a "
                "lower rate."
            )
        if plan is not None:
            plan.step()
        if number <= burn_in or (number - burn_in - 1) % every:
            continue
        found = chosen.improve(method, steps, rate)
        scales, variance = chosen.named_scales(), chosen.noise_variance
        path.append(EvidenceStep(number, losses[-1], found.log_evidence, scales, variance, found.dimension))
        if progress is not None:
            progress(path[-1])
        if keep == "last" or kept is None or path[-1].log_evidence > path[kept[0]].log_evidence:
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            kept = len(path) - 1, weights, chosen.variance(), chosen.spec()
    assert kept is not None
    model.load_state_dict(kept[1])
    model.eval()
    return TrainedWithEvidence(model, path[kept[0]], kept[2], kept[3], tuple(path), tuple(losses))


@final
class Hyperparameters:
    """Scales of the prior and noise while they move, and what they mean for the loss and the evidence.

    Args:
        model: The network; its weights are read whenever the evidence is asked for.
        source: The training data.
        likelihood: A name, or a likelihood.
        structure: A name of `STRUCTURES`.
        prior: As users write it.
        noise: Its variance, for "regression"; None where it is free.
        params: Which parameters have the prior.
        output: How to read the model's outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        *,
        likelihood: str | Likelihood,
        structure: str,
        prior: PriorSpec,
        noise: float | None,
        params: Params,
        output: Output | None,
    ) -> None:
        self.model, self.source, self.structure, self.params = model, source, structure, params
        self.read, self.given = FlatOutput(output), prior
        J = make_jacobian(model, "auto", self._make)
        self.y, self.n, self.c = as_targets(None, J), J.n, J.c
        self.unit = self._likelihood_of(likelihood)
        self.unit.targets(self.y, J.n, J.c)  # raises now rather than in the middle
        self.free_noise = likelihood == "regression" and noise is None
        self.noise = 1.0 if noise is None else float(noise)  # times that of ``unit``
        self.prior, self.layout = make_prior(J.lin, prior), J.lin.layout
        self.scales = [1.0] * max(1, len(self.prior.scales))
        self._set(self.scales, self.noise)

    def _set(self, scales: Sequence[float], noise: float) -> None:
        self.scales, self.noise = list(scales), noise
        self._variances = self.layout.unflatten(self.variance())

    @property
    def _base(self) -> float | Tensor | None:
        """The noise variance of ``unit``; None where it has none."""
        inner = self.unit.inner if isinstance(self.unit, Sites) else self.unit
        return inner.noise if isinstance(inner, Gaussian) else None

    @property
    def noise_variance(self) -> float | None:
        """The noise, where it is one number."""
        base = self._base
        return base * self.noise if isinstance(base, float) else None

    def _likelihood_of(self, given: str | Likelihood) -> Likelihood:
        """At noise one, but where the user gave it with its own."""
        shape = self.read.shape
        found = likelihood_for(given, self.y, shape or (self.c,))
        return Sites(found, shape) if shape else found

    def _jacobian(self) -> Jacobian:
        """At the present weights and buffers, in eval mode."""
        return self._make(self._dtypes)

    def _make(self, dtypes: Dtypes) -> Jacobian:
        self._dtypes = dtypes
        lin = dtypes.apply(linearize(self.model, self.params, self.read))
        return lin.jacobian(self.source, progress=False)

    def variance(self) -> Tensor:
        return self.prior.variance(self.scales) if self.prior.scales else self.prior.base

    def loss(self, batch: Batch) -> Tensor:
        device = next(self.model.parameters()).device
        batch = batch.to(device)
        f = self.read(self.model(*batch.args, **batch.kwargs))
        f = f[:, None] if f.ndim == 1 else f
        y = self.unit.targets(batch.rest, batch.n, self.c, dtype=f.dtype, device=device)
        named = dict(self.model.named_parameters())
        penalty = f.new_zeros(())
        for name, variance in self._variances.items():
            penalty = penalty + (named[name].square() / variance.to(named[name])).sum().to(f)
        return -self.unit.log_prob(f, y).mean() + 0.5 * self.noise / self.n * penalty

    def evidence(self) -> AtNetwork:
        """At the present weights."""
        J = self._jacobian()
        f = J.outputs()
        y = self.unit.targets(self.y, J.n, J.c, dtype=J.dtype, device=J.device)
        log_det = STRUCTURES[self.structure](J, self.unit.observed_root(f, y)).log_det(self.prior)
        energy = None
        if self._base is not None:
            energy = float((self.unit.residual(f, y).square() / self.unit.observed_curvature(f, y)).double().sum())
        theta = J.lin.flat_theta
        likelihood = float(self.unit.log_prob(f, y).double().sum())
        return AtNetwork(log_det, group_norms(theta, self.prior), likelihood, energy, f.numel())

    def improve(self, method: Method, steps: int | None, rate: float) -> Step:
        """Move scales and noise; the evidence there."""
        search = Search(bool(self.prior.scales), self.free_noise, method)
        if steps is not None:
            search = replace(search, steps=steps, finish=False, longest=rate if method == "gradient" else math.inf)
        evidence = self.evidence()
        cost = evidence.log_det.cost
        last = choose(evidence, search, scales=self.scales, noise=self.noise, cost=cost)[-1]
        self._set(last.scales, last.noise)
        return last

    def named_scales(self) -> dict[str, float]:
        return dict(zip(self.prior.scales, self.scales, strict=True)) if self.prior.scales else {}

    def spec(self) -> float | dict[str, float] | None:
        """The prior as `linnet.Laplace` takes it; None where only its variances say what it is."""
        if not self.prior.scales:
            return 1.0 if isinstance(self.given, str) else copy(self.given)  # type: ignore[return-value]
        named = self.named_scales()
        return {"shared": named.get("all"), "layerwise": named}.get(self.prior.name)


def _check(
    likelihood: str | Likelihood,
    structure: str,
    prior: PriorSpec,
    noise: float | None,
    epochs: int,
    batch_size: int,
    burn_in: int,
    every: int,
    steps: int | None,
    rate: float,
    method: str,
    keep: str,
) -> None:
    check_prior(prior)
    if prior == "balanced":
        raise ValueError(
            "prior='balanced' is made from the Jacobian at fixed weights, and here they move. Use 'layerwise', "
            "'shared' or 'ntk'."
        )
    found = likelihood_for(likelihood, torch.empty(0), (1,))
    if found.is_open:
        raise ValueError(
            f"The network is trained with the likelihood, so that {found!r} needs its parameters from the start: give "
            f"them, as in likelihood=linnet.likelihoods.{type(found).__name__}(...)."
        )
    if noise is not None and (likelihood != "regression" or not 0 < noise < math.inf):
        raise ValueError(f"noise is a positive variance, and for 'regression'; got {noise!r} for {likelihood!r}.")
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {', '.join(map(repr, STRUCTURES))}; got {structure!r}.")
    if method not in ("gradient", "mackay"):
        raise ValueError(f"method must be 'gradient' or 'mackay'; got {method!r}.")
    if keep not in ("best", "last"):
        raise ValueError(f"keep must be 'best' or 'last'; got {keep!r}.")
    given = {"epochs": epochs, "batch_size": batch_size, "every": every, "steps": 1 if steps is None else steps}
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive number; got {value!r}.")
    if not 0 <= burn_in < epochs:
        raise ValueError(f"burn_in must leave an epoch for an evidence step: from 0 to {epochs - 1}; got {burn_in!r}.")
    if not rate > 0:
        raise ValueError(f"rate must be positive; got {rate!r}.")
