"""`linnet export`: a run of adapt or uncertainty as a file that needs neither linnet nor the code of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import linnet
from linnet.cli import publishing, run_folder
from linnet.cli.commands.predict import load_run
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device


def run(options: Mapping[str, Any]) -> None:
    """Load a run, make a module with error bars, and write the module."""
    folder, out = options["run"], options["out"]
    device, kept = choose_device(options["device"]), run_folder.read_with_posterior(folder)
    if out.suffix not in (".pt2", ".onnx"):
        raise UsageError(f"--out must be a .pt2 file (torch.export) or an .onnx file; got {out}.")
    with publishing.publish_file(out, force=options["force"]):
        printer = Printer()
        estimator, found = load_run(options, kept, device, printer)
        if not isinstance(found.X, Tensor):
            raise UsageError("export is for networks that take one tensor: a table, arrays or images.")
        few = found.X[: min(8, found.n)].to(device)
        few = few if len(few) > 1 else torch.cat([few, few])
        with blame_input():
            laplace = isinstance(estimator, linnet.Laplace)
            module = estimator.to_module() if laplace else estimator.to_module(error_bars=True)
            try:
                module.export(out, few)
            except ImportError as error:  # of the extra
                raise UsageError(str(error)) from error
        what = "class probabilities" if kept.classes else "mean and standard deviation"
        printer.say(f"the file takes batches of {tuple(few.shape[1:])} and returns {what}")
        printer.print_written(out.parent, [out.name])
