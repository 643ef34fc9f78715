"""The data of users (arrays, frames, dicts, Datasets, loaders) as batches in a fixed order."""

from linnet.data.batch import Batch, Joined, SingleBatch, Source, check_finite, leaves, move
from linnet.data.checks import check_array, check_subset_index, no_subset, targets_of
from linnet.data.forward_signature import Signature, as_tensors, as_writable
from linnet.data.sources import InMemory, as_source

__all__ = [
    "Batch",
    "InMemory",
    "Joined",
    "Signature",
    "SingleBatch",
    "Source",
    "as_source",
    "as_tensors",
    "as_writable",
    "check_array",
    "check_finite",
    "check_subset_index",
    "leaves",
    "move",
    "no_subset",
    "targets_of",
]
