"""Which layer rule serves which parameter, and whether a network is a function that has a Jacobian by examples.

The first examples are run once with recording. Each use of a parameter is tried with the layouts that its rule allows,
until the per-example gradients agree with those of autodiff. A parameter for which they never agree, or that no rule
sees, is left to autodiff. The result is a `RuleAssignment`, which is tried on every batch that makes the same calls.

The same examples show what torch can do with the network, and whether its examples interact. All of this is a first
guess: `linnet.jacobian.proofs` compares every chunk with reverse mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice, product
from typing import Any, final

import torch
from torch import Tensor, nn

from linnet._common import Precision, forward_mode
from linnet.data import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.layers import RULES
from linnet.jacobian.layers.elementwise import Elementwise
from linnet.jacobian.layers.rule import LayoutError
from linnet.jacobian.proofs import PROBE, TOLERANCE, OtherBatches, RandomState, Truth, random_signs, rounds_to
from linnet.jacobian.recording import (
    HALF,
    NO_CHANGES,
    Changes,
    RecordedCall,
    Recording,
    ServedCall,
    build_blocks,
    gradients,
    record,
)
from linnet.network import CallGuard, FunctionalModel, address, checks, coarser


@dataclass
class RuleAssignment:
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

    kept: list[ServedCall | None]
    rest: tuple[str, ...]
    unused: tuple[str, ...]
    batched: bool = True
    rules: dict[str, str] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    changes: Changes = NO_CHANGES
    examples: int = 0
    streams: bool = True

    def without(self, names: Iterable[str]) -> RuleAssignment:
        """The same with further parameters left to autodiff."""
        gone = dict.fromkeys(names)
        kept: list[ServedCall | None] = []
        for k in self.kept:
            slots = {} if k is None else {r: s for r, s in k.slots.items() if s.name not in gone}
            kept.append(replace(k, slots=slots) if k is not None and slots else None)
        rest = tuple(dict.fromkeys((*self.rest, *gone)))
        unused = tuple(name for name in self.unused if name not in gone)
        rules = {name: rule for name, rule in self.rules.items() if name not in gone}
        return replace(self, kept=kept, rest=rest, unused=unused, rules=rules)


@dataclass
class Findings:
    """What passes of a network have shown; shared by the network around other weights.

    Attributes:
        coarsest: The floating dtype with the fewest digits that was seen in a pass.
        coarsest_gradient: The same among what depends on a selected parameter.
        changes: What was done to the calls of the last batch that was inspected.
        assignments: Which rules serve which calls, by the calls.
        last: Which rules served the last batch.
        abilities: Whether the network supports an ability with one or with several examples.
    """

    coarsest: torch.dtype
    coarsest_gradient: torch.dtype
    changes: Changes = NO_CHANGES
    assignments: dict[tuple[Any, ...], RuleAssignment] = field(default_factory=dict)
    last: RuleAssignment = field(default_factory=lambda: RuleAssignment([], (), ()))
    abilities: dict[tuple[str, int], bool] = field(default_factory=dict)


@final
class RuleSelection:
    """Records passes of a network, assigns rules to its calls, and checks the network on its examples.

    Args:
        network: The network.
        known: What earlier passes have shown; None if there were none.
    """

    def __init__(self, network: FunctionalModel, known: Findings | None = None) -> None:
        self.network = network
        self._known = Findings(network.model_dtype, network.model_dtype) if known is None else known

    def of(self, network: FunctionalModel) -> RuleSelection:
        """The same findings for the same network around other weights."""
        return RuleSelection(network, self._known)

    @property
    def last(self) -> RuleAssignment:
        """Which rules served the last batch."""
        return self._known.last

    @property
    def assignments(self) -> dict[tuple[Any, ...], RuleAssignment]:
        """Which rules serve which calls, by the calls."""
        return self._known.assignments

    @property
    def coarsest(self) -> torch.dtype:
        """The floating dtype with the fewest digits that was seen in a pass."""
        return self._known.coarsest

    def assign(self, batch: Batch) -> RuleAssignment:
        """Which rules serve a batch, checked on its first examples if its calls are new."""
        probe = batch.part(0, min(PROBE, batch.n))
        self.network.find_autocast(probe)
        with self.network.in_precision("highest"):
            recording = self.record(probe)
        return self.assign_to(recording, batch, of_first=True)

    @property
    def _rounds_to_half(self) -> bool:
        """Whether a part of the network runs in half precision."""
        return self._known.coarsest in HALF

    @property
    def differentiates_in_half(self) -> bool:
        """Whether a part of the network that depends on selected parameters runs in half precision.

        Gradients are rounded there in the same way whatever they are multiplied by, only if they are captured: forward
        mode would round tangents, and reverse mode sums over examples.
        """
        return self._known.coarsest_gradient in HALF

    @property
    def has_rest(self) -> bool:
        """Whether some parameters are left to autodiff."""
        return any(known.rest for known in self._known.assignments.values())

    def assign_to(self, recording: Recording, batch: Batch, *, of_first: bool = False) -> RuleAssignment:
        """Find the rules that serve a recorded pass; the rules of new calls are checked on the first examples.

        Args:
            recording: The pass.
            batch: The examples of the pass.
            of_first: Whether the pass was over the first examples alone, in full precision.
        """
        found = self._known.assignments.get(recording.signature)
        if found is None or (found.examples == 1 and batch.n > 1):
            probe = batch.part(0, min(PROBE, batch.n))
            with self.network.in_precision("highest"):
                small = recording if of_first else self.record(probe, recording.changes)
                found = replace(self._inspect(recording, small, probe), examples=probe.n)
            self._known.assignments[recording.signature] = found
            self._known.changes = found.changes
        self._known.last = found
        return found

    def _inspect(self, recording: Recording, small: Recording, probe: Batch) -> RuleAssignment:
        checks.check_outputs_finite(small.out, probe.start)
        self._check_independent(small, probe)
        self._check_linear(small)
        if small.signature != recording.signature:
            # The calls depend on the data beyond the first examples: trust no rule with them.
            return RuleAssignment([None] * len(recording.uses), tuple(self.network.theta), ())
        names = tuple(self.network.theta)
        found = inspect(small, self.network.row_dtype, names=names, rounds=self._known.coarsest)
        if found.failed and probe.n > 1:
            # Calls that all examples share have no gradient by example, until their output is repeated for each.
            for spread in (found.failed, *({i} for i in sorted(found.failed))):
                trial = self._spread(small, probe, found.changes.spread | spread)
                better = None
                if trial is not None:
                    better = inspect(trial, self.network.row_dtype, names=names, rounds=self._known.coarsest)
                if better is not None and len(better.rest) < len(found.rest):
                    found = better
                if not found.failed:
                    break
        warn_of(found, small.uses)
        return found

    def _spread(self, small: Recording, probe: Batch, numbers: frozenset[int]) -> Recording | None:
        """The recording with calls spread over the examples, if the model takes it and gives the same output."""
        try:
            trial = self.record(probe, replace(small.changes, spread=numbers))
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError, AssertionError):
            return None
        same = trial.signature == small.signature and trial.out.shape == small.out.shape
        return trial if same and checks.close(trial.out, small.out, self._tolerance()) else None

    def _check_linear(self, small: Recording) -> None:
        """Raise if gradients do not grow with their seed."""
        if not small.out.requires_grad or self.differentiates_in_half:
            return
        u = random_signs(*small.out.shape, seed=0, like=small.out.detach())
        truth = self.truth(small, u, "highest")
        others = [self.truth(small, 1024 * u, "highest").G / 1024, self.truth(small, u / 1024, "highest").G * 1024]
        if truth.judges and any(truth.different(g)[0] for g in others):
            raise checks.not_linear()

    def _check_independent(self, small: Recording, probe: Batch) -> None:
        """Raise if the outputs are random, or outputs or gradients change with the other examples of the batch."""
        n, tolerance, out = probe.n, self._tolerance(), small.out.detach()
        before = RandomState(self.network.device)
        with torch.no_grad():
            if not checks.close(self.network.forward({}, probe), out, tolerance):
                raise checks.random_output()
            if small.draws or before.moved():
                self._check_not_random(probe, out)
            plain = self.network.plain_outputs(probe)
            if plain is not None and not checks.close(plain, out, tolerance):
                raise checks.not_functional()
            self._check_cast(probe, out)
        # As many other examples beside each one, with which kernels round alike; or each one alone.
        beside = [[i // 2 for i in range(n)], [n - 1 - i // 2 for i in range(n)]]
        if self._needs_same_size("highest"):
            self._check_alone(probe, out)
        more = beside if self._needs_same_size("highest") else [[i] for i in range(n)]
        for index in ([*reversed(range(n))], *more) if n > 1 else ():
            if not self._check_apart(small, probe, index) and len(index) == 1:
                break  # the network takes no single example
        else:
            return
        for index in beside:
            self._check_apart(small, probe, index)

    def _check_cast(self, probe: Batch, out: Tensor) -> None:
        """Raise if the outputs of a cast network are not those of the network itself, up to the rounding of these."""
        net, before = self.network, self.network.cast_of
        if net.cast is None or before is None:
            return
        parts = (t.dtype for t in before.module.parameters() if t.is_floating_point())
        rounds = reduce(coarser, parts, self._known.coarsest)
        if rounds in HALF and net.has_convolutions and net.device.type == "cpu":
            return  # half-precision convolutions end the process on some CPUs
        own = net.uncast_outputs(probe)
        if own is None or not own.isfinite().all():
            return
        tolerance = 0.5 if rounds in HALF else TOLERANCE[rounds]  # half precision loses digits in every layer
        if own.shape != out.shape or not checks.close(own.to(out.dtype), out, tolerance):
            raise checks.cannot_cast(net.cast, "its outputs are not those of the network itself")

    def _check_alone(self, probe: Batch, out: Tensor) -> None:
        """Raise if the outputs of an example alone are far from those in a batch: they depend on the number there."""
        for i in range(probe.n) if probe.n > 1 else ():
            try:
                with torch.no_grad():
                    alone = self._of_some(probe, torch.tensor([i]))
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                return  # the network takes no single example
            if float((alone[0] - out[i]).abs().max()) > self._loose() * float(out.abs().max()):
                raise checks.examples_interact()

    def _loose(self, precision: Precision = "highest") -> float:
        """The largest relative disagreement where rounding moves an example across a kink, or through many layers."""
        return {torch.float64: TOLERANCE[torch.float64], torch.float32: 0.1}.get(
            rounds_to(self._known.coarsest, "bf16" if precision == "bf16" else "highest"), 0.5
        )

    def _needs_same_size(self, precision: Precision) -> bool:
        """Whether kernels round in another way with every number of examples: half precision, and float32 on a GPU."""
        on_gpu = self.network.device.type == "cuda" and self._known.coarsest != torch.float64
        return self._rounds_to_half or precision == "bf16" or on_gpu

    def _check_apart(self, small: Recording, probe: Batch, index: list[int]) -> bool:
        """Raise if outputs or gradients of some examples are others in another batch; False if that cannot be run."""
        apart, out = self.apart(probe, "highest", [torch.tensor(index)]), small.out.detach()
        if not apart.outputs or apart.truth is None:
            return False
        if not checks.close(apart.outputs[0][1], out[index], self._tolerance()):
            raise checks.examples_interact()
        truth = self.truth(small, apart.truth.U[..., 0].to(out), "highest")
        if truth.judges and apart.truth.different(truth.G)[0]:
            raise checks.examples_interact()
        return True

    def _of_some(self, batch: Batch, index: Tensor) -> Tensor:
        return self.network.forward({}, batch.take(index))

    def apart(
        self,
        batch: Batch,
        precision: Precision,
        indices: Sequence[Tensor] | None = None,
        *,
        few: int = PROBE,
        derivatives: bool = True,
    ) -> OtherBatches:
        """Examples of a chunk in other batches; see `linnet.network.parameter_guard` for what is refused on the way.

        A small chunk is cut in two at random, and two of its examples are also run alone. Of a large chunk a sixteenth
        is taken. Where kernels round in another way with every number of examples (see `_needs_same_size`), the
        examples that are taken fill a batch of the same size.

        Args:
            batch: The chunk.
            precision: Precision of the network's passes.
            indices: The batches, by places in the chunk; by default as above.
            few: Examples of a chunk that is small.
            derivatives: Whether gradients are wanted too.
        """
        n, alone = batch.n, []
        if indices is None:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(batch.start))
            few = max(few, n // 16)
            parts = [order[:few]] if n > few else [order[: n // 2], order[n // 2 :]] if n > 1 else [order]
            if not self._needs_same_size(precision):
                indices, alone = parts, [*order[:2, None]] if 2 < n <= few else []
            else:
                indices = [part[torch.arange(n) % len(part)] for part in parts]
        outputs: list[tuple[Tensor, Tensor]] = []
        truth: Truth | None = None
        draws = False
        with self.network.in_precision(precision):
            for index in (*(index.sort().values if n > PROBE else index for index in indices), *alone):
                try:
                    recording = self.record(batch.take(index), NO_CHANGES)
                except (checks.Refusal, torch.OutOfMemoryError):
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                    if n > PROBE and len(index) > 1:
                        raise
                    continue  # the network takes no single example, or its examples in one order only
                outputs.append((index, recording.out.detach()))
                draws = draws or recording.draws
                if derivatives and len(outputs) <= len(indices):
                    found = self._truth_of_some(recording, index, batch, precision)
                    truth = found if truth is None else replace(truth, U=truth.U + found.U, G=truth.G + found.G)
        return OtherBatches(outputs, truth, draws)

    def _truth_of_some(self, recording: Recording, index: Tensor, batch: Batch, precision: Precision) -> Truth:
        """``J^T u`` of some examples of a batch in a pass of their own, with u (n, c) zero for the others."""
        out = recording.out.detach()
        u = random_signs(*out.shape, seed=batch.start, like=out)
        order = index.argsort(stable=True)
        again = torch.zeros(len(index), dtype=torch.bool)
        again[order[1:]] = index[order[1:]] == index[order[:-1]]
        u[again.to(u.device)] = 0.0  # an example that fills the batch again does not count
        found = self.truth(recording, u, precision)
        U = found.U.new_zeros(batch.n, *found.U.shape[1:]).index_add_(0, index.to(u.device), found.U)
        return replace(found, U=U, tolerances=(self._loose(precision),))

    def _calls(self, current: frozenset[int]) -> CallGuard:
        """Checks of the calls in a pass in which the tensors ``current`` stand for the selected parameters."""
        net = self.network
        known = [(id(t), name) for name, t in (*net.originals, *net.former, *net.theta.items())]
        selected = {address(t): name for name, t in net.theta.items()}
        others = {key: name for key, name in known if key not in current}
        return CallGuard(others, selected, net.storages(), current)

    def check_outputs(
        self, batch: Batch, f: Tensor, precision: Precision, apart: OtherBatches, *, random: bool
    ) -> None:
        """Raise if the outputs of a chunk are random, or change with the other examples or with earlier passes.

        Args:
            batch: The chunk.
            f: Its outputs, (n, c).
            precision: Precision of the network's passes.
            apart: The outputs in other batches.
            random: Whether the network has drawn random numbers for this chunk.
        """
        if not f.isfinite().all():
            return  # another check says which example it is
        tolerance = self._tolerance(precision)
        with torch.no_grad(), self.network.in_precision(precision):
            if random:
                self._check_not_random(batch, f)
            for index, found in apart.outputs:
                if not self._alike(batch, f, index, found, tolerance):
                    self._check_state(batch, f, tolerance)
                    if not checks.close(self.network.forward({}, batch).to(f), f, tolerance):
                        raise checks.random_output()
                    raise checks.examples_interact(batch.start, batch.n)
            if apart.outputs:
                index, found = apart.outputs[0]
                self._check_state(batch.take(index), found, tolerance)

    def _check_state(self, batch: Batch, f: Tensor, tolerance: float) -> None:
        """Raise if earlier passes have changed the outputs of a batch."""
        if not self.network.stateful:
            return
        if not checks.close(self.network.as_at_first().forward({}, batch).to(f), f, tolerance):
            raise checks.keeps_state()

    def _alike(self, batch: Batch, f: Tensor, index: Tensor, found: Tensor, tolerance: float) -> bool:
        """Whether examples have the same outputs in another batch."""
        bound = tolerance * float(f.abs().max())

        def differ(index: Tensor, found: Tensor) -> Tensor:
            return ((found.to(f) - f[index.to(f.device)]).abs().amax(1) > bound).cpu()

        apart = differ(index, found)
        if not apart.any():
            return True
        if self._known.coarsest == torch.float64 or apart.float().mean() > 0.5:
            return False
        # A few examples may sit on a hard decision that rounds either way with another number of examples. With the
        # same number in the same places, rounding is the same, and other examples must not matter.
        doubtful = index[apart]
        beside = torch.full((batch.n,), int(doubtful[0]))
        beside[doubtful] = doubtful
        turned = torch.arange(batch.n).flip(0)
        same = not differ(beside, self._of_some(batch, beside))[doubtful].any()
        return same and not differ(turned, self._of_some(batch, turned)).any()

    def _check_not_random(self, batch: Batch, f: Tensor) -> None:
        """Raise if outputs change from draw to draw, in eight passes over at least 64 examples each."""
        index = torch.arange(max(batch.n, 64)) % batch.n
        bound = 1e3 * torch.finfo(self._known.coarsest).eps * float(f.abs().max())
        for _ in range(8):
            if float((self._of_some(batch, index).to(f) - f[index.to(f.device)]).abs().max()) > bound:
                raise checks.random_output()

    def truth(self, recording: Recording, u: Tensor, precision: Precision) -> Truth:
        """``J^T u`` of a recorded pass for one u (n, c), by reverse mode; the recording keeps its graph."""
        out, leaves, dtype = recording.out, recording.leaves, self.network.dtype
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if out.requires_grad:
            found = torch.autograd.grad(out, list(leaves.values()), u, True, allow_unused=True)
        parts = [
            t.new_zeros(t.numel(), dtype=dtype) if g is None else g.detach().to_dense().flatten().to(dtype)
            for t, g in zip(leaves.values(), found, strict=True)
        ]
        sizes = torch.stack([t.detach().float().norm() for t in (out, *leaves.values())])
        natural = sizes[0] / sizes[1:].norm().clamp(min=torch.finfo(torch.float32).tiny)
        bounds, eps = (self._tolerance(precision),), torch.finfo(rounds_to(self._known.coarsest, precision)).eps
        return Truth(u[..., None].to(dtype), torch.cat(parts)[:, None], self.network.layout, bounds, eps, natural)

    def judge(self, recording: Recording | None, batch: Batch, precision: Precision, apart: OtherBatches) -> Truth:
        """Gradients that a chunk must reproduce: of all its examples, and of some of them in other batches.

        Args:
            recording: A pass over the chunk; None to make one.
            batch: The chunk.
            precision: Precision of the network's passes.
            apart: The other passes.
        """
        with self.network.in_precision(precision):
            plain = self.record(batch, NO_CHANGES) if recording is None or recording.changes.spread else recording
            u = random_signs(*plain.out.shape, seed=batch.start + 1, like=plain.out.detach())
            whole = self.truth(plain, u, precision)
        return whole if apart.truth is None else whole.beside(apart.truth)

    def doubt(self, signature: tuple[Any, ...], names: Sequence[str]) -> None:
        """Make chunks with these calls in a slower way from now on: their columns of some parameters were wrong."""
        known = self._known.assignments[signature]
        ruled = [name for name in names if name in known.rules]
        if ruled and known.batched:  # the batched backward pass may be to blame
            self._known.assignments[signature] = self._known.last = replace(known, batched=False)
            return
        self.leave_to_autodiff(signature, names)

    def leave_to_autodiff(self, signature: tuple[Any, ...], names: Sequence[str]) -> RuleAssignment:
        """Make chunks with these calls by autodiff in some parameters from now on."""
        known = self._known.assignments[signature]
        changed = known.without(names)
        if ruled := [name for name in names if name in known.rules]:  # no rule serves the others
            _warn_fallback(ruled)
        self._known.assignments[signature] = self._known.last = changed
        return changed

    def deny(self, ability: str) -> None:
        """Never use an ability again: it gave other numbers than reverse mode, or failed."""
        for few in (1, 2):
            self._known.abilities[ability, few] = False

    def denied(self, ability: str) -> bool:
        """Whether an ability was denied."""
        return not self._known.abilities.get((ability, 1), True)

    def record(self, batch: Batch, changes: Changes | None = None, *, watched: bool = True) -> Recording:
        """A recorded pass; ``watched`` is False for examples whose pass was watched before."""
        if changes is None and self._known.changes.spread:
            return self._record_like_last(batch, watched=watched)
        recording = record(
            lambda theta: self.network.forward(theta, batch),
            self.network.theta,
            self.network.layout,
            RULES,
            n=batch.n,
            changes=self._known.changes if changes is None else changes,
            calls=self._calls if watched else None,
        )
        known = self._known
        asked = torch.is_autocast_enabled(self.network.device.type) and self.network.autocast.dtype is None
        if watched and not asked:  # a precision that was asked for is known anyway
            known.coarsest = coarser(known.coarsest, recording.coarsest)
            known.coarsest_gradient = coarser(known.coarsest_gradient, recording.coarsest_gradient)
        return recording

    def _tolerance(self, precision: Precision = "highest") -> float:
        """The largest relative disagreement between two passes that is rounding."""
        return TOLERANCE[rounds_to(self._known.coarsest, precision)]

    def _record_like_last(self, batch: Batch, *, watched: bool) -> Recording:
        """A recording with the last batch's changes, which number calls: dropped if this batch makes other calls."""
        try:
            recording = self.record(batch, self._known.changes, watched=watched)
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError):
            return self.record(batch, NO_CHANGES, watched=watched)
        found = self._known.assignments.get(recording.signature)
        known = found is not None and found.changes.spread == self._known.changes.spread
        return recording if known else self.record(batch, NO_CHANGES, watched=watched)

    def can(self, ability: str, batch: Batch) -> bool:
        """Whether the model supports "vectorize" (vmap over examples) or "forward_mode", tried once on an example.

        Networks that are differentiated in half precision use neither: tangents would be rounded to half precision.
        """
        if self.differentiates_in_half:
            return False
        few = min(2, batch.n)  # one example alone hides what goes wrong with several
        if (ability, few) not in self._known.abilities:
            self._known.abilities[ability, few] = self._try(ability, batch.part(0, few))
        return self._known.abilities[ability, few]

    def _try(self, ability: str, probe: Batch) -> bool:
        """Compare one random combination of the outputs with reverse mode."""
        if ability == "forward_mode" and _pads(self.network.module):
            return False  # torch's forward mode counts the padding row of an embedding, reverse mode does not

        theta, dtype, device = self.network.theta, self.network.dtype, self.network.device

        def outputs(theta: Mapping[str, Tensor], part: Batch) -> Tensor:
            with self.network.in_precision("highest"), forward_mode(self.network.module):
                return self.network.forward(theta, part)

        def combined(f: Tensor) -> Tensor:
            u = torch.linspace(0.5, 1.5, f.shape[1], dtype=dtype, device=device)
            return (f * u).sum(1, keepdim=True)

        def forward(theta: Mapping[str, Tensor], part: Batch) -> Tensor:
            return combined(outputs(theta, part))

        exact = autodiff.rows(forward, theta, probe, vectorize=False)
        try:
            if ability == "vectorize":
                found = autodiff.rows(forward, theta, probe, vectorize=True)
                pairs = [(found[name], exact[name]) for name in exact]
            else:
                tangent = {name: torch.cos(torch.arange(t.numel()).to(t)).view_as(t) for name, t in theta.items()}
                # Combined afterwards: a dual times a tensor without tangent makes torch import its compiler (1.5 s).
                product = combined(autodiff.jvp_of(lambda theta: outputs(theta, probe), theta, tangent))
                along = [(exact[name] * tangent[name]).reshape(probe.n, 1, -1).sum(2) for name in exact]
                pairs = [(product, torch.stack(along).sum(0))]
        except (RuntimeError, NotImplementedError, ValueError, AssertionError):
            return False
        return all(checks.close(a, b, self._tolerance()) for a, b in pairs)


