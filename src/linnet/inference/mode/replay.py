"""Work that is done again and again on the same tensors, recorded on a GPU and then launched whole.

A small step takes a GPU less time than Python takes to launch its operations one by one. A recording (a CUDA graph)
launches all of them at once: the same operations on the same memory, without Python. `Recorder` makes them; `Repeated`
is a function of minibatches by way of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linnet._common import messages
from linnet.data.batch import Deferred, Given
from linnet.jacobian.jacobian import Jacobian

DEVICE = "cuda"

KINDS = 4
"""Kinds of minibatches, by the shapes of their inputs, that a network's passes are recorded for."""

TRIALS = 2
"""Minibatches for which what a network's recorded pass finds is compared with what the pass itself finds."""

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""The relative difference of the two that rounding explains."""

Work = Callable[[], None]
Found = tuple[Tensor, Tensor]
Step = Callable[[Jacobian, Tensor], Found]


@final
class Recorder:
    """Makes recordings whose intermediate results share memory, so that one must run after another.

    What a recording is to leave behind it writes into tensors that were made before it. The work must have run before,
    so that nothing in it is made for the first time, and must read no number from a tensor (`waits`).

    Args:
        device: Where the work is done.

    Example:
        >>> x, y = torch.ones(2), torch.zeros(2)
        >>> again = Recorder(x.device)(lambda: y.add_(x))
        >>> again(), again(), y
        (None, None, tensor([2., 2.]))
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, work: Callable[[], object]) -> Work:
        """What does the work again; it is not done now. Off a GPU it is the work itself."""
        if self._device.type != "cuda":
            return lambda: (work(), None)[1]
        graph, stream = torch.cuda.CUDAGraph(), _stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, capture_error_mode="relaxed")  # asking for free memory is no error
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one that recordings are made on, with its work space for products outside of all recordings."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
    return stream


@final
class Repeated:
    """A function of minibatches and their targets, recorded where minibatches come again, or others of their shapes.

    One that `Jacobian.stays` is recorded when it comes for the second time. Others have their inputs written over those
    of the first of their kind, whose pass is recorded. The network in it may be anybody's: one that reads numbers from
    tensors is not recorded, and no recording is used before it has found what the step itself finds.

    Args:
        step: A minibatch and its targets to a vector (p,) and to rows (m, c). Other tensors that it reads stay where
            they are.
        targets: A minibatch to its targets, in memory of their own.
        like: The vector's dtype and device.
        stay: Whether recording is worth its time for minibatches that stay.
        alike: Whether it is for others.
    """

    def __init__(
        self, step: Step, targets: Callable[[Jacobian], Tensor], like: Tensor, *, stay: bool, alike: bool
    ) -> None:
        self._step, self._targets = step, targets
        serves = like.device.type == DEVICE
        self._stay, self._alike = stay and serves, alike and serves
        self._recorder, self._out = Recorder(like.device), torch.empty_like(like)
        self._stays: dict[Jacobian, _Recorded | None] = {}
        self._compared = False
        self._kinds: dict[Hashable, _Slot | None] = {}

    def __call__(self, part: Jacobian) -> tuple[Tensor, Tensor, Tensor]:
        """The vector, until the next call; the rows and the targets, until the next one with this minibatch."""
        if part.stays and self._stay:
            return self._of_one_that_stays(part)
        y, slot = self._targets(part), None
        kind = kind_of(part) if self._alike and not part.stays else None
        if kind in self._kinds:
            slot = self._kinds[kind]
        if slot is None:
            truth = self._step(part, y)
            if kind is not None and kind not in self._kinds:  # now that all is there that a first step makes
                self._kinds[kind] = self._slot(part, y) if len(self._kinds) < KINDS else None
            return *truth, y
        if slot.trials == TRIALS:
            return *slot(part, y), y
        slot.trials += 1
        truth, found = self._step(part, y), slot(part, y)
        if not all(map(_close, found, truth)):
            self._kinds[kind] = None
        return *truth, y

    def _of_one_that_stays(self, part: Jacobian) -> tuple[Tensor, Tensor, Tensor]:
        known = self._stays.get(part)
        if known is None:
            y = self._targets(part)
            if part in self._stays:  # the first time has made what the recording is to find there
                known = self._stays[part] = self._recorded(part, y)
            self._stays.setdefault(part, None)
            if known is None:
                return *self._step(part, y), y
        known.work()
        if not self._compared:
            self._compared, truth = True, self._step(part, known.y)
            self._stay = all(map(_close, (known.out, known.f), truth))
            return *truth, known.y
        return known.out, known.f, known.y

    def _recorded(self, part: Jacobian, y: Tensor) -> _Recorded | None:
        try:
            return _Recorded(self._recorder, self._step, part, y, self._out)
        except RuntimeError:  # an operation that cannot be
            self._stay = False
            return None

    def _slot(self, part: Jacobian, y: Tensor) -> _Slot | None:
        """A recording for minibatches like this one; None where the network cannot be recorded."""
        slot = _Slot(part, y)
        if waits(lambda: self._step(slot.own, slot.y)):
            return None
        recorded = self._recorded(slot.own, slot.y)
        if recorded is None:
            return None
        slot.recorded = recorded
        return slot


