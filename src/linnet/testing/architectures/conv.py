"""Convolutions of every kind, alone and in small networks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linnet.testing.case import Case, Net, case, net, normal, parameter


def pooled(name: str, data: Any, kind: Any, *args: Any, **options: Any) -> Case:
    """A convolution, a smooth activation, a 1-wide convolution of the same rank, a position-aware sum."""

    def factory() -> nn.Module:
        first = kind(*args, **options)
        head = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[first.weight.ndim - 3](args[1], 2, 1)

        def forward(m: Any, x: Tensor) -> Tensor:
            with warnings.catch_warnings():  # torch warns once that padding="same" may copy
                warnings.filterwarnings("ignore", message="Using padding='same'")
                h = m.conv(x)
            h = m.head(torch.tanh(h)).flatten(2)
            return (h * torch.linspace(0.2, 1.0, h.shape[2], dtype=h.dtype, device=h.device)).sum(2)

        return Net(forward, conv=first, head=head)

    return case(name, factory, data)


class Residual(nn.Module):
    """A ResNet of two blocks: batch norm, in-place ReLU, in-place addition, strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(5))
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=s, padding=1, bias=False) for s in (1, 1, 2, 1))
        self.shortcut = nn.Conv2d(4, 4, 1, stride=2, bias=False)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.stem(x)))
        for b, shortcut in enumerate([nn.Identity(), self.shortcut]):
            y = self.relu(self.norms[2 * b + 1](self.convs[2 * b](x)))
            y = self.norms[2 * b + 2](self.convs[2 * b + 1](y))
            y += shortcut(x)
            x = self.relu(y)
        return self.fc(x.mean((2, 3)))


