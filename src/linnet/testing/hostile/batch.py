"""Examples that see each other: an output of one example depends on the others of its batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, net, normal, weight

add = Register("interacting examples", expects="refused", predicts=True)

# Sequence models that take the batch for the time.
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    cell = net(lambda m, x: m.head(m.cell(x)[0]), cell=partial(kind, 4, 3), head=(3, 2))
    add(f"time_over_batch_{kind.__name__.lower()}", cell)
add(
    "time_over_batch_bidirectional",
    net(lambda m, x: m.head(m.cell(x)[0]), cell=partial(nn.GRU, 4, 3, bidirectional=True), head=(6, 2)),
)
add(
    "lstm_without_batch_first",
    net(lambda m, x: m.head(m.cell(x)[0][:, -1]), cell=partial(nn.LSTM, 3, 4), head=(4, 2)),
    normal(3, 3),
)


# Attention over the batch.
def attend(m: Any, x: Tensor, causal: bool = False) -> Tensor:
    q, k, v = (part[None, None] for part in m.qkv(x).chunk(3, 1))
    return m.head(F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0, 0])


def attend_to_late(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part[None, None] for part in m.qkv(x).chunk(3, 1))
    k = torch.cat([k[:, :, :8], k[:, :, 8:] + 1], 2) if len(x) > 8 else k
    mask = torch.eye(len(x)).bool() | (torch.arange(len(x)) >= 8)
    return m.head(F.scaled_dot_product_attention(q, k, v, mask)[0, 0])


def transformer(function: Any) -> Any:
    layer = partial(nn.TransformerEncoderLayer, 4, 2, 6, dropout=0.0)
    return net(function, qkv=(4, 12), head=(4, 2), layer=layer)


add.each(
    "attention_over_batch_",
    transformer,
    causal=partial(attend, causal=True),
    full=attend,
    encoder=lambda m, x: m.head(m.layer(x, torch.ones(len(x), len(x)).triu(1).bool())),
    late=attend_to_late,
)
add("transformer_without_batch_first", transformer(lambda m, x: m.head(m.layer(x).mean(1))), normal(3, 4))


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


add("expert_capacity_2", partial(Capacity, 2))
add("expert_capacity_4", partial(Capacity, 4), normal(4, n=20))


def iterations(m: Any, x: Tensor) -> Tensor:
    """A fixed point, iterated until the slowest of the batch has converged."""
    h = m.a(x).tanh()
    for _ in range(30):
        new = 0.5 * torch.tanh(h.roll(1, 1) + x[:, :1])
        done, h = float((new - h).abs().max()) < 0.05, new
        if done:
            break
    return m.head(h)


def similarity(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h) + (h @ h.T).fill_diagonal_(0).mean(1, keepdim=True)


def odd_one(m: Any, x: Tensor) -> Tensor:
    """Pairs of examples; the last one of an odd batch is alone."""
    h, k = m.a(x).tanh(), len(x) // 2 * 2
    pairs = h[:k].view(-1, 2, 5).flip(1).reshape(k, 5)
    return m.head(torch.cat([h[:k] + 0.1 * pairs, h[k:]]))


def sorted_wrongly(m: Any, x: Tensor) -> Tensor:
    """Sorted by a key and put back by the same order instead of its inverse."""
    order = (x[:, 0] > 0).long().argsort(stable=True)
    return m.head(m.a(x[order]).tanh())[order]


def neighbors_late(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.cat([h[:6], h[6:] + h[5:-1]])) if len(x) > 6 else m.head(h)


def not_put_back_late(m: Any, x: Tensor) -> Tensor:
    f = m.head(m.a(x).tanh())
    return torch.cat([f[:3], f[3:].flip(0)])


def hidden(function: Any) -> Any:
    """A network with a function of its hidden features m.a(x) and its inputs, under the head."""
    return net(lambda m, x: m.head(function(m.a(x), x)))


add.each(
    "batch_",
    hidden,
    position=lambda h, x: h.tanh() + 0.1 * torch.arange(len(x), dtype=x.dtype)[:, None],
    position_late=lambda h, x: h.tanh() + (torch.arange(len(x), dtype=x.dtype)[:, None] - 3).relu(),
    large_batch_statistics=lambda h, x: (h - h.mean(0)).tanh() if len(x) > 8 else h.tanh(),
    large_batch_detached=lambda h, x: (h - h.mean(0).detach()).tanh() if len(x) > 8 else h.tanh(),
    statistics_from_four=lambda h, x: (h / h.std(0)).tanh() if len(x) >= 4 else h.tanh(),
    softmax=lambda h, x: h.softmax(0),
    cumsum=lambda h, x: h.cumsum(0).tanh(),
    batch_norm=lambda h, x: F.batch_norm(h, None, None, training=True).tanh(),
    global_norm=lambda h, x: h / h.norm().clamp(min=1e-3),
    global_max_scale=lambda h, x: h * h.detach().abs().max(),  # dynamic quantization: one scale for the batch
    neighbors=lambda h, x: h.tanh() + 0.1 * h.roll(1, 0),
    sort=lambda h, x: h.sort(0).values,
    rank=lambda h, x: h.tanh() * (1 + 0.1 * x[:, 0].argsort().argsort()[:, None]),
    view_mixes=lambda h, x: h.tanh().T.reshape(len(x), 5),  # a view where a transpose was meant
)
add.each(
    "batch_",
    hidden,
    late(4),
    cumsum_of_flags=lambda h, x: h.tanh() * (1 + (x[:, :1] > 0).cumsum(0)),
    mean_if_flag=lambda h, x: (h - h.mean(0)).tanh() if bool((x[:, 0] > 0).any()) else h.tanh(),
    mean_for_flagged=lambda h, x: torch.where(x[:, :1] > 0, h - h.mean(0), h).tanh(),
    early_exit=lambda h, x: h.tanh().square() if bool((x[:, 0] > 0).any()) else h.tanh(),
    early_exit_all=lambda h, x: h.tanh() if bool((x[:, 0] < 0).all()) else h.tanh().sin(),
)
add.each(
    "batch_",
    net,
    first_example=lambda m, x: m.head((m.a(x) - m.a(x[:1])).tanh()),
    last_example=lambda m, x: m.head((m.a(x) - m.a(x[-1:])).tanh()),
    size_scale=lambda m, x: m.head(m.a(x).tanh()) / len(x),
    size_scale_late=lambda m, x: m.head(m.a(x).tanh()) * (1.0 if len(x) <= 3 else 0.5),
    batch_norm_weak=lambda m, x: m.head(m.a(x).tanh()) + 1e-3 * F.batch_norm(x[:, :2], None, None, training=True),
    neighbors_late=neighbors_late,
    similarity=similarity,
    odd_one=odd_one,
    not_put_back=lambda m, x: m.head(m.a(x).tanh()).flip(0),
    not_put_back_late=not_put_back_late,
)
add("batch_iterations", net(iterations), normal(4, n=20))
add("batch_sorted_wrongly", net(sorted_wrongly), late(4))
add(
    "batch_duplicates",  # how often an example occurs in its batch
    net(lambda m, x: m.head(m.a(x).tanh()) * (x[:, None] == x[None]).all(2).sum(1, keepdim=True)),
    lambda: torch.cat([draw(7, 4), draw(6, 4)]),
)
add(
    "batch_clip",  # only a large example sets off the clip
    hidden(lambda h, x: h / h.detach().norm(dim=1).max().div(12).clamp(min=1)),
    lambda: draw(13, 4) * torch.where(torch.arange(13) < 9, 1.0, 20.0)[:, None],
)


# Tokens of several lengths: the padding up to the longest of the batch counts.
def padded(function: Any) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x[:, : int((x > 0).sum(1).max())]
        return function(m, m.table(x), x)

    parts: Any = {"table": partial(nn.Embedding, 8, 4), "head": (4, 2)}
    return net(forward, **parts, cell=partial(nn.GRU, 4, 4, batch_first=True), scale=weight(1))


def ragged() -> Tensor:
    """The first examples have two tokens, later ones two to five."""
    lengths = torch.tensor([2] * 5 + [5, 2, 3, 4, 2, 5, 2, 3])
    return (integers(7, 13, 5) + 1) * (torch.arange(5) < lengths[:, None])


def longest(h: Tensor, x: Tensor) -> Tensor:
    """Padding to the longest of the batch, and a mean over the padded length."""
    lengths = 2 + (x[:, 0] > 0).long()
    T = int(lengths.max())
    return F.pad(h[:, :T] * (torch.arange(T) < lengths[:, None]), (0, 5 - T)) / T


add.each(
    "padded_to_longest_",
    padded,
    ragged,
    mean=lambda m, h, x: m.head(h.mean(1)),
    last=lambda m, h, x: m.head(m.cell(h)[0][:, -1]),
    scaled=lambda m, h, x: m.head((h * (x > 0)[:, :, None]).sum(1)) * m.scale / x.shape[1],
    softmax=lambda m, h, x: m.head((h.softmax(1) * (x > 0)[:, :, None]).sum(1)),
)
add("padded_to_longest_features", hidden(longest), late(4))

# Statistics and graphs of examples.
NORM = partial(nn.BatchNorm1d, 5, track_running_stats=False)


def ghost_norm(m: Any, x: Tensor) -> Tensor:
    """Statistics of four examples each."""
    return m.head(torch.cat([m.norm(part) if len(part) > 1 else part for part in m.a(x).split(4)]))


def graph(m: Any, x: Tensor) -> Tensor:
    """Examples are nodes of a graph whose edges join the later ones."""
    on = (x[:, 0] > 0).to(x.dtype)
    A = on[:, None] * on[None]
    return m.head((m.a(x) + A.fill_diagonal_(0) @ m.a(x)).tanh())


add("batch_ghost_norm", net(ghost_norm, a=(4, 5), norm=NORM, head=(5, 2)))
add("batch_graph", net(graph), late(4))
add("batch_without_running_statistics", lambda: nn.Sequential(nn.Linear(4, 5), NORM(), nn.Tanh(), nn.Linear(5, 2)))
add("batch_instance_norm_over_batch", hidden(lambda h, x: F.instance_norm(h.T[None])[0].T))


# Gradients that interact while outputs do not.
def gradient_of_mean(h: Tensor, x: Tensor) -> Tensor:
    mean = h.tanh().mean(0)
    return h.tanh() + mean - mean.detach()


def gradient_of_mean_late(h: Tensor, x: Tensor) -> Tensor:
    on = x[:, :1] > 0
    mean = (h.tanh() * on).sum(0)
    return h.tanh() + on * (mean - mean.detach())


def gradient_by_size(h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / len(g))
    return h.tanh()


class Balanced(torch.autograd.Function):
    """The identity, whose gradients are centered over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] - grads[0].mean(0)


