"""Checks of a network on its first few examples: which rules serve its calls, and what torch can do with it.

What these checks find is a first guess: `linnet.jacobian.proofs` compares every chunk with reverse mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import messages
from linnet._common.torch_settings import Precision, forward_mode
from linnet.data.batch import Batch
from linnet.jacobian.blocks import autodiff
from linnet.jacobian.proofs import TOLERANCE, Apart, RandomState, Truth, random_signs, tolerance_of
from linnet.jacobian.recording import NO_CHANGES, Changes, Recording, record
from linnet.jacobian.rule_selection import PROBE, Structure, inspect, warn_fallback, warn_of
from linnet.network.functional_model import Functional, Output
from linnet.network.parameter_guard import DIGITS, Calls, address
from linnet.network.parameters import Params


class Inspected(Functional):
    """What `linnet.jacobian.linearization.Linearization` is made of: recorded forward passes, and what they showed.

    Attributes:
        last_structure: Which rules served the last batch.
    """

    def __init__(self, model: nn.Module, params: Params = None, *, output: Output | None = None) -> None:
        super().__init__(model, params, output=output)
        self._changes = NO_CHANGES
        self._structures: dict[tuple[Any, ...], Structure] = {}
        self.last_structure = Structure([], (), ())
        self._abilities: dict[tuple[str, int], bool] = {}
        self._coarsest = self.model_dtype  # the floating dtype with the fewest digits that was seen in a pass

    def structure(self, batch: Batch) -> Structure:
        """Which rules serve a batch, checked on its first examples if its calls are new."""
        probe = batch.part(0, min(PROBE, batch.n))
        with self._setting("highest"):
            recording = self._record(probe)
        return self._structure(recording, batch)

    @property
    def has_rest(self) -> bool:
        """Whether some parameters are left to autodiff."""
        return any(structure.rest for structure in self._structures.values())

    def _structure(self, recording: Recording, batch: Batch) -> Structure:
        found = self._structures.get(recording.signature)
        if found is None or (found.examples == 1 and batch.n > 1):
            probe = batch.part(0, min(PROBE, batch.n))
            with self._setting("highest"):
                found = replace(self._inspected(recording, probe), examples=probe.n)
            self._structures[recording.signature] = found
            self._changes = found.changes
        self.last_structure = found
        return found

    def _inspected(self, recording: Recording, probe: Batch) -> Structure:
        small = self._record(probe, recording.changes)
        messages.check_outputs_finite(small.out, probe.start)
        self._check_independent(small, probe)
        self._check_linear(small)
        if small.signature != recording.signature:
            # The calls depend on the data beyond the first examples: trust no rule with them.
            return Structure([None] * len(recording.uses), tuple(self.theta), ())
        names = tuple(self.theta)
        found = inspect(small, self.dtype, names=names)
        if found.failed and probe.n > 1:
            # Calls that all examples share have no gradient by example, until their output is repeated for each.
            for spread in (found.failed, *({i} for i in sorted(found.failed))):
                trial = self._spread(small, probe, found.changes.spread | spread)
                better = None if trial is None else inspect(trial, self.dtype, names=names)
                if better is not None and len(better.rest) < len(found.rest):
                    found = better
                if not found.failed:
                    break
        warn_of(found, small.uses)
        return found

    def _spread(self, small: Recording, probe: Batch, numbers: frozenset[int]) -> Recording | None:
        """The recording with calls spread over the examples, if the model takes it and gives the same output."""
        try:
            trial = self._record(probe, replace(small.changes, spread=numbers))
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError, AssertionError):
            return None
        same = trial.signature == small.signature and trial.out.shape == small.out.shape
        return trial if same and messages.close(trial.out, small.out, TOLERANCE[self.model_dtype]) else None

    def _check_linear(self, small: Recording) -> None:
        """Raise if gradients do not grow with their seed."""
        if not small.out.requires_grad or self.model_dtype != self.dtype:
            return
        u = random_signs(*small.out.shape, seed=0, like=small.out.detach())
        truth = self.truth(small, u, "highest")
        others = [self.truth(small, 1024 * u, "highest").G / 1024, self.truth(small, u / 1024, "highest").G * 1024]
        if truth.judges and any(truth.different(g)[0] for g in others):
            raise messages.not_linear()

    def _check_independent(self, small: Recording, probe: Batch) -> None:
        """Raise if the outputs are random, or outputs or gradients change with the other examples of the batch."""
        n, tolerance, out = probe.n, self._tolerance(), small.out.detach()
        before = RandomState(self.device)
        with torch.no_grad():
            if not messages.close(self.forward({}, probe), out, tolerance):
                raise messages.random_output()
            if small.draws or before.moved():
                self._check_not_random(probe, out)
            plain = self.plain_outputs(probe)
            if plain is not None and not messages.close(plain, out, tolerance):
                raise messages.not_functional()
        # As many other examples beside each one, with which kernels round alike; or each one alone.
        beside = [[i // 2 for i in range(n)], [n - 1 - i // 2 for i in range(n)]]
        alone = [[i] for i in range(n)]
        for index in ([*reversed(range(n))], *(alone if self.model_dtype == self.dtype else beside)) if n > 1 else ():
            if not self._check_apart(small, probe, index) and len(index) == 1:
                break  # the network takes no single example
        else:
            return
        for index in beside:
            self._check_apart(small, probe, index)

    def _check_apart(self, small: Recording, probe: Batch, index: list[int]) -> bool:
        """Raise if outputs or gradients of some examples are others in another batch; False if that cannot be run."""
        apart, out = self.apart(probe, "highest", [torch.tensor(index)]), small.out.detach()
        if not apart.outputs or apart.truth is None:
            return False
        if not messages.close(apart.outputs[0][1], out[index], self._tolerance()):
            raise messages.examples_interact()
        truth = self.truth(small, apart.truth.U[..., 0].to(out), "highest")
        if truth.judges and apart.truth.different(truth.G)[0]:
            raise messages.examples_interact()
        return True

    def _of_some(self, batch: Batch, index: Tensor) -> Tensor:
        return self.forward({}, batch.take(index))

    def apart(
        self,
        batch: Batch,
        precision: Precision,
        indices: Sequence[Tensor] | None = None,
        *,
        few: int = PROBE,
        derivatives: bool = True,
    ) -> Apart:
        """Examples of a chunk in other batches; see `linnet.network.parameter_guard` for what is refused on the way.

        A small chunk is cut in two at random, and two of its examples are also run alone. Of a large chunk a sixteenth
        is taken. Half-precision kernels round in another way with every number of examples: there, the examples that
        are taken fill a batch of the same size.

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
            if self.model_dtype == self.dtype and precision != "bf16":
                indices, alone = parts, [*order[:2, None]] if 2 < n <= few else []
            else:
                indices = [part[torch.arange(n) % len(part)] for part in parts]
        outputs: list[tuple[Tensor, Tensor]] = []
        truth: Truth | None = None
        draws = False
        with self._setting(precision):
            for index in (*(index.sort().values if n > PROBE else index for index in indices), *alone):
                try:
                    recording = self._record(batch.take(index), NO_CHANGES)
                except (messages.Refusal, torch.OutOfMemoryError):
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
        return Apart(outputs, truth, draws)

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
        # Rounding can move an example across a kink, and its gradient with it.
        loose = {torch.float64: TOLERANCE[torch.float64], torch.float32: 0.1}.get(self._coarsest, 0.5)
        loose = max(loose, 0.5) if precision == "bf16" else loose
        return replace(found, U=U, tolerances=(loose,))

    def _calls(self, current: frozenset[int]) -> Calls:
        """Checks of the calls in a pass in which the tensors ``current`` stand for the selected parameters."""
        known = [(id(t), name) for name, t in (*self._originals, *self._elsewhere, *self.theta.items())]
        selected = {address(t): name for name, t in self.theta.items()}
        others = {key: name for key, name in known if key not in current}
        return Calls(others, selected, self._storages(), current)

    def check_outputs(self, batch: Batch, f: Tensor, precision: Precision, apart: Apart, *, random: bool) -> None:
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
        with torch.no_grad(), self._setting(precision):
            if random:
                self._check_not_random(batch, f)
            for index, found in apart.outputs:
                if not self._alike(batch, f, index, found, tolerance):
                    self._check_state(batch, f, tolerance)
                    if not messages.close(self.forward({}, batch).to(f), f, tolerance):
                        raise messages.random_output()
                    raise messages.examples_interact(batch.start, batch.n)
            if apart.outputs:
                index, found = apart.outputs[0]
                self._check_state(batch.take(index), found, tolerance)

    def _check_state(self, batch: Batch, f: Tensor, tolerance: float) -> None:
        """Raise if earlier passes have changed the outputs of a batch."""
        if self.stateful and not messages.close(self._as_at_first().forward({}, batch).to(f), f, tolerance):
            raise messages.keeps_state()

    def _alike(self, batch: Batch, f: Tensor, index: Tensor, found: Tensor, tolerance: float) -> bool:
        """Whether examples have the same outputs in another batch."""
        bound = tolerance * float(f.abs().max())

        def differ(index: Tensor, found: Tensor) -> Tensor:
            return ((found.to(f) - f[index.to(f.device)]).abs().amax(1) > bound).cpu()

        apart = differ(index, found)
        if not apart.any():
            return True
        if self._coarsest == torch.float64 or apart.float().mean() > 0.5:
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
        bound = 1e3 * torch.finfo(self._coarsest).eps * float(f.abs().max())
        for _ in range(8):
            if float((self._of_some(batch, index).to(f) - f[index.to(f.device)]).abs().max()) > bound:
                raise messages.random_output()

    def truth(self, recording: Recording, u: Tensor, precision: Precision) -> Truth:
        """``J^T u`` of a recorded pass for one u (n, c), by reverse mode; the recording keeps its graph."""
        out, leaves = recording.out, recording.leaves
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if out.requires_grad:
            found = torch.autograd.grad(out, list(leaves.values()), u, True, allow_unused=True)
        parts = [
            t.new_zeros(t.numel(), dtype=self.dtype) if g is None else g.detach().to_dense().flatten().to(self.dtype)
            for t, g in zip(leaves.values(), found, strict=True)
        ]
        sizes = torch.stack([t.detach().float().norm() for t in (out, *leaves.values())])
        natural = float(sizes[0] / sizes[1:].norm().clamp(min=torch.finfo(torch.float32).tiny))
        bounds = (self._tolerance(precision),)
        return Truth(u[..., None].to(self.dtype), torch.cat(parts)[:, None], self.layout, bounds, natural)

    def judge(self, recording: Recording | None, batch: Batch, precision: Precision, apart: Apart) -> Truth:
        """Gradients that a chunk must reproduce: of all its examples, and of some of them in other batches.

        Args:
            recording: A pass over the chunk; None to make one.
            batch: The chunk.
            precision: Precision of the network's passes.
            apart: The other passes.
        """
        with self._setting(precision):
            plain = self._record(batch, NO_CHANGES) if recording is None or recording.changes.spread else recording
            u = random_signs(*plain.out.shape, seed=batch.start + 1, like=plain.out.detach())
            whole = self.truth(plain, u, precision)
        return whole if apart.truth is None else whole.beside(apart.truth)

    def doubt(self, signature: tuple[Any, ...], names: Sequence[str]) -> None:
        """Make chunks with these calls in a slower way from now on: their columns of some parameters were wrong."""
        known = self._structures[signature]
        ruled = [name for name in names if name in known.rules]
        if ruled and known.batched:
            changed = replace(known, batched=False)  # the batched backward pass may be to blame
        else:
            changed = known.without(names)
            if ruled:  # the others are used by some examples only, and no rule serves them
                warn_fallback(ruled)
        self._structures[signature] = self.last_structure = changed

    def deny(self, ability: str) -> None:
        """Never use an ability again: it gave other numbers than reverse mode, or failed."""
        for few in (1, 2):
            self._abilities[ability, few] = False

    def _record(self, batch: Batch, changes: Changes | None = None, *, watched: bool = True) -> Recording:
        """A recorded pass; ``watched`` is False for examples whose pass was watched before."""
        if changes is None and self._changes.spread:
            return self._record_like_last(batch, watched=watched)
        recording = record(
            lambda theta: self.forward(theta, batch),
            self.theta,
            self.layout,
            n=batch.n,
            changes=self._changes if changes is None else changes,
            calls=self._calls if watched else None,
        )
        if DIGITS[recording.coarsest] < DIGITS[self._coarsest]:
            self._coarsest = recording.coarsest
        return recording

    def _tolerance(self, precision: Precision = "highest") -> float:
        """The largest relative disagreement between two passes that is rounding."""
        return tolerance_of(self._coarsest, precision)

    def _record_like_last(self, batch: Batch, *, watched: bool) -> Recording:
        """A recording with the last batch's changes, which number calls: dropped if this batch makes other calls."""
        try:
            recording = self._record(batch, self._changes, watched=watched)
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError):
            return self._record(batch, NO_CHANGES, watched=watched)
        found = self._structures.get(recording.signature)
        known = found is not None and found.changes.spread == self._changes.spread
        return recording if known else self._record(batch, NO_CHANGES, watched=watched)

    def can(self, ability: str, batch: Batch) -> bool:
        """Whether the model supports "vectorize" (vmap over examples) or "forward_mode", tried once on an example.

        Half-precision models use neither: their tangents would be rounded to half precision.
        """
        if self.model_dtype != self.dtype:
            return False
        few = min(2, batch.n)  # one example alone hides what goes wrong with several
        if (ability, few) not in self._abilities:
            self._abilities[ability, few] = self._try(ability, batch.part(0, few))
        return self._abilities[ability, few]

    def _try(self, ability: str, probe: Batch) -> bool:
        """Compare one random combination of the outputs with reverse mode."""
        if ability == "forward_mode" and _pads(self._model):
            return False  # torch's forward mode counts the padding row of an embedding, reverse mode does not

        def outputs(theta: Mapping[str, Tensor], part: Batch) -> Tensor:
            with self._setting("highest"), forward_mode(self._model):
                return self.forward(theta, part)

        def combined(f: Tensor) -> Tensor:
            u = torch.linspace(0.5, 1.5, f.shape[1], dtype=self.dtype, device=self.device)
            return (f * u).sum(1, keepdim=True)

        def forward(theta: Mapping[str, Tensor], part: Batch) -> Tensor:
            return combined(outputs(theta, part))

        exact = autodiff.rows(forward, self.theta, probe, vectorize=False)
        try:
            if ability == "vectorize":
                found = autodiff.rows(forward, self.theta, probe, vectorize=True)
                pairs = [(found[name], exact[name]) for name in exact]
            else:
                tangent = {name: torch.cos(torch.arange(t.numel()).to(t)).view_as(t) for name, t in self.theta.items()}
                # Combined afterwards: a dual times a tensor without tangent makes torch import its compiler (1.5 s).
                product = combined(autodiff.jvp_of(lambda theta: outputs(theta, probe), self.theta, tangent))
                along = [(exact[name] * tangent[name]).reshape(probe.n, 1, -1).sum(2) for name in exact]
                pairs = [(product, torch.stack(along).sum(0))]
        except (RuntimeError, NotImplementedError, ValueError, AssertionError):
            return False
        return all(messages.close(a, b, TOLERANCE[self.model_dtype]) for a, b in pairs)


def _pads(model: nn.Module) -> bool:
    kinds = nn.Embedding | nn.EmbeddingBag
    return any(isinstance(m, kinds) and m.padding_idx is not None for m in model.modules())
