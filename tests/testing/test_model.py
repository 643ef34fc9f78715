"""`linnet.testing.check_model`: what the proofs say of a network of the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import linnet.testing.model
from linnet.testing import check_model
from linnet.testing.case import Net, parameter
from tests.support.drawn import double, normal


def mlp() -> nn.Module:
    return double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.parametrize("data", [normal(9, 3), DataLoader(TensorDataset(normal(9, 3)), batch_size=4)])
def test_a_plain_network(data, capsys):
    found = check_model(mlp(), data, batch_size=4)
    assert found.ok and not found.wrong and not found.warnings
    assert found.rules == ("0.weight", "0.bias", "2.weight", "2.bias") and not found.autodiff and not found.unused
    assert found.forward_mode and found.error <= 1e-12
    printed = capsys.readouterr().out
    assert "Sequential: 9 examples, 2 outputs, 26 parameters, float64 on cpu" in printed
    assert "all products agree with reverse mode" in printed


def test_what_is_left_to_autodiff_and_what_is_unused():
    model = double(Net(lambda m, x: m.a(x) * m.s.sin().sum(), a=nn.Linear(3, 2), s=parameter(4), spare=nn.Linear(1, 1)))
    found = check_model(model, normal(7, 3), quiet=True)
    assert found.ok and found.autodiff == ("s",) and found.vectorized
    assert found.unused == ("spare.weight", "spare.bias")
    assert "autodiff:        's'" in str(found)


def test_a_rule_that_fails_late_is_told():
    def forward(m, x):
        y = m.a(x)
        return y + m.a.weight.sum() if (x > 5).any() else y

    x = normal(12, 3).clamp(max=4)
    x[8] = 6.0
    # The term is added to all examples of a batch, so that the network mixes examples.
    assert check_model(double(Net(forward, a=nn.Linear(3, 2))), x, quiet=True).refused is not None

    def by_example(m, x):
        return m.a(x) + (x[:, :1] > 5) * m.a.weight.sum()

    found = check_model(double(Net(by_example, a=nn.Linear(3, 2))), x, quiet=True)
    assert found.ok and found.autodiff == ("a.weight",)
    assert any("gradients of a.weight" in text for text in found.warnings)


def test_a_refused_network_says_why(capsys):
    model = double(Net(lambda m, x: m.a(F.dropout(x, 0.5)), a=nn.Linear(3, 2)))
    found = check_model(model, normal(9, 3))
    assert not found.ok and "different outputs for the same input" in found.refused
    assert "refused: The model gives different outputs" in capsys.readouterr().out


def test_a_wrong_product_is_told(monkeypatch):
    """The reference decides, also against linnet."""
    real = linnet.testing.model.dense_jacobian
    monkeypatch.setattr(linnet.testing.model, "dense_jacobian", lambda *a, **k: 1.01 * real(*a, **k))
    found = check_model(mlp(), normal(9, 3), quiet=True)
    assert not found.ok and set(found.wrong) == {"J @ v", "J @ V", "diag J J^T", "rows", "gram"}
    assert "WRONG: J @ v" in str(found)


def test_the_network_stays_as_it_is():
    model = mlp().train()
    before = copy.deepcopy(model.state_dict())
    check_model(model, normal(9, 3), quiet=True)
    assert model.training and all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
