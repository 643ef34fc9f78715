"""Products of a Jacobian, and the answers that a dense matrix gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linnet.testing.case import fix_seed

Products = dict[str, tuple[Callable[[Any], Tensor], Tensor]]
"""Products by name: how to ask a Jacobian for a product, and the truth."""


def make_products(J: Tensor, f: Tensor) -> Products:
    """Products of a Jacobian with random matrices, Gram matrices, norms and outputs.

    Args:
        J: The dense Jacobian (n c, p).
        f: The outputs (n, c).

    Example:
        >>> from linnet import linearize
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> ask, truth = make_products(torch.kron(torch.ones(4, 1), torch.eye(2)), torch.zeros(4, 2))["J.gram_diag()"]
        >>> torch.equal(ask(linearize(model, "bias").jacobian(x)), truth)
        True
    """
    with fix_seed(2):
        V = torch.randn(J.shape[1], 3, dtype=torch.float64).to(J)
        U = torch.randn(J.shape[0], 3, dtype=torch.float64).to(J)
    return {
        "J @ v": (lambda A: A @ V[:, 0], J @ V[:, 0]),
        "J @ V": (lambda A: A @ V, J @ V),
        "J.T @ u": (lambda A: A.T @ U[:, 0], J.T @ U[:, 0]),
        "J.T @ U": (lambda A: A.T @ U, J.T @ U),
        "J.normal(v)": (lambda A: A.normal(V[:, 0]), J.T @ (J @ V[:, 0])),
        "J.normal(V)": (lambda A: A.normal(V), J.T @ (J @ V)),
        "J.gram()": (lambda A: A.gram(), J @ J.T),
        "J.gram_diag()": (lambda A: A.gram_diag(), J.square().sum(1)),
        "J.column_norms()": (lambda A: A.column_norms(), J.square().sum(0)),
        "J.cached().gram()": (lambda A: A.cached().gram(), J @ J.T),
        "J.outputs()": (lambda A: A.outputs(), f),
    }


def measure_difference(value: Tensor, truth: Tensor) -> float:
    """The largest error relative to the largest entry of the truth; infinite where only one of the two is finite.

    Example:
        >>> round(measure_difference(torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0])), 6)
        0.1
    """
    finite = truth.isfinite()
    if value.shape != truth.shape or not torch.equal(finite, value.isfinite()):
        return math.inf
    if not finite.any():
        return 0.0
    value, truth = value[finite], truth[finite]
    return float((value - truth).abs().max() / truth.abs().max().clamp(min=torch.finfo(truth.dtype).tiny))
