"""Columns of the Jacobian by torch's own differentiation: for parameters without a layer rule, and for few columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jacrev, vmap
from torch.utils import _pytree as pytree

from linnet._common.torch_settings import dual_level
from linnet.data.batch import Batch
from linnet.jacobian.blocks.base import Factor, Rows, Size
from linnet.jacobian.blocks.shared_outputs import Shared
from linnet.jacobian.proofs import Disproved, Truth
from linnet.network import checks
from linnet.network.parameters import Layout

Forward = Callable[..., Tensor]
"""Some named parameters (the others stay at theta) and a batch to the output (n, c); inside a context, if one is given
third."""


@final
class Autodiff(Factor):
    """The columns of some parameters, differentiated by torch each time they are needed.

    Products go column by column, forward mode for ``J V`` and reverse mode for ``J^T U``; rows come from reverse
    mode vectorized over the examples, or example by example where that fails.

    Args:
        forward: See `Forward`.
        theta: The selected parameters.
        names: Those that this factor covers.
        layout: Places in the flat vector.
        batch: The chunk.
        c: Outputs.
        dtype: Dtype of the columns.
        vectorize: Says whether rows may be vectorized over examples, when they are needed.
        columns: Whether products go column by column (else through the rows).
        judge: Gives what reverse mode says, if products and rows are to be compared with that; None if not.
        seed: Gradients of some examples in other batches, if those of reverse mode are to be compared with them.
        deny: Called with the name of an ability that gave other numbers, or failed.
        graph: The outputs (n, c) with the parameters, by name, that they were computed from: the first ``rmatmul``
            differentiates them instead of running the network.
        known: A tensor V (p, k) that the columns will be multiplied by, and the product with its first column (n, c).
        shared: What the layers gave in the pass that found that product.
    """

    def __init__(
        self,
        forward: Forward,
        theta: Mapping[str, Tensor],
        names: Sequence[str],
        layout: Layout,
        batch: Batch,
        *,
        c: int,
        dtype: torch.dtype,
        vectorize: Callable[[], bool],
        columns: bool,
        judge: Callable[[], Truth] | None = None,
        seed: Truth | None = None,
        deny: Callable[[str], None] = lambda ability: None,
        graph: tuple[Tensor, Mapping[str, Tensor]] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        shared: Shared | None = None,
    ) -> None:
        ranges = [(layout.slices[name].start, layout.slices[name].stop) for name in names]
        super().__init__(ranges, n=batch.n, c=c)
        self._forward, self._layout, self._batch = forward, layout, batch
        self._theta = {name: theta[name] for name in names}
        self._dtype, self._vectorize, self._columns = dtype, vectorize, columns
        self._judge, self._seed, self._deny = judge, seed, deny
        self._graph, self._known, self._shared = graph, known, shared
        self._rows: Rows | None = None

    @property
    def size(self) -> Size:
        return Size(self.q)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self._rows is None else self._rows.parts

    def expand(self) -> Rows:
        if self._rows is None:
            parts = self._vectorized() if self._vectorize() else None
            self._rows = Rows(self.ranges, self._one_by_one() if parts is None else parts)
        return self._rows

    def _one_by_one(self) -> list[Tensor]:
        """The rows of each example alone, by reverse mode."""
        parts = self._parts(vectorize=False)
        if not all(self._judged(lambda truth: truth.has_rows(self.ranges, parts))):
            raise checks.not_linear()
        return parts

    def _parts(self, *, vectorize: bool) -> list[Tensor]:
        found = rows(self._forward, self._theta, self._batch, vectorize=vectorize)
        return [found[name].detach().to(self._dtype).reshape(self.n, self.c, -1) for name in self._theta]

    def _vectorized(self) -> list[Tensor] | None:
        """The rows vectorized over the examples, or None where that fails or gives other numbers than reverse mode."""
        try:
            parts = self._parts(vectorize=True)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError):
            parts = None
        if parts is None or not all(self._judged(lambda truth: truth.has_rows(self.ranges, parts))):
            self._deny("vectorize")
            return None
        return parts

    def _judged(self, question: Callable[[Truth], list[bool]]) -> list[bool]:
        """Ask the judge a question; the answer is empty if there is no judge or its gradients are not finite."""
        truth = None if self._judge is None else self._judge()
        return question(truth) if truth is not None and truth.judges else []

    def matmul(self, V: Tensor) -> Tensor:
        if not self._columns:
            return self.expand().matmul(V)

        if V.shape[1] == 0:
            return V.new_zeros(self.n, self.c, 0)
        products = [] if self._known is None or V is not self._known[0] else [self._known[1]]
        columns = V.unbind(1)[len(products) :]
        shared = Shared() if self._shared is None and len(columns) > 1 else self._shared

        def f(th: dict[str, Tensor]) -> Tensor:
            return self._forward(th, self._batch, nullcontext() if shared is None else shared.begin())

        try:
            for column in columns:
                tangent = {name: self._part(column, name) for name in self._theta}
                products.append(jvp_of(f, self._theta, tangent))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise Disproved("forward_mode") from error
        # Parameters that are not selected may ask for gradients of their own.
        out = torch.stack(products, -1).detach().to(self._dtype)
        right = self._judged(lambda truth: truth.has_product(self.ranges, V, out))
        if not all(right[:1]):
            raise Disproved("forward_mode")
        if not all(right):
            raise checks.examples_interact(self._batch.start, self._batch.n)
        return out

    def rmatmul(self, U: Tensor, out: Tensor) -> None:
        if not self._columns and self._graph is None:
            return self.expand().rmatmul(U, out)
        for j, grads in enumerate(self._gradients(U)):
            for (start, stop), g in zip(self.ranges, grads, strict=True):
                if g is not None:
                    out[start:stop, j] += g.to_dense().flatten()

    def write_rmatmul(self, U: Tensor, out: Tensor) -> None:
        adjacent = all(a[1] == b[0] for a, b in pairwise(self.ranges))
        if not adjacent or (not self._columns and self._graph is None):
            return super().write_rmatmul(U, out)
        part = out[self.ranges[0][0] : self.ranges[-1][1]]
        for j, grads in enumerate(self._gradients(U)):
            known = zip(self._theta.values(), grads, strict=True)
            flat = [(torch.zeros_like(t) if g is None else g.to_dense()).flatten() for t, g in known]
            torch.cat(flat, out=part[:, j])

    def _gradients(self, U: Tensor) -> Iterator[Sequence[Tensor | None]]:
        """For each column of U one for each parameter, or None where these examples do not use it."""
        f, leaves = self._recorded()
        wanted = [leaves[name] for name in self._theta]
        if self._seed is not None and f.requires_grad:
            self._check_seed(f, wanted, self._seed)
        for j, u in enumerate(U.to(f.dtype).unbind(2)):
            more = j + 1 < U.shape[2]
            used = f.requires_grad
            yield torch.autograd.grad(f, wanted, u, more, allow_unused=True) if used else [None] * len(wanted)

    def _check_seed(self, f: Tensor, wanted: Sequence[Tensor], seed: Truth) -> None:
        """Raise if the gradients of some examples are others than in a batch of their own."""
        found = seed.G.clone()
        grads = torch.autograd.grad(f, wanted, seed.U[..., 0].to(f.dtype), True, allow_unused=True)
        for (start, stop), g in zip(self.ranges, grads, strict=True):
            found[start:stop, 0] = 0.0 if g is None else g.to_dense().flatten().to(found)
        if seed.judges and found.isfinite().all() and seed.different(found)[0]:
            raise checks.examples_interact(self._batch.start, self._batch.n)

    def _recorded(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Outputs and the parameters that they depend on, to be differentiated once."""
        graph, self._graph = self._graph, None
        if graph is None:
            leaves = {name: nn.Parameter(t.detach()) for name, t in self._theta.items()}
            with torch.enable_grad():
                graph = self._forward(leaves, self._batch), leaves
        return graph

    def _part(self, column: Tensor, name: str) -> Tensor:
        t = self._theta[name]
        return column[self._layout.slices[name]].view(t.shape).to(t.dtype)


