"""The selection of parameters, and the layout of their named tensors in one flat vector of length p."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from linnet.network import checks

LAST_LAYER = "last_layer"
"""Value of ``params=`` for the parameters of the last layer."""

Params = str | Sequence[str] | Callable[[str, Tensor], bool] | None


def select(model: nn.Module, params: Params = None) -> dict[str, Tensor]:
    """The selected parameters of a model by name, in the order of ``model.named_parameters()``.

    A tied parameter appears once, under its first name; a glob may use any of its names.

    Args:
        model: Any module. Its parameters share one device; of a model with a ``device_map``, the selected parameters
            do.
        params: ``None`` for every floating parameter that requires a gradient; a glob over full names such
            as ``"layer4.*"``, or several globs (these also select frozen parameters; ``*`` crosses dots);
            ``"last_layer"`` for the last layer with a weight matrix, in the order in which layers were registered; or
            a callable ``(name, tensor) -> bool``, asked about every floating parameter.

    Returns:
        The model's own ``nn.Parameter`` objects, not copies.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> list(select(model))
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> list(select(model, "2.*"))
        ['2.weight', '2.bias']
        >>> list(select(model, lambda name, tensor: tensor.ndim == 2))
        ['0.weight', '2.weight']
        >>> list(select(model, "last_layer"))
        ['2.weight', '2.bias']
    """
    model = checks.check_module(model)
    checks.check_params_argument(params)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    checks.check_materialized(parameters)
    floating = {name: tensor for name, tensor in parameters.items() if tensor.is_floating_point()}

    if params is None:
        selected = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        checks.check_not_complex(selected)
    elif callable(params):
        selected = {name: tensor for name, tensor in floating.items() if params(name, tensor)}
    elif params == LAST_LAYER and LAST_LAYER not in floating:
        layer = _find_last_layer(model)
        own = {id(tensor) for tensor in layer.parameters(recurse=False)}
        selected = {name: tensor for name, tensor in floating.items() if id(tensor) in own}
    else:
        chosen = _match_globs(model, floating, [params] if isinstance(params, str) else list(params))
        selected = {name: tensor for name, tensor in floating.items() if name in chosen}

    checks.check_selected(selected, parameters)
    dispatched = any(hasattr(module, "_hf_hook") for module in model.modules())  # by accelerate
    checks.check_devices(parameters, selected, dispatched=dispatched)
    return selected


def _find_last_layer(model: nn.Module) -> nn.Module:
    """The module registered last that holds a floating parameter of two or more axes, which no norm does."""
    layers = [
        module
        for module in model.modules()
        if any(t.is_floating_point() and t.ndim > 1 for t in module.parameters(recurse=False))
    ]
    if not layers:
        raise ValueError("params='last_layer' needs a layer with a weight matrix, and the model has none. Name others.")
    return layers[-1]


def _match_globs(model: nn.Module, floating: Mapping[str, Tensor], globs: Sequence[str]) -> set[str]:
    """First names of the parameters that any of the globs matches under any of their names."""
    first = {id(tensor): name for name, tensor in floating.items()}
    aliases = {
        alias: first[id(tensor)]
        for alias, tensor in model.named_parameters(remove_duplicate=False)
        if id(tensor) in first
    }
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    chosen: set[str] = set()
    for glob in globs:
        # A full name is meant as it is, also where it contains a bracket (ParameterDict keys).
        matched = [glob] if glob in aliases else [alias for alias in aliases if fnmatchcase(alias, glob)]
        checks.check_glob_matched(glob, matched, list(aliases), modules)
        chosen.update(aliases[alias] for alias in matched)
    return chosen


@dataclass(frozen=True, init=False)
class Layout:
    """Where named tensors lie in one flat vector: in their order, each flattened row by row.

    A layout holds names and shapes, and no data. Two layouts are equal when names, order and shapes are equal.

    Args:
        tensors: The named tensors whose order and shapes the layout takes.

    Attributes:
        names: The names in order.
        shapes: Name to shape.
        offsets: Name to the position of its first entry.
        slices: Name to its slice of the flat vector.
        layers: Layer name to the names of its parameters. The layer is everything before the last dot; a
            parameter of the root module is its own layer.
        p: The length of the flat vector.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> layout = Layout(select(model))
        >>> layout.p, layout.slices["2.weight"], layout.layers["2"]
        (13, slice(9, 12, None), ['2.weight', '2.bias'])
        >>> vector = layout.flatten(select(model))
        >>> vector.shape, layout.unflatten(vector)["0.weight"].shape
        (torch.Size([13]), torch.Size([3, 2]))
    """

    names: tuple[str, ...]
    shapes: dict[str, torch.Size] = field(hash=False)
    offsets: dict[str, int] = field(compare=False, repr=False)
    slices: dict[str, slice] = field(compare=False, repr=False)
    layers: dict[str, list[str]] = field(compare=False, repr=False)
    p: int = field(compare=False)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        checks.check_not_empty(tensors)
        offsets: dict[str, int] = {}
        slices: dict[str, slice] = {}
        layers: dict[str, list[str]] = {}
        p = 0
        for name, tensor in tensors.items():
            offsets[name] = p
            slices[name] = slice(p, p + tensor.numel())
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
            p += tensor.numel()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        values = {
            "names": tuple(shapes),
            "shapes": shapes,
            "offsets": offsets,
            "slices": slices,
            "layers": layers,
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "p", p)

    def flatten(self, tree: Mapping[str, Tensor]) -> Tensor:
        """One vector (p,) from named tensors, or (p, k) when each carries one trailing axis k.

        Tensors of several dtypes give a vector of the dtype that holds them all.

        Args:
            tree: A tensor for every name, in any order: all of the layout's shapes, or all ``(*shape, k)``.

        Example:
            >>> import torch
            >>> layout = Layout({"a": torch.zeros(2, 2), "b": torch.zeros(())})
            >>> layout.flatten({"b": torch.ones(()), "a": torch.zeros(2, 2)})
            tensor([0., 0., 0., 0., 1.])
            >>> layout.flatten({"a": torch.zeros(2, 2, 7), "b": torch.zeros(7)}).shape
            torch.Size([5, 7])
        """
        checks.check_tree(tree, self.shapes)
        first = self.names[0]
        columns = tree[first].shape[len(self.shapes[first]) :]
        return torch.cat([tree[name].reshape(self.shapes[name].numel(), *columns) for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named tensors from a vector (p,), or with a trailing axis k from (p, k); views where possible.

        Args:
            vector: Shape (p,) or (p, k).

        Example:
            >>> import torch
            >>> layout = Layout({"a": torch.zeros(2, 2), "b": torch.zeros(())})
            >>> layout.unflatten(torch.arange(5))["a"].tolist()
            [[0, 1], [2, 3]]
            >>> layout.unflatten(torch.zeros(5, 7))["b"].shape
            torch.Size([7])
        """
        checks.check_flat(vector, self.p)
        columns = vector.shape[1:]
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.reshape(shape + columns) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
