"""Networks that change something when they run: their input, their weights, their buffers, themselves."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, draw, integers, late, net, weight

add = Register("changes state", expects="either")


# The input.
def changed(change: Any) -> Any:
    """A network that changes its input before it uses it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        change(x)
        return m.head(m.a(x).tanh())

    return net(forward)


def write(x: Tensor) -> None:
    x[:, 0] = 2.0 * x[:, 0] + 1


def write_late(x: Tensor) -> None:
    x[x[:, 0] > 0] *= 3.0


def halve_afterwards(m: Any, x: Tensor) -> Tensor:
    f = m.head(m.a(x.clone()).tanh())
    x.mul_(0.5)
    return f


def mask(m: Any, x: Tensor) -> Tensor:
    x[x == 5] = 0
    return m.head(m.table(x).sum(1))


def add_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.b(h.tanh())
    return m.head(h)


TABLE = partial(nn.Embedding, 6, 4)
add.each(
    "input_changed_",
    changed,
    mean_taken=lambda x: x.sub_(x.mean(1, keepdim=True)),
    normalized=lambda x: x.div_(x.norm(dim=1, keepdim=True) + 1).add_(0.5),
    written=write,
    view=lambda x: x[:, 1:].mul_(0.5),
)
add("input_changed_afterwards", net(halve_afterwards))
add("input_changed_relu", net(lambda m, x: m.head(m.a(F.relu(x, inplace=True)))))
add("input_changed_late", changed(write_late), late(4))
add("first_layer_in_place", lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
add("first_layer_hardtanh", lambda: nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), nn.Linear(4, 2)))
add(
    "tokens_changed",
    net(lambda m, x: m.head(m.table(x.clamp_(min=2)).sum(1)), table=TABLE, head=(4, 2)),
    lambda: integers(6, 13, 3),
)
add(
    "tokens_masked_late", net(mask, table=TABLE, head=(4, 2)), lambda: torch.cat([integers(5, 5, 3), integers(6, 8, 3)])
)
add("inner_in_place", net(lambda m, x: m.head(m.a(x).mul_(2.0).add_(1.0).tanh_())))
add("add_to_layer_output", net(lambda m, x: m.head(m.a(x).tanh()).add_(x[:, :2])))
add("residual_in_place", net(add_in_place, a=(4, 4), b=(4, 4), head=(4, 2)))


# Weights.
def clipped() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 2))


def half_tokens() -> Tensor:
    """The last tokens of the vocabulary come in late examples only."""
    return torch.cat([integers(3, 5, 3), integers(6, 8, 3)])


