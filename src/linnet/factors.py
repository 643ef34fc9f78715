r"""Blocks of the Jacobian of one chunk of examples, in the form in which a layer gives them.

A chunk has n examples and c outputs; a `Factor` holds the columns of its Jacobian that belong to one or two
contiguous ranges of the flat parameter vector (a weight and its bias). `Rows` holds them as they are;
`Outer` and `Tokens` hold the two small sides of the outer product they are,

.. math:: G_{iu} = \sum_t g_{iut} \, x_{it}^\top ,

so that products (*bilinear*) and Gram matrices (*ghost*) never form the rows. Every factor can be expanded into
`Rows`, which is what the tests compare it with.

Letters: ``n`` examples, ``c`` outputs, ``T`` uses of the weight per example (tokens, pixels), ``k`` columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

Range = tuple[int, int]
"""Start and stop in the flat parameter vector."""

TEMPORARY = 1 << 26
"""Entries that an intermediate may have before a product is cut into pieces."""


@dataclass(frozen=True)
class Size:
    """What a factor costs, in numbers: see `linnet.plan`.

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
    """How a factor is made from its tensors; it holds none itself, so that it can outlive them.

    Recipes that are equal make alike factors, whose tensors can be joined along the examples.

    Attributes:
        make: Called with the tensors and the settings.
        settings: What the factor is beside its tensors.
    """

    make: Callable[..., Factor]
    settings: tuple[Any, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Factor:
        return self.make(tensors, *self.settings)


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


class Factor(ABC):
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

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors held."""

    @property
    def recipe(self) -> Recipe | None:
        """Makes a factor like this one from other `tensors`, whose first axis are the examples; None: expand it."""
        return None

    @abstractmethod
    def expand(self) -> Rows:
        """The same columns as explicit rows."""

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

    def gram(self, other: Factor, scale: Scale, out: Tensor) -> None:
        """Adds ``J diag(scale) J'^T`` over these columns into ``out`` (n c, m c')."""
        self.expand().gram(other.expand(), scale, out)

    def diag(self, scale: Scale) -> Tensor:
        """Squared row norms over these columns, (n, c)."""
        return self.expand().diag(scale)

    def blocks(self, scale: Scale) -> Tensor:
        """``J_i diag(scale) J_i^T`` over these columns for each example i, (n, c, c)."""
        return self.expand().blocks(scale)

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        """Adds the diagonal of ``J^T W J`` into these columns of ``out`` (p,); weight (n, c) or (n, c, c)."""
        self.expand().squares(weight, out)


@final
class Rows(Factor):
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
        return Recipe(_rows_again, (self.ranges,))

    def expand(self) -> Rows:
        return self

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
        for (start, stop), part in zip(self.ranges, self.parts, strict=True):
            out[start:stop].addmm_(part.reshape(self.n * self.c, -1).T, flat, beta=beta)

    def gram(self, other: Factor, scale: Scale, out: Tensor) -> None:
        right = other.expand()
        for r, a, b in zip(self.ranges, self.parts, right.parts, strict=True):
            flat = a.reshape(self.n * self.c, -1)
            flat = flat if scale.vector is None else flat * scale.vector[slice(*r)]
            out.addmm_(flat, b.reshape(right.n * right.c, -1).T)

    def diag(self, scale: Scale) -> Tensor:
        out = self.parts[0].new_zeros(self.n, self.c)
        for r, part in zip(self.ranges, self.parts, strict=True):
            squared = part.square()
            out += squared.sum(-1) if scale.vector is None else squared @ scale.vector[slice(*r)]
        return out

    def blocks(self, scale: Scale) -> Tensor:
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


@final
class Outer(Factor):
    r"""Outer products :math:`G_{iu} = \sum_t g_{iut} x_{it}^\top` of a weight, and :math:`\sum_t g_{iut}` of its bias.

    Args:
        x: (n, groups, T, dx), the side that all outputs share.
        g: (n, c, groups, T, dg), the side of the output gradients.
        weight: Range of the weight, or None if it is not selected; laid out as (groups, dg, dx).
        bias: Range of the bias, laid out as (groups, dg), or None.
        swapped: The weight is laid out as (groups, dx, dg) instead.
    """

    def __init__(
        self, x: Tensor, g: Tensor, *, weight: Range | None, bias: Range | None = None, swapped: bool = False
    ) -> None:
        super().__init__([r for r in (weight, bias) if r is not None], n=g.shape[0], c=g.shape[1])
        self.x, self.g = x, g
        self.weight, self.bias, self.swapped = weight, bias, swapped

    @property
    def size(self) -> Size:
        groups, T, dx = self.x.shape[1:]
        return Size(self.q, T, dx if self.weight is not None else 0, self.g.shape[-1], groups)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    @property
    def recipe(self) -> Recipe:
        return Recipe(_outer_again, (self.weight, self.bias, self.swapped))

    @property
    def joined(self) -> Tensor:
        """The gradient summed over uses, (n, c, groups * dg): the bias's rows."""
        return self.g.sum(-2).flatten(2)

    def expand(self) -> Rows:
        parts = []
        if self.weight is not None:
            x, g = self.x[:, None], self.g
            G = (x.mT if self.swapped else g.mT) @ (g if self.swapped else x)
            parts.append(G.flatten(2))
        if self.bias is not None:
            parts.append(self.joined)
        return Rows(self.ranges, parts)

    def _columns(self, V: Tensor) -> Tensor:
        """The weight's part of V (p, k) as (groups, dx, dg, k)."""
        assert self.weight is not None
        dx, dg = self.x.shape[-1], self.g.shape[-1]
        shape = (self.x.shape[1], dx, dg) if self.swapped else (self.x.shape[1], dg, dx)
        block = V[slice(*self.weight)].view(*shape, -1)
        return block if self.swapped else block.transpose(1, 2)

    def matmul(self, V: Tensor) -> Tensor:
        out = V.new_zeros(self.n, self.c, V.shape[1])
        self.add_matmul(V, out)
        return out

    def add_matmul(self, V: Tensor, out: Tensor) -> None:
        k = V.shape[1]
        if self._is_layer(k):
            weight, bias = self._layer(V)
            h = F.linear(self.x.reshape(-1, self.x.shape[-1]), weight, bias)
            add_products(out, self.g.flatten(2), h.view(self.n, -1, 1))
            return
        if self.bias is not None:
            out += self.joined @ V[slice(*self.bias)]
        if self.weight is None:
            return
        columns = self._columns(V)
        for s in _pieces(self.n, self.x[0, ..., 0].numel() * self.g.shape[-1] * k):
            for j in range(self.x.shape[1]):
                x, g = self.x[s, j], self.g[s, :, j]
                h = x.reshape(-1, x.shape[-1]) @ columns[j].reshape(x.shape[-1], -1)
                out[s] += g.flatten(2) @ h.view(len(x), -1, k)

    def _is_layer(self, k: int) -> bool:
        """Whether a product with k columns is that of a linear layer with one weight, which takes few calls."""
        whole = self.n * self.g.shape[2:].numel() <= TEMPORARY
        return k == 1 and self.weight is not None and self.x.shape[1] == 1 and whole

    def _layer(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight (dg, dx) and the bias (dg,) in a column of the parameters (p, 1), as views."""
        weight = self._columns(flat)[0, ..., 0].T
        return weight, None if self.bias is None else flat[slice(*self.bias), 0]

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        if self._is_layer(U.shape[2]):
            self._layer_rmatmul(U, out, beta=1)
        else:
            self._general_rmatmul(U, out)

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        if self._is_layer(U.shape[2]):
            self._layer_rmatmul(U, out, beta=0)
        else:
            super().write_rmatmul(U, out)

    def _layer_rmatmul(self, U: Tensor, out: Tensor, *, beta: int) -> None:
        weight, bias = self._layer(out)
        h = (U.mT @ self.g.flatten(2)).view(-1, self.g.shape[-1])
        weight.addmm_(h.T, self.x.reshape(-1, self.x.shape[-1]), beta=beta)
        if bias is not None:
            bias.copy_(h.sum(0)) if beta == 0 else bias.add_(h.sum(0))

    def _general_rmatmul(self, U: Tensor, out: Tensor) -> None:
        k = U.shape[2]
        if self.bias is not None:
            out[slice(*self.bias)].addmm_(self.joined.flatten(0, 1).T, U.flatten(0, 1))
        if self.weight is None:
            return
        columns = self._columns(out)
        for s in _pieces(self.n, self.x[0, ..., 0].numel() * self.g.shape[-1] * k):
            for j in range(self.x.shape[1]):
                x, g = self.x[s, j], self.g[s, :, j]
                h = (g.flatten(2).mT @ U[s]).view(-1, g.shape[-1] * k)
                columns[j] += (x.reshape(-1, x.shape[-1]).T @ h).view(x.shape[-1], -1, k)

    def gram(self, other: Factor, scale: Scale, out: Tensor) -> None:
        constants = scale.constant(self.weight), scale.constant(self.bias)
        if not isinstance(other, Outer) or None in constants or not self._alike(other):
            return self.expand().gram(other.expand(), scale, out)
        _ghost(self.g, other.g, self._inner(other, *constants), out)  # type: ignore[arg-type]

    def _alike(self, other: Outer) -> bool:
        mine, theirs = ((f.weight, f.bias, f.swapped, f.x.shape[1], f.x.shape[3]) for f in (self, other))
        return mine == theirs

    def _inner(self, other: Outer, weight: float, bias: float) -> Inner:
        def inner(a: slice, b: slice, j: int) -> Tensor:
            x, y = self.x[a, j], other.x[b, j]
            left, right = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
            if weight == 0:
                A = left.new_full((len(left), len(right)), bias)
            else:
                A = torch.addmm(left.new_full((1, 1), bias), left, right.T, alpha=weight)
            return A.view(len(x), x.shape[1], len(y), y.shape[1])

        return inner

    def diag(self, scale: Scale) -> Tensor:
        weight, bias = scale.constant(self.weight), scale.constant(self.bias)
        T, dx, dg = self.x.shape[2], self.x.shape[3], self.g.shape[-1]
        if T == 1 and (weight is None or bias is None):
            return (self.g.squeeze(3).square() * self._spread(scale)[:, None]).sum((2, 3))
        if weight is None or bias is None or T * (dx + dg) > dx * dg:
            return self.expand().diag(scale)
        if T == 1:
            inner = weight * self.x.square().sum((-2, -1)) + bias
            return (self.g.square().sum((-2, -1)) * inner[:, None]).sum(2)
        inner = weight * (self.x @ self.x.mT) + bias
        return ((self.g @ self.g.mT) * inner[:, None]).sum((2, 3, 4))

    def blocks(self, scale: Scale) -> Tensor:
        weight, bias = scale.constant(self.weight), scale.constant(self.bias)
        T, dx, dg = self.x.shape[2], self.x.shape[3], self.g.shape[-1]
        factored = T * (T * dx + self.c * (T + self.c) * dg)
        dear = factored > self.c * (T + self.c) * dx * dg
        if T == 1 and (weight is None or bias is None):
            g = self.g.squeeze(3)
            return (g * self._spread(scale)[:, None]).flatten(2) @ g.flatten(2).mT
        if weight is None or bias is None or self.weight is None or dear:
            return self.expand().blocks(scale)
        out = self.g.new_empty(self.n, self.c, self.c)
        for s in _pieces(self.n, self.x.shape[1] * T * max(T, self.c * dg)):
            x, g = self.x[s], self.g[s]
            # sum_ts g_iut . g_ivs (w x_it . x_is + b)
            h = (weight * (x @ x.mT) + bias)[:, None] @ g
            out[s] = g.flatten(2) @ h.flatten(2).mT
        return out

    def _spread(self, scale: Scale) -> Tensor:
        """What a diagonal of many values gives to each squared gradient entry, (n, groups, dg), where T is 1."""
        assert scale.vector is not None
        groups, dx, dg = self.x.shape[1], self.x.shape[3], self.g.shape[-1]
        out = self.x.new_zeros(groups, 1, dg)
        if self.bias is not None:
            out = out + scale.vector[slice(*self.bias)].view(groups, 1, dg)
        if self.weight is not None:
            D = scale.vector[slice(*self.weight)]
            D = D.view(groups, dx, dg) if self.swapped else D.view(groups, dg, dx).mT
            out = out + self.x.squeeze(2).square().transpose(0, 1) @ D
        return out.expand(groups, self.n, dg).transpose(0, 1)

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        if self.x.shape[2] > 1:
            return self.expand().squares(weight, out)
        g = self.g.squeeze(3)  # (n, c, groups, dg)
        if weight is None:
            m = g.square().sum(1)
        elif weight.ndim == 2:
            m = (weight[:, :, None, None] * g.square()).sum(1)
        else:
            m = (g * (weight @ g.flatten(2)).view_as(g)).sum(1)
        if self.bias is not None:
            out[slice(*self.bias)] += m.sum(0).flatten()
        if self.weight is not None:
            total = self.x.squeeze(2).square().permute(1, 2, 0) @ m.transpose(0, 1)  # (groups, dx, dg)
            out[slice(*self.weight)] += (total if self.swapped else total.mT).flatten()


@final
class Tokens(Factor):
    r"""An embedding table's columns: :math:`G_{iu} = \sum_t e_{\mathrm{id}_{it}} g_{iut}^\top`.

    Args:
        ids: (n, T) row numbers of the table; -1 where the gradient is to be dropped (padding).
        g: (n, c, T, d).
        table: Range of the table, laid out as (rows, d).
        dropped: Whether there may be such ids; else nothing is looked at, which a GPU would be waited for.
    """

    def __init__(self, ids: Tensor, g: Tensor, table: Range, *, dropped: bool = True) -> None:
        super().__init__([table], n=g.shape[0], c=g.shape[1])
        kept = ids >= 0 if dropped else None
        self.ids = ids if kept is None else ids.clamp(min=0)
        self.g = g if kept is None or bool(kept.all()) else g * kept[:, None, :, None]
        self.vocabulary = (table[1] - table[0]) // g.shape[-1]

    @property
    def size(self) -> Size:
        return Size(self.q, self.ids.shape[1], 1, self.g.shape[-1])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.g

    @property
    def recipe(self) -> Recipe:
        return Recipe(_tokens_again, self.ranges)

    def _view(self, flat: Tensor) -> Tensor:
        start, stop = self.ranges[0]
        return flat[start:stop].view(self.vocabulary, -1)

    def expand(self) -> Rows:
        d = self.g.shape[-1]
        rows = self.g.new_zeros(self.n, self.c, self.vocabulary, d)
        index = self.ids[:, None, :, None].expand_as(self.g)
        return Rows(self.ranges, [rows.scatter_add_(2, index, self.g).flatten(2)])

    def matmul(self, V: Tensor) -> Tensor:
        k, table = V.shape[1], self._view(V)
        out = V.new_empty(self.n, self.c, k)
        for s in _pieces(self.n, self.g[0, 0].numel() * k):
            out[s] = self.g[s].flatten(2) @ table[self.ids[s]].view(self.ids[s].shape[0], -1, k)
        return out

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        k, table = U.shape[2], self._view(out)
        for s in _pieces(self.n, self.g[0, 0].numel() * k):
            h = self.g[s].flatten(2).mT @ U[s]
            table.index_add_(0, self.ids[s].flatten(), h.view(-1, self.g.shape[-1] * k))

    def gram(self, other: Factor, scale: Scale, out: Tensor) -> None:
        constant = scale.constant(self.ranges[0])
        if not isinstance(other, Tokens) or constant is None:
            return self.expand().gram(other.expand(), scale, out)
        mine, theirs = self.ids, other.ids

        def inner(a: slice, b: slice, j: int) -> Tensor:
            same = mine[a][:, :, None, None] == theirs[b][None, None]
            return same.to(self.g.dtype) * constant

        _ghost(self.g[:, :, None], other.g[:, :, None], inner, out)

    def diag(self, scale: Scale) -> Tensor:
        example, joined, token = self._coalesced()
        squared = joined.square()
        if scale.vector is not None:
            squared = squared * self._view(scale.vector)[token][:, None]
        return squared.new_zeros(self.n, self.c).index_add_(0, example, squared.sum(-1))

    def blocks(self, scale: Scale) -> Tensor:
        example, joined, token = self._coalesced()
        left = joined if scale.vector is None else joined * self._view(scale.vector)[token][:, None]
        return joined.new_zeros(self.n, self.c, self.c).index_add_(0, example, left @ joined.mT)

    def _coalesced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per (example, token) pair that occurs: the example, the summed gradient (c, d), the token."""
        keys = self.ids + self.vocabulary * torch.arange(self.n, device=self.ids.device)[:, None]
        pairs, inverse = keys.flatten().unique(return_inverse=True)
        g = self.g.transpose(1, 2).flatten(0, 1)  # (n T, c, d)
        joined = g.new_zeros(len(pairs), *g.shape[1:]).index_add_(0, inverse, g)
        return pairs // self.vocabulary, joined, pairs % self.vocabulary

    def squares(self, weight: Tensor | None, out: Tensor) -> None:
        example, joined, token = self._coalesced()
        if weight is None:
            weighted = joined
        elif weight.ndim == 2:
            weighted = weight[example][..., None] * joined
        else:
            weighted = weight[example] @ joined
        self._view(out).index_add_(0, token, (weighted * joined).sum(1))


def add_products(out: Tensor, g: Tensor, h: Tensor) -> None:
    """Adds each example's ``g h`` into ``out``: g (n, c, m) and h (n, m, k) into (n, c, k).

    >>> out = torch.ones(2, 3, 1)
    >>> add_products(out, torch.ones(2, 3, 4), torch.ones(2, 4, 1))
    >>> out.flatten().tolist()
    [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    """
    if g.is_cpu and h.shape[2] == 1:
        # Read as a matrix right of one row, g comes at the speed of the CPU's memory; left of one column it does not.
        out += torch.bmm(h.mT, g.mT).mT
    else:
        out.baddbmm_(g, h)


def _rows_again(tensors: Sequence[Tensor], ranges: Sequence[Range]) -> Factor:
    return Rows(ranges, tensors)


def _outer_again(tensors: Sequence[Tensor], weight: Range | None, bias: Range | None, swapped: bool) -> Factor:
    x, g = tensors
    return Outer(x, g, weight=weight, bias=bias, swapped=swapped)


def _tokens_again(tensors: Sequence[Tensor], table: Range) -> Factor:
    ids, g = tensors
    return Tokens(ids, g, table, dropped=False)


Inner = Callable[[slice, slice, int], Tensor]


def _ghost(g: Tensor, h: Tensor, inner: Inner, out: Tensor) -> None:
    r"""Adds ``sum_{groups,t,s} inner[i,t,j,s] (g_iut . h_jvs)`` into out (n c, m c'), tile by tile.

    Args:
        g: (n, c, groups, T, d).
        h: (m, c', groups, T', d).
        inner: Gives the (n', T, m', T') inner products of the other sides, for slices of examples and a group.
        out: (n c, m c').
    """
    n, c, groups, T, d = g.shape
    m, e, _, S, _ = h.shape
    for a, b in _tiles(n, m, c * T * e * S):
        K = out[a.start * c : a.stop * c, b.start * e : b.stop * e]
        for j in range(groups):
            left, right = g[a, :, j].reshape(-1, d), h[b, :, j].reshape(-1, d)
            G, A = left @ right.T, inner(a, b, j)
            if c == T == e == S == 1:
                K.addcmul_(G, A[:, 0, :, 0])
            else:
                G = G.view(-1, c, T, b.stop - b.start, e, S).mul_(A[:, None, :, :, None, :])
                K += G.sum((2, 5)).view(K.shape)


def _pieces(n: int, each: int) -> Iterator[slice]:
    """Slices of n examples with at most TEMPORARY entries each, for ``each`` entries per example."""
    step = max(1, min(n, TEMPORARY // max(1, each)))
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _tiles(n: int, m: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of an n by m grid with ``each`` entries per cell and about TEMPORARY entries per tile."""
    side = max(1, int((TEMPORARY / max(1, each)) ** 0.5))
    step = max(side, TEMPORARY // max(1, each * min(m, side)))
    for a in range(0, n, step):
        for b in range(0, m, side):
            yield slice(a, min(a + step, n)), slice(b, min(b + side, m))
