"""What a run folder keeps, so that `linnet predict` makes the same network and reads new data alike.

run.json has the checksum of every other file of the run, and of itself. A folder where one of them differs is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import linnet
from linnet._common import files as io
from linnet.cli import model_source, publishing, trust
from linnet.cli.data_files.examples import Examples, Reading, for_network
from linnet.cli.outputs import as_json, write_json
from linnet.cli.terminal import UsageError, as_usage
from linnet.heads.attach import head_of, put_head
from linnet.heads.readout import Readout

FORMAT = 2
"""The format of run.json; format 1 had no checksums and no signature."""

RUN, HEAD = "run.json", "head.safetensors"
HEAD_KIND = "head"


@dataclass(frozen=True)
class Run:
    """How a run was made.

    Attributes:
        command: "adapt", "uncertainty" or "embed".
        file: The saved estimator in the folder.
        model: As --model was given, with the absolute path of a file or a folder.
        weights: The absolute path of --weights, or None.
        seed: With which the network was built.
        reading: How data is read.
        task: "classification", "regression" or "".
        classes: The label of each class.
        targets: Names of the numbers that are predicted.
        new_head: Whether the folder has a head for the network.
        features: What the head reads, where that was said.
        home: The folder that modules of ``model`` were looked for in.
        files: The SHA-256 of every other file of the run, by name; none in format 1.
        sha256: SHA-256 of everything in run.json but for this checksum and the signature.
        signature: Signature of run.json by the key of the user who made the run; see `linnet.cli.trust`.
        own: Whether this user made the run; decided when a run is read, and not written.
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
    home: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    sha256: str | None = None
    signature: str | None = None
    own: bool = False


def make_run(
    command: str, file: str, model: str, weights: Path | None, reading: Reading, *, seed: int, **more: Any
) -> Run:
    """A run of this process, with paths that hold in other folders too.

    Args:
        command: As in `Run`; and so are the others.
        file: See there.
        model: As --model was given.
        weights: As --weights was given.
        reading: See there.
        seed: See there.
        more: Other attributes of `Run`.
    """
    if reading.tokenizer is not None:
        reading = replace(reading, tokenizer=model_source.locate(f"hf:{reading.tokenizer}").removeprefix("hf:"))
    path = None if weights is None else str(weights.resolve())
    given = {"task": "", "classes": [], "targets": []} | more
    return Run(command, file, model_source.locate(model), path, seed, reading, home=os.getcwd(), **given)


def save_head(folder: Path, run: Run, model: nn.Module) -> None:
    """Write the network's head, where the run has a new one."""
    if run.new_head:
        head = head_of(model)
        classes = None if head.classes_ is None else head.classes_.tolist()
        meta = {"task": head.task_, "classes": classes}
        io.save(folder / HEAD, {"weight": head.weight, "bias": head.bias}, meta, kind=HEAD_KIND)


def save(folder: Path, run: Run) -> None:
    """Write run.json, the last file of a run, with the checksums of all others."""
    files = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    found = {"format": FORMAT} | as_json(asdict(replace(run, files=files)))
    said = _content_text(found)
    write_json(folder / RUN, _content(found) | {"sha256": _sha256(said), "signature": trust.sign(said)})


