"""Two and four ranks give every rank the answer of one process, and fail together."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset

import linnet
from linnet._common import Ranks, shard
from linnet._common.distributed import TEXT
from linnet.inference import Training
from linnet.inference.mode.adam import train_by_adam
from linnet.linalg import RowParts, cg, sketch
from linnet.linalg.svd.block_krylov import KrylovSpace
from linnet.probability import Categorical
from linnet.testing.case import Net

WORLD = 2
C, D = 3, 4

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Switched(nn.Module):
    """Some layers only serve examples that one of the ranks has, and one serves none."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.head = nn.Linear(D, 5), nn.Linear(D, 5), nn.Linear(5, C)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        mine = x[:, 0] > 1
        h = self.near(x)
        if mine.any():
            h = torch.where(mine[:, None], self.far(x), h)
        return self.head(h.tanh())


def convolutional() -> nn.Module:
    return Net(
        lambda m, x: m.fc(torch.tanh(m.norm(m.conv(x.view(-1, 1, 2, 2)))).flatten(1)) * m.scale.exp(),
        conv=nn.Conv2d(1, 4, 2),
        norm=nn.GroupNorm(2, 4),
        fc=nn.Linear(4, C),
        scale=nn.Parameter(torch.zeros(C)),
    )


class Examples(Dataset):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i


MODELS = {"switched": Switched, "convolutional": convolutional}
SCENARIOS = [
    (model, n, kind, engine)
    for model in MODELS
    for n in (7, 1)  # not divisible by the ranks, and fewer than ranks
    for kind in ("memory", "Dataset")
    for engine in ("auto", "ghost")
    if (kind, engine) != ("Dataset", "ghost")
]


def results(model: str, n: int, kind: str, engine: str) -> dict[str, Tensor]:
    """Every product of one Jacobian; what a rank computes is what a process alone computes."""
    torch.manual_seed(0)
    net = MODELS[model]().double()
    x = normal(n, D).clamp(max=0.9)
    x[-1, 0] = 2.0  # an example of the last rank
    data = (x, torch.arange(n)) if kind == "memory" else Examples(x)
    J = linnet.linearize(net).jacobian(data, 2, engine=engine)
    other = linnet.linearize(net).jacobian(normal(3, D, seed=5), 2)
    V, U = normal(J.shape[1], 4), normal(J.shape[0], 4, seed=1)
    w, W, s = normal(n * C, seed=2), normal(n, C, C, seed=3), normal(J.shape[1], seed=4)

    def fn(JV: Tensor, batch) -> Tensor:
        return (JV + batch.f.flatten()).sin() * (1.0 + batch.index).repeat_interleave(C)

    found = {
        "J V": J @ V,
        "J v": J @ V[:, 0],
        "J^T U": J.T @ U,
        "J^T u": J.T @ U[:, 0],
        "normal": J.normal(V),
        "normal, weight": J.normal(V, w),
        "normal, blocks": J.normal(V, W),
        "centered": J.centered(s).normal(V, w),
        "fused": J.fused(fn, V[:, 0]),
        "gram": J.gram(),
        "gram, scale": J.gram(scale=s),
        "cross gram": J.gram(other),
        "other cross gram": other.gram(J),
        "gram_diag": J.gram_diag(s),
        "gram_blocks": J.gram_blocks(s),
        "column_norms": J.column_norms(w),
        "outputs": J.outputs(),
        "pullback": J.pullback(lambda batch: batch.f.sin()),
    }
    found |= {f"layer {name}": K for name, K in J.layer_grams().items()}
    kron = J.kronecker(w.view(n, C))
    found |= {
        f"Kronecker factors {key}": torch.cat([pair.A.flatten(), pair.G.flatten()]) for key, pair in kron.pairs.items()
    }
    found |= {f"exact block {key}": block for key, block in kron.exact.items()} | {"Kronecker rest": kron.squares}
    rotation, values = kron.decomposed()
    found["Kronecker covariance"] = J.rotated(rotation).gram(scale=1 / (1 + values))
    for i, part in enumerate(J.minibatches(3, seed=0)):
        found[f"minibatch {i}"] = part.normal(V)
    if (kind, engine) != ("memory", "auto"):
        return found
    K = J.cached()
    for form, rows in {"as read": J, "factors kept": K}.items() if n > 1 else ():
        trained = train_by_adam(
            rows, torch.arange(n) % C, variance=s.square(), likelihood=Categorical(), training=Training(3, 3)
        )
        assert trained.mode.u is not None
        found |= {
            f"Adam, {form}": trained.mode.u,
            f"Adam, {form}, outputs": trained.mode.f,
            f"Adam, {form}, residual": trained.mode.alpha,
            f"Adam, {form}, path": torch.tensor([*trained.path, trained.mode.objective, trained.rate]),
        }
    for form, rows in {"as read": J, "factors kept": K}.items():
        found[f"sketch, {form}"] = sketch(rows, W, rank=2, generator=torch.Generator().manual_seed(0)).multiply(V)
    found |= {
        "cached, J V": K @ V,
        "cached, J^T U": K.T @ U,
        "cached, fused": K.fused(fn, V[:, 0]),
        "cached, gram": K.gram(),
        "cached, cross gram": K.gram(other),
        "cached, other cross gram": other.gram(K.subset(torch.arange(n).flip(0))),
        "cached, blocks": K.gram_blocks(s),
        "cached, column_norms": K.column_norms(w),
        "cached, outputs": K.outputs(),
    }
    return found


