"""Numbers and parameters drawn in float64 from a seed, for the tests of the core."""

from __future__ import annotations

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
