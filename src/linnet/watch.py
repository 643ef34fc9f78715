"""Watches over a forward pass: what the network must not do while linnet differentiates it.

A pass runs with other tensors in place of the selected parameters. Code that reaches a parameter past its attribute, by
a closure or a list, would lose its derivative. Code that writes into a parameter would change the user's network. A
gradient that depends on how often a token occurs in a batch is no derivative. Such passes are refused, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from linnet import _checks

READERS = frozenset(
    getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__")
)
"""Functions that hand out a tensor's values as something other than a tensor."""

EMBEDDINGS = (F.embedding, F.embedding_bag)
"""Functions whose arguments 3 and 5 are ``max_norm`` and ``scale_grad_by_freq``."""


class Calls:
    """Checks the calls of torch functions in a pass, one by one.

    Args:
        originals: Names of tensors that nothing may read, by their ``id``.
        storages: Names of the selected parameters, by the address of their memory.
        current: ``id`` of the tensors that stand for them in this pass.

    Attributes:
        draws: Whether a function was given a random generator of its own.
    """

    def __init__(self, originals: Mapping[int, str], storages: Mapping[int, str], current: frozenset[int]) -> None:
        self._originals, self._storages, self._current = originals, storages, current
        self.draws = False

    def before(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if a call must not be made."""
        self.draws = self.draws or kwargs.get("generator") is not None
        if func in EMBEDDINGS:
            if (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None:
                raise _checks.renormalizes("F.embedding")
            if args[5] if len(args) > 5 else kwargs.get("scale_grad_by_freq"):
                raise _checks.scaled_by_frequency()

    def after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Raise if a call read a parameter past its attribute; asking for a shape or a device is no reading."""
        for t in _tensors((*args, *kwargs.values())):
            name = self._name(t)
            if name is not None and (func in READERS or next(_tensors((result,)), None) is not None):
                raise _checks.original_is_read(name)

    def _name(self, t: Tensor) -> str | None:
        if id(t) in self._originals:
            return self._originals[id(t)]
        if t.requires_grad and t.is_leaf and id(t) not in self._current:  # a leaf of an earlier pass
            return self._storages.get(address(t))
        return None


@final
class Watch(TorchFunctionMode):
    """Checks a pass that is not recorded; see `Calls`."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.calls.after(func, args, kwargs, result)
        return result


@final
class Guard(TorchDispatchMode):
    """Refuses operations that would write into parameters, before they do.

    Args:
        storages: Names of the parameters, by the address of their memory.
    """

    def __init__(self, storages: Mapping[int, str]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place in _written(func):
            given = args[place] if isinstance(place, int) and place < len(args) else kwargs.get(place)
            for t in _tensors((given,)):
                if (name := self._storages.get(address(t))) is not None:
                    raise _checks.parameter_is_written(name)
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[int | str, ...]:
    """Places and names of the arguments that an operation writes into."""
    found: list[int | str] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [argument.name] if argument.kwarg_only else [i, argument.name]
    return tuple(found)


def address(t: Tensor) -> int:
    """Where a tensor's memory begins; -1 for a tensor without memory of its own."""
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
