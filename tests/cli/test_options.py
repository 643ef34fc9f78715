"""What the command says about the fit that is to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import linnet
from linnet._common import format_bytes
from linnet.cli.options import print_solver


class Printer:
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def solver(J: Any, memory: float, kind: str, prior: str, **given: Any) -> str:
    J.lin.agree_on_memory = lambda asked: memory
    printer = Printer()
    print_solver(printer, J, kind, prior, **given)  # type: ignore[arg-type]
    (line,) = printer.said
    return line


def jacobian(n: int, width: int) -> Any:
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
    X = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return linnet.linearize(model).jacobian(X, progress=False)


@pytest.mark.parametrize(
    ("kind", "prior", "kernels"),
    [
        ("regression", "balanced", 1),
        ("regression", "layerwise", 2),
        ("laplace", "layerwise", 2),
        ("classification", "balanced", 2),
        ("classification", "layerwise", 3),
    ],
)
@pytest.mark.parametrize("more", [0, 5])
def test_a_kernel_for_each_layer_must_fit(kind: str, prior: str, kernels: int, more: int) -> None:
    """Classes hold one matrix more."""
    J = jacobian(10, 60)
    rows = 3 * (10 + more)
    needed = 8 * (2 + kernels) * rows**2
    dense = f"the fit is solved by a dense kernel ({rows} x {rows}), with about {format_bytes(needed)} of memory"
    assert solver(J, needed, kind, prior, more=more) == dense
    assert "a dense kernel" not in solver(J, needed - 1, kind, prior, more=more)


def test_weights_and_conjugate_gradients() -> None:
    J = jacobian(200, 2)
    p = J.shape[1]
    words = f"the fit is solved by a dense matrix of the weights ({p} x {p}), with about"
    assert solver(J, 1e9, "regression", "balanced") == f"{words} {format_bytes(32 * p**2)} of memory"
    assert "conjugate gradients" in solver(J, 32 * p**2 - 1, "regression", "balanced")
