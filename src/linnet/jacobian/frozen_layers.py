"""What the layers below the first selected one compute, kept, so that later passes start above them.

A module that holds no selected parameter and is called before any of them matters returns the same in every pass. One
pass keeps what is needed of that, and on a copy of the network these calls return it at once: they are not made again.
A few examples show which calls these are, and which of their results reach the output of the network at all, by
arithmetic or by a decision. All others are replaced by NaN. The pass that keeps the results compares, on every example,
the outputs and one random combination of the rows of the Jacobian with those of the whole network.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from linnet._common import show_progress
from linnet.data import Batch, Source, move
from linnet.jacobian.passes import Pass
from linnet.jacobian.proofs import PROBE, TOLERANCE, random_signs
from linnet.jacobian.recording import NO_CHANGES, Recording
from linnet.network import READERS, close, copy_sharing_parameters

if TYPE_CHECKING:
    from linnet.jacobian.chunk import NetworkChunks
    from linnet.jacobian.linearization import Linearization

Key = tuple[str, int]
"""A call: the name of the module, and how many calls of it came before."""


@dataclass(frozen=True)
class Leaf:
    """One tensor that a call returns.

    Attributes:
        shape: Of one example, or of the whole where all examples share it.
        dtype: Its dtype.
        shared: The tensor itself where all examples share it, else None.
        needed: Whether what is above the frozen layers reads it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: Tensor | None
    needed: bool = True

    def empty(self, n: int, device: torch.device) -> Tensor:
        """What stands for a result that nobody reads."""
        hole = math.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((), hole, dtype=self.dtype, device=device).expand(n, *self.shape)


@dataclass(frozen=True)
class Result:
    """What a call returns: its tensors, and the structure they are in."""

    leaves: tuple[Leaf, ...]
    spec: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        return self  # nothing changes it


class _Replay:
    """In place of a module's forward: hands out what is kept, and runs the module for all other calls."""

    def __init__(self, module: nn.Module, name: str, state: _State) -> None:
        self.module, self.name, self.state = module, name, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.call(self.module, self.name, args, kwargs)


