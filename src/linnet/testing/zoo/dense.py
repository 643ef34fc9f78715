"""Fully connected networks, raw parameters, and what surrounds a layer: freezing, in-place code, inputs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from linnet.testing.case import Case, Net, case, normal, parameter


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


class Routing(nn.Module):
    """Each example goes through the expert that its own gate picks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 3), mlp(4, 5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(1)
        out = x.new_zeros(len(x), 3)
        for e, expert in enumerate(self.experts):
            mine = gate.argmax(1) == e
            out[mine] = expert(x[mine]) * gate[mine, e, None]
        return out


class InPlaceResidual(nn.Module):
    """Activations and additions that overwrite the outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        y = self.b(h)
        y += h
        y.clamp_(min=-0.3).mul_(2.0)
        return self.c(y)


class OverwrittenInput(nn.Module):
    """Overwrites the inputs of two layers after they ran.

    Autograd allows it because neither layer saves its input itself: circular padding copies it, and a
    frozen weight needs none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.conv = nn.Conv1d(1, 3, 3, padding=1, padding_mode="circular")
        self.shift = frozen(nn.Linear(6, 4), "weight")
        self.head = nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).unsqueeze(1)
        y = self.conv(h)
        h.mul_(0.5)
        z = self.shift(h.squeeze(1))
        h.add_(1.0)
        return self.head(y.flatten(1).tanh()) + z * h.mean(2)


def keyword_data(n: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(n, 4, dtype=torch.float64, generator=generator),
        "text": torch.randint(7, (n, 5), generator=generator),
    }


def pair_data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return normal(4)(n, seed), normal(3)(n, seed + 1)


def scores(raw: Any) -> Tensor:
    return raw["scores"]


def second(raw: Any) -> Tensor:
    return raw[1]


CASES: list[Case] = [
    case("linear", lambda: nn.Linear(4, 3), normal(4)),
    case("linear_regression", lambda: Net(lambda m, x: m.a(x).squeeze(1), a=nn.Linear(60, 1)), normal(60)),
    case("mlp", lambda: mlp(5, 8, 6, 3), normal(5)),
    case("mlp_no_bias", lambda: mlp(5, 8, 6, 2, bias=False, activation=nn.SiLU), normal(5)),
    case("mlp_elu_scalar", lambda: mlp(5, 16, 16, 1, activation=nn.ELU), normal(5)),
    case("prelu", lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3), nn.PReLU()), normal(4)),
    case(
        "bilinear",
        lambda: Net(lambda m, x: m.b(x[:, :3], m.a(x)), a=nn.Linear(5, 4), b=nn.Bilinear(3, 4, 2)),
        normal(5),
    ),
    case(
        "raw_parameters",
        lambda: Net(
            lambda m, x: torch.tanh((x @ m.W) * m.scale + m.shift) @ m.head,
            W=parameter(4, 6),
            scale=parameter(6),
            shift=parameter(1, 6),
            head=parameter(6, 3),
        ),
        normal(4),
    ),
    case(
        "scalar_parameter",
        lambda: Net(lambda m, x: m.temperature * m.body(x), body=mlp(4, 8, 3), temperature=parameter()),
        normal(4),
    ),
    case("weight_norm", lambda: nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)), normal(4)),
    case("spectral_norm", lambda: nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)), normal(4)),
    case("subclassed_linear", lambda: nn.Sequential(Scaled(4, 6), nn.Tanh(), nn.Linear(6, 3)), normal(4)),
    case("frozen_layers", lambda: frozen(mlp(4, 8, 6, 3), "0.weight", "0.bias", "2.bias", "4.weight"), normal(4)),
    case("lora", lambda: nn.Sequential(LoRA(6, 8, 2), nn.GELU(), LoRA(8, 4, 2)), normal(6)),
    case("unused_layer", lambda: Net(lambda m, x: m.body(x), body=mlp(4, 6, 3), spare=nn.Linear(4, 3)), normal(4)),
    case(
        "stop_gradient",
        lambda: Net(
            lambda m, x: m.b(m.a(x).tanh()) + m.c(m.a(x).detach()),
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
            c=nn.Linear(5, 3),
        ),
        normal(4),
    ),
    case(
        "output_used_twice",
        lambda: Net(
            lambda m, x: (lambda h: m.b(h.tanh()) * m.c(h))(m.a(x)),
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
            c=nn.Linear(5, 3),
        ),
        normal(4),
    ),
    case(
        "inplace_activations",
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 6),
            nn.ELU(inplace=True),
            nn.Linear(6, 3),
            nn.Hardtanh(-0.2, 0.2, inplace=True),
        ),
        normal(4),
    ),
    case("inplace_residual", InPlaceResidual, normal(4)),
    case("overwritten_input", OverwrittenInput, normal(6)),
    case("two_inputs", TwoInputs, pair_data),
    case("dict_inputs", Keywords, keyword_data, scores),
    case(
        "tuple_output",
        lambda: Net(lambda m, x: (m.a(x), m.b(m.a(x).tanh())), a=nn.Linear(4, 6), b=nn.Linear(6, 3)),
        normal(4),
        second,
    ),
    case("routing", Routing, normal(4)),
    case(
        "hypernetwork",
        lambda: Net(
            lambda m, x: F.gelu(m.body(x)[:, None] @ m.weights(x).unflatten(1, (5, 2))).squeeze(1),
            body=nn.Linear(4, 5),
            weights=nn.Linear(4, 10),
        ),
        normal(4),
    ),
]
