"""Copies of a module that share its parameters: with a structure of its own, or with another forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

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
    return copy.deepcopy(model, {id(t): t for t in model.parameters()})


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
    other = copy.copy(model)
    other.forward = _NewForward(other, forward, vars(model).get("forward"))
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