class _Root:
    """In place of the network's forward: takes what is kept beside the arguments."""

    def __init__(self, module: nn.Module, state: _State) -> None:
        self.module, self.state = module, state

    def __call__(self, kept: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self.state.replaying(kept):
            return self.module.forward(*args, **kwargs)


class _State:
    """What the replaced calls of one network share.

    Attributes:
        results: The calls that are replaced, by key.
        noted: While recording, copies of what calls have returned: of those that are replaced, once these are known.
        written: Whether the network writes to results that it does not read, so that they need memory of their own.
    """

    n: int
    device: torch.device

    def __init__(self) -> None:
        self.results: dict[Key, Result] = {}
        self.noted: dict[Key, Any] | None = None
        self.kept: list[Tensor] | None = None
        self.counts: dict[str, int] = {}
        self.inside = self.written = False
        self.reach: _Reach | None = None
        self.number = 0  # how many kept tensors were handed out in this pass

    def call(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        if self.inside or (self.noted is None and self.kept is None):
            return type(module).forward(module, *args, **kwargs)
        key = name, self.counts.get(name, 0)
        self.counts[name] = key[1] + 1
        if self.kept is not None and key in self.results:
            return self._kept(self.results[key])
        self.inside = True
        try:
            out = type(module).forward(module, *args, **kwargs)
        finally:
            self.inside = False
        if self.noted is not None and (not self.results or key in self.results):
            self.noted[key] = _copied(out)  # now, since the network may go on in place
        return out

    def _kept(self, result: Result) -> Any:
        assert self.kept is not None
        found = []
        for leaf in result.leaves:
            if leaf.shared is not None:
                found.append(leaf.shared.clone())
            elif leaf.needed:
                found.append(self.kept.pop(0).clone())  # a copy, since the network may go on in place
                if self.reach is not None:
                    self.reach.follow(found[-1], self.number)
                    self.number += 1
            else:
                empty = leaf.empty(self.n, self.device)
                found.append(empty.clone() if self.written else empty)
        return pytree.tree_unflatten(found, result.spec)

    def replaying(self, kept: Sequence[Tensor]) -> _State:
        self.kept, self.counts, self.number = list(kept), {}, 0
        self.n, self.device = len(kept[0]), kept[0].device
        return self

    def recording(self) -> _State:
        self.noted, self.counts = {}, {}
        return self

    def __enter__(self) -> _State:
        return self

    def __exit__(self, *error: object) -> None:
        self.kept = self.noted = None
        self.inside = False


@final
class FrozenLayers:
    """The frozen calls of a linearization, found on a few examples.

    Args:
        lin: The linearization.
        batch: The first examples.
    """

    def __init__(self, lin: Linearization, batch: Batch) -> None:
        probe = batch.part(0, min(PROBE, batch.n))
        self.lin, self._state = lin, _State()
        model = copy_sharing_parameters(lin.module)
        self._whole = replace(lin.network, module=model)
        selected = set(lin.network.places)
        for name, module in model.named_modules():
            inside = any(place.startswith(f"{name}.") for place in selected)
            if name and not inside and type(module).forward is not nn.Module.forward:
                module.forward = _Replay(module, name, self._state)
        reference, noted = self._recorded(probe, grad=True)
        found = {key: out for key, out in noted.items() if not _depends(out)}
        if not any(_has_parameters(model, name) for name, _ in found):
            raise ValueError(
                "There is nothing to keep: no module with parameters is called before the first selected parameter is "
                "used. Select the top layers only, with params= or top=."
            )
        self._state.results = self._described(found, probe)
        self.top = self._above()
        if not self._agrees(found, probe, reference.out):
            raise _cannot_start()

    def _agrees(self, found: dict[Key, Any], probe: Batch, reference: Tensor) -> bool:
        """Whether the network above gives the same outputs; finds out what has to be kept for that."""
        for self._state.written in (False, True):
            try:
                self._mark_needed(found, probe)
                with torch.no_grad(), self.lin.network.in_precision("highest"):
                    out = self.top.forward({}, self.with_kept(probe, self.of(found)))
                return close(out, reference, TOLERANCE[self.lin.rules.coarsest])
            except (RuntimeError, IndexError):
                continue
        return False

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors that are kept for each example."""
        return [leaf for r in self._state.results.values() for leaf in r.leaves if leaf.needed and leaf.shared is None]

    @property
    def bytes_each(self) -> int:
        """Bytes that are kept for one example."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def record(self, batch: Batch) -> list[Tensor]:
        """What is kept of a batch, each (n, ...), compared with the whole network."""
        recording, noted = self._recorded(batch, grad=True)
        missing = [key for key in self._state.results if key not in noted]
        if missing:
            raise ValueError(f"Not every example calls {missing[0][0]!r}; keep the blocks instead (J.cached).")
        kept = self.of(noted)
        with self.lin.network.in_precision("highest"):
            self._check(batch, recording, kept)
        return kept

    def of(self, noted: dict[Key, Any]) -> list[Tensor]:
        """The tensors that are kept, from what calls have returned."""
        found = []
        for key, result in self._state.results.items():
            tensors = pytree.tree_leaves(noted[key])
            found += [
                t.detach()
                for t, leaf in zip(tensors, result.leaves, strict=True)
                if leaf.needed and leaf.shared is None
            ]
        return found

    @staticmethod
    def with_kept(batch: Batch, kept: list[Tensor]) -> Batch:
        """The batch as the network above takes it."""
        return replace(batch, args=(kept, batch.args, batch.kwargs), kwargs={})

    def _recorded(self, batch: Batch, *, grad: bool) -> tuple[Recording, dict[Key, Any]]:
        leaves = {name: t.detach().requires_grad_(grad) for name, t in self.lin.theta.items()}
        with torch.set_grad_enabled(grad), self.lin.network.in_precision("highest"), self._state.recording() as state:
            out = self._whole.forward(leaves, batch)
            assert state.noted is not None
            return Recording(out, leaves, [], NO_CHANGES), dict(state.noted)

    def _described(self, found: dict[Key, Any], probe: Batch) -> dict[Key, Result]:
        """Which tensors have an axis of examples: those whose first axis follows the number of examples."""
        fewer = self._recorded(probe.part(0, probe.n - 1), grad=False)[1] if probe.n > 1 else found
        results = {}
        for key, out in found.items():
            tensors, spec = pytree.tree_flatten(out)
            others = pytree.tree_leaves(fewer.get(key, ()))
            if len(others) != len(tensors) or not all(isinstance(t, Tensor) for t in tensors):
                raise ValueError(f"What {key[0]!r} returns is not made of tensors alone; keep the blocks instead.")
            leaves = []
            for t, other in zip(tensors, others, strict=True):
                by_example = t.ndim > 0 and len(t) == probe.n and (probe.n == 1 or len(other) == probe.n - 1)
                if not by_example and (t.shape != other.shape or not torch.equal(t.detach(), other.detach())):
                    raise ValueError(f"What {key[0]!r} returns has no axis of examples; keep the blocks instead.")
                shape = t.shape[1:] if by_example else t.shape
                leaves.append(Leaf(tuple(shape), t.dtype, None if by_example else t.detach()))
            results[key] = Result(tuple(leaves), spec)
        return results

    def _above(self) -> Linearization:
        """The linearization of a copy of the network whose frozen calls are replaced."""
        model = self._whole.module
        # The copy that records keeps the forward of the module.
        self._whole = replace(self._whole, module=copy.copy(model))
        model.forward = _Root(self._whole.module, self._state)
        # What passes of the network above leave behind need not be checked.
        return self.lin.with_network(replace(self._whole, module=model, first_state=None))

    def _mark_needed(self, found: dict[Key, Any], probe: Batch) -> None:
        """Leave out the tensors that nothing reads but calls that are replaced themselves."""
        results = self._state.results
        for key, result in results.items():
            results[key] = replace(result, leaves=tuple(replace(leaf, needed=True) for leaf in result.leaves))
        kept = self.of(found)
        self._state.reach = reach = _Reach()
        try:
            with torch.no_grad(), self.lin.network.in_precision("highest"), reach:
                out = self.top.forward({}, self.with_kept(probe, kept))
        finally:
            self._state.reach = None
        needed = iter([number in reach.of(out) for number in range(len(kept))])
        for key, result in results.items():
            leaves = [leaf if leaf.shared is not None else replace(leaf, needed=next(needed)) for leaf in result.leaves]
            results[key] = replace(result, leaves=tuple(leaves))

    def _check(self, batch: Batch, whole: Recording, kept: list[Tensor]) -> None:
        """Raise unless the network above the frozen layers is the whole network on a batch, in value and derivative.

        Args:
            batch: The examples.
            whole: A pass of the whole network.
            kept: What is kept of the examples.
        """
        top = self.top.rules.record(self.with_kept(batch, kept), NO_CHANGES)
        u = random_signs(*top.out.shape, seed=batch.start, like=top.out.detach())
        first, second = (self.lin.rules.truth(recording, u, "highest") for recording in (whole, top))
        same = close(top.out, whole.out, TOLERANCE[self.lin.rules.coarsest])
        if not same or (first.judges and first.different(second.G)[0]):
            raise _cannot_start()


@final
class SourceWithActivations(Source):
    """A source whose batches bring what the frozen layers compute for them.

    Args:
        base: The data.
        tensors: What is kept, each (n, ...).
        where: In words.
    """

    def __init__(self, base: Source, tensors: list[Tensor], where: str) -> None:
        self.base, self.tensors = base, tensors
        self.n, self.by_position = base.n, base.by_position
        self.kind = f"{base.kind}, with activations {where}"

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        for batch in self.base.batches(size, start, stop):
            part = [t[batch.start : batch.start + batch.n] for t in self.tensors]
            yield FrozenLayers.with_kept(batch, part)

    def code(self, start: int = 0, stop: int | None = None) -> int:
        return self.base.code(start, stop)  # the activations follow from the data

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        held = list(chunks)
        for chunk, batch in zip(held, self.base._gather(held), strict=True):
            yield FrozenLayers.with_kept(batch, [t.index_select(0, move(chunk, t.device)) for t in self.tensors])


def store_activations(chunks: NetworkChunks, limit: int, folder: str | os.PathLike[str] | None) -> NetworkChunks:
    """The chunks of the network above its frozen layers, whose results one pass keeps.

    Args:
        chunks: The chunks of the whole network.
        limit: Bytes that may be kept in memory.
        folder: Keep the results in a file there instead; None for memory.

    Raises:
        MemoryError: Before the pass, if the results will not fit.
        ValueError: If there is no frozen layer, or the network cannot be started above them.
    """
    passes, settings = Pass(chunks), chunks.settings
    few = min(PROBE, chunks.n)
    frozen = FrozenLayers(chunks.lin, next(iter(chunks.batches(few, 0, few))))
    tensors = storage(frozen, chunks.n, limit, folder)
    size = passes.chunk_size()

    def run() -> None:
        with show_progress(chunks.n, "frozen layers", progress=settings.progress) as tick:
            for batch in chunks.batches(size, 0, chunks.n):
                for t, part in zip(tensors, frozen.record(batch), strict=True):
                    t[batch.start : batch.start + batch.n] = part
                tick(batch.n)

    passes.complete(run)
    source = SourceWithActivations(chunks.source, tensors, "in memory" if folder is None else f"in {folder}")
    return chunks.renewed(frozen.top, source)


def storage(frozen: FrozenLayers, n: int, limit: int, folder: str | os.PathLike[str] | None) -> list[Tensor]:
    """Room for what is kept of n examples: in memory, or in a file of ``folder`` that vanishes with the tensors.

    Raises:
        MemoryError: If it is more than ``limit`` bytes, or half of what is free on the disk.
    """
    needed = n * frozen.bytes_each
    if folder is not None:
        limit = shutil.disk_usage(folder).free // 2
    if needed > limit:
        where = "" if folder is None else f" in {folder}"
        raise MemoryError(
            f"What the frozen layers compute takes {needed:,} bytes, {frozen.bytes_each:,} for each of {n:,} examples, "
            f"and {limit:,} are available for it{where}. Allow more with memory=, or give folder= on a disk with room."
        )
    if folder is not None:
        return [_on_disk(leaf, n, folder) for leaf in frozen.leaves]
    return [torch.empty(n, *leaf.shape, dtype=leaf.dtype, device=frozen.lin.device) for leaf in frozen.leaves]


def _on_disk(leaf: Leaf, n: int, folder: str | os.PathLike[str]) -> Tensor:
    handle, path = tempfile.mkstemp(prefix="linnet-", suffix=".activations", dir=folder)
    os.close(handle)
    count = n * math.prod(leaf.shape)
    t = torch.from_file(path, shared=True, size=count, dtype=leaf.dtype).view(n, *leaf.shape)
    os.unlink(path)  # the file stays as long as it is mapped
    return t


def _cannot_start() -> ValueError:
    return ValueError(
        "The network cannot be started above its frozen layers: what it computes there depends on more than "
        "what modules return. Keep the blocks instead (J.cached), or pass the top as a network of its own."
    )


@final
class _Reach(TorchFunctionMode):
    """Follows numbered tensors through a forward pass: whose values a result depends on, in whatever way."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, set[int]] = {}
        self._held: list[Tensor] = []  # a freed tensor's id would be given to another
        self._decided: set[int] = set()  # sources whose values left the tensors, as a number or a truth value

    def follow(self, t: Tensor, number: int) -> None:
        """Number a tensor."""
        self._add(t, {number})

    def of(self, t: Tensor) -> set[int]:
        """The numbers that a tensor depends on."""
        return self._sources.get(id(t), set()) | self._decided

    def _add(self, t: Tensor, sources: set[int]) -> None:
        for part in (t, t._base if t._is_view() else None):  # what is written into a view is in its base
            if part is not None:
                self._held.append(part)
                self._sources[id(part)] = self._sources.get(id(part), set()) | sources

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs or {}))
        versions = [t._version for t in given]
        out = func(*args, **(kwargs or {}))
        bases = [t._base for t in given if t._is_view() and t._base is not None]
        sources = set().union(*(self._sources.get(id(t), set()) for t in (*given, *bases)))
        if sources:
            made = _tensors(out)
            changed = [t for t, version in zip(given, versions, strict=True) if t._version != version]
            for t in (*made, *changed):
                self._add(t, sources)
            if not made and not changed and func in READERS:
                self._decided |= sources
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]


def _depends(out: Any) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(out))


def _copied(out: Any) -> Any:
    def copied(t: Any) -> Any:
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t

    return pytree.tree_map(copied, out)


def _has_parameters(model: nn.Module, name: str) -> bool:
    return any(True for _ in model.get_submodule(name).parameters())
