"""Each layer rule's per-example gradients against autograd's, one call at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.layers import RULES
from linnet.jacobian.layers.rule import LayerCall, LayoutError, Slot, arrange
from linnet.jacobian.recording import RecordedCall, ServedCall, build_blocks

N, C = 3, 2


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-10) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


@dataclass
class Layer:
    """A call of a torch function: the shapes of one example and of the parameters, and the other arguments."""

    function: Any
    x: tuple[int, ...]
    weight: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    before: tuple[Any, ...] = ()  # arguments between the input and the parameters
    after: tuple[Any, ...] = ()  # arguments behind them
    kwargs: dict[str, Any] = field(default_factory=dict)
    order: str = "xwb"
    ids: int = 0  # x holds row numbers below this

    def arguments(self, x: Tensor, params: dict[str, Tensor]) -> tuple[Any, ...]:
        letters = {"x": (x, *self.before), "w": (params.get("weight"),), "b": (params.get("bias"),)}
        return (*(a for letter in self.order for a in letters[letter]), *self.after)


MEAN, VAR = normal(4, seed=20), normal(4, seed=21).square() + 0.5

LAYERS = {
    "linear": Layer(F.linear, (4,), (5, 4), (5,)),
    "linear no bias": Layer(F.linear, (4,), (5, 4), order="xw"),
    "linear tokens": Layer(F.linear, (3, 4), (5, 4), (5,)),
    "linear grid": Layer(F.linear, (2, 3, 4), (5, 4), (5,)),
    "matmul": Layer(torch.matmul, (4,), (4, 5), order="xw"),
    "matmul tokens": Layer(torch.Tensor.__matmul__, (3, 4), (4, 5), order="xw"),
    "Tensor.matmul": Layer(torch.Tensor.matmul, (3, 4), (4, 5), order="xw"),
    "mm": Layer(torch.mm, (4,), (4, 5), order="xw"),
    "Tensor.mm": Layer(torch.Tensor.mm, (4,), (4, 5), order="xw"),
    "addmm": Layer(torch.addmm, (4,), (4, 5), (5,), order="bxw"),
    "Tensor.addmm": Layer(torch.Tensor.addmm, (4,), (4, 5), (5,), order="bxw"),
    "conv1d": Layer(torch.conv1d, (4, 7), (6, 4, 3), (6,), after=(2, 1)),
    "conv2d": Layer(torch.conv2d, (4, 6, 5), (6, 4, 3, 2), (6,), kwargs={"stride": (2, 1), "padding": (1, 0)}),
    "conv2d no bias": Layer(torch.conv2d, (4, 6, 5), (6, 4, 3, 2), order="xw"),
    "conv2d grouped": Layer(torch.conv2d, (4, 6, 5), (6, 2, 3, 3), (6,), kwargs={"groups": 2, "padding": "same"}),
    "conv3d": Layer(torch.conv3d, (2, 4, 3, 4), (4, 1, 2, 1, 2), (4,), after=(1, 0, (2, 1, 1), 2)),
    "conv_transpose1d": Layer(torch.conv_transpose1d, (4, 5), (4, 6, 3), (6,), after=(2, 1, 1)),
    "conv_transpose2d": Layer(
        torch.conv_transpose2d,
        (4, 3, 4),
        (4, 3, 3, 2),
        (6,),
        kwargs={"stride": (2, 1), "padding": (1, 0), "groups": 2, "dilation": 2},
    ),
    "conv_transpose3d": Layer(torch.conv_transpose3d, (2, 2, 3, 2), (2, 3, 2, 2, 1), order="xw", after=(None, 2)),
    "batch_norm": Layer(F.batch_norm, (4, 3, 2), (4,), (4,), before=(MEAN, VAR)),
    "batch_norm flat": Layer(F.batch_norm, (4,), (4,), (4,), before=(MEAN, VAR), after=(False, 0.1, 1e-2)),
    "layer_norm": Layer(F.layer_norm, (3, 4), (4,), (4,), before=([4],)),
    "layer_norm two axes": Layer(F.layer_norm, (2, 3, 4), (3, 4), (3, 4), before=([3, 4],), after=(1e-2,)),
    "torch.layer_norm": Layer(torch.layer_norm, (3, 4), (4,), (4,), before=([4],)),
    "rms_norm": Layer(F.rms_norm, (3, 4), (4,), before=([4],), order="xw"),
    "torch.rms_norm": Layer(torch.rms_norm, (3, 4), (4,), before=([4],), order="xw", after=(1e-2,)),
    "group_norm": Layer(F.group_norm, (4, 3, 2), (4,), (4,), before=(2,)),
    "torch.group_norm": Layer(torch.group_norm, (4, 3), (4,), (4,), before=(2,), after=(1e-2,)),
    "instance_norm": Layer(F.instance_norm, (4, 3, 2), (4,), (4,), before=(None, None)),
    "instance_norm tracked": Layer(
        F.instance_norm, (4, 3), (4,), (4,), before=(MEAN, VAR), kwargs={"use_input_stats": False}
    ),
    "embedding": Layer(F.embedding, (4,), (5, 3), order="xw", ids=5),
    "embedding padding": Layer(F.embedding, (4, 2), (5, 3), order="xw", ids=5, after=(-2,)),
    "embedding of one": Layer(F.embedding, (), (5, 3), order="xw", ids=5),
    "add": Layer(torch.add, (3, 4), (3, 4), order="xw"),
    "add broadcast": Layer(torch.Tensor.__add__, (3, 4), (1, 1, 4), order="xw"),
    "add in front": Layer(torch.Tensor.add, (3, 4), (3, 1), order="wx"),
    "add scalar": Layer(torch.Tensor.__radd__, (3, 4), (), order="xw"),
    "mul": Layer(torch.mul, (3, 4), (4,), order="xw"),
    "mul in front": Layer(torch.Tensor.__mul__, (3, 4), (3, 1), order="wx"),
    "mul scalar": Layer(torch.Tensor.mul, (3, 4), (), order="xw"),
    "mul channels": Layer(torch.Tensor.__rmul__, (3, 4), (1, 3, 1), order="xw"),
}

ELEMENTWISE = (torch.add, torch.mul)
ANY_AXIS = ("add broadcast", "add scalar", "mul", "mul scalar")  # parameters that lie along the last axis at most


def cases():
    for name, layer in LAYERS.items():
        yield pytest.param(layer, "major", 1, id=f"{name}")
        rule = RULES[layer.function]
        anywhere = name in ANY_AXIS if rule in [RULES[f] for f in ELEMENTWISE] else name != "layer_norm two axes"
        yield pytest.param(layer, "major", 2, id=f"{name}, windows")
        yield pytest.param(layer, "minor", 2, id=f"{name}, time first")
        if "second" in rule.layouts and len(layer.x) > 1 and anywhere:
            yield pytest.param(layer, "second", 1, id=f"{name}, second axis")


def data(layer: Layer, layout: str, r: int) -> Tensor:
    """The input of N examples, each r times along the batch axis, example i holding numbers of its own."""
    shape = (layer.x[0], N, *layer.x[1:]) if layout == "second" else (N * r, *layer.x)
    if layer.ids:
        return torch.randint(layer.ids, shape, generator=torch.Generator().manual_seed(1))
    return normal(*shape, seed=1)


def owners(shape: torch.Size, layout: str) -> Tensor:
    """Which example each entry of a tensor belongs to."""
    axis = 1 if layout == "second" else 0
    index = torch.arange(shape[axis])
    index = index if layout == "second" else index % N if layout == "minor" else index // (shape[0] // N)
    return index.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)


def by_autograd(y: Tensor, g: Tensor, params: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Role to (N, C, numel): gradients of the parts of ``sum(g[u] * y)`` that belong to one example."""
    owner = owners(y.shape, layout)
    found = {role: [] for role in params}
    for i in range(N):
        for u in range(len(g)):
            grads = torch.autograd.grad(y, list(params.values()), g[u] * (owner == i), retain_graph=True)
            for role, grad in zip(params, grads, strict=True):
                found[role].append(grad.flatten())
    return {role: torch.stack(rows).view(N, len(g), -1) for role, rows in found.items()}


