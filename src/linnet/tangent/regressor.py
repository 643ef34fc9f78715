"""Door 1, regression: the Gaussian process whose kernel is a trained network's Jacobian (Maddox et al. 2021)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import check_samples, together
from linnet._estimator import (
    Counted,
    Dtypes,
    HubMixin,
    WithSource,
    as_targets,
    by_members,
    can_copy,
    check_has_exact,
    check_variance,
    convert_like,
    default_network,
    draw_inputs,
    has_targets_in_memory,
    join_inputs,
    leave_out_weightless,
    list_options,
    take_parts,
)
from linnet.data import as_source, as_tensors
from linnet.inference import (
    Fit,
    Noise,
    SolverSettings,
    Task,
    bound_distance,
    bound_rounding,
    check_covariance_fits,
    check_outputs_fit,
    choose_solver,
)
from linnet.inference.gaussian import closed_form, extend_by_solves, reduce_by_solves, updates
from linnet.jacobian import Jacobian, Linearization, linearize
from linnet.linalg import Matrix, Stack
from linnet.network import CannotCast, Params, check_module, checks
from linnet.probability import Prior, PriorSpec, as_variances, check_prior, make_prior
from linnet.tangent import files
from linnet.tangent.base import Mean, Tangent
from linnet.tangent.input_features import (
    COLUMNS,
    FREQUENCIES,
    PER_COLUMN,
    PREFIX,
    ROWS,
    InputFeatures,
    own_name,
    propose_features,
)
from linnet.tangent.mean_choice import Candidate, choose_mean
from linnet.tangent.own_data_warning import warn_of_own_data
from linnet.tangent.relinearization import Around, check_settings, relinearize

COARSE = 1e-3
"""Posterior standard deviations by which rounding may move a mean before the network is copied to float64: time and
memory against digits. The estimate is an upper bound, about ten times what was measured."""

NOISE_FLOOR = 1e-3
"""What measured best over few-shot sinusoids with noise from 1 % to half of their amplitude."""


@dataclass(frozen=True)
class LeaveOneOut:
    """Predictions of each training example from all others, in closed form.

    Attributes:
        mean: (n,) or (n, c).
        std: Of an observation, noise included, in the same shape.
        log_score: (n,), the log density of the left-out targets.
    """

    mean: Any
    std: Any
    log_score: Any


class TangentRegressor(HubMixin, MultiOutputMixin, RegressorMixin, Tangent):
    r"""Adapt a trained network to a regression task: the posterior of the linearized network, in closed form.

    .. math:: y = m(x) + J(x) (\theta - \theta_0) + \epsilon, \qquad \theta - \theta_0 \sim N(0, S)

    The defaults are for data that the network has **not** been trained on. On its own training data the network's
    residuals are over-fitted: use `linnet.Laplace` there.

    Args:
        model: The trained network; None makes an untrained one for inputs (n, d), whose mean function is constant. A
            list of networks, or of checkpoints of one training run, makes an ensemble: the mixture of as many
            regressors, with the mean, the variance and the samples of all of them.
        params: Which parameters adapt; see `linnet.linearize`.
        top: Instead, how many blocks adapt, from the top, with all that comes after them; see
            `linnet.network.top_blocks`. "evidence" takes one block more while the evidence rises.
        mean: "network" (the linearized network) or "zero" (the finite tangent kernel alone). "auto" fits both and takes
            the one with the larger sum of log evidence and leave-one-out log densities; kernels and their eigenvectors
            are made once for both. "auto" is "zero" for a network with a head of `linnet.attach_head`, which has seen
            the targets. "auto" is "network" for two observations or fewer, for iterative solvers, and where the matrix
            to decompose has more than 4,096 rows (12,288 on a GPU).
        inputs: Whether the linear model also has features of the inputs, whose kernel is nearly an RBF kernel: for
            targets that the network knows little about. "auto" compares models with and without features, as ``mean``
            compares mean functions, and chooses the length scale so. "auto" compares where ``mean`` is "auto" and
            compares too, for one task of at most 1,024 observations and more than two rows for each column, one input
            (n, d) of at most 64 columns, a prior with one scale and a dense solver in function space; elsewhere it is
            False, and for the weights that ``relinearize`` finds. True compares length scales alone, and raises where
            there can be no features. See `linnet.tangent.input_features`.
        prior: On the displacement: "balanced" (which measures best on data that the network has not seen), "shared",
            "ntk", "layerwise", "unit", a variance, or variances by layer glob; see `linnet.probability.priors`.
        noise: Variance of the observations: "evidence" chooses one, "per-output" one for each output,
            "heteroscedastic" reads log variances from the second half of the network's outputs and scales them; or a
            number, one number for each output, or a number for each observation that `fit` is given, (n,) or (n, c).
        noise_floor: Where few observations can all be explained, the evidence alone takes the noise to zero, and error
            bars with it. So this share of the mean squared residual of one observation is assumed to be noise, a weak
            prior on what the evidence chooses (see `linnet.inference.evidence.gaussian`): the noise is at least that
            share divided by the number of observations, and with many of them hardly changed. 0 for the evidence alone,
            as for simulations without noise; a noise given as a number is not touched.
        average: Whether one prior scale and one noise are averaged by their evidence, rather than chosen where it is
            largest: with few observations the largest evidence is over-confident. The posterior is the one Gaussian
            with the mean and covariance of all scales and noises, and ``scales_`` and ``noise_`` are averages. A dense
            solver averages where it decomposes the kernel (up to 4,096 observations in function space; more of them
            leave nothing to average). Several scales ("layerwise") or noises ("per-output") are not averaged, nor is
            what is given as a number; see `linnet.inference.evidence.average`.
        solver: "auto", "function", "weight", "cg-function" or "cg-weight"; see `linnet.inference.gaussian.closed_form`.
        output: How to read the model's outputs; see `linnet.linearize`.
        dtype: Dtype of the network: "float32" or "float64" runs a copy. "auto" runs the network as it is, without a
            copy; a network in float32 on a CPU with at most 64 MiB of weights runs in float64. Kernels, solves and
            predictions are in float64, unless a GPU is slow at float64. Where the network runs in float32 by "auto" and
            there is so little noise that this moves the mean, the fit is made again in float64, with a warning.
        tolerance: Relative residual at which the iterative solvers stop; "auto" is 1e-6, or 1e-4 in float32.
        iterations: Largest number of steps of the iterative solvers.
        preconditioner: "auto", "nystrom" or "none"; "pivoted-cholesky", of earlier versions, means "auto".
        rank: Number of examples that the preconditioner is made from, or "auto".
        samples: Number of posterior samples of the iterative solvers, and of error bars from samples.
        variance: How error bars are made: "exact", or "samples" (from posterior samples that are drawn once: any number
            of outputs costs ``samples`` products with the Jacobian). "auto" takes samples for more than 16 outputs for
            each sample, and where the solver is an iterative one, which knows samples alone.
        weights: Weights of the networks of an ensemble: "uniform", "evidence" (in proportion to
            the evidence of each), or a number for each network.
        memory: Bytes that dense matrices may take, or "auto".
        batch_size: Number of examples per chunk, or "auto".
        relinearize: Number of times, at most, that the mean is written back into a copy of the network, which is then
            linearized around the new weights; the prior stays centered at the weights of the given network. A step is
            taken where the evidence grows; see `linnet.tangent.relinearization`. For one network and a dense solver;
            where the mean function zero or features of the inputs are chosen, no step is tried.
            Such a fit does not take `condition`, `refit`, `forget`, `path` and `linnet.merge`.
        seed: Seed of all random draws.
        progress: False for no progress bars.

    Attributes:
        noise_: Noise variance: a number, or one for each output; for "heteroscedastic" the scale of the network's; for
            a noise of each observation, what was given.
        mean_: The mean function, "network" or "zero"; that of `fit` also in `refit` and `condition`.
        inputs_: The length scale of the features of the inputs, in standard deviations of the inputs times the root of
            the number of columns; None for a model without features. That of `fit` also in `refit` and `condition`.
        selection_: What "auto" compared, a row for each mean function, and for each with each length scale, with its
            log evidence and its leave-one-out log densities; None where nothing was compared.
        source_noise_: The same of the source data, where `fit` was given them.
        noise_floored_: Whether half the noise would have more evidence, so that ``noise_`` comes from ``noise_floor``
            rather than from the observations; for "per-output" one for each.
        scales_: Prior scales by name.
        averaged_: Whether ``scales_``, ``noise_`` and the posterior are averages by the evidence.
        log_evidence_: ``log N(y - m | 0, K + noise)``, and ``log_evidence_error_`` its standard error; of the scale and
            noise of largest evidence, also where the posterior is an average. With weights, the evidence of each
            example as many times as its weight says.
        solver_: The solver used; ``solution_`` its convergence where it iterates.
        layer_relevance_: Each layer's share in the adaptation.
        variance_: "exact" or "samples"; ``std_error_`` is the relative standard error of the error bars.
        top_: How many blocks adapt, where ``top`` was given; ``top_path_`` the evidences that "evidence" compared.
        relinearized_: The steps of ``relinearize=``, each with its objective and its evidence.
        loo_: Closed-form leave-one-out predictions, with ``scales_`` and ``noise_``.
        members_: Of an ensemble, the fitted regressor of each network; ``weights_`` their weights. ``log_evidence_`` is
            that of the mixture.

    Example:
        >>> X = torch.linspace(-2, 2, 20)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        >>> reg = TangentRegressor(model).fit(X, torch.sin(2 * X[:, 0]))
        >>> mean, std = reg.predict(X, return_std=True)
        >>> mean.shape, bool((std > 0).all())
        (torch.Size([20]), True)
    """

    _SHARED = (*Tangent._SHARED, "prior_", "_log_variances", "_one_column", "_noise_each")
    _noise_each: bool = False

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        params: Params = None,
        mean: Mean = "auto",
        prior: PriorSpec = "balanced",
        noise: Any = "evidence",
        solver: str = "auto",
        *,
        top: int | str | None = None,
        inputs: bool | str = "auto",
        noise_floor: float = NOISE_FLOOR,
        average: bool = True,
        output: Any = None,
        dtype: Any = "auto",
        tolerance: float | str = "auto",
        iterations: int = 1000,
        preconditioner: str = "auto",
        rank: int | str = "auto",
        samples: int = 64,
        variance: str = "auto",
        weights: str | Sequence[float] = "uniform",
        memory: float | str = "auto",
        batch_size: int | str = "auto",
        relinearize: int = 0,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.relinearize = relinearize
        self.model, self.params, self.top, self.mean, self.prior, self.noise = model, params, top, mean, prior, noise
        self.solver, self.noise_floor, self.average, self.output = solver, noise_floor, average, output
        self.inputs, self.dtype = inputs, dtype
        self.tolerance, self.iterations, self.preconditioner = tolerance, iterations, preconditioner
        self.rank, self.samples, self.variance, self.memory = rank, samples, variance, memory
        self.weights, self.batch_size, self.seed, self.progress = weights, batch_size, seed, progress

    # Fitting.

    @by_members
    @together
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, source: Any = None) -> TangentRegressor:
        """Condition on targets y, (n,) or (n, c); data that carries its targets (a Dataset) needs no y.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, (n,): it multiplies the log likelihood. An example of
                weight 2 counts as the same example given twice, in the evidence too; one of weight 0 is left out.
            source: All data that the network was trained on, ``(X0, y0)`` or a Dataset of both. The posterior that
                they give is the prior of the new task. The mean function is then zero, whatever ``mean`` says: what
                the network knew comes from its data, and not from outputs that have fitted them. The evidence chooses
                a noise of the source data of their own, ``source_noise_``; an iterative solver has one for both.
                ``loo_`` and `influence` are about the examples of X. Or an earlier fitted regressor of the same
                network, in the place of its data: its posterior is the prior, with its prior scales, noise and mean
                function, which go before those of this one. That is what `condition` does.
        """
        self.top_path_ = None
        if isinstance(source, Tangent):
            self._carry_on(source, X, y, sample_weight)
            return self
        check_settings(self)
        if self.relinearize and source is not None:
            raise NotImplementedError("relinearize= does not go with source=: use relinearize=0.")
        self.relinearized_ = ()
        self._settle(None)
        if self.top == "evidence":
            self._fit_by_evidence(X, y, sample_weight, source)
        else:
            self._fit_all([(X, y, sample_weight)], source=source)
        self.__dict__.pop("tasks_", None)
        if self.relinearize and self.mean_ == "network" and self.inputs_ is None:
            self._relinearize(X, y, sample_weight)
        return self

    def _relinearize(self, X: Any, y: Any, sample_weight: Any) -> None:
        """Linearize around other weights, where steps lead to some."""

        def fit(estimator: Any, around: Around | None) -> None:
            estimator._settle(around)
            estimator._fit_all([(X, y, sample_weight)])

        changed = {"mean": "network", "average": False, "inputs": False}
        around, self.relinearized_ = relinearize(self, fit, changed=changed)
        if around is not None:
            fit(self, around)

    @together
    def fit_tasks(
        self, tasks: Sequence[tuple[Any, Any]], sample_weight: Sequence[Any] | None = None
    ) -> TangentRegressor:
        """Several tasks, each with a posterior of its own, that share prior and noise (section 3.3).

        The hyperparameters maximize the sum of the tasks' log evidences. ``tasks_`` holds one fitted regressor for
        each task; this one is that of the first, with ``log_evidence_`` its own.

        Args:
            tasks: Inputs and targets (X, y) of each task.
            sample_weight: For each task its weights, as for `fit`, or None.
        """
        if len(tasks) == 0:
            raise ValueError("fit_tasks needs at least one (X, y).")
        if self.relinearize:
            raise NotImplementedError("fit_tasks has one linearization for all tasks: use relinearize=0.")
        self._settle(None)
        weights = [None] * len(tasks) if sample_weight is None else list(sample_weight)
        if len(weights) != len(tasks):
            raise ValueError(
                f"There are {len(tasks)} tasks, so sample_weight needs the weights of as many; got {len(weights)}."
            )
        self.tasks_ = self._fit_all([(X, y, w) for (X, y), w in zip(tasks, weights, strict=True)])
        return self

    def _fit_all(
        self, data: list[tuple[Any, Any, Any]], dtype: Any = None, source: Any = None
    ) -> list[TangentRegressor]:
        """The regressors of all tasks (X, y, weights); ``dtype`` in place of the setting; ``source`` is of one task."""
        check_prior(self.prior)
        check_variance(self.variance)
        _check_inputs_option(self.inputs)
        settings = self._settings()
        _check_noise(self.noise, self.noise_floor)
        inputs = [self._inputs(X, reset=i == 0) for i, (X, *_) in enumerate(data)]
        forward = None if self.model is None else check_module(self.model).forward
        weighted = [leave_out_weightless(X, w, forward) for X, (*_, w) in zip(inputs, data, strict=True)]
        inputs, weights, kept = (list(column) for column in zip(*weighted, strict=True))
        ys = [counted.take(y) for (_, y, _), counted in zip(data, kept, strict=True)]
        self._source = self._features = None
        if source is not None:
            both = WithSource.join(self, inputs[0], ys[0], weights[0], source)
            inputs[0], ys[0], weights[0] = both.inputs, both.y, both.weight
            self._source = range(both.start, both.stop)
        model = self._network(inputs[0], data[0][1], weights[0]) if self._around is None else self._around.network
        known_mean = self._known_mean(model)
        self.mean_, self.selection_ = "network" if known_mean == "auto" else known_mean, None
        self._choose(model, inputs[0])
        first = self._attached_jacobian(model, inputs[0], self.dtype if dtype is None else dtype)
        lin = self.lin_
        check_prior(self.prior, lin)
        jacobians = [first, *(self._jacobian(X) for X in inputs[1:])]
        self._probe = draw_inputs(jacobians[0]._source)
        rows = max(J.shape[0] for J in jacobians)
        for J in jacobians:
            check_outputs_fit(J)
        kernels = len(lin.layout.layers) if self.prior == "layerwise" else 1
        solver = choose_solver(rows, lin.p, settings, device=lin.device, kernels=kernels)
        if self.solver == "auto" and jacobians[0].has_many_outputs(self.samples):
            solver = "cg-weight"  # the one that needs no rows of the Jacobian
        if solver.startswith("cg"):
            check_has_exact(self.variance, f"solver={solver!r}", "solver='function' or 'weight' where they fit")
        # Targets at hand are checked before any pass; a stream's are read along with its first pass.
        given = [
            self._targets(y, J) if has_targets_in_memory(y, J) else None for y, J in zip(ys, jacobians, strict=True)
        ]
        known = [self._observation_noise(J, counted) for J, counted in zip(jacobians, kept, strict=True)]
        if len(data) > 1 and known[0] is not None:
            raise ValueError(
                "noise for each observation belongs to one task; with fit_tasks give one number, or one for each "
                "output, and the weights of examples as sample_weight=."
            )
        jacobians = [J.cached_if_fits() for J in jacobians]
        targets = [self._targets(None, J) if y is None else y for y, J in zip(given, jacobians, strict=True)]
        lin.check_ranks_agree(options=list_options(self), targets=torch.cat([y.flatten() for y in targets]))
        self._one_column = targets[0].ndim == 1
        # A network that is not trained has nothing to say about the level.
        self._level = _weighted_mean(targets, weights, jacobians[0].c) if self.model is None else None
        columns = zip(jacobians, targets, inputs, weights, known, strict=True)
        tasks = [self._task(J, y, X, w, v) for J, y, X, w, v in columns]
        if self._source is not None and not solver.startswith("cg"):  # which knows one noise
            tasks = [_tell_apart(tasks[0], self._source, jacobians[0].c)]
        if sum(len(task.r) for task in tasks) == 1 and self._noise_name is not None:
            raise ValueError(
                "One observation cannot tell signal from noise (n_samples=1). Give noise= as a number, or more data."
            )
        whole = jacobians[0] if len(jacobians) == 1 else Stack(jacobians)
        if self._around is None:
            self.prior_ = make_prior(lin, self.prior, J=whole, weight=_row_weights(tasks))
        else:
            self.prior_ = self._around.prior
        settings = self._settings(_rounding(jacobians[0], solver), solver=solver, average=bool(self.average))
        compares = known_mean == "auto" and closed_form.decomposes(solver, rows, lin.p, lin.device)
        compares = compares and _can_compare(targets)
        features = self._propose_features(tasks, inputs, weights, settings, compares=compares)
        if compares or features:
            options = {self.mean_: tasks}
            if compares:
                pairs = zip(tasks, targets, strict=True)
                options["zero"] = [replace(task, r=y.flatten(), base=torch.zeros_like(task.base)) for task, y in pairs]
            plain = self.inputs is not True
            best, self.selection_ = choose_mean(options, self.prior_, settings, features=features, plain=plain)
            self.mean_, tasks = best.name, options[best.name]
            if best.features is None:
                fits = closed_form.condition(tasks, self.prior_, settings, shared=best.shared)
            else:
                tasks, fits = self._fit_with_features(model, tasks[0], inputs[0], best, settings)
        else:
            fits = closed_form.condition(tasks, self.prior_, settings)
        if self.mean_ == "network":
            warn_of_own_data(tasks, self._of_network(self.prior_.base))
        if self._needs_float64(model, first, tasks, fits):
            return self._fit_all(data, "float64", source)
        self.scales_ = dict(zip(self.prior_.scales, fits[0].choice.scales, strict=False))
        self._set(tasks[0], fits[0], [inputs[0]])
        rest = zip(tasks[1:], fits[1:], inputs[1:], strict=True)
        return [self, *(self._with_task(task, fit, [X]) for task, fit, X in rest)]

    def _propose_features(
        self,
        tasks: Sequence[Task],
        inputs: Sequence[Any],
        weights: Sequence[Tensor | None],
        settings: SolverSettings,
        *,
        compares: bool,
    ) -> list[tuple[InputFeatures, Tensor]]:
        """Features of the inputs that are worth a comparison, and their values in the dtype of products.

        Args:
            tasks: The tasks.
            inputs: Their inputs.
            weights: The weights of their examples.
            settings: Of the solvers, with the solver for the network alone.
            compares: Whether mean functions are compared.
        """
        if self.inputs is False or (self.inputs == "auto" and not compares):
            return []
        lin, J, X = self.lin_, tasks[0].J, inputs[0]
        X = as_tensors(X) if isinstance(X, np.ndarray) else X
        matrix = isinstance(X, Tensor) and X.ndim == 2
        wanted = replace(settings, solver=self.solver)
        p, own = lin.p + 2 * FREQUENCIES * J.c, next(lin.given.parameters()).dtype
        why = None
        if self.model is None or self._source is not None or len(tasks) > 1:
            why = "is for one task and a network of your own, fitted without source="
        elif not matrix or not X.is_floating_point() or not 0 < X.shape[1] <= COLUMNS:
            why = f"needs one input (n, d) of floating numbers with at most {COLUMNS} columns"
        elif own not in (torch.float32, torch.float64):
            why = "needs a network in float32 or float64"
        elif len(self.prior_.scales) != 1:
            why = "needs a prior with one scale, such as prior='balanced'"
        elif J.shape[0] > ROWS or J.has_many_outputs(self.samples):
            why = f"is for up to {ROWS:,} observations and few outputs for each example"
        elif sum(len(task.r) for task in tasks) < 3:
            why = "needs three observations to choose a length scale"
        elif self.inputs == "auto" and J.n <= PER_COLUMN * X.shape[1]:
            why = "compares nothing for so few rows"
        elif choose_solver(J.shape[0], p, wanted, device=lin.device) != "function":
            why = "is solved in function space, with solver='function' or 'auto' and memory for it"
        if why is not None:
            if self.inputs is True:
                raise NotImplementedError(
                    f"inputs=True {why}. Use inputs=False, which is a model of the network alone."
                )
            return []
        rows = X.detach().to(device=lin.device, dtype=lin.model_dtype)
        found = propose_features(rows, weights[0], dtype=own, seed=self.seed)
        return [(one, copy.deepcopy(one).to(lin.model_dtype)(rows).to(lin.dtype)) for one in found]

    def _of_network(self, variance: Tensor) -> Tensor:
        """Prior variances (p,) with zero for the weights of features of the inputs."""
        if self._features is None:
            return variance
        out, layout = variance.clone(), self.lin_.layout
        for name, at in layout.slices.items():
            if not name.startswith(PREFIX):
                out[at] = 0.0
        return out

    def _fit_with_features(
        self, model: nn.Module, task: Task, X: Any, best: Candidate, settings: SolverSettings
    ) -> tuple[list[Task], list[Fit]]:
        """The task and its fit with the Jacobian of the model with features, which stays."""
        assert best.features is not None
        layout, prior = self.lin_.layout, self.prior_
        self._features, self._outputs = best.features, task.base.shape[1]
        self._attach(model, self._dtypes)
        new = self.lin_.layout
        base = torch.full((new.p,), best.variance, dtype=prior.base.dtype, device=prior.base.device)
        for name, at in new.slices.items():
            if (own := own_name(name)) in layout.slices:
                base[at] = prior.base[layout.slices[own]]
        self.prior_ = replace(prior, base=base)
        task = replace(task, J=self._jacobian(X).cached())
        # Features in float32 are not those in the dtype of products: the kernel is made again.
        known = best.shared if self.lin_.model_dtype == self.lin_.dtype else {}
        return [task], closed_form.condition([task], self.prior_, replace(settings, solver="function"), shared=known)

    def _needs_float64(self, model: nn.Module, first: Jacobian, tasks: list[Task], fits: list[Fit]) -> bool:
        """Whether rounding inside the network moves the mean too far and a copy in float64 serves; say so.

        Args:
            model: The network.
            first: The Jacobian of the first task, which reads its inputs.
            tasks: The tasks.
            fits: Their fits.
        """
        dtype, coarsest = self.lin_.model_dtype, self.lin_.rules.coarsest
        if coarsest == self.lin_.dtype or fits[0].solver.startswith("cg"):  # which stops at a tolerance
            return False
        eps = torch.finfo(coarsest).eps
        moved = max(updates.estimate_rounding(task, fit, eps) for task, fit in zip(tasks, fits, strict=True))
        reason = (
            f"The network runs in {str(coarsest).removeprefix('torch.')}, and with so little noise its rounding may "
            f"move the mean by {moved:.1g} posterior standard deviations"
        )
        if moved > COARSE and self.dtype == "auto" and dtype == torch.float32 and can_copy(model):
            own = self._dtypes
            self._attach(model, replace(own, network=torch.float64))
            try:
                _ = self.lin_.jacobian(first._source, progress=False).c
            except CannotCast:
                self._attach(model, own)
            else:
                warnings.warn(f"{reason}. The fit is made again with a copy of the network in float64.", stacklevel=6)
                return True
        if moved > 1:
            warnings.warn(f"{reason}. Give more noise, or run the network with more digits (dtype=).", stacklevel=6)
        return False

    def _network(self, X: Any, y: Any, weight: Tensor | None) -> nn.Module:
        if self.model is not None:
            return check_module(self.model)
        if not isinstance(X, np.ndarray | Tensor) or X.ndim != 2:
            raise ValueError("Without model= the inputs must be an array (n, d). Pass the trained network as model=.")
        shape = y.shape if isinstance(y, Tensor) else np.asarray(y).shape
        outputs = 1 if len(shape) < 2 else shape[1]
        return default_network(X.shape[1], outputs, seed=self.seed, X=X, weight=weight)

    def _linearize(self, model: nn.Module, dtypes: Dtypes, *, second: bool = False) -> Linearization:
        output = _Half(self.output, second) if self._noise_name == "heteroscedastic" else self.output
        if self._features is None or second:
            return dtypes.apply(linearize(model, self._selected, output))
        return self._linearize_with_features(model, dtypes, output)

    def _targets(self, y: Any, J: Jacobian) -> Tensor:
        y = as_targets(y, J).to(device=J.device, dtype=J.dtype)
        if y.shape not in ((J.n,), (J.n, J.c)) or (y.ndim == 1 and J.c != 1):
            needed = f"({J.n},) or ({J.n}, 1)" if J.c == 1 else f"({J.n}, {J.c})"
            raise ValueError(
                f"The network has {J.c} outputs, so {J.n} examples need targets of shape {needed}; got "
                f"{tuple(y.shape)}. Choose outputs with output=, or give the network a new head."
            )
        bad = ~torch.isfinite(y.view(J.n, -1)).all(1)
        if bool(bad.any()):
            raise ValueError(f"Targets must be finite; example {int(bad.nonzero()[0])} has NaN or infinity.")
        return y

    def _task(self, J: Jacobian, y: Tensor, X: Any, weight: Tensor | None, known: Tensor | None) -> Task:
        """The task of examples with weights (n,), and a known noise (n, c) of each observation, or None for both."""
        base = self._prior_base(J)
        noise = self._noise_of(J, X, known)
        if weight is not None:
            w = weight.to(noise.base).repeat_interleave(J.c)
            noise = replace(noise, base=noise.base / w, weight=w)
        return Task(J, (y.view(J.n, J.c) - base).flatten(), noise, base)

    def _noise_of(self, J: Jacobian, X: Any, known: Tensor | None) -> Noise:
        ones = torch.ones(J.shape[0], dtype=J.dtype, device=J.device)
        zeros = torch.zeros(J.shape[0], dtype=torch.long, device=J.device)
        if self._noise_name == "evidence":
            return Noise(ones, zeros, floor=self.noise_floor)
        if self._noise_name == "heteroscedastic":
            return Noise(self._known_variances(X).flatten(), zeros, floor=self.noise_floor)
        if self._noise_name == "per-output":
            return Noise(ones, torch.arange(J.c, device=J.device).repeat(J.n), J.c, floor=self.noise_floor)
        if known is not None:
            return Noise(known.to(ones).flatten(), zeros, 1, (1.0,))
        if self._noise_each:
            raise ValueError(
                "The regressor has a noise for each observation that it was fitted to; give that of the new ones as "
                "noise=, a variance for each."
            )
        given = torch.as_tensor(self.noise, dtype=J.dtype, device=J.device).flatten()
        return Noise(given.expand(J.c).repeat(J.n), zeros, 1, (1.0,))

    def _observation_noise(self, J: Jacobian, counted: Counted) -> Tensor | None:
        """The variance of each observation, (n, c), where the user gave one for each; else None.

        Args:
            J: The Jacobian of the examples that count.
            counted: Which of the examples these are.
        """
        shape = () if isinstance(self.noise, str) else tuple(torch.as_tensor(self.noise).shape)
        self._noise_each = len(shape) > 1 or (len(shape) == 1 and shape[0] not in (1, J.c))
        if self._noise_each and self._source is not None:
            raise ValueError(
                "noise for each observation does not say what noise the source has. With source= give one number, or "
                "one for each output, or let the evidence choose."
            )
        return as_variances(counted.take(self.noise, "variances"), J.n, J.c) if self._noise_each else None

    def _known_variances(self, X: Any) -> Tensor:
        assert self._log_variances is not None
        found = self._jacobian(X, self._log_variances).outputs().exp()
        bad = ~(torch.isfinite(found) & (found > 0)).all(1)
        if bool(bad.any()):
            raise ValueError(
                f"The network's log variances of example {int(bad.nonzero()[0])} are too large or too small: their "
                "exponential is infinite or zero. Bound them with output=."
            )
        return found

    def _set(self, task: Task, fit: Fit, inputs: list[Any]) -> None:
        self.lin_.check_unchanged(contents=True)
        self.posterior_, self.prior_variance_ = fit.posterior, fit.variance
        self._count_from_weights()
        self.inputs_ = None if self._features is None else self._features.length
        self._settle_variance(task.J)
        self.log_evidence_, self.log_evidence_error_ = fit.log_evidence, fit.error
        self.solver_, self.solution_, self.evidence_path_ = fit.solver, fit.solution, fit.choice.path
        found = fit.choice.noise
        own = self._count_noises(task.noise)
        self.noise_ = self.noise if self._noise_name is None else _single(found[:own])
        if self._source is not None:
            self.source_noise_ = self.noise if self._noise_name is None else _single(found[own:] or found)
        self.noise_floored_ = _single((fit.choice.floored or (False,) * len(found))[:own])
        self.averaged_ = fit.choice.averaged
        self._fit_, self._train, self._train_inputs = fit, task, inputs
        self._kept: dict[str, Any] = {}

    def _take_settings(self, first: TangentRegressor) -> None:
        S, choice = first.prior_variance_, first._fit_.choice
        empty = S.new_zeros(0)
        assert self.log_evidence_ is not None
        noise = Noise(empty, empty.long(), len(choice.noise), choice.noise)
        J = Matrix(S.new_zeros(0, len(S)))
        task = Task(J, empty, noise, S.new_zeros(0, first._train.base.shape[1]))
        fit = Fit(self.posterior_, choice, S, empty, empty, self.log_evidence_, self.log_evidence_error_, self.solver_)
        self.noise_, self.noise_floored_, self.averaged_ = first.noise_, first.noise_floored_, False
        self.inputs_ = first.inputs_
        self._train, self._fit_, self._kept, self.evidence_path_ = task, fit, {}, ()

    def _loss_of(self, f: Tensor) -> float:
        task = self._train
        error = task.base.flatten() + task.r - f.flatten()
        return 0.5 * float((error.square() / self._fit_.noise_rows).sum())

    def _count_noises(self, noise: Noise) -> int:
        """How many scales of the noise are not those of the source, which come after the others."""
        return noise.count // 2 if self._source is not None and noise.count > 1 else noise.count

    def _with_task(self, task: Task, fit: Fit, inputs: list[Any]) -> TangentRegressor:
        other = self._without_data()
        other._set(task, fit, inputs)
        return other

    def _attach(self, network: nn.Module, dtypes: Dtypes) -> None:
        self._dtypes, self.lin_ = dtypes, self._linearize(network, dtypes)
        both = self._noise_name == "heteroscedastic"
        self._log_variances = self._linearize(network, dtypes, second=True) if both else None

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta, tensors = files.task_state(self._train, self._fit_)
        if self._level is not None:
            tensors["level"] = self._level
        meta |= {
            "merged": self.merged_,
            "one_column": self._one_column,
            "noise_": _as_json(self.noise_),
            "noise_each": self._noise_each,
        }
        if self._forgotten:
            meta["forgotten"] = self._forgotten
        if self._source is not None:
            known = {"start": self._source.start, "stop": self._source.stop, "noise": _as_json(self.source_noise_)}
            meta["source"] = known
        return meta, tensors

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        self._one_column, self._level = meta["one_column"], tensors.get("level")
        self._noise_each, self.merged_ = meta.get("noise_each", False), meta.get("merged", False)
        self._forgotten = meta.get("forgotten", 0)
        self.inputs_ = None if self._features is None else self._features.length
        if self.merged_:
            before = Matrix(self.prior_variance_.new_zeros(0, self.lin_.p))
            J = before if J is None else Stack([before, J])
        if meta.get("source"):
            self._source = range(meta["source"]["start"], meta["source"]["stop"])
            self.source_noise_ = _from_json(meta["source"]["noise"])
        self.prior_ = Prior("given", self.prior_variance_)
        self._train, self._fit_ = files.task_from(meta, tensors, J, self)
        self.noise_, self.averaged_ = _from_json(meta["noise_"]), self._fit_.choice.averaged
        self.noise_floored_ = _single(meta["floored"][: self._count_noises(self._train.noise)])
        self.evidence_path_, self._kept = (), {}

    @together
    def _check_applied(self) -> None:
        if not self._train_inputs:  # a file that holds no training data
            return
        task, jacobians = self._train, [self._jacobian(X) for X in self._train_inputs]
        targets = task.base.flatten() + task.r
        weights = task.noise.base.reciprocal()
        before, after = (
            float((weights * (targets - torch.cat([J.outputs(theta).flatten() for J in jacobians])).square()).sum())
            / float(weights.sum())
            for theta in (None, self.lin_.move_theta(self.posterior_.delta))
        )
        self._warn_if_worse("mean squared error", before, after)

    @by_members
    def condition(self, X: Any, y: Any = None, sample_weight: Any = None, *, noise: Any = None) -> TangentRegressor:
        """A regressor that has also seen (X, y), with the same prior and noise; the old factorization is extended.

        Where the posterior is an average over scales and noises, it is one Gaussian, and that Gaussian is conditioned
        with ``noise_``. ``log_evidence_`` grows by the log density of the new observations. An iterative solver makes
        one solve more, as wide as there are new targets, or all solves again where these are more than its samples.
        This one stays as it is.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, as for `fit`.
            noise: Variances of the new observations, (n,) or (n, c), where those of `fit` had one each.
        """
        check_is_fitted(self)
        self._check_own_weights("condition")
        task, X, _ = self._new_task(X, y, sample_weight, noise)
        if self._fit_.posterior.factored:
            whole, fit = updates.extend(self._train, self._fit_, task)
            return self._with_task(whole, fit, [*self._train_inputs, X])
        self._check_has_inputs("condition")
        both = join_inputs(self._train_inputs[0], X, self.lin_.module.forward)
        J = self._jacobian(both)
        J = J.cached_if_fits() if self._train.J.in_memory else J
        whole = replace(updates.join(self._train, task, self._fit_), J=J)
        settings = self._solver_settings()
        if len(task.r) > settings.samples + settings.probes:
            fit = self._solve_again(whole)
        else:
            fit = extend_by_solves(self._train, self._fit_, task, whole, settings)
        return self._with_task(whole, fit, [both])

    def _solver_settings(self) -> Any:
        """Those of the fit, for more solves of the same kind."""
        return self._settings(_rounding(self._train.J, self.solver_), solver=self.solver_)

    def _solve_again(self, task: Task) -> Fit:
        """The fit of observations with the prior and the noise found here."""
        choice = self._fit_.choice
        prior = Prior("given", self.prior_variance_)
        (fit,) = closed_form.condition([task], prior, self._solver_settings())
        kept = replace(fit.choice, scales=choice.scales, noise=choice.noise, floored=choice.floored)
        return replace(fit, choice=kept)

    # Without some examples.

    def _seen_targets(self) -> Tensor:
        return self._train.base + self._train.r.view_as(self._train.base)

    def _encode_targets(self, X: Any, y: Any) -> Tensor:
        y = torch.as_tensor(y if isinstance(y, Tensor) else np.asarray(y))
        c = self._train.base.shape[1]
        if y.shape[1:] not in ((), (c,)) or (y.ndim == 1 and c != 1):
            raise ValueError(f"The targets of the fit have {c} columns; got targets of shape {tuple(y.shape)}.")
        return y.reshape(len(y), c)

    def _without(self, kept: Tensor, n: int) -> TangentRegressor:
        self._check_has_inputs("forget")
        self.lin_.check_unchanged(contents=True)
        inputs = take_parts(self._train_inputs, kept, self.lin_.module.forward)
        task, fit, c = self._train, self._fit_, self._train.base.shape[1]
        if fit.average is not None and int((kept * c < fit.average.rows).sum()) * c < fit.average.rows:
            fit = self._point_fit()  # the weights of the average have seen the examples
        if fit.posterior.factored:
            rest, fit = updates.reduce(task, fit, kept)
        else:
            out = torch.ones(n, dtype=torch.bool)
            out[kept] = False
            rest, gone = updates.take(task, kept), updates.take(task, out.nonzero()[:, 0])
            rest = replace(rest, noise=replace(rest.noise, value=fit.choice.noise))
            settings = self._solver_settings()
            if len(gone.r) > settings.samples + settings.probes:
                fit = self._solve_again(rest)
            else:
                fit = reduce_by_solves(fit, rest, gone, settings)
        other = self._without_history(kept, n)
        if self._noise_each:
            rows = rest.noise.base if rest.noise.weight is None else rest.noise.base * rest.noise.weight
            other.noise = self._shaped(rows.view(-1, c)).cpu().numpy()
        other._set(rest, replace(fit, choice=replace(fit.choice, path=())), inputs)
        other._probe = draw_inputs(as_source(inputs[0], self.lin_.module.forward))
        return other

    def _bound_errors(self) -> tuple[float | None, float | None]:
        self._check_has_inputs("certificate_")
        task, fit = self._train, self._fit_
        if fit.average is not None:  # which is no refit
            return None, None
        r, noise, delta = task.r, fit.noise_rows, fit.posterior.delta
        mean = bound_distance(
            task.J, fit.variance, delta, lambda f: (r - f) / noise, lambda f: (r.abs() + f.abs()) / noise
        )
        factor = getattr(fit.posterior, "factor", None)
        if factor is None:
            return mean, None
        rounding = bound_rounding(factor)
        if self.solver_ == "weight":
            d = fit.variance.sqrt()
            H = d[:, None] * sum_normal_matrices(task.J, 1 / noise) * d
            H.diagonal().add_(1)
            rounding += float((H - factor.tril() @ factor.tril().T).norm())
        return mean, rounding

    def _new_task(
        self, X: Any, y: Any, sample_weight: Any, noise: Any, *, cached: bool = False
    ) -> tuple[Task, Any, Tensor]:
        """A task with the mean function found here, its inputs and its targets."""
        X, w, kept = leave_out_weightless(self._inputs(X, reset=False), sample_weight, self.lin_.module.forward)
        J = self._jacobian(X)
        J = J.cached_if_fits() if cached else J
        y = self._targets(kept.take(y), J)
        known = None
        if noise is not None:
            if not self._noise_each:
                raise ValueError(
                    "noise= is for a regressor that was fitted with a noise for each observation; this one has "
                    f"noise={self.noise!r} for all."
                )
            known = as_variances(kept.take(noise, "variances"), J.n, J.c)
        return self._task(J, y, X, w, known), X, y

    @by_members
    @together
    def refit(self, X: Any, y: Any = None, sample_weight: Any = None, *, noise: Any = None) -> TangentRegressor:
        """A regressor that has seen (X, y) alone, with the prior, noise and mean function found here: task after task.

        Nothing is chosen anew, so that one observation is enough, and every solver takes any prior and noise.
        ``log_evidence_`` says how well they suit the new data. This one stays as it is.

        Args:
            X: Inputs.
            y: Targets.
            sample_weight: How many times each example counts, as for `fit`.
            noise: Variances of the new observations, (n,) or (n, c), where those of `fit` had one each.

        Example:
            >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
            >>> X = torch.linspace(-2, 2, 20)[:, None]
            >>> reg = TangentRegressor(model).fit(X, torch.sin(2 * X[:, 0]))
            >>> new = reg.refit(X[:3], torch.cos(X[:3, 0]))
            >>> new.noise_ == reg.noise_, new.scales_ == reg.scales_, new.predict(X).shape
            (True, True, torch.Size([20]))
        """
        check_is_fitted(self)
        self._check_own_weights("refit")
        if self._source is not None:
            raise NotImplementedError(
                "refit keeps prior and noise, and the prior of a fit with source= is the posterior of the source. Use "
                "fit(X, y, source=...) for other data, or condition(X, y) for more."
            )
        task, X, y = self._new_task(X, y, sample_weight, noise, cached=True)
        J, choice = task.J, self._fit_.choice
        task = replace(task, noise=replace(task.noise, value=choice.noise))
        if self.mean_ == "network":
            warn_of_own_data([task], self._of_network(self.prior_variance_))
        prior = Prior("given", self.prior_variance_)
        rows, p = J.shape
        solver = choose_solver(rows, p, self._settings(), device=J.device)
        settings = self._settings(_rounding(J, solver), solver=solver)
        (fit,) = closed_form.condition([task], prior, settings)
        kept = replace(fit.choice, scales=choice.scales, floored=choice.floored)
        other = self._with_task(task, replace(fit, choice=kept), [X])
        other._one_column = y.ndim == 1
        if other.merged_:
            other.merged_ = False
        return other

    # Predictions.

    @by_members
    @together
    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, *, noise: Any = False) -> Any:
        """The posterior mean at X, in the shape of the targets; with its standard deviation or joint covariance.

        Args:
            X: Inputs.
            return_std: Also the standard deviation of the function, in the same shape.
            return_cov: Also the joint covariance, (n, n), or (n c, n c) with row ``i * c + j`` for output j of input i.
                Where ``variance_`` is "samples", it is the covariance of the samples, of rank ``samples``.
            noise: Whether these include the noise of an observation, ``noise_``. Or the variances of the observations
                to come, one or (n,) or (n, c), in its place: a regressor with a noise for each observation needs them.
        """
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not both.")
        J = self._new_inputs(X)
        if return_cov:
            check_covariance_fits(J, self.memory)
        spread: Any = "covariance" if return_cov else "variance" if return_std else "none"
        f, shift, spread = (self._error_bars if return_std or return_cov else self.posterior_).predict(J, spread)
        mean = self._shaped(self._mean_function(f) + shift)
        if spread is None:
            return convert_like(X, mean)
        added = torch.zeros_like(f) if noise is False else self._noise_at(f, X, noise)
        if return_cov:
            spread.diagonal().add_(added.flatten())
            return convert_like(X, mean), convert_like(X, spread)
        return convert_like(X, mean), convert_like(X, self._shaped((spread + added).sqrt()))

    @by_members
    @together
    def sample(self, X: Any, k: int = 1, *, noise: Any = False, seed: int | None = None) -> Any:
        """k joint samples of the function at X, (k, n) or (k, n, c); ``noise`` adds that of an observation, as for
        `predict`."""
        check_is_fitted(self)
        check_samples(k)
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        f = self._sample(X, k, generator)
        if noise is not False:
            z = torch.randn(f.shape, dtype=f.dtype, generator=generator).to(f.device)
            f = f + self._noise_at(f[0], X, noise).sqrt() * z
        return convert_like(X, f[..., 0] if self._one_column else f)

    @together
    def path(self, X: Any, t: float) -> Any:
        r"""The prediction after gradient flow on ``1/2 sum (f - y)^2`` for time t, in closed form.

        .. math:: m(X) + k(X, X_{tr}) \phi_t(K) (y - m), \qquad \phi_t(l) = (1 - e^{-t l}) / l

        At t = 0 it is the mean function, for large t the solution without noise. The flow is that of the parameters in
        units of the prior's standard deviations.
        """
        check_is_fitted(self)
        self._check_own_weights("path")
        self._check_examples("path")
        if not t >= 0:
            raise ValueError(f"t is a time and must not be negative; got {t!r}.")
        J = self._new_inputs(X)
        if "flow" not in self._kept:
            self._kept["flow"] = updates.flow(self._train, self._fit_)
        f, shift = J.outputs_and_product(self._kept["flow"](t))
        return convert_like(X, self._shaped(self._mean_function(f) + shift.view(J.n, J.c)))

    # What the training data says about itself.

    @property
    @by_members
    def loo_(self) -> LeaveOneOut:
        """Predictions of each training example from all others; a whole example with all its outputs is left out.

        The prior and the noise are ``prior_variance_`` and ``noise_``, also where the posterior averages over them. An
        example of weight w is left out w times, and its target is one observation.
        """
        check_is_fitted(self)
        self._check_examples("loo_")
        if "loo" not in self._kept:
            fit = self._point_fit()
            found = updates.leave_one_out(self._train, fit.noise_rows, fit.alpha, self._precisions())
            y = self._train.base + self._train.r.view_as(self._train.base)
            index = self._task_examples(len(y))
            columns = self._shaped(y - found.step), self._shaped(found.variance.sqrt()), found.score
            self._kept["loo"] = LeaveOneOut(*(x[index].cpu().numpy() for x in columns))
        return self._kept["loo"]

    @by_members
    @together
    def influence(self, X: Any) -> Any:
        """What each training example adds to each prediction: the mean at X less the mean without that example.

        Exact, in closed form, with ``prior_variance_`` and ``noise_`` kept: where the posterior averages over scales
        and noises, the influence is that of a regressor with their averages. Returns (m, n) for m inputs and n training
        examples, or (m, c, n). It is minus what `linnet.attribution` calls the change, which also knows other solvers,
        losses, layers, and the largest influences alone.
        """
        parts = self._influence(self._new_inputs(X))
        return convert_like(X, parts[:, 0] if self._one_column else parts)

    def _influence(self, J: Jacobian) -> Tensor:
        """`influence` at the inputs of J, (m, c, n)."""
        self._check_examples("influence")
        P = self._precisions()
        n, c = len(P), P.shape[1]
        fit = self._point_fit()
        step = torch.linalg.solve(P, fit.alpha.view(n, c, 1))[..., 0]
        A = updates.smoother(self._train, fit, J)  # (m c', n c): the mean's shift is A r
        return (A.view(J.n, J.c, n, c) * step).sum(3)[..., self._task_examples(n)]

    def _task_examples(self, n: int) -> Tensor:
        """Which of n training examples are not those of the source."""
        return torch.tensor([i for i in range(n) if self._source is None or i not in self._source])

    def _precisions(self) -> Tensor:
        if "precisions" not in self._kept:
            self.lin_.check_unchanged(contents=True)
            self._kept["precisions"] = updates.precisions(self._train, self._point_fit())
        return self._kept["precisions"]

    def _point_fit(self) -> Fit:
        """The fit of the training data with ``prior_variance_`` and ``noise_``: without an average, the fit itself."""
        if not self.averaged_:
            return self._fit_
        if "point" not in self._kept:
            task = replace(self._train, noise=replace(self._train.noise, value=self._fit_.choice.noise))
            settings = self._settings(solver=self.solver_)
            (fit,) = closed_form.condition([task], Prior("given", self.prior_variance_), settings)
            choice = replace(fit.choice, scales=self._fit_.choice.scales, floored=self._fit_.choice.floored)
            self._kept["point"] = replace(fit, choice=choice)
        return self._kept["point"]

    def _exported_form(self) -> Any:
        return "one number" if self._one_column else "numbers"

    # Shapes and noise.

    @property
    def _noise_name(self) -> str | None:
        """How the noise is found; None where it is given."""
        return self.noise if isinstance(self.noise, str) else None

    def _shaped(self, value: Tensor) -> Tensor:
        return value[:, 0] if self._one_column else value

    def _noise_at(self, f: Tensor, X: Any, noise: Any = True) -> Tensor:
        """Noise variances of observations at X, (n, c), where the network's outputs are f, or as the user says."""
        if not isinstance(noise, bool | np.bool_):
            each = as_variances(np.full(len(f), noise) if np.ndim(noise) == 0 else noise, *f.shape)
            return each.to(f)
        if self._noise_each:
            raise ValueError(
                "The regressor was fitted with a noise for each observation, and it does not know that of new ones: "
                "give their variances, as in predict(X, return_std=True, noise=variances)."
            )
        if self._noise_name == "heteroscedastic":
            return self._known_variances(self._inputs(X, reset=False)) * float(self.noise_)
        return torch.as_tensor(self.noise_, dtype=f.dtype, device=f.device).expand(f.shape)


