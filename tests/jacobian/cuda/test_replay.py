"""Chunks that a GPU has recorded are those that the network makes."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import linnet
from linnet.jacobian import chunk
from linnet.jacobian.cuda import replay

# What torch says where the first product of a process is one of autograd's.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Overwriting:
    """Plays a record as a GPU does: new numbers in the memory of the old ones."""

    def __init__(self, make, batch) -> None:
        self.make, self.value, self.lent = make, make(batch), False

    @classmethod
    def record(cls, batch, make, alike):
        return cls(make, batch)

    def play(self, batch):
        found = self.make(batch)
        self.value.f.copy_(found.f)
        for mine, block in zip(self.value.blocks, found.blocks, strict=True):
            assert type(mine) is type(block)
            for old, new in zip(mine.tensors(), block.tensors(), strict=True):
                old.untyped_storage().copy_(new.untyped_storage())
        return self.value


@pytest.mark.parametrize(
    "name", ["mlp", "conv2d", "resnet", "vit", "embedding", "tied_weights", "dict_inputs", "language_model"]
)
def test_no_pass_keeps_what_the_next_chunk_overwrites(monkeypatch, name):
    case = linnet.testing.zoo()[name]
    count: list[int] = []

    class Counting(Overwriting):
        def play(self, batch):
            count.append(batch.n)
            return super().play(batch)

    monkeypatch.setattr(replay, "_Replay", Counting)
    monkeypatch.setattr(chunk, "can_record", lambda device: True)
    monkeypatch.setattr(chunk, "try_unwatched", lambda make: make())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    model, data = case.build(), case.data(8, 0)
    dense = case.dense(model, data)
    J = linnet.linearize(model, output=case.output).jacobian(data, 3)
    V = torch.randn(J.shape[1], 5, dtype=torch.float64)
    U = torch.randn(J.shape[0], 5, dtype=torch.float64)
    scale = max(1.0, float(dense.abs().max()) ** 2)
    for _ in range(4):
        checks = {
            "J V": (J @ V, dense @ V),
            "J^T U": (J.T @ U, dense.T @ U),
            "J^T J V": (J.normal(V), dense.T @ (dense @ V)),
            "gram": (J.gram(), dense @ dense.T),
            "diagonal": (J.gram_diag(), (dense**2).sum(1)),
            "norms": (J.column_norms(), (dense**2).sum(0)),
            "cached": (J.cached() @ V, dense @ V),
        }
        for what, (found, expected) in checks.items():
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-10 * scale, msg=lambda m, w=what: f"{w}: {m}"
            )
    assert len(count) > 20


@pytest.mark.parametrize("recorded", [True, False])
def test_a_pass_inside_a_pass_and_chunks_without_a_record_are_right(monkeypatch, recorded):
    """A record that is lent is not played again; a chunk that cannot be recorded is made as before."""

    class Maybe(Overwriting):
        @classmethod
        def record(cls, batch, make, alike):
            return super().record(batch, make, alike) if recorded else None

    monkeypatch.setattr(replay, "_Replay", Maybe)
    monkeypatch.setattr(chunk, "can_record", lambda device: True)
    monkeypatch.setattr(chunk, "try_unwatched", lambda make: make())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    X = torch.randn(8, 3, dtype=torch.float64)
    dense = linnet.testing.dense_jacobian(model, X)
    J = linnet.linearize(model).jacobian(X, 4)
    V = torch.randn(J.shape[1], 3, dtype=torch.float64)

    def weighted(JV: torch.Tensor, batch) -> torch.Tensor:
        J.normal(V)  # makes the same kind of chunks, of other examples
        return 2 * JV

    for _ in range(4):
        torch.testing.assert_close(J.fused(weighted, V), 2 * dense.T @ (dense @ V), rtol=1e-9, atol=1e-11)


class Net(nn.Module):
    """Embedding with padding, convolution, norm, attention and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        h = self.norm(h + self.conv(h.mT).mT)
        return self.head((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


def _case(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net().to("cuda", dtype).eval(), torch.randint(0, 11, (12, 6), device="cuda")


def _plays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the chunks that are played from a record."""
    count: list[int] = []
    play = replay._Replay.play

    def counted(self, batch):
        count.append(batch.n)
        return play(self, batch)

    monkeypatch.setattr(replay._Replay, "play", counted)
    return count


@needs_gpu
@pytest.mark.parametrize("batch_size", [12, 4, 5])
def test_products_are_those_of_the_first_passes(monkeypatch, batch_size):
    model, X = _case()
    J = linnet.linearize(model).jacobian(X, batch_size)
    V = torch.randn(J.shape[1], 5, dtype=torch.float64, device="cuda")
    U = torch.randn(J.shape[0], 5, dtype=torch.float64, device="cuda")
    dense = linnet.testing.dense_jacobian(model, X)
    count = _plays(monkeypatch)
    for _ in range(5):
        torch.testing.assert_close(J @ V, dense @ V, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(J.T @ U, dense.T @ U, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(J.normal(V), dense.T @ (dense @ V), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(J.gram(), dense @ dense.T, rtol=1e-9, atol=1e-11)
    assert len(count) >= 9 * (12 // batch_size)


@needs_gpu
def test_a_pass_inside_a_pass_is_not_overwritten(monkeypatch):
    model, X = _case()
    J = linnet.linearize(model).jacobian(X, 6)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    dense = linnet.testing.dense_jacobian(model, X)
    count = _plays(monkeypatch)

    def weighted(JV: torch.Tensor, batch) -> torch.Tensor:
        J.normal(V)  # makes the same kind of chunks
        return 2 * JV

    for _ in range(4):
        torch.testing.assert_close(J.fused(weighted, V), 2 * dense.T @ (dense @ V), rtol=1e-9, atol=1e-11)
    assert count


@needs_gpu
def test_outputs_that_a_function_keeps_stay(monkeypatch):
    model, X = _case()
    J = linnet.linearize(model).jacobian(X, 4)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    count = _plays(monkeypatch)
    for _ in range(3):
        kept: list[torch.Tensor] = []

        def note(JV: torch.Tensor, batch, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(batch.f)
            return JV

        J.fused(note, V)
        torch.testing.assert_close(torch.cat(kept), model(X), rtol=1e-9, atol=1e-11)
    assert count


@needs_gpu
def test_changed_weights_are_refused():
    model, X = _case()
    J = linnet.linearize(model).jacobian(X)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    for _ in range(4):
        J.normal(V)
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has changed"):
        J.normal(V)


@needs_gpu
def test_networks_that_look_at_numbers_are_made_as_before(monkeypatch):
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(h.tanh() if float(x.abs().sum()) > 0 else h)

    torch.manual_seed(0)
    model, X = Routed().double().cuda(), torch.randn(7, 4, dtype=torch.float64, device="cuda")
    J = linnet.linearize(model).jacobian(X)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    dense = linnet.testing.dense_jacobian(model, X)
    count = _plays(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            torch.testing.assert_close(J.normal(V), dense.T @ (dense @ V), rtol=1e-9, atol=1e-11)
    assert not count


@needs_gpu
def test_records_are_freed_with_their_jacobian(monkeypatch):
    model, X = _case()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    J = linnet.linearize(model).jacobian(X)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    count = _plays(monkeypatch)
    for _ in range(4):
        J.normal(V)
    assert count
    copied = copy.deepcopy(J)
    torch.testing.assert_close(copied.normal(V), J.normal(V), rtol=1e-9, atol=1e-11)
    del J, V, copied
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


@needs_gpu
def test_memory_that_runs_out_frees_the_records():
    model, X = _case()
    J = linnet.linearize(model).jacobian(X)
    V = torch.randn(J.shape[1], 4, dtype=torch.float64, device="cuda")
    for _ in range(4):
        J.normal(V)
    assert replay.free_replays()
    assert not replay.free_replays()
    dense = linnet.testing.dense_jacobian(model, X)
    torch.testing.assert_close(J.normal(V), dense.T @ (dense @ V), rtol=1e-9, atol=1e-11)
