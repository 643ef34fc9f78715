"""What `linnet adapt` and `linnet uncertainty` share: files and settings, reading, testing, writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnet.cli import model_source, outputs, run_folder
from linnet.cli.commands.predictions import Predicted, before, outcome_of, predict
from linnet.cli.data_files.examples import Examples, Reading, settled
from linnet.cli.planning import Chosen
from linnet.cli.run_folder import Run
from linnet.cli.task import Goal, classes_of, goal_of, outputs_of, positions
from linnet.cli.terminal import Printer, UsageError, record
from linnet.probability.priors import PriorSpec
from linnet.report import Report, save
from linnet.report.build import NO_TEST

REPORT = "report.html"


@dataclass(frozen=True)
class Files:
    """Where things are.

    Attributes:
        model: As --model takes it.
        weights: A file with weights, or None.
        train: Data.
        test: Data, or None.
        out: Folder for the results.
        force: Whether they replace earlier ones.
    """

    model: str
    weights: Path | None
    train: Path
    test: Path | None
    out: Path
    force: bool = False


@dataclass(frozen=True)
class Settings:
    """How to fit; see `linnet.TangentClassifier`, `linnet.TangentRegressor` and `linnet.Laplace`.

    Attributes:
        chosen: Which parameters.
        prior: On them.
        inference: "auto", "vi", "laplace" or "map"; for classes.
        mean: "auto", "network" or "zero".
        head: "auto", "new" or "keep"; see `linnet.cli.task.goal_of`.
        features: What a new head reads; None for what the last layer is given.
        standardize: Whether the columns are standardized.
        seed: Of everything that is drawn.
        device: Where.
    """

    chosen: Chosen
    prior: PriorSpec = "balanced"
    inference: str = "auto"
    mean: str = "auto"
    head: str = "auto"
    features: str | None = None
    standardize: bool = False
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Loaded:
    """The network, the data in its precision, how they were read, and what is to be predicted."""

    model: nn.Module
    train: Examples
    test: Examples | None
    reading: Reading
    goal: Goal

    @property
    def targets(self) -> list[str]:
        """Names of the numbers that are predicted."""
        assert self.train.y is not None
        count = self.train.y.shape[1] if self.train.y.ndim == 2 else 1
        names = self.reading.targets
        return list(names) if len(names) == count else [str(j) for j in range(count)]


def load(files: Files, reading: Reading, settings: Settings, printer: Printer) -> Loaded:
    """Make the network, read the data, and find out what is to be predicted."""
    asked = reading.task
    model = model_source.network(files.model, files.weights, seed=settings.seed, device=settings.device)
    train, reading = settled(files.train, reading, model, labeled=True, standardize=settings.standardize)
    printer.say(f"{files.train}: {train.what}")
    test = None
    if files.test is not None:
        test, _ = settled(files.test, reading, model, labeled=True)
        printer.say(f"{files.test}: {test.what}")
    goal = goal_of(model, train, task=asked, head=settings.head)
    _check_test(model, goal, train, test, files)
    printer.say(f"{goal.task}, since {goal.why}; --task says otherwise" if asked == "auto" else goal.task)
    return Loaded(model, train, test, reading, goal)


def _check_test(model: nn.Module, goal: Goal, train: Examples, test: Examples | None, files: Files) -> None:
    """Raise where the network does not take the test data, or where their targets are not those that it predicts."""
    if test is None or test.y is None or train.y is None:
        return
    outputs_of(model, test, str(files.test))
    if goal.task == "classification":
        classes = list(goal.classes) if goal.new_head else classes_of(goal)
        positions(test.y.reshape(-1), classes, str(files.test))
    elif test.y.dtype.kind not in "biuf" or test.y.shape[1:] != train.y.shape[1:]:
        raise UsageError(f"{files.test}: the targets must be numbers of the shape that {files.train} has.")


@dataclass(frozen=True)
class Tested:
    """What test data say.

    Attributes:
        told: Predictions, or None without test data.
        scores: Metrics by method.
        outcome: The predictions for a report.
    """

    told: Predicted | None
    scores: dict[str, dict[str, float]]
    outcome: Any


def tested(
    printer: Printer, found: Any, loaded: Loaded, classes: list[Any], *, names: tuple[str, str], what: str
) -> Tested:
    """Predictions for the test data, and the metrics of the network alone and of the estimator; without, nothing.

    Args:
        printer: Where the table goes.
        found: The fitted estimator.
        loaded: With the test data.
        classes: The label of each class.
        names: Of the rows of the table.
        what: The test data's name.
    """
    test = loaded.test
    if test is None or test.y is None:
        return Tested(None, {}, NO_TEST)
    with printer.step(f"Test on {test.n:,} examples"):
        told = predict(found, test, task=loaded.goal.task, classes=classes, targets=loaded.targets)
        alone = found.lin_.jacobian(test.X, progress=False).outputs()
        scores = {
            names[0]: before(alone, test.y, classes, what),
            names[1]: told.scores(test.y, classes, what),
        }
        printer.scores(scores)
        outcome = outcome_of(told, alone, test.y, classes, loaded.targets)
    return Tested(told, scores, outcome)


def run_of(command: str, file: str, files: Files, settings: Settings, loaded: Loaded, **more: Any) -> Run:
    """What a later `linnet predict` needs to know.

    Args:
        command: That made the run.
        file: Of the saved estimator.
        files: Of the network and the data.
        settings: With the seed.
        loaded: How the data were read, and what is predicted.
        more: The classes, and whatever else `Run` keeps.
    """
    given = {"task": loaded.goal.task, "targets": loaded.targets} | more
    return run_folder.make_run(command, file, files.model, files.weights, loaded.reading, seed=settings.seed, **given)


def write(
    folder: Path,
    found: Any,
    model: nn.Module,
    kept: Run,
    told: Predicted | None,
    details: Mapping[str, Any],
    page: Report | None,
) -> list[str]:
    """The saved estimator, predictions.csv, run.json, metrics.json and report.html; their names.

    Args:
        folder: Where to.
        found: The fitted estimator.
        model: Its network.
        kept: How it was made.
        told: Predictions for the test data, or None.
        details: What metrics.json says beside the record of the run.
        page: The report, or None where it could not be made.
    """
    found.save(folder / kept.file)
    if told is not None:
        outputs.write_csv(folder / "predictions.csv", told.columns)
    run_folder.save_head(folder, kept, model)
    device = next(model.parameters()).device
    outputs.write_json(folder / "metrics.json", record(kept.seed, device, **details))
    return finish(folder, kept, page)


def finish(folder: Path, kept: Run, page: Report | None) -> list[str]:
    """Write report.html and then run.json, which has the checksums of all other files; the names of all."""
    names = {path.name for path in folder.iterdir()} | {run_folder.RUN}
    if page is not None:
        save(folder / REPORT, replace(page, files=sorted(names)))
    run_folder.save(folder, kept)
    return sorted(path.name for path in folder.iterdir())
