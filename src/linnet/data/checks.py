"""Checks of data. Each check raises a built-in exception that says what was needed, what came and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from linnet._common import kind, listing


def check_range(size: int, start: int, stop: int, n: int) -> None:
    """A pass takes batches of at least one example from a range inside the data."""
    if size < 1:
        raise ValueError(f"batches needs a size of at least 1; got {size}.")
    if not 0 <= start <= stop <= n:
        raise ValueError(f"The data has {n} examples, so batches needs 0 <= start <= stop <= {n}; got {start}, {stop}.")


def check_subset_index(index: Tensor, n: int) -> None:
    """A subset's index is a non-empty vector of positions in the data."""
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        came = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else kind(index)
        hint = " For a mask use mask.nonzero()[:, 0]." if getattr(index, "dtype", None) is torch.bool else ""
        raise TypeError(f"subset needs an int64 tensor of shape (m,); got {came}.{hint}")
    if len(index) == 0:
        raise ValueError("subset needs at least one example; got an empty index.")
    if int(index.min()) < 0 or int(index.max()) >= n:
        bad = int(index.max()) if int(index.max()) >= n else int(index.min())
        raise IndexError(f"The data has {n} examples, so subset needs positions 0 to {n - 1}; got {bad}.")


def no_subset(source: str) -> TypeError:
    """The error of a source that can only be read in order."""
    return TypeError(
        "Choosing examples needs data that can be looked up by position; got data that is read in order "
        f"({source}). Use tensors, arrays, or a map-style Dataset (__len__ and __getitem__)."
    )


def check_positional(count: int, required: Sequence[str], by_name: Sequence[str], *, takes_one: bool) -> None:
    """The items of a tuple fill what forward requires by position."""
    if by_name or not takes_one:
        names = f"({', '.join(by_name)})" if by_name else "arguments"
        raise TypeError(f"The model's forward takes {names} by keyword only. Give the data as a dict of its arguments.")
    if count < len(required):
        raise TypeError(
            f"The model's forward requires {len(required)} arguments ({', '.join(required)}); the data has "
            f"{count}. Give a tuple of {len(required)} tensors, or a dict with these keys."
        )


def check_keywords(keys: Sequence[str], accepted: Sequence[str], required: Sequence[str], *, any_keyword: bool) -> None:
    """The keys of a dict are arguments of forward, and none that it requires is missing."""
    unknown = [] if any_keyword else [key for key in keys if key not in accepted]
    if unknown:
        raise TypeError(
            f"The model's forward accepts the keys {listing(accepted, limit=20) or '(none)'}; the data also "
            f"has {listing(unknown)}. Remove or rename them (targets travel as 'labels', 'targets' or 'y')."
        )
    missing = [name for name in required if name not in keys]
    if missing:
        raise TypeError(
            f"The model's forward requires {listing(required)}; the data has the keys "
            f"{listing(keys) or '(none)'}. Add {listing(missing)}."
        )


def check_array(array: np.ndarray, name: str) -> None:
    """A numpy array holds numbers that torch knows."""
    largest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}.get(array.dtype.kind, 0)  # bytes, by numpy's letter
    if array.dtype.itemsize > largest or not array.dtype.isnative:
        hint = "stack equal shapes with np.stack" if array.dtype == object else "convert it with array.astype"
        raise TypeError(f"linnet needs arrays of native numbers; {name} is an array of dtype {array.dtype}: {hint}.")


def check_some_tensor(leaves: Mapping[str, object]) -> None:
    """The data has a tensor, not only strings and numbers."""
    if not any(isinstance(leaf, Tensor) for leaf in leaves.values()):
        raise TypeError(
            "linnet needs data with at least one tensor or array whose first dimension counts the examples; "
            "found none. Convert lists of numbers with torch.tensor (tokenizers: return_tensors='pt')."
        )


