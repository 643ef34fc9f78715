"""The networks that the timings are made on: random weights, eval mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WideBlock(nn.Module):
    """Batch norm and ReLU before each of two convolutions; a 1x1 shortcut where the shape changes."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(d_in), nn.BatchNorm2d(d_out)
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(d_in, d_out, 1, stride=stride, bias=False) if d_in != d_out else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        # Where the shape changes, both branches start from the activated input.
        skip = x if self.shortcut is None else self.shortcut(h)
        return skip + self.conv2(F.relu(self.bn2(self.conv1(h))))


class WideResNet(nn.Module):
    """WRN-depth-width for 32 x 32 images (Zagoruyko and Komodakis 2016), without dropout.

    >>> sum(p.numel() for p in WideResNet(40, 2).parameters())
    2243546
    """

    def __init__(self, depth: int, width: int, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        widths = (16, 16 * width, 32 * width, 64 * width)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        groups = [
            nn.Sequential(
                *(WideBlock(d_in if b == 0 else d_out, d_out, stride if b == 0 else 1) for b in range(blocks))
            )
            for d_in, d_out, stride in zip(widths[:-1], widths[1:], (1, 2, 2), strict=True)
        ]
        self.groups, self.bn = nn.Sequential(*groups), nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.groups(self.conv1(x)))).mean((2, 3)))


class BasicBlock(nn.Module):
    """Two convolutions; where the shape changes, the shortcut subsamples and pads channels with zeros."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(d_out), nn.BatchNorm2d(d_out)
        self.stride, self.pad = stride, (d_out - d_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(h + x)


class ResNet(nn.Module):
    """ResNet-(6 * blocks + 2) for 32 x 32 images (He et al. 2015), shortcuts without parameters (option A).

    >>> sum(p.numel() for p in ResNet(3).parameters())
    269722
    """

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()

        def layer(d_in: int, d_out: int, stride: int) -> nn.Sequential:
            rest = [BasicBlock(d_out, d_out, 1) for _ in range(blocks - 1)]
            return nn.Sequential(BasicBlock(d_in, d_out, stride), *rest)

        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = layer(16, 16, 1), layer(16, 32, 2), layer(32, 64, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


class ProjectedBlock(nn.Module):
    """Two convolutions; where the shape changes, the shortcut is a 1x1 convolution with batch norm."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(d_out), nn.BatchNorm2d(d_out)
        project = [nn.Conv2d(d_in, d_out, 1, stride=stride, bias=False), nn.BatchNorm2d(d_out)]
        self.shortcut = nn.Sequential(*(project if d_in != d_out else ()))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 as it is used on 32 x 32 images: a 3x3 stem without pooling, four stages of two blocks.

    >>> sum(p.numel() for p in ResNet18(100).parameters())
    11220132
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        stages = [
            nn.Sequential(ProjectedBlock(d_in, d_out, stride), ProjectedBlock(d_out, d_out, 1))
            for d_in, d_out, stride in zip(widths[:-1], widths[1:], (1, 2, 2, 2), strict=True)
        ]
        self.stages, self.linear = nn.Sequential(*stages), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.stages(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


class TransformerBlock(nn.Module):
    """Pre-norm self-attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """ViT-tiny (dim 192, depth 12, 3 heads) for 32 x 32 images in 4 x 4 patches, with a class token.

    >>> sum(p.numel() for p in VisionTransformer().parameters())
    5362762
    """

    def __init__(self, dim: int = 192, depth: int = 12, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.position = nn.Parameter(0.02 * torch.randn(1, 65, dim))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def mlp() -> nn.Sequential:
    """5-200-2000-200-1 with ELU: the largest network of Maddox et al. 2021.

    >>> sum(p.numel() for p in mlp().parameters())
    803601
    """
    widths = (5, 200, 2000, 200, 1)
    layers = [layer for d_in, d_out in itertools.pairwise(widths) for layer in (nn.Linear(d_in, d_out), nn.ELU())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, slots=True)
class Model:
    """A network by name: how to make it, and the shape of one example."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def build(self, *, seed: int = 0) -> nn.Module:
        """The network in eval mode; the global random numbers stay as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.make().eval()

    def data(self, n: int, *, seed: int = 1) -> Tensor:
        """n standard normal examples, float32."""
        return torch.randn(n, *self.shape, generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, Model] = {
    "wrn-40-2": Model(lambda: WideResNet(40, 2), (3, 32, 32)),
    "resnet-20": Model(lambda: ResNet(3), (3, 32, 32)),
    "vit-tiny": Model(VisionTransformer, (3, 32, 32)),
    "mlp-800k": Model(mlp, (5,)),
}
