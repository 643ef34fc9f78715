"""Columns of the Jacobian by torch's own differentiation: for parameters without a layer rule, and for few columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jacrev, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from linnet._common import dual_level
from linnet.data import Batch
from linnet.jacobian.blocks.base import ColumnBlock, DenseBlock, Disproved
from linnet.network import checks

if TYPE_CHECKING:
    from linnet.jacobian.proofs import Truth
    from linnet.network import Layout

Forward = Callable[..., Tensor]
"""Some named parameters (the others stay at theta) and a batch to the output (n, c); inside a context, if one is given
third."""


@final
class AutodiffBlock(ColumnBlock):
    """The columns of some parameters, differentiated by torch each time they are needed.

    Products go column by column, forward mode for ``J V`` and reverse mode for ``J^T U``; rows come from reverse
    mode vectorized over the examples, or example by example where that fails.

    Args:
        forward: See `Forward`.
        theta: The selected parameters.
        names: Those that this block covers.
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
        shared: SharedOutputs | None = None,
    ) -> None:
        ranges = [(layout.slices[name].start, layout.slices[name].stop) for name in names]
        super().__init__(ranges, n=batch.n, c=c)
        self._forward, self._layout, self._batch = forward, layout, batch
        self._theta = {name: theta[name] for name in names}
        self._dtype, self._vectorize, self._columns = dtype, vectorize, columns
        self._judge, self._seed, self._deny = judge, seed, deny
        self._graph, self._known, self._shared = graph, known, shared
        self._rows: DenseBlock | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self._rows is None else self._rows.parts

    def _converted(self, dtype: torch.dtype) -> ColumnBlock:
        """The block itself: torch differentiates in the dtype of the network, and products are converted."""
        return self

    def expand(self) -> DenseBlock:
        if self._rows is None:
            parts = self._vectorized() if self._vectorize() else None
            self._rows = DenseBlock(self.ranges, self._one_by_one() if parts is None else parts)
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
        shared = SharedOutputs() if self._shared is None and len(columns) > 1 else self._shared

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
    # Not torch.func.jvp, which costs every call of a torch function something, also below what is differentiated.
    with dual_level():
        duals = {name: forward_ad.make_dual(t, tangent[name]) for name, t in theta.items()}
        value, derivative = forward_ad.unpack_dual(f(duals))
    return value, torch.zeros_like(value) if derivative is None else derivative


# Forward-mode passes over the same examples, one for each column: layers give their outputs once, not every time. The
# derivative of a convolution or a linear layer takes two products of its own, ``W x' + W' x``. Torch makes the third
# product, ``W x``, again with every column.

LAYERS: frozenset[Callable[..., Any]] = frozenset({torch.conv1d, torch.conv2d, torch.conv3d, F.linear})
"""Functions of an input, a weight and a bias that are linear in each of the first two."""


@dataclass(frozen=True)
class _Output:
    """What a call gave: ``y`` as it was at a version, and what it was given."""

    y: Tensor
    version: int
    given: tuple[Any, ...]


@final
class SharedOutputs(TorchFunctionMode):
    """While it is active, `LAYERS` are differentiated here, and their outputs kept for the next pass.

    Passes must be over the same examples with the same parameters; `begin` starts each. An output that the network
    overwrites in place is not used again, nor is one whose call is another than it was.

    >>> layer, x = torch.nn.Linear(2, 1, bias=False), torch.ones(3, 2)
    >>> shared, found = SharedOutputs(), []
    >>> for column in torch.eye(2):
    ...     with torch.no_grad(), forward_ad.dual_level(), shared.begin():
    ...         weight = forward_ad.make_dual(layer.weight, column[None])
    ...         found.append(forward_ad.unpack_dual(F.linear(x, weight)).tangent.sum().item())
    >>> found, len(shared)
    ([3.0, 3.0], 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[_Output] = []
        self._at = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def begin(self) -> SharedOutputs:
        """The mode, for another pass."""
        self._at = 0
        return self

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in LAYERS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args, strict=False))
        rest, named = args[3:], {name: value for name, value in kwargs.items() if name not in _SIDES}
        x, w, b = (unpacked(given.get(name, kwargs.get(name))) for name in _SIDES)

        def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return func(x, w, b, *rest, **named)

        y = self._once((func, x[0].shape, w[0].data_ptr(), w[0].shape), layer, x[0], w[0], b[0])
        return with_tangent(y, layer, x, w, b)

    def _once(
        self, given: tuple[Any, ...], layer: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None
    ) -> Tensor:
        """The output, kept from an earlier pass unless it needs a graph of its own."""
        at, self._at = self._at, self._at + 1
        graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, b))
        if at < len(self._outputs) and not graph:
            known = self._outputs[at]
            if known.given == given and known.y._version == known.version:
                return known.y
        y = layer(x, w, b)
        kept = y.detach()
        self._outputs[at : at + 1] = [_Output(kept, kept._version, given)]
        return y


_SIDES = ("input", "weight", "bias")


_of_tangents: ContextVar[bool] = ContextVar("linnet_tangents", default=False)


@contextmanager
def _tangents() -> Iterator[None]:
    before = _of_tangents.set(True)
    try:
        yield
    finally:
        _of_tangents.reset(before)


def in_tangents() -> bool:
    """Whether what a layer is asked for is a part of its derivative."""
    return _of_tangents.get()


def unpacked(t: Tensor | None) -> tuple[Any, Tensor | None]:
    """A tensor and its tangent, None where it has none."""
    return (None, None) if t is None else tuple(forward_ad.unpack_dual(t))


def with_tangent(
    y: Tensor,
    layer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: tuple[Tensor, Tensor | None],
    w: tuple[Tensor, Tensor | None],
    b: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """A layer's output with its tangent, which has no graph, from its input, weight and bias with theirs."""
    with torch.no_grad(), _tangents():
        parts = [] if x[1] is None else [layer(x[1], w[0], None)]
        if w[1] is not None:
            parts.append(layer(x[0], w[1], b[1]))
        elif b[1] is not None:
            parts.append(layer(torch.zeros_like(x[0]), w[0], b[1]))
    if not parts:
        return y
    return forward_ad.make_dual(y, parts[0] if len(parts) == 1 else parts[0].add_(parts[1]))
