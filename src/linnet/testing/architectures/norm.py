"""Normalization layers, each between two layers that need their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linnet.testing.case import Case, Net, case, normal


def channels(norm: Callable[[], nn.Module], rank: int = 2) -> Callable[[], nn.Module]:
    """Convolution to 6 channels, the norm, a linear readout of two moments per channel."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.norm(m.conv(x)).flatten(2))
        return m.fc(torch.cat([h[..., 0], h.square().mean(2)], 1))

    return lambda: Net(forward, conv=conv(2, 6, 2), norm=norm(), fc=nn.Linear(12, 3))


def features(norm: Callable[[], nn.Module], tokens: int = 3) -> Callable[[], nn.Module]:
    """Linear to 6 features per token, the norm, a linear readout."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.tanh(m.norm(m.a(x))).flatten(1))

    return lambda: Net(forward, a=nn.Linear(4, 6), norm=norm(), fc=nn.Linear(6 * tokens, 3))


SIGNAL, IMAGE, VOLUME, FLAT, SEQUENCE = (normal(2, 6), normal(2, 4, 5), normal(2, 3, 3, 4), normal(4), normal(3, 4))

CASES: list[Case] = [
    case("batch_norm1d", features(lambda: nn.BatchNorm1d(6), tokens=1), FLAT),
    case("batch_norm1d_sequence", channels(lambda: nn.BatchNorm1d(6), rank=1), SIGNAL),
    case("batch_norm2d", channels(lambda: nn.BatchNorm2d(6)), IMAGE),
    case("batch_norm3d", channels(lambda: nn.BatchNorm3d(6), rank=3), VOLUME),
    case("batch_norm2d_no_affine", channels(lambda: nn.BatchNorm2d(6, affine=False)), IMAGE),
    case("layer_norm", features(lambda: nn.LayerNorm(6)), SEQUENCE),
    case("layer_norm_flat", features(lambda: nn.LayerNorm(6), tokens=1), FLAT),
    case("layer_norm_no_bias", features(lambda: nn.LayerNorm(6, bias=False)), SEQUENCE),
    case("layer_norm_no_affine", features(lambda: nn.LayerNorm(6, elementwise_affine=False)), SEQUENCE),
    case("layer_norm_images", channels(lambda: nn.LayerNorm([6, 3, 4])), IMAGE),
    case("group_norm", channels(lambda: nn.GroupNorm(3, 6)), IMAGE),
    case("group_norm_flat", features(lambda: nn.GroupNorm(2, 6), tokens=1), FLAT),
    case("instance_norm1d", channels(lambda: nn.InstanceNorm1d(6, affine=True), rank=1), SIGNAL),
    case("instance_norm2d", channels(lambda: nn.InstanceNorm2d(6, affine=True)), IMAGE),
    case(
        "instance_norm2d_tracked", channels(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), IMAGE
    ),
    case("instance_norm3d", channels(lambda: nn.InstanceNorm3d(6, affine=True), rank=3), VOLUME),
    case("rms_norm", features(lambda: nn.RMSNorm(6)), SEQUENCE),
    case("rms_norm_images", channels(lambda: nn.RMSNorm([3, 4])), IMAGE),
]
