r"""Similarity of two networks to first order, on given data.

.. math:: \text{function:}\ \frac{\mathrm{tr}(K_a K_b)}{\|K_a\|_F \|K_b\|_F} \qquad
          \text{parameters:}\ \frac{\|J_a J_b^\top\|_F^2}{\|K_a\|_F \|K_b\|_F} \qquad K = J J^\top
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from linnet._common import find_dense_budget
from linnet._estimator import Dtypes
from linnet.jacobian import Jacobian, Linearization, linearize
from linnet.network import Output, Params, checks


def similarity(
    a: nn.Module | Linearization,
    b: nn.Module | Linearization,
    data: Any,
    *,
    space: str = "function",
    params: Params = None,
    output: Output | None = None,
    memory: float | str = "auto",
) -> float:
    r"""The squared cosine similarity of two networks' Jacobians over the same data: 1 for alike, 0 for orthogonal.

    In function space the tangent kernels K = J J^T are compared, (n c, n c) for any two networks: do both adapt alike?
    The similarity does not change when a network's parameters are rotated or its hidden units permuted. In parameter
    space the similarity is the measure of Maddox et al. (2021), for two networks of one architecture: do both use the
    *same* parameters for the same outputs?

    Memory holds two Gram matrices of (n c)^2 entries at a time in function space, and one in parameter space.

    Args:
        a: A network, or its linearization.
        b: Another network, or its linearization.
        data: Data that both take; see `linnet.Linearization.jacobian`.
        space: "function" or "parameters".
        params: Which parameters of networks that are not linearized yet; see `linnet.linearize`.
        output: How to read the outputs of networks that are not linearized yet.
        memory: Bytes that the Gram matrices may take, or "auto" for most of what is free.

    Returns:
        A number from 0 to 1; rounding beyond these limits is cut off.

    Example:
        >>> import torch
        >>> a, b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> round(similarity(a, b, torch.ones(5, 4)), 6)  # linear models differ in their values only
        1.0
    """
    if space not in ("function", "parameters"):
        raise ValueError(f"space must be 'function' or 'parameters'; got {space!r}.")
    left, right = (_linearized(model, params, output) for model in (a, b))
    _check_pair(left, right, space)
    A, B = left.jacobian(data), right.jacobian(data)
    if A.shape[0] != B.shape[0]:
        raise ValueError(
            f"similarity compares outputs one by one, so both networks need as many of them; a has {A.n} examples "
            f"x {A.c} outputs and b {B.n} x {B.c}. Choose outputs with output=."
        )
    _check_memory(A, B, space, memory)
    if space == "function":
        K, other = A.gram(), B.gram()
        inner, norms = _inner(K, other), (_inner(K, K), _inner(other, other))
    else:
        cross = A.gram(B)
        inner = _inner(cross, cross)
        del cross
        norms = (_square_norm(A), _square_norm(B))
    for name, norm in zip("ab", norms, strict=True):
        if norm == 0:
            raise ValueError(
                f"The Jacobian of {name} is zero on these data, so it has no direction to compare. Look at its "
                "selected parameters (params=) and at its inputs."
            )
    return min(1.0, max(0.0, inner / (math.sqrt(norms[0]) * math.sqrt(norms[1]))))


def _linearized(model: nn.Module | Linearization, params: Params, output: Output | None) -> Linearization:
    if not isinstance(model, Linearization):
        lin = linearize(model, params, output)
        return Dtypes(None, lin.dtype).apply(lin)  # inputs take the dtype of the network
    if params is not None or output is not None:
        raise ValueError(
            "params= and output= say how to linearize networks, and a linearization was given. "
            "Pass both networks, or linnet.linearize(model, params, output) of both."
        )
    return model


def _check_pair(a: Linearization, b: Linearization, space: str) -> None:
    if a.device != b.device:
        raise ValueError(f"similarity needs both networks on one device; got {a.device} and {b.device}.")
    if space == "function":
        return
    if a.dtype != b.dtype:
        raise ValueError(
            f"space='parameters' needs both networks in one dtype; got {a.dtype} and {b.dtype}. "
            "Use linnet.linearize(model).to(torch.float64)."
        )
    try:
        checks.check_same_shapes(a.layout.shapes, b.layout.shapes)
    except ValueError as error:
        raise ValueError(
            f"space='parameters' compares two networks parameter by parameter. {error} Use space='function' for "
            "networks of different architectures."
        ) from error


def _check_memory(A: Jacobian, B: Jacobian, space: str, memory: float | str) -> None:
    rows, available = A.shape[0], find_dense_budget(memory, A.device)
    needed = rows**2 * (A.dtype.itemsize + B.dtype.itemsize if space == "function" else A.dtype.itemsize)
    if needed > available:
        raise MemoryError(
            f"similarity holds Gram matrices of ({rows:,} x {rows:,}) entries, {needed / 2**30:.3g} GiB, and may take "
            f"{available / 2**30:.3g} GiB. Pass memory= with more bytes, fewer examples, or fewer outputs with output=."
        )


def _square_norm(J: Jacobian) -> float:
    K = J.gram()
    return _inner(K, K)


def _inner(K: Tensor, other: Tensor, *, rows: int = 1024) -> float:
    """The sum of the products of all entries, in float64."""
    pairs = zip(K.split(rows), other.split(rows), strict=True)
    return sum(float((x.double() * y.double()).sum()) for x, y in pairs)
