"""Random networks and operations, each held against reverse mode, example by example.

`python -m linnet.testing.fuzz --count 1000 --seed 0` tries a thousand of them and prints those that are wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import linnet
from linnet.testing.case import call, dense_jacobian, fix_seed, split_examples
from linnet.testing.products import make_products, measure_difference

Step = Callable[["Network", Tensor, Tensor], Tensor]
"""From the network, the current tensor and the input to the next tensor."""

Shape = tuple[int, ...]
"""Shape of one example: (d,) for features, (T, d) for sequences, (C, H, W) for images."""

Add = Callable[["Builder"], None]
"""Adds a step to the network of a builder."""

ENGINES = ("auto", "auto", "auto", "rows", "bilinear", "ghost", "autodiff")
RTOL = 1e-7


class Network(nn.Module):
    """A list of steps, one after another.

    Attributes:
        parts: Layers and parameters, by number.
        steps: What is done, in order.
        names: The steps in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.weights = nn.ParameterList()
        self.steps: list[Step] = []
        self.names: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for step in self.steps:
            h = step(self, h, x)
        return h


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """A random network with its data, and what is asked about it."""

    model: Network  # the network, float64, in eval mode
    data: Tensor  # its examples
    params: list[str] | None  # the selected parameters, as `linnet.linearize` takes them
    batch_size: int | str  # examples per chunk
    engine: str  # the engine
    asked: list[str]  # names of the products

    def __str__(self) -> str:
        chosen = "all parameters" if self.params is None else ", ".join(self.params)
        return (
            f"{' -> '.join(self.model.names)}; data {tuple(self.data.shape)}, {chosen}, batch_size={self.batch_size}, "
            f"engine={self.engine}"
        )


class Builder:
    """Adds random steps to a network.

    Args:
        rng: Source of all choices.
        shape: Shape of one example of the input.
    """

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng, self.shape = rng, shape
        self.net = Network()
        self.linears: list[tuple[int, int, int]] = []  # number of the part, inputs, outputs

    def part(self, module: nn.Module) -> int:
        self.net.parts.append(module)
        return len(self.net.parts) - 1

    def weight(self, *shape: int) -> int:
        self.net.weights.append(nn.Parameter(0.7 * torch.randn(shape)))
        return len(self.net.weights) - 1

    def then(self, name: str, step: Step, shape: Shape | None = None) -> None:
        self.net.names.append(name)
        self.net.steps.append(step)
        self.shape = self.shape if shape is None else shape

    def layer(self, name: str, module: nn.Module, shape: Shape | None = None) -> None:
        i = self.part(module)
        self.then(name, lambda m, h, x: m.parts[i](h), shape)

    def linear(self, d_in: int, d_out: int) -> int:
        i = self.part(nn.Linear(d_in, d_out, bias=self.rng.random() < 0.8))
        self.linears.append((i, d_in, d_out))
        return i

    def add(self) -> None:
        """One random step that fits the current shape."""
        kinds = {1: FEATURES, 2: SEQUENCES, 3: IMAGES}[len(self.shape)]
        self.rng.choice(kinds + ANY)(self)

    def finish(self, c: int) -> None:
        """To features, and to c outputs."""
        if len(self.shape) > 1:
            flatten(self)
        d = self.shape[0]
        i = self.linear(d, c)
        self.then(f"head({d}, {c})", lambda m, h, x: m.parts[i](h), (c,))


# Steps of three kinds: with raw parameters, along a random axis, and from one width to another.


def weigh(name: str, shapes: Any, function: Any, shape: Any = None) -> Add:
    """A step h -> function(h, *weights), with raw parameters of these shapes; `shapes` and `shape` are functions."""

    def add(b: Builder) -> None:
        index = [b.weight(*size) for size in shapes(b.shape)]
        b.then(name, lambda m, h, x: function(h, *(m.weights[i] for i in index)), shape and shape(b.shape))

    return add


def along(name: str, function: Any) -> Add:
    """A step h -> function(h, axis) along a random axis of the examples."""

    def add(b: Builder) -> None:
        axis = b.rng.randrange(1, len(b.shape) + 1)
        b.then(f"{name}({axis})", lambda m, h, x: function(h, axis))

    return add


