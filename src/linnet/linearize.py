"""A trained network as the linear model it is to first order around its own weights."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from linnet import _checks, autodiff
from linnet.autodiff import Autodiff
from linnet.batch import Batch, leaves
from linnet.capture import NO_CHANGES, Changes, Recording, Use, record
from linnet.compound import Lazy, combine
from linnet.contexts import Precision, arithmetic, forward_mode, network, of_network
from linnet.data import as_source
from linnet.factors import Factor, Recipe
from linnet.layers import Call, LayoutError, Rule, Slot
from linnet.params import Layout, Params, select
from linnet.structure import (
    PROBE,
    TOLERANCE,
    Kept,
    Structure,
    factors_of,
    gradients,
    inspect,
    misplaced,
    streamed,
    warn_fallback,
    warn_of,
)

if TYPE_CHECKING:
    from linnet.jacobian import Jacobian

Output = Callable[[Any], Tensor]
Prepare = Callable[[Factor], Factor]


@dataclass(frozen=True)
class Chunk:
    """The Jacobian of a few examples, in factors.

    Attributes:
        f: Outputs (n, c).
        factors: Columns; those that are missing are zero.
    """

    f: Tensor
    factors: list[Factor]


def linearize(model: nn.Module, params: Params = None, output: Output | None = None) -> Linearization:
    """The network as a linear model around its own weights, f(x; theta) ~ f(x; theta0) + J(x) (theta - theta0).

    The module is never modified: linnet works on a copy of its structure that shares the parameters and is in eval
    mode. Parameters that change afterwards (more training) are noticed, and refused.

    Args:
        model: Any module.
        params: Which parameters: None for all trainable ones, a glob or a list of globs over their names, or a
            callable ``(name, tensor) -> bool``.
        output: From what the model returns to a tensor (n, c) or (n,). By default tensors are taken as they are, and
            Hugging Face's outputs by their ``logits``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> lin = linearize(model)
        >>> lin.p, lin(torch.zeros(5, 4)).shape
        (67, torch.Size([5, 3]))
        >>> linearize(model, "2.*").p
        27
    """
    return Linearization(model, params, output=output)


class Linearization:
    """See `linearize`.

    Attributes:
        theta: The selected parameters, by name.
        layout: Their places in the flat vector.
        p: Their number.
        dtype: Dtype of the Jacobian: the parameters', but at least float32.
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, params: Params = None, *, output: Output | None = None) -> None:
        self.theta = {name: t.detach() for name, t in select(model, params).items()}
        self.layout = Layout(self.theta)
        self.p = self.layout.p
        first = next(iter(self.theta.values()))
        self.device = first.device
        self.model_dtype = first.dtype
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self._output = output
        self._cast: torch.dtype | None = None  # what floating inputs are cast to
        selected = select(model, params)
        self._model = _shadow(model, selected)
        self._places = _places(self._model, selected)
        self._watched = {name: (t, t._version) for name, t in model.named_parameters()}
        self._changes = NO_CHANGES
        self._structures: dict[tuple[Any, ...], Structure] = {}
        self.last_structure = Structure([], (), ())
        self._abilities: dict[tuple[str, int], bool] = {}

    @property
    def module(self) -> nn.Module:
        """linnet's own copy of the module, in eval mode; it shares the parameters unless the dtype was changed."""
        return self._model

    def __repr__(self) -> str:
        layers = len(self.layout.layers)
        return f"Linearization({type(self._model).__name__}, p={self.p:,} in {layers} layers, {self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters count their changes anew.
        return {**self.__dict__, "_watched": {name: (t, t._version == v) for name, (t, v) in self._watched.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watched = {name: (t, t._version if same else -1) for name, (t, same) in state["_watched"].items()}

    def __call__(self, x: Any) -> Tensor:
        """f(x; theta0) as (n, c), for anything that the model takes: a tensor, an array, a tuple or a dict."""
        source = as_source(x, self._model.forward)
        with torch.no_grad(), self._setting("highest"):
            return torch.cat([self.forward({}, b.to(self.device)) for b in source.batches(source.n)])

    def jacobian(
        self,
        data: Any,
        batch_size: int | str = "auto",
        memory: float | str = "auto",
        *,
        precision: Precision = "highest",
        engine: str = "auto",
        progress: bool | None = None,
    ) -> Jacobian:
        """The Jacobian over a data set, (n * c, p), rows by example; a linear operator that is never stored.

        Args:
            data: Tensors, arrays, tuples, dicts, a Dataset or a DataLoader; see `linnet.data.as_source`.
            batch_size: Examples per chunk, or "auto" for as many as the memory allows.
            memory: Bytes that a pass may use for its chunk, or "auto" for a fraction of what is free.
            precision: "highest" (IEEE float32, or the model's own dtype), "products" (the network as it is, products
                with many columns in tf32), "high" (tf32) or "bf16".
            engine: "auto", or one of "rows", "bilinear", "ghost", "autodiff" to use it wherever it can serve.
            progress: False for no progress bar; True or None for one on a terminal after two seconds.

        Example:
            >>> lin = linearize(nn.Linear(4, 3))
            >>> J = lin.jacobian(torch.ones(5, 4))
            >>> J.shape, (J @ torch.ones(lin.p)).shape, J.gram().shape
            ((15, 15), torch.Size([15]), torch.Size([15, 15]))
        """
        from linnet.jacobian import Jacobian

        source = as_source(data, self._model.forward)
        return Jacobian(
            self,
            source,
            batch_size=batch_size,
            memory=memory,
            precision=precision,
            engine=engine,
            progress=progress,
        )

    def to(self, dtype: torch.dtype) -> Linearization:
        """The same linear model in another precision, around a copy of the weights.

        The copy casts floating inputs to its dtype, so that the same data serves both; integers stay as they are. The
        module itself and this linearization are untouched, and later changes of the module's parameters are refused by
        the copy too.

        Args:
            dtype: ``torch.float32`` or ``torch.float64``.

        Example:
            >>> lin = linearize(nn.Linear(4, 3)).to(torch.float64)
            >>> lin(torch.zeros(5, 4)).dtype, lin.theta["weight"].dtype
            (torch.float64, torch.float64)
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"A linearization computes in torch.float32 or torch.float64; got {dtype}. Pass one of them."
            )
        self.check_unchanged()

        def cast(t: Tensor) -> Tensor:
            return _as(t, dtype)

        # Parameters are cast one by one into the copy; those in the dtype already are shared with the module.
        memo: dict[int, Any] = {
            id(t): nn.Parameter(cast(t.detach()), requires_grad=t.requires_grad) for t in self._model.parameters()
        }
        model = copy.deepcopy(self._model, memo)._apply(cast)
        other = Linearization(model, list(self.theta), output=self._output)
        other._watched, other._cast = self._watched, dtype
        return other

    def at(self, theta: Mapping[str, Tensor]) -> Linearization:
        """The same network around other weights, in the same precision; those not given stay as they are.

        The module's own parameters are not touched, and the watch over them goes on.

        Args:
            theta: Some of the selected parameters, by name.

        Example:
            >>> lin = linearize(nn.Linear(4, 3))
            >>> lin.at({"bias": torch.ones(3)}).theta["bias"]
            tensor([1., 1., 1.])
        """
        for name, t in theta.items():
            known = self.theta.get(name)
            if known is None:
                raise ValueError(f"{name!r} is not a selected parameter; these are {', '.join(self.theta)}.")
            if t.shape != known.shape or t.dtype != known.dtype or t.device != known.device:
                raise ValueError(
                    f"{name!r} has shape {tuple(known.shape)} in {known.dtype} on {known.device}; got "
                    f"{tuple(t.shape)} in {t.dtype} on {t.device}."
                )
        moved = copy.copy(self)
        moved.theta = {name: theta.get(name, t).detach() for name, t in self.theta.items()}
        return moved

    # What the Jacobian is made of.

    def forward(self, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Outputs (n, c) of a batch with some parameters replaced."""
        batch = batch if self._cast is None else batch.with_inputs(partial(_as, dtype=self._cast))
        full = {place: theta.get(name, self.theta[name]) for place, name in self._places.items()}
        try:
            raw = functional_call(self._model, full, batch.args, batch.kwargs, tie_weights=False)
        except (RuntimeError, TypeError) as error:
            _checks.explain_forward(error, leaves((batch.args, batch.kwargs), "the inputs"), self.theta)
            raise
        out = _checks.output_tensor(raw) if self._output is None else self._output(raw)
        return _checks.output_matrix(out, batch.n)

    def check_unchanged(self) -> None:
        """Raise if a parameter of the model has changed since it was linearized."""
        for name, (t, version) in self._watched.items():
            if t._version != version:
                raise _checks.changed_parameter(name)

    def structure(self, batch: Batch) -> Structure:
        """Which rules serve a batch, checked on its first examples if its calls are new."""
        with self._setting("highest"):
            recording = self._record(batch.part(0, min(PROBE, batch.n)))
        return self._structure(recording, batch)

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
        """
        if autodiff_only:
            leaves = {name: t.detach().requires_grad_(graph) for name, t in self.theta.items()}
            known = None
            with self._setting(precision), torch.set_grad_enabled(graph):
                if along is None or not along.shape[1] or not (columns and graph):
                    f = self.forward(leaves, batch)
                else:
                    views = self.layout.unflatten(along[:, 0].to(self.model_dtype))
                    # With memory of their own, in one call: forward mode copies views, one by one and zeros first.
                    tangent = dict(zip(views, torch._foreach_mul(list(views.values()), 1.0), strict=True))
                    with forward_mode(self._model):
                        f, product = autodiff.dual(lambda theta: self.forward(theta, batch), leaves, tangent)
                    known = along, product.detach().to(self.dtype)
            kept = (f, leaves) if graph else None
            factor = self._autodiff(tuple(self.theta), batch, f.shape[1], precision, columns, kept, known)
            return Chunk(f.detach().to(self.dtype), [prepare(factor)])
        prepare = self._without_autocast(prepare)
        with self._setting(precision):
            recording = self._record(batch)
            structure = self._structure(recording, batch)
            if structure.changes.spread != recording.changes.spread:
                recording = self._record(batch, structure.changes)
            f, factors = recording.out.detach().to(self.dtype), self._streamed(recording, structure, batch, prepare)
            if factors is None:
                if not recording.uses:  # emptied by a stream that broke off
                    recording = self._record(batch, structure.changes)
                factors, structure = self._captured(recording, structure, batch, prepare)
        if structure.rest:
            factors.append(prepare(self._autodiff(structure.rest, batch, f.shape[1], precision, columns)))
        return Chunk(f, factors)

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
        doubtful = structure.unused or structure.unproven or recording.reorders or not structure.streams
        if doubtful or recording.out.shape[1] > 1 or not recording.out.requires_grad:
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
        if structure.unused and out.requires_grad:
            leaves = [recording.leaves[name] for name in structure.unused]
            found = torch.autograd.grad(out, leaves, torch.ones_like(out), True, allow_unused=True)
            late = [name for name, g in zip(structure.unused, found, strict=True) if g is not None]
            if late:  # used for some examples only
                return self._demoted(recording, structure, late, batch, prepare)
        seeds = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)[:, None].expand(-1, len(out), -1)
        grads = gradients(out, [use for use, _ in pairs], seeds, batched=structure.batched)
        doubtful = [
            (use, kept, g)
            for (use, kept), g in zip(pairs, grads, strict=True)
            if g is not None
            and (recording.reorders or any(slot.name in structure.unproven for slot in kept.slots.values()))
        ]
        if doubtful and batch.n > 1:
            half = torch.is_autocast_enabled(self.device.type)
            names = misplaced(out, doubtful, TOLERANCE[torch.bfloat16 if half else self.model_dtype])
            if names:
                warn_fallback(names)
                return self._demoted(recording, structure, names, batch, prepare)
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

    def _record(self, batch: Batch, changes: Changes | None = None) -> Recording:
        if changes is None and self._changes.spread:
            return self._record_like_last(batch)
        return record(
            lambda theta: self.forward(theta, batch),
            self.theta,
            self.layout,
            n=batch.n,
            changes=self._changes if changes is None else changes,
        )

    def _record_like_last(self, batch: Batch) -> Recording:
        """A recording with the last batch's changes, which number calls: dropped if this batch makes other calls."""
        try:
            recording = self._record(batch, self._changes)
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError):
            return self._record(batch, NO_CHANGES)
        found = self._structures.get(recording.signature)
        known = found is not None and found.changes.spread == self._changes.spread
        return recording if known else self._record(batch, NO_CHANGES)

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
        _checks.check_outputs_finite(small.out, probe.start)
        self._check_independent(small.out, probe)
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
        except (RuntimeError, ValueError, TypeError, IndexError, LookupError):
            return None
        same = trial.signature == small.signature and trial.out.shape == small.out.shape
        return trial if same and _checks.close(trial.out, small.out, TOLERANCE[self.model_dtype]) else None

    @property
    def has_rest(self) -> bool:
        """Whether some parameters are left to autodiff."""
        return any(structure.rest for structure in self._structures.values())

    @property
    def has_convolutions(self) -> bool:
        """Whether the network has convolution layers."""
        return any(isinstance(module, nn.modules.conv._ConvNd) for module in self._model.modules())

    def _check_independent(self, out: Tensor, probe: Batch) -> None:
        """Raise if the outputs are random, or change with the other examples of the batch."""
        tolerance = TOLERANCE[self.model_dtype]
        with torch.no_grad():
            if not _checks.close(self.forward({}, probe), out, tolerance):
                raise _checks.random_output()
            if probe.n > 1 and not _checks.close(self.forward({}, probe.part(0, probe.n - 1)), out[:-1], tolerance):
                raise _checks.examples_interact()

    def _autodiff(
        self,
        names: tuple[str, ...],
        batch: Batch,
        c: int,
        precision: Precision,
        columns: bool,
        graph: tuple[Tensor, Mapping[str, Tensor]] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> Autodiff:
        def forward(theta: Mapping[str, Tensor], part: Batch) -> Tensor:
            with self._setting(precision), forward_mode(self._model):
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
            graph=graph,
            known=known,
        )

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
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return all(_checks.close(a, b, TOLERANCE[self.model_dtype]) for a, b in pairs)

    @contextmanager
    def _setting(self, precision: Precision) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(arithmetic(of_network(precision), self.device))
            stack.enter_context(network(self._model, precision, self.device))
            yield


def _shadow(model: nn.Module, selected: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module's structure in eval mode that shares its parameters; buffers are copied."""
    kept = {id(t) for t in selected.values()}
    # Those not selected share their memory but ask for no gradient: below the first selected layer nothing is recorded.
    memo = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if t.requires_grad and id(t) not in kept else t
        for t in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:
        raise TypeError(
            f"linnet works on a copy of the module's structure, and {type(model).__name__} cannot be copied "
            f"({error}). Remove what copy.deepcopy cannot handle, such as tensors with a graph kept as attributes."
        ) from error


def _factors(use: Use, kept: Kept, g: Tensor, *, n: int, dtype: torch.dtype) -> list[Factor]:
    """Columns of the Jacobian from one use, each with its recipe."""
    found = factors_of(use, kept, g, n=n, dtype=dtype)
    for factor in found:
        if isinstance(factor, Lazy):
            slots = {role: slot for role, slot in kept.slots.items() if slot.range in factor.ranges}
            factor.again = Recipe(_lazy_again, (use.rule, use.call.conf, slots, kept.layout))
    return found


def _lazy_again(
    tensors: Sequence[Tensor], rule: Rule, conf: dict[str, Any], slots: Mapping[str, Slot], layout: str
) -> Factor:
    x, g = tensors
    return rule.factors(Call(None, {}, conf), x, g, slots, layout)[0]


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in a dtype, a complex one in the complex dtype beside it, any other as it is."""
    if t.is_floating_point():
        return t.to(dtype)
    return t.to(dtype.to_complex()) if t.is_complex() else t


def _places(model: nn.Module, selected: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place where a selected parameter hangs in the module tree, to its name; each module once."""
    names = {id(t): name for name, t in selected.items()}
    return {
        f"{prefix}.{key}" if prefix else key: names[id(t)]
        for prefix, module in model.named_modules()
        for key, t in module._parameters.items()
        if t is not None and id(t) in names
    }


def _pads(model: nn.Module) -> bool:
    kinds = nn.Embedding | nn.EmbeddingBag
    return any(isinstance(m, kinds) and m.padding_idx is not None for m in model.modules())
