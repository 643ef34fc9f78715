"""Dense and low-rank matrices as operators, and operators on top of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from linnet._common import ALONE, Ranks, files
from linnet.linalg.operator import LinearOperator, RowFn
from linnet.linalg.row_weights import RowIndex, find_examples, weigh


@final
class Matrix(LinearOperator):
    """A dense matrix as an operator: the reference for the others.

    Args:
        A: (rows, cols).
        block: c, if the rows come in blocks of c outputs; None if not.

    >>> Matrix(torch.eye(2)) @ torch.tensor([1.0, 2.0])
    tensor([1., 2.])
    """

    def __init__(self, A: Tensor, *, block: int | None = None) -> None:
        if A.ndim != 2 or not A.is_floating_point():
            raise ValueError(f"Matrix needs a floating tensor of shape (rows, cols); got {tuple(A.shape)}, {A.dtype}.")
        if block is not None and (block < 1 or A.shape[0] % block):
            raise ValueError(f"Matrix has {A.shape[0]} rows, so block needs to be a divisor of it; got {block}.")
        super().__init__((A.shape[0], A.shape[1]), dtype=A.dtype, device=A.device)
        self.A, self.block = A, block

    def rows(self, index: Tensor) -> LinearOperator:
        """
        >>> Matrix(torch.eye(3)).rows(torch.tensor([2])).dense()
        tensor([[0., 0., 1.]])
        """
        examples = self.A.unflatten(0, (-1, self.block or 1))
        return Matrix(examples[index.to(self.device)].flatten(0, 1), block=self.block)

    def checksums(self) -> dict[str, str]:
        return {"the matrix": files.fingerprint({"A": self.A})}

    def _matmul(self, V: Tensor) -> Tensor:
        return self.A @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.A.T @ U

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        right = self.A.T if scale is None else scale[:, None] * self.A.T
        return self.A @ right if other is None else other._matmul(right).T

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        square = self.A.square()
        return square.sum(1) if scale is None else square @ scale

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        assert self.block is not None  # else refused before
        A = self.A.unflatten(0, (-1, self.block))
        return (A if scale is None else A * scale) @ A.mT

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        return (self.A * weigh(self.A, weight)).sum(0)


@final
class RowParts(LinearOperator):
    """A symmetric matrix of which each rank holds the rows of its examples, as `linnet.Jacobian.own_gram` makes them.

    Args:
        part: The rows of this rank, (own rows, rows).
        block: c, the rows of an example.
        ranks: The processes that hold the rows.

    >>> from linnet._common import Ranks
    >>> RowParts(torch.eye(2), block=1, ranks=Ranks()) @ torch.tensor([1.0, 2.0])
    tensor([1., 2.])
    """

    def __init__(self, part: Tensor, *, block: int, ranks: Ranks) -> None:
        m = part.shape[1]
        start, stop = ranks.own(m // block)
        if part.ndim != 2 or m % block or len(part) != (stop - start) * block:
            raise ValueError(
                f"RowParts of {m} rows in blocks of {block} needs rows {start * block} to {stop * block} of rank "
                f"{ranks.rank} of {ranks.world}; got shape {tuple(part.shape)}."
            )
        super().__init__((m, m), dtype=part.dtype, device=part.device)
        self.part, self.block, self.ranks = part, block, ranks

    def _matmul(self, V: Tensor) -> Tensor:
        assert self.block is not None
        with self.ranks.telling():
            return self.ranks.gather_rows(self.part @ V, self.shape[0] // self.block, self.block)

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self._matmul(U)


@final
class LowRank(LinearOperator):
    """``U diag(s) V^T``, never multiplied out.

    Args:
        U: (rows, r).
        s: (r,).
        V: (cols, r).

    >>> LowRank(torch.ones(3, 1), torch.tensor([2.0]), torch.ones(4, 1)) @ torch.ones(4)
    tensor([8., 8., 8.])
    """

    def __init__(self, U: Tensor, s: Tensor, V: Tensor) -> None:
        r = s.numel()
        if U.ndim != 2 or V.ndim != 2 or s.ndim != 1 or U.shape[1] != r or V.shape[1] != r:
            raise ValueError(
                f"LowRank needs U (rows, r), s (r,) and V (cols, r); "
                f"got {tuple(U.shape)}, {tuple(s.shape)} and {tuple(V.shape)}."
            )
        if len({(x.dtype, x.device) for x in (U, s, V)}) > 1 or not U.is_floating_point():
            raise TypeError(
                f"LowRank needs U, s and V of one floating dtype on one device; got "
                f"{', '.join(f'{x.dtype} on {x.device}' for x in (U, s, V))}."
            )
        super().__init__((U.shape[0], V.shape[0]), dtype=U.dtype, device=U.device)
        self.U, self.s, self.V = U, s, V

    def _matmul(self, V: Tensor) -> Tensor:
        return self.U @ (self.s[:, None] * (self.V.T @ V))

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.V @ (self.s[:, None] * (self.U.T @ U))

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        right = self.V if scale is None else scale[:, None] * self.V
        return (self.U * self.s) @ (self if other is None else other)._matmul(right).T

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        right = self.V if scale is None else scale[:, None] * self.V
        left = self.U * self.s
        return (left * (left @ (self.V.T @ right))).sum(1)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        left = self.V * self.s
        return (left * (left @ (self.U.T @ weigh(self.U, weight)))).sum(1)


@final
class Stack(LinearOperator):
    """Operators with the same columns, one above the other.

    Every product is one pass over each part.

    Args:
        parts: At least one operator; all with one number of columns, dtype and device.

    >>> A = Stack([Matrix(torch.eye(2)), Matrix(torch.tensor([[2.0, 3.0]]))])
    >>> A.shape, A @ torch.tensor([1.0, 1.0])
    ((3, 2), tensor([1., 1., 5.]))
    """

    def __init__(self, parts: Sequence[LinearOperator]) -> None:
        if not parts or not all(isinstance(part, LinearOperator) for part in parts):
            came = ", ".join(type(part).__name__ for part in parts) or "none"
            raise TypeError(f"Stack needs one or more linear operators; got {came}. For a tensor use Matrix(tensor).")
        first = parts[0]
        for part in parts:
            if part.shape[1] != first.shape[1]:
                raise ValueError(
                    f"Stack needs operators with one number of columns; got {first.name} of shape {first.shape} and "
                    f"{part.name} of shape {part.shape}."
                )
            if (part.dtype, part.device) != (first.dtype, first.device):
                raise TypeError(
                    f"Stack needs operators of one dtype on one device; got {first.name} in {first.dtype} on "
                    f"{first.device} and {part.name} in {part.dtype} on {part.device}."
                )
        rows = sum(part.shape[0] for part in parts)
        super().__init__((rows, first.shape[1]), dtype=first.dtype, device=first.device)
        self.parts = tuple(parts)
        self.block = first.block if len({part.block for part in parts}) == 1 else None
        self.ranks = next((part.ranks for part in parts if not part.ranks.alone), ALONE)

    @property
    def eps(self) -> float:
        return max(part.eps for part in self.parts)

    def placed(self) -> Iterator[tuple[LinearOperator, slice]]:
        """Each part with its rows."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.shape[0])
            start += part.shape[0]

    def _matmul(self, V: Tensor) -> Tensor:
        return torch.cat([part._matmul(V) for part in self.parts])

    def _rmatmul(self, U: Tensor) -> Tensor:
        products = [part._rmatmul(U[rows]) for part, rows in self.placed()]
        return sum(products[1:], start=products[0])

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        X, sums = V.new_zeros(V.shape), V.new_zeros(V.shape[1])
        for part, where in self.placed():

            def shifted(U: Tensor, rows: RowIndex, start: int = where.start) -> Tensor:
                there = slice(rows.start + start, rows.stop + start) if isinstance(rows, slice) else rows + start
                return fn(U, there)

            product, total = part._fused(shifted, V)
            X, sums = X + product, sums + total
        return X, sums

    def _right_gram(self, left: LinearOperator, scale: Tensor | None) -> Tensor:
        K = torch.empty(left.shape[0], self.shape[0], dtype=self.dtype, device=self.device)
        for part, columns in self.placed():
            K[:, columns] = left.gram(part, scale)
        return K

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        whole = self.parts[0]._stacked_gram(self.parts[1:], scale) if other is None else None
        if whole is not None:
            return whole
        columns = self.shape[0] if other is None else other.shape[0]
        K = torch.empty(self.shape[0], columns, dtype=self.dtype, device=self.device)
        if other is not None:
            for part, rows in self.placed():
                K[rows] = part.gram(other, scale)
            return K
        placed = list(self.placed())
        for i, (part, rows) in enumerate(placed):
            K[rows, rows] = part.gram(scale=scale)
            for below, beside in placed[i + 1 :]:
                block = part.gram(below, scale)
                K[rows, beside], K[beside, rows] = block, block.T
        return K

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        return torch.cat([part.gram_diag(scale) for part in self.parts])

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        return torch.cat([part.gram_blocks(scale) for part in self.parts])

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        norms = []
        for part, rows in self.placed():
            w = weight if weight is None else weight[find_examples(rows, weight)]
            norms.append(part.column_norms(w))
        return sum(norms[1:], start=norms[0])
