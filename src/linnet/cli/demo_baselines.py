"""The task of `linnet demo`, its network, and the usual ways to adapt a network to a few labels."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

Data = tuple[Tensor, Tensor]
"""Images (n, 1, 8, 8) between 0 and 1, and labels (n,)."""

ANGLE = 30
"""Degrees that the digits of the new task are turned by, counterclockwise."""

SOURCE, POOL = 1000, 300
FOLDS = 4
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Task:
    """Digits for one run; no digit is in two of them.

    Attributes:
        source: Upright, to train the network on.
        few: Turned and labelled, to adapt it with: the same number of each class.
        test: Turned, to compare predictions on.
        upright: The images of ``test`` before they were turned.
    """

    source: Data
    few: Data
    test: Data
    upright: Tensor


def turned_digits(each: int, test: int | None = None, *, seed: int) -> Task:
    """scikit-learn's handwritten digits, split at random.

    Args:
        each: Labels of every class of the new task.
        test: Digits to test on; None for all that are left.
        seed: Of the split.
    """
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    source, pool, rest = order[:SOURCE], order[SOURCE : SOURCE + POOL], order[SOURCE + POOL :][:test]
    few = torch.cat([pool[y[pool] == label][:each] for label in range(10)])
    if len(few) < 10 * each:
        raise ValueError(f"{POOL} digits do not hold {each} of every class.")
    turned = turn(x, ANGLE)
    return Task((x[source], y[source]), (turned[few], y[few]), (turned[rest], y[rest]), x[rest])


def turn(x: Tensor, degrees: float) -> Tensor:
    """Images (n, 1, h, h) turned counterclockwise, bilinearly interpolated, with zeros from outside.

    >>> x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(turn(x, 90), x.rot90(1, (2, 3)), atol=1e-5)
    True
    """
    a = math.radians(degrees)
    back = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]], dtype=x.dtype)
    grid = affine_grid(back.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, align_corners=False)


def network(seed: int) -> nn.Sequential:
    """Three convolutions and a linear layer: images (n, 1, 8, 8) to logits (n, 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential()
        for i, (a, b, stride) in enumerate([(1, 16, 1), (16, 32, 2), (32, 64, 2)], start=1):
            model.add_module(f"conv{i}", nn.Conv2d(a, b, 3, stride, padding=1))
            model.add_module(f"gelu{i}", nn.GELU())
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(256, 10))
    return model


def train(model: nn.Module, data: Data, *, epochs: int, seed: int) -> nn.Module:
    """Train with Adam, its rate first rising and then falling, and return the model in eval mode."""
    x, _ = data
    optimizer = torch.optim.Adam(model.parameters())
    steps = -(-len(x) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs=epochs, steps_per_epoch=steps)
    for _ in _epochs(model, data, optimizer, epochs=epochs, size=50, seed=seed, schedule=schedule):
        pass
    return model.eval()


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """Of a network's classes, (n, c), in float64: confident ones underflow in float32."""
    with torch.no_grad():
        return model(x).double().softmax(1)


def last_layer(model: nn.Sequential, few: Data, x: Tensor, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (m, c) at x of logistic regression on the frozen features, and the penalty that was chosen.

    The penalty is the best of `PENALTIES` in the NLL of cross-validation.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    with torch.no_grad():
        features, new = model[:-1](few[0]).double(), model[:-1](x).double()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    search = GridSearchCV(
        LogisticRegression(max_iter=5000), {"C": list(PENALTIES)}, scoring="neg_log_loss", cv=folds, error_score="raise"
    )
    search.fit(features.numpy(), few[1].numpy())
    return torch.from_numpy(search.predict_proba(new.numpy())), dict(search.best_params_)


def fine_tuned(model: nn.Module, few: Data, x: Tensor, *, seed: int, longest: int) -> tuple[Tensor, dict[str, Any]]:
    """Probabilities (m, c) at x of the network trained further, and the learning rate and epochs that were chosen.

    Rate and epochs are the best in the NLL of cross-validation, of `RATES` and up to ``longest``; the network is then
    trained so on all labels.
    """
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    splits = [tuple(map(torch.from_numpy, split)) for split in folds.split(few[1], few[1])]
    choices = []
    for rate in RATES:
        curves = torch.zeros(longest, dtype=torch.float64)
        for kept, left in splits:
            part, held = (few[0][kept], few[1][kept]), (few[0][left], few[1][left])
            for epoch, tuned in enumerate(_tuning(model, part, rate=rate, epochs=longest, seed=seed)):
                with torch.no_grad():
                    curves[epoch] += cross_entropy(tuned(held[0]), held[1], reduction="sum").item()
        choices.append((curves.min().item(), rate, int(curves.argmin()) + 1))
    _, rate, epochs = min(choices)
    *_, tuned = _tuning(model, few, rate=rate, epochs=epochs, seed=seed)
    return probabilities(tuned, x), {"rate": rate, "epochs": epochs}


def _tuning(model: nn.Module, data: Data, *, rate: float, epochs: int, seed: int) -> Iterator[nn.Module]:
    """A copy of the model after each epoch of training."""
    tuned = copy.deepcopy(model)
    optimizer = torch.optim.Adam(tuned.parameters(), rate)
    for _ in _epochs(tuned, data, optimizer, epochs=epochs, size=25, seed=seed):
        yield tuned


def _epochs(
    model: nn.Module,
    data: Data,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    size: int,
    seed: int,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[None]:
    """Train, pausing after each epoch; batches are drawn from the seed."""
    x, y = data
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=order).split(size):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        yield
