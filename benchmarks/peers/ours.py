"""The jobs by linnet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import linnet
from linnet.jacobian import Jacobian
from linnet.probability import Categorical

Found = dict[str, Tensor]


def product(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, V: Tensor) -> Found:
    """The GGN of the cross-entropy, times V (p, k)."""
    J, B = _curvature(model, X)
    return {"product": J.normal(V, weight=B)}


def diagonal(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor) -> Found:
    """The diagonal of the GGN of the cross-entropy."""
    J, B = _curvature(model, X)
    return {"diagonal": J.column_norms(weight=B)}


def laplace(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, new: Tensor) -> Found:
    """Fit, log evidence, and probabilities of new examples."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    params = f"{layers[-1]}.*" if told["last_layer"] else None
    la = linnet.Laplace(model, "classification", told["structure"], told["prior"], params, progress=False)
    la.fit(X, y)
    return {"log evidence": _number(la.log_evidence()), "probabilities": la.predict_proba(new)}


def gp(model: nn.Module, told: dict[str, Any], *, X: Tensor, y: Tensor, new: Tensor) -> Found:
    """Log evidence, and mean and variance of f at new examples."""
    reg = linnet.TangentRegressor(model, prior=told["prior"], noise=told["noise"], progress=False).fit(X, y)
    mean, std = reg.predict(new, return_std=True)
    return {"log evidence": _number(reg.log_evidence_), "mean": mean, "variance": std**2}


def _number(value: float | None) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _curvature(model: nn.Module, X: Tensor) -> tuple[Jacobian, Tensor]:
    """J, and the Hessian of the loss by each example's outputs, (n, c, c)."""
    J = linnet.linearize(model).jacobian(X, progress=False)
    return J, Categorical().curvature(J.outputs())
