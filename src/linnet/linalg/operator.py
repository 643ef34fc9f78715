r"""Linear operators and their algebra.

A `LinearOperator` is a matrix known through its products. A subclass writes two methods, ``_matmul`` and
``_rmatmul``; the adjoint, the normal product and the compositions follow. Compositions change the columns
only, and any chain of them collapses into one `Affine` over the same base:

.. math:: B = A[:, \mathrm{index}] \, \mathrm{diag}(d) - 1 z^\top

so Fisher vectors, priors and dropped columns cost no pass beyond those of ``A`` itself.

Letters: ``V`` lives on the columns, ``U`` on the rows, ``k`` is the number of vectors in a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from linnet.linalg.operator_checks import (
    by_block,
    check_fn_result,
    check_vector,
    check_weight,
    column_numbers,
)
from linnet.linalg.row_weights import Rows, weigh

RowFn = Callable[[Tensor, Rows], Tensor]
"""Maps a chunk ``A V`` of shape (r, k) and the rows it covers to another (r, k) tensor."""


class LinearOperator(ABC):
    """A matrix of shape (rows, cols), known through its products.

    Subclasses write ``_matmul`` and ``_rmatmul``. Those that stream over rows also write ``_fused``, and
    those that can do better than an error write ``_gram``, ``_gram_diag``, ``_gram_blocks`` and
    ``_column_norms``. The methods with an underscore get blocks that are already checked.

    Args:
        shape: (rows, cols).
        dtype: Dtype of the products; vectors must have it too.
        device: Device of the products; vectors must be there too.
    """

    symbol = "A"  # how error texts write this operator
    block: int | None = None  # c, where the rows come in blocks of c; (n, c, c) weights must then have it

    def __init__(self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    # What a subclass writes.

    @abstractmethod
    def _matmul(self, V: Tensor) -> Tensor:
        """``A V``: (cols, k) to (rows, k)."""

    @abstractmethod
    def _rmatmul(self, U: Tensor) -> Tensor:
        """``A^T U``: (rows, k) to (cols, k)."""

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        """``A^T fn(A V)`` of shape (cols, k), and the column sums of ``fn(A V)`` of shape (k,).

        An operator that streams over rows calls ``fn`` once per chunk and needs a single pass.
        """
        U = fn(self._matmul(V), slice(0, self.shape[0]))
        return self._rmatmul(U), U.sum(0)

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no gram")

    def _stacked_gram(self, below: Sequence[LinearOperator], scale: Tensor | None) -> Tensor | None:
        """The Gram matrix of this operator above others, where there is a better way than part by part; else None."""
        return None

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        K = self.gram(other, scale)
        return K.T @ weigh(K, weight, slice(0, self.shape[0]))

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no gram_diag")

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no gram_blocks")

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no column_norms")

    # Products.

    @property
    def name(self) -> str:
        """What error texts call this operator."""
        return type(self).__name__

    @property
    def T(self) -> LinearOperator:
        """The adjoint; ``A.T.T`` is ``A`` itself."""
        return Adjoint(self)

    def __matmul__(self, V: Tensor) -> Tensor:
        """``A V`` for V of shape (cols,) or (cols, k)."""
        return by_block(self, V, self._matmul)

    def normal(self, V: Tensor, weight: Tensor | None = None) -> Tensor:
        r"""The normal product :math:`A^\top W A V`, in one pass where the operator streams.

        Args:
            V: (cols,) or (cols, k).
            weight: None for the identity, (rows,) for a diagonal ``W``, or (n, c, c) with ``n * c = rows``
                for a block-diagonal one over consecutive rows.

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> A.normal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]))
        tensor([4., 6.])
        """
        check_weight(self, weight)
        return by_block(self, V, lambda block: self._fused(lambda U, rows: weigh(U, weight, rows), block)[0])

    def normal_matrix(self, weight: Tensor | None = None) -> Tensor:
        r"""The matrix :math:`A^\top W A` itself, (cols, cols), symmetric to rounding.

        Args:
            weight: As for `normal`.

        >>> from linnet.linalg.matrices import Matrix
        >>> Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0]])).normal_matrix(torch.tensor([1.0, 3.0]))
        tensor([[ 4.,  6.],
                [ 6., 12.]])
        """
        return self.normal(torch.eye(self.shape[1], dtype=self.dtype, device=self.device), weight)

    def fused(self, fn: RowFn, V: Tensor) -> Tensor:
        r""":math:`A^\top \mathrm{fn}(A V)`, in one pass where the operator streams.

        Args:
            fn: Called as ``fn(U, rows)``, perhaps many times, with the chunk ``U = (A V)[rows]`` of shape
                (r,) for a vector V, or (r, k), and the rows it covers; returns a tensor of that shape.
            V: (cols,) or (cols, k).

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> A.fused(lambda U, rows: U.square(), torch.tensor([1.0, 1.0]))
        tensor([10., 18.])
        """
        vector = isinstance(V, Tensor) and V.ndim == 1

        def checked(U: Tensor, rows: Rows) -> Tensor:
            given = U[:, 0] if vector else U
            out = fn(given, rows)
            check_fn_result(self, out, given)
            return out[:, None] if vector else out

        return by_block(self, V, lambda block: self._fused(checked, block)[0])

    def gram(self, other: LinearOperator | None = None, scale: Tensor | None = None) -> Tensor:
        r"""The dense :math:`A \, \mathrm{diag}(\mathrm{scale}) \, B^\top`, with B = ``other`` or A itself.

        Args:
            other: An operator with the same number of columns; None means this one.
            scale: (cols,); None means ones.

        Returns:
            (rows, rows of other).

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> A.gram(scale=torch.tensor([1.0, 10.0]))
        tensor([[ 1.,  1.],
                [ 1., 41.]])
        """
        from linnet.linalg.matrices import Stack

        if other is not None and other.shape[1] != self.shape[1]:
            raise ValueError(
                f"{self.name} has {self.shape[1]} columns, so gram needs another operator with as many; "
                f"got {other.name} of shape {other.shape}."
            )
        check_vector(self, "gram", "scale", scale, self.shape[1])
        if isinstance(other, Stack) and other is not self:
            K = torch.empty(self.shape[0], other.shape[0], dtype=self.dtype, device=self.device)
            for part, rows in other.placed():
                K[:, rows] = self.gram(part, scale)
            return K
        if isinstance(other, Affine) and not isinstance(self, Affine):
            return other._gram(self, scale).T
        return self._gram(None if other is self else other, scale)

    def gram_normal(self, other: LinearOperator, weight: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        r"""The dense :math:`K^\top W K` for ``K = gram(other, scale)``; an operator that streams never holds K.

        Args:
            other: An operator with the same number of columns and few rows.
            weight: As in `normal`.
            scale: As in `gram`.

        Returns:
            (rows of other, rows of other).

        >>> from linnet.linalg.matrices import Matrix
        >>> A, B = Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0]])), Matrix(torch.tensor([[1.0, 1.0]]))
        >>> A.gram_normal(B)
        tensor([[10.]])
        """
        check_weight(self, weight)
        check_vector(self, "gram_normal", "scale", scale, self.shape[1])
        return self._gram_normal(other, weight, scale)

    def gram_diag(self, scale: Tensor | None = None) -> Tensor:
        """The diagonal of ``gram(scale=scale)``, (rows,): squared row norms."""
        check_vector(self, "gram_diag", "scale", scale, self.shape[1])
        return self._gram_diag(scale)

    def gram_blocks(self, scale: Tensor | None = None) -> Tensor:
        """The diagonal blocks of ``gram(scale=scale)``, (n, c, c), where the rows come in n blocks of c = ``block``.

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 3.0], [1.0, 0.0]]), block=2)
        >>> A.gram_blocks()
        tensor([[[1., 1.],
                 [1., 5.]],
        <BLANKLINE>
                [[9., 0.],
                 [0., 1.]]])
        """
        check_vector(self, "gram_blocks", "scale", scale, self.shape[1])
        if self.block is None:
            raise NotImplementedError(
                f"{self.name} has no gram_blocks: its {self.shape[0]} rows are not known to come in blocks of c."
            )
        return self._gram_blocks(scale)

    def column_norms(self, weight: Tensor | None = None) -> Tensor:
        r"""The diagonal of :math:`A^\top W A`, (cols,): squared column norms; ``weight`` as in `normal`."""
        check_weight(self, weight)
        return self._column_norms(weight)

    # Compositions.

    def scaled(self, d: Tensor) -> LinearOperator:
        """``A diag(d)``, with d of shape (cols,)."""
        check_vector(self, "scaled", "d", d, self.shape[1])
        return Affine(self, d=d)

    def centered(self, z: Tensor) -> LinearOperator:
        """``A - 1 z^T``, with z of shape (cols,)."""
        check_vector(self, "centered", "z", z, self.shape[1])
        return Affine(self, z=z)

    def columns(self, index: Tensor) -> LinearOperator:
        """``A[:, index]``, with a boolean mask of shape (cols,) or a long tensor of column numbers.

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.eye(3))
        >>> A.columns(torch.tensor([True, False, True])).shape
        (3, 2)
        """
        return Affine(self, index=column_numbers(self, index))

    def dense(self, *, block: int = 256, limit: int = 100_000_000) -> Tensor:
        """The matrix itself: from its rows where there are any, or by products with the identity on its shorter side.

        Args:
            block: Columns of the identity in one product.
            limit: Refuse to build more entries than this.
        """
        rows, cols = self.shape
        if rows * cols > limit:
            raise ValueError(
                f"{self.name} has shape {self.shape}, {rows * cols} entries, and dense() stops at {limit}. "
                f"Use products such as {self.symbol} @ V, or raise limit."
            )
        return self._dense(block)

    def _dense(self, block: int) -> Tensor:
        rows, cols = self.shape
        if rows < cols:
            return Adjoint(self)._dense(block).T
        eye = torch.eye(cols, dtype=self.dtype, device=self.device)
        parts = [self._matmul(part) for part in torch.split(eye, block, dim=1)]
        return torch.cat(parts, 1) if parts else eye.new_zeros(rows, cols)

    def __repr__(self) -> str:
        return f"{self.name}(shape={self.shape}, dtype={self.dtype}, device={self.device})"


@final
class Adjoint(LinearOperator):
    """``A^T``. A fused product with it takes two passes: the rows of ``A^T`` are not streamed.

    >>> from linnet.linalg.matrices import Matrix
    >>> A = Matrix(torch.tensor([[1.0, 2.0]]))
    >>> A.T @ torch.ones(1), A.T.T is A
    (tensor([1., 2.]), True)
    """

    def __init__(self, base: LinearOperator) -> None:
        super().__init__((base.shape[1], base.shape[0]), dtype=base.dtype, device=base.device)
        self.base = base
        self.symbol = f"{base.symbol}.T"

    @property
    def name(self) -> str:
        return f"{self.base.name}.T"

    @property
    def T(self) -> LinearOperator:
        return self.base

    def _matmul(self, V: Tensor) -> Tensor:
        return self.base._rmatmul(V)

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.base._matmul(U)

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        return self.base.column_norms(scale)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        if weight is not None and weight.ndim == 3:
            raise NotImplementedError(f"{self.name} has no column_norms with a block-diagonal weight")
        return self.base.gram_diag(weight)


@final
class Affine(LinearOperator):
    r"""``B = A[:, index] diag(d) - 1 z^T``: every composition that acts on columns.

    Compositions of an `Affine` fold into another over the same base ``A``. ``_fused`` is one pass of ``A``; a
    centered Gram needs one product with ``A`` (two when ``other`` is centered too) beside the Gram of ``A``.
    Centered Gram diagonals and column norms are differences of two positive terms, hence only accurate to
    ``eps`` times the uncentered ones.

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
        self.block = base.block

    def scaled(self, d: Tensor) -> LinearOperator:
        check_vector(self, "scaled", "d", d, self.shape[1])
        z = None if self.z is None else self.z * d
        return Affine(self.base, index=self.index, d=_times(self.d, d), z=z)

    def centered(self, z: Tensor) -> LinearOperator:
        check_vector(self, "centered", "z", z, self.shape[1])
        return Affine(self.base, index=self.index, d=self.d, z=z if self.z is None else self.z + z)

    def columns(self, index: Tensor) -> LinearOperator:
        index = column_numbers(self, index)
        d, z = (None if x is None else x[index] for x in (self.d, self.z))
        return Affine(self.base, index=index if self.index is None else self.index[index], d=d, z=z)

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
        every = slice(0, self.shape[0])
        transposed = weight.mT if weight is not None and weight.ndim == 3 else weight
        W1 = weigh(ones, weight, every)
        cross = self._pull(self.base._rmatmul(W1 + weigh(ones, transposed, every)))[:, 0]
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
