"""Recording, during one forward pass, every call of a torch function that uses a selected parameter.

The calls are seen through a torch function mode, so no hook is ever put on a module, and interrupting a pass
leaves nothing behind. The gradient of a call's output is taken at its gradient edge, which stays the layer's own
output even if later code overwrites it in place; an input that is overwritten later is noticed by its version
counter, and the pass is made again with that input copied.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from linnet.jacobian.layers.rule import LayerCall, Rule, Slot, arrange

if TYPE_CHECKING:
    from linnet.jacobian.blocks.base import ColumnBlock
    from linnet.network import CallGuard, Layout


HALF = (torch.bfloat16, torch.float16)
"""Dtypes that are too short for sums over examples, and for products with columns."""


@dataclass(frozen=True)
class Changes:
    """What is done to calls, by their numbers, so that their gradients can be had; the output stays the same.

    Attributes:
        inputs: The input is copied, because it is overwritten later.
        outputs: The output is copied, because it is a view that is overwritten later.
        spread: The output is repeated for every example, because all examples share the call (position embeddings).
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()


NO_CHANGES = Changes()


@dataclass(frozen=True)
class RecordedCall:
    """One call that uses selected parameters.

    Attributes:
        rule: What the layer knows.
        call: Its input and settings.
        slots: Role to the place of the parameter.
        edge: Where the gradient of its output is taken.
        number: Its place among the calls.
        source: Nothing before it in the network depends on a selected parameter.
    """

    rule: Rule
    call: LayerCall
    slots: dict[str, Slot]
    edge: GradientEdge
    number: int
    source: bool = False

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must not change from batch to batch."""
        return (self.rule.name, *((role, slot) for role, slot in self.slots.items()))


@dataclass(frozen=True)
class ServedCall:
    """A use that its rule serves: where its examples lie, and for which parameters."""

    layout: str
    slots: dict[str, Slot]


class Recorder(TorchFunctionMode):
    """Records the uses of parameters while it is active.

    Args:
        leaves: The selected parameters, as the leaves that this forward pass uses.
        layout: Their places in the flat vector.
        rules: Torch function to the rule that reads its calls.
        n: Examples.
        changes: What is done to the calls.
        calls: Checks every call (see `linnet.network.parameter_guard`); None for no checks.

    Attributes:
        uses: The calls, in order.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        layout: Layout,
        rules: Mapping[Callable[..., Any], Rule],
        *,
        n: int,
        changes: Changes,
        calls: CallGuard | None,
    ) -> None:
        super().__init__()
        self.uses: list[RecordedCall] = []
        self._calls = calls
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._layout, self._rules = layout, rules
        self._n, self._changes = n, changes
        self._versions: list[tuple[Tensor | None, int, Tensor | None, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _open_attention(*args, **kwargs)
        if self._calls is not None:
            self._calls.before(func, args, kwargs)
        rule = self._rules.get(func)
        call = None if rule is None else rule.read(args, kwargs, self._known)
        slots = {} if call is None else self._slots(call)
        if rule is None or call is None or not slots:
            result = func(*args, **kwargs)
            if self._calls is not None:
                self._calls.after(func, args, kwargs, result)
            return result
        number, x, changes = len(self.uses), call.x, self._changes
        if x is not None and number in changes.inputs:
            copied = x.clone()
            args = tuple(copied if a is x else a for a in args)
            kwargs = {key: copied if a is x else a for key, a in kwargs.items()}
            x = copied
        given = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        source = not any(a.requires_grad and not self._known(a) for a in given)
        y = func(*args, **kwargs)
        if self._calls is not None:
            self._calls.after(func, args, kwargs, y)
        if number in changes.outputs:
            y = y.clone()
        if number in changes.spread:
            x, y = (None if t is None else _spread(t, self._n) for t in (x, y))
        if y.requires_grad:
            x = None if x is None else x.detach()
            self.uses.append(
                RecordedCall(rule, LayerCall(x, {}, call.conf), slots, get_gradient_edge(y), number, source)
            )
            # The output matters only if it is a view: an in-place change then replaces its gradient edge.
            view = y if y._is_view() and y._base is not None and not y._base.is_leaf else None
            self._versions.append((x, -1 if x is None else x._version, view, y._version))
        return y

    def overwritten(self) -> Changes:
        """The changes, and copies of what was overwritten in place after its call."""
        inputs = {i for i, (x, v, _, _) in enumerate(self._versions) if x is not None and x._version != v}
        outputs = {i for i, (_, _, y, v) in enumerate(self._versions) if y is not None and y._version != v}
        old = self._changes
        return Changes(old.inputs | inputs, old.outputs | outputs, old.spread)

    def _known(self, t: Any) -> bool:
        return isinstance(t, Tensor) and id(_base(t)) in self._names

    def _slots(self, call: LayerCall) -> dict[str, Slot]:
        found = {role: self._slot(t) for role, t in call.params.items()}
        return {role: slot for role, slot in found.items() if slot is not None}

    def _slot(self, t: Tensor) -> Slot | None:
        """The place of a tensor that is a parameter or a contiguous, perhaps transposed, view of one."""
        base = _base(t)
        name = self._names.get(id(base))
        if name is None:
            return None
        origin = self._layout.offsets[name]
        if t is base:
            return Slot(name, (origin, origin + t.numel()), tuple(t.shape), origin)
        if not base.is_contiguous():
            return None
        start = origin + int(t.storage_offset() - base.storage_offset())
        where, shape = (start, start + t.numel()), tuple(t.shape)
        if t.is_contiguous():
            return Slot(name, where, shape, origin)
        return Slot(name, where, shape, origin, swapped=True) if t.ndim == 2 and t.T.is_contiguous() else None


def _spread(t: Tensor, n: int) -> Tensor:
    """A tensor that all examples share, repeated for each: along its first axis of one, or a new one."""
    shared = t if t.shape[:1] == (1,) else t[None]
    return shared.expand(n, *shared.shape[1:])


def _base(t: Tensor) -> Tensor:
    base = t._base if t._is_view() else None
    return t if base is None else base


def _opened(function: types.FunctionType) -> Callable[..., Any]:
    """The function without its own hand-over to function modes, so that the calls inside it are seen."""
    own = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_open_attention = _opened(F.multi_head_attention_forward)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recording:
    """A forward pass with all its uses of parameters.

    Attributes:
        out: The output (n, c), with its graph.
        leaves: The parameters as the leaves of that graph.
        uses: The calls that use them, in order.
        changes: What was done to them.
        draws: Whether the pass used a random generator of its own.
        coarsest: The floating dtype with the fewest digits in the pass.
        coarsest_gradient: The same among what depends on a selected parameter.
    """

    out: Tensor
    leaves: dict[str, Tensor]
    uses: list[RecordedCall]
    changes: Changes
    draws: bool = False
    coarsest: torch.dtype = torch.float64
    coarsest_gradient: torch.dtype = torch.float64

    @property
    def signature(self) -> tuple[Any, ...]:
        """What decides which rules serve: the calls and their parameters, not the shapes of the data."""
        return tuple(use.signature for use in self.uses)


def record(
    forward: Callable[[dict[str, Tensor]], Tensor],
    theta: Mapping[str, Tensor],
    layout: Layout,
    rules: Mapping[Callable[..., Any], Rule],
    *,
    n: int,
    changes: Changes = NO_CHANGES,
    calls: Callable[[frozenset[int]], CallGuard] | None = None,
) -> Recording:
    """A forward pass at theta.

    Args:
        forward: Named parameters to the output (n, c).
        theta: The selected parameters.
        layout: Their places in the flat vector.
        rules: Torch function to the rule that reads its calls.
        n: Examples.
        changes: What earlier passes have found necessary.
        calls: Gives what checks the calls, from the ``id`` of the leaves (see `linnet.network.parameter_guard`); None
            for no checks.
    """
    for _ in range(4):
        leaves: dict[str, Tensor] = {name: nn.Parameter(t.detach()) for name, t in theta.items()}
        current = frozenset(map(id, leaves.values()))
        watch = None if calls is None else calls(current)
        recorder = Recorder(leaves, layout, rules, n=n, changes=changes, calls=watch)
        with torch.enable_grad(), recorder:
            out = forward(leaves)
        needed = recorder.overwritten()
        if needed == changes:
            seen = () if watch is None else (watch.draws, watch.coarsest, watch.coarsest_gradient)
            return Recording(out, leaves, recorder.uses, changes, *seen)
        changes = needed
    raise RuntimeError(
        "The model overwrites the inputs of its layers in place, differently at each call. "
        "Replace in-place operations (x += y, relu_) by their ordinary forms."
    )


# Blocks of recorded calls.


def build_blocks(use: RecordedCall, kept: ServedCall, g: Tensor, *, n: int, dtype: torch.dtype) -> list[ColumnBlock]:
    """Columns of the Jacobian from one use.

    Args:
        use: The call.
        kept: Its layout and parameters.
        g: Gradients of its output, (c, *output shape).
        n: Examples.
        dtype: Dtype of the columns.
    """
    x = use.call.x
    half = use.rule.takes_half and x is not None and x.dtype == g.dtype in HALF
    if not (half and dtype == torch.float32):
        g = g.to(dtype)
        x = x.to(dtype) if x is not None and x.is_floating_point() else x
    if x is not None and x.is_floating_point():
        x = use.rule.prepare(use.call, x)
    x = None if x is None else arrange(x, kept.layout, n)
    g = arrange(g.movedim(0, -1), kept.layout, n).movedim(-1, 1)
    return use.rule.make_blocks(use.call, x, g, kept.slots, kept.layout)


def gradients(out: Tensor, uses: Sequence[RecordedCall], seeds: Tensor, *, batched: bool) -> list[Tensor | None]:
    """Gradients of ``sum(seeds[s] * out)`` at the output of each use, stacked over s; None where there is none.

    Args:
        out: (n, c) with its graph.
        uses: The calls.
        seeds: (s, n, c).
        batched: Take all s in one batched backward pass.
    """
    if not uses or not out.requires_grad:
        return [None] * len(uses)
    edges = [use.edge for use in uses]
    if batched and len(seeds) > 1:
        return list(torch.autograd.grad(out, edges, seeds, True, is_grads_batched=True, allow_unused=True))
    found = [torch.autograd.grad(out, edges, seed, True, allow_unused=True) for seed in seeds]
    stacked: list[Tensor | None] = []
    for grads in zip(*found, strict=True):
        some = next((g for g in grads if g is not None), None)
        if some is None:
            stacked.append(None)
        elif len(grads) == 1:
            stacked.append(some[None])
        else:
            stacked.append(torch.stack([torch.zeros_like(some) if g is None else g for g in grads]))
    return stacked


def streamed(
    out: Tensor,
    uses: list[RecordedCall | None],
    take: Callable[[int, RecordedCall, Tensor], None],
    *,
    seed: Tensor | None = None,
    keep: bool = False,
) -> bool:
    """One backward pass of the summed output that hands over each gradient when it is known, and keeps none.

    The graph is freed on the way, and so is each use; a chunk then needs about the memory of a training step.

    Args:
        out: (n, c) with its graph.
        uses: The calls; emptied.
        take: Called with the number of a use in the list, the use, and the gradient (1, *output shape) at its output.
        seed: (n, c), weights of the sum; None for ones.
        keep: Whether the graph stays for another pass.

    Returns:
        Whether every use was reached; if not, the results must be made anew without streaming.
    """
    reached = 0

    def hand_over(i: int, g: Tensor | None) -> None:
        nonlocal reached
        use = uses[i]
        if g is not None and use is not None:
            uses[i] = None
            reached += 1
            with torch.no_grad():
                take(i, use, g[None])

    def hook(i: int, number: int) -> Callable[[tuple[Tensor, ...]], None]:
        return lambda grads: hand_over(i, grads[number])

    # The pass ends at the sources, whose own gradients are its result; on the way to them lie all other uses.
    sources = [(i, use.edge) for i, use in enumerate(uses) if use is not None and use.source]
    handles = [
        use.edge.node.register_prehook(hook(i, use.edge.output_nr))
        for i, use in enumerate(uses)
        if use is not None and not use.source
    ]
    try:
        if sources:
            seed = torch.ones_like(out) if seed is None else seed
            found = torch.autograd.grad(out, [edge for _, edge in sources], seed, keep, allow_unused=True)
            for (i, _), g in zip(sources, found, strict=True):
                hand_over(i, g)
    finally:
        for handle in handles:
            handle.remove()
    return reached == len(uses)
