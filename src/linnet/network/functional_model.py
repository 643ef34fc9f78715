"""A network as a function of its selected parameters: linnet's own copy of it, and a watch over its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from linnet._common import (
    Precision,
    Ranks,
    arithmetic,
    kind,
    module_lock,
    network_precision,
    network_settings,
    tensor_code,
    text_code,
)
from linnet.data import Batch, leaves
from linnet.network import checks
from linnet.network.copies import copy_sharing_parameters, copy_structure, is_tensor_parallel
from linnet.network.parameter_guard import address, coarser
from linnet.network.parameters import Layout, Params, select
from linnet.network.sharded import ShardedWeights, gather_selected, part_of, put_at_rest, weights_in_parts, whole

Output = Callable[[Any], Tensor]
"""From what a model returns to a tensor (n, c) or (n,)."""

Named = tuple[tuple[str, Tensor], ...]
"""Tensors with their names."""


@dataclass
class Autocast:
    """Whether a network of several dtypes runs only under autocast, and which inputs the network takes.

    Attributes:
        dtype: The dtype of autocast; None for a network that runs without.
        tried: Whether that has been tried.
        adapts: Whether floating inputs may be cast to a dtype of the network.
        inputs: The dtype that floating inputs are cast to; None leaves inputs as they are.
    """

    dtype: torch.dtype | None = None
    tried: bool = False
    adapts: bool = False
    inputs: torch.dtype | None = None


@final
@dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A network as a function of named parameters; `of` makes one from a module.

    Attributes:
        module: linnet's own copy of the module, in eval mode. The copy shares the parameters unless the dtype was
            changed.
        theta: The selected parameters, by name.
        layout: Places of the selected parameters in the flat vector.
        watch: Notices changes of the weights of the module that the user gave.
        output: From what the module returns to a tensor (n, c) or (n,).
        cast: The dtype that floating inputs are cast to; None leaves inputs as they are.
        convolutions: Gives the context in which the network convolves in float32 on a GPU.
        originals: The selected parameters of the module itself. Nothing may read them: a pass puts other tensors in
            their place.
        cast_of: The network that this network was cast from; None for a network in its own dtypes.
        places: Every place of the module tree where a selected parameter hangs, to the name of the parameter.
        unused: A copy of the module that has never run.
        autocast: Whether the network runs only under autocast; shared by all forms of the network.
        first_state: What the modules held beside parameters before the first pass; None leaves that unchecked.
        shards: The weights that lie in parts on several ranks; None for a network whose weights are whole.
        starts: Address of each selected parameter as the network was given.
        products: The dtype that products with the Jacobian have at least.
    """

    module: nn.Module
    theta: dict[str, Tensor]
    layout: Layout
    watch: Watch
    output: Output | None
    cast: torch.dtype | None
    convolutions: Callable[[], AbstractContextManager[object]]
    originals: Named
    cast_of: FunctionalModel | None
    places: dict[str, str]
    unused: nn.Module
    autocast: Autocast
    first_state: list[tuple[Any, ...]] | None
    shards: ShardedWeights | None
    starts: dict[str, int]
    products: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        model: nn.Module,
        params: Params = None,
        *,
        output: Output | None = None,
        convolutions: Callable[[], AbstractContextManager[object]] = nullcontext,
        ranks: Ranks | None = None,
    ) -> FunctionalModel:
        """The functional form of a module; no forward pass is made.

        Args:
            model: Any module.
            params: Which parameters, as for `linnet.linearize`.
            output: See `Output`.
            convolutions: Gives the context in which the network convolves in float32 on a GPU.
            ranks: The ranks that hold the parts of sharded weights.
        """
        model = checks.check_module(model)
        checks.check_shards(model)
        put_at_rest(model)
        selected = select(model, params)
        own = _shadow(model, selected)
        parts = weights_in_parts(own)
        shards = ShardedWeights(parts, list(selected), Ranks() if ranks is None else ranks) if parts else None
        theta = gather_selected(selected)
        return cls(
            module=own,
            theta=theta,
            layout=Layout(theta),
            watch=Watch(model),
            output=output,
            cast=None,
            convolutions=convolutions,
            originals=tuple(selected.items()),
            cast_of=None,
            places=_places(own, selected),
            unused=copy_sharing_parameters(own),
            autocast=Autocast(),
            first_state=_state(own),
            shards=shards,
            starts={name: address(t) for name, t in theta.items()},
        )

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that hold the parts of sharded weights; None for whole weights."""
        return None if self.shards is None else self.shards.ranks

    @property
    def code(self) -> int:
        """One checksum of all weights of the module that the user gave; sharded weights are gathered for it."""
        ranks = self.ranks
        with nullcontext() if ranks is None else ranks.exchange("a checksum of all weights"):
            return self.watch.code

    @property
    def p(self) -> int:
        """The number of selected parameters."""
        return self.layout.p

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the selected parameters; of several dtypes the one with the fewest digits."""
        return reduce(coarser, (t.dtype for t in self.theta.values()))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the Jacobian's products: `row_dtype`, unless ``products`` has more digits."""
        return torch.promote_types(self.row_dtype, self.products)

    @cached_property
    def row_dtype(self) -> torch.dtype:
        """Dtype of the Jacobian's rows: it holds the dtypes of all selected parameters, and is at least float32."""
        return reduce(torch.promote_types, (t.dtype for t in self.theta.values()), torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(iter(self.theta.values())).device

    @cached_property
    def has_convolutions(self) -> bool:
        """Whether the network has convolution layers."""
        return any(isinstance(module, nn.modules.conv._ConvNd) for module in self.module.modules())

    # Passes.

    def forward(self, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Outputs (n, c) of a batch with some parameters replaced."""
        batch = self._with_own_inputs(batch)
        full = {place: theta.get(name, self.theta[name]) for place, name in self.places.items()}
        try:
            with module_lock(self.module), self._gathering():
                raw = functional_call(self.module, full, batch.args, batch.kwargs, tie_weights=False)
        except (RuntimeError, TypeError, AttributeError) as error:
            if self.cast is not None and checks.is_about_floating_dtypes(error):
                raise checks.cannot_cast(self.cast, str(error)) from error
            checks.explain_forward(error, leaves((batch.args, batch.kwargs), "the inputs"), self.theta)
            raise
        return self._matrix(raw, batch.n)

    def _with_own_inputs(self, batch: Batch) -> Batch:
        """The batch with inputs in the dtype that the network takes, and copied: the network may write into them."""
        dtype = self.autocast.inputs if self.cast is None else self.cast
        return batch.with_inputs(partial(_copied, dtype=dtype))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns with its own parameters."""
        with self._gathering(all_=True):
            return self.module(*args, **kwargs)

    def together(self) -> AbstractContextManager[None]:
        """A block in which the network runs: ranks that hold parts of its weights stay until no other rank needs them.

        All ranks enter the block. Nothing happens for a network whose weights are whole.
        """
        return nullcontext() if self.shards is None else self.shards.ranks.together()

    def _gathering(self, *, all_: bool = False) -> AbstractContextManager[None]:
        """A forward pass, for which sharded weights are gathered."""
        return nullcontext() if self.shards is None else self.shards.in_use(all_=all_)

    def _matrix(self, raw: Any, n: int) -> Tensor:
        """What the network returned, as (n, c)."""
        if self.output is not None:
            found = output_matrix(self.output(raw), n)
        else:
            found = output_matrix(raw if isinstance(raw, Tensor) else checks.output_tensor(raw), n)
        return found if found.device == self.device else found.to(self.device)  # a device_map ends on another device

    @contextmanager
    def in_precision(self, precision: Precision) -> Iterator[None]:
        """The settings of torch in which passes of the network run."""
        with ExitStack() as stack:
            stack.enter_context(arithmetic(network_precision(precision), self.device))
            stack.enter_context(network_settings(self.module, precision, self.device))
            if self.autocast.dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.autocast.dtype))
            if self.convolves_exactly(precision):
                stack.enter_context(self.convolutions())
            yield

    def find_autocast(self, batch: Batch) -> None:
        """Find out, on a few examples, whether a network of several dtypes runs only under autocast, and say so.

        Where inputs may be cast, find out too which floating inputs the network takes: as they come, or in which of its
        dtypes, that of the first layer first.
        """
        found = self.autocast
        dtypes = dict.fromkeys(t.dtype for t in self.module.parameters() if t.is_floating_point())
        half = [dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)]
        trials: list[tuple[torch.dtype | None, torch.dtype | None]] = [(None, None)]
        if len(half) == 1 and len(dtypes) > 1:
            trials.append((half[0], None))
        if found.adapts:
            trials.extend((None, dtype) for dtype in dtypes)
        if found.tried or self.cast is not None or len(trials) == 1:
            return
        found.tried = True
        for found.dtype, found.inputs in trials:
            try:
                with torch.no_grad(), self.in_precision("highest"):
                    self.as_at_first().forward({}, batch)
            except RuntimeError as error:
                if not checks.is_about_floating_dtypes(error):
                    break
                continue
            except Exception:  # the first pass says what it is
                break
            if found.dtype is not None:
                checks.warn_of_autocast(found.dtype, dtypes)
            given = {t.dtype for _, t in leaves((batch.args, batch.kwargs), "") if is_floating(t)}
            if found.adapts and found.inputs is None and len(given) == 1:
                found.inputs = given.pop()  # later inputs are cast to what the network is known to take
            return
        found.dtype = found.inputs = None

    def convolves_exactly(self, precision: Precision) -> bool:
        """Whether a network that runs in this precision convolves in float32 on a GPU."""
        exact = network_precision(precision) == "highest" and self.model_dtype == torch.float32
        return self.device.type == "cuda" and exact and self.has_convolutions

    # The network as it was given.

    def plain_outputs(self, batch: Batch) -> Tensor | None:
        """Outputs (n, c) by the network with its own parameters; None if this is a function around other ones."""
        if not self._as_given:
            return None
        fresh = self.as_at_first()
        batch = self._with_own_inputs(batch)
        return fresh._matrix(fresh.run(*batch.args, **batch.kwargs), batch.n)

    def uncast_outputs(self, batch: Batch) -> Tensor | None:
        """Outputs (n, c) by the network that this one was cast from; None if there is none that takes the inputs."""
        if self.cast_of is None or not self._as_given:
            return None
        # Inputs as they came, or in a dtype of the weights: a cast network takes inputs of every floating dtype.
        for dtype in (None, *dict.fromkeys(t.dtype for t in self.cast_of.module.parameters() if t.is_floating_point())):
            given = batch if dtype is None else batch.with_inputs(partial(as_dtype, dtype=dtype))
            try:
                self.cast_of.find_autocast(given)
                with self.cast_of.in_precision("highest"):
                    return self.cast_of.forward({}, given)
            except (RuntimeError, TypeError, ValueError):
                continue
        return None

    def check_parallel(self, batch: Batch) -> None:
        """Raise if the module computes something else under its tensor parallel plan than with whole weights.

        All ranks run the module itself, on the same examples; the module is put back into its mode.
        """
        first = self if self.cast_of is None else self.cast_of
        if first.cast_of is not None or first.shards is None or not is_tensor_parallel(first.watch.model):
            return
        given = first.watch.model
        with torch.no_grad(), first.in_precision("highest"):
            found = first.forward({}, batch)
            with _in_eval_mode(given), first.shards.ranks.exchange("the outputs of the module itself"):
                raw = given(*batch.args, **batch.kwargs)
        put_at_rest(given)
        own = first._matrix(pytree.tree_map_only(Tensor, whole, raw), batch.n)
        dtypes = (t.dtype for t in first.module.parameters() if t.is_floating_point())
        if not checks.close(own, found, torch.finfo(reduce(coarser, dtypes)).eps ** 0.5):
            raise checks.not_as_parallel()

    @property
    def _as_given(self) -> bool:
        """Whether this is the network with its own parameters, and no function around other ones."""
        same = all(address(t) == self.starts[name] for name, t in self.theta.items())
        if self.shards is None:  # a module that was cast or moved since has its parameters elsewhere
            same &= all(address(t) == self.starts[name] for name, t in self.originals if name in self.starts)
        return self.first_state is not None and same

    @property
    def former(self) -> Named:
        """The original parameters of the networks that this network was cast from."""
        return () if self.cast_of is None else self.cast_of.originals + self.cast_of.former

    @property
    def stateful(self) -> bool:
        """Whether forward passes have left something behind in the modules: buffers, counters, caches."""
        if self.first_state is None:
            return False
        now = _state(self.module)
        pairs = zip(now, self.first_state, strict=False)
        same = all(a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in pairs)
        return not same or len(now) != len(self.first_state)

    def as_at_first(self) -> FunctionalModel:
        """The same function by a copy of the network that has never run."""
        return replace(self, module=copy_sharing_parameters(self.unused))

    def storages(self) -> dict[int, str]:
        """Names of all parameters of the network, by the address of their memory."""
        tensors = (*self.module.named_parameters(), *self.theta.items())
        return {address(t): name for name, t in tensors if address(t) != -1}

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Raise if a weight of the model has changed since it was linearized.

        Args:
            contents: Whether to compare the bytes of all weights, which reads them once; see
                `Watch`.
        """
        self.watch.check(contents=contents)

    # Other networks.

    def at(self, theta: Mapping[str, Tensor]) -> FunctionalModel:
        """The same network around other weights; parameters that are not given stay as they are."""
        return replace(self, theta={name: theta.get(name, t).detach() for name, t in self.theta.items()})

    def to(self, dtype: torch.dtype) -> FunctionalModel:
        """The same function in another dtype, by a copy of the weights; floating inputs are cast to the dtype.

        A forward that names a dtype may refuse the copy, or compute something else: passes find out.
        """

        def cast(t: Tensor) -> Tensor:
            return as_dtype(t, dtype)

        # Parameters are cast one by one into the copy; those in the dtype already are shared with the module.
        memo: dict[int, Any] = {
            id(t): nn.Parameter(cast(t.detach()), requires_grad=t.requires_grad) for t in self.module.parameters()
        }
        model = copy_structure(self.unused, memo)._apply(cast)
        kept: dict[str, Any] = {"output": self.output, "convolutions": self.convolutions, "ranks": self.ranks}
        other = FunctionalModel.of(model, list(self.theta), **kept)
        return replace(other, watch=self.watch, cast=dtype, cast_of=self)


def _shadow(model: nn.Module, selected: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module's structure in eval mode that shares its parameters; buffers are copied."""
    kept = {id(t) for t in selected.values()}
    # Those not selected share their memory but ask for no gradient: below the first selected layer nothing is recorded.
    memo = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if t.requires_grad and id(t) not in kept else t
        for t in model.parameters()
    }
    try:
        shadow = copy_structure(model, memo)
    except Exception as error:
        raise TypeError(
            f"linnet works on a copy of the module's structure, and {type(model).__name__} cannot be copied "
            f"({error}). Remove what copy.deepcopy cannot handle, such as tensors with a graph kept as attributes."
        ) from error
    own = {id(module) for module in model.modules()}
    for name, module in shadow.named_modules():
        if id(module) in own:
            raise TypeError(
                f"linnet works on a copy of the module's structure, and copy.deepcopy returns the module "
                f"{name or type(model).__name__!r} itself. Remove its __deepcopy__, so that linnet leaves it as it is."
            )
        if getattr(module, "max_norm", None) is not None:
            _release_max_norm(name, module)
    _replace_compiled(model, shadow)
    return shadow.eval()


