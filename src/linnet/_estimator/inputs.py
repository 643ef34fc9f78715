"""Inputs, targets and options that the estimators share, and the network of an estimator without a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet._common import kind
from linnet.data import InMemory, Source, as_source, as_tensors, as_writable
from linnet.probability import as_weights

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian


def list_options(estimator: Any) -> list[tuple[str, Any]]:
    """The constructor's arguments that print alike on all ranks; a progress bar may be shown on one of them."""
    given = estimator.get_params(deep=False)
    kinds = (str, bool, int, float, type(None))
    return sorted((name, v) for name, v in given.items() if name != "progress" and isinstance(v, kinds))


def check_inputs(estimator: Any, X: Any, *, reset: bool, flat: bool = False) -> Any:
    """Array-likes as checked arrays, (n, d) if ``flat``; tensors, dicts, lists of dicts, Datasets and loaders as they
    are."""
    from scipy.sparse import issparse
    from sklearn.utils.validation import validate_data

    known = isinstance(X, Tensor | Mapping | torch.utils.data.Dataset | torch.utils.data.DataLoader | Source | tuple)
    known = known or (isinstance(X, list) and len(X) > 0 and all(isinstance(item, Mapping) for item in X))
    if known and not issparse(X):  # one kind of sparse array is a dict
        return X
    flat = flat or getattr(X, "ndim", None) == 2  # of other shapes the network knows what it takes
    return validate_data(
        estimator, X, reset=reset, dtype="numeric", ensure_2d=flat, allow_nd=not flat, ensure_min_samples=1
    )


def convert_like(X: Any, value: Tensor) -> Any:
    """Tensors for tensors, arrays for anything else that is in memory."""
    first = X
    while isinstance(first, tuple | list | Mapping) and len(first):
        first = next(iter(first.values())) if isinstance(first, Mapping) else first[0]
    tensors = isinstance(first, Tensor | torch.utils.data.Dataset | torch.utils.data.DataLoader | Source)
    return value if tensors else value.detach().cpu().numpy()


def has_targets_in_memory(y: Any, J: Jacobian) -> bool:
    """Whether targets are in memory, so that they can be checked before any pass over the data."""
    return y is not None or isinstance(J._source, InMemory)


def as_targets(y: Any, J: Jacobian) -> Tensor:
    """Targets as a tensor, from what the user gave or from what came with the data."""
    y = J.targets() if y is None else y
    if not isinstance(y, Tensor):
        y = np.asarray(y)
        if y.dtype.kind not in "biuf":
            raise TypeError(f"Unknown label type: targets must be real numbers; got an array of {y.dtype}.")
        y = as_tensors(y, "the targets")
    y = y.detach()
    if y.is_complex():
        raise TypeError(f"Targets must be real numbers; got {y.dtype}.")
    if y.ndim == 0 or len(y) != J.n:
        count = len(y) if y.ndim else "a number as"
        raise ValueError(f"There are {J.n} examples and {count} targets; give one target for each example.")
    return y


def leave_out_ignored(X: Any, y: Any, labels: Tensor | np.ndarray, ignore_index: int | None) -> tuple[Any, Any] | None:
    """Inputs and targets without the examples that have no label to learn from; None where there is no such example.

    All labels of such an example are ``ignore_index``. Only integers are compared: labels of other kinds, such as
    strings, are never ignored.

    Args:
        X: Inputs, as the user gave them.
        y: Targets, as the user gave them; None where they come with the inputs.
        labels: The targets, (n, ...).
        ignore_index: The label; None for no label.

    Raises:
        ValueError: If there is no other label.

    >>> leave_out_ignored(np.arange(3), None, np.array([1, -100, 0]), -100)
    (array([0, 2]), None)
    """
    kept = find_labeled(labels, ignore_index)
    if kept is None:
        return None
    return take_examples(X, kept, "have a label that says so"), Counted(len(labels), kept).take(y)


def find_labeled(labels: Tensor | np.ndarray, ignore_index: int | None) -> Tensor | None:
    """The numbers of the examples with a label to learn from; None for all. The arguments are those above."""
    labels = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
    if ignore_index is None or labels.dtype.kind not in "iu":
        return None
    ignored = (labels == ignore_index).reshape(len(labels), -1).all(1)
    if not ignored.any():
        return None
    if ignored.all():
        raise ValueError(
            f"All {len(ignored):,} labels are {ignore_index}, which means that they are to be ignored: there is "
            "nothing to fit. Give labels, or another ignore_index=."
        )
    return torch.from_numpy(~ignored).nonzero()[:, 0]


