"""A network up to its features, with a linear head on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linnet.data import Batch, Source, as_source, leaves
from linnet.heads.features import (
    FeatureLocation,
    Pool,
    check_pool,
    choose_pool,
    find_location,
    find_mask,
    parse_location,
    pool_features,
)
from linnet.network import Trace, checks, copy_sharing_parameters, trace


@dataclass(frozen=True)
class Readout:
    """A fitted readout, ``weight @ x + bias``."""

    weight: np.ndarray  # (c, d)
    bias: np.ndarray  # (c,)
    task: str  # "classification", "multilabel" or "regression"
    # the label of each output; where c is 1, the labels of 0 and 1; the numbers of the columns where multi-label; None
    # for regression
    classes: np.ndarray | None
    penalty: Any  # lambda; (c,) where each column has its own, else one number


class Head(nn.Linear):
    """A fitted linear head.

    Attributes:
        classes_: The label of each output; where there is one output, the labels of 0 and 1; None for regression.
        task_: "classification", "multilabel" or "regression".
        penalty_: The ridge penalty on the weights of standardized features, one number or one for each output.
        features_: Where the features come from, as `attach_head` takes it.
    """

    fitted_to_labels = True  # which `linnet.network.has_fitted_head` looks for

    def __init__(self, readout: Readout, features: str, *, dtype: torch.dtype, device: torch.device) -> None:
        c, d = readout.weight.shape
        super().__init__(d, c, dtype=dtype, device=device)
        with torch.no_grad():
            self.weight.copy_(torch.as_tensor(readout.weight))
            self.bias.copy_(torch.as_tensor(readout.bias))
        self.classes_, self.task_ = readout.classes, readout.task
        self.penalty_, self.features_ = readout.penalty, features

    def reset_parameters(self) -> None:
        """Do nothing: the readout gives all values, and the user's random numbers stay where they are."""


class NetworkWithHead(nn.Module):
    """A network up to its features, and a head on them. The modules after the features do not run.

    Attributes:
        backbone: The network.
        head: Maps features (n, d) to outputs (n, c).
        location: Where the features are.
        pool: How features become one vector.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, location: FeatureLocation, pool: Pool) -> None:
        super().__init__()
        self.backbone, self.head, self.location, self.pool = backbone, head, location, pool

    @property
    def wrapped_forward(self) -> Callable[..., Any]:
        """The forward whose arguments this forward takes. Data is bound to them."""
        return self.backbone.forward

    def features(self, *args: Any, **kwargs: Any) -> Tensor:
        """The features (n, d)."""
        raw = self.location.read(self.backbone, args, kwargs)
        return pool_features(raw, self.pool, find_mask(self.backbone.forward, args, kwargs), str(self.location))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.head(self.features(*args, **kwargs))

    def extra_repr(self) -> str:
        return f"features={str(self.location)!r}, pool={self.pool!r}"


def put_head(
    model: nn.Module, X: Any, readout: Readout, *, features: str | None = None, pool: Pool = "auto"
) -> nn.Module:
    """A copy of a network with a known head: the network that `attach_head` made, from the weights of its `Head`.

    Args:
        model: The trained network.
        X: Inputs; the first few show where the features are.
        readout: The head's weight and bias, and the meaning of its outputs.
        features: The same as for `attach_head`.
        pool: The same as for `attach_head`.

    Example:
        >>> from linnet.heads import Readout, attach_head, head_of, put_head
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
        >>> X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> head = head_of(attach_head(model, X, X[:, 0]))
        >>> weights = head.weight.detach().numpy(), head.bias.detach().numpy()
        >>> put_head(model, X[:2], Readout(*weights, head.task_, head.classes_, head.penalty_))(X).shape
        torch.Size([60, 1])
    """
    model = checks.check_module(model)
    check_pool(pool)
    return assemble(model, readout, locate(model, as_source(X, model.forward), features, pool))


def head_of(model: nn.Module) -> Head:
    """The head that `attach_head` has put into a network."""
    for module in model.modules():
        if isinstance(module, Head):
            return module
    raise ValueError(f"{type(model).__name__} has no head of linnet.attach_head.")


class FeatureReader(NetworkWithHead):
    """The network up to its features. Its one parameter lets linnet run it over data; the features ignore it."""

    def __init__(self, backbone: nn.Module, location: FeatureLocation, pool: Pool) -> None:
        super().__init__(backbone, nn.Identity(), location, pool)
        first = next(backbone.parameters())
        self.nothing = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device))


@dataclass(frozen=True)
class View:
    """What two examples show of a network."""

    reader: FeatureReader  # the network up to its features
    trace: Trace  # calls of the whole network
    example: Batch  # the examples
    sample: Tensor  # the features of the examples


def locate(model: nn.Module, source: Source, features: str | None, pool: Pool) -> View:
    """Find the features of a network on two examples; the reader shares the network's parameters."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters: there is no trained network to take features from."
        )
    example = next(iter(source.batches(min(2, source.n)))).to(first.device)
    try:
        seen = trace(model, example.args, example.kwargs)
    except (RuntimeError, TypeError) as error:
        inputs = leaves((example.args, example.kwargs), "the inputs")
        checks.explain_forward(error, inputs, dict(model.named_parameters()))
        raise
    location = find_location(model, seen) if features is None else parse_location(model, features)
    if location.name:
        location.check_called(seen)
    location.warn_if_not_at_end(seen)
    call = seen.calls_of(location.name)[0]
    is_output = location.side == "output"
    raw = seen.output if not location.name else call.output if is_output else next(iter(call.args), None)
    chosen = choose_pool(pool, raw, str(location), after=call.module if is_output else None)
    reader = FeatureReader(copy_sharing_parameters(model).eval(), location, chosen)
    with torch.no_grad():
        return View(reader, seen, example, reader(*example.args, **example.kwargs))


