"""Find the examples that a user wants to forget, given by their positions or as inputs and targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linnet._common import row_codes, text_code
from linnet._estimator.inputs import check_inputs, take_examples
from linnet.data import Source, as_source, leaves, targets_of


def find_kept(
    estimator: Any,
    examples: Any,
    y: Any,
    *,
    seen: Sequence[Any],
    targets: Tensor,
    encode: Callable[[Any, Any], Tensor],
) -> Tensor:
    """The positions of the examples that stay, (m,), in rising order.

    Args:
        estimator: The estimator that has seen the examples.
        examples: Positions, a mask, or inputs of the examples to forget.
        y: Their targets, where inputs are given; None for positions, and where the targets come with the inputs.
        seen: The inputs that the estimator has seen, in parts; empty where it has not kept them.
        targets: The targets that the estimator has seen, (n, ...).
        encode: From inputs and targets to targets as the estimator keeps them, (k, ...).
    """
    n = len(targets)
    index = _read_positions(examples, n) if y is None and _are_positions(examples) else None
    if index is None:
        index = _find_examples(estimator, examples, y, seen=seen, targets=targets, encode=encode)
    kept = torch.ones(n, dtype=torch.bool)
    kept[index] = False
    if len(index) == 0:
        raise ValueError("There is nothing to forget: give at least one example.")
    if not bool(kept.any()):
        raise ValueError(
            f"The posterior has seen {n:,} examples, and all of them are to be forgotten: nothing but the prior is "
            "left. Use an estimator that is not fitted."
        )
    return kept.nonzero()[:, 0]


def take_parts(parts: Sequence[Any], kept: Tensor, forward: Any) -> list[Any]:
    """The inputs of the examples that stay, in the same parts; parts of which nothing stays are left out."""
    found, start = [], 0
    for X in parts:
        n = as_source(X, forward).n
        index = kept[(kept >= start) & (kept < start + n)] - start
        if len(index) == n:
            found.append(X)
        elif len(index):
            found.append(take_examples(X, index, "are to be forgotten"))
        start += n
    return found


def _are_positions(examples: Any) -> bool:
    if isinstance(examples, Tensor | np.ndarray):
        kind = str(examples.dtype)
        return examples.ndim == 1 and ("int" in kind or "bool" in kind)
    if isinstance(examples, int | np.integer | range):
        return True
    return isinstance(examples, list | tuple) and all(isinstance(i, int | np.integer) for i in examples)


def _read_positions(examples: Any, n: int) -> Tensor:
    index = torch.as_tensor(np.asarray(examples.cpu() if isinstance(examples, Tensor) else examples)).reshape(-1)
    if index.dtype == torch.bool:
        if len(index) != n:
            raise ValueError(
                f"The posterior has seen {n:,} examples, so a mask needs as many entries; got {len(index)}."
            )
        return index.nonzero()[:, 0]
    index = index.long()
    bad = index[(index < 0) | (index >= n)]
    if len(bad):
        raise ValueError(
            f"The posterior has seen {n:,} examples, so that their positions go from 0 to {n - 1}; got {int(bad[0])}, "
            "which was never there. Positions count the examples as fit and condition were given them, without those "
            "of weight zero and those whose label is ignored."
        )
    numbers, counts = index.unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(f"Position {int(numbers[counts > 1][0])} is given {int(counts.max())} times; give it once.")
    return index


def _find_examples(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    seen: Sequence[Any],
    targets: Tensor,
    encode: Callable[[Any, Any], Tensor],
) -> Tensor:
    """Positions of the examples that equal given ones, each once; the last of equal examples goes first."""
    if not seen:
        raise ValueError(
            "The estimator has not kept its training inputs, so that it cannot tell where these examples are: a file "
            "holds inputs that were tensors or arrays. Give the positions of the examples, or fit again without them."
        )
    forward = estimator.lin_.module.forward
    X = check_inputs(estimator, X, reset=False)
    source = as_source(X, forward)
    if y is None:
        if isinstance(X, Tensor | np.ndarray | dict):
            raise ValueError(
                "Give the targets of the examples too, forget(X, y), or the positions of the examples as whole numbers."
            )
        y = targets_of([batch.rest for batch in source.batches(1024)], source.kind)
    wanted = encode(X, y).to(targets)
    if len(wanted) != source.n:
        raise ValueError(f"There are {source.n} examples and {len(wanted)} targets; give one target for each example.")
    places = defaultdict(list)
    for i, code in enumerate(torch.cat([example_codes(as_source(part, forward)) for part in seen]).tolist()):
        places[code].append(i)
    tolerance = 1e3 * torch.finfo(targets.dtype).eps if targets.is_floating_point() else 0.0
    found, missing, other = [], list[int](), list[int]()
    for i, code in enumerate(example_codes(source).tolist()):
        same = places.get(code, [])
        equal = [j for j in same if _equal(targets[j], wanted[i], tolerance)]
        if equal:
            same.remove(equal[-1])
            found.append(equal[-1])
        else:
            (other if same else missing).append(i)
    if missing or other:
        count, first = len(missing) + len(other), min(missing + other)
        why = "its inputs are there with another target" if first in other else "its inputs were never there"
        raise ValueError(
            f"{count:,} of the {source.n:,} examples to forget are not among the {len(targets):,} that the posterior "
            f"has seen; the first of them is example {first}: {why}. Give examples as fit and condition were given "
            "them, each as often as it is to be forgotten."
        )
    return torch.tensor(found)


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not tolerance:
        return torch.equal(a, b)
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + a.abs())).all())


def example_codes(source: Source) -> Tensor:
    """A checksum of the inputs of each example, (n,); floating numbers count as float32."""
    found = []
    for batch in source.batches(1024):
        total = torch.zeros(batch.n, dtype=torch.int64)
        for number, (_, leaf) in enumerate(leaves((batch.args, batch.kwargs))):
            if isinstance(leaf, Tensor):
                codes = row_codes(leaf.float() if leaf.is_floating_point() else leaf).cpu()
            else:
                codes = torch.tensor([text_code(text) for text in leaf])
            total += (2 * number + 1) * codes
        found.append(total)
    return torch.cat(found)
