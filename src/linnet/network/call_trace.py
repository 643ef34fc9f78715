"""Which modules a network calls, in which order and with what: one forward pass on a copy of its structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linnet._common.torch_settings import arithmetic, network
from linnet.data.batch import Batch
from linnet.network.copies import copy_sharing_parameters


@dataclass
class Call:
    """One call of a module.

    Attributes:
        name: Of the module.
        module: The module, of the copy that was run.
        start: When it began, counted over the beginnings and ends of all calls.
        args: What it was given, by position and then by keyword.
        stop: When it ended.
        out: What it returned.
    """

    name: str
    module: nn.Module
    start: int
    args: tuple[Any, ...]
    stop: int = -1
    out: Any = None


@dataclass
class Trace:
    """The calls of one forward pass, in the order in which they began, and what the network returned."""

    calls: list[Call] = field(default_factory=list)
    out: Any = None

    def of(self, name: str) -> list[Call]:
        """The calls of a module."""
        return [call for call in self.calls if call.name == name]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Run a network in eval mode, without gradients, and note every call of a module; the network is untouched.

    Args:
        model: The network.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Example:
        >>> found = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), (torch.zeros(1, 2),), {})
        >>> [call.name for call in found.calls], tuple(found.out.shape)
        (['', '0', '1'], (1, 3))
    """
    found, time = Trace(), 0
    shadow = copy_sharing_parameters(model).eval()
    names = {module: name for name, module in shadow.named_modules()}
    running: list[Call] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal time
        call = Call(names[module], module, time, (*args, *kwargs.values()))
        time += 1
        found.calls.append(call)
        running.append(call)

    def leave(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        nonlocal time
        call = running.pop()
        call.stop, call.out = time, out
        time += 1

    for module in names:
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)  # also where a module within ends the pass
    first = next(model.parameters(), torch.zeros(()))
    # The network's context turns off torch's fast path of attention, which calls no modules.
    with torch.no_grad(), arithmetic("highest", first.device), network(shadow, "highest", first.device):
        found.out = shadow(*args, **kwargs)
    return found


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as the arguments of a call: a tensor, a tuple, a dict of keywords, or a `Batch`.

    Example:
        >>> arguments({"x": 1}), arguments((2, 3))
        (((), {'x': 1}), ((2, 3), {}))
    """
    if isinstance(example, Batch):
        return example.args, example.kwargs
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
