r"""The outputs of a network and the rows of its Jacobian as one graph of plain torch operations.

The graph is made of two traces. The first trace runs the network on one example and writes down its operations, without
the code of the network. Derivatives that the network takes itself, such as forces, are operations like others there.
The second trace runs `torch.func.vmap` and `torch.func.vjp` over these operations, and writes down what they do:

.. math:: x_1, \dots, x_n \mapsto f(x_i), \; J_{ij} = \partial f_j(x_i) / \partial \theta

torch writes the size of the batch into such a trace as a number, and symbolic sizes do not survive its transforms. So
the second trace is made twice, for batches of two sizes. Every number that differs between the two traces grows with
the batch, as :math:`a n + b`, and the graph computes the number from its inputs. Traces that differ in anything else
are refused. Rows of the graph are compared, for batches of other sizes, with those of ordinary reverse mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize, vjp, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from linnet._common import forward_mode
from linnet.data import Batch
from linnet.network.functional_model import FunctionalModel

aten = torch.ops.aten

SIZES = (3, 5)
"""Batches that are traced."""

OTHERS = ((0,), (0, 1, 1, 0, 1, 0, 0))
"""Batches on which the graph is compared with reverse mode, as positions of two examples."""

ROUNDING = 1e4
"""Times eps by which rows of the graph may differ from those of reverse mode, relative to the largest."""

LARGEST = 0.05
"""Relative difference that counts as more than rounding for every dtype."""

WAY_OUT = "Choose params='last_layer': a module for the last layer needs no derivatives of the network."


def trace_rows(network: FunctionalModel, batch: Batch) -> fx.GraphModule:
    """A module from the inputs of a network to its outputs (n, c) and the rows of its Jacobian (n, c, p).

    The module takes the tensors of the inputs one after another, in batches of any size, and needs no code of the
    network. A batch takes n c p numbers.

    Args:
        network: The network, in eval mode.
        batch: Some examples.

    Raises:
        NotImplementedError: Names the operation that has no plain form, or says what depends on the size of the batch.

    Example:
        >>> network = FunctionalModel.of(torch.nn.Linear(2, 3))
        >>> rows = trace_rows(network, Batch((torch.ones(4, 2),), {}, None, start=0, n=4))
        >>> f, J = rows(torch.ones(7, 2))
        >>> f.shape, J.shape
        (torch.Size([7, 3]), torch.Size([7, 3, 9]))
    """
    batch = replace(batch.part(0, min(batch.n, 2)), rest=None, start=0, positions=None, f=None)
    inputs = find_input_tensors(batch.args, batch.kwargs)
    if not inputs or any(isinstance(value, str) for value in pytree.tree_leaves((batch.args, batch.kwargs))):
        raise NotImplementedError(f"A plain graph is known for networks whose inputs are tensors. {WAY_OUT}")
    f, J = find_rows(network, batch)
    reason, cause = "", None
    # What the network detaches has no derivative. Where the network differentiates itself, torch detaches what it
    # keeps for the backward pass, and there is a derivative.
    for keeps_detached in (True, False):
        try:
            with network.in_precision("highest"), forward_mode(network.module), _loops_refused():
                plain = _trace_network(network, batch, keeps_detached=keeps_detached)
                graph = _trace_batches(plain, network, inputs, f)
        except Exception as error:  # torch has no one kind of error for what it cannot trace
            reason, cause = reason or _explain(error), cause or error
            continue
        difference = _find_difference(graph, network, batch, f, J)
        if not difference:
            return graph
        reason = reason or (
            f"{difference} differ from those of the network and of reverse mode. Look for custom backward passes, for "
            "tensors without gradients, and for outputs of an example that change with its batch"
        )
    raise NotImplementedError(f"The network has no plain graph of its derivatives: {reason}. {WAY_OUT}") from cause


def _explain(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    if isinstance(error, _DependsOnBatchError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"torch says: {(lines or [type(error).__name__])[0].rstrip('.')}"


def find_rows(network: FunctionalModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs (n, c) and rows of the Jacobian (n, c, p) of a few examples by reverse mode, one output at a time."""
    theta = {name: t.detach().requires_grad_() for name, t in network.theta.items()}
    with torch.enable_grad():
        f = network.forward(theta, batch)
        rows = []
        for one in f.flatten():
            grads = torch.autograd.grad(one, list(theta.values()), retain_graph=True, allow_unused=True)
            pairs = zip(grads, theta.values(), strict=True)
            rows.append(torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for g, t in pairs]))
    return f.detach(), torch.stack(rows).detach().unflatten(0, f.shape)


