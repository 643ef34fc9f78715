"""Recording a forward pass: what the layers saw, whatever later code does to their tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import linnet
from linnet.jacobian.layers import RULES
from linnet.jacobian.recording import Changes, Recording, record
from linnet.network import Layout
from linnet.testing import dense_jacobian
from linnet.testing.case import Net, parameter
from tests.support.drawn import double, normal

N = 5


def recorded(model: nn.Module, x: Tensor, **options) -> Recording:
    theta = {name: p.detach() for name, p in model.named_parameters()}
    return record(lambda th: functional_call(model, th, (x,)), theta, Layout(theta), RULES, n=len(x), **options)


def exact(model: nn.Module, *x: Tensor, rest: tuple[str, ...] = ()) -> linnet.jacobian.linearization.Linearization:
    """The Jacobian agrees with the dense one, and autodiff serves only ``rest``."""
    A = dense_jacobian(model, x)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, 2, engine="rows")
    V = normal(A.shape[1], 4)
    assert (J @ V - A @ V).abs().max() <= 1e-9 * (A @ V).abs().max()
    assert (J.gram() - A @ A.T).abs().max() <= 1e-9 * (A @ A.T).abs().max()
    assert lin.rules.last.rest == rest
    return lin


def test_uses_come_in_the_order_of_the_calls():
    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))
    recording = recorded(model, normal(N, 3))
    assert [use.number for use in recording.uses] == [0, 1]
    assert recording.signature[0][0] == "Linear"
    places = [{role: (slot.name, slot.range) for role, slot in use.slots.items()} for use in recording.uses]
    assert places == [
        {"weight": ("0.weight", (0, 12)), "bias": ("0.bias", (12, 16))},
        {"weight": ("2.weight", (16, 24))},
    ]
    assert recording.changes == Changes()
    assert torch.equal(recording.out, model(normal(N, 3)))


def test_the_parameters_of_the_model_are_not_the_leaves():
    model = double(nn.Linear(3, 2))
    recording = recorded(model, normal(N, 3))
    recording.out.sum().backward()
    assert model.weight.grad is None
    assert recording.leaves["weight"].grad is not None


def test_overwritten_outputs_keep_their_own_gradient():
    def forward(m, x):
        h = m.a(x)
        h.relu_()
        y = m.b(h)
        y += h
        y.clamp_(max=1.0).mul_(2.0)
        return m.c(y)

    exact(double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2))), normal(N, 3))


def test_overwritten_inputs_are_copied():
    """Autograd itself saves no input of a layer whose weight is frozen, so nothing else would notice."""

    def forward(m, x):
        h = m.a(x)
        y = F.linear(h, m.b.weight.detach(), m.b.bias)
        z = torch.conv1d(F.pad(h[:, None], (1, 1)), m.kernel)[:, 0]
        h.add_(1.0)
        return y.tanh() + z

    model = double(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), kernel=parameter(1, 1, 3)))
    changes = recorded(model, normal(N, 3)).changes
    assert changes.inputs == {1}  # what the second linear layer was given
    assert changes.outputs == changes.spread == frozenset()
    model.b.weight.requires_grad_(False)
    exact(model, normal(N, 3))


def test_overwritten_views_are_copied():
    """What an instance norm returns is a view, whose gradient edge an in-place change replaces."""

    def forward(m, x):
        h = m.a(x)
        h.mul_(2.0).add_(1.0)
        return m.b(h.tanh().mean(1))

    model = double(Net(forward, a=nn.InstanceNorm1d(6, affine=True), b=nn.Linear(3, 2)))
    assert recorded(model, normal(N, 6, 3)).changes.outputs == {0}
    exact(model, normal(N, 6, 3))


def test_known_changes_are_made_at_once():
    def forward(m, x):
        calls.append(1)
        h = m.a(x)
        h.mul_(2.0)
        return m.b(h.tanh().mean(1))

    calls = []
    model, x = double(Net(forward, a=nn.InstanceNorm1d(6, affine=True), b=nn.Linear(3, 2))), normal(N, 6, 3)
    changes = recorded(model, x).changes
    assert len(calls) == 2
    assert recorded(model, x, changes=changes).changes == changes
    assert len(calls) == 3


def test_code_that_overwrites_another_input_every_time_is_refused():
    def forward(m, x):
        m.calls += 1
        for i, layer in enumerate(m.layers):
            y = F.linear(x, layer.weight.detach(), layer.bias)
            if i == m.calls:
                x.add_(1.0)
            x = y.tanh()
        return x

    model = Net(forward, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(9)))
    model.calls = 0
    with pytest.raises(RuntimeError, match=r"overwrites the inputs of its layers.*Replace in-place operations"):
        recorded(double(model), normal(N, 3))


def test_views_of_a_parameter():
    """Transposed, in thirds, and as rows of one stored tensor."""

    def forward(m, x):
        q, k, v = m.packed.chunk(3)
        h = F.linear(x, q) * F.linear(x, k) + x @ v.t()
        return torch.tanh(h @ m.w.t()) @ m.w + m.w.view(4, 3)[1]

    model = double(Net(forward, packed=parameter(9, 3), w=parameter(4, 3)))
    uses = recorded(model, normal(N, 3)).uses
    linear = [use for use in uses if use.rule.name == "Linear"]
    assert [use.slots["weight"].range for use in linear] == [(0, 9), (9, 18)]
    assert [use.slots["weight"].swapped for use in uses if use.rule.name == "Matmul"] == [True, True, False]
    exact(model, normal(N, 3))


def test_views_that_are_no_block_of_a_parameter_are_left_to_autodiff():
    model = double(Net(lambda m, x: torch.tanh(x @ m.w[:, ::2]) @ m.v, w=parameter(3, 8), v=parameter(4, 2)))
    assert [use.slots["weight"].name for use in recorded(model, normal(N, 3)).uses] == ["v"]
    exact(model, normal(N, 3), rest=("w",))


def test_parameters_that_are_not_contiguous():
    model = Net(lambda m, x: torch.tanh(x @ m.w) @ m.v.t(), w=parameter(3, 4), v=parameter(2, 4))
    model = double(model)
    model.w.data, model.v.data = normal(4, 3).t(), normal(4, 2).t()
    assert not model.w.is_contiguous()
    lin = exact(model, normal(N, 3), rest=("v",))
    assert lin.rules.last.rules["w"] == "Matmul"


def test_calls_that_all_examples_share_are_spread():
    def forward(m, x):
        return m.head(torch.tanh(x + m.position(torch.arange(4)) + m.query(m.token)).mean(1))

    parts = {"position": nn.Embedding(4, 3), "query": nn.Linear(3, 3), "token": parameter(1, 1, 3)}
    lin = exact(double(Net(forward, **parts, head=nn.Linear(3, 2))), normal(N, 4, 3), rest=("token",))
    assert len(lin.rules.last.changes.spread) == 2
    assert lin.rules.last.rules["position.weight"] == "Embedding"


class Optional(nn.Module):
    """A layer in front that only some batches use: the calls behind it have other numbers then."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.enter, self.head = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2)
        self.position = nn.Embedding(5, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x if shift is None else self.front(x) + shift
        return self.head(torch.tanh(self.position(torch.arange(x.shape[1])) + self.enter(x)).mean(1))


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
def test_changes_belong_to_the_calls_they_were_found_for(order):
    """N = 5 tokens and N = 5 examples, so that a call spread by mistake would fit in shape."""
    model = double(Optional())
    lin = linnet.linearize(model)
    data = [{"x": normal(5, 5, 3)}, {"x": normal(5, 5, 3), "shift": normal(5, 5, 3, seed=1)}]
    for i in order:
        A = dense_jacobian(model, data[i])
        K = lin.jacobian(data[i], engine="rows").gram()
        assert (K - A @ A.T).abs().max() <= 1e-9 * K.abs().max()
        assert lin.rules.last.changes.spread == {i}


def test_attention_is_seen_from_inside():
    model = double(
        Net(
            lambda m, x: m.head(m.attend(x, x, x, need_weights=False)[0].mean(1)),
            attend=nn.MultiheadAttention(4, 2, batch_first=True),
            head=nn.Linear(4, 2),
        )
    )
    lin = exact(model, normal(N, 3, 4))
    assert lin.rules.last.rules["attend.in_proj_weight"] == "Linear"


def test_checkpointed_blocks():
    def forward(m, x):
        return m.head(checkpoint(lambda x: torch.tanh(m.a(x)), x, use_reentrant=False))

    def plain(m, x):
        return m.head(torch.tanh(m.a(x)))

    def build(function):
        return double(Net(function, a=nn.Linear(3, 4), head=nn.Linear(4, 2)))

    A = dense_jacobian(build(plain), normal(N, 3))
    J = linnet.linearize(build(forward)).jacobian(normal(N, 3), 2)
    assert (J.gram() - A @ A.T).abs().max() <= 1e-9 * (A @ A.T).abs().max()
    assert (J @ A.T - A @ A.T).abs().max() <= 1e-9 * (A @ A.T).abs().max()
    assert (J @ A[0] - A @ A[0]).abs().max() <= 1e-9 * (A @ A[0]).abs().max()


def test_nothing_is_left_on_the_model():
    model = double(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
    before = {name: p for name, p in model.named_parameters()}
    exact(model, normal(N, 3))
    assert dict(model.named_parameters()) == before
    assert all(p.grad is None and p.is_leaf for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
