"""Torch settings that a call of linnet needs, set for its duration and put back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

Precision = Literal["highest", "products", "high", "bf16"]


def check_precision(precision: str) -> None:
    """Raise unless ``precision`` is one of the names."""
    if precision not in get_args(Precision):
        raise ValueError(
            f"precision must be 'highest' (IEEE float32), 'products' (the network in float32, products with its "
            f"Jacobian in tf32), 'high' (tf32 on GPUs that have it) or 'bf16' (the network under bfloat16 autocast, "
            f"products in float32); got {precision!r}."
        )


def network_precision(precision: Precision) -> Precision:
    """The precision in which the network runs and its rows are formed, where products have another."""
    return "highest" if precision == "products" else precision


class Switch:
    """A setting of the whole process, held at a value while any block of any thread needs that value.

    Torch has no such setting for one thread alone. The first block saves what it found, and the last one to end puts
    that back, so that blocks of several threads may overlap. Where two threads want different values at the same time,
    both get the exact one, which is never wrong and at worst slower.

    Args:
        read: Gives the present value.
        write: Sets a value.
        exact: The value that counts where threads disagree.

    Example:
        >>> found = {"fast": True}
        >>> switch = Switch(lambda: found["fast"], lambda value: found.update(fast=value), exact=False)
        >>> with switch.at(False):
        ...     print(found)
        {'fast': False}
        >>> found
        {'fast': True}
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], *, exact: Any) -> None:
        self._read, self._write, self._exact = read, write, exact
        # One thread may come here twice: the garbage collector closes interrupted blocks whenever it runs.
        self._lock = threading.RLock()
        self._wants: dict[object, tuple[int, Any]] = {}  # of each block: its thread, and the value
        self._before: list[Any] = []  # the value to put back, while there is one

    @contextmanager
    def at(self, value: Any) -> Iterator[None]:
        """Hold the setting at a value inside the block."""
        block = object()
        # Twice: an interrupt that comes before the end of one call of `_end` leaves the work to the next.
        try:
            try:
                self._begin(block, value)
                yield
            finally:
                self._end(block)
        finally:
            self._end(block)

    def _begin(self, block: object, value: Any) -> None:
        with self._lock:
            if not self._before:
                self._before.append(self._read())
            self._wants[block] = threading.get_ident(), value
            self._apply()

    def _end(self, block: object) -> None:
        with self._lock:
            self._wants.pop(block, None)
            self._apply()

    def _apply(self) -> None:
        """Set what the blocks want, or what was before them; it may be broken off anywhere and called again."""
        by_thread = dict(list(self._wants.values()))  # of each thread the last block's
        if by_thread:
            values = list(by_thread.values())
            self._write(self._exact if self._exact in values else values[0])
        elif self._before:
            self._write(self._before[0])
            self._before.clear()


def _tf32_read() -> tuple[str, ...]:
    return tuple(place.fp32_precision for place in _tf32_places())


def _tf32_write(values: tuple[str, ...]) -> None:
    for place, value in zip(_tf32_places(), values, strict=True):
        place.fp32_precision = value


def _tf32_places() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def _attention_read() -> tuple[bool, ...]:
    of = torch.backends.cuda
    return of.math_sdp_enabled(), of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.cudnn_sdp_enabled()


def _attention_write(values: tuple[bool, ...]) -> None:
    of = torch.backends.cuda
    writes = of.enable_math_sdp, of.enable_flash_sdp, of.enable_mem_efficient_sdp, of.enable_cudnn_sdp
    for write, value in zip(writes, values, strict=True):
        write(value)


def _mkldnn_write(enabled: bool) -> None:
    # set_flags, since the context manager of the same module also writes flags that warn on CPUs
    torch.backends.mkldnn.set_flags(_enabled=enabled, _fp32_precision=None)


IEEE, TF32 = ("ieee",) * 3, ("tf32",) * 3
MATH = (True, False, False, False)
PRECISION = Switch(_tf32_read, _tf32_write, exact=IEEE)
ATTENTION = Switch(_attention_read, _attention_write, exact=MATH)
FASTPATH = Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, exact=False)
MKLDNN = Switch(lambda: torch.backends.mkldnn.enabled, _mkldnn_write, exact=False)
# Not cudnn.flags: it reads the older tf32 flags, which torch refuses beside the newer ones.
CUDNN = Switch(
    lambda: torch.backends.cudnn.enabled, lambda value: setattr(torch.backends.cudnn, "enabled", value), exact=False
)


class _NoReentrantCheckpoint:
    """In the place of torch's function that computes a part of a network again in the backward pass."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _no_checkpoint(
    function: Callable[..., Any], preserve: bool, context_fn: Callable[[], Any], *rest: Any, **kwargs: Any
) -> Iterator[None]:
    """In the place of torch's context that forgets what the forward pass has saved."""
    with context_fn()[0]:
        yield


def _no_checkpoint_by_name(*args: Any, context_fn: Callable[[], Any], **kwargs: Any) -> Iterator[None]:
    """The same for versions of torch that name all settings of the context."""
    return _no_checkpoint(args[0], False, context_fn)


def _checkpoint_read() -> dict[str, Any]:
    return {name: getattr(torch.utils.checkpoint, name) for name in NO_CHECKPOINTS}


