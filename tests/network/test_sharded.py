"""Networks whose weights lie in parts on several ranks: every rank has the answer of one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import linnet
from linnet._common import distributed
from linnet.network.copies import is_tensor_parallel, plain_class
from linnet.network.parameter_guard import address
from linnet.network.sharded import _keeping_parts
from tests.support.drawn import normal
from tests.support.sharded import peft_tower, start, tokens, tower

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")

PEFT = ("PEFT",) if find_spec("peft") and find_spec("transformers") else ()
ESTIMATORS = "FSDP2, whole adapters", "data x tensor"
QUICK = {2: ("FSDP2, whole adapters", "branches", "tensor parallel"), 4: ("data x tensor",)}
"""For each number of ranks, how networks are sharded."""

ALL = {world: ("FSDP2, whole adapters", "FSDP2, sharded adapters", "branches", *PEFT) for world in (2, 4)}
ALL[4] += ("data x tensor",)


def build(way: str) -> nn.Module:
    return peft_tower() if way == "PEFT" else tower(branches=way == "branches")


def shard(way: str, world: int) -> nn.Module:
    """A network that is sharded over all ranks."""
    net: Any = build(way)
    blocks = net.base_model.model.model.layers if way == "PEFT" else net.blocks
    mesh, ignored = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), set()
    if way in ("tensor parallel", "data x tensor"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "up.base": ColwiseParallel(output_layouts=Replicate()),
            "down.base": RowwiseParallel(input_layouts=Replicate()),
        }
        for block in blocks:
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["dp"]
    if way == "tensor parallel":
        return net
    if way == "FSDP2, whole adapters":
        ignored = {t for t in net.parameters() if t.requires_grad}
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    return fully_shard(net, mesh=mesh, ignored_params=ignored)


def products(net: nn.Module, n: int, batch_size: int) -> dict[str, Tensor]:
    J = linnet.linearize(net).jacobian(tokens(n), batch_size)
    V, U = normal(J.shape[1], 2), normal(J.shape[0], 2, seed=1)
    rotation, values = J.kronecker().decomposed()
    return {
        "outputs": J.outputs(),
        "J V": J @ V,
        "J^T U": J.T @ U,
        "normal": J.normal(V),
        "gram": J.gram(),
        "Kronecker factors": values,
        "Kronecker covariance": J.rotated(rotation).gram_diag(1 / (1 + values)),
    }


def fitted(net: nn.Module) -> dict[str, Tensor]:
    x, y, new = tokens(7), torch.arange(7) % 3, tokens(3, seed=1)
    tangent = linnet.TangentClassifier(net, inference="map", prior=1.0).fit(x, y)
    embedding = linnet.FisherEmbedding(net, 2).fit(x)
    return {
        "Laplace": torch.as_tensor(linnet.Laplace(net, structure="kron", prior=1.0).fit(x, y).predict_proba(new)),
        "TangentClassifier": torch.as_tensor(tangent.predict_proba(new)),
        "FisherEmbedding": torch.as_tensor(embedding.transform(new)).abs(),
    }


def answers(way: str, net: nn.Module, *, estimators: bool) -> dict[str, Tensor]:
    """Ranks have different numbers of chunks, or none, and call different layers, where the network branches."""
    n, batch_size = (3, 1) if way == "branches" else (7, 7)
    found = products(net, n, batch_size)
    return found | fitted(net) if estimators and way != "branches" else found


def trained(net: nn.Module) -> list[bool]:
    """Whether a network that linnet has used is as it was, and trains."""
    x, y = tokens(4), torch.arange(4) % 3
    before = net(x).detach()
    mode, kind, hooks = net.training, type(net), [len(m._forward_pre_hooks) for m in net.modules()]
    lin = linnet.linearize(net.train())
    J = lin.jacobian(x)
    _ = J.gram()
    same = [
        all(isinstance(t, DTensor) for t in net.parameters()),
        (net.training, type(net), [len(m._forward_pre_hooks) for m in net.modules()]) == (mode, kind, hooks),
        torch.equal(net(x), before),
    ]
    optimizer = torch.optim.SGD([t for t in net.parameters() if t.requires_grad], 0.1)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    same.append(not torch.allclose(net(x), before))
    try:
        lin.jacobian(x)
    except RuntimeError as error:
        same.append("has changed since the model was linearized" in str(error))
    return same


class Heads(nn.Module):
    """Divides the number of heads by the size of the mesh, as plans do for layers that they cut."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.up, self.out = heads, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.out(y.unflatten(-1, (self.heads, -1)).softmax(1).flatten(1))


