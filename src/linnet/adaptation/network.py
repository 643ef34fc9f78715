"""The network of an adapted estimator, and how a file describes the network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from linnet.heads import describe_head, restore_head
from linnet.network import output_matrix, output_tensor
from linnet.probability import Likelihood

SPREAD = 0.5
"""Standard deviation of the prior of a log temperature: a calm temperature against a quick one, with few labels."""


class ScaledNetwork(nn.Module):
    """A network whose outputs are divided by a number, the temperature.

    Attributes:
        network: The network.
        temperature: A number that logits are divided by; above one it makes probabilities less certain.

    Example:
        >>> ScaledNetwork(nn.Identity(), 2.0)(torch.tensor([[1.0, 4.0]]))
        tensor([[0.5000, 2.0000]])
    """

    temperature: Tensor

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network = network
        first = next(network.parameters(), torch.zeros(()))
        self.register_buffer("temperature", torch.tensor(temperature, dtype=first.dtype, device=first.device))

    @property
    def wrapped_forward(self) -> Callable[..., Any]:
        """The forward whose arguments this forward takes. Data is bound to them."""
        return self.network.forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return output_tensor(self.network(*args, **kwargs)) / self.temperature


def divide_outputs(network: nn.Module, temperature: float) -> ScaledNetwork:
    """The network with its outputs divided by a temperature; a temperature that it has already is multiplied."""
    if isinstance(network, ScaledNetwork):
        return ScaledNetwork(network.network, temperature * float(network.temperature)).eval()
    return ScaledNetwork(network, temperature).eval()


def find_temperature(likelihood: Likelihood, f: Tensor, y: Tensor, *, least: float = 0.1) -> float:
    """The number up to 100 by which outputs f (n, c) are divided so that targets are likeliest.

    The logarithm of the temperature has a normal prior of mean zero, so that few targets leave the temperature near
    one.

    Args:
        likelihood: Of the targets.
        f: Outputs.
        y: Targets.
        least: The least temperature that may be. One, where the same targets have chosen the network: they are easier
            for this network than others, and so no reason for more certainty.

    >>> from linnet.likelihoods import Bernoulli
    >>> f, y = torch.full((4, 1), 3.0), torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    >>> round(find_temperature(Bernoulli(), f.repeat(1000, 1), y.repeat(1000, 1)), 1)  # 3 / log(3)
    2.7
    >>> find_temperature(Bernoulli(), f, y) < 2.7
    True
    """

    def loss(log: float) -> float:
        return 0.5 * (log / SPREAD) ** 2 - float(likelihood.log_prob(f / math.exp(log), y).sum())

    bounds = (math.log(least), math.log(100.0))
    return math.exp(float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4}).x))


def evaluate(network: nn.Module, source: Any, size: int = 256) -> Tensor:
    """Outputs (n, c) of a network for all examples of a source, in float64."""
    first = next(network.parameters())
    with torch.no_grad():
        return torch.cat([call(network, batch, first) for batch in source.batches(size)]).double()


def call(network: nn.Module, batch: Any, first: Tensor) -> Tensor:
    """Outputs (n, c) of a batch, whose numbers get the dtype and the device of a parameter."""
    batch = batch.to(first.device).with_inputs(lambda t: t.to(first.dtype) if t.is_floating_point() else t)
    return output_matrix(output_tensor(network(*batch.args, **batch.kwargs)), batch.n)


# Files.


def describe(network: nn.Module, *, with_weights: bool) -> dict[str, Any]:
    """What a file holds, as JSON, of a network that was made from the user's own."""
    scaled = isinstance(network, ScaledNetwork)
    inner = network.network if isinstance(network, ScaledNetwork) else network
    return {
        "scaled": scaled,
        "temperature": float(network.temperature) if isinstance(network, ScaledNetwork) else 1.0,
        "head": describe_head(inner),
        "with_weights": with_weights,
    }


def restore(model: nn.Module, described: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The network that `describe` has described, from the user's own network and the weights in the file.

    Args:
        model: The user's network. A copy is changed where the file holds weights.
        described: What `describe` gave.
        weights: Parameters and buffers of the network, where the file holds them.
    """
    if described["head"] is not None:
        model = restore_head(model, described["head"])
    elif described["with_weights"]:
        model = copy.deepcopy(model)
    network = ScaledNetwork(model, described["temperature"]) if described["scaled"] else model
    if described["with_weights"]:
        network.load_state_dict(weights)
    return network.eval() if described["with_weights"] or described["scaled"] else network
