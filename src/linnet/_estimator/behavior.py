"""The outputs of a network for a few inputs: they are kept in a file, and compared when the file is loaded.

A checksum of the weights does not tell one architecture from another: ReLU and Tanh have the same weights, which are
none. So a file holds a few inputs and the network's outputs for them. The inputs are no training examples: their
numbers are drawn at random, with the shapes, the dtypes and the ranges of two of them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from linnet.data import Batch, Source
from linnet.network import as_dtype

if TYPE_CHECKING:
    from linnet.jacobian import Linearization

PREFIX = "behavior."


def draw_inputs(source: Source) -> Batch:
    """Inputs like those of the source, drawn at random.

    Floating numbers are uniform between the smallest and the largest of the first examples. Whole numbers are drawn
    from those that the first examples have. Booleans, and whole numbers that are all 0 or 1, stay as they are: masks
    have to mask what there is.

    >>> from linnet.data.sources import as_source
    >>> batch = draw_inputs(as_source((torch.ones(5, 3), torch.arange(5)), torch.nn.Linear(3, 1)))
    >>> batch.n, batch.args, batch.rest
    (2, (tensor([[1., 1., 1.],
            [1., 1., 1.]]),), None)
    """
    batch = next(iter(source.batches(min(2, source.n)))).to("cpu")
    random = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        if t.is_complex():
            return torch.view_as_complex(drawn(torch.view_as_real(t).contiguous()))
        if t.is_floating_point():
            low, high = t.double().aminmax() if t.numel() else (0.0, 0.0)
            share = torch.rand(t.shape, dtype=torch.float64, generator=random)
            return (low + (high - low) * share).to(t.dtype)
        if t.dtype == torch.bool or not t.numel() or (t.min() >= 0 and t.max() <= 1):
            return t
        return t.flatten()[torch.randint(t.numel(), t.shape, generator=random)]

    inputs = batch.with_inputs(lambda t: drawn(t.detach()))
    return Batch(inputs.args, inputs.kwargs, None, start=0, n=batch.n)


def record(lin: Linearization, inputs: Batch | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The record that a file keeps: tensors and JSON; nothing where inputs cannot be kept or the network refuses them.

    Args:
        lin: The network.
        inputs: From `draw_inputs`, or from a file; None keeps nothing.
    """
    if inputs is None:
        return {}, None
    tensors: dict[str, Tensor] = {}
    try:
        form = {"args": _packed(inputs.args, tensors), "kwargs": _packed(inputs.kwargs, tensors)}
        f, size = _outputs(lin, inputs), _size(lin, inputs)
    except Exception:  # random inputs may be ones that the network rightly refuses, in words of its own
        return {}, None
    if not bool(f.isfinite().all()):
        return {}, None
    tensors[f"{PREFIX}outputs"] = f
    size = max(size, float(f.abs().max()))
    eps = torch.finfo(lin.rules.coarsest).eps  # a forward may round to another dtype than that of its weights
    return tensors, {**form, "n": inputs.n, "size": size, "eps": eps, "architecture": repr(lin.given)}


def check(
    path: str | os.PathLike[str], lin: Linearization, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None
) -> Batch | None:
    """Raise unless the network computes what it computed when the file was saved.

    Outputs may differ by ``eps^(2/3)`` of their size, with eps of the least precise dtype among the network's own and
    those of the computations: rounding, on another device too, and what it grows to in deep networks.

    Args:
        path: The file.
        lin: The network, with the weights that the file was made with.
        tensors: Tensors of the file.
        meta: What `record` gave; None in files that hold no outputs, which are taken as they are.

    Returns:
        The inputs, for the next file.
    """
    if meta is None:
        return None
    args, kwargs = (_unpacked(meta[key], tensors) for key in ("args", "kwargs"))
    inputs = Batch(args, kwargs, None, start=0, n=meta["n"])
    before = tensors[f"{PREFIX}outputs"]
    try:
        now = _outputs(lin, inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{_refused(path)}: it refuses the inputs that the file holds ({error}). {_names(lin, meta)}"
        ) from error
    allowed = max(_tolerance(lin), meta.get("eps", 0.0) ** (2 / 3)) * meta["size"]
    apart = float((now.to(before) - before).abs().max()) if now.shape == before.shape else float("inf")
    if not apart <= allowed:
        raise ValueError(
            f"{_refused(path)}: for inputs that the file holds, its outputs differ by {apart:.3g}, and rounding "
            f"explains {allowed:.3g}. {_names(lin, meta)}"
        )
    return inputs


def _refused(path: Any) -> str:
    return f"{path} was fitted around a network that computes something else with the same weights"


def _names(lin: Linearization, meta: Mapping[str, Any]) -> str:
    """The lines in which the printed architectures differ."""
    was, now = meta["architecture"].splitlines(), repr(lin.given).splitlines()
    pairs = [line for line in difflib.ndiff(was, now) if line[0] in "-+"]
    gone, new = ([line[2:].strip() for line in pairs if line[0] == sign][:3] for sign in "-+")
    if not pairs:
        return (
            "Both print alike, so that the difference is in a forward, in output= or score=, or in a setting that is "
            "not printed. Load the file with the network and the functions that it was fitted with."
        )
    return (
        f"The file's network has {', '.join(gone) or 'no such line'}; this one has {', '.join(new) or 'no such line'}. "
        "Load the file with the network that it was fitted with."
    )


@torch.no_grad()
def _outputs(lin: Linearization, inputs: Batch) -> Tensor:
    with lin.network.together(), lin.network.in_precision("highest"):
        return lin.network.as_at_first().forward({}, inputs.to(lin.device))  # before any pass has left something behind


@torch.no_grad()
def _size(lin: Linearization, inputs: Batch) -> float:
    """The largest number that the network returns: a score may be the small difference of large ones."""
    batch = inputs.to(lin.device)
    dtype = lin.network.cast
    if dtype is not None:
        batch = batch.with_inputs(lambda t: as_dtype(t, dtype))
    with lin.network.together(), lin.network.in_precision("highest"):
        raw = lin.network.as_at_first().run(*batch.args, **batch.kwargs)
    found = [t for t in pytree.tree_leaves(raw) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    return max((float(t.abs().max()) for t in found), default=0.0)


def _tolerance(lin: Linearization) -> float:
    dtypes = {t.dtype for t in lin.given.parameters() if t.is_floating_point()} | {lin.model_dtype}
    return max(torch.finfo(dtype).eps for dtype in dtypes) ** (2 / 3)


# Inputs as tensors and JSON.


def _packed(value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        name = f"{PREFIX}input.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(item, tensors) for key, item in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_packed(item, tensors) for item in value]}
    if value is None or type(value) in (bool, int, float):
        return {"value": value}
    raise TypeError(f"A file cannot keep an input of type {type(value).__name__}.")


def _unpacked(form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unpacked(item, tensors) for key, item in value.items()}
    if kind == "value":
        return value
    return (tuple if kind == "tuple" else list)(_unpacked(item, tensors) for item in value)
