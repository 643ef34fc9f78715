"""Steps of an optimizer over data: what `linnet.fisher.distillation` and `linnet.laplace.training` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from linnet.data import Batch, Source

T = TypeVar("T")


def epoch(loss: Callable[[T], Tensor], batches: Iterable[tuple[T, int]], optimizer: torch.optim.Optimizer) -> float:
    """One step for each batch; the mean loss, as it was before each step, over all examples.

    Args:
        loss: From a batch to its mean loss. Optimizers that evaluate it several times (L-BFGS) may do so.
        batches: Batches with their numbers of examples.
        optimizer: Of the parameters that the loss depends on.

    Example:
        >>> w = torch.zeros(1, requires_grad=True)
        >>> sgd = torch.optim.SGD([w], lr=0.5)
        >>> epoch(lambda x: (w - x).square().mean(), [(torch.ones(3), 3), (torch.ones(1), 1)], sgd)
        0.75
    """
    total, count = torch.zeros(()), 0
    for batch, n in batches:

        def closure(batch: T = batch) -> Tensor:
            optimizer.zero_grad()
            value = loss(batch)
            value.backward()
            return value

        value: Any = optimizer.step(closure)  # type: ignore[arg-type]
        total = total.to(value) + value.detach() * n  # on its device, so that a GPU does not wait
        count += n
    return float(total) / max(count, 1)


def shuffle(source: Source, size: int, generator: torch.Generator) -> Iterator[tuple[Batch, int]]:
    """Minibatches of a source, in a new order where it can be read by position, else in its own.

    Args:
        source: Of the examples.
        size: Examples per minibatch; the last may be smaller.
        generator: Of the order.

    Example:
        >>> from linnet.data.sources import as_source
        >>> source = as_source(torch.arange(5.0)[:, None], torch.nn.Linear(1, 1))
        >>> [n for _, n in shuffle(source, 2, torch.Generator())]
        [2, 2, 1]
    """
    if source.by_position:
        source = source.subset(torch.randperm(source.n, generator=generator))
    for batch in source.batches(size):
        yield batch, batch.n