def check_leaf(value: object, name: str) -> None:
    """A value in the data is a dense tensor, a number, a string or None."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"linnet needs dense tensors; {name} has layout {value.layout}. Use tensor.to_dense().")
    elif value is not None and not isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        hint = "Use its to_numpy()." if hasattr(value, "to_numpy") else "Convert it with torch.as_tensor."
        raise TypeError(
            f"linnet needs data made of tensors and numpy arrays (in tuples or dicts); {name} is {kind(value)}. {hint}"
        )


def check_lengths(leaves: Mapping[str, Sized]) -> int:
    """Tensors of a batch agree on the first dimension, the number of examples, which is returned."""
    first, *others = leaves
    n = len(leaves[first])
    for name in others:
        if len(leaves[name]) != n:
            raise ValueError(
                "The first dimension counts the examples and must be the same everywhere; "
                f"{first} has {n} and {name} has {len(leaves[name])}."
            )
    return n


def check_some(n: int, source: str) -> None:
    """The data has an example."""
    if n == 0:
        raise ValueError(f"linnet needs at least one example; the data ({source}) is empty.")


def not_finite(example: int, name: str) -> ValueError:
    """The error of an input with NaN or infinity."""
    return ValueError(
        f"linnet needs finite inputs; example {example} has NaN or infinity in {name}. Clean it or leave it out."
    )


def unknown_data(data: object) -> TypeError:
    """The error of data that is none of the accepted types."""
    if isinstance(data, Iterator):
        hint = "It can be read only once: give a Dataset, or an IterableDataset whose __iter__ starts anew."
    elif hasattr(data, "iloc"):
        hint = "Convert it with data.to_numpy()."
    elif hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        hint = "A map-style Dataset also needs __len__."
    else:
        hint = "Convert it with torch.as_tensor."
    return TypeError(
        "linnet reads a Tensor, a numpy array, a tuple or dict of them, a Dataset or a DataLoader; "
        f"got {kind(data)}. {hint}"
    )


# Data that is read anew in every pass.


def check_loader_order(loader: torch_data.DataLoader) -> None:
    """A DataLoader's samplers give every example, in the same order every pass."""
    shuffling = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
    for outer in (loader.sampler, loader.batch_sampler):
        sampler: object = outer
        while sampler is not None:
            name = type(sampler).__name__
            if isinstance(sampler, shuffling):
                raise ValueError(
                    "linnet needs the examples in the same order every pass; the DataLoader uses a "
                    f"{name}. Build it with shuffle=False (for a random subset: torch.utils.data.Subset)."
                )
            if isinstance(sampler, torch_data.DistributedSampler):
                raise ValueError(
                    f"linnet shards the data itself; the DataLoader uses a {name}. Build it without a "
                    "sampler: every rank passes the whole data."
                )
            sampler = getattr(sampler, "sampler", None)
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ValueError(
            "linnet needs the examples in the same order every pass; the DataLoader was built with "
            "in_order=False. Build it with in_order=True."
        )


def check_same_order(first: object, second: object, sampler: object) -> None:
    """Asked twice, a sampler gives the same positions."""
    if first != second:
        raise ValueError(
            "linnet needs the examples in the same order every pass; asked twice, the DataLoader's "
            f"{type(sampler).__name__} gave two orders. Use a sampler that does not shuffle."
        )


def check_nothing_dropped(batch_size: int | None, n: int | None, *, drop_last: bool) -> None:
    """``drop_last`` drops no example; n is None when the count is unknown."""
    if drop_last and batch_size is not None and (n is None or n % batch_size):
        lost = "may drop examples" if n is None else f"drops {n % batch_size} of {n} examples"
        raise ValueError(
            f"linnet needs every example; the DataLoader's drop_last=True {lost}. Build it with drop_last=False."
        )


def check_item(item: object) -> None:
    """An example of a Dataset holds no list of numbers: collation would transpose it."""
    fields = item.items() if isinstance(item, Mapping) else enumerate(item if isinstance(item, tuple) else ())
    for name, value in fields:
        if isinstance(value, list) and value and isinstance(value[0], int | float | list):
            raise TypeError(
                f"Field {name!r} of the Dataset's examples is a list of numbers; linnet needs tensors or "
                "arrays. Convert it in __getitem__ (Hugging Face: use dataset.with_format('torch'))."
            )


def not_stackable(error: Exception) -> TypeError:
    """The error of examples that the default collation cannot make one batch of."""
    return TypeError(
        f"The examples of the Dataset cannot be stacked into a batch: {error}. "
        "Convert them to tensors of one shape, or give a DataLoader with a collate_fn that pads."
    )


def check_collated(n: int, expected: int, start: int) -> None:
    """A batch has as many examples as were put in."""
    if n != expected:
        raise ValueError(
            f"The DataLoader's collate_fn made a batch of {n} from the {expected} examples that begin at "
            f"example {start}. linnet needs one entry in the first dimension for each example."
        )


def changed(first: int, last: int, source: str) -> RuntimeError:
    """The error of examples that are not what they were in an earlier pass."""
    what = f"Example {first}" if first == last else f"Examples {first} to {last}"
    return RuntimeError(
        f"{what} changed between two passes over the data ({source}); linnet needs the same examples in the "
        "same order every pass. Fix what varies: disable or seed random transforms, and use shuffle=False."
    )


def check_pass(count: int, n: int, source: str) -> None:
    """A pass gives as many examples as the first one."""
    if count != n:
        more = "more than that" if count > n else f"only {count}"
        raise RuntimeError(
            f"The data ({source}) had {n} examples at first and {more} in a later pass; linnet needs the "
            "same examples every pass. A Dataset over a generator or a file must start anew in __iter__."
        )


# Targets.


def targets_of(parts: Sequence[Any], source: str) -> Tensor:
    """The targets that came with the inputs, batch by batch, as one tensor."""
    found = [next(iter(part.values())) if isinstance(part, Mapping) and len(part) == 1 else part for part in parts]
    if all(isinstance(part, Tensor) for part in found):
        return torch.cat([part.cpu() for part in found])
    what = "none came with it" if all(part is None for part in found) else f"{kind(found[0])} came with it"
    raise ValueError(
        f"fit requires y to be passed, but the target y is None: the data ({source}) came without y, and {what}. Pass "
        "y, or data such as (X, y) or a Dataset of pairs."
    )
