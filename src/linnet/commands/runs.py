"""What a run folder keeps, so that `linnet predict` makes the same network and reads new data alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from linnet import io
from linnet.commands import sources
from linnet.commands.examples import Examples, Reading, for_network
from linnet.commands.outputs import write_json
from linnet.commands.shared import UsageError, as_usage
from linnet.heads import head_of, put_head
from linnet.readout import Readout

FORMAT = 1
RUN, HEAD = "run.json", "head.safetensors"
HEAD_KIND = "head"


@dataclass(frozen=True)
class Run:
    """How a run was made.

    Attributes:
        command: "adapt", "uncertainty" or "embed".
        file: The saved estimator in the folder.
        model: As --model was given.
        weights: The absolute path of --weights, or None.
        seed: With which the network was built.
        reading: How data is read.
        task: "classification", "regression" or "".
        classes: The label of each class.
        targets: Names of the numbers that are predicted.
        new_head: Whether the folder has a head for the network.
        features: What the head reads, where that was said.
    """

    command: str
    file: str
    model: str
    weights: str | None
    seed: int
    reading: Reading
    task: str
    classes: Sequence[Any]
    targets: Sequence[str]
    new_head: bool = False
    features: str | None = None


def save(folder: Path, run: Run, model: nn.Module) -> None:
    """Write run.json and, where there is one, the head."""
    if run.new_head:
        head = head_of(model)
        classes = None if head.classes_ is None else head.classes_.tolist()
        meta = {"task": head.task_, "classes": classes}
        io.save(folder / HEAD, {"weight": head.weight, "bias": head.bias}, meta, kind=HEAD_KIND)
    write_json(folder / RUN, {"format": FORMAT} | asdict(run))


def read(folder: Path) -> Run:
    """The run of a folder."""
    path = folder / RUN
    if not path.is_file():
        what = "has no run.json" if folder.is_dir() else "does not exist"
        raise UsageError(f"--run needs a folder that linnet adapt, uncertainty or embed has written; {folder} {what}.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        form = found.pop("format")
        reading: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.pop("reading").items()}
        if form > FORMAT:
            raise UsageError(f"{path} has format {form}; this linnet reads up to {FORMAT}. Upgrade linnet.")
        return Run(reading=Reading(**reading), **found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({error}). Run the command again.") from error


def network(
    folder: Path, run: Run, data: Examples, *, model: str | None, weights: Path | None, device: torch.device
) -> nn.Module:
    """The network of a run, with its head; ``model`` and ``weights`` where they have moved."""
    path = weights if weights is not None else None if run.weights is None else Path(run.weights)
    base = sources.network(model or run.model, path, seed=run.seed, device=device)
    if not run.new_head:
        return base
    tensors, meta = io.load(folder / HEAD, kind=HEAD_KIND)
    classes = None if meta["classes"] is None else np.array(meta["classes"])
    readout = Readout(tensors["weight"].numpy(), tensors["bias"].numpy(), meta["task"], classes, None)
    with as_usage("The head of the run does not fit the network: "):
        return put_head(base, _on(for_network(data, base).first(2), device), readout, features=run.features)


def estimator(folder: Path, run: Run, model: nn.Module) -> Any:
    """The saved estimator around its network."""
    with as_usage():
        return linnet.load(folder / run.file, model)


def _on(X: Any, device: torch.device) -> Any:
    return X.to(device) if isinstance(X, Tensor) else {name: x.to(device) for name, x in X.items()}
