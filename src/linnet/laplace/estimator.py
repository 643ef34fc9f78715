"""Door 2: error bars for a network as it stands, the linearized Laplace approximation."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import (
    Checkpoint,
    check_fits,
    check_folder,
    check_samples,
    messages,
    remove_checkpoints,
    tensor_code,
    together,
)
from linnet._estimator import (
    ClassUncertaintyMixin,
    Counted,
    Dtypes,
    EnsembleMixin,
    ErrorBarsMixin,
    HubMixin,
    Linearity,
    PredictiveModule,
    as_labels,
    as_targets,
    by_members,
    check_has_exact,
    check_inputs,
    check_is_no_regression,
    check_variance,
    convert_like,
    draw_inputs,
    find_codes,
    find_labeled,
    find_output_names,
    leave_out_ignored,
    leave_out_weightless,
    list_options,
    make_jacobian,
    make_predictive_module,
    name_classes,
    parse_dtype,
    warn_of_probabilities,
)
from linnet.data import Batch
from linnet.inference import (
    Certificate,
    LogDet,
    Slope,
    SolverSettings,
    check_covariance_fits,
    check_outputs_fit,
    choose_solver,
    maximize,
)
from linnet.jacobian import CurvatureSums, Jacobian, Linearization, Rotation, combine_outputs, linearize
from linnet.laplace import files, forgetting
from linnet.laplace import search as laplace_search
from linnet.laplace.carried import (
    CarriedCurvature,
    check_earlier,
    choose_structure,
    find_earlier,
    is_earlier,
    mean_and_precision,
)
from linnet.laplace.evidence import (
    AtKernelMode,
    AtLinearMode,
    AtNetwork,
    Evidence,
    LinearModel,
    group_norms,
    unexplained,
)
from linnet.laplace.penalty import QuadraticPenalty
from linnet.laplace.predictive import (
    Predictive,
    average_probabilities,
    draw_groups,
    joint_density,
    joint_log_likelihood,
    log_score,
    sample_root,
)
from linnet.laplace.search import Method, Search, Step
from linnet.laplace.structures import (
    CurvatureStructure,
    DiagonalCurvature,
    FullCurvature,
    Keep,
    KernelCurvature,
    KroneckerCurvature,
    LowRankCurvature,
    SampledCurvature,
    SubnetworkCurvature,
    kernels_of,
    no_checkpoint,
    table_bytes,
)
from linnet.linalg import blocks_of_chunk, weight_from_root
from linnet.network import FlatOutput, Params, check_module
from linnet.probability import (
    Bernoulli,
    Categorical,
    EarlierPosterior,
    Gaussian,
    Heteroscedastic,
    KnownNoise,
    Likelihood,
    Ordinal,
    Posterior,
    PredictiveMoments,
    Prior,
    PriorSpec,
    Sites,
    Spread,
    Weibull,
    Weighted,
    as_continuous,
    as_variances,
    check_prior,
    describe_likelihood,
    likelihood_for,
    make_prior,
    precision_of,
    predict_target,
    row_root,
    without_weights,
)

log = logging.getLogger("linnet")

StructureName = Literal["auto", "full", "function", "lowrank", "kron", "ekfac", "diag", "subnetwork", "samples"]
At = Literal["network", "linear_mode"]

KEPT = ("full", "function", "lowrank", "samples")
"""Structures that read the Jacobian many times, so that it is kept in memory where it fits."""

BOUNDED = ("kron", "ekfac", "diag")
"""Structures without correlations, whose effective dimension is too large to tell the noise; see `tune`."""

RESUMED = ("kron", "ekfac", "diag", "lowrank", "samples")
"""Structures whose fits go on from a checkpoint."""

BY_OUTPUT = ("kron", "ekfac", "diag", "subnetwork")
"""Structures that take a backward pass for each output, so that many outputs are drawn."""

DRAWN_ROWS = 1024
"""Labels that are drawn in all where outputs are many, at least one for each example: more of them take time, fewer of
them leave more noise in the Fisher information."""

SAMPLED = 1e-3
"""Log evidence that is not worth another solve, where the evidence comes from samples."""

FAR = 3.0
"""A gradient this many times as large as noise in the labels would make it says that the network is not trained."""


SPARED = 0.005
"""Nats per training label that averaging over a posterior may cost: narrow error bars against a wide prior."""

WIDE = 0.2
"""Nats per training example that error bars may cost before they are said to be too wide."""

LOOKED_AT = 200
"""Training examples on which the cost of error bars is measured."""


class Laplace(HubMixin, ClassUncertaintyMixin, EnsembleMixin, ErrorBarsMixin, BaseEstimator):
    r"""Error bars for a trained network: the Gaussian posterior of its weights, linearized.

    .. math:: \theta \sim N(0, S), \qquad \theta \mid y \approx N(\theta_0, H^{-1}), \quad H = J^\top B J + S^{-1},
              \qquad f(x) \sim N\left(f(x; \theta_0), \; J(x) H^{-1} J(x)^\top\right)

    The mean is the network itself. Give it the data that the network was trained on, in evaluation order.

    Args:
        model: The trained network. A list of networks, or of checkpoints of one training run, makes an ensemble: the
            mixture of as many approximations.
        likelihood: "classification" (softmax; one output is the logit of 1; targets (n, c) of zeros and ones are
            labels that are on or off apart from each other), "regression" (Gaussian noise), "heteroscedastic" (means,
            then as many log variances), "ordinal" (classes in an order, from one output), "poisson" and
            "negative-binomial" (counts, from logarithms of their means), "weibull" (times until an event, some of them
            censored, from the logarithm of the time), or a `linnet.likelihoods.Likelihood`, such as one of your own.
            Thresholds, dispersion or shape that are left open are those of largest likelihood at the network.
        structure: The form of the posterior, see `linnet.laplace.structures`: "full" and "function" are exact and
            equal; "kron", "ekfac", "diag", "lowrank", "subnetwork" and "samples" approximate. "auto" takes an exact one
            where it fits memory, then "samples".
        prior: Variances of theta itself, around zero: "shared", "ntk", "balanced" or "layerwise", whose scales the
            evidence chooses, no wider than the data bear (see `tune`); "unit"; a variance; or
            variances by layer glob. Variance is one over the precision or weight decay that others speak of. Or an
            earlier fitted `Laplace` of the same architecture and the same ``params``: its posterior, with its mean and
            precision, is the prior. Train the network with `penalty` of the earlier one, then fit here.
        params: Which parameters are random; see `linnet.linearize`. The last layer alone: its name with ".*".
        output: How to read the model's outputs; see `linnet.linearize`. Axes beyond the second are sites, each with
            its own targets; see `linnet.network.flat_output`.
        noise: Variance of the observations for "regression": a number, one for each output, one for each observation,
            (n,) or (n, c), "evidence" (one for all, the default where None), or "per-output" (one for each, by the
            evidence). "kron", "ekfac" and "diag" have a
            smaller one than that of largest evidence, which is far too large; see `tune`.
        rank: Number of eigenpairs of "lowrank".
        size: Number of parameters of "subnetwork".
        ignore_index: Label of examples, and of sites, that count for nothing, as in torch: for integer labels of
            classes. None for no such label.
        samples: Number of draws of the structure "samples" and of error bars from samples.
        variance: How error bars are made: "exact", or "samples" (from posterior samples that are drawn once: any number
            of outputs costs ``samples`` products with the Jacobian). "auto" takes samples for more than 16 outputs for
            each sample, and for the structure "samples".
        draws: None for the exact Fisher information; a number m replaces it by the average of m labels drawn for
            each example: unbiased, and m backward passes in place of one for each output. "auto" draws labels where
            outputs are many, as for ``variance``, and the structure is "kron", "ekfac", "diag" or "subnetwork", which
            need one backward pass for each output; other structures need products alone.
        tolerance: Relative residual of the solve for "samples".
        weights: Weights of the networks of an ensemble: "uniform", "evidence" (in proportion to the evidence of each),
            or a number for each network.
        dtype: Dtype of the network, as for `TangentRegressor`. Curvatures, solves and predictions are in float64,
            unless a GPU is slow at float64.
        memory: Bytes that dense matrices, and a pass over the data, may take, each; or "auto".
        batch_size: Number of examples per chunk, or "auto".
        checkpoint: A folder that keeps the state of a long fit: sums over the examples for "kron", "ekfac" and "diag",
            the basis of "lowrank", the solves of "samples". A fit that was interrupted goes on from the state, also
            with another number of ranks. All ranks must see the folder. The folder is removed at the end of the fit.
        seed: Seed of all random draws.
        progress: False for no progress bars.

    Attributes:
        structure_: The structure used.
        likelihood_: With its noise.
        posterior_: Over the displacement of the parameters.
        prior_variance_: (p,); with an earlier posterior as the prior, its marginal variances.
        theta_: (p,), the parameters that the posterior is around, as they were when it was fitted.
        scales_: Prior scales by name.
        noise_: Noise variance: one, (c,), or that of each observation; None without.
        effective_dimension_: How many parameters the data determine.
        gradient_norm_: The norm of the gradient of log posterior at the network; zero at a mode. It is not known (NaN)
            for what `linnet.merge` makes.
        gradient_ratio_: The gradient of the log likelihood, in units of what noise in the labels alone would make it.
        tune_path_: Steps of the last search: log evidence, scales, noise, effective dimension.
        variance_: "exact" or "samples"; ``std_error_`` is the relative standard error of the error bars.
        draws_: Labels drawn for each example for the Fisher information; None where it is exact.
        narrowed_: The factor by which the sum of the prior variances of largest evidence was made smaller; 1 for none.
        members_: Of an ensemble, the fitted approximation of each network; ``weights_`` their weights.

    Example:
        >>> X = torch.linspace(-2, 2, 40)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))  # your trained network
        >>> y = model(X)[:, 0].detach() + 0.1 * torch.randn(40)
        >>> la = Laplace(model, "regression").fit(X, y)
        >>> mean, std = la.predict(X, return_std=True)
        >>> mean.shape, std.shape, la.structure_
        (torch.Size([40]), torch.Size([40]), 'function')
    """

    lin_: Linearization
    posterior_: Posterior
    likelihood_: Likelihood
    structure_: str
    prior_variance_: Tensor
    theta_: Tensor
    scales_: dict[str, float]
    noise_: Any
    effective_dimension_: float
    gradient_norm_: float
    gradient_ratio_: float
    tune_path_: tuple[Step, ...]
    draws_: int | None
    narrowed_: float
    n_features_in_: int
    prior: Any
    _known_evidence: float
    _prior: Prior
    _unit: Likelihood
    _read: FlatOutput
    _noise_base: Tensor | None
    _noise_each: Tensor
    _weight: Tensor | None = None
    _gradient: Tensor  # of the log likelihood, (p,)
    _forgotten: int = 0  # examples
    _lost: float = 0.0  # what rounding did to variances where examples were forgotten
    _seen: Tensor | None = None  # checksums of the training examples, in what was loaded from a file
    _traces: dict[tuple[int, int], Tensor] | None = None  # of Kronecker factors, in what was loaded from a file
    _one_column: bool
    _probe: Batch | None

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        likelihood: str | Likelihood = "classification",
        structure: StructureName = "auto",
        prior: PriorSpec | Laplace | EarlierPosterior = "shared",
        params: Params = None,
        *,
        output: Any = None,
        noise: float | Sequence[float] | Tensor | str | None = None,
        rank: int = 64,
        size: int = 1000,
        samples: int = 64,
        variance: str = "auto",
        draws: int | str | None = "auto",
        ignore_index: int | None = -100,
        classes: Sequence[Any] | None = None,
        tolerance: float = 1e-2,
        weights: str | Sequence[float] = "uniform",
        dtype: Any = "auto",
        memory: float | str = "auto",
        batch_size: int | str = "auto",
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.model, self.likelihood, self.structure = model, likelihood, structure
        self.prior, self.params = prior, params
        self.output, self.noise, self.rank, self.size = output, noise, rank, size
        self.samples, self.variance, self.draws, self.ignore_index = samples, variance, draws, ignore_index
        self.classes = classes
        self.tolerance, self.weights, self.dtype, self.memory = tolerance, weights, dtype, memory
        self.batch_size, self.checkpoint, self.seed, self.progress = batch_size, checkpoint, seed, progress

    # Fitting.

    @by_members
    @together
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Laplace:
        """The posterior given the training data: inputs and targets, or a Dataset or DataLoader that has both.

        Args:
            X: Inputs.
            y: Targets; None where they come with the inputs.
            sample_weight: How many times each example counts, (n,): it multiplies the log likelihood. An example of
                weight 2 counts as the same example given twice, in the evidence too; one of weight 0 is left out.
        """
        check_options(self)
        self.__dict__.pop("classes_", None)  # of a fit before
        model = check_module(self.model)
        inputs, weight, kept = leave_out_weightless(check_inputs(self, X, reset=True), sample_weight, model.forward)
        y = kept.take(y)

        def make(dtypes: Dtypes) -> Jacobian:
            self._attach(model, dtypes)
            if is_earlier(self.prior):
                self._prior = find_earlier(self, self.lin_)
            else:
                self.__dict__.pop("_prior", None)  # of a fit before
                check_prior(self.prior, self.lin_)
            return self._jacobian(inputs)

        inputs, J, targets, labeled = self._labeled(inputs, make_jacobian(model, self.dtype, make), y)
        weight = labeled.take(weight)
        check_structure_fits(self, J)
        check_outputs_fit(J)
        self._probe = draw_inputs(J._source)
        self._one_column = J.c == 1 and (targets.ndim == 1 or tuple(targets.shape[1:]) == (2,))  # times have flags
        self._unit, self._noise_base = self._likelihood_of(targets, J)
        if isinstance(self._unit, KnownNoise):
            self._noise_each = known = as_variances(kept.take(self.noise, "variances"), J.n, J.c)
            targets = as_continuous("regression", targets, J.n, J.c, J.dtype, J.device)
            targets = KnownNoise.pack(targets, known)
        self._name_numbers(targets, J)
        self._y = self._unit.targets(targets, J.n, J.c, dtype=J.dtype, device=J.device)
        earlier = None if self._earlier is None else torch.stack([self._earlier.mean, self._earlier.base])
        self.lin_.check_ranks_agree(options=list_options(self), targets=self._y, earlier=earlier)
        self._train_inputs = inputs
        if self._unit.is_open:
            self._unit = self._unit.fitted(J.outputs(), self._y, weight)
        if weight is not None:
            self._unit, self._y = Weighted.pack(self._unit, self._y, weight.to(J.device, J.dtype))
        self._weight = weight
        if is_earlier(self.prior):
            assert self._earlier is not None
            self.structure_ = choose_structure(self, self._earlier)
        else:
            self.structure_ = self._choose(J) if self.structure == "auto" else self.structure
        if self.structure_ == "samples":
            check_has_exact(self.variance, "structure='samples'", "another structure")
        self.draws_ = self._count_draws(J)
        keep = self._checkpoints(J)
        sums = self._pass_over(J, keep)
        self._prior = self._prior if is_earlier(self.prior) else self._make_prior(self.prior)
        self._scales: tuple[float, ...] = (1.0,) * max(1, len(self._prior.scales))
        self._noise, unit = 1.0, self._unit
        self._structure = self._fitted(
            self._root(self._f, self._y) if sums is None or self.structure_ == "ekfac" else None, sums, keep
        )
        self._log_det = self._structure.log_det(self._prior)
        self.tune_path_ = ()
        search = Search(bool(self._prior.scales), self._noise_free, bounded=self.structure_ in BOUNDED)
        if search.scales or search.noise:
            evidence = self._evidence("network", self._prior, self._log_det)
            if self._log_det.cost == "solve":
                search = replace(search, method="mackay", gain=SAMPLED)
            cost = self._log_det.cost
            path = laplace_search.choose(evidence, search, scales=self._scales, noise=self._noise, cost=cost)
            self._accept(self._prior, self._log_det, path)
            if isinstance(self.noise, str) and self.noise == "per-output":
                self._by_output(search)
        else:
            self._refresh()
        self._measure_distance(None if sums is None or self._unit is not unit else sums.gradient / self._noise)
        self._narrow(search.scales)
        self.lin_.check_unchanged(contents=True)
        self._remove_checkpoints(keep)
        self.theta_ = self.lin_.flat_theta.detach().clone()
        return self

    def _checkpoints(self, J: Jacobian) -> Keep:
        """Gives the checkpoints of the steps of a fit to the Jacobian of the training data."""
        folder = self.checkpoint
        if folder is None or self.structure_ not in RESUMED:
            return no_checkpoint
        Path(folder).mkdir(exist_ok=True)
        given = self.likelihood if isinstance(self.likelihood, str) else describe_likelihood(self.likelihood)
        options = [one for one in list_options(self) if one[0] not in ("checkpoint", "memory", "batch_size")]
        targets = f"{int(tensor_code(self._y)):x}"

        def keep(name: str, more: Callable[[], Mapping[str, str]] = dict) -> Checkpoint:
            def identity() -> dict[str, str]:
                return {"the options": f"{options} {given}", "the targets": targets, **J.checksums(), **more()}

            return Checkpoint(
                Path(folder) / name, kind=f"a Laplace approximation ({name})", identity=identity, ranks=J.ranks
            )

        return keep

    def _remove_checkpoints(self, keep: Keep) -> None:
        if self.checkpoint is not None and keep is not no_checkpoint:
            if isinstance(self._structure, SampledCurvature):
                self._structure.keep = no_checkpoint
            remove_checkpoints(self.checkpoint, self.lin_.ranks)

    def _labeled(self, inputs: Any, J: Jacobian, y: Any) -> tuple[Any, Jacobian, Tensor, Counted]:
        """Inputs, Jacobian and targets of the examples that are not to be ignored, and which these are; J is that of
        all inputs."""
        if getattr(getattr(y, "dtype", None), "names", None):  # times with their flags, in named fields
            y = likelihood_for(self.likelihood, torch.empty(0), (1,)).targets(y, J.n, 1)
        targets = as_targets(self._encode_labels(y, J), J)
        classes = self.likelihood in ("classification", "ordinal")
        if classes or isinstance(self.likelihood, Bernoulli | Categorical | Ordinal):
            found = leave_out_ignored(inputs, targets, targets, self.ignore_index)
            if found is not None:
                counted = Counted(J.n, find_labeled(targets, self.ignore_index))
                return found[0], self._jacobian(found[0]), found[1], counted
        return inputs, J, targets, Counted(J.n)

    def _encode_labels(self, y: Any, J: Jacobian) -> Any:
        """Numbers of outputs in place of labels that are text, or that ``classes=`` names; other targets as they are.

        The first labels give ``classes_``.
        """
        if self.likelihood == "classification" and "classes_" not in vars(self):
            check_is_no_regression(y)
        text = isinstance(y, np.ndarray | list | tuple) and np.asarray(y).dtype.kind in "UO"
        if self.classes is None and not text:
            return y
        labels = as_labels(J.targets() if y is None else y, J.n)
        named = self.likelihood == "classification" or isinstance(self.likelihood, Bernoulli | Categorical)
        if not named or self._read.shape or labels.ndim != 1:
            raise TypeError(
                "Labels that are text, or that classes= names, are for one class of each example, "
                f"likelihood='classification'. Give numbers with likelihood={self.likelihood!r}."
            )
        kept = find_labeled(labels, self.ignore_index)
        counted = labels if kept is None else labels[kept.numpy()]
        if "classes_" not in vars(self):
            count = max(2, J.c)
            classes = find_output_names(self.model, count) if self.classes is None else self.classes
            if classes is None:
                raise ValueError(
                    f"The labels are words such as {str(counted[0])!r}, and Laplace keeps the outputs of the network: "
                    "which output is which? Pass classes=, the label of each output in order."
                )
            self.classes_ = name_classes(counted, count, classes)
        codes = np.full(len(labels), self.ignore_index or 0)
        index = slice(None) if kept is None else kept.numpy()
        codes[index] = find_codes(counted, self.classes_)
        return codes

    def _name_numbers(self, targets: Tensor, J: Jacobian) -> None:
        """The numbers of the outputs as ``classes_``, where labels are numbers."""
        one = (targets.ndim == 1 or tuple(targets.shape[1:]) == (1,)) and not self._read.shape
        if "classes_" not in vars(self) and one and isinstance(self._unit, Bernoulli | Categorical):
            self.classes_ = np.arange(max(2, J.c))

    def _make_prior(self, spec: PriorSpec) -> Prior:
        """The prior for the training data, by the weights of its examples."""
        if is_earlier(spec) or isinstance(self._earlier, EarlierPosterior):
            raise NotImplementedError(
                "A fit has its earlier posterior as its prior for good, or none. Fit again, with the prior in the "
                "constructor: Laplace(model, prior=...)."
            )
        w = self._weights
        return make_prior(self.lin_, spec, J=self._J, weight=None if w is None else w.repeat_interleave(self._J.c))

    @property
    def _earlier(self) -> EarlierPosterior | None:
        """The earlier posterior that is the prior; None for a prior around zero."""
        prior = getattr(self, "_prior", None)
        return prior if isinstance(prior, EarlierPosterior) else None

    @property
    def _weights(self) -> Tensor | None:
        """How many times each training example counts, (n,); None for once."""
        return self._unit.split(self._y)[1] if isinstance(self._unit, Weighted) else None

    @property
    def _rows(self) -> float:
        """Outputs of all training examples, by their weights."""
        w = self._weights
        return self._f.numel() if w is None else float(w.double().sum()) * self._f.shape[1]

    def _attach(self, network: nn.Module, dtypes: Dtypes) -> None:
        self._read = FlatOutput(self.output)
        self._dtypes, self.lin_ = dtypes, dtypes.apply(linearize(network, self.params, self._read))

    @property
    def _memory(self) -> float | str:
        """Bytes that dense matrices may take, the same on all ranks."""
        return self.lin_.agree_on_memory(self.memory)

    def _choose(self, J: Jacobian) -> str:
        """An exact structure where it fits memory and patience, else samples."""
        kernels = len(self.lin_.layout.layers) + 1 if self.prior == "layerwise" else 1
        steps = 10 if self.prior == "layerwise" else 3
        if self.draws == "auto" and J.has_many_outputs(self.samples):
            return "samples"
        rows = J.n * (self.draws if isinstance(self.draws, int) else J.c)
        settings = SolverSettings(memory=self._memory)
        found = choose_solver(rows, J.shape[1], settings, device=J.device, kernels=kernels, steps=steps)
        return {"function": "function", "weight": "full"}.get(found, "samples")

    def _count_draws(self, J: Jacobian) -> int | None:
        """Labels that are drawn for each example in place of the exact Fisher information."""
        if self.draws != "auto":
            return None if self.draws is None else int(self.draws)
        if self.structure_ not in BY_OUTPUT or not J.has_many_outputs(self.samples):
            return None
        count = max(1, min(self.samples, math.ceil(DRAWN_ROWS / J.n)))
        log.info(
            "The Fisher information of %d outputs comes from %d labels drawn for each example; the exact one takes %d "
            "backward passes for each example: draws=None.",
            J.c,
            count,
            J.c,
        )
        return count

    def _pass_over(self, J: Jacobian, keep: Keep = no_checkpoint) -> CurvatureSums | None:
        """Read the outputs at the training data, with the sums of structures that are known from one pass."""
        sums = self._first_pass(J, keep) if self.structure_ in BOUNDED and self.draws_ is None else None
        self._f = J.outputs() if sums is None else sums.f
        if isinstance(without_weights(self._unit), Bernoulli | Categorical):
            warn_of_probabilities(self._f, J.lin.given)
        # A checkpoint is of the data itself.
        cache = self.structure_ in KEPT and self.draws_ is None and keep is no_checkpoint
        self._J = J.cached_if_fits() if cache else J
        return sums

    def _first_pass(self, J: Jacobian, keep: Keep) -> CurvatureSums:
        """Outputs, curvature and gradient of the log likelihood at noise one, from one pass over the data."""
        unit = self._unit

        def targets(batch: Batch) -> tuple[Tensor, Tensor]:
            assert batch.f is not None
            return batch.f, self._y[batch.start : batch.start + batch.n]

        def root(batch: Batch) -> Tensor:
            f, y = targets(batch)
            if not bool(f.isfinite().all()):  # the pass says which example it is
                return torch.ones_like(f)
            return blocks_of_chunk(self._root(f, y), 0, batch.n, J.c)

        form: Literal["kron", "diag"] = "diag" if self.structure_ == "diag" else "kron"
        return J.curvature(form, root, lambda batch: unit.residual(*targets(batch)), checkpoint=keep("factors"))

    def _fitted(self, root: Any, sums: CurvatureSums | None = None, keep: Keep = no_checkpoint) -> CurvatureStructure:
        """The structure for a root of the curvature at noise one, or from what a first pass has found."""
        earlier, name = self._earlier, self.structure_
        if earlier is None:
            return self._fitted_as(name, root, sums, keep)
        # Factors first: the coordinates of the exact curvature are those of the sum with the prior.
        found = self._fitted_as("kron" if name == "ekfac" else name, root, sums, keep)
        along = None
        if name == "ekfac":
            J, root = (self._J, root) if self.draws_ is None else self._combined(root)
            along = partial(self._squares_along, J, weight_from_root(root))
        # The noise of largest evidence is not known yet where it is free: that of the residuals alone.
        noise = self._energy(self._f) / self._rows if self._noise_free and self._noise_base is not None else 1.0
        return CarriedCurvature(earlier, found, name=name, t=1 / noise, along=along)

    @staticmethod
    def _squares_along(J: Jacobian, weight: Any, rotation: Rotation | None) -> Tensor:
        """The diagonal of the exact curvature in some coordinates, (p,)."""
        return (J if rotation is None else J.rotated(rotation)).column_norms(weight)

    def _combined(self, root: Any) -> tuple[Jacobian, Tensor]:
        """The Jacobian of the labels that are drawn, and its root."""
        J = combine_outputs(self._J, root)
        J = J.cached_if_fits() if self.structure_ in KEPT else J
        return J, torch.ones(J.n, J.c, dtype=J.dtype, device=J.device)

    def _fitted_as(
        self, name: str, root: Any, sums: CurvatureSums | None = None, keep: Keep = no_checkpoint
    ) -> CurvatureStructure:
        """The structure of a name, without an earlier posterior."""
        J = self._J
        options: dict[str, Any]
        if name == "diag" and sums is not None:
            return DiagonalCurvature(J, root, sums=sums)
        if name in ("kron", "ekfac") and sums is not None:
            return KroneckerCurvature(J, root, corrected=name == "ekfac", sums=sums, keep=keep)
        if self.draws_ is not None:
            J, root = self._combined(root)
        if name in ("kron", "ekfac"):
            return KroneckerCurvature(J, root, corrected=name == "ekfac", keep=keep)
        if name == "lowrank":
            memory = self._memory
            options = {"seed": self.seed, "memory": memory, "progress": self.progress}
            return LowRankCurvature(J, root, rank=self.rank, keep=keep, **options)
        if name == "subnetwork":
            variance = self._prior.variance(self._scales if self._prior.scales else ())
            return SubnetworkCurvature(J, root, size=self.size, variance=variance, t=1 / self._noise)
        if name == "samples":
            options = {"tolerance": self.tolerance, "seed": self.seed, "progress": self.progress}
            return SampledCurvature(J, root, k=self.samples, keep=keep, memory=self._memory, **options)
        simple: dict[str, Callable[[Jacobian, Any], CurvatureStructure]] = {
            "full": FullCurvature,
            "function": KernelCurvature,
            "diag": partial(DiagonalCurvature, keep=keep),
        }
        return simple[name](J, root)

    def _root(self, f: Tensor, y: Tensor) -> Any:
        """A root of the curvature at noise one, (n, c), or (n, c, m), or `ClassBlocks`, for outputs and targets."""
        root: Any
        if self.draws_ is not None:
            unit = without_weights(self._unit)
            if isinstance(unit, Weibull):
                raise NotImplementedError(
                    "draws= draws times that are seen to their end, and censored ones say less. Use draws=None."
                )
            root = sample_root(unit, f, self.draws_, seed=self.seed)
            if isinstance(self._unit, Weighted):
                root = root * self._unit.split(y)[1].sqrt()[:, None, None]
        else:
            if not self._unit.diagonal and not isinstance(self._inner, Categorical):
                check_fits(
                    3 * f.numel() * f.shape[1] * f.element_size(),
                    self.memory,
                    f.device,
                    what=f"The curvature of {len(f):,} examples with {f.shape[1]:,} outputs",
                    instead="Draw the Fisher information instead, with draws=1 or a few",
                )
            check_curvature(self._unit, f[:256], y[:256])
            if self.structure_ == "function":
                return self._unit.observed_root(f, y)
            root = row_root(self._unit, f, y)
            return root.view_as(f) if root.ndim == 1 else root
        kept = self._kept_sites(y)
        return root if kept is None else root * kept.repeat_interleave(self._read.shape[0], 1).to(root)[..., None]

    def _kept_sites(self, y: Tensor) -> Tensor | None:
        """The sites whose labels count, (n, sites); None for all."""
        unit = without_weights(self._unit)
        return unit.is_kept(self._split(y)[0]) if isinstance(unit, Sites) else None

    def _split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Targets without their weights, and the weights, (n,)."""
        if isinstance(self._unit, Weighted):
            return self._unit.split(y)
        return y, torch.ones(len(y), dtype=self.lin_.dtype, device=y.device)

    @property
    def _inner(self) -> Likelihood:
        """The likelihood of one site of an example of weight one."""
        unit = without_weights(self._unit)
        return unit.inner if isinstance(unit, Sites) else unit

    def _count_labels(self, y: Tensor) -> Tensor:
        """How many labels of each example count, (n,), by its weight."""
        kept, w = self._kept_sites(y), self._split(y)[1]
        return w * (math.prod(self._read.shape[1:]) if kept is None else kept.sum(1))

    def _refresh(self) -> None:
        """The posterior for the present prior and noise."""
        prior = self._prior
        self.prior_variance_ = prior.variance(self._scales) if prior.scales else prior.base
        self.posterior_ = self._structure.posterior(self.prior_variance_, 1 / self._noise)
        self._settle_variance(self._J)
        self.scales_ = dict(zip(prior.scales, self._scales, strict=True)) if prior.scales else {}
        self.likelihood_ = without_weights(self._with_noise(self._noise))
        base = None if self._noise_base is None else self._noise_base * self._noise
        base = self._noise_each if isinstance(self._inner, KnownNoise) else base
        self.noise_ = None if base is None else float(base) if base.ndim == 0 else base.cpu().numpy()
        self.effective_dimension_ = sum(self._log_det(self._scales, 1 / self._noise)[1])

    # The likelihood.

    def _likelihood_of(self, y: Tensor, J: Jacobian) -> tuple[Likelihood, Tensor | None]:
        """The likelihood at noise scale one, and the noise that it has there."""
        shape = self._read.shape
        noise: Any = 1.0 if self._noise_free else self.noise
        if isinstance(self.noise, str) and self.noise == "per-output":
            noise = [1.0] * J.c
            if shape:
                raise ValueError("noise='per-output' is for outputs without sites; use 'evidence', or variances.")
        base = torch.as_tensor(1.0 if noise is None else noise, dtype=J.dtype, device=J.device)
        if base.ndim == 2 or (base.ndim == 1 and len(base) not in (1, J.c)):
            if shape:
                raise ValueError(
                    "noise for each observation is for outputs without sites; use 'evidence', or variances."
                )
            return KnownNoise(), None
        found = likelihood_for(self.likelihood, y, shape or (J.c,), noise=base if base.ndim else float(base))
        known = torch.as_tensor(found.noise, dtype=J.dtype, device=J.device) if isinstance(found, Gaussian) else None
        return (Sites(found, shape, self.ignore_index) if shape else found), known

    @property
    def _noise_free(self) -> bool:
        return self.likelihood == "regression" and (self.noise is None or isinstance(self.noise, str))

    def _with_noise(self, noise: float) -> Likelihood:
        """The likelihood with its noise times a scale, and with the weights of the examples."""
        if self._noise_base is None:
            return self._unit
        base = self._noise_base * noise
        found: Likelihood = Gaussian(base if base.ndim else float(base))
        found = Sites(found, self._read.shape) if self._read.shape else found
        return self._unit.with_inner(found) if isinstance(self._unit, Weighted) else found

    # The evidence.

    @by_members
    @together
    def log_evidence(self, at: At = "network", *, prior: PriorSpec | None = None, noise: float | None = None) -> float:
        r"""The log marginal likelihood of the training data, by Laplace's approximation.

        .. math:: \log p(y \mid f) - \tfrac12 \theta^\top A \theta + \tfrac12 \log\det A - \tfrac12 \log\det H

        Args:
            at: "network" takes the network's own weights, "linear_mode" those that are the mode of the linearized
                network under this prior; in networks with normalization layers only the second makes sense of a prior
                that is not one for each layer.
            prior: Another prior than the present one: a variance, variances by layer, or "unit".
            noise: Another noise variance.
        """
        check_is_fitted(self)
        if not hasattr(self, "_structure") and at == "network" and prior is None and noise is None:
            return self._known_evidence
        self._check_data("log_evidence at another place")
        given, log_det, scales = self._prior, self._log_det, self._scales
        if prior is not None:
            given = self._make_prior(prior)
            if given.scales:
                raise ValueError(
                    f"log_evidence needs a prior without open scales; {prior!r} has {len(given.scales)}. "
                    "Choose them with tune(prior=...)."
                )
            log_det, scales = self._structure.log_det(given), (1.0,)
        scale = self._noise
        if noise is not None:
            if self._noise_base is None or self._noise_base.ndim:
                raise ValueError("noise= is for a regression with one noise variance.")
            scale = noise / float(self._noise_base)
        return self._evidence(at, given, log_det)(scales, scale).value

    @by_members
    @together
    def tune(
        self,
        prior: PriorSpec | None = None,
        *,
        noise: bool | None = None,
        method: Method = "gradient",
        at: At = "network",
        steps: int = 500,
        validation: Any = None,
        narrow: bool = True,
    ) -> Laplace:
        """Choose prior scales and noise by the evidence; `tune_path_` has the steps.

        A classifier that is sure of its labels has next to no curvature, and the evidence, which looks no further than
        curvature and the size of the weights, then takes a prior so wide that averages over the posterior forget the
        labels. So the variances of largest evidence are multiplied by the largest factor up to one (`narrowed_`) with
        which averaging costs no more on training labels than the standard error of the network's own loss there, or
        0.005 nats a label. Data that were held out from training settle the size better.

        In a regression, weights that the data do not determine keep their initial values, and the evidence counts their
        size for the size of the prior: ``|theta|^2 / gamma``, with gamma the effective dimension, where ``|theta|^2 /
        p`` would be the variance of all p weights. The first gives error bars that are too wide, the second error bars
        that are too narrow. So the factor of each scale is ``sqrt(gamma / p)``, half-way between the two; the noise
        stays. With ``at="linear_mode"`` there is no such factor.

        The structures "kron", "ekfac" and "diag" leave correlations out, so that the data seem to determine more
        parameters than they do, often more than there are observations, and the evidence takes what is left of the
        residuals for a noise several times too large. So their noise is ``(1 + gamma / n) / n`` times the squared
        residuals, with gamma the effective dimension and n all observations, in place of ``1 / (n - gamma)``: nearly
        the same where gamma is small. The scales are those of largest evidence at that noise.

        Args:
            prior: Whose scales: "shared", "layerwise", "ntk", "balanced"; a variance or variances by layer are given a
                common factor. None means the prior that there is.
            noise: Whether the noise is chosen too; None means where it is a regression's.
            method: "gradient" (L-BFGS with the analytic gradient) or "mackay" (the fixed point of the effective
                dimensions).
            at: As for `log_evidence`.
            steps: Limit.
            validation: Inputs and targets that the network was not trained on, ``(X, y)`` or a Dataset. After the
                evidence, all prior variances are multiplied by the factor with the largest log probability there.
            narrow: False for the largest evidence itself, in scales and noise, whatever it costs; for classes a warning
                says so where that is much.
        """
        check_is_fitted(self)
        self._check_data("tune")
        spec = self.prior if prior is None else prior
        if not is_earlier(spec):
            check_prior(spec)
        search = Search(True, self._noise_base is not None if noise is None else noise, method, steps)
        search = replace(search, bounded=narrow and self.structure_ in BOUNDED)
        if search.noise and self._noise_base is None:
            raise ValueError(f"{self._unit!r} has no noise variance to choose; leave noise= out.")
        by_output = isinstance(self.noise, str) and self.noise == "per-output" and search.noise
        if by_output and at == "linear_mode":
            raise NotImplementedError("Noise for each output is chosen at the network only; use noise=False.")
        found = self._make_prior(spec) if prior is not None else self._prior
        found = found if found.scales else replace(found, scales=("all",))
        scales = self._scales if len(self._scales) == len(found.scales) else (1.0,) * len(found.scales)
        log_det = self._structure.log_det(found)
        exact = self.structure_ in ("full", "function") or self._noise_base is not None
        if at == "linear_mode" and method == "gradient" and not exact:
            raise NotImplementedError(
                "At the mode of the linear model the curvature of this likelihood moves with the prior, and the "
                f"gradient of the evidence is not known for structure={self.structure_!r}. Use method='mackay', or an "
                "exact structure."
            )
        if at == "linear_mode" or log_det.cost == "solve":
            search = replace(search, gain=SAMPLED if log_det.cost == "solve" else 1e-6)
        evidence = self._evidence(at, found, log_det)
        cost = "decomposition" if at == "linear_mode" and log_det.cost == "little" else log_det.cost
        path = laplace_search.choose(evidence, search, scales=scales, noise=self._noise, cost=cost)
        self._accept(found, log_det, path)
        if by_output:
            self._by_output(search)
        self.narrowed_ = 1.0
        if validation is not None:
            self._validated(validation)
        elif narrow:
            # At the linear mode, a regression counts the weights that the data determine alone.
            self._narrow(at == "network" or self._noise_base is None)
        elif self._earlier is None:
            self._measure_width()
        self.lin_.check_unchanged(contents=True)
        return self

    def _accept(self, prior: Prior, log_det: LogDet, path: Sequence[Step]) -> None:
        """Take over what a search has found."""
        self._prior, self._log_det, self.tune_path_ = prior, log_det, tuple(path)
        self._scales, self._noise = path[-1].scales, path[-1].noise
        self._refresh()

    def _by_output(self, search: Search) -> None:
        """The noise of each output, by the search over noises whose every point has the best scales for them."""
        y, w = self._split(self._y)
        squares, path = (w[:, None] * (y - self._f).square()).sum(0), list(self.tune_path_)
        inner, at = replace(search, noise=False), list[float]()

        def objective(x: list[float]) -> laplace_search.Evaluation:
            at[:] = x
            self._noise_base, self._noise = squares.new_tensor(x).exp(), 1.0
            self._unit = self._with_noise(1.0)
            self._structure = self._fitted(self._root(self._f, self._y))
            self._log_det = self._structure.log_det(self._prior)
            evidence = self._evidence("network", self._prior, self._log_det)
            cost = self._log_det.cost
            path.append(laplace_search.choose(evidence, inner, scales=self._scales, noise=1.0, cost=cost)[-1])
            self._accept(self._prior, self._log_det, path)
            gamma = (w[:, None] * self._error_bars.variance(self._J) / self._noise_base).sum(0)
            down = unexplained(float(w.sum()), gamma, bounded=search.bounded)
            pairs = zip((squares / self._noise_base).tolist(), down.tolist(), strict=True)
            return laplace_search.Evaluation(path[-1].log_evidence, [Slope(*pair) for pair in pairs])

        assert self._noise_base is not None
        start = (self._noise_base * self._noise).log().tolist()
        options: dict[str, Any] = {"gain": max(search.gain, 1e-12), "steps": search.steps, "compare": False}
        found = maximize(objective, [start], [(t - 28, t + 28) for t in start], **options)
        if not found.converged:
            raise ArithmeticError(
                f"The noise of each output was not settled after {search.steps} steps. Allow more with tune(steps=), "
                "or use noise='evidence', one for all."
            )
        if at != found.x:  # the last point that was tried was not the best
            objective(found.x)

    def _validated(self, validation: Any) -> None:
        """Multiply the prior variances by what serves held-out data best."""
        X, y = validation if isinstance(validation, tuple) else (validation, None)
        inputs = check_inputs(self, X, reset=False)
        _, J, targets, _ = self._labeled(inputs, self._jacobian(inputs), y)
        J = self._kept_for_variances(J)
        f = J.outputs()
        targets = self.likelihood_.targets(targets, J.n, J.c, dtype=J.dtype, device=J.device)
        variance = self._variance_by_factor(J)

        def score(factor: float) -> float:
            return log_score(self.likelihood_, f, variance(factor), targets)

        self._multiply([laplace_search.choose_factor(score)] * len(self._scales))

    def _narrow(self, by_evidence: bool) -> None:
        """Multiply prior variances that the evidence at the network chose by factors of at most one; see `tune`."""
        self.narrowed_ = 1.0
        if not by_evidence or self._earlier is not None:
            return
        if isinstance(self._predictive.inner, Gaussian) and self.structure_ not in BOUNDED:
            self._narrow_regression()
        elif isinstance(self._predictive.inner, Bernoulli | Categorical):
            self._narrow_classifier()

    def _narrow_regression(self) -> None:
        """Factors half-way between a variance of the weights that the data determine, and one of all weights."""
        group, before = self._prior.group, self.prior_variance_
        group = torch.zeros_like(before, dtype=torch.long) if group is None else group
        group = group if self._structure.included is None else group[self._structure.included]
        gamma = self._log_det(self._scales, 1 / self._noise)[1]
        counts = torch.bincount(group, minlength=len(gamma)).tolist()
        # Weights that the data say nothing about keep their scale.
        pairs = zip(gamma, counts, strict=True)
        self._multiply([math.sqrt(min(1.0, g / count)) if g > 0 else 1.0 for g, count in pairs])
        self.narrowed_ = float(self.prior_variance_.sum() / before.sum())

    def _narrow_classifier(self) -> None:
        """The factor that the training labels bear."""
        index = self._looked_at() if self._J.by_position else torch.arange(len(self._f))
        J = self._J.subset(index) if self._J.by_position else self._J
        f, y = self._f[index], self._y[index]
        labels = float(self._count_labels(y).sum())
        each = self._unit.log_prob(self._f, self._y) / self._count_labels(self._y)
        own = float(self._unit.log_prob(f, y).sum()) / labels
        variance = self._variance_by_factor(self._kept_for_variances(J))

        def cost(factor: float) -> float:
            return own - log_score(self._unit, f, variance(factor), y) / labels

        w = self._split(self._y)[1]
        spread = (w * (each - (w * each).sum() / w.sum()).square()).sum() / w.sum()
        limit = max(SPARED, float(spread.sqrt() / w.sum().sqrt()))
        self.narrowed_ = laplace_search.find_largest_factor(cost, limit)
        if self.narrowed_ < 1:
            self._multiply([self.narrowed_] * len(self._scales))

    def _variance_by_factor(self, J: Jacobian) -> Callable[[float], Tensor]:
        """The variances of the outputs of J, (n, c), as a function of a factor of all prior variances."""
        S, t = self.prior_variance_, 1 / self._noise
        small = self.structure_ in BOUNDED and J.cache_size <= table_bytes(J)
        if self.variance_ == "exact" and not small:
            return self._structure.variance_by_factor(J, S, t)
        J = J.cached() if small else J  # a few products with small blocks are faster than a table of all factors
        # The same as with the prior variances times the factor.
        return lambda factor: factor * self._with_bars(self._structure.posterior(S, t * factor)).variance(J)

    def _kept_for_variances(self, J: Jacobian) -> Jacobian:
        """In memory where exact variances are asked for many times; others need no rows, or one pass."""
        return J.cached_if_fits() if self.variance_ == "exact" and self.structure_ not in BOUNDED else J

    def _looked_at(self) -> Tensor:
        """Some training examples, drawn."""
        n, c = self._f.shape
        few = LOOKED_AT
        if self.variance_ == "exact":
            few = min(few, max(1, 2**24 // c**2))  # covariances (few, c, c) are to be small with many classes too
        return torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))[:few]

    def _multiply(self, factors: Sequence[float]) -> None:
        """The prior scales times factors, as the last step of the path."""
        scales = tuple(s * factor for s, factor in zip(self._scales, factors, strict=True))
        terms = self._evidence("network", self._prior, self._log_det)(scales, self._noise)
        last = Step(terms.value, scales, self._noise, sum(terms.gamma))
        self._accept(self._prior, self._log_det, [*self.tune_path_, last])

    @property
    def largest_evidence_(self) -> float:
        """The log evidence of the prior that the evidence chose, before error bars were narrowed.

        `log_evidence` is that of the prior as it is. A prior that was narrowed for the error bars says little of the
        size of the weights, so its evidence compares no models.
        """
        if self.narrowed_ == 1 or len(self.tune_path_) < 2:
            return self.log_evidence()
        return self.tune_path_[-2].log_evidence

    @property
    def _evidence_variance(self) -> Tensor:
        """The prior variances of largest evidence, (p,), before `_narrow` made them smaller."""
        if self.narrowed_ == 1 or len(self.tune_path_) < 2:
            return self.prior_variance_
        pairs = zip(self.tune_path_[-2].scales, self.tune_path_[-1].scales, strict=True)
        factors = [before / after for before, after in pairs]
        if len(factors) == 1:
            return factors[0] * self.prior_variance_
        layout, out = self.lin_.layout, self.prior_variance_.clone()
        for factor, names in zip(factors, layout.layers.values(), strict=True):
            for name in names:
                out[layout.slices[name]] *= factor
        return out

    def _evidence_posterior(self) -> Posterior:
        """The posterior with the prior of largest evidence; with draws as they are."""
        if self.posterior_.known_from_samples or self.narrowed_ == 1:
            return self.posterior_
        if hasattr(self, "_structure"):
            return self._structure.posterior(self._evidence_variance, 1 / self._noise)
        return self.posterior_.with_prior(self.prior_variance_, self._evidence_variance)

    def _evidence(self, at: str, prior: Prior, log_det: LogDet) -> Evidence:
        if at not in get_args(At):
            raise ValueError(f"at must be 'network' or 'linear_mode'; got {at!r}.")
        theta = self.lin_.flat_theta
        if at == "network":
            energy = None if self._noise_base is None else self._energy(self._f)
            return AtNetwork(
                log_det,
                self._shares(theta, prior),
                float(self._unit.log_prob(self._f, self._y).sum()),
                energy,
                self._rows,
            )
        if self._earlier is not None:
            raise NotImplementedError(
                "The evidence with an earlier posterior as the prior is known at the network only; use at='network'."
            )
        if self.structure_ == "subnetwork" or self.draws_ is not None:
            what = "A subnetwork's evidence" if self.draws_ is None else "The evidence of a sampled Fisher information"
            raise NotImplementedError(f"{what} is known at the network only; use at='network'.")
        if self._kept_sites(self._y) is not None:
            raise NotImplementedError(
                f"Some sites of an example have the label {self.ignore_index} and count for nothing: the evidence is "
                "known at the network only; use at='network'."
            )
        mean = self._f - (self._J @ theta).view_as(self._f)
        if self.structure_ in ("full", "function") and self._noise_base is None:
            return AtKernelMode(kernels_of(self._J, prior), self._y, mean, self._unit)
        settings = SolverSettings(memory=self._memory, progress=self.progress)
        model = LinearModel(self._J, self._y, mean, settings, self._rows)
        gaussian = self._noise_base is not None
        return AtLinearMode(
            model,
            prior,
            self._with_noise,
            (lambda root: log_det) if gaussian else (lambda root: self._fitted(root).log_det(prior)),
            self._energy if gaussian else None,
        )

    def _shares(self, theta: Tensor, prior: Prior) -> list[float]:
        """The squared distance of the parameters from the mean of a prior, in its units, for each of its groups."""
        if isinstance(prior, EarlierPosterior):
            return [float(prior.precision.quadratic(theta - prior.mean))]
        return group_norms(theta, prior, self._structure.included)

    def _energy(self, f: Tensor) -> float:
        """Squared residuals over the known noise."""
        residual = self._unit.residual(f, self._y)
        return float((residual.square() / self._unit.observed_curvature(f, self._y)).double().sum())

    def _measure_distance(self, g: Tensor | None) -> None:
        """How far the network is from a mode; a warning where it is so far that error bars mean nothing.

        Args:
            g: The gradient of the log likelihood, (p,), where it is known; None makes a pass for it.
        """
        S = self.prior_variance_
        if g is None:
            residual = self._with_noise(self._noise).residual(self._f, self._y)
            g = self._J.pullback(lambda batch: residual[batch.index.to(residual.device)])
        self._gradient = g
        theta, earlier = self.lin_.flat_theta, self._earlier
        if earlier is None:
            inner = torch.where(S > 0, g - theta / S, 0.0)
        else:  # the network is a mode of likelihood and prior together, and not of the likelihood alone
            inner = g = g - earlier.precision.multiply(theta - earlier.mean) / self._scales[0]
        self.gradient_norm_ = float(inner.norm())
        # In whitened weights, and so that the units of the layers do not count.
        traces = self._log_det.traces()
        spread = sum(s * t for s, t in zip(self._scales, traces, strict=True)) / self._noise
        included = self._structure.included
        whitened = S.sqrt() * g if included is None else (S.sqrt() * g)[included]
        size = float(whitened.norm())
        if earlier is not None:
            size = math.sqrt(self._scales[0] * max(0.0, float(g @ earlier.precision.solve(g))))
        self.gradient_ratio_ = size / math.sqrt(spread) if spread > 0 else 0.0
        if self.gradient_ratio_ > FAR:
            warnings.warn(
                f"The network is far from a mode of its {'likelihood' if earlier is None else 'likelihood and prior'}: "
                f"the gradient of {'log p(y | f)' if earlier is None else 'log p(y | f) p(theta)'} has norm "
                f"{float(g.norm()):.3g}, {self.gradient_ratio_:.1f} times what noise in the targets would make it. Its "
                "mean is not the linear model's, and error bars around it say little. Train it further, or use "
                "linnet.TangentClassifier or TangentRegressor, which move the mean.",
                stacklevel=5,
            )

    def _measure_width(self) -> None:
        """What error bars cost on the training data; a warning where the evidence has made them too wide for classes.

        Outputs that are sure of their labels have next to no curvature, and where they are everywhere, as in networks
        that were trained until they fit all labels, the quadratic expansion holds in a small part of such a posterior.
        """
        if not isinstance(self._predictive.inner, Bernoulli | Categorical) or not self._J.by_position:
            return
        index = self._looked_at()
        f, y = self._f[index], self._y[index]
        labels = float(self._count_labels(y).sum())
        own = float(self._unit.log_prob(f, y).sum()) / labels
        # What moves all logits together is no one's fault: it would be the prior's own variance with any data.
        spread: Spread = "blocks" if self.variance_ == "exact" else "factor"
        cov = self._error_bars.predict(self._J.subset(index), spread).spread
        p = average_probabilities(self._unit, f, cov, link="centered", draws=1, seed=0)
        scaled = p.log() if isinstance(self._predictive.inner, Categorical) else p.logit()
        with_bars = float(self._unit.log_prob(scaled, y).sum()) / labels
        if own - with_bars > WIDE:
            warnings.warn(
                "The prior that the evidence chose makes error bars too wide for this network: on "
                f"{len(index)} training examples the negative log probability of a label is {-own:.3g} by the network "
                f"and {-with_bars:.3g} with error bars. It has fitted its labels so closely that they say "
                "little about its weights. Leave narrow=False out, let held-out data choose, with "
                "tune(validation=(X, y)), or give prior= as a variance.",
                stacklevel=5,
            )

    # More and fewer examples.

    @by_members
    @together
    def condition(self, X: Any, y: Any = None, sample_weight: Any = None) -> Laplace:
        """An approximation that has also seen (X, y), around the same weights, with the same prior and noise.

        It equals a fit to all examples with this prior and this noise. The structures "full" and "diag" read the new
        examples alone; the others are made again, without the search for prior and noise. The weights of the network
        stay: an example that the network was not trained on makes the error bars narrower, and moves no mean. This one
        stays as it is.

        Args:
            X: Inputs.
            y: Targets; None where they come with the inputs.
            sample_weight: How many times each example counts, as for `fit`.
        """
        check_is_fitted(self)
        return forgetting.condition(self, X, y, sample_weight)

    @by_members
    @together
    def forget(self, examples: Any, y: Any = None) -> Laplace:
        """An approximation without some examples, around the same weights, with the same prior and noise.

        It equals a fit to the examples that stay with this prior and this noise. **The network itself was trained on
        the examples, and its weights stay**: the error bars forget, and the mean, which is the network, does not. To
        remove an example from the network, train the network without it; `certificate_` says so too. `TangentRegressor`
        and `TangentClassifier` forget what they have learned from an example altogether.

        "full", "function", "diag" and "kron" cost what the forgotten examples cost: `linnet.laplace.forgetting` has a
        table. This one stays as it is.

        Args:
            examples: Positions of the examples, or their inputs, as for `TangentRegressor.forget`. What was loaded from
                a file takes inputs and targets.
            y: The targets of the examples, where inputs are given that do not carry them.
        """
        check_is_fitted(self)
        return forgetting.forget(self, examples, y)

    @property
    @by_members
    def certificate_(self) -> Certificate:
        """How far the error bars can be from those of a fit to the examples that stay."""
        check_is_fitted(self)
        return forgetting.certify(self)

    def _codes_of_examples(self) -> Tensor | None:
        return forgetting.codes_of_examples(self)

    def _traces_of_inputs(self) -> dict[tuple[int, int], Tensor] | None:
        return forgetting.traces_of(self._structure) if hasattr(self, "_structure") else self._traces

    @property
    def _y_is_known_noise(self) -> bool:
        return isinstance(self._inner, KnownNoise)

    # Predictions.

    @by_members
    @together
    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False, *, noise: Any = False) -> Any:
        """f at X, which is the network's own output (logits, for a classifier), with its error bars.

        Where X is a tensor that requires a gradient, so do the results.

        Args:
            X: Inputs.
            return_std: Also the standard deviation of f, in the same shape.
            return_cov: Also the joint covariance, (n, n), or (n c, n c) with row ``i * c + j`` for output j of input i.
                Where ``variance_`` is "samples", it is the covariance of the samples, of rank ``samples``.
            noise: Whether these include the noise of an observation, ``noise_``. Or the variances of the observations
                to come, one or (n,) or (n, c), in its place: a fit with a noise for each observation needs them.
        """
        if return_std and return_cov:
            raise ValueError("Ask for return_std or return_cov, not both.")
        moments, told = self._moments(X, "covariance" if return_cov else "variance" if return_std else "none")
        mean = told.means(moments.f)
        if moments.spread is None:
            return convert_like(X, told.shaped(mean))
        added = torch.zeros_like(mean) if noise is False else told.noise_variances(moments.f, noise)
        if return_cov:
            C = told.mean_covariance(moments.spread, moments.f.shape[1]) + torch.diag(added.flatten())
            return convert_like(X, told.shaped(mean)), convert_like(X, C)
        variance = told.means(moments.spread)
        return convert_like(X, told.shaped(mean)), convert_like(X, told.shaped((variance + added).sqrt()))

    @by_members
    @together
    def predict_proba(self, X: Any, link: str = "probit", *, draws: int = 1000) -> Any:
        """Class probabilities averaged over the posterior, (n, classes); of each label where labels are on or off.

        Args:
            X: Inputs.
            link: "probit" (each logit scaled down by its own variance), "centered" (the same less what moves all logits
                together, and so no probability), "bridge" (the Laplace bridge to a Dirichlet distribution) or "mc"
                (Monte Carlo, with all covariances).
            draws: Number of draws of "mc".
        """
        check_is_fitted(self)
        inner = self._predictive.inner
        if not isinstance(inner, Bernoulli | Categorical | Ordinal) and not describe_likelihood(inner)["own"]:
            raise ValueError(f"predict_proba is for classes; the likelihood is {inner!r}. Use predict.")
        blocks: Spread = "blocks" if self.variance_ == "exact" else "factor"
        moments, told = self._moments(X, "variance" if link == "probit" else blocks)
        return convert_like(X, told.probabilities(moments, link=link, draws=draws, seed=self.seed))

    def predict_label(self, X: Any) -> np.ndarray:
        """The most probable class of each input by its label in ``classes_``, (n,)."""
        check_is_fitted(self)
        if "classes_" not in vars(self):
            raise ValueError(
                f"predict_label is for one class of each example; the likelihood is {self.likelihood!r}. Use "
                "predict_proba for labels that are on or off, and predict for numbers."
            )
        p = self.predict_proba(X)
        p = p.cpu().numpy() if isinstance(p, Tensor) else p
        found: np.ndarray = self.classes_[p.argmax(1)]
        return found

    @by_members
    @together
    def predict_mean(self, X: Any, return_std: bool = False, *, noise: bool = False) -> Any:
        """The mean of the targets at X, averaged over the posterior: of counts, times, or numbers.

        Args:
            X: Inputs.
            return_std: Also the standard deviation of E[y | f]: how well the mean is known.
            noise: Whether the standard deviation is that of an observation.
        """
        moments, told = self._moments(X, "variance")
        if isinstance(told.inner, Bernoulli | Categorical | Ordinal | Heteroscedastic) or told.shape:
            raise ValueError(
                f"predict_mean is for counts, times and numbers; the likelihood is {told.likelihood!r}. Use predict, "
                "or predict_proba for classes."
            )
        found = predict_target(told.inner, moments.f, moments.spread)
        mean = convert_like(X, told.shaped(found.mean))
        if not return_std:
            return mean
        total = found.spread + found.noise() if noise else found.spread
        return mean, convert_like(X, told.shaped(total.sqrt()))

    @by_members
    @together
    def sample(self, X: Any, k: int = 1, *, noise: Any = False, seed: int | None = None) -> Any:
        """k joint samples of f at X, (k, n) or (k, n, c): all inputs under the same weights.

        ``noise`` adds that of an observation, as for `predict`.
        """
        J, generator = self._new_inputs(X, k), torch.Generator().manual_seed(self.seed if seed is None else seed)
        told = self._predictive
        f = torch.cat(list(told.samples(J, k, generator)))
        found = told.means(f)
        if noise is not False:
            z = torch.randn(found.shape, dtype=f.dtype, generator=generator).to(f.device)
            found = found + told.noise_variances(f, noise).sqrt() * z
        return convert_like(X, told.shaped(found))

    @together
    def linearity(self, X: Any, k: int = 4, *, seed: int | None = None) -> list[Linearity]:
        """Compare the linear model with the network itself, at X, for each of k weights drawn from the posterior.

        Where they differ, the error bars are those of the linear model alone: networks with weights drawn from the
        posterior would say something else.
        """
        J, generator = self._new_inputs(X, k), torch.Generator().manual_seed(self.seed if seed is None else seed)
        Z = self.posterior_.draw(k, generator=generator)
        before, shifts = J.outputs_and_product(Z)
        found = []
        for z, shift in zip(Z.T, shifts.T.reshape(k, J.n, J.c), strict=True):
            found.append(Linearity(before, before + shift, J.outputs(self.lin_.move_theta(z))))
        return found

    @together
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
        with repetition (Osband et al. 2022), so that knowledge about one input counts for the next; the default
        is 10 (kappa - 1), and for kappa = 1 the usual log likelihood of single labels. For numbers it is the exact
        density of the targets of all kappa.

        Args:
            X: Inputs.
            y: Targets; None where they come with the inputs.
            kappa: Inputs in a group.
            labels: Targets in a group.
            draws: Joint samples that the average is over; by default 1,000, or as many as the posterior holds.
            seed: Seed of groups and samples.
        """
        check_is_fitted(self)
        inputs = check_inputs(self, X, reset=False)
        _, J, targets, _ = self._labeled(inputs, self._jacobian(inputs), y)
        told = self._predictive
        likelihood = told.likelihood
        targets = likelihood.targets(targets, J.n, J.c, dtype=J.dtype, device=J.device)
        generator = torch.Generator().manual_seed(seed)
        classes = not isinstance(told.inner, Gaussian)
        groups = draw_groups(J.n, kappa, labels, classes=classes, generator=generator)
        if isinstance(likelihood, Gaussian) and labels is None and J.by_position:
            return joint_density(likelihood, self._error_bars, J, targets, groups)
        k = told.posterior.most_draws(1000) if draws is None else draws
        return joint_log_likelihood(likelihood, told.samples(J, k, generator), targets, groups)

    @property
    def _predictive(self) -> Predictive:
        return Predictive(self.lin_, self.posterior_, self.likelihood_, self._read.shape, self._one_column)

    def _moments(self, X: Any, spread: Spread) -> tuple[PredictiveMoments, Predictive]:
        check_is_fitted(self)
        told = self._predictive
        if spread != "none":
            told = replace(told, posterior=self._error_bars)
        if isinstance(X, Tensor) and X.requires_grad and torch.is_grad_enabled():
            self.lin_.check_unchanged(contents=True)
            return told.differentiable_moments(X, spread), told
        J = self._jacobian(check_inputs(self, X, reset=False))
        if spread == "covariance":
            check_covariance_fits(J, self.memory)
        return told.moments(J, spread), told

    @together
    def _probabilities_and_std(self, X: Any) -> tuple[Tensor, Tensor]:
        """Class probabilities, and standard deviations of the logits (n, c), from one pass."""
        moments, told = self._moments(X, "variance")
        assert isinstance(moments.spread, Tensor)
        p = told.probabilities(moments, link="probit", draws=0, seed=self.seed)
        return p, told.means(moments.spread).sqrt()

    def _outputs_and_spread(self, X: Any, spread: Spread) -> tuple[Any, Any]:
        moments, _ = self._moments(X, spread)
        return moments.f, moments.spread

    def _new_inputs(self, X: Any, k: int) -> Jacobian:
        """The Jacobian of inputs at which k samples are asked for."""
        check_is_fitted(self)
        check_samples(k)
        return self._jacobian(check_inputs(self, X, reset=False))

    def _jacobian(self, X: Any) -> Jacobian:
        J = self.lin_.jacobian(X, batch_size=self.batch_size, memory=self.memory, progress=self.progress)
        self.lin_.check_ranks_agree(J._source)
        return J

    def to_module(self) -> PredictiveModule:
        """What `predict` and `predict_proba` say, as a module of plain torch operations for `torch.export` and ONNX.

        The module returns mean and standard deviation of f for numbers, and probabilities (``link="probit"``) for
        classes, in the network's own dtype. Where ``params`` are not those of the last layer, the module makes
        the rows of the Jacobian: n c p numbers for n examples.
        """
        check_is_fitted(self)
        inner = self._predictive.inner
        if self._read.shape or not isinstance(inner, Bernoulli | Categorical | Gaussian | KnownNoise):
            raise NotImplementedError(
                "to_module gives numbers with Gaussian noise or classes without an order, one target for each example; "
                f"the likelihood is {self.likelihood_!r}."
            )
        form: Any = "classes" if isinstance(inner, Categorical) else "one logit" if self._one_column else "labels"
        if isinstance(inner, Gaussian | KnownNoise):
            form = "one number" if self._one_column else "numbers"
        return make_predictive_module(self, form, with_network=True, level=None)

    def penalty(self, *, weight: float = 1.0) -> QuadraticPenalty:
        r"""What the posterior says about other weights, as a term for a loss: a torch module.

        .. math:: \tfrac12 (\theta - \theta_*)^\top H (\theta - \theta_*)

        with H the precision in the structure of this fit. ``penalty(network)`` is the term at the network's present
        weights, with a graph to these. The term belongs to a loss that is the *sum* of negative log likelihoods over
        the examples of a later task. The structure "diag" gives the penalty of elastic weight consolidation, and
        "kron" that of Kronecker-factored Laplace; both hold the prior's part, which is weight decay towards
        :math:`\theta_*`.

        Args:
            weight: Factor of the term: 1 / n where the loss is a mean over n examples.

        Example:
            >>> X, model = torch.randn(30, 4), nn.Linear(4, 3)
            >>> la = Laplace(model, structure="diag", prior=1.0).fit(X, torch.arange(30) % 3)
            >>> term = la.penalty()
            >>> term(model).item(), term(nn.Linear(4, 3)).item() > 0
            (0.0, True)
        """
        mean, precision = mean_and_precision(self)
        return QuadraticPenalty(self.lin_.layout, mean, precision, weight=weight, dtype=self.lin_.model_dtype)

    def _without_examples(self, network: nn.Module, posterior: Posterior, log_evidence: float) -> Laplace:
        """This approximation with another network and posterior, and without anything that is made of examples."""
        other = type(self)(**self.get_params(deep=False) | {"model": network})
        other._attach(network, self._dtypes)
        other._read.shape = self._read.shape
        for name in ("likelihood_", "structure_", "prior_variance_", "scales_", "noise_", "variance_", "draws_"):
            setattr(other, name, getattr(self, name))
        for name in ("_noise_base", "_noise", "_one_column", "_noise_each", "n_features_in_", "_prior"):
            if hasattr(self, name):
                setattr(other, name, getattr(self, name))
        other._unit, other._probe, other._weight = without_weights(self._unit), None, None
        other.posterior_, other._known_evidence = posterior, log_evidence
        other.theta_ = other.lin_.flat_theta.detach().clone()
        other.tune_path_, other.narrowed_ = (), 1.0
        other.gradient_norm_ = other.gradient_ratio_ = other.effective_dimension_ = math.nan
        if self._earlier is None:
            shrunk = precision_of(posterior, memory=self.memory).variances() / self.prior_variance_
            other.effective_dimension_ = float((1 - shrunk).sum())
        return other

    def __sklearn_clone__(self) -> Laplace:
        """A clone with the same earlier posterior: an earlier fit is data, not a setting."""
        if not is_earlier(self.prior):
            cloned: Laplace = super().__sklearn_clone__()
            return cloned
        settings = self.get_params(deep=False)
        return type(self)(**{name: v if name == "prior" else clone(v, safe=False) for name, v in settings.items()})

    @by_members
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was fitted to one file; `linnet.load` reads it, given the same network."""
        check_is_fitted(self)
        files.save(self, path)

    def _check_data(self, what: str) -> None:
        if not hasattr(self, "_structure"):
            raise ValueError(
                f"{what} needs the training data, which a file does not hold. Fit again: Laplace(...).fit(X, y)."
            )
        self.lin_.check_unchanged(contents=True)


