"""Watches over a forward pass: what the network must not do while linnet differentiates it.

A pass runs with other tensors in place of the selected parameters. Code that reaches a parameter past its attribute, by
a closure or a list, would lose its derivative. Code that writes into a parameter would change the user's network. A
gradient that depends on how often a token occurs in a batch is no derivative. Such passes are refused, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.network import checks

READERS = frozenset(
    getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__")
)
"""Functions that hand out a tensor's values as something other than a tensor."""

WRITERS = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow"))})
"""Names of functions that write into their first argument, besides those that end in an underscore."""

DIGITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Binary digits after the first one."""

EMBEDDINGS = (F.embedding, F.embedding_bag)
"""Functions whose arguments 3 and 5 are ``max_norm`` and ``scale_grad_by_freq``."""


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Of two floating dtypes the one with fewer digits."""
    return min(a, b, key=DIGITS.__getitem__)


class CallGuard:
    """Checks the calls of torch functions in a pass, one by one.

    Args:
        originals: Names of tensors that nothing may read, by their ``id``.
        selected: Names of the selected parameters, by the address of their memory.
        storages: Names of all parameters, likewise.
        current: ``id`` of the tensors that stand for the selected parameters in this pass.

    Attributes:
        draws: Whether a function was given a random generator of its own.
        coarsest: The floating dtype with the fewest digits among the results.
        coarsest_gradient: The same among the results that depend on a selected parameter.
    """

    def __init__(
        self,
        originals: Mapping[int, str],
        selected: Mapping[int, str],
        storages: Mapping[int, str],
        current: frozenset[int],
    ) -> None:
        self._originals, self._selected, self._storages, self._current = originals, selected, storages, current
        self.draws = False
        self.coarsest = self.coarsest_gradient = torch.float64

    def before(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if a call must not be made."""
        self.draws = self.draws or kwargs.get("generator") is not None
        if writes(func):
            for t in _tensors((*args[:1], kwargs.get("out"))):
                if (name := self._storages.get(address(t))) is not None:
                    raise checks.parameter_is_written(name)
        if func in EMBEDDINGS:
            if (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None:
                raise checks.renormalizes("F.embedding")
            if args[5] if len(args) > 5 else kwargs.get("scale_grad_by_freq"):
                raise checks.scaled_by_frequency()

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Raise if a call read a parameter past its attribute; asking for a shape or a device is no reading."""
        if isinstance(result, Tensor):
            dtype = result.dtype
            if dtype is not self.coarsest_gradient and dtype in DIGITS:
                self.coarsest = coarser(dtype, self.coarsest)
                if result.requires_grad:
                    self.coarsest_gradient = coarser(dtype, self.coarsest_gradient)
        elif func not in READERS and next(_tensors((result,)), None) is None:
            return
        for t in _tensors((*args, *kwargs.values())):
            if (name := self._name(t)) is not None:
                raise checks.original_is_read(name)

    def _name(self, t: Tensor) -> str | None:
        if id(t) in self._originals:
            return self._originals[id(t)]
        if t.requires_grad and t.is_leaf and id(t) not in self._current:  # a leaf of an earlier pass
            return self._selected.get(address(t))
        return None


@lru_cache(maxsize=4096)
def writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument or into ``out``."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in WRITERS or func == Tensor.data.__set__  # type: ignore[attr-defined]


def address(t: Tensor) -> int:
    """The address of a tensor's memory; -1 for a tensor without memory of its own."""
    try:
        return t.untyped_storage().data_ptr() or -1
    except (RuntimeError, NotImplementedError):
        return -1


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among arguments, and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (t for t in value if isinstance(t, Tensor))
