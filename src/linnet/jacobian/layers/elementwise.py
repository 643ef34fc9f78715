"""Rules of parameters that are added, multiplied or repeated entry by entry."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock
from linnet.jacobian.layers.rule import (
    Args,
    Known,
    Kwargs,
    LayerCall,
    Rule,
    Slots,
)


class Elementwise(Rule):
    """A parameter that is broadcast against the data: its gradient is summed over the broadcast axes."""

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        slot = slots["weight"]
        example = 1 if layout == "second" else 0
        # g is (n, c, r, *rest); the parameter's axes, padded on the left, lose the example axis.
        shape = (1,) * (g.ndim - 2 - len(slot.shape)) + slot.shape
        if slot.swapped or len(shape) != g.ndim - 2 or shape[example] != 1:
            return []
        rest = shape[:example] + shape[example + 1 :]
        if any(a not in (1, b) for a, b in zip(rest, g.shape[3:], strict=True)):
            return []
        h = self.gradient(call, x, g).sum(2)  # (n, c, *rest)
        axes = [i + 2 for i, size in enumerate(rest) if size == 1 and h.shape[i + 2] != 1]
        h = h.sum(axes, keepdim=True) if axes else h
        return [DenseBlock([slot.range], [h.flatten(2) if h.ndim > 2 else h[..., None]])]

    def gradient(self, call: LayerCall, x: Tensor | None, g: Tensor) -> Tensor:
        return g


def _pair(args: Args, kwargs: Kwargs, known: Known) -> tuple[Any, Any] | None:
    """The data and the parameter of a two-sided operation, on whichever sides they are."""
    if len(args) != 2 or kwargs or known(args[0]) == known(args[1]):
        return None
    return (args[1], args[0]) if known(args[0]) else (args[0], args[1])


@final
class Add(Elementwise):
    """``x + b`` and ``b + x``: position embeddings, shifts."""

    functions = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        pair = _pair(args, kwargs, known)
        return None if pair is None else LayerCall(None, {"weight": pair[1]})


@final
class Mul(Elementwise):
    """``x * s`` and ``s * x``: layer scale, hand-written norms."""

    functions = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        pair = _pair(args, kwargs, known)
        return LayerCall(pair[0], {"weight": pair[1]}) if pair and isinstance(pair[0], Tensor) else None

    def gradient(self, call: LayerCall, x: Tensor | None, g: Tensor) -> Tensor:
        assert x is not None
        return g * x[:, None]


@final
class Expand(Elementwise):
    """``token.expand(n, -1, -1)``: class tokens."""

    functions = (torch.Tensor.expand, torch.Tensor.expand_as)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        return LayerCall(None, {"weight": args[0]})
