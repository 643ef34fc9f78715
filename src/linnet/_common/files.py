"""Files: tensors and JSON in one safetensors file, written whole or not at all, never unpickled.

`save` and `load` serve every object that can be kept, and `describe` says what a file holds; `atomic_write` writes any
file, and `fingerprint` is a checksum of tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linnet._common import messages
from linnet._common.versions import __version__

FORMAT = 1
"""The format version this linnet writes, and the newest it reads."""

_DAMAGED = "does not have the checksum that was saved with it. Copy it again from where it was saved, or save it again."
_KEY, _SUM = "linnet", "sha256"  # the entries of the safetensors metadata: the header, and its checksum


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: dict[str, Any], *, kind: str) -> None:
    """Write tensors and JSON to one file.

    The data goes to a temporary file in the same folder, reaches the disk, and then takes the place of the
    old file in one step: a process killed on the way leaves the old file as it was. Missing folders are created.

    Args:
        path: Where to write, usually ``*.safetensors``.
        tensors: Named tensors of any shape and device. Those that share memory are written separately.
        meta: JSON values under string keys; tuples come back as lists. NaN and infinity are refused.
        kind: What the file holds; `load` asks for it again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.safetensors", {"x": torch.ones(2)}, {"step": 3}, kind="example")
    ...     load(f"{folder}/a.safetensors", kind="example")
    ({'x': tensor([1., 1.])}, {'step': 3})
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"save needs tensors, and tensors[{name!r}] is {messages.kind(x)}; move it to meta.")
    check_json(meta, "meta")
    apart = _apart(tensors)
    header = {
        "format": FORMAT,
        "kind": kind,
        "version": __version__,
        "tensors": _fingerprint(apart),
        "meta": meta,
    }
    text = json.dumps(header, allow_nan=False)
    with atomic_write(path) as temporary:
        save_file(apart, temporary, metadata={_KEY: text, _SUM: _checksum(text)})


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write a file to, which takes the place of ``path`` in one step once it has reached the disk.

    Where anything goes wrong on the way, the old file stays as it is, and nothing else is left. Missing folders are
    created. The file has the mode that the umask gives to new files, whatever library writes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/a.txt") as temporary:
    ...         _ = temporary.write_text("all of it")
    ...     Path(f"{folder}/a.txt").read_text()
    'all of it'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:  # also KeyboardInterrupt
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        sync(path.parent)  # the new name itself


@dataclass(frozen=True)
class Contents:
    """The description of a file that `save` wrote.

    Attributes:
        kind: What the file holds.
        version: Version of the linnet that wrote the file.
        meta: The JSON values given to `save`.
        shapes: Shapes of the tensors, by name.
    """

    kind: str
    version: str
    meta: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def describe(path: str | os.PathLike[str]) -> Contents:
    """What a saved file holds, whatever its kind. The tensors are not read."""
    path = Path(path)
    with _opened(path) as file:
        header = _header(path, file.metadata())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return Contents(header["kind"], header["version"], header["meta"], shapes)


def load(
    path: str | os.PathLike[str], *, kind: str | Collection[str], device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save` wrote. A file of which a byte has changed since is refused.

    Args:
        path: The file.
        kind: What the file must hold, or several things that the file may hold.
        device: Device of the tensors.

    Returns:
        The tensors by name, and the meta dict.
    """
    path = Path(path)
    with _opened(path) as file:
        header = _header(path, file.metadata())
        meta = _checked(path, header, kind)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if _fingerprint(tensors) != header["tensors"]:
        raise ValueError(f"{path} was changed after it was saved: what it holds {_DAMAGED}")
    return {name: x.to(device) for name, x in tensors.items()}, meta


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, or an error that says what else the file is."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"load needs a file that linnet saved; {path} {what}.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        with path.open("rb") as raw:
            pickled = raw.read(2) in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")
        why = (
            "It looks like a pickle or an archive, as torch.save writes, and linnet never unpickles."
            if pickled
            else "It was cut short when it was written or copied, or has another format. Save it again."
        )
        raise ValueError(f"{path} is not a complete safetensors file ({error}). {why}") from None


def fingerprint(tensors: Mapping[str, Tensor], read: Callable[[Tensor], Tensor] = lambda t: t) -> str:
    """The SHA-256 of names, shapes, dtypes and bytes, in order, as 64 hex digits.

    Args:
        tensors: The tensors.
        read: Gives the tensor whose bytes count, one at a time.

    >>> fingerprint({"w": torch.zeros(2)})[:8] == fingerprint({"w": torch.zeros(2, 1)})[:8]
    False
    """
    digest = hashlib.sha256()
    for name, x in tensors.items():
        digest.update(f"{name!r} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(_plain(read(x)).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _header(path: Path, entries: dict[str, str] | None) -> dict[str, Any]:
    """The header that `save` wrote beside the tensors, of a format that this linnet reads."""
    entries = entries or {}
    try:
        header = json.loads(entries[_KEY])
        form = int(header["format"])
        found = {name: header[name] for name in ("kind", "version", "meta")}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is a safetensors file that linnet did not write (no linnet header).") from None
    if form > FORMAT:
        raise ValueError(
            f"{path} has format {form}, written by linnet {found['version']}; this is linnet "
            f"{__version__}, which reads up to format {FORMAT}. Upgrade linnet."
        )
    if _checksum(entries[_KEY]) != entries.get(_SUM):
        raise ValueError(f"{path} was changed after it was saved: its description {_DAMAGED}")
    return found | {"tensors": header["tensors"]}


def _checked(path: Path, header: dict[str, Any], kind: str | Collection[str]) -> dict[str, Any]:
    """The meta of a file that holds what was asked for."""
    asked = [kind] if isinstance(kind, str) else list(kind)
    if header["kind"] not in asked:
        raise ValueError(f"{path} holds {header['kind']!r}; {' or '.join(map(repr, asked))} was asked for.")
    meta: dict[str, Any] = header["meta"]
    return meta


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint of tensors that a file may hold in any order."""
    return fingerprint({name: tensors[name] for name in sorted(tensors)})


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with memory of its own."""
    apart, seen = {}, set()
    for name, x in tensors.items():
        x = _plain(x)
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes or storage.data_ptr() in seen:
            x = x.clone()
        seen.add(x.untyped_storage().data_ptr())
        apart[name] = x
    return apart


def _plain(x: Tensor) -> Tensor:
    """The tensor's own bytes on the CPU: contiguous, no pending conjugation or sign."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous()


def check_json(value: object, where: str) -> None:
    """Raise, naming the place, unless ``value`` survives JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} needs string keys; got {key!r}, {messages.kind(key)}.")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold; save None or a finite number instead.")
    elif value is not None and not isinstance(value, str | int | float):
        raise TypeError(
            f"{where} is {messages.kind(value)}; JSON holds dicts, lists, strings, numbers, booleans and "
            "None. Convert it, or save it among the tensors."
        )


def sync(path: Path) -> None:
    """Make sure that what was written to a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
