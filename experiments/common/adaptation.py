"""Adapting a trained network to new labels: what the experiments on it share.

The network is cut in two. What the frozen bottom computes is computed once, and all contenders start above it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linnet
from experiments import common
from linnet import metrics

LINEAR, GRADIENTS = "linear", "gradient features"
SAME, EVERYTHING = "fine-tuning, same block", "fine-tuning, everything"
ERRORS = "standard errors of what is less the linear one, over test examples"

# Contender to what it is.
METHODS = {
    LINEAR: "logistic regression on the frozen features, penalty by cross-validation",
    "linear, evidence": "the same, penalty by the evidence",
    GRADIENTS: "equation 2: mean zero, balanced prior with a scale by the evidence, the mode",
    f"{GRADIENTS}, vi": "the same, the best Gaussian",
    f"{GRADIENTS}, laplace": "the same, the Gaussian at the mode",
    f"{GRADIENTS}, ntk": "the mode with the paper's scaling of the layers, prior='ntk'",
    f"{GRADIENTS}, network's mean": "the mode of a displacement from the network and its head, mean='network'",
    SAME: "Adam on the same parameters from the same start",
    EVERYTHING: "Adam on all parameters from the same start; batch norm, if any, of the batches",
}
TANGENTS: dict[str, dict[str, Any]] = {
    GRADIENTS: {"mean": "zero", "inference": "map"},
    f"{GRADIENTS}, vi": {"mean": "zero", "inference": "vi"},
    f"{GRADIENTS}, laplace": {"mean": "zero", "inference": "laplace"},
    # Its biases have hundreds of times the variance of its weights, which takes float64.
    f"{GRADIENTS}, ntk": {"mean": "zero", "inference": "map", "prior": "ntk", "dtype": "float64"},
    f"{GRADIENTS}, network's mean": {"mean": "network", "inference": "map"},
}
Inputs = tuple[Tensor, ...]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Labeled:
    """Examples as the top of a network takes them.

    Attributes:
        X: Tensors (n, ...).
        y: Labels (n,).
    """

    X: Inputs
    y: Tensor

    def __getitem__(self, index: Any) -> Labeled:
        return Labeled(tuple(x[index] for x in self.X), self.y[index])

    def __len__(self) -> int:
        return len(self.y)


@dataclass
class Clock:
    """Seconds of the blocks it was given: of the processor on a CPU (others may work beside), else by the clock."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


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


# Fine-tuning.


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Of logits (n, c), or of one logit (n, 1) of the second of two classes."""
    return F.binary_cross_entropy_with_logits(f[:, 0], y.to(f.dtype)) if f.shape[1] == 1 else F.cross_entropy(f, y)


@dataclass(frozen=True)
class Search:
    """What fine-tuning tries.

    Attributes:
        rates: Learning rates of Adam.
        epochs: At most.
        patience: Epochs without a better loss on what is held out, after which a rate is given up.
        batch: Examples of a step, at least.
        steps: Of an epoch, at most: with many examples a step takes more of them.
    """

    rates: Sequence[float]
    epochs: int
    patience: int = 5
    batch: int = 32
    steps: int = 64


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
        seed: Of the order of examples.
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
) -> Iterator[int]:
    """Train in place; yields the number of each epoch when it has ended, the model then in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
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


@torch.no_grad()
def in_parts(fn: Callable[..., Tensor], X: Inputs, batch: int = 250) -> Tensor:
    """What a network or another function makes of inputs (n, ...), a few at a time.

    >>> in_parts(torch.neg, (torch.arange(3),), 2)
    tensor([ 0, -1, -2])
    """
    return torch.cat([fn(*part) for part in zip(*(x.split(batch) for x in X), strict=True)])


def loss_of(model: nn.Module, data: Labeled, loss: Loss = cross_entropy) -> float:
    return float(loss(in_parts(model, data.X), data.y))


def probabilities(model: nn.Module, X: Inputs) -> Tensor:
    f = in_parts(model, X).double()
    p = f.sigmoid()
    return torch.cat([1 - p, p], 1) if f.shape[1] == 1 else f.softmax(1)


def errors(p: Tensor, reference: Tensor, y: Tensor) -> dict[str, float]:
    """Standard errors, over examples, of differences of accuracy and NLL between two that predict the same ones.

    >>> p, q = torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    >>> {name: round(error, 3) for name, error in errors(p, q, torch.tensor([0, 1])).items()}
    {'accuracy': 0.5, 'nll': 0.203}
    """
    q, own = reference.to(p.device), y.to(p.device)[:, None]
    right = [(one.argmax(1, keepdim=True) == own).double()[:, 0] for one in (p, q)]
    lost = [-one.gather(1, own).log()[:, 0] for one in (p, q)]
    return {name: common.spread((a - b).tolist())["error"] for name, (a, b) in (("accuracy", right), ("nll", lost))}


# Contenders.


