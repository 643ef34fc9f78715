"""`report.html` of a run: what the report says beyond the numbers of the estimator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import linnet
from linnet._estimator import members_of
from linnet.cli import run_folder
from linnet.cli.data_files import Examples, Reading
from linnet.cli.options import FitOptions
from linnet.cli.task import FitData
from linnet.cli.terminal import Printer, describe_run
from linnet.fisher import probes
from linnet.jacobian import Plan
from linnet.report import (
    NO_TEST,
    About,
    Classes,
    Eigenvalues,
    Group,
    Inputs,
    Item,
    Missing,
    Numbers,
    Points,
    Report,
    assemble,
    count,
    number,
    percent,
    save,
    show_inputs,
)


@dataclass(frozen=True)
class Evaluation:
    """Results on test data: metrics by method, and the predictions for a report; empty without test data."""

    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    outcome: Classes | Numbers | Missing = NO_TEST


def report_fit(
    printer: Printer,
    command: str,
    estimator: Any,
    options: FitOptions,
    data: FitData,
    result: Evaluation,
    plan: Plan,
    train: tuple[Any, Any],
    *,
    notes: Sequence[str],
) -> Report | None:
    """The report of `linnet adapt` or `linnet uncertainty`; None, with a note, if it cannot be made.

    ``train`` holds the inputs and the targets that the estimator was fitted to. ``notes`` holds the warnings about the
    data and the fit.
    """

    def make() -> Report:
        about = About(
            f"linnet {command}",
            _write_title(command, data),
            _write_lede(command, estimator, options, data),
            _show_inputs(data.test, data.reading),
            _show_inputs(data.train, data.reading),
            _list_facts(estimator, options, data),
            _make_record(options.seed, options.device),
            data.targets,
            notes,
        )
        X = None if data.test is None else data.test.X
        return assemble(
            estimator, about, result.outcome, X=X, train=train, scores=dict(result.scores) or None, plan=plan
        )

    return _attempt(printer, make)


def finish(folder: Path, run: run_folder.Run, page: Report | None) -> list[str]:
    """Write report.html and then run.json, which has the checksums of all other files; return all names."""
    names = {path.name for path in folder.iterdir()} | {run_folder.RUN}
    if page is not None:
        save(folder / "report.html", replace(page, files=sorted(names)))
    run_folder.save(folder, run)
    return sorted(path.name for path in folder.iterdir())


def _attempt(printer: Printer, make: Callable[[], Report]) -> Report | None:
    """Make a report. If this fails, print a note and go on: the fit is worth more than the page about it."""
    with printer.step("Report"):
        try:
            return make()
        except Exception as error:
            warnings.warn(f"The report could not be made ({type(error).__name__}: {error}).", stacklevel=2)
            return None


def _write_title(command: str, data: FitData) -> str:
    if data.task.kind == "classification":
        what = count(len(data.task.classes), "class", "classes")
    else:
        what = ", ".join(data.targets) if data.reading.targets else count(len(data.targets), "number")
    return f"Error bars for {what}" if command == "uncertainty" else f"A network adapted to predict {what}"


def _write_lede(command: str, estimator: Any, options: FitOptions, data: FitData) -> str:
    total, p = sum(p.numel() for p in data.model.parameters()), members_of(estimator)[0].lin_.p
    which = f"all {total:,} parameters" if p == total else f"{p:,} parameters"
    did = (
        f"gave {options.model} error bars over {which}, from its training data {options.train}: {data.train.what}"
        if command == "uncertainty"
        else f"adapted {which} of {options.model} to the {data.train.what} in {options.train}"
    )
    head = ", with a new head" if data.task.new_head else ""
    test = "" if data.test is None else f" The model was tested on the {data.test.what} in {options.test}."
    return f"linnet {did}{head}.{test}"


def _list_facts(found: Any, options: FitOptions, data: FitData) -> dict[str, str]:
    noise, found = getattr(found, "noise_", None), members_of(found)[0]
    facts = {"training examples": f"{data.train.n:,}", "parameters": f"{found.lin_.p:,}", "prior": str(options.prior)}
    facts |= {"examples of the network's own training": f"{data.source_count:,}"} if data.source_count else {}
    if isinstance(found, linnet.Laplace):
        facts |= {"structure": found.structure_, "effective parameters": number(found.effective_dimension_)}
    else:
        facts |= {"mean function": found.mean_, "solver": found.solver_}
        if isinstance(found, linnet.TangentClassifier):
            facts["inference"] = found.inference
    if noise is not None:
        facts["noise, standard deviation"] = ", ".join(number(float(x) ** 0.5) for x in np.ravel(noise)[:8])
    return facts


def _make_record(seed: int, device: torch.device) -> dict[str, Any]:
    """The record of the run without threads and processes, which do not matter to readers of a report."""
    return {name: value for name, value in describe_run(seed, device).items() if name not in ("threads", "processes")}


def _show_inputs(data: Examples | None, reading: Reading) -> Inputs:
    """Examples as they were before they were scaled for the network."""
    if data is None:
        return Inputs()
    X = data.X
    if data.texts or isinstance(X, dict):
        return show_inputs(X, texts=data.texts)
    if X.ndim == 4 and (reading.pixel_mean is not None or reading.pixel_std is not None):
        X = X * torch.tensor(reading.pixel_std or [1.0]).view(-1, 1, 1)
        X = (X + torch.tensor(reading.pixel_mean or [0.0]).view(-1, 1, 1)).clamp(0, 1)  # rounding
    if X.ndim == 2 and reading.center is not None and reading.spread is not None:
        spread, center = (torch.tensor(values, dtype=torch.float64) for values in (reading.spread, reading.center))
        rounding = 4 * torch.finfo(X.dtype).eps * (X.double().abs() * spread + center.abs())
        X = X.double() * spread + center
        X = torch.where(X.abs() <= rounding, 0.0, X)
    return show_inputs(X, names=data.names, columns=data.columns or ())


def report_embedding(
    printer: Printer,
    embedding: Any,
    E: Any,
    files: tuple[str, Path],
    data: Examples,
    reading: Reading,
    spectrum: probes.Spectrum,
    *,
    seed: int,
    device: torch.device,
) -> Report | None:
    """The report of `linnet embed`; None, with a note, if it cannot be made.

    ``E`` holds the vectors (n, k) of the data, ``files`` the value of --model and the data file.
    """

    def make() -> Report:
        Z = torch.as_tensor(E).double().cpu()
        labels = None
        if data.y is not None and data.y.ndim == 1:
            labels = [number(label) if isinstance(label, float) else str(label) for label in data.y.tolist()]
        keep = np.unique(np.linspace(0, len(Z) - 1, min(len(Z), 2000)).astype(int))  # dots of the figure
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
            f"linnet computed {count(Z.shape[1], 'number')} for each of the {data.what} in {files[1]}: the leading "
            f"components of the Fisher kernel of {files[0]}."
        )
        return Report(
            "linnet embed",
            "What the network sees in the data",
            lede,
            outcome=points,
            examples=_find_extremes(Z, _show_inputs(data, reading), labels),
            spectrum=Eigenvalues(spectrum.eigenvalues, data.n, False, spectrum.explained),
            plan=embedding.lin_.jacobian(data.X, progress=False).plan,
            facts=facts,
            record=_make_record(seed, device),
        )

    return _attempt(printer, make)


def report_forgetting(
    printer: Printer,
    certificate: Mapping[str, Any],
    data: Examples,
    run: Path,
    *,
    seed: int,
    device: torch.device,
) -> Report | None:
    """The report of `linnet forget`, which shows nothing of the examples; None, with a note, if it cannot be made."""

    def make() -> Report:
        bounds = {
            f"largest distance of a {what} from a refit": "no bound is known"
            if certificate[what] is None
            else f"{certificate[what]:.1e} prior {unit}"
            for what, unit in (("mean", "standard deviations"), ("variance", "variances"))
        }
        remains = {f"what remains ({i})": text for i, text in enumerate(certificate["remains"], 1)}
        facts = {"forgotten by now": count(certificate["forgotten"], "example")} | bounds | remains
        lede = f"linnet removed {count(data.n, 'example')} from {run}. The prior and the noise of that run were kept."
        return Report(
            "linnet forget", "A run without some of its examples", lede, facts=facts, record=_make_record(seed, device)
        )

    return _attempt(printer, make)


def report_merging(
    printer: Printer, runs: Sequence[Path], evidence: float | None, *, seed: int, device: torch.device
) -> Report | None:
    """The report of `linnet merge`; None, with a note, if it cannot be made."""

    def make() -> Report:
        facts = {f"run {i}": str(run) for i, run in enumerate(runs, 1)}
        facts |= {} if evidence is None else {"log evidence of all data": number(evidence)}
        lede = (
            f"linnet multiplied the posteriors of {count(len(runs), 'run')} and divided their shared prior out, as if "
            "one run had seen all data. The merged run holds no examples."
        )
        return Report("linnet merge", "Several runs as one", lede, facts=facts, record=_make_record(seed, device))

    return _attempt(printer, make)


def _find_extremes(Z: torch.Tensor, inputs: Inputs, labels: list[str] | None) -> list[Group]:
    """The six examples with the largest values on each of the three leading components."""
    top, groups = probes.top_projections(Z, min(6, len(Z))), []
    for j in range(min(3, Z.shape[1])):
        items = []
        for i in top[j].tolist():
            said = [("at", number(float(Z[i, j])))] + ([] if labels is None else [("label", labels[i])])
            items.append(Item(inputs.show(i), said))
        groups.append(Group(f"Component {j + 1}", "The examples with the largest values on this component.", items))
    return groups
