"""What `report.html` says about a run of a command."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import linnet
from linnet.cli.commands.fitting import Files, Loaded, Settings, Tested
from linnet.cli.data_files.examples import Examples, Reading
from linnet.cli.task import trained_on
from linnet.cli.terminal import Printer, record
from linnet.fisher import probes
from linnet.jacobian.plan import Plan
from linnet.report import About, Report, assemble
from linnet.report.content import Group, Item, Points, Spectrum
from linnet.report.examples import Inputs, inputs_of
from linnet.report.formatting import count, number, percent

COMPONENTS = 3
"""Leading components whose extreme examples are shown."""

SHOWN = 6
DOTS = 2000


def of_fit(
    printer: Printer,
    command: str,
    found: Any,
    files: Files,
    settings: Settings,
    loaded: Loaded,
    result: Tested,
    plan: Plan,
    *,
    notes: Sequence[str],
    classes: list[Any] | None = None,
) -> Report | None:
    """The report of `linnet adapt` or `linnet uncertainty`; None, with a note, where it cannot be made.

    Args:
        printer: Where to say so.
        command: Its name.
        found: The fitted estimator.
        files: Of the network and the data.
        settings: How it was fitted.
        loaded: The network and the data.
        result: What the test data say.
        plan: Of the Jacobian.
        notes: What the fit warned of.
        classes: The label of each class, where the estimator knows numbers alone.
    """
    train, test = loaded.train, loaded.test
    y = train.y if classes is None else trained_on(train, classes)
    assert y is not None
    if loaded.goal.task == "classification" and y.ndim == 2:
        y = y[:, 0]

    def make() -> Report:
        about = About(
            f"linnet {command}",
            _title(command, loaded),
            _lede(command, found, files, loaded),
            _inputs(test, loaded.reading),
            _inputs(train, loaded.reading),
            _facts(found, train.n, settings),
            _made(settings.seed, settings.device),
            loaded.targets,
            notes,
        )
        targets = y if loaded.goal.task == "classification" else np.asarray(y, dtype=float)
        X = None if test is None else test.X
        return assemble(
            found, about, result.outcome, X=X, train=(train.X, targets), scores=result.scores or None, plan=plan
        )

    with printer.step("Report"):
        return _or_note(make)


def _or_note(make: Callable[[], Report]) -> Report | None:
    """What was fitted is worth more than the page about it: whatever fails here is said, and the run goes on."""
    try:
        return make()
    except Exception as error:
        warnings.warn(f"The report could not be made ({type(error).__name__}: {error}).", stacklevel=2)
        return None


def _title(command: str, loaded: Loaded) -> str:
    goal = loaded.goal
    if goal.task == "classification":
        what = count(len(goal.classes), "class").replace("classs", "classes")
    else:
        what = ", ".join(loaded.targets) if loaded.reading.targets else count(len(loaded.targets), "number")
    return f"Error bars for {what}" if command == "uncertainty" else f"A network adapted to predict {what}"


def _lede(command: str, found: Any, files: Files, loaded: Loaded) -> str:
    total = sum(p.numel() for p in loaded.model.parameters())
    p = found.lin_.p
    which = f"all {total:,} parameters" if p == total else f"{p:,} parameters"
    did = (
        f"gave {files.model} error bars, over {which}, from its training data {files.train}: {loaded.train.what}"
        if command == "uncertainty"
        else f"adapted {which} of {files.model} to the {loaded.train.what} in {files.train}"
    )
    head = ", with a new head for them" if command == "adapt" and loaded.goal.new_head else ""
    test = "" if loaded.test is None else f" It was tested on the {loaded.test.what} in {files.test}."
    return f"linnet {did}{head}.{test}"


def _facts(found: Any, n: int, settings: Settings) -> dict[str, str]:
    facts = {"training examples": f"{n:,}", "parameters": f"{found.lin_.p:,}", "prior": str(settings.prior)}
    if isinstance(found, linnet.Laplace):
        facts |= {"structure": found.structure_, "effective parameters": number(found.effective_dimension_)}
    else:
        facts |= {"mean function": found.mean, "solver": found.solver_}
        if isinstance(found, linnet.TangentClassifier):
            facts["inference"] = found.inference
    noise = getattr(found, "noise_", None)
    if noise is not None:
        facts["noise, standard deviation"] = ", ".join(number(float(x) ** 0.5) for x in np.ravel(noise)[:8])
    return facts


def _made(seed: int, device: torch.device) -> dict[str, Any]:
    """The record of the run, of which the threads and processes matter to nobody who reads it."""
    return {name: value for name, value in record(seed, device).items() if name not in ("threads", "processes")}


def _inputs(data: Examples | None, reading: Reading) -> Inputs:
    """Examples as they were before they were made fit for the network."""
    if data is None:
        return Inputs()
    X = data.X
    if data.texts or isinstance(X, dict):
        return inputs_of(X, texts=data.texts)
    if X.ndim == 4 and reading.pixel_std is not None:
        X = X * torch.tensor(reading.pixel_std).view(-1, 1, 1)
    if X.ndim == 4 and reading.pixel_mean is not None:
        X = X + torch.tensor(reading.pixel_mean).view(-1, 1, 1)
    if X.ndim == 4 and (reading.pixel_mean is not None or reading.pixel_std is not None):
        X = X.clamp(0, 1)  # rounding
    if X.ndim == 2 and reading.center is not None and reading.spread is not None:
        X = X.double() * torch.tensor(reading.spread).double() + torch.tensor(reading.center).double()
    return inputs_of(X, names=data.names, columns=data.columns or ())


# Embeddings.


def of_embedding(
    printer: Printer,
    embedding: Any,
    E: Any,
    files: tuple[str, Path],
    found: Examples,
    reading: Reading,
    spectrum: probes.Spectrum,
    *,
    seed: int,
    device: torch.device,
) -> Report | None:
    """The report of `linnet embed`.

    Args:
        printer: Where to say what fails.
        embedding: Fitted.
        E: Of the data, (n, k).
        files: The network, as --model takes it, and the data.
        found: The data.
        reading: How they were read.
        spectrum: Of the kernel.
        seed: Of the run.
        device: Where.
    """

    def make() -> Report:
        Z = torch.as_tensor(E).double().cpu()
        labels = None if found.y is None or found.y.ndim != 1 else [str(label) for label in found.y.tolist()]
        keep = np.unique(np.linspace(0, len(Z) - 1, min(len(Z), DOTS)).astype(int))
        points = None
        if Z.shape[1] > 1:
            points = Points(Z[keep, :2].numpy(), None if labels is None else [labels[i] for i in keep])
        facts = {
            "components": f"{Z.shape[1]:,}",
            "of the variance": percent(float(spectrum.explained[-1])),
            "effective rank": number(spectrum.effective_rank),
            "parameters": f"{embedding.lin_.p:,}",
            "passes over the data": f"{embedding.passes_}, by {embedding.method_}",
            "kernel": embedding.kernel,
        }
        lede = (
            f"linnet made {count(Z.shape[1], 'number')} of each of the {found.what} in {files[1]}: the leading "
            f"components of the Fisher kernel of {files[0]}."
        )
        return Report(
            "linnet embed",
            "What the network sees in the data",
            lede,
            outcome=points,
            examples=_extremes(Z, _inputs(found, reading), labels),
            spectrum=Spectrum(spectrum.eigenvalues, found.n, False, spectrum.explained),
            plan=embedding.lin_.jacobian(found.X, progress=False).plan,
            facts=facts,
            record=_made(seed, device),
        )

    with printer.step("Report"):
        return _or_note(make)


def _extremes(Z: torch.Tensor, inputs: Inputs, labels: list[str] | None) -> list[Group]:
    """The examples that lie furthest out on the leading components."""
    top = probes.top_projections(Z, min(SHOWN, len(Z)))
    groups = []
    for j in range(min(COMPONENTS, Z.shape[1])):
        items = []
        for i in top[j].tolist():
            said = [("at", number(float(Z[i, j])))] + ([] if labels is None else [("label", labels[i])])
            items.append(Item(inputs.shown(i), said))
        groups.append(Group(f"Component {j + 1}", "The examples that lie furthest out along it.", items))
    return groups
