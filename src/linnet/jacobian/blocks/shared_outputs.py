"""Forward-mode passes over the same examples, one for each column: layers give their outputs once, not every time.

The derivative of a convolution or a linear layer takes two products of its own, ``W x' + W' x``, and torch makes the
third, ``W x``, again with every column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

LAYERS: frozenset[Callable[..., Any]] = frozenset({torch.conv1d, torch.conv2d, torch.conv3d, F.linear})
"""Functions of an input, a weight and a bias that are linear in each of the first two."""


@dataclass(frozen=True)
class _Output:
    """What a call gave: ``y`` as it was at a version, and what it was given."""

    y: Tensor
    version: int
    given: tuple[Any, ...]


@final
class Shared(TorchFunctionMode):
    """While it is active, `LAYERS` are differentiated here, and their outputs kept for the next pass.

    Passes must be over the same examples with the same parameters; `begin` starts each. An output that the network
    overwrites in place is not used again, nor is one whose call is another than it was.

    >>> layer, x = torch.nn.Linear(2, 1, bias=False), torch.ones(3, 2)
    >>> shared, found = Shared(), []
    >>> for column in torch.eye(2):
    ...     with torch.no_grad(), forward_ad.dual_level(), shared.begin():
    ...         weight = forward_ad.make_dual(layer.weight, column[None])
    ...         found.append(forward_ad.unpack_dual(F.linear(x, weight)).tangent.sum().item())
    >>> found, len(shared)
    ([3.0, 3.0], 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[_Output] = []
        self._at = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def begin(self) -> Shared:
        """The mode, for another pass."""
        self._at = 0
        return self

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in LAYERS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False))
        rest, named = args[3:], {name: value for name, value in kwargs.items() if name not in _SIDES}
        x, w, b = (unpacked(given.get(name, kwargs.get(name))) for name in _SIDES)

        def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return func(x, w, b, *rest, **named)

        y = self._once((func, x[0].shape, w[0].data_ptr(), w[0].shape), layer, x[0], w[0], b[0])
        return with_tangent(y, layer, x, w, b)

    def _once(
        self, given: tuple[Any, ...], layer: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None
    ) -> Tensor:
        """The output, kept from an earlier pass unless it needs a graph of its own."""
        at, self._at = self._at, self._at + 1
        graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, b))
        if at < len(self._outputs) and not graph:
            known = self._outputs[at]
            if known.given == given and known.y._version == known.version:
                return known.y
        y = layer(x, w, b)
        kept = y.detach()
        self._outputs[at : at + 1] = [_Output(kept, kept._version, given)]
        return y


_SIDES = ("input", "weight", "bias")


_of_tangents: ContextVar[bool] = ContextVar("linnet_tangents", default=False)


@contextmanager
def _tangents() -> Iterator[None]:
    before = _of_tangents.set(True)
    try:
        yield
    finally:
        _of_tangents.reset(before)


def in_tangents() -> bool:
    """Whether what a layer is asked for is a part of its derivative."""
    return _of_tangents.get()


def unpacked(t: Tensor | None) -> tuple[Any, Tensor | None]:
    """A tensor and its tangent, None where it has none."""
    return (None, None) if t is None else tuple(forward_ad.unpack_dual(t))


def with_tangent(
    y: Tensor,
    layer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: tuple[Tensor, Tensor | None],
    w: tuple[Tensor, Tensor | None],
    b: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """A layer's output with its tangent, which has no graph, from its input, weight and bias with theirs."""
    with torch.no_grad(), _tangents():
        parts = [] if x[1] is None else [layer(x[1], w[0], None)]
        if w[1] is not None:
            parts.append(layer(x[0], w[1], b[1]))
        elif b[1] is not None:
            parts.append(layer(torch.zeros_like(x[0]), w[0], b[1]))
    if not parts:
        return y
    return forward_ad.make_dual(y, parts[0] if len(parts) == 1 else parts[0].add_(parts[1]))