def assemble(model: nn.Module, readout: Readout, view: View) -> nn.Module:
    """A copy of the network with the head: in place of its last layer, or after the features. Its outputs are checked.

    The new network must give on the examples what the head gives on their features.
    """
    location, pool, sample = view.reader.location, view.reader.pool, view.sample
    head = Head(readout, str(location), dtype=sample.dtype, device=sample.device)
    new = copy.deepcopy(model)
    if location.name and location.side == "input" and pool == "none" and location.is_at_end(view.trace):
        old = new.get_submodule(location.name)
        for name, module in list(new.named_modules(remove_duplicate=False)):
            if module is old:
                new.set_submodule(name, head)
        _update_config(new, head)
    else:
        for name in location.find_later(view.trace):
            new.set_submodule(name, SkippedModule())
        new = NetworkWithHead(new, head, location, pool)
    new.eval()
    with torch.no_grad():
        expected = head(sample)
        got = checks.output_tensor(new(*view.example.args, **view.example.kwargs))
    tolerance = max(1e-6, 64 * torch.finfo(expected.dtype).eps)
    if got.shape != expected.shape or not checks.close(got, expected, tolerance):
        raise RuntimeError(
            f"With the new head, {type(new).__name__} does not compute the head of its features ({head.features_}). "
            "Name other features, such as features='output'."
        )
    return new


def _update_config(model: Any, head: Head) -> None:
    """Tell a Hugging Face model what its outputs are now: its loss depends on that."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_labels") and hasattr(model, "num_labels"):
        config.num_labels = model.num_labels = head.out_features
        several = "multi_label_classification" if head.out_features == 1 else "single_label_classification"
        kinds = {"regression": "regression", "multilabel": "multi_label_classification", "classification": several}
        config.problem_type = kinds[head.task_]


class SkippedModule(nn.Module):
    """Stands in place of a module that comes after the features."""

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return x


# Files.


def describe_head(model: nn.Module) -> dict[str, Any] | None:
    """Where the `Head` of a network is and what its outputs mean, as JSON; None for a network without one."""
    heads = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Head)}
    if not heads:
        return None
    head = next(iter(heads.values()))
    classes = None if head.classes_ is None else {"dtype": head.classes_.dtype.str, "labels": head.classes_.tolist()}
    found = {"shape": list(head.weight.shape), "task": head.task_, "features": head.features_, "classes": classes}
    if not isinstance(model, NetworkWithHead):
        return found | {"names": list(heads)}
    if callable(model.pool):
        raise TypeError("A file does not hold a pool= function of your own. Name one: 'spatial', 'tokens', 'cls', ...")
    skipped = [name for name, module in model.backbone.named_modules() if isinstance(module, SkippedModule)]
    place = {"name": model.location.name, "side": model.location.side, "pool": model.pool, "skipped": skipped}
    return found | {"place": place}


def restore_head(model: nn.Module, described: Mapping[str, Any]) -> nn.Module:
    """A copy of a network with the head that `describe_head` has described; the weights of the head are zero."""
    first = next(model.parameters())
    known = described["classes"]
    classes = None if known is None else np.array(known["labels"], dtype=known["dtype"])
    c, d = described["shape"]
    readout = Readout(np.zeros((c, d)), np.zeros(c), described["task"], classes, None)
    head = Head(readout, described["features"], dtype=first.dtype, device=first.device)
    new = copy.deepcopy(checks.check_module(model))
    if "place" not in described:
        for name in described["names"]:
            new.set_submodule(name, head)
        return new.eval()
    place = described["place"]
    for name in place["skipped"]:
        new.set_submodule(name, SkippedModule())
    return NetworkWithHead(new, head, FeatureLocation(place["name"], place["side"]), place["pool"]).eval()
