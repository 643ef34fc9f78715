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

from linnet.testing.hostile.case import Hostile, Register, net

add = Register("reaches parameters", expects="either")

GLOBAL: dict[str, Any] = {}
"""Where networks of this file keep weights for the whole program."""


class Lambda(nn.Module):
    """A function that is made in `__init__` captures a layer."""

    def __init__(self, capture: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.step = capture(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.step(x)).tanh())


def capture_layer(m: Any) -> Any:
    a = m.a
    return lambda x: a(x).tanh()


def capture_weight(m: Any) -> Any:
    w, bias = m.a.weight, m.a.bias
    return lambda x: F.linear(x, w, bias).tanh()


def capture_nested(m: Any) -> Any:
    def step(x: Tensor) -> Tensor:
        def inner() -> Tensor:
            return m.a(x) * m.a.weight.sum()

        return inner().tanh()

    return step


def capture_weakly(m: Any) -> Any:
    held = weakref.ref(m.a)
    return lambda x: held()(x).tanh()  # type: ignore[misc]


def capture_scale(m: Any) -> Any:
    a, gain = m.a, m.head.bias
    return lambda x: a(x) * gain.sum()


add.each(
    "captured_",
    lambda capture: functools.partial(Lambda, capture),
    **{
        "lambda": capture_layer,
        "self": lambda m: lambda x: m.a(x).tanh(),
        "weight": capture_weight,
        "nested": capture_nested,
        "partial": lambda m: functools.partial(F.linear, weight=m.a.weight, bias=m.a.bias),
        "default": lambda m: lambda x, layer=m.a: layer(x).tanh(),
        "bound": lambda m: m.a.forward,
        "weakref": capture_weakly,
        "scale": capture_scale,
    },
)


class Held(nn.Module):
    """Weights in a container that is no module; a function of the network and the inputs reads them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 5), nn.Linear(5, 2)
        self.function = function
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
        return self.head(torch.tanh(self.function(self, x)))


def in_a_global() -> nn.Module:
    model = Held(lambda m, x: F.linear(x, GLOBAL["weight"], m.a.bias))
    GLOBAL["weight"] = model.a.weight
    return model


def in_a_table() -> nn.Module:
    model: Any = net(lambda m, x: m.head(F.linear(x, GLOBAL["table"][0]).tanh()))()
    GLOBAL["table"] = [model.a.weight]
    return model


add.each(
    "held_in_",
    lambda function: functools.partial(Held, function),
    list=lambda m, x: F.linear(x, *m.list),
    dict=lambda m, x: F.linear(x, *m.dict["layer"]),
    namespace=lambda m, x: F.linear(x, m.object.w, m.object.b),
    module_list=lambda m, x: m.hidden[0](x),
    half=lambda m, x: F.linear(x, m.list[0], m.a.bias),
    both=lambda m, x: m.a(x) + F.linear(x, m.list[0]),
    property=lambda m, x: F.linear(x, m.weight, m.a.bias),
    transposed=lambda m, x: x @ m.list[0].T,
)
add("held_in_global", in_a_global)
add("static_registry", in_a_table)


def sequential(change: Callable[[Any, Any], Any]) -> Any:
    """Two linear layers, of which somebody changed something after they were made."""

    def factory() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        change(model, model[0])
        return model

    return factory


def patch(make: Callable[[Any, Any], Any]) -> Any:
    """A forward that somebody replaced on the first layer."""

    def change(model: Any, first: Any) -> None:
        first.forward = make(model, first)

    return sequential(change)


def patch_around(model: Any, first: Any) -> Any:
    original = first.forward
    return lambda x: original(x).square()


def patch_root(model: Any, first: Any) -> None:
    model.forward = lambda x: model[2](model[0](x).sin())


def patch_other(model: Any, first: Any) -> Any:
    last = model[2]
    return lambda x: F.linear(x, first.weight, first.bias) * last.weight.sum()


add.each(
    "patched_forward_",
    patch,
    **{
        "lambda": lambda model, first: lambda x: F.linear(x, first.weight, first.bias) * 2,
        "original": patch_around,
        "method": lambda model, first: types.MethodType(lambda self, x: F.linear(x, self.weight) - self.bias, first),
        "other": patch_other,
        "partial": lambda model, first: functools.partial(F.linear, weight=first.weight, bias=first.bias),
    },
)
add("patched_forward_root", sequential(patch_root))

# Hooks whose closures read a weight.
HOOKS: dict[str, Any] = {
    "forward": lambda model, first: model[1].register_forward_hook(lambda module, args, out: out + first.bias),
    "pre": lambda model, first: model[2].register_forward_pre_hook(
        lambda module, args: (args[0] * first.weight.sum(),)
    ),
    "own": lambda model, first: first.register_forward_hook(lambda module, args, out: out * module.bias),
    "penalty": lambda model, first: model.register_forward_hook(
        lambda module, args, out: out + first.weight.square().sum()
    ),
}
add.each(
    "hook_",
    sequential,
    **HOOKS,
)


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


add("own_call", functools.partial(Called, False))
add("own_call_closure", functools.partial(Called, True))
add("kept_and_renewed", Fixed)


# A forward that looks at what its parameters are.
def reading(change: Callable[[Any, Tensor], Tensor]) -> Any:
    return net(lambda m, x: m.head(F.linear(x, change(m, m.a.weight), m.a.bias).tanh()))


add.each(
    "reads_",
    reading,
    type=lambda m, w: w if isinstance(w, nn.Parameter) else w.detach(),
    leaf=lambda m, w: w if w.is_leaf else 2 * w,
    requires_grad=lambda m, w: w if w.requires_grad else 2 * w,
    grad_mode=lambda m, w: w if torch.is_grad_enabled() else 2 * w,
    by_name=lambda m, w: dict(m.named_parameters())["a.weight"] + m.get_parameter("a.weight").sin(),
    inner_table=lambda m, w: 2 * torch.as_tensor(m.a._parameters["weight"]),
    state=lambda m, w: w * m.state_dict()["a.weight"].sum(),
)
add(
    "reads_all", net(lambda m, x: m.head(m.a(x).tanh()) + torch.stack([t.square().sum() for t in m.parameters()]).sum())
)


class Remembers(nn.Module):
    """Answers from memory when it sees the same input again."""

    def __init__(self, by: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.by, self.a, self.head = by, nn.Linear(4, 5), nn.Linear(5, 2)
        self.known: dict[Any, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = self.by(x)
        if key not in self.known:
            self.known[key] = x, self.head(self.a(x).tanh())
        return self.known[key][1]


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


add.each(
    "remembers_by_",
    lambda by: functools.partial(Remembers, by),
    id=id,
    place=lambda x: x.data_ptr(),
    sum=lambda x: float(x.sum()),
)
add("output_reads_weight", in_a_global, output=lambda raw: raw * GLOBAL["weight"].square().sum())
add("captured_unselected", functools.partial(Lambda, capture_layer), params="head.*", expects="right")
add("hook_unselected", sequential(HOOKS["forward"]), params="2.*", expects="right")
add("captured_buffer", Buffered, expects="right")

CASES: list[Hostile] = add.cases