def rows(forward: Forward, theta: Mapping[str, Tensor], batch: Batch, *, vectorize: bool) -> dict[str, Tensor]:
    """Per-example gradients of every output: name to (n, c, *shape).

    Args:
        forward: See `Forward`.
        theta: The parameters to differentiate.
        batch: The examples.
        vectorize: Vectorize over examples instead of taking them one by one.
    """
    if not vectorize:
        found = [_jacobian_of_one(forward, theta, one) for one in batch.split(1)]
        return {name: torch.stack([f[name] for f in found]) for name in theta}
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    mapped = [isinstance(x, Tensor) and x.ndim > 0 and len(x) == batch.n for x in leaves]

    def one(th: dict[str, Tensor], *xs: object) -> Tensor:
        inputs = [x[None] if m and isinstance(x, Tensor) else x for x, m in zip(xs, mapped, strict=True)]
        args, kwargs = pytree.tree_unflatten(inputs, spec)
        return forward(th, Batch(args, kwargs, None, batch.start, 1))[0]

    dims = tuple(0 if m else None for m in mapped)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        return vmap(jacrev(one), in_dims=(None, *dims))(dict(theta), *leaves)


def _jacobian_of_one(forward: Forward, theta: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    leaves = {name: nn.Parameter(t.detach()) for name, t in theta.items()}
    with torch.enable_grad():
        out = forward(leaves, batch)[0]
        values = out.unbind()
    if not out.requires_grad:
        return {name: t.new_zeros(len(out), *t.shape) for name, t in theta.items()}
    columns = []
    for value in values:
        grads = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, allow_unused=True)
        columns.append(
            [torch.zeros_like(t) if g is None else g.to_dense() for t, g in zip(theta.values(), grads, strict=True)]
        )
    return {name: torch.stack(column) for name, column in zip(theta, zip(*columns, strict=True), strict=True)}


def jvp_of(f: Callable[[dict[str, Tensor]], Tensor], theta: dict[str, Tensor], tangent: dict[str, Tensor]) -> Tensor:
    """The forward-mode derivative of ``f`` at theta along a tangent."""
    return dual(f, theta, tangent)[1]


def dual(
    f: Callable[[dict[str, Tensor]], Tensor], theta: dict[str, Tensor], tangent: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """``f`` at theta and its forward-mode derivative along a tangent, in one forward pass.

    Where theta asks for gradients, the value has its graph.
    """
    with warnings.catch_warnings():
        # torch scripts its forward-mode decompositions at first use and warns about its own scripting.
        warnings.filterwarnings("ignore", "`torch.jit.script")
        # Not torch.func.jvp, which costs every call of a torch function something, also below what is differentiated.
        with dual_level():
            duals = {name: forward_ad.make_dual(t, tangent[name]) for name, t in theta.items()}
            value, derivative = forward_ad.unpack_dual(f(duals))
    return value, torch.zeros_like(value) if derivative is None else derivative
