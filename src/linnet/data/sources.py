"""Data of every accepted kind as a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from linnet.data import checks
from linnet.data.batch import SingleBatch, Source, check_finite, leaves
from linnet.data.datasets import IterableData, MapDataset, wrap_loader
from linnet.data.forward_signature import Signature


def as_source(data: Any, forward: Callable[..., Any] | nn.Module) -> Source:
    """Data as a source of batches for a model.

    Accepted are, with n the number of examples:

    - a tensor or numpy array (n, ...): the model's one argument;
    - a tuple or list of them: the first r are positional arguments, r being the number that ``forward``
      requires (at least one; all for a bare ``*args``), the others travel in ``Batch.rest``;
    - a dict or other mapping: keyword arguments; targets (``labels``, ``y``, ...) that ``forward`` does not
      accept travel in ``Batch.rest``; None and numbers are passed on with every batch;
    - a tuple or list whose first item is such a dict: keyword arguments; the others travel in ``Batch.rest``;
    - a map-style ``Dataset``, a list of examples, or an ``IterableDataset``, whose examples are any of these;
    - a ``DataLoader`` that gives the same batches every pass, used as it is;
    - a ``Source``, returned as it is.

    Tensors and arrays are sliced, never copied. Inputs are checked for NaN and infinity: here what is in
    memory, in the first pass what is streamed. Streamed data is also checked to be the same in every pass.

    Args:
        data: The data.
        forward: The model's forward, or the model; its signature decides which arguments are passed.

    Example:
        >>> import torch
        >>> source = as_source((torch.zeros(5, 2), torch.arange(5)), torch.nn.Linear(2, 3))
        >>> source.n, source.kind
        (5, 'in memory on cpu')
        >>> [batch.rest.tolist() for batch in source.batches(2)]
        [[0, 1], [2, 3], [4]]
    """
    if isinstance(data, Source):
        return data
    signature = Signature(forward)
    if isinstance(data, DataLoader):
        return wrap_loader(data, signature)
    if isinstance(data, IterableDataset):
        return IterableData(data, signature)
    if type(data) is TensorDataset:
        return InMemory(data.tensors, signature)
    if isinstance(data, Tensor | np.ndarray | Mapping | tuple) or (isinstance(data, list) and not _is_examples(data)):
        return InMemory(data, signature)
    by_position = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "iloc")
    if by_position and not isinstance(data, str | bytes):
        return MapDataset(data, signature)
    raise checks.unknown_data(data)


class InMemory(SingleBatch):
    """Tensors and arrays that are at hand; batches are views of them.

    Args:
        data: A tensor, an array, or a tuple or mapping of them.
        signature: What the model's forward takes.
    """

    def __init__(self, data: Any, signature: Signature) -> None:
        whole = signature.batch(data, 0)
        inputs = [leaf for _, leaf in leaves((whole.args, whole.kwargs))]
        devices = sorted({str(leaf.device) for leaf in inputs if isinstance(leaf, Tensor)})
        super().__init__(whole, f"in memory on {' and '.join(devices)}" if devices else "in memory")
        checks.check_some(self.n, self.kind)
        check_finite(whole)


def _is_examples(data: list[Any]) -> bool:
    """Whether a list holds examples (tuples or mappings) rather than one tensor for each argument."""
    return len(data) > 0 and all(isinstance(item, tuple | Mapping) for item in data)
