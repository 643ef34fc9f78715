"""The folder of a run: its files, and how `linnet predict` makes the same network and reads new data in the same way.

run.json has the checksum of every other file of the run, and of itself. A folder with a changed file is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import linnet
from linnet._common import atomic_write, files
from linnet.cli import model_source, publishing, trust
from linnet.cli.data_files import Examples, Reading, cast_for_network, move
from linnet.cli.network_output import NetworkOutput
from linnet.cli.terminal import UsageError, blame_input
from linnet.heads import Readout, head_of, put_head

FORMAT = 3
"""Format of run.json. Format 1 had no checksums and no signature. Format 2 had no places beside the run."""

RUN, HEAD, WEIGHTS = "run.json", "head.safetensors", "weights.safetensors"


@dataclass(frozen=True)
class Run:
    """How a run was made."""

    command: str  # "adapt", "uncertainty" or "embed"
    file: str  # name of the saved estimator in the folder
    model: str  # the value of --model, with the absolute path of a file or a folder
    # the path of --weights, absolute or from the folder of the run; those of an ensemble; or None
    weights: str | Sequence[str] | None
    seed: int  # seed with which the network was built
    reading: Reading  # how data are read
    task: str = ""  # "classification", "regression" or ""
    classes: Sequence[Any] = ()  # label of each class
    targets: Sequence[str] = ()  # names of the numbers that are predicted
    new_head: bool = False  # whether the folder has a head for the network
    features: str | None = None  # the module that the head reads, where --features named it
    home: str | None = None  # the folder where modules of ``model`` were searched
    output: NetworkOutput = field(default_factory=NetworkOutput)  # how the outputs of the network are read
    # absolute paths of the network, the weights and the tokenizer, and the same from the folder of the run
    places: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None  # SHA-256 of the file with the code of the network, where ``model`` names a file of code
    # SHA-256 of every other file of the run by name; empty in format 1
    files: Mapping[str, str] = field(default_factory=dict)
    sha256: str | None = None  # SHA-256 of everything in run.json except this checksum and the signature
    # signature of run.json by the key of the user who made the run; see `linnet.cli.trust`
    signature: str | None = None
    own: bool = False  # Whether this user made the run. This is decided when a run is read, and not written.


def make_run(
    command: str, file: str, model: str, weights: Sequence[Path], reading: Reading, *, seed: int, **more: Any
) -> Run:
    """Describe a run of this process, with absolute paths. The arguments are attributes of `Run`."""
    if reading.tokenizer is not None:
        reading = replace(reading, tokenizer=model_source.locate(f"hf:{reading.tokenizer}").removeprefix("hf:"))
    paths = [str(path.resolve()) for path in weights]
    found = paths if len(paths) > 1 else paths[0] if paths else None
    return Run(command, file, model_source.locate(model), found, seed, reading, home=os.getcwd(), **more)


# Writing.


def save_head(folder: Path, run: Run, model: nn.Module) -> None:
    """Write the head of the network, where the run has a new head."""
    if run.new_head:
        head = head_of(model)
        classes = None if head.classes_ is None else head.classes_.tolist()
        meta = {"task": head.task_, "classes": classes}
        files.save(folder / HEAD, {"weight": head.weight, "bias": head.bias}, meta, kind="head")


def save(folder: Path, run: Run) -> None:
    """Write run.json, the last file of a run, with the checksums of all other files."""
    checksums = {path.name: _compute_checksum(path) for path in sorted(folder.iterdir())}
    code = model_source.find_code(run.model, run.home)
    run = replace(
        run,
        files=checksums,
        places=_find_places(folder, run),
        code=None if code is None else _compute_checksum(code),
    )
    content = {"format": FORMAT} | convert_to_json(asdict(run))
    text = _join_content(content)
    write_json(folder / RUN, _select_content(content) | {"sha256": _hash(text), "signature": trust.sign(text)})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a complete JSON file, or no file at all. Numbers that are not finite become null."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(convert_to_json(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a complete .npz file, or no file at all."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def convert_to_json(value: Any) -> Any:
    """The value as JSON can hold it. A number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Reading.


def read_with_posterior(folder: Path) -> Run:
    """The run of a folder, as `read`. Raises for a run of linnet embed, which fits no posterior."""
    found = read(folder)
    if found.command == "embed":
        raise UsageError(
            f"{folder} was made by linnet embed, which fits no posterior. Give a run of adapt or uncertainty."
        )
    return found


