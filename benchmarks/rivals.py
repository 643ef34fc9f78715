r"""What linnet's fused pass is timed against: :math:`J^\top (J V)` computed the ways others do.

Every rival is a function of (model, output, x, V), with `output` from the model's raw output to one number
per example, (n,); x one batch; V (p, k), rows in the order of `model.named_parameters()`; the result (p, k).
The model is in eval mode. Attention runs on torch's plain kernels, the only ones forward mode has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

Output = Callable[[Any], Tensor]


def published(model: nn.Module, output: Output, x: Tensor, V: Tensor, *, chunk: int | None = None) -> Tensor:
    """The product of the Neural Fisher Kernel paper: a JVP, then a VJP, both vmapped over the k columns.

    Zhang et al. 2022, Algorithms 5 and 6.

    Args:
        model: The network, in eval mode.
        output: From its raw output to (n,).
        x: One batch of n examples.
        V: (p, k).
        chunk: Columns at a time, where memory does not allow all k at once.

    Example:
        >>> net = nn.Linear(3, 1).eval()
        >>> published(net, lambda raw: raw[:, 0], torch.ones(5, 3), torch.ones(4, 2))
        tensor([[20., 20.],
                [20., 20.],
                [20., 20.],
                [20., 20.]])
    """
    theta = _theta(model)

    def f(theta: dict[str, Tensor]) -> Tensor:
        return output(functional_call(model, theta, (x,)))

    with sdpa_kernel(SDPBackend.MATH):
        JV = vmap(lambda v: jvp(f, (theta,), (v,))[1], chunk_size=chunk)(_split(theta, V))
        pullback = vjp(f, theta)[1]
        (tree,) = vmap(pullback, chunk_size=chunk)(JV)
    return torch.cat([tensor.flatten(1) for tensor in tree.values()], 1).T


def algorithm4(
    model: nn.Module,
    output: Output,
    X: Tensor,
    k: int,
    *,
    center: Tensor,
    scale: Tensor,
    batch: int = 128,
    chunk: int | None = None,
    iterations: int = 10,
    seed: int = 0,
) -> Tensor:
    """The k leading eigenvalues of V V^T, V = (J - 1 center^T) diag(scale), by the published truncated SVD.

    Zhang et al. 2022, Algorithm 4 with 10 columns more than asked for; products as in `published`, batch by batch.

    Args:
        model: The network, in eval mode.
        output: From its raw output to (n,).
        X: All n examples.
        k: Components.
        center: (p,), subtracted from each row of J.
        scale: (p,), times each column.
        batch: Examples at a time.
        chunk: Columns at a time.
        iterations: Of the power iteration.
        seed: Of the random start.

    Example:
        >>> net = nn.Linear(2, 1).eval()
        >>> X = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> algorithm4(net, lambda raw: raw[:, 0], X, 2, center=torch.tensor([0.0, 0.0, 1.0]), scale=torch.ones(3))
        tensor([8.0000, 2.0000])
    """
    theta = _theta(model)

    def f(part: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda theta: output(functional_call(model, theta, (part,)))

    def times(M: Tensor) -> Tensor:
        M = scale[:, None] * M
        tree = _split(theta, M)
        with sdpa_kernel(SDPBackend.MATH):
            parts = [
                vmap(lambda v, part=part: jvp(f(part), (theta,), (v,))[1], chunk_size=chunk)(tree).T
                for part in X.split(batch)
            ]
        return torch.cat(parts) - center @ M

    def adjoint(U: Tensor) -> Tensor:
        total = torch.zeros(len(center), U.shape[1], dtype=U.dtype, device=U.device)
        for part, u in zip(X.split(batch), U.split(batch), strict=True):
            with sdpa_kernel(SDPBackend.MATH):
                (tree,) = vmap(vjp(f(part), theta)[1], chunk_size=chunk)(u.T)
            total += torch.cat([tensor.flatten(1) for tensor in tree.values()], 1).T
        return scale[:, None] * (total - center[:, None] * U.sum(0))

    columns = min(k + 10, len(X), len(center))
    generator = torch.Generator().manual_seed(seed)
    Omega = adjoint(torch.randn(len(X), columns, generator=generator).to(X))
    for _ in range(iterations):
        Omega = torch.linalg.qr(adjoint(times(Omega)))[0]
    return torch.linalg.svdvals(times(Omega)).square()[:k]


def gram_svd(
    model: nn.Module, output: Output, X: Tensor, k: int, *, center: Tensor, scale: Tensor, chunk: int = 256
) -> Tensor:
    """The same eigenvalues from all rows of V, by `vmap(grad)`, their Gram matrix, and torch's truncated SVD of that.

    Args:
        model: The network, in eval mode.
        output: From its raw output to (n,).
        X: All n examples; n p numbers have to fit into memory.
        k: Components.
        center: (p,), subtracted from each row of J.
        scale: (p,), times each column.
        chunk: Examples at a time.

    Example:
        >>> net = nn.Linear(2, 1).eval()
        >>> X = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> gram_svd(net, lambda raw: raw[:, 0], X, 2, center=torch.tensor([0.0, 0.0, 1.0]), scale=torch.ones(3))
        tensor([8.0000, 2.0000])
    """
    theta = _theta(model)

    def f(theta: dict[str, Tensor], example: Tensor) -> Tensor:
        return output(functional_call(model, theta, (example.unsqueeze(0),))).squeeze(0)

    V = torch.empty(len(X), len(center), dtype=X.dtype, device=X.device)
    with sdpa_kernel(SDPBackend.MATH):
        for start in range(0, len(X), chunk):
            tree = vmap(grad(f), in_dims=(None, 0))(theta, X[start : start + chunk])
            torch.cat([tensor.flatten(1) for tensor in tree.values()], 1, out=V[start : start + chunk])
            del tree
    V.sub_(center).mul_(scale)
    return torch.svd_lowrank(V @ V.T, q=min(k + 10, len(X)), niter=10)[1][:k]


def per_example_rows(model: nn.Module, output: Output, x: Tensor, V: Tensor, *, chunk: int | None = None) -> Tensor:
    """Rows of J by `vmap(grad)` over the examples, all n of them held at once, then two matrix products.

    Args:
        model: The network, in eval mode.
        output: From its raw output to (n,).
        x: One batch of n examples.
        V: (p, k).
        chunk: Examples at a time.

    Example:
        >>> net = nn.Linear(3, 1).eval()
        >>> per_example_rows(net, lambda raw: raw[:, 0], torch.ones(5, 3), torch.ones(4, 2)).shape
        torch.Size([4, 2])
    """
    theta = _theta(model)

    def f(theta: dict[str, Tensor], example: Tensor) -> Tensor:
        return output(functional_call(model, theta, (example.unsqueeze(0),))).squeeze(0)

    with sdpa_kernel(SDPBackend.MATH):
        tree = vmap(grad(f), in_dims=(None, 0), chunk_size=chunk)(theta, x)
    J = torch.cat([tensor.flatten(1) for tensor in tree.values()], 1)
    return J.T @ (J @ V)


def plain(model: nn.Module, output: Output, x: Tensor) -> Tensor:
    """One forward and one backward pass of the summed output, in all parameters: the unit of the timings.

    Returns:
        The gradient, (p,): the column sums of J.

    Example:
        >>> plain(nn.Linear(3, 1).eval(), lambda raw: raw[:, 0], torch.ones(5, 3))
        tensor([5., 5., 5., 5.])
    """
    _theta(model)
    grads = torch.autograd.grad(output(model(x)).sum(), list(model.parameters()))
    return torch.cat([tensor.flatten() for tensor in grads])


def _theta(model: nn.Module) -> dict[str, Tensor]:
    if model.training:
        raise ValueError("the timings need a model in eval mode; got one in train mode. Call model.eval().")
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def _split(theta: dict[str, Tensor], V: Tensor) -> dict[str, Tensor]:
    """V (p, k) as tensors (k, *shape) by parameter."""
    sizes = [tensor.numel() for tensor in theta.values()]
    if V.shape[0] != sum(sizes):
        raise ValueError(f"V needs {sum(sizes)} rows, one per parameter; got {tuple(V.shape)}.")
    parts = V.T.split(sizes, dim=1)
    return {name: part.reshape(-1, *theta[name].shape) for name, part in zip(theta, parts, strict=True)}
