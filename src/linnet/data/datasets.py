"""Datasets and DataLoaders, whose examples are read again in every pass.

A row of the Jacobian belongs to one example, so every pass must give the same examples in the same order. A
checksum tells: it is kept from the first time that an example is read, and compared afterwards. A DataLoader is used as
it is, once it is known to give every example in the same order every pass.
"""

from __future__ import annotations

import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate

from linnet._common import combine_codes
from linnet.data import checks
from linnet.data.batch import Batch, Source, check_finite
from linnet.data.forward_signature import Signature, as_writable

READ = 64
"""Examples that are read at once where only their checksums count: memory against calls of the collation."""


class MapDataset(Source):
    """A map-style Dataset: examples are looked up by position and collated.

    Args:
        dataset: Anything with ``__len__`` and ``__getitem__``.
        signature: What the model's forward takes.
        collate: Makes a batch of a list of examples.
        order: The dataset's indices in the order of the source; default: all, as they are.
        options: More arguments of the ``DataLoader`` that reads the examples, such as ``num_workers``.
        kind: What the data is, in a few words.
    """

    by_position = True

    def __init__(
        self,
        dataset: Any,
        signature: Signature,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        order: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        kind: str | None = None,
    ) -> None:
        self.dataset, self.signature, self.order = dataset, signature, order
        self.collate = CheckedCollate(collate)
        self.options = dict(options or {})
        self.n = len(dataset) if order is None else len(order)
        self.kind = kind or f"{type(dataset).__name__}, by position"
        self.codes: Checksums | NoChecksums = Checksums(self.kind)
        checks.check_some(self.n, self.kind)
        if order is None:  # one example shows what a pass would stumble over
            item = dataset[0]
            checks.check_item(item)
            signature.batch(self.collate([item])[1], 0)

    def read(self, chunks: Sequence[Sequence[int]], loader: DataLoader[Any] | None = None) -> Iterator[Batch]:
        """One batch for each list of positions; ``loader`` reads these very batches where it is given."""
        if self.order is None:
            checks.check_pass(len(self.dataset), self.n, self.kind)
        loader = self._loader(chunks) if loader is None else loader
        for chunk, (codes, data) in zip(chunks, loader, strict=True):
            batch = self.signature.batch(data, chunk[0])
            checks.check_collated(batch.n, len(chunk), chunk[0])
            if self.codes.record(chunk, codes):
                check_finite(batch, chunk)
            yield batch

    def _loader(self, chunks: Sequence[Sequence[int]]) -> DataLoader[Any]:
        order = self.order
        indices = (list(chunk) if order is None else [order[i] for i in chunk] for chunk in chunks)
        # Its own generator leaves the global random state alone.
        options = {"collate_fn": self.collate, "generator": torch.Generator(), **self.options}
        return DataLoader(self.dataset, batch_sampler=indices, **options)

    def changing(self) -> MapDataset:
        other = copy(self)
        # One generator for all passes: workers that start again with the same numbers would augment in the same way.
        other.changes, other.options = True, {"generator": torch.Generator(), **self.options}
        other.codes = NoChecksums(self.kind)
        return other

    def code(self, start: int = 0, stop: int | None = None) -> int:
        stop = self.n if stop is None else stop
        missing = [i for i in range(start, stop) if not self.codes.knows(i)]
        for _ in self.read([missing[a : a + READ] for a in range(0, len(missing), READ)]) if missing else ():
            pass
        return self.codes.code(start, stop)

    def glimpse(self) -> int:
        """A checksum of a few examples, since reading all of them may take long."""
        few = sorted(set(torch.linspace(0, self.n - 1, min(self.n, 16)).round().long().tolist()))
        return sum(self.code(i, i + 1) for i in few) % 2**64

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        return self.read([range(a, min(a + size, stop)) for a in range(start, stop, size)])

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        return self.read([chunk.tolist() for chunk in chunks])


class IterableData(Source):
    """An IterableDataset: examples come in order and are collated; counted by a first pass."""

    def __init__(self, dataset: IterableDataset[Any], signature: Signature) -> None:
        self.dataset, self.signature = dataset, signature
        self.kind = f"{type(dataset).__name__}, in order"
        self.codes = Checksums(self.kind)
        self.collate = CheckedCollate(default_collate)
        self.n = sum(batch.n for batch in self._read(iter(dataset), READ, 0))
        checks.check_some(self.n, self.kind)

    def _read(self, examples: Iterator[Any], size: int, start: int) -> Iterator[Batch]:
        while items := list(islice(examples, size)):
            if start == 0:
                checks.check_item(items[0])
            codes, data = self.collate(items)
            batch = self.signature.batch(data, start)
            if self.codes.record(range(start, start + len(items)), codes):
                check_finite(batch)
            yield batch
            start += len(items)

    def code(self, start: int = 0, stop: int | None = None) -> int:
        return self.codes.code(start, self.n if stop is None else stop)  # all were read to be counted

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        examples = iter(self.dataset)
        count = sum(1 for _ in islice(examples, start))
        for batch in self._read(islice(examples, stop - start), size, start):
            count += batch.n
            yield batch
        if count < stop or stop == self.n:
            checks.check_pass(count + sum(1 for _ in islice(examples, 1)), self.n, self.kind)


