r"""``L^T J`` as a Jacobian of its own: a few combinations of the outputs, another for each example.

A network with c outputs takes c backward passes per example, ``L(x)^T f(x)`` with m columns takes m. For the Fisher
information from m sampled labels that is all there is to differentiate, however many classes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from linnet.data.batch import Batch, Source
from linnet.jacobian.chunk import NetworkChunks
from linnet.jacobian.jacobian import Jacobian
from linnet.network.checks import output_matrix, output_tensor
from linnet.network.copies import with_forward
from linnet.network.functional_model import FunctionalModel

NAME = "linnet_root"
"""The keyword under which the combinations travel with the inputs."""


def combined(J: Jacobian, root: Tensor) -> Jacobian:
    """``L^T J``, (n m, p), for L (n, c, m).

    Args:
        J: (n c, p).
        root: L.

    Example:
        >>> import torch
        >>> from linnet import linearize
        >>> J = linearize(nn.Linear(2, 5)).jacobian(torch.ones(3, 2))
        >>> combined(J, torch.ones(3, 5, 2)).shape
        (6, 15)
    """
    if root.ndim != 3 or tuple(root.shape[:2]) != (J.n, J.c):
        raise ValueError(f"combined needs a root of shape ({J.n}, {J.c}, m); got {tuple(root.shape)}.")
    lin = J.lin
    lin.check_unchanged()
    net = lin.network
    other = FunctionalModel.of(_combining(net.module, net.output), list(net.theta), convolutions=net.convolutions)
    other = replace(other, watch=net.watch, cast=net.cast)
    chunks = NetworkChunks(lin.with_network(other), _WithRoot(J._source, root.detach()), J.passes.settings.renewed())
    return Jacobian(chunks)


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
