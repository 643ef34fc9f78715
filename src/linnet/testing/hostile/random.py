"""Random outputs, and random numbers that do no harm."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net
from linnet.testing.hostile.case import Hostile, Register, late, normal

add = Register("random outputs", expects="refused", predicts=True)


def wide(function: Any, width: int = 64) -> Any:
    """A factory of a `Net` with layers a (4, width) and head (width, 2)."""
    return lambda: Net(function, a=nn.Linear(4, width), head=nn.Linear(width, 2))


def dropout(m: Any, x: Tensor, p: float) -> Tensor:
    return m.head(F.dropout(m.a(x).tanh(), p))


for p in (0.01, 0.1, 0.5):
    add(f"dropout_{p:g}", wide(functools.partial(dropout, p=p)), normal(4, n=24))


def rare(m: Any, x: Tensor) -> Tensor:
    """Drops about three numbers in a pass over all examples."""
    h = m.a(x).tanh()
    return m.head(h * (torch.rand_like(h) > 0.002))


def late_noise(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.head(h + torch.where(x[:, :1] > 0, torch.randn_like(h), 0.0))


def late_noise_if(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if bool((x[:, 0] > 0).any()):
        h = h + (x[:, :1] > 0) * torch.randn_like(h)
    return m.head(h)


def rows_noise(m: Any, x: Tensor) -> Tensor:
    return m.head(
        torch.stack([h + torch.randn_like(h) if z[0] > 0 else h for h, z in zip(m.a(x).tanh(), x, strict=True)])
    )


def small_noise(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + 1e-4 * torch.randn_like(x[:, :1]))


def numpy_noise(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + torch.from_numpy(np.random.randn(len(x), 1)))


def python_noise(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() * random.uniform(0.5, 1.5))


def python_noise_late(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() * (1 + (x[:, :1] > 0) * random.uniform(0.5, 1.5)))


def permuted(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh()[:, torch.randperm(m.a.out_features)])


def sampled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h * torch.bernoulli(h.detach().sigmoid()))


def stochastic_depth(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.head(h.tanh() if torch.rand(()) > 0.3 else h)


def gumbel(m: Any, x: Tensor) -> Tensor:
    return m.head(F.gumbel_softmax(m.a(x), hard=False))


def randomized_relu(m: Any, x: Tensor) -> Tensor:
    return m.head(F.rrelu(m.a(x), training=True))


for name, function, data in (
    ("rare_dropout", rare, normal(4, n=24)),
    ("noise_for_late_examples", late_noise, late(4)),
    ("noise_if_late", late_noise_if, late(4)),
    ("noise_on_rows", rows_noise, late(4)),
    ("small_noise", small_noise, normal(4)),
    ("numpy_noise", numpy_noise, normal(4)),
    ("python_noise", python_noise, normal(4)),
    ("python_noise_late", python_noise_late, late(4)),
    ("random_permutation", permuted, normal(4)),
    ("bernoulli_gate", sampled, normal(4)),
    ("stochastic_depth", stochastic_depth, normal(4)),
    ("gumbel_softmax", gumbel, normal(4)),
    ("randomized_relu", randomized_relu, normal(4)),
):
    add(name, wide(function), data)


class OwnGenerator(nn.Module):
    """Noise by a generator that the network owns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 2)
        self.numpy = np.random.default_rng(0)
        self.python = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "numpy":
            noise = torch.from_numpy(self.numpy.normal(size=(len(x), 1)))
        elif self.kind == "python":
            noise = torch.full((len(x), 1), self.python.random(), dtype=x.dtype)
        else:
            noise = torch.randn(len(x), 1, generator=TORCH, dtype=x.dtype)
        return self.head(self.a(x).tanh() + noise)


TORCH = torch.Generator().manual_seed(0)
"""A generator that lives beside the network, and goes on."""

for kind in ("numpy", "python", "torch"):
    add(f"own_generator_{kind}", functools.partial(OwnGenerator, kind), normal(4))


class AlwaysTraining(nn.Module):
    """A dropout layer that the network puts in training mode whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.head = nn.Linear(4, 64), nn.Dropout(0.1), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.train()
        return self.head(self.drop(self.a(x).tanh()))


class Mixture(nn.Module):
    """Monte Carlo dropout: the mean of eight passes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(F.dropout(self.a(x).tanh(), 0.2)) for _ in range(8)]).mean(0)


class RandomAttention(nn.Module):
    """Attention with dropout that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 2)
        return self.head(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).mean(1))


add("always_training", AlwaysTraining, normal(4, n=24))
add("monte_carlo_dropout", Mixture, normal(4))
add("attention_dropout", RandomAttention, normal(4, 4))


def random_gradient(m: Any, x: Tensor) -> Tensor:
    """Outputs are fixed, gradients are not."""
    h = m.a(x).tanh()
    noise = torch.rand_like(h)
    return m.head(h + noise * (h - h.detach()))


def random_hook(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    if h.requires_grad:
        h.register_hook(lambda g: F.dropout(g, 0.2))
    return m.head(h)


class Generated(nn.Module):
    """Noise by a generator that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head, self.source = nn.Linear(4, 5), nn.Linear(5, 2), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x).tanh() + torch.randn(len(x), 1, generator=self.source, dtype=x.dtype))


add("random_gradient", wide(random_gradient), normal(4))
add("random_hook", wide(random_hook), normal(4))
add("own_generator_attribute", Generated, normal(4))
add(
    "random_output_function",
    wide(lambda m, x: m.head(m.a(x).tanh())),
    normal(4),
    output=lambda f: f + torch.randn_like(f),
)


# Random numbers that do no harm.
harmless = Register("harmless random numbers")


def unused(m: Any, x: Tensor) -> Tensor:
    torch.randn(3)
    return m.head(m.a(x).tanh())


def unused_numpy(m: Any, x: Tensor) -> Tensor:
    np.random.rand()
    random.random()
    return m.head(m.a(x).tanh())


def times_zero(m: Any, x: Tensor) -> Tensor:
    return m.head(m.a(x).tanh() + 0.0 * torch.randn_like(x[:, :1]))


def fixed_seed(m: Any, x: Tensor) -> Tensor:
    """Random features, drawn anew from one seed in every pass."""
    draw = torch.randn(64, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    return m.head(m.a(x).tanh() * draw)


def inner_fork(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        mask = torch.rand(64) > 0.5
    return m.head(m.a(x).tanh() * mask)


def dropout_zero(m: Any, x: Tensor) -> Tensor:
    return m.head(F.dropout(m.a(x).tanh(), 0.0))


def dropout_in_eval(m: Any, x: Tensor) -> Tensor:
    return m.head(F.dropout(m.a(x).tanh(), 0.5, training=m.training))


for name, function in (
    ("numbers_drawn_and_unused", unused),
    ("numpy_drawn_and_unused", unused_numpy),
    ("noise_times_zero", times_zero),
    ("fixed_seed", fixed_seed),
    ("forked_seed", inner_fork),
    ("dropout_of_zero", dropout_zero),
):
    harmless(name, wide(function), normal(4))
harmless("dropout_in_eval", wide(dropout_in_eval), normal(4), train=True)
harmless(
    "dropout_module_in_training",
    lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2)),
    normal(4),
    train=True,
)

CASES: list[Hostile] = [*add.cases, *harmless.cases]
