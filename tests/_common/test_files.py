"""Files that survive kills, refuse strangers and give back what was saved."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from linnet._common import files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# --------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_round_trip_keeps_bytes_and_dtypes(path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": (torch.randn(3, 4) * 3).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    meta = {"name": "é", "rate": 0.1, "deep": {"list": [1, None, True, {"a": "b"}]}}
    files.save(path, tensors, meta, kind="test")
    loaded, same = files.load(path, kind="test")
    assert same == meta and loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], x)
    assert names(path.parent) == [path.name]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=30)
@given(meta=st.dictionaries(st.text(), json_values, max_size=4))
def test_any_json_comes_back(tmp_path_factory: pytest.TempPathFactory, meta: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("json") / "file"
    files.save(path, {}, meta, kind="test")
    assert files.load(path, kind="test") == ({}, meta)


def test_views_and_shared_memory_are_written_apart(path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "again": base,
        "row": base[1],
        "transposed": base.T,
        "expanded": torch.ones(1).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.zeros(0, 3),
        "gradient": torch.ones(2, requires_grad=True),
    }
    files.save(path, tensors, {}, kind="test")
    loaded, _ = files.load(path, kind="test")
    for name, x in tensors.items():
        assert loaded[name].shape == x.shape and torch.equal(loaded[name], x.detach())
    assert path.stat().st_size < 4096  # a view does not drag its base along


def test_save_creates_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "file"
    for value in (1.0, 2.0):
        files.save(str(path), {"x": torch.tensor(value)}, {"value": value}, kind="test")
        tensors, meta = files.load(str(path), kind="test")
        assert tensors["x"].item() == meta["value"] == value


def test_loaded_tensors_outlive_the_file(path: Path) -> None:
    files.save(path, {"x": torch.arange(1000.0)}, {}, kind="test")
    tensors, _ = files.load(path, kind="test", device=torch.device("cpu"))
    files.save(path, {"x": torch.zeros(1)}, {}, kind="test")
    path.unlink()
    assert torch.equal(tensors["x"], torch.arange(1000.0))
    tensors["x"] += 1  # and can be changed
    assert tensors["x"][0] == 1


# ------------------------------------------------------------------------------------------------ kills


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "linnet._common.files.save_file"])
def test_failure_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    files.save(path, {"x": torch.zeros(3)}, {"step": 1}, kind="test")
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(type(error)):
            files.save(path, {"x": torch.ones(3)}, {"step": 2}, kind="test")
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]


def test_fingerprint_sees_every_change() -> None:
    x = torch.arange(6.0)
    seen = {
        files.fingerprint(tensors)
        for tensors in (
            {"x": x},
            {"y": x},
            {"x": x.reshape(2, 3)},
            {"x": x.double()},
            {"x": x.view(torch.int32)},
            {"x": x + torch.tensor([0, 0, 0, 0, 0, 1e-6])},
            {"x": x, "y": x[:0]},
            {"y": x[:0], "x": x},
            {"x": x.bfloat16()},
            {},
        )
    }
    assert len(seen) == 10 and all(len(digest) == 64 for digest in seen)
    assert files.fingerprint({"x": torch.stack([x, x], 1)[:, 0]}) == files.fingerprint({"x": x.requires_grad_()})


# ------------------------------------------------------------------------------------------------ errors


def test_missing_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        files.load(path, kind="test")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        files.load(path.parent, kind="test")


def test_truncated_file(path: Path) -> None:
    files.save(path, {"x": torch.ones(100)}, {"step": 1}, kind="test")
    whole = path.read_bytes()
    for size in (0, 5, 20, len(whole) - 400, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"not a complete safetensors file .* It was cut short"):
            files.load(path, kind="test")


def test_pickles_are_never_opened(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path.parent / "sprung"),)

    for zipped in (True, False):
        torch.save(Trap(), path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"looks like a pickle.* never unpickles"):
            files.load(path, kind="test")
    assert names(path.parent) == [path.name]


def test_foreign_file(path: Path) -> None:
    for entries in (None, {"format": "pt"}, {"linnet": "no json"}, {"linnet": "[]"}, {"linnet": "{}"}):
        save_file({"x": torch.ones(2)}, path, metadata=entries)
        with pytest.raises(ValueError, match="linnet did not write"):
            files.load(path, kind="test")


def test_a_number_that_was_changed(path: Path) -> None:
    files.save(path, {"x": torch.ones(100)}, {}, kind="test")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="was changed after it was saved: what it holds"):
        files.load(path, kind="test")


def test_wrong_kind(path: Path) -> None:
    files.save(path, {}, {}, kind="laplace")
    with pytest.raises(ValueError, match="holds 'laplace'; 'embedding' was asked for"):
        files.load(path, kind="embedding")


def test_newer_format(path: Path) -> None:
    header = {"format": files.FORMAT + 1, "kind": "test", "version": "9.0", "meta": {}}
    save_file({}, path, metadata={"linnet": json.dumps(header)})
    with pytest.raises(ValueError, match=r"format 2, written by linnet 9\.0; .* up to format 1\. Upgrade linnet"):
        files.load(path, kind="test")


@pytest.mark.parametrize(
    ("meta", "error", "text"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, ValueError, r"^meta\['a'\]\['b'\]\[1\] is nan"),
        ({"a": float("-inf")}, ValueError, r"^meta\['a'\] is -inf, .* save None or a finite number"),
        ({"a": {3: "b"}}, TypeError, r"^meta\['a'\] needs string keys; got 3, an int"),
        ({"a": torch.ones(2)}, TypeError, r"^meta\['a'\] is a Tensor; .* among the tensors"),
        ({"a": {1, 2}}, TypeError, r"^meta\['a'\] is a set"),
    ],
)
def test_meta_that_json_cannot_hold(path: Path, meta: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        files.save(path, {}, meta, kind="test")
    assert names(path.parent) == []


def test_tensors_that_are_not(path: Path) -> None:
    with pytest.raises(TypeError, match=r"tensors\['x'\] is a list; move it to meta"):
        files.save(path, {"x": [1.0]}, {}, kind="test")  # type: ignore[dict-item]


@pytest.mark.skipif(os.name != "posix", reason="folders are synchronized on POSIX systems alone")
def test_a_file_is_on_disk_before_its_name_and_the_name_before_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append(("sync", os.fstat(fd).st_ino)) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda *names: steps.append(("name", 0)) or replace(*names))
    files.save(path, {"a": torch.ones(3)}, {}, kind="test")
    assert steps == [("sync", path.stat().st_ino), ("name", 0), ("sync", path.parent.stat().st_ino)]


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX systems")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_that_the_umask_gives(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files.save(path, {"a": torch.ones(3)}, {}, kind="test")
        with files.atomic_write(path.with_name("text")) as temporary:
            temporary.write_text("words")
    finally:
        os.umask(before)
    for file in (path, path.with_name("text")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert names(path.parent) == sorted([path.name, "text"])


def test_nothing_written_is_no_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.atomic_write(path):
        pass
    assert names(path.parent) == []