OF_FOUR = [("switched", 7, "memory", "auto"), ("convolutional", 3, "Dataset", "auto")]


def results_of_estimators() -> dict[str, Tensor]:
    """What the estimators find; what a rank finds is what a process alone finds."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, C)).double()
    x, new, labels = normal(23, D), normal(5, D, seed=1), torch.arange(23) % C
    found = {}
    for structure in ("kron", "ekfac", "diag", "full", "lowrank"):
        la = linnet.Laplace(net, "classification", structure, **({"rank": 4} if structure == "lowrank" else {}))
        la.fit(x, labels)
        found[f"Laplace {structure}"] = torch.cat([la.predict_proba(new).flatten(), torch.tensor([la.log_evidence()])])
    clf = linnet.TangentClassifier(net).fit(x, labels)
    found["TangentClassifier"] = torch.cat([clf.predict_proba(new).flatten(), torch.tensor([clf.log_evidence_])])
    for solver in ("function", "weight", "cg-function", "cg-weight"):
        reg = linnet.TangentRegressor(net, output=lambda out: out[:, 0], solver=solver, tolerance=1e-12, rank=3)
        reg.fit(x, x[:, 0].sin())
        mean, std = reg.predict(new, return_std=True)
        found[f"TangentRegressor {solver}"] = torch.cat([mean, std, torch.tensor([reg.log_evidence_])])
    reg = linnet.TangentRegressor(net, inputs=True, output=lambda out: out[:, 0]).fit(x, x[:, 0].sin())
    mean, std = reg.predict(new, return_std=True)
    found["TangentRegressor, features of the inputs"] = torch.cat([mean, std, torch.tensor([reg.inputs_])])
    emb = linnet.FisherEmbedding(net, 3, method="krylov", tolerance=1e-12).fit(x)
    Z = emb.transform(new)
    found["FisherEmbedding"] = torch.cat([emb.eigenvalues_, (Z @ Z.T).flatten()])
    return found


def kernel_in_parts() -> dict[str, Tensor]:
    """Products with a kernel of which each rank has its rows, and the size of the part."""
    torch.manual_seed(0)
    J = linnet.linearize(convolutional().double()).jacobian(normal(7, D))
    s = normal(J.shape[1], seed=4).square()
    part = J.own_gram(s)
    K = RowParts(part, block=C, ranks=J.ranks)
    V = normal(7 * C, 4, seed=1)
    solution = cg(lambda U: U + K @ U, V, tolerance=1e-13).value
    return {"kernel, products": K @ V, "kernel, solution": solution, "kernel, adjoint": K.T @ V[:, 0]}


def embed(file: str | None, *, stop: int | None = None) -> tuple[Tensor, int]:
    """Eigenvalues, and the passes that it took to find them; interrupted after ``stop`` passes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)).double()
    taken, step = [0], KrylovSpace.step

    def counted(self: KrylovSpace, *args, **kwargs):
        if taken[0] == stop:
            raise InterruptedError
        taken[0] += 1
        return step(self, *args, **kwargs)

    options = {"method": "krylov", "block": 2, "passes": 12, "tolerance": 0.0, "checkpoint": file}
    with mock.patch.object(KrylovSpace, "step", counted):
        try:
            found = linnet.FisherEmbedding(net, 3, **options).fit(normal(23, D)).eigenvalues_
        except InterruptedError:
            return torch.zeros(3), taken[0]
    return found, taken[0]


