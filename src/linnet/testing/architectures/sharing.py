"""Parameters used more than once: repeated calls, tied weights, weights read past their module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.architectures.dense import frozen, mlp
from linnet.testing.case import Case, case, net, normal


class TiedWeights(nn.Module):
    """Two Linear modules with one weight and a bias each, two convolutions with everything shared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight
        self.near, self.far = nn.Conv1d(1, 1, 3, padding=1), nn.Conv1d(1, 1, 3, padding=2, dilation=2)
        self.far.weight, self.far.bias = self.near.weight, self.near.bias

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(x)))
        h = self.far(torch.tanh(self.near(h.unsqueeze(1)))).squeeze(1)
        return self.head(torch.tanh(h))


def read_past_module(m: Any, x: Tensor) -> Tensor:
    """A layer that is called, and whose weight and bias are also read directly."""
    h = torch.tanh(m.a(x)) @ m.a.weight + m.a.bias * x
    return m.head(h) + m.head.weight.square().sum()


def three_shapes(m: Any, x: Tensor) -> Tensor:
    """One layer on (n, T, d), on (n, d) and on (n * T, d)."""
    return m.a(x).tanh().sum(1) + m.a(x[:, 0]).square() + m.a(x.flatten(0, 1)).view(len(x), -1, 3).sin().mean(1)


def shared_stack() -> nn.Module:
    """A block of two layers, weights shared over depth, with a frozen bias."""
    block = nn.Sequential(nn.LayerNorm(6), frozen(nn.Linear(6, 6), "bias"), nn.GELU())
    return nn.Sequential(nn.Linear(4, 6), block, block, block, nn.Linear(6, 2))


# The decoder is the encoder's transpose.
AUTOENCODER = net(
    lambda m, x: F.linear(torch.tanh(m.encode(x)), m.encode.weight.t(), m.back),
    encode=(6, 4),
    back=lambda: nn.Parameter(torch.zeros(6)),
)
THREE_TIMES = net(lambda m, x: m.head(m.step(torch.tanh(m.step(torch.tanh(m.step(x)))))), step=(6, 6), head=(6, 3))
# One body on two halves of the input, compared.
SIAMESE = net(lambda m, x: (m.body(x[:, :4]) * m.body(x[:, 4:])).sum(1), body=lambda: mlp(4, 8, 5))

CASES: list[Case] = [
    case("tied_autoencoder", AUTOENCODER, normal(6)),
    case("tied_weights", TiedWeights, normal(5)),
    case("read_past_module", net(read_past_module, a=(4, 4), head=(4, 3)), normal(4)),
    case("called_three_times", THREE_TIMES, normal(6)),
    case("called_with_three_shapes", net(three_shapes, a=lambda: mlp(4, 8, 3, activation=nn.SiLU)), normal(3, 4)),
    case("shared_stack", shared_stack, normal(4)),
    case("siamese", SIAMESE, normal(8)),
]
