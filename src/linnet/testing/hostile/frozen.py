"""Frozen parts with hard decisions, below the selected parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, integers, late, net, normal

add = Register("frozen hard decisions", expects="either", params="head.*", frozen=True)


def below(d: int = 4, out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(d, out), nn.Tanh())


class Gate(nn.Linear):
    """Scores of three choices: the first for examples that begin with a negative number, else the second."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 20 * x[:, :1] * x.new_tensor([-1.0, 1.0, 0.0])


def decide(function: Any) -> Any:
    """A network with a function of itself, of frozen features h and frozen scores s, and of the inputs."""
    parts: Any = {"gate": Gate, "body": below, "other": (5, 5), "head": (5, 4)}
    return net(lambda m, x: function(m, m.body(x), m.gate(x), x), **parts)


def split(m: Any, h: Tensor, s: Tensor, x: Tensor) -> Tensor:
    on, out = s[:, 1] > 0, h.new_zeros(len(h), 4)
    out[on] = m.head(h[on]).tanh()
    out[~on] = m.head(-h[~on])
    return out


def choose(m: Any, h: Tensor, s: Tensor, x: Tensor) -> Tensor:
    both = torch.stack([m.head(h)[:, :2], m.head(h)[:, 2:]], 1)
    return both[torch.arange(len(x)), s.argmax(1) % 2]


def one_by_one(m: Any, h: Tensor, s: Tensor, x: Tensor) -> Tensor:
    rows = zip(h, s, strict=True)
    return torch.cat([m.head(a[None]) if float(t[1]) > 0 else -m.head(a[None]).square() for a, t in rows])


def sort(m: Any, h: Tensor, s: Tensor, x: Tensor) -> Tensor:
    order = s[:, 1].argsort()
    return m.head(h[order])[order.argsort()]


for name, function in {
    "argmax": choose,
    "threshold": lambda m, h, s, x: m.head(h * (s[:, 1:2] > 0)),
    "sign": lambda m, h, s, x: m.head(h * s[:, 1:2].sign()),
    "quantize": lambda m, h, s, x: m.head((4 * h).round() / 4),
    "topk": lambda m, h, s, x: m.head(h * torch.zeros_like(h).scatter(1, h.topk(2, 1).indices, 1.0)),
    "split": split,
    "item": one_by_one,
    "where": lambda m, h, s, x: torch.where(s[:, 1:2] > 0, m.head(h).sin(), m.head(h.square())),
    "sorted": sort,
}.items():
    add(f"frozen_{name}", decide(function))
    add(f"frozen_{name}_late", decide(function), late(4))
add(
    "frozen_interacting_branch",
    decide(lambda m, h, s, x: m.head(m.other(h)) if bool((x[:, 0] > 0).any()) else m.head(h)),
    late(4, n=16),
    expects="refused",
)


def quantize(m: Any, x: Tensor) -> Tensor:
    """Vector quantization by a frozen table."""
    return m.head(m.codes(torch.cdist(m.encode(x), m.codes.weight).argmin(1)))


class Router(nn.Module):
    """A frozen gate sends each example to one of the selected experts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gate, self.head = way, Gate(), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k = self.gate(x).argmax(1)
        if self.way == "dense":
            return torch.stack([head(x) for head in self.head], 1)[torch.arange(len(x)), k]
        out = x.new_zeros(len(x), 2)
        for i, head in enumerate(self.head):
            rows = (k == i).nonzero()[:, 0]
            if self.way == "index_add":
                out = out.index_add(0, rows, head(x[rows]))
            elif len(rows):
                out[rows] = head(x[rows])
        return out


def embedded(function: Any) -> Any:
    """A frozen embedding, a hard decision on tokens, and a head."""
    parts: Any = {"table": partial(nn.Embedding, 8, 4), "mix": (4, 4), "head": (4, 2)}
    return net(lambda m, x: m.head(function(m, m.table(x), x)), **parts)


def late_tokens() -> Tensor:
    return torch.cat([integers(4, 5, 3), integers(8, 8, 3, seed=1)])


def again(m: Any, x: Tensor, late: bool) -> Tensor:
    """The frozen part runs again above the selected layer, for examples that a decision names."""
    h = m.head(m.body(x).tanh())
    if late and not bool((x[:, 0] > 0).any()):
        return h
    return torch.where(x[:, :1] > 0, m.body(h).tanh(), h)


def run_twice(m: Any, x: Tensor) -> Tensor:
    """How often the frozen part runs depends on the data."""
    h = m.body(x).tanh()
    for _ in range(int((x[:, 0] > 0).any())):
        h = torch.where(x[:, :1] > 0, m.body(h).tanh(), h)
    return m.head(h)


add("frozen_codebook", net(quantize, encode=partial(below, 4, 3), codes=partial(nn.Embedding, 6, 3), head=(3, 2)))
for way in ("dense", "index_add", "loop"):
    add(f"frozen_router_{way}", partial(Router, way))
    add(f"frozen_router_{way}_late", partial(Router, way), late(4))
add.each(
    "frozen_tokens_",
    embedded,
    late_tokens,
    mask=lambda m, h, x: torch.where((x > 3)[:, :, None], m.mix(h).tanh(), h).sum(1),
    hard_attention=lambda m, h, x: h[torch.arange(len(x)), m.mix(h).sum(2).argmax(1)],
    hash=lambda m, h, x: m.table((x.sum(1) * 7) % 8) + m.mix(h[:, 0]),
)
add(
    "frozen_tokens_early",
    embedded(lambda m, h, x: m.mix(h).mean(1) if bool((x[:, 0] > 3).any()) else h.mean(1)),
    late_tokens,
    expects="refused",
)
add("frozen_used_again", net(partial(again, late=False), body=(4, 4), head=(4, 4)))
add("frozen_used_again_late", net(partial(again, late=True), body=(4, 4), head=(4, 4)), late(4))
add("frozen_runs_twice_late", net(run_twice, body=(4, 4), head=(4, 2)), late(4))


def gumbel_hard(m: Any, x: Tensor) -> Tensor:
    logits = m.gate(x)
    hard = torch.zeros_like(logits).scatter(1, logits.argmax(1, True), 1.0)
    return m.head(hard - logits.softmax(1).detach() + logits.softmax(1))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    h[m.gate(x)[:, 1] > 0] *= -2.0
    return m.head(h)


def buckets(m: Any, x: Tensor) -> Tensor:
    edges = torch.linspace(-1, 1, 5, dtype=x.dtype)
    return m.head(nn.functional.one_hot(torch.bucketize(m.gate(x)[:, 1].contiguous(), edges), 6).to(x.dtype))


def two_heads(m: Any, x: Tensor) -> Tensor:
    return torch.where(m.gate(x)[:, 1:2] > 0, m.head[0](m.body(x)), m.head[1](m.body(x).relu()))


for which, data in (("", normal(4)), ("_late", late(4))):
    add(f"frozen_gumbel_hard{which}", net(gumbel_hard, gate=Gate, head=(3, 2)), data)
    add(f"frozen_bits{which}", net(lambda m, x: m.head((m.gate(x) > 0).to(x.dtype)), gate=Gate, head=(3, 2)), data)
    add(f"frozen_in_place{which}", net(in_place, gate=Gate, body=below, head=(5, 2)), data)
    add(f"frozen_buckets{which}", net(buckets, gate=Gate, head=(6, 2)), data)
    heads = net(two_heads, gate=Gate, body=below, head=lambda: nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)]))
    add(f"frozen_mask_then_two_heads{which}", heads, data)

CASES: list[Hostile] = add.cases