class _Uncompiled(nn.Module):
    """Stands in the place of a compiled module and runs the module that was compiled; names stay the same."""

    _orig_mod: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_mod":
                raise
            return getattr(self._orig_mod, name)


def _replace_compiled(model: nn.Module, shadow: nn.Module) -> None:
    """Replace compiled modules inside the copy, whose calls nobody could see."""
    for part in model.modules():
        if checks.is_compiled(part):
            checks.warn_of_compiled(part)
    found: dict[int, nn.Module] = {}
    for module in list(shadow.modules()):
        for key, child in module._modules.items():
            if child is not None and checks.is_compiled(child):
                module._modules[key] = found.setdefault(id(child), _Uncompiled(child._orig_mod))  # type: ignore[arg-type]


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _release_max_norm(name: str, module: nn.Module) -> None:
    """Switch off an embedding's ``max_norm``, which would write into the weights, where it has nothing to do."""
    weight, limit, kind = module.weight, float(module.max_norm), float(getattr(module, "norm_type", 2.0))  # type: ignore[arg-type]
    if bool((weight.detach().norm(p=kind, dim=1) > limit).any()):  # type: ignore[operator]
        raise checks.renormalizes(name)
    module.max_norm = None  # type: ignore[assignment]


def _state(model: nn.Module) -> list[tuple[Any, ...]]:
    """What the modules hold besides parameters: to see whether a forward pass has changed any of it."""
    return [
        (key, value, value._version if isinstance(value, Tensor) else len(value) if isinstance(value, Sized) else 0)
        for module in model.modules()
        for held in (module.__dict__, module._buffers)
        for key, value in held.items()
    ]


