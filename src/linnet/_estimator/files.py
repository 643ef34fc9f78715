"""Fitted estimators in files: safetensors and JSON, bound to the weights of the network they were fitted around."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import files
from linnet._estimator import behavior, light  # noqa: F401
from linnet.inference.evidence.gaussian import Choice
from linnet.inference.problem import Fit, Noise, Task
from linnet.linalg.matrices import Stack
from linnet.linalg.operator import LinearOperator
from linnet.probability import posteriors
from linnet.probability.likelihoods import Bernoulli, Categorical
from linnet.probability.posteriors import Posterior
from linnet.probability.priors import Prior
from linnet.tangent.base import Tangent, default_network

KIND = "tangent estimator"

Reader = Callable[..., Any]
_READERS: dict[str, Reader] = {}
# Where the reader of each kind of file is registered; imported when such a file is read.
_HOMES = {
    KIND: "linnet._estimator.files",
    "fisher embedding": "linnet.fisher.embedding",
    "laplace approximation": "linnet.laplace.files",
}
_TANGENT = {"TangentRegressor": "linnet.tangent.regressor", "TangentClassifier": "linnet.tangent.classifier"}


def register(estimator: str, reader: Reader, *, kind: str) -> None:
    """Let `load` read another kind of file.

    Args:
        estimator: What the file's meta calls it, under "estimator".
        reader: Called as ``reader(path, tensors, meta, model, output=..., score=...)``; returns what was saved.
        kind: Of the file, as given to `linnet._common.files.save`.
    """
    _READERS[estimator] = reader
    _HOMES.setdefault(kind, reader.__module__)


# The tensors that make a posterior, by the names of its constructor's arguments.
_PARTS: dict[str, tuple[str, ...]] = {
    "PointPosterior": ("delta",),
    "FunctionPosterior": ("variance", "delta", "root", "factor"),
    "WeightPosterior": ("variance", "delta", "factor"),
    "SamplePosterior": ("delta", "samples"),
    "DiagonalPosterior": ("delta", "variances"),
    "LowRankPosterior": ("variance", "delta", "basis", "C"),
}


def save(estimator: Tangent, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator to one file; the network itself is not part of it, only the checksum of its weights.

    A posterior in function space needs the training inputs again when it is loaded, so they are written too; that takes
    inputs in memory (arrays, tensors, dicts), not a Dataset.
    """
    found = estimator.posterior_
    name = type(found).__name__
    tensors = {f"posterior.{part}": _part(found, part) for part in _PARTS[name]}
    tensors["prior_variance"] = estimator.prior_variance_
    state: dict[str, Any] = {
        "scales": {k: float(v) for k, v in estimator.scales_.items()},
        "log_evidence": estimator.log_evidence_,
        "log_evidence_error": estimator.log_evidence_error_,
        "solver": estimator.solver_,
        "n_features_in": getattr(estimator, "n_features_in_", None),
        "top": estimator.top_,
        "top_path": None if estimator.top_path_ is None else list(estimator.top_path_.items()),
    }
    inputs = [_flat_inputs(X) for X in estimator._train_inputs]
    if name == "FunctionPosterior" and any(x is None for x in inputs):
        raise TypeError(
            "Saving a posterior in function space takes the training inputs along, and they are not in memory (a "
            "Dataset or DataLoader). Fit on tensors or arrays, or with solver='weight' or 'cg-weight'."
        )
    if all(x is not None for x in inputs):
        state["inputs"] = [x[1] for x in inputs if x is not None]
        for i, x in enumerate(inputs):
            tensors |= {f"inputs.{i}.{key}": value for key, value in x[0].items()} if x else {}
    own, more = estimator._state()
    kept, seen = behavior.record(estimator.lin_, estimator._probe if estimator.model is not None else None)
    if estimator.model is None:
        network = estimator.lin_.module
        tensors |= {f"network.{key}": value for key, value in network.state_dict().items()}
        base = None
    else:
        base = base_of(estimator)
    meta = {
        "estimator": type(estimator).__name__,
        "settings": settings_of(estimator, apart=("model", "params", "top", "output", "dtype")),
        "needs_output": estimator.output is not None,
        "parameters": list(estimator.lin_.theta),
        "dtype": str(estimator.lin_.dtype).removeprefix("torch."),
        "posterior": name,
        "base": base,
        "state": state,
        "own": own,
        "behavior": seen,
    }
    files.save(path, tensors | kept | {f"own.{key}": value for key, value in more.items()}, meta, kind=KIND)


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, output: Any = None, score: Any = None) -> Any:
    """A fitted estimator from its file, around the network it was fitted with.

    Args:
        path: What ``save`` wrote.
        model: The network, with the weights it had then; on any device. None for an estimator without one.
        output: As when it was fitted, if there was one: functions are not saved.
        score: The same for an embedding whose score holds a function.
    """
    tensors, meta = files.load(path, kind=_HOMES)
    import_module(_HOMES[files.describe(path).kind])
    if meta.get("estimator") not in _READERS:
        raise ValueError(f"{path} holds a {meta.get('estimator')}, which this version of linnet does not know.")
    return _READERS[meta["estimator"]](path, tensors, meta, model, output=output, score=score)


