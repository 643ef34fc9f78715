"""`linnet select`: which examples of a pool to label next, by a run of adapt or uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import linnet
from linnet.cli import publishing, run_folder
from linnet.cli.commands.predict import load_run
from linnet.cli.data_files.tables import write_csv
from linnet.cli.options import check_choice
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device, is_first_process, join_processes
from linnet.report import to_array


def run(options: Mapping[str, Any]) -> None:
    """Load a run, read a pool as the run did, and write the chosen examples with their scores."""
    check_choice("--method", options["method"], ("variance", "bald", "batchbald", "bait", "epig"))
    check_choice("--overlap", options["overlap"], ("raise", "exclude", "allow"))
    folder, out = options["run"], options["out"]
    device, kept = choose_device(options["device"]), run_folder.read_with_posterior(folder)
    if out.suffix != ".csv":
        raise UsageError(f"--out must be a .csv file; got {out}.")
    with join_processes(device), publishing.publish_file(out, force=options["force"]):
        printer = Printer()
        estimator, found = load_run(options, kept, device, printer)
        how = {"overlap": options["overlap"], "seed": options["seed"]}
        with blame_input():
            chosen = linnet.select(estimator, found.X, options["count"], options["method"], **how)
        at = chosen.indices.numpy()  # the data are tensors
        names = np.array(found.names)[at] if found.names else at
        if is_first_process():
            write_csv(out, {"example": names, "score": to_array(chosen.scores)})
        first = ", ".join(map(str, names[:5].tolist())) + (", ..." if len(names) > 5 else "")
        printer.say(f"{len(at):,} of {found.n:,} examples by {options['method']}: {first}")
        printer.print_written(out.parent, [out.name])