def find_input_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of examples that a network is called with, in order."""
    return [t for t in pytree.tree_leaves((tuple(args), dict(kwargs))) if _holds_examples(t)]


def _holds_examples(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _replace_tensors(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The batch with other tensors as its inputs."""
    values, tree = pytree.tree_flatten((batch.args, batch.kwargs))
    left = iter(tensors)
    args, kwargs = pytree.tree_unflatten([next(left) if _holds_examples(value) else value for value in values], tree)
    return Batch(args, kwargs, None, start=0, n=len(tensors[0]))


@contextmanager
def _loops_refused() -> Iterator[None]:
    """A block in which vmap refuses operations that vmap does not know, rather than to loop over the examples."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _trace_network(network: FunctionalModel, batch: Batch, *, keeps_detached: bool) -> fx.GraphModule:
    """The operations of one forward pass of one example: (theta, inputs) to its outputs (1, c)."""
    names, inputs = list(network.theta), find_input_tensors(batch.args, batch.kwargs)

    def run(theta: list[Tensor], inputs: list[Tensor]) -> Tensor:
        return network.forward(dict(zip(names, theta, strict=True)), _replace_tensors(batch, inputs))

    table = {
        **_core_decompositions(),
        aten.avg_pool2d.default: partial(_average_pool, axes=2),
        aten.avg_pool3d.default: partial(_average_pool, axes=3),
    }
    table.pop(aten.detach.default, None)
    if not keeps_detached:
        table[aten.detach.default] = lambda t: t.view(t.shape)
    theta = [t.detach() for t in network.theta.values()]
    example = [x[:1] for x in inputs]
    # Fake tensors hold no numbers: code that looks at them fails, rather than to write down one answer.
    with torch.no_grad():
        operations = _make_graph(run, theta, example, table=table, mode="fake")
        return _make_graph(functionalize(operations, remove="mutations"), theta, example, table=table, mode="fake")


def _trace_batches(
    plain: fx.GraphModule, network: FunctionalModel, inputs: Sequence[Tensor], f: Tensor
) -> fx.GraphModule:
    """Outputs and rows of a batch of any size, by the operations of one example."""
    theta = [t.detach() for t in network.theta.values()]
    eye = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)

    def rows(theta: list[Tensor], eye: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        def of_one(*example: Tensor) -> tuple[Tensor, Tensor]:
            f, pull = vjp(lambda *t: plain(list(t), [x[None] for x in example])[0], *theta)  # type: ignore[misc]
            return f, torch.cat([g.flatten(1) for g in vmap(pull)(eye)], 1)

        return vmap(of_one)(*inputs)

    table = {
        **_core_decompositions(),
        aten.convolution_backward.default: _convolution_backward,
        aten.max_pool2d_with_indices_backward.default: partial(_max_pool_backward, axes=2),
        aten.max_pool3d_with_indices_backward.default: partial(_max_pool_backward, axes=3),
    }
    functional, traces = functionalize(rows, remove="mutations"), []
    for size in SIZES:
        index = torch.arange(size) % len(inputs[0])
        batches = [x[index.to(x.device)] for x in inputs]
        traces.append(_make_graph(functional, theta, eye, batches, table=table, mode="real"))
    bound = {f"theta_{i}": t for i, t in enumerate(theta)} | {"eye": eye}
    return _generalize(traces[0], traces[1], bound)


def _make_graph(function: Callable[..., Any], *args: Any, table: Mapping[Any, Any], mode: str) -> fx.GraphModule:
    """What a function does, as operations of tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    how: dict[str, Any] = {"decomposition_table": dict(table), "tracing_mode": mode, "_allow_non_fake_inputs": True}
    return make_fx(function, **how)(*args)


