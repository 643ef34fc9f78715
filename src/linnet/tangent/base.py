"""What the estimators of the linearized network share: inputs and outputs, the adapted model, how linear it is."""

from __future__ import annotations

import copy
import os
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import check_fits, forward_mode, together
from linnet._estimator import (
    Dtypes,
    EnsembleMixin,
    ErrorBarsMixin,
    Linearity,
    by_members,
    check_inputs,
    find_kept,
    is_ensemble,
    make_jacobian,
    make_predictive_module,
    parse_dtype,
)
from linnet._estimator import files as saved
from linnet.data import Batch, SingleBatch, as_source
from linnet.inference import CHOSEN, FEATURES, HEAD, STANDARD, Certificate, SolverSettings
from linnet.jacobian import Jacobian, Linearization, NetworkChunks, PassSettings, linearize
from linnet.network import block_names, check_whole, has_fitted_head, select, top_blocks
from linnet.probability import Posterior, Prior, Spread, layer_sums
from linnet.tangent import files
from linnet.tangent.input_features import NAME, PREFIX, InputFeatures, NetworkWithInputs, own_name

if TYPE_CHECKING:
    from linnet.tangent.relinearization import Around, Relinearization

Mean = Literal["auto", "network", "zero"]


class Tangent(EnsembleMixin, ErrorBarsMixin, BaseEstimator):
    """Base of `TangentRegressor` and `TangentClassifier`; the settings are theirs.

    Attributes after fitting:
        lin_: The linearization.
        posterior_: Over the displacement of the parameters.
        prior_variance_: (p,).
        mean_: The mean function, "network" or "zero".
        merged_: Whether `linnet.merge` made the estimator, which then holds no training data.
        selection_: Rows of what was compared, one of them chosen: the mean functions, or the ways of `linnet.adapt`;
            None where nothing was.
        relinearized_: The steps of ``relinearize=``, in order; () where none was tried.
    """

    model: Any
    params: Any
    top: int | str | None
    output: Any
    mean: Mean
    dtype: torch.dtype | str
    solver: Any
    tolerance: float | str
    iterations: int
    preconditioner: Any
    rank: int | str
    samples: int
    seed: int
    batch_size: int | str
    memory: float | str
    progress: bool | None

    relinearize: int = 0

    lin_: Linearization
    _dtypes: Dtypes
    posterior_: Posterior
    prior_variance_: Tensor
    mean_: str
    scales_: dict[str, float]
    log_evidence_: float | None
    log_evidence_error_: float
    solver_: str
    solution_: Any
    merged_: bool = False
    top_: int | None = None
    top_path_: dict[int, float] | None = None
    _train_inputs: list[Any]
    _probe: Batch | None = None
    _chosen: list[str] | None = None
    _level: Tensor | None = None
    _source: range | None = None
    _forgotten: int = 0  # examples
    _features: InputFeatures | None = None  # of the inputs, beside the network
    _outputs: int = 1  # of the network, where there are features
    _made: dict[str, Any] | None = None  # how the network was made from that of the user
    selection_: tuple[Any, ...] | None = None
    relinearized_: tuple[Relinearization, ...] = ()
    prior_: Prior
    _around: Around | None = None  # of the fit that goes on
    _shift: Tensor | None = None  # how far the weights of lin_ are from those where the prior is centered
    _kept: dict[str, Any]

    _SHARED: ClassVar[tuple[str, ...]] = (
        *("lin_", "_dtypes", "top_", "top_path_", "_chosen", "_probe", "_made", "merged_"),  # of the network
        *("n_features_in_", "feature_names_in_"),  # of the inputs
        *("scales_", "mean_", "selection_", "_level", "_source", "_forgotten"),  # of the prior and the mean function
        *("_around", "_shift", "relinearized_"),  # of the weights
        *("_features", "_outputs"),  # of the inputs, beside the network
    )
    """Attributes that an estimator has in common with one that it makes for other data."""

    # Which parameters.

    @property
    def _selected(self) -> Any:
        """As `linnet.linearize` takes them: what ``top`` stands for, or ``params``."""
        return self.params if self._chosen is None else self._chosen

    def _choose(self, network: nn.Module, X: Any) -> None:
        """Find the parameters of the top blocks where they are asked for; X shows in which order blocks are called."""
        self.top_, self._chosen = None, None
        if self.top is None:
            return
        self._check_top()
        if self.top == "evidence":
            raise ValueError(
                "top='evidence' compares fits of one set of data that stays the same, so that it goes neither with "
                "fit_tasks nor with solver='adam'; give top= as a number of blocks."
            )
        assert isinstance(self.top, int)
        first = next(network.parameters())
        batch = next(iter(as_source(X, network.forward).batches(2))).to(first.device)
        batch = batch.with_inputs(lambda t: t.to(first.dtype) if t.is_floating_point() else t)
        self.top_ = self.top
        self._chosen = top_blocks(network, self.top, example=batch.kwargs or batch.args)

    def _check_top(self) -> None:
        if self.params is not None:
            raise ValueError("params= and top= both say which parameters adapt; give one of them.")
        if self.model is None:
            raise ValueError("top= chooses blocks of a trained network; pass it as model=.")
        known = isinstance(self.top, int) and not isinstance(self.top, bool) and self.top >= 0
        if self.top != "evidence" and not known:
            raise ValueError(f"top must be a number of blocks or 'evidence'; got {self.top!r}.")

    def _fit_by_evidence(self, X: Any, y: Any, sample_weight: Any, source: Any = None) -> None:
        """One block more at a time, from the top, while the evidence rises; then as fitted with the best number."""
        self._check_top()
        assert self.model is not None
        path: dict[int, float] = {}
        best: Tangent | None = None
        more = {} if source is None else {"source": source}
        given = self.get_params(deep=False)
        for k in range(1, len(block_names(self.model)) + 1):
            changed = {"inference": "laplace"} if "inference" in given else {}  # which has an evidence
            trial = type(self)(**given | changed | {"top": k}).fit(X, y, sample_weight, **more)
            assert trial.log_evidence_ is not None
            path[k] = trial.log_evidence_
            if best is not None and path[k] <= path[best.top_ or 0]:
                break
            best = trial
        if best is None:
            raise ValueError("The model has no blocks below its head; choose parameters by name with params=.")
        if getattr(self, "inference", "laplace") != "laplace":
            best = type(self)(**given | {"top": best.top_}).fit(X, y, sample_weight, **more)
        self.__dict__.update(best.__dict__ | given | {"top_path_": path})

    def _without_data(self) -> Self:
        """A new estimator with the settings of this one, and with the findings of this one in `_SHARED`."""
        other = type(self)(**self.get_params(deep=False))
        for name in self._SHARED:
            if name in vars(self):
                setattr(other, name, vars(self)[name])
        return other

    def _without_examples(self, posterior: Posterior, log_evidence: float | None) -> Self:
        """This estimator with another posterior, and without anything that is made of examples."""
        other = self._without_data()
        other._probe, other.merged_ = None, True
        other.posterior_, other.prior_variance_ = posterior, self.prior_variance_
        other.log_evidence_, other.log_evidence_error_ = log_evidence, self.log_evidence_error_
        other.solver_, other.solution_, other.variance_ = self.solver_, None, self.variance_
        other._train_inputs = []
        other._take_settings(self)
        return other

    def _take_settings(self, first: Self) -> None:
        """What `_without_examples` sets in an estimator of this class, from the one that it comes from."""
        raise NotImplementedError

    def _check_examples(self, what: str) -> None:
        if self.merged_:
            raise ValueError(
                f"{what} needs the training data, and an estimator of linnet.merge holds none. Ask the estimators that "
                "were merged, or fit all data together."
            )

    def _carry_on(self, earlier: Tangent, X: Any, y: Any, sample_weight: Any) -> None:
        """Take over the posterior of an earlier estimator that has seen (X, y) too."""
        check_is_fitted(earlier)
        kind = type(self).__name__
        if type(earlier) is not type(self):
            raise TypeError(f"source= of a {kind} is data, or a fitted {kind}; got a {type(earlier).__name__}.")
        condition = getattr(earlier, "condition", None)
        if condition is None:
            raise NotImplementedError(
                f"A fitted {kind} takes no more examples. Give the data themselves as source=(X0, y0), or fit both and "
                "use linnet.merge."
            )
        if self.model is None or is_ensemble(self) or is_ensemble(earlier):
            raise ValueError("source= with a fitted estimator is for one network, which both have as model=.")
        self._choose(self.model, X)
        names, known = list(select(self.model, self._selected)), earlier._own_parameters()
        if names != known or saved.checksum(self.model) != saved.base_of(earlier):
            raise ValueError(
                f"source= was fitted around other weights, or over other parameters: {len(known)} tensors there and "
                f"{len(names)} here. Both need the same network and the same params=."
            )
        given = self.get_params(deep=False)
        self.__dict__.update(condition(X, y, sample_weight).__dict__ | given)

    # Around other weights.

    def _settle(self, around: Around | None) -> None:
        """Which weights the network is linearized around in the fit that follows; None for its own."""
        self._around, self._shift = around, None if around is None else around.shift

    def _prior_base(self, J: Jacobian) -> Tensor:
        """The mean function where the prior is centered, at the inputs of J, (n, c): residuals are less this."""
        base = self._base(J)
        return base if self._shift is None else base - (J @ self._shift).view_as(base)

    def _count_from_weights(self) -> None:
        """Count the displacement of a new posterior from the weights of ``lin_``, as predictions do."""
        if self._shift is not None:
            self.posterior_.delta = self.posterior_.delta - self._shift

    def _loss_of(self, f: Tensor) -> float:
        """Minus the log density of the training targets, up to a constant, where the network's outputs are f (n, c)."""
        raise NotImplementedError

    def _check_own_weights(self, what: str) -> None:
        """Raise where the prior is not centered at the weights that the network is linearized around."""
        if self._shift is not None:
            raise NotImplementedError(
                f"{what} is not known for a network that was linearized around other weights (relinearize=): the prior "
                "is centered at the weights of the given network. Fit again with all data, or with relinearize=0."
            )

    # Without some examples.

    @by_members
    @together
    def forget(self, examples: Any, y: Any = None) -> Self:
        """An estimator that goes on without some examples, with the same prior, noise and mean function.

        It equals ``refit`` on the examples that stay: the prior scales, the noise and the mean function are kept, and
        nothing else of the forgotten examples is in it, in its predictions or in its file. `certificate_` says how far
        from such a refit it can be, and what still depends on the forgotten examples. To choose scales and noise anew,
        fit again. This one stays as it is.

        Args:
            examples: Positions of the examples among those that the posterior has seen, as whole numbers or as a mask:
                in the order in which `fit` and ``condition`` were given them, without examples of weight zero and
                examples whose label is ignored. Or the inputs of the examples, as `fit` takes them.
            y: The targets of the examples, where inputs are given that do not carry them.

        Example:
            >>> from linnet import TangentRegressor
            >>> X = torch.linspace(-2, 2, 20)[:, None]
            >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
            >>> reg = TangentRegressor(model).fit(X, torch.sin(2 * X[:, 0]))
            >>> less = reg.forget([3, 4])
            >>> less.certificate_.forgotten, less.certificate_.mean < 1e-6
            (2, True)
        """
        check_is_fitted(self)
        self._check_own_weights("forget")
        self._check_examples("forget")
        targets, encode = self._seen_targets(), self._encode_targets
        return self._without(
            find_kept(self, examples, y, seen=self._train_inputs, targets=targets, encode=encode), len(targets)
        )

    @property
    @by_members
    def certificate_(self) -> Certificate:
        """How far the posterior can be from a `refit` on the examples that it has seen and not forgotten.

        It is measured when it is asked for, by products with the Jacobian of these examples.
        """
        check_is_fitted(self)
        self._check_own_weights("certificate_")
        self._check_examples("certificate_")
        if "certificate" not in self._kept:
            remains = [CHOSEN] if self._forgotten else []
            remains += [STANDARD] if self._forgotten and self.model is None else []
            remains += [FEATURES] if self._forgotten and self._features is not None else []
            remains += [HEAD] if self._forgotten and has_fitted_head(self.lin_.given) else []
            self._kept["certificate"] = Certificate(self._forgotten, *self._bound_errors(), tuple(remains))
        return self._kept["certificate"]

    def _seen_targets(self) -> Tensor:
        """The targets of the training examples, (n, ...)."""
        raise NotImplementedError

    def _encode_targets(self, X: Any, y: Any) -> Tensor:
        """Targets of the user as `_seen_targets` has them."""
        raise NotImplementedError

    def _without(self, kept: Tensor, n: int) -> Self:
        """An estimator for the examples that stay, (m,), of n."""
        raise NotImplementedError

    def _bound_errors(self) -> tuple[float | None, float | None]:
        """Bounds of the error of mean and variance, as `Certificate` has them."""
        raise NotImplementedError

    def _check_has_inputs(self, what: str) -> None:
        """Raise where an estimator from a file has not kept its training inputs."""
        if not self._train_inputs:
            raise ValueError(
                f"{what} needs the training inputs here, which a file holds only where they were tensors or arrays. "
                "Fit again with the data that count."
            )

    def _without_history(self, kept: Tensor, n: int) -> Self:
        """As `_without_data`, without what only tells how earlier fits to n examples went."""
        other = self._without_data()
        other.selection_, other.top_path_, other._forgotten = None, None, self._forgotten + n - len(kept)
        if self._source is not None:
            start = int((kept < self._source.start).sum())
            stays = (kept >= self._source.start) & (kept < self._source.stop)
            other._source = range(start, start + int(stays.sum()))
        return other

    # From the user's data to Jacobians and back.

    def _inputs(self, X: Any, *, reset: bool) -> Any:
        return check_inputs(self, X, reset=reset, flat=self.model is None)

    def _tolerance(self, eps: float = 0.0) -> float:
        """Of iterative solves: what products with a relative rounding of ``eps`` allow."""
        if self.tolerance == "auto":
            return max(1e-6, 1e3 * eps)
        if isinstance(self.tolerance, str):
            raise ValueError(f"tolerance must be 'auto' or a positive number; got {self.tolerance!r}.")
        return self.tolerance

    def _jacobian(self, X: Any, lin: Linearization | None = None) -> Jacobian:
        lin = self.lin_ if lin is None else lin
        # Chunks have a budget of their own; memory= is for the dense matrices of the solvers.
        J = lin.jacobian(X, batch_size=self.batch_size, progress=self.progress)
        lin.check_ranks_agree(J._source)
        return J

    def _attached_jacobian(self, network: nn.Module, X: Any, dtype: Any) -> Jacobian:
        """Linearize the network in the dtypes that a setting asks for; the Jacobian of the training inputs."""

        def make(dtypes: Dtypes) -> Jacobian:
            self._attach(network, dtypes)
            return self._jacobian(X)

        return make_jacobian(network, dtype, make)

    def _new_inputs(self, X: Any) -> Jacobian:
        check_is_fitted(self)
        return self._jacobian(self._inputs(X, reset=False))

    def _mean_function(self, f: Tensor) -> Tensor:
        """The mean function, (n, c), where the network's outputs are f."""
        base = f if self.mean_ == "network" else torch.zeros_like(f)
        return base if self._level is None else base + self._level

    def _base(self, J: Jacobian) -> Tensor:
        """The mean function at the inputs of J, (n, c)."""
        known = self.mean_ == "network"
        return self._mean_function(J.outputs() if known else torch.zeros(J.n, J.c, dtype=J.dtype, device=J.device))

    def _predict(self, X: Any, spread: Spread = "none") -> tuple[Tensor, Any]:
        """The posterior mean at X, (n, c), and second moments, from one pass over X."""
        J = self._new_inputs(X)
        if spread == "blocks":
            check_fits(
                3 * J.n * J.c**2 * J.dtype.itemsize,
                self.memory,
                J.device,
                what=f"The covariances of {J.c:,} outputs for each of {J.n:,} inputs",
                instead="Ask for fewer inputs at once, or draw outputs with sample(X, k)",
            )
        found = (self.posterior_ if spread == "none" else self._error_bars).predict(J, spread)
        return self._mean_function(found.f) + found.shift, found.spread

    def _sample(self, X: Any, k: int, generator: torch.Generator) -> Tensor:
        """k joint samples of the outputs at X, (k, n, c)."""
        J = self._new_inputs(X)
        if self.variance_ == "samples":  # by products with draws: a covariance of all outputs would be dense
            f, shifts = J.outputs_and_product(self.posterior_.draw(k, generator=generator))
            return self._mean_function(f) + shifts.T.reshape(k, J.n, J.c)
        J = J.cached_if_fits()
        return self._base(J) + self.posterior_.sample(J, k, generator=generator)

    def _known_mean(self, network: nn.Module) -> str:
        """The mean function as far as it is known before any data: "auto" where they may choose."""
        if self.mean not in get_args(Mean):
            raise ValueError(f"mean must be one of {', '.join(map(repr, get_args(Mean)))}; got {self.mean!r}.")
        if self._around is not None:
            return "network"
        # Where a network, or its head, has fitted the data already, its residuals there say nothing.
        fitted = self._source is not None or (self.mean == "auto" and has_fitted_head(network))
        return "zero" if self.model is None or fitted else self.mean

    def _settings(self, eps: float = 0.0, **given: Any) -> SolverSettings:
        """Of the solvers, for passes with a relative rounding of ``eps``; ``given`` instead of the estimator's own."""
        parse_dtype(self.dtype)
        own = {
            "solver": self.solver,
            "tolerance": self._tolerance(eps),
            "iterations": self.iterations,
            "preconditioner": self.preconditioner,
            "rank": self.rank,
            "samples": self.samples,
            "memory": self.lin_.agree_on_memory(self.memory) if hasattr(self, "lin_") else self.memory,
            "seed": self.seed,
            "progress": self.progress,
        }
        return SolverSettings(**(own | given))

    # Files.

    @by_members
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was fitted to one file; `linnet.load` reads it, given the same network."""
        check_is_fitted(self)
        files.save(self, path)

    def _attach(self, network: nn.Module, dtypes: Dtypes) -> None:
        """Linearize the network, as fitting does."""
        raise NotImplementedError

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What an estimator keeps beside the posterior, as JSON and as tensors."""
        raise NotImplementedError

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        """The inverse; J is the Jacobian of the training inputs where they were saved."""
        raise NotImplementedError

    # Features of the inputs.

    def _linearize_with_features(self, model: nn.Module, dtypes: Dtypes, output: Any) -> Linearization:
        """The linear model of a network and features of its inputs, which watches the network alone."""
        names = [f"{PREFIX}{name}" for name in select(model, self._selected)]
        whole = self._add_features(model, output)
        return dtypes.apply(linearize(whole, [*names, f"{NAME}.weight"])).watching(model)

    def _add_features(self, model: nn.Module, output: Any) -> NetworkWithInputs:
        assert self._features is not None
        return NetworkWithInputs(model, self._features, self._outputs, output)

    def _whole_network(self) -> nn.Module:
        """The module that the linear model is of: the network, or the network with features of the inputs."""
        given, whole = self.lin_.given, self.lin_.module
        if self._features is None:
            return given
        assert isinstance(whole, NetworkWithInputs)
        return self._add_features(given, whole.output)

    def _own_parameters(self) -> list[str]:
        """The selected parameters of the network, by the names that they have there."""
        names = list(self.lin_.theta)
        return names if self._features is None else [own_name(name) for name in names if name.startswith(PREFIX)]

    # The adapted model.

    @property
    def delta_(self) -> dict[str, Tensor]:
        """How far the parameters move from those of the given network, by name.

        "input_features.weight" are the weights of features of the inputs.
        """
        check_is_fitted(self)
        return self._with_own_names(self.lin_.layout.unflatten(self._moved))

    @property
    def _moved(self) -> Tensor:
        """The displacement from where the prior is centered, (p,)."""
        delta = self.posterior_.delta
        return delta if self._shift is None else delta + self._shift

    def _with_own_names(self, found: dict[str, Any]) -> dict[str, Any]:
        return found if self._features is None else {own_name(name): value for name, value in found.items()}

    @property
    def layer_relevance_(self) -> dict[str, float]:
        r"""The share of each layer in what the data has made the network change, adding up to one.

        It is the layer's part of :math:`\delta^\top S^{-1} \delta = \alpha^\top K \alpha`, the squared norm of the
        change of the function, to which the layer contributes :math:`\alpha^\top K_l \alpha`.
        """
        check_is_fitted(self)
        S, delta = self.prior_variance_, self._moved
        parts = layer_sums(self.lin_.layout, torch.where(S > 0, delta.square() / S, 0.0))
        total = sum(parts.values())
        return self._with_own_names({layer: part / total if total > 0 else 0.0 for layer, part in parts.items()})

    def to_module(self, *, error_bars: bool = False) -> nn.Module:
        """A module that computes the adapted linear model, ``f(x; theta0) + J(x) delta`` (without f for mean zero).

        Args:
            error_bars: Whether the module returns what `predict` says with error bars, in the network's own dtype: mean
                and standard deviation of f, or class probabilities. The module is made of plain torch operations, which
                `torch.export` and ONNX take. Where ``params`` are not those of the last layer, the module
                makes the rows of the Jacobian: n c p numbers for n examples.
        """
        check_is_fitted(self)
        if error_bars:
            options: dict[str, Any] = {"with_network": self.mean_ == "network", "level": self._level}
            return make_predictive_module(self, self._exported_form(), network=self._whole_network(), **options)
        self.lin_.check_unchanged(contents=True)
        network = self.mean_ == "network"
        return LinearizedModule(self.lin_, self.posterior_.delta, with_network=network, level=self._level)

    def _exported_form(self) -> Any:
        """What a module with error bars returns."""
        raise NotImplementedError(
            "to_module(error_bars=True) gives numbers with Gaussian noise or class probabilities; "
            f"{type(self).__name__} has neither. Use to_module() for the mean of the outputs."
        )

    def apply(self) -> nn.Module:
        """A copy of the network with ``theta0 + delta`` written in; the model given is untouched.

        The copy is another model wherever the network is not linear in its weights; see `linearity`. A warning says
        where the copy fits the training data worse than the network did. With features of the inputs (``inputs_``), the
        copy is a module that adds them to the outputs of the network.
        """
        check_is_fitted(self)
        if self.model is None:
            raise ValueError("apply needs a network of your own: pass model=. The default one is not trained.")
        self.lin_.check_unchanged(contents=True)
        check_whole(self.lin_.given, "apply")
        changed, steps = copy.deepcopy(self._whole_network()), self.lin_.layout.unflatten(self.posterior_.delta)
        with torch.no_grad():
            for name, parameter in select(changed, list(self.lin_.theta)).items():
                parameter += steps[name].to(parameter)
        self._check_applied()
        return changed

    def _check_applied(self) -> None:
        """Warn, on behalf of the caller of `apply`, where the adapted weights fit the training data worse."""

    def _warn_if_worse(self, loss: str, before: float, after: float) -> None:
        """The warning of `_check_applied`, where a loss on the training data has grown, or is none any more."""
        if after <= before:
            return
        why = (
            "The weights move too far for the network to be linear in them. Use predict or to_module(), which are "
            "linear, or adapt fewer parameters (params=, top=)."
            if self.mean_ == "network"
            else "The mean function is zero, so that the model has no part of the network's outputs, and the network "
            "with other weights has. Use predict or to_module(), or fit with mean='network'."
        )
        warnings.warn(
            "The network with the adapted weights is worse than the network that was given: on the training data its "
            f"{loss} is {after:.3g}, and was {before:.3g}. {why}",
            stacklevel=5,
        )

    @together
    def linearity(self, X: Any) -> Linearity:
        """Compare the linear model with the network that has the adapted weights, at X: can it be trusted there?"""
        J = self._new_inputs(X)
        theta = self.lin_.move_theta(self.posterior_.delta)
        before, shift = J.outputs_and_product(self.posterior_.delta)
        return Linearity(before, before + shift.view(J.n, J.c), J.outputs(theta))