def widen(name: str, stop: int, function: Any, start: int = 2) -> Add:
    """A step h -> function(layer, h) with a linear layer from the features to a random number of outputs."""

    def add(b: Builder) -> None:
        d, out = b.shape[-1], b.rng.randrange(start, stop)
        i = b.linear(d, out)
        width = d + out if name.startswith("concat") else out
        label = name.format(d=d, out=out)
        b.then(label, lambda m, h, x: function(m.parts[i], h), (*b.shape[:-1], width))

    return add


def plainly(name: str, function: Any, shape: Any = None) -> Add:
    """A step h -> function(h) without parameters."""
    return lambda b: b.then(name, lambda m, h, x: function(h), shape and shape(b.shape))


def square(shape: Shape) -> list[Shape]:
    return [(shape[-1], shape[-1])]


def sort_batch(h: Tensor, w: Tensor) -> Tensor:
    order = h.flatten(1)[:, 0].argsort()
    return (h[order] @ w)[order.argsort()]


def standardize_features(h: Tensor) -> Tensor:
    return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + 0.1).sqrt()


# Any shape: the last axis has the features.
gain = weigh("gain", lambda s: [s[-1:]], lambda h, w: h * w)
shift = weigh("shift", lambda s: [s], lambda h, w: h + w)
scalar = weigh("scalar", lambda s: [()], lambda h, w: h * w.exp() + w)
softmax = along("softmax", lambda h, axis: h.softmax(axis))
cumsum = along("cumsum", lambda h, axis: h.cumsum(axis) / h.shape[axis])
sort = along("sort", lambda h, axis: h.sort(axis).values)
flip = along("flip", lambda h, axis: h.flip(axis))
where_positive = weigh("where_positive", lambda s: [s[-1:]], lambda h, w: torch.where(h > 0, h * w, h.sin()))
batch_flip = weigh("batch_flip", square, lambda h, w: (h.flip(0) @ w).flip(0))
batch_sort = weigh("batch_sort", square, sort_batch)
detached = weigh("detached", lambda s: [s[-1:]], lambda h, w: h * w + h.detach())
standardize = plainly("standardize", standardize_features)
low_rank = weigh("low_rank", lambda s: [(s[-1], 2), (2, s[-1])], lambda h, a, b: h @ (a @ b))
buffered = plainly("times_two_in_place", lambda h: (h + 0).mul_(2.0))
roll_examples = weigh("roll_examples", square, lambda h, w: (h.roll(1, 0) @ w).roll(-1, 0))


def activation(b: Builder) -> None:
    name = b.rng.choice(["tanh", "relu", "gelu", "softplus", "sigmoid", "sin", "silu", "elu"])
    function = getattr(torch, name, None) or getattr(F, name)
    b.then(name, lambda m, h, x: function(h))


def layer_norm(b: Builder) -> None:
    b.layer("layer_norm", nn.LayerNorm(b.shape[-1:] if b.rng.random() < 0.5 else b.shape))


def select(b: Builder) -> None:
    index = torch.tensor([b.rng.randrange(b.shape[-1]) for _ in range(b.shape[-1])])
    b.then("select", lambda m, h, x: h[..., index])


def residual(b: Builder) -> None:
    i, scale = b.weight(b.shape[-1], b.shape[-1]), b.rng.choice([0.5, 1.0])
    b.then("residual", lambda m, h, x: h + scale * torch.tanh(h @ m.weights[i]))


def where_flag(b: Builder) -> None:
    """Examples with a large first input use a parameter that the others do not use."""
    i = b.weight(b.shape[-1])
    b.then("where_flag", lambda m, h, x: torch.where(_flag(x, h), h * m.weights[i] + m.weights[i].square(), h))


def _flag(x: Tensor, h: Tensor) -> Tensor:
    return (x.flatten(1)[:, 0] > 0.5).view(len(h), *[1] * (h.ndim - 1))


