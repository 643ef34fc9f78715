"""What the doors with a likelihood share: the posterior of the linearized network for any likelihood of the targets."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import check_fits, together
from linnet._estimator import (
    Counted,
    Dtypes,
    WithSource,
    by_members,
    check_has_exact,
    draw_inputs,
    has_targets_in_memory,
    join_inputs,
    leave_out_weightless,
    list_options,
    take_parts,
    warn_of_probabilities,
)
from linnet.data import as_source
from linnet.inference import (
    Inference,
    InferenceOptions,
    Mode,
    ModeFit,
    Observations,
    Training,
    any_likelihood,
    bound_distance,
    check_only_map,
    check_outputs_fit,
    choose_likelihood_solver,
    searches_all_features,
)
from linnet.jacobian import Jacobian, linearize
from linnet.network import check_module
from linnet.probability import Bernoulli, Categorical, Likelihood, Prior, PriorSpec, Weighted, check_prior, make_prior
from linnet.tangent.base import Tangent


class Generalized(Tangent):
    """Base of the estimators whose targets have a likelihood without a closed form; the settings are theirs.

    Attributes after fitting:
        likelihood_: Of the targets, with the parameters that were found.
    """

    inference: Inference
    family: str
    prior: PriorSpec
    epochs: int
    minibatch: int
    learning_rate: float | str
    variance: str
    likelihood: str | Likelihood

    likelihood_: Likelihood
    mode_: Mode | None
    _weight: Tensor | None = None
    _observed: Tensor | None = None  # the targets of the training examples, as the likelihood takes them

    _SHARED: ClassVar[tuple[str, ...]] = (*Tangent._SHARED, "scale_examples_", "likelihood_", "prior_")

    # What an estimator says about its network and its targets.

    def _network(self, X: Any, y: Any, weight: Tensor | None) -> nn.Module:
        """The network that adapts."""
        return check_module(self.model)

    def _without_ignored(self, inputs: Any, y: Any, J: Jacobian) -> tuple[Any, Any, Counted] | None:
        """Inputs, targets and which examples count, where some do not; J is that of all inputs."""
        return None

    def _observe(self, y: Any, J: Jacobian, *, refit: bool) -> Tensor:
        """Targets as the likelihood takes them; sets ``likelihood_``, unless an earlier fit has found it."""
        raise NotImplementedError

    def _new_targets(self, y: Any, J: Jacobian) -> Tensor:
        """Targets of new examples, as the likelihood takes them; None where they come with the inputs."""
        y = J.targets() if y is None else y
        return self.likelihood_.targets(y, J.n, J.c, dtype=J.dtype, device=J.device)

    # The posterior.

    def _how(self, eps: float = 0.0) -> tuple[InferenceOptions, Training | None]:
        """How to condition with passes that round by ``eps``, and how to train where that is by minibatches."""
        if self.solver != "adam":
            return InferenceOptions(self.inference, self.family, self._settings(eps)), None
        check_only_map(self.inference)
        training = Training(self.epochs, self.minibatch, self.learning_rate)
        return InferenceOptions(self.inference, self.family, self._settings(eps, solver="auto")), training

    def _fit_likelihood(self, inputs: Any, y: Any, sample_weight: Any, source: Any = None) -> ModeFit:
        """Find prior, posterior and open parameters of the likelihood."""
        forward = None if self.model is None else check_module(self.model).forward
        inputs, weight, kept = leave_out_weightless(inputs, sample_weight, forward)
        y = kept.take(y)
        self._source = None
        if source is not None:
            both = WithSource.join(self, inputs, y, weight, source)
            inputs, y, weight, self._source = both.inputs, both.y, both.weight, range(both.start, both.stop)
        model = self._network(inputs, y, weight) if self._around is None else self._around.network
        known = self._known_mean(model)
        self.mean_, self.selection_ = "network" if known == "auto" else known, None
        self._choose(model, inputs)
        J = self._attached_jacobian(model, inputs, self.dtype)
        fit = self._condition(inputs, y, J=J, weight=weight)
        names = ["all"] if len(fit.choice.scales) == 1 else list(self.lin_.layout.layers)
        self.scales_ = dict(zip(names, fit.choice.scales, strict=True)) if isinstance(self.prior, str) else {}
        self.scale_examples_ = fit.examples
        return fit

    def _refit_likelihood(self, inputs: Any, y: Any, sample_weight: Any) -> Any:
        """An estimator for other data, with the prior and the likelihood found here."""
        self._check_own_weights("refit")
        if self._source is not None:
            raise NotImplementedError(
                "refit keeps the prior, and the prior of a fit with source= is the posterior of the source. Use "
                "fit(X, y, source=...) for other data."
            )
        other = self._without_data()
        if other.merged_:
            other.merged_ = False
        inputs, weight, kept = leave_out_weightless(inputs, sample_weight, self.lin_.module.forward)
        other._condition(inputs, kept.take(y), Prior("given", self.prior_variance_), weight=weight)
        return other

    # More and fewer examples.

    @by_members
    @together
    def condition(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """An estimator that has also seen (X, y), with the same prior and likelihood.

        It equals `refit` on all examples together. The search for the mode begins at the old mode. This one stays as it
        is.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, as for `fit`.
        """
        check_is_fitted(self)
        self._check_own_weights("condition")
        self._check_examples("condition")
        seen = self._seen_targets()
        forward = self.lin_.module.forward
        X, weight, counted = leave_out_weightless(self._inputs(X, reset=False), sample_weight, forward)
        y, other = counted.take(y), self._without_data()
        J = self._jacobian(X)
        fewer = self._without_ignored(X, y, J)
        if fewer is not None:
            X, y, weight = fewer[0], fewer[1], fewer[2].take(weight)
            J = self._jacobian(X)
        targets = torch.cat([seen, other._observe(y, J, refit=True).to(seen)])
        weights = _join_weights(self._weight, len(seen), weight, J.n)
        self._check_has_inputs("condition")
        return self._go_on(other, join_inputs(self._train_inputs[0], X, forward), targets, weights)

    def _seen_targets(self) -> Tensor:
        if self.solver_ == "adam":
            raise NotImplementedError(
                "solver='adam' stops short of the mode, and may have seen other examples in every epoch: the posterior "
                "cannot go on from there. Fit again with the data that count, or use another solver."
            )
        if self._observed is None:
            raise ValueError(
                "The file was written by an earlier version of linnet, and holds no targets. Fit again with the data "
                "that count."
            )
        return self._observed

    def _encode_targets(self, X: Any, y: Any) -> Tensor:
        return self._without_data()._observe(y, self._jacobian(X), refit=True)

    def _without(self, kept: Tensor, n: int) -> Self:
        self._check_has_inputs("forget")
        (inputs,) = take_parts(self._train_inputs, kept, self.lin_.module.forward)
        weight = None if self._weight is None else self._weight[kept.to(self._weight.device)]
        weight = None if weight is None or bool((weight == 1).all()) else weight
        targets = self._seen_targets()
        return self._go_on(self._without_history(kept, n), inputs, targets[kept.to(targets.device)], weight)

    def _go_on(self, other: Self, inputs: Any, targets: Tensor, weight: Tensor | None) -> Self:
        """``other`` with the posterior of some examples, whose mode is searched from the mode here."""
        if "_tensors" in vars(self):  # whether labels are tensors
            setattr(other, "_tensors", vars(self)["_tensors"])  # noqa: B010
        given = Prior("given", self.prior_variance_)
        other._condition(inputs, None, given, weight=weight, observed=targets, start=self.posterior_.delta)
        return other

    def _bound_errors(self) -> tuple[float | None, float | None]:
        self._check_has_inputs("certificate_")
        if self.inference == "vi":
            return None, None
        y, likelihood = self._seen_targets(), self.likelihood_
        J = self._jacobian(self._train_inputs[0]).cached_if_fits()
        if self._weight is not None:
            likelihood, y = Weighted.pack(likelihood, y, self._weight.to(J.device, J.dtype))
        base = self._base(J)

        def residual(shift: Tensor) -> Tensor:
            return likelihood.residual(base + shift.view_as(base), y).flatten()

        def size(shift: Tensor) -> Tensor:
            step, here = 1e-6, residual(shift)
            moved = likelihood.residual((1 + step) * (base + shift.view_as(base)), y).flatten()
            return here.abs() + (moved - here).abs() / step

        return bound_distance(J, self.prior_variance_, self.posterior_.delta, residual, size), None

    def _condition(
        self,
        inputs: Any,
        y: Any,
        prior: Prior | None = None,
        *,
        J: Jacobian | None = None,
        weight: Tensor | None = None,
        observed: Tensor | None = None,
        start: Tensor | None = None,
    ) -> ModeFit:
        """Find the posterior.

        Args:
            inputs: Inputs.
            y: Targets; None where they come with the inputs.
            prior: The prior, where it is known; None for the one that was asked for.
            J: The Jacobian of the inputs, where it is there.
            weight: How many times each example counts, (n,); None for once.
            observed: The targets as the likelihood takes them, where they are known, in place of y.
            start: A displacement near the mode, (p,); None for zero.
        """
        lin, refit = self.lin_, prior is not None
        how, training = self._how(torch.finfo(lin.dtype).eps)
        source = as_source(inputs, lin.module.forward)
        source = source if training is None else source.changing()
        self._probe = draw_inputs(source)
        check_prior(self.prior, lin)
        J = self._jacobian(source) if J is None or training is not None else J
        early = observed is None and has_targets_in_memory(y, J)  # targets at hand are checked before any pass
        if early:
            fewer = self._without_ignored(inputs, y, J)
            if fewer is not None:
                return self._condition(*fewer[:2], prior, weight=fewer[2].take(weight))
        check_outputs_fit(J)
        if training is None:  # whether the solver fits memory is known before any pass
            kernels = len(lin.layout.layers) if self.prior == "layerwise" and prior is None else 1
            solver = choose_likelihood_solver(
                *J.shape, how.settings, device=J.device, kernels=kernels + 1, inference=how.inference
            )
            if solver.startswith("cg") or (solver == "weight" and not searches_all_features(*J.shape, J.device)):
                how, _ = self._how(J.eps)  # the mode is found by passes
            if self.inference == "vi" and J.c > 1:
                check_fits(
                    4 * J.n * J.c**2 * J.dtype.itemsize,
                    self.memory,
                    J.device,
                    what=f"inference='vi' with {J.n:,} examples and {J.c:,} classes",
                    instead="Use inference='laplace' or 'map'",
                )
            if solver == "cg-weight" and self.inference == "laplace":
                check_has_exact(self.variance, f"inference='laplace' with solver={solver!r}", "inference='vi'")
        targets = self._observe(y, J, refit=refit) if early else observed
        J = J if source.changes else J.cached_if_fits()
        if targets is None:
            fewer = self._without_ignored(inputs, y, J)
            if fewer is not None:
                return self._condition(*fewer[:2], prior, weight=fewer[2].take(weight))
            targets = self._observe(None, J, refit=refit)
        lin.check_ranks_agree(options=list_options(self), labels=targets)
        if prior is None and self._around is not None:
            prior = self._around.prior
        if prior is None:
            rows = None if weight is None else weight.to(J.device, J.dtype).repeat_interleave(J.c)
            prior = make_prior(lin, self.prior, J=J, weight=rows)
        if not refit:
            self.likelihood_ = self._fit_parameters(J, targets, weight)
        self._observed = targets
        likelihood: Likelihood = self.likelihood_
        if weight is not None:
            likelihood, targets = Weighted.pack(likelihood, targets, weight.to(J.device, J.dtype))
        if training is not None:
            network = self.mean_ == "network"
            fit = any_likelihood.train(J, targets, prior, likelihood, how.settings, network=network, training=training)
        else:
            base = self._prior_base(J)
            if isinstance(self.likelihood_, Bernoulli | Categorical) and self.mean_ == "network" and not self._around:
                warn_of_probabilities(base, lin.given)
                if not refit:
                    self._check_order(base)
            fit = any_likelihood.condition(Observations(J, targets, base, likelihood, start), prior, how, solver)
        lin.check_unchanged(contents=True)
        self.posterior_, self.prior_variance_, self.mode_, self.prior_ = fit.posterior, fit.variance, fit.mode, prior
        self._count_from_weights()
        self._settle_variance(J)
        self.log_evidence_, self.log_evidence_error_ = fit.log_evidence, fit.error
        self.elbo_path_ = () if fit.best is None else fit.best.path
        self.elbo_ = None if fit.best is None else fit.best.elbo
        self.solver_, self.solution_, self._train_inputs = fit.solver, fit.solution, [inputs]
        self.passes_, self.objective_path_ = fit.passes, fit.path
        self.evidence_path_, self._weight, self._kept = fit.choice.path, weight, {}
        return fit

    def _loss_of(self, f: Tensor) -> float:
        assert self._observed is not None
        each = self.likelihood_.log_prob(f, self._observed)
        return -float((each if self._weight is None else self._weight.to(each) * each).sum())

    def _check_order(self, f: Tensor) -> None:
        """Look at the outputs (n, c) of the network for the training data. Classifiers compare them with the labels."""

    def _fit_parameters(self, J: Jacobian, targets: Tensor, weight: Tensor | None) -> Likelihood:
        """The likelihood with the parameters that were left open, at the mean function."""
        found = self.likelihood_
        return found.fitted(self._base(J), targets, weight) if found.is_open else found

    @together
    def _check_applied(self) -> None:
        if not self._train_inputs or self._observed is None:  # a file that holds no training data
            return
        source = as_source(self._train_inputs[0], self.lin_.module.forward)
        J = self._jacobian(source.changing() if self.solver_ == "adam" else source)
        y, w = self._observed, torch.ones(J.n) if self._weight is None else self._weight
        losses = []
        for theta in (None, self.lin_.move_theta(self.posterior_.delta)):
            each = self.likelihood_.log_prob(J.outputs(theta), y)
            losses.append(-float((w.to(each) * each).sum() / w.sum()))
        self._warn_if_worse("mean negative log probability of a target", *losses)

    def _attach(self, network: nn.Module, dtypes: Dtypes) -> None:
        self._dtypes, self.lin_ = dtypes, dtypes.apply(linearize(network, self._selected, self.output))

    # Files.

    def _take_settings(self, first: Any) -> None:
        self.mode_, self._weight, self.passes_ = None, None, first.passes_
        self.elbo_, self.elbo_path_, self.objective_path_, self.evidence_path_ = None, (), (), ()

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta: dict[str, Any] = {"elbo": self.elbo_, "scale_examples": self.scale_examples_, "passes": self.passes_}
        meta |= {"merged": True} if self.merged_ else {}
        meta |= {} if self._source is None else {"source": [self._source.start, self._source.stop]}
        meta |= {"forgotten": self._forgotten} if self._forgotten else {}
        tensors = {} if self._weight is None else {"weight": self._weight}
        return meta, tensors | ({} if self._observed is None else {"targets": self._observed})

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        self.elbo_, self.elbo_path_, self.scale_examples_ = meta["elbo"], (), meta["scale_examples"]
        self.passes_, self.objective_path_, self.evidence_path_ = meta["passes"], (), ()
        self.mode_, self._weight, self.merged_ = None, tensors.get("weight"), meta.get("merged", False)
        self.prior_ = Prior("given", self.prior_variance_)
        self._source = range(*meta["source"]) if "source" in meta else None
        self._observed, self._forgotten, self._kept = tensors.get("targets"), meta.get("forgotten", 0), {}


def _join_weights(first: Tensor | None, n: int, second: Tensor | None, m: int) -> Tensor | None:
    """The weights of n examples and m others; None where each counts once."""
    if first is None and second is None:
        return None
    both = [torch.ones(k) if w is None else w.cpu() for w, k in ((first, n), (second, m))]
    return torch.cat([w.double() for w in both])
