r"""Other rows than those of the Jacobian: combinations of the outputs, weighted rows, and the rows that count.

``L^T J`` with m columns of L takes m backward passes per example, where J with c outputs takes c. For the Fisher
information from m sampled labels, that is all there is to differentiate, however many classes there are.

A classifier that is sure of most labels has a curvature ``B = L L^T`` near zero there: of ResNet-20 on 2,000 of its
training images, 3 % of the rows of ``L^T J`` hold 99 % of the trace of B, and 13 % hold 99.99 %. Products with these
rows alone take a fraction of the backward passes. `informative_rows` are for preconditioners, and for iterations whose
residuals come from all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from linnet._common import TEMPORARY
from linnet.data import Batch, Source
from linnet.linalg import ClassBlocks, LinearOperator, RowFn, Stack, as_weight, inner_matrix, weigh, weight_from_root
from linnet.network import FunctionalModel, output_matrix, output_tensor, with_forward

if TYPE_CHECKING:
    from linnet.jacobian.jacobian import Jacobian

NAME = "linnet_root"
"""The keyword under which the combinations travel with the inputs."""


def combine_outputs(J: Jacobian, root: Tensor) -> Jacobian:
    """``L^T J``, (n m, p), for L (n, c, m).

    Args:
        J: (n c, p).
        root: L.

    Example:
        >>> import torch
        >>> from linnet import linearize
        >>> J = linearize(nn.Linear(2, 5)).jacobian(torch.ones(3, 2))
        >>> combine_outputs(J, torch.ones(3, 5, 2)).shape
        (6, 15)
    """
    if root.ndim != 3 or tuple(root.shape[:2]) != (J.n, J.c):
        raise ValueError(f"combined needs a root of shape ({J.n}, {J.c}, m); got {tuple(root.shape)}.")
    lin = J.lin
    lin.check_unchanged()
    net = lin.network
    other = FunctionalModel.of(
        _combining(net.module, net.output), list(net.theta), convolutions=net.convolutions, ranks=net.ranks
    )
    other = replace(other, watch=net.watch, cast=net.cast, products=net.products)
    return J.with_chunks(J.network_chunks().renewed(lin.with_network(other), _WithRoot(J._source, root.detach())))


DRAWN_ROWS = 1024
"""Random combinations of outputs in all, at least one for each example: more of them take time, fewer leave noise."""


def estimate_column_norms(J: Jacobian, root: Any = None, *, seed: int = 0) -> Tensor:
    r"""The diagonal of ``J^T L L^T J``, (p,): exact, or for many outputs an unbiased estimate.

    .. math:: \mathrm{E} \, (J^\top L e)^2 = \mathrm{diag}(J^\top L L^\top J) \text{ for random signs } e

    A few random combinations of the outputs of an example take as many backward passes, however many outputs there are.

    Args:
        J: (n c, p).
        root: L, (n, c) where it is diagonal, or (n, c, c); None for the identity.
        seed: Seed of the signs.

    Example:
        >>> from linnet import linearize
        >>> J = linearize(nn.Linear(2, 2000, bias=False)).jacobian(torch.tensor([[1.0, 2.0]]))
        >>> estimate_column_norms(J)[:4]
        tensor([1., 4., 1., 4.])
    """
    if J.in_memory or not J.has_many_outputs():
        return J.column_norms(None if root is None else weight_from_root(root))
    m = max(1, DRAWN_ROWS // J.n)
    generator = torch.Generator().manual_seed(seed)
    e = torch.randint(2, (J.n, J.c, m), generator=generator).to(device=J.device, dtype=J.dtype).mul_(2).sub_(1)
    if root is not None:
        e = weigh(e.flatten(0, 1), as_weight(root)).view_as(e)
    return combine_outputs(J, e / m**0.5).column_norms()


def _combining(model: nn.Module, output: Callable[[Any], Tensor] | None) -> nn.Module:
    """The module with a forward that also takes the combinations; its parameters keep their names."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        root = kwargs.pop(NAME)
        raw = module.forward(*args, **kwargs)
        f = output_matrix(output_tensor(raw) if output is None else output(raw), len(root))
        return (root.to(f.dtype).mT @ f[..., None])[..., 0]

    return with_forward(model, forward)


class _WithRoot(Source):
    """A source whose batches carry their part of the root.

    Args:
        base: The source.
        root: (n, c, m).
    """

    def __init__(self, base: Source, root: Tensor) -> None:
        self.base, self.root = base, root
        self.n, self.kind, self.by_position = base.n, base.kind, base.by_position

    def _batches(self, size: int, start: int, stop: int) -> Iterator[Batch]:
        for batch in self.base._batches(size, start, stop):
            yield self._with(batch, self.root[batch.start : batch.start + batch.n])

    def _gather(self, chunks: Iterable[Tensor]) -> Iterator[Batch]:
        kept = list(chunks)
        for chunk, batch in zip(kept, self.base._gather(kept), strict=True):
            yield self._with(batch, self.root[chunk.to(self.root.device)])

    def _with(self, batch: Batch, root: Tensor) -> Batch:
        return replace(batch, kwargs={**batch.kwargs, NAME: root})


