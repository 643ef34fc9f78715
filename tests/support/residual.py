"""A small residual network whose top adapts, and labels for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.drawn import double, normal

RESIDUAL = ["blocks.2.*", "linear.*"]


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


class Residual(nn.Module):
    """A small residual network: blocks in stages, functions between modules, in-place changes, a shared activation."""

    def __init__(self, blocks: int = 3, c: int = 10) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(4, self.act) for _ in range(blocks)))
        self.linear = nn.Linear(4, c)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h += 0.1
        return self.linear(self.blocks(self.act(h)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1), act

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.act(self.one(x)))
        h += x
        return self.act(h)


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 1, 6, 6, seed=seed)
    teacher = double(Residual(), seed=7)
    with torch.no_grad():
        f = teacher(x)
    return x, ((f - f.mean(0)) / f.std(0) + 0.5 * normal(n, 10, seed=seed + 1)).argmax(1)
