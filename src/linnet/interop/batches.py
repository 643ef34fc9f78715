"""Loaders of other libraries as loaders of inputs and targets, in the order of their datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler


class SplitTargets:
    """A collator whose batches are pairs of inputs and targets.

    Args:
        collate: Makes a batch, as a pair or as a mapping that has the key.
        key: Key of the targets in a mapping.
    """

    def __init__(self, collate: Callable[[Any], Any], key: str) -> None:
        self.collate, self.key = collate, key

    def __call__(self, examples: Any) -> Any:
        """Inputs and targets of a batch."""
        batch = self.collate(examples)
        if not isinstance(batch, Mapping):
            return batch
        if self.key not in batch:
            known = ", ".join(map(str, batch))
            raise TypeError(f"The batches must have {self.key!r}, which are the targets; got {known}.")
        inputs = dict(batch)
        return inputs, inputs.pop(self.key)


def split_targets(loader: Any, key: str) -> DataLoader[Any]:
    """A loader of pairs of inputs and targets, with the examples and the batch size of a loader.

    Args:
        loader: The loader. A loader that shuffles is read in the order of its dataset, which does not matter where the
            targets come with the inputs.
        key: Key of the targets, where batches are mappings.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"The training data are a {type(loader).__name__}, not a DataLoader.")
    batches, data = loader.batch_sampler, loader.dataset
    sampler: Any = batches.sampler if isinstance(batches, BatchSampler) else None
    whole = isinstance(sampler, SequentialSampler | RandomSampler) and len(sampler) == len(data)  # type: ignore[arg-type]
    if not whole or getattr(sampler, "replacement", False) or loader.drop_last:
        return loader  # which linnet reads, or refuses by name
    return DataLoader(
        data,
        batch_size=loader.batch_size,
        collate_fn=SplitTargets(loader.collate_fn, key),
        num_workers=loader.num_workers,
    )