@dataclass(frozen=True)
class Whole:
    """The network from its inputs.

    Attributes:
        with_head: A copy of it with the head.
        train: The inputs of the labeled examples.
        test: Those of the examples to predict.
    """

    with_head: Callable[[nn.Module], nn.Module]
    train: Labeled
    test: Inputs


@dataclass(frozen=True)
class Contest:
    """One draw of labels, and what all contenders are given.

    Attributes:
        top: The part of the network that may adapt.
        train: Labeled examples, classes in turn.
        test: Examples to predict.
        classes: How many.
        device: Where everything is.
        search: Of fine-tuning.
        seed: Of everything drawn.
        dtype: Of linnet's computations where a contender does not say.
        reference: Probabilities (m, c) by which differences of scores get their errors.
    """

    top: nn.Module
    train: Labeled
    test: Labeled
    classes: int
    device: str
    search: Search
    seed: int
    dtype: str = "auto"
    reference: Tensor | None = None

    def head(self, data: Labeled, penalty: Any = "cv") -> nn.Module:
        """The top with a head fitted to the features of the data."""
        X = data.X if len(data.X) > 1 else data.X[0]
        y, classes = data.y.cpu(), list(range(self.classes))
        given = {"classes": classes, "penalty": penalty, "seed": self.seed, "progress": False}
        return linnet.attach_head(self.top, X, y, **given)

    def linear(self, penalty: Any = "cv") -> tuple[dict[str, float], nn.Module]:
        """Logistic regression on the frozen features, and the network with it as its head."""
        clock = Clock(self.device)
        with clock("seconds"):
            model = self.head(self.train, penalty)
        with clock("predicting"):
            p = probabilities(model, self.test.X)
        return self.scores(p, clock, penalty=float(linnet.heads.head_of(model).penalty_)), model

    def tangent(self, headed: nn.Module, **settings: Any) -> dict[str, Any]:
        """Activation and gradient features of the network with its head."""
        clock = Clock(self.device)
        X, at = ((x if len(x) > 1 else x[0]) for x in (self.train.X, self.test.X))
        with clock("seconds"):
            given: dict[str, Any] = {"dtype": self.dtype, "seed": self.seed, "progress": False} | settings
            clf = linnet.TangentClassifier(headed, **given)
            clf.fit(X, self.train.y.cpu())
        with clock("predicting"):
            p = torch.as_tensor(clf.predict_proba(at))
        found = {"solver": clf.solver_, "passes": clf.passes_, "scale": next(iter(clf.scales_.values()), math.nan)}
        return self.scores(p, clock, **found)

    def tuned(self, penalty: float) -> dict[str, Any]:
        """Fine-tuning of the top and its head."""
        clock = Clock(self.device)
        with clock("seconds"):
            found = fine_tune(lambda data: self.head(data, penalty), self.train, self.search, seed=self.seed)
        with clock("predicting"):
            p = probabilities(found.model, self.test.X)
        return self.scores(p, clock, rate=found.rate, epochs=found.epochs)

    def scores(self, p: Tensor, clock: Clock, **extra: Any) -> dict[str, Any]:
        found: dict[str, Any] = metrics.classification(p.double(), self.test.y)
        if self.reference is not None:
            found[ERRORS] = errors(p.double(), self.reference, self.test.y)
        return {**found, **clock.seconds, **extra}

    def everything(self, whole: Whole, penalty: float) -> dict[str, Any]:
        """Fine-tuning of the whole network with the head."""
        clock = Clock(self.device)

        def start(data: Labeled) -> nn.Module:
            """The network with the head of the first so many examples, of which data are the inputs."""
            head = linnet.heads.head_of(self.head(self.train[: len(data)], penalty))
            return whole.with_head(head)

        with clock("seconds"):
            found = fine_tune(start, whole.train, self.search, train_mode=True, seed=self.seed)
        with clock("predicting"):
            p = probabilities(found.model, whole.test)
        return self.scores(p, clock, rate=found.rate, epochs=found.epochs)

    def all(self, limits: Mapping[str, int], whole: Whole) -> dict[str, dict[str, Any]]:
        """Scores of all contenders.

        Args:
            limits: Up to how many labels a contender takes part; those not named always do.
            whole: For fine-tuning of everything.
        """
        takes_part = {name for name in METHODS if len(self.train) <= limits.get(name, len(self.train))}
        linear, headed = self.linear()
        rest = replace(self, reference=probabilities(headed, self.test.X))
        out = {LINEAR: linear, "linear, evidence": rest.linear("evidence")[0]}
        adapted = {name: rest.tangent(headed, **given) for name, given in TANGENTS.items() if name in takes_part}
        if SAME in takes_part:
            adapted[SAME] = rest.tuned(linear["penalty"])
        if EVERYTHING in takes_part:
            adapted[EVERYTHING] = rest.everything(whole, linear["penalty"])
        for one in adapted.values():
            one["seconds"] += linear["seconds"]  # the head comes first
        return out | adapted
