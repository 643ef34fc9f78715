"""Outputs and rows of the Jacobian as a plain graph, against reverse mode; networks that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.data import Batch
from linnet.network import FunctionalModel, trace_rows
from linnet.network.plain_graph import _cut_patches, _generalize, find_rows
from linnet.testing.case import Net
from tests.support.drawn import double, normal

X, IMAGES, SERIES = normal(9, 4), normal(9, 2, 9, 9, seed=1), normal(9, 6, 3, seed=2)
TOKENS = torch.randint(0, 7, (9, 5), generator=torch.Generator().manual_seed(3))


ONE, TWO = torch.ones(4).double(), 2 * torch.ones(4).double()


def batch(*inputs: Tensor, **named: Tensor) -> Batch:
    return Batch(inputs, named, None, start=0, n=len((*inputs, *named.values())[0]))


def layers(forward: Callable[..., Any]) -> nn.Module:
    """A network of a layer "a" from 4 to 6 numbers and a layer "b" from 6 to 2."""
    return Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += 1
    h[:, 0] *= 2
    return m.b(torch.relu_(h))


def forces(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = m.b(m.a(x).tanh()).sum(1)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy[:, None], -slope], 1)


def recur(m: Any, x: Tensor) -> Tensor:
    return m.out(m.lstm(m.gru(x)[0])[0][:, -1])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 3)), X),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.MaxPool2d(2, padding=1), nn.Conv2d(4, 4, 2, groups=2, dilation=2), nn.Flatten(), nn.Linear(4, 2)),
        ),
        IMAGES,
    ),
    "pooling": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool2d(5)),
            *(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        IMAGES,
    ),
    "transposed": (
        lambda: nn.Sequential(
            *(nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, groups=2), nn.ELU(), nn.Upsample(scale_factor=2)),
            *(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(100, 2)),
        ),
        IMAGES,
    ),
    "one axis": (
        lambda: nn.Sequential(
            *(nn.Conv1d(6, 4, 2), nn.Softplus(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 2), nn.LogSoftmax(1)),
        ),
        SERIES,
    ),
    "three axes": (
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 2, (1, 3, 3)), nn.MaxPool3d((1, 2, 2)), nn.AvgPool3d((2, 1, 1))),
            *(nn.Flatten(), nn.Linear(18, 2)),
        ),
        IMAGES,
    ),
    "attention": (
        lambda: Net(
            lambda m, x: m.out(m.block(m.table(x)).mean(1)),
            table=nn.Embedding(7, 4),
            block=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
            out=nn.Linear(4, 2),
        ),
        TOKENS,
    ),
    "recurrent": (
        lambda: Net(
            recur, gru=nn.GRU(3, 4, batch_first=True), lstm=nn.LSTM(4, 3, batch_first=True), out=nn.Linear(3, 2)
        ),
        SERIES[:, :3],
    ),
    "in place": (lambda: layers(in_place), X),
    "forces": (lambda: layers(forces), X),
    "detached": (lambda: layers(lambda m, x: m.b((h := m.a(x)).tanh() * h.detach().sigmoid())), X),
    "normalized": (lambda: layers(lambda m, x: F.normalize(m.b(m.a(x).sort(1).values), dim=1)), X),
    "one output": (lambda: layers(lambda m, x: torch.einsum("bi,bi,i->b", m.a(x), m.a(x), m.a.bias)), X),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_those_of_reverse_mode(name: str) -> None:
    make, inputs = NETWORKS[name]
    network = FunctionalModel.of(double(make()).eval())
    graph = trace_rows(network, batch(inputs))
    for some in (inputs, inputs[:1], inputs[2:6]):
        for found, expected in zip(graph(some), find_rows(network, batch(some)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_graph_has_no_code_of_the_network_and_leaves_the_network_alone() -> None:
    model = double(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    graph = trace_rows(FunctionalModel.of(model), batch(X))
    expected = graph(X)
    assert {node.op for node in graph.graph.nodes} == {"placeholder", "get_attr", "call_function", "output"}
    model[0].weight.data.zero_()
    assert all(torch.equal(a, b) for a, b in zip(graph(X), expected, strict=True))
    assert torch._C._functorch._is_vmap_fallback_enabled()


def test_selected_and_tied_parameters() -> None:
    model = double(Net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    model.b.weight = model.a.weight
    for params, p in ((None, 24), ("b.bias", 4), ("*.weight", 16)):
        network = FunctionalModel.of(model, params)
        f, J = trace_rows(network, batch(X))(X)
        assert J.shape == (9, 4, p)
        torch.testing.assert_close((f, J), find_rows(network, batch(X)), rtol=1e-9, atol=1e-12)


def test_inputs_with_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
            h = self.table(ids) * mask[..., None]
            return {"logits": self.out(h.sum(1) / mask.sum(1, keepdim=True)) * scale}

    model = double(Named())
    network = FunctionalModel.of(model)
    given = batch(ids=TOKENS, mask=(TOKENS > 1).double() + 0.1)
    graph = trace_rows(network, given)
    torch.testing.assert_close(graph(*given.kwargs.values()), find_rows(network, given), rtol=1e-9, atol=1e-12)


class Twice(torch.autograd.Function):
    """Gradients that are no derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g


