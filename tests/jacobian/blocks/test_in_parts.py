"""Vectors of which each rank holds a part: products and solves are those of one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import linnet
from linnet.jacobian.blocks import in_parts
from linnet.jacobian.blocks.base import Disproved
from linnet.linalg import cg
from tests.support.drawn import normal
from tests.support.sharded import start, tokens, tower

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


class Mixed(nn.Module):
    """An embedding, a convolution, a shared weight, a parameter without a rule, and a layer for one example alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(7, 4), nn.Conv1d(4, 4, 2)
        self.twice, self.rare, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.table(x % 7).mT).mean(2)
        h = self.twice(self.twice(h).tanh()) * self.scale.exp()
        rare = x[:, 0] == 1
        return torch.where(rare[:, None], self.rare(h), h) if rare.any() else h


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().double()


def products(net: nn.Module, mesh: Any = None, batch_size: int = 2) -> dict[str, Tensor]:
    """What one process computes, or what all ranks compute together with vectors in parts."""
    J = linnet.linearize(net).jacobian(tokens(5), batch_size)

    def given(t: Tensor) -> Any:
        return t if mesh is None else distribute_tensor(t, mesh, [Shard(0)])

    def taken(t: Any) -> Tensor:
        if mesh is None:
            return t
        assert isinstance(t, DTensor)
        held = t.placements[0] == Shard(0)
        size = -(-len(t) // dist.get_world_size()) if held else len(t)
        assert len(t.to_local()) <= size
        return t.full_tensor()

    V, w = normal(J.shape[1], 2), normal(J.shape[0], seed=2).square()
    U = given(normal(J.shape[0], 2, seed=1)) if mesh is None else distribute_tensor(normal(J.shape[0], 2, seed=1), mesh)
    found = {
        "J V": J @ given(V),
        "J v": J @ given(V[:, 0]),
        "J^T U": J.T @ U,
        "normal": J.normal(given(V)),
        "normal, vector and weight": J.normal(given(V[:, 0]), w),
        "fused": J.fused(lambda JV, batch: (JV + batch.f.flatten()[:, None]).sin(), given(V)),
        "solution": cg(lambda X: J.normal(X) + X, given(V), tolerance=1e-12).checked().value,
        "solution, vector": cg(lambda x: J.normal(x) + x, given(V[:, 0]), tolerance=1e-12).checked().value,
    }
    return {name: taken(t) for name, t in found.items()}


def refusals(mesh: Any, rank: int) -> dict[str, str]:
    J = linnet.linearize(mixed()).jacobian(tokens(5))
    V = distribute_tensor(normal(J.shape[1], 2), mesh, [Shard(0)])
    calls = {
        "columns": lambda: J @ V.redistribute(placements=[Shard(1)]),
        "replicated": lambda: J.normal(V.redistribute(placements=[Replicate()])),
        "shape": lambda: J @ distribute_tensor(normal(3, 2), mesh, [Shard(0)]),
        "one rank fails": lambda: J.fused(lambda JV, batch: JV * (1 / (1 - rank)), V),
        "nothing": lambda: J.normal(V),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, ArithmeticError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def begun_again(mesh: Any, rank: int) -> Tensor:
    """A product of which the last rank has to make the pass again."""
    J = linnet.linearize(mixed()).jacobian(tokens(5), 2)
    add, failed = in_parts._Summed.add, [rank != 1]

    def once(self: Any, piece: Any, U: Tensor) -> None:
        add(self, piece, U)
        if not failed[0]:
            failed[0] = True
            raise Disproved("vectorize")

    in_parts._Summed.add = once  # type: ignore[method-assign]
    try:
        found = J.normal(distribute_tensor(normal(J.shape[1], 2), mesh, [Shard(0)]))
    finally:
        in_parts._Summed.add = add  # type: ignore[method-assign]
    assert failed[0]
    return found.full_tensor()  # type: ignore[attr-defined]


def work(rank: int, folder: str, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    sharded: Any = tower()
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    found = {"sharded": products(fully_shard(sharded, mesh=mesh), mesh), "mixed": products(mixed(), mesh)}
    if world == 2:
        found["again"] = {"normal": begun_again(mesh, rank)}
        Path(f"{folder}/{rank}.json").write_text(json.dumps(refusals(mesh, rank)))
    torch.save(found, f"{folder}/{world}-{rank}.pt")


def check(folder: Path, world: int) -> None:
    alone = {"sharded": products(tower()), "mixed": products(mixed())}
    alone["again"] = {"normal": alone["mixed"]["normal"]}
    for rank in range(world):
        for name, found in torch.load(folder / f"{world}-{rank}.pt").items():
            for what, t in found.items():
                reference = alone[name][what]
                assert float((t - reference).abs().max()) <= 1e-9 * float(reference.abs().max()), (rank, name, what)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    start(work, 2, folder, 2)
    return folder


def test_two_ranks_have_the_products_of_one_process(folder):
    check(folder, 2)


@pytest.mark.slow
def test_four_ranks_have_the_products_of_one_process(tmp_path):
    start(work, 4, tmp_path, 4)
    check(tmp_path, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("columns", "ValueError: A DTensor that J multiplies is sharded over its rows"),
        ("replicated", "ValueError: A DTensor that J multiplies is sharded over its rows"),
        ("shape", r"ValueError: Jacobian has shape \(20, \d+\), so J @ V needs V of shape"),
        ("one rank fails", "ZeroDivisionError: .*division by zero"),
    ],
)
def test_what_cannot_be_served_is_refused_on_all_ranks(folder, call, message):
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for one in said:
        assert re.match(message, one[call]), one[call]
        assert "nothing" not in one
