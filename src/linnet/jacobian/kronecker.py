r"""Kronecker factors of the curvature, layer by layer, and the coordinates in which they are diagonal.

For a layer with inputs x and output gradients g the curvature is a sum over examples, outputs and uses; KFAC takes the
two sides to be independent (Martens and Grosse 2015; with weight sharing the *expand* form of Eschenhagen et al. 2023):

.. math:: \sum_{i} J_i^\top B_i J_i \approx \hat G \otimes \hat A, \qquad
          \hat A = \frac1n \sum_i \frac1{T} \sum_t x_{it} x_{it}^\top, \qquad
          \hat G = \sum_{i,t} \sum_u h_{iut} h_{iut}^\top, \quad h = L^\top g, \; B = L L^\top ,

for a weight, and :math:`\hat G` for its bias, apart from each other. Parameters that are no outer product (norms, class
tokens) keep their exact block where it is small, and the diagonal of it where it is not (embedding tables); so do
layers that the first examples do not reach.

A `Rotation` turns columns of the Jacobian into the eigenvectors of these blocks. There the approximation is diagonal,
so that whatever is known for diagonal covariances serves: nothing here forms a Jacobian or a block of Kronecker shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from linnet._common import add_up, messages
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Range
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock
from linnet.network import Layout

EXACT = 1024
"""Parameters without Kronecker form keep their exact block up to this size."""


@dataclass(frozen=True)
class Pair:
    """The two Kronecker factors of a layer.

    Attributes:
        weight: Range of the weight, or None.
        bias: Range of the bias, or None.
        swapped: The weight is laid out as (groups, dx, dg).
        A: (groups, dx, dx), of the inputs; a mean.
        G: (groups, dg, dg), of the output gradients; a sum.
    """

    weight: Range | None
    bias: Range | None
    swapped: bool
    A: Tensor
    G: Tensor


@final
class Kronecker:
    """Accumulates the factors over chunks; see `linnet.Jacobian.kronecker`.

    Args:
        sample: The factors of a few examples, which say what there is; none of it is counted.
        layout: Of the parameters, for names in errors.
        p: Parameters.
        dtype: Of the curvature that comes out.
        device: Where.

    Attributes:
        pairs: Range of the weight (of the bias where there is none) to its Kronecker factors.
        exact: Range to its block (q, q).
        squares: (p,), the diagonal of the curvature in all other columns.
    """

    def __init__(
        self, sample: Sequence[ColumnBlock], *, layout: Layout, p: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.n = layout, 0
        self.pairs: dict[Range, Pair] = {}
        self.exact: dict[Range, Tensor] = {}
        # Sums over all data are in float64, as everywhere.
        like = torch.zeros((), dtype=torch.float64, device=device)
        self.squares, self.dtype = like.new_zeros(p), dtype
        for block in sample:
            if isinstance(block, OuterProductBlock):
                groups, dx, dg = block.x.shape[1], block.x.shape[-1], block.g.shape[-1]
                A, G = like.new_zeros(groups, dx, dx), like.new_zeros(groups, dg, dg)
                self.pairs[block.ranges[0]] = Pair(block.weight, block.bias, block.swapped, A, G)
            elif not isinstance(block, EmbeddingBlock):
                self.exact |= {
                    r: like.new_zeros(b - a, b - a) for a, b in block.ranges if b - a <= EXACT for r in [(a, b)]
                }

    def add(self, blocks: Sequence[ColumnBlock], root: Tensor | None, n: int) -> None:
        """Take in a chunk of n examples; root L is None (the identity), (n, c) or (n, c, m)."""
        for block in blocks:
            if isinstance(block, OuterProductBlock) and block.ranges[0] in self.pairs:
                self._add_pair(self.pairs[block.ranges[0]], block, root)
            elif isinstance(block, OuterProductBlock | DenseBlock):
                self._add_rows(block.expand(), root)
            else:
                self._add_squares(block, root)
        self.n += n

    def _add_pair(self, pair: Pair, block: OuterProductBlock, root: Tensor | None) -> None:
        if block.weight is not None:
            x = block.x.transpose(0, 1).flatten(1, 2)  # (groups, n T, dx)
            pair.A.add_((x.mT @ x).double() / block.x.shape[2])
        h = _through(root, block.g)
        h = h.permute(2, 0, 1, 3, 4).flatten(1, 3)  # (groups, n m T, dg)
        pair.G.add_((h.mT @ h).double())

    def _add_rows(self, rows: DenseBlock, root: Tensor | None) -> None:
        for r, part in zip(rows.ranges, rows.parts, strict=True):
            if r in self.exact:
                h = _through(root, part).flatten(0, 1)
                self.exact[r].add_((h.T @ h).double())
            elif any(a < r[1] and r[0] < b for pair in self.pairs.values() for a, b in _ranges(pair)):
                raise other_form(self.layout, r)
            else:
                self._add_squares(DenseBlock([r], [part]), root)

    def _add_squares(self, block: ColumnBlock, root: Tensor | None) -> None:
        weight = root if root is None or root.ndim == 3 else root.square()
        weight = weight @ weight.mT if weight is not None and weight.ndim == 3 else weight
        part = torch.zeros_like(self.squares, dtype=block.tensors()[-1].dtype)
        block.squares(weight, part)
        self.squares += part

    def over_ranks(self) -> None:
        """Put the sums of all ranks together, and make the input's side a mean."""
        count = self.squares.new_tensor([self.n])
        add_up(
            count, self.squares, *self.exact.values(), *(t for pair in self.pairs.values() for t in (pair.A, pair.G))
        )
        self.n = int(count)
        for pair in self.pairs.values():
            pair.A.div_(self.n)

    def decomposed(self) -> tuple[Rotation, Tensor]:
        """The coordinates in which the blocks are diagonal, and the curvature along them, (p,)."""
        turns: dict[Range, Turn] = {}
        values = self.squares.clone()
        for pair in self.pairs.values():
            g, Qg = _eigh(pair.G, "output gradients", self.layout, _ranges(pair)[0])
            a, Qx = _eigh(pair.A, "inputs", self.layout, _ranges(pair)[0])
            if pair.weight is not None:
                product = g[..., :, None] * a[..., None, :]  # (groups, dg, dx)
                values[slice(*pair.weight)] = (product.mT if pair.swapped else product).flatten()
                turns[pair.weight] = Turn(Qg.to(self.dtype), Qx.to(self.dtype), pair.swapped)
            if pair.bias is not None:
                values[slice(*pair.bias)] = g.flatten()
                turns[pair.bias] = Turn(Qg.to(self.dtype))
        for r, block in self.exact.items():
            v, Q = _eigh(block[None], "an exact block", self.layout, r)
            values[slice(*r)], turns[r] = v[0], Turn(Q.to(self.dtype))
        return Rotation(turns, self.layout), values.to(self.dtype)


