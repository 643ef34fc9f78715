"""Per-example weight gradients of convolutions in one, two or three dimensions.

All ways are exact. *Patches* copies the strided patch view and multiplies batched. *Grouped* makes one weight gradient
of a convolution that has the batch as groups. *By taps*, one GPU kernel gathers the patches as it multiplies, and
writes the gradient with the channels last. Which is faster depends on device, precision and shape;
``python -m benchmarks.conv_rows`` times them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.cuda import triton_kernels


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
