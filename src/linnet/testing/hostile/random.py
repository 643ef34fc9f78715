"""Random outputs, and random numbers that do no harm."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, late, net, normal

add = Register("random outputs", expects="refused", predicts=True)
TORCH = torch.Generator().manual_seed(0)
"""A generator that lives beside the networks, and goes on."""


def wide(function: Any) -> Any:
    """A network with layers a (4, 64) and head (64, 2), and a function of the features tanh(a(x)) and the inputs."""
    return net(lambda m, x: m.head(function(m.a(x).tanh(), x)), a=(4, 64), head=(64, 2))


def raw(function: Any) -> Any:
    """The same with a function of the features a(x)."""
    return net(lambda m, x: m.head(function(m.a(x))), a=(4, 64), head=(64, 2))


for p in (0.01, 0.1, 0.5):
    add(f"dropout_{p:g}", wide(partial(lambda h, x, p: F.dropout(h, p), p=p)), normal(4, n=24))


def noise_if_late(h: Tensor, x: Tensor) -> Tensor:
    return h + (x[:, :1] > 0) * torch.randn_like(h) if bool((x[:, 0] > 0).any()) else h


def noise_on_rows(h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([row + torch.randn_like(row) if z[0] > 0 else row for row, z in zip(h, x, strict=True)])


# About three numbers are dropped in a pass over all examples.
add("rare_dropout", wide(lambda h, x: h * (torch.rand_like(h) > 0.002)), normal(4, n=24))
add.each(
    "",
    wide,
    late(4),
    noise_for_late_examples=lambda h, x: h + torch.where(x[:, :1] > 0, torch.randn_like(h), 0.0),
    noise_if_late=noise_if_late,
    noise_on_rows=noise_on_rows,
    python_noise_late=lambda h, x: h * (1 + (x[:, :1] > 0) * random.uniform(0.5, 1.5)),
)
add.each(
    "",
    wide,
    small_noise=lambda h, x: h + 1e-4 * torch.randn_like(x[:, :1]),
    numpy_noise=lambda h, x: h + torch.from_numpy(np.random.randn(len(x), 1)),
    python_noise=lambda h, x: h * random.uniform(0.5, 1.5),
    random_permutation=lambda h, x: h[:, torch.randperm(h.shape[1])],
)
add.each(
    "",
    raw,
    bernoulli_gate=lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    stochastic_depth=lambda h: h.tanh() if torch.rand(()) > 0.3 else h,
    gumbel_softmax=lambda h: F.gumbel_softmax(h, hard=False),
    randomized_relu=lambda h: F.rrelu(h, training=True),
)


class OwnGenerator(nn.Module):
    """Noise by a generator: of the network, beside the network, or an attribute of the network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 2)
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        if kind == "attribute":
            self.source = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "numpy":
            noise = torch.from_numpy(self.numpy.normal(size=(len(x), 1)))
        elif self.kind == "python":
            noise = torch.full((len(x), 1), self.python.random(), dtype=x.dtype)
        else:
            source = TORCH if self.kind == "torch" else self.source
            noise = torch.randn(len(x), 1, generator=source, dtype=x.dtype)
        return self.head(self.a(x).tanh() + noise)


for kind in ("numpy", "python", "torch", "attribute"):
    add(f"own_generator_{kind}", partial(OwnGenerator, kind))


def always_training(m: Any, x: Tensor) -> Tensor:
    m.drop.train()
    return m.head(m.drop(m.a(x).tanh()))


def average(m: Any, x: Tensor) -> Tensor:
    """Monte Carlo dropout: the mean of eight passes."""
    return torch.stack([m.head(F.dropout(m.a(x).tanh(), 0.2)) for _ in range(8)]).mean(0)


def attend(m: Any, x: Tensor) -> Tensor:
    """Attention with dropout that is always on."""
    q, k, v = m.qkv(x).chunk(3, 2)
    return m.head(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).mean(1))


def random_hook(h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: F.dropout(g, 0.2))
    return h


drop = partial(nn.Dropout, 0.1)
add("always_training", net(always_training, a=(4, 64), drop=drop, head=(64, 2)), normal(4, n=24))
add("monte_carlo_dropout", net(average, a=(4, 64), head=(64, 2)))
add("attention_dropout", net(attend, qkv=(4, 12), head=(4, 2)), normal(4, 4))
add("random_gradient", wide(lambda h, x: h + torch.rand_like(h) * (h - h.detach())))  # the outputs are fixed
add("random_hook", wide(random_hook))
add("random_output_function", wide(lambda h, x: h), output=lambda f: f + torch.randn_like(f))

# Random numbers that do no harm.
harmless = Register("harmless random numbers")


def unused(h: Tensor, x: Tensor) -> Tensor:
    torch.randn(3)
    return h


def unused_numpy(h: Tensor, x: Tensor) -> Tensor:
    np.random.rand()
    random.random()
    return h


def fixed_seed(h: Tensor, x: Tensor) -> Tensor:
    """Random features, drawn anew from one seed in every pass."""
    return h * torch.randn(64, generator=torch.Generator().manual_seed(3), dtype=x.dtype)


def inner_fork(h: Tensor, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return h * (torch.rand(64) > 0.5)


harmless.each(
    "",
    wide,
    numbers_drawn_and_unused=unused,
    numpy_drawn_and_unused=unused_numpy,
    noise_times_zero=lambda h, x: h + 0.0 * torch.randn_like(x[:, :1]),
    fixed_seed=fixed_seed,
    forked_seed=inner_fork,
    dropout_of_zero=lambda h, x: F.dropout(h, 0.0),
)
harmless(
    "dropout_in_eval",
    net(lambda m, x: m.head(F.dropout(m.a(x).tanh(), 0.5, training=m.training)), a=(4, 64), head=(64, 2)),
    train=True,
)
harmless(
    "dropout_module_in_training",
    lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2)),
    train=True,
)

CASES: list[Hostile] = [*add.cases, *harmless.cases]