@dataclass(frozen=True)
class Counted:
    """Which of n examples count.

    Attributes:
        n: How many examples there are.
        index: The numbers of those that count; None for all.
    """

    n: int
    index: Tensor | None = None

    def take(self, values: Any, what: str = "targets") -> Any:
        """What belongs to the examples that count, of values with one entry for each example; None stays."""
        if values is None or self.index is None:
            return values
        values = values if isinstance(values, Tensor) else np.asarray(values)
        if values.ndim == 0 or len(values) != self.n:
            count = len(values) if values.ndim else "a number as"
            raise ValueError(f"There are {self.n} examples and {count} {what}; give one for each example.")
        return take_examples(values, self.index, "")


def leave_out_weightless(X: Any, sample_weight: Any, forward: Any) -> tuple[Any, Tensor | None, Counted]:
    """Inputs, and the weights of the examples that count, (n,); and which examples these are.

    Args:
        X: Inputs, as the user gave them.
        sample_weight: A weight for each example, or None.
        forward: The network's forward, whose arguments the inputs are.

    Returns:
        The inputs without examples of weight zero, the other weights in float64 (None where all are one), and the
        examples that count.
    """
    if sample_weight is None:
        return X, None, Counted(0)
    n = as_source(X, forward).n
    w = as_weights(sample_weight, n)
    if w is None or bool((w > 0).all()):
        return X, w, Counted(n)
    kept = (w > 0).nonzero()[:, 0]
    w = w[kept]
    return take_examples(X, kept, "have the weight 0"), None if bool((w == 1).all()) else w, Counted(n, kept)


def take_examples(X: Any, index: Tensor, reason: str) -> Any:
    """Some of the examples; the others ``reason``, such as "have the weight 0"."""
    if isinstance(X, Tensor):
        return X[index.to(X.device)]
    if isinstance(X, np.ndarray):
        return X[index.numpy()]
    if isinstance(X, Mapping):
        return {key: take_examples(value, index, reason) for key, value in X.items()}
    if isinstance(X, tuple):
        return tuple(take_examples(value, index, reason) for value in X)
    if isinstance(X, torch.utils.data.Dataset) and hasattr(X, "__getitem__") and hasattr(X, "__len__"):
        return torch.utils.data.Subset(X, index.tolist())
    raise TypeError(
        f"Some examples are to be left out: they {reason}. Examples can be left out of tensors, arrays and map-style "
        f"Datasets; got {kind(X)}. Leave them out of this data; labels count with ignore_index=None."
    )


def default_network(inputs: int, outputs: int, *, seed: int, X: Any, weight: Tensor | None = None) -> nn.Module:
    """An untrained network for inputs (n, d), standardized as X is: its kernel is a prior over smooth functions.

    Args:
        inputs: d.
        outputs: Number of outputs.
        seed: Seed of the weights.
        X: Inputs (n, d).
        weight: How many times each of them counts, (n,); None for once.
    """
    X = torch.as_tensor(as_writable(X), device="cpu")
    w = torch.ones(len(X), dtype=torch.float64) if weight is None else weight.cpu().double()
    mean = (w[:, None] * X).sum(0) / w.sum()
    spread = ((w[:, None] * (X - mean).square()).sum(0) / w.sum()).sqrt()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            Standardize(mean, torch.where(spread > 0, spread, 1.0)),
            nn.Linear(inputs, 128),
            nn.Tanh(),
            nn.Linear(128, 128),
            nn.Tanh(),
            nn.Linear(128, outputs),
        ).double()


class Standardize(nn.Module):
    """``(x - mean) / spread``."""

    center: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer("center", mean)
        self.register_buffer("spread", spread)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.center) / self.spread


def warn_of_probabilities(f: Tensor, network: nn.Module) -> None:
    """Warn where the outputs of a classifier, (n, c), are probabilities.

    Outputs of several classes are probabilities if they are positive and sum to one. Outputs between zero and one may
    be logits too: they are taken for probabilities if the last module of the network is a sigmoid, or if a single
    output covers more than half of the range from zero to one. As logits they would all mean the same class.
    """
    rounding = torch.finfo(torch.bfloat16).eps  # of the coarsest dtype that networks run in
    if f.ndim != 2 or not bool(((f >= 0) & (f <= 1 + rounding)).all()):
        return
    if f.shape[1] > 1 and bool(((f.sum(1) - 1).abs() <= rounding).all()):
        what, inverse = "softmax", "torch.log"
    elif isinstance(list(network.modules())[-1], nn.Sigmoid) or (f.shape[1] == 1 and bool(f.max() - f.min() > 0.5)):
        what, inverse = "sigmoid", "torch.logit"
    else:
        return
    warnings.warn(
        f"The outputs of the network look like probabilities of a {what}. A classifier needs logits, and takes these "
        f"outputs for logits, so that its probabilities are wrong. Leave out the {what} at the end of the network, or "
        f"pass output={inverse}.",
        stacklevel=3,
    )
