"""Door 1, classification: the linearized network with a class likelihood (Maddox et al. 2021, equation 4)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor, nn

from linnet._common import check_fits, together
from linnet._estimator import (
    Dtypes,
    HubMixin,
    check_has_exact,
    check_variance,
    convert_like,
    default_network,
    draw_inputs,
    has_targets_in_memory,
    leave_out_ignored,
    list_options,
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
    check_only_map,
    check_outputs_fit,
    choose_likelihood_solver,
    searches_all_features,
)
from linnet.jacobian import Jacobian, linearize
from linnet.network import Params, check_module
from linnet.probability import (
    LIKELIHOODS,
    Categorical,
    Prior,
    PriorSpec,
    Spread,
    check_prior,
    compute_probabilities,
    likelihood_for,
    make_prior,
)
from linnet.tangent.base import Mean, Tangent

NOTHING = 0.01
"""Logits no larger than this tell no class from another."""


class TangentClassifier(HubMixin, ClassifierMixin, Tangent):
    r"""Adapt a trained network to a classification task: a convex problem, with error bars.

    .. math:: p(y \mid x) = \mathrm{softmax}\left(m(x) + J(x) (\theta - \theta_0)\right), \qquad
              \theta - \theta_0 \sim N(0, S)

    One output is the logit of the second of two classes; several outputs are the logits of as many classes, or, for
    targets (n, c) of zeros and ones, one logit for each label.

    Args:
        model: The trained network; None makes an untrained one for inputs (n, d).
        params: Which parameters adapt; see `linnet.linearize`.
        top: Instead, how many blocks adapt, from the top, with all that comes after them; see
            `linnet.network.top_blocks`. "evidence" takes one block more while the evidence of the Laplace approximation
            rises.
        inference: "vi" (the best Gaussian, which is close to the exact posterior), "map" (the mode alone: sharper, and
            no error bars) or "laplace" (a Gaussian at the mode). With few labels the mode is far from the mean and its
            curvature says next to nothing: Laplace is badly under-confident there (see `linnet.inference.variational`).
        mean: "network" (the linearized network) or "zero" (the finite tangent kernel alone).
        prior: As for `TangentRegressor`; scales are chosen by the Laplace evidence.
        solver: "auto", "function", "weight" or "cg-weight"; see `linnet.inference.gaussian.closed_form`. With
            ``inference="map"`` also "adam", on minibatches, for a Dataset whose examples change every time they are
            read (augmentation).
        link: How probabilities average over the posterior: "probit" or "mc" (Monte Carlo).
        family: Of VI: "full" (any Gaussian; needs the dense kernel of solver="function"), "lowrank" (all covariances,
            in the directions that matter) or "meanfield" (independent weights); "auto" is the first of these that can
            be.
        ignore_index: Label of examples that count for nothing, as in torch, for labels that are integers. None for no
            such label: for a class whose name is -100.
        classes: The label of each output, where labels are neither numbers 0 to c - 1 nor as many as outputs.
        epochs: Number of epochs of "adam".
        minibatch: Number of examples of a step of "adam".
        learning_rate: First learning rate of "adam", in prior standard deviations; "auto" is the best first step.
        output: How to read the model's outputs; see `linnet.linearize`.
        dtype: Dtype of the network, as for `TangentRegressor`.
        tolerance: Relative residual of iterative solves; "auto" is 1e-6, or 1e-4 in float32. The mode is found to a
            relative gradient of 1e-6, or of this if it is larger.
        iterations: Limit of iterative solves.
        preconditioner: "auto", "nystrom" or "none"; "pivoted-cholesky", of earlier versions, means "auto".
        rank: Number of examples that the preconditioner is made from, or "auto".
        samples: Posterior samples of the iterative solver and of error bars, and draws of Monte Carlo.
        variance: How error bars are made: "exact", "samples" or "auto", as for `TangentRegressor`.
        memory: Bytes that dense matrices may take, or "auto".
        batch_size: Number of examples per chunk, or "auto".
        seed: Seed of all random draws.
        progress: False for no progress bars.

    Attributes:
        classes_: The label of each output (for one logit: of 0 and 1).
        scales_: Prior scales by name.
        log_evidence_: Of the Laplace approximation, whatever the inference, with a dense solver; by conjugate gradients
            for "laplace" alone, with ``log_evidence_error_`` its standard error, and else None; ``evidence_path_`` its
            rise in the search for the prior's scales.
        elbo_: The bound of the log evidence that VI reached, from fresh draws; ``elbo_path_`` its rise on the draws
            that the steps use.
        mode_: The optimum: gradient, iterations, log likelihood; None in what was loaded from a file.
        passes_: Passes over the data until it was found; 1 where that takes a dense matrix.
        objective_path_: What "adam" minimizes, by epoch.
        layer_relevance_: Each layer's share in the adaptation.
        variance_: "exact" or "samples"; ``std_error_`` is the relative standard error of the logits' error bars.
        top_: How many blocks adapt, where ``top`` was given; ``top_path_`` the evidences that "evidence" compared.

    Example:
        >>> X = torch.linspace(-2, 2, 20)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 2))
        >>> clf = TangentClassifier(model).fit(X, (X[:, 0].abs() > 1).long())
        >>> clf.predict_proba(X).shape, float((clf.predict(X) == (X[:, 0].abs() > 1)).float().mean())
        (torch.Size([20, 2]), 1.0)
    """

    mode_: Mode | None
    _SHARED = (*Tangent._SHARED, "scale_examples_", "multilabel_")

    def __init__(
        self,
        model: nn.Module | None = None,
        params: Params = None,
        inference: Inference = "vi",
        mean: Mean = "network",
        prior: PriorSpec = "balanced",
        solver: str = "auto",
        *,
        top: int | str | None = None,
        link: str = "probit",
        family: str = "auto",
        classes: Sequence[Any] | None = None,
        ignore_index: int | None = -100,
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
        self.model, self.params, self.inference, self.mean, self.prior = model, params, inference, mean, prior
        self.top, self.solver, self.link, self.family, self.classes = top, solver, link, family, classes
        self.ignore_index, self.epochs, self.minibatch, self.learning_rate = (
            ignore_index,
            epochs,
            minibatch,
            learning_rate,
        )
        self.output, self.dtype, self.tolerance, self.iterations = output, dtype, tolerance, iterations
        self.preconditioner, self.rank, self.samples, self.variance = preconditioner, rank, samples, variance
        self.memory, self.batch_size, self.seed, self.progress = memory, batch_size, seed, progress

    @together
    def fit(self, X: Any, y: Any = None) -> TangentClassifier:
        """Condition on labels y, (n,) of any kind, or (n, c) of zeros and ones; a Dataset may carry them."""
        self.top_path_ = None
        if self.top == "evidence" and self.solver != "adam":
            self._fit_by_evidence(X, y)
            return self
        check_prior(self.prior)
        check_variance(self.variance)
        if self.link not in ("probit", "mc"):
            raise ValueError(f"link must be 'probit' or 'mc'; got {self.link!r}.")
        self._how()  # its errors come before any work
        inputs = self._inputs(X, reset=True)
        model = self._network(inputs, y)
        self._choose(model, inputs)
        J = self._attached_jacobian(model, inputs, self.dtype)
        fit = self._condition(inputs, y, self.classes, J=J)
        names = ["all"] if len(fit.choice.scales) == 1 else list(self.lin_.layout.layers)
        self.scales_ = dict(zip(names, fit.choice.scales, strict=True)) if isinstance(self.prior, str) else {}
        self.scale_examples_ = fit.examples
        self._warn_of_nothing()
        return self

    def _warn_of_nothing(self) -> None:
        """Where the evidence has shrunk the prior until nothing is left of a mean of zero."""
        if not self.scales_ or self._mean != "zero" or self.mode_ is None or float(self.mode_.f.abs().max()) > NOTHING:
            return
        warnings.warn(
            f"The evidence of these {len(self.mode_.f):,} labels is largest for a prior scale of next to nothing, and "
            "with mean='zero' all inputs then have the same probabilities: the features tell no classes apart, or the "
            "labels are too few. Use mean='network', more labels, or a variance of your own as prior=.",
            stacklevel=4,
        )

    @together
    def refit(self, X: Any, y: Any = None) -> TangentClassifier:
        """A classifier that has seen (X, y) alone, with the prior and the classes found here: task after task.

        No scale is chosen anew, and labels of some of the classes are enough. This one stays as it is.

        Example:
            >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 3))
            >>> X = torch.linspace(-2, 2, 30)[:, None]
            >>> clf = TangentClassifier(model).fit(X, torch.arange(30) // 10)
            >>> new = clf.refit(X[10:], 2 - torch.arange(20) // 10)
            >>> new.scales_ == clf.scales_, new.predict_proba(X).shape
            (True, torch.Size([30, 3]))
        """
        check_is_fitted(self)
        other = self._without_data()
        other._condition(self._inputs(X, reset=False), y, self.classes_, Prior("given", self.prior_variance_))
        return other

    def _how(self, eps: float = 0.0) -> tuple[InferenceOptions, Training | None]:
        """How to condition with passes that round by ``eps``, and how to train where that is by minibatches."""
        if self.solver != "adam":
            return InferenceOptions(self.inference, self.family, self._settings(eps)), None
        check_only_map(self.inference)
        training = Training(self.epochs, self.minibatch, self.learning_rate)
        return InferenceOptions(self.inference, self.family, self._settings(eps, solver="auto")), training

    def _condition(
        self, inputs: Any, y: Any, classes: Any, prior: Prior | None = None, *, J: Jacobian | None = None
    ) -> ModeFit:
        """Find the posterior; with the prior that was asked for, unless one is given; J is that of the inputs."""
        lin = self.lin_
        how, training = self._how(torch.finfo(lin.dtype).eps)
        source = as_source(inputs, lin.module.forward)
        source = source if training is None else source.changing()
        self._probe = draw_inputs(source)
        check_prior(self.prior, lin)
        J = self._jacobian(source) if J is None or training is not None else J
        labels = None
        if has_targets_in_memory(y, J):  # labels at hand are checked before any pass
            labels = as_labels(J.targets() if y is None else y, J.n)
            fewer = leave_out_ignored(inputs, y, labels, self.ignore_index)
            if fewer is not None:
                return self._condition(*fewer, classes, prior)
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
        targets = None if labels is None else self._labels(labels, J, classes, refit=prior is not None)
        J = J if source.changes else J.cached_if_fits()
        if targets is None:
            labels = as_labels(J.targets(), J.n)
            fewer = leave_out_ignored(inputs, y, labels, self.ignore_index)
            if fewer is not None:
                return self._condition(*fewer, classes, prior)
            targets = self._labels(labels, J, classes, refit=prior is not None)
        self._tensors = isinstance(y, Tensor) or y is None
        lin.check_ranks_agree(options=list_options(self), labels=targets)
        prior = make_prior(lin, self.prior, J=J) if prior is None else prior
        if training is not None:
            network = self._mean == "network"
            fit = any_likelihood.train(
                J, targets, prior, self.likelihood_, how.settings, network=network, training=training
            )
        else:
            fit = any_likelihood.condition(
                Observations(J, targets, self._base(J), self.likelihood_), prior, how, solver
            )
        lin.check_unchanged(contents=True)
        self.posterior_, self.prior_variance_, self.mode_ = fit.posterior, fit.variance, fit.mode
        self._settle_variance(J)
        self.log_evidence_, self.log_evidence_error_ = fit.log_evidence, fit.error
        self.elbo_path_ = () if fit.best is None else fit.best.path
        self.elbo_ = None if fit.best is None else fit.best.elbo
        self.solver_, self.solution_, self._train_inputs = fit.solver, fit.solution, [inputs]
        self.passes_, self.objective_path_ = fit.passes, fit.path
        self.evidence_path_ = fit.choice.path
        return fit

    def _attach(self, network: nn.Module, dtypes: Dtypes) -> None:
        self._dtypes, self.lin_ = dtypes, dtypes.apply(linearize(network, self._selected, self.output))

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta = {
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "likelihood": type(self.likelihood_).__name__,
            "multilabel": self.multilabel_,
            "tensors": self._tensors,
            "elbo": self.elbo_,
            "scale_examples": self.scale_examples_,
            "passes": self.passes_,
        }
        return meta, {}

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        self.classes_ = np.array(meta["classes"], dtype=meta["classes_dtype"])
        self.likelihood_ = LIKELIHOODS[meta["likelihood"]]()
        self.multilabel_, self._tensors = meta["multilabel"], meta["tensors"]
        self.elbo_, self.elbo_path_, self.scale_examples_ = meta["elbo"], (), meta["scale_examples"]
        self.passes_, self.objective_path_, self.evidence_path_ = meta["passes"], (), ()
        self.mode_ = None

    # Labels.

    def _network(self, X: Any, y: Any) -> nn.Module:
        if self.model is not None:
            return check_module(self.model)
        if not isinstance(X, np.ndarray | Tensor) or X.ndim != 2:
            raise ValueError("Without model= the inputs must be an array (n, d). Pass the trained network as model=.")
        if y is None:
            raise ValueError("fit requires y to be passed, but the target y is None: give one label for each example.")
        labels = as_labels(y, len(X))
        fewer = leave_out_ignored(X, labels, labels, self.ignore_index)
        labels = labels if fewer is None else fewer[1]
        count = labels.shape[1] if labels.ndim == 2 else len(np.unique(labels))
        if count == 1:
            raise ValueError("A classifier needs labels of at least two classes; got one class.")
        outputs = count if labels.ndim == 2 or count > 2 else 1
        return default_network(X.shape[1], outputs, seed=self.seed, X=X)

    def _labels(self, labels: np.ndarray, J: Jacobian, classes: Any, *, refit: bool) -> Tensor:
        """The likelihood's targets, from labels."""
        if refit and (labels.ndim == 2) != self.multilabel_:
            needed = f"({J.n}, {J.c}) of zeros and ones" if self.multilabel_ else f"({J.n},)"
            raise ValueError(f"refit takes labels as fit has seen them, {needed}; got shape {labels.shape}.")
        return self._encode(labels, J, classes)

    def _encode(self, labels: np.ndarray, J: Jacobian, classes: Any) -> Tensor:
        """Labels as the likelihood's targets; sets ``classes_`` and ``likelihood_``."""
        c = J.c
        self.likelihood_ = likelihood_for("classification", labels, (c,))
        if labels.ndim == 2:
            self.multilabel_, self.classes_ = True, np.arange(c)
            found = torch.as_tensor(labels)
        else:
            count = max(2, c)
            self.multilabel_, self.classes_ = False, _classes(labels, count, classes)
            known = {label: i for i, label in enumerate(self.classes_.tolist())}
            found = torch.tensor([known[label] for label in labels.tolist()])
        return self.likelihood_.targets(found, J.n, c, dtype=J.dtype, device=J.device)

    # Predictions.

    @together
    def decision_function(self, X: Any) -> Any:
        """Logits of the averaged probabilities, (n,) for one output, else (n, c); `predict_logits` has their moments.

        For a mode alone, and for the probit link, softmax (or the sigmoid) of them gives `predict_proba`.
        """
        f, spread = self._predict(X, self._spread)
        if spread is not None and self.link == "probit":
            f = f / (1 + math.pi / 8 * spread).sqrt()
        elif spread is not None:
            p = self._averaged(f, spread)
            f = p.log() if isinstance(self.likelihood_, Categorical) else torch.logit(p)
        return convert_like(X, f[:, 0] if f.shape[1] == 1 and not self.multilabel_ else f)

    @together
    def predict_proba(self, X: Any) -> Any:
        """Class probabilities, averaged over the posterior, (n, number of classes); of each label where multi-label."""
        return convert_like(X, self._probabilities(X))

    @together
    def predict(self, X: Any) -> Any:
        """The most probable label of each input; where multi-label, (n, c) of zeros and ones."""
        p = self._probabilities(X)
        if self.multilabel_:
            return convert_like(X, (p > 0.5).long())
        chosen = p.argmax(1).cpu().numpy()
        labels = self.classes_[chosen]
        return (
            torch.as_tensor(labels, device=p.device)
            if self._tensors and isinstance(convert_like(X, p), Tensor)
            else labels
        )

    @together
    def predict_logits(self, X: Any, *, return_std: bool = False) -> tuple[Any, Any]:
        """Mean (n, c) of the logits of each input, and their covariance (n, c, c) or standard deviation (n, c).

        Args:
            X: Inputs.
            return_std: Whether the standard deviation takes the place of the covariance, which many classes have no
                memory for.
        """
        f, spread = self._predict(X, "variance" if return_std else "blocks")
        return convert_like(X, f), convert_like(X, spread.sqrt() if return_std else spread)

    @together
    def sample(self, X: Any, k: int = 1, *, seed: int | None = None) -> Any:
        """k joint samples of the logits at X, (k, n, c)."""
        return convert_like(X, self._sample(X, k, torch.Generator().manual_seed(self.seed if seed is None else seed)))

    @property
    def _spread(self) -> Spread:
        """The second moments that probabilities take."""
        if self.inference == "map" or self.link == "probit":
            return "none" if self.inference == "map" else "variance"
        return "factor" if self.variance_ == "samples" else "blocks"

    def _probabilities(self, X: Any) -> Tensor:
        p = self._averaged(*self._predict(X, self._spread))
        return torch.cat([1 - p, p], 1) if p.shape[1] == 1 and not self.multilabel_ else p

    def _averaged(self, f: Tensor, spread: Any) -> Tensor:
        """Probabilities averaged over logits of mean f, (n, c)."""
        if spread is None:
            return self.likelihood_.mean(f)
        generator = torch.Generator().manual_seed(self.seed)
        draws = max(self.samples, 1000)
        return compute_probabilities(self.likelihood_, f, spread, link=self.link, samples=draws, generator=generator)


def as_labels(y: Any, n: int) -> np.ndarray:
    """Labels as an array (n,), or (n, c) of zeros and ones."""
    y = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = column_or_1d(y, warn=True)
    if y.ndim not in (1, 2) or len(y) != n:
        raise ValueError(f"{n} examples need labels of shape ({n},), or ({n}, c) of zeros and ones; got {y.shape}.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ValueError(f"Labels must not be NaN or infinite; example {int(np.argmax(~np.isfinite(y)))} is.")
    if y.ndim == 1:
        check_classification_targets(y)
    elif y.dtype.kind not in "biuf":
        raise TypeError(f"Several labels at once, ({n}, c), must be zeros and ones; got an array of {y.dtype.str[1:]}.")
    return y


def _classes(labels: np.ndarray, count: int, given: Sequence[Any] | None) -> np.ndarray:
    """The label of each of ``count`` classes."""
    found = np.unique(labels)
    if given is not None:
        classes = np.asarray(given)
        if len(classes) != count or len(set(classes.tolist())) != count:
            raise ValueError(
                f"The network has {count} classes, so classes= needs as many different labels; got {given}."
            )
        unknown = [label for label in found.tolist() if label not in set(classes.tolist())]
        if unknown:
            raise ValueError(f"Labels {unknown[:6]} are not among classes={classes.tolist()[:6]}.")
        return classes
    if len(found) > count:
        raise ValueError(
            f"There are {len(found)} labels and the network has {count} classes. Give it a new head first "
            "with linnet.attach_head."
        )
    whole = found.dtype.kind in "iu" or (found.dtype.kind == "f" and bool((found == found.astype(int)).all()))
    if whole and found.min() >= 0 and found.max() < count:
        return np.arange(count).astype(found.dtype)
    if found.dtype.kind == "b":
        return np.array([False, True]) if count == 2 else found
    if len(found) == count:
        return found
    raise ValueError(
        f"The network has {count} classes and the labels are {found.tolist()[:6]}: which output is which? "
        "Pass classes=, the label of each output in order."
    )