def less_mean(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h - h.mean(0) if len(x) > 1 else h)


def without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        scale = h.norm(dim=1, keepdim=True)
    return m.b(h / scale)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "batch statistics": (less_mean, "outputs for a batch of 1 differ|rows of the Jacobian for a batch of 1 differ"),
    "size of the batch": (lambda m, x: m.b(m.a(x)) * (2 if len(x) > 3 else 1), "outputs for a batch of 7 differ"),
    "a number of the input": (lambda m, x: m.b(m.a(x)) if float(x.sum()) > 0 else m.a(x)[:, :2], "data-dependent"),
    "a list": (lambda m, x: m.b(m.a(x)) * (1 if x.tolist()[0][0] > -99 else 2), "data-dependent"),
    "an array": (lambda m, x: m.b(m.a(x)) * float(x.detach().numpy().max() > -99), r"\.numpy\(\)"),
    "a count": (lambda m, x: m.b(m.a(x)) + (x > 0).nonzero().sum(), "nonzero"),
    "chance": (lambda m, x: m.b(m.a(x) + torch.rand(6).double()), "random operation"),
    "another backward pass": (lambda m, x: m.b(Twice.apply(m.a(x))), "rows of the Jacobian for a batch of 1 differ"),
    "no gradient": (without_gradient, "rows of the Jacobian for a batch of 1 differ"),
    "squeezed": (lambda m, x: m.b(m.a(x).squeeze()), r"needs outputs of shape \(n, c\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_networks_without_a_plain_graph(name: str) -> None:
    forward, words = REFUSED[name]
    network = FunctionalModel.of(double(layers(forward)))
    with pytest.raises(NotImplementedError, match=f"no plain graph.*({words}).*Choose params='last_layer'"):
        trace_rows(network, batch(X))


def test_operations_that_torch_does_not_know_are_named() -> None:
    library = torch.library.Library("linnet_tests", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    twice = torch.ops.linnet_tests.twice
    network = FunctionalModel.of(double(layers(lambda m, x: m.b(m.a(twice(x))))))
    with pytest.raises(NotImplementedError, match=r"linnet_tests::twice hit the vmap fallback.*params='last_layer'"):
        trace_rows(network, batch(X))


def test_inputs_that_are_no_tensors() -> None:
    network = FunctionalModel.of(double(layers(lambda m, x: m.b(m.a(X[:2])))))
    with pytest.raises(NotImplementedError, match="inputs are tensors"):
        trace_rows(network, Batch((["a", "b"],), {}, None, start=0, n=2))


def test_traces_that_differ_in_more_than_the_size_of_the_batch() -> None:
    def trace(f: Callable[[Tensor], Tensor], n: int) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(f)(X[:n])

    def both(f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor] | None = None) -> Any:
        return _generalize(trace(f, 3), trace(g or f, 5), {})

    assert torch.equal(both(lambda x: x.new_ones(2 * len(x) + 1))(X), X.new_ones(19))
    with pytest.raises(RuntimeError, match=r"aten.pow.Tensor_Scalar takes 3 and 6"):
        both(lambda x: x**3, lambda x: x**6)
    with pytest.raises(RuntimeError, match=r"aten.mul.Tensor takes 0\.5 and 0\.25"):
        both(lambda x: x * 0.5, lambda x: x * 0.25)
    with pytest.raises(RuntimeError, match=r"aten.sin.default becomes aten.cos.default"):
        both(torch.sin, torch.cos)
    with pytest.raises(RuntimeError, match="3 and 4 operations"):
        both(torch.sin, lambda x: x.sin().cos())
    with pytest.raises(RuntimeError, match="a constant has other values"):
        both(lambda x: x + ONE, lambda x: x + TWO)


def test_patches() -> None:
    found = _cut_patches(IMAGES, (3, 2), (5, 3), (2, 3), (1, 0), (1, 2))
    expected = F.unfold(IMAGES, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 3))
    torch.testing.assert_close(found.reshape(expected.shape), expected)
