"""Convolutions in float32 by other ways than the library's own, against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import linnet
from linnet.jacobian import combine_outputs
from linnet.jacobian.cuda import float32_convolution
from linnet.network import FunctionalModel
from tests.support.drawn import normal

# channels, outputs, size, kernel, stride, padding
SHAPES = (
    (5, 7, (4, 4), (3, 3), 1, 1),
    (5, 7, (8, 6), (3, 3), 2, 1),
    (3, 4, (6, 6), (3, 3), 1, 0),
    (3, 4, (9, 9), (3, 3), 1, 2),
    (2, 3, (5, 7), (3, 2), (1, 2), (1, 0)),
    (4, 4, (3, 3), (1, 1), 1, 0),
    (2, 3, (4, 4), (3, 3), 1, 3),
)


@pytest.fixture(params=["product", "convolution"])
def way(request, monkeypatch):
    """Outputs by a product of matrices, and not."""
    monkeypatch.setattr(float32_convolution, "FEW", 10**6 if request.param == "product" else 0)
    monkeypatch.setattr(float32_convolution, "WIDE", 1)


def drawn(shape: tuple) -> tuple[list[torch.Tensor], dict]:
    channels, outs, size, kernel, stride, padding = shape
    x, w, b = normal(3, channels, *size), normal(outs, channels, *kernel, seed=1), normal(outs, seed=2)
    return [t.requires_grad_() for t in (x, w, b)], {"stride": stride, "padding": padding}


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(way, shape):
    given, steps = drawn(shape)
    found, wanted = float32_convolution.convolve(*given, **steps), torch.conv2d(*given, **steps)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    G = normal(4, *wanted.shape, seed=3)
    for batched, g in ((True, G), (False, G[0])):
        mine, theirs = (
            torch.autograd.grad(y, given, g, retain_graph=True, is_grads_batched=batched) for y in (found, wanted)
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    without = float32_convolution.convolve(given[0], given[1], **steps)
    torch.testing.assert_close(without, torch.conv2d(given[0], given[1], **steps), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("along", ["x", "w", "b", "xw", "xwb"])
def test_forward_mode_keeps_the_graph(way, shape, along):
    given, steps = drawn(shape)

    def run(layer):
        with forward_ad.dual_level():
            sides = [
                forward_ad.make_dual(t, normal(*t.shape, seed=5)) if name in along else t
                for name, t in zip("xwb", given, strict=True)
            ]
            y, tangent = forward_ad.unpack_dual(layer(*sides, **steps))
            return y, tangent.detach(), torch.autograd.grad(y.square().sum(), given)

    for mine, theirs in zip(run(float32_convolution.convolve), run(torch.conv2d), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_nobody_computes_a_gradient_that_nobody_asks_for(monkeypatch):
    asked, own = [], float32_convolution._backward
    monkeypatch.setattr(float32_convolution, "_backward", lambda *args: (asked.append(args[-1]), own(*args))[1])
    (x, w, _), _ = drawn(SHAPES[0])
    y = float32_convolution.convolve(x, w, padding=1)
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert asked == []  # a convolution with the kernel turned around
    torch.autograd.grad(y, w, torch.ones_like(y))
    assert asked == [[False, True, False]]


class Net(nn.Module):
    """Convolutions that are served, and all kinds that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same")
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.linear(torch.tanh(self.same(self.dilated(self.grouped(x)))).mean((2, 3)))


