"""Code that reaches the parameters of the module past the module tree."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Net
from linnet.testing.hostile.case import Hostile, Register, normal

add = Register("reaches parameters", expects="either")

GLOBAL: dict[str, Any] = {}
"""Where networks of this file keep weights for the whole program."""


class Lambda(nn.Module):
    """A lambda made in `__init__` captures a layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        a, b, head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.a, self.b, self.head = a, b, head
        self.step: Callable[[Tensor], Tensor]
        if kind == "lambda":
            self.step = lambda x: a(x).tanh()
        elif kind == "self":
            self.step = lambda x: self.a(x).tanh()
        elif kind == "weight":
            w, bias = a.weight, a.bias
            self.step = lambda x: F.linear(x, w, bias).tanh()
        elif kind == "nested":

            def step(x: Tensor) -> Tensor:
                def inner() -> Tensor:
                    return self.a(x) * self.a.weight.sum()

                return inner().tanh()

            self.step = step
        elif kind == "partial":
            self.step = functools.partial(F.linear, weight=a.weight, bias=a.bias)
        elif kind == "default":
            self.step = lambda x, layer=a: layer(x).tanh()  # type: ignore[misc]
        elif kind == "bound":
            self.step = a.forward
        elif kind == "weakref":
            held = weakref.ref(a)
            self.step = lambda x: held()(x).tanh()  # type: ignore[misc]
        elif kind == "scale":
            gain = head.bias
            self.step = lambda x: a(x) * gain.sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.step(x)).tanh())


for way in ("lambda", "self", "weight", "nested", "partial", "default", "bound", "weakref", "scale"):
    add(f"captured_{way}", functools.partial(Lambda, way), normal(4))


class Held(nn.Module):
    """Weights in a container that is no module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.kind = kind
        self.list = [self.a.weight, self.a.bias]
        self.dict = {"layer": (self.a.weight, self.a.bias)}
        self.object = types.SimpleNamespace(w=self.a.weight, b=self.a.bias)
        self.hidden = [self.a]
        self._cache: Any = None

    @property
    def weight(self) -> Tensor:
        """The weight, looked up once and kept."""
        if self._cache is None:
            self._cache = self.a.weight
        return self._cache

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "list":
            h = F.linear(x, *self.list)
        elif self.kind == "dict":
            h = F.linear(x, *self.dict["layer"])
        elif self.kind == "namespace":
            h = F.linear(x, self.object.w, self.object.b)
        elif self.kind == "module_list":
            h = self.hidden[0](x)
        elif self.kind == "half":
            h = F.linear(x, self.list[0], self.a.bias)
        elif self.kind == "both":
            h = self.a(x) + F.linear(x, self.list[0])
        elif self.kind == "property":
            h = F.linear(x, self.weight, self.a.bias)
        elif self.kind == "transposed":
            h = x @ self.list[0].T
        else:
            h = F.linear(x, GLOBAL["weight"], self.a.bias)
        return self.head(torch.tanh(h))


def in_a_global() -> nn.Module:
    model = Held("global")
    GLOBAL["weight"] = model.a.weight
    return model


for way in ("list", "dict", "namespace", "module_list", "half", "both", "property", "transposed"):
    add(f"held_in_{way}", functools.partial(Held, way), normal(4))
add("held_in_global", in_a_global, normal(4))


def patched(kind: str) -> nn.Module:
    """A forward that somebody replaced on the instance."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    first: Any = model[0]
    if kind == "lambda":
        first.forward = lambda x: F.linear(x, first.weight, first.bias) * 2
    elif kind == "original":
        original = first.forward
        first.forward = lambda x: original(x).square()
    elif kind == "method":
        first.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) - self.bias, first)
    elif kind == "root":
        model.forward = lambda x: model[2](model[0](x).sin())  # type: ignore[method-assign]
    elif kind == "other":
        last: Any = model[2]
        first.forward = lambda x: F.linear(x, first.weight, first.bias) * last.weight.sum()
    elif kind == "partial":
        first.forward = functools.partial(F.linear, weight=first.weight, bias=first.bias)
    return model


for way in ("lambda", "original", "method", "root", "other", "partial"):
    add(f"patched_forward_{way}", functools.partial(patched, way), normal(4))


