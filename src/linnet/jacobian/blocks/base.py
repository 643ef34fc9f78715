r"""Blocks of the Jacobian of one chunk of examples, in the form in which a layer gives them.

A chunk has n examples and c outputs; a `ColumnBlock` holds the columns of its Jacobian that belong to one or two
contiguous ranges of the flat parameter vector (a weight and its bias). `DenseBlock` holds them as they are;
`linnet.jacobian.blocks.outer_product.OuterProductBlock` and
`linnet.jacobian.blocks.embedding_table.EmbeddingBlock` hold the two small sides of the outer product they are,

.. math:: G_{iu} = \sum_t g_{iut} \, x_{it}^\top ,

so that products (*bilinear*) and Gram matrices (*ghost*) never form the rows. Every block can be expanded into
`DenseBlock`, which is what the tests compare it with.

Letters: ``n`` examples, ``c`` outputs, ``T`` uses of the weight per example (tokens, pixels), ``k`` columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

Range = tuple[int, int]
"""Start and stop in the flat parameter vector."""


class Disproved(Exception):
    """A way to the Jacobian gave other numbers than reverse mode, or failed; the pass must be made without it.

    Args:
        ability: "forward_mode", "vectorize" or "stream".
    """

    def __init__(self, ability: str) -> None:
        super().__init__(ability)
        self.ability = ability


@dataclass(frozen=True)
class Size:
    """What a block costs, in numbers: see `linnet.jacobian.plan`.

    Attributes:
        q: Columns, i.e. parameters.
        T: Uses of the weight per example.
        dx: Length of the side that does not depend on the output; 0 where there is no outer product.
        dg: Length of the side that does.
        groups: Independent outer products.
    """

    q: int
    T: int = 1
    dx: int = 0
    dg: int = 0
    groups: int = 1


@dataclass(frozen=True)
class Recipe:
    """How a block is made from its tensors; it holds none itself, so that it can outlive them.

    Recipes that are equal make alike blocks, whose tensors can be joined along the examples.

    Attributes:
        make: Called with the tensors and the settings.
        settings: What the block is beside its tensors.
        last: Of each tensor the axis that its copy has last, where products want it so; None leaves all as they are.
    """

    make: Callable[..., ColumnBlock]
    settings: tuple[Any, ...]
    last: tuple[int, ...] | None = None

    def laid_out(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors as they are to be copied."""
        if self.last is None:
            return tuple(tensors)
        return tuple(t.movedim(axis, -1) for t, axis in zip(tensors, self.last, strict=True))

    def __call__(self, copies: Sequence[Tensor]) -> ColumnBlock:
        if self.last is not None:
            copies = [t.movedim(-1, axis) for t, axis in zip(copies, self.last, strict=True)]
        return self.make(copies, *self.settings)


class Scale:
    """A diagonal between two Jacobians; None stands for ones.

    Args:
        vector: (p,) or None.
    """

    def __init__(self, vector: Tensor | None = None) -> None:
        self.vector = vector
        self._known: dict[Range, float | None] = {}

    def constant(self, r: Range | None) -> float | None:
        """The value over a range if there is only one, else None; 0 over no range at all."""
        if r is None or self.vector is None:
            return 0.0 if r is None else 1.0
        if r not in self._known:
            low, high = self.vector[slice(*r)].aminmax()
            self._known[r] = float(low) if bool(low == high) else None
        return self._known[r]


class ColumnBlock(ABC):
    """Columns ``ranges`` of the Jacobian of n examples and c outputs.

    Args:
        ranges: Where the columns lie in the flat parameter vector.
        n: Examples.
        c: Outputs.
    """

    def __init__(self, ranges: Sequence[Range], *, n: int, c: int) -> None:
        self.ranges = tuple(ranges)
        self.n, self.c = n, c

    @property
    def q(self) -> int:
        """The number of columns."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def size(self) -> Size:
        """What the planner needs to know."""
        return Size(self.q)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def with_outputs(self, c: int) -> ColumnBlock:
        """The block as if it had c outputs, for counts of cost alone: the tensors stay as they are."""
        if self.c == c:
            return self
        other = copy(self)
        other.c = c
        return other

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors held."""

    @property
    def recipe(self) -> Recipe | None:
        """Makes a block like this one from other `tensors`, whose first axis are the examples; None: expand it."""
        return None

    def copy(self) -> ColumnBlock:
        """The same columns with memory of their own."""
        if self.recipe is None:
            return self.expand().copy()
        return self.recipe([t.clone() for t in self.recipe.laid_out(self.tensors())])

    @abstractmethod
    def expand(self) -> DenseBlock:
        """The same columns as explicit rows."""

    def in_dtype(self, dtype: torch.dtype) -> ColumnBlock:
        """The same columns for products in another dtype: its numbers are converted when they are there."""
        same = all(t.dtype == dtype for t in self.tensors() if t.is_floating_point())
        return self if same else self._converted(dtype)

    def _converted(self, dtype: torch.dtype) -> ColumnBlock:
        return self.expand().in_dtype(dtype)

    def widen(self) -> ColumnBlock:
        """The same with what is held in float32 at least, as all products but `expand` need."""
        return self

    def rounded(self) -> ColumnBlock:
        """The same in the nearest numbers of tf32, where Gram matrices are made of them; see `as_tf32`."""
        return self

    def matmul(self, V: Tensor) -> Tensor:
        """``J V`` restricted to these columns: V (p, k) to (n, c, k)."""
        return self.expand().matmul(V)

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        """Adds ``J V`` into ``out`` (n, c, k)."""
        out += self.matmul(V)

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        """Adds ``J^T U`` into these columns of ``out`` (p, k), for U (n, c, k)."""
        self.expand().rmatmul(U, out)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        """Writes ``J^T U`` into these columns of ``out`` (p, k), whatever was there."""
        for start, stop in self.ranges:
            out[start:stop].zero_()
        self.rmatmul(U, out)

    def gram(self, other: ColumnBlock, scale: Scale, out: Tensor) -> None:
        """Adds ``J diag(scale) J'^T`` over these columns into ``out`` (n c, m c')."""
        self.expand().gram(other.expand(), scale, out)

    def diag(self, scale: Scale) -> Tensor:
        """Squared row norms over these columns, (n, c)."""
        return self.expand().diag(scale)

    def gram_blocks(self, scale: Scale) -> Tensor:
        """``J_i diag(scale) J_i^T`` over these columns for each example i, (n, c, c)."""
        return self.expand().gram_blocks(scale)

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        """Adds the diagonal of ``J^T W J`` into these columns of ``out`` (p,); weight (n, c) or (n, c, c)."""
        self.expand().squares(weight, out)


