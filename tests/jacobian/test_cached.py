"""A Jacobian with its blocks in memory: the same numbers, without the network and without the data."""

from __future__ import annotations

import gc
import re
import warnings
import weakref

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linnet
from linnet.jacobian import Jacobian
from linnet.jacobian.blocks.convolution import Convolution
from linnet.jacobian.cached import StoredChunks
from linnet.jacobian.passes import Pass
from linnet.jacobian.rule_selection import RuleSelection
from linnet.linalg import Stack
from linnet.network import FunctionalModel
from linnet.testing import check_operator, dense_jacobian, zoo
from linnet.testing.case import Net
from tests.support.drawn import double, normal

N, D, C, CHUNK = 5, 4, 3, 2  # the last chunk has one example
NAMES = (
    "mlp",
    "mlp_elu_scalar",
    "linear_regression",
    "lora",
    "unused_layer",
    "raw_parameters",
    "routing",
    "dict_inputs",
    "tied_autoencoder",
    "tied_weights",
    "conv1d_grouped",
    "conv2d",
    "conv_transpose2d",
    "resnet",
    "frames",
    "batch_norm2d",
    "embedding_padding",
    "embedding_positions",
    "language_model",
    "lstm",
    "folded_time_major",
    "attention",
    "vit",
)


def close(value: Tensor, reference: Tensor, *, rtol: float = 1e-9) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= rtol * reference.abs().max()


def spoil(data: object) -> None:
    """Other numbers in place."""
    for t in data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else [data]:
        t.zero_()


def tensors(J: Jacobian) -> list[Tensor]:
    return [t for piece in J.passes.chunks.pieces for _, held in piece.blocks for t in held]


@pytest.fixture
def no_network(monkeypatch):
    """Called, it makes every later use of a network an error."""

    def forbid() -> None:
        def refuse(self, *args, **kwargs):
            raise AssertionError("the network was used")

        for method in ("forward", "check_unchanged"):
            monkeypatch.setattr(FunctionalModel, method, refuse)
        for method in ("record", "assign", "can"):
            monkeypatch.setattr(RuleSelection, method, refuse)

    return forbid


@pytest.fixture
def model() -> nn.Module:
    return double(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)))


@pytest.fixture
def x() -> Tensor:
    return normal(N, D, seed=1)


# The same numbers.


@pytest.mark.parametrize(("name", "last"), [*((name, False) for name in NAMES), ("conv2d", True), ("resnet", True)])
def test_every_product_without_network_and_data(name, last, no_network, monkeypatch):
    if last:  # as in float32
        monkeypatch.setattr(Convolution, "channels_last", lambda self, g: len(self.kernel) == 2)
    case = zoo()[name]
    model, data, elsewhere = case.build(), case.data(N, 0), case.data(3, 1)
    A, B, f = case.dense(model, data), case.dense(model, elsewhere), case.outputs(model, data).detach()
    c = len(A) // N
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "linnet's layer rules")
        lin = linnet.linearize(model, output=case.output)
        J = lin.jacobian(data, CHUNK).cached()
        other = lin.jacobian(elsewhere, engine="ghost").cached()
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.zero_()
    spoil(data)
    no_network()
    check_operator(J, A, blocks=c, other=(other, B))
    close(J.outputs(), f)
    layout = lin.layout
    grams = J.layer_grams()
    assert list(grams) == list(layout.layers)
    close(sum(grams.values()), A @ A.T)
    level = layout.flatten({name: torch.full(s, 0.5 + i).double() for i, (name, s) in enumerate(layout.shapes.items())})
    close(J.gram(other, level), (A * level) @ B.T)
    index = torch.tensor([4, 0, 2, 0, 3])
    X = A.unflatten(0, (N, c))[index].flatten(0, 1)
    part = J.subset(index)
    assert part.index.tolist() == index.tolist()
    close(part.gram(J), X @ A.T)
    close(part.dense(), X)
    close(part.outputs(), f[index])
    check_operator(other, B, blocks=c)  # which kept every layer as its two sides
    assert not any(t.requires_grad for t in tensors(J))


def test_autodiff_alone(model, x, no_network):
    A = dense_jacobian(model, x)
    J = linnet.linearize(model).jacobian(x, CHUNK, engine="autodiff")
    size, J = J.cache_size, J.cached()
    assert J.cache_size == size == 8 * N * C * (A.shape[1] + 1)
    no_network()
    check_operator(J, A, blocks=C)


@pytest.mark.parametrize("batch_size", [1, 2, N, "auto"])
def test_chunks(model, x, batch_size):
    A = dense_jacobian(model, x)
    lin = linnet.linearize(model)
    J = lin.jacobian(x, batch_size)
    check_operator(J.cached(), A, blocks=C, other=(J, A))
    check_operator(J, A, blocks=C, other=(J.cached(), A))


