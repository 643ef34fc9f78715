"""`linnet attribute`: which training examples change each prediction most, by a run of adapt or uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import linnet
from linnet._estimator import members_of
from linnet.cli import publishing, run_folder
from linnet.cli.commands.predict import load_run, read_as_run
from linnet.cli.data_files import Examples, cast_for_network
from linnet.cli.data_files.tables import write_csv
from linnet.cli.options import check_choice
from linnet.cli.task import index_labels
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device, is_first_process, join_processes
from linnet.report import to_array


def run(options: Mapping[str, Any]) -> None:
    """Load a run and its training data, and write the examples that change each output or loss most."""
    check_choice("--of", options["of"], ("auto", "output", "loss"))
    check_choice("--rank", options["rank"], ("absolute", "highest", "lowest"))
    folder, out = options["run"], options["out"]
    device, kept = choose_device(options["device"]), run_folder.read_with_posterior(folder)
    if out.suffix != ".csv":
        raise UsageError(f"--out must be a .csv file; got {out}.")
    with join_processes(device), publishing.publish_file(out, force=options["force"]):
        printer = Printer()
        estimator, found = load_run(options, kept, device, printer)
        train = read_as_run(options["train"], kept, labeled=True)
        train = cast_for_network(train, members_of(estimator)[0].lin_.module)
        of = ("output" if found.y is None else "loss") if options["of"] == "auto" else options["of"]
        if of == "loss" and found.y is None:
            raise UsageError(f"--of loss needs targets, and {options['data']} has none. Use --of output.")
        y = _targets(found, kept, estimator, str(options["data"])) if of == "loss" else None
        data = (train.X, _targets(train, kept, estimator, str(options["train"])))
        how: Any = {"of": of, "top": options["top"], "rank": options["rank"], "data": data}
        with blame_input():
            best = linnet.attribution(estimator, found.X, y, **how)
        if is_first_process():
            write_csv(out, _table(best, found, train, kept))
        unit = "loss, in nats," if of == "loss" else "output"
        printer.say(
            f"the change of the {unit} of {found.n:,} examples when one of {train.n:,} training examples is left out: "
            f"the {best.indices.shape[-1]} largest for each"
        )
        printer.print_written(out.parent, [out.name])


def _targets(data: Examples, kept: run_folder.Run, estimator: Any, what: str) -> np.ndarray:
    """Targets as the estimator takes them."""
    if data.y is None:
        raise UsageError(f"{what} has no targets.")
    if kept.task != "classification":
        return data.y.astype(float)
    labels = data.y.reshape(-1)
    places = index_labels(labels, list(kept.classes), what)
    return places if isinstance(estimator, linnet.Laplace) else labels


def _table(best: Any, data: Examples, train: Examples, kept: run_folder.Run) -> dict[str, np.ndarray]:
    """A row for each number and each of its training examples."""
    indices, changes = torch.as_tensor(best.indices).cpu().numpy(), to_array(best.changes)
    m, k = len(indices), indices.shape[-1]
    names, own = (np.array(d.names) if d.names else np.arange(d.n) for d in (data, train))
    outputs = indices.shape[1] if indices.ndim == 3 else 1
    columns = {"example": np.repeat(names[:m], outputs * k)}
    if indices.ndim == 3:
        known = list(kept.classes) or list(kept.targets)
        labels = np.array(known if len(known) == outputs else range(outputs))
        columns["output"] = np.tile(np.repeat(labels, k), m)
    columns["rank"] = np.tile(np.arange(1, k + 1), m * outputs)
    return columns | {"training_example": own[indices.reshape(-1)], "change": changes.reshape(-1)}
