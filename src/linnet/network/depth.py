"""The blocks of a network from bottom to top, and the parameters of its top layers."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from linnet._common import messages
from linnet.network.call_trace import as_arguments, trace
from linnet.network.checks import check_module

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def has_fitted_head(model: nn.Module) -> bool:
    """Whether a part of the network was fitted to labels by `linnet.attach_head`: its module says so itself."""
    return any(getattr(module, "fitted_to_labels", False) is True for module in model.modules())


@dataclass(frozen=True)
class Block:
    """A module of a stack, or a layer; start and stop are the places of its first and last modules with parameters."""

    name: str
    start: int
    stop: int


def top_blocks(model: nn.Module, k: int, *, example: Any = None) -> list[str]:
    """The parameters of the last k blocks and of all that comes after them, as globs for ``params=``.

    Blocks are the repeated modules of the innermost stacks (residual blocks, transformer layers), through all stages.
    A network without such stacks is taken layer by layer: a layer with its norm is a block, and the last layer is the
    head, which comes after them all. So k = 0 is the head alone, with a final norm if there is one.

    Args:
        model: Any module.
        k: Number of blocks, from the top.
        example: A few inputs, as the model takes them (a tensor, a tuple, a dict of keywords). With an example, blocks
            have the order in which they are called, and modules that are not called are no part of the top. Without
            one, blocks have the order in which they were registered.

    Returns:
        Globs, bottom to top; they also match frozen parameters.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> top_blocks(nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 2)), 2)
        ['1.layers.1.*', '1.layers.2.*', '2.*']
        >>> top_blocks(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), 1)
        ['*']
    """
    model = check_module(model)
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise ValueError(f"The number of blocks must be 0, 1, 2, ...; got {k!r}.")
    order = _find_places(model, example)
    blocks, after = _find_blocks(model, order)
    if k > len(blocks):
        names = messages.listing([block.name for block in blocks])
        raise ValueError(
            f"The model has {len(blocks)} blocks below its head{f': {names}' if names else ''}. Ask for 0 to "
            f"{len(blocks)} of them, or choose parameters by name with params=; got {k}."
        )
    start = blocks[-k].start if k else after
    if start is None:
        raise ValueError(
            f"Nothing comes after the last block, {blocks[-1].name!r}, so 0 blocks leave no parameters. Ask for at "
            "least 1, or add a head with linnet.attach_head."
        )
    return _make_globs(model, {name for name, place in order.items() if place >= start})


def block_names(model: nn.Module, *, example: Any = None) -> list[str]:
    """The names of the blocks that `top_blocks` counts, bottom to top.

    Example:
        >>> block_names(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))
        ['0', '2']
    """
    model = check_module(model)
    return [block.name for block in _find_blocks(model, _find_places(model, example))[0]]


def _find_owners(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold floating parameters themselves, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(t is not None and t.is_floating_point() for t in module._parameters.values())
    }


def _find_places(model: nn.Module, example: Any) -> dict[str, int]:
    """The place of each module that holds parameters, by name; modules that a call does not reach are left out."""
    owners = _find_owners(model)
    if not owners:
        raise ValueError("The model has no floating parameters, so it has no blocks.")
    if example is None:
        return {name: i for i, name in enumerate(owners)}
    called = find_call_order(model, example)
    found = {}
    for name in owners:
        reached = name  # where the parent reads a module's parameters, the module has the place of the parent
        while reached and reached not in called:
            reached = reached.rpartition(".")[0]
        if reached or not name:
            found[name] = called[reached]
    # Calls that share a place (a parent read past its child) keep the order of registration.
    places = {name: i for i, name in enumerate(owners)}
    return {name: i for i, name in enumerate(sorted(found, key=lambda name: (found[name], places[name])))}


def find_call_order(model: nn.Module, example: Any) -> dict[str, int]:
    """The place in which each module is first called for an example, by name; other modules are left out.

    Example:
        >>> import torch
        >>> find_call_order(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.zeros(1, 2))
        {'': 0, '0': 1, '1': 2}
    """
    order: dict[str, int] = {}
    for call in trace(model, *as_arguments(example)).calls:
        order.setdefault(call.name, len(order))
    return order


def _find_blocks(model: nn.Module, order: Mapping[str, int]) -> tuple[list[Block], int | None]:
    """The blocks from bottom to top, and the place after the last block (None where nothing comes after it)."""
    found = []
    for name in _find_stacked(model):
        inside = [owner for owner in order if owner == name or owner.startswith(f"{name}.")]
        if inside:
            found.append(Block(name, min(order[owner] for owner in inside), max(order[owner] for owner in inside)))
    if not found:
        return _find_layers(model, order)
    found.sort(key=lambda block: block.start)
    after = max(block.stop for block in found) + 1
    return found, after if after < len(order) else None


def _find_stacked(model: nn.Module) -> list[str]:
    """Names of the modules that repeat in stacks; of modules in each other, the inner ones.

    Such a module contains modules and is no container itself. Its class stands at least twice in one container, or
    alone in several containers (stages of one block each).
    """
    inside = {
        name: {key: child for key, child in module.named_children() if _has_parameters(child)}
        for name, module in model.named_modules()
        if isinstance(module, CONTAINERS)
    }
    composite = {
        f"{name}.{key}" if name else key: type(child)
        for name, children in inside.items()
        for key, child in children.items()
        if not isinstance(child, CONTAINERS) and any(_has_parameters(m) for m in child.children())
    }
    repeated: set[type] = set()
    alone: Counter[type] = Counter()
    for children in inside.values():
        kinds = Counter(type(child) for child in children.values())
        repeated.update(kind for kind, count in kinds.items() if count > 1)
        if len(kinds) == 1:
            alone.update(kinds)
    repeated.update(kind for kind, count in alone.items() if count > 1)
    names = [name for name, kind in composite.items() if kind in repeated]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _find_layers(model: nn.Module, order: Mapping[str, int]) -> tuple[list[Block], int | None]:
    """Blocks of a network without stacks: a layer with a matrix and the norms after it. The last layer is the head."""
    modules = dict(model.named_modules())
    layers = {name: _find_layer(name, modules) for name in order}
    matrices = {
        layers[name]
        for name in order
        if any(t is not None and t.ndim > 1 for t in modules[name]._parameters.values())
        and not isinstance(modules[name], nn.LayerNorm | nn.RMSNorm)  # theirs may have the shape of an image
    }
    starts: dict[str, int] = {}
    for name in sorted(order, key=lambda name: order[name]):
        if layers[name] and layers[name] in matrices:
            starts.setdefault(layers[name], order[name])
    if not starts:
        return [], 0
    names, places = list(starts), list(starts.values())
    blocks = [Block(name, place, after - 1) for name, place, after in zip(names, places, places[1:], strict=False)]
    return blocks, places[-1]


def _find_layer(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The layer that a module with parameters belongs to: mostly the module itself."""
    whole = name.partition(".parametrizations.")[0]
    parent = whole.rpartition(".")[0]
    return parent if isinstance(modules[parent], nn.MultiheadAttention) else whole


def _has_parameters(module: nn.Module) -> bool:
    return any(t.is_floating_point() for t in module.parameters())


def _make_globs(model: nn.Module, chosen: set[str]) -> list[str]:
    """Globs for the parameters of the chosen modules; one glob for a module where everything in it is chosen."""
    owners = _find_owners(model)

    def of(name: str, module: nn.Module) -> list[str]:
        inside = {owner for owner in owners if not name or owner == name or owner.startswith(f"{name}.")}
        if not inside & chosen:
            return []
        prefix = f"{name}." if name else ""
        if inside <= chosen:
            return [f"{glob.escape(prefix)}*"]
        own = [f"{prefix}{key}" for key, t in module._parameters.items() if t is not None and t.is_floating_point()]
        parts = [of(f"{prefix}{key}", child) for key, child in module.named_children()]
        return (own if name in chosen else []) + [part for found in parts for part in found]

    return of("", model)
