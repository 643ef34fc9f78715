r"""Columns of the Jacobian that are outer products: those of every layer that multiplies by a weight.

Products are *bilinear* and Gram matrices *ghost*: neither forms the rows, unless that is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from linnet.jacobian.blocks.base import (
    ColumnBlock,
    DenseBlock,
    Inner,
    Range,
    Recipe,
    Scale,
    Size,
    add_products,
    as_tf32,
    fits,
    ghost,
    pieces,
)

PADDED = 0.2
"""The share of uses without gradients from which on products leave them out."""


@final
class OuterProductBlock(ColumnBlock):
    r"""Outer products :math:`G_{iu} = \sum_t g_{iut} x_{it}^\top` of a weight, and :math:`\sum_t g_{iut}` of its bias.

    Args:
        x: (n, groups, T, dx), the side that all outputs share; in half precision if g is too, until `widen`.
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

    def _converted(self, dtype: torch.dtype) -> OuterProductBlock:
        x, g = self.x.to(dtype), self.g.to(dtype)
        return OuterProductBlock(x, g, weight=self.weight, bias=self.bias, swapped=self.swapped)

    def rounded(self) -> OuterProductBlock:
        x, g = as_tf32(self.x), as_tf32(self.g)
        return OuterProductBlock(x, g, weight=self.weight, bias=self.bias, swapped=self.swapped)

    @property
    def joined(self) -> Tensor:
        """The gradient summed over uses, (n, c, groups * dg): the bias's rows."""
        return self.g.sum(-2, dtype=_wide(self.g)).flatten(2)

    def widen(self) -> OuterProductBlock:
        x, g = self.x.to(_wide(self.x)), self.g.to(_wide(self.g))
        same = x is self.x and g is self.g
        return self if same else OuterProductBlock(x, g, weight=self.weight, bias=self.bias, swapped=self.swapped)

    def expand(self) -> DenseBlock:
        parts = []
        if self.weight is not None:
            if self.g.is_cuda and self.c == 1 and self.x.dtype == self.g.dtype != _wide(self.g):
                # Tensor cores multiply half precision and add up in float32: nothing is rounded on the way.
                x, g = self.x.flatten(0, 1), self.g.flatten(0, 2)
                left, right = (x.mT, g) if self.swapped else (g.mT, x)
                G = torch.bmm(left, right, out_dtype=torch.float32)
                parts.append(G.view(self.n, 1, -1))
            else:
                wide = self.widen()
                x, g = wide.x[:, None], wide.g
                G = (x.mT if self.swapped else g.mT) @ (g if self.swapped else x)
                parts.append(G.flatten(2))
        if self.bias is not None:
            parts.append(self.joined)
        return DenseBlock(self.ranges, parts)

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
            h = _linear(self.x[:, 0], weight, bias, self._used)
            add_products(out, self.g.flatten(2), h.view(self.n, -1, 1))
            return
        if self.bias is not None:
            out += self.joined @ V[slice(*self.bias)]
        if self.weight is None:
            return
        columns = self._columns(V)
        for s in pieces(self.n, self.x[0, ..., 0].numel() * self.g.shape[-1] * k):
            for j in range(self.x.shape[1]):
                x, g = self.x[s, j], self.g[s, :, j]
                h = _linear(x, columns[j].reshape(x.shape[-1], -1).T, None, self._used_of(s))
                out[s] += g.flatten(2) @ h.view(len(x), -1, k)

    @cached_property
    def _used(self) -> Tensor | None:
        """Which uses have gradients that are not all zero, (n, T): tokens that pad a sentence have none.

        None where all count: on a GPU, which would wait for their number, and where no example begins or ends so.
        """
        if not self.g.is_cpu or self.x.shape[1] > 1 or self.x.shape[2] < 2:
            return None
        g = self.g[:, :, 0]  # (n, c, T, dg)
        if all(bool(g[:, :, t].any(2).any(1).all()) for t in (0, -1)):
            return None
        used = g.any(3).any(1)
        return used if float(used.double().mean()) <= 1 - PADDED else None

    def _used_of(self, s: slice) -> Tensor | None:
        return None if self._used is None else self._used[s]

    def _is_layer(self, k: int) -> bool:
        """Whether a product with k columns is that of a linear layer with one weight, which takes few calls."""
        whole = fits(self.n * self.g.shape[2:].numel())
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
        g = self.g.flatten(2)
        h = (U * g if self.c == 1 else U.mT @ g).view(-1, self.g.shape[-1])
        x, some = _of_used(self.x[:, 0], h, self._used)
        weight.addmm_(some.T, x, beta=beta)
        if bias is not None:
            bias.copy_(h.sum(0)) if beta == 0 else bias.add_(h.sum(0))

    def _general_rmatmul(self, U: Tensor, out: Tensor) -> None:
        k = U.shape[2]
        if self.bias is not None:
            out[slice(*self.bias)].addmm_(self.joined.flatten(0, 1).T, U.flatten(0, 1))
        if self.weight is None:
            return
        columns = self._columns(out)
        for s in pieces(self.n, self.x[0, ..., 0].numel() * self.g.shape[-1] * k):
            for j in range(self.x.shape[1]):
                x, g = self.x[s, j], self.g[s, :, j]
                h = (g.flatten(2).mT @ U[s]).view(-1, g.shape[-1] * k)
                x, h = _of_used(x, h, self._used_of(s))
                columns[j] += (x.T @ h).view(x.shape[-1], -1, k)

    def gram(self, other: ColumnBlock, scale: Scale, out: Tensor) -> None:
        constants = scale.constant(self.weight), scale.constant(self.bias)
        if not isinstance(other, OuterProductBlock) or None in constants or not self._alike(other):
            return self.expand().gram(other.expand(), scale, out)
        ghost(self.g, other.g, self._inner(other, *constants), out)  # type: ignore[arg-type]

    def _alike(self, other: OuterProductBlock) -> bool:
        mine, theirs = ((f.weight, f.bias, f.swapped, f.x.shape[1], f.x.shape[3]) for f in (self, other))
        return mine == theirs

    def _inner(self, other: OuterProductBlock, weight: float, bias: float) -> Inner:
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

    def gram_blocks(self, scale: Scale) -> Tensor:
        weight, bias = scale.constant(self.weight), scale.constant(self.bias)
        T, dx, dg = self.x.shape[2], self.x.shape[3], self.g.shape[-1]
        factored = T * (T * dx + self.c * (T + self.c) * dg)
        dear = factored > self.c * (T + self.c) * dx * dg
        if T == 1 and (weight is None or bias is None):
            g = self.g.squeeze(3)
            return (g * self._spread(scale)[:, None]).flatten(2) @ g.flatten(2).mT
        if weight is None or bias is None or self.weight is None or dear:
            return self.expand().gram_blocks(scale)
        out = self.g.new_empty(self.n, self.c, self.c)
        for s in pieces(self.n, self.x.shape[1] * T * max(T, self.c * dg)):
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


def _wide(t: Tensor) -> torch.dtype:
    """The dtype of a tensor, but at least float32."""
    return torch.promote_types(t.dtype, torch.float32)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor | None) -> Tensor:
    """A linear layer of inputs x (n, T, dx), (n T, dg); zeros where ``used`` (n, T) says that nothing asks for it."""
    flat = x.reshape(-1, x.shape[-1])
    if used is None:
        return F.linear(flat, weight, bias)
    index = used.flatten().nonzero()[:, 0]
    out = flat.new_zeros(len(flat), len(weight))
    return out.index_copy_(0, index, F.linear(flat.index_select(0, index), weight, bias))


def _of_used(x: Tensor, h: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of x (n, T, dx) and of h (n T, ..) of which ``used`` (n, T) says that h is not zero."""
    flat = x.reshape(-1, x.shape[-1])
    if used is None:
        return flat, h
    index = used.flatten().nonzero()[:, 0]
    return flat.index_select(0, index), h.index_select(0, index)


def _outer_again(tensors: Sequence[Tensor], weight: Range | None, bias: Range | None, swapped: bool) -> ColumnBlock:
    x, g = tensors
    return OuterProductBlock(x, g, weight=weight, bias=bias, swapped=swapped)