def check_options(la: Laplace) -> None:
    """Raise unless all options are of their kinds."""
    check_module(la.model)
    if is_earlier(la.prior):
        check_earlier(la)
    else:
        check_prior(la.prior)
    if la.structure not in get_args(StructureName):
        known = ", ".join(map(repr, get_args(StructureName)))
        raise ValueError(f"structure must be one of {known}; got {la.structure!r}.")
    likelihood_for(la.likelihood, torch.empty(0), (1,))  # raises for a name that is none
    if la.noise is not None and la.likelihood != "regression":
        raise ValueError(f"noise= belongs to likelihood='regression'; got likelihood={la.likelihood!r}.")
    if isinstance(la.noise, str) and la.noise not in ("evidence", "per-output"):
        raise ValueError(f"noise must be 'evidence', 'per-output' or variances; got {la.noise!r}.")
    for name in ("rank", "size", "samples"):
        value = getattr(la, name)
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive number; got {value!r}.")
    if la.draws not in (None, "auto") and (not isinstance(la.draws, int) or la.draws < 1):
        raise ValueError(f"draws must be 'auto', None or a positive number; got {la.draws!r}.")
    check_variance(la.variance)
    if la.structure == "samples":
        check_has_exact(la.variance, "structure='samples'", "another structure")
    messages.check_memory(la.memory)
    messages.check_seed(la.seed)
    if la.checkpoint is not None:
        check_folder(la.checkpoint, "checkpoint")
        if la.structure not in ("auto", *RESUMED):
            raise ValueError(
                f"checkpoint= serves the structures {', '.join(map(repr, RESUMED))}; got {la.structure!r}, whose dense "
                "matrices take one pass. Leave checkpoint= out."
            )
    if not la.tolerance > 0:
        raise ValueError(f"tolerance must be positive; got {la.tolerance!r}.")
    parse_dtype(la.dtype)


