"""Gram matrices in blocks: what they hold in memory at a time, and what they do when there is none left."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linnet
from linnet import grams
from linnet.factors import Rows
from linnet.matrices import Stack
from linnet.passes import GRAM, Passes

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


@pytest.mark.parametrize("kind", ["one", "stack", "two"])
def test_a_block_is_gone_before_the_next_is_formed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (left, right), truth = operators(kind), expected(kind)
    known: list[tuple[weakref.ref[Any], int]] = []
    alive, sizes = [], []
    form = Passes._chunk_of

    def chunk_of(self: Passes, *args: Any) -> Any:
        alive.append(sum(size for there, size in known if there() is not None))
        chunk = form(self, *args)
        known.extend((weakref.ref(factor), factor.bytes) for factor in chunk.factors)
        sizes.append(sum(factor.bytes for factor in chunk.factors))
        return chunk

    monkeypatch.setattr(Passes, "_chunk_of", chunk_of)
    K = left.gram(right)
    assert (K - truth).norm() <= 1e-12 * K.norm()
    assert len(sizes) > 10
    limit = GRAM[1] * MEMORY
    assert 0.6 * limit < max(alive) <= limit + max(sizes)  # and what did not go into the block any more
    assert max(sizes) <= GRAM[0] * MEMORY


@pytest.mark.parametrize("kind", ["one", "stack", "two"])
def test_out_of_memory_halves_what_is_held(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (left, right), plain, truth = operators(kind), operators(kind), expected(kind)
    gram, failures, formed = Rows.gram, [2], []

    def limited(self: Rows, *args: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        gram(self, *args)

    form = Passes._chunk_of
    monkeypatch.setattr(Rows, "gram", limited)
    monkeypatch.setattr(
        Passes, "_chunk_of", lambda self, batch, *args: formed.append(batch.n) or form(self, batch, *args)
    )
    with pytest.warns(UserWarning, match="ran out of memory"):
        K = left.gram(right)
    assert (K - truth).norm() <= 1e-12 * K.norm()
    first = left.parts[0] if kind == "stack" else left
    assert first._settings.halved == 2
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

    monkeypatch.setattr(grams, "bar", bar)
    K = left.gram(right)
    [(total, done, ticks, how)] = shown
    assert total == done == K.numel() and ticks > 10
    assert how == {"progress": False, "unit": "pairs of rows"}
