"""Ways to form per-example convolution weight gradients, side by side, per layer shape of WRN-40-2.

    python -m benchmarks.conv_rows --device cuda

Prints milliseconds per way and layer, for IEEE float32 and for tf32, next to the ordinary (summed) weight gradient.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import milliseconds
from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.cuda import triton_kernels

SHAPES = (
    (16, 32, 32, 1),
    (32, 32, 32, 1),
    (64, 64, 16, 1),
    (128, 128, 8, 1),
    (32, 64, 32, 2),
    (3, 16, 32, 1),
)


def grouped(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """One weight gradient of a convolution with the batch as groups."""
    n, ci, co = a.shape[0], a.shape[1], g.shape[1]
    w = a.new_empty(n * co, ci, 3, 3)
    args = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], n, [False, True, False])
    flat_g, flat_a = g.reshape(1, n * co, *g.shape[2:]), a.reshape(1, n * ci, *a.shape[2:])
    return torch.ops.aten.convolution_backward(flat_g, flat_a, w, None, *args)[1]


def patches(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """Copy of the strided patch view, then one batched product."""
    n, ci = a.shape[:2]
    ho, wo = g.shape[2:]
    s = (pad := F.pad(a, (1, 1, 1, 1))).stride()
    view = pad.as_strided((n, ci, 3, 3, ho, wo), (s[0], s[1], s[2], s[3], s[2] * stride, s[3] * stride))
    return g.flatten(2) @ view.reshape(n, ci * 9, ho * wo).mT


def patches_last(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """The same with channels last: the copy moves runs of channels."""
    n, ci = a.shape[:2]
    ho, wo = g.shape[2:]
    pad = F.pad(a.permute(0, 2, 3, 1).contiguous(), (0, 0, 1, 1, 1, 1))
    s = pad.stride()
    view = pad.as_strided((n, ho, wo, 3, 3, ci), (s[0], s[1] * stride, s[2] * stride, s[1], s[2], s[3]))
    return g.flatten(2) @ view.reshape(n, ho * wo, 9 * ci)


def shifts(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """Nine batched products of shifted flat views, no patch copy (stride 1 only)."""
    if stride != 1:
        return patches(a, g, stride)
    n, ci, _, w = a.shape
    flat = F.pad(a, (1, 1, 1, 2)).flatten(2)
    wide = F.pad(g, (0, 2)).flatten(2)
    out = a.new_empty(9, n, g.shape[1], ci)
    for i in range(3):
        for j in range(3):
            start = i * (w + 2) + j
            torch.bmm(wide, flat[:, :, start : start + wide.shape[2]].mT, out=out[3 * i + j])
    return out


def taps(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """linnet's GPU kernel, which works in tf32 (patches where it cannot serve)."""
    if not triton_kernels.available(a):
        return patches(a, g, stride)
    shape = (g.shape[1], a.shape[1], 3, 3)
    return triton_kernels.conv_rows(Convolution.of(shape, stride=stride, padding=1, dilation=1, groups=1), a, g)


def summed(a: Tensor, g: Tensor, stride: int) -> Tensor:
    """The ordinary weight gradient."""
    w = a.new_empty(g.shape[1], a.shape[1], 3, 3)
    args = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(g, a, w, None, *args)[1]


def summed_last(a: Tensor, g: Tensor, stride: int) -> Tensor:
    return summed(
        a.contiguous(memory_format=torch.channels_last),
        g.contiguous(memory_format=torch.channels_last),
        stride,
    )


WAYS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    f.__name__: f for f in (summed, summed_last, grouped, patches, patches_last, shifts, taps)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    for tf32 in (False, True) if args.device == "cuda" else (False,):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        for ci, co, size, stride in SHAPES:
            a = torch.randn(args.batch, ci, size, size, device=args.device)
            g = torch.randn(args.batch, co, size // stride, size // stride, device=args.device)
            ways = {name: partial(f, a, g, stride) for name, f in WAYS.items()}
            row = {name: round(ms, 3) for name, ms in milliseconds(ways, args.device, rounds=7).items()}
            print(
                json.dumps({"tf32": tf32, "ci": ci, "co": co, "size": size, "stride": stride} | row),
                flush=True,
            )


if __name__ == "__main__":
    main()
