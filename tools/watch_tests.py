"""Run pytest in a forked process for `mutate.py`: which tests pass, how long they take, which lines they execute."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401  processes are forked from one that has imported what takes long
import numpy as np
import pytest
import scipy.optimize  # noqa: F401
import sklearn.linear_model  # noqa: F401
import torch  # noqa: F401

gc.freeze()  # what is shared is not searched again in every process


class Watch:
    """Plugin of pytest. Probed sources write into `hits`, one byte a line (`mutants.probed`).

    What a fixture of several tests executes counts for each of them, though the fixture runs before the first one only.
    """

    def __init__(self) -> None:
        from line_hits import hits  # of the tree

        self.tests, self.hits = dict[str, dict[str, Any]](), hits
        self.shared = defaultdict[int, set[int]](set)

    def lines(self) -> set[int]:
        return set(np.frombuffer(self.hits[:], np.uint8).nonzero()[0].tolist())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self.lines()
        self.hits[:] = bytes(len(self.hits))
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.shared[id(fixturedef)] |= self.lines()
            for line in before:
                self.hits[line] = 1

    def pytest_runtest_teardown(self, item: Any) -> None:
        for fixture in (f for found in item._fixtureinfo.name2fixturedefs.values() for f in found):
            for line in self.shared.get(id(fixture), ()):
                self.hits[line] = 1

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            self.tests = {item.nodeid: {} for item in session.items}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.hits[:] = bytes(len(self.hits))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen = self.tests.setdefault(report.nodeid, {"passed": False, "failed": False, "seconds": 0.0})
        seen["passed"] |= report.when == "call" and report.passed
        seen["failed"] |= report.failed
        seen["seconds"] += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid]["lines"] = sorted(self.lines())


def run(tree: Path, arguments: list[str], environment: dict[str, str], memory: int) -> None:
    """Body of the process: tests of a tree, with its own source; the answer is the file `mutate.json`."""
    os.setsid()
    os.chdir(tree)
    os.environ.update(environment)
    log = os.open("mutate.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True  # a stale .pyc would hide the next mutant
    sys.path.insert(0, str(tree / "src"))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # a wrong size must not end the machine
    watch = Watch()
    plain = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*plain, *arguments], [watch])
    Path("mutate.json").write_text(json.dumps({"status": int(status), "tests": watch.tests}))
    os._exit(0)
