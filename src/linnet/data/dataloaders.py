"""DataLoaders, used as they are, once they are known to give every example in the same order every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from copy import copy
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from linnet.data import checks
from linnet.data.batch import Batch, Source, check_finite
from linnet.data.datasets import Checksums, MapDataset, checksum
from linnet.data.forward_signature import Signature


def wrap_loader(loader: DataLoader[Any], signature: Signature) -> Source:
    """The source of a DataLoader that gives every example, in the same order every pass."""
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
