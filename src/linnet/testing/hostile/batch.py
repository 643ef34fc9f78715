"""Examples that see each other: an output of one example depends on the others of its batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net, parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, normal

add = Register("interacting examples", expects="refused", predicts=True)


def net(function: Any) -> Any:
    """A factory of a `Net` with layers a (4, 5) and head (5, 2)."""
    return lambda: Net(function, a=nn.Linear(4, 5), head=nn.Linear(5, 2))


class OverBatch(nn.Module):
    """A sequence model that takes the batch for the time."""

    def __init__(self, kind: str, bidirectional: bool = False) -> None:
        super().__init__()
        make = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.cell = make(4, 3, bidirectional=bidirectional)
        self.head = nn.Linear(6 if bidirectional else 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class Sequences(nn.Module):
    """An LSTM without `batch_first` on data of shape (examples, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


for kind in ("lstm", "gru", "rnn"):
    add(f"time_over_batch_{kind}", functools.partial(OverBatch, kind), normal(4))
add("time_over_batch_bidirectional", functools.partial(OverBatch, "gru", True), normal(4))
add("lstm_without_batch_first", Sequences, normal(3, 3))


class Transformer(nn.Module):
    """Attention over the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.head = kind, nn.Linear(4, 12), nn.Linear(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "encoder":
            mask = torch.ones(len(x), len(x)).triu(1).bool()
            return self.head(self.layer(x, mask))
        if self.kind == "encoder_tokens":
            return self.head(self.layer(x).mean(1))
        q, k, v = (part[None, None] for part in self.qkv(x).chunk(3, 1))
        if self.kind == "late":
            k = torch.cat([k[:, :, :8], k[:, :, 8:] + 1], 2) if len(x) > 8 else k
            mask = torch.eye(len(x)).bool() | (torch.arange(len(x)) >= 8)
            return self.head(F.scaled_dot_product_attention(q, k, v, mask)[0, 0])
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal")[0, 0])


for kind in ("causal", "full", "encoder", "late"):
    add(f"attention_over_batch_{kind}", functools.partial(Transformer, kind), normal(4))
add("transformer_without_batch_first", functools.partial(Transformer, "encoder_tokens"), normal(3, 4))


class Capacity(nn.Module):
    """Experts that drop examples beyond their capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.gate = capacity, nn.Linear(4, 2)
        self.experts, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        k, out = self.gate(x).argmax(1), x.clone()
        for i, expert in enumerate(self.experts):
            rows = (k == i).nonzero()[: self.capacity, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return self.head(out)


add("expert_capacity_2", functools.partial(Capacity, 2), normal(4))
add("expert_capacity_4", functools.partial(Capacity, 4), normal(4, n=20))


def position(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + 0.1 * torch.arange(len(x), dtype=x.dtype)[:, None])


def position_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + (torch.arange(len(x), dtype=x.dtype)[:, None] - 3).relu())


def first_example(m: Any, x: Tensor) -> Tensor:
    return m.head((m.a(x) - m.a(x[:1])).tanh())


def last_example(m: Any, x: Tensor) -> Tensor:
    return m.head((m.a(x) - m.a(x[-1:])).tanh())


def longest(m: Any, x: Tensor) -> Tensor:
    """Padding to the longest of the batch, and a mean over the padded length."""
    lengths = 2 + (x[:, 0] > 0).long()
    T = int(lengths.max())
    mask = torch.arange(T) < lengths[:, None]
    h = m.a(x)[:, :T] * mask
    return m.head(F.pad(h, (0, 5 - T)) / T)


def large_batch_statistics(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head((h - h.mean(0)).tanh() if len(x) > 8 else h.tanh())


def large_batch_detached(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head((h - h.mean(0).detach()).tanh() if len(x) > 8 else h.tanh())


def statistics_from_four(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head((h / h.std(0)).tanh() if len(x) >= 4 else h.tanh())


def size_scale(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh()) / len(x)


def size_scale_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh()) * (1.0 if len(x) <= 3 else 0.5)


def softmax(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).softmax(0))


def cumsum(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).cumsum(0).tanh())


def cumsum_of_flags(m: Any, x: Tensor) -> Tensor:
    """How many flagged examples came before."""
    return m.head(m.a(x).tanh() * (1 + (x[:, :1] > 0).cumsum(0)))


def mean_if_flag(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head((h - h.mean(0)).tanh() if bool((x[:, 0] > 0).any()) else h.tanh())


def mean_for_flagged(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(torch.where(x[:, :1] > 0, h - h.mean(0), h).tanh())


def batch_norm(m: Any, x: Tensor) -> Tensor:
    return m.head(F.batch_norm(m.a(x), None, None, training=True).tanh())


def batch_norm_weak(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh()) + 1e-3 * F.batch_norm(x[:, :2], None, None, training=True)


def early_exit(m: Any, x: Tensor) -> Tensor:
    """The whole batch goes on if one example is not sure."""
    h = m.a(x).tanh()
    return m.head(h.square() if bool((x[:, 0] > 0).any()) else h)


def early_exit_all(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(h if bool((x[:, 0] < 0).all()) else h.sin())


def iterations(m: Any, x: Tensor) -> Tensor:
    """A fixed point, iterated until the slowest of the batch has converged."""
    h, tolerance = m.a(x).tanh(), 0.05
    for _ in range(30):
        new = 0.5 * torch.tanh(h.roll(1, 1) + x[:, :1])
        done = float((new - h).abs().max()) < tolerance
        h = new
        if done:
            break
    return m.head(h)


def global_norm(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h / h.norm().clamp(min=1e-3))


def global_max_scale(m: Any, x: Tensor) -> Tensor:
    """Dynamic quantization: one scale for the batch, set by its largest entry."""
    h = m.a(x)
    return m.head(h * h.detach().abs().max())


def clip_of_batch(m: Any, x: Tensor) -> Tensor:
    """A clip that only a large example sets off."""
    h = m.a(x)
    return m.head(h / h.detach().norm(dim=1).max().div(12).clamp(min=1))


def neighbours(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + 0.1 * m.a(x).roll(1, 0))


def neighbours_late(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.cat([h[:6], h[6:] + h[5:-1]])) if len(x) > 6 else m.head(h)


def similarity(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h) + (h @ h.T).fill_diagonal_(0).mean(1, keepdim=True)


def duplicates(m: Any, x: Tensor) -> Tensor:
    """How often an example occurs in its batch."""
    same = (x[:, None] == x[None]).all(2).sum(1, keepdim=True)
    return m.head(m.a(x).tanh()) * same


def odd_one(m: Any, x: Tensor) -> Tensor:
    """Pairs of examples; the last one of an odd batch is alone."""
    h = m.a(x).tanh()
    k = len(x) // 2 * 2
    pairs = h[:k].view(-1, 2, 5).flip(1).reshape(k, 5)
    return m.head(torch.cat([h[:k] + 0.1 * pairs, h[k:]]))


def sort_over_batch(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).sort(0).values)


def rank_in_batch(m: Any, x: Tensor) -> Tensor:
    rank = x[:, 0].argsort().argsort()[:, None]
    return m.head(m.a(x).tanh() * (1 + 0.1 * rank))


def not_put_back(m: Any, x: Tensor) -> Tensor:
    """Examples leave in another order than they came."""
    return m.head(m.a(x).tanh()).flip(0)


def not_put_back_late(m: Any, x: Tensor) -> Tensor:
    f = m.head(m.a(x).tanh())
    return torch.cat([f[:3], f[3:].flip(0)])


def sorted_wrongly(m: Any, x: Tensor) -> Tensor:
    """Sorted by a key and put back by the same order instead of its inverse."""
    order = (x[:, 0] > 0).long().argsort(stable=True)
    return m.head(m.a(x[order]).tanh())[order]


def swapped_axes(m: Any, x: Tensor) -> Tensor:
    """A view that mixes examples where a transpose was meant."""
    h = m.a(x).tanh()
    return m.head(h.T.reshape(len(x), 5))


for name, function, data in (
    ("position", position, normal(4)),
    ("position_late", position_late, normal(4)),
    ("first_example", first_example, normal(4)),
    ("last_example", last_example, normal(4)),
    ("large_batch_statistics", large_batch_statistics, normal(4)),
    ("large_batch_detached", large_batch_detached, normal(4)),
    ("statistics_from_four", statistics_from_four, normal(4)),
    ("size_scale", size_scale, normal(4)),
    ("size_scale_late", size_scale_late, normal(4)),
    ("softmax", softmax, normal(4)),
    ("cumsum", cumsum, normal(4)),
    ("cumsum_of_flags", cumsum_of_flags, late(4)),
    ("mean_if_flag", mean_if_flag, late(4)),
    ("mean_for_flagged", mean_for_flagged, late(4)),
    ("batch_norm", batch_norm, normal(4)),
    ("batch_norm_weak", batch_norm_weak, normal(4)),
    ("early_exit", early_exit, late(4)),
    ("early_exit_all", early_exit_all, late(4)),
    ("iterations", iterations, normal(4, n=20)),
    ("global_norm", global_norm, normal(4)),
    ("global_max_scale", global_max_scale, normal(4)),
    ("neighbors", neighbours, normal(4)),
    ("neighbors_late", neighbours_late, normal(4)),
    ("similarity", similarity, normal(4)),
    ("odd_one", odd_one, normal(4)),
    ("sort", sort_over_batch, normal(4)),
    ("rank", rank_in_batch, normal(4)),
    ("not_put_back", not_put_back, normal(4)),
    ("not_put_back_late", not_put_back_late, normal(4)),
    ("sorted_wrongly", sorted_wrongly, late(4)),
    ("view_mixes", swapped_axes, normal(4)),
):
    add(f"batch_{name}", net(function), data)
add("batch_duplicates", net(duplicates), lambda: torch.cat([draw(7, 4), draw(6, 4)]))
add("batch_clip", net(clip_of_batch), lambda: draw(13, 4) * torch.where(torch.arange(13) < 9, 1.0, 20.0)[:, None])


class Longest(nn.Module):
    """Tokens of several lengths; the mean counts the padding up to the longest of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.head = kind, nn.Embedding(8, 4), nn.Linear(4, 2)
        self.cell, self.scale = nn.GRU(4, 4, batch_first=True), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        used = (x > 0).sum(1)
        x = x[:, : int(used.max())]
        h = self.table(x)
        if self.kind == "mean":
            return self.head(h.mean(1))
        if self.kind == "last":
            return self.head(self.cell(h)[0][:, -1])
        if self.kind == "scaled":
            return self.head((h * (x > 0)[:, :, None]).sum(1)) * self.scale / x.shape[1]
        return self.head((h.softmax(1) * (x > 0)[:, :, None]).sum(1))


def ragged() -> Tensor:
    """The first examples have two tokens, later ones two to five."""
    x = integers(7, 13, 5) + 1
    lengths = torch.tensor([2] * 5 + [5, 2, 3, 4, 2, 5, 2, 3])
    return x * (torch.arange(5) < lengths[:, None])


for kind in ("mean", "last", "scaled", "softmax"):
    add(f"padded_to_longest_{kind}", functools.partial(Longest, kind), ragged)
add(
    "padded_to_longest_features",
    lambda: Net(longest, a=nn.Linear(4, 5), head=nn.Linear(5, 2)),
    late(4),
    expects="refused",
)


class GhostNorm(nn.Module):
    """Group statistics of examples: as many groups as four examples each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(part) if len(part) > 1 else part for part in self.a(x).split(4)]))


