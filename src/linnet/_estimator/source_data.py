"""The data that a network was trained on, beside the data of a new task: ``fit(X, y, source=(X0, y0))``.

The posterior that the source data give is the prior of the new task. For one linear model this is the posterior of both
data together, with a mean function of zero: the network has fitted the source data, so that its residuals there are too
small to say anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linnet._common import kind
from linnet._estimator.inputs import check_inputs
from linnet.data import Joined, Source, as_source, targets_of
from linnet.network import check_module


@dataclass(frozen=True)
class WithSource:
    """The data of a task, followed by the source data.

    Attributes:
        inputs: Inputs of both.
        y: Targets of both.
        weight: How many times each example counts, (n,); None for once.
        start: The number of the first source example.
        stop: The number of examples.
    """

    inputs: Any
    y: Any
    weight: Tensor | None
    start: int
    stop: int

    @classmethod
    def join(cls, estimator: Any, X: Any, y: Any, weight: Tensor | None, source: Any) -> WithSource:
        """Put both together.

        Args:
            estimator: Whose inputs these are.
            X: Inputs of the task.
            y: Targets of the task; None where they come with the inputs.
            weight: Weights of the task's examples, or None.
            source: What the user gave as source.
        """
        if estimator.model is None:
            raise ValueError("source= holds the data that a network was trained on; pass that network as model=.")
        X0, y0 = _split(source)
        X0 = check_inputs(estimator, X0, reset=False)
        forward = check_module(estimator.model).forward
        task, before = as_source(X, forward), as_source(X0, forward)
        targets = _join_targets(_targets(y, task, "X"), _targets(y0, before, "the source"))
        if weight is not None:
            weight = torch.cat([weight, torch.ones(before.n, dtype=weight.dtype, device=weight.device)])
        inputs = _join_inputs(X, X0)
        inputs = Joined([task, before]) if inputs is None else inputs
        return cls(inputs, targets, weight, task.n, task.n + before.n)


def _split(source: Any) -> tuple[Any, Any]:
    """Inputs and targets; None for targets that come with the inputs."""
    if isinstance(source, tuple | list) and len(source) == 2:
        return source[0], source[1]
    if isinstance(source, Dataset | DataLoader | Source):
        return source, None
    what = f"{kind(source)} of length {len(source)}" if isinstance(source, tuple | list) else kind(source)
    raise TypeError(
        f"source must be inputs and targets, (X0, y0), or a Dataset or DataLoader of both, or an "
        f"estimator that was fitted to them; got {what}."
    )


def _targets(y: Any, source: Source, what: str) -> Tensor | np.ndarray:
    """Targets of one of the two, from what the user gave or from what came with the inputs."""
    if y is None:
        y = targets_of([batch.rest for batch in source.batches(1024)], source.kind)
    found = y.detach() if isinstance(y, Tensor) else np.asarray(y)
    if found.ndim == 0 or len(found) != source.n:
        count = len(found) if found.ndim else "a number as"
        raise ValueError(f"There are {source.n} examples in {what} and {count} targets; give one for each example.")
    return found


def _join_targets(y: Tensor | np.ndarray, y0: Tensor | np.ndarray) -> Tensor | np.ndarray:
    if y.shape[1:] != y0.shape[1:]:
        raise ValueError(
            f"The targets have shape {tuple(y.shape)}, so those of the source need shape "
            f"{tuple(y0.shape[:1]) + tuple(y.shape[1:])}; got {tuple(y0.shape)}. Both are observations of the same "
            "outputs."
        )
    if isinstance(y, np.ndarray) and isinstance(y0, np.ndarray):
        if (y.dtype.kind in "biuf") != (y0.dtype.kind in "biuf"):
            raise ValueError(f"The targets are of dtype {y.dtype}, and those of the source of dtype {y0.dtype}.")
        return np.concatenate([y, y0])
    device = y.device if isinstance(y, Tensor) else "cpu"
    return torch.cat([torch.as_tensor(part).to(device) for part in (y, y0)])


def _join_inputs(X: Any, X0: Any) -> Any:
    """Inputs in memory of one form, joined; None for others."""
    if isinstance(X, Tensor) and isinstance(X0, Tensor | np.ndarray):
        X0 = torch.as_tensor(X0).to(X.device)
        return torch.cat([X, X0]) if X.shape[1:] == X0.shape[1:] else None
    if isinstance(X, np.ndarray) and isinstance(X0, Tensor | np.ndarray):
        X0 = X0.detach().cpu().numpy() if isinstance(X0, Tensor) else X0
        return np.concatenate([X, X0]) if X.shape[1:] == X0.shape[1:] else None
    pairs: dict[Any, tuple[Any, Any]]
    if isinstance(X, Mapping) and isinstance(X0, Mapping) and X.keys() == X0.keys():
        pairs = {key: (X[key], X0[key]) for key in X}
    elif isinstance(X, tuple) and isinstance(X0, tuple) and len(X) == len(X0):
        pairs = dict(enumerate(zip(X, X0, strict=True)))
    else:
        return None
    found = {key: _join_inputs(*pair) for key, pair in pairs.items()}
    if any(value is None for value in found.values()):
        return None
    return found if isinstance(X, Mapping) else tuple(found.values())
