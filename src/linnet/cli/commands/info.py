"""`linnet info`: the parameters of a network, the plan for data, or the content of a saved file or a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from linnet._common import files, format_bytes
from linnet.cli import model_source, run_folder
from linnet.cli.data_files import read_for_network
from linnet.cli.network_output import NetworkOutput
from linnet.cli.options import make_jacobian, parse_parameters, parse_reading
from linnet.cli.terminal import Printer, UsageError, blame_input, choose_device
from linnet.network import Layout, block_names, select


def run(given: Mapping[str, Any]) -> None:
    """Describe a saved file, a run folder or a network."""
    path = given["path"]
    if (path is None) == (given["model"] is None):
        raise UsageError("info needs a saved file, a run folder, or --model.")
    if path is None:
        _describe_network(given, Printer())
    elif any(given[name] for name in ("weights", "data", "params", "top")):
        raise UsageError("--weights, --data, --params and --top need --model. They do not apply to a saved file.")
    else:
        _describe_file(path, Printer())


def _describe_file(path: Path, printer: Printer) -> None:
    run = None
    if path.is_dir():
        run = run_folder.read(path)
        _describe_run(path, run, printer)
        path = path / run.file
    with blame_input():
        contents = files.describe(path)
    if run is not None:
        run_folder.check_unchanged(path.parent, run)
    printer.say(f"{path}: {contents.meta.get('estimator', contents.kind)}, written by linnet {contents.version}")
    for name, value in contents.meta.items():
        if name in ("dtype", "posterior", "base", "structure", "likelihood"):
            printer.say(f"{name}: {value}")
    parameters = contents.meta.get("parameters")
    if parameters:
        printer.say(f"parameters: {len(parameters)} tensors, {parameters[0]} to {parameters[-1]}")
    rows = [[name, " x ".join(map(str, shape)) or "1", f"{prod(shape):,}"] for name, shape in contents.shapes.items()]
    printer.print_table(["tensor", "shape", "numbers"], rows)
    printer.say(f"{format_bytes(path.stat().st_size)}")


def _describe_run(path: Path, run: run_folder.Run, printer: Printer) -> None:
    printer.say(f"{path}: linnet {run.command}, {run.task or 'an embedding'}")
    paths = [run.weights] if isinstance(run.weights, str) else run.weights or []
    weights = f", weights {', '.join(paths)}" if paths else ""
    printer.say(f"network: {run.model}{weights}, seed {run.seed}")
    whose = "made by this user" if run.own else "not made by this user on this machine, so predict asks for --trust"
    printer.say(f"{len(run.files)} files, unchanged since they were written; {whose}")
    if run.classes:
        printer.say(f"classes: {', '.join(map(str, run.classes))}")
    if run.reading.columns:
        printer.say(f"columns: {', '.join(run.reading.columns)}")
    if "metrics.json" in run.files:
        found = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
        printer.say(f"command: {found['command']}")
        if found.get("test"):
            printer.print_scores(found["test"])


def _describe_network(given: Mapping[str, Any], printer: Printer) -> None:
    """Print the parameters by layer; with data, also the plan."""
    parameters, path = parse_parameters(given), given["data"]
    reading, device = parse_reading(given), choose_device(given["device"])
    output = NetworkOutput(given["output"])
    network = model_source.load_network(
        given["model"], given["weights"], seed=given["seed"], device=device, output=output
    )
    data = None
    if path is not None:
        data, _ = read_for_network(path, reading, network, labeled=False)
    elif parameters.top is not None:
        raise UsageError("--top needs --data, which shows the order in which the layers are called.")
    with blame_input():
        params = parameters.params if data is None else parameters.resolve(network, data)
        layout = Layout(select(network, params))
    total = sum(p.numel() for p in network.parameters())
    printer.say(f"{type(network).__name__}: {total:,} parameters, {layout.p:,} of them selected")
    rows = []
    for layer, names in layout.layers.items():
        size = sum(layout.shapes[name].numel() for name in names)
        rows.append([layer, " ".join(name.rpartition(".")[2] for name in names), f"{size:,}"])
    printer.print_table(["layer", "tensors", "parameters"], rows)
    blocks = block_names(network)
    if blocks:
        printer.say(f"blocks that --top counts, from bottom to top: {', '.join(blocks)}")
    if data is not None:
        printer.say(f"{path}: {data.description}")
        printer.say(str(make_jacobian(network, params, data).plan))
