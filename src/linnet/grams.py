"""Gram matrices and norms of a Jacobian, by passes over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from linnet import _checks
from linnet.distributed import add_up, rank_and_world, share_rows
from linnet.factors import Factor, Rows, Scale
from linnet.kron import Kronecker
from linnet.moments import Moments
from linnet.operators import LinearOperator
from linnet.passes import Passes, Piece
from linnet.plan import budget, prepare
from linnet.row_weights import weigh


class Grams(Passes):
    """What `linnet.jacobian.Jacobian` answers about its rows and columns, beside products."""

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        if other is not None and not isinstance(other, Grams):
            right = other.dense().T if scale is None else scale[:, None] * other.dense().T
            return self._matmul(right)
        diagonal = Scale(None if scale is None else scale.contiguous())
        return self._grams(other, diagonal, [""], lambda factor: [("", factor)])[""]

    def _gram_normal(self, other: LinearOperator, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        if not isinstance(other, Grams):
            return super()._gram_normal(other, weight, scale)
        self._check_same_columns(other)
        diagonal, m = Scale(None if scale is None else scale.contiguous()), other.shape[0]

        def run() -> Tensor:
            # Added up in float64: the sum over all rows is what conditions what is made of it.
            out = torch.zeros(m, m, dtype=torch.float64, device=self.device)
            held = list(other._pieces("gram", 1, "", start=0, stop=other.n))
            for a in self._pieces("gram", 1, "K^T W K"):
                K = torch.zeros(a.batch.n * self.c, m, dtype=self.dtype, device=self.device)
                for b in held:
                    for _, x, y in _matched(a.factors, b.factors, lambda factor: [("", factor)]):
                        x.gram(y, diagonal, K[:, other._rows(b)])
                out += (K.T @ weigh(K, weight, self._rows(a))).double()
            add_up(out)
            return out.to(self.dtype)

        return self._completed(run, other)

    def layer_grams(self) -> dict[str, Tensor]:
        """Layer name to its part of the Gram matrix, (n c, n c); they add up to `gram`.

        Parameters that are tied form one layer, under their first name.
        """
        return self._grams(None, Scale(), list(self.lin.layout.layers), self._by_layer)

    def _grams(
        self,
        other: Grams | None,
        scale: Scale,
        names: Sequence[str],
        parts: Callable[[Factor], list[tuple[str, Factor]]],
    ) -> dict[str, Tensor]:
        """Gram matrices by name, from factors cut into named parts; every rank makes the same ones in one order."""
        right = self if other is None else other
        self._check_same_columns(right)

        def run() -> dict[str, Tensor]:
            symmetric = other is None and rank_and_world()[1] == 1
            shape = (self.shape[0], right.shape[0])
            grams = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name in names}
            for block in self._blocks():
                pieces: Iterator[Piece]
                start = block[0].batch.start if symmetric else 0
                pieces = right._pieces("gram", 1, "gram", start=start, stop=right.n, block=block if symmetric else ())
                for b in pieces:
                    for a in block:
                        if symmetric and a.batch.start > b.batch.start:
                            continue
                        rows, columns = self._rows(a), right._rows(b)
                        for name, x, y in _matched(a.factors, b.factors, parts):
                            x.gram(y, scale, grams[name][rows, columns])
                        if symmetric and a.batch.start != b.batch.start:
                            for K in grams.values():
                                K[columns, rows] = K[rows, columns].T
            for K in grams.values():
                share_rows(K, self.n, self.c)
            return grams

        return self._completed(run, other)

    def _check_same_columns(self, other: Grams) -> None:
        _checks.check_same_shapes(self.lin.layout.shapes, other.lin.layout.shapes)
        if self._rotation is not other._rotation:
            raise ValueError("The two Jacobians are in different coordinates; rotate both, by the same rotation.")

    def _blocks(self) -> Iterator[list[Piece]]:
        """This rank's examples in runs of chunks whose factors fit in memory together."""
        # Half of the memory; less once a pass has run out of it.
        limit = budget(self._settings.memory, self.device) // 2
        if self._settings.largest is not None:
            limit = min(limit, 4 * self._settings.largest * self._settings.per_example)
        block: list[Piece] = []
        held = 0
        for piece in self._pieces("gram", 1, ""):
            size = sum(f.bytes for f in piece.factors)
            if block and held + size > limit:
                yield block
                block, held = [], 0
            block.append(piece)
            held += size
        if block:
            yield block

    def _gram_diag(self, scale: Tensor | None) -> Tensor:
        diagonal = Scale(None if scale is None else scale.contiguous())

        def run() -> Tensor:
            out = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
            for piece in self._pieces("diag", 1, "diag J J^T"):
                for factor in piece.factors:
                    out[self._rows(piece)] += factor.diag(diagonal).flatten()
            share_rows(out, self.n, self.c)
            return out

        return self._completed(run)

    def _gram_blocks(self, scale: Tensor | None) -> Tensor:
        diagonal = Scale(None if scale is None else scale.contiguous())

        def run() -> Tensor:
            out = torch.zeros(self.n, self.c, self.c, dtype=self.dtype, device=self.device)
            for piece in self._pieces("diag", 1, "blocks of J J^T"):
                for factor in piece.factors:
                    out[piece.batch.start : piece.batch.start + piece.batch.n] += factor.blocks(diagonal)
            share_rows(out, self.n, 1)
            return out

        return self._completed(run)

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        def run() -> Tensor:
            total = torch.zeros(self.shape[1], dtype=torch.float64, device=self.device)
            for piece in self._pieces("squares", 1, "diag J^T W J"):
                part = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
                b = piece.batch
                w = weight.view(self.n, self.c) if weight is not None and weight.ndim == 1 else weight
                w = None if w is None else w[b.start : b.start + b.n]
                for factor in piece.factors:
                    factor.squares(w, part)
                total += part
            add_up(total)
            return total.to(self.dtype)

        return self._completed(run)

    def moments(self, *, centered: bool = True) -> tuple[Tensor, Tensor]:
        """The mean of each column and its mean square about that, (p,) and (p,) in float64, in one pass.

        Nothing cancels, however far a mean is from zero; `column_norms` is cheaper where that is no matter.

        Args:
            centered: False takes the squares about zero and gives zeros for the means.

        Example:
            >>> import linnet
            >>> J = linnet.linearize(torch.nn.Linear(2, 1)).jacobian(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
            >>> [x.tolist() for x in J.moments()]
            [[2.0, 2.0, 1.0], [1.0, 4.0, 0.0]]
        """

        def run() -> Moments:
            found = Moments(self.shape[1], centered=centered, device=self.device)
            for piece in self._pieces("squares", 1, "moments of J"):
                found.add(piece.factors, piece.batch.n * self.c)
            found.over_ranks()
            return found

        found = self._completed(run)
        return found.mean, found.squares / found.count

    def kronecker(self, root: Tensor | None = None) -> Kronecker:
        """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass; see `linnet.kron`.

        Args:
            root: L, None for the identity, (n, c) where it is diagonal, or (n, c, m).
        """
        if root is not None and tuple(root.shape[:2]) != (self.n, self.c):
            raise ValueError(f"J.kronecker needs a root of shape ({self.n}, {self.c}[, m]); got {tuple(root.shape)}.")
        if self._rotation is not None:
            raise ValueError("J.kronecker needs the Jacobian in the parameters' own coordinates; this one is rotated.")

        def run() -> Kronecker:
            sample = [prepare(f, "sides", k=1, engine=self._settings.engine) for f in self._sample]
            found = Kronecker(sample, layout=self.lin.layout, p=self.shape[1], dtype=self.dtype, device=self.device)
            for piece in self._pieces("sides", 1, "Kronecker factors"):
                b = piece.batch
                part = None if root is None else root[b.start : b.start + b.n]
                found.add(piece.factors, part, b.n)
            found.over_ranks()
            return found

        return self._completed(run)


