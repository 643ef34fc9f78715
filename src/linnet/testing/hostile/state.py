"""Networks that change something when they run: their input, their weights, their buffers, themselves."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net, parameter
from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, normal

add = Register("changes state", expects="either")


def net(function: Any) -> Any:
    """A factory of a `Net` with layers a (4, 5) and head (5, 2)."""
    return lambda: Net(function, a=nn.Linear(4, 5), head=nn.Linear(5, 2))


def mean_taken(m: Any, x: Tensor) -> Tensor:
    x -= x.mean(1, keepdim=True)
    return m.head(m.a(x).tanh())


def normalized(m: Any, x: Tensor) -> Tensor:
    x.div_(x.norm(dim=1, keepdim=True) + 1).add_(0.5)
    return m.head(m.a(x).tanh())


def written(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 2.0 * x[:, 0] + 1
    return m.head(m.a(x).tanh())


def written_late(m: Any, x: Tensor) -> Tensor:
    x[x[:, 0] > 0] *= 3.0
    return m.head(m.a(x).tanh())


def view_changed(m: Any, x: Tensor) -> Tensor:
    x[:, 1:].mul_(0.5)
    return m.head(m.a(x).tanh())


def halved_after(m: Any, x: Tensor) -> Tensor:
    f = m.head(m.a(x.clone()).tanh())
    x.mul_(0.5)
    return f


def relu_first(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(F.relu(x, inplace=True)))


for name, function in (
    ("mean_taken", mean_taken),
    ("normalized", normalized),
    ("written", written),
    ("view", view_changed),
    ("afterwards", halved_after),
    ("relu", relu_first),
):
    add(f"input_changed_{name}", net(function), normal(4))
add("input_changed_late", net(written_late), late(4))
add(
    "first_layer_in_place",
    lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    normal(4),
)
add("first_layer_hardtanh", lambda: nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Linear(4, 2)), normal(4))
add(
    "tokens_changed",
    lambda: Net(lambda m, x: m.head(m.table(x.clamp_(min=2)).sum(1)), table=nn.Embedding(6, 4), head=nn.Linear(4, 2)),
    lambda: integers(6, 13, 3),
)
add(
    "tokens_masked_late",
    lambda: Net(_masked, table=nn.Embedding(6, 4), head=nn.Linear(4, 2)),
    lambda: torch.cat([integers(5, 5, 3), integers(6, 8, 3)]),
)
add("inner_in_place", net(lambda m, x: m.head(m.a(x).mul_(2.0).add_(1.0).tanh_())), normal(4))
add("add_to_layer_output", net(lambda m, x: m.head(m.a(x).tanh()).add_(x[:, :2])), normal(4))
add("residual_in_place", lambda: Net(_residual, a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 2)), normal(4))


def _masked(m: Any, x: Tensor) -> Tensor:
    x[x == 5] = 0
    return m.head(m.table(x).sum(1))


def _residual(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.b(h.tanh())
    return m.head(h)


# Weights.
def clipped() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 2))


def clipped_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(6, 4, max_norm=0.7), nn.Linear(4, 2))


def clipped_function() -> nn.Module:
    return Net(
        lambda m, x: m.head(F.embedding(x, m.table, max_norm=0.8).sum(1)), table=parameter(6, 4), head=nn.Linear(4, 2)
    )


def half_tokens() -> Tensor:
    """The last tokens of the vocabulary come in late examples only."""
    return torch.cat([integers(3, 5, 3), integers(6, 8, 3)])


add("max_norm", clipped, half_tokens)
add("max_norm_bag", clipped_bag, half_tokens)
add("max_norm_functional", clipped_function, half_tokens)
add("max_norm_frozen", clipped, half_tokens, params="2.*")


def weights_normalized(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.div_(m.a.weight.norm())
    return m.head(m.a(x).tanh())


def weights_data(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data.clamp_(-0.3, 0.3)
    return m.head(m.a(x).tanh())


def weights_decay(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data.mul_(0.9)
    return m.head(m.a(x).tanh())


def weights_decay_late(m: Any, x: Tensor) -> Tensor:
    if bool((x[:, 0] > 0).any()):
        m.a.weight.data.mul_(0.9)
    return m.head(m.a(x).tanh())


add("weights_projected", net(weights_normalized), normal(4))
add("weights_clamped", net(weights_data), normal(4))
add("weights_decay", net(weights_decay), normal(4), expects="refused")
add("weights_decay_late", net(weights_decay_late), late(4), expects="refused")


# Buffers and attributes.
class Counter(nn.Module):
    """Counts its calls, or its examples; some ways of counting change the outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.number = 0
        self.calls: Tensor
        self.mean: Tensor
        self.seen: Tensor
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.number += 1
        if self.kind == "harmless":
            self.calls += 1
            self.seen += len(x)
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        elif self.kind == "momentum":
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
            h = h - self.mean
        elif self.kind == "momentum_replaced":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            h = h - self.mean
        elif self.kind == "scale":
            self.calls += 1
            h = h / self.calls
        elif self.kind == "python":
            h = h / self.number
        elif self.kind == "every_fourth":
            h = h if self.number % 4 else 2 * h
        elif self.kind == "first_call":
            h = h if self.number > 1 else 2 * h
        elif self.kind == "memory":
            self.history.append(h.detach().mean(0))
            h = h + self.history[max(0, len(self.history) - 2)]
        elif self.kind == "late":
            self.calls += (x[:, 0] > 0).sum()
            h = h * (1 + self.calls)
        elif self.kind == "statistics":
            h = F.batch_norm(h, self.mean, torch.ones_like(self.mean), training=True)
        elif self.kind == "data_initialized":
            if not bool(self.calls):
                self.mean, self.calls = h.detach().mean(0), torch.ones_like(self.calls)
            h = h - self.mean
        return self.head(h.tanh())


