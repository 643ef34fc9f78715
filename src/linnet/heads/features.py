"""Where the features of a network are, and how they become one vector for each example."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from linnet._common import messages
from linnet.network import Trace, checks


class LocationReached(Exception):
    """Ends a forward pass at a location. It is no error: it carries what the network computes there.

    Args:
        value: What the network computes at the location.
        request: The request that the pass belongs to.
    """

    def __init__(self, value: Any, request: object) -> None:
        super().__init__()
        self.value, self.request = value, request


@dataclass(frozen=True)
class FeatureLocation:
    """A place in a network: the input or the output of a module.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> [str(parse_location(model, text)) for text in ("input of 2", "1", "output")]
        ['input of 2', '1', 'output']
    """

    name: str  # name of the module; "" for the network itself
    side: Literal["input", "output"] = "output"  # "input" or "output"
    implied: bool = False  # whether linnet found the place; False where the user named it

    def __str__(self) -> str:
        return f"input of {self.name}" if self.side == "input" else self.name or "output"

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the network computes here. Nothing that comes later is run."""
        if not self.name:
            return model(*args, **kwargs)
        module = model.get_submodule(self.name)
        request = object()  # a network that stops may contain another network that stops

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise LocationReached(next(iter((*args, *kwargs.values())), None), request)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            raise LocationReached(out, request)

        # Registered last, so that the hook sees what other hooks return, as the rest of the network does.
        if self.side == "input":
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(after)
        try:
            model(*args, **kwargs)
        except LocationReached as reached:
            if reached.request is not request:
                raise
            return reached.value
        finally:
            handle.remove()
        raise RuntimeError(
            f"The features are the {self}, and {self.name!r} was not called for these inputs. Name a module that "
            "every input passes through."
        )

    def find_later(self, trace: Trace) -> list[str]:
        """Names of the modules that are called only after this place; of modules in each other, the outer ones.

        The output of the network is complete as soon as a module has returned the same tensor.
        """
        if self.name:
            call = trace.calls_of(self.name)[0]
            time = call.start if self.side == "input" else call.stop
        else:
            out = read_tensor(trace.output, str(self))
            made = [call.stop for call in trace.calls if call.name and find_first_tensor(call.output) is out]
            if not made:
                return []
            time = min(made)
        first: dict[str, int] = {}
        for each in trace.calls:
            first.setdefault(each.name, each.start)
        late = {name for name, start in first.items() if start >= time}
        return [name for name in first if name in late and not any(name.startswith(f"{other}.") for other in late)]

    def check_called(self, trace: Trace) -> None:
        """Raise unless the module is called exactly once in a forward pass."""
        count = len(trace.calls_of(self.name))
        if count == 1:
            return
        what = "is not called" if count == 0 else f"is called {count} times"
        once = [call.name for call in trace.calls if call.name and len(trace.calls_of(call.name)) == 1]
        raise ValueError(
            f"The features are the {self}, and {self.name!r} {what} in one forward pass. Name a module that is called "
            f"once: {messages.listing(once)}."
        )

    def is_at_end(self, trace: Trace) -> bool:
        """Whether the network returns what the module returns."""
        output = trace.calls_of(self.name)[0].output
        try:
            returned = checks.output_tensor(trace.output)
        except TypeError:
            return False
        return isinstance(output, Tensor) and output.shape == returned.shape and bool((output == returned).all())

    def warn_if_not_at_end(self, trace: Trace) -> None:
        """Warn where linnet takes the last Linear for the head, and the network does not end with that Linear."""
        if self.implied and self.side == "input" and not self.is_at_end(trace):
            warnings.warn(
                f"The last Linear that is called, {self.name!r}, is taken for the head of the network, but its output "
                f"is not what the network returns, and what comes after it is left out. If that is meant, say "
                f"features={str(self)!r}.",
                stacklevel=4,
            )


