"""How the command reads the outputs of a network: which of several outputs, and in which units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linnet._common import kind
from linnet.network import checks


@dataclass(frozen=True)
class NetworkOutput:
    """Which output of a network is read, and how its numbers become numbers in the units of the targets.

    A forward hook does both, so that the parameters keep their names and everything after the network sees the
    output in the units of the targets.
    """

    part: str | None = None  # position or name of the output, where the network returns several
    center: tuple[float, ...] | None = None  # mean of each target, where the network was trained on scaled targets
    spread: tuple[float, ...] | None = None  # standard deviation of each target

    def attach(self, network: nn.Module) -> nn.Module:
        """Make the network return this output in the units of the targets. Returns the network."""
        if self.part is not None or self.center is not None:
            network.register_forward_hook(self._read)
        return network

    def _read(self, network: nn.Module, inputs: Any, raw: Any) -> Any:
        value = raw if self.part is None else select_output(raw, self.part)
        if self.center is None or self.spread is None:
            return value
        value = checks.output_tensor(value)
        center, spread = (
            torch.tensor(numbers, dtype=value.dtype, device=value.device) for numbers in (self.center, self.spread)
        )
        if value.ndim > 1 and len(center) not in (1, value.shape[1]):
            raise ValueError(f"The network has {value.shape[1]} outputs, but the scaler has {len(center)} targets.")
        return value * spread + center if value.ndim > 1 else value * spread[0] + center[0]


def select_output(raw: Any, part: str) -> Tensor:
    """The output of a network at a position of a tuple, or of a name.

    >>> select_output((torch.zeros(2), torch.ones(2)), "1").tolist()
    [1.0, 1.0]
    """
    value = None
    if part.isdigit():
        parts = list(raw.values()) if isinstance(raw, Mapping) else list(raw) if isinstance(raw, Sequence) else []
        value = parts[int(part)] if int(part) < len(parts) else None
    elif isinstance(raw, Mapping):
        value = raw.get(part)
    else:
        value = getattr(raw, part, None)
    if not isinstance(value, Tensor):
        found = "no such output" if value is None else f"{kind(value)} there"
        raise ValueError(f"--output {part}: the network returns {describe_outputs(raw)}, and {found}.")
    return value


def describe_outputs(raw: Any) -> str:
    """What a network returns, in words.

    >>> describe_outputs((torch.zeros(2, 3), None)), describe_outputs({"score": torch.zeros(2)})
    ('a tuple of 2 parts: 0 (a tensor of shape (2, 3)), 1 (None)', 'a dict of 1 part: score (a tensor of shape (2,))')
    """
    if isinstance(raw, Mapping):
        parts: dict[Any, Any] = dict(raw)
    elif isinstance(raw, Sequence) and not isinstance(raw, str):
        parts = dict(enumerate(raw))
    else:
        return _describe(raw)
    shown = [f"{name} ({_describe(value)})" for name, value in parts.items()]
    count = f"{len(parts)} part{'' if len(parts) == 1 else 's'}"
    return f"{kind(raw)} of {count}: {', '.join(shown)}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else kind(value)