class _Recorded:
    """A step on one minibatch, which writes the vector to ``out`` and the rows to memory of their own."""

    def __init__(self, recorder: Recorder, step: Step, part: Jacobian, y: Tensor, out: Tensor) -> None:
        self.y, self.out = y, out
        self.f = torch.empty(part.n, part.c, dtype=part.dtype, device=part.device)

        def work() -> None:
            vector, f = step(part, y)
            out.copy_(vector)
            self.f.copy_(f)

        self.work = recorder(work)


class _Slot:
    """A step on one minibatch after another, each written over the one before.

    Attributes:
        own: The minibatch whose inputs lie in memory of their own.
        y: Its targets.
        trials: How often the recording was compared with the step.
        recorded: The step.
    """

    recorded: _Recorded

    def __init__(self, part: Jacobian, y: Tensor) -> None:
        self.y, self.trials = y.clone(), 0
        given = _given(part)
        copied = given.batch._map(lambda t: t.clone() if isinstance(t, Tensor) else t, scalars=True)
        self._network = torch.empty(part.n, part.c, dtype=part.dtype, device=part.device)
        late = Deferred(lambda f, index: self._network.copy_(f), most=-1)  # at once
        self.own = part.over(Given(copied, given.kind), late)

    def __call__(self, part: Jacobian, y: Tensor) -> Found:
        """What the step finds for another minibatch."""
        self.y.copy_(y)
        for mine, theirs in zip(_inputs(self.own), _inputs(part), strict=True):
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                mine.copy_(theirs)
        self.recorded.work()
        late = part._network_chunks("keeps no inputs").late
        if late is None:
            messages.check_outputs_finite(self._network, 0, part.index)
        else:
            late.add(self._network.clone(), part.index)
        return self.recorded.out, self.recorded.f.clone()


def kind_of(part: Jacobian) -> Hashable | None:
    """What a minibatch shares with those that can be written over it; None where there are none."""
    if not isinstance(part._source, Given) or part.passes.chunk_size(columns=True) < part.n:
        return None
    leaves, spec = pytree.tree_flatten((part._source.batch.args, part._source.batch.kwargs))
    kinds: list[Hashable] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return tuple(kinds)


def _inputs(part: Jacobian) -> list[object]:
    batch = _given(part).batch
    return pytree.tree_flatten((batch.args, batch.kwargs))[0]


def _given(part: Jacobian) -> Given:
    assert isinstance(part._source, Given)
    return part._source


def waits(work: Callable[[], object]) -> bool:
    """Whether the work, which is done, reads a number from a tensor on a GPU, for which Python waits."""
    try:
        with _no_waiting():
            work()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    return False


@contextmanager
def _no_waiting() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _close(found: Tensor, truth: Tensor) -> bool:
    return bool((found - truth).norm() <= CLOSE.get(truth.dtype, 1e-2) * truth.norm())
