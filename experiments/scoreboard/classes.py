"""Methods for classification: from a task to the class probabilities of its test examples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import linnet
from experiments.common.training import Labeled, Search, find_temperature, fine_tune, in_parts, probabilities
from experiments.scoreboard.tasks import Task

SEARCH = Search((1e-2, 3e-3, 1e-3, 3e-4), 30)
"""Learning rates of Adam and the most epochs that fine-tuning tries."""


def start_of(task: Task, member: int) -> Callable[[Labeled], nn.Module]:
    """From examples to the network that has seen them alone: the network itself, or the network with a head."""
    return lambda data: copy.deepcopy(task.networks[member]) if task.start is None else task.start(member, data)


def keep_networks(task: Task, count: int) -> Tensor:
    """The networks as they stand, their probabilities averaged."""
    return torch.stack([probabilities(net, task.test.X) for net in task.networks[:count]]).mean(0)


def find_held(task: Task) -> tuple[nn.Module, Labeled]:
    """A network and examples that the network has not seen."""
    if task.held is not None or task.start is None:
        return task.networks[0], task.train if task.held is None else task.held
    cut = len(task.train) - len(task.train) // 5
    return task.start(0, task.train[:cut]), task.train[cut:]


def fit_temperature(task: Task) -> Tensor:
    """The network's logits over one number, which is likeliest for examples that the network has not seen."""
    model, held = find_held(task)
    temperature = find_temperature(in_parts(model, held.X), held.y)
    return probabilities(lambda *X: task.networks[0](*X) / temperature, task.test.X)


def fit_last_layer(task: Task) -> Tensor:
    """Logistic regression on the features, penalty by cross-validation."""
    given = {"classes": list(range(task.classes)), "seed": task.seed, "progress": False}
    return probabilities(linnet.attach_head(task.networks[0], task.train.X[0], task.train.y, **given), task.test.X)


def tune_networks(task: Task, count: int) -> Tensor:
    """Adam on all weights, rate and epochs by a fifth of the labels; probabilities of the networks averaged.

    Where there is one network alone, the networks start alike and differ in the order of the examples.
    """
    found = []
    for i in range(count):
        start = start_of(task, i % len(task.networks))
        model = fine_tune(start, task.train, SEARCH, seed=1000 * task.seed + i).model
        found.append(probabilities(model, task.test.X))
    return torch.stack(found).mean(0)


def fit_linnet(task: Task, model: Any) -> Tensor:
    """`TangentClassifier` on new examples, `Laplace` on the networks' own."""
    X, y = inputs_of(task.train), task.train.y
    if task.own:
        fitted = linnet.Laplace(model, progress=False, seed=task.seed).fit(X, y).tune()
    else:
        fitted = linnet.TangentClassifier(model, progress=False, seed=task.seed).fit(X, y)
    return predict(fitted, task)


def adapt(task: Task) -> Tensor:
    """`linnet.adapt`, which attaches a head itself where the network has none for the labels."""
    model = task.networks[0] if task.bare is None else task.bare
    return predict(linnet.adapt(model, inputs_of(task.train), task.train.y, seed=task.seed), task)


def predict(estimator: Any, task: Task) -> Tensor:
    return torch.as_tensor(estimator.predict_proba(inputs_of(task.test))).double()


def inputs_of(data: Labeled) -> Any:
    return data.X[0] if len(data.X) == 1 else data.X
