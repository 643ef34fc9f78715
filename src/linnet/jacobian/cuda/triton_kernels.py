"""GPU kernels for three sums that torch has no fast call for.

The kernels are written in Triton, which CUDA builds of torch include. The kernels compute the same sums as the torch
code in `linnet.jacobian.blocks.convolution`, `linnet.jacobian.layers` and `linnet.jacobian.column_moments`.
``tests/jacobian/cuda/test_triton_kernels.py`` compares both on a GPU.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:  # CPU builds of torch have no Triton
    triton = None

if TYPE_CHECKING:
    from linnet.jacobian.blocks.convolution import Convolution


def available(t: Tensor) -> bool:
    """Whether the kernels can read a tensor: float32 on a GPU, with Triton installed."""
    return triton is not None and t.is_cuda and t.dtype == torch.float32


if triton is not None:

    @triton.jit
    def _conv_rows(  # type: ignore[no-untyped-def]
        x_ptr, g_ptr, out_ptr,
        outs, height, width, T, columns,
        xn, xc, xh, xw, gn, gc, gh, gw,
        OUT_WIDTH: tl.constexpr, CHANNELS: tl.constexpr, KW: tl.constexpr,
        STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
        PAD_H: tl.constexpr, PAD_W: tl.constexpr,
        DIL_H: tl.constexpr, DIL_W: tl.constexpr,
        BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_T: tl.constexpr,
    ):  # fmt: skip
        # One example: (outs x T) times (T x columns), the right side gathered; columns are (tap, channel).
        tile = tl.program_id(0)
        n = tl.program_id(1).to(tl.int64)
        across = tl.cdiv(columns, BLOCK_J)
        o = (tile // across) * BLOCK_O + tl.arange(0, BLOCK_O)
        j = (tile % across) * BLOCK_J + tl.arange(0, BLOCK_J)
        tap = j // CHANNELS
        dy = (tap // KW) * DIL_H - PAD_H
        dx = (tap % KW) * DIL_W - PAD_W
        x_base = x_ptr + n * xn + (j % CHANNELS) * xc + dy * xh + dx * xw
        g_base = g_ptr + n * gn + o * gc
        total = tl.zeros((BLOCK_O, BLOCK_J), dtype=tl.float32)
        for start in range(0, T, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            row = t // OUT_WIDTH
            col = t % OUT_WIDTH
            g_mask = (o < outs)[:, None] & (t < T)[None, :]
            g = tl.load(g_base[:, None] + (row * gh + col * gw)[None, :], mask=g_mask, other=0.0)
            y = (row * STRIDE_H)[:, None] + dy[None, :]
            z = (col * STRIDE_W)[:, None] + dx[None, :]
            inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
            x_mask = inside & (t < T)[:, None] & (j < columns)[None, :]
            x_at = x_base[None, :] + (row * STRIDE_H * xh + col * STRIDE_W * xw)[:, None]
            x = tl.load(x_at, mask=x_mask, other=0.0)
            total = tl.dot(g, x, total, input_precision="tf32")
        at = out_ptr + (n * outs + o[:, None]) * columns + j[None, :]
        tl.store(at, total, mask=(o < outs)[:, None] & (j < columns)[None, :])

    @triton.jit
    def _channel_sums(  # type: ignore[no-untyped-def]
        x_ptr, g_ptr, mean_ptr, weight_ptr, bias_ptr,
        channels, size,
        xn, xc, xs, gn, gc, gs,
        BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(1).to(tl.int64)
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        mean = tl.load(mean_ptr + c, mask=c < channels, other=0.0)
        weight = tl.zeros((BLOCK_C,), dtype=tl.float32)
        bias = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for start in range(0, size, BLOCK_S):
            s = start + tl.arange(0, BLOCK_S)
            mask = (c < channels)[:, None] & (s < size)[None, :]
            x = tl.load(x_ptr + n * xn + c[:, None] * xc + s[None, :] * xs, mask=mask, other=0.0)
            g = tl.load(g_ptr + n * gn + c[:, None] * gc + s[None, :] * gs, mask=mask, other=0.0)
            weight += tl.sum(g * (x - mean[:, None]), 1)
            bias += tl.sum(g, 1)
        tl.store(weight_ptr + n * channels + c, weight, mask=c < channels)
        tl.store(bias_ptr + n * channels + c, bias, mask=c < channels)

    @triton.jit
    def _column_sums(  # type: ignore[no-untyped-def]
        x_ptr, center_ptr, sum_ptr, squares_ptr,
        rows, columns, stride, per_part,
        BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        part = tl.program_id(1)
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        center = tl.load(center_ptr + c, mask=c < columns, other=0.0).to(tl.float64)
        total = tl.zeros((BLOCK_C,), dtype=tl.float64)
        squares = tl.zeros((BLOCK_C,), dtype=tl.float64)
        first = part * per_part
        last = tl.minimum(first + per_part, rows)
        for start in range(first, last, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            mask = (r < last)[:, None] & (c < columns)[None, :]
            x = tl.load(x_ptr + r.to(tl.int64)[:, None] * stride + c[None, :], mask=mask, other=0.0)
            d = tl.where(mask, x.to(tl.float64) - center[None, :], 0.0)
            total += tl.sum(d, 0)
            squares += tl.sum(d * d, 0)
        at = part.to(tl.int64) * columns + c
        tl.store(sum_ptr + at, total, mask=c < columns)
        tl.store(squares_ptr + at, squares, mask=c < columns)


def conv_rows(conv: Convolution, x: Tensor, g: Tensor) -> Tensor:
    """Weight gradients of a 2-d convolution without groups for each example, in tf32.

    The axes of the kernel come before the channels. Three tf32 products of split numbers would be as accurate as
    float32, and no faster than the torch code for float32.

    Args:
        conv: Sizes of the convolution. The padding is the same on both sides.
        x: (m, C, H, W), any strides.
        g: (m, out, H', W'), any strides.

    Returns:
        (m, out, prod(kernel), C).
    """
    (m, channels, height, width), outs = x.shape, g.shape[1]
    taps, T = prod(conv.kernel), g.shape[2] * g.shape[3]
    out = x.new_empty(m, outs, taps, channels)
    last = x.stride(1) == 1 and channels > 1  # channels lie side by side; blocks as timed on an H200
    block_o = min(32 if last else 64, max(16, triton.next_power_of_2(outs)))
    block_j = 128 if last else 64
    grid = (triton.cdiv(outs, block_o) * triton.cdiv(taps * channels, block_j), m)
    with torch.cuda.device(x.device):
        _conv_rows[grid](
            x, g, out, outs, height, width, T, taps * channels, *x.stride(), *g.stride(),
            OUT_WIDTH=g.shape[3], CHANNELS=channels, KW=conv.kernel[1],
            STRIDE_H=conv.stride[0], STRIDE_W=conv.stride[1],
            PAD_H=conv.padding[0][0], PAD_W=conv.padding[1][0],
            DIL_H=conv.dilation[0], DIL_W=conv.dilation[1],
            BLOCK_O=block_o, BLOCK_J=block_j, BLOCK_T=32, num_warps=4, num_stages=2 if last else 3,
        )  # fmt: skip
    return out


def channel_sums(x: Tensor, g: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over positions of ``g * (x - mean)`` and of ``g``, each (m, C). The inputs are read once.

    Args:
        x: (m, C, S), any strides.
        g: (m, C, S), any strides.
        mean: (C,).
    """
    m, channels, size = x.shape
    weight, bias = x.new_empty(m, channels), x.new_empty(m, channels)
    last = x.stride(1) == 1 and channels > 1  # channels lie side by side
    block_c = min(64 if last else 16, triton.next_power_of_2(channels))
    block_s = min(64 if last else 256, max(16, triton.next_power_of_2(size)))
    grid = (triton.cdiv(channels, block_c), m)
    with torch.cuda.device(x.device):
        _channel_sums[grid](
            x,
            g,
            mean,
            weight,
            bias,
            channels,
            size,
            *x.stride(),
            *g.stride(),
            BLOCK_C=block_c,
            BLOCK_S=block_s,
        )
    return weight, bias


def column_sums(X: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows of ``X - center`` and of its squares, each (q,) in float64. X is read once.

    Args:
        X: (m, q). The numbers of a row are contiguous.
        center: (q,).
    """
    m, q = X.shape
    block = 128
    # Rows are split too if the columns alone would leave multiprocessors idle.
    parts = min(triton.cdiv(m, 32), max(1, triton.cdiv(2048, triton.cdiv(q, block))))
    per_part = triton.cdiv(m, parts)
    sums, squares = (torch.empty(parts, q, dtype=torch.float64, device=X.device) for _ in range(2))
    with torch.cuda.device(X.device):
        _column_sums[(triton.cdiv(q, block), parts)](
            X, center.contiguous(), sums, squares, m, q, X.stride(0), per_part, BLOCK_R=16, BLOCK_C=block
        )
    return sums.sum(0), squares.sum(0)
