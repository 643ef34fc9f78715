"""Parameters used more than once: repeated calls, tied weights, weights read past their module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.architectures.dense import frozen
from linnet.testing.case import Case, Net, case, normal


class Autoencoder(nn.Module):
    """The decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 4)
        self.back = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.back)


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


class ReadPastModule(nn.Module):
    """A layer that is called, and whose weight and bias are also read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) @ self.a.weight + self.a.bias * x
        return self.head(h) + self.head.weight.square().sum()


def three_times() -> nn.Module:
    return Net(
        lambda m, x: m.head(m.step(torch.tanh(m.step(torch.tanh(m.step(x)))))),
        step=nn.Linear(6, 6),
        head=nn.Linear(6, 3),
    )


def three_shapes() -> nn.Module:
    """One layer on (n, T, d), on (n, d) and on (n * T, d)."""
    return Net(
        lambda m, x: (
            m.a(x).tanh().sum(1) + m.a(x[:, 0]).square() + m.a(x.flatten(0, 1)).view(len(x), -1, 3).sin().mean(1)
        ),
        a=nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3)),
    )


def shared_stack() -> nn.Module:
    """A block of two layers, weights shared over depth, with a frozen bias."""
    block = nn.Sequential(nn.LayerNorm(6), frozen(nn.Linear(6, 6), "bias"), nn.GELU())
    return nn.Sequential(nn.Linear(4, 6), block, block, block, nn.Linear(6, 2))


def siamese() -> nn.Module:
    """Siamese: one body on two halves of the input, compared."""
    return Net(
        lambda m, x: (m.body(x[:, :4]) * m.body(x[:, 4:])).sum(1),
        body=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)),
    )


CASES: list[Case] = [
    case("tied_autoencoder", Autoencoder, normal(6)),
    case("tied_weights", TiedWeights, normal(5)),
    case("read_past_module", ReadPastModule, normal(4)),
    case("called_three_times", three_times, normal(6)),
    case("called_with_three_shapes", three_shapes, normal(3, 4)),
    case("shared_stack", shared_stack, normal(4)),
    case("siamese", siamese, normal(8)),
]