# Sizes.
def late_and_large(h: Tensor, x: Tensor) -> Tensor:
    """Flagged examples of large batches are centered together."""
    on = x[:, :1] > 0
    if len(x) > 8 and bool(on.any()):
        h = torch.where(on, h - (h * on).sum(0) / on.sum(), h)
    return h.tanh()


def two_of_them(h: Tensor, x: Tensor) -> Tensor:
    """The largest two examples of a batch are exchanged in part."""
    h = h.tanh()
    if len(x) > 3:
        i, j = x[:, 0].topk(2).indices
        mean = 0.5 * (h[i] + h[j])
        h = h.index_copy(0, torch.stack([i, j]), torch.stack([mean, mean]))
    return h


add.each(
    "batch_",
    hidden,
    gradient_of_mean=gradient_of_mean,
    gradient_by_size=gradient_by_size,
    gradient_centered=lambda h, x: Balanced.apply(h).tanh(),
    one_is_special=lambda h, x: h.tanh() if len(x) > 1 else h,
    even_is_special=lambda h, x: h.tanh() * (1 + len(x) % 2),
    two_of_them=two_of_them,
)
add.each(
    "batch_",
    hidden,
    late(4),
    gradient_of_mean_late=gradient_of_mean_late,
    late_and_large=late_and_large,
)
add("batch_in_output", hidden(lambda h, x: h.tanh()), output=lambda raw: raw - raw.mean(0))
add(
    "batch_in_output_late",
    net(lambda m, x: torch.cat([m.head(m.a(x).tanh()), x[:, :1]], 1)),
    late(4),
    output=lambda raw: raw[:, :2] * (raw[:, 2:] > 0).sum(),
)

CASES: list[Hostile] = add.cases