def check_structure_fits(la: Laplace, J: Jacobian) -> None:
    """Raise where the dense matrices of the structure that was asked for do not fit memory."""
    n, c, p = J.n, J.c, J.shape[1]
    kernels = len(J.lin.layout.layers) + 1 if la.prior == "layerwise" else 1
    sides = {  # of the square matrices, and how many of them there are at once
        "full": (p, 4),
        "function": (n * (la.draws if isinstance(la.draws, int) else c), 2 + kernels),
        "subnetwork": (min(la.size, p), 4),
    }
    if la.structure in sides:
        side, count = sides[la.structure]
        check_fits(
            count * side**2 * J.dtype.itemsize,
            la.memory,
            J.device,
            what=f"structure={la.structure!r} with {n:,} examples, {c:,} outputs and {p:,} parameters",
            instead="Use structure='samples', 'kron' or 'diag', or fewer parameters (params=)",
        )


def check_curvature(unit: Likelihood, few: Tensor, y: Tensor) -> None:
    """Raise where the curvature at the outputs of a few examples with targets y is none."""
    root, B = unit.observed_root(few, y), unit.observed_curvature(few, y)
    found = root.square() if root.ndim == 2 else root @ root.mT
    if not torch.allclose(found, B, rtol=1e-3, atol=1e-5 * float(B.abs().max())):
        raise ValueError(
            f"The curvature of {unit!r} is not positive semi-definite: its root times itself is something "
            "else. Use the Fisher information in place of the second derivative."
        )
