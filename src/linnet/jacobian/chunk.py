"""The Jacobian of a few examples in factors: by layer rules where they serve, by torch's autodiff elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from linnet._common.torch_settings import Precision, forward_mode
from linnet.data.batch import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.blocks.autodiff import Autodiff
from linnet.jacobian.blocks.base import Factor, Recipe
from linnet.jacobian.blocks.composite import Lazy, combine
from linnet.jacobian.blocks.shared_outputs import Shared
from linnet.jacobian.layers.rule import Call, LayoutError, Rule, Slot
from linnet.jacobian.proofs import Apart, Truth
from linnet.jacobian.recording import Recording, Use
from linnet.jacobian.rule_selection import (
    Kept,
    RuleAssignment,
    RuleSelection,
    factors_of,
    gradients,
    streamed,
    warn_fallback,
)
from linnet.network.functional_model import FunctionalModel

NOTHING = nullcontext()

Judge = Callable[[], Truth]
"""Gives what reverse mode says of a chunk."""

Prepare = Callable[[Factor], Factor]
"""From a factor to the form that it is wanted in."""


@dataclass(frozen=True)
class Chunk:
    """The Jacobian of a few examples, in factors.

    Attributes:
        f: Outputs (n, c).
        factors: Columns; those that are missing are zero.
        truth: Gradients that the columns by layer rules must reproduce; None if the chunk is not to be proved.
        signature: The calls that the network made.
    """

    f: Tensor
    factors: list[Factor]
    truth: Truth | None = None
    signature: tuple[Any, ...] = ()


@final
class ChunkBuilder:
    """Turns a batch into the columns of its Jacobian.

    Args:
        network: The network.
        rules: Which layer rules serve the calls of the network.
    """

    def __init__(self, network: FunctionalModel, rules: RuleSelection) -> None:
        self.network, self.rules = network, rules

    def build_by_autodiff(
        self,
        batch: Batch,
        precision: Precision,
        *,
        columns: bool = False,
        graph: bool = False,
        along: Tensor | None = None,
        prepare: Prepare = lambda factor: factor,
        prove: Apart | None = None,
    ) -> Chunk:
        """The Jacobian of a batch by torch's autodiff alone.

        Args:
            batch: The examples, on the device of the network.
            precision: Precision of the network's passes.
            columns: Products go column by column.
            graph: Keep the forward pass for the backward pass of a product.
            along: (p, k), what the factors will be multiplied by; with ``columns`` and ``graph`` the forward pass gives
                the product with its first column too.
            prepare: Applied to the factor.
            prove: Some of the examples in other batches, if the columns are to be compared with reverse mode. The
                columns are compared when they are used.
        """
        net = self.network
        leaves: dict[str, Tensor] = {
            name: nn.Parameter(t.detach(), requires_grad=graph) for name, t in net.theta.items()
        }
        known = shared = None
        with net.in_precision(precision), torch.enable_grad() if graph else torch.no_grad():
            if along is None or not along.shape[1] or not (columns and graph):
                f = net.forward(leaves, batch)
            else:
                views = net.layout.unflatten(along[:, 0].to(net.model_dtype))
                # With memory of their own, in one call: forward mode copies views, one by one and zeros first.
                tangent = dict(zip(views, torch._foreach_mul(list(views.values()), 1.0), strict=True))
                shared = Shared() if along.shape[1] > 1 else None
                with forward_mode(net.module), nullcontext() if shared is None else shared:
                    f, product = autodiff.dual(lambda theta: net.forward(theta, batch), leaves, tangent)
                known = along, product.detach().to(net.dtype)
        kept = (f, leaves) if graph else None
        judge: Judge | None = None if prove is None else partial(self.rules.judge, None, batch, precision, prove)
        names, c = tuple(net.theta), f.shape[1]
        seed = None if prove is None else prove.truth
        factor = self._autodiff(names, batch, c, precision, columns, judge, seed, kept, known, shared)
        return Chunk(f.detach().to(net.dtype), [prepare(factor)])

    def build_by_rules(
        self,
        batch: Batch,
        precision: Precision,
        *,
        columns: bool = False,
        prepare: Prepare = lambda factor: factor,
        prove: Apart | None = None,
    ) -> Chunk:
        """The Jacobian of a batch by layer rules, and by autodiff where no rule serves.

        Args:
            batch: The examples, on the device of the network.
            precision: Precision of the network's passes.
            columns: Products of autodiff go column by column.
            prepare: Applied to each factor as soon as it is there, so that what it was made of can be freed.
            prove: Some of the examples in other batches, if the columns are to be compared with reverse mode. The
                columns of autodiff are compared when they are used, the columns of layer rules by the caller, with the
                chunk's ``truth``.
        """
        prepare = self._without_autocast(prepare)
        with self.network.in_precision(precision):
            recording = self.rules.record(batch, watched=prove is not None)
            assignment = self.rules.assign_to(recording, batch)
            if assignment.changes.spread != recording.changes.spread:
                recording = self.rules.record(batch, assignment.changes)
            truth = None if prove is None else self.rules.judge(recording, batch, precision, prove)
            signature = recording.signature
            f = recording.out.detach().to(self.network.dtype)
            factors = self._streamed(recording, assignment, batch, prepare)
            if factors is None:
                if not recording.uses:  # emptied by a stream that broke off
                    recording = self.rules.record(batch, assignment.changes)
                factors, assignment = self._captured(recording, assignment, batch, prepare)
        if assignment.rest:
            judge = None if truth is None else partial(_same, truth)
            seed = None if prove is None else prove.truth
            factors.append(prepare(self._autodiff(assignment.rest, batch, f.shape[1], precision, columns, judge, seed)))
        return Chunk(f, factors, truth, signature)

    def _without_autocast(self, prepare: Prepare) -> Prepare:
        """The same outside of bf16's autocast: products of factors are float32."""

        def prepared(factor: Factor) -> Factor:
            with torch.autocast(self.network.device.type, enabled=False):
                return prepare(factor)

        return prepared

    def _streamed(
        self, recording: Recording, assignment: RuleAssignment, batch: Batch, prepare: Prepare
    ) -> list[Factor] | None:
        """The factors of a chunk with one output, each prepared during the backward pass; None if that cannot be."""
        if not assignment.streams or recording.out.shape[1] > 1 or not recording.out.requires_grad:
            return None
        if self.network.device.type != "cpu":  # a GPU would wait for Python between the layers
            return None
        uses: list[Use | None] = [use for use, k in zip(recording.uses, assignment.kept, strict=True) if k]
        kept = [k for k in assignment.kept if k]
        names = Counter(slot.name for k in kept for slot in k.slots.values())
        factors: list[Factor] = []
        shared: list[Factor] = []

        def take(i: int, use: Use, g: Tensor) -> None:
            found = _factors(use, kept[i], g, n=batch.n, dtype=self.network.dtype)
            if any(names[slot.name] > 1 for slot in kept[i].slots.values()):
                shared.extend(found)
            else:
                factors.extend(prepare(factor) for factor in found)

        recording.uses.clear()
        try:
            assignment.streams = streamed(recording.out, uses, take)
        except LayoutError:
            assignment.streams = False
        if not assignment.streams:
            return None
        return factors + [prepare(factor) for factor in combine(shared)]

    def _captured(
        self, recording: Recording, assignment: RuleAssignment, batch: Batch, prepare: Prepare
    ) -> tuple[list[Factor], RuleAssignment]:
        out = recording.out
        pairs = [(use, kept) for use, kept in zip(recording.uses, assignment.kept, strict=True) if kept]
        seeds = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, len(out), -1)
        grads = gradients(out, [use for use, _ in pairs], seeds, batched=assignment.batched)
        factors: list[Factor] = []
        for (use, kept), g in zip(pairs, grads, strict=True):
            if g is None:
                continue
            try:
                factors += _factors(use, kept, g, n=batch.n, dtype=self.network.dtype)
            except LayoutError:  # another number of rows than examples: data-dependent routing
                names = [slot.name for slot in kept.slots.values()]
                warn_fallback(names)
                fewer = self.rules.leave_to_autodiff(recording.signature, names)
                return self._captured(recording, fewer, batch, prepare)
        return [prepare(factor) for factor in combine(factors)], assignment

    def _autodiff(
        self,
        names: tuple[str, ...],
        batch: Batch,
        c: int,
        precision: Precision,
        columns: bool,
        judge: Judge | None = None,
        seed: Truth | None = None,
        graph: tuple[Tensor, Mapping[str, Tensor]] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        shared: Shared | None = None,
    ) -> Autodiff:
        def forward(
            theta: Mapping[str, Tensor], part: Batch, within: AbstractContextManager[object] = NOTHING
        ) -> Tensor:
            with self.network.in_precision(precision), forward_mode(self.network.module), within:
                return self.network.forward(theta, part)

        return Autodiff(
            forward,
            self.network.theta,
            names,
            self.network.layout,
            batch,
            c=c,
            dtype=self.network.dtype,
            vectorize=lambda: self.rules.can("vectorize", batch),
            columns=columns and self.rules.can("forward_mode", batch),
            judge=judge,
            seed=seed,
            deny=self.rules.deny,
            graph=graph,
            known=known,
            shared=shared,
        )


def _same(truth: Truth) -> Truth:
    return truth


def _factors(use: Use, kept: Kept, g: Tensor, *, n: int, dtype: torch.dtype) -> list[Factor]:
    """Columns of the Jacobian from one use, each with its recipe."""
    found = factors_of(use, kept, g, n=n, dtype=dtype)
    for factor in found:
        if isinstance(factor, Lazy):
            slots = {role: slot for role, slot in kept.slots.items() if slot.range in factor.ranges}
            factor.again = Recipe(_lazy_again, (use.rule, use.call.conf, slots, kept.layout), factor.last)
    return found


def _lazy_again(
    tensors: Sequence[Tensor], rule: Rule, conf: dict[str, Any], slots: Mapping[str, Slot], layout: str
) -> Factor:
    x, g = tensors
    return rule.factors(Call(None, {}, conf), x, g, slots, layout)[0]
