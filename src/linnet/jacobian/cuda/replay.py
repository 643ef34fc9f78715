"""Chunks of a Jacobian by a CUDA graph: the kernels of one chunk, recorded once and played again for other examples.

A chunk of a deep network takes some thousand kernels, and Python needs longer to launch the kernels than a GPU needs to
run them. A CUDA graph launches all of them at once. A graph is recorded only for chunks that have been compared with
reverse mode, and Python cannot look at numbers while a graph is recorded: a network whose kernels depend on the numbers
cannot be recorded, and its chunks are made as before.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final
from weakref import WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from linnet.data import Batch

T = TypeVar("T")

SHARE = 1 / 2
"""Share of a pass's memory for the records of a Jacobian, which stay as long as the Jacobian: more memory against fewer
launches, which matter less for larger chunks."""

_all: WeakSet[Replays[Any]] = WeakSet()


@final
class Replays(Generic[T]):
    """The recorded chunks of a Jacobian, by what their kernels depend on; ``T`` is what is made of a batch."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Replay[T] | None] = {}
        self._visits: Counter[Hashable] = Counter()
        self._held = 0
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def borrow(
        self,
        key: Hashable,
        batch: Batch,
        make: Callable[[Batch], T],
        alike: Callable[[T, T], bool],
        *,
        needs: int,
        room: Callable[[], int],
        allowed: Callable[[], bool],
    ) -> Loan[T] | None:
        """What ``make`` gives for a batch on a GPU, by a recorded graph; None if there is none, or not yet.

        The result is overwritten by the next loan. So a loan is given back before the next one, and None is the answer
        while a loan is out.

        Args:
            key: What the kernels depend on beside the shapes of the inputs.
            batch: The examples, on the GPU.
            make: Makes the result.
            alike: Whether two results of the same batch differ by rounding only.
            needs: Bytes that the result takes while it is made.
            room: Gives the bytes that a pass may take.
            allowed: Whether a record may be made at all. It is asked where a batch comes again: asking may take a pass.
        """
        others = _plain_values((batch.args, batch.kwargs))
        if others is None:
            return None
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in _inputs(batch))
        whole = (key, batch.n, shapes, others, torch.cuda.current_stream(), threading.get_ident())
        if whole not in self._known:
            self._visits[whole] += 1
            held = self._held
            # Half of the memory that is free counts as room; what the records hold was free before.
            if self._visits[whole] < 2 or held + needs > SHARE * (room() + held // 2) or not allowed():
                return None
            self._known[whole] = _Replay.record(batch, make, alike)
            self._held += needs
        found = self._known[whole]
        if found is None or found.lent:
            return None
        return Loan(found, found.play(batch))

    @property
    def recorded(self) -> int:
        """Number of graphs."""
        return sum(found is not None for found in self._known.values())

    def clear(self) -> bool:
        """Free all graphs, and their memory; whether there was one."""
        found = any(self._known.values())
        self._known.clear()
        self._visits.clear()
        self._held = 0
        return found


def free_replays() -> bool:
    """Free the graphs of all Jacobians; whether there was one."""
    return any([found.clear() for found in list(_all)])


@final
class Loan(Generic[T]):
    """What a graph has made, until it is given back."""

    def __init__(self, replay: _Replay[T], value: T) -> None:
        self._replay, self.value = replay, value
        replay.lent = True

    def give_back(self) -> None:
        """The next loan may overwrite the value."""
        self._replay.lent = False


@final
class _Replay(Generic[T]):
    """One graph, the tensors that it reads, and what it makes."""

    def __init__(self, inputs: list[Tensor], graph: torch.cuda.CUDAGraph, value: T) -> None:
        self.inputs, self.graph, self.value, self.lent = inputs, graph, value, False

    @classmethod
    def record(cls, batch: Batch, make: Callable[[Batch], T], alike: Callable[[T, T], bool]) -> _Replay[T] | None:
        """The graph of what ``make`` does with a batch; None if it cannot be recorded, or gives other numbers."""
        inputs: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            inputs.append(t.clone(memory_format=torch.preserve_format))
            return inputs[-1]

        own = batch.with_inputs(keep)
        expected = try_unwatched(partial(make, own))
        if expected is None:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                value = make(own)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            _record_nothing()
            return None
        found = cls(inputs, graph, value)
        return found if alike(found.play(batch), expected) else None

    def play(self, batch: Batch) -> T:
        """What the kernels make of other examples; overwrites what they made before."""
        for mine, t in zip(self.inputs, _inputs(batch), strict=True):
            mine.copy_(t)
        self.graph.replay()
        return self.value


def can_record(device: torch.device) -> bool:
    """Whether chunks on a device can be recorded."""
    return device.type == "cuda"


def try_unwatched(make: Callable[[], T]) -> T | None:
    """What a computation gives that never waits for the GPU; None where it waits.

    Nothing can look at numbers while a graph is recorded. Networks may ask whether a graph is being recorded and then
    leave their looks out, so here the answer is yes.
    """
    before, asked = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        return make()
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return None
    finally:
        torch.cuda.is_current_stream_capturing = asked
        torch.cuda.set_sync_debug_mode(before)


def _record_nothing() -> None:
    """Record an empty graph: a graph that broke off leaves torch's random numbers waiting for its end."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _inputs(batch: Batch) -> list[Tensor]:
    """The tensors that the network takes."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    batch.with_inputs(note)
    return found


def _plain_values(tree: Any) -> tuple[Any, ...] | None:
    """The plain values among the inputs; None where an input is neither a tensor nor a plain value."""
    if isinstance(tree, Tensor):
        return ()
    if isinstance(tree, dict):
        tree = (*tree.keys(), *tree.values())
    if isinstance(tree, tuple | list):
        found = [_plain_values(item) for item in tree]
        return None if any(item is None for item in found) else tuple(found)
    return (tree,) if tree is None or isinstance(tree, bool | int | float | str) else None