class Uses(nn.Module):
    """Uses a sharded weight behind a layer that is selected.

    Args:
        use: From the module and the output of the layer to the output of the module.
        dtype: Dtype of the weight.
    """

    def __init__(self, use: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        parts = [distribute_tensor(torch.ones(3, 4, 1).to(dtype), mesh, [Shard(0)]) for _ in range(2)]
        self.use, self.layer = use, nn.Linear(4, 4).double()
        self.weight, self.beside = nn.Parameter(parts[0], requires_grad=False), parts[1:]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x)[..., None]).flatten(1)


def overwrite(m: Any, h: Tensor) -> Tensor:
    y = F.conv1d(h, m.weight)
    h.mul_(2.0)
    return y


def compute_gram(use: Callable[[Any, Tensor], Tensor]) -> Tensor:
    return linnet.linearize(Uses(use)).jacobian(normal(2, 4)).gram()


USES = {
    "written": (lambda m, h: F.conv1d(h, m.weight.mul_(1.0)), "Refusal: The forward pass writes into the parameter"),
    "data": (lambda m, h: F.conv1d(h, m.weight.data), "Refusal: The forward pass reads .data of the sharded para"),
    "beside": (lambda m, h: F.conv1d(h, m.beside[0]), "Refusal: The forward pass uses a DTensor of shape (3, 4, 1)"),
    "overwritten": (overwrite, "RuntimeError: The network overwrites, in place, a tensor that the backward pass"),
}


def refusals(rank: int) -> dict[str, str]:
    """What this rank says to calls that cannot be served."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    heads = parallelize_module(Heads(4).double(), mesh, {"up": ColwiseParallel(), "out": RowwiseParallel()})
    heads.heads = 2
    whole = shard("FSDP2, whole adapters", 2)
    J = linnet.linearize(whole).jacobian(tokens(5))
    fitted = linnet.TangentClassifier(whole, inference="map", prior=1.0).fit(tokens(4), torch.arange(4) % 3)
    calls = {
        "heads": lambda: linnet.linearize(heads).jacobian(normal(3, 4)).gram(),
        "apply": fitted.apply,
        "top": lambda: linnet.TangentClassifier(whole, top=1).fit(tokens(4), torch.arange(4) % 3),
        "mesh": lambda: linnet.linearize(whole).jacobian(tokens(5), mesh=mesh),
        **{
            name: lambda use=use: linnet.linearize(Uses(use)).jacobian(normal(2, 4)).gram()
            for name, (use, _) in USES.items()
        },
        "quantized": lambda: linnet.linearize(Uses(overwrite, torch.int8)),
        "one rank fails": lambda: J.fused(lambda JV, batch: JV * (1 / (1 - rank)), normal(J.shape[1])),
        "nothing": lambda: J @ normal(J.shape[1]),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def work(rank: int, folder: str, world: int) -> None:
    found = {way: answers(way, shard(way, world), estimators=way in ESTIMATORS) for way in QUICK[world]}
    torch.save(found, f"{folder}/{world}-{rank}.pt")
    if world == 2:
        net = shard("FSDP2, sharded adapters", world)
        x, y = tokens(6), torch.arange(6) % 3
        estimator = linnet.TangentClassifier(net, inference="map", prior=1.0).fit(x, y)
        estimator.save(f"{folder}/file")
        again = linnet.load(f"{folder}/file", net)
        said = {
            "plan": str(linnet.linearize(net).jacobian(x).plan),
            "loaded": bool((again.predict_proba(x) == estimator.predict_proba(x)).all()),
            "predicted": torch.as_tensor(estimator.predict_proba(x)).tolist(),
            "trained": trained(net),
            **refusals(rank),
        }
        Path(f"{folder}/{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all ranks, which run once for all tests, have left what they found."""
    folder = tmp_path_factory.mktemp("sharded")
    for world in QUICK:
        start(work, world, folder, world)
    return folder


@pytest.fixture(scope="module")
def said(folder) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check_all_ranks(way: str, alone: dict[str, Tensor], folder: Path, world: int) -> None:
    for rank in range(world):
        here = torch.load(folder / f"{world}-{rank}.pt")[way]
        assert list(here) == list(alone)
        for name, reference in alone.items():
            size = max(float(reference.abs().max()), 1e-300)
            assert float((here[name] - reference).abs().max()) <= 1e-9 * size, (rank, name)