class Graph(nn.Module):
    """Examples are nodes of a graph whose edges join the later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        on = (x[:, 0] > 0).to(x.dtype)
        A = on[:, None] * on[None]
        return self.head((self.a(x) + A.fill_diagonal_(0) @ self.a(x)).tanh())


add("batch_ghost_norm", GhostNorm, normal(4))
add("batch_graph", Graph, late(4))
add(
    "batch_without_running_statistics",
    lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 2)),
    normal(4),
)
add(
    "batch_instance_norm_over_batch",
    lambda: Net(lambda m, x: m.head(F.instance_norm(m.a(x).T[None])[0].T), a=nn.Linear(4, 5), head=nn.Linear(5, 2)),
    normal(4),
)


# Gradients that interact while outputs do not.
def gradient_of_mean(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(h + h.mean(0) - h.mean(0).detach())


def gradient_of_mean_late(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    mean = (h * (x[:, :1] > 0)).sum(0)
    return m.head(h + (x[:, :1] > 0) * (mean - mean.detach()))


def gradient_by_size(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g / len(g))
    return m.head(h.tanh())


class Balanced(torch.autograd.Function):
    """The identity, whose gradients are centered over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0)


# Sizes.
def one_is_special(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h.tanh() if len(x) > 1 else h)


def even_is_special(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() * (1 + len(x) % 2))


