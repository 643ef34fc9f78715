"""Plugin of pytest for `mutate.py`: which tests pass, how long they take, and which lines each of them executes."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

_lines: dict[str, set[int]] = defaultdict(set)
_tests: dict[str, dict[str, Any]] = {}


def _watch(prefix: str) -> None:
    """Collect the lines of files under a folder, in all threads."""
    if sys.version_info >= (3, 12):
        monitor, tool = sys.monitoring, 4

        def line(code: CodeType, number: int) -> Any:
            if code.co_filename.startswith(prefix):
                _lines[code.co_filename].add(number)
            return monitor.DISABLE  # until the next test

        monitor.use_tool_id(tool, "mutate")
        monitor.register_callback(tool, monitor.events.LINE, line)
        monitor.set_events(tool, monitor.events.LINE)
        return

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            _lines[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def call(frame: FrameType, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename.startswith(prefix) else None

    threading.settrace(call)
    sys.settrace(call)


def pytest_configure() -> None:
    limit = int(os.environ["MUTATE_MEMORY"])  # a wrong size must not end the machine
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if "MUTATE_TRACE" in os.environ:
        _watch(os.environ["MUTATE_TRACE"])


def pytest_runtest_logstart(nodeid: str) -> None:
    _lines.clear()
    if "MUTATE_TRACE" in os.environ and sys.version_info >= (3, 12):
        sys.monitoring.restart_events()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seen = _tests.setdefault(report.nodeid, {"passed": False, "failed": False, "seconds": 0.0})
    seen["passed"] |= report.when == "call" and report.passed
    seen["failed"] |= report.failed
    seen["seconds"] += report.duration


def pytest_runtest_logfinish(nodeid: str) -> None:
    if "MUTATE_TRACE" in os.environ:
        _tests[nodeid]["lines"] = {file: sorted(numbers) for file, numbers in _lines.items()}


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTATE_OUT"]).write_text(json.dumps(_tests))
