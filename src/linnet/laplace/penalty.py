"""A Gaussian over the weights as a term of a loss: quadratic penalties for training that goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linnet._common import kind
from linnet.probability import Precision, precision_from

if TYPE_CHECKING:
    from linnet.network import Layout


class QuadraticPenalty(nn.Module):
    r""":math:`\tfrac12 (\theta - \theta_*)^\top H (\theta - \theta_*)`, of a network or of named tensors.

    The mean and the precision are buffers: ``to`` moves them to a device or a dtype, and ``state_dict`` holds them. A
    penalty of the same structure reads such a dict.

    Args:
        layout: Names and shapes of the parameters.
        mean: (p,), the mean of the Gaussian.
        precision: H.
        weight: Factor of the term.
        dtype: Dtype of mean and precision, float32 at least: that of the parameters.
    """

    mean: Tensor
    layout: Layout
    weight: float
    form: str
    _names: dict[str, str]

    def __init__(
        self, layout: Layout, mean: Tensor, precision: Precision, *, weight: float = 1.0, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is the factor of the penalty and must not be negative; got {weight!r}.")
        self.layout, self.weight, self.form = layout, float(weight), type(precision).__name__
        dtype = torch.promote_types(dtype, torch.float32)
        self.register_buffer("mean", mean.detach().to(dtype, copy=True))
        self._names = {}
        for name, tensor in precision.tensors().items():
            self._names[name] = f"precision_{name.replace('.', '_')}"  # names of buffers have no dots
            self.register_buffer(self._names[name], tensor.detach().to(dtype, copy=True))

    @property
    def precision(self) -> Precision:
        """H, as it stands in the buffers."""
        tensors = {name: getattr(self, buffer) for name, buffer in self._names.items()}
        return precision_from(self.form, tensors, layout=self.layout)

    def forward(self, network: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """The term, a number with a graph to the parameters.

        Args:
            network: A network with the parameters of the fit, or these parameters by name.
        """
        v = self._read(network) - self.mean
        return (0.5 * self.weight) * self.precision.quadratic(v)

    def _read(self, network: Any) -> Tensor:
        """The parameters as one vector (p,), in the dtype of the mean."""
        if isinstance(network, nn.Module):
            network = dict(network.named_parameters(remove_duplicate=False))
        if not isinstance(network, Mapping):
            raise TypeError(f"A penalty takes a network, or its parameters by name; got {kind(network)}.")
        parts = []
        for name, shape in self.layout.shapes.items():
            found = network.get(name)
            if found is None or found.shape != shape:
                what = "nothing of this name" if found is None else f"a tensor of shape {tuple(found.shape)}"
                raise ValueError(
                    f"The penalty is on {name} of shape {tuple(shape)}, and the network has {what}. Give the network "
                    "with the architecture of the fit, without a wrapper: wrapped.module, or its parameters by name."
                )
            parts.append(found.flatten().to(self.mean.device, self.mean.dtype))
        return torch.cat(parts)

    def extra_repr(self) -> str:
        return f"p={self.layout.p:,}, form={self.form}, weight={self.weight:g}"
