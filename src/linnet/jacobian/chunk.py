"""The Jacobian of a few examples in factors: by layer rules where they serve, by torch's autodiff elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common.torch_settings import Precision, forward_mode
from linnet.data.batch import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.blocks.autodiff import Autodiff
from linnet.jacobian.blocks.base import Factor, Recipe
from linnet.jacobian.blocks.composite import Lazy, combine
from linnet.jacobian.blocks.shared_outputs import Shared
from linnet.jacobian.inspection import Inspected
from linnet.jacobian.layers.rule import Call, LayoutError, Rule, Slot
from linnet.jacobian.proofs import Apart, Truth
from linnet.jacobian.recording import Recording, Use
from linnet.jacobian.rule_selection import Kept, Structure, factors_of, gradients, streamed, warn_fallback

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


class Chunks(Inspected):
    """What `linnet.jacobian.linearization.Linearization` is made of: a batch to the columns of its Jacobian."""

    def chunk(
        self,
        batch: Batch,
        precision: Precision,
        *,
        autodiff_only: bool = False,
        columns: bool = False,
        graph: bool = False,
        along: Tensor | None = None,
        prepare: Prepare = lambda factor: factor,
        prove: Apart | None = None,
    ) -> Chunk:
        """The Jacobian of a batch in factors.

        Args:
            batch: The examples, on the model's device.
            precision: Of the network's passes.
            autodiff_only: Use no layer rules.
            columns: Autodiff's products go column by column.
            graph: Without layer rules, keep the forward pass for the backward pass of a product.
            along: (p, k), what the factors will be multiplied by; with ``columns`` and ``graph`` the forward pass gives
                the product with its first column too.
            prepare: Applied to each factor as soon as it is there, so that what it was made of can be freed.
            prove: Some of the examples in other batches, if the columns are to be compared with reverse mode: those of
                autodiff are when they are used, those of layer rules by the caller, with the chunk's ``truth``.
        """
        if autodiff_only:
            leaves: dict[str, Tensor] = {
                name: nn.Parameter(t.detach(), requires_grad=graph) for name, t in self.theta.items()
            }
            known = shared = None
            with self._setting(precision), torch.set_grad_enabled(graph):
                if along is None or not along.shape[1] or not (columns and graph):
                    f = self.forward(leaves, batch)
                else:
                    views = self.layout.unflatten(along[:, 0].to(self.model_dtype))
                    # With memory of their own, in one call: forward mode copies views, one by one and zeros first.
                    tangent = dict(zip(views, torch._foreach_mul(list(views.values()), 1.0), strict=True))
                    shared = Shared() if along.shape[1] > 1 else None
                    with forward_mode(self._model), nullcontext() if shared is None else shared:
                        f, product = autodiff.dual(lambda theta: self.forward(theta, batch), leaves, tangent)
                    known = along, product.detach().to(self.dtype)
            kept = (f, leaves) if graph else None
            judge: Judge | None = None if prove is None else partial(self.judge, None, batch, precision, prove)
            names, c = tuple(self.theta), f.shape[1]
            seed = None if prove is None else prove.truth
            factor = self._autodiff(names, batch, c, precision, columns, judge, seed, kept, known, shared)
            return Chunk(f.detach().to(self.dtype), [prepare(factor)])
        prepare = self._without_autocast(prepare)
        with self._setting(precision):
            recording = self._record(batch, watched=prove is not None)
            structure = self._structure(recording, batch)
            if structure.changes.spread != recording.changes.spread:
                recording = self._record(batch, structure.changes)
            truth = None if prove is None else self.judge(recording, batch, precision, prove)
            signature = recording.signature
            f, factors = recording.out.detach().to(self.dtype), self._streamed(recording, structure, batch, prepare)
            if factors is None:
                if not recording.uses:  # emptied by a stream that broke off
                    recording = self._record(batch, structure.changes)
                factors, structure = self._captured(recording, structure, batch, prepare)
        if structure.rest:
            judge = None if truth is None else partial(_same, truth)
            seed = None if prove is None else prove.truth
            factors.append(prepare(self._autodiff(structure.rest, batch, f.shape[1], precision, columns, judge, seed)))
        return Chunk(f, factors, truth, signature)

    def _without_autocast(self, prepare: Prepare) -> Prepare:
        """The same outside of bf16's autocast: products of factors are float32."""

        def prepared(factor: Factor) -> Factor:
            with torch.autocast(self.device.type, enabled=False):
                return prepare(factor)

        return prepared

    def _streamed(
        self, recording: Recording, structure: Structure, batch: Batch, prepare: Prepare
    ) -> list[Factor] | None:
        """The factors of a chunk with one output, each prepared during the backward pass; None if that cannot be."""
        if not structure.streams or recording.out.shape[1] > 1 or not recording.out.requires_grad:
            return None
        if self.device.type != "cpu":  # a GPU would wait for Python between the layers
            return None
        uses: list[Use | None] = [use for use, k in zip(recording.uses, structure.kept, strict=True) if k]
        kept = [k for k in structure.kept if k]
        names = Counter(slot.name for k in kept for slot in k.slots.values())
        factors: list[Factor] = []
        shared: list[Factor] = []

        def take(i: int, use: Use, g: Tensor) -> None:
            found = _factors(use, kept[i], g, n=batch.n, dtype=self.dtype)
            if any(names[slot.name] > 1 for slot in kept[i].slots.values()):
                shared.extend(found)
            else:
                factors.extend(prepare(factor) for factor in found)

        recording.uses.clear()
        try:
            structure.streams = streamed(recording.out, uses, take)
        except LayoutError:
            structure.streams = False
        if not structure.streams:
            return None
        return factors + [prepare(factor) for factor in combine(shared)]

    def _captured(
        self, recording: Recording, structure: Structure, batch: Batch, prepare: Prepare
    ) -> tuple[list[Factor], Structure]:
        out = recording.out
        pairs = [(use, kept) for use, kept in zip(recording.uses, structure.kept, strict=True) if kept]
        seeds = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, len(out), -1)
        grads = gradients(out, [use for use, _ in pairs], seeds, batched=structure.batched)
        factors: list[Factor] = []
        for (use, kept), g in zip(pairs, grads, strict=True):
            if g is None:
                continue
            try:
                factors += _factors(use, kept, g, n=batch.n, dtype=self.dtype)
            except LayoutError:  # another number of rows than examples: data-dependent routing
                names = [slot.name for slot in kept.slots.values()]
                warn_fallback(names)
                return self._demoted(recording, structure, names, batch, prepare)
        return [prepare(factor) for factor in combine(factors)], structure

    def _demoted(
        self, recording: Recording, structure: Structure, names: list[str], batch: Batch, prepare: Prepare
    ) -> tuple[list[Factor], Structure]:
        """Leave parameters to autodiff from now on, whose use depends on the data."""
        structure = self._structures[recording.signature] = self.last_structure = structure.without(names)
        return self._captured(recording, structure, batch, prepare)

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
            with self._setting(precision), forward_mode(self._model), within:
                return self.forward(theta, part)

        return Autodiff(
            forward,
            self.theta,
            names,
            self.layout,
            batch,
            c=c,
            dtype=self.dtype,
            vectorize=lambda: self.can("vectorize", batch),
            columns=columns and self.can("forward_mode", batch),
            judge=judge,
            seed=seed,
            deny=self.deny,
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
