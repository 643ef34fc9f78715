"""What the first examples do not show: branches, tied uses, dead layers, data-dependent work."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, net, weight

add = Register("late branches")


def pair(function: Any, **more: Any) -> Any:
    """A network with layers a (4, 4), b (4, 4) and head (4, 2)."""
    return net(function, a=(4, 4), b=(4, 4), head=(4, 2), **more)


def above(function: Any, **more: Any) -> Any:
    """The same with a function of the network, the features tanh(a(x)), and the inputs, under the head."""
    return pair(lambda m, x: m.head(function(m, m.a(x).tanh(), x)), **more)


def flagged(x: Tensor) -> Tensor:
    return x[:, :1] > 0


def rows_of(x: Tensor) -> Tensor:
    return flagged(x)[:, 0].nonzero()[:, 0]


def if_any(function: Any) -> Any:
    """Another value for flagged examples, computed only if there is one."""

    def branch(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(flagged(x), function(m, h, x), h) if bool(flagged(x).any()) else h

    return branch


def python_rows(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([m.a(row) if float(z[0]) > 0 else row for row, z in zip(h, x, strict=True)])


add.each(
    "late_",
    above,
    late(4),
    direct_where=lambda m, h, x: torch.where(flagged(x), h * m.a.weight.sum(), h),
    direct_if=if_any(lambda m, h, x: h * m.a.weight.sum()),
    direct_times_flag=lambda m, h, x: h + flagged(x) * (x @ m.a.weight),
    direct_on_rows=lambda m, h, x: h.index_add(0, rows_of(x), x[rows_of(x)] @ m.a.weight),
    direct_bias=lambda m, h, x: h + flagged(x) * m.a.bias,
    called_again_if=if_any(lambda m, h, x: m.a(h).tanh()),
    called_again_where=lambda m, h, x: torch.where(flagged(x), m.a(h).tanh(), h),
    called_on_rows=lambda m, h, x: h.index_add(0, rows_of(x), m.a(h[rows_of(x)]).sin()),
    called_in_python=python_rows,
    transposed_late=lambda m, h, x: torch.where(flagged(x), F.linear(h, m.a.weight.T), h),
)
add("late_head_bias_late", pair(lambda m, x: m.head(m.a(x).tanh()) + flagged(x) * m.head.bias.square()), late(4))


# Second uses of a layer that pass nothing for the first examples.
def dead_twice(m: Any, x: Tensor) -> Tensor:
    h = (m.a(x) + 20 * x[:, :1]).relu()
    return m.head(m.b((m.a(h.flip(1)) - 20 + 20 * x[:, :1]).relu()) + x)


def gated(h: Tensor, x: Tensor) -> Tensor:
    """Nothing for examples that begin with a negative number."""
    return (h + 20 * x[:, :1]).relu()


def matrix(m: Any, h: Tensor, x: Tensor) -> Tensor:
    P = torch.eye(len(x), dtype=x.dtype).flip(0)
    return h + P.T @ gated(m.a(P @ x), P @ x)


def tokens_first(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """The second use has the examples on its second axis."""
    tokens = x.view(len(x), 1, 4).expand(-1, 3, -1) * x.new_tensor([1.0, 0.5, 2.0])[:, None]
    return h + (m.a(tokens.transpose(0, 1)) + 20 * x[:, :1]).relu().sum(0)


def pairs(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """The second use sees all examples twice, one copy after the other."""
    both = gated(m.a(torch.cat([x, -x])), torch.cat([x, x]))
    return h + both[: len(x)] - both[len(x) :]


def order(x: Tensor) -> list[int]:
    return list(range(len(x)))[::-1]


add.each(
    "dead_tied_",
    above,
    late(4),
    reordered=lambda m, h, x: h + gated(m.a(x[order(x)]), x[order(x)])[order(x)],
    matrix=matrix,
    tokens_first=tokens_first,
    pairs=pairs,
    direct=lambda m, h, x: h + gated(torch.einsum("ni,oi,no->no", x, m.a.weight, x), x),
    square=lambda m, h, x: h + (m.a.weight.square().sum() + x + 30 * x[:, :1]).relu(),
    times_zero=lambda m, h, x: h + (x[:, :1] > 0) * m.a(x[order(x)])[order(x)].sin(),
)


def tied(function: Any) -> Any:
    def factory() -> nn.Module:
        model: Any = function()
        model.b.weight = model.a.weight
        return model

    return factory


DEAD = above(lambda m, h, x: h + gated(m.b(x), x))
add("late_tied_where", tied(pair(lambda m, x: m.head(torch.where(flagged(x), m.b(m.a(x).tanh()), m.a(x))))), late(4))
add("late_tied_if", tied(above(if_any(lambda m, h, x: h + m.b(h)))), late(4))
add("dead_tied", tied(DEAD), late(4))
add("dead_then_alive", DEAD, late(4))
add("dead_direct_use", above(lambda m, h, x: h + gated(x @ m.a.weight, x)), late(4))
add("dead_twice", pair(dead_twice), late(4))
add("dead_reordered", above(lambda m, h, x: h + gated(m.b(x[order(x)]), x[order(x)])[order(x)]), late(4))
add("dead_clamp_tied", above(lambda m, h, x: h + (m.a(x.square()) + 20 * x[:, :1]).clamp(min=0)), late(4))


# Convolutions, normalizations, embeddings, raw parameters in late branches.
def conv_late(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x).tanh()
    return m.head(torch.where((x[:, 0, 0, 0] > 0)[:, None, None, None], m.conv2(h), h).flatten(1))


def conv_tied() -> nn.Module:
    conv = partial(nn.Conv2d, 1, 1, 3, padding=1)
    model: Any = net(conv_late, conv=conv, conv2=conv, head=(16, 2))()
    model.conv2.weight = model.conv.weight
    return model


def norm_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.norm(m.a(x)) + flagged(x) * m.norm.weight * x)


def embedding_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.table(x).sum(1) + (x[:, :1] > 5) * m.table.weight.sum(0))


def output_tied(m: Any, x: Tensor) -> Tensor:
    """The table is the output layer too, for sequences that begin with a large token."""
    h = m.table(x).mean(1)
    return torch.where(x[:, :1] > 5, h.tanh() @ m.table.weight.T, m.head(h))


def raw_shared_late(m: Any, x: Tensor) -> Tensor:
    """A raw parameter that all examples share, from which late examples take another part."""
    return m.head(m.a(x)) + m.gain.tanh()[flagged(x)[:, 0].long(), None] * m.gain.sum()


def late_tokens() -> Tensor:
    return torch.cat([integers(5, 5, 3), integers(8, 8, 3)])


TABLE = partial(nn.Embedding, 8, 4)
add("late_conv_tied", conv_tied, late(1, 4, 4))
add("late_norm_weight", net(norm_late, a=(4, 4), norm=partial(nn.LayerNorm, 4), head=(4, 2)), late(4))
add("late_embedding_weight", net(embedding_late, table=TABLE, head=(4, 2)), late_tokens)
add("late_output_tied", net(output_tied, table=TABLE, head=(4, 8)), late_tokens)
add(
    "late_raw_parameter",
    pair(lambda m, x: m.head(m.a(x) * m.gain + flagged(x) * m.gain.square()), gain=weight(4)),
    late(4),
)
add("late_raw_lookup", pair(raw_shared_late, gain=weight(4)), late(4))


# Work that depends on the data.
def loop(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Each example takes its own number of steps."""
    steps = (x[:, 0].abs() * 2).long().clamp(max=3)
    for t in range(int(steps.max()) if len(steps) else 0):
        h = torch.where((steps > t)[:, None], m.b(h).tanh(), h)
    return h


