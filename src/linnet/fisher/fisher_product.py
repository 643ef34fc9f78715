r"""Products with the Fisher information of a network's parameters, :math:`F = J^\top H J`, summed over the examples.

H is the Fisher information in the outputs, which the likelihood gives: ``1 / noise`` for `Gaussian`,
``diag(pi) - pi pi^T`` for `Categorical`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linnet.data import Batch
from linnet.jacobian import Jacobian, Linearization
from linnet.linalg import apply_to_columns
from linnet.probability import Likelihood


def fisher_vector_product(
    lin: Linearization,
    data: Any,
    V: Tensor,
    *,
    likelihood: Likelihood,
    method: str = "exact",
    eps: float | None = None,
    batch_size: int | str = "auto",
    memory: float | str = "auto",
) -> Tensor:
    r"""The Fisher-vector product :math:`F V = J^\top H J V`, summed over the examples; no labels are needed.

    "exact" takes all columns in one pass. "finite_difference" is equation 5 of Maddox et al. (2021), for comparison:
    for each column v, the gradient with respect to theta' of the summed KL(p(y | theta) || p(y | theta')) at theta' =
    theta + eps v, over eps. Each column takes a forward and a backward pass.

    The finite difference has two errors. The part of the KL beyond its quadratic part is of first order in eps. The
    difference of two outputs loses digits, of order u / eps with u the rounding unit of the dtype. The default step
    moves the outputs by sqrt(u) of their size. The two errors are then about alike: sqrt(u) relative to F v, times a
    constant that grows with the depth of the network, 1e-8 to 1e-7 in float64 and 1e-3 to 1e-2 in float32. In networks
    with kinks (ReLU, max pooling), units that cross their kink add to the error: 0.003 to 0.1 for residual networks in
    float32. Where a network hides some use of a parameter from differentiation (``detach``, the padding row of an
    embedding), the step moves outputs that J does not describe, and the result is not F v at any eps.

    Args:
        lin: The linearized network.
        data: Anything that `linnet.Linearization.jacobian` takes; or a Jacobian of ``lin``, which for many products
            saves the checks on the first examples.
        V: (p,) or (p, k).
        likelihood: Gives H at the network's outputs, or the KL divergence.
        method: "exact" or "finite_difference".
        eps: Step of the finite difference; by default one step for each column, tried on the first examples.
        batch_size: The same as for `linnet.Linearization.jacobian`.
        memory: The same as for `linnet.Linearization.jacobian`.

    Returns:
        F V, in the shape of V.

    Example:
        >>> import linnet
        >>> from linnet.probability.likelihoods import Categorical
        >>> lin = linnet.linearize(torch.nn.Linear(4, 3))
        >>> v = torch.ones(lin.p)
        >>> fisher_vector_product(lin, torch.ones(5, 4), v, likelihood=Categorical()).shape
        torch.Size([15])
    """
    if method not in ("exact", "finite_difference"):
        raise ValueError(f"method must be 'exact' or 'finite_difference'; got {method!r}.")
    if method == "exact":
        if eps is not None:
            raise ValueError(f"eps is the step of method='finite_difference'; method='exact' takes none, got {eps!r}.")
        J = _as_jacobian(lin, data, batch_size, memory)

        def weighted(JV: Tensor, batch: Batch) -> Tensor:
            assert batch.f is not None
            H = likelihood.curvature(batch.f)
            U = JV.view(*batch.f.shape, -1)
            return (H[..., None] * U if likelihood.diagonal else H @ U).view_as(JV)

        return J.fused(weighted, V)
    return _finite_difference(lin, data, V, likelihood, eps, batch_size, memory)


def _finite_difference(
    lin: Linearization,
    data: Any,
    V: Tensor,
    likelihood: Likelihood,
    eps: float | None,
    batch_size: int | str,
    memory: float | str,
) -> Tensor:
    if lin.model_dtype != lin.network.row_dtype:
        raise ValueError(
            "method='finite_difference' needs weights in float32 or float64, and the network's are "
            f"{lin.model_dtype}: a small step would be rounded away. Use method='exact', or model.float()."
        )
    if eps is not None and not (math.isfinite(eps) and eps != 0):
        raise ValueError(f"eps must be a finite step other than zero; got {eps!r}.")
    J = _as_jacobian(lin, data, batch_size, memory)

    def columns(block: Tensor) -> Tensor:
        f = J.outputs()
        found = [column(v, f) for v in block.unbind(1)]
        return torch.stack(found, 1) if found else block.clone()

    def column(v: Tensor, f: Tensor) -> Tensor:
        step = eps if eps is not None else _choose_step(J, v, f)
        if step is None:
            return torch.zeros_like(v)

        def gradient(batch: Batch) -> Tensor:
            assert batch.f is not None
            return _kl_gradient(likelihood, f[batch.start : batch.start + batch.n], batch.f)

        near = J.near(_move(lin, v, step))  # so small a step is the same network
        return near.pullback(gradient) / step

    return apply_to_columns(J, V, columns)


def _choose_step(J: Jacobian, v: Tensor, f: Tensor) -> float | None:
    """The step that moves the outputs by about sqrt(u) of their size; None for v = 0.

    The error of first order and the loss of digits are about alike there, whatever the network does with its
    parameters. A trial step of sqrt(u) of the length of theta, on 32 examples, shows how far the outputs move.
    """
    few = J.subset(torch.arange(min(J.n, 32))) if J.by_position else J
    root = math.sqrt(J.eps)
    length, size = (float(x.norm()) for x in (v, J.lin.flat_theta))
    if length == 0:
        return None
    first = root * (size or 1.0) / length
    f = f[: few.n]
    change = float((few.outputs(_move(J.lin, v, first)) - f).norm())
    # Outputs that hardly change tell little: the step stays within some percent of theta.
    return first * min(100.0, root * float(f.norm()) / change or 1.0) if change else first


def _move(lin: Linearization, v: Tensor, step: float) -> dict[str, Tensor]:
    return lin.move_theta(step * v)


def _as_jacobian(lin: Linearization, data: Any, batch_size: int | str, memory: float | str) -> Jacobian:
    if not isinstance(data, Jacobian):
        return lin.jacobian(data, batch_size, memory)
    if data.lin is not lin or (batch_size, memory) != ("auto", "auto"):
        raise ValueError(
            "A Jacobian given as data must belong to the linearization that is given too, and it has its own "
            "batch_size and memory. Pass J.lin, and pass batch_size= and memory= to lin.jacobian."
        )
    return data


def _kl_gradient(likelihood: Likelihood, f: Tensor, other: Tensor) -> Tensor:
    """The gradient of the summed KL(p(. | f) || p(. | other)) with respect to ``other``, (n, c)."""
    other = other.detach().requires_grad_()
    with torch.enable_grad():
        total = likelihood.kl(f, other).sum()
    return torch.autograd.grad(total, other)[0]
