"""Checkpoints survive kills, refuse other computations, and go on with another number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from linnet._common import Checkpoint, check_folder
from linnet._common.checkpoint import STATE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def checkpoint(path: Path | None, kind: str = "test", **identity: str) -> Checkpoint:
    return Checkpoint(path, kind=kind, identity=lambda: identity or {"the data": "1", "the weights": "2"})


def test_without_a_path_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = checkpoint(None)
    one.save({"x": torch.ones(2)}, {"step": 1})
    assert one.load() is None
    one.remove()
    assert names(tmp_path) == []


def test_a_state_comes_back_as_it_was(path: Path) -> None:
    one = checkpoint(path)
    assert one.load() is None
    one.remove()
    base = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    tensors = {
        "number": torch.tensor(2.5),
        "transposed": base.T,
        "a part": base[1:],
        "the same part": base[1:],
        "nothing": torch.zeros(5, 0),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    one.save({"x": torch.zeros(2)}, {"step": 1})
    one.save(tensors, {"step": 2, "rest": None})
    found = checkpoint(path).load()
    assert found is not None and found[1] == {"step": 2, "rest": None} and list(found[0]) == list(tensors)
    for name, t in tensors.items():
        assert found[0][name].dtype == t.dtype and torch.equal(found[0][name], t)
    assert names(path) == ["state-1", STATE]
    one.save({}, {"step": 3})
    assert one.load() == ({}, {"step": 3})
    one.remove()
    assert not path.exists()


def test_another_computation_is_refused_by_name(path: Path) -> None:
    checkpoint(path).save({}, {})
    with pytest.raises(ValueError, match="belongs to another computation: the weights have changed since it was wr"):
        checkpoint(path, **{"the data": "1", "the weights": "3"}).load()
    with pytest.raises(ValueError, match="belongs to another computation: the data, the weights, the settings have"):
        checkpoint(path, **{"the settings": "a"}).load()
    with pytest.raises(ValueError, match="holds 'checkpoint of test'; 'checkpoint of spectrum' was asked for"):
        checkpoint(path, "spectrum").load()
    with pytest.raises(ValueError, match=r"^meta\['loss'\] is nan"):
        checkpoint(path).save({}, {"loss": float("nan")})


def test_a_damaged_state_is_refused(path: Path) -> None:
    checkpoint(path).save({"x": torch.ones(100)}, {})
    (file,) = (path / "state-0").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + b"\0" * 8)
    with pytest.raises(ValueError, match="was changed after it was written: 'x' have other checksums"):
        checkpoint(path).load()
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="state-0 is not complete"):
        checkpoint(path).load()
    file.unlink()
    with pytest.raises(ValueError, match="state-0 is not complete"):
        checkpoint(path).load()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["linnet._common.checkpoint._write", "linnet._common.files.save", "os.replace"])
def test_a_failure_leaves_the_old_state(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    one = checkpoint(path)
    one.save({"x": torch.zeros(3)}, {"step": 1})

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(type(error)):
            one.save({"x": torch.ones(3)}, {"step": 2})
    found = one.load()
    assert found is not None and found[1] == {"step": 1} and torch.equal(found[0]["x"], torch.zeros(3))
    one.save({"x": torch.ones(3)}, {"step": 3})
    assert len(names(path)) == 2


KILLED = """
    import sys, time
    import torch
    from linnet._common import Checkpoint, checkpoint

    whole = checkpoint._write

    def half(folder, tensors, ranks):
        whole(folder, {name: t[:5] for name, t in tensors.items()}, ranks)
        (folder / "shard-00007-model-00001-of-00001.safetensors").write_bytes(b"half")
        print("writing", flush=True)
        time.sleep(60)

    checkpoint._write = half
    one = Checkpoint(sys.argv[1], kind="test", identity=lambda: {"the data": "1", "the weights": "2"})
    one.save({"x": torch.ones(100)}, {"step": 2})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_process_leaves_the_last_state(path: Path) -> None:
    one = checkpoint(path)
    one.save({"x": torch.zeros(3)}, {"step": 1})
    environment = os.environ | {"PYTHONPATH": str(Path(sys.modules["linnet"].__file__ or "").parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert names(path) == ["state-0", "state-1", STATE]
    check_folder(path, "checkpoint")
    found = one.load()
    assert found is not None and found[1] == {"step": 1} and torch.equal(found[0]["x"], torch.zeros(3))
    one.save({"x": torch.ones(3)}, {"step": 3})  # beside what the other process has left in the folder of that name
    found = checkpoint(path).load()
    assert found is not None and found[1] == {"step": 3} and torch.equal(found[0]["x"], torch.ones(3))
    one.remove()
    assert not path.exists()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    check_folder(tmp_path / "a", "checkpoint")
    check_folder(tmp_path, "checkpoint")
    checkpoint(tmp_path / "a" / "part").save({}, {})
    check_folder(tmp_path / "a", "checkpoint")
    (tmp_path / "b").touch()
    with pytest.raises(NotADirectoryError, match=r"checkpoint names a folder of its own, and .* is a file"):
        check_folder(tmp_path / "b", "checkpoint")
    with pytest.raises(FileExistsError, match=r"checkpoint names a folder of its own, and .* holds 'b'"):
        check_folder(tmp_path, "checkpoint")
    with pytest.raises(FileNotFoundError, match="Make the folder first"):
        check_folder(tmp_path / "c" / "d", "checkpoint")
