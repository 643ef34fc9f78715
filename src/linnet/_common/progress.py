"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm


class Tick(Protocol):
    """Called with the number of units that are done, and with a function that says more about them."""

    def __call__(self, done: int = 1, note: Callable[[], str] | None = None, /) -> Any: ...


@contextmanager
def show_progress(
    total: int | None, label: str = "", *, progress: bool | None = None, unit: str = "examples"
) -> Iterator[Tick]:
    """A progress bar for a computation that takes longer than two seconds; the bar goes when the computation ends.

    Args:
        total: Number of examples, or of other units; None where it is not known.
        label: What is being computed.
        progress: None shows the bar on a terminal only, False never, True always.
        unit: What is counted. Millions of other units than examples are shown as millions.

    Yields:
        The function to call with the number of units that are done. Its note is asked for only where a bar is shown.

    Example:
        >>> with show_progress(total=10, label="J^T J V", progress=False) as tick:
        ...     tick(10)
    """
    if progress is False:
        yield lambda done=1, note=None, /: None
        return
    disable = None if progress is None else False
    how: dict[str, Any] = {"unit": f" {unit}", "unit_scale": unit != "examples" and (total or 0) >= 10**6}
    with tqdm(total=total, desc=label, delay=2, leave=False, disable=disable, **how) as shown:

        def tick(done: int = 1, note: Callable[[], str] | None = None, /) -> None:
            if note is not None and not shown.disable:
                shown.set_postfix_str(note(), refresh=False)
            shown.update(done)

        yield tick