def _core_decompositions() -> dict[Any, Any]:
    """Operations by a few others; norms among them, whose derivatives write in place."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    norms = (
        aten.native_batch_norm,
        aten._native_batch_norm_legit_no_training,
        aten.cudnn_batch_norm,
        aten.native_layer_norm,
    )
    return {**core_aten_decompositions(), **get_decompositions(norms), aten.copy.default: _copy}


# Two traces as one graph.


def _generalize(first: fx.GraphModule, second: fx.GraphModule, bound: Mapping[str, Tensor]) -> fx.GraphModule:
    """One graph for batches of any size, from the traces of two.

    Args:
        first: The trace of ``SIZES[0]`` examples.
        second: The trace of ``SIZES[1]`` examples.
        bound: The first inputs of the traces, which the graph holds.
    """
    nodes, others = list(first.graph.nodes), list(second.graph.nodes)
    if len(nodes) != len(others):
        raise _DependsOnBatchError(f"its derivatives have {len(nodes)} and {len(others)} operations")
    counterparts = dict(zip(nodes, others, strict=True))
    graph, holder = fx.Graph(), torch.nn.Module()
    made: dict[fx.Node, fx.Node] = {}

    def hold(name: str, t: Tensor) -> fx.Node:
        holder.register_buffer(name, t.detach().clone())
        return graph.get_attr(name)

    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs = placeholders[len(bound) :]
    for i, node in enumerate(inputs):
        made[node] = graph.placeholder(f"input_{i}")
    for node, (name, t) in zip(placeholders, bound.items(), strict=False):
        made[node] = hold(name, t)
    n = graph.call_function(aten.sym_size.int, (made[inputs[0]], 0))
    sizes: dict[tuple[int, int], fx.Node] = {(1, 0): n}

    def grow(a: int, b: int) -> fx.Node:
        """The node of a n + b."""
        if (a, b) not in sizes:
            whole = n if a == 1 else graph.call_function(operator.mul, (n, a))
            sizes[a, b] = graph.call_function(operator.add, (whole, b)) if b else whole
        return sizes[a, b]

    def merge(one: Any, other: Any, target: Any) -> Any:
        """An argument of an operation for any n, from its values in the two traces."""
        if isinstance(one, fx.Node) and counterparts[one] is other:
            return made[one]
        if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
            return type(one)(merge(a, b, target) for a, b in zip(one, other, strict=True))
        if type(one) is type(other) and one == other:
            return one
        if type(one) is int and type(other) is int:
            a, left = divmod(other - one, SIZES[1] - SIZES[0])
            if not left:
                return grow(a, one - a * SIZES[0])
        raise _DependsOnBatchError(f"{target} takes {one} and {other}")

    for node, other in counterparts.items():
        if node.op == "get_attr":
            value, same = getattr(first, str(node.target)), getattr(second, str(other.target))
            if value.shape != same.shape or not torch.equal(value, same):
                raise _DependsOnBatchError("a constant has other values")
            made[node] = hold(f"constant_{len(made)}", value)
        elif node.op == "output":
            graph.output(merge(node.args[0], other.args[0], "the output"))
        elif node.op == "call_function":
            if node.target != other.target or node.kwargs.keys() != other.kwargs.keys():
                raise _DependsOnBatchError(f"{node.target} becomes {other.target}")
            args = merge(node.args, other.args, node.target)
            kwargs = {key: merge(value, other.kwargs[key], node.target) for key, value in node.kwargs.items()}
            made[node] = graph.call_function(node.target, args, kwargs)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(holder, graph)


class _DependsOnBatchError(RuntimeError):
    """Two traces differ in more than numbers that grow with the batch."""

    def __init__(self, how: str) -> None:
        super().__init__(f"between batches of {SIZES[0]} and {SIZES[1]} examples, {how}")


def _find_difference(graph: fx.GraphModule, network: FunctionalModel, batch: Batch, f: Tensor, J: Tensor) -> str:
    """What of the graph differs from the network and from reverse mode, for batches of other sizes; "" for nothing."""
    for positions in OTHERS:
        some = batch.take(torch.tensor(positions) % batch.n)
        index = some.index.to(f.device)
        with torch.no_grad():
            found, whole = graph(*find_input_tensors(some.args, some.kwargs)), network.forward({}, some)
        for name, a, b in (("outputs", found[0], whole), ("rows of the Jacobian", found[1], J[index])):
            limit = min(ROUNDING * torch.finfo(b.dtype).eps, LARGEST) * float(b.abs().max())
            if a.shape != b.shape or not bool((a - b).abs().max() <= limit):
                return f"its {name} for a batch of {some.n}"
    return ""


# Operations whose derivatives ONNX lacks, or knows for one size of batch, by operations without these limits.


def _copy(into: Tensor, t: Tensor, non_blocking: bool = False) -> Tensor:
    return t.to(into).expand(into.shape).clone()


def _average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    axes: int,
) -> Any:
    """Average pooling as a convolution of each channel alone."""
    if ceil_mode:
        return NotImplemented
    flat, weight = x.reshape(-1, 1, *x.shape[-axes:]), x.new_ones(1, 1, *_repeat(kernel, axes))
    how = (_repeat(stride or kernel, axes), _repeat(padding, axes), [1] * axes, False, [0] * axes, 1)
    sums = torch.convolution(flat, weight, None, *how)
    count: Any = divisor_override
    if count is None:
        count = (
            weight.numel() if count_include_pad else torch.convolution(torch.ones_like(flat[:1]), weight, None, *how)
        )
    return (sums / count).reshape(*x.shape[:-axes], *sums.shape[2:])


def _max_pool_backward(grad: Tensor, x: Tensor, *how: Any, axes: int) -> Tensor:
    """Gradients go where the largest numbers came from."""
    indices = how[-1].flatten(-axes)
    return torch.zeros_like(x).flatten(-axes).scatter_add(-1, indices, grad.flatten(-axes)).view(x.shape)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution: a convolution for the input, and one matrix product by groups for the weight.

    Examples are groups in the gradient of the weight, and ONNX has no convolution of any number of groups.
    """
    axes = x.ndim - 2
    stride, padding, dilation = (_repeat(values, axes) for values in (stride, padding, dilation))
    kernel, to_x, to_weight, to_bias = weight.shape[2:], None, None, None
    if output_mask[0]:
        lengths = zip(x.shape[2:], grad.shape[2:], stride, padding, dilation, kernel, strict=True)
        rest = [0 if transposed else a - ((b - 1) * s - 2 * p + d * (k - 1) + 1) for a, b, s, p, d, k in lengths]
        to_x = torch.convolution(grad, weight, None, stride, padding, dilation, not transposed, rest, groups)
    if output_mask[1]:
        # The weight (a, b / groups, ...) joins b, in patches, with a.
        whole, other = (grad, x) if transposed else (x, grad)
        patches = _cut_patches(whole, kernel, other.shape[2:], stride, padding, dilation)
        (n, a), K, L = other.shape[:2], kernel.numel(), other.shape[2:].numel()
        b = whole.shape[1] // groups
        left = other.reshape(n, groups, a // groups, L).permute(1, 2, 0, 3).reshape(groups, a // groups, n * L)
        right = patches.reshape(n, groups, b * K, L).permute(1, 0, 3, 2).reshape(groups, n * L, b * K)
        to_weight = (left @ right).reshape(weight.shape)
    if output_mask[2]:
        to_bias = grad.sum([0, *range(2, grad.ndim)])
    return to_x, to_weight, to_bias


def _cut_patches(
    x: Tensor,
    kernel: Sequence[int],
    lengths: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """What a kernel sees at each place: x (n, b, ...) to (n, b, *kernel, *lengths)."""
    axes = len(kernel)
    # A transposed convolution may have outputs beyond the last place.
    x = F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    for i, (k, length, s, d) in enumerate(zip(kernel, lengths, stride, dilation, strict=True)):
        at = d * torch.arange(k, device=x.device)[:, None] + s * torch.arange(length, device=x.device)
        x = x.index_select(2 + 2 * i, at.flatten()).unflatten(2 + 2 * i, (k, length))
    return x.permute(0, 1, *range(2, 2 + 2 * axes, 2), *range(3, 2 + 2 * axes, 2))


def _repeat(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * axes if len(values) == 1 else list(values)
