"""Gram matrices in blocks: what they hold in memory at a time, and what they do when there is none left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet._common import memory
from linnet.jacobian import DenseBlock, NetworkChunks
from linnet.jacobian import gram as grams
from linnet.jacobian.blocks.base import Scale
from linnet.jacobian.passes import GRAM
from linnet.linalg import Stack
from tests.support.peak import peak_beside_result

MEMORY = 6e5


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def inputs(n: int) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def operators(kind: str) -> tuple[Any, Any]:
    """What is multiplied with what, the second None for itself."""
    lin, X = linnet.linearize(network()), inputs(160)
    parts = [lin.jacobian(X[a:b], memory=MEMORY, progress=False, engine="rows") for a, b in ((0, 100), (100, 160))]
    return {"one": (parts[0], None), "stack": (Stack(parts), None), "two": (parts[0], parts[1])}[kind]


def expected(kind: str) -> Tensor:
    K = linnet.linearize(network()).jacobian(inputs(160), progress=False).gram()
    return {"one": K[:300, :300], "stack": K, "two": K[:300, 300:]}[kind]


def test_squares_by_group_are_those_of_the_dense_jacobian() -> None:
    J = linnet.linearize(network()).jacobian(inputs(23), 7, progress=False)
    p, squares = J.shape[1], J.dense().square()
    parts = []
    for seed in (2, 3):
        random = torch.Generator().manual_seed(seed)
        parts.append((torch.rand(p, dtype=torch.float64, generator=random), torch.randint(4, (p,), generator=random)))
    expected = sum((squares * scale) @ torch.nn.functional.one_hot(group, 4).double() for scale, group in parts)
    torch.testing.assert_close(J.grouped_squares(parts, 4), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["one", "stack", "two"])
def test_a_block_is_gone_before_the_next_is_formed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (left, right), truth = operators(kind), expected(kind)
    known: list[tuple[weakref.ref[Any], int]] = []
    alive, sizes = [], []
    form = NetworkChunks.build

    def chunk_of(self: NetworkChunks, *args: Any) -> Any:
        alive.append(sum(size for there, size in known if there() is not None))
        chunk = form(self, *args)
        known.extend((weakref.ref(block), block.bytes) for block in chunk.blocks)
        sizes.append(sum(block.bytes for block in chunk.blocks))
        return chunk

    monkeypatch.setattr(NetworkChunks, "build", chunk_of)
    K = left.gram(right)
    assert (K - truth).norm() <= 1e-12 * K.norm()
    assert len(sizes) > 10
    first = left.parts[0] if kind == "stack" else left
    room = first.passes.gram_room
    limit = GRAM[1] * room
    assert 0.6 * limit < max(alive) <= limit + max(sizes)  # and what did not go into the block any more
    assert max(sizes) <= GRAM[0] * room


@pytest.mark.parametrize("kind", ["one", "stack", "two"])
def test_out_of_memory_halves_what_is_held(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (left, right), plain, truth = operators(kind), operators(kind), expected(kind)
    gram, failures, formed = DenseBlock.gram, [2], []

    def limited(self: DenseBlock, *args: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        gram(self, *args)

    form = NetworkChunks.build
    monkeypatch.setattr(DenseBlock, "gram", limited)
    monkeypatch.setattr(
        NetworkChunks, "build", lambda self, batch, *args: formed.append(batch.n) or form(self, batch, *args)
    )
    with pytest.warns(UserWarning, match="ran out of memory"):
        K = left.gram(right)
    assert (K - truth).norm() <= 1e-12 * K.norm()
    first = left.parts[0] if kind == "stack" else left
    assert first.passes.settings.halved == 2
    again = sum(formed)
    formed.clear()
    plain[0].gram(plain[1])
    assert again < 5 * sum(formed)  # a quarter of the block: all others are formed four times as often at most


@pytest.mark.parametrize("kind", ["one", "stack", "two"])
def test_progress_counts_every_pair_of_rows_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (left, right), shown = operators(kind), []

    @contextmanager
    def bar(total: int, label: str, **how: Any) -> Iterator[Any]:
        done: list[int] = []
        yield done.append
        shown.append((total, sum(done), len(done), how))

    monkeypatch.setattr(grams, "show_progress", bar)
    K = left.gram(right)
    [(total, done, ticks, how)] = shown
    assert total == done == K.numel() and ticks > 10
    assert how == {"progress": False, "unit": "pairs of rows"}


def test_sums_over_chunks_are_made_in_float64() -> None:
    """One large row, then rows of ones in chunks of their own, which a sum in float32 would round away."""
    lin = linnet.linearize(nn.Linear(1, 1, bias=False))
    X = torch.ones(65, 1)
    X[0] = 1e4
    J = lin.jacobian(X, 1)
    assert J.column_norms().tolist() == [1e8 + 64]
    assert J.gram_normal(lin.jacobian(torch.ones(1, 1))).tolist() == [[1e8 + 64]]


def test_the_same_columns_in_other_forms_meet_where_they_overlap() -> None:
    """Columns of one side are cut elsewhere than those of the other, and some are missing there."""

    def blocks(seed: int, *pieces: list[tuple[int, int]]) -> tuple[list[DenseBlock], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        found, dense = [], torch.zeros(2, 3, 12, dtype=torch.float64)
        for ranges in pieces:
            parts = [torch.randn(2, 3, b - a, dtype=torch.float64, generator=generator) for a, b in ranges]
            for (a, b), part in zip(ranges, parts, strict=True):
                dense[..., a:b] = part
            found.append(DenseBlock(ranges, parts))
        return found, dense.flatten(0, 1)

    left, A = blocks(0, [(0, 4), (6, 9)], [(9, 11)])
    right, B = blocks(1, [(1, 3)], [(3, 8)], [(9, 11)])
    out = torch.zeros(6, 6, dtype=torch.float64)
    for name, x, y in grams._matched(left, right, lambda block: [("all", block)]):
        assert name == "all"
        x.gram(y, Scale(), out)
    torch.testing.assert_close(out, A @ B.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_stack_of_other_precisions_is_not_one_gram_matrix(monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    lin, X = linnet.linearize(network()), inputs(9)
    parts = [lin.jacobian(X[:4]), lin.jacobian(X[4:], precision=precision)]
    together: list[int] = []
    symmetric = grams._symmetric
    monkeypatch.setattr(grams, "_symmetric", lambda all_, *given: together.append(len(all_)) or symmetric(all_, *given))
    K = Stack(parts).gram()
    torch.testing.assert_close(K, lin.jacobian(X).gram(), rtol=1e-10, atol=1e-10)
    assert (2 in together) == (parts[0].passes.settings.precision == precision)


@pytest.mark.parametrize("centers", [(False, False), (True, False), (False, True), (True, True)])
def test_normal_products_of_gram_matrices_with_a_center(centers: tuple[bool, bool]) -> None:
    lin, X = linnet.linearize(network()), inputs(9)
    z = torch.linspace(-1, 1, lin.p, dtype=torch.float64)
    weight = torch.linspace(1, 2, 18, dtype=torch.float64)
    parts = [lin.jacobian(X[:6]).scaled(2 + z), lin.jacobian(X[6:]).scaled(3 - z)]
    A, B = (J.centered(z) if center else J for J, center in zip(parts, centers, strict=True))
    K = A.dense() @ B.dense().T
    torch.testing.assert_close(A.gram_normal(B, weight), K.T @ (weight[:, None] * K), rtol=1e-10, atol=1e-10)


def tokens(n: int) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Flatten(), nn.Linear(32, 5)).double()
    return model, torch.randn(n, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [lambda: (network(), inputs(150)), lambda: tokens(60)])
@pytest.mark.parametrize("product", ["gram", "layer_grams"])
def test_memory_holds_all_but_the_result(make: Callable[[], tuple[nn.Module, Tensor]], product: str) -> None:
    model, X = make()
    lin = linnet.linearize(model)
    J = lin.jacobian(X, memory=MEMORY, progress=False)
    J.gram_diag()  # the first examples are measured
    assert peak_beside_result(getattr(J, product)) <= MEMORY
    assert J.shape[0] ** 2 * 8 > MEMORY  # a second matrix of that size would be seen


@pytest.mark.parametrize("product", ["gram", "layer_grams", "normal_matrix"])
def test_a_result_that_does_not_fit_is_refused_before_a_pass(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    J = linnet.linearize(network()).jacobian(inputs(160), progress=False)
    _ = J.shape
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    monkeypatch.setattr(NetworkChunks, "build", None)
    with pytest.raises(MemoryError, match=r"takes .* and 1000 B are free. Use products such as"):
        getattr(J, product)()