def make_params(layer: Layer) -> tuple[dict[str, Tensor], dict[str, Slot]]:
    params, slots, at = {}, {}, 3
    for role, shape in (("weight", layer.weight), ("bias", layer.bias)):
        if shape is not None:
            params[role] = normal(*shape, seed=len(role)).requires_grad_()
            slots[role] = Slot(role, (at, at + params[role].numel()), shape, at)
            at += params[role].numel() + 2
    return params, slots


@pytest.mark.parametrize(("layer", "layout", "r"), list(cases()))
def test_rule_gives_autograd_s_rows(layer, layout, r):
    params, slots = make_params(layer)
    x, rule = data(layer, layout, r), RULES[layer.function]
    args = layer.arguments(x, params)
    call = rule.read(args, layer.kwargs, lambda t: any(t is p for p in params.values()))
    assert set(call.params) == set(params)
    y = layer.function(*args, **layer.kwargs)
    g = normal(C, *y.shape, seed=9)
    reference = by_autograd(y, g, params, layout)
    for selected in ({*slots}, *({role} for role in slots)):  # also with the other parameter frozen
        mine = {role: slots[role] for role in selected}
        use = RecordedCall(rule, LayerCall(call.x, {}, call.conf), mine, None, 0)
        found = {}
        for block in build_blocks(use, ServedCall(layout, mine), g, n=N, dtype=torch.float64):
            assert (block.n, block.c) == (N, C)
            for where, part in zip(block.ranges, block.expand().parts, strict=True):
                assert where not in found
                found[where] = part
        assert set(found) == {slot.range for slot in mine.values()}
        for role, slot in mine.items():
            close(found[slot.range], reference[role])