class Concatenating(nn.Module):
    """A dense block: every layer sees all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2 + 3 * i, 3, 3, padding=1) for i in range(3))
        self.norm, self.fc = nn.BatchNorm2d(11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.cat([x, F.softplus(conv(x))], 1)
        return self.fc(self.norm(x).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution, skip by concatenation; one output per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)
        self.leave = nn.Conv2d(6, 1, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.enter(x))
        h = torch.tanh(self.norm(self.down(skip)))
        return self.leave(torch.cat([skip, torch.tanh(self.up(h))], 1))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, channels-last LayerNorm and MLP, layer scale, residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.expand, self.contract = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.gamma = parameter(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.gamma * self.contract(F.gelu(self.expand(self.norm(h))))
        return x + h.permute(0, 3, 1, 2)


CONVNEXT = net(
    lambda m, x: m.fc(m.norm(m.blocks(m.stem(x)).mean((2, 3)))),
    stem=lambda: nn.Conv2d(2, 6, 2, stride=2),
    blocks=lambda: nn.Sequential(ConvNeXtBlock(6), ConvNeXtBlock(6)),
    norm=lambda: nn.LayerNorm(6),
    fc=(6, 3),
)
# Video: frames folded into the batch for the convolution, averaged per example after it.
FRAMES = net(
    lambda m, x: m.fc(torch.tanh(m.conv(x.flatten(0, 1))).mean((2, 3)).unflatten(0, (-1, x.shape[1])).mean(1)),
    conv=lambda: nn.Conv2d(2, 4, 3),
    fc=(4, 3),
)
# One convolution applied at three resolutions.
PYRAMID = net(
    lambda m, x: sum(torch.tanh(m.head(F.avg_pool2d(m.stem(x), s))).mean((2, 3)) * s for s in (1, 2, 3)),
    stem=lambda: nn.Conv2d(2, 4, 3, padding=1),
    head=lambda: nn.Conv2d(4, 3, 2, padding=1),
)
IMAGE, VOLUME, SIGNAL, SMALL, CUBE = (
    normal(4, 6, 5),
    normal(2, 4, 3, 5),
    normal(4, 9),
    normal(4, 3, 4),
    normal(2, 2, 3, 2),
)

# Several dimensions at once.
UNEVEN: Any = {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2), "groups": 2, "dilation": (1, 2)}
UNEVEN3: Any = {"stride": (2, 1, 2), "padding": (0, 1, 0), "output_padding": (1, 0, 1)}

CASES: list[Case] = [
    pooled("conv1d", SIGNAL, nn.Conv1d, 4, 6, 3, stride=2, padding=1),
    pooled("conv1d_circular", SIGNAL, nn.Conv1d, 4, 6, 4, stride=3, padding=2, padding_mode="circular"),
    pooled("conv1d_grouped", SIGNAL, nn.Conv1d, 4, 6, 2, dilation=3, groups=2, bias=False),
    pooled("conv1d_same", SIGNAL, nn.Conv1d, 4, 6, 4, dilation=2, padding="same"),
    pooled("conv1d_same_reflect", SIGNAL, nn.Conv1d, 4, 6, 4, padding="same", padding_mode="reflect"),
    pooled("conv2d", IMAGE, nn.Conv2d, 4, 6, 3, stride=2, padding=1),
    pooled("conv2d_no_bias", IMAGE, nn.Conv2d, 4, 6, 3, bias=False),
    pooled("conv2d_pointwise", IMAGE, nn.Conv2d, 4, 6, 1),
    pooled("conv2d_even", IMAGE, nn.Conv2d, 4, 6, 2, stride=2, padding=1),
    pooled("conv2d_asymmetric", IMAGE, nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    pooled("conv2d_reflect", IMAGE, nn.Conv2d, 4, 6, 3, padding=(2, 1), padding_mode="reflect"),
    pooled("conv2d_replicate", IMAGE, nn.Conv2d, 4, 6, 3, stride=2, padding=2, padding_mode="replicate"),
    pooled("conv2d_circular", IMAGE, nn.Conv2d, 4, 6, 3, padding=1, groups=2, padding_mode="circular"),
    pooled("conv2d_same", IMAGE, nn.Conv2d, 4, 6, (4, 3), padding="same"),
    pooled("conv2d_valid", IMAGE, nn.Conv2d, 4, 6, 3, stride=(3, 2), padding="valid"),
    pooled("conv2d_dilated", IMAGE, nn.Conv2d, 4, 6, 3, padding=2, dilation=2),
    pooled("conv2d_grouped", IMAGE, nn.Conv2d, 4, 6, 3, padding=1, groups=2),
    pooled("conv2d_depthwise", IMAGE, nn.Conv2d, 4, 8, 3, stride=2, padding=1, groups=4),
    pooled("conv3d", VOLUME, nn.Conv3d, 2, 4, 2, stride=(1, 2, 1), padding=1),
    pooled("conv3d_grouped", VOLUME, nn.Conv3d, 2, 4, (2, 1, 3), dilation=(2, 1, 2), groups=2, bias=False),
    pooled("conv3d_replicate", VOLUME, nn.Conv3d, 2, 4, 3, padding=1, padding_mode="replicate"),
    pooled("conv3d_circular", VOLUME, nn.Conv3d, 2, 4, 2, padding=1, padding_mode="circular"),
    pooled("conv3d_reflect", VOLUME, nn.Conv3d, 2, 4, 2, padding=1, padding_mode="reflect"),
    pooled("conv3d_same", VOLUME, nn.Conv3d, 2, 4, (2, 3, 4), padding="same"),
    pooled("conv_transpose1d", SIGNAL, nn.ConvTranspose1d, 4, 6, 4, stride=3, padding=1, output_padding=2),
    pooled("conv_transpose1d_grouped", SIGNAL, nn.ConvTranspose1d, 4, 6, 3, groups=2, dilation=2, bias=False),
    pooled("conv_transpose2d", SMALL, nn.ConvTranspose2d, 4, 3, 3, stride=2, padding=1, output_padding=1),
    pooled("conv_transpose2d_grouped", SMALL, nn.ConvTranspose2d, 4, 6, (3, 2), **UNEVEN),
    pooled("conv_transpose3d", CUBE, nn.ConvTranspose3d, 2, 4, (2, 3, 1), **UNEVEN3),
    pooled("conv_transpose3d_grouped", CUBE, nn.ConvTranspose3d, 2, 4, 2, stride=2, dilation=2, groups=2),
    case("resnet", Residual, normal(2, 6, 6)),
    case("densenet", Concatenating, normal(2, 5, 5)),
    case("unet", UNet, normal(1, 4, 4), lambda raw: raw.flatten(1)),
    case("convnext", CONVNEXT, normal(2, 6, 6)),
    case("frames", FRAMES, normal(3, 2, 5, 5)),
    case("pyramid", PYRAMID, normal(2, 6, 6)),
]