class _Half:
    """Reads the means or the log variances of a network with both."""

    def __init__(self, output: Any, second: bool) -> None:
        self.output, self.second = output, second

    def __call__(self, raw: Any) -> Tensor:
        out = checks.output_tensor(raw) if self.output is None else self.output(raw)
        if out.ndim != 2 or out.shape[1] % 2:
            raise ValueError(
                "noise='heteroscedastic' needs a network with as many log variances as means, in this order: outputs "
                f"(n, 2 d); got {tuple(out.shape)}."
            )
        d = out.shape[1] // 2
        return out[:, d:] if self.second else out[:, :d]


def sum_normal_matrices(J: Any, weight: Tensor) -> Tensor:
    """``J^T W J`` (p, p), of a Jacobian or of a stack of Jacobians."""
    if not isinstance(J, Stack):
        return J.normal_matrix(weight)
    parts = [sum_normal_matrices(part, weight[rows]) for part, rows in J.placed()]
    return sum(parts[1:], start=parts[0])


def _can_compare(targets: Sequence[Tensor]) -> bool:
    """Whether targets tell mean functions apart: more than two of them, which are not all zero."""
    return sum(y.numel() for y in targets) > 2 and any(bool(y.any()) for y in targets)


def _row_weights(tasks: Sequence[Task]) -> Tensor | None:
    """How many times each row of all tasks counts; None for once."""
    if all(task.noise.weight is None for task in tasks):
        return None
    return torch.cat([torch.ones_like(t.r) if t.noise.weight is None else t.noise.weight for t in tasks])


