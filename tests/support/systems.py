"""Linear systems with known eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.drawn import normal


def spd(m: int, *, seed: int = 0, condition: float = 1e3) -> Tensor:
    """A positive definite matrix with eigenvalues from 1 to ``condition``."""
    Q = torch.linalg.qr(normal(m, m, seed=seed)).Q
    return Q * torch.logspace(0, math.log10(condition), m, dtype=torch.float64) @ Q.T


def close(found: Tensor, wanted: Tensor, *, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))


def times(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda V: A @ V