@pytest.mark.parametrize(("world", "way"), [(world, way) for world, ways in QUICK.items() for way in ways])
def test_every_rank_has_the_answer_of_one_process(folder, world, way):
    check_all_ranks(way, answers(way, build(way), estimators=way in ESTIMATORS), folder, world)


def work_on_all(rank: int, folder: str, world: int) -> None:
    found = {way: answers(way, shard(way, world), estimators=True) for way in ALL[world]}
    torch.save(found, f"{folder}/{world}-{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("world", ALL)
def test_every_rank_has_the_answer_of_one_process_in_all_ways(tmp_path, world):
    start(work_on_all, world, tmp_path, world)
    for way in ALL[world]:
        check_all_ranks(way, answers(way, build(way), estimators=True), tmp_path, world)


def test_the_module_stays_as_it_was_and_trains(said):
    assert [one["trained"] for one in said] == [[True] * 5] * 2


def test_a_file_of_a_sharded_model_loads_on_all_ranks_and_in_one_process(folder, said):
    again = torch.as_tensor(linnet.load(folder / "file", tower()).predict_proba(tokens(6)))
    for one in said:
        assert one["loaded"]
        torch.testing.assert_close(again, torch.tensor(one["predicted"], dtype=torch.float64), rtol=1e-9, atol=0)


def test_the_plan_says_that_weights_are_gathered(said):
    for one in said:
        assert "2 ranks, " in one["plan"] and "of sharded weights gathered call by call" in one["plan"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("heads", "Refusal: The module gives other outputs under its tensor parallel plan than with whole weights."),
        ("apply", "TypeError: apply needs the whole weights of the model on every rank; this model is sharded"),
        ("top", "TypeError: A trace of the calls of the network (top=, block_names, attach_head) needs the whole"),
        ("quantized", "ValueError: Parameter 'weight' is sharded and quantized (torch.int8)."),
        *((name, message) for name, (_, message) in USES.items()),
        ("mesh", "ValueError: The weights of the model lie in parts on the ranks: give mesh= to linnet.linearize."),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(said, call, message):
    for one in said:
        assert one[call].startswith(message)


def test_an_error_of_one_rank_reaches_the_ranks_that_gather_weights(said):
    assert said[1]["one rank fails"].startswith("ZeroDivisionError: division by zero")
    assert "Rank 1 of 2 failed with ZeroDivisionError: division by zero" in said[0]["one rank fails"]
    assert "nothing" not in said[0] and "nothing" not in said[1]  # the ranks go on together


class Whole:
    """Stands for weights in parts, and notes whether an error of a gathering would reach all ranks."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.inside: list[bool] = []

    def gather(self, name: str) -> Tensor:
        self.inside.append(distributed._inside.get())
        return self.weight


def test_a_backward_pass_in_another_thread_knows_the_block_that_it_is_in():
    x, weight = normal(2, 3).requires_grad_(), normal(4, 3, seed=1)
    weights = Whole(weight)
    token = distributed._inside.set(True)
    try:
        with _keeping_parts(weights, {address(weight): "weight"}, (x, weight)):  # type: ignore[arg-type]
            y = F.linear(x, weight)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    finally:
        distributed._inside.reset(token)
    assert weights.inside == [True]
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3))


class FullyShardedDataParallel(nn.Sequential):
    """By its name, what FSDP1 makes of a module."""


def test_a_module_that_is_distributed_in_another_way_is_refused_by_name():
    with pytest.raises(TypeError, match=r"The submodule '0' is wrapped in FullyShardedDataParallel \(FSDP1\)"):
        linnet.linearize(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 1))))
    pipe = type("Pipe", (nn.Sequential,), {"__module__": "torch.distributed.pipelining._IR"})
    with pytest.raises(TypeError, match=r"The model is a pipeline \(Pipe\), whose stages lie on different ranks"):
        linnet.linearize(pipe(nn.Linear(2, 1)))


def test_a_copy_keeps_the_hooks_of_others_and_the_class():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    net[0].register_forward_hook(_foreign)
    assert is_tensor_parallel(net) and plain_class(net[0]) is nn.Linear
    lin, x = linnet.linearize(net), torch.ones(1, 2)
    torch.testing.assert_close(lin(x), net[0].weight.sum(1) * 2 + net[0].bias[None])
    assert len(net[0]._forward_hooks) == 1


def _foreign(module: nn.Module, args: Any, out: Any) -> Any:
    raise AssertionError("a hook of torch.distributed ran in the copy")


_foreign.__module__ = "torch.distributed.tensor._api"
