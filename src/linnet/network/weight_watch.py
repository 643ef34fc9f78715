"""The weights of a network as they were when they were linearized: every later change is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common.checksums import tensor_code, text_code
from linnet.network import checks

Code = tuple[str, tuple[int, ...], int]


class Watch:
    """Watches the parameters of a module and the buffers that belong to its state.

    PyTorch counts changes of a tensor, and the counts are compared in every pass. The counts miss changes made through
    ``p.data``, through other views, and modules that were replaced. So the bytes are compared too, wherever a network
    begins to be used and wherever its weights are written: that reads all weights once (`linnet._common.checksums`).

    Args:
        model: The module; its checksums are taken here.

    Attributes:
        model: The module.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> watch = Watch(model)
        >>> model.weight.data.mul_(2).shape
        torch.Size([1, 2])
        >>> watch.check(contents=True)
        Traceback (most recent call last):
        RuntimeError: Parameter 'weight' has changed since the model was linearized, ...
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._versions = {name: (t, t._version) for name, t in _weights(model)}
        self._codes = _codes(model)

    def check(self, *, contents: bool = False) -> None:
        """Raise if a tensor has changed, by the counts of changes, or by the bytes also where these have not moved."""
        for name, (t, version) in self._versions.items():
            if t._version != version:
                raise checks.changed_parameter(name, parameter=isinstance(t, nn.Parameter))
        if not contents:
            return
        now, parameters = _codes(self.model), dict(self.model.named_parameters())
        for name in self._codes | now:
            if self._codes.get(name) != now.get(name):
                raise checks.changed_parameter(name, parameter=name in parameters)

    @property
    def code(self) -> int:
        """One checksum of all weights and their names, from 0 to 2^63 - 1."""
        return text_code(list(self._codes.items()))

    def __getstate__(self) -> dict[str, Any]:
        # A copy's tensors count their changes anew.
        return {**self.__dict__, "_versions": {name: (t, t._version == v) for name, (t, v) in self._versions.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = {name: (t, t._version if same else -1) for name, (t, same) in state["_versions"].items()}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are part of the state: others, such as tables of positions, may grow."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for key, t in module._buffers.items():
            if t is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, t


def _codes(model: nn.Module) -> dict[str, Code]:
    """Dtype, shape and checksum of the bytes of each tensor; every device is waited for once."""
    tensors = dict(_weights(model))
    by_device: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        by_device.setdefault(t.device, []).append(name)
    found: dict[str, int] = {}
    with torch.no_grad():
        for names in by_device.values():
            found |= zip(names, torch.stack([tensor_code(tensors[name]) for name in names]).tolist(), strict=True)
    return {name: (str(t.dtype), tuple(t.shape), found[name]) for name, t in tensors.items()}
