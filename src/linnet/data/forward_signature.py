"""The arguments of a model's forward: which data it takes by position, which by keyword, and the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from linnet.data import checks
from linnet.data.batch import Batch, is_strings, leaves, rebuild

TARGETS = frozenset({"label", "labels", "y", "target", "targets", "idx", "index"})
"""Keys of a dict that a forward need not accept: they travel in ``Batch.rest``."""


class Signature:
    """The arguments of a forward: which items of a tuple and which keys of a dict it takes.

    Args:
        forward: A bound ``forward``, any callable, or a module (its forward is meant).

    Example:
        >>> import torch
        >>> data = {"x": torch.zeros(3), "y": torch.ones(3)}
        >>> args, kwargs, rest = Signature(lambda x, mask=None: x).bind(data)
        >>> list(kwargs), list(rest)
        (['x'], ['y'])
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        forward = forward.forward if isinstance(forward, nn.Module) else forward
        # A module around another one, whose arguments it takes, says so.
        while (inner := getattr(getattr(forward, "__self__", None), "wrapped_forward", None)) is not None:
            forward = inner
        try:
            parameters = list(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):  # written in C, without a signature
            parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())
        # A Hugging Face model takes labels to compute a loss. An encoder-decoder also makes inputs of the labels.
        config = getattr(getattr(forward, "__self__", None), "config", None)
        encodes = getattr(config, "is_encoder_decoder", None) is False
        self.unused = {"labels"} if encodes and hasattr(config, "id2label") else set()
        groups: dict[object, list[inspect.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.kind, []).append(parameter)
        named = groups.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
        positional = groups.get(inspect.Parameter.POSITIONAL_ONLY, []) + named
        keyword_only = groups.get(inspect.Parameter.KEYWORD_ONLY, [])
        self.any_positional = inspect.Parameter.VAR_POSITIONAL in groups
        self.any_keyword = inspect.Parameter.VAR_KEYWORD in groups
        self.positional = [p.name for p in positional]
        self.required = [p.name for p in positional if p.default is p.empty]
        self.required_by_name = [p.name for p in keyword_only if p.default is p.empty]
        self.accepted = [p.name for p in named + keyword_only]

    def bind(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The data of a batch as (args, kwargs, rest)."""
        if isinstance(data, Mapping):
            accepted = [key for key in self.accepted if key not in self.unused]
            kwargs = {key: value for key, value in data.items() if key in accepted or key not in TARGETS}
            required = self.required + self.required_by_name
            checks.check_keywords(list(kwargs), self.accepted, required, any_keyword=self.any_keyword)
            rest = {key: value for key, value in data.items() if key not in kwargs}
            return (), kwargs, rest or None
        items = tuple(data) if isinstance(data, tuple | list) else (data,)
        if len(items) > 1 and self._names_arguments(items[0]):
            _, kwargs, _ = self.bind(items[0])
            return (), kwargs, items[1] if len(items) == 2 else items[1:]
        every = self.any_positional and not self.positional
        r = len(items) if every else max(1, len(self.required))
        takes_one = bool(self.positional) or self.any_positional
        checks.check_positional(len(items), self.required, self.required_by_name, takes_one=takes_one)
        extra = items[r:]
        return items[:r], {}, extra[0] if len(extra) == 1 else extra or None

    def _names_arguments(self, item: Any) -> bool:
        """Whether the item is a dict of arguments of the forward, and not a dict that the forward takes whole."""
        if not isinstance(item, Mapping):
            return False
        return all(key in self.accepted for key in item) or (self.any_keyword and not self.required)

    def batch(self, data: Any, start: int) -> Batch:
        """The data of a batch as a Batch, its arrays wrapped as tensors and its first dimensions checked."""
        data = as_tensors(data)
        found = dict(leaves(data))
        checks.check_some_tensor(found)
        n = checks.check_lengths(found)
        args, kwargs, rest = self.bind(data)
        return Batch(args, kwargs, rest, start, n)


def as_tensors(value: Any, name: str = "the data") -> Any:
    """The value with numpy arrays wrapped as tensors, without copy or cast; refuses what has no batch."""
    if isinstance(value, np.ndarray):
        checks.check_array(value, name)
        value = value.copy() if any(stride < 0 for stride in value.strides) else value
        return torch.from_numpy(as_writable(value))
    if isinstance(value, Mapping):
        return {key: as_tensors(item, f"{key!r} of {name}") for key, item in value.items()}
    if is_strings(value):
        return list(value)
    if isinstance(value, list | tuple):
        return rebuild(value, [as_tensors(item, f"item {i} of {name}") for i, item in enumerate(value)])
    checks.check_leaf(value, name)
    return value


def as_writable(value: Any) -> Any:
    """The value with writable views in place of read-only arrays of numbers: torch warns of read-only arrays.

    linnet never writes into data. `warnings.catch_warnings` cannot hide the warning, since it changes the filters of
    all threads.

    >>> fixed = np.zeros(2)
    >>> fixed.flags.writeable = False
    >>> as_writable([fixed])[0].flags.writeable
    True
    """
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable or value.dtype.kind not in "biufc" else np.asarray(_WritableView(value))
    if not isinstance(value, Mapping | list | tuple):
        return value
    held = list(value.values() if isinstance(value, Mapping) else value)
    new = [as_writable(item) for item in held]
    if all(a is b for a, b in zip(held, new, strict=True)):
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, Mapping) else rebuild(value, new)


class _WritableView:
    """The memory of a read-only array, in the form that numpy takes from other libraries."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # holds the memory
        found = array.__array_interface__
        self.__array_interface__ = found | {"data": (found["data"][0], False)}