@final
class DenseBlock(ColumnBlock):
    """Columns held as explicit per-example gradients.

    Args:
        ranges: Where the columns lie.
        parts: One (n, c, q) tensor per range.
    """

    def __init__(self, ranges: Sequence[Range], parts: Sequence[Tensor]) -> None:
        super().__init__(ranges, n=parts[0].shape[0], c=parts[0].shape[1])
        self.parts = tuple(parts)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.parts

    @property
    def recipe(self) -> Recipe:
        return Recipe(_dense_again, (self.ranges,))

    def expand(self) -> DenseBlock:
        return self

    def _converted(self, dtype: torch.dtype) -> DenseBlock:
        return DenseBlock(self.ranges, [part.to(dtype) for part in self.parts])

    def rounded(self) -> DenseBlock:
        return DenseBlock(self.ranges, [as_tf32(part) for part in self.parts])

    def matmul(self, V: Tensor) -> Tensor:
        out = V.new_zeros(self.n, self.c, V.shape[1])
        self.add_matmul(V, out)
        return out

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        flat = out.view(self.n * self.c, -1)
        for (start, stop), part in zip(self.ranges, self.parts, strict=True):
            rows, cut = part.reshape(self.n * self.c, -1), 8
            if rows.is_cpu and rows.shape[1] >= 8192 and rows.shape[1] % cut == 0:
                # A product of few rows and very many columns keeps only one core busy unless it is cut.
                pieces = rows.unflatten(1, (cut, -1)).transpose(0, 1)
                flat += torch.bmm(pieces, V[start:stop].unflatten(0, (cut, -1))).sum(0)
            else:
                flat.addmm_(rows, V[start:stop])

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, beta=1)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        self._rmatmul(U, out, beta=0)

    def _rmatmul(self, U: Tensor, out: Tensor, *, beta: int) -> None:
        flat = U.reshape(self.n * self.c, -1)
        few = flat.is_cpu and 1 < flat.shape[1] < 8
        for (start, stop), part in zip(self.ranges, self.parts, strict=True):
            rows = part.reshape(self.n * self.c, -1)
            if few:  # a CPU reads the rows a third as fast where they stand on the left of few columns
                product = (flat.T @ rows).T
                out[start:stop].add_(product) if beta else out[start:stop].copy_(product)
            else:
                out[start:stop].addmm_(rows.T, flat, beta=beta)

    def gram(self, other: ColumnBlock, scale: Scale, out: Tensor) -> None:
        right = other.expand()
        for r, a, b in zip(self.ranges, self.parts, right.parts, strict=True):
            flat, constant = a.reshape(self.n * self.c, -1), scale.constant(r)
            if constant is None:
                assert scale.vector is not None
                flat = flat * scale.vector[slice(*r)]
            out.addmm_(flat, b.reshape(right.n * right.c, -1).T, alpha=1.0 if constant is None else constant)

    def diag(self, scale: Scale) -> Tensor:
        out = self.parts[0].new_zeros(self.n, self.c)
        for r, part in zip(self.ranges, self.parts, strict=True):
            squared = part.square()
            out += squared.sum(-1) if scale.vector is None else squared @ scale.vector[slice(*r)]
        return out

    def gram_blocks(self, scale: Scale) -> Tensor:
        out = self.parts[0].new_zeros(self.n, self.c, self.c)
        for r, part in zip(self.ranges, self.parts, strict=True):
            out.baddbmm_(part if scale.vector is None else part * scale.vector[slice(*r)], part.mT)
        return out

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        for (start, stop), part in zip(self.ranges, self.parts, strict=True):
            if weight is None:
                weighted = part
            elif weight.ndim == 2:
                weighted = weight[..., None] * part
            else:
                weighted = weight @ part
            out[start:stop] += (weighted * part).sum((0, 1))


