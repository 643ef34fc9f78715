"""Numbers and parameters drawn in float64 from a seed, and their comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def double(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64, with parameters drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator) * 0.5
    return model


def check_close(a: Any, b: Any) -> None:
    """Raise unless two arrays or tensors are equal to 1e-9."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