@pytest.mark.parametrize("layout", ["major", "second"])
def test_expand_gives_autograd_s_rows(layout):
    """Class tokens: the call has no data at all, only the shape says where the examples are."""
    token = normal(1, 1, 4).requires_grad_()
    shape = (N, 2, 4) if layout == "major" else (2, N, 4)
    rule, slot = RULES[torch.Tensor.expand], Slot("token", (0, 4), (1, 1, 4), 0)
    assert RULES[torch.Tensor.expand_as] is rule
    call = rule.read((token, *shape), {}, lambda t: t is token)
    y = token.expand(shape)
    g = normal(C, *shape, seed=1)
    use = RecordedCall(rule, LayerCall(None, {}, call.conf), {"weight": slot}, None, 0)
    (block,) = build_blocks(use, ServedCall(layout, use.slots), g, n=N, dtype=torch.float64)
    close(block.expand().parts[0], by_autograd(y, g, {"weight": token}, layout)["weight"])


def test_every_function_with_a_rule_has_a_case():
    here = {layer.function for layer in LAYERS.values()} | {torch.Tensor.expand, torch.Tensor.expand_as}
    assert here == set(RULES)


@pytest.mark.parametrize("function", [F.linear, torch.matmul])
def test_transposed_views_of_a_parameter(function):
    """``W.t()`` of a stored (5, 4): the columns are those of the stored tensor."""
    stored = normal(5, 4).requires_grad_()
    x = normal(N, 3, 5) if function is F.linear else normal(N, 3, 4)
    y = function(x, stored.t())
    slot = Slot("W", (2, 22), (4, 5), 2, swapped=True)
    rule = RULES[function]
    use = RecordedCall(rule, rule.read((x, stored.t()), {}, lambda t: False), {"weight": slot}, None, 0)
    g = normal(C, *y.shape, seed=3)
    (block,) = build_blocks(use, ServedCall("major", use.slots), g, n=N, dtype=torch.float64)
    close(block.expand().parts[0], by_autograd(y, g, {"weight": stored}, "major")["weight"])


PLAIN = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        pytest.param(F.linear, (PLAIN, torch.zeros(4)), {}, id="linear with a vector"),
        pytest.param(torch.matmul, (PLAIN, torch.zeros(4)), {}, id="matrix times vector"),
        pytest.param(torch.matmul, (torch.zeros(4), torch.zeros(4, 5)), {}, id="vector times matrix"),
        pytest.param(torch.matmul, (PLAIN, torch.zeros(4, 5)), {"out": PLAIN}, id="matmul with out"),
        pytest.param(torch.addmm, (PLAIN, PLAIN, torch.zeros(4, 4)), {}, id="addmm with a matrix"),
        pytest.param(torch.addmm, (torch.zeros(4), PLAIN, torch.zeros(4, 4)), {"beta": 2.0}, id="addmm with beta"),
        pytest.param(torch.conv1d, (torch.zeros(2, 9), torch.zeros(3, 2, 2)), {}, id="unbatched conv"),
        pytest.param(torch.conv_transpose1d, (torch.zeros(2, 9), torch.zeros(2, 3, 2)), {}, id="unbatched transpose"),
        pytest.param(F.instance_norm, (PLAIN,), {}, id="unbatched instance norm"),
        pytest.param(
            F.embedding, (torch.zeros(3).long(), torch.zeros(4, 2)), {"max_norm": 1.0}, id="embedding max_norm"
        ),
        pytest.param(
            F.embedding,
            (torch.zeros(3).long(), torch.zeros(4, 2)),
            {"scale_grad_by_freq": True},
            id="embedding by frequency",
        ),
        pytest.param(torch.add, (PLAIN, PLAIN), {"alpha": 2.0}, id="add with alpha"),
        pytest.param(torch.mul, (PLAIN, 2.0), {}, id="no parameter"),
    ],
)
def test_a_rule_refuses_what_it_does_not_know(function, args, kwargs):
    assert RULES[function].read(args, kwargs, lambda t: False) is None