def lookup(b: Builder) -> None:
    """A row of a table, by what the data says."""
    i = b.part(nn.Embedding(4, b.shape[-1]))

    def step(m: Network, h: Tensor, x: Tensor) -> Tensor:
        place = (3 * h.detach().flatten(1).mean(1)).long().abs() % 4
        return h + m.parts[i](place).view(len(h), *[1] * (h.ndim - 2), -1)

    b.then("lookup", step)


# Features.
linear = widen("linear({d}, {out})", 7, lambda layer, h: layer(h))
concat = widen("concat({out})", 4, lambda layer, h: torch.cat([h, layer(h).tanh()], 1), start=1)
one_by_one = widen("one_by_one", 5, lambda layer, h: torch.stack([layer(row) for row in h]))


def tied(b: Builder) -> None:
    """A layer from before, once more; or its weight, as it is or transposed."""
    d = b.shape[-1]
    fits = [(i, a, c) for i, a, c in b.linears if d in (a, c)]
    if not fits:
        return linear(b)
    i, d_in, d_out = b.rng.choice(fits)
    way = b.rng.choice(["layer", "weight"]) if d == d_in else "transposed"

    def weight(m: Network) -> Tensor:
        return m.parts[i].weight  # type: ignore[return-value]

    if way == "layer":
        b.then(f"again({i})", lambda m, h, x: m.parts[i](h), (*b.shape[:-1], d_out))
    elif way == "weight":
        b.then(f"weight_of({i})", lambda m, h, x: F.linear(h.tanh(), weight(m)), (*b.shape[:-1], d_out))
    else:
        b.then(f"transposed({i})", lambda m, h, x: h.tanh() @ weight(m), (*b.shape[:-1], d_in))


def weight_normed(b: Builder) -> None:
    d, out = b.shape[-1], b.rng.randrange(2, 6)
    b.layer(f"weight_norm({d}, {out})", weight_norm(nn.Linear(d, out)), (*b.shape[:-1], out))


def batch_norm(b: Builder) -> None:
    b.layer("batch_norm", nn.BatchNorm1d(b.shape[0]))


def bilinear(b: Builder) -> None:
    d, out = b.shape[0], b.rng.randrange(2, 5)
    i = b.weight(out, d, d)
    b.then("einsum", lambda m, h, x: torch.einsum("ni,oij,nj->no", h, m.weights[i], h.tanh()), (out,))


def scatter(b: Builder) -> None:
    out = b.rng.randrange(2, 6)

    def step(m: Network, h: Tensor, x: Tensor) -> Tensor:
        return h.new_zeros(len(h), out).scatter_add(1, (h.detach().abs() * 3).long() % out, h)

    b.then(f"scatter({out})", step, (out,))


def topk(b: Builder) -> None:
    k = b.rng.randrange(1, b.shape[0] + 1)
    b.then(f"topk({k})", lambda m, h, x: h.topk(k, 1).values, (k,))


def distances(b: Builder) -> None:
    d, out = b.shape[0], b.rng.randrange(2, 5)
    i, p = b.weight(out, d), b.rng.choice([1.0, 2.0, 3.0])
    b.then(f"cdist({p:g})", lambda m, h, x: torch.cdist(h, m.weights[i], p=p), (out,))


def experts(b: Builder) -> None:
    d = b.shape[0]
    layers = [b.linear(d, d) for _ in range(3)]

    def step(m: Network, h: Tensor, x: Tensor) -> Tensor:
        k, out = (h.detach().sum(1) * 5).long() % 3, torch.zeros_like(h)
        for j, i in enumerate(layers):
            rows = (k == j).nonzero()[:, 0]
            out = out.index_add(0, rows, m.parts[i](h[rows]))
        return out

    b.then("experts", step)


def transposed_batch(b: Builder) -> None:
    d, out = b.shape[0], b.rng.randrange(2, 5)
    i = b.weight(out, d)
    b.then("batch_last", lambda m, h, x: (m.weights[i] @ h.T).T, (out,))


def to_sequence(b: Builder) -> None:
    d, T = b.shape[0], b.rng.randrange(2, 4)
    i = b.linear(d, 3 * T)
    b.then(f"to_sequence({T}, 3)", lambda m, h, x: m.parts[i](h).view(len(h), T, 3), (T, 3))


