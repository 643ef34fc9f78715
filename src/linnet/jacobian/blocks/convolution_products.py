"""A convolution's columns of the Jacobian multiplied by convolutions: neither rows nor patches are formed.

For input x, gradients g (n, c, ...) of the layer's output and a column v of the layer's weights, ``J v`` is
``g . conv(x, v)`` and ``J^T u`` the weight gradient of the convolution for the output gradient ``sum_c u_c g_c``: as
much work as a forward and a backward pass of the layer, whatever the number of outputs.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import Factor, Range, Rows, Size
from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.blocks.tiling import TEMPORARY, add_products

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@final
class Convolved(Factor):
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

    @property
    def size(self) -> Size:
        """Of its parameters alone: it is chosen already."""
        return Size(self.q)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def expand(self) -> Rows:
        rows = self.conv.rows(self.x, self.g)
        parts = [rows.unflatten(0, (self.n, -1)).sum(1)]
        return Rows(self.ranges, parts if self.bias is None else [*parts, self._joined()])

    def matmul(self, V: Tensor) -> Tensor:
        out = V.new_zeros(self.n, self.c, V.shape[1])
        self.add_matmul(V, out)
        return out

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        k, repeats = V.shape[1], len(self.x) // self.n
        W = self._by_column(V, self.weight).view(-1, self.conv.channels, *self.conv.kernel)
        W = W.contiguous(memory_format=self._format)
        b = None if self.bias is None else self._by_column(V, self.bias).flatten()
        for examples, x, g in self._pieces(k):
            h = self._forward(x, W, b).unflatten(1, (self.conv.groups, k, -1)).movedim(2, -1)
            h = h.movedim((1, 2), (-3, -2)) if self._last else h  # (.., *S', groups, dg, k)
            h = h.reshape(len(x), -1, k)
            if repeats == 1:
                add_products(out[examples], self._flat(g), h)
            else:
                out[examples] += (self._flat(g) @ h).unflatten(0, (-1, repeats)).sum(1)

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, write=False)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, write=True)

    def _rmatmul(self, U: Tensor, out: Tensor, *, write: bool) -> None:
        k, groups, repeats = U.shape[2], self.conv.groups, len(self.x) // self.n
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
        step = max(1, TEMPORARY // max(1, k * repeats * self.g.shape[2:].numel()))
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
