"""Which layer rule is trusted with which parameter: decided on a few examples, against autodiff.

The first examples are run once with recording. Each use of a parameter is tried with the layouts its rule allows,
until the per-example gradients agree with autodiff's; a parameter for which they never do, or that no rule sees,
is left to autodiff. The result, a `Structure`, is tried on every batch that makes the same calls;
`linnet.jacobian.proofs` says whether it holds there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import torch
from torch import Tensor

from linnet.jacobian.blocks.base import Factor
from linnet.jacobian.layers.rule import LayoutError, Slot, arrange
from linnet.jacobian.layers.rules import Elementwise
from linnet.jacobian.proofs import TOLERANCE
from linnet.jacobian.recording import NO_CHANGES, Changes, Recording, Use

PROBE = 3
"""Examples on which the rules are checked."""


@dataclass(frozen=True)
class Kept:
    """A use that its rule serves: where its examples lie, and for which parameters."""

    layout: str
    slots: dict[str, Slot]


@dataclass
class Structure:
    """Who serves which parameter.

    Attributes:
        kept: Per use, what is kept of it; None where it is not needed.
        rest: Parameters left to autodiff.
        unused: Parameters that the output does not depend on.
        batched: Whether the gradients of all outputs can be taken in one batched backward pass.
        rules: Parameter to the names of the rules that serve it, for the plan.
        failed: Numbers of the calls whose rule did not agree with autodiff.
        changes: What has to be done to the calls.
        examples: How many examples it was checked on; one example alone does not show where examples lie.
        streams: Whether one backward pass reaches every use (see `streamed`); False once it has not.
    """

    kept: list[Kept | None]
    rest: tuple[str, ...]
    unused: tuple[str, ...]
    batched: bool = True
    rules: dict[str, str] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    changes: Changes = NO_CHANGES
    examples: int = 0
    streams: bool = True

    def without(self, names: Iterable[str]) -> Structure:
        """The same with further parameters left to autodiff."""
        gone = dict.fromkeys(names)
        kept: list[Kept | None] = []
        for k in self.kept:
            slots = {} if k is None else {r: s for r, s in k.slots.items() if s.name not in gone}
            kept.append(replace(k, slots=slots) if k is not None and slots else None)
        rest = tuple(dict.fromkeys((*self.rest, *gone)))
        unused = tuple(name for name in self.unused if name not in gone)
        rules = {name: rule for name, rule in self.rules.items() if name not in gone}
        return replace(self, kept=kept, rest=rest, unused=unused, rules=rules)


def factors_of(use: Use, kept: Kept, g: Tensor, *, n: int, dtype: torch.dtype) -> list[Factor]:
    """Columns of the Jacobian from one use.

    Args:
        use: The call.
        kept: Its layout and parameters.
        g: Gradients of its output, (c, *output shape).
        n: Examples.
        dtype: Dtype of the columns.
    """
    x = use.call.x
    if x is not None and x.is_floating_point():
        x = use.rule.prepare(use.call, x.to(dtype))
    x = None if x is None else arrange(x, kept.layout, n)
    g = arrange(g.to(dtype).movedim(0, -1), kept.layout, n).movedim(-1, 1)
    return use.rule.factors(use.call, x, g, kept.slots, kept.layout)


def gradients(out: Tensor, uses: Sequence[Use], seeds: Tensor, *, batched: bool) -> list[Tensor | None]:
    """Gradients of ``sum(seeds[s] * out)`` at the output of each use, stacked over s; None where there is none.

    Args:
        out: (n, c) with its graph.
        uses: The calls.
        seeds: (s, n, c).
        batched: Take all s in one batched backward pass.
    """
    if not uses or not out.requires_grad:
        return [None] * len(uses)
    edges = [use.edge for use in uses]
    if batched and len(seeds) > 1:
        return list(torch.autograd.grad(out, edges, seeds, True, is_grads_batched=True, allow_unused=True))
    found = [torch.autograd.grad(out, edges, seed, True, allow_unused=True) for seed in seeds]
    stacked: list[Tensor | None] = []
    for grads in zip(*found, strict=True):
        some = next((g for g in grads if g is not None), None)
        if some is None:
            stacked.append(None)
        elif len(grads) == 1:
            stacked.append(some[None])
        else:
            stacked.append(torch.stack([torch.zeros_like(some) if g is None else g for g in grads]))
    return stacked


def streamed(out: Tensor, uses: list[Use | None], take: Callable[[int, Use, Tensor], None]) -> bool:
    """One backward pass of the summed output that hands over each gradient when it is known, and keeps none.

    The graph is freed on the way, and so is each use; a chunk then needs about the memory of a training step.

    Args:
        out: (n, 1) with its graph.
        uses: The calls; emptied.
        take: Called with the number of a use in the list, the use, and the gradient (1, *output shape) at its output.

    Returns:
        Whether every use was reached; if not, the results must be made anew without streaming.
    """
    reached = 0

    def hand_over(i: int, g: Tensor | None) -> None:
        nonlocal reached
        use = uses[i]
        if g is not None and use is not None:
            uses[i] = None
            reached += 1
            with torch.no_grad():
                take(i, use, g[None])

    def hook(i: int, number: int) -> Callable[[tuple[Tensor, ...]], None]:
        return lambda grads: hand_over(i, grads[number])

    # The pass ends at the sources, whose own gradients are its result; on the way to them lie all other uses.
    sources = [(i, use.edge) for i, use in enumerate(uses) if use is not None and use.source]
    handles = [
        use.edge.node.register_prehook(hook(i, use.edge.output_nr))
        for i, use in enumerate(uses)
        if use is not None and not use.source
    ]
    try:
        if sources:
            found = torch.autograd.grad(out, [edge for _, edge in sources], torch.ones_like(out), allow_unused=True)
            for (i, _), g in zip(sources, found, strict=True):
                hand_over(i, g)
    finally:
        for handle in handles:
            handle.remove()
    return reached == len(uses)


def inspect(recording: Recording, dtype: torch.dtype, *, names: Sequence[str]) -> Structure:
    """Check every use of every parameter against autodiff, on the few examples of a recording.

    Args:
        recording: A forward pass of at most `PROBE` examples.
        dtype: Dtype of the columns.
        names: The selected parameters.
    """
    out, leaves, uses = recording.out, recording.leaves, recording.uses
    n = len(out)
    u = torch.rand(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = (u + 0.5).to(out)
    truth = _autodiff(out, leaves, u)
    unused = tuple(name for name in names if name not in truth)
    biggest = max((t.abs().max().item() for t in truth.values()), default=0.0)
    model_dtype = next(iter(leaves.values())).dtype

    grads = gradients(out, uses, u[None], batched=False)
    trials = [_trials(use, g, leaves, n=n, dtype=dtype) for use, g in zip(uses, grads, strict=True)]
    kept: list[Kept | None] = [None] * len(uses)
    served: dict[str, str] = {}
    failed: set[int] = set()
    for cluster in _clusters(uses, grads):
        members = {slot.name for i in cluster for slot in uses[i].slots.values() if slot.name in truth}
        best: tuple[set[str], Sequence[str | None]] = (set(), [None] * len(cluster))
        options: list[list[str | None]] = [[*trials[i]] or [None] for i in cluster]
        for choice in _choices(options):
            right = {
                name
                for name in members
                if _agrees(
                    [trials[i][c].get(name) for i, c in zip(cluster, choice, strict=True) if c is not None],
                    truth[name].to(dtype),
                    TOLERANCE[model_dtype],
                    biggest,
                )
            }
            if len(right) > len(best[0]):
                best = (right, choice)
            if right == members:
                break
        right, choice = best
        for i, layout in zip(cluster, choice, strict=True):
            slots = {role: slot for role, slot in uses[i].slots.items() if slot.name in right}
            if layout is not None and slots:
                kept[i] = Kept(layout, slots)
                for slot in slots.values():
                    seen = served.get(slot.name, "")
                    known = seen.split("+")
                    rule = uses[i].rule.name
                    served[slot.name] = seen if rule in known else f"{seen}+{rule}" if seen else rule
        failed |= {i for i in cluster if {slot.name for slot in uses[i].slots.values()} & (members - right)}
    rest = tuple(name for name in names if name in truth and name not in served)
    batched = _batches(out, [use for use, k in zip(uses, kept, strict=True) if k is not None])
    return Structure(kept, rest, unused, batched, served, frozenset(failed), recording.changes)


def _autodiff(out: Tensor, leaves: Mapping[str, Tensor], u: Tensor) -> dict[str, Tensor]:
    """Per-example gradients of ``sum(u * out)``, name to (n, numel), for the parameters that out depends on."""
    if not out.requires_grad:
        return {}
    rows: list[dict[str, Tensor]] = []
    for i in range(len(out)):
        seed = torch.zeros_like(u)
        seed[i] = u[i]
        grads = torch.autograd.grad(out, list(leaves.values()), seed, True, allow_unused=True)
        rows.append({k: g.to_dense() for k, g in zip(leaves, grads, strict=True) if g is not None})
    return {name: torch.stack([row[name].flatten() for row in rows]) for name in rows[0]}


def _trials(
    use: Use, g: Tensor | None, leaves: Mapping[str, Tensor], *, n: int, dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Layout to the per-example gradients, name to (n, numel), that the rule gives with it."""
    trials: dict[str, dict[str, Tensor]] = {}
    if g is None:
        return trials
    slots = {slot.range: slot for slot in use.slots.values()}
    for layout in use.rule.layouts:
        rows = {s.name: g.new_zeros(n, leaves[s.name].numel(), dtype=dtype) for s in slots.values()}
        try:
            for factor in factors_of(use, Kept(layout, use.slots), g, n=n, dtype=dtype):
                for r, part in zip(factor.ranges, factor.expand().parts, strict=True):
                    start = r[0] - slots[r].origin
                    rows[slots[r].name][:, start : start + part.shape[-1]] += part[:, 0]
        except (LayoutError, RuntimeError):  # the examples do not lie that way
            continue
        trials[layout] = rows
    return trials


