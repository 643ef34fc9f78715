"""Rules of linear layers: ``F.linear``, products of matrices, ``torch.addmm``."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.layers.rule import (
    Args,
    Known,
    Kwargs,
    LayerCall,
    Rule,
    Slots,
    named,
    range_of,
    tensors_of,
)


def _outer(x: Tensor, g: Tensor, slots: Slots, *, input_first: bool) -> list[ColumnBlock]:
    """The block of y = x W: x (n, r, ..., dx), g (n, c, r, ..., dg); ``input_first`` if W is (dx, dg)."""
    x = x.reshape(x.shape[0], 1, -1, x.shape[-1])
    g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
    swapped = input_first != ("weight" in slots and slots["weight"].swapped)
    return [OuterProductBlock(x, g, weight=range_of(slots, "weight"), bias=range_of(slots, "bias"), swapped=swapped)]


@final
class Linear(Rule):
    """``F.linear(x, W, b)``."""

    functions = (F.linear,)
    takes_half = True

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        a = named(("input", "weight", "bias"), args, kwargs)
        if a["weight"].ndim != 2:
            return None
        return LayerCall(a["input"], tensors_of(weight=a["weight"], bias=a.get("bias")))

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        return _outer(x, g, slots, input_first=False)


@final
class Matmul(Rule):
    """``x @ W`` with a parameter on the right."""

    functions = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
    takes_half = True

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        if len(args) != 2 or kwargs or not all(isinstance(t, Tensor) for t in args):
            return None
        return LayerCall(args[0], {"weight": args[1]}) if args[1].ndim == 2 and args[0].ndim >= 2 else None

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        return _outer(x, g, slots, input_first=True)


@final
class Addmm(Rule):
    """``torch.addmm(b, x, W)``: Hugging Face's ``Conv1D``."""

    functions = (torch.addmm, torch.Tensor.addmm)
    takes_half = True

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        if len(args) != 3 or kwargs or args[0].ndim != 1:
            return None
        return LayerCall(args[1], {"bias": args[0], "weight": args[2]})

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        return _outer(x, g, slots, input_first=True)