@pytest.mark.parametrize("engine", ["auto", "autodiff"])
def test_a_network_has_the_same_jacobian(monkeypatch, way, engine):
    torch.manual_seed(0)
    lin = linnet.linearize(Net())
    X = torch.randn(5, 2, 6, 6)
    J = lin.jacobian(X, engine=engine)
    V, v = torch.randn(lin.p, 2), torch.randn(lin.p)
    wanted = [J.normal(V), J.normal(v), J @ V, J.T @ (J @ V), J.gram(), J.outputs()]
    served, own = [], float32_convolution.convolve
    monkeypatch.setattr(float32_convolution, "DEVICE", "cpu")
    monkeypatch.setattr(float32_convolution, "WORTH", 0)
    monkeypatch.setattr(
        float32_convolution, "convolve", lambda *args, **kwargs: (served.append(1), own(*args, **kwargs))[1]
    )
    monkeypatch.setattr(FunctionalModel, "convolves_exactly", lambda self, precision: True)
    J = lin.jacobian(X, engine=engine)
    found = [J.normal(V), J.normal(v), J @ V, J.T @ (J @ V), J.gram(), J.outputs()]
    assert served
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "serves"),
    [
        ({}, True),
        ({"stride": 2, "padding": (1, 0), "dilation": 1, "groups": 1}, True),
        ({"dilation": 2}, False),
        ({"dilation": (1, 2)}, False),
        ({"groups": 2}, False),
        ({"padding": "same"}, False),
        ({"input": torch.ones(2, 4, 6, 6).double()}, False),
        ({"input": torch.ones(4, 6, 6)}, False),
    ],
)
def test_calls_that_are_served(monkeypatch, more, serves):
    monkeypatch.setattr(float32_convolution, "DEVICE", "cpu")
    call = {"input": torch.ones(2, 4, 6, 6), "weight": torch.ones(4, 4 // more.get("groups", 1), 3, 3)} | more
    assert float32_convolution._serves(call, worth=1) == serves
    assert not float32_convolution._serves(call, worth=2 * 36 * call["weight"].numel() + 1)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize(
    "more", [(), (None, 2), (None, (2, 1), 1), {"padding": 1}, {"stride": 2}, {"bias": torch.ones(4)}]
)
def test_arguments_that_are_left_out_are_those_of_torch(monkeypatch, more, steady):
    monkeypatch.setattr(float32_convolution, "DEVICE", "cpu")
    monkeypatch.setattr(float32_convolution, "WORTH", 0)
    args, kwargs = (more, {}) if isinstance(more, tuple) else ((), more)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    seen, convolve = [], float32_convolution.convolve
    monkeypatch.setattr(float32_convolution, "convolve", lambda *a, **k: seen.append(a) or convolve(*a, **k))
    with float32_convolution.ExactConvolution(steady=steady):
        found = torch.conv2d(x, w, *args, **kwargs)
    assert len(seen) == 1 and found.dtype == torch.float32
    expected = torch.conv2d(
        x.double(),
        w.double(),
        *args,
        **{k: torch.as_tensor(v).double() if k == "bias" else v for k, v in kwargs.items()},
    )
    bound = 4 * 9 * torch.finfo(torch.float32).eps * float(x.abs().max() * w.abs().max())
    assert float((found - expected).abs().max()) <= bound


def test_small_calls_and_other_precisions_are_the_library_s(monkeypatch):
    monkeypatch.setattr(float32_convolution, "DEVICE", "cpu")
    monkeypatch.setattr(float32_convolution, "convolve", lambda *_, **__: pytest.fail("not worth it"))
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    with float32_convolution.ExactConvolution():
        torch.conv2d(x, w)
        monkeypatch.setattr(float32_convolution, "WORTH", 0)
        torch.conv2d(x.double(), w.double())
        torch.conv2d(x[0], w)
        torch.func.vmap(lambda one: torch.conv2d(one[None], w))(x)
    network = linnet.linearize(nn.Conv2d(1, 2, 3)).network
    assert not network.convolves_exactly("highest")  # on a CPU
    monkeypatch.setattr(FunctionalModel, "device", torch.device("cuda"))
    assert network.convolves_exactly("highest") and network.convolves_exactly("products")
    assert not network.convolves_exactly("high")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if this were one."""
    monkeypatch.setattr(float32_convolution, "DEVICE", "cpu")
    monkeypatch.setattr(FunctionalModel, "convolves_exactly", lambda self, precision: True)


def is_steady(J: linnet.Jacobian) -> bool:
    return J.lin.network.convolutions().steady


@pytest.mark.parametrize("shape", SHAPES)
def test_steady_outputs_are_those_of_float64(monkeypatch, shape):
    given, steps = drawn(shape)
    monkeypatch.setattr(float32_convolution, "ENTRIES", 200)  # a few images at a time
    sides = [t.detach().float().requires_grad_() for t in given]
    exact = torch.conv2d(*(t.double() for t in sides), **steps)
    found = float32_convolution.convolve(*sides, **steps, steady=True)
    assert found.dtype == torch.float32 and torch.equal(found, exact.float())
    g = normal(*found.shape, seed=3)
    mine, theirs = torch.autograd.grad(found, sides, g.float()), torch.autograd.grad(exact, sides, g)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_steady_passes_see_the_same_network_however_they_are_cut(monkeypatch, on_a_gpu):
    torch.manual_seed(0)
    lin = linnet.linearize(Net())
    X, V = 30 * torch.randn(7, 2, 6, 6), torch.randn(lin.p, 3)
    J = lin.jacobian(X)
    steady = J.steady()
    assert not is_steady(J) and is_steady(steady) and is_steady(steady.steady())
    wanted = steady.outputs()
    outputs, own = [], float32_convolution._steady
    monkeypatch.setattr(float32_convolution, "_steady", lambda *args: (outputs.append(1), own(*args))[1])
    by_columns = lin.jacobian(X, engine="autodiff").steady()
    for k in (1, 3):
        by_columns @ V[:, :k]  # which looks at the network
        outputs.clear()
        by_columns @ V[:, :k]
        assert len(outputs) == 2 * 2  # two layers, for f and for all columns; no derivatives
    for size in (1, 3):
        cut = lin.jacobian(X, batch_size=size).steady()
        assert torch.equal(cut.outputs(), wanted)
        torch.testing.assert_close(cut.normal(V), J.normal(V), rtol=1e-4, atol=1e-2)
    root = torch.eye(3).expand(7, 3, 3)
    assert is_steady(combine_outputs(steady, root)) and not is_steady(combine_outputs(J, root))


def test_other_networks_are_steady_as_they_are():
    J = linnet.linearize(nn.Linear(3, 2)).jacobian(torch.randn(4, 3))
    assert J.steady() is J
    J = linnet.linearize(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())).jacobian(torch.randn(4, 1, 3, 3)).cached()
    assert J.steady() is J
