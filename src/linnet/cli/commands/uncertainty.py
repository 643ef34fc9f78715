"""`linnet uncertainty`: error bars for a network as it stands, from the data that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import linnet
from linnet.cli import planning, publishing, run_report
from linnet.cli.commands.fitting import Files, Settings, load, run_of, tested, write
from linnet.cli.data_files.examples import Examples, Reading
from linnet.cli.task import Goal, classes_of, trained_on, wanted
from linnet.cli.terminal import Printer, UsageError, is_first, noted, processes

FILE = "laplace.safetensors"
EXACT = ("auto", "full", "function")
"""Structures whose time can be estimated."""


def run(files: Files, reading: Reading, settings: Settings, *, structure: str) -> None:
    """Read, plan, find the posterior, test, write.

    Args:
        files: ``train`` is what the network was trained on.
        reading: How.
        settings: Parameters, prior, seed, device, standardization.
        structure: Of the posterior; see `linnet.Laplace`.
    """
    settings = replace(settings, head="keep")
    with processes(settings.device), publishing.folder(files.out, force=files.force) as folder:
        printer = Printer()
        with printer.step("Read"):
            loaded = load(files, reading, settings, printer)
            model, train, goal = loaded.model, loaded.train, loaded.goal
            if goal.new_head:
                raise UsageError(
                    f"The network has {goal.outputs} outputs, and the targets are {wanted(goal, train)}: error bars "
                    "are for a network that was trained on these targets. Use linnet adapt, which fits a new head."
                )
            classes = classes_of(goal) if goal.task == "classification" else []
        with printer.step("Plan"):
            planning.check(model, settings.chosen, settings.prior, train)
            params = settings.chosen.globs(model, train)
            J = planning.jacobian_of(model, params, train)
            planning.show(printer, model, J)
            printer.say(f"structure: {structure}; prior: {settings.prior}")
            about = planning.announce(printer, J, "laplace", settings.prior) if structure in EXACT else None
        with printer.step("Error bars", about=about), noted() as notes:
            found = _fitted(model, train, goal, classes, params, settings, structure)
            _tell(printer, found)
        names = ("network alone", "with error bars")
        result = tested(printer, found, loaded, classes, names=names, what=str(files.test))
        page = run_report.of_fit(
            printer, "uncertainty", found, files, settings, loaded, result, J.plan, notes=notes, classes=classes
        )
        if not is_first():
            return
        kept = run_of("uncertainty", FILE, files, settings, loaded, classes=classes)
        details = {"test": result.scores, **_details(found, train)}
        written = write(folder, found, model, kept, result.told, details, page)
    printer.written(files.out, written)


def _tell(printer: Printer, found: linnet.Laplace) -> None:
    """What the fit found."""
    printer.say(f"structure {found.structure_!r}; log evidence {found.log_evidence():.1f}")
    printer.say(f"{found.effective_dimension_:.1f} of {found.lin_.p:,} parameters are determined by the data")
    if found.noise_ is not None:
        printer.say(f"noise standard deviation {np.sqrt(np.asarray(found.noise_, dtype=float)).tolist()}")


def _details(found: linnet.Laplace, train: Examples) -> dict[str, Any]:
    return {
        "examples": train.n,
        "parameters": found.lin_.p,
        "structure": found.structure_,
        "log_evidence": found.log_evidence(),
        "effective_dimension": found.effective_dimension_,
        "prior_scales": {name: float(value) for name, value in found.scales_.items()},
        "noise": None if found.noise_ is None else np.asarray(found.noise_, dtype=float).tolist(),
    }


def _fitted(
    model: Any, train: Examples, goal: Goal, classes: list[Any], params: Any, settings: Settings, structure: Any
) -> linnet.Laplace:
    bars = False if structure in EXACT else None  # where the time is known, the time left is shown instead
    la = linnet.Laplace(model, goal.task, structure, settings.prior, params, seed=settings.seed, progress=bars)
    la.fit(train.X, trained_on(train, classes))
    la.progress = None
    return la
