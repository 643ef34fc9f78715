"""Small networks that experiments train themselves: what they are, their losses, and training to a number of epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from experiments.common.adaptation import Labeled, Loss, Search, cross_entropy, steps
from linnet.testing.zoo_dense import mlp

Net = TypeVar("Net", bound=nn.Module)


def drawn(make: Callable[[], Net], seed: int) -> Net:
    """A network whose weights are drawn with a seed of their own, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def perceptron(widths: Sequence[int], *, activation: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers with an activation between them, drawn as torch's layers are.

    >>> perceptron((2, 5, 1))(torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    return drawn(lambda: mlp(*widths, activation=activation), seed)


def lenet(
    size: int, outputs: int, *, channels: tuple[int, int] = (6, 16), hidden: int = 84, seed: int = 0
) -> nn.Module:
    """LeNet-3 for images (n, 1, size, size): two convolutions of 5 x 5 with max pooling, a hidden layer, the outputs.

    >>> net = lenet(28, 10)
    >>> sum(p.numel() for p in net.parameters()), net(torch.zeros(3, 1, 28, 28)).shape
    (25010, torch.Size([3, 10]))
    """
    first, second = channels
    left = ((size - 4) // 2 - 4) // 2

    def make() -> nn.Sequential:
        lower = [nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(first, second, 5), nn.ReLU()]
        upper = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(second * left**2, hidden), nn.ReLU()]
        return nn.Sequential(*lower, *upper, nn.Linear(hidden, outputs))

    return drawn(make, seed)


def gaussian_nll(f: Tensor, y: Tensor) -> Tensor:
    """Mean negative log density of y (n,), up to a constant, under means f[:, 0] and log variances f[:, 1]."""
    return 0.5 * (f[:, 1] + (y - f[:, 0]).square() * (-f[:, 1]).exp()).mean()


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of outputs (n, 1) for targets (n,)."""
    return (f[:, 0] - y).square().mean()


def train(
    model: Net,
    data: Labeled,
    *,
    epochs: int,
    rate: float = 1e-3,
    batch: int = 64,
    loss: Loss = cross_entropy,
    seed: int = 0,
) -> Net:
    """The model after so many epochs of Adam, trained in place, in eval mode."""
    for _ in steps(model, data, rate, Search((rate,), epochs, batch=batch), train_mode=True, loss=loss, seed=seed):
        pass
    return model.eval()