@dataclass(frozen=True)
class Turn:
    """How the columns of one parameter turn.

    Attributes:
        Qg: (groups, dg, dg), orthonormal columns.
        Qx: (groups, dx, dx), or None where the parameter is a vector of length groups * dg.
        swapped: The parameter is laid out as (groups, dx, dg).
    """

    Qg: Tensor
    Qx: Tensor | None = None
    swapped: bool = False

    def rows(self, part: Tensor) -> Tensor:
        """The turned columns of rows (n, c, q)."""
        Qg, Qx = self.Qg.to(part.dtype), None if self.Qx is None else self.Qx.to(part.dtype)
        groups, dg = Qg.shape[:2]
        if Qx is None:
            return (part.unflatten(-1, (groups, 1, dg)) @ Qg).flatten(2)
        dx = Qx.shape[-1]
        if self.swapped:
            return (Qx.mT @ part.unflatten(-1, (groups, dx, dg)) @ Qg).flatten(2)
        return (Qg.mT @ part.unflatten(-1, (groups, dg, dx)) @ Qx).flatten(2)


@final
class Rotation:
    """An orthonormal change of the parameters' coordinates, ``J Q``, parameter by parameter.

    Args:
        turns: Range of columns to how it turns; other columns stay.
        layout: Of the parameters, for names in errors.
    """

    def __init__(self, turns: Mapping[Range, Turn], layout: Layout) -> None:
        self.turns, self.layout = dict(turns), layout

    def __call__(self, block: ColumnBlock) -> ColumnBlock:
        """The same columns in the new coordinates."""
        if isinstance(block, LazyBlock):
            block = block.as_outer_product()
        if isinstance(block, OuterProductBlock):
            turn = self._of(block)
            if turn is not None:
                x = block.x if turn.Qx is None else block.x @ turn.Qx.to(block.x.dtype)
                g = block.g @ turn.Qg.to(block.g.dtype)
                return OuterProductBlock(x, g, weight=block.weight, bias=block.bias, swapped=block.swapped)
        if not any(True for r in block.ranges for _ in self._within(r)):
            return block
        rows = block.expand()
        return DenseBlock(rows.ranges, [self._turned(r, part) for r, part in zip(rows.ranges, rows.parts, strict=True)])

    def _of(self, block: OuterProductBlock) -> Turn | None:
        """The turn of an outer product, where it is one for both its parameters."""
        turns = [self.turns.get(r) for r in block.ranges]
        if any(turn is None for turn in turns) or (block.weight is not None and turns[0].Qx is None):  # type: ignore[union-attr]
            return None
        return turns[0]

    def _within(self, r: Range) -> Iterator[tuple[Range, Turn]]:
        for key, turn in self.turns.items():
            if key[0] < r[1] and r[0] < key[1]:
                if key[0] < r[0] or r[1] < key[1]:
                    raise other_form(self.layout, r)
                yield key, turn

    def _turned(self, r: Range, part: Tensor) -> Tensor:
        out = part
        for (a, b), turn in self._within(r):
            out = part.clone() if out is part else out
            out[..., a - r[0] : b - r[0]] = turn.rows(part[..., a - r[0] : b - r[0]])
        return out

    def rows(self, R: Tensor) -> Tensor:
        """``R Q`` for rows (m, p), differentiable in them."""
        parts, end = [], 0
        for (a, b), turn in sorted(self.turns.items(), key=lambda item: item[0]):
            parts += [R[:, end:a], turn.rows(R[None, :, a:b])[0]]
            end = b
        return torch.cat([*parts, R[:, end:]], 1)

    def back(self, V: Tensor) -> Tensor:
        """``Q V``: from the new coordinates (p, k) to the parameters."""
        out = V.clone()
        for (a, b), turn in self.turns.items():
            # Rows turn by Q from the right, so that columns turn back by its transpose from the right.
            inverse = Turn(turn.Qg.mT, None if turn.Qx is None else turn.Qx.mT, turn.swapped)
            out[a:b] = inverse.rows(V[a:b].T[None])[0].T
        return out

    def tensors(self) -> dict[str, Tensor]:
        """All of it as named tensors; `from_tensors` is the inverse."""
        out = {}
        for (a, b), turn in self.turns.items():
            key = f"{a}-{b}{'-swapped' if turn.swapped else ''}"
            out[f"{key}.g"] = turn.Qg
            if turn.Qx is not None:
                out[f"{key}.x"] = turn.Qx
        return out

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Rotation:
        """From what `tensors` gave."""
        turns = {}
        for name, Qg in tensors.items():
            key, _, side = name.rpartition(".")
            if side == "g":
                a, b, *swapped = key.split("-")
                turns[int(a), int(b)] = Turn(Qg, tensors.get(f"{key}.x"), bool(swapped))
        return cls(turns, layout)