@final
class WeightedRows(LinearOperator):
    """``L^T J`` for a root L of the curvature: its right singular vectors are the eigenvectors of G.

    Args:
        J: (n c, p).
        root: L, (n, c) where it is diagonal, or (n, c, c).
        checksums: Gives the checksums of all that J and L are computed from; None for those of J.
    """

    symbol = "L^T J"

    def __init__(
        self, J: LinearOperator, root: Tensor, *, checksums: Callable[[], Mapping[str, str]] | None = None
    ) -> None:
        super().__init__(J.shape, dtype=J.dtype, device=J.device)
        self.J, self.L, self._checksums = J, as_weight(root), J.checksums if checksums is None else checksums
        self.LT = self.L if self.L.ndim == 1 else self.L.mT
        self.block, self.ranks = J.block, J.ranks

    @property
    def eps(self) -> float:
        return self.J.eps

    def checksums(self) -> dict[str, str]:
        return dict(self._checksums())

    def _matmul(self, V: Tensor) -> Tensor:
        return weigh(self.J._matmul(V), self.LT, slice(0, self.shape[0]))

    def _rmatmul(self, U: Tensor) -> Tensor:
        return self.J._rmatmul(weigh(U, self.L, slice(0, self.shape[0])))

    def _fused(self, fn: RowFn, V: Tensor) -> tuple[Tensor, Tensor]:
        # The sums are those of L fn(L^T J V), which only centered operators ask for.
        return self.J._fused(lambda U, rows: weigh(fn(weigh(U, self.LT, rows), rows), self.L, rows), V)

    def _gram(self, other: LinearOperator | None, scale: Tensor | None) -> Tensor:
        if other is not None:
            raise NotImplementedError(f"{self.name} has no gram with another operator")
        M = inner_matrix(self.J.gram(scale=scale), self.L)
        M.diagonal().sub_(1)
        return M

    def _column_norms(self, weight: Tensor | None) -> Tensor:
        if weight is not None:
            raise NotImplementedError(f"{self.name} has no column_norms with a weight")
        return self.J.column_norms(weight_from_root(self.L))


SMALL = 256
"""Outputs up to which the blocks of B are decomposed; columns of L are taken as they are where there are more, which
takes up to twice the rows."""

WORTH = 0.3
"""The largest share of the rows that is worth while."""


@torch.no_grad()
def informative_rows(
    J: Jacobian, root: Any, *, share: float = 1e-4, most: int | None = None, largest: float = 0.03
) -> Stack | None:
    """R (m, p) with ``R^T R`` close to ``J^T B J``; None where that takes too many rows, or J cannot choose examples.

    What is left out has no more than a share of B's trace, wherever it is. Examples that need 1, 2, 3, 4, 6, 8, 12 ...
    rows go together, each group by a Jacobian of its own.

    Args:
        J: (n c, p).
        root: L, (n, c, c).
        share: Of the trace.
        most: Rows that there may be; where a share takes more, a larger one is left out.
        largest: Share that may be left out then.

    Example:
        >>> import linnet
        >>> J = linnet.linearize(torch.nn.Linear(2, 3)).jacobian(torch.ones(9, 2))
        >>> L = torch.zeros(9, 3, 3)
        >>> L[4, 0, 0] = 2.0
        >>> informative_rows(J, L).shape
        (1, 9)
    """
    if root.ndim != 3 or J.in_memory or not J.by_position:
        return None
    if root.shape[1] != J.c:  # blocks of the sites of an example
        return None
    squares = torch.cat([_columns(part).square().sum(1) for part in _parts(root)]).double()  # (n, c), falling
    if not float(squares.sum()) > 0:
        return None
    rows = WORTH * J.shape[0] if most is None else min(most, WORTH * J.shape[0])
    groups = _groups(squares, share)
    while sum(len(index) * q for index, q in groups) > rows:
        share *= 10**0.25
        if most is None or share > largest:
            return None
        groups = _groups(squares, share)

    def columns(index: Tensor, q: int) -> Tensor:
        return torch.cat([_columns(part)[:, :, :q].clone() for part in _parts(root[index])])

    return Stack([combine_outputs(J.subset(index.cpu()), columns(index, q)) for index, q in groups])


def _parts(root: Tensor | ClassBlocks) -> Iterator[Tensor]:
    """The blocks of a root, some at a time."""
    step = max(1, TEMPORARY // (root.shape[1] * root.shape[2]))
    for start in range(0, len(root), step):
        part = root[slice(start, start + step)]
        yield part.dense() if isinstance(part, ClassBlocks) else part


def _groups(squares: Tensor, share: float) -> list[tuple[Tensor, int]]:
    """Indices of examples, and how many columns each of them needs; squares (n, c) falls along its rows."""
    order, _ = squares.flatten().sort()
    dropped = int((order.cumsum(0) <= share * order.sum()).sum())
    needed = (squares >= order[min(dropped, len(order) - 1)]).sum(1)
    groups, low, widest = [], 0, int(needed.max())
    steps = sorted(
        {2**i * half // 2 for i in range(widest.bit_length()) for half in (2, 3)}
    )  # 1, 2, 3, 4, 6, 8, 12 ...
    for q in (*(q for q in steps if q < widest), widest):
        index = ((needed > low) & (needed <= q)).nonzero()[:, 0]
        if len(index):
            groups.append((index, q))
        low = max(low, q)
    return groups


def _columns(root: Tensor) -> Tensor:
    """Columns (n, c, c) with the same ``L L^T``, longest first: as few long ones as can be where c is small."""
    c = root.shape[-1]
    if c <= SMALL:
        values, vectors = torch.linalg.eigh((root @ root.mT).double())
        return (vectors * values.clamp_min(0).sqrt()[:, None]).flip(2).to(root.dtype)
    order = root.square().sum(1).argsort(1, descending=True)
    return root.gather(2, order[:, None].expand_as(root))