def _checkpoint_write(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(torch.utils.checkpoint, name, value)


# In the backward pass the selected parameters are no longer in their places, and what is computed again would be
# computed with other weights. Functions may hold ``checkpoint`` itself under any name, so its parts are replaced.
NO_CHECKPOINTS = {
    name: part
    for name, part in {
        "CheckpointFunction": _NoReentrantCheckpoint,
        "_checkpoint_without_reentrant_generator": _no_checkpoint,
        "_checkpoint_without_reentrant_generator_impl": _no_checkpoint_by_name,  # torch 2.15
    }.items()
    if hasattr(torch.utils.checkpoint, name)
}
CHECKPOINTS = Switch(_checkpoint_read, _checkpoint_write, exact=NO_CHECKPOINTS)


@cache
def _check_checkpoints() -> None:
    """Warn where this version of torch has other parts, so that checkpoints would be computed again all the same."""
    calls = []

    def part(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    # One node in the graph, and one call: reading what the node saved would compute a checkpoint again.
    x, found = torch.zeros(1, device="cpu", requires_grad=True), []
    with torch.inference_mode(False), torch.enable_grad(), CHECKPOINTS.at(NO_CHECKPOINTS):
        for reentrant in (True, False):
            node: Any = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant).grad_fn
            found.append(getattr(node, "_saved_self", None))
    if len(calls) != 2 or any(saved is None for saved in found):
        warnings.warn(
            f"linnet does not know how torch {torch.__version__} computes parts of a network again in the backward "
            "pass. Switch gradient checkpointing off in the network before you use linnet.",
            stacklevel=2,
        )


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Float32 products and convolutions at the given precision inside the block, whatever surrounds it."""
    inference = torch.is_inference_mode_enabled()  # no gradients could be had there
    with (
        torch.inference_mode(False) if inference else nullcontext(),
        torch.no_grad() if inference else nullcontext(),
        torch.autocast(device.type, enabled=False),
        tf32(precision != "highest") if device.type == "cuda" else nullcontext(),
    ):
        yield


def tf32(allowed: bool) -> AbstractContextManager[None]:
    """Products and convolutions of a GPU in tf32, or not, inside the block."""
    return PRECISION.at(TF32 if allowed else IEEE)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no tf32; unlike `arithmetic` it stays in inference mode, to write to its tensors."""
    with torch.autocast(device.type, enabled=False), tf32(False) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def network_settings(model: nn.Module, precision: Precision, device: torch.device) -> Iterator[None]:
    """For running the network: one attention path, no gradient checkpointing, recurrent layers with a derivative."""
    _check_checkpoints()
    with (
        FASTPATH.at(False),
        CHECKPOINTS.at(NO_CHECKPOINTS),
        CUDNN.at(False) if device.type == "cuda" and _recurrent(model) else nullcontext(),
        torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext(),
    ):
        yield


@contextmanager
def forward_mode(model: nn.Module) -> Iterator[None]:
    """For torch.func transforms: kernels that have forward-mode derivatives and batching rules."""
    with ATTENTION.at(MATH), MKLDNN.at(False) if _recurrent(model) else nullcontext():
        yield


@contextmanager
def noting_saved_tensors(note: Callable[[Tensor], Any]) -> Iterator[None]:
    """Every tensor that autograd saves inside the block goes through ``note`` first."""
    with packing_saved_tensors(note, _as_saved):
        yield


@contextmanager
def packing_saved_tensors(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Pack every tensor that autograd saves inside the block, and unpack the tensor in the backward pass.

    As `torch.autograd.graph.saved_tensors_hooks`, which an interrupt at the wrong moment leaves behind for good.
    """
    graph: Any = torch._C._autograd
    hooks = pack, unpack

    def end() -> None:
        if graph._top_saved_tensors_default_hooks(True) == hooks:
            graph._pop_saved_tensors_default_hooks()

    try:  # twice, as in `Switch.at`
        try:
            graph._push_saved_tensors_default_hooks(*hooks)
            yield
        finally:
            end()
    finally:
        end()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """How autograd packs and unpacks what it saves here."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (_as_saved, _as_saved) if found is None else found


def _as_saved(t: Tensor) -> Tensor:
    return t


@contextmanager
def without_transforms() -> Iterator[None]:
    """Outside of the transforms of torch.func that are active, such as a batched backward pass."""
    with temporarily_clear_interpreter_stack():
        yield


@contextmanager
def without_scripting_warnings() -> Iterator[None]:
    """For code of other packages that calls `torch.jit.script`, of which torch warns whoever runs the code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script")
        yield


@cache
def _load_decompositions() -> None:
    """Let torch script the decompositions of forward mode, inside a level: torch does so for the first dual tensor."""
    with without_scripting_warnings():
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


_dual = threading.RLock()


@contextmanager
def dual_level() -> Iterator[None]:
    """As `torch.autograd.forward_ad.dual_level`, of which a process can have one: threads wait for each other."""
    ad: Any = forward_ad
    with _dual:
        outer = ad._current_level

        def end() -> None:
            with suppress(RuntimeError):  # there is no such level, or no longer
                torch._C._exit_dual_level(level=outer + 1)
            ad._current_level = outer

        try:  # twice, as in `Switch.at`
            try:
                ad.enter_dual_level()
                _load_decompositions()
                yield
            finally:
                end()
        finally:
            end()


_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def module_lock(model: nn.Module) -> AbstractContextManager[Any]:
    """For running a module with other parameters in place of its own: threads wait for each other.

    `torch.func.functional_call` writes the parameters into the module, where another thread would find them.
    """
    return _locks.setdefault(model, threading.RLock())


_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _recurrent(model: nn.Module) -> bool:
    """Whether a module of linnet's own, which keeps its structure, has recurrent layers; looked for once."""
    if model not in _known:
        _known[model] = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    return _known[model]
