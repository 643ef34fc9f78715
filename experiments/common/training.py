"""Training: fine-tuning with a search, classifiers of images, pairs of a GAN."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from experiments.common.data import augment
from experiments.common.networks import LATENT, Discriminator, Generator, dcgan_discriminator, untrained_generator

Net = TypeVar("Net", bound=nn.Module)
Inputs = tuple[Tensor, ...]
Loss = Callable[[Tensor, Tensor], Tensor]
BATCH, RATE, DECAY = 256, 0.2, 5e-4


@dataclass(frozen=True)
class Labeled:
    """Examples as the top of a network takes them."""

    X: Inputs  # tensors (n, ...)
    y: Tensor  # labels (n,)

    def __getitem__(self, index: Any) -> Labeled:
        return Labeled(tuple(x[index] for x in self.X), self.y[index])

    def __len__(self) -> int:
        return len(self.y)


def in_turn(y: Tensor, count: int, classes: int, generator: torch.Generator) -> Tensor:
    """A draw (count,) of positions in y: one of each class, then one more of each that has more, and so on.

    >>> y = torch.tensor([0, 0, 0, 1, 1])
    >>> y[in_turn(y, 5, 2, torch.Generator().manual_seed(0))]
    tensor([0, 1, 0, 1, 0])
    """
    if not classes <= count <= len(y):
        raise ValueError(f"Labels of {classes} classes in turn can be {classes} to {len(y):,}; got {count:,}.")
    order = torch.randperm(len(y), generator=generator)
    turn = torch.empty(len(y), dtype=torch.long)
    for k in range(classes):
        own = y[order] == k
        turn[own] = classes * torch.arange(int(own.sum())) + k
    return order[turn.argsort()[:count]]


@torch.no_grad()
def in_parts(fn: Callable[..., Tensor], X: Inputs, batch: int = 250) -> Tensor:
    """What a network or another function makes of inputs (n, ...), a few at a time.

    >>> in_parts(torch.neg, (torch.arange(3),), 2)
    tensor([ 0, -1, -2])
    """
    return torch.cat([fn(*part) for part in zip(*(x.split(batch) for x in X), strict=True)])


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(in_parts(net.eval(), (x,), 500).argmax(1).eq(y).double().mean())


# Losses.


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Of logits (n, c), or of one logit (n, 1) of the second of two classes."""
    return F.binary_cross_entropy_with_logits(f[:, 0], y.to(f.dtype)) if f.shape[1] == 1 else F.cross_entropy(f, y)