def constant_over(turns: Mapping[Range, Turn], variance: Tensor, layout: Layout) -> None:
    """Raise unless a diagonal (p,) has one value over every block that turns, so that it stays diagonal."""
    for r in turns:
        low, high = variance[slice(*r)].aminmax()
        if bool(low != high):
            raise ValueError(
                f"A Kronecker structure needs one prior variance for all of {_name(layout, r)}; got {float(low):.3g} "
                f"to {float(high):.3g}. Give the same for the whole parameter, or use structure='diag' or 'full'."
            )


def other_form(layout: Layout, r: Range) -> ValueError:
    return ValueError(
        f"{_name(layout, r)} is used in another way here than in the first examples of the training data, so that its "
        "Kronecker factors do not fit. Use structure='diag', 'lowrank' or 'samples', or leave the layer out with "
        "params=."
    )


def _through(root: Tensor | None, g: Tensor) -> Tensor:
    """``L^T g`` over the outputs: g (n, c, ...) to (n, m, ...)."""
    if root is None:
        return g
    if root.ndim == 2:
        return root.view(*root.shape, *(1,) * (g.ndim - 2)) * g
    return (root.mT @ g.flatten(2)).view(len(g), root.shape[2], *g.shape[2:])


def _ranges(pair: Pair) -> list[Range]:
    return [r for r in (pair.weight, pair.bias) if r is not None]


def _eigh(C: Tensor, what: str, layout: Layout, r: Range) -> tuple[Tensor, Tensor]:
    """Eigenvalues, those that rounding has left below zero being zero, and vectors, of (groups, d, d)."""
    if not bool(torch.isfinite(C).all()):
        raise ArithmeticError(f"The curvature of {_name(layout, r)} ({what}) is not finite.")
    values, Q = torch.linalg.eigh(C)
    return values.clamp_min(0), Q


def _name(layout: Layout, r: Range) -> str:
    found = [name for name, s in layout.slices.items() if s.start < r[1] and r[0] < s.stop]
    return messages.listing(found)