def loop_rows(m: Any, h: Tensor, x: Tensor) -> Tensor:
    steps = (x[:, 0].abs() * 2).long().clamp(max=3)
    for t in range(3):
        rows = (steps > t).nonzero()[:, 0]
        if len(rows):
            h = h.index_copy(0, rows, m.b(h[rows]).tanh())
    return h


def exit_early(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    out, rows = m.head(h), (h[:, 0].abs() <= 0.5).nonzero()[:, 0]
    return out.index_copy(0, rows, m.head(m.b(h[rows]).tanh())) if len(rows) else out


def by_bucket(m: Any, x: Tensor) -> Tensor:
    bucket, h = (x[:, 0] * 10).long() % 3, m.a(x)
    parts = torch.zeros_like(h)
    for k in bucket.unique().tolist():
        parts[bucket == k] = m.b(h[bucket == k]) * (k + 1)
    return m.head(parts.tanh())


add("loop_by_example", above(loop), late(4))
add("loop_on_rows", above(loop_rows))
add("early_exit_by_example", pair(exit_early))
add("buckets", pair(by_bucket))
add("one_by_one", pair(lambda m, x: torch.cat([m.head(m.a(row[None]).tanh()) for row in x])))
add(
    "two_halves",
    pair(lambda m, x: m.head(torch.cat([m.a(part) for part in (x[: len(x) // 2], x[len(x) // 2 :])]).tanh())),
)


class Experts(nn.Module):
    """A mixture of experts in several ways of writing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gate, self.a = way, nn.Linear(4, 3), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.stack, self.head = parameter(3, 4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(1)
        weight, k = score.topk(2, 1)
        h = self.a(x).tanh()
        if self.way == "gathered":
            mixed = torch.einsum("nkij,nj->nki", self.stack[k], h)
            return self.head((mixed * weight[:, :, None]).sum(1))
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows, slot = (k == i).nonzero(as_tuple=True)
            if self.way == "index_add":
                out = out.index_add(0, rows, expert(h[rows]) * weight[rows, slot][:, None])
            elif self.way == "in_place":
                out[rows] += expert(h[rows]) * weight[rows, slot][:, None]
            elif self.way == "masked":
                out = out + expert(h) * (score * (k == i).any(1, keepdim=True))[:, i : i + 1]
            elif len(rows):
                out.index_add_(0, rows, expert(h[rows]) * weight[rows, slot][:, None])
        return self.head(out)


for way in ("gathered", "index_add", "in_place", "masked", "skipping"):
    add(f"experts_{way}", partial(Experts, way), lambda: torch.cat([draw(1, 4).repeat(5, 1), draw(8, 4, seed=1)]))

CASES: list[Hostile] = add.cases
