"""One output per example: blocks are made and prepared during the backward pass, and must stay exact."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian import chunk, recording
from linnet.testing import Case, check_operator, zoo
from linnet.testing.case import dense_jacobian

CASES = zoo()


def scalar(case: Case) -> Any:
    def output(raw: Any) -> Tensor:
        out = raw if case.output is None else case.output(raw)
        out = out if isinstance(out, Tensor) else out.logits
        return out.reshape(len(out), -1).logsumexp(1)

    return output


@pytest.mark.parametrize("name", CASES)
def test_zoo_with_one_output(name: str) -> None:
    case = CASES[name]
    if case.needs is not None:
        pytest.importorskip(case.needs)
    model, data = case.build(), case.data(4, 0)
    dense = dense_jacobian(model, data, output=scalar(case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fallbacks are the business of test_zoo.py
        lin = linnet.linearize(model, output=scalar(case))
        check_operator(lin.jacobian(data, 2), dense, blocks=1)
        check_operator(lin.jacobian(data, 3, engine="rows"), dense, blocks=1)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    seen: list[bool] = []
    real = recording.streamed

    def streamed(*args: Any) -> bool:
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(chunk, "streamed", streamed)
    return seen


def test_a_plain_network_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    J = linnet.linearize(model).jacobian(torch.randn(6, 3, dtype=torch.float64), 2)
    J.normal(torch.randn(J.shape[1], 9, dtype=torch.float64))
    assert len(seen) == 4 and all(seen)  # the first examples, then three chunks


class AfterRecurrence(nn.Module):
    """A Linear whose input depends on parameters that no rule serves, so that no source lies behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def test_uses_that_a_stream_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    torch.manual_seed(0)
    model, x = AfterRecurrence().double(), torch.randn(5, 4, 2, dtype=torch.float64)
    dense = dense_jacobian(model, x)
    J = linnet.linearize(model).jacobian(x, 2)
    check_operator(J, dense)
    assert seen == [False]  # tried once, then never again


def test_only_several_outputs_keep_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    J = linnet.linearize(nn.Linear(3, 2)).jacobian(torch.randn(6, 3))
    J.normal(torch.randn(J.shape[1], 9))
    assert seen == []