def gaussian_nll(f: Tensor, y: Tensor) -> Tensor:
    """Mean negative log density of y (n,), up to a constant, under means f[:, 0] and log variances f[:, 1]."""
    return 0.5 * (f[:, 1] + (y - f[:, 0]).square() * (-f[:, 1]).exp()).mean()


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of outputs (n, 1) for targets (n,)."""
    return (f[:, 0] - y).square().mean()


def loss_of(model: nn.Module, data: Labeled, loss: Loss = cross_entropy) -> float:
    return float(loss(in_parts(model, data.X), data.y))


def probabilities(model: Callable[..., Tensor], X: Inputs) -> Tensor:
    """Class probabilities (n, c) of logits (n, c), or of one logit (n, 1) of the second of two classes."""
    f = in_parts(model, X).double()
    p = f.sigmoid()
    return torch.cat([1 - p, p], 1) if f.shape[1] == 1 else f.softmax(1)


def find_temperature(f: Tensor, y: Tensor) -> float:
    """The number by which logits (n, c) or (n, 1) are divided to be likeliest."""

    def loss(t: float) -> float:
        return float(cross_entropy(f / 10.0**t, y))

    return 10.0 ** float(minimize_scalar(loss, bounds=(-1, 2), method="bounded").x)


# Adam with a search.


@dataclass(frozen=True)
class Search:
    """The settings that fine-tuning tries."""

    rates: Sequence[float]  # learning rates of Adam
    epochs: int  # at most
    patience: int = 5  # epochs without a better loss on what is held out, after which a rate is given up
    batch: int = 32  # examples of a step, at least
    steps: int = 64  # steps of an epoch, at most: with many examples a step takes more of them


@dataclass(frozen=True)
class Tuned:
    """A network after fine-tuning, and the learning rate and the epochs that were chosen."""

    model: nn.Module
    rate: float
    epochs: int


def fine_tune(
    start: Callable[[Labeled], nn.Module],
    data: Labeled,
    search: Search,
    *,
    train_mode: bool = False,
    loss: Loss = cross_entropy,
    seed: int = 0,
) -> Tuned:
    """Adam on all trainable parameters, with the rate and the epochs of the least loss on a fifth that is held out.

    Args:
        start: The network to start from, its head fitted to the given examples and to no others.
        data: Classes in turn, so that the last fifth holds all of them.
        search: What to try.
        train_mode: Whether batch norm takes its statistics from the batches.
        loss: Mean over the examples, of outputs and targets.
        seed: Seed of the order of examples.
    """
    cut = len(data) - max(1, len(data) // 5)
    part, held = data[:cut], data[cut:]
    first = start(part)
    best = (loss_of(first, held, loss), search.rates[0], 0)
    for rate in search.rates:
        model, lowest, last = copy.deepcopy(first), math.inf, 0
        for epoch in steps(model, part, rate, search, train_mode=train_mode, loss=loss, seed=seed):
            now = loss_of(model, held, loss)
            best = min(best, (now, rate, epoch))
            if now < lowest:
                lowest, last = now, epoch
            elif epoch - last >= search.patience:
                break
    _, rate, epochs = best
    model = start(data)
    for epoch in steps(model, data, rate, search, train_mode=train_mode, loss=loss, seed=seed) if epochs else ():
        if epoch == epochs:
            break
    return Tuned(model, rate, epochs)


def steps(
    model: nn.Module,
    data: Labeled,
    rate: float,
    search: Search,
    *,
    train_mode: bool,
    loss: Loss = cross_entropy,
    seed: int,
    decay: float = 0.0,
) -> Iterator[int]:
    """Train in place; yields the number of each epoch when it has ended, the model then in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate, weight_decay=decay)
    for epoch in range(1, search.epochs + 1):
        model.train(train_mode)
        size = max(search.batch, math.ceil(len(data) / search.steps))
        for index in torch.randperm(len(data), generator=generator).split(size):
            if train_mode and len(index) == 1:
                continue  # batch norm has no variance of one example
            part = data[index.to(data.y.device)]
            optimizer.zero_grad(set_to_none=True)
            loss(model(*part.X), part.y).backward()
            optimizer.step()
        model.eval()
        yield epoch


def train(
    model: Net,
    data: Labeled,
    *,
    epochs: int,
    rate: float = 1e-3,
    batch: int = 64,
    loss: Loss = cross_entropy,
    **how: Any,
) -> Net:
    """The model after so many epochs of Adam, trained in place, in eval mode; the rest as for `steps`."""
    search = Search((rate,), epochs, batch=batch)
    for _ in steps(model, data, rate, search, train_mode=True, loss=loss, **{"seed": 0, **how}):
        pass
    return model.eval()


# Images.


def of_labels(net: nn.Module, images: Tensor, y: Tensor) -> Tensor:
    """The cross entropy of a classifier: what is minimized if nothing else is said."""
    return F.cross_entropy(net(images), y)


