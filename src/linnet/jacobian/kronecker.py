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

import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from linnet._common import ALONE, TEMPORARY, Ranks, check_fits, files, find_dense_budget, messages, share_out
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Range
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.blocks.embedding_table import EmbeddingBlock
from linnet.jacobian.blocks.outer_product import OuterProductBlock

if TYPE_CHECKING:
    from linnet.network import Layout

EXACT = 1024
"""Parameters without Kronecker form keep their exact block up to this size."""

LEADING = 128
"""Columns of the sketch of a side that is too long to be decomposed whole: more directions against a longer pass."""

CUBES = {"cpu": 2e11, "cuda": 1e12}
"""The sum of d^3 over the sides that are decomposed whole, which takes about a minute in float64: exact factors against
time. A sketch keeps the leading directions of longer sides."""


class Side(ABC):
    """A sum of outer products ``x x^T`` of rows x (d,), for each of some groups: one of two Kronecker factors.

    Attributes:
        d: Length of a row.
        sums: Tensors in float64 that add up over chunks and ranks.
    """

    d: int
    sums: tuple[Tensor, ...]

    @abstractmethod
    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        """Add rows (groups, m, d), each outer product times a weight."""

    def scale(self, factor: float) -> None:
        """Multiply the sum by a factor."""
        for total in self.sums:
            total.mul_(factor)

    def equals(self, other: Side) -> bool:
        """Whether both are the same sum: layers that read the same input have one factor of the inputs."""
        pairs = zip(self.sums, other.sums, strict=True)
        return type(self) is type(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@dataclass(frozen=True)
class SideSpectrum:
    """The eigenvalues of a side, and an orthonormal matrix of directions.

    Attributes:
        values: (groups, d), not negative.
        basis: The directions.
        rest: The share of the trace that one value stands for, in all directions after the leading ones.
    """

    values: Tensor
    basis: Basis
    rest: float = 0.0


@final
class DenseSide(Side):
    """The sum as it is, (groups, d, d)."""

    def __init__(self, groups: int, d: int, device: torch.device) -> None:
        self.d = d
        self.total = torch.zeros(groups, d, d, dtype=torch.float64, device=device)
        self.sums = (self.total,)

    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        self.total.add_((rows.mT @ rows).double(), alpha=weight)

    @property
    def trace(self) -> Tensor:
        """The trace of each group, (groups,)."""
        return self.total.diagonal(dim1=1, dim2=2).sum(1)


@final
class SketchedSide(Side):
    r"""The leading directions of a sum S that is never formed, and one value for all other directions.

    With a random orthonormal :math:`\Omega` (d, k) the products :math:`Y = S \Omega` add up over chunks, and
    :math:`S \approx Y (\Omega^\top Y)^{-1} Y^\top` (Nystrom; Tropp et al. 2017, algorithm 3). This is exact where the
    rank of S is at most k. What the trace of S has beyond is spread evenly over the other d - k directions.

    Args:
        groups: Number of sums.
        omega: (d, k), in float64, the same for all sides of a length: layers that read the same input then have the
            same sums.
        eps: Relative rounding of the rows.
    """

    def __init__(self, groups: int, omega: Tensor, eps: float) -> None:
        self.omega, self.d = omega, len(omega)
        self.product, self.trace = omega.new_zeros(groups, *omega.shape), omega.new_zeros(groups)
        self.eps = eps
        self.sums = (self.product, self.trace)

    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        self.product.add_((rows.mT @ (rows @ self.omega.to(rows.dtype))).double(), alpha=weight)
        self.trace.add_(rows.square().sum((1, 2)).double(), alpha=weight)

    def decompose(self) -> SideSpectrum:
        """The eigenvalues, and the directions that they belong to."""
        k = self.omega.shape[1]
        # A shift of the size of rounding makes the core positive definite; the eigenvalues give it back.
        shift = self.eps * self.product.norm(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        Y = self.product + shift * self.omega
        core = self.omega.T @ Y
        values, V = torch.linalg.eigh(0.5 * (core + core.mT))
        keep = (values > 0.5 * shift[..., 0]).to(values)
        half = Y @ (V * (keep / values.clamp_min(torch.finfo(torch.float64).tiny).sqrt())[:, None])
        Q, R = torch.linalg.qr(half)
        values, V = torch.linalg.eigh(R @ R.mT)
        values = (values - shift[..., 0]).clamp_min(0)
        left = (self.trace - values.sum(1)).clamp_min(0)
        others = (left / max(1, self.d - k))[:, None].expand(-1, self.d - k)
        rest = float((left / self.trace.clamp_min(torch.finfo(torch.float64).tiny)).max())
        rest = rest if k < self.d and rest > self.d * self.eps else 0.0  # all there is, to rounding
        return SideSpectrum(torch.cat([values, others], 1), Basis.around(Q @ V), rest)


@final
class Basis:
    """An orthonormal matrix Q for each of some groups: as it is, or as reflections ``I - V T V^T``.

    Args:
        V: (groups, d, d), which is Q, or (groups, d, k) where T is given.
        T: (groups, k, k), upper triangular; None where V is Q.
    """

    def __init__(self, V: Tensor, T: Tensor | None = None) -> None:
        self.V, self.T = V, T

    @classmethod
    def around(cls, leading: Tensor) -> Basis:
        """A basis whose first directions are, up to signs, the orthonormal columns of a tensor (groups, d, k).

        Householder's reflections: an orthonormal triangle of k columns is a matrix of signs (Golub and Van Loan,
        section 5.1; T from Puglisi 1992).
        """
        a, tau = torch.geqrf(leading)
        V = a.tril(-1)
        V.diagonal(dim1=1, dim2=2).fill_(1)
        k = V.shape[2]
        triangle = torch.eye(k, dtype=V.dtype, device=V.device) + tau[..., None] * (V.mT @ V).triu(1)
        return cls(V, torch.linalg.solve_triangular(triangle, torch.diag_embed(tau), upper=True))

    @property
    def groups(self) -> int:
        return self.V.shape[0]

    @property
    def d(self) -> int:
        return self.V.shape[1]

    @property
    def cost(self) -> int:
        """Multiply-adds for each number of a row that is turned."""
        return self.d if self.T is None else 2 * self.V.shape[2]

    def to(self, dtype: torch.dtype) -> Basis:
        return Basis(self.V.to(dtype), None if self.T is None else self.T.to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """``x Q`` for rows x (..., groups, m, d)."""
        V = self.V.to(x.dtype)
        if self.T is None:
            return _times(x, V)
        return x - _times(_times(_times(x, V), self.T.to(x.dtype)), V.mT)

    def turn_back(self, x: Tensor) -> Tensor:
        """``x Q^T`` for rows x (..., groups, m, d)."""
        V = self.V.to(x.dtype)
        if self.T is None:
            return _times(x, V.mT)
        return x - _times(_times(_times(x, V), self.T.mT.to(x.dtype)), V.mT)


def _times(x: Tensor, M: Tensor) -> Tensor:
    """``x M`` for x (..., groups, m, d) and M (groups, d, e), as one product for each group."""
    if len(M) == 1:
        return x @ M[0]
    first = x.movedim(-3, 0)
    out = first.reshape(len(M), -1, x.shape[-1]) @ M
    return out.view(*first.shape[:-1], M.shape[2]).movedim(0, -3)


@dataclass(frozen=True)
class Pair:
    """The two Kronecker factors of a layer.

    Attributes:
        weight: Range of the weight, or None.
        bias: Range of the bias, or None.
        swapped: The weight is laid out as (groups, dx, dg).
        inputs: The factor of the inputs, a mean.
        gradients: The factor of the output gradients, a sum.
    """

    weight: Range | None
    bias: Range | None
    swapped: bool
    inputs: Side
    gradients: Side

    @property
    def A(self) -> Tensor:
        """The factor of the inputs, (groups, dx, dx), or its sketch."""
        return self.inputs.sums[0]

    @property
    def G(self) -> Tensor:
        """The factor of the output gradients, (groups, dg, dg), or its sketch."""
        return self.gradients.sums[0]


@final
class Kronecker:
    """Accumulates the factors over chunks; see `linnet.Jacobian.kronecker`.

    Args:
        sample: The factors of a few examples, which say what there is; none of it is counted.
        layout: Of the parameters, for names in errors.
        p: Parameters.
        dtype: Of the curvature that comes out.
        device: Where.
        rows: Rows of J that will be added: examples times outputs; None where that is not known.
        memory: Bytes that the factors may take, or "auto".
        rows_dtype: Dtype of the rows that will be added.

    Attributes:
        pairs: Range of the weight (of the bias where there is none) to its Kronecker factors.
        exact: Range to its block (q, q).
        squares: (p,), the diagonal of the curvature in all other columns.
    """

    def __init__(
        self,
        sample: Sequence[ColumnBlock],
        *,
        layout: Layout,
        p: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: int | None = None,
        memory: float | str = "auto",
        rows_dtype: torch.dtype = torch.float64,
    ) -> None:
        self.layout, self.n, self.ranks = layout, 0, ALONE
        self.pairs: dict[Range, Pair] = {}
        # Sums over all data are in float64, as everywhere.
        like = torch.zeros((), dtype=torch.float64, device=device)
        self.squares, self.dtype = like.new_zeros(p), dtype
        outer = [block for block in sample if isinstance(block, OuterProductBlock)]
        shapes = [_side_shapes(block, math.inf if rows is None else rows) for block in outer]
        longest = _longest_decomposed([shape for both in shapes for shape in both], memory, device)
        sketches: dict[tuple[int, int], Tensor] = {}

        def empty(groups: int, d: int, k: int) -> Side:
            if d <= longest:
                return DenseSide(groups, d, device)
            if (d, k) not in sketches:
                random = torch.randn(d, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                sketches[d, k] = torch.linalg.qr(random)[0].to(device)
            return SketchedSide(groups, sketches[d, k], torch.finfo(rows_dtype).eps)

        for block, (inputs, gradients) in zip(outer, shapes, strict=True):
            pair = Pair(block.weight, block.bias, block.swapped, empty(*inputs), empty(*gradients))
            self.pairs[block.ranges[0]] = pair
        small = [
            (a, b)
            for block in sample
            if not isinstance(block, OuterProductBlock | EmbeddingBlock)
            for a, b in block.ranges
            if b - a <= EXACT
        ]
        self.exact = {(a, b): like.new_zeros(b - a, b - a) for a, b in small}

    @property
    def sums(self) -> dict[str, Tensor]:
        """All sums over the examples, by name."""
        found = {"squares": self.squares} | {f"exact {r}": block for r, block in self.exact.items()}
        for r, pair in self.pairs.items():
            for name, side in (("inputs", pair.inputs), ("gradients", pair.gradients)):
                found |= {f"{name} {r} {i}": total for i, total in enumerate(side.sums)}
        return found

    def add(self, blocks: Sequence[ColumnBlock], root: Tensor | None, n: int, *, inputs: bool = True) -> None:
        """Take in a chunk.

        Args:
            blocks: Columns of the chunk.
            root: L, None for the identity, (n, c) where it is diagonal, or (n, c, m).
            n: Examples that are counted.
            inputs: Whether the inputs are counted: once, where a chunk comes in several parts with the same inputs.
        """
        for block in blocks:
            if isinstance(block, OuterProductBlock) and block.ranges[0] in self.pairs:
                self._add_pair(self.pairs[block.ranges[0]], block, root, inputs=inputs)
            elif isinstance(block, OuterProductBlock | DenseBlock):
                self._add_rows(block.expand(), root)
            else:
                self._add_squares(block, root)
        self.n += n

    def _add_pair(self, pair: Pair, block: OuterProductBlock, root: Tensor | None, *, inputs: bool) -> None:
        if block.weight is not None and inputs:
            # (groups, n T, dx)
            pair.inputs.add(block.x.transpose(0, 1).flatten(1, 2), 1 / block.x.shape[2])
        h = _through(root, block.g)
        pair.gradients.add(h.permute(2, 0, 1, 3, 4).flatten(1, 3))  # (groups, n m T, dg)

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

    def over_ranks(self, ranks: Ranks) -> None:
        """Put the sums of all ranks together, and make the input's side a mean."""
        count = self.squares.new_tensor([self.n])
        ranks.add_up(count, *self.sums.values())
        self.n, self.ranks = int(count), ranks
        for pair in self.pairs.values():
            pair.inputs.scale(1 / self.n)

    @property
    def traces(self) -> dict[Range, Tensor]:
        """The traces (groups,) of the input's side of each weight, if the side is no sketch; see `Decomposed`."""
        weights = [(pair.weight, pair.inputs) for pair in self.pairs.values()]
        return {r: side.trace for r, side in weights if r is not None and isinstance(side, DenseSide)}

    def join(self, earlier: Decomposed, sign: int) -> None:
        """Turn the sums of some examples into those of an earlier decomposition with them, or without them.

        Args:
            earlier: What was decomposed, of the same layers in the same form (`Decomposed.matches`).
            sign: One puts these examples and the earlier ones together; minus one takes these from the earlier ones,
                which must have been among them.
        """
        n = earlier.n + sign * self.n
        known: dict[int, Tensor] = {}  # layers that read the same input keep equal factors
        for pair in self.pairs.values():
            A, G = earlier.sides(pair, known)
            pair.gradients.scale(sign)
            pair.gradients.sums[0].add_(G)
            if A is not None:
                pair.inputs.scale(sign * self.n / n)
                pair.inputs.sums[0].add_(A, alpha=earlier.n / n)
        squares = earlier.values.double().clone()
        for r, turn in earlier.rotation.turns.items():
            if r in self.exact:
                self.exact[r].mul_(sign).add_(_matrix(turn.Qg, earlier.along(r)[None])[0])
            squares[slice(*r)] = 0
        self.squares.mul_(sign).add_(squares).clamp_(min=0)
        self.n = n

    def decomposed(self) -> tuple[Rotation, Tensor]:
        """The coordinates in which the blocks are diagonal, and the curvature along them, (p,)."""
        distinct: dict[tuple[int, float], list[Side]] = {}
        spectra: dict[int, SideSpectrum] = {}
        owners: dict[int, Range] = {}

        def first_alike(side: Side, what: str, r: Range) -> Side:
            """The first of the sides that are the same sum."""
            size = float(side.sums[-1].sum())
            if not math.isfinite(size):
                raise ArithmeticError(f"The curvature of {_name(self.layout, r)} ({what}) is not finite.")
            found = distinct.setdefault((side.d, size), [])
            owners.setdefault(id(side), r)
            for other in found:
                if side.equals(other):
                    return other
            found.append(side)
            return side

        pairs = [
            (
                pair,
                first_alike(pair.gradients, "output gradients", _ranges(pair)[0]),
                None if pair.weight is None else first_alike(pair.inputs, "inputs", pair.weight),
            )
            for pair in self.pairs.values()
        ]
        for r, block in self.exact.items():
            if not bool(torch.isfinite(block).all()):
                raise ArithmeticError(f"The curvature of {_name(self.layout, r)} (an exact block) is not finite.")
        sides = [side for alike in distinct.values() for side in alike]
        whole = [side for side in sides if isinstance(side, DenseSide)]
        found = _eigh([*(side.total for side in whole), *(block[None] for block in self.exact.values())], self.ranks)
        for side in sides:
            if isinstance(side, SketchedSide):
                spectrum = side.decompose()
                spectra[id(side)] = replace(spectrum, basis=spectrum.basis.to(self.dtype))
        for side, (v, Q) in zip(whole, found, strict=False):
            spectra[id(side)] = SideSpectrum(v, Basis(Q.to(self.dtype)))
        turns: dict[Range, Turn] = {}
        values = self.squares.clone()
        for pair, gradients, inputs in pairs:
            g = spectra[id(gradients)]
            if pair.weight is not None:
                a = spectra[id(inputs)]
                product = g.values[..., :, None] * a.values[..., None, :]  # (groups, dg, dx)
                values[slice(*pair.weight)] = (product.mT if pair.swapped else product).flatten()
                turns[pair.weight] = Turn(g.basis, a.basis, pair.swapped)
            if pair.bias is not None:
                values[slice(*pair.bias)] = g.values.flatten()
                turns[pair.bias] = Turn(g.basis)
        for r, (v, Q) in zip(self.exact, found[len(whole) :], strict=True):
            values[slice(*r)], turns[r] = v[0], Turn(Basis(Q.to(self.dtype)))
        rest = {owners[key]: spectrum.rest for key, spectrum in spectra.items() if spectrum.rest}
        if rest:
            self._warn_of(rest)
        return Rotation(turns, self.layout), values.to(self.dtype)

    def _warn_of(self, rest: Mapping[Range, float]) -> None:
        """Say which factors are known in their leading directions only."""
        names = [name for name, s in self.layout.slices.items() if any(s.start < b and a < s.stop for a, b in rest)]
        warnings.warn(
            f"The Kronecker factors of {messages.listing(names)} are too long to be decomposed whole. Their {LEADING} "
            "leading directions have a curvature each. All other directions, which hold up to "
            f"{100 * max(rest.values()):.2g} % of the trace, have one curvature. structure='diag', 'lowrank' or "
            "'samples' have no such factors.",
            stacklevel=2,
        )


Shape = tuple[int, int, int]
"""Of a side: its groups, its length, and the columns of its sketch."""


def _side_shapes(block: OuterProductBlock, rows: float) -> tuple[Shape, Shape]:
    """The shapes of the sides of inputs and of output gradients, for so many rows of J.

    A sketch of few rows has a column for each row, and some more, so that the sketch is exact.
    """
    groups, T, dx = block.x.shape[1:]

    def shape(d: int) -> Shape:
        enough = T * rows + 16
        return groups, d, int(min(d, enough if enough <= d // 4 else LEADING))

    return shape(dx if block.weight is not None else 0), shape(block.g.shape[-1])


def _longest_decomposed(lengths: Sequence[Shape], memory: float | str, device: torch.device) -> int:
    """The longest side that is decomposed whole; longer sides are sketched.

    Args:
        lengths: The shapes of all sides.
        memory: Bytes that all sides may take, or "auto".
        device: Device of the sides.
    """
    limit = find_dense_budget(memory, device)
    # A sum and its directions, in float64.
    taken = sum(16 * groups * d * k for groups, d, k in lengths)
    cubes = longest = 0
    for d in sorted({d for _, d, _ in lengths}):
        alike = [(groups, k) for groups, length, k in lengths if length == d]
        cubes += sum(groups for groups, _ in alike) * d**3
        taken += sum(16 * groups * d * (d - k) for groups, k in alike)
        if cubes > CUBES.get(device.type, CUBES["cpu"]) or taken > limit:
            break
        longest = d
    if longest == 0 or any(d > longest for _, d, _ in lengths):
        check_fits(
            sum(16 * groups * d * (d if d <= longest else k) for groups, d, k in lengths),
            memory,
            device,
            what="A posterior with Kronecker factors of all layers",
            instead="Use structure='diag', or fewer parameters (params=)",
        )
    return longest


@dataclass(frozen=True)
class Turn:
    """How the columns of one parameter turn.

    Attributes:
        Qg: Directions of the output gradients.
        Qx: Directions of the inputs, or None where the parameter is a vector of length groups * dg.
        swapped: The parameter is laid out as (groups, dx, dg).
    """

    Qg: Basis
    Qx: Basis | None = None
    swapped: bool = False

    def rows(self, part: Tensor) -> Tensor:
        """The turned columns of rows (n, c, q)."""
        return self._map(part, Basis.turn)

    def rows_back(self, part: Tensor) -> Tensor:
        """The rows (n, c, q) of which `rows` gives these."""
        return self._map(part, Basis.turn_back)

    def _map(self, part: Tensor, turn: Callable[[Basis, Tensor], Tensor]) -> Tensor:
        groups, dg = self.Qg.groups, self.Qg.d
        if self.Qx is None:
            return turn(self.Qg, part.unflatten(-1, (groups, 1, dg))).flatten(2)
        first, last = (self.Qx, self.Qg) if self.swapped else (self.Qg, self.Qx)
        M = turn(last, part.unflatten(-1, (groups, first.d, last.d)))
        return turn(first, M.mT).mT.flatten(2)


@final
class Rotation:
    """An orthonormal change of the parameters' coordinates, ``J Q``, parameter by parameter.

    Args:
        turns: Range of columns to how it turns; other columns stay.
        layout: Of the parameters, for names in errors.
    """

    def __init__(self, turns: Mapping[Range, Turn], layout: Layout) -> None:
        self.turns, self.layout = dict(turns), layout
        self._ordered = sorted(self.turns)

    def fingerprint(self) -> str:
        """Tells these coordinates from others, to the bit."""
        bases = {f"{r} {i}": Q for r, turn in self.turns.items() for i, Q in enumerate((turn.Qg, turn.Qx)) if Q}
        tensors = {f"{name} {i}": t for name, Q in bases.items() for i, t in enumerate((Q.V, Q.T)) if t is not None}
        return files.fingerprint(tensors)

    def __call__(self, block: ColumnBlock, *, whole: bool = False) -> ColumnBlock:
        """The same columns in the new coordinates.

        Args:
            block: Columns of the parameters.
            whole: Whether rows are wanted in the end, so that they may be made before they turn.
        """
        rows = whole and self._rows_win(block)
        if isinstance(block, LazyBlock) and not rows:
            block = block.as_outer_product()
        if isinstance(block, OuterProductBlock) and not rows:
            turn = self._of(block)
            if turn is not None:
                x = block.x if turn.Qx is None else turn.Qx.turn(block.x)
                return OuterProductBlock(
                    x, turn.Qg.turn(block.g), weight=block.weight, bias=block.bias, swapped=block.swapped
                )
        if not any(True for r in block.ranges for _ in self._within(r)):
            return block
        dense = block.expand()
        return DenseBlock(
            dense.ranges, [self._turned(r, part) for r, part in zip(dense.ranges, dense.parts, strict=True)]
        )

    def _rows_win(self, block: ColumnBlock) -> bool:
        """Whether rows are cheaper to turn than the two sides of an outer product, which has T uses."""
        turn, size = self.turns.get(block.ranges[0]), block.size
        if turn is None or turn.Qx is None or size.T == 1 or not size.dx:
            return False
        sides = size.T * (size.dx * turn.Qx.cost + block.c * size.dg * turn.Qg.cost)
        return block.c * size.dx * size.dg * (turn.Qx.cost + turn.Qg.cost) < sides

    def _of(self, block: OuterProductBlock) -> Turn | None:
        """The turn of an outer product, where it is one for both its parameters."""
        turns = [self.turns.get(r) for r in block.ranges]
        if any(turn is None for turn in turns) or (block.weight is not None and turns[0].Qx is None):  # type: ignore[union-attr]
            return None
        return turns[0]

    def _within(self, r: Range) -> Iterator[tuple[Range, Turn]]:
        first = bisect_right(self._ordered, r[0], key=lambda key: key[1])
        for key in self._ordered[first:]:
            if key[0] >= r[1]:
                return
            if key[0] < r[0] or r[1] < key[1]:
                raise other_form(self.layout, r)
            yield key, self.turns[key]

    def _turned(self, r: Range, part: Tensor) -> Tensor:
        out = part
        for (a, b), turn in self._within(r):
            out = part.clone() if out is part else out
            out[..., a - r[0] : b - r[0]] = turn.rows(part[..., a - r[0] : b - r[0]])
        return out

    def rows(self, R: Tensor) -> Tensor:
        """``R Q`` for rows (m, p), differentiable in them."""
        parts, end = [], 0
        for a, b in self._ordered:
            turn = self.turns[a, b]
            parts += [R[:, end:a], turn.rows(R[None, :, a:b])[0]]
            end = b
        return torch.cat([*parts, R[:, end:]], 1)

    def back(self, V: Tensor) -> Tensor:
        """``Q V``: from the new coordinates (p, k) to the parameters."""
        out = V.clone()
        for (a, b), turn in self.turns.items():
            # Rows turn by Q from the right, so that columns turn back by its transpose from the right.
            out[a:b] = turn.rows_back(V[a:b].T[None])[0].T
        return out

    def tensors(self) -> dict[str, Tensor]:
        """All of it as named tensors; `from_tensors` is the inverse."""
        out = {}
        for (a, b), turn in self.turns.items():
            key = f"{a}-{b}{'-swapped' if turn.swapped else ''}"
            for side, basis in (("g", turn.Qg), ("x", turn.Qx)):
                if basis is not None:
                    out[f"{key}.{side}"] = basis.V
                    if basis.T is not None:
                        out[f"{key}.{side}t"] = basis.T
        return out

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Rotation:
        """From what `tensors` gave."""

        def basis(key: str, side: str) -> Basis | None:
            V = tensors.get(f"{key}.{side}")
            return None if V is None else Basis(V, tensors.get(f"{key}.{side}t"))

        turns = {}
        for name in tensors:
            key, _, side = name.rpartition(".")
            Qg = basis(key, "g")
            if side == "g" and Qg is not None:
                a, b, *swapped = key.split("-")
                turns[int(a), int(b)] = Turn(Qg, basis(key, "x"), bool(swapped))
        return cls(turns, layout)


@dataclass(frozen=True)
class Decomposed:
    r"""Kronecker factors as their eigenvalues and directions, from which the sums come back.

    The curvature along a pair of directions is :math:`g_i a_j`. The sum over i and the trace of the input's side give
    the :math:`g_i`, and then the sum over j gives the :math:`a_j`.

    Attributes:
        rotation: The directions.
        values: The curvature along them, (p,).
        traces: The traces (groups,) of the input's side of each weight.
        n: The number of examples.
    """

    rotation: Rotation
    values: Tensor
    traces: Mapping[Range, Tensor]
    n: int

    @property
    def complete(self) -> bool:
        """Whether the sums come back: no side is a sketch, and each weight has a curvature."""
        turns = self.rotation.turns
        bases = [Q for turn in turns.values() for Q in (turn.Qg, turn.Qx) if Q is not None]
        weights = {r: turn.Qg.groups for r, turn in turns.items() if turn.Qx is not None}
        there = all(bool((self.along(r).view(groups, -1).sum(1) > 0).all()) for r, groups in weights.items())
        return there and all(Q.T is None for Q in bases) and set(weights) == set(self.traces)

    def matches(self, other: Kronecker) -> bool:
        """Whether factors of other examples are of the same layers in the same form."""
        weights = {pair.weight for pair in other.pairs.values() if pair.weight is not None}
        vectors = {pair.bias for pair in other.pairs.values() if pair.bias is not None} | set(other.exact)
        sides = [side for pair in other.pairs.values() for side in (pair.inputs, pair.gradients) if side.d]
        return (
            self.complete
            and all(isinstance(side, DenseSide) for side in sides)
            and weights == set(self.traces)
            and vectors == set(self.rotation.turns) - weights
        )

    def along(self, r: Range) -> Tensor:
        """The curvature of a range of columns, in float64."""
        return self.values[slice(*r)].double()

    def sides(self, pair: Pair, known: dict[int, Tensor]) -> tuple[Tensor | None, Tensor]:
        """The factors of a pair: of the inputs, (groups, dx, dx), None where it has no weight, and of the gradients.

        Args:
            pair: Says which layer, and its layout.
            known: Factors of the inputs that were made before, by their directions.
        """
        turns = self.rotation.turns
        g = None
        if pair.bias is not None:
            Qg = turns[pair.bias].Qg
            g = self.along(pair.bias).view(Qg.groups, Qg.d)
        if pair.weight is None:
            assert g is not None
            return None, _matrix(Qg, g)
        turn = turns[pair.weight]
        Qg, Qx = turn.Qg, turn.Qx
        assert Qx is not None
        shape = (Qx.d, Qg.d) if turn.swapped else (Qg.d, Qx.d)
        product = self.along(pair.weight).view(Qg.groups, *shape)
        product = product.mT if turn.swapped else product
        if g is None:
            g = product.sum(2) / self.traces[pair.weight].double()[:, None]
        if id(Qx) not in known:
            known[id(Qx)] = _matrix(Qx, product.sum(1) / g.sum(1, keepdim=True))
        return known[id(Qx)], _matrix(Qg, g)


def _matrix(Q: Basis, values: Tensor) -> Tensor:
    """``Q diag(values) Q^T`` of each group, (groups, d, d), in float64."""
    V = Q.V.double()
    return (V * values[:, None, :]) @ V.mT


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


def _eigh(matrices: Sequence[Tensor], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues, those that rounding has left below zero being zero, and vectors, of each (groups, d, d).

    Each rank decomposes some of the matrices. Matrices of one size go together: a GPU takes longer to start a small
    decomposition than to make it.
    """
    owners = share_out([len(matrix) * matrix.shape[-1] ** 3 for matrix in matrices], ranks.world)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    by_size: dict[int, list[int]] = {}
    for i, matrix in enumerate(matrices):
        if owners[i] == ranks.rank:
            by_size.setdefault(matrix.shape[-1], []).append(i)
    for d, places in by_size.items():
        step = max(1, TEMPORARY // max(1, d * d))
        for start in range(0, len(places), step):
            some = places[start : start + step]
            values, Q = torch.linalg.eigh(torch.cat([matrices[i] for i in some]))
            counts = [len(matrices[i]) for i in some]
            found.update(zip(some, zip(values.clamp_min(0).split(counts), Q.split(counts), strict=True), strict=True))
    for i, t in enumerate(matrices):
        if owners[i] != ranks.rank:
            found[i] = t.new_empty(t.shape[:2]), torch.empty_like(t)
    ranks.share_results([t for i in range(len(owners)) for t in found[i]], [rank for rank in owners for _ in range(2)])
    return [found[i] for i in range(len(matrices))]


def _name(layout: Layout, r: Range) -> str:
    found = [name for name, s in layout.slices.items() if s.start < r[1] and r[0] < s.stop]
    return messages.listing(found)
