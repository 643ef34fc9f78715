"""Fully connected networks, raw parameters, and what surrounds a layer: freezing, in-place code, inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from linnet.testing.case import Case, case, net, normal, weight


def mlp(*widths: int, bias: bool = True, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of the given widths with an activation between them."""
    layers: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        layers += [nn.Linear(d_in, d_out, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def frozen(model: nn.Module, *names: str) -> nn.Module:
    """`model` with the parameters of these names frozen."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


class Scaled(nn.Linear):
    """A subclass of Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum()


class LoRA(nn.Module):
    """A frozen linear map plus a trained low-rank one."""

    def __init__(self, d_in: int, d_out: int, r: int) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(d_in, d_out), "weight", "bias")
        self.down = nn.Linear(d_in, r, bias=False)
        self.up = nn.Linear(r, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x) * self.b(z)))


class Keywords(nn.Module):
    """Returns a dict; called with keywords, one of them optional."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(4, 6), nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, *, image: Tensor, text: Tensor | None = None) -> dict[str, Tensor]:
        h = self.image(image)
        if text is not None:
            h = h + self.text(text).mean(1)
        return {"features": h, "scores": self.head(h.sigmoid())}


def route(m: Any, x: Tensor) -> Tensor:
    """Each example goes through the expert that its own gate picks."""
    gate, out = m.gate(x).softmax(1), x.new_zeros(len(x), 3)
    for e, expert in enumerate(m.experts):
        mine = gate.argmax(1) == e
        out[mine] = expert(x[mine]) * gate[mine, e, None]
    return out


def overwrite_outputs(m: Any, x: Tensor) -> Tensor:
    """Activations and additions overwrite the outputs of layers."""
    h = m.act(m.a(x))
    y = m.b(h)
    y += h
    y.clamp_(min=-0.3).mul_(2.0)
    return m.c(y)


def overwrite_inputs(m: Any, x: Tensor) -> Tensor:
    """Overwrites the inputs of two layers after they ran.

    Autograd allows it because neither layer saves its input itself: circular padding copies it, and a frozen weight
    needs none.
    """
    h = m.stem(x).unsqueeze(1)
    y = m.conv(h)
    h.mul_(0.5)
    z = m.shift(h.squeeze(1))
    h.add_(1.0)
    return m.head(y.flatten(1).tanh()) + z * h.mean(2)


def use_twice(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.tanh()) * m.c(h)


def keyword_data(n: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return {"image": image, "text": torch.randint(7, (n, 5), generator=generator)}


def pair_data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return normal(4)(n, seed), normal(3)(n, seed + 1)


def sequential(first: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(first(), nn.Tanh(), nn.Linear(6, 3))


RAW = net(
    lambda m, x: torch.tanh((x @ m.W) * m.scale + m.shift) @ m.head,
    W=weight(4, 6),
    scale=weight(6),
    shift=weight(1, 6),
    head=weight(6, 3),
)
HYPER = net(
    lambda m, x: F.gelu(m.body(x)[:, None] @ m.weights(x).unflatten(1, (5, 2))).squeeze(1), body=(4, 5), weights=(4, 10)
)
IN_PLACE = (
    ((4, 8), nn.ReLU(inplace=True)),
    ((8, 6), nn.ELU(inplace=True)),
    ((6, 3), nn.Hardtanh(-0.2, 0.2, inplace=True)),
)
OVERWRITTEN = net(
    overwrite_inputs,
    stem=(6, 6),
    conv=lambda: nn.Conv1d(1, 3, 3, padding=1, padding_mode="circular"),
    shift=lambda: frozen(nn.Linear(6, 4), "weight"),
    head=(18, 4),
)

CASES: list[Case] = [
    case("linear", lambda: nn.Linear(4, 3), normal(4)),
    case("linear_regression", net(lambda m, x: m.a(x).squeeze(1), a=(60, 1)), normal(60)),
    case("mlp", lambda: mlp(5, 8, 6, 3), normal(5)),
    case("mlp_no_bias", lambda: mlp(5, 8, 6, 2, bias=False, activation=nn.SiLU), normal(5)),
    case("mlp_elu_scalar", lambda: mlp(5, 16, 16, 1, activation=nn.ELU), normal(5)),
    case("prelu", lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3), nn.PReLU()), normal(4)),
    case("bilinear", net(lambda m, x: m.b(x[:, :3], m.a(x)), a=(5, 4), b=lambda: nn.Bilinear(3, 4, 2)), normal(5)),
    case("raw_parameters", RAW, normal(4)),
    case(
        "scalar_parameter",
        net(lambda m, x: m.temperature * m.body(x), body=lambda: mlp(4, 8, 3), temperature=weight()),
        normal(4),
    ),
    case("weight_norm", sequential(lambda: weight_norm(nn.Linear(4, 6))), normal(4)),
    case("spectral_norm", sequential(lambda: spectral_norm(nn.Linear(4, 6))), normal(4)),
    case("subclassed_linear", sequential(lambda: Scaled(4, 6)), normal(4)),
    case("frozen_layers", lambda: frozen(mlp(4, 8, 6, 3), "0.weight", "0.bias", "2.bias", "4.weight"), normal(4)),
    case("lora", lambda: nn.Sequential(LoRA(6, 8, 2), nn.GELU(), LoRA(8, 4, 2)), normal(6)),
    case("unused_layer", net(lambda m, x: m.body(x), body=lambda: mlp(4, 6, 3), spare=(4, 3)), normal(4)),
    case(
        "stop_gradient",
        net(lambda m, x: m.b(m.a(x).tanh()) + m.c(m.a(x).detach()), a=(4, 5), b=(5, 3), c=(5, 3)),
        normal(4),
    ),
    case("output_used_twice", net(use_twice, a=(4, 5), b=(5, 3), c=(5, 3)), normal(4)),
    case(
        "inplace_activations",
        lambda: nn.Sequential(*(part for d, act in IN_PLACE for part in (nn.Linear(*d), act))),
        normal(4),
    ),
    case(
        "inplace_residual", net(overwrite_outputs, a=(4, 6), b=(6, 6), c=(6, 3), act=lambda: nn.ReLU(True)), normal(4)
    ),
    case("overwritten_input", OVERWRITTEN, normal(6)),
    case("two_inputs", TwoInputs, pair_data),
    case("dict_inputs", Keywords, keyword_data, lambda raw: raw["scores"]),
    case(
        "tuple_output",
        net(lambda m, x: (m.a(x), m.b(m.a(x).tanh())), a=(4, 6), b=(6, 3)),
        normal(4),
        lambda raw: raw[1],
    ),
    case("routing", net(route, gate=(4, 2), experts=lambda: nn.ModuleList([nn.Linear(4, 3), mlp(4, 5, 3)])), normal(4)),
    case("hypernetwork", HYPER, normal(4)),
]