def as_tf32(t: Tensor) -> Tensor:
    """The nearest numbers with the ten bits after the leading one that tensor cores read of float32.

    They cut the others off: every product would come out smaller, by a part in thousands.

    >>> x = torch.tensor([1.0, 1 + 2**-11 + 2**-13, -3.3])
    >>> as_tf32(x).tolist()
    [1.0, 1.0009765625, -3.30078125]
    """
    if t.dtype != torch.float32:
        raise TypeError(f"tf32 is a form of float32; got {t.dtype}.")
    bits = t.contiguous().view(torch.int32).add(0x1000)  # half of the last bit that stays
    return bits.bitwise_and_(-0x2000).view(torch.float32)


def _dense_again(tensors: Sequence[Tensor], ranges: Sequence[Range]) -> ColumnBlock:
    return DenseBlock(ranges, tensors)


# Work over examples, cut so that intermediates stay small.

TEMPORARY = 1 << 26
"""Entries that an intermediate may have before a product is cut into pieces."""

_entries: ContextVar[int | None] = ContextVar("entries", default=None)


def temporary() -> int:
    """Entries that an intermediate may have here: `TEMPORARY`, or fewer inside `limit_temporaries`."""
    given = _entries.get()
    return TEMPORARY if given is None else max(1, min(TEMPORARY, given))


@contextmanager
def limit_temporaries(entries: int | None) -> Iterator[None]:
    """Intermediates have at most so many entries inside the block; None leaves the limit as it is.

    >>> with limit_temporaries(100):
    ...     [fits(100), fits(101)]
    [True, False]
    """
    token = _entries.set(_entries.get() if entries is None else entries)
    try:
        yield
    finally:
        _entries.reset(token)


Inner = Callable[[slice, slice, int], Tensor]
"""Inner products (n', T, m', T') of the sides that outputs share, for slices of examples and a group."""


def fits(entries: int) -> bool:
    """Whether an intermediate of so many entries need not be cut.

    >>> fits(10), fits(1 << 30)
    (True, False)
    """
    return entries <= temporary()


def pieces(n: int, each: int) -> Iterator[slice]:
    """Slices of n examples with at most `temporary` entries each, for ``each`` entries per example."""
    step = max(1, min(n, temporary() // max(1, each)))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def tiles(n: int, m: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of an n by m grid with ``each`` entries per cell and about `temporary` entries per tile."""
    side = max(1, int((temporary() / max(1, each)) ** 0.5))
    step = max(side, temporary() // max(1, each * min(m, side)))
    for a in range(0, n, step):
        for b in range(0, m, side):
            yield slice(a, min(a + step, n)), slice(b, min(b + side, m))


def add_products(out: Tensor, g: Tensor, h: Tensor) -> None:
    """Adds each example's ``g h`` into ``out``: g (n, c, m) and h (n, m, k) into (n, c, k).

    >>> out = torch.ones(2, 3, 1)
    >>> add_products(out, torch.ones(2, 3, 4), torch.ones(2, 4, 1))
    >>> out.flatten().tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    if g.shape[1] == 1 and h.shape[2] == 1 and not g.is_cpu:
        out += (g * h.mT).sum(2, keepdim=True)  # a GPU's product of a row and a column reads at a fifth of the speed
    elif g.is_cpu and h.shape[2] == 1:
        # Read as a matrix right of one row, g comes at the speed of the CPU's memory; left of one column it does not.
        out += torch.bmm(h.mT, g.mT).mT
    else:
        out.baddbmm_(g, h)


def ghost(g: Tensor, h: Tensor, inner: Inner, out: Tensor) -> None:
    r"""Adds ``sum_{groups,t,s} inner[i,t,j,s] (g_iut . h_jvs)`` into out (n c, m c'), tile by tile.

    Args:
        g: (n, c, groups, T, d).
        h: (m, c', groups, T', d).
        inner: Gives the (n', T, m', T') inner products of the other sides, for slices of examples and a group.
        out: (n c, m c').
    """
    n, c, groups, T, d = g.shape
    m, e, _, S, _ = h.shape
    for a, b in tiles(n, m, c * T * e * S):
        K = out[a.start * c : a.stop * c, b.start * e : b.stop * e]
        for j in range(groups):
            left, right = g[a, :, j].reshape(-1, d), h[b, :, j].reshape(-1, d)
            G, A = left @ right.T, inner(a, b, j)
            if c == T == e == S == 1:
                K.addcmul_(G, A[:, 0, :, 0])
            else:
                G = G.view(-1, c, T, b.stop - b.start, e, S).mul_(A[:, None, :, :, None, :])
                K += G.sum((2, 5)).view(K.shape)