def _clusters(uses: Sequence[Use], grads: Sequence[Tensor | None]) -> list[list[int]]:
    """Numbers of the uses that share parameters, directly or through others."""
    clusters: list[tuple[set[str], list[int]]] = []
    for i, (use, g) in enumerate(zip(uses, grads, strict=True)):
        if g is None:
            continue
        names, members = {slot.name for slot in use.slots.values()}, [i]
        for other in [c for c in clusters if c[0] & names]:
            clusters.remove(other)
            names, members = names | other[0], other[1] + members
        clusters.append((names, members))
    return [sorted(members) for _, members in clusters]


def _choices(options: Sequence[Sequence[str | None]]) -> Iterable[Sequence[str | None]]:
    """Layouts for all uses of a cluster: the same for all first, then mixtures, within reason."""
    shared = [layout for layout in options[0] if all(layout in o for o in options)]
    yield from ([layout] * len(options) for layout in shared)
    yield from islice(product(*options), 64)


def _agrees(parts: Sequence[Tensor | None], truth: Tensor, tolerance: float, biggest: float) -> bool:
    found = [part for part in parts if part is not None]
    if not found:
        return False
    error = (sum(found[1:], start=found[0]) - truth).abs().max().item()
    return error <= tolerance * max(truth.abs().max().item(), 1e-3 * biggest)


def warn_of(structure: Structure, uses: Sequence[Use]) -> None:
    """Say which parameters fall back; elementwise uses are tried on the chance and may fail in silence."""
    tried = {
        slot.name
        for i in structure.failed
        if not isinstance(uses[i].rule, Elementwise)
        for slot in uses[i].slots.values()
    }
    if names := sorted(tried & set(structure.rest)):
        warn_fallback(names)


def warn_fallback(names: Iterable[str]) -> None:
    """Say that parameters are left to autodiff from now on."""
    warnings.warn(
        f"linnet's layer rules do not reproduce autodiff's per-example gradients of {', '.join(names)} (used in "
        "a way that mixes or reorders examples, or also outside the layer); these parameters are computed by "
        "autodiff, exactly but more slowly.",
        stacklevel=3,
    )


def _batches(out: Tensor, uses: Sequence[Use]) -> bool:
    """Whether a batched backward pass works and needs no slow fallback."""
    if not uses or not out.requires_grad or out.shape[1] == 1:
        return True
    seeds = torch.stack([torch.ones_like(out), -torch.ones_like(out)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            gradients(out, uses, seeds, batched=True)
        except (RuntimeError, UserWarning, NotImplementedError):
            return False
    return True