def read(folder: Path) -> Run:
    """The run of a folder. Raises unless all files are as they were written."""
    found, path = _read_json(folder), folder / RUN
    try:
        form = found["format"]
        if form > FORMAT:
            raise UsageError(f"{path} has format {form}, but this linnet reads formats up to {FORMAT}. Upgrade linnet.")
        text = _join_content(found)
        if (form > 1 or "sha256" in found) and found["sha256"] != _hash(text):
            raise ValueError("its content does not have the checksum that it states")
        fields = {name: value for name, value in found.items() if name != "format"}
        reading: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.pop("reading").items()}
        fields["own"] = trust.is_own(text, found.get("signature"))
        given: dict[str, Any] = fields.pop("output", {})
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        run = Run(reading=Reading(**reading), output=NetworkOutput(**given), **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refuse_damaged(path, error) from error
    _check_files(folder, run)
    return _relocate(folder, run)


def _find_places(folder: Path, run: Run) -> dict[str, str]:
    """The absolute paths that a run names, and the same paths from the folder of the run."""
    weights = [run.weights] if isinstance(run.weights, str) else run.weights or []
    specs = [model_source.split_path(run.model)[1], *weights, run.home, run.reading.tokenizer]
    found = {}
    for path in specs:
        if path and os.path.isabs(path) and os.path.exists(path):
            with suppress(ValueError):  # another drive
                found[path] = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return found


def _relocate(folder: Path, run: Run) -> Run:
    """The run with the paths of today: those beside the folder of the run, where the folder was moved with them.

    Code at another place must be the code that the run was made with. Otherwise the run does not count as the user's
    own.
    """

    def find(path: str) -> str:
        if not os.path.isabs(path):
            inside = folder / path
            return str(inside.resolve()) if inside.exists() else path
        if os.path.exists(path) or path not in run.places:
            return path
        beside = (folder / run.places[path]).resolve()
        return str(beside) if beside.exists() else path

    before, path, after = model_source.split_path(run.model)
    model = f"{before}{find(path)}{after}" if path else run.model
    home = None if run.home is None else find(run.home)
    weights = run.weights
    if weights is not None:
        weights = find(weights) if isinstance(weights, str) else [find(one) for one in weights]
    reading = run.reading
    if reading.tokenizer is not None:
        reading = replace(reading, tokenizer=find(reading.tokenizer))
    own = run.own
    if (model, home) != (run.model, run.home):
        code = model_source.find_code(model, home)
        own = own and (code is None or _compute_checksum(code) == run.code)
    return replace(run, model=model, home=home, weights=weights, reading=reading, own=own)


def check_trusted(folder: Path, run: Run, *, trusted: bool) -> None:
    """Raise unless this user made the run or trusts the run: its code is imported next."""
    if not trusted and not run.own:
        raise UsageError(
            f"{folder} was not made by this user on this machine, or the run or its code was changed later. `linnet "
            f"predict` imports the code that its run.json names: {run.model}. Look at this code and at the origin of "
            "the run, and pass --trust; or name code of your own with --model."
        )


def check_unchanged(folder: Path, run: Run) -> None:
    """Raise where another run has replaced this run while it was read."""
    if _read_json(folder).get("sha256") != run.sha256:
        raise UsageError(f"Another run was written to {folder} while it was read. Run the command again.")


def load_network(
    folder: Path, run: Run, data: Examples | None, *, model: str | None, weights: Sequence[Path], device: torch.device
) -> nn.Module | list[nn.Module]:
    """Make the network of a run, with its head, or the networks of an ensemble.

    ``model`` and ``weights`` say where they are now. A new head needs ``data``, which show where its features are.
    """
    known = [run.weights] if isinstance(run.weights, str) else run.weights or []
    paths = list(weights) or [Path(path) for path in known]
    home = run.home if model is None else None
    how: Any = {"seed": run.seed, "device": device, "home": home, "output": run.output}
    networks = model_source.load_networks(model or run.model, paths, **how)
    if len(networks) > 1:
        return networks
    (base,) = networks
    if not run.new_head:
        return base
    assert data is not None
    tensors, meta = files.load(folder / HEAD, kind="head")
    classes = None if meta["classes"] is None else np.array(meta["classes"])
    readout = Readout(tensors["weight"].numpy(), tensors["bias"].numpy(), meta["task"], classes, None)
    with blame_input("The head of the run does not fit the network: "):
        few = move(cast_for_network(data, base).first(2), device)
        return put_head(base, few, readout, features=run.features)


def load_estimator(folder: Path, run: Run, model: nn.Module | list[nn.Module]) -> Any:
    """The saved estimator with its network. This is the last file of a run that is read."""
    with blame_input():
        found = linnet.load(folder / run.file, model)
    check_unchanged(folder, run)
    return found


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    if not path.is_file():
        what = "has no run.json" if folder.is_dir() else "is a file" if folder.is_file() else "does not exist"
        aside = publishing.find_set_aside(folder)
        more = "" if aside is None else f" A process was killed while it replaced this run. The run is in {aside}."
        raise UsageError(
            f"--run needs a folder that linnet adapt, uncertainty or embed has written, but {folder} {what}.{more}"
        )
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise _refuse_damaged(path, error) from error
    if not isinstance(found, dict):
        raise _refuse_damaged(path, "it holds no JSON object")
    return found


def _refuse_damaged(path: Path, why: object) -> UsageError:
    return UsageError(f"{path} is damaged ({why}). {_AGAIN}")


_AGAIN = "Copy the folder again, or run the command that made it again."


def _check_files(folder: Path, run: Run) -> None:
    """Raise where a file of the run is missing or was changed."""
    if run.sha256 is None:
        warnings.warn(f"{folder} was written by an older linnet: its files have no checksums.", stacklevel=3)
    elif run.file not in run.files or (run.new_head and HEAD not in run.files):
        raise _refuse_damaged(folder / RUN, f"it has no checksum of {run.file}")
    for name, expected in run.files.items():
        path = folder / name
        if not path.is_file():
            raise UsageError(f"{path} is missing, but {folder / RUN} says that it belongs to the run. {_AGAIN}")
        if _compute_checksum(path) != expected:
            raise UsageError(
                f"{path} was changed after it was written: its checksum is not the checksum in {folder / RUN}. {_AGAIN}"
            )


def _select_content(found: Mapping[str, Any]) -> dict[str, Any]:
    """All that run.json says, except its own checksum and signature."""
    return {name: value for name, value in found.items() if name not in ("sha256", "signature", "own")}


def _join_content(found: Mapping[str, Any]) -> str:
    """The content as text, in one order."""
    return json.dumps(_select_content(found), sort_keys=True, separators=(",", ":"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _compute_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
