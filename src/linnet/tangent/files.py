"""Fitted tangent estimators in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from linnet._estimator import Dtypes, behavior, default_network
from linnet._estimator import files as saved
from linnet.inference import Average, Choice, Fit, Noise, Task
from linnet.linalg import LinearOperator, Stack
from linnet.probability import POSTERIORS, describe_likelihood, posterior_from, restore_likelihood
from linnet.tangent.input_features import InputFeatures

if TYPE_CHECKING:
    from linnet.tangent.base import Tangent

KIND = "tangent estimator"
ESTIMATORS = {
    "TangentRegressor": "linnet.tangent.regressor",
    "TangentClassifier": "linnet.tangent.classifier",
    "TangentGLM": "linnet.tangent.glm",
}
SELECTIONS = {"Trial": "linnet.adaptation", "MeanTrial": "linnet.tangent.mean_choice"}
"""Rows of ``selection_``, and where they are."""


def save(estimator: Tangent, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator to one file."""
    saved.write(estimator.lin_, path, *pack(estimator), kind=KIND)


def pack(estimator: Tangent) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON of a file; the network itself is not part of it, only the checksum of its weights.

    A posterior in function space needs the training inputs again when it is loaded, so they are written too; that takes
    inputs in memory (arrays, tensors, dicts), not a Dataset.
    """
    found = estimator.posterior_
    name = type(found).__name__
    tensors = saved.posterior_tensors(found)
    tensors["prior_variance"] = estimator.prior_variance_
    state: dict[str, Any] = {
        "scales": {k: float(v) for k, v in estimator.scales_.items()},
        "log_evidence": estimator.log_evidence_,
        "log_evidence_error": estimator.log_evidence_error_,
        "solver": estimator.solver_,
        "variance": estimator.variance_,
        "n_features_in": getattr(estimator, "n_features_in_", None),
        "mean": estimator.mean_,
        "top": estimator.top_,
        "top_path": None if estimator.top_path_ is None else list(estimator.top_path_.items()),
    }
    if estimator._features is not None:
        state["inputs_length"], state["outputs"] = estimator._features.length, estimator._outputs
        tensors |= {f"features.{key}": value for key, value in estimator._features.state_dict().items()}
    inputs = [saved.flatten_inputs(X) for X in estimator._train_inputs]
    if found.needs_data and any(x is None for x in inputs):
        raise TypeError(
            "Saving a posterior in function space takes the training inputs along, and they are not in memory (a "
            "Dataset or DataLoader). Fit on tensors or arrays, or with solver='weight' or 'cg-weight'."
        )
    if all(x is not None for x in inputs):
        state["inputs"] = [x[1] for x in inputs if x is not None]
        for i, x in enumerate(inputs):
            tensors |= {f"inputs.{i}.{key}": value for key, value in x[0].items()} if x else {}
    made = estimator._made
    if estimator._shift is not None:  # the network of the user, or the network that was made, with other weights
        tensors["shift"] = estimator._shift
        made = (made or {"scaled": False, "temperature": 1.0, "head": None}) | {"with_weights": True}
    own, more = estimator._state()
    kept, seen = behavior.record(estimator.lin_, estimator._probe if estimator.model is not None else None)
    if estimator.model is None:
        network = estimator.lin_.module
        tensors |= {f"network.{key}": value for key, value in network.state_dict().items()}
        base = None
    else:
        base = saved.base_of(estimator)
        if made is not None and made["with_weights"]:
            tensors |= {f"network.{key}": value for key, value in estimator.lin_.given.state_dict().items()}
    meta = {
        "estimator": type(estimator).__name__,
        "settings": saved.settings_of(estimator, apart=("model", "params", "top", "output", "dtype", "likelihood")),
        "needs_output": estimator.output is not None,
        "parameters": estimator._own_parameters(),
        **estimator._dtypes.meta(),
        "posterior": name,
        "base": base,
        "state": state,
        "own": own,
        "behavior": seen,
        "made": made,
        "selection": None if estimator.selection_ is None else [asdict(row) for row in estimator.selection_],
        "relinearized": [asdict(step) for step in estimator.relinearized_],
        "selection_of": None if estimator.selection_ is None else type(estimator.selection_[0]).__name__,
    }
    if hasattr(estimator, "likelihood_"):
        given = estimator.likelihood
        asked = given if isinstance(given, str) else None
        meta["likelihood"] = describe_likelihood(estimator.likelihood_) | {"given": asked}
    return tensors | kept | {f"own.{key}": value for key, value in more.items()}, meta


def read(
    path: Any,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    model: nn.Module | None,
    *,
    output: Any,
    score: Any,
    likelihood: Any,
) -> Tangent:
    """The estimator that `save` wrote."""
    if meta.get("made") is not None and model is not None:
        maker = import_module("linnet.adaptation.network")
        model = maker.restore(model, meta["made"], saved.strip("network.", tensors))
    saved.check_base(path, meta["base"], model)
    saved.check_given(path, "output", meta["needs_output"], output)
    saved.check_given(path, "score", False, score)
    dtypes = Dtypes.from_meta(meta)
    dtype = "auto" if dtypes.network is None else meta["dtype"]
    settings = meta["settings"] | {"params": meta["parameters"], "dtype": dtype}
    kind = getattr(import_module(ESTIMATORS[meta["estimator"]]), meta["estimator"])
    found = None
    if meta["estimator"] == "TangentRegressor":
        saved.check_given(path, "likelihood", False, likelihood)
    else:  # earlier files have the name of one of linnet's own
        described = meta.get("likelihood") or {"name": meta["own"]["likelihood"], "settings": {}, "own": False}
        found = restore_likelihood(path, described, likelihood)
        settings |= {"likelihood": described.get("given", "classification") or found}
    estimator: Tangent = kind(model, output=output, **settings)
    if found is not None:
        estimator.likelihood_ = found
    network = model if model is not None else _default(saved.strip("network.", tensors), estimator.seed)
    device = next(network.parameters()).device
    tensors = {key: value.to(device) for key, value in tensors.items()}
    state = meta["state"]
    if "inputs_length" in state:
        features = saved.strip("features.", tensors)
        estimator._features = InputFeatures(**features, length=state["inputs_length"])
        estimator._outputs = state["outputs"]
    estimator._attach(network, dtypes)
    estimator._probe = behavior.check(path, estimator.lin_, tensors, meta.get("behavior"))
    estimator.prior_variance_ = tensors["prior_variance"]
    estimator.scales_, estimator.solver_, estimator.solution_ = state["scales"], state["solver"], None
    estimator.log_evidence_, estimator.log_evidence_error_ = state["log_evidence"], state["log_evidence_error"]
    estimator.top_ = state.get("top")
    estimator.top_path_ = dict(state["top_path"]) if state.get("top_path") else None
    if state["n_features_in"] is not None:
        estimator.n_features_in_ = state["n_features_in"]
    forms = enumerate(state.get("inputs", []))
    inputs = [saved.restore_inputs(saved.strip(f"inputs.{i}.", tensors), form) for i, form in forms]
    estimator._train_inputs = inputs
    jacobians = [estimator._jacobian(X) for X in inputs]
    if POSTERIORS[meta["posterior"]].needs_data:
        jacobians = [one.cached() for one in jacobians]
    J: LinearOperator | None = jacobians[0] if len(jacobians) == 1 else Stack(jacobians) if jacobians else None
    parts, layout = saved.strip("posterior.", tensors), estimator.lin_.layout
    estimator.posterior_ = posterior_from(meta["posterior"], parts, J=J, layout=layout)
    estimator._made, estimator._shift = meta.get("made"), tensors.get("shift")
    if meta.get("relinearized"):
        row_of = import_module("linnet.tangent.relinearization").Relinearization
        estimator.relinearized_ = tuple(row_of(**step) for step in meta["relinearized"])
    if meta.get("selection") is not None:
        name = meta.get("selection_of", "Trial")
        row_of = getattr(import_module(SELECTIONS[name]), name)
        estimator.selection_ = tuple(row_of(**row) for row in meta["selection"])
    estimator.variance_ = state.get("variance", "samples" if estimator.posterior_.known_from_samples else "exact")
    estimator._set_state(meta["own"], saved.strip("own.", tensors), J)
    estimator.mean_ = state.get("mean") or estimator._known_mean(network)  # earlier files have that of the settings
    return estimator


def _default(weights: Mapping[str, Tensor], seed: int) -> nn.Module:
    """The network of an estimator without a model, with its weights."""
    inputs, outputs = weights["1.weight"].shape[1], weights["5.weight"].shape[0]
    network = default_network(inputs, outputs, seed=seed, X=np.zeros((2, inputs)))
    network.load_state_dict(weights)
    return network


def task_state(task: Task, fit: Fit) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A Gaussian task and its fit, without the Jacobian and the posterior."""
    tensors = {
        "r": task.r,
        "base": task.base,
        "noise.base": task.noise.base,
        "noise.group": task.noise.group,
        "noise_rows": fit.noise_rows,
        "alpha": fit.alpha,
    }
    if task.noise.weight is not None:
        tensors["noise.weight"] = task.noise.weight
    meta = {
        "count": task.noise.count,
        "scales": list(fit.choice.scales),
        "noise": list(fit.choice.noise),
        "floored": list(fit.choice.floored or (False,) * len(fit.choice.noise)),
        "averaged": fit.choice.averaged,
    }
    if fit.average is not None and fit.average.rows < len(task.r):
        tensors |= {"average.delta": fit.average.delta, "average.alpha": fit.average.alpha}
        meta["average"] = {"rows": fit.average.rows, "log_evidence": fit.average.log_evidence}
    return meta, tensors


