"""Frozen parts with hard decisions, below the selected parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.case import Net
from linnet.testing.hostile.case import Hostile, Register, integers, late, normal

add = Register("frozen hard decisions", expects="either", params="head.*", frozen=True)


def below(d: int = 4, out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(d, out), nn.Tanh())


class Gate(nn.Linear):
    """Scores of three choices: the first for examples that begin with a negative number, else the second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 20 * x[:, :1] * x.new_tensor([-1.0, 1.0, 0.0])


def choice(m: Any, x: Tensor, way: str) -> Tensor:
    score = m.gate(x)
    h = m.body(x)
    if way == "argmax":
        k = score.argmax(1)
        return torch.stack([m.head(h)[:, :2], m.head(h)[:, 2:]], 1)[torch.arange(len(x)), k % 2]
    if way == "threshold":
        return m.head(h * (score[:, 1:2] > 0))
    if way == "sign":
        return m.head(h * score[:, 1:2].sign())
    if way == "quantize":
        return m.head((4 * h).round() / 4)
    if way == "topk":
        mask = torch.zeros_like(h).scatter(1, h.topk(2, 1).indices, 1.0)
        return m.head(h * mask)
    if way == "branch":
        return m.head(m.other(h)) if bool((x[:, 0] > 0).any()) else m.head(h)
    if way == "split":
        on = score[:, 1] > 0
        out = h.new_zeros(len(h), 4)
        out[on] = m.head(h[on]).tanh()
        out[~on] = m.head(-h[~on])
        return out
    if way == "item":
        return torch.cat(
            [m.head(a[None]) if float(s[1]) > 0 else -m.head(a[None]).square() for a, s in zip(h, score, strict=True)]
        )
    if way == "where":
        return torch.where(score[:, 1:2] > 0, m.head(h).sin(), m.head(h.square()))
    if way == "sorted":
        order = score[:, 1].argsort()
        return m.head(h[order])[order.argsort()]
    raise ValueError(way)


def chosen(way: str) -> nn.Module:
    return Net(
        functools.partial(choice, way=way),
        gate=Gate(4, 3),
        body=below(),
        other=nn.Linear(5, 5),
        head=nn.Linear(5, 4),
    )


for way in ("argmax", "threshold", "sign", "quantize", "topk", "split", "item", "where", "sorted"):
    add(f"frozen_{way}", functools.partial(chosen, way), normal(4))
    add(f"frozen_{way}_late", functools.partial(chosen, way), late(4))
add("frozen_interacting_branch", functools.partial(chosen, "branch"), late(4, n=16), expects="refused")


class Codebook(nn.Module):
    """Vector quantization by a frozen table, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.head = below(4, 3), nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        nearest = torch.cdist(h, self.codes.weight).argmin(1)
        return self.head(self.codes(nearest))


class Router(nn.Module):
    """A frozen gate sends each example to one of the selected experts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gate, self.head = way, Gate(4, 3), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

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


class Tokens(nn.Module):
    """A frozen embedding, a hard decision on tokens, and a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table, self.mix, self.head = way, nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if self.way == "mask":
            keep = (x > 3)[:, :, None]
            h = torch.where(keep, self.mix(h).tanh(), h).sum(1)
        elif self.way == "hard_attention":
            best = self.mix(h).sum(2).argmax(1)
            h = h[torch.arange(len(x)), best]
        elif self.way == "early":
            h = self.mix(h).mean(1) if bool((x[:, 0] > 3).any()) else h.mean(1)
        elif self.way == "hash":
            h = self.table((x.sum(1) * 7) % 8) + self.mix(h[:, 0])
        return self.head(h)


class Twice(nn.Module):
    """The frozen part runs again above the selected layer, for examples that a decision names."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.body, self.head = late, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.body(x).tanh())
        if self.late and not bool((x[:, 0] > 0).any()):
            return h
        return torch.where(x[:, :1] > 0, self.body(h).tanh(), h)


class Counted(nn.Module):
    """How often the frozen part runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        for _ in range(int((x[:, 0] > 0).any())):
            h = torch.where(x[:, :1] > 0, self.body(h).tanh(), h)
        return self.head(h)


add("frozen_codebook", Codebook, normal(4))
for way in ("dense", "index_add", "loop"):
    add(f"frozen_router_{way}", functools.partial(Router, way), normal(4))
    add(f"frozen_router_{way}_late", functools.partial(Router, way), late(4))
for way in ("mask", "hard_attention", "hash"):
    add(
        f"frozen_tokens_{way}",
        functools.partial(Tokens, way),
        lambda: torch.cat([integers(4, 5, 3), integers(8, 8, 3, seed=1)]),
    )
add(
    "frozen_tokens_early",
    functools.partial(Tokens, "early"),
    lambda: torch.cat([integers(4, 5, 3), integers(8, 8, 3, seed=1)]),
    expects="refused",
)
add("frozen_used_again", functools.partial(Twice, False), normal(4))
add("frozen_used_again_late", functools.partial(Twice, True), late(4))
add("frozen_runs_twice_late", Counted, late(4))


def gumbel_hard(m: Any, x: Tensor) -> Tensor:
    logits = m.gate(x)
    hard = torch.zeros_like(logits).scatter(1, logits.argmax(1, True), 1.0)
    return m.head(hard - logits.softmax(1).detach() + logits.softmax(1))


def bits(m: Any, x: Tensor) -> Tensor:
    return m.head((m.gate(x) > 0).to(x.dtype))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.body(x)
    h[m.gate(x)[:, 1] > 0] *= -2.0
    return m.head(h)


def buckets(m: Any, x: Tensor) -> Tensor:
    edges = torch.linspace(-1, 1, 5, dtype=x.dtype)
    return m.head(torch.nn.functional.one_hot(torch.bucketize(m.gate(x)[:, 1].contiguous(), edges), 6).to(x.dtype))


for which, data in (("", normal(4)), ("_late", late(4))):
    add(f"frozen_gumbel_hard{which}", lambda: Net(gumbel_hard, gate=Gate(4, 3), head=nn.Linear(3, 2)), data)
    add(f"frozen_bits{which}", lambda: Net(bits, gate=Gate(4, 3), head=nn.Linear(3, 2)), data)
    add(f"frozen_in_place{which}", lambda: Net(in_place, gate=Gate(4, 3), body=below(), head=nn.Linear(5, 2)), data)
    add(f"frozen_buckets{which}", lambda: Net(buckets, gate=Gate(4, 3), head=nn.Linear(6, 2)), data)
    add(
        f"frozen_mask_then_two_heads{which}",
        lambda: Net(
            lambda m, x: torch.where(m.gate(x)[:, 1:2] > 0, m.head[0](m.body(x)), m.head[1](m.body(x).relu())),
            gate=Gate(4, 3),
            body=below(),
            head=nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)]),
        ),
        data,
    )

CASES: list[Hostile] = add.cases
