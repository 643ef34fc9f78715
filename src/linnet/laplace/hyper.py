"""Prior scales and noise of a network in training: the loss that they give, and the evidence that moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal, final

import torch
from torch import Tensor, nn

from linnet._estimator.inputs import as_targets, has_fast_float64
from linnet.data.batch import Batch, Source
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import linearize
from linnet.laplace.evidence import AtNetwork, Terms, group_norms
from linnet.laplace.search import Method, Search, best
from linnet.laplace.structures import Diagonal, Full, Function, Kron, Structure
from linnet.network.flat_output import FlatOutput
from linnet.network.functional_model import Output
from linnet.network.parameters import Params
from linnet.probability.likelihoods import Gaussian, Likelihood, likelihood_for
from linnet.probability.per_site import Sites
from linnet.probability.priors import PriorSpec, make_prior

StructureName = Literal["kron", "ekfac", "diag", "full", "function"]
STRUCTURES: dict[str, Callable[[Jacobian, Tensor], Structure]] = {
    "kron": Kron,
    "ekfac": lambda J, root: Kron(J, root, corrected=True),
    "diag": Diagonal,
    "full": Full,
    "function": Function,
}
KINDS = ("classification", "regression", "heteroscedastic")


@final
class Hyperparameters:
    """Scales of the prior and noise while they move, and what they mean for the loss and the evidence.

    Args:
        model: The network; its weights are read whenever the evidence is asked for.
        source: The training data.
        likelihood: A name of `KINDS`, or a likelihood.
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
        J = self._jacobian()
        self.y, self.n, self.c = as_targets(None, J), J.n, J.c
        self.unit = self._likelihood_of(likelihood)
        self.unit.targets(self.y, J.n, J.c)  # raises now rather than in the middle
        self.free_noise = likelihood == "regression" and noise is None
        self.noise = 1.0 if noise is None else float(noise)  # times that of ``unit``
        self.prior, self.layout = make_prior(J.lin, prior), J.lin.layout
        self.scales = [1.0] * max(1, len(self.prior.scales))
        self._adam: torch.optim.Adam | None = None
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
        lin = linearize(self.model, self.params, self.read)
        if has_fast_float64(lin.device):
            lin = lin.to(torch.float64)
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
        log_det = STRUCTURES[self.structure](J, self.unit.root(f)).log_det(self.prior)
        energy = None
        if self._base is not None:
            energy = float((self.unit.residual(f, y).square() / self.unit.curvature(f)).double().sum())
        theta = J.lin.layout.flatten(J.lin.theta)
        likelihood = float(self.unit.log_prob(f, y).double().sum())
        return AtNetwork(log_det, group_norms(theta, self.prior), likelihood, energy, f.numel())

    def improve(self, method: Method, steps: int | None, rate: float) -> Terms:
        """Move scales and noise; the evidence there."""
        evidence = self.evidence()
        terms = evidence(self.scales, self.noise)
        free = bool(self.prior.scales)
        if steps is None and (free or self.free_noise):
            search = Search(free, self.free_noise, method)
            cost = evidence.log_det.cost
            last = best(evidence, search, scales=self.scales, noise=self.noise, cost=cost)[-1]
            self._set(last.scales, last.noise)
            return evidence(self.scales, self.noise)
        # A group without curvature, or of zeros, has no best scale.
        known = [free and g > 0 and q > 0 for g, q in zip(terms.gamma, terms.shares, strict=True)]
        if self.free_noise and not terms.energy:
            raise ValueError(
                "The targets equal the network's outputs exactly, so that the evidence grows without bound as the "
                "noise shrinks. Give noise= as a number."
            )
        for _ in range(steps or 0):
            logs = self._mackay(terms, known) if method == "mackay" else self._ascent(terms, known, rate)
            *scales, noise = logs.exp().tolist()
            scales = [s if k else old for s, k, old in zip(scales, known, self.scales, strict=True)]
            self._set(scales, noise if self.free_noise else self.noise)
            terms = evidence(self.scales, self.noise)
        return terms

    def _mackay(self, terms: Terms, known: Sequence[bool]) -> Tensor:
        """Logarithms of scales and noise at which the slopes would vanish, were the effective dimensions constant."""
        moves = [math.log(q / g) if k else 0.0 for q, g, k in zip(terms.shares, terms.gamma, known, strict=True)]
        moves.append(math.log((terms.energy or 1.0) / (terms.rows - sum(terms.gamma))))
        return self._logs() + torch.tensor(moves, dtype=torch.float64)

    def _ascent(self, terms: Terms, known: Sequence[bool], rate: float) -> Tensor:
        """Logarithms of scales and noise after a step of Adam, which remembers those of earlier evidence steps."""
        if self._adam is None:
            self._adam = torch.optim.Adam([self._logs()], lr=rate, maximize=True)
        (logs,) = self._adam.param_groups[0]["params"]
        slopes = [d if k else 0.0 for d, k in zip(terms.slopes, known, strict=True)]
        logs.copy_(self._logs())
        logs.grad = torch.tensor([*slopes, terms.noise_slope], dtype=torch.float64)
        self._adam.step()
        return logs

    def _logs(self) -> Tensor:
        return torch.tensor([*self.scales, self.noise], dtype=torch.float64).log()

    def named_scales(self) -> dict[str, float]:
        return dict(zip(self.prior.scales, self.scales, strict=True)) if self.prior.scales else {}

    def spec(self) -> float | dict[str, float] | None:
        """The prior as `linnet.Laplace` takes it; None where only its variances say what it is."""
        if not self.prior.scales:
            return 1.0 if isinstance(self.given, str) else copy(self.given)  # type: ignore[return-value]
        named = self.named_scales()
        return {"shared": named.get("all"), "layerwise": named}.get(self.prior.name)
