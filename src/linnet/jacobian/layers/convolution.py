"""Rules of convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Size
from linnet.jacobian.blocks.convolution import ChannelsLastBlock, Convolution, ConvolvedBlock, LazyBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.jacobian.layers.rule import (
    CONVOLUTION,
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


def _convolution(a: Mapping[str, Any]) -> LayerCall | None:
    """The call of a convolution or its transpose, from its arguments by name; None without a batch axis."""
    if a["input"].ndim != a["weight"].ndim:
        return None
    conv = Convolution.of(
        a["weight"].shape,
        stride=a.get("stride", 1),
        padding=a.get("padding", 0),
        dilation=a.get("dilation", 1),
        groups=a.get("groups", 1),
    )
    return LayerCall(a["input"], tensors_of(weight=a["weight"], bias=a.get("bias")), {"conv": conv})


@final
class Conv(Rule):
    """``torch.conv1d``, ``conv2d``, ``conv3d``; modes other than zero padding arrive already padded."""

    functions = (torch.conv1d, torch.conv2d, torch.conv3d)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        return _convolution(named(CONVOLUTION, args, kwargs))

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        conv: Convolution = call.conf["conv"]
        weight, bias = range_of(slots, "weight"), range_of(slots, "bias")
        n, r = x.shape[:2]
        if weight is None or slots["weight"].swapped:
            return _shift(g, slots)
        flat_x, flat_g = x.flatten(0, 1), g.transpose(1, 2).flatten(0, 1)  # (n r, C, ...), (n r, c, C, ...)

        def rows() -> list[Tensor]:
            parts = [_add_repeats(conv.rows(flat_x, flat_g), n)]
            return parts if bias is None else [*parts, shift()]

        def shift() -> Tensor:
            return g.flatten(4).sum((2, 4))

        def products() -> ColumnBlock | None:
            found = conv.by_taps(flat_x, flat_g) if r == 1 else None
            return (
                None
                if found is None
                else ChannelsLastBlock(weight, found, n=n, bias=None if bias is None else (bias, shift()))
            )

        def outer() -> OuterProductBlock:
            left, right = conv.sides(flat_x, flat_g)  # (n r, groups, T, dx), (n r, c, groups, T, dg)
            left = left.unflatten(0, (n, r)).transpose(1, 2).flatten(2, 3)
            right = right.unflatten(0, (n, r)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
            return OuterProductBlock(left, right, weight=weight, bias=bias)

        def few() -> ConvolvedBlock:
            return ConvolvedBlock(conv, flat_x, flat_g, n=n, weight=weight, bias=bias)

        ranges = [weight] if bias is None else [weight, bias]
        size = Size(
            sum(b - a for a, b in ranges),
            T=r * prod(g.shape[4:]),
            dx=conv.channels * prod(conv.kernel),
            dg=g.shape[3] // conv.groups,
            groups=conv.groups,
        )
        c, held = g.shape[1], (x, g)
        last = (2, 3) if conv.channels_last(g) else None
        return [
            LazyBlock(ranges, rows, n=n, c=c, size=size, held=held, outer=outer, products=products, few=few, last=last)
        ]


@final
class ConvTranspose(Rule):
    """``torch.conv_transpose1d``, ``2d``, ``3d``: a convolution with input and output gradient exchanged."""

    functions = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        return _convolution(named(names, args, kwargs))

    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        assert x is not None
        out: list[ColumnBlock] = []
        if "bias" in slots:
            out += _shift(g, {"bias": slots["bias"]})
        if "weight" not in slots or slots["weight"].swapped:
            return out
        conv: Convolution = call.conf["conv"]
        weight = slots["weight"].range
        (n, c, r), groups = g.shape[:3], conv.groups

        def outer() -> OuterProductBlock:
            flat = g.flatten(0, 2)
            right = conv.patches(flat, x.shape[3:]).mT  # (n c r, groups, T, dg)
            right = right.unflatten(0, (n, c, r)).transpose(2, 3).flatten(3, 4)
            left = x.unflatten(2, (groups, -1)).flatten(4).transpose(1, 2)  # (n, groups, r, dx, T)
            return OuterProductBlock(left.mT.flatten(2, 3), right, weight=weight, swapped=True)

        def rows() -> list[Tensor]:
            return list(outer().expand().parts)

        size = Size(
            weight[1] - weight[0],
            T=r * prod(x.shape[3:]),
            dx=x.shape[2] // groups,
            dg=g.shape[3] // groups * prod(conv.kernel),
            groups=groups,
        )
        return [*out, LazyBlock([weight], rows, n=n, c=c, size=size, held=(x, g), outer=outer)]


def _add_repeats(rows: Tensor, n: int) -> Tensor:
    """(n r, c, q) to (n, c, q)."""
    return rows if len(rows) == n else rows.unflatten(0, (n, -1)).sum(1)


def _shift(g: Tensor, slots: Slots) -> list[ColumnBlock]:
    """The bias of a channels-first layer: g (n, c, r, C, ...) summed over all but the channels."""
    return [DenseBlock([slots["bias"].range], [g.flatten(4).sum((2, 4))])] if "bias" in slots else []
