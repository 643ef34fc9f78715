"""Convolutions that multiply without rows: the rows, where they are asked for, are those of the products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from linnet.jacobian.blocks.convolution import Convolution, ConvolvedBlock
from tests.support.drawn import normal

N, C, OUT = 3, 2, 4


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_convolved_block(uses: int, bias: bool) -> None:
    x, weight = normal(N * uses, 2, 5, 6), normal(OUT, 2, 3, 2, seed=1).requires_grad_()
    shift = normal(OUT, seed=2).requires_grad_()
    y = F.conv2d(x, weight, shift, padding=1)
    g = normal(N * uses, C, *y.shape[1:], seed=3)
    parameters = [weight, shift] if bias else [weight]
    exact = torch.stack(
        [
            torch.cat([t.flatten() for t in torch.autograd.grad(y, parameters, chosen, retain_graph=True)])
            for i in range(N)
            for j in range(C)
            for chosen in [torch.where((torch.arange(N * uses) // uses == i).view(-1, 1, 1, 1), g[:, j], 0.0)]
        ]
    )
    conv = Convolution.of((OUT, 2, 3, 2), stride=1, padding=1, dilation=1, groups=1)
    q = weight.numel()
    block = ConvolvedBlock(conv, x, g, n=N, weight=(0, q), bias=(q, q + OUT) if bias else None)
    rows = torch.cat(block.expand().parts, 2).reshape(N * C, -1)
    torch.testing.assert_close(rows, exact, rtol=1e-10, atol=1e-12)
    V = normal(rows.shape[1], 2, seed=4)
    torch.testing.assert_close(block.matmul(V).reshape(N * C, -1), exact @ V, rtol=1e-10, atol=1e-12)
