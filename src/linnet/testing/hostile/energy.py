"""Networks whose outputs are gradients: energies, scores, forces, Hessian-vector products."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.hostile.case import Hostile, Register, net, normal, weight

add = Register("outputs are gradients", expects="either")


def slope(energy: Any, x: Tensor) -> Tensor:
    """The gradient of a sum of energies by the inputs, with a graph of its own."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def body(d: int = 3, out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, out))


def image_body() -> nn.Module:
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.Softplus()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 1))


add("force", net(lambda m, x: -slope(m.net, x), net=body), normal(3))
add("force_one_output", net(lambda m, x: slope(m.net, x), net=partial(body, 1)), normal(1))
add("force_summed", net(lambda m, x: slope(m.net, x).square().sum(1), net=body), normal(3))
add("force_one_column", net(lambda m, x: slope(m.net, x)[:, :1], net=body), normal(3))
add("force_conv", net(lambda m, x: slope(m.net, x).flatten(1)[:, :6], net=image_body), normal(1, 4, 4))
add("force_conv_one", net(lambda m, x: slope(m.net, x).flatten(1).sum(1), net=image_body), normal(1, 4, 4))
add(
    "force_conv1d",
    net(
        lambda m, x: slope(lambda y: m.b(m.a(y).tanh().flatten(1)), x).flatten(1),
        a=partial(nn.Conv1d, 1, 2, 3),
        b=(6, 1),
    ),
    normal(1, 5),
)
add("energy_and_force", net(lambda m, x: torch.cat([m.net(x), slope(m.net, x)], 1), net=body), normal(3))
add("score_with_head", net(lambda m, x: m.head(slope(m.net, x).tanh()), net=body, head=(3, 2)), normal(3))
add(
    "force_above_features",
    net(lambda m, x: slope(m.net, m.a(x).tanh().detach()) + m.a(x), a=(3, 3), net=body),
    normal(3),
)


def second(of_slope: Any) -> Any:
    """A second derivative by the inputs: from a function of the network, its slope and the inputs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            g = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]
            return of_slope(m, g, x)

    return forward


def along(value: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0]


def laplacian(m: Any, g: Tensor, x: Tensor) -> Tensor:
    return torch.stack([along(g[:, i], x)[:, i] for i in range(x.shape[1])], 1).sum(1)


add("hessian_vector_product", net(second(lambda m, g, x: along(g * m.v, x)), net=body, v=weight(3)), normal(3))
add("hessian_vector_product_of_slope", net(second(lambda m, g, x: along(g.square(), x)), net=body), normal(3))
add("laplacian", net(second(laplacian), net=partial(body, 2)), normal(2))


def unrolled(m: Any, x: Tensor) -> Tensor:
    """Two steps of descent on an energy, by the inputs."""
    for _ in range(2):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            x = y - m.rate.exp() * torch.autograd.grad(m.net(y).sum(), y, create_graph=True)[0]
    return x


def hamiltonian(m: Any, x: Tensor) -> Tensor:
    g = slope(m.net, x)
    return torch.cat([g[:, 2:], -g[:, :2]], 1)


def by_weights(m: Any, x: Tensor) -> Tensor:
    """Gradient of a loss by an inner weight, as in meta learning, for each example."""
    with torch.enable_grad():
        w = m.w.expand(len(x), -1).clone()
        inner = torch.autograd.grad((m.a(x).tanh() * w).sum(1).square().sum(), w, create_graph=True)[0]
    return ((m.w - 0.1 * inner) * m.a(x)).sum(1)


add("unrolled_descent", net(unrolled, net=body, rate=lambda: nn.Parameter(torch.tensor(-1.0))), normal(3))
add("hamiltonian", net(hamiltonian, net=partial(body, 4)))
add(
    "jvp_of_inputs",
    net(
        lambda m, x: torch.autograd.functional.jvp(m.net, x, torch.ones_like(x), create_graph=True)[1],
        net=partial(body, 3, 2),
    ),
    normal(3),
)
add("inner_step_on_weights", net(by_weights, a=(3, 4), w=weight(4)), normal(3))
add(
    "slope_by_func",
    net(lambda m, x: torch.func.vmap(torch.func.grad(lambda y: m.net(y).sum()))(x), net=body),
    normal(3),
)
add("slope_detached", net(lambda m, x: m.head(slope(m.net, x).detach()) + m.net(x), net=body, head=(3, 1)), normal(3))

CASES: list[Hostile] = add.cases
