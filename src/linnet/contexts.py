"""Torch settings that a call of linnet needs, set for its duration and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Precision = Literal["highest", "products", "high", "bf16"]


def check_precision(precision: str) -> None:
    """Raise unless ``precision`` is one of the names."""
    if precision not in get_args(Precision):
        raise ValueError(
            f"precision must be 'highest' (IEEE float32), 'products' (the network in float32, products with its "
            f"Jacobian in tf32), 'high' (tf32 on GPUs that have it) or 'bf16' (the network under bfloat16 autocast, "
            f"products in float32); got {precision!r}."
        )


def of_network(precision: Precision) -> Precision:
    """The precision in which the network runs and its rows are formed, where products have another."""
    return "highest" if precision == "products" else precision


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Float32 products and convolutions at the given precision inside the block, whatever surrounds it."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # no gradients could be had there
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(_tf32(precision != "highest"))
        yield


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@contextmanager
def network(model: nn.Module, precision: Precision, device: torch.device) -> Iterator[None]:
    """For running the network: one attention path, recurrent layers that can be differentiated in eval mode."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        if device.type == "cuda" and _recurrent(model):
            # Not cudnn.flags: it reads the older tf32 flags, which torch refuses beside the newer ones.
            stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
            torch.backends.cudnn.enabled = False
        if precision == "bf16":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        yield


@contextmanager
def forward_mode(model: nn.Module) -> Iterator[None]:
    """For torch.func transforms: kernels that have forward-mode derivatives and batching rules."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if _recurrent(model):
            # set_flags, since the context manager of the same module also writes flags that warn on CPUs
            before = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
            stack.callback(torch.backends.mkldnn.set_flags, _enabled=before[0], _fp32_precision=None)
        yield


_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _recurrent(model: nn.Module) -> bool:
    """Whether a module of linnet's own, which keeps its structure, has recurrent layers; looked for once."""
    if model not in _known:
        _known[model] = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    return _known[model]