def inspect(recording: Recording, dtype: torch.dtype, *, names: Sequence[str], rounds: torch.dtype) -> RuleAssignment:
    """Check every use of every parameter against autodiff, on the few examples of a recording.

    Args:
        recording: A forward pass of at most `PROBE` examples.
        dtype: Dtype of the columns.
        names: The selected parameters.
        rounds: The floating dtype with the fewest digits in the pass.
    """
    out, leaves, uses = recording.out, recording.leaves, recording.uses
    n = len(out)
    u = torch.rand(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = (u + 0.5).to(out)
    truth = _autodiff(out, leaves, u)
    unused = tuple(name for name in names if name not in truth)
    biggest = max((t.abs().max().item() for t in truth.values()), default=0.0)

    grads = gradients(out, uses, u[None], batched=False)
    trials = [_trials(use, g, leaves, n=n, dtype=dtype) for use, g in zip(uses, grads, strict=True)]
    kept: list[ServedCall | None] = [None] * len(uses)
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
                    rounds,
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
                kept[i] = ServedCall(layout, slots)
                for slot in slots.values():
                    seen = served.get(slot.name, "")
                    known = seen.split("+")
                    rule = uses[i].rule.name
                    served[slot.name] = seen if rule in known else f"{seen}+{rule}" if seen else rule
        failed |= {i for i in cluster if {slot.name for slot in uses[i].slots.values()} & (members - right)}
    rest = tuple(name for name in names if name in truth and name not in served)
    batched = _batches(out, [use for use, k in zip(uses, kept, strict=True) if k is not None])
    return RuleAssignment(kept, rest, unused, batched, served, frozenset(failed), recording.changes)


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
    use: RecordedCall, g: Tensor | None, leaves: Mapping[str, Tensor], *, n: int, dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Layout to the per-example gradients, name to (n, numel), that the rule gives with it."""
    trials: dict[str, dict[str, Tensor]] = {}
    if g is None:
        return trials
    slots = {slot.range: slot for slot in use.slots.values()}
    for layout in use.rule.layouts:
        rows = {s.name: g.new_zeros(n, leaves[s.name].numel(), dtype=dtype) for s in slots.values()}
        try:
            for block in build_blocks(use, ServedCall(layout, use.slots), g, n=n, dtype=dtype):
                for r, part in zip(block.ranges, block.expand().parts, strict=True):
                    start = r[0] - slots[r].origin
                    rows[slots[r].name][:, start : start + part.shape[-1]] += part[:, 0]
        except (LayoutError, RuntimeError):  # the examples do not lie that way
            continue
        trials[layout] = rows
    return trials


def _clusters(uses: Sequence[RecordedCall], grads: Sequence[Tensor | None]) -> list[list[int]]:
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


def _agrees(parts: Sequence[Tensor | None], truth: Tensor, rounds: torch.dtype, biggest: float) -> bool:
    found = [part for part in parts if part is not None]
    if not found:
        return False
    error = (sum(found[1:], start=found[0]) - truth).abs().max().item()
    bound = TOLERANCE[rounds] * max(truth.abs().max().item(), 1e-3 * biggest)
    return error <= max(bound, 2 * torch.finfo(rounds).eps * biggest)


def warn_of(structure: RuleAssignment, uses: Sequence[RecordedCall]) -> None:
    """Say which parameters fall back; elementwise uses are tried on the chance and may fail in silence."""
    tried = {
        slot.name
        for i in structure.failed
        if not isinstance(uses[i].rule, Elementwise)
        for slot in uses[i].slots.values()
    }
    if names := sorted(tried & set(structure.rest)):
        _warn_fallback(names)


def _warn_fallback(names: Iterable[str]) -> None:
    """Say that parameters are left to autodiff from now on."""
    warnings.warn(
        f"linnet's layer rules do not reproduce autodiff's per-example gradients of {', '.join(names)} (used in "
        "a way that mixes or reorders examples, or also outside the layer); these parameters are computed by "
        "autodiff, exactly but more slowly.",
        stacklevel=3,
    )


def _batches(out: Tensor, uses: Sequence[RecordedCall]) -> bool:
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


def _pads(model: nn.Module) -> bool:
    kinds = nn.Embedding | nn.EmbeddingBag
    return any(isinstance(m, kinds) and m.padding_idx is not None for m in model.modules())
