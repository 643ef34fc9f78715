"""The memory that a computation takes beside its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile


def peak_beside_result(run: Callable[[], object]) -> int:
    """Bytes that tensors on the CPU take at most during a call, less the bytes that the call leaves behind."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    del result
    events.sort(key=lambda event: event["ts"])
    taken = list(accumulate(event["args"]["Bytes"] for event in events))
    return max(taken) - taken[-1]
