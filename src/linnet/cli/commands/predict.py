"""`linnet predict`: what a run says about new data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from linnet.cli import outputs, publishing, run_folder
from linnet.cli.commands.predictions import predict
from linnet.cli.data_files.examples import for_network, read
from linnet.cli.terminal import Printer, UsageError, as_usage, is_first, processes


def run(
    folder: Path,
    data: Path,
    out: Path,
    *,
    model: str | None,
    weights: Path | None,
    force: bool,
    trusted: bool,
    device: torch.device,
) -> None:
    """Load the run, read the data as it did, and write predictions with error bars; for an embedding, its vectors.

    Args:
        folder: What `adapt`, `uncertainty` or `embed` wrote.
        data: New data.
        out: A .csv file, or for an embedding a .npz file.
        model: As --model takes it, where the run's own has moved.
        weights: A file, where the run's own has moved.
        force: Whether ``out`` is replaced.
        trusted: Whether code that the run names is imported though the run was not made here.
        device: Where.
    """
    kept = run_folder.read(folder)
    ending = ".npz" if kept.command == "embed" else ".csv"
    if out.suffix != ending:
        raise UsageError(f"The run is of linnet {kept.command}, so --out must be a {ending} file; got {out}.")
    if model is None:
        run_folder.check_trusted(folder, kept, trusted=trusted)
    with processes(device), publishing.file(out, force=force):
        printer = Printer()
        if model is None:
            printer.say(f"the network is {kept.model}, as {folder / run_folder.RUN} says; its code is imported")
        found = read(data, kept.reading, labeled=False)
        network = run_folder.network(folder, kept, found, model=model, weights=weights, device=device)
        found = for_network(found, network)
        estimator = run_folder.estimator(folder, kept, network)
        printer.say(f"{data}: {found.what}; {type(estimator).__name__} of {folder}")
        with as_usage("The network does not take these data: "):
            estimator.lin_.jacobian(found.X, progress=False)
        if kept.command == "embed":
            E = torch.as_tensor(estimator.transform(found.X)).cpu().numpy()
            named = {"names": np.array(found.names)} if found.names else {}
            if is_first():
                outputs.write_arrays(out, {"embedding": E, **named})
        else:
            told = predict(estimator, found, task=kept.task, classes=kept.classes, targets=kept.targets)
            if found.y is not None and _known(found.y, kept):
                printer.scores({"data": told.scores(found.y, list(kept.classes), str(data))})
            if is_first():
                outputs.write_csv(out, told.columns)
        printer.written(out.parent, [out.name])


def _known(y: np.ndarray, kept: run_folder.Run) -> bool:
    """Whether the targets in the file are such as the run has seen, so that they can be scored."""
    columns = y.reshape(len(y), -1).shape[1]
    if kept.task == "classification":
        return columns == 1 and set(y.reshape(-1).tolist()) <= set(kept.classes)
    return columns == len(kept.targets) and y.dtype.kind in "biuf"
