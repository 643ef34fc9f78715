"""Adapting a trained network to new labels: the contenders of the experiments on it.

The network is cut in two. What the frozen bottom computes is computed once, and all contenders start above it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments import common
from experiments.common import statistics
from experiments.common.training import Inputs, Labeled, Search, fine_tune, probabilities
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


class Top(nn.Module):
    """The last blocks of a network and a head, on the activations (n, d, h, w) below them."""

    def __init__(self, blocks: Iterable[nn.Module], linear: nn.Module) -> None:
        super().__init__()
        self.blocks, self.linear = nn.Sequential(*blocks), linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.blocks(x).mean((2, 3)))


def errors(p: Tensor, reference: Tensor, y: Tensor) -> dict[str, float]:
    """Standard errors, over examples, of differences of accuracy and NLL between two that predict the same ones.

    >>> p, q = torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    >>> {name: round(error, 3) for name, error in errors(p, q, torch.tensor([0, 1])).items()}
    {'accuracy': 0.5, 'nll': 0.203}
    """
    q, own = reference.to(p.device), y.to(p.device)[:, None]
    right = [(one.argmax(1, keepdim=True) == own).double()[:, 0] for one in (p, q)]
    lost = [-one.gather(1, own).log()[:, 0] for one in (p, q)]
    both = {"accuracy": right, "nll": lost}
    return {name: statistics.average((a - b).tolist())["error"] for name, (a, b) in both.items()}


@dataclass(frozen=True)
class Whole:
    """The network from its inputs."""

    with_head: Callable[[nn.Module], nn.Module]  # makes a copy of the network with the head
    train: Labeled  # the inputs of the labeled examples
    test: Inputs  # those of the examples to predict


@dataclass(frozen=True)
class Contest:
    """One draw of labels, and what all contenders are given."""

    top: nn.Module  # the part of the network that may adapt
    train: Labeled  # labeled examples, classes in turn
    test: Labeled  # examples to predict
    classes: int  # how many
    device: str  # where everything is
    search: Search  # what fine-tuning tries
    seed: int  # seed of everything that is drawn
    dtype: str = "auto"  # dtype of linnet's computations where a contender does not say
    reference: Tensor | None = None  # probabilities (m, c) by which differences of scores get their errors

    def head(self, data: Labeled, penalty: Any = "cv") -> nn.Module:
        """The top with a head fitted to the features of the data."""
        X = data.X if len(data.X) > 1 else data.X[0]
        y, classes = data.y.cpu(), list(range(self.classes))
        given = {"classes": classes, "penalty": penalty, "seed": self.seed, "progress": False}
        return linnet.attach_head(self.top, X, y, **given)

    def linear(self, penalty: Any = "cv") -> tuple[dict[str, float], nn.Module]:
        """Logistic regression on the frozen features, and the network with it as its head."""
        clock = common.Clock(self.device)
        with clock("seconds"):
            model = self.head(self.train, penalty)
        with clock("predicting"):
            p = probabilities(model, self.test.X)
        return self.scores(p, clock, penalty=float(linnet.heads.head_of(model).penalty_)), model

    def tangent(self, headed: nn.Module, **settings: Any) -> dict[str, Any]:
        """Activation and gradient features of the network with its head."""
        clock = common.Clock(self.device)
        X, at = ((x if len(x) > 1 else x[0]) for x in (self.train.X, self.test.X))
        with clock("seconds"):
            given: dict[str, Any] = {"dtype": self.dtype, "seed": self.seed, "progress": False} | settings
            clf = linnet.TangentClassifier(headed, **given)
            clf.fit(X, self.train.y.cpu())
        with clock("predicting"):
            p = torch.as_tensor(clf.predict_proba(at))
        found = {"solver": clf.solver_, "passes": clf.passes_, "scale": next(iter(clf.scales_.values()), math.nan)}
        return self.scores(p, clock, **found)

    def tune(self, penalty: float, whole: Whole | None = None) -> tuple[dict[str, Any], nn.Module]:
        """Fine-tuning of the top and its head, or of the whole network with the head; and what it finds."""
        clock = common.Clock(self.device)

        def start(data: Labeled) -> nn.Module:
            """The network with the head of the first so many examples, of which data are the inputs."""
            headed = self.head(self.train[: len(data)], penalty)
            return headed if whole is None else whole.with_head(linnet.heads.head_of(headed))

        train, test = (self.train, self.test.X) if whole is None else (whole.train, whole.test)
        with clock("seconds"):
            found = fine_tune(start, train, self.search, train_mode=whole is not None, seed=self.seed)
        with clock("predicting"):
            p = probabilities(found.model, test)
        return self.scores(p, clock, rate=found.rate, epochs=found.epochs), found.model

    def scores(self, p: Tensor, clock: common.Clock, **extra: Any) -> dict[str, Any]:
        found: dict[str, Any] = metrics.classification(p.double(), self.test.y)
        if self.reference is not None:
            found[ERRORS] = errors(p.double(), self.reference, self.test.y)
        return {**found, **clock.seconds, **extra}

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
            adapted[SAME] = rest.tune(linear["penalty"])[0]
        if EVERYTHING in takes_part:
            adapted[EVERYTHING] = rest.tune(linear["penalty"], whole)[0]
        for one in adapted.values():
            one["seconds"] += linear["seconds"]  # the head comes first
        return out | adapted


def run_contests(
    parts: tuple[nn.Module, Callable[..., Inputs], Callable[[nn.Module], nn.Module]],
    train: Labeled,
    test: Labeled,
    options: argparse.Namespace,
    *,
    limits: Mapping[str, int],
    dtype: Callable[[int], str],
    **given: Any,
) -> Iterator[dict[str, Any]]:
    """All contenders on one draw of labels and test examples, of which smaller numbers of labels are the first.

    Args:
        parts: The top of the network, the function below it, and a copy of the network with a head.
        train: Inputs of the network and labels, classes in turn.
        test: The same to predict.
        options: With the numbers of labels, `sizes`, and the device.
        limits: Up to how many labels a contender takes part; those not named always do.
        dtype: Of linnet's computations, by the number of labels.
        given: The rest of a contest.
    """
    (top, bottom, with_head), clock = parts, common.Clock(options.device)
    with clock("bottom"), torch.no_grad():
        A, A_new = bottom(*train.X), bottom(*test.X)
    for n in options.sizes:
        near, far = Labeled(A, train.y)[:n], Labeled(A_new, test.y)
        contest = Contest(top, near, far, device=options.device, dtype=dtype(n), **given)
        seconds = clock.seconds["bottom"] * (n + len(test)) / (len(train) + len(test))
        scores = contest.all(limits, Whole(with_head, train[:n], test.X))
        yield {"labels": n, "bottom seconds": seconds, "contenders": scores}
