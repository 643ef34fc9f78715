"""Convolutions in IEEE float32: the library's own way beside others, layer by layer, and a whole pass.

    python -m benchmarks.convolutions --device cuda

Prints TFLOP/s of each way for a layer's output and for the gradient of its input; then the seconds of ``J^T B J V`` of
ResNet-18 with 100 outputs and 16 columns, as linnet makes it and without its own convolutions and shared outputs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import linnet
import linnet._common.torch_settings
from benchmarks.models import Model, ResNet18
from benchmarks.timing import machine, milliseconds
from linnet.jacobian.cuda import float32_convolution

SHAPES = (
    (64, 64, 32, 1),
    (128, 128, 16, 1),
    (256, 256, 8, 1),
    (512, 512, 4, 1),
    (128, 128, 4, 1),
    (64, 64, 4, 1),
    (64, 64, 8, 1),
    (512, 512, 8, 1),
    (512, 512, 7, 1),
    (256, 256, 14, 1),
    (16, 16, 32, 1),
    (32, 32, 16, 1),
    (64, 128, 32, 2),
    (128, 256, 16, 2),
    (256, 512, 8, 2),
)
"""Input channels, output channels, side of the image, stride."""


def ways(n: int, shape: tuple[int, int, int, int], device: str) -> dict[str, float]:
    """TFLOP/s by way."""
    before, behind, side, stride = shape
    x = torch.randn(n, before, side, side, device=device)
    w = torch.randn(behind, before, 3, 3, device=device)
    g = torch.randn(n, behind, side // stride, side // stride, device=device)
    turned = w.flip(2, 3).transpose(0, 1)

    def back(mask: list[bool]) -> Tensor:
        steps = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(g, x, w, None, *steps)

    def product(x: Tensor, w: Tensor, stride: int) -> Tensor:
        with mock.patch.object(float32_convolution, "FEW", 10**9), mock.patch.object(float32_convolution, "WIDE", 1):
            return float32_convolution._forward(x, w, None, (stride, stride), (1, 1))

    found: dict[str, Callable[[], object]] = {
        "output": partial(torch.conv2d, x, w, None, stride, 1),
        "output, product": partial(product, x, w, stride),
        "input's gradient": partial(back, [True, False, False]),
        "weight's gradient": partial(back, [False, True, False]),
    }
    if stride == 1:
        found["input's gradient, turned"] = partial(torch.conv2d, g, turned, None, 1, 1)
        found["input's gradient, product"] = partial(product, g, turned, 1)
    operations = 2 * 9 * n * before * behind * (side // stride) ** 2
    return {name: operations / ms / 1e9 for name, ms in milliseconds(found, device, rounds=3).items()}


def passes(n: int, device: str) -> dict[str, float]:
    """Seconds of a pass."""
    net = Model(lambda: ResNet18(100), (3, 32, 32)).build().to(device)
    lin = linnet.linearize(net)
    J = lin.jacobian(torch.randn(n, 3, 32, 32, device=device), progress=False)
    V = torch.randn(lin.p, 16, device=device)
    B = torch.randn(n, 100, 100, device=device)

    def without(*names: str) -> None:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(mock.patch(name, frozenset() if name.endswith("LAYERS") else 2**62))
            J.normal(V, B)

    found = {
        "linnet": without,
        "outputs not shared": partial(without, "linnet.jacobian.blocks.autodiff.LAYERS"),
        "the library's convolutions": partial(without, "linnet.jacobian.cuda.float32_convolution.WORTH"),
        "neither": partial(
            without, "linnet.jacobian.blocks.autodiff.LAYERS", "linnet.jacobian.cuda.float32_convolution.WORTH"
        ),
    }
    return {name: ms / 1e3 for name, ms in milliseconds(found, device, rounds=2).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default: results/convolutions-DEVICE.json)")
    args = parser.parse_args()
    rows = []
    with linnet._common.torch_settings.arithmetic("highest", torch.device(args.device)):
        for shape in SHAPES:
            rows.append({"shape": shape, **{k: round(v, 1) for k, v in ways(args.batch, shape, args.device).items()}})
            print(json.dumps(rows[-1]), flush=True)
    seconds = passes(args.batch, args.device)
    print(json.dumps(seconds), f"ratio {seconds['neither'] / seconds['linnet']:.2f}", flush=True)
    out = args.out or Path(__file__).parent / "results" / f"convolutions-{args.device.split(':')[0]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"machine": machine(args.device), "TFLOP/s": rows, "seconds of a pass": seconds}
    out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
