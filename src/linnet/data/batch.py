"""A batch of examples, and the interface of everything that gives batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linnet._common import combine_codes, row_codes, text_code
from linnet.data import checks


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Consecutive examples of a data set, split into what the model takes and the rest.

    Attributes:
        args: Positional arguments of the model's forward.
        kwargs: Keyword arguments of the model's forward.
        rest: The data that the model does not take, such as targets: one item as it is, several items as a tuple, the
            items of a dict as a dict; None if there is nothing.
        start: Position of the first example in the source.
        n: Number of examples.
        positions: For a subset, the examples' positions in the full data, (n,); otherwise None.
        f: The network's outputs (n, c), where a pass has computed them; otherwise None.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rest: Any
    start: int
    n: int
    positions: Tensor | None = None
    f: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """Positions of the examples in the full data, (n,), for looking up targets or weights."""
        return torch.arange(self.start, self.start + self.n) if self.positions is None else self.positions

    def part(self, start: int, stop: int) -> Batch:
        """Examples start to stop of this batch, as views."""
        return self._map(
            lambda leaf: leaf[start:stop],
            start=self.start + start,
            n=stop - start,
            positions=None if self.positions is None else self.positions[start:stop],
        )

    def split(self, size: int) -> Iterator[Batch]:
        """Batches of at most ``size`` examples, in order.

        Example:
            >>> whole = Batch((torch.zeros(5, 2),), {}, None, start=10, n=5)
            >>> [(b.start, b.n) for b in whole.split(2)]
            [(10, 2), (12, 2), (14, 1)]
        """
        for start in range(0, self.n, size):
            yield self.part(start, min(start + size, self.n))

    def take(self, index: Tensor) -> Batch:
        """Copies of the examples at ``index``, which counts from the batch's first."""
        return self._map(
            lambda leaf: (
                leaf.index_select(0, move(index, leaf.device))
                if isinstance(leaf, Tensor)
                else [leaf[i] for i in index.tolist()]
            ),
            n=len(index),
            positions=index + self.start if self.positions is None else self.positions[index],
        )

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on ``device``; copies to a GPU do not wait."""
        return self._map(lambda leaf: move(leaf, device) if isinstance(leaf, Tensor) else leaf, scalars=True)

    def with_inputs(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with ``fn`` of each tensor that the model takes; the rest is untouched.

        Example:
            >>> batch = Batch((torch.zeros(2, 3),), {}, torch.zeros(2), start=0, n=2).with_inputs(Tensor.double)
            >>> batch.args[0].dtype, batch.rest.dtype
            (torch.float64, torch.float32)
        """

        def of(leaf: Any) -> Any:
            return fn(leaf) if isinstance(leaf, Tensor) else leaf

        return replace(self, args=_map(of, self.args, True), kwargs=_map(of, self.kwargs, True))

    def without_inputs(self) -> Batch:
        """The batch without its inputs, once the network has run; the rest is copied, since the data may change."""
        rest = _map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, self.rest, True)
        positions = torch.arange(self.start, self.start + self.n) if self.positions is None else self.positions
        return replace(self, args=(), kwargs={}, rest=rest, positions=positions)

    @property
    def input_bytes(self) -> int:
        """Memory of the tensors that the model takes."""
        return _bytes((self.args, self.kwargs))

    @property
    def rest_bytes(self) -> int:
        """Memory of the tensors among the rest."""
        return _bytes(self.rest)

    def code(self) -> int:
        """A checksum of all that the examples hold, from 0 to 2^64 - 1; those of parts add up to that of the batch."""
        found = 0
        for number, (name, leaf) in enumerate(leaves((self.args, self.kwargs, self.rest))):
            codes = row_codes(leaf) if isinstance(leaf, Tensor) else torch.tensor([text_code(s) for s in leaf])
            kind = (name, str(leaf.dtype), tuple(leaf.shape[1:])) if isinstance(leaf, Tensor) else (name, "text")
            found += (2 * number + 1) * combine_codes(codes + text_code(kind), self.start)
        return found % 2**64

    @staticmethod
    def join(batches: Sequence[Batch], start: int) -> Batch:
        """Batches, which have no inputs left, as one.

        Example:
            >>> parts = [Batch((), {}, torch.ones(n), start=0, n=n, positions=torch.arange(n)) for n in (2, 3)]
            >>> whole = Batch.join(parts, 10)
            >>> whole.start, whole.n, whole.rest.shape, whole.index.tolist()
            (10, 5, torch.Size([5]), [0, 1, 0, 1, 2])
        """
        rest = _join([batch.rest for batch in batches])
        positions = torch.cat([batch.index for batch in batches])
        return Batch((), {}, rest, start, len(positions), positions)

    def _map(self, fn: Callable[[Any], Any], *, scalars: bool = False, **changes: Any) -> Batch:
        args, kwargs, rest = (_map(fn, value, scalars) for value in (self.args, self.kwargs, self.rest))
        return replace(self, args=args, kwargs=kwargs, rest=rest, **changes)


