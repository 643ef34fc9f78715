"""What the callbacks of trainers share: a `linnet.Laplace` that is fitted when the training ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from linnet import metrics
from linnet._common import messages
from linnet._estimator import as_labels, find_codes, is_ensemble
from linnet.laplace import Laplace

LogMetrics = Callable[[dict[str, float]], Any]
"""A function that keeps named numbers, such as ``mlflow.log_metrics`` or ``wandb.log``."""


class FitAfterTraining:
    """Fits a `linnet.Laplace` to a trained network. `linnet.interop.lightning` and `.transformers` say when.

    Args:
        likelihood: As for `linnet.Laplace`.
        data: Inputs and targets (X, y), or a Dataset or DataLoader of both, to fit to; None for the training data of
            the trainer. The data must be the same in every pass, without random augmentation.
        test: Inputs and targets (X, y) whose metrics are logged as ``test_...``; None for no test.
        network: Name of the submodule that is the network, or a function from the trained module to the network; None
            for the module itself.
        save: File for the fitted estimator; None for no file. The structure then is "kron" where none is given: a file
            of the structure "function" needs the training inputs in memory.
        log_metrics: Function that keeps a dict of numbers, such as ``mlflow.log_metrics`` or ``wandb.log``.
        **options: Further arguments of `linnet.Laplace`, such as ``structure`` and ``params``.

    Attributes:
        laplace_: The fitted `linnet.Laplace`, after the training.
        metrics_: The numbers that were logged.
    """

    laplace_: Laplace
    metrics_: dict[str, float]

    def __init__(
        self,
        likelihood: Any = "classification",
        *,
        data: Any = None,
        test: tuple[Any, Any] | None = None,
        network: str | Callable[[nn.Module], nn.Module] | None = None,
        save: str | os.PathLike[str] | None = None,
        log_metrics: LogMetrics | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if "model" in options:
            raise TypeError("The trainer gives the model. Choose a part of it with network=.")
        if test is not None and (not isinstance(test, tuple | list) or len(test) != 2):
            raise TypeError(f"test must be inputs and targets, (X, y); got {type(test).__name__}.")
        if test is not None and likelihood not in ("regression", "classification"):
            raise ValueError(f"test is known for classification and regression; got likelihood={likelihood!r}.")
        if log_metrics is not None and not callable(log_metrics):
            raise TypeError(f"log_metrics must be a function of a dict; got {type(log_metrics).__name__}.")
        if save is not None:
            options = {"structure": "kron", **options}
            if options["structure"] in ("auto", "function") and not isinstance(data, tuple):
                raise ValueError(
                    f"structure={options['structure']!r} may keep the training inputs, and a file cannot hold those of "
                    "a loader. Name another structure, give data=(X, y), or leave save= out and save laplace_ yourself."
                )
        Laplace(nn.Identity(), likelihood, **options)  # names of options that do not exist raise before the training
        if save is not None:
            messages.check_writable(save, "save")
        self.likelihood, self.data, self.test, self.network = likelihood, data, test, network
        self.save, self.log_metrics, self.options = save, log_metrics, options

    def _fit(self, trained: nn.Module, data: Any) -> dict[str, float]:
        """Fit to ``data=``, or else to the data of the trainer. Returns the metrics."""
        given = self.data if self.data is not None else data
        la = Laplace(self._find_network(trained), self.likelihood, **self.options)
        self.laplace_ = la.fit(*given) if isinstance(given, tuple | list) and len(given) == 2 else la.fit(given)
        self.metrics_ = list_metrics(self.laplace_)
        if self.test is not None:
            self.metrics_ |= {f"test_{name}": value for name, value in _test(self.laplace_, *self.test).items()}
        if self.save is not None:
            self.laplace_.save(self.save)
        if self.log_metrics is not None:
            self.log_metrics(dict(self.metrics_))
        return dict(self.metrics_)

    def _find_network(self, trained: nn.Module) -> nn.Module:
        if self.network is None:
            return trained
        return trained.get_submodule(self.network) if isinstance(self.network, str) else self.network(trained)


def list_metrics(estimator: Any) -> dict[str, float]:
    """Facts about a fitted estimator as plain numbers, for ``mlflow.log_metrics``, ``wandb.log`` and the like.

    Metrics of predictions are the dicts of `linnet.metrics.classification` and `linnet.metrics.regression`.

    Args:
        estimator: A fitted TangentRegressor, TangentClassifier, TangentGLM or Laplace.

    Returns:
        The log evidence, the number of parameters that the data determine (of `Laplace`), the noise variance of each
        output, and the scales of the prior by their names.

    >>> import torch, linnet
    >>> X = torch.linspace(-1, 1, 9)[:, None]
    >>> sorted(list_metrics(linnet.TangentRegressor(nn.Linear(1, 1)).fit(X, X[:, 0])))
    ['log_evidence', 'noise', 'prior_scale']
    """
    found: dict[str, Any] = {}
    members: list[Any] = estimator.members_ if is_ensemble(estimator) else [estimator]
    one = len(members) == 1
    evidence = members[0].largest_evidence_ if one and isinstance(members[0], Laplace) else estimator.log_evidence_
    if evidence is not None:
        found["log_evidence"] = evidence
    for i, member in enumerate(members):
        prefix = "" if one else f"network_{i}_"
        if isinstance(member, Laplace):
            found[f"{prefix}effective_dimension"] = member.effective_dimension_
        found |= {prefix + name: value for name, value in _spread("noise", getattr(member, "noise_", None)).items()}
        found |= {prefix + name: value for name, value in _spread("prior_scale", member.scales_).items()}
    return {name: float(value) for name, value in found.items()}


def _spread(name: str, values: Any) -> dict[str, Any]:
    """One number under the name, or several under the name and their own names."""
    if values is None:
        return {}
    named = values if isinstance(values, Mapping) else dict(enumerate(np.asarray(values, dtype=float).reshape(-1)))
    return {name if len(named) == 1 else f"{name}_{key}": value for key, value in named.items()}


def _test(la: Laplace, X: Any, y: Any) -> dict[str, float]:
    if la.likelihood == "regression":
        mean, std = la.predict(X, return_std=True, noise=True)
        return metrics.regression(mean, std, y)
    p = la.predict_proba(X)
    return metrics.classification(p, find_codes(as_labels(y, len(p)), la.classes_))
