"""`linnet info`: a network's parameters, the plan for data, or what a saved file or a run holds."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch

from linnet._common import files
from linnet._common.memory import format_bytes
from linnet.cli import model_source, run_folder
from linnet.cli.data_files.examples import Reading, settled
from linnet.cli.planning import Chosen, jacobian_of
from linnet.cli.terminal import Printer, UsageError, as_usage
from linnet.network.depth import block_names
from linnet.network.parameters import Layout, select


def of_file(path: Path) -> None:
    """What a saved file holds, or the files of a run."""
    printer = Printer()
    if path.is_dir():
        kept = run_folder.read(path)
        printer.say(f"{path}: linnet {kept.command}, {kept.task or 'an embedding'}")
        printer.say(
            f"network: {kept.model}{'' if kept.weights is None else f', weights {kept.weights}'}, seed {kept.seed}"
        )
        whose = "made by this user" if kept.own else "not made by this user here, so that predict asks for --trust"
        printer.say(f"{len(kept.files)} files, as they were written; {whose}")
        if kept.classes:
            printer.say(f"classes: {', '.join(map(str, kept.classes))}")
        if kept.reading.columns:
            printer.say(f"columns: {', '.join(kept.reading.columns)}")
        if "metrics.json" in kept.files:
            found = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
            printer.say(f"command: {found['command']}")
            if found.get("test"):
                printer.scores(found["test"])
        path = path / kept.file
    else:
        kept = None
    with as_usage():
        contents = files.describe(path)
    if kept is not None:
        run_folder.check_same(path.parent, kept)
    printer.say(f"{path}: {contents.meta.get('estimator', contents.kind)}, written by linnet {contents.version}")
    for name, value in contents.meta.items():
        if name in ("dtype", "posterior", "base", "structure", "likelihood"):
            printer.say(f"{name}: {value}")
    parameters = contents.meta.get("parameters")
    if parameters:
        printer.say(f"parameters: {len(parameters)} tensors, {parameters[0]} to {parameters[-1]}")
    rows = [[name, " x ".join(map(str, shape)) or "1", f"{prod(shape):,}"] for name, shape in contents.shapes.items()]
    printer.table(["tensor", "shape", "numbers"], rows)
    printer.say(f"{format_bytes(path.stat().st_size)}")


def of_network(
    model: str,
    weights: Path | None,
    data: Path | None,
    reading: Reading,
    *,
    chosen: Chosen,
    seed: int,
    device: torch.device,
) -> None:
    """Parameters by layer; with data, the plan."""
    printer = Printer()
    network = model_source.network(model, weights, seed=seed, device=device)
    found = None
    if data is not None:
        found, _ = settled(data, reading, network, labeled=False)
    if chosen.top is not None and found is None:
        raise UsageError("--top needs --data, which shows in which order the layers are called.")
    with as_usage():
        params = chosen.params if found is None else chosen.globs(network, found)
        selected = select(network, params)
        layout = Layout(selected)
    total = sum(p.numel() for p in network.parameters())
    printer.say(f"{type(network).__name__}: {total:,} parameters, {layout.p:,} of them selected")
    rows = [
        [
            layer,
            " ".join(name.rpartition(".")[2] for name in names),
            f"{sum(layout.shapes[name].numel() for name in names):,}",
        ]
        for layer, names in layout.layers.items()
    ]
    printer.table(["layer", "tensors", "parameters"], rows)
    blocks = block_names(network)
    if blocks:
        printer.say(f"blocks that --top counts, bottom to top: {', '.join(blocks)}")
    if found is not None:
        printer.say(f"{data}: {found.what}")
        printer.say(str(jacobian_of(network, params, found).plan))


def nothing() -> UsageError:
    """Neither a file nor a network."""
    return UsageError("info needs a saved file or a run folder, or --model.")


def too_much() -> UsageError:
    """A file, and options about a network."""
    return UsageError("--weights, --data, --params and --top go with --model, not with a saved file.")