def train_images(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    seed: int,
    test: tuple[Tensor, Tensor] | None = None,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = of_labels,
    batch: int = BATCH,
    rate: float = RATE,
    adam: bool = False,
    mirror: bool = True,
) -> list[dict[str, Any]]:
    """SGD with momentum, a rate that rises and falls once, shifted and mirrored images; on a GPU in bfloat16.

    Args:
        net: Trained in place.
        x: Images (n, 3, h, w).
        y: Their labels (n,).
        epochs: Over all images.
        seed: Seed of the order and of the shifts.
        test: Images and labels to measure the accuracy on, now and then and at the end.
        loss_of: From the network, images and labels to the mean loss.
        batch: Images of a step.
        rate: The largest.
        adam: Adam instead of SGD, in float32 and without weight decay.
        mirror: Whether images are, not where that changes their label.

    Returns:
        For each epoch the mean loss and, where it was measured, the accuracy.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if adam:
        optimizer = torch.optim.Adam(net.parameters(), rate)
    else:
        optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=DECAY, nesterov=True)
    steps = math.ceil(len(x) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps, pct_start=0.2)
    path: list[dict[str, Any]] = []
    for epoch in range(epochs):
        net.train()
        total = torch.zeros((), device=x.device)
        for index in torch.randperm(len(x), generator=generator, device=x.device).split(batch):
            images = augment(x[index], generator, mirror=mirror).contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and not adam):
                loss = loss_of(net, images, y[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(index)
        row: dict[str, Any] = {"epoch": epoch + 1, "loss": float(total) / len(x)}
        if test is not None and (epoch % 5 == 4 or epoch == epochs - 1):
            row["accuracy"] = accuracy(net, *test)
            print(f"epoch {epoch + 1}: loss {row['loss']:.3f}, test accuracy {100 * row['accuracy']:.2f} %", flush=True)
        path.append(row)
    return path


# A DCGAN.


def train_gan(
    images: Tensor, *, steps: int, seed: int, widths: tuple[int, int] = (10, 16), batch: int = 32, rate: float = 5e-4
) -> tuple[Discriminator, Generator]:
    """Both networks for gray images (n, 1, 28, 28), trained from the start; see `train_pair`.

    Args:
        images: In [-1, 1], on the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Seed of the start and of all draws.
        widths: Channels of the discriminator's first and of the generator's last but one layer.
        batch: Real and generated images per step.
        rate: Of Adam.
    """
    D = dcgan_discriminator(None, seed, width=widths[0]).to(images.device)
    G = untrained_generator(seed, width=widths[1]).to(images.device)
    train_pair(D, G, images, steps=steps, seed=seed, batch=batch, rates=(rate, rate))
    return D, G


def train_pair(
    D: nn.Module,
    G: nn.Module,
    images: Tensor,
    *,
    steps: int,
    seed: int,
    batch: int,
    rates: tuple[float, float],
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> list[tuple[float, float]]:
    """Train both in place with the losses of Radford et al., and leave them in eval mode.

    Args:
        D: From images to the number (n,) before the sigmoid.
        G: From latents (n, 100) to images.
        images: On the device to train on.
        steps: One of the discriminator and one of the generator each.
        seed: Seed of all random draws; those of images and latents are the same on every device.
        batch: Real and generated images per step.
        rates: Of Adam with beta1 = 0.5, for the discriminator and the generator.
        change: Done to all images that the discriminator sees, real and generated.

    Returns:
        The mean losses of both in each tenth of the steps.
    """
    random, device = torch.Generator().manual_seed(seed), images.device
    own = torch.Generator(device).manual_seed(seed)
    D.train(), G.train()
    for_D, for_G = (
        torch.optim.Adam(net.parameters(), rate, betas=(0.5, 0.999)) for net, rate in zip((D, G), rates, strict=True)
    )
    seen: list[Tensor] = []

    def shown(x: Tensor) -> Tensor:
        return x if change is None else change(x, own)

    for _ in range(steps):
        real = images[torch.randint(len(images), (batch,), generator=random).to(device)]
        fake = G(torch.randn(batch, LATENT, generator=random).to(device))
        # log sigmoid(f) = -softplus(-f): real images up, generated ones down, each in a batch of its own.
        loss_D = F.softplus(-D(shown(real))).mean() + F.softplus(D(shown(fake.detach()))).mean()
        step(for_D, loss_D)
        loss_G = F.softplus(-D(shown(fake))).mean()
        step(for_G, loss_G)
        seen.append(torch.stack([loss_D.detach(), loss_G.detach()]))
    D.eval(), G.eval()
    tenths = torch.stack(seen).cpu().tensor_split(min(10, steps))
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in tenths]


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
