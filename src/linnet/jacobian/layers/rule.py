r"""What a rule for a kind of layer is: reads its calls, and makes columns of the Jacobian of them.

A layer is recognized by the torch function it calls (``F.linear``, ``torch.conv2d``, ...), so functional code,
tied weights and weights that are views of a parameter (``w.t()``, ``w.chunk(3)``) are seen as well as modules.
A `Rule` says two things:

* `Rule.read`: which arguments are the input, the weight and the bias;
* `Rule.make_blocks`: the columns of the Jacobian as `linnet.jacobian.blocks.base.ColumnBlock`, from the input ``x``
  (n, r, ...) and the gradients ``g`` (n, c, r, ...) of the c outputs, example axis first. ``r`` counts how often an
  example occurs along the batch axis (windows, flattened time), and is summed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from linnet.jacobian.blocks.base import ColumnBlock, Range

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Known = Callable[[Any], bool]

LAYOUTS = ("major", "minor", "second")
"""Where the examples lie in a tensor: first axis, slowest or fastest within it, or second axis."""


@dataclass(frozen=True)
class Slot:
    """The part of the flat parameter vector that a tensor is.

    Attributes:
        name: The parameter.
        range: Start and stop in the flat vector.
        shape: The tensor's shape.
        origin: Where the parameter starts in the flat vector.
        swapped: The tensor is the transpose of what is stored.
    """

    name: str
    range: Range
    shape: tuple[int, ...]
    origin: int
    swapped: bool = False


Slots = Mapping[str, Slot]
"""Role ("weight", "bias") to the place of the parameter that plays it."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a torch function, read by a rule.

    Attributes:
        x: The input whose values the gradient needs; None where it needs none.
        params: Role ("weight", "bias") to the tensor given for it.
        conf: Whatever else the rule needs.
    """

    x: Tensor | None
    params: dict[str, Tensor]
    conf: dict[str, Any] = field(default_factory=dict)


class Rule(ABC):
    """How one kind of layer turns (input, output gradient) into columns of the Jacobian."""

    functions: tuple[Callable[..., Any], ...]
    layouts: tuple[str, ...] = LAYOUTS
    takes_half: bool = False
    """Whether `make_blocks` takes inputs and gradients in half precision and loses nothing by it."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def read(self, args: Args, kwargs: Kwargs, known: Known) -> LayerCall | None:
        """The call's input and parameters, or None if the rule does not apply; ``known`` tells parameters."""

    def prepare(self, call: LayerCall, x: Tensor) -> Tensor:
        """What stands beside the gradient, computed from the input before its axes are arranged."""
        return x

    @abstractmethod
    def make_blocks(self, call: LayerCall, x: Tensor | None, g: Tensor, slots: Slots, layout: str) -> list[ColumnBlock]:
        """Columns of the parameters in ``slots``; x (n, r, ...), g (n, c, r, ...)."""


class LayoutError(ValueError):
    """A tensor whose axes cannot be arranged as the layout says."""


def arrange(t: Tensor, layout: str, n: int) -> Tensor:
    """The tensor as a view (n, r, ...) with the example axis first.

    >>> import torch
    >>> arrange(torch.zeros(6, 4), "major", 3).shape, arrange(torch.zeros(7, 3, 4), "second", 3).shape
    (torch.Size([3, 2, 4]), torch.Size([3, 1, 7, 4]))
    """
    if layout == "second":
        if t.ndim < 2 or t.shape[1] != n:
            raise LayoutError(f"no axis of {n} examples in second place of {tuple(t.shape)}")
        return t.transpose(0, 1).unsqueeze(1)
    if t.ndim < 1 or t.shape[0] == 0 or t.shape[0] % n:
        raise LayoutError(f"no axis of {n} examples in first place of {tuple(t.shape)}")
    if layout == "major":
        return t.unflatten(0, (n, -1))
    return t.unflatten(0, (-1, n)).transpose(0, 1)


CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
"""The arguments of a convolution."""


def named(names: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def tensors_of(**params: Any) -> dict[str, Tensor]:
    return {role: t for role, t in params.items() if isinstance(t, Tensor)}


def range_of(slots: Slots, role: str) -> Range | None:
    return slots[role].range if role in slots else None