@pytest.mark.parametrize("shape", [(N, 4), (5, 4), (2, 1, 1, 4), (2, 4)])
def test_a_parameter_with_an_axis_of_examples_has_no_elementwise_rows(shape):
    """Not broadcast over the examples, or not broadcast into the output at all."""
    rule, slot = RULES[torch.add], Slot("b", (0, 4), shape, 0)
    use = RecordedCall(rule, LayerCall(None, {}), {"weight": slot}, None, 0)
    assert build_blocks(use, ServedCall("major", use.slots), normal(C, N, 4), n=N, dtype=torch.float64) == []


def test_arrange():
    t = torch.arange(24).view(6, 4)
    assert arrange(t, "major", 3)[1].tolist() == t[2:4].tolist()
    assert arrange(t, "minor", 3)[1].tolist() == t[[1, 4]].tolist()
    assert arrange(t, "second", 4)[1].tolist() == [t[:, 1].tolist()]
    assert arrange(t, "major", 6).shape == (6, 1, 4)


@pytest.mark.parametrize(("shape", "layout"), [((4, 3), "major"), ((4, 3), "minor"), ((0, 3), "major"), ((), "major")])
def test_arrange_needs_whole_examples(shape, layout):
    with pytest.raises(LayoutError, match="no axis of 3 examples in first place"):
        arrange(torch.zeros(shape), layout, 3)


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_arrange_needs_a_second_axis(shape):
    with pytest.raises(LayoutError, match="no axis of 3 examples in second place"):
        arrange(torch.zeros(shape), "second", 3)


# Convolutions, both ways.

CONVOLUTIONS = {
    "1d": ((4, 9), (6, 4, 3), {}),
    "1d strided": ((4, 9), (6, 4, 3), {"stride": 2, "padding": 1}),
    "1d same, even": ((4, 9), (6, 4, 4), {"padding": "same"}),
    "1d same, even, dilated": ((4, 9), (6, 4, 2), {"padding": "same", "dilation": 3}),
    "1d dilated groups": ((4, 9), (6, 2, 3), {"dilation": 2, "groups": 2}),
    "2d": ((4, 6, 7), (6, 4, 3, 3), {"padding": 1}),
    "2d pointwise": ((4, 6, 7), (6, 4, 1, 1), {}),
    "2d wide": ((16, 5, 5), (8, 16, 3, 3), {"padding": 1}),
    "2d lossy stride": ((4, 6, 7), (6, 4, 3, 2), {"stride": (2, 3), "padding": (1, 2)}),
    "2d same, even": ((4, 6, 7), (6, 4, 4, 3), {"padding": "same"}),
    "2d valid": ((4, 6, 7), (6, 4, 2, 3), {"padding": "valid", "stride": 2}),
    "2d dilated": ((4, 6, 7), (6, 4, 3, 3), {"dilation": (2, 1), "padding": (2, 1)}),
    "2d groups": ((4, 6, 7), (6, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1}),
    "2d depthwise": ((4, 6, 7), (8, 1, 3, 3), {"groups": 4, "padding": 1}),
    "3d": ((2, 4, 3, 5), (4, 2, 2, 3, 2), {"padding": 1}),
    "3d strided groups": ((2, 4, 3, 5), (4, 1, 2, 1, 2), {"stride": (1, 2, 2), "dilation": (2, 1, 1), "groups": 2}),
    "3d same, even": ((2, 4, 3, 5), (4, 2, 2, 3, 4), {"padding": "same"}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_convolution_rows(name, c, dtype):
    shape, kernel, settings = CONVOLUTIONS[name]
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[len(shape) - 2]
    x = normal(N, *shape, dtype=dtype)
    weight = normal(*kernel, seed=1, dtype=dtype).requires_grad_()
    y = function(x, weight, **settings)
    g = normal(N, c, *y.shape[1:], seed=2, dtype=dtype)
    reference = by_autograd(y, g.transpose(0, 1), {"weight": weight}, "major")["weight"]
    known = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    conv = Convolution.of(kernel, **(known | settings))
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    for way in (conv._rows_patches, conv._rows_grouped, conv.rows):
        close(way(x, g).reshape(N, c, -1), reference, rtol=rtol)
    left, right = conv.sides(x, g)  # (m, groups, T, dx), (m, c, groups, T, dg)
    close(torch.einsum("njtx,ncjtg->ncjgx", left, right).reshape(N, c, -1), reference, rtol=rtol)


def test_convolution_takes_strided_inputs():
    """Channels-last activations and expanded gradients reach the rules as they are."""
    x = normal(N, 8, 5, 6).to(memory_format=torch.channels_last)
    g = normal(N, 1, 4, 1, 1).expand(N, 2, 4, 5, 6)
    conv = Convolution.of((4, 8, 3, 3), stride=1, padding=1, dilation=1, groups=1)
    plain = conv._rows_patches(x.contiguous(), g.contiguous())
    close(conv._rows_patches(x, g), plain)
    close(conv._rows_grouped(x, g), plain)