class Source(ABC):
    """Examples in a fixed order, given batch by batch as often as asked.

    Attributes:
        n: Number of examples.
        kind: What the data is, in a few words.
        by_position: Whether any examples can be chosen, with ``subset``.
        changes: Whether examples may be other ones when they are read again; see ``changing``.
    """

    n: int
    kind: str
    by_position: bool = False
    changes: bool = False

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches of at most ``size`` examples that cover examples start to stop (default: all), in order."""
        stop = self.n if stop is None else stop
        checks.check_range(size, start, stop, self.n)
        return self._batches(size, start, stop) if start < stop else iter(())

    def subset(self, index: Tensor) -> Source:
        """The examples at ``index`` (m,), in that order; ``Batch.index`` has their positions here."""
        checks.check_subset_index(index, self.n)
        return Subset(self, index.cpu().long())

    def code(self, start: int = 0, stop: int | None = None) -> int:
        """A checksum of examples start to stop (default: all), from 0 to 2^64 - 1.

        The codes of parts add up, modulo 2^64, to the code of all. Data that earlier passes have compared is not read
        again; other data is.

        Example:
            >>> from linnet.data.sources import as_source
            >>> source = as_source(torch.arange(10.0)[:, None], torch.nn.Linear(1, 1))
            >>> source.code() == (source.code(0, 3) + source.code(3, 10)) % 2**64
            True
        """
        return sum(batch.code() for batch in self.batches(4096, start, stop)) % 2**64

    def glimpse(self) -> int:
        """A checksum that says whether two ranks have the same data: of all examples where these are at hand."""
        return self.code()

    def changing(self) -> Source:
        """The same source, for data whose examples are others every time they are read (augmentation)."""
        return self

    @abstractmethod
    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        """The batches of a valid range that is not empty."""

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each index tensor; only asked of a source that is ``by_position``."""
        raise NotImplementedError


class Subset(Source):
    """Chosen examples of another source, in any order."""

    by_position = True

    def __init__(self, base: Source, index: Tensor) -> None:
        if not base.by_position:
            raise checks.no_subset(base.kind)
        self.base, self.indices = base, index
        self.n = len(index)
        self.kind = f"{self.n} of {base.n} examples, {base.kind}"

    def subset(self, index: Tensor) -> Source:
        checks.check_subset_index(index, self.n)
        return Subset(self.base, self.indices[index.cpu().long()])

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        return self.base._gather([self.indices[chunk] for chunk in chunks])

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        chunks = self.indices[start:stop].split(size)
        for chunk, batch in zip(chunks, self.base._gather(chunks), strict=True):
            yield replace(batch, start=start, positions=chunk)
            start += len(chunk)


class Joined(Source):
    """The examples of several sources, one source after the other.

    Args:
        parts: The sources. They may be streams, and each is read in its own way.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = tuple(parts)
        self.n = sum(part.n for part in self.parts)
        self.kind = " and ".join(part.kind for part in self.parts)

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        before = 0
        for part in self.parts:
            first, last = max(start - before, 0), min(stop - before, part.n)
            for batch in part.batches(size, first, last) if first < last else ():
                yield replace(batch, start=batch.start + before, positions=None)
            before += part.n


class SingleBatch(Source):
    """One batch that was read already."""

    by_position = True

    def __init__(self, batch: Batch, kind: str) -> None:
        self.batch, self.n, self.kind = batch, batch.n, kind

    @property
    def indices(self) -> Tensor:
        """Positions of its examples in the full data, (n,)."""
        return self.batch.index

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        return self.batch.part(start, stop).split(size)

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        return (self.batch.take(chunk) for chunk in chunks)


def move(t: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device; a copy to a GPU does not wait."""
    # A copy from a GPU to the CPU that does not wait would be read before it has arrived.
    return t.to(device, non_blocking=torch.device(device).type == "cuda")


def leaves(value: Any, name: str = "the data") -> Iterator[tuple[str, Any]]:
    """Name and value of everything that has one entry for each example: tensors and lists of strings."""
    if is_strings(value) or (isinstance(value, Tensor) and value.ndim > 0):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{key!r} of {name}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"item {i} of {name}")


def check_finite(batch: Batch, positions: Sequence[int] | None = None) -> None:
    """No floating input of the batch holds NaN or infinity; the error names the first example that does.

    Args:
        batch: The batch.
        positions: The examples' positions, where they are not consecutive.
    """
    inputs = [*leaves(batch.args, "the inputs"), *leaves(batch.kwargs, "the inputs")]
    found = [(find_bad_row(leaf), name) for name, leaf in inputs]
    bad = min(((row, name) for row, name in found if row is not None), default=None)
    if bad is not None:
        row, name = bad
        raise checks.not_finite(batch.start + row if positions is None else positions[row], name)


def find_bad_row(tensor: Any, *, block: int = 2**24) -> int | None:
    """The first row that holds NaN or infinity; reads the tensor once, ``block`` entries at a time."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    rows = max(1, block * len(tensor) // max(1, tensor.numel()))
    for start in range(0, len(tensor), rows):
        part = tensor[start : start + rows].detach()
        part = part.float() if part.dtype.itemsize < 4 else part
        # A finite sum means finite entries and needs no temporary; another sum may only have overflowed.
        if not torch.isfinite(part.sum()):
            bad = ~torch.isfinite(part).reshape(len(part), -1).all(dim=1)
            if bad.any():
                return start + int(bad.nonzero()[0])
    return None


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def is_strings(value: Any) -> bool:
    """Whether this is what collation makes of strings: a list of them, one for each example."""
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], str | bytes)


def _map(fn: Callable[[Any], Any], value: Any, scalars: bool) -> Any:
    """The value with ``fn`` of its leaves; tensors without dimensions are leaves only where ``scalars``."""
    if is_strings(value) or (isinstance(value, Tensor) and (value.ndim > 0 or scalars)):
        return fn(value)
    if isinstance(value, dict):
        return {key: _map(fn, item, scalars) for key, item in value.items()}
    return rebuild(value, [_map(fn, i, scalars) for i in value]) if isinstance(value, list | tuple) else value


def _join(values: Sequence[Any]) -> Any:
    """Values of one structure with their leaves joined along the examples; what has no examples is the first's."""
    first = values[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(list(values))
    if is_strings(first):
        return [item for value in values for item in value]
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return rebuild(first, [_join(items) for items in zip(*values, strict=True)])
    return first


def rebuild(like: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple like the one given, of other items."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
