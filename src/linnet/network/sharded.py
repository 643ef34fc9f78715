"""Weights that lie in parts on several ranks: FSDP2 (`fully_shard`), tensor parallel modules, or both at once.

A sharded weight is a DTensor: each rank keeps a part of it. linnet gathers a weight for the one call that uses the
weight, in the forward pass and again in the backward pass, and frees it after the call. So a rank holds its part of all
weights, and one whole layer. Vectors (biases, scales of norms) are small beside matrices: they are gathered once and
kept. The hooks that torch.distributed has put on the modules are left out of linnet's copy.

To gather a weight, all ranks that hold a part of it have to take part. The ranks need not run the same passes: a rank
asks for a weight at the next meeting of the ranks (`linnet._common.Ranks`), and the ranks that are ahead of it, or in
another layer, give their parts first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linnet._common import (
    Ranks,
    format_bytes,
    free_memory,
    is_sharded,
    packing_saved_tensors,
    saved_tensor_hooks,
    without_transforms,
)
from linnet.network import checks
from linnet.network.parameter_guard import address, writes

KEPT = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag"})
"""Properties of a tensor that are tensors themselves."""

QUESTIONS = frozenset(
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "ndimension", "element_size", "stride", "is_floating_point")
) | {Tensor.is_complex, Tensor.__len__, Tensor.is_contiguous, Tensor.storage_offset}
"""Functions that ask for a shape or a dtype: a weight need not be gathered for them."""


def weights_in_parts(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module that are DTensors, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: t for name, t in tensors if is_sharded(t)}


def lies_in_parts(model: object) -> bool:
    """Whether a model has parameters or buffers that are DTensors."""
    if not isinstance(model, nn.Module):
        return False
    put_at_rest(model)
    return bool(weights_in_parts(model))


def check_whole(model: nn.Module, what: str) -> None:
    """Raise if a model has sharded weights, for what runs the model in a way of its own.

    Args:
        model: The model.
        what: What needs whole weights.
    """
    if lies_in_parts(model):
        raise TypeError(
            f"{what} needs the whole weights of the model on every rank; this model is sharded (its parameters are "
            "DTensors). Load its full state dict into the module as it was before fully_shard or parallelize_module."
        )


def whole(t: Tensor) -> Tensor:
    """All of a tensor; of a DTensor its parts, put together. All ranks that hold a part have to take part."""
    if not is_sharded(t):
        return t
    with torch.no_grad(), without_transforms(), torch._C.DisableTorchFunction():
        return t.detach().full_tensor().contiguous()  # type: ignore[attr-defined]


def part_of(t: Tensor) -> Tensor:
    """What this rank keeps of a tensor."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        return t.detach().to_local()  # type: ignore[attr-defined]


