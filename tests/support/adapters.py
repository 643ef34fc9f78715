"""A network of linear layers with low-rank adapters beside them, written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank one beside it, in the way of PEFT: each in its own dtype.

    Args:
        base: The frozen layer.
        rank: Rank of the adapter.
        dtype: Dtype of the adapter.
    """

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(self.down(x.to(self.down.weight.dtype))).to(y.dtype)


class Network(nn.Module):
    """Two adapted layers and a head that is trained whole.

    Args:
        width: Width of the layers.
        base: Dtype of the frozen layers.
        adapter: Dtype of the adapters.
        head: Dtype of the head.
    """

    def __init__(self, width: int, base: torch.dtype, adapter: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        layers = [Adapted(nn.Linear(width, width, dtype=base), 2, adapter) for _ in range(2)]
        self.body = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.Tanh())
        self.head = nn.Linear(width, 3, dtype=head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).to(self.head.weight.dtype))
