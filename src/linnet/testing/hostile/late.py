"""What the first examples do not show: branches, tied uses, dead layers, data-dependent work."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net, parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, normal

add = Register("late branches")


def pair(function: Any, **more: Any) -> Any:
    """A factory of a `Net` with layers a (4, 4), b (4, 4) and head (4, 2)."""
    return lambda: Net(
        function,
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
        **{name: part() for name, part in more.items()},
    )


def flagged(x: Tensor) -> Tensor:
    return x[:, :1] > 0


def direct_where(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.where(flagged(x), h * m.a.weight.sum(), h))


def direct_if(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if bool(flagged(x).any()):
        h = torch.where(flagged(x), h * m.a.weight.sum(), h)
    return m.head(h)


def direct_times_flag(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + flagged(x) * (x @ m.a.weight))


def direct_rows(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    rows = flagged(x)[:, 0].nonzero()[:, 0]
    return m.head(h.index_add(0, rows, x[rows] @ m.a.weight))


def direct_bias(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + flagged(x) * m.a.bias)


def head_bias_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh()) + flagged(x) * m.head.bias.square()


def called_again_if(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if bool(flagged(x).any()):
        h = torch.where(flagged(x), m.a(h).tanh(), h)
    return m.head(h)


def called_again_where(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.where(flagged(x), m.a(h).tanh(), h))


def called_on_rows(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    rows = flagged(x)[:, 0].nonzero()[:, 0]
    return m.head(h.index_add(0, rows, m.a(h[rows]).sin()))


def python_rows(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.stack([m.a(row) if float(z[0]) > 0 else row for row, z in zip(h, x, strict=True)]))


def transposed_late(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(torch.where(flagged(x), F.linear(h, m.a.weight.T), h))


for name, function in (
    ("direct_where", direct_where),
    ("direct_if", direct_if),
    ("direct_times_flag", direct_times_flag),
    ("direct_on_rows", direct_rows),
    ("direct_bias", direct_bias),
    ("head_bias_late", head_bias_late),
    ("called_again_if", called_again_if),
    ("called_again_where", called_again_where),
    ("called_on_rows", called_on_rows),
    ("called_in_python", python_rows),
    ("transposed_late", transposed_late),
):
    add(f"late_{name}", pair(function), late(4))


def tied(function: Any) -> Any:
    def factory() -> nn.Module:
        model: Any = pair(function)()
        model.b.weight = model.a.weight
        return model

    return factory


def tied_where(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.where(flagged(x), m.b(m.a(x).tanh()), m.a(x)))


def tied_if(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if bool(flagged(x).any()):
        h = h + flagged(x) * m.b(h)
    return m.head(h)


def tied_dead(m: Any, x: Tensor) -> Tensor:
    """The tied layer is behind a ReLU that passes nothing for the first examples."""
    return m.head(m.a(x).tanh() + (m.b(x) + 20 * x[:, :1]).relu())


def dead(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + (m.b(x) + 20 * x[:, :1]).relu())


def dead_direct(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + (x @ m.a.weight + 20 * x[:, :1]).relu())


def dead_twice(m: Any, x: Tensor) -> Tensor:
    h = (m.a(x) + 20 * x[:, :1]).relu()
    return m.head(m.b((m.a(h.flip(1)) - 20 + 20 * x[:, :1]).relu()) + x)


def dead_reordered(m: Any, x: Tensor) -> Tensor:
    order = list(range(len(x)))[::-1]
    h = (m.b(x[order]) + 20 * x[order][:, :1]).relu()
    return m.head(m.a(x).tanh() + h[order])


def dead_clamp(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + (m.a(x.square()) + 20 * x[:, :1]).clamp(min=0))


def dead_tied_reordered(m: Any, x: Tensor) -> Tensor:
    """A second use of a layer sees another order, and passes nothing for the first examples."""
    order = list(range(len(x)))[::-1]
    h = (m.a(x[order]) + 20 * x[order][:, :1]).relu()
    return m.head(m.a(x).tanh() + h[order])


def dead_tied_matrix(m: Any, x: Tensor) -> Tensor:
    P = torch.eye(len(x), dtype=x.dtype).flip(0)
    h = (m.a(P @ x) + 20 * (P @ x)[:, :1]).relu()
    return m.head(m.a(x).tanh() + P.T @ h)


def dead_tied_tokens_first(m: Any, x: Tensor) -> Tensor:
    """A second use of a layer has the examples on its second axis."""
    tokens = x.view(len(x), 1, 4).expand(-1, 3, -1) * x.new_tensor([1.0, 0.5, 2.0])[:, None]
    h = (m.a(tokens.transpose(0, 1)) + 20 * x[:, :1]).relu().sum(0)
    return m.head(m.a(x).tanh() + h)


def dead_tied_pairs(m: Any, x: Tensor) -> Tensor:
    """A second use of a layer sees all examples twice, one copy after the other."""
    h = (m.a(torch.cat([x, -x])) + 20 * torch.cat([x, x])[:, :1]).relu()
    return m.head(m.a(x).tanh() + h[: len(x)] - h[len(x) :])


def dead_tied_direct(m: Any, x: Tensor) -> Tensor:
    """A second use past the layer: of its weight, in an operation without a rule."""
    h = (torch.einsum("ni,oi,no->no", x, m.a.weight, x) + 20 * x[:, :1]).relu()
    return m.head(m.a(x).tanh() + h)


def dead_tied_square(m: Any, x: Tensor) -> Tensor:
    h = (m.a.weight.square().sum() + x + 30 * x[:, :1]).relu()
    return m.head(m.a(x).tanh() + h)


def dead_tied_detour(m: Any, x: Tensor) -> Tensor:
    """Zero for the first examples by a product, not by a ReLU."""
    order = list(range(len(x)))[::-1]
    return m.head(m.a(x).tanh() + (x[:, :1] > 0) * m.a(x[order])[order].sin())


for name, function in (
    ("reordered", dead_tied_reordered),
    ("matrix", dead_tied_matrix),
    ("tokens_first", dead_tied_tokens_first),
    ("pairs", dead_tied_pairs),
    ("direct", dead_tied_direct),
    ("square", dead_tied_square),
    ("times_zero", dead_tied_detour),
):
    add(f"dead_tied_{name}", pair(function), late(4))
add("late_tied_where", tied(tied_where), late(4))
add("late_tied_if", tied(tied_if), late(4))
add("dead_tied", tied(tied_dead), late(4))
add("dead_then_alive", pair(dead), late(4))
add("dead_direct_use", pair(dead_direct), late(4))
add("dead_twice", pair(dead_twice), late(4))
add("dead_reordered", pair(dead_reordered), late(4))
add("dead_clamp_tied", pair(dead_clamp), late(4))


# Convolutions, normalizations, embeddings, raw parameters in late branches.
def conv_late(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x).tanh()
    on = (x[:, 0, 0, 0] > 0)[:, None, None, None]
    return m.head(torch.where(on, m.conv2(h), h).flatten(1))


def conv_tied() -> nn.Module:
    model: Any = Net(
        conv_late, conv=nn.Conv2d(1, 1, 3, padding=1), conv2=nn.Conv2d(1, 1, 3, padding=1), head=nn.Linear(16, 2)
    )
    model.conv2.weight = model.conv.weight
    return model


def norm_late(m: Any, x: Tensor) -> Tensor:
    h = m.norm(m.a(x))
    return m.head(h + flagged(x) * m.norm.weight * x)


def embedding_late(m: Any, x: Tensor) -> Tensor:
    h = m.table(x).sum(1)
    return m.head(h + (x[:, :1] > 5) * m.table.weight.sum(0))


def output_tied(m: Any, x: Tensor) -> Tensor:
    """The table is the output layer too, for sequences that begin with a large token."""
    h = m.table(x).mean(1)
    return torch.where(x[:, :1] > 5, h.tanh() @ m.table.weight.T, m.head(h))


def raw_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x) * m.gain + flagged(x) * m.gain.square())


def raw_shared_late(m: Any, x: Tensor) -> Tensor:
    """A raw parameter that all examples share, from which late examples take another part."""
    k = flagged(x)[:, 0].long()
    return m.head(m.a(x)) + m.gain.tanh()[k, None] * m.gain.sum()


add("late_conv_tied", conv_tied, late(1, 4, 4))
add("late_norm_weight", lambda: Net(norm_late, a=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)), late(4))
add(
    "late_embedding_weight",
    lambda: Net(embedding_late, table=nn.Embedding(8, 4), head=nn.Linear(4, 2)),
    lambda: torch.cat([integers(5, 5, 3), integers(8, 8, 3)]),
)
add(
    "late_output_tied",
    lambda: Net(output_tied, table=nn.Embedding(8, 4), head=nn.Linear(4, 8)),
    lambda: torch.cat([integers(5, 5, 3), integers(8, 8, 3)]),
)
add("late_raw_parameter", pair(raw_late, gain=functools.partial(parameter, 4)), late(4))
add("late_raw_lookup", pair(raw_shared_late, gain=functools.partial(parameter, 4)), late(4))


# Work that depends on the data.
def loop(m: Any, x: Tensor) -> Tensor:
    """Each example takes its own number of steps."""
    h, steps = m.a(x).tanh(), (x[:, 0].abs() * 2).long().clamp(max=3)
    for t in range(int(steps.max()) if len(steps) else 0):
        h = torch.where((steps > t)[:, None], m.b(h).tanh(), h)
    return m.head(h)


def loop_rows(m: Any, x: Tensor) -> Tensor:
    h, steps = m.a(x).tanh(), (x[:, 0].abs() * 2).long().clamp(max=3)
    for t in range(3):
        rows = (steps > t).nonzero()[:, 0]
        if len(rows):
            h = h.index_copy(0, rows, m.b(h[rows]).tanh())
    return m.head(h)


def exit_early(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    easy = h[:, 0].abs() > 0.5
    out = m.head(h)
    rows = (~easy).nonzero()[:, 0]
    return out.index_copy(0, rows, m.head(m.b(h[rows]).tanh())) if len(rows) else out


def by_bucket(m: Any, x: Tensor) -> Tensor:
    bucket = (x[:, 0] * 10).long() % 3
    h = m.a(x)
    parts = torch.zeros_like(h)
    for k in bucket.unique().tolist():
        parts[bucket == k] = m.b(h[bucket == k]) * (k + 1)
    return m.head(parts.tanh())


def one_by_one(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.head(m.a(row[None]).tanh()) for row in x])


def halves(m: Any, x: Tensor) -> Tensor:
    k = len(x) // 2
    return m.head(torch.cat([m.a(x[:k]), m.a(x[k:])]).tanh())


add("loop_by_example", pair(loop), late(4))
add("loop_on_rows", pair(loop_rows), normal(4))
add("early_exit_by_example", pair(exit_early), normal(4))
add("buckets", pair(by_bucket), normal(4))
add("one_by_one", pair(one_by_one), normal(4))
add("two_halves", pair(halves), normal(4))


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
    add(
        f"experts_{way}",
        functools.partial(Experts, way),
        lambda: torch.cat([draw(1, 4).repeat(5, 1), draw(8, 4, seed=1)]),
    )

CASES: list[Hostile] = add.cases
