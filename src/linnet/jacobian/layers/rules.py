"""What each layer knows: per-example gradients of its parameters from its input and its output's gradient.

To add a layer: write a rule (`linnet.jacobian.layers.rule`), list it in `RULES`, add a case to
``tests/jacobian/layers/test_rules.py``. Whether a rule is right for a model at hand is checked against autodiff on the
first batch (`linnet.jacobian.rule_selection`), so a rule may be simple and refuse (return None) what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import Factor, Rows, Size
from linnet.jacobian.blocks.composite import Lazy, Taps
from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.blocks.convolution_products import Convolved
from linnet.jacobian.blocks.embedding_table import Tokens
from linnet.jacobian.blocks.outer_product import Outer
from linnet.jacobian.cuda import triton_kernels
from linnet.jacobian.layers.rule import (
    CONVOLUTION,
    Args,
    Call,
    Known,
    Kwargs,
    Rule,
    Slot,
    named,
    range_of,
    tensors_of,
)


def _outer(x: Tensor, g: Tensor, slots: Mapping[str, Slot], *, input_first: bool) -> list[Factor]:
    """The factor of y = x W: x (n, r, ..., dx), g (n, c, r, ..., dg); ``input_first`` if W is (dx, dg)."""
    x = x.reshape(x.shape[0], 1, -1, x.shape[-1])
    g = g.reshape(*g.shape[:2], 1, -1, g.shape[-1])
    swapped = input_first != ("weight" in slots and slots["weight"].swapped)
    return [Outer(x, g, weight=range_of(slots, "weight"), bias=range_of(slots, "bias"), swapped=swapped)]


@final
class Linear(Rule):
    """``F.linear(x, W, b)``."""

    functions = (F.linear,)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        a = named(("input", "weight", "bias"), args, kwargs)
        if a["weight"].ndim != 2:
            return None
        return Call(a["input"], tensors_of(weight=a["weight"], bias=a.get("bias")))

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        return _outer(x, g, slots, input_first=False)


@final
class Matmul(Rule):
    """``x @ W`` with a parameter on the right."""

    functions = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        if len(args) != 2 or kwargs or not all(isinstance(t, Tensor) for t in args):
            return None
        return Call(args[0], {"weight": args[1]}) if args[1].ndim == 2 and args[0].ndim >= 2 else None

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        return _outer(x, g, slots, input_first=True)


@final
class Addmm(Rule):
    """``torch.addmm(b, x, W)``: Hugging Face's ``Conv1D``."""

    functions = (torch.addmm, torch.Tensor.addmm)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        if len(args) != 3 or kwargs or args[0].ndim != 1:
            return None
        return Call(args[1], {"bias": args[0], "weight": args[2]})

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        return _outer(x, g, slots, input_first=True)


def _convolution(a: Mapping[str, Any]) -> Call | None:
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
    return Call(a["input"], tensors_of(weight=a["weight"], bias=a.get("bias")), {"conv": conv})


@final
class Conv(Rule):
    """``torch.conv1d``, ``conv2d``, ``conv3d``; modes other than zero padding arrive already padded."""

    functions = (torch.conv1d, torch.conv2d, torch.conv3d)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        return _convolution(named(CONVOLUTION, args, kwargs))

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
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

        def products() -> Factor | None:
            found = conv.by_taps(flat_x, flat_g) if r == 1 else None
            return None if found is None else Taps(weight, found, n=n, bias=None if bias is None else (bias, shift()))

        def outer() -> Outer:
            left, right = conv.sides(flat_x, flat_g)  # (n r, groups, T, dx), (n r, c, groups, T, dg)
            left = left.unflatten(0, (n, r)).transpose(1, 2).flatten(2, 3)
            right = right.unflatten(0, (n, r)).permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
            return Outer(left, right, weight=weight, bias=bias)

        def few() -> Convolved:
            return Convolved(conv, flat_x, flat_g, n=n, weight=weight, bias=bias)

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
        return [Lazy(ranges, rows, n=n, c=c, size=size, held=held, outer=outer, products=products, few=few, last=last)]


@final
class ConvTranspose(Rule):
    """``torch.conv_transpose1d``, ``2d``, ``3d``: a convolution with input and output gradient exchanged."""

    functions = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        return _convolution(named(names, args, kwargs))

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        out: list[Factor] = []
        if "bias" in slots:
            out += _shift(g, {"bias": slots["bias"]})
        if "weight" not in slots or slots["weight"].swapped:
            return out
        conv: Convolution = call.conf["conv"]
        weight = slots["weight"].range
        (n, c, r), groups = g.shape[:3], conv.groups

        def outer() -> Outer:
            flat = g.flatten(0, 2)
            right = conv.patches(flat, x.shape[3:]).mT  # (n c r, groups, T, dg)
            right = right.unflatten(0, (n, c, r)).transpose(2, 3).flatten(3, 4)
            left = x.unflatten(2, (groups, -1)).flatten(4).transpose(1, 2)  # (n, groups, r, dx, T)
            return Outer(left.mT.flatten(2, 3), right, weight=weight, swapped=True)

        def rows() -> list[Tensor]:
            return list(outer().expand().parts)

        size = Size(
            weight[1] - weight[0],
            T=r * prod(x.shape[3:]),
            dx=x.shape[2] // groups,
            dg=g.shape[3] // groups * prod(conv.kernel),
            groups=groups,
        )
        return [*out, Lazy([weight], rows, n=n, c=c, size=size, held=(x, g), outer=outer)]