def parse_location(model: nn.Module, features: str) -> FeatureLocation:
    """The place that a user has named: a module (its output), "input of" a module, or "output" (of the network)."""
    if not isinstance(features, str):
        raise TypeError(
            "features must be the name of a module, 'input of' and a name, 'output', or None for the input of the last "
            f"Linear; got {messages.kind(features)}."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    given = features.removeprefix("input of ") if features not in modules else features
    if given in modules and given:
        first = next(name for name, module in model.named_modules() if module is modules[given])
        return FeatureLocation(first, "output" if given == features else "input")
    if features in ("", "output"):
        return FeatureLocation("")
    near = get_close_matches(given, [name for name in modules if name], n=3, cutoff=0.4)
    hint = f"The nearest names: {messages.listing(near)}." if near else f"It has {messages.listing(list(modules)[1:])}."
    raise ValueError(f"features={features!r} names no module of the model. {hint}")


def find_location(model: nn.Module, trace: Trace) -> FeatureLocation:
    """The place of the features where nobody has named it: before the last Linear that the network calls.

    Encoders that return their last hidden state have no head, and so do models that have zero classes. Their features
    are their output.
    """
    if find_last_hidden(trace.output) is not None or getattr(model, "num_classes", None) == 0:
        return FeatureLocation("", implied=True)
    linears = [call for call in trace.calls if isinstance(call.module, nn.Linear)]
    if not linears:
        names = list(dict.fromkeys(call.name for call in reversed(trace.calls) if call.name))
        called = f" The last modules called: {messages.listing(names, limit=4)}." if names else ""
        raise ValueError(
            f"{type(model).__name__} calls no nn.Linear, so there is no head to replace. Name the layer whose output "
            f"are the features, such as features='output' for what the model returns.{called}"
        )
    last = max(linears, key=lambda call: call.start)
    location = FeatureLocation(last.name, "input", implied=True)
    x = last.args[0] if last.args else None
    if not isinstance(x, Tensor) or x.ndim != 2:
        shape = tuple(x.shape) if isinstance(x, Tensor) else messages.kind(x)
        raise ValueError(
            f"The last Linear that is called, {last.name!r}, is given {shape}, not one vector for each example: it is "
            f"no head. Name the features: features='output' for what the model returns, features={str(location)!r} for "
            "this place (pooled), or any module by name."
        )
    return location


# One vector for each example.

Pool = Literal["auto", "none", "spatial", "tokens", "cls", "flatten"] | Callable[[Tensor], Tensor]
POOLS = ("auto", "none", "spatial", "tokens", "cls", "flatten")
CHANNELS_SECOND = (
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


def check_pool(pool: object) -> None:
    """Raise unless ``pool`` is a known name or a function."""
    if not callable(pool) and pool not in POOLS:
        raise ValueError(f"pool must be one of {', '.join(map(repr, POOLS))} or a function; got {pool!r}.")


def choose_pool(pool: Pool, raw: Any, where: str, *, after: nn.Module | None) -> Pool:
    """How to pool features where ``pool`` is "auto": by their axes and by the module that they come out of."""
    if pool != "auto":
        return pool
    ndim = read_tensor(raw, where).ndim
    if ndim < 3:
        return "none"
    spatial = isinstance(after, CHANNELS_SECOND) if ndim == 3 else not isinstance(after, CHANNELS_LAST)
    return "spatial" if spatial else "tokens"


def pool_features(raw: Any, pool: Pool, mask: Tensor | None, where: str) -> Tensor:
    """Features (n, d) from the input or the output of a module.

    Args:
        raw: A tensor; a tuple, whose first item counts; or a model output, whose last hidden state or logits count.
        pool: "spatial" averages maps (n, d, ...) over positions. "tokens" averages sequences (n, T, d) over the tokens
            that the mask keeps, and maps (n, h, w, d) over positions. "cls" takes the first token. "flatten" takes all
            numbers. "none" takes features that are (n, d) already. Or a function.
        mask: (n, T), 1 for tokens and 0 for padding, or None.
        where: The place of the features, for errors.

    Example:
        >>> import torch
        >>> pool_features(torch.ones(5, 8, 3, 3), "spatial", None, "layer4").shape
        torch.Size([5, 8])
        >>> pool_features(torch.arange(6.0).view(1, 3, 2), "tokens", torch.tensor([[1, 1, 0]]), "output")
        tensor([[1., 2.]])
    """
    h = read_tensor(raw, where)
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
        h = _average_tokens(h, mask, where) if h.ndim == 3 else h.flatten(1, -2).mean(1)
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


def _average_tokens(h: Tensor, mask: Tensor | None, where: str) -> Tensor:
    if mask is None:
        return h.mean(1)
    if mask.shape != h.shape[:2]:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)} and the {where} {tuple(h.shape)}: they do not say which "
            "tokens to average. Pass pool='cls', or a function that makes (n, d) of it."
        )
    # An example without a token becomes NaN here, and a later check refuses it by its number.
    weight = mask.to(h.dtype)
    return (h * weight[:, :, None]).sum(1) / weight.sum(1, keepdim=True)


def find_mask(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The attention mask among the arguments of a forward."""
    mask = kwargs.get("attention_mask")
    if mask is None and args:
        names = list(inspect.signature(forward).parameters)[: len(args)]
        mask = dict(zip(names, args, strict=False)).get("attention_mask")
    return mask if isinstance(mask, Tensor) else None


def find_last_hidden(raw: Any) -> Tensor | None:
    """The last hidden state of a model output without logits."""

    def item(key: str) -> Any:
        return raw.get(key) if isinstance(raw, Mapping) else getattr(raw, key, None)

    hidden = item("last_hidden_state")
    return hidden if isinstance(hidden, Tensor) and item("logits") is None else None


def find_first_tensor(raw: Any) -> Any:
    """The first item of a tuple or list; the last hidden state of a model output."""
    if isinstance(raw, tuple | list):
        return raw[0] if raw else None
    return raw if isinstance(raw, Tensor) else find_last_hidden(raw)


def read_tensor(raw: Any, where: str) -> Tensor:
    """The tensor that the input or the output of a module stands for."""
    first = find_first_tensor(raw)
    if isinstance(first, Tensor):
        return first
    try:
        return checks.output_tensor(raw)
    except TypeError:
        raise TypeError(
            f"The features need to be a tensor; the {where} is {messages.kind(raw)}. Name another layer with features=."
        ) from None
