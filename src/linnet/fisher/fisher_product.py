r"""Products with the Fisher information of a network's parameters, :math:`F = J^\top H J`, summed over the examples.

H is the Fisher information in the outputs, which the likelihood gives: ``1 / noise`` for `Gaussian`,
``diag(pi) - pi pi^T`` for `Categorical`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linnet.data.batch import Batch
from linnet.jacobian.jacobian import Jacobian
from linnet.jacobian.linearization import Linearization
from linnet.linalg.operator import apply_to_columns
from linnet.probability.likelihoods import Likelihood


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

    "exact" takes all columns in one pass. "finite_difference" is equation 5 of Maddox et al. (2021), there for
    comparison: for each column v, the gradient with respect to theta' of the summed KL(p(y | theta) || p(y | theta'))
    at theta' = theta + eps v, over eps. Each column takes a forward and a backward pass, and the result has two errors:
    what the KL has beyond its quadratic part is of first order in eps, and the difference of two outputs loses digits,
    of order u / eps with u the dtype's rounding unit. With the default step, which moves the outputs by sqrt(u) of
    their size, the two are about alike, sqrt(u) relative to F v times a constant that grows with the depth of the
    network: 1e-8 to 1e-7 in float64, 1e-3 to 1e-2 in float32. Where the network has kinks (ReLU, max pooling), units
    that the step carries over theirs add to it: 0.003 to 0.1 for residual networks in float32. Where it hides some use
    of a parameter from differentiation (``detach``, an embedding's padding row), the step moves outputs that J does not
    know of, and the result is not F v at any eps.

    Args:
        lin: The linearized network.
        data: Anything that `linnet.Linearization.jacobian` takes; or a Jacobian of ``lin``, which saves the look at
            the first examples where there are many products.
        V: (p,) or (p, k).
        likelihood: Gives H at the network's outputs, or the KL divergence.
        method: "exact" or "finite_difference".
        eps: Step of the finite difference; by default one for each column, tried on the first examples.
        batch_size: As in `linnet.Linearization.jacobian`.
        memory: As in `linnet.Linearization.jacobian`.

    Returns:
        The shape of V.

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
        J = _jacobian(lin, data, batch_size, memory)

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
    if lin.model_dtype != lin.dtype:
        raise ValueError(
            "method='finite_difference' needs weights in float32 or float64, and the network's are "
            f"{lin.model_dtype}: a small step would be rounded away. Use method='exact', or model.float()."
        )
    if eps is not None and not (math.isfinite(eps) and eps != 0):
        raise ValueError(f"eps must be a finite step other than zero; got {eps!r}.")
    J = _jacobian(lin, data, batch_size, memory)

    def columns(block: Tensor) -> Tensor:
        f = J.outputs()
        found = [column(v, f) for v in block.unbind(1)]
        return torch.stack(found, 1) if found else block.clone()

    def column(v: Tensor, f: Tensor) -> Tensor:
        step = eps if eps is not None else _step(J, v, f)
        if step is None:
            return torch.zeros_like(v)

        def gradient(batch: Batch) -> Tensor:
            assert batch.f is not None
            return _kl_gradient(likelihood, f[batch.start : batch.start + batch.n], batch.f)

        near = J.near(_moved(lin, v, step))  # so small a step is the same network
        return near.pullback(gradient) / step

    return apply_to_columns(J, V, columns)


PROBES = 32
"""Examples that the default step is tried on."""


def _step(J: Jacobian, v: Tensor, f: Tensor) -> float | None:
    """The step that moves the outputs by sqrt(u) of their size, about; None for v = 0.

    First-order error and loss of digits are about alike there, whatever the network does with its parameters. A step of
    sqrt(u) of the length of theta tells how far that is.
    """
    few = J.subset(torch.arange(min(J.n, PROBES))) if J.by_position else J
    root = math.sqrt(torch.finfo(J.dtype).eps)
    length, size = (float(x.norm()) for x in (v, J.lin.layout.flatten(J.lin.theta)))
    if length == 0:
        return None
    first = root * (size or 1.0) / length
    f = f[: few.n]
    change = float((few.outputs(_moved(J.lin, v, first)) - f).norm())
    # Outputs that hardly change say little: the step stays within some percent of theta.
    return first * min(100.0, root * float(f.norm()) / change or 1.0) if change else first


def _moved(lin: Linearization, v: Tensor, step: float) -> dict[str, Tensor]:
    direction = lin.layout.unflatten(v)
    return {name: torch.add(t, direction[name], alpha=step) for name, t in lin.theta.items()}


def _jacobian(lin: Linearization, data: Any, batch_size: int | str, memory: float | str) -> Jacobian:
    if not isinstance(data, Jacobian):
        return lin.jacobian(data, batch_size, memory)
    if data.lin is not lin or (batch_size, memory) != ("auto", "auto"):
        raise ValueError(
            "A Jacobian given as data must belong to the linearization that is given too, and it has its own "
            "batch_size and memory: pass J.lin, and those to `lin.jacobian`."
        )
    return data


def _kl_gradient(likelihood: Likelihood, f: Tensor, other: Tensor) -> Tensor:
    """The gradient of the summed KL(p(. | f) || p(. | other)) with respect to ``other``, (n, c)."""
    other = other.detach().requires_grad_()
    with torch.enable_grad():
        total = likelihood.kl(f, other).sum()
    return torch.autograd.grad(total, other)[0]
