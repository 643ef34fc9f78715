"""The GPU kernels against their torch counterparts in float64; needs a CUDA device and Triton."""

from __future__ import annotations

import pytest
import torch

from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.cuda import triton_kernels

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and triton_kernels.triton is not None), reason="needs a CUDA device and Triton"
)

FORMATS = (torch.contiguous_format, torch.channels_last)
# channels, outputs, size, kernel, stride, padding, dilation
SHAPES = (
    (32, 32, 32, (3, 3), 1, 1, 1),
    (3, 16, 9, (3, 3), 2, 1, 1),
    (17, 70, 11, (5, 3), (2, 1), (2, 0), 1),
    (8, 5, 12, (2, 4), 1, 2, (1, 2)),
    (130, 66, 4, (3, 3), 1, 1, 1),
)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_conv_rows(shape: tuple, form: torch.memory_format) -> None:
    channels, outs, size, kernel, stride, padding, dilation = shape
    conv = Convolution.of((outs, channels, *kernel), stride=stride, padding=padding, dilation=dilation, groups=1)
    x = torch.randn(5, channels, size, size, device="cuda").to(memory_format=form)
    y = torch.conv2d(x, x.new_zeros(outs, channels, *kernel), None, stride, padding, dilation)
    g = torch.randn(5, *y.shape[1:], device="cuda").to(memory_format=form)
    exact = conv._rows_patches(x.double(), g.double()[:, None]).view(5, outs, channels, -1).transpose(2, 3)
    found = triton_kernels.conv_rows(conv, x, g)
    assert (found - exact).norm() / exact.norm() < 2e-3  # tf32 operands


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("channels", "size"), [(1, 1), (5, 7), (64, 16), (130, 9), (16, 33)])
def test_channel_sums(channels: int, size: int, form: torch.memory_format) -> None:
    x, g = (torch.randn(6, channels, size, size, device="cuda").to(memory_format=form).flatten(2) for _ in range(2))
    mean = torch.randn(channels, device="cuda")
    weight, bias = triton_kernels.channel_sums(x, g, mean)
    exact = (g.double() * (x.double() - mean.double()[:, None])).sum(2)
    torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.double(), g.double().sum(2), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "q"), [(1, 1), (3, 700), (715, 129), (40, 300_000), (100, 64)])
def test_column_sums(m: int, q: int) -> None:
    X = 1e3 + torch.randn(m, q + 3, device="cuda")[:, :q]
    sums, squares = triton_kernels.column_sums(X, X[0])
    D = X.double() - X[0].double()
    torch.testing.assert_close(sums, D.sum(0), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(squares, D.square().sum(0), rtol=1e-12, atol=1e-12)
