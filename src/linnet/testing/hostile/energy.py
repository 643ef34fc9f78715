"""Networks whose outputs are gradients: energies, scores, forces, Hessian-vector products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.case import Net, parameter
from linnet.testing.hostile.case import Hostile, Register, normal

add = Register("outputs are gradients", expects="either")


def slope(energy: Any, x: Tensor) -> Tensor:
    """The gradient of a sum of energies by the inputs, with a graph of its own."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def body(d: int = 3, out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, out))


def image_body() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8, 1)
    )


add("force", lambda: Net(lambda m, x: -slope(m.net, x), net=body()), normal(3))
add("force_one_output", lambda: Net(lambda m, x: slope(m.net, x), net=body(1)), normal(1))
add("force_summed", lambda: Net(lambda m, x: slope(m.net, x).square().sum(1), net=body()), normal(3))
add("force_one_column", lambda: Net(lambda m, x: slope(m.net, x)[:, :1], net=body()), normal(3))
add("force_conv", lambda: Net(lambda m, x: slope(m.net, x).flatten(1)[:, :6], net=image_body()), normal(1, 4, 4))
add("force_conv_one", lambda: Net(lambda m, x: slope(m.net, x).flatten(1).sum(1), net=image_body()), normal(1, 4, 4))
add(
    "force_conv1d",
    lambda: Net(
        lambda m, x: slope(lambda y: m.b(m.a(y).tanh().flatten(1)), x).flatten(1),
        a=nn.Conv1d(1, 2, 3),
        b=nn.Linear(6, 1),
    ),
    normal(1, 5),
)
add(
    "energy_and_force",
    lambda: Net(lambda m, x: torch.cat([m.net(x), slope(m.net, x)], 1), net=body()),
    normal(3),
)
add(
    "score_with_head",
    lambda: Net(lambda m, x: m.head(slope(m.net, x).tanh()), net=body(), head=nn.Linear(3, 2)),
    normal(3),
)
add(
    "force_above_features",
    lambda: Net(lambda m, x: slope(m.net, m.a(x).tanh().detach()) + m.a(x), a=nn.Linear(3, 3), net=body()),
    normal(3),
)


def hessian_vector(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        g = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad((g * m.v).sum(), x, create_graph=True)[0]


def hessian_vector_fixed(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        g = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(g.square().sum(), x, create_graph=True)[0]


def laplacian(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        g = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]
        parts = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(parts, 1).sum(1)


add("hessian_vector_product", lambda: Net(hessian_vector, net=body(), v=parameter(3)), normal(3))
add("hessian_vector_product_of_slope", lambda: Net(hessian_vector_fixed, net=body()), normal(3))
add("laplacian", lambda: Net(laplacian, net=body(2)), normal(2))


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


def jacobian_of_sum(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.functional.jvp(m.net, x, torch.ones_like(x), create_graph=True)[1]


def by_weights(m: Any, x: Tensor) -> Tensor:
    """Gradient of a loss by an inner weight, as in meta learning, for each example."""
    with torch.enable_grad():
        w = m.w.expand(len(x), -1).clone()
        inner = torch.autograd.grad((m.a(x).tanh() * w).sum(1).square().sum(), w, create_graph=True)[0]
    return ((m.w - 0.1 * inner) * m.a(x)).sum(1)


add("unrolled_descent", lambda: Net(unrolled, net=body(), rate=nn.Parameter(torch.tensor(-1.0))), normal(3))
add("hamiltonian", lambda: Net(hamiltonian, net=body(4)), normal(4))
add("jvp_of_inputs", lambda: Net(jacobian_of_sum, net=body(3, 2)), normal(3))
add("inner_step_on_weights", lambda: Net(by_weights, a=nn.Linear(3, 4), w=parameter(4)), normal(3))
add(
    "slope_by_func",
    lambda: Net(lambda m, x: torch.func.vmap(torch.func.grad(lambda y: m.net(y).sum()))(x), net=body()),
    normal(3),
)
add(
    "slope_detached",
    lambda: Net(lambda m, x: m.head(slope(m.net, x).detach()) + m.net(x), net=body(), head=nn.Linear(3, 1)),
    normal(3),
)

CASES: list[Hostile] = add.cases
