"""Copies of a module that share its parameters: with a structure of its own, or with another forward.

A copy is a plain module: what torch.distributed has put on a sharded module (hooks, states, classes of its own) stays
with the module.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from linnet.network.sharded import GIVEN, weights_in_parts

Forward = Callable[..., Any]
"""A forward for `with_forward`: it takes the module, then the arguments of the call."""


def copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """A deep copy of a module that holds the parameters of the module itself. Buffers are copied.

    Hooks and modules can be put into the copy, and its mode can change; the module does not notice.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        >>> other = copy_sharing_parameters(model)
        >>> other[0] is model[0], other[0].weight is model[0].weight
        (False, True)
    """
    return copy_structure(model, {id(t): t for t in model.parameters()})


def copy_structure(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a module without what torch.distributed has put on it.

    Args:
        model: The module.
        memo: What the copy holds in the place of tensors, by their ``id``, as for `copy.deepcopy`. Sharded buffers are
            shared.
    """
    memo = {id(t): t for t in weights_in_parts(model).values()} | memo
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    shells: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        for key, held in vars(module).items():
            if type(held) in (dict, OrderedDict) and not held:
                memo[id(held)] = type(held)()  # most of what a module holds; copy.deepcopy takes its time for each
            elif key in HOOKS and any(map(_is_foreign, held.values())):
                memo[id(held)] = type(held)()
                hooks.append((held, memo[id(held)]))
            elif key.startswith(STATE):
                memo[id(held)] = {}
            elif key == GIVEN:
                memo[id(held)] = ""  # the copy has no other module to look after
        own = plain_class(module)
        if own is not type(module):
            memo[id(module)] = object.__new__(own)
            shells.append((module, memo[id(module)]))
    for held, kept in hooks:
        kept.update((key, copy.deepcopy(hook, memo)) for key, hook in held.items() if not _is_foreign(hook))
    for module, shell in shells:
        shell.__setstate__(copy.deepcopy(vars(module), memo))
    return copy.deepcopy(model, memo)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = "__composable_api_"
"""How the attributes begin in which torch.distributed keeps what it knows about a module."""


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `fully_shard` gave it another one.

    >>> plain_class(nn.Linear(1, 1)).__name__
    'Linear'
    """
    found, kind = sys.modules.get("torch.distributed.fsdp"), type(module)
    if found is None or not isinstance(module, found.FSDPModule):
        return kind
    return next(base for base in kind.__mro__[1:] if not issubclass(base, found.FSDPModule))


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether `parallelize_module` has put hooks on a module, or on one inside it."""
    held = (getattr(module, key) for module in model.modules() for key in HOOKS)
    return any(_is_foreign(hook, "torch.distributed.tensor.") for hooks in held for hook in hooks.values())


def _is_foreign(hook: Any, home: str = "torch.distributed.") -> bool:
    """Whether torch.distributed has registered a hook."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(home)


def with_forward(model: nn.Module, forward: Forward) -> nn.Module:
    """The same module with another forward. Parameters keep their names, and the given module keeps its forward.

    Inside the new forward, a call of the module is a call of its own forward.

    Args:
        model: The module.
        forward: The new forward, ``forward(module, *args, **kwargs)``.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 3)
        >>> other = with_forward(model, lambda module, x: module(x).sum(1))
        >>> other(torch.ones(5, 2)).shape, model(torch.ones(5, 2)).shape
        (torch.Size([5]), torch.Size([5, 3]))
    """
    other = _copy_shallow(model)
    other.forward = _NewForward(other, forward, vars(model).get("forward"))
    return other


def _copy_shallow(model: nn.Module) -> nn.Module:
    """A module that holds what another module holds."""
    own = plain_class(model)
    if own is type(model):
        return copy.copy(model)
    other = object.__new__(own)
    other.__setstate__({**vars(model), GIVEN: model})
    return other


class _NewForward:
    """A forward that a module has instead of its own. It stands aside while it runs.

    Args:
        module: The module.
        forward: See `with_forward`.
        own: A forward that the module had as an attribute; None for the forward of its class.
    """

    def __init__(self, module: nn.Module, forward: Forward, own: Callable[..., Any] | None) -> None:
        self.module, self.forward, self.own = module, forward, own
        self.__signature__ = inspect.signature(partial(forward, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = vars(self.module)
        mine = held.pop("forward")
        if self.own is not None:
            held["forward"] = self.own
        try:
            return self.forward(self.module, *args, **kwargs)
        finally:
            held["forward"] = mine

    def __deepcopy__(self, memo: dict[int, Any]) -> _NewForward:
        # The user's function stays the same; the module and its own forward are those of the copy.
        return _NewForward(copy.deepcopy(self.module, memo), self.forward, copy.deepcopy(self.own, memo))
