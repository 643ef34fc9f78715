"""What a network is to predict: classes or numbers, and which class is which output."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from linnet._common import messages
from linnet._estimator import example_codes, find_better_order, find_output_names
from linnet.cli import model_source
from linnet.cli.data_files import Examples, Reading, read_for_network
from linnet.cli.data_files.tables import parse_labels
from linnet.cli.network_output import NetworkOutput, describe_outputs
from linnet.cli.options import FitOptions
from linnet.cli.terminal import Printer, UsageError, blame_input
from linnet.data import as_source
from linnet.network import checks

REPEATED = 0.01
"""Share of test inputs that are training inputs above which the command says so."""

NAMED = "classification", "--classes names them"
"""The task where the classes are named, and why."""


@dataclass(frozen=True)
class PredictionTask:
    """What the network is to predict."""

    kind: str  # "classification" or "regression"
    why: str  # how linnet knows the kind
    classes: tuple[Any, ...]  # label of each class, sorted or as they are named; none for regression
    outputs: int  # number of outputs of the network
    new_head: bool  # whether the network needs a new head
    named_by: str = ""  # who says which output is which class: "--classes" or "the model"; "" for nobody

    @property
    def output_labels(self) -> list[Any]:
        """The label of each output of a network that keeps its head; none for regression."""
        if self.named_by:
            return list(self.classes)
        if self.classes and _number_outputs(self.classes, self.outputs):
            return list(range(max(2, self.outputs)))
        return list(self.classes)


@dataclass(frozen=True)
class FitData:
    """The networks, the data in their precision, how they were read, and what is to be predicted."""

    models: list[nn.Module]  # one, or those of an ensemble
    train: Examples
    test: Examples | None
    reading: Reading
    task: PredictionTask
    output: NetworkOutput  # how the outputs of the networks are read
    source: Examples | None = None  # data that the network was trained on

    @property
    def model(self) -> nn.Module:
        """The network; the first one of an ensemble."""
        return self.models[0]

    @property
    def y(self) -> np.ndarray:
        """Training targets: labels (n,), or numbers (n,) or (n, c)."""
        return self._targets(self.train)

    def _targets(self, data: Examples) -> np.ndarray:
        assert data.y is not None
        return data.y.reshape(-1) if self.task.kind == "classification" else data.y.astype(float)

    @property
    def fitted_source(self) -> tuple[Any, np.ndarray] | None:
        """Inputs and targets of the data that the network was trained on."""
        return None if self.source is None else (self.source.X, self._targets(self.source))

    @property
    def source_count(self) -> int:
        """How many examples the network was trained on, of those that are given."""
        return 0 if self.source is None else self.source.n

    @property
    def target_count(self) -> int:
        """How many numbers are predicted."""
        return self.y.shape[1] if self.y.ndim == 2 else 1

    @property
    def targets(self) -> list[str]:
        """Names of the numbers that are predicted."""
        names, count = self.reading.targets, self.target_count
        return list(names) if len(names) == count else [str(j) for j in range(count)]

    @property
    def what(self) -> str:
        """What is predicted, in words."""
        if self.task.classes:
            return f"{len(self.task.classes)} classes"
        return "a number" if self.target_count == 1 else f"{self.target_count} numbers"


def load(options: FitOptions, printer: Printer) -> FitData:
    """Make the network, read the data, and find out what is to be predicted."""
    reading, files = options.reading, (options.train, options.test)
    how: Any = {"seed": options.seed, "device": options.device, "random_weights": options.random_weights}
    models = model_source.load_networks(options.model, options.weights, output=options.output, **how)
    model, standardization = models[0], options.standardization
    train, settled = read_for_network(files[0], reading, model, labeled=True, standardization=standardization)
    printer.say(f"{files[0]}: {train.description}")
    test = None
    if files[1] is not None:
        test, _ = read_for_network(files[1], settled, model, labeled=True)
        printer.say(f"{files[1]}: {test.description}")
        _warn_of_shared_examples(model, train, test, (files[0], files[1]))
    task = find_task(model, train, asked=reading.task, head=options.head, names=options.classes)
    check_order(models, task, train)
    output = _scale_outputs(options, models, task, train, settled, printer)
    source = None
    if options.source is not None:
        if task.new_head:
            raise UsageError(
                "--source is for a network that keeps its outputs: the source data have targets for these, and a new "
                "head has other outputs. Leave --source out."
            )
        source, _ = read_for_network(options.source, settled, model, labeled=True)
        printer.say(f"{options.source}: {source.description}, which the network was trained on")
    for path, other in ((files[1], test), (options.source, source)):
        if other is not None and other.y is not None:
            check_alike(model, task, train, other, (str(files[0]), str(path)))
    printer.say(task.kind if reading.task != "auto" else f"{task.kind}, because {task.why}; --task can say otherwise")
    if len(models) > 1:
        printer.say(f"an ensemble of {len(models)} networks")
    return FitData(models, train, test, settled, task, output, source)


def _warn_of_shared_examples(model: nn.Module, train: Examples, test: Examples, files: tuple[Path, Path]) -> None:
    """Warn where inputs of the test data are those of training data. A few rows of a table are often equal."""
    if train.texts and test.texts:
        shared = np.isin(test.texts, train.texts)
    else:
        codes = [example_codes(as_source(data.X, model.forward)).cpu().numpy() for data in (train, test)]
        shared = np.isin(codes[1], codes[0])
    if shared.mean() > REPEATED:
        warnings.warn(
            f"{shared.sum():,} of the {test.n:,} examples of {files[1]} are in {files[0]} too. Metrics of these "
            "examples say nothing about new data.",
            stacklevel=2,
        )


def _scale_outputs(
    options: FitOptions,
    models: list[nn.Module],
    task: PredictionTask,
    train: Examples,
    reading: Reading,
    printer: Printer,
) -> NetworkOutput:
    """Make the networks give targets in their units, and say how columns and targets are scaled."""
    standardization = options.standardization
    if reading.center is not None:
        printer.say(f"columns are standardized by {reading.scaled_by or options.train}")
    if task.new_head or task.kind == "classification":
        if standardization.targets:
            raise UsageError(
                "--scale-target is for a network that gives standardized numbers and keeps its head: "
                + ("a new head is fitted to the targets as they are." if task.new_head else "classes have no scale.")
                + " Leave --scale-target out."
            )
        return options.output
    scales = standardization.find_targets(train, reading)
    if scales is None:
        return options.output
    scaling = NetworkOutput(None, scales.mean, scales.std)
    for model in models:
        scaling.attach(model)
    printer.say(f"the outputs of the network are scaled back by {reading.scaled_by or options.train}")
    return replace(options.output, center=scales.mean, spread=scales.std)


def check_alike(
    model: nn.Module, task: PredictionTask, train: Examples, other: Examples, names: tuple[str, str]
) -> None:
    """Raise unless other data have targets as the training data have; ``names`` are those of both files."""
    assert train.y is not None and other.y is not None
    count_outputs(model, other, names[1], keep=not task.new_head)
    if task.kind == "classification":
        classes = list(task.classes) if task.new_head else task.output_labels
        index_labels(other.y.reshape(-1), classes, names[1])
    elif other.y.dtype.kind not in "biuf" or other.y.shape[1:] != train.y.shape[1:]:
        raise UsageError(f"{names[1]}: the targets must be numbers of the same shape as in {names[0]}.")


def guess_kind(y: np.ndarray, asked: str) -> tuple[str, str]:
    """Classification or regression, and why.

    >>> guess_kind(np.array(["a", "b"]), "auto")
    ('classification', 'the targets are text')
    >>> guess_kind(np.array([0.5, 1.0]), "auto")[0], guess_kind(np.array([3, 4, 3, 4]), "auto")[0]
    ('regression', 'classification')
    """
    text = y.dtype.kind not in "biuf"
    if asked == "regression" and text:
        raise UsageError(f"--task regression needs numbers, but the targets are text such as {str(y.flat[0])!r}.")
    if asked != "auto":
        return asked, "--task says so"
    if text:
        return "classification", "the targets are text"
    if y.dtype.kind == "b" and y.ndim == 1:
        return "classification", "the targets are true or false"
    if y.ndim == 2 and y.shape[1] > 1:
        return "regression", "there are several targets"
    if y.dtype.kind == "f":
        return "regression", "the targets are numbers with fractions"
    count = len(np.unique(y))
    if count <= 50 and 2 * count <= y.size:  # few whole numbers, each of which occurs twice on average
        return "classification", f"the targets are {count} whole numbers"
    return "regression", f"the targets are {count} different whole numbers"


def find_task(model: nn.Module, data: Examples, *, asked: str, head: str, names: Sequence[str] = ()) -> PredictionTask:
    """What to predict, and whether the outputs of the network fit.

    Args:
        model: The network.
        data: Data with targets.
        asked: "auto", "classification" or "regression".
        head: "auto" for a new head where the number of outputs is not the number of classes or targets; "new" for a
            new head in any case; "keep" where labels are numbers of outputs, although some of these do not occur.
        names: Labels of the outputs of the network, in order; none where they are not given.
    """
    assert data.y is not None
    kind, why = guess_kind(data.y, asked) if asked != "auto" or not names else NAMED
    y = data.y[:, 0] if data.y.ndim == 2 and data.y.shape[1] == 1 else data.y
    outputs = count_outputs(model, data, keep=head == "keep")
    guessed = kind == "classification" and asked == "auto" and y.dtype.kind in "iu" and head != "new" and not names
    if guessed and outputs == 1 and len(np.unique(y)) > 2:  # one output is the logit of two classes, or a number
        kind, why = "regression", "the network has one output and the targets are whole numbers"
    if kind == "regression" and names:
        raise UsageError(f"--classes names classes, and the targets are numbers ({why}). Leave --classes out.")
    if kind == "regression":
        needed = y.shape[1] if y.ndim == 2 else 1
        return PredictionTask(kind, why, (), outputs, head == "new" or needed != outputs)
    if y.ndim != 1:
        raise UsageError(f"Classes need one target for each example, but there are {y.shape[1]}. Give one --target.")
    if y.dtype.kind == "f" and bool((y != np.round(y)).any()):
        option = "--classes names" if names and asked == "auto" else "--task classification needs"
        raise UsageError(f"{option} labels, but the targets are numbers with fractions. Leave the option out.")
    classes = tuple(np.unique(y).tolist())
    named, named_by = _name_outputs(model, classes, outputs, names, head=head)
    if named:
        return PredictionTask(kind, why, named, outputs, False, named_by)
    if len(classes) < 2:
        raise UsageError(f"Classification needs at least two classes, but all targets are {classes[0]!r}.")
    fits = outputs > 0 and (len(classes) == max(2, outputs) or (head == "keep" and _number_outputs(classes, outputs)))
    return PredictionTask(kind, why, classes, outputs, head == "new" or not fits)


def _name_outputs(
    model: nn.Module, classes: tuple[Any, ...], outputs: int, names: Sequence[str], *, head: str
) -> tuple[tuple[Any, ...], str]:
    """The label of each output, where the user or a Hugging Face model says so, and who says so."""
    count = max(2, outputs)
    if names:
        given: tuple[Any, ...] = tuple(names if isinstance(classes[0], str) else parse_labels(names).tolist())
        unknown = [str(label) for label in classes if label not in given]
        if len(given) != count or not outputs:
            raise UsageError(
                f"--classes has {len(given)} labels, and the network has {outputs} outputs. Name each output once."
            )
        if unknown:
            raise UsageError(f"--classes has no {messages.listing(unknown)}; the data have such labels.")
        return given, "--classes"
    known = find_output_names(model, count)
    if known is None or head == "new" or not isinstance(classes[0], str):
        return (), ""
    if set(classes) <= set(known):
        return tuple(known), "the model"
    if len(classes) == count:
        raise UsageError(
            f"The model names its outputs {', '.join(known[:12])}, and the labels are {', '.join(classes[:12])}. Give "
            "the labels in the order of the outputs with --classes. For other classes than the model's, linnet adapt "
            "fits a new head with --head new."
        )
    return (), ""


def check_order(models: Sequence[nn.Module], task: PredictionTask, data: Examples, *, most: int = 500) -> None:
    """Raise where the outputs of the first network agree with the labels in another order alone.

    Labels that are words or other numbers than those of outputs are taken in their sorted order, which is a guess.
    """
    labels = task.output_labels
    if task.kind != "classification" or task.new_head or task.named_by or _number_outputs(task.classes, task.outputs):
        return
    assert data.y is not None
    chosen = np.linspace(0, data.n - 1, min(most, data.n)).astype(int)
    device, found = next(models[0].parameters()).device, []
    with blame_input("The network does not take the training data: ", data.hint), torch.no_grad():
        for batch in as_source(data.take(chosen), models[0].forward).batches(50):
            f = checks.output_tensor(models[0](*batch.to(device).args, **batch.to(device).kwargs))
            f = f.reshape(len(f), -1)
            found.append((f[:, 0] > 0).long() if f.shape[1] == 1 else f.argmax(1))
    predicted = torch.cat(found).cpu().numpy()
    codes = index_labels(data.y.reshape(-1)[chosen], labels, "The training data")
    order = find_better_order(predicted, codes, len(labels))
    if order is None:
        return
    own, best = (float((np.asarray(o)[predicted] == codes).mean()) for o in (range(len(labels)), order))
    named = ",".join(str(labels[i]) for i in order)
    raise UsageError(
        f"Which output is which class? In the order {', '.join(map(str, labels))} the network has {own:.0%} of "
        f"{len(codes)} training labels right, and in another order {best:.0%}. If the outputs are these classes, give "
        f"their order: --classes {named}. If the network was trained on other classes, linnet adapt fits a new head "
        "with --head new."
    )


def _number_outputs(classes: tuple[Any, ...], outputs: int) -> bool:
    """Whether the labels are numbers of outputs. One output is the logit of the second of two classes."""
    return all(type(label) is int and 0 <= label < max(2, outputs) for label in classes)


def index_labels(y: np.ndarray, classes: list[Any], what: str) -> np.ndarray:
    """The position of each label in the list of classes."""
    known = {label: i for i, label in enumerate(classes)}
    unknown = [str(label) for label in np.unique(y).tolist() if label not in known]
    if unknown:
        raise UsageError(
            f"{what} has labels that are not among the classes: {messages.listing(unknown)}. The classes are "
            f"{messages.listing([str(label) for label in classes], limit=12)}."
        )
    return np.array([known[label] for label in y.tolist()])


def count_outputs(model: nn.Module, data: Examples, what: str = "these data", *, keep: bool = True) -> int:
    """How many outputs the network has, from a call on two examples of ``what``.

    Zero where the network returns something else than outputs (n, c), unless ``keep``: the network then needs a head.
    """
    device = next(model.parameters()).device
    with blame_input(f"The network does not take {what}: ", data.hint):
        batch = next(iter(as_source(data.first(2), model.forward).batches(2))).to(device)
        with torch.no_grad():
            raw = model(*batch.args, **batch.kwargs)
    try:
        out = checks.output_tensor(raw)
    except TypeError as error:
        if not keep:
            return 0
        raise UsageError(
            f"The network returns {describe_outputs(raw)}. linnet needs one tensor of outputs: name it with --output, "
            "by its position or its name."
        ) from error
    return 1 if out.ndim == 1 else out.shape[1]
