"""What a network calls in one forward pass: its modules, in order, and the functions outside of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from linnet._common import arithmetic, network_settings
from linnet.data import Batch
from linnet.network.copies import copy_sharing_parameters
from linnet.network.sharded import check_whole

RETURNED = "the output of the network"
"""Name of the last step, which takes what the network returns."""


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        name: Name of the module.
        module: The module. It belongs to the copy that was run.
        start: When the call began. Time counts the beginnings and the ends of all calls.
        args: Arguments of the call, by position and then by keyword.
        stop: When the call ended.
        output: What the module returned.
    """

    name: str
    module: nn.Module
    start: int
    args: tuple[Any, ...]
    stop: int = -1
    output: Any = None


@dataclass(frozen=True)
class Step:
    """A call of a module that counts as one step, or of a function outside such modules. Tensors have numbers.

    Attributes:
        name: Name of the module or of the function.
        is_module: Whether the step is a call of a module.
        inputs: Numbers of the tensors that go in.
        output: Number of the first tensor that comes out; -1 where none does.
    """

    name: str
    is_module: bool
    inputs: tuple[int, ...]
    output: int


@dataclass
class Trace:
    """One forward pass.

    Attributes:
        calls: Calls of modules, in the order in which they began.
        output: What the network returned.
        steps: Steps in the order in which they ended; empty where no modules count as one step.
        parameters_read: Names of the parameters that the steps outside of modules read.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    output: Any = None
    steps: list[Step] = field(default_factory=list)
    parameters_read: set[str] = field(default_factory=set)

    def calls_of(self, name: str) -> list[ModuleCall]:
        """The calls of a module."""
        return [call for call in self.calls if call.name == name]

    def steps_of(self, name: str) -> list[Step]:
        """The steps that are calls of a module."""
        return [step for step in self.steps if step.is_module and step.name == name]

    def source(self, tensor: int) -> Step | None:
        """The step that a tensor comes out of; None for inputs of the network."""
        return next((step for step in self.steps if step.output == tensor), None)

    def users(self, tensor: int) -> list[Step]:
        """The steps that a tensor goes into."""
        return [step for step in self.steps if tensor in step.inputs]


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, whole: tuple[type[nn.Module], ...] = ()
) -> Trace:
    """Run a copy of a network in eval mode, without gradients, and note what it calls.

    Args:
        model: The network.
        args: Positional arguments of the network.
        kwargs: Keyword arguments of the network.
        whole: Types of the modules that count as one step; without them no steps are noted.

    Example:
        >>> found = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), (torch.zeros(1, 2),), {}, whole=(nn.Linear,))
        >>> [call.name for call in found.calls], tuple(found.output.shape), [step.name for step in found.steps]
        (['', '0', '1'], (1, 3), ['0', 'tanh', 'the output of the network'])
    """
    check_whole(model, "A trace of the calls of the network (top=, block_names, attach_head)")
    copied = copy_sharing_parameters(model).eval()
    tracer = _Tracer(copied, whole)
    device = next(model.parameters(), torch.zeros(())).device
    # The network's context turns off torch's fast path of attention, which calls no modules.
    with (
        torch.no_grad(),
        arithmetic("highest", device),
        network_settings(copied, "highest", device),
        tracer if whole else nullcontext(),
    ):
        output = copied(*args, **kwargs)
    return tracer.finish(output)


class _Tracer(TorchFunctionMode):
    """Notes calls of modules by hooks. As a function mode it also notes the functions outside the whole modules.

    Args:
        model: The network that will run; it gets the hooks.
        whole: See `trace`.
    """

    def __init__(self, model: nn.Module, whole: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.trace, self.whole = Trace(), whole
        self.parameters = {id(t): name for name, t in model.named_parameters()}
        self.time = 0
        self.running: list[ModuleCall] = []
        self.inside: list[tuple[int, ...]] = []  # inputs of the whole modules that are running
        self.numbers: dict[int, int] = {}
        self.held: list[Tensor] = []  # a freed tensor's id would be given to another
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)  # also where a module within ends the pass

    def finish(self, output: Any) -> Trace:
        """The trace of a pass that has returned."""
        self.trace.output = output
        if self.whole:
            self.trace.steps.append(Step(RETURNED, False, self._numbered(output), -1))
        return self.trace

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(ModuleCall(name, module, self.time, (*args, *kwargs.values())))
        self.trace.calls.append(self.running[-1])
        self.time += 1
        if isinstance(module, self.whole):
            self.inside.append(self._numbered((args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self.running.pop()
        call.stop, call.output = self.time, output
        self.time += 1
        if isinstance(module, self.whole):
            self._note(call.name, True, self.inside.pop(), output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        inputs = () if self.inside else self._numbered(given)
        output = func(*args, **(kwargs or {}))
        if not self.inside and next(find_tensors(output), None) is not None:
            read = (self.parameters.get(id(t)) for t in find_tensors(given))
            self.trace.parameters_read.update(name for name in read if name is not None)
            self._note(getattr(func, "__name__", str(func)), False, inputs, output)
        return output

    def _note(self, name: str, is_module: bool, inputs: tuple[int, ...], output: Any) -> None:
        if not self.inside:
            numbers = self._numbered(output, new=True)  # a tensor that was changed in place gets a new number
            self.trace.steps.append(Step(name, is_module, inputs, numbers[0] if numbers else -1))

    def _numbered(self, values: Any, *, new: bool = False) -> tuple[int, ...]:
        """The numbers of tensors; tensors that have none yet, or all of them, get new ones."""
        found = list(find_tensors(values))
        for t in found:
            if new or id(t) not in self.numbers:
                self.numbers[id(t)] = len(self.held)
                self.held.append(t)
        return tuple(self.numbers[id(t)] for t in found)


def find_tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested values, also in model outputs."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type) and not callable(leaf):
            yield from (item for item in vars(leaf).values() if isinstance(item, Tensor))


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as the arguments of a call: a tensor, a tuple, a dict of keywords, or a `Batch`.

    Example:
        >>> as_arguments({"x": 1}), as_arguments((2, 3))
        (((), {'x': 1}), ((2, 3), {}))
    """
    if isinstance(example, Batch):
        return example.args, example.kwargs
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
