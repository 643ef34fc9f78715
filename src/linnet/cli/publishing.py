"""Results appear complete or not at all: one run at a time for each --out, published by one rename."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linnet._common import sync
from linnet.cli.terminal import UsageError, is_first_process

if os.name == "posix":
    import fcntl

KNOWN = (
    "adapter.safetensors",
    "laplace.safetensors",
    "embedding.safetensors",
    "head.safetensors",
    "weights.safetensors",
    "embedding.npz",
    "predictions.csv",
    "metrics.json",
    "run.json",
    "report.html",
)
"""Files that commands write into their folders. --force replaces these files and no others."""

NEW, OLD = "tmp", "old"
"""Endings of folders beside ``--out``: a new run while it is written, and an old run while it is replaced."""


@contextmanager
def publish_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder beside ``out``. The folder replaces ``out`` by one rename if the block succeeds.

    If the block fails, ``out`` stays unchanged. ``out`` holds a complete run at every instant, the earlier run or the
    new run: both folders are exchanged in one step (``renameat2`` on Linux, ``renamex_np`` on macOS). Where the system
    or the file system cannot exchange folders, the earlier run is set aside first. A process that is killed between
    these two renames leaves no ``out``. The next run with this ``--out`` then restores the earlier run first.

    Args:
        out: The folder. It must not exist unless ``force``.
        force: Whether to replace an earlier run. Other files in the folder stay.
    """
    if not is_first_process():  # only the first process writes
        check_free(out, force=force, is_folder=True)
        yield out
        return
    with reserve(out, force=force, is_folder=True) as place:
        temporary = _name_beside(place, NEW)
        try:
            temporary.mkdir()
        except OSError as error:
            raise _refuse_place(out, error) from error
        try:
            yield temporary
            _publish(temporary, place)
        finally:
            _discard(temporary, place)


@contextmanager
def publish_file(out: Path | None, *, force: bool) -> Iterator[None]:
    """Reserve a file that is written at the end; None where no file is written."""
    if out is None or not is_first_process():
        if out is not None:
            check_free(out, force=force)
        yield
        return
    with reserve(out, force=force):
        yield


@contextmanager
def reserve(out: Path, *, force: bool, is_folder: bool = False) -> Iterator[Path]:
    """Keep other processes from writing ``out``, and remove what killed processes have left beside ``out``.

    The lock is a file beside ``out`` that this process locks. The lock ends with the process, however the process ends.
    Where the system or the file system has no locks, nothing is locked and nothing is removed.

    Args:
        out: A file or a folder.
        force: Whether ``out`` may exist.
        is_folder: Whether ``out`` is a folder.

    Yields:
        The absolute path of ``out``; for folders without symbolic links.
    """
    place = Path(os.path.realpath(out)) if is_folder else Path(os.path.abspath(out))
    if is_folder and place in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"--out needs a folder of its own, but {out} holds the folder that this command runs in.")
    check_free(out, force=force, is_folder=is_folder)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(_lock_path(place), out)
    except OSError as error:
        raise _refuse_place(out, error) from error
    try:
        if handle is not None:
            _tidy(place)
        check_free(out, force=force, is_folder=is_folder)  # another process may have written meanwhile
        yield place
    finally:
        if handle is not None:
            _lock_path(place).unlink(missing_ok=True)
            os.close(handle)


def check_free(out: Path, *, force: bool, is_folder: bool = False) -> None:
    """Raise where the output exists and may not be replaced."""
    if not out.exists():
        return
    if out.is_dir() != is_folder:
        needed = "folder" if is_folder else "file"
        raise UsageError(f"--out needs a {needed}, but {out} is not a {needed}.")
    if not force:
        what = "its files" if is_folder else "it"
        raise UsageError(f"{out} exists. Choose another --out, or replace {what} with --force.")


def find_set_aside(out: Path) -> Path | None:
    """The earlier run of a folder that is missing because a process was killed between two renames; else None."""
    place = Path(os.path.realpath(out))
    return None if place.exists() else next((path for path in _find_left_over(place) if path.suffix == f".{OLD}"), None)


def _refuse_place(out: Path, error: OSError) -> UsageError:
    return UsageError(f"--out needs a place that can be written to, but {out} cannot be written ({error.strerror}).")


def _name_beside(place: Path, ending: str) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.{ending}")


# The rename.


def _publish(temporary: Path, place: Path) -> None:
    """Replace an earlier folder by a finished folder."""
    for path in temporary.iterdir():
        sync(path)
    _sync_folder(temporary)
    if not place.exists():
        os.rename(temporary, place)
    else:
        shutil.copymode(place, temporary)
        if not _exchange(temporary, place):
            _replace(temporary, place)
    _sync_folder(place.parent)  # the new name


def _sync_folder(path: Path) -> None:
    if os.name == "posix":  # other systems do not open folders
        sync(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step. False where the system or the file system cannot do this."""
    paths = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux":
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        call, arguments = "renameat2", (here, paths[0], here, paths[1], exchange)
    elif sys.platform == "darwin":
        call, arguments = "renamex_np", (*paths, 2)  # RENAME_SWAP
    else:
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), call, None)
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _replace(temporary: Path, place: Path) -> None:
    """Replace a folder in two steps. `_tidy` finds the earlier run, which is set aside between the steps."""
    aside = _name_beside(place, OLD)
    os.rename(place, aside)
    try:
        os.rename(temporary, place)
    except BaseException:
        os.rename(aside, place)
        raise
    _discard(aside, place)


# Temporaries of runs that were killed.


def _find_left_over(place: Path) -> list[Path]:
    """Temporary files and folders of this ``place``."""
    named = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.({NEW}|{OLD})")
    paths = place.parent.iterdir() if place.parent.is_dir() else ()
    return sorted(path for path in paths if named.fullmatch(path.name))


def _tidy(place: Path) -> None:
    """Restore an earlier run that a killed process has set aside, and remove what such processes have left.

    Only the process that holds the lock of ``place`` may do this: no other process writes then.
    """
    for path in _find_left_over(place):
        if path.suffix == f".{OLD}" and path.is_dir() and not place.exists():
            os.rename(path, place)
            warnings.warn(f"A process was killed while it replaced {place}. The earlier run is restored.", stacklevel=2)
        elif path.is_dir():
            _discard(path, place)
        else:
            path.unlink(missing_ok=True)


def _discard(old: Path, place: Path) -> None:
    """Remove a folder of linnet's files. Other files move to ``place``, or stay if ``place`` has such a file."""
    if not old.is_dir():
        return
    for path in old.iterdir():
        own = path.name in KNOWN or re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name)
        with suppress(OSError):
            if own and not path.is_dir():
                path.unlink(missing_ok=True)
            elif place.is_dir() and not os.path.lexists(place / path.name):
                os.rename(path, place / path.name)
    try:
        old.rmdir()
    except OSError as error:
        warnings.warn(
            f"{old} was left behind ({error.strerror}), because linnet removes only its own files. Look at the other "
            "files, and remove the folder.",
            stacklevel=2,
        )


# The lock.


def _lock_path(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


def _lock(path: Path, out: Path) -> int | None:
    """Create and lock a file. Returns the handle, or None where the system has no locks."""
    if os.name != "posix":
        return None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                path.unlink(missing_ok=True)
                warnings.warn(f"{path.parent} has no locks. Start no other run into {out} meanwhile.", stacklevel=2)
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise UsageError(
                f"Another process is writing {out} now: it has locked {path}. Wait, or choose another --out."
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # the process that held the lock has removed the file: try again with a new file
