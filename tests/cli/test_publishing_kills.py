"""Processes that are killed while they publish a run: what is accepted later is one whole run, the old or the new one.

``python tests/cli/test_publishing_kills.py 200`` kills 200 processes, about half of them at a random call that changes
files and the others at a random moment, and prints how many damaged or mixed runs were accepted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from linnet._common import files
from linnet.cli import publishing, run_folder
from linnet.cli.data_files import Reading
from linnet.cli.data_files.tables import write_csv
from linnet.cli.terminal import UsageError

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")
"""Audit events of calls that change files; "open" changes some."""

NOTES = "notes.txt"


def publish(out: Path, stamp: int) -> None:
    """Write a run whose every file says ``stamp``; every second run has predictions, as not all runs have."""
    with publishing.publish_folder(out, force=True) as folder:
        files.save(folder / "adapter.safetensors", {"x": torch.full((50,), stamp)}, {}, kind="kills")
        if stamp % 2:
            write_csv(folder / "predictions.csv", {"stamp": [stamp] * 50})
        run_folder.write_json(folder / "metrics.json", {"stamp": stamp})
        run_folder.save(folder, run_folder.make_run("adapt", "adapter.safetensors", "a:b", [], Reading(), seed=stamp))


def accepted(out: Path) -> tuple[int, bool] | None:
    """The stamp of the run that `linnet predict` would take, and whether the run is whole; None where it takes none."""
    try:
        run = run_folder.read(out)
    except UsageError:
        return None
    stamps = {run.seed, *files.load(out / run.file, kind="kills")[0]["x"].tolist()}
    stamps.add(json.loads((out / "metrics.json").read_text())["stamp"])
    table = out / "predictions.csv"
    if table.exists():
        stamps |= {int(line) for line in table.read_text().split()[1:]}
    return run.seed, stamps == {run.seed} and table.exists() == bool(run.seed % 2)


# The process that is killed, and the process that makes it: to import torch for each of them would take too long.


def publisher(out: Path, stamp: int, step: int | None, exchange: bool, log: int) -> None:
    """Publish one run after the other; say so after each. Kill this process at call number ``step``, if any."""
    if not exchange:
        publishing._exchange = lambda one, other: False
    left = itertools.count(step, -1) if step is not None else None

    def watch(event: str, arguments: Any) -> None:
        changes = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and left is not None and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    for stamp in itertools.count(stamp):  # noqa: B020
        publish(out, stamp)
        os.write(log, b"%d\n" % stamp)


def maker() -> None:
    """Fork a publisher for each line of standard input, and say what it has published once it has ended."""
    os.fsync = lambda handle: None  # slow, and without effect for a process that dies while the system lives
    for line in sys.stdin:
        asked = json.loads(line)
        source, log = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                publisher(Path(asked.pop("out")), log=log, **asked)
            finally:
                os._exit(1)
        os.close(log)
        print(pid, flush=True)
        with os.fdopen(source) as published:
            said = published.read().split()
        print(json.dumps([int(stamp) for stamp in said] + [os.waitpid(pid, 0)[1]]), flush=True)
    os._exit(0)  # the end of torch takes seconds


class Killer:
    """Kills publishers of one folder, and looks at what is left."""

    def __init__(self, process: subprocess.Popen[str], out: Path) -> None:
        self.process, self.out, self.last, self.published = process, out, 0, False
        publish(out, 0)
        (out / NOTES).write_text("mine")

    def kill(self, *, step: int | None = None, after: float = 0.0, exchange: bool = True) -> str:
        """Kill one, and say what `linnet predict` makes of the folder: "old", "new", "none" or what is wrong."""
        source, target = self.process.stdout, self.process.stdin
        assert source is not None and target is not None
        asked = {"out": str(self.out), "stamp": self.last + 1, "step": step, "exchange": exchange}
        print(json.dumps(asked), file=target, flush=True)
        pid = int(source.readline())
        if step is None:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
        *published, status = json.loads(source.readline())
        assert status == signal.SIGKILL
        self.published = bool(published)
        old = max([self.last, *published])
        found = accepted(self.out)
        if found is None:
            return "none"
        self.last = found[0]
        if not found[1]:
            return "mixed"
        return {old: "old", old + 1: "new"}.get(found[0], "another")

    def recover(self) -> None:
        """The next run that publishes: nothing is left over, and what is not linnet's is still there."""
        publish(self.out, self.last + 1)
        self.last += 1
        assert accepted(self.out) == (self.last, True)
        assert [path.name for path in self.out.parent.iterdir()] == [self.out.name]
        assert (self.out / NOTES).read_text() == "mine"


@contextmanager
def killer(folder: Path) -> Iterator[Killer]:
    line = [sys.executable, __file__, "--maker"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Killer(process, folder / "run")
        finally:
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    if os.name != "posix":
        pytest.skip("needs fork")
    with killer(tmp_path_factory.mktemp("kills")) as found:
        yield found


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_call(kills, exchange):
    seen, whole = set(), 0
    for step in itertools.count():
        found = kills.kill(step=step, exchange=exchange)
        seen.add(found)
        assert found in ("old", "new", "none")
        if found == "none":  # between two renames, where folders cannot be exchanged
            assert not exchange and publishing.find_set_aside(kills.out) is not None
            with pytest.raises(UsageError, match=r"was killed while it replaced this run\. The run is in"):
                run_folder.read(kills.out)
            with pytest.warns(UserWarning, match="The earlier run is restored"):
                kills.recover()
        whole = whole + 1 if kills.published else 0
        if whole == 2:  # all calls are through, of the run with few files and of the run with many
            break
    assert step > 15 and seen == ({"old", "new"} if exchange else {"old", "new", "none"})
    kills.recover()


def test_killed_at_any_moment(kills):
    moments = random.Random(0)
    for i in range(12):
        assert kills.kill(after=moments.uniform(0, 0.03), exchange=i % 3 > 0) in ("old", "new", "none")
        if not kills.out.exists():
            with pytest.warns(UserWarning, match="The earlier run is restored"):
                kills.recover()
    kills.recover()


def main(count: int, seed: int) -> None:
    """Kill so many, and print what was accepted."""
    chance, seen, exchanges = random.Random(seed), {}, 0
    with tempfile.TemporaryDirectory() as folder, killer(Path(folder)) as kills:
        for _ in range(count):
            exchange = chance.random() < 0.5
            exchanges += exchange
            moment = {"step": chance.randrange(100)} if chance.random() < 0.5 else {"after": chance.uniform(0, 0.05)}
            found = kills.kill(exchange=exchange, **moment)
            seen[found] = seen.get(found, 0) + 1
    wrong = sum(number for name, number in seen.items() if name not in ("old", "new", "none"))
    print(f"{exchanges} by exchange, {count - exchanges} by two renames; left: {seen}")
    print(f"damaged or mixed accepted: {wrong} of {count}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--maker", action="store_true")
    given = parser.parse_args()
    maker() if given.maker else main(given.count, given.seed)