def _add_repeats(rows: Tensor, n: int) -> Tensor:
    """(n r, c, q) to (n, c, q)."""
    return rows if len(rows) == n else rows.unflatten(0, (n, -1)).sum(1)


def _shift(g: Tensor, slots: Mapping[str, Slot]) -> list[Factor]:
    """The bias of a channels-first layer: g (n, c, r, C, ...) summed over all but the channels."""
    return [Rows([slots["bias"].range], [g.flatten(4).sum((2, 4))])] if "bias" in slots else []


class Norm(Rule):
    """A normalized input times a weight plus a bias, per channel (axis 1) or over the last axes."""

    channels = True

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        if any(slot.swapped for slot in slots.values()):
            return []
        n, c = g.shape[:2]
        out: list[Factor] = []
        for role, slot in slots.items():
            h = g * x[:, None] if role == "weight" else g
            if self.channels:
                part = h.flatten(4).sum((2, 4)) if h.ndim > 4 else h.sum(2)
            else:
                part = h.reshape(n, c, -1, prod(slot.shape)).sum(2)
            out.append(Rows([slot.range], [part]))
        return out


@final
class BatchNorm(Norm):
    functions = (F.batch_norm,)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        names = ("input", "mean", "var", "weight", "bias", "training", "momentum", "eps")
        renamed = {{"running_mean": "mean", "running_var": "var"}.get(k, k): v for k, v in kwargs.items()}
        a = named(names, args, renamed)
        if a.get("training", False) or a["mean"] is None:
            raise ValueError(
                "A batch norm layer uses the statistics of the batch (train mode, or no running statistics), so "
                "examples are not independent and the Jacobian has no rows. Use running statistics "
                "(track_running_stats=True and model.eval()), or replace it by GroupNorm or LayerNorm."
            )
        conf = {"mean": a["mean"], "var": a["var"], "eps": a.get("eps", 1e-5)}
        return Call(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        if any(slot.swapped for slot in slots.values()):
            return []
        mean, var = call.conf["mean"].to(x.dtype), call.conf["var"].to(x.dtype)
        n, c, r, channels = g.shape[:4]
        x, g = x.reshape(n, r, channels, -1), g.reshape(n, c, r, channels, -1)
        if x.is_cuda:  # whose backward pass below wants a weight
            scale = (var + call.conf["eps"]).rsqrt()
            if r == 1 and triton_kernels.available(x):
                pairs = [triton_kernels.channel_sums(x[:, 0], g[:, j, 0], mean) for j in range(c)]
            else:
                x = x - mean[:, None]
                pairs = [((g[:, j] * x).sum((1, 3)), g[:, j].sum((1, 3))) for j in range(c)]
            pairs = [(weight * scale, bias) for weight, bias in pairs]
        else:
            # One backward pass of a batch norm that has (example, channel) as its channels; two sums in one reading.
            flat = x.reshape(1, n * r * channels, -1)
            many = mean.repeat(n * r), var.repeat(n * r)
            pairs = []
            for j in range(c):
                args = (g[:, j].reshape(flat.shape), flat, None, *many, None, None, False, call.conf["eps"])
                _, *sums = torch.ops.aten.native_batch_norm_backward(*args, [False, True, True])
                weight, bias = (t.view(n, r, channels).sum(1) if r > 1 else t.view(n, channels) for t in sums)
                pairs.append((weight, bias))
        parts = {
            role: sums[0][:, None] if c == 1 else torch.stack(sums, 1)
            for role, sums in zip(("weight", "bias"), zip(*pairs, strict=True), strict=True)
        }
        return [Rows([slot.range], [parts[role]]) for role, slot in slots.items()]


@final
class LayerNorm(Norm):
    functions = (F.layer_norm, torch.layer_norm)
    channels = False

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        a = named(("input", "normalized_shape", "weight", "bias", "eps"), args, kwargs)
        conf = {"shape": tuple(a["normalized_shape"]), "eps": a.get("eps", 1e-5)}
        return Call(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: Call, x: Tensor) -> Tensor:
        return F.layer_norm(x, call.conf["shape"], None, None, call.conf["eps"])


@final
class RMSNorm(Norm):
    functions = (F.rms_norm, torch.rms_norm)
    channels = False

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        a = named(("input", "normalized_shape", "weight", "eps"), args, kwargs)
        # Without eps torch takes the epsilon of the input's own dtype, which a wider capture must repeat.
        eps = torch.finfo(a["input"].dtype).eps if a.get("eps") is None else a["eps"]
        conf = {"shape": tuple(a["normalized_shape"]), "eps": eps}
        return Call(a["input"], tensors_of(weight=a.get("weight")), conf)

    def prepare(self, call: Call, x: Tensor) -> Tensor:
        return F.rms_norm(x, call.conf["shape"], None, call.conf["eps"])


@final
class GroupNorm(Norm):
    functions = (F.group_norm, torch.group_norm)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        a = named(("input", "num_groups", "weight", "bias", "eps"), args, kwargs)
        conf = {"groups": a["num_groups"], "eps": a.get("eps", 1e-5)}
        return Call(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: Call, x: Tensor) -> Tensor:
        return F.group_norm(x, call.conf["groups"], None, None, call.conf["eps"])


@final
class InstanceNorm(Norm):
    functions = (F.instance_norm,)
    layouts = ("major", "minor")

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        names = ("input", "running_mean", "running_var", "weight", "bias", "own", "momentum", "eps")
        renamed = {{"use_input_stats": "own"}.get(k, k): v for k, v in kwargs.items()}
        a = named(names, args, renamed)
        if a["input"].ndim < 3:
            return None
        conf = {key: a.get(key) for key in ("running_mean", "running_var")}
        conf |= {"own": a.get("own", True), "eps": a.get("eps", 1e-5)}
        return Call(a["input"], tensors_of(weight=a.get("weight"), bias=a.get("bias")), conf)

    def prepare(self, call: Call, x: Tensor) -> Tensor:
        conf = call.conf
        if conf["own"]:
            return F.instance_norm(x, None, None, None, None, True, 0.0, conf["eps"])
        mean, var = conf["running_mean"].to(x.dtype), conf["running_var"].to(x.dtype)
        return F.batch_norm(x, mean, var, None, None, False, 0.0, conf["eps"])


@final
class Embedding(Rule):
    """``F.embedding(ids, table)``."""

    functions = (F.embedding,)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        a = named(names, args, kwargs)
        if a.get("max_norm") is not None or a.get("scale_grad_by_freq"):
            return None
        padding = a.get("padding_idx")
        if padding is not None and padding < 0:
            padding += a["weight"].shape[0]
        return Call(a["input"], {"weight": a["weight"]}, {"padding": padding})

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
        assert x is not None
        if slots["weight"].swapped:
            return []
        ids = x.reshape(x.shape[0], -1)
        if call.conf["padding"] is not None:
            ids = ids.masked_fill(ids == call.conf["padding"], -1)
        g = g.reshape(*g.shape[:2], -1, g.shape[-1])
        return [Tokens(ids, g, slots["weight"].range)]


class Elementwise(Rule):
    """A parameter that is broadcast against the data: its gradient is summed over the broadcast axes."""

    def factors(self, call: Call, x: Tensor | None, g: Tensor, slots: Mapping[str, Slot], layout: str) -> list[Factor]:
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
        return [Rows([slot.range], [h.flatten(2) if h.ndim > 2 else h[..., None]])]

    def gradient(self, call: Call, x: Tensor | None, g: Tensor) -> Tensor:
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

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        pair = _pair(args, kwargs, known)
        return None if pair is None else Call(None, {"weight": pair[1]})


@final
class Mul(Elementwise):
    """``x * s`` and ``s * x``: layer scale, hand-written norms."""

    functions = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        pair = _pair(args, kwargs, known)
        return Call(pair[0], {"weight": pair[1]}) if pair and isinstance(pair[0], Tensor) else None

    def gradient(self, call: Call, x: Tensor | None, g: Tensor) -> Tensor:
        assert x is not None
        return g * x[:, None]


@final
class Expand(Elementwise):
    """``token.expand(n, -1, -1)``: class tokens."""

    functions = (torch.Tensor.expand, torch.Tensor.expand_as)

    def read(self, args: Args, kwargs: Kwargs, known: Known) -> Call | None:
        return Call(None, {"weight": args[0]})


RULES: dict[Callable[..., Any], Rule] = {
    function: rule
    for rule in (
        Linear(),
        Matmul(),
        Addmm(),
        Conv(),
        ConvTranspose(),
        BatchNorm(),
        LayerNorm(),
        RMSNorm(),
        GroupNorm(),
        InstanceNorm(),
        Embedding(),
        Add(),
        Mul(),
        Expand(),
    )
    for function in rule.functions
}
"""Torch function to the rule that reads its calls."""
