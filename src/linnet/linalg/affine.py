r"""Operators that change the columns of another operator: a selection, a scale and a shift."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from linnet.linalg.operator import LinearOperator, RowFn, as_column_numbers, check_vector
from linnet.linalg.row_weights import weigh


@final
class Affine(LinearOperator):
    r"""``B = A[:, index] diag(d) - 1 z^T``: every composition that acts on columns.

    Compositions of an `Affine` give another `Affine` over the same base ``A``. ``_fused`` is one pass of ``A``. A
    centered Gram matrix needs one product with ``A`` (two when ``other`` is centered too) beside the Gram matrix of
    ``A``. Centered Gram diagonals and column norms are differences of two positive terms, and accurate to ``eps``
    times the uncentered values.

    Args:
        base: The operator ``A``.
        index: Long column numbers of ``A``; None means all.
        d: (cols,) factors; None means ones.
        z: (cols,) shifts; None means zeros.

    >>> from linnet.linalg.matrices import Matrix
    >>> A = Matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> A.centered(torch.tensor([2.0, 3.0])).scaled(torch.tensor([1.0, 10.0])).dense()
    tensor([[ -1., -10.],
            [  1.,  10.]])
    """

    def __init__(
        self,
        base: LinearOperator,
        *,
        index: Tensor | None = None,
        d: Tensor | None = None,
        z: Tensor | None = None,
    ) -> None:
        cols = base.shape[1] if index is None else len(index)
        super().__init__((base.shape[0], cols), dtype=base.dtype, device=base.device)
        self.base, self.index, self.d, self.z = base, index, d, z
        self.block, self.ranks = base.block, base.ranks

    @property
    def eps(self) -> float:
        return self.base.eps

    def scaled(self, d: Tensor) -> LinearOperator:
        check_vector(self, "scaled", "d", d, self.shape[1])
        z = None if self.z is None else self.z * d
        return Affine(self.base, index=self.index, d=_times(self.d, d), z=z)

    def centered(self, z: Tensor) -> LinearOperator:
        check_vector(self, "centered", "z", z, self.shape[1])
        return Affine(self.base, index=self.index, d=self.d, z=z if self.z is None else self.z + z)

    def columns(self, index: Tensor) -> LinearOperator:
        index = as_column_numbers(self, index)
        d, z = (None if x is None else x[index] for x in (self.d, self.z))
        return Affine(self.base, index=index if self.index is None else self.index[index], d=d, z=z)

    def rows(self, index: Tensor) -> LinearOperator | None:
        base = self.base.rows(index)
        return None if base is None else Affine(base, index=self.index, d=self.d, z=self.z)

    def moments(self, *, centered: bool = True) -> tuple[Tensor, Tensor] | None:
        found = self.base.moments(centered=centered or self.z is not None)
        if found is None:
            return None
        mean, squares = found if self.index is None else (x[self.index] for x in found)
        d = torch.ones_like(mean) if self.d is None else self.d.double()
        mean, squares = d * mean, d.square() * squares
        mean = mean if self.z is None else mean - self.z.double()
        return (mean, squares) if centered else (torch.zeros_like(mean), squares + mean.square())

    def checksums(self) -> dict[str, str]:
        return self.base.checksums()

    @property
    def has_gram(self) -> bool:
        return self.base.has_gram

    # M = (selection of columns) diag(d), so that B = A M - 1 z^T.

    def _push(self, V: Tensor) -> Tensor:
        """``M V``: from this operator's columns to the base's."""
        return self._scatter(V if self.d is None else self.d[:, None] * V)

    def _pull(self, X: Tensor) -> Tensor:
        """``M^T X``: from the base's columns to this operator's."""
        X = X if self.index is None else X[self.index]
        return X if self.d is None else self.d[:, None] * X

    def _scatter(self, x: Tensor) -> Tensor:
        if self.index is None:
            return x
        return x.new_zeros(self.base.shape[1], *x.shape[1:]).index_add(0, self.index, x)

    def _dense(self, block: int) -> Tensor:
        if self.index is not None:  # the base may be far larger
            return super()._dense(block)
        A = self.base._dense(block)
        A = A if self.d is None else A * self.d
        return A if self.z is None else A - self.z

    def _matmul(self, V: Tensor) -> Tensor:
        U = self.base._matmul(self._push(V))
        return U if self.z is None else U - self.z @ V

    def _rmatmul(self, U: Tensor) -> Tensor:
        X = self._pull(self.base._rmatmul(U))
        return X if self.z is None else X - torch.outer(self.z, U.sum(0))

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        if self.z is None:
            X, sums = self.base._fused(fn, self._push(V))
            return self._pull(X), sums
        shift = self.z @ V
        X, sums = self.base._fused(lambda U, rows: fn(U - shift, rows), self._push(V))
        return self._pull(X) - torch.outer(self.z, sums), sums

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        # (A M - 1 z^T) S (A' M' - 1 z'^T)^T; M S M'^T is diagonal when both select the same columns.
        B = self if other is None else other if isinstance(other, Affine) else Affine(other)
        if not _same_columns(self.index, B.index):
            raise NotImplementedError(
                f"{self.name} has no gram with an operator that selects other columns of its base. "
                f"Select the same columns of both."
            )
        inner = self._inner(_times(_times(self.d, B.d), scale))
        K = self.base.gram(None if B.base is self.base else B.base, scale=inner)
        if B.z is not None:
            mine = self._product(B.z, scale)
            K = K - mine[:, None]
        if self.z is not None:
            K = K - (mine if B is self else B._product(self.z, scale))
        if self.z is not None and B.z is not None:
            K = K + _dot(self.z, B.z, scale)
        return K

    def _right_gram(self, left: LinearOperator, scale: Tensor | None) -> Tensor | None:
        return None if isinstance(left, Affine) else self._gram(left, scale).T

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        B = other if isinstance(other, Affine) else Affine(other)
        if self.z is not None or B.z is not None or not _same_columns(self.index, B.index):
            return super()._gram_normal(other, weight, scale)
        inner = self._inner(_times(_times(self.d, B.d), scale))
        return self.base.gram_normal(B.base, weight, inner)

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        diag = self.base.gram_diag(scale=self._inner(_times(_times(self.d, self.d), scale)))
        if self.z is None:
            return diag
        return diag - 2 * self._product(self.z, scale) + _dot(self.z, self.z, scale)

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        blocks = self.base.gram_blocks(scale=self._inner(_times(_times(self.d, self.d), scale)))
        if self.z is None:
            return blocks
        cross = self._product(self.z, scale).view(blocks.shape[:2])
        return blocks - cross[:, :, None] - cross[:, None] + _dot(self.z, self.z, scale)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        norms = self.base.column_norms(weight)
        norms = norms if self.index is None else norms[self.index]
        norms = norms if self.d is None else self.d.square() * norms
        if self.z is None:
            return norms
        # diag(B^T W B) = diag(M^T A^T W A M) - z * M^T A^T (W + W^T) 1 + z^2 (1^T W 1)
        ones = torch.ones(self.shape[0], 1, dtype=self.dtype, device=self.device)
        W1 = weigh(ones, weight)
        cross = self._pull(self.base._rmatmul(W1 + weigh(ones, weight, transpose=True)))[:, 0]
        return norms - self.z * cross + self.z.square() * W1.sum()

    def _inner(self, scale: Tensor | None) -> Tensor | None:
        """The diagonal of (selection) diag(scale) (selection)^T, over the base's columns."""
        if self.index is None:
            return scale
        return self._scatter(torch.ones_like(self.index, dtype=self.dtype) if scale is None else scale)

    def _product(self, v: Tensor, scale: Tensor | None) -> Tensor:
        """``A M diag(scale) v``, (rows,)."""
        v = v if scale is None else scale * v
        return self.base._matmul(self._push(v[:, None]))[:, 0]


def _same_columns(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """``a * b``, where None stands for ones."""
    return b if a is None else a if b is None else a * b


def _dot(a: Tensor, b: Tensor, scale: Tensor | None) -> Tensor:
    return a @ b if scale is None else (a * scale) @ b