class LinearizedModule(nn.Module):
    """``f(x; theta0) + J(x) delta`` as a module; its buffers are the displacement.

    It stands on the weights of the network that was given: later training of that network is refused.

    Args:
        lin: The linearization.
        delta: (p,).
        with_network: Whether f(x; theta0) is part of it.
        level: (c,), added to the outputs; None for nothing.
    """

    delta: Tensor
    level: Tensor

    def __init__(
        self, lin: Linearization, delta: Tensor, *, with_network: bool = True, level: Tensor | None = None
    ) -> None:
        super().__init__()
        self.lin, self.with_network = lin, with_network
        self.register_buffer("delta", delta)
        self.register_buffer("level", torch.zeros((), dtype=delta.dtype) if level is None else level)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not leaves:
            raise TypeError("The linearized module takes the tensors that the network takes.")
        self.lin.check_unchanged(contents=True)
        batch = Batch(args, kwargs, None, start=0, n=len(leaves[0])).to(self.lin.device)
        asks = torch.is_grad_enabled() and any(x.requires_grad for x in (*leaves, self.delta))
        f, shift = self._by_reverse(batch) if asks else self._by_products(batch)
        return self.level + (f + shift if self.with_network else shift)

    def _by_products(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """f and J delta, without a graph."""
        J = Jacobian(NetworkChunks(self.lin, SingleBatch(batch, "a batch"), PassSettings(progress=False)))
        f, shift = J.outputs_and_product(self.delta)
        return f, shift.view(J.n, J.c)

    def _by_reverse(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same with a graph to the inputs: J delta is the derivative of delta^T J^T u in u."""
        theta = {name: t.detach().requires_grad_() for name, t in self.lin.theta.items()}
        # The kernels that forward mode takes are also those that can be differentiated twice.
        with self.lin.network.in_precision("highest"), forward_mode(self.lin.module):
            f = self.lin.forward(theta, batch).to(self.delta.dtype)
            if not f.requires_grad:
                return f, torch.zeros_like(f)
            u = torch.zeros_like(f, requires_grad=True)
            pulled = torch.autograd.grad(f, list(theta.values()), u, create_graph=True, allow_unused=True)
            steps = self.lin.layout.unflatten(self.delta).values()
            pairs = [(g, step) for g, step in zip(pulled, steps, strict=True) if g is not None]
            along = sum((g * step.to(g.dtype)).sum() for g, step in pairs)
            if not isinstance(along, Tensor) or not along.requires_grad:
                return f, torch.zeros_like(f)
            (shift,) = torch.autograd.grad(along, u, create_graph=True)
        return f, shift
