"""Copies of a module that share its parameters, and modules with another forward."""

from __future__ import annotations

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian import Jacobian, combine_outputs
from linnet.network import copy_sharing_parameters, with_forward
from tests.support.drawn import normal


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double().eval()


def total(module: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * module(x).sum(1)


def test_a_copy_shares_parameters_and_nothing_else() -> None:
    model = network()
    other = copy_sharing_parameters(model).train()
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    other(normal(6, 3))
    assert not model.training and float(model[1].running_mean.abs().max()) == 0.0  # type: ignore[arg-type, operator, union-attr]


@pytest.mark.parametrize("kind", ["plain", "copied", "pickled", "forward of its own"])
def test_another_forward(kind: str) -> None:
    model, x = network(), normal(6, 3)
    if kind == "forward of its own":
        model.forward = MethodType(lambda self, x: -nn.Sequential.forward(self, x), model)  # type: ignore[method-assign]
    other = with_forward(model, total)
    if kind == "copied":
        other = copy.deepcopy(other)
    if kind == "pickled":
        other = pickle.loads(pickle.dumps(other))
    torch.testing.assert_close(other(x, scale=2.0), 2.0 * model(x).sum(1))
    torch.testing.assert_close(other(x), model(x).sum(1))  # a call leaves the forward where it is
    assert list(dict(other.named_parameters())) == list(dict(model.named_parameters()))
    if kind in ("copied", "pickled"):
        with torch.no_grad():
            other[2].bias.add_(1.0)  # type: ignore[index, operator, union-attr]
        torch.testing.assert_close(other(x), model(x).sum(1) + 5.0)


def test_an_error_leaves_the_forward_where_it_is() -> None:
    def fails(module: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("no")

    other = with_forward(network(), fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            other(normal(6, 3))


def with_own_forward() -> nn.Module:
    model = network()
    model.forward = MethodType(lambda self, x: nn.Sequential.forward(self, x), model)  # type: ignore[method-assign]
    return model


ORDERS: dict[str, Any] = {
    "combined, then above frozen layers": lambda J, L: combine_outputs(J, L).above_frozen(),
    "above frozen layers, then combined": lambda J, L: combine_outputs(J.above_frozen(), L),
    "above frozen layers, combined, above them again": lambda J, L: combine_outputs(J.above_frozen(), L).above_frozen(),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [network, with_own_forward])
def test_forwards_that_replace_each_other(order: str, make: Any) -> None:
    x, L = normal(6, 3), normal(6, 5, 2, seed=1)
    J = linnet.linearize(make(), "2.*").jacobian(x)
    expected = torch.einsum("ncm,ncp->nmp", L, J.dense().view(6, 5, -1)).flatten(0, 1)
    torch.testing.assert_close(ORDERS[order](J, L).dense(), expected)


def test_a_score_with_a_forward_of_its_own_starts_above_frozen_layers() -> None:
    module, output = linnet.scores.flow(total).bind(network())
    J: Jacobian = linnet.linearize(module, "2.*", output).jacobian(normal(6, 3))
    torch.testing.assert_close(J.above_frozen().dense(), J.dense())
