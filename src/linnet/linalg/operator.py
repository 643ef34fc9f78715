r"""Linear operators and their algebra.

A `LinearOperator` is a matrix known through its products. A subclass writes two methods, ``_matmul`` and
``_rmatmul``; the adjoint, the normal product and the compositions follow. Compositions change the columns
only, and any chain of compositions collapses into one `linnet.linalg.affine.Affine` over the same base:

.. math:: B = A[:, \mathrm{index}] \, \mathrm{diag}(d) - 1 z^\top

so Fisher vectors, priors and dropped columns cost no pass beyond the passes of ``A`` itself.

Letters: ``V`` lives on the columns, ``U`` on the rows, ``k`` is the number of vectors in a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from linnet._common import ALONE, Ranks
from linnet.linalg.row_weights import ClassBlocks, RowIndex, weigh

RowFn = Callable[[Tensor, RowIndex], Tensor]
"""Maps a chunk ``A V`` of shape (r, k) and the rows it covers to another (r, k) tensor."""


class LinearOperator(ABC):
    """A matrix of shape (rows, cols), known through its products.

    Subclasses write ``_matmul`` and ``_rmatmul``. A subclass that streams over rows also writes ``_fused``. A
    subclass may write ``_gram``, ``_gram_diag``, ``_gram_blocks`` and ``_column_norms``, which are errors otherwise,
    and ``rows``, ``moments``, ``fingerprint`` and ``checksums``, whose defaults say that the operator does not know.
    The methods with an underscore get blocks that are already checked.

    Args:
        shape: (rows, cols).
        dtype: Dtype of the products; vectors must have it too.
        device: Device of the products; vectors must be there too.
    """

    symbol = "A"  # how error texts write this operator
    block: int | None = None  # c, where each example has c rows; (n, c, c) weights must then have the same c
    ranks: Ranks = ALONE  # the processes that share the rows out; all call the products together

    def __init__(self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    @property
    def eps(self) -> float:
        """The relative rounding of products: of ``dtype``, unless the operator computes with fewer digits inside."""
        return torch.finfo(self.dtype).eps

    # What a subclass writes. The first two methods are required.

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

    def _right_gram(self, left: LinearOperator, scale: Tensor | None) -> Tensor | None:
        """``left diag(scale) A^T`` where this operator knows a better way than ``left`` does; else None."""
        return None

    def _stacked_gram(self, below: Sequence[LinearOperator], scale: Tensor | None) -> Tensor | None:
        """The Gram matrix of this operator on top of others, where there is a better way than by parts; else None."""
        return None

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        K = self.gram(other, scale)
        return K.T @ weigh(K, weight)

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no gram_diag")

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no gram_blocks")

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        raise NotImplementedError(f"{self.name} has no column_norms")

    def rows(self, index: Tensor) -> LinearOperator | None:
        """The rows of the examples at ``index`` (m,), `block` rows each; None where rows cannot be chosen."""
        return None

    def moments(self, *, centered: bool = True) -> tuple[Tensor, Tensor] | None:
        """The mean of each column and the mean square about that mean, (cols,) in float64, without cancellation.

        Args:
            centered: False takes the squares about zero and gives zeros for the means.

        Returns:
            None where the operator has no such pass.
        """
        return None

    def checksums(self) -> dict[str, str]:
        """Checksums of all that the operator is computed from, by name, for comparing with another run."""
        return {}

    def identity(self, settings: str) -> dict[str, str]:
        """What tells a computation with this operator from others, by name, for `linnet._common.Checkpoint`.

        Args:
            settings: The settings of the computation, in words.
        """
        return {"the settings": f"{settings} {tuple(self.shape)} {self.dtype}", **self.checksums()}

    # Products.

    @property
    def has_gram(self) -> bool:
        """Whether the operator can make its Gram matrix."""
        return type(self)._gram is not LinearOperator._gram

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
        return apply_to_columns(self, V, self._matmul)

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
        return apply_to_columns(self, V, lambda block: self._fused(lambda U, rows: weigh(U, weight, rows), block)[0])

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

        def checked(U: Tensor, rows: RowIndex) -> Tensor:
            given = U[:, 0] if vector else U
            out = fn(given, rows)
            check_fn_result(self, out, given)
            return out[:, None] if vector else out

        return apply_to_columns(self, V, lambda block: self._fused(checked, block)[0])

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
        if other is not None and other.shape[1] != self.shape[1]:
            raise ValueError(
                f"{self.name} has {self.shape[1]} columns, so gram needs another operator with as many; "
                f"got {other.name} of shape {other.shape}."
            )
        check_vector(self, "gram", "scale", scale, self.shape[1])
        if other is None or other is self:
            return self._gram(None, scale)
        K = other._right_gram(self, scale)
        return self._gram(other, scale) if K is None else K

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
        return self._change_columns(d=d)

    def centered(self, z: Tensor) -> LinearOperator:
        """``A - 1 z^T``, with z of shape (cols,)."""
        check_vector(self, "centered", "z", z, self.shape[1])
        return self._change_columns(z=z)

    def columns(self, index: Tensor) -> LinearOperator:
        """``A[:, index]``, with a boolean mask of shape (cols,) or a long tensor of column numbers.

        >>> from linnet.linalg.matrices import Matrix
        >>> A = Matrix(torch.eye(3))
        >>> A.columns(torch.tensor([True, False, True])).shape
        (3, 2)
        """
        return self._change_columns(index=as_column_numbers(self, index))

    def _change_columns(self, **change: Tensor) -> LinearOperator:
        from linnet.linalg.affine import Affine  # here, since an Affine is an operator too

        return Affine(self, **change)

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
        self.base, self.ranks = base, base.ranks
        self.symbol = f"{base.symbol}.T"

    @property
    def name(self) -> str:
        return f"{self.base.name}.T"

    @property
    def eps(self) -> float:
        return self.base.eps

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


# Checks of the vectors, weights and indices that an operator is given.


def check_fn_result(op: LinearOperator, out: Tensor, given: Tensor) -> None:
    """Raise unless a function given to ``fused`` has returned the shape that it was given."""
    if out.shape != given.shape:
        raise ValueError(
            f"{op.name}.fused needs fn to return the shape it is given, {tuple(given.shape)}; got {tuple(out.shape)}."
        )


def check_weight(op: LinearOperator, weight: Any) -> None:
    """Raise unless ``weight`` is None, (rows,) or (n, c, c) with ``n * c = rows``."""
    if weight is None:
        return
    rows, shape, c = op.shape[0], tuple(weight.shape), op.block
    blocks = len(shape) == 3 and shape[1] == shape[2] and shape[0] * shape[1] == rows
    # Blocks of classes may be smaller than those of the operator: one for each site of an example.
    blocks = blocks and (c in (None, shape[1]) or isinstance(weight, ClassBlocks))
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


def apply_to_columns(op: LinearOperator, V: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
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


def as_column_numbers(op: LinearOperator, index: Tensor) -> Tensor:
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
