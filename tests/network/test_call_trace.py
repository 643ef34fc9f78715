"""The tracer of one forward pass: calls of modules, steps, and what goes into what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.network import trace
from linnet.network.call_trace import RETURNED
from linnet.testing.case import Net
from tests.support.drawn import normal


def steps(model: nn.Module, *args: Any) -> list[str]:
    return [step.name for step in trace(model, args, {}, whole=(nn.Linear, nn.BatchNorm1d)).steps]


def test_calls_nest_and_the_network_is_untouched() -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = nn.Sequential(inner, nn.Dropout(), nn.Linear(4, 2)).double().train()
    found = trace(model, (normal(5, 3),), {})
    assert [call.name for call in found.calls] == ["", "0", "0.0", "0.1", "1", "2"]
    root, first, linear = (found.calls_of(name)[0] for name in ("", "0", "0.0"))
    assert root.start < first.start < linear.start < linear.stop < first.stop < root.stop
    assert torch.equal(linear.args[0], normal(5, 3)) and torch.equal(found.output, model.eval()(normal(5, 3)))
    assert found.steps == [] and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_steps_are_whole_modules_and_the_functions_outside() -> None:
    model = Net(lambda m, x: m.norm(m.a(x)).relu() + 1, a=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)).double()
    assert steps(model, normal(5, 3)) == ["a", "norm", "relu", "add", RETURNED]


def test_a_tensor_that_is_changed_in_place_is_a_new_one() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.mul_(m.a.weight.sum())
        return m.b(h)

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    found = trace(model, (normal(5, 3),), {}, whole=(nn.Linear,))
    source = found.source(found.steps_of("b")[0].inputs[0])
    assert source is not None and source.name == "mul_"
    assert [step.name for step in found.users(found.steps_of("a")[0].output)] == ["mul_"]
    assert found.parameters_read == {"a.weight"}


def test_a_network_that_stops_before_its_end() -> None:
    model, X = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), normal(12, 3).float()
    new = linnet.attach_head(model, X, [0, 1, 2] * 4, features="1", penalty=1.0)
    stopped = linnet.attach_head(new, X, [0, 1, 2] * 4, features="backbone.0", penalty=1.0)
    found = trace(stopped, (X,), {})
    assert all(call.stop > call.start for call in found.calls)
    assert torch.equal(found.output, stopped(X))
