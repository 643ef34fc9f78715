"""Kronecker factors of networks whose gradients do not fit memory: one backward pass for each column of the root.

A chunk as other passes make it holds the gradients (n, c, T, d) of all layers at once. The factor of the output
gradients is a sum over the columns h of ``L^T g``, so here a backward pass starts from one column of L, each layer adds
its gradient to its factor during the pass, and the gradient is freed. A chunk takes the memory of a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from linnet._common import Precision, bar, budget
from linnet.data import Batch
from linnet.jacobian.blocks.composite import SumBlock
from linnet.jacobian.blocks.convolution import LazyBlock
from linnet.jacobian.chunk import Chunk, NetworkChunks
from linnet.jacobian.kronecker import Kronecker
from linnet.jacobian.passes import Pass
from linnet.jacobian.plan import chunk_size, prepare
from linnet.jacobian.proofs import Disproved, OtherBatches, random_signs
from linnet.jacobian.recording import RecordedCall, Recording
from linnet.jacobian.rule_selection import RuleAssignment, build_blocks, streamed
from linnet.network import check_outputs_finite, examples_interact

SMALL = 256
"""Outputs up to which the curvature of an example is decomposed, so that columns of zeros take no backward pass."""


def streams(passes: Pass) -> bool:
    """Whether factors come by streams: the gradients of a chunk do not fit memory, and every layer can hand them over.

    Convolutions do not stream, because each column would make their patches again.
    """
    chunks, s = passes.chunks, passes.settings
    if not isinstance(chunks, NetworkChunks) or s.engine != "auto" or passes.lin.rules.denied("stream"):
        return False
    first, rules = chunks.first, passes.lin.rules
    if rules.has_rest or any(isinstance(block, LazyBlock | SumBlock) for block in first.blocks):
        return False
    size = passes.n if isinstance(s.batch_size, str) else min(s.batch_size, passes.n)
    return _can_stream(rules.last) and size * first.per_example > budget(s.memory, passes.lin.device)


def _can_stream(assignment: RuleAssignment) -> bool:
    """Whether all parameters have rules, and each of them one use."""
    names = Counter(slot.name for kept in assignment.kept if kept for slot in kept.slots.values())
    once = all(count == 1 for count in names.values())
    return once and not assignment.rest and not assignment.changes.spread


def add_streams(
    passes: Pass,
    factors: Kronecker,
    f: Tensor,
    gradient: Tensor,
    *,
    root: Callable[[Batch], Tensor],
    u: Callable[[Batch], Tensor],
) -> None:
    """Add the curvature of all examples of this rank to factors, the outputs and ``J^T u`` to tensors.

    Args:
        passes: Goes over the data.
        factors: Sums of the curvature.
        f: (n, c), takes the outputs.
        gradient: (p,), takes ``J^T u``.
        root: From a chunk with its outputs to L, (n, c) where it is diagonal, or (n, c, m).
        u: From a chunk with its outputs to (n, c).

    Raises:
        Disproved: Where a layer does not hand over its gradient, or hands over a wrong one.
    """
    chunks, s = passes.chunks, passes.settings
    assert isinstance(chunks, NetworkChunks)
    start, stop = passes.own
    size = _chunk_size(passes)
    s.used = size
    with bar(stop - start, "curvature", progress=s.progress) as tick:
        for batch in chunks.batches(size, start, stop):

            def make(apart: OtherBatches | None, batch: Batch = batch) -> Chunk:
                return _stream_chunk(passes, batch, factors, gradient, root=root, u=u, apart=apart)

            f[batch.start : batch.start + batch.n] = chunks._proved("stream", batch, make).f
            tick(batch.n)


def _chunk_size(passes: Pass) -> int:
    """Examples per chunk: their graph, and the gradient of the layer whose gradient is longest."""
    s, first = passes.settings, passes.chunks.first
    if isinstance(s.batch_size, int):
        size = min(s.batch_size, passes.n)
    else:
        longest = max((4 * f.size.T * f.size.groups * (f.size.dx + f.size.dg) for f in first.blocks), default=0)
        each = first.graph + longest * passes.lin.dtype.itemsize
        room = budget(s.memory, passes.lin.device)
        # Layers with many uses keep a GPU busy with few examples: larger chunks take memory, and save no time.
        size = chunk_size(passes.n, each, room // 4 if isinstance(s.memory, str) else room)
    return size if s.largest is None else min(size, s.largest)


def _stream_chunk(
    passes: Pass,
    batch: Batch,
    factors: Kronecker,
    gradient: Tensor,
    *,
    root: Callable[[Batch], Tensor],
    u: Callable[[Batch], Tensor],
    apart: OtherBatches | None,
) -> Chunk:
    """Adds the curvature of a chunk, which is compared with reverse mode where it is new (``apart`` is given)."""
    lin, precision = passes.lin, passes.settings.precision
    net, rules = lin.network, lin.rules
    with net.in_precision(precision):
        recording = rules.record(batch, watched=apart is not None)
        assignment = rules.assign_to(recording, batch)
        if not _can_stream(assignment) or not recording.out.requires_grad:
            raise Disproved("stream")
        out = recording.out
        f = out.detach().to(net.dtype)
        check_outputs_finite(f, batch.start, batch.positions)
        with_outputs = replace(batch, f=f)
        columns = _columns(root(with_outputs))
        seeds = torch.cat([columns, u(with_outputs)[None].to(columns)]).to(out)  # (m + 1, n, c), the last for J^T u
        signs = random_signs(*seeds.shape[:2], seed=batch.start + 1, like=out.detach())
        truth = None
        if apart is not None:
            truth = rules.truth(recording, torch.einsum("mn,mnc->nc", signs, seeds), precision)
            _check_apart(recording, batch, apart, passes, precision)
        found, part = (torch.zeros(lin.p, 1, dtype=net.dtype, device=net.device) for _ in range(2))
        kept = [served for served in assignment.kept if served]
        uses = [use for use, served in zip(recording.uses, assignment.kept, strict=True) if served]
        recording.uses.clear()
        for m, seed in enumerate(seeds):

            def take(i: int, use: RecordedCall, g: Tensor, m: int = m) -> None:
                with torch.autocast(net.device.type, enabled=False):
                    for block in build_blocks(use, kept[i], g, n=batch.n, dtype=net.dtype):
                        block = block.widen()
                        if m < len(columns):
                            factors.add([prepare(block, "sides", k=1)], None, 0, inputs=m == 0)
                        else:
                            block.rmatmul(torch.ones_like(signs[m], dtype=net.dtype)[:, None, None], part)
                        if truth is not None:
                            block.rmatmul(signs[m].to(net.dtype)[:, None, None], found)

            last = m + 1 == len(seeds)
            given: list[RecordedCall | None] = list(uses)
            if last:
                uses.clear()
            if not streamed(out, given, take, seed=seed, keep=not last):
                raise Disproved("stream")
    if truth is not None and truth.judges and truth.different(found)[0]:
        raise Disproved("stream")
    factors.n += batch.n
    gradient += part[:, 0]
    return Chunk(f, [])


def _check_apart(recording: Recording, batch: Batch, apart: OtherBatches, passes: Pass, precision: Precision) -> None:
    """Raise where gradients of some examples are others in another batch."""
    if apart.truth is None:
        return
    whole = passes.lin.rules.truth(recording, apart.truth.U[..., 0].to(recording.out), precision)
    if whole.judges and apart.truth.judges and apart.truth.different(whole.G)[0]:
        raise examples_interact(batch.start, batch.n)


def _columns(root: Tensor) -> Tensor:
    """Columns (m, n, c) with the same ``L L^T``, without those that are zero in all examples."""
    if root.ndim == 2:
        return torch.diag_embed(root).movedim(-1, 0)
    if root.shape[1] > SMALL:
        return root.movedim(-1, 0)
    values, vectors = torch.linalg.eigh((root @ root.mT).double())
    columns = vectors * values.clamp_min(0).sqrt()[:, None]
    count = columns.square().sum(1).amax(0)  # (c,), rising
    matter = count > torch.finfo(root.dtype).eps ** 2 * count.amax()
    return columns[:, :, matter].movedim(-1, 0)
