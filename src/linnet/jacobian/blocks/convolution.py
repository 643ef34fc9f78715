"""Per-example weight gradients of convolutions in one, two or three dimensions.

All ways are exact. *Patches* copies the strided patch view and multiplies batched. *Grouped* makes one weight gradient
of a convolution that has the batch as groups. *By taps*, one GPU kernel gathers the patches as it multiplies, and
writes the gradient with the channels last. Which is faster depends on device, precision and shape;
``python -m benchmarks.conv_rows`` times them.

Products with few columns form neither rows nor patches. For input x, gradients g (n, c, ...) of the layer's output and
a column v of the layer's weights, ``J v`` is ``g . conv(x, v)``, and ``J^T u`` is the weight gradient of the
convolution for the output gradient ``sum_c u_c g_c``: as much work as a forward and a backward pass of the layer,
whatever the number of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Range, Recipe, Size, add_products, temporary
from linnet.jacobian.cuda import triton_kernels

if TYPE_CHECKING:
    from linnet.jacobian.blocks.outer_product import OuterProductBlock


@dataclass(frozen=True)
class Convolution:
    """The numbers of a convolution.

    Attributes:
        kernel: Kernel size per dimension.
        channels: Input channels per group.
        groups: Groups.
        stride: Per dimension.
        dilation: Per dimension.
        padding: (before, after) per dimension.
    """

    kernel: tuple[int, ...]
    channels: int
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shape: Sequence[int], *, stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
        """From the weight's shape (out, in / groups, *kernel) and torch's arguments."""
        return _numbers(tuple(shape), _hashable(stride), _hashable(padding), _hashable(dilation), groups)

    @classmethod
    def _of(cls, shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
        kernel = shape[2:]
        d = len(kernel)
        dilations = _each(dilation, d)
        if padding == "same":  # torch puts the odd cell behind
            total = [s * (k - 1) for s, k in zip(dilations, kernel, strict=True)]
            pads = tuple((t // 2, t - t // 2) for t in total)
        else:
            pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, d))
        return cls(kernel, shape[1], groups, _each(stride, d), dilations, pads)

    def patches(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """What each output position sees: x (m, C, *S) to (m, groups, channels * prod(kernel), prod(out))."""
        x = self._pad(x)
        s = x.stride()
        steps = [t * u for t, u in zip(s[2:], self.dilation, strict=True)]
        jumps = [t * u for t, u in zip(s[2:], self.stride, strict=True)]
        view = x.as_strided((*x.shape[:2], *self.kernel, *out), (*s[:2], *steps, *jumps))
        return view.reshape(x.shape[0], self.groups, -1, prod(out))

    def sides(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides of the outer product: (m, groups, T, dx) and (m, c, groups, T, dg)."""
        return self.patches(x, g.shape[3:]).mT, self._by_group(g).mT

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        """Per-example weight gradients: x (m, C, *S), g (m, c, out, *S') to (m, c, prod(weight shape))."""
        return self._rows_grouped(x, g) if self._prefers_grouped(x, g) else self._rows_patches(x, g)

    def by_taps(self, x: Tensor, g: Tensor) -> Tensor | None:
        """Per-example weight gradients with the channels last, (m c, out, taps, channels), by one GPU kernel.

        None where it cannot serve: it needs tf32, two dimensions, no groups and even padding.
        """
        even = all(before == after for before, after in self.padding)
        if len(self.kernel) != 2 or self.groups > 1 or not even or prod(self.kernel) == 1:
            return None
        if not triton_kernels.available(x) or not _tf32():
            return None
        rows = triton_kernels.conv_rows(self, x, g.flatten(1, 2))
        return rows.view(-1, g.shape[2], prod(self.kernel), self.channels)

    def _rows_patches(self, x: Tensor, g: Tensor) -> Tensor:
        m, c = g.shape[:2]
        left = self._by_group(g).transpose(1, 2).flatten(2, 3)  # (m, groups, c dg, T)
        width = self.channels * prod(self.kernel)
        rows = x.new_empty(m, self.groups, left.shape[2], width)
        # On the CPU few examples at a time, so that the patches stay in its cache.
        size = width * self.groups * left.shape[3] * x.element_size()
        step = max(1, 2**21 // max(1, size)) if x.device.type == "cpu" else m
        for start in range(0, m, step):
            s = slice(start, start + step)
            right = self.patches(x[s], g.shape[3:]).mT  # (m', groups, T, dx)
            torch.bmm(left[s].flatten(0, 1), right.flatten(0, 1), out=rows[s].flatten(0, 1))
        rows = rows.unflatten(2, (c, -1))  # (m, groups, c, dg, dx)
        return rows.transpose(1, 2).flatten(2) if self.groups > 1 else rows.view(m, c, -1)

    def _rows_grouped(self, x: Tensor, g: Tensor) -> Tensor:
        m, c = g.shape[:2]
        x, padding = self.padded(x)
        left = self._by_group(g).transpose(1, 2)  # (m, groups, c, dg, T)
        flat = left.reshape(1, -1, *g.shape[3:])
        weight = x.new_empty(flat.shape[1], self.channels, *self.kernel)
        none = [0] * len(self.kernel)
        _, rows, _ = torch.ops.aten.convolution_backward(
            flat,
            x.reshape(1, -1, *x.shape[2:]),
            weight,
            None,
            list(self.stride),
            padding,
            list(self.dilation),
            False,
            none,
            m * self.groups,
            [False, True, False],
        )
        rows = rows.view(m, self.groups, c, -1)
        return rows.transpose(1, 2).reshape(m, c, -1)

    def padded(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """The input and the padding that torch's own functions are left to add: none where it is uneven."""
        if any(before != after for before, after in self.padding):
            return self._pad(x), [0] * len(self.kernel)
        return x, [before for before, _ in self.padding]

    def channels_last(self, g: Tensor) -> bool:
        """Whether torch convolves faster with the channels last in memory: its float32 convolutions on a CPU."""
        return len(self.kernel) == 2 and g.is_cpu and g.dtype == torch.float32

    def _prefers_grouped(self, x: Tensor, g: Tensor) -> bool:
        """From the timings of ``benchmarks.conv_rows``: one grouped call wins where it meets tuned kernels."""
        if x.dtype != torch.float32 or prod(self.kernel) == 1:
            return False
        T = prod(g.shape[3:])
        if x.device.type == "cpu":  # unless the gradient takes longer to write than to compute
            small = g.shape[2] * self.channels * prod(self.kernel) <= 64 * T
            return self.channels >= 8 and len(self.kernel) == 2 and small
        return _tf32() and self.channels >= 16 and T >= 256

    def _by_group(self, g: Tensor) -> Tensor:
        """(m, c, out, *S') to (m, c, groups, dg, T)."""
        return g.unflatten(2, (self.groups, -1)).flatten(4)

    def _pad(self, x: Tensor) -> Tensor:
        if not any(max(p) for p in self.padding):
            return x.contiguous()
        return F.pad(x, [size for pair in reversed(self.padding) for size in pair]).contiguous()


def _tf32() -> bool:
    return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def _numbers(shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
    return Convolution._of(shape, stride, padding, dilation, groups)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _each(value: Any, d: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * d if len(values) == 1 else values


@final
class LazyBlock(ColumnBlock):
    """Columns whose rows come from a function, formed when they are first asked for (convolutions).

    Args:
        ranges: Where the columns lie.
        rows: Gives one (n, c, q) tensor per range.
        outer: Gives the same columns as an `OuterProductBlock` (patches), or None where there is none.
        size: The numbers of that outer product.
        held: The tensors that the functions hold on to: the input and the gradient that the rule was given.
        products: Gives the form that is best for products where it is neither rows nor an outer product, else None.
        few: Gives the form that is best for products with few columns, in place of the outer product.
        last: The axes of what is held that such products are faster with as the last ones in memory.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        rows: Callable[[], Sequence[Tensor]],
        *,
        n: int,
        c: int,
        size: Size,
        held: tuple[Tensor, ...],
        outer: Callable[[], OuterProductBlock] | None = None,
        products: Callable[[], ColumnBlock | None] | None = None,
        few: Callable[[], ColumnBlock] | None = None,
        last: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(ranges, n=n, c=c)
        self._rows, self._outer, self._size, self._held = rows, outer, size, held
        self._products, self._few, self.last = products, few, last
        self.again: Recipe | None = None

    @property
    def size(self) -> Size:
        return self._size

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held

    @property
    def recipe(self) -> Recipe | None:
        return self.again

    def expand(self) -> DenseBlock:
        return DenseBlock(self.ranges, self._rows())

    def _converted(self, dtype: torch.dtype) -> LazyBlock:
        """The same block, whose rows and patches are made in their own dtype and converted when they are there."""

        def convert(make: Callable[[], ColumnBlock | None] | None) -> Callable[[], Any] | None:
            if make is None:
                return None
            return lambda: None if (found := make()) is None else found.in_dtype(dtype)

        return LazyBlock(
            self.ranges,
            lambda: [part.to(dtype) for part in self._rows()],
            n=self.n,
            c=self.c,
            size=self._size,
            held=self._held,
            outer=convert(self._outer),
            products=convert(self._products),
            few=convert(self._few),
            last=self.last,
        )

    def for_products(self) -> ColumnBlock:
        """Rows, in the order that is cheapest to write."""
        found = None if self._products is None else self._products()
        return self.expand() if found is None else found

    def as_outer_product(self) -> ColumnBlock:
        """The outer-product form where there is one."""
        return self if self._outer is None else self._outer()

    def for_few(self) -> ColumnBlock:
        """What multiplies few columns without rows: the outer product, unless there is a better form."""
        return self.as_outer_product() if self._few is None else self._few()


@final
class ChannelsLastBlock(ColumnBlock):
    """Rows of a convolution with the channels last, which is cheaper to write; for products.

    Args:
        weight: Range of the weight, laid out as (out, channels, taps).
        rows: (n c, out, taps, channels).
        n: Examples.
        bias: Range of the bias and its rows (n, c, out), or None.
    """

    def __init__(self, weight: Range, rows: Tensor, *, n: int, bias: tuple[Range, Tensor] | None = None) -> None:
        self._others = [] if bias is None else [DenseBlock([bias[0]], [bias[1]])]
        ranges = [weight, *(r for f in self._others for r in f.ranges)]
        super().__init__(ranges, n=n, c=rows.shape[0] // n)
        self._weight, self._rows = weight, rows

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._rows, *(t for f in self._others for t in f.tensors()))

    def expand(self) -> DenseBlock:
        rows = self._rows.transpose(2, 3).reshape(self.n, self.c, -1)
        return DenseBlock(self.ranges, [rows, *(t for f in self._others for t in f.tensors())])

    def _converted(self, dtype: torch.dtype) -> ChannelsLastBlock:
        bias = [(f.ranges[0], f.parts[0].to(dtype)) for f in self._others]
        return ChannelsLastBlock(self._weight, self._rows.to(dtype), n=self.n, bias=bias[0] if bias else None)

    def _columns(self, V: Tensor) -> Tensor:
        """The weight's part of V (p, k) with the channels after the taps, as a view."""
        out, taps, channels = self._rows.shape[1:]
        return V[slice(*self._weight)].view(out, channels, taps, -1).transpose(1, 2)

    def matmul(self, V: Tensor) -> Tensor:
        total = self._rows.flatten(1) @ self._columns(V).reshape(-1, V.shape[1])
        return sum((f.matmul(V) for f in self._others), start=total.view(self.n, self.c, -1))

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        columns = self._columns(out)
        columns += (self._rows.flatten(1).T @ U.reshape(self.n * self.c, -1)).view(columns.shape)
        for f in self._others:
            f.rmatmul(U, out)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        columns = self._columns(out)
        columns.copy_((self._rows.flatten(1).T @ U.reshape(self.n * self.c, -1)).view(columns.shape))
        for f in self._others:
            f.write_rmatmul(U, out)


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@final
class ConvolvedBlock(ColumnBlock):
    """See the module; for products with few columns.

    Args:
        conv: The numbers of the convolution.
        x: Its input, (n r, C, ...), r uses of the layer for each example.
        g: Gradients of its output, (n r, c, out, ...).
        n: Examples.
        weight: Range of the weight, laid out as (out, channels, kernel).
        bias: Range of the bias, or None.
    """

    def __init__(
        self, conv: Convolution, x: Tensor, g: Tensor, *, n: int, weight: Range, bias: Range | None = None
    ) -> None:
        super().__init__([weight] if bias is None else [weight, bias], n=n, c=g.shape[1])
        self.conv, self.x, self.g = conv, x, g
        self.weight, self.bias = weight, bias

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def _converted(self, dtype: torch.dtype) -> ConvolvedBlock:
        """The block itself: it convolves in its own dtype, and products are converted."""
        return self

    def expand(self) -> DenseBlock:
        rows = self.conv.rows(self.x, self.g)
        parts = [rows.unflatten(0, (self.n, -1)).sum(1)]
        return DenseBlock(self.ranges, parts if self.bias is None else [*parts, self._joined()])

    def matmul(self, V: Tensor) -> Tensor:
        out = V.new_zeros(self.n, self.c, V.shape[1])
        self.add_matmul(V, out)
        return out

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        V, k, repeats = V.to(self.x.dtype), V.shape[1], len(self.x) // self.n
        W = self._by_column(V, self.weight).view(-1, self.conv.channels, *self.conv.kernel)
        W = W.contiguous(memory_format=self._format)
        b = None if self.bias is None else self._by_column(V, self.bias).flatten()
        for examples, x, g in self._pieces(k):
            h = self._forward(x, W, b).unflatten(1, (self.conv.groups, k, -1)).movedim(2, -1)
            h = h.movedim((1, 2), (-3, -2)) if self._last else h  # (.., *S', groups, dg, k)
            h = h.reshape(len(x), -1, k)
            if repeats == 1 and out.dtype == h.dtype:
                add_products(out[examples], self._flat(g), h)
            else:
                out[examples] += (self._flat(g) @ h).unflatten(0, (-1, repeats)).sum(1)

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, write=False)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, write=True)

    def _rmatmul(self, U: Tensor, out: Tensor, *, write: bool) -> None:
        U, k, groups, repeats = U.to(self.x.dtype), U.shape[2], self.conv.groups, len(self.x) // self.n
        for examples, x, g in self._pieces(k):
            u = U[examples].repeat_interleave(repeats, 0).mT if repeats > 1 else U[examples].mT  # (.., k, c)
            h = self._output(u @ self._flat(g), g.shape[3:])
            for r, found in zip(self.ranges, self._gradients(x, h), strict=True):
                columns = found.unflatten(0, (groups, k, -1)).movedim(1, -1)  # (groups, dg, .., k)
                target = out[slice(*r)].view(columns.shape)
                _ = target.copy_(columns) if write else target.add_(columns)
            write = False

    @property
    def _last(self) -> bool:
        """Whether the channels of g are the last axis in memory; the flat order of outputs is that of memory."""
        return self.g.ndim == 5 and self.g.stride(2) == 1 and self.g.stride(4) > 1

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self._last else torch.contiguous_format

    def _flat(self, g: Tensor) -> Tensor:
        """(.., c, out, *S') to (.., c, flat)."""
        return (g.movedim(2, -1) if self._last else g).flatten(2)

    def _output(self, flat: Tensor, shape: torch.Size) -> Tensor:
        """k gradients of the output for each use, (.., k, flat), as one gradient (.., groups k dg, *S')."""
        k, groups = flat.shape[1], self.conv.groups
        if self._last:
            h = flat.view(len(flat), k, *shape, groups, -1).movedim(1, -2)
            return h.flatten(-3).movedim(-1, 1)
        return flat.view(len(flat), k, groups, -1, *shape).transpose(1, 2).flatten(1, 3)

    def _by_column(self, V: Tensor, r: Range) -> Tensor:
        """A range of V (p, k), of the weight or the bias, as (groups, k, dg * ...)."""
        return V[slice(*r)].view(self.conv.groups, -1, V.shape[1]).transpose(1, 2).contiguous()

    def _joined(self) -> Tensor:
        """The bias's rows, (n, c, out)."""
        return self.g.sum(tuple(range(3, self.g.ndim))).unflatten(0, (self.n, -1)).sum(1)

    def _pieces(self, k: int) -> list[tuple[slice, Tensor, Tensor]]:
        """Examples with their inputs and gradients, few enough for k outputs of the layer."""
        repeats = len(self.x) // self.n
        step = max(1, temporary() // max(1, k * repeats * self.g.shape[2:].numel()))
        if step >= self.n:
            return [(slice(None), self.x, self.g)]
        found = []
        for start in range(0, self.n, step):
            s = slice(start, min(start + step, self.n))
            rows = slice(s.start * repeats, s.stop * repeats)
            found.append((s, self.x[rows], self.g[rows]))
        return found

    def _forward(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        x, padding = self.conv.padded(x)
        c = self.conv
        return _CONV[len(c.kernel)](x, W, b, c.stride, padding, c.dilation, c.groups)

    def _gradients(self, x: Tensor, h: Tensor) -> list[Tensor]:
        """Of the weight and, where there is one, the bias, for gradients h of the output."""
        x, padding = self.conv.padded(x)
        c, biased = self.conv, self.bias is not None
        W = torch.empty(h.shape[1], c.channels, *c.kernel, dtype=x.dtype, device=x.device, memory_format=self._format)
        none, sizes = [0] * len(c.kernel), [h.shape[1]] if biased else None
        _, *found = torch.ops.aten.convolution_backward(
            h, x, W, sizes, list(c.stride), padding, list(c.dilation), False, none, c.groups, [False, True, biased]
        )
        return found[: len(self.ranges)]
