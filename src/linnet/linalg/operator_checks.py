"""What operators check of the vectors, weights and indices that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from linnet.linalg.operator import LinearOperator


def check_fn_result(op: LinearOperator, out: Tensor, given: Tensor) -> None:
    """Raise unless a function given to ``fused`` has returned the shape that it was given."""
    if out.shape != given.shape:
        raise ValueError(
            f"{op.name}.fused needs fn to return the shape it is given, {tuple(given.shape)}; got {tuple(out.shape)}."
        )


def check_weight(op: LinearOperator, weight: Tensor | None) -> None:
    """Raise unless ``weight`` is None, (rows,) or (n, c, c) with ``n * c = rows``."""
    if weight is None:
        return
    rows, shape, c = op.shape[0], tuple(weight.shape), op.block
    blocks = len(shape) == 3 and shape[1] == shape[2] and shape[0] * shape[1] == rows and c in (None, shape[1])
    if shape != (rows,) and not blocks:
        known = f"(n, c, c) with n * c = {rows}" if c is None else f"({rows // c}, {c}, {c})"
        raise ValueError(f"{op.name} has {rows} rows, so weight needs shape ({rows},), or {known}; got {shape}.")
    check_kind(op, "weight", weight)


def check_vector(op: LinearOperator, method: str, name: str, x: Tensor | None, size: int) -> None:
    """Raise unless ``x`` is None or a vector of shape (size,) with the operator's dtype and device."""
    if x is None:
        return
    if tuple(x.shape) != (size,):
        raise ValueError(
            f"{op.name} has shape {op.shape}, so {method} needs {name} of shape ({size},); got {tuple(x.shape)}."
        )
    check_kind(op, name, x)


def by_block(op: LinearOperator, V: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Check ``V`` and run ``product`` on it as a block of columns; a vector gives a vector."""
    if not isinstance(V, Tensor):
        raise TypeError(
            f"{op.name} multiplies tensors of shape ({op.shape[1]},) or ({op.shape[1]}, k); got {type(V).__name__}."
        )
    if V.ndim not in (1, 2) or V.shape[0] != op.shape[1]:
        swapped = V.ndim in (1, 2) and V.shape[0] == op.shape[0]
        hint = f" For the transpose use {op.T.symbol} @ V." if swapped else ""
        raise ValueError(
            f"{op.name} has shape {op.shape}, so {op.symbol} @ V needs V of shape ({op.shape[1]},) or "
            f"({op.shape[1]}, k); got {tuple(V.shape)}.{hint}"
        )
    check_kind(op, "V", V)
    return product(V) if V.ndim == 2 else product(V[:, None])[:, 0]


def check_kind(op: LinearOperator, name: str, x: Tensor) -> None:
    if x.dtype != op.dtype or x.device != op.device:
        raise TypeError(
            f"{op.name} is {op.dtype} on {op.device}, so {name} must be too; got {x.dtype} on {x.device}. "
            f"Convert it with {name}.to({op.dtype}, device={str(op.device)!r})."
        )


def column_numbers(op: LinearOperator, index: Tensor) -> Tensor:
    """A mask or an index as checked long column numbers on the operator's device."""
    cols = op.shape[1]
    if index.ndim != 1 or index.dtype not in (torch.bool, torch.int64):
        raise TypeError(
            f"{op.name} has {cols} columns, so columns needs a boolean mask of shape ({cols},) or a vector "
            f"of int64 column numbers; got {index.dtype} of shape {tuple(index.shape)}."
        )
    if index.dtype == torch.bool:
        if len(index) != cols:
            raise ValueError(f"{op.name} has {cols} columns, so a mask needs shape ({cols},); got ({len(index)},).")
        index = index.nonzero()[:, 0]
    if len(index) == 0:
        raise ValueError(f"{op.name} has {cols} columns and none was selected; select at least one.")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= cols:
        bad = low if low < 0 else high
        raise IndexError(f"{op.name} has columns 0 to {cols - 1}; got column {bad}.")
    return index.to(op.device)
