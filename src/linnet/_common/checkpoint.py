"""The state of a long computation in a folder, for going on after an interruption, also with another number of ranks.

``torch.distributed.checkpoint`` writes the tensors: each rank a part of them, as safetensors files, which are read
without unpickling. The tensors of a state lie in a folder of their own, ``state-N``. A small file names that folder,
``state.safetensors``. It takes the place of the file before it in one step, once all tensors have reached the disk. So
a process that is killed leaves the old state or the new one.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import Tensor

from linnet._common import files
from linnet._common.checksums import combine_codes, row_codes
from linnet._common.distributed import ALONE, Ranks
from linnet._common.messages import listing

STATE = "state.safetensors"
_OWN = re.compile(r"state-\d+|\.?state\.safetensors.*|shard-.*\.safetensors")  # names that a checkpoint writes


def check_folder(path: str | os.PathLike[str], name: str) -> None:
    """A checkpoint can be written at ``path``; ``name`` is the argument that names it."""
    place = Path(path)
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(
            f"{name} names a folder of its own, and {place} is a file. Remove the file, or name another folder."
        )
    if not place.parent.is_dir():
        raise FileNotFoundError(f"{name} names {place}, and there is no folder {place.parent}. Make the folder first.")
    if not os.access(place if place.is_dir() else place.parent, os.W_OK):
        raise PermissionError(f"{name} names {place}, which cannot be written. Name a folder that can be.")
    others = _others(place) if place.is_dir() else []
    if others:
        raise FileExistsError(
            f"{name} names a folder of its own, and {place} holds {listing(others)}. Name a folder that is empty or "
            "not there yet."
        )


def _others(folder: Path) -> list[str]:
    """Names in a folder that no checkpoint has written."""
    found = []
    for entry in sorted(folder.iterdir()):
        inside = entry.is_dir() and any(entry.iterdir())
        if not _OWN.fullmatch(entry.name) and not (inside and not _others(entry)):
            found.append(entry.name)
    return found


def remove_checkpoints(folder: str | os.PathLike[str], ranks: Ranks) -> None:
    """Remove a folder of checkpoints, with all that checkpoints have written there."""
    folder = Path(folder)
    if ranks.rank == 0 and folder.is_dir():
        for entry in list(folder.iterdir()):
            Checkpoint(entry, kind="", identity=dict).remove()
        if not any(folder.iterdir()):
            folder.rmdir()


@final
class Checkpoint:
    """The saved state of one long computation.

    All ranks make the same calls. The folder has to be one that all ranks see.

    Args:
        path: The folder; None turns every method into a no-op.
        kind: Name of the computation.
        identity: Gives what identifies the inputs of the computation, by name. Checkpoints with others are refused.
            All ranks call it together.
        ranks: The ranks that compute together.

    >>> Checkpoint(None, kind="example", identity=dict).load() is None
    True
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        kind: str,
        identity: Callable[[], Mapping[str, str]],
        ranks: Ranks = ALONE,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.kind, self.ranks = f"checkpoint of {kind}", ranks
        self._find_identity = identity

    @cached_property
    def identity(self) -> dict[str, str]:
        """Codes that identify the inputs of the computation. All ranks ask for the codes together."""
        return dict(self._find_identity())

    def save(
        self,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        parts: Mapping[str, tuple[Tensor, int]] | None = None,
    ) -> None:
        """Replace the state.

        Args:
            tensors: The same tensors on all ranks, each of which writes some of them.
            meta: JSON values, the same on all ranks.
            parts: Tensors of which each rank has its rows (`Ranks.part`), with the number of all rows.
        """
        if self.path is None:
            return
        files.check_json(meta, "meta")
        parts = {} if parts is None else parts
        kept = {name: _own_memory(t) for name, t in tensors.items()}
        rows = {name: _own_memory(t) for name, (t, _) in parts.items()}
        shapes = {name: list(t.shape) for name, t in kept.items()}
        shapes |= {name: [m, *t.shape[1:]] for name, (t, m) in parts.items()}
        header = {
            "identity": self.identity,
            "tensors": {name: [shapes[name], str(t.dtype).removeprefix("torch.")] for name, t in (kept | rows).items()},
            "parts": list(parts),
            "codes": {name: f"{_code(t):016x}" for name, t in kept.items()} | self._part_codes(rows, shapes),
            "state": meta,
        }
        first = self.ranks.rank == 0
        number = int(self.ranks.smallest(self._next_number() if first else float("inf")))
        folder = self.path / f"state-{number}"
        if first and folder.exists():  # of a process that was killed
            shutil.rmtree(folder)
        filled = {name: t for name, t in kept.items() if t.numel()}
        filled |= {name: self._whole(t, shapes[name]) for name, t in rows.items() if math.prod(shapes[name])}
        with (
            self.ranks.exchange("a checkpoint"),
            _explained(f"The checkpoint {self.path} could not be written", OSError),
        ):
            _write(folder, filled, self.ranks)
        if first:
            self._check_written(folder, {name: math.prod(shapes[name]) for name in filled})
            files.save(self.path / STATE, {}, header | {"number": number}, kind=self.kind)
            self._remove_states(but=folder.name)

    def load(self, *, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last saved state; None where there is none.

        Tensors are the same on all ranks. Of those that were saved in parts, each rank gets its rows.

        Raises:
            ValueError: The state belongs to another computation, or is damaged.
        """
        if self.path is None:
            return None
        there = (self.path / STATE).exists()
        count, world = self.ranks.count(there), self.ranks.world
        if count not in (0, world):
            raise FileNotFoundError(
                f"{count} of {world} ranks find the checkpoint {self.path}. Put it where all of them see it."
            )
        if not there:
            return None
        header = files.load(self.path / STATE, kind=self.kind)[1]
        known, here = header["identity"], self.identity
        differ = [name for name in known | here if known.get(name) != here.get(name)]
        if differ:
            raise ValueError(
                f"{self.path} belongs to another computation: {', '.join(differ)} have changed since "
                "it was written, if only in one number. Remove the folder or name another."
            )
        tensors, wanted = {}, {}
        shapes = {name: shape for name, (shape, _) in header["tensors"].items()}
        for name, (shape, dtype) in header["tensors"].items():
            start, stop = self.ranks.part(shape[0]) if name in header["parts"] else (0, shape[0] if shape else 0)
            size = [stop - start, *shape[1:]] if shape else []
            tensors[name] = torch.empty(size, dtype=getattr(torch, dtype))
            if math.prod(shape):
                wanted[name] = self._whole(tensors[name], shape) if name in header["parts"] else tensors[name]
        folder = self.path / f"state-{header['number']}"
        with _explained(f"{folder} is not complete", ValueError):
            _read(folder, wanted)
        rows = {name: tensors[name] for name in header["parts"]}
        codes = {name: f"{_code(t):016x}" for name, t in tensors.items() if name not in rows}
        codes |= self._part_codes(rows, shapes)
        damaged = [name for name in tensors if codes[name] != header["codes"][name]]
        if damaged:
            raise ValueError(
                f"{folder} was changed after it was written: {listing(damaged)} have other checksums. Remove "
                f"{self.path}."
            )
        return {name: t.to(device) for name, t in tensors.items()}, header["state"]

    def remove(self) -> None:
        """Remove the state, what a killed process left half-written, and the folder where nothing else is in it."""
        if self.path is None or self.ranks.rank or not self.path.is_dir():
            return
        (self.path / STATE).unlink(missing_ok=True)  # first: without it the rest is nothing
        self._remove_states()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _remove_states(self, *, but: str = STATE) -> None:
        assert self.path is not None
        for entry in self.path.iterdir():
            if _OWN.fullmatch(entry.name) and entry.name not in (but, STATE):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)

    def _next_number(self) -> int:
        """The number of the next state: another one than that of the state that is there."""
        assert self.path is not None
        file = self.path / STATE
        return int(files.load(file, kind=self.kind)[1]["number"]) + 1 if file.exists() else 0

    def _whole(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of which this rank has some rows, as torch.distributed.checkpoint takes it."""
        if self.ranks.world == 1:
            return rows
        from torch.distributed.tensor import DTensor, Shard

        mesh, stride = self.ranks.mesh(rows.device.type), torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)

    def _part_codes(self, rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Checksums of tensors in parts, which are those of the whole tensors."""
        return {
            name: self.ranks.add_up_checksums(_code(t, self.ranks.part(shapes[name][0])[0])) for name, t in rows.items()
        }

    def _check_written(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Raise unless all that the ranks have written can be seen here."""
        if sizes:
            files.sync(folder)
        found = _written(folder) if sizes else {}
        missing = [name for name, size in sizes.items() if found.get(name) != size]
        if missing:
            raise OSError(
                f"Rank 0 does not see all that the ranks wrote to {folder}: {listing(missing)} are not complete. "
                "checkpoint= has to name a folder that all ranks share."
            )


def _write(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Write tensors that all ranks have, each rank some of them."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    if tensors:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with _quiet():
            save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.world == 1)


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors in place."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    if tensors:
        with _quiet():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _written(folder: Path) -> dict[str, int]:
    """Numbers of each tensor that files in a folder hold, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: sum(chunk.sizes.numel() for chunk in tensor.chunks) for name, tensor in found.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that no process group takes part, which is as it should be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@contextmanager
def _explained(what: str, kind: type[Exception]) -> Iterator[None]:
    """Raise an error that callers can handle: torch.distributed.checkpoint raises a BaseException of its own."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause[0]).__name__}: {cause[0]}" for rank, cause in error.failures.items()]
        raise kind(f"{what}: {'; '.join(causes)}") from error
    except (OSError, SafetensorError) as error:
        raise kind(f"{what}: {error}") from error


def _own_memory(t: Tensor) -> Tensor:
    """A contiguous tensor whose memory holds nothing else."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _code(t: Tensor, start: int = 0) -> int:
    """A checksum of a tensor, or of its rows from ``start`` on: those of parts add up to that of all."""
    return combine_codes(row_codes(t if t.ndim else t[None]), start)
