"""Forward-mode passes that share their layers' outputs, against passes that do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import linnet
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.blocks.autodiff import SharedOutputs
from tests.support.drawn import normal


class Layers(nn.Module):
    """Convolutions in one and two dimensions and linear layers; with functions that overwrite, if wanted."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()
        self.overwrites = overwrites
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.line = nn.Conv1d(3, 4, 3, stride=2, bias=False)
        self.hidden = nn.Linear(4, 5, bias=False)
        self.out = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x), inplace=self.overwrites)
        x = torch.tanh(self.line(x.flatten(2)))
        h = self.hidden(x.mean(2))
        h = h.mul_(2) if self.overwrites else h * 2
        return self.out(h.sin())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[SharedOutputs]:
    made: list[SharedOutputs] = []
    own = SharedOutputs.__init__
    monkeypatch.setattr(SharedOutputs, "__init__", lambda self: (made.append(self), own(self))[1])
    return made


@pytest.mark.parametrize("params", [None, "out.*", "*.bias"])
@pytest.mark.parametrize("overwrites", [False, True])
def test_products_are_the_same(monkeypatch, overwrites, params):
    torch.manual_seed(0)
    lin = linnet.linearize(Layers(overwrites=overwrites).double(), params)
    X, V = normal(6, 2, 4, 4), normal(lin.p, 3, seed=1)
    dense = lin.jacobian(X, engine="rows").dense()
    made = counted(monkeypatch)
    for size in ("auto", 2):
        J = lin.jacobian(X, engine="autodiff", batch_size=size)
        torch.testing.assert_close(J @ V, dense @ V, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(J.normal(V), dense.T @ (dense @ V), rtol=1e-9, atol=1e-9)
    assert made and all(len(one) == 4 for one in made)


def test_a_layer_gives_its_output_once(monkeypatch):
    calls = []
    own = torch.conv2d

    def conv2d(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(autodiff, "LAYERS", frozenset({conv2d}))
    x, w = normal(2, 1, 3, 3), normal(1, 1, 2, 2, seed=1)
    mode = SharedOutputs()
    for _ in range(3):
        with mode.begin():
            y = mode.__torch_function__(conv2d, (), (x, w))
    assert len(calls) == 1 and torch.equal(y, own(x, w))
    y += 1  # from now on it is not the layer's output
    with mode.begin():
        again = mode.__torch_function__(conv2d, (), (x, w))
    assert len(calls) == 2 and torch.equal(again, own(x, w))
    with mode.begin():
        other = mode.__torch_function__(conv2d, (), (x, 2 * w))
    assert len(calls) == 3 and torch.equal(other, own(x, 2 * w))


def test_one_column_needs_none(monkeypatch):
    made = counted(monkeypatch)
    lin = linnet.linearize(nn.Linear(3, 2))
    J = lin.jacobian(torch.randn(4, 3), engine="autodiff")
    J.normal(torch.randn(8))
    assert J @ torch.randn(8) is not None and not made