def gather_selected(selected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The selected parameters, whole, on every rank.

    Raises:
        MemoryError: If the sharded ones among them do not fit into memory.
    """
    needed: dict[torch.device, int] = {}
    for t in filter(is_sharded, selected.values()):
        needed[t.device] = needed.get(t.device, 0) + t.nbytes
    for device, size in needed.items():
        if size > (free := free_memory(device)):
            raise MemoryError(
                f"The selected parameters are whole on every rank. The sharded ones among them take "
                f"{format_bytes(size)}, and {format_bytes(free)} are free. Select fewer parameters with params=, such "
                "as adapters or the top layers."
            )
    return {name: whole(t.detach()) for name, t in selected.items()}


def put_at_rest(model: nn.Module) -> None:
    """Let FSDP2 modules keep the parts of their weights alone, as they do before a forward pass."""
    found = sys.modules.get("torch.distributed.fsdp")
    if found is None:
        return
    for module in model.modules():
        given = vars(module).get(GIVEN, module)
        if isinstance(given, found.FSDPModule):
            given.reshard()


GIVEN = "_linnet_given"
"""Attribute of a shallow copy of a module: the module that the copy was made of."""


@final
class ShardedWeights:
    """The weights of a network that lie in parts on the ranks.

    Args:
        tensors: The DTensors of linnet's copy of the module, by name.
        selected: Names of the parameters that other tensors stand for in a pass.
        ranks: The ranks; all of them make the same objects in the same order.

    Attributes:
        tensors: The DTensors, by name.
        ranks: The ranks.
    """

    def __init__(self, tensors: Mapping[str, Tensor], selected: Sequence[str], ranks: Ranks) -> None:
        checks.check_whole_numbers(tensors)
        self.tensors, self.ranks = dict(tensors), ranks
        self._names = {id(t): name for name, t in self.tensors.items()}
        self._places = {name: i for i, name in enumerate(self.tensors)}
        self._selected = frozenset(selected)
        self._vectors: dict[str, Tensor] = {}
        self._check_members()
        self._number = ranks.register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeights:
        return self

    def _check_members(self) -> None:
        """Raise if a rank that holds a part of a weight is not among the ranks."""
        holders = {rank for t in self.tensors.values() for rank in t.device_mesh.mesh.flatten().tolist()}  # type: ignore[attr-defined]
        if self.ranks.world > 1 and not holders <= set(self.ranks.members):
            raise ValueError(
                f"The weights lie in parts on the ranks {sorted(holders)}, and mesh= has the ranks "
                f"{sorted(self.ranks.members)}. Pass the whole mesh on which the model was sharded, or no mesh."
            )

    def assemble(self, place: int) -> Tensor:
        """A weight, whole. All ranks call this together."""
        name = list(self.tensors)[place]
        found = whole(self.tensors[name])
        if found.ndim < 2:
            self._vectors[name] = found
        return found

    def describe(self) -> str:
        """What is sharded, in words."""
        return f"{format_bytes(sum(t.nbytes for t in self.tensors.values()))} of sharded weights gathered call by call"

    def keeps(self, name: str) -> bool:
        """Whether a weight was gathered and kept."""
        return name in self._vectors

    def gather(self, name: str) -> Tensor:
        """A weight, whole. The other ranks give their parts at their next meeting."""
        if name in self._vectors:
            return self._vectors[name]
        with torch.no_grad(), without_transforms(), torch._C.DisableTorchFunction():
            return self.ranks.fetch(self._number, self._places[name])

    def name_of(self, t: Tensor, *, all_: bool) -> str:
        """The name of a DTensor that a call uses; raise if a pass may not read it.

        Args:
            t: The tensor.
            all_: Whether selected parameters may be read too.
        """
        name = self._names.get(id(t))
        if name is None:
            raise checks.unknown_shard(t)
        if name in self._selected and not all_:
            raise checks.original_is_read(name)
        return name

    @contextmanager
    def in_use(self, *, all_: bool = False) -> Iterator[None]:
        """A forward pass, in which each call gets the weights whole.

        Args:
            all_: Whether selected parameters may be read too.
        """
        with _Gathering(self, all_=all_):
            yield


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps for the backward pass in place of a weight, or a view of one."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Given:
    """What autograd keeps of another argument of the same call."""

    packed: Any
    argument: Tensor | None
    version: int


@final
class _Gathering(TorchFunctionMode):
    """Gathers the sharded weights among the arguments of each call, for this call alone."""

    def __init__(self, weights: ShardedWeights, *, all_: bool) -> None:
        super().__init__()
        self.weights, self.all_ = weights, all_

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = {id(t): t for t in _shards((args, kwargs))}
        if not found or _asks(func):
            return func(*args, **kwargs)
        names = {key: self.weights.name_of(t, all_=self.all_) for key, t in found.items()}
        if args and id(args[0]) in names:
            if writes(func):
                raise checks.parameter_is_written(names[id(args[0])])
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                raise checks.data_is_read(names[id(args[0])])
        full = {key: self.weights.gather(name) for key, name in names.items()}
        live = {address(full[key]): name for key, name in names.items() if not self.weights.keeps(name)}
        args, kwargs = _replaced(args, full), _replaced(kwargs, full)
        with _keeping_parts(self.weights, live, (args, kwargs)):
            return func(*args, **kwargs)


@contextmanager
def _keeping_parts(weights: ShardedWeights, live: Mapping[int, str], arguments: Any) -> Iterator[None]:
    """Autograd keeps the names of the weights at some addresses, and gathers them again in the backward pass.

    torch does not compare versions of what hooks keep. So the versions of the other arguments are compared here.
    """
    if not live or not torch.is_grad_enabled() or not any(t.requires_grad for t in _tensors(arguments)):
        yield
        return
    outer_pack, outer_unpack = saved_tensor_hooks()
    context = copy_context()
    others = {address(t): t.detach() for t in _tensors(arguments) if t.requires_grad and address(t) not in live}

    def pack(t: Tensor) -> _Saved | _Given:
        name = live.get(address(t))
        if name is not None:
            return _Saved(name, tuple(t.shape), t.stride(), int(t.storage_offset()))
        argument = others.get(address(t))
        return _Given(outer_pack(t.detach()), argument, 0 if argument is None else argument._version)

    def unpack(kept: _Saved | _Given) -> Tensor:
        if isinstance(kept, _Saved):
            # On a GPU the backward pass runs in another thread. The thread has to know in which block of `Ranks` it is.
            return context.copy().run(weights.gather, kept.name).as_strided(kept.size, kept.stride, kept.offset)
        if kept.argument is not None and kept.argument._version != kept.version:
            raise checks.overwritten_argument()
        return outer_unpack(kept.packed)

    with packing_saved_tensors(pack, unpack):
        yield


def _asks(func: Callable[..., Any]) -> bool:
    """Whether a function asks for something other than the values of a tensor."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in KEPT
    return func in QUESTIONS


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _shards(values: Any) -> Iterator[Tensor]:
    return filter(is_sharded, _tensors(values))


def _replaced(values: Any, full: Mapping[int, Tensor]) -> Any:
    """The same arguments with whole weights in the place of their parts."""
    if isinstance(values, Tensor):
        return full.get(id(values), values)
    if isinstance(values, dict):
        return {key: _replaced(value, full) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_replaced(value, full) for value in values)
    return values