def base_of(estimator: Any) -> str:
    """The checksum of the weights that an estimator was fitted with; raises where these have changed since."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    estimator.lin_.check_unchanged(contents=True)
    return checksum(estimator.lin_.given)


def check_base(path: str | os.PathLike[str], base: str | None, model: nn.Module | None) -> None:
    """Raise unless the network has the weights that the file was made with; ``base`` is their checksum."""
    if (base is None) != (model is None):
        what = "no network of its own, so load takes none" if model is not None else "a network: pass it as model="
        raise ValueError(f"{path} was fitted with {what}.")
    if model is not None and checksum(model) != base:
        raise ValueError(
            f"{path} was fitted around other weights: its network has checksum {base}, this one has "
            f"{checksum(model)}. Load the weights it was fitted with."
        )


def check_given(path: str | os.PathLike[str], name: str, needed: bool, given: Any) -> None:
    """Raise unless an argument of `load` is given where the file needs it, and only there."""
    if needed != (given is not None):
        raise ValueError(f"{path} was fitted {'with' if needed else 'without'} {name}=; load it so.")


def _read(
    path: Any, tensors: dict[str, Tensor], meta: dict[str, Any], model: nn.Module | None, *, output: Any, score: Any
) -> Tangent:
    """A tangent estimator."""
    check_base(path, meta["base"], model)
    check_given(path, "output", meta["needs_output"], output)
    check_given(path, "score", False, score)
    settings = meta["settings"] | {"params": meta["parameters"], "dtype": meta["dtype"]}
    kind = getattr(import_module(_TANGENT[meta["estimator"]]), meta["estimator"])
    estimator: Tangent = kind(model, output=output, **settings)
    network = model if model is not None else _default(tensors, estimator.seed)
    device = next(network.parameters()).device
    tensors = {key: value.to(device) for key, value in tensors.items()}
    _restore(path, estimator, network, tensors, meta)
    return estimator


for _name in _TANGENT:
    register(_name, _read, kind=KIND)


def checksum(model: nn.Module) -> str:
    """The SHA-256 of parameters and buffers."""
    return files.fingerprint(model.state_dict())


def _restore(
    path: Any, estimator: Tangent, network: nn.Module, tensors: dict[str, Tensor], meta: dict[str, Any]
) -> None:
    state = meta["state"]
    dtype = {"float32": torch.float32, "float64": torch.float64}[meta["dtype"]]
    estimator._attach(network, dtype)
    estimator._probe = behavior.check(path, estimator.lin_, tensors, meta.get("behavior"))
    estimator.prior_variance_ = tensors["prior_variance"]
    estimator.scales_, estimator.solver_, estimator.solution_ = state["scales"], state["solver"], None
    estimator.log_evidence_, estimator.log_evidence_error_ = state["log_evidence"], state["log_evidence_error"]
    estimator.top_ = state.get("top")
    estimator.top_path_ = dict(state["top_path"]) if state.get("top_path") else None
    if state["n_features_in"] is not None:
        estimator.n_features_in_ = state["n_features_in"]
    inputs = [_inputs(tensors, f"inputs.{i}.", form) for i, form in enumerate(state.get("inputs", []))]
    estimator._train_inputs = inputs
    parts = {part: tensors[f"posterior.{part}"] for part in _PARTS[meta["posterior"]]}
    jacobians = [estimator._jacobian(X) for X in inputs]
    J: LinearOperator | None = None
    if meta["posterior"] == "FunctionPosterior":
        jacobians = [one.cached() for one in jacobians]
    if jacobians:
        J = jacobians[0] if len(jacobians) == 1 else Stack(jacobians)
    kind = getattr(posteriors, meta["posterior"])
    estimator.posterior_ = kind(J, **parts) if meta["posterior"] == "FunctionPosterior" else kind(**parts)
    own = {key.removeprefix("own."): value for key, value in tensors.items() if key.startswith("own.")}
    estimator._set_state(meta["own"], own, J)


def _default(tensors: Mapping[str, Tensor], seed: int) -> nn.Module:
    weights = {key.removeprefix("network."): value for key, value in tensors.items() if key.startswith("network.")}
    inputs, outputs = weights["1.weight"].shape[1], weights["5.weight"].shape[0]
    network = default_network(inputs, outputs, seed=seed, X=np.zeros((2, inputs)))
    network.load_state_dict(weights)
    return network


def _part(found: Posterior, part: str) -> Tensor:
    return getattr(found, "prior_variance" if part == "variance" else part)


def settings_of(estimator: Any, *, apart: tuple[str, ...]) -> dict[str, Any]:
    """Constructor arguments that JSON can hold; parameters and dtype are saved as they turned out (``apart``)."""
    out = {}
    for name, value in estimator.get_params(deep=False).items():
        if name in apart:
            continue
        if isinstance(value, np.ndarray | Tensor | np.generic):
            value = value.tolist()
        out[name] = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    return out


def _flat_inputs(X: Any) -> tuple[dict[str, Tensor], Any] | None:
    """Inputs in memory as named tensors and the form they had; None for other data."""
    if isinstance(X, np.ndarray | Tensor):
        return {"x": torch.as_tensor(X)}, "one"
    items: list[tuple[str, Any]]
    if isinstance(X, Mapping):
        items = [(str(key), value) for key, value in X.items()]
    elif isinstance(X, tuple):
        items = [(str(i), value) for i, value in enumerate(X)]
    else:
        return None
    if not all(isinstance(value, np.ndarray | Tensor) for _, value in items):
        return None
    return {key: torch.as_tensor(value) for key, value in items}, "dict" if isinstance(X, Mapping) else "tuple"


def _inputs(tensors: Mapping[str, Tensor], prefix: str, form: str) -> Any:
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    if form == "one":
        return found["x"]
    return found if form == "dict" else tuple(found[str(i)] for i in range(len(found)))


# What the two estimators keep beside the posterior.


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
    meta = {
        "count": task.noise.count,
        "scales": list(fit.choice.scales),
        "noise": list(fit.choice.noise),
        "floored": list(fit.choice.floored or (False,) * len(fit.choice.noise)),
    }
    return meta, tensors


def task_from(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], J: Any, estimator: Any) -> tuple[Task, Fit]:
    """The inverse of `task_state`."""
    noise = Noise(tensors["noise.base"], tensors["noise.group"], meta["count"], tuple(meta["noise"]))
    noises, floored = tuple(meta["noise"]), tuple(meta["floored"])
    choice = Choice(tuple(meta["scales"]), noises, estimator.log_evidence_, floored=floored)
    fit = Fit(
        estimator.posterior_,
        choice,
        estimator.prior_variance_,
        tensors["noise_rows"],
        tensors["alpha"],
        estimator.log_evidence_,
        estimator.log_evidence_error_,
        estimator.solver_,
    )
    return Task(J, tensors["r"], noise, tensors["base"]), fit


def prior_from(estimator: Any) -> Prior:
    """The prior as a fixed one, its scales being chosen."""
    return Prior("given", estimator.prior_variance_)


LIKELIHOODS = {"Bernoulli": Bernoulli, "Categorical": Categorical}
