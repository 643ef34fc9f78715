"""`linnet merge`: runs of several sites as one run, without their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import linnet
from linnet.cli import publishing, run_folder, run_report, terminal
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device


def run(options: Mapping[str, Any]) -> None:
    """Load the runs, multiply their posteriors, and write the merged run."""
    folders, out, model, weights = (options[name] for name in ("run", "out", "model", "weights"))
    runs = [run_folder.read_with_posterior(folder) for folder in folders]
    _check_same(folders, runs)
    given = _share_weights(weights or [], folders)
    device = choose_device(options["device"])
    with terminal.join_processes(device), publishing.publish_folder(out, force=options["force"]) as folder:
        printer = Printer()
        estimators = []
        with printer.step("Read"):
            for place, kept, path in zip(folders, runs, given, strict=True):
                if model is None:
                    run_folder.check_trusted(place, kept, trusted=options["trust"])
                network = run_folder.load_network(place, kept, None, model=model, weights=path, device=device)
                estimators.append(run_folder.load_estimator(place, kept, network))
                printer.say(f"{place}: {type(estimators[-1]).__name__} of {kept.model}; its code is imported")
        with printer.step("Merge"), blame_input():
            merged = linnet.merge(estimators)
        evidence = merged.log_evidence() if isinstance(merged, linnet.Laplace) else merged.log_evidence_
        evidence = None if evidence is None else float(evidence)
        if evidence is not None:
            printer.say(f"log evidence of all data: {evidence:.1f}")
        if not terminal.is_first_process():
            return
        new = replace(runs[0], files={}, sha256=None, signature=None)
        if isinstance(merged, linnet.Laplace):  # around new weights
            state = {name: t.detach().cpu().contiguous().clone() for name, t in merged.model.state_dict().items()}
            save_file(state, folder / run_folder.WEIGHTS)
            new = replace(new, weights=run_folder.WEIGHTS)
            printer.say(f"the network has the merged weights, which are in {out / run_folder.WEIGHTS}")
        merged.save(folder / new.file)
        details = {"runs": [str(place) for place in folders], "log_evidence": evidence}
        run_folder.write_json(folder / "metrics.json", terminal.describe_run(options["seed"], device, **details))
        page = run_report.report_merging(printer, folders, evidence, seed=options["seed"], device=device)
        written = run_report.finish(folder, new, page)
    printer.print_written(out, written)


def _check_same(folders: list[Path], runs: list[run_folder.Run]) -> None:
    """Raise unless all runs read the same columns and predict the same with the network's own outputs."""
    first = runs[0]
    for folder, one in zip(folders, runs, strict=True):
        if one.new_head:
            raise UsageError(
                f"{folder} has a head of its own, fitted to its data, and posteriors are merged around one network. "
                "Fit a head once (linnet.attach_head), and give its network to all sites."
            )
        same = {
            "kind of run": (one.command, first.command),
            "task": (one.task, first.task),
            "classes": (list(one.classes), list(first.classes)),
            "targets": (list(one.targets), list(first.targets)),
            "columns": (one.reading.columns, first.reading.columns),
            "means of the columns": (one.reading.center, first.reading.center),
            "standard deviations of the columns": (one.reading.spread, first.reading.spread),
            "reading of outputs": (one.output, first.output),
        }
        for what, (ours, theirs) in same.items():
            if ours != theirs:
                raise UsageError(
                    f"{folders[0]} and {folder} differ in the {what}: {theirs} and {ours}. Sites need the same; give "
                    "--columns, --scaler or --task to all."
                )


def _share_weights(weights: list[Path], folders: list[Path]) -> list[list[Path]]:
    """The files of weights that the user names for each run."""
    if len(weights) not in (0, 1, len(folders)):
        raise UsageError(
            f"Give --weights once for all runs, once for each, or not at all; got {len(weights)} for {len(folders)} "
            "runs."
        )
    return [weights if len(weights) < 2 else [weights[i]] for i in range(len(folders))]
