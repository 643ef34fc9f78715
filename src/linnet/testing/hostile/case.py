"""A hostile case: an unusual network, its data, and which answers to it are honest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linnet.testing.case import case, net, weight

__all__ = ["Hostile", "Register", "draw", "integers", "late", "net", "normal", "tokens", "weight"]

Expected = Literal["right", "refused", "either"]
"""The honest answers to a case: right numbers, a refusal by an error that linnet raises, or any of the two."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """An unusual network with its data."""

    name: str  # name of the case in `linnet.testing.hostile.judge.list_cases()`
    kind: str  # the class of unusual networks that the case belongs to
    build: Callable[[], nn.Module]  # makes the model, the same one every time
    # Makes the data, the same every time. Where the class says so, the first examples are harmless.
    data: Callable[[], Any]
    expects: Expected = "right"  # the honest answers
    # from the model's raw output to `(n, c)` or `(n,)`; None where the raw output already is
    output: Callable[[Any], Tensor] | None = None
    params: Any = None  # the selected parameters, as `linnet.linearize` takes them
    frozen: bool = False  # whether the case is also tried with the results of its frozen layers kept
    predicts: bool = False  # whether the predictions of a regressor are tried too
    rtol: float = 1e-7  # the largest relative error of a right number
    needs: str | None = None  # an optional package without which `build` fails, or None

    def __str__(self) -> str:
        return self.name


class Register:
    """Collects the cases of one class of unusual networks.

    Example:
        >>> add = Register("an example")
        >>> add("plain", lambda: nn.Linear(4, 2))
        >>> [case.name for case in add.cases]
        ['plain']
    """

    def __init__(self, kind: str, **defaults: Any) -> None:
        self.kind, self.defaults = kind, defaults
        self.cases: list[Hostile] = []

    def __call__(
        self,
        name: str,
        factory: Callable[[], nn.Module],
        data: Callable[[], Any] | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        train: bool = False,
        **fields: Any,
    ) -> None:
        """Add a case.

        Args:
            name: Name of the case.
            factory: Makes the model, which is then seeded, moved away from special values and put in eval mode.
            data: Makes the data; by default `normal(4)`.
            dtype: Dtype of the model.
            train: Whether the model that linnet gets is in training mode.
            **fields: Other fields of `Hostile`.
        """
        made, given = case(name, factory, lambda n, seed: None), normal(4) if data is None else data

        def build() -> nn.Module:
            return made.build().to(dtype).train(train)

        self.cases.append(Hostile(name, self.kind, build, given, **{**self.defaults, **fields}))

    def each(
        self,
        prefix: str,
        make: Callable[[Any], Callable[[], nn.Module]],
        data: Callable[[], Any] | None = None,
        expects: Expected | None = None,
        /,
        **ways: Any,
    ) -> None:
        """Add a case for each way: its name is the prefix and the name of the way, its factory is `make` of the way."""
        fields: dict[str, Any] = {} if expects is None else {"expects": expects}
        for name, way in ways.items():
            self(prefix + name, make(way), data, **fields)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64.

    Example:
        >>> draw(2, 3).shape
        torch.Size([2, 3])
    """
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 to `high - 1`.

    Example:
        >>> integers(5, 2, 3).shape
        torch.Size([2, 3])
    """
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, n: int = 13) -> Callable[[], Tensor]:
    """Data of n examples with standard normal entries.

    Example:
        >>> normal(3)().shape
        torch.Size([13, 3])
    """
    return lambda: draw(n, *shape)


def tokens(high: int, length: int, n: int = 13) -> Callable[[], Tensor]:
    """Data of n sequences of token indices.

    Example:
        >>> tokens(5, 3)().shape
        torch.Size([13, 3])
    """
    return lambda: integers(high, n, length)


def late(*shape: int, n: int = 13, calm: int = 5, level: float = -1.0) -> Callable[[], Tensor]:
    """Normal data whose first column is `level` for the first `calm` examples, and 1 or `level` in turns after that.

    Example:
        >>> late(3)()[3:8, 0].tolist()
        [-1.0, -1.0, 1.0, -1.0, 1.0]
    """

    def data() -> Tensor:
        x = draw(n, *shape)
        flag = torch.full((n,), level, dtype=x.dtype)
        flag[calm::2] = 1.0
        x.view(n, -1)[:, 0] = flag
        return x

    return data