def _weighted_mean(targets: Sequence[Tensor], weights: Sequence[Tensor | None], c: int) -> Tensor:
    """The mean of the targets of all tasks, (c,)."""
    y = torch.cat(list(targets)).view(-1, c)
    each = [torch.ones(len(t)) if w is None else w for t, w in zip(targets, weights, strict=True)]
    w = torch.cat([x.to(y) for x in each])
    return (w[:, None] * y).sum(0) / w.sum()


def _tell_apart(task: Task, source: range, c: int) -> Task:
    """The task with scales of their own for the noise of its source examples, after those of the others."""
    noise = task.noise
    if noise.value is not None:
        return task
    later = torch.arange(len(task.r), device=noise.group.device) // c >= source.start
    return replace(task, noise=replace(noise, group=noise.group + noise.count * later, count=2 * noise.count))


def _check_inputs_option(inputs: Any) -> None:
    if not isinstance(inputs, bool) and inputs != "auto":
        raise ValueError(f"inputs must be True, False or 'auto'; got {inputs!r}.")


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else value


def _from_json(value: Any) -> Any:
    return np.array(value) if isinstance(value, list) else value


def _single(values: Sequence[Any]) -> Any:
    """What the scales of the noise have: itself where there is one, else an array."""
    return values[0] if len(values) == 1 else np.array(values)


def _rounding(J: Jacobian, solver: str) -> float:
    """The relative rounding of a solver: dense ones add up in J's dtype, the others are as exact as passes are."""
    return J.eps if solver.startswith("cg") else torch.finfo(J.dtype).eps


def _check_noise(noise: Any, floor: Any) -> None:
    if isinstance(floor, bool) or not isinstance(floor, Real) or not 0 <= float(floor) < 1:
        raise ValueError(
            "noise_floor is the share of the mean squared residual that is assumed to be noise: 0 for none, or a "
            f"number below 1; got {floor!r}. Give a variance as noise=."
        )
    if isinstance(noise, str):
        known = ("evidence", "per-output", "heteroscedastic")
        if noise not in known:
            raise ValueError(f"noise must be one of {', '.join(map(repr, known))} or a variance; got {noise!r}.")
        return
    values = np.asarray(noise, dtype=float).ravel()
    if len(values) == 0 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"noise is a variance and must be positive; got {noise!r}. Without noise the kernel of equal or dependent "
            "examples is singular: give a small one, or 'evidence'."
        )