class CheckedCollate:
    """Collates examples, and gives the checksum of each example beside the batch; runs in worker processes too."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> tuple[list[int], Any]:
        codes = [checksum(item) for item in items]
        if self.collate is not default_collate:
            return codes, self.collate(items)
        try:
            return codes, default_collate(as_writable(items))
        except (RuntimeError, TypeError) as error:
            raise checks.not_stackable(error) from error


class Checksums:
    """Checksums of the examples seen so far, by position."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen = array("q")

    def knows(self, position: int) -> bool:
        """Whether the example at a position was seen."""
        return position < len(self.seen) and self.seen[position] != -1

    def code(self, start: int, stop: int) -> int:
        """One checksum of the checksums of examples start to stop."""
        known = torch.tensor(self.seen[start:stop], dtype=torch.int64)
        return combine_codes(known + 1, start)  # what is not known adds nothing

    def record(self, positions: Sequence[int], codes: Sequence[int], *, last: int | None = None) -> bool:
        """Compare checksums with those seen before, and keep new ones; returns whether any is new.

        Args:
            positions: Positions of the examples, or the position of a batch's first example.
            codes: Checksums of the examples, or of the batch.
            last: Position of the batch's last example.
        """
        self.seen.extend([-1] * (max(positions) + 1 - len(self.seen)))
        new = False
        for position, code in zip(positions, codes, strict=True):
            if self.seen[position] == -1:
                self.seen[position], new = code, True
            elif self.seen[position] != code:
                raise checks.changed(position, position if last is None else last, self.kind)
        return new


class NoChecksums:
    """Takes the place of `Checksums` where examples may change: all are new every time, and none has a checksum."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def knows(self, position: int) -> bool:
        """Always true, since reading an example again would tell nothing."""
        return True

    def code(self, start: int, stop: int) -> int:
        """Zero, whatever the examples are."""
        return 0

    def record(self, positions: Sequence[int], codes: Sequence[int], *, last: int | None = None) -> bool:
        """Always true."""
        return True


def checksum(value: Any, code: int = 0) -> int:
    """The crc32 of a value's tensors, arrays, numbers and strings; others count if they have ``tobytes``."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        code = zlib.crc32(repr(tuple(value.shape)).encode(), code)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, code)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), zlib.crc32(repr(value.shape).encode(), code))
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        for item in value:
            code = checksum(item, code)
        return code
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return zlib.crc32(repr(value).encode(), code)
    return zlib.crc32(value.tobytes(), code) if hasattr(value, "tobytes") else code


# DataLoaders.


def wrap_loader(loader: DataLoader[Any], signature: Signature) -> Source:
    """The source of a DataLoader that gives every example, in the same order every pass."""
    loader = _without_shuffling(loader)
    checks.check_loader_order(loader)
    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        known = isinstance(loader.dataset, Sized) and loader.num_workers == 0
        count = len(loader.dataset) if known else None  # type: ignore[arg-type]
        checks.check_nothing_dropped(loader.batch_size, count, drop_last=loader.drop_last)
        return LoadedInOrder(loader, signature)
    if isinstance(sampler, BatchSampler):
        count = len(sampler.sampler)  # type: ignore[arg-type]
        checks.check_nothing_dropped(sampler.batch_size, count, drop_last=sampler.drop_last)
    if sampler is None or type(loader).__iter__ is not DataLoader.__iter__:
        return LoadedInOrder(loader, signature)
    return LoadedByPosition(loader, signature)