def read(folder: Path) -> Run:
    """The run of a folder, all of whose files are as they were written."""
    found = _read_json(folder)
    path = folder / RUN
    try:
        form = found["format"]
        if form > FORMAT:
            raise UsageError(f"{path} has format {form}; this linnet reads up to {FORMAT}. Upgrade linnet.")
        if (form > 1 or "sha256" in found) and found["sha256"] != _sha256(_content_text(found)):
            raise ValueError("its content does not have the checksum that it states")
        kept = {name: value for name, value in found.items() if name != "format"}
        reading: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.pop("reading").items()}
        run = Run(
            reading=Reading(**reading), **kept | {"own": trust.is_own(_content_text(found), found.get("signature"))}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({error}). {_AGAIN}") from error
    _check_files(folder, run)
    return run


def check_trusted(folder: Path, run: Run, *, trusted: bool) -> None:
    """Raise unless the run was made by this user, or is said to be trusted: its code is imported next."""
    if not trusted and not run.own:
        raise UsageError(
            f"{folder} was not made by this user on this machine, or was changed since, and `linnet predict` imports "
            f"the code that its run.json names: {run.model}. Look at this code and at where the run comes from, and "
            "pass --trust; or name code of your own with --model."
        )


def check_same(folder: Path, run: Run) -> None:
    """Raise where another run has taken the place of this one while it was read."""
    if _read_json(folder).get("sha256") != run.sha256:
        raise UsageError(f"Another run was written to {folder} while it was read. Run the command again.")


_AGAIN = "Copy the folder again from where it was made, or run the command that made it again."


def _read_json(folder: Path) -> dict[str, Any]:
    """The contents of run.json."""
    path = folder / RUN
    if not path.is_file():
        what = "has no run.json" if folder.is_dir() else "does not exist"
        aside = publishing.find_set_aside(folder)
        more = "" if aside is None else f" A process was killed while it replaced this run; the run is in {aside}."
        raise UsageError(
            f"--run needs a folder that linnet adapt, uncertainty or embed has written; {folder} {what}.{more}"
        )
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}). {_AGAIN}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged (it holds no JSON object). {_AGAIN}")
    return found


def _check_files(folder: Path, run: Run) -> None:
    """Raise where a file of the run is missing or was changed."""
    if run.sha256 is None:
        warnings.warn(f"{folder} was written by an older linnet: its files have no checksums.", stacklevel=3)
    elif run.file not in run.files or (run.new_head and HEAD not in run.files):
        raise UsageError(f"{folder / RUN} is damaged (it has no checksum of {run.file}). {_AGAIN}")
    for name, expected in run.files.items():
        path = folder / name
        if not path.is_file():
            raise UsageError(f"{path} is missing: {folder / RUN} says that it belongs to the run. {_AGAIN}")
        if _checksum(path) != expected:
            raise UsageError(
                f"{path} was changed after it was written: it does not have the checksum in {folder / RUN}. {_AGAIN}"
            )


def _content(found: Mapping[str, Any]) -> dict[str, Any]:
    """All that run.json says, but for its own checksum and signature."""
    return {name: value for name, value in found.items() if name not in ("sha256", "signature", "own")}


def _content_text(found: Mapping[str, Any]) -> str:
    """The same as text, in one order."""
    return json.dumps(_content(found), sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def network(
    folder: Path, run: Run, data: Examples, *, model: str | None, weights: Path | None, device: torch.device
) -> nn.Module:
    """The network of a run, with its head; ``model`` and ``weights`` where they have moved."""
    path = weights if weights is not None else None if run.weights is None else Path(run.weights)
    home = run.home if model is None else None
    base = model_source.network(model or run.model, path, seed=run.seed, device=device, home=home)
    if not run.new_head:
        return base
    tensors, meta = io.load(folder / HEAD, kind=HEAD_KIND)
    classes = None if meta["classes"] is None else np.array(meta["classes"])
    readout = Readout(tensors["weight"].numpy(), tensors["bias"].numpy(), meta["task"], classes, None)
    with as_usage("The head of the run does not fit the network: "):
        return put_head(base, _on(for_network(data, base).first(2), device), readout, features=run.features)


def estimator(folder: Path, run: Run, model: nn.Module) -> Any:
    """The saved estimator around its network; the last file of a run that is read."""
    with as_usage():
        found = linnet.load(folder / run.file, model)
    check_same(folder, run)
    return found


def _on(X: Any, device: torch.device) -> Any:
    return X.to(device) if isinstance(X, Tensor) else {name: x.to(device) for name, x in X.items()}
