"""Who uses what in a forward pass: every result, and the modules and functions that it goes into.

Two ways to the same list: `torch.fx`, which needs no input, and a run on an example, which sees any code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from linnet._common.torch_settings import network

METADATA = frozenset({"shape", "dtype", "device", "ndim", "layout", "size", "dim", "numel"})
"""What code asks a tensor without using its values."""


@dataclass(frozen=True)
class Use:
    """One step of a forward pass.

    Attributes:
        what: The module's name, or the function's for a step outside the modules that count.
        module: Whether it is a module.
        inputs: Numbers of the results that go in.
        output: Number of the result, -1 where there is none.
    """

    what: str
    module: bool
    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Uses:
    """The steps of a forward pass in order.

    Attributes:
        steps: The steps; what the network returns goes into one called "the output of the network".
        read: Names of the parameters that are read other than by calling their module.
    """

    steps: list[Use]
    read: frozenset[str]

    def calls(self, name: str) -> list[Use]:
        """The calls of a module."""
        return [step for step in self.steps if step.module and step.what == name]

    def source(self, result: int) -> Use | None:
        """The step that made a result; None for inputs of the network."""
        return next((step for step in self.steps if step.output == result), None)

    def users(self, result: int) -> list[Use]:
        """The steps that a result goes into."""
        return [step for step in self.steps if result in step.inputs]


RETURNED = "the output of the network"


def by_graph(model: nn.Module, whole: tuple[type[nn.Module], ...]) -> Uses:
    """The uses in eval mode by `torch.fx`, without running the network.

    Args:
        model: The network.
        whole: Types of the modules that count as one step.

    Raises:
        Exception: Whatever torch.fx meets in code that it cannot read.
    """

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, whole) or super().is_leaf_module(m, module_qualified_name)

    model = copy.deepcopy(model, {id(t): t for t in model.parameters()}).eval()
    graph = Tracer().trace(model)
    number = {node: i for i, node in enumerate(graph.nodes)}
    steps = []
    for node in graph.nodes:
        inputs = tuple(number[n] for n in node.all_input_nodes)
        if node.op == "call_module":
            steps.append(Use(_first_name(model, str(node.target)), True, inputs, number[node]))
        elif node.op == "output":
            steps.append(Use(RETURNED, False, inputs, -1))
        elif node.op in ("call_function", "call_method") and not _asks(node):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            steps.append(Use(str(name), False, inputs, number[node]))
    return Uses(steps, frozenset(str(node.target) for node in graph.nodes if node.op == "get_attr"))


def _asks(node: fx.Node) -> bool:
    """Whether a step only asks for the shape or the like."""
    return node.target in METADATA or (node.target is getattr and node.args[1] in METADATA)


def _first_name(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name)
    return next(first for first, other in model.named_modules() if other is module)


def by_example(
    model: nn.Module, whole: tuple[type[nn.Module], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Uses:
    """The uses in a run of the network on an example, in eval mode; the network is untouched."""
    shadow = copy.deepcopy(model, {id(t): t for t in model.parameters()}).eval()
    watch = _Watch({id(t): name for name, t in shadow.named_parameters()})
    for name, module in shadow.named_modules():
        if isinstance(module, whole):
            module.register_forward_pre_hook(watch.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(watch.leave(name), always_call=True)
    device = next(model.parameters(), torch.zeros(())).device
    with torch.no_grad(), network(shadow, "highest", device), watch:
        out = shadow(*args, **kwargs)
    watch.add(RETURNED, False, watch.numbers(out), -1)
    return Uses(watch.steps, frozenset(watch.read))


class _Watch(TorchFunctionMode):
    """Numbers the tensors of a run and lists what they go into; inside a module that counts it looks away."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self.parameters = parameters
        self.steps: list[Use] = []
        self.read: set[str] = set()
        self.known: dict[int, int] = {}
        self.kept: list[Tensor] = []  # a freed tensor's id would be given to another
        self.inside: list[tuple[int, ...]] = []

    def number(self, t: Tensor, *, new: bool = False) -> int:
        if new or id(t) not in self.known:
            self.known[id(t)] = len(self.kept)
            self.kept.append(t)
        return self.known[id(t)]

    def numbers(self, values: Any) -> tuple[int, ...]:
        return tuple(self.number(t) for t in tensors(values))

    def add(self, what: str, module: bool, inputs: tuple[int, ...], output: int) -> None:
        self.steps.append(Use(what, module, inputs, output))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside.append(self.numbers((args, kwargs)))

    def leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, out: Any) -> None:
            inputs = self.inside.pop()
            if not self.inside:
                self.add(name, True, inputs, self._result(out))

        return note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = () if self.inside else self.numbers((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if not self.inside and next(tensors(out), None) is not None:
            self.read.update(self.parameters[id(t)] for t in tensors((args, kwargs or {})) if id(t) in self.parameters)
            self.add(getattr(func, "__name__", str(func)), False, inputs, self._result(out))
        return out

    def _result(self, out: Any) -> int:
        """The number of a result; one that changed in place is a new one."""
        found = [self.number(t, new=True) for t in tensors(out)]
        return found[0] if found else -1


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested values, also in model outputs."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type) and not callable(leaf):
            yield from (item for item in vars(leaf).values() if isinstance(item, Tensor))