def test_smaller_chunks_than_were_kept(model, x, monkeypatch):
    J = linnet.linearize(model).jacobian(x).cached()
    sizes = []
    chunks = StoredChunks.chunks

    def watched(self, *args):
        for batch, chunk in chunks(self, *args):
            sizes.append(batch.n)
            yield batch, chunk

    monkeypatch.setattr(StoredChunks, "chunks", watched)
    J.passes.settings.largest = 2
    check_operator(J, dense_jacobian(model, x), blocks=C)
    assert set(sizes) == {1, 2}


def test_compositions(model, x):
    A, z, d = dense_jacobian(model, x), normal(43), normal(43, seed=2)
    J = linnet.linearize(model).jacobian(x, CHUNK)
    check_operator(J.cached().centered(z).scaled(d), (A - z) * d, blocks=C, other=(J.scaled(d), A * d))
    check_operator(Stack([J.cached(), J]), torch.cat([A, A]), blocks=C, other=(J.cached(), A))


def test_of_a_linearization_in_another_dtype(model, x):
    A = dense_jacobian(model, x)
    J = linnet.linearize(model.float()).to(torch.float64).jacobian(x.float()).cached()
    close(J.gram(), A @ A.T, rtol=1e-5)
    assert J.dtype == torch.float64


# What came with the data.


def test_fused_has_outputs_targets_and_positions(model, x, no_network):
    A, f = dense_jacobian(model, x), model(x).detach()
    y = torch.arange(N) * 10
    names = {"labels": [f"example {i}" for i in range(N)], "y": y}
    J = linnet.linearize(model).jacobian({"input": x, **names}, CHUNK).cached()
    y += 1
    no_network()
    v, seen = normal(A.shape[1]), []

    def fn(JV: Tensor, batch) -> Tensor:
        seen.extend(batch.index.tolist())
        assert batch.args == () and batch.kwargs == {}
        assert batch.rest["labels"] == [f"example {i}" for i in batch.index]
        assert batch.rest["y"].tolist() == [10 * i for i in batch.index.tolist()]
        close(batch.f, f[batch.index])
        return JV * (1.0 + batch.rest["y"]).repeat_interleave(C)

    weight = 1.0 + 10 * torch.arange(N).double().repeat_interleave(C)
    close(J.fused(fn, v), A.T @ (weight * (A @ v)))
    assert seen == list(range(N))
    seen.clear()
    index = torch.tensor([3, 1, 4])
    rows = (index[:, None] * C + torch.arange(C)).flatten()
    close(J.subset(index).fused(fn, v), A[rows].T @ (weight[rows] * (A[rows] @ v)))
    assert seen == index.tolist()


def test_targets(model, x):
    y = torch.arange(N)
    J = linnet.linearize(model).jacobian((x, y), CHUNK).cached()
    assert J.targets().tolist() == y.tolist()
    assert J.subset(torch.tensor([3, 0])).targets().tolist() == [3, 0]


def test_outputs_elsewhere_are_refused(model, x):
    J = linnet.linearize(model).jacobian(x).cached()
    with pytest.raises(ValueError, match="keeps no inputs"):
        J.outputs(dict(J.lin.theta))


# Subsets and minibatches.


def test_minibatches_copy_what_is_kept(model, x, no_network):
    A = dense_jacobian(model, x)
    J = linnet.linearize(model).jacobian(x, CHUNK).cached()
    no_network()
    parts = list(J.minibatches(3, seed=1))
    assert sorted(i for part in parts for i in part.index.tolist()) == list(range(N))
    V = normal(43, 2)
    close(sum(part.normal(V) for part in parts), A.T @ (A @ V))
    for part in parts:
        close(part @ V, (A @ V).view(N, C, 2)[part.index].flatten(0, 1))


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("chunk", [None, 9, 4, 3])
@pytest.mark.parametrize("name", ["conv2d", "resnet", "frames", "embedding_padding", "tied_weights", "raw_parameters"])
def test_minibatches_with_and_without_room_for_copies(name, chunk, room, no_network, monkeypatch):
    case = zoo()[name]
    model, data = case.build(), case.data(7, 0)
    A, f = case.dense(model, data), case.outputs(model, data).detach()
    J = linnet.linearize(model, output=case.output).jacobian(data, 3).cached()
    J.passes.settings.batch_size = "auto"  # kept in chunks of 3
    if chunk is not None:
        monkeypatch.setattr(Pass, "chunk_size", lambda self, **_: min(chunk, self.n))
    if not room:  # for copies of all minibatches
        monkeypatch.setattr("linnet.jacobian.jacobian.cache_limit", lambda memory, device: 0)
    no_network()
    c, V = len(A) // 7, normal(A.shape[1], 3)
    seen = []
    for late in (False, True):
        for part in J.minibatches(2, seed=1, late=late):
            rows, index = A.unflatten(0, (7, c))[part.index].flatten(0, 1), part.index

            def pull(JV: Tensor, batch: linnet.Batch, index: Tensor = index) -> Tensor:
                assert batch.start == 0 and batch.index.equal(index)
                close(batch.f, f[index])
                return JV + batch.f.flatten().view(-1, *(1,) * (JV.ndim - 1))

            for W in (V[:, 0], V):
                shifted = rows @ W + f[index].flatten().view(-1, *(1,) * (W.ndim - 1))
                close(part.fused(pull, W), rows.T @ shifted)
            close(part.gram(), rows @ rows.T)
            close(part.outputs(), f[index])
            seen += index.tolist()
    assert sorted(seen) == sorted([*range(7)] * 2)


