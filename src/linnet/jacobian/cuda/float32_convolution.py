"""Convolutions of a network in float32 on a GPU, each by the fastest exact algorithm.

Without tensor cores, cuDNN's choice of algorithm can be several times slower than another algorithm for the same sums.
This happens in two cases. The gradient of the input is itself a convolution, and is faster as one. For images of a few
positions, one product of matrices is faster than any convolution. ``python -m benchmarks.convolutions --device cuda``
times the algorithms.

cuDNN also chooses by the number of images, and each algorithm rounds in its own way. Rounding can move an activation
across the kink of a ReLU, and then the rows of that example move too. If the inputs of a trained ResNet-18 are off by
1e-6, some rows move by 2e-3, so passes with other chunks may see another Jacobian. *Steady* layers add up in float64
and round once: their outputs do not depend on the rest of the batch. Steady layers serve where a matrix from one pass
is combined with products from another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linnet.jacobian.blocks.autodiff import LAYERS, in_tangents, unpacked, with_tangent
from linnet.jacobian.layers.rule import CONVOLUTION, named

Pair = tuple[int, int]

DEVICE = "cuda"

WORTH = 2**29
"""Smallest number of multiply-adds of a call for which another algorithm is worth its extra kernel launches."""

FEW = 16
"""Largest number of positions of an output for which a product of matrices is faster than cuDNN."""

WIDE = 256
"""Smallest number of channels for which a product of matrices is faster than cuDNN."""

ENTRIES = 2**27
"""Entries of the float64 patches that are made at once: more take more memory, fewer take more calls."""


@final
class ExactConvolution(TorchFunctionMode):
    """A context in which `convolve` computes large 2-d convolutions of CUDA tensors in float32.

    Args:
        steady: Whether all convolutions and linear layers add up their outputs in float64.
    """

    def __init__(self, *, steady: bool = False) -> None:
        super().__init__()
        self.steady = steady

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        steady = self.steady and not in_tangents()  # derivatives have no kinks
        a = named(CONVOLUTION, args, kwargs) if func is torch.conv2d else None
        if a is not None and _serves(a, worth=0 if steady else WORTH):
            steps = a.get("stride", 1), a.get("padding", 0)
            return convolve(a["input"], a["weight"], a.get("bias"), *steps, steady=steady)
        if steady and func in LAYERS:
            return _in_double(func, args, kwargs)
        return func(*args, **kwargs)


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *,
    steady: bool = False,
) -> Tensor:
    """``torch.conv2d`` without groups and dilation, (n, C, h, w) to (n, C', h', w'), and its derivatives.

    Args:
        input: (n, C, h, w).
        weight: (C', C, kh, kw).
        bias: (C',) or None.
        stride: One number, or one for each axis.
        padding: Width of the border of zeros: one number, or one for each axis.
        steady: Whether the outputs are added up in float64, as the module says.

    >>> x, w = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3)
    >>> bool(torch.allclose(convolve(x, w, padding=1), torch.conv2d(x, w, padding=1), atol=1e-5))
    True
    """
    steps = _pair(stride), _pair(padding)

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        # The gradient of the weight has its own node, so that it is computed only if the weight asks for it.
        beside = _Weight.apply(x.detach(), w, *steps) if w.requires_grad else None
        return _Input.apply(x, w.detach(), b, beside, *steps, steady and not in_tangents())

    x, w, b = unpacked(input), unpacked(weight), unpacked(bias)
    return with_tangent(layer(x[0], w[0], b[0]), layer, x, w, b)


@final
class _Input(torch.autograd.Function):
    """The convolution as a function of its input. The gradient of the output also goes to ``beside``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        beside: Tensor | None,
        stride: Pair,
        padding: Pair,
        exact: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.padding = stride, padding
        return (_steady if exact else _forward)(x, w, b, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dx, wanted = None, ctx.needs_input_grad
        if wanted[0]:
            x, w = ctx.saved_tensors
            if _turns(w, ctx.stride, ctx.padding):
                around = (w.shape[2] - 1 - ctx.padding[0], w.shape[3] - 1 - ctx.padding[1])
                dx = _forward(g, w.flip(2, 3).transpose(0, 1), None, (1, 1), around)
            else:
                dx = _backward(g, x, w, ctx.stride, ctx.padding, [True, False, False])[0]
        return dx, None, g.sum((0, 2, 3)) if wanted[2] else None, g if wanted[3] else None, None, None, None


@final
class _Weight(torch.autograd.Function):
    """Zeros in the shape of the convolution, with its derivative in the weight. The zeros take no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.padding = stride, padding
        return x.new_zeros(()).expand(len(x), len(w), *_size(x, w, stride, padding))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return None, _backward(g, x, w, ctx.stride, ctx.padding, [False, True, False])[1], None, None


def _backward(g: Tensor, x: Tensor, w: Tensor, stride: Pair, padding: Pair, mask: list[bool]) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, (1, 1), False, (0, 0), 1, mask)


def _size(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> list[int]:
    return [(s + 2 * p - k) // t + 1 for s, p, k, t in zip(x.shape[2:], padding, w.shape[2:], stride, strict=True)]


def _forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    size = _size(x, w, stride, padding)
    if prod(size) > FEW or min(w.shape[:2]) < WIDE or tuple(w.shape[2:]) == (1, 1):
        return torch.conv2d(x, w, b, stride, padding)
    return _product(x, w, b, stride, padding)


def _product(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution as one product of matrices."""
    size = _size(x, w, stride, padding)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    patches = x.unfold(2, w.shape[2], stride[0]).unfold(3, w.shape[3], stride[1])  # (n, C, *out, *kernel)
    y = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, w[0].numel()) @ w.reshape(len(w), -1).T
    y = y if b is None else y + b
    return y.view(len(x), *size, -1).permute(0, 3, 1, 2).contiguous()


def _steady(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution, added up in float64 and rounded once."""
    size = _size(x, w, stride, padding)
    y = x.new_empty(len(x), len(w), *size)
    weight, bias = w.double(), None if b is None else b.double()
    for some in range(0, len(x), step := max(1, ENTRIES // (prod(size) * w[0].numel()))):
        y[some : some + step] = _product(x[some : some + step].double(), weight, bias, stride, padding)
    return y


def _in_double(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer and its derivatives in float64, rounded at the end. A layer without float32 tensors runs as it is."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if {t.dtype for t in tensors} != {torch.float32}:
        return func(*args, **kwargs)
    more = [t.double() if isinstance(t, Tensor) else t for t in args]
    return func(*more, **{k: t.double() if isinstance(t, Tensor) else t for k, t in kwargs.items()}).float()


def _turns(w: Tensor, stride: Pair, padding: Pair) -> bool:
    """Whether the input's gradient is itself a convolution, with the kernel turned around."""
    return stride == (1, 1) and all(p < k for p, k in zip(padding, w.shape[2:], strict=True))


def _serves(a: Mapping[str, Any], *, worth: int) -> bool:
    """Whether `convolve` can compute the call with these arguments, and saves more than its kernel launches cost."""
    x, w, padding = a["input"], a["weight"], a.get("padding", 0)
    plain = a.get("groups", 1) == 1 and _pair(a.get("dilation", 1)) == (1, 1) and not isinstance(padding, str)
    if not plain or x.ndim != 4 or x.device.type != DEVICE or {x.dtype, w.dtype} != {torch.float32}:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return len(x) * prod(x.shape[2:]) * w.numel() >= worth * prod(_pair(a.get("stride", 1)))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