DISAGREEMENTS = {
    "one number of the last example": "the data",
    "one example more": "the number of examples, the data",
    "the examples of a Dataset": "the data",
    "a frozen weight": "the weights of the model",
    "a buffer": "the weights of the model",
    "targets": "targets",
    "an option": "options",
    "labels": "labels",
    "targets of an approximation": "targets",
    "data of an approximation": "the data",
    "data of an embedding": "the data",
    "an option of an embedding": "options",
    "inputs to predict": "the number of examples, the data",
    "data of a Jacobian": "the data",
    "the engine of a Jacobian": "engine",
}


def refusal(case: str, rank: int, world: int) -> str:
    """What this rank says where the last rank has something else than the others."""
    other = rank == world - 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    net[0].weight.requires_grad_(False)
    x, y, noise, components = normal(9, D), normal(9, seed=1), 0.1, 2
    new = normal(4, D, seed=2)
    if other:
        if case == "one number of the last example" or case.startswith("data of a"):
            x[-1, 0] += 1e-9
        elif case == "one example more":
            x, y = normal(10, D), normal(10, seed=1)
        elif case == "the examples of a Dataset":
            x = x.flip(0)
        elif case == "a frozen weight":
            net[0].weight.data[0, 0] += 1e-9
        elif case == "a buffer":
            net[1].running_mean[0] += 1e-9
        elif case in ("targets", "targets of an approximation", "labels"):
            y[0] = -y[0]
        elif case == "an option":
            noise = 0.2
        elif case == "an option of an embedding":
            components = 3
        elif case == "inputs to predict":
            new = new[:3]
    try:
        if case == "labels":
            linnet.TangentClassifier(net, inference="map", prior=1.0).fit(x, (y > 0).long())
        elif case.endswith("approximation"):
            linnet.Laplace(net, "regression", "full", noise=noise, prior=1.0).fit(x, y)
        elif case.endswith("embedding"):
            linnet.FisherEmbedding(net, components, score=linnet.scores.energy(), seed=components).fit(x)
        elif case.endswith("Jacobian"):
            engine = "rows" if other and case.startswith("the engine") else "auto"
            linnet.linearize(net).jacobian(x, engine=engine).outputs()
        else:
            data = Examples(x) if case == "the examples of a Dataset" else x
            reg = linnet.TangentRegressor(net, noise=noise, prior=1.0, solver="weight").fit(data, y)
            reg.predict(new)
    except ValueError as error:
        return str(error)
    return "accepted"


def over_meshes() -> dict[str, Tensor]:
    """Products over parts of the ranks, and the number of ranks that took part."""
    torch.manual_seed(0)
    net, x = convolutional().double(), normal(7, D)
    meshes = {
        "one dimension": init_device_mesh("cpu", (WORLD,)),
        "data x tensor": init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("data", "tensor")),
        "tensor x dp": init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("tensor", "dp")),
    }
    found = {}
    for name, mesh in meshes.items():
        J = linnet.linearize(net, mesh=mesh).jacobian(x)
        again = linnet.linearize(net).jacobian(x, mesh=mesh)
        found[name] = torch.cat([J.normal(normal(J.shape[1])), torch.tensor([J.ranks.world, again.ranks.world])])
    return found


def over_other_mesh() -> str:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    try:
        linnet.linearize(nn.Linear(2, 1), mesh=mesh)
    except ValueError as error:
        return str(error)
    return f"accepted {linnet.linearize(nn.Linear(2, 1), mesh=mesh['replicate'])}"


def failure(where: str, rank: int) -> str:
    """What this rank says where the last rank alone fails."""
    other = rank == WORLD - 1
    net, x = nn.Linear(D, 1).double(), normal(9, D)
    J = linnet.linearize(net).jacobian(x)
    V = normal(J.shape[1], 2)
    try:
        if where == "in a pass":
            J.fused(lambda JV, batch: JV * (1 / int(not other)), V)
        elif where == "between passes":
            with J.ranks.together():
                _ = J @ V
                if other:
                    raise KeyError("a name")
                _ = J.T @ (J @ V)
        elif where == "at the end":
            with J.ranks.together():
                _ = J @ V
                if other:
                    raise UnicodeDecodeError("utf-8", b"x", 0, 1, "no text")
        elif where == "other calls":
            _ = J @ V if other else J @ V[:, 0]
        _ = J @ V  # the ranks go on together
    except (ArithmeticError, KeyError, ValueError, RuntimeError) as error:
        J.ranks.add_up(torch.ones(1))
        return f"{type(error).__name__}: {error}"
    return "succeeded"