def hooked(kind: str) -> nn.Module:
    """A hook whose closure reads a weight."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    first: Any = model[0]
    if kind == "forward":
        model[1].register_forward_hook(lambda module, args, out: out + first.bias)
    elif kind == "pre":
        model[2].register_forward_pre_hook(lambda module, args: (args[0] * first.weight.sum(),))
    elif kind == "own":
        first.register_forward_hook(lambda module, args, out: out * module.bias)
    elif kind == "penalty":
        model.register_forward_hook(lambda module, args, out: out + first.weight.square().sum())
    return model


for way in ("forward", "pre", "own", "penalty"):
    add(f"hook_{way}", functools.partial(hooked, way), normal(4))


class Called(nn.Module):
    """A `__call__` that does more than forward."""

    def __init__(self, closure: bool) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.after = (lambda f: f + self.head.bias.square()) if closure else None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)))

    def __call__(self, x: Tensor) -> Tensor:
        f = super().__call__(x)
        return f * self.a.weight.sum() if self.after is None else self.after(f)


add("own_call", functools.partial(Called, False), normal(4))
add("own_call_closure", functools.partial(Called, True), normal(4))


class Fixed(nn.Module):
    """A network that keeps what it computed from its weights at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.gain: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None or self.gain.grad_fn is None:
            self.gain = self.a.weight.sum()
        gain, self.gain = self.gain, None
        return self.head(torch.tanh(self.a(x))) * gain


add("kept_and_renewed", Fixed, normal(4))
add(
    "static_registry",
    lambda: _registered(
        Net(lambda m, x: m.head(F.linear(x, GLOBAL["table"][0]).tanh()), a=nn.Linear(4, 5), head=nn.Linear(5, 2))
    ),
    normal(4),
)


def _registered(model: Any) -> nn.Module:
    GLOBAL["table"] = [model.a.weight]
    return model


class Reads(nn.Module):
    """A forward that looks at what its parameters are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.head = kind, nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        if self.kind == "type":
            w = w if isinstance(w, nn.Parameter) else w.detach()
        elif self.kind == "leaf":
            w = w if w.is_leaf else 2 * w
        elif self.kind == "requires_grad":
            w = w if w.requires_grad else 2 * w
        elif self.kind == "grad_mode":
            w = w if torch.is_grad_enabled() else 2 * w
        elif self.kind == "all":
            return self.head(self.a(x).tanh()) + torch.stack([t.square().sum() for t in self.parameters()]).sum()
        elif self.kind == "by_name":
            w = dict(self.named_parameters())["a.weight"] + self.get_parameter("a.weight").sin()
        elif self.kind == "inner_table":
            w = 2 * torch.as_tensor(self.a._parameters["weight"])
        elif self.kind == "state":
            w = w * self.state_dict()["a.weight"].sum()
        return self.head(F.linear(x, w, self.a.bias).tanh())


for way in ("type", "leaf", "requires_grad", "grad_mode", "all", "by_name", "inner_table", "state"):
    add(f"reads_{way}", functools.partial(Reads, way), normal(4))


class Remembers(nn.Module):
    """Answers from memory when it sees the same input again."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.a, self.head = by, nn.Linear(4, 5), nn.Linear(5, 2)
        self.known: dict[Any, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = id(x) if self.by == "id" else x.data_ptr() if self.by == "place" else float(x.sum())
        if key not in self.known:
            self.known[key] = x, self.head(self.a(x).tanh())
        return self.known[key][1]


for way in ("id", "place", "sum"):
    add(f"remembers_by_{way}", functools.partial(Remembers, way), normal(4))
add("output_reads_weight", in_a_global, normal(4), output=lambda raw: raw * GLOBAL["weight"].square().sum())
add("captured_unselected", functools.partial(Lambda, "lambda"), normal(4), params="head.*", expects="right")
add("hook_unselected", functools.partial(hooked, "forward"), normal(4), params="2.*", expects="right")


class Buffered(nn.Module):
    """A lambda captures a buffer, which is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("mean", torch.ones(5))
        mean = self.get_buffer("mean")
        self.step = lambda h: h - mean.to(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(self.a(x)).tanh())


add("captured_buffer", Buffered, normal(4), expects="right")

CASES: list[Hostile] = add.cases
