"""Features of any shape as one vector for each example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from linnet._common import messages

Pool = Literal["auto", "none", "spatial", "tokens", "cls", "flatten"] | Callable[[Tensor], Tensor]
POOLS = ("auto", "none", "spatial", "tokens", "cls", "flatten")
SIGNALS = (
    nn.Conv1d,
    nn.ConvTranspose1d,
    nn.BatchNorm1d,
    nn.InstanceNorm1d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
)
"""Layers whose outputs with three axes are (n, d, length) rather than (n, T, d)."""

CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
"""Layers whose outputs with more axes are (n, h, w, d) rather than (n, d, h, w)."""


def resolve(pool: Pool, raw: Any, where: str, *, after: nn.Module | None) -> Pool:
    """How features are pooled where nobody has said: by their axes, and by the module that they come out of."""
    if pool != "auto":
        return pool
    ndim = tensor_of(raw, where).ndim
    if ndim < 3:
        return "none"
    first = isinstance(after, SIGNALS) if ndim == 3 else not isinstance(after, CHANNELS_LAST)
    return "spatial" if first else "tokens"


def vector(raw: Any, pool: Pool, mask: Tensor | None, where: str) -> Tensor:
    """Features (n, d) from what a module was given or has returned.

    Args:
        raw: A tensor; of a tuple the first item; of a model output its last hidden state or its logits.
        pool: "spatial" averages maps (n, d, ...) over positions, "tokens" sequences (n, T, d) over the tokens that the
            mask keeps (and maps (n, h, w, d) over positions), "cls" takes the first token, "flatten" all numbers,
            "none" what is (n, d); or a function.
        mask: (n, T), 1 for tokens and 0 for padding, or None.
        where: What it is, for errors.

    Example:
        >>> import torch
        >>> vector(torch.ones(5, 8, 3, 3), "spatial", None, "layer4").shape
        torch.Size([5, 8])
        >>> vector(torch.arange(6.0).view(1, 3, 2), "tokens", torch.tensor([[1, 1, 0]]), "output")
        tensor([[1., 2.]])
    """
    h = tensor_of(raw, where)
    came = tuple(h.shape)
    if callable(pool):
        h = pool(h)
    elif pool == "flatten":
        h = h.flatten(1)
    elif pool == "spatial" and h.ndim > 2:
        h = h.flatten(2).mean(2)
    elif pool == "cls" and h.ndim == 3:
        h = h[:, 0]
    elif pool == "tokens" and h.ndim > 2:
        h = _averaged(h, mask, where) if h.ndim == 3 else h.flatten(1, -2).mean(1)
    elif pool != "none":
        needed = "maps (n, d, h, w)" if pool == "spatial" else "sequences (n, T, d)"
        raise ValueError(f"pool={pool!r} needs {needed}; the {where} has shape {came}.")
    if not isinstance(h, Tensor) or h.ndim != 2:
        shape = tuple(h.shape) if isinstance(h, Tensor) else messages.kind(h)
        after = f" and, after pool=, {shape}" if callable(pool) else ""
        raise ValueError(
            f"A head needs one vector of features for each example, (n, d); the {where} has shape {came}{after}. Name "
            "another layer with features=, or pass pool=, a function that makes (n, d) of it."
        )
    return h


def _averaged(h: Tensor, mask: Tensor | None, where: str) -> Tensor:
    if mask is None:
        return h.mean(1)
    if mask.shape != h.shape[:2]:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)} and the {where} {tuple(h.shape)}: they do not say which "
            "tokens to average. Pass pool='cls', or a function that makes (n, d) of it."
        )
    # An example without a token becomes NaN here, which is refused by its number.
    weight = mask.to(h.dtype)
    return (h * weight[:, :, None]).sum(1) / weight.sum(1, keepdim=True)


def mask_of(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask among the arguments of a forward."""
    mask = kwargs.get("attention_mask")
    if mask is None and args:
        names = list(inspect.signature(forward).parameters)[: len(args)]
        mask = dict(zip(names, args, strict=False)).get("attention_mask")
    return mask if isinstance(mask, Tensor) else None


def check_pool(pool: object) -> None:
    """``pool`` is a name or a function."""
    if not callable(pool) and pool not in POOLS:
        raise ValueError(f"pool must be one of {', '.join(map(repr, POOLS))} or a function; got {pool!r}.")


def last_hidden(raw: Any) -> Tensor | None:
    """The last hidden state of a model output without logits."""

    def item(key: str) -> Any:
        return raw.get(key) if isinstance(raw, Mapping) else getattr(raw, key, None)

    hidden = item("last_hidden_state")
    return hidden if isinstance(hidden, Tensor) and item("logits") is None else None


def first_tensor(raw: Any) -> Any:
    """Of a tuple or list the first item, of a model output its last hidden state."""
    if isinstance(raw, tuple | list):
        return raw[0] if raw else None
    return raw if isinstance(raw, Tensor) else last_hidden(raw)


def tensor_of(raw: Any, where: str) -> Tensor:
    first = first_tensor(raw)
    if isinstance(first, Tensor):
        return first
    try:
        return messages.output_tensor(raw)
    except TypeError:
        raise TypeError(
            f"The features need to be a tensor; the {where} is {messages.kind(raw)}. Name another layer with features=."
        ) from None