FAILURES = {
    "in a pass": ("ZeroDivisionError", "Rank 1 of 2 failed with ZeroDivisionError: "),
    "between passes": ("KeyError", "Rank 1 of 2 failed with KeyError: 'a name'"),
    "at the end": ("RuntimeError", "Rank 1 of 2 failed with UnicodeDecodeError: 'utf-8' codec"),
}


def work(rank: int, world: int, folder: str) -> None:
    """One rank: every scenario, then its results to a file."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        ranks = Ranks()
        assert (ranks.rank, ranks.world) == (rank, world)
        found: dict[str, dict[str, Tensor]] = {"estimators": results_of_estimators() | kernel_in_parts()}
        for scenario in SCENARIOS if world == WORLD else OF_FOUR:
            found["/".join(map(str, scenario))] = results(*scenario)
        if world == WORLD:  # goes on from where one process has stopped
            eigenvalues, taken = embed(f"{folder}/one.safetensors")
            found["checkpoint"] = {"eigenvalues": eigenvalues, "taken": torch.tensor(taken)}
        else:
            embed(f"{folder}/four.safetensors", stop=5)
        if world != WORLD:
            torch.save(found, f"{folder}/rank{rank}.pt")
            return
        t = torch.full((2,), float(rank + 1))
        ranks.add_up(t)
        rows = torch.zeros(6, 2)
        start, stop = shard(3, rank, WORLD)
        rows[2 * start : 2 * stop] = rank + 1
        ranks.share_rows(rows, 3, 2)
        least = [ranks.smallest(value) for value in (5.0 - rank, 5.0 + rank)]
        found["parts"] = {"sum": t, "rows": rows, "least": torch.tensor(least)}
        net = linnet.linearize(nn.Linear(D, C).double()).jacobian(normal(3, D))
        found["parts"]["plan"] = torch.tensor(str(net.plan).count("2 ranks"))
        found["parts"]["refused"] = torch.zeros(1)
        try:
            net.cached(memory=net.cache_size - rank)
        except MemoryError:
            found["parts"]["refused"] += 1
        found["meshes"] = over_meshes()
        torch.save(found, f"{folder}/rank{rank}.pt")
        said = {case: refusal(case, rank, world) for case in ("nothing", *DISAGREEMENTS)}
        said |= {where: failure(where, rank) for where in ("nowhere", *FAILURES, "other calls")}
        said["mesh"] = over_other_mesh()
        Path(f"{folder}/rank{rank}.json").write_text(json.dumps(said))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where both ranks, which run once for all tests, have left what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    assert embed(f"{folder}/one.safetensors", stop=4)[1] == 4
    mp.spawn(work, args=(WORLD, str(folder)), nprocs=WORLD, join=True)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict[str, dict[str, Tensor]]]:
    """What each of four ranks has found."""
    folder = tmp_path_factory.mktemp("four")
    mp.spawn(work, args=(4, str(folder)), nprocs=4, join=True)
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]
    eigenvalues, taken = embed(f"{folder}/four.safetensors")  # in one process, after four
    found[0]["after four"] = {"eigenvalues": eigenvalues, "taken": torch.tensor(taken)}
    return found


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, dict[str, Tensor]]]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_differ_are_all_refused_with_what_differs(folder, case):
    for rank in range(WORLD):
        said = json.loads((folder / f"rank{rank}.json").read_text())[case]
        assert f"rank 0 and rank 1 differ in {DISAGREEMENTS[case]}. Give every rank" in said


def test_ranks_that_agree_are_accepted(folder):
    for rank in range(WORLD):
        assert json.loads((folder / f"rank{rank}.json").read_text())["nothing"] == "accepted"


def test_an_error_of_one_rank_reaches_all_with_its_message_and_the_ranks_go_on(folder):
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    assert [one["nowhere"] for one in said] == ["succeeded"] * WORLD
    for where, (kind, message) in FAILURES.items():
        assert said[0][where].startswith(f"{kind}: ") and message in said[0][where].replace('"', ""), where
        assert "Rank" not in said[1][where] and message.split(": ")[1] in said[1][where], where


def test_ranks_that_make_different_calls_are_all_told_which(folder):
    for rank in range(WORLD):
        said = json.loads((folder / f"rank{rank}.json").read_text())["other calls"]
        assert (
            "rank 0 exchanges the rows of (9, 1) in float64 of 9 examples; rank 1 exchanges the rows of (9, 2)" in said
        )


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_examples_are_shared_out_over_the_data_dimension_of_a_mesh(ranks, folder, rank):
    torch.manual_seed(0)
    J = linnet.linearize(convolutional().double()).jacobian(normal(7, D))
    alone, found = J.normal(normal(J.shape[1])), ranks[rank]["meshes"]
    for name, world in {"one dimension": WORLD, "data x tensor": WORLD, "tensor x dp": 1}.items():
        assert found[name][-2:].tolist() == [world, world]
        torch.testing.assert_close(found[name][:-2], alone, rtol=1e-12, atol=1e-12)
    said = json.loads((folder / f"rank{rank}.json").read_text())["mesh"]
    assert "called 'data' or 'dp'; this mesh has 'replicate', 'shard'. Pass the dimension itself" in said


def test_a_mesh_is_a_device_mesh():
    with pytest.raises(TypeError, match=r"mesh must be a .*DeviceMesh; got int"):
        linnet.linearize(nn.Linear(2, 1), mesh=2)


def check_close(found: dict[str, Tensor], alone: dict[str, Tensor], tolerance: float) -> None:
    assert list(found) == list(alone)
    for name, reference in alone.items():
        size = max(float(reference.abs().max()), 1e-300)
        assert found[name].shape == reference.shape, name
        assert float((found[name] - reference).abs().max()) <= tolerance * size, name


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: "/".join(map(str, scenario)))
def test_every_rank_has_the_answer_of_one_process(ranks, scenario):
    alone = results(*scenario)
    for found in ranks:
        check_close(found["/".join(map(str, scenario))], alone, 1e-12)


def test_four_ranks_have_the_answer_of_one_process_also_where_they_are_more_than_examples(four):
    for scenario in OF_FOUR:
        alone = results(*scenario)
        for found in four:
            check_close(found["/".join(map(str, scenario))], alone, 1e-12)


def test_estimators_find_the_same_on_every_rank_as_alone(ranks, four):
    alone = results_of_estimators() | kernel_in_parts()
    for found in (*ranks, *four):
        check_close(found["estimators"], alone, 1e-9)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks, four):
    wanted, taken = embed(None)
    for found, before in ((ranks[0]["checkpoint"], 4), (ranks[1]["checkpoint"], 4), (four[0]["after four"], 5)):
        torch.testing.assert_close(found["eigenvalues"], wanted, rtol=1e-9, atol=0)
        assert int(found["taken"]) == taken - before > 0


def test_ranks_agree_to_the_last_bit(ranks, four):
    for first, *rest in (ranks, four):
        for scenario, found in first.items():
            for name, value in found.items():
                others = [other[scenario] for other in rest if scenario in other]
                assert all(torch.equal(value, other[name]) for other in others), (scenario, name)


@pytest.mark.parametrize("rank", range(WORLD))
def test_ranks_refuse_together_what_does_not_fit_on_one(ranks, rank):
    assert ranks[rank]["parts"]["refused"].tolist() == [1.0]


def test_parts(ranks):
    assert ranks[1]["parts"]["sum"].tolist() == [3.0, 3.0]
    assert ranks[0]["parts"]["rows"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert int(ranks[0]["parts"]["plan"]) == 1


@pytest.mark.parametrize("rank", range(WORLD))
def test_all_ranks_have_the_smallest_value(ranks, rank):
    assert ranks[rank]["parts"]["least"].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(("n", "world"), [(10, 3), (2, 5), (1, 2), (8, 4)])
def test_shards_cover_all_examples_in_order(n, world):
    parts = [shard(n, rank, world) for rank in range(world)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(n))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


def test_what_a_rank_says_may_be_cut_within_a_character(monkeypatch):
    monkeypatch.setattr(Ranks, "_gather", lambda self, every, part: every.copy_(part))
    assert Ranks(alone=True)._say("x" + "é" * TEXT) == ["x" + "é" * (TEXT // 2 - 1)]


def test_alone_there_is_one_rank():
    ranks = Ranks()
    assert (ranks.rank, ranks.world) == (0, 1)
    assert ranks.smallest(3.5) == 3.5
    t = torch.ones(2)
    ranks.add_up(t)
    ranks.share_rows(t, 2)
    assert t.tolist() == [1.0, 1.0]
