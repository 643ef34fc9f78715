"""Gram matrices and norms of a Jacobian, by passes over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from linnet._common import messages
from linnet._common.distributed import add_up, rank_and_world, share_rows
from linnet._common.memory import budget
from linnet._common.progress import bar
from linnet.jacobian.blocks.base import Factor, Rows, Scale
from linnet.jacobian.column_moments import Moments
from linnet.jacobian.kronecker import Kronecker
from linnet.jacobian.passes import GRAM, Passes, Piece
from linnet.jacobian.plan import prepare
from linnet.linalg.operator import LinearOperator
from linnet.linalg.row_weights import weigh

Cut = Callable[[Factor], list[tuple[str, Factor]]]
"""A factor to its named parts."""

Placed = tuple[slice, Piece]
"""A chunk with its rows."""


class Grams(Passes):
    """What `linnet.jacobian.jacobian.Jacobian` answers about its rows and columns, beside products."""

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
        parts: Cut,
    ) -> dict[str, Tensor]:
        """Gram matrices by name, from factors cut into named parts; every rank makes the same ones in one order."""
        if other is None and rank_and_world()[1] == 1:
            return _symmetric([self], scale, names, parts)
        right = self if other is None else other
        self._check_same_columns(right)

        def run() -> dict[str, Tensor]:
            shape = (self.shape[0], right.shape[0])
            grams = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name in names}
            room, own = budget(self._settings.memory, self.device), self._own[1] - self._own[0]
            with _pairs(self, own * self.c * right.shape[0]) as tick:
                for block, _ in _blocks([self], room):
                    for columns, b in _placed([right], room, start=0, stop=right.n):
                        for rows, a in block:
                            tick(_meet(a, b, scale, parts, {name: K[rows, columns] for name, K in grams.items()}))
                        del a, b  # before the next ones are formed
            for K in grams.values():
                share_rows(K, self.n, self.c)
            return grams

        return self._completed(run, right)

    def _stacked_gram(self, below: Sequence[LinearOperator], scale: Tensor | None) -> Tensor | None:
        others = [op for op in below if isinstance(op, Grams)]
        alike = all(op._settings.precision == self._settings.precision for op in others)
        if len(others) < len(below) or not alike or rank_and_world()[1] > 1:
            return None
        for op in others:
            self._check_same_columns(op)
        diagonal = Scale(None if scale is None else scale.contiguous())
        return _symmetric([self, *others], diagonal, [""], lambda factor: [("", factor)])[""]

    def _check_same_columns(self, other: Grams) -> None:
        messages.check_same_shapes(self.lin.layout.shapes, other.lin.layout.shapes)
        if self._rotation is not other._rotation:
            raise ValueError("The two Jacobians are in different coordinates; rotate both, by the same rotation.")

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
        """Kronecker factors of ``J^T L L^T J``, layer by layer, in one pass; see `linnet.jacobian.kronecker`.

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


def _symmetric(all_: Sequence[Grams], scale: Scale, names: Sequence[str], parts: Cut) -> dict[str, Tensor]:
    """Gram matrices of Jacobians one above the other, by name: every two chunks meet once."""
    first, *others = all_

    def run() -> dict[str, Tensor]:
        m = sum(op.shape[0] for op in all_)
        grams = {name: torch.zeros(m, m, dtype=first.dtype, device=first.device) for name in names}
        room = budget(first._settings.memory, first.device)  # beside them
        with _pairs(first, m * m) as tick:
            for block, behind in _blocks(all_, room):
                for columns, b in chain(block, _placed(all_, room, *behind)):
                    for rows, a in block:
                        if rows.start > columns.start:
                            continue
                        done = _meet(a, b, scale, parts, {name: K[rows, columns] for name, K in grams.items()})
                        if rows.start != columns.start:
                            done *= 2
                            for K in grams.values():
                                K[columns, rows] = K[rows, columns].T
                        tick(done)
                    del a, b  # before the next ones are formed
        return grams

    return first._completed(run, *others)


def _pairs(J: Grams, total: int) -> AbstractContextManager[Callable[[int], Any]]:
    """The bar of a Gram matrix, over its entries: a pass forms chunks again for every block of them."""
    return bar(total, "gram", progress=J._settings.progress, unit="pairs of rows")


def _placed(
    all_: Sequence[Grams],
    room: int,
    op: int = 0,
    start: int | None = None,
    *,
    stop: int | None = None,
) -> Iterator[Placed]:
    """Chunks of Jacobians one above the other, from an example of one of them on, with their rows among all."""
    above = sum(part.shape[0] for part in all_[:op])
    for part in all_[op:]:
        for piece in part._pieces("gram", 1, "", start=start, stop=stop, room=room):
            rows, handed = part._rows(piece), [piece]
            del piece  # it is the caller's alone while the next one is formed
            yield slice(above + rows.start, above + rows.stop), handed.pop()
        above, start = above + part.shape[0], None


def _blocks(all_: Sequence[Grams], room: int) -> Iterator[tuple[list[Placed], tuple[int, int]]]:
    """Runs of chunks whose factors fit in memory together, and which Jacobian and example come behind them.

    A run is emptied when the next one is asked for.
    """
    limit = int(GRAM[1] * room) >> all_[0]._settings.halved
    block: list[Placed] = []
    held = above = number = 0
    for rows, piece in _placed(all_, room):
        while rows.start >= above + all_[number].shape[0]:
            above, number = above + all_[number].shape[0], number + 1
        size = sum(f.bytes for f in piece.factors)
        if block and held + size > limit:
            yield block, (number, piece.batch.start)
            block.clear()
            held = 0
        block.append((rows, piece))
        held += size
        del piece
    if block:
        yield block, (len(all_), 0)


def _meet(a: Piece, b: Piece, scale: Scale, parts: Cut, out: Mapping[str, Tensor]) -> int:
    """Adds the Gram matrices of two chunks, by name; how many pairs of rows they have."""
    for name, x, y in _matched(a.factors, b.factors, parts):
        x.gram(y, scale, out[name])
    return max((K.numel() for K in out.values()), default=0)


def _matched(
    left: Sequence[Factor],
    right: Sequence[Factor],
    parts: Cut,
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
