"""Fitted estimators in files: safetensors and JSON, bound to the weights of the network they were fitted around."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import Ranks, files
from linnet.network import check_module, lies_in_parts, whole
from linnet.probability import Posterior

if TYPE_CHECKING:
    from linnet.jacobian import Linearization

READERS = {
    "tangent estimator": "linnet.tangent.files",
    "fisher embedding": "linnet.fisher.embedding",
    "laplace approximation": "linnet.laplace.files",
    "ensemble": "linnet._estimator.ensembles",
}
"""Kind of a file to the module whose ``read(path, tensors, meta, model, output=..., score=..., likelihood=...)`` gives
the estimator; the module is imported when such a file is read."""

KINDS = {
    "TangentRegressor": "tangent estimator",
    "TangentClassifier": "tangent estimator",
    "Laplace": "laplace approximation",
}
"""Estimators that may be members of an ensemble, and the kinds of their files."""


def pack(estimator: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON of an estimator's file."""
    found: tuple[dict[str, Tensor], dict[str, Any]]
    found = import_module(READERS[KINDS[type(estimator).__name__]]).pack(estimator)
    return found


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    output: Any = None,
    score: Any = None,
    likelihood: Any = None,
) -> Any:
    """A fitted estimator from its file, around the network it was fitted with.

    Args:
        path: The file that ``save`` wrote.
        model: The network, with the weights it had then; on any device. None for an estimator without one. For an
            ensemble the list of its networks, in their order.
        output: As when it was fitted, if there was one: functions are not saved.
        score: The same for an embedding whose score holds a function.
        likelihood: The class of a likelihood of your own, or such a likelihood, where it was fitted with one: a file
            holds its name and its settings alone.
    """
    tensors, meta = files.load(path, kind=READERS)
    module = import_module(READERS[files.describe(path).kind])
    if meta.get("estimator") not in module.ESTIMATORS:
        raise ValueError(f"{path} holds a {meta.get('estimator')}, which this version of linnet does not know.")
    return module.read(path, tensors, meta, model, output=output, score=score, likelihood=likelihood)


# The network.


def checksum(model: nn.Module) -> str:
    """The SHA-256 of parameters and buffers; of a sharded model all ranks take it together."""
    model = check_module(model)
    with Ranks().exchange("a checksum of all weights") if lies_in_parts(model) else nullcontext():
        return files.fingerprint(model.state_dict(), whole)


def write(
    lin: Linearization, path: str | os.PathLike[str], tensors: dict[str, Tensor], meta: Any, *, kind: str
) -> None:
    """Write a file. Of a sharded model all ranks call this, and the first of them writes."""
    with lin.network.together():
        if lin.network.shards is None or lin.ranks.rank == 0:
            files.save(path, tensors, meta, kind=kind)


def base_of(estimator: Any) -> str:
    """The checksum of the weights that an estimator was fitted with; raises where these have changed since."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    estimator.lin_.check_unchanged(contents=True)
    return checksum(estimator.lin_.given)


def check_base(path: str | os.PathLike[str], base: str | None, model: nn.Module | None) -> None:
    """Raise unless the network has the weights that the file was made with; ``base`` is their checksum."""
    if isinstance(model, list | tuple):
        raise ValueError(f"{path} was fitted with one network, and load takes that one; got a list of {len(model)}.")
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


# Settings, inputs and tensors.


def settings_of(estimator: Any, *, apart: tuple[str, ...]) -> dict[str, Any]:
    """Constructor arguments that JSON can hold, but for those named in ``apart``."""
    out = {}
    for name, value in estimator.get_params(deep=False).items():
        if name in apart:
            continue
        if isinstance(value, np.ndarray | Tensor | np.generic):
            value = value.tolist()
        out[name] = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    return out


def posterior_tensors(posterior: Posterior) -> dict[str, Tensor]:
    """The tensors of a posterior as files name them: those of a rotation have a prefix of their own."""
    named = posterior.tensors().items()
    return {key if key.startswith("rotation.") else f"posterior.{key}": value for key, value in named}


def strip(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it.

    >>> strip("a.", {"a.b": torch.zeros(1), "c": torch.ones(1)})
    {'b': tensor([0.])}
    """
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def flatten_inputs(X: Any) -> tuple[dict[str, Tensor], Any] | None:
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


def restore_inputs(found: dict[str, Tensor], form: str) -> Any:
    """The inverse of `flatten_inputs`."""
    if form == "one":
        return found["x"]
    return found if form == "dict" else tuple(found[str(i)] for i in range(len(found)))
