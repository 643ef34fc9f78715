"""Which results of a forward pass depend on the outputs of frozen layers, in whatever way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.jacobian.frozen_layers import _Reach


def into_a_view(h: Tensor) -> Tensor:
    buffer = torch.zeros(2, 5)
    buffer[:, :3].copy_(h)
    return buffer.sum(1)


def out_of_a_view(h: Tensor) -> Tensor:
    buffer = torch.zeros(2, 5)
    part = buffer[:, :3]
    buffer[:, 1:4] = h
    return part + 1


def in_place(h: Tensor) -> Tensor:
    out = torch.zeros(2, 3)
    out += h
    return out


def by_an_argument(h: Tensor) -> Tensor:
    out = torch.empty(2, 3)
    torch.add(h, 1, out=out)
    return out


def in_a_list(h: Tensor) -> Tensor:
    return torch.cat([torch.zeros(2, 3), h], 1)


def after_a_decision(h: Tensor) -> Tensor:
    return torch.ones(2) if bool(h.sum() > 0) else torch.zeros(2)


def by_a_number(h: Tensor) -> Tensor:
    return torch.full((2,), h.sum().item())


@pytest.mark.parametrize(
    "path", [into_a_view, out_of_a_view, in_place, by_an_argument, in_a_list, after_a_decision, by_a_number]
)
def test_every_way_is_followed(path: Callable[[Tensor], Tensor]) -> None:
    h, other = torch.ones(2, 3), torch.ones(2, 3)
    with _Reach() as reach:
        reach.follow(h, 4)
        reach.follow(other, 7)
        before = other + 1
        out = path(h)
    assert reach.of(out) == {4} and 7 in reach.of(before)


@pytest.mark.parametrize("path", [lambda h: torch.ones(len(h), *h.shape), lambda h: torch.zeros(2) + h.ndim])
def test_a_shape_is_no_value(path: Callable[[Tensor], Tensor]) -> None:
    h = torch.ones(2, 3)
    with _Reach() as reach:
        reach.follow(h, 4)
        out = path(h)
    assert reach.of(out) == set()


def test_what_is_followed_stays_so_that_no_other_tensor_gets_its_name() -> None:
    h = torch.ones(2, 3)
    held: list[Any] = []
    with _Reach() as reach:
        reach.follow(h, 4)
        buffer = torch.zeros(2, 5)
        buffer[:, :3].copy_(h)
        middle = h + 1
        held = [weakref.ref(t) for t in (middle, buffer)]
        del middle, buffer
        assert all(ref() is not None for ref in held)
    del reach
    assert not any(ref() for ref in held)