def projected(change: Any) -> Any:
    """A network that changes the weight of its first layer before it uses it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        change(m.a.weight.data, x)
        return m.head(m.a(x).tanh())

    return net(forward)


def normalize(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.div_(m.a.weight.norm())
    return m.head(m.a(x).tanh())


add("max_norm", clipped, half_tokens)
add("max_norm_bag", lambda: nn.Sequential(nn.EmbeddingBag(6, 4, max_norm=0.7), nn.Linear(4, 2)), half_tokens)
add(
    "max_norm_functional",
    net(lambda m, x: m.head(F.embedding(x, m.table, max_norm=0.8).sum(1)), table=weight(6, 4), head=(4, 2)),
    half_tokens,
)
add("max_norm_frozen", clipped, half_tokens, params="2.*")
add("weights_projected", net(normalize))
add("weights_clamped", projected(lambda w, x: w.clamp_(-0.3, 0.3)))
add("weights_decay", projected(lambda w, x: w.mul_(0.9)), expects="refused")
add(
    "weights_decay_late",
    projected(lambda w, x: w.mul_(0.9) if bool((x[:, 0] > 0).any()) else w),
    late(4),
    expects="refused",
)


# Buffers and attributes.
class Counter(nn.Module):
    """Counts its calls or its examples, by a function of itself, the features and the inputs."""

    calls: Tensor
    mean: Tensor
    seen: Tensor

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count, self.a, self.head = count, nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.number = 0
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.head(self.count(self, self.a(x), x).tanh())


def count_harmless(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.calls += 1
    m.seen += len(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h


def momentum(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h - m.mean


def momentum_replaced(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h - m.mean


def scale(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.calls += 1
    return h / m.calls


def remember(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.history.append(h.detach().mean(0))
    return h + m.history[max(0, len(m.history) - 2)]


def count_late(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    m.calls += (x[:, 0] > 0).sum()
    return h * (1 + m.calls)


def initialize(m: Counter, h: Tensor, x: Tensor) -> Tensor:
    if not bool(m.calls):
        m.mean, m.calls = h.detach().mean(0), torch.ones_like(m.calls)
    return h - m.mean


add("counter_harmless", partial(Counter, count_harmless), expects="right")
add.each(
    "counter_",
    lambda count: partial(Counter, count),
    None,
    "refused",
    momentum=momentum,
    momentum_replaced=momentum_replaced,
    scale=scale,
    python=lambda m, h, x: h / m.number,
    every_fourth=lambda m, h, x: h if m.number % 4 else 2 * h,
    memory=remember,
    statistics=lambda m, h, x: F.batch_norm(h, m.mean, torch.ones_like(m.mean), training=True),
    first_call=lambda m, h, x: h if m.number > 1 else 2 * h,
)
add("counter_late", partial(Counter, count_late), late(4), expects="refused")
add("data_initialized", partial(Counter, initialize), expects="refused")


class Cache(nn.Module):
    """A cache of results: by the shape of the input, or of ones that do no harm."""

    def __init__(self, by_shape: bool) -> None:
        super().__init__()
        self.by_shape, self.a, self.head = by_shape, nn.Linear(4, 5), nn.Linear(5, 2)
        self.last: tuple[Any, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.by_shape:
            if self.last is None or self.last[0] != x.shape:
                self.last = x.shape, x.detach().mean(1, keepdim=True)
            return self.head((self.a(x) + self.last[1]).tanh())
        if self.last is None or len(self.last[0]) != len(x):
            self.last = x.new_ones(len(x)), None
        return self.head(self.a(x).tanh()) * self.last[0][:, None]


add("cache_by_shape", partial(Cache, True), expects="refused")
add("cache_harmless", partial(Cache, False), expects="right")


# The mode of a part.
def moded(function: Any) -> Any:
    norm, drop = partial(nn.BatchNorm1d, 5), partial(nn.Dropout, 0.5)
    return net(function, a=(4, 5), norm=norm, drop=drop, head=(5, 2))


def switch_to_eval(m: Any, x: Tensor) -> Tensor:
    m.norm.eval()
    m.drop.eval()
    return m.head(m.drop(m.norm(m.a(x)).tanh()))


def switch_to_train(m: Any, x: Tensor) -> Tensor:
    m.norm.train()
    return m.head(m.drop(m.norm(m.a(x)).tanh()))


add("mode_eval_in_forward", moded(switch_to_eval), expects="right")
add("mode_eval_in_forward_training", moded(switch_to_eval), train=True, expects="right")
add("mode_train_in_forward", moded(switch_to_train), expects="refused")
add(
    "mode_read",
    moded(lambda m, x: m.head(m.norm(m.a(x)).tanh()) * (2.0 if m.training else 1.0)),
    train=True,
    expects="right",
)

# Dtypes and layouts of the input.
PLAIN = net(lambda m, x: m.head(m.a(x).tanh()))
add("mixed_dtypes", net(lambda m, x: m.head(m.a(x).tanh() + torch.ones(1, dtype=torch.float32))), expects="right")
add("expanded_input", PLAIN, lambda: draw(1, 4).expand(13, 4), expects="right")
add("transposed_input", PLAIN, lambda: draw(4, 13).T, expects="right")
add("input_with_gradient", PLAIN, lambda: draw(13, 4).requires_grad_(), expects="either")


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


def holding(make: Any) -> Any:
    """A network that holds something that cannot be copied."""

    def factory() -> nn.Module:
        model: Any = PLAIN()
        model.held = make(model)
        return model

    return factory


add("stateful_rnn", Stateful, expects="refused")
add.each(
    "holds_",
    holding,
    lock=lambda model: threading.Lock(),
    graph=lambda model: model.a.weight * 2,
    generator=lambda model: (i for i in (1, 2)),
)

CASES: list[Hostile] = add.cases