def _places(model: nn.Module, selected: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place where a selected parameter hangs in the module tree, to its name; each module once."""
    names = {id(t): name for name, t in selected.items()}
    return {
        f"{prefix}.{key}" if prefix else key: names[id(t)]
        for prefix, module in model.named_modules()
        for key, t in module._parameters.items()
        if t is not None and id(t) in names
    }


def _copied(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a tensor, in a dtype if one is given."""
    cast = t if dtype is None else as_dtype(t, dtype)
    return t.clone() if cast is t else cast


def is_floating(t: object) -> bool:
    """Whether an input is a tensor of floating numbers."""
    return isinstance(t, Tensor) and t.is_floating_point()


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in a dtype, a complex one in the complex dtype beside it, any other as it is."""
    if t.is_floating_point():
        return t.to(dtype)
    return t.to(dtype.to_complex()) if t.is_complex() else t


# What a network returns.


def output_matrix(out: object, n: int) -> Tensor:
    """The output as (n, c)."""
    if not isinstance(out, Tensor):
        raise TypeError(f"output= must return a tensor (n, c) or (n,); it returned {kind(out)}.")
    if not out.is_floating_point():
        raise TypeError(
            f"linnet differentiates floating outputs; got {out.dtype} of shape {tuple(out.shape)}. Return logits or "
            "means rather than labels, for example with output=."
        )
    if out.layout is not torch.strided:
        raise TypeError(
            f"linnet needs dense outputs; the model's have layout {out.layout}. Use output=lambda out: out.to_dense()."
        )
    if out.ndim == 0 or len(out) != n or out.ndim > 2 or out.shape[-1] == 0:
        hint = (
            "For outputs with more axes use output=lambda out: out.flatten(1)."
            if out.ndim > 2 and len(out) == n
            else "There must be one row of outputs per example; say how to read it with output=."
        )
        raise ValueError(
            f"linnet needs outputs of shape (n, c) or (n,), with n = {n} examples here; got {tuple(out.shape)}. {hint}"
        )
    return out if out.ndim == 2 else out[:, None]


# The weights as they were.

Code = tuple[str, tuple[int, ...], int]


class Watch:
    """Watches the parameters of a module and the buffers that belong to its state.

    PyTorch counts changes of a tensor, and the counts are compared in every pass. The counts miss changes made through
    ``p.data``, through other views, and modules that were replaced. So the bytes are compared too, wherever a network
    begins to be used and wherever its weights are written: that reads all weights once (`linnet._common.checksums`).

    Args:
        model: The module; its checksums are taken here.

    Attributes:
        model: The module.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> watch = Watch(model)
        >>> model.weight.data.mul_(2).shape
        torch.Size([1, 2])
        >>> watch.check(contents=True)
        Traceback (most recent call last):
        RuntimeError: Parameter 'weight' has changed since the model was linearized, ...
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        put_at_rest(model)
        self._versions = {name: (t, t._version) for name, t in map(_own_part, _weights(model))}
        self._codes = _codes(model)

    def check(self, *, contents: bool = False) -> None:
        """Raise if a tensor has changed, by the counts of changes, or by the bytes also where these have not moved."""
        for name, (t, version) in self._versions.items():
            if t._version != version:
                raise checks.changed_parameter(name, parameter=isinstance(t, nn.Parameter))
        if not contents:
            return
        put_at_rest(self.model)
        now, parameters = _codes(self.model), dict(self.model.named_parameters())
        for name in self._codes | now:
            if self._codes.get(name) != now.get(name):
                raise checks.changed_parameter(name, parameter=name in parameters)

    @cached_property
    def code(self) -> int:
        """One checksum of all weights and their names, from 0 to 2^63 - 1; sharded weights are gathered for it once."""
        put_at_rest(self.model)
        tensors, codes = dict(_weights(self.model)), dict(self._codes)
        for name in weights_in_parts(self.model):
            if name in codes:
                codes[name] = (*codes[name][:2], int(tensor_code(whole(tensors[name]))))
        return text_code(list(codes.items()))

    def __getstate__(self) -> dict[str, Any]:
        # A copy's tensors count their changes anew.
        return {**self.__dict__, "_versions": {name: (t, t._version == v) for name, (t, v) in self._versions.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = {name: (t, t._version if same else -1) for name, (t, same) in state["_versions"].items()}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are part of the state: others, such as tables of positions, may grow."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for key, t in module._buffers.items():
            if t is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, t


def _own_part(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    return named[0], part_of(named[1])


def _codes(model: nn.Module) -> dict[str, Code]:
    """Dtype, shape and checksum of the bytes of each tensor; every device is waited for once.

    Of a sharded tensor it is the checksum of the part of this rank.
    """
    tensors = dict(_weights(model))
    by_device: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        by_device.setdefault(t.device, []).append(name)
    found: dict[str, int] = {}
    with torch.no_grad():
        for names in by_device.values():
            codes = [tensor_code(part_of(tensors[name])) for name in names]
            found |= zip(names, torch.stack(codes).tolist(), strict=True)
    return {name: (str(t.dtype), tuple(t.shape), found[name]) for name, t in tensors.items()}