add("counter_harmless", functools.partial(Counter, "harmless"), normal(4), expects="right")
for kind in (
    "momentum",
    "momentum_replaced",
    "scale",
    "python",
    "every_fourth",
    "memory",
    "late",
    "statistics",
):
    data = late(4) if kind == "late" else normal(4)
    add(f"counter_{kind}", functools.partial(Counter, kind), data, expects="refused")
add("counter_first_call", functools.partial(Counter, "first_call"), normal(4), expects="refused")
add("data_initialized", functools.partial(Counter, "data_initialized"), normal(4), expects="refused")


class Cache(nn.Module):
    """A cache of results: by the first entry of an example, or of the last input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 2)
        self.last: tuple[Any, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "shape":
            if self.last is None or self.last[0] != x.shape:
                self.last = x.shape, x.detach().mean(1, keepdim=True)
            return self.head((self.a(x) + self.last[1]).tanh())
        if self.last is None or len(self.last[0]) != len(x):
            self.last = x.new_ones(len(x)), None
        return self.head(self.a(x).tanh()) * self.last[0][:, None]


add("cache_by_shape", functools.partial(Cache, "shape"), normal(4), expects="refused")
add("cache_harmless", functools.partial(Cache, "ones"), normal(4), expects="right")


class ModeSwitch(nn.Module):
    """Switches the mode of a part whenever it runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.norm = kind, nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "eval":
            self.norm.eval()
            self.drop.eval()
        elif self.kind == "train":
            self.norm.train()
        elif self.kind == "scale":
            return self.head(self.norm(self.a(x)).tanh()) * (2.0 if self.training else 1.0)
        return self.head(self.drop(self.norm(self.a(x)).tanh()))


add("mode_eval_in_forward", functools.partial(ModeSwitch, "eval"), normal(4), expects="right")
add("mode_eval_in_forward_training", functools.partial(ModeSwitch, "eval"), normal(4), train=True, expects="right")
add("mode_train_in_forward", functools.partial(ModeSwitch, "train"), normal(4), expects="refused")
add("mode_read", functools.partial(ModeSwitch, "scale"), normal(4), train=True, expects="right")


def default_dtype(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + torch.ones(1, dtype=torch.float32))


add("mixed_dtypes", net(default_dtype), normal(4), expects="right")
add("expanded_input", net(lambda m, x: m.head(m.a(x).tanh())), lambda: draw(1, 4).expand(13, 4), expects="right")
add("transposed_input", net(lambda m, x: m.head(m.a(x).tanh())), lambda: draw(4, 13).T, expects="right")
add(
    "input_with_gradient",
    net(lambda m, x: m.head(m.a(x).tanh())),
    lambda: draw(13, 4).requires_grad_(),
    expects="either",
)


class Stateful(nn.Module):
    """A recurrent network that goes on where the last batch ended."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        start = x.new_zeros(5) if self.hidden is None else self.hidden
        h = self.cell(x, start.expand(len(x), -1))
        self.hidden = h[-1].detach()
        return self.head(h)


class Holding(nn.Module):
    """Holds something that cannot be copied."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        made: dict[str, Any] = {"lock": threading.Lock(), "graph": self.a.weight * 2, "generator": (i for i in (1, 2))}
        self.held = made[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x).tanh())


add("stateful_rnn", Stateful, normal(4), expects="refused")
for kind in ("lock", "graph", "generator"):
    add(f"holds_{kind}", functools.partial(Holding, kind), normal(4))

CASES: list[Hostile] = add.cases
