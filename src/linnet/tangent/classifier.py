"""Door 1, classification: the linearized network with a class likelihood (Maddox et al. 2021, equation 4)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from linnet._common import together
from linnet._estimator import (
    ClassUncertaintyMixin,
    Counted,
    HubMixin,
    as_labels,
    by_members,
    check_variance,
    convert_like,
    default_network,
    find_better_order,
    find_codes,
    find_labeled,
    find_output_names,
    leave_out_ignored,
    name_classes,
)
from linnet.inference import Inference
from linnet.jacobian import Jacobian
from linnet.network import Params, check_module
from linnet.probability import (
    Bernoulli,
    Categorical,
    FactoredCovariance,
    Likelihood,
    Ordinal,
    PriorSpec,
    Spread,
    check_prior,
    compute_probabilities,
    describe_likelihood,
    likelihood_for,
)
from linnet.tangent.base import (
    Mean,
    Tangent,
)
from linnet.tangent.generalized import Generalized
from linnet.tangent.relinearization import Around, check_settings, relinearize

NOTHING = 0.01
"""Logits no larger than this tell no class from another."""


class TangentClassifier(HubMixin, ClassUncertaintyMixin, ClassifierMixin, Generalized):
    r"""Adapt a trained network to a classification task: a convex problem, with error bars.

    .. math:: p(y \mid x) = \mathrm{softmax}\left(m(x) + J(x) (\theta - \theta_0)\right), \qquad
              \theta - \theta_0 \sim N(0, S)

    One output is the logit of the second of two classes; several outputs are the logits of as many classes, or, for
    targets (n, c) of zeros and ones, one logit for each label. Classes in an order have one output between them
    (``likelihood="ordinal"``).

    Args:
        model: The trained network; None makes an untrained one for inputs (n, d). A list of networks makes an ensemble,
            as for `TangentRegressor`, which averages probabilities.
        params: Which parameters adapt; see `linnet.linearize`.
        top: Instead, how many blocks adapt, from the top, with all that comes after them; see
            `linnet.network.top_blocks`. "evidence" takes one block more while the evidence of the Laplace approximation
            rises.
        inference: "vi" (the best Gaussian, which is close to the exact posterior), "map" (the mode alone: sharper, and
            no error bars) or "laplace" (a Gaussian at the mode). With few labels the mode is far from the mean and its
            curvature says next to nothing: Laplace is badly under-confident there (see `linnet.inference.variational`).
        mean: "network" (the linearized network) or "zero" (the finite tangent kernel alone). "auto" is "zero" for a
            network with a head of `linnet.attach_head`, which has seen the labels, and else "network".
        prior: As for `TangentRegressor`; scales are chosen by the Laplace evidence. Where the mean function is zero,
            one scale also has a hyperprior, which few labels do not outweigh and many do.
        solver: "auto", "function", "weight" or "cg-weight"; see `linnet.inference.gaussian.closed_form`. With
            ``inference="map"`` also "adam", on minibatches, for a Dataset whose examples change every time they are
            read (augmentation).
        link: How probabilities average over the posterior: "probit" or "mc" (Monte Carlo).
        family: Of VI: "full" (any Gaussian; needs the dense kernel of solver="function"), "lowrank" (all covariances,
            in the directions that matter) or "meanfield" (independent weights); "auto" is the first of these that can
            be.
        ignore_index: Label of examples that count for nothing, as in torch, for labels that are integers. None for no
            such label: for a class whose name is -100.
        classes: The label of each output, where labels are neither numbers 0 to c - 1 nor as many as outputs; and the
            order of "ordinal" classes that are not numbers, from the lowest.
        epochs: Number of epochs of "adam".
        minibatch: Number of examples of a step of "adam".
        learning_rate: First learning rate of "adam", in prior standard deviations; "auto" is the best first step.
        likelihood: "classification" (softmax, or a logit for each label), "ordinal" (classes in an order, from one
            output that is larger for higher classes; the thresholds between them are those of largest likelihood at
            the mean function), or a likelihood: `linnet.likelihoods.Ordinal` with thresholds, or one of your own whose
            ``mean`` gives class probabilities.
        output: How to read the model's outputs; see `linnet.linearize`.
        dtype: Dtype of the network, as for `TangentRegressor`.
        tolerance: Relative residual of iterative solves; "auto" is 1e-6, or 1e-4 in float32. The mode is found to a
            relative gradient of 1e-6, or of this if it is larger.
        iterations: Limit of iterative solves.
        preconditioner: "auto", "nystrom" or "none"; "pivoted-cholesky", of earlier versions, means "auto".
        rank: Number of examples that the preconditioner is made from, or "auto".
        samples: Posterior samples of the iterative solver and of error bars, and draws of Monte Carlo.
        variance: How error bars are made: "exact", "samples" or "auto", as for `TangentRegressor`.
        weights: Weights of the networks of an ensemble: "uniform", "evidence" or a number for each, as for
            `TangentRegressor`.
        memory: Bytes that dense matrices may take, or "auto".
        batch_size: Number of examples per chunk, or "auto".
        relinearize: Number of times, at most, that the mode is written back into a copy of the network, which is then
            linearized around the new weights; see `TangentRegressor`.
        seed: Seed of all random draws.
        progress: False for no progress bars.

    Attributes:
        classes_: The label of each output (for one logit: of 0 and 1).
        likelihood_: The likelihood, with thresholds where classes are in an order.
        mean_: The mean function, "network" or "zero".
        scales_: Prior scales by name.
        log_evidence_: Of the Laplace approximation (with weights: of each example as many times as its weight says),
            whatever the inference, with a dense solver; by conjugate gradients
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
        relinearized_: The steps of ``relinearize=``, each with its objective and its evidence.
        members_: Of an ensemble, the fitted classifier of each network; ``weights_`` their weights.

    Example:
        >>> X = torch.linspace(-2, 2, 20)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 2))
        >>> clf = TangentClassifier(model).fit(X, (X[:, 0].abs() > 1).long())
        >>> clf.predict_proba(X).shape, float((clf.predict(X) == (X[:, 0].abs() > 1)).float().mean())
        (torch.Size([20, 2]), 1.0)
    """

    _SHARED = (*Generalized._SHARED, "classes_", "multilabel_")

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        params: Params = None,
        inference: Inference = "vi",
        mean: Mean = "auto",
        prior: PriorSpec = "balanced",
        solver: str = "auto",
        *,
        top: int | str | None = None,
        link: str = "probit",
        family: str = "auto",
        classes: Sequence[Any] | None = None,
        ignore_index: int | None = -100,
        likelihood: str | Likelihood = "classification",
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
        weights: str | Sequence[float] = "uniform",
        memory: float | str = "auto",
        batch_size: int | str = "auto",
        relinearize: int = 0,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.relinearize = relinearize
        self.model, self.params, self.inference, self.mean, self.prior = model, params, inference, mean, prior
        self.top, self.solver, self.link, self.family, self.classes = top, solver, link, family, classes
        self.likelihood = likelihood
        self.ignore_index, self.epochs, self.minibatch, self.learning_rate = (
            ignore_index,
            epochs,
            minibatch,
            learning_rate,
        )
        self.output, self.dtype, self.tolerance, self.iterations = output, dtype, tolerance, iterations
        self.preconditioner, self.rank, self.samples, self.variance = preconditioner, rank, samples, variance
        self.weights, self.memory, self.batch_size = weights, memory, batch_size
        self.seed, self.progress = seed, progress

    @by_members
    @together
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, source: Any = None) -> TangentClassifier:
        """Condition on labels y, (n,) of any kind, or (n, c) of zeros and ones; a Dataset may carry them.

        Args:
            X: Inputs.
            y: Labels.
            sample_weight: How many times each example counts, (n,): it multiplies the log likelihood. An example of
                weight 2 counts as the same example given twice, in the evidence too; one of weight 0 is left out.
            source: All data that the network was trained on, ``(X0, y0)`` or a Dataset of both, as for
                `TangentRegressor`: their posterior is the prior of the new task, and the mean function is zero.
                Or an earlier fitted classifier, where classifiers take more examples.
        """
        self.top_path_ = None
        if isinstance(source, Tangent):
            self._carry_on(source, X, y, sample_weight)
            return self
        check_settings(self)
        self.relinearized_ = ()
        self._settle(None)
        if self.top == "evidence" and self.solver != "adam":
            self._fit_by_evidence(X, y, sample_weight, source)
            return self
        check_prior(self.prior)
        check_variance(self.variance)
        if self.link not in ("probit", "mc"):
            raise ValueError(f"link must be 'probit' or 'mc'; got {self.link!r}.")
        self._check_likelihood()
        self._how()  # its errors come before any work
        inputs = self._inputs(X, reset=True)
        if self.relinearize:
            if source is not None:
                raise NotImplementedError("relinearize= does not go with source=: use relinearize=0.")

            def fit(estimator: Any, around: Around | None) -> None:
                estimator._settle(around)
                estimator._fit_likelihood(estimator._inputs(X, reset=True), y, sample_weight)

            around, self.relinearized_ = relinearize(self, fit, changed={"inference": "map"})
            self._settle(around)
        self._fit_likelihood(inputs, y, sample_weight, source)
        self._warn_of_nothing()
        return self

    def _check_likelihood(self) -> None:
        found = likelihood_for(self.likelihood, torch.empty(0), (2,))
        own = not isinstance(self.likelihood, str) and describe_likelihood(found)["own"]
        if not own and not isinstance(found, Bernoulli | Categorical | Ordinal):
            raise ValueError(
                f"A classifier takes likelihood='classification', 'ordinal' or a likelihood of classes; got {found!r}. "
                "For counts and times use linnet.TangentGLM, for numbers linnet.TangentRegressor."
            )

    def _check_order(self, f: Tensor) -> None:
        """Warn where the outputs f (n, c) agree with the labels in another order alone."""
        count = len(self.classes_)
        if self.classes is not None or self.multilabel_ or self.classes_.tolist() == list(range(count)):
            return
        assert self._observed is not None
        predicted = (f[:, 0] > 0).long() if f.shape[1] == 1 else f.argmax(1)
        codes = self._observed.reshape(len(f)).long().cpu().numpy()
        order = find_better_order(predicted.cpu().numpy(), codes, count)
        if order is not None:
            named = [self.classes_[i].item() for i in order]
            warnings.warn(
                f"The outputs of the network agree with the labels in the order {named}, and hardly in the order "
                f"{self.classes_.tolist()}, which is taken. If the network was trained on these classes, pass "
                f"classes={named}.",
                stacklevel=6,
            )

    def _warn_of_nothing(self) -> None:
        """Where the evidence has shrunk the prior until nothing is left of a mean of zero."""
        if not self.scales_ or self.mean_ != "zero" or self.mode_ is None or float(self.mode_.f.abs().max()) > NOTHING:
            return
        warnings.warn(
            f"The evidence of these {len(self.mode_.f):,} labels is largest for a prior scale of next to nothing, and "
            "with mean='zero' all inputs then have the same probabilities: the features tell no classes apart, or the "
            "labels are too few. Use prior='balanced', whose scale cannot vanish, mean='network', more labels, or a "
            "variance of your own as prior=.",
            stacklevel=5,
        )

    @by_members
    @together
    def refit(self, X: Any, y: Any = None, sample_weight: Any = None) -> TangentClassifier:
        """A classifier that has seen (X, y) alone, with the prior and the classes found here: task after task.

        No scale is chosen anew, and labels of some of the classes are enough. This one stays as it is.

        Args:
            X: Inputs.
            y: Labels.
            sample_weight: How many times each example counts, as for `fit`.

        Example:
            >>> model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 3))
            >>> X = torch.linspace(-2, 2, 30)[:, None]
            >>> clf = TangentClassifier(model).fit(X, torch.arange(30) // 10)
            >>> new = clf.refit(X[10:], 2 - torch.arange(20) // 10)
            >>> new.scales_ == clf.scales_, new.predict_proba(X).shape
            (True, torch.Size([30, 3]))
        """
        check_is_fitted(self)
        other: TangentClassifier = self._refit_likelihood(self._inputs(X, reset=False), y, sample_weight)
        return other

    def _without_ignored(self, inputs: Any, y: Any, J: Jacobian) -> tuple[Any, Any, Counted] | None:
        labels = as_labels(J.targets() if y is None else y, J.n)
        kept = find_labeled(labels, self.ignore_index)
        fewer = leave_out_ignored(inputs, y, labels, self.ignore_index)
        return None if fewer is None or kept is None else (*fewer, Counted(J.n, kept))

    def _observe(self, y: Any, J: Jacobian, *, refit: bool) -> Tensor:
        self._tensors = isinstance(y, Tensor) or y is None
        labels = as_labels(J.targets() if y is None else y, J.n)
        if not refit:
            return self._encode(labels, J, self.classes)
        if (labels.ndim == 2) != self.multilabel_:
            needed = f"({J.n}, {J.c}) of zeros and ones" if self.multilabel_ else f"({J.n},)"
            raise ValueError(f"refit takes labels as fit has seen them, {needed}; got shape {labels.shape}.")
        return self._encode(labels, J, self.classes_, self.likelihood_)

    def _take_settings(self, first: TangentClassifier) -> None:
        super()._take_settings(first)
        self._tensors = first._tensors

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        meta, tensors = super()._state()
        meta |= {
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "multilabel": self.multilabel_,
            "tensors": self._tensors,
        }
        return meta, tensors

    def _set_state(self, meta: dict[str, Any], tensors: dict[str, Tensor], J: Any) -> None:
        super()._set_state(meta, tensors, J)
        self.classes_ = np.array(meta["classes"], dtype=meta["classes_dtype"])
        self.multilabel_, self._tensors = meta["multilabel"], meta["tensors"]

    # Labels.

    def _network(self, X: Any, y: Any, weight: Tensor | None) -> nn.Module:
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
        one = isinstance(likelihood_for(self.likelihood, labels, (count,)), Ordinal)
        outputs = 1 if one else count if labels.ndim == 2 or count > 2 else 1
        return default_network(X.shape[1], outputs, seed=self.seed, X=X, weight=weight)

    def _encode(self, labels: np.ndarray, J: Jacobian, classes: Any, known: Likelihood | None = None) -> Tensor:
        """Labels as the likelihood's targets; sets ``classes_`` and ``likelihood_``, which may be known."""
        c = J.c
        found = likelihood_for(self.likelihood, labels, (c,)) if known is None else known
        if labels.ndim == 2:
            if self.likelihood != "classification" and not isinstance(found, Bernoulli):
                raise ValueError(f"{found!r} has one label for each example, ({J.n},); got shape {labels.shape}.")
            self.multilabel_, self.classes_ = True, np.arange(c)
            codes = torch.as_tensor(labels)
        else:
            self.multilabel_, self.classes_ = False, self._name_classes(labels, found, c, classes)
            codes = self._codes(labels)
        self.likelihood_ = found
        return found.targets(codes, J.n, c, dtype=J.dtype, device=J.device)

    def _codes(self, labels: np.ndarray) -> Tensor:
        """The number of the class of each label."""
        return torch.from_numpy(find_codes(labels, self.classes_))

    def _new_targets(self, y: Any, J: Jacobian) -> Tensor:
        labels = as_labels(J.targets() if y is None else y, J.n)
        if (labels.ndim == 2) != self.multilabel_:
            needed = f"({J.n}, {J.c}) of zeros and ones" if self.multilabel_ else f"({J.n},)"
            raise ValueError(f"Labels must be as fit has seen them, {needed}; got shape {labels.shape}.")
        codes = torch.as_tensor(labels) if labels.ndim == 2 else self._codes(labels)
        return self.likelihood_.targets(codes, J.n, J.c, dtype=J.dtype, device=J.device)

    def _name_classes(self, labels: np.ndarray, likelihood: Likelihood, c: int, classes: Any) -> np.ndarray:
        """The label of each class."""
        if not isinstance(likelihood, Ordinal):
            linnets = isinstance(likelihood, Bernoulli | Categorical)
            count = max(2, c) if linnets else likelihood.mean(torch.zeros(1, c)).shape[-1]
            names = find_output_names(self.model, count) if classes is None else None
            if names is not None and labels.dtype.kind in "UO" and set(labels.tolist()) <= set(names):
                classes = names
            return name_classes(labels, count, classes)
        found = np.unique(labels)
        if classes is None and found.dtype.kind not in "biuf":
            raise ValueError(
                f"Labels {found.tolist()[:6]} do not say which class is lower. Give their order as classes=, from the "
                "lowest to the highest."
            )
        count = likelihood.classes or (len(found) if classes is None else len(classes))
        return name_classes(labels, max(2, count), classes)

    # Predictions.

    @by_members
    @together
    def decision_function(self, X: Any) -> Any:
        """Logits of the averaged probabilities, (n,) for one output, else (n, c); `predict_logits` has their moments.

        For classes in an order it is the mean of the output, (n,), which the thresholds cut into classes. For a mode
        alone, and for the probit link, softmax (or the sigmoid) of them gives `predict_proba`.
        """
        f, spread = self._predict(X, self._spread)
        if isinstance(self.likelihood_, Ordinal):
            return convert_like(X, f[:, 0])
        if spread is not None and self.link == "probit" and isinstance(self.likelihood_, Bernoulli | Categorical):
            f = f / (1 + math.pi / 8 * spread).sqrt()
        elif spread is not None:
            p = self._averaged(f, spread)
            f = torch.logit(p) if isinstance(self.likelihood_, Bernoulli) else p.log()
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

    @by_members
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

    @by_members
    @together
    def sample(self, X: Any, k: int = 1, *, seed: int | None = None) -> Any:
        """k joint samples of the logits at X, (k, n, c)."""
        return convert_like(X, self._sample(X, k, torch.Generator().manual_seed(self.seed if seed is None else seed)))

    def _outputs_and_spread(self, X: Any, spread: Spread) -> tuple[Any, Any]:
        return self._predict(X, spread)

    @together
    def _probabilities_and_std(self, X: Any) -> tuple[Tensor, Tensor | None]:
        """Class probabilities, and standard deviations of the logits (n, c), from one pass; None for a mode."""
        f, spread = self._predict(X, self._spread)
        p = self._for_all_classes(self._averaged(f, spread))
        if spread is None:
            return p, None
        if isinstance(spread, FactoredCovariance):
            return p, spread.T.square().sum(2).sqrt()
        return p, (spread if spread.ndim == 2 else spread.diagonal(dim1=1, dim2=2)).sqrt()

    @property
    def _spread(self) -> Spread:
        """The second moments that probabilities take."""
        if self.inference == "map" or self.link == "probit":
            return "none" if self.inference == "map" else "variance"
        return "factor" if self.variance_ == "samples" else "blocks"

    def _exported_form(self) -> Any:
        if self.link != "probit" or not isinstance(self.likelihood_, Bernoulli | Categorical):
            raise NotImplementedError(
                "to_module(error_bars=True) gives probabilities of classes without an order by link='probit'; the fit "
                f"has {self.likelihood_!r} and link={self.link!r}."
            )
        if isinstance(self.likelihood_, Categorical):
            return "classes"
        return "labels" if self.multilabel_ else "one logit"

    @by_members
    def _probabilities(self, X: Any) -> Tensor:
        return self._for_all_classes(self._averaged(*self._predict(X, self._spread)))

    def _for_all_classes(self, p: Tensor) -> Tensor:
        return torch.cat([1 - p, p], 1) if p.shape[1] == 1 and not self.multilabel_ else p

    def _averaged(self, f: Tensor, spread: Any) -> Tensor:
        """Probabilities averaged over logits of mean f, (n, c)."""
        if spread is None:
            return self.likelihood_.mean(f)
        generator = torch.Generator().manual_seed(self.seed)
        draws = max(self.samples, 1000)
        return compute_probabilities(self.likelihood_, f, spread, link=self.link, samples=draws, generator=generator)