def late_and_large(m: Any, x: Tensor) -> Tensor:
    """Flagged examples of large batches are centered together."""
    h, on = m.a(x), x[:, :1] > 0
    if len(x) > 8 and bool(on.any()):
        h = torch.where(on, h - (h * on).sum(0) / on.sum(), h)
    return m.head(h.tanh())


def two_of_them(m: Any, x: Tensor) -> Tensor:
    """The largest two examples of a batch are exchanged in part."""
    h = m.a(x).tanh()
    if len(x) > 3:
        i, j = x[:, 0].topk(2).indices
        mean = 0.5 * (h[i] + h[j])
        h = h.index_copy(0, torch.stack([i, j]), torch.stack([mean, mean]))
    return m.head(h)


for name, function, data in (
    ("gradient_of_mean", gradient_of_mean, normal(4)),
    ("gradient_of_mean_late", gradient_of_mean_late, late(4)),
    ("gradient_by_size", gradient_by_size, normal(4)),
    ("gradient_centered", lambda m, x: m.head(Balanced.apply(m.a(x)).tanh()), normal(4)),
    ("one_is_special", one_is_special, normal(4)),
    ("even_is_special", even_is_special, normal(4)),
    ("late_and_large", late_and_large, late(4)),
    ("two_of_them", two_of_them, normal(4)),
):
    add(f"batch_{name}", net(function), data)
add("batch_in_output", net(lambda m, x: m.head(m.a(x).tanh())), normal(4), output=lambda raw: raw - raw.mean(0))
add(
    "batch_in_output_late",
    net(lambda m, x: torch.cat([m.head(m.a(x).tanh()), x[:, :1]], 1)),
    late(4),
    output=lambda raw: raw[:, :2] * (raw[:, 2:] > 0).sum(),
)

CASES: list[Hostile] = add.cases