def task_from(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], J: Any, estimator: Any) -> tuple[Task, Fit]:
    """The inverse of `task_state`."""
    noise = Noise(
        tensors["noise.base"],
        tensors["noise.group"],
        meta["count"],
        tuple(meta["noise"]),
        weight=tensors.get("noise.weight"),
    )
    noises, floored = tuple(meta["noise"]), tuple(meta["floored"])
    averaged = meta.get("averaged", False)
    choice = Choice(tuple(meta["scales"]), noises, estimator.log_evidence_, floored=floored, averaged=averaged)
    fit = Fit(
        estimator.posterior_,
        choice,
        estimator.prior_variance_,
        tensors["noise_rows"],
        tensors["alpha"],
        estimator.log_evidence_,
        estimator.log_evidence_error_,
        estimator.solver_,
        average=_average_from(meta, tensors, estimator) if averaged else None,
    )
    return Task(J, tensors["r"], noise, tensors["base"]), fit


def _average_from(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], estimator: Any) -> Average:
    """The average before later observations; the posterior itself where there are none, and in earlier files."""
    if "average" not in meta:
        return Average(len(tensors["r"]), estimator.posterior_.delta, tensors["alpha"], estimator.log_evidence_)
    known = meta["average"]
    return Average(known["rows"], tensors["average.delta"], tensors["average.alpha"], known["log_evidence"])
