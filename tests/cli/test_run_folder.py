"""Folders of runs: who may write them, what is left after a failure, and which of them `linnet predict` takes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from linnet.cli import model_source, publishing, run_folder, trust
from linnet.cli.commands import fit
from linnet.cli.data_files import Reading
from linnet.cli.terminal import UsageError
from tests.support.command_cases import diabetes, done, networks, read_table, refused

HOLD = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(handle, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs fcntl")


@pytest.fixture
def line(tmp_path):
    """A command that works."""
    train, _ = diabetes(tmp_path)
    nets = networks(tmp_path)
    return ["adapt", "--model", f"{nets}:numbers", "--train", train, "--target", "y", "--out", tmp_path / "run"]


# One run at a time.


@POSIX
def test_a_folder_that_another_process_writes(tmp_path, line):
    lock = tmp_path / ".run.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        for more in ([], ["--force"]):
            said = refused(*line, *more)
            assert f"Another process is writing {tmp_path / 'run'} now" in said and "choose another --out" in said
        assert not (tmp_path / "run").exists()
        other.kill()  # the lock ends with its process
    assert lock.exists()
    done(*line)
    assert not list(tmp_path.glob(".run*"))


@POSIX
def test_a_file_that_another_process_writes(tmp_path, copied):
    (tmp_path / ".p.csv.0123abcd.tmp").write_text("left by a process that was killed")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".p.csv.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        assert "Another process is writing" in refused(*copied[1])
        other.kill()
    done(*copied[1])
    assert not list(tmp_path.glob(".p.csv*"))
    assert "exists" in refused(*copied[1])


def test_a_folder_that_another_process_has_just_written(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(publishing, "_tidy", lambda place: place.mkdir())
    with pytest.raises(UsageError, match="exists"), publishing.publish_folder(out, force=False):
        pytest.fail("The folder is not free.")
    assert list(tmp_path.iterdir()) == [out]


@POSIX
def test_a_lock_that_was_removed_meanwhile(tmp_path, monkeypatch):
    path, lock = tmp_path / "lock", publishing.fcntl.lockf
    seen = []

    def late(handle, kind):
        if not seen:
            path.unlink()  # by the process that held it, as it ended
        seen.append(handle)
        lock(handle, kind)

    monkeypatch.setattr(publishing.fcntl, "lockf", late)
    handle = publishing._lock(path, tmp_path)
    assert len(seen) == 2 and os.path.samestat(os.fstat(handle), path.stat())
    os.close(handle)


@POSIX
def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(publishing.fcntl, "lockf", none)
    (tmp_path / ".run.0123abcd.tmp").mkdir()  # of another process, for all that is known
    with pytest.warns(UserWarning, match="has no locks"), publishing.publish_folder(tmp_path / "run", force=False):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".run.0123abcd.tmp", "run"}


# What is left over.


def test_only_what_linnet_has_left_is_removed(tmp_path, line):
    mine = [tmp_path / ".run.tmp", tmp_path / ".run.0123abcx.tmp", tmp_path / ".other.0123abcd.tmp"]
    for path in mine:
        path.mkdir()
    left = tmp_path / ".run.0123abcd.tmp"
    left.mkdir()
    (left / "adapter.safetensors").write_text("unfinished")
    (left / ".adapter.safetensors.0123abcd.tmp").write_text("unfinished")
    out = tmp_path / "run"
    out.mkdir()
    (left / "notes.txt").write_text("of a run that was being replaced")
    (left / "folder").mkdir()
    done(*line, "--force")
    assert not left.exists() and all(path.exists() for path in mine)
    assert (out / "notes.txt").read_text() == "of a run that was being replaced" and (out / "folder").is_dir()


def test_files_of_others_are_never_removed(tmp_path, line):
    out, left = tmp_path / "run", tmp_path / ".run.0123abcd.tmp"
    for folder, text in ((out, "new"), (left, "old")):
        folder.mkdir()
        (folder / "notes.txt").write_text(text)
    assert "was left behind" in done(*line, "--force")
    assert (out / "notes.txt").read_text() == "new" and (left / "notes.txt").read_text() == "old"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_keeps_its_mode_and_links_to_it(tmp_path, line, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(publishing, "_exchange", lambda one, other: False)
    (tmp_path / "real").mkdir(mode=0o750)
    (tmp_path / "run").symlink_to("real")
    done(*line, "--force")
    assert (tmp_path / "run").is_symlink() and (tmp_path / "real").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "real" / "run.json").is_file()
    assert not list(tmp_path.glob(".re*"))


@POSIX
@pytest.mark.parametrize("force", [False, True])
def test_a_run_is_on_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch, force):
    out, steps = tmp_path / "run", []
    if force:
        out.mkdir()
        (out / "run.json").write_text("old")
    fsync, rename, exchange = os.fsync, os.rename, publishing._exchange

    def sync(handle):
        steps.append(os.fstat(handle).st_ino)
        fsync(handle)

    def name(function):
        return lambda *paths: (steps.append("name"), function(*paths))[1]

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(publishing.os, "rename", name(rename))
    monkeypatch.setattr(publishing, "_exchange", name(exchange))
    with publishing.publish_folder(out, force=force) as folder:
        for part in ("run.json", "head.safetensors"):
            (folder / part).write_text("new")
    files = {path.stat().st_ino for path in out.iterdir()}
    assert set(steps[:2]) == files and len(files) == 2
    # Without an exchange of folders there are several names.
    assert steps[2] == out.stat().st_ino and set(steps[3:-1]) == {"name"} and steps[-1] == tmp_path.stat().st_ino
    assert (out / "run.json").read_text() == "new"


def test_a_rename_that_fails_leaves_the_earlier_run(tmp_path, line, copied, monkeypatch):
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    rename = os.rename

    def fail(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(publishing, "_exchange", lambda one, other: False)
    monkeypatch.setattr(publishing.os, "rename", fail)
    assert "Input/output error" in refused(*line, "--force", code=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert not list(tmp_path.glob(".run*"))


def test_errors_of_an_exchange(tmp_path):
    if sys.platform not in ("linux", "darwin"):
        pytest.skip("needs an exchange of folders")
    with pytest.raises(FileNotFoundError):
        publishing._exchange(tmp_path / "one", tmp_path / "other")


def test_the_folder_that_the_command_runs_in(tmp_path, line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (".", tmp_path.parent):
        assert "holds the folder that this command runs in" in refused(*line[:-1], out, "--force")


def test_places_that_cannot_be_written(tmp_path, line, copied):
    (tmp_path / "taken").write_text("mine")
    assert "can be written to" in refused(*line[:-1], tmp_path / "taken" / "run")
    assert "can be written to" in refused(*copied[1][:-1], tmp_path / "taken" / "p.csv")


def test_terminated(tmp_path, line, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def stop(*_):
        assert list(tmp_path.glob(".run*"))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # those who are in a hurry do not stop the cleaning up

    monkeypatch.setattr(fit, "_fit_tangent", stop)
    assert "Terminated. No unfinished file was written." in refused(*line, code=1)
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".run*"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_in_another_thread(copied):
    """Only the main thread may handle signals."""
    with ThreadPoolExecutor(1) as pool:
        assert "linnet adapt, regression" in pool.submit(done, "info", copied[0]).result()


# Which runs are taken.


def test_every_file_has_a_checksum(copied):
    out, predict = copied
    names = {path.name for path in out.iterdir()}
    assert names == {"adapter.safetensors", "metrics.json", "predictions.csv", "report.html", "run.json"}
    for name in sorted(names - {"run.json"}):
        whole = (out / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            (out / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            for command in (predict, ["info", out]):
                assert f"{out / name} was changed after it was written" in refused(*command)
        (out / name).unlink()
        for command in (predict, ["info", out]):
            assert f"{out / name} is missing" in refused(*command)
        (out / name).write_bytes(whole)
    done(*predict)


def test_run_json_has_a_checksum_of_itself(copied):
    out, _ = copied
    path = out / "run.json"
    whole = path.read_bytes()
    was = run_folder.read(out)
    assert was.own
    for at in range(0, len(whole), 7):
        for flip in (1, 16):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                found = run_folder.read(out)
            except UsageError as error:
                assert str(path) in str(error)
            else:  # another space between two values, or another signature
                assert found == was or not found.own
    said = json.loads(whole)
    for name in ("files", "sha256"):
        path.write_text(json.dumps({key: value for key, value in said.items() if key != name}))
        with pytest.raises(UsageError, match="is damaged"):
            run_folder.read(out)
    path.write_text("[]")
    with pytest.raises(UsageError, match="no JSON object"):
        run_folder.read(out)


def test_files_of_two_runs(tmp_path, line, copied):
    """What a copy that was interrupted, or an older linnet that was killed, leaves."""
    out, predict = copied
    done(*line[:-1], tmp_path / "other", "--seed", 3)
    (out / "adapter.safetensors").write_bytes((tmp_path / "other" / "adapter.safetensors").read_bytes())
    assert "adapter.safetensors was changed" in refused(*predict)
    (out / "run.json").write_bytes((tmp_path / "other" / "run.json").read_bytes())
    assert "metrics.json was changed" in refused(*predict)


def test_a_run_that_is_replaced_while_it_is_read(tmp_path, line, copied, monkeypatch):
    import linnet

    out, predict = copied
    load = linnet.load

    def slow(*arguments):
        found = load(*arguments)
        done(*line, "--force", "--seed", 4)
        return found

    monkeypatch.setattr(linnet, "load", slow)
    assert f"Another run was written to {out} while it was read" in refused(*predict)


# Code that a run names.


def test_runs_of_others_ask_for_trust(copied, made, tmp_path, monkeypatch):
    out, predict = copied
    said = done(*predict)
    assert f"the network is {made / 'nets.py'}:numbers, as {out / 'run.json'} says; its code is imported" in said
    assert "made by this user" in done("info", out)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    for settings in ("without a key", "with another key"):
        assert not trust.key_path().exists()  # to look for a key makes none
        if settings == "with another key":
            assert trust.sign("text") and trust.key_path().stat().st_mode & 0o077 == 0
        said = refused(*predict, "--force")
        assert "was not made by this user on this machine" in said and f"names: {made / 'nets.py'}:numbers" in said
        assert "pass --trust" in said
    assert "not made by this user on this machine" in done("info", out)
    assert "its code is imported" in done(*predict, "--force", "--trust")
    # Code that the user names is not the run's.
    assert "its code is imported" not in done(*predict, "--force", "--model", f"{made / 'nets.py'}:numbers")


def test_a_run_that_names_other_code_since(copied, made, tmp_path):
    """Whoever changes run.json can write its checksum too, but not the signature."""
    out, predict = copied
    path = out / "run.json"
    mark = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    found = json.loads(path.read_text()) | {"model": f"{tmp_path / 'evil.py'}:build", "own": True}
    path.write_text(json.dumps(found | {"sha256": run_folder._hash(run_folder._join_content(found))}))
    assert not run_folder.read(out).own
    assert f"names: {tmp_path / 'evil.py'}:build" in refused(*predict)
    assert not mark.exists()


def test_the_code_is_that_of_the_run_whatever_folder_predict_runs_in(tmp_path, monkeypatch):
    train, test = diabetes(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "away").mkdir()
    networks(tmp_path / "home")
    (tmp_path / "home" / "linnet_test_home.py").write_text("from nets import numbers\n")
    for name in ("nets", "linnet_test_home"):
        (tmp_path / "away" / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for i, model in enumerate(("nets.py:numbers", "linnet_test_home:numbers")):
        for name in ("home", "away"):
            for module in ("nets", "linnet_test_home"):
                monkeypatch.delitem(sys.modules, module, raising=False)
            monkeypatch.chdir(tmp_path / name)
            if name == "home":
                done("adapt", "--model", model, "--train", train, "--target", "y", "--out", tmp_path / f"run{i}")
            else:
                done("predict", "--run", tmp_path / f"run{i}", "--data", test, "--out", tmp_path / f"p{i}.csv")


def test_a_key_that_cannot_be_kept(tmp_path, line, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    said = " ".join(done(*line).split())
    assert "Note: The run is not signed, because the key of this user cannot be stored" in said
    predict = ["predict", "--run", tmp_path / "run", "--data", line[4], "--out", tmp_path / "p.csv"]
    assert "pass --trust" in refused(*predict)
    done(*predict, "--trust")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "short"))
    (tmp_path / "short" / "linnet").mkdir(parents=True)
    (tmp_path / "short" / "linnet" / "key").write_bytes(b"short")
    assert "has 5 bytes, but a key has 32" in " ".join(done(*line, "--force").split())
    assert not run_folder.read(tmp_path / "run").own


def test_keys_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    link = os.link

    def late(source, target):
        Path(target).write_bytes(b"k" * trust.LENGTH)  # by another process, a moment ago
        link(source, target)

    monkeypatch.setattr(trust.os, "link", late)
    signature = trust.sign("text")
    assert trust.key_path().read_bytes() == b"k" * trust.LENGTH and trust.is_own("text", signature)
    assert not trust.is_own("other text", signature) and not trust.is_own("text", None)
    assert [path.name for path in trust.key_path().parent.iterdir()] == ["key"]


def test_runs_of_an_older_linnet(copied):
    out, predict = copied
    path = out / "run.json"
    new = ("files", "sha256", "signature", "home")
    found = {name: value for name, value in json.loads(path.read_text()).items() if name not in new}
    path.write_text(json.dumps(found | {"format": 1}))
    assert "pass --trust" in refused(*predict)
    assert "its files have no checksums" in " ".join(done(*predict, "--trust").split())


# Runs that were moved.


def moved_project(tmp_path, model, more=()):
    """A project with its network, weights, data and a run, moved to another folder; the new place."""
    old = tmp_path / "old"
    old.mkdir()
    train, test = diabetes(old)
    nets = Path(networks(old))
    network = model_source.load_network(f"{nets}:numbers", None, seed=0, device=torch.device("cpu"))
    save_file(network.state_dict(), old / "w.safetensors")
    spec = {"file": f"{nets}:numbers", "module": "nets:numbers"}[model]
    made = ["adapt", "--model", spec, "--weights", old / "w.safetensors", "--train", train, "--target", "y"]
    done(*made, "--test", test, "--out", old / "runs" / "a", *more)
    return old.rename(tmp_path / "new")


@pytest.mark.parametrize("model", ["file", "module"])
def test_a_run_that_was_moved_with_its_network(tmp_path, model, monkeypatch):
    if model == "module":
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "nets", raising=False)
        (tmp_path / "old").mkdir()
        monkeypatch.chdir(tmp_path / "old")
        (tmp_path / "old").rmdir()
        monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "old"))
    new = moved_project(tmp_path, model)
    if model == "module":
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(tmp_path))])
        sys.modules.pop("nets", None)
    said = done("predict", "--run", new / "runs" / "a", "--data", new / "test.csv", "--out", tmp_path / "p.csv")
    if model == "file":
        assert f"the network is {new / 'nets.py'}:numbers" in said
    assert read_table(tmp_path / "p.csv")["mean"] == read_table(new / "runs" / "a" / "predictions.csv")["mean"]


def test_every_path_of_a_run_is_found_where_all_was_moved(tmp_path):
    """The code of the network, its home, one or several files of weights, and the tokenizer."""
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("code/net.py", "a.safetensors", "b.safetensors"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text("")
    (old / "tokenizer").mkdir()
    (old / "run").mkdir()

    def run_in(folder, weights):
        reading = Reading(tokenizer=str(folder / "tokenizer"))
        model, home = f"{folder / 'code' / 'net.py'}:build", str(folder / "code")
        return run_folder.Run("adapt", "x", model, weights(folder), 0, reading, home=home)

    kinds = [
        lambda folder: None,
        lambda folder: str(folder / "a.safetensors"),
        lambda folder: [str(folder / "a.safetensors"), str(folder / "b.safetensors")],
    ]
    runs = [replace(run, places=run_folder._find_places(old / "run", run)) for run in (run_in(old, k) for k in kinds)]
    old.rename(new)
    for run, kind in zip(runs, kinds, strict=True):
        found, expected = run_folder._relocate(new / "run", run), run_in(new, kind)
        for name in ("model", "weights", "home", "reading"):
            assert getattr(found, name) == getattr(expected, name), name


def test_a_run_that_was_moved_to_other_code(tmp_path):
    new = moved_project(tmp_path, "file")
    command = ["predict", "--run", new / "runs" / "a", "--data", new / "test.csv", "--out", tmp_path / "p.csv"]
    code = new / "nets.py"
    code.write_text(code.read_text() + "\n# changed\n")
    said = refused(*command)
    assert "the run or its code was changed later" in said and "--trust" in said
    done(*command, "--trust")


def test_a_run_that_was_moved_alone(tmp_path):
    new = moved_project(tmp_path, "file")
    alone = (new / "runs" / "a").rename(tmp_path / "elsewhere")
    said = refused("predict", "--run", alone, "--data", new / "test.csv", "--out", tmp_path / "p.csv")
    assert "w.safetensors" in said or "nets.py" in said
    moved = ["--model", f"{new / 'nets.py'}:numbers", "--weights", new / "w.safetensors"]
    done("predict", "--run", alone, "--data", new / "test.csv", "--out", tmp_path / "p.csv", *moved)


def test_the_fit_is_kept_when_the_test_is_interrupted(tmp_path, line, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    _, test = diabetes(tmp_path)
    monkeypatch.setattr(fit, "_evaluate", stop)
    said = refused(*line, "--test", test, code=130)
    assert "interrupted: the fit is written" in said and "Interrupted." in said
    written = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert written == ["adapter.safetensors", "metrics.json", "run.json"]
    done("predict", "--run", tmp_path / "run", "--data", test, "--out", tmp_path / "p.csv")


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_of_a_run_have_the_mode_of_new_files(tmp_path, made, umask):
    before = os.umask(umask)
    try:
        options = ["--model", f"{made / 'nets.py'}:numbers", "--train", made / "train.csv", "--target", "y"]
        done("adapt", *options, "--test", made / "test.csv", "--out", tmp_path / "run")
    finally:
        os.umask(before)
    files = list((tmp_path / "run").iterdir())
    assert len(files) == 5 and {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o777 & ~umask