# Sequences.
transpose = plainly("transpose", lambda h: h.transpose(1, 2), lambda s: (s[1], s[0]))


def convolution1d(b: Builder) -> None:
    T, d = b.shape
    i = b.part(nn.Conv1d(d, 3, 3, padding=1))
    b.then("conv1d", lambda m, h, x: m.parts[i](h.transpose(1, 2)).transpose(1, 2), (T, 3))


def attention(b: Builder) -> None:
    T, d = b.shape
    i = b.part(nn.Linear(d, 12))

    def step(m: Network, h: Tensor, x: Tensor) -> Tensor:
        q, k, v = m.parts[i](h).view(len(h), T, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    b.then("attention", step, (T, 4))


def multihead(b: Builder) -> None:
    T, d = b.shape
    i, j = b.part(nn.Linear(d, 4)), b.part(nn.MultiheadAttention(4, 2, batch_first=True))

    def step(m: Network, h: Tensor, x: Tensor) -> Tensor:
        y = m.parts[i](h)
        return m.parts[j](y, y, y, need_weights=False)[0]

    b.then("multihead", step, (T, 4))


def recurrent(b: Builder) -> None:
    T, d = b.shape
    kind = b.rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    i = b.part(kind(d, 3, batch_first=True))
    b.then(kind.__name__.lower(), lambda m, h, x: m.parts[i](h)[0], (T, 3))


def pool_sequence(b: Builder) -> None:
    way = b.rng.choice(["mean", "amax", "last", "logsumexp"])
    b.then(f"pool({way})", lambda m, h, x: h[:, -1] if way == "last" else getattr(h, way)(1), b.shape[1:])


def tokens_first(b: Builder) -> None:
    T, d = b.shape
    i = b.linear(d, 3)
    b.then("tokens_first", lambda m, h, x: m.parts[i](h.transpose(0, 1)).transpose(0, 1), (T, 3))


# Images.
channels = weigh("channels", lambda s: [(s[0], 1, 1)], lambda h, w: h * w)
pool_image = plainly("mean(2, 3)", lambda h: h.mean((2, 3)), lambda s: s[:1])
to_tokens = plainly("to_tokens", lambda h: h.flatten(2).transpose(1, 2), lambda s: (s[1] * s[2], s[0]))
flatten = plainly("flatten", lambda h: h.flatten(1), lambda s: (torch.Size(s).numel(),))


def convolution2d(b: Builder) -> None:
    C, H, W = b.shape
    out = b.rng.choice([2, 3]) if b.rng.random() < 0.7 else C
    groups = C if out == C and b.rng.random() < 0.5 else 1
    stride = b.rng.choice([1, 1, 2]) if min(H, W) > 2 else 1
    conv = nn.Conv2d(C, out, 3, stride=stride, padding=1, groups=groups, bias=b.rng.random() < 0.7)
    b.layer(f"conv2d({C}, {out})", conv, (out, (H - 1) // stride + 1, (W - 1) // stride + 1))


def transposed2d(b: Builder) -> None:
    C, H, W = b.shape
    b.layer("conv_transpose2d", nn.ConvTranspose2d(C, 2, 2), (2, H + 1, W + 1))


def norm2d(b: Builder) -> None:
    C = b.shape[0]
    if min(b.shape[1:]) < 2:
        return activation(b)
    norms: list[nn.Module] = [nn.BatchNorm2d(C), nn.GroupNorm(1, C), nn.InstanceNorm2d(C, affine=True)]
    b.layer("norm2d", b.rng.choice(norms))


def pool2d(b: Builder) -> None:
    C, H, W = b.shape
    if min(H, W) < 2:
        return activation(b)
    pool = b.rng.choice([nn.MaxPool2d(2), nn.AvgPool2d(2)])
    b.layer(type(pool).__name__.lower(), pool, (C, H // 2, W // 2))


def resize(b: Builder) -> None:
    mode = b.rng.choice(["nearest", "bilinear"])
    b.then(f"resize({mode})", lambda m, h, x: F.interpolate(h, size=(3, 4), mode=mode), (b.shape[0], 3, 4))


ANY = (
    [activation] * 4
    + [gain, shift, scalar, layer_norm, softmax, cumsum, sort, flip, select, residual, where_positive, where_flag]
    + [batch_flip, batch_sort, detached, standardize, low_rank, lookup, buffered, roll_examples]
)
FEATURES = (
    [linear] * 5
    + [tied] * 4
    + [weight_normed, batch_norm, bilinear, concat, scatter, topk, distances, experts, one_by_one, transposed_batch]
    + [to_sequence] * 2
)
SEQUENCES = (
    [linear] * 3
    + [tied] * 2
    + [convolution1d, attention, multihead, recurrent, transpose, tokens_first, weight_normed]
    + [pool_sequence] * 3
    + [flatten]
)
IMAGES = [convolution2d] * 6 + [transposed2d, norm2d, norm2d, pool2d, resize, channels, pool_image, to_tokens, flatten]


def make_fuzzed(seed: int) -> Fuzzed:
    """A random network with its data, the same one for the same seed.

    Example:
        >>> make_fuzzed(0).model(make_fuzzed(0).data).ndim
        2
    """
    rng = random.Random(seed)
    with fix_seed(seed), torch.no_grad():
        n, c = rng.randrange(4, 12), rng.choice([1, 1, 2, 3])
        kind = rng.choice(["features", "features", "sequence", "image", "tokens"])
        shapes: dict[str, Shape] = {"sequence": (3, 4), "image": (2, 4, 4), "tokens": (4,)}
        shape = shapes.get(kind, (rng.randrange(2, 6),))
        if kind == "tokens":
            data = torch.randint(7, (n, 4))
        else:
            data = torch.randn(n, *shape, dtype=torch.float64) * rng.choice([0.5, 1.0, 2.0])
            if rng.random() < 0.3:  # the first examples are alike in what sets them apart from later ones
                data.view(n, -1)[: n // 2, 0] = -1.0
        b = Builder(rng, shape)
        if kind == "tokens":
            b.layer("embedding", nn.Embedding(7, 3, padding_idx=rng.choice([None, 0])), (4, 3))
        for _ in range(rng.randrange(2, 8)):
            b.add()
        b.finish(c)
        model = b.net.double().eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.normal_(std=0.5)
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        for t in model.parameters():
            t.add_(0.1 * torch.randn_like(t))
    names = [name for name, _ in model.named_parameters()]
    params = None if rng.random() < 0.5 else rng.sample(names, rng.randrange(1, len(names) + 1))
    asked = rng.sample([*make_products(torch.zeros(1, 1), torch.zeros(1, 1))], 4)
    sizes: tuple[int | str, ...] = ("auto", "auto", 1, 2, 3, 5)
    return Fuzzed(model, data, params, rng.choice(sizes), rng.choice(ENGINES), asked)


def check(seed: int) -> str:
    """The wrong products of a random network in words, with the command that shows them; empty if all are right.

    Example:
        >>> check(0)
        ''
    """
    case = make_fuzzed(seed)
    with fix_seed(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad():
            f = torch.cat([call(case.model, one) for one in split_examples(case.data)])
        names = [name for name, _ in case.model.named_parameters() if case.params is None or name in case.params]
        known = make_products(dense_jacobian(case.model, case.data, names=names), f)
        found = []
        try:
            J = linnet.linearize(case.model, case.params).jacobian(case.data, case.batch_size, engine=case.engine)
            for name in case.asked:
                ask, truth = known[name]
                off = measure_difference(ask(J).detach(), truth)
                if off > RTOL:
                    found.append(f"{name} is off by {off:.1e}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if not found:
        return ""
    again = f"python -m linnet.testing.fuzz --count 1 --seed {seed}"
    return f"seed {seed}: {'; '.join(found)}. The network: {case}. To see this again: {again}"


def main(arguments: list[str] | None = None) -> int:
    """Try random networks and print those with a wrong product."""
    parser = argparse.ArgumentParser(prog="python -m linnet.testing.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of networks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network; the next has the next seed")
    options = parser.parse_args(arguments)
    wrong = 0
    for seed in range(options.seed, options.seed + options.count):
        if text := check(seed):
            wrong += 1
            print(text, flush=True)
    print(f"{options.count} networks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