def _matched(
    left: Sequence[Factor],
    right: Sequence[Factor],
    parts: Callable[[Factor], list[tuple[str, Factor]]],
) -> Iterator[tuple[str, Factor, Factor]]:
    """Pairs of factors over the same columns, with a name; columns that one side lacks are zero there."""
    mine = {(name, f.ranges): f for factor in left for name, f in parts(factor)}
    theirs = {(name, f.ranges): f for factor in right for name, f in parts(factor)}
    for key in mine:
        if key in theirs:
            yield key[0], mine[key], theirs[key]
    lone = [(name, f) for (name, r), f in mine.items() if (name, r) not in theirs]
    others = [(name, f) for (name, r), f in theirs.items() if (name, r) not in mine]
    # The same parameters came in other forms (data-dependent calls, another model): meet as rows, range by range.
    cut = [(name, r, p) for name, f in lone for r, p in by_range(f)]
    for name, (start, stop), part in cut:
        for _, f in others:
            for (a, b), other in by_range(f):
                low, high = max(start, a), min(stop, b)
                if low < high:
                    x = Rows([(low, high)], [part[..., low - start : high - start]])
                    yield name, x, Rows([(low, high)], [other[..., low - a : high - a]])


def by_range(factor: Factor) -> list[tuple[tuple[int, int], Tensor]]:
    rows = factor.expand()
    return list(zip(rows.ranges, rows.parts, strict=True))
