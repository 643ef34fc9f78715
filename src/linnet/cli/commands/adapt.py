"""`linnet adapt`: a trained network and a file of new data give an adapted model with error bars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

import linnet
from linnet.cli import planning, publishing, run_report
from linnet.cli.commands.fitting import Files, Settings, load, run_of, tested, write
from linnet.cli.data_files.examples import Examples, Reading
from linnet.cli.task import Goal, classes_of, wanted
from linnet.cli.terminal import Printer, UsageError, as_usage, is_first, noted, processes
from linnet.heads.attach import head_of

FILE = "adapter.safetensors"

MANY = 2000
"""Rows (examples times outputs) up to which "auto" is variational inference; beyond it is Laplace, which is faster (1 s
against 4 s of one core at 1,200 rows). Where the limit lies is a choice: how their predictions compare there was not
measured."""


def run(files: Files, reading: Reading, settings: Settings) -> None:
    """Read, plan, adapt, test, write."""
    with processes(settings.device), publishing.folder(files.out, force=files.force) as folder:
        printer = Printer()
        with printer.step("Read"):
            loaded = load(files, reading, settings, printer)
            goal, train = loaded.goal, loaded.train
            if settings.head == "keep" and goal.new_head:
                raise UsageError(
                    f"--head keep: the network's {goal.outputs} outputs cannot be {wanted(goal, train)}. Leave it out, "
                    "and a new head is fitted."
                )
        with printer.step("Plan"):
            settings = _settled(settings, goal, train, printer)
            planning.check(_outline(loaded.model, train, goal, settings), settings.chosen, settings.prior, train)
            model, classes = _with_head(loaded.model, train, goal, settings, printer)
            J = planning.jacobian_of(model, settings.chosen.globs(model, train), train)
            planning.show(printer, model, J)
            about = planning.announce(printer, J, goal.task, settings.prior, inference=settings.inference)
        with printer.step("Adapt", about=about), noted() as notes:
            found = _fitted(model, train, goal, classes, settings)
            _tell(printer, found)
        names = ("new head alone" if goal.new_head else "network as it was", "adapted")
        result = tested(printer, found, loaded, classes, names=names, what=str(files.test))
        page = run_report.of_fit(printer, "adapt", found, files, settings, loaded, result, J.plan, notes=notes)
        if not is_first():
            return
        kept = run_of(
            "adapt", FILE, files, settings, loaded, classes=classes, new_head=goal.new_head, features=settings.features
        )
        details = {"test": result.scores, **_details(found, train, J)}
        written = write(folder, found, model, kept, result.told, details, page)
    printer.written(files.out, written)


def _outline(model: nn.Module, train: Examples, goal: Goal, settings: Settings) -> nn.Module:
    """The network with the layers that it will have; a new head is fitted to two examples, so that this is fast."""
    if not goal.new_head:
        return model
    assert train.y is not None
    y = train.y.reshape(train.n, -1)
    index = np.array([0, np.flatnonzero(y[:, 0] != y[0, 0])[0]]) if goal.classes else np.arange(min(2, train.n))
    task: Any = goal.task
    with as_usage():
        few = y[index] if goal.task == "regression" else y[index, 0]
        return linnet.attach_head(model, train.take(index), few, features=settings.features, task=task, penalty=1.0)


def _with_head(
    model: nn.Module, train: Examples, goal: Goal, settings: Settings, printer: Printer
) -> tuple[nn.Module, list[Any]]:
    """The network, with a new head where its outputs do not serve; and the label of each class."""
    if not goal.new_head:
        if settings.features is not None:
            raise UsageError("--features is for a new head, and the network's outputs serve; pass --head new too.")
        if goal.task == "regression":
            return model, []
        classes = classes_of(goal)
        shown = ", ".join(map(str, classes[:12]))
        printer.say(f"the network's outputs are the classes {shown}{', ...' if len(classes) > 12 else ''}")
        return model, classes
    needed = f"{len(goal.classes)} classes" if goal.classes else "these numbers"
    asked = (
        "--head new asks for it" if settings.head == "new" else f"the network has {goal.outputs} outputs, for {needed}"
    )
    printer.say(f"a new head is fitted on the network's features (linnet.attach_head), since {asked}")
    task: Any = goal.task
    new = linnet.attach_head(model, train.X, train.y, features=settings.features, task=task, seed=settings.seed)
    found = head_of(new).classes_
    return new, [] if found is None else found.tolist()


def _settled(settings: Settings, goal: Goal, train: Examples, printer: Printer) -> Settings:
    """What "auto" stands for."""
    mean, inference = settings.mean, settings.inference
    if mean == "auto":
        # The head has seen the labels: the residuals that it leaves say next to nothing (linnet.attach_head).
        mean = "zero" if goal.new_head else "network"
    if goal.task == "regression":
        if inference not in ("auto", "exact"):
            raise UsageError(f"--inference {inference} is for classes; regression is exact. Leave it out.")
        printer.say(f"mean function: {mean}; prior: {settings.prior}")
        return replace(settings, mean=mean)
    if inference == "auto":
        count = len(goal.classes)
        outputs_after = (count if count > 2 else 1) if goal.new_head else goal.outputs
        inference = "vi" if train.n * outputs_after <= MANY else "laplace"
    printer.say(f"inference: {inference}; mean function: {mean}; prior: {settings.prior}")
    return replace(settings, mean=mean, inference=inference)


def _fitted(model: nn.Module, train: Examples, goal: Goal, classes: list[Any], settings: Settings) -> Any:
    common: dict[str, Any] = {
        "params": settings.chosen.params,
        "top": settings.chosen.top,
        "mean": settings.mean,
        "prior": settings.prior,
        "seed": settings.seed,
        "progress": False,  # the time left is shown instead
    }
    assert train.y is not None
    y: Any = train.y
    found: Any
    if goal.task == "regression":
        found = linnet.TangentRegressor(model, **common).fit(train.X, np.asarray(y, dtype=float))
    else:
        inference: Any = settings.inference
        y = y[:, 0] if y.ndim == 2 else y
        found = linnet.TangentClassifier(model, inference=inference, classes=classes, **common).fit(train.X, y)
    found.progress = None
    return found


def _tell(printer: Printer, found: Any) -> None:
    """What the fit found."""
    if found.log_evidence_ is not None:
        printer.say(f"log evidence {found.log_evidence_:.1f}, by solver {found.solver_!r}")
    if found.top_path_:
        path = ", ".join(f"{k}: {value:.1f}" for k, value in found.top_path_.items())
        printer.say(f"blocks from the top: {found.top_} (log evidence {path})")
    if isinstance(found, linnet.TangentRegressor):
        printer.say(f"noise standard deviation {np.sqrt(np.asarray(found.noise_, dtype=float)).round(6).tolist()}")
    shares = sorted(found.layer_relevance_.items(), key=lambda item: -item[1])[:6]
    printer.say("layers that adapt most: " + ", ".join(f"{layer} {share:.0%}" for layer, share in shares))


def _details(found: Any, train: Examples, J: Any) -> dict[str, Any]:
    details = {
        "examples": train.n,
        "parameters": J.shape[1],
        "log_evidence": found.log_evidence_,
        "solver": found.solver_,
        "prior_scales": {name: float(value) for name, value in found.scales_.items()},
        "layer_relevance": found.layer_relevance_,
    }
    if isinstance(found, linnet.TangentRegressor):
        details["noise"] = np.asarray(found.noise_, dtype=float).tolist()
    else:
        details |= {"inference": found.inference, "elbo": found.elbo_}
    return details