def test_copies_of_minibatches_are_kept_until_they_are_forgotten(model, x, monkeypatch):
    J = linnet.linearize(model).jacobian(x, CHUNK).cached()
    first, second, other = (
        {tuple(part.index.tolist()): part for part in J.minibatches(size, seed=seed)}
        for size, seed in ((3, 0), (3, 1), (2, 0))
    )
    assert all(second[index] is part for index, part in first.items())
    assert other.keys().isdisjoint(first)
    J.forget_minibatches()
    assert all(part is not other[tuple(part.index.tolist())] for part in J.minibatches(2, seed=0))
    J.forget_minibatches()
    monkeypatch.setattr("linnet.jacobian.jacobian.cache_limit", lambda memory, device: 0)
    one, two = ({tuple(part.index.tolist()): part for part in J.minibatches(3, seed=seed)} for seed in (0, 1))
    assert one.keys() == two.keys() and all(two[index] is not part for index, part in one.items())


def test_what_products_make_of_a_copy_is_kept(model, x, monkeypatch):
    J, V = linnet.linearize(model).jacobian(x).cached(), normal(43, 2)
    part = next(iter(J.minibatches(3, seed=0)))
    first = part @ V

    def refuse(block):
        raise AssertionError("prepared again")

    monkeypatch.setattr(Pass, "prepare_for", lambda self, request, k: refuse)
    close(part @ V, first)
    with pytest.raises(AssertionError, match="prepared again"):
        _ = J.subset(part.index) @ V


def test_of_a_subset(model, x):
    A = dense_jacobian(model, x).view(N, C, -1)
    J = linnet.linearize(model).jacobian(x, CHUNK).subset(torch.tensor([4, 2, 0])).cached()
    assert J.index.tolist() == [4, 2, 0]
    check_operator(J, A[[4, 2, 0]].flatten(0, 1), blocks=C)
    again = J.subset(torch.tensor([2, 0]))
    assert again.index.tolist() == [0, 4]
    check_operator(again, A[[0, 4]].flatten(0, 1), blocks=C)
    with pytest.raises(IndexError, match="positions 0 to 2; got 3"):
        J.subset(torch.tensor([3]))


def test_of_data_that_is_read_in_order(model, x):
    """What could only be read in order can be chosen from once it is kept."""
    loader = DataLoader(TensorDataset(x, torch.arange(N)), batch_size=2)
    J = linnet.linearize(model).jacobian(loader)
    A = dense_jacobian(model, x)
    assert J.cached().by_position
    check_operator(J.cached(), A, blocks=C)
    check_operator(J.cached().subset(torch.tensor([4, 1])), A.view(N, C, -1)[[4, 1]].flatten(0, 1), blocks=C)


# Memory.


@pytest.mark.parametrize("name", NAMES)
def test_size_is_known_before(name):
    case = zoo()[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "linnet's layer rules")
        J = linnet.linearize(case.build(), output=case.output).jacobian(case.data(9, 0))
        kept = J.cached()
    assert kept.cache_size == pytest.approx(J.cache_size, rel=0.01 if name != "routing" else 2)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(kept)}
    assert sum(storages.values()) <= kept.cache_size
    assert kept.cached() is kept


