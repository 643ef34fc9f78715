"""`linnet forget`: a run of adapt or uncertainty without some of its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

import linnet
from linnet._estimator import members_of
from linnet.cli import publishing, run_folder, run_report, terminal
from linnet.cli.commands.predict import load_estimator_and_network
from linnet.cli.task import index_labels
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device
from linnet.inference import STANDARD


def run(options: Mapping[str, Any]) -> None:
    """Load a run, find the examples among those that it has seen, and write the run without them."""
    source, rows, out = options["run"], options["rows"], options["out"]
    device, kept = choose_device(options["device"]), run_folder.read_with_posterior(source)
    with terminal.join_processes(device), publishing.publish_folder(out, force=options["force"]) as folder:
        printer = Printer()
        estimator, found, network = load_estimator_and_network(
            {**options, "data": rows}, kept, device, printer, labeled=True
        )
        if found.y is None:
            raise UsageError(f"{rows} has no targets. Give the examples as the training data had them.")
        laplace = isinstance(members_of(estimator)[0], linnet.Laplace)
        y = found.y
        if kept.classes and laplace:
            y = index_labels(y.reshape(-1), list(kept.classes), str(rows))
        with blame_input(), printer.step("Forget"):
            fewer = estimator.forget(found.X, y.reshape(-1) if kept.classes or len(kept.targets) == 1 else y)
        certificates = [asdict(member.certificate_) for member in members_of(fewer)]
        if kept.reading.center is not None and kept.reading.scaled_by is None:
            for one in certificates:
                one["remains"] = (*one["remains"], STANDARD)
        _print_certificate(printer, certificates[0])
        if not terminal.is_first_process():
            return
        fewer.save(folder / kept.file)
        if not isinstance(network, list):
            run_folder.save_head(folder, kept, network)
        record = terminal.describe_run(options["seed"], options["device"])
        run_folder.write_json(folder / "metrics.json", record | {"certificates": certificates})
        page = run_report.report_forgetting(
            printer, certificates[0], found, source, seed=options["seed"], device=device
        )
        written = run_report.finish(folder, replace(kept, files={}, sha256=None, signature=None), page)
    printer.print_written(out, written)
    printer.say(f"{source} still holds the examples: delete it, and copies of it, once {out} serves in its place")


def _print_certificate(printer: Printer, found: Mapping[str, Any]) -> None:
    for what, unit in (("mean", "standard deviations"), ("variance", "variances")):
        bound = found[what]
        said = "no bound is known" if bound is None else f"at most {np.format_float_scientific(bound, 1)} prior {unit}"
        printer.say(f"distance from a refit in the {what} of any prediction: {said}")
    for sentence in found["remains"]:
        printer.say(f"what remains: {sentence}")