def _without_shuffling(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that gives the same examples in the order of its dataset, in place of one that shuffles them.

    Only a `RandomSampler` that gives every example once has a meaning without its shuffling.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    data: Any = loader.dataset
    sampler: Any = batches.sampler
    if not isinstance(sampler, RandomSampler) or sampler.replacement or len(sampler) != len(data):
        return loader
    checks.check_nothing_dropped(batches.batch_size, len(sampler), drop_last=batches.drop_last)
    warnings.warn(
        "The DataLoader shuffles. linnet needs the examples in one order in every pass, and reads them in the order of "
        "the dataset: targets that are given apart, and predictions, have this order.",
        stacklevel=2,
    )
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    given = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
    return DataLoader(loader.dataset, batch_size=batches.batch_size, shuffle=False, **given)


class LoadedInOrder(Source):
    """A DataLoader whose batches come as they come: over an IterableDataset, or with a loop of its own."""

    def __init__(self, loader: DataLoader[Any], signature: Signature) -> None:
        self.loader, self.signature = loader, signature
        self.kind = f"{type(loader).__name__} of {type(loader.dataset).__name__}, in order"
        self.codes = Checksums(self.kind)
        self.n = sum(batch.n for batch in self._read())
        checks.check_some(self.n, self.kind)

    def _read(self) -> Iterator[Batch]:
        start = 0
        for data in _afresh(self.loader):
            batch = self.signature.batch(data, start)
            if self.codes.record([start], [checksum(data)], last=start + batch.n - 1):
                check_finite(batch)
            yield batch
            start += batch.n

    def code(self, start: int = 0, stop: int | None = None) -> int:
        return self.codes.code(start, self.n if stop is None else stop)  # all were read to be counted

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        count = 0
        for batch in self._read():
            count += batch.n
            checks.check_pass(max(count, self.n), self.n, self.kind)
            yield from _between(batch, start, stop, size)
            if count >= stop and stop < self.n:
                return
        checks.check_pass(count, self.n, self.kind)


class LoadedByPosition(Source):
    """A DataLoader over a map-style Dataset. Every pass takes its own batches, collation and workers."""

    by_position = True

    def __init__(self, loader: DataLoader[Any], signature: Signature) -> None:
        sampler: Any = loader.batch_sampler
        chunks = [list(chunk) for chunk in sampler]
        checks.check_same_order(chunks, [list(chunk) for chunk in sampler], sampler)
        names = ("num_workers", "prefetch_factor", "pin_memory", "timeout", "worker_init_fn")
        workers = f", workers: {loader.num_workers}" if loader.num_workers else ""
        self.kind = f"{type(loader).__name__} of {type(loader.dataset).__name__}, by position{workers}"
        self.mapped = MapDataset(
            loader.dataset,
            signature,
            collate=loader.collate_fn,
            order=[i for chunk in chunks for i in chunk],
            options={name: getattr(loader, name) for name in (*names, "multiprocessing_context")},
            kind=self.kind,
        )
        self.n = self.mapped.n
        # The examples' own checksums do not see what a collate_fn adds, such as random masks.
        self.codes = None if loader.collate_fn is default_collate else Checksums(self.kind)
        ends = list(accumulate(len(chunk) for chunk in chunks))
        self.ranges = [range(end - len(chunk), end) for end, chunk in zip(ends, chunks, strict=True)]
        # A copy shares everything with the user's loader but the collation, which adds checksums.
        self.loader = copy(loader)
        self.loader.collate_fn = self.mapped.collate
        self.loader._iterator = None

    def changing(self) -> Source:
        other = copy(self)
        other.changes, other.codes, other.mapped = True, None, self.mapped.changing()
        return other

    def code(self, start: int = 0, stop: int | None = None) -> int:
        stop = self.n if stop is None else stop
        if self.codes is None:
            return self.mapped.code(start, stop)
        own = [r for r in self.ranges if start <= r.start < stop]
        if not all(self.codes.knows(r.start) for r in own):
            for _ in self._batches(self.n, start, stop):
                pass
        return (self.mapped.code(start, stop) + self.codes.code(start, stop)) % 2**64

    def glimpse(self) -> int:
        return self.mapped.glimpse()

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        # Whole batches of the loader, so that a collate_fn that pads gives what it gives in a full pass.
        ranges = [r for r in self.ranges if r.start < stop and r.stop > start]
        whole = len(ranges) == len(self.ranges)
        for batch in self.mapped.read(ranges, _afresh(self.loader) if whole else None):
            if self.codes is not None:
                code = checksum((batch.args, batch.kwargs, batch.rest))
                self.codes.record([batch.start], [code], last=batch.start + batch.n - 1)
            yield from _between(batch, start, stop, size)

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        return self.mapped._gather(chunks)


def _afresh(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader for a pass of its own: workers that persist serve one pass at a time, and passes can be nested."""
    if not loader.persistent_workers:
        return loader
    loader = copy(loader)
    loader._iterator = None
    return loader


def _between(batch: Batch, start: int, stop: int, size: int) -> Iterator[Batch]:
    """The examples of a batch that lie between start and stop, in batches of at most ``size``."""
    first, last = max(start - batch.start, 0), min(stop - batch.start, batch.n)
    if first < last:
        yield from batch.part(first, last).split(size)
