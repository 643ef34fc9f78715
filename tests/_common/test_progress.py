"""Progress bars: shown for long computations on a terminal, and gone afterwards."""

from __future__ import annotations

import io
import sys

import pytest

from linnet._common import show_progress


def test_bar_is_silent_off_a_terminal_and_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for progress in (None, False):
        with show_progress(total=10, label="J v", progress=progress) as tick:
            tick(10)
    assert stream.getvalue() == ""


def test_bar_shows_a_long_pass_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress(10, "J v", progress=True) as tick:
        now[0] = 1.0
        tick(4)
        assert stream.getvalue() == ""
        now[0] = 3.0
        tick(4)
        assert "J v:  80%" in stream.getvalue()
    assert stream.getvalue().endswith("\r")  # cleared


def test_bar_lets_interrupts_through() -> None:
    with pytest.raises(KeyboardInterrupt), show_progress(10, progress=None) as tick:
        tick(3)
        raise KeyboardInterrupt


def test_a_note_is_asked_for_only_where_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now, asked = io.StringIO(), [0.0], []
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)

    def note() -> str:
        asked.append(now[0])
        return "residual 1e-3"

    for progress in (False, None, True):
        with show_progress(10, "CG", progress=progress, unit="iterations") as tick:
            now[0] += 3.0
            tick(1, note)
    assert asked == [9.0]
    assert "residual 1e-3" in stream.getvalue() and "1/10" in stream.getvalue()