def test_rows_are_kept_where_they_are_smaller():
    """A convolution over many pixels with few weights is kept as its weight gradient, a wide layer as its sides."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 64, 30), nn.Linear(30, 2)).double()
    x = normal(N, 1, 8, 8)
    J = linnet.linearize(model).jacobian(x).cached()
    each = [sum(t.numel() for t in held) // N for _, held in J.passes.chunks.pieces[0].blocks]
    assert sorted(each) == sorted([2 * (18 + 2), 128 + 2 * 30, 30 + 2 * 2])
    check_operator(J, dense_jacobian(model, x), blocks=2)


def test_inputs_that_layers_share_are_kept_once(x):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, 4) for _ in range(3))

        def forward(self, x):
            return (self.q(x) * self.k(x) + self.v(x)).tanh().sum(1)

    model = double(Heads())
    J = linnet.linearize(model).jacobian(x).cached()
    assert J.cache_size == 8 * N * (D + 3 * 4 + 1)
    part = J.subset(torch.tensor([1, 0]))
    assert part.cache_size == 8 * 2 * (D + 3 * 4 + 1)
    check_operator(J, dense_jacobian(model, x), blocks=1)


def test_nothing_else_is_kept_alive(model):
    """Neither the data nor a graph: the first layer's input is a view of the data, which is gone."""
    data = normal(100, D)
    source = weakref.ref(data.untyped_storage())
    pointer = data.untyped_storage().data_ptr()
    J = linnet.linearize(model).jacobian(data[:N], CHUNK).cached()
    assert all(t.untyped_storage().data_ptr() != pointer for t in tensors(J))
    assert all(t.untyped_storage().nbytes() <= t.numel() * 8 for t in tensors(J))
    assert all(t.grad_fn is None for t in tensors(J))
    del data
    gc.collect()
    assert source() is None
    assert J.gram().shape == (N * C, N * C)


def test_too_large_is_refused_before_the_pass(model, x, no_network):
    J = linnet.linearize(model).jacobian(x)
    size = J.cache_size
    assert J.cached(memory=size).cache_size == size
    no_network()
    text = (
        f"about {size:,} bytes, {size // N:,} for each of {N} examples, and {size - 1:,} are available for it. Select"
    )
    with pytest.raises(MemoryError, match=re.escape(text) + ".*params=.*memory=.*solver"):
        J.cached(memory=size - 1)


def test_auto_is_a_quarter_of_the_free_memory(model, x, monkeypatch):
    J = linnet.linearize(model).jacobian(x, N)

    class Free:
        available = 4 * J.cache_size

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free)
    assert J.cached().cache_size == J.cache_size
    Free.available -= 4
    with pytest.raises(MemoryError, match=f"and {J.cache_size - 1:,} are available"):
        J.cached()


@pytest.mark.parametrize("memory", ["much", 0])
def test_wrong_memory(model, x, memory):
    with pytest.raises(ValueError, match="memory must be"):
        linnet.linearize(model).jacobian(x).cached(memory=memory)


def test_examples_that_grow_are_noticed_in_the_pass():
    """Batches of a loader with more tokens than the first ones."""
    model = double(Net(lambda m, ids: m.table(ids).tanh().sum((1, 2)), table=nn.Embedding(50, 2)))
    ids = torch.arange(9) % 7
    data = [(ids[:3].repeat(n, 1),) for n in (3, 3)] + [(ids.repeat(3, 2),)]

    class Lengths(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from data

    J = linnet.linearize(model).jacobian(DataLoader(Lengths(), batch_size=None), 3)
    A = torch.cat([dense_jacobian(model, part[0]) for part in data])
    check_operator(J.cached(), A, blocks=1)
    check_operator(J.cached().subset(torch.tensor([8, 0, 7, 3])), A[[8, 0, 7, 3]], blocks=1)
    with pytest.raises(MemoryError, match="are available for it"):
        J.cached(memory=J.cache_size + 1)


def test_says_what_it_is(model, x):
    J = linnet.linearize(model).jacobian(x).cached()
    assert repr(J) == "Jacobian(shape=(15, 43), dtype=torch.float64, device=cpu)"
    assert "blocks in memory" in str(J.plan)
    with pytest.raises(ValueError, match=r"Jacobian has shape \(15, 43\), so J @ V needs"):
        J @ torch.zeros(2)


def test_batches_whose_targets_do_not_stack_stay_apart(model, x):
    """Targets are padded to the longest of their batch: rows of several batches come in the order asked for."""

    def pad(items):
        width = max(i for _, i in items) + 1
        return torch.stack([row for row, _ in items]), torch.stack([torch.arange(width) % (i + 1) for _, i in items])

    data = DataLoader([(row, i) for i, row in enumerate(x)], batch_size=2, collate_fn=pad)
    kept = linnet.linearize(model).jacobian(data).cached()
    index = torch.tensor([4, 0, 3, 1])
    part = kept.subset(index)
    close(part.dense(), dense_jacobian(model, x[index]))
    close(part.outputs(), model(x[index]).detach())
    assert part.index.tolist() == index.tolist()
    close(part.subset(torch.tensor([2, 1])).dense(), dense_jacobian(model, x[[3, 0]]))
