"""Where a network is cut for its features: before or after which layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from linnet._common import messages
from linnet.heads.pooling import first_tensor, last_hidden, tensor_of
from linnet.network.call_trace import Trace


class Reached(Exception):
    """No error: it ends a forward pass and carries what a module was given, or has returned, to who asked for it."""

    def __init__(self, value: Any, asked: object) -> None:
        super().__init__()
        self.value, self.asked = value, asked


@dataclass(frozen=True)
class Cut:
    """A place in a network.

    Attributes:
        name: Of a module; "" for the network itself.
        side: "input" or "output".
        implied: Whether it was found rather than named.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> str(named(model, "input of 2")), str(named(model, "1")), str(named(model, "output"))
        ('input of 2', '1', 'output')
    """

    name: str
    side: Literal["input", "output"] = "output"
    implied: bool = False

    def __str__(self) -> str:
        return f"input of {self.name}" if self.side == "input" else self.name or "output"

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the network computes here; all that comes later is not run."""
        if not self.name:
            return model(*args, **kwargs)
        module = model.get_submodule(self.name)
        asked = object()  # one network may stop inside another one that stops

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise Reached(next(iter((*args, *kwargs.values())), None), asked)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            raise Reached(out, asked)

        # Registered last, so that it sees what other hooks have made of it, as the rest of the network does.
        if self.side == "input":
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            handle = module.register_forward_hook(after)
        try:
            model(*args, **kwargs)
        except Reached as reached:
            if reached.asked is not asked:
                raise
            return reached.value
        finally:
            handle.remove()
        raise RuntimeError(
            f"The features are the {self}, and {self.name!r} was not called for these inputs. Name a module that "
            "every input passes through."
        )

    def later(self, trace: Trace) -> list[str]:
        """Modules that are called only after this place; of those in each other, the outer ones.

        What the network itself returns is there as soon as a module has returned it.
        """
        if self.name:
            call = trace.calls_of(self.name)[0]
            time = call.start if self.side == "input" else call.stop
        else:
            out = tensor_of(trace.output, str(self))
            made = [call.stop for call in trace.calls if call.name and first_tensor(call.output) is out]
            if not made:
                return []
            time = min(made)
        first: dict[str, int] = {}
        for each in trace.calls:
            first.setdefault(each.name, each.start)
        late = {name for name, start in first.items() if start >= time}
        return [name for name in first if name in late and not any(name.startswith(f"{other}.") for other in late)]


# Finding the place.


def named(model: nn.Module, features: str) -> Cut:
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
        return Cut(first, "output" if given == features else "input")
    if features in ("", "output"):
        return Cut("")
    near = get_close_matches(given, [name for name in modules if name], n=3, cutoff=0.4)
    hint = f"The nearest names: {messages.listing(near)}." if near else f"It has {messages.listing(list(modules)[1:])}."
    raise ValueError(f"features={features!r} names no module of the model. {hint}")


def found(model: nn.Module, trace: Trace) -> Cut:
    """Where the features of a network are that nobody has named: before the last Linear that it calls.

    Encoders that return their last hidden state, and models that say they have zero classes, have no head: their
    output is taken.
    """
    if last_hidden(trace.output) is not None or getattr(model, "num_classes", None) == 0:
        return Cut("", implied=True)
    linears = [call for call in trace.calls if isinstance(call.module, nn.Linear)]
    if not linears:
        names = list(dict.fromkeys(call.name for call in reversed(trace.calls) if call.name))
        called = f" The last modules called: {messages.listing(names, limit=4)}." if names else ""
        raise ValueError(
            f"{type(model).__name__} calls no nn.Linear, so there is no head to replace. Name the layer whose output "
            f"are the features, such as features='output' for what the model returns.{called}"
        )
    last = max(linears, key=lambda call: call.start)
    cut = Cut(last.name, "input", implied=True)
    x = last.args[0] if last.args else None
    if not isinstance(x, Tensor) or x.ndim != 2:
        shape = tuple(x.shape) if isinstance(x, Tensor) else messages.kind(x)
        raise ValueError(
            f"The last Linear that is called, {cut.name!r}, is given {shape}, not one vector for each example: it is "
            f"no head. Name the features: features='output' for what the model returns, features={str(cut)!r} for this "
            "place (pooled), or any module by name."
        )
    return cut


def check_called(cut: Cut, trace: Trace) -> None:
    """The named module is called exactly once in a forward pass."""
    count = len(trace.calls_of(cut.name))
    if count == 1:
        return
    what = "is not called" if count == 0 else f"is called {count} times"
    raise ValueError(
        f"The features are the {cut}, and {cut.name!r} {what} in one forward pass. Name a module that is called once: "
        f"{messages.listing([call.name for call in trace.calls if len(trace.calls_of(call.name)) == 1 and call.name])}."
    )


def ends_with(cut: Cut, trace: Trace) -> bool:
    """Whether what the module before which the network is cut returns is what the network returns."""
    call = trace.calls_of(cut.name)[0]
    try:
        out = messages.output_tensor(trace.output)
    except TypeError:
        return False
    return isinstance(call.output, Tensor) and call.output.shape == out.shape and bool((call.output == out).all())


def warn_if_not_head(cut: Cut, trace: Trace) -> None:
    """Say it when the last Linear, taken for the head, is not where the network ends."""
    if cut.implied and cut.side == "input" and not ends_with(cut, trace):
        warnings.warn(
            f"The last Linear that is called, {cut.name!r}, is taken for the head of the network, but its output is "
            f"not what the network returns, and what comes after it is left out. If that is meant, say "
            f"features={str(cut)!r}.",
            stacklevel=3,
        )
